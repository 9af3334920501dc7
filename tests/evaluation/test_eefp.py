"""EEFP, the AUROC of an exit score for "stopping is right", against a comparison of all pairs of samples."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import early_exit_failure_prediction, random_probs

import exitwise as ew
from exitwise.evaluation.evaluate import describe_eefp_disagreement
from exitwise.policies.scores import exit_scores

pytestmark = pytest.mark.numerical

Case = tuple[np.ndarray, np.ndarray, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Scores in quarters, so that many tie, correctness, and the exits taken."""
    exits, samples = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    levels = draw(st.integers(1, 5))
    scores = rng.integers(0, levels, (exits, samples)) / 4
    return (
        scores,
        rng.random((exits, samples)) < draw(st.sampled_from([0, 0.3, 0.7, 1])),
        rng.integers(0, exits, samples),
    )


@given(cases())
@settings(max_examples=200, deadline=None)
def test_eefp_compares_all_pairs(case: Case) -> None:
    scores, correct, exits = case
    for taken in (None, exits):
        expected, mean = early_exit_failure_prediction(
            scores.tolist(), correct.tolist(), None if taken is None else taken.tolist()
        )
        assert ew.metrics.eefp_per_exit(scores, correct, taken) == pytest.approx(expected)
        assert ew.metrics.eefp(scores, correct, taken) == pytest.approx(mean)


@given(cases())
@settings(max_examples=50, deadline=None)
def test_eefp_depends_only_on_the_order_of_scores(case: Case) -> None:
    scores, correct, exits = case
    assert ew.metrics.eefp(scores, correct, exits) == ew.metrics.eefp(np.exp(3 * scores), correct, exits)
    area = ew.metrics.eefp(scores, correct)
    assert area is None or ew.metrics.eefp(-scores, correct) == pytest.approx(1 - area)


def test_stopping_is_right_where_correct_or_all_later_exits_are_wrong() -> None:
    correct = np.array([[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0]], dtype=bool)
    expected = [[1, 0, 0, 1, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]]
    assert ew.metrics.stopping_is_right(correct).astype(int).tolist() == expected


def test_a_score_that_knows_where_to_stop_has_an_eefp_of_one() -> None:
    correct = np.random.default_rng(0).random((3, 50)) < 0.5
    right = ew.metrics.stopping_is_right(correct)
    assert ew.metrics.eefp(right.astype(float), correct) == 1
    assert ew.metrics.eefp(np.zeros((3, 50)), correct) == 0.5


@pytest.mark.parametrize("correct", [np.ones((3, 4), bool), np.zeros((3, 4), bool), np.ones((1, 4), bool)])
def test_eefp_is_none_where_it_is_undefined(correct: np.ndarray) -> None:
    scores = np.linspace(0, 1, correct.size).reshape(correct.shape)
    assert ew.metrics.eefp(scores, correct) is None
    assert ew.metrics.eefp_per_exit(scores, correct) == (None,) * (len(correct) - 1)


def test_an_undefined_exit_is_left_out_of_the_mean() -> None:
    correct = np.array([[True, False, True], [True, True, True], [True, True, True]])  # the second exit is always right
    scores = np.array([[0.9, 0.1, 0.8], [0.5, 0.5, 0.5], [1.0, 1.0, 1.0]])
    assert ew.metrics.eefp_per_exit(scores, correct) == (1.0, None)
    assert ew.metrics.eefp(scores, correct) == 1


def test_bad_input_is_refused() -> None:
    correct = np.ones((2, 3), bool)
    with pytest.raises(ew.InputError, match=r"`correct` must be a mask .exits, samples., but got int64"):
        ew.metrics.eefp(np.ones((2, 3)), correct.astype(int))
    with pytest.raises(
        ew.InputError, match=r"`scores` must be numbers \(2, 3\) like `correct`, but got float64 \(2, 2\)"
    ):
        ew.metrics.eefp(np.ones((2, 2)), correct)
    with pytest.raises(ew.InputError, match="some are NaN"):
        ew.metrics.eefp(np.full((2, 3), np.nan), correct)
    with pytest.raises(ew.InputError, match="`exits` must be 3 whole numbers"):
        ew.metrics.eefp(np.ones((2, 3)), correct, [0, 1])


@pytest.mark.parametrize("score", ["confidence", "entropy", "patience"])
def test_an_evaluation_has_the_eefp_of_its_scores_and_exits(score: str) -> None:
    probs = random_probs(3, 4, 300, 5)
    labels = np.random.default_rng(1).integers(0, 5, 300)
    policy = ew.fit_policy(probs, labels, [1, 2, 3, 4], budget=2.5, score=score)
    result = ew.evaluate(probs, labels=labels, policy=policy, costs=[1, 2, 3, 4])
    scores, correct = exit_scores(probs, score).astype(np.float32), probs.argmax(axis=2) == labels
    per_exit, mean = early_exit_failure_prediction(scores.tolist(), correct.tolist())
    assert result.eefp_per_exit == pytest.approx(per_exit)
    assert result.eefp == pytest.approx(mean)
    _, visited = early_exit_failure_prediction(scores.tolist(), correct.tolist(), policy.exits(probs).tolist())
    assert result.eefp_visited == pytest.approx(visited)
    assert json.loads(json.dumps(result.to_dict()))["eefp"] == result.eefp
    curve = ew.budget_curve(probs, labels=labels, policies=[policy], costs=[1, 2, 3, 4])
    assert curve.mean(1, 4)["eefp"] == pytest.approx(result.eefp)


def test_one_exit_has_no_eefp() -> None:
    probs = random_probs(3, 1, 30, 5)
    curve = ew.budget_curve(probs, labels=np.zeros(30, int), policies=[ew.Policy((-np.inf,))], costs=[1])
    assert (curve.points[0].eefp, curve.points[0].eefp_visited, curve.points[0].eefp_per_exit) == (None, None, ())
    assert "eefp" not in curve.mean(0, 1)


def test_the_shipped_traces_eefp_is_that_of_the_prototype() -> None:
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    assert trace.test is not None
    vanilla = ew.calibrate(trace, "MSDNet (vanilla)")
    policies = ew.sweep(vanilla.predict(trace.val), costs=trace.costs)
    curve = ew.budget_curve(vanilla.predict(trace.test), labels=trace.test.labels, policies=policies, costs=trace.costs)
    assert curve.mean(*trace.budget_range or (0, 1))["eefp"] == pytest.approx(0.747, abs=0.0005)  # rounded there


def test_a_disagreement_of_ece_and_eefp_is_described() -> None:
    agree = {"a": (0.1, 0.8), "b": (0.2, 0.7)}
    assert describe_eefp_disagreement(agree) is None
    assert describe_eefp_disagreement({"a": (0.1, None), "b": (0.2, 0.7)}) is None
    text = describe_eefp_disagreement({"a": (0.1, 0.7), "b": (0.2, 0.75), "c": (0.3, 0.6)})
    assert text is not None
    assert "a has the smallest ECE (0.100, b 0.200)" in text
    assert "(EEFP 0.750, a 0.700)" in text
