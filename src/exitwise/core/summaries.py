"""Summaries of predictions for evaluation, policies and the report: a few numbers per sample and exit. NumPy only.

Predictions (K, n, c) of many samples and classes do not fit in memory, their summaries (K, n) do. All of them are
computed in one pass.
"""

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from exitwise.core.exit_prediction import Array, ExitPrediction
from exitwise.core.ties import hash_probs, spread_ties

OF_TRUE_LABEL = frozenset({"log_true", "rank", "brier"})
OF_CONFIDENCE = frozenset({"predicted", "largest", "tie hashes", "confidence"})
SUMMARIES = OF_CONFIDENCE | {"entropy", "margin", "learned summaries"}
_DERIVED = {"confidence": "largest", "entropy": "entropy", "margin": "margin"}  # scores, whose ties the hashes break


def negative_entropy(pred: ExitPrediction) -> Array:
    """Return sum p log p over the classes of each sample (n,)."""
    return np.asarray(np.einsum("nc,nc->n", pred.probs, pred.log_probs))


def log_true(log_probs: Array, labels: Array) -> Array:
    """Return log p(true label) (n,) from log-probabilities (n, c) and labels (n,); its mean is minus the NLPD."""
    return np.asarray(log_probs[np.arange(len(labels)), labels])


def true_label_rank(log_probs: Array, labels: Array) -> Array:
    """Return the number (n,) of classes that are more probable than the true label; the first of equals counts."""
    true = log_true(log_probs, labels)[:, None]
    ranks = np.count_nonzero(log_probs > true, axis=1)
    tied = np.flatnonzero(np.count_nonzero(log_probs == true, axis=1) > 1)
    equal = (log_probs[tied] == true[tied]) & (np.arange(log_probs.shape[1]) < labels[tied, None])
    ranks[tied] += equal.sum(axis=1)
    return np.asarray(ranks)


def brier(probs: Array, labels: Array) -> Array:
    """Return the squared distance (n,) between the probabilities (n, c) and the one-hot label."""
    return np.asarray(np.einsum("nc,nc->n", probs, probs) - 2 * probs[np.arange(len(labels)), labels] + 1)


def top_three(probs: Array) -> Array:
    """Return the three largest probabilities of each sample (n, 3) and its first most probable class, as (n, 4).

    Missing probabilities of nets with fewer than three classes are 0.
    """
    summary = np.zeros((len(probs), 4))
    rows, remaining = np.arange(len(probs)), probs.copy()
    for place in range(min(probs.shape[1], 3)):
        largest = remaining.argmax(axis=1)
        summary[:, place] = remaining[rows, largest]
        if place == 0:
            summary[:, 3] = largest
        remaining[rows, largest] = -1
    return summary


def summarize(pred: ExitPrediction, labels: Array | None, keys: Collection[str]) -> dict[str, Array]:
    """Compute summaries (n, ...) of one exit by key.

    Args:
        pred: Prediction of the exit, without its variance.
        labels: True classes (n,), for the keys of `OF_TRUE_LABEL`.
        keys: What to compute, some of `SUMMARIES` and `OF_TRUE_LABEL`.
    """
    summaries: dict[str, Array] = {}
    if "predicted" in keys:
        summaries["predicted"] = pred.log_probs.argmax(axis=1)
    if "largest" in keys:
        summaries["largest"] = pred.probs.max(axis=1)
    if "tie hashes" in keys:
        summaries["tie hashes"] = hash_probs(pred.probs)
    if "entropy" in keys:
        summaries["entropy"] = negative_entropy(pred)
    if "learned summaries" in keys:
        top = top_three(pred.probs)
        summaries["learned summaries"] = top
        first, second = top[:, 0].astype(pred.probs.dtype), top[:, 1].astype(pred.probs.dtype)
        summaries["margin"] = first - second
    if labels is not None and "rank" in keys:
        summaries["log_true"] = log_true(pred.log_probs, labels)
        summaries["rank"] = true_label_rank(pred.log_probs, labels)
        summaries["brier"] = brier(pred.probs, labels)
    return summaries


class SummaryTable:
    """Summaries (K, n, ...) that are filled block by block."""

    def __init__(self, num_exits: int, num_samples: int, labels: Array | None, keys: Iterable[str]) -> None:
        self._shape, self._labels, self._keys = (num_exits, num_samples), labels, frozenset(keys)
        self._values: dict[str, Array] = {}

    def add(self, exit: int, samples: slice, pred: ExitPrediction) -> None:
        """Summarize the prediction of one exit for some of the samples."""
        labels = None if self._labels is None else self._labels[samples]
        for key, values in summarize(pred, labels, self._keys).items():
            if key not in self._values:
                self._values[key] = np.empty((*self._shape, *values.shape[1:]), dtype=values.dtype)
            self._values[key][exit, samples] = values

    def result(self) -> Mapping[str, Array]:
        """Return the summaries by key; ties of scores are broken."""
        scores = {
            key: spread_ties(self._values[source], self._values["tie hashes"])
            for key, source in _DERIVED.items()
            if source in self._values and "tie hashes" in self._values
        }
        return self._values | scores
