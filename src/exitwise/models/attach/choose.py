"""Cuts of about equal cost: the choice of `at="auto"`."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from exitwise.core.errors import InputError
from exitwise.models.attach.cut import CutError, CutModule, cut_module
from exitwise.models.attach.graph import (
    PROBE_BATCH_SIZES,
    ModuleInputs,
    TracedModule,
    disable_attention_fast_path,
)
from exitwise.models.attach.last_layer import LastLayer
from exitwise.models.attach.tracing import trace_module

LIVE_VALUE_PENALTY = 0.05  # a further live value counts like this share of the cost away from the equal share


def trace_layers(module: nn.Module, inputs: ModuleInputs) -> TracedModule:
    """Return the graph of a module, with the layers of PyTorch's encoders where they can be cut."""
    layers = [name for name, part in module.named_modules() if isinstance(part, nn.TransformerEncoderLayer)]
    try:
        return trace_module(module, inputs, layers)
    except InputError:  # an encoder that cannot be cut inside
        if not layers:
            raise
        return trace_module(module, inputs, ())


def cut_at_equal_cost(
    module: nn.Module, traced: TracedModule, inputs: ModuleInputs, last: LastLayer, exits: int
) -> tuple[list[str], CutModule]:
    """Cut a module after about equal shares of its cost; return the names of the submodules before the cuts, too.

    A place where the module cannot be cut, because a value there mixes samples, is replaced by the next best.
    """
    candidates = _find_candidates(traced, inputs, last)
    refused: set[str] = set()
    first_error: CutError | None = None
    while True:
        possible = [candidate for candidate in candidates if candidate.name not in refused]
        if len(possible) < exits - 1 and first_error is not None:
            raise first_error
        names = _choose(possible, exits)
        try:
            return names, cut_module(module, traced, names, inputs, last)
        except CutError as error:
            first_error = first_error or error
            refused.add(error.cut)


@dataclass(frozen=True)
class _Candidate:
    """A place to cut: the submodule before it, the share of the cost up to it, and the number of live values."""

    name: str
    cost: float
    live: int


def _find_candidates(traced: TracedModule, inputs: ModuleInputs, last: LastLayer) -> list[_Candidate]:
    """Return the best place to cut for each cost, in the order of costs."""
    nodes, end = list(traced.module.graph.nodes), last.features
    costs, readable = _measure(traced, inputs.with_batch_size(PROBE_BATCH_SIZES[0]))
    position = {node: i for i, node in enumerate(nodes)}
    names: dict[fx.Node, str] = {}
    for path, calls in sorted(traced.outputs.items(), key=lambda item: -len(item[0])):  # the shortest name wins
        for k, output in enumerate(calls, start=1):
            node = output[0] if isinstance(output, list | tuple) and output else output
            if isinstance(node, fx.Node) and node in readable and 0 < costs[node] < costs[end]:
                names[node] = path if len(calls) == 1 else f"{path}@{k}"
    live = _count_live(nodes, position, names)
    best: dict[int, tuple[int, fx.Node]] = {}  # by cost: the fewest live values, and the last node that has them
    for node in sorted(names, key=position.__getitem__):
        if node in last.replaced or position[node] >= position[end]:
            continue
        if costs[node] not in best or live[node] <= best[costs[node]][0]:
            best[costs[node]] = (live[node], node)
    return [_Candidate(names[node], cost / costs[end], count) for cost, (count, node) in sorted(best.items())]


def _measure(traced: TracedModule, inputs: ModuleInputs) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """Return the cumulative cost of each node, and the nodes whose values a built-in head can read."""
    costs: dict[fx.Node, int] = {}
    readable: set[fx.Node] = set()
    samples = len(inputs.tensors[0])

    class Measurement(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            costs[n] = counter.get_total_flops()
            tensor = result[0] if isinstance(result, list | tuple) and result else result
            is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
            if is_float and 2 <= tensor.dim() <= 5 and samples in tensor.shape[:2]:  # no windows instead of samples
                readable.add(n)
            return result

    with disable_attention_fast_path(), FlopCounterMode(display=False) as counter:  # its products are not counted
        Measurement(traced.module).run(*traced.select_inputs(inputs))
    return costs, readable


def _count_live(nodes: list[fx.Node], position: dict[fx.Node, int], cuts: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return the number of values that are computed before and used after each cut."""
    changes = [0] * (len(nodes) + 1)
    for node in nodes:
        last_use = max((position[user] for user in node.users), default=-1)
        if node.op not in ("get_attr", "output") and last_use > position[node]:
            changes[position[node]] += 1
            changes[last_use] -= 1
    counts, count = [], 0
    for change in changes:
        count += change
        counts.append(count)
    return {node: counts[position[node]] for node in cuts}


def _choose(candidates: list[_Candidate], exits: int) -> list[str]:
    """Return the names of the candidates nearest to equal shares of the cost."""
    if len(candidates) < exits - 1:
        raise InputError(
            f"`exits` is {exits}, which needs {exits - 1} cuts, but the module can be cut at {len(candidates)} places"
        )
    chosen: list[str] = []
    start = 0
    for j in range(1, exits):
        index = min(
            range(start, len(candidates) - (exits - 1 - j)),
            key=lambda i: abs(candidates[i].cost - j / exits) + LIVE_VALUE_PENALTY * (candidates[i].live - 1),
        )
        chosen.append(candidates[index].name)
        start = index + 1
    return chosen
