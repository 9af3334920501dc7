"""Distributed helpers: rank, sharding, reductions and broadcasts. No-ops in a single process."""

from collections.abc import Callable, Iterable
from itertools import islice, zip_longest
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from exitwise.core.errors import AllRanksError, InputError

T = TypeVar("T")


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def shard_batches(loader: Iterable[T]) -> Iterable[T]:
    """Return this rank's shard of a loader: every batch of the loader belongs to exactly one rank."""
    if world_size() == 1:
        return loader
    if hasattr(loader, "shard"):  # reads only its own batches
        shard: Iterable[T] = loader.shard(rank(), world_size())
        return shard
    return islice(loader, rank(), None, world_size())


def all_reduce_sum(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks, on the device of `values`."""
    if world_size() == 1:
        return values
    summed = values.detach().to(_device(), copy=True)
    dist.all_reduce(summed)
    return summed.to(values.device)


def gather_batches(batches: list[Tensor]) -> Tensor:
    """Return the rows of all ranks' batches, in the order of the loader from which `shard_batches` took them.

    Each rank writes its rows into a tensor of zeros at their final positions, and the tensors are summed. The list
    `batches` is emptied, to free memory early.
    """
    if world_size() == 1:
        return torch.cat(batches)
    own_specs = [(len(batch), batch.shape[1:], batch.dtype) for batch in batches]
    specs_by_rank: list[list[tuple[int, torch.Size, torch.dtype]]] = [[] for _ in range(world_size())]
    dist.all_gather_object(specs_by_rank, own_specs)
    _, shape, dtype = specs_by_rank[0][0]  # rank 0 has the first batch
    rows = torch.zeros(sum(size for specs in specs_by_rank for size, *_ in specs), *shape, dtype=dtype)
    start = 0
    for specs in zip_longest(*specs_by_rank):
        for owner, spec in enumerate(specs):
            if spec is None:
                continue
            if owner == rank():
                rows[start : start + spec[0]] = batches.pop(0)
            start += spec[0]
    return all_reduce_sum(rows)


def broadcast_object(value: T) -> T:
    """Return rank 0's `value` on every rank."""
    if world_size() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def run_on_rank_zero(act: Callable[[], T]) -> T:
    """Call `act` on rank 0 and broadcast its result, or its error, to all ranks."""
    if world_size() == 1:
        return act()
    value: T | None = None
    problem: str | None = None
    if rank() == 0:
        try:
            value = act()
        except (InputError, OSError) as error:
            problem = str(error)
    value, problem = broadcast_object((value, problem))
    if problem is not None:
        raise AllRanksError(problem)
    return value  # type: ignore[return-value]


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors of every rank with those of rank 0."""
    if world_size() > 1:
        for tensor in tensors:
            shared = tensor.detach().to(_device(), copy=True)
            dist.broadcast(shared, 0)
            tensor.detach().copy_(shared)


def _device() -> torch.device:
    """Return the device for collectives: NCCL supports only GPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
