"""Calibrators of one exit by other authors: scalings of the logits, and maps of the largest probability.

All are fitted on validation logits (n, c) in float64. The scalings minimize the NLPD, which is convex:

- temperature: beta z, with beta = 1 / T between 0.05 and 20 (Guo et al., 2017);
- vector, matrix: beta z + v * beta z + b, or beta z + M beta z + b (Guo et al., 2017), with a ridge penalty on v, M and
  b, so that few samples give back temperature alone;
- Dirichlet: the same as matrix on log p instead of z (Kull et al., 2019), with hardly any penalty on the diagonal of M;
- ETS: w1 softmax(beta z) + w2 softmax(z) + w3 / c (Zhang et al., 2020).

The penalties are those of structured matrix scaling (Berta et al., 2026): c (c - 1) / n times the squares of the
off-diagonal numbers, c / n times those of the others. They are not tuned.

Isotonic regression and histograms map the largest probability to the share of correct predictions. The other
probabilities share the rest in their old ratios. Where one of them would then be above that of the predicted class,
they are mixed with the uniform distribution until it is not, so that the predicted class stays the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exitwise.calibration.ensembles import MIN_LOG_PROB
from exitwise.calibration.pool import OWN_WEIGHT_BOUNDS
from exitwise.core.predictions import Array
from exitwise.rival_methods.solver import cross_entropy, minimize

BINS = 15  # of the histogram, with equal numbers of samples
MAX_MATRIX_SIZE = 1e9  # samples times squared classes, above which a matrix takes minutes
_FREE = 0.01  # factor of the penalty on the diagonal of a Dirichlet calibrator
_MARGIN = 1e-5  # by which the predicted class stays more probable than any other, relatively
_MAX_EM_STEPS = 5000
_MAX_EM_GAP = 1e-8  # of the NLPD to its minimum


@dataclass(frozen=True, eq=False)
class Calibrator:
    """A fitted calibrator: function from logits (n, c) to log-probabilities (n, c), and its MACs per sample."""

    log_probs: Callable[[Tensor], Tensor]
    macs: int


Fit = Callable[[Tensor, Tensor], Calibrator]


def fit_temperature(logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit one temperature by safeguarded Newton steps."""
    beta = fit_beta(logits, labels)
    return Calibrator(lambda z: (z * beta).log_softmax(dim=1), logits.shape[1])


def fit_beta(logits: Tensor, labels: Tensor) -> float:
    """Return the reciprocal of the temperature with the smallest NLPD, from 0.05 to 20."""
    true = logits.gather(1, labels[:, None])[:, 0]
    low, high = OWN_WEIGHT_BOUNDS
    beta = 1.0
    for _ in range(60):
        probs = (logits * beta).softmax(dim=1)
        mean = (probs * logits).sum(dim=1)
        slope = float((mean - true).mean())
        curvature = float(((probs * logits.square()).sum(dim=1) - mean.square()).mean())
        low, high = (beta, high) if slope < 0 else (low, beta)
        step = beta - slope / curvature if curvature > 0 else low - 1
        moved = step if low < step < high else (low + high) / 2
        if abs(moved - beta) <= 1e-10 * beta:
            return moved
        beta = moved
    return beta


def fit_vector(logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit a factor and an offset per class."""
    n, c = logits.shape
    beta = fit_beta(logits, labels)
    scaled, penalty = logits * beta, c / n

    def objective(point: Tensor) -> tuple[float, Tensor]:
        loss, residual = cross_entropy(scaled * (1 + point[:c]) + point[c:], labels)
        gradient = torch.cat([(residual * scaled).sum(dim=0), residual.sum(dim=0)])
        return loss + penalty * float(point.square().sum()), gradient + 2 * penalty * point

    point = minimize(objective, torch.zeros(2 * c, dtype=torch.float64))
    factor, bias = beta * (1 + point[:c]), point[c:]
    return Calibrator(lambda z: (z * factor + bias).log_softmax(dim=1), 2 * c)


def fit_matrix(logits: Tensor, labels: Tensor, diagonal: float = 1.0) -> Calibrator:
    """Fit a matrix and an offset on the logits; `diagonal` multiplies the penalty on the diagonal of the matrix."""
    n, c = logits.shape
    beta = fit_beta(logits, labels)
    scaled = logits * beta
    penalty = torch.full((c + 1, c), c * max(c - 1, 1) / n, dtype=torch.float64)
    penalty[:c].fill_diagonal_(diagonal * c / n)
    penalty[c] = c / n

    def objective(flat: Tensor) -> tuple[float, Tensor]:
        point = flat.view(c + 1, c)
        loss, residual = cross_entropy(scaled + scaled @ point[:c].T + point[c], labels)
        gradient = torch.cat([residual.T @ scaled, residual.sum(dim=0)[None]])
        penalized = penalty * point
        return loss + float((penalized * point).sum()), (gradient + 2 * penalized).view(-1)

    point = minimize(objective, torch.zeros(c * (c + 1), dtype=torch.float64), precision=1e-5).view(c + 1, c)
    factor, bias = beta * (torch.eye(c, dtype=torch.float64) + point[:c]), point[c]
    return Calibrator(lambda z: (z @ factor.T + bias).log_softmax(dim=1), c * c + c)


def fit_dirichlet(logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit a matrix and an offset on the log-probabilities."""
    matrix = fit_matrix(_clamped_log_probs(logits), labels, diagonal=_FREE)
    return Calibrator(lambda z: matrix.log_probs(_clamped_log_probs(z)), matrix.macs + logits.shape[1])


def fit_ensemble_temperature(logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit the weights of ETS: softmax with and without a temperature, and the uniform distribution."""
    beta, c = fit_beta(logits, labels), logits.shape[1]
    rows = torch.arange(len(labels))
    true = [(logits * factor).log_softmax(dim=1)[rows, labels] for factor in (beta, 1.0, 0.0)]
    log_weights = torch.from_numpy(_mixture_weights(torch.stack(true, dim=1).numpy())).clamp(min=1e-300).log()

    def log_probs(z: Tensor) -> Tensor:
        parts = [(z * factor).log_softmax(dim=1) for factor in (beta, 1.0, 0.0)]
        return torch.stack(parts).add_(log_weights[:, None, None]).logsumexp(dim=0)

    return Calibrator(log_probs, 3 * c)


def _mixture_weights(log_true: Array) -> Array:
    """Return weights (3,) that maximize the mean of log sum_j w_j p_j, from log p (n, 3), by EM.

    The largest mean of p_j / sum_i w_i p_i, minus one, bounds the distance to the maximum.
    """
    probs = np.exp(log_true - log_true.max(axis=1, keepdims=True))
    weights = np.full(probs.shape[1], 1 / probs.shape[1])
    for _ in range(_MAX_EM_STEPS):
        ratios = (probs / (probs @ weights)[:, None]).mean(axis=0)
        if ratios.max() - 1 < _MAX_EM_GAP:
            break
        weights = weights * ratios
        weights /= weights.sum()
    return weights


def _clamped_log_probs(logits: Tensor) -> Tensor:
    """Return log-probabilities (n, c) of at least the smallest normal float32."""
    return logits.log_softmax(dim=1).clamp(min=MIN_LOG_PROB)


def fit_isotonic(logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit isotonic regression of correctness on the largest probability, linear between the fitted points."""
    confidence, correct = _confidence_and_correct(logits, labels)
    points, values = isotonic_regression(confidence, correct)
    margin = 1 / (len(labels) + 2)  # no probability of exactly 0 or 1

    def calibrated(top: Array) -> Array:
        return np.interp(top, points, values).clip(margin, 1 - margin)

    return _top_label_calibrator(calibrated, logits.shape[1], len(points))


def fit_histogram(logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit the share of correct predictions in bins of the largest probability with equal numbers of samples."""
    confidence, correct = _confidence_and_correct(logits, labels)
    edges = np.unique(np.quantile(confidence, np.linspace(0, 1, BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, confidence, side="right")
    counts = np.bincount(bins, minlength=len(edges) + 1)
    shares = (np.bincount(bins, correct, minlength=len(edges) + 1) + 1) / (counts + 2)  # no share of exactly 0 or 1

    def calibrated(top: Array) -> Array:
        return np.asarray(shares[np.searchsorted(edges, top, side="right")])

    return _top_label_calibrator(calibrated, logits.shape[1], len(shares))


def isotonic_regression(x: Array, y: Array) -> tuple[Array, Array]:
    """Return the different values of x, sorted, and the non-decreasing fit of y to them, by pooling violators."""
    points, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, y) / counts
    blocks: list[list[float]] = []  # sum, weight and number of points of each block
    for mean, weight in zip(means.tolist(), counts.tolist(), strict=True):
        total, size = mean * weight, 1
        while blocks and blocks[-1][0] * weight >= total * blocks[-1][1]:
            earlier_total, earlier_weight, earlier_size = blocks.pop()
            total, weight, size = total + earlier_total, weight + earlier_weight, size + int(earlier_size)
        blocks.append([total, weight, size])
    sums, weights, sizes = np.array(blocks).T
    return points, np.repeat(sums / weights, sizes.astype(np.int64))


def _confidence_and_correct(logits: Tensor, labels: Tensor) -> tuple[Array, Array]:
    top, predicted = logits.softmax(dim=1).max(dim=1)
    return top.numpy(), (predicted == labels).double().numpy()


def _top_label_calibrator(calibrated: Callable[[Array], Array], classes: int, points: int) -> Calibrator:
    """Return a calibrator that maps the largest probability and keeps the ratios of the others."""

    def log_probs(logits: Tensor) -> Tensor:
        log_p = _clamped_log_probs(logits)
        log_top, predicted = log_p.max(dim=1, keepdim=True)
        others = log_p.scatter(1, predicted, -torch.inf)
        log_rest = others.logsumexp(dim=1, keepdim=True)
        top = torch.from_numpy(calibrated(log_top[:, 0].exp().numpy()))[:, None]
        top = top.clamp(min=(1 + _MARGIN) / classes)
        shares = (others - log_rest).exp()
        # Largest share of the rest that leaves the predicted class the most probable, and the way to it from `second`.
        second, limit = shares.max(dim=1, keepdim=True).values, top / (1 - top) * (1 - _MARGIN / 2)
        uniform = 1 / (classes - 1)
        mixed = ((second - limit) / (second - uniform).clamp(min=1e-12)).clamp(0, 1)
        shares = shares + mixed * (uniform - shares)
        return ((1 - top) * shares).scatter(1, predicted, top).log().clamp(min=MIN_LOG_PROB)

    return Calibrator(log_probs, classes + int(np.ceil(np.log2(points + 1))))


CALIBRATORS: Mapping[str, Fit] = {
    "temperature": fit_temperature,
    "vector": fit_vector,
    "matrix": fit_matrix,
    "Dirichlet": fit_dirichlet,
    "ETS": fit_ensemble_temperature,
    "isotonic": fit_isotonic,
    "histogram": fit_histogram,
}
