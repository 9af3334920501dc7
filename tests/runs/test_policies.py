"""Budgets, guarantees and controllers on the command line: evaluate, then predict and export what was evaluated."""

import csv
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classifier_cases import SHAPE, pictures, tiny
from command import Command, contents, with_paper_method
from PIL import Image

import exitwise as ew
from exitwise.calibration.methods import OURS, VANILLA
from exitwise.core.files import write_json
from exitwise.runs.run import run_metadata

pytestmark = pytest.mark.numerical

DIGITS = ew.Preprocessing(8, (0.3053,), (0.3760,))  # what a run on digits does to a picture's bytes


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny net, as if it had been trained on digits."""
    place = tmp_path_factory.mktemp("policies") / "run"
    place.mkdir()
    net, known = tiny()
    images, labels = pictures(500, SHAPE, 10, 1)
    with torch.no_grad():  # last layers by ridge regression: another processor finds the same
        for head, x in zip(net.exits, net.features(images), strict=True):
            phi = torch.cat([x, torch.ones(500, 1)], dim=1).double()
            target = 10 * torch.nn.functional.one_hot(labels, 10).double()
            solution = torch.linalg.solve(phi.T @ phi + 0.1 * torch.eye(phi.shape[1]), phi.T @ target).T.float()
            head.last.weight.copy_(solution[:, :-1])
            head.last.bias.copy_(solution[:, -1])

    def split(n: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
        return [(*pictures(n, SHAPE, 10, seed), torch.arange(n) * 3 + seed)]

    classes = [f"digit {k}" for k in range(10)]
    trace = ew.collect(net, [(images, labels)], split(1201, 2), split(700, 3), costs=known.costs, classes=classes)
    trace.save(place / "trace.safetensors")
    ew.save_checkpoint(net, place / "net.safetensors")
    write_json(
        place / "run.json", run_metadata({"preset": "tiny-8"}, {"name": "digits", "root": None, "image_size": 8})
    )
    for method in (VANILLA, OURS):
        made = ew.calibrate(trace, method)
        made.save(place / "calibrations" / f"{made.method.slug}.safetensors")
    return place


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to do things to."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def trace(made: Path) -> ew.Trace:
    return ew.Trace.load(made / "trace.safetensors")


@cache
def calibrated(trace: ew.Trace, method: str = OURS, hold: float | None = None) -> tuple[ew.Calibration, Any, Any]:
    """On all validation samples, or on those that a share leaves; with these and those held out."""
    tune, held = (trace, None) if hold is None else trace.hold_out(hold, 0)
    return ew.calibrate(tune, method), tune.val, held


def certified(
    trace: ew.Trace, share: float, certificate: ew.Certificate, method: str = OURS, **options: Any
) -> tuple[ew.Policy, ew.Calibration]:
    """A policy for a share of the last exit's cost, and what it was calibrated to, by the library alone."""
    cal, val, hold = calibrated(trace, method, certificate.hold)
    policy = ew.fit_policy(
        cal.predict(val),
        val.labels,
        trace.costs,
        budget=share * trace.costs.values[-1],
        certify=certificate,
        hold=cal.predict(hold),
        hold_labels=hold.labels,
        **options,
    )
    assert policy.guarantee is not None
    return replace(policy, guarantee=replace(policy.guarantee, seed=certificate.seed)), cal


def plain(data: Any) -> Any:
    return json.loads(json.dumps(data))


class TestCertified:
    def test_evaluate_is_the_library(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        done = exitwise("evaluate", run, "--budget", "50%", "--certify", "0.05", "--json")
        assert done.status == 0, done.err
        assert trace.test is not None
        for method in (VANILLA, OURS):
            policy, cal = certified(trace, 0.5, ew.Certificate(0.05), method)
            result = ew.evaluate(cal.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
            assert done.json["methods"][method] == plain({"policy": policy.to_dict(), "evaluation": result.to_dict()})
        guarantee = done.json["methods"][OURS]["policy"]["guarantee"]
        assert (guarantee["tune"], guarantee["hold"], guarantee["seed"]) == (601, 600, 0)
        assert (guarantee["budget"], guarantee["budget_delta"]) == (done.json["budget"], 0.05)
        seen = np.asarray(trace.costs.values)[policy.exits(cal.predict(calibrated(trace, OURS, 0.5)[2]))].mean()
        assert 0.9 * guarantee["budget"] < seen < guarantee["cost_limit"] <= guarantee["budget"]
        assert ew.Policy.load(run / "policy.json") == policy
        assert json.loads((run / "results.json").read_text())["evaluation"] == done.json

    @pytest.mark.slow
    def test_says_which_samples_did_what(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        samples = exitwise("evaluate", run, "--budget", "50%", "--certify", "0.05", "--json").json["samples"]
        assert trace.val.index is not None
        tuned, held = (samples[name]["index"] for name in ("calibrated_and_fitted_on", "certified_on"))
        assert (len(tuned), len(held)) == (601, 600)
        assert sorted(tuned + held) == trace.val.index.tolist()
        assert samples["tested_on"] == {"split": "test", "samples": 700}
        whole = exitwise("evaluate", run, "--budget", "50%", "--json").json["samples"]
        assert whole["calibrated_and_fitted_on"]["index"] == trace.val.index.tolist()
        assert "certified_on" not in whole

    @pytest.mark.slow
    def test_a_risk_as_well(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        """Half of the probability to fail goes to each."""
        asked = ["--budget", "90%", "--certify", "0.1", "--max-loss", "0.3", "--risk", "disagreement"]
        found = exitwise("evaluate", run, *asked, "--json").json
        policy, cal = certified(trace, 0.9, ew.Certificate(0.1, "disagreement", 0.3))
        assert found["methods"][OURS]["policy"] == plain(policy.to_dict())
        guarantee = found["methods"][OURS]["policy"]["guarantee"]
        assert (guarantee["budget_delta"], guarantee["risk_delta"]) == (0.05, 0.05)
        assert (guarantee["risk"], guarantee["epsilon"]) == ("disagreement", 0.3)
        assert guarantee["risk_limit"] <= 0.3
        assert len(guarantee["bounds"]) == 2
        assert trace.test is not None
        preds = cal.predict(trace.test)
        said = preds.predicted[policy.exits(preds), np.arange(len(trace.test))]
        assert 0.02 < (said != preds.predicted[-1]).mean() < 0.3
        baseline = found["methods"][VANILLA]["policy"]["guarantee"]  # which is not asked to lose nothing
        assert (baseline["budget_delta"], baseline["risk"]) == (0.1, None)

    @pytest.mark.slow
    def test_the_sentences(self, run: Path, exitwise: Command) -> None:
        words = " ".join(exitwise("evaluate", run, "--budget", "90%", "--certify", "0.1").out.split())
        assert "Certified on 600 held-out samples:" in words
        assert "with a probability of 90 % the mean cost of images like these is at most 273742 MACs." in words
        risk = ["--max-loss", "0.3", "--risk", "disagreement"]
        words = " ".join(exitwise("evaluate", run, "--budget", "90%", "--certify", "0.1", *risk).out.split())
        assert "with a probability of 95 % the disagreement with the last exit is at most 30.00%." in words
        assert "Certified" not in exitwise("evaluate", run, "--budget", "90%").out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--max-loss", "0.05"], "give its failure probability with --certify"),
            (["--certify", "0.05", "--risk", "disagreement"], "--risk is the kind of loss of --max-loss"),
            (["--certify", "0"], "`--certify` must be a number between 0 and 1, but got 0"),
            (["--certify", "1"], "`--certify`"),
            (["--certify", "nan"], "`--certify`"),
            (["--certify", "surely"], "--certify"),
            (["--certify", "0.05", "--max-loss", "0"], "`--max-loss` must be a fraction such as 0.01"),
            (["--certify", "0.05", "--max-loss", "2"], "`--max-loss`"),
            (
                ["--certify", "0.05", "--max-loss", "0.1", "--risk", "luck"],
                "`--risk` must be one of accuracy, disagreement",
            ),
            (["--objective", "speed"], "`--objective` must be one of accuracy, nlpd"),
            (["--certify", "0.05", "--max-loss", "0.001"], "a loss in accuracy of at most 0.1 % cannot be certified"),
            (
                ["--certify", "0.05", "--max-loss", "0.01", "--risk", "disagreement"],
                "a loss in disagreement of at most 1 % cannot be certified: on 600 held-out samples it is",
            ),
        ],
    )
    def test_what_is_refused_leaves_everything_as_it_was(
        self, run: Path, exitwise: Command, arguments: Sequence[str], message: str
    ) -> None:
        ew.Policy((0.5, 0.5, float("-inf")), budget=2e5).save(run / "policy.json")
        write_json(run / "results.json", {"format": "exitwise.results", "version": 1, "evaluation": "an earlier one"})
        before = contents(run)
        done = exitwise("evaluate", run, "--budget", "50%", *arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert message in done.err
        assert contents(run) == before

    def test_calibrated_as_the_run_is_but_on_fewer_samples(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        """Settings of the run's own calibration count, its temperatures do not: they have seen the samples held out."""
        exitwise("calibrate", run, "--samples", "7", "--seed", "3", "--mode", "exact")
        known = contents(run / "calibrations")
        found = exitwise("evaluate", run, "--budget", "60%", "--certify", "0.05", "--json").json
        tune, hold = trace.hold_out(0.5, seed=0)
        cal = ew.calibrate(tune, OURS, samples=7, seed=3, mode="exact")
        policy = ew.fit_policy(
            cal.predict(tune.val),
            tune.val.labels,
            trace.costs,
            budget=found["budget"],
            certify=ew.Certificate(0.05),
            hold=cal.predict(hold),
        )
        assert found["methods"][OURS]["policy"]["thresholds"] == plain(policy.to_dict())["thresholds"]
        assert contents(run / "calibrations") == known


class TestEvaluated:
    @pytest.mark.parametrize("strategy", ["auto", "geometric", "optimized", "label_free"])
    @pytest.mark.slow_after_first
    def test_by_every_strategy(self, run: Path, trace: ew.Trace, exitwise: Command, strategy: str) -> None:
        found = exitwise("evaluate", run, "--budget", "60%", "--strategy", strategy, "--json").json
        cal = calibrated(trace)[0]
        policy = ew.fit_policy(
            cal.predict(trace.val), trace.val.labels, trace.costs, budget=found["budget"], strategy=strategy
        )
        assert found["methods"][OURS]["policy"] == plain(policy.to_dict())
        assert found["methods"][OURS]["policy"]["strategy"] == strategy

    @pytest.mark.parametrize(
        ("score", "method"),
        [
            ("margin", "poe laplace t_opt sigma_opt"),
            ("patience", "PoE T_opt"),
            ("patience", "MIE"),
            ("margin", "T_opt"),
        ],
    )
    @pytest.mark.slow_after_first
    @pytest.mark.slow
    def test_by_other_scores_and_methods(
        self, run: Path, trace: ew.Trace, exitwise: Command, score: str, method: str
    ) -> None:
        found = exitwise("evaluate", run, "--budget", "60%", "--score", score, "--method", method, "--json").json
        cal = calibrated(trace, found["method"])[0]
        assert found["method"].lower() == method.lower()
        policy = ew.fit_policy(
            cal.predict(trace.val), trace.val.labels, trace.costs, budget=found["budget"], score=score
        )
        assert found["methods"][found["method"]]["policy"] == plain(policy.to_dict())
        assert found["methods"][VANILLA]["policy"]["score"] == score
        assert trace.test is not None
        result = ew.evaluate(cal.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
        assert found["methods"][found["method"]]["evaluation"] == plain(result.to_dict())

    def test_the_objective(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        done = exitwise("evaluate", run, "--budget", "80%", "--objective", "nlpd")
        cal = calibrated(trace)[0]
        policy = ew.fit_policy(
            cal.predict(trace.val), trace.val.labels, trace.costs, budget=0.8 * trace.costs.values[-1], objective="nlpd"
        )
        assert ew.Policy.load(run / "policy.json") == policy
        assert policy.fit is not None
        assert policy.fit.gap is not None
        words = "higher" if policy.fit.gap > 0 else "lower"
        assert f"their NLPD is {abs(policy.fit.gap):.4f} {words}" in " ".join(done.out.split())

    def test_variance_is_for_methods_with_draws(self, run: Path, exitwise: Command) -> None:
        """The plain net beside it goes by its confidence; a product of experts has no variance."""
        found = exitwise("evaluate", run, "--budget", "60%", "--score", "variance", "--json").json
        assert [found["methods"][name]["policy"]["score"] for name in (VANILLA, OURS)] == ["confidence", "variance"]
        refused = exitwise("evaluate", run, "--budget", "60%", "--score", "variance", "--method", "PoE Laplace")
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert "without product of experts" in refused.err


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 640 noise images, unlike the training images of the tiny net."""
    place = tmp_path_factory.mktemp("noise")
    pixels = np.random.default_rng(0).integers(0, 256, (640, 8, 8), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(place / f"{number:03}.png")
    return place


def images_in(folder: Path) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in sorted(folder.iterdir())]))[:, None]


def rows_of(out: str) -> list[dict[str, str]]:
    return list(csv.DictReader(out.splitlines()))


class TestDeployed:
    @pytest.mark.slow
    def test_predict_goes_by_the_certificate_of_the_last_evaluation(
        self, run: Path, trace: ew.Trace, noise: Path, exitwise: Command
    ) -> None:
        exitwise("evaluate", run, "--budget", "70%", "--certify", "0.2", "--score", "margin")
        rows = rows_of(exitwise("predict", run, noise).out)
        policy, cal = certified(trace, 0.7, ew.Certificate(0.2), score="margin")
        assert policy == ew.Policy.load(run / "policy.json")
        clf = ew.Classifier(ew.load_net(run / "net.safetensors"), cal, policy, preprocessing=DIGITS)
        found = clf.optimize()(images_in(noise))
        assert len(rows) == 640
        assert sum(int(row["exit_from_0"]) != exit for row, exit in zip(rows, found.exits.tolist(), strict=True)) <= 2
        confidence = np.array([float(row["confidence"]) for row in rows])
        assert (np.abs(confidence - found.probs.amax(1).numpy()) < 1e-5).mean() > 0.99
        again = rows_of(exitwise("predict", run, noise, "--budget", "70%").out)
        assert [row["confidence"] for row in again] == [row["confidence"] for row in rows]  # as evaluated

    @pytest.mark.slow
    def test_predict_may_ask_for_a_certificate_itself(self, run: Path, noise: Path, exitwise: Command) -> None:
        alone = exitwise("predict", run, noise, "--budget", "70%", "--certify", "0.2")
        assert not (run / "policy.json").exists()
        exitwise("evaluate", run, "--budget", "70%", "--certify", "0.2")
        assert exitwise("predict", run, noise).out == alone.out
        refused = exitwise("predict", run, noise, "--budget", "70%", "--certify", "1.5")
        assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1)

    @pytest.mark.parametrize("strategy", ["geometric", "label_free"])
    @pytest.mark.slow_after_first
    @pytest.mark.slow
    def test_predict_goes_by_the_strategy(
        self, run: Path, trace: ew.Trace, noise: Path, exitwise: Command, strategy: str
    ) -> None:
        alone = exitwise("predict", run, noise, "--budget", "45%", "--strategy", strategy)
        exitwise("evaluate", run, "--budget", "45%", "--strategy", strategy)
        assert exitwise("predict", run, noise).out == alone.out
        cal = calibrated(trace)[0]
        policy = ew.fit_policy(
            cal.predict(trace.val), costs=trace.costs, budget=0.45 * trace.costs.values[-1], strategy=strategy
        )
        clf = ew.Classifier(ew.load_net(run / "net.safetensors"), cal, policy, preprocessing=DIGITS).optimize()
        exits = clf(images_in(noise)).exits.tolist()
        assert sum(int(row["exit_from_0"]) != exit for row, exit in zip(rows_of(alone.out), exits, strict=True)) <= 2
        refused = exitwise("predict", run, noise, "--budget", "45%", "--strategy", "x")
        assert "`--strategy` must be one of" in refused.err

    def test_predict_goes_by_the_objective_of_the_last_evaluation(
        self, run: Path, noise: Path, trace: ew.Trace, exitwise: Command
    ) -> None:
        exitwise("evaluate", run, "--budget", "80%", "--objective", "nlpd")
        rows = rows_of(exitwise("predict", run, noise).out)
        policy = ew.Policy.load(run / "policy.json")
        clf = ew.Classifier(
            ew.load_net(run / "net.safetensors"), calibrated(trace)[0], policy, preprocessing=DIGITS
        ).optimize()
        exits = clf(images_in(noise)).exits.tolist()
        assert sum(int(row["exit_from_0"]) != exit for row, exit in zip(rows, exits, strict=True)) <= 2

    @pytest.mark.slow
    def test_export_takes_the_certified_policy_along(
        self, run: Path, noise: Path, tmp_path: Path, exitwise: Command
    ) -> None:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
        risk = ["--max-loss", "0.3", "--risk", "disagreement"]
        found = exitwise("evaluate", run, "--budget", "90%", "--certify", "0.1", *risk, "--json").json
        done = exitwise("export", run, tmp_path / "bundle", "--json")
        assert done.status == 0, done.err
        evaluated = found["methods"][OURS]["policy"]
        manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
        assert done.json["policy"] == manifest["policy"]
        for name in ("thresholds", "guarantee", "budget", "cost", "score", "strategy"):
            assert manifest["policy"][name] == evaluated[name], name
        pairs = zip(
            rows_of(exitwise("predict", tmp_path / "bundle", noise).out),
            rows_of(exitwise("predict", run, noise).out),
            strict=True,
        )
        assert (
            sum(
                mine["exit_from_0"] != its["exit_from_0"] or mine["predicted"] != its["predicted"]
                for mine, its in pairs
            )
            <= 3
        )
        kept = exitwise("predict", tmp_path / "bundle", noise, "--keep-budget", "--batch-size", 16)
        assert kept.status == 0, kept.err
        refused = exitwise("predict", tmp_path / "bundle", noise, "--certify", "0.05")
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert "thresholds of its own" in refused.err

    @pytest.mark.slow
    def test_keeping_the_budget(self, run: Path, trace: ew.Trace, noise: Path, exitwise: Command) -> None:
        """Pictures of nothing cost more than was asked for; with the controller they do not."""
        options = ["--budget", "60%", "--strategy", "geometric", "--batch-size", 16]
        budget = 0.6 * trace.costs.values[-1]
        plain = [float(row["cost"]) for row in rows_of(exitwise("predict", run, noise, *options).out)]
        done = exitwise("predict", run, noise, *options, "--keep-budget")
        kept = [float(row["cost"]) for row in rows_of(done.out)]
        assert abs(np.mean(plain) / budget - 1) > 0.05
        assert np.mean(kept) == pytest.approx(budget, rel=0.015)
        assert f"{np.mean(kept) / trace.costs.values[-1]:.1%} of the full net's" in done.err
        cal = calibrated(trace)[0]
        policy = ew.fit_policy(cal.predict(trace.val), costs=trace.costs, budget=budget, strategy="geometric")
        clf = ew.Classifier(ew.load_net(run / "net.safetensors"), cal, policy, preprocessing=DIGITS).optimize()
        controller, costs = ew.BudgetController(policy), []
        for batch in images_in(noise).split(16):
            clf.policy = controller.policy
            said = clf(batch)
            costs += said.costs.tolist()
            controller.update(said.exits, said.probs.amax(1))
        assert kept == costs


class TestNotes:
    """What the numbers alone do not show is said in one line, and stands in the JSON."""

    @pytest.mark.slow
    def test_calibrate_names_values_at_the_edge_of_their_grid(self, run: Path, exitwise: Command) -> None:
        done = exitwise("calibrate", run, "--json")
        at_edge = {0.5, 4.0} & set(done.json["prior_vars"]) or {0.3, 3.0} & set(done.json["temperatures"])
        assert at_edge, "the case must have a value at an edge"
        assert done.json["notes"]
        command = shlex.join(["exitwise", "calibrate", str(run), "--method", OURS, "--search", "continuous"])
        assert all("edge of its grid" in note and f"`{command}`" in note for note in done.json["notes"])
        printed = exitwise("calibrate", run).out
        for note in done.json["notes"]:
            assert f"Note: {note}" in printed.splitlines()
        evaluated = exitwise("evaluate", run, "--budget", "60%", "--json").json["notes"]
        assert set(done.json["notes"]) <= set(evaluated)

    def test_a_budget_that_is_not_spent(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        options = ("--budget", "100%", "--method", "T_opt")
        found = exitwise("evaluate", run, *options, "--json").json
        policy = found["methods"]["T_opt"]["policy"]
        assert policy["cost"] < 0.97 * policy["budget"], "the case must decline a part of its budget"
        (note,) = [note for note in found["notes"] if "of the budget" in note]
        assert f"auto spends {policy['cost'] / policy['budget']:.0%} of the budget" in note
        assert "--strategy geometric spends all of it" in note
        assert f"Note: {note}" in exitwise("evaluate", run, *options).out.splitlines()
        whole = exitwise("evaluate", run, *options, "--strategy", "geometric", "--json").json
        assert not [note for note in whole["notes"] if "of the budget" in note]

    def test_a_test_split_that_costs_more_than_the_budget(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        assert trace.test is not None
        easy = exitwise("evaluate", run, "--budget", "60%", "--strategy", "geometric", "--json").json
        assert not [note for note in easy["notes"] if "above the budget" in note]
        confidence = torch.as_tensor(calibrated(trace)[0].predict(trace.test).probs[0]).amax(1)
        hard = trace.test.take(confidence.argsort()[:300])
        replace(trace, test=hard).save(run / "trace.safetensors")
        found = exitwise("evaluate", run, "--budget", "60%", "--strategy", "geometric", "--json").json
        over = found["methods"][OURS]["evaluation"]["cost"] / found["budget"] - 1
        assert over > 0.005, "the case must exceed its budget"
        (note,) = [note for note in found["notes"] if "above the budget" in note]
        assert f"{over:.1%} above the budget" in note
        assert "--certify 0.05" in note
        assert "--keep-budget" in note


class TestMaxLoss:
    """Without a budget: the cheapest policy that loses at most so many points against the plain net's last exit."""

    @pytest.mark.slow
    def test_evaluate_is_the_library(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        assert trace.test is not None
        done = exitwise("evaluate", run, "--max-loss", "2", "--json")
        assert done.status == 0, done.err
        vanilla, cal = calibrated(trace, VANILLA)[0], calibrated(trace)[0]
        policy = ew.fit_policy(
            cal.predict(trace.val),
            trace.val.labels,
            trace.costs,
            budget=None,
            max_loss=0.02,
            reference=vanilla.predict(trace.val),
        )
        assert done.json["methods"][OURS]["policy"] == plain(policy.to_dict())
        assert ew.Policy.load(run / "policy.json") == policy
        last = float((vanilla.predict(trace.test).predicted[-1] == trace.test.labels.numpy()).mean())
        loss = done.json["max_loss"]
        assert (loss["points"], loss["risk"], loss["reference_top1"]) == (2.0, "accuracy", pytest.approx(last))
        for name, result in done.json["methods"].items():
            assert loss["test"][name] == pytest.approx(100 * (last - result["evaluation"]["top1"]))
        printed = " ".join(exitwise("evaluate", run, "--max-loss", "2%").out.split())
        assert "at most 2 points of top-1 below the last exit of the plain net" in printed

    def test_more_loss_is_cheaper(self, run: Path, exitwise: Command) -> None:
        options = ("--method", "T_opt", "--risk", "disagreement")
        costs = [
            exitwise("evaluate", run, "--max-loss", points, *options, "--json").json["methods"]["T_opt"]
            for points in (0, 3, 30)
        ]
        found = [result["policy"]["cost"] for result in costs]
        assert found == sorted(found, reverse=True)
        assert found[-1] < found[0]

    @pytest.mark.slow
    def test_certified_against_the_plain_net(self, run: Path, trace: ew.Trace, exitwise: Command) -> None:
        found = exitwise("evaluate", run, "--max-loss", "20", "--certify", "0.1", "--json")
        assert found.status == 0, found.err
        guarantee = found.json["methods"][OURS]["policy"]["guarantee"]
        assert (guarantee["risk"], guarantee["epsilon"], guarantee["risk_delta"]) == ("accuracy", 0.2, 0.1)
        assert (guarantee["budget"], guarantee["budget_delta"], guarantee["reference"]) == (None, None, "plain net")
        tune, held = trace.hold_out(0.5, 0)
        cal, vanilla = ew.calibrate(tune, OURS), ew.calibrate(trace, VANILLA)
        policy = ew.fit_policy(
            cal.predict(tune.val),
            tune.val.labels,
            trace.costs,
            budget=None,
            certify=ew.Certificate(None, "accuracy", 0.2, 0.1),
            held_out=cal.predict(held),
            held_out_labels=held.labels,
            reference=vanilla.predict(held),
        )
        assert found.json["methods"][OURS]["policy"]["thresholds"] == plain(policy.to_dict())["thresholds"]
        words = " ".join(exitwise("evaluate", run, "--max-loss", "20", "--certify", "0.1").out.split())
        assert "loss of accuracy against the last exit of the plain net is at most 20.00%." in words

    def test_temperature_keeps_the_classes_of_the_plain_net(self, run: Path, exitwise: Command) -> None:
        """Its last exit loses nothing, so that even a small loss is certified, if only by the last exit."""
        options = ("--max-loss", "0.1", "--certify", "0.05", "--method", "T_opt")
        done = exitwise("evaluate", run, *options, "--json")
        assert done.status == 0, done.err
        assert done.json["methods"]["T_opt"]["policy"]["guarantee"]["risk_limit"] <= 0.001

    @pytest.mark.slow
    def test_later_commands_keep_the_loss(self, run: Path, tmp_path: Path, exitwise: Command) -> None:
        assert exitwise("evaluate", run, "--max-loss", "2", "--method", "T_opt").status == 0
        done = exitwise("export", run, tmp_path / "bundle", "--json")
        assert done.status == 0, done.err
        assert "at most 2 points of loss" in done.err
        done = exitwise("export", run, tmp_path / "margin", "--score", "margin", "--json")
        assert (done.json["policy"]["score"], done.json["policy"]["fit"]["max_loss"]) == ("margin", 0.02)
        done = exitwise("export", run, tmp_path / "budget", "--budget", "60%", "--json")
        assert done.json["policy"]["fit"]["max_loss"] is None

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "evaluate needs --budget 50%, or --max-loss 0.2"),
            (["--max-loss", "much"], "`--max-loss` must be points such as 0.2, but got 'much'"),
            (["--max-loss", "-1"], "`--max-loss` must be points"),
            (["--max-loss", "100"], "`--max-loss` must be points"),
            (["--max-loss", "0.2", "--risk", "luck"], "must be one of accuracy, disagreement"),
            (["--max-loss", "0.01", "--risk", "disagreement", "--certify", "0.01"], "cannot be certified"),
        ],
    )
    def test_what_is_refused(self, run: Path, exitwise: Command, arguments: Sequence[str], message: str) -> None:
        before = contents(run)
        done = exitwise("evaluate", run, *arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert message in done.err
        assert contents(run) == before
