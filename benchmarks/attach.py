"""How long `ew.attach` takes, and what its stages take beside the module that they were cut from.

usage: attach.py [--small] [--out FILE]

ResNet50 and a ViT of the size called tiny on pictures of 224 x 224, ResNet50 and ResNet110 on 32 x 32. Nobody leaves
early: all stages and the last head, then all heads, beside the plain module, in turn. Run it alone on the machine.
`--small` checks the benchmark itself.
"""

import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import by_threads, options, record, seconds
from torch import nn

import exitwise as ew

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs" / "examples"))
from vit import ViT

EXITS = 4


def modules(small: bool) -> dict[str, tuple[nn.Module, int, list[int]]]:
    """By name: an untrained module, the side of its pictures, and sizes of batches."""
    if small:
        return {"ViT": (ViT(), 32, [2])}
    tiny = ViT(classes=1000, side=224, patch=16, width=192, depth=12, heads=3)
    return {
        "ResNet50, 224 x 224": (ew.models.resnet("imagenet-resnet50"), 224, [1, 8]),
        "ViT-tiny, 224 x 224": (tiny, 224, [1, 8]),
        "ResNet50, 32 x 32": (ew.models.resnet("imagenet-resnet50"), 32, [1, 64]),
        "ResNet110, 32 x 32": (ew.models.resnet("cifar100-resnet110"), 32, [1, 64]),
    }


@torch.inference_mode()
def stages_alone(net: ew.MultiExitNet, x: Any) -> None:
    for stage in net.stages:
        x = stage(x)
    net.exits[-1](x)


@torch.inference_mode()
def whole(module: nn.Module, x: Any) -> None:
    module(x)


def measure(name: str, module: nn.Module, side: int, batches: list[int], threads: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    example = torch.rand(1, 3, side, side)
    made: list[ew.MultiExitNet] = []

    def attach() -> None:
        made.append(ew.attach(module.eval(), "auto", exits=EXITS, example_inputs=example))

    attaching = [seconds(attach) for _ in range(1 if repeats == 1 else 3)]
    net = made[-1]
    ratios = {}
    for batch in batches:
        x = torch.rand(batch, 3, side, side)
        steps = (lambda: whole(module, x), lambda: stages_alone(net, x), lambda: whole(net, x))  # noqa: B023
        rows = [[seconds(step) for step in steps] for _ in range(repeats + 1)][1:]
        ratios[f"batch {batch}"] = {
            "repeats": repeats,
            "plain module, ms": round(1e3 * median(row[0] for row in rows), 2),
            "stages / plain module": round(median(row[1] / row[0] for row in rows), 4),
            "stages and all heads / plain module": round(median(row[2] / row[0] for row in rows), 4),
        }
    return {
        "module": name,
        "parameters": sum(p.numel() for p in module.parameters()),
        "exits": EXITS,
        "threads": threads,
        "attach, median seconds": round(median(attaching), 3),
        "nobody leaves": ratios,
    }


def table(measured: list[dict[str, Any]]) -> list[str]:
    """Return rows for docs/benchmarks.md: a column for each number of threads."""
    rows = []
    for name, found in by_threads(measured, "module").items():
        sizes = " and ".join(batch.removeprefix("batch ") for batch in found[0]["nobody leaves"])
        cells = [", ".join(f"{b['stages / plain module']:.2f}" for b in e["nobody leaves"].values()) for e in found]
        seconds_taken = [f"{each['attach, median seconds']:.1f} s" for each in found]
        rows.append(f"| `ew.attach`, {name}, {EXITS} exits | {' | '.join(seconds_taken)} |")
        rows.append(f"| attached stages / original module, {name}, batches of {sizes} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    arguments = options(__doc__, "attach.json").parse_args()
    settings = [(1, 1)] if arguments.small else [(1, 41), (2, 41)]
    nets = modules(arguments.small)
    record(arguments.out, {"measured": [measure(name, *net, *each) for each in settings for name, net in nets.items()]})


if __name__ == "__main__":
    main()
