"""Prediction sets, abstention and the risk-coverage curve of the calibrated model, for the page. NumPy only."""

from dataclasses import replace
from typing import Any

import numpy as np

from exitwise.calibration.trace import Split
from exitwise.core.costs import Costs, evenly_spaced_budgets
from exitwise.core.predictions import Array
from exitwise.evaluation.answers import evaluate_abstention, evaluate_sets
from exitwise.policies.policy import Policy
from exitwise.policies.prediction_sets import PredictionSets, probs_at_exits
from exitwise.report.evaluated_model import EvaluatedModel
from exitwise.runs.answers import ANSWERED, AnswerOptions
from exitwise.runs.chosen import ChosenClassifier
from exitwise.runs.policies import PolicyOptions

_BUDGETS = 9  # of the curve of set sizes, evenly spaced
_EXAMPLES = 12


def describe_answers(
    model: EvaluatedModel, test: Split, costs: Costs, budget: float, points: Array, chosen: ChosenClassifier | None
) -> dict[str, Any]:
    """Return the risk-coverage curve on the test split and, where the run has them, prediction sets and abstention.

    Args:
        model: The calibrated model.
        test: Test split.
        costs: Costs of the exits.
        budget: Budget of the curve; that of the chosen classifier, if there is one, takes its place.
        points: Positions of the samples that the page shows.
        chosen: The run's chosen classifier, with sets or an abstention if these were fitted.
    """
    options = PolicyOptions() if chosen is None else replace(PolicyOptions.of(chosen.policy), certificate=None)
    policy = model.splits.fit_policy(costs, budget, options) if chosen is None else chosen.policy
    abstention = None if chosen is None else chosen.abstention
    measured = evaluate_abstention(abstention, model.preds, test.labels, policy=policy)
    data: dict[str, Any] = {
        "budget": policy.budget,
        "unit": policy.unit,
        "curve": measured.curve.to_dict(),
        "abstention": None if abstention is None else {**abstention.to_dict(), "test": measured.to_dict()},
        "sets": None,
        "trade_off": [],
    }
    if chosen is None or model.splits.answers is None or policy.unit != costs.unit:
        return data
    options = replace(options, max_loss=None, answers=AnswerOptions.of(chosen.sets, abstention))
    budgets = sorted({*evenly_spaced_budgets(costs, _BUDGETS), policy.budget or budget})
    rows = model.splits.trade_off(costs, budgets, options, model.preds, test, policy)
    data |= {"shares": list(ANSWERED), "trade_off": [row.to_dict() for row in rows]}
    if chosen.sets is not None:
        evaluation = evaluate_sets(chosen.sets, model.preds, test.labels, policy=policy).to_dict()
        by_class = [(group["coverage"], c) for c, group in enumerate(evaluation.pop("by_class")) if group["samples"]]
        lowest, lowest_class = min(by_class)
        data["sets"] = {
            "coverage": chosen.sets.coverage,
            "per": chosen.sets.per,
            "score": chosen.sets.score,
            "samples": sum(chosen.sets.samples),
            "test": {**evaluation, "lowest_class": lowest_class, "lowest_class_coverage": lowest},
            "examples": _choose_examples(model, policy, chosen.sets, points),
        }
    return data


def _choose_examples(
    model: EvaluatedModel, policy: Policy, sets: PredictionSets, points: Array
) -> list[dict[str, Any]]:
    """Return samples of the page with their sets, most probable class first, spread over the sizes of sets."""
    exits = policy.exits(model.preds)
    probs = probs_at_exits(model.preds, exits)[points]
    masks = sets.masks(probs, exits[points])
    by_size = np.argsort(masks.sum(axis=1), kind="stable")
    shown = by_size[np.unique(np.linspace(0, len(by_size) - 1, _EXAMPLES).astype(int))]
    return [
        {
            "point": int(i),
            "exit": int(exits[points[i]]),
            "set": [int(c) for c in np.argsort(-probs[i], kind="stable") if masks[i, c]],
        }
        for i in shown
    ]
