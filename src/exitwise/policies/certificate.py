"""Bounds on a mean that hold with a stated probability: what a guarantee of a budget rests on. NumPy alone.

Everything here is of values in [0, 1], seen as often as `counts` says: exits have few different costs, so n samples are
a handful of numbers. Whatever is chosen (stakes, bounds, policies) is chosen on samples that the test does not see.
"""

from dataclasses import dataclass
from math import ceil, exp, inf, log, log1p

import numpy as np

from exitwise.core.checks import is_number
from exitwise.core.costs import format_cost, format_percent
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array
from exitwise.core.results import Result

RISKS = ("accuracy", "disagreement")


@dataclass(frozen=True)
class Certificate:
    """What is to be guaranteed of a policy, and with what probability, over the draw of the samples held out, it fails.

    `budget_delta`: that the mean cost of fresh samples is at most the budget; None does without. With `risk`, also that
    the loss is at most `epsilon`: of "accuracy" against the last exit, or "disagreement" with it, which needs no labels
    and is never smaller. `risk_delta` is for that; without it `budget_delta` is split between the two, so that both
    hold together with probability 1 - `budget_delta`. `hold` is the share of samples to hold out where none are given.
    """

    budget_delta: float | None = 0.05
    risk: str | None = None
    epsilon: float | None = None
    risk_delta: float | None = None
    hold: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("budget_delta", "risk_delta", "hold"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < 1):
                raise InputError(f"`{name}` must be a number between 0 and 1, but got {value!r}")
        if self.risk not in (None, *RISKS):
            raise InputError(f"`risk` must be one of {', '.join(RISKS)} or None, but got {self.risk!r}")
        if (self.risk is None) != (self.epsilon is None):
            raise InputError("`risk` and `epsilon` go together: what may be lost, and how much of it")
        if self.epsilon is not None and not (is_number(self.epsilon) and 0 < self.epsilon < 1):
            raise InputError(f"`epsilon` must be a number between 0 and 1, but got {self.epsilon!r}")
        if self.budget_delta is None and self.risk is None:
            raise InputError("a certificate needs `budget_delta`, or a `risk` with its `epsilon`")
        if self.risk_delta is not None and self.risk is None:
            raise InputError("`risk_delta` needs a `risk` with its `epsilon`")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(f"`seed` must be a whole number, but got {self.seed!r}")

    @property
    def deltas(self) -> tuple[float | None, float | None]:
        """For the budget and for the risk; together they are the probability that anything fails."""
        if self.risk is None:
            return self.budget_delta, None
        if self.risk_delta is not None:
            return self.budget_delta, self.risk_delta
        return (None, 0.05) if self.budget_delta is None else (self.budget_delta / 2, self.budget_delta / 2)


@dataclass(frozen=True)
class Guarantee(Result):
    """What is guaranteed of fresh samples like those held out; None where it was not asked for.

    With probability 1 - `budget_delta` the mean cost is at most `budget`; with probability 1 - `risk_delta` the loss is
    at most `epsilon`. The probability is over the draw of the `hold` samples, which thresholds have not seen and
    calibration must not have; those saw the `tune` samples. `cost_limit` and `risk_limit` are what the same bounds say
    of this policy alone: they show what is left, and are no further promise, as these samples have chosen it. `bounds`
    names them. `seed` is that of the split, where one set of samples was split here.
    """

    tune: int
    hold: int
    seed: int | None = None
    budget: float | None = None
    budget_delta: float | None = None
    cost_limit: float | None = None
    risk: str | None = None
    epsilon: float | None = None
    risk_delta: float | None = None
    risk_limit: float | None = None
    bounds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        for name in ("tune", "hold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"`{name}` must be a number of samples, but got {value!r}")
        for name in ("budget", "budget_delta", "cost_limit", "epsilon", "risk_delta", "risk_limit", "seed"):
            if (value := getattr(self, name)) is not None and not is_number(value):
                raise InputError(f"`{name}` must be a number or None, but got {value!r}")


class NotCertifiedError(InputError):
    """The samples held out do not suffice, or no policy would do."""


@dataclass(frozen=True)
class MeanUpperBound:
    """How the mean of values in [0, 1] is bounded from above.

    With a `stake` by betting: whoever claims that the mean is above m gives fair odds to someone who bets the same
    stake on every sample, and is refuted when that one gets rich. Without, by Hoeffding and Bentkus.
    """

    stake: float | None = None

    @property
    def name(self) -> str:
        return "hoeffding-bentkus" if self.stake is None else "betting"

    def p_value(self, values: Array, counts: Array, limit: float) -> float:
        """Of the claim that the mean is above the limit: how likely counts as low as these would be."""
        if limit >= 1:
            return 0.0
        if limit < 0:
            return 1.0
        if self.stake is None:
            return _hoeffding_bentkus(float(values @ counts) / float(counts.sum()), int(counts.sum()), limit)
        stake = min(self.stake, 0.95 / (1 - limit))  # nobody may lose everything
        wealth = float(counts @ np.log1p(stake * (limit - values)))  # its logarithm
        return exp(-max(wealth, 0.0))

    def upper_limit(self, values: Array, counts: Array, delta: float) -> float:
        """The smallest limit that the claim is refuted for: the mean is below it with probability 1 - delta."""
        low, high = float(values @ counts) / float(counts.sum()), 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.p_value(values, counts, middle) <= delta else (middle, high)
        return high


def tightest(values: Array, counts: Array, samples: int, delta: float) -> MeanUpperBound:
    """The bound that would be tightest for so many samples like these, which must not be those that it is used on."""
    shares = counts / counts.sum()
    variance = float(shares @ (values - shares @ values) ** 2)
    stake = float(np.sqrt(2 * log(1 / delta) / (samples * max(variance, 1 / samples))))
    return min(
        MeanUpperBound(stake), MeanUpperBound(), key=lambda bound: bound.upper_limit(values, shares * samples, delta)
    )


def samples_needed(values: Array, counts: Array, limit: float, delta: float) -> int | None:
    """About how many samples like these would certify the limit; None where their mean is above it."""
    shares = counts / counts.sum()
    if shares @ values >= limit:
        return None
    stakes = np.geomspace(1e-4, 0.95, 200) / (1 - limit)
    growth = float((np.log1p(stakes[:, None] * (limit - values)) @ shares).max())
    return ceil(log(1 / delta) / growth) if growth > 0 else None


def _hoeffding_bentkus(mean: float, samples: int, limit: float) -> float:
    """The smaller of both p-values."""
    if mean >= limit:
        return 1.0
    near = (mean * log(mean / limit) if mean else 0.0) + ((1 - mean) * log((1 - mean) / (1 - limit)))
    return min(1.0, exp(-samples * near), exp(1 + _log_binomial(ceil(samples * mean - 1e-9), samples, limit)))


def _log_binomial(most: int, samples: int, share: float) -> float:
    """log P(at most so many of n, each with this probability)."""
    if share <= 0 or most >= samples:
        return 0.0
    j = np.arange(1, most + 1)
    terms = np.concatenate([[0.0], np.cumsum(np.log((samples - j + 1) / j) + log(share) - log1p(-share))])
    top = terms.max(initial=-inf)
    return float(samples * log1p(-share) + top + np.log(np.exp(terms - top).sum()))


def describe_guarantee(guarantee: Guarantee, unit: str) -> str:
    """What a guarantee says."""
    said = [f"Certified on {guarantee.hold:,} samples that nothing else has seen:"]
    if guarantee.budget is not None and guarantee.budget_delta is not None:
        said.append(
            f"with a probability of {format_percent(1 - guarantee.budget_delta)} "
            f"the mean cost of pictures like these is at most {format_cost(guarantee.budget, unit)};"
        )
    if guarantee.risk is not None and guarantee.risk_delta is not None:
        word = "loss of accuracy" if guarantee.risk == "accuracy" else "share of other answers"
        said.append(
            f"with a probability of {format_percent(1 - guarantee.risk_delta)} "
            f"the {word} against the last exit is at most {guarantee.epsilon:.2%};"
        )
    return " ".join(said)[:-1] + "."
