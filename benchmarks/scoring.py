"""Scoring with two local workers beside one, and every executor beside the local one, in turn.

usage: scoring.py [--small] [--count N] [--repeats R] [--out FILE]

The zoo's net at half of its cost scores 20,000 images from PNG files. Rates are of the time from the first to the
last progress, without the start and the end of the workers. Run it alone on a machine of at least two cores. `--small`
checks the benchmark itself; its figures mean nothing.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from record import options, record, zoo_trace

import exitwise as ew
from exitwise.runs.machine_load import measure_load
from exitwise.scoring.executors import Executor
from exitwise.scoring.local_executor import LocalExecutor
from exitwise.scoring.ray_executor import RayExecutor
from exitwise.scoring.score import ScoreProgress

# Executors by name; each is a function (bundle, number of workers) -> executor. The first is the one to compare with.
EXECUTORS: Mapping[str, Callable[[Path, int], Executor]] = {
    "local": LocalExecutor,
    "ray": lambda bundle, workers: RayExecutor(bundle, "local", workers),
}


def write_images(folder: Path, count: int) -> None:
    """Write smooth random images, so that decoding takes about what it takes for photos of this size."""
    rng = np.random.default_rng(0)
    for number in range(count):
        image = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).filter(ImageFilter.GaussianBlur(2))
        file = folder / f"{number % 100:02}" / f"{number:06}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)


def write_bundle(folder: Path, small: bool) -> None:
    """Export the zoo's net with a policy for half of its cost."""
    trace = zoo_trace(small)
    calibration, net = ew.calibrate(trace, "Pool"), ew.load_net(ew.zoo.path("net.safetensors"))
    preds, budget = calibration.predict(trace.val), trace.costs.values[-1] / 2
    policy = ew.fit_policy(preds, trace.val.labels, trace.costs, budget=budget)
    preprocessing = ew.Preprocessing(32, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
    ew.Classifier(net, calibration, policy, preprocessing=preprocessing).export(folder)


def measure_rate(place: Path, executor: Executor) -> tuple[float, ew.ScoreSummary]:
    """Return images per second between the first and the last progress, and the summary of a new job."""
    seen: list[tuple[float, int]] = []

    def on_progress(progress: ScoreProgress) -> None:
        if images := progress.counts.images + progress.read:
            seen.append((time.perf_counter(), images))

    summary = ew.score(
        place / "images",
        bundle=place / "bundle",
        out=place / "out",
        shard_size=1000,
        force=True,
        executor=executor,
        on_progress=on_progress,
    )
    (start, first), (end, last) = seen[0], seen[-1]
    return (last - first) / (end - start) if last > first else 0.0, summary


def main() -> None:
    parser = options(__doc__, "scoring.json")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    count, repeats = (200, 1) if arguments.small else (arguments.count, arguments.repeats)
    first = next(iter(EXECUTORS))
    contenders = {f"{first}, 1": (first, 1), **{f"{name}, 2": (name, 2) for name in EXECUTORS}}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    read_shares: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_images(place / "images", count)
        write_bundle(place / "bundle", arguments.small)
        load = measure_load()
        for _ in range(repeats):
            for contender, (executor, workers) in contenders.items():
                rate, summary = measure_rate(place, EXECUTORS[executor](place / "bundle", workers))
                rates[contender].append(rate)
                read_shares[contender].append(summary.read_share or 0.0)
    measured: dict[str, Any] = {
        "images": count,
        "images_per_second": {key: median(values) for key, values in rates.items()},
        "read_share": {key: median(values) for key, values in read_shares.items()},
        "two_workers_beside_one": _ratio(rates[f"{first}, 2"], rates[f"{first}, 1"]),
        "beside_local": {name: _ratio(rates[f"{name}, 2"], rates[f"{first}, 2"]) for name in EXECUTORS},
        "load_before": load,
    }
    record(arguments.out, measured)


def _ratio(rates: list[float], others: list[float]) -> float | None:
    """Return the median of ratios of rates that were measured one after the other."""
    ratios = [rate / other for rate, other in zip(rates, others, strict=True) if other]
    return median(ratios) if ratios else None


if __name__ == "__main__":
    main()
