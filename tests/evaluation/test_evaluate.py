"""Evaluation of policies against a loop over samples, scikit-learn and cases worked by hand."""

import json
import subprocess
import sys
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import adaptive_calibration_error, evaluate_one_by_one, first_exit_reached, random_probs

import exitwise as ew
from exitwise.core.predictions import ExitPrediction, Predictions
from exitwise.evaluation.evaluate import Metrics
from exitwise.policies.scores import exit_scores

pytestmark = pytest.mark.numerical

COSTS = (1.0, 2.5, 3.0, 7.0)
METRICS = ("top1", "top5", "nlpd", "ece", "brier", "adaptive_ece", "auroc", "aurc")


def random_labels(seed: int, samples: int, classes: int) -> np.ndarray:
    return np.random.default_rng(seed + 1).integers(0, classes, samples)


def case(exits: int = 3, samples: int = 60, classes: int = 7) -> tuple[np.ndarray, np.ndarray]:
    return random_probs(0, exits, samples, classes), random_labels(0, samples, classes)


def point(cost: float, value: float = 0.5, **others: float) -> ew.Evaluation:
    """A point of a curve with one value for every metric except the named ones."""
    metrics = {**dict.fromkeys(METRICS, value), **others}
    return ew.Evaluation(**metrics, cost=cost, unit="MACs", samples=1, exit_shares=(1.0,), per_exit=())


class TestEvaluate:
    @given(
        st.integers(0, 10**6),
        st.integers(1, 4),
        st.integers(1, 30),
        st.integers(2, 9),
        st.sampled_from(["float32", "float64", "ties"]),
        st.sampled_from(["confidence", "entropy"]),
        st.data(),
    )
    @settings(max_examples=80, deadline=None)
    def test_is_the_loop_over_samples(
        self, seed: int, exits: int, samples: int, classes: int, kind: str, score: str, data: st.DataObject
    ) -> None:
        probs = random_probs(seed, exits, samples, classes, kind)
        labels = random_labels(seed, samples, classes)
        table = exit_scores(probs, score)
        reached = st.sampled_from([inf, -inf, *table.ravel().tolist()])
        policy = ew.Policy((*data.draw(st.lists(reached, min_size=exits - 1, max_size=exits - 1)), -inf), score)
        result = ew.evaluate(probs, labels=labels, policy=policy, costs=COSTS[:exits])

        taken = first_exit_reached(table.tolist(), policy.thresholds)
        expected = evaluate_one_by_one(probs, labels.tolist(), taken, COSTS[:exits])
        assert {name: getattr(result, name) for name in expected if name != "exit_shares"} == pytest.approx(
            {name: value for name, value in expected.items() if name != "exit_shares"}, abs=2e-6, nan_ok=True
        )
        assert result.exit_shares == pytest.approx(expected["exit_shares"])
        assert (result.samples, result.unit, len(result.per_exit)) == (samples, "MACs", exits)
        for k, alone in enumerate(result.per_exit):
            expected = evaluate_one_by_one(probs, labels.tolist(), [k] * samples, COSTS[:exits])
            names = set(expected) & set(METRICS)
            assert {name: getattr(alone, name) for name in names} == pytest.approx(
                {name: expected[name] for name in names}, abs=2e-6, nan_ok=True
            )

    def test_every_exit_agrees_with_scikit_learn(self) -> None:
        probs, labels = case(samples=300)
        result = ew.evaluate(probs, labels=labels, policy=ew.Policy((0.8, 0.6, -inf)), costs=COSTS[:3])
        for exit_probs, alone in zip(probs, result.per_exit, strict=True):
            correct = exit_probs.argmax(axis=1) == labels
            confidence = exit_probs.max(axis=1)
            assert alone.top1 == pytest.approx(sklearn.metrics.accuracy_score(labels, exit_probs.argmax(axis=1)))
            assert alone.top5 == pytest.approx(
                sklearn.metrics.top_k_accuracy_score(labels, exit_probs, k=5, labels=np.arange(7))
            )
            assert alone.nlpd == pytest.approx(sklearn.metrics.log_loss(labels, exit_probs, labels=np.arange(7)))
            assert alone.auroc == pytest.approx(sklearn.metrics.roc_auc_score(correct, confidence))
            assert alone.adaptive_ece == pytest.approx(
                adaptive_calibration_error(confidence.tolist(), correct.tolist())
            )

    def test_a_hand_worked_case(self) -> None:
        first = [[0.9, 0.1], [0.4, 0.6]]
        second = [[0.5, 0.5], [0.75, 0.25]]
        result = ew.evaluate([first, second], labels=[0, 1], policy=ew.Policy((0.8, -inf)), costs=[10, 40])
        # The first sample takes the first exit, correct with 0.9; the second takes the last, wrong with 0.75.
        assert (result.top1, result.top5, result.cost, result.exit_shares) == (0.5, 1.0, 25.0, (0.5, 0.5))
        assert result.nlpd == pytest.approx(-(np.log(0.9) + np.log(0.25)) / 2)
        assert result.ece == pytest.approx((0.1 + 0.75) / 2)
        assert result.brier == pytest.approx((2 * 0.1**2 + 2 * 0.75**2) / 2)
        assert (result.auroc, result.aurc) == (1.0, 0.25)
        assert [alone.top1 for alone in result.per_exit] == [1.0, 0.5]  # of ties the first class is predicted

    @pytest.mark.parametrize("score", ["confidence", "entropy", "variance"])
    def test_other_predictions_can_choose_the_exits(self, score: str) -> None:
        probs, labels = case()
        other = random_probs(9, 3, 60, 4)
        decider = Predictions(
            other.shape,
            lambda: (ExitPrediction(exit) for exit in other),
            lambda predicted: other.min(axis=2),
        )
        policy = ew.Policy((*np.quantile(exit_scores(decider, score), [0.7, 0.5]), -inf), score)
        result = ew.evaluate(probs, labels=labels, policy=policy, costs=COSTS[:3], decide_with=decider)
        taken = policy.exits(decider).tolist()
        assert set(taken) == {0, 1, 2}
        expected = evaluate_one_by_one(probs, labels.tolist(), taken, COSTS[:3])
        assert {name: getattr(result, name) for name in ("top1", "nlpd", "ece", "cost")} == pytest.approx(
            {name: expected[name] for name in ("top1", "nlpd", "ece", "cost")}
        )
        without_decider = ew.evaluate(probs, labels=labels, policy=ew.Policy((0.5, 0.5, -inf)), costs=COSTS[:3])
        assert result.per_exit == without_decider.per_exit

    @pytest.mark.parametrize("other", [(2, 60, 7), (3, 59, 7)])
    def test_predictions_that_choose_must_have_the_same_samples_and_exits(self, other: tuple[int, int, int]) -> None:
        probs, labels = case()
        with pytest.raises(ew.InputError, match=r"`decide_with` must have the exits and samples of `preds`, \(3, 60\)"):
            ew.evaluate(
                probs,
                labels=labels,
                policy=ew.Policy((0.5, 0.5, -inf)),
                costs=COSTS[:3],
                decide_with=random_probs(0, *other),
            )

    @pytest.mark.parametrize(
        "given",
        [list, torch.from_numpy, lambda labels: labels.astype(np.uint8), lambda labels: labels.astype(np.int32)],
    )
    def test_labels_of_any_whole_kind_are_taken(self, given: Any) -> None:
        probs, labels = case()
        policy = ew.Policy((0.8, 0.6, -inf))
        expected = ew.evaluate(probs, labels=labels, policy=policy, costs=COSTS[:3])
        assert ew.evaluate(torch.from_numpy(probs), labels=given(labels), policy=policy, costs=COSTS[:3]) == expected

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"labels": [0] * 59}, r"`labels` must be 60 whole numbers, but got int64 \(59,\)"),
            ({"labels": [0.0] * 60}, "`labels` must be 60 whole numbers, but got float64"),
            ({"labels": [0] * 59 + [7]}, r"`labels` must lie in 0\.\.6, but reach from 0 to 7"),
            ({"labels": [-1] + [0] * 59}, r"`labels` must lie in 0\.\.6, but reach from -1 to 0"),
            ({"costs": COSTS[:2]}, "`costs` must have one value for each of 3 exits, but has 2"),
            ({"costs": (3.0, 2.0, 1.0)}, "`costs` are cumulative and must grow"),
            ({"costs": ew.Costs(COSTS[:3], unit="ms")}, "`policy` is in MACs, but `costs` are in ms"),
            ({"policy": ew.Policy((0.5, 0.5, -inf), unit="ms")}, "`policy` is in ms, but `costs` are in MACs"),
            ({"policy": ew.Policy((0.5, -inf))}, "must have 2 exits as the policy has, but has 3"),
            ({"policy": ew.Policy((0.5, 0.5, -inf), "variance")}, "'variance' needs draws"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, changed: dict[str, Any], message: str) -> None:
        probs, labels = case()
        arguments = {"labels": labels, "policy": ew.Policy((0.5, 0.5, -inf)), "costs": COSTS[:3], **changed}
        with pytest.raises(ew.InputError, match=message):
            ew.evaluate(probs, **arguments)

    @pytest.mark.parametrize("right", [True, False])
    @pytest.mark.parametrize("samples", [1, 4])
    def test_no_auroc_if_all_predictions_are_correct_or_all_wrong(self, samples: int, right: bool) -> None:
        probs = np.array([[[0.8, 0.2]] * samples])
        result = ew.evaluate(probs, labels=[0 if right else 1] * samples, policy=ew.Policy((-inf,)), costs=[2])
        assert isnan(result.auroc)
        assert isnan(result.per_exit[0].auroc)
        assert (result.top1, result.aurc, result.exit_shares) == ((1, 0, (1,)) if right else (0, 1, (1,)))
        data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert (data["auroc"], data["per_exit"][0]["auroc"]) == (None, None)

    def test_nlpd_is_finite_where_probabilities_round_to_zero(self) -> None:
        log_probs = np.array([[0.0, -200.0], [0.0, -300.0]], dtype=np.float32)
        preds = Predictions((1, 2, 2), lambda: iter([ExitPrediction.from_log_probs(log_probs)]))
        assert ew.evaluate(preds, labels=[1, 1], policy=ew.Policy((-inf,)), costs=[1]).nlpd == 250
        zeros = ew.evaluate([[[0.0, 1.0]]], labels=[0], policy=ew.Policy((-inf,)), costs=[1])
        assert zeros.nlpd == pytest.approx(-np.log(np.finfo(np.float64).tiny))

    @pytest.mark.parametrize("made_from", ["probs", "log_probs"])
    def test_top1_is_how_often_the_predicted_class_is_right(self, made_from: str) -> None:
        """Two classes are so close that they differ only in their probabilities or only in their logarithms."""
        rng = np.random.default_rng(0)
        larger = rng.uniform(0.3, 0.45, 200).astype(np.float32)
        smaller = np.nextafter(larger, np.float32(0))
        probs = np.stack([smaller, larger, 1 - smaller - larger], axis=1)
        if made_from == "probs":
            pred = ExitPrediction(probs)
        else:
            top = np.log(larger)
            log_probs = np.stack([np.nextafter(top, np.float32(-9)), top, np.log(1 - 2 * larger)], axis=1)
            pred = ExitPrediction.from_log_probs(log_probs.astype(np.float32))
        preds = Predictions((1, 200, 3), lambda: iter([pred]))
        for label in (0, 1):
            result = ew.evaluate(preds, labels=[label] * 200, policy=ew.Policy((-inf,)), costs=[1])
            assert result.top1 == (preds.predicted == label).mean()


class TestBudgetCurve:
    def test_is_every_policy_evaluated_alone_in_its_order(self) -> None:
        probs, labels = case(exits=4, samples=50)
        policies = [
            *reversed(ew.sweep(probs, costs=COSTS)),
            ew.fit_policy(probs, costs=COSTS, budget=3, score="entropy"),
        ]
        curve = ew.budget_curve(probs, labels=labels, policies=policies, costs=COSTS)
        alone = [ew.evaluate(probs, labels=labels, policy=policy, costs=COSTS) for policy in policies]
        assert len(curve) == 40
        assert list(curve) == alone
        assert curve.points[0].cost > curve.points[38].cost  # not sorted

    def test_other_predictions_can_choose_the_exits_at_every_point(self) -> None:
        probs, labels = case(exits=4, samples=50)
        other = random_probs(5, 4, 50, 7)
        policies = ew.sweep(other, costs=COSTS)[::10]
        shared = {"labels": labels, "costs": COSTS, "decide_with": other}
        curve = ew.budget_curve(probs, policies=policies, **shared)
        assert {result.cost for result in curve} == {policy.cost for policy in policies}
        assert list(curve) == sorted(
            (ew.evaluate(probs, policy=policy, **shared) for policy in policies), key=lambda result: result.cost
        )

    def test_refuses_a_policy_in_another_unit(self) -> None:
        probs, labels = case()
        policies = [ew.Policy((0.5, 0.5, -inf)), ew.Policy((0.5, 0.5, -inf), unit="ms")]
        with pytest.raises(ew.InputError, match="`policy` is in ms, but `costs` are in MACs"):
            ew.budget_curve(probs, labels=labels, policies=policies, costs=COSTS[:3])

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [
            (1, 7, (0.4 * 1 + 0.6 * 2 + 0.8 * 3) / 6),  # flat before 2, rising to 4, flat after
            (2, 4, 0.6),
            (3, 4, 0.7),
            (2.5, 3.5, 0.6),
            (0, 1, 0.4),
            (5, 50, 0.8),
        ],
    )
    def test_mean_of_a_hand_worked_curve(self, low: float, high: float, expected: float) -> None:
        curve = ew.BudgetCurve((point(2, 0.4, ece=0.04), point(4, 0.8, ece=0.08)))
        mean = curve.mean(low, high)
        assert mean == pytest.approx({**dict.fromkeys(METRICS, expected), "ece": expected / 10})

    @given(
        st.lists(
            st.tuples(st.integers(1, 99), st.floats(0, 1)), min_size=1, max_size=8, unique_by=lambda drawn: drawn[0]
        ),
        st.floats(0, 80),
        st.floats(1, 60),
    )
    @settings(max_examples=60, deadline=None)
    def test_mean_is_a_fine_sum_over_the_interpolated_points(
        self, points: list[tuple[int, float]], low: float, width: float
    ) -> None:
        points.sort()
        curve = ew.BudgetCurve(tuple(point(cost, value) for cost, value in points))
        middles = low + width * (np.arange(50_000) + 0.5) / 50_000
        expected = np.interp(middles, *zip(*points, strict=True)).mean()
        assert curve.mean(low, low + width)["nlpd"] == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize(("low", "high", "expected"), [(1, 3, 0.5), (1, 2, 0.0), (2, 3, 1.0), (0, 4, 0.5)])
    def test_mean_where_two_policies_cost_the_same(self, low: float, high: float, expected: float) -> None:
        """The curve jumps there, and the jump must not become a slope."""
        curve = ew.BudgetCurve((point(1, 0.0), point(2, 0.0), point(2, 1.0), point(3, 1.0)))
        assert curve.mean(low, high)["top1"] == pytest.approx(expected)

    def test_mean_of_a_metric_that_is_missing_at_one_point_is_missing(self) -> None:
        mean = ew.BudgetCurve((point(1, 0.2), point(2, 0.4, auroc=nan))).mean(1, 2)
        assert isnan(mean.pop("auroc"))
        assert list(mean.values()) == pytest.approx([0.3] * (len(METRICS) - 1))

    @pytest.mark.parametrize(("low", "high"), [(2, 1), (2, 2), (-1, 2), (nan, 2), (1, nan), (0, inf)])
    def test_mean_needs_an_interval(self, low: float, high: float) -> None:
        with pytest.raises(ew.InputError, match="`budget_range` must be two growing numbers"):
            ew.BudgetCurve((point(1), point(2))).mean(low, high)


class TestResults:
    def test_the_dict_holds_everything_and_is_json(self) -> None:
        probs, labels = case()
        curve = ew.budget_curve(probs, labels=labels, policies=ew.sweep(probs, costs=COSTS[:3])[:3], costs=COSTS[:3])
        data = json.loads(json.dumps(curve.to_dict(), allow_nan=False))
        assert list(data) == ["points"]
        for point_data, result in zip(data["points"], curve, strict=True):
            per_exit = [Metrics(**alone) for alone in point_data.pop("per_exit")]
            shares = tuple(point_data.pop("exit_shares"))
            assert ew.Evaluation(**point_data, exit_shares=shares, per_exit=tuple(per_exit)) == result

    def test_a_table_has_a_row_for_each_point(self) -> None:
        probs, labels = case()
        curve = ew.budget_curve(probs, labels=labels, policies=ew.sweep(probs, costs=COSTS[:3])[:3], costs=COSTS[:3])
        table = curve.to_pandas()
        assert list(table.columns) == [*METRICS, "cost", "unit", "samples", "eefp", "eefp_visited"]
        assert table["cost"].tolist() == [result.cost for result in curve]
        assert table["nlpd"].tolist() == [result.nlpd for result in curve]
        row = curve.points[1].to_pandas()
        assert row.to_dict("records") == [table.to_dict("records")[1]]

    def test_the_readable_form_has_percent_cost_and_unit(self) -> None:
        result = ew.evaluate(
            [[[0.9, 0.1], [0.4, 0.6]]] * 2,
            labels=[0, 1],
            policy=ew.Policy((0.8, -inf), unit="ms"),
            costs=ew.Costs((1.0, 4.0), unit="ms"),
        )
        assert repr(result) == (
            "Evaluation(top-1 100.00%, top-5 100.00%, NLPD 0.3081, ECE 0.2500, cost 2.5 ms, exit shares 50.0% 50.0%)"
        )


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it now fails, as where it is not installed

import json
import numpy as np
import exitwise as ew
import exitwise.core.costs, exitwise.core.files, exitwise.core.predictions, exitwise.core.results
import exitwise.policies.cutoffs, exitwise.policies.fit, exitwise.policies.policy, exitwise.policies.scores
import exitwise.evaluation.evaluate, exitwise.evaluation.metrics

probs, labels = np.load(sys.argv[1]), np.load(sys.argv[2])
costs = ew.Costs((1.0, 2.5, 3.0))
policies = ew.sweep(probs, costs=costs)
policies.append(ew.fit_policy(probs, labels=labels, costs=costs, budget=2.0))
policies[-1].save(sys.argv[3])
result = ew.evaluate(probs, labels=labels, policy=ew.Policy.load(sys.argv[3]), costs=costs)
curve = ew.budget_curve(probs, labels=labels, policies=policies, costs=costs)
assert ew.metrics.ece(probs[0].max(axis=1), probs[0].argmax(axis=1) == labels) == result.per_exit[0].ece
try:
    ew.MultiExitNet
except ImportError:
    pass
else:
    raise AssertionError("torch was there after all")
print(json.dumps([result.to_dict(), curve.to_dict(), [policy.to_dict() for policy in policies]]))
"""


def test_policies_and_evaluation_give_the_same_where_torch_is_absent(tmp_path: Path) -> None:
    probs, labels = case()
    np.save(tmp_path / "probs.npy", probs)
    np.save(tmp_path / "labels.npy", labels)
    paths = [str(tmp_path / name) for name in ("probs.npy", "labels.npy", "policy.json")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *paths], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    policies = [*ew.sweep(probs, costs=COSTS[:3]), ew.fit_policy(probs, labels, COSTS[:3], budget=2.0)]
    result = ew.evaluate(probs, labels=labels, policy=policies[-1], costs=COSTS[:3])
    curve = ew.budget_curve(probs, labels=labels, policies=policies, costs=COSTS[:3])
    expected = [result.to_dict(), curve.to_dict(), [policy.to_dict() for policy in policies]]
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))
