"""The wheel by itself: installed without extras in an empty environment, used without the checkout or a network."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command import contents, once, shorten_trace
from paths import ROOT

import exitwise as ew

pytestmark = pytest.mark.slow

OFFLINE = """
import socket
def refuse(*_):
    raise OSError("no network in this test")
socket.socket.connect = socket.getaddrinfo = refuse
"""


def run(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A program that inherits only paths, the number of threads and the settings of pip."""
    kept = {
        key: value for key, value in os.environ.items() if re.match("PIP_|(PATH|HOME|TMPDIR|OMP_NUM_THREADS)$", key)
    }
    return subprocess.run([*map(str, words)], capture_output=True, text=True, cwd=cwd, env=kept, timeout=900)


def required(*words: object, cwd: Path | None = None) -> str:
    done = run(*words, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout: the one that `make wheel` built, or one of our own."""

    def build(place: Path) -> None:
        options = ("--no-deps", "--no-build-isolation", "--wheel-dir", place)
        required(sys.executable, "-m", "pip", "wheel", *options, ROOT)

    built = os.environ.get("EXITWISE_WHEELS")
    folder = ROOT / built if built else once(tmp_path_factory, "wheel", build)
    return max(folder.glob("exitwise-*.whl"), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but the wheel and what it asks for, in a folder with a difficult name."""

    def install(place: Path) -> None:
        python = place / "bin" / "python"
        required(sys.executable, "-m", "venv", place)
        required(python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
        [packages] = place.glob("lib/python*/site-packages")
        (packages / "sitecustomize.py").write_text(OFFLINE)

    return once(tmp_path_factory, "an empty plÄce", install)


@pytest.fixture(scope="session")
def demo(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's run, made there."""

    def make(place: Path) -> None:
        out = required(base / "bin" / "exitwise", "demo", "--out", place / "run", cwd=place)
        assert "MIE Laplace T_opt sigma_opt" in out

    return once(tmp_path_factory, "a demo", make) / "run"


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert names == {"exitwise", f"exitwise-{ew.__version__}.dist-info"}
    files = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("net.safetensors") for name in files)
    assert {f"exitwise/{name}/assets/page.js" for name in ("report", "serving")} <= set(files)
    assert "exitwise/core/assets/base.css" in files


def test_nothing_that_it_asks_for_is_missing_or_in_conflict(base: Path) -> None:
    assert "No broken requirements found" in required(base / "bin" / "python", "-m", "pip", "check")


def test_it_is_the_wheel_that_is_used(base: Path) -> None:
    where = required(base / "bin" / "python", "-c", "import exitwise; print(exitwise.__file__)", cwd=base.parent)
    assert Path(where.strip()).is_relative_to(base)
    assert ew.__version__ in required(base / "bin" / "exitwise", "--version", cwd=base.parent)


def test_the_demo_runs_from_it_without_a_network(demo: Path) -> None:
    assert {"run.json", "net.safetensors", "trace.safetensors", "results.json", "report.html"} <= {
        path.name for path in demo.iterdir()
    }


@pytest.fixture(scope="session")
def short(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's run with fewer samples."""

    def make(place: Path) -> None:
        shutil.copytree(demo, place / "run")
        shorten_trace(place / "run", samples=500)

    return once(tmp_path_factory, "a short run", make) / "run"


IMAGE = b"P6 32 32 255\n" + bytes(range(256)) * 12
WORKS = (
    ["models"],
    ["cost", "cifar100-small"],
    ["calibrate", "RUN", "--method", "T_opt"],
    ["evaluate", "RUN", "--budget", "50%", "--method", "T_opt"],
    ["evaluate", "RUN", "--budget", "50%", "--method", "T_opt", "--certify", "0.05"],
    ["ablate", "RUN"],
    ["policies", "RUN", "--budget", "50%", "--repeats", "20", "--method", "T_opt"],
    ["report", "RUN", "--method", "T_opt"],
    ["bench", "RUN", "--backend", "torch", "--batch-size", "1", "--repeats", "1"],
)
NEEDS = (
    (["train", "--data", "digits", "--out", "new"], "train"),
    (["train", "--data", "folder:images", "--out", "new"], "train"),
    (["collect", "RUN", "--data", "cifar100", "--root", "nowhere", "--force"], None),
    (["report", "RUN", "--static", "figures"], "report"),
    (["predict", "RUN", "images/a/one.ppm", "--budget", "50%", "--out", "rows.csv"], "train"),
    (["export", "RUN", "bundle", "--budget", "50%"], "onnx"),
    (["bench", "RUN", "--backend", "onnx"], "onnx"),
    (["serve", "RUN"], "serve"),
)


@pytest.mark.parametrize("arguments", WORKS, ids=lambda words: " ".join(words))
def test_what_works_without_extras(base: Path, short: Path, arguments: list[str]) -> None:
    words = [str(short) if word == "RUN" else word for word in arguments]
    assert required(base / "bin" / "exitwise", *words, cwd=base.parent)


@pytest.mark.parametrize(("arguments", "extra"), NEEDS, ids=str)
def test_what_needs_an_extra_names_it_before_anything_is_written(
    base: Path, short: Path, tmp_path: Path, arguments: list[str], extra: str | None
) -> None:
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "b").mkdir()
    for name in ("a", "b"):
        for i in ("one", "two", "three"):
            (tmp_path / "images" / name / f"{i}.ppm").write_bytes(IMAGE)
    own = shutil.copytree(short, tmp_path / "run")  # other tests write to it
    before = contents(tmp_path)
    words = [str(own) if word == "RUN" else word for word in arguments]
    done = run(base / "bin" / "exitwise", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    if extra is not None:
        assert f"pip install 'exitwise[{extra}]'" in done.stderr
    assert contents(tmp_path) == before
