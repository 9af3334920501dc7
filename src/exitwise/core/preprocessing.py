"""Preprocessing: from images as bytes to the input of a net. NumPy only, except for tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from exitwise.core.checks import check_bool, check_choice, check_integer, check_number
from exitwise.core.cropping import BILINEAR, INTERPOLATIONS, crop_center
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Pixels = TypeVar("Pixels", Array, "Tensor")

_RANGE_FACTOR = 10  # floats this many times beyond the range of normalized images are refused


@lru_cache(maxsize=16)
def normalization_factors(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Array, Array]:
    """Return float32 `scale` and `shift` (channels, 1, 1): (pixels / 255 - mean) / std = pixels * scale + shift."""
    means, stds = (np.asarray(values, dtype=np.float32)[:, None, None] for values in (mean, std))
    scale, shift = 1 / (255 * stds), -means / stds
    scale.flags.writeable = shift.flags.writeable = False  # all callers share them
    return scale, shift


def normalize(pixels: Pixels, mean: Sequence[float], std: Sequence[float]) -> Pixels:
    """Return (pixels / 255 - mean) / std as float32, for an array or a tensor on any device.

    Arrays and tensors may differ in the last bit: `addcmul` rounds once on CPUs with fused multiply-add, NumPy twice.

    Args:
        pixels: Values in 0..255, (..., channels, height, width), usually uint8.
        mean: Mean of each channel, for values in 0..1.
        std: Standard deviation of each channel, for values in 0..1.
    """
    scale, shift = normalization_factors(tuple(mean), tuple(std))
    if isinstance(pixels, np.ndarray):
        normalized = pixels.astype(np.float32)
        normalized *= scale
        normalized += shift
        return normalized
    import torch

    # Copies: torch warns of arrays that are read-only.
    scales, shifts = (torch.tensor(values, device=pixels.device) for values in (scale, shift))
    return torch.addcmul(shifts, pixels.float(), scales)


@dataclass(frozen=True)
class Preprocessing:
    """Conversion of images to the float32 input (n, channels, size, size) of a net.

    An image of another size is scaled so that its short side is `margin * size`; then its center is cropped. An image
    of this size is taken as it is.

    Args:
        size: Height and width of the input, in pixels.
        mean: Mean of each of 1 or 3 channels, for values in 0..1.
        std: Standard deviation of each channel, for values in 0..1.
        margin: Short side of the scaled image relative to `size`, from 1 to 10.
        interpolation: Filter that scales images: "bilinear", "bicubic", "lanczos", "nearest", "box" or "hamming".
        squash: Scale both sides to `margin * size`, whatever the shape of the image.

    Raises:
        InputError: If an argument is out of range.

    Example:
        >>> import exitwise as ew
        >>> preprocessing = ew.Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> preprocessing.shape
        (3, 32, 32)
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    margin: float = 1.0
    interpolation: str = BILINEAR
    squash: bool = False

    def __post_init__(self) -> None:
        try:
            mean, std = (tuple(float(value) for value in values) for values in (self.mean, self.std))
        except (OverflowError, TypeError, ValueError):
            mean = std = ()
        if len(mean) not in (1, 3) or len(std) != len(mean) or not all(map(isfinite, mean + std)) or min(std) <= 0:
            raise InputError(
                f"`mean` and `std` must be numbers, one for each of 1 or 3 channels, but got {self.mean} and {self.std}"
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)
        object.__setattr__(self, "size", check_integer("size", self.size, 1, 1 << 15))
        object.__setattr__(self, "margin", check_number("margin", self.margin, 1, 10))
        check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        check_bool("squash", self.squash)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (channels, size, size) of a preprocessed image."""
        return (len(self.mean), self.size, self.size)

    @property
    def scale(self) -> Array:
        """Factor of each channel (channels, 1, 1): normalized = pixels * scale + shift."""
        return normalization_factors(self.mean, self.std)[0]

    @property
    def shift(self) -> Array:
        """Offset of each channel (channels, 1, 1): normalized = pixels * scale + shift."""
        return normalization_factors(self.mean, self.std)[1]

    @cached_property
    def _largest_value(self) -> float:
        """Absolute value above which floats are plainly not normalized."""
        return _RANGE_FACTOR * max(max(abs(m), abs(1 - m)) / s for m, s in zip(self.mean, self.std, strict=True))

    def normalize(self, pixels: Pixels) -> Pixels:
        """Return (pixels / 255 - mean) / std as float32.

        Args:
            pixels: uint8 array or tensor (..., channels, height, width).
        """
        return normalize(pixels, self.mean, self.std)

    def is_rgb(self, shape: Sequence[int]) -> bool:
        """Return whether bytes of this shape are one RGB image (height, width, 3) or several (n, height, width, 3).

        Images (n, channels, size, size) of the net's own shape are not.
        """
        shape = tuple(shape)
        return len(shape) in (3, 4) and shape[-1] == 3 and shape[-3:] != self.shape and min(shape[-3:]) > 0

    def crop(self, image: "Image") -> "Image":
        """Scale and crop an image; one of `size` x `size` pixels is returned unchanged."""
        return crop_center(image, self.size, self.margin, self.interpolation, self.squash)

    def crop_rgb(self, images: Array) -> Array:
        """Scale and crop RGB images as image files are; return uint8 (n, channels, size, size).

        Args:
            images: One uint8 image (height, width, 3) or several (n, height, width, 3), of any size.

        Raises:
            InputError: If they must be scaled or become gray, and Pillow is not installed.
        """
        batch = images if images.ndim == 4 else images[None]
        if batch.shape[1:] != (self.size, self.size, 3) or len(self.mean) == 1:
            try:
                from PIL import Image
            except ImportError:
                height, width = batch.shape[1:3]
                raise InputError(
                    f"images of {width} x {height} pixels must be scaled to {self.size} x {self.size}, "
                    f"which needs Pillow: pip install pillow"
                ) from None
            mode = "L" if len(self.mean) == 1 else "RGB"
            cropped = [self.crop(Image.fromarray(image).convert(mode)) for image in batch]
            pixels = [np.asarray(image).reshape(self.size, self.size, -1) for image in cropped]
            batch = np.stack(pixels) if pixels else np.empty((0, self.size, self.size, len(self.mean)), np.uint8)
        return np.array(batch.transpose(0, 3, 1, 2), order="C")  # a copy, with the usual strides for one channel, too

    def check_range(self, images: Any) -> None:
        """Raise InputError for floats that are plainly not normalized, such as pixels from 0 to 255.

        Args:
            images: Float array or tensor of any shape; values that are not finite are not judged.
        """
        if not all(images.shape):
            return
        low, high, limit = float(images.min()), float(images.max()), self._largest_value
        if isfinite(low) and isfinite(high) and max(-low, high) > limit:
            raise InputError(
                f"images are floats from {low:.4g} to {high:.4g}, but normalized ones lie within {-limit:.3g} to "
                f"{limit:.3g}: pass bytes (uint8), which are normalized here, or `check_range=False`"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict; the defaults of `interpolation` and `squash` are left out."""
        mean, std = list(self.mean), list(self.std)
        data: dict[str, Any] = {"size": self.size, "mean": mean, "std": std, "margin": self.margin}
        if self.interpolation != BILINEAR:  # absent from former files
            data["interpolation"] = self.interpolation
        return {**data, "squash": True} if self.squash else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Preprocessing":
        """Make a preprocessing from the result of `to_dict`, perhaps read from a file; raise InputError if invalid."""
        try:
            return cls(**data)
        except TypeError as error:
            raise InputError(f"not a usable preprocessing: {error}") from None
