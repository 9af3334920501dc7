"""What crosses a cut: values that belong to samples, values that all samples have in common, and sizes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from exitwise.core.errors import InputError, first_line
from exitwise.core.nested import iter_tensors, map_tensors, num_samples
from exitwise.models.attach.graph import BUILD_STAGES_HINT, PROBE_BATCH_SIZES, ModuleInputs, run_graph


@dataclass(frozen=True)
class PerSample:
    """A tensor of samples, which go along dimension `dim`, `each` in a row belonging to one."""

    dim: int
    rows_per_sample: int = 1

    def pack(self, value: Any) -> Any:
        if self.rows_per_sample > 1:
            value = value.unflatten(self.dim, (-1, self.rows_per_sample))
        return value.movedim(self.dim, 0) if self.dim else value

    def unpack(self, packed: Any, length: Any) -> Any:
        value = packed.movedim(0, self.dim) if self.dim else packed
        return value.flatten(self.dim, self.dim + 1) if self.rows_per_sample > 1 else value


@dataclass(frozen=True, eq=False)
class SharedTensor:
    """A tensor in a state that all samples have in common, so that there is nothing to compact."""

    value: Tensor


@dataclass(frozen=True)
class Shared:
    """A tensor that all samples have in common."""

    def pack(self, value: Any) -> Any:
        return SharedTensor(value)

    def unpack(self, packed: Any, length: Any) -> Any:
        return packed.value


@dataclass(frozen=True)
class BatchMultiple:
    """A number that grows with the batch, so much for every sample: it is counted again behind the cut."""

    factor: int

    def pack(self, value: Any) -> Any:
        return None

    def unpack(self, packed: Any, length: Any) -> Any:
        return self.factor * length


@dataclass(frozen=True)
class Constant:
    """Anything else, which stays what it is."""

    def pack(self, value: Any) -> Any:
        return value

    def unpack(self, packed: Any, length: Any) -> Any:
        return packed


ValueKind = PerSample | Shared | BatchMultiple | Constant
Kinds = Any  # a kind, or nested lists and dicts of kinds, as the value has them


def infer_kinds(name: str, two: Any, three: Any) -> Kinds:
    """What every part of a value is, from what it was in batches of two sizes."""
    if isinstance(two, dict) and isinstance(three, dict) and two.keys() == three.keys():
        return {key: infer_kinds(name, two[key], three[key]) for key in two}
    if isinstance(two, list | tuple) and isinstance(three, list | tuple) and len(two) == len(three):
        return [infer_kinds(name, a, b) for a, b in zip(two, three, strict=True)]
    if isinstance(two, Tensor) and isinstance(three, Tensor):
        return _tensor_kind(name, two, three)
    if isinstance(two, Tensor) or isinstance(three, Tensor) or two != three:
        factor = _factor(two, three)
        if factor is None:
            raise _mixed(name, f"{two!r} and {three!r}")
        return BatchMultiple(factor)
    return Constant()


def _tensor_kind(name: str, two: Tensor, three: Tensor) -> ValueKind:
    changed = [d for d, (a, b) in enumerate(zip(two.shape, three.shape, strict=False)) if a != b]
    if two.dim() == three.dim() and not changed and (two.is_meta or torch.equal(two, three)):
        return Shared()
    if two.dim() == three.dim() and len(changed) == 1:
        factor = _factor(two.shape[changed[0]], three.shape[changed[0]])
        if factor is not None:
            return PerSample(changed[0], factor)
    raise _mixed(name, f"of shapes {tuple(two.shape)} and {tuple(three.shape)}")


def _factor(two: Any, three: Any) -> int | None:
    """How much a number grows with each sample, if that is all that it does."""
    if any(isinstance(value, bool) or not isinstance(value, int) for value in (two, three)):
        return None
    factor, left = divmod(two, PROBE_BATCH_SIZES[0])
    return factor if factor and not left and factor * PROBE_BATCH_SIZES[1] == three else None


def _mixed(name: str, how: str) -> InputError:
    return InputError(
        f"{name!r} lies across a cut and mixes the samples of a batch "
        f"({how} for {PROBE_BATCH_SIZES[0]} and {PROBE_BATCH_SIZES[1]} samples): cut elsewhere, or {BUILD_STAGES_HINT}"
    )


def _parts(kinds: Kinds, value: Any) -> Iterator[tuple[ValueKind, Any]]:
    """Each kind with its part of the value."""
    if isinstance(kinds, dict):
        for key, each in kinds.items():
            yield from _parts(each, value[key])
    elif isinstance(kinds, list):
        for each, part in zip(kinds, value, strict=True):
            yield from _parts(each, part)
    else:
        yield kinds, value


def _mapped(kinds: Kinds, value: Any, function: Callable[[ValueKind, Any], Any]) -> Any:
    if isinstance(kinds, dict):
        return {key: _mapped(each, value[key], function) for key, each in kinds.items()}
    if isinstance(kinds, list):
        parts = tuple(_mapped(each, part, function) for each, part in zip(kinds, value, strict=True))
        return torch.Size(parts) if parts and all(type(part) is int for part in parts) else parts
    return function(kinds, value)


@dataclass(frozen=True)
class StateLayout:
    """How the values that cross a cut are laid out: one tensor by itself, or several by name."""

    kinds: Mapping[str, Kinds]

    @property
    def single(self) -> bool:
        return list(self.kinds.values()) == [PerSample(0)]

    def pack(self, values: Sequence[Any]) -> Any:
        if self.single:
            return values[0]
        named = dict(zip(self.kinds, values, strict=True))
        return _mapped(dict(self.kinds), named, lambda kind, part: kind.pack(part))

    def unpack(self, state: Any) -> list[Any]:
        if self.single:
            return [state]
        length = next(part.shape[0] for kind, part in _parts(dict(self.kinds), state) if isinstance(kind, PerSample))
        return list(_mapped(dict(self.kinds), state, lambda kind, part: kind.unpack(part, length)).values())


class Subgraph(fx.GraphModule):
    """A part of a graph, of which copies hold the same buffers back from files."""

    def __deepcopy__(self, memo: Any) -> fx.GraphModule:
        twin = super().__deepcopy__(memo)
        kept = self.state_dict()
        for name, buffer in list(twin.named_buffers(recurse=False)):
            twin.register_buffer(name, buffer, persistent=name in kept)
        return twin


class FirstStage(nn.Module):
    """The graph up to the first cut; takes what the module takes: one tensor, several in a row, or by name."""

    def __init__(self, body: fx.GraphModule, names: Sequence[str], outputs: StateLayout) -> None:
        super().__init__()
        self.body, self.names, self._outputs = body, tuple(names), outputs

    def forward(self, x: Any) -> Any:
        if len(self.names) == 1 and not isinstance(x, Mapping | list | tuple):
            return self._outputs.pack(run_graph(self.body, [x]))
        given = ModuleInputs.of(x)
        if len(given.tensors) != len(self.names) or (given.kwargs and not given.kwargs.keys() >= set(self.names)):
            found = ", ".join(given.kwargs) or f"{len(given.tensors)} in a row"
            raise InputError(f"the net takes {', '.join(self.names)}, as it was made for, but got {found}")
        values = [given.kwargs[name] for name in self.names] if given.kwargs else given.tensors
        return self._outputs.pack(run_graph(self.body, values))


class LaterStage(nn.Module):
    """The graph between two cuts.

    With `copies` it works in place, but not on what it gets: heads have read that, and gradients will need it.
    """

    def __init__(self, body: fx.GraphModule, inputs: StateLayout, outputs: StateLayout) -> None:
        super().__init__()
        self.body, self._inputs, self._outputs = body, inputs, outputs
        self.copies = False

    def forward(self, state: Any) -> Any:
        if self.copies:
            state = map_tensors(torch.clone, state)
        return self._outputs.pack(run_graph(self.body, self._inputs.unpack(state)))


class SelectValue(nn.Module):
    """What a head reads of a state that has several values: one of them, or its first part."""

    def __init__(self, name: str, part: int | None) -> None:
        super().__init__()
        self._name, self._part = name, part

    def forward(self, state: Any) -> Any:
        value = state[self._name]
        return value if self._part is None else value[self._part]

    def macs(self, inputs: tuple[Any, ...], output: Any) -> int:
        return 0


def run_full_batch(stages: Iterable[nn.Module], inputs: ModuleInputs) -> Any:
    """What the last stage gives when nobody leaves; finds out which stages must copy what they get."""
    state = inputs.as_given
    for k, stage in enumerate(stages):
        before = list(iter_tensors(state))
        versions = [tensor._version for tensor in before]
        state = _run(stage, k, state)
        if isinstance(stage, LaterStage):
            stage.copies = versions != [tensor._version for tensor in before]
    return state


def run_shrinking_batch(stages: Iterable[nn.Module], inputs: ModuleInputs) -> tuple[Any, Tensor]:
    """What the last stage gives when before each stage a sample leaves and the others change places; who is left."""
    state = inputs.as_given
    left = torch.arange(num_samples(state))
    for k, stage in enumerate(stages):
        rest = torch.arange(1, len(left)).flip(0)
        left, state = left[rest], _run(stage, k, map_tensors(lambda tensor, rest=rest: tensor[rest], state))
    return state, left


def _run(stage: nn.Module, k: int, state: Any) -> Any:
    try:
        return stage(state)
    except Exception as error:
        raise InputError(f"stage {k} cannot run on a batch of {num_samples(state)}: {first_line(error)}") from None
