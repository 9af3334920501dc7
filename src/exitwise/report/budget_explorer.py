"""What every budget buys, by the plain net and the calibrated one: the numbers behind the slider. NumPy alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from exitwise.core.costs import Costs
from exitwise.core.predictions import Array
from exitwise.evaluation.bootstrap import Bootstrap, metric_columns, percentile_interval
from exitwise.policies.policy import Policy, thresholds_to_json
from exitwise.report.evaluated_model import EvaluatedModel, reliability
from exitwise.runs.policies import PolicyOptions

SLIDER_STEPS = 41  # of the slider
GALLERY_SIZE = 12  # samples in a gallery


def budget_grid(costs: Costs, chosen: float) -> list[float]:
    """Budgets from the first exit's cost to the last's, with the chosen one among them."""
    low, high = costs.values[0], costs.values[-1]
    if low == high:
        return [low]
    return sorted({*(float(value) for value in np.linspace(low, high, SLIDER_STEPS)), float(chosen)})


def explore_budgets(
    vanilla: EvaluatedModel, ours: EvaluatedModel, costs: Costs, chosen: float, bootstrap: Bootstrap, points: Array
) -> dict[str, Any]:
    """Both sides at every budget, with intervals, and what became of the samples that are shown as points."""
    budgets = budget_grid(costs, chosen)
    before, after = sides = [_BudgetSweep(side, costs, budgets) for side in (vanilla, ours)]
    steps = []
    for i, budget in enumerate(budgets):
        drawn = [bootstrap.resampled_metrics(walk.columns(i)) for walk in sides]
        both = [walk.step(i, found) for walk, found in zip(sides, drawn, strict=True)]
        change = {name: _rounded(percentile_interval(drawn[1][name] - drawn[0][name])) for name in drawn[0]}
        steps.append(
            {
                "budget": budget,
                "vanilla": both[0],
                "ours": both[1],
                "change": change,
                **_moved(before, after, i, points),
            }
        )
    return {
        "unit": costs.unit,
        "costs": list(costs.values),
        "chosen": min(range(len(budgets)), key=lambda i: abs(budgets[i] - chosen)),
        "steps": steps,
        "exits": {
            name: ["".join(chr(ord("0") + k) for k in walk.exits[i][points]) for i in range(len(budgets))]
            for name, walk in zip(("vanilla", "ours"), sides, strict=True)
        },
    }


class _BudgetSweep:
    """One side at every budget."""

    def __init__(self, side: EvaluatedModel, costs: Costs, budgets: Sequence[float]) -> None:
        self.side = side
        self.policies = [side.tuned.policy(costs, budget, PolicyOptions()) for budget in budgets]
        self.exits = [policy.exits(side.preds) for policy in self.policies]
        self.evaluations = [side.outcomes.evaluation(exits, costs) for exits in self.exits]
        self._costs = np.asarray(costs.values)
        self._all = np.arange(side.preds.shape[1])

    def columns(self, i: int) -> Array:
        return metric_columns(self.side.outcomes, self.exits[i], self._costs)

    def right(self, i: int) -> Array:
        """(n,) at the exit taken."""
        return np.asarray(self.side.correct[self.exits[i], self._all])

    def step(self, i: int, drawn: dict[str, Array]) -> dict[str, Any]:
        found = self.evaluations[i].to_dict()
        del found["per_exit"], found["unit"], found["samples"]
        exits, right = self.exits[i], self.right(i)
        confidence = self.side.outcomes.confidence[exits, self._all]
        return {
            **found,
            **_policy(self.policies[i]),
            "intervals": {name: _rounded(percentile_interval(values)) for name, values in drawn.items()},
            "leaving": _leaving(exits, right, self.side.correct[-1], len(self._costs)),
            "reliability": reliability(confidence, right),
        }


def _policy(policy: Policy) -> dict[str, Any]:
    """What the page says of thresholds."""
    fit = policy.fit
    return {
        "val_cost": policy.cost,
        "thresholds": thresholds_to_json(policy.thresholds),
        "strategy": None if fit is None else fit.chosen,
    }


def _leaving(exits: Array, right: Array, last_right: Array, number: int) -> list[dict[str, int]]:
    """At every exit: how many leave rightly, how many wrongly, and how many of these the last exit has right."""

    def count(which: Array) -> list[int]:
        return [int(value) for value in np.bincount(exits[which], minlength=number)]

    names = ("right", "wrong", "avoidable")
    counts = (count(right), count(~right), count(~right & last_right))
    return [dict(zip(names, row, strict=True)) for row in zip(*counts, strict=True)]


def _moved(vanilla: _BudgetSweep, ours: _BudgetSweep, i: int, points: Array) -> dict[str, Any]:
    """Samples that one side leaves early and wrong, while the other goes on and is right."""
    before, after = vanilla.right(i), ours.right(i)
    later = ours.exits[i] - vanilla.exits[i]
    saved, lost = ~before & after & (later > 0), before & ~after & (later < 0)
    return {
        name: {"samples": int(which.sum()), "points": np.flatnonzero(which[points])[:GALLERY_SIZE].tolist()}
        for name, which in (("saved", saved), ("lost", lost))
    }


def _rounded(pair: tuple[float, float]) -> list[float]:
    return [float(f"{value:.6g}") for value in pair]
