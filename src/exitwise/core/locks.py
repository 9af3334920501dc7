"""Locks of files against other processes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exitwise.core.errors import InputError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)


@contextmanager
def exclusive_lock(path: Path, busy: str) -> Iterator[None]:
    """Hold an exclusive lock of a file inside the block; the system releases it when the process ends.

    Args:
        path: The file, which is created.
        busy: Message of the InputError if another process holds the lock.
    """
    with path.open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(busy) from None
            except OSError:
                _log.warning("%s cannot be locked on this file system: run only one command on it at a time", path)
        yield
