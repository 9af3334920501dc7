"""Abstention: which images a classifier does not answer, by a share or by a certified error rate. NumPy only."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from exitwise.core.checks import check_between, check_bool, check_choice, check_integer, is_number
from exitwise.core.errors import InputError, shorten
from exitwise.core.held_out import split_held_out
from exitwise.core.predictions import Array, Predictions, check_labels, to_array
from exitwise.core.results import Result
from exitwise.core.ties import break_ties
from exitwise.policies.bounds import MeanUpperBound, estimate_samples_needed
from exitwise.policies.certificate import NotCertifiedError
from exitwise.policies.learned_score import summaries_of
from exitwise.policies.policy import Policy, thresholds_to_json
from exitwise.policies.prediction_sets import are_tuning_samples, check_fitted_for
from exitwise.policies.scores import exit_scores

PLACES = ("exit", "last")
_SEQUENCE = 100  # thresholds that are tested for a risk, evenly spaced in the share of answered samples
_ERRORS = np.array([0.0, 1.0])  # values of the loss of a sample


@dataclass(frozen=True)
class Abstention(Result):
    """A threshold on the confidence at the exit that an image took; the classifier abstains below it.

    Args:
        threshold: Smallest confidence that is answered; -inf if all are.
        at: "exit" if images may be left unanswered at any exit, "last" if only at the last.
        num_exits: Number of exits, K.
        answered: Share of the samples of the fit that are answered.
        samples: Number of samples of the fit; for a risk, the held-out samples that certified it.
        share: Share of images to leave unanswered, if that was requested.
        risk: Largest error rate among answered images, if that was requested.
        delta: Probability, over the draw of the samples, with which the error rate may exceed `risk`.
        risk_limit: Upper bound on the error rate at this threshold, by the same test: the margin that is left.
        bound: Name of the bound that certified the risk.
        guaranteed: False if thresholds or calibration have seen the samples: the risk is then not guaranteed.
        policy_thresholds: Thresholds (K,) of the policy that decided where samples exit.
        policy_score: Score of that policy; None in files of earlier versions.

    Raises:
        InputError: If a value is invalid.

    Example:
        >>> import exitwise as ew
        >>> abstention = ew.Abstention(0.6, at="exit", num_exits=2, answered=0.9, samples=100, share=0.1)
        >>> abstention.mask([[0.7, 0.3], [0.5, 0.5]], [0, 1]).tolist()
        [False, True]
    """

    threshold: float
    at: str
    num_exits: int
    answered: float
    samples: int
    share: float | None = None
    risk: float | None = None
    delta: float | None = None
    risk_limit: float | None = None
    bound: str | None = None
    guaranteed: bool = True
    policy_thresholds: tuple[float, ...] | None = None
    policy_score: str | None = None

    def __post_init__(self) -> None:
        if not is_number(self.threshold) or self.threshold != self.threshold:
            raise InputError(f"`threshold` must be a number, but got {shorten(self.threshold)}")
        object.__setattr__(self, "threshold", float(self.threshold))
        check_choice("at", self.at, PLACES)
        check_integer("num_exits", self.num_exits, 1)
        check_integer("samples", self.samples, 1)
        check_bool("guaranteed", self.guaranteed)
        for name in ("answered", "share", "risk", "delta", "risk_limit"):
            value = getattr(self, name)
            if (value is not None or name == "answered") and (not is_number(value) or not 0 <= value <= 1):
                raise InputError(f"`{name}` must be a number from 0 to 1, but got {shorten(value)}")
        if self.policy_thresholds is not None:
            object.__setattr__(self, "policy_thresholds", tuple(float(value) for value in self.policy_thresholds))

    def mask(self, probs: Any, exits: Any) -> Array:
        """Return whether the classifier abstains (n,).

        Args:
            probs: Probabilities (n, c) at the exit that each sample took.
            exits: That exit (n,), 0 to K - 1.
        """
        probs = np.asarray(to_array("probs", probs), dtype=np.float32)
        exits = to_array("exits", exits)
        if probs.ndim != 2 or exits.shape != probs.shape[:1]:
            raise InputError(f"`probs` must be (n, c) and `exits` (n,), but got {probs.shape} and {exits.shape}")
        confidence, threshold = probs.max(axis=1, initial=0), self._float32_threshold
        abstained = np.asarray(confidence < threshold)
        tied = confidence == threshold
        if tied.any():  # only these need their hash
            abstained[tied] = break_ties(confidence[tied], probs[tied]) < self.threshold
        return abstained & (exits == self.num_exits - 1) if self.at == "last" else abstained

    @cached_property
    def _float32_threshold(self) -> np.float32:
        with np.errstate(over="ignore"):
            return np.float32(self.threshold)

    def simulate(self, preds: Any, policy: Policy) -> Array:
        """Return whether a classifier with this policy abstains (n,), from predictions (K, n, c) of all exits."""
        preds = Predictions.of(preds)
        check_fitted_for(self, policy)
        return self.mask_at_exits(preds, policy.exits(preds))

    def mask_at_exits(self, preds: Predictions, exits: Array) -> Array:
        """Return whether the classifier abstains (n,), from predictions (K, n, c) and the exit (n,) of each sample."""
        abstained = confidence_at_exits(preds, exits) < self.threshold
        return abstained & (exits == self.num_exits - 1) if self.at == "last" else abstained

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict; infinite thresholds are the strings "inf" and "-inf"."""
        thresholds = self.policy_thresholds
        return {
            **self._field_values(),
            "threshold": thresholds_to_json([self.threshold])[0],
            "policy_thresholds": None if thresholds is None else thresholds_to_json(thresholds),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Abstention":
        """Make an abstention from the result of `to_dict`; raise `InputError` if it is invalid."""
        try:
            return cls(**{**data, "threshold": float(data["threshold"])})
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(f"not a usable abstention: {error}") from None


def confidence_at_exits(preds: Predictions, exits: Array) -> Array:
    """Return the confidence (n,), with ties broken, at the exit (n,) that each sample takes."""
    return np.asarray(exit_scores(preds, "confidence")[exits, np.arange(len(exits))])


@dataclass(frozen=True, eq=False)
class _Outcomes:
    """Confidence (n,) without ties, +inf for samples that are always answered, and errors (n,) if there are labels."""

    confidence: Array
    wrong: Array | None

    @classmethod
    def of(cls, preds: Predictions, labels: Array | None, exits: Array, at: str) -> "_Outcomes":
        confidence = confidence_at_exits(preds, exits)
        if at == "last":
            confidence = np.where(exits == preds.shape[0] - 1, confidence, inf)
        wrong = None if labels is None else summaries_of(preds)[exits, np.arange(len(exits)), 3] != labels
        return cls(confidence, wrong)

    def counts(self, threshold: float) -> Array:
        """Return the number of right and of wrong answers among samples at or above a threshold."""
        assert self.wrong is not None
        answered = self.confidence >= threshold
        wrong = int(np.count_nonzero(self.wrong & answered))
        return np.array([int(np.count_nonzero(answered)) - wrong, wrong])


def fit_abstention(
    preds: Any,
    labels: Any = None,
    *,
    policy: Policy,
    share: float | None = None,
    risk: float | None = None,
    delta: float = 0.05,
    at: str = "exit",
    tune: Any = None,
    tune_labels: Any = None,
    held_out: bool | None = None,
    seed: int = 0,
) -> Abstention:
    """Fit the confidence below which a classifier abstains, after early exits.

    Give either a `share`, which needs no labels, or a `risk`. For a risk, thresholds are tested one after the other,
    in an order that is fixed before the samples are used, until a test fails: with probability 1 - delta over the draw
    of the samples, the error rate among answered images is at most `risk`.

    Args:
        preds: Predictions, or probabilities (K, n, c), of samples that neither thresholds nor calibration have seen.
        labels: True classes (n,); needed for a risk.
        policy: Decides where samples exit.
        share: Share of the samples to leave unanswered, the least confident ones.
        risk: Largest error rate among answered images.
        delta: Probability with which the error rate may exceed `risk`.
        at: "exit" to abstain at the exit that an image takes, "last" to abstain only at the last exit.
        tune: Predictions (K, m, c) of other samples, such as those of the policy, that fix the order of the tests. By
            default a fifth of `preds` is set aside for that.
        tune_labels: True classes (m,) of `tune`.
        held_out: Whether thresholds and calibration have not seen the samples. By default this is assumed, unless
            the samples are evidently those of the policy: then `guaranteed` is False, with a warning.
        seed: Seed of the draw of the samples that are set aside.

    Returns:
        The abstention; give it to `Classifier`, or apply it with `abstention.mask(probs, exits)`.

    Raises:
        NotCertifiedError: If no threshold certifies the risk.
        InputError: If an argument is invalid, or a share cannot be reached at the last exit.

    Example:
        >>> import exitwise as ew
        >>> probs = [[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]]]  # 1 exit, 4 samples, 2 classes
        >>> policy = ew.Policy((float("-inf"),))
        >>> abstention = ew.fit_abstention(probs, policy=policy, share=0.25)
        >>> abstention.simulate(probs, policy).tolist()
        [False, True, False, False]
    """
    preds = Predictions.of(preds)
    if not isinstance(policy, Policy):
        raise InputError(f"`policy` must be a Policy, but got {type(policy).__name__}")
    if (share is None) == (risk is None):
        raise InputError(f"give one of `share` and `risk`, but got {share!r} and {risk!r}")
    check_choice("at", at, PLACES)
    exits = policy.exits(preds)
    labels = None if labels is None else check_labels(to_array("labels", labels), *preds.shape[1:])
    outcomes = _Outcomes.of(preds, labels, exits, at)
    if share is not None:
        return _fit_share(outcomes, policy, check_between("share", share, 0, 1), at)
    risk = check_between("risk", risk, 0, 1)
    check_between("delta", delta, 0, 1)
    if labels is None:
        raise InputError("`labels` are needed for a risk")
    if (tune is None) != (tune_labels is None):
        raise InputError("`tune` and `tune_labels` must be given together")
    guaranteed = not are_tuning_samples(preds, exits, policy) if held_out is None else check_bool("held_out", held_out)
    if held_out is None and not guaranteed:
        warnings.warn(
            "these are the samples that the policy was fitted on: the risk is not guaranteed; "
            "fit the abstention on held-out samples",
            stacklevel=2,
        )
    if tune is None:
        tested, ordering = split_held_out(preds.shape[1], 0.2, seed)
        wrong = np.asarray(outcomes.wrong)
        tuning = _Outcomes(outcomes.confidence[ordering], wrong[ordering])
        outcomes = _Outcomes(outcomes.confidence[tested], wrong[tested])
    else:
        tune = Predictions.of(tune)
        tune_labels = check_labels(to_array("tune_labels", tune_labels), *tune.shape[1:])
        tuning = _Outcomes.of(tune, tune_labels, policy.exits(tune), at)
    return _certify_risk(outcomes, tuning, policy, risk, delta, at, guaranteed)


def _fit_share(outcomes: _Outcomes, policy: Policy, share: float, at: str) -> Abstention:
    """Return the abstention that leaves floor(share * n) samples unanswered."""
    confidence = np.sort(outcomes.confidence)
    samples, count = len(confidence), int(share * len(confidence) + 1e-9)
    available = int(np.isfinite(confidence).sum())
    if count > available:
        raise InputError(
            f"a share of {share:.4g} cannot abstain at the last exit, which only {available / samples:.4g} of the "
            "samples reach: abstain at every exit, or take a smaller share"
        )
    limit = confidence[count] if count < samples else inf
    # The largest confidence that occurs if all samples of the last exit abstain: no new one may be answered there.
    threshold = -inf if not count else float(limit)
    answered = float((confidence >= threshold).mean())
    return Abstention(
        threshold,
        at,
        len(policy.thresholds),
        answered,
        samples,
        share,
        policy_thresholds=policy.thresholds,
        policy_score=policy.score,
    )


def _certify_risk(
    held_out: _Outcomes, tuning: _Outcomes, policy: Policy, risk: float, delta: float, at: str, guaranteed: bool
) -> Abstention:
    """Return the abstention that answers most among those that pass fixed-sequence tests of the risk.

    Tuning samples fix the thresholds and the one to begin with, whose test is expected to have the smallest p-value.
    From there on, each next threshold answers more.
    """
    finite = np.sort(tuning.confidence[np.isfinite(tuning.confidence)])[::-1]
    positions = np.unique(np.linspace(0, max(len(finite) - 1, 0), min(_SEQUENCE, len(finite))).astype(int))
    thresholds = [*([inf] if at == "last" else []), *(float(finite[position]) for position in positions), -inf]
    scale = len(held_out.confidence) / len(tuning.confidence)
    projected = [np.round(tuning.counts(threshold) * scale) for threshold in thresholds]
    bound = MeanUpperBound(binary=True)
    p_values = [bound.p_value(_ERRORS, n, risk) if n.sum() else 1.0 for n in projected]
    first = int(np.argmin(p_values))
    threshold = None
    for tested in thresholds[first:]:
        counts = held_out.counts(tested)
        if not counts.sum() or bound.p_value(_ERRORS, counts, risk) > delta:
            break
        threshold = tested
    if threshold is None:
        raise NotCertifiedError(_explain_failure(held_out, thresholds[first], risk, delta))
    counts = held_out.counts(threshold)
    return Abstention(
        threshold,
        at,
        len(policy.thresholds),
        float(counts.sum() / len(held_out.confidence)),
        len(held_out.confidence),
        risk=risk,
        delta=delta,
        risk_limit=bound.upper_limit(_ERRORS, counts, delta),
        bound=bound.name,
        guaranteed=guaranteed,
        policy_thresholds=policy.thresholds,
        policy_score=policy.score,
    )


def _explain_failure(held_out: _Outcomes, threshold: float, risk: float, delta: float) -> str:
    """Explain that no threshold certifies a risk, with the observed error rate and how many samples would do."""
    counts, total = held_out.counts(threshold), len(held_out.confidence)
    claim = f"an error rate of at most {100 * risk:.4g} % cannot be certified on {total:,} held-out samples"
    if not counts.sum():
        return f"{claim}: none of them is as confident as the first threshold"
    observed = counts[1] / counts.sum()
    needed = estimate_samples_needed(_ERRORS, counts, risk, delta)
    subset = "" if threshold == -inf else f" the {counts.sum():,} most confident of"
    advice = "allow a larger risk" if needed is None else f"about {needed * total // counts.sum() + 1:,} suffice"
    return f"{claim}: among{subset or ' all of'} them it is {100 * observed:.2f} %; {advice}"
