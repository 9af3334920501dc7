"""When to stop: thresholds on a score, and the paper's sweep of them. NumPy alone, like everything downstream."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from exitwise.core.checks import is_number
from exitwise.core.costs import UNITS, Costs
from exitwise.core.errors import InputError
from exitwise.core.files import read_json, write_json
from exitwise.core.predictions import Array, ExitPrediction
from exitwise.core.results import Result
from exitwise.core.ties import break_ties
from exitwise.policies.certificate import Guarantee
from exitwise.policies.scores import SCORES, ScoreState, check_score, exit_scores

VERSION = 1
OBJECTIVES = ("accuracy", "nlpd")


@dataclass(frozen=True)
class PolicyFit(Result):
    """How a policy came about, and how it may do on samples that it was not fitted on.

    `value` is its accuracy or NLPD on the samples that it was fitted on, `held_out` that of its strategy on samples
    held out from fitting (cross-fitted; None where there are too few). Both by the labels, or as the net itself expects
    where it did without. `portfolio` is `held_out` of every strategy that was tried: as these numbers decide which one
    is taken, that of the winner is a little too good where they are close.
    """

    chosen: str
    samples: int
    objective: str
    labelled: bool
    value: float
    held_out: float | None
    portfolio: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("value", "held_out"):
            if not is_number(value := getattr(self, name)) and (name == "value" or value is not None):
                raise InputError(f"`{name}` must be a number, but got {value!r}")
        if not isinstance(self.portfolio, Mapping) or self.objective not in OBJECTIVES:
            raise InputError(f"not a fit: {self.objective!r}, {self.portfolio!r}")

    @property
    def gap(self) -> float | None:
        """By how much it does worse on samples held out: too good to be true where it is large."""
        if self.held_out is None:
            return None
        return self.value - self.held_out if self.objective == "accuracy" else self.held_out - self.value


@dataclass(frozen=True)
class Policy(Result):
    """Thresholds (K,) on a score: a sample leaves at the first exit whose score reaches the threshold.

    A threshold of inf lets nobody leave; the last exit's is -inf, it takes everyone. `cost` is the mean cost on the
    data that the thresholds were made on, `costs` (K,) what leaving at each exit costs, `budget` what was asked for, if
    anything was. `fit` says how it was fitted, `guarantee` what was certified.
    """

    thresholds: tuple[float, ...]
    score: str = "confidence"
    unit: str = "MACs"
    cost: float | None = None
    budget: float | None = None
    strategy: str = "geometric"
    q: float | None = None
    costs: tuple[float, ...] | None = None
    fit: PolicyFit | None = None
    guarantee: Guarantee | None = None

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
        check_score(self.score)
        if self.unit not in UNITS:
            raise InputError(f"`unit` must be one of {', '.join(UNITS)}, but got {self.unit!r}")
        for name in ("cost", "budget", "q"):
            if not isinstance(value := getattr(self, name), int | float | None):
                raise InputError(f"`{name}` must be a number or None, but got {value!r}")
        if self.costs is not None:
            object.__setattr__(self, "costs", check_costs(Costs(self.costs, self.unit), len(thresholds)).values)

    def stops(self, exit: int, said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
        """(n,) whether samples that have come as far as `exit` stop there, from what it says of them and the memory.

        The exit says probs (n, c). The memory (n, m) is what the score has to know of earlier exits, None at the first
        or if that is nothing: it goes on to the next.
        """
        found, memory = SCORES[self.score].compute(said, memory)
        score = np.asarray(found, dtype=np.float32)
        with np.errstate(over="ignore"):
            threshold = np.float32(self.thresholds[exit])
        leaves = score > threshold
        tied = np.flatnonzero(score == threshold)
        if len(tied):  # only these need their hash
            leaves[tied] = break_ties(score[tied], said.probs[tied]) >= self.thresholds[exit]
        return leaves, memory

    def exits(self, preds: Any) -> Array:
        """(n,) the exit, 0 to K - 1, that each sample takes, by predictions (K, n, c)."""
        return self.exits_by(exit_scores(preds, self.score))

    def exits_by(self, scores: Array) -> Array:
        """(n,) the same from the scores (K, n) that `exitwise.scores.scores` gives."""
        if len(scores) != len(self.thresholds):
            raise InputError(f"`preds` must have {len(self.thresholds)} exits as the policy has, but has {len(scores)}")
        return np.asarray((scores >= np.asarray(self.thresholds)[:, None]).argmax(axis=0))

    def shifted(self, by: float) -> "Policy":
        """A policy of the same family, more careful for `by` > 0: doubt counts exp(by) times as much.

        The cost of any samples grows with `by`. Thresholds that let nobody go, or everyone, stay as they are.
        """
        if not by:
            return self
        score = SCORES[self.score]
        thresholds = [
            score.shifted(value, by, len(self.thresholds)) if isfinite(value) else value for value in self.thresholds
        ]
        return self.with_thresholds(thresholds)

    def with_thresholds(self, thresholds: Sequence[float]) -> "Policy":
        """Others (K,) in their place, without what is known of these: `cost`, `q`, `fit`, `guarantee`."""
        return replace(self, thresholds=tuple(thresholds), cost=None, q=None, fit=None, guarantee=None)

    def with_cost(self, scores: Array, costs: Costs) -> "Policy":
        """The policy with what it costs on samples with these scores (K, n)."""
        shares = np.bincount(self.exits_by(scores), minlength=len(scores)) / scores.shape[1]
        return replace(self, cost=float(shares @ np.asarray(costs.values)), costs=costs.values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, thresholds as `written`."""
        parts = {name: asdict(part) if (part := getattr(self, name)) else None for name in ("fit", "guarantee")}
        costs = list(self.costs) if self.costs else None
        return {**self.__dict__, "thresholds": thresholds_to_json(self.thresholds), "costs": costs, **parts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        """What `to_dict` gave, checked: it may come from a file."""
        try:
            thresholds = tuple(float(value) for value in data["thresholds"])
            parts = {
                name: kind(**data[name]) if data.get(name) is not None else None
                for name, kind in (("fit", PolicyFit), ("guarantee", Guarantee))
            }
            return cls(**{**data, "thresholds": thresholds, **parts})
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(f"not a usable policy: {error}") from None

    def _records(self) -> list[dict[str, Any]]:
        return [{"exit": k, "threshold": threshold} for k, threshold in enumerate(self.thresholds)]

    def save(self, path: str | Path) -> None:
        """A JSON file."""
        write_json(Path(path), {"format": "exitwise.policy", "version": VERSION, **self.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "Policy":
        """Read and check what `save` wrote."""
        data = read_json(Path(path))
        if data.pop("format", None) != "exitwise.policy" or data.pop("version", None) != VERSION:
            raise InputError(f"{path} must hold a policy of version {VERSION}")
        try:
            return cls.from_dict(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def thresholds_to_json(thresholds: Sequence[float]) -> list[float | str]:
    """Thresholds for a file; infinite ones as the words "inf" and "-inf", which JSON has no numbers for."""
    return [value if isfinite(value) else str(value) for value in thresholds]


def sweep(preds: Any, *, costs: Costs | Sequence[float], score: str = "confidence") -> list[Policy]:
    """The public rule's 39 policies, q = 1/20 .. 39/20, fitted on validation predictions (K, n, c); `costs` (K,).

    The threshold of an exit is the score of the floor(n share)-th most certain sample among those not yet gone; where
    that number is 0 or more than remain, nobody leaves there.
    """
    table = exit_scores(preds, score)
    costs_ = check_costs(costs, len(table))
    exact = table.astype(np.float32)  # where ties are ties
    policies = []
    for p in range(1, 40):
        # q = p / 20 in whole numbers, so that a share of exactly 30 samples is not 29 for rounding
        weights = [p**k * 20 ** (len(table) - k) for k in range(1, len(table) + 1)]
        counts = [table.shape[1] * weight // sum(weights) for weight in weights]
        policy = Policy(_thresholds(exact, counts), score, costs_.unit, strategy="public", q=p / 20)
        policies.append(policy.with_cost(table, costs_))
    return policies


def _thresholds(scores: Array, counts: Sequence[int]) -> tuple[float, ...]:
    """Thresholds on scores (K, n) that let `counts` (K,) samples leave at each exit; ties at a threshold all leave."""
    here = np.arange(scores.shape[1])
    thresholds = []
    for row, count in zip(scores[:-1], counts, strict=False):
        left = row[here]
        none = count == 0 or count > len(here)
        thresholds.append(inf if none else float(np.partition(left, len(left) - count)[len(left) - count]))
        here = here[left < thresholds[-1]]
    return (*thresholds, -inf)


def check_costs(costs: Costs | Sequence[float] | None, exits: int) -> Costs:
    """Costs, one for each exit."""
    if costs is None:
        raise InputError("`costs` are needed: what leaving at each exit costs, such as `trace.costs`")
    found = Costs.of(costs)
    if len(found) != exits:
        raise InputError(f"`costs` must have one value for each of {exits} exits, but has {len(found)}")
    return found
