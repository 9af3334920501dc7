"""Choice of the calibration method, `method="auto"`, by cross-validated NLPD on the validation split.

Candidates are temperature, MIE, PoE and Pool, each without and with Laplace, and Pool with `W_opt`. Every candidate is
tuned on four fifths of the samples and scored on the last fifth, five times. Its score is the NLPD, averaged over
exits: which exits will be visited depends on a budget that is not known yet, and every exit's confidence decides which
samples stop there.

Of all candidates whose score is within one standard error of the best one, the simplest is chosen. The error is that of
the paired difference to the best one. Methods without draws are simpler than those with draws, and within both groups
the order is temperature, MIE and PoE, Pool, Pool W_opt. MIE and PoE fit the same numbers, so of these two the one with
the lower score is taken: few samples cannot tell them apart, and the mean of exits that err differently is too modest.

One table of log p(true label) per exit, grid points by samples, serves all folds of temperature and MIE, and gives the
points of the exits that a pool is fitted to. In the folds of PoE with Laplace, only temperatures are searched; the
prior variances are those of the exits on their own, which hardly matter.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exitwise.calibration.calibration import cost_weights
from exitwise.calibration.ensembles import ENSEMBLES, Ensemble, ExitWeights
from exitwise.calibration.exit_objective import ExitObjective
from exitwise.calibration.method_selection import MethodSelection
from exitwise.calibration.methods import Method, get_method
from exitwise.calibration.pool import fit_pool, pool_log_true
from exitwise.core.errors import InputError

_LEVELS = (  # from simple to complex; methods of one level are equally simple
    ("T_opt",),
    ("MIE T_opt", "PoE T_opt"),
    ("Pool",),
    ("Pool W_opt",),
    ("Laplace T_opt sigma_opt",),
    ("MIE Laplace T_opt sigma_opt", "PoE Laplace T_opt sigma_opt"),
    ("Pool Laplace T_opt sigma_opt",),
)
CANDIDATES = tuple(name for level in _LEVELS for name in level)
_LEVEL = {name: i for i, level in enumerate(_LEVELS) for name in level}
_FOLDS = 5
_MIN_SAMPLES = 10  # with fewer, temperature alone is taken
# Of more samples than this, some are drawn for the cross-validation.
_MAX_NUMBERS = 1 << 22  # samples times classes
_ENOUGH_SAMPLES, _MOST_NUMBERS = 4096, 1 << 24  # with many classes: so many samples, up to so many numbers
_SEED = 0

Point = tuple[float, float]


def candidate_methods(num_exits: int, laplace: bool, variance: bool = False) -> list[Method]:
    """Return the candidates: without Laplace if `laplace` is False, only those with draws if `variance` is True."""
    methods = [get_method(name) for name in CANDIDATES]
    return [
        method
        for method in methods
        if (laplace or not method.laplace)
        and (method.has_variance or not variance)
        and (num_exits > 1 or method.ensemble in (None, "pool"))  # the other ensembles of one exit are that exit
    ]


def choose_samples(n: int, classes: int) -> Tensor:
    """Return the samples that are cross-validated: all, or as many as fit in memory, drawn with a fixed seed."""
    enough = min(_ENOUGH_SAMPLES, _MOST_NUMBERS // classes)
    most = max(_MIN_SAMPLES, enough, _MAX_NUMBERS // classes)
    if n <= most:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(_SEED))[:most].sort().values


def has_enough_samples(n: int) -> bool:
    """Return whether there are enough samples to compare methods."""
    return n >= _MIN_SAMPLES


def select(losses: Mapping[str, Tensor]) -> MethodSelection:
    """Choose by the one-standard-error rule among candidates with losses (n,); of equally simple ones, the better."""
    means = {name: float(loss.mean()) for name, loss in losses.items()}
    finite = {name: mean for name, mean in means.items() if mean < float("inf")}
    if not finite:
        raise InputError("the validation NLPD of every method is infinite: features are too extreme for float32")
    best = min(finite, key=lambda name: finite[name])
    n = len(losses[best])
    errors = {name: float((losses[name] - losses[best]).std() / n**0.5) for name in finite}
    within = [name for name, mean in finite.items() if mean - finite[best] <= errors[name]]
    chosen = min(within, key=lambda name: (_LEVEL[name], finite[name]))
    return MethodSelection(chosen, finite, errors, n, min(_FOLDS, n))


class CrossValidation:
    """Cross-validated losses of methods on one set of samples.

    Args:
        labels: True labels (n,).
        costs: Costs (K,) up to each exit, which weight MIE and PoE.
        temperatures: Temperatures of the grid.
        prior_vars: Prior variances of the grid.
    """

    def __init__(
        self, labels: Tensor, costs: Sequence[float], temperatures: Sequence[float], prior_vars: Sequence[float]
    ) -> None:
        self._labels, self._weights = labels, cost_weights(costs)
        self._temperatures, self._prior_vars = tuple(temperatures), tuple(prior_vars)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))
        fold = torch.empty_like(order)
        fold[order] = torch.arange(len(labels)) % _FOLDS
        self._tests = [fold == i for i in range(_FOLDS)]

    def losses(self, method: Method, exits: Sequence[ExitObjective]) -> Tensor:
        """Return the mean over exits of -log p(true label) (n,), each sample by what was tuned without its fold."""
        prior_vars = self._prior_vars if method.tune_prior else self._prior_vars[:1]
        if method.ensemble == "pool":
            log_true = self._pool(exits, prior_vars if method.laplace else None, method.tune_weights)
        elif method.ensemble is None or ENSEMBLES[method.ensemble].is_elementwise:
            ensemble = None if method.ensemble is None else ENSEMBLES[method.ensemble]
            log_true = self._elementwise(exits, ensemble, prior_vars)[0]
        else:
            log_true = self._all_classes(exits, ENSEMBLES[method.ensemble], prior_vars)
        return -log_true.double().mean(dim=0)

    def _elementwise(
        self, exits: Sequence[ExitObjective], ensemble: Ensemble | None, prior_vars: Sequence[float]
    ) -> tuple[Tensor, list[list[Point]]]:
        """Return log p(true label) (K, n) out of fold, and the points of every exit for every fold."""
        out, points = torch.empty(len(exits), len(self._labels)), []
        states: list[Tensor | None] = [None] * _FOLDS
        for k, exit in enumerate(exits):
            own = exit.log_true(self._temperatures, prior_vars).flatten(0, 1)  # (TV, n)
            chosen = []
            for i, (test, state) in enumerate(zip(self._tests, states, strict=True)):
                table, _ = _advance(ensemble, self._weights[k], own, state)
                best = int(table[:, ~test].double().mean(dim=1).argmax())
                out[k, test], states[i] = table[best, test], table[best]
                chosen.append(self._point(best, prior_vars))
            points.append(chosen)
        return out, points

    def _point(self, index: int, prior_vars: Sequence[float]) -> Point:
        row, column = divmod(index, len(prior_vars))
        return self._temperatures[row], prior_vars[column]

    def _all_classes(self, exits: Sequence[ExitObjective], ensemble: Ensemble, prior_vars: Sequence[float]) -> Tensor:
        """Return log p(true label) (K, n) out of fold, of an ensemble that needs all classes."""
        out = torch.empty(len(exits), len(self._labels))
        _, points = self._elementwise(exits, None, prior_vars)
        states: list[Any] = [None] * _FOLDS
        for k, exit in enumerate(exits):
            folds_of: dict[float, list[int]] = {}
            for i, (_, prior_var) in enumerate(points[k]):
                folds_of.setdefault(prior_var, []).append(i)
            best: dict[int, tuple[float, Tensor, Any]] = {}
            for prior_var, folds in folds_of.items():
                for log_probs in _iterate_log_probs(exit, self._temperatures, prior_var):
                    for i in folds:
                        combined, state = _advance(ensemble, self._weights[k], log_probs, states[i])
                        log_true = combined.gather(1, self._labels[:, None]).squeeze(1)
                        value = float(log_true[~self._tests[i]].double().mean())
                        if i not in best or value > best[i][0]:
                            best[i] = (value, log_true, state)
            for i, (_, log_true, state) in best.items():
                out[k, self._tests[i]], states[i] = log_true[self._tests[i]], state
        return out

    def _pool(self, exits: Sequence[ExitObjective], prior_vars: Sequence[float] | None, tune_weights: bool) -> Tensor:
        """Return log p(true label) (K, n) out of fold of a pool; without Laplace the temperature does not matter."""
        out = torch.empty(len(exits), len(self._labels))
        points = None if prior_vars is None else self._elementwise(exits, None, prior_vars)[1]
        cache: dict[tuple[int, Point], Tensor] = {}
        for i, test in enumerate(self._tests):
            rows = []
            for k, exit in enumerate(exits):
                point = (1.0, 1.0) if points is None else points[k][i]
                if (k, point) not in cache:
                    cache[k, point] = exit.all_log_probs(*point)
                rows.append(cache[k, point])
            last_layers = [(exit.head, exit.features[~test]) for exit in exits] if tune_weights else None
            pool = fit_pool([row[~test] for row in rows], self._labels[~test], last_layers=last_layers)
            tested, features = [row[test] for row in rows], [exit.features[test] for exit in exits]
            out[:, test] = pool_log_true(pool, tested, self._labels[test], features).float()
        return out


def _advance(ensemble: Ensemble | None, weights: ExitWeights, log_probs: Tensor, state: Any) -> tuple[Tensor, Any]:
    return (log_probs, None) if ensemble is None else ensemble.advance_log_probs(state, log_probs, weights)


def _iterate_log_probs(exit: ExitObjective, temperatures: Sequence[float], prior_var: float) -> Iterator[Tensor]:
    """Yield log-probabilities (n, c) of all samples at each temperature."""
    with torch.no_grad():
        for temperature in temperatures:
            yield exit.all_log_probs(temperature, prior_var)
