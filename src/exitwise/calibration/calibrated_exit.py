"""One exit's last layer with its posterior and temperature: predictions from features."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from exitwise.calibration.dropout import DropoutMasks
from exitwise.calibration.laplace import Posterior
from exitwise.calibration.mc_softmax import chunk_slices, interpolated_log_mean_softmax, log_mean_softmax, sample_logits
from exitwise.calibration.trace import HeadWeights
from exitwise.core.errors import InputError
from exitwise.core.memory import align_fields

POSTERIOR_TENSORS = ("basis", "inverse", "offset", "root")


@dataclass(frozen=True, eq=False)
class CalibratedExit:
    """One exit's last layer with its temperature and its posterior or dropout masks, independent of other exits."""

    head: HeadWeights
    temperature: float
    prior_var: float
    posterior: Posterior | None = None
    draws: Tensor | None = None  # (S, c)
    dropout: DropoutMasks | None = None
    shifts: Tensor | None = None  # (S, c): L g of all draws g, if the posterior has no root

    def __post_init__(self) -> None:
        align_fields(self, "draws", "shifts")

    def log_probs(self, features: Tensor) -> Tensor:
        """Return log-probabilities (n, c) of features (n, p), in float32."""
        features = features.float()
        return self.log_probs_from(features, self.head.logits(features))

    def log_probs_from(self, features: Tensor, logits: Tensor, squares: Tensor | None = None) -> Tensor:
        """Return log-probabilities (n, c) of features (n, p) in float32 whose logits (n, c) are known.

        Args:
            features: Features.
            logits: Their logits by the last layer of this exit.
            squares: Squared projections (n, q) on the basis of this exit's posterior, if they are known.
        """
        if (self.posterior is None and self.dropout is None) or not len(features):
            return (logits / self.temperature).log_softmax(dim=1)
        if self.uses_scale:
            assert self.posterior is not None
            squares = self.posterior.squared_projections(features) if squares is None else squares
            scale = self.posterior.scale_from_squares(squares)
            return interpolated_log_mean_softmax(logits, scale.sqrt(), self.drawn_shifts, self.temperature)
        return torch.cat([log_mean_softmax(z, self.temperature) for _, z in self._sampled_logits(features)])

    @property
    def uses_scale(self) -> bool:
        """Return whether predictions need only the scale of a sample's covariance, not its sampled logits."""
        return self.posterior is not None and self.posterior.mode == "paper"

    def equals(self, other: "CalibratedExit") -> bool:
        """Return whether another exit predicts the same from the same features."""
        if self is other or self.dropout is not None or other.dropout is not None:
            return self is other
        if (self.temperature, self.prior_var) != (other.temperature, other.prior_var):
            return False
        tensors = [
            (self.head.weight, other.head.weight),
            (self.head.bias, other.head.bias),
            (self.draws, other.draws),
            (self.shifts, other.shifts),
        ]
        if (self.posterior is None) != (other.posterior is None):
            return False
        if self.posterior is not None and other.posterior is not None:
            if self.posterior.mode != other.posterior.mode:
                return False
            names = POSTERIOR_TENSORS
            tensors += [(getattr(self.posterior, name), getattr(other.posterior, name)) for name in names]
        return all(
            a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)) for a, b in tensors
        )

    @cached_property
    def drawn_shifts(self) -> Tensor:
        """Shifts L g (S, c) of all draws g, multiplied once, before test time; for paper and naive."""
        if self.shifts is not None:
            return self.shifts
        if self.posterior is None or self.draws is None:
            raise InputError("there are no draws without Laplace or dropout")
        shifts: Tensor = self.draws @ self.posterior.dense_root().to(self.draws.dtype).T
        return shifts

    def class_probs(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return probabilities (j, n, S) of `classes` (j, n) under every draw: j classes for each sample."""
        parts = []
        for part, z in self._sampled_logits(features.float()):
            chosen = classes[:, part, None].permute(1, 2, 0).expand(-1, z.shape[1], -1)  # (m, S, j)
            log_z = (z / self.temperature).logsumexp(dim=2, keepdim=True)
            parts.append((z.gather(2, chosen) / self.temperature - log_z).exp().permute(2, 0, 1))
        return torch.cat(parts, dim=1)

    def _sampled_logits(self, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the sampled logits (m, S, c) of chunks of samples."""
        if self.dropout is not None:
            yield from self.dropout.sample_logits(self.head, features)
            return
        if self.posterior is None or self.draws is None:
            raise InputError("there are no draws without Laplace or dropout")
        size = self.draws.numel() + (self.draws.shape[1] ** 2 if self.posterior.mode == "naive" else 0)
        for part in chunk_slices(len(features), size):
            logits, scale = self.head.logits(features[part]), self.posterior.scale(features[part])
            if self.posterior.mode == "paper":
                yield part, logits[:, None] + scale.sqrt()[:, None, None] * self.drawn_shifts
            else:
                yield part, sample_logits(logits, scale, self.posterior, self.draws)
