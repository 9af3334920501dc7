"""Class folders of image files: ImageNet, Caltech-256 and user folders. Pillow decodes the images on access."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from hashlib import blake2b, file_digest
from math import exp, log, sqrt
from os import scandir
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from exitwise.core.cropping import BILINEAR
from exitwise.core.cropping import MARGIN as MARGIN
from exitwise.core.cropping import crop_center as _crop_center
from exitwise.core.errors import InputError, UnreadableImageError
from exitwise.core.image_files import SUFFIXES, open_rgb, require_pillow
from exitwise.core.preprocessing import Preprocessing
from exitwise.data.archives import Archive, dataset_not_found
from exitwise.data.images import Augmentation, hash_rows

_log = logging.getLogger(__name__)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
CALTECH256 = Archive(
    "256_ObjectCategories.tar",
    "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
    "67b4f42ca05d46448c6bb8ecd2220f6d",
)
_END_BYTES = 1 << 14  # read at both ends of a file to compare it with others


@dataclass(frozen=True, eq=False)
class ImageFileSet:
    """n image files, decoded to RGB of size x size on access."""

    root: Path
    files: tuple[str, ...]  # relative to root, separated by /
    labels: Tensor
    index: Tensor
    classes: tuple[str, ...]
    size: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    margin: float = MARGIN  # of the scaled image, relative to `size`
    interpolation: str = BILINEAR
    squash: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, positions: Tensor) -> Self:
        """Return the subset at `positions` (m,)."""
        files = tuple(self.files[position] for position in positions.tolist())
        return replace(self, files=files, labels=self.labels[positions], index=self.index[positions])

    def pixels_of(self, positions: Tensor, augmentation: Augmentation | None, draws: Tensor | None) -> Tensor:
        """Decode the images at `positions` (m,) as uint8 (m, 3, size, size), augmented if `draws` are given."""
        rows = [None] * len(positions) if draws is None else draws.tolist()
        images = [
            decode(self.root / self.files[position], self.preprocessing, augmentation, row)
            for position, row in zip(positions.tolist(), rows, strict=True)
        ]
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)

    @property
    def preprocessing(self) -> Preprocessing:
        """Scaling, cropping and normalization of the images."""
        return Preprocessing(self.size, self.mean, self.std, self.margin, self.interpolation, self.squash)

    def with_preprocessing(self, preprocessing: Preprocessing) -> Self:
        """Return the same files with another preprocessing, of three channels."""
        values = {field.name: getattr(preprocessing, field.name) for field in fields(preprocessing)}
        return replace(self, **values)

    def paths(self) -> Iterator[Path]:
        """Iterate over the paths of the files."""
        return (self.root / file for file in self.files)

    def fingerprints(self) -> Tensor:
        """Return a hash of each file's name and folder (n,) int64."""
        return hash_rows(file.encode(errors="surrogateescape") for file in self.files)  # names may be any bytes

    def drop_unreadable(self) -> Self:
        """Return the subset of files that can be decoded; log the others. Decodes every file once."""
        with ThreadPoolExecutor() as pool:
            problems = list(pool.map(lambda file: _find_problem(self.root / file, self.size), self.files))
        for problem in problems:
            if problem:
                _log.warning("skipped: %s", problem)
        readable = [position for position, problem in enumerate(problems) if problem is None]
        if not readable:
            raise InputError(f"{self.root} has {len(self)} image files, but none can be read: {problems[0]}")
        return self[torch.tensor(readable)]


def scan_class_folders(
    root: Path, size: int, classes: tuple[str, ...] | None = None, classes_of: str = "train"
) -> ImageFileSet:
    """List the image files of the class folders in `root`; log the number of other files.

    Args:
        root: Folder with a folder per class.
        size: Height and width of the decoded images.
        classes: Expected names of the class folders; any names by default.
        classes_of: The folder that has these, for the message.
    """
    require_pillow()
    if not root.is_dir():
        raise InputError(f"{root} must be a folder with a folder per class, but is not a folder")
    names = tuple(sorted(entry.name for entry in scandir(root) if entry.is_dir() and not entry.name.startswith(".")))
    if names in (("train",), ("val",), ("test",)):
        raise InputError(
            f"{root} holds only {names[0]}/: name {root / names[0]} instead, or add another of the three parts"
        )
    if len(names) < 2:
        raise InputError(f"{root} must hold at least two class folders, but holds {len(names)}")
    if classes is not None and names != classes:
        difference = sorted(set(names) ^ set(classes))[0]
        raise InputError(
            f"{root} must have the {len(classes)} class folders of {classes_of}, but differs in {difference!r}"
        )
    files, labels, skipped = [], [], 0
    for label, name in enumerate(names):
        paths = sorted(path for path in (root / name).rglob("*") if path.is_file())
        images = [path for path in paths if path.suffix.lower() in SUFFIXES]
        if not images:
            raise InputError(f"{root / name} is a class folder without images: fill or remove it")
        skipped += len(paths) - len(images)
        files += [path.relative_to(root).as_posix() for path in images]
        labels += [label] * len(images)
    if skipped:
        _log.warning("%s: skipped %d files that are not images", root, skipped)
    return ImageFileSet(root, tuple(files), torch.tensor(labels), torch.arange(len(files)), names, size)


def load_imagenet(root: Path, size: int) -> tuple[ImageFileSet, ImageFileSet]:
    """Load `root`/train and, as test images, `root`/val, which must have the same class folders."""
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise InputError(
                f"{root} must hold ImageNet's train/ and val/ with a folder per class, but has no {part}/; "
                f"exitwise cannot download ImageNet: get it from image-net.org after registration"
            )
    train = scan_class_folders(root / "train", size)
    return train, scan_class_folders(root / "val", size, train.classes)


def load_caltech256(root: Path, size: int) -> ImageFileSet:
    """Load the class folders of `root`/256_ObjectCategories or `root`; folder 001.ak47 is class ak47."""
    folder = root / "256_ObjectCategories"
    if not folder.is_dir() and not (root.is_dir() and any(path.is_dir() for path in root.iterdir())):
        raise dataset_not_found(root, [CALTECH256], f"256_ObjectCategories (extracted from {CALTECH256.name})")
    dataset = scan_class_folders(folder if folder.is_dir() else root, size)
    return replace(dataset, classes=tuple(name.split(".", 1)[-1] for name in dataset.classes))


def find_parts(path: Path) -> dict[str, Path]:
    """Return the folders train, val and test of a user's folder, if it has two or three of them; else nothing."""
    parts = {name: path / name for name in ("train", "val", "test") if (path / name).is_dir()}
    return parts if len(parts) > 1 else {}


def load_user_folder(path: Path, size: int) -> tuple[ImageFileSet, ImageFileSet | None]:
    """Load the class folders of `path` as (images, None), or two of its parts as (train, test).

    Of train/, val/ and test/, the test images are test/ or, without it, val/; the others are train/ or, without it,
    val/.
    """
    parts = find_parts(path)
    if not parts:
        return scan_class_folders(path, size), None
    names = [name for name in ("train", "val", "test") if name in parts]
    train = scan_class_folders(parts[names[0]], size)
    return train, scan_class_folders(parts[names[-1]], size, train.classes, names[0])


def find_shared_files(first: ImageFileSet, second: ImageFileSet) -> list[tuple[Path, Path]]:
    """Return pairs of files (of the first set, of the second) with the same content, one for each such second file.

    Only files of equal size are read: first their ends and, where these are equal, all of them.
    """
    ours, theirs = list(first.paths()), list(second.paths())
    pairs: list[tuple[Path, Path]] = []
    for key in (_file_size, _hash_ends, _hash_file):
        groups: dict[Any, list[Path]] = {}
        for path in ours:
            groups.setdefault(_key_or_none(key, path), []).append(path)
        groups.pop(None, None)
        matched = {path: value for path in theirs if (value := _key_or_none(key, path)) in groups}
        ours = [path for value in dict.fromkeys(matched.values()) for path in groups[value]]
        theirs = list(matched)
        pairs = [(groups[value][0], path) for path, value in matched.items()]
    return pairs


def _key_or_none(key: Callable[[Path], Any], path: Path) -> Any:
    """Return the key of a file, None if it cannot be read: that is an error when it is decoded."""
    try:
        return key(path)
    except OSError:
        return None


def _file_size(path: Path) -> int:
    return path.stat().st_size


def _hash_ends(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(_END_BYTES)
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        return blake2b(start + file.read(_END_BYTES)).digest()


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file_digest(file, "blake2b").digest()


def common_size(*image_sets: ImageFileSet) -> int | None:
    """Return the side of the images if all are squares of one size, else None. Reads only the headers of files."""
    from PIL import Image

    side: int | None = None
    for path in (path for image_set in image_sets for path in image_set.paths()):
        try:
            with Image.open(path) as file:
                width, height = file.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue  # an error when it is decoded, or skipped
        side = side or width
        if not width == height == side:
            return None
    return side


def decode(
    path: Path, preprocessing: Preprocessing | int, augmentation: Augmentation | None, draws: list[float] | None
) -> np.ndarray:
    """Return an image file as uint8 (size, size, 3): its center, or augmented according to `draws`."""
    from PIL import Image

    if isinstance(preprocessing, int):  # the size of images that are scaled and cropped as ImageNet's
        preprocessing = Preprocessing(preprocessing, MEAN, STD, MARGIN)
    size = preprocessing.size
    try:
        image = open_rgb(path)
    except InputError as error:
        raise UnreadableImageError(f"{error}; --skip-unreadable skips such files") from None
    if augmentation is None or draws is None:
        return np.asarray(preprocessing.crop(image))
    if augmentation.resized_crop:
        box = _random_crop_box(image.width, image.height, draws[3:])
        image = image.resize((size, size), Image.Resampling[preprocessing.interpolation.upper()], box=box)
    else:
        image = preprocessing.crop(image)
    if augmentation.padding:
        p = augmentation.padding
        left, top = (int(draw * (2 * p + 1)) - p for draw in draws[:2])
        image = image.crop((left, top, left + size, top + size))  # black outside of the image
    if augmentation.flip and draws[2] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def _random_crop_box(width: int, height: int, draws: list[float]) -> tuple[float, float, float, float]:
    """Return a random box with 8 to 100 % of the area and an aspect ratio from 3:4 to 4:3, the center if none fits."""
    for area, aspect, left, top in zip(*(iter(draws),) * 4, strict=True):
        ratio = exp((2 * aspect - 1) * log(4 / 3))
        pixels = (0.08 + 0.92 * area) * width * height
        w, h = round(sqrt(pixels * ratio)), round(sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
            return x, y, x + w, y + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


def _find_problem(path: Path, size: int) -> str | None:
    """Return the message of the error that decoding raises, or None."""
    try:
        _crop_center(open_rgb(path), size)
    except InputError as error:
        return str(error)
    return None
