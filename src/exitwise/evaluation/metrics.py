"""How good predictions are: pure functions on what was said of n samples and what was true. NumPy alone."""

import numpy as np

from exitwise.core.predictions import Array
from exitwise.core.predictions import check_labels as check_labels
from exitwise.core.predictions import log_true as log_true

BINS = 10


def rank(log_probs: Array, labels: Array) -> Array:
    """(n,) how many classes stand before the true one, 0 being right; of equals the first class stands first.

    From log_probs (n, c) and labels (n,).
    """
    true = log_true(log_probs, labels)[:, None]
    before = (log_probs > true).sum(axis=1)
    tied = np.flatnonzero((log_probs == true).sum(axis=1) > 1)
    equal = (log_probs[tied] == true[tied]) & (np.arange(log_probs.shape[1]) < labels[tied, None])
    before[tied] += equal.sum(axis=1)
    return np.asarray(before)


def brier(probs: Array, labels: Array) -> Array:
    """(n,) squared distance between the probabilities (n, c) and the truth, labels (n,)."""
    return np.asarray(np.einsum("nc,nc->n", probs, probs) - 2 * probs[np.arange(len(labels)), labels] + 1)


def bin_of(confidence: Array, bins: int = BINS) -> Array:
    """(n,) the bin of equal width that each confidence (n,) is in, closed below; a confidence of 1 is in the last."""
    return np.minimum((confidence * bins).astype(np.int64), bins - 1)


def ece(confidence: Array, correct: Array, bins: int = BINS) -> float:
    """Expected calibration error over bins of equal width, from confidence (n,) and correct (n,)."""
    gap = np.bincount(bin_of(confidence, bins), weights=confidence - correct.astype(np.float64), minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def adaptive_ece(confidence: Array, correct: Array, bins: int = BINS) -> float:
    """The same over bins that hold equally many samples, from confidence (n,) and correct (n,)."""
    return _adaptive_ece(*_most_confident_first(confidence, correct), bins=bins)


def auroc(confidence: Array, correct: Array) -> float:
    """Probability that a right answer is held with more confidence than a wrong one; NaN where all are of one kind.

    From confidence (n,) and correct (n,).
    """
    return _auroc(*_most_confident_first(confidence, correct))


def aurc(confidence: Array, correct: Array) -> float:
    """Area under the risk-coverage curve: the mean, over how many are answered, of the error rate among those.

    From confidence (n,) and correct (n,).
    """
    return _aurc(*_most_confident_first(confidence, correct))


def ranking_metrics(confidence: Array, correct: Array) -> dict[str, float]:
    """Adaptive ECE, AUROC and AURC from one sort of confidence (n,) and correct (n,)."""
    ordered = _most_confident_first(confidence, correct)
    return {"adaptive_ece": _adaptive_ece(*ordered, bins=BINS), "auroc": _auroc(*ordered), "aurc": _aurc(*ordered)}


def _most_confident_first(confidence: Array, correct: Array) -> tuple[Array, Array]:
    order = np.argsort(-confidence)
    return confidence[order].astype(np.float64), correct[order].astype(np.float64)


def _ties(confidence: Array) -> tuple[Array, Array]:
    """Start and size of every run of equal values."""
    starts = np.flatnonzero(np.concatenate([[True], confidence[1:] != confidence[:-1]]))
    return starts, np.diff(np.append(starts, len(confidence)))


def _adaptive_ece(confidence: Array, correct: Array, bins: int) -> float:
    edges = np.linspace(0, len(confidence), bins + 1).astype(np.int64)
    starts, sizes = _ties(confidence)
    expected = np.repeat(np.add.reduceat(correct, starts) / sizes, sizes)  # among equals the order is chance
    sums = np.concatenate([[0.0], np.cumsum(confidence - expected)])
    return float(np.abs(np.diff(sums[edges])).sum() / len(confidence))


def _auroc(confidence: Array, correct: Array) -> float:
    right = float(correct.sum())
    wrong = len(correct) - right
    if not right or not wrong:
        return float("nan")
    starts, sizes = _ties(confidence)
    right_here = np.add.reduceat(correct, starts)
    wrong_here = sizes - right_here
    wrong_below = wrong - np.cumsum(wrong_here)
    return float((right_here * (wrong_below + wrong_here / 2)).sum() / (right * wrong))


def _aurc(confidence: Array, correct: Array) -> float:
    starts, sizes = _ties(confidence)
    # Among equals the order is chance: each carries the error rate of its run.
    error = np.repeat(1 - np.add.reduceat(correct, starts) / sizes, sizes)
    return float((np.cumsum(error) / np.arange(1, len(error) + 1)).mean())
