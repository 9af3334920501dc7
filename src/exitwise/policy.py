"""When to stop: scores, thresholds, and the thresholds that meet a budget. NumPy alone, like everything downstream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from exitwise.costs import UNITS, Costs
from exitwise.errors import InputError
from exitwise.files import read_json, write_json
from exitwise.predictions import Array, ExitPrediction, Predictions
from exitwise.results import Result

VERSION = 1


def confidence(exit: ExitPrediction) -> Array:
    """(n,) the largest probability."""
    return np.asarray(exit.probs.max(axis=1))


def negative_entropy(exit: ExitPrediction) -> Array:
    """(n,) sum p log p, which grows with certainty as every score does."""
    return np.asarray(np.einsum("nc,nc->n", exit.probs, exit.log_probs))


def negative_variance(exit: ExitPrediction) -> Array:
    """(n,) minus the variance over draws of the predicted class's probability."""
    if exit.variance is None:
        raise InputError("`score` 'variance' needs draws: choose a method with Laplace")
    return -exit.variance


# The one place that says how certain an exit is of a sample: larger is more certain.
SCORES: Mapping[str, Callable[[ExitPrediction], Array]] = {
    "confidence": confidence,
    "entropy": negative_entropy,
    "variance": negative_variance,
}


def scores(preds: Any, score: str = "confidence") -> Array:
    """(K, n) how certain every exit is of every sample; larger is more certain for each of the scores."""
    if score not in SCORES:
        raise InputError(f"`score` must be one of {', '.join(SCORES)}, but got {score!r}")
    return Predictions.of(preds).reduce(score, SCORES[score], variance=score == "variance")


@dataclass(frozen=True)
class Policy(Result):
    """Thresholds (K,) on a score: a sample leaves at the first exit whose score reaches the threshold.

    A threshold of inf lets nobody leave; the last exit's is -inf, it takes everyone. `cost` is the mean cost on the
    data that the thresholds were made on, `costs` (K,) what leaving at each exit costs, `budget` what was asked for, if
    anything was.
    """

    thresholds: tuple[float, ...]
    score: str = "confidence"
    unit: str = "MACs"
    cost: float | None = None
    budget: float | None = None
    strategy: str = "geometric"
    q: float | None = None
    costs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        try:
            thresholds = tuple(float(value) for value in self.thresholds)
        except (OverflowError, TypeError, ValueError):
            raise InputError(
                f"`thresholds` must be numbers, one per exit, the last -inf, but got {self.thresholds!r}"
            ) from None
        object.__setattr__(self, "thresholds", thresholds)
        if not thresholds or any(value != value for value in thresholds) or thresholds[-1] != -inf:
            raise InputError(f"`thresholds` must be numbers, one per exit, the last -inf, but got {list(thresholds)}")
        if self.score not in SCORES:
            raise InputError(f"`score` must be one of {', '.join(SCORES)}, but got {self.score!r}")
        if self.unit not in UNITS:
            raise InputError(f"`unit` must be one of {', '.join(UNITS)}, but got {self.unit!r}")
        for name in ("cost", "budget", "q"):
            if not isinstance(value := getattr(self, name), int | float | None):
                raise InputError(f"`{name}` must be a number or None, but got {value!r}")
        if self.costs is not None:
            object.__setattr__(self, "costs", _costs(Costs(self.costs, self.unit), len(thresholds)).values)

    def leaves(self, exit: int, score: Array) -> Array:
        """(n,) whether samples that have come as far as `exit` stop there, from their scores (n,)."""
        return np.asarray(score, dtype=np.float64) >= self.thresholds[exit]

    def stops(self, exit: int, said: ExitPrediction) -> Array:
        """(n,) the same from what the exit says: the rule that simulation and runtime share."""
        return self.leaves(exit, SCORES[self.score](said))

    def exits(self, preds: Any) -> Array:
        """(n,) the exit that each sample takes."""
        return self.exits_by(scores(preds, self.score))

    def exits_by(self, scores: Array) -> Array:
        """(n,) the same from scores (K, n)."""
        if len(scores) != len(self.thresholds):
            raise InputError(f"`preds` must have {len(self.thresholds)} exits as the policy has, but has {len(scores)}")
        exits = np.full(scores.shape[1], len(scores) - 1)
        here = np.arange(scores.shape[1])
        for k in range(len(scores) - 1):
            gone = self.leaves(k, scores[k, here])
            exits[here[gone]] = k
            here = here[~gone]
        return exits

    def to_dict(self) -> dict[str, Any]:
        """Plain data; infinite thresholds as the words "inf" and "-inf", which JSON has no numbers for."""
        thresholds = [value if isfinite(value) else str(value) for value in self.thresholds]
        return {**self.__dict__, "thresholds": thresholds, "costs": list(self.costs) if self.costs else None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        try:
            return cls(**{**data, "thresholds": tuple(float(value) for value in data["thresholds"])})
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(f"not a usable policy: {error}") from None

    def _records(self) -> list[dict[str, Any]]:
        return [{"exit": k, "threshold": threshold} for k, threshold in enumerate(self.thresholds)]

    def save(self, path: str | Path) -> None:
        write_json(Path(path), {"format": "exitwise.policy", "version": VERSION, **self.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "Policy":
        data = read_json(Path(path))
        if data.pop("format", None) != "exitwise.policy" or data.pop("version", None) != VERSION:
            raise InputError(f"{path} must hold a policy of version {VERSION}")
        try:
            return cls.from_dict(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def geometric_shares(q: float, exits: int) -> Array:
    """(K,) the paper's shares of samples per exit, q^k / sum_j q^j for k = 1..K."""
    # Divided by the largest power, so that none overflows.
    powers = np.exp(np.log(q) * np.arange(exits) - max(0.0, np.log(q) * (exits - 1)))
    return np.asarray(powers / powers.sum())


def sweep(preds: Any, *, costs: Costs | Sequence[float], score: str = "confidence") -> list[Policy]:
    """The public rule's 39 policies, q = 1/20 .. 39/20, fitted on validation predictions.

    The threshold of an exit is the score of the floor(n share)-th most certain sample among those not yet gone; where
    that number is 0 or more than remain, nobody leaves there.
    """
    table = scores(preds, score)
    costs_ = _costs(costs, len(table))
    policies = []
    for p in range(1, 40):
        # q = p / 20 in whole numbers, so that a share of exactly 30 samples is not 29 for rounding
        weights = [p**k * 20 ** (len(table) - k) for k in range(1, len(table) + 1)]
        counts = np.array([table.shape[1] * weight // sum(weights) for weight in weights])
        policy = Policy(thresholds_for(table, counts, midway=False), score, costs_.unit, q=p / 20)
        policies.append(_with_cost(policy, table, costs_))
    return policies


def fit_policy(
    preds: Any,
    *,
    costs: Costs | Sequence[float],
    budget: float,
    labels: Any = None,
    strategy: str = "geometric",
    score: str = "confidence",
) -> Policy:
    """Thresholds whose mean cost on these predictions is the budget, or the closest below it that the family reaches.

    Without ties that is within one sample's way from the first to the last exit. Tied samples leave together.
    `geometric` is the paper's family of shares with q bisected; thresholds lie midway between neighbouring scores.
    It needs no `labels`. The budget is in the unit of the costs, for one sample.
    """
    del labels  # strategies that look at the answers will need them
    check_request(costs, budget, strategy, score)
    table = scores(preds, score)
    costs_ = _costs(costs, len(table))

    def policy(log_q: float) -> Policy:
        shares = geometric_shares(float(np.exp(log_q)), len(table))
        counts = np.floor(table.shape[1] * shares + 1e-9)  # a share of 1/4 means a quarter, whatever it rounds to
        thresholds = thresholds_for(table, counts, midway=True)
        made = Policy(thresholds, score, costs_.unit, budget=float(budget), q=float(np.exp(log_q)))
        return _with_cost(made, table, costs_)

    best = policy(-50.0)  # everyone leaves at the first exit
    below, above = -50.0, 50.0
    if (dearest := policy(above)).cost <= budget:  # type: ignore[operator]
        return dearest
    for _ in range(60):
        middle = (below + above) / 2
        made = policy(middle)
        if made.cost <= budget:  # type: ignore[operator]
            below = middle
            best = max(best, made, key=lambda candidate: candidate.cost or 0.0)
        else:
            above = middle
    return best


def check_request(costs: Costs | Sequence[float], budget: float, strategy: str, score: str) -> None:
    """Refuse what `fit_policy` cannot fulfil, before anything is computed for it."""
    if strategy != "geometric":
        raise InputError(f"`strategy` must be 'geometric', but got {strategy!r}")
    if score not in SCORES:
        raise InputError(f"`score` must be one of {', '.join(SCORES)}, but got {score!r}")
    found = Costs.of(costs)
    low, high = found.values[0], found.values[-1]
    number = isinstance(budget, int | float | np.integer | np.floating) and not isinstance(budget, bool)
    if not number or not low <= budget <= high:
        raise InputError(
            f"`budget` must lie between the cost of the first exit and that of the last, "
            f"{low:.10g} to {high:.10g} {found.unit}, but got {budget}"
        )


def thresholds_for(scores: Array, counts: Array, midway: bool) -> tuple[float, ...]:
    """Thresholds on scores (K, n) that let `counts` (K,) samples leave at each exit; ties at a threshold all leave.

    `midway` puts them between neighbouring scores instead of on one.
    """
    here = np.arange(scores.shape[1])
    thresholds = []
    for k in range(len(scores) - 1):
        count = int(counts[k])
        if count == 0 or count > len(here):
            thresholds.append(inf)
            continue
        left = scores[k, here].astype(np.float64)
        at = float(np.partition(left, len(left) - count)[len(left) - count])
        if midway:
            lower = left[left < at]
            below = float(lower.max()) if len(lower) else -inf
            middle = (at + below) / 2
            at = middle if middle > below or below == -inf else at  # nothing lies between neighbouring numbers
        thresholds.append(at)
        here = here[left < at]
    return (*thresholds, -inf)


def _with_cost(policy: Policy, scores: Array, costs: Costs) -> Policy:
    shares = np.bincount(policy.exits_by(scores), minlength=len(scores)) / scores.shape[1]
    return replace(policy, cost=float(shares @ np.asarray(costs.values)), costs=costs.values)


def _costs(costs: Costs | Sequence[float], exits: int) -> Costs:
    found = Costs.of(costs)
    if len(found) != exits:
        raise InputError(f"`costs` must have one value for each of {exits} exits, but has {len(found)}")
    return found
