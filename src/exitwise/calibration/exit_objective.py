"""Validation log-likelihood of one exit, which tuning searches and cross-validation compares."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from exitwise.calibration.dropout import DropoutMasks
from exitwise.calibration.laplace import CurvatureEigen
from exitwise.calibration.mc_softmax import (
    chunk_slices,
    grid_log_true,
    interpolated_log_mean_softmax,
    log_mean_softmax,
    log_true_softmax,
    sample_logits,
)
from exitwise.calibration.trace import HeadWeights
from exitwise.core.errors import InputError


class ExitObjective:
    """Validation log-likelihood of one exit as a function of temperature and prior variance."""

    def __init__(
        self,
        head: HeadWeights,
        features: Tensor,
        labels: Tensor,
        eigen: CurvatureEigen | None,
        draws: Tensor,
        dropout: DropoutMasks | None,
    ) -> None:
        self.head, self.features, self._dropout = head, features, dropout
        features = features.float()
        self._logits = head.logits(features)
        self.labels, self._eigen, self._draws = labels, eigen, draws
        self._squares = eigen.squared_projections(features) if eigen else None
        self._shifts: dict[float, Tensor] = {}  # (S, c) by prior variance
        self._log_true: dict[tuple[float, float], Tensor] = {}  # (n,) by grid point

    def __len__(self) -> int:
        return len(self.labels)

    def log_true(self, temperatures: Sequence[float], prior_vars: Sequence[float]) -> Tensor:
        """Return log p(true label) (T, V, n); every grid point is cached."""
        missing = [(t, v) for t in temperatures for v in prior_vars if (t, v) not in self._log_true]
        if missing:
            rows, columns = sorted({t for t, _ in missing}), sorted({v for _, v in missing})
            with torch.no_grad():
                table = self.compute_log_true(torch.tensor(rows), torch.tensor(columns, dtype=torch.float64))
            self._log_true |= {(t, v): table[i, j] for i, t in enumerate(rows) for j, v in enumerate(columns)}
        return torch.stack([torch.stack([self._log_true[t, v] for v in prior_vars]) for t in temperatures])

    def compute_log_true(self, temperatures: Tensor, prior_vars: Tensor, part: slice = slice(None)) -> Tensor:
        """Compute log p(true label) (T, V, m) of the samples in `part`, differentiable in both arguments."""
        logits, labels = self._logits[part], self.labels[part]
        if self._dropout is not None:
            sampled = self._dropout.sample_logits(self.head, self.features[part])
            return _log_true_of_chunks(sampled, labels, temperatures)[:, None].expand(-1, len(prior_vars), -1)
        if self._eigen is None or self._squares is None:
            true = logits.gather(1, labels[:, None]).squeeze(1)
            rows = [true / t - (logits / t).logsumexp(dim=1) for t in temperatures]
            return torch.stack(rows)[:, None].expand(-1, len(prior_vars), -1)
        squares = self._squares[part]
        posteriors = [self._eigen.posterior(var0, with_root=False) for var0 in prior_vars]
        if self._eigen.mode != "exact":  # the covariance of naive is a scalar times one matrix, too
            scales = torch.stack([posterior.scale_from_squares(squares) for posterior in posteriors])
            shifts = torch.stack([self.shifts(var0) for var0 in prior_vars])
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
            columns.append(_log_true_of_chunks(sampled, labels, temperatures))
        return torch.stack(columns, dim=1)

    def log_probs(
        self, temperatures: Sequence[float] | Tensor, prior_var: float | Tensor, part: slice = slice(None)
    ) -> Iterator[Tensor]:
        """Yield log-probabilities (m, c) of the samples in `part` at each temperature.

        They are those of `CalibratedExit`, and differentiable in temperature and prior variance.
        """
        logits = self._logits[part]
        if self._eigen is None or self._squares is None:
            yield from ((logits / t).log_softmax(dim=1) for t in temperatures)
            return
        posterior = self._eigen.posterior(prior_var, with_root=False)
        scale = posterior.scale_from_squares(self._squares[part])
        if self._eigen.mode != "exact":
            root, shifts = scale.sqrt(), self.shifts(prior_var)
            yield from (interpolated_log_mean_softmax(logits, root, shifts, t) for t in temperatures)
            return
        sampled = sample_logits(logits, scale, posterior, self._draws)
        yield from (log_mean_softmax(sampled, t) for t in temperatures)

    def all_log_probs(self, temperature: float, prior_var: float) -> Tensor:
        """Return log-probabilities (n, c) of all samples at one point."""
        with torch.no_grad():
            return torch.cat([next(self.log_probs((temperature,), prior_var, part)) for part in self.sample_chunks()])

    def shifts(self, prior_var: float | Tensor) -> Tensor:
        """Return the shifts L g (S, c) of all draws g; cached, except for a prior variance with a gradient."""
        if self._eigen is None:
            raise InputError("there are no draws without Laplace")
        if isinstance(prior_var, Tensor) and prior_var.requires_grad:
            return self._eigen.shifts(prior_var, self._draws)
        key = float(prior_var)
        if key not in self._shifts:
            with torch.no_grad():
                self._shifts[key] = self._eigen.shifts(key, self._draws)
        return self._shifts[key]

    def sample_chunks(self) -> list[slice]:
        """Split the samples into parts that fit in memory with all their draws, or with their gradient.

        There is only one part, except with `exact` and with dropout, where every logit is sampled.
        """
        n = len(self._logits)
        exact = self._eigen is not None and self._eigen.mode == "exact"
        return list(chunk_slices(n, self._draws.numel())) if exact or self._dropout is not None else [slice(0, n)]


def _log_true_of_chunks(sampled: Iterable[tuple[slice, Tensor]], labels: Tensor, temperatures: Tensor) -> Tensor:
    """Compute log p(true label) (T, n) from chunks of sampled logits (m, S, c)."""
    rows = [torch.stack([log_true_softmax(z, labels[part], t) for t in temperatures]) for part, z in sampled]
    return torch.cat(rows, dim=1)
