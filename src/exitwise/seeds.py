"""Everything random takes a seed or a generator."""

from hashlib import blake2b

import torch

from exitwise.errors import InputError


def generator_of(seed: int | torch.Generator) -> torch.Generator:
    """A generator as it is, or a new one from a seed."""
    if isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"`seed` must be a torch.Generator or a whole number from 0 to 2^63 - 1, but got {seed!r}")
    return torch.Generator().manual_seed(seed)


def seed_for(*key: int) -> int:
    """A seed that belongs to a key such as (seed, epoch, batch): another key has an unrelated one."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(*key: int) -> torch.Generator:
    """A new generator with the seed that belongs to a key."""
    return torch.Generator().manual_seed(seed_for(*key))
