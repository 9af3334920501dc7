"""Append-only CSV and JSONL files: they hold only complete rows, also after a crash, and can be resumed."""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from exitwise.core.errors import InputError


class Format(Protocol):
    """Conversion of rows to bytes and back."""

    def header(self, fields: Sequence[str]) -> bytes: ...
    def row(self, row: Mapping[str, Any]) -> bytes: ...
    def complete_records(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the complete records of a file, without a truncated one at its end."""
        ...

    def read(self, record: bytes, fields: Sequence[str]) -> dict[str, Any]: ...


class Csv:
    """CSV with a header row. File names may contain any bytes, even line ends."""

    def header(self, fields: Sequence[str]) -> bytes:
        return self._line(fields)

    def row(self, row: Mapping[str, Any]) -> bytes:
        return self._line(["" if value is None else value for value in row.values()])

    def _line(self, values: Iterable[Any]) -> bytes:
        text = io.StringIO(newline="")
        cells = [str(value) for value in values]
        quoted = any("\r" in cell for cell in cells)  # `csv` does not quote a carriage return by itself
        csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL).writerow(cells)
        return text.getvalue().encode(errors="surrogateescape")

    def complete_records(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        record = b""
        for line in lines:
            record += line
            if record.endswith(b"\n") and record.count(b'"') % 2 == 0:  # a name in quotes may hold the end of a line
                yield record
                record = b""

    def read(self, record: bytes, fields: Sequence[str]) -> dict[str, Any]:
        values = next(csv.reader(io.StringIO(record.decode(errors="surrogateescape"), newline="")), [])
        if len(values) != len(fields):
            raise ValueError
        return dict(zip(fields, values, strict=True))


class Jsonl:
    """One JSON object per line."""

    def header(self, fields: Sequence[str]) -> bytes:
        return b""

    def row(self, row: Mapping[str, Any]) -> bytes:
        return json.dumps(row, allow_nan=False).encode() + b"\n"

    def complete_records(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        return (line for line in lines if line.endswith(b"\n"))

    def read(self, record: bytes, fields: Sequence[str]) -> dict[str, Any]:
        row = json.loads(record)
        if not isinstance(row, dict) or not set(fields) <= set(row):
            raise ValueError
        return row


FORMATS: Mapping[str, Format] = {"csv": Csv(), "jsonl": Jsonl()}


class RowFile:
    """File to which rows are appended. A row that cannot be written completely is removed."""

    def __init__(self, path: Path, format: Format, fields: Sequence[str], resume: bool = False) -> None:
        self.path, self._format, self._fields = path, format, fields
        exists = path.exists() and path.stat().st_size > 0
        self._end = self._complete_size() if exists and resume else 0
        self._file = path.open("r+b" if path.exists() else "xb", buffering=0)
        self._file.truncate(self._end)
        self._file.seek(self._end)
        if not self._end:
            self._write(format.header(fields))

    def _complete_size(self) -> int:
        """Return the size of the complete rows in bytes."""
        with self.path.open("rb") as file:
            return sum(len(record) for record in self._format.complete_records(file))

    def existing_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that the file already holds."""
        header = self._format.header(self._fields)
        with self.path.open("rb") as file:
            if file.read(len(header)) != header:
                raise InputError(f"{self.path} does not begin with the columns {', '.join(self._fields)}")
            for number, record in enumerate(self._format.complete_records(file), start=1):
                try:
                    yield self._format.read(record, self._fields)
                except (ValueError, csv.Error):
                    raise InputError(f"{self.path}: row {number} was not written by exitwise predict") from None

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._write(b"".join(self._format.row({name: row[name] for name in self._fields}) for row in rows))

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except BaseException as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            raise
        self._end += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()
