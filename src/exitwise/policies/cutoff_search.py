"""Where thresholds should lie for a budget: the paper's family of shares, and a search for the best. NumPy alone."""

from collections.abc import Mapping

import numpy as np

from exitwise.core.predictions import Array
from exitwise.policies.cutoffs import ScoreRanking


class CutoffSearch:
    """Cuts for budgets on some samples: scores (K, n), costs (K,), and values (K, n) by name."""

    def __init__(self, table: Array, costs: Array, values: Mapping[str, Array]) -> None:
        self._ranking, self._costs, self._values = ScoreRanking(table), costs, dict(values)
        if "labels" in values:
            self._values["smoothed"] = smooth_along_score(table, values["labels"])
        self._all = np.arange(table.shape[1])
        self._family: dict[float, tuple[Array, float]] = {}
        self._geometric: dict[float, tuple[Array, float]] = {}
        self._found: dict[tuple[str, float], Array] = {}
        self._paths: dict[str, list[tuple[Array, float, float]]] = {}

    def thresholds(self, cuts: Array) -> tuple[float, ...]:
        return self._ranking.thresholds(cuts)

    def mean(self, name: str, cuts: Array) -> float:
        """The mean of a value at the exits that samples take."""
        return float(self._values[name][self._ranking.exits(cuts), self._all].mean())

    def cuts(self, name: str, budget: float) -> Array:
        """By the paper's family, or the best for a value."""
        if name not in self._values:
            return self._geometric_for_budget(budget)[0]
        if (name, budget) not in self._found:
            self._found[name, budget] = self._best(name, budget)
        return self._found[name, budget]

    def q(self, budget: float) -> float:
        """Of the paper's family at a budget."""
        return float(np.exp(self._geometric_for_budget(budget)[1]))

    def _geometric_for_budget(self, budget: float) -> tuple[Array, float]:
        """Cuts of the paper's family with the largest cost up to the budget, and log q."""
        if budget in self._geometric:
            return self._geometric[budget]
        below, above = -50.0, 50.0  # everyone leaves at the first exit; at the last
        best = below
        most = budget * (1 + 1e-12)  # the mean of equal costs may round to more than each of them
        one = (self._costs[-1] - self._costs[0]) / self._ranking.samples  # nothing smaller than a sample can move
        if self._geometric_for_q(above)[1] <= most:
            best, above = above, below
        while abs(above - below) > 1e-13 and not 0 <= most - self._geometric_for_q(best)[1] < one:
            middle = (below + above) / 2
            cost = self._geometric_for_q(middle)[1]
            if cost > most:
                above = middle
                continue
            below = middle
            best = middle if cost >= self._geometric_for_q(best)[1] else best
        self._geometric[budget] = (self._geometric_for_q(best)[0], best)
        return self._geometric[budget]

    def _geometric_for_q(self, log_q: float) -> tuple[Array, float]:
        """Cuts of the paper's family and their mean cost, remembered: budgets share the first halvings."""
        if log_q not in self._family:
            shares = geometric_shares(float(np.exp(log_q)), len(self._costs))
            counts = np.floor(self._ranking.samples * shares + 1e-9)  # a share of 1/4 is a quarter, however it rounds
            cuts = self._ranking.cutoffs_for_counts(counts)
            self._family[log_q] = (cuts, float(self._costs[self._ranking.exits(cuts)].mean()))
        return self._family[log_q]

    def _best(self, name: str, budget: float) -> Array:
        """The best that is found within the budget, from the paper's family and from solutions at a price per cost."""
        within = [(value, cuts) for cuts, cost, value in self._lagrangian_path(name) if cost <= budget * (1 + 1e-12)]
        starts = [cuts for _, cuts in sorted(within, key=lambda pair: -pair[0])[:2]]
        ends = [
            self._ranking.coordinate_ascent_within(self._values[name], self._costs, budget, start)
            for start in (*starts, self._geometric_for_budget(budget)[0])
        ]
        return max(ends, key=lambda cuts: self.mean(name, cuts))

    def _lagrangian_path(self, name: str) -> list[tuple[Array, float, float]]:
        """Cuts, cost and value of the best that is found at every price of a falling, then growing row of prices."""
        if name not in self._paths:
            values = self._values[name]
            most = np.abs(values[-1] - values[0]).mean() / max(self._costs[-1] - self._costs[0], self._costs[0] * 1e-9)
            prices = [*(most * np.geomspace(30, 1e-3, 32)), 0.0]
            found = []
            for row, start in ((prices, self._ranking.samples), (prices[::-1], 0)):
                cuts = np.full(len(values) - 1, start)
                for each in row:
                    cuts = self._ranking.coordinate_ascent(values - each * self._costs[:, None], cuts)
                    found.append(cuts)
            distinct = {cuts.tobytes(): cuts for cuts in found}.values()
            exits = [self._ranking.exits(cuts) for cuts in distinct]
            self._paths[name] = [
                (cuts, float(self._costs[taken].mean()), float(values[taken, self._all].mean()))
                for cuts, taken in zip(distinct, exits, strict=True)
            ]
        return self._paths[name]


def geometric_shares(q: float, exits: int) -> Array:
    """(K,) the paper's shares of samples per exit, q^k / sum_j q^j for k = 1..K."""
    # Divided by the largest power, so that none overflows.
    powers = np.exp(np.log(q) * np.arange(exits) - max(0.0, np.log(q) * (exits - 1)))
    return np.asarray(powers / powers.sum())


def smooth_along_score(table: Array, values: Array) -> Array:
    """(K, n) values as a function of each exit's own score: means of neighbours, linear between them.

    What is true of one sample is mostly chance, and thresholds that follow it do not hold for others.
    """
    groups = min(table.shape[1], max(2, round(table.shape[1] ** (1 / 3))))
    smooth = []
    for score, value in zip(table, values, strict=True):
        parts = np.array_split(np.argsort(score, kind="stable"), groups)
        smooth.append(np.interp(score, [score[part].mean() for part in parts], [value[part].mean() for part in parts]))
    return np.stack(smooth)
