"""Images as bytes, and batches of them as the net wants them."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageSet:
    """n pictures: pixels (n, channels, height, width) uint8, labels and positions in the data set (n,)."""

    pixels: Tensor
    labels: Tensor
    index: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of the channels, in 0..1, for normalisation
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, positions: Tensor) -> "ImageSet":
        """Some of them."""
        return ImageSet(
            self.pixels[positions], self.labels[positions], self.index[positions], self.classes, self.mean, self.std
        )

    def fingerprints(self) -> Tensor:
        """(n,) int64, a hash of each picture's pixels."""
        rows = self.pixels.flatten(1).numpy()
        hashes = (blake2b(row, digest_size=8).digest() for row in rows)
        return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in hashes])


class Batches:
    """(images, labels, index) in order: normalised float32 images, no augmentation."""

    def __init__(self, dataset: ImageSet, batch_size: int) -> None:
        self.dataset = dataset
        self._batch_size = batch_size
        # (pixels / 255 - mean) / std as one multiplication and one addition
        std = torch.tensor(dataset.std)[:, None, None]
        self._scale = 1 / (255 * std)
        self._shift = -torch.tensor(dataset.mean)[:, None, None] / std

    def __len__(self) -> int:
        return -(-len(self.dataset) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start in range(0, len(self.dataset), self._batch_size):
            part = slice(start, start + self._batch_size)
            images = torch.addcmul(self._shift, self.dataset.pixels[part].float(), self._scale)
            yield images, self.dataset.labels[part], self.dataset.index[part]
