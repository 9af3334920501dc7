"""ASGI middleware that limits the memory of all request bodies together."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exitwise.serving.scheduler import OverloadedError


class LimitBodies:
    """Refuse a request while too many bytes of bodies are in memory: of one that arrives, or waits for its answer.

    Args:
        app: The application.
        max_bytes: Largest number of bytes.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes, self._bytes = app, max_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def receive_and_count() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if self._bytes + size > self._max_bytes:
                raise OverloadedError(f"the bodies of all requests together may have {self._max_bytes} bytes", 1.0)
            held += size
            self._bytes += size
            return message

        try:
            await self._app(scope, receive_and_count, send)
        finally:
            self._bytes -= held
