"""Which pictures are held out for validation and, where a data set has no test set of its own, for test."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from exitwise.core import tensorfiles
from exitwise.core.errors import InputError
from exitwise.core.seeds import as_generator
from exitwise.data.images import Pictures

FORMAT, VERSION = "exitwise.split", 1

P = TypeVar("P", bound=Pictures)


@dataclass(frozen=True)
class Splits(Generic[P]):
    """Three sets that share no picture."""

    train: P
    val: P
    test: P


@dataclass(frozen=True, eq=False)
class HeldOutPart:
    """Some pictures, by position and by a fingerprint that a copy in another order has too. Both (n,) int64."""

    index: Tensor
    fingerprints: Tensor

    def matches(self, known: Tensor) -> bool:
        """Whether pictures with the fingerprints `known` have them at the same positions."""
        return int(self.index.max()) < len(known) and torch.equal(known[self.index], self.fingerprints)

    def locate(self, places: dict[int, list[int]], samples: int, name: str) -> Tensor:
        """Their positions by fingerprint, each taken out of `places`: a picture that is there twice has two."""
        found = [place.pop(0) if (place := places.get(value)) else None for value in self.fingerprints.tolist()]
        if missing := found.count(None):
            raise InputError(
                f"{missing} of the run's {len(self.index)} {name} images are not among these {samples} "
                f"train images: this is not the data set that the run was made with"
            )
        return torch.tensor(found)


Part = HeldOutPart  # its former name


@dataclass(frozen=True, eq=False)
class HoldOut:
    """The validation part of a data set's train pictures, and the test part where the data set has none."""

    val: HeldOutPart
    test: HeldOutPart | None = None

    @classmethod
    def random(cls, train: Pictures, val_size: int, seed: int, test_size: int = 0) -> "HoldOut":
        """So many of the train pictures, chosen by a seed; a test part first, where one is asked for."""
        if val_size < 1 or test_size < 0 or val_size + test_size >= len(train):
            also = f" and the test split {test_size}" if test_size else ""
            raise InputError(
                f"the validation split must take some of {len(train)} train images, but would take {val_size}{also}"
            )
        order = torch.randperm(len(train), generator=as_generator(seed))
        prints = train.fingerprints()
        test, val = (part.sort().values for part in torch.split(order[: test_size + val_size], [test_size, val_size]))
        return cls(HeldOutPart(val, prints[val]), HeldOutPart(test, prints[test]) if test_size else None)

    def apply(self, train: P, test: P | None) -> Splits[P]:
        """The train pictures that stay, and the parts held out, each in its own order."""
        known = train.fingerprints()
        val, held = self._find(known)
        stays = torch.ones(len(train), dtype=torch.bool)
        stays[val] = False
        if held is not None:
            stays[held] = False
            test = train[held]
        if test is None:
            raise InputError("the run's split says nothing about test images, and the data set has none of its own")
        return Splits(train[stays.nonzero().squeeze(1)], train[val], test)

    def _find(self, known: Tensor) -> tuple[Tensor, Tensor | None]:
        """Positions of both parts among pictures with the fingerprints `known`."""
        if self.val.matches(known) and (self.test is None or self.test.matches(known)):
            return self.val.index, None if self.test is None else self.test.index
        places: dict[int, list[int]] = {}
        for place, value in enumerate(known.tolist()):
            places.setdefault(value, []).append(place)
        val = self.val.locate(places, len(known), "validation")
        return val, None if self.test is None else self.test.locate(places, len(known), "test")

    def save(self, path: Path) -> None:
        tensors = {"val.index": self.val.index, "val.fingerprint": self.val.fingerprints}
        if self.test is not None:
            tensors |= {"test.index": self.test.index, "test.fingerprint": self.test.fingerprints}
        tensorfiles.write(path, tensors, FORMAT, VERSION, {})

    @classmethod
    def load(cls, path: Path) -> "HoldOut":
        tensors, header = tensorfiles.read(path)
        tensorfiles.check_format(path, header, FORMAT, VERSION)
        val = _part(path, tensors, "val")
        if val is None:
            raise InputError(f"{path} must hold val.index and val.fingerprint")
        test = _part(path, tensors, "test")
        every = val.index if test is None else torch.cat([val.index, test.index])
        if len(set(every.tolist())) < len(every):
            raise InputError(f"{path} must hold out each image once, but names some twice")
        return cls(val, test)


def _part(path: Path, tensors: dict[str, Tensor], name: str) -> HeldOutPart | None:
    index, prints = tensors.get(f"{name}.index"), tensors.get(f"{name}.fingerprint")
    if index is None and prints is None:
        return None
    if index is None or prints is None or index.shape != prints.shape or index.dim() != 1 or not len(index):
        raise InputError(f"{path} must hold {name}.index and {name}.fingerprint, one of each per image")
    if index.dtype != torch.int64 or prints.dtype != torch.int64 or int(index.min()) < 0:
        raise InputError(f"{path} must hold whole numbers from 0 on in {name}.index, and int64 fingerprints")
    return HeldOutPart(index, prints)
