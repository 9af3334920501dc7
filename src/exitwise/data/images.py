"""Image datasets as bytes in memory, and data augmentation."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from exitwise.core.checks import check_bool, check_integer


@dataclass(frozen=True)
class Augmentation:
    """Random variation of training images.

    Args:
        padding: Pixels of zeros around the image before a random crop of its original size.
        flip: Mirror every second image horizontally, at random.
        resized_crop: Crop a box of random size and aspect ratio and resize it; only for image files.
    """

    padding: int = 0
    flip: bool = False
    resized_crop: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "padding", check_integer("padding", self.padding, minimum=0))
        check_bool("flip", self.flip)
        check_bool("resized_crop", self.resized_crop)

    @property
    def draws(self) -> int:
        """Number of random draws from [0, 1) per image."""
        return 3 + (4 * _CROP_ATTEMPTS if self.resized_crop else 0)


_CROP_ATTEMPTS = 10  # random boxes tried before the center of the image is used


class ImageDataset(Protocol):
    """Interface of all datasets: n labeled images, loaded as bytes on access."""

    @property
    def labels(self) -> Tensor: ...  # (n,) int64
    @property
    def index(self) -> Tensor: ...  # (n,) int64, positions in the complete dataset
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def mean(self) -> tuple[float, ...]: ...  # of each channel, for values in 0..1
    @property
    def std(self) -> tuple[float, ...]: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...  # (channels, height, width) of an image

    def __len__(self) -> int: ...
    def __getitem__(self, positions: Tensor) -> Self: ...
    def pixels_of(self, positions: Tensor, augmentation: Augmentation | None, draws: Tensor | None) -> Tensor:
        """Return images as uint8 (m, channels, height, width).

        Args:
            positions: Positions (m,) in this dataset.
            augmentation: Variation of the images, or None.
            draws: Random draws (m, augmentation.draws) from [0, 1), or None.
        """
        ...

    def fingerprints(self) -> Tensor:
        """Return an identifier of each image (n,) int64 that does not depend on its position."""
        ...


Pictures = ImageDataset  # its former name


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labeled images in memory.

    Args:
        pixels: Images (n, channels, height, width) uint8.
        labels: Labels (n,) int64.
        index: Positions (n,) int64 in the complete dataset.
        classes: Names of the classes.
        mean: Mean of each channel, for values in 0..1.
        std: Standard deviation of each channel, for values in 0..1.
    """

    pixels: Tensor
    labels: Tensor
    index: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (channels, height, width) of an image."""
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, positions: Tensor) -> Self:
        """Return the subset at `positions` (m,)."""
        return replace(self, pixels=self.pixels[positions], labels=self.labels[positions], index=self.index[positions])

    def pixels_of(self, positions: Tensor, augmentation: Augmentation | None, draws: Tensor | None) -> Tensor:
        """Return the images at `positions` (m,) as uint8, augmented if `augmentation` and `draws` are given."""
        pixels = self.pixels[positions]
        if augmentation is None or draws is None:
            return pixels
        return augment_batch(pixels, augmentation, draws)

    def fingerprints(self) -> Tensor:
        """Return a hash of each image's pixels (n,) int64; it does not depend on the order of the dataset."""
        return hash_rows(row.tobytes() for row in self.pixels.flatten(1).numpy())


def augment_batch(pixels: Tensor, augmentation: Augmentation, draws: Tensor) -> Tensor:
    """Crop and flip a batch (m, channels, height, width) at random, with one row of `draws` per image."""
    if augmentation.padding:
        p = augmentation.padding
        height, width = pixels.shape[2:]
        top, left = (draws[:, :2] * (2 * p + 1)).long().unbind(1)
        windows = pad(pixels, (p, p, p, p)).unfold(2, height, 1).unfold(3, width, 1)  # a view of all crops
        pixels = windows[torch.arange(len(pixels)), :, top, left]
    if augmentation.flip:
        flipped = draws[:, 2] < 0.5
        pixels = torch.where(flipped[:, None, None, None], pixels.flip(3), pixels)
    return pixels


def hash_rows(rows: Iterable[bytes]) -> Tensor:
    """Return a hash of each row (n,) int64."""
    digests = (blake2b(row, digest_size=8).digest() for row in rows)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
