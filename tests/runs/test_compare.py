"""Every strategy beside the paper's sweep: the bootstrap, the rows, and `exitwise policies`."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf, sqrt
from pathlib import Path
from re import search
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace
from command import Command, contents, with_paper_method, zoo_run

import exitwise as ew
from exitwise.calibration.methods import OURS, VANILLA, get_method
from exitwise.core.costs import evenly_spaced_budgets
from exitwise.core.files import write_json
from exitwise.evaluation import bootstrap
from exitwise.evaluation.bootstrap import Bootstrap, percentile_interval
from exitwise.policies.scores import SCORES
from exitwise.runs.compare import Comparison, PolicyRow, PolicyTable
from exitwise.runs.run import Run, run_metadata

pytestmark = pytest.mark.numerical

STRATEGIES = ["public", "geometric", "optimized", "label_free", "auto", "certified"]


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


class TestBootstrap:
    def test_every_draw_has_as_many_samples_as_there_are(self) -> None:
        """The means of one column per sample are its share of the resample."""
        shares = Bootstrap(12, 3000).resampled_means(np.eye(12)) * 12
        assert shares == pytest.approx(np.rint(shares), abs=1e-5)
        assert shares.sum(axis=1) == pytest.approx(12)
        # Each is drawn Binomial(12, 1/12) times: none too often, none missing more often than (11/12)^12.
        assert shares.mean(axis=0) == pytest.approx(1, abs=4 * sqrt(11 / 12 / 3000))
        assert (shares < 0.5).mean() == pytest.approx((11 / 12) ** 12, abs=0.01)

    def test_the_draws_are_the_same_for_whatever_is_asked(self) -> None:
        values = np.random.default_rng(1).normal(size=(40, 3))
        made = Bootstrap(40, 200)
        drawn = made.resampled_means(np.eye(40))
        assert made.resampled_means(values) == pytest.approx(drawn @ values, abs=1e-6)
        assert made.resampled_means(values[:, 1:2])[:, 0] == pytest.approx(made.resampled_means(values)[:, 1], abs=1e-6)
        assert (Bootstrap(40, 200).resampled_means(values) == made.resampled_means(values)).all()
        assert (Bootstrap(40, 200, seed=1).resampled_means(values) != made.resampled_means(values)).any(axis=1).all()
        assert Bootstrap(40, 50).resampled_means(values) == pytest.approx(made.resampled_means(values)[:50], abs=1e-6)

    def test_means_spread_as_theory_has_it(self) -> None:
        """Covariance of the columns over n: what differences of pairs rest on. With R draws known to 1 / sqrt(2 R)."""
        rng = np.random.default_rng(2)
        one = rng.exponential(size=500)
        values = np.stack([one, one + 0.3 * rng.normal(size=500), rng.uniform(size=500)], axis=1)
        drawn = Bootstrap(500, 4000).resampled_means(values)
        expected = np.cov(values.T, bias=True) / 500
        errors = np.sqrt(np.diag(expected))
        assert drawn.std(axis=0) == pytest.approx(errors, rel=0.04)
        assert np.cov(drawn.T) == pytest.approx(expected, abs=0.05 * float(expected.max()))
        assert np.abs(drawn.mean(axis=0) - values.mean(axis=0)) == pytest.approx(
            0, abs=float(4 * errors[0] / sqrt(4000))
        )

    @pytest.mark.parametrize("held", [1, 30, 31 * 7, 30 * 99])
    def test_part_by_part_it_is_the_same(self, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
        values = np.random.default_rng(3).normal(size=(30, 2))
        whole = Bootstrap(30, 100).resampled_means(values)
        monkeypatch.setattr(bootstrap, "_PART", held)
        parts = Bootstrap(30, 100)
        assert parts.resampled_means(values).shape == (100, 2)
        assert parts.resampled_means(values) == pytest.approx(whole, abs=1e-6)

    def test_the_interval_is_the_middle(self) -> None:
        values = np.random.default_rng(0).permutation(np.linspace(0, 1, 1001))
        assert percentile_interval(values) == pytest.approx((0.025, 0.975))
        assert percentile_interval(np.full(10, 3.0)) == (3, 3)
        assert percentile_interval(np.array([2.0])) == (2, 2)
        assert all(type(end) is float for end in percentile_interval(values))

    def test_intervals_hold_the_truth_nineteen_times_in_twenty(self) -> None:
        """Means of 300 exponential numbers; 600 trials would be 93 to 97 % of the time within three deviations."""
        rng = np.random.default_rng(4)
        drawn = Bootstrap(300, 400).resampled_means(rng.exponential(size=(300, 600)))
        covered = [low <= 1 <= high for low, high in map(percentile_interval, drawn.T)]
        assert np.mean(covered) == pytest.approx(0.945, abs=3 * sqrt(0.95 * 0.05 / 600))


def small_trace(n: int = 240, exits: int = 3) -> ew.Trace:
    """With positions in a dataset, unordered."""
    trace = random_trace(n=n, widths=(6, 7, 9)[:exits])
    index = torch.randperm(1000, generator=torch.Generator().manual_seed(5))[:n]
    return replace(trace, val=replace(trace.val, index=index))


def make_run(place: Path, trace: ew.Trace) -> Path:
    """A run of a trace alone."""
    place.mkdir()
    write_json(place / "run.json", run_metadata({"net": "mine:net"}, {"name": "digits", "root": None}))
    trace.save(place / "trace.safetensors")
    return place


def compare(
    place: Path, trace: ew.Trace, *methods: str, shares: Sequence[float] = (0.4, 0.7), **options: Any
) -> PolicyTable:
    """Compare as the command does, for budgets in shares of the last exit's cost."""
    amounts = tuple(share * trace.costs.values[-1] for share in shares)
    chosen = tuple(get_method(name) for name in methods)
    return Comparison(amounts, chosen, **{"repeats": 50, **options}).run(Run(place), trace, trace.costs)


@cache
def _tuned(trace: ew.Trace, method: str, certified: bool) -> tuple[ew.Trace, ew.Split | None, ew.Calibration]:
    """Tuning samples, held-out samples, and the calibration."""
    tune, hold = trace.hold_out(0.5, seed=0) if certified else (trace, None)
    return tune, hold, ew.calibrate(tune, method)


def expected_policy(row: PolicyRow, trace: ew.Trace, objective: str = "accuracy") -> tuple[ew.Policy, ew.Calibration]:
    """The policy of a row, and the calibration that it is about, by the library alone."""
    tune, hold, made = _tuned(trace, row.method, row.strategy == "certified")
    preds = made.predict(tune.val)
    if row.strategy == "public":
        found = [each for each in ew.sweep(preds, costs=trace.costs, score=row.score) if (each.cost or 0) <= row.budget]
        return sorted(found, key=lambda policy: policy.cost or 0)[-1], made
    more: dict[str, Any] = {"strategy": row.strategy}
    if hold is not None:
        more = {"certify": ew.Certificate(0.05), "hold": made.predict(hold), "hold_labels": hold.labels}
    policy = ew.fit_policy(
        preds, tune.val.labels, trace.costs, budget=row.budget, score=row.score, objective=objective, **more
    )
    return policy, made


def interpolated(points: Sequence[tuple[float, float]], cost: float) -> float:
    """Accuracy at a cost from (cost, accuracy) points: linear between neighbours, that of the nearest beyond them."""
    ordered = sorted(points)
    costs = [each for each, _ in ordered]
    if cost <= costs[0] or cost >= costs[-1]:
        return ordered[0 if cost <= costs[0] else -1][1]
    above = bisect_left(costs, cost)
    (low, worse), (high, better) = ordered[above - 1], ordered[above]
    return worse + (better - worse) * (cost - low) / (high - low)


@pytest.fixture(scope="module")
def trace() -> ew.Trace:
    return small_trace()


@pytest.fixture(scope="module")
def place(trace: ew.Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("comparison") / "run", trace)


@pytest.fixture(scope="module")
def table(place: Path, trace: ew.Trace) -> PolicyTable:
    return compare(place, trace, VANILLA, OURS, scores=("confidence", "margin"), shares=(0.3, 0.7))


class TestRows:
    def test_every_strategy_has_a_row_for_every_budget(self, table: PolicyTable, trace: ew.Trace) -> None:
        full = trace.costs.values[-1]
        assert [(row.method, row.score, row.budget, row.strategy) for row in table] == [
            (method, score, share * full, strategy)
            for method in (VANILLA, OURS)
            for score in ("confidence", "margin")
            for share in (0.3, 0.7)
            for strategy in STRATEGIES
        ]
        assert (table.unit, table.full_cost, table.repeats, table.certify) == ("MACs", full, 50, 0.05)

    @pytest.mark.slow
    def test_each_is_the_library_at_that_budget(self, table: PolicyTable, trace: ew.Trace) -> None:
        assert trace.test is not None
        for row in table:
            policy, made = expected_policy(row, trace)
            result = ew.evaluate(made.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
            assert row.thresholds == policy.thresholds
            assert row.val_cost == policy.cost
            assert (row.top1, row.nlpd, row.exit_shares) == (result.top1, result.nlpd, result.exit_shares)
            assert (row.test_cost, row.ece) == pytest.approx((result.cost, result.ece), rel=1e-12)
            assert row.chosen == (policy.fit.chosen if policy.fit else None)
            assert row.gap == (policy.fit.gap if policy.fit else None)
            assert row.val_cost <= row.budget

    def test_the_objective_is_passed_on(self, place: Path, trace: ew.Trace) -> None:
        rows = list(compare(place, trace, "T_opt", shares=(0.6,), objective="nlpd"))
        assert [row.strategy for row in rows] == STRATEGIES
        for row in rows:
            assert row.thresholds == expected_policy(row, trace, "nlpd")[0].thresholds

    def test_gains_are_against_the_public_rule_at_equal_cost(self, table: PolicyTable, trace: ew.Trace) -> None:
        assert trace.test is not None
        curves = {}
        for method, score in {(row.method, row.score) for row in table}:
            made = ew.calibrate(trace, method)
            policies = ew.sweep(made.predict(trace.val), costs=trace.costs, score=score)
            curve = ew.budget_curve(
                made.predict(trace.test), labels=trace.test.labels, policies=policies, costs=trace.costs
            )
            curves[method, score] = [(point.cost, point.top1) for point in curve]
        gains = []
        for row in table:
            if row.strategy == "public":
                assert row.gain is None
                continue
            assert row.gain == pytest.approx(
                row.top1 - interpolated(curves[row.method, row.score], row.test_cost), abs=1e-12
            )
            gains.append(row.gain)
        assert max(map(abs, gains)) > 0.005  # or nothing would be compared

    @pytest.mark.slow
    def test_intervals_are_about_their_numbers(self, place: Path, trace: ew.Trace) -> None:
        """Intervals of means have the width of their standard error; with 2000 resamples to a few percent."""
        assert trace.test is not None
        wide = 2 * NormalDist().inv_cdf(0.975)
        for row in compare(place, trace, OURS, shares=(0.5,), repeats=2000):
            policy, made = expected_policy(row, trace)
            preds = made.predict(trace.test)
            exits, n = policy.exits(preds), len(trace.test)
            log_probs = preds.log_probs[exits, torch.arange(n)]
            columns = {
                "cost": np.asarray(trace.costs.values)[exits],
                "top1": (log_probs.argmax(dim=1) == trace.test.labels).double().numpy(),
                "nlpd": -log_probs[torch.arange(n), trace.test.labels].double().numpy(),
            }
            for name, column in columns.items():
                low, high = row.intervals[name]
                assert low < column.mean() < high
                assert high - low == pytest.approx(wide * column.std() / sqrt(n), rel=0.1)
            if row.gain is not None:
                low, high = row.intervals["gain"]
                assert low <= row.gain <= high
            assert 0 <= row.intervals["ece"][0] < row.intervals["ece"][1] < 0.5

    def test_test_labels_touch_no_threshold(self, table: PolicyTable, trace: ew.Trace, tmp_path: Path) -> None:
        assert trace.test is not None
        shuffled = trace.test.labels[torch.randperm(len(trace.test), generator=torch.Generator().manual_seed(1))]
        other = replace(trace, test=replace(trace.test, labels=shuffled))
        found = compare(make_run(tmp_path / "run", other), other, OURS, shares=(0.3, 0.7))
        rows = [row for row in table if (row.method, row.score) == (OURS, "confidence")]
        for row, its in zip(rows, found, strict=True):
            for name in ("thresholds", "chosen", "val_cost", "test_cost", "exit_shares", "gap"):
                assert getattr(row, name) == getattr(its, name)
            assert row.intervals["cost"] == its.intervals["cost"]
            assert row.top1 > its.top1 + 0.1

    def test_the_samples_held_out_are_written_down(self, table: PolicyTable, trace: ew.Trace) -> None:
        assert trace.val.index is not None
        certified = table.samples["certified"]
        tuned, held = (certified[name]["index"] for name in ("calibrated_and_fitted_on", "certified_on"))
        assert len(tuned) == len(held) == 120
        assert sorted(tuned + held) == sorted(trace.val.index.tolist())
        assert table.samples["tested_on"] == {"split": "test", "samples": 240}
        assert table.samples["all but certified"] == {"split": "val", "samples": 240}

    def test_a_budget_below_the_public_rule_is_noted(self, trace: ew.Trace, place: Path) -> None:
        """Its cheapest policy sends a share of samples on: there is none for the first exit's cost."""
        share = trace.costs.values[0] / trace.costs.values[-1]
        found = compare(place, trace, VANILLA, shares=(share,))
        assert [row.strategy for row in found] == STRATEGIES[1:]
        assert len(found.notes) == 1
        assert "paper's sweep has no policy for 1e+06 MACs or less" in found.notes[0]
        for row in found:
            assert (row.test_cost, row.exit_shares) == (trace.costs.values[0], (1, 0, 0))

    def test_a_net_with_one_exit(self, tmp_path: Path) -> None:
        trace = small_trace(60, exits=1)
        assert evenly_spaced_budgets(trace.costs, 6) == [trace.costs.values[0]]
        rows = list(compare(make_run(tmp_path / "run", trace), trace, VANILLA, OURS, shares=(1.0,)))
        assert [row.strategy for row in rows] == STRATEGIES * 2
        for row in rows:
            assert (row.thresholds, row.exit_shares, row.test_cost) == ((-inf,), (1,), 1e6)
            assert row.intervals["cost"] == pytest.approx((1e6, 1e6), rel=1e-6)
            if row.strategy != "certified":  # which is calibrated on fewer samples
                assert row.gain == (None if row.strategy == "public" else 0)
                assert row.intervals.get("gain", (0, 0)) == (0, 0)

    def test_budgets_are_spread_over_the_range_without_its_ends(self) -> None:
        assert evenly_spaced_budgets(ew.Costs((1.0, 3.0, 8.0)), 6) == pytest.approx([2, 3, 4, 5, 6, 7])

    @pytest.mark.slow
    def test_progress_is_told_and_ends(self, place: Path, trace: ew.Trace) -> None:
        told: list[tuple[int, int]] = []
        asked = Comparison((2e6,), (get_method(VANILLA), get_method("T_opt")), ("margin", "entropy"))
        replace(asked, repeats=2).run(Run(place), trace, trace.costs, lambda *report: told.append(report))
        assert told == [(k, 4) for k in range(5)]

    def test_tables_are_plain_data_and_pandas(self, table: PolicyTable) -> None:
        pandas = pytest.importorskip("pandas")
        frame = table.to_pandas()
        assert isinstance(frame, pandas.DataFrame)
        assert frame["top1"].tolist() == [row.top1 for row in table]
        assert json.loads(json.dumps(table.to_dict(), allow_nan=False))["rows"][5]["strategy"] == "certified"


class TestCommand:
    @pytest.fixture
    def run(self, trace: ew.Trace, tmp_path: Path) -> Path:
        return make_run(tmp_path / "run", trace)

    @pytest.mark.slow
    def test_budgets_methods_and_scores_may_be_repeated(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        options = ["--budget", "40%", "--budget", "3e6", "--method", "t_opt", "--method", "poe laplace"]
        options += ["--score", "entropy", "--score", "confidence", "--repeats", "20"]
        (run / "results.json").write_text(
            json.dumps({"format": "exitwise.results", "version": 1, "ablation": {"a": 1}})
        )
        found = exitwise("policies", run, *options, "--json").json
        assert [(row["method"], row["score"], row["budget"], row["strategy"]) for row in found["rows"]] == [
            (method, score, budget, strategy)
            for method in ("T_opt", "PoE Laplace")
            for score in ("entropy", "confidence")
            for budget in (0.4 * trace.costs.values[-1], 3e6)
            for strategy in STRATEGIES
        ]
        results = json.loads((run / "results.json").read_text())
        assert results["policies"] == found
        assert results["ablation"] == {"a": 1}  # of other commands
        assert found["repeats"] == 20
        assert not (run / "policy.json").exists()  # which is for what was evaluated

    def test_it_is_the_library(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        found = exitwise("policies", run, "--budget", "50%", "--method", "MIE", "--repeats", "20", "--json").json
        expected = compare(run, trace, "MIE", shares=(0.5,), repeats=20)
        assert found == json.loads(json.dumps(expected.to_dict()))

    def test_by_default_two_methods_and_six_budgets(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        found = exitwise("policies", run, "--certify", "0", "--repeats", "3", "--json").json
        assert {row["method"] for row in found["rows"]} == {VANILLA, OURS}
        assert sorted({row["budget"] for row in found["rows"]}) == pytest.approx(evenly_spaced_budgets(trace.costs, 6))
        assert {row["strategy"] for row in found["rows"]} == {*STRATEGIES} - {"certified"}
        assert found["certify"] is None
        assert "certified" not in found["samples"]

    @pytest.mark.slow
    def test_all_methods(self, run: Path, exitwise: Command) -> None:
        options = ["--method", "all", "--budget", "60%", "--certify", "0", "--repeats", "2", "--json"]
        found = exitwise("policies", run, *options).json
        assert [row["method"] for row in found["rows"][::5]] == list(ew.METHODS)

    @pytest.mark.slow
    def test_all_scores_but_the_variance_where_there_is_none(self, run: Path, exitwise: Command) -> None:
        options = ["--score", "all", "--budget", "60%", "--certify", "0", "--repeats", "2", "--json"]
        found = exitwise("policies", run, *options).json
        scores = {method: [] for method in (VANILLA, OURS)}  # type: dict[str, list[str]]
        for row in found["rows"][::5]:
            scores[row["method"]].append(row["score"])
        known = [*SCORES, "learned"]
        assert scores == {VANILLA: [each for each in known if each != "variance"], OURS: known}

    def test_the_table_for_people(self, run: Path, exitwise: Command) -> None:
        done = exitwise("policies", run, "--budget", "40%", "--budget", "80%", "--method", "T_opt", "--repeats", "20")
        rows = json.loads((run / "results.json").read_text())["policies"]["rows"]
        lines = [line for line in done.out.splitlines() if search(r" ±\d", line)]
        assert len(lines) == len(rows) == 12
        names = ["paper's sweep", "geometric", "optimized", "label-free", "auto (", "certified"]
        for line, row, name in zip(lines, rows, names * 2, strict=True):
            assert name in line
            assert f"{100 * row['top1']:.2f} ±" in line
            assert f"{row['nlpd']:.3f} ±" in line
            assert f"{100 * row['test_cost'] / row['budget']:.1f} %" in line
            assert row["gain"] is None or f"{100 * row['gain']:+.2f} [" in line
        assert [line.split("%")[0].strip() for line in lines[::6]] == ["40", "80"]
        words = " ".join(done.out.split())
        assert "T_opt, confidence" in words
        assert "within the budget with a probability of 95 %" in words
        assert "measured on 240 test samples" in words

    def test_policies_can_be_made_of_the_rows(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        """At the first exit's cost all samples exit there; its threshold differs from that of an unused exit."""
        options = ["--budget", "1e6", "--budget", "80%", "--method", "T_opt", "--repeats", "2", "--json"]
        found = exitwise("policies", run, *options).json
        expected = compare(run, trace, "T_opt", shares=(1e6 / trace.costs.values[-1], 0.8), repeats=2)
        for row, its in zip(found["rows"], expected, strict=True):
            assert ew.Policy.from_dict({"thresholds": row["thresholds"]}).thresholds == its.thresholds

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--repeats", "0"], "`--repeats` must be a whole number of at least 1, but got 0"),
            (["--repeats", "-3"], "`--repeats`"),
            (["--repeats", "many"], "--repeats"),
            (["--score", "luck"], "`--score` must be one of"),
            (["--score", "confidence", "--score", "luck"], "`--score` must be one of"),
            (["--method", "MEI"], "did you mean 'MIE'?"),
            (["--objective", "speed"], "`--objective` must be one of accuracy, nlpd, but got 'speed'"),
            (["--budget", "10%"], "`--budget` 10% is below the cost of the first exit: it must lie in 19.3% to 100%"),
            (["--budget", "50%", "--budget", "101%"], "`--budget` 101% is above the cost of the last exit"),
            (["--budget", "5ms"], "has no times yet: run `exitwise bench"),
            (["--budget", "much"], "`--budget` must be like 2e7, 50% or 12ms, but got 'much'"),
            (["--score", "variance", "--method", VANILLA], "needs draws"),
            (["--score", "variance", "--method", "PoE Laplace"], "needs draws"),
            (["--score", "variance"], "needs draws"),
            (["--certify", "1"], "`--certify` must be a number between 0 and 1, but got 1"),
            (["--certify", "-0.05"], "`--certify`"),
            (["--certify", "nan"], "`--certify`"),
        ],
    )
    def test_bad_input_is_one_line(self, run: Path, exitwise: Command, arguments: list[str], message: str) -> None:
        before = contents(run)
        done = exitwise("policies", run, *arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert message in done.err
        assert contents(run) == before

    def test_budgets_of_different_units(self, run: Path, exitwise: Command) -> None:
        write_json(run / "bench.json", {"costs": {"unit": "ms", "values": [1.0, 2.0, 6.0]}})
        found = exitwise(
            "policies", run, "--budget", "3ms", "--budget", "50%", "--method", "T_opt", "--repeats", 2, "--json"
        )
        assert found.json["unit"] == "ms"
        assert [row["budget"] for row in found.json["rows"]] == [3] * 6  # both are the same
        mixed = exitwise("policies", run, "--budget", "3ms", "--budget", "2e6")
        assert (mixed.status, mixed.err.count("\n")) == (2, 1)
        assert "2e6 is in MACs, but the costs of this run are in ms" in mixed.err

    def test_a_trace_without_a_test_split(self, trace: ew.Trace, tmp_path: Path, exitwise: Command) -> None:
        run = make_run(tmp_path / "run", replace(trace, test=None))
        done = exitwise("policies", run)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert "has no test split to compare on" in done.err
        assert exitwise("policies", tmp_path / "nowhere").status == 2


@pytest.fixture(scope="module")
def zoo_rows(tmp_path_factory: pytest.TempPathFactory) -> list[PolicyRow]:
    """Comparison at twenty budgets."""
    run = Run(zoo_run(tmp_path_factory.mktemp("zoo") / "run"))
    trace = run.trace()
    methods = tuple(get_method(name) for name in (VANILLA, OURS))
    asked = Comparison(tuple(evenly_spaced_budgets(trace.costs, 20)), methods, certify=None, repeats=200)
    return list(asked.run(run, trace, trace.costs))


@pytest.mark.slow
class TestZoo:
    """On the shipped net: 5,000 validation and 10,000 test samples."""

    def test_every_budget_is_kept_and_by_the_family_spent(self, zoo_rows: list[PolicyRow]) -> None:
        assert len(zoo_rows) == 2 * (20 * 5)
        for row in zoo_rows:
            assert row.val_cost <= row.budget
            if row.strategy == "geometric":
                assert row.val_cost == pytest.approx(row.budget, rel=0.005)

    def test_auto_is_nowhere_worse_than_the_public_rule(self, zoo_rows: list[PolicyRow]) -> None:
        found = [row for row in zoo_rows if row.strategy == "auto"]
        assert len(found) == 40
        for row in found:
            assert row.intervals["gain"][1] >= 0, row
        assert np.mean([row.gain for row in found]) > 0
