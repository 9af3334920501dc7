"""Every kind of source lists the same images, in one order, with ids that differ; bad sources are one line."""

import glob
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs, parquet
from scoring_cases import contents, image_bytes, write_folder, write_parquet, write_tars

import exitwise as ew
from exitwise.runs.predict import list_images
from exitwise.scoring import plan
from exitwise.scoring.files_source import find_files
from exitwise.scoring.items import Item, list_source
from exitwise.scoring.parquet_source import find_columns, read_images, read_slices
from exitwise.scoring.storage import LocalStorage, Locations, RemoteStorage, open_location

IMAGES = contents(60)


def items(source: object, size: int = 16, **options: Any) -> list[Item]:
    return [item for shard in list_source(str(source), size, **options).shards for item in shard]


def names(files: list[Item]) -> list[str]:
    return [item.id for item in files]


class TestFiles:
    def test_a_folder_is_listed_in_the_order_of_predict(self, tmp_path: Path) -> None:
        for name in ("b.png", "a/z.png", "a.png", "a/b/c.JPG", "a-b/1.png", "A/2.png", ".hidden/3.png", "note.txt"):
            write_folder(tmp_path, {name: b""})
        (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
        found = items(tmp_path)
        assert [os.fsdecode(item.path or b"") for item in found] == list(list_images([str(tmp_path)]).names)
        assert names(found) == [str(Path(os.fsdecode(item.path or b"")).relative_to(tmp_path)) for item in found]
        assert [item.size for item in found] == [0] * 7

    @pytest.mark.parametrize(
        "pattern", ["*/*.png", "a/*", "**/*.png", "a/**/*.png", "?/000[0-3].png", "*/b/*.png", "**/b/**", ".h/*.png"]
    )
    def test_a_pattern_finds_what_the_shell_finds(self, pattern: str, tmp_path: Path) -> None:
        more = {"a/b/c/1.png": b"", "a/b/2.png": b"", ".h/3.png": b"", "b/.4.png": b"", "b/b/5.png": b""}
        write_folder(tmp_path, {**IMAGES, **more})
        matches = glob.glob(str(tmp_path / pattern), recursive=True)  # noqa: PTH207 (the oracle)
        expected = sorted({Path(match) for match in matches if Path(match).is_file()})
        assert [Path(os.fsdecode(item.path or b"")) for item in items(tmp_path / pattern)] == expected

    def test_names_with_any_bytes_are_found_again(self, tmp_path: Path) -> None:
        raw = os.fsencode(tmp_path) + b"/\xff.png"
        Path(os.fsdecode(raw)).write_bytes(b"")
        (item,) = items(tmp_path)
        assert (item.id, item.path) == ("\\xff.png", raw)

    def test_a_list_names_files_relative_to_its_folder(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "images", IMAGES)
        listed = [*list(IMAGES)[:3], "gone.png", str(tmp_path / "images" / "a" / "0004.png"), "s3://bucket/x.png"]
        (tmp_path / "images" / "list.txt").write_text("\r\n".join(listed) + "\n\n")
        found = items(tmp_path / "images" / "list.txt", 4)
        assert names(found) == listed
        paths = [str(tmp_path / "images" / name) for name in listed[:4]]
        assert [os.fsdecode(item.path or b"") for item in found] == [*paths, *listed[4:]]
        assert found[3].size is None
        assert found[0].size == len(IMAGES[listed[0]])


class TestTar:
    def test_members_are_found_with_their_bytes(self, tmp_path: Path) -> None:
        found = items(write_tars(tmp_path / "tars", IMAGES))
        keys = [name.removesuffix(".png") for name in IMAGES]
        assert names(found) == [f"{number // 30:03}.tar/{key}" for number, key in enumerate(keys)]
        for item, data in zip(found, IMAGES.values(), strict=True):
            file = Path(os.fsdecode(item.path or b"")).read_bytes()
            assert file[item.start : (item.start or 0) + (item.size or 0)] == data

    def test_a_shard_lies_in_one_file(self, tmp_path: Path) -> None:
        shards = list(list_source(str(write_tars(tmp_path / "tars", IMAGES)), 16).shards)
        assert [len(shard) for shard in shards] == [16, 14, 16, 14]
        assert all(len({item.path for item in shard}) == 1 for shard in shards)


class TestParquet:
    @pytest.mark.parametrize("column", ["image", "nested.bytes"])
    @pytest.mark.parametrize(("group", "size"), [(10, 16), (7, 100), (60, 8), (1, 1), (25, 10)])
    def test_rows_are_read_from_their_shards(self, group: int, size: int, column: str, tmp_path: Path) -> None:
        nested = [{"bytes": data, "path": name} for name, data in IMAGES.items()]
        folder = write_parquet(tmp_path / "parquet", IMAGES, 2, group, nested=nested)
        shards = list(list_source(str(folder), size, column, "name").shards)
        assert max(map(len, shards)) <= size
        assert [item.id for shard in shards for item in shard] == list(IMAGES)
        read = []
        for shard in shards:
            (path,), start = {os.fsdecode(item.path or b"") for item in shard}, shard[0].start or 0
            assert [item.start for item in shard] == list(range(start, start + len(shard)))
            read += list(read_images(LocalStorage(), path, column, start, start + len(shard)))
        assert read == list(IMAGES.values())

    def test_row_groups_are_not_cut_if_they_fit(self, tmp_path: Path) -> None:
        folder = write_parquet(tmp_path / "parquet", IMAGES, 1, 7)
        columns = find_columns(LocalStorage(), str(folder / "000.parquet"), None, None)
        bounds = [part[:2] for part in read_slices(LocalStorage(), str(folder / "000.parquet"), columns, 16)]
        assert bounds == [(0, 14), (14, 28), (28, 42), (42, 56), (56, 60)]

    def test_without_an_id_column_file_and_row_are_the_id(self, tmp_path: Path) -> None:
        found = items(write_parquet(tmp_path / "parquet", IMAGES, 2))
        assert names(found) == [f"{file:03}.parquet#{row}" for file in range(2) for row in range(30)]

    def test_a_column_of_paths_names_files(self, tmp_path: Path) -> None:
        write_folder(tmp_path, IMAGES)
        table = pa.table({"path": [*list(IMAGES)[:3], None], "key": [5, 6, 7, 8]})
        parquet.write_table(table, tmp_path / "list.parquet")
        listing = list_source(str(tmp_path / "list.parquet"), 2, None, "key")
        found = [item for shard in listing.shards for item in shard]
        assert listing.kind == "images"
        assert names(found) == ["5", "6", "7", "8"]
        assert [item.path for item in found[2:]] == [os.fsencode(tmp_path / list(IMAGES)[2]), None]


class TestRemote:
    """The storage of pyarrow's file systems, here on a folder."""

    @pytest.fixture
    def remote(self, tmp_path: Path) -> RemoteStorage:
        return RemoteStorage(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "test://")

    def test_it_lists_what_the_local_storage_lists(self, remote: RemoteStorage, tmp_path: Path) -> None:
        write_folder(tmp_path / "data", IMAGES)
        here, there = (
            [(file.name, file.entry) for file in find_files(storage, path)]
            for storage, path in ((LocalStorage(), str(tmp_path / "data")), (remote, "data"))
        )
        assert here == there
        assert [file.path for file in find_files(remote, "data/b/*.png")] == [f"data/{name}" for name in IMAGES][30:]

    def test_files_are_written_read_and_removed(self, remote: RemoteStorage) -> None:
        remote.write("new/folder/file", b"data")
        assert remote.read("new/folder/file") == b"data"
        assert remote.stat("new/folder") == ("folder", True, None, None)
        remote.remove("new/folder/file")
        remote.remove("new/folder/file")
        assert remote.stat("new/folder/file") is None
        with pytest.raises(FileNotFoundError):
            remote.read("new/folder/file")

    def test_an_operation_that_fails_is_tried_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Flaky:
            failures = 3

            def get_file_info(self, path: str) -> Any:
                self.failures -= 1
                if self.failures >= 0:
                    raise OSError("timeout")
                return fs.LocalFileSystem().get_file_info(path)

        monkeypatch.setattr("time.sleep", lambda seconds: None)
        (tmp_path / "file").write_bytes(b"12")
        entry = RemoteStorage(Flaky(), "x://").stat(str(tmp_path / "file"))
        assert entry is not None
        assert entry.size == 2
        flaky = Flaky()
        flaky.failures = 4
        with pytest.raises(OSError, match="timeout"):
            RemoteStorage(flaky, "x://").stat(str(tmp_path / "file"))

    def test_uris_are_opened_once(self, tmp_path: Path) -> None:
        storage, path = open_location(f"file://{tmp_path}/", "source")
        assert (storage.is_local, path) == (True, str(tmp_path))
        remote = RemoteStorage(fs.LocalFileSystem(), "test://")
        locations = Locations(remote)
        assert locations.find("test://bucket/a.png") == (remote, "bucket/a.png")
        assert locations.find("/a.png")[0].is_local


class TestPlan:
    def test_shards_are_read_as_they_were_listed(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        shards = [
            [Item(f"{shard}-{i}", None if i % 5 == 4 else b"p\xff", i, None, 7) for i in range(rng.integers(1, 6))]
            for shard in range(600)
        ]
        summary = plan.write_plan(LocalStorage(), str(tmp_path), "source", iter(shards))
        assert (summary.images, summary.shards) == (sum(map(len, shards)), 600)
        assert summary == plan.summarize(shards)
        for shard in (0, 255, 256, 511, 599):
            assert plan.read_shard(LocalStorage(), str(tmp_path), shard) == shards[shard]

    @pytest.mark.parametrize("change", [{"id": "x"}, {"size": 9}, {"mtime": 9}, {"start": 9}])
    def test_the_digest_depends_on_everything_but_the_path(self, change: dict[str, Any]) -> None:
        shards = [[Item("a", b"a", 1, 2, 3)], [Item("b", b"b", 1, 2, 3)]]
        other = [shards[0], [shards[1][0]._replace(**change)]]
        assert plan.summarize(shards).digest != plan.summarize(other).digest
        moved = [shards[0], [shards[1][0]._replace(path=b"elsewhere")]]
        assert plan.summarize(shards) == plan.summarize(moved)

    def test_equal_ids_are_named_and_equal_hashes_are_not_enough(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan, "hash", lambda text: 7, raising=False)
        shards = [[Item(f"id {number}", b"one")] for number in range(300)]
        plan.write_plan(LocalStorage(), str(tmp_path), "source", shards)
        shards[299] = [Item("id 4", b"two")]
        with pytest.raises(ew.InputError, match=r"^source: the id 'id 4' occurs twice, in one and two"):
            plan.write_plan(LocalStorage(), str(tmp_path), "source", shards)


def _drift(folder: Path) -> Path:
    write_parquet(folder / "p", IMAGES)
    parquet.write_table(pa.table({"image": ["text"], "name": ["x"]}), folder / "p" / "001.parquet")
    return folder / "p"


def _null_id(folder: Path) -> Path:
    parquet.write_table(pa.table({"image": [b"", b""], "name": ["x", None]}), folder / "null.parquet")
    return folder / "null.parquet"


def _mixed(folder: Path) -> Path:
    return write_tars(write_folder(folder / "mixed", {"a.png": b""}) / "tars", IMAGES).parent


def _unreadable_tar(folder: Path) -> Path:
    write_folder(folder, {"x.tar": image_bytes(0)})
    return folder / "x.tar"


def _compressed(folder: Path) -> Path:
    with tarfile.open(folder / "x.tar.gz", "w:gz"):
        pass
    return folder / "x.tar.gz"


@pytest.mark.parametrize(
    ("make", "options", "problem"),
    [
        (lambda folder: folder / "nowhere", {}, "nowhere does not exist"),
        (lambda folder: folder, {}, "holds no images"),
        (lambda folder: folder / "*.png", {}, "matches no images"),
        (lambda folder: folder / "no" / "*.png", {}, "no does not exist"),
        (lambda folder: "-", {}, "cannot come from stdin"),
        (lambda folder: "nowhere://x/y", {}, "cannot be opened"),
        (_mixed, {}, r"holds images \(a.png\) and tar files \(tars/000.tar\)"),
        (
            lambda folder: write_folder(folder / "list.txt", {}).write_text("\n\n") and folder / "list.txt",
            {},
            "no images",
        ),
        (_compressed, {}, "is compressed"),
        (_unreadable_tar, {}, "cannot be read as a tar file"),
        (lambda folder: write_folder(folder, {"a.png": b""}), {"column": "x"}, "are for Parquet files"),
        (lambda folder: write_folder(folder, {"a.parquet": b"PAR1"}), {}, "cannot be read as Parquet"),
        (
            _drift,
            {"column": "image"},
            r"001.parquet has another schema than the first file: 'image' is text, not bytes",
        ),
        (_null_id, {"id_column": "name"}, "row 1 has no 'name': ids must not be null"),
        (lambda folder: write_parquet(folder / "p", IMAGES), {"column": "no"}, r"'no' is missing.*image \(bytes\)"),
        (lambda folder: write_parquet(folder / "p", IMAGES), {"id_column": "image"}, "'image' is bytes"),
    ],
)
def test_a_bad_source_is_one_line(make: Any, options: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ew.InputError, match=problem) as error:
        items(make(tmp_path), **options)
    assert "\n" not in str(error.value)
