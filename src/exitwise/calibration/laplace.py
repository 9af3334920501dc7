"""The last-layer Laplace approximation at one exit: curvature sums, posterior, and its covariance of the logits.

With phi~ = (phi, 1) the features of a sample and p its softmax, the generalized Gauss-Newton matrix of the last layer
is approximated by the Kronecker product of A = sum phi~ phi~^T and B = sum (diag(p) - p p^T), in closed form.

Three posteriors, with prior variance var0:

- paper: V = A/sqrt(n) + I/sqrt(var0), U = B/sqrt(n) + I/sqrt(var0); logits ~ N(W~ phi~, s(x) U^-1) with one number
  s(x) = phi~^T V^-1 phi~ per sample, so that the draws L g, with L L^T = U^-1, are multiplied once, before test time.
- naive: the same with the bias kept apart, covariance (U sqrt(n) + U/sqrt(var0))^-1, and a Cholesky factor per sample.
- exact: the prior is added to the product itself, A (x) B / n + I/var0, in the eigenbasis of both factors; logits
  ~ N(W~ phi~, Q_B diag(s_1(x) .. s_c(x)) Q_B^T).
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from exitwise.core.checks import check_choice
from exitwise.core.errors import InputError
from exitwise.core.memory import align, align_fields

Mode = Literal["paper", "exact", "naive"]
MODES: tuple[Mode, ...] = get_args(Mode)

_RATE = 0.95  # of the exponential average in the paper's released code


@dataclass(frozen=True, eq=False)
class Curvature:
    """Sums over n samples: A (q, q), with q = p + 1 with a bias and q = p without, and B (c, c)."""

    A: Tensor
    B: Tensor
    n: int

    def __post_init__(self) -> None:
        align_fields(self, "A", "B")


class CurvatureAccumulator(Protocol):
    """Accumulates the curvature of all batches of features (m, p) and logits (m, c)."""

    def update(self, features: Tensor, logits: Tensor) -> None: ...
    def result(self) -> Curvature: ...


def append_ones(features: Tensor, bias: bool) -> Tensor:
    """Return phi~: features (n, p), with a column of ones appended if the last layer has a bias."""
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1) if bias else features


def batch_curvature(features: Tensor, logits: Tensor, bias: bool) -> Curvature:
    """Compute A and B of one batch with features (m, p) and logits (m, c), in float64."""
    phi = append_ones(features.double(), bias)
    p = logits.double().softmax(dim=1)
    return Curvature(A=phi.T @ phi, B=torch.diag(p.sum(dim=0)) - p.T @ p, n=len(features))


class CurvatureSum:
    """Sums over all batches; they do not depend on the order or the size of the batches."""

    def __init__(self, features: int, classes: int, bias: bool = True) -> None:
        self._bias = bias
        self._A = torch.zeros(features + bias, features + bias, dtype=torch.float64)
        self._B = torch.zeros(classes, classes, dtype=torch.float64)
        self._n = 0

    def update(self, features: Tensor, logits: Tensor) -> None:
        batch = batch_curvature(features, logits, self._bias)
        self._A += batch.A.to(self._A.device)
        self._B += batch.B.to(self._B.device)
        self._n += batch.n

    def result(self) -> Curvature:
        return Curvature(self._A.clone(), self._B.clone(), self._n)


class CurvatureMovingAverage:
    """Exponential average over batches with rate min(1 - 1/(i + 1), .95), as in the paper's released code.

    It exists for comparison: the last twenty batches or so dominate the average. The result is scaled to sums over all
    n samples, so that it can replace the result of `CurvatureSum`.
    """

    def __init__(self, features: int, classes: int, bias: bool = True) -> None:
        self._bias = bias
        self._A = torch.zeros(features + bias, features + bias, dtype=torch.float64)
        self._B = torch.zeros(classes, classes, dtype=torch.float64)
        self._batches = self._n = 0

    def update(self, features: Tensor, logits: Tensor) -> None:
        batch = batch_curvature(features, logits, self._bias)
        rate = min(1 - 1 / (self._batches + 1), _RATE)
        self._A = rate * self._A + (1 - rate) * batch.A.to(self._A.device) / batch.n
        self._B = rate * self._B + (1 - rate) * batch.B.to(self._B.device) / batch.n
        self._batches += 1
        self._n += batch.n

    def result(self) -> Curvature:
        return Curvature(self._A * self._n, self._B * self._n, self._n)


@dataclass(frozen=True, eq=False)
class Posterior:
    """Covariance of a sample's logits, as `root diag(scale(x)) root^T`.

    scale(x) = squares(x) @ inverse + offset, with squares(x) = (phi~ basis)^2: one number per sample (n,) for paper and
    naive, one per direction (n, c) for exact. It is a sum of non-negative terms, so it is never negative.
    """

    mode: Mode
    basis: Tensor  # (q, q), eigenvectors of A
    inverse: Tensor  # (q,) or (q, c)
    offset: Tensor  # (), the contribution of a separate bias, else 0
    root: Tensor  # (c, c): the Cholesky factor L of U^-1, or the eigenvectors of B

    def __post_init__(self) -> None:
        align_fields(self, "basis", "inverse", "offset", "root")

    def to_float32(self) -> "Posterior":
        """Return the posterior in float32, for prediction."""
        parts = {name: getattr(self, name).float() for name in ("basis", "inverse", "offset", "root")}
        return Posterior(self.mode, **parts)

    def squared_projections(self, features: Tensor) -> Tensor:
        """Compute the squares (phi~ basis)^2 (n, q) from features (n, p)."""
        bias = self.basis.shape[0] == features.shape[1] + 1
        squares: Tensor = (append_ones(features, bias) @ self.basis.to(features.dtype)).square()
        return squares

    def scale(self, features: Tensor) -> Tensor:
        """Compute the scale (n,), or (n, c) for exact, from features (n, p)."""
        return self.scale_from_squares(self.squared_projections(features))

    def scale_from_squares(self, squares: Tensor) -> Tensor:
        """Compute the scale (n,), or (n, c) for exact, from squared projections (n, q)."""
        scale: Tensor = squares @ self.inverse.to(squares.dtype) + self.offset.to(squares.dtype)
        # Without a bias, features that are all zero give 0, which has no Cholesky factor and no gradient of its root.
        return scale.clamp(min=torch.finfo(scale.dtype).tiny)

    def covariance(self, features: Tensor) -> Tensor:
        """Compute the covariances (n, c, c) of the logits; only for small cases, predictions do not need them."""
        scale = self.scale(features)
        scale = scale[:, None].expand(-1, len(self.root)) if scale.dim() == 1 else scale
        root = self.root.to(features.dtype)
        return torch.einsum("ik,nk,jk->nij", root, scale, root)


class CurvatureEigen:
    """Eigendecompositions of one exit's factors A and B, computed once; the posterior is then cheap for any prior."""

    def __init__(self, curvature: Curvature, mode: Mode = "paper", bias: bool = True) -> None:
        check_choice("mode", mode, MODES)
        self.mode = mode
        self.n = curvature.n
        # `naive` treats the bias separately, so A loses the row and the column of the bias.
        self._separate_bias = mode == "naive" and bias
        A = curvature.A[:-1, :-1] if self._separate_bias else curvature.A
        self._a, self._basis = _eigh(A, "A", curvature.n)
        self._b, self._directions = _eigh(curvature.B, "B", curvature.n)

    def posterior(self, prior_var: float | Tensor) -> Posterior:
        """Compute the posterior for a prior variance, in float64; differentiable in `prior_var`."""
        var0 = torch.as_tensor(prior_var, dtype=torch.float64)
        if not 0 < (value := var0.detach().item()) < float("inf"):
            raise InputError(f"`prior_var` must be a positive number, but got {value}")
        if self.mode == "exact":
            inverse = 1 / (torch.outer(self._a, self._b) / self.n + 1 / var0)
            return Posterior("exact", self._basis, inverse, torch.zeros_like(var0), self._directions)
        prior = var0**-0.5
        inverse = 1 / (self._a / sqrt(self.n) + prior)
        covariance = (self._directions / (self._b / sqrt(self.n) + prior)) @ self._directions.T
        root, failed = torch.linalg.cholesky_ex((covariance + covariance.T) / 2)
        if failed.item():
            raise InputError(
                f"curvature factor B has an eigenvalue of {float(self._b[-1]):.3g}, too large for a prior variance of "
                f"{value:.3g}: the posterior covariance is singular"
            )
        offset = 1 / (sqrt(self.n) + prior) if self._separate_bias else torch.zeros_like(var0)
        return Posterior(self.mode, self._basis, inverse, offset, root)


def _eigh(factor: Tensor, name: str, n: int) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues and eigenvectors of a sum of outer products over n samples, in float64.

    Sums in float32, and sums of a net that is certain of every prediction, may have slightly negative eigenvalues.
    Within rounding errors these count as zeros. If they are more negative, the matrix is not a sum of outer products,
    and every result from it would be wrong.
    """
    values, vectors = torch.linalg.eigh(factor.double())
    if float(values[0]) < -1e-5 * float(values[-1].abs()) - 1e-6 * n:
        raise InputError(
            f"curvature factor {name} must be positive semi-definite, "
            f"but has eigenvalues from {float(values[0]):.3g} to {float(values[-1]):.3g}"
        )
    return values.clamp(min=0), align(vectors)  # LAPACK returns them column-major
