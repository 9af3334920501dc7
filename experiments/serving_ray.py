"""Two replicas on Ray under the load of eight clients: one is killed, then the bundle is updated. What do clients see?

usage: serving_ray.py [--out experiments/serving]

Starts `exitwise serve --ray local --replicas 2` with a small bundle. Clients ask one request after the other, without
trying again. The result goes to OUT/ray.json. Needs Linux, for the processes in /proc.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from results import machine, rounded

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from serving_cases import INFER, Server, family_bundle, infer_body, some_images  # noqa: E402

CLIENTS = 8
MARK = f"EXITWISE_EXPERIMENT={os.getpid()}"


def replicas() -> set[int]:
    """Return the ids of the processes of our replicas."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_replica = b"ray::ServeReplica" in (path / "cmdline").read_bytes()
            if is_replica and f"{MARK}\0".encode() in (path / "environ").read_bytes():
                found.add(int(path.name))
        except OSError:
            continue
    return found


def ask_during(url: str, action: Callable[[], None]) -> tuple[list[tuple[float, float, str]], float]:
    """Let clients ask for three seconds, during the action, and for three seconds; return requests and its start.

    A request is its start, its seconds, and its status or the type of its error.
    """
    requests: list[tuple[float, float, str]] = []
    stop = threading.Event()
    body = json.dumps(infer_body(some_images(4))).encode()

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                start = time.perf_counter()
                try:
                    outcome = str(client.post(url + INFER, content=body).status_code)
                except httpx.HTTPError as error:
                    outcome = type(error).__name__
                requests.append((start, time.perf_counter() - start, outcome))

    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    began = time.perf_counter()
    action()
    time.sleep(3)
    stop.set()
    for thread in threads:
        thread.join()
    return requests, began


def describe(requests: list[tuple[float, float, str]], began: float) -> dict[str, Any]:
    failed = [start - began for start, _, outcome in requests if outcome != "200"]
    return {
        "requests": len(requests),
        "outcomes": dict(Counter(outcome for _, _, outcome in requests)),
        "first and last start of a failed one, seconds after": [min(failed), max(failed)] if failed else None,
        "longest, seconds": max(seconds for _, seconds, _ in requests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "serving")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        bundle = family_bundle(Path(place) / "bundle")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = ["serve", bundle, "--slo", "60s", "--port", port, "--ray", "local", "--replicas", "2"]
        name, _, value = MARK.partition("=")
        process = subprocess.Popen(
            [sys.executable, "-m", "exitwise", *map(str, words)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, name: value},
        )
        server = Server(process)
        url = server.wait_for(r"serving on (http\S+)")[1]
        seconds: dict[str, float] = {}

        def kill() -> None:
            first, *others = replicas()
            start = time.perf_counter()
            os.kill(first, signal.SIGKILL)
            while len(replicas() - {first}) <= len(others):
                time.sleep(0.02)
            seconds["until another replica has started"] = time.perf_counter() - start

        def update() -> None:
            before, start = replicas(), time.perf_counter()
            process.send_signal(signal.SIGHUP)
            server.wait_for("the bundle was reloaded")
            while before & replicas():
                time.sleep(0.02)
            seconds["until all replicas are new"] = time.perf_counter() - start

        killed = describe(*ask_during(url, kill))
        updated = describe(*ask_during(url, update))
        process.terminate()
        status = process.wait()
        server.close()
    result = {"clients": CLIENTS, "a replica is killed": killed, "the bundle is updated": updated}
    result |= {"seconds": seconds, "status after SIGTERM": status}
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), **rounded(result)}, indent=2)
    (arguments.out / "ray.json").write_text(f"{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
