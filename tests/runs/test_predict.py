"""`exitwise predict`: images to rows, in real processes."""

import csv
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, with_paper_method, zoo_run
from PIL import Image

import exitwise as ew
from exitwise.calibration.methods import OURS
from exitwise.cli import deploy

pytestmark = pytest.mark.numerical

FIELDS = ["image", "predicted", "label", "confidence", "exit", "cost", "error"]


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


def noise(seed: int, shape: tuple[int, ...] = (32, 32, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's net as a run, calibrated."""
    place = zoo_run(tmp_path_factory.mktemp("predict") / "run")
    trace = ew.Trace.load(place / "trace.safetensors")
    made = ew.calibrate(trace, OURS)
    made.save(place / "calibrations" / f"{made.method.slug}.safetensors")
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty images, in two folders."""
    place = tmp_path_factory.mktemp("pictures")
    (place / "b").mkdir()
    for number in range(40):
        Image.fromarray(noise(number)).save(place / ("b" if number % 2 else ".") / f"{number:02}.png")
    (place / "notes.txt").write_text("not an image")
    return place


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "exitwise", *map(str, arguments)]


class TestRows:
    @pytest.mark.slow
    def test_they_are_the_classifiers_answers(self, run: Path, folder: Path, tmp_path: Path, exitwise: Command) -> None:
        done = exitwise("predict", run, folder, "--budget", "50%", "--out", tmp_path / "p.csv")
        assert done.status == 0
        assert done.out == ""
        rows = read(tmp_path / "p.csv")
        files = sorted(folder.rglob("*.png"))
        assert [row["image"] for row in rows] == [str(file) for file in files]
        trace = ew.Trace.load(run / "trace.safetensors")
        calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt")
        half = trace.costs.values[-1] / 2
        policy = ew.fit_policy(calibration.predict(trace.val), trace.val.labels, trace.costs, budget=half)
        pictures = torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files])).permute(0, 3, 1, 2)
        # CIFAR-100's published mean and deviation of each channel
        mean, std = torch.tensor([0.5071, 0.4867, 0.4408]), torch.tensor([0.2675, 0.2565, 0.2761])
        images = (pictures / 255 - mean[:, None, None]) / std[:, None, None]
        found = ew.Classifier(ew.load_net(run / "net.safetensors"), calibration, policy)(images)
        assert [int(row["predicted"]) for row in rows] == found.predicted.tolist()
        assert [int(row["exit_from_0"]) for row in rows] == found.exits.tolist()
        assert [float(row["cost"]) for row in rows] == found.costs.tolist()
        assert [float(row["confidence"]) for row in rows] == pytest.approx(found.probs.amax(1).tolist(), abs=1e-5)
        assert trace.classes is not None
        assert [row["label"] for row in rows] == [trace.classes[k] for k in found.predicted.tolist()]
        assert "40 images" in done.err
        assert f"mean cost {found.mean_cost / 1e6:.4g} million MACs" in done.err

    def test_lines_of_json_with_all_probabilities(self, run: Path, folder: Path, exitwise: Command) -> None:
        done = exitwise("predict", run, folder / "00.png", folder / "b", "--budget", "2e7", "--json", "--probs")
        rows = [json.loads(line) for line in done.out.splitlines()]
        assert len(rows) == 21
        assert list(rows[0]) == [*FIELDS, "probs"]
        for row in rows:
            assert sum(row["probs"]) == pytest.approx(1, abs=1e-4)
            assert row["probs"][row["predicted"]] == pytest.approx(row["confidence"], abs=1e-6)
            assert row["error"] is None

    def test_a_list_on_stdin(self, run: Path, folder: Path, exitwise: Command, monkeypatch: Any) -> None:
        class Stdin:
            buffer = BytesIO(f"{folder / '04.png'}\r\n\n{folder / '02.png'}\n{folder / 'gone.png'}".encode())

        monkeypatch.setattr(sys, "stdin", Stdin())
        done = exitwise("predict", run, "-", "--budget", "50%")
        rows = list(csv.DictReader(done.out.splitlines()))
        assert [Path(row["image"]).name for row in rows] == ["04.png", "02.png", "gone.png"]
        assert "No such file" in rows[2]["error"]
        assert rows[1]["error"] == ""

    @pytest.mark.slow
    def test_without_a_budget_the_last_evaluated_one_counts(self, run: Path, folder: Path, exitwise: Command) -> None:
        said = exitwise("predict", run, folder / "00.png")
        assert "half of the full cost" in said.err
        exitwise("evaluate", run, "--budget", "30%")
        low = exitwise("predict", run, folder, "--json")
        assert "half" not in low.err
        again = exitwise("predict", run, folder, "--json", "--budget", "30%")
        assert low.out == again.out
        (run / "policy.json").unlink()


class TestPictures:
    """Contents of files."""

    @pytest.mark.parametrize(
        ("make", "problem"),
        [
            (lambda path: path.write_bytes(b""), "cannot be read as an image"),
            (lambda path: path.write_bytes(b"text"), "cannot be read as an image"),
            (lambda path: path.mkdir(), "holds no images"),
            (lambda path: Image.fromarray(noise(1, (64, 64, 3))).save(path, "JPEG"), None),
            (lambda path: Image.fromarray(noise(1, (100, 40))).save(path, "PNG"), None),
            (lambda path: Image.fromarray(noise(1, (32, 32, 4))).save(path, "PNG"), None),
            (lambda path: Image.new("RGB", (32, 32), (7, 7, 7)).save(path, "PNG"), "every pixel is (7, 7, 7)"),
            (lambda path: Image.new("L", (5, 9), 0).save(path, "PNG"), "every pixel is (0, 0, 0)"),
            (lambda path: Image.new("RGB", (40, 40), (200, 10, 10)).save(path, "PNG"), "every pixel is (200, 10, 10)"),
            (lambda path: Image.fromarray(np.full((32, 32), np.nan, np.float32)).save(path, "TIFF"), "32 bits"),
        ],
    )
    @pytest.mark.slow_after_first
    def test_each_gets_a_row(
        self,
        make: Callable[[Path], Any],
        problem: str | None,
        run: Path,
        folder: Path,
        tmp_path: Path,
        exitwise: Command,
    ) -> None:
        odd = tmp_path / "odd"
        make(odd)
        done = exitwise("predict", run, folder / "00.png", odd, folder / "02.png", "--budget", "50%", "--json")
        if odd.is_dir():
            assert (done.status, done.out) == (2, "")
            assert problem is not None
            assert problem in done.err
            return
        assert done.status == 0
        rows = [json.loads(line) for line in done.out.splitlines()]
        assert [Path(row["image"]).name for row in rows] == ["00.png", "odd", "02.png"]
        assert rows[0]["error"] is None
        assert rows[2]["error"] is None
        if problem is None:
            assert rows[1]["error"] is None
        else:
            assert problem in rows[1]["error"]
            assert [rows[1][key] for key in FIELDS[1:6]] == [None] * 5
            assert "1 with an error" in done.err

    def test_a_truncated_picture_is_an_error(self, run: Path, folder: Path, tmp_path: Path, exitwise: Command) -> None:
        whole = (folder / "00.png").read_bytes()
        (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
        done = exitwise("predict", run, tmp_path / "cut.png", "--budget", "50%", "--json")
        assert "cannot be read" in json.loads(done.out)["error"]

    @pytest.mark.slow
    def test_a_net_that_overflows_says_so_in_the_row(
        self, run: Path, folder: Path, tmp_path: Path, exitwise: Command
    ) -> None:
        """The net with a first layer so large that bright images overflow float32."""
        broken = tmp_path / "run"
        shutil.copytree(run, broken)
        net = ew.load_net(broken / "net.safetensors")
        weight = dict(net.named_parameters())["stages.0.0.scales.0.0.weight"]
        with torch.no_grad():
            weight *= 1e37
        ew.save_checkpoint(net, broken / "net.safetensors")
        done = exitwise("predict", broken, folder / "00.png", "--budget", "50%", "--json")
        assert done.status == 1  # nothing succeeded
        row = json.loads(done.out)
        assert "not finite" in row["error"]
        assert row["predicted"] is None

    @pytest.mark.slow
    def test_pictures_of_one_channel(self, tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run on digits reads an image file like its dataset: gray, 8 x 8."""
        monkeypatch.chdir(tmp_path)
        exitwise("train", "--data", "digits", "--out", "run", "--epochs", 2)
        exitwise("collect", "run")
        pictures, _ = ew.data.load("digits")
        pixels = pictures.pixels_of(torch.arange(20), None, None)
        for number, picture in enumerate(pixels):
            Image.fromarray(picture[0].numpy()).save(f"{number:02}.png")
        done = exitwise("predict", "run", *(f"{number:02}.png" for number in range(20)), "--budget", "80%", "--json")
        rows = [json.loads(line) for line in done.out.splitlines()]
        net = ew.load_net("run/net.safetensors")
        with torch.no_grad():
            logits = net((pixels / 255 - 0.3053) / 0.3760)
        for k, row in enumerate(rows):
            assert row["error"] is None
            if row["exit"] == 0:  # calibrated by temperature and draws, which seldom change the first choice
                assert logits[0][k].topk(2).indices.tolist().count(row["predicted"]) == 1


class TestStatus:
    """Exit status: 0, 1 if every image failed, 2 if an input does not exist."""

    def test_an_input_that_does_not_exist(self, run: Path, folder: Path, tmp_path: Path, exitwise: Command) -> None:
        out = tmp_path / "p.csv"
        for name in (tmp_path / "nowhere", folder / "gone.png"):
            done = exitwise("predict", run, folder / "00.png", name, "--budget", "50%", "--out", out)
            assert (done.status, done.out) == (2, "")
            assert done.err == f"exitwise: {name} does not exist\n"
            assert not out.exists()

    @pytest.mark.slow
    def test_nothing_succeeded(self, run: Path, folder: Path, tmp_path: Path, exitwise: Command) -> None:
        bad, out = tmp_path / "bad.png", tmp_path / "p.csv"
        bad.write_text("text")
        alone = exitwise("predict", run, bad, "--budget", "50%", "--out", out)
        assert alone.status == 1
        assert "1 with an error, see their rows" in alone.err
        assert exitwise("predict", run, bad, "--budget", "50%", "--out", out, "--resume").status == 1
        assert exitwise("predict", run, bad, folder / "00.png", "--budget", "50%", "--out", out, "--resume").status == 0
        assert exitwise("predict", run, bad, folder / "00.png", "--budget", "50%").status == 0

    def test_nothing_on_stdin(self, run: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        class Stdin:
            buffer = BytesIO(b"nowhere.png\n")

        monkeypatch.setattr(sys, "stdin", Stdin())
        assert exitwise("predict", run, "-", "--budget", "50%").status == 1


class TestShown:
    """Names that are meant for a terminal or a spreadsheet."""

    def test_escapes_in_names_are_shown_escaped(self, run: Path, tmp_path: Path, exitwise: Command) -> None:
        name = tmp_path / "\x1b[31mred\x9b2J\u202egnp.txt"
        done = exitwise("predict", run, name, "--budget", "50%")
        assert done.err == f"exitwise: {tmp_path}/\\x1b[31mred\\x9b2J\\u202egnp.txt does not exist\n"

    @pytest.mark.slow
    def test_rows_in_a_terminal_are_escaped_and_in_a_pipe_as_they_are(
        self, run: Path, folder: Path, tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = tmp_path / "\x1b[31mred.png"
        shutil.copy(folder / "00.png", name)
        assert "\x1b[31mred.png" in exitwise("predict", run, name, "--budget", "50%").out
        monkeypatch.setattr(deploy, "_is_terminal", lambda: True)
        shown = exitwise("predict", run, name, "--budget", "50%").out
        assert "\\x1b[31mred.png" in shown
        assert "\x1b" not in shown
        assert len(shown.splitlines()) == 2

    @pytest.mark.slow
    def test_cells_that_a_spreadsheet_would_compute(
        self, run: Path, folder: Path, tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        names = ["=1+1.png", "@x.png"]
        for name in names:
            shutil.copy(folder / "00.png", name)
        options = ("--budget", "50%", "--out", "p.csv")
        done = exitwise("predict", run, names[0], *options, "--csv-safe")
        assert done.status == 0, done.err
        assert [row["image"] for row in read(Path("p.csv"))] == ["'=1+1.png"]
        resumed = exitwise("predict", run, *names, *options, "--resume", "--csv-safe")
        assert resumed.status == 0, resumed.err
        assert [row["image"] for row in read(Path("p.csv"))] == ["'=1+1.png", "'@x.png"]
        refused = exitwise("predict", run, *names, "--budget", "50%", "--json", "--csv-safe")
        assert refused.status == 2
        assert "--csv-safe needs --format csv" in refused.err


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A list of six hundred images, most of which reach the last exit: it runs, and rows come, every hundred images."""
    place = tmp_path_factory.mktemp("squares")
    for number in range(40):
        Image.fromarray(noise(number, (4, 4, 3))).resize((32, 32), Image.Resampling.NEAREST).save(
            place / f"{number:02}.png"
        )
    return "".join(f"{file}\n" for file in sorted(place.iterdir()) * 15).encode()


@pytest.fixture(scope="module")
def whole(run: Path, names: bytes, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The rows of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "p.csv"
    subprocess.run(order(run, out), input=names, check=True, capture_output=True)
    return out.read_bytes()


def order(run: Path, out: Path, *more: str) -> list[str]:
    return [*listed(run), "--batch-size", "4", "--out", str(out), *more]


def listed(run: Path) -> list[str]:
    """The command for a list of images on stdin, with the method that the run is calibrated for."""
    return command("predict", run, "-", "--budget", "100%", "--method", OURS, "--score", "confidence")


class TestFaults:
    """Interruptions, and two at once."""

    @pytest.mark.slow
    def test_two_writers_of_one_file(self, run: Path, names: bytes, tmp_path: Path, exitwise: Command) -> None:
        """The second ends with one line, and the first loses no row."""
        out = tmp_path / "p.csv"
        first = subprocess.Popen(order(run, out), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert first.stdin is not None
        some = names.splitlines(keepends=True)[:8]
        first.stdin.write(b"".join(some[:4]))
        first.stdin.flush()
        while not (out.exists() and out.stat().st_size) and first.poll() is None:
            time.sleep(0.01)
        name = os.fsdecode(some[0].strip())
        seconds = [exitwise("predict", run, name, "--budget", "50%", "--out", out, o) for o in ("--resume", "--force")]
        first.stdin.write(b"".join(some[4:]))
        first.stdin.close()
        assert first.wait(timeout=300) == 0
        assert first.stderr is not None
        first.stderr.close()
        for second in seconds:
            assert second.status == 2
            assert f"{out} is being written by another process" in second.err
        assert [row["image"] for row in read(out)] == [os.fsdecode(name.strip()) for name in some]

    def same(self, found: bytes, whole: bytes) -> None:
        """Check for rows of the same images with the same answers; probabilities may differ in the last digits."""
        mine, theirs = ([line.split(b",") for line in data.splitlines()] for data in (found, whole))
        assert [row[0] for row in mine] == [row[0] for row in theirs]
        assert sum(a[:3] + a[4:] != b[:3] + b[4:] for a, b in zip(mine, theirs, strict=True)) <= 2

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    @pytest.mark.slow
    def test_interrupted_and_resumed_no_row_is_lost_and_none_is_twice(
        self, number: signal.Signals, run: Path, names: bytes, whole: bytes, tmp_path: Path
    ) -> None:
        out = tmp_path / "p.csv"
        lines = names.splitlines(keepends=True)
        for third in (1, 2):
            process = subprocess.Popen(order(run, out, "--resume"), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            assert process.stdin is not None
            assert process.stderr is not None
            before = out.stat().st_size if out.exists() else 0
            # It waits for the other names, so it can neither end nor finish all rows before it is interrupted.
            process.stdin.write(b"".join(lines[: len(lines) * third // 3]))
            process.stdin.flush()
            limit = time.monotonic() + 300
            while not (out.exists() and out.stat().st_size > before + 500):
                assert process.poll() is None, process.stderr.read().decode()
                assert time.monotonic() < limit
                time.sleep(0.002)
            process.send_signal(number)
            status = process.wait(timeout=300)
            assert status == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
            assert "Traceback" not in process.stderr.read().decode()
            process.stderr.close()
            process.stdin.close()
            if number != signal.SIGKILL:  # which leaves no time for anything
                assert out.read_bytes().endswith(b"\n")
            assert whole.count(b"\n") > out.read_bytes().count(b"\n") > 1
        subprocess.run(order(run, out, "--resume"), input=names, check=True, capture_output=True)
        self.same(out.read_bytes(), whole)

    @pytest.mark.slow
    def test_a_full_disk(self, run: Path, names: bytes, whole: bytes, tmp_path: Path) -> None:
        """A limit on the size of files stands for it: the same error, from the same call."""
        out = tmp_path / "p.csv"

        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_001, 10_001))

        done = subprocess.run(order(run, out), input=names, capture_output=True, preexec_fn=limit, check=False)
        assert done.returncode == 2
        assert done.stderr.decode().count("\n") == 1
        assert f"File too large: {out}" in done.stderr.decode()
        held = out.read_bytes()
        assert 9_000 < len(held) <= 10_001
        assert held.endswith(b"\n")
        self.same(held, b"".join(whole.splitlines(keepends=True)[: held.count(b"\n")]))
        subprocess.run(order(run, out, "--resume"), input=names, check=True, capture_output=True)
        self.same(out.read_bytes(), whole)

    @pytest.mark.slow
    def test_a_reader_that_goes_away(self, run: Path, names: bytes) -> None:
        process = subprocess.Popen(
            [*listed(run), "--batch-size", "4"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(names)
        process.stdin.close()
        lines = [process.stdout.readline() for _ in range(3)]
        process.stdout.close()
        assert process.wait() != 0
        assert lines[0].decode().strip().split(",") == ["exit_from_0" if name == "exit" else name for name in FIELDS]
        assert "Traceback" not in process.stderr.read().decode()
        process.stderr.close()

    @pytest.mark.slow
    def test_stdout_on_a_full_disk(self, run: Path, names: bytes) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                listed(run),
                input=names,
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
            )
        assert done.returncode == 2
        assert done.stderr.decode().splitlines()[-1] == "exitwise: No space left on device"


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["--format", "xml"], "'--format': 'xml' is not one of 'csv', 'jsonl'"),
            (["--format", "csv", "--json"], "--json means --format jsonl"),
            (["--probs"], "--probs needs --format jsonl"),
            (["--resume"], "name it with --out"),
            (["--batch-size", "0"], "'--batch-size': Input should be greater than or equal to 1, but got '0'"),
            (["--threads", "0"], "'--threads': Input should be greater than or equal to 1, but got '0'"),
            (["--budget", "much"], "`--budget` must be like"),
            (["--budget", "1%"], "`--budget` 1% is below the cost of the first exit"),
            (["--budget", "5ms"], "has no times yet: run `exitwise bench"),
            (["--score", "luck"], "`--score` must be one of"),
            (["--method", "T_opt", "--score", "variance"], "needs draws"),
            (["--net", "os:getcwd"], "--net is for other nets"),
        ],
    )
    def test_options(self, arguments: list[str], problem: str, run: Path, folder: Path, exitwise: Command) -> None:
        done = exitwise("predict", run, folder / "00.png", *arguments)
        assert (done.status, done.out) == (2, "")
        assert problem in done.err
        assert len(done.err.splitlines()) <= 2

    @pytest.mark.slow
    def test_a_file_that_exists(self, run: Path, folder: Path, tmp_path: Path, exitwise: Command) -> None:
        out = tmp_path / "p.csv"
        exitwise("predict", run, folder / "00.png", folder / "02.png", "--budget", "50%", "--out", out)
        before = out.read_bytes()
        assert "exists" in exitwise("predict", run, folder / "00.png", "--budget", "50%", "--out", out).err
        other = exitwise("predict", run, folder / "02.png", "--budget", "50%", "--out", out, "--resume")
        assert other.status == 2
        assert "the list of images has changed" in other.err
        shorter = exitwise("predict", run, folder / "00.png", "--budget", "50%", "--out", out, "--resume")
        assert "there are no more images" in shorter.err
        assert out.read_bytes() == before
        exitwise("predict", run, folder / "04.png", "--budget", "50%", "--out", out, "--force")
        assert [Path(row["image"]).name for row in read(out)] == ["04.png"]
        assert "is not a regular file" in exitwise("predict", run, folder, "--out", tmp_path).err
        assert exitwise("predict", run, folder / "00.png", "-").status == 2
        assert "is not a run" in exitwise("predict", tmp_path, folder / "00.png").err
