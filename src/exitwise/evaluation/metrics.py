"""Metrics of predictions: pure functions of predictions for n samples and their labels. NumPy only."""

from typing import Any

import numpy as np

from exitwise.core.predictions import Array
from exitwise.core.predictions import check_labels as check_labels
from exitwise.core.stopping import StoppingRanks as StoppingRanks
from exitwise.core.stopping import find_ties as _find_ties
from exitwise.core.stopping import sorted_auroc as _sorted_auroc
from exitwise.core.stopping import stopping_is_right as stopping_is_right
from exitwise.core.summaries import brier as _brier
from exitwise.core.summaries import log_true as _log_true
from exitwise.core.summaries import true_label_rank as _true_label_rank

BINS = 10


def log_prob_true(log_probs: Array, labels: Array) -> Array:
    """Return the log-probability (n,) of the true label; its negative mean is the NLPD.

    `log_true` is the former name.

    Args:
        log_probs: Log-probabilities (n, c).
        labels: True classes (n,).

    Returns:
        Log-probabilities (n,) of the true classes.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> ew.metrics.log_prob_true(np.log([[0.5, 0.5], [0.75, 0.25]]), np.array([0, 1])).round(2).tolist()
        [-0.69, -1.39]
    """
    return _log_true(log_probs, labels)


def true_label_rank(log_probs: Array, labels: Array) -> Array:
    """Return the rank (n,) of the true label: the number of classes that are more probable; 0 is correct.

    Among classes of equal probability the first one ranks first. `rank` is the former name.

    Args:
        log_probs: Log-probabilities (n, c).
        labels: True classes (n,).

    Returns:
        Ranks (n,), 0 to c - 1.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> ew.metrics.true_label_rank(np.log([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), np.array([0, 2])).tolist()
        [0, 2]
    """
    return _true_label_rank(log_probs, labels)


log_true = log_prob_true
rank = true_label_rank


def brier(probs: Array, labels: Array) -> Array:
    """Return the Brier score (n,): the squared distance between the probabilities and the one-hot label.

    Args:
        probs: Probabilities (n, c).
        labels: True classes (n,).

    Returns:
        Brier scores (n,), 0 to 2.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> ew.metrics.brier(np.array([[0.5, 0.5], [0.0, 1.0]]), np.array([0, 0])).tolist()
        [0.5, 2.0]
    """
    return _brier(probs, labels)


def bin_of(confidence: Array, bins: int = BINS) -> Array:
    """Return the bin of equal width that each confidence falls into.

    Bins are closed below; a confidence of 1 falls into the last.

    Args:
        confidence: Confidences (n,), 0 to 1.
        bins: Number of bins.

    Returns:
        Bins (n,), 0 to `bins` - 1.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> ew.metrics.bin_of(np.array([0.05, 0.5, 1.0])).tolist()
        [0, 5, 9]
    """
    return np.minimum((confidence * bins).astype(np.int64), bins - 1)


def ece(confidence: Array, correct: Array, bins: int = BINS) -> float:
    """Expected calibration error over bins of equal width, from confidence (n,) and correct (n,).

    Args:
        confidence: Confidences (n,), 0 to 1.
        correct: Whether each prediction is correct (n,).
        bins: Number of bins.

    Returns:
        Mean over samples of the gap between confidence and accuracy in the sample's bin.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> ew.metrics.ece(np.array([0.75, 0.75, 1.0, 1.0]), np.array([True, True, True, True]))
        0.125
    """
    gap = np.bincount(bin_of(confidence, bins), weights=confidence - correct.astype(np.float64), minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def adaptive_ece(confidence: Array, correct: Array, bins: int = BINS) -> float:
    """Expected calibration error over bins with equal numbers of samples, from confidence (n,) and correct (n,).

    Args:
        confidence: Confidences (n,), 0 to 1.
        correct: Whether each prediction is correct (n,).
        bins: Number of bins.

    Returns:
        Mean over samples of the gap between confidence and accuracy in the sample's bin.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> ew.metrics.adaptive_ece(np.array([0.5, 0.75, 1.0, 1.0]), np.array([True, True, True, True]), bins=2)
        0.1875
    """
    return _sorted_adaptive_ece(*_sort_by_confidence(confidence, correct), bins=bins)


def auroc(confidence: Array, correct: Array) -> float:
    """Area under the ROC curve of detecting correct predictions by confidence, from confidence (n,) and correct (n,).

    This is the probability that a correct prediction has a higher confidence than a wrong one.

    Args:
        confidence: Confidences (n,).
        correct: Whether each prediction is correct (n,).

    Returns:
        The area, 0 to 1; NaN if all predictions are correct or all are wrong.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> ew.metrics.auroc(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, False, True, False]))
        0.75
    """
    return _sorted_auroc(*_sort_by_confidence(confidence, correct))


def aurc(confidence: Array, correct: Array) -> float:
    """Area under the risk-coverage curve, from confidence (n,) and correct (n,).

    This is the mean over m = 1..n of the error rate among the m most confident predictions.

    Args:
        confidence: Confidences (n,).
        correct: Whether each prediction is correct (n,).

    Returns:
        The area, 0 to 1; smaller is better.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> ew.metrics.aurc(np.array([0.9, 0.6]), np.array([True, False]))
        0.25
    """
    return _sorted_aurc(*_sort_by_confidence(confidence, correct))


def ranking_metrics(confidence: Array, correct: Array) -> dict[str, float]:
    """Return adaptive ECE, AUROC and AURC from a single sort of confidence (n,) and correct (n,).

    Args:
        confidence: Confidences (n,), 0 to 1.
        correct: Whether each prediction is correct (n,).

    Returns:
        The metrics "adaptive_ece", "auroc" and "aurc".

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> sorted(ew.metrics.ranking_metrics(np.array([0.9, 0.6]), np.array([True, False])))
        ['adaptive_ece', 'aurc', 'auroc']
    """
    ordered = _sort_by_confidence(confidence, correct)
    return {
        "adaptive_ece": _sorted_adaptive_ece(*ordered, bins=BINS),
        "auroc": _sorted_auroc(*ordered),
        "aurc": _sorted_aurc(*ordered),
    }


def eefp(scores: Any, correct: Any, exits: Any = None) -> float | None:
    """Early-exit failure prediction: area under the ROC curve of detecting, by the exit score, where stopping is right.

    Stopping is right at an exit that is correct, and at an exit after which every later exit is wrong. A calibrated
    confidence says whether an exit is correct; this metric says whether its score picks the samples that should stop.

    The result is the mean of `eefp_per_exit` over all exits but the last: over all samples or, with the `exits` that a
    policy chose, over the samples that reach each exit, with exits weighted by their number.

    Args:
        scores: Scores (K, n), larger for more certain samples.
        correct: Whether each exit is correct (K, n).
        exits: Exit (n,) that each sample takes; by default every sample visits every exit.

    Returns:
        The area, 0 to 1; None if it is undefined at every exit, as with a single exit.

    Raises:
        InputError: If shapes do not match, or a score is NaN.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> scores = np.array([[0.9, 0.8, 0.7, 0.6], [0.9, 0.9, 0.9, 0.9]])
        >>> correct = np.array([[True, False, True, False], [True, True, False, False]])
        >>> round(ew.metrics.eefp(scores, correct), 4)  # only the second sample should continue
        0.3333
    """
    return StoppingRanks(scores, correct).mean(exits)


def eefp_per_exit(scores: Any, correct: Any, exits: Any = None) -> tuple[float | None, ...]:
    """Area under the ROC curve of detecting by the exit score where stopping is right, at every exit but the last.

    Ties count one half. At the last exit stopping is always right, so it has no such area.

    Args:
        scores: Scores (K, n), larger for more certain samples.
        correct: Whether each exit is correct (K, n).
        exits: Exit (n,) that each sample takes, to use only the samples that reach each exit.

    Returns:
        Areas (K - 1,); None at an exit where stopping is right for all samples or for none, or that none reaches.

    Raises:
        InputError: If shapes do not match, or a score is NaN.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> scores = np.array([[0.9, 0.8], [0.9, 0.9]])
        >>> ew.metrics.eefp_per_exit(scores, np.array([[True, False], [True, True]]))
        (1.0,)
    """
    return StoppingRanks(scores, correct).per_exit(exits)


def _sort_by_confidence(confidence: Array, correct: Array) -> tuple[Array, Array]:
    """Return both as float64 (n,), the most confident first."""
    order = np.argsort(-confidence)
    return confidence[order].astype(np.float64), correct[order].astype(np.float64)


def _sorted_adaptive_ece(confidence: Array, correct: Array, bins: int) -> float:
    edges = np.linspace(0, len(confidence), bins + 1).astype(np.int64)
    starts, sizes = _find_ties(confidence)
    expected = np.repeat(np.add.reduceat(correct, starts) / sizes, sizes)  # the order of ties is arbitrary
    sums = np.concatenate([[0.0], np.cumsum(confidence - expected)])
    return float(np.abs(np.diff(sums[edges])).sum() / len(confidence))


def _sorted_aurc(confidence: Array, correct: Array) -> float:
    starts, sizes = _find_ties(confidence)
    # The order of ties is arbitrary: each gets the error rate of its run.
    error = np.repeat(1 - np.add.reduceat(correct, starts) / sizes, sizes)
    return float((np.cumsum(error) / np.arange(1, len(error) + 1)).mean())
