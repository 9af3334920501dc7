"""Cuts by what they are worth, beside cuts of equal cost: accuracy of early exits over eight budgets.

usage: best_cuts.py RUNS [--cifar100 DIR] [--images DIR --nets DIR] [--exits K]

For each network, `ew.best_cuts` chooses K - 1 cuts from up to twelve places. Exits with the default heads are attached
there, and at the cuts of `at="auto"`. The heads of both are trained on the same samples, 15,000 or fewer, and their
temperatures tuned. Thresholds are fitted on validation samples for eight budgets, from the cost of the first exit of
`at="auto"` to 80 % of the network's. Accuracy is that of test samples, averaged over the budgets, with a paired
bootstrap interval of the difference. The networks are the ResNet14 of plain.py for Fashion-MNIST and for CIFAR-100
(RUNS/cifar100-plain), and a public ResNet56 for CIFAR-10, of which only test images (a folder per class) are at hand:
3,000 train the heads, 2,000 validate.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cifar_resnet
import numpy as np
import torch
from joint import VAL, plain_network
from results import fill_tables, machine, rounded
from torch import nn

import exitwise as ew
from exitwise import data
from exitwise.core.files import write_json
from exitwise.evaluation.bootstrap import Bootstrap, percentile_interval

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "best_cuts" / "results.json", HERE / "README.md"
HEADER = """\
| network | cuts of equal cost | top-1 % | chosen cuts | top-1 % | gain | gain of the probes |
|---|---|---|---|---|---|---|
"""
TRAIN, EPOCHS = 15_000, 10
Splits = tuple[Any, Any, Any]  # datasets that train heads, validate and test


def networks(arguments: argparse.Namespace) -> Iterator[tuple[str, nn.Module, Splits]]:
    """Names, networks and their samples, as far as their files are given."""
    for name, root in (("fashion-mnist", None), ("cifar100", arguments.cifar100)):
        if name == "cifar100" and root is None:
            continue
        train, test = data.load(name, root)
        splits = data.HoldOut.random(train, VAL, 0).apply(train, test)
        module = plain_network(name, [] if root is None else ["--root", str(root)], arguments.runs)
        yield f"ResNet14, {name}", module, (splits.train[torch.arange(TRAIN)], splits.val, splits.test)
    if arguments.images and arguments.nets:
        images, _ = data.load(f"folder:{arguments.images}", None, 32)  # normalized as the network expects it
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        parts = [images[part.sort().values] for part in order.split([3000, 2000, len(images) - 5000])]
        yield "ResNet56, cifar10", cifar_resnet.load("ResNet56", arguments.nets), tuple(parts)


def loader(part: Any) -> data.Batches:
    return data.Batches(part, 250)


def correct_at(module: nn.Module, at: list[str], splits: Splits, budgets: tuple[float, ...], seed: int) -> Any:
    """Correctness on test samples (budgets, n) of exits attached there, and their mean cost."""
    torch.manual_seed(seed)
    train, val, test = splits
    example = next(iter(loader(val)))[0][:1]
    net = ew.attach(module.eval(), at, example_inputs=example)
    ew.train_heads(net, train, val, epochs=EPOCHS, distill=0.5, seed=seed)
    trace = ew.collect(net, val=loader(val), test=loader(test))
    cal = ew.calibrate(trace, "T_opt")
    assert trace.test is not None
    tuned, preds = cal.predict(trace.val), cal.predict(trace.test)
    labels, rows, costs = trace.test.labels.numpy(), [], []
    for budget in budgets:
        policy = ew.fit_policy(tuned, trace.val.labels, trace.costs, budget=max(budget, trace.costs.values[0]))
        exits = policy.exits(preds)
        rows.append(preds.predicted[exits, np.arange(len(labels))] == labels)
        costs.append(float(np.array(trace.costs.values)[exits].mean()))
    return np.stack(rows), float(np.mean(costs))


def compare(module: nn.Module, splits: Splits, exits: int) -> dict[str, Any]:
    """Both choices of cuts on the same samples."""
    train, val, _ = splits
    example = next(iter(loader(val)))[0][:1]
    cuts = ew.best_cuts(module.eval(), train, val, exits=exits, example_inputs=example)
    print(cuts, flush=True)
    best, best_cost = correct_at(module, list(cuts.names), splits, cuts.budgets, 0)
    equal, equal_cost = correct_at(module, list(cuts.equal_cost), splits, cuts.budgets, 0)
    means = Bootstrap(best.shape[1]).resampled_means((best.mean(0) - equal.mean(0))[:, None])[:, 0]
    return {
        "best": list(cuts.names),
        "equal_cost": list(cuts.equal_cost),
        "simulated": {"best": cuts.top1, "equal_cost": cuts.equal_cost_top1},
        "probes": {each.name: [each.cost, each.top1] for each in cuts.candidates},
        "budgets": list(cuts.budgets),
        "top1": {"best": best.mean(1).tolist(), "equal_cost": equal.mean(1).tolist()},
        "mean_top1": {"best": float(best.mean()), "equal_cost": float(equal.mean())},
        "mean_cost": {"best": best_cost, "equal_cost": equal_cost},
        "gain": float(best.mean() - equal.mean()),
        "gain_interval": list(percentile_interval(means)),
    }


def table(found: dict[str, Any]) -> str:
    """The table of the README."""
    rows = []
    for name, each in found.items():
        equal, best = (f"{', '.join(each[key])} | {100 * each['mean_top1'][key]:.2f}" for key in ("equal_cost", "best"))
        low, high = (100 * end for end in each["gain_interval"])
        simulated = 100 * (each["simulated"]["best"] - each["simulated"]["equal_cost"])
        gain = f"{100 * each['gain']:+.2f} ({low:+.2f} to {high:+.2f})"
        rows.append(f"| {name} | {equal} | {best} | {gain} | {simulated:+.2f} |\n")
    return HEADER + "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--cifar100", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--nets", type=Path)
    parser.add_argument("--exits", type=int, default=4)
    arguments = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text())["networks"] if RESULTS.exists() else {}
    for name, module, splits in networks(arguments):
        if name not in known:
            known[name] = rounded(compare(module, splits, arguments.exits))
            write_json(RESULTS, {"machine": machine(), "exits": arguments.exits, "networks": known})
            PAGE.write_text(fill_tables(PAGE.read_text(), {"best-cuts": table(known)}))
        print(name, known[name]["mean_top1"], known[name]["gain_interval"], flush=True)


if __name__ == "__main__":
    main()
