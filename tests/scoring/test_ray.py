"""`exitwise score` and `exitwise collect` on a real Ray cluster, whose processes are killed."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command import Command
from scoring_cases import POISON, SITE, InProcess, contents, read_parts, read_rows, write_bundle, write_folder

import exitwise as ew
from exitwise.core.errors import InputError
from exitwise.scoring.ray_executor import _MakeScorer

pytest.importorskip("ray")

# In Ray's processes; an image with this content takes long enough to be killed on.
IN_RAY = SITE.replace('"exitwise.scoring.worker" in sys.orig_argv', '"ray::" in sys.orig_argv or is_ray_worker()')
IN_RAY = f"""
def is_ray_worker():
    return any(word.endswith("default_worker.py") for word in sys.orig_argv)
{IN_RAY}"""


class Cluster:
    """A cluster of two CPUs on this machine, and commands that run on it."""

    def __init__(self, folder: Path) -> None:
        self.deaths = folder / "deaths"
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(IN_RAY)
        source = str(Path(ew.__file__).parent.parent)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), source]),
            "DEATHS": str(self.deaths),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"
        words = ["start", "--head", "--block", f"--port={self.address.partition(':')[2]}", "--num-cpus=2"]
        words += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={folder}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout
        lines = iter(self.process.stdout.readline, "")
        assert any("Ray runtime started" in line for line in lines)

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate()

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start a command on the cluster, with the time of its rows."""
        return self.start_python("-m", "exitwise", *words, "--ray", self.address)

    def start_python(self, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: object) -> str:
        """Run a command that succeeds; return its stderr, which Ray must leave alone."""
        process = self.start(*words)
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert "ray" not in out.lower()
        return err

    def die(self, *when: str) -> None:
        """Let actors die between the data and the commit of the next parts, or after it."""
        shutil.rmtree(self.deaths, ignore_errors=True)
        self.deaths.mkdir()
        for number, name in enumerate(when):
            (self.deaths / f"{name}-{number}").touch()

    def kill(self, program: str) -> None:
        """Kill one of Ray's own processes."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if program in path.read_bytes().decode() and self._is_ours(path.parent):
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                continue

    def actors(self) -> list[int]:
        """Ids of the processes of our actors."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if b"TaskActor" in path.read_bytes() and self._is_ours(path.parent):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def _is_ours(self, process: Path) -> bool:
        return f"DEATHS={self.deaths}\0".encode() in (process / "environ").read_bytes()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ew-ray-", dir="/tmp"))  # a short path, for Ray's sockets
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[object, ...], Path]:
    """Words of a command that scores a folder with two images that end their process, and the job of a local run."""
    folder = tmp_path_factory.mktemp("job")
    images = {**contents(99), "a/poison.png": POISON, "b/large.png": b"takes all memory"}
    words = ("score", write_folder(folder / "images", images), "--bundle", write_bundle(folder / "bundle"))
    words += ("--shard-size", "10")
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{Path(ew.__file__).parent.parent}"}
    command = [sys.executable, "-m", "exitwise", *map(str, words), "--out", str(folder / "local")]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return words, folder / "local"


Job = tuple[tuple[object, ...], Path]


def without_progress(err: str) -> list[str]:
    """The lines of a command without those of its progress, which a log gets once a minute on a slow machine."""
    return [line for line in err.splitlines() if not re.match(r"exitwise: [\d,]+ of [\d,]+ images; ", line)]


@pytest.mark.slow
def test_rows_are_those_of_local_processes_whatever_is_killed(cluster: Cluster, job: Job, tmp_path: Path) -> None:
    words, local = job
    cluster.die("before", "after", "before")
    err = cluster.run(*words, "--out", tmp_path / "out")
    assert not list(cluster.deaths.iterdir())  # the actors died as they should
    assert "101 rows" in err
    assert len(without_progress(err)) == 1, err
    assert read_parts(tmp_path / "out") == read_parts(local)
    rows = read_rows(tmp_path / "out")
    assert sum("ends the process" in (row["error"] or "") for row in rows) == 2


@pytest.mark.slow
def test_a_killed_command_resumes(cluster: Cluster, job: Job, tmp_path: Path) -> None:
    words, local = job
    cluster.die()
    command, out = (*words, "--out", tmp_path / "out", "--workers", "1"), tmp_path / "out"
    process = cluster.start(*command)
    wait_until(lambda: any((out / "parts").glob("part-*")) if (out / "parts").exists() else False, process)
    process.kill()
    process.communicate()
    left = len(list((out / "parts").glob("part-*")))
    wait_until(lambda: not cluster.actors())  # Ray ends the actors of a command that is gone
    assert left < 11
    cluster.run(*command)
    assert read_parts(out) == read_parts(local)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["raylet/raylet", "gcs/gcs_server"])
def test_a_cluster_that_ends_is_one_line_and_the_job_resumes(program: str, bundle: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "images", tmp_path / "out"
    write_folder(source, {f"{copy}/{name}": data for copy in range(40) for name, data in contents(100).items()})
    folder = Path(tempfile.mkdtemp(prefix="ew-ray-", dir="/tmp"))
    try:
        cluster = Cluster(folder)
        try:
            process = cluster.start("score", source, "--bundle", bundle, "--out", out, "--shard-size", "1")
            wait_until(lambda: len(list(out.glob("parts/part-*"))) > 3, process)
            cluster.kill(program)
            _, err = process.communicate(timeout=100)
        finally:
            cluster.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert process.returncode == 2, err
    assert len(without_progress(err)) == 1, err
    assert err.endswith("What is scored stays; the same command resumes\n")
    done = read_parts(out)
    assert 3 < len(done) < 4000
    summary = ew.score(source, bundle=bundle, out=out, shard_size=1, executor=InProcess(bundle))
    assert (summary.images, summary.resumed) == (4000, len(done))
    assert done.items() <= read_parts(out).items()


@pytest.mark.slow
def test_a_missing_token_is_one_line(cluster: Cluster, job: Job, exitwise: Command, tmp_path: Path) -> None:
    outcome = exitwise(*job[0], "--out", tmp_path / "out", "--ray", cluster.address)
    assert outcome.status == 2
    assert len(without_progress(outcome.err)) == 1, outcome.err
    assert "it wants its token, by RAY_AUTH_MODE=token" in outcome.err


@pytest.mark.slow
def test_a_terminated_command_ends_as_the_others_do(cluster: Cluster, job: Job, tmp_path: Path) -> None:
    cluster.die()
    process = cluster.start(*job[0], "--out", tmp_path / "out")
    wait_until(lambda: bool(cluster.actors()), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_trace_is_that_of_one_process(cluster: Cluster, digits_run: Path, tmp_path: Path) -> None:
    """With shards of two batches: the same features bit for bit, and the same curvature but for the order of sums."""
    cluster.die()
    one, many = (shutil.copytree(digits_run, tmp_path / name) for name in ("one", "many"))
    options = ("--batch-size", "32", "--force")
    subprocess.run(
        [sys.executable, "-m", "exitwise", "collect", one, *options],
        check=True,
        capture_output=True,
        env=cluster.environment,
    )
    code = """
import sys
from exitwise.calibration import ray_collect
from exitwise.cli.app import main
ray_collect._SHARD_SAMPLES = {"val": 64, "test": 64, "train": 100}
sys.argv[0] = "exitwise"
main()
"""
    process = cluster.start_python("-c", code, "collect", many, *options, "--json", "--ray", cluster.address)
    wait_until(lambda: bool(cluster.actors()), process)
    os.kill(cluster.actors()[0], signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out)["samples"] == {"val": 297, "test": 500, "train": 1000}  # nothing of Ray's is in it
    expected, trace = (ew.Trace.load(run / "trace.safetensors") for run in (one, many))
    for a, b in ((expected.val, trace.val), (expected.test, trace.test)):
        assert a is not None
        assert b is not None
        assert all(torch.equal(x, y) for x, y in zip(a.features, b.features, strict=True))
        assert torch.equal(a.labels, b.labels)
        assert a.index is not None
        assert torch.equal(a.index, b.index)
    for a, b in zip(expected.curvature, trace.curvature, strict=True):
        assert a.n == b.n == 1000
        for x, y in ((a.A, b.A), (a.B, b.B)):
            assert float((x - y).abs().max() / x.abs().max()) < 1e-10
    assert trace.costs == expected.costs
    assert trace.classes == expected.classes


@pytest.mark.slow
def test_actors_that_die_again_and_again_end_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, sys\nimport exitwise as ew\n\n"
        "def net():\n"
        "    if any(word.endswith('default_worker.py') for word in sys.orig_argv):\n"
        "        os._exit(3)\n"
        "    return ew.models.msdnet('tiny-8')\n"
    )
    ew.save_checkpoint(ew.models.msdnet("tiny-8"), tmp_path / "net.safetensors")
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); from exitwise.cli.app import main; sys.argv[0] = 'x'; main()"
    words = ("collect", "run", "--data", "digits", "--net", "mine:net", "--checkpoint", "net.safetensors")
    process = cluster.start_python("-c", code, *words, "--ray", cluster.address)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith("exitwise: a Ray actor died before it was ready 3 times (its process ")
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_an_actor_refuses_another_bundle(job: Job, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other", seed=1)
    score = _MakeScorer(str(other), 1, names_node=True)()
    with pytest.raises(InputError, match=r"the bundle .*other of a worker is not the one of the job"):
        score((str(job[1]), 0), lambda images: None)
    with pytest.raises(InputError, match=r"nowhere.* \(on node .+\)$"):
        _MakeScorer(str(tmp_path / "nowhere"), 1, names_node=True)()


@pytest.mark.parametrize("option", ["--devices", "--num-nodes"])
def test_options_of_fabric_are_refused(exitwise: Command, option: str, tmp_path: Path) -> None:
    outcome = exitwise("collect", tmp_path, "--ray", "local", option, "1")
    assert outcome.status == 2
    assert f"{option} and --ray exclude each other" in outcome.err


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)
