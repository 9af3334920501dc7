"""Class folders of image files, compared with direct use of Pillow."""

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import class_folders, picture
from PIL import Image

import exitwise as ew
from exitwise import data
from exitwise.core.image_files import load_image
from exitwise.data import Augmentation, folders
from exitwise.data.folders import ImageFileSet


def pixels(dataset: ImageFileSet) -> np.ndarray:
    """Return all images (n, height, width, 3)."""
    return dataset.pixels_of(torch.arange(len(dataset)), None, None).permute(0, 2, 3, 1).numpy()


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(ew.InputError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


# -- which files


def test_imagenet_is_train_and_val(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", ("n01", "n02", "n03"), each=4)
    class_folders(tmp_path / "val", ("n01", "n02", "n03"), each=2)
    train, test = data.load("imagenet", tmp_path, size=16)
    assert (len(train), len(test), train.shape) == (12, 6, (3, 16, 16))
    assert train.classes == test.classes == ("n01", "n02", "n03")
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert train.files[4] == "n02/0.png"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: shutil.rmtree(root / "val"),
            "has no val/; exitwise cannot download ImageNet: get it from image-net.org",
        ),
        (lambda root: shutil.rmtree(root / "train"), "has no train/"),
        (lambda root: picture(root / "val" / "emu" / "0.png"), "the 2 class folders of train, but differs in 'emu'"),
        (lambda root: shutil.rmtree(root / "train" / "cat"), "at least two class folders, but holds 1"),
        (lambda root: shutil.rmtree(root / "val" / "cat"), "at least two class folders, but holds 1"),
        (lambda root: (root / "train" / "ant").mkdir(), "ant is a class folder without images"),
        (lambda root: (root / "val" / "cat").rename(root / "val" / "Cat"), "differs in 'Cat'"),
    ],
)
def test_folders_that_are_not_as_they_must_be_are_named(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    class_folders(tmp_path / "train")
    class_folders(tmp_path / "val")
    change(tmp_path)
    error = refused(lambda: data.load("imagenet", tmp_path))
    assert message in error
    assert str(tmp_path) in error


@pytest.mark.parametrize("inside", ["", "256_ObjectCategories"])
def test_caltechs_numbers_order_its_classes(tmp_path: Path, inside: str, caplog: pytest.LogCaptureFixture) -> None:
    names = ("001.ak47", "002.american-flag", "056.dog", "257.clutter")
    class_folders(tmp_path / inside, names, each=2)
    for name in ("RENAME2", "greg.txt", "Thumbs.db"):
        (tmp_path / inside / "056.dog" / name).write_text("not an image")
    with caplog.at_level(logging.WARNING):
        everything, test = data.load("caltech256", tmp_path, size=8)
    assert test is None
    assert everything.classes == ("ak47", "american-flag", "dog", "clutter")
    assert everything.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / inside}: skipped 3 files that are not images"
    ]


@pytest.mark.parametrize("part", ["test", "val"])
def test_ones_own_folder_with_a_test_set(tmp_path: Path, part: str) -> None:
    class_folders(tmp_path / "train", each=5)
    class_folders(tmp_path / part, each=2)
    train, test = data.load(f"folder:{tmp_path}", size=8)
    assert (len(train), len(test), train.classes) == (10, 4, ("cat", "dog"))


def test_ones_own_folder_without_a_test_set(tmp_path: Path) -> None:
    everything, test = data.load(f"folder:{class_folders(tmp_path)}", size=8)
    assert test is None
    assert everything.files == tuple(f"{name}/{number}.png" for name in ("cat", "dog") for number in range(3))


@pytest.mark.parametrize("name", ["nowhere", "cat/0.png"])
def test_what_is_no_folder_is_said(tmp_path: Path, name: str) -> None:
    class_folders(tmp_path)
    assert f"{tmp_path / name} must be a folder" in refused(lambda: data.load(f"folder:{tmp_path / name}"))


def test_hidden_folders_are_no_classes_and_suffixes_have_any_case(tmp_path: Path) -> None:
    class_folders(tmp_path, each=1)
    (tmp_path / ".cache").mkdir()
    picture(tmp_path / "cat" / "deep" / "inside" / "x.png").save(tmp_path / "cat" / "B.JPEG")
    dataset, _ = data.load(f"folder:{tmp_path}", size=8)
    assert dataset.classes == ("cat", "dog")
    assert sorted(dataset.files) == ["cat/0.png", "cat/B.JPEG", "cat/deep/inside/x.png", "dog/0.png"]


ODD = ("ünï çødé.png", "日本語.png", "a b  c.png", "-rf.png", "#%2F?.png", "dot.dot.png", "'\"$(x).png", "e\u0301.png")


def test_odd_names_are_files_like_others(tmp_path: Path) -> None:
    class_folders(tmp_path, ("Straße", "кот"), each=1)
    expected = {name: np.asarray(picture(tmp_path / "кот" / name, 9, 9, seed=i)) for i, name in enumerate(ODD)}
    dataset, _ = data.load(f"folder:{tmp_path}", size=9)
    assert set(dataset.files) == {"Straße/0.png", "кот/0.png", *(f"кот/{name}" for name in ODD)}
    assert len(set(dataset.fingerprints().tolist())) == len(dataset)
    assert dataset.index.tolist() == list(range(10))
    for where, file in enumerate(dataset.files):
        if (name := file.split("/")[1]) in expected:
            shown = Image.fromarray(expected[name])
            assert np.array_equal(pixels(dataset[torch.tensor([where])])[0], center_crop(shown, 9))


def test_names_that_are_no_text_are_files_too(tmp_path: Path) -> None:
    class_folders(tmp_path, each=1)
    odd = os.fsencode(tmp_path / "cat") + b"/\xff\xfe.png"
    try:
        shutil.copy(os.fsencode(tmp_path / "cat" / "0.png"), odd)
    except OSError:
        pytest.skip("this file system has no names that are not UTF-8")
    dataset, _ = data.load(f"folder:{tmp_path}", size=8)
    assert len(set(dataset.fingerprints().tolist())) == len(pixels(dataset)) == 3


def test_order_and_fingerprints_depend_on_names_alone(tmp_path: Path) -> None:
    names = [f"{letter}/{number}.png" for letter in "abc" for number in range(7)]
    content = tmp_path / "x.png"
    picture(content)
    sets = []
    for folder, seed in (("first", 1), ("second/far away", 2)):
        random.Random(seed).shuffle(names)  # directories list files in the order of their creation
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(content, tmp_path / folder / name)
        sets.append(data.load(f"folder:{tmp_path / folder}", size=8)[0])
    first, second = sets
    assert first.files == second.files == tuple(sorted(names))
    assert torch.equal(first.fingerprints(), second.fingerprints())
    some = torch.tensor([20, 3, 11])
    assert torch.equal(first[some].fingerprints(), first.fingerprints()[some])
    assert (first[some].index.tolist(), first[some].labels.tolist()) == ([20, 3, 11], [2, 0, 1])


# -- unreadable files


def cut_jpeg(path: Path) -> None:
    picture(path, 60, 60)
    path.write_bytes(path.read_bytes()[:700])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut.jpg": cut_jpeg,
    "empty.png": lambda path: path.touch(),
    "text.jpg": lambda path: path.write_text("not an image"),
    "cut.png": lambda path: (picture(path, 60, 60), path.write_bytes(path.read_bytes()[:500])),
    "floats.tiff": lambda path: Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(path),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, workers: int) -> None:
    class_folders(tmp_path)
    DAMAGE[name](tmp_path / "dog" / name)
    dataset, _ = data.load(f"folder:{tmp_path}", size=8)
    message = refused(lambda: list(data.Batches(dataset, 2, workers)))
    assert message.startswith(f"{tmp_path / 'dog' / name} cannot be read as an image (")
    assert message.endswith("--skip-unreadable skips such files")


def test_unreadable_files_are_left_out_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for part in ("train", "test"):
        class_folders(tmp_path / part)
        for name, damage in DAMAGE.items():
            damage(tmp_path / part / "cat" / name)
    complete, _ = data.load(f"folder:{tmp_path}", size=8)
    with caplog.at_level(logging.WARNING):
        train, test = data.load(f"folder:{tmp_path}", size=8, skip_unreadable=True)
    assert train.files == test.files == tuple(f"{name}/{number}.png" for name in ("cat", "dog") for number in range(3))
    assert [complete.files[position] for position in train.index] == list(train.files)
    lines = [record.getMessage() for record in caplog.records]
    for part in ("train", "test"):
        for name in DAMAGE:
            start = f"skipped: {tmp_path / part / 'cat' / name} cannot be read as an image ("
            assert [line.startswith(start) for line in lines].count(True) == 1
    assert len(lines) == 2 * len(DAMAGE)
    assert not any("--skip-unreadable" in line for line in lines)
    assert len(list(data.Batches(train, 4))) == 2


def test_nothing_readable_at_all_is_an_error(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jpg").touch()
    message = refused(lambda: data.load(f"folder:{tmp_path}", skip_unreadable=True))
    assert "has 2 image files, but none can be read" in message


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(["JPEG", "PNG", "GIF", "BMP", "WEBP", "PPM"]), seed=st.integers(0, 2**32))
def test_damage_anywhere_gives_a_picture_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged.{kind.lower()}"
    rng = random.Random(seed)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 15, 3), dtype=np.uint8)).save(path, kind)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 4, 16])):
        # Not in the header, where a size of billions of pixels would only make the test slow.
        content[rng.randrange(min(30, len(content) - 1), len(content))] = rng.randrange(256)
    path.write_bytes(content[: rng.randrange(len(content)) if rng.random() < 0.3 else None])
    try:
        result, problem = folders.decode(path, 8, None, None), ""
    except ew.InputError as error:
        result, problem = None, str(error)
    if result is None:
        assert problem.startswith(f"{path} cannot be read as an image (")
        assert "\n" not in problem
    else:
        assert result.shape == (8, 8, 3)


# -- scaling and cropping


def center_crop(image: Image.Image, size: int = 224, short: int | None = None) -> np.ndarray:
    """Scale the short side to 256 (for 224) and crop the center, as torchvision's Resize and CenterCrop do."""
    if image.size == (size, size):
        return np.asarray(image)
    short = short or round(size * 256 / 224)
    width, height = image.size
    new = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    left, top = round((new[0] - size) / 2.0), round((new[1] - size) / 2.0)
    return np.asarray(image.resize(new, Image.Resampling.BILINEAR))[top : top + size, left : left + size]


SIZES = [(500, 375), (375, 500), (256, 256), (224, 224), (98, 49), (49, 98), (103, 206), (301, 333), (1, 1), (2, 3)]
LONG = [(17, 1), (400, 31), (31, 400), (640, 41)]


@pytest.mark.parametrize(("width", "height"), SIZES + LONG)
def test_the_test_transform_is_resize_256_and_centre_224(tmp_path: Path, width: int, height: int) -> None:
    image = picture(tmp_path / "a" / "x.png", width, height)
    result = folders.decode(tmp_path / "a" / "x.png", 224, None, None)
    elongated = max(width, height) > 16 * min(width, height)  # then up to rounding
    assert np.abs(result.astype(int) - center_crop(image, 224, 256)).max() <= elongated


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300), size=st.sampled_from([8, 32, 33]))
def test_the_centre_of_any_picture(width: int, height: int, size: int) -> None:
    rng = np.random.default_rng([width, height])
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    result = np.asarray(folders._crop_center(image, size)).astype(int)
    assert np.abs(result - center_crop(image, size)).max() <= (max(width, height) > 16 * min(width, height))


def test_a_line_of_pixels_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The complete resized image would have 2^34 pixels; the check of `resize` keeps Pillow from allocating them."""
    resize = Image.Image.resize

    def checked_resize(image: Image.Image, size: tuple[int, int], *arguments: object, **options: object) -> Image.Image:
        assert size[0] * size[1] <= 16 * 256 * 256
        return resize(image, size, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "resize", checked_resize)
    Image.new("RGB", (2**18, 1), (1, 2, 3)).save(tmp_path / "x.png")
    result = folders.decode(tmp_path / "x.png", 224, None, None)
    assert np.array_equal(result, np.full((224, 224, 3), (1, 2, 3)))


def test_batches_of_files_are_normalised_as_imagenet_is(tmp_path: Path) -> None:
    images = [picture(tmp_path / name / "x.png", 300, 260, seed=i) for i, name in enumerate(("a", "b"))]
    dataset, _ = data.load(f"folder:{tmp_path}")
    ((batch, labels, index),) = data.Batches(dataset, 5)
    expected = np.stack([center_crop(image) for image in images]) / 255
    expected = (expected - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(batch.numpy(), expected.transpose(0, 3, 1, 2), atol=2e-6)
    assert (batch.dtype, labels.tolist(), index.tolist()) == (torch.float32, [0, 1], [0, 1])


MODES = {"L": "png", "1": "png", "LA": "png", "P": "gif", "RGBA": "png", "CMYK": "jpg", "YCbCr": "jpg", "RGB": "bmp"}


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_picture_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a" / f"x.{MODES[mode]}"
    picture(path, 8, 8, mode)
    with Image.open(path) as image:
        expected = image.convert("RGB")
    assert np.array_equal(folders.decode(path, 7, None, None), center_crop(expected, 7))
    if mode in ("L", "LA", "1"):
        assert len(np.unique(np.asarray(expected).reshape(-1, 3) @ [1, -2, 1])) == 1  # grey


def test_a_palette_with_transparent_colours_gives_its_colours_without_a_warning(tmp_path: Path) -> None:
    image = picture(tmp_path / "a" / "x.png", 8, 8, "P")
    image.save(tmp_path / "t.png", transparency=bytes(range(100)))
    expected = folders.decode(tmp_path / "a" / "x.png", 8, None, None)
    assert np.array_equal(folders.decode(tmp_path / "t.png", 8, None, None), expected)


def test_sixteen_bits_of_grey_become_eight(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (8, 8), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    Image.fromarray((values // 256).astype(np.uint8)).save(tmp_path / "flat.png")
    deep, flat = (folders.decode(tmp_path / name, 8, None, None) for name in ("deep.png", "flat.png"))
    assert np.array_equal(deep, flat)
    assert flat.std() > 10


# -- orientation

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}  # what a camera that writes this orientation does to the upright image


def turned(path: Path, upright: Image.Image, orientation: int, **options: object) -> None:
    """Save an image as a camera held at an angle does: turned pixels, and the orientation in EXIF."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = upright.transpose(TURNS[orientation]) if orientation in TURNS else upright
    image.save(path, exif=exif, **options)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_a_photo_is_turned_upright_wherever_it_is_read(tmp_path: Path, orientation: int, suffix: str) -> None:
    upright = picture(tmp_path / "a" / "upright.png", 13, 9)
    turned(tmp_path / f"x.{suffix}", upright, orientation, **({"lossless": True} if suffix == "webp" else {}))
    path = tmp_path / f"x.{suffix}"
    expected = np.asarray(folders._crop_center(upright, 8))
    assert np.array_equal(folders.decode(path, 8, None, None), expected)
    preprocessing = ew.Preprocessing(8, folders.MEAN, folders.STD, folders.MARGIN)
    assert np.array_equal(load_image(path, preprocessing).transpose(1, 2, 0), expected)
    crop = Augmentation(resized_crop=True)
    draws = torch.rand(crop.draws, generator=torch.Generator().manual_seed(0)).tolist()
    plain = folders.decode(tmp_path / "a" / "upright.png", 8, crop, draws)
    assert np.array_equal(folders.decode(path, 8, crop, draws), plain)


def test_sixteen_bits_are_turned_upright_too(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (9, 9), dtype=np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(values).copy()).save(tmp_path / "deep.png", exif=exif)
    assert np.array_equal(folders.decode(tmp_path / "deep.png", 9, None, None)[:, :, 0], values // 256)


@pytest.mark.parametrize("damage", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0II*\0" + b"\xff" * 40])
def test_damaged_exif_leaves_an_image_as_it_is(tmp_path: Path, damage: bytes) -> None:
    image = picture(tmp_path / "a" / "x.png", 9, 9)
    image.save(tmp_path / "x.png", exif=damage)
    assert np.array_equal(folders.decode(tmp_path / "x.png", 9, None, None), np.asarray(image))


def test_only_the_first_frame_of_an_animation_counts(tmp_path: Path) -> None:
    first, second = (picture(tmp_path / "a" / f"{seed}.png", 9, 9, seed=seed) for seed in (1, 2))
    first.save(tmp_path / "x.webp", save_all=True, append_images=[second], lossless=True)
    assert np.array_equal(folders.decode(tmp_path / "x.webp", 9, None, None), np.asarray(first))


def test_transparency_is_ignored(tmp_path: Path) -> None:
    colors = np.random.default_rng(0).integers(0, 256, (9, 9, 4), dtype=np.uint8)
    Image.fromarray(colors).save(tmp_path / "x.png")
    assert np.array_equal(folders.decode(tmp_path / "x.png", 9, None, None), colors[:, :, :3])


# -- augmentation

UNIT = st.floats(0, 1, exclude_max=True, width=32)


@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 2000), height=st.integers(1, 2000), draws=st.lists(UNIT, min_size=40, max_size=40))
def test_a_random_part_lies_in_the_picture_and_has_the_shape_it_may_have(
    width: int, height: int, draws: list[float]
) -> None:
    left, top, right, bottom = folders._random_crop_box(width, height, draws)
    assert all(side == int(side) for side in (left, top, right, bottom))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    slack = 0.5 + 1e-6  # of rounding a side to whole pixels
    low, high = (w - slack) / (h + slack), (w + slack) / max(h - slack, 1e-9)
    assert low <= 4 / 3 * (1 + 1e-9)
    assert high >= 3 / 4 * (1 - 1e-9)
    middle = left == (width - w) // 2 and top == (height - h) // 2 and (w == width or h == height)
    if not middle:
        assert (w + slack) * (h + slack) >= 0.08 * width * height
    assert w * h <= width * height


def test_where_no_part_fits_the_middle_is_taken() -> None:
    largest = [1 - 2**-24] * 40  # the complete area at 4:3, ten times
    assert folders._random_crop_box(100, 400, largest) == (0, 133, 100, 266)
    assert folders._random_crop_box(400, 100, largest) == (133, 0, 266, 100)
    assert folders._random_crop_box(100, 100, largest) == (0, 0, 100, 100)


def test_areas_and_shapes_of_parts_are_spread_as_they_should_be() -> None:
    draws = torch.rand(4000, 40, generator=torch.Generator().manual_seed(0)).tolist()
    boxes = np.array([folders._random_crop_box(1000, 1000, row) for row in draws])
    w, h = (boxes[:, 2:] - boxes[:, :2]).T
    area, shape = w * h / 1e6, np.log(w / h)
    small = area < 0.7  # of these, few do not fit
    assert area.min() == pytest.approx(0.08, abs=0.002)
    assert np.histogram(area[small], 4, (0.08, 0.7))[0] / small.sum() == pytest.approx(0.25, abs=0.04)
    assert np.histogram(shape[small], 4, (-np.log(4 / 3), np.log(4 / 3)))[0] / small.sum() == pytest.approx(
        0.25, abs=0.04
    )
    assert ((boxes[:, 0] == 0) & (area < 0.2)).mean() < 0.01  # not always in the corner


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), flip=st.booleans())
def test_a_part_is_cut_resized_and_flipped(tmp_path_factory: pytest.TempPathFactory, seed: int, flip: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "part.png"
    image = picture(path, 60, 47)
    augmentation = Augmentation(resized_crop=True, flip=flip)
    row = torch.rand(augmentation.draws, generator=torch.Generator().manual_seed(seed)).tolist()
    result = folders.decode(path, 24, augmentation, row).astype(int)
    x0, y0, x1, y1 = (int(side) for side in folders._random_crop_box(60, 47, row[3:]))
    # Pillow's resize of a box reads only the box and the pixels at its edge.
    expected = np.asarray(image.resize((24, 24), Image.Resampling.BILINEAR, box=(x0, y0, x1, y1))).astype(int)
    if flip and row[2] < 0.5:
        expected = expected[:, ::-1]
    assert np.array_equal(result, expected)


@settings(max_examples=25, deadline=None)
@given(draws=st.tuples(UNIT, UNIT, UNIT))
def test_files_are_padded_cropped_and_flipped_too(
    tmp_path_factory: pytest.TempPathFactory, draws: tuple[float, ...]
) -> None:
    path = tmp_path_factory.getbasetemp() / "padded.png"
    image = picture(path, 20, 17)
    result = folders.decode(path, 14, Augmentation(padding=3, flip=True), list(draws))
    padded = np.pad(center_crop(image, 14), ((3, 3), (3, 3), (0, 0)))
    left, top = int(draws[0] * 7), int(draws[1] * 7)
    expected = padded[top : top + 14, left : left + 14]
    assert np.array_equal(result, expected[:, ::-1] if draws[2] < 0.5 else expected)
