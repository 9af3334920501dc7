"""Geometric ensembling of the exits so far, as in Zero Time Waste (Wolczyk et al., 2021), without its new connections.

log p_ens_k = sum_(j <= k) w_kj log p_j + b_k - log Z, with w_kj >= 0 and an offset b_k per class. For every exit the
numbers minimize the validation NLPD. Instead of w = u^2 >= 0 any sign of u is allowed, so that no bound is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from exitwise.rival_methods.solver import cross_entropy, minimize


def fit_geometric_ensemble(log_probs: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (k,) and offsets (c,) for log-probabilities k x (n, c) of the exits so far, in float64.

    Offsets have a weak penalty, the mean of a sample's square, without which a class that is absent from the samples
    would get an offset of minus infinity.
    """
    k, (n, _) = len(log_probs), log_probs[0].shape

    def objective(point: Tensor) -> tuple[float, Tensor]:
        roots, bias = point[:k], point[k:]
        logits = bias.expand_as(log_probs[0]).clone()
        for root, part in zip(roots, log_probs, strict=True):
            logits.add_(part, alpha=float(root) ** 2)
        loss, residual = cross_entropy(logits, labels)
        slopes = torch.stack([(residual * part).sum() for part in log_probs])
        penalty = float(bias.square().sum()) / n
        return loss + penalty, torch.cat([2 * roots * slopes, residual.sum(dim=0) + 2 * bias / n])

    start = torch.cat([torch.full((k,), k**-0.5), torch.zeros(log_probs[0].shape[1])]).double()
    point = minimize(objective, start)
    return point[:k].square(), point[k:]


def combine(log_probs: Sequence[Tensor], weights: Tensor, bias: Tensor) -> Tensor:
    """Return the log-probabilities (n, c) of the ensemble."""
    logits = bias.expand_as(log_probs[0]).clone()
    for weight, part in zip(weights.tolist(), log_probs, strict=True):
        logits.add_(part, alpha=weight)
    return logits.log_softmax(dim=1)
