"""Learned exit score: how right stopping is, by a small logistic model per exit. NumPy only.

Stopping is right at an exit that is correct. Where this and every later exit is wrong, it is right as far as the true
label keeps its probability, see `exitwise.core.stopping.stopping_target`. The features are what
the runtime has at an exit: the margin and the top probabilities, and for each earlier exit its confidence and whether
it predicts the same class. Weights are shrunk towards a function of the margin alone, by itself a good score, so that
a few hundred labels suffice. The entropy adds nothing to them, and would take as long as all of them together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np

from exitwise.core.checks import is_number
from exitwise.core.errors import InputError, shorten
from exitwise.core.predictions import Array, ExitPrediction, Predictions
from exitwise.core.stopping import stopping_is_right, stopping_target
from exitwise.core.summaries import top_three

ScoreState = Array | None  # (n, m): what a score carries from exit to exit; None if nothing

FEATURES = ("margin", "top1", "top3")  # of the exit itself
EARLIER_FEATURES = ("confidence", "agrees")  # of each earlier exit
FOLDS = 5

_MAX_WEIGHT = 1e9
_MAX_EXITS = 1000
_MIN_RARE = 10  # samples where stopping is right, and where it is wrong, that an exit needs for a model
_PENALTY = 20.0  # on each squared, standardized weight; chosen on the validation split of the shipped trace
_MARGIN_PENALTY = 0.1  # on the margin's: only keeps it finite if the margin separates the samples
_MIN_SPREAD = 1e-6  # standard deviation below which a feature counts as constant
_MAX_STEPS = 50
_MAX_LOGIT = 700.0  # exp of more overflows


@dataclass(frozen=True)
class LearnedScore:
    """Weights of the learned score of every exit.

    Args:
        exits: For each of K exits, the intercept and a weight for each feature: 3 of the exit itself, then 2 for each
            earlier exit. None where nothing could be learned: the score is then the confidence. The last exit's is
            always None, because all remaining samples exit there.

    Raises:
        InputError: If the numbers of weights are not those of the features, or a weight is not finite.
    """

    exits: tuple[tuple[float, ...] | None, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.exits, Sequence) or not 0 < len(self.exits) <= _MAX_EXITS:
            raise InputError(f"a learned score must have weights for each exit, but has {shorten(self.exits)}")
        exits: list[tuple[float, ...] | None] = []
        for exit, weights in enumerate(self.exits):
            expected = 1 + len(FEATURES) + len(EARLIER_FEATURES) * exit
            if weights is None:
                exits.append(None)
                continue
            is_last = exit == len(self.exits) - 1
            if is_last or not isinstance(weights, Sequence) or len(weights) != expected:
                kind = "None" if is_last else f"{expected} numbers or None"
                raise InputError(f"the learned weights of exit {exit} must be {kind}, but are {shorten(weights)}")
            if not all(is_number(weight) and abs(weight) <= _MAX_WEIGHT for weight in weights):
                raise InputError(f"the learned weights of exit {exit} must be finite, but are {shorten(weights)}")
            exits.append(tuple(float(weight) for weight in weights))
        object.__setattr__(self, "exits", tuple(exits))

    @property
    def is_confidence(self) -> bool:
        """True if nothing could be learned at any exit: the score is then the confidence everywhere."""
        return all(weights is None for weights in self.exits)

    def compute(self, exit: int, pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
        """Return the scores (n,) of the samples that reached an exit, and the score state for the next exit."""
        if len(pred.probs) == 1:
            return self._compute_one(exit, pred, state)
        summary = summarize(pred)
        scores = self.scores_from_summary(exit, summary, state)
        if exit == len(self.exits) - 1:
            return scores, None
        confidence_and_class = summary[:, ::3]
        return scores, confidence_and_class if state is None else np.concatenate([state, confidence_and_class], axis=1)

    def _compute_one(self, exit: int, pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
        """Do the same for a single sample, in floats of Python: every call of NumPy takes longer than all of them."""
        probs = pred.probs[0].tolist()
        top = max(probs)
        predicted = probs.index(top)
        probs[predicted] = 0.0
        second = max(probs)
        probs[probs.index(second)] = 0.0
        third = max(probs)
        earlier = [] if state is None else state[0].tolist()
        weights, score = self.exits[exit], top
        if weights is not None:
            score = 1 / (1 + exp(-max(_logits(weights, (top, second, third, predicted), earlier), -_MAX_LOGIT)))
        is_last = exit == len(self.exits) - 1
        return np.array([score], dtype=np.float32), None if is_last else np.array([[*earlier, top, predicted]])

    def scores_from_summary(self, exit: int, summary: Array, state: ScoreState) -> Array:
        """Return the scores (n,) from the summary (n, 4) of an exit and the state (n, 2 * exit) of earlier exits."""
        weights = self.exits[exit]
        if weights is None:
            return summary[:, 0]
        logits = _logits(weights, tuple(summary.T), () if state is None else tuple(state.T))
        return np.asarray(1 / (1 + np.exp(-np.maximum(logits, -_MAX_LOGIT))))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        exits = [None if weights is None else list(weights) for weights in self.exits]
        return {"features": list(FEATURES), "earlier_features": list(EARLIER_FEATURES), "exits": exits}

    @classmethod
    def from_dict(cls, data: Any) -> "LearnedScore":
        """Make a learned score from the result of `to_dict`; raise `InputError` if it is invalid."""
        if not isinstance(data, Mapping) or set(data) != {"features", "earlier_features", "exits"}:
            raise InputError(f"a learned score must have features, earlier_features and exits, but is {shorten(data)}")
        features = (data["features"], data["earlier_features"])
        if features != (list(FEATURES), list(EARLIER_FEATURES)):
            raise InputError(
                f"the features of a learned score must be those of this exitwise, but are {shorten(features)}"
            )
        return cls(data["exits"])


def summarize(pred: ExitPrediction) -> Array:
    """Return (n, 4) what the learned score uses of a prediction: the top three probabilities and the class.

    Missing probabilities of nets with fewer than three classes are 0.
    """
    return top_three(pred.probs)


def _list_features(summary: Array, state: ScoreState) -> list[Array]:
    """Return the features, (n,) each, from the summary (n, 4) of an exit and the state of earlier exits."""
    top, second, third, predicted = summary.T
    features = [top - second, top, third]
    for j in range(0, 0 if state is None else state.shape[1], 2):
        assert state is not None
        features += [state[:, j], (state[:, j + 1] == predicted).astype(np.float64)]
    return features


def _logits(weights: Sequence[float], summary: Sequence[Any], state: Sequence[Any]) -> Any:
    """Return the logits from summary (4,) and state (2 * exit,) of one sample, or of n: each entry is (n,) then.

    Products are added in the order of the weights, so a score does not depend on the other samples of its batch.
    """
    top, second, third, predicted = summary
    intercept, margin_weight, top_weight, third_weight, *earlier = weights
    logits = intercept + margin_weight * (top - second) + top_weight * top + third_weight * third
    for j in range(0, len(earlier), 2):
        logits = logits + earlier[j] * state[j] + earlier[j + 1] * (state[j + 1] == predicted)
    return logits


def summaries_of(preds: Predictions) -> Array:
    """Return the summaries (K, n, 4) of all exits, cached in the predictions."""
    return preds.reduce("learned summaries", summarize)


def state_at(summaries: Array, exit: int) -> ScoreState:
    """Return the score state (n, 2 * exit) of samples before an exit, from the summaries (K, n, 4) of all exits."""
    return np.concatenate(summaries[:exit, :, ::3], axis=1) if exit else None


def learned_scores(model: LearnedScore, preds: Predictions) -> Array:
    """Return the learned scores (K, n), without ties broken."""
    summaries = summaries_of(preds)
    if len(summaries) != len(model.exits):
        raise InputError(f"`preds` must have {len(model.exits)} exits as the score has, but has {len(summaries)}")
    exits = range(len(summaries))
    return np.stack([model.scores_from_summary(k, summaries[k], state_at(summaries, k)) for k in exits])


def split_folds(samples: int, exits: int) -> Array | None:
    """Return the fold (n,) of each sample for cross-fitting; None if there are too few samples."""
    folds = min(FOLDS, samples // max(exits, 2))
    return None if folds < 2 else np.random.default_rng(0).permutation(samples) % folds


def cross_fit(preds: Predictions, labels: Array) -> tuple[LearnedScore, Array]:
    """Learn the score on predictions (K, n, c) and labels (n,), by cross-fitting.

    Returns:
        The score, and the scores (K, n) of these samples, each by a model that was fitted without the sample's fold.
        The weights of the returned score are the means over the folds' models, so that its scores on fresh samples
        have the spread of the cross-fitted ones, and thresholds fitted on these apply.
    """
    exits, samples, _ = preds.shape
    summaries, fold_of_sample = summaries_of(preds), split_folds(samples, exits)
    correct = np.asarray(preds.predicted == labels)
    right = stopping_is_right(correct)
    target = stopping_target(correct, preds.reduce_with_labels(labels)[0])
    scores = summaries[:, :, 0].copy()
    learned: list[tuple[float, ...] | None] = [None] * exits
    for k in range(exits - 1 if fold_of_sample is not None else 0):
        assert fold_of_sample is not None
        features = np.stack(_list_features(summaries[k], state_at(summaries, k)), axis=1)
        folds = range(fold_of_sample.max() + 1)
        models = [_fit_logistic(features[fold_of_sample != f], target[k, fold_of_sample != f]) for f in folds]
        fitted = [model for model in models if model is not None]
        num_right = int(right[k].sum())
        if min(num_right, samples - num_right) < _MIN_RARE or len(fitted) < len(models):
            continue
        for f, model in zip(folds, fitted, strict=True):
            inside = fold_of_sample == f
            partial = LearnedScore((*([None] * k), model, None))
            state = state_at(summaries, k)
            scores[k, inside] = partial.scores_from_summary(
                k, summaries[k, inside], None if state is None else state[inside]
            )
        learned[k] = tuple(np.mean(fitted, axis=0).tolist())
    return LearnedScore(tuple(learned)), scores


def _fit_logistic(features: Array, target: Array) -> tuple[float, ...] | None:
    """Fit intercept and weights (1 + m,) to targets (n,) from 0 to 1; None if these are all equal.

    Newton's method on standardized features (n, m). The objective is strictly convex, so the result is unique; steps
    are halved until it decreases.
    """
    target = target.astype(np.float64)
    if not np.isfinite(features).all() or target.min(initial=1) == target.max(initial=0) or not len(target):
        return None
    mean, spread = features.mean(axis=0), features.std(axis=0)
    varies = spread > _MIN_SPREAD
    scale = np.where(varies, spread, 1.0)
    design = np.concatenate([np.ones((len(target), 1)), np.where(varies, (features - mean) / scale, 0.0)], axis=1)
    penalty = np.full(design.shape[1], _PENALTY)
    penalty[0], penalty[1] = 0.0, _MARGIN_PENALTY
    share = target.mean()
    weights = np.zeros(design.shape[1])
    weights[0] = np.log(share / (1 - share))

    def objective(weights: Array, logits: Array) -> float:
        return float((np.logaddexp(0, logits) - target * logits).sum() + (penalty * weights**2).sum() / 2)

    logits = design @ weights
    value = objective(weights, logits)
    for _ in range(_MAX_STEPS):
        probs = 1 / (1 + np.exp(-np.clip(logits, -500, 500)))
        gradient = design.T @ (probs - target) + penalty * weights
        curvature = (design.T * (probs * (1 - probs))) @ design + np.diag(penalty + 1e-9)
        step = np.linalg.solve(curvature, gradient)
        length = 1.0
        while length > 1e-6:
            tried = weights - length * step
            tried_logits = design @ tried
            tried_value = objective(tried, tried_logits)
            if tried_value <= value:
                break
            length /= 2
        else:
            break
        done = value - tried_value <= 1e-10 * (1 + abs(value))
        weights, logits, value = tried, tried_logits, tried_value
        if done:
            break
    raw = np.where(varies, weights[1:] / scale, 0.0)
    result = np.concatenate([[weights[0] - float(raw @ mean)], raw])
    return tuple(result.tolist()) if np.isfinite(result).all() and np.abs(result).max() <= _MAX_WEIGHT else None
