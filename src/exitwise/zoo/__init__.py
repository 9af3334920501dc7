"""Shipped files: a trained net with its trace, and the tables and curves that the paper published."""

import csv
from importlib.resources import files
from pathlib import Path

from exitwise.core.checks import check_choice
from exitwise.core.errors import InputError

__all__ = ["NET", "SCALES", "TABLES", "paper_names", "path", "published", "published_changes", "published_rows"]

NET = "cifar100-msdnet-small"
_FOLDER = Path(str(files("exitwise.zoo")))

_PAPER_DATASETS = {"cifar100": "CIFAR-100", "imagenet": "ImageNet", "caltech256": "Caltech-256"}
SCALES = {"top1": 0.01, "top5": 0.01, "nlpd": 1.0, "ece": 1.0}  # from the printed value to the library's

TABLES = tuple(sorted(path.stem for path in (_FOLDER / "published").glob("*.csv")))


def path(file: str) -> Path:
    """Return the path of a file of the shipped net.

    Args:
        file: run.json, CARD.md, net.safetensors, trace.safetensors or split.safetensors.

    Returns:
        The path inside the installed package.

    Raises:
        InputError: If the zoo has no such file.

    Example:
        >>> import exitwise as ew
        >>> ew.zoo.path("trace.safetensors").name
        'trace.safetensors'
    """
    file_path = _FOLDER / NET / file
    if not file_path.is_file():
        raise InputError(f"the zoo has no file {file!r}")
    return file_path


def published(table: str) -> list[dict[str, str]]:
    """Return the rows of one of the paper's tables, as printed.

    Args:
        table: One of `TABLES`, such as "ablation", "baselines" or "budget_curves".

    Returns:
        A dict of strings per row, by column.

    Raises:
        InputError: If there is no such table.

    Example:
        >>> import exitwise as ew
        >>> ew.zoo.published("ablation")[0]["method"]
        'MSDNet (vanilla)'
    """
    check_choice("table", table, TABLES)
    with (_FOLDER / "published" / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def paper_names(preset: str) -> tuple[str, str] | None:
    """Return the paper's names of a net's dataset and size.

    Args:
        preset: Name of a model preset, such as "cifar100-small".

    Returns:
        The dataset and the size as printed in the tables; None unless the net is one of the paper's nine.

    Example:
        >>> import exitwise as ew
        >>> ew.zoo.paper_names("cifar100-small")
        ('CIFAR-100', 'small')
    """
    data, _, size = preset.rpartition("-")
    if data in _PAPER_DATASETS and size in ("small", "medium", "large"):
        return _PAPER_DATASETS[data], size
    return None


place = paper_names  # its former name


def published_rows(table: str, preset: str) -> dict[str, dict[str, float]] | None:
    """Return a published table's rows for one of the paper's nets, as numbers.

    Args:
        table: One of `TABLES` with a row per method, such as "ablation".
        preset: Name of a model preset, such as "cifar100-small".

    Returns:
        Metrics by method; accuracies are fractions. None if the table has no rows for the net.

    Example:
        >>> import exitwise as ew
        >>> rows = ew.zoo.published_rows("ablation", "cifar100-small")
        >>> len(rows), list(rows["MIE"])
        (12, ['top1', 'top5', 'nlpd', 'ece'])
    """
    return {
        row["method"]: {name: float(row[name]) * factor for name, factor in SCALES.items()}
        for row in published(table)
        if (row["dataset"], row["size"]) == paper_names(preset)
    } or None


def published_changes(table: str, preset: str) -> dict[str, dict[str, float]] | None:
    """Return each method's published change relative to the table's first method, vanilla.

    Args:
        table: One of `TABLES` with a row per method, such as "ablation".
        preset: Name of a model preset, such as "cifar100-small".

    Returns:
        Differences of the metrics by method; None if the table has no rows for the net.

    Example:
        >>> import exitwise as ew
        >>> changes = ew.zoo.published_changes("ablation", "cifar100-small")
        >>> round(changes["MIE"]["top1"], 4)
        0.0072
    """
    rows = published_rows(table, preset)
    if rows is None:
        return None
    first = next(iter(rows.values()))
    return {method: {name: row[name] - first[name] for name in row} for method, row in rows.items()}
