"""Small datasets on disk and in memory."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from exitwise.data import ImageSet


def write_cifar(root: Path, train: int = 40, test: int = 12, seed: int = 0) -> np.ndarray:
    """Write random images in the official layout; return the train records."""
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    written = []
    for name, n in (("train", train), ("test", test)):
        records = rng.integers(0, 256, (n, 3074), dtype=np.uint8)
        records[:, 0] %= 20
        records[:, 1] %= 100
        records.tofile(folder / f"{name}.bin")
        written.append(records)
    (folder / "fine_label_names.txt").write_text("\n".join(f"class_{i}" for i in range(100)) + "\n")
    return written[0]


def image_set(n: int, channels: int = 3, side: int = 6) -> ImageSet:
    """Random images; a label is the image's position, so that it can be followed."""
    pixels = np.random.default_rng(n).integers(0, 256, (n, channels, side, side), dtype=np.uint8)
    statistics = (0.4, 0.5, 0.6)[:channels], (0.2, 0.3, 0.25)[:channels]
    return ImageSet(torch.from_numpy(pixels), torch.arange(n), torch.arange(n), ("a", "b"), *statistics)


def picture(path: Path, width: int = 12, height: int = 9, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Save a random image in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, width, height])
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
    image.save(path)
    return image


def class_folders(root: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 3) -> Path:
    for label, name in enumerate(classes):
        for number in range(each):
            picture(root / name / f"{number}.png", seed=10 * label + number)
    return root
