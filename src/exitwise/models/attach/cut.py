"""Cut a module into stages after some of its submodules.

A stage is the part of the module's graph between two cuts, in its original order, so that in-place operations keep
their effect. Live values, which are computed before a cut and used after it, are part of the stage state. Two batches
of different sizes show which of them belong to samples: these have samples along their first dimension and can be
compacted; the other values are passed on unchanged.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, fx, nn

from exitwise.core.checks import suggest
from exitwise.core.errors import InputError
from exitwise.models.attach.graph import (
    BUILD_STAGES_HINT,
    PROBE_BATCH_SIZES,
    ModuleInputs,
    TracedModule,
    record_values,
)
from exitwise.models.attach.last_layer import LastLayer
from exitwise.models.attach.stages import (
    FirstStage,
    LaterStage,
    PerSample,
    SelectValue,
    Shared,
    StateLayout,
    Subgraph,
    infer_kinds,
)


@dataclass(frozen=True, eq=False)
class Cut:
    """End of a stage: the name of a submodule, and the node of its output."""

    name: str
    node: fx.Node


@dataclass(frozen=True, eq=False)
class HeadInput:
    """Input of the head at a cut."""

    name: str  # name of the submodule before the cut
    select: SelectValue | None  # takes the head's input out of a state of several values
    features: Tensor  # the submodule's output for two samples
    channels: int  # dimension of the channels, a guess


@dataclass(frozen=True, eq=False)
class CutModule:
    """A module as stages, the inputs of the heads at its cuts, and its last layer."""

    stages: tuple[nn.Module, ...]
    head_inputs: tuple[HeadInput, ...]
    last: LastLayer


class CutError(InputError):
    """A module cannot be cut after one of the submodules; `cut` is its name."""

    def __init__(self, cut: str, message: str) -> None:
        super().__init__(message)
        self.cut = cut


@contextmanager
def _naming(cut: Cut) -> Iterator[None]:
    """Raise an `InputError` as one of this cut."""
    try:
        yield
    except InputError as error:
        raise CutError(cut.name, str(error)) from None


def cut_module(
    module: nn.Module, traced: TracedModule, at: Sequence[str], inputs: ModuleInputs, last: LastLayer
) -> CutModule:
    """Cut a module into stages that end after the submodules `at`, and one up to the features of its last layer.

    Without names in `at`, that one is the only stage.
    """
    graph = traced.module.graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    cuts = _sort_cuts([_find_cut(module, traced, name) for name in at], position)
    features = last.features
    if cuts and (position[cuts[-1].node] >= position[features] or cuts[-1].node in last.replaced):
        raise InputError(
            f"`at` names {cuts[-1].name!r}, but only the last layer follows it: there is nothing to cut off"
        )
    bounds = [*(position[cut.node] for cut in cuts), position[features]]
    body = [
        node
        for node in graph.nodes
        if node.op not in ("placeholder", "output") and position[node] <= bounds[-1] and node not in last.replaced
    ]
    stage_of = {node: next(j for j, bound in enumerate(bounds) if position[node] <= bound) for node in body}
    live = [_live_nodes(graph, stage_of, j, cut.node) for j, cut in enumerate(cuts)]
    two, three = (
        record_values(traced, inputs.with_batch_size(size), {features, *chain(*live)}) for size in PROBE_BATCH_SIZES
    )
    _check_one_row_per_sample(two[features], three[features], last.layer)
    layouts = []
    for cut, nodes in zip(cuts, live, strict=True):
        with _naming(cut):
            layouts.append(StateLayout({node.name: infer_kinds(node.name, two[node], three[node]) for node in nodes}))
    stages: list[nn.Module] = []
    for j, outputs in enumerate([*layouts, StateLayout({features.name: PerSample(0)})]):
        nodes = [node for node in body if stage_of[node] == j]
        subgraph = _extract_subgraph(module, traced, nodes, layouts[j - 1] if j else None, outputs)
        stages.append(
            LaterStage(subgraph, layouts[j - 1], outputs) if j else FirstStage(subgraph, traced.names, outputs)
        )
    head_inputs = []
    for cut, layout in zip(cuts, layouts, strict=True):
        with _naming(cut):
            head_inputs.append(_head_input(traced, cut, layout, two[cut.node]))
    return CutModule(tuple(stages), tuple(head_inputs), last)


def _find_cut(module: nn.Module, traced: TracedModule, name: str) -> Cut:
    """Return the cut after a submodule, which must give a tensor; "name@2" is its second call."""
    submodules = {path: part for path, part in module.named_modules(remove_duplicate=False) if path}
    path, _, number = name.partition("@")
    if name not in submodules and (path not in submodules or not number.isdecimal()):
        hint = suggest(name, submodules, "`module.named_modules()` lists the names")
        raise InputError(f"`at` must name submodules, but there is no {name!r}; {hint}")
    first_path = next(first for first, part in module.named_modules() if part is submodules[path])
    calls = traced.outputs.get(first_path, ())
    if not calls:
        raise InputError(f"`at` names {path!r}, which the module's forward never calls")
    if len(calls) > 1 and not number:
        raise InputError(
            f"`at` names {name!r}, which runs {len(calls)} times: '{name}@1' to '{name}@{len(calls)}' name its calls"
        )
    if number and not 1 <= int(number) <= len(calls):
        raise InputError(f"`at` names {name!r}, but {path!r} runs {len(calls)} times")
    output = calls[int(number) - 1 if number else 0]
    if isinstance(output, list | tuple) and output:
        output = output[0]  # attention layers also return their weights
    if not isinstance(output, fx.Node) or output.op == "placeholder":
        kind = "the module's input" if isinstance(output, fx.Node) else f"a {type(output).__name__}, not a tensor"
        raise InputError(f"`at` names {name!r}, whose output is {kind}")
    return Cut(name, output)


def _sort_cuts(cuts: Sequence[Cut], position: Mapping[fx.Node, int]) -> list[Cut]:
    """Return the cuts in the order of the graph."""
    cuts = sorted(cuts, key=lambda cut: position[cut.node])
    for first, second in pairwise(cuts):
        if first.node is second.node:
            raise InputError(f"`at` names {first.name!r} and {second.name!r}, which have the same output")
    return cuts


def _check_one_row_per_sample(two: Tensor, three: Tensor, last: nn.Linear) -> None:
    """Raise `InputError` unless the last layer reads one row of features per sample."""
    if [tuple(rows.shape) for rows in (two, three)] != [(size, last.in_features) for size in PROBE_BATCH_SIZES]:
        raise InputError(
            f"the last layer (nn.Linear of {last.in_features} features) must get one row of features per sample, "
            f"but gets {tuple(two.shape)} for {PROBE_BATCH_SIZES[0]} samples: "
            f"the first dimension must be the samples, and tokens must be pooled"
        )


def _live_nodes(graph: fx.Graph, stage_of: Mapping[fx.Node, int], j: int, end: fx.Node) -> list[fx.Node]:
    """Return the nodes that are live at cut j: computed before and used after it, and `end`, which its head reads."""
    live = []
    for node in graph.nodes:
        is_before = node.op == "placeholder" or stage_of.get(node, j + 1) <= j
        is_used_after = any(stage_of.get(user, -1) > j for user in node.users)
        if node.op not in ("output", "get_attr") and is_before and (is_used_after or node is end):
            live.append(node)
    return live


def _extract_subgraph(
    module: nn.Module, traced: TracedModule, nodes: Sequence[fx.Node], inputs: StateLayout | None, outputs: StateLayout
) -> Subgraph:
    """Copy some nodes into a graph of their own that shares the module's layers.

    The layers become direct attributes of the subgraph, because resolving nested paths takes time.
    """
    full_graph = traced.module.graph
    by_name = {node.name: node for node in full_graph.nodes}
    input_names = (
        [node.name for node in full_graph.nodes if node.op == "placeholder"] if inputs is None else inputs.kinds
    )
    graph = fx.Graph()
    copies = {by_name[name]: graph.placeholder(name) for name in input_names}
    parts: dict[str, Any] = {}
    non_persistent: list[str] = []  # buffers that are not in the state dict
    persistent = module.state_dict()

    def copy_node(node: fx.Node) -> fx.Node:
        copies[node] = graph.node_copy(node, get_copy)
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            part, name = operator.attrgetter(path)(traced.module), path.replace(".", "_")
            while name == "macs" or hasattr(Subgraph, name) or parts.get(name, part) is not part:
                name += "_"
            parts[name], copies[node].target = part, name
            if path not in persistent and isinstance(part, Tensor):
                non_persistent.append(name)
        return copies[node]

    def get_copy(node: fx.Node) -> fx.Node:
        return copies[node] if node in copies or node.op != "get_attr" else copy_node(node)

    for node in nodes:
        if node.op != "get_attr":  # weights and constants are copied where they are used
            copy_node(node)
    graph.output(tuple(get_copy(by_name[name]) for name in outputs.kinds))
    subgraph = Subgraph(parts, graph)
    for name in non_persistent:
        subgraph.register_buffer(name, parts[name], persistent=False)
    return subgraph


def _head_input(traced: TracedModule, cut: Cut, layout: StateLayout, value: Any) -> HeadInput:
    """Return the input of the head at a cut, samples first; `value` is the submodule's output for two samples."""
    kind, part = layout.kinds[cut.node.name], None
    if isinstance(kind, list) and kind:
        kind, value, part = kind[0], value[0], 0
    if not isinstance(kind, PerSample) or kind.rows_per_sample > 1:
        problem = (
            f"{kind.rows_per_sample} rows for each sample"
            if isinstance(kind, PerSample)
            else "the same for all samples"
            if isinstance(kind, Shared)
            else f"a {type(value).__name__}, not a tensor"
        )
        raise InputError(f"`at` names {cut.name!r}, whose output is {problem}: cut elsewhere, or {BUILD_STAGES_HINT}")
    select = None if layout.single else SelectValue(cut.node.name, part)
    features = kind.pack(value)
    return HeadInput(cut.name, select, features, _guess_channel_dim(traced, cut.node, features.dim()))


_CHANNELS_FIRST = ("conv", "batchnorm", "batch_norm", "groupnorm", "group_norm", "pool")
_CHANNELS_LAST = ("linear", "layernorm", "layer_norm", "embedding", "transformer", "attention", "gru", "lstm", "rnn")
_LAYOUT_PRESERVING = {
    "relu",
    "leakyrelu",
    "elu",
    "gelu",
    "silu",
    "hardswish",
    "tanh",
    "dropout",
    "identity",
    "add",
    "iadd",
    "mul",
}


def _guess_channel_dim(traced: TracedModule, node: Any, dims: int) -> int:
    """Guess the channel dimension of features from the layer that computed them, or from their number of dimensions."""
    while isinstance(node, fx.Node) and node.op in ("call_module", "call_function", "call_method"):
        target = traced.module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        name = type(target).__name__ if isinstance(target, nn.Module) else str(getattr(target, "__name__", target))
        operation = name.lower().partition(".")[0].strip("_")
        if any(part in operation for part in _CHANNELS_FIRST):
            return 1
        if any(part in operation for part in _CHANNELS_LAST):
            return -1
        if operation not in _LAYOUT_PRESERVING or not node.args:
            break
        node = node.args[0]
    return 1 if dims > 3 else -1
