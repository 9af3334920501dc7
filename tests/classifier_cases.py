"""Small classifiers, and the simulated results for them."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import exitwise as ew
from exitwise.core.predictions import Predictions
from exitwise.models.net import preserve_training_mode
from exitwise.policies.scores import exit_scores

VANILLA = "MSDNet (vanilla)"


LAPLACE = "Laplace T_opt"


OURS = "MIE Laplace T_opt sigma_opt"


SHAPE = (1, 8, 8)


SIZES = (1, 2, 3, 17, 64, 255, 257)


NEAR = 1e-5  # a score that lies so near to its threshold may fall on either side


BYTES = ew.Preprocessing(8, (0.4,), (0.25,))


def pictures(n: int, shape: tuple[int, ...], classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise in which a pattern of the class is more or less plain to see."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    patterns = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(97))
    strength = torch.rand(n, *[1 for _ in shape], generator=generator)
    return patterns[labels] * strength + 0.7 * torch.randn(n, *shape, generator=generator), labels


def fitted(net: ew.MultiExitNet, images: Callable[[int, int], tuple[Any, Tensor]], **collecting: Any) -> ew.Trace:
    """Fit the last layers of a net to its features, and give its BatchNorms statistics; `images(n, seed)` makes inputs.

    An untrained net says nearly the same of every picture, and no threshold would tell them apart.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                for tensor, scale, shift in ((module.running_mean, 0.1, 0.0), (module.running_var, 0.2, 1.0)):
                    if tensor is not None:
                        tensor.copy_(torch.randn_like(tensor).clamp(-2, 2) * scale + shift)
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0.0, 0.1)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        train, labels = images(500, 1)
        with preserve_training_mode(net):
            features = net.eval().features(train)
        for head, x in zip(net.exits, features, strict=True):
            phi = x if head.last.bias is None else torch.cat([x, torch.ones(len(x), 1)], dim=1)
            target = nn.functional.one_hot(labels, net.num_classes).double() * 10
            # Not by `lstsq`: where a feature is zero for all pictures, what it gives differs from call to call.
            gram = phi.T.double() @ phi.double() + torch.eye(phi.shape[1])
            solution = torch.linalg.solve(gram, phi.T.double() @ target).T
            head.last.weight.copy_(solution[:, : x.shape[1]])
            if head.last.bias is not None:
                head.last.bias.copy_(solution[:, -1])
    return ew.collect(net, [(train, labels)], [images(200, 2)], **collecting)


def of_shape(shape: tuple[int, ...], classes: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda n, seed: pictures(n, shape, classes, seed)


@cache
def _tiny() -> tuple[ew.MultiExitNet, ew.Trace]:
    net = ew.models.msdnet("tiny-8")
    return net.eval(), fitted(net, of_shape(SHAPE, net.num_classes))


def tiny() -> tuple[ew.MultiExitNet, ew.Trace]:
    """An MSDNet with three exits that is a test's own, and its trace."""
    net, trace = _tiny()
    return copy.deepcopy(net), trace


@cache
def calibrated(method: str = OURS, mode: Any = "paper") -> ew.Calibration:
    """Calibration of the tiny net."""
    return ew.calibrate(_tiny()[1], method, samples=20, mode=mode)


def some_images(n: int, seed: int = 3) -> Tensor:
    return pictures(n, SHAPE, 10, seed)[0]


def simulated(net: ew.MultiExitNet, calibration: ew.Calibration, images: Any) -> Predictions:
    with torch.no_grad(), preserve_training_mode(net):
        return calibration.predict([x.float() for x in net.eval().features(images)])


def random_policy(preds: Predictions, seed: int, score: str = "confidence", **more: Any) -> ew.Policy:
    """Random thresholds among the scores; sometimes one that no sample reaches, or all samples do."""
    rng = np.random.default_rng(seed)
    table = exit_scores(preds, score)
    drawn = [float(np.quantile(row, rng.uniform())) for row in table[:-1]]
    extreme = [inf if rng.uniform() < 0.5 else -inf for _ in drawn]
    chosen = [other if rng.uniform() < 0.1 else value for value, other in zip(drawn, extreme, strict=True)]
    return ew.Policy((*chosen, -inf), score, **more)


def middle_policy(calibration: ew.Calibration, score: str = "confidence") -> ew.Policy:
    """Half of the tiny net's samples leave at every exit."""
    table = exit_scores(calibration.predict(_tiny()[1].val), score)
    return ew.Policy((*(float(np.median(row)) for row in table[:-1]), -inf), score)


def classifier(method: str = OURS, score: str = "confidence", **options: Any) -> ew.Classifier:
    """A classifier of the tiny net; samples exit everywhere. Costs are given, because counting them is slow."""
    options = {"costs": _tiny()[1].costs} | options
    return ew.Classifier(tiny()[0], calibrated(method), middle_policy(calibrated(method), score), **options)


def clear(policy: ew.Policy, preds: Predictions, near: float = NEAR) -> tuple[np.ndarray, np.ndarray]:
    """Exits (n,) by the simulation, and which samples were nowhere on their way near a threshold."""
    table = policy.scores(preds).astype(np.float64)
    exits = policy.exits(preds)
    on_the_way = np.arange(len(table))[:, None] <= exits
    gap = np.abs(table - np.array(policy.thresholds)[:, None])
    return exits, ((gap > near) | ~on_the_way).all(axis=0)


def assert_as_simulated(policy: ew.Policy, preds: Predictions, exits: Any, probs: Any, tolerance: float = NEAR) -> None:
    """Same exits and probabilities, but for samples that come as near to a threshold as the tolerance."""
    expected, sure = clear(policy, preds, tolerance)
    if policy.score == "patience":  # whole numbers, parted by the hash, which rounding changes now and then
        sure = np.asarray(exits) == expected
    assert sure.mean() > 0.9 or len(sure) < 20  # or nothing would be compared
    assert (np.asarray(exits)[sure] == expected[sure]).all()
    its = preds.probs.numpy()[expected, np.arange(len(expected))]
    assert np.abs(np.asarray(probs)[sure] - its[sure]).max(initial=0) < tolerance


def refused(call: Callable[[], Any], *words: str) -> str:
    """Check that the error is an InputError of one line that contains these words."""
    with pytest.raises(ew.InputError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def same(a: ew.Prediction, b: ew.Prediction) -> bool:
    """Bit for bit."""
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("probs", "predicted", "exits", "costs"))


class Spread(nn.Module):
    """A stage that hands on a nest of tensors and something that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, state: Any) -> dict[str, Any]:
        first = state["a"] + state["b"] if isinstance(state, dict) and "a" in state else state
        x = first["now"] if isinstance(first, dict) else first
        now = self.linear(x).relu()
        return {"now": now, "past": [x, (x * 2, {"deep": now - x})], "name": "anything"}


class Gather(nn.Module):
    def forward(self, state: dict[str, Any]) -> Tensor:
        first, (double, deep) = state["past"]
        return torch.cat([state["now"], first, double, deep["deep"]], dim=1)


def nested_net() -> ew.MultiExitNet:
    torch.manual_seed(0)
    heads = [ew.Head(Gather(), nn.Linear(24, 4, bias=k != 0)) for k in range(3)]
    return ew.MultiExitNet([Spread() for _ in range(3)], heads)


def own_classifier(net: ew.MultiExitNet, shape: tuple[int, ...], seed: int = 0) -> tuple[ew.Classifier, Tensor]:
    """A classifier of any net of vectors or images, and inputs for it."""
    costs = range(1, 1 + len(net.stages))
    trace = fitted(net, of_shape(shape, net.num_classes), costs=costs)
    calibration = ew.calibrate(trace, OURS, samples=20)
    images = pictures(70, shape, net.num_classes, 3)[0]
    policy = random_policy(simulated(net, calibration, images), seed)
    return ew.Classifier(net, calibration, policy, costs=costs), images


def changed(data: Any, wrong: tuple[Any, ...], depth: int = 3) -> Iterator[Any]:
    """Data with one value in it, at any place, of another kind."""
    yield from wrong
    if depth and isinstance(data, dict):
        for key, value in data.items():
            yield {other: its for other, its in data.items() if other != key}
            yield from ({**data, key: other} for other in changed(value, wrong, depth - 1))
    if depth and isinstance(data, list) and data:
        yield from ([other, *data[1:]] for other in changed(data[0], wrong, depth - 1))


WRONG: tuple[Any, ...] = (None, True, -1, 10**30, 0.5, float("nan"), "text", [], ["text"], {}, {"a": 1})
