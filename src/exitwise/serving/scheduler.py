"""Scheduler: batches samples of all requests, stage by stage, on compute threads of its own.

There is a queue per stage. Images of new requests join the first; after a stage, active samples of several requests
wait together for the next. A free thread takes a batch from the queue that the strategy chooses. Samples of requests
that were cancelled, or that can no longer be answered before their deadline, are dropped before a batch is computed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Generic, TypeVar

import numpy as np

from exitwise.core.checks import check_choice, check_integer
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array
from exitwise.policies.family import PolicyFamily
from exitwise.runtime.engine import ActiveSamples, Backend, ExitedSamples, ExitRule, run_exit
from exitwise.serving.load import LoadController
from exitwise.serving.queues import MAX_ROWS, DeadlineError, MixedPolicies, Recorder, StageQueue, Ticket, split_ids
from exitwise.serving.strategies import STRATEGIES, QueueView

State = TypeVar("State")

_log = logging.getLogger("exitwise.serving")
_NUM_DURATIONS = 16  # recent batches per stage, of which the shortest bounds the time of the next
_USUAL_REQUESTS = 20  # over which the number of samples of a request is averaged
_DURATION_AGE = 1.0  # seconds after which a measured time is forgotten, so that one long pause has no lasting effect


class OverloadedError(InputError):
    """A request that is refused at once, because it could not be answered in time even with the cheapest policy.

    Attributes:
        retry_after: Seconds after which the queue will probably be short enough.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = max(1, ceil(retry_after))


class ClosedError(InputError):
    """A request to a scheduler that accepts no more requests."""


@dataclass(frozen=True, eq=False)
class BatchRecord:
    """A batch that was computed: its stage, samples, seconds, and the probabilities of the samples that exited."""

    stage: int
    size: int
    seconds: float
    exited: Array  # probabilities (m, c)
    errors: int


class Scheduler(Generic[State]):
    """Answers requests with a backend and a family of policies.

    Args:
        backend: Runs the stages; its `run` must allow calls from several threads.
        family: Policies by index; all samples of a request have one.
        load: Chooses the policy of a request when its first sample is started.
        max_batch: Largest batch, in samples.
        max_queue: Largest number of samples that are queued or running; more are refused.
        max_wait: Largest predicted wait in seconds; a request behind a longer queue is refused.
        threads: Number of compute threads.
        strategy: Name of the strategy that chooses the next stage: deepest, oldest or fullest.
        on_batch: Called by a compute thread after every batch.
        find_delay: Returns the seconds that everything waits for the event loop which submits requests.
        clock: Clock of deadlines, in seconds.
    """

    def __init__(
        self,
        backend: Backend[State],
        family: PolicyFamily,
        load: LoadController,
        *,
        max_batch: int = 32,
        max_queue: int = 1024,
        max_wait: float = inf,
        threads: int = 1,
        strategy: str = "deepest",
        on_batch: Callable[[BatchRecord], None] | None = None,
        find_delay: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend, self.family, self.load = backend, family, load
        self._policies: list[ExitRule] = [member.policy for member in family]
        self._costs = np.diff(np.asarray(backend.costs), prepend=0.0)
        self._max_batch = check_integer("max_batch", max_batch, 1)
        self._max_queue = check_integer("max_queue", max_queue, 1)
        self._max_wait = max_wait
        self._choose = STRATEGIES[check_choice("strategy", strategy, STRATEGIES)]
        self._on_batch, self._find_delay, self._clock = on_batch, find_delay, clock
        self._queues: list[StageQueue[State]] = [StageQueue() for _ in range(backend.num_exits)]
        self._durations = [deque[tuple[float, float]](maxlen=_NUM_DURATIONS) for _ in self._queues]
        self._tickets: dict[int, Ticket] = {}
        self._next_number = 0
        self._pending = 0
        self._usual_size = 1.0  # samples per request, of the last ones
        self._closing = False
        self._condition = threading.Condition(threading.RLock())  # a done callback may run under it
        check_integer("threads", threads, 1)
        self._threads = [
            threading.Thread(target=self._work, name=f"exitwise-compute-{k}", daemon=True) for k in range(threads)
        ]

    def start(self) -> None:
        """Start the compute threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Refuse new requests, answer the accepted ones, and end the compute threads."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def is_alive(self) -> bool:
        """True while all compute threads run."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def pending(self) -> int:
        """Number of samples that are queued or running."""
        return self._pending

    @property
    def queue_lengths(self) -> list[int]:
        """Number of waiting samples by stage."""
        return [queue.length for queue in self._queues]

    def check_capacity(self, size: int | None = None, timeout: float = inf) -> None:
        """Raise OverloadedError if a request cannot be accepted, ClosedError if none are.

        Args:
            size: Its number of samples; None if it is unknown yet, then a refused request counts as one of usual size.
            timeout: Seconds until its deadline.
        """
        with self._condition:
            if self._closing:
                raise ClosedError("the service is shutting down")
            limit = min(self._max_wait, timeout)
            # It has waited for the event loop once, and its answer will wait again.
            wait = self.load.predict_wait(self._pending) + 2 * self._find_delay()
            if self._pending and self._pending + (size or 1) > self._max_queue:
                message, retry_after = f"the queue is full: {self._pending} images wait", wait
            elif wait > limit:
                times = f"{1e3 * wait:.0f} ms, more than {1e3 * limit:.0f} ms"
                message, retry_after = f"the service is overloaded: the wait would be {times}", wait - limit
            else:
                return
            refused = round(self._usual_size) if size is None else size
            self.load.add_arrivals(self._clock(), refused)  # refused requests are load, too
        raise OverloadedError(message, retry_after)

    def policy_in_use(self) -> int:
        """Return the index of the policy that a request would get now, also after a pause without requests."""
        with self._condition:
            self.load.add_arrivals(self._clock(), 0)
            return self.load.index

    def submit(
        self,
        state: State,
        timeout: float = inf,
        max_policy: int | None = None,
        recorder: Recorder | None = None,
    ) -> Ticket:
        """Queue the samples of a request.

        Args:
            state: Stage state of its images, from `backend.start`.
            timeout: Seconds until the deadline.
            max_policy: Index of the most expensive policy that it may get.
            recorder: Rule of a request of one image that runs to the last exit; the policy is chosen, but not used.

        Returns:
            The ticket, whose future gets the `ServedRows`. To cancel the future drops the samples that wait.

        Raises:
            OverloadedError: If the request cannot be answered in time; see `check_capacity`.
            ClosedError: If the scheduler is closed.
        """
        size = self.backend.length(state)
        check_integer("images", size, 1, MAX_ROWS)
        with self._condition:
            self.check_capacity(size, timeout)
            now = self._clock()
            self._next_number += 1
            ticket = Ticket(self._next_number, size, now, now + timeout, max_policy, recorder, remaining=size)
            self._tickets[ticket.number] = ticket
            self._usual_size += (size - self._usual_size) / _USUAL_REQUESTS
            self._pending += size
            self.load.add_arrivals(now, size)
            self._queues[0].add(state, ActiveSamples(ticket.ids()), now)
            self._condition.notify(ceil(size / self._max_batch))
        ticket.future.add_done_callback(lambda future: self._forget(ticket) if future.cancelled() else None)
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        """Release a ticket that needs no more answers; its waiting samples are dropped when their turn comes."""
        with self._condition:
            if self._tickets.pop(ticket.number, None) is not None:
                self._pending -= ticket.remaining

    def _work(self) -> None:
        """Run batches until the scheduler is closed and all samples are answered."""
        while True:
            with self._condition:
                while not any(queue.length for queue in self._queues):
                    if self._closing and not self._tickets:
                        self._condition.notify_all()  # other threads wait for samples of this one's last batch
                        return
                    self._condition.wait(timeout=1.0 if self._closing else None)
            self.run_next()

    def run_next(self) -> bool:
        """Run one batch in the calling thread, as a compute thread does; return False if no samples wait."""
        with self._condition:
            waiting = [k for k, queue in enumerate(self._queues) if queue.length]
            if not waiting:
                return False
            views = [QueueView(k, self._queues[k].length, self._queues[k].oldest) for k in waiting]
            stage = self._choose(views, self._max_batch)
            batch = self._take(stage)
        if batch is not None:
            self._run(stage, *batch)
        return True

    def _take(self, stage: int) -> tuple[State, ActiveSamples, float, MixedPolicies] | None:
        """Take a batch of a stage, choose the policies of new requests, and drop what cannot be answered in time."""
        now = self._clock()
        recent = (seconds for end, seconds in self._durations[stage] if now - end <= _DURATION_AGE)
        earliest_end = now + min(recent, default=0.0)
        expired: list[Ticket] = []

        def is_live(number: int) -> bool:
            ticket = self._tickets.get(number)
            if ticket is not None and ticket.deadline < earliest_end:
                expired.append(ticket)
                self._forget(ticket)
                return False
            return ticket is not None

        def find_live(ids: Array) -> Array | None:
            numbers = split_ids(ids)[0].tolist()
            live = {number: is_live(number) for number in set(numbers)}
            return None if all(live.values()) else np.array([live[number] for number in numbers], dtype=bool)

        batch = self._queues[stage].take(self.backend, self._max_batch, find_live)
        for ticket in expired:
            ticket.resolve(DeadlineError("the request could not be answered before its deadline"))
        self.load.update(now, self._pending)  # also if all of them were given up: the load is gone with them
        if batch is None:
            return None
        state, samples, oldest = batch
        # Batches are small: dicts are faster than `np.unique`, which takes as long as a stage needs for an image.
        numbers = split_ids(samples.ids)[0].tolist()
        tickets = {number: self._tickets[number] for number in numbers}
        if new := [ticket for ticket in tickets.values() if ticket.policy < 0]:
            index = self.load.choose(self._pending - new[0].size)
            for ticket in new:
                ticket.policy = index if ticket.max_policy is None else min(index, ticket.max_policy)
        rules = self._policies
        chosen: dict[int, int] = {}
        recorded: list[int] = []
        for number, ticket in tickets.items():
            chosen[number] = ticket.policy
            if ticket.recorder is not None:
                chosen[number] = len(rules)
                rules = [*rules, ticket.recorder]
                recorded += ticket.ids().tolist()
        policies = np.array([chosen[number] for number in numbers])
        return state, samples, oldest, MixedPolicies(rules, policies, recorded)

    def _run(self, stage: int, state: State, samples: ActiveSamples, oldest: float, rule: MixedPolicies) -> None:
        """Run a batch and distribute its answers; if it fails, run its samples one by one."""
        start = self._clock()
        errors: dict[int, str] = {}
        try:
            results = [run_exit(self.backend, rule, stage, state, samples)]
        except Exception as error:  # whatever one image causes must not end the thread or fail other requests
            _log.warning("a batch of %d at stage %d failed, run one by one: %s", len(samples), stage, error)
            results = self._run_one_by_one(stage, state, samples, rule, errors)
        seconds = self._clock() - start
        self._distribute(stage, results, errors, oldest, len(samples), seconds)
        if self._on_batch is not None:
            probs = [exited.probs[rule.counted(exited)] for _, _, exited in results]
            empty = np.zeros((0, self.backend.num_classes), np.float32)
            exited_probs = probs[0] if len(probs) == 1 else np.concatenate([empty, *probs])
            self._on_batch(BatchRecord(stage, len(samples), seconds, exited_probs, len(errors)))

    def _run_one_by_one(
        self, stage: int, state: State, samples: ActiveSamples, rule: MixedPolicies, errors: dict[int, str]
    ) -> list[tuple[State, ActiveSamples, ExitedSamples]]:
        results = []
        for row in range(len(samples)):
            rows = np.array([row])
            try:
                part = self.backend.take(state, rows)
                results.append(run_exit(self.backend, rule.take(rows), stage, part, samples.take(rows)))
            except Exception as error:
                message = str(error) if isinstance(error, InputError) else f"exit {stage} cannot be computed"
                errors[int(samples.ids[row])] = message
        return results

    def _distribute(
        self,
        stage: int,
        results: Sequence[tuple[State, ActiveSamples, ExitedSamples]],
        errors: dict[int, str],
        oldest: float,
        size: int,
        seconds: float,
    ) -> None:
        """Give answers to their tickets and queue active samples for the next stage."""
        finished: list[Ticket] = []
        with self._condition:
            self._durations[stage].append((self._clock(), seconds))
            self.load.add_batch(float(self._costs[stage]) * size, seconds)
            for state, active, exited in results:
                if len(active):
                    self._queues[stage + 1].add(state, active, oldest)
                if not len(exited.ids):
                    continue
                numbers, rows = split_ids(exited.ids)
                positions: dict[int, list[int]] = {}
                non_finite = exited.non_finite.tolist()
                for position, number in enumerate(numbers.tolist()):
                    if non_finite[position]:
                        errors[int(exited.ids[position])] = f"exit {stage} gives probabilities that are not finite"
                    elif number in positions:
                        positions[number].append(position)
                    else:
                        positions[number] = [position]
                for number, mine in positions.items():
                    self._answer(number, rows[mine], exited.probs[mine], stage, finished)
            for sample, message in errors.items():
                self._fail_sample(sample, message, finished)
            self.load.update(self._clock(), self._pending)
            self._condition.notify_all()
        for ticket in finished:
            ticket.resolve(ticket.result(self.backend.num_classes))

    def _answer(self, number: int, rows: Array, probs: Array, exit: int, finished: list[Ticket]) -> None:
        ticket = self._tickets.get(number)
        if ticket is None or not len(rows):
            return
        ticket.add(rows, probs, exit)
        self._pending -= len(rows)
        self._finish(ticket, finished)

    def _fail_sample(self, sample: int, message: str, finished: list[Ticket]) -> None:
        numbers, rows = split_ids(np.array([sample]))
        ticket: Any = self._tickets.get(int(numbers[0]))
        if ticket is None:
            return
        ticket.errors[int(rows[0])] = message
        ticket.remaining -= 1
        self._pending -= 1
        self._finish(ticket, finished)

    def _finish(self, ticket: Ticket, finished: list[Ticket]) -> None:
        if not ticket.remaining:
            del self._tickets[ticket.number]
            finished.append(ticket)
