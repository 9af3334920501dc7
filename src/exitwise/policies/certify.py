"""Selection of a certified policy by fixed-sequence testing on held-out samples. NumPy only.

The sequence of policies is fixed before the held-out samples are used, and tested from its safe end until a test fails.
All policies that passed before then hold at the level of a single test, however many there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exitwise.core.costs import Costs
from exitwise.core.predictions import Array, Predictions
from exitwise.policies.bounds import MeanUpperBound, choose_tightest_bound, estimate_samples_needed
from exitwise.policies.certificate import Certificate, Guarantee, NotCertifiedError
from exitwise.policies.policy import Policy

# From 0 to about -8; dense near 0, because near the budget a small difference in cost decides which policy passes.
_SHIFTS = -0.003 * (1.1 ** np.arange(60) - 1) / 0.1


def nested_cheaper_policies(policy: Policy, scores: Array, costs: Costs) -> list[Policy]:
    """Return the policy and cheaper ones, the cheapest first, with their costs on samples with these scores (K, n).

    Policies are nested: no sample exits later under a cheaper policy.
    """
    first_exit_only = policy.with_thresholds((-np.inf,) * len(policy.thresholds))
    policies = [first_exit_only, *(policy.shifted(float(shift)) for shift in _SHIFTS[::-1])]
    return [cheaper.with_cost(scores, costs) for cheaper in policies]


@dataclass(frozen=True, eq=False)
class PolicyOutcomes:
    """Exits (J, n) and optional losses (J, n) of n samples under J policies."""

    exits: Array
    losses: Array | None = None  # whole numbers from -1 to 1

    @classmethod
    def from_predictions(
        cls,
        policies: Sequence[Policy],
        preds: Predictions,
        risk: str | None,
        reference: Array,
        labels: Array | None,
        scores: Array | None = None,
    ) -> "PolicyOutcomes":
        """Apply the policies, all on one score, to predictions; losses are relative to the classes `reference` (n,).

        `scores` (K, n) are by default those that the policies compute.
        """
        scores = policies[0].scores(preds) if scores is None else scores
        exits = np.stack([policy.exits_from_scores(scores) for policy in policies])
        predicted = preds.predicted[exits, np.arange(exits.shape[1])]
        if risk == "disagreement":
            return cls(exits, (predicted != reference).astype(np.int64))
        if risk == "accuracy":
            return cls(exits, (reference == labels).astype(np.int64) - (predicted == labels).astype(np.int64))
        return cls(exits)

    def take(self, samples: Array) -> "PolicyOutcomes":
        """Return the outcomes of some samples, by their positions (m,) or a mask (n,)."""
        return PolicyOutcomes(self.exits[:, samples], None if self.losses is None else self.losses[:, samples])


class FixedSequenceTest:
    """Policies, the cheapest first, with a test of cost and loss for each, prepared on the tuning samples.

    Cost and loss are the two quantities, named "cost" and "loss". Policies are given by their index.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        tune: PolicyOutcomes,
        samples: int,
        certificate: Certificate,
        costs: Costs,
        reference_is_last_exit: bool,
    ) -> None:
        """Choose the bounds of all tests.

        Args:
            policies: Policies (J,), the cheapest first.
            tune: Outcomes (J, n) on the tuning samples.
            samples: Number of held-out samples that the tests will use.
            certificate: The guarantee to certify.
            costs: Costs (K,) of the exits.
            reference_is_last_exit: Whether losses are measured against the last exit; it then has none itself.
        """
        self.policies, self._certificate = policies, certificate
        self._reference_is_last_exit = reference_is_last_exit
        self._num_tune = tune.exits.shape[1]
        low, high = costs.values[0], costs.values[-1]
        min_loss = 0.0 if certificate.risk == "disagreement" else -1.0
        # For each quantity, the values that occur, and the smallest and largest possible value.
        self._values = {"cost": np.asarray(costs.values), "loss": np.array([min_loss, 0.0, 1.0])}
        self._ranges = {"cost": (low, high if high > low else low + 1.0), "loss": (min_loss, 1.0)}
        self.deltas = dict(zip(("cost", "loss"), certificate.deltas, strict=True))
        self._bounds: dict[tuple[str, int], MeanUpperBound] = {}
        for quantity, delta in self.deltas.items():
            for index in range(len(policies) if delta else 0):
                counts = self._count_values(quantity, index, tune)
                values = self._to_unit_interval(quantity)
                bound = choose_tightest_bound(values, counts, samples, self._get_delta(quantity))
                self._bounds[quantity, index] = bound

    def _get_delta(self, quantity: str) -> float:
        return self.deltas[quantity] or 0.0

    def _to_unit_interval(self, quantity: str, values: Array | None = None) -> Array:
        """Scale values, by default all that occur, to [0, 1]."""
        low, high = self._ranges[quantity]
        return ((self._values[quantity] if values is None else values) - low) / (high - low)

    def _from_unit_interval(self, quantity: str, value: float) -> float:
        low, high = self._ranges[quantity]
        return low + value * (high - low)

    def _count_values(self, quantity: str, index: int, outcomes: PolicyOutcomes) -> Array:
        """Count how many samples have each value under a policy."""
        if quantity == "cost":
            return np.bincount(outcomes.exits[index], minlength=len(self._values["cost"]))
        assert outcomes.losses is not None
        return np.bincount(outcomes.losses[index] + 1, minlength=3)

    def _get_limit(self, quantity: str, budget: float | None) -> float:
        """Return the budget, or epsilon, scaled to [0, 1]."""
        limit = budget if quantity == "cost" else self._certificate.epsilon
        return float(self._to_unit_interval(quantity, np.array(limit, dtype=np.float64)))

    def _passes_trivially(self, quantity: str, index: int) -> bool:
        """Return whether there is nothing to test: all samples take the first exit, or all take the last."""
        *thresholds, _ = self.policies[index].thresholds
        if quantity == "cost":
            return not thresholds or thresholds[0] == -np.inf
        return self._reference_is_last_exit and all(threshold == np.inf for threshold in thresholds)

    def passes(self, quantity: str, index: int, held_out: PolicyOutcomes, budget: float | None) -> bool:
        """Return whether the held-out samples reject the hypothesis that the cost (or loss) exceeds its limit."""
        if self._passes_trivially(quantity, index):
            return True
        bound, counts = self._bounds[quantity, index], self._count_values(quantity, index, held_out)
        p_value = bound.p_value(self._to_unit_interval(quantity), counts, self._get_limit(quantity, budget))
        return p_value <= self._get_delta(quantity)

    def last_passing(
        self, quantity: str, order: Sequence[int], held_out: PolicyOutcomes, budget: float | None
    ) -> int | None:
        """Return the last index of a fixed order up to which every policy passes; None if the first fails."""
        last = None
        for index in order:
            if not self.passes(quantity, index, held_out, budget):
                break
            last = index
        return last

    def select(self, held_out: PolicyOutcomes, budget: float | None) -> int:
        """Return the index of the most expensive policy that passes all tests; without a budget, of the cheapest.

        Raises:
            NotCertifiedError: If none passes.
        """
        most_expensive = selected = len(self.policies) - 1
        if self._get_delta("cost") and budget is not None:
            last = self.last_passing("cost", range(len(self.policies)), held_out, budget)
            if last is None or (last == 0 and not self._passes_trivially("cost", most_expensive)):
                raise NotCertifiedError(self._explain_cost_failure(held_out, budget))
            selected = last
        if not self._get_delta("loss"):
            return selected
        cheapest = self.last_passing("loss", range(most_expensive, -1, -1), held_out, None)
        if cheapest is None or cheapest > selected:
            failed = most_expensive if cheapest is None else selected
            raise NotCertifiedError(self._explain_loss_failure(failed, held_out, budget))
        return cheapest if budget is None else selected

    def _explain_cost_failure(self, held_out: PolicyOutcomes, budget: float) -> str:
        """Explain that only the first exit can be certified, and how many samples would certify which cost."""
        claim = (
            f"a mean cost of at most {budget:.6g} cannot be certified on {held_out.exits.shape[1]:,} held-out samples"
        )
        values, limit = self._to_unit_interval("cost"), self._get_limit("cost", budget)
        for index in range(len(self.policies) - 1, 0, -1):
            counts = self._count_values("cost", index, held_out)
            cost = self._from_unit_interval("cost", float(values @ counts / counts.sum()))
            needed = estimate_samples_needed(values, counts, limit, self._get_delta("cost"))
            if needed is not None and cost <= 0.95 * budget:
                return f"{claim}; about {needed:,} suffice for a policy that costs {100 * cost / budget:.0f} % of that"
        return f"{claim}; use a larger budget or more samples"

    def _explain_loss_failure(self, index: int, held_out: PolicyOutcomes, budget: float | None) -> str:
        """Explain that a loss cannot be certified, with the observed loss and the sample size that suffices."""
        values, counts = self._to_unit_interval("loss"), self._count_values("loss", index, held_out)
        observed = self._from_unit_interval("loss", float(values @ counts / counts.sum()))
        needed = estimate_samples_needed(values, counts, self._get_limit("loss", None), self._get_delta("loss"))
        advice = "no number of samples suffices: allow more loss"
        advice += ", or use another calibration method" if budget is None else ", or a larger budget"
        if needed is not None:
            advice = f"about {needed:,} such samples suffice"
        claim = f"a loss in {self._certificate.risk} of at most {100 * (self._certificate.epsilon or 0):.4g} %"
        return (
            f"{claim} cannot be certified: on {counts.sum():,} held-out samples it is {100 * observed:.2f} %; {advice}"
        )

    def guarantee(self, index: int, held_out: PolicyOutcomes, budget: float | None, seed: int | None) -> Guarantee:
        """Return the guarantee of a policy, with the upper limits from the held-out samples."""
        limits: dict[str, float | None] = {"cost": None, "loss": None}
        for quantity in limits:
            if self._get_delta(quantity) and (quantity == "loss" or budget is not None):
                bound, counts = self._bounds[quantity, index], self._count_values(quantity, index, held_out)
                limit = bound.upper_limit(self._to_unit_interval(quantity), counts, self._get_delta(quantity))
                limits[quantity] = self._from_unit_interval(quantity, limit)
                if self._passes_trivially(quantity, index):
                    limits[quantity] = self._ranges["cost"][0] if quantity == "cost" else 0.0
        certified = [quantity for quantity, limit in limits.items() if limit is not None]
        return Guarantee(
            tune=self._num_tune,
            hold=held_out.exits.shape[1],
            seed=seed,
            budget=None if budget is None or "cost" not in certified else float(budget),
            budget_delta=self.deltas["cost"] if "cost" in certified else None,
            cost_limit=limits["cost"],
            risk=self._certificate.risk,
            epsilon=self._certificate.epsilon,
            risk_delta=self.deltas["loss"],
            risk_limit=limits["loss"],
            bounds=tuple(self._bounds[quantity, index].name for quantity in certified),
            reference=None if self._reference_is_last_exit or self._certificate.risk is None else "reference",
        )


def select_certified(
    policies: Sequence[Policy],
    tune: PolicyOutcomes,
    held_out: PolicyOutcomes,
    certificate: Certificate,
    costs: Costs,
    budget: float | None,
    reference_is_last_exit: bool,
    seed: int | None = None,
) -> Policy:
    """Select the policy that the held-out samples certify, with its guarantee; `policies` are cheapest first."""
    test = FixedSequenceTest(policies, tune, held_out.exits.shape[1], certificate, costs, reference_is_last_exit)
    index = test.select(held_out, budget)
    policy = policies[index]
    requested = policy.budget if budget is None else float(budget)
    return replace(policy, budget=requested, guarantee=test.guarantee(index, held_out, budget, seed))
