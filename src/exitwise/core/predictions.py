"""Predictions of every exit on a split. NumPy only, so that a deployed runtime does not need torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.exit_prediction import Array as Array
from exitwise.core.exit_prediction import ExitPrediction as ExitPrediction
from exitwise.core.summaries import OF_TRUE_LABEL, SUMMARIES, brier, true_label_rank
from exitwise.core.summaries import log_true as log_true
from exitwise.core.summaries import negative_entropy as negative_entropy
from exitwise.core.ties import break_ties

if TYPE_CHECKING:
    from torch import Tensor

NEEDS_DRAWS = "needs draws: choose a method with Laplace or MC dropout, without product of experts"

_MAX_CACHED_VALUES = 25_000_000  # probabilities kept in memory; above this, exits are recomputed in every pass


class Predictions:
    """Probabilities (K, n, c) of K exits on n samples and c classes, computed exit by exit on first use.

    Up to 2.5e7 values are cached. Above that nothing is cached: iterate over `exits()` to hold one exit at a time.
    Results of `reduce` are still cached, and so are the summaries (K, n) that evaluation and policies need; the
    predictions of a calibration compute all of these in one pass over blocks of samples. `Predictions.of` makes
    predictions from an array of probabilities.

    Args:
        shape: (K, n, c).
        exits: Function that returns an iterator over the K exits; called again for every pass if nothing is cached.
        variance: Function from classes (K, n) to the variance over draws (K, n) of their probabilities; None for
            methods without draws.
        summarize: Function that computes summaries (K, n) by their `reduce` key in one pass, see `core.summaries`;
            called once, if nothing is cached.
        labels: True classes (n,) that the summaries include metrics of.
        keep: Whether probabilities may be cached; otherwise summaries are used for any number of values.

    Example:
        >>> import exitwise as ew
        >>> preds = ew.Predictions.of([[[0.9, 0.1], [0.4, 0.6]], [[0.8, 0.2], [0.7, 0.3]]])
        >>> preds
        Predictions(2 exits, 2 samples, 2 classes)
        >>> preds.predicted.tolist()
        [[0, 1], [0, 0]]
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        exits: Callable[[], Iterator[ExitPrediction]],
        variance: Callable[[Array], Array] | None = None,
        summarize: Callable[[], Mapping[str, Array]] | None = None,
        labels: Array | None = None,
        keep: bool = True,
    ) -> None:
        self.shape = shape
        self._compute_summaries, self._labels, self._keep = summarize, labels, keep
        self._has_summaries = False
        self._compute_exits = exits
        self._compute_variance = variance
        self._exits: list[ExitPrediction] | None = None
        self._reduced: dict[str, Array] = {}

    @classmethod
    def of(cls, preds: "Predictions | Tensor | Array | Sequence[Any]") -> "Predictions":
        """Return `preds` unchanged if they are Predictions, else make them from probabilities (K, n, c).

        Args:
            preds: Predictions, or probabilities (K, n, c) as a tensor, an array or nested lists.

        Raises:
            InputError: If the shape or the type is wrong, or the values are not probabilities.
        """
        if isinstance(preds, Predictions):
            return preds
        if hasattr(preds, "detach"):  # a tensor, perhaps on another device or with a graph
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
        return cls(probs.shape, lambda: map(ExitPrediction, probs))

    def __len__(self) -> int:
        """Number of exits."""
        return self.shape[0]

    def __repr__(self) -> str:
        return "Predictions({} exits, {} samples, {} classes)".format(*self.shape)

    def exits(self, variance: bool = False) -> Iterator[ExitPrediction]:
        """Iterate over the K exits in order: probs and log_probs (n, c) each, and the variance (n,) on request.

        Args:
            variance: Include the variance over draws; it stays None for methods without draws.
        """
        if self._exits is None and np.prod(self.shape) <= _MAX_CACHED_VALUES:
            self._exits = list(self._compute_exits())
        exits = self._stream_and_reduce() if self._exits is None else iter(self._exits)
        if not variance or self.variance is None:
            return exits
        return (exit.with_variance(row) for exit, row in zip(exits, self.variance, strict=True))

    def _stream_and_reduce(self) -> Iterator[ExitPrediction]:
        """Recompute the exits; cache the frequent reductions once the last exit is reached."""
        functions = {key: function for key, function in STREAMED_REDUCTIONS.items() if key not in self._reduced}
        rows: dict[str, list[Array]] = {key: [] for key in functions}
        for exit in self._compute_exits():
            for key, function in functions.items():
                rows[key].append(function(exit))
            yield exit
        for key, values in rows.items():
            self._reduced.setdefault(key, np.stack(values))

    def reduce(self, key: str, function: Callable[[ExitPrediction], Array], variance: bool = False) -> Array:
        """Apply `function` to every exit and return the stacked results (K, ...), cached under `key`.

        Args:
            key: Name of the reduction; a later call with the same key returns the cached result.
            function: Function of an exit's prediction.
            variance: Give `function` the variance over draws, too.
        """
        if key not in self._reduced:
            self._reduce_in_one_pass()
        if key not in self._reduced:
            self._reduced[key] = np.stack([function(exit) for exit in self.exits(variance)])
        return self._reduced[key]

    def reduce_with_labels(self, labels: Array) -> tuple[Array, Array, Array]:
        """Return log p(true label), the rank of the true label and the Brier score (K, n), from labels (n,)."""
        if self._labels is not None and np.array_equal(labels, self._labels):
            self._reduce_in_one_pass()
            if self._reduced.keys() >= OF_TRUE_LABEL:
                return self._reduced["log_true"], self._reduced["rank"], self._reduced["brier"]
        rows = [
            (log_true(pred.log_probs, labels), true_label_rank(pred.log_probs, labels), brier(pred.probs, labels))
            for pred in self.exits()
        ]
        values = tuple(np.stack(column) for column in zip(*rows, strict=True))
        if self._labels is None or np.array_equal(labels, self._labels):
            self._labels = labels.copy()
            self._reduced |= dict(zip(("log_true", "rank", "brier"), values, strict=True))
        return values[0], values[1], values[2]

    @property
    def largest(self) -> Array:
        """Largest probability of each sample at every exit (K, n), the confidence without broken ties."""
        return self.reduce("largest", max_prob)

    @property
    def _is_summarized(self) -> bool:
        """Return whether summaries are used instead of cached probabilities."""
        is_large = not self._keep or int(np.prod(self.shape)) > _MAX_CACHED_VALUES
        return self._compute_summaries is not None and is_large

    def _reduce_in_one_pass(self) -> None:
        """Compute all summaries, the first time and if they are used."""
        if self._is_summarized and not self._has_summaries:
            assert self._compute_summaries is not None
            self._reduced = {**self._compute_summaries(), **self._reduced}
            self._has_summaries = True

    def take(self, samples: Array) -> "Predictions":
        """Return the predictions (K, m, c) for a subset of the samples.

        Args:
            samples: Positions (m,) or a mask (n,).
        """
        rows = np.arange(self.shape[1])[samples]

        def exits() -> Iterator[ExitPrediction]:
            return (exit.take(rows) for exit in self.exits())

        def variance(_: Array) -> Array:
            assert self.variance is not None
            return self.variance[:, rows]

        def summaries() -> Mapping[str, Array]:
            self._reduce_in_one_pass()
            known = (SUMMARIES | OF_TRUE_LABEL) & self._reduced.keys()
            return {key: self._reduced[key][:, rows] for key in known}

        return Predictions(
            (self.shape[0], len(rows), self.shape[2]),
            exits,
            None if self._compute_variance is None else variance,
            summaries if self._is_summarized else None,
            None if self._labels is None else self._labels[rows],
            keep=not self._is_summarized,
        )

    @property
    def predicted(self) -> Array:
        """Most probable class of each sample at every exit (K, n)."""
        return self.reduce("predicted", _predict_classes)

    @cached_property
    def variance(self) -> Array | None:
        """Variance over draws of the predicted class's probability (K, n); None for methods without draws."""
        return None if self._compute_variance is None else self._compute_variance(self.predicted)

    @property
    def probs(self) -> "Tensor":
        """Probabilities (K, n, c) of all exits at once."""
        return self._stack([exit.probs for exit in self.exits()])

    @property
    def log_probs(self) -> "Tensor":
        """Log-probabilities (K, n, c) of all exits at once, finite where probabilities round to zero."""
        return self._stack([exit.log_probs for exit in self.exits()])

    @staticmethod
    def _stack(arrays: list[Array]) -> "Tensor":
        import torch

        return torch.from_numpy(np.stack(arrays))


def max_prob(pred: ExitPrediction) -> Array:
    """Return the largest probability of each sample (n,)."""
    return np.asarray(pred.probs.max(axis=1))


def _predict_classes(pred: ExitPrediction) -> Array:
    """Return the most probable class of each sample (n,)."""
    return np.asarray(pred.log_probs.argmax(axis=1))


# Reductions computed in every streaming pass over predictions too large to cache, by `reduce` key.
STREAMED_REDUCTIONS: Mapping[str, Callable[[ExitPrediction], Array]] = {
    "predicted": _predict_classes,
    "largest": max_prob,
    "confidence": lambda pred: break_ties(max_prob(pred), pred.probs),
    "entropy": lambda pred: break_ties(negative_entropy(pred), pred.probs),
}


def to_array(name: str, values: Any) -> Array:
    """Return `values` as an array; tensors may be on another device or have a graph. Does not import torch."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError) as error:
        raise InputError(f"`{name}` must be an array of numbers: {error}") from None


def check_labels(labels: object, samples: int, classes: int) -> Array:
    """Return labels (n,) as an array; raise InputError unless they are whole numbers in 0..c-1.

    Args:
        labels: True classes (n,): an array, a tensor or a list.
        samples: Number of samples, n.
        classes: Number of classes, c.

    Returns:
        The labels (n,) as an array.

    Raises:
        InputError: If they are not n whole numbers in 0..c-1.

    Example:
        >>> import exitwise as ew
        >>> ew.metrics.check_labels([0, 2, 1], samples=3, classes=3).tolist()
        [0, 2, 1]
    """
    array = np.asarray(labels)
    if array.shape != (samples,) or not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"`labels` must be {samples} whole numbers, but got {array.dtype} {array.shape}")
    if samples and not 0 <= array.min() <= array.max() < classes:
        raise InputError(f"`labels` must lie in 0..{classes - 1}, but reach from {array.min()} to {array.max()}")
    return array
