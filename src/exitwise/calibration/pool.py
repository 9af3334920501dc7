"""Fit of the log-linear pool: logits of exit k = sum_j a_kj log p_j + b_k over the exits j <= k, with a_kj >= 0.

The weights of an exit minimize its validation NLPD, which is convex in them, by Newton steps on the weights that are
not at zero. Temperature alone is a member of the family: a_kk = 1 / T, and all other weights are zero. The search
starts there, and the penalty draws the weights to it:

    n NLPD(a, b) + sum_j tau_j / 2 (a_kj - [j = k] / T_k)^2 + rho / 2 |b_k|^2          tau_j = 5 T_j^2

At temperature alone the penalty is zero, so the NLPD at the minimum is not above it. The penalty expects weights to
differ by about half of what an exit would have alone, whatever the scale of its logits; it counts about as much as ten
samples do.

A weight is set to zero if the others do as well without it by Akaike's criterion: less than one nat over all samples.
Whether there are other weights at all, and whether there is a bias and how strong, is decided by the leave-one-out
NLPD, approximated by one Newton step per sample:

    NLPD_loo = NLPD + 1/n sum_i g_i^T H^-1 g_i          g_i: gradient of sample i, H: Hessian of the sum above

The weights with the lowest NLPD may still be too modest or too sure on average: a few samples with very low
probabilities decide them. Where the mean confidence differs from the accuracy by g, more than its standard error s, all
weights and the bias are multiplied by the factor that leaves a difference of s^2 / g, as far as the NLPD does not rise
above that of temperature alone. This is the positive-part James-Stein estimate: what chance explains is not corrected.

With `W_opt`, exit k adds the bands of its own last layer (`exitwise.calibration.bands`), with weights d_k of either
sign that the same penalty draws to zero, if that lowers the leave-one-out NLPD:

    logits of exit k = sum_j a_kj log p_j + sum_i d_ki W_i phi~ + b_k

These are nine numbers per exit, so that predictions of the samples they are fitted on are hardly better than those of
new ones, and thresholds can be fitted on them. With many samples and classes, some samples are enough to find d_k. Its
sum is then one more expert, so that the rules above hold for all samples.

Sums over samples are those of `exitwise.calibration.pool_objective`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from exitwise.calibration.bands import NUM_BANDS, LinearUpdate, split_last_layer
from exitwise.calibration.ensembles import ENSEMBLES, ExitWeights
from exitwise.calibration.pool_objective import (
    BLOCK,
    PoolObjective,
    PoolPoint,
    PoolSums,
    Rows,
    UpdateLogits,
    sample_ranges,
)
from exitwise.calibration.trace import HeadWeights
from exitwise.core.memory import align

OWN_WEIGHT_BOUNDS = (0.05, 20.0)  # of an exit alone: the reciprocals of the bounds of a temperature
_TAU = 5.0
_RHO = (100.0, 10.0)  # for biases of about 0.1 and, if they are larger, of about 0.3
_MIN_GAIN = 1.0  # nats over all samples that a weight, or the bias, must bring
_MAX_BIAS_CLASSES = 2000  # with more classes there is no bias: the Hessian would be too large
_MAX_BAND_NUMBERS = 1 << 24  # samples times classes that weights of bands are fitted on
_MAX_STEPS = 50
_PRECISION = 1e-9  # stop if a further step would lower the NLPD by less
_MAX_FACTOR = 2.0  # of all weights, and its reciprocal, to bring confidence and accuracy together
_FACTOR_STEPS = 8


def _minimize(
    objective: PoolObjective,
    used: Sequence[int],
    start: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tau: Tensor | None = None,
    rho: float = 0.0,
    bounds: tuple[float, float] = (0.0, float("inf")),
) -> PoolPoint:
    """Minimize NLPD and penalty over the weights of the used experts, within bounds, and over the bias if there is one.

    Args:
        objective: The NLPD.
        used: Experts whose weights may differ from zero.
        start: Weights of all experts to start from.
        bias: Bias (c,) to start from; None for none.
        target: Weights of all experts that the penalty draws to.
        tau: Strengths of the penalty on the weight of every expert; None for none.
        rho: Strength of the penalty on the bias.
        bounds: Bounds of the weights of exits; those of further experts have none.
    """
    k = len(used)
    point = start[list(used)] if bias is None else torch.cat([start[list(used)], bias])
    center, precision = torch.zeros_like(point), torch.full_like(point, rho)
    center[:k], precision[:k] = target[list(used)], 0.0 if tau is None else tau[list(used)]
    low, high = torch.full_like(point, -float("inf")), torch.full_like(point, float("inf"))
    num_exits = sum(j < objective.exits for j in used)
    low[:num_exits], high[:num_exits] = bounds

    def evaluate(at: Tensor) -> tuple[PoolSums, float, Tensor, Tensor]:
        sums = objective.sums(used, at[:k], None if bias is None else at[k:])
        away = at - center
        value = sums.loss + 0.5 * float((precision * away * away).sum())
        return sums, value, sums.gradient + precision * away, sums.hessian + torch.diag(precision)

    sums, value, gradient, hessian = evaluate(point)
    for _ in range(_MAX_STEPS):
        free = _free_indices(point, gradient, low, high)
        step = torch.zeros_like(point)
        step[free] = -_solve(hessian[free][:, free], gradient[free])
        if not -float(gradient @ step) / 2 > _PRECISION * objective.samples:
            break
        # The objective is convex, so that some fraction of the step lowers it, unless rounding is all that is left.
        for halvings in range(30):
            candidate = (point + step / 2**halvings).clamp(low, high)
            found = evaluate(candidate)
            if found[1] < value:
                break
        else:
            break
        point, (sums, value, gradient, hessian) = candidate, found
    free = _free_indices(point, gradient, low, high)
    inverse = torch.zeros_like(hessian)
    for i, column in zip(free, _solve(hessian[free][:, free], torch.eye(len(free), dtype=point.dtype)).T, strict=True):
        inverse[i, free] = column
    weights = torch.zeros_like(start)
    weights[list(used)] = point[:k]
    nlpd, optimism = sums.loss / objective.samples, float((inverse * sums.outer).sum()) / objective.samples
    costs = {j: float(point[i] ** 2 / (2 * inverse[i, i])) for i, j in enumerate(used) if i in free}
    return PoolPoint(weights, None if bias is None else point[k:], nlpd, nlpd + optimism, costs)


def _free_indices(point: Tensor, gradient: Tensor, low: Tensor, high: Tensor) -> list[int]:
    """Return the parameters that are not at a bound which the gradient pushes them against."""
    held = ((point <= low) & (gradient >= 0)) | ((point >= high) & (gradient <= 0))
    indices: list[int] = (~held).nonzero()[:, 0].tolist()
    return indices


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve a positive semidefinite system; a tiny ridge makes equal or constant experts solvable."""
    if not len(matrix):
        return torch.zeros_like(right)
    ridge = 1e-10 * matrix.diagonal().max().clamp(min=1e-10)
    solution: Tensor = torch.linalg.solve(matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype), right)
    return solution


def fit_pool(
    log_probs: Sequence[Rows],
    labels: Tensor,
    baseline: float = 1.0,
    last_layers: Sequence[tuple[HeadWeights, Tensor]] | None = None,
) -> tuple[ExitWeights, ...]:
    """Fit the pool of every exit.

    Args:
        log_probs: Log-probabilities K x (n, c) of the exits, each on its own: tensors, or what computes rows of them.
        labels: True labels (n,).
        baseline: Weight of an exit alone that no exit's pool may do worse than, besides the best one.
        last_layers: Last layer and features (n, p_k) of every exit, to weight the last layers anew; None for a pool
            without `W_opt`.

    Returns:
        Weights (K,) of the exits 0..k in the pool of exit k, with its bias and its update if it has one.
    """
    exits: list[ExitWeights] = []
    tau = torch.zeros(0, dtype=torch.float64)
    for k in range(len(log_probs)):
        objective = PoolObjective(log_probs[: k + 1], labels)
        alone = _fit_alone(objective, baseline)
        tau = torch.cat([tau, _TAU / alone.weights[-1:] ** 2])
        best, tau_of_experts, update = _fit_weights(objective, alone, tau), tau, None
        if last_layers is not None:
            objective, best, tau_of_experts, update = _add_update(objective, best, alone, tau, *last_layers[k])
        exits.append(_finish_exit(objective, best, alone, tau_of_experts, update))
    return tuple(exits)


def _fit_alone(objective: PoolObjective, baseline: float) -> PoolPoint:
    """Fit only the weight of the last exit: a temperature."""
    own = objective.exits - 1
    start = torch.zeros(own + 1, dtype=torch.float64)
    start[own] = baseline
    bounds = (min(OWN_WEIGHT_BOUNDS[0], baseline), max(OWN_WEIGHT_BOUNDS[1], baseline))
    return _minimize(objective, [own], start, None, start, bounds=bounds)


def pool_nlpd(
    pool: Sequence[ExitWeights], log_probs: Sequence[Rows], labels: Tensor, features: Sequence[Tensor] = ()
) -> tuple[float, ...]:
    """Return the NLPD (K,) of every exit's pool; the arguments are those of `pool_log_true`."""
    nlpd: list[float] = (-pool_log_true(pool, log_probs, labels, features).mean(dim=1)).tolist()
    return tuple(nlpd)


def pool_log_true(
    pool: Sequence[ExitWeights], log_probs: Sequence[Rows], labels: Tensor, features: Sequence[Tensor] = ()
) -> Tensor:
    """Compute log p(true label) (K, n) in float64 of every exit's pool, as predictions compute it, block by block.

    Args:
        pool: The pool of every exit.
        log_probs: Log-probabilities K x (n, c) of the exits, each on its own.
        labels: True labels (n,).
        features: Features K x (n, p_k); only pools with an update need them.
    """
    ensemble, blocks = ENSEMBLES["pool"], []
    size = max(1, BLOCK // log_probs[0].shape[1])
    for outer in sample_ranges(log_probs, len(labels)):
        exits = [rows[outer] for rows in log_probs]
        for start in range(outer.start, outer.stop, size):
            part = slice(start, min(start + size, outer.stop))
            state, log_true = None, []
            for k, (exit, own) in enumerate(zip(pool, exits, strict=True)):
                exit = exit.at(align(features[k][part])) if exit.update is not None else exit
                own = own[part.start - outer.start : part.stop - outer.start]
                pooled, state = ensemble.advance_log_probs(state, own, exit)
                log_true.append(pooled.gather(1, labels[part, None]).squeeze(1).double())
            blocks.append(torch.stack(log_true))
    return torch.cat(blocks, dim=1)


def _fit_weights(objective: PoolObjective, alone: PoolPoint, tau: Tensor) -> PoolPoint:
    """Fit the weights of the exits 0..k, with penalties `tau` (k + 1,), from the own weight of exit k alone."""
    own = objective.exits - 1
    if not own:
        return alone
    pooled = _minimize(objective, range(own + 1), alone.weights, None, alone.weights, tau)
    while pooled.used and (removable := {j: cost for j, cost in pooled.removal_costs.items() if cost < _MIN_GAIN}):
        used = [j for j in pooled.used if j != min(removable, key=lambda j: removable[j])]
        if not used:
            break
        pooled = _minimize(objective, used, pooled.weights, None, alone.weights, tau)
    return pooled if pooled.used and pooled.nlpd <= alone.nlpd and pooled.loo < alone.loo else alone


def _add_update(
    objective: PoolObjective, best: PoolPoint, alone: PoolPoint, tau: Tensor, head: HeadWeights, features: Tensor
) -> tuple[PoolObjective, PoolPoint, Tensor, LinearUpdate | None]:
    """Add the bands of exit k to its pool, if that lowers the leave-one-out NLPD.

    Returns:
        The objective with the sum of the weighted bands as one more expert, the best point and the penalties for it,
        and the sum as a function of features; the arguments and None if the pool is better without.
    """
    samples = _choose_samples(len(features), objective.classes)
    bands = split_last_layer(head, align(features[samples]))
    extended = objective.take(samples, bands.logits.unbind())
    start, target = (torch.cat([point.weights, point.weights.new_zeros(NUM_BANDS)]) for point in (best, alone))
    tau_of_bands = torch.cat([tau, tau[-1:].expand(NUM_BANDS)])
    with_bands = [*best.used, *range(objective.exits, extended.experts)]
    without, found = (_minimize(extended, used, start, None, target, tau_of_bands) for used in (best.used, with_bands))
    update = bands.combine(found.weights[objective.exits :])
    logits = UpdateLogits(update, features)
    updated = objective.add_expert(logits[:] if objective.is_kept else logits)
    weights = torch.cat([found.weights[: objective.exits], torch.ones(1, dtype=torch.float64)])
    tau_of_update = torch.cat([tau, tau[-1:]])
    point = _minimize(updated, [*best.used, objective.exits], weights, None, weights, tau_of_update)
    has_gain = (without.loo - found.loo) * extended.samples > _MIN_GAIN
    if has_gain and point.nlpd <= min(best.nlpd, alone.nlpd):
        return updated, point, tau_of_update, update
    return objective, best, tau, None


def _choose_samples(samples: int, classes: int) -> Tensor:
    """Return the samples that weights of bands are fitted on: all, or as many as fit in memory with all bands."""
    if samples * classes <= _MAX_BAND_NUMBERS:
        return torch.arange(samples)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return order[: max(1, _MAX_BAND_NUMBERS // classes)].sort().values


def _finish_exit(
    objective: PoolObjective, best: PoolPoint, alone: PoolPoint, tau: Tensor, update: LinearUpdate | None
) -> ExitWeights:
    """Add a bias if it helps, and bring confidence and accuracy together."""
    if objective.classes <= _MAX_BIAS_CLASSES:
        best = _add_bias(objective, best, alone, tau)
    # Temperature alone has the lowest NLPD that it can have, so no other factor would be allowed.
    factor = 1.0 if best is alone else _match_confidence(objective, best, alone.nlpd)
    weights, bias = factor * best.weights, None if best.bias is None else (factor * best.bias).float()
    exit = ExitWeights(tuple(weights[: objective.exits].tolist()), bias)
    return exit if update is None else update.add_to(exit, float(weights[-1]))


def _match_confidence(objective: PoolObjective, point: PoolPoint, max_nlpd: float) -> float:
    """Find the factor of weights and bias that brings mean confidence and accuracy as close as chance allows.

    Confidence rises with the factor, so Newton's method finds it. If the NLPD there is above `max_nlpd`, the factor is
    halved towards 1, where it is not.
    """
    if not point.used:
        return 1.0
    factor, found = 1.0, objective.confidence(point, 1.0)
    variance = found.variance
    if found.gap**2 <= variance:
        return factor
    remaining = variance / found.gap
    for _ in range(_FACTOR_STEPS):
        if abs(found.gap - remaining) < 0.01 * variance**0.5 or not found.slope > 0:
            break
        factor = min(max(factor - (found.gap - remaining) / found.slope, 1 / _MAX_FACTOR), _MAX_FACTOR)
        found = objective.confidence(point, factor)
    for _ in range(_FACTOR_STEPS):
        if found.nlpd <= max_nlpd:
            return factor
        factor = (1 + factor) / 2
        found = objective.confidence(point, factor)
    return 1.0


def _add_bias(objective: PoolObjective, best: PoolPoint, alone: PoolPoint, tau: Tensor) -> PoolPoint:
    """Return the pool with a bias of the strength with the lowest leave-one-out NLPD, or without one."""
    bias, chosen = torch.zeros(objective.classes, dtype=torch.float64), best
    for rho in _RHO:
        found = _minimize(objective, best.used, best.weights, bias, best.weights, tau, rho)
        if (chosen.loo - found.loo) * objective.samples < _MIN_GAIN:
            break
        if found.used and found.nlpd <= min(best.nlpd, alone.nlpd):
            chosen = found
        if found.bias is None or float(found.bias.square().mean()) * rho < 1:
            break  # the biases are smaller than this penalty expects: a weaker one would bring no more
        bias = found.bias
    return chosen
