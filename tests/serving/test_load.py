"""The load controller, by simulation of a server with noisy batches and Poisson arrivals: no clock, no threads."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

import exitwise as ew
from exitwise.core.predictions import Array
from exitwise.serving.load import LoadController

COSTS = [6.86, 10.7, 14.65, 18.5, 22.8, 26.3, 30.2]
SPEED, OVERHEAD, SLO, MAX_BATCH = 22_000.0, 0.0005, 0.05, 32
CAPACITY = SPEED / COSTS[-1]  # samples per second to the last exit, without the overhead of batches


@dataclass(frozen=True)
class Simulated:
    """Latencies and policies of the samples that were answered, policies over time, and rejected samples."""

    arrivals: Array
    latencies: Array
    policies: Array
    times: Array
    used: Array
    rejected: int

    @property
    def changes(self) -> int:
        return int((np.diff(self.used) != 0).sum())

    def violations(self) -> float:
        return float((self.latencies > SLO).mean())


def simulate(
    rate: Callable[[float], float], seconds: float, adaptive: bool = True, noise: float = 0.1, lowest: int = 0
) -> Simulated:
    generator = np.random.default_rng(0)
    controller = LoadController(COSTS, SLO, overhead=OVERHEAD * SPEED, lowest=lowest)
    controller.add_batch(COSTS[-1], OVERHEAD + COSTS[-1] / SPEED)
    arrivals, now = [], 0.0
    while now < seconds:
        now += generator.exponential(1 / rate(now))
        arrivals.append(now)
    queue: list[float] = []
    rows, used, rejected, now, i = [], [], 0, 0.0, 0

    def accept() -> None:
        """Queue what has arrived until now, unless the wait would be too long."""
        nonlocal rejected, i
        while i < len(arrivals) and arrivals[i] <= now:
            if adaptive and controller.predict_wait(len(queue)) > 0.4 * SLO:
                rejected += 1
            else:
                queue.append(arrivals[i])
            controller.add_arrivals(arrivals[i], 1)
            i += 1

    while i < len(arrivals) or queue:
        if not queue:
            now = max(now, arrivals[i])
        accept()
        if not queue:
            continue
        controller.update(now, len(queue))
        policy = controller.choose(len(queue) - 1) if adaptive else len(COSTS) - 1
        batch, queue = queue[:MAX_BATCH], queue[MAX_BATCH:]
        seconds_taken = OVERHEAD + len(batch) * COSTS[policy] / SPEED * float(np.exp(noise * generator.normal()))
        now += seconds_taken
        rows += [(arrived, now - arrived, policy) for arrived in batch]
        used.append((now, controller.index))
        controller.add_batch(COSTS[policy] * len(batch), seconds_taken)
        accept()
        controller.update(now, len(queue))
    arrived, latencies, policies = np.array(rows).T
    times, indices = np.array(used).T
    return Simulated(arrived, latencies, policies, times, indices, rejected)


def test_all_of_the_budget_is_used_while_it_is_affordable() -> None:
    for load in (0.3, 0.6):
        result = simulate(lambda _, load=load: load * CAPACITY, 8)
        assert result.policies.min() == len(COSTS) - 1
        assert result.violations() == 0


@pytest.mark.parametrize("load", [0.85, 1.0, 1.25, 1.5, 2.0, 3.0])
def test_a_constant_load_has_a_nearly_constant_policy_and_keeps_the_objective(load: float) -> None:
    result = simulate(lambda _: load * CAPACITY, 10)
    assert result.violations() < 0.01
    assert result.rejected == 0
    assert result.changes <= 8
    settled = result.policies[result.arrivals > 2]
    affordable = max(k for k, cost in enumerate(COSTS) if cost * load <= COSTS[-1])
    # Batches have an overhead, so that not all of the capacity is there; but at most two policies may be lost by it.
    # The policy of the load may be one too expensive: long queues then lower that of some requests.
    assert affordable - 2 <= settled.mean() <= affordable + 1
    assert settled.std() < 1.5


def test_a_step_up_and_down_is_followed_at_once_and_taken_back_within_ten_seconds() -> None:
    def rate(now: float) -> float:
        return (2 if 5 <= now < 10 else 0.5) * CAPACITY

    result, fixed = simulate(rate, 20), simulate(rate, 20, adaptive=False)
    assert 5 * result.violations() < fixed.violations()
    up = result.policies[(result.arrivals > 5.5) & (result.arrivals < 10)]
    assert up.max() < len(COSTS) - 1
    assert (result.policies[(result.arrivals < 5) | (result.arrivals > 19)] == len(COSTS) - 1).all()
    back = result.used[result.times > 10]
    assert (np.diff(back) >= 0).all()  # no oscillation on the way


def test_noise_of_the_speed_does_not_move_the_policy_back_and_forth() -> None:
    result = simulate(lambda _: 1.3 * CAPACITY, 10, noise=0.4)
    assert result.changes <= 15
    assert result.violations() < 0.02


def test_beyond_the_cheapest_policy_samples_are_rejected_and_the_others_are_in_time() -> None:
    result = simulate(lambda _: 6 * CAPACITY, 5)
    assert result.rejected > 0.1 * len(result.arrivals)
    assert np.quantile(result.latencies, 0.99) < 1.1 * SLO
    assert result.policies[result.arrivals > 1].max() == 0


def test_the_floor_holds_under_any_load() -> None:
    result = simulate(lambda _: 6 * CAPACITY, 2, lowest=3)
    assert result.policies.min() == 3
    assert result.rejected


def test_a_pause_without_requests_counts_as_quiet() -> None:
    controller = LoadController(COSTS, SLO)
    controller.add_batch(1.0, 0.0001)
    for step in range(100):
        controller.add_arrivals(step / 100, 20)
        controller.update(step / 100, 0)
    assert controller.index == 0
    controller.add_arrivals(31.0, 1)
    assert controller.update(31.0, 1) == len(COSTS) - 1


def test_the_controller_is_a_function_of_its_calls() -> None:
    results = [simulate(lambda _: 1.5 * CAPACITY, 2) for _ in range(2)]
    assert (results[0].policies == results[1].policies).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"costs": [2.0, 1.0]}, "must grow"),
        ({"costs": []}, "must grow"),
        ({"slo": 0}, "`slo`"),
        ({"threads": 0}, "`threads`"),
        ({"lowest": 7}, "`lowest`"),
        ({"lowest": 3, "highest": 2}, "`highest`"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ew.InputError, match=words):
        LoadController(**{"costs": COSTS, "slo": SLO, **arguments})  # type: ignore[arg-type]
