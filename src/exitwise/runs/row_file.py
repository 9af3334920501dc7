"""Append-only CSV and JSONL files: they hold only complete rows, also after a crash, and can be resumed."""

import csv
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from exitwise.core.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

# Columns of a CSV file that are not called by the key of the row: the header says where exits are counted from.
_CSV_NAMES = {"exit": "exit_from_0"}


class Format(Protocol):
    """Conversion of rows to bytes and back."""

    def header(self, fields: Sequence[str]) -> bytes: ...
    def former_header(self, fields: Sequence[str]) -> bytes:
        """Return the header that earlier versions wrote."""
        ...

    def row(self, row: Mapping[str, Any]) -> bytes: ...
    def cell(self, value: Any) -> Any:
        """Return what `read` returns for a value that `row` wrote."""
        ...

    def complete_records(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the complete records of a file, without a truncated one at its end."""
        ...

    def read(self, record: bytes, fields: Sequence[str]) -> dict[str, Any]: ...


class Csv:
    """CSV with a header row. File names may contain any bytes, even line ends.

    Args:
        safe: Put an apostrophe before text that a spreadsheet would compute: a cell that begins with = + - @, a tab or
            a carriage return.
    """

    def __init__(self, safe: bool = False) -> None:
        self._safe = safe

    def header(self, fields: Sequence[str]) -> bytes:
        return self._line([_CSV_NAMES.get(name, name) for name in fields])

    def former_header(self, fields: Sequence[str]) -> bytes:
        return self._line(fields)

    def row(self, row: Mapping[str, Any]) -> bytes:
        return self._line(["" if value is None else self.cell(_to_text(value)) for value in row.values()])

    def cell(self, value: Any) -> Any:
        """Return the content of the cell for a value: the value, or a guarded text."""
        is_formula = self._safe and isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        return f"'{value}" if is_formula else value

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


def _to_text(value: Any) -> Any:
    """Return a list and a truth value as JSON, any other value unchanged."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | bool) else value


class Jsonl:
    """One JSON object per line."""

    def header(self, fields: Sequence[str]) -> bytes:
        return b""

    def former_header(self, fields: Sequence[str]) -> bytes:
        return b""

    def row(self, row: Mapping[str, Any]) -> bytes:
        return json.dumps(row, allow_nan=False).encode() + b"\n"

    def cell(self, value: Any) -> Any:
        return value

    def complete_records(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        return (line for line in lines if line.endswith(b"\n"))

    def read(self, record: bytes, fields: Sequence[str]) -> dict[str, Any]:
        row = json.loads(record)
        if not isinstance(row, dict) or not set(fields) <= set(row):
            raise ValueError
        return row


FORMATS: Mapping[str, Format] = {"csv": Csv(), "jsonl": Jsonl()}


class RowFile:
    """File to which one process appends rows. A row that cannot be written completely is removed.

    Args:
        path: The file. It is locked while it is open; nothing in it changes if another process holds the lock.
        format: Conversion of rows to bytes.
        fields: Keys of a row, in order.
        resume: Keep the complete rows that the file holds.
        replace: Replace a file that holds something, unless `resume`; otherwise it is an error.

    Raises:
        InputError: If another process writes to the file, or it exists and must not be replaced.
    """

    def __init__(
        self, path: Path, format: Format, fields: Sequence[str], resume: bool = False, replace: bool = True
    ) -> None:
        self.path, self._format, self._fields = path, format, fields
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644), "r+b", 0)
        try:
            self._lock()
            exists = os.fstat(self._file.fileno()).st_size > 0  # perhaps written since the command began
            if exists and not resume and not replace:
                raise InputError(f"{path} exists: --resume to continue it, --force to replace it")
            self._end = self._complete_size() if exists and resume else 0
            self._file.truncate(self._end)
            self._file.seek(self._end)
            if not self._end:
                self._write(format.header(fields))
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Lock the file against other writers; the lock ends with the process at the latest."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self.path} is being written by another process") from None
        except OSError:
            _log.warning("%s: this file system has no locks, so a second writer is not prevented", self.path)

    def _complete_size(self) -> int:
        """Return the size of the complete rows in bytes."""
        with self.path.open("rb") as file:
            return sum(len(record) for record in self._format.complete_records(file))

    def existing_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that the file already holds."""
        headers = [self._format.header(self._fields), self._format.former_header(self._fields)]
        with self.path.open("rb") as file:
            beginning = file.read(max(map(len, headers)))
            header = next((header for header in headers if beginning.startswith(header)), None)
            if header is None:
                raise InputError(f"{self.path} does not begin with the columns {', '.join(self._fields)}")
            file.seek(len(header))
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
