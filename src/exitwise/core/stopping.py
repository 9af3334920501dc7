"""The event that stopping is right, which judges exit scores, and the target that they learn from. NumPy only."""

from typing import Any

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, to_array


def stopping_is_right(correct: Array) -> Array:
    """Return (K, n) whether stopping is right at each exit: it is correct, or every later exit is wrong.

    At the last exit stopping is always right.

    Args:
        correct: Whether each exit is correct (K, n).

    Returns:
        Mask (K, n).

    Raises:
        InputError: If `correct` is not a mask with two axes.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> correct = np.array([[True, False, False], [True, True, False]])  # 2 exits, 3 samples
        >>> ew.metrics.stopping_is_right(correct).tolist()
        [[True, False, True], [True, True, True]]
    """
    mask = np.asarray(correct)
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise InputError(f"`correct` must be a mask (exits, samples), but got {mask.dtype} {mask.shape}")
    later_correct = np.zeros_like(mask)
    later_correct[:-1] = np.logical_or.accumulate(mask[:0:-1], axis=0)[::-1]
    return np.asarray(mask | ~later_correct)


def stopping_target(correct: Array, log_true: Array) -> Array:
    """Return (K, n) how right stopping is at each exit, from 0 to 1: the target of the learned score.

    It is 1 at an exit that is correct, and 0 at a wrong one if a later exit is correct. If all later exits are wrong,
    too, stopping loses no correct answer, but perhaps likelihood: the target is then sqrt(p_k / p_K), at most 1, with
    the probabilities of the true label at this exit and at the last one. The root is half-way between accuracy, for
    which it would be 1, and likelihood.

    Args:
        correct: Whether each exit is correct (K, n).
        log_true: log p(true label) at each exit (K, n).
    """
    lost = np.minimum(log_true - log_true[-1], 0.0)
    return np.where(correct, 1.0, np.where(stopping_is_right(correct), np.exp(lost / 2), 0.0))


def find_ties(ordered: Array) -> tuple[Array, Array]:
    """Return the start and the size of every run of equal values in a sorted array (n,)."""
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return starts, np.diff(np.append(starts, len(ordered)))


def sorted_auroc(scores: Array, positive: Array) -> float:
    """Return the AUROC of scores (n,), the largest first, for `positive` (n,), 0 or 1; NaN if these are all equal."""
    num_positive = float(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return float("nan")
    starts, sizes = find_ties(scores)
    tied_positive = np.add.reduceat(positive, starts)
    tied_negative = sizes - tied_positive
    negative_below = num_negative - np.cumsum(tied_negative)
    return float((tied_positive * (negative_below + tied_negative / 2)).sum() / (num_positive * num_negative))


def share_below(values: Array, others: Array) -> Array:
    """Return the share of `others` (m,) below each of `values` (n,); ties count one half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, values, side="left") + np.searchsorted(ordered, values, side="right")
    return np.asarray(below / (2 * len(ordered)))


class StoppingRanks:
    """Samples sorted by score at every exit but the last, to compute the EEFP of many policies from one sort."""

    def __init__(self, scores: Any, correct: Any) -> None:
        """Check and sort scores (K, n) against correct (K, n)."""
        values = to_array("scores", scores)
        right = stopping_is_right(to_array("correct", correct))
        if values.shape != right.shape or not np.issubdtype(values.dtype, np.number):
            raise InputError(
                f"`scores` must be numbers {right.shape} like `correct`, but got {values.dtype} {values.shape}"
            )
        if np.isnan(values).any():
            raise InputError("`scores` must be numbers, but some are NaN")
        self._order = np.argsort(-values[:-1], axis=1, kind="stable")
        self._scores = np.take_along_axis(values[:-1], self._order, axis=1)
        self._right = np.take_along_axis(right[:-1], self._order, axis=1).astype(np.float64)

    def per_exit(self, exits: Any = None) -> tuple[float | None, ...]:
        """Return the areas (K - 1,), over the samples that reach each exit if the `exits` (n,) taken are given."""
        return tuple(area for area, _ in self._areas(exits))

    def mean(self, exits: Any = None) -> float | None:
        """Return the mean of the areas that are defined; with `exits`, weighted by the samples that reach each exit."""
        pairs = [(area, reached) for area, reached in self._areas(exits) if area is not None]
        total = sum(reached for _, reached in pairs)
        return sum(area * reached for area, reached in pairs) / total if total else None

    def _areas(self, exits: Any) -> list[tuple[float | None, int]]:
        """Return the area and the number of samples that reach it, for every exit but the last."""
        samples = self._order.shape[1]
        taken = None if exits is None else to_array("exits", exits)
        if taken is not None and (taken.shape != (samples,) or not np.issubdtype(taken.dtype, np.integer)):
            raise InputError(f"`exits` must be {samples} whole numbers, but got {taken.dtype} {taken.shape}")
        areas: list[tuple[float | None, int]] = []
        for k, (order, scores, right) in enumerate(zip(self._order, self._scores, self._right, strict=True)):
            if taken is not None:
                reached = taken[order] >= k
                scores, right = scores[reached], right[reached]
            area = sorted_auroc(scores, right) if len(right) else float("nan")
            areas.append((None if np.isnan(area) else area, len(right)))
        return areas
