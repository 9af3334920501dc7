"""A model and its per-sample test metrics; the report compares two: vanilla and calibrated. NumPy only."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from exitwise.calibration.trace import Split
from exitwise.core.predictions import Array, Predictions
from exitwise.evaluation.evaluate import PerSampleMetrics
from exitwise.evaluation.metrics import BINS, StoppingRanks, bin_of
from exitwise.policies.learned_score import LearnedScore
from exitwise.policies.policy import Policy
from exitwise.policies.scores import exit_scores
from exitwise.runs.policies import CalibratedSplits


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """Predictions of every exit for every test sample, and their metrics; all arrays (K, n)."""

    splits: CalibratedSplits
    preds: Predictions
    per_sample: PerSampleMetrics

    @classmethod
    def of(cls, splits: CalibratedSplits, test: Split, preds: Predictions | None = None) -> "EvaluatedModel":
        """Evaluate a calibration on the test split, from its predictions if they are known."""
        preds = splits.calibration.predict(test) if preds is None else preds
        return cls(splits, preds, PerSampleMetrics.of(preds, test.labels.numpy()))

    def stopping_ranks(self, policy: Policy) -> StoppingRanks:
        """Return the ranks that the EEFP of a policy is computed from; those of a score are computed once."""
        key = (policy.score, policy.score_model)
        if key not in self._stopping_ranks:
            self._stopping_ranks[key] = self.per_sample.stopping_ranks(policy.scores(self.preds))
        return self._stopping_ranks[key]

    @cached_property
    def _stopping_ranks(self) -> dict[tuple[str, LearnedScore | None], StoppingRanks]:
        return {}

    @cached_property
    def entropy(self) -> Array:
        """Entropy of the predictive distribution (K, n): the uncertainty of the paper's plots."""
        return np.maximum(-exit_scores(self.preds, "entropy"), 0).astype(np.float32)

    @cached_property
    def error(self) -> Array:
        """1 - p(true label), (K, n)."""
        return 1 - np.exp(self.per_sample.log_true)

    @cached_property
    def correct(self) -> Array:
        """Mask (K, n) of correct predictions."""
        return np.asarray(self.per_sample.rank == 0)


def reliability_bins(confidence: Array, correct: Array) -> dict[str, Any]:
    """Return the number of samples, mean confidence and accuracy per bin of confidence; both inputs are (n,)."""
    bins = bin_of(confidence)
    count = np.bincount(bins, minlength=BINS)
    sums = (np.bincount(bins, weights=values, minlength=BINS) for values in (confidence, correct))
    means = [[round(float(s / n), 6) if n else None for s, n in zip(sum_, count, strict=True)] for sum_ in sums]
    return {"count": count.tolist(), "confidence": means[0], "accuracy": means[1]}
