"""Interruptions of a training: signals, and a second process in the same folder."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from exitwise.core import distributed
from exitwise.core.files import remove_partial_files
from exitwise.core.locks import exclusive_lock


class TrainingInterruptedError(Exception):
    """Training was stopped by a signal, after its checkpoint was written.

    Args:
        signal_number: The signal, such as `signal.SIGTERM`.
        progress: Epochs and batches that are done, as text.
    """

    def __init__(self, signal_number: int, progress: str) -> None:
        super().__init__(progress)
        self.signal_number = signal_number


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock the run directory against concurrent training (released on process exit) and delete partial files."""
    with ExitStack() as locks:
        distributed.run_on_rank_zero(lambda: _acquire_lock(folder, locks))
        yield


def _acquire_lock(folder: Path, locks: ExitStack) -> None:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    locks.enter_context(exclusive_lock(checkpoints / "lock", f"{folder} is being trained by another process"))
    for path in (folder, checkpoints):
        remove_partial_files(path)


@contextmanager
def collect_stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT so that training stops after the current batch; a second signal stops it at once."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            signal.signal(number, previous_handlers[number])
            signal.raise_signal(number)
        received.append(number)

    previous_handlers: dict[int, Any] = {}
    try:
        for number in (int(signal.SIGTERM), int(signal.SIGINT)):
            previous_handlers[number] = signal.signal(number, receive)
    except ValueError:  # only the main thread receives signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
