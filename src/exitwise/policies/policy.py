"""Policies: thresholds on a score that decide where samples exit, and the paper's sweep of them. NumPy only."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from exitwise.core.checks import check_choice, check_number, is_finite, is_number
from exitwise.core.costs import UNITS, Costs
from exitwise.core.errors import InputError, first_line, shorten
from exitwise.core.files import read_json, write_json
from exitwise.core.predictions import Array, ExitPrediction, Predictions
from exitwise.core.results import Result
from exitwise.core.ties import break_ties
from exitwise.policies.certificate import RISKS, Guarantee
from exitwise.policies.cutoffs import first_true
from exitwise.policies.learned_score import LearnedScore, ScoreState
from exitwise.policies.score_choice import fit_score
from exitwise.policies.scores import LEARNED, LEARNED_SCALE, SCORES, check_score, exit_scores

VERSION = 1
OBJECTIVES = ("accuracy", "nlpd")
_MAX_SHIFT = 50.0  # keeps exp(shift) finite; no score has thresholds that a larger shift would change


@dataclass(frozen=True)
class PolicyFit(Result):
    """Origin of a policy, and its estimated performance on samples that it was not fitted on.

    Args:
        chosen: Strategy that was selected.
        samples: Number of samples that it was fitted on.
        objective: "accuracy" or "nlpd".
        labelled: Whether `value`, `held_out` and `portfolio` were computed with labels; also `used_labels`. If not,
            they are the values that the net expects from its own probabilities.
        value: Accuracy or NLPD on the samples that it was fitted on.
        held_out: Accuracy or NLPD of its strategy on out-of-fold samples (cross-fitting); None if there are too few.
        portfolio: `held_out` of every strategy that was tried. These numbers select the strategy, so that of the winner
            is slightly optimistic if they are close.
        max_loss: Largest loss that was allowed, if the policy is the cheapest one for a loss; see `fit_policy`.
        loss: Its loss on these samples: out of fold or in sample, whichever is larger.
        risk: Kind of the loss, "accuracy" or "disagreement".
        score_choice: What `score="auto"` compared: for each score its cross-fitted accuracy (or negative NLPD) as a
            mean over nine budgets (`value`), the gain over confidence with its standard error, and its EEFP. None
            if the score was given.
    """

    chosen: str
    samples: int
    objective: str
    labelled: bool
    value: float
    held_out: float | None
    portfolio: Mapping[str, float] = field(default_factory=dict)
    max_loss: float | None = None
    loss: float | None = None
    risk: str | None = None
    score_choice: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.score_choice, Mapping | None):
            raise InputError(f"`score_choice` must be a mapping or None, but got {shorten(self.score_choice)}")
        for name in ("value", "held_out"):
            if not is_number(value := getattr(self, name)) and (name == "value" or value is not None):
                raise InputError(f"`{name}` must be a number, but got {value!r}")
        for name in ("max_loss", "loss"):
            if (value := getattr(self, name)) is not None and not is_number(value):
                raise InputError(f"`{name}` must be a number or None, but got {value!r}")
        if self.risk is not None:
            check_choice("risk", self.risk, RISKS)
        check_choice("objective", self.objective, OBJECTIVES)
        if not isinstance(self.portfolio, Mapping):
            raise InputError(f"`portfolio` must map strategies to numbers, but got {self.portfolio!r}")

    @property
    def used_labels(self) -> bool:
        """Alias of `labelled`."""
        return self.labelled

    @property
    def gap(self) -> float | None:
        """Drop of the objective on out-of-fold samples; a large gap is a sign of overfitting."""
        if self.held_out is None:
            return None
        return self.value - self.held_out if self.objective == "accuracy" else self.held_out - self.value


@dataclass(frozen=True)
class Policy(Result):
    """Thresholds (K,) on a score: a sample exits at the first exit whose score reaches the threshold.

    Args:
        thresholds: Thresholds (K,). No sample exits at a threshold of inf; the last threshold is -inf, so all remaining
            samples exit there.
        score: Score that the thresholds apply to: "confidence", "margin", "entropy", "variance", "patience" or
            "learned".
        unit: Unit of `cost`, `budget` and `costs`: "MACs" or "ms".
        cost: Mean cost per sample on the data that the thresholds were fitted on.
        budget: Budget that was requested, if any.
        strategy: Strategy that made the thresholds; "public" is the paper's sweep.
        q: Ratio of the shares of neighboring exits, in the paper's family.
        costs: Cumulative costs (K,) of the exits.
        fit: How the policy was fitted, a `PolicyFit`.
        guarantee: What was certified.
        score_model: Model of the score "learned", None for the others.

    Raises:
        InputError: If the thresholds are not numbers that end with -inf, or another value is invalid.

    Example:
        >>> import exitwise as ew
        >>> policy = ew.Policy((0.8, float("-inf")))
        >>> probs = [[[0.9, 0.1], [0.6, 0.4]], [[0.7, 0.3], [0.2, 0.8]]]  # 2 exits, 2 samples, 2 classes
        >>> policy.exits(probs).tolist()
        [0, 1]
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
    score_model: LearnedScore | None = None

    def __post_init__(self) -> None:
        try:
            thresholds = tuple(float(value) for value in self.thresholds)
        except (OverflowError, TypeError, ValueError):
            raise InputError(
                f"`thresholds` must be numbers, one per exit, the last -inf, but got {shorten(self.thresholds)}"
            ) from None
        object.__setattr__(self, "thresholds", thresholds)
        if not thresholds or any(value != value for value in thresholds) or thresholds[-1] != -inf:
            raise InputError(
                f"`thresholds` must be numbers, one per exit, the last -inf, but got {shorten(list(thresholds))}"
            )
        check_score(self.score)
        self._check_score_model()
        check_choice("unit", self.unit, UNITS)
        for name in ("cost", "budget", "q"):
            if (value := getattr(self, name)) is not None and not is_finite(value):
                raise InputError(f"`{name}` must be a finite number or None, but got {shorten(value)}")
        if self.costs is not None:
            object.__setattr__(self, "costs", check_costs(Costs(self.costs, self.unit), len(thresholds)).values)

    def _check_score_model(self) -> None:
        """Raise InputError unless there is a model, for each of the exits, exactly if the score is learned."""
        if (self.score == LEARNED) != isinstance(self.score_model, LearnedScore) or (
            self.score != LEARNED and self.score_model is not None
        ):
            raise InputError(
                "`score_model` must be a LearnedScore for the score 'learned' and None for others, "
                f"but got {type(self.score_model).__name__} for {self.score!r}"
            )
        if self.score_model is not None and len(self.score_model.exits) != len(self.thresholds):
            raise InputError(
                f"`score_model` must have {len(self.thresholds)} exits as the thresholds, "
                f"but has {len(self.score_model.exits)}"
            )

    @cached_property
    def _float32_thresholds(self) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(self.thresholds).astype(np.float32)

    def exit_mask(self, exit: int, pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
        """Return the exit mask (n,) of the samples that reached `exit`, and the updated score state.

        Args:
            exit: Index of the exit, 0 to K - 1.
            pred: Prediction of the exit, with probs (n, c).
            state: Score state (n, m) from the previous exit; None at the first exit, or if the score needs none.

        Returns:
            Whether each sample exits here (n,), and the score state (n, m) or None for the next exit.
        """
        if self.thresholds[exit] == -inf:  # as at the last exit: all samples that are left exit
            return np.ones(len(pred.probs), dtype=bool), None
        score, state = self._compute_scores(exit, pred, state)
        threshold = self._float32_thresholds[exit]
        if len(score) == 1:  # scalars take half as long as arrays of one number
            value = score[0]
            if value != threshold:
                return np.array([value > threshold]), state
        return _exceeds(score, threshold, self.thresholds[exit], pred), state

    def _compute_scores(self, exit: int, pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
        """Return the scores (n,) of an exit as float32, without ties broken, and the updated score state."""
        if self.score_model is None:
            values, state = SCORES[self.score].compute(pred, state)
        else:
            values, state = self.score_model.compute(exit, pred, state)
        return np.asarray(values, dtype=np.float32), state

    def stops(self, exit: int, said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
        """Return the exit mask (n,) and the updated score state: former name of `exit_mask`."""
        return self.exit_mask(exit, said, memory)

    def exits(self, preds: Any) -> Array:
        """Return the exit (n,), 0 to K - 1, that each sample takes, from predictions (K, n, c)."""
        return self.exits_from_scores(self.scores(preds))

    def scores(self, preds: Any) -> Array:
        """Return the scores (K, n) that the thresholds apply to, from predictions (K, n, c); ties are broken."""
        return exit_scores(preds, self.score, self.score_model)

    def exits_from_scores(self, scores: Array) -> Array:
        """Return the exit (n,), 0 to K - 1, that each sample takes, from scores (K, n)."""
        if len(scores) != len(self.thresholds):
            raise InputError(f"`preds` must have {len(self.thresholds)} exits as the policy has, but has {len(scores)}")
        return first_exits(scores, np.asarray(self.thresholds))

    def exits_by(self, scores: Array) -> Array:
        """Return the exit (n,) that each sample takes, from scores (K, n): former name of `exits_from_scores`."""
        return self.exits_from_scores(scores)

    def shifted(self, by: float) -> "Policy":
        """Return a policy of the same family: distances to full certainty times exp(-by).

        It is stricter for `by` > 0, and the cost of any samples grows with `by`. Infinite thresholds do not change.
        """
        by = min(max(check_number("by", by), -_MAX_SHIFT), _MAX_SHIFT)
        if not by:
            return self
        score = SCORES.get(self.score, LEARNED_SCALE)
        thresholds = [
            score.shifted(value, by, len(self.thresholds)) if isfinite(value) else value for value in self.thresholds
        ]
        return self.with_thresholds(thresholds)

    def with_thresholds(self, thresholds: Sequence[float]) -> "Policy":
        """Return a copy with new thresholds (K,); `cost`, `q`, `fit` and `guarantee` are reset to None."""
        return replace(self, thresholds=tuple(thresholds), cost=None, q=None, fit=None, guarantee=None)

    def with_cost(self, scores: Array, costs: Costs) -> "Policy":
        """Return a copy with its mean cost on samples with these scores (K, n), and with `costs` (K,)."""
        shares = np.bincount(self.exits_from_scores(scores), minlength=len(scores)) / scores.shape[1]
        return replace(self, cost=float(shares @ np.asarray(costs.values)), costs=costs.values)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict; infinite thresholds are the strings "inf" and "-inf"."""
        parts: dict[str, Any] = {
            name: asdict(part) if (part := getattr(self, name)) else None for name in ("fit", "guarantee")
        }
        if self.fit is not None and self.fit.score_choice is None:
            del parts["fit"]["score_choice"]
        costs = list(self.costs) if self.costs else None
        data = {**self._field_values(), "thresholds": thresholds_to_json(self.thresholds), "costs": costs, **parts}
        if self.score_model is None:  # files of other scores are as they were before there was a model
            del data["score_model"]
            return data
        return {**data, "score_model": self.score_model.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        """Make a policy from the result of `to_dict`; raise `InputError` if it is invalid."""
        try:
            thresholds = tuple(float(value) for value in data["thresholds"])
            for name, value in data.items():
                if name != "thresholds":
                    _check_finite(name, value)
            parts = {
                name: kind(**data[name]) if data.get(name) is not None else None
                for name, kind in (("fit", PolicyFit), ("guarantee", Guarantee))
            }
            model = data.get("score_model")
            model = None if model is None else LearnedScore.from_dict(model)
            return cls(**{**data, "thresholds": thresholds, **parts, "score_model": model})
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(f"not a usable policy: {error}") from None
        except (AttributeError, RecursionError) as error:
            raise InputError(f"not a usable policy: {first_line(error)}") from None

    def _records(self) -> list[dict[str, Any]]:
        return [{"exit": k, "threshold": threshold} for k, threshold in enumerate(self.thresholds)]

    def save(self, path: str | Path) -> None:
        """Write the policy to a JSON file."""
        write_json(Path(path), {"format": "exitwise.policy", "version": VERSION, **self.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "Policy":
        """Read a file that `save` wrote; raise `InputError` that names the file if it is invalid."""
        data = read_json(Path(path))
        if data.pop("format", None) != "exitwise.policy" or data.pop("version", None) != VERSION:
            raise InputError(f"{path} must hold a policy of version {VERSION}")
        try:
            return cls.from_dict(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def _check_finite(name: str, value: Any) -> None:
    """Raise InputError if a number in nested JSON data is not finite."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_finite(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_finite(name, item)
    elif is_number(value) and not is_finite(value):
        raise InputError(f"`{name}` must be finite, but got {shorten(value)}")


def thresholds_to_json(thresholds: Sequence[float]) -> list[float | str]:
    """Return thresholds for JSON: infinite ones as the strings "inf" and "-inf"."""
    return [value if isfinite(value) else str(value) for value in thresholds]


def sweep(preds: Any, *, costs: Costs | Sequence[float], score: str = "confidence", labels: Any = None) -> list[Policy]:
    """Return the paper's sweep: 39 policies, q = 1/20 .. 39/20, fitted on validation predictions.

    The threshold of an exit is the score of the floor(n * share)-th most certain active sample, where the shares of the
    exits are q^k / sum_j q^j. If that number is 0 or more than the active samples, no sample exits there.

    Args:
        preds: Predictions, or probabilities (K, n, c).
        costs: Cumulative costs (K,) of the exits, such as `trace.costs`.
        score: Score that the thresholds apply to; "learned" and "auto" need `labels`, see `fit_policy`.
        labels: True classes (n,).

    Returns:
        The policies, from the smallest q to the largest, with their mean cost on these predictions.

    Raises:
        InputError: If the predictions, costs or score are invalid.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> preds = ew.calibrate(trace, "MSDNet (vanilla)").predict(trace.val)
        >>> policies = ew.sweep(preds, costs=trace.costs)
        >>> len(policies), policies[0].q, policies[-1].q, policies[0].cost < policies[-1].cost
        (39, 0.05, 1.95, True)
    """
    preds = Predictions.of(preds)
    costs_ = check_costs(costs, len(preds))
    fitted = fit_score(preds, labels, costs_, score)
    scores = fitted.scores
    rounded = scores.astype(np.float32)  # the sweep does not break ties
    policies = []
    for q, counts in sweep_counts(*scores.shape).items():
        thresholds = thresholds_for_counts(rounded, counts)
        policy = Policy(thresholds, fitted.name, costs_.unit, strategy="public", q=q, score_model=fitted.model)
        policies.append(policy.with_cost(scores, costs_))
    return policies


def sweep_counts(num_exits: int, num_samples: int) -> dict[float, list[int]]:
    """Return the numbers (K,) of samples that leave at each exit, for every q of the paper's sweep."""
    counts = {}
    for p in range(1, 40):
        # q = p / 20 as integer weights, so that a share of exactly 30 samples is not rounded down to 29
        weights = [p**k * 20 ** (num_exits - k) for k in range(1, num_exits + 1)]
        counts[p / 20] = [num_samples * weight // sum(weights) for weight in weights]
    return counts


def thresholds_for_counts(scores: Array, counts: Sequence[int]) -> tuple[float, ...]:
    """Return thresholds on scores (K, n) at which `counts` (K,) samples exit; ties at a threshold all exit."""
    active = np.arange(scores.shape[1])
    thresholds = []
    for row, count in zip(scores[:-1], counts, strict=False):
        remaining = row[active]
        position = len(remaining) - count
        none_exit = count == 0 or position < 0
        thresholds.append(inf if none_exit else float(np.partition(remaining, position)[position]))
        active = active[remaining < thresholds[-1]]
    return (*thresholds, -inf)


def first_exits(scores: Array, thresholds: Array) -> Array:
    """Return the first exit (n,) whose score (K, n) reaches its threshold (K,)."""
    return first_true(scores >= thresholds[:, None])


def check_costs(costs: Costs | Sequence[float] | None, exits: int) -> Costs:
    """Return `costs` as `Costs` if there is one for each of `exits` exits."""
    if costs is None:
        raise InputError("`costs` are needed: the cumulative cost of each exit, such as `trace.costs`")
    checked = Costs.of(costs)
    if len(checked) != exits:
        raise InputError(f"`costs` must have one value for each of {exits} exits, but has {len(checked)}")
    return checked


def mixed_exit_mask(
    policies: Sequence[Policy], which: Array, exit: int, pred: ExitPrediction, state: ScoreState
) -> tuple[Array, ScoreState]:
    """Return what `Policy.exit_mask` does, for samples with different policies on one score, which is computed once.

    Args:
        policies: Policies that differ only in their thresholds.
        which: Index (n,) of the policy of each sample.
        exit: Index of the exit, 0 to K - 1.
        pred: Prediction of the exit, with probs (n, c).
        state: Score state (n, m) from the previous exit; None at the first exit, or if the score needs none.
    """
    scoring = next((policy for policy in policies if policy.thresholds[exit] != -inf), None)
    if scoring is None:
        return np.ones(len(pred.probs), dtype=bool), None
    score, state = scoring._compute_scores(exit, pred, state)
    thresholds = np.array([policy.thresholds[exit] for policy in policies])[which]
    rounded = np.array([policy._float32_thresholds[exit] for policy in policies])[which]
    return _exceeds(score, rounded, thresholds, pred), state


def _exceeds(score: Array, rounded: Any, threshold: Any, pred: ExitPrediction) -> Array:
    """Return the mask (n,) of the scores above a threshold or one each (n,), of which `rounded` are the float32."""
    mask: Array = np.asarray(score > rounded)
    tied = score == rounded
    if tied.any():  # only these need their hash
        least = threshold[tied] if isinstance(threshold, np.ndarray) else threshold
        mask[tied] = break_ties(score[tied], pred.probs[tied]) >= least
    return mask
