"""Reading and writing files: whole or not at all, and never code. Without torch; tensors are in `tensorfiles`."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exitwise.core.errors import InputError

_UNFINISHED = ".part"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed over `path` when the block ends well, removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_UNFINISHED, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        _to_disk(temporary)  # or a power failure could leave the new name with nothing behind it
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove_unfinished(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote to a folder."""
    for left in folder.glob(f".*{_UNFINISHED}"):
        left.unlink(missing_ok=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, indent=2, allow_nan=False)
    with replacing(path) as temporary:
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
