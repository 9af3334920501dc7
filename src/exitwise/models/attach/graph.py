"""A module's forward as a graph: by symbolic tracing or, where that cannot follow it, by torch.export."""

import inspect
import io
import linecache
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as trees

from exitwise.core.errors import InputError, first_line

PROBE_BATCH_SIZES = (2, 3)  # of the two batches that tell what belongs to samples
BUILD_STAGES_HINT = "build the stages by hand: exitwise.MultiExitNet(stages, heads)"


@dataclass(frozen=True)
class ModuleInputs:
    """What a module is called with: one tensor, several in a row, or several by name; with constants among them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, given: Any) -> "ModuleInputs":
        if isinstance(given, Mapping):
            return cls((), dict(given))
        return cls(tuple(given) if isinstance(given, list | tuple) else (given,), {})

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    @property
    def as_given(self) -> Any:
        """As it was given."""
        return dict(self.kwargs) or (self.args[0] if len(self.args) == 1 else self.args)

    def named(self, module: nn.Module) -> dict[str, Any]:
        """By the names that the module's forward has for them."""
        known = inspect.signature(module.forward).parameters.values()
        names = [each.name for each in known if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        names += [f"input_{i}" for i in range(len(names), len(self.args))]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def with_batch_size(self, size: int) -> "ModuleInputs":
        """So many samples of the same kind, no two alike: what a batch shares can be told from what samples have."""
        rng = torch.Generator().manual_seed(0)

        def rows(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if len(value) >= size:
                return value[:size]
            first = value[0].flatten()
            places = [_places(len(first), value.is_floating_point(), rng) for _ in range(size - len(value))]
            return torch.cat([value, *(first[each.to(first.device)].view_as(value[:1]) for each in places)])

        return ModuleInputs(tuple(map(rows, self.args)), {name: rows(value) for name, value in self.kwargs.items()})


def _places(length: int, free: bool, rng: torch.Generator) -> Tensor:
    """From where a sample has its values: some twice, where they are free, so that its mean is another; or all once."""
    if free:
        return torch.randint(length, (length,), generator=rng, device="cpu")
    return torch.randperm(length, generator=rng, device="cpu")


@dataclass(frozen=True, eq=False)
class TracedModule:
    """A module as a graph, and what each of its submodules gave, call by call."""

    module: fx.GraphModule
    outputs: Mapping[str, Sequence[Any]]
    names: tuple[str, ...]  # of the inputs that are tensors
    exported: bool = False  # in PyTorch's basic operations, not in the module's own layers

    def inputs(self, given: ModuleInputs) -> list[Tensor]:
        """What the graph takes."""
        return [given.kwargs[name] for name in self.names] if given.kwargs else given.tensors


def call_with_inputs(module: nn.Module, inputs: ModuleInputs) -> Any:
    """What the module gives, or why it cannot."""
    try:
        return module(*inputs.args, **inputs.kwargs)
    except Exception as error:
        kinds = [f"{str(v.dtype).removeprefix('torch.')} {tuple(v.shape)}" for v in inputs.tensors]
        raise InputError(f"the module cannot take inputs of {', '.join(kinds)}: {first_line(error)}") from None


def run_graph(graph: fx.GraphModule, values: Sequence[Any]) -> Any:
    """What a graph gives; without the report that it would print of an error before raising it."""
    return nn.Module.__call__(graph, *values)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of what a module gives: alone, or in lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from iter_tensors([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from iter_tensors(part)


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, numbers that are none at the same places."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def trace_module(module: nn.Module, inputs: ModuleInputs, at: Sequence[str]) -> TracedModule:
    """The graph of a module's forward, by the first way that can follow it."""
    two = inputs.with_batch_size(PROBE_BATCH_SIZES[0])
    made = list(iter_tensors(call_with_inputs(module, two)))
    try:
        with _restoring_attributes(module):
            traced = _symbolic(module, inputs, at)
        again = list(iter_tensors(run_graph(traced.module, traced.inputs(two))))
        if any(tensor.is_meta for tensor in made) or (len(made) == len(again) and all(map(bitwise_equal, made, again))):
            return traced
        first = "something that it does not see"
    except InputError:
        raise
    except Exception as error:
        first = _reason(error)
    try:
        with _restoring_attributes(module):
            return _exported(module, two)
    except Exception as error:
        second = first_line(error)
    raise InputError(
        f"the module's forward cannot be cut: symbolic tracing stopped at {first}, and torch.export says: {second}; "
        f"{BUILD_STAGES_HINT}"
    )


@contextmanager
def _restoring_attributes(module: nn.Module) -> Iterator[None]:
    """Put back what a forward keeps in its modules: while it is traced, that would be symbols."""
    own = [vars(part) for part in module.modules()]
    kept = [(each, each.copy()) for each in (*own, *(v for o in own for v in o.values() if isinstance(v, dict | list)))]
    try:
        yield
    finally:
        for each, before in kept:
            each.clear()
            each.update(before) if isinstance(each, dict) else each.extend(before)


class _Proxy(fx.Proxy):
    """A symbol that changes in place where the value would."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _in_place(operation: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(_Proxy, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))


class _Tracer(fx.Tracer):
    """Follows the forward into every module that is not PyTorch's own, and notes what each gives."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: ModuleInputs, inside: Sequence[str]) -> None:
        super().__init__()
        self.outputs: dict[str, list[Any]] = {}
        self._inputs, self._inside = inputs, inside

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        named = {
            name: self.create_proxy("placeholder", name, (), {}) if isinstance(value, Tensor) else value
            for name, value in self._inputs.named(self.root).items()
        }
        in_a_row = list(named.values())[: len(self._inputs.args)]
        by_name = {name: named[name] for name in self._inputs.kwargs}
        return (lambda: root_fn(self.root, *in_a_row, **by_name)), []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) and not self._entered(module_qualified_name)

    def _entered(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name in self._inside)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(m)
        if isinstance(m, nn.TransformerEncoder) and self._entered(path):
            forward = _layer_by_layer(m)
        made = super().call_module(m, forward, args, kwargs)
        self.outputs.setdefault(path, []).append(trees.tree_map(_node, made))
        return made


def _layer_by_layer(encoder: nn.TransformerEncoder) -> Callable[..., Any]:
    """An encoder's forward where it need not look into a mask, which no symbol could show."""

    def forward(src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None) -> Any:
        if mask is not None and is_causal is None:
            raise InputError("nn.TransformerEncoder can be cut inside only if `is_causal` tells it what its mask is")
        if src_key_padding_mask is not None and encoder.use_nested_tensor:
            raise InputError("nn.TransformerEncoder can be cut inside only if made with enable_nested_tensor=False")
        masks = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": bool(is_causal)}
        for layer in encoder.layers:
            src = layer(src, **masks)
        return src if encoder.norm is None else encoder.norm(src)

    return forward


def _node(value: Any) -> Any:
    return value.node if isinstance(value, fx.Proxy) else value


def _symbolic(module: nn.Module, inputs: ModuleInputs, at: Sequence[str]) -> TracedModule:
    tracer = _Tracer(inputs, at)
    graph = tracer.trace(module)
    names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return TracedModule(fx.GraphModule(module, graph), tracer.outputs, names)


def _exported(module: nn.Module, two: ModuleInputs) -> TracedModule:
    """By torch.export, with a batch of any size."""
    batch = torch.export.Dim("batch", min=1)
    bound = inspect.signature(module.forward).bind(*two.args, **two.kwargs)
    shapes = trees.tree_map(lambda value: {0: batch} if isinstance(value, Tensor) else None, dict(bound.arguments))
    parts = tuple(name for name, _ in module.named_modules() if name)
    with _quiet():
        program = torch.export.export(
            module,
            two.args,
            dict(two.kwargs),
            dynamic_shapes=shapes,
            strict=False,
            preserve_module_call_signature=parts,
        )
        made = program.module()
    graph = made.graph
    graph.set_codegen(fx.graph.CodeGen())
    nodes = {node.name: node for node in graph.nodes}
    outputs: dict[str, list[Any]] = {}
    for entry in program.module_call_graph:
        if entry.fqn and entry.signature is not None:
            given = [nodes.get(getattr(each, "name", "")) for each in entry.signature.outputs]
            whole = trees.tree_unflatten(given, entry.signature.out_spec)
            outputs.setdefault(entry.fqn.partition("@")[0], []).append(whole)
    _free(graph, (*two.args, *two.kwargs.values()))
    names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return TracedModule(made, outputs, names, exported=True)


def _free(graph: fx.Graph, given: Sequence[Any]) -> None:
    """A graph without checks of what comes in, for tensors alone, and for the device that they are on."""
    checks = (torch.ops.aten._assert_tensor_metadata.default,)
    for node in list(graph.nodes):
        if not node.users and (node.op == "call_module" or node.target in checks):
            graph.erase_node(node)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    tensors = [node for node, value in zip(inputs, given, strict=True) if isinstance(value, Tensor)]
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
def _quiet() -> Iterator[None]:
    """The exporter logs, warns and prints what its errors say again."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


def _reason(error: Exception) -> str:
    """Where in the user's code tracing stopped, and why."""
    ours = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))
    own, step = None, error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith((*ours, "<")):
            own = (file, step.tb_lineno)
        step = step.tb_next
    where = f"`{linecache.getline(*own).strip()}` ({Path(own[0]).name}, line {own[1]}): " if own else ""
    return f"{where}{first_line(error)}"
