"""CIFAR in its official binary layout: a record is one or two bytes of labels and 3 x 32 x 32 pixels."""

import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from exitwise.core.errors import InputError
from exitwise.data.archives import Archive, dataset_not_found
from exitwise.data.images import ImageSet

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """File names, classes and channel statistics of a version of CIFAR."""

    archive: Archive
    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    classes: int
    label_bytes: int  # the label is the last of them
    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR100 = Layout(
    archive=Archive(
        "cifar-100-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
    ),
    folder="cifar-100-binary",
    train=("train.bin",),
    test="test.bin",
    names="fine_label_names.txt",
    classes=100,
    label_bytes=2,
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
)

CIFAR10 = Layout(
    archive=Archive(
        "cifar-10-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
    ),
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test="test_batch.bin",
    names="batches.meta.txt",
    classes=10,
    label_bytes=1,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)

Reader = Callable[[str], bytes]  # returns the content of a file of the layout, by its name


def load(layout: Layout, root: Path) -> tuple[ImageSet, ImageSet]:
    """Load the train and test images from `root`, the layout's folder in it, or the archive in it."""
    for folder in (root / layout.folder, root):
        if (folder / layout.train[0]).is_file():
            return _load_sets(layout, str(folder), lambda name, folder=folder: _read_file(folder / name))  # type: ignore[misc]
    if not (root / layout.archive.name).is_file():
        raise dataset_not_found(root, [layout.archive], f"{layout.folder}/{layout.train[0]}")
    with tarfile.open(layout.archive.verify(root)) as archive:
        return _load_sets(layout, layout.archive.name, lambda name: _read_member(archive, f"{layout.folder}/{name}"))


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    return path.read_bytes()


def _read_member(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        member = archive.extractfile(name)
    except KeyError:
        member = None
    if member is None:
        raise InputError(f"{archive.name!s} must contain {name}, but does not")
    return member.read()


def _load_sets(layout: Layout, source: str, read: Reader) -> tuple[ImageSet, ImageSet]:
    """Load the train and test images with `read`; `source` is the folder or the archive, for messages."""
    try:
        classes = tuple(read(layout.names).decode().split())
    except UnicodeDecodeError:
        raise InputError(f"{source}/{layout.names} must be a text file in UTF-8, but is not") from None
    if len(classes) != layout.classes:
        raise InputError(f"{source}/{layout.names} must name {layout.classes} classes, but names {len(classes)}")
    train = np.concatenate([_parse_records(layout, f"{source}/{name}", read(name)) for name in layout.train])
    test = _parse_records(layout, f"{source}/{layout.test}", read(layout.test))
    return _make_image_set(layout, train, classes), _make_image_set(layout, test, classes)


def _parse_records(layout: Layout, name: str, data: bytes) -> np.ndarray:
    """Return the records (n, bytes per record) of a file; raise InputError if the size or a label is wrong."""
    size = layout.label_bytes + _PIXELS
    if not data or len(data) % size:
        raise InputError(f"{name} must hold records of {size} bytes, but has {len(data)} bytes: is it cut off?")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    highest = int(records[:, layout.label_bytes - 1].max())
    if highest >= layout.classes:
        raise InputError(f"{name} must hold labels 0..{layout.classes - 1}, but has {highest}")
    return records


def _make_image_set(layout: Layout, records: np.ndarray, classes: tuple[str, ...]) -> ImageSet:
    labels = torch.from_numpy(records[:, layout.label_bytes - 1].astype(np.int64))
    pixels = torch.from_numpy(records[:, layout.label_bytes :].copy()).reshape(-1, 3, 32, 32)
    return ImageSet(pixels, labels, torch.arange(len(labels)), classes, layout.mean, layout.std)
