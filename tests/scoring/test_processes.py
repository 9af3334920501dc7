"""`exitwise score` in real processes that are killed: rows stay those of a job that nothing interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scoring_cases import POISON, SITE, InProcess, contents, read_parts, read_rows, write_folder

import exitwise as ew

pytestmark = pytest.mark.slow

SHARDS = 15


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of 300 images, some damaged."""
    return write_folder(tmp_path_factory.mktemp("images") / "images", contents(300))


@pytest.fixture(scope="module")
def expected(bundle: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The parts of a job that nothing interrupted, made in one process."""
    out = tmp_path_factory.mktemp("expected")
    ew.score(images, bundle=bundle, out=out, shard_size=20, executor=InProcess(bundle))
    return read_parts(out)


@pytest.fixture
def command(bundle: Path, tmp_path: Path) -> Callable[[Path], "subprocess.Popen[str]"]:
    """Start the command with two workers, which die where `SITE` lets them."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    (tmp_path / "deaths").mkdir()
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DEATHS": str(tmp_path / "deaths")}

    def start(source: Path) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "exitwise", "score", source, "--bundle", bundle, "--out", tmp_path / "out"]
        words += ["--workers", "2", "--shard-size", "20", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(list(map(str, words)), text=True, env=environment, **pipes)

    return start


def finish(process: "subprocess.Popen[str]") -> dict[str, object]:
    """Wait for a command that must succeed, and return its summary."""
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    summary: dict[str, object] = json.loads(out)
    return summary


def children(process: int) -> list[int]:
    """Return the ids of the processes that a process started."""
    return [
        int(child) for file in Path(f"/proc/{process}/task").glob("*/children") for child in file.read_text().split()
    ]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_kills_at_any_moment_change_no_byte(
    command: Callable[[Path], "subprocess.Popen[str]"],
    images: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    seed: int,
) -> None:
    """Workers are killed before and after a commit, the command twice, at random numbers of parts."""
    rng = np.random.default_rng(seed)
    out = tmp_path / "out"
    for ticket in ("before 1", "before 2", "before 3", "after 1"):
        (tmp_path / "deaths" / ticket).touch()
    for count in sorted(rng.choice(SHARDS - 2, 2, replace=False)):
        process = command(images)
        wait_until(
            lambda count=count: len(list((out / "parts").glob("part-*"))) >= count and (out / "attempts").exists()
        )
        workers = children(process.pid)
        if rng.random() < 0.5:
            os.kill(int(rng.choice(workers)), signal.SIGKILL)
        process.kill()
        process.communicate()
        wait_until(lambda workers=workers: not any(map(is_running, workers)))  # they notice that the command is gone
    summary = finish(command(images))
    assert read_parts(out) == expected
    assert not list((tmp_path / "deaths").iterdir())
    assert summary["images"] == 300
    assert 0 < int(str(summary["resumed"])) < 300


def test_workers_with_too_little_memory_are_one_line_and_the_job_resumes(
    command: Callable[[Path], "subprocess.Popen[str]"], images: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """The net has no memory to run, as if another program had taken it: no image gets an error for that."""
    site = tmp_path / "site" / "sitecustomize.py"
    site.write_text(f"""{SITE}
    import exitwise.runtime.onnx as onnx

    def run(*_):
        raise onnx.InputError("stage0.onnx cannot run on its inputs: Failed to allocate memory for requested buffer")

    onnx.OnnxBackend.run = run
""")
    process = command(images)
    out, err = process.communicate()
    assert (process.returncode, out, len(err.splitlines())) == (2, "", 1)
    assert "workers died again and again on shard" in err
    assert "use fewer --workers" in err
    site.write_text(SITE)
    finish(command(images))
    assert read_parts(tmp_path / "out") == expected


def test_output_of_a_library_in_another_encoding_does_not_stop_a_worker(
    command: Callable[[Path], "subprocess.Popen[str]"], images: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    site = tmp_path / "site" / "sitecustomize.py"
    noise = r'b"caf\xe9 " * 20 + b"\n"'  # more than a pipe holds
    site.write_text(f"{SITE}\n    for _ in range(2000):\n        os.write(2, {noise})\n")
    finish(command(images))
    assert read_parts(tmp_path / "out") == expected


def test_images_that_end_their_process_become_rows(
    command: Callable[[Path], "subprocess.Popen[str]"], images: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    poisonous = {"a/0010.png": POISON, "b/0201.png": b"takes all memory"}
    found = {file.relative_to(images).as_posix(): file.read_bytes() for file in images.rglob("*.png")}
    write_folder(tmp_path / "images", {name: data + poisonous.get(name, b"") for name, data in found.items()})
    summary = finish(command(tmp_path / "images"))
    rows = {row["id"]: row for row in read_rows(tmp_path / "out")}
    assert list(rows) == sorted(found)
    assert {name for name, row in rows.items() if "ends the process" in str(row["error"])} == set(poisonous)
    damaged = sum(number % 40 == 7 for number in range(300))
    assert summary["errors"] == damaged + 2


@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_processes_and_the_job_resumes(
    signal_number: int,
    status: int,
    command: Callable[[Path], "subprocess.Popen[str]"],
    images: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
) -> None:
    process = command(images)
    wait_until(lambda: list(tmp_path.glob("out/parts/part-*")))
    workers = children(process.pid)
    process.send_signal(signal_number)
    out, err = process.communicate()
    assert (process.returncode, out) == (status, "")
    assert err == ("exitwise: interrupted\n" if status == 130 else "")
    assert not any(map(is_running, workers))
    assert all(data == expected[name] for name, data in read_parts(tmp_path / "out").items())
    if signal_number == signal.SIGINT:
        assert int(str(finish(command(images))["resumed"])) > 0
        assert read_parts(tmp_path / "out") == expected


def test_a_full_disk_is_one_line_and_the_job_resumes(
    command: Callable[[Path], "subprocess.Popen[str]"], images: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "deaths" / "full").touch()
    process = command(images)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    line = r".*part-\d+.parquet: No space left on device. What is scored stays; the same command resumes"
    assert re.fullmatch(rf"exitwise: {line}\n", err)
    assert not list(tmp_path.glob("out/parts/part-*"))  # the other worker may have left a partial file
    (tmp_path / "deaths" / "full").unlink()
    finish(command(images))
    assert read_parts(tmp_path / "out") == expected


def test_workers_that_had_nothing_to_do_are_noted(bundle: Path, images: Path, tmp_path: Path) -> None:
    words = ["score", images, "--bundle", bundle, "--out", tmp_path / "out", "--workers", "2"]
    command = [sys.executable, "-m", "exitwise", *map(str, words)]
    first, again = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    _, note = first.stderr.splitlines()
    assert note.endswith("these images are one shard, so that other workers had nothing to do: try --shard-size 38")
    assert len(again.stderr.splitlines()) == 1


def test_workers_that_cannot_start_are_one_line(
    command: Callable[[Path], "subprocess.Popen[str]"], images: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site" / "sitecustomize.py"
    site.write_text("import os, sys\nif 'exitwise.scoring.worker' in sys.orig_argv:\n    os._exit(7)\n")
    process = command(images)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == "exitwise: a worker died before it was ready 3 times (exit status 7)\n"
