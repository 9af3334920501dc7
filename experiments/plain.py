"""From a trained plain network to one that stops early: how much compute is saved at the same accuracy.

usage: plain.py RUNS [--cifar100 DIR] [--only NAME]

ResNet14 with its one exit is trained on digits, Fashion-MNIST and CIFAR-100, then cut into four stages; the heads of
the first three are trained alone, and all four are calibrated. The budget is chosen on validation samples: the smallest
whose policy is right at least as often as the plain network. What it costs and gets is measured on test samples, with
the cost of heads, Laplace and ensembling in it. Training goes on where it was interrupted. Results go to
experiments/plain/results.json, with the plain network of Fashion-MNIST beside it, which a test goes on from.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from cifar100 import exitwise, finished
from results import machine, rounded

import exitwise as ew
from exitwise.calibration.methods import OURS, VANILLA
from exitwise.calibration.overhead import cost_table
from exitwise.core.files import write_json
from exitwise.evaluation.bootstrap import Bootstrap, metric_columns, percentile_interval
from exitwise.evaluation.evaluate import PerSampleMetrics
from exitwise.policies.fit import PolicyFitter
from exitwise.runs.run import Run

HERE = Path(__file__).parent
RESULTS = HERE / "plain" / "results.json"
WEIGHTS = HERE / "plain" / "fashion-mnist.safetensors"
METHODS = (VANILLA, "T_opt", OURS)
MODEL, EXITS = "cifar100-resnet14", 4
BUDGETS = 61
TRAINING = {
    "digits": ["--epochs", "20"],
    "fashion-mnist": ["--epochs", "6"],
    "cifar100": ["--recipe", "cifar100-short", "--epochs", "8"],
}
SHAPES = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "cifar100": (3, 32, 32)}


def make(name: str, root: list[str], runs: Path) -> Path:
    """Both runs by the commands of the documentation, leaving out what has been done; the one with exits."""
    plain, early = runs / f"{name}-plain", runs / f"{name}-early"
    same = ["--data", name, *root, "--model", MODEL]
    if not plain.exists():
        exitwise("train", *same, *TRAINING[name], "--out", plain)
    elif not finished(plain):
        exitwise("train", plain, "--resume")
    if not early.exists():
        cut = ["--attach", "auto", "--exits", EXITS]
        exitwise("train-heads", *same, "--weights", plain / "net.safetensors", *cut, "--out", early)
    if not (early / "trace.safetensors").exists():
        exitwise("collect", early)
    return early


def costs_of(net: ew.MultiExitNet, shape: tuple[int, ...]) -> dict[str, ew.Costs]:
    """What leaving at each exit costs, with what each method adds."""
    rows = cost_table(net, shape)
    plain, ours = ew.Costs(tuple(float(row.vanilla) for row in rows)), ew.Costs(tuple(row.ours for row in rows))
    return {VANILLA: plain, "T_opt": plain, OURS: ours}


def matched(cal: ew.Calibration, trace: ew.Trace, costs: ew.Costs, goal: float) -> ew.Policy:
    """For the smallest of many budgets that gets the goal on validation samples; if none does, nobody stops early."""
    val, labels = cal.predict(trace.val), trace.val.labels
    fitter = PolicyFitter(val, labels, costs)
    budgets = np.linspace(costs.values[0], costs.values[-1], BUDGETS)
    policies = (fitter.fit(float(budget), "auto") for budget in budgets)
    good = (each for each in policies if ew.evaluate(val, labels=labels, policy=each, costs=costs).top1 >= goal)
    return next(good, ew.Policy((*(np.inf for _ in costs.values[1:]), -np.inf)))


def measure(
    plain: ew.MultiExitNet, net: ew.MultiExitNet, trace: ew.Trace, shape: tuple[int, ...], loss: float = 0.0
) -> dict[str, Any]:
    """The plain network beside early exits by each method, which may lose so much on validation samples."""
    assert trace.test is not None
    assert net.spec is not None
    whole, costs = float(ew.macs(plain, shape)[-1]), costs_of(net, shape)
    vanilla = ew.calibrate(trace, VANILLA)
    val, test = (PerSampleMetrics.of(vanilla.predict(split), split.labels.numpy()) for split in (trace.val, trace.test))
    goal, end = val.per_exit[-1].top1 - loss, test.per_exit[-1]
    bootstrap = Bootstrap(len(trace.test))
    last = np.full(len(trace.test), trace.num_exits - 1)
    before = bootstrap.resampled_metrics(metric_columns(test, last, np.array(trace.costs.values)))
    rows = {}
    for name, its in costs.items():
        cal = vanilla if name == VANILLA else ew.calibrate(trace, name)
        policy, preds = matched(cal, trace, its, goal), cal.predict(trace.test)
        outcomes, exits = PerSampleMetrics.of(preds, trace.test.labels.numpy()), policy.exits(preds)
        after = bootstrap.resampled_metrics(metric_columns(outcomes, exits, np.array(its.values)))
        row = outcomes.evaluation(exits, its)
        rows[name] = {
            "budget": None if policy.budget is None else policy.budget / whole,
            "cost": row.cost / whole,
            "saved": 1 - row.cost / whole,
            "top1": row.top1,
            "top1_change": row.top1 - end.top1,
            "top1_change_interval": list(percentile_interval(after["top1"] - before["top1"])),
            "nlpd": row.nlpd,
            "ece": row.ece,
            "exit_shares": list(row.exit_shares),
        }
    return {
        "samples": {"validation": len(trace.val), "test": len(trace.test)},
        "macs": whole,
        "cuts": net.spec["attach"]["at"],
        "costs_of_exits": {name: [cost / whole for cost in each.values] for name, each in costs.items()},
        "top1_of_exits": [metrics.top1 for metrics in test.per_exit],
        "goal": goal,
        "plain": {"top1": end.top1, "nlpd": end.nlpd, "ece": end.ece},
        **rows,
    }


def table(found: dict[str, Any]) -> list[str]:
    """Rows for the README."""
    rows = []
    for name, each in found.items():
        top1, nlpd, ece = (each["plain"][metric] for metric in ("top1", "nlpd", "ece"))
        rows.append(f"| {name} | the original network | | {100 * top1:.2f} | | {nlpd:.3f} | {ece:.3f} |")
        for method in METHODS:
            its = each[method]
            low, high = (100 * end for end in its["top1_change_interval"])
            change = f"{100 * its['top1_change']:+.2f} ({low:+.2f} to {high:+.2f})"
            cells = [f"{100 * its['saved']:.0f} %", f"{100 * its['top1']:.2f}", change]
            rows.append(f"| | {method} | {' | '.join(cells)} | {its['nlpd']:.3f} | {its['ece']:.3f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--cifar100", type=Path)
    parser.add_argument("--only", choices=TRAINING)
    arguments = parser.parse_args()
    if arguments.only == "cifar100" and arguments.cifar100 is None:
        parser.error("cifar100 needs --cifar100 DIR")
    RESULTS.parent.mkdir(exist_ok=True)
    for name in [arguments.only] if arguments.only else TRAINING:
        if name == "cifar100" and arguments.cifar100 is None:
            continue
        early = make(name, ["--root", str(arguments.cifar100)] if name == "cifar100" else [], arguments.runs)
        plain = arguments.runs / f"{name}-plain" / "net.safetensors"
        nets = (ew.load_net(file) for file in (plain, early / "net.safetensors"))
        known = json.loads(RESULTS.read_text())["data"] if RESULTS.exists() else {}
        known[name] = rounded(measure(*nets, Run(early).trace(), SHAPES[name]))
        write_json(RESULTS, {"machine": machine(), "model": MODEL, "data": known})
        if name == "fashion-mnist":
            shutil.copyfile(plain, WEIGHTS)


if __name__ == "__main__":
    main()
