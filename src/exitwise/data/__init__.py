"""Data sets by name, held as bytes and turned into batches without per-image Python."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor

from exitwise import tensorfiles
from exitwise.data import cifar
from exitwise.data.images import Batches, ImageSet
from exitwise.errors import InputError
from exitwise.seeds import generator_of

__all__ = ["DATA_SETS", "Batches", "ImageSet", "ValSplit", "load"]

# Each takes the folder that holds the data and returns its train and test sets.
DATA_SETS: Mapping[str, Callable[[Path], tuple[ImageSet, ImageSet]]] = {"cifar100": cifar.cifar100}

SPLIT_FORMAT, SPLIT_VERSION = "exitwise.split", 1


def load(name: str, root: str | Path) -> tuple[ImageSet, ImageSet]:
    """Train and test images of a data set; the train images still hold the validation split."""
    if name not in DATA_SETS:
        near = get_close_matches(name, DATA_SETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(DATA_SETS)}"
        raise InputError(f"`data` must be the name of a data set, but got {name!r}; {hint}")
    return DATA_SETS[name](Path(root))


class ValSplit:
    """Which train images are held out for validation.

    They are named by a fingerprint of their pixels besides their position, so that a copy of the data set in another
    order gives the same split.
    """

    def __init__(self, index: Tensor, fingerprints: Tensor) -> None:
        self.index = index  # (n,) int64
        self.fingerprints = fingerprints  # (n,) int64

    @classmethod
    def random(cls, train: ImageSet, size: int, seed: int) -> "ValSplit":
        """`size` of the train images, chosen by a seed."""
        if not 0 < size < len(train):
            raise InputError(f"the validation split must take some of {len(train)} train images, but would take {size}")
        index = torch.randperm(len(train), generator=generator_of(seed))[:size].sort().values
        return cls(index, train.fingerprints()[index])

    def apply(self, train: ImageSet) -> tuple[ImageSet, ImageSet]:
        """The train images that stay, and the validation images in this split's own order."""
        index = self._find(train)
        stays = torch.ones(len(train), dtype=torch.bool)
        stays[index] = False
        return train[stays.nonzero().squeeze(1)], train[index]

    def _find(self, train: ImageSet) -> Tensor:
        known = train.fingerprints()
        if int(self.index.max()) < len(known) and torch.equal(known[self.index], self.fingerprints):
            return self.index
        position = {int(value): place for place, value in enumerate(known)}
        missing = [value for value in self.fingerprints.tolist() if value not in position]
        if missing:
            raise InputError(
                f"{len(missing)} of the run's {len(self.index)} validation images are not among these {len(known)} "
                f"train images: this is not the data set that the run was made with"
            )
        return torch.tensor([position[value] for value in self.fingerprints.tolist()])

    def save(self, path: Path) -> None:
        tensors = {"val.index": self.index, "val.fingerprint": self.fingerprints}
        tensorfiles.write(path, tensors, SPLIT_FORMAT, SPLIT_VERSION, {})

    @classmethod
    def load(cls, path: Path) -> "ValSplit":
        tensors, header = tensorfiles.read(path)
        tensorfiles.check_format(path, header, SPLIT_FORMAT, SPLIT_VERSION)
        index, prints = tensors.get("val.index"), tensors.get("val.fingerprint")
        if index is None or prints is None or index.shape != prints.shape or index.dim() != 1 or not len(index):
            raise InputError(f"{path} must hold val.index and val.fingerprint, one of each per validation image")
        return cls(index, prints)
