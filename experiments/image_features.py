"""Features of images at every exit of a net, for experiments on images that a trace does not have."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import exitwise as ew
from exitwise.data.batches import Normalize


def compute_features(net: ew.MultiExitNet, images: Tensor, normalize: Normalize) -> list[Tensor]:
    """Compute the features (n, p) of every exit, batch by batch, from images (n, 3, height, width) of bytes."""
    parts = []
    with torch.no_grad():
        for batch in images.split(250):
            parts.append(net.features(normalize(batch).contiguous(memory_format=torch.channels_last)))
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]


def read_images(folder: Path, count: int) -> Tensor:
    """Read the first images (n, 3, 32, 32) of a folder of PNG files in folders, by file name."""
    from PIL import Image

    files = sorted(folder.glob("*/*.png"), key=lambda path: path.name)[:count]
    return torch.stack([torch.from_numpy(np.array(Image.open(path).convert("RGB"))) for path in files]).permute(
        0, 3, 1, 2
    )


def detection_auroc(known: np.ndarray, other: np.ndarray) -> float:
    """Return the probability that a known image (n,) has a larger value than another one (m,)."""
    is_known = np.arange(len(known) + len(other)) < len(known)
    return float(ew.metrics.auroc(np.concatenate([known, other]), is_known))
