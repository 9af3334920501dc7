"""The runtime without torch: an ONNX bundle, run by onnxruntime and NumPy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exitwise.core.errors import InputError, first_line
from exitwise.core.predictions import Array, ExitPrediction, to_array
from exitwise.core.preprocessing import Preprocessing
from exitwise.policies.controller import BudgetController
from exitwise.policies.policy import Policy
from exitwise.runtime import engine
from exitwise.runtime.bundle import InputSpec, Manifest
from exitwise.runtime.engine import Answer, Prediction

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

State = tuple[Array, ...]  # what the next graph takes, in the order of its inputs


class Session:
    """A bundle that `Classifier.export` wrote, checked and ready; several threads may share it.

    Images are float32 (n, ...) as the net takes them or, where the bundle knows its preprocessing, bytes
    (n, channels, height, width); a net with other inputs takes those, several by their names or in a row. `threads` are
    onnxruntime's for one call (all cores unless given). `policy` replaces the bundle's own, with thresholds for another
    budget.
    """

    def __init__(self, path: str | Path, *, threads: int | None = None, policy: Policy | None = None) -> None:
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise InputError(f"`threads` must be a whole number of at least 1, but got {threads!r}")
        folder = Path(path)
        self.manifest = Manifest.load(folder)
        self.policy = self._checked(policy) if policy is not None else self.manifest.policy
        self.costs = self.manifest.costs
        if policy is not None and policy.costs is not None:
            self.costs = type(self.costs)(policy.costs, policy.unit)
        elif self.policy.unit != self.costs.unit:
            raise InputError(f"`policy` is in {self.policy.unit}, but the bundle's costs are in {self.costs.unit}")
        graphs = [self.manifest.read_graph(folder, exit) for exit in range(len(self.manifest.graphs))]
        self._sessions = [
            inference_session(graph, threads, folder / about.file)
            for graph, about in zip(graphs, self.manifest.graphs, strict=True)
        ]
        for exit, (session, about) in enumerate(zip(self._sessions, self.manifest.graphs, strict=True)):
            given, made = ({each.name: each.shape for each in part} for part in _ends(session))
            types = {each.name: each.type for each in session.get_inputs()}
            if problem := self.manifest.graph_mismatch(exit, given, made, types):
                raise InputError(f"{folder / about.file} does not fit the manifest: {problem}")

    def _checked(self, policy: Policy) -> Policy:
        own = self.manifest.policy
        if not isinstance(policy, Policy) or len(policy.thresholds) != len(own.thresholds):
            raise InputError(f"`policy` must be a Policy with {len(own.thresholds)} thresholds, but got {policy!r}")
        if (policy.score == "variance") != (own.score == "variance"):
            raise InputError(
                f"`policy` is on {policy.score}, but the graphs were exported for {own.score}: export again"
            )
        return policy

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the c classes; None where the bundle has none."""
        return self.manifest.classes

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How bytes become what the net takes; None where the bundle does not say."""
        return self.manifest.preprocessing

    def __call__(self, images: Any) -> Prediction:
        """Run stage by stage, letting samples go, until nobody is left."""
        return Prediction(*engine.classify(OnnxBackend(self), self.policy, images), self.policy.unit)

    def stream(
        self,
        images: Iterable[Any],
        batch_size: int = 64,
        window: int | None = None,
        pooled: bool = True,
        controller: BudgetController | None = None,
    ) -> Iterator[Answer]:
        """Answers for single images, in their order, from any iterable; see `Classifier.stream`."""
        return engine.stream(OnnxBackend(self), self.policy, images, batch_size, window, pooled, controller)

    def __repr__(self) -> str:
        return f"Session({len(self._sessions)} exits, {self.manifest.num_classes} classes, {self.manifest.method!r})"


class OnnxBackend:
    """Runs a session's graphs, for the engine."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._manifest = session.manifest

    @property
    def num_exits(self) -> int:
        return len(self._manifest.graphs)

    @property
    def num_classes(self) -> int:
        return self._manifest.num_classes

    @property
    def costs(self) -> Sequence[float]:
        return self._session.costs.values

    def start(self, images: Any) -> State:
        arrays = self._parts(images)
        for each, array in zip(self._manifest.inputs, arrays, strict=True):
            if array.ndim == 0 or array.shape[1:] != each.shape:
                expected = ", ".join(map(str, each.shape))
                raise InputError(f"`{_plural(each)}` must have shape (n, {expected}), but have {array.shape}")
        if len({len(array) for array in arrays}) > 1:
            raise InputError(f"all inputs must have as many samples, but have {[len(array) for array in arrays]}")
        return tuple(map(self._ready, self._manifest.inputs, arrays))

    def _parts(self, images: Any) -> list[Array]:
        """What the first graph takes, in order: one array, or several by their names or in a row."""
        names = [each.name for each in self._manifest.inputs]
        if isinstance(images, Mapping) and set(images) == set(names):
            images = [images[name] for name in names]
        elif len(names) == 1:
            images = [images]
        if not isinstance(images, list | tuple) or len(images) != len(names):
            found = ", ".join(map(str, images)) if isinstance(images, Mapping) else type(images).__name__
            raise InputError(f"the bundle takes {', '.join(names)}, by name or in a row, but got {found}")
        return [to_array(_plural(each), part) for each, part in zip(self._manifest.inputs, images, strict=True)]

    def _ready(self, each: InputSpec, array: Array) -> Array:
        """In the input's own type, if that loses nothing that matters."""
        name = _plural(each)
        if each.dtype == "float32" and array.dtype == np.uint8:
            if self._manifest.preprocessing is None:
                raise InputError("the bundle does not say how bytes are normalised: give floats")
            return self._manifest.preprocessing.normalize(array)
        if each.dtype == "float32" and not np.issubdtype(array.dtype, np.floating):
            raise InputError(f"`{name}` must be floats or bytes, but are {array.dtype}")
        if each.dtype != "float32" and not np.can_cast(array.dtype, each.dtype):
            raise InputError(f"`{name}` must be {each.dtype}, but are {array.dtype}")
        return np.ascontiguousarray(array, dtype=each.dtype)

    def stack(self, images: Sequence[Any]) -> Any:
        rows = zip(*map(self._parts, images), strict=True)
        return {each.name: np.stack(row) for each, row in zip(self._manifest.inputs, rows, strict=True)}

    def describe(self, image: Any) -> str:
        found = self._parts(image)
        for each, array in zip(self._manifest.inputs, found, strict=True):
            if array.shape != each.shape:
                raise InputError(f"an {each.name} must have shape {each.shape}, but has {array.shape}")
            self._ready(each, array[None][:0])
        return ", ".join(f"{array.dtype} {array.shape}" for array in found)

    def check(self, image: Any) -> None:
        self.start(self.stack([image]))  # its graphs take one shape alone

    def run(self, exit: int, state: State) -> tuple[State, ExitPrediction]:
        session, graph = self._session._sessions[exit], self._manifest.graphs[exit]
        try:
            found = session.run(graph.outputs, dict(zip(graph.inputs, state, strict=True)))
        except Exception as error:  # onnxruntime's errors share no other class
            raise InputError(f"{graph.file} cannot take what it was given: {first_line(error)}") from None
        said = dict(zip(graph.outputs, found, strict=True))
        kept = tuple(said[name] for name in self._manifest.carried_outputs(exit))
        return kept, ExitPrediction.from_probs(said["probs"], said.get("variance"))

    def take(self, state: State, rows: Array) -> State:
        return tuple(array[rows] for array in state)

    def compact(self, state: State, gone: Array) -> tuple[State, Array]:
        """Survivors at the end fill the gaps before them: the arrays are ours alone, so nobody else has to move."""
        rows = np.arange(len(gone) - np.count_nonzero(gone))
        gaps = np.flatnonzero(gone[: len(rows)])
        rows[gaps] = len(rows) + np.flatnonzero(~gone[len(rows) :])
        for array in state:
            array[gaps] = array[rows[gaps]]
        return tuple(array[: len(rows)] for array in state), rows

    def join(self, states: Sequence[State]) -> State:
        return tuple(np.concatenate(arrays) for arrays in zip(*states, strict=True))

    def length(self, state: State) -> int:
        return len(state[0])


def _plural(each: InputSpec) -> str:
    return "images" if each.name == "image" else each.name


def _ends(session: "InferenceSession") -> tuple[Any, Any]:
    return session.get_inputs(), session.get_outputs()


def inference_session(graph: bytes, threads: int | None, path: Path) -> "InferenceSession":
    """A graph ready to run on the CPU; `path` is where it comes from."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError("running a bundle needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    # Each graph has threads of its own: those of the others must not burn a core while they wait for their turn.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no other class
        reason = first_line(error)
        raise InputError(f"{path} cannot be run by onnxruntime {onnxruntime.__version__}: {reason}") from None
