"""Bootstrap intervals for metrics of n samples. NumPy only."""

from functools import cached_property

import numpy as np

from exitwise.core.predictions import Array
from exitwise.evaluation.evaluate import TOP, PerSampleMetrics
from exitwise.evaluation.metrics import BINS, bin_of

LEVEL = 0.95
_PART = 20_000_000  # weights converted to float32 at a time


class Bootstrap:
    """Paired bootstrap: every statistic uses the same resamples of the n samples."""

    def __init__(self, samples: int, repeats: int = 1000, seed: int = 0) -> None:
        """Prepare R = `repeats` resamples of n = `samples` samples; they are drawn when first needed."""
        self._samples, self._repeats, self._seed = samples, repeats, seed

    def resampled_metrics(self, columns: Array) -> dict[str, Array]:
        """Return each metric (R,) on each resample, from the columns of `metric_columns`.

        Noise increases an ECE, and a resample adds noise to that of the samples themselves. The values of the ECE are
        therefore moved to have the ECE of the samples as their mean.
        """
        resampled = _metrics_from_means(self.resampled_means(columns))
        ece = _metrics_from_means(columns.mean(axis=0, keepdims=True))["ece"]
        return {**resampled, "ece": np.maximum(resampled["ece"] - resampled["ece"].mean() + ece, 0)}

    def resampled_means(self, columns: Array) -> Array:
        """Return the means (R, m) of columns (n, m) over each of R resamples."""
        table = np.ascontiguousarray(columns, dtype=np.float32)
        rows = max(1, _PART // self._samples)
        parts = [self._counts[start : start + rows] for start in range(0, self._repeats, rows)]
        return np.concatenate([part.astype(np.float32) @ table for part in parts]) / np.float32(self._samples)

    @cached_property
    def _counts(self) -> Array:
        """Number (R, n) of times that each resample contains each sample; 255 is never exceeded."""
        rng = np.random.default_rng(self._seed)
        counts = np.empty((self._repeats, self._samples), dtype=np.uint8)
        for row in counts:
            row[:] = np.bincount(rng.integers(0, self._samples, self._samples), minlength=self._samples)
        return counts


_MEANS = ("cost", "top1", "top5", "nlpd")


def metric_columns(outcomes: PerSampleMetrics, exits: Array, costs: Array) -> Array:
    """Return columns (n, 4 + bins) whose means give the metrics at the exits (n,) taken.

    The columns are cost, top-1, top-5, NLPD, and the gap between confidence and correctness in each bin of the ECE.
    """
    taken = (exits, np.arange(len(exits)))
    rank = outcomes.rank[taken]
    gaps = np.zeros((len(exits), BINS))
    gaps[taken[1], bin_of(outcomes.confidence[taken])] = outcomes.confidence[taken].astype(np.float64) - (rank == 0)
    return np.column_stack([costs[exits], rank == 0, rank < TOP, -outcomes.log_true[taken], gaps])


def _metrics_from_means(means: Array) -> dict[str, Array]:
    """Return each metric (R,) from means (R, 4 + bins) of the columns of `metric_columns`."""
    return {**dict(zip(_MEANS, means.T, strict=False)), "ece": np.abs(means[:, len(_MEANS) :]).sum(axis=1)}


def percentile_interval(values: Array) -> tuple[float, float]:
    """Return the interval that contains the middle 95 % of the values (R,)."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
