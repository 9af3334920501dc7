"""How certain an exit is of a sample: the scores that thresholds apply to. NumPy alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, floor
from typing import Any

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.predictions import NEEDS_DRAWS, STREAMED_REDUCTIONS, Array, ExitPrediction, Predictions

_HASHED = 4_000_000  # probabilities at a time
_SMALLEST = 2.0**-151  # a quarter of the smallest float32, for scores of zero and next to it

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
        between = min((threshold - level) / _room(level), 1.0)  # equal scores are parted by their hash
        moved = exits - (exits - level - between) * exp(-by)
        return floor(moved) + (moved - floor(moved)) * _room(floor(moved))


def _confidence(said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
    """The largest probability."""
    return np.asarray(said.probs.max(axis=1)), memory


def _margin(said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
    """By how much the largest probability exceeds the second."""
    if said.probs.shape[1] < 2:
        return said.probs[:, 0], memory
    two = np.partition(said.probs, -2, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0], memory


def _negative_entropy(said: ExitPrediction, memory: ScoreState) -> tuple[Array, ScoreState]:
    """sum p log p."""
    return np.asarray(np.einsum("nc,nc->n", said.probs, said.log_probs)), memory


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


def _noted(score: str) -> Callable[[ExitPrediction], Array]:
    """A score that needs no memory, as `scores` gives it."""
    return lambda said: break_ties(SCORES[score].compute(said, None)[0], said.probs)


STREAMED_REDUCTIONS.update({name: _noted(name) for name in ("confidence", "entropy")})


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


def break_ties(score: Array, probs: Array) -> Array:
    """(n,) scores as float64: the score as float32, and in the bits below a hash of the probabilities (n, c).

    So every number is a threshold that equal scores lie on both sides of, and saturated confidences can be parted.
    What is added is less than half of the way to the next float32: rounding gives the score back.
    """
    exact = score.astype(np.float32).astype(np.float64)
    return np.asarray(exact + _hash(probs) * np.maximum(np.abs(exact) * 2.0**-25, _SMALLEST))


def _room(score: float) -> float:
    """Up to where hashes of equal scores reach."""
    return max(abs(score) * 2.0**-25, _SMALLEST)


def _hash(probs: Array) -> Array:
    """(n,) numbers from 0 to 1 that look random, each made of one sample's probabilities (n, c).

    They are rounded to four bits behind the first: another arithmetic, such as a runtime's, gives the same hash but
    for about one sample in a thousand.
    """
    factors = _scrambled(np.arange(1, probs.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    sums = np.empty(len(probs), dtype=np.uint64)
    rows = max(1, _HASHED // probs.shape[1])
    for start in range(0, len(probs), rows):
        bits = np.ascontiguousarray(probs[start : start + rows], dtype=np.float32).view(np.uint32)
        sums[start : start + rows] = ((bits + np.uint32(1 << 18)) >> np.uint32(19)).astype(np.uint64) @ factors
    return (_scrambled(sums) >> np.uint64(38)) * 2.0**-26


def _scrambled(numbers: Array) -> Array:
    """Every bit of each uint64 spread over all of its bits, by shifts and odd factors that wrap around."""
    numbers = numbers ^ (numbers >> np.uint64(32))
    for factor in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        numbers = numbers * np.uint64(factor)
        numbers = numbers ^ (numbers >> np.uint64(29))
    return numbers
