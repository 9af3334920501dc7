"""Steps that all endpoints share: read a body within the limits, answer JSON, add entries to the access log."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError, shorten
from exitwise.serving.errors import ClientDisconnectedError, RequestError
from exitwise.serving.settings import Settings

_DEFAULT_TOP = 5  # classes that are listed for each image


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of ASCII JSON: escapes keep every string valid, also lone surrogates."""
    return Response(json.dumps(data, allow_nan=False), status, headers, "application/json")


def find_header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a header, by its name in lower case; None if there is none."""
    for each, value in scope["headers"]:
        if each == name:
            found: str = value.decode("latin-1")
            return found
    return None


async def read_body(request: Request, settings: Settings) -> bytes:
    """Return the body; raise RequestError if it is too large, too slow or compressed."""
    limit = settings.max_body
    encoding = find_header(request.scope, b"content-encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise RequestError(415, "`Content-Encoding` must be identity: compressed bodies are not accepted")
    length = find_header(request.scope, b"content-length")
    if length is not None and (not length.isascii() or not length.isdigit() or int(length[:20]) > limit):
        raise RequestError(413, f"a body may have at most {limit} bytes")
    chunks, size, receive = [], 0, request.receive
    try:
        async with asyncio.timeout(settings.body_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                if chunk := message.get("body", b""):
                    size += len(chunk)
                    if size > limit:
                        raise RequestError(413, f"a body may have at most {limit} bytes")
                    chunks.append(chunk)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {settings.body_timeout:g} s") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def note(request: Request, **entries: Any) -> None:
    """Add entries to the line of the access log."""
    log = request.scope.get("state", {}).get("log")
    if log is not None:
        log.update(entries)


def parse_top(text: str | None) -> int:
    """Return the number of classes to list, from the query parameter `top`."""
    if text is None:
        return _DEFAULT_TOP
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:10]) <= 1000:
        raise InputError(f"`top` must be a whole number from 1 to 1000, but is {shorten(text)}")
    return check_integer("top", int(text), 1, 1000)
