"""Classification of image files for `exitwise predict`: from file names to rows, with torch or ONNX."""

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.image_files import SUFFIXES, read_or_error, require_pillow
from exitwise.core.predictions import Array
from exitwise.core.preprocessing import Preprocessing
from exitwise.policies.controller import BudgetController
from exitwise.runtime.engine import Answer

FIELDS = ("image", "predicted", "label", "confidence", "exit", "cost", "error")
SET_FIELDS = ("set", "set_labels")  # of a classifier with prediction sets: classes and their names
ABSTAINED = "abstained"  # of a classifier with an abstention


def row_fields(sets: object, abstention: object, probs: bool = False) -> list[str]:
    """Return the fields of the rows of a classifier with these sets and this abstention, None without."""
    extras = [*(SET_FIELDS if sets is not None else ()), *([ABSTAINED] if abstention is not None else [])]
    return [*FIELDS, *extras, *(["probs"] if probs else [])]


class StreamClassifier(Protocol):
    """A `Classifier` or an ONNX `Session`."""

    def stream(
        self, images: Iterable[Any], batch_size: int = 64, *, controller: BudgetController | None = None
    ) -> Iterator[Answer]: ...


@dataclass(frozen=True)
class ImageList:
    """Names of image files. `total` is their number, or None for names from stdin."""

    names: Iterable[str]
    total: int | None


def list_images(arguments: Sequence[str]) -> ImageList:
    """List the given files, the images in given folders, or for "-" the names on stdin."""
    require_pillow()
    if "-" in arguments:
        if len(arguments) > 1:
            raise InputError("- reads the list of images from stdin and cannot be combined with other names")
        return ImageList(_read_stdin_names(), None)
    for argument in arguments:
        if not Path(argument).exists():
            raise InputError(f"{argument} does not exist")
    names = [
        name for argument in arguments for name in (_list_folder(argument) if Path(argument).is_dir() else [argument])
    ]
    return ImageList(names, len(names))


def _read_stdin_names() -> Iterator[str]:
    for line in sys.stdin.buffer:
        if name := os.fsdecode(line.rstrip(b"\r\n")):
            yield name


def _list_folder(folder: str) -> list[str]:
    """List the images in a folder and its subfolders, sorted by name."""
    images = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not images:
        raise InputError(f"{folder} holds no images")
    return [str(path) for path in images]


@dataclass
class Summary:
    """Counts of images, errors, exits and abstentions, and the total cost; `former` are rows of a resumed call."""

    images: int = 0
    errors: int = 0
    cost: float = 0.0
    exits: Counter[int] = field(default_factory=Counter)
    former: int = 0
    former_errors: int = 0
    abstained: int | None = None  # None if the classifier answers all images

    @property
    def all_failed(self) -> bool:
        """True if there are rows, of this call or before, and each has an error."""
        rows = self.images + self.former
        return rows > 0 and self.errors + self.former_errors == rows

    def add(self, answer: Answer) -> None:
        self.images += 1
        if answer.error is not None:
            self.errors += 1
        elif answer.exit is not None and answer.cost is not None:
            self.cost += answer.cost
            self.exits[answer.exit] += 1
            if answer.abstained is not None:
                self.abstained = (self.abstained or 0) + answer.abstained

    @property
    def mean_cost(self) -> float | None:
        answered = self.images - self.errors
        return self.cost / answered if answered else None


def predict(
    classifier: StreamClassifier,
    names: Iterable[str],
    preprocessing: Preprocessing,
    classes: Sequence[str] | None,
    batch_size: int,
    summary: Summary,
    probs: bool = False,
    controller: BudgetController | None = None,
    fields: Sequence[str] = FIELDS,
) -> Iterator[dict[str, Any]]:
    """Yield one row per image, in input order, and keep `summary` up to date; `fields` are those of `row_fields`."""
    waiting: deque[str] = deque()  # names whose answers have not come yet: as many as the stream holds

    def images() -> Iterator[Array | InputError]:
        for name in names:
            waiting.append(name)
            yield read_or_error(Path(name), preprocessing, name)

    for answer in classifier.stream(images(), batch_size, controller=controller):
        summary.add(answer)
        row = _row(waiting.popleft(), answer, classes)
        if "set" in fields:
            row["set"] = None if answer.set is None else list(answer.set)
            named = answer.set is not None and classes is not None
            row["set_labels"] = [classes[c] for c in answer.set or ()] if named and classes else None
        if ABSTAINED in fields:
            row[ABSTAINED] = answer.abstained
        if probs:
            row["probs"] = None if answer.probs is None else np.round(answer.probs.astype(float), 7).tolist()
        yield row


def _row(name: str, answer: Answer, classes: Sequence[str] | None) -> dict[str, Any]:
    predicted, confidence, cost = answer.predicted, answer.confidence, answer.cost
    values = (
        predicted,
        None if predicted is None or classes is None else classes[predicted],
        None if confidence is None else round(confidence, 6),
        answer.exit,
        int(cost) if cost is not None and cost.is_integer() else cost,
        answer.error,
    )
    return dict(zip(FIELDS, (name, *values), strict=True))


def skip_done(
    names: Iterable[str],
    done: Iterable[dict[str, Any]],
    path: Path,
    summary: Summary,
    cell: Callable[[str], str] = lambda name: name,
) -> Iterator[str]:
    """Return the names without a row, and count the rows in `summary`; the rows must match the first names.

    Args:
        names: All names.
        done: The rows that there are.
        path: Their file, for messages.
        summary: Gets the number of rows and of errors among them.
        cell: What the file holds for a name.
    """
    remaining = iter(names)
    for row in done:
        summary.former += 1
        summary.former_errors += bool(row["error"])
        if (name := next(remaining, None)) is None or cell(name) != row["image"]:
            count = summary.former
            current = "there are no more images" if name is None else f"image {count} is {name}"
            raise InputError(f"{path}: row {count} is of {row['image']}, but {current}: the list of images has changed")
    return remaining
