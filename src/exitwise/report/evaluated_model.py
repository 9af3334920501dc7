"""What the report sets side by side: the plain net and the calibrated one, on the same test samples. NumPy alone."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from exitwise.calibration.trace import Split
from exitwise.core.predictions import Array, Predictions
from exitwise.evaluation.evaluate import PerSampleMetrics
from exitwise.evaluation.metrics import BINS, bin_of
from exitwise.policies.scores import exit_scores
from exitwise.runs.policies import CalibratedSplits


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """What every exit says of every test sample, and what came of it; all arrays (K, n)."""

    name: str
    tuned: CalibratedSplits
    preds: Predictions
    outcomes: PerSampleMetrics

    @classmethod
    def of(cls, tuned: CalibratedSplits, test: Split) -> "EvaluatedModel":
        preds = tuned.calibration.predict(test)
        return cls(tuned.calibration.method.name, tuned, preds, PerSampleMetrics.of(preds, test.labels.numpy()))

    @cached_property
    def entropy(self) -> Array:
        """The uncertainty of the paper's plots."""
        return np.maximum(-exit_scores(self.preds, "entropy"), 0).astype(np.float32)

    @cached_property
    def error(self) -> Array:
        """1 - p(true label)."""
        return 1 - np.exp(self.outcomes.log_true)

    @cached_property
    def correct(self) -> Array:
        return np.asarray(self.outcomes.rank == 0)


def reliability(confidence: Array, right: Array) -> dict[str, Any]:
    """Of samples (n,): how many fall into each bin of confidence, and their mean confidence and accuracy there."""
    bins = bin_of(confidence)
    count = np.bincount(bins, minlength=BINS)
    sums = (np.bincount(bins, weights=values, minlength=BINS) for values in (confidence, right))
    means = [[round(float(s / n), 6) if n else None for s, n in zip(sum_, count, strict=True)] for sum_ in sums]
    return {"count": count.tolist(), "confidence": means[0], "accuracy": means[1]}
