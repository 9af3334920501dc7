"""Ensembles of the exits that a sample has passed: the prediction of exit k from those of exits 0..k.

An ensemble advances exit by exit and carries a state from one to the next: the simulation (`advance_log_probs`) and the
runtime (`advance_probs`) alike. To add an ensemble, add an entry to `ENSEMBLES`. Methods with it are then known by
name, tuned, saved and run. Where exit k only has to be combined with the ensemble of the exits before it, derive from
`RecursiveEnsemble`.
No torch here, only methods of tensors: the command names the methods before it starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MIN_PROB = 2.0**-126  # the smallest normal float32
MIN_LOG_PROB = log(MIN_PROB)


@dataclass(frozen=True, eq=False)
class ExitWeights:
    """Weights of the exits 0..k in the ensemble of exit k, not normalized; `weights[-1]` is the weight of exit k.

    A pool may also have a bias (c,), which is added to its logits, and an update (p, c), which is multiplied by the
    features of exit k and added, too.
    """

    weights: tuple[float, ...]
    bias: "Tensor | None" = None
    update: "Tensor | None" = None

    def at(self, features: "Tensor") -> "ExitWeights":
        """Return the weights for samples with features (n, p): an update becomes part of a bias (n, c)."""
        if self.update is None:
            return self
        bias = features.float() @ self.update
        return ExitWeights(self.weights, bias if self.bias is None else bias + self.bias)

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the ensemble of the earlier exits and of exit k itself; they sum to one."""
        earlier, own = sum(self.weights[:-1]), self.weights[-1]
        return earlier / (earlier + own), own / (earlier + own)


class Ensemble(Protocol):
    """Combination of the exits that a sample has passed.

    Attributes:
        label: Prefix of the method's name, such as "MIE".
        is_elementwise: Whether p(class) of the ensemble depends only on p(class) of the exits. Then the true label is
            enough to tune it, and draws can be combined one by one, which gives a variance.
        is_fitted: Whether its weights are fitted on validation samples after every exit was tuned on its own.
            Otherwise an exit is weighted by the cost up to it, and tuned by the NLPD of the ensemble.
        carries_probs: Whether the state of the runtime is the ensemble's probabilities (n, c); otherwise it is a
            tensor (n, k, c) of its own.
    """

    label: str
    is_elementwise: bool
    is_fitted: bool
    carries_probs: bool

    def advance_log_probs(self, state: Any, log_probs: "Tensor", exit: ExitWeights) -> "tuple[Tensor, Any]":
        """Return log p (..., c) of the ensemble with this exit, and the state for the next exit.

        `state` is None at the first exit. If the ensemble is elementwise, `log_probs` may have any shape.
        """
        ...

    def advance_probs(self, state: "Tensor | None", probs: "Tensor", exit: ExitWeights) -> "tuple[Tensor, Tensor]":
        """Return p (n, ..., c) of the ensemble with this exit, and the state; it must be exportable to ONNX."""
        ...


class RecursiveEnsemble:
    """Base of ensembles whose state is the ensemble itself: exit k is combined with the ensemble of exits 0..k-1.

    Subclasses define `label`, `is_elementwise`, `combine_log_probs` and `combine_probs`. Both shares are positive and
    sum to one.
    """

    is_fitted = False
    carries_probs = True

    def combine_log_probs(self, earlier: "Tensor", log_probs: "Tensor", earlier_share: float, share: float) -> "Tensor":
        """Return log p (..., c) of the ensemble with this exit."""
        raise NotImplementedError

    def combine_probs(self, earlier: "Tensor", probs: "Tensor", share: float) -> "Tensor":
        """Return p (n, ..., c) of the ensemble with this exit, for the runtime."""
        raise NotImplementedError

    def advance_log_probs(self, state: Any, log_probs: "Tensor", exit: ExitWeights) -> "tuple[Tensor, Any]":
        combined = log_probs if state is None else self.combine_log_probs(state, log_probs, *exit.shares)
        return combined, combined

    def advance_probs(self, state: "Tensor | None", probs: "Tensor", exit: ExitWeights) -> "tuple[Tensor, Tensor]":
        combined = probs if state is None else self.combine_probs(state, probs, exit.shares[1])
        return combined, combined


class _Mean(RecursiveEnsemble):
    """Model-internal ensembling (MIE): the weighted mean of the exits' probabilities."""

    label = "MIE"
    is_elementwise = True

    def combine_log_probs(self, earlier: "Tensor", log_probs: "Tensor", earlier_share: float, share: float) -> "Tensor":
        return (earlier + log(earlier_share)).logaddexp(log_probs + log(share))

    def combine_probs(self, earlier: "Tensor", probs: "Tensor", share: float) -> "Tensor":
        return earlier * (1 - share) + probs * share


class _Product(RecursiveEnsemble):
    """Product of experts (PoE): the normalized, weighted geometric mean of the exits' probabilities.

    Probabilities below the smallest normal float32 are raised to it, in both functions: the runtime stores
    probabilities instead of logarithms and has to give the same results.
    """

    label = "PoE"
    is_elementwise = False

    def combine_log_probs(self, earlier: "Tensor", log_probs: "Tensor", earlier_share: float, share: float) -> "Tensor":
        earlier, log_probs = earlier.clamp(min=MIN_LOG_PROB), log_probs.clamp(min=MIN_LOG_PROB)
        return (earlier * earlier_share + log_probs * share).log_softmax(dim=-1)

    def combine_probs(self, earlier: "Tensor", probs: "Tensor", share: float) -> "Tensor":
        log_earlier, log_probs = earlier.clamp(min=MIN_PROB).log(), probs.clamp(min=MIN_PROB).log()
        return (log_earlier * (1 - share) + log_probs * share).softmax(dim=-1)


class _Pool:
    """Log-linear pool: the normalized product of the exits' probabilities, each to the power of a fitted weight.

    The state is the log-probabilities of all exits so far: later exits weight them anew. Probabilities below the
    smallest normal float32 are raised to it, as in a product of experts.
    """

    label = "Pool"
    is_elementwise = False
    is_fitted = True
    carries_probs = False

    def advance_log_probs(self, state: Any, log_probs: "Tensor", exit: ExitWeights) -> "tuple[Tensor, Any]":
        experts = (*(state or ()), log_probs.clamp(min=MIN_LOG_PROB))
        logits = experts[-1] * exit.weights[-1]
        for weight, expert in zip(exit.weights, experts[:-1], strict=False):
            if weight:
                logits = logits.add_(expert, alpha=weight)
        if exit.bias is not None:
            logits += exit.bias
        return logits.log_softmax(dim=-1), experts

    def advance_probs(self, state: "Tensor | None", probs: "Tensor", exit: ExitWeights) -> "tuple[Tensor, Tensor]":
        from torch import cat

        own = probs.clamp(min=MIN_PROB).log()
        logits = own * exit.weights[-1]
        for j, weight in enumerate(exit.weights[:-1]):
            if weight and state is not None:
                logits = logits + state[:, j] * weight
        if exit.bias is not None:
            logits = logits + exit.bias
        return logits.softmax(dim=-1), own[:, None] if state is None else cat([state, own[:, None]], dim=1)


ENSEMBLES: Mapping[str, Ensemble] = {"mie": _Mean(), "poe": _Product(), "pool": _Pool()}
