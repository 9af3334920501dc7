"""Every way to turn a budget into thresholds, on the shipped CIFAR-100 net: what is gained, and what is not.

usage: policies.py [--draws 1000]

Twenty budgets over the whole range of costs; thresholds from 5,000 validation samples, everything else from 10,000 test
samples (`exitwise policies` makes the same rows for any run). Results go to experiments/policies/results.json, and
`tables()` makes the tables of docs/policies.md from it. Minutes; no data set is needed.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import machine, rounded

import exitwise as ew
from exitwise import zoo
from exitwise.calibration.methods import METHODS, OURS, VANILLA, get_method
from exitwise.core.costs import evenly_spaced_budgets
from exitwise.core.files import write_json
from exitwise.policies.scores import SCORES
from exitwise.runs.compare import Comparison, PolicyRow
from exitwise.runs.run import Run

HERE = Path(__file__).parent
RESULTS = HERE / "policies" / "results.json"
NUMBER = 20
STRATEGIES = ("public", "geometric", "optimized", "label_free", "auto", "certified")
POE = "PoE Laplace T_opt sigma_opt"


def a_run(folder: Path) -> Run:
    """The zoo's net as a run."""
    for name in ("run.json", "net.safetensors", "trace.safetensors", "split.safetensors"):
        (folder / name).write_bytes(zoo.path(name).read_bytes())
    return Run(folder)


def summary(rows: Iterable[PolicyRow]) -> dict[str, Any]:
    """Of one strategy's rows over all budgets."""
    found = list(rows)
    gains = [row.gain for row in found if row.gain is not None]
    ends = [row.intervals["gain"] for row in found if row.gain is not None]
    over = [row.test_cost / row.budget - 1 for row in found]
    return {
        "budgets": len(found),
        "val_cost": float(np.mean([row.val_cost / row.budget for row in found])),
        "test_cost": float(np.mean([row.test_cost / row.budget for row in found])),
        "worst_overrun": max(over),
        "overruns": int(sum(each > 0 for each in over)),
        "top1": float(np.mean([row.top1 for row in found])),
        "nlpd": float(np.mean([row.nlpd for row in found])),
        "ece": float(np.mean([row.ece for row in found])),
        "compared": len(gains),
        "gain": float(np.mean(gains)) if gains else None,
        "gain_range": [min(gains), max(gains)] if gains else None,
        "better": int(sum(low > 0 for low, _ in ends)) if gains else None,
        "worse": int(sum(high < 0 for _, high in ends)) if gains else None,
    }


def reach(trace: ew.Trace, calibration: ew.Calibration) -> dict[str, float]:
    """Share of the range of costs that the 39 policies of the paper's sweep leave out on validation data."""
    low, high = trace.costs.values[0], trace.costs.values[-1]
    costs = sorted(policy.cost or 0.0 for policy in ew.sweep(calibration.predict(trace.val), costs=trace.costs))
    gaps = np.diff([low, *costs, high]) / (high - low)
    return {"from": (costs[0] - low) / (high - low), "to": (costs[-1] - low) / (high - low), "widest_gap": gaps.max()}


def by_strategy(run: Run, methods: list[str], scores: tuple[str, ...], draws: int) -> dict[str, Any]:
    trace = run.trace()
    asked = Comparison(
        tuple(evenly_spaced_budgets(trace.costs, NUMBER)),
        tuple(get_method(name) for name in methods),
        scores,
        repeats=draws,
    )
    table = asked.run(run, trace, trace.costs)
    found: dict[str, Any] = {}
    for method, score in dict.fromkeys((row.method, row.score) for row in table):
        of_both = [row for row in table if (row.method, row.score) == (method, score)]
        name = method if score == "confidence" else f"{method}, by {score}"
        found[name] = {each: summary(row for row in of_both if row.strategy == each) for each in STRATEGIES}
    return found


def main(draws: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = a_run(Path(folder))
        results = {
            "command": "python experiments/policies.py",
            "machine": machine(),
            "settings": {"budgets": NUMBER, "bootstrap": draws, "val": 5000, "test": 10_000, "certificate": 0.05},
            "methods": by_strategy(run, [*METHODS, POE], ("confidence",), draws),
            "scores": by_strategy(run, [OURS], tuple(SCORES), draws),
            "reach": {name: reach(run.trace(), ew.calibrate(run.trace(), name)) for name in (VANILLA, OURS)},
        }
    write_json(RESULTS, rounded(results))


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown, by name."""
    words = {"public": "paper's sweep", "label_free": "label-free"}

    def strategies(method: str) -> list[str]:
        lines = []
        for name, row in results["methods"][method].items():
            gain = "" if row["gain"] is None else f"{100 * row['gain']:+.2f}"
            spread = "" if row["gain"] is None else "{:+.2f} to {:+.2f}".format(*(100 * g for g in row["gain_range"]))
            counts = "" if row["gain"] is None else f"{row['better']} / {row['worse']} of {row['compared']}"
            cells = [
                f"{100 * row['val_cost']:.1f} %",
                f"{100 * row['test_cost']:.1f} %",
                f"{row['overruns']}",
                f"{100 * row['top1']:.2f}",
                f"{row['nlpd']:.3f}",
                f"{row['ece']:.3f}",
                gain,
                spread,
                counts,
            ]
            lines.append(f"| {words.get(name, name)} | {' | '.join(cells)} |")
        return lines

    head = (
        "| {} | cost, val | cost, test | overruns | top-1 | NLPD | ECE | vs sweep | range | better / worse |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    free = ["| method | ECE | optimized | label-free | difference |", "|---|---|---|---|---|"]
    for method, rows in results["methods"].items():
        one, other = rows["optimized"]["top1"], rows["label_free"]["top1"]
        cells = (
            f"{rows['public']['ece']:.3f}",
            f"{100 * one:.2f}",
            f"{100 * other:.2f}",
            f"{100 * (other - one):+.2f}",
        )
        free.append(f"| {method} | {' | '.join(cells)} |")
    rules = ["| score | geometric | auto | NLPD (auto) | cost, test (auto) |", "|---|---|---|---|---|"]
    for name, rows in results["scores"].items():
        score = name.partition(", by ")[2] or "confidence"
        auto = rows["auto"]
        cells = (
            f"{100 * rows['geometric']['top1']:.2f}",
            f"{100 * auto['top1']:.2f}",
            f"{auto['nlpd']:.3f}",
            f"{100 * auto['test_cost']:.1f} %",
        )
        rules.append(f"| {score} | {' | '.join(cells)} |")
    return {
        "vanilla": "\n".join([head.format("vanilla"), *strategies(VANILLA)]),
        "ours": "\n".join([head.format("the full method"), *strategies(OURS)]),
        "label_free": "\n".join(free),
        "scores": "\n".join(rules),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--tables", action="store_true", help="print the tables of results that are there")
    arguments = parser.parse_args()
    if not arguments.tables:
        main(arguments.draws)
    for table in tables(json.loads(RESULTS.read_text())).values():
        print(table, end="\n\n")
