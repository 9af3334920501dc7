"""Curvature and posteriors against dense matrices."""

from math import sqrt

import pytest
import torch
from cases import random_curvature
from torch import Tensor

import exitwise as ew
from exitwise.calibration.laplace import (
    MODES,
    Curvature,
    CurvatureEigen,
    CurvatureMovingAverage,
    CurvatureSum,
    append_ones,
)
from exitwise.calibration.mc_softmax import sample_logits

pytestmark = pytest.mark.numerical


def dense_covariance(curvature: Curvature, features: Tensor, var0: float, mode: str, bias: bool = True) -> Tensor:
    """Return covariances (n, c, c) from the full posterior over all weights, index = feature * c + class."""
    A, B, n, c = curvature.A, curvature.B, curvature.n, len(curvature.B)
    U = B / sqrt(n) + torch.eye(c) / sqrt(var0)
    phi = append_ones(features, bias)
    extra = torch.zeros(c, c, dtype=torch.float64)
    if mode == "exact":
        posterior = torch.linalg.inv(torch.kron(A, B) / n + torch.eye(len(A) * c) / var0)
    else:
        if mode == "naive" and bias:
            A, phi = A[:-1, :-1].contiguous(), features
            extra = torch.linalg.inv(U) / (sqrt(n) + 1 / sqrt(var0))
        V = A / sqrt(n) + torch.eye(len(A)) / sqrt(var0)
        posterior = torch.linalg.inv(torch.kron(V, U))
    rows = []
    for x in phi:
        jacobian = torch.kron(x[None], torch.eye(c, dtype=torch.float64))
        rows.append(jacobian @ posterior @ jacobian.T + extra)
    return torch.stack(rows)


def test_curvature_of_one_sample_is_the_hessian_of_its_cross_entropy() -> None:
    torch.manual_seed(0)
    phi, weight = torch.randn(1, 4, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    sums = CurvatureSum(4, 3)
    sums.update(phi, append_ones(phi, True) @ weight.T)
    curvature = sums.result()

    def loss(flat: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(append_ones(phi, True) @ flat.view(5, 3), torch.tensor([1]))

    hessian = torch.autograd.functional.hessian(loss, weight.T.reshape(-1))
    torch.testing.assert_close(torch.kron(curvature.A, curvature.B), hessian)


@pytest.mark.parametrize("batch", [1, 7, 200])
def test_sums_do_not_depend_on_the_batches(batch: int) -> None:
    torch.manual_seed(1)
    features, logits = torch.randn(200, 5), torch.randn(200, 4) * 3
    sums = CurvatureSum(5, 4)
    for start in range(0, 200, batch):
        sums.update(features[start : start + batch], logits[start : start + batch])
    curvature = sums.result()
    phi, p = append_ones(features.double(), True), logits.double().softmax(1)
    torch.testing.assert_close(curvature.A, sum(torch.outer(x, x) for x in phi), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(curvature.B, sum(torch.diag(q) - torch.outer(q, q) for q in p), rtol=1e-12, atol=1e-12)
    assert curvature.n == 200


def test_a_result_is_not_changed_by_what_comes_after() -> None:
    sums = CurvatureSum(2, 2)
    sums.update(torch.ones(3, 2), torch.zeros(3, 2))
    before = sums.result()
    A = before.A.clone()
    sums.update(torch.ones(3, 2), torch.zeros(3, 2))
    assert torch.equal(before.A, A)


def test_exponential_average_follows_the_public_rule() -> None:
    torch.manual_seed(2)
    batches = [(torch.randn(16, 3), torch.randn(16, 4)) for _ in range(40)]
    average = CurvatureMovingAverage(3, 4)
    A = B = torch.zeros(())
    for i, (features, logits) in enumerate(batches):
        average.update(features, logits)
        rho = min(1 - 1 / (i + 1), 0.95)
        phi, p = append_ones(features.double(), True), logits.double().softmax(1)
        A = rho * A + (1 - rho) * (phi[:, :, None] * phi[:, None]).mean(0)
        B = rho * B + (1 - rho) * (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    curvature = average.result()
    assert curvature.n == 640
    torch.testing.assert_close(curvature.A / curvature.n, A)
    torch.testing.assert_close(curvature.B / curvature.n, B)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("var0", [0.3, 2.0, 50.0])
def test_logit_covariance_agrees_with_the_dense_posterior(mode: str, bias: bool, var0: float) -> None:
    curvature, features = random_curvature(4, 3, bias=bias)
    posterior = CurvatureEigen(curvature, mode, bias).posterior(var0)  # type: ignore[arg-type]
    expected = dense_covariance(curvature, features[:5], var0, mode, bias)
    torch.testing.assert_close(posterior.covariance(features[:5]), expected)


def test_naive_is_paper_where_features_have_zero_mean_and_not_elsewhere() -> None:
    torch.manual_seed(3)
    features, logits = torch.randn(300, 4, dtype=torch.float64), torch.randn(300, 3, dtype=torch.float64)
    covariances = []
    for shift in (0.0, 2.0):
        moved = features - features.mean(0) + shift
        sums = CurvatureSum(4, 3)
        sums.update(moved, logits)
        for mode in ("paper", "naive"):
            covariances.append(CurvatureEigen(sums.result(), mode).posterior(2.0).covariance(moved[:6]))  # type: ignore[arg-type]
    torch.testing.assert_close(covariances[0], covariances[1])
    assert not torch.allclose(covariances[2], covariances[3], rtol=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_sampled_logits_have_the_posterior_covariance(mode: str) -> None:
    curvature, features = random_curvature(4, 3)
    posterior = CurvatureEigen(curvature, mode).posterior(2.0)  # type: ignore[arg-type]
    draws = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits, x = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64), features[:1]
    sampled = sample_logits(logits, posterior.scale(x), posterior, draws)[0]
    torch.testing.assert_close(sampled.mean(0), logits[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(sampled.T.cov(), posterior.covariance(x)[0], atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("mode", MODES)
def test_factors_summed_in_float32_are_handled(mode: str) -> None:
    """Sums in float32 of nearly collinear features of very different size, which are not positive definite."""
    torch.manual_seed(4)
    base = torch.randn(400, 2)
    features = torch.cat([base, base * 1e3 + 1e-3 * torch.randn(400, 2), torch.zeros(400, 1)], dim=1)
    phi = append_ones(features, True)
    p = (torch.randn(400, 6) * 20).softmax(1)
    curvature = Curvature((phi.T @ phi).double(), (torch.diag(p.sum(0)) - p.T @ p).double(), 400)
    assert float(torch.linalg.eigvalsh(curvature.A)[0]) < 0
    posterior = CurvatureEigen(curvature, mode).posterior(2.0)  # type: ignore[arg-type]
    scale = posterior.scale(features.double())
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    assert bool(torch.isfinite(posterior.root).all())


@pytest.mark.parametrize("mode", MODES)
def test_a_net_that_is_certain_of_everything_has_no_curvature_in_B_and_is_handled(mode: str) -> None:
    torch.manual_seed(6)
    features, labels = torch.randn(500, 4), torch.randint(7, (500,))
    sums = CurvatureSum(4, 7)
    sums.update(features, torch.nn.functional.one_hot(labels, 7) * 60.0)
    posterior = CurvatureEigen(sums.result(), mode).posterior(2.0)  # type: ignore[arg-type]
    assert bool(torch.isfinite(posterior.covariance(features[:3].double())).all())


@pytest.mark.parametrize("factor", ["A", "B"])
def test_an_indefinite_factor_is_refused(factor: str) -> None:
    curvature, _ = random_curvature(3, 3)
    broken = {
        "A": curvature.A,
        "B": curvature.B,
        factor: getattr(curvature, factor) - 100 * torch.eye(len(getattr(curvature, factor)), dtype=torch.float64),
    }
    with pytest.raises(ew.InputError, match=f"factor {factor} must be positive semi-definite"):
        CurvatureEigen(Curvature(**broken, n=curvature.n))


@pytest.mark.parametrize("var0", [0.0, -1.0, float("nan"), float("inf")])
def test_prior_variances_that_are_none_are_refused(var0: float) -> None:
    with pytest.raises(ew.InputError, match="prior_var"):
        CurvatureEigen(random_curvature(3, 3)[0]).posterior(var0)


def test_a_posterior_that_is_singular_is_refused() -> None:
    huge = Curvature(torch.eye(4, dtype=torch.float64), torch.full((5, 5), 3e38, dtype=torch.float64), 500)
    with pytest.raises(ew.InputError, match="the posterior covariance is singular"):
        CurvatureEigen(huge).posterior(2.0)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ew.InputError, match="paper, exact, naive"):
        CurvatureEigen(random_curvature(3, 3)[0], "diagonal")  # type: ignore[arg-type]
