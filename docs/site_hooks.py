"""What mkdocs does for this site beyond itself.

Equations become MathML when the site is built. Files of the repository that a page links to come along, under
repository/. In the reference, `::: exitwise.Name` stands before an example; the members follow below it.
"""

import inspect
import logging
import os
import re
from functools import cached_property
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|/|#)([^)\s#]+)")
NAME = re.compile(r"^::: exitwise\.(\S+)$", flags=re.MULTILINE)
_log = logging.getLogger("mkdocs.hooks.site")


# Files of the repository


def _origin(uri: str) -> Path:
    """Where a file of the site lies in the repository."""
    return ROOT / uri.removeprefix("repository/") if uri.startswith("repository/") else DOCS / uri


def _target(uri: str, link: str) -> Path | None:
    """The file of the repository that a page's link leads to; a folder's is its README."""
    path = (_origin(uri).parent / link).resolve()
    path = path / "README.md" if path.is_dir() else path
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _place(path: Path) -> str:
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [file.src_uri for file in files.documentation_pages()]
    while pages:
        uri = pages.pop()
        for link in LINK.findall(_origin(uri).read_text(encoding="utf-8")):
            path = _target(uri, link)
            if path is None or files.get_file_from_path(_place(path)):
                continue
            files.append(File.generated(config, _place(path), abs_src_path=str(path)))
            if path.suffix == ".md":
                pages.append(_place(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        path = _target(uri, found[1])
        return found[1] if path is None else os.path.relpath(_place(path), Path(uri).parent.as_posix())

    markdown = LINK.sub(moved, markdown)
    if uri.startswith("reference/"):
        markdown = _with_members(markdown).replace("<!-- names -->", _all_names())
    return markdown


# Equations

_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def mathml(found: re.Match[str]) -> str:
        latex = unescape(found[2]).strip()
        made = convert(latex, display="block" if found[1] == "div" else "inline")
        if "\\" in made or "<mi>&</mi>" in made:  # what it does not know it leaves as it is
            _log.warning("%s: an equation has a command that is not known: %s", page.file.src_uri, latex)
        return f'<div class="equation">{made}</div>' if found[1] == "div" else made

    return _MATH.sub(mathml, html)


# The reference


def _object(path: str) -> Any:
    found: Any = import_module("exitwise")
    for name in path.split("."):
        found = getattr(found, name, None) or import_module(f"{found.__name__}.{name}")
    return found


def _members(path: str) -> list[str]:
    """Full names of what a module or class offers, in its order."""
    found = _object(path)
    if inspect.ismodule(found):
        own = [n for n, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
        members = {n: getattr(found, n) for n in getattr(found, "__all__", own) if not n.startswith("_")}
        # A function is named by its home, or `models.msdnet` would be the module of that name.
        return [
            f"{value.__module__}.{name}" if inspect.isfunction(value) else f"{found.__name__}.{name}"
            for name, value in members.items()
        ]
    if not inspect.isclass(found):
        return []
    kinds = (property, cached_property, classmethod, staticmethod)
    shown = [n for n, v in vars(found).items() if n[0] != "_" and (isinstance(v, kinds) or inspect.isfunction(v))]
    return [f"exitwise.{path}.{name}" for name in shown]


def _with_members(markdown: str) -> str:
    """Each name's members after its example, before the next name or heading."""
    parts = re.split(r"(?m)^(?=::: exitwise\.|## )", markdown)
    for i, part in enumerate(parts):
        if found := NAME.match(part):
            blocks = [f"::: {name}\n    options: {{heading_level: 3}}" for name in _members(found[1])]
            parts[i] = "\n\n".join([part.rstrip(), *blocks, ""])
    return "\n".join(parts)


def _summary(path: str, after: str) -> str:
    """The first sentence of a name's docstring, or of what its page says of a constant."""
    found = _object(path)
    documented = inspect.isroutine(found) or inspect.isclass(found) or inspect.ismodule(found)
    text = inspect.getdoc(found) if documented else None
    return re.split(r"(?<=\.)\s|\n\n", (text or after).strip())[0].replace("\n", " ").rstrip(".")


def _all_names() -> str:
    rows = ["| | | |", "|---|---|---|"]
    for file in sorted((DOCS / "reference").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        for found in NAME.finditer(text):
            title = text.splitlines()[0].removeprefix("# ")
            rows.append(
                f"| [`ew.{found[1]}`]({file.name}#exitwise.{found[1]}) "
                f"| {_summary(found[1], text[found.end() :])} | {title} |"
            )
    return "\n".join([*rows[:2], *sorted(rows[2:], key=str.lower)])
