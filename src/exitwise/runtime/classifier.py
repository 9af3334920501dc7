"""The runtime in torch: a net that stops early on its own."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from exitwise import models
from exitwise.calibration.calibration import Calibration
from exitwise.core import nested, tensorfiles
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.predictions import NEEDS_DRAWS
from exitwise.core.preprocessing import Preprocessing
from exitwise.models.macs import macs
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import check_state_dict
from exitwise.policies.controller import BudgetController
from exitwise.policies.policy import Policy
from exitwise.runtime import engine, folding
from exitwise.runtime.engine import Answer, Prediction
from exitwise.runtime.exit_modules import runtime_exits
from exitwise.runtime.export import export
from exitwise.runtime.torch_backend import SharedEvalMode, TorchBackend

FORMAT, VERSION = "exitwise.classifier", 1


class Classifier(nn.Module):
    """A net that stops early: calibrated probabilities at each exit, and only survivors go on to the next stage.

    For inference only. The net is used as it is, in evaluation mode while images are in it; its own mode is left as it
    was. Images are a float tensor (n, ...) as the net takes it or, where the `preprocessing` is known, bytes
    (n, channels, height, width). `costs` (K,) are what leaving at each exit costs: the policy's own unless given, else
    they are counted in MACs. Several threads may share a classifier.
    """

    def __init__(
        self,
        net: MultiExitNet,
        calibration: Calibration,
        policy: Policy,
        *,
        costs: Costs | Sequence[float] | None = None,
        classes: Sequence[str] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        super().__init__()
        kinds: tuple[tuple[str, Any, type], ...] = (
            ("net", net, MultiExitNet),
            ("calibration", calibration, Calibration),
            ("policy", policy, Policy),
        )
        for name, value, kind in kinds:
            if not isinstance(value, kind):
                raise InputError(f"`{name}` must be a {kind.__name__}, but got {type(value).__name__}")
        _check_heads(net, calibration)
        if len(policy.thresholds) != len(net.stages):
            raise InputError(
                f"`policy` must have {len(net.stages)} thresholds, one per exit, but has {len(policy.thresholds)}"
            )
        if policy.score == "variance" and not calibration.method.has_variance:
            raise InputError(f"a policy on the variance {NEEDS_DRAWS}")
        if classes is not None and len(classes) != net.num_classes:
            raise InputError(f"`classes` must name the net's {net.num_classes} classes, but names {len(classes)}")
        if preprocessing is not None and not isinstance(preprocessing, Preprocessing):
            raise InputError(f"`preprocessing` must be a Preprocessing, but got {type(preprocessing).__name__}")
        self.net = net
        self.exits = nn.ModuleList(runtime_exits(calibration, policy.score == "variance"))
        self.exits.to(next(net.parameters()).device)
        self.calibration = calibration
        self.policy = policy
        self.classes = None if classes is None else tuple(classes)
        self.preprocessing = preprocessing
        self.optimized = False
        self.costs = _known_costs(costs, policy)
        self._counted: Sequence[MultiExitNet] = (net,)  # whose MACs are counted; in a tuple, so that it is no submodule
        self._evaluating = SharedEvalMode(net)

    def forward(self, images: Any) -> Prediction:
        """Run images (n, ...) stage by stage, letting samples go, until nobody is left; the result is on the CPU."""
        found = engine.classify(self.backend(), self.policy, images)
        probs, predicted, exits, costs = map(torch.from_numpy, found)
        return Prediction(probs, predicted, exits, costs, self.policy.unit)

    def stream(
        self,
        images: Iterable[Any],
        batch_size: int = 64,
        window: int | None = None,
        pooled: bool = True,
        controller: BudgetController | None = None,
    ) -> Iterator[Answer]:
        """Answers for single images, in their order, from any iterable; deep stages run on full batches.

        An image has the shape of one sample, (channels, height, width) for most nets, and its answer probs (c,).
        Survivors of a batch wait until `batch_size` of them, or 64 if that is more, have come together. Answers fall at
        most `window` images behind (64 such batches unless given), which bounds the memory. What cannot be classified
        becomes an `Answer` with an `error`: no exception and no gap. `pooled=False` runs every batch to its end. A
        `controller` keeps the stream at its budget, batch by batch and without pooling.
        """
        return engine.stream(self.backend(), self.policy, images, batch_size, window, pooled, controller)

    def backend(self) -> TorchBackend:
        """What runs its stages, for one call."""
        return TorchBackend(
            self.net, self.exits, self._evaluating, self.preprocessing, self.costs_of, channels_last=self.optimized
        )

    def optimize(self) -> Self:
        """Make it quicker on a CPU, in place: BatchNorm folded into convolutions, channels-last memory.

        It works on a copy of the net. Probabilities then differ in the last bits, so that a sample whose score lies
        on a threshold may leave at another exit.
        """
        if not self.optimized:
            if self.costs is None:
                self._counted = (copy.deepcopy(self.net).to("meta"),)
            self.net, self.optimized = folding.optimize_for_cpu(self.net), True
            self._evaluating = SharedEvalMode(self.net)
        return self

    def costs_of(self, images: Any) -> Costs:
        """What leaving at each of K exits costs; MACs are counted for images (n, ...) where nothing else is known."""
        if self.costs is None:
            try:
                self.costs = Costs.of(macs(self._counted[0], example_inputs=nested.first_sample(images)))
            except InputError as error:
                raise InputError(f"{error}; give `costs` to do without counting") from None
        return self.costs

    def save(self, path: str | Path) -> None:
        """Everything in one file: weights, calibration, policy, classes, preprocessing."""
        tensors, about = self.calibration.to_tensors()
        tensors = {f"calibration.{key}": value for key, value in tensors.items()}
        tensors |= {f"net.{key}": value for key, value in self.net.state_dict().items()}
        metadata = {
            "model": self.net.spec,
            "calibration": about,
            "policy": self.policy.to_dict(),
            "costs": None if self.costs is None else list(self.costs.values),
            "classes": None if self.classes is None else list(self.classes),
            "preprocessing": None if self.preprocessing is None else self.preprocessing.to_dict(),
            "optimized": self.optimized,
        }
        tensorfiles.write(Path(path), tensors, FORMAT, VERSION, metadata)

    @classmethod
    def load(cls, path: str | Path, net: MultiExitNet | None = None) -> "Classifier":
        """Read and check what `save` wrote. The net is rebuilt by its preset; one of your own is given as `net`.

        The file's weights are loaded into a given net, unless it was saved optimized: then into a copy of it.
        """
        path = Path(path)
        return tensorfiles.load(path, FORMAT, VERSION, lambda tensors, about: cls._from_tensors(tensors, about, net))

    @classmethod
    def _from_tensors(
        cls, tensors: Mapping[str, Tensor], about: Mapping[str, Any], own: MultiExitNet | None
    ) -> "Classifier":
        calibration = Calibration.from_tensors(_under("calibration.", tensors), about["calibration"])
        policy = Policy.from_dict(about["policy"])
        optimized, spec, weights = about["optimized"], about["model"], _under("net.", tensors)
        if not isinstance(optimized, bool):
            raise InputError(f"optimized must be true or false, but is {optimized!r}")
        if own is None and not isinstance(spec, dict):
            raise InputError("its net has no preset to be rebuilt by: give it as `net`")
        if own is None:
            with torch.device("meta"):  # a header can ask for anything: nothing is allocated before its weights fit
                plan = models.rebuild(spec)
            check_state_dict(folding.optimize_for_cpu(plan) if optimized else plan, weights, "its net")
        net = models.rebuild(spec).eval() if own is None else own
        net = folding.optimize_for_cpu(net) if optimized else net
        check_state_dict(net, weights, "its net")
        net.load_state_dict(weights)
        preprocessing = about["preprocessing"]
        made = cls(
            net,
            calibration,
            policy,
            costs=None if about["costs"] is None else Costs(about["costs"], policy.unit),
            classes=about["classes"],
            preprocessing=None if preprocessing is None else Preprocessing.from_dict(preprocessing),
        )
        made.optimized = optimized
        return made

    def export(self, path: str | Path, example: Any = None, force: bool = False) -> None:
        """Write an ONNX bundle to a folder: a graph per stage with its calibrated exit, and a manifest.

        `exitwise.runtime.onnx.Session` runs it without torch. The shape of an image is that of the preprocessing or of
        the net's preset; a classifier that knows neither needs a batch of what it takes as `example`, a tensor (n, ...)
        or a dict or tuple of several. An existing bundle is replaced only with `force`. Needs `exitwise[onnx]`.
        """
        export(self, path, example, force)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _check_heads(net: MultiExitNet, calibration: Calibration) -> None:
    """Refuse a calibration that was made for other last layers."""
    if len(calibration.exits) != len(net.exits):
        raise InputError(
            f"`calibration` must have {len(net.exits)} exits as the net has, but has {len(calibration.exits)}"
        )
    for k, (mine, its) in enumerate(zip(net.exits, calibration.exits, strict=True)):
        if not _same(mine.last.weight, its.head.weight) or not _same(mine.last.bias, its.head.bias):
            raise InputError(f"`calibration` is of another net: the last layer of exit {k} has other weights")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a.float().cpu(), b))


def _known_costs(costs: Costs | Sequence[float] | None, policy: Policy) -> Costs | None:
    given = policy.costs if costs is None else costs
    if given is None:
        if policy.unit != "MACs":
            raise InputError(f"the policy is in {policy.unit} and does not say what exits cost: give `costs`")
        return None
    found = given if isinstance(given, Costs) else Costs(tuple(given), policy.unit)
    if found.unit != policy.unit or len(found) != len(policy.thresholds):
        raise InputError(
            f"`costs` must be {len(policy.thresholds)} values in {policy.unit} as the policy's, "
            f"but are {len(found)} in {found.unit}"
        )
    return found
