"""Comparison of chains: joined traces, cross-fitting, intervals and the Pareto front."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

import exitwise as ew
from exitwise.calibration.chain import chain_traces
from exitwise.evaluation.best_cascades import FOLDS

N, CLASSES = 200, 3


def network(skill: float, cost: float, seed: int) -> ew.Trace:
    """Return the trace of a network whose logits are noise plus `skill` at the true class."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(N) % CLASSES
    features = torch.randn(N, CLASSES, generator=rng)
    features[torch.arange(N), labels] += skill
    head = ew.calibration.trace.HeadWeights(torch.eye(CLASSES), None)  # type: ignore[attr-defined]
    return ew.Trace(ew.Split((features,), labels), None, (head,), (), ew.Costs((cost,)))


TRACES = {"weak": network(1.5, 1.0, 0), "strong": network(3.5, 8.0, 1), "useless": network(0.0, 4.0, 2)}


@pytest.fixture(scope="module")
def table() -> ew.CascadeTable:
    return ew.best_cascades(TRACES, [2.0, 4.0, 9.0], milliseconds={"weak": 2.0, "strong": 3.0, "useless": 9.0})


@pytest.mark.slow
def test_all_chains_in_all_orders_are_compared(table: ew.CascadeTable) -> None:
    chains = {chain for length in (2, 3) for chain in permutations(TRACES, length)}
    assert {row.networks for row in table.rows if row.budget == 9.0} == chains
    assert {row.networks for row in table.rows if row.budget == 2.0} == {c for c in chains if c[0] == "weak"}
    assert [row.name for row in table.networks] == list(TRACES)


@pytest.mark.slow
def test_a_network_alone_is_measured_by_hand(table: ew.CascadeTable) -> None:
    for row in table.networks:
        trace = TRACES[row.name]
        correct = (trace.val.features[0].argmax(1) == trace.val.labels).double()
        assert row.top1 == pytest.approx(float(correct.mean()))  # a temperature changes no class
        assert row.cost == trace.costs.values[0]
        error = float((correct.mean() * (1 - correct.mean()) / N) ** 0.5)
        low, high = row.interval
        assert low <= row.top1 <= high
        assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)  # 1,000 resamples against the normal formula


@pytest.mark.slow
def test_budgets_hold_on_average_and_good_chains_win(table: ew.CascadeTable) -> None:
    for row in table.rows:
        assert row.cost <= row.budget * 1.1  # thresholds are of other folds
        if row.gain is not None and row.gain_interval is not None:
            assert row.gain_interval[0] <= row.gain <= row.gain_interval[1]
    best = table.best
    assert best[1] is not None
    assert best[1].networks[0] == "weak"
    assert "strong" in best[1].networks
    assert best[1].gain is not None
    assert best[1].gain > 0.05
    for chosen, row in zip(table.chosen_top1, best, strict=True):
        assert chosen is not None
        assert row is not None
        assert chosen <= row.top1 + 1e-9
    assert "weak > strong" in str(table)


@pytest.mark.slow
def test_times_follow_the_exits(table: ew.CascadeTable) -> None:
    row = next(row for row in table.rows if row.networks == ("weak", "strong") and row.budget == 4.0)
    share = (row.cost - 1) / 8
    assert row.milliseconds == pytest.approx(2 + 3 * share)


@pytest.mark.parametrize("cost", ["cost", "milliseconds"])
@pytest.mark.slow
def test_the_front_is_not_dominated(table: ew.CascadeTable, cost: str) -> None:
    rows = [*table.networks, *table.rows]
    front = table.front(cost)
    for row in rows:
        dominated = any(
            getattr(other, cost) <= getattr(row, cost) and other.top1 >= row.top1 and other != row for other in front
        )
        assert dominated or row in front
    assert [row.top1 for row in front] == sorted(row.top1 for row in front)


def test_cross_fitting_is_by_folds_that_saw_nothing() -> None:
    """Labels of one fold at random change its own result, but not what was fitted for the others' thresholds."""
    fold = np.empty(N, dtype=int)
    fold[np.random.default_rng(0).permutation(N)] = np.arange(N) % FOLDS
    inside = torch.from_numpy(fold == 0)
    chain = chain_traces([TRACES["weak"], TRACES["strong"]])
    tuned = replace(chain, val=chain.val.take(~inside))
    calibration = ew.calibrate(tuned, "Pool")
    policy = ew.fit_policy(
        calibration.predict(tuned.val), tuned.val.labels, chain.costs, budget=4.0, strategy="optimized"
    )
    held_out = chain.val.take(inside)
    expected = ew.evaluate(calibration.predict(held_out), labels=held_out.labels, policy=policy, costs=chain.costs)
    swapped = chain.val.labels.clone()
    swapped[inside] = (swapped[inside] + 1) % CLASSES
    wrong = {name: replace(TRACES[name], val=replace(TRACES[name].val, labels=swapped)) for name in ("weak", "strong")}
    ours = {name: TRACES[name] for name in wrong}
    rows = [
        next(row for row in ew.best_cascades(traces, [4.0]).rows if row.networks == ("weak", "strong"))
        for traces in (ours, wrong)
    ]
    # All of the fold's samples that were right are wrong now; of the others, the fits have changed a little.
    assert rows[0].top1 - rows[1].top1 == pytest.approx(expected.top1 / FOLDS, abs=0.06)


def test_joined_traces_add_costs_and_refuse_other_samples() -> None:
    joined = chain_traces([TRACES["weak"], TRACES["strong"], TRACES["useless"]])
    assert joined.costs.values == (1.0, 9.0, 13.0)
    assert joined.num_exits == 3
    other = network(1.0, 1.0, 5)
    shuffled = replace(other, val=other.val.take(torch.arange(N).flip(0)))
    with pytest.raises(ew.InputError, match="must have the val samples of the first trace"):
        chain_traces([other, shuffled])
    with pytest.raises(ew.InputError, match="the trace of 'b' must have costs in MACs, but has them in ms"):
        ew.best_cascades({"a": other, "b": replace(other, costs=ew.Costs((1.0,), "ms"))}, [2.0])
    named = [replace(other, classes=names) for names in (("a", "b", "c"), ("a", "c", "b"))]
    with pytest.raises(ew.InputError, match="must have the classes of the first trace"):
        ew.best_cascades({"a": named[0], "b": named[1]}, [2.0])


def test_bad_arguments_are_refused() -> None:
    for traces, budgets, options, message in (
        ({}, [1.0], {}, "`traces` must map names of networks"),
        (TRACES, [], {}, "`budgets` must hold at least one budget"),
        (TRACES, 2e7, {}, "`budgets` must be several numbers"),
        (TRACES, [1.0], {"milliseconds": [1, 2]}, "`milliseconds` must map names of networks to times"),
        (TRACES, [-1.0], {}, "`budgets` must be a number"),
        (TRACES, [1.0], {"max_length": 0}, "`max_length` must be a whole number"),
        (TRACES, [1.0], {"milliseconds": {"weak": 1.0}}, "`milliseconds` must have 1 times for 'strong'"),
    ):
        with pytest.raises(ew.InputError, match=message):
            ew.best_cascades(traces, budgets, **options)  # type: ignore[arg-type]
    table = ew.best_cascades({"weak": TRACES["weak"]}, [0.5, 2.0])
    assert table.best[0] is None
    assert table.chosen_top1[0] is None
    assert "every network costs more" in str(table)
    with pytest.raises(ew.InputError, match="there are no times"):
        table.front("milliseconds")


def test_exits_of_one_net_can_be_chained() -> None:
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    single = ew.single_exit(trace, 2)
    assert single.num_exits == 1
    assert single.costs.values == trace.costs.values[2:3]
    assert torch.equal(single.val.features[0], trace.val.features[2])
