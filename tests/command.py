"""The command in this process, and runs to try it on."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import exitwise as ew
from exitwise import zoo
from exitwise.calibration.methods import OURS, VANILLA
from exitwise.cli import app
from exitwise.core.files import write_json
from exitwise.runs.run import run_metadata


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """A folder that `make` fills once for all processes of a test run: the first that comes, while the others wait."""
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    root = factory.getbasetemp().parent if parallel else factory.getbasetemp()
    place = root / name
    with FileLock(root / f"{name}.lock"):
        if not (place / ".whole").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            (place / ".whole").touch()
    return place


class Outcome:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]


def with_paper_method(exitwise: Command) -> Command:
    """The command with the paper's method and score where none is given: for tests of other things than their choice.

    Where a run has a chosen classifier, its method and score stay.
    """

    def run(command: object, *arguments: object) -> Outcome:
        words = [str(word) for word in arguments]
        uses_choice = command in ("predict", "export", "bench", "report")
        folder = Path(words[0]) if words else Path()
        is_run = (folder / "run.json").is_file() and not (uses_choice and (folder / "chosen.safetensors").exists())
        if not is_run or not (uses_choice or command in ("calibrate", "evaluate", "policies")):
            return exitwise(command, *arguments)
        more = []
        if "--method" not in words:
            more += ["--method", VANILLA, "--method", OURS] if command == "policies" else ["--method", OURS]
        if "--score" not in words and command not in ("calibrate", "report"):
            more += ["--score", "confidence"]
        return exitwise(command, *arguments, *more)

    return run


def zoo_run(place: Path, samples: int | None = None) -> Path:
    """The zoo's net as a run in a new folder, as the demo copies it, without calibrations.

    With `samples`, its trace keeps that many for validation and test: for tests of other things than their numbers.
    """
    place.mkdir()
    for name in ("run.json", "net.safetensors", "trace.safetensors", "split.safetensors"):
        shutil.copyfile(zoo.path(name), place / name)
    if samples is not None:
        shorten_trace(place, samples)
    return place


def shorten_trace(run: Path, samples: int) -> None:
    """Keep the first samples of both splits of a run's trace."""
    trace, few = ew.Trace.load(run / "trace.safetensors"), torch.arange(samples)
    shorter = replace(trace, val=trace.val.take(few), test=None if trace.test is None else trace.test.take(few))
    shorter.save(run / "trace.safetensors")


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of all files, to see that nothing has changed."""
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }


def new_run(place: Path, trace: ew.Trace, training: dict[str, Any] | None = None, **about: Any) -> Path:
    """A run that is only a trace."""
    place.mkdir(parents=True)
    trace.save(place / "trace.safetensors")
    write_json(
        place / "run.json", run_metadata({"net": "mine:net"}, {"name": "digits", "root": None, **about}, training)
    )
    return place


def perform(*arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["exitwise", *arguments])
        with pytest.raises(SystemExit) as end:
            app.main()
    assert not end.value.code
