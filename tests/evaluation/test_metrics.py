"""Metrics against scikit-learn and loops over samples."""

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    adaptive_calibration_error,
    area_under_risk_coverage,
    area_under_roc,
    calibration_error,
    classes_in_order,
    mean_prefix_error,
    random_probs,
)

import exitwise as ew
from exitwise.evaluation import metrics

pytestmark = pytest.mark.numerical

SEEDS = [0, 1, 2]
quick = settings(max_examples=60, deadline=None)


def answers(seed: int, samples: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Confidences (n,) without ties, and whether predictions (n,) are correct, calibrated to them."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.1, 1, samples)
    return confidence, rng.random(samples) < confidence


@st.composite
def graded_answers(draw: st.DrawFn, max_samples: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Confidences in thousandths, with bin edges and 1 among them, and whether predictions are correct."""
    thousandths = draw(
        st.lists(st.integers(0, 1000) | st.integers(0, 10).map(lambda b: 100 * b), min_size=1, max_size=max_samples)
    )
    correct = draw(st.lists(st.booleans(), min_size=len(thousandths), max_size=len(thousandths)))
    return np.array(thousandths) / 1000, np.array(correct)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("classes", [2, 7, 30])
def test_accuracy_nlpd_and_brier_agree_with_scikit_learn(seed: int, classes: int) -> None:
    probs = random_probs(seed, 1, 300, classes)[0]
    labels = np.random.default_rng(seed).integers(0, classes, 300)
    rank = metrics.true_label_rank(np.log(probs), labels)
    names = np.arange(classes)
    for k in range(1, min(5, classes - 1) + 1):
        scores = probs if classes > 2 else probs[:, 1]
        expected = sklearn.metrics.top_k_accuracy_score(labels, scores, k=k, labels=names)
        assert (rank < k).mean() == pytest.approx(expected)
    nlpd = -metrics.log_prob_true(np.log(probs), labels).mean()
    assert nlpd == pytest.approx(sklearn.metrics.log_loss(labels, probs, labels=names))
    assert metrics.brier(probs, labels) == pytest.approx(((probs - np.eye(classes)[labels]) ** 2).sum(axis=1))
    if classes == 2:  # scikit-learn halves the binary Brier score
        expected = 2 * sklearn.metrics.brier_score_loss(labels, probs[:, 1])
        assert metrics.brier(probs, labels).mean() == pytest.approx(expected)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12))
@quick
def test_rank_is_the_place_in_a_stable_sort_when_classes_tie(seed: int, classes: int, samples: int) -> None:
    rng = np.random.default_rng(seed)
    log_probs = -rng.integers(0, 4, (samples, classes)).astype(np.float32)
    labels = rng.integers(0, classes, samples)
    order = np.argsort(-log_probs, axis=1, kind="stable")
    assert metrics.true_label_rank(log_probs, labels).tolist() == np.argmax(order == labels[:, None], axis=1).tolist()
    places = [classes_in_order(row).index(label) for row, label in zip(log_probs.tolist(), labels, strict=True)]
    assert metrics.true_label_rank(log_probs, labels).tolist() == places


@given(st.integers(0, 10**6))
@quick
def test_brier_is_right_to_rounding_in_float32(seed: int) -> None:
    """Terms cancel where one class has nearly all of the probability."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(50, 5)) * rng.uniform(1, 40)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs = (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32)
    expected = ((probs.astype(np.float64) - np.eye(5)[probs.argmax(axis=1)]) ** 2).sum(axis=1)
    assert metrics.brier(probs, probs.argmax(axis=1)) == pytest.approx(expected, abs=5e-7)


@given(graded_answers(), st.sampled_from(["float32", "float64"]))
@quick
def test_ece_is_the_loop_over_bins(drawn: tuple[np.ndarray, np.ndarray], dtype: str) -> None:
    confidence, correct = drawn
    ece = metrics.ece(confidence.astype(dtype), correct)
    assert ece == pytest.approx(calibration_error(confidence.tolist(), correct.tolist()), abs=1e-6)
    assert 0 <= ece <= 1


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("seed", SEEDS)
def test_calibration_errors_take_other_numbers_of_bins(seed: int, bins: int) -> None:
    confidence, correct = answers(seed)
    for metric, loop in (
        (metrics.ece, calibration_error),
        (metrics.adaptive_ece, adaptive_calibration_error),
    ):
        assert metric(confidence, correct, bins) == pytest.approx(loop(confidence.tolist(), correct.tolist(), bins))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("edge", range(1, 10))
def test_a_confidence_at_an_edge_belongs_to_the_bin_above_it(dtype: str, edge: int) -> None:
    """A correct prediction at the edge and a wrong one just above it: their gaps cancel only within one bin."""
    at, above, below = edge / 10, edge / 10 + 0.02, edge / 10 - 0.02
    with_above = metrics.ece(np.array([at, above], dtype), np.array([True, False]))
    with_below = metrics.ece(np.array([at, below], dtype), np.array([True, False]))
    assert with_above == pytest.approx(abs(1 - at - above) / 2, abs=2e-3)
    assert with_below == pytest.approx((1 - at + below) / 2, abs=2e-3)


def test_a_confidence_of_one_is_counted_in_the_last_bin() -> None:
    assert metrics.ece(np.array([1.0]), np.array([False])) == 1
    assert metrics.ece(np.array([1.0, 0.9]), np.array([False, True])) == pytest.approx(0.45)
    just_above = np.nextafter(np.float32(1), np.float32(2))  # a softmax may round to it
    assert metrics.ece(np.array([just_above]), np.array([True])) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("samples", [1, 2, 9, 10, 11, 137])
@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_ece_is_the_loop_over_equally_filled_bins(seed: int, samples: int) -> None:
    confidence, correct = answers(seed, samples)
    expected = adaptive_calibration_error(confidence.tolist(), correct.tolist())
    assert metrics.adaptive_ece(confidence, correct) == pytest.approx(expected)


@given(graded_answers())
@quick
def test_auroc_agrees_with_scikit_learn_and_with_all_pairs(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    confidence, correct = drawn
    auroc = metrics.auroc(confidence, correct)
    assert auroc == pytest.approx(area_under_roc(confidence.tolist(), correct.tolist()), nan_ok=True)
    if 0 < correct.sum() < len(correct):
        assert auroc == pytest.approx(sklearn.metrics.roc_auc_score(correct, confidence))


@given(graded_answers(), st.sampled_from([np.exp, np.cbrt, lambda x: 5 * x - 9, lambda x: -1 / (x + 1)]))
@quick
def test_ranking_metrics_see_only_the_order_of_confidences(
    drawn: tuple[np.ndarray, np.ndarray], growing: object
) -> None:
    confidence, correct = drawn
    mapped = growing(confidence)  # type: ignore[operator]
    assert metrics.auroc(mapped, correct) == pytest.approx(metrics.auroc(confidence, correct), nan_ok=True)
    assert metrics.aurc(mapped, correct) == pytest.approx(metrics.aurc(confidence, correct))


@given(graded_answers())
@quick
def test_auroc_of_the_opposite_confidence_is_the_complement(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    confidence, correct = drawn
    assert metrics.auroc(-confidence, correct) == pytest.approx(1 - metrics.auroc(confidence, correct), nan_ok=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_aurc_without_ties_is_the_mean_error_of_the_most_confident(seed: int) -> None:
    confidence, correct = answers(seed)
    ordered = [correct[i] for i in sorted(range(len(confidence)), key=lambda i: -confidence[i])]
    assert metrics.aurc(confidence, correct) == pytest.approx(mean_prefix_error(ordered))


@given(st.lists(st.tuples(st.sampled_from([0.2, 0.5, 1.0]), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_aurc_with_ties_is_the_mean_over_every_order_of_equals(drawn: list[tuple[float, bool]]) -> None:
    confidence, correct = map(list, zip(*drawn, strict=True))
    expected = area_under_risk_coverage(confidence, correct)
    assert metrics.aurc(np.array(confidence), np.array(correct)) == pytest.approx(expected)


@pytest.mark.parametrize("metric", [metrics.ece, metrics.adaptive_ece, metrics.auroc, metrics.aurc])
def test_the_order_of_samples_does_not_matter(metric: object) -> None:
    """Saturated nets have a confidence of exactly 1 for many samples, correct or wrong."""
    confidence = np.array([1.0] * 20 + [0.6] * 20)
    correct = np.arange(40) % 20 < 12
    rng = np.random.default_rng(0)
    values = []
    for _ in range(5):
        order = rng.permutation(40)
        values.append(metric(confidence[order], correct[order]))  # type: ignore[operator]
    assert values == pytest.approx([values[0]] * 5)


@given(graded_answers())
@quick
def test_one_sort_gives_the_same_as_each_metric_alone(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    together = metrics.ranking_metrics(*drawn)
    alone = {name: getattr(metrics, name)(*drawn) for name in ("adaptive_ece", "auroc", "aurc")}
    assert together == pytest.approx(alone, nan_ok=True)


@given(graded_answers())
@quick
def test_no_binning_finds_less_than_the_overall_gap(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    """By the triangle inequality the gaps of bins sum to at least the gap of all samples."""
    confidence, correct = drawn
    gap = abs(confidence.mean() - correct.mean())
    assert gap - 1e-12 <= metrics.ece(confidence, correct) <= 1
    assert gap - 1e-12 <= metrics.adaptive_ece(confidence, correct) <= 1


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("right", [True, False])
def test_all_predictions_correct_or_all_wrong(samples: int, right: bool) -> None:
    confidence, correct = np.linspace(0.75, 0.85, samples), np.full(samples, right)
    assert np.isnan(metrics.auroc(confidence, correct))
    assert metrics.aurc(confidence, correct) == (0 if right else 1)
    gap = abs(confidence - right).mean()
    assert metrics.ece(confidence, correct) == pytest.approx(gap)
    assert metrics.adaptive_ece(confidence, correct) == pytest.approx(gap)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1], "`labels` must be 3 whole numbers, but got int64 \\(2,\\)"),
        ([[0], [1], [2]], "\\(3, 1\\)"),
        ([0.0, 1.0, 2.0], "float64"),
        ([True, False, True], "bool"),
        ([0, 1, 4], "must lie in 0..3, but reach from 0 to 4"),
        ([-1, 1, 3], "must lie in 0..3, but reach from -1 to 3"),
        (None, "`labels`"),
        (["a", "b", "c"], "`labels`"),
    ],
)
def test_invalid_labels_are_refused(labels: object, message: str) -> None:
    with pytest.raises(ew.InputError, match=message):
        metrics.check_labels(labels, 3, 4)


def test_former_names_are_the_same_functions() -> None:
    assert ew.metrics.rank is ew.metrics.true_label_rank
    assert ew.metrics.log_true is ew.metrics.log_prob_true
