"""The page that new users follow: every command on it, in order, on a folder of pictures."""

import csv
from pathlib import Path

import pytest
from conftest import Command
from PIL import Image

from exitwise import data

PAGE = Path(__file__).resolve().parents[1] / "docs" / "start.md"
CLASSES = {0: "cat", 1: "dog", 2: "owl"}


def commands() -> list[list[str]]:
    """What the page has behind its marks, without what is said of it."""
    found = []
    for part in PAGE.read_text(encoding="utf-8").split("<!-- start -->")[1:]:
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


def test_a_folder_of_pictures_ends_as_a_bundle_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
) -> None:
    """As shown, but for the benchmark, which is asked for less."""
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos")
    said = {}
    for words in commands():
        less = ["--backend", "torch", "--batch-size", "8", "--repeats", "1", "--costs-of", "torch:8"]
        done = exitwise(*words, *(less if words[0] == "bench" else []))
        assert done.status == 0, done.err
        said[words[0]] = done
    assert list(said) == ["train", "collect", "calibrate", "evaluate", "report", "bench", "export", "predict"]
    assert "top-1" in said["evaluate"].out
    assert "speed-up" in said["bench"].out
    assert (tmp_path / "runs" / "early" / "report.html").stat().st_size > 100_000
    rows = list(csv.DictReader(said["predict"].out.splitlines()))
    assert sum(row["label"] == "cat" for row in rows) > 0.9 * len(rows) > 100
    assert {row["exit"] for row in rows} & {"0", "1"}  # some stopped early
