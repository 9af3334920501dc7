"""Collecting into a folder: features go to shards on disk, and what an interrupted collection left is used again."""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from exitwise.calibration.laplace import Curvature, CurvatureAccumulator, CurvatureSum
from exitwise.calibration.trace_folder import TraceFolderWriter
from exitwise.core.errors import InputError, net_input_errors
from exitwise.core.nested import describe
from exitwise.models.input_batches import Batch, Progress, validated_batches
from exitwise.models.net import MultiExitNet


def compute_features(net: MultiExitNet, images: Tensor, name: str, start: int, is_first: bool) -> list[Tensor]:
    """Compute the features K x (m, p_k) of a batch whose first sample is number `start` of split `name`."""
    with net_input_errors(describe(images)) if is_first else nullcontext():  # unsuitable inputs fail in the first batch
        features = net.features(images)
    for k, x in enumerate(features):
        if x.dim() != 2:
            raise InputError(f"exit {k} must give features (n, p), but gave {tuple(x.shape)}")
        if not bool(torch.isfinite(x).all()):
            sample = start + int((~torch.isfinite(x)).any(dim=1).nonzero()[0])
            raise InputError(f"exit {k} gave features that are not finite, first for sample {sample} of `{name}`")
    return features


def write_split(
    writer: TraceFolderWriter,
    loader: Iterable[Batch],
    name: str,
    net: MultiExitNet,
    progress: Progress | None,
    on_inputs: Callable[[Any], None],
) -> None:
    """Write features, labels and index of a split; the net does not run on batches that are in complete shards."""
    stored_labels, stored_index = writer.read_labels(name)
    stored, done = len(stored_labels), 0
    for images, labels, index in validated_batches(net, loader, name, progress):
        on_inputs(images)
        known, end = min(max(stored - done, 0), len(labels)), done + len(labels)
        is_same = torch.equal(labels[:known], stored_labels[done : done + known])
        if known and index is not None and stored_index is not None:
            is_same = is_same and torch.equal(index[:known], stored_index[done : done + known])
        if not is_same or (known and (index is None) != (stored_index is None)):
            raise other_samples(writer, name)
        if known < len(labels):
            features = [x[known:].float().cpu() for x in compute_features(net, images, name, done, done == 0)]
            writer.append(name, features, labels[known:], None if index is None else index[known:])
        done = end
    if done < stored:
        raise other_samples(writer, name)
    writer.close_split(name)


def write_curvature(
    writer: TraceFolderWriter,
    loader: Iterable[Batch],
    net: MultiExitNet,
    make_accumulator: Callable[[int, int, bool], CurvatureAccumulator],
    progress: Progress | None,
) -> tuple[Curvature, ...]:
    """Accumulate the curvature (K,) of every exit over the training split; sums are kept from time to time."""
    layers = [head.last for head in net.exits]
    accumulators = [make_accumulator(x.in_features, x.out_features, x.bias is not None) for x in layers]
    kept, digest = _restore(writer, accumulators)
    done, labels_digest = 0, b""
    last = kept
    for images, labels, _ in validated_batches(net, loader, "train", progress):
        start, done = done, done + len(labels)
        # A chain of digests instead of one over all labels, because its state can be kept.
        labels_digest = hashlib.sha256(labels_digest + labels.numpy().tobytes()).digest()
        if start < kept:
            if done > kept or (done == kept and labels_digest != digest):
                raise other_samples(writer, "train")
            continue
        # The features of a batch are not bound to a name, so that they are freed before the next batch.
        for layer, accumulator, x in zip(
            layers, accumulators, compute_features(net, images, "train", start, start == 0), strict=True
        ):
            accumulator.update(x, layer(x))
        if done - last >= writer.shard_rows:
            _keep(writer, accumulators, labels_digest)
            last = done
    if done < kept:
        raise other_samples(writer, "train")
    return tuple(accumulators.pop(0).result() for _ in layers)


def _keep(writer: TraceFolderWriter, accumulators: list[CurvatureAccumulator], labels_digest: bytes) -> None:
    """Keep sums; an average depends on the order of its batches and is not kept."""
    tensors: dict[str, Tensor] = {"labels": torch.tensor(list(labels_digest), dtype=torch.uint8)}
    for k, accumulator in enumerate(accumulators):
        if not isinstance(accumulator, CurvatureSum):
            return
        sums = accumulator.result()
        tensors |= {f"{k}.A": sums.A, f"{k}.B": sums.B, "n": torch.tensor([sums.n])}
    writer.save_sums(tensors)


def _restore(writer: TraceFolderWriter, accumulators: list[CurvatureAccumulator]) -> tuple[int, bytes]:
    """Add the sums that were kept last to new accumulators; return their number of samples and digest of labels."""
    tensors = writer.load_sums()
    if not tensors:
        return 0, b""
    n = int(tensors["n"][0])
    for k, accumulator in enumerate(accumulators):
        assert isinstance(accumulator, CurvatureSum)
        accumulator.add(Curvature(tensors[f"{k}.A"], tensors[f"{k}.B"], n))
    return n, bytes(tensors["labels"].tolist())


def other_samples(writer: TraceFolderWriter, name: str) -> InputError:
    """Return the error of a split whose samples are not those of the shards that are there."""
    return InputError(
        f"`{name}` gives other samples or batches than before the interruption: remove {writer.folder} to start anew"
    )
