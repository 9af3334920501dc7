"""Exits on a plain network: its layers as stages, a small head at every cut, its own classifier as the last exit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from exitwise.core import nested
from exitwise.core.errors import InputError, first_line
from exitwise.models.attach.cut import HeadInput, cut_module, find_last_layer
from exitwise.models.attach.graph import (
    PROBE_BATCH_SIZES,
    ModuleInputs,
    TracedModule,
    bitwise_equal,
    call_with_inputs,
    iter_tensors,
    trace_module,
)
from exitwise.models.attach.stages import run_full_batch, run_shrinking_batch
from exitwise.models.net import Head, MultiExitNet

MakeHead = Callable[[Tensor, int], Head]  # features of two samples, number of classes
MIN_HIDDEN_WIDTH = 128  # of a small MLP, at least
POOL_SIZES = (1, 2, 3, 4)  # of a pooled map
REMAINING_SAMPLES = 3  # samples in the end, when one leaves before each stage


def attach(
    module: nn.Module,
    at: Sequence[str] | str,
    num_classes: int | None = None,
    head: str | MakeHead | Sequence[Head] = "mlp",
    *,
    example_inputs: Any = None,
    exits: int | None = None,
) -> MultiExitNet:
    """A multi-exit net from a trained module: cut behind the submodules `at`, with a new head at each cut.

    The stages share the module's layers, and the last exit gives what the module gives, bit for bit. What crosses a
    cut (residuals, tokens, masks) is carried along and can be compacted. `at="auto"` with `exits` chooses cuts of about
    equal cost. A head pools maps (n, c, h, w) and tokens (n, l, d) over their places, and has a hidden layer ("mlp") or
    none ("linear"); or give a function of the features (of two samples) and the number of classes, or the heads
    themselves in the order of `at`, each reading what its submodule gives, samples first. Heads are untrained: see
    `train_heads`.

    `example_inputs` is what the module is called with, for one sample or more: a tensor, a tuple or a dict of tensors;
    it is guessed for nets that begin with a convolution, a linear layer or an embedding. A forward that only
    torch.export can follow stays in evaluation mode and at the example's shapes, but for the batch.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"`module` must be an nn.Module, but got {type(module).__name__}")
    if any(part.training for part in module.modules()):
        raise InputError("`module` is in training mode: call module.eval() first, or dropout and statistics would vary")
    names = _names(at, exits)
    with torch.inference_mode(False), torch.no_grad():
        inputs = ModuleInputs.of(_guessed(module) if example_inputs is None else example_inputs)
        _check_inputs(inputs)
        if names is None:
            traced, names = _chosen(module, inputs, exits or 0, num_classes)
        else:
            traced = trace_module(module, inputs, names)
        pieces = cut_module(module, traced, names, inputs, num_classes)
        heads = _heads(head, names, pieces.reads, pieces.last.out_features)
        net = MultiExitNet(pieces.stages, [*heads, Head(nn.Identity(), pieces.last)], _spec(module, names, head)).eval()
        _check_same(net, module, inputs, traced.exported)
    return net


def _spec(module: nn.Module, at: Sequence[str], head: Any) -> dict[str, Any] | None:
    """How to build the net again, if the module was built by name and the heads are ours."""
    spec = module.spec if isinstance(module, MultiExitNet) else None
    if spec is None or not isinstance(head, str) or "attach" in spec:
        return None
    return {**spec, "attach": {"at": list(at), "head": head}}


class TokenMean(nn.Module):
    """The mean over all places of features (n, ..., d)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.flatten(1, -2).mean(dim=1)

    def macs(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        return inputs[0].numel()


def _names(at: Any, exits: int | None) -> list[str] | None:
    """The submodules to cut at, or None where they are to be chosen."""
    if at == "auto":
        if isinstance(exits, bool) or not isinstance(exits, int) or exits < 2:
            raise InputError(f'`at="auto"` needs `exits`, a whole number of at least 2, but got {exits!r}')
        return None
    if isinstance(at, str) or not isinstance(at, Sequence) or not at or not all(isinstance(name, str) for name in at):
        raise InputError(f'`at` must be a list of submodules\' names, or "auto", but got {at!r}')
    if exits is not None and exits != len(at) + 1:
        raise InputError(f'`exits` is for `at="auto"`: {len(at)} cuts make {len(at) + 1} exits, not {exits}')
    if len(set(at)) < len(at):
        raise InputError(f"`at` must name each submodule once, but got {list(at)}")
    return list(at)


def _check_inputs(inputs: ModuleInputs) -> None:
    values = [*inputs.args, *inputs.kwargs.values()]
    tensors = inputs.tensors
    constants = [value for value in values if not isinstance(value, Tensor)]
    if not tensors or any(not isinstance(value, bool | int | float | str | None) for value in constants):
        kinds = ", ".join(type(value).__name__ for value in values) or "nothing"
        raise InputError(f"`example_inputs` must be a tensor, a tuple or a dict of tensors, but is of {kinds}")
    if any(not tensor.dim() or not len(tensor) for tensor in tensors) or len({len(tensor) for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InputError(f"`example_inputs` must have samples first, equally many, at least one, but are {shapes}")


def _guessed(module: nn.Module) -> Tensor:
    """An input that the module takes, by the looks of its first layer."""
    for candidate in _candidates(module):
        try:
            call_with_inputs(module, ModuleInputs.of(candidate))
        except InputError:
            continue
        return candidate
    raise InputError("what the module takes could not be guessed: give `example_inputs`")


def _candidates(module: nn.Module) -> list[Tensor]:
    first = next(
        (part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Conv1d | nn.Linear | nn.Embedding)), None
    )
    if first is None:
        return []
    device, dtype = first.weight.device, first.weight.dtype
    if isinstance(first, nn.Embedding):
        return [torch.randint(first.num_embeddings, (1, length), device=device) for length in (16, 8)]
    if isinstance(first, nn.Linear):
        shapes: list[tuple[int, ...]] = [(first.in_features,), (16, first.in_features)]
    elif isinstance(module, MultiExitNet) and module.input_shape is not None:
        shapes = [module.input_shape]
    else:
        sides = [(side, side) for side in (224, 64, 32, 28, 8)] if isinstance(first, nn.Conv2d) else [(256,), (64,)]
        shapes = [(first.in_channels, *side) for side in sides]
    return [torch.rand(1, *shape, device=device, dtype=dtype) for shape in shapes]


def _heads(head: Any, at: Sequence[str], reads: Sequence[HeadInput], classes: int) -> list[Head]:
    """A head for each cut; those given are in the order of `at`."""
    if isinstance(head, Sequence) and not isinstance(head, str):
        if len(head) != len(reads):
            raise InputError(f"`head` must have one head for each of {len(reads)} cuts, but has {len(head)}")
        named = dict(zip(at, head, strict=True))
        made = [named[read.name] for read in reads]
    elif callable(head):
        made = [head(read.features, classes) for read in reads]
    elif head in ("mlp", "linear"):
        made = [_head(read, classes, head) for read in reads]
    else:
        raise InputError(f'`head` must be "mlp", "linear", a function or a list of heads, but got {head!r}')
    for each, read in zip(made, reads, strict=True):
        if not isinstance(each, Head):
            raise InputError(f"`head` must give an exitwise Head, but gave a {type(each).__name__}")
        if each.last.out_features != classes:
            raise InputError(f"`head` must have the module's {classes} classes, but has {each.last.out_features}")
        _check_reads(each.eval(), read)
    if len(set(made)) < len(made):
        raise InputError("`head` must give another head for each cut, but gave one twice")
    picks = [(each, read.pick) for each, read in zip(made, reads, strict=True)]
    return [each if pick is None else Head(nn.Sequential(pick, each.neck), each.last) for each, pick in picks]


def _check_reads(head: Head, read: HeadInput) -> None:
    try:
        features = head.features(read.features)
        logits = head.last(features)
    except Exception as error:
        reason = first_line(error)
    else:
        if features.dim() == 2 and len(logits) == len(read.features):
            return
        reason = f"it makes features {tuple(features.shape)} of them, not one row for each sample"
    raise InputError(
        f"`head` cannot read what {read.name!r} gives, {nested.describe(read.features)} "
        f"for {PROBE_BATCH_SIZES[0]} samples: {reason}"
    )


def _head(read: HeadInput, classes: int, kind: str) -> Head:
    features = read.features
    if not features.is_floating_point() or not 2 <= features.dim() <= 5:
        raise InputError(
            f"no head is known for what {read.name!r} gives, {nested.describe(features)} "
            f"for {PROBE_BATCH_SIZES[0]} samples: give your own as `head`"
        )
    pools = {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}
    layers: list[nn.Module] = []
    width = features.shape[read.channels]
    if features.dim() > 2 and read.channels == -1:
        layers = [TokenMean()]
    elif features.dim() > 2:
        side = _side(width, features.shape[2:])
        layers = [pools[features.dim()](side), nn.Flatten()]
        width *= side ** (features.dim() - 2)
    options: dict[str, Any] = {"device": features.device, "dtype": features.dtype}
    if kind == "mlp":
        hidden = max(width, MIN_HIDDEN_WIDTH)
        layers += [nn.Linear(width, hidden, **options), nn.ReLU()]
        width = hidden
    return Head(nn.Sequential(*layers), nn.Linear(width, classes, **options))


def _side(channels: int, places: Sequence[int]) -> int:
    """To how many places along each dimension a map is pooled: more than one where there are few channels."""
    sides = [side for side in POOL_SIZES if all(length % side == 0 for length in places)]
    return next((side for side in sides if channels * side ** len(places) >= MIN_HIDDEN_WIDTH), sides[-1])


# -- what the stages must do


def _check_same(net: MultiExitNet, module: nn.Module, inputs: ModuleInputs, exported: bool) -> None:
    """The last exit gives what the module gives, and what it gives of some samples when others are gone."""
    many = inputs.with_batch_size(len(net.stages) + REMAINING_SAMPLES)
    if any(tensor.is_meta for tensor in many.tensors):
        return
    rows = run_full_batch(net.stages, many)
    if not _given_by(module, many, net.exits[-1], rows, exported):
        raise InputError(
            "the stages do not give what the module gives: its forward does what was not seen, such as drawing numbers"
        )
    fewer, left = run_shrinking_batch(net.stages, many)
    if not _near(fewer, rows[left]):
        raise InputError(
            "the module mixes the samples of a batch, or changes in place what lies across a cut: "
            "what it says of a sample depends on which others are there"
        )


def _near(one: Tensor, other: Tensor) -> bool:
    near, finite = torch.finfo(one.dtype).eps ** 0.5, other[other.isfinite()].abs()
    return torch.allclose(one, other, rtol=near, atol=near * float(finite.max()) if len(finite) else 0, equal_nan=True)


def _given_by(module: nn.Module, inputs: ModuleInputs, head: Head, features: Tensor, exported: bool) -> bool:
    """Whether these are the module's own features, and it gives the logits of them.

    PyTorch's attention has a fast path, which differs in the last bits, and which no export has.
    """
    seen: list[Tensor] = []
    hook = head.last.register_forward_pre_hook(lambda _, *given: seen.extend(iter_tensors(given)), with_kwargs=True)
    try:
        made = list(iter_tensors(call_with_inputs(module, inputs)))
        if exported and any(_near(each, features) for each in seen if each.shape == features.shape):
            with _slow_attention():
                made += iter_tensors(call_with_inputs(module, inputs))
    finally:
        hook.remove()
    logits = head(features)
    return any(bitwise_equal(each, logits) for each in made) and (
        not seen or any(bitwise_equal(each, features) for each in seen)
    )


@contextmanager
def _slow_attention() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


# -- cuts of about equal cost


def _chosen(module: nn.Module, inputs: ModuleInputs, exits: int, classes: int | None) -> tuple[TracedModule, list[str]]:
    """Cuts after about equal shares of the cost, where little has to be carried."""
    layers = [name for name, part in module.named_modules() if isinstance(part, nn.TransformerEncoderLayer)]
    try:
        traced = trace_module(module, inputs, layers)
    except InputError:  # an encoder that cannot be cut inside
        traced = trace_module(module, inputs, ())
    nodes = list(traced.module.graph.nodes)
    end, _ = find_last_layer(module, traced, classes)
    costs: dict[torch.fx.Node, int] = {}
    fit: set[torch.fx.Node] = set()

    class Counter(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            with FlopCounterMode(display=False) as counter:
                made = super().run_node(n)
            costs[n] = next(reversed(costs.values()), 0) + counter.get_total_flops()
            if isinstance(made, Tensor) and made.is_floating_point() and 2 <= made.dim() <= 5:
                fit.add(n)
            return made

    with _slow_attention():  # whose products can be counted
        Counter(traced.module).run(*traced.inputs(inputs.with_batch_size(PROBE_BATCH_SIZES[0])))
    position = {node: i for i, node in enumerate(nodes)}
    last_use = {node: max((position[user] for user in node.users), default=-1) for node in nodes}

    def live(node: torch.fx.Node) -> int:
        here = position[node]
        return sum(position[n] <= here < last_use[n] for n in nodes if n.op not in ("get_attr", "output"))

    names: dict[torch.fx.Node, str] = {}
    for name, calls in sorted(traced.outputs.items(), key=lambda item: -len(item[0])):  # of one place the shortest
        node = calls[0] if len(calls) == 1 else None
        if isinstance(node, torch.fx.Node) and node in fit and 0 < costs[node] < costs[end]:
            names[node] = name
    best: dict[int, tuple[int, torch.fx.Node]] = {}  # by cost: how much is carried there, and where it is least
    for node in sorted(names, key=position.__getitem__):
        carried = live(node)
        if costs[node] not in best or carried <= best[costs[node]][0]:
            best[costs[node]] = (carried, node)
    places = sorted(best)
    if len(places) < exits - 1:
        raise InputError(f"the module has {len(places)} places to cut at, not the {exits - 1} that {exits} exits take")
    chosen: list[str] = []
    start = 0
    for j in range(1, exits):
        found = min(
            range(start, len(places) - (exits - 1 - j)),
            key=lambda i: abs(places[i] / costs[end] - j / exits) + 0.05 * (best[places[i]][0] - 1),
        )
        chosen.append(names[best[places[found]][1]])
        start = found + 1
    return traced, chosen
