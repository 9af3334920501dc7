"""Traces and calibrations with many classes: nothing dense or cubic without need, and the same results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import random_curvature, random_trace

import exitwise as ew
from exitwise.calibration import laplace, tuning
from exitwise.calibration.laplace import Curvature, CurvatureEigen, is_symmetric

PEAK = """
import json, resource, sys, torch
import exitwise as ew
from exitwise.calibration.laplace import Curvature
from exitwise.calibration.trace import HeadWeights, Split
from exitwise.core.costs import Costs

torch.set_num_threads(1)
c, p, n = 3000, 8, 40
generator = torch.Generator().manual_seed(0)
x = torch.randn(n, p, generator=generator)
B = torch.full((c, c), -1 / c, dtype=torch.float64)
B.diagonal().add_(1)
curvature = Curvature(torch.eye(p + 1, dtype=torch.float64), B, 1000)
head = HeadWeights(torch.randn(c, p, generator=generator), torch.zeros(c))
small = torch.randn(400, 400, dtype=torch.float64)
torch.linalg.cholesky_ex(small @ small.T + torch.eye(400))  # the libraries' own memory

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / B.nbytes  # in matrices of the size of B

before = peak()
split = Split((x, x), torch.arange(n))
trace = ew.Trace(split, None, (head, head), (curvature, curvature), Costs((1.0, 2.0)))
built = peak()
calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", num_draws=4)
calibrated = peak()
calibration.save(sys.argv[1])
print(json.dumps({"trace": built - before, "calibration": calibrated - built}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured in units of Linux")
def test_memory_of_a_trace_and_of_a_calibration(tmp_path: Path) -> None:
    """In matrices (c, c) of float64: none for a trace, and one or two for a calibration, not one per grid point."""
    command = [sys.executable, "-c", PEAK, str(tmp_path / "calibration.safetensors")]
    peaks = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peaks["trace"] < 0.5
    assert peaks["calibration"] < 3
    # Draws (S, c) are kept, not a root (c, c) for each exit.
    assert (tmp_path / "calibration.safetensors").stat().st_size < 3000 * 3000


def test_the_paper_posterior_needs_no_eigenvectors_of_B(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (sizes.append(len(matrix)), eigh(matrix))[1])
    trace = random_trace()
    ew.calibrate(trace, "MIE Laplace T_opt sigma_opt")
    assert sizes == [len(curvature.A) for curvature in trace.curvature]


@pytest.mark.parametrize("size", [3, laplace._TILE, laplace._TILE + 1, 2 * laplace._TILE + 7])
def test_one_asymmetric_entry_is_found_in_any_tile(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    matrix = torch.randn(size, size, dtype=torch.float64, generator=generator)
    matrix = matrix + matrix.T
    assert is_symmetric(matrix)
    rounded = matrix + 1e-7 * torch.randn(size, size, dtype=torch.float64, generator=generator)
    assert is_symmetric(rounded)
    for row, column in [(0, size - 1), (size - 1, 0), (size // 2, size // 2 - 1), (size - 1, size - 2)]:
        broken = matrix.clone()
        broken[row, column] += 1e-3
        assert not is_symmetric(broken)
        assert not torch.allclose(broken, broken.T, rtol=1e-4, atol=1e-6 * float(broken.abs().max()))


@pytest.mark.parametrize("mode", ["paper", "naive"])
@pytest.mark.parametrize("var0", [0.01, 2.0, 100.0])
def test_shifts_are_those_of_the_cholesky_factor_of_the_inverse(mode: str, var0: float) -> None:
    curvature, _ = random_curvature(4, 30)
    U = curvature.B / curvature.n**0.5 + torch.eye(30, dtype=torch.float64) * var0**-0.5
    expected = torch.linalg.cholesky(torch.linalg.inv(U))
    eigen = CurvatureEigen(curvature, mode)  # type: ignore[arg-type]
    torch.testing.assert_close(eigen.posterior(var0).root, expected, rtol=1e-9, atol=1e-12)
    draws = torch.randn(7, 30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(eigen.shifts(var0, draws.double()), draws.double() @ expected.T, rtol=1e-9, atol=1e-12)
    assert eigen.shifts(var0, draws).dtype == torch.float32


def test_the_gradient_of_shifts_in_the_prior_variance() -> None:
    curvature, _ = random_curvature(4, 6)
    eigen, draws = CurvatureEigen(curvature), torch.randn(3, 6, dtype=torch.float64)
    prior_var = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda var0: eigen.shifts(var0, draws), (prior_var,))


def test_a_matrix_that_is_not_diagonally_dominant_is_decomposed() -> None:
    """Sums in which some terms are missing from the diagonal are no longer dominant, but can be semi-definite."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(6, 9, dtype=torch.float64, generator=generator)
    B = factor.T @ factor
    draws = torch.randn(5, 9, dtype=torch.float64, generator=generator)
    expected = torch.linalg.cholesky(torch.linalg.inv(B / 10 + torch.eye(9, dtype=torch.float64) * 2**-0.5))
    eigen = CurvatureEigen(Curvature(torch.eye(4, dtype=torch.float64), B, 100))
    torch.testing.assert_close(eigen.shifts(2.0, draws), draws @ expected.T)


def peaked_curvature(classes: int, n: int) -> Curvature:
    generator = torch.Generator().manual_seed(classes)
    features, weight = torch.randn(2000, 16, generator=generator), torch.randn(16, classes, generator=generator)
    curvature = laplace.batch_curvature(features, features @ weight, True)
    return Curvature(curvature.A * (n / 2000), curvature.B * (n / 2000), n)


@pytest.mark.parametrize("n", [2000, 1_000_000])
def test_float32_factorizations_are_within_the_stated_tolerance(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    curvature = peaked_curvature(600, n)
    eigen = CurvatureEigen(curvature)
    draws = torch.randn(20, 600, generator=torch.Generator().manual_seed(0))
    for var0 in (0.5, 4.0):
        expected = eigen.shifts(var0, draws)
        with monkeypatch.context() as patch:
            patch.setattr(laplace, "MANY_CLASSES", 100)
            assert eigen._choose_dtype(var0) == torch.float32
            actual = eigen.shifts(var0, draws)
        assert not torch.equal(actual, expected)
        assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


def test_ill_conditioned_curvature_is_factorized_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "MANY_CLASSES", 100)
    eigen = CurvatureEigen(peaked_curvature(200, 2000))
    assert eigen._choose_dtype(4.0) == torch.float32
    assert eigen._choose_dtype(1e9) == torch.float64


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The representations of many classes for a few."""
    monkeypatch.setattr(laplace, "MANY_CLASSES", 2)
    monkeypatch.setattr(tuning, "MANY_CLASSES", 2)


@pytest.mark.parametrize("method", ["Laplace", "MIE Laplace T_opt sigma_opt", "PoE Laplace T_opt sigma_opt"])
def test_calibrations_of_many_classes_agree(method: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    trace = random_trace()
    expected = ew.calibrate(trace, method)
    request.getfixturevalue("many")
    calibration = ew.calibrate(trace, method)
    assert all(exit.posterior is not None and exit.posterior.root is None for exit in calibration.exits)
    assert (calibration.temperatures, calibration.prior_vars) == (expected.temperatures, expected.prior_vars)
    calibration.save(tmp_path / "calibration.safetensors")
    loaded = ew.Calibration.load(tmp_path / "calibration.safetensors")
    preds, again, reference = (x.predict(trace.val) for x in (calibration, loaded, expected))
    assert torch.equal(preds.probs, again.probs)
    torch.testing.assert_close(preds.probs, reference.probs, rtol=0, atol=2e-6)
    if reference.variance is not None:
        torch.testing.assert_close(torch.tensor(preds.variance), torch.tensor(reference.variance), rtol=1e-4, atol=1e-6)


def test_a_covariance_that_is_not_kept_is_refused(many: None) -> None:
    trace = random_trace()
    posterior = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt").exits[0].posterior
    assert posterior is not None
    with pytest.raises(ew.InputError, match="no `root`"):
        posterior.covariance(trace.val.features[0])
