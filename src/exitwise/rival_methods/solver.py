"""Minimization of convex functions in float64: L-BFGS, with a result that is never worse than the start."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Objective = Callable[[Tensor], tuple[float, Tensor]]  # value and gradient (d,) at a point (d,)

_HISTORY = 20  # steps that the Hessian is estimated from
_SUFFICIENT = 1e-4  # share of the decrease that the slope promises
_MAX_HALVINGS = 40


def minimize(objective: Objective, start: Tensor, max_steps: int = 300, precision: float = 1e-6) -> Tensor:
    """Return the point (d,) where L-BFGS with a backtracking line search ends; its value is at most that of `start`.

    It takes no optimizer of torch: importing those takes seconds.

    Args:
        objective: Function that returns its value and its gradient (d,).
        start: First point (d,), float64, with a finite value.
        max_steps: Largest number of steps.
        precision: Largest absolute value in the gradient at which the search ends.

    Returns:
        The minimum that was found.
    """
    point = start
    value, gradient = objective(point)
    history: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=_HISTORY)
    for _ in range(max_steps):
        if not float(gradient.abs().max()) > precision:
            break
        direction = -_inverse_hessian_product(history, gradient)
        slope = float(direction @ gradient)
        if not slope < 0:
            break
        # Without a history the direction has no scale.
        size = 1.0 if history else min(1.0, 1 / float(gradient.norm()))
        for _ in range(_MAX_HALVINGS):
            moved = point + size * direction
            new_value, new_gradient = objective(moved)
            if new_value <= value + _SUFFICIENT * size * slope:  # False for NaN
                break
            size /= 2
        else:
            break
        step, change = moved - point, new_gradient - gradient
        curvature = float(step @ change)
        if curvature > 1e-14 * float(change @ change):
            history.append((step, change, 1 / curvature))
        point, value, gradient = moved, new_value, new_gradient
    return point


def _inverse_hessian_product(history: Sequence[tuple[Tensor, Tensor, float]], gradient: Tensor) -> Tensor:
    """Return the product (d,) of the inverse Hessian, as estimated from steps and changes of the gradient."""
    result = gradient.clone()
    factors = []
    for step, change, inverse in reversed(history):
        factors.append(inverse * float(step @ result))
        result -= factors[-1] * change
    if history:
        step, change, inverse = history[-1]
        result /= inverse * float(change @ change)
    for (step, change, inverse), factor in zip(history, reversed(factors), strict=True):
        result += (factor - inverse * float(change @ result)) * step
    return result


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Return the mean of -log p(true label) and its gradient (n, c) with respect to logits (n, c).

    `logits` are overwritten.
    """
    rows = torch.arange(len(labels))
    log_norm = logits.logsumexp(dim=1, keepdim=True)
    loss = float((log_norm[:, 0] - logits[rows, labels]).mean())
    gradient = logits.sub_(log_norm).exp_()
    gradient[rows, labels] -= 1
    return loss, gradient.div_(len(labels))
