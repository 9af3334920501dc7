"""Pictures as bytes, in memory, and how they are augmented."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from exitwise.core.errors import InputError


@dataclass(frozen=True)
class Augmentation:
    """How training pictures vary. Each picture's variation is a row of `draws` numbers from [0, 1)."""

    padding: int = 0  # zeros put around the picture before a crop of its own size
    flip: bool = False  # left and right, every second time
    resized_crop: bool = False  # a part of random size and shape, resized; for picture files

    def __post_init__(self) -> None:
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise InputError(f"`padding` must be a whole number of at least 0, but got {self.padding!r}")
        for name in ("flip", "resized_crop"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"`{name}` must be true or false, but got {getattr(self, name)!r}")

    @property
    def draws(self) -> int:
        return 3 + (4 * _TRIES if self.resized_crop else 0)


_TRIES = 10  # for a part that fits into the picture, before the whole picture is taken


class Pictures(Protocol):
    """What every data set is to batches: n labelled pictures, which come as bytes when asked for."""

    @property
    def labels(self) -> Tensor: ...  # (n,) int64
    @property
    def index(self) -> Tensor: ...  # (n,) int64, positions in the whole data set
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def mean(self) -> tuple[float, ...]: ...  # of the channels, in 0..1, for normalisation
    @property
    def std(self) -> tuple[float, ...]: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...  # (channels, height, width) of what `pixels_of` gives

    def __len__(self) -> int: ...
    def __getitem__(self, positions: Tensor) -> Self: ...
    def pixels_of(self, positions: Tensor, augmentation: Augmentation | None, draws: Tensor | None) -> Tensor:
        """(m, channels, height, width) uint8; with an augmentation and its draws (m, augmentation.draws), varied."""
        ...

    def fingerprints(self) -> Tensor:
        """(n,) int64, a name for each picture that does not depend on its position."""
        ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """n pictures in memory: pixels (n, channels, height, width) uint8, labels and positions in the data set (n,)."""

    pixels: Tensor
    labels: Tensor
    index: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, positions: Tensor) -> Self:
        """Some of them."""
        return replace(self, pixels=self.pixels[positions], labels=self.labels[positions], index=self.index[positions])

    def pixels_of(self, positions: Tensor, augmentation: Augmentation | None, draws: Tensor | None) -> Tensor:
        pixels = self.pixels[positions]
        if augmentation is None or draws is None:
            return pixels
        return augment_batch(pixels, augmentation, draws)

    def fingerprints(self) -> Tensor:
        """A hash of each picture's pixels: a copy of the data set in another order has the same ones."""
        return hash_rows(row.tobytes() for row in self.pixels.flatten(1).numpy())


def augment_batch(pixels: Tensor, augmentation: Augmentation, draws: Tensor) -> Tensor:
    """Crops and flips of a batch (m, channels, height, width), one row of draws per picture."""
    if augmentation.padding:
        p = augmentation.padding
        height, width = pixels.shape[2:]
        top, left = (draws[:, :2] * (2 * p + 1)).long().unbind(1)
        windows = pad(pixels, (p, p, p, p)).unfold(2, height, 1).unfold(3, width, 1)  # a view: every crop there is
        pixels = windows[torch.arange(len(pixels)), :, top, left]
    if augmentation.flip:
        flipped = draws[:, 2] < 0.5
        pixels = torch.where(flipped[:, None, None, None], pixels.flip(3), pixels)
    return pixels


def hash_rows(rows: Iterable[bytes]) -> Tensor:
    """(n,) int64, a hash of each row."""
    digests = (blake2b(row, digest_size=8).digest() for row in rows)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
