"""Images of a source, cut into shards: files, members of tar files, and rows of Parquet files."""

import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import NamedTuple

from exitwise.core.errors import InputError
from exitwise.core.image_files import SUFFIXES
from exitwise.core.text import to_utf8
from exitwise.scoring import parquet_source
from exitwise.scoring.files_source import IMAGES, PARQUET, TAR, SourceFile, file_kind, find_files, has_pattern
from exitwise.scoring.storage import Storage, describe_error, is_uri, open_in_order, open_location


class Item(NamedTuple):
    """An image of a source.

    Args:
        id: Text that differs for all images of a source and does not depend on where the source lies.
        path: Path or URI of the file that holds the image, encoded as file names are.
        start: Offset in bytes in a tar file, or row in a Parquet file; None for an image file.
        size: Size in bytes, None if it is unknown.
        mtime: Time in ns at which the file was changed, None if it is unknown.
    """

    id: str
    path: bytes | None
    start: int | None = None
    size: int | None = None
    mtime: int | None = None


class Listing(NamedTuple):
    """The images of a source as shards, and how they are read: as files, tar members or rows of Parquet files."""

    kind: str
    shards: Iterator[list[Item]]
    image_column: str | None = None


def list_source(source: str, shard_size: int, column: str | None = None, id_column: str | None = None) -> Listing:
    """List the images of a source. The shards are made while they are iterated over.

    Args:
        source: A folder, a glob pattern, a text file with a name per line, or tar or Parquet files.
        shard_size: Largest number of images in a shard.
        column: Column of Parquet files that holds the bytes or the paths of the images.
        id_column: Column of Parquet files that holds the ids.

    Raises:
        InputError: If the source is empty, cannot be read or mixes kinds of files.
    """
    if source == "-":
        raise InputError("a job reads its list again when it resumes, so it cannot come from stdin: name a file")
    storage, path = open_location(source, "source")
    try:
        is_list = _is_list(storage, path)
    except OSError as error:
        raise InputError(f"{source} cannot be read ({describe_error(error)})") from None
    if is_list:
        items = _list_names(storage, path)
        kind = IMAGES
    else:
        files = find_files(storage, path)
        first = next(files)
        kind = first.kind
        files = chain([first], files)
        if kind == PARQUET:
            return _list_parquet(storage, files, shard_size, column, id_column)
        if kind == TAR:
            shards = (shard for file in files for shard in _cut(_list_members(storage, file), shard_size))
            return Listing(TAR, _not_empty(source, _check_columns(shards, column, id_column)))
        items = (_file_item(storage, file) for file in files)
    return Listing(kind, _not_empty(source, _check_columns(_cut(items, shard_size), column, id_column)))


def _check_columns(shards: Iterator[list[Item]], column: str | None, id_column: str | None) -> Iterator[list[Item]]:
    if column is not None or id_column is not None:
        raise InputError("`column` and `id_column` are for Parquet files, but the source has none")
    return shards


def _not_empty(source: str, shards: Iterator[list[Item]]) -> Iterator[list[Item]]:
    first = next(shards, None)
    if first is None:
        raise InputError(f"{source} holds no images")
    return chain([first], shards)


def _cut(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while shard := list(islice(iterator, size)):
        yield shard


def _file_item(storage: Storage, file: SourceFile) -> Item:
    path = os.fsencode(storage.name(file.path))
    return Item(to_utf8(file.name), path, None, file.entry.size, file.entry.mtime)


def _is_list(storage: Storage, path: str) -> bool:
    entry = storage.stat(path)
    if entry is None or entry.is_folder:
        return False
    return file_kind(path) is None and ".tar" not in entry.name and not (has_pattern(path) and entry is None)


def _list_names(storage: Storage, path: str) -> Iterator[Item]:
    """Yield an image per line of a text file; names are relative to the folder of the file."""
    folder = path.rpartition("/")[0]
    try:
        with storage.open(path) as file:
            for line in file:
                if name := os.fsdecode(line.rstrip(b"\r\n")):
                    yield locate(storage, folder, name)
    except OSError as error:
        raise InputError(f"{storage.name(path)} cannot be read ({describe_error(error)})") from None


def locate(storage: Storage, folder: str, name: str, id: str | None = None) -> Item:
    """Return the image file that a list or a column names: an absolute path, a URI, or relative to `folder`."""
    path = name
    if not is_uri(name):
        path = storage.name(name if name.startswith("/") else f"{folder}/{name}")
    size = mtime = None
    if storage.is_local and not is_uri(name):
        with suppress(OSError):  # such as a folder that must not be read: the image gets a row with the error
            entry = storage.stat(path)
            size, mtime = (None, None) if entry is None else (entry.size, entry.mtime)
    return Item(to_utf8(name) if id is None else id, os.fsencode(path), None, size, mtime)


def _list_members(storage: Storage, file: SourceFile) -> Iterator[Item]:
    """Yield the images of a tar file; the id is the name in the tar file without its suffix, after that of the file."""
    path = os.fsencode(storage.name(file.path))
    try:
        with open_in_order(storage, file.path) as opened, tarfile.open(fileobj=opened, mode="r:") as members:
            for member in members:
                suffix = PurePosixPath(member.name).suffix
                if member.isreg() and suffix.lower() in SUFFIXES:
                    id = f"{to_utf8(file.name)}/{to_utf8(member.name.removesuffix(suffix))}"
                    yield Item(id, path, member.offset_data, member.size, file.entry.mtime)
                members.members.clear()  # type: ignore[attr-defined]  # it would hold all members until the end
    except (OSError, tarfile.TarError) as error:
        name = storage.name(file.path)
        raise InputError(f"{name} cannot be read as a tar file ({describe_error(error)})") from None


def _list_parquet(
    storage: Storage, files: Iterable[SourceFile], shard_size: int, column: str | None, id_column: str | None
) -> Listing:
    files = iter(files)
    first = next(files)
    layout = parquet_source.find_columns(storage, first.path, column, id_column)

    def shards() -> Iterator[list[Item]]:
        for file in chain([first], files):
            name, path = to_utf8(file.name), os.fsencode(storage.name(file.path))
            folder = file.path.rpartition("/")[0]
            for start, stop, ids, paths in parquet_source.read_slices(storage, file.path, layout, shard_size):
                found = ids if ids is not None else [f"{name}#{row}" for row in range(start, stop)]
                if paths is None:
                    yield [Item(id, path, start + row, None, file.entry.mtime) for row, id in enumerate(found)]
                else:
                    yield [
                        Item(id, None) if text is None else locate(storage, folder, text, id)
                        for id, text in zip(found, paths, strict=True)
                    ]

    kind = IMAGES if layout.holds_paths else PARQUET
    return Listing(kind, _not_empty(storage.name(first.path), shards()), layout.image)
