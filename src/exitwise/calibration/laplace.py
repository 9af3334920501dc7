"""The last-layer Laplace approximation at one exit: curvature sums, posterior, and its covariance of the logits.

With phi~ = (phi, 1) the features of a sample and p its softmax, the generalised Gauss-Newton matrix of the last layer
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

from exitwise.core.errors import InputError
from exitwise.core.memory import align, align_fields

Mode = Literal["paper", "exact", "naive"]
MODES: tuple[Mode, ...] = get_args(Mode)

_RATE = 0.95  # of the public code's exponential average


@dataclass(frozen=True, eq=False)
class Curvature:
    """Sums over n samples: A (q, q) of feature products, q = p + 1 with a bias and p without, and B (c, c)."""

    A: Tensor
    B: Tensor
    n: int

    def __post_init__(self) -> None:
        align_fields(self, "A", "B")


class CurvatureAccumulator(Protocol):
    """Takes batches of features (m, p) and logits (m, c), gives the curvature of all of them."""

    def update(self, features: Tensor, logits: Tensor) -> None: ...
    def result(self) -> Curvature: ...


def append_ones(features: Tensor, bias: bool) -> Tensor:
    """phi~: features (n, p) with a column of ones behind them where the last layer has a bias."""
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1) if bias else features


def batch_curvature(features: Tensor, logits: Tensor, bias: bool) -> Curvature:
    """A and B of one batch, in float64: features (m, p), logits (m, c)."""
    phi = append_ones(features.double(), bias)
    p = logits.double().softmax(dim=1)
    return Curvature(A=phi.T @ phi, B=torch.diag(p.sum(dim=0)) - p.T @ p, n=len(features))


class CurvatureSum:
    """Plain sums: what a batch adds does not depend on the others, so the order and the batch size do not matter."""

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
    """The public code's exponential average over batches, rate min(1 - 1/(i + 1), .95), for comparison.

    It is dominated by the last twenty batches or so. The result is scaled to sums over all n samples, so that it can
    stand wherever `CurvatureSum`'s does.
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
    """Covariance of the logits of a sample, as `root diag(scale(x)) root^T`.

    scale(x) = squares(x) @ inverse + offset, with squares(x) = (phi~ basis)^2: one number per sample (n,) for paper and
    naive, one per direction (n, c) for exact. It is a sum of non-negative terms, so it cannot come out negative.
    """

    mode: Mode
    basis: Tensor  # (q, q), eigenvectors of A
    inverse: Tensor  # (q,) or (q, c)
    offset: Tensor  # () what the bias adds where it is kept apart
    root: Tensor  # (c, c): the Cholesky factor L of U^-1, or the eigenvectors of B

    def __post_init__(self) -> None:
        align_fields(self, "basis", "inverse", "offset", "root")

    def to_float32(self) -> "Posterior":
        """The same in float32, for predicting."""
        parts = {name: getattr(self, name).float() for name in ("basis", "inverse", "offset", "root")}
        return Posterior(self.mode, **parts)

    def squared_projections(self, features: Tensor) -> Tensor:
        """(n, q) from features (n, p)."""
        bias = self.basis.shape[0] == features.shape[1] + 1
        squares: Tensor = (append_ones(features, bias) @ self.basis.to(features.dtype)).square()
        return squares

    def scale(self, features: Tensor) -> Tensor:
        """(n,) or (n, c) from features (n, p)."""
        return self.scale_from_squares(self.squared_projections(features))

    def scale_from_squares(self, squares: Tensor) -> Tensor:
        scale: Tensor = squares @ self.inverse.to(squares.dtype) + self.offset.to(squares.dtype)
        return scale.clamp(min=torch.finfo(scale.dtype).tiny)  # features all zero, no bias: a root needs more than 0

    def covariance(self, features: Tensor) -> Tensor:
        """(n, c, c), for small cases: everything else works without it."""
        scale = self.scale(features)
        scale = scale[:, None].expand(-1, len(self.root)) if scale.dim() == 1 else scale
        root = self.root.to(features.dtype)
        return torch.einsum("ik,nk,jk->nij", root, scale, root)


class CurvatureEigen:
    """Eigenvalues and eigenvectors of one exit's factors, computed once; any prior variance is then cheap."""

    def __init__(self, curvature: Curvature, mode: Mode = "paper", bias: bool = True) -> None:
        if mode not in MODES:
            raise InputError(f"`mode` must be one of {', '.join(MODES)}, but got {mode!r}")
        self.mode = mode
        self.n = curvature.n
        # The bias row and column of A are those that `naive` keeps apart.
        self._apart = mode == "naive" and bias
        A = curvature.A[:-1, :-1] if self._apart else curvature.A
        self._a, self._basis = _eigh(A, "A", curvature.n)
        self._b, self._directions = _eigh(curvature.B, "B", curvature.n)

    def posterior(self, prior_var: float | Tensor) -> Posterior:
        """The posterior under a prior variance, float64; differentiable in it."""
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
                f"curvature factor B is {float(self._b[-1]):.3g}, too much beside a prior variance of {value:.3g}: "
                f"the posterior covariance is singular"
            )
        offset = 1 / (sqrt(self.n) + prior) if self._apart else torch.zeros_like(var0)
        return Posterior(self.mode, self._basis, inverse, offset, root)


def _eigh(factor: Tensor, name: str, n: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues and -vectors of a sum of outer products over n samples, in float64.

    Sums made in float32, or of a net that is certain of everything, may have slightly negative eigenvalues: within
    rounding they are zeros. Below that the matrix is not what it should be, and any answer from it would be wrong.
    """
    values, vectors = torch.linalg.eigh(factor.double())
    if float(values[0]) < -1e-5 * float(values[-1].abs()) - 1e-6 * n:
        raise InputError(
            f"curvature factor {name} must be positive semi-definite, "
            f"but has eigenvalues from {float(values[0]):.3g} to {float(values[-1]):.3g}"
        )
    return values.clamp(min=0), align(vectors)  # LAPACK's are column-major
