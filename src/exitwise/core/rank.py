"""Rank of this process from the environment, without torch."""

import os


def is_rank_zero() -> bool:
    """Return whether this is rank 0, the rank that prints; works before a process group exists."""
    return all(int(os.environ.get(name) or 0) == 0 for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))
