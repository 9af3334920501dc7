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
    """Predictions that write down which exits were made, and how many of the earlier ones were still held then."""

    def __init__(self) -> None:
        self.said = random_probs(0, *SHAPE)
        self.made: list[int] = []
        self.held: list[int] = []
        self._alive: list[weakref.ref[ExitPrediction]] = []
        self.preds = Predictions(SHAPE, self._exits, lambda predicted: predicted / 100)

    def _exits(self) -> Iterator[ExitPrediction]:
        for k in range(SHAPE[0]):
            self.made.append(k)
            self.held.append(sum(ref() is not None for ref in self._alive))
            yield self._make(k)

    def _make(self, k: int) -> ExitPrediction:
        exit = ExitPrediction.from_probs(self.said[k])
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
    """As it comes out of a net that was not run under `no_grad`."""
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
    expected = np.log(np.finfo("float32" if dtype == "float16" else dtype).tiny)  # halves are taken as singles
    assert preds.log_probs.tolist() == [[[expected, 0], [0, expected]]]
    assert preds.probs.tolist() == [[[0, 1], [1, 0]]]


def test_log_probabilities_survive_where_probabilities_round_to_zero() -> None:
    said = ExitPrediction.from_log_probs(np.array([[0.0, -500.0]], dtype=np.float32))
    assert said.probs.tolist() == [[1, 0]]
    assert said.log_probs.tolist() == [[0, -500]]


def test_small_predictions_are_computed_once(small: Source) -> None:
    assert small.made == []  # not before they are asked for
    for _ in range(2):
        assert small.preds.probs.numpy() == pytest.approx(small.said)
        assert small.preds.log_probs.numpy() == pytest.approx(np.log(small.said))
        assert small.preds.predicted.tolist() == small.said.argmax(axis=2).tolist()
        assert len(list(small.preds.exits(variance=True))) == 3
        exit_scores(small.preds, "entropy")
    assert small.made == [0, 1, 2]


def test_large_predictions_are_computed_in_order_when_their_turn_comes(large: Source) -> None:
    walk = large.preds.exits()
    assert large.made == []
    for k in range(3):
        assert next(walk).probs.tolist() == large.said[k].tolist()
        assert large.made == list(range(k + 1))
    assert next(walk, None) is None
    assert [exit.probs.tolist() for exit in large.preds.exits()] == large.said.tolist()
    assert large.made == [0, 1, 2, 0, 1, 2]


def test_only_the_exit_at_hand_of_large_predictions_is_held(large: Source) -> None:
    exit_scores(large.preds, "entropy")
    ew.evaluate(large.preds, labels=[0, 1, 2, 3], policy=ew.Policy((0.5, 0.5, -np.inf)), costs=[1, 2, 3])
    assert len(large.made) > 3
    assert max(large.held) <= 1  # the one that is let go when the next has come


@pytest.mark.parametrize(("held", "walks"), [(60, 1), (59, 2)])
def test_what_counts_as_large(monkeypatch: pytest.MonkeyPatch, held: int, walks: int) -> None:
    monkeypatch.setattr(predictions, "_MAX_CACHED_VALUES", held)
    source = Source()
    for _ in range(2):
        list(source.preds.exits())
    assert source.made == [0, 1, 2] * walks


def test_what_was_reduced_is_remembered(large: Source) -> None:
    calls = []

    def largest(said: ExitPrediction) -> np.ndarray:
        calls.append(said)
        return said.probs.max(axis=1)

    first = large.preds.reduce("largest", largest)
    assert first.tolist() == large.said.max(axis=2).tolist()
    assert large.preds.reduce("largest", largest) is first
    assert len(calls) == 3
    assert large.preds.predicted is large.preds.predicted
    assert large.made == [0, 1, 2]
    assert large.preds.reduce("smallest", lambda said: said.probs.min(axis=1)).tolist() == large.said.min(2).tolist()


def test_what_is_often_asked_of_large_ones_is_noted_on_a_whole_walk(large: Source, small: Source) -> None:
    next(large.preds.exits())  # not to the end: nothing is noted
    assert large.preds.predicted.tolist() == large.said.argmax(axis=2).tolist()
    assert large.made == [0, 0, 1, 2]
    for score in ("confidence", "entropy"):
        assert exit_scores(large.preds, score).tolist() == exit_scores(small.said, score).tolist()
    assert large.made == [0, 0, 1, 2]
    assert exit_scores(large.preds, "margin").tolist() == exit_scores(small.said, "margin").tolist()


def test_variance_is_of_the_predicted_class_and_given_when_asked_for(small: Source) -> None:
    expected = small.said.argmax(axis=2) / 100
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
    """Everything that is said of them, the variance too."""
    source: Source = request.getfixturevalue(kind)
    rows = np.array(samples, dtype=np.int64) if isinstance(samples, list) else samples
    part = source.preds.take(rows)
    said = source.said[:, rows]
    assert part.shape == said.shape
    assert part.probs.numpy().tolist() == said.tolist()
    assert part.log_probs.numpy() == pytest.approx(np.log(said))
    assert part.predicted.tolist() == said.argmax(axis=2).tolist()
    assert part.variance is not None
    assert part.variance.tolist() == (source.said.argmax(axis=2) / 100)[:, rows].tolist()
    assert [exit.variance.tolist() for exit in part.exits(variance=True)] == part.variance.tolist()  # type: ignore[union-attr]
    if said.shape[1]:
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
    assert large.made == []
    next(part.exits())
    assert large.made == [0, 1, 2]  # they are few enough to be kept, all exits at once
    assert max(large.held) <= 1  # of the large ones one at a time


def test_real_draws_go_along_with_their_samples() -> None:
    """The variance of a calibration, which is computed of all samples, beside that of the same samples alone."""
    trace = random_trace(n=40)
    made = ew.calibrate(trace, "Laplace", samples=5)
    rows = [5, 30, 2]
    part = made.predict(trace.val).take(np.array(rows))
    alone = made.predict(trace.val.take(torch.tensor(rows)))
    assert part.variance is not None
    assert part.variance == pytest.approx(alone.variance, rel=1e-4, abs=1e-7)
    assert (part.variance > 0).all()
    policy = ew.fit_policy(made.predict(trace.val), costs=[1, 2, 3], budget=2, score="variance")
    assert policy.exits(part).tolist() == policy.exits(made.predict(trace.val))[rows].tolist()
