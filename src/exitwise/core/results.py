"""Base class of results: conversion to JSON-serializable dicts and to pandas."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def to_jsonable(value: Any) -> Any:
    """Return nested mappings, lists and tuples as JSON-serializable data; non-finite values become None."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


class Result:
    """Base of frozen dataclasses of numbers."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict; non-finite values become None."""
        data: dict[str, Any] = to_jsonable(asdict(self))  # type: ignore[call-overload]
        return data

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame with one row, or one row per part of the result; needs pandas."""
        import pandas

        return pandas.DataFrame(self._records())

    def _records(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in self.to_dict().items() if not isinstance(value, dict | list)}]
