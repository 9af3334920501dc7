"""When stopping is right: the target that exit scores are judged by and learned from. NumPy only."""

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.predictions import Array


def stopping_is_right(correct: Array) -> Array:
    """Return (K, n) whether stopping is right at each exit: it is correct, or every later exit is wrong.

    At the last exit stopping is always right.

    Args:
        correct: Whether each exit is correct (K, n).

    Returns:
        Mask (K, n).

    Raises:
        InputError: If `correct` is not a mask with two axes.

    Example:
        >>> import exitwise as ew
        >>> import numpy as np
        >>> correct = np.array([[True, False, False], [True, True, False]])  # 2 exits, 3 samples
        >>> ew.metrics.stopping_is_right(correct).tolist()
        [[True, False, True], [True, True, True]]
    """
    mask = np.asarray(correct)
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise InputError(f"`correct` must be a mask (exits, samples), but got {mask.dtype} {mask.shape}")
    later_correct = np.zeros_like(mask)
    later_correct[:-1] = np.logical_or.accumulate(mask[:0:-1], axis=0)[::-1]
    return np.asarray(mask | ~later_correct)
