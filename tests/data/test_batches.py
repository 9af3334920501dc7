"""Batches against simple loops: content, order, sharding over ranks, and independence of workers."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import image_set
from PIL import Image

import exitwise as ew
from exitwise import data
from exitwise.data import Augmentation, Batches, ImageSet, TrainBatches
from exitwise.data.images import augment_batch

CROP_AND_FLIP = Augmentation(padding=2, flip=True)


@pytest.fixture(scope="module")
def file_set(tmp_path_factory: pytest.TempPathFactory) -> data.ImageDataset:
    root = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (root / name).mkdir()
        for number in range(7):
            Image.fromarray(rng.integers(0, 256, (20, 25, 3), dtype=np.uint8)).save(root / name / f"{number}.png")
    return data.load(f"folder:{root}", size=16)[0]


Tensors = list[tuple[torch.Tensor, ...]]


def same(first: Tensors, second: Tensors) -> bool:
    """Return whether all tensors are bitwise equal and have the same strides: results of nets depend on the layout."""
    return len(first) == len(second) and all(
        torch.equal(a, b) and a.stride() == b.stride()
        for left, right in zip(first, second, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def epoch(source: TrainBatches, number: int, start: int = 0, parts: int = 1, mine: range | None = None) -> Tensors:
    """Return all micro-batches of an epoch, in order."""
    batches = source.epoch(number, start, parts, range(parts) if mine is None else mine)
    return [part for batch in batches for part in batch]


# -- augmentation


@settings(max_examples=60, deadline=None)
@given(
    padding=st.integers(0, 5),
    flip=st.booleans(),
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_pictures_are_padded_cropped_and_flipped_one_by_one(
    padding: int, flip: bool, channels: int, height: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(1, 256, (11, channels, height, width), dtype=np.uint8)
    draws = rng.random((11, 3), dtype=np.float32)
    draws[0] = np.nextafter(np.float32(1), np.float32(0))  # the largest possible draw
    draws[1] = 0
    augmented = augment_batch(torch.from_numpy(pixels), Augmentation(padding, flip), torch.from_numpy(draws)).numpy()
    for image, (down, right, flip_draw), result in zip(pixels, draws, augmented, strict=True):
        top, left = int(float(down) * (2 * padding + 1)), int(float(right) * (2 * padding + 1))
        padded = np.zeros((channels, height + 2 * padding, width + 2 * padding), np.uint8)
        padded[:, padding : padding + height, padding : padding + width] = image
        expected = padded[:, top : top + height, left : left + width]
        assert np.array_equal(result, expected[:, :, ::-1] if flip and flip_draw < 0.5 else expected)


@pytest.mark.parametrize("padding", [1, 2, 4])
def test_every_offset_occurs_equally_often_and_half_are_flipped(padding: int) -> None:
    """The position of one bright pixel shows offset and flip."""
    side, n = 24, 9000
    pixels = torch.zeros(n, 1, side, side, dtype=torch.uint8)
    pixels[:, 0, 12, 6] = 255
    source = TrainBatches(
        ImageSet(pixels, torch.zeros(n, dtype=torch.long), torch.arange(n), ("a", "b"), (0.0,), (1.0,)),
        n,
        Augmentation(padding, flip=True),
        seed=0,
    )
    ((images, _),) = epoch(source, 0)
    _, _, rows, columns = (images > 0.5).nonzero().T
    assert len(rows) == n
    flipped = columns > 11
    columns = torch.where(flipped, side - 1 - columns, columns)
    offsets = Counter(zip((rows - 12).tolist(), (columns - 6).tolist(), strict=True))
    steps = range(-padding, padding + 1)
    assert set(offsets) == {(down, right) for down in steps for right in steps}
    expected = n / (2 * padding + 1) ** 2
    assert max(abs(count - expected) for count in offsets.values()) < 5 * expected**0.5
    assert abs(int(flipped.sum()) - n / 2) < 5 * (n / 4) ** 0.5


# -- in order


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 60), batch_size=st.integers(1, 70), world=st.integers(1, 6))
def test_processes_share_batches_without_rest_or_overlap(n: int, batch_size: int, world: int) -> None:
    batches = Batches(image_set(n, side=2), batch_size)
    all_batches = list(batches)
    assert len(batches) == len(all_batches) == -(-n // batch_size)
    assert torch.cat([index for *_, index in all_batches]).tolist() == list(range(n))
    assert all(len(labels) == batch_size for _, labels, _ in all_batches[:-1])
    shards = [list(batches.shard(rank, world)) for rank in range(world)]
    assert [len(shard) for shard in shards] == [len(batches.shard(rank, world)) for rank in range(world)]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    interleaved = [shards[number % world][number // world] for number in range(len(all_batches))]
    assert same(interleaved, all_batches)
    assert sum(map(len, shards)) == len(all_batches)


def test_shares_can_be_shared_again() -> None:
    batches = Batches(image_set(40), 3)
    again = [batch for rank in range(2) for batch in batches.shard(1, 3).shard(rank, 2)]
    assert sorted(index[0].item() for *_, index in again) == [3 * number for number in range(1, 14, 3)]


def test_a_batch_size_of_nothing_is_refused() -> None:
    with pytest.raises(ew.InputError, match="`batch_size` must be a whole number of at least 1, but got 0"):
        Batches(image_set(4), 0)
    for size in (0, 5):
        with pytest.raises(ew.InputError, match=f"from 1 to the 4 training images, but is {size}"):
            TrainBatches(image_set(4), size, CROP_AND_FLIP, 0)


def test_the_validation_split_is_never_augmented(file_set: data.ImageDataset) -> None:
    """Validation images always come from the test transform, in memory and from files."""
    for dataset in (image_set(14), file_set):
        splits = data.HoldOut.random(dataset, 4, 0, 3).apply(dataset, None)
        for part in (splits.val, splits.test):
            pixels = part.pixels_of(torch.arange(len(part)), None, None) / 255
            mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
            first, second = ([images for images, *_ in Batches(part, 2)] for _ in range(2))
            torch.testing.assert_close(torch.cat(first), (pixels - mean) / std)
            assert all(map(torch.equal, first, second))


# -- shuffled


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 50), data_=st.data(), seed=st.integers(0, 2**63 - 1), number=st.integers(0, 300))
def test_an_epoch_has_every_picture_at_most_once(n: int, data_: st.DataObject, seed: int, number: int) -> None:
    batch_size = data_.draw(st.integers(1, n))
    source = TrainBatches(image_set(n, side=2), batch_size, Augmentation(), seed)
    batches = epoch(source, number)
    labels = [label for _, labels in batches for label in labels.tolist()]
    assert len(source) == len(batches) == n // batch_size
    assert len(set(labels)) == len(labels) == len(source) * batch_size
    ((images, *_),) = Batches(source.dataset, n)
    for batch, positions in batches:
        assert torch.equal(batch, images[positions])  # without an augmentation, the images themselves


@pytest.mark.parametrize("parts", [1, 2])
def test_an_epoch_goes_on_where_it_was_left(file_set: data.ImageDataset, parts: int) -> None:
    resized = Augmentation(resized_crop=True, flip=True)
    for dataset, augmentation in ((image_set(23), CROP_AND_FLIP), (file_set, resized)):
        source = TrainBatches(dataset, 4, augmentation, 7)
        complete = epoch(source, 3, parts=parts)
        for start in range(len(source) + 1):
            assert same(epoch(source, 3, start, parts), complete[start * parts :])


@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, 5)), parts=st.sampled_from([1, 2, 3, 4, 6, 12]), number=st.integers(0, 5))
def test_parts_make_up_the_batch_whoever_takes_them(cuts: set[int], parts: int, number: int) -> None:
    source = TrainBatches(image_set(40), 12, CROP_AND_FLIP, 1)
    complete = list(source.epoch(number))
    borders = [0, *sorted(cut for cut in cuts if cut < parts), parts]
    shares = [range(*pair) for pair in pairwise(borders)]
    ranks = [list(source.epoch(number, parts=parts, mine=mine)) for mine in shares]
    for batch, ((images, labels),) in enumerate(complete):
        micro_batches = [micro_batch for rank in ranks for micro_batch in rank[batch]]
        assert [len(rank[batch]) for rank in ranks] == [len(mine) for mine in shares]
        assert {len(labels) for _, labels in micro_batches} == {12 // parts}
        assert torch.equal(torch.cat([images for images, _ in micro_batches]), images)
        assert torch.equal(torch.cat([labels for _, labels in micro_batches]), labels)


def test_two_processes_share_a_batch_of_files(file_set: data.ImageDataset) -> None:
    source = TrainBatches(file_set, 4, Augmentation(resized_crop=True, flip=True), 5)
    complete = epoch(source, 0)
    halves = [epoch(source, 0, parts=2, mine=mine) for mine in (range(0, 1), range(1, 2))]
    for (images, labels), first, second in zip(complete, *halves, strict=True):
        assert torch.equal(torch.cat([first[0], second[0]]), images)
        assert torch.equal(torch.cat([first[1], second[1]]), labels)


def test_a_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ew.InputError, match="a batch of 10 cannot be cut into 4 equal parts"):
        epoch(TrainBatches(image_set(20), 10, CROP_AND_FLIP, 0), 0, parts=4)


def test_order_and_variation_belong_to_seed_and_epoch() -> None:
    dataset = image_set(64)  # a label is the image's position

    def order(seed: int, number: int) -> list[int]:
        batches = epoch(TrainBatches(dataset, 8, CROP_AND_FLIP, seed), number)
        return torch.cat([labels for _, labels in batches]).tolist()

    keys = [(seed, number) for seed in range(4) for number in range(4)]
    assert len({tuple(order(*key)) for key in keys}) == len(keys)
    assert order(2, 3) == order(2, 3)
    same_image = [
        next(
            images[labels == 17][0]
            for images, labels in epoch(TrainBatches(dataset, 8, CROP_AND_FLIP, 0), number)
            if 17 in labels
        )
        for number in range(12)
    ]
    assert len({tuple(image.flatten().tolist()) for image in same_image}) > 8  # of 50 variations, 12 draws


def test_batches_of_an_epoch_vary_differently() -> None:
    """A generator seeded only by the epoch would give every batch the same offsets."""
    pixels = torch.zeros(60, 1, 24, 24, dtype=torch.uint8)
    pixels[:, 0, 12, 6] = 255
    dataset = ImageSet(pixels, torch.arange(60), torch.arange(60), ("a", "b"), (0.0,), (1.0,))
    batches = epoch(TrainBatches(dataset, 10, Augmentation(4, flip=True), 0), 0)
    assert len({tuple((images > 0).nonzero().flatten().tolist()) for images, _ in batches}) == 6


# -- workers


def test_workers_change_nothing(file_set: data.ImageDataset) -> None:
    resized = Augmentation(resized_crop=True, padding=1, flip=True)
    for dataset, augmentation in ((image_set(14), CROP_AND_FLIP), (file_set, resized)):
        assert same(list(Batches(dataset, 4, workers=2)), list(Batches(dataset, 4)))
        sources = (TrainBatches(dataset, 4, augmentation, 3, workers) for workers in (0, 2))
        without_workers, with_workers = (epoch(source, 2, 1, 2, range(1, 2)) for source in sources)
        assert same(with_workers, without_workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_own_random_numbers_are_left_alone(workers: int) -> None:
    """Dropout draws from them: a run must not depend on its workers."""
    before = torch.get_rng_state()
    list(Batches(image_set(6), 2, workers))
    epoch(TrainBatches(image_set(6), 2, CROP_AND_FLIP, 0, workers), 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_come_out_of_workers_as_one_line(tmp_path: Path, workers: int) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (9, 9)).save(tmp_path / name / f"{number}.png")
    dataset, _ = data.load(f"folder:{tmp_path}", size=8)
    (tmp_path / "b" / "1.png").unlink()  # after it was listed
    source = TrainBatches(dataset, 2, Augmentation(flip=True), 0, workers)
    for batches in (iter(Batches(dataset, 2, workers)), source.epoch(0)):
        with pytest.raises(ew.InputError) as error:
            list(batches)
        assert isinstance(error.value, ew.InputError)
        assert str(error.value).startswith(f"{tmp_path / 'b' / '1.png'} cannot be read as an image (")
        assert "\n" not in str(error.value)
