import json
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import first_exit_reached, public_counts, public_rule, random_probs

import exitwise as ew
from exitwise.policy import SCORES, geometric_shares, scores
from exitwise.predictions import ExitPrediction, Predictions

COSTS = (1.0, 2.5, 3.0, 7.0, 8.0, 20.0)
MILLISECONDS = ew.Costs((2.0, 3.0, 12.0), unit="ms")

seeds = st.integers(0, 10**6)
kinds = st.sampled_from(["float32", "float64", "ties"])


def with_draws(seed: int, exits: int, samples: int, kind: str = "float64") -> Predictions:
    """Predictions for which every score exists."""
    probs = random_probs(seed, exits, samples, 4, kind)
    variance = np.random.default_rng(seed).integers(0, 8, (exits, samples)) / 100
    return Predictions(
        probs.shape, lambda: (ExitPrediction.from_probs(exit) for exit in probs), lambda predicted: variance
    )


def of_confidence(confidence: Any) -> np.ndarray:
    """(K, n, 2) probabilities with these confidences, each at least one half."""
    confidence = np.asarray(confidence)
    return np.stack([confidence, 1 - confidence], axis=2)


def without_ties(seed: int, exits: int, samples: int, dtype: str = "float64") -> np.ndarray:
    """(K, n, 2) whose confidences are evenly spaced at every exit, in another order at each."""
    rng = np.random.default_rng(seed)
    spaced = np.linspace(0.55, 0.95, samples)
    return of_confidence([rng.permutation(spaced) for _ in range(exits)]).astype(dtype)


class TestScores:
    @pytest.mark.parametrize("score", SCORES)
    def test_larger_is_more_certain(self, score: str) -> None:
        """From a coin toss to near certainty, with draws that agree more and more."""
        probs = of_confidence([[0.5, 0.6, 0.9, 0.99, 1.0]])
        variance = np.array([[0.2, 0.1, 0.05, 0.01, 0.0]])
        preds = Predictions(probs.shape, lambda: iter([ExitPrediction.from_probs(probs[0])]), lambda _: variance)
        assert (np.diff(scores(preds, score)[0]) > 0).all()

    def test_each_is_what_its_name_says(self) -> None:
        preds = with_draws(0, 3, 20, "ties")
        probs = preds.probs.numpy()
        assert scores(preds).tolist() == probs.max(axis=2).tolist()
        assert scores(preds, "entropy") == pytest.approx(-scipy.stats.entropy(probs, axis=2), abs=1e-12)
        assert preds.variance is not None
        assert scores(preds, "variance").tolist() == (-preds.variance).tolist()

    @pytest.mark.parametrize("use", [scores, lambda p, score: ew.sweep(p, costs=COSTS[:3], score=score)])
    def test_variance_needs_draws(self, use: Any) -> None:
        with pytest.raises(ew.InputError, match="'variance' needs draws"):
            use(random_probs(0, 3, 5, 4), "variance")

    @pytest.mark.parametrize(
        "use",
        [
            lambda preds: scores(preds, "margin"),
            lambda preds: ew.sweep(preds, costs=COSTS[:3], score="margin"),
            lambda preds: ew.fit_policy(preds, costs=COSTS[:3], budget=2, score="margin"),
            lambda preds: ew.Policy((0.5, 0.5, -inf), score="margin"),
        ],
    )
    def test_an_unknown_one_is_refused(self, use: Any) -> None:
        with pytest.raises(
            ew.InputError, match="`score` must be one of confidence, entropy, variance, but got 'margin'"
        ):
            use(random_probs(0, 3, 5, 4))


class TestExits:
    @given(seeds, st.integers(1, 6), st.integers(1, 30), kinds, st.data())
    @settings(max_examples=80, deadline=None)
    def test_a_sample_leaves_at_the_first_exit_that_is_certain_enough(
        self, seed: int, exits: int, samples: int, kind: str, data: st.DataObject
    ) -> None:
        score = data.draw(st.sampled_from(list(SCORES)))
        preds = with_draws(seed, exits, samples, kind)
        table = scores(preds, score)
        # Some of the thresholds are met exactly.
        values = st.sampled_from([inf, -inf, *table.ravel().tolist()]) | st.floats(-2, 1)
        thresholds = (*data.draw(st.lists(values, min_size=exits - 1, max_size=exits - 1)), -inf)
        thresholds = tuple(float(table.dtype.type(value)) for value in thresholds)
        policy = ew.Policy(thresholds, score)
        assert policy.exits(preds).tolist() == first_exit_reached(table.tolist(), thresholds)
        assert policy.exits_by(table).tolist() == policy.exits(preds).tolist()

    def test_tensors_and_arrays_take_the_same_exits(self) -> None:
        probs = random_probs(0, 3, 50, 4, "float32")
        policy = ew.Policy((0.9, 0.7, -inf))
        assert policy.exits(torch.from_numpy(probs)).tolist() == policy.exits(probs).tolist()
        assert set(policy.exits(probs)) == {0, 1, 2}

    def test_another_number_of_exits_is_refused(self) -> None:
        with pytest.raises(ew.InputError, match="`preds` must have 2 exits as the policy has, but has 3"):
            ew.Policy((0.5, -inf)).exits(random_probs(0, 3, 5, 4))


class TestSweep:
    @given(seeds, st.integers(1, 6), st.integers(1, 40), kinds, st.sampled_from(list(SCORES)))
    @settings(max_examples=60, deadline=None)
    def test_is_the_public_rule_sample_by_sample(
        self, seed: int, exits: int, samples: int, kind: str, score: str
    ) -> None:
        preds = with_draws(seed, exits, samples, kind)
        table = scores(preds, score).tolist()
        policies = ew.sweep(preds, costs=COSTS[:exits], score=score)
        assert [policy.q for policy in policies] == [p / 20 for p in range(1, 40)]
        for p, policy in enumerate(policies, start=1):
            thresholds, taken = public_rule(table, p)
            assert list(policy.thresholds) == thresholds
            assert policy.exits(preds).tolist() == taken
            assert policy.cost == pytest.approx(fmean(COSTS[k] for k in taken))

    @pytest.mark.parametrize(
        ("exits", "samples", "p"), [(2, 39, 6), (2, 37, 17), (3, 111, 2), (3, 39, 8), (4, 5000, 20)]
    )
    def test_shares_that_are_whole_numbers_of_samples_are_not_rounded_down(
        self, exits: int, samples: int, p: int
    ) -> None:
        """For instance 39 samples in the ratio 1 to 6/20: exactly 30 and 9."""
        probs = without_ties(0, exits, samples)
        taken = ew.sweep(probs, costs=COSTS[:exits])[p - 1].exits(probs)
        assert np.bincount(taken, minlength=exits).tolist() == public_counts(p, exits, samples)

    def test_shares_sum_to_one_however_extreme(self) -> None:
        for q in (1e-20, 0.05, 1.0, 1.95, 1e20):
            shares = geometric_shares(q, 40)
            assert shares.sum() == pytest.approx(1)
            if 0.01 < q < 100:
                assert shares[1:] / shares[:-1] == pytest.approx(q)

    def test_a_hand_worked_case(self) -> None:
        """q = 1 over three exits of six samples: two leave at each."""
        first = [0.9, 0.8, 0.7, 0.6, 0.55, 0.5]
        second = [0.5, 0.5, 0.6, 0.9, 0.8, 0.7]
        policy = ew.sweep(of_confidence([first, second, first]), costs=[1, 2, 6])[19]
        assert policy == ew.Policy((0.8, 0.8, -inf), cost=3.0, q=1.0, costs=(1, 2, 6))
        # A tie at the threshold takes everyone along, and then the second exit has too few left for its share.
        first = [0.9, 0.8, 0.8, 0.8, 0.8, 0.5]
        policy = ew.sweep(of_confidence([first, second, first]), costs=[1, 2, 6])[19]
        assert policy == ew.Policy((0.8, inf, -inf), cost=(5 * 1 + 6) / 6, q=1.0, costs=(1, 2, 6))

    def test_shares_below_one_sample_let_nobody_leave(self) -> None:
        policies = ew.sweep(random_probs(0, 3, 1, 4), costs=[1, 2, 6])
        assert {policy.thresholds for policy in policies} == {(inf, inf, -inf)}
        assert {policy.cost for policy in policies} == {6.0}

    def test_one_exit_takes_everyone(self) -> None:
        policies = ew.sweep(random_probs(0, 1, 5, 4), costs=[3])
        assert {(policy.thresholds, policy.cost) for policy in policies} == {((-inf,), 3.0)}

    def test_the_unit_is_that_of_the_costs(self) -> None:
        assert {policy.unit for policy in ew.sweep(random_probs(0, 3, 5, 4), costs=MILLISECONDS)} == {"ms"}


class TestFitPolicy:
    @given(seeds, st.integers(1, 6), st.integers(1, 40), st.floats(0, 1), kinds, st.sampled_from(list(SCORES)))
    @settings(max_examples=80, deadline=None)
    def test_the_budget_is_kept(self, seed: int, exits: int, samples: int, part: float, kind: str, score: str) -> None:
        preds = with_draws(seed, exits, samples, kind)
        costs = COSTS[:exits]
        budget = min(costs[0] + part * (costs[-1] - costs[0]), costs[-1])
        policy = ew.fit_policy(preds, costs=costs, budget=budget, score=score)
        taken = first_exit_reached(scores(preds, score).tolist(), policy.thresholds)
        assert policy.exits(preds).tolist() == taken
        assert policy.cost == pytest.approx(fmean(costs[k] for k in taken))
        assert policy.cost <= budget
        assert (policy.budget, policy.score, policy.unit) == (budget, score, "MACs")

    @given(seeds, st.integers(2, 6), st.integers(1, 60), st.floats(0, 1), st.sampled_from(["float32", "float64"]))
    @settings(max_examples=80, deadline=None)
    def test_without_ties_it_is_spent_but_for_less_than_one_sample(
        self, seed: int, exits: int, samples: int, part: float, dtype: str
    ) -> None:
        """As q grows, samples change one by one between their exit and the last, so the cost moves in steps of at
        most (last cost - first cost) / n, and the bisection ends at a step that crosses the budget."""
        costs = COSTS[:exits]
        budget = min(costs[0] + part * (costs[-1] - costs[0]), costs[-1])
        policy = ew.fit_policy(without_ties(seed, exits, samples, dtype), costs=costs, budget=budget)
        assert policy.cost is not None
        assert budget - policy.cost <= (costs[-1] - costs[0]) / samples

    @pytest.mark.parametrize("kind", ["float32", "float64", "ties"])
    @pytest.mark.parametrize("exits", [1, 2, 5])
    def test_the_cheapest_and_the_dearest_budget_are_met_exactly(self, exits: int, kind: str) -> None:
        preds = random_probs(0, exits, 30, 4, kind)
        cheapest = ew.fit_policy(preds, costs=COSTS[:exits], budget=COSTS[0])
        dearest = ew.fit_policy(preds, costs=COSTS[:exits], budget=COSTS[exits - 1])
        assert (cheapest.cost, dearest.cost) == (COSTS[0], COSTS[exits - 1])
        assert set(cheapest.exits(preds)) == {0}
        assert set(dearest.exits(preds)) == {exits - 1}

    @given(seeds, st.integers(2, 5), st.integers(1, 25), kinds, st.lists(st.floats(0, 1), min_size=2, max_size=6))
    @settings(max_examples=40, deadline=None)
    def test_a_larger_budget_never_buys_less(
        self, seed: int, exits: int, samples: int, kind: str, parts: list[float]
    ) -> None:
        preds = Predictions.of(random_probs(seed, exits, samples, 4, kind))
        low, high = COSTS[0], COSTS[exits - 1]
        budgets = [min(low + part * (high - low), high) for part in sorted(parts)]
        costs = [ew.fit_policy(preds, costs=COSTS[:exits], budget=budget).cost for budget in budgets]
        assert costs == sorted(costs)  # type: ignore[type-var]

    @given(seeds, st.integers(2, 5), st.integers(2, 40), st.floats(0, 1), st.sampled_from(["float32", "float64"]))
    @settings(max_examples=60, deadline=None)
    def test_thresholds_lie_midway_between_neighbouring_scores(
        self, seed: int, exits: int, samples: int, part: float, dtype: str
    ) -> None:
        probs = without_ties(seed, exits, samples, dtype)
        budget = min(COSTS[0] + part * (COSTS[exits - 1] - COSTS[0]), COSTS[exits - 1])
        policy = ew.fit_policy(probs, costs=COSTS[:exits], budget=budget)
        taken = policy.exits(probs)
        confidence = probs.max(axis=2).astype(np.float64)
        for k, threshold in enumerate(policy.thresholds[:-1]):
            left, stayed = confidence[k, taken == k], confidence[k, taken > k]
            if threshold == inf:
                assert not len(left)
            elif threshold == -inf:
                assert not len(stayed)
            else:
                assert threshold == pytest.approx((left.min() + stayed.max()) / 2, abs=1e-9)
        little = 0.4 / (samples - 1) / 3  # a third of the gap between scores
        for move in (-little, little):
            moved = ew.Policy(tuple(threshold + move for threshold in policy.thresholds))
            assert moved.exits(probs).tolist() == taken.tolist()

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    def test_scores_that_are_neighbouring_numbers_are_told_apart(self, dtype: str) -> None:
        """Saturated confidences differ in their last bit, and nothing of their own type lies midway."""
        number = np.dtype(dtype).type
        lower = number(0.75)
        for _ in range(2):  # whatever way the middle is rounded
            upper = np.nextafter(lower, number(1))
            confidence = np.array([[lower, upper]] * 2)
            policy = ew.fit_policy(of_confidence(confidence), costs=[1, 3], budget=2)
            assert policy.exits(of_confidence(confidence)).tolist() == [1, 0]
            assert policy.cost == 2
            lower = upper

    def test_shares_that_are_whole_numbers_of_samples(self) -> None:
        """Three exits at q = 1: a third of six samples at each, which costs exactly (1 + 2 + 6) / 3."""
        probs = without_ties(0, 3, 6)
        policy = ew.fit_policy(probs, costs=[1, 2, 6], budget=3)
        assert policy.cost == 3

    def test_one_exit_has_one_budget(self) -> None:
        probs = random_probs(0, 1, 5, 4)
        assert ew.fit_policy(probs, costs=[3], budget=3).thresholds == (-inf,)
        with pytest.raises(ew.InputError, match="3 to 3 MACs, but got 2"):
            ew.fit_policy(probs, costs=[3], budget=2)

    @pytest.mark.parametrize("budget", [1.99, 12.01, 0, -5.0, nan, inf, -inf, True, None, "5", [5.0], 5 + 0j])
    def test_a_budget_out_of_reach_is_told_what_is_within(self, budget: Any) -> None:
        with pytest.raises(ew.InputError, match=r"`budget` must lie between .*, 2 to 12 ms, but got") as caught:
            ew.fit_policy(random_probs(0, 3, 5, 4), costs=MILLISECONDS, budget=budget)
        assert str(caught.value).endswith(str(budget))

    @pytest.mark.parametrize("number", [int, np.int64, np.float32, np.float64])
    def test_the_budget_may_be_any_kind_of_number(self, number: type) -> None:
        probs = random_probs(0, 3, 50, 4)
        assert ew.fit_policy(probs, costs=[1, 2, 6], budget=number(3)) == ew.fit_policy(
            probs, costs=[1, 2, 6], budget=3.0
        )

    def test_an_unknown_strategy_is_refused(self) -> None:
        with pytest.raises(ew.InputError, match="`strategy` must be 'geometric', but got 'greedy'"):
            ew.fit_policy(random_probs(0, 3, 5, 4), costs=[1, 2, 3], budget=2, strategy="greedy")


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1, 2], "`costs` must have one value for each of 3 exits, but has 2"),
        ([1, 2, 3, 4], "one value for each of 3 exits, but has 4"),
        ([], "one per exit"),
        ([1, 3, 2], r"must grow from exit to exit, but got \[1.0, 3.0, 2.0\]"),
        ([1, 2, 2], "must grow"),
        ([-1, 2, 3], "must be positive"),
        ([0, 2, 3], "must be positive"),
        ([1, 2, nan], "finite"),
        ([1, 2, inf], "finite"),
        (["one", "two", "three"], "must be positive"),
        ([1, 2, 10**400], "finite"),
        (7, "`costs`"),
        (None, "`costs`"),
    ],
)
@pytest.mark.parametrize("use", [ew.sweep, lambda p, costs: ew.fit_policy(p, costs=costs, budget=2)])
def test_wrong_costs_are_refused(use: Any, costs: Sequence[float], message: str) -> None:
    with pytest.raises(ew.InputError, match=message) as caught:
        use(random_probs(0, 3, 5, 4), costs=costs)
    assert "`costs`" in str(caught.value)


class TestPolicy:
    @given(
        st.lists(st.floats(allow_nan=False), max_size=5),
        st.sampled_from(list(SCORES)),
        st.none() | st.floats(0, 1e12),
    )
    @settings(max_examples=60, deadline=None)
    def test_plain_data_and_back(self, thresholds: list[float], score: str, cost: float | None) -> None:
        policy = ew.Policy((*thresholds, -inf), score, "ms", cost=cost, q=cost)
        text = json.dumps(policy.to_dict(), allow_nan=False)
        assert ew.Policy.from_dict(json.loads(text)) == policy

    def test_a_file_and_back(self, tmp_path: Path) -> None:
        policy = ew.fit_policy(without_ties(0, 3, 9), costs=MILLISECONDS, budget=11.99)
        assert inf in policy.thresholds
        policy.save(tmp_path / "new" / "policy.json")
        ew.Policy((-inf,)).save(tmp_path / "new" / "policy.json")
        policy.save(str(tmp_path / "new" / "policy.json"))
        assert ew.Policy.load(tmp_path / "new" / "policy.json") == policy
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["policy.json"]
        data = json.loads((tmp_path / "new" / "policy.json").read_text())
        assert (data["format"], data["version"]) == ("exitwise.policy", 1)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "not valid JSON"),
            ('{"format": "exitwise.policy", "version": 1, "thresh', "not valid JSON"),
            (b"\xff\xfe\x00", "not valid JSON"),
            ("1" * 5000, "not valid JSON"),
            ("[1, 2]", "must hold a JSON object, but holds a list"),
            ("{}", "must hold a policy of version 1"),
            ({"version": 2}, "must hold a policy of version 1"),
            ({"version": "1"}, "must hold a policy of version 1"),
            ({"version": None}, "must hold a policy of version 1"),
            ({"format": "exitwise.trace"}, "must hold a policy of version 1"),
            ({"thresholds": [0.5, "nan", "-inf"]}, "`thresholds` must be numbers"),
            ({"thresholds": [0.5, nan, "-inf"]}, "`thresholds` must be numbers"),
            ({"thresholds": [0.5, 0.4]}, "the last -inf"),
            ({"thresholds": []}, "one per exit"),
            ({"thresholds": None}, "not a usable policy"),
            ({"thresholds": ["high", "-inf"]}, "not a usable policy"),
            ({"thresholds": [[0.5], "-inf"]}, "not a usable policy"),
            ({"thresholds": [10**400, "-inf"]}, "not a usable policy"),
            ({"score": "margin"}, "`score` must be one of"),
            ({"score": ["confidence"]}, "not a usable policy"),
            ({"colour": "blue"}, "not a usable policy"),
        ],
    )
    def test_a_broken_file_is_named_and_refused(self, tmp_path: Path, content: Any, message: str) -> None:
        path = tmp_path / "policy.json"
        if isinstance(content, dict):
            whole = {"format": "exitwise.policy", "version": 1, "thresholds": [0.5, "-inf"]}
            content = json.dumps({**whole, **content})
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ew.InputError, match=message) as caught:
            ew.Policy.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_thresholds_must_be_in_the_file(self) -> None:
        with pytest.raises(ew.InputError, match="thresholds"):
            ew.Policy.from_dict({"score": "confidence"})

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ew.InputError, match=r"none\.json does not exist"):
            ew.Policy.load(tmp_path / "none.json")

    @pytest.mark.parametrize("thresholds", [(), (0.5,), (0.5, nan, -inf), (nan,), (inf,), ("high", -inf)])
    def test_thresholds_are_numbers_and_the_last_takes_everyone(self, thresholds: Any) -> None:
        with pytest.raises(ew.InputError, match="`thresholds` must be numbers, one per exit, the last -inf"):
            ew.Policy(thresholds)
