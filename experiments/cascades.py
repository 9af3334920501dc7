"""Cascades of public networks on CIFAR-10: what a small network in front of a large one saves.

usage: cascades.py --images DIR --nets DIR --cache DIR [--splits 10]

DIR of --images has a folder of PNG files per class (10,000 test images of CIFAR-10), DIR of --nets the weights of two
public ResNets. Every network runs once over all images; its trace is kept in --cache. Each of ten splits has 5,000
images for calibration and thresholds, and 5,000 to test. Rows are in experiments/cascades/results.csv after every
split, and the table of docs/guides/cascades.md at the end; a second call continues there. One thread.
"""

import argparse
import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from cifar_resnet import MEAN, STD, load
from results import fill_tables

import exitwise as ew
from exitwise.calibration.chain import chain_traces
from exitwise.calibration.tuning import Tuner

HERE = Path(__file__).parent
RESULTS = HERE / "cascades" / "results.csv"
PAGE = HERE.parent / "docs" / "guides" / "cascades.md"
FIELDS = ("split", "chain", "method", "budget", "cost", "top1", "nlpd", "ece", "exit_shares")
REFERENCE = "ResNet56"  # costs are shares of it
NETWORKS = {  # name: weights, and size of the images
    "ResNet20": ("ResNet20", 32),
    "ResNet56": ("ResNet56", 32),
    "ResNet20 at 24": ("ResNet20", 24),
    "ResNet56 at 24": ("ResNet56", 24),
}
CHAINS = (
    ("ResNet20", "ResNet56"),
    ("ResNet20 at 24", "ResNet20", "ResNet56"),
    ("ResNet20", "ResNet56 at 24", "ResNet56"),
    ("ResNet56 at 24", "ResNet56"),
    ("ResNet20 at 24", "ResNet20"),
)
METHODS = ("MSDNet (vanilla)", "T_opt", "MIE T_opt", "PoE T_opt", "Pool", "auto")
BUDGETS = (0.42, 0.45, 0.52, 0.62, 0.8)
SHOWN = (  # rows of the page: networks, method and budget
    ("ResNet56", "MSDNet (vanilla)", 1.0),
    ("ResNet56", "T_opt", 1.0),
    ("ResNet20 > ResNet56", "MSDNet (vanilla)", 0.42),
    ("ResNet20 > ResNet56", "T_opt", 0.42),
    ("ResNet20 > ResNet56", "auto", 0.42),
    ("ResNet20 > ResNet56", "auto", 0.45),
    ("ResNet20 > ResNet56", "auto", 0.52),
    ("ResNet20 at 24 > ResNet20 > ResNet56", "auto", 0.45),
    ("ResNet20 at 24 > ResNet20 > ResNet56", "auto", 0.52),
    ("ResNet20 > ResNet56 at 24 > ResNet56", "auto", 0.45),
    ("ResNet20 > ResNet56 at 24 > ResNet56", "auto", 0.52),
    ("ResNet56 at 24 > ResNet56", "auto", 0.8),
    ("ResNet20 at 24 > ResNet20", "auto", 0.42),
)


def collect(name: str, images: Path, nets: Path, cache: Path) -> ew.Trace:
    """Return the trace of one network on all images, from the cache or computed now."""
    file = cache / f"{name.replace(' ', '-')}.safetensors"
    if file.is_file():
        return ew.Trace.load(file)
    weights, size = NETWORKS[name]
    net = ew.cascade(
        [(load(weights, nets), ew.Preprocessing(size, MEAN, STD))], preprocessing=ew.Preprocessing(32, MEAN, STD)
    )
    dataset, _ = ew.data.load(f"folder:{images}", None, 32)
    print(f"{name}: {len(dataset)} images", flush=True)
    trace = ew.collect(net, val=ew.data.Batches(dataset, 100), classes=dataset.classes)
    cache.mkdir(parents=True, exist_ok=True)
    trace.save(file)
    return trace


def split_trace(trace: ew.Trace, seed: int) -> ew.Trace:
    """Return the trace with half of its samples, drawn with a seed, for validation and the others for testing."""
    order = torch.randperm(len(trace.val), generator=torch.Generator().manual_seed(seed))
    half = len(order) // 2
    return replace(
        trace, val=trace.val.take(order[:half].sort().values), test=trace.val.take(order[half:].sort().values)
    )


def rows_of(split: int, names: tuple[str, ...], trace: ew.Trace, reference: float) -> list[dict[str, Any]]:
    """Return the rows of one chain on one split: every method at every budget that the chain can meet."""
    tuner, rows = Tuner(trace), []
    for method in METHODS if len(names) > 1 else METHODS[:2]:
        calibration = tuner.calibrate(method)
        val, test = calibration.predict(trace.val), calibration.predict(trace.test)
        low, high = trace.costs.values[0], trace.costs.values[-1]
        shares = (
            [share for share in BUDGETS if low < share * reference < high] if len(names) > 1 else [high / reference]
        )
        for share in shares:
            policy = ew.fit_policy(val, labels=trace.val.labels, costs=trace.costs, budget=share * reference)
            result = ew.evaluate(test, labels=trace.test.labels, policy=policy, costs=trace.costs)
            rows.append(
                {
                    "split": split,
                    "chain": " > ".join(names),
                    "method": method,
                    "budget": f"{share:.4f}",
                    "cost": f"{result.cost / reference:.4f}",
                    "top1": f"{100 * result.top1:.2f}",
                    "nlpd": f"{result.nlpd:.4f}",
                    "ece": f"{result.ece:.4f}",
                    "exit_shares": " ".join(f"{exit_share:.4f}" for exit_share in result.exit_shares),
                }
            )
    return rows


def read_rows() -> list[dict[str, str]]:
    """Return the rows that there are; an incomplete last line is left out."""
    if not RESULTS.is_file():
        return []
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row.get(field) for field in FIELDS)]


def write_rows(rows: list[dict[str, Any]]) -> None:
    """Replace the file of results."""
    RESULTS.parent.mkdir(exist_ok=True)
    temporary = RESULTS.with_suffix(".new")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(RESULTS)


def table(rows: list[dict[str, str]]) -> str:
    """Return the means over splits of the shown rows as a Markdown table."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        groups[row["chain"], row["method"], row["budget"]].append(row)
    lines = ["| networks | calibration | MACs | top-1 % | NLPD | ECE |", "|---|---|---|---|---|---|"]
    for chain, method, budget in SHOWN:
        group = groups[chain, method, f"{budget:.4f}"]
        values = {field: mean(float(row[field]) for row in group) for field in ("cost", "top1", "nlpd", "ece")}
        label = {"MSDNet (vanilla)": "none", "T_opt": "temperature"}.get(method, method)
        numbers = (f"{values[field]:.3f}".removeprefix("0") for field in ("nlpd", "ece"))
        cost = "100 %" if values["cost"] == 1 else f"{100 * values['cost']:.1f} %"
        lines.append(f"| {chain} | {label} | {cost} | {values['top1']:.2f} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with its table as the results have it now."""
    return fill_tables(page, {"cascades": table(read_rows())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("images", "nets", "cache"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    traces = {name: collect(name, options.images, options.nets, options.cache) for name in NETWORKS}
    reference = traces[REFERENCE].costs.values[-1]
    rows: list[dict[str, Any]] = list(read_rows())
    done = {(row["split"], row["chain"]) for row in rows}
    for split in range(options.splits):
        for names in [*((name,) for name in NETWORKS), *CHAINS]:
            if (str(split), " > ".join(names)) not in done:
                trace = split_trace(chain_traces([traces[name] for name in names]), split)
                rows += rows_of(split, names, trace, reference)
        write_rows(rows)
        print(f"split {split + 1} of {options.splits}", flush=True)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
