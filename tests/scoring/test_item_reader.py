"""Remote files of a shard are read several at a time, and members of remote tar files with few requests."""

import io
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs

from exitwise.core.errors import InputError
from exitwise.scoring import storage as storages
from exitwise.scoring.item_reader import read_items
from exitwise.scoring.items import Item, list_source
from exitwise.scoring.storage import Locations, RemoteStorage


class WaitingStorage(RemoteStorage):
    """A storage where a read ends only when three others have begun, as if each waited for its round trip."""

    def __init__(self, root: Path) -> None:
        super().__init__(fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), "test://")
        self._barrier = threading.Barrier(4, timeout=30)

    def read(self, path: str) -> bytes:
        self._barrier.wait()
        return super().read(path)


def test_remote_files_are_read_four_and_more_at_a_time_in_order(tmp_path: Path) -> None:
    names = [f"{number:02}" for number in range(40)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "17").unlink()
    items = [Item(name, f"test://{name}".encode()) for name in names]
    read = list(read_items(SimpleNamespace(kind="images"), Locations(WaitingStorage(tmp_path)), items))
    assert [item for item, _ in read] == items
    for number, (_, data) in enumerate(read):
        if number == 17:
            assert isinstance(data, InputError)
            assert "test://17" in str(data)
        else:
            assert data == names[number].encode()


def test_local_files_and_missing_paths_stay_in_order(tmp_path: Path) -> None:
    items = [Item("a", str(tmp_path / "a").encode()), Item("b", None), Item("c", b"/c")]
    read = list(read_items(SimpleNamespace(kind="images"), Locations(), items))
    assert [image for _, image in read[::2]] == [tmp_path / "a", Path("/c")]
    assert isinstance(read[1][1], InputError)


def test_reading_that_ends_early_leaves_no_thread(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / name).write_bytes(b"x")
    items = [Item(name, f"test://{name}".encode()) for name in "abcdefgh"]
    before = threading.active_count()
    images = read_items(SimpleNamespace(kind="images"), Locations(WaitingStorage(tmp_path)), items)
    next(images)
    images.close()
    assert threading.active_count() == before


class CountedFile(io.FileIO):
    """A file that counts the requests which a remote storage would get."""

    requests = 0

    def readinto(self, buffer: Any) -> int | None:
        CountedFile.requests += 1
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        CountedFile.requests += 1
        return super().read(-1 if size is None else size)


def test_members_of_a_remote_tar_file_take_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as members:
        for number in range(100):
            member = tarfile.TarInfo(f"{number:03}.png")
            member.size = 3000 + number
            members.addfile(member, io.BytesIO(bytes([number]) * member.size))
    items = [item for shard in list_source(str(tmp_path / "a.tar"), 1000).shards for item in shard]

    class Storage(RemoteStorage):
        def open(self, path: str) -> Any:
            return CountedFile(str(tmp_path / path))

    remote = [item._replace(path=b"test://a.tar") for item in items]
    monkeypatch.setattr(CountedFile, "requests", 0)
    monkeypatch.setattr(storages, "_READ_BYTES", 1 << 16)
    read = list(read_items(SimpleNamespace(kind="tar"), Locations(Storage(None, "test://")), remote))
    assert [data for _, data in read] == [bytes([number]) * (3000 + number) for number in range(100)]
    size = (tmp_path / "a.tar").stat().st_size
    assert CountedFile.requests <= 2 + 2 * size / (1 << 16)
