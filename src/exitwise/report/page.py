"""The page: one file with data, scripts, styles and images inside; it needs neither a network nor a server."""

import json
from html import escape
from pathlib import Path

from exitwise.core.files import atomic_write
from exitwise.core.pages import fill_template, read_asset, read_shared_script, read_shared_style
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
        "style": read_shared_style() + read_asset("exitwise.report", "page.css"),
        "data": data,
        "script": f"{read_shared_script()}\n{read_asset('exitwise.report', 'page.js')}",
        "images": images,
    }
    return fill_template(read_asset("exitwise.report", "page.html"), parts)


def write_page(report: Report, path: Path) -> None:
    """Write the page atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(render_page(report), encoding="utf-8")
