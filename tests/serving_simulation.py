"""A service in simulated time: the scheduler and the load controller, with a backend and arrivals that set the clock.

All work is done by one core: the stages of a batch, and what HTTP costs for each request. Images have a difficulty, on
which their confidence after each exit depends, so that cheaper policies let more of them exit earlier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

import exitwise as ew
from exitwise.core.predictions import Array, ExitPrediction
from exitwise.policies.family import FamilyMember, PolicyFamily
from exitwise.serving.load import LoadController
from exitwise.serving.queues import Ticket
from exitwise.serving.scheduler import OverloadedError, Scheduler

COSTS = (7.0, 14.0, 26.0, 38.0)  # of the exits
SPEED = 57_000.0  # cost per second: 0.67 ms per image to the last exit
BATCH_SECONDS = 0.0004  # overhead of a batch in one stage
REQUEST_SECONDS = 0.0005  # what HTTP costs for a request
IMAGES = 8
NOISE = 0.1  # of the logarithm of the time of a batch
_DIFFICULTIES = np.linspace(0, 1, 2001)
_WEIGHTS = (1.0, 0.8, 0.6)  # confidence after an exit: 1 - weight * difficulty / 2


def _confidence(exit: int, difficulty: Array) -> Array:
    return 1 - (_WEIGHTS[exit] if exit < len(_WEIGHTS) else 0.5) * difficulty / 2


def make_family(count: int = 7) -> PolicyFamily:
    """Return policies with one threshold for all exits, from the cost of the first exit to about two thirds."""
    members = []
    for threshold in [-inf, *np.linspace(0.6, 0.9, count - 1).tolist()]:
        reached = np.stack([_confidence(exit, _DIFFICULTIES) >= threshold for exit in range(3)])
        cost = float(np.where(reached.any(axis=0), np.take(COSTS, reached.argmax(axis=0)), COSTS[-1]).mean())
        members.append(FamilyMember(ew.Policy((threshold,) * 3 + (-inf,), costs=COSTS, budget=cost, cost=cost)))
    return PolicyFamily(tuple(members))


def fixed_family(cost: float) -> PolicyFamily:
    """Return the policy whose cost is nearest to `cost`, alone; infinite for the last exit."""
    if cost == inf:
        policy = ew.Policy((inf,) * 3 + (-inf,), costs=COSTS, budget=COSTS[-1], cost=COSTS[-1])
        return PolicyFamily((FamilyMember(policy),))
    return PolicyFamily((min(make_family(), key=lambda member: abs(member.cost - cost)),))


class SimulatedBackend:
    """A backend whose stages take simulated time, in which requests arrive."""

    num_exits, num_classes, costs = len(COSTS), 2, COSTS

    def __init__(self) -> None:
        self.now = 0.0
        self.pass_time: Callable[[float], None] = lambda seconds: None
        self._stage_costs = np.diff(COSTS, prepend=0.0)
        self._noise = np.random.default_rng(1)

    def run(self, exit: int, state: Array) -> tuple[Array, ExitPrediction]:
        seconds = BATCH_SECONDS + len(state) * self._stage_costs[exit] / SPEED
        self.pass_time(seconds * float(np.exp(NOISE * self._noise.normal())))
        confidence = _confidence(exit, state)
        return state, ExitPrediction(np.stack([confidence, 1 - confidence], axis=1))

    def take(self, state: Array, rows: Array) -> Array:
        return np.asarray(state[rows])

    def compact(self, state: Array, exited: Array) -> tuple[Array, Array]:
        rows = np.flatnonzero(~exited)
        return state[rows], rows

    def join(self, states: Sequence[Array]) -> Array:
        return np.concatenate(states)

    def length(self, state: Array) -> int:
        return len(state)


@dataclass(frozen=True)
class Simulated:
    """Requests with their arrivals, latencies (infinite if refused) and policies (-1 if refused), and queue lengths."""

    arrivals: Array
    latencies: Array
    policies: Array
    costs: Array  # of the policies of the family

    def after(self, start: float, end: float = inf) -> "Simulated":
        rows = (self.arrivals >= start) & (self.arrivals < end)
        return Simulated(self.arrivals[rows], self.latencies[rows], self.policies[rows], self.costs)

    @property
    def rejected(self) -> float:
        return float(np.isinf(self.latencies).mean())

    def within(self, slo: float) -> float:
        """Return the share of all requests that were answered in time."""
        return float((self.latencies <= slo).mean())

    @property
    def p99(self) -> float:
        answered = self.latencies[np.isfinite(self.latencies)]
        return float(np.quantile(answered, 0.99)) if len(answered) else inf

    @property
    def mean_cost(self) -> float:
        answered = self.policies[self.policies >= 0]
        return float(self.costs[answered].mean()) if len(answered) else 0.0


def simulate(
    rate: Callable[[float], float],
    seconds: float,
    family: PolicyFamily | None = None,
    *,
    slo: float = 0.05,
    images: int = IMAGES,
    strategy: str = "deepest",
    max_wait_share: float = 0.4,
    pause: float = 0.0,
    seed: int = 0,
    **limits: Any,
) -> Simulated:
    """Return what happens to Poisson arrivals of requests, with a rate in requests per second as a function of time.

    Every two seconds the core does something else for `pause` seconds.
    """
    generator = np.random.default_rng(seed)
    family = family or make_family()
    backend = SimulatedBackend()
    costs = [member.cost for member in family]
    load = LoadController(costs, slo, overhead=len(COSTS) * BATCH_SECONDS * SPEED, **limits)
    load.add_batch(8 * COSTS[-1], 4 * BATCH_SECONDS + 8 * COSTS[-1] / SPEED)
    scheduler: Scheduler[Array] = Scheduler(
        backend,  # type: ignore[arg-type]
        family,
        load,
        max_wait=max_wait_share * slo,
        strategy=strategy,
        clock=lambda: backend.now,
    )
    arrivals, now = [], 0.0
    while (now := now + generator.exponential(1 / rate(now))) < seconds:
        arrivals.append(now)
    latencies, policies = np.full(len(arrivals), inf), np.full(len(arrivals), -1)
    waiting = iter(enumerate(arrivals))
    upcoming = next(waiting, None)

    def submit() -> None:
        nonlocal upcoming
        assert upcoming is not None
        number, arrived = upcoming
        upcoming = next(waiting, None)
        backend.now += REQUEST_SECONDS
        try:
            ticket = scheduler.submit(generator.uniform(0, 1, images))
        except OverloadedError:
            return

        def note(future: Any, ticket: Ticket = ticket) -> None:
            latencies[number], policies[number] = backend.now - arrived, ticket.policy

        ticket.future.add_done_callback(note)

    def pass_time(seconds: float) -> None:
        """Let a batch run for some seconds; requests that arrive meanwhile take their share of the core."""
        end = backend.now + seconds
        if end // 2 > backend.now // 2:
            end += pause
        while upcoming is not None and upcoming[1] <= end:
            remaining = end - max(backend.now, upcoming[1])
            backend.now = max(backend.now, upcoming[1])
            submit()
            end = backend.now + remaining
        backend.now = end

    backend.pass_time = pass_time
    while True:
        if scheduler.run_next():
            continue
        if upcoming is None:
            return Simulated(np.array(arrivals), latencies, policies, np.array(costs))
        backend.now = max(backend.now, upcoming[1])
        submit()


def capacity(images: int = IMAGES) -> float:
    """Return requests per second that one core can answer with the plain net in batches of 32 images."""
    per_batch = len(COSTS) * BATCH_SECONDS + 32 * COSTS[-1] / SPEED
    return 1 / (REQUEST_SECONDS + per_batch * images / 32)
