"""Traces in folders: the same as in one file, checked before use, written completely or not at all."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace

import exitwise as ew
from exitwise.calibration import trace_folder
from exitwise.calibration.trace_folder import TraceFolderWriter, partial_folder
from exitwise.core.files import read_json, write_json
from exitwise.core.mapped_rows import MappedRows

N, SHARD = 50, 16


@pytest.fixture(scope="module")
def trace() -> ew.Trace:
    trace = random_trace(n=N)
    return replace(trace, val=replace(trace.val, index=torch.arange(N) + 3))


@pytest.fixture
def folder(trace: ew.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trace in four shards per split."""
    monkeypatch.setattr(trace_folder, "SHARD_ROWS", SHARD)
    trace.save(tmp_path / "trace")
    return tmp_path / "trace"


def assert_same_trace(one: ew.Trace, other: ew.Trace) -> None:
    for name in ("val", "test"):
        a, b = getattr(one, name), getattr(other, name)
        assert all(torch.equal(x[:], y[:]) for x, y in zip(a.features, b.features, strict=True))
        assert torch.equal(a.labels, b.labels)
        assert (a.index is None) == (b.index is None)
        assert a.index is None or torch.equal(a.index, b.index)
    for k in range(one.num_exits):
        assert torch.equal(one.heads[k].weight, other.heads[k].weight)
        assert torch.equal(one.curvature[k].A, other.curvature[k].A)
        assert torch.equal(one.curvature[k].B, other.curvature[k].B)
    assert (one.costs, one.classes, one.num_train) == (other.costs, other.classes, other.num_train)


def test_a_folder_has_the_trace_of_the_file(trace: ew.Trace, folder: Path, tmp_path: Path) -> None:
    loaded = ew.Trace.load(folder)
    assert repr(loaded) == repr(trace)
    assert all(isinstance(x, MappedRows) for x in loaded.val.features)
    assert_same_trace(trace, loaded)
    assert len(list(folder.glob("val-*.features.1.npy"))) == 4
    loaded.save(tmp_path / "again.safetensors")
    again = ew.Trace.load(tmp_path / "again.safetensors")
    assert not any(isinstance(x, MappedRows) for x in again.val.features)
    assert_same_trace(trace, again)
    loaded.save(tmp_path / "copy")
    assert_same_trace(trace, ew.Trace.load(tmp_path / "copy"))


def test_data_begin_on_a_64_byte_boundary(folder: Path) -> None:
    for file in folder.glob("*.npy"):
        size = np.load(file, allow_pickle=False).nbytes
        assert (file.stat().st_size - size) % 64 == 0


def test_half_precision_halves_the_features(tmp_path: Path) -> None:
    trace = random_trace(n=N)
    trace.save(tmp_path / "half", dtype=torch.float16)
    loaded = ew.Trace.load(tmp_path / "half")
    assert loaded.val.features[2].dtype == torch.float16
    assert torch.equal(loaded.val.features[2][:], trace.val.features[2].half())
    trace.val.features[0][0, 0] = 1e6
    with pytest.raises(ew.InputError, match="beyond float16"):
        trace.save(tmp_path / "half", dtype=torch.float16)
    assert torch.equal(ew.Trace.load(tmp_path / "half").val.labels, trace.val.labels)


def test_held_out_samples_stay_in_the_files(trace: ew.Trace, folder: Path) -> None:
    loaded = ew.Trace.load(folder)
    (tune, held_out), (expected, expected_held_out) = loaded.hold_out(0.4, seed=1), trace.hold_out(0.4, seed=1)
    assert all(isinstance(x, MappedRows) for x in (*tune.val.features, *held_out.features))
    assert_same_trace(expected, tune)
    assert_same_trace(replace(expected, val=expected_held_out), replace(tune, val=held_out))
    again = held_out.take(torch.tensor([5, 0]))
    assert torch.equal(again.features[1][:], expected_held_out.features[1][[5, 0]])
    assert [part.stop - part.start for part in loaded.val.blocks()] == [N]


def test_saving_replaces_only_a_trace(folder: Path, tmp_path: Path) -> None:
    other = random_trace(n=20, seed=5)
    other.save(folder)
    assert_same_trace(other, ew.Trace.load(folder))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    with pytest.raises(ew.InputError, match="exists and is not a trace"):
        other.save(tmp_path / "data")
    assert (tmp_path / "data" / "precious").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "trace"]


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the manifest, with a valid digest."""

    def apply(folder: Path) -> None:
        manifest = read_json(folder / "trace.json")
        change(manifest)
        write_json(folder / "trace.json", manifest)

    return apply


def rewrite(name: str, array: Any) -> Callable[[Path], object]:
    """Write another array to a file, and its digest to the manifest, as somebody who means harm would."""

    def apply(folder: Path) -> None:
        np.save(folder / name, array, allow_pickle=True)
        split, number, *content = name.removesuffix(".npy").replace("-", ".").split(".")
        digest = __import__("hashlib").sha256((folder / name).read_bytes()).hexdigest()
        edit(lambda m: m["splits"][split][int(number)]["digests"].update({".".join(content): digest}))(folder)

    return apply


def swap(one: str, other: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        (folder / one).rename(folder / "x")
        (folder / other).rename(folder / one)
        (folder / "x").rename(folder / other)

    return apply


def cut(name: str, keep: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def flip(name: str, position: int) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[position] ^= 1
        (folder / name).write_bytes(data)

    return apply


FIRST = "val-00000.features.1.npy"
ROWS = np.ones((SHARD, 7), dtype=np.float32)
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda folder: (folder / FIRST).unlink(), "does not exist"),
    "missing labels": (lambda folder: (folder / "test-00001.labels.npy").unlink(), "does not exist"),
    "missing heads": (lambda folder: (folder / "heads.safetensors").unlink(), "does not exist"),
    "missing manifest": (lambda folder: (folder / "trace.json").unlink(), "is not a trace: it has no trace.json"),
    "truncated": (cut(FIRST, 300), "must have 576 bytes, but has 300"),
    "truncated header": (cut(FIRST, 40), "is not a usable .npy file"),
    "empty": (cut(FIRST, 0), "is not a usable .npy file"),
    "not an array": (lambda folder: (folder / FIRST).write_bytes(b"PK" + b"0" * 600), "is not a usable .npy file"),
    "longer": (lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes() + b"0"), "but has 577"),
    "one bit": (flip(FIRST, 400), "do not match its digest"),
    "one bit of the header": (flip(FIRST, 120), "is not a usable .npy file"),
    "one bit of the heads": (flip("heads.safetensors", -5), "do not match its digest"),
    "swapped shards": (swap(FIRST, "val-00001.features.1.npy"), "do not match its digest"),
    "swapped exits": (swap(FIRST, "val-00000.features.2.npy"), "must hold float32 of shape (16, 7)"),
    "other type": (rewrite(FIRST, ROWS.astype(np.float64)), "must hold float32 of shape (16, 7), but holds float64"),
    "other byte order": (rewrite(FIRST, ROWS.astype(">f4")), "must hold float32 of shape (16, 7), but holds >f4"),
    "objects": (rewrite(FIRST, np.full((16, 7), None)), "but holds object"),
    "structured": (rewrite(FIRST, np.zeros(16, dtype=[("a", "f4")])), "must hold float32"),
    "other shape": (rewrite(FIRST, ROWS[:, :6]), "but holds float32 (16, 6)"),
    "other order": (rewrite(FIRST, np.asfortranarray(ROWS)), "in Fortran order"),
    "not finite": (rewrite(FIRST, ROWS * np.nan), "holds values that are not finite"),
    "label outside": (rewrite("val-00002.labels.npy", np.full(SHARD, 5)), "val.labels must lie in 0..4"),
    "labels as floats": (rewrite("val-00002.labels.npy", np.zeros(SHARD)), "must hold int64"),
    "huge": (edit(lambda m: m["splits"]["val"][0].update(rows=2**60)), "`rows` of a shard of val must be"),
    "rows as text": (edit(lambda m: m["splits"]["val"][0].update(rows="16")), "`rows` of a shard of val must be"),
    "other rows": (edit(lambda m: m["splits"]["val"][0].update(rows=17)), "must hold float32 of shape (17, 6)"),
    "no val": (edit(lambda m: m["splits"].pop("val")), "lacks 'val.features.0'"),
    "empty val": (edit(lambda m: m["splits"].update(val=[])), "`splits` must list the shards of val"),
    "unknown split": (edit(lambda m: m["splits"].update({"../x": []})), "`splits` must be an object"),
    "unknown file": (edit(lambda m: m["splits"]["val"][0]["digests"].update({"../x": "0"})), "`digests` of a shard"),
    "fewer files": (edit(lambda m: m["splits"]["val"][0]["digests"].pop("features.0")), "`digests` of a shard"),
    "index of some": (edit(lambda m: m["splits"]["val"][0]["digests"].pop("index")), "must have an index, or none"),
    "no splits": (edit(lambda m: m.pop("splits")), "lacks 'splits'"),
    "no digests": (edit(lambda m: m.update(digests=None)), "`digests` must be an object"),
    "width": (edit(lambda m: m.update(widths=[6, 7, 0])), "`widths` must be positive"),
    "fewer widths": (edit(lambda m: m.update(widths=[6, 7])), "`digests` of a shard"),
    "dtype": (edit(lambda m: m.update(dtype="object")), "`dtype` must be float32 or float16"),
    "metadata": (edit(lambda m: m.update(metadata=[1])), "`metadata` must be an object"),
    "classes": (edit(lambda m: m["metadata"].update(classes=["a"])), "classes must name 5 classes"),
    "version": (edit(lambda m: m.update(version=2)), "must be exitwise.trace-folder version 1, but is"),
    "format": (edit(lambda m: m.update(format="exitwise.run")), "must be exitwise.trace-folder"),
    "edited": (lambda f: (f / "trace.json").write_text((f / "trace.json").read_text().replace("16", "15")), "changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(folder: Path, damage: str) -> None:
    act, message = DAMAGES[damage]
    act(folder)
    with pytest.raises(ew.InputError) as error:
        ew.Trace.load(folder)
    assert message in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_heads_of_another_trace_are_refused(folder: Path, tmp_path: Path) -> None:
    random_trace(seed=9).save(tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / "heads.safetensors", folder / "heads.safetensors")
    with pytest.raises(ew.InputError, match="is of another trace"):
        ew.Trace.load(folder)


def test_only_one_process_writes_a_folder(tmp_path: Path) -> None:
    with (
        TraceFolderWriter(tmp_path / "trace", [3]),
        pytest.raises(ew.InputError, match="is being collected by another process"),
        TraceFolderWriter(tmp_path / "trace", [3]),
    ):
        pass


def test_shards_of_wide_features_are_smaller(tmp_path: Path) -> None:
    assert TraceFolderWriter(tmp_path / "a", [384, 384, 352, 304, 560]).shard_rows == 32_768
    assert TraceFolderWriter(tmp_path / "b", [50_000] * 4).shard_rows == (1 << 28) // 800_000


def test_what_an_interrupted_writer_left_is_used_only_for_the_same_source(tmp_path: Path) -> None:
    rows, labels = [torch.ones(40, 3)], torch.zeros(40, dtype=torch.int64)

    def writer(source: str | None, **options: Any) -> TraceFolderWriter:
        return TraceFolderWriter(tmp_path / "trace", [3], source=source, shard_rows=SHARD, **options)

    with writer("one") as first:
        first.append("val", rows, labels, None)
    assert not (tmp_path / "trace").exists()
    for source, options, kept in [("one", {}, 32), ("one", {"dtype": torch.float16}, 0), ("one", {}, 0)]:
        with writer(source, **options) as second:
            assert second.num_rows("val") == kept
    with writer("one") as first:
        first.append("val", rows, labels, None)
    flip("val-00001.features.0.npy", -1)(partial_folder(tmp_path / "trace"))
    with writer("one") as third:
        assert third.num_rows("val") == 0  # damaged: collected again
    progress = json.loads((partial_folder(tmp_path / "trace") / "progress.json").read_text())
    assert progress["splits"] == {}
