"""The pages that new users follow: every command on them, in order, on a folder of pictures."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from paths import ROOT
from PIL import Image
from torch import nn

from exitwise import data

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"
CLASSES = {0: "cat", 1: "dog", 2: "owl"}


def commands(page: str) -> list[list[str]]:
    """What a page has behind its marks, without what is said of it."""
    found = []
    for part in page.split("<!-- start -->")[1:]:
        lines = part.strip("\n").split("\n\n")[0].replace("\\\n", " ").splitlines()
        found += [line.split("#")[0].split()[1:] for line in lines if line.startswith("    exitwise ")]
    return found


def photos(folder: Path) -> None:
    """Digits as picture files, a folder per class."""
    pictures = data.load("digits")[0]
    for place, label in enumerate(pictures.labels.tolist()):
        if label in CLASSES:
            pixels = pictures.pixels_of(pictures.labels.new_tensor([place]), None, None)[0, 0].numpy()
            file = folder / CLASSES[label] / f"{place:04}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((40, 40)).convert("RGB").save(file)


def follow(page: str, folder: Path, exitwise: Command) -> list[str]:
    """As shown, but for the benchmark, which is asked for less; the commands, in order."""
    photos(folder / "photos")
    said = {}
    for words in commands(page):
        less = ["--backend", "torch", "--batch-size", "8", "--repeats", "1", "--costs-of", "torch:8"]
        done = exitwise(*words, *(less if words[0] == "bench" else []))
        assert done.status == 0, done.err
        said[words[0]] = done
    assert "top-1" in said["evaluate"].out
    assert "speed-up" in said["bench"].out
    assert (folder / "runs" / "early" / "report.html").stat().st_size > 100_000
    rows = list(csv.DictReader(said["predict"].out.splitlines()))
    assert sum(row["label"] == "cat" for row in rows) > 0.9 * len(rows) > 100
    assert {row["exit"] for row in rows} & {"0", "1"}  # some stopped early
    return list(said)


AFTERWARDS = ["collect", "calibrate", "evaluate", "report", "bench", "export", "predict"]


def test_a_folder_of_pictures_ends_as_a_bundle_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    assert follow((DOCS / "start.md").read_text(encoding="utf-8"), tmp_path, exitwise) == ["train", *AFTERWARDS]


def test_so_does_a_plain_network_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
) -> None:
    """With the guide's own code as mine.py, and weights that were trained without us."""
    page = (DOCS / "guides" / "network.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    plain, net = blocks[0].split("module = ")[0], next(block for block in blocks if "plain.pth" in block)
    (tmp_path / "mine.py").write_text(plain + net)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(plain, names)
    torch.manual_seed(0)
    torch.save(trained(names["Plain"](classes=3)).state_dict(), "plain.pth")
    assert follow(page, tmp_path, exitwise) == ["train", *AFTERWARDS]


def trained(module: nn.Module) -> nn.Module:
    """On the same pictures, in a loop as anybody would write it."""
    photos(Path("before"))
    pictures = data.load("folder:before", size=32)[0]
    images, labels, _ = next(iter(data.Batches(pictures, len(pictures))))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(3):
        for part in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(images[part]), labels[part]).backward()
            optimizer.step()
    return module.eval()
