"""Traces of single networks on the same samples, joined to the trace of their cascade without running anything."""

from collections.abc import Sequence

import torch

from exitwise.calibration.trace import Split, Trace
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError


def chain_traces(traces: Sequence[Trace]) -> Trace:
    """Join the traces of networks to the trace of the cascade that runs them in this order.

    Args:
        traces: Traces of the same samples in the same order, with the same classes and costs in one unit.

    Returns:
        The trace with the exits of all networks; a network costs what it takes, and what those before it take.

    Raises:
        InputError: Traces have other samples, classes or units.
    """
    first = traces[0]
    for i, trace in enumerate(traces):
        check_same_samples(first, trace, f"`traces[{i}]`")
    costs: list[float] = []
    for trace in traces:
        spent = costs[-1] if costs else 0.0
        costs += [spent + cost for cost in trace.costs.values]
    with_curvature = all(trace.curvature for trace in traces) and len({trace.num_train for trace in traces}) == 1
    return Trace(
        val=_join_splits([trace.val for trace in traces]),
        test=None if first.test is None else _join_splits([trace.test for trace in traces if trace.test is not None]),
        heads=tuple(head for trace in traces for head in trace.heads),
        curvature=tuple(curvature for trace in traces for curvature in trace.curvature) if with_curvature else (),
        costs=Costs(tuple(costs), first.costs.unit),
        classes=first.classes,
    )


def check_same_samples(first: Trace, other: Trace, name: str) -> None:
    """Raise InputError unless two traces have the same samples, classes and unit; `name` is that of `other`."""
    same_names = first.classes is None or other.classes in (None, first.classes)
    if other.num_classes != first.num_classes or not same_names:
        raise InputError(f"{name} must have the classes of the first trace, in its order, but has others")
    if other.costs.unit != first.costs.unit:
        raise InputError(f"{name} must have costs in {first.costs.unit}, but has them in {other.costs.unit}")
    for split in ("val", "test"):
        ours, theirs = getattr(first, split), getattr(other, split)
        if (ours is None) != (theirs is None) or (ours is not None and not _have_same_samples(ours, theirs)):
            raise InputError(f"{name} must have the {split} samples of the first trace, in its order, but has others")


def _have_same_samples(first: Split, other: Split) -> bool:
    if len(first) != len(other) or not torch.equal(first.labels, other.labels):
        return False
    return first.index is None or other.index is None or torch.equal(first.index, other.index)


def _join_splits(splits: Sequence[Split]) -> Split:
    features = tuple(x for split in splits for x in split.features)
    return Split(features, splits[0].labels, splits[0].index)
