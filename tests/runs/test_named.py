"""Networks by name in runs: their classes, and the preprocessing that the run keeps."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from other_libraries import define_operators
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import exitwise as ew
from exitwise.core.image_files import load_image
from exitwise.models.named.module import NamedModule
from exitwise.runs.data import load_splits, run_preprocessing
from exitwise.runs.named import attach_to_named, build_named_for
from exitwise.runs.options import AttachOptions, DataOptions
from exitwise.runs.run import Run

LOOK = ew.Preprocessing(32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 1.25, "bicubic", True)


def photos(folder: Path, classes: tuple[str, ...] = ("ash", "birch", "cedar"), count: int = 12) -> Path:
    rng = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 90, (40, 56, 3))
            pixels[..., label % 3] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")
    return folder


def small_module(classes: int) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, classes)).eval()


def named_module(classes: tuple[str, ...] | None) -> NamedModule:
    spec = {"module": "timm:small", "num_classes": 3}
    return NamedModule("timm:small", small_module(3), 3, spec, LOOK, torch.rand(2, *LOOK.shape), classes)


@pytest.mark.parametrize(
    ("names", "rows"),
    [(("Cedar", "ash", "birch"), [1, 2, 0]), (("ash", "birch", "oak"), [0, 1, 2]), (None, [0, 1, 2])],
)
def test_the_last_exit_has_the_order_of_the_folders(names: Any, rows: list[int], tmp_path: Path) -> None:
    images, _ = ew.data.load(f"folder:{photos(tmp_path / 'photos')}", size=32)
    named = named_module(names)
    x = torch.rand(4, *LOOK.shape)
    expected = named.module(x)[:, rows]
    splits: Any = SimpleNamespace(train=images, val=images)
    net = attach_to_named(named, AttachOptions(attach="1"), splits, seed=0)
    torch.testing.assert_close(net(x)[-1], expected)
    assert net.spec == {**named.spec, "attach": {"at": ["1"], "head": "mlp"}}


def test_cuts_are_compared_in_the_order_of_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = ew.data.load(f"folder:{photos(tmp_path / 'photos')}", size=32)
    named = replace(named_module(("Cedar", "ash", "birch")), sha256="of the weights before")
    x = torch.rand(4, *LOOK.shape)
    expected = named.module(x)[:, [1, 2, 0]]

    def compare(module: nn.Module, *_: Any, **__: Any) -> Any:
        torch.testing.assert_close(module(x), expected)
        return SimpleNamespace(names=("1",))

    monkeypatch.setattr("exitwise.runs.attached.best_cuts", compare)
    splits: Any = SimpleNamespace(train=images, val=images)
    net = attach_to_named(named, AttachOptions(attach="best"), splits, seed=0)
    torch.testing.assert_close(net(x)[-1], expected)
    assert net.base_sha256 is not None
    with pytest.raises(ew.InputError, match="--last trains it: give auto or names"):
        build_named_for("timm:small", DataOptions("digits"), AttachOptions(attach="best", last=True), 0)


def test_a_run_keeps_the_preprocessing_of_its_network(tmp_path: Path, monkeypatch: Any, exitwise: Command) -> None:
    """With a network made by hand in the place of a library's: images are scaled, cropped and normalized as it says."""
    monkeypatch.setattr("exitwise.runs.new_net.build_named_for", lambda *_: named_module(None))
    folder = photos(tmp_path / "photos")
    run = tmp_path / "run"
    done = exitwise(
        "train-heads", "--data", f"folder:{folder}", "--model", "timm:small", "--exits", 2, "--epochs", 1, "--out", run
    )
    assert done.status == 0, done.err
    assert "scaled to both sides of 40 and cropped to 32 x 32 pixels" in done.err
    assert "normalized with mean 0.1 0.2 0.3, std 0.4 0.5 0.6" in done.err
    assert run_preprocessing(Run(run)) == LOOK
    splits = load_splits(Run(run), None)
    pixels = splits.val.pixels_of(torch.tensor([0]), None, None)[0]
    file = next(iter(splits.val.paths()))
    assert np.array_equal(pixels.numpy(), load_image(file, LOOK))
    assert (splits.val.mean, splits.val.std) == (LOOK.mean, LOOK.std)
    contents = json.loads((run / "run.json").read_text())
    assert contents["model"]["module"] == "timm:small"
    assert contents["data"]["preprocessing"] == LOOK.to_dict()


@pytest.mark.slow
def test_classes_that_differ_are_refused_or_need_a_new_layer(tmp_path: Path, exitwise: Command) -> None:
    define_operators()
    pytest.importorskip("timm")
    module = ew.models.build_named("timm:test_resnet", 4, weights=None).module
    save_file(module.state_dict(), tmp_path / "four.safetensors")
    options = ["--data", f"folder:{photos(tmp_path / 'photos')}", "--model", "timm:test_resnet", "--image-size", 32]
    weights = ["--weights", tmp_path / "four.safetensors"]
    done = exitwise("train-heads", *options, *weights, "--out", tmp_path / "run")
    assert done.status == 2
    assert "'fc.weight' has shape (4, " in done.err or "has shape (4" in done.err
    assert not (tmp_path / "run").exists()
    for command, message in (
        (
            ("train-heads", *options[:2], "--model", "timm:test_resent", "--out", tmp_path / "run"),
            "did you mean 'test_res",
        ),
        (
            ("train-heads", "--data", "digits", "--model", "timm:test_resnet", *weights, "--out", tmp_path / "run"),
            "fit",
        ),
        (("train", *options, "--out", tmp_path / "run"), "could not be loaded"),
        (("train", *options, *weights, "--out", tmp_path / "run"), "has shape (4, "),
        (
            ("train", *options, "--last", "--attach", "best", "--out", tmp_path / "run"),
            "--attach best compares cuts by the last layer",
        ),
        (
            ("collect", tmp_path / "run", *options, "--checkpoint", tmp_path / "four.safetensors"),
            "train-heads --model timm:test_resnet",
        ),
    ):
        done = exitwise(*command)
        assert done.status == 2
        assert message in done.err
        assert len(done.err.strip().splitlines()) == 1


IN_A_PROCESS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from other_libraries import define_operators
define_operators()
from exitwise.cli.app import main
main()
"""


def in_a_new_process(*words: object) -> str:
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", IN_A_PROCESS, tests, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights_of(folder: Path, classes: int) -> Path:
    torch.manual_seed(0)
    module = ew.models.build_named("timm:test_resnet", classes, weights=None, image_size=32).module
    save_file(module.state_dict(), folder / "weights.safetensors")
    return folder / "weights.safetensors"


@pytest.mark.slow
def test_exits_are_trained_together_with_a_network_by_name(tmp_path: Path, exitwise: Command) -> None:
    """From a file of weights to a bundle; every later step is a process of its own, which builds the network again."""
    define_operators()
    pytest.importorskip("timm")
    weights, folder, run = weights_of(tmp_path, 3), photos(tmp_path / "photos", count=30), tmp_path / "run"
    options = ["--data", f"folder:{folder}", "--model", "timm:test_resnet", "--image-size", 32, "--exits", 3]
    options += ["--attach", "auto", "--max-drop", 100, "--epochs", 2, "--weights", weights]
    done = exitwise("train", *options, "--out", run)
    assert done.status == 0, done.err
    contents = json.loads((run / "run.json").read_text())
    look = contents["data"]["preprocessing"]
    assert contents["model"]["module"] == "timm:test_resnet"
    assert len(contents["model"]["attach"]["at"]) == 2
    assert contents["training"]["recipe"]["distill"] == ew.RECIPES["joint"].distill
    assert contents["training"]["weights"] == str(weights)
    original, trained = load_file(run / "original.safetensors"), load_file(run / "net.safetensors")
    plain = load_file(weights)
    body = {name for name in original if name.startswith("stages.") and original[name].dim() == 4}
    assert body
    assert all(any(torch.equal(original[name], value) for value in plain.values()) for name in body)
    assert not all(torch.equal(original[name], trained[name]) for name in body)
    for file in [*(run / "checkpoints").iterdir(), run / "net.safetensors", run / "history.csv"]:
        file.unlink()  # as if the training was killed before its first checkpoint
    in_a_new_process("train", run, "--resume", "--model", "timm:test_resnet")
    again = load_file(run / "net.safetensors")
    assert all(torch.equal(again[name], trained[name]) for name in trained)
    in_a_new_process("collect", run)
    in_a_new_process("evaluate", run, "--budget", "70%", "--method", "T_opt", "--score", "confidence")
    in_a_new_process("export", run, tmp_path / "bundle")
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())["preprocessing"] == look
    by_run, by_bundle = (
        list(csv.DictReader(in_a_new_process("predict", source, folder / "ash").splitlines()))
        for source in (run, tmp_path / "bundle")
    )
    assert len(by_run) == 30
    assert [row["label"] for row in by_run] == [row["label"] for row in by_bundle]


@pytest.mark.slow
def test_a_new_last_layer_is_trained_before_all_layers_are(tmp_path: Path, exitwise: Command) -> None:
    """Weights of two classes, images of three: the teacher is the network with its trained new layer."""
    define_operators()
    pytest.importorskip("timm")
    folder, run = photos(tmp_path / "photos", count=30), tmp_path / "run"
    weights = weights_of(tmp_path, 3)
    state = load_file(weights)
    options = ["--data", f"folder:{folder}", "--model", "timm:test_resnet", "--image-size", 32, "--weights", weights]
    done = exitwise("train", *options, "--last", "--epochs", 1, "--max-drop", 100, "--out", run)
    assert done.status == 0, done.err
    original = load_file(run / "original.safetensors")
    assert original["heads.3.last.weight"].shape == state["fc.weight"].shape
    assert not torch.equal(original["heads.3.last.weight"], state["fc.weight"])
    resumed = exitwise("train", run, "--resume", "--last")
    assert (resumed.status, resumed.err.count("\n")) == (2, 1)
    assert "--last is for a new run" in resumed.err
