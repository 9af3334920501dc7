"""Tuning of one exit after another: the points chosen so far, the NLPD of the next exit, and its refinement."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exitwise.calibration.ensembles import Ensemble, ExitWeights
from exitwise.calibration.exit_objective import ExitObjective
from exitwise.calibration.methods import Method
from exitwise.core.predictions import Array

# Limits of the continuous search: beyond them the NLPD is flat or the optimum is at infinity.
TEMPERATURE_BOUNDS, PRIOR_BOUNDS = (0.05, 20.0), (0.01, 100.0)


class SequentialTuning:
    """Points (T, var0) chosen exit by exit, and the NLPD at each: that of the exit, or of the ensemble up to it."""

    def __init__(
        self, exits: Sequence[ExitObjective], ensemble: Ensemble | None, weights: Sequence[ExitWeights] | None
    ) -> None:
        self._exits, self._ensemble, self._weights = exits, ensemble, weights
        self.points: list[tuple[float, float]] = []
        self.values: list[float] = []
        # State of the ensemble of the exits chosen so far: of the true label (n,), or of all classes (n, c) if the
        # ensemble is not elementwise and the samples are few.
        self._state: Any = None

    @property
    def exit(self) -> ExitObjective:
        """The next exit, whose point is not chosen yet."""
        return self._exits[len(self.points)]

    def nlpd(self, temperatures: Sequence[float], prior_vars: Sequence[float]) -> Array:
        """Return the NLPD (T, V) with the next exit at each grid point: the mean over samples, in float64."""
        log_true = self._add_exit(self.exit.log_true(temperatures, prior_vars))
        nlpd: Array = -log_true.double().mean(dim=2).numpy()
        return nlpd

    def log_true(self, temperature: Tensor, prior_var: Tensor, part: slice) -> Tensor:
        """Compute log p(true label) (m,) with the next exit at one point, differentiable."""
        return self._add_exit(self.exit.compute_log_true(temperature[None], prior_var[None], part)[0, 0], part)

    def choose(self, point: tuple[float, float], value: float) -> None:
        """Fix the next exit's point and its NLPD."""
        self._state = self._advance(self._exit_log_probs(*point), self._state)[1]
        self.points.append(point)
        self.values.append(value)

    def prefix(self, k: int) -> "SequentialTuning":
        """Return a copy in which only the first k exits are chosen."""
        copy = type(self)(self._exits, self._ensemble, self._weights)
        for point, value in zip(self.points[:k], self.values[:k], strict=True):
            copy.choose(point, value)
        return copy

    def _exit_log_probs(self, temperature: float, prior_var: float) -> Tensor:
        """Return log p of the next exit without the ensemble: true label (n,), or all classes (n, c)."""
        return self.exit.log_true((temperature,), (prior_var,))[0, 0]

    def _add_exit(self, log_probs: Tensor, part: slice = slice(None)) -> Tensor:
        """Return log p of the ensemble with the next exit, from that exit's log p for the samples in `part`."""
        return self._advance(log_probs, self._state_at(part))[0]

    def _state_at(self, part: slice) -> Any:
        """Return the state of the ensemble of the exits chosen so far, for the samples in `part`."""
        return None if self._state is None else self._state[part]

    def _advance(self, log_probs: Tensor, state: Any) -> tuple[Tensor, Any]:
        if self._ensemble is None or self._weights is None:
            return log_probs, None
        return self._ensemble.advance_log_probs(state, log_probs, self._weights[len(self.points)])


class AllClassesTuning(SequentialTuning):
    """Sequential tuning of an ensemble that is not elementwise, such as PoE: it needs all classes (n, c).

    Of many samples, the state of the ensemble is computed anew from the chosen exits, block by block.
    """

    _block_state: tuple[slice, Any] | None = None  # the state that was computed last, for one block

    def nlpd(self, temperatures: Sequence[float], prior_vars: Sequence[float]) -> Array:
        total = np.zeros((len(temperatures), len(prior_vars)))
        with torch.no_grad():
            for part in self.exit.sample_chunks():
                for j, prior_var in enumerate(prior_vars):
                    for i, log_probs in enumerate(self.exit.log_probs(temperatures, prior_var, part)):
                        total[i, j] -= float(self._ensemble_log_true(log_probs, part).double().sum())
        return total / len(self.exit)

    def log_true(self, temperature: Tensor, prior_var: Tensor, part: slice) -> Tensor:
        return self._ensemble_log_true(next(self.exit.log_probs(temperature[None], prior_var, part)), part)

    def choose(self, point: tuple[float, float], value: float) -> None:
        self._block_state = None
        if self.exit.is_kept:
            super().choose(point, value)
        else:
            self.points.append(point)
            self.values.append(value)

    def _exit_log_probs(self, temperature: float, prior_var: float) -> Tensor:
        return self.exit.all_log_probs(temperature, prior_var)

    def _state_at(self, part: slice) -> Any:
        if self._state is not None or not self.points:
            return super()._state_at(part)
        if self._block_state is None or self._block_state[0] != part:
            self._block_state = (part, self._compute_state(part))
        return self._block_state[1]

    def _compute_state(self, part: slice) -> Any:
        state: Any = None
        if self._ensemble is None or self._weights is None:
            return state
        with torch.no_grad():
            for exit, (temperature, prior_var), weights in zip(self._exits, self.points, self._weights, strict=False):
                log_probs = next(exit.log_probs((temperature,), prior_var, part))
                state = self._ensemble.advance_log_probs(state, log_probs, weights)[1]
        return state

    def _ensemble_log_true(self, log_probs: Tensor, part: slice) -> Tensor:
        """Return log p(true label) (m,) of the ensemble, from the next exit's log-probabilities (m, c)."""
        return self._add_exit(log_probs, part).gather(1, self.exit.labels[part, None]).squeeze(1)


def refine_all(grid: SequentialTuning, method: Method) -> SequentialTuning:
    """Refine the grid's points by gradient descent, so that no exit's NLPD is above the grid's.

    A refined exit can make the ensembles after it worse. Where that happens, the earlier exits return to their grid
    points.
    """
    tuning = grid.prefix(0)
    for k, start in enumerate(grid.points):
        point, value = _refine_exit(tuning, method, start)
        if value > grid.values[k]:
            tuning = grid.prefix(k)
            point, value = _refine_exit(tuning, method, start)
        tuning.choose(point, value)
    return tuning


def _refine_exit(
    tuning: SequentialTuning, method: Method, start: tuple[float, float]
) -> tuple[tuple[float, float], float]:
    """Run L-BFGS for the next exit from `start`; return the better of its result and `start`, and the NLPD there."""
    bounds = torch.tensor([TEMPERATURE_BOUNDS, PRIOR_BOUNDS], dtype=torch.float64).log()
    low, width = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    free = torch.tensor([method.tune_temperature, method.tune_prior])
    fixed = torch.tensor(start, dtype=torch.float64).log()
    # A sigmoid keeps log T and log var0 within their bounds.
    raw = ((fixed - low) / width).clamp(0.01, 0.99).logit().requires_grad_()
    optimizer = torch.optim.LBFGS([raw], max_iter=25, max_eval=40, line_search_fn="strong_wolfe", tolerance_change=1e-7)

    def point() -> Tensor:
        return torch.where(free, low + width * raw.sigmoid(), fixed).exp()

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in tuning.exit.sample_chunks():
            temperature, prior_var = point()
            loss = -tuning.log_true(temperature.float(), prior_var, part).double().sum() / len(tuning.exit)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    temperature, prior_var = (float(x) for x in point().detach())
    refined = ((temperature, prior_var), tuning.nlpd((temperature,), (prior_var,)).item())
    return min(refined, (start, tuning.nlpd((start[0],), (start[1],)).item()), key=lambda pair: pair[1])
