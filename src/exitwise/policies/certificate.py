"""Certificates: the guarantee to certify, and the guarantee that a certified policy has. NumPy only."""

from dataclasses import dataclass

from exitwise.core.checks import check_between, check_integer, is_number
from exitwise.core.costs import format_cost, format_percent
from exitwise.core.errors import InputError
from exitwise.core.results import Result

RISKS = ("accuracy", "disagreement")


@dataclass(frozen=True)
class Certificate:
    """The guarantee to certify and its allowed failure probability over the draw of held-out samples.

    Args:
        budget_delta: Probability with which the mean cost of fresh samples may exceed the budget; None to certify no
            budget.
        risk: Loss to certify too: "accuracy" is the drop in accuracy against the last exit, "disagreement" the share of
            samples with another prediction than the last exit's, which needs no labels and is never smaller. None for
            neither.
        epsilon: Largest loss allowed; 0.01 is one percentage point. Needed with `risk`.
        risk_delta: Probability with which the loss may exceed `epsilon`. By default `budget_delta` is split between the
            budget and the risk, so that both hold together with probability 1 - `budget_delta`; without `budget_delta`
            it is 0.05.
        hold: Fraction of the samples to hold out if `fit_policy` gets no held-out samples; read it as
            `held_out_fraction`.
        seed: Seed of the draw of held-out samples.

    Raises:
        InputError: If a value is out of range, or `risk` and `epsilon` are not given together.

    Example:
        >>> import exitwise as ew
        >>> certificate = ew.Certificate(0.05, risk="accuracy", epsilon=0.01)
        >>> certificate.deltas, certificate.held_out_fraction
        ((0.025, 0.025), 0.5)
    """

    budget_delta: float | None = 0.05
    risk: str | None = None
    epsilon: float | None = None
    risk_delta: float | None = None
    hold: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("budget_delta", "risk_delta", "hold"):
            if (value := getattr(self, name)) is not None or name == "hold":
                check_between(name, value, 0, 1)
        if self.risk not in (None, *RISKS):
            raise InputError(f"`risk` must be one of {', '.join(RISKS)} or None, but got {self.risk!r}")
        if (self.risk is None) != (self.epsilon is None):
            raise InputError(f"`risk` and `epsilon` must be given together, but got {self.risk!r} and {self.epsilon!r}")
        if self.epsilon is not None:
            check_between("epsilon", self.epsilon, 0, 1)
        if self.budget_delta is None and self.risk is None:
            raise InputError("a certificate needs `budget_delta`, or a `risk` with its `epsilon`")
        if self.risk_delta is not None and self.risk is None:
            raise InputError("`risk_delta` needs a `risk` with its `epsilon`")
        object.__setattr__(self, "seed", check_integer("seed", self.seed, 0))

    @property
    def held_out_fraction(self) -> float:
        """Fraction of the samples to hold out: the field `hold`."""
        return self.hold

    @property
    def deltas(self) -> tuple[float | None, float | None]:
        """Failure probabilities of the budget and of the risk, None for what is not certified.

        Their sum bounds the probability that either fails.
        """
        if self.risk is None:
            return self.budget_delta, None
        if self.risk_delta is not None:
            return self.budget_delta, self.risk_delta
        return (None, 0.05) if self.budget_delta is None else (self.budget_delta / 2, self.budget_delta / 2)


@dataclass(frozen=True)
class Guarantee(Result):
    """Guarantee of a certified policy for fresh samples like the held-out samples; None for what was not certified.

    With probability 1 - `budget_delta` the mean cost is at most `budget`; with probability 1 - `risk_delta` the loss is
    at most `epsilon`. The probability is over the draw of the held-out samples, which neither thresholds nor
    calibration may have used.

    Args:
        tune: Number of tuning samples, which thresholds were fitted on; also `num_tune`.
        hold: Number of held-out samples; also `num_held_out`.
        seed: Seed of the split, if `fit_policy` or a command split one set of samples.
        budget: Certified limit of the mean cost.
        budget_delta: Failure probability of the budget.
        cost_limit: Upper bound on the mean cost of this policy, by the same test. It shows the margin that is left.
            It is not a second guarantee, because the held-out samples selected the policy.
        risk: Certified loss, "accuracy" or "disagreement".
        epsilon: Certified limit of the loss.
        risk_delta: Failure probability of the risk.
        risk_limit: Upper bound on the loss of this policy, with the meaning of `cost_limit`.
        bounds: Names of the bounds that were used, for the cost and then for the loss.
        reference: Net whose last exit losses are measured against, such as "plain net"; None for the net itself.
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
    reference: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        if not isinstance(self.reference, str | None):
            raise InputError(f"`reference` must be a name or None, but got {self.reference!r}")
        for name in ("tune", "hold"):
            check_integer(name, getattr(self, name), 1)
        for name in ("budget", "budget_delta", "cost_limit", "epsilon", "risk_delta", "risk_limit", "seed"):
            if (value := getattr(self, name)) is not None and not is_number(value):
                raise InputError(f"`{name}` must be a number or None, but got {value!r}")

    @property
    def num_tune(self) -> int:
        """Number of tuning samples: the field `tune`."""
        return self.tune

    @property
    def num_held_out(self) -> int:
        """Number of held-out samples: the field `hold`."""
        return self.hold


class NotCertifiedError(InputError):
    """Raised if no policy can be certified: too few held-out samples, or limits that no policy meets."""


def describe_guarantee(guarantee: Guarantee, unit: str) -> str:
    """Describe a guarantee in one sentence, with costs in `unit`."""
    parts = [f"Certified on {guarantee.hold:,} held-out samples:"]
    if guarantee.budget is not None and guarantee.budget_delta is not None:
        parts.append(
            f"with a probability of {format_percent(1 - guarantee.budget_delta)} "
            f"the mean cost of images like these is at most {format_cost(guarantee.budget, unit)};"
        )
    if guarantee.risk is not None and guarantee.risk_delta is not None:
        loss = "loss of accuracy against" if guarantee.risk == "accuracy" else "disagreement with"
        last = "the last exit" if guarantee.reference is None else f"the last exit of the {guarantee.reference}"
        parts.append(
            f"with a probability of {format_percent(1 - guarantee.risk_delta)} "
            f"the {loss} {last} is at most {guarantee.epsilon:.2%};"
        )
    return " ".join(parts)[:-1] + "."
