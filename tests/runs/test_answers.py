"""Prediction sets and abstention on the command line: evaluate, predict and export."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classifier_cases import SHAPE, pictures, tiny
from command import Command, with_paper_method
from PIL import Image

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.core.held_out import split_held_out
from exitwise.report.build import ReportOptions, build_report
from exitwise.runs.answers import ANSWERED, AnswerOptions, parse_share
from exitwise.runs.deploy import build_classifier
from exitwise.runs.options import ClassifierOptions
from exitwise.runs.run import Run, run_metadata

VANILLA = "MSDNet (vanilla)"


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny net, as if it had been trained on digits."""
    place = tmp_path_factory.mktemp("answers") / "run"
    place.mkdir()
    net, known = tiny()

    def split(n: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
        return [(*pictures(n, SHAPE, 10, seed), torch.arange(n))]

    classes = [f"digit {k}" for k in range(10)]
    trace = ew.collect(
        net, [pictures(300, SHAPE, 10, 1)], split(800, 2), split(500, 3), costs=known.costs, classes=classes
    )
    trace.save(place / "trace.safetensors")
    ew.save_checkpoint(net, place / "net.safetensors")
    write_json(
        place / "run.json", run_metadata({"preset": "tiny-8"}, {"name": "digits", "root": None, "image_size": 8})
    )
    return place


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def evaluated(exitwise: Command, run: Path, *options: str, method: str = VANILLA) -> dict[str, Any]:
    done = exitwise("evaluate", run, "--budget", "60%", "--method", method, "--json", *options)
    assert done.status == 0, done.err
    return dict(json.loads(done.out))


def test_sets_and_abstention_use_samples_that_nothing_else_saw(exitwise: Command, run: Path) -> None:
    result = evaluated(exitwise, run, "--sets", "0.9", "--sets-per", "exit", "--abstain", "10%")
    _, held_out = split_held_out(800, 0.5, 0)
    samples = result["samples"]
    assert samples["answers_fitted_on"]["index"] == held_out.tolist()
    assert not set(samples["calibrated_and_fitted_on"]["index"]) & set(held_out.tolist())
    assert result["sets"]["fitted"]["guaranteed"]
    assert sum(result["sets"]["fitted"]["samples"]) == 400
    assert result["sets"]["test"]["coverage"] > 0.8
    assert 0.8 < result["abstention"]["test"]["answered"] < 0.97
    assert len(result["sets"]["test"]["by_exit"]) == 3
    chosen = Run(run).chosen()
    assert chosen is not None
    assert chosen.sets is not None
    assert chosen.sets.to_dict() == result["sets"]["fitted"]


def test_a_certificate_has_held_out_samples_of_its_own(exitwise: Command, run: Path) -> None:
    result = evaluated(exitwise, run, "--sets", "0.9", "--certify", "0.1")
    parts = [
        set(result["samples"][name]["index"])
        for name in ("calibrated_and_fitted_on", "certified_on", "answers_fitted_on")
    ]
    assert [len(part) for part in parts] == [400, 200, 200]
    assert len(set.union(*parts)) == 800
    # Another budget is fitted on the same samples, again with sets.
    classifier, _ = build_classifier(Run(run), ClassifierOptions(budget="80%"))
    assert classifier.sets is not None
    assert classifier.sets.samples == (200,)
    assert classifier.sets.policy_thresholds == classifier.policy.thresholds


def test_a_risk_is_certified_or_refused(exitwise: Command, run: Path) -> None:
    plain = evaluated(exitwise, run)
    error = 1 - plain["methods"][VANILLA]["evaluation"]["top1"]
    result = evaluated(exitwise, run, "--risk", f"{error:.3f}", "--delta", "0.1")
    fitted = result["abstention"]["fitted"]
    assert fitted["risk_limit"] <= fitted["risk"]
    former = (run / "chosen.safetensors").read_bytes()
    done = exitwise("evaluate", run, "--budget", "60%", "--method", VANILLA, "--risk", "0.0001")
    assert done.status == 2
    assert "cannot be certified on 400 held-out samples" in done.err
    assert (run / "chosen.safetensors").read_bytes() == former  # nothing half-written


def test_tables_name_coverage_and_errors(exitwise: Command, run: Path) -> None:
    done = exitwise("evaluate", run, "--budget", "60%", "--method", VANILLA, "--sets", "0.9", "--abstain", "0.1")
    assert done.status == 0, done.err
    texts = ("Prediction sets: coverage 90 %", "mean size", "Abstention: 10 % of images unanswered", "AURC")
    for text in (*texts, "Cost, answered images and errors", " 95 %"):
        assert text in done.out


@pytest.mark.slow
def test_the_trade_off_is_that_of_the_library(exitwise: Command, run: Path) -> None:
    result = evaluated(exitwise, run, "--sets", "0.9", "--abstain", "10%")
    trace = Run(run).trace()
    assert trace.test is not None
    tuning, held_out = trace.hold_out(0.5)
    cal = ew.calibrate(tuning, VANILLA)
    budgets = [row["budget"] for row in result["trade_off"]]
    assert len(budgets) == 6
    assert result["budget"] in budgets
    for row in result["trade_off"]:
        policy = ew.fit_policy(cal.predict(tuning.val), tuning.val.labels, trace.costs, budget=row["budget"])
        preds, test = cal.predict(held_out), cal.predict(trace.test)
        for share, answered, error in zip(ANSWERED[1:], row["answered"][1:], row["error"][1:], strict=True):
            abstention = ew.fit_abstention(preds, policy=policy, share=1 - share)
            expected = ew.evaluate_abstention(abstention, test, trace.test.labels, policy=policy)
            assert (answered, error) == (expected.answered, expected.error)
        assert (row["answered"][0], row["error"][0], row["cost"]) == (1, expected.error_all, expected.cost)
        sets = ew.fit_sets(preds, held_out.labels, policy=policy, coverage=0.9)
        found = ew.evaluate_sets(sets, test, trace.test.labels, policy=policy)
        assert (row["coverage"], row["mean_size"]) == (found.coverage, found.mean_size)


@pytest.mark.slow
def test_the_report_has_what_evaluate_measured(exitwise: Command, run: Path) -> None:
    result = evaluated(exitwise, run, "--sets", "0.9", "--sets-per", "exit", "--abstain", "10%", method="T_opt")
    data = build_report(Run(run), ReportOptions()).data["answers"]
    assert data["abstention"]["test"] == result["abstention"]["test"]
    assert data["sets"]["test"]["by_exit"] == result["sets"]["test"]["by_exit"]
    assert data["sets"]["test"]["mean_size"] == result["sets"]["test"]["mean_size"]
    shown = {row["budget"]: row for row in data["trade_off"]}
    assert shown[result["budget"]] in result["trade_off"]
    assert 1 < len(data["sets"]["examples"]) <= 12
    for example in data["sets"]["examples"]:
        assert len(example["set"]) == len(set(example["set"])) >= 1


@pytest.mark.slow
def test_the_report_uses_the_samples_of_a_certificate_as_evaluate_did(exitwise: Command, run: Path) -> None:
    options = ("--sets", "0.9", "--abstain", "10%", "--certify", "0.1")
    result = evaluated(exitwise, run, *options, method="T_opt")
    data = build_report(Run(run), ReportOptions()).data["answers"]
    shown = {row["budget"]: row for row in data["trade_off"]}
    assert shown[result["budget"]] in result["trade_off"]


@pytest.mark.slow
def test_a_report_without_them_has_the_curve_alone(run: Path) -> None:
    data = build_report(Run(run), ReportOptions(method="T_opt")).data["answers"]
    assert (data["sets"], data["abstention"], data["trade_off"]) == (None, None, [])
    assert data["curve"]["answered"][-1] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sets", "1.5"), "--sets"),
        (("--sets", "0.999"), "needs at least 999 held-out samples, but there are 400"),
        (("--sets", "0.9", "--sets-per", "image"), "must be one of all, exit, class"),
        (("--abstain", "x"), "must be a share such as 5%"),
        (("--abstain", "5%", "--risk", "0.1"), "give one"),
        (("--risk", "2"), "--risk"),
        (("--risk", "200%"), "must be a share such as 5%"),
        (("--sets-per", "exit"), "--sets-per needs --sets"),
        (("--sets-score", "aps"), "--sets-score needs --sets"),
        (("--abstain-at", "last"), "--abstain-at needs --abstain or --risk"),
        (("--delta", "0.1"), "--delta needs a --risk that is a number"),
    ],
)
def test_bad_input_is_one_line(exitwise: Command, run: Path, options: tuple[str, ...], message: str) -> None:
    done = exitwise("evaluate", run, "--budget", "60%", "--method", VANILLA, *options)
    assert done.status == 2
    assert message in done.err
    assert not (run / "chosen.safetensors").exists()


def test_rows_hold_sets_and_abstentions(exitwise: Command, run: Path, tmp_path: Path) -> None:
    evaluated(exitwise, run, "--sets", "0.8", "--abstain", "30%")
    rng = np.random.default_rng(0)
    names = []
    for i in range(12):
        names.append(tmp_path / f"{i}.png")
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(names[-1])
    broken = tmp_path / "broken.png"
    broken.write_text("none")
    done = exitwise("predict", run, *names, broken, "--out", tmp_path / "rows.csv")
    assert done.status == 0, done.err
    with (tmp_path / "rows.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    rows = [json.loads(line) for line in exitwise("predict", run, *names, broken, "--json").out.splitlines()]
    for cells, row in zip(table[:-1], rows[:-1], strict=True):
        assert json.loads(cells["set"]) == row["set"]
        assert row["set"][0] == row["predicted"]
        assert json.loads(cells["set_labels"]) == row["set_labels"] == [f"digit {c}" for c in row["set"]]
        assert json.loads(cells["abstained"]) is row["abstained"]
    assert (rows[-1]["set"], rows[-1]["abstained"], table[-1]["set"]) == (None, None, "")
    assert "unanswered (abstained)" in done.err
    again = exitwise("predict", run, *names, broken, "--out", tmp_path / "rows.csv", "--resume")
    assert again.status == 0, again.err


def test_parquet_holds_the_same_rows(exitwise: Command, run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    evaluated(exitwise, run, "--sets", "0.8", "--abstain", "30%")
    names = [tmp_path / "0.png", tmp_path / "none.png", tmp_path / os.fsdecode(b"\xff.png")]
    for name in (names[0], names[2]):
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(name)
    names[1].write_text("none")
    done = exitwise("predict", run, *names, "--probs", "--out", tmp_path / "rows.parquet")
    assert done.status == 0, done.err
    expected = [json.loads(line) for line in exitwise("predict", run, *names, "--probs", "--json").out.splitlines()]
    rows = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert rows[2].pop("image").endswith("\\xff.png")
    expected[2].pop("image")
    assert rows == expected
    assert exitwise("predict", run, *names, "--out", tmp_path / "rows.parquet").status == 2  # it exists
    for options in (("--format", "parquet"), ("--out", tmp_path / "rows.parquet", "--resume")):
        refused = exitwise("predict", run, *names, *options)
        assert refused.status == 2
        assert "use --format csv or jsonl" in refused.err


def test_options_come_back_from_what_was_fitted() -> None:
    assert not AnswerOptions.of(None, None).requested
    abstention = ew.Abstention(0.5, "last", 3, 0.9, 10, risk=0.1, delta=0.2)
    assert AnswerOptions.of(None, abstention) == AnswerOptions(risk=0.1, delta=0.2, at="last")
    assert parse_share("--abstain", "5%") == parse_share("--risk", "0.05") == 0.05
