"""Heads that predict from the features of an exit whether stopping there is right.

After Kubaty et al. (2026), who train heads for it together with the net: here afterwards, on the features that the
trace keeps. At every exit but the last, a logistic regression on the features and on the log-odds of the confidence,
with a ridge penalty on all weights but that of the confidence. It is cross-fitted: the score of a validation sample
comes from a model that did not see it, and that of any other sample from the mean of the models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exitwise.rival_methods.solver import minimize

FOLDS = 5
_STRENGTHS = (10000.0, 1000.0, 100.0, 10.0)  # of the penalty, in nats at weights of length one; the first fold chooses
_WEAK = 0.01  # keeps the weights finite where both cases can be separated
_CLAMP = 1e-6


@dataclass(frozen=True, eq=False)
class StoppingHead:
    """Weights (folds, p + 2) of one exit's models, on features with `mean` and `scale` (p + 1,)."""

    weights: Tensor
    mean: Tensor
    scale: Tensor
    fold_of_sample: Tensor

    def scores(self, features: Tensor, confidence: Tensor) -> Tensor:
        """Return the mean log-odds (n,) of the models, from features (n, p) and confidence (n,)."""
        return (self._inputs(features, confidence) @ self.weights.T).mean(dim=1)

    def out_of_fold_scores(self, features: Tensor, confidence: Tensor) -> Tensor:
        """Return the log-odds (n,) of the samples that the head was fitted on, from the model that did not see each."""
        scores = self._inputs(features, confidence) @ self.weights.T
        return scores.gather(1, self.fold_of_sample[:, None])[:, 0]

    def _inputs(self, features: Tensor, confidence: Tensor) -> Tensor:
        return _append_ones((_stack(features, confidence) - self.mean) / self.scale)


def fit_stopping_head(features: Tensor, confidence: Tensor, right: Tensor) -> StoppingHead | None:
    """Fit the head of one exit on features (n, p), confidence (n,) and a mask (n,) of where stopping is right.

    Returns:
        The head, or None if a fold would see only one of the two cases: then confidence has to do.
    """
    inputs = _stack(features, confidence)
    mean, scale = inputs.mean(dim=0), inputs.std(dim=0, correction=0).clamp(min=1e-9)
    table, target = _append_ones((inputs - mean) / scale), right.double()
    fold_of_sample = torch.from_numpy(np.random.default_rng(0).permutation(len(target)) % FOLDS)
    folds = [fold_of_sample != fold for fold in range(FOLDS)]
    if any(not 0 < int(right[fold].sum()) < int(fold.sum()) for fold in folds):
        return None
    strength = _choose_strength(table, target, folds[0])
    weights = [fit_logistic(table[fold], target[fold], strength) for fold in folds]
    return StoppingHead(torch.stack(weights), mean, scale, fold_of_sample)


def fit_logistic(inputs: Tensor, target: Tensor, strength: float, start: Tensor | None = None) -> Tensor:
    """Return weights (q,) of a logistic regression of `target` (n,) on inputs (n, q).

    They minimize the sum of the negative log-likelihoods plus strength / 2 times the sum of the squared weights; for
    the last two, confidence and intercept, the strength is hardly more than zero.
    """
    penalty = torch.full((inputs.shape[1],), strength / len(target), dtype=torch.float64)
    penalty[-2:] = _WEAK / len(target)

    def objective(point: Tensor) -> tuple[float, Tensor]:
        logits = inputs @ point
        loss = float((torch.nn.functional.softplus(logits) - target * logits).mean())
        gradient = inputs.T @ (logits.sigmoid() - target) / len(target)
        return loss + float(penalty @ point.square()) / 2, gradient + penalty * point

    return minimize(objective, torch.zeros(inputs.shape[1], dtype=torch.float64) if start is None else start)


def _choose_strength(inputs: Tensor, target: Tensor, inside: Tensor) -> float:
    """Return the penalty with the smallest loss on the samples that are not `inside`."""
    losses, weights = [], None
    for strength in _STRENGTHS:
        weights = fit_logistic(inputs[inside], target[inside], strength, weights)
        logits = inputs[~inside] @ weights
        losses.append(float((torch.nn.functional.softplus(logits) - target[~inside] * logits).mean()))
    return _STRENGTHS[int(np.argmin(losses))]


def _stack(features: Tensor, confidence: Tensor) -> Tensor:
    """Return features and log-odds of the confidence (n, p + 1) in float64."""
    odds = confidence.double().clamp(_CLAMP, 1 - _CLAMP).logit()
    return torch.cat([features.double(), odds[:, None]], dim=1)


def _append_ones(inputs: Tensor) -> Tensor:
    return torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1)


def head_macs(widths: Sequence[int]) -> int:
    """Return the MACs of the heads at all exits but the last, from the numbers of features (K,); folds are averaged."""
    return sum(width + 2 for width in widths[:-1])
