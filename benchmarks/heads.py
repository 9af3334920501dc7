"""An epoch of head training on features that are kept, beside one that runs the frozen backbone.

usage: heads.py [--small] [--out FILE]

Random pictures of 32 x 32, batches of 64: ResNet20 with exits by `ew.attach`, MSDNet-small with such heads (pooling and
one hidden layer), and MSDNet-small with its own, which are convolutions. An epoch is training and validation; the pass
that fills the memory is timed apart. Run it alone on the machine. `--small` checks the benchmark itself.
"""

from statistics import median
from typing import Any

import torch
from record import by_threads, options, record, seconds
from torch import nn
from torch.utils.data import TensorDataset

import exitwise as ew
from exitwise.models.msdnet import Neck

CLASSES = 100


def resnet() -> ew.MultiExitNet:
    """An untrained ResNet20 with statistics of random pictures, two exits before its own."""
    torch.manual_seed(0)
    plain = ew.models.resnet("cifar100-resnet20").train()
    plain(pictures(256).tensors[0])
    return ew.attach(plain.eval(), at="auto", exits=3)


def msdnet(pooled: bool) -> ew.MultiExitNet:
    """The zoo's net with its own heads, or with pooled heads of one hidden layer."""
    net = ew.load_net(ew.zoo.path("net.safetensors"))
    if not pooled:
        return net
    widths = [next(p for p in head.parameters()).shape[1] for head in net.exits]
    return ew.MultiExitNet(net.stages, [pooled_head(width) for width in widths])


def pooled_head(width: int) -> ew.Head:
    neck = Neck(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 128), nn.ReLU())
    return ew.Head(neck, nn.Linear(128, CLASSES))


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


def table(measured: list[dict[str, Any]]) -> list[str]:
    """Return rows for docs/benchmarks.md: a column for each number of threads."""
    rows = []
    for name, found in by_threads(measured, "net").items():
        cells = " | ".join(f"{each['median ratio']:.1f}x" for each in found)
        rows.append(f"| an epoch of head training that runs the backbone / on cached features, {name} | {cells} |")
    return rows


def main() -> None:
    arguments = options(__doc__, "heads.json").parse_args()
    settings = [(1, 1, 256)] if arguments.small else [(threads, 3, 5_000) for threads in (1, 2)]
    nets = {"ResNet20": resnet(), "MSDNet-small": msdnet(False), "MSDNet-small, pooled heads": msdnet(True)}
    measured = [measure(name, net, *each) for each in settings for name, net in nets.items()]
    record(arguments.out, {"measured": measured})


if __name__ == "__main__":
    main()
