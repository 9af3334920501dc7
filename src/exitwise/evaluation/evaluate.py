"""Evaluation of policies: cost and metrics at one budget or along a budget curve. NumPy only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, Predictions, check_labels
from exitwise.core.results import Result
from exitwise.evaluation import metrics
from exitwise.policies.learned_score import LearnedScore
from exitwise.policies.policy import Policy

TOP = 5
EEFP = ("eefp", "eefp_visited")  # fields of an `Evaluation` that depend on the exit score


@dataclass(frozen=True)
class Metrics(Result):
    """Metrics of one set of predictions; accuracies are fractions.

    Args:
        top1: Share of samples whose predicted class is correct.
        top5: Share of samples whose true class is among the five most probable.
        nlpd: Negative log predictive density, the mean of -log p(true label).
        ece: Expected calibration error over ten bins of equal width.
        brier: Mean Brier score.
        adaptive_ece: Expected calibration error over ten bins with equal numbers of samples.
        auroc: Area under the ROC curve of detecting correct predictions by confidence; NaN if all are correct or all
            are wrong.
        aurc: Area under the risk-coverage curve.
    """

    top1: float
    top5: float
    nlpd: float
    ece: float
    brier: float
    adaptive_ece: float
    auroc: float
    aurc: float

    def __repr__(self) -> str:
        return f"top-1 {self.top1:.2%}, top-5 {self.top5:.2%}, NLPD {self.nlpd:.4f}, ECE {self.ece:.4f}"


@dataclass(frozen=True)
class Evaluation(Metrics):
    """Metrics at the exits that a policy chooses, with the mean cost and the metrics of every exit.

    Args:
        cost: Mean cost per sample.
        unit: Unit of the cost, "MACs" or "ms".
        samples: Number of samples, n.
        exit_shares: Shares (K,) of the samples that take each exit.
        per_exit: Metrics (K,) if all samples took that exit.
        eefp: Early-exit failure prediction: how well the exit score detects where stopping is right, the mean over all
            exits but the last; see `metrics.eefp`. None if it is undefined.
        eefp_visited: The same over the samples that reach each exit, with exits weighted by their number.
        eefp_per_exit: The same (K - 1,) at every exit but the last, over all samples.
    """

    cost: float
    unit: str
    samples: int
    exit_shares: tuple[float, ...]
    per_exit: tuple[Metrics, ...]
    eefp: float | None = None
    eefp_visited: float | None = None
    eefp_per_exit: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "eefp_per_exit", tuple(self.eefp_per_exit))  # a list if read from JSON

    def __repr__(self) -> str:
        shares = " ".join(f"{share:.1%}" for share in self.exit_shares)
        return f"Evaluation({super().__repr__()}, cost {self.cost:.4g} {self.unit}, exit shares {shares})"


@dataclass(frozen=True, eq=False)
class PerSampleMetrics:
    """Per-sample metrics of every exit, all arrays (K, n)."""

    confidence: Array
    rank: Array  # of the true label; 0 is correct
    log_true: Array
    brier: Array

    @classmethod
    def of(cls, preds: Predictions, labels: Array) -> "PerSampleMetrics":
        """Compute the metrics in one pass, from predictions (K, n, c) and labels (n,)."""
        log_true, rank, brier = preds.reduce_with_labels(labels)
        return cls(preds.largest, rank, log_true, brier)

    @cached_property
    def per_exit(self) -> tuple[Metrics, ...]:
        """Metrics of every exit, as if all samples took it."""
        return tuple(Metrics(**self.metrics(k)) for k in range(len(self.rank)))

    @property
    def correct(self) -> Array:
        """Mask (K, n) of correct predictions."""
        return np.asarray(self.rank == 0)

    def stopping_ranks(self, scores: Array) -> metrics.StoppingRanks:
        """Return the ranks that the EEFP of any policy on these scores (K, n) is computed from."""
        return metrics.StoppingRanks(scores.astype(np.float32), self.correct)  # rounding restores ties

    def evaluation(self, exits: Array, costs: Costs, ranks: metrics.StoppingRanks | None = None) -> Evaluation:
        """Evaluate a policy from the exit (n,) that each sample takes; with the ranks of its scores, also its EEFP."""
        shares = np.bincount(exits, minlength=len(costs)) / len(exits)
        return Evaluation(
            **self.metrics(exits),
            cost=float(shares @ np.asarray(costs.values)),
            unit=costs.unit,
            samples=len(exits),
            exit_shares=tuple(map(float, shares)),
            per_exit=self.per_exit,
            eefp=None if ranks is None else ranks.mean(),
            eefp_visited=None if ranks is None else ranks.mean(exits),
            eefp_per_exit=() if ranks is None else ranks.per_exit(),
        )

    def metrics(self, exits: Array | int) -> dict[str, float]:
        """Return the metrics at one exit, or at the exit (n,) that each sample takes."""
        taken = (exits, np.arange(self.confidence.shape[1])) if isinstance(exits, np.ndarray) else (exits, slice(None))
        confidence, rank = self.confidence[taken], self.rank[taken]
        correct = rank == 0
        return {
            "top1": float(correct.mean()),
            "top5": float((rank < TOP).mean()),
            "nlpd": -float(self.log_true[taken].mean(dtype=np.float64)),
            "ece": metrics.ece(confidence, correct),
            "brier": float(self.brier[taken].mean(dtype=np.float64)),
            **metrics.ranking_metrics(confidence, correct),
        }


def describe_eefp_disagreement(metrics_by_name: Mapping[str, tuple[float, float | None]]) -> str | None:
    """Return a sentence if ECE and EEFP prefer different names, from (ECE, EEFP) by name; None if they agree."""
    defined = {name: (ece, eefp) for name, (ece, eefp) in metrics_by_name.items() if eefp is not None}
    if len(defined) < 2:
        return None
    by_ece = min(defined, key=lambda name: defined[name][0])
    by_eefp = max(defined, key=lambda name: defined[name][1])
    (ece, eefp), (other_ece, other_eefp) = defined[by_ece], defined[by_eefp]
    if eefp == other_eefp or ece == other_ece:
        return None
    return (
        f"ECE and EEFP disagree: {by_ece} has the smallest ECE ({ece:.3f}, {by_eefp} {other_ece:.3f}), but the score "
        f"of {by_eefp} detects best where stopping is right (EEFP {other_eefp:.3f}, {by_ece} {eefp:.3f})."
    )


@dataclass(frozen=True)
class BudgetCurve(Result):
    """Evaluations of several policies, in their order; iterate over it for the points."""

    points: tuple[Evaluation, ...]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self.points)

    def _records(self) -> list[dict[str, Any]]:
        return [record for point in self.points for record in point._records()]

    def mean(self, low: float, high: float) -> dict[str, float]:
        """Every metric averaged over costs from `low` to `high`: linear between the points, constant beyond them.

        Args:
            low: Lower end of the budget range, in the unit of the costs.
            high: Upper end of the budget range.

        Returns:
            The means by the names of the metrics; NaN if a metric is NaN at a point. EEFP is left out if it is
            undefined at a point.

        Raises:
            InputError: If `low` and `high` are not two growing, finite numbers.
        """
        if not 0 <= low < high < inf:
            raise InputError(f"`budget_range` must be two growing numbers, but got {low:.6g} and {high:.6g}")
        costs = np.array([point.cost for point in self.points])
        names = [field.name for field in fields(Metrics)]
        names += [name for name in EEFP if all(getattr(point, name) is not None for point in self.points)]
        values = {name: np.array([getattr(point, name) for point in self.points]) for name in names}
        return {name: float(mean_over_costs(costs, values[name], low, high)) for name in names}


def mean_over_costs(costs: Array, values: Array, low: float, high: float) -> Array:
    """Return the mean (...) of curves over costs from `low` to `high`: linear between points, constant beyond them.

    Args:
        costs: Costs (..., J) of the points.
        values: Values (..., J) at the points.
        low: Lower end of the budget range.
        high: Upper end of the budget range.
    """
    order = np.argsort(costs, axis=-1, kind="stable")
    x, y = np.take_along_axis(costs, order, axis=-1), np.take_along_axis(values, order, axis=-1)
    inside = np.clip(x, low, high)
    width = np.diff(x, axis=-1)
    slope = np.diff(y, axis=-1) / np.where(width > 0, width, 1.0)
    # The mean of a linear piece is its value in the middle of the part that lies in the range.
    middle = (inside[..., 1:] + inside[..., :-1]) / 2
    parts = (y[..., :-1] + slope * (middle - x[..., :-1])) * np.diff(inside, axis=-1)
    ends = (inside[..., 0] - low) * y[..., 0] + (high - inside[..., -1]) * y[..., -1]
    return np.asarray((parts.sum(axis=-1) + ends) / (high - low))


def evaluate(
    preds: Any,
    *,
    labels: Any,
    policy: Policy,
    costs: Costs | Sequence[float],
    decide_with: Any = None,
) -> Evaluation:
    """Evaluate a policy: metrics at the exits that it chooses and at every exit, and the mean cost.

    Args:
        preds: Predictions, or probabilities (K, n, c).
        labels: True classes (n,).
        policy: Policy that chooses the exits.
        costs: Cumulative costs (K,) of the exits, in the policy's unit.
        decide_with: Other predictions (K, n, any classes) on the same samples that choose the exits, as in the paper's
            decision experiment; by default `preds`.

    Returns:
        The evaluation.

    Raises:
        InputError: If shapes, labels, costs or units do not match.

    Example:
        >>> import exitwise as ew
        >>> probs = [[[0.9, 0.1], [0.6, 0.4]], [[0.7, 0.3], [0.2, 0.8]]]  # 2 exits, 2 samples, 2 classes
        >>> policy = ew.Policy((0.8, float("-inf")))
        >>> result = ew.evaluate(probs, labels=[0, 1], policy=policy, costs=[1, 3])
        >>> result.top1, result.cost, result.exit_shares
        (1.0, 2.0, (0.5, 0.5))
    """
    return budget_curve(preds, labels=labels, policies=[policy], costs=costs, decide_with=decide_with).points[0]


def budget_curve(
    preds: Any,
    *,
    labels: Any,
    policies: Sequence[Policy],
    costs: Costs | Sequence[float],
    decide_with: Any = None,
) -> BudgetCurve:
    """Evaluate several policies, as `evaluate` does, but faster: shared results are computed once.

    Args:
        preds: Predictions, or probabilities (K, n, c).
        labels: True classes (n,).
        policies: Policies that choose the exits, such as those of `sweep`.
        costs: Cumulative costs (K,) of the exits, in the policies' unit.
        decide_with: Other predictions (K, n, any classes) on the same samples that choose the exits; by default
            `preds`.

    Returns:
        The evaluations, in the order of the policies.

    Raises:
        InputError: If shapes, labels, costs or units do not match, or there is no policy.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> vanilla = ew.calibrate(trace, "MSDNet (vanilla)")
        >>> policies = ew.sweep(vanilla.predict(trace.val), costs=trace.costs)
        >>> preds = vanilla.predict(trace.test)
        >>> curve = ew.budget_curve(preds, labels=trace.test.labels, policies=policies, costs=trace.costs)
        >>> len(curve), curve.points[0].cost < curve.points[-1].cost
        (39, True)
        >>> sorted(curve.mean(*trace.budget_range))
        ['adaptive_ece', 'aurc', 'auroc', 'brier', 'ece', 'eefp', 'eefp_visited', 'nlpd', 'top1', 'top5']
    """
    preds = Predictions.of(preds)
    decider = preds if decide_with is None else Predictions.of(decide_with)
    if decider.shape[:2] != preds.shape[:2]:
        raise InputError(
            f"`decide_with` must have the exits and samples of `preds`, {preds.shape[:2]}, but has {decider.shape[:2]}"
        )
    if not policies:
        raise InputError("`policies` must hold at least one policy")
    exits, samples, classes = preds.shape
    costs = Costs.of(costs)
    if len(costs) != exits:
        raise InputError(f"`costs` must have one value for each of {exits} exits, but has {len(costs)}")
    sample_metrics = PerSampleMetrics.of(preds, check_labels(labels, samples, classes))
    points = []
    ranks: dict[tuple[str, LearnedScore | None], tuple[Array, metrics.StoppingRanks]] = {}
    for policy in policies:
        if not isinstance(policy, Policy):
            raise InputError(f"`policy` must be a Policy, but got {type(policy).__name__}")
        if policy.unit != costs.unit:
            raise InputError(f"`policy` is in {policy.unit}, but `costs` are in {costs.unit}")
        key = (policy.score, policy.score_model)
        if key not in ranks:
            ranks[key] = (scores := policy.scores(decider)), sample_metrics.stopping_ranks(scores)
        scores, ranked = ranks[key]
        points.append(sample_metrics.evaluation(policy.exits_from_scores(scores), costs, ranked))
    return BudgetCurve(tuple(points))
