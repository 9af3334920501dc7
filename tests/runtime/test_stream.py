"""Streams give the answers of a batch in the order of the images, even with bad images among them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import small_net
from classifier_cases import (
    BYTES,
    LAPLACE,
    OURS,
    SHAPE,
    VANILLA,
    assert_as_simulated,
    calibrated,
    classifier,
    fitted,
    nested_net,
    of_shape,
    own_classifier,
    refused,
    simulated,
    some_images,
    tiny,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import exitwise as ew
from exitwise.core.predictions import Array, ExitPrediction
from exitwise.runtime import engine

pytestmark = pytest.mark.numerical

POOL = 64  # minimum number of active samples that later stages wait for


def answered(clf: ew.Classifier, images: Any, **options: Any) -> list[ew.Answer]:
    answers = list(clf.stream(images, **options))
    assert [answer.index for answer in answers] == list(range(len(answers)))
    return answers


class TestAsABatch:
    @pytest.mark.parametrize("batch_size", [1, 2, 7, 64, 100, 300])
    @pytest.mark.parametrize("window", [None, 1, 5, 150])
    @pytest.mark.parametrize("pooled", [True, False])
    @pytest.mark.slow_after_first
    def test_answers_are_those_of_a_batch(self, batch_size: int, window: int | None, pooled: bool) -> None:
        clf, images = classifier(), some_images(140)
        answers = answered(clf, iter(images), batch_size=batch_size, window=window, pooled=pooled)
        assert len(answers) == 140
        exits, probs = [answer.exit for answer in answers], np.stack([np.asarray(a.probs) for a in answers])
        assert_as_simulated(clf.policy, simulated(clf.net, clf.calibration, images), exits, probs)
        assert set(exits) == {0, 1, 2}
        costs = dict(zip(range(3), clf.costs_of(images).values, strict=True))
        for answer in answers:
            assert answer.error is None
            assert answer.probs is not None
            assert answer.predicted == int(answer.probs.argmax())
            assert answer.confidence == float(answer.probs.max())
            assert answer.cost == costs[answer.exit or 0]

    @pytest.mark.parametrize(
        ("method", "score"),
        [(VANILLA, "entropy"), ("MIE", "confidence"), (LAPLACE, "variance"), (OURS, "variance"), (OURS, "patience")],
    )
    @pytest.mark.parametrize("optimized", [False, True])
    def test_what_earlier_exits_said_goes_along(self, method: str, score: str, optimized: bool) -> None:
        """Pools join the ensemble states (probabilities or draws) and score states of several batches."""
        clf, images = classifier(method, score), some_images(200)
        preds = simulated(clf.net, clf.calibration, images)
        clf = clf.optimize() if optimized else clf
        answers = answered(clf, images, batch_size=9)
        probs = np.stack([np.asarray(answer.probs) for answer in answers])
        assert_as_simulated(clf.policy, preds, [answer.exit for answer in answers], probs)

    def test_nests_of_tensors_are_pooled(self) -> None:
        clf, images = own_classifier(nested_net(), (6,))
        answers = answered(clf, ({"a": image / 2, "b": image / 2} for image in images), batch_size=4)
        probs = np.stack([np.asarray(answer.probs) for answer in answers])
        preds = simulated(clf.net, clf.calibration, images)
        assert_as_simulated(clf.policy, preds, [answer.exit for answer in answers], probs)

    @pytest.mark.parametrize("pooled", [True, False])
    def test_no_images_no_answers(self, pooled: bool) -> None:
        assert answered(classifier(), [], pooled=pooled) == []

    def test_bytes_arrays_and_doubles(self) -> None:
        clf = classifier(preprocessing=BYTES)
        pixels = torch.randint(256, (20, *SHAPE), dtype=torch.uint8)
        expected = clf(pixels).exits.tolist()
        plain = torch.from_numpy(BYTES.normalize(pixels.numpy()))
        for images in (pixels, list(pixels.numpy()), plain.double(), plain.numpy()):
            assert [answer.exit for answer in answered(clf, images)] == expected

    def test_two_streams_of_one_classifier_do_not_meet(self) -> None:
        clf, images = classifier(), some_images(60)
        pairs = zip(clf.stream(images, batch_size=7), clf.stream(images.flip(0), batch_size=5), strict=True)
        first, second = zip(*pairs, strict=True)
        expected = clf(images).exits.tolist()
        assert [answer.exit for answer in first] == expected
        assert [answer.exit for answer in second] == expected[::-1]


Sample = tuple[int, int]  # its index, and the exit that it takes


class Scripted:
    """A backend whose images hold the exit that they take, and whose probabilities encode the image's index."""

    num_exits = 4
    num_classes = 3
    costs = (1.0, 2.0, 3.0, 4.0)

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, bool]] = []  # exit, batch size, whether the images were exhausted
        self.ended = False
        self.live = self.max_live = 0

    def describe(self, image: Any) -> str:
        if not isinstance(image, tuple):
            raise ew.InputError(f"no image but {image!r}")
        return "a sample"

    def check(self, image: Any) -> None:
        """Accept any image."""

    def stack(self, images: Sequence[Sample]) -> Array:
        return np.array(images)

    def start(self, images: Array) -> Array:
        self.live += len(images)
        self.max_live = max(self.max_live, self.live)
        return images

    def run(self, exit: int, state: Array) -> tuple[Array, ExitPrediction]:
        self.runs.append((exit, len(state), self.ended))
        assert (state[:, 1] >= exit).all()  # no sample runs beyond its exit
        encoded, exits_here = state[:, 0] / 1e6, state[:, 1] == exit
        sure, unsure = np.stack([1 - encoded, encoded, 0 * encoded], axis=1), np.full((len(state), 3), 1 / 3)
        self.live -= int(exits_here.sum())
        return state, ExitPrediction(np.where(exits_here[:, None], sure, unsure))

    def take(self, state: Array, rows: Array) -> Array:
        return state[rows]

    def compact(self, state: Array, exited: Array) -> tuple[Array, Array]:
        """Reverse the active rows: a backend chooses their order."""
        rows = np.flatnonzero(~exited)[::-1]
        return state[rows], rows

    def join(self, states: Sequence[Array]) -> Array:
        return np.concatenate(states)

    def length(self, state: Array) -> int:
        return len(state)

    def sizes(self, exit: int, ended: bool) -> list[int]:
        return [size for k, size, late in self.runs if (k, late) == (exit, ended)]


RULE = ew.Policy((0.9, 0.9, 0.9, -inf))
# Mostly exits, sometimes something that is not an image.
patterns = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, None]), max_size=400)


def play(
    pattern: Sequence[int | None], batch_size: int, window: int | None, pooled: bool = True
) -> tuple[Scripted, list[ew.Answer]]:
    """Run a stream of scripted images and check the invariants of every stream."""
    backend = Scripted()
    given_out: list[ew.Answer] = []
    limit = window or 64 * max(batch_size, POOL)

    def images() -> Iterator[Any]:
        for index, exit in enumerate(pattern):
            assert index - len(given_out) <= limit
            yield ew.InputError(f"unreadable {index}") if exit is None else (index, exit)
        backend.ended = True

    for answer in engine.stream(backend, RULE, images(), batch_size, window, pooled):
        given_out.append(answer)
    assert backend.live == 0
    assert backend.max_live <= limit
    assert [answer.index for answer in given_out] == list(range(len(pattern)))
    for answer, exit in zip(given_out, pattern, strict=True):
        if exit is None:
            assert answer.error == f"unreadable {answer.index}"
            assert answer.probs is answer.exit is answer.cost is answer.predicted is answer.confidence is None
        else:
            assert answer.error is None
            assert answer.exit == exit
            assert answer.cost == exit + 1
            assert answer.probs is not None
            assert round(answer.probs[1] * 1e6) == answer.index
    return backend, given_out


class TestOrder:
    @settings(deadline=None, max_examples=150)
    @given(patterns, st.integers(1, 130), st.none() | st.integers(1, 500), st.booleans())
    def test_nothing_is_lost_doubled_or_out_of_order(
        self, pattern: list[int | None], batch_size: int, window: int | None, pooled: bool
    ) -> None:
        play(pattern, batch_size, window, pooled)

    @settings(deadline=None, max_examples=60)
    @given(st.integers(0, 10**6), st.integers(1, 130))
    @pytest.mark.slow
    def test_deep_stages_run_on_full_batches_until_the_images_end(self, seed: int, batch_size: int) -> None:
        pattern = np.random.default_rng(seed).choice(4, 1500, p=(0.3, 0.2, 0.2, 0.3)).tolist()
        backend, _ = play(pattern, batch_size, window=10**6)
        full = max(batch_size, POOL)
        assert set(backend.sizes(0, ended=False)) == {batch_size}
        assert len(backend.sizes(0, ended=True)) == (len(pattern) % batch_size > 0)
        for exit in (1, 2, 3):
            assert set(backend.sizes(exit, ended=False)) == {full}
            rest = backend.sizes(exit, ended=True)
            assert all(size == full for size in rest[:-1])
            assert sum(size for k, size, _ in backend.runs if k == exit) == sum(taken >= exit for taken in pattern)

    @pytest.mark.parametrize("batch_size", [1, 8, 100])
    def test_unpooled_every_batch_runs_to_its_end(self, batch_size: int) -> None:
        pattern = np.random.default_rng(0).choice(4, 300).tolist()
        backend, _ = play(pattern, batch_size, window=None, pooled=False)
        expected = []
        for first in range(0, 300, batch_size):
            batch = pattern[first : first + batch_size]
            sizes = [sum(taken >= exit for taken in batch) for exit in range(4)]
            expected += [(exit, size) for exit, size in enumerate(sizes) if size]
        assert [(exit, size) for exit, size, _ in backend.runs] == expected

    def test_pooling_runs_deep_stages_less_often(self) -> None:
        pattern = ([0] * 9 + [3]) * 200
        pooled, plain = (play(pattern, 10, None, pooled)[0] for pooled in (True, False))
        deep = [sum(exit == 3 for exit, _, _ in backend.runs) for backend in (pooled, plain)]
        assert deep == [4, 200]  # 200 samples in batches of 64, or of one

    @pytest.mark.parametrize("window", [1, 10, 64, 1000])
    def test_a_sample_that_nobody_joins_holds_the_others_up_for_a_window(self, window: int) -> None:
        """It waits in a pool, and later answers wait for it, but at most for a window."""
        pattern = [3] + [0] * 3000
        backend = Scripted()
        taken = 0

        def images() -> Iterator[Sample]:
            nonlocal taken
            for taken, exit in enumerate(pattern, start=1):
                yield taken - 1, exit

        answers = engine.stream(backend, RULE, images(), 1, window)
        assert next(answers).exit == 3
        assert taken == window

    def test_errors_alone_are_answered_at_once(self) -> None:
        taken = 0

        def images() -> Iterator[ew.InputError]:
            nonlocal taken
            while True:
                taken += 1
                yield ew.InputError("unreadable")

        answers = engine.stream(Scripted(), RULE, images(), batch_size=50)
        for k in range(1, 10):
            assert next(answers).error == "unreadable"
            assert taken == k


class TestLazy:
    def test_nothing_is_taken_before_it_is_asked_for(self) -> None:
        def images() -> Iterator[Tensor]:
            raise AssertionError("it was asked for")
            yield

        classifier().stream(images())

    @pytest.mark.parametrize("batch_size", [1, 4, 32])
    @pytest.mark.parametrize("window", [1, 20, 40])
    @pytest.mark.parametrize("pooled", [True, False])
    def test_no_more_is_taken_of_endless_images_than_needed(self, batch_size: int, window: int, pooled: bool) -> None:
        clf, images = classifier(), some_images(16)
        taken = 0

        def endless() -> Iterator[Tensor]:
            nonlocal taken
            for k in count():
                taken += 1
                yield images[k % 16]

        wanted = 30
        answers = list(islice(clf.stream(endless(), batch_size, window, pooled), wanted))
        assert [answer.index for answer in answers] == list(range(wanted))
        assert taken <= wanted + window
        if not pooled:
            batch = min(batch_size, window)
            assert taken <= -(-wanted // batch) * batch

    def test_what_the_images_raise_reaches_the_caller(self) -> None:
        def images() -> Iterator[Tensor]:
            yield from some_images(3)
            raise OSError("the camera is gone")

        answers = classifier().stream(images(), batch_size=1, pooled=False)
        assert [next(answers).index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="the camera is gone"):
            next(answers)


def good_and_bad(clf: ew.Classifier, bad: Any, where: int, **options: Any) -> str:
    """Insert a bad item into ten good images, check the answers of these, and return the error of the bad one."""
    images = some_images(10)
    expected = clf(images)
    items: list[Any] = list(images)
    items.insert(where, bad)
    answers = answered(clf, items, **options)
    assert len(answers) == 11
    found = answers.pop(where)
    for k, answer in enumerate(answers):
        assert answer.error is None
        assert answer.exit == int(expected.exits[k])
        assert np.abs(np.asarray(answer.probs) - expected.probs[k].numpy()).max() < 1e-5
    assert found.probs is None
    assert found.predicted is found.confidence is None
    assert found.error
    assert "\n" not in found.error
    return found.error


NO_IMAGES = [
    pytest.param(ew.InputError("cat.png cannot be read"), "cat.png cannot be read", id="an error"),
    pytest.param(None, "NoneType", id="nothing"),
    pytest.param("cat.png", "str", id="a name"),
    pytest.param(3, "int", id="a number"),
    pytest.param([], "list", id="an empty list"),
    pytest.param(torch.zeros(SHAPE, dtype=torch.uint8), "bytes", id="bytes"),
    pytest.param(torch.full(SHAPE, float("nan")), "not finite", id="not numbers"),
    pytest.param(torch.full(SHAPE, inf), "not finite", id="infinite"),
    pytest.param(torch.full(SHAPE, 3e38), "not finite", id="too large"),
    pytest.param(np.zeros(SHAPE, dtype=object), "", id="an array of objects"),
]
OTHER_IMAGES = [
    pytest.param(torch.zeros(1, 8, 9), "(1, 8, 9)", id="of another size"),
    pytest.param(torch.zeros(3, 8, 8), "(3, 8, 8)", id="of more channels"),
    pytest.param(torch.zeros(8, 8), "(8, 8)", id="without channels"),
    pytest.param(torch.tensor(1.0), "()", id="a number in a tensor"),
    pytest.param(torch.zeros(SHAPE, dtype=torch.float64), "float64", id="of another precision"),
    pytest.param({"image": torch.zeros(SHAPE)}, "", id="a dict"),
    pytest.param([torch.zeros(SHAPE)], "", id="a list"),
]


@cache
def shared() -> ew.Classifier:
    """Return a classifier that has already run a batch."""
    clf = classifier()
    clf(some_images(1))
    return clf


class TestErrors:
    @pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"batch_size": 3, "pooled": False}, {"window": 2}])
    @pytest.mark.parametrize(("bad", "words"), NO_IMAGES + OTHER_IMAGES)
    @pytest.mark.slow_after_first
    def test_one_bad_image_is_an_answer_and_harms_no_other(self, bad: Any, words: str, options: dict[str, Any]) -> None:
        for where in (5, 10):
            assert words in good_and_bad(shared(), bad, where, **options)

    @pytest.mark.parametrize(("bad", "words"), NO_IMAGES)
    def test_the_first_may_be_the_bad_one(self, bad: Any, words: str) -> None:
        assert words in good_and_bad(shared(), bad, 0)

    @pytest.mark.parametrize(
        "bad",
        [torch.zeros(3, 8, 8), torch.zeros(8, 8), torch.tensor(1.0), torch.zeros(SHAPE).long(), [torch.zeros(SHAPE)]],
        ids=["channels", "dimensions", "number", "whole numbers", "list"],
    )
    def test_a_first_image_that_the_net_cannot_take_does_not_end_the_stream(self, bad: Any) -> None:
        """The first image that the net can take defines the shape of the others."""
        answers = answered(shared(), [bad, *some_images(10)], batch_size=4)
        assert len(answers) == 11
        assert answers[0].error

    @pytest.mark.parametrize(
        "bad",
        [torch.zeros(1, 8, 9), torch.zeros(3, 8, 8), torch.tensor(1.0), torch.full(SHAPE, inf), None],
        ids=["size", "channels", "number", "infinite", "nothing"],
    )
    def test_nor_is_the_first_the_measure_where_the_shape_is_known(self, bad: Any) -> None:
        good_and_bad(classifier(preprocessing=BYTES), bad, 0)

    def test_one_that_overflows_at_a_later_exit(self) -> None:
        """It passes the first stage in a batch with others."""
        torch.manual_seed(0)
        stages = [nn.Identity(), nn.Linear(6, 6)]
        net = ew.MultiExitNet(stages, [ew.Head(nn.Sigmoid(), nn.Linear(6, 3)), ew.Head(nn.ReLU(), nn.Linear(6, 3))])
        clf, images = own_classifier(net, (6,))
        clf = ew.Classifier(net, clf.calibration, ew.Policy((inf, -inf)), costs=(1.0, 2.0))
        expected = clf(images)
        broken = images.clone()
        broken[31] = inf
        answers = answered(clf, broken, batch_size=8)
        found = answers[31]
        assert (found.exit, found.cost) == (1, 2.0)
        assert found.error == "exit 1 gives probabilities that are not finite"
        rest = [k for k in range(len(images)) if k != 31]
        assert all(answers[k].error is None for k in rest)
        assert torch.allclose(torch.tensor(np.stack([answers[k].probs for k in rest])), expected.probs[rest], atol=1e-5)

    def test_many_of_them(self) -> None:
        """More bad images than the window holds, at the beginning, in the middle and at the end."""
        clf, images = classifier(), some_images(30)
        expected = clf(images).exits.tolist()
        bad = [ew.InputError("unreadable")] * 9
        items = [*bad, *images[:15], *bad, *(torch.full(SHAPE, inf) for _ in range(9)), *images[15:], *bad]
        answers = answered(clf, items, batch_size=4, window=6)
        good = [answer.exit for answer in answers if answer.error is None]
        assert good == expected
        errors = [answer.index for answer in answers if answer.error is not None]
        assert errors == [*range(9), *range(24, 42), *range(57, 66)]

    @pytest.mark.parametrize("name", ["batch_size", "window"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
    def test_sizes_that_make_no_sense_are_refused_at_the_call(self, name: str, value: Any) -> None:
        refused(lambda: classifier().stream([], **{name: value}), f"`{name}` must be a whole number", repr(value))

    def test_no_batch_size_is_refused(self) -> None:
        refused(lambda: classifier().stream([], batch_size=None), "`batch_size`")  # type: ignore[arg-type]


def test_samples_that_wait_longest_run_first() -> None:
    pool: engine._PendingPool[Array] = engine._PendingPool()
    for start in (0, 5, 10):
        ids = np.arange(start, start + 5)
        pool.add(np.stack([ids, ids], axis=1), engine.ActiveSamples(ids, np.stack([ids, -ids], axis=1)))
    backend = Scripted()
    for max_size, expected, waiting in ((7, range(7), 8), (100, range(7, 15), 0)):
        state, samples = pool.take(backend, max_size)
        assert samples.ids.tolist() == state[:, 0].tolist() == list(expected)
        assert samples.score_state is not None
        assert samples.score_state[:, 1].tolist() == [-index for index in expected]
        assert pool.waiting == waiting


def steered(score: str = "confidence", share: float = 0.6) -> tuple[ew.Classifier, ew.BudgetController]:
    """Return the tiny net with a policy that spends a share of the full cost, and a controller for it."""
    (net, trace), calibration = tiny(), calibrated(OURS)
    budget = share * trace.costs.values[-1]
    policy = ew.fit_policy(
        calibration.predict(trace.val), costs=trace.costs, budget=budget, score=score, strategy="geometric"
    )
    return ew.Classifier(net, calibration, policy), ew.BudgetController(policy)


def grey(n: int, seed: int = 0) -> Tensor:
    """Return noise images, unlike those that the classifiers were fitted on."""
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(seed)) * 3 - 1


def by_hand(clf: Any, controller: ew.BudgetController, images: Tensor, batch_size: int) -> tuple[list[int], np.ndarray]:
    """Return exits and probabilities of the loop in the controller's documentation."""
    exits: list[int] = []
    probs = []
    for batch in images.split(batch_size):
        clf.policy = controller.policy
        pred = clf(batch)
        exits += pred.exits.tolist()
        probs.append(np.asarray(pred.probs))
        on_confidence = controller.base_policy.score == "confidence"
        controller.update(pred.exits, np.asarray(pred.probs).max(axis=1) if on_confidence else None)
    return exits, np.concatenate(probs)


class Steered(Scripted):
    """Record the samples that a controller knew before each batch; a sample with exit BROKEN is non-finite."""

    BROKEN = 9

    def __init__(self, controller: ew.BudgetController) -> None:
        super().__init__()
        self.controller = controller
        self.begun: list[tuple[int, int]] = []  # good samples in earlier batches, samples the controller knew
        self.good = 0

    def start(self, images: Array) -> Array:
        self.begun.append((self.good, self.controller.state.samples))
        self.good += int((images[:, 1] != self.BROKEN).sum())
        return images

    def run(self, exit: int, state: Array) -> tuple[Array, ExitPrediction]:
        state, pred = super().run(exit, state)
        pred.probs[state[:, 1] == self.BROKEN] = np.nan
        return state, pred


class TestController:
    @pytest.mark.parametrize("score", ["confidence", "entropy", "patience"])
    @pytest.mark.parametrize("batch_size", [1, 7, 64, 200])
    @pytest.mark.slow_after_first
    @pytest.mark.slow
    def test_answers_are_those_of_the_loop_by_hand(self, batch_size: int, score: str) -> None:
        clf, controller = steered(score)
        other, mine = steered(score)
        images = grey(160)
        answers = answered(clf, iter(images), batch_size=batch_size, controller=controller)
        exits, probs = by_hand(other, mine, images, batch_size)
        assert [answer.exit for answer in answers] == exits
        assert np.stack([np.asarray(answer.probs) for answer in answers]) == pytest.approx(probs, abs=1e-6)
        assert controller.state == mine.state
        assert controller.state.samples == 160
        assert clf.policy is controller.base_policy  # the classifier is unchanged
        assert controller.policy.thresholds != controller.base_policy.thresholds

    def test_images_that_are_none_change_nothing_for_the_others(self) -> None:
        clf, controller = steered()
        other, mine = steered()
        images = grey(120)
        bad = [ew.InputError("unreadable"), torch.zeros(1, 8, 9), None, *[ew.InputError("gone")] * 30]
        items: list[Any] = list(images)
        for k, item in enumerate(bad):
            items.insert(k * 37 % len(items), item)
        answers = answered(clf, [*bad[:1], *items, *bad[:2]], batch_size=8, controller=controller)
        assert sum(answer.error is not None for answer in answers) == len(bad) + 3
        exits, _ = by_hand(other, mine, images, 8)
        assert [answer.exit for answer in answers if answer.error is None] == exits
        assert controller.state == mine.state

    def test_one_that_is_not_finite_is_an_answer_that_the_controller_does_not_hear(self) -> None:
        clf, controller = steered()
        images = grey(100)
        images[41] = inf
        answers = answered(clf, images, batch_size=10, controller=controller)
        assert [answer.index for answer in answers if answer.error is not None] == [41]
        assert controller.state.samples == 99
        assert controller.state.spent == pytest.approx(sum(a.cost for a in answers if a.error is None and a.cost))

    @staticmethod
    def heard(pattern: Sequence[int | None], batch_size: int, window: int | None = None) -> list[tuple[int, int]]:
        policy = ew.Policy((0.9, 0.9, 0.9, -inf), cost=2.5, budget=2.5, costs=Scripted.costs)
        backend = Steered(ew.BudgetController(policy))
        images = (ew.InputError("unreadable") if exit is None else (k, exit) for k, exit in enumerate(pattern))
        answers = list(engine.stream(backend, policy, images, batch_size, window, controller=backend.controller))
        assert [answer.index for answer in answers] == list(range(len(pattern)))
        assert backend.controller.state.samples == backend.good
        return backend.begun

    @settings(deadline=None, max_examples=60)
    @given(patterns, st.integers(1, 130))
    def test_before_every_batch_it_has_heard_of_all_before(self, pattern: list[int | None], batch_size: int) -> None:
        for good, heard in self.heard(pattern, batch_size):
            assert heard == good

    def test_also_when_some_are_not_finite(self) -> None:
        for good, heard in self.heard([0, 1, 2, Steered.BROKEN, *[0, 3] * 30], 8):
            assert heard == good

    def test_also_when_the_window_is_shorter_than_a_batch(self) -> None:
        for good, heard in self.heard([0, 1, 2, 3] * 16, 8, window=6):
            assert heard == good

    @pytest.mark.parametrize("strength", [0.3, 2])
    @pytest.mark.parametrize("share", [0.4, 0.8])
    @pytest.mark.slow_after_first
    def test_the_budget_is_kept_on_images_that_nothing_was_fitted_on(self, share: float, strength: float) -> None:
        """Weak noise costs far more than the fitted images, strong noise far less."""
        clf, controller = steered(share=share)
        images = grey(1920) * strength
        alone = clf(images).mean_cost
        answers = answered(clf, images, batch_size=16, controller=controller)
        kept = np.mean([answer.cost or 0 for answer in answers])
        assert abs(alone / controller.budget - 1) > 0.15
        assert (alone > controller.budget) == (strength < 1)
        assert kept == pytest.approx(controller.budget, rel=0.01)
        assert controller.mean_cost == pytest.approx(kept)

    def test_a_second_stream_goes_on_where_the_first_ended(self) -> None:
        clf, controller = steered()
        other, whole = steered()
        images = grey(160)
        parts = [*answered(clf, images[:96], batch_size=16, controller=controller)]
        parts += answered(clf, images[96:], batch_size=16, controller=controller)
        expected = answered(other, images, batch_size=16, controller=whole)
        assert [answer.exit for answer in parts] == [answer.exit for answer in expected]
        assert controller.state == whole.state

    def test_every_batch_runs_to_its_end(self) -> None:
        policy = ew.Policy((0.9, 0.9, 0.9, -inf), cost=2.5, budget=2.5, costs=Scripted.costs)
        backend = Scripted()
        images = ((k, exit) for k, exit in enumerate([3, 0, 1, 2] * 20))
        list(engine.stream(backend, policy, images, 8, controller=ew.BudgetController(policy)))
        assert [exit for exit, _, _ in backend.runs if exit == 0] == [0] * 10
        assert all(size <= 8 for _, size, _ in backend.runs)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"score": "entropy"}, "its policy has 3 exits on entropy in MACs"),
            (
                {"thresholds": (0.5, -inf), "costs": (1.0, 2.0), "budget": 1.5},
                "its policy has 2 exits on confidence in MACs",
            ),
            ({"unit": "ms"}, "its policy has 3 exits on confidence in ms"),
        ],
    )
    def test_a_controller_for_something_else_is_refused(self, change: dict[str, Any], words: str) -> None:
        clf, controller = steered()
        other = ew.BudgetController(replace(controller.base_policy, **change))

        def images() -> Iterator[Tensor]:
            raise AssertionError("it was asked for")
            yield

        refused(
            lambda: clf.stream(images(), controller=other),
            "`controller` must control a policy of 3 exits on confidence in MACs",
            words,
        )


@pytest.mark.slow
def test_a_session_is_steered_as_a_classifier_is(tmp_path: Path) -> None:
    """A bundle keeps the budget on inputs unlike those that it was fitted on."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    from exitwise.runtime.onnx import Session

    torch.manual_seed(0)
    net = small_net()
    trace = fitted(net, of_shape((6,), 4), costs=(1, 2, 6))
    calibration = ew.calibrate(trace, OURS, samples=20)
    policy = ew.fit_policy(calibration.predict(trace.val), costs=trace.costs, budget=3, strategy="geometric")
    clf = ew.Classifier(net, calibration, policy)
    images = torch.rand(1280, 6, generator=torch.Generator().manual_seed(1)) * 0.5
    clf.export(tmp_path / "bundle", example=images)
    session = Session(tmp_path / "bundle", threads=1)
    alone = session(images).mean_cost
    controller, mine = (ew.BudgetController(session.policy) for _ in range(2))
    bad: list[Any] = [np.zeros(5), ew.InputError("unreadable")]
    items = [*bad, *images.numpy(), *bad]
    answers = list(session.stream(items, batch_size=16, controller=controller))
    assert [answer.index for answer in answers if answer.error is not None] == [0, 1, 1282, 1283]
    good = answers[2:-2]
    kept = np.mean([answer.cost or 0 for answer in good])
    assert abs(alone / 3 - 1) > 0.05
    assert kept == pytest.approx(3, rel=0.01)
    refused(lambda: session.stream(items, controller=ew.BudgetController(replace(policy, score="margin"))), "on margin")
    exits, probs = by_hand(session, mine, images, 16)
    assert [answer.exit for answer in good] == exits
    assert np.stack([np.asarray(answer.probs) for answer in good]) == pytest.approx(probs, abs=1e-6)
    assert controller.state == mine.state
