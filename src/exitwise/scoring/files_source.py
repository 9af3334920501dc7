"""Files of a source: those in a folder, of a glob pattern, or one file."""

import fnmatch
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from exitwise.core.errors import InputError
from exitwise.core.image_files import SUFFIXES
from exitwise.scoring.storage import Entry, Storage, describe_error

IMAGES, TAR, PARQUET = "images", "tar", "parquet"  # kinds of files
_COMPRESSED_TAR = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_MAGIC = re.compile(r"[*?\[]")


class SourceFile(NamedTuple):
    """A file of a source: its name in the source, its path in the storage, and its kind."""

    name: str
    path: str
    kind: str
    entry: Entry


def file_kind(name: str) -> str | None:
    """Return the kind of a file by its suffix, None for other files."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in SUFFIXES:
        return IMAGES
    return {".tar": TAR, ".parquet": PARQUET}.get(suffix)


def has_pattern(path: str) -> bool:
    """Return whether a path has the characters of a glob pattern."""
    return _MAGIC.search(path) is not None


def find_files(storage: Storage, path: str) -> Iterator[SourceFile]:
    """Yield the files of a folder, a glob pattern or one path, in the order of the parts of their names.

    All have one kind. Files of other kinds in a folder or pattern are left out, but not images beside tar files or
    Parquet.

    Raises:
        InputError: If there are none, their kinds differ, or a folder cannot be read.
    """
    kind, first = None, ""
    for name, file_path, entry in _candidates(storage, path):
        if name.lower().endswith(_COMPRESSED_TAR):
            raise InputError(f"{storage.name(file_path)} is compressed, so its images cannot be found: decompress it")
        found = file_kind(name)
        if found is None:
            continue
        if kind is not None and found != kind:
            raise InputError(
                f"{storage.name(path)} holds {_describe(kind)} ({first}) and {_describe(found)} ({name}): "
                f"name one kind with a pattern such as '*{PurePosixPath(first).suffix}'"
            )
        kind, first = found, first or name
        yield SourceFile(name, file_path, found, entry)
    if kind is None:
        raise InputError(f"{storage.name(path)} {'matches' if has_pattern(path) else 'holds'} no images")


def _describe(kind: str) -> str:
    return {IMAGES: "images", TAR: "tar files", PARQUET: "Parquet files"}[kind]


def _candidates(storage: Storage, path: str) -> Iterator[tuple[str, str, Entry]]:
    """Yield the name in the source, the path and the entry of every file that is meant."""
    entry = storage.stat(path)
    if entry is None and has_pattern(path):
        yield from _match_pattern(storage, path)
    elif entry is None:
        raise InputError(f"{storage.name(path)} does not exist")
    elif entry.is_folder:
        yield from _walk(storage, path, "", None)
    else:
        yield entry.name, path, entry


def _walk(storage: Storage, folder: str, below: str, depth: int | None) -> Iterator[tuple[str, str, Entry]]:
    """Yield the files in a folder and, down to `depth`, its subfolders; only one folder's names are held at a time."""
    try:
        entries = storage.list_folder(folder)
    except OSError as error:
        raise InputError(f"{storage.name(folder)} cannot be read ({describe_error(error)})") from None
    for entry in entries:
        name, path = f"{below}{entry.name}", f"{folder.rstrip('/')}/{entry.name}"
        if not entry.is_folder:
            yield name, path, entry
        elif depth is None or depth > 1:
            yield from _walk(storage, path, f"{name}/", None if depth is None else depth - 1)


def _match_pattern(storage: Storage, pattern: str) -> Iterator[tuple[str, str, Entry]]:
    """Yield the files that match a pattern; ** stands for any number of folders, and * matches no hidden file."""
    parts = pattern.split("/")
    fixed = next(number for number, part in enumerate(parts) if has_pattern(part))
    root, rest = "/".join(parts[:fixed]) or "/", parts[fixed:]
    if storage.stat(root) is None:
        raise InputError(f"{storage.name(root)} does not exist")
    depth = None if "**" in rest else len(rest)
    for name, path, entry in _walk(storage, root, "", depth):
        if _matches(name.split("/"), rest):
            yield name, path, entry


def _matches(names: list[str], parts: list[str]) -> bool:
    """Return whether the parts of a name match those of a pattern."""
    if not parts:
        return not names
    if parts == ["**"]:
        return bool(names) and not any(name.startswith(".") for name in names)
    if parts[0] == "**":
        is_hidden = bool(names) and names[0].startswith(".")
        return _matches(names, parts[1:]) or (len(names) > 1 and not is_hidden and _matches(names[1:], parts))
    if not names or (names[0].startswith(".") and not parts[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])
