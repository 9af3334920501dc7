"""The vanilla and the calibrated model at every budget: the data behind the page's slider. NumPy only."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from exitwise.core.costs import Costs
from exitwise.core.predictions import Array
from exitwise.evaluation.bootstrap import Bootstrap, metric_columns, percentile_interval
from exitwise.evaluation.evaluate import describe_eefp_disagreement
from exitwise.policies.policy import Policy, thresholds_to_json
from exitwise.report.evaluated_model import EvaluatedModel, reliability_bins
from exitwise.runs.policies import PolicyOptions

SLIDER_STEPS = 41
GALLERY_SIZE = 12  # maximum number of samples


def budget_grid(costs: Costs, chosen: float) -> list[float]:
    """Return equally spaced budgets from the first exit's cost to the last exit's, and the chosen budget, sorted."""
    low, high = costs.values[0], costs.values[-1]
    if low == high:
        return [low]
    return sorted({*(float(value) for value in np.linspace(low, high, SLIDER_STEPS)), float(chosen)})


def explore_budgets(
    vanilla: EvaluatedModel,
    ours: EvaluatedModel,
    costs: Costs,
    chosen: float,
    bootstrap: Bootstrap,
    points: Array,
    policy: Policy | None = None,
) -> dict[str, Any]:
    """Evaluate both models at every budget, with bootstrap intervals, and list the exits of the samples `points`.

    Args:
        vanilla: The net without calibration.
        ours: The calibrated net.
        costs: Costs of the exits, in the unit of the budgets.
        chosen: Budget that the page opens at.
        bootstrap: Resamples of the test samples.
        points: Positions of the samples that the page shows.
        policy: Policy of the run's chosen classifier. Its strategy and score apply at every budget, and at its own
            budget it is shown itself.
    """
    budgets = budget_grid(costs, chosen)
    options = PolicyOptions() if policy is None else replace(PolicyOptions.of(policy), certificate=None)
    baseline_options = options.for_baseline(vanilla.splits.calibration.method)
    with ThreadPoolExecutor(1) as pool:  # NumPy lets the other thread run while it works on large arrays
        baseline = pool.submit(_BudgetSweep, vanilla, costs, budgets, baseline_options)
        calibrated = _BudgetSweep(ours, costs, budgets, options, policy)
        sweeps = {"vanilla": baseline.result(), "ours": calibrated}
    steps = []
    for i, budget in enumerate(budgets):
        resampled = {name: bootstrap.resampled_metrics(sweep.columns(i)) for name, sweep in sweeps.items()}
        steps.append(
            {
                "budget": budget,
                **{name: sweep.step(i, resampled[name]) for name, sweep in sweeps.items()},
                "change": {
                    metric: _round_interval(percentile_interval(values - resampled["vanilla"][metric]))
                    for metric, values in resampled["ours"].items()
                },
                "eefp_note": describe_eefp_disagreement(
                    {
                        f"the {label} model": (sweeps[name].evaluations[i].ece, sweeps[name].evaluations[i].eefp)
                        for name, label in (("vanilla", "vanilla"), ("ours", "calibrated"))
                    }
                ),
                **_find_moved_samples(sweeps["vanilla"], sweeps["ours"], i, points),
            }
        )
    return {
        "unit": costs.unit,
        "costs": list(costs.values),
        "chosen": min(range(len(budgets)), key=lambda i: abs(budgets[i] - chosen)),
        "steps": steps,
        "exits": {
            name: ["".join(chr(ord("0") + k) for k in sweep.exits[i][points]) for i in range(len(budgets))]
            for name, sweep in sweeps.items()
        },
    }


class _BudgetSweep:
    """One model at every budget."""

    def __init__(
        self,
        model: EvaluatedModel,
        costs: Costs,
        budgets: Sequence[float],
        options: PolicyOptions,
        chosen: Policy | None = None,
    ) -> None:
        self.model = model
        self.policies = [
            chosen
            if chosen is not None and (chosen.budget, chosen.unit) == (budget, costs.unit)
            else model.splits.fit_policy(costs, budget, options)
            for budget in budgets
        ]
        self.exits = [policy.exits(model.preds) for policy in self.policies]
        self.evaluations = [
            model.per_sample.evaluation(exits, costs, model.stopping_ranks(policy))
            for policy, exits in zip(self.policies, self.exits, strict=True)
        ]
        self._costs = np.asarray(costs.values)
        self._all = np.arange(model.preds.shape[1])

    def columns(self, i: int) -> Array:
        """Columns of per-sample metrics at budget `i`, for the bootstrap."""
        return metric_columns(self.model.per_sample, self.exits[i], self._costs)

    def correct(self, i: int) -> Array:
        """Mask (n,) of the samples that are correct at the exit they take."""
        return np.asarray(self.model.correct[self.exits[i], self._all])

    def step(self, i: int, resampled: dict[str, Array]) -> dict[str, Any]:
        """Everything that the page shows of the model at budget `i`."""
        metrics = self.evaluations[i].to_dict()
        del metrics["per_exit"], metrics["unit"], metrics["samples"]
        exits, correct = self.exits[i], self.correct(i)
        confidence = self.model.per_sample.confidence[exits, self._all]
        return {
            **metrics,
            **_describe_policy(self.policies[i]),
            "intervals": {name: _round_interval(percentile_interval(values)) for name, values in resampled.items()},
            "exited": _count_exited(exits, correct, self.model.correct[-1], len(self._costs)),
            "reliability": reliability_bins(confidence, correct),
        }


def _describe_policy(policy: Policy) -> dict[str, Any]:
    """Return cost, thresholds and strategy of a policy for the page."""
    fit = policy.fit
    return {
        "val_cost": policy.cost,
        "thresholds": thresholds_to_json(policy.thresholds),
        "strategy": None if fit is None else fit.chosen,
    }


def _count_exited(exits: Array, correct: Array, correct_at_last: Array, num_exits: int) -> list[dict[str, int]]:
    """Count per exit the correct and the wrong samples; wrong ones are avoidable if the last exit is correct."""

    def count(mask: Array) -> list[int]:
        return [int(value) for value in np.bincount(exits[mask], minlength=num_exits)]

    names = ("correct", "wrong", "avoidable")
    counts = (count(correct), count(~correct), count(~correct & correct_at_last))
    return [dict(zip(names, row, strict=True)) for row in zip(*counts, strict=True)]


def _find_moved_samples(vanilla: _BudgetSweep, ours: _BudgetSweep, i: int, points: Array) -> dict[str, Any]:
    """Find the samples that calibration moves to a later exit and corrects (saved), and the opposite (lost)."""
    before, after = vanilla.correct(i), ours.correct(i)
    later = ours.exits[i] - vanilla.exits[i]
    saved, lost = ~before & after & (later > 0), before & ~after & (later < 0)
    return {
        name: {"samples": int(mask.sum()), "points": np.flatnonzero(mask[points])[:GALLERY_SIZE].tolist()}
        for name, mask in (("saved", saved), ("lost", lost))
    }


def _round_interval(interval: tuple[float, float]) -> list[float]:
    return [float(f"{value:.6g}") for value in interval]
