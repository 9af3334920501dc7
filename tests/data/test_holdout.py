"""Held-out images: sizes, seeds, files, and splits that are located in copies."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import class_folders, image_set
from safetensors.torch import load_file, save_file

import exitwise as ew
from exitwise import data
from exitwise.data import HoldOut, ImageSet
from exitwise.data.holdout import FORMAT
from exitwise.runs.data import load_new_data
from exitwise.runs.options import DataOptions

Tensors = dict[str, torch.Tensor]


def parts(splits: data.Splits[ImageSet]) -> list[list[int]]:
    return [part.index.tolist() for part in (splits.train, splits.val, splits.test)]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(3, 60), data_=st.data(), seed=st.integers(0, 2**63 - 1))
def test_three_parts_have_the_sizes_asked_for_and_share_nothing(n: int, data_: st.DataObject, seed: int) -> None:
    val = data_.draw(st.integers(1, n - 2))
    test = data_.draw(st.integers(1, n - 1 - val))
    dataset = image_set(n, side=3)
    hold_out = HoldOut.random(dataset, val, seed, test)
    splits = parts(hold_out.apply(dataset, None))
    assert [len(part) for part in splits] == [n - val - test, val, test]
    assert sorted(position for part in splits for position in part) == list(range(n))
    assert all(part == sorted(part) for part in splits)
    assert parts(HoldOut.random(dataset, val, seed, test).apply(dataset, None)) == splits


def test_pictures_are_chosen_evenly() -> None:
    dataset, chosen = image_set(20, side=2), Counter[int]()
    for seed in range(600):
        hold_out = HoldOut.random(dataset, 4, seed, 6)
        chosen.update(hold_out.val.index.tolist())
    expected = 600 * 4 / 20
    assert len(chosen) == 20
    assert max(abs(count - expected) for count in chosen.values()) < 5 * expected**0.5


@pytest.mark.parametrize(
    ("val", "test", "message"),
    [
        (0, 0, "must take some of 10 train images, but would take 0"),
        (10, 0, "would take 10"),
        (4, 6, "would take 4 and the test split 6"),
    ],
)
def test_a_split_must_leave_something(val: int, test: int, message: str) -> None:
    with pytest.raises(ew.InputError, match=message):
        HoldOut.random(image_set(10), val, 0, test)


class Numbered(ImageSet):
    """Stand-in for a large dataset: n images of one pixel, with their positions as fingerprints."""

    def fingerprints(self) -> torch.Tensor:
        return self.index


def numbered(n: int) -> Numbered:
    return Numbered(
        torch.zeros(n, 1, 1, 1, dtype=torch.uint8), torch.arange(n) % 2, torch.arange(n), ("a", "b"), (0.0,), (1.0,)
    )


@pytest.mark.parametrize(
    ("name", "train_size", "test_size", "expected"),
    [
        ("cifar100", 50_000, 10_000, (45_000, 5_000, 10_000)),
        ("cifar10", 50_000, 10_000, (45_000, 5_000, 10_000)),
        ("imagenet", 1_281_167, 50_000, (1_231_167, 50_000, 50_000)),
        ("caltech256", 30_607, None, (23_107, 2_500, 5_000)),
        ("fashion-mnist", 60_000, 10_000, (55_000, 5_000, 10_000)),
        ("digits", 1_797, None, (1_000, 297, 500)),
    ],
)
def test_the_splits_are_the_papers(
    monkeypatch: pytest.MonkeyPatch, name: str, train_size: int, test_size: int | None, expected: tuple[int, ...]
) -> None:
    loaded = numbered(train_size), None if test_size is None else numbered(test_size)
    monkeypatch.setattr(data, "load", lambda *_: loaded)
    _, splits, _ = load_new_data(DataOptions(name), 32)
    assert (len(splits.train), len(splits.val), len(splits.test)) == expected


# -- files


@pytest.mark.parametrize("test", [0, 5])
def test_a_split_comes_back_from_its_file(tmp_path: Path, test: int) -> None:
    dataset, test_set = image_set(30), image_set(8)
    hold_out = HoldOut.random(dataset, 7, 3, test)
    hold_out.save(tmp_path / "new" / "split.safetensors")
    loaded = HoldOut.load(tmp_path / "new" / "split.safetensors")
    assert (loaded.test is None) == (test == 0)
    before, after = (split.apply(dataset, None if test else test_set) for split in (hold_out, loaded))
    assert parts(before) == parts(after)
    assert torch.equal(before.val.pixels, after.val.pixels)


def twice(tensors: Tensors) -> None:
    tensors["val.index"][1] = tensors["val.index"][0]
    tensors["val.fingerprint"][1] = tensors["val.fingerprint"][0]


def in_both(tensors: Tensors) -> None:
    tensors["test.index"][0] = tensors["val.index"][0]


DAMAGE: dict[str, Callable[[Tensors], object]] = {
    "must hold val.index and val.fingerprint": lambda tensors: tensors.pop("val.index"),
    "must hold test.index and test.fingerprint": lambda tensors: tensors.pop("test.fingerprint"),
    "one of each per image": lambda tensors: tensors.update({"val.index": tensors["val.index"][:3]}),
    "whole numbers from 0 on": lambda tensors: tensors["val.index"].sub_(100),
    "int64 fingerprints": lambda tensors: tensors.update({"val.fingerprint": tensors["val.fingerprint"].double()}),
    "must hold out each image once, but names some twice": twice,
    "each image once": in_both,
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_splits_are_refused(tmp_path: Path, message: str) -> None:
    path = tmp_path / "split.safetensors"
    HoldOut.random(image_set(30), 7, 3, 5).save(path)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    DAMAGE[message](tensors)
    save_file(tensors, path, metadata={"format": FORMAT, "version": "1"})
    with pytest.raises(ew.InputError) as error:
        HoldOut.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_files_that_are_no_splits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "split.safetensors"
    hold_out = HoldOut.random(image_set(30), 7, 3)
    for metadata, message in (({"format": "pt"}, "format"), ({"format": FORMAT, "version": "3"}, "version '3'")):
        save_file(
            {"val.index": hold_out.val.index, "val.fingerprint": hold_out.val.fingerprints}, path, metadata=metadata
        )
        with pytest.raises(ew.InputError, match=message):
            HoldOut.load(path)
    path.unlink()
    hold_out.save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ew.InputError, match="not a complete safetensors file"):
        HoldOut.load(path)
    with pytest.raises(ew.InputError, match="does not exist"):
        HoldOut.load(tmp_path / "nothing")


# -- located in copies


def shuffled(dataset: ImageSet, seed: int) -> ImageSet:
    """Return the images in another order, with new positions."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(dataset)))
    return ImageSet(
        dataset.pixels[order], dataset.labels[order], dataset.index, dataset.classes, dataset.mean, dataset.std
    )


@settings(max_examples=30, deadline=None)
@given(copies=st.integers(1, 3), seed=st.integers(0, 1000))
def test_a_split_is_found_again_in_another_order(copies: int, seed: int) -> None:
    """Duplicate images, as in CIFAR-100, keep the sizes of the parts in any order, and no image is in two parts."""
    unique = image_set(12)
    pixels = unique.pixels.repeat(copies, 1, 1, 1)
    n = len(pixels)
    dataset = ImageSet(pixels, torch.arange(n), torch.arange(n), unique.classes, unique.mean, unique.std)
    hold_out = HoldOut.random(dataset, n // 3, seed, n // 4)
    before = hold_out.apply(dataset, None)
    after = hold_out.apply(shuffled(dataset, seed), None)
    assert sorted(position for part in parts(after) for position in part) == list(range(n))
    assert torch.equal(after.val.pixels, before.val.pixels)
    assert torch.equal(after.test.pixels, before.test.pixels)
    if copies == 1:
        assert torch.equal(after.val.labels, before.val.labels)


def test_a_split_of_other_pictures_is_refused() -> None:
    hold_out = HoldOut.random(image_set(30), 7, 0, 5)
    with pytest.raises(ew.InputError, match="7 of the run's 7 validation images are not among these 40 train images"):
        hold_out.apply(image_set(40), None)
    smaller = image_set(30)[torch.arange(29)]
    lost = [name for name, part in (("validation", hold_out.val), ("test", hold_out.test)) if part and 29 in part.index]
    if lost:
        with pytest.raises(ew.InputError, match=f"1 of the run's . {lost[0]} images"):
            hold_out.apply(smaller, None)
    remaining = torch.tensor([position for position in range(30) if position != int(hold_out.val.index[2])])
    with pytest.raises(ew.InputError, match="1 of the run's 7 validation images are not among these 29"):
        hold_out.apply(image_set(30)[remaining], None)


def test_a_split_without_test_images_needs_a_test_set() -> None:
    with pytest.raises(ew.InputError, match="holds out no test images"):
        HoldOut.random(image_set(30), 7, 0).apply(image_set(30), None)


def test_a_split_of_files_is_found_where_the_folder_moved_and_grew(tmp_path: Path) -> None:
    class_folders(tmp_path / "a", each=8)
    dataset, _ = data.load(f"folder:{tmp_path / 'a'}", size=8)
    hold_out = HoldOut.random(dataset, 4, 1, 3)
    before = hold_out.apply(dataset, None)
    (tmp_path / "a").rename(tmp_path / "b")
    class_folders(tmp_path / "b", ("ant", "cat", "dog"), each=9)  # other positions
    grown, _ = data.load(f"folder:{tmp_path / 'b'}", size=8)
    after = hold_out.apply(grown, None)
    assert (after.val.files, after.test.files) == (before.val.files, before.test.files)
    assert len(after.train) == 27 - 7
    assert not set(after.train.files) & {*after.val.files, *after.test.files}
