"""Put the tables made from results of experiments into docs/policies.md, each behind its name in a comment.

usage: tables.py
"""

import json
from pathlib import Path

import certificates
import drift
import policies
from results import fill_tables

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "policies.md"


def tables() -> dict[str, str]:
    found: dict[str, str] = {}
    for module in (policies, certificates, drift):
        path = HERE / module.__name__ / "results.json"
        found |= module.tables(json.loads(path.read_text(encoding="utf-8")))
    return found


def filled(page: str) -> str:
    """The page with its tables as the results have them now."""
    return fill_tables(page, tables())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
