"""Four ways in which images get worse, each in five severities.

Each is a function (images (n, 3, height, width) uint8, severity 1..5, generator) -> images of the same kind. Strengths
are our own choice, from what a person hardly sees to what leaves the net little to go by.
"""

from collections.abc import Callable, Mapping
from math import ceil

import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, pad

Corruption = Callable[[Tensor, int, Generator], Tensor]

# by severity, from 1 on
STRENGTHS: Mapping[str, tuple[float, ...]] = {
    "noise": (0.02, 0.04, 0.06, 0.09, 0.13),  # standard deviation, of a range of 1
    "blur": (0.4, 0.6, 0.8, 1.0, 1.4),  # standard deviation in pixels
    "contrast": (0.75, 0.5, 0.35, 0.22, 0.12),  # what remains of it
    "rotation": (5, 10, 15, 25, 40),  # degrees, to either side
}


def noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Gaussian noise, independent in every pixel and channel."""
    deviation = 255 * _strength("noise", severity)
    return _bytes(images + deviation * torch.randn(images.shape, generator=generator))


def blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """A Gaussian blur; nothing in it is random."""
    deviation = _strength("blur", severity)
    radius = ceil(3 * deviation)
    kernel = torch.exp(-torch.arange(-radius, radius + 1).square() / (2 * deviation**2))
    kernel = (kernel / kernel.sum()).expand(images.shape[1], 1, 1, -1)
    blurred = pad(images.float(), (radius,) * 4, mode="reflect")  # black around it would be an edge of its own
    for along in (kernel, kernel.mT):  # rows, then columns: a Gaussian is their product
        blurred = conv2d(blurred, along, groups=images.shape[1])
    return _bytes(blurred)


def contrast(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Every channel of a picture drawn towards its mean; nothing in it is random."""
    pixels = images.float()
    mean = pixels.mean(dim=(2, 3), keepdim=True)
    return _bytes(mean + _strength("contrast", severity) * (pixels - mean))


def rotation(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Rotate every image to the left or to the right, at random; pixels from outside repeat the border."""
    side = torch.randint(2, (len(images),), generator=generator) * 2 - 1
    angle = side * torch.tensor(_strength("rotation", severity)).deg2rad()
    zero = torch.zeros_like(angle)
    matrices = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero], dim=1).view(-1, 2, 3)
    places = affine_grid(matrices, list(images.shape), align_corners=False)
    return _bytes(grid_sample(images.float(), places, padding_mode="border", align_corners=False))


CORRUPTIONS: Mapping[str, Corruption] = {"noise": noise, "blur": blur, "contrast": contrast}  # of drift.py
ROTATED: Mapping[str, Corruption] = {**CORRUPTIONS, "rotation": rotation}


def _strength(name: str, severity: int) -> float:
    if not 1 <= severity <= len(STRENGTHS[name]):
        raise ValueError(f"`severity` must be from 1 to {len(STRENGTHS[name])}, but got {severity}")
    return STRENGTHS[name][severity - 1]


def _bytes(pixels: Tensor) -> Tensor:
    return pixels.round().clamp(0, 255).to(torch.uint8)
