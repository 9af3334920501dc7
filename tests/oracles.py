"""Plain-Python counterparts of what the library vectorises: one sample at a time, as the specification words it."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations, product
from math import floor, inf, log, nan, prod
from statistics import fmean
from typing import Any

import numpy as np
from torch import Tensor

import exitwise as ew
from exitwise.calibration.laplace import CurvatureEigen
from exitwise.calibration.mc_softmax import sample_logits

Rows = Sequence[Sequence[float]]


def random_probs(seed: int, exits: int, samples: int, classes: int, kind: str = "float64") -> np.ndarray:
    """(K, n, c) probabilities; those of kind "ties" are multiples of 1/8, so that values repeat and zeros occur."""
    rng = np.random.default_rng(seed)
    if kind == "ties":
        return rng.multinomial(8, np.full(classes, 1 / classes), size=(exits, samples)) / 8
    return rng.dirichlet(np.full(classes, 0.5), size=(exits, samples)).astype(kind)


def public_counts(p: int, exits: int, samples: int) -> list[int]:
    """floor(n q^k / sum_j q^j) for k = 1..K and q = p / 20, in exact arithmetic."""
    powers = [Fraction(p, 20) ** k for k in range(1, exits + 1)]
    return [floor(samples * power / sum(powers)) for power in powers]


def public_rule(scores: Rows, p: int) -> tuple[list[float], list[int]]:
    """The paper's sweep: thresholds (K,) from scores (K, n), and the exit of each sample."""
    exits, samples = len(scores), len(scores[0])
    counts = public_counts(p, exits, samples)
    thresholds: list[float] = []
    taken = [exits - 1] * samples
    staying = list(range(samples))
    for k in range(exits - 1):
        threshold = inf
        if 0 < counts[k] <= len(staying):
            threshold = sorted((scores[k][i] for i in staying), reverse=True)[counts[k] - 1]
        for i in staying:
            if scores[k][i] >= threshold:
                taken[i] = k
        staying = [i for i in staying if scores[k][i] < threshold]
        thresholds.append(threshold)
    return [*thresholds, -inf], taken


def first_exit_reached(scores: Rows, thresholds: Sequence[float]) -> list[int]:
    """The first exit whose score reaches its threshold, for each sample."""
    return [
        next(k for k, threshold in enumerate(thresholds) if scores[k][i] >= threshold) for i in range(len(scores[0]))
    ]


def best_of_all_cuts(scores: np.ndarray, values: np.ndarray, costs: np.ndarray, budget: float) -> float:
    """The largest mean value within the budget that any thresholds reach, by trying all of them."""
    candidates = [[*row.tolist(), inf] for row in scores[:-1]]
    best = -inf
    for thresholds in product(*candidates):
        taken = first_exit_reached(scores.tolist(), (*thresholds, -inf))
        if fmean(costs[k] for k in taken) <= budget + 1e-12:
            best = max(best, fmean(values[k][i] for i, k in enumerate(taken)))
    return best


def agreements(probs: np.ndarray) -> list[list[int]]:
    """(K, n) how many exits in a row, right before each, predict the same class."""
    predicted = [[classes_in_order(p)[0] for p in exit.tolist()] for exit in probs]
    counts = []
    for k, classes in enumerate(predicted):
        row = []
        for i, mine in enumerate(classes):
            count = 0
            while count < k and predicted[k - 1 - count][i] == mine:
                count += 1
            row.append(count)
        counts.append(row)
    return counts


def classes_in_order(probs: Sequence[float]) -> list[int]:
    """The most probable first; of equals the first class first."""
    return sorted(range(len(probs)), key=lambda c: -probs[c])


def calibration_error(confidence: Sequence[float], correct: Sequence[bool], bins: int = 10) -> float:
    """Bin b holds confidences from b / bins up to, but without, (b + 1) / bins; the last one also holds 1."""
    total = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins if b + 1 < bins else inf
        inside = [i for i, value in enumerate(confidence) if low <= value < high]
        if inside:
            accuracy = fmean(float(correct[i]) for i in inside)
            total += len(inside) / len(confidence) * abs(accuracy - fmean(confidence[i] for i in inside))
    return total


def adaptive_calibration_error(confidence: Sequence[float], correct: Sequence[bool], bins: int = 10) -> float:
    """The same over bins of equally many samples, the most confident first; for confidences without ties."""
    order = sorted(range(len(confidence)), key=lambda i: -confidence[i])
    total = 0.0
    for b in range(bins):
        inside = order[len(order) * b // bins : len(order) * (b + 1) // bins]
        total += abs(sum(confidence[i] for i in inside) - sum(correct[i] for i in inside)) / len(order)
    return total


def area_under_roc(confidence: Sequence[float], correct: Sequence[bool]) -> float:
    """Over all pairs of a right and a wrong answer; equal confidence counts one half."""
    right = [value for value, good in zip(confidence, correct, strict=True) if good]
    wrong = [value for value, good in zip(confidence, correct, strict=True) if not good]
    if not right or not wrong:
        return nan
    return fmean((r > w) + (r == w) / 2 for r in right for w in wrong)


def mean_prefix_error(correct: Sequence[bool]) -> float:
    return fmean(fmean(1 - float(good) for good in correct[:m]) for m in range(1, len(correct) + 1))


def area_under_risk_coverage(confidence: Sequence[float], correct: Sequence[bool]) -> float:
    """Averaged over every order in which confidence does not grow: as many as there are ways to order equals."""
    ordered = sorted(confidence, reverse=True)
    return fmean(
        mean_prefix_error([correct[i] for i in order])
        for order in permutations(range(len(confidence)))
        if [confidence[i] for i in order] == ordered
    )


def evaluate_one_by_one(
    probs: np.ndarray, labels: Sequence[int], taken: Sequence[int], costs: Sequence[float]
) -> dict[str, Any]:
    """Budgeted batch classification of samples that leave at the exits `taken`."""
    said = [probs[k][i].tolist() for i, k in enumerate(taken)]
    orders = [classes_in_order(p) for p in said]
    correct = [order[0] == label for order, label in zip(orders, labels, strict=True)]
    confidence = [max(p) for p in said]
    smallest = float(np.finfo(probs.dtype).tiny)
    return {
        "top1": fmean(correct),
        "top5": fmean(label in order[:5] for order, label in zip(orders, labels, strict=True)),
        "nlpd": fmean(-log(max(p[label], smallest)) for p, label in zip(said, labels, strict=True)),
        "ece": calibration_error(confidence, correct),
        "brier": fmean(
            sum((p[c] - (c == label)) ** 2 for c in range(len(p))) for p, label in zip(said, labels, strict=True)
        ),
        "auroc": area_under_roc(confidence, correct),
        "cost": fmean(costs[k] for k in taken),
        "exit_shares": [taken.count(k) / len(taken) for k in range(len(costs))],
    }


def product_of_experts(probs: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Product (K, n, c) of the predictions up to each exit, each to the power of its share of the weights."""
    pooled = np.empty(probs.shape)
    for k, i in np.ndindex(*probs.shape[:2]):
        total = sum(weights[: k + 1])
        products = [
            prod(float(probs[j, i, c]) ** (weights[j] / total) for j in range(k + 1)) for c in range(probs.shape[2])
        ]
        pooled[k, i] = [product / sum(products) for product in products]
    return pooled


def plain_probs(trace: ew.Trace, k: int, temperature: float, var0: float | None, draws: Tensor, mode: str) -> Tensor:
    """(n, c) of exit k on val, float64, without Laplace where var0 is None."""
    head, features = trace.heads[k], trace.val.features[k].double()
    logits = trace.val.features[k] @ head.weight.T + (0 if head.bias is None else head.bias)
    if var0 is None:
        return (logits.double() / temperature).softmax(1)
    posterior = CurvatureEigen(trace.curvature[k], mode, head.bias is not None).posterior(var0)  # type: ignore[arg-type]
    z = sample_logits(logits.double(), posterior.scale(features), posterior, draws.double())
    return (z / temperature).softmax(2).mean(1)


def early_exit_failure_prediction(
    scores: list[list[float]], correct: list[list[bool]], exits: list[int] | None = None
) -> tuple[list[float | None], float | None]:
    """EEFP at every exit but the last and their mean, by comparing all pairs of samples; ties count one half."""
    areas: list[float | None] = []
    weights = []
    for k in range(len(scores) - 1):
        samples = [i for i in range(len(scores[k])) if exits is None or exits[i] >= k]
        right = [i for i in samples if correct[k][i] or not any(row[i] for row in correct[k + 1 :])]
        wrong = [i for i in samples if i not in right]
        wins = [(scores[k][i] > scores[k][j]) + (scores[k][i] == scores[k][j]) / 2 for i in right for j in wrong]
        areas.append(sum(wins) / len(wins) if wins else None)
        weights.append(len(samples))
    defined = [(area, weight) for area, weight in zip(areas, weights, strict=True) if area is not None]
    total = sum(weight for _, weight in defined)
    return areas, sum(area * weight for area, weight in defined) / total if total else None
