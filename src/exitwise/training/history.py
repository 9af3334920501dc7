"""What a training left, epoch by epoch: as a table, as a file, as a picture."""

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitwise.core.errors import InputError
from exitwise.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class EpochRecord:
    """One epoch's figures; accuracies are fractions, losses are sums over the exits that learn."""

    epoch: int  # from 1
    lr: float  # at its end
    train_loss: float
    val_loss: float
    val_top1: tuple[float, ...]  # of every exit
    images_per_second: float  # training alone
    seconds: float  # with validation

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EpochRecord":
        return cls(**{**data, "val_top1": tuple(data["val_top1"])})


@dataclass(frozen=True)
class History:
    """All epochs so far, and which of them gave the net that is kept."""

    epochs: tuple[EpochRecord, ...]
    kept: tuple[int, ...] = ()  # of heads trained alone: the epoch of each, from 1, or 0 where it stayed as it was

    @property
    def best(self) -> EpochRecord:
        """The first with the highest validation accuracy at the last exit, or of heads trained alone over all exits."""
        if not self.epochs:
            raise InputError("a history without epochs has no best one")
        counted = slice(None) if self.kept else slice(-1, None)
        return max(self.epochs, key=lambda epoch: (sum(epoch.val_top1[counted]), -epoch.epoch))

    @property
    def top1(self) -> tuple[float, ...]:
        """Validation accuracy of every exit of the net that is kept."""
        if not self.kept:
            return self.best.val_top1
        return tuple(self.epochs[max(epoch - 1, 0)].val_top1[k] for k, epoch in enumerate(self.kept))

    def to_dict(self) -> dict[str, Any]:
        return {"epochs": [asdict(epoch) for epoch in self.epochs], **({"kept": list(self.kept)} if self.kept else {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "History":
        """What `to_dict` gave."""
        return cls(tuple(map(EpochRecord.from_dict, data["epochs"])), tuple(data.get("kept", ())))

    def save(self, path: Path) -> None:
        """A CSV file with a column per exit; of heads trained alone, `kept` names those that an epoch gave."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        exits = len(self.epochs[0].val_top1) if self.epochs else 0
        tops = [f"val_top1_exit{k + 1}" for k in range(exits)]
        names = ["epoch", "lr", "train_loss", "val_loss", *tops, "images_per_second", "seconds"]
        writer.writerow([*names, *(["kept"] if self.kept else [])])
        for row in self.epochs:
            numbers = (row.lr, row.train_loss, row.val_loss, *row.val_top1, row.images_per_second, row.seconds)
            kept = " ".join(str(k + 1) for k, epoch in enumerate(self.kept) if epoch == row.epoch)
            writer.writerow([row.epoch, *(f"{number:.6g}" for number in numbers), *([kept] if self.kept else [])])
        with atomic_write(path) as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "History":
        """What `save` wrote."""
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            return cls(tuple(map(_epoch, rows)), _kept(rows))
        except FileNotFoundError:
            raise InputError(f"{path} does not exist") from None
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise InputError(f"{path} is not a training's history: {error}") from None

    def plot(self, path: Path) -> None:
        """The figure as a PNG, SVG or PDF file."""
        figure = self.figure()
        with atomic_write(path) as temporary:
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
        stars = [(self.best.epoch, self.top1[-1])] if not self.kept else list(zip(self.kept, self.top1, strict=True))
        places = [(epoch, 100 * top1) for epoch, top1 in stars if epoch]
        accuracies.plot(*zip(*places, strict=True), "*", color="#d55e00", markersize=11, label="kept")
        accuracies.set(xlabel="epoch", ylabel="validation top-1 %")
        for axes in (losses, accuracies):
            axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        return figure


def _epoch(row: dict[str, str]) -> EpochRecord:
    tops = [float(value) for name, value in row.items() if name.startswith("val_top1_exit")]
    numbers = ("lr", "train_loss", "val_loss", "images_per_second", "seconds")
    return EpochRecord(epoch=int(row["epoch"]), val_top1=tuple(tops), **{name: float(row[name]) for name in numbers})


def _kept(rows: list[dict[str, str]]) -> tuple[int, ...]:
    """The epoch of each head, where the file says so."""
    if not rows or "kept" not in rows[0]:
        return ()
    epochs = {int(exit): int(row["epoch"]) for row in rows for exit in row["kept"].split()}
    return tuple(epochs.get(k, 0) for k in range(1, 1 + sum(name.startswith("val_top1_exit") for name in rows[0])))
