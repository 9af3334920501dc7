"""NLPD of a log-linear pool with its gradient and Hessian, summed over samples block by block in float64.

What the experts give to each class is a tensor, or something that computes rows of it. Of many samples, it is computed
anew in every pass, so that memory does not grow with them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exitwise.calibration.bands import LinearUpdate
from exitwise.calibration.ensembles import MIN_LOG_PROB
from exitwise.calibration.exit_objective import block_size
from exitwise.core.memory import align

BLOCK = 1 << 19  # numbers in float64 per block of samples
_MAX_KEPT = 1 << 22  # numbers in float64 that are kept from pass to pass, 32 MB


class Rows(Protocol):
    """Numbers (n, c), of which rows are taken: a tensor, or what computes them."""

    @property
    def shape(self) -> Sequence[int]: ...
    def __getitem__(self, samples: slice | Tensor) -> Tensor: ...


class UpdateLogits:
    """Logits (n, c) of an update, computed from features (n, p) when rows of them are asked for."""

    def __init__(self, update: LinearUpdate, features: Tensor) -> None:
        self._update, self._features = update, features
        self.shape = (len(features), update.weight.shape[1])

    def __getitem__(self, samples: slice | Tensor) -> Tensor:
        return self._update.logits(align(self._features[samples]))


@dataclass(frozen=True, eq=False)
class PoolPoint:
    """Weights of all experts, zero for unused ones, and bias (c,) or None, with what was found there.

    Experts are the exits 0..k and, after them, the bands of exit k or their sum, if there are any.
    """

    weights: Tensor
    bias: Tensor | None
    nlpd: float
    loo: float  # leave-one-out NLPD, approximated
    removal_costs: dict[int, float]  # increase of n NLPD without each of the used exits, approximated

    @property
    def used(self) -> list[int]:
        return [j for j, weight in enumerate(self.weights.tolist()) if weight != 0]


@dataclass(frozen=True, eq=False)
class PoolSums:
    """Sums over samples at one point: loss, its gradient and Hessian, and the outer products of the gradients."""

    loss: float
    gradient: Tensor  # (d,)
    hessian: Tensor  # (d, d)
    outer: Tensor  # (d, d)


@dataclass(frozen=True)
class PoolConfidence:
    """Mean difference of confidence and correctness, its squared standard error, its slope in the factor, and NLPD."""

    gap: float
    variance: float
    slope: float
    nlpd: float


class PoolObjective:
    """NLPD of one exit's pool as a function of its weights and bias (c,), summed over n samples in float64.

    Args:
        log_probs: Log-probabilities (n, c) of the exits up to this one.
        labels: True labels (n,).
        logits: Logits (n, c) of further experts: of the bands of this exit, or of their sum.
    """

    def __init__(self, log_probs: Sequence[Rows], labels: Tensor, logits: Sequence[Rows] = ()) -> None:
        self._log_probs, self._labels, self._logits = log_probs, labels, logits
        self.exits, (self.samples, self.classes) = len(log_probs), log_probs[0].shape
        self.experts = self.exits + len(logits)
        self._kept: tuple[tuple[int, ...], list[tuple[Tensor, Tensor]]] | None = None

    def _blocks(self, used: Sequence[int]) -> Iterable[tuple[Tensor, Tensor]]:
        """Return what the used experts give to each class (k, m, c), and labels (m,), block by block.

        The blocks are kept for the next pass, if there are few: all steps of a search use the same experts.
        """
        if self._kept is not None and self._kept[0] == tuple(used):
            return self._kept[1]
        self._kept = None
        if len(used) * self.samples * self.classes > _MAX_KEPT:
            return self._compute_blocks(used)
        self._kept = (tuple(used), list(self._compute_blocks(used)))
        return self._kept[1]

    def _compute_blocks(self, used: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        size = max(1, BLOCK // (max(1, len(used)) * self.classes))
        for part in sample_ranges((*self._log_probs, *self._logits), len(self._labels)):
            experts, labels = [self._expert(j, part) for j in used], self._labels[part]
            for start in range(0, len(labels), size):
                block = slice(start, start + size)
                rows = [self._clamp(j, expert[block]) for j, expert in zip(used, experts, strict=True)]
                yield torch.stack(rows).double(), labels[block]

    def _expert(self, j: int, part: slice) -> Tensor:
        return self._log_probs[j][part] if j < self.exits else self._logits[j - self.exits][part]

    def _clamp(self, j: int, rows: Tensor) -> Tensor:
        return rows.clamp(min=MIN_LOG_PROB) if j < self.exits else rows

    @property
    def is_kept(self) -> bool:
        """True if what all experts give is in memory."""
        return are_kept((*self._log_probs, *self._logits))

    def add_expert(self, logits: Rows) -> "PoolObjective":
        """Return the objective with one more expert, by its logits (n, c)."""
        return PoolObjective(self._log_probs, self._labels, (*self._logits, logits))

    def take(self, samples: Tensor, logits: Sequence[Rows]) -> "PoolObjective":
        """Return the objective of some samples, by their positions (m,), with further experts (m, c)."""
        return PoolObjective([row[samples] for row in self._log_probs], self._labels[samples], logits)

    def confidence(self, point: PoolPoint, factor: float) -> PoolConfidence:
        """Compute confidence, accuracy and NLPD at a point whose weights and bias are multiplied by a factor."""
        gaps, slope, loss = [], 0.0, 0.0
        for experts, labels in self._blocks(point.used):
            logits = torch.tensordot(factor * point.weights[point.used], experts, dims=1)
            if point.bias is not None:
                logits += factor * point.bias
            largest, predicted = logits.max(dim=1)
            loss -= float(logits[torch.arange(len(labels)), labels].sum())
            probs = logits.sub(largest[:, None]).exp_()
            norm = probs.sum(dim=1)
            loss += float((largest + norm.log()).sum())
            confidence = 1 / norm
            gaps.append(confidence - (predicted == labels).double())
            slope += float((confidence * (largest - (probs * logits).sum(dim=1) / norm)).sum()) / factor
        gap = torch.cat(gaps)
        return PoolConfidence(
            float(gap.mean()), float(gap.var(correction=0)) / self.samples, slope / self.samples, loss / self.samples
        )

    def sums(self, used: Sequence[int], weights: Tensor, bias: Tensor | None) -> PoolSums:
        """Sum up loss, gradient and Hessian for weights of the used exits (k,) and, with a bias, all classes (c,)."""
        k, c = len(used), self.classes
        d = k if bias is None else k + c
        loss, gradient = 0.0, torch.zeros(d, dtype=torch.float64)
        hessian, outer = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
        b = d - k  # the number of biases; their matrices are summed in place, because each takes c^2 numbers
        products, crossed = hessian.new_zeros(b, b), hessian.new_zeros(b, b)
        for experts, labels in self._blocks(used):
            rows = torch.arange(len(labels))
            logits = torch.tensordot(weights, experts, dims=1)
            if bias is not None:
                logits += bias
            # One exponential of every number: they take most of the time.
            largest = logits.amax(dim=1)
            loss += float((largest - logits[rows, labels]).sum())
            probs = logits.sub_(largest[:, None]).exp_()
            norm = probs.sum(dim=1)
            loss += float(norm.log().sum())
            probs /= norm[:, None]
            weighted = probs * experts
            means = weighted.sum(dim=2)
            residual = means - experts[:, rows, labels]
            gradient[:k] += residual.sum(dim=1)
            hessian[:k, :k] += weighted.flatten(1) @ experts.flatten(1).T - means @ means.T
            outer[:k, :k] += residual @ residual.T
            if bias is not None:
                hessian[:k, k:] += weighted.sum(dim=1) - means @ probs
                products.addmm_(probs.T, probs)
                crossed.index_add_(0, labels, probs)
                gradient[k:] += probs.sum(dim=0)
                probs[rows, labels] -= 1
                outer[:k, k:] += residual @ probs
        if bias is not None:
            counts = torch.bincount(self._labels, minlength=c).double()
            hessian[k:, k:] = torch.diag(gradient[k:]) - products
            # Outer products of p - y, with y one-hot, from those of p: one large product instead of two.
            outer[k:, k:] = products - crossed - crossed.T + torch.diag(counts)
            gradient[k:] -= counts
        for matrix in (hessian, outer):
            matrix[k:, :k] = matrix[:k, k:].T
        return PoolSums(loss, gradient, hessian, outer)


def are_kept(rows: Sequence[Rows]) -> bool:
    """Return whether all rows are in memory."""
    return all(isinstance(row, Tensor) for row in rows)


def sample_ranges(rows: Sequence[Rows], samples: int) -> Iterator[slice]:
    """Yield slices of the samples for which rows are computed at once: one slice if all rows are in memory."""
    size = max(1, samples) if are_kept(rows) else block_size(rows[0].shape[1])
    return (slice(start, min(start + size, samples)) for start in range(0, samples, size))
