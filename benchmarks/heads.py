"""An epoch of head training on features that are kept, beside one that runs the frozen backbone.

usage: heads.py [--small] [--out FILE]

Random pictures of 32 x 32, batches of 64: a ResNet and MSDNet-small with pooled heads of one hidden layer, as
`ew.attach` makes them, and MSDNet-small with its own heads, which are convolutions. An epoch is training and
validation; the pass that fills the memory is timed apart. Run it alone on the machine. `--small` checks the benchmark.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from method import machine, seconds
from torch import nn
from torch.utils.data import TensorDataset

import exitwise as ew
from exitwise.models.msdnet import Neck
from exitwise.models.resnet import Block

RESULTS = Path(__file__).parent / "results" / "heads.json"
CLASSES = 100


def resnet(blocks: int) -> ew.MultiExitNet:
    """Three widths of residual blocks, an exit after each."""
    widths = (16, 32, 64)
    stages: list[nn.Module] = []
    for k, width in enumerate(widths):
        inputs = widths[max(k - 1, 0)]
        stem = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()] if k == 0 else []
        first = Block(inputs, width, width, 1 if k == 0 else 2)
        stages.append(nn.Sequential(*stem, first, *(Block(width, width, width, 1) for _ in range(blocks - 1))))
    return ew.MultiExitNet(stages, [pooled_head(width, nn.Sequential) for width in widths])


def pooled_head(width: int, row: type[nn.Sequential]) -> ew.Head:
    neck = row(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 128), nn.ReLU())
    return ew.Head(neck, nn.Linear(128, CLASSES))


def msdnet(pooled: bool) -> ew.MultiExitNet:
    net = ew.models.msdnet("cifar100-small")
    if not pooled:
        return net
    widths = [next(p for p in head.parameters()).shape[1] for head in net.exits]
    return ew.MultiExitNet(net.stages, [pooled_head(width, Neck) for width in widths])


def pictures(number: int) -> TensorDataset:
    rng = torch.Generator().manual_seed(number)
    return TensorDataset(
        torch.randn(number, 3, 32, 32, generator=rng), torch.randint(CLASSES, (number,), generator=rng)
    )


def measure(name: str, net: ew.MultiExitNet, threads: int, repeats: int, images: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    train, val = pictures(images), pictures(images // 10)
    epochs: dict[str, list[float]] = {"kept": [], "backbone": []}
    passes: list[float] = []

    def trained(cache: bool, number: int) -> float:
        """Seconds of an epoch."""
        history = ew.train_heads(net, train, val, epochs=number, cache=cache)
        return median(row.seconds for row in history.epochs)

    trained(True, 1)  # warm-up
    for _ in range(repeats):
        whole = seconds(lambda: epochs["kept"].append(trained(True, 3)))
        passes.append(whole - 3 * epochs["kept"][-1])
        epochs["backbone"].append(trained(False, 1))
    ratios = [slow / fast for slow, fast in zip(epochs["backbone"], epochs["kept"], strict=True)]
    return {
        "net": name,
        "exits": len(net.exits),
        "threads": threads,
        "repeats": repeats,
        "images": images,
        "median seconds": {
            "an epoch on features that are kept": round(median(epochs["kept"]), 4),
            "an epoch that runs the backbone": round(median(epochs["backbone"]), 4),
            "the pass that fills the memory": round(median(passes), 4),
        },
        "median ratio": round(median(ratios), 2),
        "all ratios": [round(ratio, 2) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    settings = [(1, 1, 256)] if arguments.small else [(threads, 5, 5_000) for threads in (1, 2)]
    nets = {"ResNet": resnet(3), "MSDNet-small": msdnet(False), "MSDNet-small, pooled heads": msdnet(True)}
    measured = [measure(name, net, *each) for each in settings for name, net in nets.items()]
    results = {"command": "make benchmark", "machine": machine(), "measured": measured}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
