"""Where training batches come from: our own data sets, anybody's `Dataset`, or any loader of (images, labels)."""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from exitwise.core.errors import InputError
from exitwise.core.seeds import derive_generator, derive_seed
from exitwise.data.batches import Batches, MicroBatches, Shuffled
from exitwise.data.images import Pictures
from exitwise.training.recipes import Recipe


class BatchSource(Protocol):
    """Batches of an epoch, from any batch on, each cut into equal parts of which a process gets some."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def epoch(self, number: int, start: int = 0, parts: int = 1, mine: range = range(1)) -> Iterator[MicroBatches]: ...


def as_batch_source(train: Any, recipe: Recipe, seed: int, workers: int = 0) -> BatchSource:
    """Batches from whatever was given."""
    if hasattr(train, "pixels_of"):
        pictures: Pictures = train
        return Shuffled(pictures, recipe.batch_size, recipe.augmentation, seed, workers)
    if isinstance(train, Dataset) and isinstance(train, Sized):
        return DatasetSource(train, recipe.batch_size, seed)
    if isinstance(train, Iterable) and isinstance(train, Sized):
        if not len(train):
            raise InputError("`train` gave no batches")
        return LoaderSource(train, seed)
    raise InputError(
        f"`train` must be a data set or a loader of (images, labels) that has a length, but got {type(train).__name__}"
    )


def as_eval_loader(val: Any, batch_size: int, workers: int = 0) -> Iterable[Any]:
    """Batches for validation from whatever was given."""
    if hasattr(val, "pixels_of"):
        pictures: Pictures = val
        return Batches(pictures, batch_size, workers)
    if isinstance(val, Dataset) and not isinstance(val, IterableDataset):
        return DataLoader(val, batch_size=batch_size)
    if isinstance(val, Iterable):
        return val
    raise InputError(f"`val` must be a data set or a loader of (images, labels), but got {type(val).__name__}")


@dataclass(frozen=True, eq=False)
class DatasetSource:
    """Any `Dataset` of (image, label) with a length, shuffled. Its transforms may use torch's random numbers."""

    dataset: Any
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size > len(self.dataset):
            raise InputError(f"`batch_size` must be at most the {len(self.dataset)} samples, but is {self.batch_size}")

    def __len__(self) -> int:
        return int(len(self.dataset) // self.batch_size)

    def epoch(self, number: int, start: int = 0, parts: int = 1, mine: range = range(1)) -> Iterator[MicroBatches]:
        order = torch.randperm(len(self.dataset), generator=derive_generator(self.seed, number)).tolist()
        for batch in range(start, len(self)):
            torch.manual_seed(derive_seed(self.seed, number, batch))
            where = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            images, labels = default_collate([self.dataset[position] for position in where])[:2]
            yield _cut(images, labels, parts, mine)


@dataclass(frozen=True, eq=False)
class LoaderSource:
    """Any loader with a length. Torch's random numbers are seeded at every epoch, which fixes a DataLoader's order."""

    loader: Any
    seed: int

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, number: int, start: int = 0, parts: int = 1, mine: range = range(1)) -> Iterator[MicroBatches]:
        seed = derive_seed(self.seed, number)
        torch.manual_seed(seed)
        sampler = getattr(self.loader, "sampler", None)
        for owner in (self.loader, sampler):
            if isinstance(own := getattr(owner, "generator", None), torch.Generator):
                own.manual_seed(seed)
        for images, labels, *_ in islice(self.loader, start, None):
            state = torch.get_rng_state()  # the loader's, whatever the training step draws meanwhile
            yield _cut(images, labels, parts, mine)
            torch.set_rng_state(state)


def _cut(images: Any, labels: Any, parts: int, mine: range) -> MicroBatches:
    if parts == 1:
        return [(images, labels)]
    if len(labels) % parts:
        raise InputError(f"a batch of {len(labels)} cannot be cut into {parts} equal parts")
    share = len(labels) // parts
    slices = [slice(part * share, (part + 1) * share) for part in mine]
    return [(images[where], labels[where]) for where in slices]
