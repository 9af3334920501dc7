"""Seeds and random generators."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from exitwise.core.checks import is_integer
from exitwise.core.errors import InputError


def as_generator(seed: int | torch.Generator) -> torch.Generator:
    """Return a generator unchanged, or a new one from a seed."""
    if isinstance(seed, torch.Generator):
        return seed
    if not is_integer(seed) or not 0 <= seed < 2**63:
        raise InputError(f"`seed` must be a torch.Generator or a whole number from 0 to 2^63 - 1, but got {seed!r}")
    return torch.Generator().manual_seed(int(seed))


def derive_seed(*key: int) -> int:
    """Return a seed for a key such as (seed, epoch, batch); different keys give unrelated seeds."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Seed PyTorch's global RNG inside the block and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def derive_generator(*key: int) -> torch.Generator:
    """Return a new generator with the seed derived from a key."""
    return torch.Generator().manual_seed(derive_seed(*key))
