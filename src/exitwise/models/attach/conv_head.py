"""Convolutions of a head: they make a large map small before it is pooled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_MAX_SIDE = 4  # of the map that is pooled
_MIN_WIDTH = 128  # up to which every convolution doubles the channels
_REDUCTION = 4  # wide maps are brought to a quarter of their channels, or a head would cost as much as a stage

_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORMALIZATIONS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def make_convolutions(
    channels: int, map_shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> tuple[list[nn.Module], int, tuple[int, ...]]:
    """Return convolutions of stride 2, with BatchNorm and ReLU, and the channels and the sizes of the map they return.

    Each is separable: a convolution of every channel, then a mix of the channels. It halves the map, until no side is
    longer than 4, and doubles the channels up to 128, or to a quarter of those of the map if that is more. A map that
    is small already needs none.

    Args:
        channels: Channels of the map.
        map_shape: Sizes of the map, one to three.
        device: Device of the weights.
        dtype: Type of the weights.
    """
    layers: list[nn.Module] = []
    shape, max_width = tuple(map_shape), max(_MIN_WIDTH, channels // _REDUCTION)
    convolution, normalization = _CONVOLUTIONS[len(shape)], _NORMALIZATIONS[len(shape)]
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
    while max(shape) > _MAX_SIDE:
        width = min(2 * channels, max_width)
        layers += [
            convolution(channels, channels, 3, 2, 1, groups=channels, **options),
            convolution(channels, width, 1, **options),
            normalization(width, device=device, dtype=dtype),
            nn.ReLU(),
        ]
        channels, shape = width, tuple(-(-side // 2) for side in shape)
    return layers, channels, shape
