"""How fast the method is beside the network, as ratios of things interleaved in one run.

usage: method.py [--small] [--out FILE]

Run it alone on the machine. `--small` is a quick check that the benchmark itself works; its figures mean nothing.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from record import options, record, seconds, zoo_trace

import exitwise as ew
from exitwise.calibration.calibration import standard_normals
from exitwise.calibration.laplace import Curvature, CurvatureEigen
from exitwise.calibration.mc_softmax import log_true_softmax
from exitwise.calibration.trace import HeadWeights, Split, Trace
from exitwise.calibration.tuning import PRIOR_VARS, TEMPERATURES
from exitwise.core.costs import Costs

BATCH = 64


def forward(net: ew.MultiExitNet, images: torch.Tensor) -> None:
    """One pass of the net over all images: what made the features."""
    with torch.inference_mode():
        for start in range(0, len(images), BATCH):
            net.features(images[start : start + BATCH])


def plain_search(trace: Trace, points: int) -> None:
    """The grid search without any ideas: every draw of every logit, at `points` of the 400 grid points."""
    draws = standard_normals(50, trace.num_classes, 0)
    spectra = [CurvatureEigen(curvature) for curvature in trace.curvature]
    grid = [(k, t, v) for k in range(trace.num_exits) for t in TEMPERATURES for v in PRIOR_VARS][:points]
    for k, temperature, prior_var in grid:
        features = trace.val.features[k].float()
        posterior = spectra[k].posterior(prior_var).to_float32()
        logits, shifts = trace.heads[k].logits(features), draws @ posterior.root.T
        t = posterior.scale(features).sqrt()
        for start in range(0, len(features), 250):
            part = slice(start, start + 250)
            z = logits[part, None] + t[part, None, None] * shifts
            log_true_softmax(z, trace.val.labels[part], temperature)


def cifar(trace: ew.Trace, threads: int, repeats: int, images: int, plain_points: int) -> dict[str, Any]:
    """The zoo's net and trace: search, prediction, and sweep with evaluation, each beside a forward pass."""
    torch.set_num_threads(threads)
    net = ew.load_net(ew.zoo.path("net.safetensors"))
    test = trace.test
    assert test is not None
    splits = {"val": trace.val, "test": test}
    pictures = torch.randn(images, 3, 32, 32)
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt")
    val, preds = calibration.predict(trace.val), calibration.predict(test)
    forward(net, pictures[: 4 * BATCH])  # warm-up
    times: dict[str, list[float]] = {}

    def sweep_and_evaluate() -> None:
        """From probabilities: predictions are wrapped anew so that nothing is remembered."""
        policies = ew.sweep(val_probs, costs=trace.costs)
        ew.budget_curve(test_probs, labels=test.labels, policies=policies, costs=trace.costs)

    val_probs, test_probs = val.probs, preds.probs
    steps: dict[str, Callable[[], object]] = {
        "forward": lambda: forward(net, pictures),
        "search": lambda: ew.calibrate(trace, "MIE Laplace T_opt sigma_opt"),
        "predict": lambda: calibration.predict(test).probs,
        "sweep_and_evaluate": sweep_and_evaluate,
        "plain_search": lambda: plain_search(trace, plain_points),
    }
    for _ in range(repeats):
        for name, step in steps.items():
            times.setdefault(name, []).append(seconds(step))
    # Ratios within each repeat, then the median: what slows the machine down slows both.
    passes = {name: [len(split) / images * value for value in times["forward"]] for name, split in splits.items()}

    def ratios(step: str, split: str, factor: float = 1.0) -> list[float]:
        return [round(factor * s / f, 4) for s, f in zip(times[step], passes[split], strict=True)]

    found = {
        "search / forward pass over val": ratios("search", "val"),
        "plain search / forward pass over val": ratios("plain_search", "val", 400 / plain_points),
        "predict / forward pass over test": ratios("predict", "test"),
        "sweep and evaluation / forward pass over test": ratios("sweep_and_evaluate", "test"),
    }
    return {
        "threads": threads,
        "repeats": repeats,
        "images timed": images,
        "plain search points timed": plain_points,
        "median seconds": {name: round(median(values), 4) for name, values in times.items()},
        "median ratios": {name: median(values) for name, values in found.items()},
        "all ratios": found,
    }


def imagenet_trace(n: int, classes: int, widths: tuple[int, ...]) -> Trace:
    """A random trace of an ImageNet net's size: features, heads and curvature that look like a net's."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (n,), generator=generator)
    features, heads, curvature = [], [], []
    for p in widths:
        centres = torch.randn(classes, p, generator=generator)
        x = (centres[labels] + torch.randn(n, p, generator=generator)).relu_()
        phi = torch.cat([x[:10_000], torch.ones(min(n, 10_000), 1)], dim=1).double()
        heads.append(HeadWeights(centres * (14 / p), torch.zeros(classes)))
        probs = heads[-1].logits(x[:10_000]).softmax(1).double()
        B = torch.diag(probs.sum(0)) - probs.T @ probs
        curvature.append(Curvature(phi.T @ phi, B, len(phi)))
        features.append(x)
    costs = Costs(tuple(float(k + 1) for k in range(len(widths))))
    return Trace(Split(tuple(features), labels), None, tuple(heads), tuple(curvature), costs)


def imagenet_search(n: int, classes: int, threads: int) -> dict[str, Any]:
    """In a process of its own, so that the peak of its memory is its own."""
    torch.set_num_threads(threads)
    trace = imagenet_trace(n, classes, (384, 384, 352, 304, 560) if classes == 1000 else (24, 24, 22, 19, 35))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    taken = seconds(lambda: ew.calibrate(trace, "MIE Laplace T_opt sigma_opt"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"n": n, "seconds": round(taken, 2), "peak GB": round(peak, 2), "GB before the search": round(before, 2)}


def main() -> None:
    parser = options(__doc__, "method.json")
    parser.add_argument("--imagenet", nargs=3, type=int, metavar=("N", "CLASSES", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.imagenet:
        print(json.dumps(imagenet_search(*arguments.imagenet)))
        return
    small = arguments.small
    trace = zoo_trace(small)
    results: dict[str, Any] = {}
    results["cifar"] = [
        cifar(trace, threads, 1, 128, 2) if small else cifar(trace, threads, 5, 5000, 40)
        for threads in ([1] if small else [1, 2])
    ]
    sizes, classes = ((500, 1000), 50) if small else ((25_000, 50_000), 1000)
    runs = []
    for n in sizes:
        command = [sys.executable, __file__, "--imagenet", str(n), str(classes), "1" if small else "2"]
        runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    growth = round(runs[1]["seconds"] / runs[0]["seconds"], 2)
    results["imagenet"] = {"classes": classes, "exits": 5, "threads": 1 if small else 2, "runs": runs, "growth": growth}
    record(arguments.out, results)


if __name__ == "__main__":
    main()
