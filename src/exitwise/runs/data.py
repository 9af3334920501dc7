"""Images of a run: its dataset, its split, and the preprocessing of other images like them."""

from pathlib import Path
from typing import Any

from exitwise import data
from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.runs.options import DataOptions
from exitwise.runs.run import Run

DEFAULT_IMAGE_SIZE = 224  # of images from files, for nets without a preset


def load_new_data(options: DataOptions, net_size: int) -> tuple[data.HoldOut, data.Splits[Any], dict[str, Any]]:
    """Load and split the dataset of a new run.

    Args:
        options: The dataset and its split; None means the dataset's own value.
        net_size: Size of images from files, unless `options` has one.

    Returns:
        The held-out samples, the images of every split, and the entry `data` of run.json.
    """
    name = str(options.data)
    dataset = data.get_dataset(name)
    size = options.image_size or net_size
    train, test = data.load(name, options.root, size, options.skip_unreadable, options.download)
    if test is not None and options.test_size is not None:
        raise InputError(f"`--test-size` is for data without a test set, but {name} has one")
    val_size = _split_size(options.val_size, dataset.val_size, len(train))
    test_size = _split_size(options.test_size, dataset.test_size, len(train)) if test is None else 0
    split_seed = options.split_seed or 0
    held_out = data.HoldOut.random(train, val_size, split_seed, test_size)
    root = None if options.root is None else str(options.root.resolve())
    metadata = {"name": absolute_name(name), "root": root, "split_seed": split_seed, "image_size": size}
    if options.skip_unreadable:
        metadata["skip_unreadable"] = True
    return held_out, held_out.apply(train, test), metadata


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
    train, test = data.load(
        metadata["name"], root or metadata.get("root"), _image_size(run), bool(metadata.get("skip_unreadable"))
    )
    return data.HoldOut.load(run.split_file).apply(train, test)


def run_preprocessing(run: Run) -> Preprocessing:
    """Return the preprocessing that turns any image into one like those that the run's net was trained on."""
    return data.get_dataset(run.metadata["data"]["name"]).preprocessing(_image_size(run))


def _image_size(run: Run) -> int:
    size = run.metadata["data"].get("image_size") or DEFAULT_IMAGE_SIZE
    if not isinstance(size, int):
        raise InputError(f"{run.directory / 'run.json'} must give a whole number as image_size, but gives {size!r}")
    return size
