"""Early-exit inference without torch: an ONNX bundle, run with onnxruntime and NumPy."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exitwise.core.checks import check_bool, check_integer
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError, first_line
from exitwise.core.predictions import Array, ExitPrediction, to_array
from exitwise.core.preprocessing import Preprocessing
from exitwise.policies.controller import BudgetController
from exitwise.policies.policy import Policy
from exitwise.runtime import engine
from exitwise.runtime.bundle import InputSpec, Manifest
from exitwise.runtime.engine import Answer, AnswerRules, Prediction
from exitwise.runtime.external_data import has_external_data

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

State = tuple[Array, ...]  # stage state: the inputs of the next graph in their order, the ensemble state last


class Session:
    """A bundle that `Classifier.export` wrote, checked and ready to run; several threads may share it.

    Images are normalized floats (n, ...) as the net takes them or, if the bundle has a preprocessing, bytes (uint8):
    RGB images (n, height, width, 3) of any size, one such image (height, width, 3), or (n, channels, height, width) of
    the net's own size. Bytes of another size are scaled and cropped as image files are, which needs Pillow. A net with
    other inputs takes these: several as a dict by name or a tuple in order.

    Args:
        path: The folder of the bundle.
        threads: Number of onnxruntime's threads per call; all cores by default.
        policy: Replaces the policy of the bundle, for another budget. Prediction sets and abstention of the bundle were
            fitted for its own policy: with other thresholds, predictions have neither.
        check_range: Refuse floats that are plainly not normalized, if the bundle has a preprocessing.
        memory_patterns: Let onnxruntime plan memory for every batch size and keep it. Without, a process with batches
            of many sizes needs less memory, which does not grow.

    Raises:
        InputError: If the bundle is incomplete, was changed after the export or cannot be run by onnxruntime.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        threads: int | None = None,
        policy: Policy | None = None,
        check_range: bool = True,
        memory_patterns: bool = True,
    ) -> None:
        if threads is not None:
            check_integer("threads", threads, minimum=1)
        self.check_range = check_bool("check_range", check_range)
        check_bool("memory_patterns", memory_patterns)
        folder = Path(path)
        self.manifest = Manifest.load(folder)
        self.policy = self._check_policy(policy) if policy is not None else self.manifest.policy
        former = self.manifest.policy
        same_exits = (self.policy.thresholds, self.policy.score) == (former.thresholds, former.score)
        self.sets = self.manifest.sets if same_exits else None
        self.abstention = self.manifest.abstention if same_exits else None
        self.costs = self.manifest.costs
        if policy is not None and policy.costs is not None:
            self.costs = Costs(policy.costs, policy.unit)
        elif self.policy.unit != self.costs.unit:
            raise InputError(f"`policy` is in {self.policy.unit}, but the bundle's costs are in {self.costs.unit}")
        # All files are checked before onnxruntime reads the first.
        graphs = [self.manifest.read_graph(folder, exit) for exit in range(len(self.manifest.graphs))]
        self._sessions = [
            inference_session(graph, threads, folder / info.file, memory_patterns)
            for graph, info in zip(graphs, self.manifest.graphs, strict=True)
        ]
        self._carried = [self.manifest.carried_outputs(exit) for exit in range(len(graphs))]
        for exit, (session, info) in enumerate(zip(self._sessions, self.manifest.graphs, strict=True)):
            inputs = {node.name: node.shape for node in session.get_inputs()}
            outputs = {node.name: node.shape for node in session.get_outputs()}
            input_types = {node.name: node.type for node in session.get_inputs()}
            if mismatch := self.manifest.graph_mismatch(exit, inputs, outputs, input_types):
                raise InputError(f"{folder / info.file} does not fit the manifest: {mismatch}")

    def _check_policy(self, policy: Policy) -> Policy:
        exported = self.manifest.policy
        if not isinstance(policy, Policy) or len(policy.thresholds) != len(exported.thresholds):
            expected = f"a Policy with {len(exported.thresholds)} thresholds"
            raise InputError(f"`policy` must be {expected}, but got {policy!r}")
        if (policy.score == "variance") != (exported.score == "variance"):
            raise InputError(
                f"`policy` is on {policy.score}, but the graphs were exported for {exported.score}: export again"
            )
        return policy

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the c classes; None if the bundle has none."""
        return self.manifest.classes

    @property
    def preprocessing(self) -> Preprocessing | None:
        """Normalization of bytes; None if the bundle has none."""
        return self.manifest.preprocessing

    def __call__(self, images: Any) -> Prediction:
        """Run images (n, ...), or one RGB image (height, width, 3), stage by stage until all samples have exited."""
        arrays = engine.classify(OnnxBackend(self), self.policy, images)
        sets, abstained = self._answer_rules().apply(arrays[0], arrays[2])
        return Prediction(*arrays, self.policy.unit, sets, abstained)

    def _answer_rules(self) -> AnswerRules:
        return AnswerRules(self.sets, self.abstention)

    def stream(
        self,
        images: Iterable[Any],
        batch_size: int = 64,
        window: int | None = None,
        pooled: bool = True,
        controller: BudgetController | None = None,
    ) -> Iterator[Answer]:
        """Yield an `Answer` for each image, in order; arguments as in `Classifier.stream`."""
        return engine.stream(
            OnnxBackend(self), self.policy, images, batch_size, window, pooled, controller, self._answer_rules()
        )

    def __repr__(self) -> str:
        return f"Session({len(self._sessions)} exits, {self.manifest.num_classes} classes, {self.manifest.method!r})"


class OnnxBackend:
    """Run the graphs of a session for the engine."""

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
        arrays = [self._crop_rgb(array) for array in self._split_inputs(images)]
        for spec, array in zip(self._manifest.inputs, arrays, strict=True):
            if array.ndim == 0 or array.shape[1:] != spec.shape:
                expected = ", ".join(map(str, spec.shape))
                also = ""
                if array.dtype != np.uint8 and self._has_rgb_shape(array):
                    also = f"; (height, width, 3) is for RGB bytes (uint8), but these are {array.dtype}"
                raise InputError(
                    f"`{_argument_name(spec)}` must have shape (n, {expected}), but have {array.shape}{also}"
                )
        if len({len(array) for array in arrays}) > 1:
            raise InputError(
                f"all inputs must have the same number of samples, but have {[len(array) for array in arrays]}"
            )
        return tuple(map(self._convert, self._manifest.inputs, arrays))

    def _split_inputs(self, images: Any) -> list[Array]:
        """Return the inputs of the first graph in order, given as one array, a dict or a sequence."""
        names = [spec.name for spec in self._manifest.inputs]
        if len(names) == 1 and isinstance(images, np.ndarray):
            images = [images]
        elif isinstance(images, Mapping) and set(images) == set(names):
            images = [images[name] for name in names]
        elif len(names) == 1:
            images = [images]
        if not isinstance(images, list | tuple) or len(images) != len(names):
            given = ", ".join(map(str, images)) if isinstance(images, Mapping) else type(images).__name__
            raise InputError(f"the bundle takes {', '.join(names)}, as a dict by name or in order, but got {given}")
        return [to_array(_argument_name(spec), part) for spec, part in zip(self._manifest.inputs, images, strict=True)]

    def _is_rgb(self, array: Array) -> bool:
        """Return whether an input holds RGB images as bytes that the preprocessing has to scale and crop."""
        return array.dtype == np.uint8 and self._has_rgb_shape(array)

    def _has_rgb_shape(self, array: Array) -> bool:
        """Return whether an input would be RGB images if it held bytes."""
        preprocessing, inputs = self._manifest.preprocessing, self._manifest.inputs
        if preprocessing is None or len(inputs) != 1 or inputs[0].dtype != "float32":
            return False
        return inputs[0].shape == preprocessing.shape and preprocessing.is_rgb(array.shape)

    def _crop_rgb(self, array: Array) -> Array:
        preprocessing = self._manifest.preprocessing
        return preprocessing.crop_rgb(array) if preprocessing is not None and self._is_rgb(array) else array

    def _convert(self, spec: InputSpec, array: Array) -> Array:
        """Convert an array to the type of its input: bytes by the preprocessing, other types only if it is safe."""
        name = _argument_name(spec)
        if spec.dtype == "float32" and array.dtype == np.uint8:
            if self._manifest.preprocessing is None:
                raise InputError("the bundle has no preprocessing that normalizes bytes: pass floats")
            return self._manifest.preprocessing.normalize(array)
        if spec.dtype == "float32" and not np.issubdtype(array.dtype, np.floating):
            raise InputError(f"`{name}` must be floats or bytes, but are {array.dtype}")
        if spec.dtype != "float32" and not np.can_cast(array.dtype, spec.dtype):
            raise InputError(f"`{name}` must be {spec.dtype}, but are {array.dtype}")
        self._check_range(spec, array)
        return np.ascontiguousarray(array, dtype=spec.dtype)

    def _check_range(self, spec: InputSpec, array: Array) -> None:
        """Raise InputError for floats that are plainly not normalized, unless the session takes them."""
        preprocessing = self._manifest.preprocessing
        is_float = spec.dtype == "float32" and np.issubdtype(array.dtype, np.floating)
        if preprocessing is not None and self._session.check_range and is_float:
            preprocessing.check_range(array)

    def stack(self, images: Sequence[Any]) -> Any:
        columns = zip(*map(self._split_image, images), strict=True)
        return {spec.name: np.stack(column) for spec, column in zip(self._manifest.inputs, columns, strict=True)}

    def _split_image(self, image: Any) -> list[Array]:
        """Return the inputs of one image, scaled and cropped if it is RGB."""
        return [self._crop_rgb(part)[0] if self._is_rgb(part) else part for part in self._split_inputs(image)]

    def describe(self, image: Any) -> str:
        arrays = self._split_inputs(image)
        if arrays[0].ndim == 3 and self._is_rgb(arrays[0]):
            return f"uint8 {self._manifest.inputs[0].shape}"  # as it will be when it is cropped
        for spec, array in zip(self._manifest.inputs, arrays, strict=True):
            if array.shape != spec.shape:
                raise InputError(f"an {spec.name} must have shape {spec.shape}, but has {array.shape}")
            self._convert(spec, array[None][:0])
            self._check_range(spec, array)
        return ", ".join(f"{array.dtype} {array.shape}" for array in arrays)

    def check(self, image: Any) -> None:
        self.start(self.stack([image]))  # enough: the graphs take only the shapes that `start` checks

    def run(self, exit: int, state: State) -> tuple[State, ExitPrediction]:
        session, graph = self._session._sessions[exit], self._manifest.graphs[exit]
        try:
            arrays = session.run(graph.outputs, dict(zip(graph.inputs, state, strict=True)))
        except Exception as error:  # onnxruntime's errors have no other common class
            raise InputError(f"{graph.file} cannot run on its inputs: {_describe_error(error)}") from None
        outputs = dict(zip(graph.outputs, arrays, strict=True))
        next_state = tuple(outputs[name] for name in self._session._carried[exit])
        return next_state, ExitPrediction(outputs["probs"], variance=outputs.get("variance"))

    def take(self, state: State, rows: Array) -> State:
        return tuple(array[rows] for array in state)

    def compact(self, state: State, exited: Array) -> tuple[State, Array]:
        """Compact in place: move trailing active rows into the gaps; no other code holds these arrays."""
        rows = np.arange(len(exited) - np.count_nonzero(exited))
        gaps = np.flatnonzero(exited[: len(rows)])
        rows[gaps] = len(rows) + np.flatnonzero(~exited[len(rows) :])
        for array in state:
            array[gaps] = array[rows[gaps]]
        return tuple(array[: len(rows)] for array in state), rows

    def join(self, states: Sequence[State]) -> State:
        return tuple(np.concatenate(arrays) for arrays in zip(*states, strict=True))

    def length(self, state: State) -> int:
        return len(state[0])


def _argument_name(spec: InputSpec) -> str:
    return "images" if spec.name == "image" else spec.name


def inference_session(
    graph: bytes, threads: int | None, path: Path, memory_patterns: bool = True
) -> "InferenceSession":
    """Load a graph into onnxruntime, to run on the CPU; errors name `path`.

    A graph with external data is refused: onnxruntime would read it from any file that the graph names.
    """
    try:
        external = has_external_data(graph)
    except InputError as error:
        raise InputError(f"{path} is not an ONNX graph: {error}") from None
    if external:
        raise InputError(
            f"{path} stores data in other files, which no checksum covers: export it without external data"
        )
    try:
        import onnxruntime
    except ImportError:
        raise InputError("running a bundle needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    # Each graph has its own threads, which must not occupy a core while another graph runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_mem_pattern = memory_patterns
    options.log_severity_level = 3
    # It moves zeros around a map into a maximum pool, which pads with minus infinity instead (onnxruntime 1.31).
    disabled = ["Pad_Fusion"]
    try:
        return onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
        )
    except Exception as error:  # onnxruntime's errors have no other common class
        reason = _describe_error(error)
        raise InputError(f"{path} cannot be run by onnxruntime {onnxruntime.__version__}: {reason}") from None


def _describe_error(error: Exception) -> str:
    """Return the first line of an error of onnxruntime without its code, source file and C++ signature."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (?:\S+:\d+ .*?\) )?", "", first_line(error))
