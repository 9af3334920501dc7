"""Held-out images: the validation split and, for datasets without a test set, the test split."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from exitwise.core import tensorfiles
from exitwise.core.errors import InputError
from exitwise.core.seeds import as_generator
from exitwise.data.images import ImageDataset

FORMAT, VERSION = "exitwise.split", 1
_VERSION_OWN_VAL = 2  # of splits of a validation set, which earlier versions of exitwise must not read as train images

D = TypeVar("D", bound=ImageDataset)


@dataclass(frozen=True)
class Splits(Generic[D]):
    """Disjoint train, validation and test images."""

    train: D
    val: D
    test: D


@dataclass(frozen=True, eq=False)
class HeldOutPart:
    """Held-out images by position and by fingerprint, both (n,) int64; fingerprints do not depend on the order."""

    index: Tensor
    fingerprints: Tensor

    def matches(self, fingerprints: Tensor) -> bool:
        """Return whether a dataset with these `fingerprints` has the held-out images at the same positions."""
        return int(self.index.max()) < len(fingerprints) and torch.equal(fingerprints[self.index], self.fingerprints)

    def locate(self, positions: dict[int, list[int]], samples: int, name: str, images: str = "train images") -> Tensor:
        """Return the positions (n,) of the held-out images in a dataset of another order.

        Args:
            positions: Positions by fingerprint, several for duplicate images; those returned are removed.
            samples: Size of the dataset, for the message.
            name: Name of the split, for the message.
            images: What the dataset holds, for the message.
        """
        matched = [
            candidates.pop(0) if (candidates := positions.get(value)) else None for value in self.fingerprints.tolist()
        ]
        if missing := matched.count(None):
            raise InputError(
                f"{missing} of the run's {len(self.index)} {name} images are not among these {samples} "
                f"{images}: this is not the dataset that the run was made with"
            )
        return torch.tensor(matched)


Part = HeldOutPart  # its former name


@dataclass(frozen=True, eq=False)
class HoldOut:
    """Images held out from the train images: a validation part and, for datasets without a test set, a test part.

    With `from_val`, both parts are of a validation set of its own, and all train images remain.

    Example:
        >>> import exitwise as ew
        >>> train, test = ew.data.load("digits")
        >>> splits = ew.data.HoldOut.random(train, val_size=297, seed=0, test_size=500).apply(train, test)
        >>> len(splits.train), len(splits.val), len(splits.test)
        (1000, 297, 500)
    """

    val: HeldOutPart
    test: HeldOutPart | None = None
    from_val: bool = False

    @classmethod
    def random(
        cls, train: ImageDataset, val_size: int, seed: int, test_size: int = 0, needs_train: bool = True
    ) -> "HoldOut":
        """Hold out randomly chosen train images.

        Args:
            train: The train images.
            val_size: Number of validation images.
            seed: Seed for the choice.
            test_size: Number of test images, for datasets without a test set.
            needs_train: Whether some train images must remain; networks that are trained already need none.

        Raises:
            InputError: If no validation image or no train image would remain.
        """
        if val_size < 1 or test_size < 0 or val_size + test_size + needs_train > len(train):
            sizes = f"{val_size} and the test split {test_size}" if test_size else f"{val_size}"
            raise InputError(
                f"the validation split must take some of {len(train)} train images, but would take {sizes}"
            )
        order = torch.randperm(len(train), generator=as_generator(seed))
        prints = train.fingerprints()
        test, val = (part.sort().values for part in torch.split(order[: test_size + val_size], [test_size, val_size]))
        return cls(HeldOutPart(val, prints[val]), HeldOutPart(test, prints[test]) if test_size else None)

    @classmethod
    def of_val(cls, val: ImageDataset, seed: int, val_size: int | None = None, test_size: int = 0) -> "HoldOut":
        """Use a validation set of its own, perhaps randomly split into a validation and a test part.

        Args:
            val: The validation set.
            seed: Seed for the split.
            val_size: Number of validation images; all that are not test images by default.
            test_size: Number of test images, for datasets without a test set.

        Raises:
            InputError: If a part would be empty, or the set has too few images.
        """
        wanted = len(val) - test_size if val_size is None else val_size
        if wanted < 1 or test_size < 0 or wanted + test_size > len(val):
            raise InputError(
                f"{len(val)} images cannot be split into {wanted} for validation and {test_size} for testing"
            )
        order = torch.randperm(len(val), generator=as_generator(seed))
        prints = val.fingerprints()
        test, rest = (part.sort().values for part in torch.split(order[: test_size + wanted], [test_size, wanted]))
        held_out_test = HeldOutPart(test, prints[test]) if test_size else None
        return cls(HeldOutPart(rest, prints[rest]), held_out_test, from_val=True)

    def apply(self, train: D, test: D | None, val: D | None = None) -> Splits[D]:
        """Split a dataset into the remaining train images and the held-out parts.

        Args:
            train: The dataset that the images were held out from, perhaps in another order.
            test: Its test set; replaced by the held-out test part if there is one.
            val: Its validation set, with `from_val`.

        Raises:
            InputError: If held-out images are missing in `train` or `val`, or if there are no test images.
        """
        if self.from_val:
            return self._split_val(train, test, val)
        val_positions, held_out_test = self._locate_parts(train.fingerprints())
        remains = torch.ones(len(train), dtype=torch.bool)
        remains[val_positions] = False
        if held_out_test is not None:
            remains[held_out_test] = False
            test = train[held_out_test]
        if test is None:
            raise InputError("the run's split holds out no test images, and the dataset has no test set")
        return Splits(train[remains.nonzero().squeeze(1)], train[val_positions], test)

    def _split_val(self, train: D, test: D | None, val: D | None) -> Splits[D]:
        if val is None:
            raise InputError("the run has validation images of its own, but the dataset has no validation set")
        val_positions, test_positions = self._locate_parts(val.fingerprints(), "validation images")
        test = test if test_positions is None else val[test_positions]
        if test is None:
            raise InputError("the run's split holds out no test images, and the dataset has no test set")
        return Splits(train, val[val_positions], test)

    def _locate_parts(self, fingerprints: Tensor, images: str = "train images") -> tuple[Tensor, Tensor | None]:
        """Return the positions of both parts in a dataset with these `fingerprints`."""
        if self.val.matches(fingerprints) and (self.test is None or self.test.matches(fingerprints)):
            return self.val.index, None if self.test is None else self.test.index
        positions: dict[int, list[int]] = {}
        for position, value in enumerate(fingerprints.tolist()):
            positions.setdefault(value, []).append(position)
        val = self.val.locate(positions, len(fingerprints), "validation", images)
        return val, None if self.test is None else self.test.locate(positions, len(fingerprints), "test", images)

    def save(self, path: Path) -> None:
        """Write positions and fingerprints to a safetensors file."""
        tensors = {"val.index": self.val.index, "val.fingerprint": self.val.fingerprints}
        if self.test is not None:
            tensors |= {"test.index": self.test.index, "test.fingerprint": self.test.fingerprints}
        metadata = {"from_val": True} if self.from_val else {}
        tensorfiles.write(path, tensors, FORMAT, _VERSION_OWN_VAL if self.from_val else VERSION, metadata)

    @classmethod
    def load(cls, path: Path) -> "HoldOut":
        """Read a file written by `save`; raise InputError if it is damaged."""
        tensors, header = tensorfiles.read(path)
        from_val = header.get("version") == str(_VERSION_OWN_VAL)
        tensorfiles.check_format(path, header, FORMAT, _VERSION_OWN_VAL if from_val else VERSION)
        val = _read_part(path, tensors, "val")
        if val is None:
            raise InputError(f"{path} must hold val.index and val.fingerprint")
        test = _read_part(path, tensors, "test")
        index = val.index if test is None else torch.cat([val.index, test.index])
        if len(set(index.tolist())) < len(index):
            raise InputError(f"{path} must hold out each image once, but names some twice")
        return cls(val, test, from_val)


def _read_part(path: Path, tensors: dict[str, Tensor], name: str) -> HeldOutPart | None:
    """Return the part `name` of a file's tensors, None if it is missing; raise InputError if it is damaged."""
    index, prints = tensors.get(f"{name}.index"), tensors.get(f"{name}.fingerprint")
    if index is None and prints is None:
        return None
    if index is None or prints is None or index.shape != prints.shape or index.dim() != 1 or not len(index):
        raise InputError(f"{path} must hold {name}.index and {name}.fingerprint, one of each per image")
    if index.dtype != torch.int64 or prints.dtype != torch.int64 or int(index.min()) < 0:
        raise InputError(f"{path} must hold whole numbers from 0 on in {name}.index, and int64 fingerprints")
    return HeldOutPart(index, prints)
