"""Fit the score of a policy, and choose one by cross-fitting. NumPy only."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from exitwise.core.costs import Costs, evenly_spaced_budgets
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, Predictions, check_labels
from exitwise.core.stopping import StoppingRanks, share_below, stopping_is_right
from exitwise.policies.cutoff_search import CutoffSearch
from exitwise.policies.learned_score import LearnedScore, cross_fit
from exitwise.policies.scores import AUTO, LEARNED, break_ties_of, check_score, exit_scores

CANDIDATES = ("confidence", "margin", "entropy", LEARNED)  # of `score="auto"`, the simplest first
_NUM_BUDGETS = 9  # over which the values of scores are averaged: differences at a single budget are mostly noise
_CLEAR = 2.0  # standard errors of a clear gain


@dataclass(frozen=True)
class ScoreCandidate:
    """Cross-fitted performance of a score.

    Args:
        value: Accuracy, or negative NLPD, as a mean over nine budgets.
        gain: Difference of `value` to confidence.
        standard_error: Standard error of `gain`, from paired samples.
        eefp: How well the score detects where stopping is right; None if it is undefined.
    """

    value: float
    gain: float
    standard_error: float
    eefp: float | None


@dataclass(frozen=True, eq=False)
class FittedScore:
    """A score, its model if it is learned, and the scores (K, n) of the samples that thresholds are fitted on.

    Scores of a learned model are out of fold. `candidates` are those that `score="auto"` compared.
    """

    name: str
    scores: Array
    model: LearnedScore | None = None
    candidates: dict[str, ScoreCandidate] | None = None

    def choice_to_dict(self) -> dict[str, Any] | None:
        """Return the candidates as JSON-serializable data; None if the score was not chosen."""
        return None if self.candidates is None else {name: asdict(c) for name, c in self.candidates.items()}


def fit_score(
    preds: Predictions, labels: Any, costs: Costs, score: str = "confidence", objective: str = "accuracy"
) -> FittedScore:
    """Compute the scores of a policy's samples, by name; learn or choose the score if that is asked for.

    Args:
        preds: Predictions (K, n, c).
        labels: True classes (n,); needed by "learned". Without them, "auto" is "confidence".
        costs: Costs (K,) of the exits.
        score: Name of the score, "learned" or "auto".
        objective: "accuracy" or "nlpd", what "auto" compares.

    Raises:
        InputError: If the score is unknown, or labels are missing or invalid.
    """
    check_score(score, to_fit=True)
    if score not in (LEARNED, AUTO):
        return FittedScore(score, exit_scores(preds, score))
    if labels is None and score == LEARNED:
        raise InputError("`labels` are needed to learn the exit score: the scores 'margin' and 'confidence' need none")
    if labels is None:
        return FittedScore("confidence", exit_scores(preds, "confidence"))
    true_classes = check_labels(labels, preds.shape[1], preds.shape[2])
    if score == AUTO:
        return _choose_score(preds, true_classes, costs, objective)
    return _fit_learned(preds, true_classes)


def _fit_learned(preds: Predictions, labels: Array) -> FittedScore:
    model, scores = cross_fit(preds, labels)
    return FittedScore(LEARNED, break_ties_of(preds, scores), model)


def compute_true_values(preds: Predictions, labels: Array, objective: str) -> Array:
    """Return (K, n) whether each exit is correct, or log p(true label)."""
    if objective == "accuracy":
        return np.asarray(preds.predicted == labels, dtype=np.float64)
    return preds.reduce_with_labels(labels)[0].astype(np.float64)


def _choose_score(preds: Predictions, labels: Array, costs: Costs, objective: str) -> FittedScore:
    """Choose a score that is clearly better than confidence, or else confidence.

    A score is clearly better if its value, a mean over nine budgets of thresholds in the paper's family, gains more
    than two standard errors over paired samples. Of several, a less simple one is taken only if its EEFP is clearly
    larger, too, and its value not smaller: EEFP tells scores apart with fewer samples.
    """
    fitted = {name: fit_score(preds, labels, costs, name) for name in CANDIDATES}
    if (model := fitted[LEARNED].model) is not None and model.is_confidence:
        del fitted[LEARNED]
    values = compute_true_values(preds, labels, objective)
    correct = np.asarray(preds.predicted == labels)
    mean_values = {name: _mean_values(score.scores, values, costs) for name, score in fitted.items()}
    candidates = {}
    for name, score in fitted.items():
        gain, standard_error = _paired_gain(mean_values[name], mean_values["confidence"])
        eefp = StoppingRanks(score.scores.astype(np.float32), correct).mean()
        candidates[name] = ScoreCandidate(float(mean_values[name].mean()), gain, standard_error, eefp)
    chosen = "confidence"
    influences = {name: _eefp_influence(score.scores.astype(np.float32), correct) for name, score in fitted.items()}
    for name, candidate in candidates.items():
        if candidate.gain <= _CLEAR * candidate.standard_error:
            continue
        if chosen != "confidence":
            eefp_gain, eefp_error = _eefp_gain(
                candidates[name], candidates[chosen], influences[name], influences[chosen]
            )
            gain, standard_error = _paired_gain(mean_values[name], mean_values[chosen])
            if eefp_gain <= _CLEAR * eefp_error or gain < -standard_error:
                continue
        chosen = name
    return FittedScore(chosen, fitted[chosen].scores, fitted[chosen].model, candidates)


def _mean_values(scores: Array, values: Array, costs: Costs) -> Array:
    """Return the value (n,) of each sample at the exits taken, as a mean over budgets spread over the costs."""
    search = CutoffSearch(scores, np.asarray(costs.values), {})
    samples = np.arange(scores.shape[1])
    total = np.zeros(scores.shape[1])
    budgets = evenly_spaced_budgets(costs, _NUM_BUDGETS)
    for budget in budgets:
        total += values[search.exits(search.find_cutoffs("geometric", budget)), samples]
    return total / len(budgets)


def _paired_gain(values: Array, reference: Array) -> tuple[float, float]:
    """Return the mean difference of values (n,) and its standard error."""
    difference = values - reference
    return float(difference.mean()), float(difference.std()) / len(difference) ** 0.5


def _eefp_gain(
    candidate: ScoreCandidate, reference: ScoreCandidate, influence: Array, reference_influence: Array
) -> tuple[float, float]:
    """Return the difference in EEFP and its standard error (DeLong's, from the influence of each sample)."""
    if candidate.eefp is None or reference.eefp is None:
        return 0.0, 0.0
    return candidate.eefp - reference.eefp, float(np.sqrt(((influence - reference_influence) ** 2).sum()))


def _eefp_influence(scores: Array, correct: Array) -> Array:
    """Return the influence (n,) of each sample on the EEFP; the sum of squares is its variance."""
    influence, defined = np.zeros(scores.shape[1]), 0
    for values, right in zip(scores[:-1], stopping_is_right(correct)[:-1], strict=True):
        if right.all() or not right.any():
            continue
        defined += 1
        for group, others, sign in ((right, ~right, 1), (~right, right, -1)):
            placement = share_below(values[group], values[others])
            influence[group] += sign * (placement - placement.mean()) / np.count_nonzero(group)
    return influence / max(defined, 1)


def describe_choice(chosen: str, candidates: Any, objective: str = "accuracy") -> str:
    """Describe in one line which score was chosen and what the others gained, from `PolicyFit.score_choice`."""
    unit, factor = ("points", 100) if objective == "accuracy" else ("NLPD", 1)

    def describe(name: str, candidate: Any) -> str:
        values = []
        if name != "confidence":
            values.append(f"{factor * candidate['gain']:+.2f} ±{factor * candidate['standard_error']:.2f}")
        if candidate["eefp"] is not None:
            values.append(f"EEFP {candidate['eefp']:.3f}")
        return f"{name} {', '.join(values)}".rstrip()

    listed = "; ".join(describe(name, candidate) for name, candidate in candidates.items())
    reason = "no other score is clearly better" if chosen == "confidence" else "clearly better than confidence"
    return (
        f"Exit score: {chosen}, {reason} on held-out folds (gain in {unit} over confidence ± standard error: {listed})."
    )
