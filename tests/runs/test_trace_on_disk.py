"""Runs whose trace is a folder: every command finds it, and gives what it gives for a trace in one file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command

import exitwise as ew
from exitwise.calibration.trace_folder import partial_folder
from exitwise.core.mapped_rows import MappedRows
from exitwise.models.weights import save_checkpoint
from exitwise.runs import collect
from exitwise.runs.run import Run

NEW = ("--data", "digits", "--model", "tiny-8", "--json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_checkpoint(ew.models.msdnet("tiny-8"), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def results(run: Path) -> Any:
    """Results of the commands, without the path of the run, which notes name."""
    contents = json.loads((run / "results.json").read_text().replace(str(run), "RUN"))
    return {key: value for key, value in contents.items() if key != "sha256"}


@pytest.mark.slow
def test_every_command_finds_the_trace_in_either_form(exitwise: Command, checkpoint: Path, tmp_path: Path) -> None:
    outputs = []
    for form in ("--on-disk", "--in-memory"):
        run = tmp_path / form / "run"
        run.parent.mkdir()
        done = exitwise("collect", run, *NEW, "--checkpoint", checkpoint, form)
        assert done.status == 0, done.err
        assert Run(run).trace_file.name == ("trace" if form == "--on-disk" else "trace.safetensors")
        assert [path.name for path in run.parent.iterdir()] == ["run"]
        calibrated = exitwise("calibrate", run, "--method", "MIE Laplace T_opt sigma_opt", "--samples", 5, "--json")
        assert exitwise("evaluate", run, "--budget", "50%", "--method", "T_opt", "--score", "confidence").status == 0
        outputs.append([done.json["samples"], calibrated.json["val_nlpd"], results(run)])
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_collecting_again_leaves_one_form(exitwise: Command, checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert exitwise("collect", run, *NEW, "--checkpoint", checkpoint, "--on-disk", "--half").status == 0
    assert ew.Trace.load(run / "trace").val.features[0].dtype == torch.float16
    refused = exitwise("collect", run)
    assert (refused.status, "--force to collect it again" in refused.err) == (2, True)
    done = exitwise("collect", run, "--force")
    assert done.status == 0
    assert f"is in {run / 'trace.safetensors'}." in done.out
    assert not (run / "trace").exists()
    partial_folder(run / "trace").mkdir()
    done = exitwise("collect", run, "--force", "--on-disk")
    assert f"is in {run / 'trace'}." in done.out
    assert not (run / "trace.safetensors").exists()
    assert not list(run.glob(".*"))


@pytest.mark.slow
def test_large_features_go_to_disk_by_themselves(
    exitwise: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MAX_FEATURE_BYTES", 1 << 10)
    assert exitwise("collect", tmp_path / "run", *NEW, "--checkpoint", checkpoint).status == 0
    assert isinstance(Run(tmp_path / "run").trace().val.features[0], MappedRows)
    assert exitwise("collect", tmp_path / "run", "--force", "--in-memory").status == 0
    assert not isinstance(Run(tmp_path / "run").trace().val.features[0], MappedRows)


@pytest.mark.slow
def test_a_damaged_trace_is_one_line(exitwise: Command, checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert exitwise("collect", run, *NEW, "--checkpoint", checkpoint, "--on-disk").status == 0
    shard = run / "trace" / "val-00000.features.1.npy"
    shard.write_bytes(shard.read_bytes()[:-4])
    done = exitwise("calibrate", run)
    assert done.status == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "it is incomplete or was changed" in done.err
