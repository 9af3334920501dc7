"""Figures about costs: budget curves, the decision experiment, the cost of Laplace. Needs matplotlib."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from exitwise.evaluation.paper_tables import METRICS
from exitwise.report.figures.style import (
    EXTRA_COLORS,
    MODEL_COLORS,
    MODEL_LABELS,
    Data,
    fit_text,
    legend,
    panels,
    scale,
)

_METRIC_LABELS = {"top1": "top-1 %", "top5": "top-5 %", "nlpd": "NLPD", "ece": "ECE"}
_LAPLACE_COLORS = {"vanilla": MODEL_COLORS["vanilla"], "efficient": MODEL_COLORS["ours"], "naive": "#999999"}
_PUBLISHED_STYLES: dict[str, dict[str, Any]] = {
    "ours": {"linestyle": (0, (5, 2)), "linewidth": 1, "color": "0.25"},
    "vanilla": {"linestyle": (0, (2, 2)), "linewidth": 1, "color": "0.5"},
    "resnet": {"linewidth": 0.5, "marker": "s", "markersize": 3, "color": "0.25"},
    "densenet": {"linewidth": 0.5, "marker": "D", "markersize": 3, "color": "0.6"},
}
_Curve = tuple[Data, dict[str, Any]]  # {metric: [[cost, value], ...]}, and its line style


def budget_curves_figure(data: Data, explorer: Data, other_runs: Sequence[Data], published: Sequence[Data]) -> Figure:
    """Draw both models with intervals and the chosen budget, in front of other runs and published curves."""
    factor, unit = scale(explorer["unit"], explorer["costs"][-1])
    chosen = explorer["steps"][explorer["chosen"]]
    background = [*_published_curves(published), *_run_curves(other_runs)]
    figure, by_metric = _metric_panels(unit, legend_lines=ceil(len(background) / 2) + 2)
    labels = {**MODEL_LABELS, "ours": f"{MODEL_LABELS['ours']}: {data['method']}"}
    for metric, axes in by_metric.items():
        for metrics, style in background:
            _draw_curve(axes, metric, metrics.get(metric, ()), factor, **style)
        for model, color in MODEL_COLORS.items():
            steps = sorted((step[model] for step in explorer["steps"]), key=lambda step: float(step["cost"]))
            _draw_intervals(axes, metric, steps, factor, color)
            points = [(step["cost"], step[metric]) for step in steps]
            _draw_curve(axes, metric, points, factor, label=labels[model], color=color)
            marker = {"marker": "o", "markersize": 5, "markerfacecolor": "white"}
            _draw_curve(axes, metric, [(chosen[model]["cost"], chosen[model][metric])], factor, color=color, **marker)
        if published:
            _use_log_scale(axes)
    label = f"at a budget of {chosen['budget'] / factor:.4g} {unit}"
    budget = Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="none", label=label)
    band = Patch(color="0.85", linewidth=0, label=f"{100 * data['net']['level']:.0f} % interval")
    legend(figure, by_metric["top1"], 2, [budget, band])
    return figure


def _published_curves(curves: Sequence[Data]) -> Iterator[_Curve]:
    for curve in curves:
        style = _PUBLISHED_STYLES.get(curve["model"])
        if style is not None and (curve["own"] or curve["model"] not in MODEL_COLORS):
            yield curve["metrics"], {**style, "label": f"published: {curve['name']}"}


def _run_curves(runs: Sequence[Data]) -> Iterator[_Curve]:
    for i, run in enumerate(runs):
        for j, curve in enumerate(run["curves"]):
            label = f"run {fit_text(run['name'], 7, 120)}: {'calibrated' if j else 'vanilla'}"
            style = {
                "color": EXTRA_COLORS[i % len(EXTRA_COLORS)],
                "linestyle": "-" if j else "--",
                "linewidth": 1,
                "label": label,
            }
            yield curve["metrics"], style


def decisions_figure(data: Data) -> Figure:
    """Draw the decision experiment, which separates better predictions from better decisions."""
    curves = data["decisions"]
    unit = next(table["unit"] for table in data["tables"] if table["name"] == "decision_experiment")
    factor, unit = scale(unit, max(cost for curve in curves for cost, _ in curve["metrics"]["top1"]))
    figure, by_metric = _metric_panels(unit, legend_lines=1)
    styles = ((MODEL_COLORS["vanilla"], "-"), (EXTRA_COLORS[0], "--"), (MODEL_COLORS["ours"], "-"))
    for metric, axes in by_metric.items():
        for curve, (color, linestyle) in zip(curves, styles, strict=True):
            points, label = curve["metrics"][metric], curve.get("label", curve["name"])
            _draw_curve(axes, metric, points, factor, label=label, color=color, linestyle=linestyle)
    legend(figure, by_metric["top1"], 3)
    return figure


def _metric_panels(unit: str, legend_lines: int) -> tuple[Figure, dict[str, Axes]]:
    """Create a figure with a panel per metric, and room for `legend_lines` lines of legend."""
    figure, grid = panels(2, 2, 7, 5.1 + 0.15 * legend_lines)
    by_metric = dict(zip(_METRIC_LABELS, grid.flat, strict=True))
    for metric, axes in by_metric.items():
        axes.set(ylabel=_METRIC_LABELS[metric], xlabel=f"mean test cost, {unit}")
    return figure, by_metric


def _draw_curve(axes: Axes, metric: str, points: Sequence[Sequence[float | None]], factor: float, **style: Any) -> None:
    """Draw a curve of pairs (cost, value), or a marker if all costs are equal."""
    if points:
        x, y = np.array(points, dtype=float).T
        marker = {"marker": "o", "markersize": 4} if x.min() == x.max() else {}
        axes.plot(x / factor, METRICS[metric][0] * y, **{**marker, **style})


def _draw_intervals(axes: Axes, metric: str, steps: Sequence[Data], factor: float, color: str) -> None:
    low, high = METRICS[metric][0] * np.array([step["intervals"][metric] for step in steps], dtype=float).T
    costs = np.array([step["cost"] for step in steps]) / factor
    axes.fill_between(costs, low, high, color=color, alpha=0.18, linewidth=0)
    if costs[0] == costs[-1]:
        axes.vlines(costs[0], low[0], high[0], color=color, alpha=0.3, linewidth=4, zorder=1)


def _use_log_scale(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def laplace_cost_figure(bars: Data) -> Figure:
    """Draw the cost of Laplace up to each exit, and its overhead relative to vanilla."""
    factor, unit = scale("MACs", bars["naive"][-1])
    figure, ((costs, overheads),) = panels(1, 2, 7, 3)
    exits = _draw_cost_bars(costs, bars, factor)
    costs.set(xlabel="exit", ylabel=f"cost up to the exit, {unit}")
    for shift, kind in ((-0.19, "efficient"), (0.19, "naive")):
        overhead = 100 * (np.array(bars[kind]) / np.array(bars["vanilla"]) - 1)
        drawn = overheads.bar(exits + shift, overhead, width=0.36, color=_LAPLACE_COLORS[kind])
        overheads.bar_label(drawn, fmt=_format_percent, rotation=90, padding=2, fontsize=6)
    overheads.margins(y=0.15)
    overheads.set(xlabel="exit", ylabel="overhead over vanilla, %", xticks=exits)
    legend(figure, costs, 3)
    return figure


def _format_percent(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def published_laplace_cost_figure(nets: Sequence[Data]) -> Figure:
    """Draw the published cost of Laplace up to each exit of the paper's nets."""
    figure, grid = panels(ceil(len(nets) / 3), 3, 7, 5.6)
    for axes, bars in zip(grid.flat, nets, strict=True):
        factor, unit = scale("MACs", bars["naive"][-1])
        _draw_cost_bars(axes, bars, factor)
        axes.set(title=f"published: {bars['name']}", ylabel=unit)
    for axes in grid[-1]:
        axes.set_xlabel("exit")
    legend(figure, grid[0, 0], 3)
    return figure


def _draw_cost_bars(axes: Axes, bars: Mapping[str, Any], factor: float) -> Any:
    """Draw bars of cumulative costs, and return their positions on the x axis: the exits, from 1 on."""
    exits = np.arange(1, len(bars["vanilla"]) + 1)
    for j, (kind, color) in enumerate(_LAPLACE_COLORS.items()):
        axes.bar(exits + 0.27 * (j - 1), np.array(bars[kind]) / factor, width=0.25, color=color, label=kind)
    axes.set_xticks(exits)
    return exits
