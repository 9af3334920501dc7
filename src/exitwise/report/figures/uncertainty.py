"""Figures about uncertainty: against error, reliability, example images. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from exitwise.core.predictions import Array
from exitwise.report.figures.style import (
    MODEL_COLORS,
    MODEL_LABELS,
    OUTCOME_COLORS,
    TEXT_BOX,
    Data,
    fit_text,
    legend,
    panels,
    scale,
)

_MARKERS = {"correct": "o", "misclassified": "^"}
_CORNERS = {
    "tricky": (0.04, 0.97, "left", "top"),
    "hard": (0.96, 0.97, "right", "top"),
    "easy": (0.2, 0.02, "left", "bottom"),
}
_GRAYS = LinearSegmentedColormap.from_list("grays", ("white", "0.55"))
_COLUMNS = 8  # images per row


def uncertainty_error_figure(data: Data) -> Figure:
    """Draw per exit: entropy of samples with a high error, entropy against error of both models, entropy of all."""
    exits, max_entropy = data["net"]["exits"], _max_entropy(data)
    options = {"sharex": True, "sharey": "row", "gridspec_kw": {"height_ratios": (1, 2, 2, 1)}}
    figure, grid = panels(4, exits, _figure_width(exits), 7.8, **options)
    for k, (top, *scatters, bottom) in enumerate(grid.T):
        statistics = {model: data["uncertainty"][model][k] for model in MODEL_COLORS}
        shares = [f"{MODEL_LABELS[model]} {100 * at['high_error_share']:.1f} %" for model, at in statistics.items()]
        top.set_title("\n".join((f"exit {k + 1}", "error > 0.5:", *shares)))
        _draw_histograms(top, {model: at["high_error"] for model, at in statistics.items()}, max_entropy)
        totals = {model: np.add(at["correct"], at["wrong"]) for model, at in statistics.items()}
        _draw_histograms(bottom, totals, max_entropy)
        bottom.set_xlabel("entropy")
        for (model, at), axes in zip(statistics.items(), scatters, strict=True):
            _draw_density(axes, at["density"], max_entropy)
            _draw_points(axes, data["points"][model], data["points"]["label"], k)
    labels = ("samples with\nerror > 0.5", *(f"{MODEL_LABELS[model]}: error" for model in MODEL_COLORS), "all samples")
    for axes, label in zip(grid[:, 0], labels, strict=True):
        axes.set_ylabel(label)
    grid[0, 0].set_xlim(0, max_entropy)
    handles = [
        Line2D([], [], color=OUTCOME_COLORS[n], marker=m, linestyle="none", label=n) for n, m in _MARKERS.items()
    ]
    legend(figure, grid[0, 0], 2 if exits == 1 else 4, handles)
    return figure


def _max_entropy(data: Data) -> float:
    return log(max(data["net"]["classes"], 2))


def _figure_width(exits: int) -> float:
    return max(3.6, 0.5 + 1.9 * exits)


def _draw_histograms(axes: Axes, counts: Mapping[str, Any], max_entropy: float) -> None:
    """Draw the histogram of the calibrated model filled and that of vanilla as an outline."""
    edges = np.linspace(0, max_entropy, len(counts["ours"]) + 1)
    axes.stairs(counts["ours"], edges, fill=True, color=MODEL_COLORS["ours"], alpha=0.55, label=MODEL_LABELS["ours"])
    axes.stairs(counts["vanilla"], edges, color=MODEL_COLORS["vanilla"], linewidth=1, label="vanilla")


def _draw_density(axes: Axes, density: Sequence[Sequence[int]], max_entropy: float) -> None:
    """Draw the density of all samples, and the regions of easy, hard and tricky ones."""
    counts = np.array(density).T
    norm = PowerNorm(0.35, vmin=0, vmax=counts.max())
    axes.imshow(counts, extent=(0, max_entropy, 0, 1), origin="lower", aspect="auto", cmap=_GRAYS, norm=norm)
    axes.axhline(0.5, color="0.4", linewidth=0.5, linestyle=":")
    axes.axvline(max_entropy / 2, color="0.4", linewidth=0.5, linestyle=":")
    for name, (x, y, ha, va) in _CORNERS.items():
        axes.text(x, y, name, transform=axes.transAxes, ha=ha, va=va, style="italic", bbox=TEXT_BOX)
    axes.set_ylim(0, 1)


def _draw_points(axes: Axes, preds: Data, labels: Sequence[int], k: int) -> None:
    entropy, error = (np.array(preds[name][k]) / 1000 for name in ("entropy", "error"))
    correct = np.array(preds["predicted"][k]) == np.array(labels)
    size = 1.6 if len(labels) > 1000 else 2.6
    style: dict[str, Any] = {"markersize": size, "markeredgewidth": 0, "alpha": 0.6, "rasterized": True}
    for (name, marker), mask in zip(_MARKERS.items(), (correct, ~correct), strict=True):
        axes.plot(entropy[mask], error[mask], linestyle="none", marker=marker, color=OUTCOME_COLORS[name], **style)


def entropy_figure(data: Data) -> Figure:
    """Draw stacked histograms of the entropy of correct and misclassified samples, a column per exit."""
    exits, max_entropy = data["net"]["exits"], _max_entropy(data)
    figure, grid = panels(2, exits, _figure_width(exits), 3.6, sharex=True, sharey=True)
    for row, model in zip(grid, MODEL_COLORS, strict=True):
        row[0].set_ylabel(f"{MODEL_LABELS[model]}: samples")
        for axes, at in zip(row, data["uncertainty"][model], strict=True):
            correct, edges = np.array(at["correct"]), np.linspace(0, max_entropy, len(at["correct"]) + 1)
            axes.stairs(correct, edges, fill=True, color=OUTCOME_COLORS["correct"], label="correct")
            style = {"fill": True, "color": OUTCOME_COLORS["misclassified"], "label": "misclassified"}
            axes.stairs(correct + at["wrong"], edges, baseline=correct, **style)
    for k, (top, bottom) in enumerate(grid.T):
        top.set_title(f"exit {k + 1}")
        bottom.set_xlabel("entropy")
    grid[0, 0].set_xlim(0, max_entropy)
    legend(figure, grid[0, 0], 2)
    return figure


def reliability_figure(data: Data) -> Figure:
    """Draw reliability diagrams of both models: a column per exit, and one for the exits taken.

    Below each diagram is the share of samples per bin.
    """
    explorer = data["explorers"][0]
    chosen, columns = explorer["steps"][explorer["chosen"]], data["net"]["exits"] + 1
    options = {"sharex": True, "sharey": "row", "gridspec_kw": {"height_ratios": (3, 1, 3, 1)}}
    figure, grid = panels(4, columns, 0.6 + 1.6 * columns, 5.6, **options)
    for row, model in ((0, "vanilla"), (2, "ours")):
        diagrams = [(at["metrics"], at["reliability"]) for at in data["uncertainty"][model]]
        diagrams.append((chosen[model], chosen[model]["reliability"]))
        for (metrics, bins), above, below in zip(diagrams, grid[row], grid[row + 1], strict=True):
            _draw_diagram(above, metrics, bins, MODEL_COLORS[model])
            share = 100 * np.array(bins["count"]) / max(sum(bins["count"]), 1)
            below.bar(_bin_centers(bins), share, width=0.9 / len(share), color="0.6")
        grid[row, 0].set_ylabel(f"{MODEL_LABELS[model]}:\naccuracy")
        grid[row + 1, 0].set_ylabel("% of\nsamples")
    factor, unit = scale(explorer["unit"], explorer["costs"][-1])
    titles = [
        *(f"exit {k + 1}" for k in range(columns - 1)),
        f"exits taken at\n{chosen['budget'] / factor:.4g} {unit}",
    ]
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set(xlabel="confidence", xticks=(0, 0.5, 1), xticklabels=("0", "0.5", "1"))
    return figure


def _bin_centers(bins: Data) -> Array:
    return np.asarray((np.arange(len(bins["count"])) + 0.5) / len(bins["count"]))


def _draw_diagram(axes: Axes, metrics: Data, bins: Data, color: str) -> None:
    """Draw the accuracy in each non-empty bin against its mean confidence."""
    filled = np.array(bins["count"]) > 0
    confidence, accuracy = (np.array(bins[name], dtype=float)[filled] for name in ("confidence", "accuracy"))
    axes.bar(_bin_centers(bins)[filled], accuracy, width=0.9 / len(filled), color=color, alpha=0.35)
    axes.plot((0, 1), (0, 1), color="0.4", linewidth=0.7, linestyle="--")
    axes.plot(confidence, accuracy, color=color, marker="o", markersize=2.5, linewidth=1)
    auroc = "undefined" if metrics["auroc"] is None else f"{metrics['auroc']:.3f}"
    text = f"ECE {metrics['ece']:.3f}\nAUROC {auroc}"
    axes.text(0.04, 0.97, text, transform=axes.transAxes, va="top", fontsize=7, bbox=TEXT_BOX)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def gallery_rows(data: Data) -> dict[str, list[int]]:
    """Return the points shown in each row of the gallery; empty rows are left out."""
    explorer = data["explorers"][0]
    chosen = explorer["steps"][explorer["chosen"]]
    rows = {**data["galleries"], **{name: chosen[name]["points"] for name in ("saved", "lost")}}
    return {name: points[:_COLUMNS] for name, points in rows.items() if points}


def galleries_figure(data: Data, pixels: Array, rows: Mapping[str, Sequence[int]]) -> Figure:
    """Draw images (m, channels, side, side) with label, calibrated prediction and exit."""
    explorer, points, classes = data["explorers"][0], data["points"], data["classes"]
    taken = explorer["exits"]["ours"][explorer["chosen"]]
    figure, grid = panels(len(rows), _COLUMNS, 0.3 + 1.05 * _COLUMNS, 1.5 * len(rows))
    for (name, shown), row in zip(rows.items(), grid, strict=True):
        row[0].set_ylabel(name, fontsize=9)
        for i, axes in zip(shown, row, strict=False):
            k = ord(taken[i]) - ord("0")
            # Easy, hard and tricky samples are chosen by the last exit's predictions.
            predicting = k if name in ("saved", "lost") else data["net"]["exits"] - 1
            true, predicted = points["label"][i], points["ours"]["predicted"][predicting][i]
            lines = (f"true: {classes[true]}", f"pred: {classes[predicted]}", f"exit {k + 1}")
            axes.set_title("\n".join(fit_text(line, 6, 66) for line in lines), fontsize=6, loc="left", pad=3)
            _draw_image(axes, pixels[i], OUTCOME_COLORS["correct" if true == predicted else "misclassified"])
        for axes in row[len(shown) :]:
            axes.set_axis_off()
    return figure


def _draw_image(axes: Axes, pixels: Array, color: str) -> None:
    image = pixels[0] if len(pixels) < 3 else pixels[:3].transpose(1, 2, 0)
    axes.imshow(image, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=(), yticks=())
    axes.spines[:].set(visible=True, linewidth=1.5, color=color)
