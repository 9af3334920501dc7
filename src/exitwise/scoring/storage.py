"""Files on local disks and on every file system that `pyarrow.fs` opens, with the few operations that a job needs.

Local paths are texts as Python's `os` uses them, so that names with any bytes work. Remote paths are those of pyarrow,
without the scheme; `Storage.name` puts it before them.
"""

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from exitwise.core.errors import InputError, first_line
from exitwise.core.files import atomic_write, remove_partial_files

T = TypeVar("T")

_TRIES, _PAUSE = 4, 0.5  # of a remote operation; the pause in seconds doubles
_GOOGLE_SECONDS = 15  # of the retries of Google's library in each try
_READ_BYTES = 4 << 20  # of a remote file that is read in order: one round trip for many small members
_FINAL_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class Entry(NamedTuple):
    """A file or folder: its name in its folder, and for files the size in bytes and the time of change in ns."""

    name: str
    is_folder: bool
    size: int | None
    mtime: int | None


class Storage(Protocol):
    """Operations on the files of one file system. Errors are `OSError`."""

    @property
    def is_local(self) -> bool: ...
    def name(self, path: str) -> str:
        """Return the path with its scheme, for messages and rows."""
        ...

    def list_folder(self, path: str) -> list[Entry]:
        """Return files and folders in a folder, sorted by name; links to folders are left out."""
        ...

    def stat(self, path: str) -> Entry | None:
        """Return a file or folder, None if there is none."""
        ...

    def open(self, path: str) -> Any:
        """Open a file for reading bytes at any position."""
        ...

    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes) -> None:
        """Write a file that is there with all its content, or not at all."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file, if there is one."""
        ...

    def remove_partial(self, folder: str) -> None:
        """Delete what killed processes left of files that they wrote."""
        ...


class LocalStorage:
    """Files of this machine, or of a network file system that is mounted."""

    is_local = True

    def name(self, path: str) -> str:
        return path

    def list_folder(self, path: str) -> list[Entry]:
        entries = []
        with os.scandir(path) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    entries.append(Entry(entry.name, True, None, None))
                elif entry.is_file():
                    status = entry.stat()
                    entries.append(Entry(entry.name, False, status.st_size, status.st_mtime_ns))
        return sorted(entries)

    def stat(self, path: str) -> Entry | None:
        try:
            status = Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # a zero byte
            return None
        if Path(path).is_dir():
            return Entry(Path(path).name, True, None, None)
        return Entry(Path(path).name, False, status.st_size, status.st_mtime_ns)

    def open(self, path: str) -> Any:
        return Path(path).open("rb")

    def read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        with atomic_write(Path(path)) as temporary:
            temporary.write_bytes(data)

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def remove_partial(self, folder: str) -> None:
        remove_partial_files(Path(folder))


class RemoteStorage:
    """Files of a `pyarrow.fs.FileSystem`, such as an object store, where a file appears when its upload is complete.

    An operation that fails is tried again, unless the file is missing or must not be read.

    Args:
        file_system: The file system.
        prefix: Text before its paths that makes them URIs, such as "s3://".
    """

    is_local = False

    def __init__(self, file_system: Any, prefix: str) -> None:
        self._files, self._prefix = file_system, prefix

    def name(self, path: str) -> str:
        return self._prefix + path

    def list_folder(self, path: str) -> list[Entry]:
        from pyarrow import fs

        found = _retry(lambda: self._files.get_file_info(fs.FileSelector(path, recursive=False)))
        return sorted(entry for info in found if (entry := _entry(info)) is not None)

    def stat(self, path: str) -> Entry | None:
        return _entry(_retry(lambda: self._files.get_file_info(path)))

    def open(self, path: str) -> Any:
        return _retry(lambda: self._files.open_input_file(path))

    def read(self, path: str) -> bytes:
        def read() -> bytes:
            with self._files.open_input_file(path) as file:
                return bytes(file.read())

        return _retry(read)

    def write(self, path: str, data: bytes) -> None:
        def write() -> None:
            self._files.create_dir(path.rpartition("/")[0], recursive=True)
            with self._files.open_output_stream(path) as file:
                file.write(data)

        _retry(write)

    def remove(self, path: str) -> None:
        if self.stat(path) is not None:
            _retry(lambda: self._files.delete_file(path))

    def remove_partial(self, folder: str) -> None:
        """Do nothing: an upload that was not completed leaves no file."""


def describe_error(error: Exception) -> str:
    """Return the reason in an error of a file system or of a library, in a line."""
    text = getattr(error, "strerror", None) or first_line(error)
    return text[max(0, text.find("AWS Error")) :]  # what comes before names the file, as our messages do


def describe_job_error(error: OSError, folder: str) -> str:
    """Return a line on a file of a job that could not be read or written, after which the job can be resumed."""
    return f"{error.filename or folder}: {describe_error(error)}. What is scored stays; the same command resumes"


def is_damage(storage: Storage, error: Exception) -> bool:
    """Return whether an error of reading a Parquet file means damage, not a lack of memory or of a connection.

    pyarrow raises an `OSError` without a number for damaged metadata, and for a connection that fails.
    """
    if isinstance(error, MemoryError):  # some of pyarrow's are also an `ArrowException`
        return False
    return not isinstance(error, OSError) or (error.errno is None and storage.is_local)


def open_in_order(storage: Storage, path: str) -> Any:
    """Open a file that is read from its beginning to its end, with few requests if it is remote."""
    file = storage.open(path)
    return file if storage.is_local else io.BufferedReader(file, _READ_BYTES)


def _entry(info: Any) -> Entry | None:
    from pyarrow import fs

    if info.type == fs.FileType.Directory:
        return Entry(info.base_name, True, None, None)
    return Entry(info.base_name, False, info.size, info.mtime_ns) if info.type == fs.FileType.File else None


def _retry(operation: Callable[[], T]) -> T:
    for attempt in range(_TRIES - 1):
        try:
            return operation()
        except _FINAL_ERRORS:
            raise
        except OSError:
            time.sleep(_PAUSE * 2**attempt)
    return operation()


def is_uri(location: str) -> bool:
    """Return whether a location has a scheme, such as s3://bucket/folder."""
    return "://" in location


def open_location(location: str, argument: str) -> tuple[Storage, str]:
    """Return the storage of a path or URI, and the path in it: absolute, without a slash at its end.

    Args:
        location: A path, or a URI that `pyarrow.fs.FileSystem.from_uri` opens.
        argument: The argument, for messages.

    Raises:
        InputError: If the scheme is unknown or the file system cannot be opened.
    """
    if not is_uri(location):
        return LocalStorage(), os.path.abspath(location)  # noqa: PTH100 (`Path.absolute` keeps `..`)
    from pyarrow import fs, lib

    try:
        file_system, path = fs.FileSystem.from_uri(_limit_retries(location))
    except (OSError, ValueError, NotImplementedError, lib.ArrowException) as error:
        raise InputError(f"`{argument}`: {location} cannot be opened ({describe_error(error)})") from None
    if isinstance(file_system, fs.LocalFileSystem):
        return LocalStorage(), os.path.abspath(path)  # noqa: PTH100
    path = path.rstrip("/")
    bare = location.partition("?")[0].rstrip("/")
    prefix = bare[: len(bare) - len(path)] if bare.endswith(path) else f"{location.partition('://')[0]}://"
    return RemoteStorage(file_system, prefix), path


def _limit_retries(location: str) -> str:
    """Return a URI of Google's storage with a limit of its retries: by default it tries for fifteen minutes."""
    if not location.startswith(("gs://", "gcs://")) or "retry_limit_seconds" in location:
        return location
    return f"{location}{'&' if '?' in location else '?'}retry_limit_seconds={_GOOGLE_SECONDS}"


class Locations:
    """Storages of paths and URIs, each opened once. Paths in the storage `base` need not be opened again."""

    def __init__(self, base: Storage | None = None) -> None:
        self._base, self._opened = base, dict[str, Storage]()

    def find(self, name: str) -> tuple[Storage, str]:
        """Return the storage of a path or URI as in rows, and the path in it."""
        if self._base is not None and not self._base.is_local and name.startswith(self._base.name("")):
            return self._base, name.removeprefix(self._base.name(""))
        if not is_uri(name):
            return LocalStorage(), name
        scheme, _, rest = name.partition("://")
        host = f"{scheme}://{rest.partition('/')[0]}"
        if host in self._opened:
            storage = self._opened[host]
            return storage, name.removeprefix(storage.name(""))
        storage, path = open_location(name, "source")
        if not storage.is_local:  # file://: the path has to be parsed every time
            self._opened[host] = storage
        return storage, path
