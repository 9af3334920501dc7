"""The service behind the application: a loaded bundle with its scheduler, which can be exchanged while it runs."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from exitwise.core.checks import is_finite
from exitwise.core.errors import InputError, first_line, shorten
from exitwise.core.predictions import Array
from exitwise.policies.family import FamilyMember, PolicyFamily
from exitwise.runtime.onnx import OnnxBackend, Session
from exitwise.runtime.onnx import State as OnnxState
from exitwise.serving.bodies import BodyMemory
from exitwise.serving.delivery import Delivery, LoopDelay
from exitwise.serving.errors import ClientDisconnectedError
from exitwise.serving.load import LoadController
from exitwise.serving.metrics import Metrics
from exitwise.serving.queues import DeadlineError, Recorder, ServedRows, Ticket
from exitwise.serving.scheduler import Scheduler
from exitwise.serving.settings import Settings

T = TypeVar("T")

_log = logging.getLogger("exitwise.serving")
_NUM_DECODERS = 2  # threads that parse requests and decode images
_WARM_UPS, _WARM_UP_BATCH = 3, 8  # batches of one and of several images that are timed before the first request
_WAIT_SHARE = 0.45  # of the latency objective that a request may wait; the rest is for computing it
_MAX_BODIES = 16  # bodies of the largest size that may be in memory at the same time
_WATCH_AFTER = 0.05  # seconds after which a request that has no answer yet is given up if its client goes away
_SMALL_BODY = 1 << 16  # bytes of a body that is parsed without another thread


@dataclass(frozen=True)
class RequestOptions:
    """Wishes of a request: its deadline by `time.monotonic`, and the index of the most expensive policy it may get."""

    deadline: float
    max_policy: int | None = None

    @property
    def timeout(self) -> float:
        """Seconds that are left; raises DeadlineError if there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("the request could not be answered before its deadline")
        return left


class LoadedBundle:
    """A bundle that is ready to run: its session, the family of policies, and the scheduler.

    Without a family in the bundle there is one policy, the bundle's own. It is not shifted under load: the accuracy of
    a shifted policy was never measured, so that no floor could hold, and a certificate would be void.
    """

    def __init__(
        self, path: Path, settings: Settings, metrics: Metrics, find_delay: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.session = Session(path, threads=1, memory_patterns=False)  # batches have all sizes
        manifest = self.session.manifest
        own = FamilyMember.of(manifest.policy) if manifest.policy.cost is not None else None
        if own is None and manifest.family is None:
            raise InputError("the policy of the bundle has no mean cost: export it again with `ew.fit_policy`'s")
        self.family = manifest.family or PolicyFamily((own,))  # type: ignore[arg-type]
        self.backend = OnnxBackend(self.session)
        lowest = 0 if settings.floor is None else self.family.index_for_floor(settings.floor)
        highest = len(self.family) - 1 if settings.budget is None else self.family.index_for_budget(settings.budget)
        if highest < lowest:
            raise InputError(
                f"`budget` {settings.budget:g} allows no policy with the accuracy of `floor` {settings.floor:g}"
            )
        self.load = LoadController(
            [member.cost for member in self.family], settings.slo, settings.threads, lowest=lowest, highest=highest
        )
        self.scheduler: Scheduler[OnnxState] = Scheduler(
            self.backend,
            self.family,
            self.load,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            max_wait=_WAIT_SHARE * settings.slo,
            threads=settings.threads,
            strategy=settings.strategy,
            on_batch=metrics.add_batch,
            find_delay=find_delay,
        )
        self._descriptions = [self._describe_policy(index) for index in range(len(self.family))]
        self.users = 0  # requests that hold this bundle; only the event loop changes it

    @property
    def unit(self) -> str:
        """Unit of budgets and costs."""
        return self.session.costs.unit

    def describe_policy(self, index: int) -> dict[str, Any]:
        """Return index, budget, unit and accuracy of a policy, for answers."""
        return dict(self._descriptions[index])

    def _describe_policy(self, index: int) -> dict[str, Any]:
        member = self.family[index]
        described = {"policy": index, "budget": member.budget, "unit": self.unit}
        return described if member.accuracy is None else {**described, "expected_accuracy": member.accuracy}

    def warm_up(self) -> None:
        """Run small batches through all stages: errors show before the first request, and the speed is measured."""
        costs = self.session.costs.values
        single, several = self._time_batches(1), self._time_batches(_WARM_UP_BATCH)
        per_sample = max((several - single) / (_WARM_UP_BATCH - 1), several / _WARM_UP_BATCH / 10)
        per_stage = max(single - per_sample, 0.0) / len(costs)
        self.load.overhead = per_stage / per_sample * costs[-1]
        for _ in costs:
            self.load.add_batch(_WARM_UP_BATCH * costs[-1] / len(costs), several / len(costs))

    def _time_batches(self, size: int) -> float:
        """Return the shortest time of a few batches that run to the last exit, in seconds."""
        inputs = self.session.manifest.inputs
        zeros = {spec.name: np.zeros((size, *spec.shape), dtype=spec.dtype) for spec in inputs}
        times = []
        for _ in range(_WARM_UPS):
            start = time.perf_counter()
            state = self.backend.start(zeros)
            for exit in range(self.backend.num_exits):
                state, _ = self.backend.run(exit, state)
            times.append(time.perf_counter() - start)
        return min(times)


class Service:
    """Answers requests with the current bundle, and exchanges it on request."""

    def __init__(self, path: str | Path, settings: Settings) -> None:
        self.path, self.settings = Path(path), settings
        self.metrics = Metrics()
        self.loop_delay = LoopDelay()
        self.bundle = self._load()
        self.body_memory = BodyMemory(_MAX_BODIES * settings.max_body)
        self.reloads = 0
        self.draining = False
        self._started = False
        self._delivery: Delivery
        self._pool = ThreadPoolExecutor(_NUM_DECODERS, "exitwise-decode")
        self._reloading = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()

    def _load(self) -> LoadedBundle:
        return LoadedBundle(self.path, self.settings, self.metrics, lambda: self.loop_delay.seconds)

    async def start(self) -> None:
        """Warm up the bundle and start its threads."""
        self._delivery = Delivery(asyncio.get_running_loop())
        await self.run_in_thread(self.bundle.warm_up)
        self.bundle.scheduler.start()
        self.update_metrics()
        self._started = True

    async def close(self) -> None:
        """Answer what was accepted, then end all threads."""
        self.draining = True
        await self.run_in_thread(self.bundle.scheduler.close)
        for task in list(self._retiring):
            await task
        self._pool.shutdown()

    @property
    def is_ready(self) -> bool:
        """True if requests are accepted."""
        return self._started and not self.draining

    @property
    def is_alive(self) -> bool:
        """True unless a compute thread has ended although it should run."""
        return not self._started or self.draining or self.bundle.scheduler.is_alive

    async def reload(self) -> bool:
        """Load the bundle again from its folder; if it is broken, the current one stays. Return whether it changed."""
        async with self._reloading:
            try:
                new = await self.run_in_thread(self._load)
                await self.run_in_thread(new.warm_up)
            except Exception as error:  # also what onnxruntime raises when it runs a graph
                _log.error("the bundle was not reloaded, the former one stays: %s", first_line(error))
                self.metrics.count_reload(False)
                return False
            new.scheduler.start()
            old, self.bundle = self.bundle, new
            self.reloads += 1
            task = asyncio.create_task(self._retire(old))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
            _log.info("the bundle was reloaded: %s", new.family.describe())
            self.metrics.count_reload(True)
            return True

    async def _retire(self, bundle: LoadedBundle) -> None:
        while bundle.users:
            await asyncio.sleep(0.02)
        await self.run_in_thread(bundle.scheduler.close)

    @contextmanager
    def use_bundle(self) -> Iterator[LoadedBundle]:
        """Yield the current bundle, which stays open until the end of the block."""
        self.loop_delay.watch()
        bundle = self.bundle
        bundle.users += 1
        try:
            yield bundle
        finally:
            bundle.users -= 1

    async def run_in_thread(self, function: Callable[[], T], size: int = _SMALL_BODY) -> T:
        """Run a function in a thread of its own, or at once if it has only few bytes to work on."""
        if size < _SMALL_BODY:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def parse_options(
        self, bundle: LoadedBundle, values: Mapping[str, Any], arrived: float | None = None
    ) -> RequestOptions:
        """Return the budget and the deadline that a request asks for, from its parameters.

        Args:
            bundle: The bundle that the budget is for.
            values: Parameters of the request.
            arrived: When the request came, by `time.monotonic` [default: now].

        Raises:
            InputError: If a value is not a positive number, or `budget` is not like 2e7 or 50%.
        """
        timeout, asked = self.settings.timeout, values.get("deadline_ms")
        if asked is not None:
            timeout = min(timeout, _parse_number("deadline_ms", asked) / 1000)
        deadline = (time.monotonic() if arrived is None else arrived) + timeout
        budget = values.get("budget")
        if budget is None:
            return RequestOptions(deadline)
        full = bundle.session.costs.values[-1]
        if isinstance(budget, str) and budget.endswith("%"):
            budget = _parse_number("budget", budget.removesuffix("%")) / 100 * full
        return RequestOptions(deadline, bundle.family.index_for_budget(_parse_number("budget", budget)))

    async def classify(
        self,
        bundle: LoadedBundle,
        images: Any,
        options: RequestOptions,
        receive: Callable[[], Awaitable[Any]],
        recorder: Recorder | None = None,
    ) -> ServedRows:
        """Queue images and wait for their answers.

        Args:
            bundle: The bundle to use.
            images: A batch of images: one array, or a dict of arrays by the name of the input.
            options: Deadline and budget of the request.
            receive: Waits for messages of the client, to notice that it disconnects.
            recorder: Runs a single image to the last exit and keeps all predictions.

        Raises:
            OverloadedError: If the request cannot be answered in time.
            DeadlineError: If it was not answered in time.
            ClientDisconnectedError: If the client went away; what waits for it is not computed.
            InputError: If the images do not fit the net.
        """
        arrays = [images] if isinstance(images, np.ndarray) else images.values()
        state = await self.run_in_thread(lambda: bundle.backend.start(images), sum(array.nbytes for array in arrays))
        ticket = bundle.scheduler.submit(state, options.timeout, options.max_policy, recorder)
        rows = await _wait(ticket, receive, self._delivery)
        self.metrics.recent.set_policy(bundle.load.index)
        return rows

    def update_metrics(self) -> None:
        """Record queue lengths and the policy in use."""
        index = self.bundle.scheduler.policy_in_use()
        self.metrics.set_state(self.bundle.scheduler.queue_lengths, index, self.bundle.family[index])


async def wait_for_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _wait(ticket: Ticket, receive: Callable[[], Awaitable[Any]], delivery: Delivery) -> ServedRows:
    """Wait for the answers of a ticket; cancel it if the client disconnects or this task is cancelled."""

    def disconnect(watcher: asyncio.Future[None]) -> None:
        if not watcher.cancelled() and not answers.done():
            answers.set_exception(watcher.exception() or ClientDisconnectedError())

    loop = asyncio.get_running_loop()
    answers: asyncio.Future[ServedRows] = loop.create_future()
    watchers: list[asyncio.Future[None]] = []

    def watch() -> None:
        watchers.append(asyncio.ensure_future(wait_for_disconnect(receive)))
        watchers[0].add_done_callback(disconnect)

    # A task for every request would take longer than all others together compute in vain for those who went away.
    timer = loop.call_later(_WATCH_AFTER, watch)
    delivery.connect(ticket.future, answers)
    try:
        return await answers
    finally:
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()
        ticket.future.cancel()  # has no effect on a future with a result


def _parse_number(name: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value[:40])
        except ValueError:
            raise InputError(f"`{name}` must be a positive number, but is {shorten(value)}") from None
    if not is_finite(value) or not isfinite(value) or value <= 0:
        raise InputError(f"`{name}` must be a positive number, but is {shorten(value)}")
    return float(value)


def output_tensors(rows: ServedRows, costs: Sequence[float]) -> dict[str, Callable[[], Array]]:
    """Return functions that compute the outputs of the protocol, by name, from answers and the costs of the exits."""
    return {
        "probs": lambda: rows.probs,
        "predicted": lambda: rows.probs.argmax(axis=1).astype(np.int64, copy=False),
        "exits": lambda: rows.exits,
        "costs": lambda: np.asarray(costs, dtype=np.float64)[rows.exits],
    }
