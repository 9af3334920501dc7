"""Figures for papers about costs: budgets, decisions, what Laplace takes. Needs matplotlib."""

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
from exitwise.report.figures.style import EXTRA_COLORS, MODEL_COLORS, Data, fit_text, legend, panels, scale

_NAMES = {"top1": "top-1 %", "top5": "top-5 %", "nlpd": "NLPD", "ece": "ECE"}
_LAPLACE = {"vanilla": MODEL_COLORS["vanilla"], "efficient": MODEL_COLORS["ours"], "naive": "#999999"}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "ours": {"linestyle": (0, (5, 2)), "linewidth": 1, "color": "0.25"},
    "vanilla": {"linestyle": (0, (2, 2)), "linewidth": 1, "color": "0.5"},
    "resnet": {"linewidth": 0.5, "marker": "s", "markersize": 3, "color": "0.25"},
    "densenet": {"linewidth": 0.5, "marker": "D", "markersize": 3, "color": "0.6"},
}
_Curve = tuple[Data, dict[str, Any]]  # {metric: [[cost, value], ...]}, and how it is drawn


def budget_curves_figure(data: Data, explorer: Data, others: Sequence[Data], published: Sequence[Data]) -> Figure:
    """Ours and vanilla with their intervals and the chosen budget, before other curves."""
    factor, unit = scale(explorer["unit"], explorer["costs"][-1])
    chosen = explorer["steps"][explorer["chosen"]]
    behind = [*_published(published), *_others(others)]
    figure, by_metric = _four(unit, lines=ceil(len(behind) / 2) + 2)
    names = {"ours": f"ours: {data['method']}", "vanilla": "vanilla"}
    for metric, axes in by_metric.items():
        for metrics, style in behind:
            _line(axes, metric, metrics.get(metric, ()), factor, **style)
        for side, colour in MODEL_COLORS.items():
            walked = sorted((step[side] for step in explorer["steps"]), key=lambda at: float(at["cost"]))
            _interval(axes, metric, walked, factor, colour)
            _line(axes, metric, [(at["cost"], at[metric]) for at in walked], factor, label=names[side], color=colour)
            at = chosen[side]
            mark = {"marker": "o", "markersize": 5, "markerfacecolor": "white"}
            _line(axes, metric, [(at["cost"], at[metric])], factor, color=colour, **mark)
        if published:
            _logarithmic(axes)
    said = f"at a budget of {chosen['budget'] / factor:.4g} {unit}"
    budget = Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="none", label=said)
    band = Patch(color="0.85", linewidth=0, label=f"{100 * data['net']['level']:.0f} % interval")
    legend(figure, by_metric["top1"], 2, [budget, band])
    return figure


def _published(curves: Sequence[Data]) -> Iterator[_Curve]:
    for curve in curves:
        style = _PUBLISHED.get(curve["model"])
        if style is not None and (curve["own"] or curve["model"] not in MODEL_COLORS):
            yield curve["metrics"], {**style, "label": f"published: {curve['name']}"}


def _others(runs: Sequence[Data]) -> Iterator[_Curve]:
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


def decisions(data: Data) -> Figure:
    """Whether it is the predictions or the decisions that help."""
    curves = data["decisions"]
    unit = next(table["unit"] for table in data["tables"] if table["name"] == "decision_experiment")
    factor, unit = scale(unit, max(cost for curve in curves for cost, _ in curve["metrics"]["top1"]))
    figure, by_metric = _four(unit, lines=1)
    styles = ((MODEL_COLORS["vanilla"], "-"), (EXTRA_COLORS[0], "--"), (MODEL_COLORS["ours"], "-"))
    for metric, axes in by_metric.items():
        for curve, (colour, dashes) in zip(curves, styles, strict=True):
            points = curve["metrics"][metric]
            _line(axes, metric, points, factor, label=curve["name"], color=colour, linestyle=dashes)
    legend(figure, by_metric["top1"], 3)
    return figure


def _four(unit: str, lines: int) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each metric, and room for so many lines of legend."""
    figure, made = panels(2, 2, 7, 5.1 + 0.15 * lines)
    by_metric = dict(zip(_NAMES, made.flat, strict=True))
    for metric, axes in by_metric.items():
        axes.set(ylabel=_NAMES[metric], xlabel=f"mean test cost, {unit}")
    return figure, by_metric


def _line(axes: Axes, metric: str, points: Sequence[Sequence[float | None]], factor: float, **style: Any) -> None:
    """A curve of pairs (cost, value); a mark where they all cost the same."""
    if points:
        x, y = np.array(points, dtype=float).T
        mark = {"marker": "o", "markersize": 4} if x.min() == x.max() else {}
        axes.plot(x / factor, METRICS[metric][0] * y, **{**mark, **style})


def _interval(axes: Axes, metric: str, walked: Sequence[Data], factor: float, colour: str) -> None:
    low, high = METRICS[metric][0] * np.array([at["intervals"][metric] for at in walked], dtype=float).T
    costs = np.array([at["cost"] for at in walked]) / factor
    axes.fill_between(costs, low, high, color=colour, alpha=0.18, linewidth=0)
    if costs[0] == costs[-1]:
        axes.vlines(costs[0], low[0], high[0], color=colour, alpha=0.3, linewidth=4, zorder=1)


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def laplace_cost_figure(bars: Data) -> Figure:
    """What Laplace costs at each exit, and how much more than vanilla that is."""
    factor, unit = scale("MACs", bars["naive"][-1])
    figure, ((costs, ratios),) = panels(1, 2, 7, 3)
    exits = _bars(costs, bars, factor)
    costs.set(xlabel="exit", ylabel=f"cost up to the exit, {unit}")
    for side, kind in ((-1, "efficient"), (1, "naive")):
        more = 100 * (np.array(bars[kind]) / np.array(bars["vanilla"]) - 1)
        made = ratios.bar(exits + 0.19 * side, more, width=0.36, color=_LAPLACE[kind])
        ratios.bar_label(made, fmt=_short, rotation=90, padding=2, fontsize=6)
    ratios.margins(y=0.15)
    ratios.set(xlabel="exit", ylabel="more than vanilla, %", xticks=exits)
    legend(figure, costs, 3)
    return figure


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def laplace_published(nets: Sequence[Data]) -> Figure:
    """The same of the paper's nets."""
    figure, made = panels(ceil(len(nets) / 3), 3, 7, 5.6)
    for axes, bars in zip(made.flat, nets, strict=True):
        factor, unit = scale("MACs", bars["naive"][-1])
        _bars(axes, bars, factor)
        axes.set(title=f"published: {bars['name']}", ylabel=unit)
    for axes in made[-1]:
        axes.set_xlabel("exit")
    legend(figure, made[0, 0], 3)
    return figure


def _bars(axes: Axes, bars: Mapping[str, Any], factor: float) -> Any:
    """Cumulative costs; gives the exits' numbers."""
    exits = np.arange(1, len(bars["vanilla"]) + 1)
    for j, (kind, colour) in enumerate(_LAPLACE.items()):
        axes.bar(exits + 0.27 * (j - 1), np.array(bars[kind]) / factor, width=0.25, color=colour, label=kind)
    axes.set_xticks(exits)
    return exits
