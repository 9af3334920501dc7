"""The report's data: compare every number with the library's functions or with a loop, and check what is refused."""

import csv
import json
import re
import shlex
import shutil
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import unescape
from io import BytesIO, StringIO
from itertools import product
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace
from command import Command, contents, new_run, perform, with_paper_method, zoo_run
from image_files import write_cifar
from oracles import calibration_error
from PIL import Image

import exitwise as ew
from exitwise import data, models, zoo
from exitwise.calibration.methods import METHODS, OURS, VANILLA
from exitwise.calibration.overhead import cost_table
from exitwise.calibration.tuning import Tuner
from exitwise.core.files import write_json
from exitwise.evaluation.paper_tables import DECISIONS, OUR_MODEL, Table, TableRow, make_paper_tables
from exitwise.policies.policy import sweep
from exitwise.report import budget_explorer, build, images, live, page, uncertainty
from exitwise.report.build import Report, ReportOptions, build_report, training_report
from exitwise.runs.run import Run
from exitwise.training.history import EpochRecord, History

pytestmark = pytest.mark.numerical

# Not the defaults, so that saved calibrations differ from new ones.
SETTINGS: dict[str, Any] = {"samples": 7, "seed": 3, "mode": "exact"}
MS = ew.Costs((2.0, 3.0, 7.3), "ms")
THRESHOLDS = (0.5, 0.5, float("-inf"))


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


@cache
def predict_cached(cal: ew.Calibration, split: Any) -> Any:
    return cal.predict(split)


def get_test(trace: ew.Trace) -> Any:
    assert trace.test is not None
    return trace.test


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run, its trace and its report, and the calibrations of both models as the library computes them."""

    path: Path
    trace: ew.Trace
    report: Report
    cals: dict[str, ew.Calibration]

    @property
    def data(self) -> dict[str, Any]:
        return self.report.data

    @property
    def labels(self) -> list[int]:
        labels: list[int] = get_test(self.trace).labels.tolist()
        return labels

    def predictions(self, model: str) -> tuple[np.ndarray, list[list[int]], np.ndarray]:
        """Return probabilities (K, n, c), predicted classes (K, n) and confidences (K, n) of the test samples."""
        preds = predict_cached(self.cals[model], get_test(self.trace))
        probs = np.stack([exit.probs for exit in preds.exits()])
        return probs, preds.predicted.tolist(), probs.max(axis=2)

    def at(self, model: str, budget: float, costs: ew.Costs | None = None) -> tuple[ew.Policy, Any, list[int]]:
        """Return the policy for a budget, its evaluation and the exits taken, computed with the public functions."""
        cal, costs = self.cals[model], costs or self.trace.costs
        preds = predict_cached(cal, get_test(self.trace))
        policy = ew.fit_policy(predict_cached(cal, self.trace.val), self.trace.val.labels, costs, budget=budget)
        return policy, ew.evaluate(preds, labels=self.labels, policy=policy, costs=costs), policy.exits(preds).tolist()


def write_flat_cifar(root: Path, labels: Sequence[int]) -> np.ndarray:
    """Write a CIFAR-100 whose test images have one color each, and return the colors (n, 3); JPEG preserves them."""
    write_cifar(root)
    colors = np.random.default_rng(5).integers(0, 256, (len(labels), 3), dtype=np.uint8)
    records = np.column_stack([np.zeros(len(labels), np.uint8), labels, np.repeat(colors, 1024, axis=1)])
    records.astype(np.uint8).tofile(root / "cifar-100-binary" / "test.bin")
    return colors


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ReportedRun:
    """Report on a run with three exits, five classes, 600 samples, images, times, and all twelve calibrations."""
    place = tmp_path_factory.mktemp("report")
    trace = random_trace(n=600)
    test = replace(get_test(trace), index=torch.arange(600).flip(0))
    trace = replace(trace, val=trace.val.take(torch.arange(250)), test=test, classes=None)
    write_flat_cifar(place / "data", test.labels.flip(0).tolist())
    run = new_run(place / "run", trace, name="cifar100", root=str(place / "data"), image_size=32)
    data.HoldOut.random(data.load("cifar100", place / "data")[0], 10, 0).save(run / "split.safetensors")
    write_json(run / "bench.json", {"costs": {"values": list(MS.values)}})
    cals = {name: ew.calibrate(trace, name, **SETTINGS) for name in METHODS}
    for cal in cals.values():
        cal.save(run / "calibrations" / f"{cal.method.slug}.safetensors")
    return ReportedRun(
        run, trace, build_report(Run(run), ReportOptions(method=OURS)), {"vanilla": cals[VANILLA], "ours": cals[OURS]}
    )


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> ReportedRun:
    """Report on the zoo's net, which has no saved calibration."""
    run = zoo_run(tmp_path_factory.mktemp("zoo") / "run")
    report = build_report(Run(run), ReportOptions(method=OURS, budget=2e7))
    trace = ew.Trace.load(run / "trace.safetensors")
    return ReportedRun(run, trace, report, {"vanilla": ew.calibrate(trace, VANILLA), "ours": ew.calibrate(trace, OURS)})


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and collect a run with the command, and write its report."""
    place = tmp_path_factory.mktemp("digits") / "run"
    for arguments in (
        ["train", "--data", "digits", "--epochs", "1", "--out"],
        ["collect"],
        ["report", "--method", OURS],
    ):
        perform(*arguments, str(place))
    return place


@pytest.fixture
def run(small: ReportedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the small run, so that a test may change it, and use fewer steps of the slider."""
    monkeypatch.setattr(budget_explorer, "SLIDER_STEPS", 3)
    return Path(shutil.copytree(small.path, tmp_path / "run"))


@dataclass(frozen=True)
class PageText:
    """A page as text."""

    text: str

    @property
    def data(self) -> Any:
        [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', self.text, re.DOTALL)
        return json.loads(text)

    @property
    def refreshes(self) -> bool:
        return '<meta http-equiv="refresh"' in self.text

    @property
    def sheet(self) -> tuple[str, bytes]:
        """Kind and content of the only image in the page."""
        [(kind, text)] = re.findall(r'url\("data:image/(\w+);base64,([^"]*)"\)', self.text)
        return kind, b64decode(text, validate=True)


def read(file: Path) -> PageText:
    return PageText(file.read_text(encoding="utf-8"))


def chosen(report: Report) -> list[tuple[str, float]]:
    return [(e["unit"], e["steps"][e["chosen"]]["budget"]) for e in report.data["explorers"]]


class TestEveryBudget:
    def check(
        self, made: ReportedRun, slider: dict[str, Any], costs: ew.Costs, model: str, steps: Sequence[int]
    ) -> None:
        for i in steps:
            found = slider["steps"][i]
            policy, result, exits = made.at(model, found["budget"], costs)
            expected = {k: v for k, v in result.to_dict().items() if k not in ("per_exit", "unit", "samples")}
            expected |= {"thresholds": policy.to_dict()["thresholds"], "val_cost": policy.cost}
            expected["strategy"] = policy.fit.chosen if policy.fit else None
            rest = {key: value for key, value in found[model].items() if key not in expected}
            assert {key: found[model][key] for key in expected} == expected
            assert rest.keys() == {"intervals", "exited", "reliability"}
            points = uncertainty.choose_points(len(exits))
            assert slider["exits"][model][i] == "".join(str(exits[position]) for position in points)

    def test_is_the_library_digit_by_digit(self, small: ReportedRun) -> None:
        """The report uses the calibrations that the run has."""
        slider = small.data["explorers"][0]
        self.check(small, slider, small.trace.costs, "ours", range(42))
        self.check(small, slider, small.trace.costs, "vanilla", range(0, 42, 4))

    @pytest.mark.parametrize("model", ["vanilla", "ours"])
    def test_and_in_milliseconds(self, small: ReportedRun, model: str) -> None:
        self.check(small, small.data["explorers"][1], MS, model, [0, 7, 20, 33, 41])

    @pytest.mark.parametrize("model", ["vanilla", "ours"])
    @pytest.mark.slow
    def test_and_for_the_shipped_net_which_the_report_calibrates(self, shipped: ReportedRun, model: str) -> None:
        slider = shipped.data["explorers"][0]
        self.check(shipped, slider, shipped.trace.costs, model, [3, slider["chosen"], 38])

    def test_budgets_go_from_the_first_exit_to_the_last(self, small: ReportedRun) -> None:
        for slider, costs in zip(small.data["explorers"], (small.trace.costs, MS), strict=True):
            budgets = [step["budget"] for step in slider["steps"]]
            assert slider["costs"] == list(costs.values)
            assert len(budgets) == 42
            assert budgets == sorted({*budgets})
            even = [budget for i, budget in enumerate(budgets) if i != slider["chosen"]]
            np.testing.assert_allclose(even, np.linspace(costs.values[0], costs.values[-1], 41), rtol=1e-12)
            assert slider["steps"][0]["ours"]["exit_shares"] == [1, 0, 0]

    @pytest.mark.slow
    def test_another_method_and_a_product_of_experts(self, run: Path, small: ReportedRun) -> None:
        report = build_report(Run(run), ReportOptions(method="poe t_opt", budget=2.5e6))
        cal = ew.calibrate(small.trace, "PoE T_opt")
        made = ReportedRun(run, small.trace, report, {**small.cals, "ours": cal})
        assert report.data["method"] == "PoE T_opt"
        self.check(made, report.data["explorers"][0], small.trace.costs, "ours", range(4))

    @pytest.mark.slow
    def test_methods_that_are_only_compared_are_tuned_on_few_samples(
        self, run: Path, small: ReportedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The reported method is tuned on all samples, and all predict all samples."""
        few, seen = Tuner(small.trace).on_at_most(100), []
        assert len(few.trace.val) == 100
        assert Tuner(small.trace).on_at_most(250).trace is small.trace
        make = build.make_paper_tables
        monkeypatch.setattr(build, "COMPARED_SAMPLES", 100)
        monkeypatch.setattr(build, "make_paper_tables", lambda *a, **k: seen.append(make(*a, **k)) or seen[-1])
        shutil.rmtree(run / "calibrations")
        report = build_report(Run(run), ReportOptions(method="MIE T_opt"))
        [tables] = seen
        for name, tuner in (("MIE T_opt", Tuner(small.trace)), ("T_opt", few), (OURS, few)):
            assert tables.calibrations[name].temperatures == tuner.calibrate(name).temperatures
        assert {len(preds.predicted[0]) for preds in tables.val_preds.values()} == {250}
        assert dict(report.data["provenance"])["other methods"].startswith("tuned on 100 of the validation samples")

    @pytest.mark.slow
    def test_a_saved_calibration_is_taken_as_it_is(self, run: Path, small: ReportedRun) -> None:
        """The report uses even an unusual one; methods without a saved calibration are calibrated with its settings."""
        odd = replace(small.cals["ours"], exits=tuple(replace(e, temperature=3.0) for e in small.cals["ours"].exits))
        shutil.rmtree(run / "calibrations")
        odd.save(run / "calibrations" / f"{odd.method.slug}.safetensors")
        report = build_report(Run(run), ReportOptions(method=OURS))
        made = ReportedRun(run, small.trace, report, {**small.cals, "ours": odd})
        self.check(made, report.data["explorers"][0], small.trace.costs, "ours", range(4))
        assert dict(report.data["provenance"])["temperatures"] == "3, 3, 3"
        assert report.data["tables"][0]["rows"][:-1] == small.data["tables"][0]["rows"][:-1]
        assert report.data["tables"][0]["rows"][-1] != small.data["tables"][0]["rows"][-1]

    @pytest.mark.slow
    def test_the_default_method_is_that_of_the_chosen_classifier(self, run: Path, exitwise: Command) -> None:
        chosen_by_auto = ew.calibrate(ew.Trace.load(run / "trace.safetensors")).method.name
        for evaluated, expected in (("MIE T_opt", "MIE T_opt"), (VANILLA, chosen_by_auto)):
            done = exitwise("evaluate", run, "--budget", "70%", "--method", evaluated)
            assert done.status == 0, done.err
            assert build_report(Run(run), ReportOptions()).data["method"] == expected

    def test_vanilla_is_beside_a_method_and_not_one(self, run: Path) -> None:
        with pytest.raises(ew.InputError, match=r"`method` must not be 'MSDNet \(vanilla\)'"):
            build_report(Run(run), ReportOptions(method=VANILLA))


class TestWhichBudget:
    @pytest.mark.slow
    def test_half_may_be_less_than_the_first_exit_costs(self, run: Path) -> None:
        write_json(run / "bench.json", {"costs": {"values": [3.0, 3.5, 4.0]}})
        assert chosen(build_report(Run(run), ReportOptions()))[1] == ("ms", 3.0)

    @pytest.mark.parametrize(
        ("kept", "order", "expected"),
        [
            (None, ReportOptions(), ("MACs", None)),
            (ew.Policy(THRESHOLDS, budget=2e6), ReportOptions(), ("MACs", 2e6)),
            (ew.Policy(THRESHOLDS, unit="ms", budget=4.2), ReportOptions(), ("ms", 4.2)),
            (ew.Policy(THRESHOLDS), ReportOptions(), ("MACs", None)),
            (ew.Policy(THRESHOLDS, budget=2e6), ReportOptions(budget=5.0, unit="ms"), ("ms", 5.0)),
            (None, ReportOptions(budget=4e6), ("MACs", 4e6)),
        ],
    )
    @pytest.mark.slow_after_first
    def test_that_of_the_order_or_of_the_runs_policy_comes_first(
        self,
        run: Path,
        small: ReportedRun,
        kept: ew.Policy | None,
        order: ReportOptions,
        expected: tuple[str, float | None],
    ) -> None:
        """The slider of the other unit opens at the same share of the last exit's cost."""
        if kept is not None:
            kept.save(run / "policy.json")
        last = {"MACs": small.trace.costs.values[-1], "ms": 7.3}
        unit, budget = expected
        share = 0.5 if budget is None else budget / last[unit]
        found = chosen(build_report(Run(run), order))
        assert found[0] == (unit, last[unit] / 2 if budget is None else budget)
        other = "ms" if unit == "MACs" else "MACs"
        assert found[1] == (other, pytest.approx(share * last[other]))

    @pytest.mark.slow
    def test_a_guarantee_is_told(self, run: Path, small: ReportedRun, exitwise: Command) -> None:
        assert small.data["guarantee"] is None
        exitwise("evaluate", run, "--budget", "70%", "--certify", "0.2")
        report = build_report(Run(run), ReportOptions())
        assert chosen(report)[0] == ("MACs", pytest.approx(0.7 * small.trace.costs.values[-1]))
        assert "Certified on 125 held-out samples" in report.data["guarantee"]

    def test_a_unit_that_the_run_does_not_know_is_refused(self, run: Path) -> None:
        (run / "bench.json").unlink()
        with pytest.raises(ew.InputError, match="ms"):
            build_report(Run(run), ReportOptions(budget=3.0, unit="ms"))


class TestSamples:
    @pytest.mark.slow_after_first
    @pytest.mark.parametrize("name", ["small", "shipped"])
    def test_who_leaves_where_and_how_sure(self, name: str, request: pytest.FixtureRequest) -> None:
        made: ReportedRun = request.getfixturevalue(name)
        steps, labels, last = made.data["explorers"][0]["steps"], made.labels, made.trace.num_exits - 1
        for step in (steps[12], steps[30]):
            taken: dict[str, list[int]] = {}
            correct: dict[str, list[bool]] = {}
            for model in ("vanilla", "ours"):
                _, predicted, confidences = made.predictions(model)
                _, result, taken[model] = made.at(model, step["budget"])
                exited = [Counter[str]() for _ in range(last + 1)]
                bins: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
                correct[model] = [predicted[k][n] == labels[n] for n, k in enumerate(taken[model])]
                for n, k in enumerate(taken[model]):
                    exited[k]["correct" if correct[model][n] else "wrong"] += 1
                    exited[k]["avoidable"] += not correct[model][n] and predicted[last][n] == labels[n]
                    confidence = float(confidences[k, n])
                    bins[min(int(np.float32(confidence) * np.float32(10)), 9)].append((confidence, correct[model][n]))
                names = ("correct", "wrong", "avoidable")
                assert step[model]["exited"] == [{key: counts[key] for key in names} for counts in exited]
                assert sum(counts["correct"] + counts["wrong"] for counts in step[model]["exited"]) == len(labels)
                found, gap = step[model]["reliability"], 0.0
                assert found["count"] == list(map(len, bins))
                for here, *means in zip(bins, found["confidence"], found["accuracy"], strict=True):
                    assert means == ([None, None] if not here else pytest.approx(np.mean(here, axis=0), abs=6e-7))
                    gap += len(here) * abs(means[0] - means[1]) if here else 0
                assert gap / len(labels) == pytest.approx(result.ece, abs=2e-6)
            sides = (("saved", "vanilla", "ours"), ("lost", "ours", "vanilla"))
            for kind, hasty, patient in sides:
                which = [
                    correct[patient][n] and not correct[hasty][n] and taken[hasty][n] < taken[patient][n]
                    for n in range(len(labels))
                ]
                shown = [place for place, n in enumerate(uncertainty.choose_points(len(labels))) if which[n]]
                assert step[kind] == {"samples": sum(which), "points": shown[: budget_explorer.GALLERY_SIZE]}

    @pytest.mark.parametrize("model", ["vanilla", "ours"])
    def test_uncertainty_and_error_of_every_exit(self, small: ReportedRun, model: str) -> None:
        probs, predicted, _ = small.predictions(model)
        max_entropy = log(5)
        for k, found in enumerate(small.data["uncertainty"][model]):
            density, categories = np.zeros((36, 27), int), Counter({"easy": 0, "hard": 0, "tricky": 0})
            histograms = {name: [0] * 30 for name in ("high_error", "correct", "wrong")}
            for n, label in enumerate(small.labels):
                p = probs[k, n].astype(np.float64)
                entropy, error = float(-(p * np.log(p)).sum()), 1 - float(p[label])
                place = min(int(entropy / max_entropy * 30), 29)
                density[min(int(entropy / max_entropy * 36), 35), min(int(error * 27), 26)] += 1
                histograms["correct" if predicted[k][n] == label else "wrong"][place] += 1
                if error > 0.5:
                    histograms["high_error"][place] += 1
                    categories["tricky" if entropy < max_entropy / 2 else "hard"] += 1
                elif entropy < max_entropy / 2:
                    categories["easy"] += 1
            assert found["density"] == density.tolist()
            assert {name: found[name] for name in histograms} == histograms
            assert found["high_error_share"] == sum(histograms["high_error"]) / 600
            assert found["categories"] == categories
            result = small.at(model, small.trace.costs.values[-1])[1]
            assert found["metrics"] == result.per_exit[k].to_dict()
            assert sum(found["reliability"]["count"]) == 600

    @pytest.mark.slow
    def test_the_galleries_hold_the_plainest_of_their_kind(self, shipped: ReportedRun) -> None:
        points = shipped.data["points"]
        positions = points["index"]  # in the test set, which has its original order
        p = shipped.predictions("ours")[0][-1][positions].astype(np.float64)
        entropy = -(p * np.log(p)).sum(axis=1) / log(100)
        error = 1 - p[np.arange(len(p)), points["label"]]
        of_kind = {
            "easy": ((entropy < 0.5) & (error <= 0.5), -entropy - error),
            "hard": ((entropy >= 0.5) & (error > 0.5), entropy + error),
            "tricky": ((entropy < 0.5) & (error > 0.5), error - entropy),
        }
        assert list(shipped.data["galleries"]) == list(of_kind)
        for name, (which, extremeness) in of_kind.items():
            shown = shipped.data["galleries"][name]
            best = sorted(np.flatnonzero(which), key=lambda i: -extremeness[i])[: budget_explorer.GALLERY_SIZE]
            assert len({*shown}) == budget_explorer.GALLERY_SIZE
            assert which[shown].all()
            np.testing.assert_allclose(extremeness[shown], extremeness[best], atol=1e-5)

    @pytest.mark.slow_after_first
    @pytest.mark.parametrize("name", ["small", "shipped"])
    def test_points_say_what_every_exit_says(self, name: str, request: pytest.FixtureRequest) -> None:
        made: ReportedRun = request.getfixturevalue(name)
        points, test = made.data["points"], get_test(made.trace)
        positions = uncertainty.choose_points(len(test))
        assert points["index"] == test.index[positions].tolist()
        assert points["label"] == test.labels[positions].tolist()
        for model in ("vanilla", "ours"):
            probs, predicted, confidence = made.predictions(model)
            p = probs[:, positions].astype(np.float64)
            true = p[:, np.arange(len(positions)), points["label"]]
            entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=2)
            exact = {"entropy": entropy, "error": 1 - true, "confidence": confidence[:, positions]}
            for key, values in exact.items():
                assert np.abs(np.array(points[model][key]) - 1000 * values).max() < 0.501, key
            assert points[model]["predicted"] == np.array(predicted)[:, positions].tolist()

    def test_at_most_two_thousand_points_in_their_order_and_always_the_same(self) -> None:
        assert uncertainty.choose_points(2000).tolist() == list(range(2000))
        for samples in (2001, 10_000):
            found = uncertainty.choose_points(samples).tolist()
            assert (len({*found}), found) == (2000, sorted(found))
            assert 0 <= found[0] < found[-1] < samples
            assert uncertainty.choose_points(samples).tolist() == found

    @pytest.mark.slow
    def test_without_index_and_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(budget_explorer, "SLIDER_STEPS", 3)
        trace = replace(random_trace(n=60), classes=None)
        report = build_report(Run(new_run(tmp_path / "run", trace)), ReportOptions())
        assert report.data["classes"] == ["class 0", "class 1", "class 2", "class 3", "class 4"]
        assert report.data["points"]["index"] == list(range(60))
        assert report.sheet is None
        assert "the trace does not contain the positions of its samples" in report.data["images_note"]
        named = build_report(
            Run(new_run(tmp_path / "named", replace(trace, classes=("<a>", "b", "c", "d", "ë")))), ReportOptions()
        )
        assert named.data["classes"] == ["<a>", "b", "c", "d", "ë"]


class TestIntervals:
    @pytest.mark.slow
    def test_are_those_of_means_and_of_differences_of_pairs(self, shipped: ReportedRun) -> None:
        """Compare with the normal approximation of 10,000 samples; bounds of 1,000 resamples are off by 0.1 sd."""
        steps, labels = shipped.data["explorers"][0]["steps"], np.array(shipped.labels)
        costs = np.asarray(shipped.trace.costs.values)
        for step in (steps[5], steps[20], steps[35]):
            values: dict[str, dict[str, np.ndarray]] = {}
            for model in ("vanilla", "ours"):
                probs, predicted, _ = shipped.predictions(model)
                _, result, exits = shipped.at(model, step["budget"])
                at = (np.array(exits), np.arange(len(labels)))
                right, true = np.array(predicted)[at] == labels, probs[(*at, labels)].astype(np.float64)
                values[model] = {"top1": right * 1.0, "nlpd": -np.log(true), "cost": costs[at[0]]}
                for name, of_samples in values[model].items():
                    low, high = step[model]["intervals"][name]
                    assert low < getattr(result, name) < high
                    self.check((low, high), of_samples)
            for name in values["ours"]:
                self.check(step["change"][name], values["ours"][name] - values["vanilla"][name])

    @pytest.mark.slow_after_first
    @pytest.mark.parametrize("name", ["small", "shipped"])
    def test_hold_what_was_found(self, name: str, request: pytest.FixtureRequest) -> None:
        made: ReportedRun = request.getfixturevalue(name)
        for slider in made.data["explorers"]:
            for step, model in product(slider["steps"], ("vanilla", "ours")):
                for metric, (low, high) in step[model]["intervals"].items():
                    assert low - 1e-5 * abs(low) <= step[model][metric] <= high + 1e-5 * abs(high), (
                        step["budget"],
                        metric,
                    )

    def check(self, interval: Sequence[float], values: np.ndarray) -> None:
        deviation = values.std() / len(values) ** 0.5
        expected = [values.mean() - 1.96 * deviation, values.mean() + 1.96 * deviation]
        assert interval == pytest.approx(expected, abs=0.3 * deviation)

    def test_of_the_calibration_error_too(self, small: ReportedRun) -> None:
        """Compare with other resamples and other code; noise biases the ECE of resamples upward, so center them."""
        rng, labels = np.random.default_rng(9), np.array(small.labels)
        step = small.data["explorers"][0]["steps"][0]
        draws = [rng.integers(0, 600, 600) for _ in range(600)]
        drawn = {}
        for model in ("vanilla", "ours"):
            _, predicted, confidence = small.predictions(model)
            at = (np.array(small.at(model, step["budget"])[2]), np.arange(600))
            held, right = confidence[at], np.array(predicted)[at] == labels
            errors = [calibration_error(held[some].tolist(), right[some].tolist()) for some in draws]
            drawn[model] = np.array(errors) - np.mean(errors) + step[model]["ece"]
        found = (step["vanilla"]["intervals"]["ece"], step["ours"]["intervals"]["ece"], step["change"]["ece"])
        for interval, values in zip(found, (*drawn.values(), drawn["ours"] - drawn["vanilla"]), strict=True):
            expected = np.quantile(values, [0.025, 0.975])
            assert interval == pytest.approx(expected, abs=0.1 * np.ptp(expected))


def tiles(content: bytes, shape: dict[str, int], number: int) -> np.ndarray:
    """Cut images (number, side, side, channels) out of a sheet, from left to right and from top to bottom."""
    whole = np.asarray(Image.open(BytesIO(content)))
    side, columns = shape["side"], shape["columns"]
    assert whole.shape[:2] == (shape["rows"] * side, columns * side)
    places = [divmod(i, columns) for i in range(number)]
    found = [whole[y * side : (y + 1) * side, x * side : (x + 1) * side] for y, x in places]
    return np.stack(found).reshape(number, side, side, -1)


class TestImages:
    @pytest.mark.slow
    def test_of_digits_are_on_the_page_without_loss(self, digits: Path) -> None:
        seen = read(digits / "report.html")
        kind, content = seen.sheet
        index = seen.data["points"]["index"]
        assert (kind, len({*index}), seen.data["images_note"]) == ("png", 500, None)
        pixels = data.load("digits")[0].pixels_of(torch.tensor(index), None, None)
        assert np.array_equal(tiles(content, seen.data["images"], 500)[..., 0], pixels[:, 0].numpy())
        assert seen.data["points"]["label"] == data.load("digits")[0].labels[index].tolist()

    def test_many_are_a_jpeg_with_each_in_its_place(self, small: ReportedRun, tmp_path: Path) -> None:
        """600 images of one color each; neighbors do not bleed into each other."""
        colors = write_flat_cifar(tmp_path, small.labels)
        sheet = small.report.sheet
        assert sheet is not None
        assert sheet.kind == "jpeg"
        found = tiles(sheet.content, small.data["images"], 600).astype(int)
        expected = colors[small.data["points"]["index"]].astype(int)
        assert np.abs(found - expected[:, None, None]).max() <= 4

    @pytest.mark.slow
    def test_of_the_real_data_set(self, shipped: ReportedRun, cifar100: Path) -> None:
        positions = torch.tensor(shipped.data["points"]["index"])
        sheet = images.make_sprite_sheet(Run(shipped.path), cifar100, get_test(shipped.trace), positions)
        assert len(sheet.content) < 3_500_000
        pixels = data.load("cifar100", cifar100)[1].pixels[positions].permute(0, 2, 3, 1).numpy().astype(int)
        found = tiles(sheet.content, sheet.shape, 2000).astype(int)
        assert np.abs(found - pixels).mean(axis=(1, 2, 3)).max() < 16  # every single image
        assert np.abs(found - pixels).mean() < 5
        assert np.abs(found - np.roll(pixels, 1, axis=0)).mean() > 50

    def test_large_ones_are_made_smaller_and_keep_their_shape(
        self, small: ReportedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grain = torch.randint(256, (100, 3, 300, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        index = torch.arange(100)
        loaded = data.ImageSet(grain, get_test(small.trace).labels[:100], index, ("a",) * 5, (0.5,) * 3, (0.5,) * 3)
        monkeypatch.setattr(images, "load_splits", lambda run, root: SimpleNamespace(test=loaded))
        sheet = images.make_sprite_sheet(
            Run(small.path), None, replace(get_test(small.trace), index=torch.arange(600)), index
        )
        assert (sheet.side, sheet.kind) == (96, "jpeg")
        assert len(sheet.content) <= 3_500_000
        assert sheet.pixels[:, :, :, :16].max() == sheet.pixels[:, :, :, 80:].max() == 0
        for y, x in ((0, 0), (31, 63), (95, 40)):  # the mean of the part of the image that a pixel covers
            part = grain[7, 2, y * 300 // 96 : -(-(y + 1) * 300 // 96), x * 200 // 64 : -(-(x + 1) * 200 // 64)]
            assert abs(int(sheet.pixels[7, 2, y, 16 + x]) - float(part.float().mean())) < 0.51

    @pytest.mark.slow
    def test_a_folder_that_is_gone_is_a_note_on_the_page(self, run: Path) -> None:
        about = json.loads((run / "run.json").read_text())
        about["data"]["root"] = "/moved/away"
        write_json(run / "run.json", about)
        report = build_report(Run(run), ReportOptions())
        assert (report.sheet, report.data["images"]) == (None, None)
        note = report.data["images_note"]
        assert "/moved/away" in note
        assert "exitwise report run --root DIR" in note

    def test_of_another_data_set_are_refused(self, small: ReportedRun, tmp_path: Path) -> None:
        run, test, points = Run(small.path), get_test(small.trace), torch.arange(600)
        write_cifar(tmp_path / "train", seed=1)  # other training images
        with pytest.raises(ew.InputError, match="not the dataset that the run was made with"):
            images.make_sprite_sheet(run, tmp_path / "train", test, points)
        write_flat_cifar(tmp_path / "labels", test.labels.tolist())  # the same number, in another order
        with pytest.raises(ew.InputError, match="are not those that the run was created with"):
            images.make_sprite_sheet(run, tmp_path / "labels", test, points)
        write_flat_cifar(tmp_path / "fewer", test.labels.flip(0).tolist()[:-1])
        with pytest.raises(ew.InputError, match="are not those that the run was created with"):
            images.make_sprite_sheet(run, tmp_path / "fewer", test, points)


class TestOtherRuns:
    @pytest.mark.slow
    def test_beside_a_second_one(self, run: Path, tmp_path: Path, small: ReportedRun) -> None:
        """The other run's curves use its own calibration and its own costs."""
        other = random_trace(n=200, widths=(5, 8), seed=40)
        place = new_run(tmp_path / "second", other)
        ew.calibrate(other, "MIE T_opt").save(place / "calibrations" / "mie-t_opt.safetensors")
        single_exit = new_run(tmp_path / "single", random_trace(n=200, widths=(6,), seed=50))
        found = build_report(Run(run), ReportOptions(method="mie t_opt", against=[place, single_exit])).data
        second, single = found["other_runs"]
        assert (second["name"], second["unit"]) == ("second (second)", "MACs")
        assert [curve["name"] for curve in second["curves"]] == [VANILLA, found["method"]]
        for curve, method in zip(second["curves"], (VANILLA, "MIE T_opt"), strict=True):
            cal = ew.calibrate(other, method)
            made = ReportedRun(place, other, small.report, {"ours": cal})
            results = [made.at("ours", float(b))[1] for b in np.linspace(*other.costs.values, 3)[::2]]
            results.sort(key=lambda result: result.cost)
            for name in ("top1", "top5", "nlpd", "ece"):
                assert curve["metrics"][name] == [[result.cost, getattr(result, name)] for result in results]
        assert [len(curve["metrics"]["top1"]) for curve in single["curves"]] == [1, 1]

    def test_that_does_not_fit_is_refused(self, run: Path, tmp_path: Path) -> None:
        trace = random_trace(n=60)
        timed = new_run(tmp_path / "timed", replace(trace, costs=MS))
        with pytest.raises(ew.InputError, match="must be in MACs for a comparison, but are in ms"):
            build_report(Run(run), ReportOptions(against=[timed]))
        untested = new_run(tmp_path / "untested", replace(trace, test=None))
        with pytest.raises(ew.InputError, match="untested has no test split to compare on"):
            build_report(Run(run), ReportOptions(against=[untested]))
        with pytest.raises(ew.InputError, match="untested has no test split to report on"):
            build_report(Run(untested), ReportOptions())
        with pytest.raises(ew.InputError, match="has no times yet"):
            build_report(
                Run(run), ReportOptions(budget=4.0, unit="ms", against=[new_run(tmp_path / "unmeasured", trace)])
            )

    def test_one_exit_has_one_budget(self, tmp_path: Path) -> None:
        trace = random_trace(n=120, widths=(6,))
        found = build_report(Run(new_run(tmp_path / "run", trace)), ReportOptions()).data
        [slider] = found["explorers"]
        [step] = slider["steps"]
        assert (slider["chosen"], step["budget"]) == (0, trace.costs.values[0])
        preds = ew.calibrate(trace, OURS).predict(get_test(trace))
        right = float((preds.predicted[0] == get_test(trace).labels.numpy()).mean())
        assert (step["ours"]["thresholds"], step["ours"]["top1"]) == (["-inf"], right)
        assert slider["exits"]["ours"] == ["0" * 120]
        assert (step["saved"]["samples"], step["lost"]["samples"]) == (0, 0)
        assert [row["method"] for row in found["tables"][0]["rows"]] == list(METHODS)


NAMES = ["</script><script>alert(1)</script>", "<!--<script>", "\"'`${1}&lt;&amp;\\", "🦩\u2028", "كلب", "\ud800 alone"]


class TestPage:
    def test_whatever_classes_are_called_it_is_data(self, small: ReportedRun, tmp_path: Path) -> None:
        hostile = {**small.data, "classes": NAMES, "images_note": NAMES[0]}
        page.write_page(Report(hostile, small.report.sheet), tmp_path / "page.html")
        seen, plain = read(tmp_path / "page.html"), PageText(page.render_page(small.report))
        assert "</script><script>alert" not in seen.text
        assert (seen.data, plain.data) == (hostile, small.data)
        for text in ("<", "</script", "<!--", "alert"):
            assert seen.text.count(text) == plain.text.count(text) + (2 if text == "alert" else 0), text

    @pytest.mark.parametrize("name", ["a</title><b>&amp;", "{{data}}", b"caf\xe9".decode(errors="surrogateescape")])
    def test_whatever_the_run_is_called_it_is_text(self, small: ReportedRun, tmp_path: Path, name: str) -> None:
        named = Report({**small.data, "net": {**small.data["net"], "run": name}})
        page.write_page(named, tmp_path / "page.html")
        seen = read(tmp_path / "page.html")
        assert seen.data == named.data
        [title] = re.findall("<title>(.*?)</title>", seen.text)
        assert unescape(title).startswith(name.encode(errors="replace").decode()[:3])
        assert "<b>" not in title

    def test_it_needs_nothing_from_elsewhere(self, small: ReportedRun) -> None:
        seen = PageText(page.render_page(small.report))
        code = seen.text.replace(json.dumps(small.data, separators=(",", ":")).replace("<", "\\u003c"), "")
        assert len(code) < len(seen.text) / 2
        outside = (
            r"<(?:link|img|iframe|object|embed|base)\b",
            r"<script[^>]*\bsrc\b",
            r"\b(?:src|href)\s*=\s*[\"']?(?:https?:)?//",
            r"url\((?![\"']?(?:data:|#))",
            r"@import|\bimport\(|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon",
        )
        for pattern in outside:
            assert re.search(pattern, code) is None, pattern
        assert len(seen.sheet[1]) > 10_000
        assert not seen.refreshes

    @pytest.mark.slow
    def test_it_can_be_reproduced(
        self, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
    ) -> None:
        """All commands, run in an empty folder, write the same report."""
        self.check_reproduced(digits, tmp_path, monkeypatch, exitwise)

    @pytest.mark.slow
    def test_heads_can_be_reproduced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command) -> None:
        plain, place = tmp_path / "plain", tmp_path / "run"
        same = ("--data", "digits", "--model", "cifar100-resnet8")
        perform("train", *same, "--epochs", "1", "--out", str(plain))
        heads = "--attach stages.0.layer1 --distill 0.5 --epochs 2 --batch-size 100"
        perform("train-heads", *same, "--weights", str(plain / "net.safetensors"), *heads.split(), "--out", str(place))
        perform("collect", str(place))
        perform("report", str(place))
        found = read(place / "report.html").data["training"]
        assert (found["best"], len(found["kept"])) == (None, 2)
        (tmp_path / "again").mkdir()
        self.check_reproduced(place, tmp_path / "again", monkeypatch, exitwise)

    def check_reproduced(self, run: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command) -> None:
        before = read(run / "report.html").data
        monkeypatch.chdir(empty)
        commands = dict(before["provenance"])["reproduce with"].splitlines()
        assert [command.split()[1].removesuffix("-heads") for command in commands] == [
            "train",
            "collect",
            "calibrate",
            "report",
        ]
        for command in commands:
            done = exitwise(*shlex.split(command)[1:])
            assert done.status == 0, done.err
        after = read(empty / "run" / "report.html").data
        for report in (before, after):
            del report["provenance"]
            for epoch in report["training"]["epochs"]:
                del epoch["seconds"], epoch["images_per_second"]
        assert after == before

    @pytest.mark.slow
    def test_it_names_the_run_that_it_is_made_in(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(run)
        found = build_report(Run("."), ReportOptions()).data
        assert found["net"]["run"] == "run"
        assert "exitwise report run " in dict(found["provenance"])["reproduce with"]


class TestCommand:
    def test_writes_the_page_into_the_run(self, run: Path, exitwise: Command) -> None:
        done = exitwise("report", run, "--budget", "5ms", "--method", "mie t_opt")
        assert (done.status, done.err) == (0, "")
        assert str(run / "report.html") in done.out.replace("\n", "")
        found = read(run / "report.html").data
        expected = build_report(Run(run), ReportOptions(method="MIE T_opt", budget=5.0, unit="ms")).data
        assert dict(found.pop("provenance"))["command"] == (
            f"exitwise report {shlex.quote(str(run))} --budget 5ms --method 'mie t_opt'"
        )
        del expected["provenance"]
        assert found == expected

    @pytest.mark.slow
    def test_or_elsewhere_and_says_so_to_machines(self, run: Path, tmp_path: Path, exitwise: Command) -> None:
        before = contents(run)
        done = exitwise("report", run, "--out", tmp_path / "new" / "page.html", "--budget", "60%", "--json")
        assert done.json == {"report": str(tmp_path / "new" / "page.html"), "static": None}
        slider = read(tmp_path / "new" / "page.html").data["explorers"][0]
        assert slider["steps"][slider["chosen"]]["budget"] == 0.6 * slider["costs"][-1]
        assert contents(run) == before

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--out", "."], "`--out` must name a file, but . is a folder"),
            (["--out", "run.json/page.html"], "run.json"),
            (["--budget", "9e9"], "`--budget` 9e9 is above the cost of the last exit"),
            (["--budget", "much"], "must be like 2e7, 50% or 12ms"),
            (["--budget", "1ms"], "2 to 7.3 ms"),
            (["--method", "MEI"], "did you mean 'MIE'?"),
            (["--against", "nowhere"], "nowhere is not a run"),
            (["--root", "nowhere"], "nowhere"),
            (["--live"], "was not made by training"),
        ],
    )
    def test_what_is_refused_leaves_the_page_from_before(
        self, run: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
    ) -> None:
        monkeypatch.chdir(run)
        Path("report.html").write_text("an earlier page")
        before = contents(run)
        done = exitwise("report", run, *arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert message in done.err
        assert contents(run) == before

    def test_no_run_and_no_trace(self, run: Path, tmp_path: Path, exitwise: Command) -> None:
        refused = exitwise("report", tmp_path)
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert "is not a run" in refused.err
        (run / "trace.safetensors").unlink()
        refused = exitwise("report", run)
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert "has no trace yet: run `exitwise collect" in refused.err

    @pytest.mark.slow
    def test_an_interrupt_leaves_the_page_from_before(
        self, run: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(report: Report) -> str:
            raise KeyboardInterrupt

        monkeypatch.setattr(page, "render_page", interrupt)
        (run / "report.html").write_text("an earlier page")
        before = contents(run)
        assert exitwise("report", run).status == 130
        assert contents(run) == before


def epochs(number: int) -> History:
    return History(
        tuple(EpochRecord(k, 0.1, 3.0 / k, 3.5 / k, (0.1 * k, 0.2 * k), 900.0, 1.5) for k in range(1, number + 1))
    )


class TestLive:
    @pytest.fixture
    def training(self, tmp_path: Path) -> Run:
        """A run at the start of a training of three epochs."""
        about = {"recipe": {"epochs": 3}, "seed": 0}
        place = new_run(tmp_path / "training", random_trace(n=60), training=about)
        (place / "trace.safetensors").unlink()
        return Run(place)

    def test_the_page_follows_the_training_and_then_rests(self, training: Run, tmp_path: Path) -> None:
        place = tmp_path / "page.html"
        thread = threading.Thread(
            target=live.rewrite_while_training, args=(training, place, "the command", 0.01), daemon=True
        )
        thread.start()
        for number in range(3):
            if number:
                epochs(number).save(training.directory / "history.csv")
            wait_for(lambda number=number: place.is_file() and len(read(place).data["training"]["epochs"]) == number)
            seen = read(place)
            assert (seen.refreshes, seen.data["live"], seen.data["training"]["of"]) == (True, True, 3)
            assert thread.is_alive()
        before = place.stat().st_mtime_ns
        time.sleep(0.1)
        assert place.stat().st_mtime_ns == before  # nothing new, so nothing is written
        epochs(3).save(training.directory / "history.csv")
        thread.join(timeout=300)
        assert not thread.is_alive()
        seen = read(place)
        assert (seen.refreshes, seen.data["live"], seen.data["training"]["best"]) == (False, False, 3)
        assert [epoch["train_loss"] for epoch in seen.data["training"]["epochs"]] == [3.0, 1.5, 1.0]
        assert dict(seen.data["provenance"])["command"] == "the command"

    def test_an_interrupt_leaves_a_page_that_rests(
        self, training: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(seconds: float) -> None:
            assert read(tmp_path / "page.html").refreshes
            raise KeyboardInterrupt

        epochs(1).save(training.directory / "history.csv")
        monkeypatch.setattr(live.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            live.rewrite_while_training(training, tmp_path / "page.html", "")
        seen = read(tmp_path / "page.html")
        assert (seen.refreshes, len(seen.data["training"]["epochs"])) == (False, 1)

    @pytest.mark.slow
    def test_a_training_that_is_over_goes_on_to_the_whole_report(self, digits: Path, exitwise: Command) -> None:
        before = read(digits / "report.html").data
        done = exitwise("report", digits, "--live", "--out", digits.parent / "live.html")
        assert done.status == 0, done.err
        seen = read(digits.parent / "live.html")
        assert not seen.refreshes
        assert {**seen.data, "provenance": None} == {**before, "provenance": None}

    def test_a_run_without_a_trace_shows_its_training(self, training: Run, exitwise: Command) -> None:
        epochs(2).save(training.directory / "history.csv")
        diverged = (training.directory / "history.csv").read_text().replace("1.75", "nan")
        (training.directory / "history.csv").write_text(diverged)
        done = exitwise("report", training.directory)
        assert done.status == 0, done.err
        assert "exitwise collect" in done.out
        seen = read(training.directory / "report.html")
        assert seen.data == {**training_report(training, live=False).data, "provenance": seen.data["provenance"]}
        assert [epoch["val_loss"] for epoch in seen.data["training"]["epochs"]] == [3.5, None]
        assert not seen.refreshes


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def decided(trace: ew.Trace) -> Table:
    return ew.decision_experiment(trace, **SETTINGS)


class TestTables:
    def test_csv_and_latex_say_what_the_rows_say(self) -> None:
        first = TableRow(VANILLA, 0.5, 0.75, 1.5, 0.125, {"top1": 0.0, "top5": 0.0, "nlpd": 0.0, "ece": 0.0})
        change = {"top1": 0.0123456789, "top5": -0.005, "nlpd": -0.25, "ece": 0.0004}
        table = Table((first, TableRow(OURS, 0.5123456789, 0.745, 1.25, 0.1254, change)), (1.0, 2.0), "MACs")
        assert table.to_csv() == (
            "method,top1,top5,nlpd,ece,top1_change,top5_change,nlpd_change,ece_change\n"
            "MSDNet (vanilla),0.5,0.75,1.5,0.125,0,0,0,0\n"
            "MIE Laplace T_opt sigma_opt,0.512346,0.745,1.25,0.1254,0.0123457,-0.005,-0.25,0.0004\n"
        )
        small = r"{\scriptsize $%s$}"
        numbers = {"51.23": "+1.23", "74.50": "-0.50", "1.250": "-0.250", "0.125": "+0.000"}
        cells = " & ".join(f"{value} {small % change}" for value, change in numbers.items())
        assert table.to_latex().splitlines() == [
            r"\begin{tabular}{lrrrr}",
            r"\toprule",
            r" & Top-1 & Top-5 & NLPD & ECE \\",
            r"\midrule",
            r"MSDNet (vanilla) & 50.00 & 75.00 & 1.500 & 0.125 \\",
            rf"MIE Laplace $T_\mathrm{{opt}}$ $\sigma_\mathrm{{opt}}$ & {cells} \\",
            r"\bottomrule",
            r"\end{tabular}",
        ]

    def test_on_the_page_they_are_those_of_the_library(self, small: ReportedRun) -> None:
        ablation, decisions = small.data["tables"]
        for table, rows in ((ablation, ew.ablation(small.trace, **SETTINGS)), (decisions, decided(small.trace))):
            assert (table["range"], table["unit"]) == ([1e6, small.trace.costs.values[-1]], "MACs")
            assert (table["csv"], table["latex"]) == (rows.to_csv(), rows.to_latex())
            for mine, row in zip(table["rows"], rows, strict=True):
                assert mine["metrics"] == {name: getattr(row, name) for name in ("top1", "top5", "nlpd", "ece")}
                assert (mine["method"], mine["change"], mine["published"]) == (row.method, row.change, None)
            parsed = csv.DictReader(StringIO(table["csv"]))
            assert [row["method"] for row in parsed] == [row["method"] for row in table["rows"]]  # commas and all
            assert not set("_%#^~") & set(re.sub(r"\$[^$]*\$", "", table["latex"]))

    def test_calibrations_that_exist_are_taken_as_they_are(self, small: ReportedRun) -> None:
        saved = small.cals["ours"]
        found = make_paper_tables(small.trace, Tuner(small.trace), methods=[VANILLA], calibrations={OURS: saved})
        assert found.calibrations[OURS] is saved
        assert found.calibrations[VANILLA] is not small.cals["vanilla"]
        ours = small.data["tables"][1]["rows"][-1]
        assert found.decisions[OUR_MODEL].nlpd == ours["metrics"]["nlpd"]
        assert (
            make_paper_tables(small.trace, Tuner(small.trace), methods=[VANILLA]).decisions[OUR_MODEL].nlpd
            != ours["metrics"]["nlpd"]
        )

    def test_curves_are_the_papers_sweep(self, small: ReportedRun) -> None:
        assert [curve["name"] for curve in small.data["curves"]] == list(METHODS)
        test, costs = get_test(small.trace), small.trace.costs
        preds = {model: cal.predict(test) for model, cal in small.cals.items()}
        policies = sweep(small.cals["ours"].predict(small.trace.val), costs=costs)
        curves = {curve["name"]: curve["metrics"] for curve in small.data["decisions"]}
        assert list(curves) == [VANILLA, DECISIONS, OUR_MODEL]
        assert curves[OUR_MODEL] == small.data["curves"][-1]["metrics"]
        for name, model in ((OUR_MODEL, "ours"), (DECISIONS, "vanilla")):
            results = [
                ew.evaluate(preds[model], labels=test.labels, policy=p, costs=costs, decide_with=preds["ours"])
                for p in policies
            ]
            assert curves[name]["nlpd"] == sorted(
                ([result.cost, result.nlpd] for result in results), key=lambda point: point[0]
            )

    @pytest.mark.slow
    def test_published_are_those_of_the_net(self, shipped: ReportedRun, small: ReportedRun) -> None:
        assert zoo.place("cifar100-small") == ("CIFAR-100", "small")
        assert zoo.place("caltech256-large") == ("Caltech-256", "large")
        for preset in ("", "tiny-8", "cifar100-resnet14", "small", "cifar100-"):
            assert (zoo.place(preset), zoo.published_rows("ablation", preset)) == (None, None)
        rows = zoo.published_rows("ablation", "cifar100-small")
        assert rows is not None
        assert rows[VANILLA] == pytest.approx({"top1": 0.6925, "top5": 0.9048, "nlpd": 1.498, "ece": 0.182})
        for table in shipped.data["tables"]:
            own = [
                row for row in zoo.published(table["name"]) if (row["dataset"], row["size"]) == ("CIFAR-100", "small")
            ]
            assert [row["method"] for row in table["rows"]] == [row["method"] for row in own]
            for mine, row in zip(table["rows"], own, strict=True):
                for name, factor in {"top1": 100, "top5": 100, "nlpd": 1, "ece": 1}.items():
                    assert mine["published"][name] * factor == pytest.approx(float(row[name]))
                    moved = float(row[name]) - float(own[0][name])
                    assert mine["published_change"][name] * factor == pytest.approx(moved, abs=1e-9)

    @pytest.mark.slow
    def test_published_curves_are_of_the_nets_data_set(self, shipped: ReportedRun, small: ReportedRun) -> None:
        curves = shipped.data["published"]
        assert small.data["published"] == []
        found = [
            (curve["model"], curve["own"], metric, cost, round(value * (100 if metric in ("top1", "top5") else 1), 3))
            for curve in curves
            for metric, points in curve["metrics"].items()
            for cost, value in points
        ]
        expected = [
            (row["model"], row["size"] == "small", row["metric"], float(row["flops"]), round(float(row["value"]), 3))
            for row in zoo.published("budget_curves")
            if (row["dataset"], row["kind"]) == ("CIFAR-100", "measured")
        ]
        assert sorted(found) == sorted(expected)
        own = [curve["own"] for curve in curves]
        assert own == sorted(own, reverse=True)
        assert {*own} == {True, False}

    @pytest.mark.slow
    def test_what_laplace_costs(self, shipped: ReportedRun) -> None:
        ours, *paper = shipped.data["laplace_costs"]
        rows = cost_table(models.msdnet("cifar100-small"), (3, 32, 32))
        assert ours["vanilla"] == [row.vanilla for row in rows]
        assert ours["efficient"] == [row.laplace for row in rows]
        assert ours["naive"] == pytest.approx([row.naive_laplace for row in rows], rel=1e-12)
        assert len(paper) == 9
        bars = sum(len(bar[kind]) for bar in paper for kind in ("vanilla", "efficient", "naive"))
        assert bars == len(zoo.published("laplace_cost"))
