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
        except (InputError, OSError, MemoryError) as error:
            return error
        return os.getpid()

    def run(self, task: Any) -> Any:
        """Return the result of a task, or an InputError, OSError or MemoryError as a value."""
        assert self._work is not None
        self._report(0)
        try:
            return self._work(task, self._report)
        except (InputError, OSError, MemoryError) as error:
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


class ClusterWatch:
    """Looks whether the head of a cluster and this machine's node still accept connections, at HOST:PORT each."""

    def __init__(self, head: str, node: str) -> None:
        self.head, self.node = head, node
        self._answered_at = time.monotonic()

    @classmethod
    def of(cls, ray: Any) -> "ClusterWatch":
        """Watch the cluster to which Ray is connected."""
        context = ray.get_runtime_context()
        [node] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
        return cls(context.gcs_address, f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")

    def find_silent(self) -> str | None:
        """Return what does not answer now, in words."""
        if not is_listening(self.head):
            return f"the Ray cluster at {self.head}"
        return None if is_listening(self.node) else f"this machine's node of the Ray cluster at {self.node}"

    def check(self) -> None:
        """Raise ClusterGoneError if one of them has not answered for some seconds: Ray would soon end this process."""
        now, silent = time.monotonic(), self.find_silent()
        if silent is None:
            self._answered_at = now
        elif now - self._answered_at > _SILENT_SECONDS:
            raise ClusterGoneError(f"{silent} is gone")


@dataclass(eq=False)
class _Task:
    number: int
    argument: Any


@dataclass(frozen=True)
class _Death:
    reason: str


class ActorPool:
    """Actors that run tasks. As a context manager it starts them and ends them.

    Args:
        ray: The module, connected to a cluster.
        make_work: Called once in every actor when it starts; it and the tasks are sent by pickling.
        options: Number of actors, and what each needs.
    """

    def __init__(self, ray: Any, make_work: Callable[[], Work], options: ActorOptions) -> None:
        self._ray, self._options, self._watch = ray, options, ClusterWatch.of(ray)
        self._make_work = ray.put(make_work)
        needs = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
        # Two threads: one runs the task, the other tells its progress.
        self._actor_class = ray.remote(**needs, max_restarts=0, max_concurrency=2)(TaskActor)
        self._actors: set[Any] = set()
        self._free: deque[Any] = deque()
        self._running: dict[Any, tuple[Any, _Task | None]] = {}  # reference -> actor, its task (None: its start)
        self._asked: dict[Any, Any] = {}  # reference of the progress -> actor
        self._checked: dict[Any, Any] = {}  # the same of actors without a task, after another died
        self._failed_starts = 0
        self._polled_at = self._grown_at = float("-inf")

    def __enter__(self) -> "ActorPool":
        self._grow()
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()

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
            window: Tasks that may begin beyond the first that is not finished, or two for each actor if that is more;
                results then come in the order of the tasks. None for results in the order in which they are finished.

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
            ahead = None if window is None else ordered.next_index + max(window, 2 * len(self._actors))
            while self._free and following and (ahead is None or following.number < ahead):
                self._begin(following)
                following = next(numbered, None)
            for reference in self._wait(on_progress):
                actor, task = self._running.pop(reference)
                result = self._get(reference)
                if isinstance(result, _Death):
                    self._watch.check()
                    self._discard(actor, task, result.reason)
                    if task:
                        on_progress(task.argument, 0)
                        on_death(task.argument, result.reason)
                        again.append(task)
                    continue
                self._free.append(actor)
                if task is None:
                    self._failed_starts = 0
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
            self._actors.add(actor)
            self._running[actor.start.remote()] = actor, None

    def _wait(self, on_progress: Callable[[Any, int], None]) -> list[Any]:
        """Return references of tasks and starts that are finished; none if there is none within a second."""
        now = time.monotonic()
        if now - self._polled_at >= _POLL_SECONDS:
            self._polled_at = now
            self._watch.check()
            self._ask_progress()
        references = [*self._running, *self._asked, *self._checked]
        done, _ = self._ray.wait(references, num_returns=1, timeout=_POLL_SECONDS)
        for reference in done:
            if reference in self._asked:
                self._tell_progress(reference, on_progress)
            elif reference in self._checked:
                self._free_if_alive(self._checked.pop(reference), reference)
        return [reference for reference in done if reference in self._running]

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

    def _check_free(self) -> None:
        """Give no task to a free actor before it answers: what ended one actor may have ended it, too."""
        while self._free:
            actor = self._free.popleft()
            self._checked[actor.progress.remote()] = actor

    def _free_if_alive(self, actor: Any, reference: Any) -> None:
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError:
            self._actors.discard(actor)
            self._grown_at = float("-inf")
            self._ray.kill(actor)
        else:
            self._free.append(actor)

    def _get(self, reference: Any) -> Any:
        """Return the result of a task or start, or the death of its actor; raise the error that it returned."""
        errors = self._ray.exceptions
        try:
            result = self._ray.get(reference)
        except errors.RaySystemError as error:
            raise ClusterGoneError(f"the Ray cluster at {self._watch.head} is gone: {first_line(error)}") from None
        except (errors.RayActorError, errors.OutOfMemoryError) as error:
            return _Death(_describe_death(error))
        if isinstance(result, MemoryError):  # what it holds may be in no good state: begin with a new process
            return _Death(f"it ran out of memory: {first_line(result)}" if str(result) else "it ran out of memory")
        if isinstance(result, InputError | OSError):
            raise result
        return result

    def _discard(self, actor: Any, task: _Task | None, reason: str) -> None:
        self._actors.discard(actor)
        self._grown_at = float("-inf")
        self._ray.kill(actor)  # if it only could not be reached
        self._check_free()
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
