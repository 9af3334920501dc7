"""Sources of training batches: datasets of `exitwise.data`, any `Dataset`, or any loader of (images, labels)."""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from exitwise.core.errors import InputError
from exitwise.core.seeds import derive_generator, derive_seed
from exitwise.data.batches import Batches, MicroBatches, TrainBatches
from exitwise.data.images import ImageDataset
from exitwise.training.recipes import Recipe


class BatchSource(Protocol):
    """Reproducible training batches, each divided into equal micro-batches that the ranks share."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        ...

    def epoch(self, epoch: int, start: int = 0, parts: int = 1, own_parts: range = range(1)) -> Iterator[MicroBatches]:
        """Yield the batches of an epoch from batch `start` on, each as this rank's micro-batches.

        Args:
            epoch: The epoch, from 0.
            start: Number of batches to skip.
            parts: Number of equal micro-batches per batch, over all ranks.
            own_parts: Indices of this rank's micro-batches.
        """
        ...


def as_batch_source(train: Any, recipe: Recipe, seed: int, workers: int = 0) -> BatchSource:
    """Return a source of batches from a dataset or a loader of (images, labels); a loader gives its own batches."""
    if hasattr(train, "pixels_of"):
        images: ImageDataset = train
        return TrainBatches(images, recipe.batch_size, recipe.augmentation, seed, workers)
    if isinstance(train, Dataset) and isinstance(train, Sized):
        return DatasetSource(train, recipe.batch_size, seed)
    if isinstance(train, Iterable) and isinstance(train, Sized):
        if not len(train):
            raise InputError("`train` gave no batches")
        return LoaderSource(train, seed)
    raise InputError(
        f"`train` must be a dataset or a loader of (images, labels) that has a length, but got {type(train).__name__}"
    )


def as_eval_loader(val: Any, batch_size: int, workers: int = 0) -> Iterable[Any]:
    """Return batches for validation, in order, from a dataset or a loader of (images, labels)."""
    if hasattr(val, "pixels_of"):
        images: ImageDataset = val
        return Batches(images, batch_size, workers)
    if isinstance(val, Dataset) and not isinstance(val, IterableDataset):
        return DataLoader(val, batch_size=batch_size)
    if isinstance(val, Iterable):
        return val
    raise InputError(f"`val` must be a dataset or a loader of (images, labels), but got {type(val).__name__}")


@dataclass(frozen=True, eq=False)
class DatasetSource:
    """Shuffled batches of any `Dataset` of (image, label) with a length. Its transforms may draw from torch's RNG."""

    dataset: Any
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size > len(self.dataset):
            raise InputError(f"`batch_size` must be at most the {len(self.dataset)} samples, but is {self.batch_size}")

    def __len__(self) -> int:
        return int(len(self.dataset) // self.batch_size)

    def epoch(self, epoch: int, start: int = 0, parts: int = 1, own_parts: range = range(1)) -> Iterator[MicroBatches]:
        """Yield the batches of an epoch; an incomplete last batch is dropped."""
        order = torch.randperm(len(self.dataset), generator=derive_generator(self.seed, epoch)).tolist()
        for batch in range(start, len(self)):
            torch.manual_seed(derive_seed(self.seed, epoch, batch))
            positions = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            images, labels = default_collate([self.dataset[position] for position in positions])[:2]
            yield _split_batch(images, labels, parts, own_parts)


@dataclass(frozen=True, eq=False)
class LoaderSource:
    """Batches of any loader with a length. Torch's RNG is seeded for every epoch, which fixes a DataLoader's order."""

    loader: Any
    seed: int

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int, start: int = 0, parts: int = 1, own_parts: range = range(1)) -> Iterator[MicroBatches]:
        """Yield the loader's batches of an epoch."""
        seed = derive_seed(self.seed, epoch)
        torch.manual_seed(seed)
        sampler = getattr(self.loader, "sampler", None)
        for owner in (self.loader, sampler):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        for images, labels, *_ in islice(self.loader, start, None):
            state = torch.get_rng_state()  # the training step's own draws must not change the loader's
            yield _split_batch(images, labels, parts, own_parts)
            torch.set_rng_state(state)


def _split_batch(images: Any, labels: Any, parts: int, own_parts: range) -> MicroBatches:
    """Split a batch into `parts` equal micro-batches and return those of this rank."""
    if parts == 1:
        return [(images, labels)]
    if len(labels) % parts:
        raise InputError(f"a batch of {len(labels)} cannot be cut into {parts} equal parts")
    size = len(labels) // parts
    slices = [slice(part * size, (part + 1) * size) for part in own_parts]
    return [(images[rows], labels[rows]) for rows in slices]
