"""How certain an exit is of a sample: the scores that thresholds apply to. NumPy alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, floor
from typing import Any

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.predictions import NEEDS_DRAWS, Array, ExitPrediction, Predictions, max_prob, negative_entropy
from exitwise.core.ties import break_ties, tie_spread

ScoreState = Array | None  # (n, m): what a score has to know of the exits before, if anything


@dataclass(frozen=True)
class Score:
    """`of` gives the scores (n,) of what an exit says, larger for more certain, and the memory for the next exit.

    `certain` is the score of full certainty, `grain` what is next to nothing beside doubts that matter. Scores that are
    `whole` numbers count exits, and have no end but theirs.
    """

    compute: Callable[[ExitPrediction, ScoreState], tuple[Array, ScoreState]]
    full_certainty: float = 0.0
    resolution: float = 2.0**-23
    is_integer: bool = False

    def shifted(self, threshold: float, by: float, exits: int) -> float:
        """A threshold on this score that is more careful for `by` > 0: doubt counts exp(by) times as much."""
        if not self.is_integer:
            return self.full_certainty - (
                (self.full_certainty - threshold + self.resolution) * exp(-by) - self.resolution
            )
        level = floor(threshold)
        between = min((threshold - level) / tie_spread(level), 1.0)  # equal scores are parted by their hash
        moved = exits - (exits - level - between) * exp(-by)
        return floor(moved) + (moved - floor(moved)) * tie_spread(floor(moved))


def _confidence(said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
    """The largest probability."""
    return max_prob(said), memory


def _margin(said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
    """By how much the largest probability exceeds the second."""
    if said.probs.shape[1] < 2:
        return said.probs[:, 0], memory
    two = np.partition(said.probs, -2, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0], memory


def _negative_entropy(said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
    """sum p log p."""
    return negative_entropy(said), memory


def _negative_variance(said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
    """Minus the variance over draws of the predicted class's probability."""
    if said.variance is None:
        raise InputError(f"`score` 'variance' {NEEDS_DRAWS}")
    return -said.variance, memory


def _patience(said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
    """How many exits just before this one predict the same class. The memory: that class, and how many."""
    predicted = said.probs.argmax(axis=1)
    agree = np.zeros_like(predicted)
    if memory is not None:
        agree = np.where(memory[:, 0] == predicted, memory[:, 1] + 1, 0)
    return agree.astype(np.float32), np.stack([predicted, agree], axis=1)


SCORES: Mapping[str, Score] = {
    "confidence": Score(_confidence, full_certainty=1.0),
    "margin": Score(_margin, full_certainty=1.0),
    "entropy": Score(_negative_entropy),
    "variance": Score(_negative_variance, resolution=2.0**-30),
    "patience": Score(_patience, is_integer=True),
}


def check_score(score: Any) -> None:
    if not isinstance(score, str) or score not in SCORES:
        raise InputError(f"`score` must be one of {', '.join(SCORES)}, but got {score!r}")


def exit_scores(preds: Any, score: str = "confidence") -> Array:
    """(K, n) how certain every exit is of every sample, float64, equals told apart (see `split_ties`)."""
    check_score(score)
    memory: ScoreState = None

    def of_exit(said: ExitPrediction) -> Array:
        nonlocal memory
        found, memory = SCORES[score].compute(said, memory)
        return break_ties(found, said.probs)

    return Predictions.of(preds).reduce(score, of_exit, variance=score == "variance")
