"""Atomic writes of files and folders, and JSON with a digest. Does not import torch; for tensors see `tensorfiles`."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from re import fullmatch
from typing import Any

from exitwise.core.errors import InputError, shorten

DIGEST_KEY = "sha256"
_PARTIAL_SUFFIX = ".part"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` if the block succeeds, delete it otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_PARTIAL_SUFFIX, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        _flush_to_disk(temporary)  # or a power failure could leave an empty file under the new name
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove_partial_files(folder: Path) -> None:
    """Delete partial files left behind by a killed process."""
    for partial_file in folder.glob(f".*{_PARTIAL_SUFFIX}"):
        partial_file.unlink(missing_ok=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` as indented JSON, atomically; raise ValueError for non-finite values.

    Data with a `format` also gets its digest, in the entry "sha256" after `format` and `version`, which `read_json`
    checks.
    """
    contents = json.loads(json.dumps(data, allow_nan=False))
    if "format" in contents:
        contents.pop(DIGEST_KEY, None)  # of data that was read in another way than by `read_json`
        first = {key: contents.pop(key) for key in ("format", "version") if key in contents}
        contents = {**first, DIGEST_KEY: _json_digest({**first, **contents}), **contents}
    text = json.dumps(contents, indent=2)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, without its digest.

    Raises:
        InputError: If the file is missing, not JSON, not an object, or does not match its digest.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        data = parse_json(path.read_text(encoding="utf-8"), allow_nan=False)
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} must hold a JSON object, but holds a {type(data).__name__}")
    check_digest_name(path, data, DIGEST_KEY)
    if DIGEST_KEY in data and data.pop(DIGEST_KEY) != _json_digest(data):
        raise InputError(
            f"{path} has changed since it was written: make it again or, after an edit of your own, "
            f'remove its entry "{DIGEST_KEY}"'
        )
    return data


def parse_json(text: str | bytes, allow_nan: bool = True) -> Any:
    """Return the value of a JSON text; raise ValueError for keys that occur twice, and for NaN unless it is allowed."""
    parse_constant = None if allow_nan else _refuse_constant
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=parse_constant)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{shorten(twice)} occurs twice")
    return data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}")


def check_digest_name(path: Path, entries: Mapping[str, Any], name: str) -> None:
    """Raise InputError if an entry other than `name` holds a digest: damage must not make a file without a digest."""
    for key, value in entries.items():
        if key != name and isinstance(value, str) and fullmatch(r"\S{64}", value):
            raise InputError(f"{path} is damaged: {shorten(key)} holds its digest instead of {name!r}")


def _json_digest(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON data: independent of the order of keys and of the layout of the text."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def atomic_directory(
    directory: str | Path, force: bool = False, marker: str = "run.json", noun: str = "a run"
) -> Iterator[Path]:
    """Yield a temporary folder to fill; rename it to `directory` if the block succeeds, delete it otherwise.

    Args:
        directory: Final path of the folder.
        force: Replace an existing folder, but only if it contains `marker`.
        marker: File that a replaceable folder contains.
        noun: The folder's kind with its article, for messages.
    """
    directory = Path(directory)
    if directory.resolve() == Path.cwd().resolve():
        raise InputError(f"{directory} is the current folder: name a folder inside it")
    _check_free(directory, force, marker, noun)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise InputError(f"{directory} cannot be created ({error.strerror}): choose another path") from None
    try:
        yield new
        new.chmod(0o755)
        _check_free(directory, force, marker, noun)  # another command may have created it meanwhile
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
            directory.rename(old / "run")
            new.rename(directory)
            shutil.rmtree(old)
        else:
            new.rename(directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _check_free(directory: Path, force: bool, marker: str, noun: str) -> None:
    """Raise InputError if `directory` holds something that must not be replaced."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not (directory / marker).is_file():
        raise InputError(f"{directory} exists and is not {noun}: choose another path")
    if not force:
        raise InputError(f"{directory} already holds {noun}: choose another path, or --force to replace it")
