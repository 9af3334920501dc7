"""Densely connected networks (DenseNet), baselines of the paper with one exit.

Modules have torchvision's names, except for the head; imagenet-densenet121 is torchvision's.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exitwise.models.net import Head, MultiExitNet
from exitwise.models.presets import build_preset


@dataclass(frozen=True)
class DenseNetConfig:
    """Configuration of a DenseNet; a transition between blocks halves width and size."""

    blocks: tuple[int, ...]  # dense layers in each block
    growth: int  # channels that a layer adds; its 1x1 convolution is four times as wide
    channels: int  # width of the stem
    image_size: int
    num_classes: int
    in_channels: int = 3
    imagenet_stem: bool = False  # 7x7 stride 2, BatchNorm, ReLU and max-pooling instead of only 3x3

    @property
    def exits(self) -> int:
        return 1

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return (self.in_channels, self.image_size, self.image_size)


def _cifar(layers: int) -> DenseNetConfig:
    return DenseNetConfig(blocks=(layers,) * 3, growth=12, channels=24, image_size=32, num_classes=100)


def _imagenet(blocks: tuple[int, ...], num_classes: int) -> DenseNetConfig:
    return DenseNetConfig(blocks, 32, 64, 224, num_classes, imagenet_stem=True)


PRESETS: dict[str, DenseNetConfig] = {
    **{f"cifar100-densenet{6 * layers + 4}": _cifar(layers) for layers in (1, 2, 3, 4, 6, 8, 10, 12, 14)},
    **{
        f"{data}-{name}": _imagenet(blocks, classes)
        for data, classes in (("imagenet", 1000), ("caltech256", 257))
        for name, blocks in (
            ("densenet57", (2, 6, 10, 8)),
            ("densenet65", (4, 6, 12, 8)),
            ("densenet81", (4, 8, 16, 10)),
            ("densenet97", (6, 12, 16, 12)),
            ("densenet121", (6, 12, 24, 16)),
        )
    },
}


def build(config: DenseNetConfig) -> MultiExitNet:
    """Build the network: convolutions are initialized normally by fan in, the last layer's bias with 0."""
    width = config.channels
    trunk: OrderedDict[str, nn.Module] = OrderedDict()
    if config.imagenet_stem:
        trunk["conv0"] = nn.Conv2d(config.in_channels, width, 7, stride=2, padding=3, bias=False)
        trunk["norm0"], trunk["relu0"] = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        trunk["pool0"] = nn.MaxPool2d(3, stride=2, padding=1)
    else:
        trunk["conv0"] = nn.Conv2d(config.in_channels, width, 3, padding=1, bias=False)
    for block, depth in enumerate(config.blocks, start=1):
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for layer in range(1, depth + 1):
            layers[f"denselayer{layer}"] = DenseLayer(width, config.growth)
            width += config.growth
        trunk[f"denseblock{block}"] = nn.Sequential(layers)
        if block < len(config.blocks):
            trunk[f"transition{block}"] = _build_transition(width)
            width //= 2
    net = MultiExitNet([nn.Sequential(trunk)], [Head(Neck(width), nn.Linear(width, config.num_classes))])
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return net


def densenet(preset: str, num_classes: int | None = None, in_channels: int | None = None) -> MultiExitNet:
    """Build an untrained DenseNet from the name of its preset.

    `macs` counts the paper's FLOPs, which leave out the ReLU and the pooling before the last layer: see `Neck`.

    Args:
        preset: Name of a preset, such as "imagenet-densenet121".
        num_classes: Number of classes, if it differs from the preset's.
        in_channels: Number of image channels, if it differs from the preset's.

    Returns:
        A net with one exit for images (n, in_channels, size, size), in training mode.

    Raises:
        InputError: There is no such preset, or an override is out of range.

    Example:
        >>> import exitwise as ew
        >>> net = ew.models.densenet("cifar100-densenet10")
        >>> len(net.exits), net.num_classes
        (1, 100)
    """
    return build_preset(preset, PRESETS, build, num_classes, in_channels)


class DenseLayer(nn.Sequential):
    """BatchNorm, ReLU, 1x1, BatchNorm, ReLU, 3x3: new channels, appended to the input's."""

    def __init__(self, inputs: int, growth: int) -> None:
        steps: OrderedDict[str, nn.Module] = OrderedDict(
            norm1=nn.BatchNorm2d(inputs),
            relu1=nn.ReLU(inplace=True),
            conv1=nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            norm2=nn.BatchNorm2d(4 * growth),
            relu2=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )
        super().__init__(steps)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], dim=1)  # type: ignore[no-untyped-call]


def _build_transition(width: int) -> nn.Sequential:
    steps: OrderedDict[str, nn.Module] = OrderedDict(
        norm=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
        conv=nn.Conv2d(width, width // 2, 1, bias=False),
        pool=nn.AvgPool2d(2),
    )
    return nn.Sequential(steps)


class Neck(nn.Module):
    """BatchNorm, ReLU and global average pooling.

    ReLU and pooling are calls, not modules, as in torchvision, and `macs` counts only modules. The paper's counter
    apparently did the same: its FLOPs are reproduced exactly. The count omits two MACs per element of the last map,
    under 0.04 % of each preset's cost.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm5 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm5(x), inplace=True)
        return nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)
