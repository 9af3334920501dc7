"""Jobs in this process: rows are those of `predict`, whatever died when, and another job is refused."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pytest
from command import Command
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from scoring_cases import (
    CLASSES,
    POISON,
    Death,
    InProcess,
    contents,
    image_bytes,
    read_parts,
    read_rows,
    refused,
    run,
    write_folder,
    write_parquet,
    write_tars,
)

import exitwise as ew
from exitwise.cli.score import show_progress
from exitwise.core import image_files
from exitwise.core.image_files import DECODERS, load_image
from exitwise.policies.controller import BudgetController
from exitwise.runs import predict
from exitwise.runtime.onnx import Session
from exitwise.scoring import parts, shard_scorer
from exitwise.scoring.parts import ShardCounts
from exitwise.scoring.score import ScoreProgress
from exitwise.scoring.storage import LocalStorage

COLUMNS = ["id", "path", "label", "class", "confidence", "exit", "cost", "error", "bundle"]


def predicted(files: list[Path], bundle: Path, keep_budget: bool, shard_size: int = 40) -> list[dict[str, Any]]:
    """Return the rows of `exitwise predict` for each shard."""
    session = Session(bundle, threads=1)
    assert session.preprocessing is not None
    rows = []
    for start in range(0, len(files), shard_size):
        names = list(map(str, files[start : start + shard_size]))
        controller = BudgetController(session.policy) if keep_budget else None
        summary = predict.Summary()
        rows += list(
            predict.predict(session, names, session.preprocessing, CLASSES, 16, summary, controller=controller)
        )
    return rows


class TestRows:
    @pytest.mark.parametrize("keep_budget", [False, True])
    def test_they_are_those_of_predict(self, keep_budget: bool, bundle: Path, folder: Path, tmp_path: Path) -> None:
        summary = run(folder, bundle, tmp_path / "out", keep_budget=keep_budget)
        rows, files = read_rows(tmp_path / "out"), sorted(folder.rglob("*.png"))
        assert list(rows[0]) == COLUMNS
        assert [row["id"] for row in rows] == [file.relative_to(folder).as_posix() for file in files]
        expected = predicted(files, bundle, keep_budget)
        for row, known in zip(rows, expected, strict=True):
            assert row["path"] == known["image"]
            assert (row["class"], row["label"]) == (known["predicted"], known["label"])
            assert [row[key] for key in ("confidence", "exit", "cost", "error")] == [
                known[key] for key in ("confidence", "exit", "cost", "error")
            ]
        assert {row["bundle"] for row in rows} == {summary.bundle}
        good = [row for row in rows if row["error"] is None]
        assert (summary.images, summary.errors) == (150, 150 - len(good))
        assert summary.errors > 2
        assert summary.mean_cost == pytest.approx(np.mean([row["cost"] for row in good]))
        assert summary.exits == {exit: sum(row["exit"] == exit for row in good) for exit in (0, 1)}
        assert min(summary.exits.values()) > 10

    def test_parts_are_one_dataset_with_a_fixed_schema(self, bundle: Path, folder: Path, tmp_path: Path) -> None:
        run(folder, bundle, tmp_path / "out")
        schema = pyarrow.dataset.dataset(tmp_path / "out" / "parts").schema
        assert schema.names == COLUMNS
        types = [*["string"] * 3, "int32", "double", "int32", "double", "string", "dictionary<values=string"]
        assert all(str(field.type).startswith(type) for field, type in zip(schema, types, strict=True))

    @pytest.mark.parametrize("kind", ["tar", "parquet", "nested paths", "list"])
    def test_every_source_gives_the_same_answers(self, kind: str, bundle: Path, tmp_path: Path) -> None:
        images = {name: image_bytes(number) for number, name in enumerate(contents(60))}
        images["a/0000.png"] = b"no image"
        write_folder(tmp_path / "images", images)
        options: dict[str, Any] = {"shard_size": 20}
        source = tmp_path / "source"
        if kind == "tar":
            write_tars(source, images, 3)
        elif kind == "parquet":
            write_parquet(source, images, 3)
            options["id_column"] = "name"
        elif kind == "nested paths":
            listed = [f"../images/{name}" for name in images]
            write_parquet(source, images, 1, 20, path=listed)
            options |= {"column": "path", "id_column": "name"}
        else:
            (tmp_path / "images" / "names").write_text("\n".join(images))
            source = tmp_path / "images" / "names"
        run(tmp_path / "images" / "[ab]" / "*", bundle, tmp_path / "files", shard_size=20)
        run(source, bundle, tmp_path / "out", **options)
        answers = [
            [tuple(row[key] for key in ("class", "label", "confidence", "exit", "cost")) for row in read_rows(out)]
            for out in (tmp_path / "files", tmp_path / "out")
        ]
        assert answers[0] == answers[1]
        (error,) = [row["error"] for row in read_rows(tmp_path / "out") if row["error"]]
        assert error.endswith(
            "cannot be read as an image (cannot identify image file)" if kind in ("tar", "parquet") else ")"
        )

    def test_null_and_missing_images_are_rows(self, bundle: Path, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", contents(6), 1, path=["no.png", None, "a", None, "b", "c"])
        run(tmp_path / "p", bundle, tmp_path / "out", column="path", id_column="name")
        errors = [row["error"] for row in read_rows(tmp_path / "out")]
        assert "No such file" in errors[0]
        assert errors[1] == "a/0002.png has no path: the column is null"

    def test_a_plugin_that_raises_anything_is_a_row(
        self, bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise IndexError("beyond the end")

        monkeypatch.setattr(shard_scorer, "read_or_error", fail)
        summary = run(folder, bundle, tmp_path / "out")
        assert summary.all_failed
        assert all(row["error"].endswith("(beyond the end)") for row in read_rows(tmp_path / "out"))

    def test_sets_and_abstention_are_columns(self, tmp_path: Path, folder: Path, bundle: Path) -> None:
        plain = json.loads((bundle / "manifest.json").read_text())
        probs = np.random.default_rng(0).dirichlet((1, 1, 1), (2, 400)).astype(np.float32)
        policy = Session(bundle).policy
        labels = probs[1].argmax(axis=1)
        sets = ew.fit_sets(probs, labels, policy=policy, coverage=0.9)
        abstention = ew.fit_abstention(probs, policy=policy, share=0.3)
        shutil.copytree(bundle, tmp_path / "sets")
        plain |= {"sets": sets.to_dict(), "abstention": abstention.to_dict()}
        plain.pop("sha256")
        (tmp_path / "sets" / "manifest.json").write_text(json.dumps(plain))
        summary = run(folder, tmp_path / "sets", tmp_path / "out")
        rows = read_rows(tmp_path / "out")
        assert list(rows[0]) == [*COLUMNS, "set", "abstained"]
        assert summary.abstained == sum(row["abstained"] is True for row in rows) > 0
        assert all((row["set"] is None) == (row["error"] is not None) for row in rows)


class Chaos:
    """Dies at the given steps of the storage and of the decoder, counted over all workers."""

    def __init__(self, deaths: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.deaths = 0, deaths
        for target, name in ((LocalStorage, "write"), (LocalStorage, "remove"), (shard_scorer, "read_or_error")):
            monkeypatch.setattr(target, name, self.wrap(getattr(target, name)))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            self.die_perhaps()
            result = function(*arguments)
            self.die_perhaps()
            return result

        return step

    def die_perhaps(self) -> None:
        self.steps += 1
        if self.steps in self.deaths:
            raise Death


@pytest.fixture(scope="module")
def expected(bundle: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The parts of a job that nothing interrupted."""
    out = tmp_path_factory.mktemp("expected")
    run(folder, bundle, out)
    return read_parts(out)


class TestDeaths:
    @pytest.mark.slow
    @hypothesis_settings(max_examples=15)
    @given(deaths=st.sets(st.integers(1, 800), max_size=5), again=st.integers(1, 400), seed=st.integers(0, 9))
    def test_parts_do_not_depend_on_who_died_when(
        self,
        expected: dict[str, bytes],
        bundle: Path,
        folder: Path,
        tmp_path_factory: pytest.TempPathFactory,
        deaths: set[int],
        again: int,
        seed: int,
    ) -> None:
        """Workers die at any steps, the command dies once, and shards are done in any order."""
        out = tmp_path_factory.mktemp("chaos") / "out"
        order = np.random.default_rng(seed).permutation

        def ordered(shards: Any) -> list[int]:
            return [int(shard) for shard in order(shards)]

        with pytest.MonkeyPatch.context() as patch:
            chaos = Chaos(deaths, patch)
            executor = InProcess(bundle, ordered)
            patch.setattr(executor, "run", dies_after(executor.run, chaos, again))
            try:
                run(folder, bundle, out, executor=executor)
            except Death:
                run(folder, bundle, out, executor=InProcess(bundle, ordered))
        assert read_parts(out) == expected
        assert not list((out / "attempts").iterdir())

    def test_an_image_that_ends_its_process_is_found(
        self, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = {name: data + POISON * (name in ("a/0010.png", "b/0033.png")) for name, data in contents(100).items()}
        write_folder(tmp_path / "images", images)
        decode = image_files.read_or_error

        def decode_or_die(file: Path, *arguments: Any) -> Any:
            if POISON in file.read_bytes():
                raise Death
            return decode(file, *arguments)

        monkeypatch.setattr(shard_scorer, "read_or_error", decode_or_die)
        executor = InProcess(bundle)
        summary = run(tmp_path / "images", bundle, tmp_path / "out", executor=executor)
        rows = read_rows(tmp_path / "out")
        found = {row["id"] for row in rows if row["error"] and "ends the process" in row["error"]}
        assert found == {"a/0010.png", "b/0033.png"}
        assert executor.deaths == 8  # twice unnoticed and twice on the image, in two shards
        # All other rows are as if these two images were damaged.
        monkeypatch.undo()
        for name in found:
            (tmp_path / "images" / name).write_bytes(b"damaged")
        assert run(tmp_path / "images", bundle, tmp_path / "other").errors == summary.errors
        for row, other in zip(rows, read_rows(tmp_path / "other"), strict=True):
            assert row == other or row["id"] in found

    def test_a_death_that_no_image_explains_ends_the_job(
        self, bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            write = parts.write_part

            def write_or_die(storage: Any, path: str, *arguments: Any) -> None:
                if path.endswith("2.parquet"):
                    raise Death
                write(storage, path, *arguments)

            patch.setattr(parts, "write_part", write_or_die)
            executor = InProcess(bundle)
            refused("died again and again on shard 2", folder, bundle, tmp_path / "out", executor=executor)
            assert executor.deaths == 6
        assert sorted(read_parts(tmp_path / "out")) == ["part-00000000.parquet", "part-00000001.parquet"]
        assert run(folder, bundle, tmp_path / "out").resumed == 80

    def test_a_file_may_be_named_like_too_little_memory(self, bundle: Path, tmp_path: Path) -> None:
        write_folder(tmp_path / "images", {"bad alloc/cannot allocate memory.png": b"damaged"})
        assert run(tmp_path / "images", bundle, tmp_path / "out").errors == 1

    def test_too_little_memory_is_not_an_error_of_an_image(
        self, bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise ew.InputError("stage0.onnx cannot run on its inputs: Failed to allocate memory for requested buffer")

        monkeypatch.setattr("exitwise.runtime.onnx.OnnxBackend.run", fail)
        with pytest.raises(MemoryError):
            run(folder, bundle, tmp_path / "out")
        assert not (tmp_path / "out" / "parts").exists()


def dies_after(function: Callable[..., Any], chaos: Chaos, steps: int) -> Callable[..., Any]:
    """Let the command die at an event, when so many steps are done."""

    def run(job: Any, shards: Any, on_event: Any) -> None:
        def on_event_or_die(event: Any) -> None:
            on_event(event)
            if chaos.steps >= steps:
                raise Death

        waiting = list(shards)
        for shard in waiting:
            function(job, [shard], on_event_or_die)

    return run


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["-"], "cannot come from stdin"),
        (["images", "--shard-size", "0"], "--shard-size"),
        (["images", "--column", "x"], "`--column` and `--id-column` are for Parquet files"),
        (["images", "--bundle", "images"], "is not a bundle"),
        (["images", "--out", "images/out"], "`--out` must not lie in the source"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str],
    problem: str,
    bundle: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exitwise: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").symlink_to(folder)
    more = [] if "--bundle" in words else ["--bundle", bundle]
    more += [] if "--out" in words else ["--out", "out"]
    done = exitwise("score", *words, *more)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert problem in done.err
    assert not list(tmp_path.glob("out/p*"))


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with show_progress() as show:
        for second in range(0, 240, 10):
            now[0] = float(second)
            counts = ShardCounts(second, 3, 10.0 * (second - 3), {0: second - 3}, 0) if second else ShardCounts()
            speed, left = (10.0, 24.0) if second else (None, None)
            show(ScoreProgress(240, counts, 5, speed, left, "MACs"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    expected = "65 of 240 images; 10 rows/s, 0:00:24 left; mean cost 10 MACs; 100% at exit 0; 3 errors"
    assert lines[0] == f"exitwise: {expected}"


@pytest.mark.parametrize("size", [(500, 375), (9, 12), (375, 500)])
def test_a_draft_has_nearly_the_same_pixels(size: tuple[int, int]) -> None:
    """Smooth images are equal but for rounding, and images that are small already are equal."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]] / max(size)
    pixels = np.stack([128 + 100 * np.sin(5 * x + 3 * y), 255 * x, 255 * y], axis=-1).astype(np.uint8)
    preprocessing = ew.Preprocessing(32, (0.5,) * 3, (0.25,) * 3, 256 / 224)
    for format, exif in (("JPEG", 6), ("JPEG", 1), ("PNG", 1)):
        data, tags = io.BytesIO(), Image.Exif()
        tags[0x0112] = exif
        Image.fromarray(pixels).save(data, format, exif=tags)
        full, draft = (load_image(data.getvalue(), preprocessing, "x", decoder).astype(int) for decoder in DECODERS)
        difference = np.abs(full - draft)
        assert difference.mean() < 1
        assert difference.max() <= (8 if format == "JPEG" and max(size) > 100 else 0)
        assert (difference.max() > 0) == (format == "JPEG" and max(size) > 100)  # it is really another decoder
