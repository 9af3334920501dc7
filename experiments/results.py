"""What the results of experiments have in common."""

import argparse
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def rounded(value: Any) -> Any:
    """Five digits of every number, in nested plain data."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    models = (line for line in lines if line.startswith("model name"))
    return {
        "cpu": next((line.split(":")[1].strip() for line in models), platform.machine()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def run_or_fill(about: str | None, main: Callable[[], None], page: Path, filled: Callable[[str], str]) -> None:
    """Run an experiment, unless `--fill` is given, and put its results into the tables of its page."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", action="store_true", help="only fill in the results that are there")
    if not parser.parse_args().fill:
        main()
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def fill_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with every table in its place, behind a comment with its name."""
    for name, table in tables.items():
        page, number = re.subn(
            rf"<!-- {name} -->\n(\|.*\n)*", lambda _, name=name, table=table: f"<!-- {name} -->\n{table}\n", page
        )
        if number != 1:
            raise ValueError(f"the page must have one place for the table {name!r}, but has {number}")
    return page
