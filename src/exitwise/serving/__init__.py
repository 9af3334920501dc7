"""Serving a bundle over HTTP: `app` returns the ASGI application, `Settings` its limits. Needs `exitwise[serve]`."""

from exitwise.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
