"""Budgeted batch classification: what a policy costs and what it gets, at one budget or along the whole curve."""

from collections.abc import Iterator, Sequence
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
from exitwise.policies.policy import Policy
from exitwise.policies.scores import exit_scores

TOP = 5


@dataclass(frozen=True)
class Metrics(Result):
    """How good one set of predictions is; accuracies are fractions."""

    top1: float
    top5: float
    nlpd: float
    ece: float
    brier: float
    adaptive_ece: float
    auroc: float  # of telling right from wrong by confidence; NaN where all are right or all wrong
    aurc: float

    def __repr__(self) -> str:
        return f"top-1 {self.top1:.2%}, top-5 {self.top5:.2%}, NLPD {self.nlpd:.4f}, ECE {self.ece:.4f}"


@dataclass(frozen=True)
class Evaluation(Metrics):
    """The same at the exits that a policy chooses, with the mean cost, and every exit's own metrics beside it.

    `exit_shares` (K,) are shares of the samples that left at each exit, `per_exit` (K,) the metrics if all left there.
    """

    cost: float
    unit: str
    samples: int
    exit_shares: tuple[float, ...]
    per_exit: tuple[Metrics, ...]

    def __repr__(self) -> str:
        shares = " ".join(f"{share:.1%}" for share in self.exit_shares)
        return f"Evaluation({super().__repr__()}, cost {self.cost:.4g} {self.unit}, exit shares {shares})"


@dataclass(frozen=True, eq=False)
class PerSampleMetrics:
    """What came out for every exit and sample, all arrays (K, n)."""

    confidence: Array
    rank: Array  # of the true label; 0 is right
    log_true: Array
    brier: Array

    @classmethod
    def of(cls, preds: Predictions, labels: Array) -> "PerSampleMetrics":
        """One walk through the exits."""
        rows = [
            (
                exit.probs.max(axis=1),
                metrics.rank(exit.log_probs, labels),
                metrics.log_true(exit.log_probs, labels),
                metrics.brier(exit.probs, labels),
            )
            for exit in preds.exits()
        ]
        return cls(*(np.stack(column) for column in zip(*rows, strict=True)))

    @cached_property
    def per_exit(self) -> tuple[Metrics, ...]:
        """Of every exit, as if all samples left there."""
        return tuple(Metrics(**self.metrics(k)) for k in range(len(self.rank)))

    def evaluation(self, exits: Array, costs: Costs) -> Evaluation:
        """At each sample's own exit (n,)."""
        shares = np.bincount(exits, minlength=len(costs)) / len(exits)
        return Evaluation(
            **self.metrics(exits),
            cost=float(shares @ np.asarray(costs.values)),
            unit=costs.unit,
            samples=len(exits),
            exit_shares=tuple(map(float, shares)),
            per_exit=self.per_exit,
        )

    def metrics(self, exits: Array | int) -> dict[str, float]:
        """At one exit, or at each sample's own (n,)."""
        at = (exits, np.arange(self.confidence.shape[1])) if isinstance(exits, np.ndarray) else (exits, slice(None))
        confidence, rank = self.confidence[at], self.rank[at]
        correct = rank == 0
        return {
            "top1": float(correct.mean()),
            "top5": float((rank < TOP).mean()),
            "nlpd": -float(self.log_true[at].mean(dtype=np.float64)),
            "ece": metrics.ece(confidence, correct),
            "brier": float(self.brier[at].mean(dtype=np.float64)),
            **metrics.ranking_metrics(confidence, correct),
        }


@dataclass(frozen=True)
class BudgetCurve(Result):
    """Evaluations of a family of policies, in their order."""

    points: tuple[Evaluation, ...]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self.points)

    def _records(self) -> list[dict[str, Any]]:
        return [record for point in self.points for record in point._records()]

    def mean(self, low: float, high: float) -> dict[str, float]:
        """Every metric averaged over costs from `low` to `high`: linear between the points, constant beyond them."""
        if not 0 <= low < high < inf:
            raise InputError(f"`budget_range` must be two growing numbers, but got {low:.6g} and {high:.6g}")
        points = sorted(self.points, key=lambda point: point.cost)
        cost = np.array([point.cost for point in points])
        # Points inside keep their own values: where two cost the same the curve jumps, which `interp` would slope.
        inside = (cost >= low) & (cost <= high)
        knots = np.concatenate([[low], cost[inside], [high]])

        def mean(values: Array) -> float:
            ends = np.interp([low, high], cost, values)
            return float(np.trapezoid(np.concatenate([ends[:1], values[inside], ends[1:]]), knots) / (high - low))

        return {
            field.name: mean(np.array([getattr(point, field.name) for point in points])) for field in fields(Metrics)
        }


def evaluate(
    preds: Any,
    *,
    labels: Any,
    policy: Policy,
    costs: Costs | Sequence[float],
    decide_with: Any = None,
) -> Evaluation:
    """Metrics at the exits that `policy` chooses, at every exit, and the mean cost.

    `preds` (K, n, c), `labels` (n,), `costs` (K,) in the policy's unit. With `decide_with` (K, n, any classes), other
    predictions on the same samples choose the exits: the paper's decision experiment.
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
    """`evaluate` for many policies, in their order, with what they share computed once.

    `preds` (K, n, c), `decide_with` (K, n, any classes), `labels` (n,), `costs` (K,) in the policies' unit.
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
    outcomes = PerSampleMetrics.of(preds, check_labels(labels, samples, classes))
    points = []
    for policy in policies:
        if not isinstance(policy, Policy):
            raise InputError(f"`policy` must be a Policy, but got {type(policy).__name__}")
        if policy.unit != costs.unit:
            raise InputError(f"`policy` is in {policy.unit}, but `costs` are in {costs.unit}")
        points.append(outcomes.evaluation(policy.exits_by(exit_scores(decider, policy.score)), costs))
    return BudgetCurve(tuple(points))
