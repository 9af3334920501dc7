"""Signs that splits are not what they should be: shared images, and accuracies that differ too much or are chance."""

import logging
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from exitwise import data
from exitwise.calibration.mc_softmax import chunk_slices
from exitwise.calibration.trace import Trace
from exitwise.core.errors import net_input_errors
from exitwise.core.memory import align
from exitwise.core.nested import describe
from exitwise.data.folders import ImageFileSet, find_shared_files
from exitwise.models.cascade import Cascade
from exitwise.models.net import MultiExitNet, preserve_training_mode

_log = logging.getLogger(__name__)

_SAMPLES = 1000  # images of a split that are classified to estimate an accuracy
_MIN_GAP = 0.01  # smaller differences of accuracies are never reported
_STANDARD_ERRORS = 3  # differences below so many are chance
_CHANCE_GAP = 0.02  # accuracies up to so much above guessing are reported
_MIN_SAMPLES = 50  # fewer say nothing about chance
_MAX_NAME = 60  # characters of a file name in a message; several fit into one line
_NEARLY_ALL = 0.995  # accuracy that is suspicious wherever it is reached


@dataclass(frozen=True)
class Accuracy:
    """Share of `samples` images of a split that the last exit classifies correctly."""

    split: str
    value: float
    samples: int

    def __str__(self) -> str:
        return f"{self.value:.1%} of the {self.split} images"

    def exceeds(self, other: "Accuracy") -> bool:
        """Return whether this accuracy is so much larger that it cannot be chance."""
        n, m = self.samples, other.samples
        pooled = (self.value * n + other.value * m) / (n + m)
        error = sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
        return self.value - other.value > max(_MIN_GAP, _STANDARD_ERRORS * error)

    def is_chance(self, classes: int) -> bool:
        """Return whether guessing would be about as good."""
        chance = 1 / classes
        error = sqrt(chance * (1 - chance) / self.samples)
        return self.samples >= _MIN_SAMPLES and self.value <= chance + max(_CHANCE_GAP, _STANDARD_ERRORS * error)


def warn_of_shared_images(splits: data.Splits[Any]) -> None:
    """Log in one line how many image files of a split have the same content as files of another."""
    named = {"training": splits.train, "validation": splits.val, "test": splits.test}
    sets = {name: part for name, part in named.items() if isinstance(part, ImageFileSet)}
    notes: list[str] = []
    for ours, theirs in (("training", "validation"), ("training", "test"), ("validation", "test")):
        if ours in sets and theirs in sets and (pairs := find_shared_files(sets[ours], sets[theirs])):
            first, second = pairs[0]
            example = "" if notes else f" (such as {_name_file(second)} and {_name_file(first)})"
            notes.append(f"{len(pairs)} of {len(sets[theirs])} {theirs} images are also {ours} images{example}")
    if notes:
        _log.warning("%s: accuracy and calibration will look too good", "; ".join(notes))


def _name_file(path: Path) -> str:
    """Return a path for a message: relative to the working directory if it is there, and the end of a long one."""
    file = path.absolute()
    name = str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(path)
    return name if len(name) <= _MAX_NAME else f"...{name[3 - _MAX_NAME :]}"


def last_exit_accuracy(net: MultiExitNet, images: Any, split: str, batch_size: int = 64) -> Accuracy:
    """Classify up to 1,000 images, evenly spaced in a dataset, with the last exit of a net on its device."""
    positions = torch.linspace(0, len(images) - 1, min(_SAMPLES, len(images))).long()
    device = next(net.parameters()).device
    correct = 0
    with preserve_training_mode(net), torch.no_grad():
        net.eval()
        for inputs, labels, _ in data.Batches(images[positions], batch_size):
            with net_input_errors(describe(inputs[0])):
                logits = net(inputs.to(device))[-1]
            correct += int((logits.argmax(1).cpu() == labels).sum())
    return Accuracy(split, correct / len(positions), len(positions))


def trace_accuracies(trace: Trace, exit: int = -1) -> list[Accuracy]:
    """Return the accuracies of an exit, the last one by default, on the validation and, if any, the test samples."""
    head, accuracies = trace.heads[exit], []
    for name, split in (("validation", trace.val), ("test", trace.test)):
        if split is not None and len(split):
            correct = sum(
                int((head.logits(align(split.features[exit][part])).argmax(1) == split.labels[part]).sum())
                for part in chunk_slices(len(split), trace.num_classes)
            )
            accuracies.append(Accuracy(name, correct / len(split), len(split)))
    return accuracies


def warn_of_members(net: Cascade, trace: Trace) -> None:
    """Log one line for each network of a cascade but the last that is about as good as guessing."""
    for exit, (member, following) in enumerate(pairwise(net.member_of_exit)):
        if member != following:
            warn_of_network(f"network {member + 1} of the cascade", trace, exit)


def warn_of_network(name: str, trace: Trace, exit: int = -1) -> None:
    """Log one line if a network, whose last exit is `exit` of the trace, is about as good as guessing."""
    accuracy = trace_accuracies(trace, exit)[0]
    if accuracy.is_chance(trace.num_classes):
        _log.warning(
            "%s is right on %s, about as often as guessing among %d classes: "
            "size or normalization of its images, or the order of its classes, probably differ from its training",
            name,
            accuracy,
            trace.num_classes,
        )


def warn_of_accuracies(accuracies: list[Accuracy], classes: int) -> None:
    """Log at most one line on accuracies of a last exit that was trained elsewhere.

    Args:
        accuracies: Of the validation images first, then of test and perhaps of training images.
        classes: Number of classes.
    """
    val = accuracies[0]
    by_split = {accuracy.split: accuracy for accuracy in accuracies}
    test, train = by_split.get("test"), by_split.get("training")
    largest = max(accuracies, key=lambda accuracy: accuracy.samples)  # the validation images may be few
    if largest.is_chance(classes):
        _log.warning(
            "the last exit is right on %s, about as often as guessing among %d classes: "
            "size, crop or normalization of the images, or the order of classes, probably differ from its training",
            largest,
            classes,
        )
    elif test is not None and val.exceeds(test):
        _log.warning(
            "the last exit is right on %s, but only on %s: if the network was trained on the validation images, its "
            "calibration will be wrong; --val-data takes images that it has not seen",
            val,
            test,
        )
    elif test is not None and test.exceeds(val):
        _log.warning(
            "the last exit is right on %s, but only on %s: if the network was trained on the test images, "
            "results will look too good; --test-data takes images that it has not seen",
            test,
            val,
        )
    elif train is not None and train.exceeds(val):
        _log.warning(
            "the last exit is right on %s, but only on %s: the network has seen the training images, "
            "so the heads learn from features that are better than on new images",
            train,
            val,
        )
    elif min(accuracy.value for accuracy in accuracies) >= _NEARLY_ALL:
        _log.warning(
            "the last exit is right on %s: if the network was trained on them, "
            "calibration and results mean nothing; --val-data takes images that it has not seen",
            val,
        )
