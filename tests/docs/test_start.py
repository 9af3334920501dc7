"""The pages for new users: every command on them runs, in order, on a folder of images."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from other_libraries import define_operators
from paths import ROOT
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import exitwise as ew
from exitwise import data

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"
CLASSES = {0: "cat", 1: "dog", 2: "owl"}


def commands(page: str) -> list[list[str]]:
    """Return the commands after each mark `<!-- start -->`, without comments."""
    found = []
    for part in page.split("<!-- start -->")[1:]:
        lines = part.strip("\n").split("\n\n")[0].replace("\\\n", " ").splitlines()
        found += [line.split("#")[0].split()[1:] for line in lines if line.startswith("    exitwise ")]
    return found


def photos(folder: Path) -> None:
    """Write digits as image files, a folder per class."""
    digits = data.load("digits")[0]
    for position, label in enumerate(digits.labels.tolist()):
        if label in CLASSES:
            pixels = digits.pixels_of(digits.labels.new_tensor([position]), None, None)[0, 0].numpy()
            file = folder / CLASSES[label] / f"{position:04}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((40, 40)).convert("RGB").save(file)


def follow(page: str, folder: Path, exitwise: Command) -> list[str]:
    """Run the commands as shown, with a smaller benchmark, and return their names in order."""
    photos(folder / "photos")
    results = {}
    for words in commands(page):
        smaller = ["--backend", "torch", "--batch-size", "8", "--repeats", "1", "--costs-of", "torch:8"]
        done = exitwise(*words, *(smaller if words[0] == "bench" else []))
        assert done.status == 0, done.err
        results[words[0]] = done
    assert "top-1" in results["evaluate"].out
    assert "speed-up" in results["bench"].out
    assert (folder / "runs" / "early" / "report.html").stat().st_size > 100_000
    rows = list(csv.DictReader(results["predict"].out.splitlines()))
    assert sum(row["label"] == "cat" for row in rows) > 0.9 * len(rows) > 100
    assert {row["exit_from_0"] for row in rows} & {"0", "1"}  # some stopped early
    return list(results)


LATER_STEPS = ["collect", "calibrate", "evaluate", "report", "bench", "export", "predict"]


def test_start_page_leads_from_images_to_a_bundle_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "start.md").read_text(encoding="utf-8")
    assert follow(page, tmp_path, exitwise) == ["train", "train-heads", *LATER_STEPS]


def test_network_guide_leads_from_a_module_to_a_bundle_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
) -> None:
    """Uses the guide's code as mine.py, and weights that were trained without exitwise."""
    page = (DOCS / "guides" / "network.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    module, net = blocks[0].split("module = ")[0], next(block for block in blocks if "weights.pth" in block)
    (tmp_path / "mine.py").write_text(module + net)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(module, names)
    torch.manual_seed(0)
    torch.save(trained(names["SmallNet"](classes=3)).state_dict(), "weights.pth")
    assert follow(page, tmp_path, exitwise) == ["train-heads", *LATER_STEPS]


def test_guide_leads_from_a_timm_network_to_a_bundle_in_five_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
) -> None:
    """Without Python, at a smaller size than the network's own."""
    define_operators()
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    named = ew.models.build_named("timm:resnet18", 3, weights=None, image_size=64)
    assert named.preprocessing is not None
    save_file(trained(named.module, named.preprocessing).state_dict(), "weights.safetensors")
    photos(Path("photos"))
    page = (DOCS / "guides" / "named.md").read_text(encoding="utf-8")
    results = {}
    for words in commands(page):
        smaller = ["--image-size", "64", "--epochs", "5"] if words[0] == "train-heads" else []
        done = exitwise(*words, *smaller)
        assert done.status == 0, done.err
        results[words[0]] = done
    assert list(results) == ["train-heads", "collect", "evaluate", "export", "predict"]
    assert "normalized with mean 0.485 0.456 0.406, std 0.229 0.224 0.225" in results["train-heads"].err
    for file in (Path("runs/early/run.json"), Path("runs/bundle/manifest.json")):  # the same everywhere
        contents = json.loads(file.read_text())
        look = contents["preprocessing"] if file.name == "manifest.json" else contents["data"]["preprocessing"]
        assert ew.Preprocessing.from_dict(look) == named.preprocessing
    rows = list(csv.DictReader(results["predict"].out.splitlines()))
    assert sum(row["label"] == "cat" for row in rows) > 0.9 * len(rows) > 100
    assert exitwise("report", "runs/early").status == 0


def trained(module: nn.Module, preprocessing: ew.Preprocessing | None = None) -> nn.Module:
    """Train on the same images in a simple loop."""
    photos(Path("before"))
    dataset = data.load("folder:before", size=32)[0]
    if preprocessing is not None:
        dataset = dataset.with_preprocessing(preprocessing)
    module.train()
    images, labels, _ = next(iter(data.Batches(dataset, len(dataset))))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(3):
        for part in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(images[part]), labels[part]).backward()
            optimizer.step()
    return module.eval()
