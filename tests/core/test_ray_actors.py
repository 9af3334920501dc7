"""The scheduler of tasks on actors, with a stand-in for Ray that ends tasks in any order and kills actors."""

import itertools
import os
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exitwise.core import ray_cluster as ray_cluster_module
from exitwise.core.errors import InputError
from exitwise.core.ray_actors import ActorOptions, ActorPool, TaskActor
from exitwise.core.ray_cluster import ClusterGoneError, ray_cluster


class ActorError(Exception):
    pass


class StandIn:
    """What the scheduler uses of the module `ray`; methods of actors run when they are waited for, in random order."""

    class exceptions:  # noqa: N801
        RayActorError, OutOfMemoryError, RaySystemError, RayError = ActorError, MemoryError, ConnectionError, ActorError

    def __init__(self, seed: int, death_rate: float = 0.0, head: str = "") -> None:
        self.random, self.death_rate = random.Random(seed), death_rate
        self.killed: list[Any] = []
        self.max_waiting = 0
        self._numbers = itertools.count()
        self._node = {"NodeID": "me", "NodeManagerAddress": head.partition(":")[0], "Alive": True}
        self._node["NodeManagerPort"] = head.partition(":")[2]
        self._head = head

    def put(self, value: Any) -> Any:
        return value

    def nodes(self) -> list[dict[str, Any]]:
        return [self._node]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0, "GPU": 1.0}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=self._head, get_node_id=lambda: "me")

    def remote(self, **needs: Any) -> Callable[[type], Any]:
        self.needs = needs

        def wrap(kind: type) -> Any:
            def make(*arguments: Any) -> Any:
                actor = kind(*arguments)
                number = next(self._numbers)
                methods = {}
                for name in ("start", "run", "progress"):
                    method = getattr(actor, name)
                    methods[name] = SimpleNamespace(
                        remote=lambda *a, m=method, n=name: Reference(n, lambda: m(*a), number)
                    )
                return SimpleNamespaceByIdentity(**methods)

            return SimpleNamespace(remote=make)

        return wrap

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.max_waiting = max(self.max_waiting, sum(reference.name == "run" for reference in references))
        chosen = self.random.choice(references)
        return [chosen], [reference for reference in references if reference is not chosen]

    def get(self, reference: Any) -> Any:
        if reference.name != "progress" and self.random.random() < self.death_rate:
            raise ActorError("the worker died: End of file")
        return reference.compute()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class Reference:
    def __init__(self, name: str, compute: Callable[[], Any], actor: int) -> None:
        self.name, self.compute, self.actor = name, compute, actor


class SimpleNamespaceByIdentity(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


@pytest.fixture
def head() -> Iterator[str]:
    with listening() as address:
        yield address


@contextmanager
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def double() -> Callable[[int, Callable[[int], None]], int]:
    return lambda task, report: 2 * task


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("trial", range(10))
def test_every_task_has_one_result_whatever_dies(
    head: str, seed: int, trial: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exitwise.core.ray_actors._FAILED_STARTS", 1000)  # starts die at random, too
    ray, deaths, begun = StandIn(seed, 0.1 * (trial % 3), head), Counter[int](), []
    yielded: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(50):
            begun.append(number - len(yielded))
            yield number

    def count_death(task: int, reason: str) -> None:
        assert "killed or crashed" in reason
        deaths[task] += 1

    with ActorPool(ray, double, ActorOptions(3)) as pool:
        for task, result in pool.run(tasks(), count_death, lambda task, done: None, window):
            assert result == 2 * task
            yielded.append(task)
    assert sorted(yielded) == list(range(50))
    assert ray.max_waiting <= 3  # a task at a time for each of three actors
    if window is not None:
        assert yielded == list(range(50))
        assert max(begun) <= max(window, 6)  # the next one is already drawn; two for each actor
    assert bool(deaths) == (ray.death_rate > 0)


def test_an_error_of_a_task_or_of_a_death_ends_the_run_and_the_actors(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        def work(task: int, report: Callable[[int], None]) -> int:
            if task == 3:
                raise InputError("task 3 is none")
            return task

        return work

    ray = StandIn(0, head=head)
    with pytest.raises(InputError, match=r"^task 3 is none$"), ActorPool(ray, fail, ActorOptions(2)) as pool:
        list(pool.run(range(9), pytest.fail, lambda task, done: None))
    assert len(ray.killed) == 2

    def give_up(task: int, reason: str) -> None:
        raise InputError(f"task {task}: {reason}")

    get = ray.get
    monkeypatch.setattr(ray, "get", lambda reference: _die_in_run(reference, get))
    with ActorPool(ray, double, ActorOptions(1)) as pool, pytest.raises(InputError, match="task 0: its process was"):
        list(pool.run(range(9), give_up, lambda task, done: None))


def test_lack_of_memory_is_the_death_of_an_actor(head: str) -> None:
    tries: list[int] = []

    def make() -> Any:
        def work(task: int, report: Callable[[int], None]) -> int:
            tries.append(task)
            if len(tries) < 3:
                raise MemoryError("Unable to allocate 5 MiB")
            return task

        return work

    ray, deaths = StandIn(0, head=head), []
    with ActorPool(ray, make, ActorOptions(1)) as pool:
        results = list(pool.run([5], lambda task, reason: deaths.append(reason), lambda task, done: None))
    assert results == [(5, 5)]
    assert deaths == ["it ran out of memory: Unable to allocate 5 MiB"] * 2
    assert len(ray.killed) == 3  # each began in a new process


def _die_in_run(reference: Any, get: Callable[[Any], Any]) -> Any:
    if reference.name == "run":
        raise ActorError("End of file")
    return get(reference)


def test_actors_that_cannot_start_end_the_run(head: str) -> None:
    ray = StandIn(0, 1.0, head)
    with (
        ActorPool(ray, double, ActorOptions(2)) as pool,
        pytest.raises(InputError, match="before it was ready 3 times"),
    ):
        list(pool.run(range(9), pytest.fail, lambda task, done: None))

    def no_bundle() -> Any:
        raise InputError("bundle does not exist")

    pool = ActorPool(StandIn(0, head=head), no_bundle, ActorOptions(2))
    with pool, pytest.raises(InputError, match=r"^bundle does not exist$"):
        list(pool.run(range(9), pytest.fail, lambda task, done: None))


def test_a_task_is_not_given_to_an_idle_actor_that_died_with_another(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that dies ends all its actors: it is one death of the only task that runs."""
    ray, deaths = StandIn(0, head=head), []
    dead: set[int] = set()
    get = ray.get

    def get_or_die(reference: Any) -> Any:
        if reference.name == "run" and not dead and reference.actor == 0:
            dead.update(range(6))
        if reference.actor in dead:
            raise ActorError("node failure")
        return get(reference)

    monkeypatch.setattr(ray, "get", get_or_die)
    with ActorPool(ray, double, ActorOptions(6)) as pool:
        # All are ready before the task comes.
        monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: (references[:1], references[1:]))
        while pool._running:
            for reference in pool._wait(lambda task, done: None):
                actor, _ = pool._running.pop(reference)
                pool._free.append(actor)
        results = list(pool.run([7], lambda task, reason: deaths.append(reason), lambda task, done: None))
    assert results == [(7, 14)]
    assert deaths == ["its node died"]


@pytest.mark.parametrize(("options", "count"), [(ActorOptions(), 3), (ActorOptions(num_cpus=2), 1)])
def test_there_is_an_actor_for_every_cpu(head: str, options: ActorOptions, count: int) -> None:
    ray = StandIn(0, head=head)
    with ActorPool(ray, double, options):
        pass
    assert len(ray.killed) == count


def test_a_dead_head_is_an_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("exitwise.core.ray_actors.time.monotonic", lambda: float(next(clock)))
    with listening() as head:
        pool = ActorPool(StandIn(0, head=head), double, ActorOptions(1))
        tasks = pool.run(itertools.count(), pytest.fail, lambda task, done: None)
        next(tasks)
    with pytest.raises(ClusterGoneError, match=f"the Ray cluster at {head} is gone"):
        list(itertools.islice(tasks, 1000))


def test_an_actor_ends_without_its_parent() -> None:
    actor = "from exitwise.core.ray_actors import TaskActor; TaskActor(None, '.')"
    code = f"import os, time; {actor}; print(os.getpid(), flush=True); time.sleep(60)"
    middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)  # it runs
    parent.kill()
    assert parent.stdout.read() == ""  # its end of the pipe is closed when the actor ends, long before 60 s
    parent.communicate()


def test_progress_is_that_of_the_running_task() -> None:
    between, go_on = threading.Event(), threading.Event()

    def make() -> Any:
        def work(task: int, report: Callable[[int], None]) -> int:
            report(7)
            between.set()
            assert go_on.wait(10)
            return task

        return work

    actor = TaskActor(make, str(Path.cwd()))
    assert actor.start() == os.getpid()
    assert actor.progress() == 0
    thread = threading.Thread(target=actor.run, args=(1,))
    thread.start()
    assert between.wait(10)
    assert actor.progress() == 7
    go_on.set()
    thread.join()


@pytest.mark.parametrize("address", ["nowhere", "ray://host:1", "host:0", "host:65536", "host:", "two words:1"])
def test_an_address_must_be_one(address: str) -> None:
    message = "`ray` must be HOST:PORT of a cluster's head, or local, but got"
    with pytest.raises(InputError, match=message), ray_cluster(address):
        pass


def test_bad_clusters_are_one_line_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as address:
        pass
    message = f"^no Ray cluster answers at {address}: Connection refused$"
    with pytest.raises(InputError, match=message), ray_cluster(address):
        pass
    monkeypatch.setattr(ray_cluster_module, "_STATUS_SECONDS", 0.5)
    message = "^what listens at .* is no Ray cluster"
    with listening() as address, pytest.raises(InputError, match=message), ray_cluster(address):
        pass
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"^`ray` needs Ray: pip install 'exitwise\[ray\]'$"
    with pytest.raises(InputError, match=message), ray_cluster("local"):
        pass
