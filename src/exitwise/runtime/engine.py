"""How samples leave: the loop over exits, for one batch and for a stream, whoever computes. NumPy alone.

What computes is a backend: torch (`torch_backend.py`) or onnxruntime (`onnx.py`). It knows how to run a stage with its
calibrated exit on a state, and how to take some samples of a state or join states; the state itself is its own affair.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, ExitPrediction
from exitwise.policies.controller import BudgetController
from exitwise.policies.policy import Policy
from exitwise.policies.scores import ScoreState

if TYPE_CHECKING:
    import pandas

State = TypeVar("State")

_FULL = 64  # samples that a stream's deep stages wait for, unless its batches are larger
_WINDOW = 64  # times as many is how far its answers may fall behind, unless told otherwise


class Backend(Protocol[State]):
    """A net with calibrated exits, one stage at a time."""

    @property
    def num_exits(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def costs(self) -> Sequence[float]:
        """(K,) what leaving at each exit costs, known once a batch has been started."""
        ...

    def start(self, images: Any) -> State:
        """The state before the first stage, of images that are checked here."""
        ...

    def stack(self, images: Sequence[Any]) -> Any:
        """A batch for `start` of single images, which are all of one kind."""
        ...

    def describe(self, image: Any) -> str:
        """What images of a batch have in common, in words; an `InputError` if this is no image for the net."""
        ...

    def check(self, image: Any) -> None:
        """An `InputError` if the net cannot take an image of this kind: tried alone, so that it spoils no batch."""
        ...

    def run(self, exit: int, state: State) -> tuple[State, ExitPrediction]:
        """Stage and calibrated exit number `exit`: the next state, and what the exit says of every sample."""
        ...

    def take(self, state: State, rows: Array) -> State:
        """The samples of a state at some positions."""
        ...

    def compact(self, state: State, gone: Array) -> tuple[State, Array]:
        """The state without some of its samples, and where the others were in it: in whatever order is cheapest.

        The state itself is not needed any more.
        """
        ...

    def join(self, states: Sequence[State]) -> State:
        """Several states as one."""
        ...

    def length(self, state: State) -> int:
        """How many samples a state has."""
        ...


@dataclass(frozen=True, eq=False)
class ActiveSamples:
    """Who is in a state: their ids (n,), and what the policy's score remembers of each (n, m), if anything."""

    ids: Array
    memory: ScoreState = None

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Array) -> "ActiveSamples":
        return ActiveSamples(self.ids[rows], None if self.memory is None else self.memory[rows])

    @classmethod
    def join(cls, parts: "Sequence[ActiveSamples]") -> "ActiveSamples":
        memories = [part.memory for part in parts if part.memory is not None]
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate(memories) if memories else None)


@dataclass(frozen=True, eq=False)
class ExitedSamples:
    """Samples that have left at an exit: who, with what probabilities, and which of them made no sense."""

    ids: Array
    probs: Array
    exit: int
    broken: Array


def run_exit(
    backend: Backend[State], policy: Policy, exit: int, state: State, samples: ActiveSamples
) -> tuple[State, ActiveSamples, ExitedSamples]:
    """Run one exit, let samples go: the survivors' state and who they are, and who left.

    A sample whose probabilities are not finite leaves at once: no exit behind this one could make sense of it.
    """
    state, said = backend.run(exit, state)
    broken = np.asarray(~np.isfinite(said.probs).all(axis=1))
    gone, memory = policy.stops(exit, said, samples.memory)
    gone |= broken
    left = ExitedSamples(samples.ids[gone], said.probs[gone], exit, broken[gone])
    samples = ActiveSamples(samples.ids, memory)
    if gone.all():
        return state, samples.take(np.arange(0)), left
    if gone.any():
        state, rows = backend.compact(state, gone)
        samples = samples.take(rows)
    return state, samples, left


def classify(backend: Backend[State], policy: Policy, images: Any) -> tuple[Array, Array, Array, Array]:
    """Probabilities (n, c), predicted classes, exits and costs (n,) of a batch, in its order."""
    state = backend.start(images)
    samples = ActiveSamples(np.arange(backend.length(state)))
    probs = np.empty((len(samples), backend.num_classes), dtype=np.float32)
    exits = np.empty(len(samples), dtype=np.int64)
    for exit in range(backend.num_exits):
        if not len(samples):
            break
        state, samples, left = run_exit(backend, policy, exit, state, samples)
        if left.broken.any():
            raise InputError(f"image {left.ids[left.broken][0]}: {_broken(exit)}")
        probs[left.ids], exits[left.ids] = left.probs, exit
    return probs, probs.argmax(axis=1), exits, np.asarray(backend.costs)[exits]


def _broken(exit: int) -> str:
    return f"exit {exit} gives probabilities that are not finite"


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """What a net that stops early says of n images, in their order: tensors from torch, arrays from ONNX.

    probs (n, c), predicted (n,) the most probable class, exits (n,) where each left, costs (n,) what that cost.
    """

    probs: Any
    predicted: Any
    exits: Any
    costs: Any
    unit: str = "MACs"

    @property
    def labels(self) -> Any:
        """(n,) the same as `predicted`."""
        return self.predicted

    @property
    def cost(self) -> Any:
        """(n,) the same as `costs`; their mean is `mean_cost`."""
        return self.costs

    @property
    def mean_cost(self) -> float:
        """Of the n images, in `unit`; 0 where there are none."""
        return float(self.costs.mean()) if len(self) else 0.0

    def __len__(self) -> int:
        return len(self.probs)

    def __repr__(self) -> str:
        counts = np.bincount(np.asarray(self.exits, dtype=np.int64)) if len(self) else np.zeros(1, int)
        left = ", ".join(f"{count} at exit {k}" for k, count in enumerate(counts) if count)
        return f"Prediction({len(self)} images, mean cost {self.mean_cost:.4g} {self.unit}, left: {left or 'none'})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: nested lists in the place of arrays."""
        parts = {name: getattr(self, name).tolist() for name in ("probs", "predicted", "exits", "costs")}
        return {**parts, "unit": self.unit}

    def to_pandas(self) -> "pandas.DataFrame":
        """A row per image; needs pandas."""
        import pandas

        columns = {name: np.asarray(getattr(self, name)) for name in ("predicted", "exits", "costs")}
        confidence = np.asarray(self.probs).max(axis=1, initial=0)
        return pandas.DataFrame({"predicted": columns["predicted"], "confidence": confidence}).assign(
            exit=columns["exits"], cost=columns["costs"]
        )


@dataclass(frozen=True, eq=False)
class Answer:
    """What a stream says of one image: probabilities (c,) and the rest, or in their place an error."""

    index: int  # position in the stream
    probs: Array | None = None
    exit: int | None = None
    cost: float | None = None
    error: str | None = None

    @property
    def predicted(self) -> int | None:
        """The most probable class."""
        return None if self.probs is None else int(self.probs.argmax())

    @property
    def confidence(self) -> float | None:
        """Its probability."""
        return None if self.probs is None else float(self.probs.max())


class _PendingPool(Generic[State]):
    """Survivors of several batches that wait for a stage."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.samples: list[ActiveSamples] = []
        self.waiting = 0

    def add(self, state: State, samples: ActiveSamples) -> None:
        if len(samples):
            self.states.append(state)
            self.samples.append(samples)
            self.waiting += len(samples)

    def take(self, backend: Backend[State], most: int) -> tuple[State, ActiveSamples]:
        """The first of them as one batch. What is beyond stays, so that full batches are all of one size.

        Convolutions are prepared anew for every size of batch: on a CPU that costs more than many a stage.
        """
        state = backend.join(self.states) if len(self.states) > 1 else self.states[0]
        samples = ActiveSamples.join(self.samples)
        self.states, self.samples, self.waiting = [], [], 0
        if len(samples) > most:
            here, later = np.split(np.arange(len(samples)), [most])
            self.add(backend.take(state, later), samples.take(later))
            state, samples = backend.take(state, here), samples.take(here)
        return state, samples


class _ReorderBuffer:
    """Answers that come in any order, given out in that of the images."""

    def __init__(self) -> None:
        self._known: dict[int, Answer] = {}
        self._next = 0

    def add(self, answer: Answer) -> None:
        self._known[answer.index] = answer

    def ready(self) -> Iterator[Answer]:
        while self._next in self._known:
            yield self._known.pop(self._next)
            self._next += 1

    @property
    def next(self) -> int:
        return self._next


def stream(
    backend: Backend[State],
    policy: Policy,
    images: Iterable[Any],
    batch_size: int = 64,
    window: int | None = None,
    pooled: bool = True,
    controller: BudgetController | None = None,
) -> Iterator[Answer]:
    """Answers in the order of the images, which are taken one by one and run `batch_size` at a time.

    Survivors of a batch wait until `batch_size` of them, or 64 if that is more, have come together, so that deep stages
    run on full batches even when few samples come that far. Answers fall at most `window` images behind, which bounds
    the memory as well. An image that is an `InputError` (of whoever tried to read it), that is of the wrong kind or
    that the net cannot make sense of becomes an answer with that error. `pooled=False` runs every batch to its end.
    With a `controller` its policy takes the place of `policy`, batch by batch, and every batch runs to its end: what
    waits in a pool could not tell it what it costs.
    """
    for name, value in (("batch_size", batch_size), ("window", 1 if window is None else window)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"`{name}` must be a whole number of at least 1, but got {value!r}")
    window = window or _WINDOW * max(batch_size, _FULL)
    if controller is None:
        return _stream(backend, lambda: policy, images, batch_size, window, pooled)
    if not isinstance(controller, BudgetController):
        raise InputError(f"`controller` must be a BudgetController, but got {type(controller).__name__}")
    own = controller.base_policy
    if len(own.thresholds) != len(policy.thresholds) or own.score != policy.score or own.unit != policy.unit:
        raise InputError(
            f"`controller` must steer a policy of {len(policy.thresholds)} exits on {policy.score} in {policy.unit}, "
            f"as here, but its own has {len(own.thresholds)} on {own.score} in {own.unit}"
        )

    def tell(answers: list[Answer]) -> None:
        heard = [answer for answer in answers if answer.error is None]
        confidences = [answer.confidence for answer in heard] if own.score == "confidence" else None
        controller.update(np.array([answer.exit for answer in heard], dtype=np.int64), confidences)

    return _stream(backend, lambda: controller.policy, images, batch_size, window, pooled=False, tell=tell)


def _stream(
    backend: Backend[State],
    policy: Callable[[], Policy],
    images: Iterable[Any],
    batch_size: int,
    window: int,
    pooled: bool,
    tell: Callable[[list[Answer]], None] = lambda answers: None,
) -> Iterator[Answer]:
    """`policy` is asked before every stage; `tell` hears the answers before anyone else, as they become ready."""
    answers = _ReorderBuffer()
    full = max(batch_size, _FULL)  # in the pools
    batch: list[Any] = []
    batch_ids: list[int] = []
    pools: list[_PendingPool[State]] = [_PendingPool() for _ in range(backend.num_exits)]

    def run(exit: int) -> None:
        """A batch of those who wait for an exit."""
        advance(exit, *pools[exit].take(backend, full))

    def advance(exit: int, state: State, samples: ActiveSamples) -> None:
        """Through one stage; if the net cannot take them, one by one, so that nobody suffers for another."""
        try:
            state, samples, left = run_exit(backend, policy(), exit, state, samples)
        except InputError as error:
            if len(samples) == 1:
                answers.add(Answer(int(samples.ids[0]), exit=exit, cost=backend.costs[exit], error=str(error)))
                return
            for row in np.arange(len(samples))[:, None]:
                advance(exit, backend.take(state, row), samples.take(row))
            return
        for index, probs, broken in zip(left.ids.tolist(), left.probs, left.broken, strict=True):
            said = {"error": _broken(exit)} if broken else {"probs": probs}
            answers.add(Answer(index, exit=exit, cost=backend.costs[exit], **said))
        if len(samples):
            pools[exit + 1].add(state, samples)

    def run_all(at_least: int) -> None:
        """The batch that has come together, and every pool that holds so many."""
        if batch:
            pools[0].add(backend.start(backend.stack(batch)), ActiveSamples(np.array(batch_ids)))
            batch.clear()
            batch_ids.clear()
            run(0)
        for exit, pool in enumerate(pools):
            while pool.waiting >= at_least:
                run(exit)

    def ready() -> list[Answer]:
        found = list(answers.ready())
        if found:
            tell(found)
        return found

    kind = None
    for index, image in enumerate(images):
        try:
            kind = _same_kind(backend, image, kind)
        except InputError as error:
            answers.add(Answer(index, error=str(error)))
        else:
            batch.append(image)
            batch_ids.append(index)
        behind = index + 1 - answers.next >= window
        if behind or len(batch) == batch_size:
            run_all(1 if behind or not pooled else full)
        yield from ready()
    run_all(1)
    yield from ready()


def _same_kind(backend: Backend[State], image: Any, kind: str | None) -> str:
    """The kind of an image, which must be that of the first that the net can take."""
    if isinstance(image, InputError):
        raise image
    found = backend.describe(image)
    if kind is None:
        backend.check(image)
    elif found != kind:
        raise InputError(f"the images of a stream must all be {kind}, as the first is, but this is {found}")
    return found
