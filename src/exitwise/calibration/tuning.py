"""Tuning of every exit's temperature and prior variance by the NLPD on the validation split.

The score of a grid point depends only on p(true label), which does not depend on the other exits. One table per exit,
grid points by samples, therefore serves every method, whether the exit predicts independently or in an ensemble whose
earlier exits are already tuned. A product of experts is normalized over the classes, so it needs the probabilities of
all of them; these are not cached.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from exitwise.calibration.calibration import (
    CalibratedExit,
    Calibration,
    Grid,
    cost_weights,
    eigendecompositions,
    standard_normals,
)
from exitwise.calibration.cross_validation import (
    CrossValidation,
    candidate_methods,
    choose_samples,
    has_enough_samples,
    select,
)
from exitwise.calibration.dropout import DropoutMasks
from exitwise.calibration.ensembles import ENSEMBLES
from exitwise.calibration.exit_objective import ExitObjective, LogProbRows
from exitwise.calibration.laplace import MANY_CLASSES, MODES, CurvatureEigen, Mode
from exitwise.calibration.method_selection import MethodSelection
from exitwise.calibration.methods import AUTO, DEFAULT_DRAWS, Method, get_method, is_auto
from exitwise.calibration.pool import fit_pool, pool_nlpd
from exitwise.calibration.pool_objective import Rows
from exitwise.calibration.sequential_tuning import AllClassesTuning, SequentialTuning, refine_all
from exitwise.calibration.trace import Trace
from exitwise.core.checks import check_choice, check_integer
from exitwise.core.errors import InputError
from exitwise.core.seeds import as_generator

TEMPERATURES = (0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0)
PRIOR_VARS = (0.5, 0.7, 1.0, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0)
TEMPERATURE, PRIOR_VAR = 1.0, 2.0  # for methods that do not tune them

_MAX_POOLED = 1 << 28  # log-probabilities of all exits that are kept while a pool is fitted; more are computed anew

_TIE = 5e-7  # NLPDs closer than this are equal within float32 rounding

SearchKind = Literal["grid", "continuous"]


def calibrate(
    trace: Trace,
    method: Method | str = AUTO,
    *,
    num_draws: int | None = None,
    seed: int | torch.Generator = 0,
    mode: Mode = "paper",
    draws: Tensor | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    prior_vars: Sequence[float] = PRIOR_VARS,
    search: SearchKind = "grid",
    samples: int | None = None,
) -> Calibration:
    """Calibrate every exit on the trace's validation split.

    Each exit gets the temperature and the prior variance with the lowest validation NLPD. With MIE and PoE, exits are
    tuned from first to last by the NLPD of the ensemble of the exits so far. A pool is fitted after every exit was
    tuned on its own.

    Args:
        trace: Features and labels of the validation split, last layers, curvature and costs, see `collect`.
        method: A `Method`, its name, or "auto", which chooses among temperature, MIE, PoE and Pool, each without and
            with Laplace, by cross-validated NLPD; `Calibration.selection` says what the others got.
        num_draws: Number S of Monte Carlo draws; with dropout, number of masks [default: 50].
        seed: Seed or generator of draws and masks.
        mode: Form of the Laplace posterior: "paper", "exact" or "naive".
        draws: Standard normals (S, c) to use instead of those that `num_draws` and `seed` would give. With dropout, S
            masks are drawn.
        temperatures: Temperatures (T,) of the grid.
        prior_vars: Prior variances (V,) of the grid.
        search: "grid" takes the best grid point. "continuous" continues from there by gradient descent; at no exit is
            its validation NLPD above that of the grid.
        samples: Former name of `num_draws`; give only one of them.

    Returns:
        The calibration: its `predict` applies it to the features of any split.

    Raises:
        InputError: An argument is invalid, or the validation NLPD is not finite at a grid point.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> calibration = ew.calibrate(trace, "MIE T_opt")
        >>> len(calibration.temperatures)
        4
        >>> calibration.predict(trace.test)
        Predictions(4 exits, 10000 samples, 100 classes)
    """
    num_draws = resolve_num_draws(num_draws, samples)
    return Tuner(trace, num_draws, seed, mode, draws, temperatures, prior_vars, search).calibrate(method)


class Tuner:
    """Calibrates one trace with any number of methods, which share draws, eigendecompositions and grid tables.

    Args:
        trace: The trace to calibrate.
        num_draws: Number S of Monte Carlo draws; with dropout, number of masks.
        seed: Seed or generator of draws and masks.
        mode: Form of the Laplace posterior: "paper", "exact" or "naive".
        draws: Standard normals (S, c) to use instead of those that `num_draws` and `seed` would give.
        temperatures: Temperatures (T,) of the grid.
        prior_vars: Prior variances (V,) of the grid.
        search: "grid", or "continuous" to refine the best grid points by gradient descent.
    """

    def __init__(
        self,
        trace: Trace,
        num_draws: int = DEFAULT_DRAWS,
        seed: int | torch.Generator = 0,
        mode: Mode = "paper",
        draws: Tensor | None = None,
        temperatures: Sequence[float] = TEMPERATURES,
        prior_vars: Sequence[float] = PRIOR_VARS,
        search: SearchKind = "grid",
    ) -> None:
        check_choice("search", search, get_args(SearchKind))
        check_choice("mode", mode, MODES)
        self._temperatures = _check_positive("temperatures", temperatures)
        self._prior_vars = _check_positive("prior_vars", prior_vars)
        self.trace, self._mode, self._search = trace, mode, search
        self._generator = as_generator(seed)
        if draws is None:
            self._draws = standard_normals(num_draws, trace.num_classes, self._generator)
        else:
            self._draws = _check_draws(draws, trace.num_classes)
        self._settings: dict[str, Any] = {"samples": len(self._draws), "search": search}
        self._settings["seed"] = seed if draws is None and isinstance(seed, int) else None
        self._objectives: dict[tuple[int, bool, float | None], ExitObjective] = {}

    @cached_property
    def _eigen(self) -> list[CurvatureEigen]:
        return eigendecompositions(self.trace, self._mode)

    @cached_property
    def _uniforms(self) -> list[Tensor]:
        """Uniform numbers (S, p) in [0, 1) for every exit: a mask keeps the features where they are at least the rate.

        They are drawn after the standard normals, and only if a method with dropout asks for them.
        """
        widths = [head.weight.shape[1] for head in self.trace.heads]
        return [torch.rand(len(self._draws), width, generator=self._generator) for width in widths]

    def calibrate(self, method: Method | str) -> Calibration:
        """Calibrate with a `Method`, the name of one, or "auto"."""
        if method == AUTO or (isinstance(method, str) and is_auto(method)):
            selection = self.select()
            return replace(self.calibrate(selection.chosen), selection=selection)
        method = get_method(method) if isinstance(method, str) else method
        if not isinstance(method, Method):
            raise InputError(f"`method` must be a Method, the name of one or 'auto', but got {method!r}")
        temperatures = self._temperatures if method.tune_temperature else (TEMPERATURE,)
        prior_vars = self._prior_vars if method.tune_prior else (PRIOR_VAR,)
        ensemble = None if method.ensemble is None else ENSEMBLES[method.ensemble]
        is_fitted = ensemble is not None and ensemble.is_fitted
        if is_fitted:  # each exit is tuned on its own first
            ensemble = None
        weights = None if ensemble is None else self.trace.costs.values
        objectives = [self._get_objective(k, method) for k in range(self.trace.num_exits)]
        tuning_class = SequentialTuning if ensemble is None or ensemble.is_elementwise else AllClassesTuning
        tuning = tuning_class(objectives, ensemble, None if weights is None else cost_weights(weights))
        grids = []
        for k in range(self.trace.num_exits):
            nlpd = tuning.nlpd(temperatures, prior_vars)
            if not np.isfinite(nlpd).all():
                raise InputError(
                    f"exit {k}: the validation NLPD is not finite at some grid points: "
                    f"features, temperatures or prior variances are too extreme for float32"
                )
            # Of several best points, argmax takes the first: temperatures outer, prior variances inner.
            best = np.unravel_index(np.argmax(nlpd <= nlpd.min() + _TIE), nlpd.shape)
            tuning.choose((temperatures[best[0]], prior_vars[best[1]]), float(nlpd[best]))
            grids.append(Grid(temperatures, prior_vars, tuple(tuple(map(float, row)) for row in nlpd)))
        if self._search == "continuous" and (method.tune_temperature or method.tune_prior):
            tuning = refine_all(tuning, method)
        exits = tuple(
            self._make_exit(k, method, objective, point)
            for k, (objective, point) in enumerate(zip(objectives, tuning.points, strict=True))
        )
        pool, val_nlpd = None, tuple(tuning.values)
        if is_fitted:
            val = self.trace.val
            is_kept = len(objectives) * len(val) * self.trace.num_classes <= _MAX_POOLED
            log_probs: list[Rows] = [
                objective.all_log_probs(*point) if is_kept else LogProbRows(objective, *point)
                for objective, point in zip(objectives, tuning.points, strict=True)
            ]
            last_layers = [(objective.head, objective.features) for objective in objectives]
            pool = fit_pool(log_probs, val.labels, last_layers=last_layers if method.tune_weights else None)
            val_nlpd = pool_nlpd(pool, log_probs, val.labels, val.features)
        return Calibration(method, self._mode, exits, weights, val_nlpd, tuple(grids), self._settings, pool)

    def select(self, variance: bool = False) -> MethodSelection:
        """Choose a method by cross-validation; with `variance`, among those whose predictions have a variance."""
        try:
            has_laplace = bool(self._eigen)
        except InputError:
            has_laplace = False
        methods = candidate_methods(self.trace.num_exits, has_laplace, variance)
        if not methods:
            raise InputError(
                "no method with a variance can be chosen: the trace has no usable curvature of training images"
            )
        if not has_enough_samples(len(self.trace.val)):
            return MethodSelection(methods[0].name, {}, {}, len(self.trace.val), 0)
        tuner = self._on_samples(choose_samples(len(self.trace.val), self.trace.num_classes))
        trace = tuner.trace
        validation = CrossValidation(trace.val.labels, trace.costs.values, self._temperatures, self._prior_vars)
        losses = {}
        for method in methods:
            objectives = [tuner._get_objective(k, method) for k in range(trace.num_exits)]
            losses[method.name] = validation.losses(method, objectives)
        return select(losses)

    def on_at_most(self, samples: int) -> "Tuner":
        """Return a tuner for at most so many of the validation samples, drawn with a fixed seed; this one if enough."""
        n = len(self.trace.val)
        if n <= samples:
            return self
        return self._on_samples(torch.randperm(n, generator=as_generator(0))[:samples].sort().values)

    def _on_samples(self, samples: Tensor) -> "Tuner":
        """Return a tuner with the same draws for some of the validation samples; this one if it is all of them."""
        if len(samples) == len(self.trace.val):
            return self
        trace = replace(self.trace, val=self.trace.val.take(samples))
        grid = self._temperatures, self._prior_vars
        tuner = Tuner(trace, len(self._draws), 0, self._mode, self._draws, *grid, self._search)
        if trace.curvature:
            tuner.__dict__["_eigen"] = self._eigen
        return tuner

    def _get_objective(self, k: int, method: Method) -> ExitObjective:
        """Return the objective of exit k from the cache, or create it; methods differ only in Laplace and dropout."""
        key = (k, method.laplace, method.dropout)
        if key not in self._objectives:
            val = self.trace.val
            eigen, dropout = self._eigen[k] if method.laplace else None, self._make_masks(k, method)
            self._objectives[key] = ExitObjective(
                self.trace.heads[k], val.features[k], val.labels, eigen, self._draws, dropout
            )
        return self._objectives[key]

    def _make_exit(
        self, k: int, method: Method, objective: ExitObjective, point: tuple[float, float]
    ) -> CalibratedExit:
        head = self.trace.heads[k].to_float32()
        if not method.laplace:
            return CalibratedExit(head, *point, dropout=self._make_masks(k, method))
        with_root = self._mode != "paper" or self.trace.num_classes <= MANY_CLASSES
        posterior = self._eigen[k].posterior(point[1], with_root).to_float32()
        shifts = None if with_root else objective.shifts(point[1])
        return CalibratedExit(head, *point, posterior, self._draws, shifts=shifts)

    def _make_masks(self, k: int, method: Method) -> DropoutMasks | None:
        return None if method.dropout is None else DropoutMasks(method.dropout, self._uniforms[k] >= method.dropout)


def resolve_num_draws(num_draws: int | None, samples: int | None) -> int:
    """Return the number of Monte Carlo draws from `num_draws` or its former name `samples`; 50 if both are None."""
    if num_draws is not None and samples is not None:
        raise InputError(
            f"`num_draws` and its former name `samples` must not both be given, but got {num_draws!r} and {samples!r}"
        )
    name, value = ("samples", samples) if num_draws is None else ("num_draws", num_draws)
    return DEFAULT_DRAWS if value is None else check_integer(name, value, minimum=1)


def _check_positive(name: str, values: Sequence[float]) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise InputError(f"`{name}` must be positive, finite numbers, at least one, but got {values!r}")
    return numbers


def _check_draws(draws: Tensor, num_classes: int) -> Tensor:
    if not isinstance(draws, Tensor):
        raise InputError(f"`draws` must be a tensor, but got {type(draws).__name__}")
    if draws.dim() != 2 or draws.shape[1] != num_classes or not len(draws) or not draws.is_floating_point():
        raise InputError(
            f"`draws` must be floating-point numbers of shape (num_draws, {num_classes}), "
            f"but got {draws.dtype} of shape {tuple(draws.shape)}"
        )
    if not bool(torch.isfinite(draws).all()):
        raise InputError("`draws` must be finite, but got NaN or infinity")
    return draws.float()
