"""Intervals for metrics of n samples, by drawing the samples again. NumPy alone."""

from functools import cached_property

import numpy as np

from exitwise.core.predictions import Array
from exitwise.evaluation.evaluate import TOP, PerSampleMetrics
from exitwise.evaluation.metrics import BINS, bin_of

LEVEL = 0.95
_PART = 20_000_000  # weights as numbers to compute with, at a time


class Bootstrap:
    """The same draws for everything that is asked of n samples, so that differences are of pairs."""

    def __init__(self, samples: int, repeats: int = 1000, seed: int = 0) -> None:
        self._samples, self._repeats, self._seed = samples, repeats, seed

    def resampled_metrics(self, columns: Array) -> dict[str, Array]:
        """(R,) each metric over each draw, from what `columns` gives.

        Noise adds to an ECE, in a draw once more than in the samples themselves: its values are moved to have the
        samples' own as their mean.
        """
        drawn = _metrics(self.resampled_means(columns))
        own = _metrics(columns.mean(axis=0, keepdims=True))["ece"]
        return {**drawn, "ece": np.maximum(drawn["ece"] - drawn["ece"].mean() + own, 0)}

    def resampled_means(self, columns: Array) -> Array:
        """(R, m) means of columns (n, m) over each of R draws of n samples."""
        table = np.ascontiguousarray(columns, dtype=np.float32)
        rows = max(1, _PART // self._samples)
        parts = [self._counts[start : start + rows] for start in range(0, self._repeats, rows)]
        return np.concatenate([part.astype(np.float32) @ table for part in parts]) / np.float32(self._samples)

    @cached_property
    def _counts(self) -> Array:
        """(R, n) how often each draw has each sample; never more than 255 times."""
        rng = np.random.default_rng(self._seed)
        counts = np.empty((self._repeats, self._samples), dtype=np.uint8)
        for row in counts:
            row[:] = np.bincount(rng.integers(0, self._samples, self._samples), minlength=self._samples)
        return counts


_MEANS = ("cost", "top1", "top5", "nlpd")


def metric_columns(outcomes: PerSampleMetrics, exits: Array, costs: Array) -> Array:
    """(n, 4 + bins) what metrics at the exits (n,) taken are means of, with the gaps that make up the ECE."""
    at = (exits, np.arange(len(exits)))
    rank = outcomes.rank[at]
    gaps = np.zeros((len(exits), BINS))
    gaps[at[1], bin_of(outcomes.confidence[at])] = outcomes.confidence[at].astype(np.float64) - (rank == 0)
    return np.column_stack([costs[exits], rank == 0, rank < TOP, -outcomes.log_true[at], gaps])


def _metrics(means: Array) -> dict[str, Array]:
    """(R,) each metric, from means (R, 4 + bins) of such columns."""
    return {**dict(zip(_MEANS, means.T, strict=False)), "ece": np.abs(means[:, len(_MEANS) :]).sum(axis=1)}


def percentile_interval(values: Array) -> tuple[float, float]:
    """The middle 95 % of what came out."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
