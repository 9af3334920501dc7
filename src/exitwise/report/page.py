"""The page: one file with data, scripts, styles and images inside; it needs neither a network nor a server."""

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path

from exitwise.core.files import atomic_write
from exitwise.report.build import Report

LIVE_SECONDS = 5


def render_page(report: Report) -> str:
    """Return the page as text. Names from datasets are escaped, so that they cannot end the script element."""
    data = json.dumps(report.data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    images = f'.image i{{background-image:url("{report.sheet.uri()}")}}' if report.sheet else ""
    refresh = f'<meta http-equiv="refresh" content="{LIVE_SECONDS}">' if report.live else ""
    parts = {
        "title": escape(f"{report.data['net']['run']} · exitwise").encode(errors="replace").decode(),
        "refresh": refresh,
        "style": _read_asset("page.css"),
        "data": data,
        "script": "\n".join(_read_asset(name) for name in ("chart.js", "page.js")),
        "images": images,
    }
    # One pass: inserted text may itself contain "{{...}}" and must not be expanded.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read_asset("page.html"))


def write_page(report: Report, path: Path) -> None:
    """Write the page atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(render_page(report), encoding="utf-8")


def _read_asset(name: str) -> str:
    return (files("exitwise.report") / "assets" / name).read_text(encoding="utf-8")
