"""Images of a new run: folders train, val and test, sizes, and signs of leaks."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from image_files import class_folders, picture
from PIL import Image

import exitwise as ew
from exitwise import data
from exitwise.core.errors import InputError
from exitwise.core.files import write_json
from exitwise.data.folders import find_shared_files, scan_class_folders
from exitwise.runs.data import load_new_data, load_splits
from exitwise.runs.leaks import Accuracy, trace_accuracies, warn_of_accuracies
from exitwise.runs.options import DataOptions
from exitwise.runs.run import Run, run_metadata


def folders(root: Path, **each: int) -> str:
    """Write class folders of different images for every part, so many per class, and return the name of the dataset."""
    for part, count in each.items():
        for label, name in enumerate(("cat", "dog")):
            for number in range(count):
                seed = 1000 * sum(part.encode()) + 100 * label + number
                picture(root / part / name / f"{number}.png", 8, 8, seed=seed)
    return f"folder:{root}"


def paths(images: Any) -> set[str]:
    return {str(path) for path in images.paths()}


def reopened(run: Path, held_out: data.HoldOut, metadata: dict[str, Any]) -> data.Splits[Any]:
    """Return the splits of a run with this split and this entry `data`."""
    run.mkdir()
    write_json(run / "run.json", run_metadata({"net": "mine:net"}, metadata))
    held_out.save(run / "split.safetensors")
    return load_splits(Run(run), None)


def same(first: data.Splits[Any], second: data.Splits[Any]) -> bool:
    pairs = zip(vars(first).values(), vars(second).values(), strict=True)
    return all(list(a.paths()) == list(b.paths()) for a, b in pairs)


# -- train, val and test


def test_three_folders_are_the_three_splits(tmp_path: Path) -> None:
    name = folders(tmp_path / "d", train=5, val=3, test=2)
    held_out, splits, metadata = load_new_data(DataOptions(name), 8)
    for part in ("train", "val", "test"):
        assert paths(getattr(splits, part)) == {str(path) for path in (tmp_path / "d" / part).rglob("*.png")}
    assert same(splits, reopened(tmp_path / "run", held_out, metadata))


def test_val_without_test_is_split_for_both(tmp_path: Path) -> None:
    """A network that was trained on train/ has not seen val/: no image of train/ may calibrate or test it."""
    name = folders(tmp_path / "d", train=5, val=6)
    held_out, splits, metadata = load_new_data(DataOptions(name), 8)
    assert len(splits.train) == 10
    assert len(splits.val) == len(splits.test) == 6
    assert not paths(splits.val) & paths(splits.test)
    assert paths(splits.val) | paths(splits.test) == {str(path) for path in (tmp_path / "d" / "val").rglob("*.png")}
    assert same(splits, reopened(tmp_path / "run", held_out, metadata))
    _, other, _ = load_new_data(DataOptions(name, split_seed=1, val_size=3), 8)
    assert (len(other.val), len(other.test)) == (3, 9)


def test_test_without_val_holds_out_of_train(tmp_path: Path) -> None:
    name = folders(tmp_path / "d", train=10, test=3)
    held_out, splits, metadata = load_new_data(DataOptions(name), 8)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (18, 2, 6)
    assert paths(splits.test) == {str(path) for path in (tmp_path / "d" / "test").rglob("*.png")}
    assert same(splits, reopened(tmp_path / "run", held_out, metadata))


def test_val_and_test_without_train(tmp_path: Path) -> None:
    """Of a network that was trained elsewhere: heads and curvature take images of val/ that are not for calibration."""
    name = folders(tmp_path / "d", val=10, test=3)
    held_out, splits, metadata = load_new_data(DataOptions(name, val_size=8), 8)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (12, 8, 6)
    assert splits.train.root == splits.val.root == tmp_path / "d" / "val"
    assert splits.test.root == tmp_path / "d" / "test"
    assert same(splits, reopened(tmp_path / "run", held_out, metadata))


@pytest.mark.parametrize("prefix", ["", "folder:"])
def test_folders_elsewhere(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = folders(tmp_path / "d", train=5, val=3, test=2)
    folders(tmp_path, a=4, b=6)
    monkeypatch.chdir(tmp_path)
    options = DataOptions("folder:d/train", val_data=f"{prefix}a", test_data=f"{prefix}b")
    held_out, splits, metadata = load_new_data(options, 8)
    assert [len(part) for part in vars(splits).values()] == [10, 8, 12]
    monkeypatch.chdir("/")
    loaded = reopened(tmp_path / "run", held_out, metadata)
    assert paths(loaded.val) == {str(path) for path in (tmp_path / "a").rglob("*.png")}
    assert paths(loaded.test) == {str(path) for path in (tmp_path / "b").rglob("*.png")}
    _, own, _ = load_new_data(DataOptions(name, val_data=str(tmp_path / "a")), 8)  # before the folder's own val/
    assert (len(own.train), own.val.root, own.test.root.name) == (10, tmp_path / "a", "test")
    held_out, own, metadata = load_new_data(DataOptions(f"{name}/train", test_data=str(tmp_path / "b")), 8)
    assert (len(own.train), len(own.val), own.test.root) == (9, 1, tmp_path / "b")
    assert same(own, reopened(tmp_path / "run2", held_out, metadata))


def test_one_unseen_folder_for_calibration_and_test(tmp_path: Path) -> None:
    folders(tmp_path, train=5, unseen=6)
    options = DataOptions(f"folder:{tmp_path / 'train'}", val_data=str(tmp_path / "unseen"))
    held_out, splits, metadata = load_new_data(options, 8)
    assert [len(part) for part in vars(splits).values()] == [10, 6, 6]
    assert {splits.val.root.name, splits.test.root.name} == {"unseen"}
    assert not paths(splits.val) & paths(splits.test)
    assert same(splits, reopened(tmp_path / "run", held_out, metadata))


def test_runs_of_earlier_versions_keep_their_splits(tmp_path: Path) -> None:
    """They held out validation images from train/, and tested on test/ or else val/."""
    for name, each in (("three", {"train": 5, "val": 3, "test": 2}), ("two", {"train": 5, "val": 3})):
        dataset = folders(tmp_path / name, **each)
        train, test = data.load(dataset, size=8)
        held_out = data.HoldOut.random(train, 2, 0)
        metadata = {"name": dataset, "root": None, "split_seed": 0, "image_size": 8}
        loaded = reopened(tmp_path / f"run-{name}", held_out, metadata)
        assert same(loaded, held_out.apply(train, test))
        assert loaded.val.root.name == "train"
        assert loaded.test.root.name == ("test" if name == "three" else "val")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"val_data": "d/train"}, "d/train holds the training images: validation and test images must be others"),
        ({"val_data": "nowhere"}, "nowhere must be a folder with a folder per class"),
        ({"test_data": "other"}, "must have the 2 class folders of --data, but differs in 'emu'"),
        ({"val_data": "more", "val_size": 9}, "6 images cannot be split into 9 for validation and 0 for testing"),
        ({"test_data": "more", "test_size": 2}, "`--test-size` is for data without a test set"),
    ],
)
def test_what_cannot_be_split(
    tmp_path: Path, options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders(tmp_path / "d", train=5, test=2)
    folders(tmp_path, more=3)
    class_folders(tmp_path / "other", ("cat", "dog", "emu"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ew.InputError, match=problem):
        load_new_data(DataOptions("folder:d", **options), 8)


def test_only_image_files_have_folders_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ew.InputError, match="are for image files, but digits is not"):
        load_new_data(DataOptions("digits", val_data=str(tmp_path)), 8)


# -- shared images


def test_images_that_splits_share_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name, root = folders(tmp_path / "d", train=5, val=3, test=2), tmp_path / "d"
    with caplog.at_level(logging.WARNING):
        load_new_data(DataOptions(name), 8)
    assert not caplog.records
    shutil.copy(root / "train" / "cat" / "4.png", root / "val" / "dog" / "copy.png")
    shutil.copy(root / "val" / "cat" / "0.png", root / "test" / "cat" / "0.png")
    with caplog.at_level(logging.WARNING):
        load_new_data(DataOptions(name), 8)
    [record] = caplog.records
    line = record.getMessage()
    assert "1 of 7 validation images are also training images (such as " in line
    assert "/d/val/dog/copy.png and " in line
    assert "1 of 4 test images are also validation images" in line
    assert "will look too good" in line
    assert "\n" not in line


def test_shared_images_are_named_in_a_short_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    name = folders(tmp_path / "d", train=5, val=3, test=2)
    shutil.copytree(tmp_path / "d" / "train", tmp_path / "copy")
    with caplog.at_level(logging.WARNING):
        load_new_data(DataOptions(name, val_data="copy"), 8)
    line = caplog.records[-1].getMessage()
    assert "validation images are also training images (such as copy/cat/" in line
    assert str(tmp_path) not in line
    caplog.clear()
    long = Path("d" * 120, "e" * 120)
    shutil.copytree(tmp_path / "d" / "train", long)
    with caplog.at_level(logging.WARNING):
        load_new_data(DataOptions(name, val_data=str(long), test_data="copy"), 8)
    line = caplog.records[-1].getMessage()
    assert line.count("such as ...") == 1
    assert len(line) <= 300


def test_a_folder_with_one_part_names_it(tmp_path: Path) -> None:
    folders(tmp_path / "d", val=3)
    with pytest.raises(InputError, match=r"d holds only val/: name \S+/d/val instead"):
        load_new_data(DataOptions(f"folder:{tmp_path / 'd'}"), 8)


def test_only_equal_contents_are_shared(tmp_path: Path) -> None:
    """Files of equal size and equal ends that differ in between are not."""
    for part, middle in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            content = bytes(20_000) + (middle if name == "cat" else part.encode()) + bytes(20_000)
            (tmp_path / part / name / "0.png").write_bytes(content)
    a, b, c = (scan_class_folders(tmp_path / part, 8) for part in "abc")
    assert find_shared_files(a, b) == []
    assert find_shared_files(a, c) == [(tmp_path / "a" / "cat" / "0.png", tmp_path / "c" / "cat" / "0.png")]


# -- accuracies


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((("validation", 1.0, 1000), ("test", 0.934, 1000), ("training", 1.0, 1000)), "trained on the validation"),
        ((("validation", 0.93, 1000), ("test", 1.0, 1000)), "trained on the test images"),
        ((("validation", 0.93, 1000), ("test", 0.94, 1000), ("training", 1.0, 1000)), "has seen the training images"),
        ((("validation", 1.0, 1000), ("test", 1.0, 1000)), "calibration and results mean nothing"),
        ((("validation", 0.11, 1000), ("test", 0.10, 1000)), "as often as guessing among 10 classes"),
        ((("validation", 0.80, 300), ("test", 0.75, 300), ("training", 0.82, 1000)), ""),  # may be chance
        ((("validation", 0.2, 10), ("test", 0.1, 10)), ""),
        ((("validation", 0.2, 20), ("test", 0.126, 500)), "12.6% of the test images, about as often as guessing"),
    ],
)
def test_accuracies_that_tell_of_a_leak(
    values: tuple[tuple[str, float, int], ...], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_accuracies([Accuracy(*value) for value in values], 10)
    assert len(caplog.records) == bool(words)
    assert words in "".join(record.getMessage() for record in caplog.records)
    assert all(len(record.getMessage()) <= 300 for record in caplog.records)


def test_accuracies_of_a_trace() -> None:
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    plain = ew.calibrate(trace, "MSDNet (vanilla)")
    for accuracy, split in zip(trace_accuracies(trace), (trace.val, trace.test), strict=True):
        *_, last = plain.predict(split).exits()
        expected = (torch.as_tensor(last.probs).argmax(1) == split.labels).float().mean()
        assert accuracy.value == pytest.approx(float(expected), abs=1e-6)
        assert accuracy.samples == len(split)


# -- commands

NET = """
import torch
import exitwise as ew
from torch import nn


def net(sign=1.0):
    last = nn.Linear(3, 2)
    with torch.no_grad():
        last.weight.copy_(sign * torch.tensor([[-1.0] * 3, [1.0] * 3]))
        last.bias.zero_()
    heads = [ew.Head(nn.Identity(), nn.Linear(3, 2)), ew.Head(nn.Identity(), last)]
    return ew.MultiExitNet([nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Identity()], heads)


def blind():
    return net(0.0)
"""


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Dark cats and bright dogs of 16 x 16, and a module with a net that tells them apart."""
    rng = np.random.default_rng(0)
    for name, low in (("cat", 0), ("dog", 128)):
        for number in range(300):
            path = tmp_path / "photos" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(low, low + 120, (16, 16, 3), dtype=np.uint8)).save(path)
    (tmp_path / "brightness.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def messages(done: Any, caplog: pytest.LogCaptureFixture) -> str:
    """Everything that a command says on stderr; pytest takes what goes through logging."""
    return str(done.err) + "".join(record.getMessage() + "\n" for record in caplog.records)


@pytest.mark.slow
def test_the_size_of_the_images_is_taken_and_said(
    photos: Path, exitwise: Command, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--data", "folder:photos", "--net", "brightness:net", "--out", "run", "--epochs", 1)
    done = exitwise("train-heads", *words)
    assert done.status == 0, done.err
    line = (
        "images are 16 x 16 pixels, as in the files, and normalized with mean 0.485 0.456 0.406, std 0.229 0.224 0.225"
    )
    assert f"exitwise: {line}\n" in done.err
    assert Run("run").metadata["data"]["image_size"] == 16
    assert "right on 100.0% of the validation images: if the network was trained on them" in messages(done, caplog)
    collected = exitwise("collect", "run2", "--checkpoint", "run/net.safetensors", *words[:4])
    assert collected.status == 0, collected.err
    assert line in collected.err
    assert Run("run2").metadata["data"]["image_size"] == 16
    given = exitwise("collect", "run3", "--checkpoint", "run/net.safetensors", *words[:4], "--image-size", 12)
    assert "images are scaled to a short side of 14 and cropped to 12 x 12 pixels, and normalized" in given.err
    picture(photos / "cat" / "other.png", 20, 16)
    mixed = exitwise("collect", "run4", "--checkpoint", "run/net.safetensors", *words[:4])
    assert "scaled to a short side of 256 and cropped to 224 x 224 pixels (the files are not squares" in mixed.err


def test_a_net_near_chance_is_told_the_likely_cause(
    photos: Path, exitwise: Command, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--data", "folder:photos", "--net", "brightness:blind", "--epochs", 1)
    done = exitwise("train-heads", *words, "--out", "run")
    assert "as often as guessing among 2 classes: size, crop or normalization" in messages(done, caplog)
    caplog.clear()
    done = exitwise("collect", "run", "--net", "brightness:blind")
    assert "as often as guessing among 2 classes: size, crop or normalization" in messages(done, caplog)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--net brightness:net", "needs --data and --checkpoint, too\n"),
        ("--data folder:photos --checkpoint w.pth", "needs --model or --net, too\n"),
        ("--data folder:photos --model tiny-8 --net brightness:net", "--model and --net exclude each other"),
        (
            "--data folder:photos --net brightness:net",
            "needs --checkpoint, too; if the heads are still to be trained: "
            "`exitwise train-heads --data folder:photos --net brightness:net --out run`\n",
        ),
    ],
)
def test_a_new_run_names_the_options_that_are_missing(
    photos: Path, exitwise: Command, words: str, message: str
) -> None:
    done = exitwise("collect", "run", *words.split())
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert message in done.err


@pytest.mark.slow
def test_a_failed_start_leaves_nothing(photos: Path, exitwise: Command) -> None:
    bad = photos / "cat" / "bad.png"
    bad.write_bytes((photos / "cat" / "0.png").read_bytes()[:60])
    words = ("train", "--data", "folder:photos", "--net", "brightness:net", "--recipe", "digits", "--epochs", 1)
    before = sorted(path.name for path in photos.parent.iterdir())
    failed = exitwise(*words, "--batch-size", 20, "--out", "run")
    assert failed.status == 2
    assert "--skip-unreadable skips such files" in failed.err
    assert sorted(path.name for path in photos.parent.iterdir() if path.name != "__pycache__") == before
    done = exitwise(*words, "--batch-size", 20, "--out", "run", "--skip-unreadable")  # what the message advises
    assert done.status == 0, done.err


@pytest.mark.slow
def test_an_unreadable_held_out_image_leaves_nothing(photos: Path, exitwise: Command) -> None:
    """Validation images are read after the first epoch, when the run has checkpoints; test images by `collect`."""
    shutil.copytree(photos, "val")
    shutil.copytree(photos, "test")
    words = ("train", "--data", "folder:photos", "--val-data", "val", "--test-data", "test", "--net", "brightness:net")
    words = (*words, "--recipe", "digits", "--epochs", 1, "--batch-size", 20, "--out", "run")
    image = Path("val/cat/0.png").read_bytes()
    Path("val/cat/0.png").write_bytes(image[:60])
    failed = exitwise(*words)
    assert failed.status == 2
    assert "val/cat/0.png cannot be read as an image" in failed.err
    assert not Path("run").exists()
    Path("val/cat/0.png").write_bytes(image)
    Path("test/cat/0.png").write_bytes(image[:60])
    assert exitwise(*words).status == 0
    failed = exitwise("collect", "run", "--net", "brightness:net")
    assert failed.status == 2
    assert "replace the file, or make the run again with --skip-unreadable" in failed.err
    assert failed.err.count("--skip-unreadable") == 1
    assert exitwise(*words, "--skip-unreadable", "--force").status == 0
    assert exitwise("collect", "run", "--net", "brightness:net").status == 0


def test_names_in_warnings_are_escaped(photos: Path) -> None:
    from exitwise.cli.train import _OneLineFormatter

    record = logging.LogRecord("x", logging.WARNING, "", 0, "skipped: %s", ("\x1b[2Jcat\n.png",), None)
    assert _OneLineFormatter().format(record) == "exitwise: skipped: \\x1b[2Jcat\\x0a.png"
