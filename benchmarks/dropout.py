"""What the Laplace predictive and last-layer MC dropout take beside the plain net: multiply-adds, and measured times.

usage: dropout.py [--small] [--out FILE]

The zoo's net runs over random pictures, and its exits, as the runtime has them, over as many of the zoo's features:
plain, with Laplace, with MC dropout, 50 draws or masks each. Run it alone on the machine. `--small` checks the
benchmark itself; its figures mean nothing.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from record import by_threads, options, record, seconds
from torch import Tensor

import exitwise as ew
from exitwise.calibration.overhead import cost_table
from exitwise.runtime.exit_modules import RuntimeExit, runtime_exits

METHODS = {"vanilla": "MSDNet (vanilla)", "Laplace": "Laplace", "MC dropout": "MC dropout"}


def computed(net: ew.MultiExitNet) -> dict[str, list[float]]:
    """What is added to the plain net's multiply-adds up to each exit, in percent."""
    rows = cost_table(net, (3, 32, 32))
    added = {"Laplace": [row.laplace for row in rows], "MC dropout": [row.mc_dropout for row in rows]}
    return {
        name: [round(100 * (cost / row.vanilla - 1), 3) for cost, row in zip(costs, rows, strict=True)]
        for name, costs in added.items()
    }


@torch.inference_mode()
def forward(net: ew.MultiExitNet, images: Tensor, batch: int) -> None:
    """Everything up to the features of the last layers."""
    for part in images.split(batch):
        net.features(part)


@torch.inference_mode()
def answer(exits: list[RuntimeExit], features: tuple[Tensor, ...], batch: int) -> None:
    """What all exits say of their features."""
    for exit, x in zip(exits, features, strict=True):
        for part in x.split(batch):
            exit(part, None)


def measure(threads: int, repeats: int, samples: int, batch: int) -> dict[str, Any]:
    """The times of all in turn; ratios within each repeat, then their median: what slows one down slows the others."""
    torch.set_num_threads(threads)
    net = ew.load_net(ew.zoo.path("net.safetensors"))
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    images = torch.randn(samples, 3, 32, 32)
    features = tuple(x[:samples].float() for x in trace.val.features)
    exits = {name: runtime_exits(ew.calibrate(trace, method), variance=False) for name, method in METHODS.items()}
    steps: dict[str, Callable[[], None]] = {"forward": lambda: forward(net, images, batch)}
    for name, its in exits.items():
        steps[name] = lambda its=its: answer(its, features, batch)  # type: ignore[misc]
    for step in steps.values():
        step()  # warm-up
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, step in steps.items():
            times.setdefault(name, []).append(seconds(step))
    rounds = [dict(zip(times, row, strict=True)) for row in zip(*times.values(), strict=True)]
    ratios = {
        "Laplace adds to the plain net, %": [_added(each, "Laplace") for each in rounds],
        "MC dropout adds to the plain net, %": [_added(each, "MC dropout") for each in rounds],
        "exits with MC dropout / with Laplace": [each["MC dropout"] / each["Laplace"] for each in rounds],
    }
    return {
        "threads": threads,
        "repeats": repeats,
        "samples": samples,
        "batch": batch,
        "median ms per sample": {name: round(1e3 * median(each) / samples, 5) for name, each in times.items()},
        "median ratios": {name: round(median(values), 3) for name, values in ratios.items()},
        "all ratios": {name: [round(value, 3) for value in values] for name, values in ratios.items()},
    }


def _added(times: dict[str, float], name: str) -> float:
    """In percent of the plain net, its own exits included."""
    return 100 * (times[name] - times["vanilla"]) / (times["forward"] + times["vanilla"])


def table(measured: list[dict[str, Any]]) -> list[str]:
    """Return rows for docs/benchmarks.md: a column for each number of threads."""
    rows = []
    for batch, found in by_threads(measured, "batch").items():
        cells = [
            ", ".join(
                f"{each['median ratios'][f'{name} adds to the plain net, %']:.1f} %"
                for name in ("Laplace", "MC dropout")
            )
            for each in found
        ]
        rows.append(
            f"| added to the vanilla net's time by Laplace, by MC dropout, batch {batch} | {' | '.join(cells)} |"
        )
    return rows


def main() -> None:
    arguments = options(__doc__, "dropout.json").parse_args()
    settings = [(1, 3, 64, 16)]
    if not arguments.small:
        settings = [(threads, 9, 1024 if batch > 1 else 256, batch) for threads in (1, 2) for batch in (1, 64, 256)]
    results = {
        "computed, added % up to each exit": computed(ew.load_net(ew.zoo.path("net.safetensors"))),
        "measured": [measure(*each) for each in settings],
    }
    record(arguments.out, results)


if __name__ == "__main__":
    main()
