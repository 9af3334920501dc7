"""Errors of requests with their HTTP status."""

from exitwise.core.errors import InputError


class RequestError(InputError):
    """A request that is refused with an HTTP status of its own.

    Args:
        status: The HTTP status, from 400 to 599.
        message: One line for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientDisconnectedError(Exception):
    """The client closed its connection before the answer."""


def require_serve() -> None:
    """Raise InputError if a package of the extra `serve` is not installed."""
    try:
        import httptools  # noqa: F401
        import onnxruntime  # noqa: F401
        import PIL  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(f"serving needs {error.name}: pip install 'exitwise[serve]'") from None
