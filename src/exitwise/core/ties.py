"""Tie breaking: equal scores are ordered by a hash of the probabilities. NumPy only."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_HASHED_VALUES = 1 << 16  # probabilities hashed at a time, so that intermediate results stay in a cache
_SMALLEST_SPREAD = 2.0**-151  # a quarter of the smallest float32, for scores at or near zero


def break_ties(score: NDArray[Any], probs: NDArray[Any]) -> NDArray[Any]:
    """Return scores (n,) as float64 without ties: the float32 score plus a hash of the probabilities (n, c).

    Ties, such as saturated confidences, are thus broken deterministically, and any share of samples can exit. The hash
    adds less than half of the distance to the next float32, so rounding to float32 restores the score.
    """
    return spread_ties(score, hash_probs(probs))


def spread_ties(score: NDArray[Any], hashes: NDArray[Any]) -> NDArray[Any]:
    """Return scores as float64 without ties, from the hashes (see `hash_probs`) of their samples, of the same shape."""
    exact = score.astype(np.float32).astype(np.float64)
    return np.asarray(exact + hashes * np.maximum(np.abs(exact) * 2.0**-25, _SMALLEST_SPREAD))


def tie_spread(score: float) -> float:
    """Return the width of the interval above `score` that hashes of tied samples fall into."""
    return max(abs(score) * 2.0**-25, _SMALLEST_SPREAD)


def hash_probs(probs: NDArray[Any]) -> NDArray[Any]:
    """Return a pseudorandom number in 0..1 per sample (n,), computed from its probabilities (n, c).

    Probabilities are rounded to four bits after the leading one. Another backend, whose arithmetic differs in the last
    bits, therefore computes the same hash except for about one sample in a thousand.
    """
    factors = _class_factors(probs.shape[1])
    sums = np.empty(len(probs), dtype=np.uint64)
    rows = max(1, _MAX_HASHED_VALUES // probs.shape[1])
    for start in range(0, len(probs), rows):
        bits = np.ascontiguousarray(probs[start : start + rows], dtype=np.float32).view(np.uint32)
        sums[start : start + rows] = ((bits + np.uint32(1 << 18)) >> np.uint32(19)).astype(np.uint64) @ factors
    return (_scramble(sums) >> np.uint64(38)) * 2.0**-26


@lru_cache(maxsize=8)
def _class_factors(classes: int) -> NDArray[Any]:
    """Return a pseudorandom odd factor (c,) for each class."""
    return np.asarray(_scramble(np.arange(1, classes + 1, dtype=np.uint64)) | np.uint64(1))


def _scramble(numbers: NDArray[Any]) -> NDArray[Any]:
    """Mix the bits of each uint64 with shifts and wrapping multiplications."""
    numbers = numbers ^ (numbers >> np.uint64(32))
    for factor in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        numbers = numbers * np.uint64(factor)
        numbers = numbers ^ (numbers >> np.uint64(29))
    return numbers
