"""What people see while a net is trained: a line per epoch, and a bar for the epoch that runs."""

from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from exitwise import show
from exitwise.history import Epoch, History
from exitwise.training import Watcher


class Live(Watcher):
    """On stderr: where nobody watches, the lines alone."""

    def __init__(self) -> None:
        console = show.console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task: TaskID | None = None
        self._epochs = self._batches = 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def started(self, epochs: int, batches: int, history: History) -> None:
        self._epochs, self._batches = epochs, batches
        done = len(history.epochs)
        if done:
            self._bars.console.print(f"going on after {done} of {epochs} epochs")
        if done < epochs:
            self._task = self._bars.add_task(f"epoch {done + 1}/{epochs}", total=batches, note="")

    def batch(self, epoch: int, batch: int, images_per_second: float, seconds_left: float) -> None:
        if self._task is None:
            return
        left = timedelta(seconds=round(seconds_left))
        self._bars.update(
            self._task,
            description=f"epoch {epoch + 1}/{self._epochs}",
            completed=batch,
            note=f"{images_per_second:.0f} images/s, {left} left",
        )

    def epoch(self, row: Epoch, kept: bool) -> None:
        accuracies = " ".join(f"{100 * top1:5.2f}" for top1 in row.val_top1)
        self._bars.console.print(
            f"epoch {row.epoch:>{len(str(self._epochs))}}/{self._epochs}  loss {row.train_loss:7.4f}  "
            f"validation {row.val_loss:7.4f}  top-1 % by exit {accuracies}  {row.images_per_second:.0f} images/s"
            f"{'  kept' if kept else ''}",
            soft_wrap=True,
        )
