"""The fast route against a plain implementation in float64 that shares no code with it."""

import subprocess
import sys
from math import log

import pytest
import torch
from cases import softmax_case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exitwise.calibration import mc_softmax

pytestmark = pytest.mark.numerical


def plain_log_probs(logits: Tensor, t: Tensor, shifts: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities (n, c) in float64, from every logit of every draw."""
    z = (logits.double()[:, None] + t.double()[:, None, None] * shifts.double()) / temperature
    return z.log_softmax(2).logsumexp(1) - log(len(shifts))


@pytest.mark.parametrize("temperature", [0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize(("n", "spread"), [(1, 0.2), (65, 0.2), (1000, 0.0), (1000, 0.2), (6000, 0.2), (300, 2.0)])
def test_all_probabilities(n: int, spread: float, temperature: float) -> None:
    logits, _, t, shifts = softmax_case(n, 12, 20, seed=n, spread=spread)
    log_probs = mc_softmax.interpolated_log_mean_softmax(logits, t, shifts, temperature)
    expected = plain_log_probs(logits, t, shifts, temperature)
    torch.testing.assert_close(log_probs.exp().double(), expected.exp(), atol=3e-6, rtol=0)
    # Logarithms of tiny probabilities agree, too, up to the precision of float32 logits divided by T.
    torch.testing.assert_close(log_probs.double(), expected, atol=2e-5, rtol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 400),
    c=st.integers(2, 20),
    draws=st.integers(1, 30),
    spread=st.sampled_from([0.0, 0.05, 0.3, 1.5]),
    size=st.sampled_from([0.0, 1.0, 10.0, 200.0]),
    seed=st.integers(0, 10_000),
)
def test_true_label_at_every_grid_point(n: int, c: int, draws: int, spread: float, size: float, seed: int) -> None:
    logits, labels, t, shifts = softmax_case(n, c, draws, seed, spread, size)
    rows, blocks = torch.stack([t, t * 1.3]), torch.stack([shifts, shifts.flip(0) * 0.7])
    temperatures = torch.tensor([0.3, 1.0, 2.5])
    log_true = mc_softmax.grid_log_true(logits, labels, rows, blocks, temperatures)
    assert log_true.shape == (3, 2, n)
    for i, temperature in enumerate(temperatures.tolist()):
        for v in range(2):
            expected = plain_log_probs(logits, rows[v], blocks[v], temperature)[torch.arange(n), labels]
            torch.testing.assert_close(log_true[i, v].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("factor", [1.0, 1e2, 1e4])
def test_shifts_too_large_for_exponentials_take_the_plain_route(factor: float) -> None:
    logits, labels, t, shifts = softmax_case(200, 8, 10, seed=5)
    t[::7] *= factor
    log_probs = mc_softmax.interpolated_log_mean_softmax(logits, t, shifts, 0.5)
    expected = plain_log_probs(logits, t, shifts, 0.5)
    torch.testing.assert_close(log_probs.exp().double(), expected.exp(), atol=1e-5, rtol=0)
    true = mc_softmax.grid_log_true(logits, labels, t[None], shifts[None], torch.tensor([0.5]))[0, 0]
    expected_true = expected[torch.arange(200), labels]
    torch.testing.assert_close(true.double(), expected_true, atol=1e-4, rtol=1e-5)


def test_log_probabilities_stay_finite_where_probabilities_are_zero() -> None:
    logits = torch.tensor([[0.0, 5e3, -5e3], [0.0, 0.0, 200.0]])
    log_probs = mc_softmax.interpolated_log_mean_softmax(logits, torch.tensor([0.5, 0.6]), torch.zeros(4, 3), 0.3)
    expected = (logits.double() / 0.3).log_softmax(1)
    assert bool((log_probs.exp() == 0).any())
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-6)


def test_gradients_are_those_of_the_plain_computation() -> None:
    logits, labels, t, shifts = softmax_case(2000, 10, 15, seed=8)
    temperature = torch.tensor([1.2], requires_grad=True)
    stretch = torch.tensor(1.1, requires_grad=True)
    mean_log_true = mc_softmax.grid_log_true(
        logits, labels, (t * stretch)[None], (shifts * stretch)[None], temperature
    ).mean()
    gradient = torch.autograd.grad(mean_log_true, (temperature, stretch))
    exact_t, exact_s = torch.tensor(1.2, dtype=torch.float64, requires_grad=True), stretch.detach().double()
    exact_s.requires_grad_()
    z = (logits.double()[:, None] + (t * exact_s)[:, None, None] * (shifts * exact_s)) / exact_t
    true = (z.log_softmax(2).logsumexp(1) - log(15))[torch.arange(2000), labels].mean()
    for got, expected in zip(gradient, torch.autograd.grad(true, (exact_t, exact_s)), strict=True):
        torch.testing.assert_close(got.double().squeeze(), expected, rtol=1e-3, atol=1e-5)


def test_results_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, t, shifts = softmax_case(900, 10, 20, seed=3, spread=0.4)
    whole = mc_softmax.interpolated_log_mean_softmax(logits, t, shifts, 1.0)
    true = mc_softmax.grid_log_true(logits, labels, t[None], shifts[None], torch.tensor([1.0]))
    monkeypatch.setattr(mc_softmax, "_CHUNK", 1000)
    torch.testing.assert_close(
        mc_softmax.interpolated_log_mean_softmax(logits, t, shifts, 1.0), whole, atol=2e-6, rtol=2e-6
    )
    torch.testing.assert_close(
        mc_softmax.grid_log_true(logits, labels, t[None], shifts[None], torch.tensor([1.0])), true, atol=2e-6, rtol=2e-6
    )


@pytest.mark.slow
def test_memory_stays_far_below_samples_times_draws_times_classes() -> None:
    """Limit memory to 500 MB, where n S c numbers would need 1.6 GB."""
    script = """
import resource, torch
from exitwise.calibration import mc_softmax
torch.set_num_threads(1)
logits, t, shifts = torch.randn(20_000, 400), torch.rand(20_000) + 0.5, torch.randn(50, 400)
labels = torch.zeros(20_000, dtype=torch.int64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mc_softmax.interpolated_log_mean_softmax(logits, t, shifts, 1.0)
mc_softmax.grid_log_true(logits, labels, torch.stack([t, t]), torch.stack([shifts, shifts]), torch.tensor([1.0]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 500  # MB: a few n x c arrays and one chunk
