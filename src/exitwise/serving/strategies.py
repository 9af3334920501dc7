"""Strategies that decide which stage a free compute thread runs next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QueueView:
    """State of the queue of one stage: its number, its waiting samples, and the arrival time of the oldest request."""

    stage: int
    length: int
    oldest: float


Strategy = Callable[[Sequence[QueueView], int], int]


def deepest_first(queues: Sequence[QueueView], max_batch: int) -> int:
    """Return the last stage in which samples wait: requests that were started are finished first."""
    del max_batch
    return max(queue.stage for queue in queues)


def oldest_first(queues: Sequence[QueueView], max_batch: int) -> int:
    """Return the stage in which the oldest request waits; of equally old ones, the deepest."""
    del max_batch
    return min(queues, key=lambda queue: (queue.oldest, -queue.stage)).stage


def fullest_first(queues: Sequence[QueueView], max_batch: int) -> int:
    """Return the stage with the largest batch; of equally large ones, the deepest."""
    return max(queues, key=lambda queue: (min(queue.length, max_batch), queue.stage)).stage


# A strategy gets the stages in which samples wait, of which there is at least one, and the largest batch.
STRATEGIES: Mapping[str, Strategy] = {
    "deepest": deepest_first,
    "oldest": oldest_first,
    "fullest": fullest_first,
}
