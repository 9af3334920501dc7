"""Hooks of mkdocs for this site.

Equations become MathML when the site is built. Files of the repository that a page links to are copied to repository/.
On a page of the reference, `::: exitwise.Name` stands before an example; the hook adds the name's members after it.
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

from griffe import Extension, Object
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


def _source_path(uri: str) -> Path:
    """Path in the repository of a file of the site."""
    return ROOT / uri.removeprefix("repository/") if uri.startswith("repository/") else DOCS / uri


def _link_target(uri: str, link: str) -> Path | None:
    """File of the repository that a page links to, for a folder its README; None if there is no such file."""
    path = (_source_path(uri).parent / link).resolve()
    path = path / "README.md" if path.is_dir() else path
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _site_uri(path: Path) -> str:
    """Address in the site of a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, and those that these files link to."""
    pages = [file.src_uri for file in files.documentation_pages()]
    while pages:
        uri = pages.pop()
        for link in LINK.findall(_source_path(uri).read_text(encoding="utf-8")):
            path = _link_target(uri, link)
            if path is None or files.get_file_from_path(_site_uri(path)):
                continue
            files.append(File.generated(config, _site_uri(path), abs_src_path=str(path)))
            if path.suffix == ".md":
                pages.append(_site_uri(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt links to the site; on pages of the reference, add members and the table of all names."""
    uri = page.file.src_uri

    def adapt_link(match: re.Match[str]) -> str:
        path = _link_target(uri, match[1])
        return match[1] if path is None else os.path.relpath(_site_uri(path), Path(uri).parent.as_posix())

    markdown = LINK.sub(adapt_link, markdown)
    if uri.startswith("reference/"):
        markdown = _add_members(markdown).replace("<!-- names -->", _names_table())
    return markdown


# Equations

_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace every equation by MathML."""

    def to_mathml(match: re.Match[str]) -> str:
        latex = unescape(match[2]).strip()
        mathml = convert(latex, display="block" if match[1] == "div" else "inline")
        if "\\" in mathml or "<mi>&</mi>" in mathml:  # the converter copies commands that it does not know
            _log.warning("%s: an equation has an unknown command: %s", page.file.src_uri, latex)
        return f'<div class="equation">{mathml}</div>' if match[1] == "div" else mathml

    return _MATH.sub(to_mathml, html)


# The reference


class ExampleSections(Extension):
    """Griffe extension that renders `Example:` sections as code; griffe itself knows only `Examples:`."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in the docstring of every object that griffe loads."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def _find_object(path: str) -> Any:
    result: Any = import_module("exitwise")
    for name in path.split("."):
        result = getattr(result, name, None) or import_module(f"{result.__name__}.{name}")
    return result


def _members(path: str) -> list[str]:
    """Full names of the public members of a module or class, in their order, without former names."""
    owner = _find_object(path)
    if inspect.ismodule(owner):
        defined = [n for n, value in vars(owner).items() if getattr(value, "__module__", "") == owner.__name__]
        names = [name for name in getattr(owner, "__all__", defined) if not name.startswith("_")]
        members = {name: getattr(owner, name) for name in names if not _is_former_name(name, getattr(owner, name))}
        # A function is named by the module that defines it: `models.msdnet` would be the module of that name.
        return [
            f"{value.__module__}.{name}" if inspect.isfunction(value) else f"{owner.__name__}.{name}"
            for name, value in members.items()
        ]
    if not inspect.isclass(owner):
        return []
    kinds = (property, cached_property, classmethod, staticmethod)
    return [
        f"exitwise.{path}.{name}"
        for name, value in vars(owner).items()
        if name[0] != "_"
        and (isinstance(value, kinds) or inspect.isfunction(value))
        and not _is_former_name(name, value)
    ]


def _is_former_name(name: str, value: Any) -> bool:
    """Return True for a member that is only an alias for old code."""
    if inspect.isfunction(value) and value.__name__ != name:
        return True
    return bool(re.match(r"[^\n]*: former name of ", inspect.getdoc(value) or ""))


def _add_members(markdown: str) -> str:
    """Insert the members of each name after its example, before the next name or heading."""
    parts = re.split(r"(?m)^(?=::: exitwise\.|## )", markdown)
    for i, part in enumerate(parts):
        if match := NAME.match(part):
            blocks = [f"::: {name}\n    options: {{heading_level: 3}}" for name in _members(match[1])]
            parts[i] = "\n\n".join([part.rstrip(), *blocks, ""])
    return "\n".join(parts)


def _summary(path: str, page_text: str) -> str:
    """First sentence of a name's docstring; for a constant, of the text on its page."""
    value = _find_object(path)
    has_docstring = inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    text = inspect.getdoc(value) if has_docstring else None
    return re.split(r"(?<=\.)\s|\n\n", (text or page_text).strip())[0].replace("\n", " ").rstrip(".")


def _names_table() -> str:
    """Table of all public names with their summaries and pages."""
    rows = []
    for file in sorted((DOCS / "reference").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        for match in NAME.finditer(text):
            title = text.splitlines()[0].removeprefix("# ")
            rows.append(
                f"| [`ew.{match[1]}`]({file.name}#exitwise.{match[1]}) "
                f"| {_summary(match[1], text[match.end() :])} | {title} |"
            )
    return "\n".join(["| name | summary | page |", "|---|---|---|", *sorted(rows, key=str.lower)])
