"""What stages hand on: a tensor, or nested lists, tuples and dicts of tensors, every one of them per sample."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from exitwise.core.errors import InputError


def map_tensors(function: Callable[..., Tensor], *states: Any) -> Any:
    """A state of the same structure with `function` of the tensors in the same place; what is no tensor stays."""
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    if isinstance(first, Mapping):
        return {key: map_tensors(function, *(state[key] for state in states)) for key in first}
    if isinstance(first, list | tuple):
        parts = [map_tensors(function, *parts) for parts in zip(*states, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def iter_tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, in order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for part in state.values() if isinstance(state, Mapping) else state:
            yield from iter_tensors(part)


def replace_tensors(state: Any, new: Iterator[Tensor]) -> Any:
    """A state of the same structure with other tensors."""
    return map_tensors(lambda _: next(new), state)


def num_samples(state: Any, name: str = "a state") -> int:
    """How many samples it has; every tensor must have as many."""
    found = {len(tensor) if tensor.dim() else -1 for tensor in iter_tensors(state)}
    if len(found) != 1 or found == {-1}:
        shapes = [tuple(tensor.shape) for tensor in iter_tensors(state)]
        raise InputError(f"{name} must hold tensors with one entry per sample first, but holds {shapes}")
    return found.pop()


def first_sample(state: Any) -> Any:
    """Its first sample, or zeros in the place of one."""
    return map_tensors(lambda tensor: tensor[:1] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:]), state)


def describe(state: Any) -> str:
    """Types and shapes of its tensors in their places, in words."""
    if isinstance(state, Tensor):
        return f"{str(state.dtype).removeprefix('torch.')} {tuple(state.shape)}"
    if isinstance(state, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(part)}" for key, part in state.items()) + "}"
    if isinstance(state, list | tuple):
        return f"{type(state).__name__} of [{', '.join(map(describe, state))}]"
    return type(state).__name__
