"""The comparison of rivals: means over budgets, intervals, rows, and the command."""

import csv
import io
import json
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace
from command import Command, zoo_run
from hypothesis import given, settings
from hypothesis import strategies as st

import exitwise as ew
from exitwise.calibration.methods import OURS, VANILLA
from exitwise.calibration.trace import Split, Trace
from exitwise.evaluation.bootstrap import Bootstrap
from exitwise.evaluation.evaluate import mean_over_costs
from exitwise.policies.policy import first_exits
from exitwise.rival_methods import contenders, risk_control, table
from exitwise.rival_methods.contenders import ENTRIES, Arena, NotRunError
from exitwise.rival_methods.table import auroc_columns, sweep_thresholds

pytestmark = pytest.mark.numerical

QUICK = ["temperature", "vector", "isotonic", "patience", "entropy", "geometric ensemble", "stopping heads"]
PACKAGES = {"structured matrix", "laplace-torch", "earlyon"}


class TestCurves:
    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 20), st.integers(-5, 5)), min_size=1, max_size=8),
        st.floats(0, 15),
        st.floats(0.5, 10),
    )
    def test_the_mean_is_that_of_many_points_on_the_curve(
        self, points: list[tuple[int, int]], low: float, width: float
    ) -> None:
        x, y = (np.array(column, dtype=np.float64) for column in zip(*dict(points).items(), strict=True))
        order = np.argsort(x)
        middles = low + (np.arange(20_000) + 0.5) * width / 20_000
        expected = np.interp(middles, x[order], y[order]).mean()
        assert float(mean_over_costs(x, y, low, low + width)) == pytest.approx(expected, abs=1e-3)

    def test_many_curves_at_once_are_each_its_own(self) -> None:
        rng = np.random.default_rng(0)
        x, y = rng.uniform(0, 3, size=(5, 7)), rng.normal(size=(5, 7))
        together = mean_over_costs(x, y, 0.5, 2.0)
        assert together == pytest.approx([float(mean_over_costs(*pair, 0.5, 2.0)) for pair in zip(x, y, strict=True)])

    def test_vanilla_has_the_means_of_the_ablation(self) -> None:
        trace = random_trace(400)
        expected = ew.ablation(trace, methods=[VANILLA])[VANILLA]
        row = ew.rivals(trace, only=[VANILLA], reference=VANILLA, repeats=10)[VANILLA]
        for name in ("top1", "nlpd", "ece"):
            assert getattr(row, name) == pytest.approx(getattr(expected, name), abs=1e-6)

    def test_thresholds_are_those_of_the_sweep_where_no_scores_are_equal(self) -> None:
        preds = ew.calibrate(random_trace(200), VANILLA).predict(random_trace(200).val)
        found = sweep_thresholds(ew.policies.scores.exit_scores(preds).astype(np.float32))
        expected = [policy.thresholds for policy in ew.sweep(preds, costs=random_trace(200).costs)]
        assert found == pytest.approx(np.array(expected))

    def test_ties_are_parted(self) -> None:
        """Patience has few values; still as many samples exit as the shape asks for."""
        trace = random_trace(400)
        preds = ew.calibrate(trace, VANILLA).predict(trace.val)
        scores = ew.policies.scores.exit_scores(preds, "patience")
        exits = first_exits(scores, sweep_thresholds(scores)[19])  # q = 1: a third each
        assert np.bincount(exits) == pytest.approx([133, 133, 134], abs=1)


class TestIntervals:
    def test_columns_give_the_area_under_the_curve(self) -> None:
        rng = np.random.default_rng(0)
        positive = rng.random(300) < 0.4
        score = np.round(rng.normal(size=300) + positive, 1)
        columns = auroc_columns(score, positive)
        expected = ew.metrics.auroc(score, positive)
        assert columns[:, 0].sum() / columns[:, 1].sum() == pytest.approx(expected)
        assert columns[:, 2].sum() / columns[:, 3].sum() == pytest.approx(expected)

    def test_their_bootstrap_spreads_as_that_of_the_area_itself(self) -> None:
        rng = np.random.default_rng(1)
        positive = rng.random(500) < 0.3
        score = rng.normal(size=500) + positive
        means = Bootstrap(500, 2000).resampled_means(auroc_columns(score, positive)).astype(np.float64)
        found = means[:, 0] / means[:, 1] + means[:, 2] / means[:, 3] - ew.metrics.auroc(score, positive)
        draws = [rng.integers(0, 500, 500) for _ in range(500)]
        areas = [ew.metrics.auroc(score[rows], positive[rows]) for rows in draws]
        assert found.std() == pytest.approx(np.std(areas), rel=0.1)  # both known to 3 %
        assert found.mean() == pytest.approx(np.mean(areas), abs=0.003)

    def test_differences_are_paired(self) -> None:
        """Temperature changes no class: its accuracy differs by who exits only, far less than two nets do."""
        trace = random_trace(500)
        found = ew.rivals(trace, only=["temperature", "matrix"], reference="temperature", repeats=200)
        low, high = found["matrix"].intervals["top1"]
        assert low <= found["matrix"].difference["top1"] <= high
        assert high - low < 0.1
        assert found["temperature"].difference == {}
        assert found["temperature"].intervals == {}


class TestRows:
    def test_all_that_can_run_have_rows_and_the_others_reasons(self) -> None:
        trace = random_trace(200)
        seen: list[tuple[int, int]] = []
        found = ew.rivals(trace, repeats=20, progress=lambda done, total: seen.append((done, total)))
        names = {row.name for row in found}
        assert names | set(found.not_run) == set(ENTRIES)
        assert set(found.not_run) <= PACKAGES
        assert all("exitwise[rivals]" in reason for reason in found.not_run.values())
        assert seen[-1] == (len(ENTRIES), len(ENTRIES))
        for row in found:
            for name in ("top1", "nlpd", "ece", "adaptive_ece", "auroc", "aurc", "eefp", "eefp_visited"):
                assert isfinite(getattr(row, name)), (row.name, name)
            assert len(row.eefp_per_exit) == 2
            assert row.added_macs >= 0
        assert [row.name for row in found.risk_control][:3] == [
            risk_control.EXPECTATION,
            risk_control.PROBABILITY,
            risk_control.OURS,
        ]
        assert json.loads(json.dumps(found.to_dict()))["reference"] == OURS
        rows = list(csv.DictReader(io.StringIO(found.to_csv())))
        assert [row["name"] for row in rows] == [row.name for row in found]
        assert float(rows[0]["top1"]) == pytest.approx(found[0].top1, rel=1e-5)
        per_exit = [float(rows[0][f"eefp_{k}"]) for k in (1, 2)]
        assert per_exit == pytest.approx(found[0].eefp_per_exit, rel=1e-5)
        assert len(found.to_pandas()) == len(found)
        assert "temperature scaling" in repr(found)

    @pytest.mark.slow
    def test_a_second_comparison_is_the_same(self) -> None:
        trace = random_trace(150)
        first, second = (ew.rivals(trace, only=QUICK, repeats=20) for _ in range(2))
        for row, other in zip(first, second, strict=True):
            assert replace(row, seconds=0) == replace(other, seconds=0)

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            ("no luck\nat all", "no luck"),
            ("torchvision::nms", "torchvision::nms; torchvision does not match torch: uninstall it"),
        ],
    )
    def test_a_package_that_fails_is_named(self, monkeypatch: pytest.MonkeyPatch, error: str, reason: str) -> None:
        def fail(arena: Arena) -> Any:
            raise RuntimeError(error)

        entry = replace(ENTRIES["earlyon"], run=fail, module="numpy")
        monkeypatch.setattr(table, "ENTRIES", {**ENTRIES, "earlyon": entry})
        found = ew.rivals(random_trace(60), only=["earlyon"], repeats=5)
        assert found.not_run == {"earlyon": f"earlyon failed: {reason}"}
        with pytest.raises(ew.InputError, match="`reference` 'earlyon' cannot be run: earlyon failed"):
            ew.rivals(random_trace(60), only=["ETS"], reference="earlyon", repeats=5)

    def test_too_many_classes_for_a_matrix_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(contenders, "MAX_MATRIX_SIZE", 100)
        found = ew.rivals(random_trace(60), only=["matrix", "vector"], repeats=5)
        assert found.not_run == {"matrix": "5 classes are too many for a matrix"}

    @pytest.mark.parametrize("name", sorted(PACKAGES))
    def test_packages_of_others_run_where_they_are_installed(self, name: str) -> None:
        try:
            ENTRIES[name].check()
        except NotRunError as reason:
            pytest.skip(str(reason))
        found = ew.rivals(random_trace(100), only=[name], repeats=5)
        assert found.not_run == {}
        assert found[name].nlpd < found[name].nlpd + 1


class TestWithoutTrainingImages:
    def test_methods_with_laplace_are_left_out_with_a_reason(self) -> None:
        trace = replace(random_trace(120), curvature=())
        found = ew.rivals(trace, only=[OURS, "Pool", "temperature"], repeats=10)
        assert found.reference == VANILLA
        assert [row.name for row in found] == [VANILLA, "Pool", "temperature"]
        assert found.not_run == {OURS: "needs the curvature of training images, which the trace does not have"}

    def test_a_reference_with_laplace_is_refused(self) -> None:
        with pytest.raises(ew.InputError, match="cannot be run: needs the curvature"):
            ew.rivals(replace(random_trace(120), curvature=()), only=["temperature"], reference=OURS)


class TestBadInput:
    @pytest.mark.parametrize(
        "kind",
        ["few samples", "absent class", "noise", "equal exits", "saturated", "one exit", "all correct", "one class"],
    )
    @pytest.mark.slow_after_first
    def test_no_row_has_a_number_that_is_none(self, kind: str) -> None:
        trace = random_trace(120)
        assert trace.test is not None
        if kind == "few samples":
            trace = replace(trace, val=trace.val.take(torch.arange(6)))
        elif kind == "absent class":
            trace = replace(trace, val=trace.val.take(trace.val.labels < 3))
        elif kind == "noise":
            noise = torch.randn(120, 7, generator=torch.Generator().manual_seed(0))
            trace = replace(trace, val=_with_features(trace.val, 1, noise))
        elif kind == "equal exits":
            trace = random_trace(120, widths=(6, 6, 6))
            trace = Trace(
                *(_repeat_first(split) for split in (trace.val, trace.test)),
                (trace.heads[0],) * 3,
                (trace.curvature[0],) * 3,
                trace.costs,
            )
        elif kind == "saturated":
            heads = tuple(replace(head, weight=head.weight * 1e3) for head in trace.heads)
            trace = replace(trace, heads=heads)
        elif kind == "one exit":
            trace = random_trace(120, widths=(6,))
        elif kind == "all correct":
            predicted = trace.heads[0].logits(trace.val.features[0]).argmax(dim=1)
            trace = replace(trace, val=Split(trace.val.features, predicted))
        elif kind == "one class":
            trace = replace(trace, val=trace.val.take(trace.val.labels == 1))
        found = ew.rivals(trace, repeats=10)
        assert "NaN" not in json.dumps(found.to_dict(), allow_nan=False)
        for row in found:
            assert isfinite(row.nlpd), row.name
            assert isfinite(row.top1), row.name
            assert "nan" not in found.to_csv().lower()
        expected = PACKAGES | ({"stopping heads"} if kind in ("one exit", "few samples", "all correct") else set())
        assert set(found.not_run) <= expected | {"stopping heads"}

    def test_without_a_test_split(self) -> None:
        with pytest.raises(ew.InputError, match="no test split"):
            ew.rivals(replace(random_trace(50), test=None))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"only": ["temprature"]}, "`only` must be the name of a method.*did you mean 'temperature'"),
            ({"only": "temperature"}, "`only` must be several names"),
            ({"reference": "best"}, "`reference` must be the name of a method"),
            ({"repeats": 0}, "`repeats` must be a whole number of at least 1"),
            ({"budget_range": (3, 1)}, "`budget_range` must be two growing numbers"),
        ],
    )
    def test_wrong_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ew.InputError, match=message):
            ew.rivals(random_trace(50), **arguments)


def _with_features(split: Split, exit: int, features: torch.Tensor) -> Split:
    parts = [features if k == exit else x for k, x in enumerate(split.features)]
    return Split(tuple(parts), split.labels)


def _repeat_first(split: Split) -> Split:
    return Split((split.features[0],) * len(split.features), split.labels)


class TestRiskControl:
    def test_thresholds_are_lowered_until_the_loss_is_not_controlled(self) -> None:
        losses = np.zeros((4, 200), dtype=np.int8)
        losses[1, :3], losses[2, :30] = 1, 1
        assert risk_control._controlled_threshold(losses, losses, 0.05, None) == 1
        assert risk_control._controlled_threshold(losses[2:], losses[2:], 0.05, None) is None
        assert risk_control._controlled_threshold(losses, losses, 0.9, None) == 3

    def test_a_probability_costs_more_than_an_expectation(self) -> None:
        trace = random_trace(800)
        rows = {(row.name, row.epsilon): row for row in risk_control.compare_risk_control(trace, [0.05, 0.2])}
        for epsilon in (0.05, 0.2):
            expectation = rows[risk_control.EXPECTATION, epsilon]
            probability = rows[risk_control.PROBABILITY, epsilon]
            assert expectation.cost is not None
            assert probability.cost is None or probability.cost >= expectation.cost

    @pytest.mark.slow
    def test_the_loss_is_controlled_on_fresh_samples(self) -> None:
        """In expectation: the mean over many draws of the validation samples is at most epsilon."""
        trace = random_trace(3000)
        assert trace.test is not None
        pairs = zip(trace.val.features, trace.test.features, strict=True)
        both = Split(tuple(torch.cat(pair) for pair in pairs), torch.cat([trace.val.labels, trace.test.labels]))
        found = []
        for seed in range(10):
            order = torch.randperm(6000, generator=torch.Generator().manual_seed(seed))
            drawn = replace(trace, val=both.take(order[:600]), test=both.take(order[600:]))
            loss = risk_control.compare_risk_control(drawn, [0.05])[0].loss
            found.append(0.0 if loss is None else loss)
        assert np.mean(found) <= 0.05 + 2 * np.std(found) / 10**0.5


class TestCommand:
    @pytest.mark.slow
    def test_tables_fit_and_results_are_kept(self, tmp_path: Path, exitwise: Command) -> None:
        run = zoo_run(tmp_path / "run")
        words = ["rivals", str(run), "--only", "temperature", "--only", "earlyon", "--repeats", "20"]
        done = exitwise(*words)
        assert done.status == 0, done.err
        assert max(map(len, done.out.split("Left out")[0].splitlines())) <= 100 or "Not run" in done.out
        assert "temperature scaling" in done.out
        assert f"Difference to {OURS}" in done.out
        assert "need another training: JEI-DNN" in done.out
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert [row["name"] for row in results["rivals"]["rows"]][:2] == [OURS, "temperature"]

    @pytest.mark.slow
    def test_json_and_csv(self, tmp_path: Path, exitwise: Command) -> None:
        run = zoo_run(tmp_path / "run")
        words = ["rivals", str(run), "--only", "entropy", "--reference", VANILLA, "--repeats", "10"]
        assert [row["name"] for row in json.loads(exitwise(*words, "--json").out)["rows"]] == [VANILLA, "entropy"]
        assert [row["name"] for row in csv.DictReader(io.StringIO(exitwise(*words, "--csv").out))] == [
            VANILLA,
            "entropy",
        ]
        both = exitwise(*words, "--csv", "--json")
        assert (both.status, both.err) == (2, "exitwise: --json and --csv exclude each other: give one of them\n")

    def test_a_wrong_name_is_one_line(self, tmp_path: Path, exitwise: Command) -> None:
        done = exitwise("rivals", str(zoo_run(tmp_path / "run")), "--only", "vektor")
        assert (done.status, done.out) == (2, "")
        assert "`--only` must be the name of a method, but got 'vektor'; did you mean 'vector'?" in done.err
