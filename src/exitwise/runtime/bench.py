"""How long stages take on this machine, and how much of what stopping early could save becomes time.

Everything is measured on pictures of noise, whose content does not change the time; thresholds are set so that as many
leave at each exit as the policy lets go on real data. Contenders take turns, on other pictures every time, and what
counts is the median.
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
from exitwise.policies.scores import exit_scores
from exitwise.runtime import engine
from exitwise.runtime.classifier import Classifier

BACKENDS = ("torch", "optimized", "onnx")
BATCH_SIZES = (1, 16, 64, 256)
BUDGETS = (0.25, 0.5, 0.75)  # of the full net's MACs
VANILLA, FULL = "vanilla", "full"  # the plain net to its end; the calibrated one, with every exit on the way

Progress = Callable[[int, int], None]  # rounds done, and how many there are


@dataclass(frozen=True)
class Timing(Result):
    """One contender on batches of one size. Times are milliseconds per image.

    `bound_ms` is what the times of full-batch stages add up to for the share of samples that each stage saw, which is
    also what a policy in milliseconds predicts; `reached` is the part of that speed that became real, round by round.
    """

    backend: str
    batch_size: int
    variant: str  # vanilla, full, or a budget such as 50%
    ms: float
    speedup: float  # against the plain net to its end on the same backend
    bound_ms: float | None = None
    reached: float | None = None
    mac_speedup: float | None = None
    exit_shares: tuple[float, ...] | None = None


@dataclass(frozen=True)
class StageTimes(Result):
    """Milliseconds per image up to each exit, calibrated exits on the way included, when nobody leaves."""

    backend: str
    batch_size: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Bench(Result):
    """All that was measured, with the number of threads."""

    threads: int
    repeats: int
    stages: tuple[StageTimes, ...]
    timings: tuple[Timing, ...]

    def costs(self, backend: str, batch_size: int) -> Costs:
        """What `fit_policy` takes for a budget in milliseconds."""
        for row in self.stages:
            if (row.backend, row.batch_size) == (backend, batch_size):
                return Costs(row.values, "ms")
        known = ", ".join(f"{row.backend}:{row.batch_size}" for row in self.stages)
        raise InputError(f"{backend}:{batch_size} was not measured; measured were {known}")


@dataclass(frozen=True)
class BenchTarget:
    """A backend made anew for each call, the plain net on it, and how it wants its images."""

    backend: Callable[[], Any]
    vanilla: Callable[[Any], Any]
    images: Callable[[Tensor], Any]


def bench_targets(
    net: MultiExitNet, calibration: Calibration, shape: tuple[int, ...], names: Sequence[str], threads: int
) -> dict[str, BenchTarget]:
    """The net by name of backend; `onnx` is exported first."""
    for name in names:
        if name not in BACKENDS:
            raise InputError(f"`backends` must be among {', '.join(BACKENDS)}, but got {name!r}")
    made = {}
    for name in names:
        classifier = Classifier(net, calibration, no_early_exit_policy(range(1, len(net.stages) + 1)))
        if name == "onnx":
            made[name] = _onnx(classifier, shape, threads)
        else:
            classifier = classifier.optimize() if name == "optimized" else classifier
            made[name] = _torch(classifier)
    return made


def no_early_exit_policy(costs: Sequence[float]) -> Policy:
    """Everyone goes on to the last of the exits that cost this much."""
    return Policy((*[float("inf")] * (len(costs) - 1), float("-inf")), costs=tuple(costs))


def predictions(net: MultiExitNet, calibration: Calibration, images: Tensor) -> Predictions:
    """What every exit says of images, which all go through the whole net."""
    with torch.inference_mode():
        parts = [net.features(part) for part in torch.split(images, 64)]
    return calibration.predict([torch.cat(rows) for rows in zip(*parts, strict=True)])


def exit_shares(policy: Policy, preds: Predictions) -> list[float]:
    """(K,) of the samples that leave at each exit."""
    shares: list[float] = (np.bincount(policy.exits(preds), minlength=len(preds)) / preds.shape[1]).tolist()
    return shares


def _torch(classifier: Classifier) -> BenchTarget:
    def vanilla(images: Tensor) -> Array:
        net = classifier.net
        with torch.inference_mode():
            state = classifier.backend().start(images).state
            for stage in net.stages:
                state = stage(state)
            probs: Array = net.exits[-1](state).softmax(dim=1).numpy()
        return probs

    return BenchTarget(classifier.backend, vanilla, lambda images: images)


def _onnx(classifier: Classifier, shape: tuple[int, ...], threads: int) -> BenchTarget:
    from exitwise.runtime.export import export_last_exit
    from exitwise.runtime.onnx import OnnxBackend, Session, inference_session

    with tempfile.TemporaryDirectory(prefix="exitwise-bench-") as folder:
        example = torch.zeros(1, *shape)
        classifier.export(Path(folder) / "bundle", example)
        session = Session(Path(folder) / "bundle", threads=threads)
        plain = Path(folder) / "plain.onnx"
        export_last_exit(classifier.net, example, plain)
        full = inference_session(plain.read_bytes(), threads, plain)
    return BenchTarget(
        lambda: OnnxBackend(session), lambda images: full.run(None, {"image": images}), lambda images: images.numpy()
    )


def match_exit_shares(policy: Policy, preds: Any, shares: Sequence[float]) -> Policy:
    """The policy with thresholds that let these shares (K,) of other predictions leave."""
    ranking = ScoreRanking(exit_scores(preds, policy.score))
    counts = np.rint(np.asarray(shares) * ranking.samples)
    return replace(policy, thresholds=ranking.thresholds(ranking.cutoffs_for_counts(counts)))


def measure(
    made: Mapping[str, BenchTarget],
    policies: Mapping[str, Policy],
    images: Tensor,
    macs: Sequence[float],
    batch_sizes: Sequence[int] = BATCH_SIZES,
    repeats: int = 5,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Time every contender at every batch size: the plain net, the full calibrated one, and each policy."""
    exits = len(macs)
    stages: list[StageTimes] = []
    timings: list[Timing] = []
    total = len(batch_sizes) * (repeats + 1)
    for number, size in enumerate(batch_sizes):
        count = min(len(images), max(size, 128) if size > 1 else 32)
        times: dict[tuple[str, str], list[float]] = {}
        stage_times: dict[str, list[Array]] = {name: [] for name in made}
        reach: dict[tuple[str, str], list[Array]] = {}
        for repeat in range(-1, repeats):  # the first is for warming up
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(repeat + 1))[:count]
            for name, contender in made.items():
                batches = [contender.images(batch) for batch in torch.split(images[order], size)]
                found = {VANILLA: _seconds(lambda: [contender.vanilla(batch) for batch in batches])}  # noqa: B023
                per_stage = np.sum([_stage_seconds(contender, batch, exits) for batch in batches], axis=0)
                found[FULL] = float(per_stage.sum())
                for label, policy in policies.items():
                    left: list[Array] = []
                    found[label] = _seconds(lambda: left.extend(_exits(contender, policy, batches)))  # noqa: B023
                    if repeat >= 0:
                        reach.setdefault((name, label), []).append(_reach(np.concatenate(left), exits))
                if repeat >= 0:
                    stage_times[name].append(per_stage)
                    for label, seconds in found.items():
                        times.setdefault((name, label), []).append(seconds)
            progress(number * (repeats + 1) + repeat + 2, total)
        for name in made:
            ms = {label: 1e3 * median(times[name, label]) / count for label in (VANILLA, FULL, *policies)}
            per_stage = 1e3 * np.median(stage_times[name], axis=0) / count
            stages.append(StageTimes(name, size, tuple(np.cumsum(per_stage).tolist())))
            for label, each in ms.items():
                row = Timing(name, size, label, each, ms[VANILLA] / each)
                if label in policies:
                    seen = np.array(reach[name, label])  # (rounds, K)
                    bounds = seen @ per_stage
                    shares = -np.diff(seen.mean(axis=0), append=0.0)
                    row = replace(
                        row,
                        bound_ms=median(bounds),
                        reached=median(bounds / (1e3 * np.array(times[name, label]) / count)),
                        mac_speedup=float(macs[-1] / (shares @ np.asarray(macs))),
                        exit_shares=tuple(shares.tolist()),
                    )
                timings.append(row)
    return Bench(torch.get_num_threads(), repeats, tuple(stages), tuple(timings))


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _stage_seconds(contender: BenchTarget, batch: Any, exits: int) -> list[float]:
    """(K,) of each stage with its calibrated exit and the look at its answer, on the full batch."""
    backend, nobody = contender.backend(), no_early_exit_policy(range(1, exits + 1))
    state, found = backend.start(batch), []
    for exit in range(exits):
        start = time.perf_counter()
        state, said = backend.run(exit, state)
        nobody.stops(exit, said, None)
        found.append(time.perf_counter() - start)
    return found


def _exits(contender: BenchTarget, policy: Policy, batches: Sequence[Any]) -> list[Array]:
    return [engine.classify(contender.backend(), policy, batch)[2] for batch in batches]


def _reach(left: Array, exits: int) -> Array:
    """(K,) the share of samples that each stage saw."""
    return np.array([float((left >= exit).mean()) for exit in range(exits)])
