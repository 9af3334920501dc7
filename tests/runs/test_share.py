"""The classifier of a run is shared: a folder that others load, with a card that shows what was measured."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, once, perform, zoo_run
from hub_stub import COMMIT, running_hub
from other_libraries import define_operators
from PIL import Image
from safetensors.torch import load, load_file, save_file

import exitwise as ew

pytest.importorskip("huggingface_hub")

TESTS = Path(__file__).parent.parent
IN_A_PROCESS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from other_libraries import define_operators
define_operators()
from exitwise.cli.app import main
main()
"""


def make_run(folder: Path) -> None:
    """A run on a small network of timm with weights of its own, evaluated."""
    define_operators()
    rng = np.random.default_rng(0)
    for label, name in enumerate(("ash", "birch", "cedar")):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(30):
            pixels = rng.integers(0, 90, (40, 56, 3))
            pixels[..., label] += i  # the first ones have no colour of their class
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "photos" / name / f"{i}.png")
    torch.manual_seed(0)
    module = ew.models.build_named("timm:test_resnet", 3, weights=None, image_size=32).module
    save_file(module.state_dict(), folder / "base.safetensors")
    first = next(iter(module.state_dict()))
    save_file({**module.state_dict(), first: module.state_dict()[first] + 1}, folder / "other.safetensors")
    options = ["--model", "timm:test_resnet", "--weights", str(folder / "base.safetensors"), "--image-size", "32"]
    run = str(folder / "run")
    perform("train-heads", "--data", f"folder:{folder / 'photos'}", *options, "--epochs", "2", "--out", run)
    perform("collect", run)
    perform("evaluate", run, "--budget", "70%", "--method", "T_opt", "--score", "confidence")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    define_operators()
    pytest.importorskip("timm")
    return once(tmp_path_factory, "run-to-share", make_run)


@pytest.mark.slow
def test_a_run_with_weights_of_a_file_is_shared_as_a_whole_or_as_an_adapter(
    made: Path, tmp_path: Path, exitwise: Command
) -> None:
    run, photos = made / "run", made / "photos" / "ash"
    done = exitwise("share", run, tmp_path / "whole", "--about", "Photos of bark.")
    assert done.status == 0, done.err
    assert "holds all weights" in done.out
    done = exitwise("share", run, tmp_path / "adapter", "--adapter")
    assert "holds an adapter" in done.out
    files = sorted(photos.iterdir())
    expected = list(csv.DictReader(exitwise("predict", run, photos).out.splitlines()))
    by_name = {Path(row["image"]).name: row for row in expected}
    shared: Any = ew.Classifier.from_pretrained(tmp_path / "whole")
    adapter = ew.Classifier.from_pretrained(tmp_path / "adapter", base=made / "base.safetensors")
    for file in files[:5]:
        for classifier in (shared, adapter):
            pred = classifier(np.asarray(Image.open(file)))
            row = by_name[file.name]
            assert (int(pred.predicted[0]), int(pred.exits[0])) == (int(row["predicted"]), int(row["exit_from_0"]))
            # The command runs an optimized net, whose batches have another size.
            assert float(pred.probs.max()) == pytest.approx(float(row["confidence"]), abs=1e-4)
    with pytest.raises(ew.InputError, match="has other weights than those that the adapter was made for"):
        ew.Classifier.from_pretrained(tmp_path / "adapter", base=made / "other.safetensors")
    card = (tmp_path / "whole" / "README.md").read_text()
    results = json.loads((run / "results.json").read_text())
    evaluated = results["evaluation"]["methods"]["T_opt"]["evaluation"]
    assert f"| top-1 accuracy | {evaluated['top1']:.2%} |" in card
    assert "Photos of bark. Images of the folder photos: 63 for training, 9 for calibration" in card
    assert str(made) not in card
    for text in ("Budget curve", "EEFP", "crops the center of 32 x 32", "exitwise[hub,timm]", "`timm:test_resnet`"):
        assert text in card
    rows = [line for line in card.split("Budget curve")[1].split("## Costs")[0].splitlines() if line.startswith("|")]
    assert len(set(rows)) == len(rows) > 3


@pytest.mark.slow
def test_a_run_goes_to_the_hub(made: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_none"}
        environment["HF_HUB_DISABLE_XET"] = "1"
        words = ["share", str(made / "run"), "me/bark", "--hub", "--adapter", "--private"]
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, str(TESTS), *words], capture_output=True, text=True, env=environment
        )
    assert done.returncode == 0, (done.stderr, hub.requests)
    assert COMMIT in done.stdout
    assert set(hub.files["me/bark"]) == {"README.md", "adapter.safetensors", "config.json"}
    assert hub.private["me/bark"]
    tensors = load(hub.files["me/bark"]["adapter.safetensors"])
    assert tensors
    assert not any(key.startswith("net.stages.") for key in tensors)
    config = json.loads(hub.files["me/bark"]["config.json"])
    net = ew.load_net(made / "run" / "net.safetensors")
    assert config["base"]["sha256"] == net.base_sha256


@pytest.mark.slow
def test_mistakes_are_one_line(made: Path, tmp_path: Path, exitwise: Command) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = exitwise("share", made / "run", tmp_path)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "holds other files than a shared classifier: name a new folder" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_preset_is_shared_as_a_whole(tmp_path: Path, exitwise: Command) -> None:
    """The zoo's net: no base network with a name of another library."""
    run = zoo_run(tmp_path / "run", samples=400)
    options = ["--method", "T_opt", "--score", "confidence", "--budget", "50%"]
    done = exitwise("share", run, tmp_path / "shared", *options)
    assert done.status == 0, done.err
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "The dataset cifar100:" in card
    assert "400 for testing" in card
    assert "Its network is `cifar100-small`" in card
    assert "pip install 'exitwise[hub]'" in card
    weights, given = load_file(run / "net.safetensors"), ew.Classifier.from_pretrained(tmp_path / "shared").net
    assert all(torch.equal(weights[name], value) for name, value in given.state_dict().items())
    done = exitwise("share", run, tmp_path / "other", "--adapter", *options)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "an adapter needs a net that `exitwise.attach` made of a name" in done.err
