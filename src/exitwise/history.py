"""What a training left, epoch by epoch: as a table, as a file, as a picture."""

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitwise.errors import InputError
from exitwise.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Epoch:
    """One epoch's figures; accuracies are fractions, losses are sums over the exits."""

    epoch: int  # from 1
    lr: float  # at its end
    train_loss: float
    val_loss: float
    val_top1: tuple[float, ...]  # of every exit
    images_per_second: float  # training alone
    seconds: float  # with validation

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Epoch":
        return cls(**{**data, "val_top1": tuple(data["val_top1"])})


@dataclass(frozen=True)
class History:
    """All epochs so far, and which of them gave the net that is kept."""

    epochs: tuple[Epoch, ...]

    @property
    def best(self) -> Epoch:
        """The first with the highest validation accuracy at the last exit."""
        if not self.epochs:
            raise InputError("a history without epochs has no best one")
        return max(self.epochs, key=lambda epoch: (epoch.val_top1[-1], -epoch.epoch))

    def to_dict(self) -> dict[str, Any]:
        return {"epochs": [asdict(epoch) for epoch in self.epochs]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "History":
        """What `to_dict` gave."""
        return cls(tuple(map(Epoch.from_dict, data["epochs"])))

    def save(self, path: Path) -> None:
        """A CSV file with a column per exit."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        exits = len(self.epochs[0].val_top1) if self.epochs else 0
        tops = [f"val_top1_exit{k + 1}" for k in range(exits)]
        writer.writerow(["epoch", "lr", "train_loss", "val_loss", *tops, "images_per_second", "seconds"])
        for row in self.epochs:
            numbers = (row.lr, row.train_loss, row.val_loss, *row.val_top1, row.images_per_second, row.seconds)
            writer.writerow([row.epoch, *(f"{number:.6g}" for number in numbers)])
        with replacing(path) as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "History":
        """What `save` wrote."""
        try:
            with path.open(encoding="utf-8", newline="") as file:
                return cls(tuple(map(_epoch, csv.DictReader(file))))
        except FileNotFoundError:
            raise InputError(f"{path} does not exist") from None
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise InputError(f"{path} is not a training's history: {error}") from None

    def plot(self, path: Path) -> None:
        """The figure as a PNG, SVG or PDF file."""
        figure = self.figure()
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=150)

    def figure(self) -> "Figure":
        """Losses and accuracies over the epochs."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        numbers = [row.epoch for row in self.epochs]
        mark = {"marker": "o", "markersize": 3} if len(numbers) < 40 else {}
        losses.plot(numbers, [row.train_loss for row in self.epochs], label="training", color="#0072b2", **mark)
        losses.plot(numbers, [row.val_loss for row in self.epochs], label="validation", color="#d55e00", **mark)
        losses.set(xlabel="epoch", ylabel="loss, summed over the exits")
        exits = len(self.epochs[0].val_top1) if self.epochs else 0
        for k in range(exits):
            colour = str(0.75 - 0.75 * (k + 1) / exits)  # later exits darker
            values = [100 * row.val_top1[k] for row in self.epochs]
            accuracies.plot(numbers, values, label=f"exit {k + 1}", color=colour, **mark)
        best = self.best
        accuracies.plot(best.epoch, 100 * best.val_top1[-1], "*", color="#d55e00", markersize=11, label="kept")
        accuracies.set(xlabel="epoch", ylabel="validation top-1 %")
        for axes in (losses, accuracies):
            axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        return figure


def _epoch(row: dict[str, str]) -> Epoch:
    tops = [float(value) for name, value in row.items() if name.startswith("val_top1_exit")]
    numbers = ("lr", "train_loss", "val_loss", "images_per_second", "seconds")
    return Epoch(epoch=int(row["epoch"]), val_top1=tuple(tops), **{name: float(row[name]) for name in numbers})
