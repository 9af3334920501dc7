"""Figures for papers about uncertainty: against error, reliability, pictures. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from exitwise.core.predictions import Array
from exitwise.report.figures.style import BOX, MODEL_COLORS, OUTCOMES, Data, fit_text, legend, panels, scale

_MARKS = {"correct": "o", "misclassified": "^"}
_CORNERS = {
    "tricky": (0.04, 0.97, "left", "top"),
    "hard": (0.96, 0.97, "right", "top"),
    "easy": (0.2, 0.02, "left", "bottom"),
}
_GREYS = LinearSegmentedColormap.from_list("greys", ("white", "0.55"))
_SHOWN = 8  # pictures in a row


def against_error(data: Data) -> Figure:
    """Entropy where errors are large, both sides' entropy against error, entropy of all; a column per exit."""
    exits, most = data["net"]["exits"], _most(data)
    options = {"sharex": True, "sharey": "row", "gridspec_kw": {"height_ratios": (1, 2, 2, 1)}}
    figure, made = panels(4, exits, _width(exits), 7.8, **options)
    for k, (top, *scatters, bottom) in enumerate(made.T):
        at = {side: data["uncertainty"][side][k] for side in MODEL_COLORS}
        shares = ", ".join(f"{side} {100 * at[side]['erring_share']:.1f} %" for side in MODEL_COLORS)
        top.set_title(f"exit {k + 1}\nerror > 0.5:\n{shares}")
        _outlined(top, {side: at[side]["erring"] for side in MODEL_COLORS}, most)
        _outlined(bottom, {side: np.add(at[side]["correct"], at[side]["wrong"]) for side in MODEL_COLORS}, most)
        bottom.set_xlabel("entropy")
        for side, axes in zip(MODEL_COLORS, scatters, strict=True):
            _scatter(axes, at[side]["density"], most)
            _points(axes, data["points"][side], data["points"]["label"], k)
    labels = ("samples with\nerror > 0.5", "ours: error", "vanilla: error", "all samples")
    for axes, label in zip(made[:, 0], labels, strict=True):
        axes.set_ylabel(label)
    made[0, 0].set_xlim(0, most)
    marks = [Line2D([], [], color=OUTCOMES[n], marker=m, linestyle="none", label=n) for n, m in _MARKS.items()]
    legend(figure, made[0, 0], 2 if exits == 1 else 4, marks)
    return figure


def _most(data: Data) -> float:
    """The largest entropy."""
    return log(max(data["net"]["classes"], 2))


def _width(exits: int) -> float:
    return max(3.6, 0.5 + 1.9 * exits)


def _outlined(axes: Axes, counts: Mapping[str, Any], most: float) -> None:
    """A histogram, ours filled and vanilla as an outline."""
    edges = np.linspace(0, most, len(counts["ours"]) + 1)
    axes.stairs(counts["ours"], edges, fill=True, color=MODEL_COLORS["ours"], alpha=0.55, label="ours")
    axes.stairs(counts["vanilla"], edges, color=MODEL_COLORS["vanilla"], linewidth=1, label="vanilla")


def _scatter(axes: Axes, density: Sequence[Sequence[int]], most: float) -> None:
    """The density of all samples, and where which kind of them is."""
    counts = np.array(density).T
    norm = PowerNorm(0.35, vmin=0, vmax=counts.max())
    axes.imshow(counts, extent=(0, most, 0, 1), origin="lower", aspect="auto", cmap=_GREYS, norm=norm)
    axes.axhline(0.5, color="0.4", linewidth=0.5, linestyle=":")
    axes.axvline(most / 2, color="0.4", linewidth=0.5, linestyle=":")
    for name, (x, y, ha, va) in _CORNERS.items():
        axes.text(x, y, name, transform=axes.transAxes, ha=ha, va=va, style="italic", bbox=BOX)
    axes.set_ylim(0, 1)


def _points(axes: Axes, said: Data, labels: Sequence[int], k: int) -> None:
    entropy, error = (np.array(said[name][k]) / 1000 for name in ("entropy", "error"))
    right = np.array(said["predicted"][k]) == np.array(labels)
    size = 1.6 if len(labels) > 1000 else 2.6
    style: dict[str, Any] = {"markersize": size, "markeredgewidth": 0, "alpha": 0.6, "rasterized": True}
    for (name, mark), which in zip(_MARKS.items(), (right, ~right), strict=True):
        axes.plot(entropy[which], error[which], linestyle="none", marker=mark, color=OUTCOMES[name], **style)


def right_and_wrong(data: Data) -> Figure:
    """Entropy of correct and misclassified samples, stacked; a column per exit."""
    exits, most = data["net"]["exits"], _most(data)
    figure, made = panels(2, exits, _width(exits), 3.6, sharex=True, sharey=True)
    for row, side in zip(made, MODEL_COLORS, strict=True):
        row[0].set_ylabel(f"{side}: samples")
        for axes, at in zip(row, data["uncertainty"][side], strict=True):
            correct, edges = np.array(at["correct"]), np.linspace(0, most, len(at["correct"]) + 1)
            axes.stairs(correct, edges, fill=True, color=OUTCOMES["correct"], label="correct")
            style = {"fill": True, "color": OUTCOMES["misclassified"], "label": "misclassified"}
            axes.stairs(correct + at["wrong"], edges, baseline=correct, **style)
    for k, (top, bottom) in enumerate(made.T):
        top.set_title(f"exit {k + 1}")
        bottom.set_xlabel("entropy")
    made[0, 0].set_xlim(0, most)
    legend(figure, made[0, 0], 2)
    return figure


def reliability(data: Data) -> Figure:
    """Before and after, with the share of samples in each bin beneath; a column per exit and one for those chosen."""
    explorer = data["explorers"][0]
    chosen, columns = explorer["steps"][explorer["chosen"]], data["net"]["exits"] + 1
    options = {"sharex": True, "sharey": "row", "gridspec_kw": {"height_ratios": (3, 1, 3, 1)}}
    figure, made = panels(4, columns, 0.6 + 1.6 * columns, 5.6, **options)
    for row, side, when in ((0, "vanilla", "before"), (2, "ours", "after")):
        shown = [(at["metrics"], at["reliability"]) for at in data["uncertainty"][side]]
        shown.append((chosen[side], chosen[side]["reliability"]))
        for (metrics, bins), above, beneath in zip(shown, made[row], made[row + 1], strict=True):
            _diagram(above, metrics, bins, MODEL_COLORS[side])
            share = 100 * np.array(bins["count"]) / max(sum(bins["count"]), 1)
            beneath.bar(_middles(bins), share, width=0.9 / len(share), color="0.6")
        made[row, 0].set_ylabel(f"{when} ({side})\naccuracy")
        made[row + 1, 0].set_ylabel("% of\nsamples")
    factor, unit = scale(explorer["unit"], explorer["costs"][-1])
    titles = [
        *(f"exit {k + 1}" for k in range(columns - 1)),
        f"exits chosen for\n{chosen['budget'] / factor:.4g} {unit}",
    ]
    for axes, title in zip(made[0], titles, strict=True):
        axes.set_title(title)
    for axes in made[-1]:
        axes.set(xlabel="confidence", xticks=(0, 0.5, 1), xticklabels=("0", "0.5", "1"))
    return figure


def _middles(bins: Data) -> Array:
    return np.asarray((np.arange(len(bins["count"])) + 0.5) / len(bins["count"]))


def _diagram(axes: Axes, metrics: Data, bins: Data, colour: str) -> None:
    """Accuracy in each bin that has samples, against their mean confidence."""
    full = np.array(bins["count"]) > 0
    confidence, accuracy = (np.array(bins[name], dtype=float)[full] for name in ("confidence", "accuracy"))
    axes.bar(_middles(bins)[full], accuracy, width=0.9 / len(full), color=colour, alpha=0.35)
    axes.plot((0, 1), (0, 1), color="0.4", linewidth=0.7, linestyle="--")
    axes.plot(confidence, accuracy, color=colour, marker="o", markersize=2.5, linewidth=1)
    auroc = "none" if metrics["auroc"] is None else f"{metrics['auroc']:.3f}"
    said = f"ECE {metrics['ece']:.3f}\nAUROC {auroc}"
    axes.text(0.04, 0.97, said, transform=axes.transAxes, va="top", fontsize=7, bbox=BOX)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def gallery_rows(data: Data) -> dict[str, list[int]]:
    """Which points are shown; rows without any are left out."""
    explorer = data["explorers"][0]
    chosen = explorer["steps"][explorer["chosen"]]
    rows = {**data["galleries"], **{name: chosen[name]["points"] for name in ("saved", "lost")}}
    return {name: points[:_SHOWN] for name, points in rows.items() if points}


def galleries(data: Data, pixels: Array, rows: Mapping[str, Sequence[int]]) -> Figure:
    """Pictures (m, channels, side, side), with what the calibrated net says of them and the exit that they take."""
    explorer, points, classes = data["explorers"][0], data["points"], data["classes"]
    taken = explorer["exits"]["ours"][explorer["chosen"]]
    figure, made = panels(len(rows), _SHOWN, 0.3 + 1.05 * _SHOWN, 1.5 * len(rows))
    for (name, shown), row in zip(rows.items(), made, strict=True):
        row[0].set_ylabel(name, fontsize=9)
        for i, axes in zip(shown, row, strict=False):
            k = ord(taken[i]) - ord("0")
            asked = k if name in ("saved", "lost") else data["net"]["exits"] - 1  # who was asked what kind it is
            true, predicted = points["label"][i], points["ours"]["predicted"][asked][i]
            words = (f"true: {classes[true]}", f"said: {classes[predicted]}", f"exit {k + 1}")
            axes.set_title("\n".join(fit_text(line, 6, 66) for line in words), fontsize=6, loc="left", pad=3)
            _picture(axes, pixels[i], OUTCOMES["correct" if true == predicted else "misclassified"])
        for axes in row[len(shown) :]:
            axes.set_axis_off()
    return figure


def _picture(axes: Axes, pixels: Array, colour: str) -> None:
    shown = pixels[0] if len(pixels) < 3 else pixels[:3].transpose(1, 2, 0)
    axes.imshow(shown, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=(), yticks=())
    axes.spines[:].set(visible=True, linewidth=1.5, color=colour)
