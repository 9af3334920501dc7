"""The OpenAPI document as a page that people read: no scripts, and nothing from other servers."""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; }
h2 { margin: 2.5rem 0 0; font-size: 1.1rem; overflow-wrap: anywhere; }
h3 { margin: 1rem 0 0; font-size: 1rem; }
section { border-top: 1px solid GrayText; margin-top: 2rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1.5rem 0.2rem 0; }
th { font-weight: 600; }
code { font-family: ui-monospace, monospace; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def render_api(document: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as HTML.

    Args:
        document: The document, from `describe_api`.

    Example:
        >>> from exitwise.serving.api_page import render_api
        >>> from exitwise.serving.openapi import describe_api
        >>> "<h2><code>POST /classify</code></h2>" in render_api(describe_api("model", 256))
        True
    """
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    sections = [
        f"<section><h2><code>{method.upper()} {escape(path)}</code></h2>{''.join(_describe(operation))}</section>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    keys = "If the service has API keys: <code>Authorization: Bearer KEY</code> or <code>X-API-Key: KEY</code>."
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main><h1>{title}</h1>'
        f'<p>{keys} For programs: <a href="openapi.json">OpenAPI</a>.</p>{"".join(sections)}</main></body></html>'
    )


def _describe(operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<p>{escape(operation['summary'])}</p>"
    if parameters := operation.get("parameters"):
        rows = [(each["name"], each["schema"]["type"], each["description"]) for each in parameters]
        yield _table("Parameters of the query", rows)
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield _table(f"Body: {kind}", list(_fields(content["schema"])))
    for status, response in operation["responses"].items():
        for content in response.get("content", {}).values():
            if status == "200":
                yield _table("Answer", list(_fields(content["schema"])))
    refusals = [status for status in operation["responses"] if status != "200"]
    if refusals:
        yield f"<p>Refused with {', '.join(refusals)}, and <code>{{&quot;error&quot;: &quot;...&quot;}}</code>.</p>"


def _fields(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield path, type and description of the fields of an object, also of objects in it and in its lists."""
    for name, field in schema.get("properties", {}).items():
        required = "required" if name in schema.get("required", ()) else ""
        yield f"{prefix}{name}", _type(field), field.get("description", required)
        inner = field.get("items", field)
        yield from _fields(inner, f"{prefix}{name}{'[]' if inner is not field else ''}.")


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(schema.get("format", kind))


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return f"<h3>{escape(title)}</h3>"
    body = "".join(
        f"<tr><th scope='row'><code>{escape(name)}</code></th><td>{escape(kind)}</td><td>{escape(text)}</td></tr>"
        for name, kind, text in rows
    )
    return f"<h3>{escape(title)}</h3><div><table>{body}</table></div>"
