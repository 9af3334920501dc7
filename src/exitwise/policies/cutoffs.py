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

    @cached_property
    def _invalid_cutoffs(self) -> list[Array | None]:
        """Positions of the cutoffs that separate ties, for every exit but the last; None without ties."""
        invalid = [np.flatnonzero(~valid) for valid in self.valid_cutoffs]
        return [positions if len(positions) else None for positions in invalid]

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
        return first_true(self.exit_mask(cutoffs))

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
        cutoffs, unchanged = cutoffs.copy(), 0
        for _ in range(_MAX_SWEEPS):
            for k, (sums,) in self._iter_gains([values], cutoffs):
                if self._invalid_cutoffs[k] is not None:
                    sums[self._invalid_cutoffs[k]] = -inf
                best = int(sums.argmax())
                unchanged += 1
                if sums[best] > sums[cutoffs[k]] + 1e-9:
                    cutoffs[k], unchanged = best, 1
                if unchanged == len(cutoffs):  # each cutoff is the best one for the others as they are
                    return cutoffs
        return cutoffs

    def coordinate_ascent_within(self, values: Array, costs: Array, budget: float, cutoffs: Array) -> Array:
        """Maximize the sum of values (K, n) by coordinate ascent on cutoffs with a mean cost of at most `budget`.

        Start from `cutoffs` within the budget. Among equal sums the cheapest is taken.
        """
        cutoffs, unchanged = cutoffs.copy(), 0
        spent = costs[self.exits(cutoffs)].sum()
        max_cost = budget * self.samples * (1 + 1e-12)
        values_and_costs = [values, np.broadcast_to(costs[:, None], values.shape)]
        for _ in range(_MAX_SWEEPS):
            for k, (sums, paid) in self._iter_gains(values_and_costs, cutoffs):
                current, current_paid = sums[cutoffs[k]], paid[cutoffs[k]]
                sums[spent + paid - current_paid > max_cost] = -inf
                if self._invalid_cutoffs[k] is not None:
                    sums[self._invalid_cutoffs[k]] = -inf
                equal = np.flatnonzero(sums >= sums.max() - 1e-9)
                best = equal[paid[equal].argmin()]
                unchanged += 1
                if sums[best] > current + 1e-9 or paid[best] < current_paid - 1e-12 * max_cost:
                    spent += paid[best] - current_paid
                    unchanged = 1 if best != cutoffs[k] else unchanged
                    cutoffs[k] = best
                if unchanged == len(cutoffs):
                    return cutoffs
        return cutoffs

    def _iter_gains(self, values: Sequence[Array], cutoffs: Array) -> Iterator[tuple[int, list[Array]]]:
        """Iterate over exits from last to first; yield the gain (n + 1,) of letting the r most certain samples exit.

        r is 0..n, and there is one gain for each of the values (K, n). The caller may change `cutoffs` while iterating:
        earlier exits use the change.
        """
        # Products with 0 and 1 are exact, and take an eighth of the time of `np.where` with masks without order.
        continuing = (self.rank >= cutoffs[:, None]).astype(np.float64)
        active = np.ones_like(continuing)  # samples that reach each exit
        for k in range(1, len(active)):
            np.multiply(active[k - 1], continuing[k - 1], out=active[k])
        values_later = [value[-1] for value in values]  # of samples that continue
        for k in reversed(range(len(cutoffs))):
            pairs = list(zip(values, values_later, strict=True))
            gains = [((value[k] - later) * active[k]).take(self.order[k], mode="clip") for value, later in pairs]
            yield k, [np.concatenate([[0.0], gain.cumsum()]) for gain in gains]
            if k == 0:
                return
            stays = (self.rank[k] >= cutoffs[k]).astype(np.float64)
            exiting = 1 - stays
            values_later = [value[k] * exiting + later * stays for value, later in pairs]


def first_true(mask: Array) -> Array:
    """Return the first exit (n,) at which a mask (K, n) is true, whose last row is true throughout."""
    first = np.zeros(mask.shape[1], dtype=np.int64)
    none_yet = np.ones(mask.shape[1], dtype=bool)
    for row in mask[:-1]:
        none_yet &= ~row
        first += none_yet
    return first
