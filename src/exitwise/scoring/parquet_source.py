"""Parquet files as a source: a column of bytes or of paths of images, and optionally a column of ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from exitwise.core.errors import InputError
from exitwise.scoring.storage import Storage, describe_error

_NAMES = ("image", "image.bytes", "bytes", "jpg", "png", "path", "file", "file_name", "filename")  # usual columns


@dataclass(frozen=True)
class Columns:
    """The columns that are read: fields of nested columns have a dot in their name."""

    image: str
    id: str | None
    holds_paths: bool
    id_is_text: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)


def find_columns(storage: Storage, path: str, column: str | None, id_column: str | None) -> Columns:
    """Find the columns of a source in its first file.

    Raises:
        InputError: If a column is missing, has another type, or none of the usual names is there.
    """
    with _open(storage, path) as file:
        types = _column_types(file.schema_arrow)
    if column is None:
        column = next((name for name in _NAMES if types.get(name) in ("bytes", "text")), None)
    if column is None or types.get(column) not in ("bytes", "text"):
        named = "none has a usual name" if column is None else f"{column!r} is {types.get(column, 'missing')}"
        raise InputError(
            f"`column` must name a column of bytes or paths, but {named}; {storage.name(path)} has "
            f"{', '.join(f'{name} ({kind})' for name, kind in types.items())}"
        )
    if id_column is not None and types.get(id_column) not in ("text", "integer"):
        raise InputError(
            f"`id_column` must name a column of text or integers, but {id_column!r} is "
            f"{types.get(id_column, 'missing')} in {storage.name(path)}"
        )
    id_is_text = id_column is None or types[id_column] == "text"
    return Columns(column, id_column, types[column] == "text", id_is_text)


def _column_types(schema: Any) -> dict[str, str]:
    """Return the kind of each column by name; fields of a column with fields follow it as column.field."""
    import pyarrow as pa

    kinds: dict[str, str] = {}

    def add(name: str, type: Any) -> None:
        if pa.types.is_struct(type):
            for field in type:
                add(f"{name}.{field.name}", field.type)
        elif pa.types.is_binary(type) or pa.types.is_large_binary(type):
            kinds[name] = "bytes"
        elif pa.types.is_string(type) or pa.types.is_large_string(type):
            kinds[name] = "text"
        else:
            kinds[name] = "integer" if pa.types.is_integer(type) else str(type)

    for field in schema:
        add(field.name, field.type)
    return kinds


@contextmanager
def _open(storage: Storage, path: str) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with storage.open(path) as opened, parquet.ParquetFile(opened) as file:
            yield file
    except MemoryError:  # some of pyarrow's are both: the process has too little, and the file is good
        raise
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{storage.name(path)} cannot be read as Parquet ({describe_error(error)})") from None


def read_slices(
    storage: Storage, path: str, columns: Columns, size: int
) -> Iterator[tuple[int, int, list[str] | None, list[str | None] | None]]:
    """Yield slices of at most `size` rows: first row, row after the last, ids and, from a column of paths, paths.

    Whole row groups are kept together where they fit, because a row group is the least that can be read.
    """
    with _open(storage, path) as file:
        _check_schema(storage.name(path), file.schema_arrow, columns)
        names = [name for name in (columns.id, columns.image if columns.holds_paths else None) if name is not None]
        for start, stop, groups in _cut_row_groups(file, size):
            ids = paths = None
            if names:
                table = _read_rows(file, groups, names, start, stop)
                paths = _flatten(table, columns.image) if columns.holds_paths else None
                ids = None if columns.id is None else _check_ids(storage.name(path), columns.id, table, start)
            yield start, stop, ids, paths


def _check_schema(name: str, schema: Any, columns: Columns) -> None:
    types = _column_types(schema)
    expected = [(columns.image, "text" if columns.holds_paths else "bytes")]
    if columns.id is not None:
        expected.append((columns.id, "text" if columns.id_is_text else "integer"))
    for column, kind in expected:
        if types.get(column) != kind:
            raise InputError(
                f"{name} has another schema than the first file: "
                f"{column!r} is {types.get(column, 'missing')}, not {kind}"
            )


def _check_ids(name: str, column: str, table: Any, start: int) -> list[str]:
    ids = _flatten(table, column)
    if None in ids:
        raise InputError(f"{name}: row {start + ids.index(None)} has no {column!r}: ids must not be null")
    return list(map(str, ids))


def _cut_row_groups(file: Any, size: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield first row, row after the last and row groups: several that fit together, or a part of a large one."""
    start, stop, groups = 0, 0, list[int]()
    for number in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if groups and stop - start + rows > size:
            yield start, stop, groups
            start, groups = stop, []
        if rows > size:
            parts = -(-rows // size)
            bounds = [stop + rows * part // parts for part in range(parts + 1)]
            for first, last in zip(bounds, bounds[1:]):  # noqa: B905, RUF007
                yield first, last, [number]
            start = stop = bounds[-1]
        elif rows:
            stop, groups = stop + rows, [*groups, number]
    if groups:
        yield start, stop, groups


def _read_rows(file: Any, groups: list[int], names: list[str], start: int, stop: int) -> Any:
    before = sum(file.metadata.row_group(number).num_rows for number in range(groups[0]))
    return file.read_row_groups(groups, columns=names, use_threads=False).slice(start - before, stop - start)


def _flatten(table: Any, column: str) -> list[Any]:
    from pyarrow import compute

    name, _, field = column.partition(".")
    values = table.column(column) if column in table.column_names else table.column(name)
    if field and column not in table.column_names:
        values = compute.struct_field(values, field.split("."))
    found: list[Any] = values.to_pylist()
    return found


def read_images(storage: Storage, path: str, column: str, start: int, stop: int) -> Iterator[bytes | None]:
    """Yield the bytes in rows `start` to `stop` of a column, and None for null; few rows are held in memory."""
    with _open(storage, path) as file:
        position, groups = 0, list[int]()
        first = None
        for number in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if position < stop and position + rows > start:
                first = position if first is None else first
                groups.append(number)
            position += rows
        if first is None or position < stop:
            raise InputError(f"{storage.name(path)} has {position} rows, but had more when it was listed")
        skip, left = start - first, stop - start
        for batch in file.iter_batches(64, row_groups=groups, columns=[column], use_threads=False):
            if skip >= len(batch):
                skip -= len(batch)
                continue
            import pyarrow as pa

            values = _flatten(pa.Table.from_batches([batch]).slice(skip, left), column)
            skip, left = 0, left - len(values)
            yield from values
            if not left:
                return
