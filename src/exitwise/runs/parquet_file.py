"""Rows of predictions as a Parquet file, which is there only when it is complete."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exitwise.core.extras import require_pyarrow as require_pyarrow
from exitwise.core.files import atomic_write
from exitwise.core.text import to_utf8

_ROWS = 10_000  # rows of a row group, which are held in memory


class ParquetRows:
    """Rows that are written in groups to an open Parquet file."""

    def __init__(self, writer: Any) -> None:
        self._writer, self._schema = writer, writer.schema
        self._rows: list[dict[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row; keys that are not in the schema are left out."""
        self._rows.append({name: _to_utf8(row[name]) for name in self._schema.names})
        if len(self._rows) == _ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that were added since the last group."""
        import pyarrow

        if self._rows:
            self._writer.write_table(pyarrow.Table.from_pylist(self._rows, self._schema))
            self._rows.clear()


@contextmanager
def open_parquet(path: Path, fields: Sequence[str]) -> Iterator[ParquetRows]:
    """Open a Parquet file for rows with these fields. If the block fails, there is no file, or the former one."""
    from pyarrow import parquet

    with atomic_write(path) as temporary, parquet.ParquetWriter(temporary, _make_schema(fields)) as writer:
        rows = ParquetRows(writer)
        yield rows
        rows.flush()


def _make_schema(fields: Sequence[str]) -> Any:
    import pyarrow as pa

    types = {
        "image": pa.string(),
        "predicted": pa.int64(),
        "label": pa.string(),
        "confidence": pa.float64(),
        "exit": pa.int64(),
        "cost": pa.float64(),
        "error": pa.string(),
        "set": pa.list_(pa.int64()),
        "set_labels": pa.list_(pa.string()),
        "abstained": pa.bool_(),
        "probs": pa.list_(pa.float64()),
    }
    return pa.schema([(name, types[name]) for name in fields])


def _to_utf8(value: Any) -> Any:
    return to_utf8(value) if isinstance(value, str) else value
