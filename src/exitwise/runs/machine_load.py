"""Load of this machine by other programs, which makes measured times unreliable."""

import os
import time
from pathlib import Path

BUSY = 0.1  # share of all cores above which times are not reliable
_STAT = Path("/proc/stat")


def measure_load(seconds: float = 1.0) -> float | None:
    """Return the share of all cores that programs use while this one sleeps; None if the system does not tell."""
    before = _read_times()
    if before is None:
        try:
            return min(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
        except (AttributeError, OSError):  # no such number on Windows
            return None
    time.sleep(seconds)
    after = _read_times()
    total = 0 if after is None else after[0] - before[0]
    return None if after is None or total <= 0 else min(max(1 - (after[1] - before[1]) / total, 0.0), 1.0)


def _read_times() -> tuple[int, int] | None:
    """Return the total and the idle time of all cores since the start of the system, in ticks."""
    try:
        values = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
    except (IndexError, OSError, ValueError):
        return None
    return (sum(values), values[3] + values[4]) if len(values) >= 5 else None


def describe_load(load: float | None) -> str | None:
    """Return a warning if the machine is too busy to trust measured times."""
    if load is None or load <= BUSY:
        return None
    return (
        f"other programs use {load:.0%} of this machine's {os.cpu_count()} cores: the times are not reliable, "
        f"measure again when it is idle"
    )
