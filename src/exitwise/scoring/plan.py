"""The plan of a job: the images of every shard, written once as Parquet files with a row group per shard."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from exitwise.core.errors import InputError
from exitwise.scoring.items import Item
from exitwise.scoring.storage import Storage, is_damage

_SHARDS_PER_FILE = 256


@dataclass(frozen=True)
class PlanSummary:
    """Number of images and shards, and a SHA-256 of ids, positions, sizes and times of change."""

    images: int
    shards: int
    digest: str


def summarize(shards: Iterable[list[Item]]) -> PlanSummary:
    """Return the summary of a listing without writing a plan."""
    summary = _Summary()
    for shard in shards:
        summary.add(shard)
    return summary.result()


def write_plan(storage: Storage, folder: str, source: str, shards: Iterable[list[Item]]) -> PlanSummary:
    """Write the plan of a listing.

    Args:
        storage: Where to write.
        folder: Folder for the files.
        source: The source, for messages.
        shards: The images of every shard.

    Raises:
        InputError: If two images have the same id.
    """
    summary, hashes = _Summary(), list[Any]()
    for number, shards_of_file in enumerate(_in_groups(shards, _SHARDS_PER_FILE)):
        data = BytesIO()
        with _writer(data) as writer:
            for shard in shards_of_file:
                summary.add(shard)
                hashes.append(np.fromiter((hash(item.id) for item in shard), np.int64, len(shard)))
                writer.write_table(_make_table(shard))
        storage.write(_file(folder, number), data.getvalue())
    result = summary.result()
    _check_unique(storage, folder, source, np.concatenate(hashes), -(-result.shards // _SHARDS_PER_FILE))
    return result


def read_shard(storage: Storage, folder: str, shard: int) -> list[Item]:
    """Return the images of one shard."""
    with _open(storage, _file(folder, shard // _SHARDS_PER_FILE)) as file:
        return _items(file.read_row_group(shard % _SHARDS_PER_FILE, use_threads=False))


class _Summary:
    def __init__(self) -> None:
        self._digest, self._images, self._shards = hashlib.sha256(), 0, 0

    def add(self, shard: list[Item]) -> None:
        """Add the images of a shard."""
        self._images, self._shards = self._images + len(shard), self._shards + 1
        lines = [f"{item.id}\0{item.start}\0{item.size}\0{item.mtime}\n" for item in shard]
        self._digest.update("".join(lines).encode())

    def result(self) -> PlanSummary:
        return PlanSummary(self._images, self._shards, self._digest.hexdigest())


def _in_groups(shards: Iterable[list[Item]], size: int) -> Iterator[Iterator[list[Item]]]:
    """Yield iterators over `size` shards each; one must be used up before the next."""
    iterator = iter(shards)
    for first in iterator:

        def group(first: list[Item] = first) -> Iterator[list[Item]]:
            yield first
            for _, shard in zip(range(size - 1), iterator, strict=False):
                yield shard

        yield group()


def _file(folder: str, number: int) -> str:
    return f"{folder}/{number:06}.parquet"


def _schema() -> Any:
    import pyarrow as pa

    integers = [(name, pa.int64()) for name in ("start", "size", "mtime")]
    return pa.schema([("id", pa.string()), ("path", pa.binary()), *integers])


def _writer(data: BytesIO) -> Any:
    from pyarrow import parquet

    return parquet.ParquetWriter(data, _schema(), compression="zstd")


def _make_table(shard: list[Item]) -> Any:
    import pyarrow as pa

    columns = zip(*shard, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _schema(), strict=True)]
    return pa.Table.from_arrays(arrays, schema=_schema())


def _open(storage: Storage, path: str) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(BytesIO(storage.read(path)) if storage.is_local else storage.open(path))
    except (OSError, pa.ArrowException) as error:
        if not isinstance(error, FileNotFoundError) and not is_damage(storage, error):
            raise
        raise InputError(f"{storage.name(path)} is missing or damaged: start the job anew with --force") from None


def _items(table: Any) -> list[Item]:
    return [Item(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]


def _check_unique(storage: Storage, folder: str, source: str, hashes: Any, files: int) -> None:
    """Raise an InputError if an id occurs twice; only ids with equal hashes are compared."""
    hashes.sort()
    twice = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not twice:
        return
    seen: dict[str, bytes | None] = {}
    for number in range(files):
        with _open(storage, _file(folder, number)) as file:
            for group in range(file.num_row_groups):
                for item in _items(file.read_row_group(group)):
                    if hash(item.id) in twice:
                        if item.id in seen:
                            first, second = (_show(path) for path in (seen[item.id], item.path))
                            where = f"in {first}" if first == second else f"in {first} and {second}"
                            raise InputError(f"{source}: the id {item.id!r} occurs twice, {where}: ids must differ")
                        seen[item.id] = item.path


def _show(path: bytes | None) -> str:
    return "a row without a path" if path is None else path.decode(errors="backslashreplace")
