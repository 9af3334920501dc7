"""What ships inside the package: a trained net with its trace, and the tables and curves that the paper published."""

import csv
from importlib.resources import files
from pathlib import Path

from exitwise.core.errors import InputError

NET = "cifar100-msdnet-small"
_HERE = Path(str(files("exitwise.zoo")))

_DATA_SETS = {"cifar100": "CIFAR-100", "imagenet": "ImageNet", "caltech256": "Caltech-256"}
SCALES = {"top1": 0.01, "top5": 0.01, "nlpd": 1.0, "ece": 1.0}  # from what is printed to what the library gives

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


def place(preset: str) -> tuple[str, str] | None:
    """The paper's names of a net's data set and size, if it is one of the paper's nine nets."""
    data, _, size = preset.rpartition("-")
    found = (_DATA_SETS.get(data, ""), size)
    return found if found[0] and size in ("small", "medium", "large") else None


def published_rows(table: str, preset: str) -> dict[str, dict[str, float]] | None:
    """A published table's rows for one of the paper's nets, by method; accuracies as fractions."""
    return {
        row["method"]: {name: float(row[name]) * factor for name, factor in SCALES.items()}
        for row in published(table)
        if (row["dataset"], row["size"]) == place(preset)
    } or None


def published_changes(table: str, preset: str) -> dict[str, dict[str, float]] | None:
    """Each method's published change against the table's first, vanilla."""
    rows = published_rows(table, preset)
    if rows is None:
        return None
    first = next(iter(rows.values()))
    return {method: {name: row[name] - first[name] for name in row} for method, row in rows.items()}
