"""The page: one file with its data, scripts, styles and pictures inside, which needs neither network nor server."""

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path

from exitwise.core.files import atomic_write
from exitwise.report.build import Report

LIVE_SECONDS = 5


def render(report: Report) -> str:
    """The page as text. Whatever comes from data sets stays data: nothing in it can end the script that holds it."""
    data = json.dumps(report.data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    pictures = f'.picture i{{background-image:url("{report.sheet.uri()}")}}' if report.sheet else ""
    refresh = f'<meta http-equiv="refresh" content="{LIVE_SECONDS}">' if report.live else ""
    parts = {
        "title": escape(f"{report.data['net']['run']} · exitwise").encode(errors="replace").decode(),
        "refresh": refresh,
        "style": _asset("page.css"),
        "data": data,
        "script": "\n".join(_asset(name) for name in ("chart.js", "page.js")),
        "pictures": pictures,
    }
    # In one pass: what is put in is never looked through for places to put things.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def write(report: Report, path: Path) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(render(report), encoding="utf-8")


def _asset(name: str) -> str:
    return (files("exitwise.report") / "assets" / name).read_text(encoding="utf-8")
