"""Everything random takes a seed or a generator."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from exitwise.core.errors import InputError


def as_generator(seed: int | torch.Generator) -> torch.Generator:
    """A generator as it is, or a new one from a seed."""
    if isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"`seed` must be a torch.Generator or a whole number from 0 to 2^63 - 1, but got {seed!r}")
    return torch.Generator().manual_seed(seed)


def derive_seed(*key: int) -> int:
    """A seed that belongs to a key such as (seed, epoch, batch): another key has an unrelated one."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """PyTorch's own numbers from a seed, for a net that is built; afterwards they go on as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def derive_generator(*key: int) -> torch.Generator:
    """A new generator with the seed that belongs to a key."""
    return torch.Generator().manual_seed(derive_seed(*key))
