"""Training history, epoch by epoch: as records, as a CSV file, as a figure."""

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitwise.core.errors import InputError, first_line
from exitwise.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class EpochRecord:
    """Metrics of one epoch: accuracies are fractions, losses are sums over the exits that are trained."""

    epoch: int  # from 1
    lr: float  # at the end of the epoch
    train_loss: float
    val_loss: float
    val_top1: tuple[float, ...]  # of every exit
    images_per_second: float  # of training, without validation
    seconds: float  # of training and validation
    val_nlpd: tuple[float, ...] = ()  # of every exit; empty after `train`, and in files of earlier versions

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EpochRecord":
        """Return the record whose fields `dataclasses.asdict` gave, perhaps read from JSON."""
        return cls(**{**data, "val_top1": tuple(data["val_top1"]), "val_nlpd": tuple(data.get("val_nlpd", ()))})


@dataclass(frozen=True)
class History:
    """Records of all epochs, and the epochs from which weights were kept.

    Args:
        epochs: Records of the epochs that are done.
        kept: Empty after `train`, unless its recipe limits what the last exit may lose: then the epoch of all weights,
            K times, or 0 if none is kept. After `train_heads`, the epoch of each head's weights (K,), from 1, in which
            its validation NLPD was lowest; 0 for a head that was not trained.
    """

    epochs: tuple[EpochRecord, ...]
    kept: tuple[int, ...] = ()

    @property
    def best(self) -> EpochRecord:
        """First epoch with the best validation accuracy at the last exit.

        If all exits have the weights of one epoch, it is that one. After `train_heads`, else, the first epoch with the
        lowest validation NLPD, summed over the exits.
        """
        if not self.epochs:
            raise InputError("a history without epochs has no best epoch")
        if self.kept and self.kept[0] and len(set(self.kept)) == 1:
            return self.epochs[self.kept[0] - 1]
        if self.kept and all(row.val_nlpd for row in self.epochs):
            return min(self.epochs, key=lambda row: (sum(row.val_nlpd), row.epoch))
        exits = slice(None) if self.kept else slice(-1, None)
        return max(self.epochs, key=lambda row: (sum(row.val_top1[exits]), -row.epoch))

    @property
    def top1(self) -> tuple[float, ...]:
        """Validation accuracy (K,) of every exit with the weights that were kept."""
        if not self.kept:
            return self.best.val_top1
        return tuple(self.epochs[max(epoch - 1, 0)].val_top1[k] for k, epoch in enumerate(self.kept))

    @property
    def nlpd(self) -> tuple[float, ...]:
        """Validation NLPD (K,) of every exit with the weights that were kept; empty if it was not recorded."""
        if not self.kept:
            return self.best.val_nlpd
        rows = [self.epochs[max(epoch - 1, 0)].val_nlpd for epoch in self.kept]
        return tuple(row[k] for k, row in enumerate(rows)) if all(rows) else ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {"epochs": [asdict(epoch) for epoch in self.epochs], **({"kept": list(self.kept)} if self.kept else {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "History":
        """Return the history that `to_dict` described."""
        return cls(tuple(map(EpochRecord.from_dict, data["epochs"])), tuple(data.get("kept", ())))

    def save(self, path: Path) -> None:
        """Write a CSV file with a row per epoch.

        It has a column of accuracies per exit and, after `train_heads`, one of NLPDs per exit and a column `kept`: the
        exits, from 1, whose weights are those of the epoch.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        exits = len(self.epochs[0].val_top1) if self.epochs else 0
        top1_names = [f"val_top1_exit{k + 1}" for k in range(exits)]
        num_nlpds = len(self.epochs[0].val_nlpd) if self.epochs else 0
        nlpd_names = [f"val_nlpd_exit{k + 1}" for k in range(num_nlpds)]
        names = ["epoch", "lr", "train_loss", "val_loss", *top1_names, "images_per_second", "seconds", *nlpd_names]
        writer.writerow([*names, *(["kept"] if self.kept else [])])
        for row in self.epochs:
            losses, speed = (row.lr, row.train_loss, row.val_loss), (row.images_per_second, row.seconds)
            values = (*losses, *row.val_top1, *speed, *row.val_nlpd)
            kept = " ".join(str(k + 1) for k, epoch in enumerate(self.kept) if epoch == row.epoch)
            writer.writerow([row.epoch, *(f"{value:.6g}" for value in values), *([kept] if self.kept else [])])
        with atomic_write(path) as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "History":
        """Read a CSV file that `save` wrote."""
        try:
            with path.open(encoding="utf-8", newline="") as file:
                names, *records = csv.reader(file)
            if len(set(names)) < len(names) or any(len(record) != len(names) for record in records):
                raise ValueError("every row must have the cells of the first, which must have different names")
            rows = [dict(zip(names, record, strict=True)) for record in records]
            return cls(tuple(map(_parse_row, rows)), _parse_kept(rows))
        except FileNotFoundError:
            raise InputError(f"{path} does not exist") from None
        except (KeyError, OverflowError, TypeError, ValueError, csv.Error) as error:
            raise InputError(f"{path} is not a training history: {first_line(error)}") from None

    def plot(self, path: Path) -> None:
        """Write the figure to a PNG, SVG or PDF file, depending on the suffix of `path`."""
        figure = self.figure()
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=150)

    def figure(self) -> "Figure":
        """Draw losses and accuracies over the epochs."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        epochs = [row.epoch for row in self.epochs]
        style = {"marker": "o", "markersize": 3} if len(epochs) < 40 else {}
        losses.plot(epochs, [row.train_loss for row in self.epochs], label="training", color="#0072b2", **style)
        losses.plot(epochs, [row.val_loss for row in self.epochs], label="validation", color="#d55e00", **style)
        losses.set(xlabel="epoch", ylabel="loss, summed over the exits")
        exits = len(self.epochs[0].val_top1) if self.epochs else 0
        for k in range(exits):
            color = str(0.75 - 0.75 * (k + 1) / exits)  # later exits darker
            values = [100 * row.val_top1[k] for row in self.epochs]
            accuracies.plot(epochs, values, label=f"exit {k + 1}", color=color, **style)
        stars = [(self.best.epoch, self.top1[-1])] if not self.kept else list(zip(self.kept, self.top1, strict=True))
        points = [(epoch, 100 * top1) for epoch, top1 in stars if epoch]
        accuracies.plot(*zip(*points, strict=True), "*", color="#d55e00", markersize=11, label="kept")
        accuracies.set(xlabel="epoch", ylabel="validation top-1 %")
        for axes, corner in ((losses, "upper right"), (accuracies, "lower right")):  # losses fall, accuracies grow
            axes.legend(frameon=False, loc=corner)
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        return figure


def _parse_row(row: dict[str, str]) -> EpochRecord:
    """Return the record of one row of the CSV file."""
    top1 = [float(value) for name, value in row.items() if name.startswith("val_top1_exit")]
    nlpd = [float(value) for name, value in row.items() if name.startswith("val_nlpd_exit")]
    names = ("lr", "train_loss", "val_loss", "images_per_second", "seconds")
    numbers = {name: float(row[name]) for name in names}
    return EpochRecord(epoch=int(row["epoch"]), val_top1=tuple(top1), val_nlpd=tuple(nlpd), **numbers)


def _parse_kept(rows: list[dict[str, str]]) -> tuple[int, ...]:
    """Return the epoch of each head's weights; empty if the file has no column `kept`."""
    if not rows or "kept" not in rows[0]:
        return ()
    epochs = {int(exit): int(row["epoch"]) for row in rows for exit in row["kept"].split()}
    exits = sum(name.startswith("val_top1_exit") for name in rows[0])
    if not all(1 <= k <= exits for k in epochs) or not all(1 <= epoch <= len(rows) for epoch in epochs.values()):
        raise ValueError(f"`kept` must hold exits from 1 to {exits}, in rows of epochs from 1 to {len(rows)}")
    return tuple(epochs.get(k, 0) for k in range(1, 1 + exits))
