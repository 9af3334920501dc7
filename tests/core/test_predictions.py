"""Predictions: input types, caching, streaming, reductions and subsets."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace
from oracles import random_probs

import exitwise as ew
from exitwise.core import predictions
from exitwise.core.predictions import ExitPrediction, Predictions
from exitwise.policies.scores import exit_scores

pytestmark = pytest.mark.numerical

SHAPE = (3, 4, 5)


class Source:
    """Predictions that record the computed exits, and how many earlier exits were in memory at that time."""

    def __init__(self) -> None:
        self.probs = random_probs(0, *SHAPE)
        self.computed: list[int] = []
        self.in_memory: list[int] = []
        self._alive: list[weakref.ref[ExitPrediction]] = []
        self.preds = Predictions(SHAPE, self._exits, lambda predicted: predicted / 100)

    def _exits(self) -> Iterator[ExitPrediction]:
        for k in range(SHAPE[0]):
            self.computed.append(k)
            self.in_memory.append(sum(ref() is not None for ref in self._alive))
            yield self._make_exit(k)

    def _make_exit(self, k: int) -> ExitPrediction:
        exit = ExitPrediction(self.probs[k])
        self._alive.append(weakref.ref(exit))
        return exit


@pytest.fixture
def small() -> Source:
    return Source()


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(predictions, "_MAX_CACHED_VALUES", SHAPE[0] * SHAPE[1] * SHAPE[2] - 1)
    return Source()


@pytest.mark.parametrize(
    "given",
    [
        lambda probs: probs,
        lambda probs: probs.astype(np.float32),
        lambda probs: probs.tolist(),
        lambda probs: list(probs),
        torch.from_numpy,
        lambda probs: torch.from_numpy(probs).float(),
        lambda probs: [torch.from_numpy(exit) for exit in probs],
        lambda probs: np.asfortranarray(probs),
    ],
    ids=["array", "float32", "nested list", "list of arrays", "tensor", "float tensor", "list of tensors", "fortran"],
)
def test_plain_probabilities_of_any_kind_are_taken(given: Callable[[np.ndarray], Any]) -> None:
    probs = random_probs(0, *SHAPE)
    preds = Predictions.of(given(probs))
    assert preds.shape == SHAPE
    assert len(preds) == 3
    assert preds.probs.numpy() == pytest.approx(probs, abs=1e-7)
    assert preds.log_probs.numpy() == pytest.approx(np.log(probs), rel=1e-5)
    assert preds.predicted.tolist() == probs.argmax(axis=2).tolist()


def test_a_tensor_that_still_has_its_graph_is_taken() -> None:
    """The output of a net that was not run under `no_grad`."""
    probs = torch.zeros(SHAPE, requires_grad=True).softmax(dim=2)
    assert Predictions.of(probs).probs.tolist() == probs.tolist()


def test_the_type_of_the_numbers_is_kept() -> None:
    for dtype in (torch.float32, torch.float64):
        preds = Predictions.of(torch.full(SHAPE, 0.2, dtype=dtype))
        assert (preds.probs.dtype, preds.log_probs.dtype) == (dtype, dtype)


def test_predictions_are_taken_as_they_are() -> None:
    preds = Predictions.of(random_probs(0, *SHAPE))
    assert Predictions.of(preds) is preds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.full((4, 5), 0.2), r"\(exits, samples, classes\), but got float64 \(4, 5\)"),
        (np.full((1, 3, 4, 5), 0.2), r"float64 \(1, 3, 4, 5\)"),
        (np.ones((2, 3, 1), dtype=np.int64), r"int64 \(2, 3, 1\)"),
        (np.ones((2, 3, 1), dtype=bool), r"bool \(2, 3, 1\)"),
        (np.ones((2, 3, 1), dtype=complex), r"complex128 \(2, 3, 1\)"),
        (np.ones((0, 3, 4)), r"\(0, 3, 4\)"),
        (np.ones((2, 0, 4)), r"\(2, 0, 4\)"),
        (np.ones((2, 3, 0)), r"\(2, 3, 0\)"),
        ([], r"\(0,\)"),
        (None, "object"),
        ("probabilities", r"\(\)"),
        ([[[0.5, 0.5], [1.0]]], "`preds`"),
        ([[[1.5, -0.5]]], "none negative"),
        ([[[0.5, 0.4]]], "summing to one"),
        ([[[0.5, 0.5], [0.6, 0.6]]], "summing to one"),
        ([[[np.nan, 1.0]]], "must hold probabilities"),
        ([[[np.inf, 0.0]]], "must hold probabilities"),
        (np.log([[[0.5, 0.5]]]), "none negative"),
    ],
)
def test_what_is_no_probability_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ew.InputError, match=message) as caught:
        Predictions.of(given)
    assert "`preds`" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_zero_probabilities_have_finite_logarithms(dtype: str) -> None:
    preds = Predictions.of(np.array([[[0, 1], [1, 0]]], dtype=dtype))
    expected = np.log(np.finfo("float32" if dtype == "float16" else dtype).tiny)  # float16 is converted to float32
    assert preds.log_probs.tolist() == [[[expected, 0], [0, expected]]]
    assert preds.probs.tolist() == [[[0, 1], [1, 0]]]


def test_log_probabilities_survive_where_probabilities_round_to_zero() -> None:
    pred = ExitPrediction.from_log_probs(np.array([[0.0, -500.0]], dtype=np.float32))
    assert pred.probs.tolist() == [[1, 0]]
    assert pred.log_probs.tolist() == [[0, -500]]


def test_small_predictions_are_computed_once(small: Source) -> None:
    assert small.computed == []  # not before the first use
    for _ in range(2):
        assert small.preds.probs.numpy() == pytest.approx(small.probs)
        assert small.preds.log_probs.numpy() == pytest.approx(np.log(small.probs))
        assert small.preds.predicted.tolist() == small.probs.argmax(axis=2).tolist()
        assert len(list(small.preds.exits(variance=True))) == 3
        exit_scores(small.preds, "entropy")
    assert small.computed == [0, 1, 2]


def test_large_predictions_are_computed_in_order_when_their_turn_comes(large: Source) -> None:
    walk = large.preds.exits()
    assert large.computed == []
    for k in range(3):
        assert next(walk).probs.tolist() == large.probs[k].tolist()
        assert large.computed == list(range(k + 1))
    assert next(walk, None) is None
    assert [exit.probs.tolist() for exit in large.preds.exits()] == large.probs.tolist()
    assert large.computed == [0, 1, 2, 0, 1, 2]


def test_only_the_exit_at_hand_of_large_predictions_is_held(large: Source) -> None:
    exit_scores(large.preds, "entropy")
    ew.evaluate(large.preds, labels=[0, 1, 2, 3], policy=ew.Policy((0.5, 0.5, -np.inf)), costs=[1, 2, 3])
    assert len(large.computed) > 3
    assert max(large.in_memory) <= 1  # the previous one, released when the next is ready


@pytest.mark.parametrize(("held", "walks"), [(60, 1), (59, 2)])
def test_what_counts_as_large(monkeypatch: pytest.MonkeyPatch, held: int, walks: int) -> None:
    monkeypatch.setattr(predictions, "_MAX_CACHED_VALUES", held)
    source = Source()
    for _ in range(2):
        list(source.preds.exits())
    assert source.computed == [0, 1, 2] * walks


def test_what_was_reduced_is_remembered(large: Source) -> None:
    calls = []

    def largest(pred: ExitPrediction) -> np.ndarray:
        calls.append(pred)
        return pred.probs.max(axis=1)

    first = large.preds.reduce("largest", largest)
    assert first.tolist() == large.probs.max(axis=2).tolist()
    assert large.preds.reduce("largest", largest) is first
    assert len(calls) == 3
    assert large.preds.predicted is large.preds.predicted
    assert large.computed == [0, 1, 2]
    assert large.preds.reduce("smallest", lambda pred: pred.probs.min(axis=1)).tolist() == large.probs.min(2).tolist()


def test_what_is_often_asked_of_large_ones_is_noted_on_a_whole_walk(large: Source, small: Source) -> None:
    next(large.preds.exits())  # not to the end: nothing is cached
    assert large.preds.predicted.tolist() == large.probs.argmax(axis=2).tolist()
    assert large.computed == [0, 0, 1, 2]
    for score in ("confidence", "entropy"):
        assert exit_scores(large.preds, score).tolist() == exit_scores(small.probs, score).tolist()
    assert large.computed == [0, 0, 1, 2]
    assert exit_scores(large.preds, "margin").tolist() == exit_scores(small.probs, "margin").tolist()


def test_variance_is_of_the_predicted_class_and_given_when_asked_for(small: Source) -> None:
    expected = small.probs.argmax(axis=2) / 100
    assert small.preds.variance is not None
    assert small.preds.variance.tolist() == expected.tolist()
    assert [exit.variance.tolist() for exit in small.preds.exits(variance=True)] == expected.tolist()  # type: ignore[union-attr]
    assert [exit.variance for exit in small.preds.exits()] == [None] * 3


def test_without_draws_there_is_no_variance() -> None:
    preds = Predictions.of(random_probs(0, *SHAPE))
    assert preds.variance is None
    assert [exit.variance for exit in preds.exits(variance=True)] == [None] * 3


def test_the_readable_form_names_the_sizes() -> None:
    assert repr(Predictions.of(random_probs(0, *SHAPE))) == "Predictions(3 exits, 4 samples, 5 classes)"


@pytest.mark.parametrize(
    "samples",
    [[2], [3, 0], [1, 1, 2], [], [-1], slice(1, 3), np.array([True, False, True, True])],
    ids=["one", "any order", "twice", "none", "from the end", "a slice", "a mask"],
)
@pytest.mark.parametrize("kind", ["small", "large"])
def test_some_of_the_samples(samples: Any, kind: str, request: pytest.FixtureRequest) -> None:
    """All values of a subset equal those of its samples, the variance included."""
    source: Source = request.getfixturevalue(kind)
    rows = np.array(samples, dtype=np.int64) if isinstance(samples, list) else samples
    part = source.preds.take(rows)
    probs = source.probs[:, rows]
    assert part.shape == probs.shape
    assert part.probs.numpy().tolist() == probs.tolist()
    assert part.log_probs.numpy() == pytest.approx(np.log(probs))
    assert part.predicted.tolist() == probs.argmax(axis=2).tolist()
    assert part.variance is not None
    assert part.variance.tolist() == (source.probs.argmax(axis=2) / 100)[:, rows].tolist()
    assert [exit.variance.tolist() for exit in part.exits(variance=True)] == part.variance.tolist()  # type: ignore[union-attr]
    if probs.shape[1]:
        for score in ("confidence", "variance", "patience"):
            assert exit_scores(part, score).tolist() == exit_scores(source.preds, score)[:, rows].tolist()


def test_some_of_some_of_the_samples() -> None:
    preds = Predictions.of(random_probs(0, 2, 9, 3))
    part = preds.take(np.array([8, 6, 4, 2])).take(np.array([2, 0]))
    assert part.probs.tolist() == preds.probs[:, [4, 8]].tolist()
    assert part.variance is None
    assert [exit.variance for exit in part.exits(variance=True)] == [None] * 2


def test_nothing_is_computed_for_some_of_the_samples_before_it_is_asked_for(large: Source) -> None:
    part = large.preds.take(np.array([1]))
    assert large.computed == []
    next(part.exits())
    assert large.computed == [0, 1, 2]  # the subset is small enough to be cached, all exits at once
    assert max(large.in_memory) <= 1  # the large predictions are streamed


def test_real_draws_go_along_with_their_samples() -> None:
    """The variance of a subset equals the variance that the calibration computes for only these samples."""
    trace = random_trace(n=40)
    calibration = ew.calibrate(trace, "Laplace", samples=5)
    rows = [5, 30, 2]
    part = calibration.predict(trace.val).take(np.array(rows))
    direct = calibration.predict(trace.val.take(torch.tensor(rows)))
    assert part.variance is not None
    assert part.variance == pytest.approx(direct.variance, rel=1e-4, abs=1e-7)
    assert (part.variance > 0).all()
    policy = ew.fit_policy(calibration.predict(trace.val), costs=[1, 2, 3], budget=2, score="variance")
    assert policy.exits(part).tolist() == policy.exits(calibration.predict(trace.val))[rows].tolist()
