"""What it takes to turn budgets into thresholds, beside the forward pass that made the predictions.

usage: policies.py [--small] [--out FILE]

10,000 samples of 8 exits and 100 classes, 100 budgets, every strategy; and one pass of the 8-exit net (MSDNet-large for
CIFAR-100, random weights) over as many images. Run it alone on the machine. `--small` checks the benchmark itself.
"""

from statistics import median
from typing import Any

import numpy as np
import torch
from method import BATCH, forward
from record import options, record, seconds

import exitwise as ew
from exitwise.core.costs import evenly_spaced_budgets

STRATEGIES = ("geometric", "optimized", "label_free", "auto")


def predictions(samples: int, exits: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """(K, n, c) probabilities that say more of the labels at every exit, and labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, samples)
    logits = rng.normal(size=(1, samples, classes)) + 0.7 * rng.normal(size=(exits, samples, classes))
    strength = np.exp(rng.normal(scale=0.5, size=samples))
    logits[:, np.arange(samples), labels] += np.linspace(2.5, 4.5, exits)[:, None] * strength
    probs = np.exp(logits)
    return (probs / probs.sum(axis=2, keepdims=True)).astype(np.float32), labels


def measure(threads: int, repeats: int, samples: int, images: int, number: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    net = ew.models.msdnet("cifar100-large").eval()
    costs = ew.Costs.of(ew.macs(net, (3, 32, 32)))
    pictures = torch.randn(images, 3, 32, 32)
    probs, labels = predictions(samples, len(costs), 100)
    asked = evenly_spaced_budgets(costs, number)
    times: dict[str, list[float]] = {}
    forward(net, pictures[:BATCH])  # warm-up
    for _ in range(repeats):
        pass_ = seconds(lambda: forward(net, pictures)) * samples / images
        times.setdefault("forward pass", []).append(pass_)
        for strategy in STRATEGIES:

            def fit(strategy: str = strategy) -> None:
                ew.fit_policies(probs, labels, costs, budgets=asked, strategy=strategy)

            times.setdefault(strategy, []).append(seconds(fit))
    ratios = {
        name: [t / f for t, f in zip(values, times["forward pass"], strict=True)] for name, values in times.items()
    }
    return {
        "threads": threads,
        "repeats": repeats,
        "samples": samples,
        "exits": len(costs),
        "budgets": number,
        "images timed": images,
        "median seconds": {name: round(median(values), 3) for name, values in times.items()},
        "median ratio to the forward pass": {name: round(median(ratios[name]), 4) for name in STRATEGIES},
    }


def main() -> None:
    arguments = options(__doc__, "policies.json").parse_args()
    settings = [(1, 1, 300, 64, 4)] if arguments.small else [(threads, 3, 10_000, 512, 100) for threads in (1, 2)]
    record(arguments.out, {"measured": [measure(*each) for each in settings]})


if __name__ == "__main__":
    main()
