"""Batches of pictures as the net wants them: in order for evaluation, shuffled and augmented for training.

What is in a batch follows from the seed, the epoch and the batch's number alone. So a run that was interrupted goes on
in the middle of an epoch, several processes share batches without speaking, and workers change nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from exitwise.core.errors import InputError
from exitwise.core.seeds import derive_generator
from exitwise.data.images import Augmentation, ImageSet, Pictures


class Normalize:
    """Bytes to float32 with the data set's channel statistics."""

    def __init__(self, dataset: Pictures) -> None:
        # (pixels / 255 - mean) / std as one multiplication and one addition
        std = torch.tensor(dataset.std)[:, None, None]
        self._scale = 1 / (255 * std)
        self._shift = -torch.tensor(dataset.mean)[:, None, None] / std

    def __call__(self, pixels: Tensor) -> Tensor:
        return torch.addcmul(self._shift, pixels.float(), self._scale)


@dataclass(frozen=True, eq=False)
class Batches:
    """(images, labels, index) in order: normalised float32 images, no augmentation. `numbers`: which batches."""

    dataset: Pictures
    batch_size: int
    workers: int = 0
    numbers: range | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"`batch_size` must be at least 1, but is {self.batch_size}")
        if self.numbers is None:
            object.__setattr__(self, "numbers", range(-(-len(self.dataset) // self.batch_size)))

    def shard(self, rank: int, world: int) -> "Batches":
        """Every `world`-th batch, from number `rank` on: one process's share."""
        return replace(self, numbers=self.numbers[rank::world])  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.numbers)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        normalize = Normalize(self.dataset)
        for pixels, labels, index in _loaded(_SequentialBatches(self), self.workers):
            yield normalize(pixels), labels, index


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Training batches: every epoch in another order, pictures augmented; what is left of an epoch is left out."""

    dataset: Pictures
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
            raise InputError("a recipe with resized crops is for picture files: choose one that pads and crops")

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def epoch(self, number: int, start: int = 0, parts: int = 1, mine: range = range(1)) -> Iterator["MicroBatches"]:
        """From batch `start` on, each batch cut into `parts`, of which this process gets `mine`."""
        if self.batch_size % parts:
            raise InputError(f"a batch of {self.batch_size} cannot be cut into {parts} equal parts")
        normalize = Normalize(self.dataset)
        order = torch.randperm(len(self.dataset), generator=derive_generator(self.seed, number))
        share = self.batch_size // parts
        items = _ShuffledBatches(
            self, number, order, range(start, len(self)), slice(mine.start * share, mine.stop * share)
        )
        for pixels, labels in _loaded(items, self.workers):
            pieces = (torch.split(whole, share) for whole in (normalize(pixels), labels))
            yield list(zip(*pieces, strict=True))


MicroBatches = list[tuple[Tensor, Tensor]]


class _BatchSequence(Protocol):
    """A sequence of whole batches."""

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
        where = torch.arange(first, min(first + batches.batch_size, len(dataset)))
        return dataset.pixels_of(where, None, None), dataset.labels[where], dataset.index[where]


class _ShuffledBatches:
    def __init__(self, source: Shuffled, epoch: int, order: Tensor, numbers: range, share: slice) -> None:
        self._source, self._epoch, self._order, self._numbers, self._share = source, epoch, order, numbers, share

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Sequence[Tensor]:
        source, batch = self._source, self._numbers[number]
        size, augmentation = source.batch_size, source.augmentation
        # Drawn for the whole batch, whoever takes which share of it.
        draws = torch.rand(size, augmentation.draws, generator=derive_generator(source.seed, self._epoch, batch))
        where = self._order[batch * size : (batch + 1) * size][self._share]
        pixels = source.dataset.pixels_of(where, augmentation, draws[self._share])
        return pixels, source.dataset.labels[where]


class _ErrorsAsValues(Dataset[Sequence[Tensor] | InputError]):
    """Hands an error over as a value: raised in a worker, it would come back wrapped in a traceback."""

    def __init__(self, items: _BatchSequence) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> Sequence[Tensor] | InputError:
        try:
            return self._items[number]
        except InputError as error:
            return error


def _loaded(items: _BatchSequence, workers: int) -> Iterator[Sequence[Tensor]]:
    """All items in order, made by worker processes where there are any."""
    if not workers:
        for number in range(len(items)):
            yield items[number]
        return
    # A generator of its own, or it would draw from the global one, and dropout would depend on the workers.
    for item in DataLoader(_ErrorsAsValues(items), batch_size=None, num_workers=workers, generator=torch.Generator()):
        if isinstance(item, InputError):
            raise item
        yield item
