"""Explanation of one image: predictions of all exits, and where every policy of the family exits."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from exitwise.core.predictions import Array, ExitPrediction, Predictions
from exitwise.policies.policy import Policy, thresholds_to_json
from exitwise.policies.scores import ScoreState
from exitwise.serving.service import LoadedBundle


def rank_classes(probs: Array, classes: Sequence[str] | None, top: int) -> list[dict[str, Any]]:
    """Return class, label and probability of the `top` most probable classes, from probabilities (c,)."""
    return [
        {"class": int(k), "label": None if classes is None else classes[k], "probability": round(float(probs[k]), 6)}
        for k in np.argsort(-probs, kind="stable")[:top]
    ]


def describe_policies(bundle: LoadedBundle) -> list[dict[str, Any]]:
    """Return budget, mean cost, accuracy and thresholds (K,) of every policy; infinite ones are "inf" and "-inf"."""
    return [
        {
            **bundle.describe_policy(index),
            "cost": member.cost,
            "thresholds": thresholds_to_json(member.policy.thresholds),
        }
        for index, member in enumerate(bundle.family)
    ]


def explain_image(bundle: LoadedBundle, predictions: Sequence[ExitPrediction], top: int) -> dict[str, Any]:
    """Return what every exit predicts, and for every policy its scores (K,), its thresholds (K,) and its exit.

    Args:
        bundle: The bundle that computed the predictions.
        predictions: Predictions (1, c) of the K exits on one image.
        top: Number of classes to list at each exit.
    """
    exits = [
        {"exit": exit, "cost": cost, "top": rank_classes(pred.probs[0], bundle.session.classes, top)}
        for exit, (pred, cost) in enumerate(zip(predictions, bundle.session.costs.values, strict=True))
    ]
    policies = [
        {
            **described,
            "scores": _score(member.policy, predictions),
            "exit": find_exit(member.policy, predictions),
        }
        for described, member in zip(describe_policies(bundle), bundle.family, strict=True)
    ]
    return {"exits": exits, "score": bundle.family[0].policy.score, "policies": policies}


def find_exit(policy: Policy, predictions: Sequence[ExitPrediction]) -> int:
    """Return the exit that one image takes, from the predictions (1, c) of all exits, as the service decides it."""
    state: ScoreState = None
    for exit, pred in enumerate(predictions):
        mask, state = policy.exit_mask(exit, pred, state)
        if mask[0]:
            return exit
    return len(predictions) - 1


def _score(policy: Policy, predictions: Sequence[ExitPrediction]) -> list[float]:
    """Return the scores (K,) of one image."""
    variances = [pred.variance for pred in predictions if pred.variance is not None]
    preds = Predictions(
        (len(predictions), 1, predictions[0].probs.shape[1]),
        lambda: iter(predictions),
        (lambda _: np.stack(variances)) if variances else None,
    )
    return [round(float(score), 9) for score in policy.scores(preds)[:, 0]]
