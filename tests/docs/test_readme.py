"""Claims and commands of the README and of the pages that it links to."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace
from command import Command, new_run, zoo_run
from paths import ROOT

import exitwise as ew
from exitwise.calibration.methods import OURS
from exitwise.training.history import EpochRecord, History

README, BENCHMARKS, TRAINING_GUIDE, POLICIES, DEPLOYING, REPORT_GUIDE = (
    (ROOT / path).read_text(encoding="utf-8")
    for path in (
        "README.md",
        "docs/benchmarks.md",
        "docs/guides/training.md",
        "docs/policies.md",
        "docs/guides/deploying.md",
        "docs/guides/report.md",
    )
)
BENCHMARK, TRAINING, RUNTIME = (
    json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for name in ("method", "training", "runtime")
)
SPREAD = "ours, compiled, with compiling spread over 30 epochs, against the plain loop"


def commands_after(marker: str, page: str) -> list[list[str]]:
    """Return the words of every `exitwise` command in the block after a marker."""
    block = page.split(f"<!-- {marker} -->")[1].split("\n\n")[0]
    return [line.split("#")[0].split()[1:] for line in block.splitlines() if line.startswith("    exitwise ")]


def test_the_readme_fits_on_two_screens() -> None:
    assert len(README.splitlines()) <= 110


@pytest.mark.slow
def test_python_in_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    shown = re.search(r"top-1 (\d+\.\d+%)", README)
    assert shown is not None
    assert f"top-1 {shown[1]}" in capsys.readouterr().out
    assert tuple(names["clf"](torch.randn(4, 3, 32, 32)).probs.shape) == (4, 100)


@pytest.mark.slow
def test_the_commands_from_a_dataset_to_an_evaluated_net(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
) -> None:
    """The README's, then those of the guide to training that it lacks; both begin with the same training."""
    monkeypatch.chdir(tmp_path)
    commands, guide = commands_after("commands", README), commands_after("digits", TRAINING_GUIDE)
    assert [words[0] for words in commands] == ["train", "collect", "evaluate", "report", "export"]
    assert [words[0] for words in guide] == ["train", "collect", "calibrate", "evaluate"]
    assert guide[:2] == commands[:2]
    for part in (commands, guide[2:]):
        for words in part:
            done = exitwise(*words)
            assert done.status == 0, done.err
        results = json.loads((tmp_path / "runs" / "digits" / "results.json").read_text())["evaluation"]
        assert results["methods"][results["method"]]["evaluation"]["top1"] > 0.95
        assert (tmp_path / "bundle").exists()


@pytest.mark.slow
def test_the_demo_in_the_readme_is_what_the_demo_prints() -> None:
    """Every row of numbers that the README shows, from the library."""
    table = ew.ablation(ew.Trace.load(ew.zoo.path("trace.safetensors")))
    shown = README.split("<!-- demo -->")[1].split("The rows are means")[0]
    rows = 0
    for row in table:
        for line in shown.splitlines():
            cells = line.removeprefix("    ").removeprefix(row.method).split()
            if line.startswith(f"    {row.method}  ") and cells[0][0].isdigit():
                rows += 1
                assert cells[0] == f"{row.top1 * 100:.2f}"
                assert f"{row.nlpd:.3f}" in cells
                assert f"{row.ece:.3f}".lstrip("0") in cells
    assert rows == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_figures_of_calibration_are_those_of_the_committed_run(threads: int) -> None:
    part = BENCHMARKS.split("<!-- benchmark -->")[1].split("\n\nThe trick")[0]
    ratios = next(run for run in BENCHMARK["cifar"] if run["threads"] == threads)["median ratios"]
    for name, digits in {"search": 2, "predict": 4, "sweep and evaluation": 4}.items():
        value = next(value for key, value in ratios.items() if key.startswith(name))
        shown = f"{value:.2f}" if digits == 2 else f"{value:.2%}".replace("%", " %")
        assert shown in part, f"{name} with {threads} threads is {shown}"


def test_the_targets_were_met_in_the_committed_run() -> None:
    for run in BENCHMARK["cifar"]:
        ratios = run["median ratios"]
        assert ratios["search / forward pass over val"] <= 0.5
        assert ratios["predict / forward pass over test"] <= 0.03
        assert ratios["sweep and evaluation / forward pass over test"] <= 0.02
    large = BENCHMARK["imagenet"]
    assert [run["n"] for run in large["runs"]] == [25_000, 50_000]
    assert max(run["peak GB"] for run in large["runs"]) <= 4
    assert large["growth"] <= 2.2


def test_the_targets_of_training_were_met_in_the_committed_run() -> None:
    speeds = {run["threads"]: run[SPREAD] for run in TRAINING["training, MSDNet-small, batches of 64"]}
    assert speeds[2] >= 1.25
    assert all(run["training step / loading its batch"] >= 100 for run in TRAINING["loader, CIFAR"])
    assert all(run["collect / forward pass"] <= 1.05 for run in TRAINING["collect"])
    few, many = TRAINING["collect, peak megabytes"].values()
    assert many < 1.05 * few


@pytest.mark.parametrize("threads", [1, 2])
def test_figures_of_training_are_those_of_the_committed_run(threads: int) -> None:
    rows = BENCHMARKS.split("<!-- training benchmark -->")[1].split("\n\n")[0].splitlines()[3:]
    shown = [row.split("|")[1 + threads].strip().removesuffix("x") for row in rows]
    training, loader, collect = (
        next(run for run in TRAINING[name] if run["threads"] == threads)
        for name in ("training, MSDNet-small, batches of 64", "loader, CIFAR", "collect")
    )
    figures = (training[SPREAD], loader["training step / loading its batch"], collect["collect / forward pass"])
    assert shown == [f"{figures[0]:.2f}", f"{figures[1]:.0f}", f"{figures[2]:.2f}"]


def test_figures_of_the_runtime_are_those_of_the_committed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import runtime

    part = BENCHMARKS.split("<!-- runtime benchmark -->")[1].split("\n## ")[0]
    rows = runtime.table(RUNTIME["measured"])
    assert len(rows) > 10
    for row in rows:
        assert row in part


@pytest.mark.parametrize("name", ["attach", "heads", "dropout"])
def test_figures_of_any_network_are_those_of_the_committed_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    part = BENCHMARKS.split("<!-- any network benchmark -->")[1].split("\n\n")[0]
    results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    rows = import_module(name).table(results["measured"])
    assert len(rows) >= 3
    for row in rows:
        assert row in part


def test_the_targets_of_attaching_were_met_in_the_committed_runs() -> None:
    attach, heads = (
        json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["measured"]
        for name in ("attach", "heads")
    )
    assert all(each["attach, median seconds"] < 10 for each in attach)
    assert all(b["stages / plain module"] < 1.03 for each in attach for b in each["nobody leaves"].values())
    assert all(each["median ratio"] > 10 for each in heads if each["net"] != "MSDNet-small")  # its own are convolutions


@pytest.mark.slow
def test_the_commands_that_deploy_a_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command) -> None:
    """As shown, but for the benchmark, which would take minutes: it is asked for less."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.jpg")
    (tmp_path / "runs").mkdir()
    zoo_run(tmp_path / "runs" / "demo", samples=500)
    commands = commands_after("deploy", DEPLOYING)
    assert [words[0] for words in commands] == ["predict", "bench", "export"]
    less = ["--backend", "torch", "--batch-size", "2", "--repeats", "1", "--costs-of", "torch:2"]
    for words in commands:
        done = exitwise(*words, *(less if words[0] == "bench" else []))
        assert done.status == 0, done.err
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 4
    again = exitwise("predict", "bundle", "photos")
    assert [line.split(",")[:3] for line in again.out.splitlines()] == [
        line.split(",")[:3] for line in (tmp_path / "answers.csv").read_text().splitlines()
    ]
    for option in ("--budget", "50%"), ("--method", "T_opt"), ("--score", "entropy"):
        refused = exitwise("predict", "bundle", "photos", *option)
        assert refused.status == 2
        assert "thresholds of its own" in refused.err


def test_figures_of_fitting_are_those_of_the_committed_run() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())["measured"]
    ratios = [each["median ratio to the forward pass"] for each in found]
    assert [(each["threads"], each["samples"], each["exits"], each["budgets"]) for each in found] == [
        (1, 10_000, 8, 100),
        (2, 10_000, 8, 100),
    ]
    table = BENCHMARKS.split("<!-- policies benchmark -->")[1].split("\n\n")[0]
    for name in ratios[0]:
        line = next(line for line in table.splitlines() if f"| `{name}`" in line)
        assert line.endswith(" | ".join(f"{100 * each[name]:.1f} %" for each in ratios) + " |")
        assert all(each[name] < 1 for each in ratios)  # at most the time of one forward pass


def test_the_page_on_budgets_has_the_tables_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import tables

    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    assert tables.filled(page) == page
    assert len(re.findall(r"<!-- \w+ -->\n\| ", page)) == 8


def test_the_claims_on_budgets_are_those_of_the_committed_results() -> None:
    results = {
        name: json.loads((ROOT / "experiments" / name / "results.json").read_text())
        for name in ("policies", "certificates", "drift")
    }
    for found in results["certificates"]["whole"].values():
        assert found["plain on all"]["broken"] > 0.4 * found["plain on all"]["draws"]
        assert found["certified"]["broken"] < 0.01 * found["certified"]["draws"]
    rows = [*results["certificates"]["hold"].values(), *results["certificates"]["synthetic"].values()]
    assert all(row["draws"] >= 1000 and row["broken"] <= 0.05 * row["draws"] for row in rows)
    overruns = [
        model["worst_overrun"]["fixed"]["mean"]
        for models in results["drift"]["stream"].values()
        for model in models.values()
    ]
    assert f"overran by up to {100 * max(overruns):.0f} %" in POLICIES
    settled = [
        row["controlled"]["batches_to_settle"]
        for models in results["drift"]["stream"].values()
        for model in models.values()
        for row in model["severities"][1:]
    ]
    assert all(each["share_settled"] == 1 and each["longest"] <= 40 for each in settled)
    for method in ("MSDNet (vanilla)", "MIE Laplace T_opt sigma_opt"):
        assert results["policies"]["methods"][method]["auto"]["worse"] == 0


@pytest.mark.slow
def test_python_on_the_page_on_budgets_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "policies.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "policies.md", "exec"), names)
    assert "BudgetController(budget 2e+07 MACs" in capsys.readouterr().out
    assert len(names["answers"]) == 128
    assert names["policy"].guarantee.budget == 2.0e7


@pytest.mark.slow
def test_the_commands_on_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    zoo_run(tmp_path / "runs" / "demo", samples=500)
    commands = commands_after("budgets", POLICIES)
    assert [words[0] for words in commands] == ["evaluate", "evaluate", "policies"]
    for words in commands:
        done = exitwise(*words)
        assert done.status == 0, done.err
    assert "vs sweep" in done.out


@pytest.mark.slow
def test_the_commands_that_show_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command) -> None:
    """As shown, on small runs; other tests use real images."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "digits", "other"):
        place = new_run(tmp_path / "runs" / name, random_trace(n=120), {"recipe": {"epochs": 1}})
        History((EpochRecord(1, 0.1, 3.0, 3.1, (0.3, 0.4), 900.0, 1.5),)).save(place / "history.csv")
    commands = commands_after("report", REPORT_GUIDE)
    assert [words[:2] for words in commands] == [["report", f"runs/{run}"] for run in ("demo",) * 3 + ("digits",) * 2]
    for words in commands:
        if "--root" in words:
            continue
        done = exitwise(*words)
        assert done.status == 0, done.err
        assert (tmp_path / words[1] / "report.html").stat().st_size > 100_000
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".pdf", ".tex", ".csv"}


def test_the_targets_of_the_report_were_met_in_the_committed_run() -> None:
    large, *others = json.loads((ROOT / "benchmarks" / "results" / "report.json").read_text())["measured"]
    assert (large["test samples"], large["exits"], large["pictures"]) == (10_000, 8, True)
    assert large["seconds to make"] <= 30
    for found in (large, *others):
        assert found["page megabytes"] <= 8
        assert found["milliseconds per move of the slider"]["largest"] <= 100
        assert found["milliseconds to the first picture"] <= 1000
    words = " ".join(REPORT_GUIDE.split())
    assert f"{large['seconds to make']:.0f} s to make, {large['page megabytes']:.1f} MB" in words
    assert f"{large['milliseconds per move of the slider']['median']:.0f} ms" in words
    (imagenet,) = others
    assert (imagenet["test samples"], imagenet["classes"]) == (50_000, 1000)
    assert f"a page of {imagenet['page megabytes']:.1f} MB" in words
    measured = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())["measured"]
    report = measured["50000 samples, 1000 classes"]["report"]
    shown = f"{report['seconds']:.0f} s on two cores and {report['peak GB']:.1f} GB"
    assert shown in words
    assert shown in " ".join(BENCHMARKS.split())


def test_the_table_of_plain_networks_is_made_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "experiments"
    monkeypatch.syspath_prepend(folder)
    import plain

    found = json.loads((folder / "plain" / "results.json").read_text())["data"]
    assert list(found) == list(plain.TRAINING)
    for row in plain.table(found):
        assert row in (folder / "README.md").read_text()
    for each in found.values():
        assert each[OURS]["saved"] > 0.2
        assert each[OURS]["top1_change_interval"][1] > 0  # not surely worse than the plain network


def test_the_table_of_experiments_is_made_from_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "experiments"
    monkeypatch.syspath_prepend(folder)
    import cifar100

    text = (folder / "README.md").read_text()
    assert set(cifar100.EXPERIMENTS) == {path.name for path in folder.iterdir() if (path / "run.json").is_file()}
    for name, options in cifar100.EXPERIMENTS.items():
        assert cifar100.row(name, options) in text
    rows = json.loads((folder / "msdnet-small" / "results.json").read_text())["ablation"]["rows"]
    words = " ".join(text.split())
    for number in (rows[0], rows[-1]):
        assert all(shown in words for shown in (f"{100 * number['top1']:.2f}", f"{number['nlpd']:.3f}"))
