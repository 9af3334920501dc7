"""The paper's tables: the twelve-row ablation and the decision experiment, from a trace."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.laplace import Mode
from exitwise.calibration.methods import METHODS, OURS, VANILLA
from exitwise.calibration.trace import Trace
from exitwise.calibration.tuning import SearchKind, Tuner, resolve_num_draws
from exitwise.core.errors import InputError
from exitwise.core.predictions import Predictions
from exitwise.core.results import Result
from exitwise.evaluation.evaluate import BudgetCurve, budget_curve
from exitwise.policies.policy import sweep

DECISIONS = "Vanilla predictions, our model decisions"
OUR_MODEL = "Our model"
METRICS = {"top1": (100, 2), "top5": (100, 2), "nlpd": (1, 3), "ece": (1, 3)}  # factor and digits in print


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

    def to_csv(self) -> str:
        """Every number with its change against vanilla; accuracies as fractions."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["method", *METRICS, *(f"{name}_change" for name in METRICS)])
        for row in self.rows:
            numbers = [*(getattr(row, name) for name in METRICS), *(row.change[name] for name in METRICS)]
            writer.writerow([row.method, *(f"{number:.6g}" for number in numbers)])
        return text.getvalue()

    def to_latex(self) -> str:
        """A tabular (booktabs) as the paper has it: accuracies in percent, changes against vanilla in small."""
        lines = [r"\begin{tabular}{lrrrr}", r"\toprule", r" & Top-1 & Top-5 & NLPD & ECE \\", r"\midrule"]
        for row in self.rows:
            cells = [_latex_name(row.method)]
            for name, (factor, digits) in METRICS.items():
                change = rf" {{\scriptsize ${row.change[name] * factor:+.{digits}f}$}}" if row.method != VANILLA else ""
                cells.append(f"{getattr(row, name) * factor:.{digits}f}{change}")
            lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_name(method: str) -> str:
    """T_opt and sigma_opt as symbols."""
    for word, symbol in (("T_opt", r"$T_\mathrm{opt}$"), ("sigma_opt", r"$\sigma_\mathrm{opt}$")):
        method = method.replace(word, symbol)
    return method


@dataclass(frozen=True)
class PaperTables:
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
    num_draws: int | None = None,
    seed: int | torch.Generator = 0,
    mode: Mode = "paper",
    draws: torch.Tensor | None = None,
    search: SearchKind = "grid",
    samples: int | None = None,
) -> Table:
    """The ablation by the paper's protocol: tuned and swept on val, the mean of the test curve over the budget range.

    The range defaults to the one in the trace, which is the paper's for its presets. `num_draws`, `seed`, `mode`,
    `draws` (S, c) and `search` are those of `calibrate`; `samples` is the former name of `num_draws`.
    """
    tuner = Tuner(trace, resolve_num_draws(num_draws, samples), seed, mode, draws, search=search)
    return make_paper_tables(trace, tuner, budget_range, list(methods)).ablation


def decision_experiment(
    trace: Trace,
    budget_range: tuple[float, float] | None = None,
    *,
    num_draws: int | None = None,
    seed: int | torch.Generator = 0,
    mode: Mode = "paper",
    draws: torch.Tensor | None = None,
    samples: int | None = None,
) -> Table:
    """Vanilla, vanilla's predictions at the exits that our model chooses, and our model.

    Arguments as for `ablation`, `draws` (S, c) among them.
    """
    tuner = Tuner(trace, resolve_num_draws(num_draws, samples), seed, mode, draws)
    return make_paper_tables(trace, tuner, budget_range, [VANILLA, OURS]).decisions


def make_paper_tables(
    trace: Trace,
    tuner: Tuner,
    budget_range: tuple[float, float] | None = None,
    methods: Iterable[str] = METHODS,
    calibrations: Mapping[str, Calibration] | None = None,
) -> PaperTables:
    """Calibrate, predict, sweep and evaluate by every method, and make both tables of it.

    Calibrations that exist already are taken as they are.
    """
    if trace.test is None:
        raise InputError("the trace has no test split, which the tables are made on")
    low, high = _range(trace, budget_range)
    wanted = list(dict.fromkeys([VANILLA, OURS, *methods]))
    # The widest search first: the others then find their grid points in its tables.
    known = calibrations or {}
    made = {name: known.get(name) or tuner.calibrate(name) for name in sorted(wanted, key=lambda name: name != OURS)}
    curves: dict[str, BudgetCurve] = {}
    kept: dict[str, Predictions] = {}
    for name in wanted:
        calibration = made[name]
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
        numbers = {key: mean[key] for key in METRICS}
        change = {key: value - vanilla[key] for key, value in numbers.items()}
        return TableRow(
            name,
            **numbers,
            change=change,
            temperatures=calibration.temperatures if calibration else None,
            prior_vars=calibration.prior_vars if calibration and calibration.method.laplace else None,
        )

    rows = tuple(row(name, name, made[name]) for name in methods)
    decisions = (
        row(VANILLA, VANILLA, made[VANILLA]),
        row(DECISIONS, DECISIONS, None),
        row(OUR_MODEL, OURS, made[OURS]),
    )
    unit = trace.costs.unit
    return PaperTables(Table(rows, (low, high), unit), Table(decisions, (low, high), unit), made, curves)


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
