"""How time and memory of a calibration grow with the number of classes.

usage: classes.py [--small] [--out FILE] [--classes C ...]

With one thread. Seconds are of the processor and of the clock: on a busy machine only the former mean something. Every
number of classes has a process of its own, so that its peak memory is its own. `--small` is a quick check that the
benchmark itself works; its figures mean nothing.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from record import options, record

import exitwise as ew
from exitwise.calibration.calibration import standard_normals
from exitwise.calibration.laplace import Curvature, CurvatureEigen, batch_curvature
from exitwise.calibration.methods import DROPOUT_METHODS, METHODS, OURS, POE_METHODS
from exitwise.calibration.trace import HeadWeights, Split, Trace
from exitwise.calibration.tuning import PRIOR_VARS, Tuner
from exitwise.core.costs import Costs

EXITS, FEATURES, SAMPLES = 4, 256, 5000
TRAIN, CURVATURE_SAMPLES = 50_000, 1000  # the curvature of 1,000 samples, scaled to 50,000
DENSE_CLASSES = 2000  # most classes for which the dense posterior is computed, too


def make_trace(classes: int, features: int, samples: int) -> Trace:
    """Make a random trace whose features, heads and curvature look like a net's."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (samples,), generator=generator)
    all_features, heads, curvature = [], [], []
    for _ in range(EXITS):
        centers = torch.randn(classes, features, generator=generator)
        x = (centers[labels] + torch.randn(samples, features, generator=generator)).relu_()
        head = HeadWeights(centers * (14 / features), torch.zeros(classes))
        part = x[:CURVATURE_SAMPLES]
        sums = batch_curvature(part, head.logits(part), bias=True)
        scale = TRAIN / len(part)
        curvature.append(Curvature(sums.A.mul_(scale), sums.B.mul_(scale), TRAIN))
        heads.append(head)
        all_features.append(x)
    costs = Costs(tuple(float(k + 1) for k in range(EXITS)))
    return Trace(Split(tuple(all_features), labels), None, tuple(heads), tuple(curvature), costs)


def dense_posteriors(curvature: Curvature, draws: torch.Tensor) -> None:
    """Draw from the posteriors of one exit with the eigenvectors of B and a dense covariance per prior variance."""
    values, vectors = torch.linalg.eigh(curvature.B)
    for prior_var in PRIOR_VARS:
        covariance = (vectors / (values.clamp(min=0) / curvature.n**0.5 + prior_var**-0.5)) @ vectors.T
        draws @ torch.linalg.cholesky((covariance + covariance.T) / 2).float().T


def draw_posteriors(curvature: Curvature, draws: torch.Tensor) -> None:
    """Draw from the same posteriors as the library does."""
    eigen = CurvatureEigen(curvature)
    for prior_var in PRIOR_VARS:
        eigen.shifts(prior_var, draws)


def measure(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a step, and the peak memory of the process so far."""
    start, clock = time.process_time(), time.perf_counter()
    step()
    used = {"CPU seconds": time.process_time() - start, "seconds": time.perf_counter() - clock}
    return used | {"peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def run(classes: int, features: int, samples: int) -> Iterator[dict[str, Any]]:
    """Yield what was measured for one number of classes so far, after every step."""
    torch.set_num_threads(1)
    kept: dict[str, Any] = {}
    steps: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"classes": classes, "steps": steps}

    def add(name: str, step: Callable[[], object]) -> dict[str, Any]:
        steps[name] = {key: round(value, 2) for key, value in measure(step).items()}
        return result

    yield add("making the trace", lambda: kept.update(trace=make_trace(classes, features, samples)))
    trace: Trace = kept["trace"]
    eight = trace.val.take(torch.arange(8))
    yield add("Trace() of 8 samples", lambda: Trace(eight, None, trace.heads, trace.curvature, trace.costs))
    if classes <= DENSE_CLASSES:
        draws = standard_normals(50, classes, 0)
        ratios = []
        for _ in range(3):
            dense, ours = (measure(partial(f, trace.curvature[0], draws)) for f in (dense_posteriors, draw_posteriors))
            ratios.append(round(dense["CPU seconds"] / ours["CPU seconds"], 2))
        result["dense posteriors / ours, CPU time"] = {"median": median(ratios), "all": ratios}
    yield add("full method", lambda: kept.update(calibration=ew.calibrate(trace, OURS)))
    calibration: ew.Calibration = kept["calibration"]
    yield add("its predictions", lambda: calibration.predict(trace.val).predicted)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "calibration.safetensors"
        add("its file", lambda: (calibration.save(path), ew.Calibration.load(path)))
        result["megabytes of its file"] = round(path.stat().st_size / 1e6, 3)
    tuner = Tuner(trace)
    kinds = {"of the paper": METHODS, "with MC dropout": DROPOUT_METHODS, "with PoE": POE_METHODS}
    for kind, methods in kinds.items():
        yield add(f"all {len(methods)} methods {kind}", partial(list, map(tuner.calibrate, methods)))


def main() -> None:
    parser = options(__doc__, "classes.json")
    parser.add_argument("--classes", type=int, nargs="+", help="numbers of classes [default: 1000, 2000, 10000]")
    parser.add_argument("--run", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        for measured in run(*arguments.run):
            print(json.dumps(measured), flush=True)
        return
    small = arguments.small
    features, samples = (8, 200) if small else (FEATURES, SAMPLES)
    shape = {"exits": EXITS, "features": features, "samples": samples, "threads": 1, "method": OURS}
    runs: dict[int, dict[str, Any]] = {}
    for classes in arguments.classes or ([20, 60] if small else [1000, 2000, 10_000]):
        command = [sys.executable, __file__, "--run", *map(str, (classes, features, samples))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():  # written down after every step: the largest take long
                runs[classes] = json.loads(line)
                load = [round(value, 1) for value in os.getloadavg()]
                record(arguments.out, {**shape, "load average": load, "runs": list(runs.values())})
        if process.returncode:
            sys.exit(process.returncode)


if __name__ == "__main__":
    main()
