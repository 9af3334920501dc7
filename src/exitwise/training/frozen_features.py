"""Features of a frozen backbone for head training: cached if they fit in memory, else recomputed every epoch."""

import logging
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from exitwise.core.errors import InputError, net_input_errors
from exitwise.core.nested import describe, iter_tensors, map_tensors, replace_tensors
from exitwise.core.seeds import derive_generator
from exitwise.models.input_batches import Progress, validated_batches
from exitwise.models.net import MultiExitNet
from exitwise.training.batch_sources import BatchSource, as_batch_source, as_eval_loader
from exitwise.training.recipes import HeadRecipe
from exitwise.training.trainable_head import TrainableHead

_log = logging.getLogger(__name__)

CACHE_BYTES = 2 * 2**30  # limit of cached features for `cache="auto"`
_MAX_BATCH_SIZE = 64  # of the backbone's pass over the data that fills the cache

# Inputs of each head, the last exit's logits (None unless fixed and requested), and labels, for a batch or a split.
HeadBatch = tuple[list[Any], Tensor | None, Tensor]
Cache = bool | Literal["auto"]


class CachedFeatures:
    """Head inputs of both splits, in memory."""

    def __init__(self, train: HeadBatch, val: HeadBatch, batch_size: int, seed: int) -> None:
        self._train, self._val, self._seed = train, val, seed
        self.batch_size = min(batch_size, len(train[2]))

    def __len__(self) -> int:
        """Return the number of training batches in an epoch."""
        return len(self._train[2]) // self.batch_size

    def epoch(self, epoch: int) -> Iterator[HeadBatch]:
        """Yield shuffled training batches; an incomplete last batch is dropped."""
        order = torch.randperm(len(self._train[2]), generator=derive_generator(self._seed, epoch))
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield _take_rows(self._train, order[start : start + self.batch_size])

    def val(self) -> Iterator[HeadBatch]:
        """Yield validation batches in order."""
        for start in range(0, len(self._val[2]), self.batch_size):
            yield _take_rows(self._val, slice(start, start + self.batch_size))


class RecomputedFeatures:
    """Head inputs that the backbone computes again in every epoch."""

    def __init__(self, backbone: "FrozenBackbone", source: BatchSource, val: Iterable[Any], distill: bool) -> None:
        if isinstance(val, Iterator):
            raise InputError("`val` can be read only once, but features are not cached: pass a loader or a dataset")
        self._backbone, self._source, self._val, self._distill = backbone, source, val, distill

    def __len__(self) -> int:
        """Return the number of training batches in an epoch."""
        return len(self._source)

    def epoch(self, epoch: int) -> Iterator[HeadBatch]:
        """Yield shuffled training batches."""
        return self._backbone.iter_batches(_iter_source(self._source, epoch), "train", self._distill)

    def val(self) -> Iterator[HeadBatch]:
        """Yield validation batches."""
        return self._backbone.iter_batches(self._val, "val", True)


class FrozenBackbone:
    """Part of a net that is not trained: its stages, and of each head the modules before its trainable part."""

    def __init__(self, net: MultiExitNet, heads: Sequence[TrainableHead]) -> None:
        self._net, self._heads = net, heads
        self._has_run = False  # whether a forward pass of the net has succeeded

    def iter_batches(
        self, loader: Iterable[Any], name: str, with_last: bool, progress: Progress | None = None
    ) -> Iterator[HeadBatch]:
        """Yield validated batches, with the last exit's logits if its head is fixed and `with_last` is True."""
        for inputs, labels, _ in validated_batches(self._net, loader, name, progress):
            yield *self._run(inputs, with_last), labels

    @torch.no_grad()
    def _run(self, inputs: Any, with_last: bool) -> tuple[list[Any], Tensor | None]:
        """Return the heads' inputs and, where requested, the last exit's logits."""
        states = self._net.states(inputs)
        with nullcontext() if self._has_run else net_input_errors(describe(inputs)):
            head_inputs = [head.precompute(next(states)[1]) for head in self._heads]
            last = next(states, None) if with_last else None
            last_logits = None if last is None else last[0](last[1])
        self._has_run = True
        return head_inputs, last_logits


def make_head_data(
    net: MultiExitNet,
    heads: Sequence[TrainableHead],
    train: Any,
    val: Any,
    recipe: HeadRecipe,
    seed: int,
    cache: Cache,
    workers: int = 0,
    progress: Progress | None = None,
) -> CachedFeatures | RecomputedFeatures:
    """Return training and validation data of heads.

    Args:
        net: A net in evaluation mode.
        heads: The heads to train: those of the first exits.
        train: Training data: a dataset or a loader of (inputs, labels) with a length.
        val: Validation data: a dataset or a loader of (inputs, labels).
        recipe: Batch size, and whether the last exit's logits are needed on `train`.
        seed: Seed for the order of training samples.
        cache: Whether to cache features; with "auto", up to `CACHE_BYTES`, estimated from the first batch of a split.
        workers: Processes that decode image files.
        progress: Called after every batch that is cached.
    """
    backbone, distill = FrozenBackbone(net, heads), recipe.distill > 0
    batch_size = min(recipe.batch_size, _MAX_BATCH_SIZE)
    is_dataset = hasattr(train, "pixels_of") or isinstance(train, Dataset)
    max_batch_size = len(train) if is_dataset and isinstance(train, Sized) else recipe.batch_size
    if not max_batch_size:
        raise InputError("`train` gave no samples")
    source = as_batch_source(train, recipe.to_recipe(max_batch_size), seed, workers)
    loaders = {
        "train": as_eval_loader(train, batch_size, workers) if is_dataset else train,
        "val": as_eval_loader(val, batch_size, workers),
    }
    train_batches = loaders["train"] if is_dataset else _iter_source(source, 0)
    passes = {
        "train": backbone.iter_batches(train_batches, "train", distill, progress),
        "val": backbone.iter_batches(loaders["val"], "val", True, progress),
    }
    first = {name: _copy_to_cpu(next(batches)) for name, batches in passes.items()}
    size = sum(_estimate_bytes(batch, loaders[name]) for name, batch in first.items())
    if cache is False or (cache == "auto" and size > CACHE_BYTES):
        level = logging.INFO if cache is False else logging.WARNING
        _log.log(level, "features would take %.1f GB: the backbone runs in every epoch", size / 2**30)
        return RecomputedFeatures(backbone, source, loaders["val"], distill)
    _log.info("features take %.1f MB and are cached: the backbone runs once", size / 2**20)
    cached = {name: _join_batches([first[name], *map(_copy_to_cpu, batches)]) for name, batches in passes.items()}
    return CachedFeatures(cached["train"], cached["val"], recipe.batch_size, seed)


def _iter_source(source: BatchSource, epoch: int) -> Iterator[Any]:
    """Yield the undivided batches of an epoch."""
    return (micro_batches[0] for micro_batches in source.epoch(epoch))


def _estimate_bytes(first: HeadBatch, loader: Any) -> float:
    """Return the size of a split in memory, extrapolated from its first batch."""
    size = sum(tensor.nbytes for tensor in iter_tensors(first))
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, Sized):
        return size * len(dataset) / max(len(first[2]), 1)
    return size * (len(loader) if isinstance(loader, Sized) else 1)


def _take_rows(batch: HeadBatch, positions: Tensor | slice) -> HeadBatch:
    rows: HeadBatch = map_tensors(lambda tensor: tensor[positions], batch)
    return rows


def _copy_to_cpu(batch: HeadBatch) -> HeadBatch:
    """Return a copy: an input of a head may be a small view of a large stage state, which it would keep in memory."""
    copied: HeadBatch = map_tensors(lambda tensor: tensor.to("cpu", copy=True), batch)
    return copied


def _join_batches(batches: list[HeadBatch]) -> HeadBatch:
    """Concatenate batches tensor by tensor, freeing the parts of each; `batches` is emptied."""
    first = batches[0]
    columns = [list(column) for column in zip(*map(iter_tensors, batches), strict=True)]
    batches.clear()
    joined: HeadBatch = replace_tensors(first, (torch.cat(columns.pop(0)) for _ in range(len(columns))))
    return joined
