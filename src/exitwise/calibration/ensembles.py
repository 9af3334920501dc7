"""Ensembles of the exits that a sample has passed: how exit k is combined with the ensemble of the exits before it.

To add an ensemble, add an entry to `ENSEMBLES`. Methods with it are then known by name, tuned, saved and run.
No torch here, only methods of tensors: the command names the methods before it starts.
"""

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_MIN_PROB = 2.0**-126  # the smallest normal float32
_MIN_LOG_PROB = log(_MIN_PROB)


class Ensemble(Protocol):
    """Combination of an exit with the ensemble of the earlier exits; both shares are positive and sum to one.

    Attributes:
        label: Prefix of the method's name, such as "MIE".
        is_elementwise: Whether p(class) of the ensemble depends only on p(class) of the exits. Then the true label is
            enough to tune it, and draws can be combined one by one, which gives a variance.
    """

    label: str
    is_elementwise: bool

    def combine_log_probs(self, earlier: "Tensor", log_probs: "Tensor", earlier_share: float, share: float) -> "Tensor":
        """Return log p (..., c) of the ensemble with this exit; any shape if it is elementwise."""
        ...

    def combine_probs(self, earlier: "Tensor", probs: "Tensor", share: float) -> "Tensor":
        """Return p (n, ..., c) of the ensemble with this exit, for the runtime; it must be exportable to ONNX."""
        ...


class _Mean:
    """Model-internal ensembling (MIE): the weighted mean of the exits' probabilities."""

    label = "MIE"
    is_elementwise = True

    def combine_log_probs(self, earlier: "Tensor", log_probs: "Tensor", earlier_share: float, share: float) -> "Tensor":
        return (earlier + log(earlier_share)).logaddexp(log_probs + log(share))

    def combine_probs(self, earlier: "Tensor", probs: "Tensor", share: float) -> "Tensor":
        return earlier * (1 - share) + probs * share


class _Product:
    """Product of experts (PoE): the normalized, weighted geometric mean of the exits' probabilities.

    Probabilities below the smallest normal float32 are raised to it, in both functions: the runtime stores
    probabilities instead of logarithms and has to give the same results.
    """

    label = "PoE"
    is_elementwise = False

    def combine_log_probs(self, earlier: "Tensor", log_probs: "Tensor", earlier_share: float, share: float) -> "Tensor":
        earlier, log_probs = earlier.clamp(min=_MIN_LOG_PROB), log_probs.clamp(min=_MIN_LOG_PROB)
        return (earlier * earlier_share + log_probs * share).log_softmax(dim=-1)

    def combine_probs(self, earlier: "Tensor", probs: "Tensor", share: float) -> "Tensor":
        log_earlier, log_probs = earlier.clamp(min=_MIN_PROB).log(), probs.clamp(min=_MIN_PROB).log()
        return (log_earlier * (1 - share) + log_probs * share).softmax(dim=-1)


ENSEMBLES: Mapping[str, Ensemble] = {"mie": _Mean(), "poe": _Product()}
