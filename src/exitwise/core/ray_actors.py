"""Tasks on Ray actors: each actor has one task at a time, and the task of an actor that dies is given to another."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwise.core.errors import InputError, first_line
from exitwise.core.ray_cluster import ClusterGoneError, is_listening
from exitwise.core.reordering import ReorderBuffer

# (task, report) -> result. It calls report with how much of the task is done, and raises InputError or OSError.
Work = Callable[[Any, Callable[[int], None]], Any]

_POLL_SECONDS = 1.0  # between two looks at the cluster and at the progress of all actors
_GROW_SECONDS = 10.0  # between two looks at the number of CPUs
_SILENT_SECONDS = 5.0  # without an answer of the head or of this node, after which the cluster is gone
_FAILED_STARTS = 3  # in turn


@dataclass(frozen=True)
class ActorOptions:
    """Number of actors, and what each needs.

    Args:
        count: Number of actors; None for one for every CPU, or GPU, of the cluster, also of nodes that join later.
        num_cpus: CPUs of each actor, and its number of threads.
        num_gpus: GPUs of each actor.
    """

    count: int | None = None
    num_cpus: int = 1
    num_gpus: int = 0


class TaskActor:
    """Runs tasks in a process of Ray's. What a user can cause is returned as a value: Ray would wrap it."""

    def __init__(self, make_work: Callable[[], Work], folder: str) -> None:
        """Take the command's working directory, if this node has it: names of files and modules are relative to it."""
        if Path(folder).is_dir():
            os.chdir(folder)
        threading.Thread(target=_exit_without_parent, args=(os.getppid(),), daemon=True).start()
        self._make_work = make_work
        self._work: Work | None = None
        self._done = 0
        self._lock = threading.Lock()

    def start(self) -> int | Exception:
        """Prepare the work and return the id of the process."""
        try:
            self._work = self._make_work()
        except (InputError, OSError) as error:
            return error
        return os.getpid()

    def run(self, task: Any) -> Any:
        """Return the result of a task, or an InputError or OSError as a value."""
        assert self._work is not None
        self._report(0)
        try:
            return self._work(task, self._report)
        except (InputError, OSError) as error:
            return error

    def _report(self, done: int) -> None:
        with self._lock:
            self._done = done

    def progress(self) -> int:
        """Return how much of the current task is done; called while it runs."""
        with self._lock:
            return self._done


def _exit_without_parent(parent: int) -> None:
    """End this process soon after Ray's on this node: by themselves actors may work on for half a minute."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


@dataclass(eq=False)
class _Task:
    number: int
    argument: Any


class ActorPool:
    """Actors that run tasks. As a context manager it starts them and ends them.

    Args:
        ray: The module, connected to a cluster.
        make_work: Called once in every actor when it starts; it and the tasks are sent by pickling.
        options: Number of actors, and what each needs.
    """

    def __init__(self, ray: Any, make_work: Callable[[], Work], options: ActorOptions) -> None:
        self._ray, self._options = ray, options
        self._make_work = ray.put(make_work)
        needs = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
        # Two threads: one runs the task, the other tells its progress.
        self._actor_class = ray.remote(**needs, max_restarts=0, max_concurrency=2)(TaskActor)
        context = ray.get_runtime_context()
        self._head = context.gcs_address
        [node] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
        self._node = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        self._actors: dict[Any, int] = {}  # to the id of its process, 0 while it starts
        self._free: deque[Any] = deque()
        self._running: dict[Any, tuple[Any, _Task | None]] = {}  # reference -> actor, its task (None: its start)
        self._asked: dict[Any, Any] = {}  # reference of the progress -> actor
        self._failed_starts = 0
        self._answered_at = time.monotonic()
        self._polled_at = self._grown_at = float("-inf")

    def __enter__(self) -> "ActorPool":
        self._grow()
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that have started."""
        return [pid for pid in self._actors.values() if pid]

    def run(
        self,
        tasks: Iterable[Any],
        on_death: Callable[[Any, str], None],
        on_progress: Callable[[Any, int], None],
        window: int | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (task, result) of every task.

        Args:
            tasks: The tasks, taken one by one as actors become free.
            on_death: Called with a task whose actor died, and why; raises InputError if it must not be tried again.
            on_progress: Called with a task and how much of it is done; 0 if it begins anew.
            window: Tasks that may begin beyond the first that is not finished; results then come in the order of the
                tasks. None for results in the order in which they are finished.

        Raises:
            InputError: A task or the start of an actor raised it, `on_death` raised it, or actors die while they start.
            OSError: A task or the start of an actor raised it.
            ClusterGoneError: The cluster ended.
        """
        numbered = (_Task(number, task) for number, task in enumerate(tasks))
        following = next(numbered, None)
        again: deque[_Task] = deque()
        ordered: ReorderBuffer[tuple[Any, Any]] = ReorderBuffer()
        while following is not None or again or any(task for _, task in self._running.values()):
            self._grow()
            while self._free and again:
                self._begin(again.popleft())
            while self._free and following and (window is None or following.number < ordered.next_index + window):
                self._begin(following)
                following = next(numbered, None)
            for reference in self._wait(on_progress):
                actor, task = self._running.pop(reference)
                try:
                    result = self._get(reference)
                except (self._ray.exceptions.RayActorError, self._ray.exceptions.OutOfMemoryError) as error:
                    self._check_cluster()
                    self._discard(actor, task, _describe_death(error))
                    if task:
                        on_progress(task.argument, 0)
                        on_death(task.argument, _describe_death(error))
                        again.append(task)
                    continue
                self._free.append(actor)
                if task is None:
                    self._failed_starts, self._actors[actor] = 0, result
                elif window is None:
                    yield task.argument, result
                else:
                    ordered.add(task.number, (task.argument, result))
                    yield from ordered.pop_ready()

    def _begin(self, task: _Task) -> None:
        actor = self._free.popleft()
        self._running[actor.run.remote(task.argument)] = actor, task

    def _grow(self) -> None:
        """Start actors up to their number; again and again, because actors die and nodes join."""
        count = self._options.count
        if count is None:
            now = time.monotonic()
            if now - self._grown_at < _GROW_SECONDS and self._actors:
                return
            self._grown_at = now
            gpus = self._options.num_gpus
            name, needed = ("GPU", gpus) if gpus else ("CPU", self._options.num_cpus)
            count = max(1, int(self._ray.cluster_resources().get(name, 1)) // needed)
        while len(self._actors) < count:
            actor = self._actor_class.remote(self._make_work, str(Path.cwd()))
            self._actors[actor] = 0
            self._running[actor.start.remote()] = actor, None

    def _wait(self, on_progress: Callable[[Any, int], None]) -> list[Any]:
        """Return references of tasks and starts that are finished; none if there is none within a second."""
        now = time.monotonic()
        if now - self._polled_at >= _POLL_SECONDS:
            self._polled_at = now
            self._check_cluster()
            self._ask_progress()
        done, _ = self._ray.wait([*self._running, *self._asked], num_returns=1, timeout=_POLL_SECONDS)
        for reference in done:
            if reference in self._asked:
                self._tell_progress(reference, on_progress)
        return [reference for reference in done if reference in self._running]

    def _check_cluster(self) -> None:
        """Raise ClusterGoneError if the head or this machine's node is dead: Ray would soon end this process."""
        now = time.monotonic()
        silent = [address for address in (self._head, self._node) if not is_listening(address)]
        if not silent:
            self._answered_at = now
        elif now - self._answered_at > _SILENT_SECONDS:
            what = "the Ray cluster" if silent[0] == self._head else "this machine's node of the Ray cluster"
            raise ClusterGoneError(f"{what} at {silent[0]} is gone")

    def _ask_progress(self) -> None:
        asked = set(self._asked.values())
        for actor, task in self._running.values():
            if task is not None and actor not in asked:
                self._asked[actor.progress.remote()] = actor

    def _tell_progress(self, reference: Any, on_progress: Callable[[Any, int], None]) -> None:
        actor = self._asked.pop(reference)
        try:
            done = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            return  # the actor died: its task says so
        for running, task in self._running.values():
            if running is actor and task is not None:
                on_progress(task.argument, done)

    def _get(self, reference: Any) -> Any:
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RaySystemError as error:
            raise ClusterGoneError(f"the Ray cluster at {self._head} is gone: {first_line(error)}") from None
        if isinstance(result, InputError | OSError):
            raise result
        return result

    def _discard(self, actor: Any, task: _Task | None, reason: str) -> None:
        del self._actors[actor]
        self._grown_at = float("-inf")
        self._ray.kill(actor)  # if it only could not be reached
        if task is None:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                raise InputError(f"a Ray actor died before it was ready {_FAILED_STARTS} times ({reason})")


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
        ("unavailable", "it could not be reached"),
        ("exit code", "its process ended"),
    ):
        if sign in text:
            return reason
    return first_line(error)
