"""Parity with the paper's released code on the zoo's trace; see golden/README.md."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from paths import TESTS
from safetensors.torch import load_file

import exitwise as ew
from exitwise.calibration.tuning import Tuner
from exitwise.evaluation.paper_tables import PaperTables, make_paper_tables

pytestmark = pytest.mark.numerical

GOLDEN = TESTS / "golden"
REFERENCE: dict[str, Any] = json.loads((GOLDEN / "reference.json").read_text())
PROBS = load_file(GOLDEN / "reference_probs.safetensors")
TWO_SAMPLES = 2 / 10_000


@pytest.fixture(scope="module")
def trace() -> ew.Trace:
    return ew.Trace.load(ew.zoo.path("trace.safetensors"))


@pytest.fixture(scope="module")
def tables(trace: ew.Trace) -> PaperTables:
    return make_paper_tables(trace, Tuner(trace, draws=PROBS["draws"]))


def test_methods_are_the_twelve_of_the_paper_in_its_order() -> None:
    published = [row["method"] for row in ew.zoo.published("ablation")]
    assert list(ew.METHODS) == list(REFERENCE) == list(dict.fromkeys(published))


@pytest.mark.parametrize("name", REFERENCE)
def test_grid_picks_and_nlpd_tables(tables: PaperTables, name: str) -> None:
    calibration, reference = tables.calibrations[name], REFERENCE[name]
    assert calibration.temperatures == pytest.approx(reference["temperatures"])
    if calibration.method.laplace:
        assert calibration.prior_vars == pytest.approx(reference["prior_vars"])
    for grid, expected in zip(calibration.grids, reference["val_nlpd_grid"], strict=True):
        assert np.ravel(grid.nlpd) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "key"),
    [("MSDNet (vanilla)", "vanilla"), ("Laplace", "laplace"), ("MIE Laplace T_opt sigma_opt", "ours")],
)
@pytest.mark.parametrize("split", ["val", "test"])
def test_probabilities_with_the_golden_draws(
    tables: PaperTables, trace: ew.Trace, name: str, key: str, split: str
) -> None:
    probs = tables.calibrations[name].predict(getattr(trace, split)).probs[:, :64]
    torch.testing.assert_close(probs, PROBS[f"{key}.{split}.probs"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", REFERENCE)
def test_accuracy_and_nlpd_per_exit(tables: PaperTables, name: str) -> None:
    for metrics, expected in zip(tables.curves[name].points[0].per_exit, REFERENCE[name]["exits"], strict=True):
        assert metrics.top1 == pytest.approx(expected["test_acc"], abs=TWO_SAMPLES)
        assert metrics.nlpd == pytest.approx(expected["test_nlpd"], abs=1e-5)


@pytest.mark.parametrize("name", REFERENCE)
def test_thresholds_of_all_39_budgets(tables: PaperTables, trace: ew.Trace, name: str) -> None:
    preds = tables.calibrations[name].predict(trace.val)
    confidence = preds.probs.max(dim=2).values.numpy()
    policies = ew.sweep(preds, costs=trace.costs)
    assert len(policies) == len(REFERENCE[name]["budgets"]) == 39
    for policy, expected in zip(policies, REFERENCE[name]["budgets"], strict=True):
        thresholds = [np.inf if t > 1e7 else -np.inf if t < -1e7 else t for t in expected["thresholds"]]
        exits = policy.exits(preds)
        for k, (threshold, reference) in enumerate(zip(policy.thresholds, thresholds, strict=True)):
            if threshold == pytest.approx(reference, abs=1e-5):
                continue
            # A threshold is the confidence of one sample. Another CPU may round a sample across an earlier threshold,
            # and then it is the confidence of a neighbor: at most two of the samples that reach this exit lie between.
            low, high = sorted((threshold, reference))
            between = (confidence[k] > low + 1e-5) & (confidence[k] < high - 1e-5) & (exits >= k)
            assert between.sum() <= 2, f"exit {k}: {threshold} instead of {reference}"


@pytest.mark.parametrize("name", REFERENCE)
def test_evaluation_at_all_39_budgets(tables: PaperTables, trace: ew.Trace, name: str) -> None:
    last_cost = trace.costs.values[-1]
    moved = 0
    for point, expected in zip(tables.curves[name], REFERENCE[name]["budgets"], strict=True):
        assert point.exit_shares == pytest.approx(expected["shares"], abs=TWO_SAMPLES + 1e-9)
        assert point.cost == pytest.approx(expected["cost"], abs=TWO_SAMPLES * last_cost)
        assert point.top1 * 100 == pytest.approx(expected["top1"], abs=100 * TWO_SAMPLES + 1e-9)
        assert point.top5 * 100 == pytest.approx(expected["top5"], abs=100 * TWO_SAMPLES + 1e-9)
        if point.exit_shares == pytest.approx(expected["shares"], abs=1e-9):
            assert point.nlpd == pytest.approx(expected["nlpd"], abs=1e-5)
            assert point.ece == pytest.approx(expected["ece"], abs=1e-5)
        else:  # a sample whose score equals a threshold up to the last bit of float32 exits elsewhere
            moved += 1
            assert point.nlpd == pytest.approx(expected["nlpd"], abs=1e-3)
    assert moved <= 3


@pytest.mark.parametrize("name", REFERENCE)
def test_means_over_the_budget_range(tables: PaperTables, name: str) -> None:
    row, expected = tables.ablation[name], REFERENCE[name]["mean"]
    assert tables.ablation.budget_range == (7.0e6, 2.6e7)
    assert row.top1 == pytest.approx(expected["top1"] / 100, abs=1e-4)
    assert row.top5 == pytest.approx(expected["top5"] / 100, abs=1e-4)
    assert row.nlpd == pytest.approx(expected["nlpd"], abs=1e-4)
    assert row.ece == pytest.approx(expected["ece"], abs=1e-4)


def test_changes_are_against_vanilla(tables: PaperTables) -> None:
    vanilla = tables.ablation["MSDNet (vanilla)"]
    for row in tables.ablation:
        for name, change in row.change.items():
            assert change == pytest.approx(getattr(row, name) - getattr(vanilla, name))


def test_decision_experiment_takes_exits_from_ours_and_answers_from_vanilla(
    tables: PaperTables, trace: ew.Trace
) -> None:
    """Compare with vanilla predictions, taken at the exits that the scores of our model choose."""
    ours, vanilla = (tables.calibrations[n] for n in ("MIE Laplace T_opt sigma_opt", "MSDNet (vanilla)"))
    assert trace.test is not None
    policy = ew.sweep(ours.predict(trace.val), costs=trace.costs)[19]
    exits = policy.exits(ours.predict(trace.test))
    probs = vanilla.predict(trace.test).probs.numpy()[exits, np.arange(len(exits))]
    right = probs.argmax(axis=1) == trace.test.labels.numpy()
    point = tables.curves["Vanilla predictions, our model decisions"].points[19]
    assert point.top1 == pytest.approx(right.mean())
    ours_point = tables.curves["MIE Laplace T_opt sigma_opt"].points[19]
    assert point.cost == ours_point.cost
    methods = [row.method for row in tables.decisions]
    assert methods == ["MSDNet (vanilla)", "Vanilla predictions, our model decisions", "Our model"]
