"""Trace a module's forward: symbolically or, if that fails, with torch.export."""

import inspect
import io
import linecache
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as trees

from exitwise.core.errors import InputError, first_line
from exitwise.models.attach.graph import (
    BUILD_STAGES_HINT,
    PROBE_BATCH_SIZES,
    ModuleInputs,
    TracedModule,
    bitwise_equal,
    call_with_inputs,
    iter_tensors,
    run_graph,
)


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
            # Modules with two names may lack their outputs under one of them.
            is_complete = len(output_nodes) == entry.signature.out_spec.num_leaves
            nested_nodes = trees.tree_unflatten(output_nodes, entry.signature.out_spec) if is_complete else None
            outputs.setdefault(entry.fqn.partition("@")[0], []).append(nested_nodes)
    _generalize_graph(graph, (*two.args, *two.kwargs.values()))
    output = next(node for node in graph.nodes if node.op == "output")
    returned = trees.tree_unflatten(trees.tree_flatten(output.args[0])[0], program.call_spec.out_spec)
    names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return TracedModule(graph_module, outputs, names, exported=True, returned=returned)


def _find_preservable(module: nn.Module, two: ModuleInputs) -> tuple[str, ...]:
    """Return the submodules whose calls the exporter can record: of tensors, and numbers that no batch size changes."""
    numbers: dict[nn.Module, list[Any]] = {}
    refused: set[nn.Module] = set()

    def record(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves = trees.tree_leaves((args, kwargs, output))
        if not all(isinstance(leaf, Tensor | int | float | None) for leaf in leaves):
            refused.add(part)
        numbers.setdefault(part, []).extend(leaf for leaf in leaves if isinstance(leaf, int))

    hooks = [part.register_forward_hook(record, with_kwargs=True) for name, part in module.named_modules() if name]
    try:
        call_with_inputs(module, two)
        before = dict(numbers)
        if any(numbers.values()):
            numbers.clear()
            call_with_inputs(module, two.with_batch_size(PROBE_BATCH_SIZES[1]))
    finally:
        for hook in hooks:
            hook.remove()
    refused |= {part for part, values in before.items() if values != numbers[part]}
    return tuple(name for name, part in module.named_modules() if name and part not in refused)


@contextmanager
def _without_cache(module: nn.Module) -> Iterator[None]:
    """Let a text model of transformers keep no keys and values for a next token, which a classifier does not have."""
    config: Any = getattr(module, "config", None)
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
