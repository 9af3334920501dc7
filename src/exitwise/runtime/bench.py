"""Measure the time of stages on this machine, and the share of the possible speed-up that early exits achieve.

All measurements use noise images, because the content does not change the time of a stage. Thresholds are refitted so
that the share of samples at each exit is that of the policy on real data. Targets take turns, on other images in every
round, and the median counts.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exitwise.calibration.calibration import Calibration
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, Predictions
from exitwise.core.results import Result
from exitwise.models.net import MultiExitNet
from exitwise.policies.cutoffs import ScoreRanking
from exitwise.policies.policy import Policy
from exitwise.runtime import engine
from exitwise.runtime.classifier import Classifier

BATCH_SIZES = (1, 16, 64, 256)
BUDGETS = (0.25, 0.5, 0.75)  # shares of the full net's MACs
VANILLA, FULL = "vanilla", "full"  # without early exits: the last exit only; every calibrated exit

Progress = Callable[[int, int], None]  # called with the number of completed measurements and of all measurements


@dataclass(frozen=True)
class Timing(Result):
    """Time of one variant on one backend at one batch size, in milliseconds per image.

    `bound_ms` is the sum of the full-batch times of the stages, weighted by the share of samples that reached each
    stage. A policy in milliseconds predicts the same time. `reached` is the bound divided by the measured time, the
    median over rounds.
    """

    backend: str
    batch_size: int
    variant: str  # vanilla, full, or a budget such as 50%
    ms: float
    speedup: float  # relative to the vanilla net without early exits on the same backend
    bound_ms: float | None = None
    reached: float | None = None
    mac_speedup: float | None = None
    exit_shares: tuple[float, ...] | None = None


@dataclass(frozen=True)
class StageTimes(Result):
    """Cumulative milliseconds per image up to each exit (K,), all calibrated exits included, without early exits."""

    backend: str
    batch_size: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Bench(Result):
    """All measurements, with the number of threads and of rounds."""

    threads: int
    repeats: int
    stages: tuple[StageTimes, ...]
    timings: tuple[Timing, ...]

    def costs(self, backend: str, batch_size: int) -> Costs:
        """Return the costs in milliseconds, which `fit_policy` takes for a budget in milliseconds."""
        for row in self.stages:
            if (row.backend, row.batch_size) == (backend, batch_size):
                return Costs(row.values, "ms")
        measured = ", ".join(f"{row.backend}:{row.batch_size}" for row in self.stages)
        raise InputError(f"{backend}:{batch_size} was not measured; measured were {measured}")


@dataclass(frozen=True)
class BenchTarget:
    """A backend under test: makes a backend per call, runs the vanilla net, and converts images to its input."""

    backend: Callable[[], Any]
    vanilla: Callable[[Any], Any]
    images: Callable[[Tensor], Any]


def bench_targets(
    net: MultiExitNet, calibration: Calibration, shape: tuple[int, ...], names: Sequence[str], threads: int
) -> dict[str, BenchTarget]:
    """Return a target for each of the backends `names`; `onnx` is exported first.

    Args:
        net: The multi-exit net.
        calibration: Its calibration.
        shape: Shape of one image.
        names: Some of `BACKENDS`.
        threads: Number of onnxruntime's threads.
    """
    check_backends(names)
    policy = no_early_exit_policy(range(1, len(net.stages) + 1))
    return {name: BACKENDS[name](Classifier(net, calibration, policy), shape, threads) for name in names}


def check_backends(names: Sequence[str]) -> None:
    """Raise InputError unless all names are among `BACKENDS`."""
    for name in names:
        if name not in BACKENDS:
            raise InputError(f"`backends` must be among {', '.join(BACKENDS)}, but got {name!r}")


def no_early_exit_policy(costs: Sequence[float]) -> Policy:
    """Return a policy under which all samples run to the last exit; `costs` (K,) are those of the exits."""
    return Policy((*[float("inf")] * (len(costs) - 1), float("-inf")), costs=tuple(costs))


def predictions(net: MultiExitNet, calibration: Calibration, images: Tensor) -> Predictions:
    """Predict with every exit, without early exiting."""
    with torch.inference_mode():
        parts = [net.features(part) for part in torch.split(images, 64)]
    return calibration.predict([torch.cat(rows) for rows in zip(*parts, strict=True)])


def exit_shares(policy: Policy, preds: Predictions) -> list[float]:
    """Return the share (K,) of samples that exit at each exit."""
    shares: list[float] = (np.bincount(policy.exits(preds), minlength=len(preds)) / preds.shape[1]).tolist()
    return shares


def _make_torch_target(classifier: Classifier, shape: tuple[int, ...], threads: int) -> BenchTarget:
    def vanilla(images: Tensor) -> Array:
        net = classifier.net
        with torch.inference_mode():
            state = classifier.backend().start(images).stage_input
            for stage in net.stages:
                state = stage(state)
            probs: Array = net.exits[-1](state).softmax(dim=1).numpy()
        return probs

    return BenchTarget(classifier.backend, vanilla, lambda images: images)


def _make_onnx_target(classifier: Classifier, shape: tuple[int, ...], threads: int) -> BenchTarget:
    from exitwise.runtime.export import export_last_exit
    from exitwise.runtime.onnx import OnnxBackend, Session, inference_session

    with tempfile.TemporaryDirectory(prefix="exitwise-bench-") as folder:
        example = torch.zeros(1, *shape)
        classifier.export(Path(folder) / "bundle", example)
        session = Session(Path(folder) / "bundle", threads=threads)
        file = Path(folder) / "vanilla.onnx"
        export_last_exit(classifier.net, example, file)
        vanilla = inference_session(file.read_bytes(), threads, file)
    return BenchTarget(
        lambda: OnnxBackend(session), lambda images: vanilla.run(None, {"image": images}), lambda images: images.numpy()
    )


def _make_optimized_target(classifier: Classifier, shape: tuple[int, ...], threads: int) -> BenchTarget:
    return _make_torch_target(classifier.optimize(), shape, threads)


# Makes the target of each backend from a classifier, the shape of one image, and the number of threads.
BACKENDS: Mapping[str, Callable[[Classifier, tuple[int, ...], int], BenchTarget]] = {
    "torch": _make_torch_target,
    "optimized": _make_optimized_target,
    "onnx": _make_onnx_target,
}


def match_exit_shares(policy: Policy, preds: Any, shares: Sequence[float]) -> Policy:
    """Return a copy of the policy whose thresholds let a share `shares[k]` of the samples of `preds` exit at exit k."""
    ranking = ScoreRanking(policy.scores(preds))
    counts = np.rint(np.asarray(shares) * ranking.samples)
    return replace(policy, thresholds=ranking.thresholds(ranking.cutoffs_for_counts(counts)))


def measure(
    targets: Mapping[str, BenchTarget],
    policies: Mapping[str, Policy],
    images: Tensor,
    macs: Sequence[float],
    batch_sizes: Sequence[int] = BATCH_SIZES,
    repeats: int = 5,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Time every target at every batch size: the vanilla net, the full calibrated net, and each policy.

    Args:
        targets: Backends under test by name, from `bench_targets`.
        policies: Policies by label.
        images: Noise images (n, ...).
        macs: Cumulative MACs (K,) of the exits.
        batch_sizes: Batch sizes to measure.
        repeats: Number of rounds that count, after one to warm up.
        progress: Called before the first measurement, and after every backend of every round.
    """
    exits = len(macs)
    stages: list[StageTimes] = []
    timings: list[Timing] = []
    done, total = 0, len(batch_sizes) * (repeats + 1) * len(targets)
    progress(0, total)
    for size in batch_sizes:
        count = min(len(images), max(size, 128) if size > 1 else 32)
        times: dict[tuple[str, str], list[float]] = {}
        stage_times: dict[str, list[Array]] = {name: [] for name in targets}
        reach: dict[tuple[str, str], list[Array]] = {}
        for repeat in range(-1, repeats):  # the first warms up
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(repeat + 1))[:count]
            for name, target in targets.items():
                batches = [target.images(batch) for batch in torch.split(images[order], size)]
                seconds = {VANILLA: _time(lambda: [target.vanilla(batch) for batch in batches])}  # noqa: B023
                per_stage = np.sum([_time_stages(target, batch, exits) for batch in batches], axis=0)
                seconds[FULL] = float(per_stage.sum())
                for label, policy in policies.items():
                    exits_taken: list[Array] = []
                    seconds[label] = _time(lambda: exits_taken.extend(_run_batches(target, policy, batches)))  # noqa: B023
                    if repeat >= 0:
                        shares_reached = _shares_reached(np.concatenate(exits_taken), exits)
                        reach.setdefault((name, label), []).append(shares_reached)
                if repeat >= 0:
                    stage_times[name].append(per_stage)
                    for label, value in seconds.items():
                        times.setdefault((name, label), []).append(value)
                done += 1
                progress(done, total)
        for name in targets:
            per_stage = 1e3 * np.median(stage_times[name], axis=0) / count
            stages.append(StageTimes(name, size, tuple(np.cumsum(per_stage).tolist())))
            variants = (VANILLA, FULL, *policies)
            ms = {label: 1e3 * median(times[name, label]) / count for label in variants}
            for label in variants:
                timing = Timing(name, size, label, ms[label], ms[VANILLA] / ms[label])
                if label in policies:
                    reached = np.array(reach[name, label])  # (rounds, K)
                    bounds = reached @ per_stage
                    shares = -np.diff(reached.mean(axis=0), append=0.0)
                    timing = replace(
                        timing,
                        bound_ms=median(bounds),
                        reached=median(bounds / (1e3 * np.array(times[name, label]) / count)),
                        mac_speedup=float(macs[-1] / (shares @ np.asarray(macs))),
                        exit_shares=tuple(shares.tolist()),
                    )
                timings.append(timing)
    return Bench(torch.get_num_threads(), repeats, tuple(stages), tuple(timings))


def _time(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _time_stages(target: BenchTarget, batch: Any, exits: int) -> list[float]:
    """Return the seconds (K,) of each stage with its calibrated exit and the policy's decision, on the full batch."""
    backend, policy = target.backend(), no_early_exit_policy(range(1, exits + 1))
    state, seconds = backend.start(batch), []
    for exit in range(exits):
        start = time.perf_counter()
        state, pred = backend.run(exit, state)
        policy.exit_mask(exit, pred, None)
        seconds.append(time.perf_counter() - start)
    return seconds


def _run_batches(target: BenchTarget, policy: Policy, batches: Sequence[Any]) -> list[Array]:
    """Run batches with early exits; return the exits (n,) taken in each."""
    return [engine.classify(target.backend(), policy, batch)[2] for batch in batches]


def _shares_reached(exits_taken: Array, exits: int) -> Array:
    """Return the share (K,) of samples that reached each exit."""
    return np.array([float((exits_taken >= exit).mean()) for exit in range(exits)])
