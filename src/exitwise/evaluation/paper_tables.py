"""The paper's tables: the ablation of twelve methods and the decision experiment, from a trace."""

import csv
import io
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from exitwise.calibration.calibration import Calibration, predict_together
from exitwise.calibration.laplace import Mode
from exitwise.calibration.methods import METHODS, OURS, VANILLA
from exitwise.calibration.trace import Trace
from exitwise.calibration.tuning import SearchKind, Tuner, resolve_num_draws
from exitwise.core.errors import InputError
from exitwise.core.predictions import Predictions
from exitwise.core.results import Result, RowTable
from exitwise.core.summaries import OF_CONFIDENCE, OF_TRUE_LABEL, SUMMARIES
from exitwise.evaluation.evaluate import BudgetCurve, budget_curve
from exitwise.policies.policy import sweep

DECISIONS = "Vanilla predictions, our model decisions"
OUR_MODEL = "Our model"
METRICS = {"top1": (100, 2), "top5": (100, 2), "nlpd": (1, 3), "ece": (1, 3)}  # factor and digits in print


@dataclass(frozen=True)
class TableRow(Result):
    """Means of one method over the budget range; accuracies are fractions.

    Args:
        method: Name of the method.
        top1: Mean top-1 accuracy.
        top5: Mean top-5 accuracy.
        nlpd: Mean NLPD.
        ece: Mean ECE.
        change: Change of each metric against vanilla.
        temperatures: Temperatures (K,) of the calibration.
        prior_vars: Prior variances (K,) of the calibration; None without Laplace.
        eefp: Mean EEFP, how well the exit score detects where stopping is right; None if it is undefined.
    """

    method: str
    top1: float
    top5: float
    nlpd: float
    ece: float
    change: dict[str, float]
    temperatures: tuple[float, ...] | None = None
    prior_vars: tuple[float, ...] | None = None
    eefp: float | None = None


@dataclass(frozen=True)
class Table(RowTable[TableRow]):
    """Rows of means over a budget range; `table[i]` and `table["method"]` are rows.

    Args:
        rows: Rows, one per method.
        budget_range: Costs over which the metrics are averaged.
        unit: Unit of the costs.
    """

    rows: tuple[TableRow, ...]
    budget_range: tuple[float, float]
    unit: str

    def _row_name(self, row: TableRow) -> str:
        return row.method

    def __repr__(self) -> str:
        lines = [f"{'':40} top-1    top-5   NLPD    ECE"]
        lines += [f"{r.method:40} {r.top1:.2%}  {r.top5:.2%}  {r.nlpd:.4f}  {r.ece:.4f}" for r in self.rows]
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Return CSV with every metric and its change against vanilla; accuracies are fractions."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["method", *METRICS, *(f"{name}_change" for name in METRICS)])
        for row in self.rows:
            numbers = [*(getattr(row, name) for name in METRICS), *(row.change[name] for name in METRICS)]
            writer.writerow([row.method, *(f"{number:.6g}" for number in numbers)])
        return text.getvalue()

    def to_latex(self) -> str:
        """Return a LaTeX tabular (booktabs) like the paper's: accuracies in percent, changes in small print."""
        lines = [r"\begin{tabular}{lrrrr}", r"\toprule", r" & Top-1 & Top-5 & NLPD & ECE \\", r"\midrule"]
        for row in self.rows:
            cells = [_latex_name(row.method)]
            for name, (factor, digits) in METRICS.items():
                change = rf" {{\scriptsize ${row.change[name] * factor:+.{digits}f}$}}" if row.method != VANILLA else ""
                cells.append(f"{getattr(row, name) * factor:.{digits}f}{change}")
            lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_name(method: str) -> str:
    """Return the method's name with T_opt and sigma_opt as symbols."""
    for word, symbol in (("T_opt", r"$T_\mathrm{opt}$"), ("sigma_opt", r"$\sigma_\mathrm{opt}$")):
        method = method.replace(word, symbol)
    return method


@dataclass(frozen=True)
class PaperTables:
    """Both tables, with the calibrations, predictions and budget curves that they were computed from."""

    ablation: Table
    decisions: Table
    calibrations: dict[str, Calibration]
    curves: dict[str, BudgetCurve]
    val_preds: dict[str, Predictions] = field(default_factory=dict)
    test_preds: dict[str, Predictions] = field(default_factory=dict)


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
    """Compute the paper's ablation table.

    Each method is calibrated and swept on the validation split. Its metrics are averaged over the budget range along
    the budget curve of the test split.

    Args:
        trace: Trace with a test split.
        budget_range: Costs over which to average; by default the trace's, which is the paper's for its presets.
        methods: Names of the methods, by default all twelve.
        num_draws: Number S of Monte Carlo draws; with dropout, number of masks [default: 50].
        seed: Seed or generator of the draws.
        mode: Laplace predictive, as in `calibrate`.
        draws: Standard normals (S, c) to use instead of those that `num_draws` and `seed` would give.
        search: Search for temperatures and prior variances, as in `calibrate`.
        samples: Former name of `num_draws`; give only one of them.

    Returns:
        The table, one row per method.

    Raises:
        InputError: If the trace has no test split, or an argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> small, _ = trace.hold_out(0.99)  # 50 validation samples, for a quick example
        >>> table = ew.ablation(small, methods=["MSDNet (vanilla)", "T_opt"], num_draws=4)
        >>> [row.method for row in table], table.unit
        (['MSDNet (vanilla)', 'T_opt'], 'MACs')
        >>> table["T_opt"].ece < table["MSDNet (vanilla)"].ece
        True
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
    """Compute the paper's decision experiment.

    Its rows are vanilla, vanilla's predictions at the exits that the full method chooses, and the full method.

    Args:
        trace: Trace with a test split.
        budget_range: Costs over which to average; by default the trace's, which is the paper's for its presets.
        num_draws: Number S of Monte Carlo draws [default: 50].
        seed: Seed or generator of the draws.
        mode: Laplace predictive, as in `calibrate`.
        draws: Standard normals (S, c) to use instead of those that `num_draws` and `seed` would give.
        samples: Former name of `num_draws`; give only one of them.

    Returns:
        The table of three rows.

    Raises:
        InputError: If the trace has no test split, or an argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> small, _ = trace.hold_out(0.99)  # 50 validation samples, for a quick example
        >>> [row.method for row in ew.decision_experiment(small, num_draws=4)]
        ['MSDNet (vanilla)', 'Vanilla predictions, our model decisions', 'Our model']
    """
    tuner = Tuner(trace, resolve_num_draws(num_draws, samples), seed, mode, draws)
    return make_paper_tables(trace, tuner, budget_range, [VANILLA, OURS]).decisions


def usable_methods(trace: Trace) -> list[str]:
    """Return the paper's methods for a trace: all, or without training images those without Laplace."""
    return [name for name, method in METHODS.items() if trace.curvature or not method.laplace]


def get_full_method(trace: Trace) -> str:
    """Return the paper's full method or, without training images, what remains of it without Laplace."""
    return OURS if trace.curvature else "MIE T_opt"


def make_paper_tables(
    trace: Trace,
    tuner: Tuner,
    budget_range: tuple[float, float] | None = None,
    methods: Iterable[str] = METHODS,
    calibrations: Mapping[str, Calibration] | None = None,
    detailed: Collection[str] = (),
) -> PaperTables:
    """Calibrate, predict, sweep and evaluate with every method, and compute both tables.

    Args:
        trace: Trace with a test split.
        tuner: Tuner of the trace.
        budget_range: Costs over which to average; by default the trace's.
        methods: Names of the methods of the ablation.
        calibrations: Calibrations that exist already, by method; they are used unchanged.
        detailed: Methods whose predictions are used further, for more than these tables.

    Returns:
        Both tables, with the calibrations, predictions and budget curves.

    Raises:
        InputError: If the trace has no test split, or the budget range is invalid.
    """
    if trace.test is None:
        raise InputError("the trace has no test split, which the tables are computed on")
    low, high = get_budget_range(trace, budget_range)
    methods = usable_methods(trace) if methods is METHODS else list(methods)
    full_method = get_full_method(trace)
    names = list(dict.fromkeys([VANILLA, full_method, *methods]))
    existing = calibrations or {}
    # The full method first: its search fills the tables that hold the grid points of the others.
    full_method_first = sorted(names, key=lambda name: name != full_method)
    used = {name: existing.get(name) or tuner.calibrate(name) for name in full_method_first}
    # One pass over each split serves all methods.
    keys = {name: SUMMARIES if name in detailed else OF_CONFIDENCE for name in names}
    val_keys = {name: keys[name] | OF_TRUE_LABEL if name in detailed else keys[name] for name in names}
    val_preds = predict_together(used, trace.val, val_keys)
    test_preds = predict_together(used, trace.test, {name: keys[name] | OF_TRUE_LABEL for name in names})
    curves: dict[str, BudgetCurve] = {}
    for name in names:
        preds, policies = test_preds[name], sweep(val_preds[name], costs=trace.costs)
        curves[name] = budget_curve(preds, labels=trace.test.labels, policies=policies, costs=trace.costs)
        if name == full_method:
            curves[DECISIONS] = budget_curve(
                test_preds[VANILLA], labels=trace.test.labels, policies=policies, costs=trace.costs, decide_with=preds
            )
    vanilla = curves[VANILLA].mean(low, high)

    def make_row(name: str, curve: str, calibration: Calibration | None) -> TableRow:
        mean = curves[curve].mean(low, high)
        values = {key: mean[key] for key in METRICS}
        change = {key: value - vanilla[key] for key, value in values.items()}
        return TableRow(
            name,
            **values,
            change=change,
            temperatures=calibration.temperatures if calibration else None,
            prior_vars=calibration.prior_vars if calibration and calibration.method.laplace else None,
            eefp=mean.get("eefp"),
        )

    rows = tuple(make_row(name, name, used[name]) for name in methods)
    decisions = (
        make_row(VANILLA, VANILLA, used[VANILLA]),
        make_row(DECISIONS, DECISIONS, None),
        make_row(OUR_MODEL, full_method, used[full_method]),
    )
    unit = trace.costs.unit
    tables = Table(rows, (low, high), unit), Table(decisions, (low, high), unit)
    return PaperTables(*tables, used, curves, val_preds, test_preds)


def get_budget_range(trace: Trace, budget_range: tuple[float, float] | None) -> tuple[float, float]:
    """Return the given budget range, or else the trace's, or else the range of the costs."""
    requested = budget_range or trace.budget_range
    if requested is None:
        first, last = trace.costs.values[0], trace.costs.values[-1]
        return (first, last) if first < last else (0.0, last)  # one exit: the curve is constant
    try:
        low, high = (float(value) for value in requested)
    except (TypeError, ValueError):
        raise InputError(f"`budget_range` must be two growing numbers, but got {requested!r}") from None
    if not 0 <= low < high < float("inf"):
        raise InputError(f"`budget_range` must be two growing numbers, but got {low:.6g} and {high:.6g}")
    return (low, high)
