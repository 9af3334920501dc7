"""The last minutes of a service, second by second: requests, latencies, exits and the policy in use. Pure Python.

Latencies are counted in bins that are 5 % wide, so that memory and time for a quantile do not grow with the load.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, exp, floor, log
from typing import Any

WINDOW = 120  # seconds that are kept
NOW = 10  # seconds over which the current values are taken
_BIN = log(1.05)


@dataclass
class _Second:
    """Counts of one second; `policy` is the last one that was recorded in it, None if there was none.

    `quantiles` are those of its latencies, computed once when it has passed.
    """

    requests: int = 0
    rejected: int = 0
    latencies: "Counter[int]" = field(default_factory=Counter)
    exits: "Counter[int]" = field(default_factory=Counter)
    policy: int | None = None

    @cached_property
    def quantiles(self) -> tuple[float | None, float | None]:
        return _quantile(self.latencies, 0.5), _quantile(self.latencies, 0.99)


class RecentLoad:
    """Counts of the last two minutes; several threads may use it.

    Args:
        clock: Clock in seconds.

    Example:
        >>> from exitwise.serving.recent import RecentLoad
        >>> clock = [7.0]
        >>> recent = RecentLoad(clock=lambda: clock[0])
        >>> for milliseconds in range(1, 101):
        ...     recent.add_answer(milliseconds / 1000)
        >>> clock[0] = 8.0
        >>> now = recent.summarize(num_exits=2)["now"]
        >>> now["requests_per_second"], round(now["p50_ms"], -1), round(now["p99_ms"], -1)
        (10.0, 50.0, 100.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seconds: dict[int, _Second] = {}

    def add_answer(self, seconds: float) -> None:
        """Count an answered request and its latency."""
        with self._lock:
            second = self._current()
            second.requests += 1
            second.latencies[floor(log(max(seconds, 1e-6)) / _BIN)] += 1

    def add_rejected(self) -> None:
        """Count a request that was refused or given up because of the load."""
        with self._lock:
            second = self._current()
            second.requests += 1
            second.rejected += 1

    def add_exits(self, exit: int, count: int) -> None:
        """Count images that exited."""
        with self._lock:
            self._current().exits[exit] += count

    def set_policy(self, policy: int) -> None:
        """Record the policy in use."""
        with self._lock:
            self._current().policy = policy

    def _current(self) -> _Second:
        """Return the counts of this second, and forget those that are too old."""
        now = floor(self._clock())
        second = self._seconds.get(now)
        if second is None:
            second = self._seconds[now] = _Second()
            for old in [key for key in self._seconds if key <= now - 2 * WINDOW]:
                del self._seconds[old]
        return second

    def summarize(self, num_exits: int) -> dict[str, Any]:
        """Return the series of the last `WINDOW` full seconds, the oldest first, and values of the last `NOW` of them.

        Latencies of seconds without an answer are None, and so is the policy of seconds before the first one.
        """
        with self._lock:
            now = floor(self._clock())
            nothing = _Second()
            seconds = [self._seconds.get(now - ago, nothing) for ago in range(WINDOW, 0, -1)]
            last = seconds[-NOW:]
            latencies: Counter[int] = Counter()
            for second in last:
                latencies.update(second.latencies)
            policies = [self._seconds[key].policy for key in sorted(self._seconds) if key <= now - WINDOW]
            current = next((policy for policy in reversed(policies) if policy is not None), None)
            policy_series = []
            for second in seconds:
                current = current if second.policy is None else second.policy
                policy_series.append(current)
            return {
                "requests": [second.requests for second in seconds],
                "rejected": [second.rejected for second in seconds],
                "p50_ms": [second.quantiles[0] for second in seconds],
                "p99_ms": [second.quantiles[1] for second in seconds],
                "policy": policy_series,
                "exits": [[second.exits[exit] for exit in range(num_exits)] for second in seconds],
                "now": {
                    "seconds": NOW,
                    "requests_per_second": sum(second.requests for second in last) / NOW,
                    "rejected_per_second": sum(second.rejected for second in last) / NOW,
                    "p50_ms": _quantile(latencies, 0.5),
                    "p99_ms": _quantile(latencies, 0.99),
                    "exit_shares": _shares([sum(second.exits[exit] for second in last) for exit in range(num_exits)]),
                },
            }


def _quantile(latencies: "Counter[int]", share: float) -> float | None:
    """Return the latency in milliseconds that a share of the requests does not exceed, to 5 %; None without any."""
    rank = ceil(share * latencies.total())
    for bin in sorted(latencies):
        rank -= latencies[bin]
        if rank <= 0:
            return round(1000 * exp((bin + 0.5) * _BIN), 4)
    return None


def _shares(counts: Iterable[int]) -> list[float] | None:
    counts = list(counts)
    total = sum(counts)
    return [round(count / total, 4) for count in counts] if total else None
