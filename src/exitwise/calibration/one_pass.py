"""Predictions of one or several calibrations for blocks of samples, in one pass over the features.

Calibrations of one net differ in ensemble, temperature and prior variance, not in last layers and draws. For each
block and exit, logits and squared projections are computed once, and so is the prediction of an exit that several
calibrations have in common. Only summaries of each sample are kept: memory does not grow with samples times classes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from exitwise.calibration.calibrated_exit import CalibratedExit
from exitwise.calibration.ensembles import ENSEMBLES, ExitWeights
from exitwise.calibration.methods import Method
from exitwise.core import tensorfiles
from exitwise.core.errors import InputError
from exitwise.core.memory import align
from exitwise.core.predictions import Array, ExitPrediction
from exitwise.core.summaries import SummaryTable

_BLOCK = 1 << 22  # samples times classes of a block


class CalibratedExits(Protocol):
    """Parts of a calibration that predictions are computed from."""

    @property
    def method(self) -> Method: ...
    @property
    def exits(self) -> tuple[CalibratedExit, ...]: ...
    @property
    def exit_weights(self) -> tuple[ExitWeights, ...] | None: ...


def sample_blocks(samples: int, classes: int) -> Iterator[slice]:
    """Yield slices of the samples; few samples are a single block."""
    size = max(1, _BLOCK // classes)
    return (slice(start, min(start + size, samples)) for start in range(0, samples, size))


def take_block(features: Tensor, samples: slice) -> Tensor:
    """Return features (m, p) of some samples in float32, contiguous and aligned; all of them without a copy."""
    part = features if (samples.start, samples.stop) == (0, len(features)) else features[samples]
    return align(part.float())


class SharedExits:
    """The exits k of several calibrations: which of them share last layer, eigenvectors or everything."""

    def __init__(self, exits: Sequence[CalibratedExit]) -> None:
        self.exits = exits
        self._heads = _find_first(exits, lambda a, b: _equal(a.head.weight, b.head.weight, a.head.bias, b.head.bias))
        self._bases = _find_first(exits, _have_equal_bases)
        self.same = _find_first(exits, lambda a, b: a.equals(b))

    def log_probs(self, features: Tensor) -> list[Tensor]:
        """Return log-probabilities (m, c) of features (m, p) by every calibration; equal ones are computed once."""
        logits: dict[int, Tensor] = {}
        squares: dict[int, Tensor] = {}
        results: dict[int, Tensor] = {}
        for i, exit in enumerate(self.exits):
            if self.same[i] in results:
                continue
            head, basis = self._heads[i], self._bases[i]
            if head not in logits:
                logits[head] = exit.head.logits(features)
            if exit.uses_scale and basis not in squares:
                assert exit.posterior is not None
                squares[basis] = exit.posterior.squared_projections(features)
            results[self.same[i]] = exit.log_probs_from(features, logits[head], squares.get(basis))
        return [results[index] for index in self.same]


def _find_first(exits: Sequence[CalibratedExit], are_equal: Any) -> list[int]:
    """Return for every exit the index of the first one that it equals."""
    return [
        next(j for j, other in enumerate(exits) if j == i or are_equal(other, exit)) for i, exit in enumerate(exits)
    ]


def _equal(a: Tensor, b: Tensor, c: Tensor | None = None, d: Tensor | None = None) -> bool:
    return torch.equal(a, b) and ((c is None) == (d is None)) and (c is None or d is None or torch.equal(c, d))


def _have_equal_bases(a: CalibratedExit, b: CalibratedExit) -> bool:
    return a.posterior is not None and b.posterior is not None and torch.equal(a.posterior.basis, b.posterior.basis)


def iterate_exits(
    calibrations: Sequence[CalibratedExits],
    shared: Sequence[SharedExits],
    features: Sequence[Tensor],
    samples: slice,
) -> Iterator[list[ExitPrediction]]:
    """Yield, exit by exit, the predictions of a block of samples by every calibration, with their ensembles."""
    states: list[Any] = [None] * len(calibrations)
    with torch.no_grad():
        for k, (exits, all_features) in enumerate(zip(shared, features, strict=True)):
            x = take_block(all_features, samples)
            preds: dict[int, ExitPrediction] = {}  # of exits without an ensemble, by their index in `exits`
            row: list[ExitPrediction] = []
            for i, (calibration, own) in enumerate(zip(calibrations, exits.log_probs(x), strict=True)):
                log_probs, weights = own, calibration.exit_weights
                if weights is not None and calibration.method.ensemble is not None:
                    ensemble = ENSEMBLES[calibration.method.ensemble]
                    log_probs, states[i] = ensemble.advance_log_probs(states[i], own, weights[k].at(x))
                pred = preds.get(exits.same[i]) if log_probs is own else None
                if pred is None:
                    _check_finite(log_probs, k, samples.start)
                    pred = ExitPrediction.from_log_probs(log_probs.numpy())
                if log_probs is own:
                    preds[exits.same[i]] = pred
                row.append(pred)
            yield row


def _check_finite(log_probs: Tensor, exit: int, first: int) -> None:
    if not tensorfiles.all_finite(log_probs):
        sample = first + int((~torch.isfinite(log_probs)).any(dim=1).nonzero()[0])
        raise InputError(f"exit {exit}: the features of sample {sample} are too extreme for float32")


def summarize_in_one_pass(
    calibrations: Sequence[CalibratedExits],
    features: Sequence[Tensor],
    labels: Array | None,
    keys: Sequence[Collection[str]],
) -> list[Mapping[str, Array]]:
    """Return the summaries (K, n, ...) of the predictions of every calibration, in one pass over the features.

    Args:
        calibrations: Calibrations of one net.
        features: Features K x (n, p_k); they may be mapped files, only blocks are read.
        labels: True classes (n,), if summaries of the true label are wanted.
        keys: For every calibration, what to summarize.
    """
    samples, classes = len(features[0]), len(calibrations[0].exits[0].head.weight)
    shared = [SharedExits(exits) for exits in zip(*(calibration.exits for calibration in calibrations), strict=True)]
    tables = [SummaryTable(len(features), samples, labels, wanted) for wanted in keys]
    for block in sample_blocks(samples, classes):
        for k, preds in enumerate(iterate_exits(calibrations, shared, features, block)):
            for table, pred in zip(tables, preds, strict=True):
                table.add(k, block, pred)
    return [table.result() for table in tables]
