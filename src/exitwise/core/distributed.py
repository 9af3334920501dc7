"""One process of several: who it is, its share of the batches, and sums over all. Alone, all of it does nothing."""

from collections.abc import Callable, Iterable
from itertools import islice, zip_longest
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from exitwise.core.errors import AllRanksError, InputError

T = TypeVar("T")


def world_size() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def shard_batches(loader: Iterable[T]) -> Iterable[T]:
    """This process's share of a loader's batches: whole batches, none twice, none left out."""
    if world_size() == 1:
        return loader
    if hasattr(loader, "shard"):  # reads only what it needs
        shard: Iterable[T] = loader.shard(rank(), world_size())
        return shard
    return islice(loader, rank(), None, world_size())


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum of every process's values, on the device where they were."""
    if world_size() == 1:
        return values
    summed = values.detach().to(_device(), copy=True)
    dist.all_reduce(summed)
    return summed.to(values.device)


def gather_batches(batches: list[Tensor]) -> Tensor:
    """The rows of all processes' batches, in the order of the loader that they were dealt from.

    Each process puts its rows where they belong among zeros, and the sum is the whole. The batches are used up.
    """
    if world_size() == 1:
        return torch.cat(batches)
    described = [(len(batch), batch.shape[1:], batch.dtype) for batch in batches]
    everyone: list[list[tuple[int, torch.Size, torch.dtype]]] = [[] for _ in range(world_size())]
    dist.all_gather_object(everyone, described)
    _, shape, dtype = everyone[0][0]  # the first process has the first batch
    whole = torch.zeros(sum(size for theirs in everyone for size, *_ in theirs), *shape, dtype=dtype)
    start = 0
    for turn in zip_longest(*everyone):
        for owner, found in enumerate(turn):
            if found is None:
                continue
            if owner == rank():
                whole[start : start + found[0]] = batches.pop(0)
            start += found[0]
    return all_reduce_sum(whole)


def broadcast_object(value: T) -> T:
    """The first process's value."""
    if world_size() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def run_on_rank_zero(act: Callable[[], T]) -> T:
    """What an act of the first process gives, in all of them; an error of it is everybody's."""
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
    """Overwrite every process's tensors by the first one's."""
    if world_size() > 1:
        for tensor in tensors:
            shared = tensor.detach().to(_device(), copy=True)
            dist.broadcast(shared, 0)
            tensor.detach().copy_(shared)


def _device() -> torch.device:
    """Where collectives work: NCCL knows only GPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
