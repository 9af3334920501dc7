"""The scheduler: rows of many requests, failing images, cancelled and late requests, with the small bundle."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_cases import TOLERANCE, assert_rows_equal, family_bundle, some_images

import exitwise as ew
from exitwise.core.predictions import Array
from exitwise.runtime.onnx import OnnxBackend, Session
from exitwise.serving.load import LoadController
from exitwise.serving.queues import DeadlineError, Ticket
from exitwise.serving.scheduler import ClosedError, OverloadedError, Scheduler
from exitwise.serving.strategies import STRATEGIES, QueueView, deepest_first, fullest_first, oldest_first

MARK = 17.125  # a pixel of this value makes the backend below fail


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(family_bundle(tmp_path_factory.mktemp("serving") / "bundle"), threads=1)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class GatedBackend(OnnxBackend):
    """A backend that waits at a gate before every batch, notes the batches, and fails on marked images."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.gate, self.reached = threading.Event(), threading.Event()
        self.batches: list[tuple[int, int]] = []
        self.on_run: Callable[[int], None] = lambda exit: None

    def run(self, exit: int, state: Any) -> Any:
        self.reached.set()
        self.gate.wait(30)
        self.batches.append((exit, self.length(state)))
        self.on_run(exit)
        if exit == 0 and (state[0] == MARK).any():
            raise ew.InputError("a marked image")
        return super().run(exit, state)


class FixedLoad(LoadController):
    """A controller that does not react, so that every request gets the policy that it asks for."""

    def update(self, now: float, queued: int) -> int:
        return self.index


@contextmanager
def running(session: Session, *, gated: bool = False, clock: Any = None, **options: Any) -> Iterator[Scheduler[Any]]:
    family = session.manifest.family
    assert family is not None
    load = FixedLoad([member.cost for member in family], slo=100.0)
    backend = GatedBackend(session)
    if not gated:
        backend.gate.set()
    scheduler = Scheduler(backend, family, load, **options, **({} if clock is None else {"clock": clock}))
    scheduler.start()
    try:
        yield scheduler
    finally:
        backend.gate.set()
        scheduler.close()


def submit(scheduler: Scheduler[Any], images: Array, **options: Any) -> Ticket:
    return scheduler.submit(scheduler.backend.start(images), **options)


def block(scheduler: Scheduler[Any]) -> Ticket:
    """Submit an image and wait until it is at the gate, so that whatever is submitted next stays queued."""
    ticket = submit(scheduler, some_images(1))
    assert scheduler.backend.reached.wait(30)  # type: ignore[attr-defined]
    return ticket


def _with_policy(session: Session, policy: ew.Policy) -> Session:
    """Return a session on the same graphs with another policy, without loading them again."""
    single = Session.__new__(Session)
    single.__dict__.update(session.__dict__ | {"policy": policy, "sets": None, "abstention": None})
    return single


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_request_gets_the_rows_of_its_images_alone(session: Session, strategy: str, threads: int) -> None:
    """Requests of mixed sizes and policies, larger and smaller than a batch."""
    generator = np.random.default_rng(1)
    sizes = [*generator.integers(1, 6, 40).tolist(), 50, 17]
    requests = [some_images(size, seed) for seed, size in enumerate(sizes)]
    policies = generator.integers(0, 4, len(sizes)).tolist()
    family = session.manifest.family
    assert family is not None
    exits_seen = set()
    with running(session, strategy=strategy, threads=threads, max_batch=8) as scheduler:
        tickets = [submit(scheduler, x, max_policy=k) for x, k in zip(requests, policies, strict=True)]
        answers = [ticket.future.result(30) for ticket in tickets]
        assert scheduler.pending == 0
        assert max(size for _, size in scheduler.backend.batches) == 8  # type: ignore[attr-defined]
    singles = [_with_policy(session, member.policy) for member in family]
    for answer, images, policy in zip(answers, requests, policies, strict=True):
        assert answer.policy == policy
        assert not answer.errors
        assert_rows_equal(answer.probs, answer.exits, images, singles[policy])
        exits_seen |= set(answer.exits.tolist())
    assert exits_seen == {0, 1, 2}


def test_active_samples_of_several_requests_are_batched_for_later_stages(session: Session) -> None:
    with running(session, gated=True, strategy="fullest", max_batch=16) as scheduler:
        blocker = block(scheduler)
        tickets = [submit(scheduler, some_images(1, seed)) for seed in range(15)]
        scheduler.backend.gate.set()  # type: ignore[attr-defined]
        for ticket in [blocker, *tickets]:
            ticket.future.result(30)
        batches = scheduler.backend.batches  # type: ignore[attr-defined]
    assert [stage for stage, _ in batches] == [0, 0, 1, 2]  # the policy in use lets all samples run all stages
    assert batches[2:] == [(1, 16), (2, 16)]


def test_one_bad_image_is_one_error(session: Session) -> None:
    bad = some_images(3, 5)
    bad[1, 0, 3, 3] = MARK
    with running(session, gated=True) as scheduler:
        blocker = block(scheduler)
        good, mixed = submit(scheduler, some_images(4, 4)), submit(scheduler, bad)
        scheduler.backend.gate.set()  # type: ignore[attr-defined]
        assert not good.future.result(30).errors
        answer = mixed.future.result(30)
        blocker.future.result(30)
        assert scheduler.pending == 0
    assert answer.errors == {1: "a marked image"}
    assert answer.exits.tolist() == [2, -1, 2]


def test_an_image_with_non_finite_probabilities_is_an_error(session: Session) -> None:
    images = some_images(3)
    images[2, 0, 0, 0] = np.nan
    with running(session) as scheduler:
        answer = submit(scheduler, images).future.result(30)
    assert list(answer.errors) == [2]
    assert "not finite" in answer.errors[2]


def test_an_unexpected_error_does_not_end_the_thread(session: Session) -> None:
    def fail(exit: int) -> None:
        raise RuntimeError("at /secret/path")

    with running(session) as scheduler:
        scheduler.backend.on_run = fail  # type: ignore[attr-defined]
        errors = submit(scheduler, some_images(2)).future.result(30).errors
        assert errors == dict.fromkeys((0, 1), "exit 0 cannot be computed")
        scheduler.backend.on_run = lambda exit: None  # type: ignore[attr-defined]
        assert not submit(scheduler, some_images(2)).future.result(30).errors


def test_cancelled_requests_are_not_computed(session: Session) -> None:
    with running(session, gated=True, max_batch=4) as scheduler:
        first = block(scheduler)
        cancelled = [submit(scheduler, some_images(4, seed)) for seed in range(20)]
        last = submit(scheduler, some_images(2, 7))
        for ticket in cancelled:
            assert ticket.future.cancel()
        assert scheduler.pending == 3
        scheduler.backend.gate.set()  # type: ignore[attr-defined]
        first.future.result(30)
        last.future.result(30)
        with pytest.raises(CancelledError):
            cancelled[0].future.result(30)
        assert sum(size for stage, size in scheduler.backend.batches if stage == 0) == 3  # type: ignore[attr-defined]
        assert scheduler.pending == 0


def test_a_request_cancelled_between_stages_is_not_computed_further(session: Session) -> None:
    with running(session, gated=True) as scheduler:
        ticket = submit(scheduler, some_images(4))
        scheduler.backend.on_run = lambda exit: ticket.future.cancel() and None  # type: ignore[attr-defined]
        scheduler.backend.gate.set()  # type: ignore[attr-defined]
        submit(scheduler, some_images(1), max_policy=0).future.result(30)
        scheduler.close()
        assert all(stage == 0 or size == 0 for stage, size in scheduler.backend.batches)  # type: ignore[attr-defined]


def test_clients_that_cancel_at_random_moments_leave_nothing_behind(session: Session) -> None:
    """Of 300 requests of 1 to 6 images about 30 % are cancelled while others run: every other row is right."""
    generator = np.random.default_rng(3)
    family = session.manifest.family
    assert family is not None
    pool = some_images(64)
    expected = _with_policy(session, family[2].policy)(pool)
    cancelled, kept = [], []
    with running(session, threads=2, max_batch=8) as scheduler:
        for _ in range(300):
            rows = generator.integers(0, len(pool), generator.integers(1, 7))
            ticket = submit(scheduler, pool[rows], max_policy=2)
            if generator.random() < 0.3:
                cancelled.append(ticket)
            else:
                kept.append((rows, ticket))
            if cancelled and generator.random() < 0.5:
                cancelled[int(generator.integers(len(cancelled)))].future.cancel()
        for ticket in cancelled:
            ticket.future.cancel()
        for rows, ticket in kept:
            answer = ticket.future.result(30)
            assert answer.exits.tolist() == expected.exits[rows].tolist()
            assert np.abs(answer.probs - expected.probs[rows]).max() < TOLERANCE
        assert scheduler.pending == 0
    assert not scheduler._tickets
    assert scheduler.queue_lengths == [0, 0, 0]


def test_late_requests_are_dropped_before_they_are_computed(session: Session) -> None:
    clock = Clock()
    with running(session, gated=True, clock=clock) as scheduler:
        block(scheduler)
        late, patient = submit(scheduler, some_images(8), timeout=1.0), submit(scheduler, some_images(2), timeout=9.0)
        clock.now = 2.0
        scheduler.backend.gate.set()  # type: ignore[attr-defined]
        with pytest.raises(DeadlineError, match="deadline"):
            late.future.result(30)
        assert not patient.future.result(30).errors
        assert sum(size for stage, size in scheduler.backend.batches if stage == 0) == 3  # type: ignore[attr-defined]


def test_a_request_that_cannot_be_ready_in_time_is_dropped(session: Session) -> None:
    """Batches take a second of this clock: a request with less time left is not started, and later ones recover."""
    clock = Clock()

    def pass_time(exit: int) -> None:
        clock.now += 1.0

    with running(session, clock=clock) as scheduler:
        scheduler.backend.on_run = pass_time  # type: ignore[attr-defined]
        submit(scheduler, some_images(1), timeout=9.0).future.result(30)
        with pytest.raises(DeadlineError):
            submit(scheduler, some_images(1), timeout=0.5).future.result(30)
        scheduler.backend.on_run = lambda exit: None  # type: ignore[attr-defined]
        clock.now += 2.0  # what was measured is forgotten: after a pause all requests would look late
        submit(scheduler, some_images(1), timeout=0.5).future.result(30)


def test_a_full_queue_refuses_at_once(session: Session) -> None:
    with running(session, gated=True, max_queue=10) as scheduler:
        tickets = [submit(scheduler, some_images(4)), submit(scheduler, some_images(6))]
        with pytest.raises(OverloadedError, match="queue is full") as refused:
            submit(scheduler, some_images(1))
        assert refused.value.retry_after >= 1
        tickets[1].future.cancel()
        submit(scheduler, some_images(6))


def test_a_predicted_wait_beyond_the_limit_is_refused(session: Session) -> None:
    family = session.manifest.family
    assert family is not None
    with running(session, gated=True, max_wait=1.0) as scheduler:
        scheduler.load.add_batch(family[0].cost, 0.5)  # two images per second with the cheapest policy
        scheduler.load.overhead = 0.0
        submit(scheduler, some_images(2))
        with pytest.raises(OverloadedError, match="the wait would be 1000 ms, more than 900 ms"):
            submit(scheduler, some_images(1), timeout=0.9)
        submit(scheduler, some_images(4))
        with pytest.raises(OverloadedError, match="more than 1000 ms") as refused:
            submit(scheduler, some_images(1))
        assert refused.value.retry_after == 2


def test_closing_answers_what_was_accepted(session: Session) -> None:
    with running(session, gated=True, threads=2, max_batch=2) as scheduler:
        tickets = [submit(scheduler, some_images(3, seed)) for seed in range(5)]
        closer = threading.Thread(target=scheduler.close)
        closer.start()
        while not scheduler._closing:
            pass
        with pytest.raises(ClosedError, match="shutting down"):
            submit(scheduler, some_images(1))
        scheduler.backend.gate.set()  # type: ignore[attr-defined]
        closer.join(30)
        assert all(ticket.future.done() and not ticket.future.result().errors for ticket in tickets)


def test_strategies() -> None:
    queues = [QueueView(0, 40, 3.0), QueueView(1, 32, 2.0), QueueView(2, 5, 2.5)]
    assert deepest_first(queues, 32) == 2
    assert oldest_first(queues, 32) == 1
    assert fullest_first(queues, 32) == 1  # both are full batches, and it is deeper
    assert fullest_first(queues, 64) == 0


def test_a_bundle_reads_back_its_family(session: Session, tmp_path: Path) -> None:
    from exitwise.runtime.bundle import Manifest

    family = session.manifest.family
    session.manifest.save(tmp_path)
    assert Manifest.load(tmp_path).family == family
    assert family is not None
    assert [family.index_for_budget(budget) for budget in (1.0, family[1].budget, 1e12)] == [0, 1, 3]
    assert [family.index_for_floor(floor) for floor in (0.0, 0.5, 0.55, 0.8)] == [0, 0, 1, 3]
    with pytest.raises(ew.InputError, match=r"`floor` must be at most 0\.8"):
        family.index_for_floor(0.9)
    assert family[3].policy.thresholds == (inf, inf, -inf)


def make_scheduler(session: Session, clock: Clock, **options: Any) -> Scheduler[Any]:
    """Return a scheduler with a real load controller, whose batches the test runs."""
    family = session.manifest.family
    assert family is not None
    load = LoadController([member.cost for member in family], slo=0.05)
    load.add_batch(family[len(family) - 1].cost, 0.01)
    return Scheduler(OnnxBackend(session), family, load, clock=clock, **options)


def test_a_load_whose_clients_go_away_is_over(session: Session) -> None:
    clock = Clock()
    scheduler = make_scheduler(session, clock)
    highest = scheduler.load.index
    tickets = []
    for _ in range(40):
        clock.now += 0.002
        tickets.append(submit(scheduler, some_images(1)))
    scheduler.run_next()
    assert scheduler.load.index < highest
    for ticket in tickets:
        ticket.future.cancel()
    while scheduler.run_next():
        pass
    clock.now += 60
    assert scheduler.policy_in_use() == highest


def test_a_refused_request_of_unknown_size_counts_as_a_usual_one(session: Session) -> None:
    clock = Clock()
    scheduler = make_scheduler(session, clock, max_queue=160)
    for _ in range(20):
        submit(scheduler, some_images(8))
    rates = []
    for size in (None, 1):
        before = scheduler.load.arrival_rate(clock.now)
        with pytest.raises(OverloadedError):
            scheduler.check_capacity(size)
        rates.append(scheduler.load.arrival_rate(clock.now) - before)
    assert rates[0] == pytest.approx(5 * rates[1])  # the mean size moves from 1 towards 8


def test_a_large_request_wakes_all_threads_that_it_needs(session: Session) -> None:
    with running(session, gated=True, threads=3, max_batch=4) as scheduler:
        at_once = threading.Barrier(4)
        scheduler.backend.gate.wait = lambda _: at_once.wait(30)  # type: ignore[attr-defined, method-assign]
        submit(scheduler, some_images(12), max_policy=0)
        at_once.wait(30)  # three threads are here at the same time
        scheduler.backend.gate.wait = lambda _: True  # type: ignore[attr-defined, method-assign]


def test_an_image_that_is_not_finite_is_one_error(session: Session) -> None:
    records: list[Any] = []
    with running(session, on_batch=records.append) as scheduler:
        ticket = submit(scheduler, np.full((1, *some_images(1).shape[1:]), np.nan, np.float32))
        assert len(ticket.future.result(30).errors) == 1
    assert sum(record.errors for record in records) == 1
