"""Uncertainty against error at every exit: density, histograms, and the samples that are shown as points. NumPy alone.

Uncertainty is the entropy of the predictive, error is 1 - p(true label). Errors above one half are tricky where the
entropy is below half of its largest value, log c, and hard above it; small errors at low entropy are easy.
"""

from math import log
from typing import Any

import numpy as np

from exitwise.core.predictions import Array
from exitwise.report.budget_explorer import GALLERY_SIZE
from exitwise.report.evaluated_model import EvaluatedModel, reliability

POINTS = 2000
BINS = 30
CELLS = (36, 27)  # of the density, along uncertainty and error


def sample(samples: int, seed: int = 0) -> Array:
    """Positions of the samples shown as points: all of them, or as many as fit, in their order."""
    if samples <= POINTS:
        return np.arange(samples)
    return np.sort(np.random.default_rng(seed).choice(samples, POINTS, replace=False))


def exit_statistics(side: EvaluatedModel, classes: int) -> list[dict[str, Any]]:
    """What the plots and diagrams of each exit show, from all samples."""
    most = log(max(classes, 2))
    found = []
    for k, (entropy, error, right) in enumerate(zip(side.entropy, side.error, side.correct, strict=True)):
        cells, _, _ = np.histogram2d(np.minimum(entropy, most), error, bins=CELLS, range=((0, most), (0, 1)))
        high = error > 0.5
        found.append(
            {
                "metrics": side.outcomes.per_exit[k].to_dict(),
                "density": cells.astype(int).tolist(),
                "erring": _histogram(entropy[high], most),
                "erring_share": float(high.mean()),
                "correct": _histogram(entropy[right], most),
                "wrong": _histogram(entropy[~right], most),
                "kinds": {name: int(which.sum()) for name, which in sample_categories(entropy, error, most).items()},
                "reliability": reliability(side.outcomes.confidence[k], right),
            }
        )
    return found


def _histogram(entropy: Array, most: float) -> list[int]:
    return [int(n) for n in np.histogram(np.minimum(entropy, most), bins=BINS, range=(0, most))[0]]


def sample_categories(entropy: Array, error: Array, most: float) -> dict[str, Array]:
    """(n,) which samples are easy, hard and tricky."""
    sure, wrong = entropy < most / 2, error > 0.5
    return {"easy": sure & ~wrong, "hard": ~sure & wrong, "tricky": sure & wrong}


def galleries(side: EvaluatedModel, classes: int, points: Array) -> dict[str, list[int]]:
    """Of the points, the plainest of each kind, as the last exit sees them."""
    most = log(max(classes, 2))
    entropy, error = side.entropy[-1][points], side.error[-1][points]
    plainness = {
        "easy": -entropy / most - error,
        "hard": entropy / most + error,
        "tricky": error - entropy / most,
    }
    return {
        name: [int(i) for i in np.argsort(-plainness[name], kind="stable") if which[i]][:GALLERY_SIZE]
        for name, which in sample_categories(entropy, error, most).items()
    }


def point_predictions(side: EvaluatedModel, points: Array) -> dict[str, Any]:
    """What each exit says of the points, in whole thousandths: the page has room for no more."""

    def thousandths(values: Array) -> list[list[int]]:
        return [[int(v) for v in np.rint(row[points] * 1000)] for row in values]

    return {
        "entropy": thousandths(side.entropy),
        "error": thousandths(side.error),
        "confidence": thousandths(side.outcomes.confidence),
        "predicted": side.preds.predicted[:, points].tolist(),
    }
