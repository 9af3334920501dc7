"""How pictures become what a net takes. NumPy alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.predictions import Array


@dataclass(frozen=True)
class Preprocessing:
    """Bytes (n, channels, size, size) to float32 by the mean and deviation of each channel, both for values in 0..1.

    A picture of another size is scaled so that its short side is `margin` times the size; then its centre is cut out.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    margin: float = 1.0

    def __post_init__(self) -> None:
        try:
            mean, std = (tuple(float(value) for value in values) for values in (self.mean, self.std))
        except (OverflowError, TypeError, ValueError):
            mean = std = ()
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)
        if len(mean) not in (1, 3) or len(std) != len(mean) or not all(map(isfinite, mean + std)) or min(std) <= 0:
            raise InputError(
                f"`mean` and `std` must be numbers, one for each of 1 or 3 channels, but got {self.mean} and {self.std}"
            )
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= 1 << 15:
            raise InputError(f"`size` must be a whole number of pixels, but got {self.size!r}")
        if not isinstance(self.margin, int | float) or not 1 <= self.margin <= 10:
            raise InputError(f"`margin` must be a number of at least 1, but got {self.margin!r}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, size, size) of a picture that is ready."""
        return (len(self.mean), self.size, self.size)

    @property
    def scale(self) -> Array:
        """(channels, 1, 1), what a byte is multiplied with."""
        return (1 / (255 * np.asarray(self.std, dtype=np.float32)))[:, None, None]

    @property
    def shift(self) -> Array:
        """(channels, 1, 1), what is then added."""
        mean, std = (np.asarray(values, dtype=np.float32) for values in (self.mean, self.std))
        return (-mean / std)[:, None, None]

    def normalize(self, pixels: Array) -> Array:
        """(..., channels, height, width) uint8 to float32: (pixels / 255 - mean) / std."""
        normal: Array = pixels.astype(np.float32) * self.scale + self.shift
        return normal

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"size": self.size, "mean": list(self.mean), "std": list(self.std), "margin": self.margin}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Preprocessing":
        """What `to_dict` gave, checked: it may come from a file."""
        try:
            return cls(**data)
        except TypeError as error:
            raise InputError(f"not a usable preprocessing: {error}") from None
