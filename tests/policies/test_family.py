"""Families of policies: what they check, what they keep, and how a run fits one."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import zoo_run

import exitwise as ew
from exitwise.core.costs import Costs
from exitwise.policies.family import FamilyMember, PolicyFamily, family_budgets, select_family
from exitwise.policies.policy import PolicyFit


def member(cost: float, accuracy: float | None = None, **options: Any) -> FamilyMember:
    policy = ew.Policy((0.5, -inf), cost=cost, costs=(1.0, 10.0), **options)
    return FamilyMember(policy, accuracy)


def fit(**options: Any) -> PolicyFit:
    return PolicyFit(
        **{"chosen": "geometric", "samples": 9, "objective": "accuracy", "labelled": True, "value": 0.7, **options}
    )


def test_the_accuracy_of_a_fitted_policy_is_the_cross_fitted_one_if_there_is_one() -> None:
    policy = ew.Policy((0.5, -inf), cost=2.0, fit=fit(held_out=0.6))
    assert (FamilyMember.of(policy).accuracy, FamilyMember.of(policy).cross_fitted) == (0.6, True)
    in_sample = FamilyMember.of(replace(policy, fit=fit(held_out=None)))
    assert (in_sample.accuracy, in_sample.cross_fitted) == (0.7, False)
    for other in (fit(held_out=1.2, objective="nlpd"), fit(held_out=0.6, labelled=False), None):
        assert FamilyMember.of(replace(policy, fit=other)).accuracy is None


def test_a_family_must_fit_together() -> None:
    with pytest.raises(ew.InputError, match="must grow"):
        PolicyFamily((member(2.0), member(2.0)))
    with pytest.raises(ew.InputError, match="one score, unit and number of exits"):
        PolicyFamily((member(2.0), member(3.0, score="entropy")))
    with pytest.raises(ew.InputError, match="`members`"):
        PolicyFamily(())
    with pytest.raises(ew.InputError, match="with its mean cost"):
        FamilyMember(ew.Policy((0.5, -inf)))
    with pytest.raises(ew.InputError, match="on entropy"):
        PolicyFamily((member(2.0),)).check_fits(ew.Policy((0.5, -inf), "entropy"))


def test_policies_that_cost_more_without_being_more_accurate_are_left_out() -> None:
    """Against brute force over random candidates."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        candidates = [member(float(c), float(a)) for c, a in generator.uniform(1, 10, (12, 2)) / [1, 10]]
        family = select_family(candidates)
        for candidate in candidates:
            cheaper = [each for each in candidates if each.cost < candidate.cost]
            dominated = any((each.accuracy or 0) >= (candidate.accuracy or 0) for each in cheaper)
            close = any(candidate.cost <= 1.001 * each.cost for each in cheaper)
            if not close:
                assert (candidate in family.members) != dominated
    own = member(5.0, 0.1)
    family = select_family([member(1.0, 0.5), member(4.9, 0.6), member(9.0, 0.7)], own)
    assert [each.cost for each in family] == [1.0, 5.0, 9.0]


def test_indices_by_budget_and_floor() -> None:
    family = PolicyFamily(
        tuple(member(cost, acc, budget=cost + 1) for cost, acc in ((1.0, 0.5), (2.0, 0.7), (4.0, 0.6)))
    )
    assert [family.index_for_budget(budget) for budget in (0.1, 2.0, 2.9, 3.0, 99.0)] == [0, 0, 0, 1, 2]
    assert [family.index_for_floor(floor) for floor in (0.4, 0.55, 0.6)] == [0, 1, 1]
    with pytest.raises(ew.InputError, match=r"at most 0\.6"):
        family.index_for_floor(0.65)
    with pytest.raises(ew.InputError, match="not known"):
        PolicyFamily((member(1.0),)).index_for_floor(0.1)
    assert family_budgets(Costs((1.0, 5.0)), 5) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "damage",
    [
        3,
        [],
        [3],
        [{}],
        [{"policy": 3, "accuracy": 0.5, "cross_fitted": True}],
        [{"policy": {}, "accuracy": 0.5, "cross_fitted": True}],
        {"accuracy": 2.0},
        {"accuracy": "high"},
        {"cross_fitted": 1},
        {"more": 1},
    ],
)
def test_a_damaged_family_is_refused(damage: Any) -> None:
    family = PolicyFamily((member(1.0, 0.5), member(2.0, 0.6)))
    base = family[0].policy
    data = json.loads(json.dumps(family.to_dicts(base)))
    assert PolicyFamily.from_dicts(data, base) == family
    wrong = damage if isinstance(damage, list | int) else [data[0], {**data[1], **damage}]
    with pytest.raises(ew.InputError):
        PolicyFamily.from_dicts(wrong, base)


@pytest.mark.slow
@pytest.mark.parametrize("certify", [None, 0.05])
def test_a_run_fits_a_family_on_the_samples_of_its_policy(tmp_path: Path, certify: float | None) -> None:
    from exitwise.runs.deploy import build_classifier, fit_family
    from exitwise.runs.options import ClassifierOptions
    from exitwise.runs.run import Run

    run = Run(zoo_run(tmp_path / "run", samples=1000))
    classifier, _ = build_classifier(
        run, ClassifierOptions(budget="60%", method="MSDNet (vanilla)", score="learned", certify=certify)
    )
    family = fit_family(run, classifier)
    assert classifier.policy in [each.policy for each in family]
    assert len(family) >= 4
    costs = run.trace().costs.values
    assert family[0].cost == costs[0]
    assert all((each.policy.guarantee is None) == (certify is None) for each in family)
    accuracies = [each.accuracy for each in family if each.policy != classifier.policy]
    assert accuracies == sorted(accuracies)  # type: ignore[type-var]
    assert {each.policy.fit.samples for each in family if each.policy.fit} == {1000 if certify is None else 500}
    assert PolicyFamily.from_dicts(family.to_dicts(classifier.policy), classifier.policy) == family
