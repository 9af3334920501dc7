"""The paper's tables: the twelve-row ablation and the decision experiment, from a trace."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from exitwise.calibration import Calibration
from exitwise.errors import InputError
from exitwise.evaluation import BudgetCurve, budget_curve
from exitwise.laplace import Mode
from exitwise.methods import METHODS, OURS, SAMPLES, VANILLA
from exitwise.policy import sweep
from exitwise.predictions import Predictions
from exitwise.results import Result
from exitwise.trace import Trace
from exitwise.tune import Search, Tuner

DECISIONS = "Vanilla predictions, our model decisions"
OUR_MODEL = "Our model"


@dataclass(frozen=True)
class TableRow(Result):
    """Means over the budget range, and the change against vanilla; accuracies are fractions."""

    method: str
    top1: float
    top5: float
    nlpd: float
    ece: float
    change: dict[str, float]
    temperatures: tuple[float, ...] | None = None
    prior_vars: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Table(Result):
    """Rows of means over a budget range."""

    rows: tuple[TableRow, ...]
    budget_range: tuple[float, float]
    unit: str

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TableRow]:
        return iter(self.rows)

    def __getitem__(self, method: int | str) -> TableRow:
        if isinstance(method, int):
            return self.rows[method]
        found = next((row for row in self.rows if row.method == method), None)
        if found is None:
            raise KeyError(method)
        return found

    def __repr__(self) -> str:
        lines = [f"{'':40} top-1    top-5   NLPD    ECE"]
        lines += [f"{r.method:40} {r.top1:.2%}  {r.top5:.2%}  {r.nlpd:.4f}  {r.ece:.4f}" for r in self.rows]
        return "\n".join(lines)

    def _records(self) -> list[dict[str, Any]]:
        return [record for row in self.rows for record in row._records()]


@dataclass(frozen=True)
class Study:
    """Both tables and all that they were made from."""

    ablation: Table
    decisions: Table
    calibrations: dict[str, Calibration]
    curves: dict[str, BudgetCurve]


def ablation(
    trace: Trace,
    budget_range: tuple[float, float] | None = None,
    *,
    methods: Iterable[str] = METHODS,
    samples: int = SAMPLES,
    seed: int | torch.Generator = 0,
    mode: Mode = "paper",
    draws: torch.Tensor | None = None,
    search: Search = "grid",
) -> Table:
    """The ablation by the paper's protocol: tuned and swept on val, the mean of the test curve over the budget range.

    The range defaults to the one in the trace, which is the paper's for its presets.
    """
    tuner = Tuner(trace, samples, seed, mode, draws, search=search)
    return study(trace, tuner, budget_range, list(methods)).ablation


def decision_experiment(
    trace: Trace,
    budget_range: tuple[float, float] | None = None,
    *,
    samples: int = SAMPLES,
    seed: int | torch.Generator = 0,
    mode: Mode = "paper",
    draws: torch.Tensor | None = None,
) -> Table:
    """Vanilla, vanilla's predictions at the exits that our model chooses, and our model."""
    tuner = Tuner(trace, samples, seed, mode, draws)
    return study(trace, tuner, budget_range, [VANILLA, OURS]).decisions


def study(
    trace: Trace, tuner: Tuner, budget_range: tuple[float, float] | None = None, methods: Iterable[str] = METHODS
) -> Study:
    """Calibrate, predict, sweep and evaluate by every method, and make both tables of it."""
    if trace.test is None:
        raise InputError("the trace has no test split, which the tables are made on")
    low, high = _range(trace, budget_range)
    wanted = list(dict.fromkeys([VANILLA, OURS, *methods]))
    # The widest search first: the others then find their grid points in its tables.
    calibrations = {name: tuner.calibrate(name) for name in sorted(wanted, key=lambda name: name != OURS)}
    curves: dict[str, BudgetCurve] = {}
    kept: dict[str, Predictions] = {}
    for name in wanted:
        calibration = calibrations[name]
        preds = calibration.predict(trace.test)
        if name in (VANILLA, OURS):
            kept[name] = preds
        policies = sweep(calibration.predict(trace.val), costs=trace.costs)
        curves[name] = budget_curve(preds, labels=trace.test.labels, policies=policies, costs=trace.costs)
        if name == OURS:
            curves[DECISIONS] = budget_curve(
                kept[VANILLA], labels=trace.test.labels, policies=policies, costs=trace.costs, decide_with=preds
            )
    vanilla = curves[VANILLA].mean(low, high)

    def row(name: str, curve: str, calibration: Calibration | None) -> TableRow:
        mean = curves[curve].mean(low, high)
        numbers = {key: mean[key] for key in ("top1", "top5", "nlpd", "ece")}
        change = {key: value - vanilla[key] for key, value in numbers.items()}
        return TableRow(
            name,
            **numbers,
            change=change,
            temperatures=calibration.temperatures if calibration else None,
            prior_vars=calibration.prior_vars if calibration and calibration.method.laplace else None,
        )

    rows = tuple(row(name, name, calibrations[name]) for name in methods)
    decisions = (
        row(VANILLA, VANILLA, calibrations[VANILLA]),
        row(DECISIONS, DECISIONS, None),
        row(OUR_MODEL, OURS, calibrations[OURS]),
    )
    unit = trace.costs.unit
    return Study(Table(rows, (low, high), unit), Table(decisions, (low, high), unit), calibrations, curves)


def _range(trace: Trace, budget_range: tuple[float, float] | None) -> tuple[float, float]:
    found = budget_range or trace.budget_range
    if found is None:
        first, last = trace.costs.values[0], trace.costs.values[-1]
        return (first, last) if first < last else (0.0, last)  # with one exit, all budgets buy the same
    try:
        low, high = (float(value) for value in found)
    except (TypeError, ValueError):
        raise InputError(f"`budget_range` must be two growing numbers, but got {found!r}") from None
    if not 0 <= low < high < float("inf"):
        raise InputError(f"`budget_range` must be two growing numbers, but got {low:.6g} and {high:.6g}")
    return (low, high)
