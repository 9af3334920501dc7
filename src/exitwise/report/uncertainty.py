"""Uncertainty against error at every exit: density, histograms, and the samples shown as points. NumPy only.

Uncertainty is the entropy of the predictive, error is 1 - p(true label). Samples with an error above one half are
tricky if the entropy is below half of its maximum, log c, and hard otherwise. Samples with a small error at low entropy
are easy.
"""

from math import log
from typing import Any

import numpy as np

from exitwise.core.predictions import Array
from exitwise.report.budget_explorer import GALLERY_SIZE
from exitwise.report.evaluated_model import EvaluatedModel, reliability_bins

MAX_POINTS = 2000
BINS = 30
CELLS = (36, 27)  # of the density, along uncertainty and error


def choose_points(samples: int, seed: int = 0) -> Array:
    """Return sorted positions of the samples shown as points: all of them, or `MAX_POINTS` at random."""
    if samples <= MAX_POINTS:
        return np.arange(samples)
    return np.sort(np.random.default_rng(seed).choice(samples, MAX_POINTS, replace=False))


def exit_statistics(model: EvaluatedModel, classes: int) -> list[dict[str, Any]]:
    """Compute histograms, density, categories and metrics of each exit from all samples."""
    max_entropy = log(max(classes, 2))
    statistics = []
    for k, (entropy, error, correct) in enumerate(zip(model.entropy, model.error, model.correct, strict=True)):
        capped = np.minimum(entropy, max_entropy)
        density, _, _ = np.histogram2d(capped, error, bins=CELLS, range=((0, max_entropy), (0, 1)))
        high = error > 0.5
        categories = sample_categories(entropy, error, max_entropy)
        statistics.append(
            {
                "metrics": model.per_sample.per_exit[k].to_dict(),
                "density": density.astype(int).tolist(),
                "high_error": _entropy_histogram(entropy[high], max_entropy),
                "high_error_share": float(high.mean()),
                "correct": _entropy_histogram(entropy[correct], max_entropy),
                "wrong": _entropy_histogram(entropy[~correct], max_entropy),
                "categories": {name: int(mask.sum()) for name, mask in categories.items()},
                "reliability": reliability_bins(model.per_sample.confidence[k], correct),
            }
        )
    return statistics


def _entropy_histogram(entropy: Array, max_entropy: float) -> list[int]:
    counts, _ = np.histogram(np.minimum(entropy, max_entropy), bins=BINS, range=(0, max_entropy))
    return [int(n) for n in counts]


def sample_categories(entropy: Array, error: Array, max_entropy: float) -> dict[str, Array]:
    """Return masks (n,) of the easy, hard and tricky samples, from entropy (n,) and error (n,)."""
    certain, wrong = entropy < max_entropy / 2, error > 0.5
    return {"easy": certain & ~wrong, "hard": ~certain & wrong, "tricky": certain & wrong}


def choose_gallery_points(model: EvaluatedModel, classes: int, points: Array) -> dict[str, list[int]]:
    """Choose the most extreme points of each category at the last exit, as positions in `points`."""
    max_entropy = log(max(classes, 2))
    entropy, error = model.entropy[-1][points], model.error[-1][points]
    extremeness = {
        "easy": -entropy / max_entropy - error,
        "hard": entropy / max_entropy + error,
        "tricky": error - entropy / max_entropy,
    }
    return {
        name: [int(i) for i in np.argsort(-extremeness[name], kind="stable") if mask[i]][:GALLERY_SIZE]
        for name, mask in sample_categories(entropy, error, max_entropy).items()
    }


def point_predictions(model: EvaluatedModel, points: Array) -> dict[str, Any]:
    """Return each exit's prediction for the points; values are whole thousandths, which keeps the page small."""

    def thousandths(values: Array) -> list[list[int]]:
        return [[int(v) for v in np.rint(row[points] * 1000)] for row in values]

    return {
        "entropy": thousandths(model.entropy),
        "error": thousandths(model.error),
        "confidence": thousandths(model.per_sample.confidence),
        "predicted": model.preds.predicted[:, points].tolist(),
    }
