"""The scheduler with its load controller in simulated time: what the load benchmark measures, without its noise."""

from math import inf

import numpy as np
import pytest
from serving_simulation import COSTS, REQUEST_SECONDS, capacity, fixed_family, make_family, simulate

from exitwise.serving.load import LoadController
from exitwise.serving.strategies import STRATEGIES

SLO = 0.05
CAPACITY = capacity()


@pytest.mark.parametrize("load", [1.0, 2.0])
def test_beyond_the_capacity_of_the_plain_net_requests_are_in_time(load: float) -> None:
    """The plain net loses about as much as it cannot compute."""
    adaptive = simulate(lambda _: load * CAPACITY, 4).after(1)
    plain = simulate(lambda _: load * CAPACITY, 2, fixed_family(inf)).after(1)
    assert adaptive.within(SLO) >= 0.99
    assert plain.within(SLO) < 1 / load
    # What is left for an image when HTTP and batches have had their time, at full use of the core.
    affordable = COSTS[-1] * (1 / load - CAPACITY * REQUEST_SECONDS) / (1 - CAPACITY * REQUEST_SECONDS)
    assert 0.75 * min(affordable, adaptive.costs[-1]) < adaptive.mean_cost < COSTS[-1]


def test_beyond_the_cheapest_policy_requests_are_refused_and_the_others_are_in_time() -> None:
    result = simulate(lambda _: 3 * CAPACITY, 3, lowest=3).after(1)
    assert result.rejected > 0.1
    assert result.p99 <= 1.1 * SLO
    assert set(result.policies) == {-1, 3}


def test_a_step_costs_less_than_with_a_fixed_policy_and_the_budget_comes_back() -> None:
    def rate(now: float) -> float:
        return (2 if 2 <= now < 4 else 0.5) * CAPACITY

    adaptive = simulate(rate, 9)
    fixed = simulate(lambda now: rate(now + 1), 3, fixed_family(COSTS[-1] / 2))  # without the end, in which all is well
    late = [float((result.latencies > SLO).sum()) for result in (adaptive, fixed)]
    assert 5 * late[0] <= late[1]
    assert (adaptive.after(0, 2).policies == len(adaptive.costs) - 1).mean() > 0.95
    assert (adaptive.after(8).policies == len(adaptive.costs) - 1).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_answers_what_it_can(strategy: str) -> None:
    result = simulate(lambda _: CAPACITY, 2, fixed_family(COSTS[-1] / 2), strategy=strategy)
    assert result.rejected == 0
    assert result.within(SLO) > 0.9


def test_a_batch_behind_a_long_queue_gets_a_cheaper_policy_and_the_load_keeps_its_own() -> None:
    costs = [member.cost for member in make_family()]
    controller = LoadController(costs, SLO)
    controller.add_batch(8 * COSTS[-1], 0.005)
    full = len(costs) - 1
    chosen = [controller.choose(others) for others in (-3, 0, 8, 20, 40, 80, 10_000)]
    assert chosen[:3] == [full] * 3
    assert (np.diff(chosen) <= 0).all()
    assert chosen[-1] == 0
    assert controller.index == full
