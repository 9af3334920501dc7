"""Prediction sets and abstention of a run: the options of the commands, and the fit on held-out samples."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from exitwise.calibration.trace import Split
from exitwise.core.checks import check_between, check_choice
from exitwise.core.errors import InputError
from exitwise.core.predictions import Predictions
from exitwise.core.results import Result
from exitwise.evaluation.answers import (
    AbstentionEvaluation,
    SetEvaluation,
    covered_and_sizes,
    evaluate_abstention,
    evaluate_sets,
)
from exitwise.policies.abstention import PLACES, Abstention, fit_abstention
from exitwise.policies.learned_score import summaries_of
from exitwise.policies.policy import Policy
from exitwise.policies.prediction_sets import (
    GROUPINGS,
    SET_SCORES,
    PredictionSets,
    TooFewSamplesError,
    fit_sets,
)
from exitwise.runtime.engine import AnswerRules

ANSWERED = (1.0, 0.95, 0.9, 0.8)  # shares of answered images in a trade-off


@dataclass(frozen=True)
class AnswerOptions:
    """Prediction sets of a coverage, and abstention by a share or a risk; None for what is not requested."""

    coverage: float | None = None
    per: str = "all"
    set_score: str = "thr"
    share: float | None = None
    risk: float | None = None
    delta: float = 0.05
    at: str = "exit"

    @classmethod
    def of(cls, sets: PredictionSets | None, abstention: Abstention | None) -> "AnswerOptions":
        """Return the options that sets and an abstention were fitted with."""
        options: dict[str, Any] = {}
        if sets is not None:
            options |= {"coverage": sets.coverage, "per": sets.per, "set_score": sets.score}
        if abstention is not None:
            options |= {"share": abstention.share, "risk": abstention.risk, "at": abstention.at}
            options |= {} if abstention.delta is None else {"delta": abstention.delta}
        return cls(**options)

    @property
    def requested(self) -> bool:
        """True if there is anything to fit, which needs held-out samples."""
        return any(value is not None for value in (self.coverage, self.share, self.risk))

    def check(self) -> None:
        """Raise InputError if a value is out of range, before anything is calibrated."""
        for option, value in (("--sets", self.coverage), ("--abstain", self.share), ("--risk", self.risk)):
            if value is not None:
                check_between(option, value, 0, 1)
        check_between("--delta", self.delta, 0, 1)
        check_choice("--sets-per", self.per, GROUPINGS)
        check_choice("--sets-score", self.set_score, SET_SCORES)
        check_choice("--abstain-at", self.at, PLACES)
        if self.share is not None and self.risk is not None:
            raise InputError("--abstain leaves a share unanswered, --risk as many as an error rate needs: give one")


def parse_share(option: str, text: str) -> float:
    """Return the value of an option as a fraction, from text such as 5% or 0.05."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        value = nan
    if not 0 < value < 1:
        raise InputError(f"`{option}` must be a share such as 5% or 0.05, but got {text!r}")
    return value


def fit_answers(
    options: AnswerOptions, policy: Policy, held_out: Predictions, split: Split, tune: Predictions, tune_split: Split
) -> AnswerRules:
    """Fit what was requested on held-out samples; tuning samples only fix the order of the tests of a risk."""
    sets, abstention = _fit_sets(options, policy, held_out, split), None
    if options.share is not None:
        abstention = fit_abstention(held_out, policy=policy, share=options.share, at=options.at)
    elif options.risk is not None:
        abstention = fit_abstention(
            held_out,
            split.labels,
            policy=policy,
            risk=options.risk,
            delta=options.delta,
            at=options.at,
            tune=tune,
            tune_labels=tune_split.labels,
            held_out=True,
        )
    return AnswerRules(sets, abstention)


def _fit_sets(options: AnswerOptions, policy: Policy, held_out: Predictions, split: Split) -> PredictionSets | None:
    if options.coverage is None:
        return None
    return fit_sets(
        held_out,
        split.labels,
        policy=policy,
        coverage=options.coverage,
        per=options.per,
        score=options.set_score,
        held_out=True,
    )


@dataclass(frozen=True)
class TradeOffRow(Result):
    """Cost, share of answered images and error rate at one budget, on the test split.

    Args:
        budget: The budget.
        cost: Mean cost per image.
        answered: Shares of answered images (s,); `ANSWERED` were requested on the held-out samples. None if too few
            images reach the last exit, where alone the classifier abstains.
        error: Error rate among the answered images (s,); None if there are none.
        coverage: Share of the prediction sets that hold the true class; None if there are no sets.
        mean_size: Mean number of classes in a set; None if there are no sets.
    """

    budget: float
    cost: float
    answered: tuple[float | None, ...]
    error: tuple[float | None, ...]
    coverage: float | None = None
    mean_size: float | None = None


def trade_off(
    policies: Iterable[Policy],
    options: AnswerOptions,
    held_out: tuple[Predictions, Split],
    test: tuple[Predictions, Split],
) -> tuple[TradeOffRow, ...]:
    """Measure on the test split what answers cost, how many there are, and how often they are wrong.

    Args:
        policies: Policies, one per budget, with their costs.
        options: Prediction sets to fit, if any.
        held_out: Predictions and samples that sets and thresholds of abstention are fitted on.
        test: Predictions and samples that everything is measured on.

    Returns:
        One row per policy. Sets are left out where an exit or a class has too few held-out samples.
    """
    held_out_preds, held_out_split = held_out
    preds, split = test
    labels = split.labels.numpy()
    rows = []
    for policy in policies:
        exits = policy.exits(preds)
        wrong = summaries_of(preds)[exits, np.arange(len(labels)), 3] != labels
        answered: list[float | None] = []
        errors: list[float | None] = []
        for share in ANSWERED:
            kept = np.ones(len(labels), dtype=bool)
            try:
                if share < 1:
                    abstention = fit_abstention(held_out_preds, policy=policy, share=1 - share, at=options.at)
                    kept = ~abstention.mask_at_exits(preds, exits)
            except InputError:  # too few samples reach the last exit
                answered.append(None)
                errors.append(None)
                continue
            answered.append(float(kept.mean()))
            errors.append(float(wrong[kept].mean()) if kept.any() else None)
        try:
            sets = _fit_sets(options, policy, held_out_preds, held_out_split)
        except TooFewSamplesError:
            sets = None
        covered, sizes = (None, None) if sets is None else covered_and_sizes(sets, preds, exits, labels)
        rows.append(
            TradeOffRow(
                budget=float(policy.budget or 0.0),
                cost=float(np.asarray(policy.costs)[exits].mean()),
                answered=tuple(answered),
                error=tuple(errors),
                coverage=None if covered is None else float(covered.mean()),
                mean_size=None if sizes is None else float(sizes.mean()),
            )
        )
    return tuple(rows)


@dataclass(frozen=True, eq=False)
class AnswersEvaluation:
    """Sets and abstention of a run's classifier, and what they come to on the test split."""

    fitted: AnswerRules
    sets: SetEvaluation | None = None
    abstention: AbstentionEvaluation | None = None
    trade_off: tuple[TradeOffRow, ...] = ()

    @classmethod
    def of(
        cls,
        fitted: AnswerRules,
        preds: Predictions,
        test: Split,
        policy: Policy,
        trade_off: tuple[TradeOffRow, ...] = (),
    ) -> "AnswersEvaluation":
        """Measure fitted sets and abstention on the test split."""
        sets = abstention = None
        if fitted.sets is not None:
            sets = evaluate_sets(fitted.sets, preds, test.labels, policy=policy)
        if fitted.abstention is not None:
            abstention = evaluate_abstention(fitted.abstention, preds, test.labels, policy=policy)
        return cls(fitted, sets, abstention, trade_off)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict with the keys `sets` and `abstention`, for what there is, and `trade_off`."""
        pairs = {"sets": (self.fitted.sets, self.sets), "abstention": (self.fitted.abstention, self.abstention)}
        measured = {
            name: {"fitted": fitted.to_dict(), "test": result.to_dict()}
            for name, (fitted, result) in pairs.items()
            if fitted is not None and result is not None
        }
        return {**measured, "trade_off": [row.to_dict() for row in self.trade_off]}
