"""Last-layer Monte Carlo dropout at one exit: logits under masks that drop features and scale up the others."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from exitwise.calibration.mc_softmax import chunk_slices
from exitwise.calibration.trace import HeadWeights
from exitwise.core.memory import align_fields


@dataclass(frozen=True, eq=False)
class DropoutMasks:
    """Masks (S, p) of one exit's features, drawn once and shared by all samples."""

    rate: float
    masks: Tensor  # (S, p), bool: True for features that are kept

    def __post_init__(self) -> None:
        align_fields(self, "masks")

    @cached_property
    def factors(self) -> Tensor:
        """Factors (S, p) of the features: 0 or 1 / (1 - rate)."""
        return self.masks.float() / (1 - self.rate)

    def sample_logits(self, head: HeadWeights, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield logits (m, S, c) under every mask, for chunks of the features (n, p)."""
        for part in chunk_slices(len(features), self.masks.numel() + len(self.masks) * len(head.weight)):
            yield part, head.logits(features[part, None] * self.factors)
