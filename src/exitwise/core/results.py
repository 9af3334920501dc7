"""Base classes of results: conversion to JSON-serializable dicts and to pandas, and tables of rows."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import pandas

Row = TypeVar("Row", bound="Result")


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

    def _field_values(self) -> dict[str, Any]:
        """Return the fields by name as they are, without cached properties."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame with one row, or one row per part of the result; needs pandas."""
        import pandas

        return pandas.DataFrame(self._records())

    def _records(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in self.to_dict().items() if not isinstance(value, dict | list)}]


class RowTable(Result, Generic[Row]):
    """Base of frozen dataclasses of rows; `table[i]` and `table["name"]` are rows."""

    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, key: int | str) -> Row:
        if isinstance(key, int):
            return self.rows[key]
        for row in self.rows:
            if key == self._row_name(row):
                return row
        raise KeyError(key)

    def _row_name(self, row: Row) -> str | None:
        """Return the name of a row; None if rows have none."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, with the rows as their own `to_dict` returns them."""
        return {**super().to_dict(), "rows": [row.to_dict() for row in self.rows]}

    def _records(self) -> list[dict[str, Any]]:
        return [record for row in self.rows for record in row._records()]
