"""How much of what stopping early could save becomes time, as ratios of things interleaved in one run.

usage: runtime.py [--small] [--out FILE]

Run it alone on the machine. `--small` is a quick check that the benchmark itself works; its figures mean nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from record import options, record, seconds

import exitwise as ew
from exitwise.calibration.calibration import Calibration
from exitwise.runtime import bench, engine
from exitwise.runtime.onnx import OnnxBackend, Session

SHAPE = (3, 32, 32)
BUDGETS = (0.25, 0.5, 0.75)


def zoo_small() -> tuple[ew.MultiExitNet, Calibration, list[list[float]], ew.Costs]:
    """The shipped net, its calibration, and the shares that leave at each exit on its test split, by budget."""
    net = ew.load_net(ew.zoo.path("net.safetensors"))
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    assert trace.test is not None
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt")
    val, test = calibration.predict(trace.val), calibration.predict(trace.test)
    return net, calibration, shares_by_budget(val, test, trace.costs), trace.costs


def random_net(preset: str) -> tuple[ew.MultiExitNet, Calibration, list[list[float]], ew.Costs]:
    """A net with random weights, calibrated on noise; the paper's shares that spend each budget."""
    torch.manual_seed(0)
    net = ew.models.msdnet(preset).eval()
    images, labels = torch.randn(256, *SHAPE), torch.arange(256) % net.num_classes
    trace = ew.collect(net, [(images, labels)], [(images, labels)])
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt")
    preds = calibration.predict(trace.val)
    return net, calibration, shares_by_budget(preds, preds, trace.costs), trace.costs


def shares_by_budget(val: ew.Predictions, test: ew.Predictions, costs: ew.Costs) -> list[list[float]]:
    """Of the samples that leave at each exit of test, with thresholds for each budget fitted on val."""
    shares = []
    for budget in BUDGETS:
        spent = max(costs.values[0], budget * costs.values[-1])  # a tiny net's first exit takes more than a quarter
        policy = ew.fit_policy(val, costs=costs, budget=spent)
        shares.append(bench.exit_shares(policy, test))
    return shares


def decision(classifier: ew.Classifier, images: torch.Tensor, repeats: int) -> float:
    """All that `clf(images)` does besides running stages and necks, as a part of the time of those, in percent."""
    spent, began = [0.0], [0.0]

    def before(*_: Any) -> None:
        began[0] = time.perf_counter()

    def after(*_: Any) -> None:
        spent[0] += time.perf_counter() - began[0]

    parts = [*classifier.net.stages, *(head.neck for head in classifier.net.exits)]
    hooks = [part.register_forward_pre_hook(before) for part in parts]
    hooks += [part.register_forward_hook(after) for part in parts]
    ratios = []
    for repeat in range(repeats + 1):
        spent[0] = 0.0
        batch = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(repeat))[:64]]
        total = seconds(lambda: classifier(batch))  # noqa: B023
        ratios.append((total - spent[0]) / spent[0])
    for hook in hooks:
        hook.remove()
    return 100 * median(ratios[1:])


class Timed(OnnxBackend):
    """Adds up the time that graphs take."""

    spent = 0.0

    def run(self, exit: int, state: Any) -> Any:
        start = time.perf_counter()
        found = super().run(exit, state)
        self.spent += time.perf_counter() - start
        return found


def onnx_decision(calibrated: Session, policy: ew.Policy, plain: Session, images: torch.Tensor, repeats: int) -> float:
    """What calibrated graphs take more than plain ones, and NumPy's part beside them, in percent of the plain ones."""
    more, beside, base = [], [], []
    for repeat in range(repeats + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(repeat))[:64]
        batch = images[order].numpy()
        # The plain graphs see the same survivors.
        first = Timed(calibrated)
        total = seconds(lambda: engine.classify(first, policy, batch))  # noqa: B023
        exits = engine.classify(OnnxBackend(calibrated), policy, batch)[2]
        second = Timed(plain)
        state = second.start(batch)
        here = np.arange(len(batch))
        for exit in range(second.num_exits):
            state, _ = second.run(exit, state)
            stay = np.flatnonzero(exits[here] > exit)
            if not len(stay):
                break
            state, here = second.take(state, stay), here[stay]
        more.append(first.spent - second.spent)
        beside.append(total - first.spent)
        base.append(second.spent)
    return 100 * (median(more[1:]) + median(beside[1:])) / median(base[1:])


def pooling(backend: Callable[[], Any], policy: ew.Policy, images: Any, batch_size: int, repeats: int) -> float:
    """The same stream without pooling / with it."""
    ratios = []
    for _ in range(repeats):
        times = {}
        for pooled in (False, True):
            made = backend()
            times[pooled] = seconds(lambda: list(engine.stream(made, policy, images, batch_size, None, pooled)))  # noqa: B023
        ratios.append(times[False] / times[True])
    return median(ratios)


def throughput(contender: bench.BenchTarget, policy: ew.Policy, images: torch.Tensor, repeats: int) -> float:
    """Images per second of a pooled stream in batches of 64."""
    given = list(contender.images(images[:256]))
    times = [seconds(lambda: list(engine.stream(contender.backend(), policy, given, 64))) for _ in range(repeats + 1)]
    return len(given) / median(times[1:])


def measure(name: str, small: bool) -> dict[str, Any]:
    """Everything about one net, with the threads that torch has now."""
    threads = torch.get_num_threads()
    net, calibration, shares, costs = zoo_small() if name == "cifar100-small" else random_net(name)
    repeats = 1 if small else 5 if name == "cifar100-small" else 3
    images = torch.randn(32 if small else 512, *SHAPE, generator=torch.Generator().manual_seed(1))
    preds = bench.predictions(net, calibration, images)
    base = bench.no_early_exit_policy(costs.values)
    policies = {
        f"{budget:.0%}": bench.match_exit_shares(base, preds, share)
        for budget, share in zip(BUDGETS, shares, strict=True)
    }
    made = bench.bench_targets(net, calibration, SHAPE, tuple(bench.BACKENDS), threads)
    sizes = (1, 8) if small else (1, 64, 256)
    found = bench.measure(made, policies, images, costs.values, sizes, repeats)
    half = policies["50%"]
    plain = ew.Classifier(net, calibration, half)
    rounds = 3 if small else 3 * repeats
    decisions, full_decisions = (
        {
            "torch": decision(ew.Classifier(net, calibration, policy), images, rounds),
            "optimized": decision(ew.Classifier(net, calibration, policy).optimize(), images, rounds),
        }
        for policy in (half, base)
    )
    with tempfile.TemporaryDirectory() as folder:
        plain.export(Path(folder) / "ours")
        some = images[:32], torch.arange(32) % net.num_classes
        trace = ew.collect(net, [some], [some])
        ew.Classifier(net, ew.calibrate(trace, "MSDNet (vanilla)"), half).export(Path(folder) / "plain")
        sessions = [Session(Path(folder) / each, threads=threads) for each in ("ours", "plain")]
    decisions["onnx"] = onnx_decision(sessions[0], half, sessions[1], images, rounds)
    full_decisions["onnx"] = onnx_decision(sessions[0], base, sessions[1], images, rounds)
    speeds = {backend: throughput(contender, half, images, repeats) for backend, contender in made.items()}
    streams = {
        backend: {
            str(size): pooling(contender.backend, policies["25%"], list(contender.images(images[:256])), size, repeats)
            for size in ((4,) if small else (8, 16))
        }
        for backend, contender in made.items()
    }
    full = {(row.backend, row.variant): row.ms for row in found.timings if row.batch_size == 1}
    return {
        "net": name,
        "threads": threads,
        "macs": costs.values[-1],
        "decision, % of the stages at batch 64, half of the cost": decisions,
        "decision, % of the stages at batch 64, nobody leaves early": full_decisions,
        "stream at 50%, batch 64, images per second": speeds,
        POOLING: streams,
        FULL_FULL: full["torch", bench.FULL] / full["onnx", bench.FULL],
        PLAIN_FULL: full["torch", bench.VANILLA] / full["onnx", bench.FULL],
        "batch 1, plain net, torch / onnx": full["torch", bench.VANILLA] / full["onnx", bench.VANILLA],
        **found.to_dict(),
    }


def table(measured: list[dict[str, Any]]) -> list[str]:
    """Return rows for docs/benchmarks.md: a column per number of threads, with the small and the large net in it."""

    def row(title: str, cell: Callable[[dict[str, Any]], str]) -> str:
        cells = []
        for threads in (1, 2):
            nets = [found for found in measured if found["threads"] == threads]
            cells.append("; ".join(cell(found) for found in sorted(nets, key=lambda found: found["macs"])))
        return f"| {title} | {' | '.join(cells)} |"

    def reached(backend: str, size: int) -> Callable[[dict[str, Any]], str]:
        def cell(found: dict[str, Any]) -> str:
            rows = [each for each in found["timings"] if (each["backend"], each["batch_size"]) == (backend, size)]
            return ", ".join(f"{100 * each['reached']:.0f}" for each in rows if each["reached"] is not None) + " %"

        return cell

    words = {"onnx": "ONNX", "optimized": "torch, optimized", "torch": "torch, eager"}
    rows = [
        row(f"share of the bound reached, {word}, batch {size}", reached(backend, size))
        for backend, word in words.items()
        for size in (1, 64, 256)
    ]
    for leaving, title in (("half of the cost", "half of the cost"), ("nobody leaves early", "no early exits")):
        key = f"decision, % of the stages at batch 64, {leaving}"
        title = f"overhead outside the stages, {title}, batch 64: ONNX, optimized, eager"
        rows.append(row(title, lambda found, key=key: ", ".join(f"{found[key][each]:.1f}" for each in words) + " %"))
    for key in (FULL_FULL, PLAIN_FULL):
        rows.append(row(key, lambda found, key=key: f"{found[key]:.1f}x"))
    for backend, word in words.items():
        title = f"stream with pooling / without pooling, 25 % of the cost, batches of 8 and 16, {word}"
        rows.append(row(title, lambda found, each=backend: _ratios(found[POOLING][each])))
    return rows


def _ratios(by_size: dict[str, float]) -> str:
    return ", ".join(f"{ratio:.2f}x" for ratio in by_size.values())


FULL_FULL = "batch 1, full calibrated net: torch eager / ONNX"
PLAIN_FULL = "batch 1, plain torch eager / full calibrated ONNX"
POOLING = "stream at 25%, without pooling / with it, by batch size"


def main() -> None:
    parser = options(__doc__, "runtime.json")
    parser.add_argument("--one", nargs=2, metavar=("NET", "THREADS"), help="this net with these threads, to stdout")
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(int(arguments.one[1]))
        print(json.dumps(measure(arguments.one[0], arguments.small)))
        return
    nets = ["tiny-32"] if arguments.small else ["cifar100-small", "cifar100-large"]
    measured = []
    for net in nets:
        for threads in (1,) if arguments.small else (1, 2):
            # A process each, with room in oneDNN's cache for convolutions on batches of every size, as the command has.
            order = [sys.executable, __file__, "--one", net, str(threads), *(["--small"] if arguments.small else [])]
            environment = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16384"}
            done = subprocess.run(order, check=True, stdout=subprocess.PIPE, env=environment)
            measured.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{net}, {threads} threads: done", file=sys.stderr)
    record(arguments.out, {"measured": measured})


if __name__ == "__main__":
    main()
