"""Fashion-MNIST in IDX files, plain or gzipped: a header of big-endian numbers, then bytes."""

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import torch

from exitwise.core.errors import InputError
from exitwise.data.archives import Archive, dataset_not_found
from exitwise.data.images import ImageSet

_MAX_BYTES = 1 << 30  # of a decompressed file: more than a million images
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # folder of Debian's package dataset-fashion-mnist

MEAN, STD = (0.2860,), (0.3530,)
_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_SERVER = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
ARCHIVES = tuple(
    Archive(name, f"{_SERVER}/{name}", md5)
    for name, md5 in {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    }.items()
)


def load(root: Path | None) -> tuple[ImageSet, ImageSet]:
    """Load the train and test images from `root`, by default the folder of Debian's package."""
    folder = root or DEBIAN
    if _find_file(folder, "train-images-idx3-ubyte") is None:
        raise dataset_not_found(folder, ARCHIVES, "train-images-idx3-ubyte")
    return _load_part(folder, "train"), _load_part(folder, "t10k")


def _find_file(root: Path, name: str) -> Path | None:
    """Return the path of a plain or gzipped file in `root` or in torchvision's folder inside it; None if missing."""
    folders = (root, root / "FashionMNIST" / "raw")
    candidates = (folder / f"{name}{suffix}" for folder in folders for suffix in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def _load_part(root: Path, part: str) -> ImageSet:
    """Load the images and labels of `part`, "train" or "t10k"."""
    pixels = _read_idx(root, f"{part}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(root, f"{part}-labels-idx1-ubyte", dimensions=1)
    if pixels.shape[1:] != (28, 28):
        raise InputError(f"{root}: {part} images must be 28 x 28, but are {pixels.shape[1]} x {pixels.shape[2]}")
    if len(pixels) != len(labels):
        raise InputError(f"{root}: {part} must have a label per image, but has {len(labels)} for {len(pixels)}")
    if labels.max() >= len(_CLASSES):
        raise InputError(f"{root}: {part} labels must be 0..{len(_CLASSES) - 1}, but go up to {labels.max()}")
    images = torch.from_numpy(pixels.copy())[:, None]
    return ImageSet(images, torch.from_numpy(labels.astype(np.int64)), torch.arange(len(labels)), _CLASSES, MEAN, STD)


def _read_idx(root: Path, name: str, dimensions: int) -> np.ndarray:
    """Return the array of an IDX file of bytes; raise InputError if the file is missing or damaged."""
    file = _find_file(root, name)
    if file is None:
        raise InputError(f"{root / name}.gz does not exist")
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            header = _read_at_most(stream, 4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or header[:4] != bytes([0, 0, 8, dimensions]):
                raise InputError(
                    f"{file} must be an IDX file of bytes with {dimensions} dimensions, but has another header"
                )
            shape = tuple(int(size) for size in np.frombuffer(header, ">u4", dimensions, offset=4))
            size = prod(shape)  # of Python's integers, which do not overflow
            if not 0 < size <= _MAX_BYTES:
                raise InputError(f"{file} must hold 1 to {_MAX_BYTES:,} bytes, but its header has the shape {shape}")
            data = _read_at_most(stream, size + 1)
    except (OSError, EOFError, zlib.error) as error:
        if file.suffix != ".gz":
            raise
        raise InputError(f"{file} is not a complete gzip file: {error}") from None
    if len(data) != size:
        count = "more" if len(data) > size else f"{len(data)}: cut off?"
        raise InputError(f"{file} must hold {shape} bytes after its header, but has {count}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _read_at_most(stream: IO[bytes] | gzip.GzipFile, size: int) -> bytes:
    """Return up to `size` bytes; memory grows with the bytes that there are, whatever a header promises."""
    blocks, remaining = [], size
    while remaining and (block := stream.read(min(remaining, 1 << 20))):
        blocks.append(block)
        remaining -= len(block)
    return b"".join(blocks)
