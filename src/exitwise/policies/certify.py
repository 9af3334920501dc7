"""Policies with a guarantee: the last of a row of policies that samples held out do not speak against. NumPy alone.

The row is fixed before the samples held out are looked at, and tested from the safe end on until a test fails. Then all
tested before hold at the level of a single test, however many there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exitwise.core.costs import Costs
from exitwise.core.predictions import Array, Predictions
from exitwise.policies.certificate import (
    Certificate,
    Guarantee,
    MeanUpperBound,
    NotCertifiedError,
    samples_needed,
    tightest,
)
from exitwise.policies.policy import Policy
from exitwise.policies.scores import exit_scores

_SHIFTS = -0.003 * (1.1 ** np.arange(60) - 1) / 0.1  # 0 to about -8: near the budget it matters which of them holds


def nested_cheaper_policies(policy: Policy, scores: Array, costs: Costs) -> list[Policy]:
    """The policy and ever cheaper ones, the cheapest first; costs are those on samples with these scores (K, n).

    They are nested: whom one lets go at an exit, a cheaper one has let go there or before.
    """
    at_once = policy.with_thresholds((-np.inf,) * len(policy.thresholds))
    row = [at_once, *(policy.shifted(float(by)) for by in _SHIFTS[::-1])]
    return [each.with_cost(scores, costs) for each in row]


@dataclass(frozen=True, eq=False)
class PolicyOutcomes:
    """What samples say of the policies of a row: the exits (J, n) that they take, and what is lost (J, n) if asked."""

    exits: Array
    losses: Array | None = None  # whole numbers from -1 to 1

    @classmethod
    def from_predictions(
        cls, policies: Sequence[Policy], preds: Predictions, risk: str | None, full: Array, labels: Array | None
    ) -> "PolicyOutcomes":
        """`full` (n,) is what the full net says, the word that losses are measured against."""
        table = exit_scores(preds, policies[0].score)
        exits = np.stack([policy.exits_by(table) for policy in policies])
        said = preds.predicted[exits, np.arange(exits.shape[1])]
        if risk == "disagreement":
            return cls(exits, (said != full).astype(np.int64))
        if risk == "accuracy":
            return cls(exits, (full == labels).astype(np.int64) - (said == labels).astype(np.int64))
        return cls(exits)

    def take(self, samples: Array) -> "PolicyOutcomes":
        return PolicyOutcomes(self.exits[:, samples], None if self.losses is None else self.losses[:, samples])


class FixedSequenceTest:
    """Policies, the cheapest first, with a test for each, made on samples that their thresholds were fitted on."""

    def __init__(
        self,
        policies: Sequence[Policy],
        tune: PolicyOutcomes,
        samples: int,
        certificate: Certificate,
        costs: Costs,
        sure: bool,
    ) -> None:
        """The tests are for `samples` others. `sure` if losses are measured against the last exit itself."""
        self.policies, self._certificate, self._sure = policies, certificate, sure
        self._tune = tune.exits.shape[1]
        low, high = costs.values[0], costs.values[-1]
        least = 0.0 if certificate.risk == "disagreement" else -1.0
        # Of what the mean is bounded: every value that occurs, and the smallest and largest that there can be.
        self._values = {"cost": np.asarray(costs.values), "loss": np.array([least, 0.0, 1.0])}
        self._ends = {"cost": (low, high if high > low else low + 1.0), "loss": (least, 1.0)}
        self.deltas = dict(zip(("cost", "loss"), certificate.deltas, strict=True))
        self._bounds: dict[tuple[str, int], MeanUpperBound] = {}
        for what, delta in self.deltas.items():
            for number in range(len(policies) if delta else 0):
                counts = self._counts(what, number, tune)
                self._bounds[what, number] = tightest(self._scaled(what), counts, samples, self._delta(what))

    def _delta(self, what: str) -> float:
        return self.deltas[what] or 0.0

    def _scaled(self, what: str, values: Array | None = None) -> Array:
        """Values in [0, 1]."""
        low, high = self._ends[what]
        return ((self._values[what] if values is None else values) - low) / (high - low)

    def _unscaled(self, what: str, value: float) -> float:
        low, high = self._ends[what]
        return low + value * (high - low)

    def _counts(self, what: str, number: int, seen: PolicyOutcomes) -> Array:
        """How often each value occurs under a policy."""
        if what == "cost":
            return np.bincount(seen.exits[number], minlength=len(self._values["cost"]))
        assert seen.losses is not None
        return np.bincount(seen.losses[number] + 1, minlength=3)

    def _limit(self, what: str, budget: float | None) -> float:
        """The budget, or epsilon, as a number in [0, 1]."""
        asked = budget if what == "cost" else self._certificate.epsilon
        return float(self._scaled(what, np.array(asked, dtype=np.float64)))

    def _trivial(self, what: str, number: int) -> bool:
        """Whether there is nothing to test: nobody goes beyond the first exit, or everybody to the last."""
        *thresholds, _ = self.policies[number].thresholds
        if what == "cost":
            return not thresholds or thresholds[0] == -np.inf
        return self._sure and all(each == np.inf for each in thresholds)

    def passes(self, what: str, number: int, hold: PolicyOutcomes, budget: float | None) -> bool:
        """Whether the samples held out refute that the policy costs, or loses, too much."""
        if self._trivial(what, number):
            return True
        bound, counts = self._bounds[what, number], self._counts(what, number, hold)
        return bound.p_value(self._scaled(what), counts, self._limit(what, budget)) <= self._delta(what)

    def last_passing(self, what: str, order: Sequence[int], hold: PolicyOutcomes, budget: float | None) -> int | None:
        """The last number of an order, fixed before, up to which every test holds; None if the first fails."""
        found = None
        for number in order:
            if not self.passes(what, number, hold, budget):
                break
            found = number
        return found

    def select(self, hold: PolicyOutcomes, budget: float | None) -> int:
        """The dearest policy that holds to everything; without a budget the cheapest."""
        top = dearest = len(self.policies) - 1
        if self._delta("cost") and budget is not None:
            found = self.last_passing("cost", range(len(self.policies)), hold, budget)
            if found is None or (found == 0 and not self._trivial("cost", dearest)):
                raise NotCertifiedError(self._only_the_first_exit(hold, budget))
            top = found
        if not self._delta("loss"):
            return top
        cheapest = self.last_passing("loss", range(dearest, -1, -1), hold, None)
        if cheapest is None or cheapest > top:
            raise NotCertifiedError(self._too_much_lost(dearest if cheapest is None else top, hold))
        return cheapest if budget is None else top

    def _only_the_first_exit(self, hold: PolicyOutcomes, budget: float) -> str:
        """What to say where no policy that lets anyone go on can be certified: how many samples would do, for what."""
        said = f"a mean cost of at most {budget:.6g} cannot be certified on {hold.exits.shape[1]:,} samples held out"
        values, limit = self._scaled("cost"), self._limit("cost", budget)
        for number in range(len(self.policies) - 1, 0, -1):
            counts = self._counts("cost", number, hold)
            cost = self._unscaled("cost", float(values @ counts / counts.sum()))
            needed = samples_needed(values, counts, limit, self._delta("cost"))
            if needed is not None and cost <= 0.95 * budget:
                return f"{said}; about {needed:,} would do for a policy that costs {100 * cost / budget:.0f} % of that"
        return f"{said}; ask for a larger budget, or give more samples"

    def _too_much_lost(self, number: int, hold: PolicyOutcomes) -> str:
        """What to say where a policy's loss cannot be certified: what was seen, and what sample size would do."""
        values, counts, certificate = self._scaled("loss"), self._counts("loss", number, hold), self._certificate
        seen = self._unscaled("loss", float(values @ counts / counts.sum()))
        needed = samples_needed(values, counts, self._limit("loss", None), self._delta("loss"))
        advice = "no number of samples would do: allow more loss, or a larger budget"
        if needed is not None:
            advice = f"about {needed:,} such samples would do"
        claim = f"a loss in {certificate.risk} of at most {100 * (certificate.epsilon or 0):.4g} %"
        return f"{claim} cannot be certified: on {counts.sum():,} samples held out it is {100 * seen:.2f} %; {advice}"

    def guarantee(self, number: int, hold: PolicyOutcomes, budget: float | None, seed: int | None) -> Guarantee:
        """What is guaranteed of a policy, with the limits that the samples held out would bear."""
        limits: dict[str, float | None] = {"cost": None, "loss": None}
        for what in limits:
            if self._delta(what) and (what == "loss" or budget is not None):
                bound, counts = self._bounds[what, number], self._counts(what, number, hold)
                limits[what] = self._unscaled(what, bound.upper_limit(self._scaled(what), counts, self._delta(what)))
                if self._trivial(what, number):
                    limits[what] = self._ends["cost"][0] if what == "cost" else 0.0
        used = [what for what, limit in limits.items() if limit is not None]
        return Guarantee(
            tune=self._tune,
            hold=hold.exits.shape[1],
            seed=seed,
            budget=None if budget is None or "cost" not in used else float(budget),
            budget_delta=self.deltas["cost"] if "cost" in used else None,
            cost_limit=limits["cost"],
            risk=self._certificate.risk,
            epsilon=self._certificate.epsilon,
            risk_delta=self.deltas["loss"],
            risk_limit=limits["loss"],
            bounds=tuple(self._bounds[what, number].name for what in used),
        )


def select_certified(
    policies: Sequence[Policy],
    tune: PolicyOutcomes,
    hold: PolicyOutcomes,
    certificate: Certificate,
    costs: Costs,
    budget: float | None,
    sure: bool,
    seed: int | None = None,
) -> Policy:
    """Of policies, cheapest first, the one that is certified on samples held out."""
    row = FixedSequenceTest(policies, tune, hold.exits.shape[1], certificate, costs, sure)
    number = row.select(hold, budget)
    chosen = policies[number]
    asked = chosen.budget if budget is None else float(budget)
    return replace(chosen, budget=asked, guarantee=row.guarantee(number, hold, budget, seed))
