"""What every exit says on a split. NumPy alone: from here on nothing needs torch, so a deployed runtime need not."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from exitwise.core.errors import InputError
from exitwise.core.ties import break_ties

if TYPE_CHECKING:
    from torch import Tensor

NEEDS_DRAWS = "needs draws: choose a method with Laplace or MC dropout, without product of experts"

Array = NDArray[Any]

_MAX_CACHED_VALUES = (
    100_000_000  # probabilities kept in memory; beyond that exits are computed again when asked for again
)


@dataclass(frozen=True, eq=False)
class ExitPrediction:
    """One exit's word on n samples: probs and log_probs (n, c), and the variance over draws (n,) where asked for."""

    probs: Array
    log_probs: Array
    variance: Array | None = None

    @classmethod
    def from_log_probs(cls, log_probs: Array) -> "ExitPrediction":
        return cls(np.exp(log_probs), log_probs)

    @classmethod
    def from_probs(cls, probs: Array, variance: Array | None = None) -> "ExitPrediction":
        """A zero counts as the smallest normal number of its type, so that its logarithm is finite."""
        return cls(probs, np.log(np.maximum(probs, np.finfo(probs.dtype).tiny)), variance)


class Predictions:
    """Probabilities (K, n, c) of K exits on n samples and c classes, computed exit by exit when first asked for.

    Small ones are then kept. Large ones (more than 1e8 numbers) are not: whoever walks through `exits()` holds one exit
    at a time, and what `reduce` makes of them is remembered. `exits` makes the exits, `variance` gives the variance
    over draws (K, n) of the probabilities of classes (K, n).
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        exits: Callable[[], Iterator[ExitPrediction]],
        variance: Callable[[Array], Array] | None = None,
    ) -> None:
        self.shape = shape
        self._make = exits
        self._variance_of = variance
        self._exits: list[ExitPrediction] | None = None
        self._reduced: dict[str, Array] = {}

    @classmethod
    def of(cls, preds: "Predictions | Tensor | Array | Sequence[Any]") -> "Predictions":
        """Predictions as they are, or made from a plain (K, n, c) tensor or array of probabilities."""
        if isinstance(preds, Predictions):
            return preds
        if hasattr(preds, "detach"):  # a tensor, perhaps on another device and with its graph
            preds = preds.detach().cpu()
        try:
            probs = np.asarray(preds)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"`preds` must be Predictions or probabilities (exits, samples, classes): {error}"
            ) from None
        probs = probs.astype(np.float32) if probs.dtype == np.float16 else probs
        if probs.ndim != 3 or 0 in probs.shape or not np.issubdtype(probs.dtype, np.floating):
            raise InputError(
                f"`preds` must be Predictions or floating-point probabilities (exits, samples, classes), "
                f"but got {probs.dtype} {probs.shape}"
            )
        sums = probs.sum(axis=2, dtype=np.float64)
        if not bool((probs >= 0).all()) or not bool((np.abs(sums - 1) < 1e-3).all()):
            raise InputError(
                "`preds` must hold probabilities: none negative, each sample's summing to one at every exit"
            )
        return cls(probs.shape, lambda: (ExitPrediction.from_probs(exit) for exit in probs))

    def __len__(self) -> int:
        """Number of exits."""
        return self.shape[0]

    def __repr__(self) -> str:
        return "Predictions({} exits, {} samples, {} classes)".format(*self.shape)

    def exits(self, variance: bool = False) -> Iterator[ExitPrediction]:
        """The K exits in order, one by one: probs and log_probs (n, c); variance (n,) if asked, where there is one."""
        if self._exits is None and np.prod(self.shape) <= _MAX_CACHED_VALUES:
            self._exits = list(self._make())
        exits = self._stream_and_reduce() if self._exits is None else iter(self._exits)
        if not variance or self.variance is None:
            return exits
        return (replace(exit, variance=row) for exit, row in zip(exits, self.variance, strict=True))

    def _stream_and_reduce(self) -> Iterator[ExitPrediction]:
        """The exits, computed again; what is often asked of them is noted on the way to the last."""
        wanted = {key: function for key, function in STREAMED_REDUCTIONS.items() if key not in self._reduced}
        rows: dict[str, list[Array]] = {key: [] for key in wanted}
        for exit in self._make():
            for key, function in wanted.items():
                rows[key].append(function(exit))
            yield exit
        for key, noted in rows.items():
            self._reduced.setdefault(key, np.stack(noted))

    def reduce(self, key: str, function: Callable[[ExitPrediction], Array], variance: bool = False) -> Array:
        """`function` of every exit, stacked (K, ...), and remembered under `key`."""
        if key not in self._reduced:
            self._reduced[key] = np.stack([function(exit) for exit in self.exits(variance)])
        return self._reduced[key]

    def take(self, samples: Array) -> "Predictions":
        """The predictions (K, m, c) on some of the samples, by their positions (m,) or a mask (n,)."""
        rows = np.arange(self.shape[1])[samples]

        def exits() -> Iterator[ExitPrediction]:
            return (ExitPrediction(exit.probs[rows], exit.log_probs[rows]) for exit in self.exits())

        def variance(_: Array) -> Array:
            assert self.variance is not None
            return self.variance[:, rows]

        shape = (self.shape[0], len(rows), self.shape[2])
        return Predictions(shape, exits, None if self._variance_of is None else variance)

    @property
    def predicted(self) -> Array:
        """(K, n) the most probable class at every exit."""
        return self.reduce("predicted", _predicted)

    @cached_property
    def variance(self) -> Array | None:
        """(K, n) variance over draws of the predicted class's probability; None where nothing is drawn."""
        return None if self._variance_of is None else self._variance_of(self.predicted)

    @property
    def probs(self) -> "Tensor":
        """(K, n, c), all exits at once."""
        return self._stack([exit.probs for exit in self.exits()])

    @property
    def log_probs(self) -> "Tensor":
        """(K, n, c), finite where probabilities round to zero."""
        return self._stack([exit.log_probs for exit in self.exits()])

    @staticmethod
    def _stack(arrays: list[Array]) -> "Tensor":
        import torch

        return torch.from_numpy(np.stack(arrays))


def max_prob(pred: ExitPrediction) -> Array:
    """Return the largest probability of each sample (n,)."""
    return np.asarray(pred.probs.max(axis=1))


def negative_entropy(pred: ExitPrediction) -> Array:
    """Return sum p log p over the classes of each sample (n,)."""
    return np.asarray(np.einsum("nc,nc->n", pred.probs, pred.log_probs))


def _predicted(pred: ExitPrediction) -> Array:
    return np.asarray(pred.log_probs.argmax(axis=1))


# Reductions computed in every streaming pass over predictions too large to cache, by `reduce` key.
STREAMED_REDUCTIONS: Mapping[str, Callable[[ExitPrediction], Array]] = {
    "predicted": _predicted,
    "confidence": lambda pred: break_ties(max_prob(pred), pred.probs),
    "entropy": lambda pred: break_ties(negative_entropy(pred), pred.probs),
}


def to_array(name: str, values: Any) -> Array:
    """What is given as an array: tensors, perhaps on another device and with their graph, need no import for that."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError) as error:
        raise InputError(f"`{name}` must be an array of numbers: {error}") from None


def check_labels(labels: object, samples: int, classes: int) -> Array:
    """Labels (n,) as whole numbers in 0..c-1."""
    found = np.asarray(labels)
    if found.shape != (samples,) or not np.issubdtype(found.dtype, np.integer):
        raise InputError(f"`labels` must be {samples} whole numbers, but got {found.dtype} {found.shape}")
    if samples and not 0 <= found.min() <= found.max() < classes:
        raise InputError(f"`labels` must lie in 0..{classes - 1}, but reach from {found.min()} to {found.max()}")
    return found


def log_true(log_probs: Array, labels: Array) -> Array:
    """(n,) log p(true label) from log-probabilities (n, c) and labels (n,); its mean is minus the NLPD."""
    return np.asarray(log_probs[np.arange(len(labels)), labels])
