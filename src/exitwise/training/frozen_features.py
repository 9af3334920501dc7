"""What a frozen backbone leaves of data for heads to learn from: kept where it fits, or made again in every epoch."""

import logging
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from exitwise.core.errors import InputError, first_line
from exitwise.core.nested import iter_tensors, map_tensors, replace_tensors
from exitwise.core.seeds import derive_generator
from exitwise.models.input_batches import Progress, validated_batches
from exitwise.models.net import MultiExitNet
from exitwise.training.batch_sources import BatchSource, as_batch_source, as_eval_loader
from exitwise.training.recipes import HeadRecipe
from exitwise.training.trainable_head import TrainableHead

_log = logging.getLogger(__name__)

CACHE_BYTES = 2 * 2**30  # of features, at most, that are kept without being told to
_AT_ONCE = 64  # samples that the backbone runs on to keep what it leaves, at most

# What each head reads of a batch or of a whole split, what the last exit says of it if that is fixed, and the labels.
HeadBatch = tuple[list[Any], Tensor | None, Tensor]
Cache = bool | Literal["auto"]


class CachedFeatures:
    """Everything in memory."""

    def __init__(self, train: HeadBatch, val: HeadBatch, batch_size: int, seed: int) -> None:
        self._train, self._val, self._seed = train, val, seed
        self.batch_size = min(batch_size, len(train[2]))

    def __len__(self) -> int:
        return len(self._train[2]) // self.batch_size

    def epoch(self, number: int) -> Iterator[HeadBatch]:
        """Shuffled batches; what is left of an epoch is left out."""
        order = torch.randperm(len(self._train[2]), generator=derive_generator(self._seed, number))
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield _rows(self._train, order[start : start + self.batch_size])

    def val(self) -> Iterator[HeadBatch]:
        for start in range(0, len(self._val[2]), self.batch_size):
            yield _rows(self._val, slice(start, start + self.batch_size))


class RecomputedFeatures:
    """The backbone runs in every epoch."""

    def __init__(self, backbone: "FrozenBackbone", source: BatchSource, val: Iterable[Any], teaches: bool) -> None:
        if isinstance(val, Iterator):
            raise InputError("`val` can be read only once, and features are not kept: give a loader or a data set")
        self._backbone, self._source, self._val, self._teaches = backbone, source, val, teaches

    def __len__(self) -> int:
        return len(self._source)

    def epoch(self, number: int) -> Iterator[HeadBatch]:
        return self._backbone.iter_batches(_batches(self._source, number), "train", self._teaches)

    def val(self) -> Iterator[HeadBatch]:
        return self._backbone.iter_batches(self._val, "val", True)


class FrozenBackbone:
    """The part of a net that stays as it is."""

    def __init__(self, net: MultiExitNet, learners: Sequence[TrainableHead]) -> None:
        self._net, self._learners = net, learners
        self._tried = False  # whether the net has taken a batch

    def iter_batches(
        self, loader: Iterable[Any], name: str, last: bool, progress: Progress | None = None
    ) -> Iterator[HeadBatch]:
        """Checked batches, with what the last exit says of them if it is fixed and `last`."""
        for inputs, labels, _ in validated_batches(self._net, loader, name, progress):
            yield *self._seen(inputs, last), labels

    @torch.no_grad()
    def _seen(self, inputs: Any, last: bool) -> tuple[list[Any], Tensor | None]:
        states = self._net.states(inputs)
        try:
            read = [learner.precompute(next(states)[1]) for learner in self._learners]
            fixed = next(states, None) if last else None
            said = None if fixed is None else fixed[0](fixed[1])
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            if self._tried:
                raise
            reason = first_line(error)
            shapes = ", ".join(str(tuple(tensor.shape[1:])) for tensor in iter_tensors(inputs))
            raise InputError(f"the net cannot take inputs of shape {shapes}: {reason}") from None
        self._tried = True
        return read, said


def make_head_data(
    net: MultiExitNet,
    learners: Sequence[TrainableHead],
    train: Any,
    val: Any,
    recipe: HeadRecipe,
    seed: int,
    cache: Cache,
    workers: int = 0,
    progress: Progress | None = None,
) -> CachedFeatures | RecomputedFeatures:
    """What heads learn from; the first batch of each split shows whether it fits into memory."""
    backbone, teaches, at_once = FrozenBackbone(net, learners), recipe.distill > 0, min(recipe.batch_size, _AT_ONCE)
    whole = hasattr(train, "pixels_of") or isinstance(train, Dataset)
    if whole and isinstance(train, Sized) and not len(train):
        raise InputError("`train` gave no samples")
    most = len(train) if whole and isinstance(train, Sized) else recipe.batch_size
    source = as_batch_source(train, recipe.to_recipe(most), seed, workers)
    loaders = {
        "train": as_eval_loader(train, at_once, workers) if whole else train,
        "val": as_eval_loader(val, at_once, workers),
    }
    passes = {
        "train": backbone.iter_batches(loaders["train"] if whole else _batches(source, 0), "train", teaches, progress),
        "val": backbone.iter_batches(loaders["val"], "val", True, progress),
    }
    first = {name: _kept(next(batches)) for name, batches in passes.items()}
    size = sum(_size(seen, loaders[name]) for name, seen in first.items())
    if cache is False or (cache == "auto" and size > CACHE_BYTES):
        level = logging.INFO if cache is False else logging.WARNING
        _log.log(level, "features would take %.1f GB: the backbone runs in every epoch", size / 2**30)
        return RecomputedFeatures(backbone, source, loaders["val"], teaches)
    _log.info("features take %.1f MB and are kept: the backbone runs once", size / 2**20)
    seen = {name: _joined([first[name], *map(_kept, batches)]) for name, batches in passes.items()}
    return CachedFeatures(seen["train"], seen["val"], recipe.batch_size, seed)


def _batches(source: BatchSource, epoch: int) -> Iterator[Any]:
    return (parts[0] for parts in source.epoch(epoch))


def _size(first: HeadBatch, loader: Any) -> float:
    """Bytes of a whole split, from its first batch."""
    size = sum(tensor.nbytes for tensor in iter_tensors(first))
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, Sized):
        return size * len(dataset) / max(len(first[2]), 1)
    return size * (len(loader) if isinstance(loader, Sized) else 1)


def _rows(seen: HeadBatch, where: Tensor | slice) -> HeadBatch:
    rows: HeadBatch = map_tensors(lambda tensor: tensor[where], seen)
    return rows


def _kept(seen: HeadBatch) -> HeadBatch:
    """A copy: what a head reads may be a small view of a large state."""
    kept: HeadBatch = map_tensors(lambda tensor: tensor.to("cpu", copy=True), seen)
    return kept


def _joined(batches: list[HeadBatch]) -> HeadBatch:
    """All batches as one; each tensor's parts are let go of when it is whole."""
    first = batches[0]
    columns = [list(column) for column in zip(*map(iter_tensors, batches), strict=True)]
    batches.clear()
    joined: HeadBatch = replace_tensors(first, (torch.cat(columns.pop(0)) for _ in range(len(columns))))
    return joined
