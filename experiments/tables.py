"""Put the tables made from results of experiments into docs/policies.md, each behind its name in a comment.

usage: tables.py
"""

import json
import re
from pathlib import Path

import certificates
import drift
import policies

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
    for name, table in tables().items():
        page, number = re.subn(
            rf"<!-- {name} -->\n(\|.*\n)*", lambda _, name=name, table=table: f"<!-- {name} -->\n{table}\n", page
        )
        if number != 1:
            raise ValueError(f"{PAGE.name} must have one place for the table {name!r}, but has {number}")
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
