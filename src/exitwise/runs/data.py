"""Images of a run: its dataset, its split, and the preprocessing of other images like them."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from exitwise import data
from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.core.rank import is_rank_zero
from exitwise.data.folders import ImageFileSet, common_size, find_parts, scan_class_folders
from exitwise.runs.leaks import warn_of_shared_images
from exitwise.runs.options import DataOptions
from exitwise.runs.run import Run

DEFAULT_IMAGE_SIZE = 224  # of images from files, for nets without a preset and images of several sizes


def load_new_data(
    options: DataOptions,
    net_size: int | None,
    pretrained: bool = False,
    preprocessing: Preprocessing | None = None,
) -> tuple[data.HoldOut, data.Splits[Any], dict[str, Any]]:
    """Load and split the dataset of a new run; print how image files are scaled, cropped and normalized.

    Args:
        options: The dataset and its split; None means the dataset's own value.
        net_size: Size of images from files, unless `options` has one; None for the images' own size, if all are
            squares of one size, or else 224.
        pretrained: Whether the networks were trained elsewhere, perhaps on the train images. Then validation images are
            taken from the test set if there is one, and images without a test set are all for validation and testing.
        preprocessing: The network's own preprocessing, which replaces the dataset's; its size yields to `net_size`.

    Returns:
        The held-out samples, the images of every split, and the entry `data` of run.json.
    """
    name = str(options.data)
    dataset = data.get_dataset(name)
    size = options.image_size or net_size or DEFAULT_IMAGE_SIZE
    train, test = data.load(name, options.root, size, options.skip_unreadable, options.download)
    metadata: dict[str, Any] = {"name": absolute_name(name)}
    metadata["root"] = None if options.root is None else str(options.root.resolve())
    for option, folder in (("val_data", options.val_data), ("test_data", options.test_data)):
        if folder is not None:
            metadata[option] = str(Path(folder.removeprefix("folder:")).resolve())
    val, test = _load_own_sets(metadata, train, test, options.skip_unreadable)
    if preprocessing is not None:
        train, val, test = (_with_preprocessing(images, preprocessing) for images in (train, val, test))
    if isinstance(train, ImageFileSet):
        given = options.image_size or net_size
        train, val, test, size = _choose_size(train, val, test, given)
    seed = options.split_seed or 0
    if pretrained and val is None and test is not None:
        val, test = test, None
        metadata["val_from_test"] = True
    if pretrained and val is None:
        held_out = _hold_out_all(options, train, seed)
    else:
        held_out = _hold_out(options, dataset, train, val, test, seed)
    metadata |= {"split_seed": seed, "image_size": size}
    if preprocessing is not None:
        metadata["preprocessing"] = _preprocessing_of(train).to_dict()
    if pretrained:
        metadata["without_train"] = True
    if options.skip_unreadable:
        metadata["skip_unreadable"] = True
    splits = held_out.apply(train, test, val)
    if name.startswith("folder:") or val is not None:
        warn_of_shared_images(splits)
    return held_out, splits, metadata


def _load_own_sets(metadata: dict[str, Any], train: Any, test: Any, skip_unreadable: bool) -> tuple[Any, Any]:
    """Return the validation and the test set that are not held out from `train`; None for one that is.

    They are the folders `val_data` and `test_data` of run.json, or the parts val/ and test/ of a user's folder. A
    user's val/ without a test/ is not the test set, as it is in `data.load`: it is split into both.
    """
    val_folder, test_folder = metadata.get("val_data"), metadata.get("test_data")
    kind, _, path = metadata["name"].partition(":")
    parts = find_parts(Path(path)) if kind == "folder" else {}
    if "train" in parts and "val" in parts:
        val_folder = val_folder or parts["val"]
        test = test if "test" in parts else None
    if not isinstance(train, ImageFileSet):
        if val_folder or test_folder:
            raise InputError(f"--val-data and --test-data are for image files, but {metadata['name']} is not")
        return None, test

    def load(folder: Any) -> ImageFileSet:
        if Path(folder).resolve() == train.root.resolve():
            raise InputError(f"{folder} holds the training images: validation and test images must be others")
        loaded = scan_class_folders(Path(folder), train.size, train.classes, "--data")
        return loaded.drop_unreadable() if skip_unreadable else loaded

    return load(val_folder) if val_folder else None, load(test_folder) if test_folder else test


def _choose_size(train: Any, val: Any, test: Any, given: int | None) -> tuple[Any, Any, Any, int]:
    """Give all sets of image files one size: the given one, their own, or the default; print which."""
    sets = (train, val, test)
    own = common_size(*(image_set for image_set in sets if image_set is not None))
    size = given or own or DEFAULT_IMAGE_SIZE
    if own == size:
        steps = f"are {size} x {size} pixels, as in the files"
    else:
        default = "" if given else " (the files are not squares of one size; --image-size chooses another)"
        side = "both sides" if train.squash else "a short side"
        steps = f"are scaled to {side} of {round(size * train.margin)} and cropped to {size} x {size} pixels{default}"
    mean, std = (" ".join(f"{value:g}" for value in values) for values in (train.mean, train.std))
    if is_rank_zero():
        print(f"exitwise: images {steps}, and normalized with mean {mean}, std {std}", file=sys.stderr)
    train, val, test = (None if image_set is None else replace(image_set, size=size) for image_set in sets)
    return train, val, test, size


def _hold_out(options: DataOptions, dataset: data.DataSet, train: Any, val: Any, test: Any, seed: int) -> data.HoldOut:
    """Choose the held-out images: of the validation set if there is one, else of the train images."""
    if test is not None and options.test_size is not None:
        raise InputError(f"`--test-size` is for data without a test set, but {options.data} has one")
    if val is None:
        val_size = _split_size(options.val_size, dataset.val_size, len(train))
        test_size = _split_size(options.test_size, dataset.test_size, len(train)) if test is None else 0
        return data.HoldOut.random(train, val_size, seed, test_size)
    if test is not None:
        return data.HoldOut.of_val(val, seed, options.val_size)
    test_size = options.test_size or len(val) - (options.val_size or len(val) // 2)
    return data.HoldOut.of_val(val, seed, options.val_size, test_size)


def _hold_out_all(options: DataOptions, images: Any, seed: int) -> data.HoldOut:
    """Split all images into a half for validation and a half for testing, or into parts of the given sizes."""
    test_size = options.test_size or len(images) - (options.val_size or (len(images) + 1) // 2)
    val_size = options.val_size or len(images) - test_size
    return data.HoldOut.random(images, val_size, seed, test_size, needs_train=False)


def _split_size(requested: int | None, default: int | float, samples: int) -> int:
    """Return the requested number of samples, or the dataset's default, which may be a share of all samples."""
    if requested is not None:
        return requested
    return default if isinstance(default, int) else max(1, round(default * samples))


def absolute_name(name: str) -> str:
    """Return folder:PATH with an absolute path, so that the run finds its images from any working directory."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).resolve()}" if colon else name


def load_splits(run: Run, root: Path | None) -> data.Splits[Any]:
    """Load the images of an existing run in its own split, from `root` or else from where they were."""
    metadata = run.metadata["data"]
    held_out = data.HoldOut.load(run.split_file)
    skip_unreadable = bool(metadata.get("skip_unreadable"))
    train, test = data.load(metadata["name"], root or metadata.get("root"), _image_size(run), skip_unreadable)
    val = None
    if held_out.from_val or metadata.get("test_data"):
        val, test = _load_own_sets(metadata, train, test, skip_unreadable)
    if metadata.get("val_from_test"):
        val, test = test, None
    if "preprocessing" in metadata:
        preprocessing = run_preprocessing(run)
        train, test, val = (_with_preprocessing(images, preprocessing) for images in (train, test, val))
    return held_out.apply(train, test, val)


def _with_preprocessing(images: Any, preprocessing: Preprocessing) -> Any:
    """Return images that are preprocessed as a network needs it; images in memory keep their size."""
    if images is None:
        return None
    if images.shape[0] != len(preprocessing.mean):
        given, taken = images.shape[0], len(preprocessing.mean)
        raise InputError(f"the network takes images of {taken} channels, but those of the data have {given}")
    if isinstance(images, ImageFileSet):
        return images.with_preprocessing(preprocessing)
    return replace(images, mean=preprocessing.mean, std=preprocessing.std)


def _preprocessing_of(images: Any) -> Preprocessing:
    if isinstance(images, ImageFileSet):
        return images.preprocessing
    return Preprocessing(images.shape[-1], images.mean, images.std)


def run_preprocessing(run: Run) -> Preprocessing:
    """Return the preprocessing that turns any image into one like those that the run's net was trained on."""
    own = run.metadata["data"].get("preprocessing")
    if own is None:
        return data.get_dataset(run.metadata["data"]["name"]).preprocessing(_image_size(run))
    if not isinstance(own, dict):
        raise InputError(f"{run.directory / 'run.json'} must describe a preprocessing, but holds {own!r}")
    return Preprocessing.from_dict(own)


def _image_size(run: Run) -> int:
    size = run.metadata["data"].get("image_size") or DEFAULT_IMAGE_SIZE
    if not isinstance(size, int):
        raise InputError(f"{run.directory / 'run.json'} must give a whole number as image_size, but gives {size!r}")
    return size
