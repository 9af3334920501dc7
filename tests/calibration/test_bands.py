"""Bands of a last layer: against a plain loop over eigenvectors, what does not change them, and what a pool gains."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from cases import random_trace
from classifier_cases import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import exitwise as ew
from exitwise.calibration import bands, pool
from exitwise.calibration.bands import NUM_BANDS, split_last_layer
from exitwise.calibration.pool import fit_pool
from exitwise.calibration.trace import HeadWeights, Split

pytestmark = pytest.mark.numerical


def last_layer(classes: int, p: int, seed: int, bias: bool = True) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, p, generator=generator)
    return HeadWeights(weight, torch.randn(classes, generator=generator) if bias else None)


def spread_features(n: int, p: int, seed: int) -> Tensor:
    """Features whose directions vary by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(p, p, generator=generator)).Q
    return torch.randn(n, p, generator=generator) * torch.logspace(0, -2, p) @ rotation


def hat(position: float, center: float) -> float:
    return max(0.0, 1 - abs(position - center) / 0.5)


def loop_bands(head: HeadWeights, features: Tensor) -> np.ndarray:
    """The bands (9, c, q) by a loop over pairs of eigenvectors, in NumPy."""
    phi, weight = features.double().numpy(), head.weight.double().numpy()
    if head.bias is not None:
        phi = np.concatenate([phi, np.ones((len(phi), 1))], axis=1)
        weight = np.concatenate([weight, head.bias.double().numpy()[:, None]], axis=1)
    logits = phi @ weight.T
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    covariance = sum(np.diag(p) - np.outer(p, p) for p in probs)
    class_values, class_vectors = np.linalg.eigh(covariance)
    feature_values, feature_vectors = np.linalg.eigh(phi.T @ phi)
    result = np.zeros((9, *weight.shape))
    for i, u in enumerate(class_vectors.T):
        for j, v in enumerate(feature_vectors.T):
            class_position = 1 - max(class_values[i], 0) / class_values[-1]
            ratio = max(feature_values[j] / feature_values[-1], 1e-3)
            part = np.outer(u, v) * (u @ weight @ v)
            for a, b in np.ndindex(3, 3):
                result[3 * a + b] += hat(class_position, a / 2) * hat(log(ratio) / log(1e-3), b / 2) * part
    return result


class TestSplit:
    @pytest.mark.parametrize("bias", [True, False])
    def test_it_is_that_of_a_loop(self, bias: bool) -> None:
        head, features = last_layer(4, 6, 0, bias), spread_features(60, 6, 1)
        result = split_last_layer(head, features)
        np.testing.assert_allclose(result.matrices.numpy(), loop_bands(head, features), atol=1e-10)

    @settings(max_examples=25, deadline=None)
    @given(
        n=st.integers(1, 40),
        p=st.integers(1, 8),
        classes=st.integers(2, 6),
        seed=st.integers(0, 1000),
        bias=st.booleans(),
    )
    def test_bands_sum_to_the_last_layer(self, n: int, p: int, classes: int, seed: int, bias: bool) -> None:
        head, features = last_layer(classes, p, seed, bias), spread_features(n, p, seed)
        result = split_last_layer(head, features)
        total = result.combine(torch.ones(NUM_BANDS, dtype=torch.float64))
        torch.testing.assert_close(total.weight, head.weight.T, atol=1e-5, rtol=1e-5)
        assert (total.bias is None) == (not bias)
        # float32 logits of nine bands, each rounded
        torch.testing.assert_close(result.logits.sum(dim=0), head.logits(features), atol=1e-4, rtol=1e-4)

    def test_an_update_gives_the_weighted_logits(self) -> None:
        head, features = last_layer(4, 6, 2), spread_features(50, 6, 3)
        result = split_last_layer(head, features)
        weights = torch.linspace(-1, 1, NUM_BANDS, dtype=torch.float64)
        update = result.combine(weights)
        assert update.bias is not None
        expected = torch.tensordot(weights.float(), result.logits, dims=1)
        torch.testing.assert_close(features @ update.weight + update.bias, expected, atol=1e-4, rtol=1e-4)

    def test_rotated_features_have_the_same_bands(self) -> None:
        head, features = last_layer(4, 6, 4, bias=False), spread_features(80, 6, 5)
        rotation = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(6))).Q
        rotated = split_last_layer(HeadWeights(head.weight @ rotation, None), features @ rotation)
        # float32 features change the smallest eigenvalues, and with them positions, in the fifth digit
        torch.testing.assert_close(rotated.logits, split_last_layer(head, features).logits, atol=2e-3, rtol=2e-3)

    def test_blocks_do_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        head, features = last_layer(4, 6, 7), spread_features(80, 6, 8)
        whole = split_last_layer(head, features)
        monkeypatch.setattr(bands, "_BLOCK", 32)
        np.testing.assert_allclose(split_last_layer(head, features).matrices, whole.matrices, atol=1e-9)

    @pytest.mark.parametrize("value", [0.0, 1.0, 1e-20])
    def test_features_that_do_not_vary(self, value: float) -> None:
        result = split_last_layer(last_layer(3, 4, 9), torch.full((5, 4), value))
        assert bool(torch.isfinite(result.matrices).all())
        assert bool(torch.isfinite(result.logits).all())


def noisy_trace(seed: int, n: int = 1500) -> ew.Trace:
    """A trace whose last layers also use directions of low variance, which say nothing about the label."""
    trace = random_trace(n=n, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    heads = []
    for head in trace.heads:
        noise = torch.randn(len(head.weight), 4, generator=generator) * 8
        heads.append(HeadWeights(torch.cat([head.weight, noise], dim=1), head.bias))

    def widened(split: Split) -> Split:
        extra = [torch.randn(len(split), 4, generator=generator) * 0.1 for _ in split.features]
        pairs = zip(split.features, extra, strict=True)
        return Split(tuple(torch.cat(pair, dim=1) for pair in pairs), split.labels)

    assert trace.test is not None
    return replace(trace, val=widened(trace.val), test=widened(trace.test), heads=tuple(heads), curvature=())


def nlpd(calibration: ew.Calibration, split: Split) -> np.ndarray:
    return np.array(
        [torch.nn.functional.nll_loss(row, split.labels).item() for row in calibration.predict(split).log_probs]
    )


class TestPool:
    def test_it_drops_directions_of_noise(self) -> None:
        trace = noisy_trace(0)
        assert trace.test is not None
        plain, tuned = (nlpd(ew.calibrate(trace, name), trace.test) for name in ("Pool", "Pool W_opt"))
        assert (tuned < plain - 0.02).all()

    @pytest.mark.parametrize("seed", range(3))
    def test_it_is_never_worse_on_validation_samples(self, seed: int) -> None:
        trace = noisy_trace(seed, n=60)
        plain, tuned = (ew.calibrate(trace, name).val_nlpd for name in ("T_opt", "Pool W_opt"))
        assert (np.array(tuned) <= np.array(plain) + 2e-6).all()  # rounding of float32 logarithms

    def test_no_update_where_nothing_is_gained(self) -> None:
        """Labels drawn from the predictions themselves: no other weights are better."""
        trace = random_trace(n=1500, widths=(6,))
        probs = ew.calibrate(trace, "MSDNet (vanilla)").predict(trace.val).probs[0]
        labels = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
        calibration = ew.calibrate(replace(trace, val=replace(trace.val, labels=labels)), "Pool W_opt")
        assert calibration.pool is not None
        assert calibration.pool[0].update is None

    def test_auto_chooses_it_where_it_wins(self) -> None:
        selection = ew.calibrate(noisy_trace(1)).selection
        assert selection is not None
        assert selection.chosen == "Pool W_opt"

    def test_weights_of_bands_satisfy_the_conditions_of_optimality(self) -> None:
        trace = noisy_trace(2, n=200)
        log_probs = [head.logits(x).log_softmax(dim=1) for head, x in zip(trace.heads, trace.val.features, strict=True)]
        logits = split_last_layer(trace.heads[1], trace.val.features[1]).logits
        objective = pool.PoolObjective(log_probs[:2], trace.val.labels, logits.unbind())
        start = torch.zeros(11, dtype=torch.float64)
        start[1] = 0.7
        tau = torch.full((11,), 10.0, dtype=torch.float64)
        point = pool._minimize(objective, range(11), start, None, start, tau)
        weights = point.weights.clone().requires_grad_()
        experts = torch.cat([torch.stack(log_probs[:2]), logits]).double()
        total = torch.tensordot(weights, experts, dims=1)
        loss = torch.nn.functional.cross_entropy(total, trace.val.labels, reduction="sum")
        (loss + 5.0 * (weights - start).square().sum()).backward()
        assert weights.grad is not None
        free = point.weights != 0
        assert float(weights.grad[free].abs().max()) < 0.2  # a step that would lower the NLPD by less than 1e-9
        assert bool((point.weights[:2] >= 0).all())
        assert bool((point.weights[2:] < 0).any())

    def test_it_is_deterministic(self) -> None:
        trace = noisy_trace(3, n=200)
        first, second = (ew.calibrate(trace, "Pool W_opt").predict(trace.test).probs for _ in range(2))
        assert torch.equal(first, second)

    def test_without_bands_nothing_changes(self) -> None:
        trace = noisy_trace(4, n=200)
        log_probs = [head.logits(x).log_softmax(dim=1) for head, x in zip(trace.heads, trace.val.features, strict=True)]
        assert all(exit.update is None for exit in fit_pool(log_probs, trace.val.labels))

    def test_some_samples_are_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With weights of bands from half of the samples, the NLPD of all is lower, and never that of temperature."""
        trace = noisy_trace(0)
        assert trace.test is not None
        plain = nlpd(ew.calibrate(trace, "Pool"), trace.test)
        whole = nlpd(ew.calibrate(trace, "Pool W_opt"), trace.test)
        monkeypatch.setattr(pool, "_MAX_BAND_NUMBERS", 750 * 5)
        tuned = ew.calibrate(trace, "Pool W_opt")
        assert (nlpd(tuned, trace.test) < plain - 0.02).all()
        assert np.abs(nlpd(tuned, trace.test) - whole).max() < 0.02
        monkeypatch.setattr(pool, "_MAX_BAND_NUMBERS", 20 * 5)
        few = ew.calibrate(trace, "Pool W_opt").val_nlpd
        assert (np.array(few) <= np.array(ew.calibrate(trace, "T_opt").val_nlpd) + 2e-6).all()


def test_parts_that_cannot_be_combined_are_refused() -> None:
    refused(lambda: ew.Method(ensemble="pool", tune_weights=True), "`tune_weights` needs", "`laplace`")
    refused(lambda: ew.Method(False, "mie", True, False, tune_weights=True), "`tune_weights` needs", "'mie'")
    assert ew.Method(False, "pool", False, False, tune_weights=True).name == "Pool W_opt"
