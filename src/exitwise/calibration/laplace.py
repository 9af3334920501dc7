"""The last-layer Laplace approximation at one exit: curvature sums, posterior, and its covariance of the logits.

With phi~ = (phi, 1) the features of a sample and p its softmax, the generalized Gauss-Newton matrix of the last layer
is approximated by the Kronecker product of A = sum phi~ phi~^T and B = sum (diag(p) - p p^T), in closed form.

Three posteriors, with prior variance var0:

- paper: V = A/sqrt(n) + I/sqrt(var0), U = B/sqrt(n) + I/sqrt(var0); logits ~ N(W~ phi~, s(x) U^-1) with one number
  s(x) = phi~^T V^-1 phi~ per sample, so that the draws L g, with L L^T = U^-1, are multiplied once, before test time.
- naive: the same with the bias kept apart, covariance (U sqrt(n) + U/sqrt(var0))^-1, and a Cholesky factor per sample.
- exact: the prior is added to the product itself, A (x) B / n + I/var0, in the eigenbasis of both factors; logits
  ~ N(W~ phi~, Q_B diag(s_1(x) .. s_c(x)) Q_B^T).

For c classes, paper needs neither eigenvectors of B nor the matrix L. With J the matrix that reverses the order of the
classes and C C^T = J U J the Cholesky factorization of the reversed U, L = J C^-T J: the draws L g take c^3 / 3
multiplications for each prior variance, and two c x c matrices in memory. Above 2,048 classes the factorization is in
float32 if U is well-conditioned, which changes the draws by less than 1e-5 of their size (measured: 5e-7).
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
_TILE = 512  # rows and columns of the parts of a c x c matrix that are checked at once

MANY_CLASSES = 2048  # above: factorizations in float32, and calibrations keep the draws L g instead of the matrix L
_MAX_CONDITION = 1000.0  # largest condition number of U for float32


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
    B = (p.T @ p).neg_()
    B.diagonal().add_(p.sum(dim=0))
    return Curvature(A=phi.T @ phi, B=B, n=len(features))


class CurvatureSum:
    """Sums over all batches; they do not depend on the order or the size of the batches."""

    def __init__(self, features: int, classes: int, bias: bool = True) -> None:
        self._bias = bias
        self._A = torch.zeros(features + bias, features + bias, dtype=torch.float64)
        self._B = torch.zeros(classes, classes, dtype=torch.float64)
        self._n = 0

    def update(self, features: Tensor, logits: Tensor) -> None:
        # In place, because B of many classes takes gigabytes.
        phi = append_ones(features.double(), self._bias).to(self._A.device)
        p = logits.double().softmax(dim=1).to(self._B.device)
        self._A.addmm_(phi.T, phi)
        self._B.addmm_(p.T, p, alpha=-1)
        self._B.diagonal().add_(p.sum(dim=0))
        self._n += len(features)

    def add(self, curvature: Curvature) -> None:
        """Add the sums over other samples."""
        self._A += curvature.A
        self._B += curvature.B
        self._n += curvature.n

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
    root: Tensor | None  # (c, c): the Cholesky factor L of U^-1, or the eigenvectors of B; None if only L g is kept

    def __post_init__(self) -> None:
        align_fields(self, "basis", "inverse", "offset", "root")

    def to_float32(self) -> "Posterior":
        """Return the posterior in float32, for prediction."""
        root = None if self.root is None else self.root.float()
        return Posterior(self.mode, self.basis.float(), self.inverse.float(), self.offset.float(), root)

    def dense_root(self) -> Tensor:
        """Return `root` (c, c); raise InputError if this posterior keeps only the draws that it was multiplied with."""
        if self.root is None:
            raise InputError("the posterior has no `root`: with many classes only the draws L g (S, c) are kept")
        return self.root

    def squared_projections(self, features: Tensor) -> Tensor:
        """Compute the squares (phi~ basis)^2 (n, q) from features (n, p)."""
        return _squared_projections(features, self.basis)

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
        scale, root = self.scale(features), self.dense_root().to(features.dtype)
        scale = scale[:, None].expand(-1, len(root)) if scale.dim() == 1 else scale
        return torch.einsum("ik,nk,jk->nij", root, scale, root)


def _squared_projections(features: Tensor, basis: Tensor) -> Tensor:
    """Compute the squares (phi~ basis)^2 (n, q) from features (n, p) and a basis (q, q), with q = p or q = p + 1."""
    bias = len(basis) == features.shape[1] + 1
    squares: Tensor = (append_ones(features, bias) @ basis.to(features.dtype)).square()
    return squares


class CurvatureEigen:
    """Posterior of one exit for any prior variance.

    The eigendecomposition of A, and that of B for `exact`, are computed once. For paper and naive, U is factorized for
    each prior variance, see the top of this module.
    """

    def __init__(self, curvature: Curvature, mode: Mode = "paper", bias: bool = True) -> None:
        check_choice("mode", mode, MODES)
        self.mode = mode
        self.n = curvature.n
        # `naive` treats the bias separately, so A loses the row and the column of the bias.
        self._separate_bias = mode == "naive" and bias
        A = curvature.A[:-1, :-1] if self._separate_bias else curvature.A
        self._a, self._basis = _eigh(A, "A", curvature.n)
        if mode == "exact":
            self._b, self._directions = _eigh(curvature.B, "B", curvature.n)
        else:
            self._B, self._bound = _make_semidefinite(curvature.B, curvature.n)

    def posterior(self, prior_var: float | Tensor, with_root: bool = True) -> Posterior:
        """Compute the posterior for a prior variance, in float64; differentiable in `prior_var`.

        Args:
            prior_var: The prior variance.
            with_root: Compute `root` for paper and naive, too. Without it the posterior is cheap, see `shifts`.
        """
        var0 = _check_prior_var(prior_var)
        if self.mode == "exact":
            inverse = 1 / (torch.outer(self._a, self._b) / self.n + 1 / var0)
            return Posterior("exact", self._basis, inverse, torch.zeros_like(var0), self._directions)
        prior = var0**-0.5
        inverse = 1 / (self._a / sqrt(self.n) + prior)
        root = None
        if with_root:
            C = self._factorize(var0, torch.float64)
            identity = torch.eye(len(C), dtype=C.dtype)
            root = torch.linalg.solve_triangular(C.mT, identity, upper=True).flip(0, 1)
        offset = 1 / (sqrt(self.n) + prior) if self._separate_bias else torch.zeros_like(var0)
        return Posterior(self.mode, self._basis, inverse, offset, root)

    def squared_projections(self, features: Tensor) -> Tensor:
        """Compute the squares (phi~ basis)^2 (n, q) from features (n, p); they do not depend on the prior variance."""
        return _squared_projections(features, self._basis)

    def shifts(self, prior_var: float | Tensor, draws: Tensor) -> Tensor:
        """Compute L g (S, c) of standard normals g (S, c), for paper and naive; differentiable in `prior_var`."""
        var0 = _check_prior_var(prior_var)
        C = self._factorize(var0, self._choose_dtype(float(var0.detach())))
        reversed_draws = draws.to(C.dtype).flip(1).T
        shifts = torch.linalg.solve_triangular(C.mT, reversed_draws, upper=True).T.flip(1)
        return align(shifts.to(draws.dtype))

    def _choose_dtype(self, var0: float) -> torch.dtype:
        """Return float32 for many classes if U is well-conditioned, else float64."""
        if len(self._B) <= MANY_CLASSES:
            return torch.float64
        condition = 1 + self._bound / sqrt(self.n) * sqrt(var0)
        return torch.float32 if condition <= _MAX_CONDITION else torch.float64

    def _factorize(self, var0: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the lower Cholesky factor C (c, c) of J U J, where J reverses the order of the classes."""
        U = self._B.to(dtype).flip(0, 1).div_(sqrt(self.n))
        U.diagonal().add_((var0**-0.5).to(dtype))
        C: Tensor
        C, failed = torch.linalg.cholesky_ex(U)
        if failed.item():
            raise InputError(
                f"curvature factor B has eigenvalues of up to {self._bound:.3g}, too large for a prior variance of "
                f"{float(var0.detach()):.3g}: the posterior covariance is singular"
            )
        return C


def _check_prior_var(prior_var: float | Tensor) -> Tensor:
    var0 = torch.as_tensor(prior_var, dtype=torch.float64)
    if not 0 < (value := var0.detach().item()) < float("inf"):
        raise InputError(f"`prior_var` must be a positive number, but got {value}")
    return var0


def is_symmetric(matrix: Tensor) -> bool:
    """Return whether a matrix is symmetric up to 1e-4 of each entry and 1e-6 of the largest.

    Tile by tile: a transposed matrix of many classes does not fit in a cache, and its differences take gigabytes.
    """
    low, high = torch.aminmax(matrix)
    tolerance = 1e-6 * max(abs(float(low)), abs(float(high)))
    for start in range(0, len(matrix), _TILE):
        rows = slice(start, start + _TILE)
        for other in range(start, len(matrix), _TILE):
            columns = slice(other, other + _TILE)
            tile, mirrored = matrix[rows, columns], matrix[columns, rows].T
            if torch.equal(tile, mirrored):
                continue
            smaller = torch.minimum(tile.abs(), mirrored.abs())
            if bool(((tile - mirrored).abs() > tolerance + 1e-4 * smaller).any()):
                return False
    return True


def _make_semidefinite(B: Tensor, n: int) -> tuple[Tensor, float]:
    """Return B and an upper bound of its eigenvalues; raise InputError if any is negative beyond rounding errors.

    Each term diag(p) - p p^T has rows whose off-diagonal entries sum to minus the diagonal one. A diagonally dominant
    matrix has no negative eigenvalues (Gershgorin), so only other matrices are decomposed. Their eigenvalues that are
    negative within rounding errors are replaced by zeros.
    """
    diagonal = B.diagonal()
    row_sums = torch.cat([B[start : start + _TILE].abs().sum(dim=1) for start in range(0, len(B), _TILE)])
    tolerance = 1e-5 * float(diagonal.abs().max()) + 1e-9 * n
    if float((2 * diagonal - row_sums).min()) >= -tolerance:
        return B, float(row_sums.max())
    values, vectors = _eigh(B, "B", n)
    return align((vectors * values) @ vectors.T), float(values[-1])


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
