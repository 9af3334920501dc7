"""The service under load: open-loop Poisson arrivals at multiples of the capacity of the net without early exits.

usage: serving.py [--cifar100 DIR] [--bundle DIR] [--only PIECE ...] [--seconds S] [--small] [--out FILE]

The server is bound to one core, with one compute thread; the client, a process of its own, to another. Requests carry
`IMAGES` test images as bytes in one binary tensor. The shipped net needs 0.7 ms per image, which is about what HTTP
costs in Python: eight images stand for a net of a usual size. The pieces `one image` and `mixed sizes` have other
requests. Each piece measures the capacity of the plain net first: answered requests per second with `CLIENTS`
connections, each with one request after the other. Every load runs for two seconds before it counts. `--only` measures
some pieces, and leaves the others in the file as they are. `litserve` needs `pip install litserve`. `--small` checks
the benchmark itself; its figures mean nothing.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import options, record, zoo_trace

import exitwise as ew
from exitwise.policies.family import FamilyMember, PolicyFamily, select_family
from exitwise.runs.machine_load import measure_load
from exitwise.runtime.bundle import MANIFEST, Manifest
from exitwise.runtime.export import export_last_exit
from exitwise.runtime.onnx import Session

SLO = 0.05
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)
STRATEGY_LOADS = (1.0, 1.5, 2.0)
IMAGES, CLIENTS = 8, 16
WARM_UP = 2.0  # seconds of every load that do not count
NORMALIZATION = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)  # of the shipped net
FULL_COST = 38042768.0  # of the last exit of the shipped net
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """What all pieces share: folders, images, cores, and the length of a load in seconds."""

    place: Path
    images: Path
    seconds: float
    cores: tuple[int, int] | None


Requests = dict[str, np.ndarray]  # columns of the client, a row per request


def write_images(root: Path | None, plain: Path, file: Path) -> None:
    """Write the CIFAR-100 test images, or random ones, with their labels and whether the plain net knows them."""
    if root is None:
        generator = np.random.default_rng(0)
        images, labels = generator.integers(0, 256, (200, 3, 32, 32), dtype=np.uint8), generator.integers(0, 100, 200)
    else:
        from exitwise.data import cifar

        _, test = cifar.load(cifar.CIFAR100, root)
        images, labels = test.pixels.numpy(), test.labels.numpy()
    family = Manifest.load(plain).family
    session = Session(plain, policy=None if family is None else family[0].policy)
    predicted = np.concatenate([session(images[k : k + 100]).predicted for k in range(0, len(images), 100)])
    np.savez(file, images=images, labels=labels, plain=predicted == labels)


def write_bundles(place: Path, bundle: Path | None, small: bool) -> None:
    """Write the bundles `adaptive` (with the family), `fixed` (half of the cost), `plain` (the last exit), a graph."""
    net = ew.load_net(ew.zoo.path("net.safetensors"))
    if bundle is not None:
        shutil.copytree(bundle, place / "adaptive")
    else:
        trace = zoo_trace(small)
        calibration = ew.calibrate(trace, "Pool W_opt" if not small else "MIE T_opt")
        low, high = trace.costs.values[0], trace.costs.values[-1]
        budgets = [*np.linspace(low, high, 3 if small else 9).tolist(), high / 2]
        preds, score = calibration.predict(trace.val), "confidence" if small else "learned"
        policies = ew.fit_policies(preds, trace.val.labels, trace.costs, budgets=budgets, score=score)
        preprocessing = ew.Preprocessing(32, *NORMALIZATION)
        ew.Classifier(net, calibration, policies[-1], preprocessing=preprocessing).export(
            place / "adaptive",
            family=select_family(list(map(FamilyMember.of, policies)), FamilyMember.of(policies[-1])),
        )
    manifest = Manifest.load(place / "adaptive")
    own, full = manifest.policy, manifest.costs.values[-1]
    last = replace(own, thresholds=(*[inf] * (len(own.thresholds) - 1), -inf), budget=full, cost=full, fit=None)
    for name, policy in (("fixed", own), ("plain", last)):
        shutil.copytree(place / "adaptive", place / name)
        (place / name / MANIFEST).unlink()
        replace(manifest, family=PolicyFamily((FamilyMember.of(policy),))).save(place / name)
    export_last_exit(net, torch.zeros(1, 3, 32, 32), place / "plain.onnx")


@contextmanager
def exitwise_server(setting: Setting, bundle: str, *words: str, slo: float = SLO) -> Iterator[int]:
    """Run `exitwise serve` on a bundle; yield its port."""
    command = [sys.executable, "-m", "exitwise", "serve", str(setting.place / bundle), "--port", "0"]
    with server(
        setting, [*command, "--slo", f"{1e3 * slo:g}ms", *words], r"serving on http://127\.0\.0\.1:(\d+)"
    ) as port:
        yield port


@contextmanager
def server(setting: Setting, command: Sequence[str], pattern: str) -> Iterator[int]:
    """Run a server on its core until the end of the block; yield the port that it writes to its log."""
    log = setting.place / "server.log"
    with log.open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        if setting.cores is not None:
            os.sched_setaffinity(process.pid, {setting.cores[0]})  # before it starts threads
        while not (match := re.search(pattern, log.read_text())):
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        wait_for_port(int(match[1]))
        yield int(match[1])
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # also the processes that it started
        process.wait()


def wait_for_port(port: int) -> None:
    """Wait until connections are accepted: LitServe names its port before."""
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nothing listens on port {port}")


def send(setting: Setting, port: int, phases: Sequence[tuple[float, float]], **plan: Any) -> tuple[Requests, float]:
    """Send requests in phases of (rate, seconds); return the columns of `serving_client.py` and its share of a core."""
    core = None if setting.cores is None else setting.cores[1]
    data = {"port": port, "phases": phases, "images": str(setting.images), "sizes": [IMAGES], "core": core, **plan}
    command = [sys.executable, str(HERE / "serving_client.py")]
    done = subprocess.run(command, input=json.dumps(data) + "\n", check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    busy = found.pop("client_busy")
    return {name: np.array(values, dtype=float) for name, values in found.items()}, busy


def measure_capacity(setting: Setting, **plan: Any) -> float:
    """Return requests per second that the plain net answers, with as many connections as keep it busy."""
    with exitwise_server(setting, "plain", slo=10.0) as port:
        seconds = WARM_UP + setting.seconds / 2
        found, _ = send(setting, port, [(5000.0, seconds)], closed=CLIENTS, give_up=10.0, **plan)
    times = found["done"][found["status"] == 200]
    counted = times[(times > WARM_UP) & (times < seconds)]
    return float(len(counted) / (seconds - WARM_UP))


def summarize(found: Requests) -> dict[str, float | None]:
    """Return the figures of requests: milliseconds, and shares of all requests or, for accuracy, of answered images."""
    answered, refused = found["status"] == 200, np.isin(found["status"], (503, 504))
    latency = 1e3 * found["latency"][answered]
    quantiles = np.quantile(latency, [0.5, 0.99]).round(1).tolist() if len(latency) else [None, None]
    images = max(1, found["images"][answered].sum())
    accuracy, plain = (float(found[name][answered].sum() / images) for name in ("correct", "plain_correct"))
    goodput, rejected = (latency < 1e3 * SLO).sum() / len(answered), refused.mean()
    return {
        "requests": len(answered),
        "p50": quantiles[0],
        "p99": quantiles[1],
        "goodput": round(float(goodput), 4),
        "rejected": round(float(rejected), 4),
        "late or lost": abs(round(float(1 - goodput - rejected), 4)),
        "accuracy": round(accuracy, 4),
        "plain accuracy on the same images": round(plain, 4),
        "loss": round(plain - accuracy, 4),
        "budget": mean_budget(found["budget"][answered]),
    }


def mean_budget(budgets: np.ndarray) -> float:
    """Return the mean budget of answers; that of a server without budgets is the full cost."""
    return round(float(np.where(np.isnan(budgets), FULL_COST, budgets).mean()), 0) if len(budgets) else 0.0


def between(found: Requests, start: float, end: float) -> Requests:
    """Return the requests that were due between two times."""
    counted = (found["due"] >= start) & (found["due"] < end)
    return {name: values[counted] for name, values in found.items()}


def run_loads(
    setting: Setting, serve: Callable[[], Any], capacity: float, loads: Sequence[float] = LOADS, **plan: Any
) -> dict[str, Any]:
    """Return the figures of a server at multiples of a capacity; each load finds the server idle."""
    results: dict[str, Any] = {}
    with serve() as port:
        for load in loads:
            seconds = WARM_UP + setting.seconds
            found, busy = send(setting, port, [(load * capacity, seconds)], seed=int(10 * load), **plan)
            late = float(np.quantile(found["late"], 0.99))
            client = {"client busy": round(busy, 2), "client late p99": round(1e3 * late, 1)}
            results[f"{load:g}x"] = summarize(between(found, WARM_UP, inf)) | client
            print(f"  {load:g}x: {results[f'{load:g}x']}", file=sys.stderr, flush=True)
            time.sleep(1.0)
    return results


def measure_service(bundle: str, *words: str, **plan: Any) -> Callable[[Setting, float], dict[str, Any]]:
    """Return the piece that puts the loads on one bundle, served with these options."""
    return lambda setting, capacity: run_loads(
        setting, lambda: exitwise_server(setting, bundle, *words), capacity, **plan
    )


def measure_sizes(sizes: Sequence[int]) -> Callable[[Setting, float], dict[str, Any]]:
    """Return the piece with requests of other sizes, for the adaptive service and the plain net."""
    return lambda setting, capacity: {
        bundle: measure_service(bundle, sizes=list(sizes))(setting, capacity) for bundle in ("adaptive", "plain")
    }


def measure_step(setting: Setting, capacity: float) -> dict[str, Any]:
    """Return violations of a step 0.5x, 2x, 0.5x by bundle, and the seconds until the budget is back."""
    length = setting.seconds
    phases = [(0.5 * capacity, length), (2 * capacity, length), (0.5 * capacity, 1.5 * length)]
    results: dict[str, Any] = {}
    for bundle in ("adaptive", "fixed"):
        with exitwise_server(setting, bundle) as port:
            send(setting, port, [(0.5 * capacity, WARM_UP)], seed=2)
            found, _ = send(setting, port, phases, seed=1)
        answered = found["status"] == 200
        counts = {
            "requests": len(answered),
            "rejected": int((found["status"] == 503).sum()),
            "answered late or lost": int((~answered & (found["status"] != 503)).sum())
            + int((found["latency"][answered] > SLO).sum()),
        }
        budgets = found["budget"][answered]
        before = np.median(budgets[found["due"][answered] < length])
        lower = found["due"][answered][budgets < before]
        back = float(lower.max() - 2 * length) if len(lower) else 0.0
        results[bundle] = {
            **counts,
            "violations": counts["rejected"] + counts["answered late or lost"],
            "seconds until the budget is back": round(max(0.0, back), 2),
        }
        print(f"  {bundle}: {results[bundle]}", file=sys.stderr, flush=True)
    fixed, adaptive = (results[name]["violations"] for name in ("fixed", "adaptive"))
    results["violations, fixed / adaptive"] = round(fixed / max(1, adaptive), 1)
    return results


def measure_strategies(setting: Setting, capacity: float) -> dict[str, Any]:
    """Return the figures by strategy, with the policy of half of the cost, so that the throughput is equal."""
    results = {}
    for strategy in ("deepest", "oldest", "fullest"):
        print(f" {strategy}", file=sys.stderr)
        results[strategy] = run_loads(
            setting,
            lambda strategy=strategy: exitwise_server(setting, "fixed", "--strategy", strategy),  # type: ignore[misc]
            capacity,
            STRATEGY_LOADS,
        )
    return results


def measure_litserve(setting: Setting, capacity: float) -> dict[str, Any]:
    """Return the figures of LitServe with the plain net as one graph, and its own capacity."""
    command = [sys.executable, str(HERE / "serving_litserve.py"), str(setting.place / "plain.onnx")]
    plan = {"protocol": "base64", "path": "/predict"}
    return run_loads(setting, lambda: server(setting, command, r"running on http://\S+:(\d+)"), capacity, **plan)


PIECES: dict[str, Callable[[Setting, float], dict[str, Any]]] = {
    "adaptive": measure_service("adaptive"),
    "adaptive, floor 0.63": measure_service("adaptive", "--floor", "0.63"),
    "fixed": measure_service("fixed"),
    "plain": measure_service("plain"),
    "step": measure_step,
    "strategies": measure_strategies,
    "one image": measure_sizes([1]),
    "mixed sizes": measure_sizes([1, 1, 1, 4, 16, 32]),
    "litserve": measure_litserve,
}
PIECE_SIZES = {"one image": [1], "mixed sizes": [1, 1, 1, 4, 16, 32]}


def table(measured: dict[str, Any]) -> list[str]:
    """Return rows for the guide: service, load, p50, p99, in time, refused, late or lost, accuracy, loss, cost."""
    rows = []
    for piece, found in measured.items():
        if piece == "step":
            continue
        flat = "2x" in found["results"]
        for name, loads in ({piece: found["results"]} if flat else found["results"]).items():
            title = name if flat else f"{piece}, {name}"
            shown = {
                load: [
                    *("-" if row[name] is None else f"{row[name]:.0f}" for name in ("p50", "p99")),
                    *(f"{100 * row[name]:.1f}" for name in ("goodput", "rejected", "late or lost")),
                    *(f"{100 * row[key]:.1f}" if row["budget"] and key in row else "-" for key in ("accuracy", "loss")),
                    f"{row['budget'] / 1e6:.1f}" if row["budget"] else "-",
                ]
                for load, row in loads.items()
            }
            rows += [f"| {title} | {load} | {' | '.join(cells)} |" for load, cells in shown.items()]
    return rows


def main() -> None:
    parser = options(__doc__, "serving.json")
    parser.add_argument("--cifar100", type=Path, help="folder with CIFAR-100 [default: random images]")
    parser.add_argument("--bundle", type=Path, help="export of the demo's run [default: make one]")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    arguments = parser.parse_args()
    measured = json.loads(arguments.out.read_text())["measured"] if arguments.out.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_bundles(place, arguments.bundle, arguments.small)
        write_images(None if arguments.small else arguments.cifar100, place / "plain", place / "images.npz")
        cores = sorted(os.sched_getaffinity(0))
        pair = None if len(cores) < 2 or arguments.small else (cores[0], cores[1])
        setting = Setting(place, place / "images.npz", 0.5 if arguments.small else arguments.seconds, pair)
        for piece in arguments.only:
            if piece == "litserve" and find_spec("litserve") is None:
                print("litserve is not installed: left out", file=sys.stderr)
                continue
            capacity = measure_capacity(setting, sizes=PIECE_SIZES.get(piece, [IMAGES]))
            print(f"{piece}: plain capacity {capacity:.1f} requests per second", file=sys.stderr, flush=True)
            load = measure_load()
            found = PIECES[piece](setting, capacity)
            measured[piece] = {"plain capacity": round(capacity, 1), "load before": load, "results": found}
            record(arguments.out, {"slo ms": 1e3 * SLO, "images per request": IMAGES, "measured": measured})


if __name__ == "__main__":
    main()
