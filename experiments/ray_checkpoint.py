"""Does the checkpointing of Ray Data hold up under SIGKILL? Ids of the source against ids of the output after resuming.

A job reads ids from Parquet, scores batches in a pool of two actors, and writes Parquet with a `CheckpointConfig`.
In each trial one process is killed at a random moment: the driver, the driver while a checkpoint is pending, an actor,
the process of a write task, or the raylet. If the driver ends, the same job is started again until it succeeds. Two
more kinds of trials: a driver is killed on a cluster of two CPUs, and an actor dies on one batch again and again.

usage: ray_checkpoint.py [--trials 2] [--seed 0] [--only TARGET] [--out experiments/kills/ray_checkpoint.json]

With --only, the trials are added to those in the file.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray

ROWS, FILES, BATCH, SECONDS_PER_BATCH = 6000, 12, 50, 0.15
ON_TWO_CPUS, ALWAYS_DIES = "driver, on two CPUs", "actor, always on the same batch"
TARGETS = (
    "none",
    "driver",
    "driver at a pending checkpoint",
    "actor",
    "write task",
    "raylet",
    ON_TWO_CPUS,
    ALWAYS_DIES,
)
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}
MAX_ATTEMPTS = 5
TIMEOUT = 150  # seconds after which an attempt counts as hanging


class Scorer:
    """Notes every scored batch in a log, to count work that is done twice."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(SECONDS_PER_BATCH)
        with Path(self.log).open("a", encoding="utf-8") as file:
            file.write(f"{len(batch['id'])}\n")
        if os.environ["TARGET"] == ALWAYS_DIES and "image-000100" in batch["id"]:
            os._exit(1)
        return {"id": batch["id"], "score": batch["value"] * 2}


def job(folder: Path) -> None:
    """The driver: reads, scores and writes, with checkpoints."""
    from ray.data.checkpoint import CheckpointConfig

    # On two CPUs, a resumed job has two actors of half a CPU, an actor of one CPU that leaves out what is written, and
    # no CPU for the tasks that read.
    cpus = 2 if os.environ["TARGET"] == ON_TWO_CPUS else 4
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    context = ray.data.DataContext.get_current()
    context.use_datasource_v2 = False  # the new one merges small files into one block: all or nothing
    context.checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(folder / "checkpoint"), delete_checkpoint_on_success=False
    )
    ray.data.read_parquet(str(folder / "source"), override_num_blocks=FILES).map_batches(
        Scorer,
        fn_constructor_args=(str(folder / "log"),),
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=0.5,
    ).write_parquet(str(folder / "out"))


def make_source(folder: Path) -> None:
    (folder / "source").mkdir()
    for k in range(FILES):
        ids = range(k * ROWS // FILES, (k + 1) * ROWS // FILES)
        table = pa.table({"id": [f"image-{i:06}" for i in ids], "value": [float(i) for i in ids]})
        pq.write_table(table, folder / "source" / f"{k:02}.parquet")


def rows_in(folder: Path) -> list[str]:
    return [name for file in sorted(folder.rglob("*.parquet")) for name in pq.read_table(file)["id"].to_pylist()]


def descendants(pid: int) -> dict[int, str]:
    """Every process under `pid`, with its command line."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = {}, [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            waiting.append(child)
    return found


PATTERNS = {"actor": "ray::MapWorker", "write task": "ray::Write", "raylet": "raylet/raylet"}


def kill(driver: subprocess.Popen[bytes], target: str, folder: Path) -> bool:
    """Kill the target; False if the driver ended before there was one."""
    if target == "driver at a pending checkpoint":
        while driver.poll() is None:
            if any((folder / "checkpoint").glob("*.pending.parquet")):
                driver.kill()
                return True
            time.sleep(0.0005)
        return False
    if target in ("driver", ON_TWO_CPUS):
        driver.kill()
        return True
    while driver.poll() is None:
        pids = [pid for pid, command in descendants(driver.pid).items() if PATTERNS[target] in command]
        if pids:
            os.kill(random.choice(pids), signal.SIGKILL)
            return True
        time.sleep(0.005)
    return False


def trial(target: str, rng: random.Random) -> dict[str, Any]:
    """One job with one kill, resumed until it succeeds."""
    folder = Path(tempfile.mkdtemp(prefix="exitwise-ray-"))
    try:
        make_source(folder)
        attempts, killed, hung, out_at_kill, error = 0, False, False, 0, ""
        delay = rng.uniform(0, 0.8 * ROWS / BATCH * SECONDS_PER_BATCH / 2)
        end: int | None = None
        while attempts < MAX_ATTEMPTS and end != 0 and not hung:
            attempts += 1
            with (folder / f"errors-{attempts}").open("wb") as errors:
                driver = subprocess.Popen(
                    [sys.executable, __file__, "--job", folder],
                    stdout=errors,
                    stderr=errors,
                    env={**os.environ, **QUIET, "EXITWISE_JOB": str(folder), "TARGET": target},
                )
                if target not in ("none", ALWAYS_DIES) and not killed:
                    while driver.poll() is None and not (folder / "log").exists():
                        time.sleep(0.01)
                    time.sleep(delay)
                    killed = kill(driver, target, folder)
                    out_at_kill = len(rows_in(folder / "out")) if (folder / "out").exists() else 0
                try:
                    end = driver.wait(TIMEOUT)
                except subprocess.TimeoutExpired:
                    hung, end = True, -1
                    driver.kill()
                    driver.wait()
            lines = (folder / f"errors-{attempts}").read_text(errors="replace").splitlines()
            if end not in (0, -9):
                error = next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
            wait_for_end(folder)
        ids, names = Counter(rows_in(folder / "out")), {f"image-{i:06}" for i in range(ROWS)}
        log = folder / "log"
        scored = sum(map(int, log.read_text().split())) if log.exists() else 0
        return {
            "target": target,
            "seconds_after_first_batch": round(delay, 2),
            "killed": killed,
            "attempts": attempts,
            "succeeded": end == 0,
            "hung": hung,
            "rows_written_at_kill": out_at_kill,
            "rows_missing": len(names - set(ids)),
            "rows_more_than_once": sum(count > 1 for count in ids.values()),
            "rows_scored_again": scored - ROWS,
            "parts": len(list((folder / "out").rglob("*.parquet"))),
            "last_error": error,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_end(folder: Path) -> None:
    """Wait until no worker and no raylet of the job is left: they end by themselves, unlike some of Ray's agents."""
    text, deadline = str(folder), time.monotonic() + 60
    while time.monotonic() < deadline:
        raylets = [p for p in Path("/proc").glob("[0-9]*/cmdline") if is_of_job(p, text)]
        if not raylets:
            return
        time.sleep(0.2)


def is_of_job(cmdline: Path, folder: str) -> bool:
    try:
        environment = (cmdline.parent / "environ").read_bytes()
        command = cmdline.read_bytes()
        return b"ray" in command and b"Agent" not in command and f"EXITWISE_JOB={folder}".encode() in environment
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--trials", type=int, default=2, help="trials of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.job:
        job(arguments.job)
        return
    rng = random.Random(arguments.seed)
    random.seed(arguments.seed)
    trials = []
    if arguments.only and arguments.out:
        trials = json.loads(arguments.out.read_text(encoding="utf-8"))["trials"]
    for target in [arguments.only] if arguments.only else TARGETS:
        for _ in range(1 if target in ("none", ON_TWO_CPUS, ALWAYS_DIES) else arguments.trials):
            trials.append(trial(target, rng))
            print(json.dumps(trials[-1]), flush=True)
    if arguments.out:
        result = {"ray": ray.__version__, "pyarrow": pa.__version__, "rows": ROWS, "seed": arguments.seed}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({**result, "trials": trials}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
