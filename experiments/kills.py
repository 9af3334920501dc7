"""Ten SIGKILLs of a running `exitwise score`: is its table that of a run which nothing interrupted, row for row?

usage: kills.py CIFAR100_DIR --local | --ray [--images 4000] [--seed 0] [--out experiments/kills]

Five times the command is killed and started again, five times one of its two workers; two of these workers die between
the data of a part and its commit. Moments are drawn: after a random number of parts and a random time. With --ray the
workers are actors of a Ray cluster on this machine, and in an eleventh kill its raylet, the process that manages a
node, dies: the command must then end by itself, in one line. The result goes to OUT/local.json or OUT/ray.json. Needs
Linux, for the processes in /proc.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pyarrow import parquet
from results import machine

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.data import cifar

HERE = Path(__file__).parent
SHARDS = 40
KILLS = ("command",) * 5 + ("worker",) * 3 + ("worker between data and commit",) * 2
RAY_KILLS = (*KILLS, "raylet")

# A worker that finds a ticket dies after it has written a part and before it renames it.
SITE = """
import os, signal, sys
from pathlib import Path

if any(word == "exitwise.scoring.worker" or word.endswith("default_worker.py") for word in sys.orig_argv):
    replace_file = Path.replace

    def replace_or_die(self, target):
        for ticket in Path(os.environ["TICKETS"]).glob("*") if "part-" in str(target) else ():
            try:
                ticket.rename(Path(os.environ["TICKETS"] + ".used", ticket.name))
            except FileNotFoundError:  # another worker took it
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return replace_file(self, target)

    Path.replace = replace_or_die
"""


def prepare(root: Path, place: Path, count: int) -> None:
    """Write test images of CIFAR-100 as files, and the shipped net as a bundle for a quarter of its cost."""
    test = cifar.load(cifar.CIFAR100, root)[1]
    for number in range(count):
        file = place / "images" / f"{number % 10}" / f"{number:05}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(test.pixels[number].permute(1, 2, 0).numpy()).save(file)
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    calibration, net = ew.calibrate(trace, "Pool"), ew.load_net(ew.zoo.path("net.safetensors"))
    val, budget = calibration.predict(trace.val), trace.costs.values[-1] / 4
    policy = ew.fit_policy(val, trace.val.labels, trace.costs, budget=budget, score="auto")
    preprocessing = ew.Preprocessing(32, test.mean, test.std)
    ew.Classifier(net, calibration, policy, classes=trace.classes, preprocessing=preprocessing).export(place / "bundle")
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text(SITE)
    for name in ("tickets", "tickets.used"):
        (place / name).mkdir()


def start(place: Path, out: str, shard_size: int, on_ray: bool = False) -> "subprocess.Popen[str]":
    """Start the command with two workers: local processes, or actors on a cluster that it starts."""
    words = [sys.executable, "-m", "exitwise", "score", place / "images", "--bundle", place / "bundle"]
    words += ["--out", place / out, "--workers", "2", "--shard-size", shard_size, "--json"]
    words += ["--ray", "local"] if on_ray else []
    paths = [str(place / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TICKETS": str(place / "tickets")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, words)), text=True, env=environment, **pipes)


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Wait for a command that must succeed, and return its summary."""
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"the command failed with status {process.returncode}: {err}")
    summary: dict[str, Any] = json.loads(out)
    return summary


def children(process: int) -> list[int]:
    """Return the ids of the processes that a process started."""
    files = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def find_raylet(process: int) -> int | None:
    """Return the id of the raylet, which is a child of the process that uses Ray for the command."""
    processes = [process, *children(process)]
    found = (child for parent in processes for child in children(parent) if "raylet/raylet " in command_line(child))
    return next(found, None)


def find_workers(process: int, on_ray: bool) -> list[int]:
    """Return the ids of the local workers of a command, or of its actors, which are children of the raylet."""
    if not on_ray:
        return children(process)
    raylet = find_raylet(process)
    return [child for child in children(raylet) if "TaskActor" in command_line(child)] if raylet else []


def is_running(process: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a job, in order."""
    rows: list[dict[str, Any]] = sorted(parquet.read_table(out / "parts").to_pylist(), key=lambda row: row["id"])
    return rows


def kill_many_times(place: Path, shard_size: int, rng: np.random.Generator, on_ray: bool) -> list[dict[str, Any]]:
    """Score to the end through all kills; return what was killed when."""
    parts, tickets, used = (place / name for name in ("killed/parts", "tickets", "tickets.used"))
    process, kills = start(place, "killed", shard_size, on_ray), []
    targets = RAY_KILLS if on_ray else KILLS
    # Actors take longer to start, and the last kill must come before the end.
    moments = sorted(rng.choice(SHARDS - (10 if on_ray else 3), len(targets), replace=False))
    for target, moment in zip(rng.permutation(targets), moments, strict=True):
        committed = 0
        job = place / "killed" / "job.json"
        while committed < moment or not job.exists() or len(find_workers(process.pid, on_ray)) < 2:
            if process.poll() is not None:
                raise SystemExit(f"the command ended with status {process.returncode}: {process.stderr.read()}")
            time.sleep(0.01)
            committed = len(list(parts.glob("part-*")))
        time.sleep(rng.random())
        workers = find_workers(process.pid, on_ray)
        kill: dict[str, Any] = {"target": str(target), "parts_committed": len(list(parts.glob("part-*")))}
        if target == "command":
            process.kill()
            process.communicate()
            gone = time.perf_counter()
            while any(map(is_running, workers)):
                time.sleep(0.01)
            kill["workers_exited_after_seconds"] = time.perf_counter() - gone
            process = start(place, "killed", shard_size, on_ray)
        elif target == "raylet":
            os.kill(find_raylet(process.pid) or 0, signal.SIGKILL)
            gone = time.perf_counter()
            _, err = process.communicate()
            kill |= {"seconds": time.perf_counter() - gone, "status": process.returncode, "stderr": err}
            process = start(place, "killed", shard_size, on_ray)
        elif target == "worker":
            os.kill(int(rng.choice(workers)), signal.SIGKILL)
        else:
            (tickets / str(len(kills))).touch()
            while not (used / str(len(kills))).exists():
                time.sleep(0.01)
        kills.append(kill)
        print(kill, flush=True)
    summary = finish(process)
    print(f"{summary['images']} rows, {summary['resumed']} of them from before", flush=True)
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--local", action="store_true", help="kill processes of this machine")
    kind.add_argument("--ray", action="store_true", help="kill actors of a Ray cluster")
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "kills")
    arguments = parser.parse_args()
    executor = "ray" if arguments.ray else "local"
    with tempfile.TemporaryDirectory() as name:
        place, shard_size = Path(name), arguments.images // SHARDS
        prepare(arguments.root, place, arguments.images)
        finish(start(place, "expected", shard_size))
        expected = read_rows(place / "expected")
        kills = kill_many_times(place, shard_size, np.random.default_rng(arguments.seed), arguments.ray)
        rows = read_rows(place / "killed")
        equal = [a == b for a, b in zip(rows, expected, strict=True)]
        result = {
            "command": f"kills.py CIFAR100_DIR --{executor} --images {arguments.images} --seed {arguments.seed}",
            "machine": machine(),
            "images": arguments.images,
            "shards": SHARDS,
            "kills": kills,
            "rows": len(rows),
            "different_ids": len({row["id"] for row in rows}),
            "equal_rows": sum(equal),
            "equal_parts": sum(
                file.read_bytes() == (place / "expected" / "parts" / file.name).read_bytes()
                for file in (place / "killed" / "parts").iterdir()
            ),
        }
    write_json(arguments.out / f"{executor}.json", result)
    print(json.dumps({key: value for key, value in result.items() if key != "kills"}, indent=2))
    if sum(equal) < len(expected):
        raise SystemExit("the tables differ")


if __name__ == "__main__":
    main()
