"""The fit that a policy records, and policies for several budgets."""

from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from cases import COSTS, with_draws
from oracles import evaluate_one_by_one, random_probs

import exitwise as ew
from exitwise.policies.policy import PolicyFit
from exitwise.policies.scores import SCORES

pytestmark = pytest.mark.numerical


class TestGap:
    def test_is_what_is_lost_on_other_samples(self) -> None:
        """The gap is a drop of accuracy, or a rise of NLPD."""
        fit = PolicyFit("geometric", 10, "accuracy", True, value=0.8, held_out=0.7)
        assert fit.gap == pytest.approx(0.1)
        assert replace(fit, value=0.7, held_out=0.8).gap == pytest.approx(-0.1)
        assert replace(fit, objective="nlpd").gap == pytest.approx(-0.1)
        assert replace(fit, objective="nlpd", value=1.0, held_out=1.5).gap == pytest.approx(0.5)
        assert replace(fit, held_out=None).gap is None

    @pytest.mark.parametrize("objective", ["accuracy", "nlpd"])
    @pytest.mark.parametrize("score", ["confidence", "entropy"])
    def test_is_found_again_by_splitting_by_hand(self, objective: str, score: str) -> None:
        probs, costs = random_probs(1, 3, 83, 4), COSTS[:3]
        labels = np.random.default_rng(1).integers(0, 4, 83)
        key, sign = ("top1", 1) if objective == "accuracy" else ("nlpd", -1)
        fold_of = np.random.default_rng(0).permutation(83) % 5
        total = 0.0
        for fold in range(5):
            outside, inside = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
            policy = ew.fit_policy(probs[:, outside], costs=costs, budget=2.2, strategy="geometric", score=score)
            taken = policy.exits(probs[:, inside]).tolist()
            total += len(inside) * evaluate_one_by_one(probs[:, inside], labels[inside].tolist(), taken, costs)[key]
        policy = ew.fit_policy(probs, labels, costs, budget=2.2, strategy="geometric", score=score, objective=objective)
        value = evaluate_one_by_one(probs, labels.tolist(), policy.exits(probs).tolist(), costs)[key]
        assert policy.fit is not None
        assert (policy.fit.value, policy.fit.held_out) == pytest.approx((value, total / 83), rel=1e-6)
        assert policy.fit.gap == pytest.approx(sign * (value - total / 83), abs=1e-6)

    def test_too_few_samples_have_none(self) -> None:
        probs = random_probs(0, 3, 5, 4)
        fit = ew.fit_policy(probs, [0, 1, 2, 3, 0], [1, 2, 3], budget=2).fit
        assert fit is not None
        assert fit.held_out is fit.gap is None
        assert fit.portfolio == {}
        assert ew.fit_policy(random_probs(0, 3, 6, 4), None, [1, 2, 3], budget=2).fit.gap is not None  # type: ignore[union-attr]

    @pytest.mark.slow
    def test_a_large_gap_shows_overfitting(self) -> None:
        """Small sets of samples and exits that guess: on others one prediction in four is correct, at any thresholds.

        The out-of-fold value of the best candidate is slightly optimistic, because it selects the candidate.
        """
        fits: dict[str, list[PolicyFit]] = {"geometric": [], "optimized": []}
        for seed in range(40):
            probs = random_probs(seed, 3, 50, 4)
            labels = np.random.default_rng(seed + 500).integers(0, 4, 50)
            for strategy, fits_of_strategy in fits.items():
                fit = ew.fit_policy(probs, labels, [1, 2, 6], budget=3, strategy=strategy).fit
                assert fit is not None
                fits_of_strategy.append(fit)
        names = ("value", "held_out", "gap")
        value, held_out, gap = (fmean(getattr(fit, name) for fit in fits["optimized"]) for name in names)
        assert 0.25 < held_out < value - 0.01
        assert gap == pytest.approx(value - held_out)
        error = (0.25 * 0.75 / 50 / 40) ** 0.5
        for name in ("value", "held_out"):  # the geometric family uses no labels, so it cannot overfit
            assert fmean(getattr(fit, name) for fit in fits["geometric"]) == pytest.approx(0.25, abs=3 * error)


class TestManyBudgets:
    BUDGETS = (5.5, 1.0, 3.0, 3.0)

    @pytest.mark.parametrize(
        ("score", "objective"), [*((score, "accuracy") for score in SCORES), ("confidence", "nlpd")]
    )
    @pytest.mark.slow_after_first
    def test_each_is_what_it_is_alone_in_any_order(self, score: str, objective: str) -> None:
        preds = with_draws(0, 4, 40)
        labels = np.random.default_rng(0).integers(0, 4, 40)
        options: dict[str, Any] = {"score": score, "objective": objective}
        together = ew.fit_policies(preds, labels, COSTS[:4], budgets=self.BUDGETS, **options)
        assert together == [
            ew.fit_policy(preds, labels, COSTS[:4], budget=budget, **options) for budget in self.BUDGETS
        ]
        assert together[::-1] == ew.fit_policies(preds, labels, COSTS[:4], budgets=self.BUDGETS[::-1], **options)
        assert [policy.budget for policy in together] == list(self.BUDGETS)
        for policy in together:
            assert policy.cost is not None
            assert policy.budget is not None
            assert policy.cost <= policy.budget
            result = ew.evaluate(preds, labels=labels, policy=policy, costs=COSTS[:4])
            assert policy.cost == pytest.approx(result.cost)

    def test_no_budgets_no_policies(self) -> None:
        assert ew.fit_policies(random_probs(0, 3, 9, 4), costs=[1, 2, 3], budgets=[]) == []

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"budgets": [2, 3.5]}, "1 to 3 MACs, but got 3.5"),
            ({"budgets": [2, None]}, "but got None"),
            ({"strategy": "luck"}, "`strategy` must be one of"),
            ({"strategy": "optimized"}, "`labels` are needed"),
            ({"score": "luck"}, "`score` must be one of"),
            ({"score": "variance"}, "needs draws"),
            ({"objective": "luck"}, "`objective` must be one of"),
            ({"costs": None}, "`costs` are needed"),
            ({"costs": [1, 2]}, "one value for each of 3 exits"),
            ({"labels": [0, 1]}, "`labels` must be 9 whole numbers"),
        ],
    )
    def test_bad_input_is_named_in_one_line(self, changed: dict[str, Any], message: str) -> None:
        usual: dict[str, Any] = {"preds": random_probs(0, 3, 9, 4), "costs": [1, 2, 3], "budgets": [2]}
        with pytest.raises(ew.InputError, match=message) as caught:
            ew.fit_policies(**{**usual, **changed})
        assert "\n" not in str(caught.value)


def test_the_whole_cost_buys_the_full_net_where_costs_are_no_whole_numbers() -> None:
    last = 1e6 * 3**1.5
    policy = ew.fit_policy(random_probs(0, 3, 50, 4), costs=[1e6, 2.83e6, last], budget=last, strategy="geometric")
    assert policy.thresholds == (inf, inf, -inf)
