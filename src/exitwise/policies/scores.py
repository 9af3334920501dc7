"""Scores: the certainty of an exit about a sample, which thresholds are compared with. NumPy only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, floor
from typing import Any

import numpy as np

from exitwise.core.checks import check_choice
from exitwise.core.errors import InputError
from exitwise.core.predictions import NEEDS_DRAWS, Array, ExitPrediction, Predictions, max_prob, negative_entropy
from exitwise.core.ties import break_ties, hash_probs, spread_ties, tie_spread
from exitwise.policies.learned_score import LearnedScore, learned_scores
from exitwise.policies.learned_score import ScoreState as ScoreState

LEARNED = "learned"  # the score that `learned_score.py` fits; it needs a model, and so is not in `SCORES`
AUTO = "auto"  # the score that cross-fitting chooses


@dataclass(frozen=True)
class Score:
    """A score of certainty and its scale.

    Args:
        compute: Function of an exit's prediction and the score state. It returns the scores (n,), larger for more
            certain, and the score state for the next exit.
        full_certainty: Score at full certainty.
        resolution: Differences below it are negligible.
        is_integer: Whether scores count exits; they are then unbounded except by the number of exits.
    """

    compute: Callable[[ExitPrediction, ScoreState], tuple[Array, ScoreState]]
    full_certainty: float = 0.0
    resolution: float = 2.0**-23
    is_integer: bool = False

    def shifted(self, threshold: float, shift: float, exits: int) -> float:
        """Return the threshold with its distance to full certainty times exp(-shift): stricter for `shift` > 0."""
        if not self.is_integer:
            distance = self.full_certainty - threshold + self.resolution
            return self.full_certainty - (distance * exp(-shift) - self.resolution)
        level = floor(threshold)
        fraction = min((threshold - level) / tie_spread(level), 1.0)  # ties are broken by a hash within this spread
        moved = exits - (exits - level - fraction) * exp(-shift)
        return floor(moved) + (moved - floor(moved)) * tie_spread(floor(moved))


def _confidence(pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
    """Largest probability (n,)."""
    return max_prob(pred), state


def _margin(pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
    """Difference (n,) between the largest and the second largest probability."""
    if pred.probs.shape[1] < 2:
        return pred.probs[:, 0], state
    top_two = np.partition(pred.probs, -2, axis=1)[:, -2:]
    return top_two[:, 1] - top_two[:, 0], state


def _negative_entropy(pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
    """Negative entropy (n,), sum p log p."""
    return negative_entropy(pred), state


def _negative_variance(pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
    """Negative variance (n,) over draws of the predicted class's probability."""
    if pred.variance is None:
        raise InputError(f"`score` 'variance' {NEEDS_DRAWS}")
    return -pred.variance, state


def _patience(pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
    """Number (n,) of consecutive exits just before this one that predict the same class.

    The state (n, 2) holds that class and that number.
    """
    predicted = pred.probs.argmax(axis=1)
    agreeing = np.zeros_like(predicted)
    if state is not None:
        agreeing = np.where(state[:, 0] == predicted, state[:, 1] + 1, 0)
    return agreeing.astype(np.float32), np.stack([predicted, agreeing], axis=1)


SCORES: Mapping[str, Score] = {
    "confidence": Score(_confidence, full_certainty=1.0),
    "margin": Score(_margin, full_certainty=1.0),
    "entropy": Score(_negative_entropy),
    "variance": Score(_negative_variance, resolution=2.0**-30),
    "patience": Score(_patience, is_integer=True),
}


LEARNED_SCALE = Score(_confidence, full_certainty=1.0)  # a probability; without a model it is the confidence


def check_score(score: Any, to_fit: bool = False) -> None:
    """Raise `InputError` unless `score` is the name of a score; to fit a policy, "auto" is one too."""
    check_choice("score", score, (*SCORES, LEARNED, *((AUTO,) if to_fit else ())))


def exit_scores(preds: Any, score: str = "confidence", model: LearnedScore | None = None) -> Array:
    """Return the scores (K, n) of predictions (K, n, c) as float64, with ties broken (see `break_ties`).

    The score "learned" needs its `model`.
    """
    check_score(score)
    predictions = Predictions.of(preds)
    if score == LEARNED:
        if model is None:
            raise InputError("`score` 'learned' needs its model: use `fit_policy` with labels, or `Policy.scores`")
        return break_ties_of(predictions, learned_scores(model, predictions))
    state: ScoreState = None

    def score_exit(pred: ExitPrediction) -> Array:
        nonlocal state
        values, state = SCORES[score].compute(pred, state)
        return break_ties(values, pred.probs)

    return predictions.reduce(score, score_exit, variance=score == "variance")


def break_ties_of(preds: Predictions, scores: Array) -> Array:
    """Return scores (K, n) of predictions without ties; the hashes of the samples are computed once."""
    return spread_ties(scores, preds.reduce("tie hashes", lambda pred: hash_probs(pred.probs)))
