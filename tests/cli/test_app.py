"""The command as a user meets it: real processes where the process matters, `main` in this one elsewhere."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import random_trace
from command import Command, contents, new_run, with_paper_method, zoo_run
from image_files import write_cifar
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import exitwise as ew
from exitwise.calibration.trace import HeadWeights

pytestmark = pytest.mark.numerical


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A demo made by a real process in an empty folder, and what it printed."""
    place = tmp_path_factory.mktemp("demo")
    words = [sys.executable, "-m", "exitwise", "demo", "--out", "run"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, check=True)
    return place / "run", done.stdout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The demo's run without its calibrations, to do things to."""
    return zoo_run(tmp_path / "run")


def change_trace(run: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = run / "trace.safetensors"
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata=header)


@pytest.mark.slow
def test_demo_prints_twelve_rows_beside_the_paper(demo: tuple[Path, str]) -> None:
    _, out = demo
    for name in ew.METHODS:
        assert sum(line.startswith(name + "  ") for line in out.splitlines()) == 1
    ours = next(line for line in out.splitlines() if line.startswith("MIE Laplace T_opt sigma_opt "))
    assert ours.split()[-7:][-1] == "-.165"  # the paper's change of ECE
    assert "+0.59" in ours
    words = " ".join(out.split())
    assert "another network, trained far longer" in words
    assert "the negative log-likelihood falls from 1.633" in words
    assert "calibration error falls from 0.172" in words
    assert "exitwise evaluate run --budget 50%" in out


@pytest.mark.slow
def test_demo_leaves_a_whole_run(demo: tuple[Path, str]) -> None:
    folder, out = demo
    results = json.loads((folder / "results.json").read_text())
    rows = results["ablation"]["rows"]
    assert [row["method"] for row in rows] == list(ew.METHODS)
    assert f"{rows[-1]['nlpd']:.3f}" in out
    assert len(list((folder / "calibrations").iterdir())) == 12
    assert "Open run/report.html in a browser" in out
    assert '"name":"cifar100-small"' in (folder / "report.html").read_text()
    assert ew.load_net(folder / "net.safetensors").spec == {"preset": "cifar100-small"}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run"]


@pytest.mark.slow
def test_demo_overwrites_a_run_only_when_told_and_anything_else_never(
    demo: tuple[Path, str], exitwise: Command, tmp_path: Path
) -> None:
    before = contents(demo[0])
    refused = exitwise("demo", "--out", demo[0])
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "--force" in refused.err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all my work")
    refused = exitwise("demo", "--out", tmp_path / "mine", "--force")
    assert refused.status == 2
    assert "is not a run" in refused.err
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "all my work"
    assert contents(demo[0]) == before


def test_calibrate_saves_what_it_prints(run: Path, exitwise: Command) -> None:
    found = exitwise("calibrate", run, "--method", "mie t_opt", "--json").json
    saved = ew.Calibration.load(run / "calibrations" / "mie-t_opt.safetensors")
    assert found["temperatures"] == list(saved.temperatures)
    assert found["method"] == "MIE T_opt"
    table = exitwise("calibrate", run, "--method", "mie t_opt").out
    assert f"{saved.val_nlpd[3]:.4f}" in table
    assert "Ensembling makes" not in table


def test_calibrate_notes_that_ensembling_makes_the_last_exit_worse(tmp_path: Path, exitwise: Command) -> None:
    """Earlier exits that know nothing."""
    trace = random_trace(n=200)
    blind = [HeadWeights(torch.zeros_like(head.weight), head.bias) for head in trace.heads[:-1]]
    place = new_run(tmp_path / "run", replace(trace, heads=(*blind, trace.heads[-1])))
    words = " ".join(exitwise("calibrate", place, "--method", "MIE").out.split())
    assert "Ensembling makes the last exit worse" in words
    assert "Ensembling makes" not in exitwise("calibrate", place, "--method", "T_opt").out


def test_evaluate_is_the_library_at_that_budget(run: Path, exitwise: Command) -> None:
    found = exitwise("evaluate", run, "--budget", "50%", "--method", "MIE", "--json").json
    trace = ew.Trace.load(run / "trace.safetensors")
    assert trace.test is not None
    assert found["budget"] == trace.costs.values[-1] / 2
    cal = ew.calibrate(trace, "MIE")
    policy = ew.fit_policy(cal.predict(trace.val), trace.val.labels, trace.costs, budget=found["budget"])
    result = ew.evaluate(cal.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
    assert found["methods"]["MIE"] == json.loads(
        json.dumps({"policy": policy.to_dict(), "evaluation": result.to_dict()})
    )
    assert ew.Policy.load(run / "policy.json") == policy
    assert "MSDNet (vanilla)" in found["methods"]
    text = exitwise("evaluate", run, "--budget", "1.9e7", "--method", "MIE").out
    assert "Budget 19 million MACs" in text
    assert " all " in text


@pytest.mark.slow
def test_a_budget_in_milliseconds_where_costs_are(run: Path, exitwise: Command) -> None:
    trace = ew.Trace.load(run / "trace.safetensors")
    (run / "trace.safetensors").unlink()
    replace(trace, costs=ew.Costs((2.0, 5.0, 9.0, 14.0), "ms")).save(run / "trace.safetensors")
    found = exitwise("evaluate", run, "--budget", "8ms", "--method", "T_opt", "--json").json
    assert found["unit"] == "ms"
    assert found["methods"]["T_opt"]["evaluation"]["cost"] == pytest.approx(8, rel=0.05)
    refused = exitwise("evaluate", run, "--budget", "2e7", "--method", "T_opt")
    assert "2e7 is in MACs, but the costs of this run are in ms" in refused.err


@pytest.mark.parametrize("score", ["entropy", "variance"])
@pytest.mark.slow
def test_evaluate_by_other_scores(run: Path, exitwise: Command, score: str) -> None:
    found = exitwise("evaluate", run, "--budget", "2e7", "--method", "Laplace", "--score", score, "--json").json
    assert found["methods"]["Laplace"]["policy"]["score"] == score
    assert found["methods"]["Laplace"]["policy"]["cost"] == pytest.approx(2e7, rel=1e-3)


@pytest.mark.slow
def test_ablate_prints_both_tables(run: Path, exitwise: Command) -> None:
    done = exitwise("ablate", run, "--budget-range", "1e7", "2e7", "--samples", "5", "--json")
    assert done.json["ablation"]["budget_range"] == [1e7, 2e7]
    assert len(done.json["ablation"]["rows"]) == 12
    assert len(done.json["decisions"]["rows"]) == 3
    assert json.loads((run / "results.json").read_text())["decisions"] == done.json["decisions"]


def test_cost_prints_every_column(exitwise: Command) -> None:
    out = exitwise("cost", "cifar100-small").out
    for column in ("vanilla", "Laplace", "naive Laplace", "MIE", "Pool W_opt", "MC dropout"):
        assert column in out
    assert "38.04" in out
    assert "+0.14%" in out  # Pool W_opt at the last exit: 4 x 12,900 MACs and the pool's 1,800
    found = exitwise("cost", "imagenet-medium", "--num-classes", "10", "--json").json
    assert len(found["exits"]) == 5
    # Overheads of the first exit, by hand: p = 512, c = 10, 50 draws.
    first = found["exits"][0]
    assert first["laplace"] - first["vanilla"] == 2 * 10 * 50 + 513 * 514
    assert first["mc_dropout"] - first["vanilla"] == 50 * 513 * 10
    assert first["ensemble"] == first["vanilla"]
    assert found["exits"][1]["ensemble"] - found["exits"][1]["vanilla"] == 30


def test_models_lists_the_presets(exitwise: Command) -> None:
    assert list(exitwise("models", "--json").json["models"]) == ew.models.list()


def test_collect_refuses_a_checkpoint_of_another_net_and_leaves_nothing(exitwise: Command, tmp_path: Path) -> None:
    write_cifar(tmp_path / "data")
    torch.save({"state_dict": ew.models.msdnet("tiny-32", num_classes=50).state_dict()}, tmp_path / "net.pth")
    arguments = ["--model", "tiny-32", "--checkpoint", tmp_path / "net.pth", "--data", "cifar100"]
    done = exitwise("collect", tmp_path / "run", *arguments, "--root", tmp_path / "data", "--val-size", "10")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "it fits 'tiny-32', num_classes=50" in done.err
    assert not (tmp_path / "run").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "net.pth"]


@pytest.mark.slow
def test_collect_makes_a_run_and_collects_it_again(
    exitwise: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path / "data", train=40, test=12)
    net = ew.models.msdnet("cifar100-small").eval()
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    new = ["--model", "cifar100-small", "--checkpoint", tmp_path / "net.safetensors", "--data", "cifar100"]
    done = exitwise("collect", tmp_path / "run", *new, "--root", tmp_path / "data", "--val-size", "10", "--json")
    assert done.status == 0
    assert done.json["samples"] == {"val": 10, "test": 12, "train": 30}
    trace = ew.Trace.load(tmp_path / "run" / "trace.safetensors")
    assert trace.val.index is not None
    train, _ = ew_data(tmp_path / "data")
    torch.testing.assert_close(trace.val.features[3], net.features(train[trace.val.index])[3], atol=1e-5, rtol=1e-4)
    assert trace.budget_range == (7.0e6, 2.6e7)

    refused = exitwise("collect", tmp_path / "run")
    assert refused.status == 2
    assert "--force" in refused.err
    assert exitwise("collect", tmp_path / "run", "--model", "tiny-8", "--force").status == 2
    exitwise("evaluate", tmp_path / "run", "--budget", "50%", "--method", "MIE")
    assert (tmp_path / "run" / "policy.json").exists()
    assert exitwise("collect", tmp_path / "run", "--force", "--half").status == 0
    left = {path.name for path in (tmp_path / "run").iterdir()}  # what was made from the old trace is gone
    assert left == {"run.json", "net.safetensors", "split.safetensors", "trace.safetensors"}
    again = ew.Trace.load(tmp_path / "run" / "trace.safetensors")
    assert again.val.features[0].dtype == torch.float16
    assert torch.equal(again.val.labels, trace.val.labels)
    torch.testing.assert_close(again.curvature[0].A, trace.curvature[0].A)


def ew_data(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    from exitwise import data

    train, test = data.load("cifar100", root)
    return tuple(next(iter(data.Batches(part, 1000)))[0] for part in (train, test))  # type: ignore[return-value]


def set_value(name: str, value: float, row: int = 0) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[row] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_value("test.labels", 100), "test.labels must lie in 0..99"),
        (set_value("val.features.2", float("nan"), 128 * 7), "first in sample 7"),
        (set_value("curvature.n", 0), "curvature.n"),
    ],
)
@pytest.mark.parametrize("command", [("calibrate",), ("ablate",), ("evaluate", "--budget", "50%")])
def test_a_bad_trace_stops_every_command(
    run: Path, exitwise: Command, change: Callable[..., None], message: str, command: tuple[str, ...]
) -> None:
    change_trace(run, change)
    before = contents(run)
    done = exitwise(command[0], run, *command[1:])
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err
    assert contents(run) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cost", "cifar100-smal"], "did you mean 'cifar100-small'?"),
        (["cost"], "Missing argument"),
        (["cost", "cifar100-small", "--samples", "many"], "--samples"),
        (["cost", "cifar100-small", "--samples", "0"], "--samples"),
        (["cost", "cifar100-small", "--num-classes", "1"], "`--num-classes`"),
        (["frobnicate"], "No such command"),
        (["evaluate", "nowhere", "--budget", "50%"], "nowhere is not a run"),
        (["calibrate", "nowhere"], "nowhere is not a run"),
        (["collect", "nowhere"], "a new one needs --data and --model or --net and --checkpoint"),
        (["demo", "--out", "/dev/null/run"], "/dev/null"),
        (["demo", "--out", "/proc/run"], "/proc"),
    ],
)
def test_bad_usage_is_one_line_and_status_two(exitwise: Command, arguments: list[str], message: str) -> None:
    done = exitwise(*arguments)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--budget", "5e6"], "6859876 to 38042768 MACs"),
        (["evaluate", "--budget", "4e7"], "6859876 to 38042768 MACs"),
        (["evaluate", "--budget", "12ms"], "has no times yet: run `exitwise bench"),
        (["evaluate", "--budget", "much"], "must be like 2e7, 50% or 12ms"),
        (["evaluate", "--budget", "nan"], "must be like 2e7, 50% or 12ms"),
        (["evaluate"], "evaluate needs --budget 50%, or --max-loss 0.2"),
        (["evaluate", "--budget", "2e7", "--method", "MEI"], "did you mean 'MIE'?"),
        (["evaluate", "--budget", "2e7", "--score", "luck"], "`--score` must be one of"),
        (["evaluate", "--budget", "2e7", "--strategy", "luck"], "`--strategy`"),
        (["evaluate", "--budget", "2e7", "--score", "variance", "--method", "MIE"], "choose a method with Laplace"),
        (["calibrate", "--mode", "luck"], "'--mode': 'luck' is not one of 'paper', 'exact', 'naive'"),
        (["calibrate", "--search", "luck"], "'--search': 'luck' is not one of 'grid', 'continuous'"),
        (["calibrate", "--samples", "0"], "'--samples': Input should be greater than or equal to 1, but got '0'"),
        (["calibrate", "--seed", "99999999999999999999999"], "`--seed`"),
        (["calibrate", "--seed", "-1"], "`--seed`"),
        (["ablate", "--budget-range", "3e7", "1e7"], "`--budget-range`"),
    ],
)
def test_bad_settings_are_named(run: Path, exitwise: Command, arguments: list[str], message: str) -> None:
    done = exitwise(arguments[0], run, *arguments[1:])
    assert (done.status, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]
    assert not (run / "policy.json").exists()
    assert not (run / "results.json").exists()


@pytest.mark.slow
def test_a_calibration_of_another_net_is_refused(run: Path, exitwise: Command) -> None:
    exitwise("calibrate", run, "--method", "T_opt")
    change_trace(run, set_value("head.1.weight", 3.0))
    (run / "net.safetensors").unlink()  # which would be compared with the trace first
    done = exitwise("evaluate", run, "--budget", "50%", "--method", "T_opt")
    assert done.status == 2
    assert "t_opt.safetensors is of another net" in done.err


def test_truncated_files_of_a_run_are_named(run: Path, exitwise: Command) -> None:
    exitwise("calibrate", run, "--method", "T_opt")
    saved = run / "calibrations" / "t_opt.safetensors"
    saved.write_bytes(saved.read_bytes()[:-10])
    done = exitwise("evaluate", run, "--budget", "50%", "--method", "T_opt")
    assert done.status == 2
    assert "t_opt.safetensors is not a complete safetensors file" in done.err
    whole = (run / "trace.safetensors").read_bytes()
    (run / "trace.safetensors").unlink()
    assert "has no trace yet" in exitwise("calibrate", run).err
    (run / "trace.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "trace.safetensors is not a complete safetensors file" in exitwise("calibrate", run).err
    (run / "run.json").unlink()
    (run / "run.json").write_text("{oops")
    assert "run.json is not valid JSON" in exitwise("calibrate", run).err


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("[]", "must hold a JSON object"),
        ('{"format": "exitwise.run", "version": 9}', "version 9"),
        ('{"format": "exitwise.run", "version": 1, "data": []}', "must name its dataset"),
        ('{"format": "exitwise.run", "version": 1, "data": {"name": "cifar100", "root": 5}}', "must give a folder"),
    ],
)
def test_odd_run_files_are_refused(run: Path, exitwise: Command, about: str, message: str) -> None:
    (run / "run.json").unlink()
    (run / "run.json").write_text(about)
    for command in (["calibrate", run], ["collect", run, "--force"]):
        done = exitwise(*command)
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert message in done.err


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(run: Path) -> None:
    """No file may grow beyond 100 kB: writing the calibration fails half-way."""
    command = shlex.join([sys.executable, "-m", "exitwise", "calibrate", str(run), "--method", "Laplace"])
    script = f"ulimit -f 100; trap '' XFSZ; exec {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "could not be written" in done.stderr
    assert list((run / "calibrations").iterdir()) == []


@pytest.mark.slow
def test_termination_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", "exitwise", "demo", "--out", "run"], cwd=tmp_path)
    while not list(tmp_path.glob(".run.*")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_terminal_without_the_characters_is_no_crash() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    command = [sys.executable, "-m", "exitwise", "cost", "tiny-8"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "naive Laplace" in done.stdout


def test_a_place_that_cannot_be_written_is_named(run: Path, exitwise: Command) -> None:
    (run / "calibrations").write_text("a file where a folder should be")
    done = exitwise("calibrate", run, "--method", "T_opt")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "calibrations" in done.err


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys\nfrom exitwise.cli.app import main\nsys.argv = ['exitwise', '--help']\ntry:\n    main()\nfinally:\n"
    )
    script += "    assert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for command in ("demo", "collect", "calibrate", "evaluate", "ablate", "report", "cost", "models"):
        assert command in done.stdout


@pytest.mark.slow
def test_a_reader_that_stops_reading_is_no_error() -> None:
    script = f"{shlex.quote(sys.executable)} -m exitwise models | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cifar100-small")
    assert done.stderr == ""
