"""Load controller: chooses the policy of a family whose cost the measured speed can afford. Pure Python.

The controller gets arrivals, batches and queue lengths with their times, and reads no clock. A batch of cost x takes
(overhead + x) / s seconds, with a measured speed s. Batches grow with the load; one that takes a quarter of the latency
objective has about the cost x = s * slo / 4, so that the capacity is C = threads * s * x / (overhead + x).

The arrival rate r (samples per second) decides the policy of the load. The affordable mean cost is
a = utilization * C / r, and the most expensive policy with a cost of at most `a` is the target. Hysteresis: the policy
becomes cheaper only if its cost exceeds the affordable one by the ratio of both utilizations, then at once. It becomes
more expensive only after the target was higher for `patience` seconds, and then by half of the distance. After a step
up that had to be taken back soon, the patience doubles.

The queue decides for single requests: Poisson arrivals and pauses of the machine make queues that are too short-lived
for an average. Two costs are affordable: with `C / r` the queue keeps its length, and with `drain_share * slo * C / q`
the q other samples are worked off within a share of the objective. The second alone corrects every queue at once, in a
single step. But accuracy is concave in the cost: the mean of a cheap and an expensive policy is less accurate than one
between them. New requests therefore get the geometric mean of both costs, which corrects half of the deviation and
needs hardly longer queues; in long ones at most `max_drain` times the second. The costs of successive batches are
rounded to policies so that their mean is the affordable one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from exitwise.core.checks import check_integer, check_number
from exitwise.core.errors import InputError

_UTILIZATION = 1.2  # of the measured capacity, with a policy that the controller moves to: the queue corrects it
_MAX_UTILIZATION = 1.35  # above it the policy becomes cheaper
_FAST, _SLOW = 0.25, 1.5  # time constants of the two averages of the arrival rate, in seconds
_DRAIN_SHARE = 0.2  # of the latency objective, in which a queue of usual length is worked off
_MAX_DRAIN = 1.5  # times as long at most may the policy of new requests take for a longer queue
_SPEED_TIME = 1.0  # busy seconds over which the speed is averaged
_PATIENCE = 0.5  # seconds before a step up
_MAX_PATIENCE = 4.0
_IDLE_STEP, _MAX_IDLE = 0.1, 20.0  # seconds between the updates that are made up for after a pause, and of the pause
_REGRET_TIME = 3.0  # a step up that is taken back within this many seconds doubles the patience


@dataclass
class _RateEstimate:
    """Exponential average of events per second; `update` moves it to a time."""

    time_constant: float
    rate: float = 0.0
    last: float | None = None

    def update(self, now: float, count: float = 0.0) -> None:
        if self.last is None:
            self.last = now
        elapsed = max(0.0, now - self.last)
        self.rate = self.rate * exp(-elapsed / self.time_constant) + count / self.time_constant
        self.last = now


class LoadController:
    """Chooses the index of a family of policies from load and measured speed.

    Args:
        costs: Mean cost per sample of each policy, growing.
        slo: Latency objective in seconds.
        threads: Number of compute threads.
        overhead: Time of an empty batch, as the cost that is computed in the same time.
        lowest: Index of the cheapest policy that may be used.
        highest: Index of the most expensive policy that may be used [default: the last].

    Raises:
        InputError: If an argument is out of range.

    Example:
        >>> from exitwise.serving.load import LoadController
        >>> controller = LoadController([1.0, 2.0, 4.0], slo=0.05)
        >>> for step in range(100):  # 100 samples per second, but the speed is 120 cost units per second
        ...     controller.add_arrivals(step / 100, 1)
        ...     controller.add_batch(cost=1.2, seconds=0.01)
        ...     index = controller.update(step / 100, queued=0)
        >>> index
        0
    """

    def __init__(
        self,
        costs: Sequence[float],
        slo: float,
        threads: int = 1,
        *,
        overhead: float = 0.0,
        lowest: int = 0,
        highest: int | None = None,
    ) -> None:
        self._costs = [check_number("costs", cost, 0) for cost in costs]
        if not self._costs or sorted(set(self._costs)) != self._costs:
            raise InputError(f"`costs` must grow from policy to policy, but got {self._costs}")
        self._slo = check_number("slo", slo, 1e-4, 3600)
        self._threads = check_integer("threads", threads, 1)
        self.overhead = check_number("overhead", overhead, 0)
        self.lowest = check_integer("lowest", lowest, 0, len(costs) - 1)
        self.highest = len(costs) - 1 if highest is None else check_integer("highest", highest, lowest, len(costs) - 1)
        self.index = self.highest
        self._fast, self._slow = _RateEstimate(_FAST), _RateEstimate(_SLOW)
        self._cost, self._busy = 0.0, 0.0  # exponential sums, whose ratio is the speed of a thread
        self._higher_since: float | None = None
        self._last_up = -inf
        self._patience = _PATIENCE
        self._last_update: float | None = None
        self._last_queued = 0
        self._carried = 0.0  # cost that the last policies were too cheap, or if negative too expensive

    def add_arrivals(self, now: float, count: int) -> None:
        """Record that `count` samples arrived."""
        self._catch_up(now)
        self._fast.update(now, count)
        self._slow.update(now, count)

    def add_batch(self, cost: float, seconds: float) -> None:
        """Record a batch: the cost of its stage for all samples, and the seconds that it took on its thread."""
        keep = exp(-seconds / _SPEED_TIME)
        self._cost, self._busy = keep * self._cost + self.overhead + cost, keep * self._busy + seconds

    @property
    def capacity(self) -> float:
        """Cost per second of all threads, in batches of a quarter of the objective; infinite before any measurement."""
        if self._busy <= 0 or self._cost <= 0:
            return inf
        speed = self._cost / self._busy
        batch = speed * self._slo / 4
        return self._threads * speed * batch / (self.overhead + batch)

    def arrival_rate(self, now: float) -> float:
        """Return the arrival rate in samples per second: the larger one of a fast and a slow average."""
        self._fast.update(now)
        self._slow.update(now)
        return max(self._fast.rate, self._slow.rate)

    def predict_wait(self, queued: int) -> float:
        """Return the seconds until `queued` samples are answered with the cheapest policy that may be used."""
        return queued * self._costs[self.lowest] / self.capacity

    def choose(self, others: int) -> int:
        """Return the index of the policy for new requests: that of the load, or a cheaper one in a long queue.

        Args:
            others: Number of samples that are queued or running, without those of the oldest new request: alone, it
                has the policy of the load even if it takes longer than the objective.
        """
        if others <= 0:
            return self.index
        rate = max(self._fast.rate, self._slow.rate)
        steady, draining = self.capacity / rate if rate > 0 else inf, self.capacity * _DRAIN_SHARE * self._slo / others
        return self._round(min(sqrt(steady * draining), _MAX_DRAIN * draining))

    def _round(self, affordable: float) -> int:
        """Return the index of the next cheaper or more expensive policy, so that the mean cost is the affordable one.

        What a policy costs too little or too much is carried over to the next call.
        """
        below = self._most_expensive(affordable)
        if below >= self.index or self._costs[below] > affordable:
            return min(below, self.index)
        wanted = affordable + self._carried
        gap = self._costs[below + 1] - self._costs[below]
        chosen = below + (wanted - self._costs[below] >= gap / 2)
        self._carried = max(-gap, min(gap, wanted - self._costs[chosen]))
        return chosen

    def update(self, now: float, queued: int) -> int:
        """Return the index of the policy for the load, given the samples that are queued or running."""
        self._last_update, self._last_queued = now, queued
        rate = self.arrival_rate(now)
        affordable = self.capacity / rate if rate > 0 else inf
        target = self._most_expensive(_UTILIZATION * affordable)
        if self._costs[self.index] > _MAX_UTILIZATION * affordable and target < self.index:
            if now - self._last_up < _REGRET_TIME:
                self._patience = min(2 * self._patience, _MAX_PATIENCE)
            self.index, self._higher_since = target, None
        elif target <= self.index:
            self._higher_since = None
        elif self._higher_since is None:
            self._higher_since = now
        elif now - self._higher_since >= self._patience:
            self.index += (target - self.index + 1) // 2
            self._last_up, self._higher_since = now, None
        if now - self._last_up > 2 * _REGRET_TIME:
            self._patience = _PATIENCE
        return self.index

    def _catch_up(self, now: float) -> None:
        """Make the updates that were not made while nothing was queued: without load there are no calls."""
        if self._last_update is None or self._last_queued:
            return
        start = self._last_update
        steps = int(min(now - start, _MAX_IDLE) / _IDLE_STEP)
        for step in range(1, steps + 1):
            if self.index == self.highest:
                break
            self.update(start + step * _IDLE_STEP, 0)

    def _most_expensive(self, affordable: float) -> int:
        allowed = range(self.lowest, self.highest + 1)
        return max((k for k in allowed if self._costs[k] <= affordable), default=self.lowest)
