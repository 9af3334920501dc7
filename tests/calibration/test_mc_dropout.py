"""Last-layer Monte Carlo dropout against loops over samples, masks and classes: predictions, tuning and runtime."""

import json
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import header_without_digest, random_trace
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
from paths import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize_scalar
from small_benchmark import small

import exitwise as ew
from exitwise.calibration import mc_softmax
from exitwise.calibration.calibration import CalibratedExit, Calibration
from exitwise.calibration.methods import DEFAULT_DROPOUT_RATE, DROPOUT_METHODS, POE_METHODS, Method, get_method
from exitwise.calibration.trace import HeadWeights
from exitwise.calibration.tuning import TEMPERATURES, Tuner
from exitwise.policies.scores import SCORES, exit_scores
from exitwise.runtime.exit_modules import runtime_exits

pytestmark = pytest.mark.numerical

ONE, ENSEMBLED = "MC dropout T_opt", "MIE MC dropout T_opt"


def masked_logits(exit: CalibratedExit, features: torch.Tensor) -> np.ndarray:
    """Return logits (n, S, c), computed with loops in float64."""
    assert exit.dropout is not None
    weight, masks = exit.head.weight.tolist(), exit.dropout.masks.tolist()
    bias = [0.0] * len(weight) if exit.head.bias is None else exit.head.bias.tolist()
    z = np.empty((len(features), len(masks), len(weight)))
    for i, phi in enumerate(features.tolist()):
        for draw, mask in enumerate(masks):
            stays = [x / (1 - exit.dropout.rate) if keep else 0.0 for x, keep in zip(phi, mask, strict=True)]
            for c, row in enumerate(weight):
                z[i, draw, c] = sum(w * x for w, x in zip(row, stays, strict=True)) + bias[c]
    return z


def softmaxes(z: np.ndarray, temperature: float) -> np.ndarray:
    """Return softmaxes (n, S, c) of logits (n, S, c), computed one by one."""
    probs = np.empty(z.shape)
    for i, draw in np.ndindex(*z.shape[:2]):
        powers = [exp((value - z[i, draw].max()) / temperature) for value in z[i, draw]]
        probs[i, draw] = [power / sum(powers) for power in powers]
    return probs


def drawn(calibration: Calibration, features: Any) -> list[np.ndarray]:
    """Return probabilities K x (n, S, c) of every exit under every mask; of the ensemble if there is one."""
    by_exit = [
        softmaxes(masked_logits(exit, x), exit.temperature) for exit, x in zip(calibration.exits, features, strict=True)
    ]
    if calibration.weights is None:
        return by_exit
    return [
        sum(w * p for w, p in zip(calibration.weights[: k + 1], by_exit[: k + 1], strict=True))
        / sum(calibration.weights[: k + 1])
        for k in range(len(by_exit))
    ]


def masks(calibration: Calibration) -> list[torch.Tensor]:
    return [exit.dropout.masks for exit in calibration.exits if exit.dropout is not None]


class TestMethods:
    def test_the_four_are_found_by_name_and_slug(self) -> None:
        assert list(DROPOUT_METHODS) == ["MC dropout", "MC dropout T_opt", "MIE MC dropout", "MIE MC dropout T_opt"]
        assert not set(DROPOUT_METHODS) & {*ew.METHODS, *POE_METHODS}
        for name, method in DROPOUT_METHODS.items():
            assert (method.name, method.dropout, method.laplace, method.has_variance) == (
                name,
                DEFAULT_DROPOUT_RATE,
                False,
                True,
            )
            assert get_method(name.upper()) == get_method(method.slug) == method
        assert get_method("mie-mc-dropout-t_opt") == Method(False, "mie", True, False, dropout=0.5)

    @settings(max_examples=100, deadline=None)
    @given(rate=st.floats(1e-12, 1, exclude_max=True), name=st.sampled_from(list(DROPOUT_METHODS)))
    def test_another_rate_is_part_of_the_name(self, rate: float, name: str) -> None:
        plain = DROPOUT_METHODS[name]
        method = Method(False, plain.ensemble, plain.tune_temperature, False, dropout=rate)
        assert get_method(method.name.lower()) == method
        assert (method.slug == plain.slug) == (rate == DEFAULT_DROPOUT_RATE)

    def test_the_others_keep_their_names_and_files(self, tmp_path: Path) -> None:
        """Versions without dropout can still read the files of other methods."""
        before = {"laplace", "ensemble", "tune_temperature", "tune_prior"}
        for name in (*ew.METHODS, *POE_METHODS):
            assert "dropout" not in name
            assert get_method(name).dropout is None
        for name in ("MSDNet (vanilla)", "PoE Laplace"):
            ew.calibrate(random_trace(n=20), name, num_draws=3).save(tmp_path / "c.safetensors")
            with safe_open(tmp_path / "c.safetensors", framework="pt") as file:
                assert set(json.loads(file.metadata()["method"])) == before
            assert Calibration.load(tmp_path / "c.safetensors").method == get_method(name)

    @pytest.mark.parametrize("rate", [0, 1, 0.0, 1.0, -0.5, 2.0, True, "0.5", float("nan")])
    def test_what_is_no_rate_is_refused(self, rate: Any) -> None:
        refused(lambda: Method(False, None, False, False, dropout=rate), "`dropout` must be None or a rate between")

    def test_what_does_not_go_together_is_refused(self) -> None:
        refused(lambda: Method(dropout=0.5), "`dropout` cannot be combined with `laplace`")
        refused(
            lambda: Method(False, "poe", True, False, dropout=0.5), "`dropout` cannot be combined with `ensemble` 'poe'"
        )
        refused(lambda: Method(False, None, True, True, dropout=0.5), "`tune_prior` needs `laplace`")
        refused(lambda: get_method("MC dropout 1.5"), "`dropout` must be None or a rate between 0 and 1")
        refused(lambda: get_method("mc dropuot"), "did you mean 'MC dropout'")
        refused(lambda: get_method("Laplace 0.5"), "'Laplace 0.5'")
        refused(lambda: get_method("xyz"), "'T_opt'", "'MC dropout T_opt'")


class TestMasks:
    def test_a_feature_stays_by_chance(self) -> None:
        trace = random_trace(n=20, widths=(40, 50, 60))
        for rate in (0.1, 0.5, 0.8):
            calibration = ew.calibrate(trace, f"MC dropout {rate}", num_draws=300)
            assert [mask.shape for mask in masks(calibration)] == [(300, 40), (300, 50), (300, 60)]
            for mask in masks(calibration):
                assert abs(float(mask.float().mean()) - (1 - rate)) < 0.02
                assert len(mask.unique(dim=0)) > 200

    def test_they_follow_from_the_seed_or_the_generator(self) -> None:
        trace = random_trace(n=20)
        by_seed = masks(ew.calibrate(trace, "MC dropout", seed=7))
        assert len(by_seed[0]) == 50
        for again in (
            ew.calibrate(trace, "MC dropout", seed=torch.Generator().manual_seed(7)),
            ew.calibrate(trace, ENSEMBLED, seed=7, mode="exact", search="continuous"),
        ):
            assert all(torch.equal(a, b) for a, b in zip(by_seed, masks(again), strict=True))
        assert not torch.equal(by_seed[0], masks(ew.calibrate(trace, "MC dropout", seed=8))[0])
        generator = torch.Generator().manual_seed(7)
        first, second = (masks(ew.calibrate(trace, "MC dropout", seed=generator)) for _ in range(2))
        assert not torch.equal(first[0], second[0])

    def test_every_sample_and_split_meets_the_same(self) -> None:
        trace = random_trace(n=60)
        assert trace.test is not None
        calibration = ew.calibrate(trace, ENSEMBLED, num_draws=5)
        both = [torch.cat(pair) for pair in zip(trace.val.features, trace.test.features, strict=True)]
        parts = torch.cat([calibration.predict(trace.val).probs, calibration.predict(trace.test).probs], dim=1)
        torch.testing.assert_close(calibration.predict(both).probs, parts, atol=1e-6, rtol=0)

    def test_the_laplace_draws_are_what_they_were(self) -> None:
        """Masks are drawn after the standard normals, and only for methods with dropout."""
        trace, generator = random_trace(n=20), torch.Generator().manual_seed(3)
        tuner = Tuner(trace, seed=generator)
        tuner.calibrate("MC dropout")
        expected = torch.randn(50, trace.num_classes, generator=torch.Generator().manual_seed(3))
        assert torch.equal(tuner.calibrate("Laplace").draws, expected)  # type: ignore[arg-type]
        alone = torch.Generator().manual_seed(3)
        ew.calibrate(trace, "Laplace", seed=alone)
        torch.randn(50, trace.num_classes, generator=(counted := torch.Generator().manual_seed(3)))
        assert torch.equal(alone.get_state(), counted.get_state())


class TestPrediction:
    @pytest.mark.parametrize("name", [*DROPOUT_METHODS, "MC dropout 0.2 T_opt", "MIE MC dropout 0.85"])
    @pytest.mark.parametrize("bias", [True, False])
    def test_it_is_that_of_plain_loops(self, name: str, bias: bool) -> None:
        trace = random_trace(n=25, bias=bias, seed=3)
        calibration = ew.calibrate(trace, name, num_draws=7)
        preds = calibration.predict(trace.val)
        for k, probs in enumerate(drawn(calibration, trace.val.features)):
            assert np.abs(preds.probs[k].numpy() - probs.mean(axis=1)).max() < 2e-6
            assert np.abs(preds.log_probs[k].numpy() - np.log(probs.mean(axis=1))).max() < 1e-4

    @pytest.mark.parametrize("name", ["MC dropout", ENSEMBLED])
    def test_the_variance_is_that_over_masks_of_the_predicted_class(self, name: str) -> None:
        trace = random_trace(n=25)
        calibration = ew.calibrate(trace, name, num_draws=7)
        preds = calibration.predict(trace.val)
        assert preds.variance is not None
        for k, probs in enumerate(drawn(calibration, trace.val.features)):
            of_class = probs[np.arange(25), :, probs.mean(axis=1).argmax(axis=1)]
            assert preds.variance[k] == pytest.approx(of_class.var(axis=1), rel=1e-3, abs=1e-8)
        assert float(preds.variance.max()) > 0.01
        assert (exit_scores(preds, "variance") <= 0).all()

    def test_one_mask_that_drops_nothing_is_the_plain_net(self) -> None:
        trace = random_trace(n=40)
        calibration = ew.calibrate(trace, "MC dropout 1e-12", num_draws=1)
        assert all(bool(mask.all()) for mask in masks(calibration))
        expected = ew.calibrate(trace, "MSDNet (vanilla)").predict(trace.val)
        torch.testing.assert_close(calibration.predict(trace.val).log_probs, expected.log_probs)

    def test_dropout_in_torch_means_the_same(self) -> None:
        """Compare the means over very many masks with those of torch's dropout."""
        trace = random_trace(n=10)
        calibration = ew.calibrate(trace, "MC dropout 0.3", num_draws=20_000)
        torch.manual_seed(0)
        x = torch.nn.functional.dropout(trace.val.features[2].expand(20_000, -1, -1), 0.3, training=True)
        expected = trace.heads[2].logits(x).softmax(dim=2).mean(dim=0)
        torch.testing.assert_close(calibration.predict(trace.val).probs[2], expected, atol=0.015, rtol=0)

    @pytest.mark.parametrize("name", ["MC dropout", "MIE MC dropout"])
    def test_log_probabilities_stay_finite_where_probabilities_are_zero(self, name: str) -> None:
        trace = random_trace(n=50)
        preds = ew.calibrate(trace, name, num_draws=4).predict([x * 1000 for x in trace.val.features])
        assert bool((preds.probs == 0).any())
        assert bool(torch.isfinite(preds.log_probs).all())

    def test_what_float32_cannot_hold_is_refused(self) -> None:
        trace = random_trace(n=20)
        extreme = [x.clone() for x in trace.val.features]
        extreme[1][7] *= 1e38
        calibration = ew.calibrate(trace, "MC dropout", num_draws=4)
        refused(lambda: calibration.predict(extreme).probs, "exit 1: the features of sample 7 are too extreme")
        trace.val.features[1][3] *= 1e38
        refused(lambda: ew.calibrate(trace, ONE, num_draws=4), "exit 1: the validation NLPD is not finite")

    def test_no_samples_and_half_precision_are_no_problem(self) -> None:
        trace = random_trace(n=30)
        calibration = ew.calibrate(trace, ENSEMBLED, num_draws=4)
        assert calibration.predict([x[:0] for x in trace.val.features]).probs.shape == (3, 0, 5)
        halves = tuple(x.half() for x in trace.val.features)
        whole = tuple(x.float() for x in halves)
        assert torch.equal(calibration.predict(halves).probs, calibration.predict(whole).probs)
        of_halves, of_whole = (
            ew.calibrate(
                ew.Trace(ew.Split(x, trace.val.labels), None, trace.heads, trace.curvature, trace.costs), ENSEMBLED
            )
            for x in (halves, whole)
        )
        assert of_halves.grids == of_whole.grids

    def test_memory_does_not_grow_with_the_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trace, sizes = random_trace(n=900), []
        plain = HeadWeights.logits

        def logits(head: HeadWeights, features: torch.Tensor) -> torch.Tensor:
            output = plain(head, features)
            sizes.append(features.numel() + output.numel() if features.dim() == 3 else 0)
            return output

        whole = ew.calibrate(trace, ENSEMBLED, num_draws=8, search="continuous")
        expected, variance = whole.predict(trace.val).log_probs, whole.predict(trace.val).variance
        monkeypatch.setattr(HeadWeights, "logits", logits)
        monkeypatch.setattr(mc_softmax, "_CHUNK", 1000)
        parts = ew.calibrate(trace, ENSEMBLED, num_draws=8, search="continuous")
        assert parts.temperatures == pytest.approx(whole.temperatures, rel=1e-3)
        for a, b in zip(whole.grids, parts.grids, strict=True):
            assert np.ravel(a.nlpd) == pytest.approx(np.ravel(b.nlpd), abs=2e-6)
        preds = whole.predict(trace.val)
        torch.testing.assert_close(preds.log_probs, expected, atol=1e-4, rtol=1e-4)
        assert preds.variance == pytest.approx(variance, abs=1e-6)
        assert 0 < max(sizes) <= 1000


class TestSearch:
    @pytest.mark.parametrize("name", [*DROPOUT_METHODS, "MIE MC dropout 0.2 T_opt"])
    @pytest.mark.parametrize("seed", [0, 10])
    def test_it_is_that_of_the_plain_loop(self, name: str, seed: int) -> None:
        trace, method = random_trace(n=60, seed=seed), get_method(name)
        calibration = ew.calibrate(trace, method, num_draws=9)
        rows, labels = np.arange(60), trace.val.labels.numpy()
        earlier, weight = np.zeros((60, 5)), 0.0
        for k, exit in enumerate(calibration.exits):
            cost = trace.costs.values[k] if method.ensemble else 1.0
            z = masked_logits(exit, trace.val.features[k])
            table = {}
            for temperature in TEMPERATURES if method.tune_temperature else (1.0,):
                own = softmaxes(z, temperature).mean(axis=1)
                mixed = (earlier + cost * own) / (weight + cost)
                table[temperature] = (-np.log(mixed[rows, labels]).mean(), own)
            best = min(table, key=lambda temperature: table[temperature][0])
            assert (calibration.temperatures[k], calibration.prior_vars[k]) == (best, 2.0)
            assert np.ravel(calibration.grids[k].nlpd) == pytest.approx(
                [value for value, _ in table.values()], abs=2e-6
            )
            assert calibration.val_nlpd[k] == pytest.approx(table[best][0], abs=2e-6)
            if method.ensemble:
                earlier, weight = earlier + cost * table[best][1], weight + cost

    def test_the_ensemble_and_the_masks_matter(self) -> None:
        """Temperatures differ without the ensemble or the masks, so the loop above can detect a missing one."""
        traces = [random_trace(seed=10 * seed) for seed in range(4)]
        picks = {
            name: [ew.calibrate(trace, name, num_draws=20).temperatures for trace in traces]
            for name in (ONE, ENSEMBLED, "T_opt", "MIE T_opt")
        }
        assert len({str(temperatures) for temperatures in picks.values()}) == 4

    def test_ties_go_to_the_first(self) -> None:
        trace = random_trace(n=40)
        nothing = tuple(HeadWeights(torch.zeros_like(head.weight), None) for head in trace.heads)
        curvature = random_trace(bias=False).curvature
        calibration = ew.calibrate(ew.Trace(trace.val, None, nothing, curvature, trace.costs), ENSEMBLED, num_draws=4)
        assert calibration.temperatures == (0.3, 0.3, 0.3)
        assert calibration.val_nlpd == pytest.approx([log(5)] * 3)

    @pytest.mark.parametrize("name", [ONE, ENSEMBLED])
    @pytest.mark.parametrize("seed", range(3))
    def test_the_continuous_one_ends_above_the_grid_at_no_exit(self, name: str, seed: int) -> None:
        trace = random_trace(seed=10 * seed)
        grid = ew.calibrate(trace, name, num_draws=15)
        continuous = ew.calibrate(trace, name, num_draws=15, search="continuous")
        assert all(np.array(continuous.val_nlpd) <= np.array(grid.val_nlpd))
        assert sum(continuous.val_nlpd) < sum(grid.val_nlpd) - 1e-5
        assert set(continuous.prior_vars) == {2.0}

    def test_the_continuous_one_finds_the_optimum(self) -> None:
        trace = random_trace(n=150)
        calibration = ew.calibrate(trace, ONE, num_draws=6, search="continuous")
        for exit, value, x in zip(calibration.exits, calibration.val_nlpd, trace.val.features, strict=True):
            z = torch.from_numpy(masked_logits(exit, x))

            def nlpd(temperature: float, z: torch.Tensor = z) -> float:
                probs = (z / temperature).softmax(dim=2).mean(dim=1)
                return -float(probs.gather(1, trace.val.labels[:, None]).log().mean())

            best = minimize_scalar(nlpd, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-6})
            assert exit.temperature == pytest.approx(best.x, rel=5e-3)
            assert value == pytest.approx(best.fun, abs=2e-6)

    def test_a_shared_tuner_gives_what_separate_ones_give(self) -> None:
        trace = random_trace(n=80)
        shared = Tuner(trace, num_draws=6, seed=4)
        for name in ("MIE Laplace T_opt sigma_opt", "MC dropout 0.2", *reversed(DROPOUT_METHODS), "T_opt"):
            alone, together = ew.calibrate(trace, name, num_draws=6, seed=4), shared.calibrate(name)
            assert all(torch.equal(a, b) for a, b in zip(masks(alone), masks(together), strict=True))
            assert (alone.temperatures, alone.grids) == (together.temperatures, together.grids)

    @pytest.mark.parametrize("search", ["grid", "continuous"])
    def test_the_nlpd_that_it_promises_is_that_of_its_predictions(self, search: Any) -> None:
        trace = random_trace(n=150)
        calibration = ew.calibrate(trace, ENSEMBLED, num_draws=8, search=search)
        true = calibration.predict(trace.val).log_probs.double().numpy()[:, np.arange(150), trace.val.labels.numpy()]
        assert calibration.val_nlpd == pytest.approx(-true.mean(axis=1), abs=2e-6)


class TestFiles:
    @pytest.mark.parametrize("name", [*DROPOUT_METHODS, "MC dropout 0.2"])
    def test_saved_calibrations_predict_the_same(self, tmp_path: Path, name: str) -> None:
        trace = random_trace(n=50)
        calibration = ew.calibrate(trace, name, num_draws=6)
        calibration.save(tmp_path / "c.safetensors")
        loaded = Calibration.load(tmp_path / "c.safetensors")
        assert loaded.method == calibration.method == get_method(name)
        assert all(torch.equal(a, b) for a, b in zip(masks(calibration), masks(loaded), strict=True))
        assert torch.equal(calibration.predict(trace.val).log_probs, loaded.predict(trace.val).log_probs)
        assert np.array_equal(calibration.predict(trace.val).variance, loaded.predict(trace.val).variance)  # type: ignore[arg-type]
        assert loaded.to_dict() == calibration.to_dict()
        assert repr(loaded) == repr(calibration)

    def test_they_say_what_they_are(self) -> None:
        calibration = ew.calibrate(random_trace(n=30), "MC dropout 0.2", num_draws=6)
        assert repr(calibration) == (
            "Calibration('MC dropout 0.2', mode 'paper', temperatures [1, 1, 1], 6 masks of rate 0.2)"
        )
        record = calibration.to_dict()
        assert (record["method"], record["dropout"], record["prior_vars"], record["samples"]) == (
            "MC dropout 0.2",
            0.2,
            None,
            6,
        )
        assert ew.calibrate(random_trace(n=30), "T_opt").to_dict()["dropout"] is None

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"exit.0.masks": None}, "lacks 'exit.0.masks'"),
            ({"exit.2.masks": None}, "lacks 'exit.2.masks'"),
            ({"exit.1.masks": torch.ones(4, 6, dtype=torch.uint8)}, "exit.1.masks must be torch.uint8 of shape (4, 7)"),
            ({"exit.1.masks": torch.ones(3, 7, dtype=torch.uint8)}, "exit.1.masks must be torch.uint8 of shape (4, 7)"),
            ({"exit.1.masks": torch.ones(4, 7)}, "exit.1.masks must be torch.uint8 of shape (4, 7)"),
            ({"exit.1.masks": torch.full((4, 7), 3, dtype=torch.uint8)}, "exit.1.masks must hold zeros and ones"),
            ({"exit.0.masks": torch.ones(0, 6, dtype=torch.uint8)}, "exit.0.masks must be torch.uint8"),
            ({"exit.0.masks": torch.tensor(1, dtype=torch.uint8)}, "exit.0.masks must be torch.uint8"),
            ({"exit.0.weight": torch.ones(5, 7)}, "exit.0.masks must be torch.uint8 of shape (4, 7)"),
        ],
    )
    def test_broken_tensors_are_refused(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        path = tmp_path / "c.safetensors"
        ew.calibrate(random_trace(n=20), ENSEMBLED, num_draws=4).save(path)
        header = header_without_digest(path)
        tensors = {key: value for key, value in {**load_file(path), **changes}.items() if value is not None}
        save_file(tensors, path, metadata=header)
        refused(lambda: Calibration.load(path), "c.safetensors", message)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dropout": 1.5}, "`dropout` must be None or a rate"),
            ({"dropout": "half"}, "`dropout` must be None or a rate"),
            ({"laplace": True}, "`dropout` cannot be combined with `laplace`"),
            ({"ensemble": "poe"}, "`dropout` cannot be combined with `ensemble` 'poe'"),
            ({"masks": 4}, "masks"),
        ],
    )
    def test_a_broken_header_is_refused(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        path = tmp_path / "c.safetensors"
        ew.calibrate(random_trace(n=20), ENSEMBLED, num_draws=4).save(path)
        header = header_without_digest(path)
        method = json.dumps({**json.loads(header["method"]), **change})
        save_file(load_file(path), path, metadata={**header, "method": method})
        refused(lambda: Calibration.load(path), "c.safetensors", message)

    def test_a_calibration_that_says_dropout_and_has_no_masks(self, tmp_path: Path) -> None:
        path = tmp_path / "c.safetensors"
        ew.calibrate(random_trace(n=20), "MIE T_opt", num_draws=4).save(path)
        header = header_without_digest(path)
        method = json.dumps({**json.loads(header["method"]), "dropout": 0.5})
        save_file(load_file(path), path, metadata={**header, "method": method})
        refused(lambda: Calibration.load(path), "lacks 'exit.0.masks'")


class TestRuntime:
    """Runtime with dropout; `test_classifier.py` compares all batch sizes with the simulation for every method."""

    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("name", [ONE, ENSEMBLED])
    def test_every_score(self, name: str, score: str) -> None:
        net, calibration, images = tiny()[0], calibrated(name), some_images(100)
        preds = simulated(net, calibration, images)
        for seed in range(4):
            policy = random_policy(preds, seed, score)
            pred = ew.Classifier(net, calibration, policy, costs=(1, 2, 3))(images)
            assert_as_simulated(policy, preds, pred.exits, pred.probs)

    @pytest.mark.parametrize("variance", [False, True])
    @pytest.mark.parametrize("name", ["MC dropout 0.2", ENSEMBLED])
    def test_exits_say_what_plain_loops_say(self, name: str, variance: bool) -> None:
        trace = random_trace(n=20)
        calibration = ew.calibrate(trace, name, num_draws=7)
        state = None
        for exit, x, probs in zip(
            runtime_exits(calibration, variance),
            trace.val.features,
            drawn(calibration, trace.val.features),
            strict=True,
        ):
            output = exit(x, state)
            state = output.ensemble_state
            assert np.abs(output.probs.numpy() - probs.mean(axis=1)).max() < 2e-6
            if variance:
                of_class = probs[np.arange(20), :, probs.mean(axis=1).argmax(axis=1)]
                assert output.variance is not None
                assert output.variance.numpy() == pytest.approx(of_class.var(axis=1), rel=1e-3, abs=1e-8)

    @pytest.mark.parametrize("name", ["MC dropout", "MIE MC dropout"])
    def test_logits_hundreds_apart(self, name: str) -> None:
        trace = random_trace(n=50)
        calibration = ew.calibrate(trace, name, num_draws=6)
        features, state = [x * 50 for x in trace.val.features], None
        for exit, x, expected in zip(
            runtime_exits(calibration, False), features, calibration.predict(features).probs, strict=True
        ):
            output = exit(x, state)
            state = output.ensemble_state
            torch.testing.assert_close(output.probs, expected, atol=5e-4, rtol=0)

    def test_a_stream_an_empty_batch_and_a_saved_classifier(self, tmp_path: Path) -> None:
        clf, images = classifier(ENSEMBLED, "variance"), some_images(70)
        assert len(clf(images[:0])) == 0
        preds = simulated(clf.net, clf.calibration, images)
        answers = list(clf.stream(iter(images), 10))
        probs = np.stack([np.asarray(answer.probs) for answer in answers])
        assert_as_simulated(clf.policy, preds, [answer.exit for answer in answers], probs)
        clf.save(tmp_path / "c.safetensors")
        loaded = ew.Classifier.load(tmp_path / "c.safetensors")
        assert loaded.calibration.method == DROPOUT_METHODS[ENSEMBLED]
        assert same(clf(images), loaded(images))

    @pytest.mark.parametrize(("name", "score"), [(ONE, "variance"), (ENSEMBLED, "confidence")])
    @pytest.mark.slow
    def test_a_bundle(self, tmp_path: Path, name: str, score: str) -> None:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
        from exitwise.runtime.onnx import Session

        calibration = calibrated(name)
        clf = ew.Classifier(tiny()[0], calibration, middle_policy(calibration, score), costs=(1, 2, 3))
        clf.export(tmp_path / "bundle")
        session = Session(tmp_path / "bundle", threads=1)
        assert session.manifest.method == name
        for n in (1, 65):
            images = some_images(65)[:n]
            pred = session(images.numpy())
            assert_as_simulated(clf.policy, simulated(clf.net, calibration, images), pred.exits, pred.probs, 1e-4)
        assert set(pred.exits.tolist()) == {0, 1, 2}

    def test_a_policy_on_the_variance_is_refused_without_masks(self) -> None:
        policy = ew.Policy((-0.1, -0.1, -inf), "variance")
        refused(lambda: ew.Classifier(tiny()[0], calibrated("T_opt"), policy), "with Laplace or MC dropout")


class TestTables:
    @pytest.mark.slow
    def test_it_joins_the_ablation(self) -> None:
        trace = random_trace(n=120)
        table = ew.ablation(trace, methods=[*ew.METHODS, *DROPOUT_METHODS], num_draws=6)
        assert [row.method for row in table] == [*ew.METHODS, *DROPOUT_METHODS]
        assert list(table.rows[:12]) == list(ew.ablation(trace, num_draws=6).rows)
        assert table["MC dropout"].prior_vars is None
        assert table[ENSEMBLED].temperatures == ew.calibrate(trace, ENSEMBLED, num_draws=6).temperatures
        assert trace.test is not None
        calibration = ew.calibrate(trace, ENSEMBLED, num_draws=6)
        policies = ew.sweep(calibration.predict(trace.val), costs=trace.costs)
        curve = ew.budget_curve(
            calibration.predict(trace.test), labels=trace.test.labels, policies=policies, costs=trace.costs
        )
        assert table[ENSEMBLED].nlpd == curve.mean(trace.costs.values[0], trace.costs.values[-1])["nlpd"]
        assert r"MIE MC dropout $T_\mathrm{opt}$ &" in table.to_latex()


class TestCommands:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        return zoo_run(tmp_path / "run")

    @pytest.mark.slow
    def test_calibrate_evaluate_and_policies(self, run: Path, exitwise: Command) -> None:
        printed = exitwise("calibrate", run, "--method", "mc dropout t_opt", "--samples", "3", "--json").json
        saved = Calibration.load(run / "calibrations" / "mc-dropout-t_opt.safetensors")
        assert (printed["method"], printed["dropout"], printed["temperatures"]) == (ONE, 0.5, list(saved.temperatures))
        assert [mask.shape for mask in masks(saved)] == [(3, 128)] * 4
        evaluated = exitwise("evaluate", run, "--budget", "50%", "--method", ONE, "--score", "variance", "--json").json
        trace = ew.Trace.load(run / "trace.safetensors")
        assert trace.test is not None
        policy = ew.Policy.load(run / "policy.json")
        result = ew.evaluate(saved.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
        assert evaluated["methods"][ONE]["evaluation"]["nlpd"] == result.nlpd
        assert policy.score == "variance"
        options = ("--method", ONE, "--budget", "50%", "--certify", "0", "--repeats", "10", "--json")
        rows = exitwise("policies", run, *options).json["rows"]
        assert {row["method"] for row in rows} == {ONE}

    @pytest.mark.slow
    def test_ablate_adds_rows_below_the_twelve(self, run: Path, exitwise: Command) -> None:
        also = ("--also", "mc dropout", "--also", "MIE mc dropout 0.2", "--also", "mie t_opt")
        done = exitwise("ablate", run, "--samples", "8", *also)
        assert done.status == 0
        written = json.loads((run / "results.json").read_text())["ablation"]["rows"]
        assert [row["method"] for row in written] == [*ew.METHODS, "MC dropout", "MIE MC dropout 0.2"]
        printed = done.out.split("Decision experiment")[0]
        for row in written:
            assert sum(line.startswith(row["method"] + "  ") for line in printed.splitlines()) == 1
        assert f"{100 * written[-1]['top1']:.2f}" in printed

    def test_what_is_not_known_is_refused_in_one_line(self, run: Path, exitwise: Command) -> None:
        for arguments in (("ablate", run, "--also", "MC dropuot"), ("calibrate", run, "--method", "MC dropout 7")):
            done = exitwise(*arguments)
            assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert not (run / "calibrations").exists()


@pytest.mark.slow
def test_the_benchmark_measures_everything(tmp_path: Path) -> None:
    results = small("dropout.py", tmp_path)
    computed = results["computed, added % up to each exit"]
    assert all(0.2 < added < 0.4 for added in computed["Laplace"])  # the paper: 0.1 to 0.4 %, and 3 to 9 %
    assert all(6 < added < 9.5 for added in computed["MC dropout"])
    measured = results["measured"][0]
    assert set(measured["median ms per sample"]) == {"forward", "vanilla", "Laplace", "MC dropout"}
    assert set(measured["median ratios"]) == {
        "Laplace adds to the plain net, %",
        "MC dropout adds to the plain net, %",
        "exits with MC dropout / with Laplace",
    }
    assert measured["median ratios"]["exits with MC dropout / with Laplace"] > 0
    assert len(measured["all ratios"]["exits with MC dropout / with Laplace"]) == 3


@pytest.mark.parametrize("name", ["MC dropout", "MIE MC dropout 0.1 T_opt"])
@pytest.mark.slow
def test_the_documentations_table_says_what_comes_out(name: str) -> None:
    page = (ROOT / "docs" / "how.md").read_text(encoding="utf-8")
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    assert trace.test is not None
    assert trace.budget_range is not None
    cal = ew.calibrate(trace, name)
    policies = ew.sweep(cal.predict(trace.val), costs=trace.costs)
    preds, labels = cal.predict(trace.test), trace.test.labels
    curve = ew.budget_curve(preds, labels=labels, policies=policies, costs=trace.costs)
    mean = curve.mean(*trace.budget_range)
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
    shown = [float(cell) for cell in row.split("|")[2:-1]]
    assert np.allclose(shown, [100 * mean["top1"], mean["nlpd"], mean["ece"]], atol=[0.02, 0.002, 0.002])
