"""Exits on a trained network: heads alone on a frozen body, with adapters, or trained together with all layers.

usage: joint.py RUNS [--cifar100 DIR] [--only NAME] [--epochs N] [--variants A,B]

The networks are a ResNet14 with one exit for each dataset, trained by the commands of plain.py: for Fashion-MNIST that
in plain/, for CIFAR-100 that in joint/, with its history; without it, RUNS/cifar100-plain is trained. Every variant has
an epoch of its heads alone (three of a third of the images) and then N more. `continued` is the original network,
trained for N more epochs without exits: what the epochs alone bring.

The budget is chosen on validation samples: the smallest whose policy is right at least as often as the original network
or as the continued one, with the cost of heads and pools in it. Intervals are over resamples of validation samples,
which choose the budget again, and of test samples. Trainings go on where they were interrupted; results go to
experiments/joint/results.json, and their table to the README.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain as plain_networks
import torch
from cifar100 import exitwise, finished
from plain import BUDGETS, MODEL, SHAPES, TRAINING
from results import fill_tables, machine, rounded

import exitwise as ew
from exitwise import data
from exitwise.calibration.methods import VANILLA
from exitwise.calibration.overhead import cost_table
from exitwise.calibration.trace import Split
from exitwise.core.files import write_json
from exitwise.core.predictions import Array
from exitwise.evaluation.bootstrap import Bootstrap, percentile_interval
from exitwise.policies.fit import PolicyFitter
from exitwise.training.machine import can_compile, has_bf16_instructions

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "joint" / "results.json", HERE / "README.md"
HEADER = """\
| data | variant | epochs | test top-1 % by exit | saved | change | saved, against continued | change |
|---|---|---|---|---|---|---|---|
"""
EXITS, HEAD_EPOCHS, VAL = 4, 3, 5000
HEAD_SAMPLES = 15_000
AUGMENTATION = {"fashion-mnist": "fashion-mnist", "cifar100": "cifar100-short"}  # recipe that has it
METHODS, SHOWN = ("T_opt", "Pool"), "Pool"
REFERENCES = ("original", "continued")

Train = Callable[[ew.MultiExitNet, data.Splits[Any], ew.Recipe, Path], None]


def train_frozen(net: ew.MultiExitNet, splits: data.Splits[Any], recipe: ew.Recipe, folder: Path) -> None:
    """Only the heads."""
    ew.train_heads(net, splits.train, splits.val, epochs=1 + recipe.epochs, distill=recipe.distill)


def train_joint(net: ew.MultiExitNet, splits: data.Splits[Any], recipe: ew.Recipe, folder: Path) -> None:
    """The heads alone, then all parameters that are not frozen."""
    resume = any((folder / "checkpoints").glob("*.safetensors"))
    heads = folder / "heads.safetensors"
    if not resume and len(net.exits) > 1:
        if not heads.exists():
            few = splits.train[torch.arange(HEAD_SAMPLES)]
            ew.train_heads(net, few, splits.val, epochs=HEAD_EPOCHS, distill=recipe.distill)
            ew.save_checkpoint(net, heads)
        ew.load_checkpoint(net, heads)
    machine = ew.Machine(precision="bf16-mixed" if has_bf16_instructions() else "32-true")
    ew.train(
        net, splits.train, splits.val, recipe=recipe, out=folder, resume=resume, machine=machine, compile=can_compile()
    )


def train_norms(net: ew.MultiExitNet, splits: data.Splits[Any], recipe: ew.Recipe, folder: Path) -> None:
    """The heads, and the scales and shifts of BatchNorm."""
    for part in net.stages.modules():
        if not isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            for parameter in part.parameters(recurse=False):
                parameter.requires_grad_(False)
    train_joint(net, splits, replace(recipe, backbone_lr=1.0), folder)


VARIANTS: dict[str, tuple[str, Train]] = {  # head, training
    "continued": ("", train_joint),
    "frozen": ("mlp", train_frozen),
    "frozen, grid heads": ("grid", train_frozen),
    "frozen, conv heads": ("conv", train_frozen),
    "BatchNorm": ("mlp", train_norms),
    "joint": ("mlp", train_joint),
    "joint, grid heads": ("grid", train_joint),
    "joint, conv heads": ("conv", train_joint),
}


def plain_network(name: str, root: list[str], runs: Path) -> ew.MultiExitNet:
    """The network with one exit, trained if it is not there."""
    stored = plain_networks.WEIGHTS if name == "fashion-mnist" else RESULTS.parent / f"{name}-plain.safetensors"
    if stored.exists():
        return ew.load_net(stored)
    run = runs / f"{name}-plain"
    if not run.exists():
        exitwise("train", "--data", name, *root, "--model", MODEL, *TRAINING[name], "--out", run)
    elif not finished(run):
        exitwise("train", run, "--resume")
    return ew.load_net(run / "net.safetensors")


def trace_of(net: ew.MultiExitNet, splits: data.Splits[Any], file: Path) -> ew.Trace:
    """The trace in a file, collected if it is not there."""
    if not file.exists():
        val, test = (data.Batches(part, 250) for part in (splits.val, splits.test))
        ew.collect(net.eval(), val=val, test=test).save(file)
    return ew.Trace.load(file)


def right(cal: ew.Calibration, split: Split) -> Array:
    """Whether each exit is right for each sample, (K, n)."""
    return np.asarray(cal.predict(split).predicted == split.labels.numpy())


def candidates(cal: ew.Calibration, trace: ew.Trace, costs: ew.Costs) -> list[ew.Policy]:
    """Policies of rising budgets; the last one is not to stop early."""
    fitter = PolicyFitter(cal.predict(trace.val), trace.val.labels, costs)
    budgets = np.linspace(costs.values[0], costs.values[-1], BUDGETS)
    never = ew.Policy((*(np.inf for _ in costs.values[1:]), -np.inf))
    return [*(fitter.fit(float(budget), "auto") for budget in budgets), never]


def outcomes(policies: list[ew.Policy], preds: Any, correct: Array, costs: Array) -> tuple[Array, Array]:
    """Cost of each sample, and whether its answer is right, by each of m policies: both (n, m)."""
    exits = np.stack([policy.exits(preds) for policy in policies], axis=1)
    return costs[exits], correct[exits, np.arange(len(exits))[:, None]]


def reaches(top1: Array, goal: Array) -> Array:
    """The first of the policies (..., m) whose accuracy reaches the goal; else the last, which never stops early."""
    good = top1 >= goal
    good[..., -1] = True
    return np.asarray(good.argmax(-1))


def measure(
    net: ew.MultiExitNet, trace: ew.Trace, references: dict[str, ew.Trace], whole: float, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Early exits at the accuracy of each network with one exit, which has the same samples."""
    assert trace.test is not None
    vanilla = ew.calibrate(trace, VANILLA)
    alone = {}
    for name, reference in references.items():
        assert reference.test is not None
        its = ew.calibrate(reference, VANILLA)
        alone[name] = tuple(right(its, split)[-1] for split in (reference.val, reference.test))
    resample_val, resample_test = (
        Bootstrap(len(split), seed=seed).resampled_means for seed, split in enumerate((trace.val, trace.test))
    )
    rows: dict[str, Any] = {}
    for method in METHODS:
        cal = ew.calibrate(trace, method)
        overhead = [row.pool if method == "Pool" else row.vanilla for row in cost_table(net, shape)]
        costs = ew.Costs(tuple(map(float, overhead)))
        policies = candidates(cal, trace, costs)
        relative = np.array(costs.values) / whole
        (_, val), (cost, test) = (
            outcomes(policies, cal.predict(split), right(cal, split), relative) for split in (trace.val, trace.test)
        )
        rows[method] = {}
        for name, (val_alone, test_alone) in alone.items():
            chosen = int(reaches(val.mean(0), val_alone.mean()))
            resampled = resample_val(np.column_stack([val, val_alone]))
            choices = reaches(resampled[:, :-1], resampled[:, -1:])
            resampled, draws = resample_test(np.column_stack([cost, test, test_alone])), np.arange(len(choices))
            saved, top1 = 1 - resampled[draws, choices], resampled[draws, len(policies) + choices]
            exits = policies[chosen].exits(cal.predict(trace.test))
            rows[method][name] = {
                "saved": float(1 - cost[:, chosen].mean()),
                "saved_interval": list(percentile_interval(saved)),
                "top1": float(test[:, chosen].mean()),
                "top1_change": float(test[:, chosen].mean() - test_alone.mean()),
                "top1_change_interval": list(percentile_interval(top1 - resampled[:, -1])),
                "exit_shares": (np.bincount(exits, minlength=len(relative)) / len(exits)).tolist(),
            }
    return {
        "top1_of_references": {name: float(test.mean()) for name, (_, test) in alone.items()},
        "goals": {name: float(val.mean()) for name, (val, _) in alone.items()},
        "costs_of_exits": [cost / whole for cost in trace.costs.values],
        "top1_of_exits": right(vanilla, trace.test).mean(1).tolist(),
        **rows,
    }


def run_variant(
    variant: str, name: str, module: ew.MultiExitNet, splits: data.Splits[Any], epochs: int, folder: Path
) -> tuple[ew.MultiExitNet, ew.Trace]:
    """The trained net of a variant, and its trace."""
    head, train = VARIANTS[variant]
    torch.manual_seed(0)
    example = torch.rand(1, *splits.train.shape)
    net = ew.attach(module.eval(), "auto", head=head, exits=EXITS, example_inputs=example) if head else module
    weights = folder / "weights.safetensors"
    if not weights.exists():
        augmentation = ew.RECIPES[AUGMENTATION[name]].augmentation
        recipe = replace(ew.RECIPES["joint"].scaled(epochs), augmentation=augmentation)
        train(net, splits, recipe, folder)
        ew.save_checkpoint(net, weights)
    ew.load_checkpoint(net, weights)
    return net, trace_of(net, splits, folder / "trace.safetensors")


def table(found: dict[str, Any]) -> str:
    """Table for the README."""
    rows = []
    for name, variants in found.items():
        for variant in (each for each in VARIANTS if each in variants):
            row = variants[variant]
            cells = [" / ".join(f"{100 * top1:.1f}" for top1 in row["top1_of_exits"])]
            for reference in REFERENCES:
                its = row[SHOWN].get(reference)
                if its is None or variant == "continued":
                    cells += ["", f"{100 * its['top1_change']:+.2f}" if its and reference == "original" else ""]
                    continue
                low, high = (100 * end for end in its["saved_interval"])
                change, *ends = (100 * value for value in (its["top1_change"], *its["top1_change_interval"]))
                cells += [
                    f"{100 * its['saved']:.0f} % ({low:.0f} to {high:.0f})",
                    f"{change:+.2f} ({ends[0]:+.2f} to {ends[1]:+.2f})",
                ]
            rows.append(f"| {name} | {variant} | {row['epochs']} | {' | '.join(cells)} |")
    return HEADER + "\n".join(rows)


def known_results() -> dict[str, Any]:
    """Results of former runs."""
    known: dict[str, Any] = json.loads(RESULTS.read_text())["data"] if RESULTS.exists() else {}
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--cifar100", type=Path)
    parser.add_argument("--only", choices=AUGMENTATION)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="names, separated by semicolons")
    arguments = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    for name in [arguments.only] if arguments.only else AUGMENTATION:
        if name == "cifar100" and arguments.cifar100 is None:
            continue
        root = ["--root", str(arguments.cifar100)] if name == "cifar100" else []
        train, test = data.load(name, arguments.cifar100 if root else None)
        splits = data.HoldOut.random(train, VAL, 0).apply(train, test)
        plain = plain_network(name, root, arguments.runs)
        folder = arguments.runs / "joint" / name
        folder.mkdir(parents=True, exist_ok=True)
        whole, known = float(ew.macs(plain, SHAPES[name])[-1]), known_results()
        references = {"original": trace_of(plain, splits, folder / "original.safetensors")}
        for variant in arguments.variants.split(";"):
            place = folder / variant.replace(", ", "-").replace(" ", "-")
            place.mkdir(exist_ok=True)
            module = plain_network(name, root, arguments.runs)
            net, trace = run_variant(variant, name, module, splits, arguments.epochs, place)
            if (continued := folder / "continued" / "trace.safetensors").exists():
                references["continued"] = ew.Trace.load(continued)
            row = {"epochs": arguments.epochs, **measure(net, trace, references, whole, SHAPES[name])}
            known.setdefault(name, {})[variant] = rounded(row)
            write_json(RESULTS, {"machine": machine(), "model": MODEL, "data": known})
            PAGE.write_text(fill_tables(PAGE.read_text(), {"joint": table(known)}))
            print(table({name: {variant: row}}).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
