"""Two real processes give the same weights and the same trace as one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from command import Command
from PIL import Image
from safetensors.torch import load_file

import exitwise as ew
from exitwise.training.checkpoints import CheckpointDirectory
from exitwise.training.history import History

DIGITS = ("--data", "digits", "--epochs", "2", "--accelerator", "cpu")
TWO = ("--accelerator", "cpu", "--devices", "2")


def command(*arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "MASTER_PORT"}
    line = [sys.executable, "-m", *launcher, *(["-m"] if launcher else []), "exitwise", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300)


LAUNCHES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one": (("--accumulate", "2"), ()),
    "two": (("--devices", "2"), ()),
    "torchrun": ((), ("torch.distributed.run", "--nproc-per-node", "2")),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains, once each: with two micro-batches, with two processes, or with torchrun."""

    @cache
    def train(name: str) -> Path:
        options, launcher = LAUNCHES[name]
        directory = tmp_path_factory.mktemp("runs") / name
        done = command("train", *DIGITS, "--out", directory, *options, launcher=launcher)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Trained for 2 epochs") == 1  # only rank 0 prints
        return directory

    return train


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["two", "torchrun"])
def test_two_processes_train_to_the_weights_of_one_that_takes_both_halves(
    trained: Callable[[str], Path], launched: str
) -> None:
    one, two = (load_file(CheckpointDirectory(trained(name) / "checkpoints").files()[0]) for name in ("one", launched))
    assert one.keys() == two.keys()
    for key, value in one.items():
        if "running_" in key or "num_batches" in key:
            continue  # BatchNorm statistics are per process: those of rank 0 are kept
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-6)
    losses = [
        [row.train_loss for row in History.load(trained(name) / "history.csv").epochs] for name in ("one", launched)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_two_processes_collect_the_trace_of_one(digits_run: Path, exitwise: Command, tmp_path: Path) -> None:
    directory = shutil.copytree(digits_run, tmp_path / "run")
    options = ("collect", directory, "--batch-size", "32", "--force")
    assert exitwise(*options).status == 0
    one = ew.Trace.load(directory / "trace.safetensors")
    done = command(*options, *TWO)
    assert done.returncode == 0, done.stderr
    two = ew.Trace.load(directory / "trace.safetensors")
    for name in ("val", "test"):
        expected, split = getattr(one, name), getattr(two, name)
        assert torch.equal(split.labels, expected.labels)
        assert torch.equal(split.index, expected.index)  # every sample once, in order
        assert all(torch.equal(a, b) for a, b in zip(expected.features, split.features, strict=True))
    for a, b in zip(one.curvature, two.curvature, strict=True):
        assert a.n == b.n == 1000
        for x, y in ((a.A, b.A), (a.B, b.B)):
            assert float((x - y).abs().max() / x.abs().max()) < 1e-10
    assert one.costs == two.costs


@pytest.mark.slow
def test_all_processes_validate_the_net_that_is_kept(trained: Callable[[str], Path]) -> None:
    """BatchNorm statistics differ between processes in training; all must validate with those of rank 0."""
    done = command("collect", trained("two"), "--force")
    assert done.returncode == 0, done.stderr
    trace = ew.Trace.load(trained("two") / "trace.safetensors")
    top1 = [
        float((head.logits(x).argmax(1) == trace.val.labels).double().mean())
        for head, x in zip(trace.heads, trace.val.features, strict=True)
    ]
    assert History.load(trained("two") / "history.csv").best.val_top1 == pytest.approx(top1, abs=1e-5)


@pytest.mark.slow
def test_one_process_resumes_the_training_of_two(trained: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(trained("two"), directory)
    CheckpointDirectory(directory / "checkpoints").files()[0].unlink()  # before the last validation
    done = command("train", directory, "--resume", "--accelerator", "cpu")
    assert done.returncode == 0, done.stderr
    one, two = (load_file(CheckpointDirectory(run / "checkpoints").files()[0]) for run in (directory, trained("two")))
    assert all(torch.equal(one[key], two[key]) for key in two)


@pytest.mark.slow
def test_an_error_of_one_process_is_printed_and_ends_the_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for k in range(30):
            Image.effect_noise((16, 16), 60).save(tmp_path / "mine" / name / f"{k}.png")
    (tmp_path / "mine" / "b" / "broken.png").write_bytes(b"nothing")
    options = ("--model", "tiny-16", "--epochs", 3, "--batch-size", 42, "--val-size", 9, "--test-size", 10)
    done = command("train", "--data", f"folder:{tmp_path}/mine", *options, *TWO, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "broken.png cannot be read as an image" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


@pytest.mark.slow
def test_more_processes_than_a_batch_has_parts_is_refused_by_one_line(tmp_path: Path) -> None:
    done = command("train", *DIGITS, "--devices", "2", "--batch-size", "51", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "`--batch-size` must be a multiple of 2 processes x 1 parts, but got 51" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()
