"""Writes a classifier as an ONNX bundle: a graph per stage, its calibrated exit inside, and a manifest."""

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

from exitwise.calibration.calibration import Calibration
from exitwise.core import nested
from exitwise.core.costs import Costs
from exitwise.core.errors import NET_ERRORS, InputError, first_line
from exitwise.core.files import atomic_directory
from exitwise.core.preprocessing import Preprocessing
from exitwise.core.version import __version__
from exitwise.models.net import Head, MultiExitNet
from exitwise.policies.policy import Policy
from exitwise.runtime import folding
from exitwise.runtime.bundle import DTYPES, MANIFEST, OPSET, InputSpec, Manifest, StageGraphInfo, first_graph_inputs
from exitwise.runtime.exit_modules import RuntimeExit


class Exportable(Protocol):
    """The parts of a `Classifier` that a bundle is made from."""

    net: MultiExitNet
    exits: nn.ModuleList
    calibration: Calibration
    policy: Policy
    classes: tuple[str, ...] | None
    preprocessing: Preprocessing | None

    def costs_of(self, images: Any) -> Costs: ...


class StageGraph(nn.Module):
    """A stage with its exit, from tensors to tensors: the flattened state, and the memory where there is one."""

    def __init__(self, stage: nn.Module, head: Head, exit: RuntimeExit, structure: Any, last: bool) -> None:
        super().__init__()
        self.stage, self.head, self.exit = stage, head, exit
        self._structure, self._last = structure, last

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        carried = iter(inputs)
        state = self.stage(nested.replace_tensors(self._structure, carried))
        said = self.exit(self.head.features(state), next(carried, None))
        found = [] if self._last else list(nested.iter_tensors(state))
        found.append(said.probs)
        if said.variance is not None:
            found.append(said.variance)
            found += [] if said.memory is None or self._last else [said.memory]
        return tuple(found)


def export(classifier: Exportable, path: str | Path, example: Any = None, force: bool = False) -> None:
    """Write the bundle to a new folder; whole or not at all.

    `example` is a batch of what it shall take, for a classifier that does not know that by its preprocessing or its
    net's preset: a tensor (n, ...), or a dict or tuple of several.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"exporting needs {error.name}: pip install 'exitwise[onnx]'") from None
    given = _example(classifier, example)
    inputs = _inputs(given)
    with atomic_directory(path, force, MANIFEST, "a bundle") as folder:
        graphs = _write_graphs(classifier, given, first_graph_inputs(inputs), folder)
        Manifest(
            graphs=graphs,
            memory=_memory(classifier),
            inputs=inputs,
            num_classes=classifier.net.num_classes,
            policy=classifier.policy,
            costs=classifier.costs_of(given),
            classes=classifier.classes,
            preprocessing=classifier.preprocessing,
            method=classifier.calibration.method.name,
            versions={
                "exitwise": __version__,
                "torch": torch.__version__,
                "onnx": version("onnx"),
                "python": platform.python_version(),
            },
        ).save(folder)


class _LastExitOnly(nn.Module):
    """The net to its last exit, with no look at the others."""

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
    """The plain net as one graph, to compare with."""
    _write(
        _LastExitOnly(_for_onnx(net)), [torch.zeros(3, *example.shape[1:])], file, ["image"], ["probs"], varying=False
    )


def _example(classifier: Exportable, example: Any) -> Any:
    """Three samples, all alike: a batch of one would be taken for a constant."""
    if example is None:
        if classifier.preprocessing is not None:
            shape: tuple[int, ...] = classifier.preprocessing.shape
        elif classifier.net.input_shape is not None:
            shape = classifier.net.input_shape
        else:
            raise InputError("exporting needs to know the shape of an image: give some images as `example`")
        return torch.zeros(3, *shape)
    several = isinstance(example, Mapping | list | tuple)
    parts = list(nested.iter_tensors(example))
    if not parts or not all(part.dim() > (not several) and len(part) for part in parts):
        raise InputError("`example` must be a tensor of some images (n, ...), or a dict or tuple of such tensors")
    nested.num_samples(example, "`example`")
    return nested.map_tensors(_three, example)


def _three(part: Tensor) -> Tensor:
    """The first sample three times, as the first graph takes it."""
    if part.is_floating_point():
        part = part.float()
    elif str(part.dtype).removeprefix("torch.") not in DTYPES:
        raise InputError(f"`example` must hold {', '.join(DTYPES)}, but holds {part.dtype}")
    return part[:1].cpu().repeat(3, *(1 for _ in part.shape[1:]))


def _inputs(given: Any) -> tuple[InputSpec, ...]:
    """What the first graph takes; what came in a row has its place as its name. Constants are the graph's."""
    if isinstance(given, Tensor):
        named = {"image" if given.is_floating_point() else "input": given}
    else:
        named = given if isinstance(given, dict) else {str(i): part for i, part in enumerate(given)}
    tensors = {name: part for name, part in named.items() if isinstance(part, Tensor)}
    if len(tensors) < len(list(nested.iter_tensors(given))):
        raise InputError("`example` must hold tensors, not lists or dicts of them")
    return tuple(
        InputSpec(name, tuple(part.shape[1:]), str(part.dtype).removeprefix("torch.")) for name, part in tensors.items()
    )


def _memory(classifier: Exportable) -> str | None:
    if classifier.calibration.weights is None:
        return None
    return "drawn" if classifier.policy.score == "variance" else "probs"


def _for_onnx(net: MultiExitNet) -> MultiExitNet:
    """A copy in float32 on the CPU, in memory as ONNX has it; folded, as fewer steps run faster there, too."""
    twin = copy.deepcopy(net).eval().float().cpu()
    folding.fold_batch_norms(twin)
    return twin.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload,no-any-return]


def _write_graphs(classifier: Exportable, given: Any, names: Sequence[str], folder: Path) -> tuple[StageGraphInfo, ...]:
    net = _for_onnx(classifier.net)
    exits = [exit for exit in copy.deepcopy(classifier.exits).cpu() if isinstance(exit, RuntimeExit)]
    for exit in exits:
        exit.branchless = True
    state: Any = given
    memory: Tensor | None = None
    graphs = []
    for k, (stage, head, exit) in enumerate(zip(net.stages, net.exits, exits, strict=True)):
        last = k == len(exits) - 1
        graph = StageGraph(stage, head, exit, state, last)
        carried = list(nested.iter_tensors(state))
        inputs = [f"state.{i}" for i, _ in enumerate(carried)] if k else list(names)
        if memory is not None:
            carried, inputs = [*carried, memory], [*inputs, "memory"]
        try:
            with torch.no_grad():
                state = stage(state)
                said = exit(head.features(state), memory)
        except NET_ERRORS as error:
            raise InputError(f"the net cannot take {nested.describe(given)}: {first_line(error)}") from None
        memory = said.memory
        outputs = [] if last else [f"next.{i}" for i, _ in enumerate(nested.iter_tensors(state))]
        outputs.append("probs")
        if said.variance is not None:
            outputs += ["variance"] if last or memory is None else ["variance", "drawn"]
        file = folder / f"stage{k}.onnx"
        _write(graph, carried, file, inputs, outputs)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        graphs.append(StageGraphInfo(file.name, sha256, tuple(inputs), tuple(outputs)))
    return tuple(graphs)


def _write(
    graph: nn.Module, inputs: list[Tensor], file: Path, names: list[str], outputs: list[str], varying: bool = True
) -> None:
    """One graph for batches of any size; `varying` says that its module takes any number of inputs."""
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    with _quiet():
        torch.onnx.export(
            graph.eval(),
            tuple(inputs),
            file,
            input_names=names,
            output_names=outputs,
            opset_version=OPSET,
            dynamic_shapes=(shapes,) if varying else shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns and prints about its own affairs."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
