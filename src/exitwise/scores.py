"""How certain an exit is of a sample: the scores that thresholds apply to. NumPy alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from exitwise.errors import InputError
from exitwise.methods import NEEDS_DRAWS
from exitwise.predictions import Array, ExitPrediction, Predictions

Memory = Array | None  # (n, m): what a score has to know of the exits before, if anything


@dataclass(frozen=True)
class Score:
    """`of` gives the scores (n,) of what an exit says, larger for more certain, and the memory for the next exit.

    `certain` is the score of full certainty; None where it is the number of exits.
    """

    of: Callable[[ExitPrediction, Memory], tuple[Array, Memory]]
    certain: float | None


def _confidence(said: ExitPrediction, memory: Memory) -> tuple[Array, Memory]:
    """The largest probability."""
    return np.asarray(said.probs.max(axis=1)), memory


def _margin(said: ExitPrediction, memory: Memory) -> tuple[Array, Memory]:
    """By how much the largest probability exceeds the second."""
    if said.probs.shape[1] < 2:
        return said.probs[:, 0], memory
    two = np.partition(said.probs, -2, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0], memory


def _negative_entropy(said: ExitPrediction, memory: Memory) -> tuple[Array, Memory]:
    """sum p log p."""
    return np.asarray(np.einsum("nc,nc->n", said.probs, said.log_probs)), memory


def _negative_variance(said: ExitPrediction, memory: Memory) -> tuple[Array, Memory]:
    """Minus the variance over draws of the predicted class's probability."""
    if said.variance is None:
        raise InputError(f"`score` 'variance' {NEEDS_DRAWS}")
    return -said.variance, memory


def _patience(said: ExitPrediction, memory: Memory) -> tuple[Array, Memory]:
    """How many exits just before this one predict the same class. The memory: that class, and how many."""
    predicted = said.probs.argmax(axis=1)
    agree = np.zeros_like(predicted)
    if memory is not None:
        agree = np.where(memory[:, 0] == predicted, memory[:, 1] + 1, 0)
    return agree.astype(np.float32), np.stack([predicted, agree], axis=1)


SCORES: Mapping[str, Score] = {
    "confidence": Score(_confidence, certain=1.0),
    "margin": Score(_margin, certain=1.0),
    "entropy": Score(_negative_entropy, certain=0.0),
    "variance": Score(_negative_variance, certain=0.0),
    "patience": Score(_patience, certain=None),
}


def check_score(score: Any) -> None:
    if not isinstance(score, str) or score not in SCORES:
        raise InputError(f"`score` must be one of {', '.join(SCORES)}, but got {score!r}")


def scores(preds: Any, score: str = "confidence") -> Array:
    """(K, n) how certain every exit is of every sample, float64, equals told apart (see `split_ties`)."""
    check_score(score)
    memory: Memory = None

    def of_exit(said: ExitPrediction) -> Array:
        nonlocal memory
        found, memory = SCORES[score].of(said, memory)
        return split_ties(found, said.probs)

    return Predictions.of(preds).reduce(score, of_exit, variance=score == "variance")


def split_ties(score: Array, probs: Array) -> Array:
    """(n,) scores as float64: the score as float32, and in the bits below a hash of the probabilities (n, c).

    So every number is a threshold that equal scores lie on both sides of, and saturated confidences can be parted.
    What is added is less than half of the way to the next float32: rounding gives the score back.
    """
    exact = score.astype(np.float32).astype(np.float64)
    # The second term serves scores of zero, and is less than the smallest float32.
    return np.asarray(exact + _hash(probs) * (np.abs(exact) * 2.0**-25 + 2.0**-150))


def _hash(probs: Array) -> Array:
    """(n,) numbers from 0 to 1 that look random, each made of one sample's probabilities (n, c).

    They are rounded to four bits behind the first: another arithmetic, such as a runtime's, gives the same hash but
    for about one sample in a thousand.
    """
    bits = np.ascontiguousarray(probs, dtype=np.float32).view(np.uint32)
    coarse = ((bits + np.uint32(1 << 18)) >> np.uint32(19)).astype(np.uint64)
    factors = _scrambled(np.arange(1, probs.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    return (_scrambled(coarse @ factors) >> np.uint64(38)) * 2.0**-26


def _scrambled(numbers: Array) -> Array:
    """Every bit of each uint64 spread over all of its bits, by shifts and odd factors that wrap around."""
    numbers = numbers ^ (numbers >> np.uint64(32))
    for factor in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        numbers = numbers * np.uint64(factor)
        numbers = numbers ^ (numbers >> np.uint64(29))
    return numbers
