"""Shared by all tests: seeds, threads, the command, the shipped net, and the line on tests that were left out."""

import functools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import numpy as np
import pytest
import torch
from command import Command, Outcome, once
from paths import SHARED
from seeds import SEED

from exitwise.cli import app

# A deadline is a time, which a busy machine does not keep.
hypothesis.settings.register_profile("exitwise", deadline=None, derandomize=SEED == 0, database=None)
hypothesis.settings.load_profile("exitwise")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed what a module draws while it is imported."""
    if isinstance(collector, pytest.Module):
        _seed_everything(collector.nodeid)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed PyTorch, NumPy and `random` from the test's name, and return the seed."""
    return _seed_everything(request.node.nodeid)


def _seed_everything(name: str) -> int:
    seed = crc32(f"{SEED} {name}".encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return seed


# -- which tests are slow, and the line that says how many tests were left out, summed over processes of pytest-xdist

_LEFT_OUT = "exitwise_left_out"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all but the first case of tests that say so."""
    met = set()
    for item in items:
        if item.get_closest_marker("slow_after_first") is None:
            continue
        test = item.nodeid.partition("[")[0]
        if test in met:
            item.add_marker("slow")
        met.add(test)


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        config = items[0].config
        setattr(config, _LEFT_OUT, getattr(config, _LEFT_OUT, 0) + len(items))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_LEFT_OUT] = getattr(session.config, _LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects all tests and leaves out the same ones."""
    setattr(node.config, _LEFT_OUT, getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = getattr(config, _LEFT_OUT, 0)
    if left_out and config.option.markexpr == "not slow":
        terminalreporter.write_line(f"{left_out} slow tests were left out: `make test-all` runs everything.")


@pytest.fixture(autouse=True, scope="session")
def threads() -> None:
    """One thread, here and in commands that tests start: two are many times slower when anything else runs."""
    number = os.environ.get("EXITWISE_TEST_THREADS", "1")
    torch.set_num_threads(int(number))
    os.environ["OMP_NUM_THREADS"] = number


@pytest.fixture(autouse=True, scope="session")
def exported_once() -> None:
    """Let torch build its table of ONNX operators once, not for every graph: a quarter of the time of an export."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        build = ONNXRegistry.from_torchlib.__func__
    except (ImportError, AttributeError):  # another version of torch, or onnxscript is not installed
        return
    ONNXRegistry.from_torchlib = classmethod(functools.cache(build))


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A shell that runs this in the background has it ignore SIGINT, which processes started here would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cifar100(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds all of real CIFAR-100 in its binary layout."""
    pytest.importorskip("PIL")
    restore = shared / "data" / "cifar100" / "restore.py"
    return once(
        tmp_path_factory, "cifar100", lambda place: subprocess.run([sys.executable, restore, place], check=True)
    )


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a process of its own trained on the digits for three epochs: for reading, copy it to change it."""

    def train(place: Path) -> None:
        words = [sys.executable, "-m", "exitwise", "train", "--data", "digits", "--epochs", "3", "--out", place / "run"]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return once(tmp_path_factory, "digits", train) / "run"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Material beside the checkout that the repository does not hold: real images."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the shared material beside the checkout, and {SHARED.name}/ is not there")
    return SHARED


@pytest.fixture
def exitwise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command in this process. A user's module, mine.py in tests, is imported anew by each, as by a process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["exitwise", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            app.main()
        sys.modules.pop("mine", None)
        captured = capsys.readouterr()
        return Outcome(int(end.value.code or 0), captured.out, captured.err)

    return run
