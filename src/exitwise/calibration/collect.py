"""One pass of the net over each split: features of val and test are kept, of train only the curvature sums."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from exitwise import models
from exitwise.calibration.laplace import Curvature, CurvatureAccumulator, CurvatureMovingAverage, CurvatureSum
from exitwise.calibration.trace import HeadWeights, Split, Trace
from exitwise.core import distributed
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError, net_input_errors
from exitwise.core.nested import describe, first_sample
from exitwise.models.input_batches import Batch, Progress, validated_batches
from exitwise.models.macs import macs
from exitwise.models.net import MultiExitNet, preserve_training_mode

_ACCUMULATORS: Mapping[str, Callable[[int, int, bool], CurvatureAccumulator]] = {
    "sum": CurvatureSum,
    "average": CurvatureMovingAverage,
}


def collect(
    net: MultiExitNet,
    train: Iterable[Batch],
    val: Iterable[Batch],
    test: Iterable[Batch] | None = None,
    *,
    costs: Costs | Sequence[float] | None = None,
    classes: Sequence[str] | None = None,
    budget_range: tuple[float, float] | None = None,
    curvature: Literal["sum", "average"] = "sum",
    progress: Progress | None = None,
) -> Trace:
    """Run the net over loaders of (images, labels) and keep what calibration needs.

    A batch is images (m, ...) as the net takes them, labels (m,), whole numbers in 0..c-1, and perhaps index (m,), each
    sample's position in the data set; m may change from batch to batch. Train must come without augmentation. Memory
    does not grow with the train set. Unless given, `costs` (K,) are counted in MACs for inputs of val's shape, and
    `budget_range` is the paper's for the net's preset. `curvature="average"` is the public code's exponential average,
    for comparison. The net's device and mode are left as they were.

    Among several processes (a `torch.distributed` group), each takes whole batches in turn from loaders that give all
    of them the same, and every process returns the whole trace.
    """
    if curvature not in _ACCUMULATORS:
        raise InputError(f"`curvature` must be one of {', '.join(_ACCUMULATORS)}, but got {curvature!r}")
    if classes is not None and len(classes) != net.num_classes:
        raise InputError(f"`classes` must name the net's {net.num_classes} classes, but names {len(classes)}")
    if curvature == "average" and distributed.world_size() > 1:
        raise InputError("`curvature` 'average' depends on the order of batches: one process alone can collect it")
    counted = [] if costs is None else [Costs.of(costs)]

    def count(inputs: Any) -> None:
        """On the first batch, so that a net that cannot be counted is refused before any time is spent on it."""
        if not counted:
            try:
                counted.append(Costs.of(macs(net, example_inputs=first_sample(inputs))))
            except InputError as error:
                raise InputError(f"{error}; give `costs` to do without counting") from None

    with _inference(net):
        held = {"val": _features(net, val, "val", progress, count)}
        if test is not None:
            held["test"] = _features(net, test, "test", progress, count)
        sums = _curvature(net, train, _ACCUMULATORS[curvature], progress)
    return Trace(
        val=held["val"],
        test=held.get("test"),
        heads=tuple(_head_weights(head.last) for head in net.exits),
        curvature=sums,
        costs=distributed.broadcast_object(counted)[0],  # the first process has the first batch, others may have none
        classes=tuple(classes) if classes is not None else None,
        model=net.spec,
        budget_range=budget_range or models.budget_range(net.spec),
    )


@contextmanager
def _inference(net: MultiExitNet) -> Any:
    with preserve_training_mode(net), torch.no_grad():
        net.eval()
        yield


def _finite_features(net: MultiExitNet, images: Tensor, name: str, seen: int) -> list[Tensor]:
    with nullcontext() if seen else net_input_errors(describe(images)):  # shows at the first batch
        features = net.features(images)
    for k, x in enumerate(features):
        if x.dim() != 2:
            raise InputError(f"exit {k} must give features (n, p), but gave {tuple(x.shape)}")
        if not bool(torch.isfinite(x).all()):
            where = seen + int((~torch.isfinite(x)).any(dim=1).nonzero()[0])
            raise InputError(f"exit {k} gave features that are not finite, first for sample {where} of `{name}`")
    return features


def _features(
    net: MultiExitNet, loader: Iterable[Batch], name: str, progress: Progress | None, first: Callable[[Any], None]
) -> Split:
    features: list[list[Tensor]] = [[] for _ in net.exits]
    labels: list[Tensor] = []
    index: list[Tensor | None] = []
    seen = 0
    for images, batch_labels, batch_index in validated_batches(net, loader, name, progress):
        first(images)
        for rows, x in zip(features, _finite_features(net, images, name, seen), strict=True):
            rows.append(x.float().cpu())
        labels.append(batch_labels)
        index.append(batch_index)
        seen += len(batch_labels)
    known = [rows for rows in index if rows is not None]
    return Split(
        features=tuple(distributed.gather_batches(rows) for rows in features),
        labels=distributed.gather_batches(labels),
        index=distributed.gather_batches(known) if distributed.broadcast_object(len(known) == len(index)) else None,
    )


def _curvature(
    net: MultiExitNet,
    loader: Iterable[Batch],
    accumulator: Callable[[int, int, bool], CurvatureAccumulator],
    progress: Progress | None,
) -> tuple[Curvature, ...]:
    """Curvature of every exit."""
    sums = [accumulator(h.last.in_features, h.last.out_features, h.last.bias is not None) for h in net.exits]
    seen = 0
    for images, labels, _ in validated_batches(net, loader, "train", progress):
        for head, sum_, x in zip(net.exits, sums, _finite_features(net, images, "train", seen), strict=True):
            sum_.update(x, head.last(x))
        seen += len(labels)
    return tuple(_over_all(sum_.result()) for sum_ in sums)


def _over_all(curvature: Curvature) -> Curvature:
    """The sums of all processes."""
    A, B, n = (distributed.all_reduce_sum(each) for each in (curvature.A, curvature.B, torch.tensor(curvature.n)))
    return Curvature(A, B, int(n))


def _head_weights(last: torch.nn.Linear) -> HeadWeights:
    bias = last.bias.detach().float().cpu().clone() if last.bias is not None else None
    return HeadWeights(last.weight.detach().float().cpu().clone(), bias)
