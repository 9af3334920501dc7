"""Which method to use with few labels: five random splits of the shipped trace, and 250 to 5,000 validation samples.

usage: splits.py [--seeds 5]

The 5,000 validation and 10,000 test samples of the trace are pooled and split anew for every seed; a smaller validation
split is the beginning of a larger one. Each method is calibrated and its thresholds are fitted on the validation split,
once with confidence and once with the learned score. Metrics are means over the paper's budgets on the 10,000 test
samples. Rows go to experiments/splits/results.csv; rows that it has are not computed again. Half an hour with one
thread; no dataset is needed. `--plot` only draws docs/figures/few-labels.png and prints the table.
"""

import argparse
import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import exitwise as ew
from exitwise.calibration.methods import AUTO, OURS, VANILLA
from exitwise.calibration.trace import Split
from exitwise.calibration.tuning import Tuner
from exitwise.policies.score_choice import fit_score
from exitwise.policies.scores import exit_scores
from exitwise.rival_methods.contenders import POE, POOL, POOL_W_OPT, Contender
from exitwise.rival_methods.table import measure

HERE = Path(__file__).parent
RESULTS = HERE / "splits" / "results.csv"
FIGURE = HERE.parent / "docs" / "figures" / "few-labels.png"
SIZES = (250, 500, 1000, 2500, 5000)
METHODS = (VANILLA, "T_opt", OURS, POE, POOL, POOL_W_OPT, AUTO)
SCORES = ("confidence", "learned")
METRICS = ("top1", "nlpd", "ece", "eefp")
COLUMNS = ("seed", "size", "method", "score", "chosen", *METRICS, "seconds")


def pooled(trace: ew.Trace) -> Split:
    """All samples of the trace."""
    features = tuple(torch.cat(pair) for pair in zip(trace.val.features, trace.test.features, strict=True))
    return Split(features, torch.cat([trace.val.labels, trace.test.labels]))


def resplit(trace: ew.Trace, seed: int, size: int) -> ew.Trace:
    """The trace with `size` validation samples and 10,000 test samples, drawn by a seed."""
    samples = pooled(trace)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(samples)))
    most = len(trace.val)
    return replace(trace, val=samples.take(order[:size]), test=samples.take(order[most:]))


def rows_of(trace: ew.Trace, method: str, tuner: Tuner) -> list[dict[str, Any]]:
    """One row per score."""
    start = perf_counter()
    calibration = tuner.calibrate(method)
    seconds = perf_counter() - start
    val, test = calibration.predict(trace.val), calibration.predict(trace.test)
    found = []
    for score in SCORES:
        start = perf_counter()
        fitted = fit_score(val, trace.val.labels.numpy(), trace.costs, score)
        took = seconds + perf_counter() - start
        contender = Contender(test, fitted.scores, exit_scores(test, fitted.name, fitted.model), took, 0)
        labels, costs = trace.test.labels.numpy(), np.asarray(trace.costs.values)
        values = measure(contender, labels, costs, trace.budget_range).values
        numbers = {name: f"{values[name]:.6g}" for name in METRICS}
        found.append({"method": method, "score": score, "chosen": calibration.method.name, **numbers})
        found[-1]["seconds"] = f"{took:.3g}"
    return found


def read() -> list[dict[str, str]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[dict[str, Any]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    unfinished = RESULTS.with_suffix(".part")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(RESULTS)


def main(seeds: int) -> None:
    torch.set_num_threads(1)
    shipped = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    rows: list[dict[str, Any]] = [*read()]
    done = {(row["seed"], row["size"], row["method"]) for row in rows}
    for seed in range(seeds):
        for size in SIZES:
            missing = [method for method in METHODS if (str(seed), str(size), method) not in done]
            if not missing:
                continue
            trace = resplit(shipped, seed, size)
            for method in missing:
                # A tuner for each, so that none finds the tables of another and the times can be compared.
                rows += [{"seed": seed, "size": size, **row} for row in rows_of(trace, method, Tuner(trace))]
            write(rows)
            print(f"seed {seed}, {size} samples", flush=True)


def means(rows: list[dict[str, str]]) -> dict[tuple[str, str, int], dict[str, tuple[float, float]]]:
    """Mean and standard deviation over the splits, by method, score and size."""
    groups: dict[tuple[str, str, int], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        groups[row["method"], row["score"], int(row["size"])].append(row)
    result = {}
    for key, group in groups.items():
        columns = {name: np.array([float(row[name]) for row in group]) for name in METRICS}
        result[key] = {name: (float(x.mean()), float(x.std(ddof=1))) for name, x in columns.items()}
    return result


LABELS = {VANILLA: "vanilla", OURS: "the paper's (MIE Laplace)", POE: "PoE Laplace", POOL: "Pool", AUTO: "auto"}


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: top-1, NLPD, ECE and EEFP by size, a row for each method and score."""
    found = means(rows)
    lines = [
        "| method, score | " + " | ".join(f"{size:,}" for size in SIZES) + " |",
        "|---|" + "---|" * len(SIZES),
    ]
    for method in METHODS:
        for score in SCORES:
            cells = []
            for size in SIZES:
                mean = {name: value for name, (value, _) in found[method, score, size].items()}
                cells.append(f"{100 * mean['top1']:.2f} / {mean['nlpd']:.3f} / {mean['ece']:.3f} / {mean['eefp']:.3f}")
            lines.append(f"| {LABELS.get(method, method)}, {score} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, str]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = means(rows)
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    names = {"top1": "top-1, %", "nlpd": "NLPD", "ece": "ECE"}
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        factor = 100 if name == "top1" else 1
        curves = [(method, "confidence", "-") for method in METHODS] + [(AUTO, "learned", "--")]
        for method, score, style in curves:
            if method == VANILLA and name != "top1":
                continue  # far above the others
            values = [found[method, score, size][name] for size in SIZES]
            mean, deviation = (factor * np.array(column) for column in zip(*values, strict=True))
            text = LABELS.get(method, method) + ("" if score == "confidence" else ", learned score")
            color = f"C{METHODS.index(method)}"
            axis.errorbar(SIZES, mean, deviation, label=text, color=color, linestyle=style, capsize=2, linewidth=1.2)
        axis.set(xscale="log", xlabel="validation samples", title=label)
        axis.set_xticks(SIZES, [f"{size:,}" for size in SIZES], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=7.5)
    figure.savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", action="store_true", help="only draw and print the results that are there")
    arguments = parser.parse_args()
    if not arguments.plot:
        main(arguments.seeds)
    plot(read())
    print(table(read()))
