"""ASGI middleware that limits the memory of all request bodies together."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exitwise.serving.scheduler import OverloadedError


class BodyMemory:
    """Bytes of the bodies that are in memory now, and how many there may be."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used = max_bytes, 0


class LimitBodies:
    """Refuse a request while too many bytes of bodies are in memory: of one that arrives, or waits for its answer.

    Args:
        app: The application.
        memory: The bytes that all applications of a service share.
    """

    def __init__(self, app: ASGIApp, memory: BodyMemory) -> None:
        self._app, self._memory = app, memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held, memory = 0, self._memory

        async def receive_and_count() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if memory.used + size > memory.max_bytes:
                raise OverloadedError(f"the bodies of all requests together may have {memory.max_bytes} bytes", 1.0)
            held += size
            memory.used += size
            return message

        try:
            await self._app(scope, receive_and_count, send)
        finally:
            memory.used -= held
