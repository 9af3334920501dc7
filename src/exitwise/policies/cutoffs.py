"""Thresholds as cuts in the order of the scores: whole numbers, on which searching is quick. NumPy alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from exitwise.core.predictions import Array

_SWEEPS = 10  # of a search over all exits; nearly all end after three


@dataclass(frozen=True, eq=False)
class ScoreRanking:
    """Samples in the order of their scores (K, n) at every exit but the last, which takes everyone.

    Cuts (K - 1,) say how many of all samples, the most certain first, an exit would let go; those who have left before
    are among them. Samples with equal scores cannot be parted: cuts lie at `ends` (K - 1, n + 1) of such runs.
    """

    scores: Array

    @cached_property
    def order(self) -> Array:
        """(K - 1, n) samples, the most certain first."""
        return np.argsort(-self.scores[:-1], axis=1, kind="stable")

    @cached_property
    def rank(self) -> Array:
        """(K - 1, n) the place of every sample in that order."""
        rank = np.empty_like(self.order)
        np.put_along_axis(rank, self.order, np.arange(self.samples)[None], axis=1)
        return rank

    @cached_property
    def valid_cutoffs(self) -> Array:
        """(K - 1, n + 1) whether a cut may lie there."""
        ordered = np.take_along_axis(self.scores[:-1], self.order, axis=1)
        ends = np.ones((len(ordered), self.samples + 1), dtype=bool)
        ends[:, 1:-1] = ordered[:, 1:] != ordered[:, :-1]
        return ends

    @property
    def samples(self) -> int:
        return int(self.scores.shape[1])

    def exit_mask(self, cuts: Array) -> Array:
        """(K, n) whether an exit lets a sample go that comes as far."""
        leave = np.ones(self.scores.shape, dtype=bool)
        np.less(self.rank, cuts[:, None], out=leave[:-1])
        return leave

    def exits(self, cuts: Array) -> Array:
        """(n,) the exit that each sample takes."""
        return np.asarray(self.exit_mask(cuts).argmax(axis=0))

    def cutoffs_for_counts(self, counts: Array) -> Array:
        """Cuts that let `counts` (K,) samples leave at each exit, or nobody where fewer are left."""
        cuts = np.zeros(len(self.scores) - 1, dtype=np.int64)
        here = np.ones(self.samples, dtype=bool)
        left = self.samples
        for k, count in enumerate(counts[:-1].astype(np.int64).tolist()):
            if 0 < count <= left:
                place = np.flatnonzero(here[self.order[k]])[count - 1] + 1
                cuts[k] = (
                    place + self.valid_cutoffs[k, place:].argmax()
                )  # who cannot be parted from the last leaves too
                here[self.order[k, : cuts[k]]] = False
                left = int(np.count_nonzero(here))
        return cuts

    def thresholds(self, cuts: Array) -> tuple[float, ...]:
        """The same as thresholds, midway between those who leave and those who go on."""
        leave = self.exit_mask(cuts)
        here = np.ones(self.samples, dtype=bool)
        found = []
        for row, gone in zip(self.scores[:-1], leave[:-1], strict=True):
            goes, stays = row[here & gone], row[here & ~gone]
            low, high = stays.max(initial=-inf), goes.min(initial=inf)
            # Nothing may lie between neighbouring numbers: then the upper one.
            middle = low if low == -inf else high if high == inf else (low + high) / 2
            found.append(float(inf if not len(goes) else middle if middle > low or low == -inf else high))
            here &= ~gone
        return (*found, -inf)

    def coordinate_ascent(self, values: Array, cuts: Array) -> Array:
        """Cuts of which none can be moved, the others as they are, to a larger sum of values (K, n) at the exits."""
        cuts = cuts.copy()
        for _ in range(_SWEEPS):
            before = cuts.copy()
            for k, (sums,) in self._gains([values], cuts):
                sums[~self.valid_cutoffs[k]] = -inf
                best = int(sums.argmax())
                if sums[best] > sums[cuts[k]] + 1e-9:
                    cuts[k] = best
            if (cuts == before).all():
                break
        return cuts

    def coordinate_ascent_within(self, values: Array, costs: Array, budget: float, cuts: Array) -> Array:
        """The same among cuts of a mean cost of at most `budget`, from `cuts` that are; of equals the cheapest."""
        cuts = cuts.copy()
        spent = costs[self.exits(cuts)].sum()
        most = budget * self.samples * (1 + 1e-12)
        both = [values, np.broadcast_to(costs[:, None], values.shape)]
        for _ in range(_SWEEPS):
            before = cuts.copy()
            for k, (sums, paid) in self._gains(both, cuts):
                now, paid_now = sums[cuts[k]], paid[cuts[k]]
                sums[~self.valid_cutoffs[k] | (spent + paid - paid_now > most)] = -inf
                equal = np.flatnonzero(sums >= sums.max() - 1e-9)
                best = equal[paid[equal].argmin()]
                if sums[best] > now + 1e-9 or paid[best] < paid_now - 1e-12 * most:
                    spent += paid[best] - paid_now
                    cuts[k] = best
            if (cuts == before).all():
                break
        return cuts

    def _gains(self, values: Sequence[Array], cuts: Array) -> Iterator[tuple[int, list[Array]]]:
        """Every exit, the last first, with what letting the r most certain go there would add, r = 0..n, (n + 1,) each.

        For every one of the values (K, n). Cuts may be changed on the way: exits before see the change.
        """
        leave = self.exit_mask(cuts)
        here = np.ones_like(leave)  # who comes as far
        for k in range(1, len(leave)):
            np.logical_and(here[k - 1], ~leave[k - 1], out=here[k])
        ahead = [value[-1] for value in values]  # what a sample gets that goes on
        for k in reversed(range(len(cuts))):
            pairs = list(zip(values, ahead, strict=True))
            gains = [np.where(here[k], value[k] - later, 0.0)[self.order[k]] for value, later in pairs]
            yield k, [np.concatenate([[0.0], gain.cumsum()]) for gain in gains]
            gone = self.rank[k] < cuts[k]
            ahead = [np.where(gone, value[k], later) for value, later in pairs]
