"""The budget controller against simulated inputs, and at its limits."""

import json
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_probs

import exitwise as ew
from exitwise.core.predictions import ExitPrediction, Predictions
from exitwise.policies.scores import SCORES, exit_scores

pytestmark = pytest.mark.numerical

COSTS = (1.0, 2.0, 4.0, 7.0)
RANGE = COSTS[-1] - COSTS[0]


def confidences(rng: np.random.Generator, samples: int, difficulty: float) -> np.ndarray:
    """Confidences (K, n): lower for difficult inputs, higher at later exits."""
    ease = rng.normal(size=samples) - difficulty
    noise = rng.normal(scale=0.5, size=(4, samples))
    return np.asarray(1 / (1 + np.exp(-(ease + np.array([[0.0], [0.6], [1.1], [1.5]]) + noise))))


def fitted(budget: float = 3.5, strategy: str = "geometric") -> ew.Policy:
    confidence = confidences(np.random.default_rng(0), 4000, 0.0)
    probs = np.stack([confidence, (1 - confidence) / 2, (1 - confidence) / 2], axis=2)
    probs = np.where(confidence[..., None] > 1 / 3, probs, 1 / 3)
    return ew.fit_policy(probs, costs=COSTS, budget=budget, strategy=strategy)


def run_batches(
    controller: ew.BudgetController, difficulties: list[float], batch: int = 64, seed: int = 1, give_scores: bool = True
) -> np.ndarray:
    """Run the controller on batches, and return the mean cost of each batch."""
    rng = np.random.default_rng(seed)
    costs = []
    for difficulty in difficulties:
        scores = confidences(rng, batch, difficulty)
        exits = controller.policy.exits_from_scores(scores)
        controller.update(exits, scores[exits, np.arange(batch)] if give_scores else None)
        costs.append(np.asarray(COSTS)[exits].mean())
    return np.array(costs)


class TestShifted:
    @given(
        st.integers(0, 10**6),
        st.sampled_from(list(SCORES.keys() - {"variance"})),
        st.floats(-5, 5),
        st.floats(0, 5),
    )
    @settings(max_examples=60, deadline=None)
    def test_no_sample_leaves_later_under_a_less_careful_policy(
        self, seed: int, score: str, by: float, more: float
    ) -> None:
        probs = random_probs(seed, 4, 40, 5)
        policy = ew.fit_policy(probs, costs=COSTS, budget=3, score=score)
        less, greater = policy.shifted(by), policy.shifted(by + more)
        assert (less.exits(probs) <= greater.exits(probs)).all()

    @pytest.mark.parametrize("score", sorted(SCORES.keys() - {"patience"}))
    def test_doubt_is_scaled(self, score: str) -> None:
        certain = SCORES[score].full_certainty
        policy = ew.Policy((certain - 0.2, inf, -inf), score, cost=1.0, q=2.0)
        assert policy.shifted(log(2)).thresholds == (pytest.approx(certain - 0.1, abs=1e-6), inf, -inf)
        assert policy.shifted(-log(3)).thresholds == (pytest.approx(certain - 0.6, abs=1e-6), inf, -inf)
        assert policy.shifted(0) is policy
        assert (policy.shifted(1).cost, policy.shifted(1).q) == (None, None)

    def test_a_saturated_threshold_can_be_lowered_and_raised(self) -> None:
        """Confidences of exactly 1, whose ties are broken by a hash, have no distance to full certainty to scale."""
        policy = ew.Policy((1 + 1e-9, -inf))
        assert policy.shifted(-1).thresholds[0] < 1 < policy.thresholds[0] < policy.shifted(1).thresholds[0]

    @pytest.mark.parametrize("score", ["confidence", "patience", "variance"])
    def test_the_cost_grows_little_by_little_where_scores_are_equal(self, score: str) -> None:
        probs = np.concatenate([np.ones((4, 2000, 1)), random_probs(0, 4, 2000, 5) * 1e-9], axis=2).astype(np.float32)
        preds = Predictions(probs.shape, lambda: map(ExitPrediction, probs), lambda _: np.zeros(probs.shape[:2]))
        policy = ew.fit_policy(preds, costs=COSTS, budget=3, score=score)
        shifts = [-2.0, -0.5, -0.1, -0.01, 0.0, 0.01, 0.1, 0.5, 2.0]
        costs = [np.asarray(COSTS)[policy.shifted(by).exits(preds)].mean() for by in shifts]
        assert costs == sorted(costs)
        assert costs[4] == pytest.approx(3, abs=0.01)
        if score == "patience":  # other scores are further apart than these shifts
            assert np.diff(costs)[3:5].max() < 0.5


class TestHolds:
    @pytest.mark.parametrize("give_scores", [True, False])
    @pytest.mark.parametrize("batch", [4, 64, 500])
    @pytest.mark.parametrize("difficulty", [-1.5, -0.5, 0.5, 1.5, 3.0])
    @pytest.mark.slow_after_first
    def test_the_mean_returns_to_the_budget(self, difficulty: float, batch: int, give_scores: bool) -> None:
        """Inputs that cost from half to twice as much as those that thresholds were fitted on."""
        policy = fitted()
        alone = np.asarray(COSTS)[
            policy.exits_from_scores(confidences(np.random.default_rng(5), 20_000, difficulty))
        ].mean()
        assert abs(alone - 3.5) > 0.05 * 3.5
        controller = ew.BudgetController(policy, 3.5)
        batches = 20_000 // batch
        costs = run_batches(controller, [difficulty] * batches, batch, give_scores=give_scores)
        assert costs[batches // 2 :].mean() == pytest.approx(3.5, rel=0.01)
        assert controller.mean_cost == pytest.approx(costs.mean())
        assert controller.state.samples == batches * batch

    def test_overspend_is_compensated(self) -> None:
        """The mean over all batches since the change returns to the budget, not only that of the last batches."""
        controller = ew.BudgetController(fitted(), 3.5)
        run_batches(controller, [0.0] * 50)
        costs = run_batches(controller, [2.0] * 120, seed=2)
        assert costs[:3].mean() > 1.2 * 3.5
        assert costs.mean() == pytest.approx(3.5, rel=0.02)

    def test_unchanged_inputs_hardly_move_the_policy(self) -> None:
        controller = ew.BudgetController(fitted(), 3.5)
        shifts = []
        for seed in range(40):
            run_batches(controller, [0.0] * 5, seed=seed)
            shifts.append(controller.state.shift)
        assert np.abs(shifts).max() < 0.5
        assert abs(np.mean(shifts)) < 0.1

    def test_another_budget_than_the_policy_was_fitted_for(self) -> None:
        for budget in (2.0, 5.5):
            controller = ew.BudgetController(fitted(), budget)
            assert run_batches(controller, [0.0] * 300)[150:].mean() == pytest.approx(budget, rel=0.01)

    def test_one_batch_moves_it_by_no_more_than_a_step(self) -> None:
        controller = ew.BudgetController(fitted(), 3.5, step=0.2)
        for exits in ([3] * 1000, [0] * 1000, [3] * 5):
            before = controller.state.shift
            controller.update(exits)
            assert abs(controller.state.shift - before) <= 0.2 + 1e-12

    @pytest.mark.parametrize("difficulty", [-30.0, 30.0])
    def test_overspend_is_not_accumulated_at_the_limit(self, difficulty: float) -> None:
        """Inputs so easy, or so difficult, that no thresholds help; after them the controller recovers fast."""
        policy = ew.Policy((inf, 0.9, 0.9, -inf), costs=COSTS, cost=3.5, budget=3.5)
        controller = ew.BudgetController(policy, 3.5)
        once = ew.BudgetController(policy, 3.5)
        run_batches(controller, [difficulty] * 2000)
        run_batches(once, [difficulty] * 40)
        assert abs(controller.state.debt) <= abs(once.state.debt) * 1.5 + 1280 * RANGE
        costs = run_batches(controller, [0.0] * 120, seed=3)
        assert costs[60:].mean() == pytest.approx(3.5, rel=0.03)

    def test_a_policy_that_saves_is_never_made_more_expensive(self) -> None:
        """It spends less because later exits are worse: the rest of the budget must not be spent."""
        policy = ew.Policy((0.6, 0.5, 0.4, -inf), costs=COSTS, cost=2.0, budget=6.0)
        controller = ew.BudgetController(policy, 6.0)
        run_batches(controller, [0.0] * 100)
        assert controller.policy.thresholds == policy.thresholds
        low = ew.BudgetController(policy, 1.5)
        assert run_batches(low, [0.0] * 300)[150:].mean() == pytest.approx(1.5, rel=0.02)

    def test_empty_batches_change_nothing(self) -> None:
        controller = ew.BudgetController(fitted())
        before = controller.to_dict()
        controller.update(np.empty(0, dtype=np.int64))
        controller.update([])
        assert controller.to_dict() == before

    def test_tensors_are_taken(self) -> None:
        from_tensors, from_lists = ew.BudgetController(fitted()), ew.BudgetController(fitted())
        from_tensors.update(torch.tensor([0, 3, 3]), torch.tensor([0.9, 0.5, 0.5]))
        from_lists.update([0, 3, 3], [0.9, 0.5, 0.5])
        assert from_tensors.state.shift == pytest.approx(from_lists.state.shift)


class TestState:
    def test_another_process_resumes_from_the_file(self, tmp_path: Path) -> None:
        whole, first = (ew.BudgetController(fitted(), 3.5, horizon=500, step=0.3) for _ in range(2))
        run_batches(whole, [1.0] * 20, seed=1)
        run_batches(first, [1.0] * 20, seed=1)
        first.save(tmp_path / "controller.json")
        second = ew.BudgetController.load(tmp_path / "controller.json")
        assert (run_batches(whole, [1.0] * 20, seed=2) == run_batches(second, [1.0] * 20, seed=2)).all()
        assert second.to_dict() == whole.to_dict()
        assert second.policy == whole.policy
        assert second.fitted is second.base_policy
        assert "3.5" in repr(second)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 2}, "must hold a controller of version 1"),
            ({"format": "exitwise.policy"}, "must hold a controller"),
            ({"state": {"shift": 0.0}}, "not a usable controller"),
            ({"state": {"shift": "far", "slope": 1.0}}, "`shift` must be a number, but got 'far'"),
            ({"state": {"shift": 0.0, "slope": 1.0, "colour": 1}}, "not a usable controller"),
            ({"state": None}, "not a usable controller"),
            ({"state": {"shift": 0.0, "slope": 0.0}}, "`slope` must be positive"),
            ({"state": {"shift": 0.0, "slope": 1.0, "samples": -5}}, "`samples` not negative"),
            ({"budget": 100}, "`budget` must lie between"),
            ({"policy": {"thresholds": [0.5]}}, "the last -inf"),
            ({"policy": None}, "not a usable controller"),
            ({"horizon": 0}, "`horizon`"),
            ({"horizon": 10**400}, "`horizon` must be a whole number from 1 to"),
            ({"budget": 10**400}, "`budget` must lie between"),
            ({"step": 1e308}, "`step`"),
            ({"state": {"shift": 1e308, "slope": 1.0}}, "`shift` must be a number from -4 to 4, but got 1e.308"),
            ({"state": {"shift": 0.0, "slope": 1e308}}, "`slope` must be a number of at most"),
            ({"state": {"shift": 0.0, "slope": 10**400}}, "`slope` must be a number"),
            ({"state": {"shift": 0.0, "slope": 1.0, "debt": 1e308}}, "`debt`"),
            ({"state": {"shift": 0.0, "slope": 1.0, "spent": 1e308}}, "`spent`"),
            ({"state": {"shift": 0.0, "slope": 1.0, "samples": 10**400}}, "`samples`"),
            ({"state": {"shift": 0.0, "slope": 1.0, "samples": 1.5}}, "`samples`"),
        ],
    )
    def test_a_broken_file_is_named_and_refused(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        path = tmp_path / "controller.json"
        ew.BudgetController(fitted()).save(path)
        data = {**json.loads(path.read_text()), **change}
        del data["sha256"]
        path.write_text(json.dumps(data))
        with pytest.raises(ew.InputError, match=message) as caught:
            ew.BudgetController.load(path)
        assert "controller.json" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ew.BudgetController(0.5), "`policy` must be a Policy, but got float"),  # type: ignore[arg-type]
        (lambda: ew.BudgetController(ew.Policy((0.5, -inf))), "`policy` must know its costs"),
        (lambda: ew.BudgetController(fitted(), 0.9), "1 to 7 MACs, but got 0.9"),
        (lambda: ew.BudgetController(fitted(), 7.1), "1 to 7 MACs, but got 7.1"),
        (lambda: ew.BudgetController(fitted(), float("nan")), "but got nan"),
        (lambda: ew.BudgetController(ew.sweep(random_probs(0, 2, 9, 3), costs=[1, 2])[0]), "but got None"),
        (lambda: ew.BudgetController(fitted(), horizon=0), "`horizon`"),
        (lambda: ew.BudgetController(fitted(), 1e308), "1 to 7 MACs, but got 1e.308"),
        (lambda: ew.BudgetController(fitted(), 10**400), "1 to 7 MACs, but got 1000"),
        (lambda: ew.BudgetController(fitted(), 10**5000), "1 to 7 MACs, but got a huge int"),
        (lambda: ew.BudgetController(fitted(), horizon=10**400), "`horizon` must be a whole number from 1 to 1000000"),
        (lambda: ew.BudgetController(fitted(), step=10**400), "`step` must be a number between 0 and 4"),
        (lambda: fitted().shifted(float("nan")), "`by` must be a number, but got nan"),
        (lambda: fitted().shifted(10**400), "`by` must be a number"),
        (lambda: ew.BudgetController(fitted(), step=0), "`step`"),
        (lambda: ew.BudgetController(fitted()).update([4]), "`exits` must lie in 0..3, but reach from 4 to 4"),
        (lambda: ew.BudgetController(fitted()).update([0.5]), "`exits` must be whole numbers"),
        (lambda: ew.BudgetController(fitted()).update([0, 1], [0.5]), "`scores` must be 2 finite numbers"),
        (lambda: ew.BudgetController(fitted()).update([0], [float("nan")]), "finite"),
        (lambda: ew.BudgetController(fitted()).update([[0]]), "`exits`"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ew.InputError, match=message):
        make()


def test_extreme_shifts_do_not_overflow() -> None:
    for by in (1e308, -1e308, 5000, -5000):
        assert all(value == value for value in fitted().shifted(by).thresholds)


def test_the_slope_is_that_of_the_cost() -> None:
    """The slope estimated from scores is near the true change of the cost when the policy shifts."""
    policy = fitted()
    controller = ew.BudgetController(policy, 3.5, horizon=10**6)
    scores = confidences(np.random.default_rng(9), 200_000, 0.0)
    exits = policy.exits_from_scores(scores)
    for _ in range(30):
        controller._update_slope(exits, scores[exits, np.arange(len(exits))])
    costs = np.asarray(COSTS)
    true = (costs[policy.shifted(0.1).exits_from_scores(scores)].mean() - costs[exits].mean()) / 0.1
    assert 0.4 * true < controller.state.slope < 1.2 * true  # a sample may continue beyond the next exit


def test_scores_of_a_table_are_what_update_takes() -> None:
    probs = random_probs(0, 4, 50, 5)
    policy = ew.fit_policy(probs, costs=COSTS, budget=3)
    table, exits = exit_scores(probs), policy.exits(probs)
    controller = ew.BudgetController(policy)
    controller.update(exits, table[exits, np.arange(50)])
    assert controller.mean_cost == pytest.approx(policy.cost)
    assert exp(controller.state.shift) == pytest.approx(1, abs=0.2)
