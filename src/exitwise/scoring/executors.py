"""Interface between a job and what runs its shards: processes of this machine, or a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from exitwise.scoring.job import Job
from exitwise.scoring.shard_scorer import ShardReport


@dataclass(frozen=True)
class ShardProgress:
    """Number of images of a shard that its worker has read so far; 0 if the worker died and the shard begins anew."""

    shard: int
    images: int


Event = ShardProgress | ShardReport


class Executor(Protocol):
    """Runs the shards of a job. As a context manager it starts its workers, and ends them in any case.

    Workers begin to load the bundle in `__enter__`, while the source is listed.
    """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, job: Job, shards: Sequence[int], on_event: Callable[[Event], None]) -> None:
        """Score every shard; call `on_event` in this thread with their progress and, once each, their reports.

        A shard whose worker died is given to another. The state that finds images which end their process is kept by
        `ShardScorer.score`; an executor counts the deaths with a `DeathCounter`.

        Raises:
            InputError: If a worker cannot work, such as for another bundle or a full disk, or if workers died again and
                again on one shard. What is committed stays.
        """
        ...
