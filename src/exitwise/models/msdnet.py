"""Multi-scale dense networks (MSDNet), the backbones of the paper.

The state between layers is a list of feature maps, one per scale, finest first; a layer adds channels to each.
Deeper layers drop scales, finest first, and the heads read the coarsest one.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor, nn

from exitwise.models.net import Head, MultiExitNet
from exitwise.models.presets import build_preset


@dataclass(frozen=True)
class MSDNetConfig:
    """Configuration of an MSDNet; a base width of w means w * factors[s] channels at scale s."""

    blocks: tuple[int, ...]  # layers in each block; an exit after each
    scales: int
    factors: tuple[int, ...]  # width of each scale relative to the finest, for outputs and bottlenecks alike
    growth: int
    channels: int  # base width of the stem
    image_size: int
    num_classes: int
    in_channels: int = 3
    imagenet_stem: bool = False  # 7x7 stride 2 and max-pooling instead of 3x3
    head_width: int | None = 128  # None: the width of the map that the head reads
    global_pool: bool = False  # pool the whole map instead of 2x2, for images smaller than 32x32

    @property
    def exits(self) -> int:
        return len(self.blocks)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return (self.in_channels, self.image_size, self.image_size)

    def live_scales(self, layer: int) -> int:
        """Return the number of scales in the output of layer `layer` (from 1): one fewer after every interval."""
        interval = ceil(sum(self.blocks) / self.scales)
        return self.scales - (layer - 1) // interval


def _cifar(blocks: int) -> MSDNetConfig:
    return MSDNetConfig(
        blocks=tuple(range(1, blocks + 1)),
        scales=3,
        factors=(1, 2, 4),
        growth=6,
        channels=16,
        image_size=32,
        num_classes=100,
    )


def _imagenet(layers: int, num_classes: int) -> MSDNetConfig:
    return MSDNetConfig(
        blocks=(layers,) * 5,
        scales=4,
        factors=(1, 2, 4, 4),
        growth=16,
        channels=32,
        image_size=224,
        num_classes=num_classes,
        imagenet_stem=True,
        head_width=None,
    )


def _tiny(image_size: int, in_channels: int, scales: int) -> MSDNetConfig:
    return MSDNetConfig(
        blocks=(1, 2, 2),
        scales=scales,
        factors=(1, 2, 4)[:scales],
        growth=4,
        channels=8,
        image_size=image_size,
        num_classes=10,
        in_channels=in_channels,
        head_width=32,
        global_pool=True,
    )


PRESETS: dict[str, MSDNetConfig] = {
    "cifar100-small": _cifar(4),
    "cifar100-medium": _cifar(6),
    "cifar100-large": _cifar(8),
    "imagenet-small": _imagenet(4, 1000),
    "imagenet-medium": _imagenet(6, 1000),
    "imagenet-large": _imagenet(7, 1000),
    "caltech256-small": _imagenet(4, 257),
    "caltech256-medium": _imagenet(6, 257),
    "caltech256-large": _imagenet(7, 257),
    "tiny-8": _tiny(8, 1, 2),  # tiny nets have 3 exits and take images of any size from 8x8
    "tiny-16": _tiny(16, 1, 3),
    "tiny-32": _tiny(32, 3, 3),
}


def build(config: MSDNetConfig) -> MultiExitNet:
    """Build the network, with PyTorch's default initialization."""
    widths = [config.channels * factor for factor in config.factors]
    stages: list[nn.Module] = []
    heads: list[Head] = []
    layer = 0
    for block, depth in enumerate(config.blocks):
        modules: list[nn.Module] = [Stem(config)] if block == 0 else []
        for _ in range(depth):
            layer += 1
            dropped = config.live_scales(max(layer - 1, 1)) - config.live_scales(layer)
            first = config.scales - config.live_scales(layer)  # index of the finest remaining scale
            modules.append(MultiScaleLayer(widths, config, first, dropped))
            widths = widths[dropped:]
            for scale, factor in enumerate(config.factors[first:]):
                widths[scale] += config.growth * factor
            if dropped:
                base = widths[0] // config.factors[first] // 2
                narrow = [base * factor for factor in config.factors[first:]]
                modules.append(Transition(widths, narrow))
                widths = narrow
        stages.append(nn.Sequential(*modules))
        heads.append(_build_head(widths[-1], config))
    return MultiExitNet(stages, heads)


def msdnet(preset: str, num_classes: int | None = None, in_channels: int | None = None) -> MultiExitNet:
    """Build an untrained MSDNet from the name of its preset.

    Args:
        preset: Name of a preset, such as "cifar100-small"; `exitwise models` lists the names.
        num_classes: Number of classes, if it differs from the preset's.
        in_channels: Number of image channels, if it differs from the preset's.

    Returns:
        A net with several exits for images (n, in_channels, size, size), in training mode.

    Raises:
        InputError: There is no such preset, or an override is out of range.

    Example:
        >>> import exitwise as ew
        >>> net = ew.models.msdnet("cifar100-small", num_classes=10)
        >>> len(net.exits), net.num_classes
        (4, 10)
    """
    return build_preset(preset, PRESETS, build, num_classes, in_channels)


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """Return a convolution without bias, BatchNorm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def _bottleneck(inputs: int, outputs: int, factor: int, stride: int) -> nn.Sequential:
    """Return a 1x1 convolution to at most factor * outputs channels, then 3x3."""
    inner = min(inputs, factor * outputs)
    return nn.Sequential(*_conv(inputs, inner, kernel=1), *_conv(inner, outputs, stride=stride))


def _build_head(inputs: int, config: MSDNetConfig) -> Head:
    width = config.head_width or inputs
    pool = nn.AdaptiveAvgPool2d(1) if config.global_pool else nn.AvgPool2d(2)
    neck = Neck(
        nn.Sequential(*_conv(inputs, width, stride=2)),
        nn.Sequential(*_conv(width, width, stride=2)),
        pool,
        nn.Flatten(),
    )
    return Head(neck, nn.Linear(width, config.num_classes))


class Neck(nn.Sequential):
    """Convolutions and pooling on the coarsest scale."""

    def forward(self, state: list[Tensor]) -> Tensor:
        features: Tensor = super().forward(state[-1])  # type: ignore[no-untyped-call]
        return features


class Stem(nn.Module):
    """First layer: image -> one map per scale, each coarser map a strided convolution of the previous one."""

    def __init__(self, config: MSDNetConfig) -> None:
        super().__init__()
        widths = [config.channels * factor for factor in config.factors]
        if config.imagenet_stem:
            # With a bias, as in the released code.
            conv = nn.Conv2d(config.in_channels, widths[0], 7, stride=2, padding=3)
            first = [conv, nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]
        else:
            first = _conv(config.in_channels, widths[0])
        coarser = (nn.Sequential(*_conv(fine, coarse, stride=2)) for fine, coarse in pairwise(widths))
        self.scales = nn.ModuleList([nn.Sequential(*first), *coarser])

    def forward(self, x: Tensor) -> list[Tensor]:
        state: list[Tensor] = []
        for scale in self.scales:
            x = scale(x)
            state.append(x)
        return state


class ScaleGrowth(nn.Module):
    """Append new channels to the map of one scale, half of them from the next finer map if there is one."""

    def __init__(self, finer: int | None, width: int, new: int, factors: tuple[int, int]) -> None:
        super().__init__()
        self.down = None if finer is None else _bottleneck(finer, new // 2, factors[0], stride=2)
        self.same = _bottleneck(width, new if finer is None else new // 2, factors[1], stride=1)

    def forward(self, finer: Tensor | None, x: Tensor) -> Tensor:
        new = [] if self.down is None else [self.down(finer)]
        return torch.cat([x, *new, self.same(x)], dim=1)


class MultiScaleLayer(nn.Module):
    """Growth at every scale from `first` on; the finest `dropped` input maps are only read by the next coarser one."""

    def __init__(self, widths: list[int], config: MSDNetConfig, first: int, dropped: int) -> None:
        super().__init__()
        self.dropped = dropped
        self.scales = nn.ModuleList()
        for i in range(dropped, len(widths)):  # index among the input maps
            scale = first - dropped + i
            finer = widths[i - 1] if i else None
            factors = (config.factors[max(scale - 1, 0)], config.factors[scale])
            self.scales.append(ScaleGrowth(finer, widths[i], config.growth * config.factors[scale], factors))

    def forward(self, state: list[Tensor]) -> list[Tensor]:
        # By index, because a tracer cannot iterate over the state.
        growths = enumerate(self.scales, start=self.dropped)
        return [grow(state[i - 1] if i else None, state[i]) for i, grow in growths]


class Transition(nn.Module):
    """1x1 convolutions that halve the width of every scale after a scale was dropped."""

    def __init__(self, widths: list[int], narrow: list[int]) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            nn.Sequential(*_conv(wide, slim, kernel=1)) for wide, slim in zip(widths, narrow, strict=True)
        )

    def forward(self, state: list[Tensor]) -> list[Tensor]:
        return [scale(state[i]) for i, scale in enumerate(self.scales)]
