"""Stages of a cut module, and the layout of the live values between them: per sample, shared, or sizes."""

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
    """Tensor with samples along dimension `dim`, `rows_per_sample` consecutive rows for each."""

    dim: int
    rows_per_sample: int = 1

    def pack(self, value: Any) -> Any:
        """Return the value with samples along the first dimension, so that it can be compacted."""
        if self.rows_per_sample > 1:
            value = value.unflatten(self.dim, (-1, self.rows_per_sample))
        return value.movedim(self.dim, 0) if self.dim else value

    def unpack(self, packed: Any, length: Any) -> Any:
        """Return the value in its original layout; `length` is the number of samples."""
        value = packed.movedim(0, self.dim) if self.dim else packed
        return value.flatten(self.dim, self.dim + 1) if self.rows_per_sample > 1 else value


@dataclass(frozen=True, eq=False)
class SharedTensor:
    """A tensor of the stage state without a sample dimension, wrapped so that compaction skips it."""

    value: Tensor


@dataclass(frozen=True)
class Shared:
    """Tensor without a sample dimension."""

    def pack(self, value: Any) -> Any:
        return SharedTensor(value)

    def unpack(self, packed: Any, length: Any) -> Any:
        return packed.value


@dataclass(frozen=True)
class BatchMultiple:
    """Whole number that is `factor` times the batch size; it is recomputed after the cut."""

    factor: int

    def pack(self, value: Any) -> Any:
        return None

    def unpack(self, packed: Any, length: Any) -> Any:
        return self.factor * length


@dataclass(frozen=True)
class Constant:
    """Any other value; it crosses the cut unchanged."""

    def pack(self, value: Any) -> Any:
        return value

    def unpack(self, packed: Any, length: Any) -> Any:
        return packed


ValueKind = PerSample | Shared | BatchMultiple | Constant
Kinds = Any  # a ValueKind, or nested lists and dicts of them with the structure of the value


def infer_kinds(name: str, two: Any, three: Any) -> Kinds:
    """Infer the kind of every part of a live value from its values in batches of two and three samples."""
    if isinstance(two, dict) and isinstance(three, dict) and two.keys() == three.keys():
        return {key: infer_kinds(name, two[key], three[key]) for key in two}
    if isinstance(two, list | tuple) and isinstance(three, list | tuple) and len(two) == len(three):
        return [infer_kinds(name, a, b) for a, b in zip(two, three, strict=True)]
    if isinstance(two, Tensor) and isinstance(three, Tensor):
        return _infer_tensor_kind(name, two, three)
    if isinstance(two, Tensor) or isinstance(three, Tensor) or two != three:
        factor = _batch_factor(two, three)
        if factor is None:
            raise _mixing_error(name, f"{two!r} and {three!r}")
        return BatchMultiple(factor)
    return Constant()


def _infer_tensor_kind(name: str, two: Tensor, three: Tensor) -> ValueKind:
    changed = [d for d, (a, b) in enumerate(zip(two.shape, three.shape, strict=False)) if a != b]
    if two.dim() == three.dim() and not changed and (two.is_meta or torch.equal(two, three)):
        return Shared()
    if two.dim() == three.dim() and len(changed) == 1:
        factor = _batch_factor(two.shape[changed[0]], three.shape[changed[0]])
        if factor is not None:
            return PerSample(changed[0], factor)
    raise _mixing_error(name, f"of shapes {tuple(two.shape)} and {tuple(three.shape)}")


def _batch_factor(two: Any, three: Any) -> int | None:
    """Return the factor between a number and the batch size, or None if it is not a multiple of the batch size."""
    if any(isinstance(value, bool) or not isinstance(value, int) for value in (two, three)):
        return None
    factor, remainder = divmod(two, PROBE_BATCH_SIZES[0])
    return factor if factor and not remainder and factor * PROBE_BATCH_SIZES[1] == three else None


def _mixing_error(name: str, values: str) -> InputError:
    return InputError(
        f"{name!r} crosses a cut and mixes the samples of a batch ({values} for {PROBE_BATCH_SIZES[0]} and "
        f"{PROBE_BATCH_SIZES[1]} samples): cut elsewhere, or {BUILD_STAGES_HINT}"
    )


def _iter_parts(kinds: Kinds, value: Any) -> Iterator[tuple[ValueKind, Any]]:
    """Yield each kind with its part of the value."""
    if isinstance(kinds, dict):
        for key, kind in kinds.items():
            yield from _iter_parts(kind, value[key])
    elif isinstance(kinds, list):
        for kind, part in zip(kinds, value, strict=True):
            yield from _iter_parts(kind, part)
    else:
        yield kinds, value


def _map_parts(kinds: Kinds, value: Any, function: Callable[[ValueKind, Any], Any]) -> Any:
    """Apply `function` to each kind and its part of the value; lists of whole numbers become a torch.Size."""
    if isinstance(kinds, dict):
        return {key: _map_parts(kind, value[key], function) for key, kind in kinds.items()}
    if isinstance(kinds, list):
        parts = tuple(_map_parts(kind, part, function) for kind, part in zip(kinds, value, strict=True))
        return torch.Size(parts) if parts and all(type(part) is int for part in parts) else parts
    return function(kinds, value)


@dataclass(frozen=True)
class StateLayout:
    """Layout of the live values at a cut: one tensor with samples first, or a dict of several values."""

    kinds: Mapping[str, Kinds]

    @property
    def single(self) -> bool:
        """True if the state is one tensor instead of a dict."""
        return list(self.kinds.values()) == [PerSample(0)]

    def pack(self, values: Sequence[Any]) -> Any:
        """Return the stage state that holds the live values."""
        if self.single:
            return values[0]
        named = dict(zip(self.kinds, values, strict=True))
        return _map_parts(dict(self.kinds), named, lambda kind, part: kind.pack(part))

    def unpack(self, state: Any) -> list[Any]:
        """Return the live values of a stage state, sizes recomputed for its number of samples."""
        if self.single:
            return [state]
        length = next(
            part.shape[0] for kind, part in _iter_parts(dict(self.kinds), state) if isinstance(kind, PerSample)
        )
        return list(_map_parts(dict(self.kinds), state, lambda kind, part: kind.unpack(part, length)).values())


class Subgraph(fx.GraphModule):
    """Part of a graph whose copies keep non-persistent buffers out of their state dict, too."""

    def __deepcopy__(self, memo: Any) -> fx.GraphModule:
        subgraph_copy = super().__deepcopy__(memo)
        persistent = self.state_dict()
        for name, buffer in list(subgraph_copy.named_buffers(recurse=False)):
            subgraph_copy.register_buffer(name, buffer, persistent=name in persistent)
        return subgraph_copy


class FirstStage(nn.Module):
    """Graph up to the first cut. Takes the module's inputs: a tensor, a list or tuple, or a dict by name."""

    def __init__(self, body: fx.GraphModule, names: Sequence[str], outputs: StateLayout) -> None:
        super().__init__()
        self.body, self.names, self._outputs = body, tuple(names), outputs

    def forward(self, x: Any) -> Any:
        if len(self.names) == 1 and not isinstance(x, Mapping | list | tuple):
            return self._outputs.pack(run_graph(self.body, [x]))
        inputs = ModuleInputs.of(x)
        if len(inputs.tensors) != len(self.names) or (inputs.kwargs and not inputs.kwargs.keys() >= set(self.names)):
            got = ", ".join(inputs.kwargs) or f"{len(inputs.tensors)} without names"
            raise InputError(f"the net takes the inputs {', '.join(self.names)}, as in `example_inputs`, but got {got}")
        values = [inputs.kwargs[name] for name in self.names] if inputs.kwargs else inputs.tensors
        return self._outputs.pack(run_graph(self.body, values))


class LaterStage(nn.Module):
    """Graph between two cuts.

    With `copies` it copies its input first, because it has in-place operations: heads read that input, and gradients
    need it.
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
    """Input of a head: one value of a state that has several, or one part of that value."""

    def __init__(self, name: str, part: int | None) -> None:
        super().__init__()
        self._name, self._part = name, part

    def forward(self, state: Any) -> Any:
        value = state[self._name]
        return value if self._part is None else value[self._part]

    def macs(self, inputs: tuple[Any, ...], output: Any) -> int:
        return 0


def run_full_batch(stages: Iterable[nn.Module], inputs: ModuleInputs) -> Any:
    """Run all stages and return the last output; set `copies` of the stages that change their input in place."""
    state = inputs.as_given
    for k, stage in enumerate(stages):
        before = list(iter_tensors(state))
        versions = [tensor._version for tensor in before]
        state = _run_stage(stage, k, state)
        if isinstance(stage, LaterStage):
            stage.copies = versions != [tensor._version for tensor in before]
    return state


def run_shrinking_batch(stages: Iterable[nn.Module], inputs: ModuleInputs) -> tuple[Any, Tensor]:
    """Run the stages, dropping one sample and reversing the rest before each.

    Returns the output of the last stage and the indices of the remaining samples.
    """
    state = inputs.as_given
    remaining = torch.arange(num_samples(state))
    for k, stage in enumerate(stages):
        rows = torch.arange(1, len(remaining)).flip(0)
        remaining = remaining[rows]
        state = _run_stage(stage, k, map_tensors(lambda tensor, rows=rows: tensor[rows], state))
    return state, remaining


def _run_stage(stage: nn.Module, k: int, state: Any) -> Any:
    try:
        return stage(state)
    except Exception as error:
        raise InputError(f"stage {k} cannot run on a batch of {num_samples(state)}: {first_line(error)}") from None
