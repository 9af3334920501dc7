"""Upper confidence bounds on a mean: the tests that a guarantee rests on. NumPy only.

Values lie in [0, 1] and come with `counts`, the number of samples that have each value: exits have few different costs,
so n samples are a handful of numbers. Stakes, bounds and policies must be chosen on samples that the test does not use.
"""

from dataclasses import dataclass
from math import ceil, exp, inf, log, log1p

import numpy as np

from exitwise.core.predictions import Array


@dataclass(frozen=True)
class MeanUpperBound:
    """Upper bound on the mean of values in [0, 1].

    With a `stake`, a betting test: the null hypothesis is that the mean is above a limit m. The wealth, the product of
    1 + stake * (m - value) over the samples, has a mean of at most 1 under it, so the p-value is min(1, 1 / wealth).
    Without a `stake`, the smaller of Hoeffding's and Bentkus's p-values. If values are `binary`, 0 or 1, the exact
    p-value of the binomial distribution, which no other test beats.
    """

    stake: float | None = None
    binary: bool = False

    @property
    def name(self) -> str:
        """Name of the bound, as a `Guarantee` lists it."""
        if self.binary:
            return "binomial"
        return "hoeffding-bentkus" if self.stake is None else "betting"

    def p_value(self, values: Array, counts: Array, limit: float) -> float:
        """Return the p-value of the null hypothesis that the mean is above `limit`; values and counts are (v,)."""
        if limit >= 1:
            return 0.0
        if limit < 0:
            return 1.0
        if self.binary:
            return exp(_log_binomial_cdf(int(values @ counts), int(counts.sum()), limit))
        if self.stake is None:
            return _hoeffding_bentkus(float(values @ counts) / float(counts.sum()), int(counts.sum()), limit)
        stake = min(self.stake, 0.95 / (1 - limit))  # keeps every factor of the wealth positive
        log_wealth = float(counts @ np.log1p(stake * (limit - values)))
        return exp(-max(log_wealth, 0.0))

    def upper_limit(self, values: Array, counts: Array, delta: float) -> float:
        """Return the smallest limit at which the test rejects: the mean is below it with probability 1 - delta."""
        low, high = float(values @ counts) / float(counts.sum()), 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.p_value(values, counts, middle) <= delta else (middle, high)
        return high


def choose_tightest_bound(values: Array, counts: Array, samples: int, delta: float) -> MeanUpperBound:
    """Choose the tightest bound for `samples` samples, from tuning data that is disjoint from the test data."""
    shares = counts / counts.sum()
    variance = float(shares @ (values - shares @ values) ** 2)
    stake = float(np.sqrt(2 * log(1 / delta) / (samples * max(variance, 1 / samples))))
    return min(
        MeanUpperBound(stake), MeanUpperBound(), key=lambda bound: bound.upper_limit(values, shares * samples, delta)
    )


def estimate_samples_needed(values: Array, counts: Array, limit: float, delta: float) -> int | None:
    """Estimate how many samples like these would certify the limit; None if their mean is above it."""
    shares = counts / counts.sum()
    if shares @ values >= limit:
        return None
    stakes = np.geomspace(1e-4, 0.95, 200) / (1 - limit)
    growth = float((np.log1p(stakes[:, None] * (limit - values)) @ shares).max())
    return ceil(log(1 / delta) / growth) if growth > 0 else None


def _hoeffding_bentkus(mean: float, samples: int, limit: float) -> float:
    """Return the smaller of both p-values."""
    if mean >= limit:
        return 1.0
    divergence = (mean * log(mean / limit) if mean else 0.0) + ((1 - mean) * log((1 - mean) / (1 - limit)))
    bentkus = exp(1 + _log_binomial_cdf(ceil(samples * mean - 1e-9), samples, limit))
    return min(1.0, exp(-samples * divergence), bentkus)


def _log_binomial_cdf(successes: int, samples: int, probability: float) -> float:
    """Return log P(X <= successes) for X ~ Binomial(samples, probability)."""
    if probability <= 0 or successes >= samples:
        return 0.0
    j = np.arange(1, successes + 1)
    odds = log(probability) - log1p(-probability)
    terms = np.concatenate([[0.0], np.cumsum(np.log((samples - j + 1) / j) + odds)])
    top = terms.max(initial=-inf)
    return float(samples * log1p(-probability) + top + np.log(np.exp(terms - top).sum()))
