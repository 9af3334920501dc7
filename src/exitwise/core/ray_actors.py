"""Tasks on Ray actors: each actor has one task at a time, and the task of an actor that dies is given to another."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exitwise.core.errors import InputError, first_line
from exitwise.core.ray_cluster import ClusterGoneError, is_listening

Work = Callable[[Any], Any]  # task -> result; raises InputError or OSError for what a user can cause

_POLL_SECONDS = 1.0  # between two looks at the cluster
_GROW_SECONDS = 10.0  # between two looks at the number of CPUs
_SILENT_POLLS = 3  # looks without an answer of the head after which the cluster is gone


@dataclass(frozen=True)
class ActorOptions:
    """Number of actors, what each needs, and how often the actor of one task may die.

    Args:
        count: Number of actors; None for one for every CPU, or GPU, of the cluster, also of nodes that join later.
        num_gpus: GPUs of each actor; it has one CPU, and one thread.
        max_deaths: Actors that may die on one task; one more is an error.
        window: Tasks that may be started beyond the first that is not finished; results then come in order. None for
            results in the order in which they are finished.
    """

    count: int | None = None
    num_gpus: int = 0
    max_deaths: int = 3
    window: int | None = None


@dataclass(eq=False)
class _Task:
    number: int
    argument: Any
    deaths: int = 0


@dataclass
class _Progress:
    """What is running, and results that wait for their turn."""

    running: dict[Any, tuple[Any, _Task | None]] = field(default_factory=dict)  # reference -> actor, task or its start
    again: deque[_Task] = field(default_factory=deque)
    results: dict[int, Any] = field(default_factory=dict)
    next_number: int = 0


class TaskActor:
    """Runs tasks in a process of Ray's. What a user can cause is returned as a value: Ray would wrap it."""

    def __init__(self, make_work: Callable[[], Work], folder: str) -> None:
        """Take the command's working directory, if this node has it: names of files and modules are relative to it."""
        if Path(folder).is_dir():
            os.chdir(folder)
        self._make_work = make_work
        self._work: Work | None = None

    def start(self) -> int:
        """Return the id of the process, once it runs."""
        return os.getpid()

    def run(self, task: Any) -> Any:
        """Return the result of a task, or an InputError or OSError as a value."""
        try:
            if self._work is None:
                self._work = self._make_work()
            return self._work(task)
        except (InputError, OSError) as error:
            return error


def run_on_actors(
    ray: Any, make_work: Callable[[], Work], tasks: Iterable[Any], options: ActorOptions, describe: Callable[[Any], str]
) -> Iterator[tuple[Any, Any]]:
    """Yield (task, result) of every task.

    Args:
        ray: The module, connected to a cluster.
        make_work: Called once in every actor before its first task; it and the tasks are sent by pickling.
        tasks: Arguments of the tasks, taken one by one as actors become free.
        options: Number of actors and limits.
        describe: Returns what a task is about, for the message if its actors die.

    Raises:
        InputError: A task raised it, or its actors died too often.
        OSError: A task raised it.
        ClusterGoneError: The cluster ended.
    """
    scheduler = _Scheduler(ray, ray.put(make_work), options, describe)
    try:
        yield from scheduler.run(iter(tasks))
    finally:
        scheduler.stop()


class _Scheduler:
    def __init__(self, ray: Any, make_work: Any, options: ActorOptions, describe: Callable[[Any], str]) -> None:
        self._ray, self._make_work, self._options, self._describe = ray, make_work, options, describe
        self._actor_class = ray.remote(num_cpus=1, num_gpus=options.num_gpus, max_restarts=0)(TaskActor)
        self._head = ray.get_runtime_context().gcs_address
        self._state = _Progress()
        self._actors: set[Any] = set()
        self._starts_failed = 0
        self._grown_at = float("-inf")
        self._silent_polls = 0

    def run(self, tasks: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        state, free = self._state, deque[Any]()
        numbered = (_Task(number, argument) for number, argument in enumerate(tasks))
        waiting: _Task | None = next(numbered, None)
        while waiting is not None or state.again or any(task for _, task in state.running.values()):
            self._grow()
            while free and (state.again or (waiting is not None and self._may_start(waiting))):
                if state.again:
                    task = state.again.popleft()
                else:
                    task, waiting = waiting, next(numbered, None)  # type: ignore[assignment]
                actor = free.popleft()
                state.running[actor.run.remote(task.argument)] = actor, task
            for reference in self._wait():
                actor, done = state.running.pop(reference)
                result = self._get(reference, actor, done)
                if actor in self._actors:
                    free.append(actor)
                if done is not None and result is not None:
                    yield from self._in_turn(done, result[0])

    def _may_start(self, task: _Task) -> bool:
        window = self._options.window
        return window is None or task.number < self._state.next_number + window

    def _in_turn(self, task: _Task, result: Any) -> Iterator[tuple[Any, Any]]:
        """Yield a result, or with a window all results whose turn it is."""
        state = self._state
        if self._options.window is None:
            yield task.argument, result
            return
        state.results[task.number] = task.argument, result
        while state.next_number in state.results:
            yield state.results.pop(state.next_number)
            state.next_number += 1

    def _grow(self) -> None:
        """Start actors up to their number; again and again, because actors die and nodes join."""
        now = time.monotonic()
        if self._options.count is None and now - self._grown_at < _GROW_SECONDS and self._actors:
            return
        self._grown_at = now
        count = self._options.count
        if count is None:
            resource = "GPU" if self._options.num_gpus else "CPU"
            count = max(1, int(self._ray.cluster_resources().get(resource, 1)))
        while len(self._actors) < count:
            actor = self._actor_class.remote(self._make_work, str(Path.cwd()))
            self._actors.add(actor)
            self._state.running[actor.start.remote()] = actor, None

    def _wait(self) -> list[Any]:
        """Return references that are finished; none after a second, in which the head must answer."""
        done, _ = self._ray.wait(list(self._state.running), timeout=_POLL_SECONDS)
        if done or is_listening(self._head):
            self._silent_polls = 0
        else:
            self._silent_polls += 1
            if self._silent_polls >= _SILENT_POLLS:
                raise ClusterGoneError(f"the Ray cluster at {self._head} is gone")
        return list(done)

    def _get(self, reference: Any, actor: Any, task: _Task | None) -> tuple[Any] | None:
        """Return the result of a task or a start in a tuple; None if its actor died."""
        try:
            result = self._ray.get(reference)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.OutOfMemoryError) as error:
            self._discard(actor)
            self._note_death(task, error)
            return None
        except self._ray.exceptions.RaySystemError as error:
            raise ClusterGoneError(f"the Ray cluster at {self._head} is gone: {first_line(error)}") from None
        if isinstance(result, InputError | OSError):
            raise result
        if task is None:
            self._starts_failed = 0
        return (result,)

    def _discard(self, actor: Any) -> None:
        self._actors.discard(actor)
        self._grown_at = float("-inf")
        self._ray.kill(actor)  # if it only could not be reached

    def _note_death(self, task: _Task | None, error: Exception) -> None:
        reason = _describe_death(error)
        if task is None:
            self._starts_failed += 1
            if self._starts_failed > self._options.max_deaths:
                raise InputError(f"Ray actors die while they start, {self._starts_failed} of them in turn: {reason}")
            return
        task.deaths += 1
        if task.deaths > self._options.max_deaths:
            about = self._describe(task.argument)
            raise InputError(f"a Ray actor died {task.deaths} times on {about}: {reason}")
        self._state.again.append(task)

    def stop(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def _describe_death(error: Exception) -> str:
    """Return why an actor died, in a few words, from Ray's long message."""
    text = " ".join(str(error).split())
    for sign, reason in (
        ("OutOfMemory", "its node ran out of memory"),
        ("memory pressure", "its node ran out of memory"),
        ("running low on memory", "its node ran out of memory"),
        ("node has died", "its node died"),
        ("node failure", "its node died"),
        ("End of file", "its process was killed or crashed, perhaps for lack of memory"),
        ("exit code", "its process ended"),
    ):
        if sign in text:
            return reason
    return first_line(error)
