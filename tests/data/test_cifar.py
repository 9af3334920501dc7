"""CIFAR-100's binary layout, and splits that are located in copies."""

from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import write_cifar

import exitwise as ew
from exitwise import data


@pytest.mark.parametrize("inside", ["", "cifar-100-binary"])
def test_records_are_read_as_they_lie(tmp_path: Path, inside: str) -> None:
    records = write_cifar(tmp_path)
    train, test = data.load("cifar100", tmp_path / inside)
    assert (len(train), len(test), train.classes[3]) == (40, 12, "class_3")
    assert train.labels.tolist() == records[:, 1].tolist()
    assert np.array_equal(train.pixels[5, 2].numpy().ravel(), records[5, 2 + 2048 :])


def test_batches_are_normalised_and_cover_everything_once(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    train, _ = data.load("cifar100", tmp_path)
    batches = list(data.Batches(train, 16))
    assert [len(labels) for _, labels, _ in batches] == [16, 16, 8]
    images = torch.cat([images for images, _, _ in batches])
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)))
    torch.testing.assert_close(images, (train.pixels / 255 - mean) / std)
    assert torch.cat([index for *_, index in batches]).tolist() == list(range(40))


def test_a_split_is_the_same_for_a_seed_and_disjoint(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    train, test = data.load("cifar100", tmp_path)
    first, repeated, different = (data.HoldOut.random(train, 10, seed) for seed in (1, 1, 2))
    assert torch.equal(first.val.index, repeated.val.index)
    assert not torch.equal(first.val.index, different.val.index)
    splits = first.apply(train, test)
    assert sorted([*splits.train.index.tolist(), *splits.val.index.tolist()]) == list(range(40))
    assert splits.test is test


def test_a_split_is_found_in_a_copy_of_another_order(tmp_path: Path) -> None:
    records = write_cifar(tmp_path / "a")
    train, test = data.load("cifar100", tmp_path / "a")
    split = data.HoldOut.random(train, 10, 0)
    split.save(tmp_path / "split.safetensors")
    expected = split.apply(train, test).val
    write_cifar(tmp_path / "b")
    np.random.default_rng(9).permutation(records).tofile(tmp_path / "b" / "cifar-100-binary" / "train.bin")
    shuffled, _ = data.load("cifar100", tmp_path / "b")
    splits = data.HoldOut.load(tmp_path / "split.safetensors").apply(shuffled, test)
    assert torch.equal(splits.val.pixels, expected.pixels)
    assert torch.equal(splits.val.labels, expected.labels)
    assert len(splits.train) == 30


def test_a_split_of_another_data_set_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path / "a")
    write_cifar(tmp_path / "b", seed=1)
    split = data.HoldOut.random(data.load("cifar100", tmp_path / "a")[0], 10, 0)
    with pytest.raises(ew.InputError, match="10 of the run's 10 validation images are not among"):
        split.apply(*data.load("cifar100", tmp_path / "b"))


def test_the_zoo_split_is_that_of_its_trace() -> None:
    split = data.HoldOut.load(ew.zoo.path("split.safetensors"))
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    assert trace.val.index is not None
    assert torch.equal(split.val.index, trace.val.index)
    assert len(set(split.val.fingerprints.tolist())) >= len(split.val.index) - 5  # CIFAR-100 has a few duplicate images


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "train.bin").unlink(), "has no cifar-100-binary/train.bin"),
        (lambda folder: (folder / "test.bin").unlink(), "test.bin does not exist"),
        (lambda folder: (folder / "test.bin").write_bytes(b"\0" * 5000), "is it cut off?"),
        (lambda folder: (folder / "test.bin").write_bytes(b"\0\xc8" + b"\0" * 3072), "but has 200"),
        (lambda folder: (folder / "fine_label_names.txt").write_text("cat"), "must name 100 classes"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: object, message: str) -> None:
    write_cifar(tmp_path)
    damage(tmp_path / "cifar-100-binary")  # type: ignore[operator]
    with pytest.raises(ew.InputError) as error:
        data.load("cifar100", tmp_path)
    assert message in str(error.value)


def test_a_mistyped_name_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ew.InputError, match="did you mean 'cifar100'"):
        data.load("cifar-100", tmp_path)


def test_a_folder_is_not_a_data_sets_name_but_nearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digit").mkdir()
    with pytest.raises(ew.InputError, match="did you mean 'folder:digit'"):
        data.load("digit")


def test_the_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    everything, test = data.load("digits")
    assert test is None
    assert everything.pixels.shape == (1797, 1, 8, 8)
    pixels = everything.pixels[:, 0].numpy()
    assert np.array_equal(np.rint(pixels * (16 / 255)), load_digits().images)
    assert everything.labels.tolist() == load_digits().target.tolist()
    assert pixels.max() == 255
    assert (pixels.mean() / 255, pixels.std() / 255) == pytest.approx((*everything.mean, *everything.std), abs=2e-4)


def test_former_names_still_work() -> None:
    assert data.Pictures is data.ImageDataset
    assert data.Shuffled is data.TrainBatches
    assert data.data_set is data.get_dataset
    assert ew.zoo.place is ew.zoo.paper_names
