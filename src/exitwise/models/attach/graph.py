"""Graph of a module's forward, the inputs of the module, and values in the graph."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as trees

from exitwise.core.errors import InputError, first_line, net_input_errors
from exitwise.core.nested import describe

PROBE_BATCH_SIZES = (2, 3)  # two sizes: dimensions that differ between them belong to samples
BUILD_STAGES_HINT = "build the stages by hand: exitwise.MultiExitNet(stages, heads)"


@dataclass(frozen=True)
class ModuleInputs:
    """Arguments of a module's forward, positional or by name: tensors, and constants among them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> "ModuleInputs":
        """Return the arguments for a tensor, a list or tuple (positional) or a mapping (by name)."""
        if isinstance(inputs, Mapping):
            return cls((), dict(inputs))
        return cls(tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), {})

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    @property
    def as_given(self) -> Any:
        """The argument of `of`: one value, a tuple or a dict."""
        return dict(self.kwargs) or (self.args[0] if len(self.args) == 1 else self.args)

    def by_parameter(self, module: nn.Module) -> dict[str, Any]:
        """Return all values by the names of the parameters of the module's forward."""
        parameters = inspect.signature(module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names += [f"input_{i}" for i in range(len(names), len(self.args))]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def with_batch_size(self, size: int) -> "ModuleInputs":
        """Return inputs with `size` distinct samples, so that shared values differ from values per sample."""
        rng = torch.Generator().manual_seed(0)

        def resize(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if len(value) >= size:
                return value[:size]
            first = value[0].flatten()
            indices = [_draw_indices(len(first), value.is_floating_point(), rng) for _ in range(size - len(value))]
            return torch.cat([value, *(first[index.to(first.device)].view_as(value[:1]) for index in indices)])

        return ModuleInputs(tuple(map(resize, self.args)), {name: resize(value) for name, value in self.kwargs.items()})


def _draw_indices(length: int, replace: bool, rng: torch.Generator) -> Tensor:
    """Draw indices (length,) that build a new sample from an existing one.

    They are drawn with replacement for floats, which gives the sample another mean, and are a permutation otherwise.
    """
    if replace:
        return torch.randint(length, (length,), generator=rng, device="cpu")
    return torch.randperm(length, generator=rng, device="cpu")


@dataclass(frozen=True, eq=False)
class TracedModule:
    """Graph of a module, and the outputs of each submodule, one per call."""

    module: fx.GraphModule
    outputs: Mapping[str, Sequence[Any]]
    names: tuple[str, ...]  # names of the inputs that are tensors
    exported: bool = False  # whether the graph consists of PyTorch's basic operations instead of the module's layers
    returned: Any = None  # structure of the output, of nodes; that of the graph if None

    def select_inputs(self, inputs: ModuleInputs) -> list[Tensor]:
        """Return the tensors that the graph takes, in its order."""
        return [inputs.kwargs[name] for name in self.names] if inputs.kwargs else inputs.tensors

    def returned_nodes(self) -> list[fx.Node]:
        """Return the nodes that the module returns, only that of `logits` if there is a part of this name."""
        output = next(node for node in self.module.graph.nodes if node.op == "output")
        value = output.args[0] if self.returned is None else self.returned
        if isinstance(value, fx.Node) and isinstance(value.target, type):  # fx records a dataclass as a call of it
            names = [field.name for field in fields(value.target)] if is_dataclass(value.target) else []
            value = {**dict(zip(names, value.args, strict=False)), **value.kwargs}
        elif is_dataclass(value) and not isinstance(value, type | Mapping):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping) and isinstance(value.get("logits"), fx.Node):
            return [value["logits"]]
        nodes = trees.tree_flatten(dict(value) if isinstance(value, Mapping) else value)[0]
        return list(dict.fromkeys(node for node in nodes if isinstance(node, fx.Node)))


class _Recorder(fx.Interpreter):
    """Interpreter that records copies of some nodes' values, as later operations may change them in place."""

    def __init__(self, module: fx.GraphModule, nodes: Collection[fx.Node]) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}
        self._nodes = nodes

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self._nodes:
            self.values[n] = trees.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, result)
        return result


def record_values(traced: TracedModule, inputs: ModuleInputs, nodes: Collection[fx.Node]) -> Mapping[fx.Node, Any]:
    """Run the graph and return the values of some nodes."""
    recorder = _Recorder(traced.module, nodes)
    try:
        recorder.run(*traced.select_inputs(inputs))
    except Exception as error:
        size = len(inputs.tensors[0])
        raise InputError(
            f"the traced graph cannot run on a batch of {size}: {first_line(error)}; {BUILD_STAGES_HINT}"
        ) from None
    return recorder.values


def call_with_inputs(module: nn.Module, inputs: ModuleInputs) -> Any:
    """Return the module's output; raise `InputError` if its forward raises anything."""
    with net_input_errors(", ".join(map(describe, inputs.tensors)), "the module", (Exception,)):
        return module(*inputs.args, **inputs.kwargs)


def run_graph(graph: fx.GraphModule, values: Sequence[Any]) -> Any:
    """Run a graph without the report that a GraphModule prints before it raises an error."""
    return nn.Module.__call__(graph, *values)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output: a tensor, or nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from iter_tensors([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from iter_tensors(part)


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal values, NaN at the same positions."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def is_close(values: Tensor, reference: Tensor) -> bool:
    """Return whether tensors agree up to rounding, relative to the largest finite value."""
    if values.shape != reference.shape:
        return False
    tolerance, finite = torch.finfo(values.dtype).eps ** 0.5, reference[reference.isfinite()].abs()
    atol = tolerance * float(finite.max()) if len(finite) else 0
    return torch.allclose(values, reference, rtol=tolerance, atol=atol, equal_nan=True)


@contextmanager
def disable_attention_fast_path() -> Iterator[None]:
    """Compute attention by the operations that an exported graph has."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
