"""The event loop: how results of compute threads get there, and how long everything waits for it."""

import asyncio
from collections import deque
from concurrent.futures import Future
from typing import Any


class Delivery:
    """Copies the results of futures that other threads resolve to futures of an event loop.

    `asyncio.wrap_future` wakes the event loop for every result. Most of the requests of a batch finish together.

    Args:
        loop: The event loop that waits for the results.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: deque[tuple[Future[Any], asyncio.Future[Any]]] = deque()
        self._woken = False

    def connect(self, source: "Future[Any]", target: "asyncio.Future[Any]") -> None:
        """Give `target` the result or the error of `source`, unless one of them is cancelled."""
        source.add_done_callback(lambda done: self._add(done, target))

    def _add(self, source: "Future[Any]", target: "asyncio.Future[Any]") -> None:
        self._ready.append((source, target))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the first is taken: what is added later wakes the loop again
        while self._ready:
            source, target = self._ready.popleft()
            if source.cancelled() or target.done():
                continue
            if error := source.exception():
                target.set_exception(error)
            else:
                target.set_result(source.result())


class LoopDelay:
    """Delay of an event loop: the time that a request waits before the service sees it.

    A timer measures it while there are requests. The mean of the last intervals counts: a single long one has gone by.
    """

    _INTERVAL = 0.01  # seconds
    _WEIGHT = 0.2  # of the last interval in the mean

    def __init__(self) -> None:
        self.seconds = 0.0
        self._has_timer = self._is_used = False

    def watch(self) -> None:
        """Measure the delay of the running event loop for the next interval; called for every request."""
        self._is_used = True
        if not self._has_timer:
            self._has_timer = True
            self._start_timer(asyncio.get_running_loop())

    def _start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_used = False
        due = loop.time() + self._INTERVAL
        loop.call_at(due, self._measure, loop, due)

    def _measure(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        late = max(0.0, loop.time() - due)
        if self._is_used:
            self.seconds += self._WEIGHT * (late - self.seconds)
            self._start_timer(loop)
        else:
            self.seconds, self._has_timer = 0.0, False
