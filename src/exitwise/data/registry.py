"""Data sets by name, held as bytes and turned into batches without per-image Python where they fit into memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.data import cifar, digits, fashion_mnist, folders
from exitwise.data.archives import Archive, download
from exitwise.data.images import Pictures

Loaded = tuple[Pictures, Pictures | None]


@dataclass(frozen=True)
class DataSet:
    """A data set by name: how it is read, and what it is trained with unless told otherwise."""

    read: Callable[[Path | None, int], Loaded]  # root and picture size (for files) -> train and test, or all and None
    model: str
    recipe: str
    val_size: int | float  # a number of train pictures, or a share of them
    test_size: int | float = 0  # where it has no test set of its own
    archives: Sequence[Archive] = ()
    size: int | None = None  # of its pictures; None for files, which are scaled to what the net takes
    mean: tuple[float, ...] = folders.MEAN
    std: tuple[float, ...] = folders.STD

    def preprocessing(self, net_size: int) -> Preprocessing:
        """How any picture becomes one like those of the data set."""
        margin = folders.MARGIN if self.size is None else 1.0
        return Preprocessing(self.size or net_size, self.mean, self.std, margin)


def _rooted(read: Callable[[Path, int], Loaded], name: str) -> Callable[[Path | None, int], Loaded]:
    """A reader that cannot do without a root."""

    def checked(root: Path | None, size: int) -> Loaded:
        if root is None:
            raise InputError(f"{name} lies in a folder: say which by --root")
        return read(root, size)

    return checked


DATA_SETS: Mapping[str, DataSet] = {
    "cifar100": DataSet(
        read=_rooted(lambda root, _: cifar.load(cifar.CIFAR100, root), "cifar100"),
        model="cifar100-small",
        recipe="cifar100",
        val_size=5000,
        archives=(cifar.CIFAR100.archive,),
        size=32,
        mean=cifar.CIFAR100.mean,
        std=cifar.CIFAR100.std,
    ),
    "cifar10": DataSet(
        read=_rooted(lambda root, _: cifar.load(cifar.CIFAR10, root), "cifar10"),
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
        read=_rooted(folders.imagenet, "imagenet"), model="imagenet-small", recipe="imagenet", val_size=50_000
    ),
    "caltech256": DataSet(
        read=_rooted(lambda root, size: (folders.caltech256(root, size), None), "caltech256"),
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

_OWN = "folder:"


def data_set(name: str) -> DataSet:
    """What is known about a data set, by its name or as folder:PATH."""
    if name.startswith(_OWN):
        path = Path(name.removeprefix(_OWN))
        return DataSet(
            read=lambda _, size: folders.load_user_folder(path, size),
            model="imagenet-small",
            recipe="caltech256",
            val_size=0.1,
            test_size=0.2,
        )
    if name not in DATA_SETS:
        near = get_close_matches(name, DATA_SETS, n=1, cutoff=0.4)
        near = [f"{_OWN}{name}"] if name and Path(name).is_dir() else near
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(DATA_SETS)} and folder:PATH"
        raise InputError(f"`data` must be the name of a data set, but got {name!r}; {hint}")
    return DATA_SETS[name]


def load(
    name: str, root: str | Path | None = None, size: int = 224, skip_unreadable: bool = False, fetch: bool = False
) -> Loaded:
    """Train and test pictures of a data set; the train pictures still hold the validation split.

    A data set without a test set of its own gives all its pictures and None. `size` is that of pictures from files;
    `skip_unreadable` leaves out those that cannot be decoded; `fetch` downloads what is missing to `root` first.
    """
    known = data_set(name)
    place = None if root is None else Path(root)
    try:
        train, test = known.read(place, size)
    except InputError:
        if not fetch:
            raise
        _fetch(name, known, place)
        train, test = known.read(place, size)
    if skip_unreadable:
        train = train.drop_unreadable() if isinstance(train, folders.ImageFileSet) else train
        test = test.drop_unreadable() if isinstance(test, folders.ImageFileSet) else test
    return train, test


def _fetch(name: str, known: DataSet, root: Path | None) -> None:
    if not known.archives:
        raise InputError(f"{name} cannot be downloaded from here")
    if root is None:
        raise InputError(f"--download needs --root: where to put {name}")
    download(known.archives, root)
    if known.archives == (folders.CALTECH256,) and not (root / "256_ObjectCategories").is_dir():
        _extract(folders.CALTECH256.verify(root), "256_ObjectCategories")


def _extract(file: Path, folder: str) -> None:
    """A folder of an archive, beside it: whole or not at all."""
    import tarfile
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix=f".{folder}.", dir=file.parent) as temporary, tarfile.open(file) as archive:
        archive.extractall(temporary, filter="data")
        (Path(temporary) / folder).rename(file.parent / folder)
