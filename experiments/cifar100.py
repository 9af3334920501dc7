"""Train what two cores allow on real CIFAR-100, and write down what was reached.

usage: cifar100.py CIFAR100_ROOT RUNS

Each net is trained, or goes on where it was interrupted, into RUNS/<name>; its trace is collected and evaluated by the
commands that the table then shows. What is kept in this folder: each run's run.json, history.csv and results.json.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from exitwise import zoo
from exitwise.training.history import History

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN, END = "<!-- table -->", "<!-- end -->"

# name: options of `exitwise train`
EXPERIMENTS = {
    "msdnet-small": ["--model", "cifar100-small", "--recipe", "cifar100-short"],
    **{
        name: ["--model", f"cifar100-{name}", "--recipe", "cifar100-short", "--epochs", epochs]
        for name, epochs in {"resnet8": "8", "resnet14": "8", "densenet10": "8", "densenet16": "4"}.items()
    },
}


def exitwise(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "exitwise", *map(str, words)], check=True)


def finished(run: Path) -> bool:
    if not (run / "history.csv").is_file():
        return False
    epochs = json.loads((run / "run.json").read_text())["training"]["recipe"]["epochs"]
    return len(History.load(run / "history.csv").epochs) == epochs


def make(name: str, options: list[str], root: Path, runs: Path) -> None:
    """Train, collect and evaluate, leaving out what has been done."""
    run = runs / name
    if not run.exists():
        exitwise("train", "--data", "cifar100", "--root", root, *options, "--out", run)
    elif not finished(run):
        exitwise("train", run, "--resume")
    if not (run / "trace.safetensors").exists():
        exitwise("collect", run, "--half")
    if not (run / "results.json").exists():
        exitwise("evaluate", run, "--budget", "100%", "--method", "MIE Laplace T_opt sigma_opt")
        exitwise("ablate", run)
    keep(name, run)


def keep(name: str, run: Path) -> None:
    """What goes into the repository; where the data lay is nobody's business."""
    place = HERE / name
    place.mkdir(exist_ok=True)
    about = json.loads((run / "run.json").read_text())
    about["data"]["root"] = None
    (place / "run.json").write_text(json.dumps(about, indent=2) + "\n")
    for file in ("history.csv", "results.json"):
        shutil.copyfile(run / file, place / file)


def published(name: str) -> str:
    """The paper's top-1 of the same net after 300 epochs."""
    rows = [row for row in zoo.published("baselines") if row["dataset"] == "CIFAR-100"]
    flops = next((float(row["flops"]) for row in rows if row["model"].lower() == name), None)
    if flops is None:
        return ""
    family = name.rstrip("0123456789")
    curve = [r for r in zoo.published("budget_curves") if (r["dataset"], r["metric"]) == ("CIFAR-100", "top1")]
    points = [r for r in curve if r["model"] == family]
    nearest = min(points, key=lambda point: abs(float(point["flops"]) - flops))
    return f"{float(nearest['value']):.2f}"


def row(name: str, options: list[str]) -> str:
    results = json.loads((HERE / name / "results.json").read_text())
    history = History.load(HERE / name / "history.csv")
    found: dict[str, Any] = results["evaluation"]["methods"]
    plain, ours = (found[method]["evaluation"] for method in ("MSDNet (vanilla)", "MIE Laplace T_opt sigma_opt"))
    exits = " / ".join(f"{100 * each['top1']:.2f}" for each in plain["per_exit"])
    numbers = [f"{e['nlpd']:.3f}, {e['ece']:.3f}" for e in (plain, ours)]
    cost = f"{plain['cost'] / 1e6:.1f}"
    command = shlex.join(["exitwise", "train", "--data", "cifar100", "--root", "DIR", *options])
    epochs = f"{len(history.epochs)}, kept {history.best.epoch}"
    return f"| {name} | {epochs} | {cost} | {exits} | {published(name)} | {numbers[0]} | {numbers[1]} | `{command}` |"


def write_table() -> None:
    head = "| net | epochs | M MACs | test top-1 % by exit | paper, 300 epochs | NLPD, ECE | calibrated | command |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    lines += [row(name, options) for name, options in EXPERIMENTS.items() if (HERE / name).is_dir()]
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)


def main(root: str, runs: str) -> None:
    for name, options in EXPERIMENTS.items():
        make(name, options, Path(root), Path(runs))
        write_table()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
