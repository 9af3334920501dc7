"""Thresholds as cutoffs, ranks in the sorted scores: integers, which are fast to search over. NumPy only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from exitwise.core.predictions import Array

_MAX_SWEEPS = 10  # over all exits in a coordinate ascent; nearly all end after three


@dataclass(frozen=True, eq=False)
class ScoreRanking:
    """Samples ranked by their scores (K, n) at every exit but the last, where all remaining samples exit.

    Cutoffs (K - 1,) are the numbers of samples, among all and the most certain first, that score above each exit's
    threshold; samples that exited before are counted too. Ties cannot be separated: `valid_cutoffs` (K - 1, n + 1) lie
    at the ends of runs of ties.
    """

    scores: Array

    @cached_property
    def order(self) -> Array:
        """Samples (K - 1, n), the most certain first."""
        return np.argsort(-self.scores[:-1], axis=1, kind="stable")

    @cached_property
    def rank(self) -> Array:
        """Position (K - 1, n) of every sample in `order`."""
        rank = np.empty_like(self.order)
        np.put_along_axis(rank, self.order, np.arange(self.samples)[None], axis=1)
        return rank

    @cached_property
    def valid_cutoffs(self) -> Array:
        """Mask (K - 1, n + 1) of the cutoffs that do not separate ties."""
        ordered = np.take_along_axis(self.scores[:-1], self.order, axis=1)
        valid = np.ones((len(ordered), self.samples + 1), dtype=bool)
        valid[:, 1:-1] = ordered[:, 1:] != ordered[:, :-1]
        return valid

    @property
    def samples(self) -> int:
        """Number of samples, n."""
        return int(self.scores.shape[1])

    def exit_mask(self, cutoffs: Array) -> Array:
        """Return the mask (K, n) of the samples that exit at each exit if they reach it."""
        mask = np.ones(self.scores.shape, dtype=bool)
        np.less(self.rank, cutoffs[:, None], out=mask[:-1])
        return mask

    def exits(self, cutoffs: Array) -> Array:
        """Return the exit (n,) that each sample takes."""
        return np.asarray(self.exit_mask(cutoffs).argmax(axis=0))

    def cutoffs_for_counts(self, counts: Array) -> Array:
        """Return cutoffs at which `counts` (K,) samples exit; none exit where fewer than that remain.

        Samples tied with the last of them exit too.
        """
        cutoffs = np.zeros(len(self.scores) - 1, dtype=np.int64)
        active = np.ones(self.samples, dtype=bool)
        remaining = self.samples
        for k, count in enumerate(counts[:-1].astype(np.int64).tolist()):
            if 0 < count <= remaining:
                position = np.flatnonzero(active[self.order[k]])[count - 1] + 1
                cutoffs[k] = position + self.valid_cutoffs[k, position:].argmax()
                active[self.order[k, : cutoffs[k]]] = False
                remaining = int(np.count_nonzero(active))
        return cutoffs

    def thresholds(self, cutoffs: Array) -> tuple[float, ...]:
        """Return thresholds (K,) midway between the scores of samples that exit and of samples that continue."""
        active = np.ones(self.samples, dtype=bool)
        thresholds = []
        for scores, mask in zip(self.scores[:-1], self.exit_mask(cutoffs)[:-1], strict=True):
            exiting, continuing = scores[active & mask], scores[active & ~mask]
            low, high = continuing.max(initial=-inf), exiting.min(initial=inf)
            # No number may lie between neighboring floats: then the upper one.
            middle = low if low == -inf else high if high == inf else (low + high) / 2
            thresholds.append(float(inf if not len(exiting) else middle if middle > low or low == -inf else high))
            active &= ~mask
        return (*thresholds, -inf)

    def coordinate_ascent(self, values: Array, cutoffs: Array) -> Array:
        """Maximize the sum of values (K, n) at the exits taken by coordinate ascent on the cutoffs.

        Return a local maximum: moving a single cutoff does not increase the sum.
        """
        cutoffs = cutoffs.copy()
        for _ in range(_MAX_SWEEPS):
            before = cutoffs.copy()
            for k, (sums,) in self._iter_gains([values], cutoffs):
                sums[~self.valid_cutoffs[k]] = -inf
                best = int(sums.argmax())
                if sums[best] > sums[cutoffs[k]] + 1e-9:
                    cutoffs[k] = best
            if (cutoffs == before).all():
                break
        return cutoffs

    def coordinate_ascent_within(self, values: Array, costs: Array, budget: float, cutoffs: Array) -> Array:
        """Maximize the sum of values (K, n) by coordinate ascent on cutoffs with a mean cost of at most `budget`.

        Start from `cutoffs` within the budget. Among equal sums the cheapest is taken.
        """
        cutoffs = cutoffs.copy()
        spent = costs[self.exits(cutoffs)].sum()
        max_cost = budget * self.samples * (1 + 1e-12)
        values_and_costs = [values, np.broadcast_to(costs[:, None], values.shape)]
        for _ in range(_MAX_SWEEPS):
            before = cutoffs.copy()
            for k, (sums, paid) in self._iter_gains(values_and_costs, cutoffs):
                current, current_paid = sums[cutoffs[k]], paid[cutoffs[k]]
                sums[~self.valid_cutoffs[k] | (spent + paid - current_paid > max_cost)] = -inf
                equal = np.flatnonzero(sums >= sums.max() - 1e-9)
                best = equal[paid[equal].argmin()]
                if sums[best] > current + 1e-9 or paid[best] < current_paid - 1e-12 * max_cost:
                    spent += paid[best] - current_paid
                    cutoffs[k] = best
            if (cutoffs == before).all():
                break
        return cutoffs

    def _iter_gains(self, values: Sequence[Array], cutoffs: Array) -> Iterator[tuple[int, list[Array]]]:
        """Iterate over exits from last to first; yield the gain (n + 1,) of letting the r most certain samples exit.

        r is 0..n, and there is one gain for each of the values (K, n). The caller may change `cutoffs` while iterating:
        earlier exits use the change.
        """
        mask = self.exit_mask(cutoffs)
        active = np.ones_like(mask)  # samples that reach each exit
        for k in range(1, len(mask)):
            np.logical_and(active[k - 1], ~mask[k - 1], out=active[k])
        values_later = [value[-1] for value in values]  # of samples that continue
        for k in reversed(range(len(cutoffs))):
            pairs = list(zip(values, values_later, strict=True))
            gains = [np.where(active[k], value[k] - later, 0.0)[self.order[k]] for value, later in pairs]
            yield k, [np.concatenate([[0.0], gain.cumsum()]) for gain in gains]
            exiting = self.rank[k] < cutoffs[k]
            values_later = [np.where(exiting, value[k], later) for value, later in pairs]
