"""Choice of the cuts of a module by what they are worth: linear probes at many places, and simulated early exits."""

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from exitwise.core.checks import check_integer, check_number
from exitwise.core.errors import InputError
from exitwise.core.nested import first_sample
from exitwise.core.predictions import Array
from exitwise.core.seeds import derive_generator
from exitwise.models.attach.attach import attach
from exitwise.models.input_batches import validated_batches
from exitwise.models.macs import macs
from exitwise.models.net import MultiExitNet
from exitwise.policies.cutoff_search import CutoffSearch
from exitwise.training.batch_sources import as_eval_loader
from exitwise.training.heads import train_heads

_BATCH_SIZE = 64
_DEFAULT_BUDGETS = 8  # evenly spaced
_LARGEST_BUDGET = 0.8  # of the module's cost
_MIN_GAIN = 1e-9  # of a mean accuracy; sums of floats differ in the last bits


@dataclass(frozen=True)
class CutCandidate:
    """A place where a module can be cut.

    Args:
        name: Name of the submodule before the cut.
        cost: MACs of one sample up to the cut.
        top1: Accuracy of the linear probe there.
    """

    name: str
    cost: float
    top1: float


@dataclass(frozen=True)
class BestCuts:
    """Result of `best_cuts`.

    Args:
        names: Submodules to cut after, in the order in which they run.
        top1: Their accuracy with simulated early exits, mean over the budgets.
        equal_cost: Names that `attach` chooses with `at="auto"`.
        equal_cost_top1: Their accuracy, in the same way.
        candidates: All places that were compared, in the order in which they run.
        budgets: Mean costs of a sample, in MACs.
        samples: Number of samples of the simulation.
    """

    names: tuple[str, ...]
    top1: float
    equal_cost: tuple[str, ...]
    equal_cost_top1: float
    candidates: tuple[CutCandidate, ...]
    budgets: tuple[float, ...]
    samples: int

    def __str__(self) -> str:
        lines = ["    MACs up to it   probe %  cut after"]
        for candidate in self.candidates:
            mark = "*" if candidate.name in self.names else "=" if candidate.name in self.equal_cost else " "
            lines.append(f"{mark} {candidate.cost:15.3g}  {100 * candidate.top1:8.2f}  {candidate.name}")
        lines.append(
            f"* chosen: top-1 {100 * self.top1:.2f} % over {len(self.budgets)} budgets; "
            f"cuts of equal cost: {100 * self.equal_cost_top1:.2f} % ({', '.join(self.equal_cost)})"
        )
        return "\n".join(lines)


def best_cuts(
    module: nn.Module,
    train: Any,
    val: Any,
    *,
    exits: int,
    budgets: Sequence[float] | None = None,
    candidates: int = 12,
    num_classes: int | None = None,
    example_inputs: Any = None,
    samples: int = 5000,
    epochs: int = 10,
    seed: int = 0,
) -> BestCuts:
    """Choose where to attach exits to a trained module, by the accuracy that they will give at some budgets.

    The module is cut at many places of about equal cost, and runs once over some samples. A linear probe is trained on
    the pooled features of each place. Early exits by the probes' confidence are then simulated: starting from cuts of
    equal cost, single cuts are exchanged as long as the accuracy, averaged over the budgets, improves.

    Args:
        module: The original module in evaluation mode.
        train: Samples to train the probes on: as for `train_heads`.
        val: Samples for the simulation.
        exits: Number of exits, K: there are K - 1 cuts.
        budgets: Mean costs of a sample in MACs. Cuts are worth nothing at a budget below the cost of their first exit.
            By default eight, from the first exit of equal cost to 80 % of the module's cost.
        candidates: Number of places to compare; fewer if the module has fewer.
        num_classes: As for `attach`.
        example_inputs: As for `attach`.
        samples: Largest number of samples of each dataset; of a loader, all are used.
        epochs: Number of epochs of the probes.
        seed: Seed for the choice of samples and for the probes.

    Returns:
        The names of the cuts, for `attach(module, list(names))`, beside those of equal cost.

    Raises:
        InputError: An argument is invalid, or the module cannot be cut.

    Example:
        >>> import exitwise as ew
        >>> import torch
        >>> samples = torch.utils.data.TensorDataset(torch.rand(60, 3, 32, 32), torch.arange(60) % 100)
        >>> module = ew.models.resnet("cifar100-resnet8").eval()
        >>> cuts = ew.best_cuts(module, samples, samples, exits=3, candidates=4, epochs=1)
        >>> len(cuts.names), len(ew.attach(module, list(cuts.names)).exits)
        (2, 3)
    """
    check_integer("candidates", candidates, 1)
    check_integer("samples", samples, 2)
    equal_cost = attach(module, "auto", num_classes, "linear", exits=exits, example_inputs=example_inputs).cuts or ()
    probes = _attach_probes(module, max(candidates, exits - 1), exits, num_classes, example_inputs, equal_cost)
    names = probes.cuts or ()
    train, val = (_take_samples(part, samples, seed) for part in (train, val))
    train_heads(probes, train, val, epochs=epochs, seed=seed)
    confidence, correct, inputs = _run_probes(probes, val)
    body, heads = _split_costs(probes, inputs)
    start = [names.index(name) for name in equal_cost]
    if budgets is None:
        cheapest = body[start[0]] + heads[start[0]]
        budgets = np.linspace(cheapest, max(cheapest, _LARGEST_BUDGET * body[-1]), _DEFAULT_BUDGETS).tolist()
    budgets = tuple(check_number("budgets", budget, 0) for budget in budgets)
    if not budgets:
        raise InputError("`budgets` must hold at least one budget")

    def value_of(cuts: Sequence[int]) -> float:
        rows = [*cuts, len(names)]
        costs = np.array([body[k] + sum(heads[j] for j in cuts if j <= k) for k in rows])
        return simulate(confidence[rows], correct[rows], costs, budgets)

    chosen, value = exchange(start, len(names), value_of)
    return BestCuts(
        tuple(names[k] for k in chosen),
        value,
        tuple(equal_cost),
        value_of(start),
        tuple(CutCandidate(*row) for row in zip(names, body, correct.mean(1).tolist(), strict=False)),
        budgets,
        correct.shape[1],
    )


def simulate(confidence: Array, correct: Array, costs: Array, budgets: Iterable[float]) -> float:
    """Return the accuracy of early exits at budgets, averaged over them; a budget below the first exit's cost counts 0.

    Args:
        confidence: Confidences (K, n).
        correct: Mask (K, n) of correct predictions.
        costs: Cumulative costs (K,).
        budgets: Mean costs.
    """
    search = CutoffSearch(confidence, costs, {"labels": correct.astype(np.float64)})
    values = [
        search.mean_value("labels", search.find_cutoffs("smoothed", budget)) if budget >= costs[0] else 0.0
        for budget in budgets
    ]
    return float(np.mean(values))


def exchange(start: Sequence[int], places: int, value_of: Callable[[Sequence[int]], float]) -> tuple[list[int], float]:
    """Exchange single members of a sorted set of places for others while its value grows; return set and value."""
    best, value = list(start), value_of(start)
    improved = True
    while improved:
        improved = False
        for old in tuple(best):
            rest = [k for k in best if k != old]
            values = {k: value_of(sorted((*rest, k))) for k in range(places) if k not in best}
            new = max(values, key=values.__getitem__, default=old)
            if values.get(new, value) > value + _MIN_GAIN:
                best, value, improved = sorted((*rest, new)), values[new], True
    return best, value


def _attach_probes(
    module: nn.Module, places: int, exits: int, classes: int | None, example: Any, equal_cost: Sequence[str]
) -> MultiExitNet:
    """Attach linear probes at about so many places of equal cost, and at those of `equal_cost`."""
    for count in range(places, exits - 1, -1):
        try:
            names = attach(module, "auto", classes, "linear", exits=count + 1, example_inputs=example).cuts or ()
            return attach(module, list(dict.fromkeys((*names, *equal_cost))), classes, "linear", example_inputs=example)
        except InputError:  # fewer places, or one of them cannot be cut: cuts of equal cost were possible
            continue
    return attach(module, list(equal_cost), classes, "linear", example_inputs=example)


def _take_samples(samples: Any, count: int, seed: int) -> Any:
    """Return `count` random samples of a dataset; a smaller dataset or a loader unchanged."""
    if not isinstance(samples, Sized) or len(samples) <= count:
        return samples
    positions = torch.randperm(len(samples), generator=derive_generator(seed, len(samples)))[:count]
    if hasattr(samples, "pixels_of"):
        images: Any = samples
        return images[positions]
    return Subset(samples, positions.tolist()) if isinstance(samples, Dataset) else samples


@torch.no_grad()
def _run_probes(net: MultiExitNet, val: Any) -> tuple[Array, Array, Any]:
    """Return confidences (K, n) and correctness (K, n) of all exits, and the inputs of one batch."""
    confidence, correct, inputs = [], [], None
    for inputs, labels, _ in validated_batches(net, as_eval_loader(val, _BATCH_SIZE), "val", None):
        probs = torch.stack([logits.softmax(1).cpu() for logits in net(inputs)])
        confidence.append(probs.amax(2).numpy())
        correct.append((probs.argmax(2) == labels).numpy())
    return np.concatenate(confidence, axis=1), np.concatenate(correct, axis=1), inputs


def _split_costs(net: MultiExitNet, inputs: Any) -> tuple[list[float], list[float]]:
    """Return MACs of one sample: up to each cut without heads, and to the end (K,), and of each new head (K - 1,)."""
    sample = first_sample(inputs)
    together = macs(net, example_inputs=sample)
    alone = [  # each exit without the heads before it
        macs(MultiExitNet([nn.Sequential(*net.stages[: k + 1])], [head]), example_inputs=sample)[0]
        for k, head in enumerate(net.exits)
    ]
    body = [alone[k + 1] - later + earlier for k, (earlier, later) in enumerate(pairwise(together))]
    heads = [float(exit_cost - cost) for exit_cost, cost in zip(alone, body, strict=False)]
    return [*map(float, body), float(alone[-1])], heads
