"""Temperature and prior variance of every exit, by the NLPD of the validation split.

All that a grid point is scored by is p(true label). It does not depend on other exits, so one table per exit, grid
points by samples, serves every method: alone, or in an ensemble whose earlier exits are already chosen. Only a product
of experts needs the other classes, too, as it is normalised over them: there nothing is remembered.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from exitwise.calibration.calibration import (
    CalibratedExit,
    Calibration,
    Grid,
    eigendecompositions,
    ensemble_step,
    standard_normals,
)
from exitwise.calibration.dropout import DropoutMasks
from exitwise.calibration.laplace import MODES, CurvatureEigen, Mode, Posterior
from exitwise.calibration.mc_softmax import (
    chunk_slices,
    grid_log_true,
    interpolated_log_mean_softmax,
    log_mean_softmax,
    log_true_softmax,
    sample_logits,
)
from exitwise.calibration.methods import DEFAULT_DRAWS, OURS, Ensemble, Method, get_method
from exitwise.calibration.trace import HeadWeights, Trace
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array
from exitwise.core.seeds import as_generator

TEMPERATURES = (0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0)
PRIOR_VARS = (0.5, 0.7, 1.0, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0)
TEMPERATURE, PRIOR_VAR = 1.0, 2.0  # where they are not tuned

_TIE = 5e-7  # NLPDs that float32 cannot tell apart

# How far the continuous search may go: beyond, the NLPD is flat or the optimum is at infinity.
TEMPERATURE_BOUNDS, PRIOR_BOUNDS = (0.05, 20.0), (0.01, 100.0)

SearchKind = Literal["grid", "continuous"]


def calibrate(
    trace: Trace,
    method: Method | str = OURS,
    *,
    samples: int = DEFAULT_DRAWS,
    seed: int | torch.Generator = 0,
    mode: Mode = "paper",
    draws: Tensor | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    prior_vars: Sequence[float] = PRIOR_VARS,
    search: SearchKind = "grid",
) -> Calibration:
    """Calibrate every exit on the trace's validation split.

    `draws` (S, c) replaces the standard normals that `samples` and `seed` would give; with dropout as many masks are
    drawn. The grid is `temperatures` (T,) by `prior_vars` (V,). `search="continuous"` goes on from the best grid points
    by gradient descent and never ends above their validation NLPD.
    """
    return Tuner(trace, samples, seed, mode, draws, temperatures, prior_vars, search).calibrate(method)


class Tuner:
    """Calibrates by any number of methods on one trace, sharing draws, eigendecompositions and tables."""

    def __init__(
        self,
        trace: Trace,
        samples: int = DEFAULT_DRAWS,
        seed: int | torch.Generator = 0,
        mode: Mode = "paper",
        draws: Tensor | None = None,
        temperatures: Sequence[float] = TEMPERATURES,
        prior_vars: Sequence[float] = PRIOR_VARS,
        search: SearchKind = "grid",
    ) -> None:
        if search not in ("grid", "continuous"):
            raise InputError(f"`search` must be 'grid' or 'continuous', but got {search!r}")
        self._temperatures = _positive("temperatures", temperatures)
        self._prior_vars = _positive("prior_vars", prior_vars)
        self.trace, self._mode, self._search = trace, mode, search
        self._generator = as_generator(seed)
        self._draws = (
            standard_normals(samples, trace.num_classes, self._generator) if draws is None else _checked(draws, trace)
        )
        self._settings: dict[str, Any] = {"samples": len(self._draws), "search": search}
        self._settings["seed"] = seed if draws is None and isinstance(seed, int) else None
        if mode not in MODES:
            raise InputError(f"`mode` must be one of {', '.join(MODES)}, but got {mode!r}")
        self._searched: dict[tuple[int, bool, float | None], ExitObjective] = {}

    @cached_property
    def _spectra(self) -> list[CurvatureEigen]:
        return eigendecompositions(self.trace, self._mode)

    @cached_property
    def _uniforms(self) -> list[Tensor]:
        """(S, p) of every exit, from 0 up to 1: a feature stays where its number is not below the rate."""
        widths = [head.weight.shape[1] for head in self.trace.heads]
        return [torch.rand(len(self._draws), width, generator=self._generator) for width in widths]

    def calibrate(self, method: Method | str) -> Calibration:
        method = get_method(method) if isinstance(method, str) else method
        if not isinstance(method, Method):
            raise InputError(f"`method` must be a Method or the name of one, but got {method!r}")
        temperatures = self._temperatures if method.tune_temperature else (TEMPERATURE,)
        prior_vars = self._prior_vars if method.tune_prior else (PRIOR_VAR,)
        weights = self.trace.costs.values if method.ensemble else None
        searched = [self._exit(k, method) for k in range(self.trace.num_exits)]
        chain = (_PoeSequentialTuning if method.ensemble == "poe" else _SequentialTuning)(searched, weights)
        grids = []
        for k in range(self.trace.num_exits):
            nlpd = chain.nlpd(temperatures, prior_vars)
            if not np.isfinite(nlpd).all():
                raise InputError(
                    f"exit {k}: the validation NLPD is not finite at some grid points: "
                    f"features, temperatures or prior variances are too extreme for float32"
                )
            best = np.unravel_index(np.argmax(nlpd <= nlpd.min() + _TIE), nlpd.shape)  # the first: T outer, var0 inner
            chain.choose((temperatures[best[0]], prior_vars[best[1]]), float(nlpd[best]))
            grids.append(Grid(temperatures, prior_vars, tuple(tuple(map(float, row)) for row in nlpd)))
        if self._search == "continuous" and (method.tune_temperature or method.tune_prior):
            chain = _refine_all(chain, method)
        exits = tuple(
            CalibratedExit(head.to_float32(), *point, self._spectra[k].posterior(point[1]).to_float32(), self._draws)
            if method.laplace
            else CalibratedExit(head.to_float32(), *point, dropout=self._dropout(k, method))
            for k, (head, point) in enumerate(zip(self.trace.heads, chain.points, strict=True))
        )
        return Calibration(method, self._mode, exits, weights, tuple(chain.values), tuple(grids), self._settings)

    def _exit(self, k: int, method: Method) -> "ExitObjective":
        key = (k, method.laplace, method.dropout)
        if key not in self._searched:
            val = self.trace.val
            spectrum, dropout = self._spectra[k] if method.laplace else None, self._dropout(k, method)
            self._searched[key] = ExitObjective(
                self.trace.heads[k], val.features[k], val.labels, spectrum, self._draws, dropout
            )
        return self._searched[key]

    def _dropout(self, k: int, method: Method) -> DropoutMasks | None:
        return None if method.dropout is None else DropoutMasks(method.dropout, self._uniforms[k] >= method.dropout)


class ExitObjective:
    """What one exit says of the validation samples under any temperature and prior variance."""

    def __init__(
        self,
        head: HeadWeights,
        features: Tensor,
        labels: Tensor,
        spectrum: CurvatureEigen | None,
        draws: Tensor,
        dropout: DropoutMasks | None,
    ) -> None:
        self._head, self._features, self._dropout = head, features, dropout
        features = features.float()
        self._logits = head.logits(features)
        self.labels, self._spectrum, self._draws = labels, spectrum, draws
        self._squares = spectrum.posterior(PRIOR_VAR).squared_projections(features) if spectrum else None
        self._known: dict[tuple[float, float], Tensor] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def log_true(self, temperatures: Sequence[float], prior_vars: Sequence[float]) -> Tensor:
        """log p(true label) (T, V, n), remembered point by point."""
        missing = [(t, v) for t in temperatures for v in prior_vars if (t, v) not in self._known]
        if missing:
            rows, columns = sorted({t for t, _ in missing}), sorted({v for _, v in missing})
            with torch.no_grad():
                table = self.compute_log_true(torch.tensor(rows), torch.tensor(columns, dtype=torch.float64))
            self._known |= {(t, v): table[i, j] for i, t in enumerate(rows) for j, v in enumerate(columns)}
        return torch.stack([torch.stack([self._known[t, v] for v in prior_vars]) for t in temperatures])

    def compute_log_true(self, temperatures: Tensor, prior_vars: Tensor, part: slice = slice(None)) -> Tensor:
        """The same for a part of the samples, differentiable in both."""
        logits, labels = self._logits[part], self.labels[part]
        if self._dropout is not None:
            sampled = self._dropout.sample_logits(self._head, self._features[part])
            return _true_of_sampled(sampled, labels, temperatures)[:, None].expand(-1, len(prior_vars), -1)
        if self._spectrum is None or self._squares is None:
            true = logits.gather(1, labels[:, None]).squeeze(1)
            rows = [true / t - (logits / t).logsumexp(dim=1) for t in temperatures]
            return torch.stack(rows)[:, None].expand(-1, len(prior_vars), -1)
        squares = self._squares[part]
        posteriors = [self._spectrum.posterior(var0) for var0 in prior_vars]
        if self._spectrum.mode != "exact":  # naive is a scalar times one matrix too, whatever its sampler does
            scales = torch.stack([posterior.scale_from_squares(squares) for posterior in posteriors])
            shifts = torch.stack([self._shifts(posterior) for posterior in posteriors])
            return grid_log_true(logits, labels, scales.sqrt(), shifts, temperatures)
        columns = []
        for posterior in posteriors:
            sampled = (
                (
                    chunk,
                    sample_logits(logits[chunk], posterior.scale_from_squares(squares[chunk]), posterior, self._draws),
                )
                for chunk in chunk_slices(len(logits), self._draws.numel())
            )
            columns.append(_true_of_sampled(sampled, labels, temperatures))
        return torch.stack(columns, dim=1)

    def log_probs(
        self, temperatures: Sequence[float] | Tensor, prior_var: float | Tensor, part: slice = slice(None)
    ) -> Iterator[Tensor]:
        """(n, c) of a part of the samples at each temperature, as `CalibratedExit` has them; differentiable in both."""
        logits = self._logits[part]
        if self._spectrum is None or self._squares is None:
            yield from ((logits / t).log_softmax(dim=1) for t in temperatures)
            return
        posterior = self._spectrum.posterior(prior_var)
        scale = posterior.scale_from_squares(self._squares[part])
        if self._spectrum.mode != "exact":
            root, shifts = scale.sqrt(), self._shifts(posterior)
            yield from (interpolated_log_mean_softmax(logits, root, shifts, t) for t in temperatures)
            return
        sampled = sample_logits(logits, scale, posterior, self._draws)
        yield from (log_mean_softmax(sampled, t) for t in temperatures)

    def _shifts(self, posterior: Posterior) -> Tensor:
        """(S, c): L g of every draw."""
        shifts: Tensor = self._draws @ posterior.root.to(self._draws.dtype).T
        return shifts

    def sample_chunks(self) -> list[slice]:
        """Parts of the samples that fit in memory with all their draws, or their gradient.

        One, but for `exact` and for dropout, where every logit is drawn.
        """
        n = len(self._logits)
        exact = self._spectrum is not None and self._spectrum.mode == "exact"
        return list(chunk_slices(n, self._draws.numel())) if exact or self._dropout is not None else [slice(0, n)]


def _true_of_sampled(sampled: Iterable[tuple[slice, Tensor]], labels: Tensor, temperatures: Tensor) -> Tensor:
    """log p(true label) (T, n) from sampled logits (m, S, c), chunk by chunk."""
    rows = [torch.stack([log_true_softmax(z, labels[part], t) for t in temperatures]) for part, z in sampled]
    return torch.cat(rows, dim=1)


class _SequentialTuning:
    """Points (T, var0) chosen exit by exit, with the NLPD that counts: an exit's own, or its ensemble's."""

    kind: ClassVar[Ensemble] = "mie"

    def __init__(self, exits: Sequence[ExitObjective], weights: Sequence[float] | None) -> None:
        self._exits, self._weights = exits, weights
        self.points: list[tuple[float, float]] = []
        self.values: list[float] = []
        self._said: Tensor | None = None  # log p(true label) (n,) of the ensemble of the exits chosen so far

    @property
    def exit(self) -> ExitObjective:
        """The next one, whose point is open."""
        return self._exits[len(self.points)]

    def nlpd(self, temperatures: Sequence[float], prior_vars: Sequence[float]) -> Array:
        """(T, V) of the next exit, mean over samples, in float64."""
        nlpd: Array = -self._with(self.exit.log_true(temperatures, prior_vars)).double().mean(dim=2).numpy()
        return nlpd

    def log_true(self, temperature: Tensor, prior_var: Tensor, part: slice) -> Tensor:
        """log p(true label) (m,) with the next exit at a point, differentiable."""
        return self._with(self.exit.compute_log_true(temperature[None], prior_var[None], part)[0, 0], part)

    def choose(self, point: tuple[float, float], value: float) -> None:
        """Settle the next exit."""
        self._said = self._with(self._own(*point))
        self.points.append(point)
        self.values.append(value)

    def prefix(self, k: int) -> "_SequentialTuning":
        """Another one with the first k exits settled in the same way."""
        copy = type(self)(self._exits, self._weights)
        for point, value in zip(self.points[:k], self.values[:k], strict=True):
            copy.choose(point, value)
        return copy

    def _own(self, temperature: float, prior_var: float) -> Tensor:
        """What the next exit says alone, as far as the chain has to know it."""
        return self.exit.log_true((temperature,), (prior_var,))[0, 0]

    def _with(self, own: Tensor, part: slice = slice(None)) -> Tensor:
        """What the next exit says joined to what the chain says before."""
        said = None if self._said is None else self._said[part]
        return ensemble_step(self.kind, len(self.points), own, said, self._weights)


class _PoeSequentialTuning(_SequentialTuning):
    """The same for a product of experts, which is known by all its classes: (n, c) instead of (n,)."""

    kind = "poe"

    def nlpd(self, temperatures: Sequence[float], prior_vars: Sequence[float]) -> Array:
        total = np.zeros((len(temperatures), len(prior_vars)))
        with torch.no_grad():
            for part in self.exit.sample_chunks():
                for j, prior_var in enumerate(prior_vars):
                    for i, own in enumerate(self.exit.log_probs(temperatures, prior_var, part)):
                        total[i, j] -= float(self._true(own, part).double().sum())
        return total / len(self.exit)

    def log_true(self, temperature: Tensor, prior_var: Tensor, part: slice) -> Tensor:
        return self._true(next(self.exit.log_probs(temperature[None], prior_var, part)), part)

    def _own(self, temperature: float, prior_var: float) -> Tensor:
        with torch.no_grad():
            parts = [next(self.exit.log_probs((temperature,), prior_var, part)) for part in self.exit.sample_chunks()]
        return torch.cat(parts)

    def _true(self, own: Tensor, part: slice) -> Tensor:
        """log p(true label) (m,) of the ensemble with the next exit's own log-probabilities (m, c)."""
        return self._with(own, part).gather(1, self.exit.labels[part, None]).squeeze(1)


def _refine_all(grid: _SequentialTuning, method: Method) -> _SequentialTuning:
    """The grid's chain improved by gradient descent, above the grid's NLPD at no exit.

    An exit that is better alone can make the ensemble behind it worse. Where that happens the exits before go back to
    their grid points.
    """
    chain = grid.prefix(0)
    for k, start in enumerate(grid.points):
        point, value = _refine_exit(chain, method, start)
        if value > grid.values[k]:
            chain = grid.prefix(k)
            point, value = _refine_exit(chain, method, start)
        chain.choose(point, value)
    return chain


def _refine_exit(
    chain: _SequentialTuning, method: Method, start: tuple[float, float]
) -> tuple[tuple[float, float], float]:
    """The best point that L-BFGS finds for the next exit from `start`, and its NLPD; `start` if none is better."""
    bounds = torch.tensor([TEMPERATURE_BOUNDS, PRIOR_BOUNDS], dtype=torch.float64).log()
    low, width = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    free = torch.tensor([method.tune_temperature, method.tune_prior])
    fixed = torch.tensor(start, dtype=torch.float64).log()
    raw = (
        ((fixed - low) / width).clamp(0.01, 0.99).logit().requires_grad_()
    )  # a sigmoid keeps log T, log var0 in bounds
    optimiser = torch.optim.LBFGS([raw], max_iter=25, max_eval=40, line_search_fn="strong_wolfe", tolerance_change=1e-7)

    def point() -> Tensor:
        return torch.where(free, low + width * raw.sigmoid(), fixed).exp()

    def closure() -> float:
        optimiser.zero_grad()
        total = 0.0
        for part in chain.exit.sample_chunks():
            temperature, prior_var = point()
            loss = -chain.log_true(temperature.float(), prior_var, part).double().sum() / len(chain.exit)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    temperature, prior_var = (float(x) for x in point().detach())
    found = ((temperature, prior_var), chain.nlpd((temperature,), (prior_var,)).item())
    return min(found, (start, chain.nlpd((start[0],), (start[1],)).item()), key=lambda pair: pair[1])


def _positive(name: str, values: Sequence[float]) -> tuple[float, ...]:
    try:
        found = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        found = ()
    if not found or not all(0 < value < float("inf") for value in found):
        raise InputError(f"`{name}` must be positive, finite numbers, at least one, but got {values!r}")
    return found


def _checked(draws: Tensor, trace: Trace) -> Tensor:
    if not isinstance(draws, Tensor):
        raise InputError(f"`draws` must be a tensor, but got {type(draws).__name__}")
    if draws.dim() != 2 or draws.shape[1] != trace.num_classes or not len(draws) or not draws.is_floating_point():
        raise InputError(
            f"`draws` must be floating-point (samples, {trace.num_classes}), but got {draws.dtype} {tuple(draws.shape)}"
        )
    if not bool(torch.isfinite(draws).all()):
        raise InputError("`draws` must be finite")
    return draws.float()
