"""Split of validation samples into tuning and held-out samples: one function, so that a seed gives one split."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from exitwise.core.errors import InputError


def split_held_out(samples: int, fraction: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return sorted positions to tune on and, a `fraction` of all `samples`, to hold out.

    Calibration comes before policies, so this is where both can import it from: one seed holds out the same samples,
    whether `fit_policy`, `Trace.hold_out` or a command draws them.
    """
    held_out = round(samples * fraction) if 0 < fraction < 1 else 0
    if not 0 < held_out < samples:
        raise InputError(
            f"{samples} samples cannot be split into some to tune on and a fraction of {fraction} to hold out"
        )
    order = np.random.default_rng(seed).permutation(samples)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
