"""Search for the best chain of networks at each budget: up to three in every order, cross-fitted."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exitwise.calibration.chain import chain_traces, check_same_samples
from exitwise.calibration.methods import Method
from exitwise.calibration.trace import Trace
from exitwise.calibration.tuning import calibrate
from exitwise.core.checks import check_integer, check_number
from exitwise.core.costs import format_cost
from exitwise.core.errors import InputError, shorten
from exitwise.core.predictions import Array
from exitwise.evaluation.bootstrap import Bootstrap, percentile_interval
from exitwise.evaluation.evaluate import PerSampleMetrics
from exitwise.evaluation.metrics import ece
from exitwise.policies.fit import fit_policy

if TYPE_CHECKING:
    import pandas

FOLDS = 5
_STRATEGY = "optimized"
Chain = tuple[str, ...]


@dataclass(frozen=True)
class CascadeRow:
    """A chain of networks at a budget, on samples that neither its calibration nor its thresholds were fitted on.

    Args:
        networks: Names in the order in which they run.
        budget: Largest mean cost that its thresholds were fitted to; None for a network alone.
        cost: Mean cost per sample.
        milliseconds: Mean time per sample, if times were given.
        top1: Accuracy.
        interval: 95 % interval of the accuracy.
        nlpd: Negative log predictive density.
        ece: Expected calibration error.
        gain: Accuracy beyond the best network alone that costs no more than the budget; None if none does.
        gain_interval: 95 % interval of the gain, paired by samples.
    """

    networks: Chain
    budget: float | None
    cost: float
    milliseconds: float | None
    top1: float
    interval: tuple[float, float]
    nlpd: float
    ece: float
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The networks, joined by arrows."""
        return " > ".join(self.networks)


@dataclass(frozen=True)
class CascadeTable:
    """Result of `best_cascades`.

    Args:
        rows: Every chain at every budget that its first network can meet.
        networks: Every network alone; one with several exits, to its last.
        budgets: The budgets.
        chosen_top1: Accuracy (one per budget) of choosing the best chain itself: in each fold, that of the chain which
            is best in the other folds. It is lower than the best row's, which was chosen for being best.
        unit: Unit of costs and budgets.
        samples: Number of samples.
    """

    rows: tuple[CascadeRow, ...]
    networks: tuple[CascadeRow, ...]
    budgets: tuple[float, ...]
    chosen_top1: tuple[float | None, ...]
    unit: str
    samples: int

    @property
    def best(self) -> tuple[CascadeRow | None, ...]:
        """The row with the highest accuracy at every budget, the cheaper one of equals; None where none is possible."""
        return tuple(
            max(self.at(budget), key=lambda row: (row.top1, -row.cost), default=None) for budget in self.budgets
        )

    def at(self, budget: float) -> list[CascadeRow]:
        """Return all chains at a budget, and the networks alone that cost no more."""
        return [*(row for row in self.networks if row.cost <= budget), *(r for r in self.rows if r.budget == budget)]

    def front(self, cost: str = "cost") -> list[CascadeRow]:
        """Return the rows that no other one beats in both accuracy and `cost`, or "milliseconds"; cheapest first."""
        if cost not in ("cost", "milliseconds"):
            raise InputError(f"`cost` must be 'cost' or 'milliseconds', but got {cost!r}")
        if any(getattr(row, cost) is None for row in self.networks):
            raise InputError("there are no times: give `milliseconds` to best_cascades")
        front: list[CascadeRow] = []
        for row in sorted((*self.networks, *self.rows), key=lambda row: (getattr(row, cost), -row.top1)):
            if not front or row.top1 > front[-1].top1:
                front.append(row)
        return front

    def __str__(self) -> str:
        lines = [f"{'budget':>14}  {'cost':>14}  top-1 %  (95 %)           NLPD   ECE    networks"]
        for budget, best in zip(self.budgets, self.best, strict=True):
            given = format_cost(budget, self.unit)
            if best is None:
                lines.append(f"{given:>14}  every network costs more")
                continue
            low, high = (f"{100 * value:.2f}" for value in best.interval)
            lines.append(
                f"{given:>14}  {format_cost(best.cost, self.unit):>14}  {100 * best.top1:7.2f}  ({low} to {high})"
                f"  {best.nlpd:.3f}  {best.ece:.3f}  {best.name}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as a JSON-serializable dict, with the best chains and the Pareto fronts."""
        has_times = all(row.milliseconds is not None for row in self.networks)
        return {
            "unit": self.unit,
            "samples": self.samples,
            "budgets": list(self.budgets),
            "best": [None if row is None else asdict(row) for row in self.best],
            "chosen_top1": list(self.chosen_top1),
            "networks": [asdict(row) for row in self.networks],
            "rows": [asdict(row) for row in self.rows],
            "front": [asdict(row) for row in self.front()],
            "front_milliseconds": [asdict(row) for row in self.front("milliseconds")] if has_times else None,
        }

    def to_pandas(self) -> "pandas.DataFrame":
        """Return all rows as a data frame, networks alone first; needs pandas."""
        import pandas

        return pandas.DataFrame([{**asdict(row), "networks": row.name} for row in (*self.networks, *self.rows)])


def best_cascades(
    traces: Mapping[str, Trace],
    budgets: Sequence[float],
    *,
    max_length: int = 3,
    method: Method | str = "Pool",
    milliseconds: Mapping[str, float | Sequence[float]] | None = None,
    seed: int = 0,
) -> CascadeTable:
    """Compare every chain of networks, in every order, at every budget.

    Nothing runs: the trace of a chain is joined from those of its networks. In each of five folds, the chain is
    calibrated and its thresholds are fitted on the other folds' validation samples, and measured on its own.

    Args:
        traces: Trace of each network by its name, of the same validation samples in the same order.
        budgets: Largest mean costs per sample, in the unit of the traces.
        max_length: Largest number of networks in a chain.
        method: Calibration method; "Pool" joins networks well, and needs no training images.
        milliseconds: Measured time of each network by its name, per sample; for one with several exits, the cumulative
            times of its exits.
        seed: Seed of the folds.

    Returns:
        The table: all chains with intervals, the best one at every budget, the Pareto front.

    Raises:
        InputError: Traces have other samples or classes, or an argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors")).hold_out(0.9)[0]  # 500 samples
        >>> exits = {f"exit {k}": ew.single_exit(trace, k) for k in (0, 3)}
        >>> table = ew.best_cascades(exits, budgets=[2.5e7])
        >>> table.best[0].name
        'exit 0 > exit 3'
    """
    _check_traces(traces)
    if not isinstance(budgets, Iterable) or isinstance(budgets, str):
        raise InputError(f"`budgets` must be several numbers, but got {budgets!r}")
    amounts = tuple(check_number("budgets", budget, 0) for budget in budgets)
    if not amounts:
        raise InputError("`budgets` must hold at least one budget, but is empty")
    check_integer("max_length", max_length, 1)
    times = _check_times(traces, milliseconds)
    first = next(iter(traces.values()))
    labels = first.val.labels.numpy()
    order = np.random.default_rng(check_integer("seed", seed, 0)).permutation(len(labels))
    fold = np.empty(len(labels), dtype=int)
    fold[order] = np.arange(len(labels)) % FOLDS
    outcomes: dict[tuple[Chain, float | None], Array] = {}  # columns (n, 5) of `_COLUMNS` by chain and budget
    for chain in _iter_chains(list(traces), max_length):
        trace = chain_traces([replace(traces[name], test=None) for name in chain])
        ms = None if times is None else _add_times([times[name] for name in chain])
        reachable = [budget for budget in amounts if budget >= trace.costs.values[0]]
        wanted: list[float | None] = [None] if len(chain) == 1 else []
        if len(chain) > 1 or trace.num_exits > 1:
            wanted += reachable
        if wanted:
            outcomes |= {(chain, budget): table for budget, table in _cross_fit(trace, ms, wanted, fold, method)}
    return _make_table(outcomes, amounts, fold, first.costs.unit, times is not None)


def single_exit(trace: Trace, exit: int) -> Trace:
    """Return the trace of one exit as that of a network of its own, which costs what it takes to reach the exit.

    Args:
        trace: Trace of a net with several exits.
        exit: The exit, counted from 0.

    Returns:
        The trace with that exit only.

    Raises:
        InputError: The trace has no such exit.

    Example:
        >>> import exitwise as ew
        >>> ew.single_exit(ew.Trace.load(ew.zoo.path("trace.safetensors")), 3).num_exits
        1
    """
    k = check_integer("exit", exit, 0, trace.num_exits - 1)
    splits = [
        None if split is None else replace(split, features=(split.features[k],)) for split in (trace.val, trace.test)
    ]
    return replace(
        trace,
        val=splits[0],  # type: ignore[arg-type]
        test=splits[1],
        heads=(trace.heads[k],),
        curvature=trace.curvature[k : k + 1],
        costs=replace(trace.costs, values=(trace.costs.values[k],)),
        model=None,
    )


_COST, _MS, _CORRECT, _LOSS, _CONFIDENCE = range(5)


def _check_traces(traces: Any) -> None:
    if not isinstance(traces, Mapping) or not traces or not all(isinstance(x, Trace) for x in traces.values()):
        raise InputError(f"`traces` must map names of networks to their traces, but got {shorten(traces)}")
    names = list(traces)
    for name in names:
        check_same_samples(traces[names[0]], traces[name], f"the trace of {name!r}")
    if len(traces[names[0]].val) < 2 * FOLDS:
        raise InputError(
            f"`traces` must have at least {2 * FOLDS} validation samples for {FOLDS} folds, "
            f"but have {len(traces[names[0]].val)}"
        )


def _check_times(traces: Mapping[str, Trace], milliseconds: Any) -> dict[str, list[float]] | None:
    """Return the cumulative times of every network's exits; None without times."""
    if milliseconds is None:
        return None
    if not isinstance(milliseconds, Mapping):
        raise InputError(f"`milliseconds` must map names of networks to times, but got a {type(milliseconds).__name__}")
    times = {}
    for name, trace in traces.items():
        given = milliseconds.get(name)
        values = list(given) if isinstance(given, Sequence) else [given]
        if given is None or len(values) != trace.num_exits:
            raise InputError(
                f"`milliseconds` must have {trace.num_exits} times for {name!r}, one per exit, but has {given!r}"
            )
        times[name] = [check_number("milliseconds", value, 0) for value in values]
    return times


def _iter_chains(names: Sequence[str], max_length: int) -> Iterator[Chain]:
    for length in range(1, min(max_length, len(names)) + 1):
        yield from permutations(names, length)


def _add_times(times: Sequence[Sequence[float]]) -> Array:
    total: list[float] = []
    for own in times:
        spent = total[-1] if total else 0.0
        total += [spent + value for value in own]
    return np.array(total)


def _cross_fit(
    trace: Trace, ms: Array | None, budgets: Sequence[float | None], fold: Array, method: Method | str
) -> Iterator[tuple[float | None, Array]]:
    """Yield every budget with the columns (n, 5) of all samples, each by what was fitted without its fold."""
    tables = {budget: np.zeros((len(fold), 5)) for budget in budgets}
    costs = np.asarray(trace.costs.values)
    for i in range(FOLDS):
        inside = fold == i
        tuned = replace(trace, val=trace.val.take(torch.from_numpy(~inside)))
        held_out = trace.val.take(torch.from_numpy(inside))
        calibration = calibrate(tuned, "T_opt" if trace.num_exits == 1 else method)
        tune_preds, preds = calibration.predict(tuned.val), calibration.predict(held_out)
        per_exit = PerSampleMetrics.of(preds, held_out.labels.numpy())
        samples = np.arange(len(held_out))
        for budget, table in tables.items():
            exits = np.full(len(held_out), trace.num_exits - 1)
            if budget is not None:
                policy = fit_policy(
                    tune_preds, tuned.val.labels, trace.costs, budget=min(budget, costs[-1]), strategy=_STRATEGY
                )
                exits = np.asarray(policy.exits(preds))
            table[inside] = np.column_stack(
                [
                    costs[exits],
                    np.zeros(len(exits)) if ms is None else ms[exits],
                    per_exit.rank[exits, samples] == 0,
                    -per_exit.log_true[exits, samples],
                    per_exit.confidence[exits, samples],
                ]
            )
    yield from tables.items()


def _make_table(
    outcomes: Mapping[tuple[Chain, float | None], Array],
    budgets: Sequence[float],
    fold: Array,
    unit: str,
    has_times: bool,
) -> CascadeTable:
    keys = list(outcomes)
    correct = np.column_stack([outcomes[key][:, _CORRECT] for key in keys])  # (n, rows)
    resampled = Bootstrap(len(fold)).resampled_means(correct)  # (R, rows)
    column = {key: j for j, key in enumerate(keys)}
    alone = {key: outcomes[key][:, _COST].mean() for key in keys if key[1] is None}

    def make_row(key: tuple[Chain, float | None]) -> CascadeRow:
        table, j = outcomes[key], column[key]
        row = CascadeRow(
            networks=key[0],
            budget=key[1],
            cost=float(table[:, _COST].mean()),
            milliseconds=float(table[:, _MS].mean()) if has_times else None,
            top1=float(correct[:, j].mean()),
            interval=percentile_interval(resampled[:, j]),
            nlpd=float(table[:, _LOSS].mean()),
            ece=float(ece(table[:, _CONFIDENCE], correct[:, j] > 0)),
        )
        within = [column[other] for other, cost in alone.items() if key[1] is not None and cost <= key[1]]
        if not within:
            return row
        best = max(within, key=lambda other: correct[:, other].mean())
        gain = float(row.top1 - correct[:, best].mean())
        return replace(row, gain=gain, gain_interval=percentile_interval(resampled[:, j] - resampled[:, best]))

    chosen: list[float | None] = []
    for budget in budgets:
        usable = [column[key] for key in keys if key[1] == budget or alone.get(key, np.inf) <= budget]
        chosen.append(_choose_in_folds(correct[:, usable], fold) if usable else None)
    rows = [make_row(key) for key in keys]
    return CascadeTable(
        rows=tuple(row for row in rows if row.budget is not None),
        networks=tuple(row for row in rows if row.budget is None),
        budgets=tuple(budgets),
        chosen_top1=tuple(chosen),
        unit=unit,
        samples=len(fold),
    )


def _choose_in_folds(correct: Array, fold: Array) -> float:
    """Return the accuracy in each fold of the column of (n, m) that is best in the other folds, over all samples."""
    total = 0.0
    for i in range(FOLDS):
        best = int(correct[fold != i].mean(axis=0).argmax())
        total += float(correct[fold == i, best].sum())
    return total / len(fold)
