"""Validation log-likelihood of one exit, which tuning searches and cross-validation compares.

Logits (n, c) and squared projections (n, q) of few samples are kept. Those of many samples are computed anew, block by
block, whenever they are needed, so that memory does not grow with n c. The blocks depend only on n and c, so that
results are the same whether the features are in memory or in files.
"""

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
from exitwise.core.memory import align

_MAX_KEPT = 1 << 24  # samples times classes whose logits are kept; of more samples, they are computed block by block
_BLOCK = 1 << 23  # samples times classes of such a block


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
        self.labels, self._eigen, self._draws = labels, eigen, draws
        is_kept = len(labels) * len(head.weight) <= _MAX_KEPT
        rows = align(features[:]).float() if is_kept else None
        self._logits = None if rows is None else head.logits(rows)
        self._squares = eigen.squared_projections(rows) if eigen is not None and rows is not None else None
        self._shifts: dict[float, Tensor] = {}  # (S, c) by prior variance
        self._log_true: dict[tuple[float, float], Tensor] = {}  # (n,) by grid point

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_kept(self) -> bool:
        """True if there are so few samples that their logits are kept."""
        return self._logits is not None

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
        if (
            self._eigen is not None and self._eigen.mode != "exact"
        ):  # the covariance of naive is a scalar times one matrix, too
            return self._grid_log_true(self._eigen, temperatures, prior_vars, part)
        blocks = [self._block_log_true(temperatures, prior_vars, block) for block in self._blocks(part)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def _grid_log_true(self, eigen: CurvatureEigen, temperatures: Tensor, prior_vars: Tensor, part: slice) -> Tensor:
        posteriors = [eigen.posterior(var0, with_root=False) for var0 in prior_vars]
        scales = []
        for block in self._blocks(part):
            squares = self._squared_projections(eigen, block)
            scales.append(torch.stack([posterior.scale_from_squares(squares) for posterior in posteriors]))
        roots = torch.cat(scales, dim=1).sqrt() if len(scales) > 1 else scales[0].sqrt()
        shifts = torch.stack([self.shifts(var0) for var0 in prior_vars])
        first = part.indices(len(self))[0]
        return grid_log_true(lambda rows: self._logits_at(rows + first), self.labels[part], roots, shifts, temperatures)

    def _block_log_true(self, temperatures: Tensor, prior_vars: Tensor, part: slice) -> Tensor:
        labels = self.labels[part]
        if self._dropout is not None:
            sampled = self._dropout.sample_logits(self.head, align(self.features[part]))
            return _log_true_of_chunks(sampled, labels, temperatures)[:, None].expand(-1, len(prior_vars), -1)
        logits = self._logits_at(part)
        if self._eigen is None:
            true = logits.gather(1, labels[:, None]).squeeze(1)
            rows = [true / t - (logits / t).logsumexp(dim=1) for t in temperatures]
            return torch.stack(rows)[:, None].expand(-1, len(prior_vars), -1)
        squares = self._squared_projections(self._eigen, part)
        columns = []
        for posterior in [self._eigen.posterior(var0, with_root=False) for var0 in prior_vars]:
            sampled = (
                (
                    chunk,
                    sample_logits(logits[chunk], posterior.scale_from_squares(squares[chunk]), posterior, self._draws),
                )
                for chunk in chunk_slices(len(logits), self._draws.numel())
            )
            columns.append(_log_true_of_chunks(sampled, labels, temperatures))
        return torch.stack(columns, dim=1)

    def _logits_at(self, samples: slice | Tensor) -> Tensor:
        """Return logits (m, c) of some samples, kept or computed."""
        if self._logits is not None:
            return self._logits[samples]
        return self.head.logits(align(self.features[samples]))

    def _squared_projections(self, eigen: CurvatureEigen, samples: slice | Tensor) -> Tensor:
        if self._squares is not None:
            return self._squares[samples]
        return eigen.squared_projections(align(self.features[samples]).float())

    def log_probs(
        self, temperatures: Sequence[float] | Tensor, prior_var: float | Tensor, part: slice | Tensor = slice(None)
    ) -> Iterator[Tensor]:
        """Yield log-probabilities (m, c) of the samples in `part` at each temperature.

        They are those of `CalibratedExit`, and differentiable in temperature and prior variance.
        """
        logits = self._logits_at(part)
        if self._eigen is None:
            yield from ((logits / t).log_softmax(dim=1) for t in temperatures)
            return
        posterior = self._eigen.posterior(prior_var, with_root=False)
        scale = posterior.scale_from_squares(self._squared_projections(self._eigen, part))
        if self._eigen.mode != "exact":
            root, shifts = scale.sqrt(), self.shifts(prior_var)
            yield from (interpolated_log_mean_softmax(logits, root, shifts, t) for t in temperatures)
            return
        sampled = sample_logits(logits, scale, posterior, self._draws)
        yield from (log_mean_softmax(sampled, t) for t in temperatures)

    def all_log_probs(self, temperature: float, prior_var: float) -> Tensor:
        """Return log-probabilities (n, c) of all samples at one point."""
        with torch.no_grad():
            rows = torch.empty(len(self), len(self.head.weight))
            for part in self.sample_chunks():
                rows[part] = next(self.log_probs((temperature,), prior_var, part))
            return rows

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

        There is only one part of few samples, except with `exact` and with dropout, where every logit is sampled.
        """
        exact = self._eigen is not None and self._eigen.mode == "exact"
        if exact or self._dropout is not None:
            return list(chunk_slices(len(self), self._draws.numel()))
        return self._blocks(slice(None))

    def _blocks(self, part: slice) -> list[slice]:
        """Split the samples in `part` into blocks whose logits fit in memory; few samples are one block."""
        start, stop, _ = part.indices(len(self))
        size = max(1, stop - start) if self._logits is not None else block_size(len(self.head.weight))
        return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


class LogProbRows:
    """Log-probabilities (n, c) of one exit at one point, computed when rows of them are asked for.

    Args:
        objective: The exit.
        temperature: Its temperature.
        prior_var: Its prior variance.
    """

    def __init__(self, objective: ExitObjective, temperature: float, prior_var: float) -> None:
        self._objective, self._point = objective, (temperature, prior_var)
        self.shape = (len(objective), len(objective.head.weight))

    def __getitem__(self, samples: slice | Tensor) -> Tensor:
        temperature, prior_var = self._point
        with torch.no_grad():
            return next(self._objective.log_probs((temperature,), prior_var, samples))


def block_size(classes: int) -> int:
    """Return the number of samples in a block of many samples."""
    return max(1, _BLOCK // classes)


def _log_true_of_chunks(sampled: Iterable[tuple[slice, Tensor]], labels: Tensor, temperatures: Tensor) -> Tensor:
    """Compute log p(true label) (T, n) from chunks of sampled logits (m, S, c)."""
    rows = [torch.stack([log_true_softmax(z, labels[part], t) for t in temperatures]) for part, z in sampled]
    return torch.cat(rows, dim=1)
