"""Policies for a budget, with every strategy."""

import re
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from cases import COSTS, MILLISECONDS, exact, of_confidence, runtime_exits, with_draws, without_ties
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import best_of_all_cuts, first_exit_reached, random_probs

import exitwise as ew
from exitwise.core.errors import InputError
from exitwise.core.predictions import Predictions
from exitwise.policies.cutoff_search import CutoffSearch
from exitwise.policies.scores import SCORES, exit_scores

pytestmark = pytest.mark.numerical

seeds = st.integers(0, 10**6)
kinds = st.sampled_from(["float32", "float64", "ties"])


class TestGeometric:
    @given(seeds, st.integers(1, 6), st.integers(1, 40), st.floats(0, 1), kinds, st.sampled_from(list(SCORES)))
    @settings(max_examples=80, deadline=None)
    def test_the_budget_is_kept(self, seed: int, exits: int, samples: int, part: float, kind: str, score: str) -> None:
        preds = with_draws(seed, exits, max(exits, samples), kind)
        costs = COSTS[:exits]
        budget = min(costs[0] + part * (costs[-1] - costs[0]), costs[-1])
        policy = ew.fit_policy(preds, costs=costs, budget=budget, score=score)
        taken = first_exit_reached(exit_scores(preds, score).tolist(), policy.thresholds)
        assert policy.exits(preds).tolist() == taken
        assert policy.cost == pytest.approx(fmean(costs[k] for k in taken))
        assert policy.cost <= budget
        assert (policy.budget, policy.score, policy.unit) == (budget, score, "MACs")

    @given(seeds, st.integers(2, 6), st.integers(6, 60), st.floats(0, 1), st.sampled_from(["float32", "float64"]))
    @settings(max_examples=80, deadline=None)
    def test_without_ties_it_is_spent_but_for_less_than_one_sample(
        self, seed: int, exits: int, samples: int, part: float, dtype: str
    ) -> None:
        """As q grows, samples move one by one between their exit and the last. The cost therefore changes in steps of
        at most (last cost - first cost) / n, and the bisection ends at a step that crosses the budget."""
        costs = COSTS[:exits]
        budget = min(costs[0] + part * (costs[-1] - costs[0]), costs[-1])
        policy = ew.fit_policy(without_ties(seed, exits, samples, dtype), costs=costs, budget=budget)
        assert policy.cost is not None
        assert budget - policy.cost <= (costs[-1] - costs[0]) / samples

    @pytest.mark.parametrize("kind", ["float32", "float64", "ties"])
    @pytest.mark.parametrize("exits", [1, 2, 5])
    def test_the_smallest_and_the_largest_budget_are_met_exactly(self, exits: int, kind: str) -> None:
        preds = random_probs(0, exits, 30, 4, kind)
        cheapest = ew.fit_policy(preds, costs=COSTS[:exits], budget=COSTS[0])
        full = ew.fit_policy(preds, costs=COSTS[:exits], budget=COSTS[exits - 1])
        assert (cheapest.cost, full.cost) == (COSTS[0], COSTS[exits - 1])
        assert set(cheapest.exits(preds)) == {0}
        assert set(full.exits(preds)) == {exits - 1}

    @given(seeds, st.integers(2, 5), st.integers(5, 25), kinds, st.lists(st.floats(0, 1), min_size=2, max_size=6))
    @settings(max_examples=40, deadline=None)
    def test_a_larger_budget_never_buys_less(
        self, seed: int, exits: int, samples: int, kind: str, parts: list[float]
    ) -> None:
        preds = Predictions.of(random_probs(seed, exits, samples, 4, kind))
        low, high = COSTS[0], COSTS[exits - 1]
        budgets = [min(low + part * (high - low), high) for part in sorted(parts)]
        costs = [ew.fit_policy(preds, costs=COSTS[:exits], budget=budget).cost for budget in budgets]
        assert costs == sorted(costs)  # type: ignore[type-var]

    @given(seeds, st.integers(2, 5), st.integers(5, 40), st.floats(0, 1), st.sampled_from(["float32", "float64"]))
    @settings(max_examples=60, deadline=None)
    def test_thresholds_lie_midway_between_neighboring_scores(
        self, seed: int, exits: int, samples: int, part: float, dtype: str
    ) -> None:
        probs = without_ties(seed, exits, samples, dtype)
        budget = min(COSTS[0] + part * (COSTS[exits - 1] - COSTS[0]), COSTS[exits - 1])
        policy = ew.fit_policy(probs, costs=COSTS[:exits], budget=budget)
        taken = policy.exits(probs)
        confidence = probs.max(axis=2).astype(np.float64)
        for k, threshold in enumerate(policy.thresholds[:-1]):
            exited, continued = confidence[k, taken == k], confidence[k, taken > k]
            if threshold == inf:
                assert not len(exited)
            elif threshold == -inf:
                assert not len(continued)
            else:
                assert threshold == pytest.approx((exited.min() + continued.max()) / 2, abs=1e-7)
        little = 0.4 / (samples - 1) / 3  # a third of the gap between scores
        for move in (-little, little):
            moved = ew.Policy(tuple(threshold + move for threshold in policy.thresholds))
            assert moved.exits(probs).tolist() == taken.tolist()

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_scores_that_are_neighboring_numbers_are_separated(self, dtype: str) -> None:
        """Saturated confidences differ in their last bit, and no number of their type lies midway."""
        number = np.dtype(dtype).type
        lower = number(0.75)
        for _ in range(2):  # once for each direction in which the middle may round
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
    def test_a_budget_out_of_reach_is_refused_with_the_range(self, budget: Any) -> None:
        with pytest.raises(ew.InputError, match=r"`budget` must lie between .*, 2 to 12 ms, but got") as caught:
            ew.fit_policy(random_probs(0, 3, 5, 4), costs=MILLISECONDS, budget=budget)
        assert str(caught.value).endswith(repr(budget))

    @pytest.mark.parametrize("number", [int, np.int64, np.float32, np.float64])
    def test_the_budget_may_be_any_kind_of_number(self, number: type) -> None:
        probs = random_probs(0, 3, 50, 4)
        assert ew.fit_policy(probs, costs=[1, 2, 6], budget=number(3)) == ew.fit_policy(
            probs, costs=[1, 2, 6], budget=3.0
        )

    @given(seeds, st.integers(2, 5), st.integers(5, 40), st.floats(0, 1), st.sampled_from(["confidence", "patience"]))
    @settings(max_examples=60, deadline=None)
    def test_the_whole_range_is_reached_when_all_are_equally_certain(
        self, seed: int, exits: int, samples: int, part: float, score: str
    ) -> None:
        """All confidences are equal: only the hash of the probabilities breaks these ties."""
        rest = np.random.default_rng(seed).dirichlet(np.ones(4), size=(exits, samples)) * 1e-9
        probs = np.concatenate([np.ones((exits, samples, 1)), rest], axis=2).astype(np.float32)
        assert len(np.unique(exact(probs, score)[0])) == 1
        costs = COSTS[:exits]
        budget = min(costs[0] + part * (costs[-1] - costs[0]), costs[-1])
        policy = ew.fit_policy(probs, costs=costs, budget=budget, score=score)
        assert 0 <= budget - policy.cost <= (costs[-1] - costs[0]) / samples + 1e-9  # type: ignore[operator]
        assert runtime_exits(policy, Predictions.of(probs)) == policy.exits(probs).tolist()


def overthinking(seed: int, samples: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (K, n, 2) of three exits with calibrated confidences, the second the best, and labels (n,)."""
    rng = np.random.default_rng(seed)
    spread = np.array([0.25, 0.5, 0.15])[:, None]
    confidence = 0.5 + spread * rng.uniform(size=(3, samples)) ** 0.5
    labels = rng.integers(0, 2, samples)
    correct = rng.uniform(size=(3, samples)) < confidence
    predicted = np.where(correct, labels, 1 - labels)
    probs = np.where((predicted == 0)[..., None], of_confidence(confidence), of_confidence(confidence)[..., ::-1])
    return probs, labels


def accuracy(probs: np.ndarray, labels: np.ndarray, exits: np.ndarray) -> float:
    return float((probs[exits, np.arange(len(labels))].argmax(axis=1) == labels).mean())


class TestOptimized:
    @given(
        seeds,
        st.integers(1, 5),
        st.integers(5, 60),
        st.floats(0, 1),
        kinds,
        st.sampled_from(list(SCORES)),
        st.sampled_from(["accuracy", "nlpd"]),
    )
    @settings(max_examples=60, deadline=None)
    @pytest.mark.slow
    def test_is_within_the_budget_and_never_below_geometric(
        self, seed: int, exits: int, samples: int, part: float, kind: str, score: str, objective: str
    ) -> None:
        preds = with_draws(seed, exits, samples, kind)
        labels = np.random.default_rng(seed).integers(0, 4, samples)
        costs = COSTS[:exits]
        budget = min(costs[0] + part * (costs[-1] - costs[0]), costs[-1])
        values = {}
        for strategy in ("geometric", "optimized", "auto", "label_free"):
            policy = ew.fit_policy(
                preds, labels, costs, budget=budget, strategy=strategy, score=score, objective=objective
            )
            result = ew.evaluate(preds, labels=labels, policy=policy, costs=costs)
            assert policy.cost == pytest.approx(result.cost)
            assert policy.cost <= budget * (1 + 1e-9)  # type: ignore[operator]
            assert policy.fit is not None
            assert (policy.strategy, policy.fit.samples) == (strategy, samples)
            reached = -result.nlpd if objective == "nlpd" else result.top1
            if strategy != "label_free":
                assert policy.fit.value == pytest.approx(abs(reached), abs=1e-6)
            values[strategy] = reached
        assert values["optimized"] >= values["geometric"] - 1e-9
        assert values["auto"] >= values["geometric"] - 1e-9

    @given(seeds, st.integers(2, 3), st.integers(4, 7), st.floats(0, 1))
    @settings(max_examples=30, deadline=None)
    def test_finds_what_trying_everything_finds_nearly_always(
        self, seed: int, exits: int, samples: int, part: float
    ) -> None:
        """The search moves one threshold at a time; missing the optimum by one sample is accepted for O(K n log n)."""
        probs = without_ties(seed, exits, samples)
        labels = np.random.default_rng(seed).integers(0, 2, samples)
        costs = np.array(COSTS[:exits])
        budget = float(costs[0] + part * (costs[-1] - costs[0]))
        best = best_of_all_cuts(exit_scores(probs), (probs.argmax(axis=2) == labels).astype(float), costs, budget)
        search = CutoffSearch(exit_scores(probs), costs, {"labels": (probs.argmax(axis=2) == labels).astype(float)})
        assert best - search.mean_value("labels", search.find_cutoffs("labels", budget)) <= 1 / samples + 1e-9

    def test_knows_that_deeper_can_be_worse(self) -> None:
        probs, labels = overthinking(0)
        geometric = ew.fit_policy(probs, labels, [1, 2, 6], budget=5.9, strategy="geometric")
        policy = ew.fit_policy(probs, labels, [1, 2, 6], budget=5.9, strategy="optimized")
        fresh, fresh_labels = overthinking(1, 4000)
        gain = accuracy(fresh, fresh_labels, policy.exits(fresh)) - accuracy(
            fresh, fresh_labels, geometric.exits(fresh)
        )
        assert policy.cost < 3.5 < 5.5 < geometric.cost  # type: ignore[operator]
        assert gain > 0.1

    def test_a_net_that_is_independent_of_the_labels_is_not_overfitted(self) -> None:
        """Exits that guess: the best fit to these labels is chance, which cross-fitting detects."""
        gaps, chosen = [], []
        for seed in range(12):
            probs = random_probs(seed, 3, 60, 4)
            labels = np.random.default_rng(seed + 1000).integers(0, 4, 60)
            fit = ew.fit_policy(probs, labels, [1, 2, 6], budget=3, strategy="optimized").fit
            assert fit is not None
            assert fit.gap is not None
            assert set(fit.portfolio) <= {"geometric", "optimized"}
            gaps.append(fit.gap)
            chosen.append(fit.chosen)
        assert fmean(gaps) > 0.01  # overfitting shows in the gap
        assert "geometric" in chosen

    def test_labels_are_needed(self) -> None:
        with pytest.raises(ew.InputError, match="`labels` are needed for the strategy 'optimized'"):
            ew.fit_policy(random_probs(0, 3, 5, 4), costs=[1, 2, 3], budget=2, strategy="optimized")

    def test_the_objective_decides(self) -> None:
        """A last exit that is correct more often, but so overconfident that its NLPD is worse."""
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 2, 600)
        confidence = np.stack([rng.uniform(0.65, 0.75, 600), rng.uniform(0.999, 0.9999, 600)])
        predicted = np.where(rng.uniform(size=(2, 600)) < [[0.7], [0.8]], labels, 1 - labels)
        probs = np.where((predicted == 0)[..., None], of_confidence(confidence), of_confidence(confidence)[..., ::-1])
        by_accuracy = ew.fit_policy(probs, labels, [1, 2], budget=2, objective="accuracy", strategy="optimized")
        by_nlpd = ew.fit_policy(probs, labels, [1, 2], budget=2, objective="nlpd", strategy="optimized")
        assert by_accuracy.cost > 1.9  # type: ignore[operator]
        assert by_nlpd.cost < 1.1  # type: ignore[operator]


class TestLabelFree:
    @pytest.mark.parametrize("objective", ["accuracy", "nlpd"])
    def test_does_as_well_as_with_labels_where_confidence_is_honest(self, objective: str) -> None:
        probs, labels = overthinking(0, 3000)
        fresh, fresh_labels = overthinking(1, 20000)
        costs = [1, 2, 6]
        results = {}
        for strategy, fit_labels in (("optimized", labels), ("label_free", None)):
            policy = ew.fit_policy(probs, fit_labels, costs, budget=1.6, strategy=strategy, objective=objective)
            results[strategy] = ew.evaluate(fresh, labels=fresh_labels, policy=policy, costs=costs)
        assert results["label_free"].top1 == pytest.approx(results["optimized"].top1, abs=0.01)
        assert results["label_free"].cost == pytest.approx(results["optimized"].cost, rel=0.02)

    def test_never_looks_at_the_labels(self) -> None:
        probs, labels = overthinking(0)
        policies = [
            ew.fit_policy(probs, fit_labels, [1, 2, 6], budget=2.5, strategy="label_free")
            for fit_labels in (None, labels, 1 - labels)
        ]
        assert policies[0] == policies[1] == policies[2]
        assert policies[0].fit is not None
        assert not policies[0].fit.used_labels

    def test_is_led_astray_by_overconfidence(self) -> None:
        """The first exit is overconfident: by its confidence, later exits gain nothing."""
        probs, labels = overthinking(0)
        lying = probs.copy()
        lying[0] = np.where(lying[0] > 0.5, 0.999, 0.001)
        free = ew.fit_policy(lying, None, [1, 2, 6], budget=2, strategy="label_free")
        seen = ew.fit_policy(lying, labels, [1, 2, 6], budget=2, strategy="auto")
        assert free.cost < 1.1  # type: ignore[operator]
        assert accuracy(lying, labels, seen.exits(lying)) > accuracy(lying, labels, free.exits(lying)) + 0.1


class TestAuto:
    def test_is_the_best_of_the_portfolio_on_samples_held_out(self) -> None:
        probs, labels = overthinking(0)
        fit = ew.fit_policy(probs, labels, [1, 2, 6], budget=5.9).fit
        assert fit is not None
        assert set(fit.portfolio) == {"geometric", "optimized", "label_free"}
        assert fit.held_out == max(fit.portfolio.values()) == fit.portfolio[fit.chosen]
        assert fit.used_labels

    def test_of_equals_the_cheaper_is_taken(self) -> None:
        """All exits predict the same: cost beyond the first exit gains nothing."""
        probs, labels = overthinking(0)
        for strategy in ("auto", "optimized"):
            policy = ew.fit_policy(np.stack([probs[1]] * 3), labels, [1, 2, 3], budget=2, strategy=strategy)
            assert policy.cost == 1

    def test_without_labels_it_trusts_the_family_alone(self) -> None:
        probs, _ = overthinking(0)
        auto = ew.fit_policy(probs, costs=[1, 2, 6], budget=4)
        geometric = ew.fit_policy(probs, costs=[1, 2, 6], budget=4, strategy="geometric")
        assert auto.thresholds == geometric.thresholds
        assert auto.fit is not None
        assert auto.fit.chosen == "geometric"

    def test_held_out_is_what_the_others_samples_give(self) -> None:
        """The reported number is reproduced by splitting by hand."""
        probs, labels = overthinking(3, 203)
        fold_of = np.random.default_rng(0).permutation(203) % 5
        correct = 0
        for fold in range(5):
            outside, inside = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
            policy = ew.fit_policy(probs[:, outside], costs=[1, 2, 6], budget=3, strategy="geometric")
            correct += round(accuracy(probs[:, inside], labels[inside], policy.exits(probs[:, inside])) * len(inside))
        fit = ew.fit_policy(probs, labels, [1, 2, 6], budget=3, strategy="geometric").fit
        assert fit is not None
        assert fit.held_out == pytest.approx(correct / 203)
        assert fit.gap == pytest.approx(fit.value - correct / 203)

    def test_many_budgets_are_what_each_alone_is(self) -> None:
        probs, labels = overthinking(0)
        budgets = [1.5, 2.0, 3.0, 5.0]
        for strategy in ("auto", "geometric", "optimized", "label_free"):
            together = ew.fit_policies(probs, labels, [1, 2, 6], budgets=budgets, strategy=strategy)
            alone = [ew.fit_policy(probs, labels, [1, 2, 6], budget=budget, strategy=strategy) for budget in budgets]
            assert together == alone

    def test_one_sample_of_one_exit(self) -> None:
        policy = ew.fit_policy(np.full((1, 1, 2), 0.5), [0], [3.0], budget=3)
        assert policy.cost == 3

    def test_one_budget_is_not_several(self) -> None:
        with pytest.raises(ew.InputError, match="`budgets` must be several budgets, but got 2"):
            ew.fit_policies(random_probs(0, 3, 9, 4), costs=[1, 2, 3], budgets=2)  # type: ignore[arg-type]

    def test_goes_to_a_file_and_back(self, tmp_path: Path) -> None:
        probs, labels = overthinking(0)
        policy = ew.fit_policy(probs, labels, [1, 2, 6], budget=2)
        policy.save(tmp_path / "policy.json")
        assert ew.Policy.load(tmp_path / "policy.json") == policy


class TestBadInput:
    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (
                {"strategy": "greedy"},
                "one of auto, geometric, optimized, label_free, but got 'greedy'",
            ),
            ({"strategy": ["auto"]}, "`strategy` must be one of"),
            ({"objective": "speed"}, "`objective` must be one of accuracy, nlpd, but got 'speed'"),
            ({"costs": None}, "`costs` are needed"),
            ({"labels": [0, 1, 2]}, "`labels` must be 5 whole numbers"),
            ({"labels": [0, 1, 2, 3, 4]}, "`labels` must lie in 0..3, but reach from 0 to 4"),
            ({"labels": [0.5] * 5}, "`labels` must be 5 whole numbers"),
            ({"preds": random_probs(0, 3, 2, 4)}, "at least as many samples as exits, 3, but has 2"),
            ({"preds": random_probs(0, 3, 5, 4) * 0.9}, "each sample's summing to one"),
            ({"preds": -random_probs(0, 3, 5, 4)}, "none negative"),
        ],
    )
    def test_is_named_in_one_line(self, changed: dict[str, Any], message: str) -> None:
        usual = {"preds": random_probs(0, 3, 5, 4), "costs": [1, 2, 3], "budget": 2}
        with pytest.raises(ew.InputError, match=message) as caught:
            ew.fit_policy(**{**usual, **changed})
        assert "\n" not in str(caught.value)


class TestCheapestPolicyForALoss:
    """`max_loss` instead of a budget: the cheapest policy that loses no more against a reference's last exit."""

    @staticmethod
    def data(seed: int = 0, n: int = 2000) -> tuple[np.ndarray, np.ndarray, ew.Costs]:
        """Predictions (3, n, 4) whose later exits are right more often, with confidences that are about calibrated."""
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 4, n)
        ease = rng.random(n)
        probs = []
        for quality in (0.5, 0.75, 0.9):
            confidence = np.clip(ease * quality + 0.3, 0.3, 0.99)
            right = rng.random(n) < confidence
            predicted = np.where(right, labels, (labels + rng.integers(1, 4, n)) % 4)
            row = np.repeat(((1 - confidence) / 3)[:, None], 4, axis=1)
            row[np.arange(n), predicted] = confidence
            probs.append(row)
        return np.stack(probs), labels, ew.Costs((1.0, 2.0, 4.0))

    @pytest.mark.slow
    def test_it_is_cheaper_the_more_it_may_lose_and_holds_on_other_samples(self) -> None:
        preds, labels, costs = self.data()
        fresh, fresh_labels, _ = self.data(1, 20000)
        last = (fresh.argmax(2)[-1] == fresh_labels).mean()
        previous = float("inf")
        for max_loss in (0.0, 0.02, 0.05, 0.2):
            policy = ew.fit_policy(preds, labels, costs, budget=None, max_loss=max_loss)
            assert policy.fit is not None
            assert policy.fit.max_loss == max_loss
            assert policy.fit.loss is not None
            assert policy.fit.loss <= max_loss + 1e-12
            assert policy.cost is not None
            assert policy.cost <= previous
            previous = policy.cost
            taken = policy.exits(fresh)
            top1 = (fresh.argmax(2)[taken, np.arange(len(taken))] == fresh_labels).mean()
            assert last - top1 < max_loss + 0.03
        assert previous < 2.0
        assert ew.Policy.from_dict(policy.to_dict()) == policy

    def test_no_cheaper_budget_of_the_same_strategy_would_do(self) -> None:
        preds, labels, costs = self.data()
        policy = ew.fit_policy(preds, labels, costs, budget=None, max_loss=0.05, strategy="geometric")
        last = (preds.argmax(2)[-1] == labels).mean()
        assert policy.cost is not None
        for share in (0.9, 0.8, 0.6):
            cheaper = ew.fit_policy(preds, labels, costs, budget=share * policy.cost, strategy="geometric")
            taken = cheaper.exits(preds)
            assert last - (preds.argmax(2)[taken, np.arange(len(taken))] == labels).mean() > 0.05

    @pytest.mark.slow
    def test_against_another_net(self) -> None:
        """A reference that is worse than the last exit allows a cheaper policy, a better one a dearer policy."""
        preds, labels, costs = self.data()
        cost = {
            name: ew.fit_policy(preds, labels, costs, budget=None, max_loss=0.03, reference=reference).cost
            for name, reference in (("own", None), ("first", preds[:1]), ("last", preds))
        }
        assert cost["first"] == costs.values[0]
        assert cost["own"] == cost["last"]
        assert cost["first"] < cost["own"]

    def test_without_labels_it_is_disagreement(self) -> None:
        preds, _, costs = self.data()
        policy = ew.fit_policy(preds, costs=costs, budget=None, max_loss=0.1, risk="disagreement")
        taken = policy.exits(preds)
        predicted = preds.argmax(2)
        assert (predicted[taken, np.arange(len(taken))] != predicted[-1]).mean() <= 0.1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"budget": 2.0, "max_loss": 0.1}, "`budget` must be None with `max_loss`"),
            ({"budget": None, "max_loss": -0.1}, "`max_loss` must be a number from 0 to 1"),
            ({"budget": None, "max_loss": float("nan")}, "`max_loss`"),
            ({"budget": None, "max_loss": 0.1, "certify": ew.Certificate(0.05)}, "`max_loss` is without a certificate"),
            ({"budget": None, "max_loss": 0.1, "risk": "luck"}, "`risk` must be one of accuracy, disagreement"),
            ({"budget": None, "max_loss": 0.1, "reference": np.full((1, 3, 4), 0.25)}, "`reference` must have the"),
        ],
    )
    def test_what_is_refused(self, arguments: dict[str, Any], message: str) -> None:
        preds, labels, costs = self.data(n=50)
        with pytest.raises(InputError, match=re.escape(message)):
            ew.fit_policy(preds, labels, costs, **arguments)

    def test_labels_are_needed_for_accuracy(self) -> None:
        preds, _, costs = self.data(n=50)
        with pytest.raises(InputError, match="`labels` are needed"):
            ew.fit_policy(preds, costs=costs, budget=None, max_loss=0.1)

    def test_a_loss_that_no_policy_meets(self) -> None:
        preds, labels, costs = self.data(n=300)
        perfect = np.eye(4)[labels][None]
        with pytest.raises(InputError, match=r"no policy loses at most 1 points .*the smallest loss is"):
            ew.fit_policy(preds, labels, costs, budget=None, max_loss=0.01, reference=perfect)
