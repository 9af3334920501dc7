"""Nested states that stages pass on: a tensor, or lists, tuples and mappings of tensors, one row per sample each.

`torch.utils._pytree` cannot replace these functions: it takes mappings and sequences of unregistered types, such as the
`UserDict` that tokenizers return, for leaves, so their tensors would be missed.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from exitwise.core.errors import InputError


def map_tensors(function: Callable[..., Tensor], *states: Any) -> Any:
    """Apply `function` to corresponding tensors of nested states; other leaves are returned unchanged.

    The result has the structure of the first state; every mapping becomes a dict.
    """
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
    """Iterate over the tensors of a state, in order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for part in state.values() if isinstance(state, Mapping) else state:
            yield from iter_tensors(part)


def replace_tensors(state: Any, new: Iterator[Tensor]) -> Any:
    """Return a state of the same structure with its tensors replaced by those of `new`, in order."""
    return map_tensors(lambda _: next(new), state)


def num_samples(state: Any, name: str = "a state") -> int:
    """Return the number of samples; raise InputError unless all tensors have the same first dimension."""
    lengths = {len(tensor) if tensor.dim() else -1 for tensor in iter_tensors(state)}
    if len(lengths) != 1 or lengths == {-1}:
        shapes = [tuple(tensor.shape) for tensor in iter_tensors(state)]
        raise InputError(f"{name} must hold tensors with one entry per sample first, but holds {shapes}")
    return lengths.pop()


def first_sample(state: Any) -> Any:
    """Return the first sample of a state as a batch of one, or zeros if the state has no samples."""
    return map_tensors(lambda tensor: tensor[:1] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:]), state)


def describe(state: Any) -> str:
    """Return the structure of a state with the types and shapes of its tensors, as text for messages."""
    if isinstance(state, Tensor):
        return f"{str(state.dtype).removeprefix('torch.')} {tuple(state.shape)}"
    if isinstance(state, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(part)}" for key, part in state.items()) + "}"
    if isinstance(state, list | tuple):
        return f"{type(state).__name__} of [{', '.join(map(describe, state))}]"
    return type(state).__name__
