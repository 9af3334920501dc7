"""Measures of prediction sets and of abstention on labeled samples. NumPy only."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from exitwise.core.predictions import Array, Predictions, check_labels, to_array
from exitwise.core.results import Result, to_jsonable
from exitwise.policies.abstention import Abstention
from exitwise.policies.learned_score import summaries_of
from exitwise.policies.policy import Policy
from exitwise.policies.prediction_sets import PredictionSets, check_fitted_for, probs_at_exits

_MAX_VALUES = 4_000_000  # samples times classes whose sets are in memory at once


@dataclass(frozen=True)
class SetGroup:
    """Coverage and mean size of the sets of a group of samples; both are None for an empty group."""

    samples: int
    coverage: float | None
    mean_size: float | None

    @classmethod
    def of(cls, covered: Array, sizes: Array) -> "SetGroup":
        """Measure a group with covered (n,) and set sizes (n,)."""
        if not len(sizes):
            return cls(0, None, None)
        return cls(len(sizes), float(covered.mean()), float(sizes.mean()))


@dataclass(frozen=True)
class SetEvaluation(Result):
    """Coverage and size of prediction sets on labeled samples.

    Args:
        samples: Number of samples.
        coverage: Share of the samples whose set holds the true class.
        mean_size: Mean number of classes in a set.
        single: Share of sets with exactly one class.
        empty: Share of empty sets.
        by_exit: Coverage and size for the samples of each exit (K,).
        by_class: Coverage and size for the samples of each true class (c,).

    Example:
        >>> import exitwise as ew
        >>> from exitwise.evaluation.answers import SetGroup
        >>> group = SetGroup(samples=4, coverage=0.75, mean_size=1.5)
        >>> result = ew.SetEvaluation(4, 0.75, 1.5, single=0.5, empty=0.0, by_exit=(group,), by_class=())
        >>> result.to_dict()["by_exit"]
        [{'samples': 4, 'coverage': 0.75, 'mean_size': 1.5}]
    """

    samples: int
    coverage: float
    mean_size: float
    single: float
    empty: float
    by_exit: tuple[SetGroup, ...]
    by_class: tuple[SetGroup, ...]

    def _records(self) -> list[dict[str, Any]]:
        groups = [("exit", self.by_exit), ("class", self.by_class)]
        return [{"group": name, "index": k, **asdict(part)} for name, parts in groups for k, part in enumerate(parts)]


def evaluate_sets(sets: PredictionSets, preds: Any, labels: Any, *, policy: Policy) -> SetEvaluation:
    """Measure prediction sets on test samples.

    Args:
        sets: Sets from `fit_sets`.
        preds: Predictions, or probabilities (K, n, c).
        labels: True classes (n,).
        policy: The policy that the sets were fitted for.

    Returns:
        Coverage and size: overall, by exit and by class.

    Raises:
        InputError: If the sets are of another policy, or arguments do not fit.

    Example:
        >>> import exitwise as ew
        >>> probs = [[[0.9, 0.1]] * 9 + [[0.4, 0.6]]]  # 1 exit, 10 samples, 2 classes
        >>> policy = ew.Policy((float("-inf"),))
        >>> sets = ew.fit_sets(probs, [0] * 10, policy=policy, coverage=0.9)
        >>> ew.evaluate_sets(sets, probs, [0] * 10, policy=policy).coverage
        1.0
    """
    preds = Predictions.of(preds)
    labels = check_labels(to_array("labels", labels), *preds.shape[1:])
    check_fitted_for(sets, policy, preds.shape[2])
    exits = policy.exits(preds)
    covered, sizes = covered_and_sizes(sets, preds, exits, labels)
    return SetEvaluation(
        samples=len(labels),
        coverage=float(covered.mean()),
        mean_size=float(sizes.mean()),
        single=float((sizes == 1).mean()),
        empty=float((sizes == 0).mean()),
        by_exit=tuple(SetGroup.of(covered[exits == k], sizes[exits == k]) for k in range(preds.shape[0])),
        by_class=tuple(SetGroup.of(covered[labels == c], sizes[labels == c]) for c in range(preds.shape[2])),
    )


def covered_and_sizes(sets: PredictionSets, preds: Predictions, exits: Array, labels: Array) -> tuple[Array, Array]:
    """Return whether the set of each sample holds its label, and how many classes it holds, (n,) each.

    Args:
        sets: The sets.
        preds: Predictions (K, n, c).
        exits: Exit (n,) that each sample takes.
        labels: True classes (n,).
    """
    probs = probs_at_exits(preds, exits)
    covered, sizes = np.empty(len(labels), dtype=bool), np.empty(len(labels), dtype=np.int64)
    rows = max(1, _MAX_VALUES // probs.shape[1])
    for start in range(0, len(labels), rows):
        part = slice(start, start + rows)
        masks = sets.masks(probs[part], exits[part])
        covered[part], sizes[part] = masks[np.arange(len(masks)), labels[part]], masks.sum(axis=1)
    return covered, sizes


@dataclass(frozen=True)
class RiskCurve(Result):
    """Error rate among answered samples as the share of answered samples grows, the most confident first.

    Args:
        answered: Shares of answered samples (p,), ascending, the last 1.
        error: Error rate among them (p,).
        aurc: Area under the curve: the mean error rate over all n shares.

    Example:
        >>> import exitwise as ew
        >>> ew.RiskCurve(answered=(0.5, 1.0), error=(0.0, 0.5), aurc=0.25).to_pandas()["error"].tolist()
        [0.0, 0.5]
    """

    answered: tuple[float, ...]
    error: tuple[float, ...]
    aurc: float

    def _records(self) -> list[dict[str, Any]]:
        return [{"answered": a, "error": e} for a, e in zip(self.answered, self.error, strict=True)]


@dataclass(frozen=True)
class AbstentionEvaluation(Result):
    """Answered share and error rates on labeled samples, and the risk-coverage curve.

    Args:
        samples: Number of samples.
        answered: Share of answered samples.
        error: Error rate among the answered; None if there are none.
        error_all: Error rate if all samples were answered.
        cost: Mean cost per sample, in the policy's unit; None if the policy has no costs.
        answered_by_exit: Share of answered samples among those of each exit (K,), None for an exit without samples.
        curve: Risk-coverage curve with its area, AURC.

    Example:
        >>> import exitwise as ew
        >>> curve = ew.RiskCurve(answered=(0.5, 1.0), error=(0.0, 0.5), aurc=0.25)
        >>> rates = {"answered": 0.5, "error": 0.0, "error_all": 0.5}
        >>> result = ew.AbstentionEvaluation(4, **rates, cost=None, answered_by_exit=(0.5,), curve=curve)
        >>> result.to_dict()["curve"]["aurc"]
        0.25
    """

    samples: int
    answered: float
    error: float | None
    error_all: float
    cost: float | None
    answered_by_exit: tuple[float | None, ...]
    curve: RiskCurve

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        data: dict[str, Any] = to_jsonable(asdict(self))
        return data


def risk_curve(confidence: Any, wrong: Any, points: int = 101) -> RiskCurve:
    """Return the risk-coverage curve of samples with a confidence (n,) and a flag whether they are wrong (n,).

    Samples of equal confidence count with their mean error, so that their order does not matter.

    Args:
        confidence: Confidence (n,).
        wrong: Whether each answer is wrong (n,).
        points: Largest number of points to keep; the area is that of all n.

    Example:
        >>> from exitwise.evaluation.answers import risk_curve
        >>> risk_curve([0.9, 0.8, 0.7, 0.6], [False, False, True, False]).error[-1]
        0.25
    """
    confidence, wrong = to_array("confidence", confidence), to_array("wrong", wrong).astype(np.float64)
    _, groups, counts = np.unique(-confidence, return_inverse=True, return_counts=True)
    means = np.bincount(groups, weights=wrong) / counts
    errors = np.cumsum(np.repeat(means, counts)) / np.arange(1, len(wrong) + 1)
    kept = np.unique(np.linspace(0, len(wrong) - 1, min(points, len(wrong))).astype(int))
    answered = (kept + 1) / len(wrong)
    return RiskCurve(tuple(answered.tolist()), tuple(errors[kept].tolist()), float(errors.mean()))


def evaluate_abstention(
    abstention: Abstention | None, preds: Any, labels: Any, *, policy: Policy
) -> AbstentionEvaluation:
    """Measure an abstention on test samples.

    Args:
        abstention: Abstention from `fit_abstention`; None to answer all, for the curve alone.
        preds: Predictions, or probabilities (K, n, c).
        labels: True classes (n,).
        policy: The policy that the abstention was fitted for.

    Returns:
        Cost, answered share and error rate, and the risk-coverage curve.

    Raises:
        InputError: If the abstention is of another policy, or arguments do not fit.

    Example:
        >>> import exitwise as ew
        >>> probs = [[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]]]  # 1 exit, 4 samples, 2 classes
        >>> policy = ew.Policy((float("-inf"),))
        >>> abstention = ew.fit_abstention(probs, policy=policy, share=0.25)
        >>> result = ew.evaluate_abstention(abstention, probs, [0, 1, 1, 1], policy=policy)
        >>> result.answered, result.error, result.error_all
        (0.75, 0.0, 0.25)
    """
    preds = Predictions.of(preds)
    labels = check_labels(to_array("labels", labels), *preds.shape[1:])
    exits = policy.exits(preds)
    top = summaries_of(preds)[exits, np.arange(len(labels))]
    confidence, wrong = top[:, 0], top[:, 3] != labels
    abstained = np.zeros(len(labels), dtype=bool)
    if abstention is not None:
        check_fitted_for(abstention, policy)
        abstained = abstention.mask_at_exits(preds, exits)
    answered = ~abstained
    costs = None if policy.costs is None else np.asarray(policy.costs)
    return AbstentionEvaluation(
        samples=len(labels),
        answered=float(answered.mean()),
        error=float(wrong[answered].mean()) if answered.any() else None,
        error_all=float(wrong.mean()),
        cost=None if costs is None else float(costs[exits].mean()),
        answered_by_exit=tuple(
            float(answered[exits == k].mean()) if (exits == k).any() else None for k in range(preds.shape[0])
        ),
        curve=risk_curve(confidence, wrong),
    )
