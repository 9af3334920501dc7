"""Pages in one file: templates, styles and scripts that packages share, and the insertion of parts."""

import re
from collections.abc import Mapping
from importlib.resources import files


def read_asset(package: str, name: str) -> str:
    """Return a text file from the folder `assets` of a package, such as "exitwise.core"."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def read_shared_style() -> str:
    """Return the style sheet that all pages begin with."""
    return read_asset("exitwise.core", "base.css")


def read_shared_script() -> str:
    """Return the script that all pages begin with: elements, charts, formats of numbers, the theme."""
    return "\n".join(read_asset("exitwise.core", name) for name in ("chart.js", "format.js", "theme.js"))


def fill_template(template: str, parts: Mapping[str, str]) -> str:
    """Replace every {{name}} by its part, in one pass: inserted text may itself contain {{name}}.

    Example:
        >>> from exitwise.core.pages import fill_template
        >>> fill_template("<p>{{text}}</p>", {"text": "{{text}}"})
        '<p>{{text}}</p>'
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
