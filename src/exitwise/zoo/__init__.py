"""What ships inside the package: a trained net with its trace, and the tables and curves that the paper published."""

import csv
from importlib.resources import files
from pathlib import Path

from exitwise.errors import InputError

NET = "cifar100-msdnet-small"
_HERE = Path(str(files("exitwise.zoo")))

TABLES = tuple(sorted(path.stem for path in (_HERE / "published").glob("*.csv")))


def path(file: str) -> Path:
    """Where a file of the shipped net lies: net.safetensors, trace.safetensors, split.safetensors, run.json, CARD.md."""
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
