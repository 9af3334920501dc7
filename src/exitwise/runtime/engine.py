"""Early-exit inference loop for batches and streams, independent of the backend. NumPy only.

A backend computes: torch (`torch_backend.py`) or onnxruntime (`onnx.py`). It runs a stage with its calibrated exit on a
stage state, selects samples of a stage state and joins several. The engine never looks inside a stage state.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, ExitPrediction
from exitwise.core.reordering import ReorderBuffer
from exitwise.policies.abstention import Abstention
from exitwise.policies.controller import BudgetController
from exitwise.policies.policy import Policy
from exitwise.policies.prediction_sets import PredictionSets
from exitwise.policies.scores import ScoreState

if TYPE_CHECKING:
    import pandas

State = TypeVar("State")  # stage state: what the next stage takes, and the ensemble state

_MIN_POOL_SIZE = 64  # samples that the later stages of a stream wait for, or `batch_size` if that is more
_WINDOW_POOLS = 64  # the default `window` of a stream, in full pools


class Backend(Protocol[State]):
    """A net with calibrated exits, run one stage at a time."""

    @property
    def num_exits(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def costs(self) -> Sequence[float]:
        """Cumulative cost (K,) of each exit, available after the first `start`."""
        ...

    def start(self, images: Any) -> State:
        """Check a batch of images (n, ...) and return the stage state before the first stage."""
        ...

    def stack(self, images: Sequence[Any]) -> Any:
        """Stack single images with equal descriptions to a batch for `start`."""
        ...

    def describe(self, image: Any) -> str:
        """Return type and shape of an image as text, equal for all images of a batch.

        Raises `InputError` if it cannot be an image for the net.
        """
        ...

    def check(self, image: Any) -> None:
        """Raise `InputError` if the net cannot run on this image, in a batch of one so that no other image fails."""
        ...

    def run(self, exit: int, state: State) -> tuple[State, ExitPrediction]:
        """Run stage `exit` and its calibrated exit; return the next stage state and the predictions (n, c)."""
        ...

    def take(self, state: State, rows: Array) -> State:
        """Select samples of a stage state by their positions."""
        ...

    def compact(self, state: State, exited: Array) -> tuple[State, Array]:
        """Remove the samples of the mask `exited` (n,); return the new stage state and the old positions of its rows.

        The backend chooses the order of the rows and may overwrite `state`.
        """
        ...

    def join(self, states: Sequence[State]) -> State:
        """Concatenate stage states."""
        ...

    def length(self, state: State) -> int:
        """Return the number of samples in a stage state."""
        ...


@dataclass(frozen=True, eq=False)
class ActiveSamples:
    """Samples of a stage state: their ids (n,) and the policy's score state (n, m), None if its score has none."""

    ids: Array
    score_state: ScoreState = None

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Array) -> "ActiveSamples":
        return ActiveSamples(self.ids[rows], None if self.score_state is None else self.score_state[rows])

    @classmethod
    def join(cls, parts: "Sequence[ActiveSamples]") -> "ActiveSamples":
        score_states = [part.score_state for part in parts if part.score_state is not None]
        ids = np.concatenate([part.ids for part in parts])
        return cls(ids, np.concatenate(score_states) if score_states else None)


_NO_SAMPLES = ActiveSamples(np.arange(0))


@dataclass(frozen=True, eq=False)
class ExitedSamples:
    """Samples that exited at `exit`: ids (n,), probabilities (n, c), and the mask (n,) of non-finite probabilities."""

    ids: Array
    probs: Array
    exit: int
    non_finite: Array


class ExitRule(Protocol):
    """Decision where samples exit: a `Policy`, or several of them in one batch."""

    def exit_mask(self, exit: int, pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
        """Return the exit mask (n,) and the score state (n, m), as `Policy.exit_mask` does."""
        ...


def run_exit(
    backend: Backend[State], policy: ExitRule, exit: int, state: State, samples: ActiveSamples
) -> tuple[State, ActiveSamples, ExitedSamples]:
    """Run one stage and its exit; return the compacted stage state, the active samples and the exited samples.

    A sample with non-finite probabilities exits immediately: later exits could not recover.
    """
    state, pred = backend.run(exit, state)
    exits_here, score_state = policy.exit_mask(exit, pred, samples.score_state)
    non_finite: Array = np.zeros(len(samples), dtype=bool)
    if not np.isfinite(pred.probs.sum()):
        non_finite = np.asarray(~np.isfinite(pred.probs).all(axis=1))
        exits_here |= non_finite
    num_exits_here = np.count_nonzero(exits_here)
    if num_exits_here == len(samples):
        return state, _NO_SAMPLES, ExitedSamples(samples.ids, pred.probs, exit, non_finite)
    exited = ExitedSamples(samples.ids[exits_here], pred.probs[exits_here], exit, non_finite[exits_here])
    samples = ActiveSamples(samples.ids, score_state)
    if num_exits_here:
        state, rows = backend.compact(state, exits_here)
        samples = samples.take(rows)
    return state, samples, exited


def classify(backend: Backend[State], policy: Policy, images: Any) -> tuple[Array, Array, Array, Array]:
    """Return probabilities (n, c), predicted classes (n,), exits (n,) and costs (n,) of a batch, in its order."""
    state = backend.start(images)
    samples = ActiveSamples(np.arange(backend.length(state)))
    probs = np.empty((len(samples), backend.num_classes), dtype=np.float32)
    exits = np.empty(len(samples), dtype=np.int64)
    for exit in range(backend.num_exits):
        if not len(samples):
            break
        state, samples, exited = run_exit(backend, policy, exit, state, samples)
        if exited.non_finite.any():
            raise InputError(f"image {exited.ids[exited.non_finite][0]}: {_describe_non_finite(exit)}")
        probs[exited.ids], exits[exited.ids] = exited.probs, exit
    return probs, probs.argmax(axis=1), exits, np.asarray(backend.costs)[exits]


@dataclass(frozen=True)
class AnswerRules:
    """Prediction sets and abstention that are applied to predictions; None for what is not fitted."""

    sets: PredictionSets | None = None
    abstention: Abstention | None = None

    def apply(self, probs: Array, exits: Array) -> tuple[Array | None, Array | None]:
        """Return the sets (n, c) and whether the classifier abstains (n,), from probabilities (n, c) and exits (n,)."""
        masks = None if self.sets is None else self.sets.compute_masks(probs, exits)
        return masks, None if self.abstention is None else self.abstention.mask(probs, exits)


def _describe_non_finite(exit: int) -> str:
    return f"exit {exit} gives probabilities that are not finite"


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """Predictions of an early-exit net for n images, in their order: tensors from torch, arrays from ONNX.

    Attributes:
        probs: Calibrated probabilities (n, c) at the exit that each image took.
        predicted: The most probable class (n,).
        exits: The exit (n,) that each image took, from 0 to K - 1.
        costs: The cost (n,) of that exit, in `unit`.
        unit: The unit of `costs`, "MACs" or "ms".
        sets: Whether each class is in the prediction set of each image (n, c); None without fitted sets.
        abstained: Whether the classifier abstains from each image (n,); None without a fitted abstention.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> probs, predicted = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([0, 1])
        >>> ew.Prediction(probs, predicted, exits=np.array([0, 2]), costs=np.array([1, 3]))
        Prediction(2 images, mean cost 2 MACs, exited: 1 at exit 0, 1 at exit 2)
    """

    probs: Any
    predicted: Any
    exits: Any
    costs: Any
    unit: str = "MACs"
    sets: Any = None
    abstained: Any = None

    @property
    def labels(self) -> Any:
        """Predicted classes (n,). Deprecated: use `predicted`."""
        warnings.warn("Prediction.labels is deprecated: use Prediction.predicted", DeprecationWarning, stacklevel=2)
        return self.predicted

    @property
    def cost(self) -> Any:
        """Costs (n,). Deprecated: use `costs`, or `mean_cost` for their mean."""
        message = "Prediction.cost is deprecated: use Prediction.costs, or Prediction.mean_cost for their mean"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.costs

    @property
    def mean_cost(self) -> float:
        """Mean cost of the n images, in `unit`; 0 if there are none."""
        return float(self.costs.mean()) if len(self) else 0.0

    def __len__(self) -> int:
        return len(self.probs)

    def __repr__(self) -> str:
        counts = np.bincount(np.asarray(self.exits, dtype=np.int64)) if len(self) else np.zeros(1, int)
        exited = ", ".join(f"{count} at exit {k}" for k, count in enumerate(counts) if count)
        return f"Prediction({len(self)} images, mean cost {self.mean_cost:.4g} {self.unit}, exited: {exited or 'none'})"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, with nested lists in place of arrays."""
        arrays = {name: getattr(self, name).tolist() for name in ("probs", "predicted", "exits", "costs")}
        return {**arrays, "unit": self.unit, **self._extras()}

    def _extras(self) -> dict[str, Any]:
        """Return the sets as lists of classes, the most probable first, and abstentions, if there are any."""
        extras: dict[str, Any] = {}
        if self.sets is not None:
            rows = zip(np.asarray(self.sets), np.asarray(self.probs), strict=True)
            extras["sets"] = [list(set_classes(mask, probs)) for mask, probs in rows]
        if self.abstained is not None:
            extras["abstained"] = self.abstained.tolist()
        return extras

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame with a row per image: predicted, confidence, exit and cost. Needs pandas.

        Prediction sets and abstentions are the columns `sets` and `abstained`, if there are any.
        """
        import pandas

        return pandas.DataFrame(
            {
                "predicted": np.asarray(self.predicted),
                "confidence": np.asarray(self.probs).max(axis=1, initial=0),
                "exit": np.asarray(self.exits),
                "cost": np.asarray(self.costs),
                **self._extras(),
            }
        )


def set_classes(mask: Array, probs: Array) -> tuple[int, ...]:
    """Return the classes of one prediction set, the most probable first, from its mask (c,) and probabilities (c,)."""
    classes = np.flatnonzero(mask)
    return tuple(classes[np.argsort(-probs[classes], kind="stable")].tolist())


@dataclass(frozen=True, eq=False)
class Answer:
    """Prediction of a stream for one image, or the error that prevented it.

    Attributes:
        index: Position of the image in the stream.
        probs: Calibrated probabilities (c,), None if there is an error.
        exit: The exit that the image took, or at which it failed; None if it was refused before the first stage.
        cost: The cost of that exit, None if `exit` is None.
        error: One line that describes why the image has no prediction, None if it has one.
        set: Classes of the prediction set, the most probable first; None without fitted sets.
        abstained: Whether the classifier abstains; None without a fitted abstention.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> answer = ew.Answer(7, np.array([0.25, 0.75]), exit=1, cost=2.0)
        >>> answer.predicted, answer.confidence, answer.error
        (1, 0.75, None)
    """

    index: int
    probs: Array | None = None
    exit: int | None = None
    cost: float | None = None
    error: str | None = None
    set: tuple[int, ...] | None = None
    abstained: bool | None = None

    @property
    def predicted(self) -> int | None:
        """The most probable class, None if there is an error."""
        return None if self.probs is None else int(self.probs.argmax())

    @property
    def confidence(self) -> float | None:
        """The probability of the predicted class, None if there is an error."""
        return None if self.probs is None else float(self.probs.max())


class _PendingPool(Generic[State]):
    """Active samples of several batches that wait for a stage."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.samples: list[ActiveSamples] = []
        self.waiting = 0

    def add(self, state: State, samples: ActiveSamples) -> None:
        if len(samples):
            self.states.append(state)
            self.samples.append(samples)
            self.waiting += len(samples)

    def take(self, backend: Backend[State], max_size: int) -> tuple[State, ActiveSamples]:
        """Remove the first `max_size` samples and return them as one batch.

        The rest stays, so that all full batches have one size. Convolutions are prepared again for every new batch
        size, which on a CPU takes longer than many stages.
        """
        state = backend.join(self.states) if len(self.states) > 1 else self.states[0]
        samples = ActiveSamples.join(self.samples)
        self.states, self.samples, self.waiting = [], [], 0
        if len(samples) > max_size:
            first, rest = np.split(np.arange(len(samples)), [max_size])
            self.add(backend.take(state, rest), samples.take(rest))
            state, samples = backend.take(state, first), samples.take(first)
        return state, samples


def stream(
    backend: Backend[State],
    policy: Policy,
    images: Iterable[Any],
    batch_size: int = 64,
    window: int | None = None,
    pooled: bool = True,
    controller: BudgetController | None = None,
    rules: AnswerRules | None = None,
) -> Iterator[Answer]:
    """Yield an answer per image, in order; images are read one by one and run in batches of `batch_size`.

    Active samples wait until a later stage has a full batch of `max(batch_size, 64)`, so that later stages run
    efficiently even if few samples reach them. Answers are at most `window` images behind, which also bounds the
    memory. An image that is an `InputError` (a reader passes its errors this way), that differs in type or shape, or
    for which the net fails becomes an answer with an `error`.

    Args:
        backend: Runs the stages.
        policy: Decides where samples exit.
        images: Single images, or an `InputError` in place of one.
        batch_size: Images per batch of the first stage.
        window: Maximum number of images that are read but not answered; 64 full batches by default.
        pooled: Whether later stages wait for full batches; otherwise every batch runs to its end.
        controller: Replaces `policy` with its own before every stage, and learns the costs of the answers. Every
            batch then runs to its end, because the controller must know the cost of all earlier batches.
        rules: Prediction sets and abstention of the answers.
    """
    check_integer("batch_size", batch_size, minimum=1)
    rules = rules or AnswerRules()
    pool_size = max(batch_size, _MIN_POOL_SIZE)
    window = _WINDOW_POOLS * pool_size if window is None else check_integer("window", window, minimum=1)
    if controller is None:
        return _stream(backend, lambda: policy, images, batch_size, window, pooled, rules)
    if not isinstance(controller, BudgetController):
        raise InputError(f"`controller` must be a BudgetController, but got {type(controller).__name__}")
    base = controller.base_policy
    if len(base.thresholds) != len(policy.thresholds) or base.score != policy.score or base.unit != policy.unit:
        raise InputError(
            f"`controller` must control a policy of {len(policy.thresholds)} exits on {policy.score} in {policy.unit}, "
            f"but its policy has {len(base.thresholds)} exits on {base.score} in {base.unit}"
        )

    def update_controller(answers: list[Answer]) -> None:
        classified = [answer for answer in answers if answer.error is None]
        confidences = [answer.confidence for answer in classified] if base.score == "confidence" else None
        controller.update(np.array([answer.exit for answer in classified], dtype=np.int64), confidences)

    return _stream(
        backend, lambda: controller.policy, images, batch_size, window, False, rules, on_answers=update_controller
    )


def _stream(
    backend: Backend[State],
    policy: Callable[[], Policy],
    images: Iterable[Any],
    batch_size: int,
    window: int,
    pooled: bool,
    rules: AnswerRules,
    on_answers: Callable[[list[Answer]], None] = lambda answers: None,
) -> Iterator[Answer]:
    """Yield the answers of `stream`.

    `policy()` is called before every stage; `on_answers` is called with completed answers before they are yielded.
    """
    answers: ReorderBuffer[Answer] = ReorderBuffer()
    pool_size = max(batch_size, _MIN_POOL_SIZE)
    batch: list[Any] = []
    batch_ids: list[int] = []
    pools: list[_PendingPool[State]] = [_PendingPool() for _ in range(backend.num_exits)]

    def run_pool(exit: int) -> None:
        """Run a batch of the samples that wait for a stage."""
        advance(exit, *pools[exit].take(backend, pool_size))

    def advance(exit: int, state: State, samples: ActiveSamples) -> None:
        """Run one stage; if the batch fails, retry sample by sample to isolate the bad input."""
        try:
            state, samples, exited = run_exit(backend, policy(), exit, state, samples)
        except InputError as error:
            if len(samples) == 1:
                index = int(samples.ids[0])
                answers.add(index, Answer(index, exit=exit, cost=backend.costs[exit], error=str(error)))
                return
            for row in np.arange(len(samples))[:, None]:
                advance(exit, backend.take(state, row), samples.take(row))
            return
        masks, abstained = rules.apply(exited.probs, np.full(len(exited.ids), exit))
        for row, (index, probs, non_finite) in enumerate(
            zip(exited.ids.tolist(), exited.probs, exited.non_finite, strict=True)
        ):
            outcome: dict[str, Any] = {"error": _describe_non_finite(exit)}
            if not non_finite:
                outcome = {
                    "probs": probs,
                    "set": None if masks is None else set_classes(masks[row], probs),
                    "abstained": None if abstained is None else bool(abstained[row]),
                }
            answers.add(index, Answer(index, exit=exit, cost=backend.costs[exit], **outcome))
        if len(samples):
            pools[exit + 1].add(state, samples)

    def run_all(min_waiting: int) -> None:
        """Run the current batch, then every pool in which at least `min_waiting` samples wait."""
        if batch:
            pools[0].add(backend.start(backend.stack(batch)), ActiveSamples(np.array(batch_ids)))
            batch.clear()
            batch_ids.clear()
            run_pool(0)
        for exit, pool in enumerate(pools):
            while pool.waiting >= min_waiting:
                run_pool(exit)

    def pop_answers() -> list[Answer]:
        ready = answers.pop_ready()
        if ready:
            on_answers(ready)
        return ready

    description = None  # of the first image that the net can take
    for index, image in enumerate(images):
        try:
            description = _check_image(backend, image, description)
        except InputError as error:
            answers.add(index, Answer(index, error=str(error)))
        else:
            batch.append(image)
            batch_ids.append(index)
        window_full = index + 1 - answers.next_index >= window
        if window_full or len(batch) == batch_size:
            run_all(1 if window_full or not pooled else pool_size)
        yield from pop_answers()
    run_all(1)
    yield from pop_answers()


def _check_image(backend: Backend[State], image: Any, expected: str | None) -> str:
    """Return the description of an image, which must be `expected`; if that is None, the net must run on it."""
    if isinstance(image, InputError):
        raise image
    description = backend.describe(image)
    if expected is None:
        backend.check(image)
    elif description != expected:
        raise InputError(f"images of a stream must all be {expected} like the first, but this one is {description}")
    return description
