"""Datasets in their published form: archives, IDX files and downloads."""

import gzip
import io
import socket
import struct
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import md5
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import write_cifar
from PIL import Image

import exitwise as ew
from exitwise import data
from exitwise.data import archives, cifar, fashion_mnist
from exitwise.data.archives import Archive


def refused(*arguments: object, **options: object) -> str:
    """Return the one-line message with which `data.load` fails."""
    with pytest.raises(ew.InputError) as error:
        data.load(*arguments, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def digest(path: Path) -> str:
    return md5(path.read_bytes(), usedforsecurity=False).hexdigest()


# -- CIFAR


def write_cifar10(folder: Path, each: int = 6) -> np.ndarray:
    """Write random CIFAR-10 in the official layout; return the train records, in the order of their files."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    records = rng.integers(0, 256, (6, each, 3073), dtype=np.uint8)
    records[..., 0] %= 10
    for number in range(5):
        records[number].tofile(folder / f"data_batch_{number + 1}.bin")
    records[5].tofile(folder / "test_batch.bin")
    (folder / "batches.meta.txt").write_text("\n".join(f"class_{i}" for i in range(10)) + "\n\n")
    return records[:5].reshape(-1, 3073)


def pack(root: Path, layout: cifar.Layout, leave_out: str = "") -> Path:
    """Replace the layout's folder with its archive."""
    path = root / layout.archive.name
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted((root / layout.folder).iterdir()):
            if file.name != leave_out:
                archive.add(file, f"{layout.folder}/{file.name}")
            file.unlink()
    (root / layout.folder).rmdir()
    return path


def accept(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    """Set the official checksum to that of a small archive."""
    layout = getattr(cifar, name)
    monkeypatch.setattr(cifar, name, replace(layout, archive=replace(layout.archive, md5=digest(path))))


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_five_files_become_one_train_set(tmp_path: Path, inside: str) -> None:
    records = write_cifar10(tmp_path / "cifar-10-batches-bin")
    train, test = data.load("cifar10", tmp_path / inside)
    assert (len(train), len(test), train.classes) == (30, 6, tuple(f"class_{i}" for i in range(10)))
    assert train.labels.tolist() == records[:, 0].tolist()
    for record, pixels in zip(records, train.pixels.numpy(), strict=True):  # red, green, blue, each row by row
        assert np.array_equal(pixels[0, 0], record[1:33])
        assert np.array_equal(pixels[1, 31], record[1 + 1024 + 31 * 32 : 1 + 2048])
        assert pixels[2, 7, 9] == record[1 + 2048 + 7 * 32 + 9]


@pytest.mark.parametrize("name", ["CIFAR100", "CIFAR10"])
def test_an_archive_is_read_as_its_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    layout = getattr(cifar, name)
    if name == "CIFAR100":
        write_cifar(tmp_path)
    else:
        write_cifar10(tmp_path / layout.folder)
    expected = data.load(name.lower(), tmp_path)
    accept(monkeypatch, name, pack(tmp_path, layout))
    for loaded, original in zip(data.load(name.lower(), tmp_path), expected, strict=True):
        assert torch.equal(loaded.pixels, original.pixels)
        assert torch.equal(loaded.labels, original.labels)
        assert loaded.classes == original.classes


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    path = pack(tmp_path, cifar.CIFAR100)
    message = refused("cifar100", tmp_path)
    assert str(path) in message
    assert digest(path) in message
    assert "03b5dce01913d631647c71ecec9e9cb8" in message


def test_what_an_archive_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path)
    accept(monkeypatch, "CIFAR100", pack(tmp_path, cifar.CIFAR100, leave_out="test.bin"))
    assert "cifar-100-binary.tar.gz must contain cifar-100-binary/test.bin, but does not" in refused(
        "cifar100", tmp_path
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data_batch_3.bin", b"\1" * 3072, "data_batch_3.bin must hold records of 3073 bytes, but has 3072"),
        ("data_batch_5.bin", b"", "data_batch_5.bin must hold records of 3073 bytes, but has 0"),
        ("test_batch.bin", b"\12" + b"\0" * 3072, "test_batch.bin must hold labels 0..9, but has 10"),
        ("batches.meta.txt", b"\xff\xfe plane", "batches.meta.txt must be a text file in UTF-8"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damage_is_named_in_folder_and_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: bytes, message: str, packed: bool
) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / file).write_bytes(content)
    if packed:
        accept(monkeypatch, "CIFAR10", pack(tmp_path, cifar.CIFAR10))
    assert message in refused("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["cifar100", "cifar10", "fashion-mnist"])
def test_an_empty_root_says_what_to_put_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    for root, state in ((tmp_path / "empty", "has no"), (tmp_path / "nowhere", "does not exist")):
        message = refused(name, root)
        assert f"{root} {state}" in message
        assert "--download" in message
        assert all(archive.name in message for archive in data.DATA_SETS[name].archives)


# -- Fashion-MNIST


def idx(values: np.ndarray) -> bytes:
    """Return the content of an IDX file of bytes."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def fashion_files() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    files = {}
    for part, n in (("train", 9), ("t10k", 4)):
        files[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        files[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, n, dtype=np.uint8)
    return files


def write_fashion(folder: Path, zipped: bool) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    files = fashion_files()
    for name, values in files.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(idx(values)) if zipped else idx(values))
    return files


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("inside", [".", "FashionMNIST/raw"])
def test_idx_files_are_read_as_they_lie(tmp_path: Path, zipped: bool, inside: str) -> None:
    files = write_fashion(tmp_path / inside, zipped)
    for part, dataset in zip(("train", "t10k"), data.load("fashion-mnist", tmp_path), strict=True):
        assert np.array_equal(dataset.pixels[:, 0].numpy(), files[f"{part}-images-idx3-ubyte"])
        assert dataset.labels.tolist() == files[f"{part}-labels-idx1-ubyte"].tolist()
        assert (dataset.shape, dataset.classes[9]) == ((1, 28, 28), "Ankle boot")


@pytest.mark.skipif(not fashion_mnist.DEBIAN.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
@pytest.mark.slow
def test_debians_copy_is_the_real_one() -> None:
    train, test = data.load("fashion-mnist")
    assert (train.pixels.shape, test.pixels.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert train.labels.bincount().tolist() == [6000] * 10
    assert test.labels.bincount().tolist() == [1000] * 10
    pixels = train.pixels.numpy()
    assert pixels.mean() / 255 == pytest.approx(train.mean[0], abs=5e-5)
    assert pixels.std() / 255 == pytest.approx(train.std[0], abs=5e-5)


def idx_header(*shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
WHOLE = fashion_files()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, b"\0\0\x0d\3" + idx(WHOLE[IMAGES])[4:], "but has another header"),
        (IMAGES, idx(WHOLE[LABELS]), "must be an IDX file of bytes with 3 dimensions"),
        (IMAGES, b"\0\0\10\3\0\0", "but has another header"),
        (IMAGES, idx(WHOLE[IMAGES])[:-1], "but has 7055: cut off?"),
        (IMAGES, idx(WHOLE[IMAGES]) + b"\0", "but has more"),
        (IMAGES, idx_header(1 << 31, 1 << 31, 4), "but its header has the shape (2147483648, 2147483648, 4)"),
        (IMAGES, idx_header(2**32 - 1, 2**32 - 1, 2**32 - 1), "but its header has the shape"),
        (IMAGES, idx_header(0, 28, 28), "but its header has the shape (0, 28, 28)"),
        (f"{IMAGES}.gz", gzip.compress(idx_header(1 << 20, 28, 28), mtime=0), "but has 0: cut off?"),
        (IMAGES, idx(WHOLE[IMAGES][:, :27]), "train images must be 28 x 28, but are 27 x 28"),
        (LABELS, idx(WHOLE[LABELS][:7]), "a label per image, but has 7 for 9"),
        (LABELS, idx(WHOLE[LABELS] + 10), "train labels must be 0..9"),
        (f"{IMAGES}.gz", gzip.compress(idx(WHOLE[IMAGES]), mtime=0)[:-20], "is not a complete gzip file"),
        (f"{IMAGES}.gz", idx(WHOLE[IMAGES]), "is not a complete gzip file"),
        (f"{LABELS}.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 30, "is not a complete gzip file"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write_fashion(tmp_path, name.endswith(".gz"))
    (tmp_path / name).write_bytes(content)
    error = refused("fashion-mnist", tmp_path)
    assert message in error
    assert str(tmp_path) in error


@pytest.mark.parametrize("count", [9, 10_000_000])
def test_a_file_that_expands_to_more_than_it_promises_takes_little_memory(tmp_path: Path, count: int) -> None:
    """A gzip file of zeros, a thousandth of its contents, with a header of few images or of more than are read."""
    write_fashion(tmp_path, zipped=True)
    with gzip.open(tmp_path / f"{IMAGES}.gz", "wb", compresslevel=1) as file:
        file.write(idx_header(count, 28, 28))
        for _ in range(100):
            file.write(b"\0" * (1 << 20))
    tracemalloc.start()
    try:
        error = refused("fashion-mnist", tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "but has more" in error or "but its header has the shape" in error
    assert peak < 20 << 20


@pytest.mark.parametrize("name", ["train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"])
def test_a_missing_idx_file_is_named(tmp_path: Path, name: str) -> None:
    write_fashion(tmp_path, zipped=True)
    (tmp_path / f"{name}.gz").unlink()
    assert f"{tmp_path / name}.gz does not exist" in refused("fashion-mnist", tmp_path)


# -- download


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the tests check stderr."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a folder over HTTP; yield the folder and its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder))) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


@pytest.fixture
def stderr(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return a function that returns all output; pooch's handler writes to the stderr of its import."""
    import pooch

    (handler,) = pooch.get_logger().handlers
    monkeypatch.setattr(handler, "stream", logged := io.StringIO())
    return lambda: logged.getvalue() + "".join(capfd.readouterr())


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach the local server without a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def offered(folder: Path, address: str, name: str, content: bytes) -> Archive:
    (folder / name).write_bytes(content)
    return Archive(name, f"{address}/{name}", digest(folder / name))


def test_a_file_arrives_without_noise_and_once(
    tmp_path: Path, server: tuple[Path, str], stderr: Callable[[], str]
) -> None:
    content = np.random.default_rng(0).bytes(100_000)
    archive = offered(*server, "some.bin", content)
    archives.download([archive], tmp_path / "new" / "root")
    assert (tmp_path / "new" / "root" / "some.bin").read_bytes() == content
    assert [path.name for path in (tmp_path / "new" / "root").iterdir()] == ["some.bin"]
    (server[0] / "some.bin").unlink()
    archives.download([archive], tmp_path / "new" / "root")  # the file exists: no request
    assert stderr() == ""


def test_pooch_may_speak_again_afterwards(tmp_path: Path, server: tuple[Path, str], stderr: Callable[[], str]) -> None:
    import pooch

    archives.download([offered(*server, "a", b"content")], tmp_path)
    pooch.get_logger().info("of another program's download")
    assert stderr() == "of another program's download\n"


def test_a_download_with_another_checksum_leaves_nothing_behind(
    tmp_path: Path, server: tuple[Path, str], stderr: Callable[[], str]
) -> None:
    archive = replace(offered(*server, "some.bin", b"not what was promised"), md5="0" * 32)
    with pytest.raises(ew.InputError) as error:
        archives.download([archive], tmp_path / "root")
    assert str(error.value) == (
        f"the file from {archive.url} must have the MD5 checksum {'0' * 32}, but has another: try again"
    )
    assert list((tmp_path / "root").iterdir()) == []
    assert stderr() == ""


def test_a_damaged_file_that_is_there_already_is_refused(tmp_path: Path, server: tuple[Path, str]) -> None:
    archive = offered(*server, "some.bin", b"content")
    (tmp_path / "some.bin").write_bytes(b"cont")
    with pytest.raises(ew.InputError, match=f"but has {digest(tmp_path / 'some.bin')}"):
        archives.download([archive], tmp_path)
    assert (tmp_path / "some.bin").read_bytes() == b"cont"  # the user's file: not removed


def test_a_server_that_is_down_says_where_to_put_what(tmp_path: Path, stderr: Callable[[], str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    archive = Archive("some.bin", f"http://127.0.0.1:{port}/some.bin", "0" * 32)
    with pytest.raises(ew.InputError) as error:
        archives.download([archive], tmp_path / "root")
    assert str(error.value) == (
        f"{archive.url} could not be downloaded (ConnectionError): "
        f"download it elsewhere and put it at {tmp_path / 'root' / 'some.bin'}"
    )
    assert list((tmp_path / "root").iterdir()) == []
    assert stderr() == ""


def test_an_address_without_the_file_is_an_error(tmp_path: Path, server: tuple[Path, str]) -> None:
    archive = Archive("gone.bin", f"{server[1]}/gone.bin", "0" * 32)
    with pytest.raises(ew.InputError, match=r"gone\.bin could not be downloaded \(HTTPError\)"):
        archives.download([archive], tmp_path / "root")


def test_a_bar_is_shown_to_people_and_ends_with_the_download(
    tmp_path: Path, server: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: a terminal
    monkeypatch.setenv("TERM", "xterm")
    archives.download([offered(*server, "some.bin", bytes(5000))], tmp_path / "root")
    with pytest.raises(ew.InputError):
        archives.download([Archive("gone.bin", f"{server[1]}/gone.bin", "0" * 32)], tmp_path / "root")
    shown = capsys.readouterr().err
    assert "some.bin" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 2  # the cursor is hidden and shown again
    for thread in threading.enumerate():
        if "Refresh" in type(thread).__name__:
            thread.join(5)
            assert not thread.is_alive()


def test_a_data_set_is_fetched_and_then_read(
    tmp_path: Path, server: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fashion_files()
    offers = tuple(
        offered(*server, f"{name}.gz", gzip.compress(idx(values), mtime=0)) for name, values in files.items()
    )
    monkeypatch.setitem(data.DATA_SETS, "fashion-mnist", replace(data.DATA_SETS["fashion-mnist"], archives=offers))  # type: ignore[arg-type]
    train, test = data.load("fashion-mnist", tmp_path / "root", fetch=True)
    assert np.array_equal(train.pixels[:, 0].numpy(), files["train-images-idx3-ubyte"])
    assert np.array_equal(test.labels.numpy(), files["t10k-labels-idx1-ubyte"])


def caltech_archive(names: tuple[str, ...] = ("001.ak47", "002.american-flag")) -> bytes:
    buffer, image = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (12, 9), (10, 20, 30)).save(image, "PNG")
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(f"256_ObjectCategories/{name}/{name[:3]}_0001.png")
            entry.size = len(image.getvalue())
            archive.addfile(entry, io.BytesIO(image.getvalue()))
    return buffer.getvalue()


@pytest.fixture
def caltech(server: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Archive:
    """Put a small Caltech-256 on the server and make it the official archive."""
    archive = offered(*server, "256_ObjectCategories.tar", caltech_archive())
    monkeypatch.setattr(data.folders, "CALTECH256", archive)
    monkeypatch.setitem(data.DATA_SETS, "caltech256", replace(data.DATA_SETS["caltech256"], archives=(archive,)))  # type: ignore[arg-type]
    return archive


def test_caltech_is_fetched_and_extracted(tmp_path: Path, caltech: Archive) -> None:
    everything, test = data.load("caltech256", tmp_path / "root", size=8, fetch=True)
    assert test is None
    assert everything.classes == ("ak47", "american-flag")
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == [
        "256_ObjectCategories",
        "256_ObjectCategories.tar",
    ]


def test_an_interrupted_extraction_is_not_taken_for_a_data_set(
    tmp_path: Path, caltech: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    extractall = tarfile.TarFile.extractall

    def cut_short(archive: tarfile.TarFile, *arguments: object, **options: object) -> None:
        extractall(archive, *arguments, members=archive.getmembers()[:1], **options)  # type: ignore[arg-type, misc]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extractall", cut_short)
        with pytest.raises(KeyboardInterrupt):
            data.load("caltech256", tmp_path / "root", size=8, fetch=True)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["256_ObjectCategories.tar"]
    assert len(data.load("caltech256", tmp_path / "root", size=8, fetch=True)[0]) == 2


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda root: data.load("imagenet", root, fetch=True), "imagenet cannot be downloaded by exitwise"),
        (lambda root: data.load("imagenet", root), "get it from image-net.org after registration"),
        (lambda root: data.load(f"folder:{root}", fetch=True), "cannot be downloaded by exitwise"),
        (lambda root: data.load("cifar100", fetch=True), "--download needs --root"),
        (lambda root: data.load("cifar100"), "must be read from a folder: pass --root DIR"),
    ],
)
def test_what_cannot_be_fetched_is_said(tmp_path: Path, load: Callable[[Path], object], message: str) -> None:
    with pytest.raises(ew.InputError) as error:
        load(tmp_path)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_official_addresses_and_checksums_are_whole() -> None:
    everything = [archive for dataset in data.DATA_SETS.values() for archive in dataset.archives]
    assert len(everything) == len({archive.md5 for archive in everything}) == 7
    for archive in everything:
        assert len(bytes.fromhex(archive.md5)) == 16
        assert archive.url.endswith(f"/{archive.name}")
