"""Our methods beside those of others on the shipped trace, `ew.rivals`, with the packages of the extra `rivals`.

usage: rivals.py [--fill]

Results go to experiments/rivals/results.json, and its tables, with that of splits.py, into docs/comparison.md, each
behind its name in a comment; `--fill` does only the latter. Five minutes with one thread; no dataset is needed.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import splits
import torch
from results import fill_tables, machine, rounded, run_or_fill

import exitwise as ew
from exitwise.core.files import write_json

RESULTS = Path(__file__).parent / "rivals" / "results.json"
PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
PACKAGES = ("earlyon", "laplace-torch", "probmetrics")


def main() -> None:
    torch.set_num_threads(1)
    table = ew.rivals(ew.Trace.load(ew.zoo.path("trace.safetensors")))
    if table.not_run:
        raise SystemExit(f"not run: {table.not_run}; pip install 'exitwise[rivals]'")
    RESULTS.parent.mkdir(exist_ok=True)
    packages = {name: version(name) for name in PACKAGES}
    settings = {"command": "python experiments/rivals.py", "machine": machine(), "packages": packages}
    measured = {name: value for name, value in table.to_dict().items() if name != "advice"}
    write_json(RESULTS, rounded({**settings, **measured}))


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown, by name."""
    rows = [
        "| | top-1 | NLPD | ECE | adaptive ECE | AUROC | AURC | EEFP | per exit | as visited | fit, s | added MACs |",
        "|---|" + "---|" * 11,
    ]
    ends = ["| | top-1 | NLPD | ECE | AUROC | EEFP |", "|---|" + "---|" * 5]
    for row in results["rows"]:
        names = ("nlpd", "ece", "adaptive_ece", "auroc", "aurc", "eefp")
        cells = [f"{100 * row['top1']:.2f}", *(f"{row[name]:.3f}" for name in names)]
        cells += [", ".join(f"{value:.3f}"[1:] for value in row["eefp_per_exit"]), f"{row['eefp_visited']:.3f}"]
        cells += [f"{row['seconds']:.1f}", f"{100 * row['added_cost']:.3f} %"]
        rows.append(f"| {row['label']} | {' | '.join(cells)} |")
        if not row["difference"]:
            continue
        cells = []
        for name in ("top1", "nlpd", "ece", "auroc", "eefp"):
            factor, digits = (100, 2) if name == "top1" else (1, 3)
            low, high = (factor * end for end in row["intervals"][name])
            cells.append(f"{factor * row['difference'][name]:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})")
        ends.append(f"| {row['label']} | {' | '.join(cells)} |")
    risks = results["risk_control"]
    epsilons = list(dict.fromkeys(row["epsilon"] for row in risks))
    controlled = [
        "| | " + " | ".join(f"at most {100 * e:g}" for e in epsilons) + " |",
        "|---|" + "---|" * len(epsilons),
    ]
    for name in dict.fromkeys(row["name"] for row in risks):
        cells = [
            f"{100 * row['cost']:.1f} %, {100 * row['loss']:+.2f}" if row["cost"] is not None else "none"
            for row in risks
            if row["name"] == name
        ]
        controlled.append(f"| {name} | {' | '.join(cells)} |")
    return {"rivals": "\n".join(rows), "differences": "\n".join(ends), "risk control": "\n".join(controlled)}


def filled(page: str) -> str:
    """The page with its tables as the results have them now."""
    texts = tables(json.loads(RESULTS.read_text(encoding="utf-8")))
    texts["few labels"] = splits.table(splits.read())
    return fill_tables(page, texts)


if __name__ == "__main__":
    run_or_fill(__doc__, main, PAGE, filled)
