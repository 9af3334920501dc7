"""Hooks of a training for progress bars, logs and tests."""

from typing import TypeVar

from exitwise.core.errors import InputError
from exitwise.training.history import EpochRecord, History

T = TypeVar("T")


class TrainingCallback:
    """Hooks that a training calls. These do nothing: override those that you need."""

    def on_features(self, split: str, done: int, samples: int | None) -> None:
        """Handle progress of the backbone: features of `done` samples of a split are computed (`train_heads` only)."""

    def on_train_start(self, epochs: int, batches: int, history: History) -> None:
        """Handle the start: `epochs` of `batches` each; `history` has the epochs that are already done."""

    def on_batch_end(self, epoch: int, batch: int, images_per_second: float, seconds_left: float) -> None:
        """Handle the end of a batch; `epoch` counts from 0, `batch` from 1."""

    def on_epoch_end(self, row: EpochRecord, kept: bool) -> None:
        """Handle the end of an epoch; `kept` if its weights (with `train_heads`, those of any head) are the best."""


def resolve_former_name(name: str, value: T | None, former_name: str, former_value: T | None) -> T | None:
    """Return the value of an argument given by its name or by its former name, None if it is not given."""
    if value is not None and former_value is not None:
        raise InputError(f"`{former_name}` is the former name of `{name}`: pass only `{name}`")
    return former_value if value is None else value
