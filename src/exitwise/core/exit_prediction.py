"""Prediction of one exit. NumPy only."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ExitPrediction:
    """Prediction of one exit on n samples.

    Args:
        probs: Probabilities (n, c).
        log_probs: Their logarithms (n, c). By default computed from `probs` on first use, since most scores do not need
            them; a zero then counts as the smallest normal number.
        variance: Variance over draws (n,), None for methods without draws.
    """

    def __init__(self, probs: Array, log_probs: Array | None = None, variance: Array | None = None) -> None:
        self.probs = probs
        self.variance = variance
        self._log_probs = log_probs

    @property
    def log_probs(self) -> Array:
        """Log-probabilities (n, c)."""
        if self._log_probs is None:
            self._log_probs = np.log(np.maximum(self.probs, np.finfo(self.probs.dtype).tiny))
        return self._log_probs

    @classmethod
    def from_log_probs(cls, log_probs: Array) -> "ExitPrediction":
        """Make a prediction from log-probabilities (n, c)."""
        return cls(np.exp(log_probs), log_probs)

    def with_variance(self, variance: Array) -> "ExitPrediction":
        """Return the prediction with the variance over draws (n,)."""
        return ExitPrediction(self.probs, self._log_probs, variance)

    def take(self, rows: Array) -> "ExitPrediction":
        """Return the prediction for some samples, by their positions, without the variance."""
        return ExitPrediction(self.probs[rows], None if self._log_probs is None else self._log_probs[rows])
