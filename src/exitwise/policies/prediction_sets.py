"""Split-conformal prediction sets of what a classifier answers after early exits. NumPy only."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil, inf
from typing import Any

import numpy as np

from exitwise.core.checks import check_between, check_bool, check_choice, check_integer, check_number, is_number
from exitwise.core.errors import InputError, shorten
from exitwise.core.predictions import Array, Predictions, check_labels, to_array
from exitwise.core.results import Result
from exitwise.core.ties import hash_probs
from exitwise.policies.policy import Policy, thresholds_to_json

SET_SCORES = ("thr", "aps", "raps")
GROUPINGS = ("all", "exit", "class")
_MAX_VALUES = 4_000_000  # samples times classes whose scores are in memory at once
_MAX_LISTED = 5  # groups that an error message names


class TooFewSamplesError(InputError):
    """There are fewer samples, in a group, than a coverage needs."""


@dataclass(frozen=True)
class PredictionSets(Result):
    """Limits on a score of each class: the set of an image holds the classes whose score is at most the limit.

    Args:
        coverage: Probability with which a set holds the true class, for images like those of the fit.
        per: Groups that the coverage holds in: "all" images together, images of each "exit", or of each true "class".
        score: "thr" is one minus the probability of the class; "aps" adds up the probabilities of all classes that are
            at least as probable; "raps" adds a penalty for classes far down that order.
        limits: Largest score in a set: one for "all", one per exit or one per class. None for an exit that the policy
            never takes.
        samples: Number of samples of each group that the limit was fitted on.
        num_exits: Number of exits, K.
        num_classes: Number of classes, c.
        penalty: Penalty of "raps" for each place below `penalty_rank`.
        penalty_rank: Number of most probable classes without a penalty.
        randomized: Whether "aps" and "raps" count a pseudorandom part of the class's own probability, computed from
            the probabilities, which makes sets smaller.
        allow_empty: Whether sets may be empty; otherwise they always hold the predicted class.
        guaranteed: False if thresholds or calibration have seen the samples: the coverage is then not guaranteed.
        policy_thresholds: Thresholds (K,) of the policy that decided where samples exit.
        policy_score: Score of that policy; None in files of earlier versions.

    Raises:
        InputError: If a value is invalid.

    Example:
        >>> import exitwise as ew
        >>> sets = ew.PredictionSets(0.9, "all", "thr", limits=(0.8,), samples=(99,), num_exits=1, num_classes=3)
        >>> sets.masks([[0.7, 0.25, 0.05]], [0]).tolist()  # scores 0.3, 0.75 and 0.95
        [[True, True, False]]
    """

    coverage: float
    per: str
    score: str
    limits: tuple[float | None, ...]
    samples: tuple[int, ...]
    num_exits: int
    num_classes: int
    penalty: float = 0.01
    penalty_rank: int = 5
    randomized: bool = False
    allow_empty: bool = False
    guaranteed: bool = True
    policy_thresholds: tuple[float, ...] | None = None
    policy_score: str | None = None

    def __post_init__(self) -> None:
        check_between("coverage", self.coverage, 0, 1)
        check_choice("per", self.per, GROUPINGS)
        check_choice("score", self.score, SET_SCORES)
        for name, minimum in (("num_exits", 1), ("num_classes", 1), ("penalty_rank", 0)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum))
        check_number("penalty", self.penalty, 0)
        for name in ("randomized", "allow_empty", "guaranteed"):
            check_bool(name, getattr(self, name))
        groups = {"all": 1, "exit": self.num_exits, "class": self.num_classes}[self.per]
        for name in ("limits", "samples"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or len(values) != groups:
                raise InputError(f"`{name}` must be {groups} values for sets per {self.per}, but got {shorten(values)}")
            object.__setattr__(self, name, tuple(values))
        for limit in self.limits:
            if limit is not None and (not is_number(limit) or limit != limit):
                raise InputError(f"`limits` must be numbers or None, but got {shorten(limit)}")
        for count in self.samples:
            check_integer("samples", count, 0)
        if self.policy_thresholds is not None:
            object.__setattr__(self, "policy_thresholds", tuple(float(value) for value in self.policy_thresholds))

    def scores(self, probs: Array) -> Array:
        """Return the score (n, c) of every class, from probabilities (n, c)."""
        return _class_scores(probs, self.score, self.penalty, self.penalty_rank, self.randomized)

    def masks(self, probs: Any, exits: Any) -> Array:
        """Return whether each class is in the set of each sample (n, c).

        Args:
            probs: Probabilities (n, c) at the exit that each sample took.
            exits: That exit (n,), 0 to K - 1.
        """
        probs, exits = to_array("probs", probs), to_array("exits", exits)
        if probs.ndim != 2 or probs.shape[1] != self.num_classes or exits.shape != probs.shape[:1]:
            raise InputError(
                f"`probs` must be (n, {self.num_classes}) and `exits` (n,), but got {probs.shape} and {exits.shape}"
            )
        if len(exits) and not 0 <= exits.min() <= exits.max() < self.num_exits:
            raise InputError(
                f"`exits` must be from 0 to {self.num_exits - 1}, but go from {exits.min()} to {exits.max()}"
            )
        return self.compute_masks(probs, exits)

    def compute_masks(self, probs: Array, exits: Array) -> Array:
        """Return the result of `masks` for arrays that need no check: those of the runtime."""
        limits = self._limit_array[exits][:, None] if self.per == "exit" else self._limit_array
        masks = np.asarray(self.scores(probs) <= limits)
        if not self.allow_empty and len(probs):
            masks[np.arange(len(probs)), probs.argmax(axis=1)] = True
        return masks

    @cached_property
    def _limit_array(self) -> Array:
        return np.array([inf if limit is None else limit for limit in self.limits], dtype=np.float64)

    def simulate(self, preds: Any, policy: Policy) -> Array:
        """Return the sets (n, c) that a classifier with this policy gives, from predictions (K, n, c) of all exits."""
        preds = Predictions.of(preds)
        check_fitted_for(self, policy, preds.shape[2])
        exits = policy.exits(preds)
        return self.masks(probs_at_exits(preds, exits), exits)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict; infinite thresholds are the strings "inf" and "-inf"."""
        thresholds = self.policy_thresholds
        return {
            **self._field_values(),
            "limits": list(self.limits),
            "samples": list(self.samples),
            "policy_thresholds": None if thresholds is None else thresholds_to_json(thresholds),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PredictionSets":
        """Make sets from the result of `to_dict`; raise `InputError` if it is invalid."""
        try:
            return cls(**data)
        except (OverflowError, TypeError, ValueError) as error:
            raise InputError(f"not usable prediction sets: {error}") from None


def _class_scores(probs: Array, score: str, penalty: float, penalty_rank: int, randomized: bool) -> Array:
    """Return the nonconformity score (n, c) of every class in float64, computed from float32 probabilities."""
    probs32 = np.asarray(probs, dtype=np.float32)
    exact = probs32.astype(np.float64)
    if score == "thr":
        return 1 - exact
    samples, classes = exact.shape
    places = (-exact).argsort(axis=1, kind="stable")
    if samples > 1:
        places += np.arange(0, samples * classes, classes)[:, None]  # in the flat array, which is faster to index
    ordered = exact.take(places)
    sums = ordered.cumsum(axis=1)
    if randomized:
        sums -= hash_probs(probs32)[:, None] * ordered
    if score == "raps":
        sums += _rank_penalties(classes, penalty, penalty_rank)
    exact.put(places, sums)
    return exact


@lru_cache(maxsize=8)
def _rank_penalties(classes: int, penalty: float, penalty_rank: int) -> Array:
    """Return the penalty (c,) of "raps" for each place in the order of the classes."""
    return penalty * np.maximum(np.arange(1, classes + 1) - penalty_rank, 0)


def probs_at_exits(preds: Predictions, exits: Array) -> Array:
    """Return the probabilities (n, c) at the exit (n,) that each sample takes, one exit in memory at a time."""
    probs = np.empty(preds.shape[1:], dtype=np.float32)
    for k, pred in enumerate(preds.exits()):
        taken = exits == k
        probs[taken] = pred.probs[taken]
    return probs


def check_fitted_for(fitted: Any, policy: Policy, classes: int | None = None) -> None:
    """Raise InputError unless sets, or an abstention, were fitted for this policy and this number of classes."""
    noun = "sets" if isinstance(fitted, PredictionSets) else "abstention"
    if fitted.num_exits != len(policy.thresholds):
        raise InputError(f"`{noun}` must be of {len(policy.thresholds)} exits, but are of {fitted.num_exits}")
    if classes is not None and getattr(fitted, "num_classes", classes) != classes:
        raise InputError(f"`{noun}` must be of {classes} classes, but are of {fitted.num_classes}")
    if not is_fitted_for(fitted, policy):
        raise InputError(f"`{noun}` must be fitted for the thresholds and score of this policy, but are for others")


def is_fitted_for(fitted: Any, policy: Policy) -> bool:
    """Return whether sets, or an abstention, were fitted with the thresholds and the score of this policy."""
    return fitted.policy_thresholds in (None, policy.thresholds) and fitted.policy_score in (None, policy.score)


def limit_rank(samples: int, coverage: float) -> int:
    """Return the rank, from 1, of the score that is the limit: ceil((n + 1) * coverage), which may be n + 1."""
    return ceil((samples + 1) * Fraction(repr(float(coverage))))


def samples_needed(coverage: float) -> int:
    """Return the smallest number of samples that can give a coverage: n with ceil((n + 1) * coverage) <= n."""
    exact = Fraction(repr(float(coverage)))
    return ceil(exact / (1 - exact))


def reachable_exits(policy: Policy) -> Array:
    """Return whether samples can exit at each exit (K,)."""
    thresholds = np.asarray(policy.thresholds)
    ends = np.cumsum(thresholds == -inf) - (thresholds == -inf)  # exits before at which all samples exit
    return np.asarray((thresholds < inf) & (ends == 0))


def are_tuning_samples(preds: Predictions, exits: Array, policy: Policy) -> bool:
    """Return whether the policy was evidently fitted on these samples: as many, with exactly its mean cost."""
    if policy.fit is None or policy.cost is None or policy.costs is None or policy.fit.samples != preds.shape[1]:
        return False
    shares = np.bincount(exits, minlength=len(policy.costs)) / len(exits)
    return bool(np.isclose(shares @ np.asarray(policy.costs), policy.cost, rtol=1e-12, atol=0))


def fit_sets(
    preds: Any,
    labels: Any,
    *,
    policy: Policy,
    coverage: float = 0.9,
    per: str = "all",
    score: str = "thr",
    penalty: float = 0.01,
    penalty_rank: int = 5,
    randomized: bool = False,
    allow_empty: bool = False,
    held_out: bool | None = None,
) -> PredictionSets:
    """Fit prediction sets that hold the true class with a given probability, after early exits.

    The limit is the k-th smallest score of the true classes of n samples, k = ceil((n + 1) * coverage). For samples
    that are exchangeable with new images, the coverage is then at least `coverage`, and above it by at most 1 / (n + 1)
    if no scores are tied and sets may be empty.

    Args:
        preds: Predictions, or probabilities (K, n, c), of samples that neither thresholds nor calibration have seen,
            such as those that `Trace.hold_out` holds out.
        labels: True classes (n,).
        policy: Decides where samples exit.
        coverage: Probability with which a set holds the true class.
        per: Groups that the coverage holds in: "all" images together, images of each "exit", or of each true "class".
        score: "thr" gives the smallest sets on average; "aps" and "raps" adapt their size more to each image.
        penalty: Penalty of "raps" for each place below `penalty_rank` in the order of the classes.
        penalty_rank: Number of most probable classes without a penalty.
        randomized: Whether "aps" and "raps" count a pseudorandom part of a class's own probability.
        allow_empty: Whether sets may be empty; otherwise they always hold the predicted class, which covers more.
        held_out: Whether thresholds and calibration have not seen the samples. By default this is assumed, unless
            the samples are evidently those of the policy: then `guaranteed` is False, with a warning.

    Returns:
        The sets; give them to `Classifier`, or apply them with `sets.masks(probs, exits)`.

    Raises:
        InputError: If there are fewer samples, in any group, than the coverage needs, or an argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> tuning, held_out = ew.Trace.load(ew.zoo.path("trace.safetensors")).hold_out(0.5)
        >>> cal = ew.calibrate(tuning, "MSDNet (vanilla)")
        >>> policy = ew.fit_policy(cal.predict(tuning.val), tuning.val.labels, tuning.costs, budget=2e7)
        >>> sets = ew.fit_sets(cal.predict(held_out), held_out.labels, policy=policy, coverage=0.9)
        >>> sets.masks([[0.01] * 99 + [0.01]], [0]).shape
        (1, 100)
    """
    preds = Predictions.of(preds)
    num_exits, num_samples, num_classes = preds.shape
    labels = check_labels(to_array("labels", labels), num_samples, num_classes)
    check_between("coverage", coverage, 0, 1)
    check_choice("per", per, GROUPINGS)
    check_choice("score", score, SET_SCORES)
    if not isinstance(policy, Policy):
        raise InputError(f"`policy` must be a Policy, but got {type(policy).__name__}")
    penalty = check_number("penalty", penalty, 0)
    penalty_rank = check_integer("penalty_rank", penalty_rank, 0)
    exits = policy.exits(preds)
    guaranteed = not are_tuning_samples(preds, exits, policy) if held_out is None else check_bool("held_out", held_out)
    if held_out is None and not guaranteed:
        warnings.warn(
            "these are the samples that the policy was fitted on: the coverage of sets is not guaranteed; "
            "fit them on held-out samples",
            stacklevel=2,
        )
    probs = probs_at_exits(preds, exits)
    scores, rows = np.empty(num_samples), max(1, _MAX_VALUES // num_classes)
    for start in range(0, num_samples, rows):
        part = slice(start, start + rows)
        values = _class_scores(probs[part], score, penalty, penalty_rank, randomized)
        scores[part] = values[np.arange(len(values)), labels[part]]
    groups = {"all": np.zeros(num_samples, dtype=np.int64), "exit": exits, "class": labels}[per]
    num_groups = {"all": 1, "exit": num_exits, "class": num_classes}[per]
    needed = reachable_exits(policy) if per == "exit" else np.ones(num_groups, dtype=bool)
    counts = np.bincount(groups, minlength=num_groups)
    _check_counts(counts, needed, coverage, per)
    limits = tuple(
        float(np.sort(scores[groups == group])[limit_rank(int(counts[group]), coverage) - 1]) if counts[group] else None
        for group in range(num_groups)
    )
    return PredictionSets(
        float(coverage),
        per,
        score,
        limits,
        tuple(counts.tolist()),
        num_exits,
        num_classes,
        float(penalty),
        penalty_rank,
        randomized,
        allow_empty,
        guaranteed,
        policy.thresholds,
        policy.score,
    )


def _check_counts(counts: Array, needed: Array, coverage: float, per: str) -> None:
    """Raise InputError if a group has too few samples for the coverage, with the number that it needs."""
    minimum = samples_needed(coverage)
    short = np.flatnonzero(needed & (counts < minimum))
    if not len(short):
        return
    claim = f"a coverage of {coverage:g} needs at least {minimum:,} held-out samples"
    if per == "all":
        raise TooFewSamplesError(f"{claim}, but there are {counts[0]:,}")
    groups = "at every exit that the policy takes" if per == "exit" else "of every class"
    first = 1 if per == "exit" else 0  # exits are counted from 1 where people read of them
    listed = ", ".join(f"{per} {group + first} has {counts[group]:,}" for group in short[:_MAX_LISTED])
    more = f" and {len(short) - _MAX_LISTED} more have too few" if len(short) > _MAX_LISTED else ""
    raise TooFewSamplesError(f"{claim} {groups}, but {listed}{more}")
