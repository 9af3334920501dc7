"""Pools: the fit against conditions of optimality and autograd, its guarantees, bad input, and the runtime."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import SPOILED, random_trace, spoiled_trace
from classifier_cases import (
    assert_as_simulated,
    calibrated,
    classifier,
    middle_policy,
    random_policy,
    refused,
    same,
    simulated,
    some_images,
    tiny,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import exitwise as ew
from exitwise.calibration import pool, pool_objective
from exitwise.calibration.calibration import CalibratedExit, Calibration
from exitwise.calibration.ensembles import ENSEMBLES, ExitWeights
from exitwise.calibration.methods import get_method
from exitwise.calibration.overhead import cost_table, pool_macs
from exitwise.runtime.exit_modules import runtime_exits

pytestmark = pytest.mark.numerical

FULL = "Pool Laplace T_opt sigma_opt"
PARTS = (
    "",
    "T_opt",
    "Laplace",
    "Laplace T_opt",
    "Laplace sigma_opt",
    "Laplace T_opt sigma_opt",
    "W_opt",
    "T_opt W_opt",
)
NAMES = [f"Pool {parts}".strip() for parts in PARTS]
ROUNDING = 2e-6  # of an NLPD whose logarithms are float32


def experts(exits: int, n: int, classes: int, seed: int, sharpness: float = 3.0) -> tuple[list[Tensor], Tensor]:
    """Log-probabilities (n, c) of exits that know the label more or less, and the labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    signal = torch.nn.functional.one_hot(labels, classes).float()
    rows = []
    for k in range(exits):
        noise = torch.randn(n, classes, generator=generator)
        rows.append((sharpness * (signal * (0.5 + 0.3 * k) + 0.7 * noise)).log_softmax(dim=1))
    return rows, labels


def penalized(
    rows: list[Tensor], labels: Tensor, weights: Tensor, bias: Tensor, target: Tensor, tau: float, rho: float
) -> Tensor:
    """The objective of the fit, written out for autograd, in float64."""
    logits = sum(weight * row.double() for weight, row in zip(weights, rows, strict=True)) + bias
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss + tau / 2 * (weights - target).square().sum() + rho / 2 * bias.square().sum()


class TestMethods:
    def test_the_eight_are_found_by_name_and_slug(self) -> None:
        for name in NAMES:
            method = get_method(name)
            assert (method.name, method.ensemble, method.has_variance) == (name, "pool", False)
            assert get_method(name.upper()) == get_method(method.slug) == method
        assert ew.Method(ensemble="pool").name == FULL
        assert ew.Method(laplace=False, ensemble="pool", tune_temperature=False, tune_prior=False).name == "Pool"

    def test_dropout_is_refused(self) -> None:
        refused(
            lambda: ew.Method(False, "pool", True, False, 0.5), "`dropout` cannot be combined with `ensemble` 'pool'"
        )


class TestMinimum:
    @settings(max_examples=40, deadline=None)
    @given(
        exits=st.integers(1, 5),
        n=st.integers(1, 80),
        classes=st.integers(2, 6),
        seed=st.integers(0, 10_000),
        with_bias=st.booleans(),
    )
    def test_no_direction_leads_down(self, exits: int, n: int, classes: int, seed: int, with_bias: bool) -> None:
        """Conditions of optimality, with gradients by autograd."""
        rows, labels = experts(exits, n, classes, seed)
        target = torch.zeros(exits, dtype=torch.float64)
        target[-1] = 0.7
        start = torch.zeros(classes, dtype=torch.float64) if with_bias else None
        tau = torch.full((exits,), 10.0, dtype=torch.float64)
        found = pool._minimize(pool.PoolObjective(rows, labels), range(exits), target, start, target, tau, 30.0)
        weights = found.weights.clone().requires_grad_()
        bias = (
            (torch.zeros(classes, dtype=torch.float64) if found.bias is None else found.bias).clone().requires_grad_()
        )
        penalized(rows, labels, weights, bias, target, 10.0, 30.0).backward()
        assert weights.grad is not None
        assert bias.grad is not None
        free = found.weights > 0
        limit = 1e-3 * n  # a step that would lower the NLPD by less than 1e-9 is not taken
        assert float(weights.grad[free].abs().max() if free.any() else 0) < limit
        assert float(weights.grad[~free].min() if (~free).any() else 0) > -limit
        assert not with_bias or float(bias.grad.abs().max()) < limit

    def test_sums_are_those_of_autograd(self) -> None:
        rows, labels = experts(3, 50, 4, 0)
        point = torch.rand(7, dtype=torch.float64)

        def loss(at: Tensor) -> Tensor:
            return penalized(rows, labels, at[:3], at[3:], torch.zeros(3), 0.0, 0.0)

        sums = pool.PoolObjective(rows, labels).sums(range(3), point[:3], point[3:])
        assert sums.loss == pytest.approx(float(loss(point)))
        torch.testing.assert_close(sums.gradient, torch.autograd.functional.jacobian(loss, point))
        torch.testing.assert_close(sums.hessian, torch.autograd.functional.hessian(loss, point))

    def test_it_does_not_depend_on_the_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows, labels = experts(3, 200, 4, 1)
        whole = pool.fit_pool(rows, labels)
        monkeypatch.setattr(pool_objective, "BLOCK", 64)
        for a, b in zip(whole, pool.fit_pool(rows, labels), strict=True):
            assert np.allclose(a.weights, b.weights, atol=1e-7)

    def test_leave_one_out_is_nearly_that_of_the_loop(self) -> None:
        rows, labels = experts(3, 60, 4, 2)
        target = torch.tensor([0.0, 0.0, 0.7], dtype=torch.float64)
        tau = torch.full((3,), 10.0, dtype=torch.float64)
        found = pool._minimize(pool.PoolObjective(rows, labels), range(3), target, None, target, tau)
        losses = []
        for i in range(60):
            others = [j for j in range(60) if j != i]
            objective = pool.PoolObjective([row[others] for row in rows], labels[others])
            left = pool._minimize(objective, range(3), target, None, target, tau).weights
            logits = sum(weight * row[i].double() for weight, row in zip(left, rows, strict=True))
            losses.append(-float(torch.log_softmax(torch.as_tensor(logits), dim=0)[labels[i]]))
        assert found.loo - found.nlpd == pytest.approx(np.mean(losses) - found.nlpd, rel=0.15)


class TestGuarantee:
    @settings(max_examples=25, deadline=None)
    @given(exits=st.integers(1, 4), n=st.integers(1, 60), classes=st.integers(2, 8), seed=st.integers(0, 10_000))
    def test_it_is_never_worse_than_any_temperature(self, exits: int, n: int, classes: int, seed: int) -> None:
        rows, labels = experts(exits, n, classes, seed)
        nlpd = pool.pool_nlpd(pool.fit_pool(rows, labels), rows, labels)
        for value, row in zip(nlpd, rows, strict=True):
            for temperature in (0.05, 0.3, 0.5, 1.0, 1.7, 3.0, 20.0):
                alone = torch.nn.functional.cross_entropy(row.double() / temperature, labels)
                assert value <= float(alone) + ROUNDING

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("name", ["Pool", "Pool T_opt", "Pool W_opt", FULL])
    def test_of_a_calibration(self, name: str, seed: int) -> None:
        """Against temperature alone; with Laplace, against the same posterior without the pool."""
        trace = random_trace(n=80, seed=10 * seed)
        alone = ew.calibrate(trace, "Laplace T_opt sigma_opt" if "Laplace" in name else "T_opt", num_draws=8)
        pooled = ew.calibrate(trace, name, num_draws=8)
        assert (np.array(pooled.val_nlpd) <= np.array(alone.val_nlpd) + ROUNDING).all()
        nlpd = [
            torch.nn.functional.nll_loss(row, trace.val.labels).item() for row in pooled.predict(trace.val).log_probs
        ]
        assert np.allclose(nlpd, pooled.val_nlpd, atol=ROUNDING)

    def test_the_temperature_does_not_matter_without_laplace(self) -> None:
        trace = random_trace(n=200)
        preds = [ew.calibrate(trace, name).predict(trace.test).probs for name in ("Pool", "Pool T_opt")]
        assert float((preds[0] - preds[1]).abs().max()) < 1e-3

    def test_it_is_deterministic(self) -> None:
        rows, labels = experts(4, 100, 6, 3)
        first, second = (pool.fit_pool(rows, labels) for _ in range(2))
        assert [exit.weights for exit in first] == [exit.weights for exit in second]


class TestConfidence:
    """Mean confidence and accuracy are brought together where they differ by more than chance."""

    def outliers(self, n: int, share: float) -> tuple[list[Tensor], Tensor]:
        """Exits of which both are surely wrong for a few samples: the lowest NLPD is then too modest on the others."""
        rows, labels = experts(2, n, 6, 8)
        wrong = torch.arange(n) < share * n
        for row in rows:
            row[wrong] = (20 * torch.nn.functional.one_hot((labels[wrong] + 1) % 6, 6).float()).log_softmax(dim=1)
        return rows, labels

    def gap(self, rows: list[Tensor], labels: Tensor, exit: ExitWeights) -> Tensor:
        logits = sum((weight * row.double() for weight, row in zip(exit.weights, rows, strict=True)), torch.zeros(1))
        confidence, predicted = logits.add(0 if exit.bias is None else exit.bias).softmax(dim=1).max(dim=1)
        return confidence - (predicted == labels).double()

    def test_what_chance_does_not_explain_is_corrected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The positive-part James-Stein estimate of a gap g with standard error s leaves s^2 / g of it."""
        rows, labels = self.outliers(2000, 0.01)
        matched = pool.fit_pool(rows, labels)
        monkeypatch.setattr(pool, "_match_confidence", lambda *_: 1.0)
        plain = pool.fit_pool(rows, labels)
        before = self.gap(rows, labels, plain[1])
        error = float(before.std()) / 2000**0.5
        assert abs(float(before.mean())) > 2 * error
        remaining = error**2 / float(before.mean())
        assert float(self.gap(rows, labels, matched[1]).mean()) == pytest.approx(remaining, abs=0.02 * error)
        factors = np.divide(matched[1].weights, plain[1].weights)
        assert np.ptp(factors) < 1e-6

    def test_the_first_exit_is_temperature_alone_with_the_lowest_nlpd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows, labels = self.outliers(2000, 0.01)
        matched = pool.fit_pool(rows, labels)
        monkeypatch.setattr(pool, "_match_confidence", lambda *_: 1.0)
        assert matched[0].weights == pytest.approx(pool.fit_pool(rows, labels)[0].weights, rel=0.01)

    def test_nothing_changes_where_they_do_not_differ_clearly(self) -> None:
        rows, _ = experts(2, 2000, 6, 9)
        point = pool.PoolPoint(torch.tensor([0.0, 1.0], dtype=torch.float64), None, 0.0, 0.0, {})
        logits = rows[1].double()
        drawn = torch.multinomial(logits.exp(), 1, generator=torch.Generator().manual_seed(2)).squeeze(1)
        within = pool.PoolObjective(rows, drawn).confidence(point, 1.0)
        assert within.gap**2 < within.variance
        assert pool._match_confidence(pool.PoolObjective(rows, drawn), point, 10.0) == 1.0
        sharper = pool.PoolPoint(torch.tensor([0.0, 1.5], dtype=torch.float64), None, 0.0, 0.0, {})
        factor = pool._match_confidence(pool.PoolObjective(rows, drawn), sharper, 10.0)
        assert factor == pytest.approx(1 / 1.5, abs=0.05)

    def test_the_slope_is_that_of_autograd(self) -> None:
        rows, labels = experts(2, 50, 4, 10)
        bias = torch.linspace(-0.5, 0.5, 4, dtype=torch.float64)
        point = pool.PoolPoint(torch.tensor([0.4, 0.8], dtype=torch.float64), bias, 0.0, 0.0, {})
        factor = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        logits = factor * (0.4 * rows[0].double() + 0.8 * rows[1].double() + bias)
        confidence = logits.softmax(dim=1).amax(dim=1)
        (slope,) = torch.autograd.grad(confidence.mean(), factor)
        found = pool.PoolObjective(rows, labels).confidence(point, 1.3)
        gap = (confidence - (logits.argmax(dim=1) == labels).double()).detach()
        assert found.slope == pytest.approx(float(slope))
        assert found.gap == pytest.approx(float(gap.mean()))
        assert found.variance == pytest.approx(float(gap.var(correction=0)) / 50)
        assert found.nlpd == pytest.approx(float(torch.nn.functional.cross_entropy(logits.detach(), labels)))

    def test_all_samples_correct_is_an_answer(self) -> None:
        rows, labels = experts(2, 30, 3, 11, sharpness=30.0)
        labels = rows[1].argmax(dim=1)
        fitted = pool.fit_pool(rows, labels)
        assert np.isfinite(fitted[1].weights).all()
        assert max(fitted[1].weights) <= pool.OWN_WEIGHT_BOUNDS[1] * pool._MAX_FACTOR


class TestZeros:
    def test_an_exit_of_pure_noise_gets_no_weight(self) -> None:
        rows, labels = experts(3, 1000, 5, 4)
        generator = torch.Generator().manual_seed(0)
        rows[1] = (3 * torch.randn(1000, 5, generator=generator)).log_softmax(dim=1)
        fitted = pool.fit_pool(rows, labels)
        assert fitted[2].weights[1] == 0.0
        assert fitted[1].weights[1] < 0.05 < fitted[1].weights[0]
        assert all(weight >= 0 for exit in fitted for weight in exit.weights)

    def test_a_duplicate_gets_no_weight(self) -> None:
        rows, labels = experts(1, 300, 5, 5)
        fitted = pool.fit_pool([rows[0], rows[0].clone(), rows[0].clone()], labels)
        assert fitted[2].weights[:2] == fitted[1].weights[:1] * 2 == (0.0, 0.0)
        assert fitted[2].weights[2] == pytest.approx(fitted[0].weights[0], abs=1e-5)

    def test_a_bias_only_where_classes_are_shifted(self) -> None:
        rows, labels = experts(2, 1000, 5, 6)
        assert all(exit.bias is None for exit in pool.fit_pool(rows, labels))
        shift = torch.tensor([1.0, 0.0, 0.0, -1.0, 0.0])
        shifted = pool.fit_pool([row + shift for row in rows], labels)
        for exit in shifted:
            assert exit.bias is not None
            assert float(exit.bias[0]) < -0.1
            assert float(exit.bias[3]) > 0.1


class TestBadInput:
    @pytest.mark.parametrize("name", ["Pool", "Pool W_opt", FULL])
    @pytest.mark.parametrize("kind", SPOILED)
    def test_the_answer_is_finite_and_no_worse(self, kind: str, name: str) -> None:
        trace = spoiled_trace(kind)
        calibration = ew.calibrate(trace, name, num_draws=8)
        alone = ew.calibrate(trace, "Laplace T_opt sigma_opt" if "Laplace" in name else "T_opt", num_draws=8)
        assert np.isfinite(calibration.val_nlpd).all()
        assert (np.array(calibration.val_nlpd) <= np.array(alone.val_nlpd) + 10 * ROUNDING).all()
        preds = calibration.predict(trace.test)
        assert bool(torch.isfinite(preds.log_probs).all())
        assert float((preds.probs.sum(dim=2) - 1).abs().max()) < 1e-5

    def test_one_exit(self) -> None:
        trace = random_trace(widths=(6,))
        calibration = ew.calibrate(trace, "Pool")
        assert calibration.pool is not None
        assert len(calibration.pool) == len(calibration.pool[0].weights) == 1


class TestFiles:
    @pytest.mark.parametrize("name", ["Pool", "Pool W_opt", FULL])
    def test_saved_calibrations_predict_the_same(self, tmp_path: Path, name: str) -> None:
        trace = random_trace()
        calibration = ew.calibrate(trace, name, num_draws=6)
        assert calibration.pool is not None
        with_bias = tuple(replace(exit, bias=torch.linspace(-1, 1, 5)) for exit in calibration.pool)
        for saved in (calibration, replace(calibration, pool=with_bias)):
            saved.save(tmp_path / "c.safetensors")
            loaded = Calibration.load(tmp_path / "c.safetensors")
            assert torch.equal(saved.predict(trace.test).probs, loaded.predict(trace.test).probs)
            assert loaded.to_dict() == saved.to_dict()

    def test_damaged_weights_are_refused(self) -> None:
        tensors, metadata = ew.calibrate(random_trace(), "Pool").to_tensors()
        negative = tensors | {"pool.1.weights": torch.tensor([-1.0, 1.0], dtype=torch.float64)}
        refused(lambda: Calibration.from_tensors(negative, metadata), "pool.1.weights must not be negative")
        short = tensors | {"pool.2.weights": torch.ones(2, dtype=torch.float64)}
        refused(lambda: Calibration.from_tensors(short, metadata), "pool.2.weights must be", "(3,)")
        wide = tensors | {"pool.0.update": torch.ones(5, 5)}
        refused(lambda: Calibration.from_tensors(wide, metadata), "pool.0.update must be", "(6, 5)")
        infinite = tensors | {"pool.0.update": torch.full((6, 5), inf)}
        refused(lambda: Calibration.from_tensors(infinite, metadata), "pool.0.update", "not finite")


def with_update(exit: ExitWeights, calibrated_exit: CalibratedExit) -> ExitWeights:
    """A pool whose update is large enough to change answers."""
    head = calibrated_exit.head.weight
    return replace(exit, update=0.3 * torch.randn(head.T.shape, generator=torch.Generator().manual_seed(len(head))))


class TestRuntime:
    def test_it_is_the_weighted_product(self) -> None:
        """Compare with powers of probabilities: runtime and simulation might share an error."""
        net, images, calibration = tiny()[0], some_images(50), calibrated("Pool")
        assert calibration.pool is not None
        own = simulated(net, calibrated("MSDNet (vanilla)"), images).probs.double()
        product = torch.ones_like(own[0])
        for weight, probs in zip(calibration.pool[-1].weights, own, strict=True):
            product *= probs**weight
        if calibration.pool[-1].bias is not None:
            product *= calibration.pool[-1].bias.double().exp()
        expected = product / product.sum(dim=1, keepdim=True)
        stay = ew.Policy((inf, inf, -inf))
        assert float((ew.Classifier(net, calibration, stay)(images).probs - expected).abs().max()) < 1e-5

    @pytest.mark.parametrize("score", ["confidence", "entropy"])
    @pytest.mark.parametrize(
        ("name", "mode"),
        [("Pool", "paper"), ("Pool W_opt", "paper"), (FULL, "paper"), (FULL, "exact"), (FULL, "naive")],
    )
    def test_every_mode(self, name: str, mode: str, score: str) -> None:
        net, calibration, images = tiny()[0], calibrated(name, mode), some_images(100)
        preds = simulated(net, calibration, images)
        for seed in range(4):
            policy = random_policy(preds, seed, score)
            pred = ew.Classifier(net, calibration, policy, costs=(1, 2, 3))(images)
            assert_as_simulated(policy, preds, pred.exits, pred.probs)

    @pytest.mark.parametrize("biased", [True, False])
    def test_an_update_is_added_to_the_logits(self, biased: bool) -> None:
        net, images, calibration = tiny()[0], some_images(50), calibrated("Pool")
        assert calibration.pool is not None
        exits = [replace(exit, bias=torch.linspace(-0.5, 0.5, 10) if biased else None) for exit in calibration.pool]
        updated = [with_update(exit, own) for exit, own in zip(exits, calibration.exits, strict=True)]
        plain = simulated(net, replace(calibration, pool=tuple(exits)), images)
        calibration = replace(calibration, pool=tuple(updated))
        preds = simulated(net, calibration, images)
        with torch.no_grad():
            features = net.eval().features(images)
        for k, (exit, x) in enumerate(zip(updated, features, strict=True)):
            assert exit.update is not None
            expected = (plain.log_probs[k].double() + (x @ exit.update).double()).softmax(dim=1)
            assert float((preds.probs[k] - expected).abs().max()) < 1e-5
        policy = random_policy(preds, 0, "confidence")
        pred = ew.Classifier(net, calibration, policy, costs=(1, 2, 3))(images)
        assert_as_simulated(policy, preds, pred.exits, pred.probs)

    @pytest.mark.parametrize("name", ["Pool", "Pool W_opt"])
    @pytest.mark.parametrize("factor", [10, 50])
    def test_probabilities_of_zero(self, factor: float, name: str) -> None:
        trace = random_trace()
        calibration = ew.calibrate(trace, name)
        features = [x * factor for x in trace.val.features]
        state = None
        for exit, x, expected in zip(
            runtime_exits(calibration, variance=False), features, calibration.predict(features).probs, strict=True
        ):
            output = exit(x, state)
            assert float((output.probs - expected).abs().max()) < 1e-5 * factor  # float32 rounds large logits
            state = output.ensemble_state

    def test_a_stream(self) -> None:
        clf, images = classifier("Pool"), some_images(60)
        answers = list(clf.stream(iter(images), batch_size=7))
        preds = simulated(clf.net, clf.calibration, images)
        probs = np.stack([np.asarray(answer.probs) for answer in answers])
        assert_as_simulated(clf.policy, preds, [answer.exit for answer in answers], probs)

    def test_a_saved_classifier(self, tmp_path: Path) -> None:
        clf = classifier("Pool")
        clf.save(tmp_path / "c.safetensors")
        loaded = ew.Classifier.load(tmp_path / "c.safetensors")
        assert same(clf(some_images(40)), loaded(some_images(40)))

    @pytest.mark.parametrize(
        ("name", "biased"), [("Pool", True), ("Pool W_opt", False), ("Pool W_opt", True), (FULL, False)]
    )
    @pytest.mark.slow
    def test_a_bundle(self, tmp_path: Path, name: str, biased: bool) -> None:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
        from exitwise.runtime.onnx import Session

        calibration = calibrated(name)
        assert calibration.pool is not None
        bias = torch.linspace(-0.5, 0.5, 10) if biased else None
        exits = [replace(exit, bias=bias) for exit in calibration.pool]
        if "W_opt" in name:
            exits = [with_update(exit, own) for exit, own in zip(exits, calibration.exits, strict=True)]
        calibration = replace(calibration, pool=tuple(exits))
        clf = ew.Classifier(tiny()[0], calibration, middle_policy(calibration), costs=(1, 2, 3))
        clf.export(tmp_path / "bundle")
        session = Session(tmp_path / "bundle", threads=1)
        for n in (1, 65):
            images = some_images(65)[:n]
            pred = session(images.numpy())
            preds = simulated(clf.net, calibration, images)
            assert_as_simulated(clf.policy, preds, pred.exits, pred.probs, 1e-4)
        assert set(pred.exits.tolist()) == {0, 1, 2}
        answers = list(session.stream(iter(images.numpy()), 10))
        probs = np.stack([np.asarray(answer.probs) for answer in answers])
        assert_as_simulated(clf.policy, preds, [answer.exit for answer in answers], probs, 1e-4)


def test_the_state_of_the_ensemble_is_all_exits_so_far() -> None:
    ensemble: Any = ENSEMBLES["pool"]
    probs = torch.rand(4, 3).softmax(dim=1)
    _, state = ensemble.advance_probs(None, probs, ExitWeights((1.0,)))
    _, state = ensemble.advance_probs(state, probs, ExitWeights((0.5, 0.5)))
    assert state.shape == (4, 2, 3)


def test_its_cost_is_counted() -> None:
    rows = cost_table(ew.models.msdnet("tiny-8"), (1, 8, 8))
    added = [row.pool - row.vanilla for row in rows]
    assert added == list(np.cumsum([pool_macs(10, k + 1) for k in range(len(rows))]))
    features = [head.last.in_features for head in ew.models.msdnet("tiny-8").exits]
    updates = [row.pool_w_opt - row.pool for row in rows]
    assert updates == list(np.cumsum([(p + 1) * 10 for p in features]))
