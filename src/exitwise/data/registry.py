"""Datasets by name. Small ones are held in memory as bytes, so that batches need no Python loop over images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exitwise.core.checks import get_named
from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.data import cifar, digits, fashion_mnist, folders
from exitwise.data.archives import Archive, download
from exitwise.data.images import ImageDataset

TrainAndTest = tuple[ImageDataset, ImageDataset | None]


@dataclass(frozen=True)
class DataSet:
    """Reader and training defaults of a dataset.

    Args:
        read: Function from the root folder and the image size (used for image files) to the train and test images, or
            to all images and None.
        model: Default model preset.
        recipe: Default training recipe.
        val_size: Validation images: a number, or a share of the train images.
        test_size: Test images held out if the dataset has no test set: a number, or a share of the train images.
        archives: Files that can be downloaded.
        size: Height and width of the images; None for image files, which are scaled to the net's input size.
        mean: Mean of each channel, for values in 0..1.
        std: Standard deviation of each channel, for values in 0..1.
    """

    read: Callable[[Path | None, int], TrainAndTest]
    model: str
    recipe: str
    val_size: int | float
    test_size: int | float = 0
    archives: Sequence[Archive] = ()
    size: int | None = None
    mean: tuple[float, ...] = folders.MEAN
    std: tuple[float, ...] = folders.STD

    def preprocessing(self, net_size: int) -> Preprocessing:
        """Return the preprocessing that converts any image to the format of the dataset.

        Args:
            net_size: Input size of the net, used for datasets of image files.
        """
        margin = folders.MARGIN if self.size is None else 1.0
        return Preprocessing(self.size or net_size, self.mean, self.std, margin)


def _require_root(read: Callable[[Path, int], TrainAndTest], name: str) -> Callable[[Path | None, int], TrainAndTest]:
    """Return a reader that raises InputError if no root is given."""

    def read_from_root(root: Path | None, size: int) -> TrainAndTest:
        if root is None:
            raise InputError(f"{name} must be read from a folder: pass --root DIR")
        return read(root, size)

    return read_from_root


DATA_SETS: Mapping[str, DataSet] = {
    "cifar100": DataSet(
        read=_require_root(lambda root, _: cifar.load(cifar.CIFAR100, root), "cifar100"),
        model="cifar100-small",
        recipe="cifar100",
        val_size=5000,
        archives=(cifar.CIFAR100.archive,),
        size=32,
        mean=cifar.CIFAR100.mean,
        std=cifar.CIFAR100.std,
    ),
    "cifar10": DataSet(
        read=_require_root(lambda root, _: cifar.load(cifar.CIFAR10, root), "cifar10"),
        model="cifar100-small",
        recipe="cifar100",
        val_size=5000,
        archives=(cifar.CIFAR10.archive,),
        size=32,
        mean=cifar.CIFAR10.mean,
        std=cifar.CIFAR10.std,
    ),
    "fashion-mnist": DataSet(
        read=lambda root, _: fashion_mnist.load(root),
        model="tiny-32",
        recipe="fashion-mnist",
        val_size=5000,
        archives=fashion_mnist.ARCHIVES,
        size=28,
        mean=fashion_mnist.MEAN,
        std=fashion_mnist.STD,
    ),
    "imagenet": DataSet(
        read=_require_root(folders.load_imagenet, "imagenet"),
        model="imagenet-small",
        recipe="imagenet",
        val_size=50_000,
    ),
    "caltech256": DataSet(
        read=_require_root(lambda root, size: (folders.load_caltech256(root, size), None), "caltech256"),
        model="caltech256-small",
        recipe="caltech256",
        val_size=2500,
        test_size=5000,
        archives=(folders.CALTECH256,),
    ),
    "digits": DataSet(
        read=lambda root, size: (digits.load(), None),
        model="tiny-8",
        recipe="digits",
        val_size=297,
        test_size=500,
        size=8,
        mean=digits.MEAN,
        std=digits.STD,
    ),
}

_FOLDER_PREFIX = "folder:"


def get_dataset(name: str) -> DataSet:
    """Return the reader and the training defaults of a dataset.

    Args:
        name: A name in `DATA_SETS`, or folder:PATH for a folder with a folder of images per class.

    Returns:
        The entry of `DATA_SETS`, or a new one for the folder.

    Raises:
        InputError: If the name is unknown; the message suggests the nearest name.

    Example:
        >>> import exitwise as ew
        >>> dataset = ew.data.get_dataset("digits")
        >>> dataset.model, dataset.recipe, dataset.val_size
        ('tiny-8', 'digits', 297)
    """
    if name.startswith(_FOLDER_PREFIX):
        path = Path(name.removeprefix(_FOLDER_PREFIX))
        return DataSet(
            read=lambda _, size: folders.load_user_folder(path, size),
            model="imagenet-small",
            recipe="caltech256",
            val_size=0.1,
            test_size=0.2,
        )
    if name not in DATA_SETS and name and Path(name).is_dir():
        raise InputError(
            f"`data` must be the name of a dataset, but got {name!r}; did you mean {_FOLDER_PREFIX + name!r}?"
        )
    return get_named("data", name, DATA_SETS, "a dataset", f"known are {', '.join(DATA_SETS)} and folder:PATH")


data_set = get_dataset  # its former name


def load(
    name: str, root: str | Path | None = None, size: int = 224, skip_unreadable: bool = False, fetch: bool = False
) -> TrainAndTest:
    """Load the train and test images of a dataset. The train images include the validation split.

    Args:
        name: A name in `DATA_SETS`, or folder:PATH for a folder with a folder of images per class.
        root: Folder of the dataset; not needed for "digits", folder:PATH, and Debian's "fashion-mnist".
        size: Height and width of images from files; other datasets have their own size.
        skip_unreadable: Drop image files that cannot be decoded.
        fetch: Download missing files to `root` first.

    Returns:
        The train and the test images, or all images and None if the dataset has no test set.

    Raises:
        InputError: If the name is unknown, or files are missing or damaged.

    Example:
        >>> import exitwise as ew
        >>> images, test = ew.data.load("digits")
        >>> len(images), images.shape, test
        (1797, (1, 8, 8), None)
    """
    dataset = get_dataset(name)
    root = None if root is None else Path(root)
    try:
        train, test = dataset.read(root, size)
    except InputError:
        if not fetch:
            raise
        _download_archives(name, dataset, root)
        train, test = dataset.read(root, size)
    if skip_unreadable:
        train = train.drop_unreadable() if isinstance(train, folders.ImageFileSet) else train
        test = test.drop_unreadable() if isinstance(test, folders.ImageFileSet) else test
    return train, test


def _download_archives(name: str, dataset: DataSet, root: Path | None) -> None:
    """Download the archives of a dataset to `root`, and extract Caltech-256."""
    if not dataset.archives:
        raise InputError(f"{name} cannot be downloaded by exitwise")
    if root is None:
        raise InputError(f"--download needs --root DIR, the folder for {name}")
    download(dataset.archives, root)
    if dataset.archives == (folders.CALTECH256,) and not (root / "256_ObjectCategories").is_dir():
        _extract_folder(folders.CALTECH256.verify(root), "256_ObjectCategories")


def _extract_folder(file: Path, folder: str) -> None:
    """Extract a folder of an archive beside the archive, atomically."""
    import tarfile
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix=f".{folder}.", dir=file.parent) as temporary, tarfile.open(file) as archive:
        archive.extractall(temporary, filter="data")
        (Path(temporary) / folder).rename(file.parent / folder)
