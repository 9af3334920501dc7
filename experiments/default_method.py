"""The default, `method="auto"`, beside the net without calibration, temperatures and the paper's method on five nets.

usage: default_method.py RUNS [--images DIR --nets DIR]

RUNS is the folder of plain.py: ResNet14 with exits attached, on digits, Fashion-MNIST and CIFAR-100; datasets that are
not there are left out. --images and --nets, as for cascades.py, add a public ResNet56 with three exits attached to its
frozen layers. Its heads are trained on 3,000 test images of CIFAR-10, since there are no others here; 3,500 calibrate
and 3,500 test. Everything is at equal cost, as `ew.rivals` compares, over all costs from the first exit to the last.
Results go to experiments/default_method/results.json, and its table into docs/comparison.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from results import fill_tables, machine, rounded

import exitwise as ew
from exitwise.calibration.methods import AUTO, OURS, VANILLA
from exitwise.core.files import write_json

RESULTS = Path(__file__).parent / "default_method" / "results.json"
PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
METHODS = (VANILLA, "temperature", OURS, AUTO, "learned score")
PLAIN = {"digits": "digits", "fashion-mnist": "Fashion-MNIST", "cifar100": "CIFAR-100"}
SHARES = (0.42, 0.52, 0.62, 0.8)  # budgets, of the last exit's cost
HEADS, VALIDATION = 3000, 3500  # images of CIFAR-10 for heads and for calibration; the others test


def attach_resnet56(images: Path, nets: Path, file: Path) -> ew.Trace:
    """The trace of ResNet56 with three exits attached, from a file or computed now."""
    if file.is_file():
        return ew.Trace.load(file)
    from cifar_resnet import load

    net = ew.attach(load("ResNet56", nets), "auto", exits=4, example_inputs=torch.zeros(1, 3, 32, 32))
    dataset, _ = ew.data.load(f"folder:{images}", None, 32)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    parts = order.split([HEADS, VALIDATION, len(order) - HEADS - VALIDATION])
    train, val, test = (dataset[part.sort().values] for part in parts)
    ew.train_heads(net, train, val)
    batches = (ew.data.Batches(part, 100) for part in (train, val, test))
    trace = ew.collect(net, *batches, classes=dataset.classes)
    file.parent.mkdir(parents=True, exist_ok=True)
    trace.save(file)
    return trace


def find_traces(runs: Path, images: Path | None, nets: Path | None) -> dict[str, ew.Trace]:
    """Every trace that is there, by its name in the table."""
    traces = {"CIFAR-100, the shipped MSDNet": ew.Trace.load(ew.zoo.path("trace.safetensors"))}
    for name, label in PLAIN.items():
        file = runs / f"{name}-early" / "trace.safetensors"
        if file.is_file():
            traces[f"{label}, ResNet14 with exits attached"] = ew.Trace.load(file)
    if images is not None and nets is not None:
        traces["CIFAR-10, ResNet56 with exits attached"] = attach_resnet56(images, nets, runs / "resnet56.safetensors")
    return traces


def measure(trace: ew.Trace) -> dict[str, Any]:
    """Means over budgets, and the differences to `auto` with paired intervals."""
    chosen = ew.calibrate(trace)
    found = ew.rivals(trace, only=METHODS, reference=AUTO)
    assert trace.test is not None
    lowest = trace.costs.values[0] / trace.costs.values[-1]
    return {
        "samples": {"val": len(trace.val), "test": len(trace.test)},
        "exits": [round(metrics.top1, 4) for metrics in last_metrics(trace)],
        "chosen": chosen.method.name,
        "budgets": [measure_budget(trace, chosen, share) for share in SHARES if share > lowest],
        "rows": {
            row.name: {
                "top1": row.top1,
                "nlpd": row.nlpd,
                "ece": row.ece,
                "eefp": row.eefp,
                "difference": row.difference,
                "intervals": row.intervals,
            }
            for row in found
        },
    }


def measure_budget(trace: ew.Trace, cal: ew.Calibration, share: float) -> dict[str, Any]:
    """Top-1 at a budget, as a share of the last exit's cost."""
    budget = share * trace.costs.values[-1]
    policy = ew.fit_policy(cal.predict(trace.val), trace.val.labels, trace.costs, budget=budget, score="auto")
    assert trace.test is not None
    result = ew.evaluate(cal.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
    return {"budget": share, "cost": result.cost / trace.costs.values[-1], "top1": result.top1, "score": policy.score}


def last_metrics(trace: ew.Trace) -> tuple[Any, ...]:
    """Metrics of every exit of the net without calibration, on the test split."""
    preds = ew.calibrate(trace, VANILLA).predict(trace.test)
    policy = ew.Policy((*(float("inf") for _ in trace.costs.values[1:]), float("-inf")))
    return tuple(ew.evaluate(preds, labels=trace.test.labels, policy=policy, costs=trace.costs).per_exit)


def is_harmed(row: dict[str, Any]) -> list[str]:
    """Metrics in which another method is better than `auto` beyond its interval."""
    signs = {"top1": 1, "nlpd": -1, "ece": -1}
    ends = {name: row["intervals"].get(name) for name in signs}
    return [name for name, end in ends.items() if end and min(signs[name] * value for value in end) > 0]


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    rows = ["| net | method | top-1 | NLPD | ECE | EEFP |", "|---|---|---|---|---|---|"]
    for name, found in results["traces"].items():
        for i, (method, row) in enumerate(found["rows"].items()):
            label = {AUTO: f"auto ({found['chosen']})", "learned score": "auto, learned score"}.get(method, method)
            cells = [f"{100 * row['top1']:.2f}", *(f"{row[key]:.3f}" for key in ("nlpd", "ece", "eefp"))]
            rows.append(f"| {name if not i else ''} | {label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def filled(page: str) -> str:
    """The page with its table as the results have it now."""
    return fill_tables(page, {"default method": table(json.loads(RESULTS.read_text(encoding="utf-8")))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--nets", type=Path)
    parser.add_argument("--fill", action="store_true", help="only fill in the results that are there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.fill:
        found = {name: measure(trace) for name, trace in find_traces(given.runs, given.images, given.nets).items()}
        RESULTS.parent.mkdir(exist_ok=True)
        write_json(RESULTS, rounded({"machine": machine(), "traces": found}))
        for name, each in found.items():
            for method, row in each["rows"].items():
                print(name, method, "better than auto in", is_harmed(row) or "nothing")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
