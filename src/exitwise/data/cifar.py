"""CIFAR-100 in its official binary layout: a record is a coarse label, a fine label and 3 x 32 x 32 pixels."""

from pathlib import Path

import numpy as np
import torch

from exitwise.data.images import ImageSet
from exitwise.errors import InputError

_PIXELS = 3 * 32 * 32
_MEAN, _STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


def cifar100(root: Path) -> tuple[ImageSet, ImageSet]:
    """Train and test from ROOT or ROOT/cifar-100-binary."""
    folder = next((path for path in (root / "cifar-100-binary", root) if (path / "train.bin").is_file()), None)
    if folder is None:
        raise InputError(f"{root} must hold CIFAR-100's binary files, but has no cifar-100-binary/train.bin")
    names = folder / "fine_label_names.txt"
    if not names.is_file():
        raise InputError(f"{names} does not exist")
    classes = tuple(names.read_text(encoding="utf-8").split())
    if len(classes) != 100:
        raise InputError(f"{names} must name 100 classes, but names {len(classes)}")
    return _records(folder / "train.bin", classes), _records(folder / "test.bin", classes)


def _records(path: Path, classes: tuple[str, ...]) -> ImageSet:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    data = np.fromfile(path, np.uint8)
    if not len(data) or len(data) % (2 + _PIXELS):
        raise InputError(f"{path} must hold records of {2 + _PIXELS} bytes, but has {len(data)} bytes: is it cut off?")
    records = data.reshape(-1, 2 + _PIXELS)
    labels = torch.from_numpy(records[:, 1].astype(np.int64))
    if int(labels.max()) >= len(classes):
        raise InputError(f"{path} must hold labels 0..{len(classes) - 1}, but has {int(labels.max())}")
    pixels = torch.from_numpy(records[:, 2:]).reshape(-1, 3, 32, 32)
    return ImageSet(pixels, labels, torch.arange(len(labels)), classes, _MEAN, _STD)
