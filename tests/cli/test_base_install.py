"""Every command without the extras: it works, or names the extra before anything is written.

Imports of the extras are blocked here; `tests/packaging/test_wheel.py` installs the wheel without them.
"""

import sys
from pathlib import Path

import pytest
from command import Command, contents, zoo_run
from image_files import class_folders

EXTRAS = (
    "PIL",
    "httptools",
    "lightning_fabric",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "pooch",
    "prometheus_client",
    "python_multipart",
    "sklearn",
    "starlette",
    "uvicorn",
    "uvloop",
)
NET = ("--model", "cifar100-resnet14", "--image-size", "32")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of few samples and images, in which no extra can be imported."""
    zoo_run(tmp_path / "run", samples=300)
    class_folders(tmp_path / "images")
    (tmp_path / "weights.safetensors").write_bytes((tmp_path / "run" / "net.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    imported = [name for name in sys.modules if name.startswith(tuple(f"{extra}." for extra in EXTRAS))]
    for name in (*EXTRAS, *imported):
        monkeypatch.setitem(sys.modules, name, None)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["predict", "run", "images", "--budget", "50%", "--out", "rows.csv"], "train"),
        (["predict", "run", "images/cat/0.png", "--budget", "50%"], "train"),
        (["train", "--data", "folder:images", "--out", "new"], "train"),
        (["train", "--data", "digits", "--out", "new"], "train"),
        (["train-heads", "--data", "folder:images", *NET, "--weights", "weights.safetensors", "--out", "new"], "train"),
        (["collect", "new", "--data", "folder:images", *NET, "--checkpoint", "weights.safetensors"], "train"),
        (["collect", "new", "--data", "digits", "--model", "tiny-8", "--checkpoint", "weights.safetensors"], "train"),
        (["report", "run", "--static", "figures"], "report"),
        (["export", "run", "bundle", "--budget", "50%"], "onnx"),
        (["bench", "run", "--backend", "onnx"], "onnx"),
        (["score", "images", "--bundle", "bundle", "--out", "scores"], "score"),
        (["serve", "run"], "serve"),
    ],
    ids=lambda words: " ".join(words[:4]) if isinstance(words, list) else words,
)
def test_what_needs_an_extra_names_it_before_anything_is_written(
    place: Path, arguments: list[str], extra: str, exitwise: Command
) -> None:
    before = contents(place)
    done = exitwise(*arguments)
    assert (done.status, done.out) == (2, "")
    assert f"pip install 'exitwise[{extra}]'" in done.err.splitlines()[-1]
    assert contents(place) == before
    assert {path.name for path in place.iterdir()} == {"run", "images", "weights.safetensors"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["models"],
        ["cost", "cifar100-small"],
        ["calibrate", "run", "--method", "T_opt"],
        ["ablate", "run"],
        ["evaluate", "run", "--budget", "50%", "--method", "T_opt"],
        ["report", "run", "--method", "T_opt"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.slow_after_first
def test_what_works_without_extras(place: Path, arguments: list[str], exitwise: Command) -> None:
    done = exitwise(*arguments)
    assert done.status == 0, done.err
