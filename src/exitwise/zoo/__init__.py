"""What ships inside the package: a trained net with its trace, and the tables and curves that the paper published."""

import csv
from importlib.resources import files
from pathlib import Path

from exitwise.errors import InputError

NET = "cifar100-msdnet-small"
_HERE = Path(str(files("exitwise.zoo")))

TABLES = tuple(sorted(path.stem for path in (_HERE / "published").glob("*.csv")))


def path(file: str) -> Path:
    """Where a file of the shipped net lies: run.json, CARD.md, or {net,trace,split}.safetensors."""
    found = _HERE / NET / file
    if not found.is_file():
        raise InputError(f"the zoo has no file {file!r}")
    return found


def published(table: str) -> list[dict[str, str]]:
    """The rows of one of the paper's tables, as printed: ablation, baselines, budget_curves, ..."""
    if table not in TABLES:
        raise InputError(f"`table` must be one of {', '.join(TABLES)}, but got {table!r}")
    with (_HERE / "published" / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published_changes(table: str, preset: str) -> dict[str, dict[str, float]] | None:
    """Each method's published change against vanilla for one of the paper's nets; accuracies as fractions."""
    names = {"cifar100": "CIFAR-100", "imagenet": "ImageNet", "caltech256": "Caltech-256"}
    data, _, size = preset.rpartition("-")
    rows = [row for row in published(table) if (row["dataset"], row["size"]) == (names.get(data), size)]
    if not rows:
        return None
    scale = {"top1": 0.01, "top5": 0.01, "nlpd": 1.0, "ece": 1.0}
    return {
        row["method"]: {name: (float(row[name]) - float(rows[0][name])) * factor for name, factor in scale.items()}
        for row in rows
    }
