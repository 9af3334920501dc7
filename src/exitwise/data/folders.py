"""Class folders of picture files: ImageNet, Caltech-256, anybody's own. Pillow decodes them when they are asked for."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from os import scandir
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.data.archives import Archive, dataset_not_found
from exitwise.data.images import Augmentation, hash_rows

_log = logging.getLogger(__name__)

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
CALTECH256 = Archive(
    "256_ObjectCategories.tar",
    "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
    "67b4f42ca05d46448c6bb8ecd2220f6d",
)
MARGIN = 256 / 224  # the short side, before the centre of it is cut out
_ELONGATED = 16  # times as long as wide: beyond, the centre is cut out first


@dataclass(frozen=True, eq=False)
class ImageFileSet:
    """n picture files, decoded to RGB of size x size when asked for."""

    root: Path
    files: tuple[str, ...]  # relative to root, with /
    labels: Tensor
    index: Tensor
    classes: tuple[str, ...]
    size: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, positions: Tensor) -> Self:
        """Some of them."""
        files = tuple(self.files[position] for position in positions.tolist())
        return replace(self, files=files, labels=self.labels[positions], index=self.index[positions])

    def pixels_of(self, positions: Tensor, augmentation: Augmentation | None, draws: Tensor | None) -> Tensor:
        rows = [None] * len(positions) if draws is None else draws.tolist()
        pictures = [
            decode(self.root / self.files[position], self.size, augmentation, row)
            for position, row in zip(positions.tolist(), rows, strict=True)
        ]
        return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)

    def fingerprints(self) -> Tensor:
        """A hash of each file's name and folder."""
        return hash_rows(file.encode(errors="surrogateescape") for file in self.files)  # names may be any bytes

    def drop_unreadable(self) -> Self:
        """Those that can be decoded, tried one by one; the others are logged by their paths."""
        with ThreadPoolExecutor() as pool:
            problems = list(pool.map(lambda file: _problem(self.root / file, self.size), self.files))
        for problem in problems:
            if problem:
                _log.warning("skipped: %s", problem)
        fine = [place for place, problem in enumerate(problems) if problem is None]
        if not fine:
            raise InputError(f"{self.root} has {len(self)} picture files, but none can be read: {problems[0]}")
        return self[torch.tensor(fine)]


def require_pillow(extra: str = "train") -> None:
    """Raise an `InputError` that names the extra to install, unless Pillow can be imported."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise InputError(f"image files need Pillow: pip install 'exitwise[{extra}]'") from None


def scan_class_folders(root: Path, size: int, classes: tuple[str, ...] | None = None) -> ImageFileSet:
    """The picture files of ROOT's class folders; files of other kinds are skipped and counted."""
    require_pillow()
    if not root.is_dir():
        raise InputError(f"{root} must be a folder with a folder per class, but is not a folder")
    names = tuple(sorted(entry.name for entry in scandir(root) if entry.is_dir() and not entry.name.startswith(".")))
    if len(names) < 2:
        raise InputError(f"{root} must hold at least two class folders, but holds {len(names)}")
    if classes is not None and names != classes:
        other = sorted(set(names) ^ set(classes))[0]
        raise InputError(f"{root} must have the {len(classes)} class folders of train, but differs in {other!r}")
    files, labels, skipped = [], [], 0
    for label, name in enumerate(names):
        inside = sorted(path for path in (root / name).rglob("*") if path.is_file())
        pictures = [path for path in inside if path.suffix.lower() in SUFFIXES]
        if not pictures:
            raise InputError(f"{root / name} is a class folder without pictures: fill or remove it")
        skipped += len(inside) - len(pictures)
        files += [path.relative_to(root).as_posix() for path in pictures]
        labels += [label] * len(pictures)
    if skipped:
        _log.warning("%s: skipped %d files that are not pictures", root, skipped)
    return ImageFileSet(root, tuple(files), torch.tensor(labels), torch.arange(len(files)), names, size)


def imagenet(root: Path, size: int) -> tuple[ImageFileSet, ImageFileSet]:
    """ROOT/train and ROOT/val with the same class folders."""
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise InputError(
                f"{root} must hold ImageNet's train/ and val/ with a folder per class, but has no {part}/; it can be "
                f"had from image-net.org after registration, not downloaded from here"
            )
    train = scan_class_folders(root / "train", size)
    return train, scan_class_folders(root / "val", size, train.classes)


def caltech256(root: Path, size: int) -> ImageFileSet:
    """ROOT or ROOT/256_ObjectCategories; folders such as 001.ak47 give the class names."""
    inside = root / "256_ObjectCategories"
    if not inside.is_dir() and not (root.is_dir() and any(path.is_dir() for path in root.iterdir())):
        raise dataset_not_found(root, [CALTECH256], f"256_ObjectCategories (extracted from {CALTECH256.name})")
    found = scan_class_folders(inside if inside.is_dir() else root, size)
    return replace(found, classes=tuple(name.split(".", 1)[-1] for name in found.classes))


def load_user_folder(path: Path, size: int) -> tuple[ImageFileSet, ImageFileSet | None]:
    """Class folders, or train/ and test/ (or val/) of them."""
    test = next((path / name for name in ("test", "val") if (path / name).is_dir()), None)
    if (path / "train").is_dir() and test is not None:
        if test.name == "test" and (path / "val").is_dir():
            _log.warning("%s: val/ is not used, validation pictures are held out from train/", path)
        train = scan_class_folders(path / "train", size)
        return train, scan_class_folders(test, size, train.classes)
    return scan_class_folders(path, size), None


def decode(path: Path, size: int, augmentation: Augmentation | None, draws: list[float] | None) -> np.ndarray:
    """One picture (size, size, 3) uint8: the centre, or what the draws say."""
    from PIL import Image

    try:
        image = _opened(path)
    except InputError as error:
        raise InputError(f"{error}; --skip-unreadable leaves such out") from None
    if augmentation is None or draws is None:
        return np.asarray(_centre(image, size))
    bilinear = Image.Resampling.BILINEAR
    if augmentation.resized_crop:
        image = image.resize((size, size), bilinear, box=_part(image.width, image.height, draws[3:]))
    else:
        image = _centre(image, size)
    if augmentation.padding:
        p = augmentation.padding
        left, top = (int(draw * (2 * p + 1)) - p for draw in draws[:2])
        image = image.crop((left, top, left + size, top + size))  # black where it reaches beyond the picture
    if augmentation.flip and draws[2] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def load_image(path: Path, preprocessing: Preprocessing) -> np.ndarray:
    """One picture (channels, size, size) uint8, as a net that was trained on such pictures wants to see it."""
    image = _opened(path)
    image = image.convert("L") if len(preprocessing.mean) == 1 else image
    pixels = np.asarray(_centre(image, preprocessing.size, preprocessing.margin))
    return np.array(np.atleast_3d(pixels).transpose(2, 0, 1), order="C")  # a copy, which may be written to


def _opened(path: Path) -> "Image.Image":  # type: ignore[name-defined]  # noqa: F821
    """A picture file as RGB."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            return _rgb(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises for damage
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{path} cannot be read as a picture ({reason})") from None


def _rgb(file: "Image.Image") -> "Image.Image":  # type: ignore[name-defined]  # noqa: F821
    """Any kind of picture as RGB; transparency is left out."""
    from PIL import Image

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")  # Pillow would cut at 255
    if file.mode in ("I", "F"):
        raise ValueError("pixels of 32 bits, of unknown range")
    file.load()
    file.info.pop("transparency", None)  # of a palette: Pillow warns that RGB has none
    return file.convert("RGB")


def _centre(image: "Image.Image", size: int, margin: float = MARGIN) -> "Image.Image":  # type: ignore[name-defined]  # noqa: F821
    """The short side to `margin` times the size, then the centre; one that has the size stays as it is."""
    from PIL import Image

    if image.size == (size, size):
        return image
    short = round(size * margin)
    width, height = (short * side // min(image.size) for side in image.size)
    left, top = (round((side - size) / 2) for side in (width, height))
    if max(width, height) > _ELONGATED * short:  # the same centre alone, up to rounding: all of it may take gigabytes
        across, down = image.width / width, image.height / height
        box = (left * across, top * down, (left + size) * across, (top + size) * down)
        return image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def _part(width: int, height: int, draws: list[float]) -> tuple[float, float, float, float]:
    """A random part with 8 to 100 % of the area and a shape from 3:4 to 4:3; the middle where none fits."""
    for area, shape, left, top in zip(*(iter(draws),) * 4, strict=True):
        ratio = exp((2 * shape - 1) * log(4 / 3))
        pixels = (0.08 + 0.92 * area) * width * height
        w, h = round(sqrt(pixels * ratio)), round(sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
            return x, y, x + w, y + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


def _problem(path: Path, size: int) -> str | None:
    try:
        _centre(_opened(path), size)
    except InputError as error:
        return str(error)
    return None
