"""Cuts a plain module into stages at the outputs of some of its submodules.

A stage is the part of the module's graph between two cuts, in its own order, so that operations in place do what they
did. Whatever is computed before a cut and used after it is carried across: what belongs to samples, which running two
batches of different sizes tells, goes first by sample and can be compacted; the rest goes along as it is.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as trees

from exitwise.core.errors import InputError, first_line
from exitwise.models.attach.graph import BUILD_STAGES_HINT, PROBE_BATCH_SIZES, ModuleInputs, TracedModule
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
    """A place behind which a stage ends: the name of a submodule, and the node of its output."""

    name: str
    node: fx.Node


@dataclass(frozen=True, eq=False)
class HeadInput:
    """What a head gets at a cut."""

    name: str  # of the submodule
    pick: SelectValue | None  # out of the stage's state, where that has more
    features: Tensor  # of two samples
    channels: int  # the dimension that they are in, as far as one can see


@dataclass(frozen=True, eq=False)
class CutModule:
    """A module in stages, what heads read at each cut, and the module's own last layer."""

    stages: tuple[nn.Module, ...]
    reads: tuple[HeadInput, ...]
    last: nn.Linear


def cut_module(
    module: nn.Module, traced: TracedModule, at: Sequence[str], inputs: ModuleInputs, classes: int | None
) -> CutModule:
    """Stages that end behind the submodules `at`, and one more up to the features of the module's own last layer."""
    graph = traced.module.graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    cuts = _ordered([_cut_of(module, traced, name) for name in at], position)
    features, last = find_last_layer(module, traced, classes)
    if position[cuts[-1].node] >= position[features]:
        raise InputError(f"`at` names {cuts[-1].name!r}, behind which there is only the last layer: nothing to cut off")
    bounds = [*(position[each.node] for each in cuts), position[features]]
    body = [node for node in graph.nodes if node.op not in ("placeholder", "output") and position[node] <= bounds[-1]]
    stage_of = {node: next(j for j, bound in enumerate(bounds) if position[node] <= bound) for node in body}
    _check_shared(traced, stage_of, last, cuts)
    crossing = [_live_nodes(graph, stage_of, j, each.node) for j, each in enumerate(cuts)]
    two, three = (
        _values(traced, inputs.with_batch_size(size), {features, *chain(*crossing)}) for size in PROBE_BATCH_SIZES
    )
    _check_rows(two[features], three[features], last)
    states = [
        StateLayout({node.name: infer_kinds(node.name, two[node], three[node]) for node in nodes}) for nodes in crossing
    ]
    stages: list[nn.Module] = []
    for j, outputs in enumerate([*states, StateLayout({features.name: PerSample(0)})]):
        nodes = [node for node in body if stage_of[node] == j]
        piece = _piece(module, traced, nodes, states[j - 1] if j else None, outputs)
        stages.append(LaterStage(piece, states[j - 1], outputs) if j else FirstStage(piece, traced.names, outputs))
    reads = [_read(traced, each, state, two[each.node]) for each, state in zip(cuts, states, strict=True)]
    return CutModule(tuple(stages), tuple(reads), last)


def _cut_of(module: nn.Module, traced: TracedModule, name: str) -> Cut:
    known = {path: part for path, part in module.named_modules(remove_duplicate=False) if path}
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise InputError(f"`at` must name submodules, but there is no {name!r}{hint}")
    first = next(path for path, part in module.named_modules() if part is known[name])
    calls = traced.outputs.get(first, ())
    if not calls:
        raise InputError(f"`at` names {name!r}, which the module's forward never calls")
    if len(calls) > 1:
        raise InputError(f"`at` names {name!r}, which runs {len(calls)} times: a cut must be passed once")
    made = calls[0]
    if isinstance(made, list | tuple) and made:
        made = made[0]  # attention layers give their weights, too
    if not isinstance(made, fx.Node) or made.op == "placeholder":
        kind = "what the module gets" if isinstance(made, fx.Node) else f"a {type(made).__name__}, not a tensor"
        raise InputError(f"`at` names {name!r}, whose output is {kind}")
    return Cut(name, made)


def _ordered(cuts: Sequence[Cut], position: Mapping[fx.Node, int]) -> list[Cut]:
    ordered = sorted(cuts, key=lambda each: position[each.node])
    for one, other in pairwise(ordered):
        if one.node is other.node:
            raise InputError(f"`at` names {one.name!r} and {other.name!r}, which end at the same place")
    return ordered


def find_last_layer(module: nn.Module, traced: TracedModule, classes: int | None) -> tuple[fx.Node, nn.Linear]:
    """The linear layer whose output the module gives, and the node of the features that it gets."""
    output = next(node for node in traced.module.graph.nodes if node.op == "output")
    given = [node for node in trees.tree_flatten(output.args[0])[0] if isinstance(node, fx.Node)]
    given = [n for node in given for n in (node.all_input_nodes if isinstance(node.target, type) else [node])]
    found = [(node, layer) for node in given if (layer := _linear(module, node)) is not None]
    if not found:
        ends = ", ".join(sorted({_words(module, node) for node in given})) or "nothing that is computed"
        raise InputError(
            f"the module must end in the nn.Linear that gives its logits, but ends in {ends}: multi-label nets, "
            f"regressions, detectors and nets that give probabilities cannot be taken as they are"
        )
    sizes = [layer.out_features for _, layer in found]
    fitting = [pair for pair in found if classes is None or pair[1].out_features == classes]
    if not fitting:
        raise InputError(f"`num_classes` is {classes}, but the module's last layer has {' and '.join(map(str, sizes))}")
    if len(fitting) > 1:
        hint = "say `num_classes`" if len(set(sizes)) == len(sizes) else "it must give the logits of one"
        raise InputError(f"the module gives what {len(found)} linear layers make, of {sizes} classes: {hint}")
    end, layer = fitting[0]
    if layer.out_features < 2:
        raise InputError(
            "the module's last layer has one output, so it is a regression: classes are needed, at least two"
        )
    features = end.args[0] if end.args else end.kwargs["input"]
    if not isinstance(features, fx.Node):
        raise InputError("the module's last layer gets nothing that is computed")
    return features, layer


def _linear(module: nn.Module, node: fx.Node) -> nn.Linear | None:
    """The layer that a node is the output of."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return layer if isinstance(layer, nn.Linear) else None
    if node.target not in (torch.ops.aten.linear.default, nn.functional.linear) or len(node.args) < 2:
        return None
    weight = node.args[1]
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None
    layer = module.get_submodule(str(weight.target).rpartition(".")[0])
    return layer if isinstance(layer, nn.Linear) else None


def _words(module: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"a {type(module.get_submodule(str(node.target))).__name__}"
    return str(getattr(node.target, "__name__", node.target))


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps what some nodes gave, as it was then: later operations may work in place."""

    def __init__(self, module: fx.GraphModule, wanted: Collection[fx.Node]) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}
        self._wanted = wanted

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n in self._wanted:
            self.values[n] = trees.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, made)
        return made


def _values(traced: TracedModule, inputs: ModuleInputs, wanted: Collection[fx.Node]) -> Mapping[fx.Node, Any]:
    recorder = _Recorder(traced.module, wanted)
    try:
        recorder.run(*traced.inputs(inputs))
    except Exception as error:
        size = len(inputs.tensors[0])
        raise InputError(
            f"what was traced cannot run on a batch of {size}: {first_line(error)}; {BUILD_STAGES_HINT}"
        ) from None
    return recorder.values


def _check_rows(two: Tensor, three: Tensor, last: nn.Linear) -> None:
    """The last layer gets one row of features for each sample."""
    if [tuple(rows.shape) for rows in (two, three)] != [(size, last.in_features) for size in PROBE_BATCH_SIZES]:
        raise InputError(
            f"the last layer (nn.Linear of {last.in_features} features) must get one row of features per sample, "
            f"but gets {tuple(two.shape)} for {PROBE_BATCH_SIZES[0]} samples: "
            f"samples must come first, and tokens be pooled"
        )


def _check_shared(traced: TracedModule, stage_of: Mapping[fx.Node, int], last: nn.Linear, cuts: Sequence[Cut]) -> None:
    """Refuse weights that two stages use: they would be two sets of weights when loaded again."""
    used = {id(weight): len(cuts) for weight in last.parameters()}
    for node, stage in stage_of.items():
        if node.op == "call_module":
            part = traced.module.get_submodule(str(node.target))
            weights, stages = list(part.named_parameters(prefix=str(node.target))), {stage}
        elif node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(traced.module)
            weights = [(str(node.target), value)] if isinstance(value, nn.Parameter) else []
            stages = {stage_of[user] for user in node.users if user in stage_of}
        else:
            continue
        for name, weight in weights:
            both = {*stages, used.setdefault(id(weight), min(stages, default=stage))}
            if len(both) > 1:
                where = cuts[min(both)].name
                raise InputError(
                    f"{name} is used on both sides of the cut behind {where!r}: cut elsewhere, or {BUILD_STAGES_HINT}"
                )


def _live_nodes(graph: fx.Graph, stage_of: Mapping[fx.Node, int], j: int, end: fx.Node) -> list[fx.Node]:
    """What crosses cut j: what is computed up to it and used behind it, and what its head reads."""
    found = []
    for node in graph.nodes:
        before = node.op == "placeholder" or stage_of.get(node, j + 1) <= j
        later = any(stage_of.get(user, -1) > j for user in node.users)
        if node.op not in ("output", "get_attr") and before and (later or node is end):
            found.append(node)
    return found


def _piece(
    module: nn.Module, traced: TracedModule, nodes: Sequence[fx.Node], inputs: StateLayout | None, outputs: StateLayout
) -> Subgraph:
    """Some nodes of the graph as a graph of their own, with the same modules, all of them at hand: paths take time."""
    whole = traced.module.graph
    by_name = {node.name: node for node in whole.nodes}
    taken = [node.name for node in whole.nodes if node.op == "placeholder"] if inputs is None else inputs.kinds
    graph = fx.Graph()
    made = {by_name[name]: graph.placeholder(name) for name in taken}
    parts: dict[str, Any] = {}
    passing: list[str] = []  # buffers that no file holds
    kept = module.state_dict()

    def copied(node: fx.Node) -> fx.Node:
        made[node] = graph.node_copy(node, known)
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            part, name = operator.attrgetter(path)(traced.module), path.replace(".", "_")
            while name == "macs" or hasattr(Subgraph, name) or parts.get(name, part) is not part:
                name += "_"
            parts[name], made[node].target = part, name
            if path not in kept and isinstance(part, Tensor):
                passing.append(name)
        return made[node]

    def known(node: fx.Node) -> fx.Node:
        return made[node] if node in made or node.op != "get_attr" else copied(node)

    for node in nodes:
        if node.op != "get_attr":  # weights and constants come where they are used
            copied(node)
    graph.output(tuple(known(by_name[name]) for name in outputs.kinds))
    piece = Subgraph(parts, graph)
    for name in passing:
        piece.register_buffer(name, parts[name], persistent=False)
    return piece


def _read(traced: TracedModule, each: Cut, state: StateLayout, value: Any) -> HeadInput:
    """What the head at a cut gets: samples first."""
    kind, part = state.kinds[each.node.name], None
    if isinstance(kind, list) and kind:
        kind, value, part = kind[0], value[0], 0
    if not isinstance(kind, PerSample) or kind.rows_per_sample > 1:
        found = (
            f"{kind.rows_per_sample} rows for each sample"
            if isinstance(kind, PerSample)
            else "the same for all samples"
            if isinstance(kind, Shared)
            else f"a {type(value).__name__}, not a tensor"
        )
        raise InputError(f"`at` names {each.name!r}, whose output is {found}: cut elsewhere, or {BUILD_STAGES_HINT}")
    pick = None if state.single else SelectValue(each.node.name, part)
    features = kind.pack(value)
    return HeadInput(each.name, pick, features, _channels(traced, each.node, features.dim()))


_CHANNELS_FIRST = ("conv", "batchnorm", "batch_norm", "groupnorm", "group_norm", "pool")
_CHANNELS_LAST = ("linear", "layernorm", "layer_norm", "embedding", "transformer", "attention", "gru", "lstm", "rnn")
_PASSED = {"relu", "leakyrelu", "elu", "gelu", "silu", "hardswish", "tanh", "dropout", "identity", "add", "iadd", "mul"}


def _channels(traced: TracedModule, node: Any, dims: int) -> int:
    """Where features have their channels: as the layer has them that made them, or as is usual."""
    while isinstance(node, fx.Node) and node.op in ("call_module", "call_function", "call_method"):
        target = traced.module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        name = type(target).__name__ if isinstance(target, nn.Module) else str(getattr(target, "__name__", target))
        word = name.lower().partition(".")[0].strip("_")
        if any(part in word for part in _CHANNELS_FIRST):
            return 1
        if any(part in word for part in _CHANNELS_LAST):
            return -1
        if word not in _PASSED or not node.args:
            break
        node = node.args[0]
    return 1 if dims > 3 else -1
