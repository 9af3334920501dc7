"""Search for cutoffs within a budget: the paper's geometric family, and the best by coordinate ascent. NumPy only."""

from collections.abc import Mapping

import numpy as np

from exitwise.core.predictions import Array
from exitwise.policies.cutoffs import ScoreRanking


class CutoffSearch:
    """Cutoffs for budgets on one set of samples."""

    def __init__(self, scores: Array, costs: Array, values: Mapping[str, Array]) -> None:
        """Prepare the search.

        Args:
            scores: Scores (K, n).
            costs: Cumulative costs (K,).
            values: Values (K, n) to maximize, by name. "labels" are also smoothed along the scores, as "smoothed".
        """
        self._ranking, self._costs, self._values = ScoreRanking(scores), costs, dict(values)
        if "labels" in values:
            self._values["smoothed"] = smooth_along_score(scores, values["labels"])
        self._samples = np.arange(scores.shape[1])
        self._by_log_q: dict[float, tuple[Array, float]] = {}
        self._geometric: dict[float, tuple[Array, float]] = {}
        self._optimized: dict[tuple[str, float], Array] = {}
        self._paths: dict[str, list[tuple[Array, float, float]]] = {}

    def thresholds(self, cutoffs: Array) -> tuple[float, ...]:
        """Return the thresholds (K,) of the cutoffs (K - 1,)."""
        return self._ranking.thresholds(cutoffs)

    def exits(self, cutoffs: Array) -> Array:
        """Return the exit (n,) that each sample takes at the cutoffs (K - 1,)."""
        return self._ranking.exits(cutoffs)

    def mean_value(self, name: str, cutoffs: Array) -> float:
        """Return the mean of a value at the exits taken."""
        return float(self._values[name][self._ranking.exits(cutoffs), self._samples].mean())

    def find_cutoffs(self, name: str, budget: float) -> Array:
        """Return the cutoffs (K - 1,) within the budget that maximize a value, or the paper's for "geometric"."""
        if name not in self._values:
            return self._geometric_for_budget(budget)[0]
        if (name, budget) not in self._optimized:
            self._optimized[name, budget] = self._optimize(name, budget)
        return self._optimized[name, budget]

    def q(self, budget: float) -> float:
        """Return q of the geometric family at a budget."""
        return float(np.exp(self._geometric_for_budget(budget)[1]))

    def _geometric_for_budget(self, budget: float) -> tuple[Array, float]:
        """Return the most expensive cutoffs of the geometric family within the budget, and log q, by bisection."""
        if budget in self._geometric:
            return self._geometric[budget]
        below, above = -50.0, 50.0  # all samples exit at the first exit; at the last
        best = below
        max_cost = budget * (1 + 1e-12)  # the mean of equal costs may round to more than each of them
        one_sample = (self._costs[-1] - self._costs[0]) / self._ranking.samples  # no step of the cost is smaller
        if self._geometric_for_q(above)[1] <= max_cost:
            best, above = above, below
        while abs(above - below) > 1e-13 and not 0 <= max_cost - self._geometric_for_q(best)[1] < one_sample:
            middle = (below + above) / 2
            cost = self._geometric_for_q(middle)[1]
            if cost > max_cost:
                above = middle
                continue
            below = middle
            best = middle if cost >= self._geometric_for_q(best)[1] else best
        self._geometric[budget] = (self._geometric_for_q(best)[0], best)
        return self._geometric[budget]

    def _geometric_for_q(self, log_q: float) -> tuple[Array, float]:
        """Return cutoffs of the geometric family and their mean cost; cached, because bisections share their start."""
        if log_q not in self._by_log_q:
            shares = geometric_shares(float(np.exp(log_q)), len(self._costs))
            counts = np.floor(self._ranking.samples * shares + 1e-9)  # 1e-9: rounding must not lose a sample
            cutoffs = self._ranking.cutoffs_for_counts(counts)
            self._by_log_q[log_q] = (cutoffs, float(self._costs[self._ranking.exits(cutoffs)].mean()))
        return self._by_log_q[log_q]

    def _optimize(self, name: str, budget: float) -> Array:
        """Return the best cutoffs within the budget, searched from the geometric and the Lagrangian solutions."""
        path = self._lagrangian_path(name)
        within = [(value, cutoffs) for cutoffs, cost, value in path if cost <= budget * (1 + 1e-12)]
        starts = [cutoffs for _, cutoffs in sorted(within, key=lambda pair: -pair[0])[:2]]
        distinct = {start.tobytes(): start for start in (*starts, self._geometric_for_budget(budget)[0])}
        results = [
            self._ranking.coordinate_ascent_within(self._values[name], self._costs, budget, start)
            for start in distinct.values()
        ]
        return max(results, key=lambda cutoffs: self.mean_value(name, cutoffs))

    def _lagrangian_path(self, name: str) -> list[tuple[Array, float, float]]:
        """Return distinct cutoffs, with mean cost and value, that maximize value minus multiplier times cost.

        The Lagrange multiplier falls and then grows, and every solution starts from the one before.
        """
        if name not in self._paths:
            values = self._values[name]
            cost_range = max(self._costs[-1] - self._costs[0], self._costs[0] * 1e-9)
            scale = np.abs(values[-1] - values[0]).mean() / cost_range
            multipliers = [*(scale * np.geomspace(30, 1e-3, 32)), 0.0]
            solutions = []
            for sequence, start in ((multipliers, self._ranking.samples), (multipliers[::-1], 0)):
                cutoffs = np.full(len(values) - 1, start)
                for multiplier in sequence:
                    cutoffs = self._ranking.coordinate_ascent(values - multiplier * self._costs[:, None], cutoffs)
                    solutions.append(cutoffs)
            distinct = {cutoffs.tobytes(): cutoffs for cutoffs in solutions}.values()
            exits = [self._ranking.exits(cutoffs) for cutoffs in distinct]
            self._paths[name] = [
                (cutoffs, float(self._costs[taken].mean()), float(values[taken, self._samples].mean()))
                for cutoffs, taken in zip(distinct, exits, strict=True)
            ]
        return self._paths[name]


def geometric_shares(q: float, exits: int) -> Array:
    """(K,) the paper's shares of samples per exit, q^k / sum_j q^j for k = 1..K."""
    # Divided by the largest power, so that none overflows.
    powers = np.exp(np.log(q) * np.arange(exits) - max(0.0, np.log(q) * (exits - 1)))
    return np.asarray(powers / powers.sum())


def smooth_along_score(scores: Array, values: Array) -> Array:
    """Return values (K, n) as a function of each exit's score: means of bins of samples, interpolated linearly.

    Labels of single samples are noisy; thresholds fitted to them overfit.
    """
    bins = min(scores.shape[1], max(2, round(scores.shape[1] ** (1 / 3))))
    smoothed = []
    for score, value in zip(scores, values, strict=True):
        parts = np.array_split(np.argsort(score, kind="stable"), bins)
        means = [score[part].mean() for part in parts], [value[part].mean() for part in parts]
        smoothed.append(np.interp(score, *means))
    return np.stack(smoothed)
