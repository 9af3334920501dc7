"""One pass of the net over each split: keep the features of val and test, and only curvature sums of train, if any."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from exitwise import models
from exitwise.calibration.collect_on_disk import compute_features, write_curvature, write_split
from exitwise.calibration.laplace import Curvature, CurvatureAccumulator, CurvatureMovingAverage, CurvatureSum
from exitwise.calibration.trace import HeadWeights, Split, Trace, pack_layers, pack_metadata
from exitwise.calibration.trace_folder import TraceFolderWriter, check_feature_dtype, digest_tensors
from exitwise.core import distributed
from exitwise.core.checks import check_choice
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.nested import first_sample
from exitwise.models.cascade import Cascade
from exitwise.models.input_batches import Batch, Progress, validated_batches
from exitwise.models.macs import macs
from exitwise.models.net import MultiExitNet, preserve_training_mode

_ACCUMULATORS: Mapping[str, Callable[[int, int, bool], CurvatureAccumulator]] = {
    "sum": CurvatureSum,
    "average": CurvatureMovingAverage,
}


def collect(
    net: MultiExitNet,
    train: Iterable[Batch] | None = None,
    val: Iterable[Batch] | None = None,
    test: Iterable[Batch] | None = None,
    *,
    costs: Costs | Sequence[float] | None = None,
    classes: Sequence[str] | None = None,
    budget_range: tuple[float, float] | None = None,
    curvature: Literal["sum", "average"] = "sum",
    progress: Progress | None = None,
    out: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    force: bool = False,
) -> Trace:
    """Run the net once over every split and collect what calibration needs.

    A batch is (images, labels) or (images, labels, index): images (m, ...) as the net takes them, labels (m,), whole
    numbers in 0..c-1, and index (m,), each sample's position in the dataset. m may differ from batch to batch. Memory
    does not grow with the size of `train`. The net keeps its device and its training mode.

    With several processes (a `torch.distributed` group), the loaders must give the same batches on every rank. Each
    rank processes its shard of whole batches, and every rank returns the complete trace.

    With `out`, features are written to a folder while the net runs, and the trace reads them from there when they are
    needed: memory does not grow with the number of samples. If this is interrupted, the same call continues: the net
    runs only on samples that are not in a complete shard yet, with the same result as without the interruption.

    Args:
        net: The net; it runs in evaluation mode.
        train: Batches of the training split, without augmentation, for the curvature. None if there are no training
            images: then only methods without Laplace can calibrate the trace.
        val: Batches of the validation split; always needed.
        test: Batches of the test split, or None.
        costs: Cumulative cost (K,) of each exit [default: MACs, counted for inputs of the shape of `val`].
        classes: Names (c,) of the classes [default: those of a cascade, if it has them].
        budget_range: Lowest and highest budget of the paper's tables [default: the paper's for the net's preset].
        curvature: "sum" over all training samples, or "average" for the exponential average of the paper's released
            code, for comparison.
        progress: Called after every batch with the name of the split, the number of samples done, and their total
            number or None if it is unknown.
        out: Folder for the trace; None holds it in memory.
        dtype: Type of the features in `out`: torch.float32, or torch.float16 to halve their size.
        force: Replace a trace that is in `out`.

    Returns:
        The trace: features, labels, last layers, curvature and costs.

    Raises:
        InputError: An argument or a batch is invalid, features are not finite, or the net's MACs cannot be counted.

    Example:
        >>> import exitwise as ew
        >>> import torch
        >>> net = ew.models.msdnet("tiny-8")
        >>> batches = [(torch.rand(4, 1, 8, 8), torch.arange(4)) for _ in range(2)]
        >>> ew.collect(net, train=batches, val=batches)
        Trace(tiny-8, 3 exits, 10 classes, 8 val samples)
    """
    check_choice("curvature", curvature, _ACCUMULATORS)
    if val is None:
        raise InputError("`val` must give batches of the validation split, which calibration is tuned on, but is None")
    if classes is None and isinstance(net, Cascade):
        classes = net.classes
    if classes is not None and len(classes) != net.num_classes:
        raise InputError(f"`classes` must name the net's {net.num_classes} classes, but names {len(classes)}")
    if curvature == "average" and distributed.world_size() > 1:
        raise InputError(
            f"`curvature` must be 'sum' with {distributed.world_size()} processes, but got 'average', "
            f"which depends on the order of batches"
        )
    if out is not None and distributed.world_size() > 1:
        raise InputError(f"`out` must be None with {distributed.world_size()} processes, but got {str(out)!r}")
    if out is None and dtype != torch.float32:
        raise InputError(f"`dtype` must be torch.float32 without `out`, but got {dtype}; see `Trace.save`")
    net_costs = [] if costs is None else [Costs.of(costs)]  # empty until they are counted

    def count_costs(inputs: Any) -> None:
        """Count MACs on the first batch, to fail early on unsupported modules."""
        if not net_costs:
            try:
                net_costs.append(Costs.of(macs(net, example_inputs=first_sample(inputs))))
            except InputError as error:
                raise InputError(f"{error}; give `costs` to skip counting") from None

    heads = tuple(copy_last_layer(head.last) for head in net.exits)
    names = tuple(classes) if classes is not None else None
    budget_range = budget_range or models.budget_range(net.spec)
    if out is not None:
        check_feature_dtype(dtype)
        source = digest_tensors(net.state_dict(), curvature, None if costs is None else net_costs[0].values, names)
        widths = [head.weight.shape[1] for head in heads]
        with inference_mode(net), TraceFolderWriter(Path(out), widths, dtype, source, force) as writer:
            for name, loader in (("val", val), ("test", test)):
                if loader is not None:
                    write_split(writer, loader, name, net, progress, count_costs)
            sums = () if train is None else write_curvature(writer, train, net, _ACCUMULATORS[curvature], progress)
            writer.finish(
                pack_layers(heads, sums, net_costs[0]), pack_metadata(names, net.spec, budget_range, net_costs[0])
            )
        return Trace.load(out)
    with inference_mode(net):
        val_split = collect_split(net, val, "val", progress, count_costs)
        test_split = None if test is None else collect_split(net, test, "test", progress, count_costs)
        curvatures = () if train is None else collect_curvature(net, train, _ACCUMULATORS[curvature], progress)
    return Trace(
        val=val_split,
        test=test_split,
        heads=heads,
        curvature=curvatures,
        costs=distributed.broadcast_object(net_costs)[0],  # rank 0 has the first batch, other ranks may have none
        classes=names,
        model=net.spec,
        budget_range=budget_range,
    )


@contextmanager
def inference_mode(net: MultiExitNet) -> Iterator[None]:
    """Put the net into evaluation mode and switch gradients off, for the time of the block."""
    with preserve_training_mode(net), torch.no_grad():
        net.eval()
        yield


def collect_split(
    net: MultiExitNet,
    loader: Iterable[Batch],
    name: str,
    progress: Progress | None,
    on_inputs: Callable[[Any], None] | None = None,
    start: int = 0,
) -> Split:
    """Collect features, labels and index of a split, or of a shard that begins at sample `start` of it.

    `on_inputs` is called with the inputs of every batch.
    """
    features: list[list[Tensor]] = [[] for _ in net.exits]
    labels: list[Tensor] = []
    index: list[Tensor] = []
    done = start
    for images, batch_labels, batch_index in validated_batches(net, loader, name, progress, start):
        if on_inputs:
            on_inputs(images)
        for batches, x in zip(features, compute_features(net, images, name, done, done == start), strict=True):
            batches.append(x.float().cpu())
        labels.append(batch_labels)
        if batch_index is not None:
            index.append(batch_index)
        done += len(batch_labels)
    has_index = distributed.broadcast_object(len(index) == len(labels))
    return Split(
        features=tuple(distributed.gather_batches(batches) for batches in features),
        labels=distributed.gather_batches(labels),
        index=distributed.gather_batches(index) if has_index else None,
    )


def collect_curvature(
    net: MultiExitNet,
    loader: Iterable[Batch],
    make_accumulator: Callable[[int, int, bool], CurvatureAccumulator],
    progress: Progress | None,
    start: int = 0,
) -> tuple[Curvature, ...]:
    """Accumulate the curvature (K,) of every exit over the training split, or a shard from sample `start` of it."""
    layers = [head.last for head in net.exits]
    accumulators = [make_accumulator(x.in_features, x.out_features, x.bias is not None) for x in layers]
    done = start
    for images, labels, _ in validated_batches(net, loader, "train", progress, start):
        # The features of a batch are not bound to a name, so that they are freed before the next batch.
        for layer, accumulator, x in zip(
            layers, accumulators, compute_features(net, images, "train", done, done == start), strict=True
        ):
            accumulator.update(x, layer(x))
        done += len(labels)
    # Each accumulator is freed after its result was copied: with many classes they take gigabytes.
    return tuple(_sum_over_ranks(accumulators.pop(0).result()) for _ in layers)


def _sum_over_ranks(curvature: Curvature) -> Curvature:
    terms = (curvature.A, curvature.B, torch.tensor(curvature.n))
    A, B, n = (distributed.all_reduce_sum(term) for term in terms)
    return Curvature(A, B, int(n))


def copy_last_layer(last: torch.nn.Linear) -> HeadWeights:
    """Return the weights of a last layer in float32 on the CPU."""
    bias = last.bias.detach().float().cpu().clone() if last.bias is not None else None
    return HeadWeights(last.weight.detach().float().cpu().clone(), bias)
