"""Everything random takes a seed or a generator."""

import torch

from exitwise.errors import InputError


def generator_of(seed: int | torch.Generator) -> torch.Generator:
    """A generator as it is, or a new one from a seed."""
    if isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"`seed` must be a torch.Generator or a whole number from 0 to 2^63 - 1, but got {seed!r}")
    return torch.Generator().manual_seed(seed)
