"""Graph of a module's forward, from symbolic tracing or, if that fails, from torch.export."""

import inspect
import io
import linecache
import logging
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
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


def trace_module(module: nn.Module, inputs: ModuleInputs, at: Sequence[str]) -> TracedModule:
    """Return the graph of a module's forward: traced symbolically if that reproduces its outputs, or else exported.

    Symbolic tracing enters PyTorch's modules that contain one of the submodules `at`.
    """
    with _without_cache(module):
        return _trace_or_export(module, inputs, at)


def _trace_or_export(module: nn.Module, inputs: ModuleInputs, at: Sequence[str]) -> TracedModule:
    two = inputs.with_batch_size(PROBE_BATCH_SIZES[0])
    expected = list(iter_tensors(call_with_inputs(module, two)))
    try:
        with _restoring_attributes(module):
            traced = _trace_symbolically(module, inputs, at)
        outputs = list(iter_tensors(run_graph(traced.module, traced.select_inputs(two))))
        if any(tensor.is_meta for tensor in expected):  # without values to compare
            return traced
        if len(outputs) == len(expected) and all(map(bitwise_equal, outputs, expected)):
            return traced
        tracing_failure = "an operation that it cannot record"
    except InputError:
        raise
    except Exception as error:
        tracing_failure = _describe_failure(error)
    try:
        with _restoring_attributes(module):
            return _export_module(module, two)
    except Exception as error:
        export_failure = first_line(error)
    raise InputError(
        f"the module's forward cannot be cut: symbolic tracing stopped at {tracing_failure}, "
        f"and torch.export failed with: {export_failure}; {BUILD_STAGES_HINT}"
    )


@contextmanager
def _restoring_attributes(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all submodules: a forward that stores values in them would store symbols."""
    attributes = [vars(part) for part in module.modules()]
    nested = [value for part in attributes for value in part.values() if isinstance(value, dict | list)]
    saved = [(container, container.copy()) for container in (*attributes, *nested)]
    try:
        yield
    finally:
        for container, before in saved:
            container.clear()
            container.update(before) if isinstance(container, dict) else container.extend(before)


class _InPlaceProxy(fx.Proxy):
    """Symbol that records in-place operations as such."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _make_in_place_method(operation: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(_InPlaceProxy, f"__i{_name}__", _make_in_place_method(getattr(operator, f"i{_name}")))


class _Tracer(fx.Tracer):
    """Tracer that enters every module that is not PyTorch's own, and records the outputs of all of them."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: ModuleInputs, at: Sequence[str]) -> None:
        super().__init__()
        self.outputs: dict[str, list[Any]] = {}
        self._inputs, self._at = inputs, at

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        values = {
            name: self.create_proxy("placeholder", name, (), {}) if isinstance(value, Tensor) else value
            for name, value in self._inputs.by_parameter(self.root).items()
        }
        args = list(values.values())[: len(self._inputs.args)]
        kwargs = {name: values[name] for name in self._inputs.kwargs}
        return (lambda: root_fn(self.root, *args, **kwargs)), []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _InPlaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) and not self._contains_cut(module_qualified_name)

    def _contains_cut(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name in self._at)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(m)
        if isinstance(m, nn.TransformerEncoder) and self._contains_cut(path):
            forward = _make_traceable_forward(m)
        output = super().call_module(m, forward, args, kwargs)
        self.outputs.setdefault(path, []).append(trees.tree_map(_to_node, output))
        return output


def _make_traceable_forward(encoder: nn.TransformerEncoder) -> Callable[..., Any]:
    """Return an encoder's forward without branches on the values of a mask, which symbols do not have."""

    def forward(src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None) -> Any:
        if mask is not None and is_causal is None:
            raise InputError("nn.TransformerEncoder can be cut inside only if `is_causal` is passed with its mask")
        if src_key_padding_mask is not None and encoder.use_nested_tensor:
            raise InputError("nn.TransformerEncoder can be cut inside only if built with enable_nested_tensor=False")
        masks = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": bool(is_causal)}
        for layer in encoder.layers:
            src = layer(src, **masks)
        return src if encoder.norm is None else encoder.norm(src)

    return forward


def _to_node(value: Any) -> Any:
    return value.node if isinstance(value, fx.Proxy) else value


def _trace_symbolically(module: nn.Module, inputs: ModuleInputs, at: Sequence[str]) -> TracedModule:
    tracer = _Tracer(inputs, at)
    graph = tracer.trace(module)
    names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return TracedModule(fx.GraphModule(module, graph), tracer.outputs, names)


def _export_module(module: nn.Module, two: ModuleInputs) -> TracedModule:
    """Return the graph of torch.export, for batches of any size."""
    batch = torch.export.Dim("batch", min=1)
    bound = inspect.signature(module.forward).bind(*two.args, **two.kwargs)
    shapes = trees.tree_map(lambda value: {0: batch} if isinstance(value, Tensor) else None, dict(bound.arguments))
    submodules = _find_preservable(module, two)
    with _silence_output():
        program = torch.export.export(
            module,
            two.args,
            dict(two.kwargs),
            dynamic_shapes=shapes,
            strict=False,
            preserve_module_call_signature=submodules,
        )
        graph_module = program.module()
    graph = graph_module.graph
    graph.set_codegen(fx.graph.CodeGen())
    nodes = {node.name: node for node in graph.nodes}
    outputs: dict[str, list[Any]] = {}
    for entry in program.module_call_graph:
        if entry.fqn and entry.signature is not None:
            output_nodes = [nodes.get(getattr(output, "name", "")) for output in entry.signature.outputs]
            nested_nodes = trees.tree_unflatten(output_nodes, entry.signature.out_spec)
            outputs.setdefault(entry.fqn.partition("@")[0], []).append(nested_nodes)
    _generalize_graph(graph, (*two.args, *two.kwargs.values()))
    output = next(node for node in graph.nodes if node.op == "output")
    returned = trees.tree_unflatten(trees.tree_flatten(output.args[0])[0], program.call_spec.out_spec)
    names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return TracedModule(graph_module, outputs, names, exported=True, returned=returned)


def _find_preservable(module: nn.Module, inputs: ModuleInputs) -> tuple[str, ...]:
    """Return the submodules whose calls the exporter can record: those that take and give tensors and numbers."""
    refused: set[nn.Module] = set()

    def check(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves = trees.tree_leaves((args, kwargs, output))
        if not all(isinstance(leaf, Tensor | int | float | None) for leaf in leaves):
            refused.add(part)

    hooks = [part.register_forward_hook(check, with_kwargs=True) for name, part in module.named_modules() if name]
    try:
        call_with_inputs(module, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(name for name, part in module.named_modules() if name and part not in refused)


@contextmanager
def _without_cache(module: nn.Module) -> Iterator[None]:
    """Let a text model of transformers keep no keys and values for a next token, which a classifier does not have."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", None) is not True:
        yield
        return
    try:
        config.use_cache = False
        yield
    finally:
        config.use_cache = True


def _generalize_graph(graph: fx.Graph, values: Sequence[Any]) -> None:
    """Remove input checks and inputs that are not tensors, and replace fixed devices by that of the inputs."""
    checks = (torch.ops.aten._assert_tensor_metadata.default,)
    for node in list(graph.nodes):
        if not node.users and (node.op == "call_module" or node.target in checks):
            graph.erase_node(node)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    tensors = [node for node, value in zip(inputs, values, strict=True) if isinstance(value, Tensor)]
    with graph.inserting_after(inputs[-1]):
        device = graph.call_function(getattr, (tensors[0], "device"))
    for node in set(inputs) - set(tensors):
        graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and node is not device:
            node.args, node.kwargs = trees.tree_map(
                lambda value: device if isinstance(value, torch.device) else value, (node.args, dict(node.kwargs))
            )


@contextmanager
def _silence_output() -> Iterator[None]:
    """Suppress logs, warnings and prints of the exporter: they repeat its errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


def _describe_failure(error: Exception) -> str:
    """Return the line of the user's code at which tracing stopped, and the error's message."""
    library_folders = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))
    user_line, step = None, error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith((*library_folders, "<")):
            user_line = (file, step.tb_lineno)
        step = step.tb_next
    if user_line is None:
        return first_line(error)
    file, number = user_line
    return f"`{linecache.getline(file, number).strip()}` ({Path(file).name}, line {number}): {first_line(error)}"


@contextmanager
def disable_attention_fast_path() -> Iterator[None]:
    """Compute attention by the operations that an exported graph has."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
