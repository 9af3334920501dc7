"""Serving a bundle over HTTP: `app` returns the ASGI application, `Settings` its limits. Needs `exitwise[serve]`."""

from typing import Any

from exitwise.core.lazy import lazy_exports
from exitwise.serving.errors import require_serve

_get_attribute, __dir__, __all__ = lazy_exports(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "app":
        require_serve()
    return _get_attribute(name)
