"""Bands of a last layer: its logits, split by how much the features vary and by how well classes are told apart.

A trained last layer trusts all directions of its features alike, but those that vary little are mostly noise on new
samples, and so are differences between classes that are hard to tell apart. The last layer W~ = [W b] is therefore
split into 3 x 3 bands, which sum to it:

    W~ = sum_ij W_ij          W_ij = h_i(C) W~ h_j(S)

S is the second moment of the features phi~ = (phi, 1), and C the mean covariance of the predicted classes, diag(p) -
p p^T. h(S) has the eigenvectors of S, and the eigenvalues h(position), where the position of an eigenvector falls with
its eigenvalue from 0 for the largest: on a logarithmic scale for S, whose eigenvalues span orders of magnitude, on a
linear one for C. The three functions h are piecewise linear and sum to one: they are 1 at the positions 0, 1/2 and 1.

No labels are needed. A pool weights the bands anew, see `exitwise.calibration.pool`.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from exitwise.calibration.ensembles import ExitWeights
from exitwise.calibration.laplace import append_ones
from exitwise.calibration.trace import HeadWeights

NUM_POSITIONS = 3
NUM_BANDS = NUM_POSITIONS**2
_MIN_EIGENVALUE = 1e-3  # of S, as a fraction of the largest: the position is 1 from there on
_BLOCK = 1 << 22  # numbers in float64 per block of samples


@dataclass(frozen=True, eq=False)
class LinearUpdate:
    """A linear function of features (n, p), which a pool adds to its logits: weight (p, c), bias (c,) or None."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, features: Tensor) -> Tensor:
        """Return its values (n, c)."""
        logits = features.float() @ self.weight
        return logits if self.bias is None else logits + self.bias

    def add_to(self, exit: ExitWeights, factor: float) -> ExitWeights:
        """Return the weights of a pool with this update, multiplied by a factor."""
        parts = [part for part in (None if self.bias is None else factor * self.bias, exit.bias) if part is not None]
        return ExitWeights(exit.weights, sum(parts[1:], parts[0]) if parts else None, factor * self.weight)


@dataclass(frozen=True, eq=False)
class Bands:
    """Bands of one exit's last layer.

    Args:
        matrices: Last layers (9, c, p + 1) in float64 that sum to the exit's; (9, c, p) if it has no bias.
        logits: Logits (9, n, c) of the validation samples by each of them, in float32.
        has_bias: Whether the last column of every matrix is a bias.
    """

    matrices: Tensor
    logits: Tensor
    has_bias: bool

    def combine(self, weights: Tensor) -> LinearUpdate:
        """Return the weighted sum of the bands, by weights (9,), as a function of the exit's features (n, p)."""
        combined = torch.tensordot(weights, self.matrices, dims=1).float()
        if not self.has_bias:
            return LinearUpdate(combined.T.contiguous(), None)
        return LinearUpdate(combined[:, :-1].T.contiguous(), combined[:, -1].contiguous())


def split_last_layer(head: HeadWeights, features: Tensor) -> Bands:
    """Split the last layer of an exit into bands, by features (n, p) of samples that it was not trained on."""
    has_bias = head.bias is not None
    weight = head.weight.double()
    if head.bias is not None:
        weight = torch.cat([weight, head.bias.double()[:, None]], dim=1)
    size = max(1, _BLOCK // max(weight.shape))
    second_moment = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
    covariance = torch.zeros(len(weight), len(weight), dtype=torch.float64)
    for start in range(0, len(features), size):
        inputs = append_ones(features[start : start + size].double(), has_bias)
        second_moment += inputs.T @ inputs
        probs = (inputs @ weight.T).softmax(dim=1)
        covariance += torch.diag(probs.sum(dim=0)) - probs.T @ probs
    by_features = _split_directions(second_moment, is_logarithmic=True)
    by_classes = _split_directions(covariance, is_logarithmic=False)
    matrices = torch.stack([left @ weight @ right for left in by_classes for right in by_features])
    logits = torch.matmul(append_ones(features.float(), has_bias), matrices.float().mT)
    return Bands(matrices, logits, has_bias)


def _split_directions(matrix: Tensor, is_logarithmic: bool) -> list[Tensor]:
    """Return three matrices h_i(matrix), from the directions of the largest eigenvalues to those of the smallest."""
    eigenvalues, directions = torch.linalg.eigh(matrix)
    ratio = (eigenvalues / eigenvalues[-1].clamp(min=1e-300)).clamp(min=0.0, max=1.0)
    positions = ratio.clamp(min=_MIN_EIGENVALUE).log() / log(_MIN_EIGENVALUE) if is_logarithmic else 1 - ratio
    scaled = positions * (NUM_POSITIONS - 1)
    return [
        (directions * (1 - (scaled - position).abs()).clamp(min=0.0)) @ directions.T
        for position in range(NUM_POSITIONS)
    ]
