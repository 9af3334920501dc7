"""Queues of samples that wait for a stage: requests are split into samples, and samples of requests are batched."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeVar

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, ExitPrediction
from exitwise.policies.policy import Policy, mixed_exit_mask
from exitwise.policies.scores import ScoreState
from exitwise.runtime.engine import ActiveSamples, Backend, ExitedSamples, ExitRule

State = TypeVar("State")

_ROW_BITS = 20  # an id of a sample is the number of its ticket and, in these bits, its row
MAX_ROWS = 1 << _ROW_BITS


@dataclass(frozen=True, eq=False)
class ServedRows:
    """Answers to one request, a row per image in its order.

    Attributes:
        probs: Calibrated probabilities (n, c); undefined for rows with an error.
        exits: The exit (n,) that each image took, -1 for rows with an error.
        errors: Messages by row, for images that could not be classified.
        policy: Index of the policy in the family.
    """

    probs: Array
    exits: Array
    errors: dict[int, str]
    policy: int


class DeadlineError(InputError):
    """A request that could not be answered before its deadline, and was not computed any further."""


class Recorder:
    """Exit rule of a single image that runs to the last exit, and keeps the predictions of all exits.

    Args:
        policy: Any policy of the family; only its score is used, whose state other samples of the batch may need.

    Attributes:
        predictions: The predictions (1, c) by exit, complete when the request is answered.
    """

    def __init__(self, policy: Policy) -> None:
        never = (inf,) * (len(policy.thresholds) - 1)
        self._policy = replace(policy, thresholds=(*never, -inf))
        self.predictions: dict[int, ExitPrediction] = {}

    def exit_mask(self, exit: int, pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
        """Keep the prediction; return False (1,) except at the last exit, and the score state (1, m)."""
        variance = None if pred.variance is None else pred.variance.copy()
        self.predictions[exit] = ExitPrediction(pred.probs.copy(), variance=variance)
        return self._policy.exit_mask(exit, pred, state)


@dataclass(eq=False)
class Ticket:
    """A request in the scheduler: its future, its answers so far, its deadline, and the policy of its samples."""

    number: int
    size: int
    arrived: float
    deadline: float
    max_policy: int | None  # index that the request asked for at most
    recorder: Recorder | None = None  # decides in place of the policy if the request asked for all exits
    policy: int = -1  # index that it got when its first sample was started
    remaining: int = 0
    future: "Future[ServedRows]" = field(default_factory=Future)
    probs: Array | None = None
    exits: Array | None = None
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """True if it was answered, refused or cancelled."""
        return self.future.done()

    def ids(self) -> Array:
        """Return the ids (n,) of its samples."""
        return (np.int64(self.number) << _ROW_BITS) + np.arange(self.size)

    def add(self, rows: Array, probs: Array, exit: int) -> None:
        """Record the answers of some rows."""
        if self.probs is None or self.exits is None:
            self.probs = np.zeros((self.size, probs.shape[1]), dtype=np.float32)
            self.exits = np.full(self.size, -1, dtype=np.int64)
        self.probs[rows], self.exits[rows] = probs, exit
        self.remaining -= len(rows)

    def result(self, num_classes: int) -> ServedRows:
        """Return the answers when none remain."""
        probs = np.zeros((self.size, num_classes), dtype=np.float32) if self.probs is None else self.probs
        exits = np.full(self.size, -1, dtype=np.int64) if self.exits is None else self.exits
        return ServedRows(probs, exits, self.errors, self.policy)

    def resolve(self, result: ServedRows | Exception) -> None:
        """Set the result or the error, unless the caller has cancelled meanwhile."""
        try:
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)
        except InvalidStateError:
            pass


def split_ids(ids: Array) -> tuple[Array, Array]:
    """Return the ticket numbers (n,) and the rows (n,) of samples."""
    return ids >> _ROW_BITS, ids & (MAX_ROWS - 1)


class MixedPolicies:
    """Exit rule of a batch whose samples have different rules on the score of one family.

    Args:
        policies: Policies, and recorders of single samples.
        which: Index (n,) of the rule of each sample.
        recorded: Ids of the samples with recorders.
    """

    def __init__(self, policies: Sequence[ExitRule], which: Array, recorded: Sequence[int] = ()) -> None:
        self._policies, self._which, self._recorded = policies, which, recorded

    def take(self, rows: Array) -> "MixedPolicies":
        """Return the rule of some samples, by their positions."""
        return MixedPolicies(self._policies, self._which[rows])

    def counted(self, exited: ExitedSamples) -> Array:
        """Return the mask (n,) of the samples for metrics: finite, and not recorded, as these exit nowhere else."""
        if not self._recorded:
            return ~exited.non_finite
        return ~exited.non_finite & ~np.isin(exited.ids, self._recorded)

    def exit_mask(self, exit: int, pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
        """Return the exit mask (n,) and the score state (n, m): of every sample as its own policy gives it."""
        indices: list[int] = sorted(set(self._which.tolist()))
        if len(indices) == 1:
            return self._policies[indices[0]].exit_mask(exit, pred, state)
        rules = [self._policies[index] for index in indices]
        places = np.searchsorted(indices, self._which)
        policies = [rule for rule in rules if isinstance(rule, Policy)]
        if len(policies) == len(rules) and all(each.score_model == policies[0].score_model for each in policies):
            return mixed_exit_mask(policies, places, exit, pred, state)
        return self._ask_each(rules, places, exit, pred, state)

    def _ask_each(
        self, rules: Sequence[ExitRule], places: Array, exit: int, pred: ExitPrediction, state: ScoreState
    ) -> tuple[Array, ScoreState]:
        """Return the exit mask (n,) and the score state (n, m), from each rule for its own samples."""
        mask: Array = np.ones(len(pred.probs), dtype=bool)
        next_state: ScoreState = None
        for index, rule in enumerate(rules):
            rows = np.flatnonzero(places == index)
            part = pred.take(rows)
            if pred.variance is not None:
                part = part.with_variance(pred.variance[rows])
            mask[rows], part_state = rule.exit_mask(exit, part, None if state is None else state[rows])
            if part_state is not None:
                if next_state is None:
                    next_state = np.zeros((len(mask), *part_state.shape[1:]), dtype=part_state.dtype)
                next_state[rows] = part_state
        return mask, next_state


class StageQueue(Generic[State]):
    """Samples that wait for one stage, first come first served, in chunks of a stage state."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[State, ActiveSamples, float]] = deque()
        self.length = 0

    @property
    def oldest(self) -> float:
        """Arrival time of the oldest request of the first chunk."""
        return self._chunks[0][2]

    def add(self, state: State, samples: ActiveSamples, arrived: float) -> None:
        """Append samples of requests of which the oldest arrived at `arrived`."""
        if len(samples):
            self._chunks.append((state, samples, arrived))
            self.length += len(samples)

    def take(
        self, backend: Backend[State], max_size: int, find_live: Callable[[Array], Array | None]
    ) -> tuple[State, ActiveSamples, float] | None:
        """Remove and return the first `max_size` samples that still count; None if there are none.

        Args:
            backend: Selects and joins samples of stage states.
            max_size: Size of a full batch.
            find_live: Returns the mask (n,) of the samples with these ids (n,) that are still to be computed; None if
                all of them are.
        """
        states, parts, arrivals, size = [], [], [], 0
        while self._chunks and size < max_size:
            state, samples, arrived = self._chunks.popleft()
            self.length -= len(samples)
            live = find_live(samples.ids)
            if live is not None:
                rows = np.flatnonzero(live)
                state, samples = backend.take(state, rows), samples.take(rows)
            if not len(samples):
                continue
            if size + len(samples) > max_size:
                first, rest = np.split(np.arange(len(samples)), [max_size - size])
                self._chunks.appendleft((backend.take(state, rest), samples.take(rest), arrived))
                self.length += len(rest)
                state, samples = backend.take(state, first), samples.take(first)
            states.append(state)
            parts.append(samples)
            arrivals.append(arrived)
            size += len(samples)
        if not parts:
            return None
        if len(parts) == 1:
            return states[0], parts[0], arrivals[0]
        return backend.join(states), ActiveSamples.join(parts), min(arrivals)
