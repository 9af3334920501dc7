"""Residual networks (ResNet), baselines of the paper with one exit.

There is no exit to choose, but everything else works on them. Modules have torchvision's names, except for `residual`
in a block and the head. ImageNet's ResNet18, 34 and 50 are torchvision's.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from exitwise.models.net import Head, MultiExitNet
from exitwise.models.presets import build_preset


@dataclass(frozen=True)
class ResNetConfig:
    """Configuration of a ResNet. Each group of blocks doubles the width and halves the size of the previous one."""

    blocks: tuple[int, ...]  # residual blocks in each group
    channels: int  # width of the stem and of the first group
    image_size: int
    num_classes: int
    in_channels: int = 3
    bottleneck: bool = False  # blocks of 1x1, 3x3 and 1x1 with four times the width, instead of two 3x3
    imagenet_stem: bool = False  # 7x7 stride 2 and max-pooling instead of 3x3

    @property
    def exits(self) -> int:
        return 1

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return (self.in_channels, self.image_size, self.image_size)


def _cifar(blocks: int) -> ResNetConfig:
    return ResNetConfig(blocks=(blocks,) * 3, channels=16, image_size=32, num_classes=100)


def _imagenet(blocks: tuple[int, ...], bottleneck: bool, num_classes: int) -> ResNetConfig:
    return ResNetConfig(blocks, 64, 224, num_classes, bottleneck=bottleneck, imagenet_stem=True)


PRESETS: dict[str, ResNetConfig] = {
    **{f"cifar100-resnet{6 * blocks + 2}": _cifar(blocks) for blocks in (1, 2, 3, 4, 6, 8, 10, 14, 18)},
    **{
        f"{data}-{name}": _imagenet(blocks, bottleneck, classes)
        for data, classes in (("imagenet", 1000), ("caltech256", 257))
        for name, blocks, bottleneck in (
            ("resnet10", (1, 1, 1, 1), False),
            ("resnet18", (2, 2, 2, 2), False),
            ("resnet26", (3, 3, 3, 3), False),
            ("resnet34", (3, 4, 6, 3), False),
            ("resnet50", (3, 4, 6, 3), True),
        )
    },
}


def build(config: ResNetConfig) -> MultiExitNet:
    """Build the network: convolutions are initialized normally by fan out, other layers by PyTorch's defaults."""
    width = config.channels
    stem = (7, 2) if config.imagenet_stem else (3, 1)
    trunk: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=_conv(config.in_channels, width, *stem), bn1=nn.BatchNorm2d(width), relu=nn.ReLU(inplace=True)
    )
    if config.imagenet_stem:
        trunk["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    for group, depth in enumerate(config.blocks):
        inner = config.channels * 2**group
        outputs = inner * 4 if config.bottleneck else inner
        blocks = []
        for block in range(depth):
            stride = 2 if group and block == 0 else 1
            blocks.append(ResidualBlock(width, inner, outputs, stride))
            width = outputs
        trunk[f"layer{group + 1}"] = nn.Sequential(*blocks)
    neck = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = MultiExitNet([nn.Sequential(trunk)], [Head(neck, nn.Linear(width, config.num_classes))])
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def resnet(preset: str, num_classes: int | None = None, in_channels: int | None = None) -> MultiExitNet:
    """Build an untrained ResNet from the name of its preset.

    Args:
        preset: Name of a preset, such as "cifar100-resnet14".
        num_classes: Number of classes, if it differs from the preset's.
        in_channels: Number of image channels, if it differs from the preset's.

    Returns:
        A net with one exit for images (n, in_channels, size, size), in training mode.

    Raises:
        InputError: There is no such preset, or an override is out of range.

    Example:
        >>> import exitwise as ew
        >>> net = ew.models.resnet("cifar100-resnet14", num_classes=10)
        >>> len(net.exits), net.num_classes
        (1, 10)
    """
    return build_preset(preset, PRESETS, build, num_classes, in_channels)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class ResidualBlock(nn.Module):
    """Convolutions whose output is added to their input: two 3x3, or a bottleneck of three if `outputs` > `inner`.

    A 1x1 convolution adapts the input if its shape differs from the output's.
    """

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        if outputs == inner:
            convs = [_conv(inputs, inner, 3, stride), _conv(inner, outputs, 3)]
        else:
            convs = [_conv(inputs, inner, 1), _conv(inner, inner, 3, stride), _conv(inner, outputs, 1)]
        steps: OrderedDict[str, nn.Module] = OrderedDict()
        for i, conv in enumerate(convs, start=1):
            steps[f"conv{i}"] = conv
            steps[f"bn{i}"] = nn.BatchNorm2d(conv.out_channels)
            if conv is not convs[-1]:
                steps[f"relu{i}"] = nn.ReLU(inplace=True)
        self.residual = nn.Sequential(steps)
        self.downsample = (
            nn.Identity()
            if (inputs, stride) == (outputs, 1)
            else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        out += self.downsample(x)  # in place: no backward pass reads the output of a normalization
        result: Tensor = self.relu(out)
        return result
