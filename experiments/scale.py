"""What a billion images cost: measure a small scoring job, simulate it, and simulate a large cluster.

usage: scale.py IMAGES FOLDER [STEP ...] [--count N] [--rounds R]

IMAGES holds cifar-100-binary/, FOLDER is for what the steps hand on. Steps, all of them by default:

    prepare     write the images and export the bundles
    jobs        score the images with one worker and with two at every budget, R times
    photos      decode a photo, run the paper's small net for ImageNet, list a folder
    simulate    simulate the small jobs and the large ones, and fill the tables of docs/guides/scale.md

Run `jobs` and `photos` on an otherwise idle machine, about four minutes and one. The jobs with one worker give the
seconds until the worker begins and those per image; the simulation (pipeline.py) then has to predict the jobs with two
workers, and those of smaller budgets. How many cores other programs used meanwhile is measured, too, and of the rounds
of a job the least disturbed one counts. Results are in experiments/scale/results.json.
"""

import argparse
import io
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pipeline import Cluster, Outcome, Work, simulate
from results import fill_tables, machine, rounded

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.core.image_files import read_or_error
from exitwise.data import load
from exitwise.runtime.onnx import Session
from exitwise.scoring.executors import Event
from exitwise.scoring.items import list_source
from exitwise.scoring.job import Job
from exitwise.scoring.local_executor import LocalExecutor
from exitwise.scoring.plan import summarize
from exitwise.scoring.shard_scorer import ShardReport

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "scale" / "results.json"
PAGE = ROOT / "docs" / "guides" / "scale.md"
LOOK = ew.Preprocessing(size=32, mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761))
BYTES = 2300.0  # of a PNG file of CIFAR-100
STEPS = ("prepare", "jobs", "photos", "simulate")
BUDGETS = (1.0, 0.5, 0.25)  # shares of the full cost
WORKERS = (1, 2)
MEASURED_CORES = 2  # of the machine of the small jobs
SHARD_SIZE = 500  # of the small jobs

# The large job: assumptions, not measurements.
IMAGES = 10**9
LARGE = Cluster(machines=100, cores=32, link=1.25e9, storage=50e9, start_up=60)
OBJECTS = {"requests": 1.0}  # every image is an object of its own
STORE = {"request_rate": 50_000, "latency": 0.03}
LARGE_SHARD = 20_000


def bundle_path(folder: Path, share: float) -> Path:
    return folder / f"bundle-{100 * share:.0f}"


def export_bundles(folder: Path) -> None:
    """Export bundles of the shipped net for every budget."""
    trace, net = ew.Trace.load(ew.zoo.path("trace.safetensors")), ew.load_net(ew.zoo.path("net.safetensors"))
    cal = ew.calibrate(trace, "Pool")
    preds = cal.predict(trace.val)
    for share in BUDGETS:
        policy = ew.fit_policy(preds, trace.val.labels, trace.costs, budget=share * trace.costs.values[-1])
        path = bundle_path(folder, share)
        ew.Classifier(net, cal, policy, classes=trace.classes, preprocessing=LOOK).export(path)


def write_images(root: Path, folder: Path, count: int) -> None:
    """Test images of CIFAR-100 as PNG files; more than there are begin again."""
    from PIL import Image

    images = load("cifar100", root)[1].pixels
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = images[number % len(images)].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{number:06}.png")


class WatchedExecutor(LocalExecutor):
    """Adds up what workers report, to tell their work from the start of the job."""

    worker_seconds = read_seconds = 0.0

    def run(self, job: Job, shards: Sequence[int], on_event: Callable[[Event], None]) -> None:
        def watch(event: Event) -> None:
            if isinstance(event, ShardReport):
                self.worker_seconds += event.seconds
                self.read_seconds += event.read_seconds
            on_event(event)

        super().run(job, shards, watch)


def cpu_seconds() -> tuple[float, float]:
    """Return CPU seconds of all processes of the machine so far, and those of this one and its ended children."""
    user, nice, system = Path("/proc/stat").read_text(encoding="ascii").split()[1:4]
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    whole = (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
    return whole, sum(usage.ru_utime + usage.ru_stime for usage in own)


def measure_job(source: Path, bundle: Path, workers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        executor, before = WatchedExecutor(bundle, workers), cpu_seconds()
        summary = ew.score(source, bundle=bundle, out=out, executor=executor, shard_size=SHARD_SIZE)
        whole, own = (after - then for after, then in zip(cpu_seconds(), before, strict=True))
    return {
        "cores busy with other work": max(0.0, whole - own) / summary.seconds,
        "mean cost": (summary.mean_cost or 0.0) / summary.full_cost,
        "images": summary.images,
        "seconds": summary.seconds,
        "start": summary.seconds - executor.worker_seconds / workers,
        "read": executor.read_seconds / summary.images,
        "net": (executor.worker_seconds - executor.read_seconds) / summary.images,
    }


def measure_jobs(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Run jobs in turn; for every number of workers and every budget, return the one that others disturbed least."""
    found: dict[tuple[int, float], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for share in BUDGETS:
            for workers in WORKERS:
                job = measure_job(folder / "images", bundle_path(folder, share), workers)
                print(workers, share, rounded(job), flush=True)
                found.setdefault((workers, share), []).append(job)
    return [
        {"workers": workers, "budget": share, **min(jobs, key=lambda job: job["cores busy with other work"])}
        for (workers, share), jobs in found.items()
    ]


def pace(job: Mapping[str, Any]) -> float:
    """Return the share of a core that each worker had, besides other work on the cores of the machine."""
    return min(1.0, (MEASURED_CORES - job["cores busy with other work"]) / job["workers"])


@dataclass(frozen=True)
class NetTime:
    """Seconds of the net per image: a part that every image takes, and one that is proportional to the mean cost."""

    fixed: float
    full: float

    @classmethod
    def of(cls, jobs: Sequence[Mapping[str, Any]]) -> "NetTime":
        """Take it from the jobs with one worker at the largest and the smallest budget."""
        alone = {job["budget"]: job for job in jobs if job["workers"] == 1}
        high, low = alone[max(BUDGETS)], alone[min(BUDGETS)]
        at_high, at_low = (job["net"] * pace(job) for job in (high, low))
        full = (at_high - at_low) / (high["mean cost"] - low["mean cost"])
        return cls(at_high - full * high["mean cost"], full)

    def at(self, mean_cost: float) -> float:
        return self.fixed + self.full * mean_cost


def predict_jobs(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare each job with two simulations: from the job of its budget with one worker, and from two other budgets."""
    alone = {job["budget"]: job for job in jobs if job["workers"] == 1}
    net, rows = NetTime.of(jobs), []

    def simulated(job: Mapping[str, Any], inputs: Mapping[str, Any], compute: float) -> float:
        decode = inputs["read"] * pace(inputs) / pace(job)
        work = Work(job["images"], SHARD_SIZE, bytes=0.0, decode=decode, compute=compute / pace(job))
        return simulate(work, Cluster(machines=1, cores=job["workers"], start_up=inputs["start"])).seconds

    for job in jobs:
        same = simulated(job, alone[job["budget"]], alone[job["budget"]]["net"] * pace(alone[job["budget"]]))
        by_cost = simulated(job, alone[1.0], net.at(job["mean cost"]))
        rows.append(
            {
                **job,
                "simulated, same budget": same,
                "simulated, by cost": by_cost,
                "error, same budget": same / job["seconds"] - 1,
                "error, by cost": by_cost / job["seconds"] - 1,
            }
        )
    return rows


def seconds_per_call(function: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def measure_photo() -> dict[str, float]:
    """Seconds to decode a photo of 500 x 375 to 224 x 224, and its bytes: smooth noise, as hard as a photograph."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    rough = torch.rand(1, 3, 94, 125, generator=generator)
    smooth = torch.nn.functional.interpolate(rough, size=(375, 500), mode="bicubic").clamp(0, 1)[0]
    photo = Image.fromarray((255 * smooth).permute(1, 2, 0).to(torch.uint8).numpy())
    data = io.BytesIO()
    photo.save(data, "JPEG", quality=90)
    look = ew.Preprocessing(size=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return {
        "bytes": float(len(data.getvalue())),
        "decode": seconds_per_call(lambda: read_or_error(data.getvalue(), look, "photo"), 30),
    }


def measure_large_net(folder: Path) -> dict[str, float]:
    """Seconds per image of the paper's small net for ImageNet in ONNX, one thread, batches of 64, to its last exit."""
    torch.manual_seed(0)
    net = ew.models.msdnet("imagenet-small")
    images = torch.randn(64, 3, 224, 224)
    trace = ew.collect(net, val=[(images[:8], torch.arange(8))])
    cal = ew.calibrate(trace, "MSDNet (vanilla)")
    never = ew.Policy((*(float("inf") for _ in trace.costs.values[1:]), float("-inf")))
    ew.Classifier(net, cal, never).export(folder / "large")
    session, array = Session(folder / "large", threads=1, check_range=False), images.numpy()
    session(array)
    return {"MACs": trace.costs.values[-1], "seconds": seconds_per_call(lambda: session(array), 3) / len(images)}


def measure_listing(source: Path) -> float:
    """Seconds per image to list a folder of files, as a job does when it begins and when it resumes."""
    start = time.perf_counter()
    summary = summarize(list_source(str(source), SHARD_SIZE).shards)
    return (time.perf_counter() - start) / summary.images


def simulate_large(photo: Mapping[str, float], small: Mapping[str, float]) -> list[dict[str, Any]]:
    """A billion images on a hundred machines, at three budgets, from shards of many images and from single objects."""
    cases: dict[str, tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]] = {
        "CIFAR images, 38 million MACs, tar shards": (small, {}, {}),
        "photos, ImageNet net, tar shards": (photo, {}, {}),
        "photos, ImageNet net, single objects": (photo, OBJECTS, STORE),
    }
    rows = []
    for name, (per_image, requests, store) in cases.items():
        for share in BUDGETS:
            work = Work(
                IMAGES,
                LARGE_SHARD,
                per_image["bytes"],
                per_image["decode"],
                per_image["fixed"] + per_image["compute"] * share,
                **requests,
                commit=0.1,
                spread=0.1,
            )
            cluster = Cluster(**{**vars(LARGE), **store, "dispatch": 0.005, "parallel_reads": 16})
            outcome: Outcome = simulate(work, cluster, chunks=4)
            rows.append(
                {
                    "case": name,
                    "budget": share,
                    "hours": outcome.seconds / 3600,
                    "core hours": outcome.seconds / 3600 * cluster.machines * cluster.cores,
                    "bottleneck": outcome.bottleneck,
                    "busy": outcome.busy,
                    "decode share": work.decode / (work.decode + work.compute),
                }
            )
    return rows


def measure_photos(folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as bundles:
        net = measure_large_net(Path(bundles))
    return {
        "photo": measure_photo(),
        "ImageNet net": net,
        "seconds to list a file": measure_listing(folder / "images"),
    }


def simulate_all(results: Mapping[str, Any]) -> dict[str, Any]:
    """Simulations of the small jobs and the large ones from what was measured."""
    jobs, net = results["jobs"], NetTime.of(results["jobs"])
    read = next(job["read"] * pace(job) for job in jobs if job["workers"] == 1 and job["budget"] == 1.0)
    small = {"bytes": BYTES, "decode": read, "fixed": net.fixed, "compute": net.full}
    photo = {**results["photo"], "fixed": 0.0, "compute": results["ImageNet net"]["seconds"]}
    return {"jobs": predict_jobs(jobs), "large": simulate_large(photo, small)}


def filled(page: str) -> str:
    """The page with the tables of the results."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    jobs = [
        "| workers | budget | other work | rows/s | reading and decoding | seconds | simulated | from two budgets |",
        "|---|---|---|---|---|---|---|---|",
    ]
    jobs += [
        f"| {job['workers']} | {job['budget']:.0%} | {job['cores busy with other work']:.1f} cores "
        f"| {job['images'] / job['seconds']:,.0f} "
        f"| {job['read'] / (job['read'] + job['net']):.0%} "
        f"| {job['seconds']:.1f} | {job['simulated, same budget']:.1f} ({job['error, same budget']:+.0%}) "
        f"| {job['simulated, by cost']:.1f} ({job['error, by cost']:+.0%}) |"
        for job in results["jobs"]
    ]
    large = [
        "| images and net | budget | hours | core hours | scarcest | busy: cores, links, storage |",
        "|---|---|---|---|---|---|",
    ]
    large += [
        f"| {row['case']} | {row['budget']:.0%} | {row['hours']:.1f} | {row['core hours']:,.0f} | {row['bottleneck']} "
        f"| {row['busy']['cores']:.0%}, {row['busy']['links']:.0%}, {row['busy']['storage']:.0%} |"
        for row in results["large"]
    ]
    return fill_tables(page, {"jobs": "\n".join(jobs), "large": "\n".join(large)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", nargs="*", metavar="STEP", choices=STEPS, default=STEPS)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    results |= {"command": "experiments/scale.py", "machine": machine()}
    if "prepare" in given.steps:
        write_images(given.images, given.folder / "images", given.count)
        export_bundles(given.folder)
    if "jobs" in given.steps:
        results["jobs"] = measure_jobs(given.folder, given.rounds)
        write_json(RESULTS, rounded(results))
    if "photos" in given.steps:
        write_json(RESULTS, rounded(results | measure_photos(given.folder)))
    if "simulate" in given.steps:
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        write_json(RESULTS, rounded(results | simulate_all(results)))
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
