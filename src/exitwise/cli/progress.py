"""Progress in the terminal: bars while a net runs over images, and one line per epoch of training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from exitwise.cli import tables
from exitwise.core.rank import is_rank_zero
from exitwise.models.input_batches import Progress as CollectProgress
from exitwise.training.callbacks import TrainingCallback
from exitwise.training.history import EpochRecord, History


class TrainingProgress(TrainingCallback):
    """Training progress on stderr; without a terminal only one line per epoch."""

    def __init__(self) -> None:
        console = tables.console(stderr=True)
        visible = console.is_terminal and is_rank_zero()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Progress(*columns, console=console, disable=not visible, transient=True)
        self._task: TaskID | None = None
        self._epochs = self._batches = 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def on_features(self, split: str, done: int, samples: int | None) -> None:
        if self._task is None:
            self._task = self._bars.add_task("", note="")
        self._bars.update(self._task, description=f"features of {split}", completed=done, total=samples)

    def on_train_start(self, epochs: int, batches: int, history: History) -> None:
        self._epochs, self._batches = epochs, batches
        done = len(history.epochs)
        if done:
            self._bars.console.print(f"resuming after {done} of {epochs} epochs")
        if self._task is not None:
            self._bars.remove_task(self._task)
        if done < epochs:
            self._task = self._bars.add_task(f"epoch {done + 1}/{epochs}", total=batches, note="")

    def on_batch_end(self, epoch: int, batch: int, images_per_second: float, seconds_left: float) -> None:
        if self._task is None:
            return
        remaining = timedelta(seconds=round(seconds_left))
        self._bars.update(
            self._task,
            description=f"epoch {epoch + 1}/{self._epochs}",
            completed=batch,
            note=f"{images_per_second:.0f} images/s, {remaining} left",
        )

    def on_epoch_end(self, row: EpochRecord, kept: bool) -> None:
        accuracies = " ".join(f"{100 * top1:5.2f}" for top1 in row.val_top1)
        self._bars.console.print(
            f"epoch {row.epoch:>{len(str(self._epochs))}}/{self._epochs}  loss {row.train_loss:7.4f}  "
            f"validation {row.val_loss:7.4f}  top-1 % by exit {accuracies}  {row.images_per_second:.0f} images/s"
            f"{'  kept' if kept else ''}",
            soft_wrap=True,
        )


@contextmanager
def progress_bars(of: str = "images") -> Iterator[CollectProgress]:
    """Show a progress bar per split on stderr."""
    columns = (
        TextColumn("{task.description:>5}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(of),
        TimeRemainingColumn(),
    )
    console = tables.console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal or not is_rank_zero()) as shown:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
            shown.update(tasks[name], completed=done)

        yield progress


@contextmanager
def spinner(message: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr, if it is a terminal; the function that is yielded changes its message."""
    console = tables.console(stderr=True)
    if not console.is_terminal:
        yield lambda message: None
        return
    with console.status(message) as shown:
        yield shown.update
