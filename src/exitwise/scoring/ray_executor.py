"""Workers of a job as actors on a Ray cluster. They score and commit shards as processes of one machine do.

A small scheduler of our own gives shards to actors, not Ray Data: Ray Data replaces actors that die for ever, so that a
job whose actors cannot live would never end (see docs/guides/scoring.md).
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError
from exitwise.core.ray_actors import ActorOptions, Work
from exitwise.core.ray_cluster import LOCAL, ClusterGoneError
from exitwise.core.ray_driver import DriverPool, RayDriver
from exitwise.scoring.attempts import DeathCounter
from exitwise.scoring.executors import Event, ShardProgress
from exitwise.scoring.job import Job
from exitwise.scoring.shard_scorer import LoadedBundle, ShardReport, ShardScorer


@dataclass(frozen=True)
class _MakeScorer:
    """Loads the bundle in an actor and returns the function that scores a shard (location of the job, number)."""

    bundle: str
    threads: int
    names_node: bool

    def __call__(self) -> Work:
        try:
            loaded = LoadedBundle(self.bundle, self.threads)
        except InputError as error:
            if not self.names_node:
                raise
            raise InputError(f"{error} (on node {socket.gethostname()})") from None
        scorers: dict[str, ShardScorer] = {}

        def score(task: tuple[str, int], report: Callable[[int], None]) -> ShardReport:
            location, shard = task
            if location not in scorers:
                scorers[location] = ShardScorer(location, loaded)  # checks the fingerprint of the bundle
            return scorers[location].score(shard, report)

        return score


class RayExecutor:
    """Runs shards in actors of a Ray cluster, each with a session of its own.

    Args:
        bundle: Folder of the bundle, which every node sees under this path.
        address: HOST:PORT of the head of the cluster, or "local" for one on this machine that ends with the job.
        workers: Number of actors [default: one for each of the cluster's CPUs, also of nodes that join later].
        threads: CPUs of each actor, and threads of onnxruntime in it.
    """

    def __init__(self, bundle: str | Path, address: str, workers: int | None = None, threads: int = 1) -> None:
        self._bundle, self._address = str(Path(bundle).absolute()), address
        self._workers = None if workers is None else check_integer("workers", workers, 1)
        self._threads = check_integer("threads", threads, 1)
        self._stack = ExitStack()
        self._pool: DriverPool | None = None

    def __enter__(self) -> Self:
        cpus = None if self._workers is None else self._workers * self._threads
        with ExitStack() as stack:
            driver = stack.enter_context(RayDriver(self._address, cpus))
            make_scorer = _MakeScorer(self._bundle, self._threads, self._address != LOCAL)
            options = ActorOptions(self._workers, num_cpus=self._threads)
            self._pool = stack.enter_context(DriverPool(driver, make_scorer, options))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool = None
        self._stack.__exit__(kind, error, trace)

    def run(self, job: Job, shards: Sequence[int], on_event: Callable[[Event], None]) -> None:
        """Score the shards; see `Executor.run`."""
        assert self._pool is not None
        counter = DeathCounter(job.storage, job.attempts_folder)

        def on_death(task: tuple[str, int], reason: str) -> None:
            if not counter.add(task[1]):
                raise InputError(
                    f"actors died again and again on shard {task[1]} ({reason}), and not for one image: if it is for "
                    f"lack of memory, use fewer --workers. What is scored stays; the same command resumes"
                )

        def on_progress(task: tuple[str, int], images: int) -> None:
            on_event(ShardProgress(task[1], images))

        tasks: list[Any] = [(job.location, shard) for shard in shards]
        try:
            for _, report in self._pool.run(tasks, on_death, on_progress):
                on_event(report)
        except ClusterGoneError as error:
            raise InputError(f"{error}. What is scored stays; the same command resumes") from None
