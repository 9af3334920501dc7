"""Batches of normalized images: in order for evaluation, shuffled and augmented for training.

The content of a batch depends only on the seed, the epoch and the batch's number. An interrupted run can therefore
resume in the middle of an epoch, ranks shard batches without communication, and workers do not affect results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError
from exitwise.core.preprocessing import normalize
from exitwise.core.seeds import derive_generator
from exitwise.data.images import Augmentation, ImageDataset, ImageSet


class Normalize:
    """Normalization of bytes (..., channels, height, width) to float32 with the dataset's channel statistics."""

    def __init__(self, dataset: ImageDataset) -> None:
        self._mean, self._std = dataset.mean, dataset.std

    def __call__(self, pixels: Tensor) -> Tensor:
        return normalize(pixels, self._mean, self._std)


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches (images, labels, index) in order, for evaluation: normalized float32 images without augmentation.

    Args:
        dataset: The labeled images.
        batch_size: Samples per batch; the last batch may be smaller.
        workers: Worker processes that load batches; 0 loads them in this process.
        numbers: Numbers of the batches to load; all by default.

    Example:
        >>> import exitwise as ew
        >>> dataset, _ = ew.data.load("digits")
        >>> batches = ew.data.Batches(dataset, batch_size=500)
        >>> images, labels, index = next(iter(batches))
        >>> len(batches), tuple(images.shape), tuple(labels.shape)
        (4, (500, 1, 8, 8), (500,))
    """

    dataset: ImageDataset
    batch_size: int
    workers: int = 0
    numbers: range | None = None

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, minimum=1)
        if self.numbers is None:
            object.__setattr__(self, "numbers", range(-(-len(self.dataset) // self.batch_size)))

    def shard(self, rank: int, world: int) -> "Batches":
        """Return every `world`-th batch, starting from batch `rank`: the shard of one rank."""
        return replace(self, numbers=self.numbers[rank::world])  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.numbers)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        normalize_batch = Normalize(self.dataset)
        for pixels, labels, index in _load_batches(_SequentialBatches(self), self.workers):
            yield normalize_batch(pixels), labels, index


@dataclass(frozen=True, eq=False)
class TrainBatches:
    """Training batches: shuffled anew in every epoch, with augmented images; an incomplete last batch is dropped.

    Args:
        dataset: The labeled images.
        batch_size: Samples per batch, at most the size of the dataset.
        augmentation: Random variation of the images.
        seed: Seed for order and augmentation.
        workers: Worker processes that load batches; 0 loads them in this process.

    Example:
        >>> import exitwise as ew
        >>> dataset, _ = ew.data.load("digits")
        >>> batches = ew.data.TrainBatches(dataset, 100, ew.data.Augmentation(padding=1), seed=0)
        >>> [(images, labels)] = next(batches.epoch(0))
        >>> len(batches), tuple(images.shape), tuple(labels.shape)
        (17, (100, 1, 8, 8), (100,))
    """

    dataset: ImageDataset
    batch_size: int
    augmentation: Augmentation
    seed: int
    workers: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= len(self.dataset):
            raise InputError(
                f"`batch_size` must be from 1 to the {len(self.dataset)} training images, but is {self.batch_size}"
            )
        if self.augmentation.resized_crop and isinstance(self.dataset, ImageSet):
            raise InputError("a recipe with resized crops needs image files: choose a recipe that pads and crops")

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def epoch(self, number: int, start: int = 0, parts: int = 1, mine: range = range(1)) -> Iterator["MicroBatches"]:
        """Iterate over the batches of an epoch, each as a list of micro-batches (images, labels).

        Args:
            number: Number of the epoch; each epoch has its own order and augmentation.
            start: First batch, to resume in the middle of an epoch.
            parts: Number of equal micro-batches per batch; must divide `batch_size`.
            mine: Micro-batches of this rank, a range within 0..parts.
        """
        if self.batch_size % parts:
            raise InputError(f"a batch of {self.batch_size} cannot be cut into {parts} equal parts")
        normalize_batch = Normalize(self.dataset)
        order = torch.randperm(len(self.dataset), generator=derive_generator(self.seed, number))
        size = self.batch_size // parts
        batches = _ShuffledBatches(
            self, number, order, range(start, len(self)), slice(mine.start * size, mine.stop * size)
        )
        for pixels, labels in _load_batches(batches, self.workers):
            images = torch.split(normalize_batch(pixels), size)
            yield list(zip(images, torch.split(labels, size), strict=True))


Shuffled = TrainBatches  # its former name

MicroBatches = list[tuple[Tensor, Tensor]]


class _BatchSequence(Protocol):
    """Sequence of complete batches."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Sequence[Tensor]: ...


class _SequentialBatches:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Sequence[Tensor]:
        batches, dataset = self._batches, self._batches.dataset
        first = batches.numbers[number] * batches.batch_size  # type: ignore[index]
        positions = torch.arange(first, min(first + batches.batch_size, len(dataset)))
        return dataset.pixels_of(positions, None, None), dataset.labels[positions], dataset.index[positions]


class _ShuffledBatches:
    """Batches `numbers` of an epoch; of each batch only the samples `shard`, those of this rank."""

    def __init__(self, source: TrainBatches, epoch: int, order: Tensor, numbers: range, shard: slice) -> None:
        self._source, self._epoch, self._order, self._numbers, self._shard = source, epoch, order, numbers, shard

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Sequence[Tensor]:
        source, batch = self._source, self._numbers[number]
        size, augmentation = source.batch_size, source.augmentation
        # Drawn for the complete batch, so that the draws do not depend on the number of ranks.
        draws = torch.rand(size, augmentation.draws, generator=derive_generator(source.seed, self._epoch, batch))
        positions = self._order[batch * size : (batch + 1) * size][self._shard]
        pixels = source.dataset.pixels_of(positions, augmentation, draws[self._shard])
        return pixels, source.dataset.labels[positions]


class _ErrorsAsValues(Dataset[Sequence[Tensor] | InputError]):
    """Batches that return an InputError as a value: raised in a worker, it would arrive wrapped in a traceback."""

    def __init__(self, batches: _BatchSequence) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Sequence[Tensor] | InputError:
        try:
            return self._batches[number]
        except InputError as error:
            return error


def _load_batches(batches: _BatchSequence, workers: int) -> Iterator[Sequence[Tensor]]:
    """Iterate over all batches in order, loaded by `workers` processes or, if 0, in this one."""
    if not workers:
        for number in range(len(batches)):
            yield batches[number]
        return
    # With its own generator: the loader would draw from the global one, and dropout would depend on the workers.
    loader = DataLoader(_ErrorsAsValues(batches), batch_size=None, num_workers=workers, generator=torch.Generator())
    for batch in loader:
        if isinstance(batch, InputError):
            raise batch
        yield batch
