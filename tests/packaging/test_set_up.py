"""`tools/set-up` makes or repairs the virtual environment, and ends in one line where it cannot. A script stands for
Python: it notes what it is asked for, so that nothing is installed here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
    "-V") echo "Python $VERSION" ;;
    *version_info*) [ "$VERSION" != 3.9.1 ] ;;
    *"-m venv --clear"*) rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *"-m pip install"*) [ -z "$TROUBLE" ] || { printf 'Collecting torch\\n%s\\n' "$TROUBLE"; exit 1; } ;;
esac
"""


class SetUp:
    """A folder to set up in, and the calls that reach Python there."""

    def __init__(self, place: Path) -> None:
        self.place, self.calls = place, place / "calls"
        self.bin = place / "bin"
        self.bin.mkdir(parents=True)
        for program in ("sh", "dirname", "mktemp", "rm", "mkdir", "grep", "tail", "head", "cp", "cat"):
            (self.bin / program).symlink_to(str(shutil.which(program)))

    def add_python(self, name: str = "python3.12") -> Path:
        (self.bin / name).write_text(PYTHON)
        (self.bin / name).chmod(0o755)
        return self.bin / name

    def __call__(self, *arguments: str, **environment: str) -> tuple[int, str]:
        values = {"PATH": str(self.bin), "CALLS": str(self.calls), "VERSION": "3.12.1", "TROUBLE": "", **environment}
        words = [ROOT / "tools" / "set-up", *(arguments or ("new venv", "core"))]
        done = subprocess.run(words, cwd=self.place, env=values, capture_output=True, text=True)
        return done.returncode, done.stderr

    def asked(self, what: str) -> int:
        return self.calls.read_text().count(what) if self.calls.exists() else 0


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    return SetUp(tmp_path / "a plÄce")


def test_it_installs_the_extras_and_leaves_a_mark(set_up: SetUp) -> None:
    set_up.add_python()
    assert set_up("new venv", "dev", "dev") == (0, "")
    assert set_up.asked("-m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]") == 1
    assert (set_up.place / "new venv" / "dev.ready").is_file()
    assert not (set_up.place / "new venv.unfinished").exists()


def test_an_environment_that_is_whole_is_kept(set_up: SetUp) -> None:
    set_up.add_python()
    for name in ("core", "dev"):
        assert set_up("new venv", name)[0] == 0
    assert set_up.asked("-m venv") == 1


@pytest.mark.parametrize("damage", ["interrupted", "no interpreter", "dead interpreter"])
def test_what_an_interrupted_set_up_left_is_made_anew(set_up: SetUp, damage: str) -> None:
    set_up.add_python()
    assert set_up()[0] == 0
    venv = set_up.place / "new venv"
    (venv / "half a package").touch()
    if damage == "interrupted":
        (set_up.place / "new venv.unfinished").touch()
    else:
        (venv / "bin" / "python").unlink()
        if damage == "dead interpreter":
            (venv / "bin" / "python").symlink_to("/nowhere/python3.11")
    assert set_up() == (0, "")
    assert set_up.asked("-m venv --clear") == 2
    assert not (venv / "half a package").exists()


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "No space left on device"),
        ("ERROR: No matching distribution found for torch==2.13.0", "No matching distribution found for torch"),
        ("something odd", "something odd"),
    ],
)
def test_a_failure_is_one_line_and_the_next_try_begins_afresh(set_up: SetUp, trouble: str, reason: str) -> None:
    set_up.add_python()
    status, err = set_up(TROUBLE=trouble)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("exitwise: set-up failed: ")
    assert reason in err
    assert not (set_up.place / "new venv" / "core.ready").exists()
    assert set_up() == (0, "")
    assert set_up.asked("-m venv --clear") == 2


def test_without_python_it_says_so(set_up: SetUp) -> None:
    expected = (
        "exitwise: needs Python 3.11 or newer, but found {}; install one, or name it: make PYTHON=/path/to/python\n"
    )
    assert set_up() == (2, expected.format("none"))
    set_up.add_python("python3")
    assert set_up(VERSION="3.9.1") == (2, expected.format("Python 3.9.1"))


def test_a_python_that_is_named_must_be_new_enough(set_up: SetUp) -> None:
    python = set_up.add_python("mine")
    assert set_up(PYTHON="mine", VERSION="3.9.1")[1] == (
        "exitwise: PYTHON=mine must be Python 3.11 or newer, but is Python 3.9.1\n"
    )
    assert "PYTHON=nothing is not a program" in set_up(PYTHON="nothing")[1]
    assert set_up(PYTHON=str(python))[0] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written_is_named(set_up: SetUp) -> None:
    set_up.add_python()
    set_up.place.chmod(0o555)
    status, err = set_up(CALLS="/dev/null")
    set_up.place.chmod(0o755)
    assert (status, err.count("\n")) == (2, 1)
    assert "set-up cannot write to ." in err
