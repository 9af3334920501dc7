"""Intervals for means over samples, by drawing the samples again. NumPy alone."""

from collections.abc import Iterator

import numpy as np

from exitwise.predictions import Array

LEVEL = 0.95
_HELD = 20_000_000  # weights at a time


class Bootstrap:
    """The same draws for everything that is asked of n samples, so that differences are of pairs."""

    def __init__(self, samples: int, repeats: int = 1000, seed: int = 0) -> None:
        self._samples, self._repeats, self._seed = samples, repeats, seed

    def means(self, columns: Array) -> Array:
        """(R, m) means of columns (n, m) over each of R draws of n samples."""
        table = np.ascontiguousarray(columns, dtype=np.float32)
        return np.concatenate([weights @ table for weights in self._weights()])

    def _weights(self) -> Iterator[Array]:
        """(r, n) how often each draw has each sample, divided by n; as many draws as fit in memory at a time."""
        rng = np.random.default_rng(self._seed)
        part = max(1, _HELD // self._samples)
        for start in range(0, self._repeats, part):
            rows = min(part, self._repeats - start)
            weights = np.empty((rows, self._samples), dtype=np.float32)
            for row in weights:
                row[:] = np.bincount(rng.integers(0, self._samples, self._samples), minlength=self._samples)
            yield weights / self._samples


def interval(values: Array) -> tuple[float, float]:
    """The middle 95 % of what came out."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
