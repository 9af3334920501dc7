"""He et al.'s ResNets for CIFAR with shortcuts without weights, and public weights for them."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad, relu

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the images that the public weights were trained on
BLOCKS = {"ResNet20": 3, "ResNet56": 9}


class LambdaLayer(nn.Module):
    """A function as a module."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator,no-any-return]


class Block(nn.Module):
    """Two convolutions and a shortcut, which takes every second pixel and pads channels where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        quarter = outputs // 4
        self.shortcut: nn.Module = nn.Sequential()
        if stride > 1:
            self.shortcut = LambdaLayer(lambda x: pad(x[:, :, ::2, ::2], (0, 0, 0, 0, quarter, quarter)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of 6 n + 2 layers for images of about 32 x 32 pixels."""

    def __init__(self, n: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for i in (1, 2, 3):
            blocks = [
                Block(widths[i - 1] if j == 0 else widths[i], widths[i], 2 if j == 0 and i > 1 else 1) for j in range(n)
            ]
            setattr(self, f"layer{i}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(avg_pool2d(x, x.size()[3]).flatten(1))  # type: ignore[no-any-return]


def load(name: str, folder: Path) -> ResNet:
    """Return ResNet20 or ResNet56 with the public weights in a folder, in evaluation mode."""
    with torch.random.fork_rng():
        net = ResNet(BLOCKS[name])
    net.load_state_dict(load_file(folder / f"cifar10_{name.lower()}.safetensors"))
    return net.eval()
