"""Write a classifier as an ONNX bundle: a graph per stage, with its calibrated exit, and a manifest."""

import copy
import hashlib
import io
import logging
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.ensembles import ENSEMBLES
from exitwise.core import nested
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError, net_input_errors
from exitwise.core.files import atomic_directory
from exitwise.core.preprocessing import Preprocessing
from exitwise.core.version import __version__
from exitwise.models.net import Head, MultiExitNet
from exitwise.policies.abstention import Abstention
from exitwise.policies.family import FamilyMember, PolicyFamily
from exitwise.policies.policy import Policy
from exitwise.policies.prediction_sets import PredictionSets
from exitwise.runtime import folding
from exitwise.runtime.bundle import (
    DRAWN,
    DTYPES,
    EXITS,
    MANIFEST,
    OPSET,
    PROBS,
    InputSpec,
    Manifest,
    StageGraphInfo,
    first_graph_inputs,
)
from exitwise.runtime.exit_modules import RuntimeExit


class Exportable(Protocol):
    """The parts of a `Classifier` that `export` needs."""

    net: MultiExitNet
    exits: nn.ModuleList
    calibration: Calibration
    policy: Policy
    classes: tuple[str, ...] | None
    preprocessing: Preprocessing | None
    sets: PredictionSets | None
    abstention: Abstention | None

    def costs_of(self, images: Any) -> Costs: ...


class StageGraph(nn.Module):
    """A stage with its exit that takes and returns flat tensors: the stage state, with the ensemble state last."""

    def __init__(
        self, stage: nn.Module, head: Head, exit: RuntimeExit, structure: Any, last: bool, state_output: str | None
    ) -> None:
        super().__init__()
        self.stage, self.head, self.exit = stage, head, exit
        self._structure, self._last, self._state_output = structure, last, state_output

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = iter(inputs)
        stage_output = self.stage(nested.replace_tensors(self._structure, tensors))
        output = self.exit(self.head.features(stage_output), next(tensors, None))
        outputs = [] if self._last else list(nested.iter_tensors(stage_output))
        outputs.append(output.probs)
        if output.variance is not None:
            outputs.append(output.variance)
        if self._state_output not in (None, PROBS) and output.ensemble_state is not None and not self._last:
            outputs.append(output.ensemble_state)
        return tuple(outputs)


def require_onnx() -> None:
    """Raise InputError if a package that an export needs is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"exporting needs {error.name}: pip install 'exitwise[onnx]'") from None


def export(
    classifier: Exportable,
    path: str | Path,
    example: Any = None,
    force: bool = False,
    family: PolicyFamily | Sequence[Policy] | None = None,
) -> None:
    """Write the bundle to a folder atomically.

    Args:
        classifier: The classifier to export.
        path: The folder to create.
        example: A batch of the net's input, a tensor (n, ...) or a dict or tuple of several. Needed only if neither
            the preprocessing nor the net's preset gives the shape of an image.
        force: Whether to replace an existing bundle.
        family: Policies for several budgets, from the cheapest to the most expensive, for a service.
    """
    require_onnx()
    if family is not None and not isinstance(family, PolicyFamily):
        family = PolicyFamily(tuple(map(FamilyMember.of, family)))
    if family is not None:
        family.check_fits(classifier.policy)
    batch = _make_example_batch(classifier, example)
    inputs = _describe_inputs(batch)
    with atomic_directory(path, force, MANIFEST, "a bundle") as folder:
        graphs = _write_graphs(classifier, batch, first_graph_inputs(inputs), folder)
        Manifest(
            graphs=graphs,
            memory=_ensemble_state_output(classifier),
            inputs=inputs,
            num_classes=classifier.net.num_classes,
            policy=classifier.policy,
            costs=classifier.costs_of(batch),
            classes=classifier.classes,
            preprocessing=classifier.preprocessing,
            method=classifier.calibration.method.name,
            versions={
                "exitwise": __version__,
                "torch": torch.__version__,
                "onnx": version("onnx"),
                "python": platform.python_version(),
            },
            sets=classifier.sets,
            abstention=classifier.abstention,
            family=family,
        ).save(folder)


class _LastExitOnly(nn.Module):
    """The net without early exits: all stages and the last exit."""

    def __init__(self, net: MultiExitNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        state: Any = image
        for stage in self.net.stages:
            state = stage(state)
        logits: Tensor = self.net.exits[-1](state)
        return logits.softmax(dim=1)


def export_last_exit(net: MultiExitNet, example: Tensor, file: Path) -> None:
    """Write the vanilla net without early exits as one graph, for comparison; `example` (n, ...) gives the shape."""
    module, images = _LastExitOnly(_prepare_net(net)), torch.zeros(3, *example.shape[1:])
    _write_graph(module, [images], file, ["image"], ["probs"], variadic=False)


def _make_example_batch(classifier: Exportable, example: Any) -> Any:
    """Return three equal samples: the exporter would take a batch size of one for a constant."""
    if example is None:
        if classifier.preprocessing is not None:
            shape: tuple[int, ...] = classifier.preprocessing.shape
        elif classifier.net.input_shape is not None:
            shape = classifier.net.input_shape
        else:
            raise InputError("exporting needs the shape of an image: give some images as `example`")
        return torch.zeros(3, *shape)
    min_dims = 1 if isinstance(example, Mapping | list | tuple) else 2
    tensors = list(nested.iter_tensors(example))
    if not tensors or not all(tensor.dim() >= min_dims and len(tensor) for tensor in tensors):
        raise InputError("`example` must be a tensor of some images (n, ...), or a dict or tuple of such tensors")
    nested.num_samples(example, "`example`")
    return nested.map_tensors(_repeat_first_sample, example)


def _repeat_first_sample(tensor: Tensor) -> Tensor:
    """Return the first sample three times, in a type that the first graph can take."""
    if tensor.is_floating_point():
        tensor = tensor.float()
    elif str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise InputError(f"`example` must hold {', '.join(DTYPES)}, but holds {tensor.dtype}")
    return tensor[:1].cpu().repeat(3, *(1 for _ in tensor.shape[1:]))


def _describe_inputs(batch: Any) -> tuple[InputSpec, ...]:
    """Return the inputs of the first graph, those of a tuple named by position.

    Values that are not tensors are no inputs: they become constants of the graph.
    """
    if isinstance(batch, Tensor):
        named = {"image" if batch.is_floating_point() else "input": batch}
    else:
        named = batch if isinstance(batch, dict) else {str(i): part for i, part in enumerate(batch)}
    tensors = {name: part for name, part in named.items() if isinstance(part, Tensor)}
    if len(tensors) < len(list(nested.iter_tensors(batch))):
        raise InputError("`example` must hold tensors, not lists or dicts of them")
    return tuple(
        InputSpec(name, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )


def _ensemble_state_output(classifier: Exportable) -> str | None:
    """Return the name of the output that is the ensemble state; None without an ensemble."""
    name = classifier.calibration.method.ensemble
    if name is None:
        return None
    if classifier.policy.score == "variance":
        return DRAWN
    return PROBS if ENSEMBLES[name].carries_probs else EXITS


def _prepare_net(net: MultiExitNet) -> MultiExitNet:
    """Return a copy in float32 on the CPU, contiguous as ONNX requires, with BatchNorms folded for speed."""
    net_copy = copy.deepcopy(net).eval().float().cpu()
    folding.fold_batch_norms(net_copy)
    return net_copy.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload,no-any-return]


def _write_graphs(
    classifier: Exportable, batch: Any, first_inputs: Sequence[str], folder: Path
) -> tuple[StageGraphInfo, ...]:
    """Write a graph per stage, each traced with the stage state that the stages before give for `batch`."""
    net = _prepare_net(classifier.net)
    exits = [exit for exit in copy.deepcopy(classifier.exits).cpu() if isinstance(exit, RuntimeExit)]
    for exit in exits:
        exit.branchless = True
    stage_input: Any = batch
    ensemble_state: Tensor | None = None
    state_output = _ensemble_state_output(classifier)
    graphs = []
    for k, (stage, head, exit) in enumerate(zip(net.stages, net.exits, exits, strict=True)):
        last = k == len(exits) - 1
        graph = StageGraph(stage, head, exit, stage_input, last, state_output)
        tensors = list(nested.iter_tensors(stage_input))
        inputs = [f"state.{i}" for i, _ in enumerate(tensors)] if k else list(first_inputs)
        if ensemble_state is not None:
            tensors, inputs = [*tensors, ensemble_state], [*inputs, "memory"]
        with torch.no_grad(), net_input_errors(nested.describe(batch)):
            stage_input = stage(stage_input)
            output = exit(head.features(stage_input), ensemble_state)
        ensemble_state = output.ensemble_state
        outputs = [] if last else [f"next.{i}" for i, _ in enumerate(nested.iter_tensors(stage_input))]
        outputs.append("probs")
        if output.variance is not None:
            outputs.append("variance")
        if state_output not in (None, PROBS) and not last:
            outputs.append(state_output)
        file = folder / f"stage{k}.onnx"
        _write_graph(graph, tensors, file, inputs, outputs)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        graphs.append(StageGraphInfo(file.name, sha256, tuple(inputs), tuple(outputs)))
    return tuple(graphs)


def _write_graph(
    module: nn.Module,
    inputs: list[Tensor],
    file: Path,
    input_names: list[str],
    output_names: list[str],
    variadic: bool = True,
) -> None:
    """Export a module as a graph for batches of any size; `variadic` if its forward is `forward(*inputs)`."""
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    # Other kernels of attention give another memory layout than the operations that the exporter replaces them by.
    with _silence_exporter(), sdpa_kernel(SDPBackend.MATH), _ExportableOperations():
        torch.onnx.export(
            module.eval(),
            tuple(inputs),
            file,
            input_names=input_names,
            output_names=output_names,
            opset_version=OPSET,
            dynamic_shapes=(shapes,) if variadic else shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


class _ExportableOperations(TorchFunctionMode):
    """Replace operations that the exporter does not know by others with the same result."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _ATTENTION and len(args) >= 3 and args[0].dim() not in (2, 4):
            return _attend_in_four_dimensions(func, args, options)
        if func in _REVERSE_SUBTRACTION and isinstance(args[1], float) and not args[0].is_floating_point():
            return args[1] - args[0].to(torch.get_default_dtype())  # of an integer, as in 1.0 - attention_mask
        return func(*args, **options)


def _attend_in_four_dimensions(attention: Any, args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    """Compute attention without a dimension of heads, as in SAM, or with another one of windows, as in Twins."""
    leading = args[0].shape[:-3]

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 3:
            return value
        if not leading:
            return value.unsqueeze(1)
        return value if value.dim() == 3 else value.expand(*leading, *value.shape[-3:]).flatten(0, -4)

    options = {name: resize(value) for name, value in options.items()}
    attended: Tensor = attention(*map(resize, args), **options)
    return attended.squeeze(1) if not leading else attended.reshape(*leading, *attended.shape[1:])


_ATTENTION = (
    nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_REVERSE_SUBTRACTION = (Tensor.__rsub__, torch.rsub, torch.ops.aten.rsub.Scalar)


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Suppress warnings, logs and prints of torch's exporter that a user cannot act on."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
