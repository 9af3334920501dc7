"""What every test shares."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exitwise import cli, zoo

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small operations on two threads become many times slower when anything else runs."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A shell that runs this in the background has it ignore SIGINT, which processes started here would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Material beside the checkout that the repository does not hold: real pictures."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the shared material beside the checkout, and {SHARED.name}/ is not there")
    return SHARED


class Outcome:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]


@pytest.fixture
def exitwise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["exitwise", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(int(end.value.code or 0), captured.out, captured.err)

    return run


def zoo_run(place: Path) -> Path:
    """The zoo's net as a run in a new folder, as the demo copies it, without calibrations."""
    place.mkdir()
    for name in ("run.json", "net.safetensors", "trace.safetensors", "split.safetensors"):
        shutil.copyfile(zoo.path(name), place / name)
    return place


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of all files, to see that nothing has changed."""
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }
