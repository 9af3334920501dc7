"""Of several processes that run the same command, one speaks."""

import os


def is_rank_zero() -> bool:
    """Whether this is the process that speaks, known from the environment before any process group exists."""
    return all(int(os.environ.get(name) or 0) == 0 for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))
