"""Atomic writes of files and folders, and JSON. Does not import torch; for tensors see `tensorfiles`."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exitwise.core.errors import InputError

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
    """Write `data` as indented JSON, atomically; raise ValueError for non-finite values."""
    text = json.dumps(data, indent=2, allow_nan=False)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise InputError if the file is missing, not JSON, or not an object."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} must hold a JSON object, but holds a {type(data).__name__}")
    return data


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
