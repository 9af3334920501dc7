"""The comparison of rivals at equal cost, with paired bootstrap intervals against one of the rows.

Every method decides by the paper's 39 shapes of thresholds on its own exit score, fitted on the validation split. Its
metrics on the test split are averaged over the budget range along its budget curve, as in the paper's ablation.
"""

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from exitwise.calibration.methods import OURS, VANILLA
from exitwise.calibration.trace import Trace
from exitwise.core.checks import check_integer, get_named
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array
from exitwise.core.results import Result, RowTable
from exitwise.core.stopping import share_below
from exitwise.evaluation.bootstrap import Bootstrap, metric_columns, percentile_interval
from exitwise.evaluation.evaluate import PerSampleMetrics, mean_over_costs
from exitwise.evaluation.metrics import StoppingRanks, stopping_is_right
from exitwise.evaluation.paper_tables import get_budget_range
from exitwise.policies.policy import first_exits, sweep_counts, thresholds_for_counts
from exitwise.rival_methods.advice import advise
from exitwise.rival_methods.contenders import ENTRIES, NEEDS_TRAINING, Arena, Contender, NotRunError, run_entry
from exitwise.rival_methods.risk_control import RiskRow, compare_risk_control

METRICS = ("top1", "nlpd", "ece", "adaptive_ece", "auroc", "aurc", "eefp")
COMPARED = ("top1", "nlpd", "ece", "auroc", "eefp")  # metrics with intervals
_COST, _TOP1, _NLPD, _FIRST_GAP = 0, 1, 3, 4  # columns of `metric_columns`

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RivalRow(Result):
    """One method: means over the budget range on the test split, and differences to the reference.

    Args:
        name: Name of the method.
        label: Name in tables.
        kind: "exitwise", "calibration", "ensemble", "exit rule" or "software".
        source: Origin of the method.
        top1: Accuracy, a fraction.
        nlpd: Negative log predictive density.
        ece: Expected calibration error over ten bins of equal width.
        adaptive_ece: Expected calibration error over ten bins with equal numbers of samples.
        auroc: Area under the ROC curve of detecting correct predictions by confidence; None if it is undefined.
        aurc: Area under the risk-coverage curve.
        eefp: Early-exit failure prediction: area under the ROC curve of detecting by the exit score where stopping is
            right, mean over all exits but the last; None if it is undefined.
        eefp_visited: The same over the samples that reach each exit, mean over the budget range.
        eefp_per_exit: The same (K - 1,) at every exit but the last.
        seconds: Time to fit it on the validation split.
        added_macs: MACs that it adds to a sample that takes the last exit.
        added_cost: The same as a share of the net's; None if costs are not in MACs.
        difference: Difference of each metric to the reference; empty for the reference itself.
        intervals: Paired bootstrap intervals (95 %) of the differences.
    """

    name: str
    label: str
    kind: str
    source: str
    top1: float
    nlpd: float
    ece: float
    adaptive_ece: float
    auroc: float | None
    aurc: float
    eefp: float | None
    eefp_visited: float | None
    eefp_per_exit: tuple[float | None, ...]
    seconds: float
    added_macs: int
    added_cost: float | None
    difference: dict[str, float]
    intervals: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class RivalTable(RowTable[RivalRow]):
    """Rows of a comparison; `table[i]` and `table["name"]` are rows.

    Args:
        rows: Rows, one per method.
        reference: Name of the row that differences refer to.
        budget_range: Costs over which the metrics are averaged.
        unit: Unit of the costs.
        repeats: Number of bootstrap resamples.
        samples: Numbers of validation and test samples.
        not_run: Reasons by the names of the methods that were not run.
        needs_training: Published methods that would need another training, and were left out.
        risk_control: Policies with a controlled loss, by RC-EENN and by our certificates.
        advice: Method to use with this number of validation samples.
    """

    rows: tuple[RivalRow, ...]
    reference: str
    budget_range: tuple[float, float]
    unit: str
    repeats: int
    samples: dict[str, int]
    not_run: dict[str, str]
    needs_training: tuple[str, ...]
    risk_control: tuple[RiskRow, ...]
    advice: str

    def _row_name(self, row: RivalRow) -> str:
        return row.name

    def __repr__(self) -> str:
        lines = [f"{'':34} top-1    NLPD    ECE     EEFP"]
        for row in self.rows:
            eefp = "" if row.eefp is None else f"{row.eefp:.4f}"
            lines.append(f"{row.label:34} {row.top1:.2%}  {row.nlpd:.4f}  {row.ece:.4f}  {eefp}".rstrip())
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Return CSV with all metrics, and differences to the reference with their intervals; empty if undefined.

        Columns `eefp_1`, `eefp_2`, ... have the EEFP at each exit but the last.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        bounds = [f"{name}_{end}" for name in COMPARED for end in ("difference", "low", "high")]
        names = [*METRICS, "eefp_visited", "seconds", "added_macs", "added_cost"]
        exits = max((len(row.eefp_per_exit) for row in self.rows), default=0)
        writer.writerow(["name", "kind", *names, *(f"eefp_{k + 1}" for k in range(exits)), *bounds])
        for row in self.rows:
            values = [*(getattr(row, name) for name in names), *row.eefp_per_exit]
            for name in COMPARED:
                values += [row.difference.get(name), *row.intervals.get(name, (None, None))]
            writer.writerow([row.name, row.kind, *("" if value is None else f"{value:.6g}" for value in values)])
        return text.getvalue()


def rivals(
    trace: Trace,
    *,
    only: Iterable[str] | None = None,
    reference: str | None = None,
    budget_range: tuple[float, float] | None = None,
    repeats: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> RivalTable:
    """Compare our methods with published rivals on one trace, at equal cost.

    Every method is fitted on the validation split, and its exit thresholds are the paper's 39 shapes on its own exit
    score. Metrics are those on the test split, averaged over the budget range.

    Args:
        trace: Trace with a test split.
        only: Names of the methods to compare; by default all that can run. `exitwise rivals --help` lists them.
        reference: Name of the method that the differences refer to; it is always run. By default the paper's method or,
            if the trace has no curvature of training images, the net without calibration.
        budget_range: Costs over which to average; by default the trace's, which is the paper's for its presets.
        repeats: Number of bootstrap resamples.
        seed: Seed of the Monte Carlo draws of our methods.
        progress: Function of the number of methods that are done, and of all.

    Returns:
        The table, one row per method that was run.

    Raises:
        InputError: If the trace has no test split, a name is unknown, or another argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> table = ew.rivals(trace, only=["temperature", "entropy"], reference="MSDNet (vanilla)", repeats=50)
        >>> [row.name for row in table]
        ['MSDNet (vanilla)', 'temperature', 'entropy']
        >>> table["temperature"].intervals["ece"][1] < 0  # smaller than vanilla's, significantly
        True
    """
    arena = Arena(trace, check_integer("seed", seed))
    low, high = get_budget_range(trace, budget_range)
    check_integer("repeats", repeats, minimum=1)
    if isinstance(only, str):
        raise InputError(f"`only` must be several names, but got {only!r}")
    names = list(ENTRIES) if only is None else list(only)
    reference = reference or (OURS if trace.curvature else VANILLA)
    for argument, name in [*(("only", name) for name in names), ("reference", reference)]:
        get_named(argument, name, ENTRIES, "a method")
    chosen = [name for name in ENTRIES if name in (*names, reference)]
    order = sorted(chosen, key=lambda name: name != reference)  # the differences need it first
    judge = _Judge(arena, (low, high), repeats)
    rows: dict[str, RivalRow] = {}
    not_run: dict[str, str] = {}
    for done, name in enumerate(order):
        if progress is not None:
            progress(done, len(order))
        try:
            rows[name] = judge.row(name, run_entry(ENTRIES[name], arena))
        except NotRunError as error:
            if name == reference:
                raise InputError(f"`reference` {name!r} cannot be run: {error}") from None
            not_run[name] = str(error)
    if progress is not None:
        progress(len(order), len(order))
    return RivalTable(
        rows=tuple(rows[name] for name in chosen if name in rows),
        reference=reference,
        budget_range=(low, high),
        unit=trace.costs.unit,
        repeats=repeats,
        samples={"val": len(arena.val), "test": len(arena.test)},
        not_run={name: not_run[name] for name in chosen if name in not_run},
        needs_training=NEEDS_TRAINING,
        risk_control=compare_risk_control(trace) if only is None else (),
        advice=advise(len(arena.val)),
    )


class _Judge:
    """Measures contenders on the test split; the first one is the reference."""

    def __init__(self, arena: Arena, budget_range: tuple[float, float], repeats: int) -> None:
        self._arena, self._range = arena, budget_range
        self._labels = arena.test.labels.numpy()
        self._costs = np.asarray(arena.trace.costs.values)
        self._bootstrap = Bootstrap(len(self._labels), repeats)
        self._reference: dict[str, Array] | None = None
        self._reference_values: dict[str, float | None] = {}

    def row(self, name: str, contender: Contender) -> RivalRow:
        """Return the row of a contender."""
        entry = ENTRIES[name]
        measured = measure(contender, self._labels, self._costs, self._range)
        values = measured.values
        resampled = self._resampled(measured, contender.test_scores)
        difference: dict[str, float] = {}
        intervals: dict[str, tuple[float, float]] = {}
        if self._reference is None:
            self._reference, self._reference_values = resampled, values
        else:
            for key in COMPARED:
                value, other = values[key], self._reference_values[key]
                if value is not None and other is not None and key in resampled and key in self._reference:
                    difference[key] = value - other
                    intervals[key] = percentile_interval(resampled[key] - self._reference[key])
        trace = self._arena.trace
        share = contender.macs / trace.costs.values[-1] if trace.costs.unit == "MACs" else None
        return RivalRow(
            name=name,
            label=entry.label,
            kind=entry.kind,
            source=entry.source,
            **values,
            eefp_visited=measured.eefp_visited,
            eefp_per_exit=measured.eefp_per_exit,
            seconds=contender.seconds,
            added_macs=contender.macs,
            added_cost=share,
            difference=difference,
            intervals=intervals,
        )

    def _resampled(self, measured: "Measured", scores: Array) -> dict[str, Array]:
        """Return the compared metrics (R,) on every resample."""
        per_sample, exits, values = measured.per_sample, measured.exits, measured.values
        correct, samples = per_sample.rank == 0, np.arange(len(self._labels))
        tables = [metric_columns(per_sample, taken, self._costs) for taken in exits]
        means = self._bootstrap.resampled_means(np.concatenate(tables, axis=1)).astype(np.float64)
        means = means.reshape(len(means), len(exits), -1)  # (R, J, columns)

        def average(curve: Array) -> Array:
            return np.asarray(mean_over_costs(means[:, :, _COST], curve, *self._range))

        ece = average(np.abs(means[:, :, _FIRST_GAP:]).sum(axis=2))
        resampled = {
            "top1": average(means[:, :, _TOP1]),
            "nlpd": average(means[:, :, _NLPD]),
            # Noise increases an ECE, and a resample adds noise: see `Bootstrap.resampled_metrics`.
            "ece": np.maximum(ece - ece.mean() + values["ece"], 0),
        }
        if values["auroc"] is not None:
            columns = [auroc_columns(per_sample.confidence[taken, samples], correct[taken, samples]) for taken in exits]
            resampled["auroc"] = average(self._resampled_auroc(columns))
        right = stopping_is_right(correct)
        pairs = zip(scores[:-1].astype(np.float32), right[:-1], strict=True)
        defined = [auroc_columns(score, mask) for score, mask in pairs if 0 < mask.sum() < len(mask)]
        if defined:
            resampled["eefp"] = self._resampled_auroc(defined).mean(axis=1)
        return resampled

    def _resampled_auroc(self, columns: list[Array]) -> Array:
        """Return the areas (R, J) on every resample, from the columns of `auroc_columns`."""
        means = self._bootstrap.resampled_means(np.concatenate(columns, axis=1)).astype(np.float64)
        sums = means.reshape(len(means), len(columns), 4)
        area = np.array([table[:, 0].sum() / table[:, 1].sum() for table in columns])
        counts = np.maximum(sums[:, :, 1::2], 1e-9)  # a resample may have none of one kind
        return np.asarray((sums[:, :, ::2] / counts).sum(axis=2) - area)


@dataclass(frozen=True, eq=False)
class Measured:
    """Metrics of a contender on the test split, and what they were computed from."""

    values: dict[str, Any]  # means over the budget range, by the names of `METRICS`
    eefp_visited: float | None
    eefp_per_exit: tuple[float | None, ...]
    per_sample: PerSampleMetrics
    exits: list[Array]


def measure(contender: Contender, labels: Array, costs: Array, budget_range: tuple[float, float]) -> Measured:
    """Measure a contender on test samples with labels (m,), for costs (K,) of the exits."""
    thresholds = sweep_thresholds(contender.val_scores) if contender.thresholds is None else contender.thresholds
    per_sample = PerSampleMetrics.of(contender.test, labels)
    exits = [first_exits(contender.test_scores, row) for row in thresholds]
    mean_costs = np.array([costs[taken].mean() for taken in exits])
    points = [per_sample.metrics(taken) for taken in exits]
    values = {
        key: _finite(mean_over_costs(mean_costs, np.array([point[key] for point in points]), *budget_range))
        for key in METRICS
        if key != "eefp"
    }
    ranks = StoppingRanks(contender.test_scores.astype(np.float32), per_sample.rank == 0)  # rounding restores ties
    values["eefp"] = ranks.mean()
    visited = np.array([ranks.mean(taken) for taken in exits], dtype=np.float64)  # NaN where it is undefined
    visited_mean = _finite(mean_over_costs(mean_costs, visited, *budget_range))
    return Measured(values, visited_mean, ranks.per_exit(), per_sample, exits)


def _finite(value: Array) -> float | None:
    return float(value) if isfinite(value) else None


def sweep_thresholds(scores: Array) -> Array:
    """Return the thresholds (39, K) of the paper's sweep on scores (K, n) without ties.

    With ties broken, as many samples exit as the shapes have it also for scores with few different values.
    """
    return np.array([thresholds_for_counts(scores, counts) for counts in sweep_counts(*scores.shape).values()])


def auroc_columns(score: Array, positive: Array) -> Array:
    """Return columns (n, 4) whose means give the area under the ROC curve and, to first order, its bootstrap.

    The placement of a positive sample is the share of negative ones with a lower score, that of a negative sample the
    share of positive ones with a higher score; ties count one half (DeLong et al., 1988). The columns are the
    placements of positive samples, the mask of these, and the same of negative samples.
    """
    columns = np.zeros((len(score), 4))
    columns[positive, 0] = share_below(score[positive], score[~positive])
    columns[positive, 1] = 1
    columns[~positive, 2] = 1 - share_below(score[~positive], score[positive])
    columns[~positive, 3] = 1
    return columns
