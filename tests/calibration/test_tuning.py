"""Calibration against a loop over grid points without chunks of samples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import header_without_digest, random_trace
from oracles import plain_probs
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize_scalar
from torch import Tensor

import exitwise as ew
from exitwise.calibration.calibration import Calibration
from exitwise.calibration.laplace import MODES, CurvatureEigen
from exitwise.calibration.mc_softmax import sample_logits
from exitwise.calibration.methods import get_method
from exitwise.calibration.trace import HeadWeights
from exitwise.calibration.tuning import PRIOR_VARS, TEMPERATURES, Tuner

pytestmark = pytest.mark.numerical

TUNED = [name for name in ew.METHODS if "opt" in name]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in ew.METHODS
        for mode in ("paper", "exact", "naive")
        if mode == "paper" or "Laplace" in name
    ],
)
@pytest.mark.slow_after_first
def test_search_is_that_of_the_plain_loop(name: str, mode: str) -> None:
    trace, method = random_trace(bias=mode != "exact"), ew.METHODS[name]
    draws = torch.randn(10, trace.num_classes, generator=torch.Generator().manual_seed(3))
    calibration = ew.calibrate(trace, method, mode=mode, draws=draws)  # type: ignore[arg-type]
    earlier, weight = torch.zeros(()), 0.0
    rows = torch.arange(len(trace.val))
    preds = calibration.predict(trace.val)
    for k in range(trace.num_exits):
        cost = trace.costs.values[k] if method.ensemble else 1.0
        table = {}
        for temperature in TEMPERATURES if method.tune_temperature else (1.0,):
            for var0 in PRIOR_VARS if method.tune_prior else (2.0,):
                probs = plain_probs(trace, k, temperature, var0 if method.laplace else None, draws, mode)
                mixed = (earlier + cost * probs) / (weight + cost)
                table[temperature, var0] = (-mixed[rows, trace.val.labels].log().mean().item(), probs)
        best = min(table, key=lambda point: table[point][0])
        assert (calibration.temperatures[k], calibration.prior_vars[k]) == best
        assert np.ravel(calibration.grids[k].nlpd) == pytest.approx([value for value, _ in table.values()], abs=2e-6)
        assert calibration.val_nlpd[k] == pytest.approx(table[best][0], abs=2e-6)
        if method.ensemble:
            earlier, weight = earlier + cost * table[best][1], weight + cost
            expected = earlier / weight
        else:
            expected = table[best][1]
        torch.testing.assert_close(preds.probs[k].double(), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow_after_first
def test_continuous_search_ends_above_the_grid_at_no_exit(name: str, seed: int) -> None:
    trace = random_trace(seed=10 * seed)
    grid = ew.calibrate(trace, name, num_draws=15)
    continuous = ew.calibrate(trace, name, num_draws=15, search="continuous")
    assert all(np.array(continuous.val_nlpd) <= np.array(grid.val_nlpd))
    assert sum(continuous.val_nlpd) < sum(grid.val_nlpd) - 1e-5
    method = ew.METHODS[name]
    if not method.tune_temperature:
        assert set(continuous.temperatures) == {1.0}
    if not method.tune_prior:
        assert set(continuous.prior_vars) == {2.0}


def test_continuous_temperature_is_the_optimum() -> None:
    trace = random_trace(n=2000)
    calibration = ew.calibrate(trace, "T_opt", search="continuous")
    for k, temperature in enumerate(calibration.temperatures):
        logits = trace.heads[k].logits(trace.val.features[k]).double()

        def nlpd(t: float, logits: Tensor = logits) -> float:
            return torch.nn.functional.cross_entropy(logits / t, trace.val.labels).item()

        best = minimize_scalar(nlpd, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-6})
        assert temperature == pytest.approx(best.x, rel=2e-3)
        assert calibration.val_nlpd[k] == pytest.approx(best.fun, abs=1e-6)


def test_continuous_search_works_in_exact_mode() -> None:
    trace = random_trace(n=150)
    grid, continuous = (
        ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", num_draws=8, mode="exact", search=s)
        for s in ("grid", "continuous")
    )
    assert all(np.array(continuous.val_nlpd) <= np.array(grid.val_nlpd))


@pytest.mark.parametrize("mode", MODES)
def test_samples_whose_features_are_all_zero_do_no_harm(mode: str) -> None:
    """Without a bias these samples have no uncertainty, where the gradient of its square root is infinite."""
    trace = random_trace(n=60, bias=False)
    for x in trace.val.features:
        x[::4] = 0
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", num_draws=5, mode=mode, search="continuous")  # type: ignore[arg-type]
    probs = calibration.predict(trace.val).probs
    assert bool(torch.isfinite(probs).all())
    torch.testing.assert_close(probs[0, ::4], torch.full((15, 5), 0.2))


def test_a_shared_tuner_gives_what_separate_ones_give() -> None:
    trace = random_trace()
    shared = Tuner(trace, num_draws=12, seed=4)
    for name in reversed(ew.METHODS):
        alone, together = ew.calibrate(trace, name, num_draws=12, seed=4), shared.calibrate(name)
        assert alone.temperatures == together.temperatures
        assert alone.prior_vars == together.prior_vars
        assert np.ravel([g.nlpd for g in alone.grids]) == pytest.approx(
            np.ravel([g.nlpd for g in together.grids]), abs=1e-6
        )


@pytest.mark.slow
def test_samples_is_the_former_name_of_num_draws() -> None:
    trace = random_trace()
    calibration, former = ew.calibrate(trace, "Laplace", num_draws=7), ew.calibrate(trace, "Laplace", samples=7)
    assert calibration.draws is not None
    assert former.draws is not None
    assert calibration.draws.shape == (7, trace.num_classes)
    assert torch.equal(calibration.draws, former.draws)
    default = ew.calibrate(trace, "Laplace").draws
    assert default is not None
    assert len(default) == 50
    for tables in (ew.ablation, ew.decision_experiment):
        assert tables(trace, num_draws=7).to_dict() == tables(trace, samples=7).to_dict()
        with pytest.raises(ew.InputError, match="`num_draws` and its former name `samples` must not both be given"):
            tables(trace, num_draws=7, samples=7)


def test_draws_come_from_a_seed_a_generator_or_the_caller() -> None:
    trace = random_trace()
    by_seed = ew.calibrate(trace, "Laplace", seed=7)
    by_generator = ew.calibrate(trace, "Laplace", seed=torch.Generator().manual_seed(7))
    assert by_seed.draws is not None
    by_hand = ew.calibrate(trace, "Laplace", draws=by_seed.draws)
    other = ew.calibrate(trace, "Laplace", seed=8)
    probs = by_seed.predict(trace.val).probs
    assert torch.equal(probs, by_generator.predict(trace.val).probs)
    assert torch.equal(probs, by_hand.predict(trace.val).probs)
    assert not torch.equal(probs, other.predict(trace.val).probs)
    assert by_seed.settings["seed"] == 7
    assert by_hand.settings["seed"] is None


def test_ties_go_to_the_first_point_with_temperature_outside() -> None:
    """Use one draw of zeros: the prior variance then has no effect, so all its values tie."""
    trace = random_trace()
    calibration = ew.calibrate(trace, "Laplace T_opt sigma_opt", draws=torch.zeros(1, trace.num_classes))
    assert set(calibration.prior_vars) == {0.5}


def test_grids_can_be_overridden() -> None:
    calibration = ew.calibrate(random_trace(), "MIE Laplace T_opt sigma_opt", temperatures=[0.9, 1.1], prior_vars=[5.0])
    assert set(calibration.temperatures) <= {0.9, 1.1}
    assert set(calibration.prior_vars) == {5.0}
    assert calibration.grids[0].temperatures == (0.9, 1.1)


@pytest.mark.parametrize("name", ["MIE Laplace T_opt sigma_opt", "Laplace", "MIE", "MSDNet (vanilla)"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [True, False])
def test_saved_calibrations_predict_the_same(tmp_path: object, name: str, mode: str, bias: bool) -> None:
    trace = random_trace(bias=bias)
    calibration = ew.calibrate(trace, name, mode=mode, num_draws=6)  # type: ignore[arg-type]
    calibration.save(f"{tmp_path}/c.safetensors")
    loaded = Calibration.load(f"{tmp_path}/c.safetensors")
    assert torch.equal(calibration.predict(trace.val).log_probs, loaded.predict(trace.val).log_probs)
    assert (loaded.method, loaded.mode, loaded.grids) == (calibration.method, calibration.mode, calibration.grids)
    assert (loaded.val_nlpd, loaded.weights) == (calibration.val_nlpd, calibration.weights)
    assert loaded.to_dict() == calibration.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draws": None}, "lacks 'draws'"),
        ({"draws": torch.zeros(0, 5)}, "draws must be torch.float32"),
        ({"draws": torch.zeros(4, 5, dtype=torch.float64)}, "draws must be torch.float32"),
        ({"temperatures": torch.ones(2, dtype=torch.float64)}, "temperatures must be torch.float64 of shape (3,)"),
        ({"temperatures": -torch.ones(3, dtype=torch.float64)}, "temperatures must be positive"),
        ({"prior_vars": torch.full((3,), float("nan"), dtype=torch.float64)}, "prior_vars holds values"),
        ({"weights": None}, "lacks 'weights'"),
        ({"weights": torch.zeros(3, dtype=torch.float64)}, "weights must be positive"),
        ({"exit.1.root": None}, "lacks 'exit.1.root'"),
        ({"exit.1.root": torch.zeros(5, 4)}, "exit.1.root must be torch.float32 of shape (5, 5)"),
        ({"exit.0.bias": None}, "exit.0.basis must be torch.float32 of shape (6, 6)"),
        ({"exit.0.offset": torch.tensor(-1.0)}, "must not be negative"),
        ({"exit.0.weight": torch.tensor(1.0)}, "exit.0.weight must be a matrix"),
        ({"exit.0.inverse": torch.full((7,), float("inf"))}, "exit.0.inverse holds values"),
    ],
)
def test_a_broken_calibration_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "c.safetensors"
    ew.calibrate(random_trace(), "MIE Laplace T_opt sigma_opt", num_draws=4).save(path)
    header = header_without_digest(path)
    tensors = {**load_file(path), **changes}
    save_file({key: value for key, value in tensors.items() if value is not None}, path, metadata=header)
    with pytest.raises(ew.InputError) as error:
        Calibration.load(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "[]"),
        ("method", '{"laplace": "yes"}'),
        ("method", '{"colour": 1}'),
        ("mode", '"luck"'),
        ("settings", "1"),
        ("grids", "[1]"),
        ("grids", '"x"'),
        ("grids", "[" * 50_000),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "c.safetensors"
    ew.calibrate(random_trace(), "MIE Laplace T_opt sigma_opt", num_draws=4).save(path)
    header = header_without_digest(path)
    save_file(load_file(path), path, metadata={**header, key: value})
    with pytest.raises(ew.InputError, match=r"c\.safetensors"):
        Calibration.load(path)


def test_predictions_beyond_float32_are_refused() -> None:
    trace = random_trace()
    extreme = [x.clone() for x in trace.val.features]
    extreme[1][7] *= 1e30
    with pytest.raises(ew.InputError, match="exit 1: the features of sample 7 are too extreme"):
        ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", num_draws=4).predict(extreme).probs  # noqa: B018


@pytest.mark.parametrize("name", ["Laplace", "MIE Laplace"])
def test_variance_is_that_of_the_drawn_probabilities_of_the_predicted_class(name: str) -> None:
    trace = random_trace(n=80)
    calibration = ew.calibrate(trace, name, num_draws=9)
    preds = calibration.predict(trace.val)
    drawn = []
    for k in range(trace.num_exits):
        posterior = CurvatureEigen(trace.curvature[k]).posterior(2.0)
        logits = trace.heads[k].logits(trace.val.features[k]).double()
        assert calibration.draws is not None
        z = sample_logits(
            logits, posterior.scale(trace.val.features[k].double()), posterior, calibration.draws.double()
        )
        drawn.append(z.softmax(2))
    for k in range(trace.num_exits):
        weights = torch.tensor(trace.costs.values[: k + 1], dtype=torch.float64)
        mixed = sum(w * p for w, p in zip(weights / weights.sum(), drawn, strict=False)) if "MIE" in name else drawn[k]
        chosen = torch.from_numpy(preds.predicted[k])[:, None, None].expand(-1, 9, 1)
        expected = mixed.gather(2, chosen).squeeze(2).var(dim=1, correction=0)  # type: ignore[union-attr]
        assert preds.variance is not None
        assert preds.variance[k] == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_no_samples_are_no_problem(mode: str) -> None:
    trace = random_trace()
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", num_draws=4, mode=mode)  # type: ignore[arg-type]
    assert calibration.predict([x[:0] for x in trace.val.features]).probs.shape == (3, 0, 5)


def test_there_is_no_variance_without_draws() -> None:
    trace = random_trace()
    assert ew.calibrate(trace, "MIE T_opt").predict(trace.val).variance is None


def test_features_of_half_precision_and_plain_tensors_are_taken() -> None:
    trace = random_trace()
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt")
    halves = tuple(x.half() for x in trace.val.features)
    expected = calibration.predict(tuple(x.float() for x in halves)).probs
    assert torch.equal(calibration.predict(ew.Split(halves, trace.val.labels)).probs, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "MIE Laplas"}, "did you mean 'MIE Laplace'"),
        ({"num_draws": 0}, "`num_draws` must be a whole number of at least 1, but got 0"),
        ({"num_draws": 2.5}, "`num_draws` must be a whole number"),
        ({"samples": 0}, "`samples` must be a whole number of at least 1, but got 0"),
        ({"num_draws": 5, "samples": 5}, "`num_draws` and its former name `samples` must not both be given"),
        ({"mode": "full"}, "`mode`"),
        ({"search": "random"}, "`search`"),
        ({"temperatures": []}, "`temperatures`"),
        ({"temperatures": [1.0, -1.0]}, "`temperatures`"),
        ({"prior_vars": [float("nan")]}, "`prior_vars`"),
        ({"draws": torch.zeros(5, 3)}, "`draws`"),
        ({"draws": torch.full((5, 5), float("nan"))}, "`draws`"),
        ({"draws": np.zeros((5, 5))}, "`draws`"),
        ({"method": 5}, "`method`"),
        ({"seed": "a"}, "`seed`"),
        ({"seed": 2**70}, "`seed`"),
        ({"temperatures": 1.0}, "`temperatures`"),
        ({"temperatures": ["hot"]}, "`temperatures`"),
        ({"method": "T_opt", "temperatures": [1e-39, 1.0]}, "not finite at some grid points"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ew.InputError, match=message):
        ew.calibrate(random_trace(), **arguments)  # type: ignore[arg-type]


def test_method_names_are_found_whatever_the_case() -> None:
    assert get_method("mie laplace t_opt SIGMA_opt") == ew.METHODS["MIE Laplace T_opt sigma_opt"]
    assert get_method("msdnet-vanilla") == ew.METHODS["MSDNet (vanilla)"]
    slugs = {method.slug for method in ew.METHODS.values()}
    assert len(slugs) == 12
    for name, method in ew.METHODS.items():
        assert method.name == name
        assert get_method(method.slug) == method


@pytest.mark.parametrize("bad", [{"ensemble": "mean"}, {"laplace": False}])
def test_methods_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ew.InputError):
        ew.Method(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_a_search_that_meets_no_number_is_refused_and_not_picked_from(mode: str) -> None:
    trace = random_trace()
    trace.val.features[1][3] *= 1e22  # finite, but its square is not
    with pytest.raises(ew.InputError, match="exit 1: the validation NLPD is not finite"):
        ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", mode=mode)  # type: ignore[arg-type]


def test_heads_of_any_precision_are_taken() -> None:
    trace = random_trace()
    expected = ew.calibrate(trace, "MIE Laplace").predict(trace.val).probs
    for dtype in (torch.float64, torch.float16):
        heads = tuple(HeadWeights(h.weight.to(dtype), h.bias.to(dtype)) for h in trace.heads if h.bias is not None)
        probs = ew.calibrate(replace(trace, heads=heads), "MIE Laplace").predict(trace.val).probs
        torch.testing.assert_close(probs, expected, atol=2e-2, rtol=0)


def test_features_that_do_not_fit_are_refused() -> None:
    trace = random_trace()
    calibration = ew.calibrate(trace, "Laplace")
    with pytest.raises(ew.InputError, match="3 exits"):
        calibration.predict(trace.val.features[:2])
    broken = [x.clone() for x in trace.val.features]
    broken[2][4, 1] = float("nan")
    with pytest.raises(ew.InputError, match="exit 2 must be a tensor of finite numbers"):
        calibration.predict(broken)
    with pytest.raises(ew.InputError, match="exit 0 must be a tensor"):
        calibration.predict([x.numpy() for x in trace.val.features])  # type: ignore[misc]
    with pytest.raises(ew.InputError, match="`split` must be a Split"):
        calibration.predict(5)  # type: ignore[arg-type]
    with pytest.raises(ew.InputError, match="features of exit 1"):
        calibration.predict((trace.val.features[0], trace.val.features[0], trace.val.features[2]))
