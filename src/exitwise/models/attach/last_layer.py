"""The last layer of a module: the nn.Linear that gives its logits, or one that its last operations are folded into.

What follows the features is often more than one linear layer, but still linear: dropout and flattening, a 1x1
convolution of a pooled map, the mean of two heads, a weighted sum. Two samples show by which factor each head counts,
and then one layer on the concatenated features gives the same logits.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as trees

from exitwise.core.errors import InputError
from exitwise.models.attach.graph import PROBE_BATCH_SIZES, ModuleInputs, TracedModule, is_close, record_values


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The last layer, the node of the features that it reads, and nodes of the graph that it replaces."""

    features: fx.Node
    layer: nn.Linear
    replaced: frozenset[fx.Node] = frozenset()
    folded: bool = False  # whether it is a new layer, whose logits equal the module's up to rounding


@dataclass(frozen=True, eq=False)
class _LinearCall:
    """A linear map of features along their dimension of channels: a linear layer or a 1x1 convolution."""

    node: fx.Node
    features: fx.Node
    weight: Tensor  # (c, p)
    bias: Tensor | None
    layer: nn.Linear | None


def find_last_layer(module: nn.Module, traced: TracedModule, inputs: ModuleInputs, classes: int | None) -> LastLayer:
    """Return the last layer of a module, whose output the module returns."""
    returned = traced.returned_nodes()
    found = [
        LastLayer(call.features, call.layer)
        for node in returned
        if (call := _find_linear(module, traced, node)) is not None and call.layer is not None
    ]
    if not found:
        found = [last for node in returned if (last := _fold(module, traced, node, inputs)) is not None]
    if not found:
        ends = ", ".join(sorted({_describe_node(module, node) for node in returned})) or "no computed value"
        raise InputError(
            f"the module must end in the nn.Linear that gives its logits, but ends in {ends}: multi-label nets, "
            f"regressions, detectors, nets without a classifier (num_classes=0) and nets that return probabilities "
            f"must be changed first"
        )
    sizes = [last.layer.out_features for last in found]
    fitting = [last for last in found if classes is None or last.layer.out_features == classes]
    if not fitting:
        raise InputError(f"`num_classes` is {classes}, but the module's last layer has {' and '.join(map(str, sizes))}")
    if len(fitting) > 1:
        hint = "pass `num_classes`" if len(set(sizes)) == len(sizes) else "it must return only one of them"
        raise InputError(f"the module returns the outputs of {len(found)} linear layers, {sizes} classes: {hint}")
    if fitting[0].layer.out_features < 2:
        raise InputError(
            "the module's last layer must have at least two classes, but has one output, as in a regression"
        )
    return fitting[0]


def _find_linear(module: nn.Module, traced: TracedModule, node: fx.Node) -> _LinearCall | None:
    """Return the linear map whose output a node is, or None."""
    layer: nn.Module | None
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            return None
        features, weight, bias = node.args[0] if node.args else node.kwargs.get("input"), layer.weight, layer.bias
    elif node.target in _LINEAR_FUNCTIONS and len(node.args) >= 2:
        features, weight_node = node.args[:2]
        if not isinstance(weight_node, fx.Node) or weight_node.op != "get_attr":
            return None
        bias_node = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        weight = operator.attrgetter(str(weight_node.target))(traced.module)
        bias = operator.attrgetter(str(bias_node.target))(traced.module) if isinstance(bias_node, fx.Node) else None
        layer = _find_submodule(module, str(weight_node.target).rpartition(".")[0])
    else:
        return None
    if isinstance(layer, nn.Conv2d) and not _is_pointwise(layer):
        return None
    if not isinstance(layer, nn.Linear) and weight.shape[2:].numel() > 1:
        return None
    if not isinstance(features, fx.Node):
        raise InputError("the module's last layer must read computed features, but reads a constant")
    return _LinearCall(node, features, weight.flatten(1), bias, layer if isinstance(layer, nn.Linear) else None)


_LINEAR_FUNCTIONS = (torch.ops.aten.linear.default, nn.functional.linear, torch.ops.aten.conv2d.default)


def _find_submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return set(layer.kernel_size + layer.stride) == {1} and layer.groups == 1 and layer.padding in ((0, 0), "valid")


def _describe_node(module: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        kind = type(module.get_submodule(str(node.target))).__name__
        return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    return str(getattr(node.target, "__name__", node.target))


# -- folding

_LINEAR_OPERATIONS = {
    *("identity", "dropout", "flatten", "unflatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous", "clone"),
    *("add", "iadd", "sub", "isub", "rsub", "mul", "imul", "truediv", "div", "neg", "mean", "sum", "stack", "cat"),
    *("getitem", "index", "select", "slice", "float", "to", "alias", "permute", "transpose", "batchnorm1d"),
    *("batchnorm2d", "batchnormact2d", "batch_norm", "adaptiveavgpool2d", "avgpool2d", "adaptive_avg_pool2d"),
    *("avg_pool2d", "adaptiveavgpool1d", "adaptive_avg_pool1d", "concat", "_assert_tensor_metadata", "lift_fresh_copy"),
}


def _operation(module: nn.Module, node: fx.Node) -> str:
    """Return the name of an operation in lower case, without suffixes for overloads and in-place variants."""
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__name__.lower()
    name = str(getattr(node.target, "__name__", node.target))
    return name.partition(".")[0].rstrip("_").lower()


def _is_linear(module: nn.Module, node: fx.Node) -> bool:
    return node.op.startswith("call") and _operation(module, node) in _LINEAR_OPERATIONS


def _is_part(module: nn.Module, traced: TracedModule, node: fx.Node) -> bool:
    """Return whether a node takes one of several results, such as the maximum and its position."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and not _is_linear(module, source) and not _find_linear(module, traced, source)


@dataclass(frozen=True, eq=False)
class _Tail:
    """The linear operations at the end of a graph, and the nodes that they read."""

    nodes: Sequence[fx.Node]  # in the order of the graph
    calls: Sequence[_LinearCall]
    others: Sequence[fx.Node]  # values that are not computed by linear operations

    @classmethod
    def before(cls, module: nn.Module, traced: TracedModule, end: fx.Node) -> "_Tail":
        nodes: set[fx.Node] = set()
        calls: dict[fx.Node, _LinearCall] = {}
        others: dict[fx.Node, None] = {}
        waiting = [end]
        while waiting:
            node = waiting.pop()
            if node in nodes or node in calls or node in others:
                continue
            call = _find_linear(module, traced, node)
            if call is not None:
                calls[node] = call
            elif _is_linear(module, node) and not _is_part(module, traced, node):
                nodes.add(node)
                waiting += node.all_input_nodes
            else:
                others[node] = None
        return cls([node for node in traced.module.graph.nodes if node in nodes], list(calls.values()), list(others))

    def run(self, traced: TracedModule, values: Mapping[fx.Node, Any], end: fx.Node) -> Tensor:
        """Return the value of `end` for values of the nodes that the tail reads."""
        interpreter = fx.Interpreter(traced.module)
        interpreter.env = {node: trees.tree_map(_clone, value) for node, value in values.items()}
        for node in self.nodes:
            interpreter.env[node] = interpreter.run_node(node)
        result: Tensor = interpreter.env[end]
        return result


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _fold(module: nn.Module, traced: TracedModule, end: fx.Node, inputs: ModuleInputs) -> LastLayer | None:
    """Return one layer for the linear operations before `end`, or None if they are not linear."""
    tail = _Tail.before(module, traced, end)
    read = {end, *tail.others, *(node for call in tail.calls for node in (call.node, call.features))}
    if not tail.nodes and not tail.calls:
        return None
    values = record_values(traced, inputs.with_batch_size(PROBE_BATCH_SIZES[0]), read)
    logits = values[end]
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point() or logits.is_meta:
        return None
    nodes = list(traced.module.graph.nodes)
    for fold in (_fold_heads, _move_behind_tail, _fold_pool):
        last = fold(module, traced, tail, end, values)
        if last is not None:
            return replace(last, replaced=_unused(nodes, end, last.replaced))
    return None


def _unused(nodes: Sequence[fx.Node], end: fx.Node, replaced: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes that a new last layer makes superfluous: the replaced ones, and those after `end`."""
    known, unused = set(nodes), {*replaced, *nodes[nodes.index(end) + 1 :]}
    for node in reversed(nodes):
        if node in unused and any(user not in unused and user in known for user in node.users):
            unused.discard(node)  # a feature depends on it
    return frozenset(unused)


def _fold_heads(
    module: nn.Module, traced: TracedModule, tail: _Tail, end: fx.Node, values: Mapping[fx.Node, Any]
) -> LastLayer | None:
    """Fold a sum of scaled heads (n, c) into one layer on their concatenated features.

    A summand that is no linear function, such as a maximum over tokens, is a feature itself.
    """
    logits = values[end]
    samples, classes = logits.shape
    terms = [call.node for call in tail.calls]
    terms += [node for node in tail.others if isinstance(values[node], Tensor) and _is_term(values[node], logits)]
    if not tail.calls or any(values[node].shape.numel() != logits.numel() for node in terms):
        return None
    if any(values[call.features].shape[1:].numel() != call.weight.shape[1] for call in tail.calls):
        return None
    zeros = {**values, **{node: torch.zeros_like(values[node]) for node in terms}}
    constant = tail.run(traced, zeros, end)
    factors = [tail.run(traced, {**zeros, node: torch.ones_like(values[node])}, end) - constant for node in terms]
    rng = torch.Generator().manual_seed(0)
    drawn = [torch.randn(logits.shape, generator=rng).to(logits) for _ in terms]
    expected = constant + sum(factor * value for factor, value in zip(factors, drawn, strict=True))
    trial = {node: value.view(values[node].shape) for node, value in zip(terms, drawn, strict=True)}
    if not is_close(tail.run(traced, {**values, **trial}, end), expected):
        return None
    if any(not torch.equal(rows[:1].expand(samples, -1), rows) for rows in (constant, *factors)):
        return None
    replaced = frozenset({*tail.nodes, *(call.node for call in tail.calls)})
    layer = tail.calls[0].layer
    if len(terms) == 1 and layer is not None and not constant.any() and bool((factors[0] == 1).all()):
        return LastLayer(tail.calls[0].features, layer, replaced)  # what follows does nothing
    weights, bias = [], constant[0]
    for node, factor in zip(terms, factors, strict=True):
        call = next((call for call in tail.calls if call.node is node), None)
        weight = torch.eye(classes).to(logits) if call is None else call.weight
        weights.append(factor[0, :, None] * weight)
        if call is not None and call.bias is not None:
            bias = bias + factor[0] * call.bias
    features = [call.features for call in tail.calls] + terms[len(tail.calls) :]
    return LastLayer(
        _concatenate(traced, features, values), make_linear(torch.cat(weights, 1), bias), replaced, folded=True
    )


def _is_term(value: Tensor, logits: Tensor) -> bool:
    return value.is_floating_point() and value.shape[:1] == logits.shape[:1] and value.numel() == logits.numel()


def _move_behind_tail(
    module: nn.Module, traced: TracedModule, tail: _Tail, end: fx.Node, values: Mapping[fx.Node, Any]
) -> LastLayer | None:
    """Move a linear layer on tokens or positions behind the operations that pick or average them."""
    if len(tail.calls) != 1:
        return None
    call = tail.calls[0]
    try:
        features = tail.run(traced, {**values, call.node: values[call.features]}, end).flatten(1)
        moved = nn.functional.linear(features, call.weight, call.bias)
    except Exception:  # operations that need the number of classes
        return None
    if not is_close(moved, values[end]):
        return None
    copies: dict[fx.Node, fx.Node] = {call.node: call.features}
    with _before_output(traced) as graph:
        for node in tail.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
        node = graph.call_function(torch.flatten, (copies[end], 1))
    layer = call.layer or make_linear(call.weight, call.bias)
    return LastLayer(node, layer, frozenset({*tail.nodes, call.node}), folded=True)


def _fold_pool(
    module: nn.Module, traced: TracedModule, tail: _Tail, end: fx.Node, values: Mapping[fx.Node, Any]
) -> LastLayer | None:
    """Return an identity for logits that are averages of a map (n, c, h, w) of each class, as in SqueezeNet."""
    maps = [values[node] for node in tail.others if isinstance(values[node], Tensor) and values[node].dim() == 4]
    classes = values[end].shape[1]
    if tail.calls or len(maps) != 1 or len(tail.others) != 1 or maps[0].shape[1] != classes:
        return None
    activation = tail.others[0]
    scores = activation.args[0] if activation.args else None
    if not isinstance(scores, fx.Node) or _find_linear(module, traced, scores) is None:
        return None  # features, not classes
    layer = make_linear(torch.eye(classes).to(values[end]), None)
    return LastLayer(end, layer, folded=True)


def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer in evaluation mode with these weights (c, p)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta").eval()
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def _concatenate(traced: TracedModule, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Tensor]) -> fx.Node:
    """Add the concatenation of features (n, p) or (n, p, 1, 1) to the graph, and return its node."""
    with _before_output(traced) as graph:
        flat = [node if values[node].dim() == 2 else graph.call_function(torch.flatten, (node, 1)) for node in nodes]
        return flat[0] if len(flat) == 1 else graph.call_function(torch.cat, (flat, 1))


@contextmanager
def _before_output(traced: TracedModule) -> Iterator[fx.Graph]:
    """Insert new nodes at the end of the graph."""
    graph = traced.module.graph
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
        yield graph
