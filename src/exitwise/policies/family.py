"""A family of policies of one net, from the cheapest to the full budget. NumPy only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from exitwise.core.checks import check_bool, check_number
from exitwise.core.costs import Costs, format_cost
from exitwise.core.errors import InputError, shorten
from exitwise.policies.policy import Policy

FAMILY_SIZE = 9  # policies that `exitwise export` fits by default


@dataclass(frozen=True)
class FamilyMember:
    """A policy with the accuracy that was measured on its tuning samples.

    Args:
        policy: The policy, with its mean cost.
        accuracy: Accuracy as a fraction; None if there were no labels.
        cross_fitted: Whether `accuracy` was measured out of fold, on samples that the thresholds were not fitted on.
    """

    policy: Policy
    accuracy: float | None = None
    cross_fitted: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy) or self.policy.cost is None or self.policy.cost <= 0:
            raise InputError(f"`policy` must be a Policy with its mean cost, but got {shorten(self.policy)}")
        if self.accuracy is not None:
            object.__setattr__(self, "accuracy", check_number("accuracy", self.accuracy, 0, 1))
        check_bool("cross_fitted", self.cross_fitted)

    @classmethod
    def of(cls, policy: Policy) -> "FamilyMember":
        """Return a fitted policy as a member, with the accuracy of its fit: the cross-fitted one if there is one."""
        fit = policy.fit
        if fit is None or not fit.labelled or fit.objective != "accuracy":
            return cls(policy)
        cross_fitted = fit.held_out is not None
        return cls(policy, fit.held_out if fit.held_out is not None else fit.value, cross_fitted)

    @property
    def cost(self) -> float:
        """Mean cost per sample on the tuning samples."""
        return self.policy.cost or 0.0

    @property
    def budget(self) -> float:
        """Budget that the policy was fitted for, or its mean cost if it was fitted without one."""
        return self.cost if self.policy.budget is None else self.policy.budget


@dataclass(frozen=True)
class PolicyFamily:
    """Policies of one net on one score, with growing mean costs: a service can move between them.

    Args:
        members: Policies with their accuracies, from the cheapest to the most expensive.

    Raises:
        InputError: If there are none, or they differ in score, unit or number of exits, or costs do not grow.

    Example:
        >>> import exitwise as ew
        >>> from exitwise.policies.family import FamilyMember, PolicyFamily
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> preds = ew.calibrate(trace, "MSDNet (vanilla)").predict(trace.val)
        >>> policies = ew.fit_policies(preds, trace.val.labels, trace.costs, budgets=[1e7, 2e7, 3e7])
        >>> family = PolicyFamily(tuple(map(FamilyMember.of, policies)))
        >>> len(family), family.index_for_budget(2.5e7), family[1].budget
        (3, 1, 20000000.0)
    """

    members: tuple[FamilyMember, ...]

    def __post_init__(self) -> None:
        members = self.members
        if not isinstance(members, tuple) or not members or not all(isinstance(each, FamilyMember) for each in members):
            raise InputError(f"`members` must be a tuple of FamilyMembers, but got {shorten(members)}")
        kinds = {(each.policy.score, each.policy.unit, len(each.policy.thresholds)) for each in members}
        if len(kinds) > 1:
            raise InputError(
                f"policies of a family must have one score, unit and number of exits, but have {sorted(kinds)}"
            )
        costs = [each.cost for each in members]
        if any(later <= earlier for earlier, later in pairwise(costs)):
            raise InputError(f"mean costs of a family must grow from policy to policy, but are {shorten(costs)}")

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[FamilyMember]:
        return iter(self.members)

    def __getitem__(self, index: int) -> FamilyMember:
        return self.members[index]

    def index_for_budget(self, budget: float) -> int:
        """Return the most expensive member whose budget is at most `budget`, or the cheapest if there is none."""
        return max((k for k, member in enumerate(self) if member.budget <= budget * (1 + 1e-9)), default=0)

    def index_for_floor(self, floor: float) -> int:
        """Return the cheapest member from which on all accuracies are at least `floor`.

        Raises:
            InputError: If accuracies are not known, or the most expensive member does not reach the floor.
        """
        accuracies = [member.accuracy for member in self]
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        if len(known) < len(self):
            raise InputError("`floor` needs a family with accuracies, but they are not known: export it with labels")
        if known[-1] < floor:
            raise InputError(
                f"`floor` must be at most {known[-1]:.4g}, the accuracy of the most expensive policy, but is {floor:g}"
            )
        return max((k + 1 for k, accuracy in enumerate(known) if accuracy < floor), default=0)

    def check_fits(self, policy: Policy) -> None:
        """Raise InputError unless the members have the score, unit and number of exits of `policy`."""
        first = self.members[0].policy
        kinds = [(each.score, each.unit, len(each.thresholds)) for each in (first, policy)]
        if kinds[0] != kinds[1]:
            raise InputError(
                f"policies of the family are on {kinds[0][0]} in {kinds[0][1]} with {kinds[0][2]} exits, "
                f"but the policy is on {kinds[1][0]} in {kinds[1][1]} with {kinds[1][2]} exits"
            )

    def describe(self) -> str:
        """Return the number of policies and the range of their mean costs and accuracies as a phrase."""
        first, last = self.members[0], self.members[-1]
        unit = first.policy.unit
        text = f"{len(self)} policies from {format_cost(first.cost, unit)} to {format_cost(last.cost, unit)}"
        if first.accuracy is None or last.accuracy is None:
            return text
        return f"{text}, accuracy on validation samples {first.accuracy:.2%} to {last.accuracy:.2%}"

    def to_dicts(self, base: Policy) -> list[dict[str, Any]]:
        """Return JSON-serializable dicts; a score model that is that of `base` is left out."""
        dicts = []
        for member in self:
            policy = member.policy.to_dict()
            if base.score_model is not None and member.policy.score_model == base.score_model:
                del policy["score_model"]
            dicts.append({"policy": policy, "accuracy": member.accuracy, "cross_fitted": member.cross_fitted})
        return dicts

    @classmethod
    def from_dicts(cls, data: Any, base: Policy) -> "PolicyFamily":
        """Make a family from the result of `to_dicts`; raise InputError if it is invalid."""
        if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
            raise InputError(f"a family must be a list of policies, but is {shorten(data)}")
        members = []
        for entry in data:
            if set(entry) != {"policy", "accuracy", "cross_fitted"} or not isinstance(entry["policy"], Mapping):
                raise InputError(
                    f"a policy of the family must have policy, accuracy and cross_fitted, but is {shorten(entry)}"
                )
            policy = dict(entry["policy"])
            if base.score_model is not None and policy.get("score_model") is None:
                policy["score_model"] = base.score_model.to_dict()
            members.append(FamilyMember(Policy.from_dict(policy), entry["accuracy"], entry["cross_fitted"]))
        return cls(tuple(members))


def select_family(members: Sequence[FamilyMember], required: FamilyMember | None = None) -> PolicyFamily:
    """Make a family of those members for which no cheaper one is as accurate; the cheapest one stays.

    Args:
        members: Candidates in any order.
        required: A member that stays in any case; others of about its cost, within 3 %, are left out.
    """
    kept: list[FamilyMember] = []
    best = -1.0
    for member in sorted(members, key=lambda each: each.cost):
        if required is not None and abs(member.cost / required.cost - 1) < 0.03:
            continue
        more_accurate = member.accuracy is None or member.accuracy > best
        if more_accurate and (not kept or member.cost > 1.001 * kept[-1].cost):
            kept.append(member)
            best = best if member.accuracy is None else member.accuracy
    if required is not None:
        kept = sorted([*kept, required], key=lambda each: each.cost)
    return PolicyFamily(tuple(kept))


def family_budgets(costs: Costs, count: int = FAMILY_SIZE) -> list[float]:
    """Return `count` evenly spaced budgets from the cost of the first exit to that of the last."""
    low, high = costs.values[0], costs.values[-1]
    return [float(value) for value in np.linspace(low, high, count)] if high > low else [high]


def with_accuracy(member: FamilyMember, accuracy: float) -> FamilyMember:
    """Return a member with an accuracy that was measured in sample."""
    return replace(member, accuracy=accuracy, cross_fitted=False)
