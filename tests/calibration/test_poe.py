"""Products of experts: predictions against multiplied powers, tuning against a loop, and runtime."""

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace, softmax_case
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
from command import Command, zoo_run
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plain_probs, product_of_experts, random_probs

import exitwise as ew
from exitwise.calibration import mc_softmax
from exitwise.calibration.calibration import Calibration, cost_weights
from exitwise.calibration.ensembles import ENSEMBLES
from exitwise.calibration.laplace import MODES, Mode
from exitwise.calibration.methods import POE_METHODS, get_method
from exitwise.calibration.tuning import PRIOR_VARS, TEMPERATURES, Tuner
from exitwise.policies.scores import exit_scores
from exitwise.runtime.exit_modules import runtime_exits

pytestmark = pytest.mark.numerical

FULL = "PoE Laplace T_opt sigma_opt"
PLAIN = "PoE T_opt"
WAYS = [(name, mode) for name in POE_METHODS for mode in MODES if mode == "paper" or "Laplace" in name]


def own_probs(calibration: Calibration, trace: ew.Trace) -> np.ndarray:
    """Return probabilities (K, n, c) of every exit on val without the ensemble, in float64."""
    draws = torch.zeros(1, trace.num_classes) if calibration.draws is None else calibration.draws
    return np.stack(
        [
            plain_probs(
                trace, k, exit.temperature, exit.prior_var if exit.posterior else None, draws, calibration.mode
            ).numpy()
            for k, exit in enumerate(calibration.exits)
        ]
    )


class TestMethods:
    def test_the_six_are_found_by_name_and_slug(self) -> None:
        assert list(POE_METHODS) == [name.replace("MIE", "PoE") for name in ew.METHODS if "MIE" in name]
        assert not set(POE_METHODS) & set(ew.METHODS)
        for name, method in POE_METHODS.items():
            assert (method.name, method.ensemble) == (name, "poe")
            assert get_method(name.upper()) == get_method(method.slug) == method
        assert get_method("poe-laplace-t_opt-sigma_opt") == ew.Method(ensemble="poe")

    def test_others_are_refused(self) -> None:
        refused(lambda: ew.Method(ensemble="product"), "`ensemble` must be None, 'mie' or 'poe' or 'pool'")  # type: ignore[arg-type]
        refused(lambda: get_method("poe laplas"), "did you mean 'PoE Laplace'")
        refused(lambda: get_method("xyz"), "'T_opt'", "'PoE T_opt'")


class TestPrediction:
    @settings(max_examples=60, deadline=None)
    @given(
        exits=st.integers(1, 5),
        classes=st.integers(2, 12),
        seed=st.integers(0, 10_000),
        weights=st.lists(st.floats(1e-3, 1e9), min_size=5, max_size=5),
    )
    def test_exit_by_exit_it_is_the_whole_product(
        self, exits: int, classes: int, seed: int, weights: list[float]
    ) -> None:
        probs = random_probs(seed, exits, 20, classes)
        expected = product_of_experts(probs, weights)
        state = None
        for k, row in enumerate(torch.from_numpy(probs).log()):
            log_probs, state = ENSEMBLES["poe"].advance_log_probs(state, row, cost_weights(weights)[k])
            assert np.abs(log_probs.exp().numpy() - expected[k]).max() < 1e-9

    @pytest.mark.parametrize(("name", "mode"), WAYS)
    @pytest.mark.parametrize("seed", [0, 1])
    def test_of_a_calibration(self, name: str, mode: Mode, seed: int) -> None:
        trace = random_trace(n=120, seed=50 * seed, bias=mode != "exact")
        calibration = ew.calibrate(trace, name, num_draws=9, mode=mode)
        expected = product_of_experts(own_probs(calibration, trace), trace.costs.values)
        preds = calibration.predict(trace.val)
        assert np.abs(preds.probs.double().numpy() - expected).max() < 5e-6
        assert np.abs(preds.log_probs.double().numpy() - np.log(expected)).max() < 1e-4
        assert np.abs(preds.probs.sum(dim=2).numpy() - 1).max() < 1e-5

    def test_log_probabilities_stay_finite_where_probabilities_are_zero(self) -> None:
        trace = random_trace()
        preds = ew.calibrate(trace, "PoE").predict([x * 1000 for x in trace.val.features])
        assert bool((preds.probs == 0).any())
        assert bool(torch.isfinite(preds.log_probs).all())

    @pytest.mark.parametrize("mode", MODES)
    def test_no_samples_are_no_problem(self, mode: Mode) -> None:
        trace = random_trace()
        calibration = ew.calibrate(trace, FULL, num_draws=4, mode=mode)
        assert calibration.predict([x[:0] for x in trace.val.features]).probs.shape == (3, 0, 5)

    @pytest.mark.parametrize("name", [FULL, "PoE"])
    @pytest.mark.parametrize("mode", MODES)
    def test_saved_calibrations_predict_the_same(self, tmp_path: Path, name: str, mode: Mode) -> None:
        trace = random_trace()
        calibration = ew.calibrate(trace, name, mode=mode, num_draws=6)
        calibration.save(tmp_path / "c.safetensors")
        loaded = Calibration.load(tmp_path / "c.safetensors")
        assert loaded.method == calibration.method == POE_METHODS[name]
        assert torch.equal(calibration.predict(trace.val).log_probs, loaded.predict(trace.val).log_probs)
        assert loaded.to_dict() == calibration.to_dict()


class TestSearch:
    @pytest.mark.parametrize(("name", "mode"), WAYS)
    @pytest.mark.slow_after_first
    def test_it_is_that_of_the_plain_loop(self, name: str, mode: Mode) -> None:
        trace, method = random_trace(bias=mode != "exact"), POE_METHODS[name]
        draws = torch.randn(10, trace.num_classes, generator=torch.Generator().manual_seed(3))
        calibration = ew.calibrate(trace, method, mode=mode, draws=draws)
        rows, labels = np.arange(len(trace.val)), trace.val.labels.numpy()
        chosen: list[np.ndarray] = []
        for k in range(trace.num_exits):
            shares = np.array(trace.costs.values[: k + 1]) / sum(trace.costs.values[: k + 1])
            table = {}
            for temperature in TEMPERATURES if method.tune_temperature else (1.0,):
                for var0 in PRIOR_VARS if method.tune_prior else (2.0,):
                    own = plain_probs(trace, k, temperature, var0 if method.laplace else None, draws, mode).numpy()
                    product = np.prod([p**s for p, s in zip([*chosen, own], shares, strict=True)], axis=0)
                    pooled = product / product.sum(axis=1, keepdims=True)
                    table[temperature, var0] = (-np.log(pooled[rows, labels]).mean(), own)
            best = min(table, key=lambda point: table[point][0])
            assert (calibration.temperatures[k], calibration.prior_vars[k]) == best
            assert np.ravel(calibration.grids[k].nlpd) == pytest.approx(
                [value for value, _ in table.values()], abs=3e-6
            )
            assert calibration.val_nlpd[k] == pytest.approx(table[best][0], abs=3e-6)
            chosen.append(table[best][1])

    def test_the_normaliser_matters(self) -> None:
        """Temperatures differ from those of MIE and of independent exits, so the loop above can detect a mix-up."""
        traces = [random_trace(seed=10 * seed) for seed in range(4)]
        picks = {
            name: [ew.calibrate(trace, name).temperatures for trace in traces]
            for name in ("T_opt", "MIE T_opt", "PoE T_opt")
        }
        assert picks["PoE T_opt"] != picks["MIE T_opt"]
        assert picks["PoE T_opt"] != picks["T_opt"]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("search", ["grid", "continuous"])
    @pytest.mark.slow_after_first
    def test_the_nlpd_that_it_promises_is_that_of_its_predictions(self, mode: Mode, search: Any) -> None:
        trace = random_trace(n=150)
        calibration = ew.calibrate(trace, FULL, num_draws=8, mode=mode, search=search)
        log_probs = calibration.predict(trace.val).log_probs.double().numpy()
        true = log_probs[:, np.arange(150), trace.val.labels.numpy()]
        assert calibration.val_nlpd == pytest.approx(-true.mean(axis=1), abs=2e-6)

    @pytest.mark.parametrize("name", [name for name in POE_METHODS if "opt" in name])
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.slow_after_first
    def test_the_continuous_one_ends_above_the_grid_at_no_exit(self, name: str, seed: int) -> None:
        trace = random_trace(seed=10 * seed)
        grid = ew.calibrate(trace, name, num_draws=15)
        continuous = ew.calibrate(trace, name, num_draws=15, search="continuous")
        assert all(np.array(continuous.val_nlpd) <= np.array(grid.val_nlpd))
        assert sum(continuous.val_nlpd) < sum(grid.val_nlpd) - 1e-5
        if not POE_METHODS[name].tune_temperature:
            assert set(continuous.temperatures) == {1.0}
        if not POE_METHODS[name].tune_prior:
            assert set(continuous.prior_vars) == {2.0}

    def test_a_shared_tuner_gives_what_separate_ones_give(self) -> None:
        trace = random_trace()
        shared = Tuner(trace, num_draws=12, seed=4)
        shared.calibrate("MIE Laplace T_opt sigma_opt")
        for name in reversed(POE_METHODS):
            alone, together = ew.calibrate(trace, name, num_draws=12, seed=4), shared.calibrate(name)
            assert (alone.temperatures, alone.prior_vars) == (together.temperatures, together.prior_vars)
            assert alone.grids == together.grids

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.slow_after_first
    def test_it_does_not_depend_on_the_chunks(self, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
        trace = random_trace()
        whole = ew.calibrate(trace, FULL, num_draws=8, mode=mode)
        monkeypatch.setattr(mc_softmax, "_CHUNK", 1000)
        parts = ew.calibrate(trace, FULL, num_draws=8, mode=mode)
        for a, b in zip(whole.grids, parts.grids, strict=True):
            assert np.ravel(a.nlpd) == pytest.approx(np.ravel(b.nlpd), abs=2e-6)

    @pytest.mark.parametrize("mode", MODES)
    def test_one_that_meets_no_number_is_refused_and_not_picked_from(self, mode: Mode) -> None:
        trace = random_trace()
        trace.val.features[1][3] *= 1e22  # finite, but its square is not
        refused(lambda: ew.calibrate(trace, FULL, mode=mode), "exit 1: the validation NLPD is not finite")

    def test_gradients_of_all_classes_are_those_of_the_plain_computation(self) -> None:
        logits, _, t, shifts = softmax_case(2000, 10, 15, seed=8)
        weights = torch.randn(2000, 10, generator=torch.Generator().manual_seed(1)) / 2000
        temperature, stretch = torch.tensor(1.2, requires_grad=True), torch.tensor(1.1, requires_grad=True)
        total = (
            mc_softmax.interpolated_log_mean_softmax(logits, t * stretch, shifts * stretch, temperature) * weights
        ).sum()
        exact_t, exact_s = (x.detach().double().requires_grad_() for x in (temperature, stretch))
        z = (logits.double()[:, None] + (t * exact_s)[:, None, None] * (shifts * exact_s)) / exact_t
        expected = ((z.log_softmax(2).logsumexp(1)) * weights).sum()
        gradients = torch.autograd.grad(total, (temperature, stretch))
        for got, exact in zip(gradients, torch.autograd.grad(expected, (exact_t, exact_s)), strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=1e-5)


class TestRuntime:
    @pytest.mark.parametrize("score", ["confidence", "entropy"])
    @pytest.mark.parametrize("mode", ["paper", "exact", "naive"])
    def test_every_mode(self, mode: str, score: str) -> None:
        net, calibration, images = tiny()[0], calibrated(FULL, mode), some_images(100)
        preds = simulated(net, calibration, images)
        for seed in range(4):
            policy = random_policy(preds, seed, score)
            pred = ew.Classifier(net, calibration, policy, costs=(1, 2, 3))(images)
            assert_as_simulated(policy, preds, pred.exits, pred.probs)

    def test_it_is_no_mixture(self) -> None:
        """Compare with an independent product: runtime and simulation might share an error."""
        net, images = tiny()[0], some_images(50)
        stay = ew.Policy((inf, inf, -inf))
        pooled, mixed = (ew.Classifier(net, calibrated(name), stay)(images).probs for name in ("PoE", "MIE"))
        own = simulated(net, calibrated("MSDNet (vanilla)"), images).probs.double().numpy()
        expected = product_of_experts(own, calibrated("PoE").weights or ())[-1]
        assert np.abs(pooled.numpy() - expected).max() < 1e-5
        assert np.abs(mixed.numpy() - expected).max() > 0.05

    @pytest.mark.parametrize("name", ["PoE", "PoE Laplace"])
    @pytest.mark.parametrize("factor", [10, 20, 50])
    def test_experts_who_are_sure_of_different_things(self, name: str, factor: float) -> None:
        """Test logits hundreds apart, with probabilities of zero on whose logarithms the product depends."""
        trace = random_trace()
        calibration = ew.calibrate(trace, name, num_draws=8)
        features = [x * factor for x in trace.val.features]
        own = ew.calibrate(trace, name.replace("PoE", "MIE"), num_draws=8).predict(features)
        assert bool((own.probs == 0).any())
        state = None
        exits = runtime_exits(calibration, variance=False)
        for exit, x, expected in zip(exits, features, calibration.predict(features).probs, strict=True):
            output = exit(x, state)
            assert float((output.probs - expected).abs().max()) < 1e-5 * factor  # float32 rounds large logits
            state = output.ensemble_state

    def test_a_saved_classifier(self, tmp_path: Path) -> None:
        clf = classifier(FULL)
        clf.save(tmp_path / "c.safetensors")
        loaded = ew.Classifier.load(tmp_path / "c.safetensors")
        assert loaded.calibration.method == POE_METHODS[FULL]
        assert same(clf(some_images(40)), loaded(some_images(40)))

    @pytest.mark.parametrize(("name", "mode"), [(FULL, "exact"), (PLAIN, "paper")])
    @pytest.mark.slow
    def test_a_bundle(self, tmp_path: Path, name: str, mode: str) -> None:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
        from exitwise.runtime.onnx import Session

        calibration = calibrated(name, mode)
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


class TestNoVariance:
    @pytest.mark.parametrize("name", POE_METHODS)
    def test_predictions_have_none(self, name: str) -> None:
        trace = random_trace(n=40)
        preds = ew.calibrate(trace, name, num_draws=4).predict(trace.val)
        assert preds.variance is None
        refused(lambda: exit_scores(preds, "variance"), "'variance' needs draws", "without product of experts")

    def test_a_classifier_refuses_a_policy_on_it(self) -> None:
        policy = ew.Policy((-0.1, -0.1, -inf), "variance")
        refused(lambda: ew.Classifier(tiny()[0], calibrated(FULL), policy), "needs draws", "without product of experts")

    def test_so_does_a_command(self, tmp_path: Path, exitwise: Command) -> None:
        run = zoo_run(tmp_path / "run")
        arguments = ("--method", "PoE Laplace", "--score", "variance", "--budget", "50%")
        (tmp_path / "cat.png").touch()
        done = exitwise("predict", run, tmp_path / "cat.png", *arguments)
        assert (done.status, done.out) == (2, "")
        assert "'variance' needs draws: choose a method with Laplace or MC dropout, without product" in done.err
        assert not (run / "calibrations").exists()  # it fails before tuning
