"""Reading of the images of a shard: files, members of a tar file, or rows of a Parquet file."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from exitwise.core.errors import InputError
from exitwise.scoring import parquet_source
from exitwise.scoring.files_source import PARQUET, TAR
from exitwise.scoring.items import Item
from exitwise.scoring.job import Job
from exitwise.scoring.storage import Locations, Storage, open_in_order

Reader = Iterator[tuple[Item, bytes | Path | InputError]]

_READ_AHEAD = 16  # remote files that are read at a time: each waits for a round trip


def read_items(job: Job, locations: Locations, items: list[Item]) -> Reader:
    """Yield every image of a shard as bytes, as a local path, or as the error that prevents reading it."""
    if job.kind == PARQUET:
        return _read_rows(locations, items, job.image_column or "")
    return _read_members(locations, items) if job.kind == TAR else _read_files(locations, items)


def _read_files(locations: Locations, items: list[Item]) -> Reader:
    """Yield local files as paths; remote ones are read ahead in threads."""
    reads: deque[tuple[Item, Path | InputError | Future[bytes | InputError]]] = deque()
    pool = ThreadPoolExecutor(_READ_AHEAD)  # starts no thread before the first remote file
    remaining = iter(items)
    try:
        while True:
            for item in islice(remaining, _READ_AHEAD - len(reads)):
                reads.append((item, _begin_read(pool, locations, item)))
            if not reads:
                return
            item, image = reads.popleft()
            yield item, image.result() if isinstance(image, Future) else image
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_read(
    pool: ThreadPoolExecutor, locations: Locations, item: Item
) -> Path | InputError | Future[bytes | InputError]:
    if item.path is None:
        return InputError(f"{item.id} has no path: the column is null")
    storage, path = locations.find(os.fsdecode(item.path))
    return Path(path) if storage.is_local else pool.submit(_read_file, storage, path)


def _read_file(storage: Storage, path: str) -> bytes | InputError:
    try:
        return storage.read(path)
    except (FileNotFoundError, PermissionError) as error:
        return InputError(f"{storage.name(path)} cannot be read as an image ({error.strerror or 'not found'})")


def _read_members(locations: Locations, items: list[Item]) -> Reader:
    storage, path = locations.find(os.fsdecode(items[0].path or b""))
    with open_in_order(storage, path) as file:
        for item in items:
            file.seek(item.start or 0)
            data = file.read(item.size or 0)
            is_whole = len(data) == item.size
            yield item, data if is_whole else InputError(f"{item.id} is cut off: {storage.name(path)} ends early")


def _read_rows(locations: Locations, items: list[Item], column: str) -> Reader:
    storage, path = locations.find(os.fsdecode(items[0].path or b""))
    start = items[0].start or 0
    found = parquet_source.read_images(storage, path, column, start, start + len(items))
    for item, data in zip(items, found, strict=True):
        yield item, InputError(f"{item.id} has no image: the column is null") if data is None else data
