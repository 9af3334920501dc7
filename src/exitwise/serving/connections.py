"""HTTP connections of the server: limits on their number, and on clients that send or read too slowly."""

import asyncio
import json
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEADER = 16 << 10  # bytes of the headers of a request


class LimitedProtocol(HttpToolsProtocol):
    """An HTTP/1.1 connection that is closed if headers are too long, or they or the reading of an answer take too long.

    The limits are class attributes, because uvicorn makes the instances: `limit_connections` returns a subclass.
    """

    max_connections = 1000
    header_timeout = 10.0
    write_timeout = 30.0
    _header_size = 0  # bytes of names and values so far
    _in_headers = False
    _unparsed = 0  # bytes that came since the headers began, which may be one value that is not complete
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or answer 503 and close it if there are too many."""
        super().connection_made(transport)
        if (connection := transport.get_extra_info("socket")) is not None:
            # uvloop does it, and asyncio for sockets that name their protocol; otherwise the body of an answer waits
            # until the client has acknowledged its headers, which clients delay by up to 40 ms.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.max_connections:
            transport.write(_raw_answer("503 Service Unavailable", "too many connections", "Retry-After: 1\r\n"))
            transport.close()
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and its timers."""
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle data; a request whose headers are not complete has a limited time."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_headers:
            self._unparsed += len(data)
            if self._unparsed > _MAX_HEADER and not self.transport.is_closing():
                self.send_400_response(f"the headers have more than {_MAX_HEADER} bytes")
        if self._is_idle:
            if self._timer is None:
                self._start_timer()
        else:
            self._stop_timer()

    def on_message_begin(self) -> None:
        """Start to count the headers of a request."""
        super().on_message_begin()
        self._in_headers, self._header_size, self._unparsed = True, 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or one that follows a body in chunks; an error makes the parser refuse the request."""
        self._header_size += len(name) + len(value)
        if self._header_size > _MAX_HEADER:
            raise ValueError("the headers are too long")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to answer a request."""
        self._in_headers = False
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the protocol stays; what follows in the same packet would be lost

    @property
    def _is_idle(self) -> bool:
        """True if no request is being answered."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout, self._close_if_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_idle(self) -> None:
        self._timer = None
        if self._is_idle and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        """Wait for a client that reads slowly, but not for ever."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on with an answer."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer data that are not HTTP, in the form of all errors."""
        self.transport.write(_raw_answer("400 Bad Request", msg.rstrip(".")))
        self.transport.close()


def limit_connections(max_connections: int, header_timeout: float, write_timeout: float) -> type[LimitedProtocol]:
    """Return a protocol class with these limits."""
    limits = {
        "max_connections": max_connections,
        "header_timeout": header_timeout,
        "write_timeout": write_timeout,
    }
    return type("ServedProtocol", (LimitedProtocol,), limits)


def _raw_answer(status: str, message: str, headers: str = "") -> bytes:
    body = json.dumps({"error": message})
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{headers}Connection: close\r\n\r\n{body}"
    ).encode()
