"""A job resumes only as the same job, and other folders and damaged files are left alone."""

import os
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs
from scoring_cases import (
    InProcess,
    contents,
    read_parts,
    read_rows,
    refused,
    run,
    write_bundle,
    write_folder,
    write_parquet,
    write_tars,
)

from exitwise.core.errors import InputError
from exitwise.runtime.onnx import Session
from exitwise.scoring import items, job, shard_scorer, storage
from exitwise.scoring.items import list_source
from exitwise.scoring.job import Job, bundle_fingerprint, locked
from exitwise.scoring.storage import LocalStorage, RemoteStorage, Storage, open_location


class TestResuming:
    def test_another_job_is_refused_by_its_difference(self, bundle: Path, folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        run(folder, bundle, out)
        before = read_parts(out)
        refused("is a job with another batch size .16, not 8.", folder, bundle, out, batch_size=8)
        refused("another shard size", folder, bundle, out, shard_size=41)
        refused("another keep budget .False, not True.", folder, bundle, out, keep_budget=True)
        refused("another column .None, not x.", folder, bundle, out, column="x")
        refused("another decoder .pillow, not draft.", folder, bundle, out, decoder="draft")
        refused("`decoder` must be one of pillow, draft", folder, bundle, out, decoder="fast")
        refused("another source", folder / "a", bundle, out)
        other = write_bundle(tmp_path / "other", threshold=0.6)
        refused(r"another bundle \(\w+, not \w+\)", folder, other, out)
        assert read_parts(out) == before
        assert run(os.path.relpath(folder), bundle, out).resumed == 150
        assert run(folder, other, out, force=True).resumed == 0
        assert read_parts(out) != before

    @pytest.mark.parametrize("change", ["add", "remove", "size", "time"])
    def test_a_source_that_changed_is_refused(self, change: str, bundle: Path, tmp_path: Path) -> None:
        source = write_folder(tmp_path / "images", contents(20))
        run(source, bundle, tmp_path / "out")
        file = source / "a" / "0002.png"
        if change == "add":
            shutil.copy(file, source / "c.png")
        elif change == "remove":
            file.unlink()
        elif change == "size":
            time = file.stat().st_mtime_ns
            file.write_bytes(file.read_bytes() + b"0")
            os.utime(file, ns=(time, time))
        else:
            os.utime(file, ns=(0, 0))
        refused("has changed since the job in .* began", source, bundle, tmp_path / "out")
        assert run(source, bundle, tmp_path / "out", force=True).resumed == 0

    def test_other_folders_are_left_alone(self, bundle: Path, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("mine")
        for force in (False, True):
            refused("is not a job: it holds 'notes.txt'", folder, bundle, tmp_path / "mine", force=force)
        assert (tmp_path / "mine" / "notes.txt").exists()
        (tmp_path / "file").touch()
        refused("cannot be written|not a folder", folder, bundle, tmp_path / "file")
        copied = shutil.copytree(folder, tmp_path / "images")
        refused("`out` must not lie in the source", copied, bundle, copied / "scores")

    def test_one_command_at_a_time(self, bundle: Path, folder: Path, tmp_path: Path) -> None:
        with locked(LocalStorage(), str(tmp_path / "out")):
            refused("another command works on the job", folder, bundle, tmp_path / "out")
        run(folder, bundle, tmp_path / "out")

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda data: b"{", "is damaged"),
            (lambda data: data.replace(b'"batch_size": 16', b'"batch_size": 17'), "has changed since it was written"),
            (lambda data: data.replace(b'"version": 1', b'"version": 2'), "has version 2"),
            (lambda data: data.replace(b"exitwise.score", b"exitwise.other"), "must be of format"),
            (lambda data: data.replace(b'"plan"', b'"plans"'), "is damaged"),
        ],
    )
    def test_a_damaged_manifest_is_refused(
        self, damage: Any, problem: str, bundle: Path, folder: Path, tmp_path: Path
    ) -> None:
        run(folder, bundle, tmp_path / "out")
        manifest = tmp_path / "out" / "job.json"
        manifest.write_bytes(damage(manifest.read_bytes()))
        refused(problem, folder, bundle, tmp_path / "out")
        assert run(folder, bundle, tmp_path / "out", force=True).images == 150

    def test_parts_of_another_job_or_damaged_ones_are_refused(self, bundle: Path, folder: Path, tmp_path: Path) -> None:
        run(folder, bundle, tmp_path / "out")
        run(folder, bundle, tmp_path / "other", batch_size=17)
        part = tmp_path / "out" / "parts" / "part-00000001.parquet"
        good = part.read_bytes()
        part.write_bytes(good[:-20])
        refused("part-00000001.parquet is damaged: delete it", folder, bundle, tmp_path / "out")
        shutil.copy(tmp_path / "other" / "parts" / part.name, part)
        refused("is of another job: delete it", folder, bundle, tmp_path / "out")
        part.unlink()
        assert run(folder, bundle, tmp_path / "out").resumed == 110
        assert part.read_bytes() == good

    def test_what_is_left_of_killed_writers_is_deleted(self, bundle: Path, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "out" / "parts").mkdir(parents=True)
        (tmp_path / "out" / "parts" / ".part-00000000.parquet.x1.part").write_bytes(b"half")
        run(folder, bundle, tmp_path / "out")
        assert len(list((tmp_path / "out" / "parts").iterdir())) == 4


class TestWorkers:
    def test_a_worker_with_another_bundle_is_refused(self, bundle: Path, folder: Path, tmp_path: Path) -> None:
        other = write_bundle(tmp_path / "bundle", seed=1)
        executor = InProcess(other)
        refused("of a worker is not the one of the job", folder, bundle, tmp_path / "out", executor=executor)
        run(folder, bundle, tmp_path / "out")

    def test_a_changed_graph_is_another_bundle(self, bundle: Path) -> None:
        manifest = Session(bundle).manifest
        found = bundle_fingerprint(bundle, manifest)
        assert found == bundle_fingerprint(bundle, manifest)
        assert len(found) == 16

    def test_a_source_that_shrank_while_it_is_read_is_an_error_row_or_a_line(
        self, bundle: Path, tmp_path: Path
    ) -> None:
        write_tars(tmp_path / "tars", contents(30), 1)
        file = tmp_path / "tars" / "000.tar"

        class Cuts(InProcess):
            def run(self, job: Job, shards: Any, on_event: Any) -> None:
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
                super().run(job, shards, on_event)

        run(tmp_path / "tars", bundle, tmp_path / "out", executor=Cuts(bundle))
        errors = [row["error"] for row in read_rows(tmp_path / "out")]
        assert sum("is cut off" in (error or "") for error in errors) > 5
        assert errors[0] is None

    def test_listings_do_not_hold_what_is_not_read(self, folder: Path) -> None:
        shards = list_source(str(folder), 10).shards
        assert len(next(shards)) == 10
        assert sum(map(len, shards)) == 140


@pytest.mark.parametrize("kind", ["files", "tar", "parquet"])
def test_a_job_works_on_remote_storage(
    kind: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source and job are URIs of a pyarrow file system, which fails now and then; options of the URI are kept."""
    images = contents(30)
    make = {"files": write_folder, "tar": write_tars, "parquet": write_parquet}[kind]
    make(tmp_path / "source", images)

    class Flaky:
        """Every third operation fails once."""

        def __init__(self) -> None:
            self._files, self._count = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), 0

        def __getattr__(self, name: str) -> Any:
            self._count += 1
            if self._count % 3 == 0:
                raise OSError("timeout")
            return getattr(self._files, name)

    def open_flaky(location: str, argument: str) -> tuple[Storage, str]:
        if not location.startswith("test://"):
            return open_location(location, argument)
        assert location.endswith("?region=here")
        return RemoteStorage(Flaky(), "test://"), location.removeprefix("test://").removesuffix("?region=here")

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    score_module = import_module("exitwise.scoring.score")
    for module in (items, job, score_module, shard_scorer, storage):
        monkeypatch.setattr(module, "open_location", open_flaky)
    summary = run("test://source?region=here", bundle, "test://out?region=here", shard_size=12)  # type: ignore[arg-type]
    assert (summary.images, summary.out) == (30, "test://out")
    rows = read_rows(tmp_path / "out")
    assert all(row["path"].startswith("test://source/") for row in rows)
    monkeypatch.undo()
    run(tmp_path / "source", bundle, tmp_path / "local", shard_size=12)
    for row, other in zip(rows, read_rows(tmp_path / "local"), strict=True):
        assert {**row, "path": "", "error": bool(row["error"])} == {**other, "path": "", "error": bool(other["error"])}
    assert summary.resumed == 0
    assert not list((tmp_path / "out" / "attempts").iterdir())


@pytest.mark.parametrize("broken", ["get_file_info", "open_output_stream"])
def test_a_job_that_cannot_be_read_or_written_is_one_line(
    broken: str, bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Denied:
        def __init__(self) -> None:
            self._files = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())

        def __getattr__(self, name: str) -> Any:
            if name == broken:
                raise OSError("When writing key 'x' in bucket 'y': AWS Error ACCESS_DENIED during PutObject operation")
            return getattr(self._files, name)

    def open_denied(location: str, argument: str) -> tuple[Storage, str]:
        is_job = location.startswith("test://")
        return (RemoteStorage(Denied(), "test://"), "out") if is_job else open_location(location, argument)

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for module in (job, import_module("exitwise.scoring.score")):
        monkeypatch.setattr(module, "open_location", open_denied)
    line = "^test://out: AWS Error ACCESS_DENIED during PutObject operation. What is scored stays; "
    refused(line, folder, bundle, "test://out")  # type: ignore[arg-type]


def test_a_pattern_must_not_find_the_parts(bundle: Path, folder: Path, tmp_path: Path) -> None:
    copied = write_folder(tmp_path / "images", contents(4))
    refused("`out` must not lie in the source", copied / "**" / "*", bundle, copied / "scores")
    run(copied / "*" / "*", bundle, copied / "scores")


def test_a_command_that_was_killed_while_it_wrote_the_manifest_resumes(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / "plan").mkdir(parents=True)
    left = [tmp_path / "out" / ".job.json.x1.part", tmp_path / "out" / "plan" / ".000000.parquet.x2.part"]
    for path in left:
        path.write_bytes(b"half")
    assert run(folder, bundle, tmp_path / "out").images == 150
    assert not any(path.exists() for path in left)


def test_an_image_in_a_folder_that_must_not_be_read_is_a_row(
    bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "names").write_text(f"{folder}/a/0000.png\n/closed/x.png\n")
    stat = LocalStorage.stat

    def deny(self: LocalStorage, path: str) -> Any:
        if path.startswith("/closed"):
            raise PermissionError(13, "Permission denied", path)
        return stat(self, path)

    monkeypatch.setattr(LocalStorage, "stat", deny)
    summary = run(tmp_path / "names", bundle, tmp_path / "out")
    assert (summary.images, summary.errors) == (2, 1)


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (OSError("Couldn't deserialize thrift"), True),
        (pa.ArrowInvalid("magic bytes"), True),
        (pa.ArrowMemoryError("malloc of size 64 failed"), False),
        (OSError(5, "Input/output error", "part"), False),
    ],
)
def test_only_damage_is_called_damage(
    error: Exception, is_damage: bool, bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a job that are good must not be deleted because memory or a disk failed."""
    run(folder, bundle, tmp_path / "out")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("pyarrow.parquet.read_metadata", fail)
    with pytest.raises(MemoryError if isinstance(error, MemoryError) else InputError) as raised:
        run(folder, bundle, tmp_path / "out")
    assert ("is damaged: delete it" in str(raised.value)) == is_damage


def test_a_job_that_cannot_be_listed_is_one_line_with_force(
    bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(self: LocalStorage, path: str) -> Any:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalStorage, "list_folder", deny)
    refused("Permission denied. What is scored stays", folder, bundle, tmp_path / "out", force=True)


@pytest.mark.parametrize(
    ("location", "opened"),
    [
        ("gs://bucket/x", "gs://bucket/x?retry_limit_seconds=15"),
        ("gs://bucket/x?scheme=http", "gs://bucket/x?scheme=http&retry_limit_seconds=15"),
        ("gs://bucket/x?retry_limit_seconds=7", "gs://bucket/x?retry_limit_seconds=7"),
    ],
)
def test_google_storage_is_not_tried_for_a_quarter_of_an_hour(
    location: str, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FileSystem:
        @staticmethod
        def from_uri(uri: str) -> Any:
            raise OSError(f"asked for {uri} only")

    monkeypatch.setattr(fs, "FileSystem", FileSystem)
    with pytest.raises(InputError, match=re.escape(f"asked for {opened} only")):
        open_location(location, "source")
