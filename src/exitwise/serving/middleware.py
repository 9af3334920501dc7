"""ASGI middleware: the access log with request metrics, and the checks of hosts, origins and API keys."""

import json
import logging
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exitwise.core.errors import shorten
from exitwise.serving.errors import ClientDisconnectedError
from exitwise.serving.metrics import Metrics
from exitwise.serving.security import OPEN_PATHS, ApiKeys, host_is_allowed, origin_is_allowed

_access = logging.getLogger("exitwise.serving.access")
_DISCONNECTED = 499  # status in the log and the metrics of a request whose client went away
_MAX_PATH = 200  # characters of a path in the log


class AccessLog:
    """Log one line of JSON per request, and count it.

    Handlers put more entries into `scope["state"]["log"]`, and the name of the endpoint under "endpoint". A true entry
    "quiet" leaves out the line of a successful request.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entries: dict[str, Any] = {}
        scope.setdefault("state", {})["log"] = entries
        start, status = time.perf_counter(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except ClientDisconnectedError:
            status = _DISCONNECTED
            self._metrics.reject("disconnected")
        finally:
            seconds = time.perf_counter() - start
            self._metrics.count_request(entries.pop("endpoint", "other"), status, seconds)
            quiet = entries.pop("quiet", False) and status == 200
            if not quiet and _access.isEnabledFor(logging.INFO):
                _log_request(scope, status, seconds, entries)


def _log_request(scope: Scope, status: int, seconds: float, entries: dict[str, Any]) -> None:
    client = scope.get("client")
    line = {
        "time": _format_time(int(time.time())),
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"][:_MAX_PATH],
        "status": status,
        "ms": round(1e3 * seconds, 3),
        **entries,
    }
    # `Logger.info` would also look for the line of code that calls it, which takes as long as all the rest.
    _access.handle(_access.makeRecord(_access.name, logging.INFO, __file__, 0, "%s", (json.dumps(line),), None))


@lru_cache(maxsize=1)
def _format_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class CheckOrigin:
    """Answer 403 to requests of pages of other sites, which a browser on this machine or network may send.

    Args:
        app: The application.
        hosts: Names of the service; see `host_is_allowed`.
        cors: Origins that are allowed besides the service's own.
        metrics: Counts what is refused.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], cors: Sequence[str], metrics: Metrics) -> None:
        self._app, self._hosts, self._cors, self._metrics = app, hosts, cors, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._find_error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._metrics.reject("forbidden")
        await _send_error(send, 403, error)

    def _find_error(self, scope: Scope) -> str | None:
        host = origin = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
        if host is not None and not host_is_allowed(host, self._hosts):
            return f"the service is not called {shorten(host)}: --allowed-host allows other names"
        if origin is not None and not origin_is_allowed(origin, host or "", self._hosts, self._cors):
            return f"pages of {shorten(origin)} may not call the service: --cors allows other origins"
        return None


class RequireApiKey:
    """Answer 401 to requests without a valid key, except those of probes.

    A key comes as `Authorization: Bearer KEY` or as `X-API-Key: KEY`.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: Metrics) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._keys.accept(_find_key(scope)):
            await self._app(scope, receive, send)
            return
        self._metrics.reject("unauthorized")
        error = "a valid API key is needed: Authorization: Bearer KEY, or X-API-Key: KEY"
        await _send_error(send, 401, error, (b"www-authenticate", b"Bearer"))


async def _send_error(send: Send, status: int, error: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"error": error}).encode()
    described = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*described, *headers]})
    await send({"type": "http.response.body", "body": body})


def _find_key(scope: Scope) -> str:
    headers = {name.lower(): value for name, value in scope["headers"]}
    kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    own: str = headers.get(b"x-api-key", b"").decode("latin-1")
    return (key if kind.lower() == "bearer" else own).strip()
