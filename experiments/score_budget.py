"""How well `exitwise score --keep-budget` holds a budget over a job, by the size of its shards, when images change.

usage: score_budget.py CIFAR100_DIR [--out experiments/scoring/budget.json]

Every shard has a controller of its own, so that rows do not depend on order. The shipped net sees the test images of
CIFAR-100, which get worse along the job: six parts of equal size, from clean to severity 5. Exits are those of the
engine with a controller: batches of 64, each run to its end.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corruptions import CORRUPTIONS
from results import machine

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.data import cifar
from exitwise.data.batches import Normalize

HERE = Path(__file__).parent
SHARES = (0.25, 0.5)
SHARD_SIZES = (256, 512, 1024, 2048, 4096, 10_000)
BATCH_SIZE = 64


def worsen(pixels: torch.Tensor, name: str) -> torch.Tensor:
    """Corrupt images (n, 3, height, width) more and more: clean, then severities 1 to 5."""
    parts = list(pixels.tensor_split(6))
    generator = torch.Generator().manual_seed(0)
    worse = [CORRUPTIONS[name](part, severity, generator) for severity, part in enumerate(parts[1:], start=1)]
    return torch.cat([parts[0], *worse])


def run_job(policy: ew.Policy, preds: ew.Predictions, confidences: np.ndarray, size: int) -> list[float]:
    """Return the mean cost of every shard, with a controller for each."""
    assert policy.costs is not None
    costs, means = np.asarray(policy.costs), []
    for start in range(0, len(confidences[0]), size):
        controller, stop = ew.BudgetController(policy), min(start + size, len(confidences[0]))
        for first in range(start, stop, BATCH_SIZE):
            rows = np.arange(first, min(first + BATCH_SIZE, stop))
            exits = controller.policy.exits(preds.take(rows))
            scores = confidences[exits, rows] if policy.score == "confidence" else None
            controller.update(exits, scores)
        means.append(controller.mean_cost)
    assert costs[0] <= min(means) <= max(means) <= costs[-1]
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "scoring" / "budget.json")
    arguments = parser.parse_args()
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    calibration, net = ew.calibrate(trace), ew.load_net(ew.zoo.path("net.safetensors"))
    test = cifar.load(cifar.CIFAR100, arguments.root)[1]
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    pixels = test[order].pixels
    normalize = Normalize(test)
    rows: list[dict[str, Any]] = []
    for name in CORRUPTIONS:
        worse = worsen(pixels, name)
        batches = [(normalize(part), torch.zeros(len(part), dtype=torch.int64)) for part in worse.split(500)]
        preds = calibration.predict(ew.collect(net, val=batches).val)
        confidences = np.stack([np.asarray(probs).max(axis=1) for probs in preds.probs])
        for share in SHARES:
            budget = share * trace.costs.values[-1]
            val = calibration.predict(trace.val)
            policy = ew.fit_policy(val, trace.val.labels, trace.costs, budget=budget, score="auto")
            fixed = np.asarray(trace.costs.values)[policy.exits(preds)]
            rows.append({"corruption": name, "budget": share, "shard_size": None, "mean": fixed.mean() / budget})
            for size in SHARD_SIZES:
                means = np.asarray(run_job(policy, preds, confidences, size))
                counts = np.diff([*range(0, len(worse), size), len(worse)])
                row = {"corruption": name, "budget": share, "shard_size": size}
                mean = float(np.average(means, weights=counts))
                rows.append(row | {"mean": mean / budget, "largest_shard": float(means.max()) / budget})
            print(*rows[-1 - len(SHARD_SIZES) :], sep="\n", flush=True)
    write_json(arguments.out, {"machine": machine(), "images": len(pixels), "rows": rows})


if __name__ == "__main__":
    main()
