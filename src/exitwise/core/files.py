"""Reading and writing files: whole or not at all, and never code. Without torch; tensors are in `tensorfiles`."""

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
    """A temporary name beside `path` to write to; renamed over `path` when the block ends well, removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_PARTIAL_SUFFIX, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        _flush_to_disk(temporary)  # or a power failure could leave the new name with nothing behind it
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove_partial_files(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote to a folder."""
    for left in folder.glob(f".*{_PARTIAL_SUFFIX}"):
        left.unlink(missing_ok=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, indent=2, allow_nan=False)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
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
    directory: str | Path, force: bool = False, marker: str = "run.json", what: str = "a run"
) -> Iterator[Path]:
    """A new folder to fill; it becomes the run when the block ends well, and vanishes otherwise.

    An existing run is replaced only with `force`, and anything else that is there never. The file `marker` tells a run,
    or whatever else is made, from other folders.
    """
    directory = Path(directory)
    if directory.resolve() == Path.cwd().resolve():
        raise InputError(f"{directory} is the current folder: name a folder inside it")
    _check_free(directory, force, marker, what)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise InputError(f"{directory} cannot be made ({error.strerror}): choose another place") from None
    try:
        yield new
        new.chmod(0o755)
        _check_free(directory, force, marker, what)  # another command may have made it meanwhile
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
    """Refuse a place where something is that must not be replaced."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not (directory / marker).is_file():
        raise InputError(f"{directory} exists and is not {noun}: choose another place")
    if not force:
        raise InputError(f"{directory} already holds {noun}: choose another place, or --force to replace it")
