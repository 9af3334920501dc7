"""Calibrate a run and fit policies on it, with or without a certificate."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.methods import DEFAULT_DRAWS, VANILLA, Method, MethodChoice, get_method
from exitwise.calibration.search_bounds import describe_values_at_bounds
from exitwise.calibration.trace import Split, Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.costs import Costs, evenly_spaced_budgets, format_cost
from exitwise.core.errors import InputError
from exitwise.core.predictions import NEEDS_DRAWS, Predictions
from exitwise.evaluation.evaluate import Evaluation, evaluate
from exitwise.policies.certificate import Certificate, Guarantee
from exitwise.policies.fit import PolicyFitter, check_fit_arguments, fit_policy, split_held_out
from exitwise.policies.policy import Policy
from exitwise.policies.score_choice import describe_choice
from exitwise.policies.scores import AUTO as AUTO_SCORE
from exitwise.rival_methods.advice import note_few_labels
from exitwise.runs.answers import (
    AnswerOptions,
    AnswersEvaluation,
    TradeOffRow,
    fit_answers,
    trade_off,
)
from exitwise.runs.chosen import ChosenClassifier
from exitwise.runs.run import Run
from exitwise.runtime.engine import AnswerRules

PLAIN = "plain net"  # the net without calibration; its last exit is what `max_loss` refers to
_MIN_SPENT = 0.97  # a policy that spends less of its budget on validation samples gets a note
_TRADE_OFF_BUDGETS = 5  # budgets of the trade-off of cost, answered share and errors, beside the requested one
_MAX_OVERRUN = 1.005  # a policy that costs more than this times its budget on the test split gets a note


@dataclass(frozen=True)
class PolicyOptions:
    """Strategy, score, objective and certificate of a policy, and the loss that it may have instead of a budget."""

    strategy: str = "auto"
    score: str = "confidence"
    objective: str = "accuracy"
    certificate: Certificate | None = None
    max_loss: float | None = None  # fraction; the policy is the cheapest one that loses no more against the plain net
    risk: str = "accuracy"  # of `max_loss`
    answers: AnswerOptions = field(default_factory=AnswerOptions)  # prediction sets and abstention

    @classmethod
    def of(cls, policy: Policy) -> "PolicyOptions":
        """Return the options that a policy was fitted with."""
        objective = "accuracy" if policy.fit is None else policy.fit.objective
        options = cls(policy.strategy, policy.score, objective, certificate_from(policy.guarantee))
        guarantee = policy.guarantee
        if guarantee is not None and guarantee.reference == PLAIN and guarantee.budget is None:
            return replace(options, max_loss=guarantee.epsilon, risk=guarantee.risk or "accuracy")
        if policy.fit is not None and policy.fit.max_loss is not None:
            return replace(options, max_loss=policy.fit.max_loss, risk=policy.fit.risk or "accuracy")
        return options

    def check(self, method: MethodChoice, costs: Costs, budget: float | None) -> None:
        """Raise InputError if no policy can meet the options, before anything is calibrated."""
        self.answers.check()
        checked = costs.values[-1] if budget is None else budget
        check_fit_arguments(costs, checked, self.strategy, self.score, self.objective)
        if self.score == "variance" and isinstance(method, Method) and not method.has_variance:
            raise InputError(f"`score` 'variance' {NEEDS_DRAWS}")

    @property
    def hold_out(self) -> Certificate | None:
        """Fraction and seed of the held-out samples that a certificate, sets or an abstention need, if any do."""
        return Certificate() if self.certificate is None and self.answers.requested else self.certificate

    def for_baseline(self, method: Method) -> "PolicyOptions":
        """Return options that a baseline can meet: `confidence` for `variance` without draws, and no certified loss.

        The score that `auto` chooses is for the calibrated net; a baseline has `confidence`, as in the paper.
        """
        certificate = self.certificate
        if certificate is not None and certificate.risk is not None:
            # A baseline that cannot be certified must not fail the command.
            delta = certificate.budget_delta
            certificate = None if delta is None else Certificate(delta, hold=certificate.hold, seed=certificate.seed)
        unsuitable = self.score == AUTO_SCORE or (self.score == "variance" and not method.has_variance)
        score = "confidence" if unsuitable else self.score
        return replace(self, score=score, certificate=certificate)


@dataclass(frozen=True, eq=False)
class CalibratedSplits:
    """A calibration, its tuning samples, the held-out samples of a certificate, and those of sets and abstention.

    `val_preds` are the predictions on the tuning samples, if they are known.
    """

    calibration: Calibration
    val: Split
    held_out: Split | None
    answers: Split | None = None
    val_preds: Predictions | None = None

    def fit_answers(self, policy: Policy, options: AnswerOptions) -> AnswerRules:
        """Fit prediction sets and abstention on samples that neither calibration nor policy have seen."""
        if self.answers is None or not options.requested:
            return AnswerRules()
        return fit_answers(options, policy, self._answers_preds, self.answers, self.preds, self.val)

    def trade_off(
        self,
        costs: Costs,
        budgets: Sequence[float],
        options: PolicyOptions,
        preds: Predictions,
        test: Split,
        chosen: Policy | None = None,
    ) -> tuple[TradeOffRow, ...]:
        """Return cost, answered share and error rate on the test split, one row per budget.

        Args:
            costs: Costs of the exits.
            budgets: Budgets.
            options: Options of the policies and of prediction sets; policies are not certified.
            preds: Predictions on the test split.
            test: Test split.
            chosen: Policy to use at its own budget.
        """
        assert self.answers is not None
        uncertified = replace(options, certificate=None)
        policies = (
            chosen if chosen is not None and chosen.budget == budget else self.fit_policy(costs, budget, uncertified)
            for budget in budgets
        )
        return trade_off(policies, options.answers, (self._answers_preds, self.answers), (preds, test))

    def fit_policy(
        self, costs: Costs, budget: float | None, options: PolicyOptions, plain: Calibration | None = None
    ) -> Policy:
        """Fit a policy on the tuning samples, and certify it on the held-out samples if there are any.

        Args:
            costs: Costs of the exits.
            budget: Largest mean cost; None for the cheapest policy that loses at most `options.max_loss`.
            options: Options of the policy.
            plain: The net without calibration, whose last exit `options.max_loss` refers to.
        """
        fitter = self._fitter(costs, options.score, options.objective)
        certificate = options.certificate
        has_same_last_exit = plain is None or self.calibration.method.keeps_classes
        if certificate is None or self._held_out_preds is None or self.held_out is None:
            if budget is not None or options.max_loss is None:
                return fitter.fit(budget, options.strategy)
            plain_preds = None if has_same_last_exit or plain is None else plain.predict(self.val)
            return fitter.fit_cheapest(options.max_loss, options.strategy, options.risk, plain_preds)
        reference = tune_reference = None
        if budget is None and plain is not None and not has_same_last_exit:
            reference, tune_reference = plain.predict(self.held_out), plain.predict(self.val)
        policy = fitter.certify(
            certificate,
            budget,
            options.strategy,
            self._held_out_preds,
            self.held_out.labels,
            reference,
            tune_reference,
            certificate.seed,
        )
        if budget is None and policy.guarantee is not None:
            policy = replace(policy, guarantee=replace(policy.guarantee, reference=PLAIN))
        return policy

    def resolve_score(self, costs: Costs, options: PolicyOptions) -> tuple[str, str | None]:
        """Return the name of the score of these options, and a sentence on the choice if it is `auto`."""
        fitter = self._fitter(costs, options.score, options.objective)
        choice = fitter.score_choice
        sentence = None if choice is None else describe_choice(fitter.score, choice, options.objective)
        return fitter.score, sentence

    @cached_property
    def _held_out_preds(self) -> Predictions | None:
        return None if self.held_out is None else self.calibration.predict(self.held_out)

    @cached_property
    def _answers_preds(self) -> Predictions:
        assert self.answers is not None
        return self.calibration.predict(self.answers)

    @cached_property
    def preds(self) -> Predictions:
        """Predictions on the tuning samples."""
        return self.calibration.predict(self.val) if self.val_preds is None else self.val_preds

    @cached_property
    def _fitters(self) -> dict[tuple[Costs, str, str], PolicyFitter]:
        return {}

    def _fitter(self, costs: Costs, score: str, objective: str) -> PolicyFitter:
        key = (costs, score, objective)
        if key not in self._fitters:
            self._fitters[key] = PolicyFitter(self.preds, self.val.labels, costs, score=score, objective=objective)
        return self._fitters[key]

    @property
    def samples(self) -> dict[str, Any]:
        """Number of tuning and held-out samples, and their positions in the dataset where these are known."""
        parts = {
            "calibrated_and_fitted_on": self.val,
            "certified_on": self.held_out,
            "answers_fitted_on": self.answers,
        }
        return {
            name: {"split": "val", "samples": len(part), "index": None if part.index is None else part.index.tolist()}
            for name, part in parts.items()
            if part is not None
        }


def resolve_method(
    run: Run,
    tuner: Tuner,
    method: MethodChoice,
    certificate: Certificate | None = None,
    variance: bool = False,
) -> Method:
    """Return the method itself; for "auto", the one that cross-validation chooses, which is printed in one line.

    The choice is saved in the run and used again. For a certificate it is made anew, without the held-out samples.

    Args:
        run: The run.
        tuner: Tuner of its trace.
        method: A method, or "auto".
        certificate: Certificate that holds out samples.
        variance: Whether the method's predictions must have a variance.
    """
    if isinstance(method, Method):
        return method
    if certificate is not None:
        selection = Tuner(split_trace(tuner.trace, certificate)[0]).select(variance)
    elif variance:
        selection = tuner.select(variance)
    else:
        saved = run.selection()
        selection = saved or tuner.select()
        if saved is None:
            run.save_selection(selection)
    print(f"exitwise: {selection}", file=sys.stderr)
    return get_method(selection.chosen)


def load_or_calibrate(run: Run, tuner: Tuner, method: Method) -> Calibration:
    """Load the run's calibration by a method, or calibrate now and save it."""
    calibration = run.calibration(method, tuner.trace)
    if calibration is None:
        calibration = tuner.calibrate(method)
        calibration.save(run.calibration_file(method))
        if method.name != VANILLA:  # which has nothing to tune
            print(f"exitwise: no saved calibration: calibrated with {method.name}", file=sys.stderr)
    return calibration


def calibrate_run(
    run: Run, tuner: Tuner, method: Method, certificate: Certificate | None, answers: bool = False
) -> CalibratedSplits:
    """Calibrate a run on its validation split or on the part of it that is not held out.

    Args:
        run: The run.
        tuner: Tuner of its trace.
        method: Method of calibration.
        certificate: Certificate that needs held-out samples.
        answers: Whether prediction sets or an abstention need held-out samples: half of those of the certificate, or
            all if there is none.
    """
    if certificate is None and not answers:
        return CalibratedSplits(load_or_calibrate(run, tuner, method), tuner.trace.val, None)
    tuning_trace, held_out, for_answers = split_held_out_twice(tuner.trace, certificate, answers)
    settings_tuner = tuner_with_settings(run.calibration(method, tuner.trace), tuning_trace)
    return CalibratedSplits(settings_tuner.calibrate(method), tuning_trace.val, held_out, for_answers)


def split_held_out_twice(
    trace: Trace, certificate: Certificate | None, answers: bool
) -> tuple[Trace, Split | None, Split | None]:
    """Return the trace with its tuning samples, the held-out samples of a certificate, and those of the answers.

    A certificate selects the policy by its held-out samples, so that sets and abstention need others.
    """
    tuning_trace, held_out = split_trace(trace, certificate or Certificate())
    if not answers:
        return tuning_trace, held_out, None
    if certificate is None:
        return tuning_trace, None, held_out
    first, second = split_held_out(len(held_out), 0.5, certificate.seed)
    return tuning_trace, held_out.take(first), held_out.take(second)


def split_trace(trace: Trace, certificate: Certificate) -> tuple[Trace, Split]:
    """Return the trace with the tuning samples of its validation split, and the held-out samples."""
    tune, held_out = split_held_out(len(trace.val), certificate.hold, certificate.seed)
    return replace(trace, val=trace.val.take(tune)), trace.val.take(held_out)


def tuner_with_settings(calibration: Calibration | None, trace: Trace) -> Tuner:
    """Return a tuner for `trace` with the settings of an existing calibration, or with the defaults."""
    if calibration is None:
        return Tuner(trace)
    settings = calibration.settings
    draws = calibration.draws if settings.get("seed") is None else None
    return Tuner(
        trace,
        num_draws=settings.get("samples", DEFAULT_DRAWS),
        seed=settings.get("seed") or 0,
        mode=calibration.mode,
        draws=draws,
        search=settings.get("search", "grid"),
    )


def certificate_from(guarantee: Guarantee | None) -> Certificate | None:
    """Return the certificate that a guarantee was made with."""
    if guarantee is None:
        return None
    share = guarantee.hold / (guarantee.hold + guarantee.tune)
    deltas = (guarantee.budget_delta, guarantee.risk_delta)
    return Certificate(deltas[0], guarantee.risk, guarantee.epsilon, deltas[1], share, guarantee.seed or 0)


def held_out_certificate(chosen: ChosenClassifier) -> Certificate | None:
    """Return the certificate of a chosen classifier, with the share of samples that it and its answers hold out."""
    certificate, guarantee = certificate_from(chosen.policy.guarantee), chosen.policy.guarantee
    counts = [0 if chosen.sets is None else sum(chosen.sets.samples)]
    counts.append(0 if chosen.abstention is None else chosen.abstention.samples)
    if certificate is None or guarantee is None:
        return None
    held_out = guarantee.hold + max(counts)
    return replace(certificate, hold=held_out / (held_out + guarantee.tune))


@dataclass(frozen=True, eq=False)
class RunEvaluation:
    """Policies and test metrics of several models at one budget, by model name, and the samples that were used."""

    method: str
    budget: float
    unit: str
    models: dict[str, tuple[Policy, Evaluation]]
    samples: dict[str, Any]
    notes: tuple[str, ...] = ()  # what the numbers do not show: values at bounds, budgets that were not met or spent
    max_loss: dict[str, Any] | None = None  # what was asked for instead of a budget, and the losses that resulted
    answers: AnswersEvaluation | None = None  # prediction sets and abstention of the calibrated net

    def to_dict(self) -> dict[str, Any]:
        models = {
            name: {"policy": policy.to_dict(), "evaluation": result.to_dict()}
            for name, (policy, result) in self.models.items()
        }
        return {
            "budget": self.budget,
            "unit": self.unit,
            "method": self.method,
            "methods": models,
            "samples": self.samples,
            "notes": list(self.notes),
            **({"max_loss": self.max_loss} if self.max_loss is not None else {}),
            **({} if self.answers is None else self.answers.to_dict()),
        }


def evaluate_run(
    run: Run,
    trace: Trace,
    method: MethodChoice,
    costs: Costs,
    budget: float | None,
    options: PolicyOptions,
    against: Sequence[Path] = (),
) -> RunEvaluation:
    """Fit policies for the vanilla and the calibrated net, and measure them on the test split.

    The calibrated net and its policy become the run's chosen classifier. `against` are other runs, whose vanilla nets
    are measured at the same budget. Without a budget, each policy is the cheapest one that loses at most
    `options.max_loss` against the last exit of the vanilla net.
    """
    if trace.test is None:
        raise InputError(f"the trace of {run.directory} has no test split to evaluate on")
    options.check(method, costs, budget)
    tuner, models, samples, losses = Tuner(trace), {}, {}, {}
    method = resolve_method(run, tuner, method, options.hold_out, options.score == "variance")
    plain = load_or_calibrate(run, tuner, get_method(VANILLA))
    plain_preds = plain.predict(trace.test)
    for model in dict.fromkeys((get_method(VANILLA), method)):
        model_options = options if model == method else options.for_baseline(model)
        calibrated = calibrate_run(run, tuner, model, model_options.certificate, options.answers.requested)
        policy = calibrated.fit_policy(costs, budget, model_options, plain)
        is_plain = calibrated.calibration is plain
        preds = plain_preds if is_plain else calibrated.calibration.predict(trace.test)
        models[model.name] = (policy, evaluate(preds, labels=trace.test.labels, policy=policy, costs=costs))
        losses[model.name] = _test_loss(policy, preds, plain_preds, trace.test, options.risk)
        samples = calibrated.samples
    fitted = calibrated.fit_answers(policy, options.answers)
    answers = None
    if options.answers.requested:
        budgets = sorted({*evenly_spaced_budgets(costs, _TRADE_OFF_BUDGETS), policy.budget or costs.values[-1]})
        rows = calibrated.trade_off(costs, budgets, options, preds, trace.test, policy)
        answers = AnswersEvaluation.of(fitted, preds, trace.test, policy, rows)
    chosen = ChosenClassifier(calibrated.calibration, policy, trace.classes, fitted.sets, fitted.abstention)
    spent = policy.budget if budget is None else budget
    assert spent is not None  # a fitted policy has a budget
    for other in against:
        name, pair = _evaluate_vanilla(Run(other), spent, costs.unit)
        models[name] = pair
    samples["tested_on"] = {"split": "test", "samples": len(trace.test)}
    notes = note_few_labels(len(trace.val)) + describe_values_at_bounds(chosen.calibration, run.search_command(method))
    max_loss = None
    if budget is None:
        last = evaluate(plain_preds, labels=trace.test.labels, policy=policy, costs=costs).per_exit[-1].top1
        points = 100 * (options.max_loss or 0.0)
        max_loss = {"points": points, "risk": options.risk, "reference": PLAIN, "reference_top1": last, "test": losses}
        notes += _note_loss(losses[method.name], points, options)
    else:
        notes += _note_cost(*models[method.name], budget, options)
    evaluation = RunEvaluation(method.name, spent, costs.unit, models, samples, tuple(notes), max_loss, answers)
    run.choose(chosen)
    run.add_results(evaluation=evaluation.to_dict())
    return evaluation


def _test_loss(policy: Policy, preds: Predictions, plain: Predictions, test: Split, risk: str) -> float:
    """Return the loss on the test split, in percentage points, against the last exit of the plain net."""
    predicted = preds.predicted[policy.exits(preds), np.arange(len(test))]
    last, labels = plain.predicted[-1], test.labels.numpy()
    if risk == "disagreement":
        return 100 * float((predicted != last).mean())
    return 100 * float((last == labels).mean() - (predicted == labels).mean())


def _note_loss(loss: float, points: float, options: PolicyOptions) -> list[str]:
    if loss <= points:
        return []
    advice = "allow less, or certify it with --certify 0.05"
    if options.certificate is not None:
        advice = "a certificate holds for images like the held-out ones, on average over all such images"
    return [
        f"On the test split the loss is {loss:.2f} points, more than the {points:.4g} that --max-loss allows: {advice}."
    ]


def _note_cost(policy: Policy, result: Evaluation, budget: float, options: PolicyOptions) -> list[str]:
    """Return notes on a budget that is not spent on validation samples, or is exceeded on the test split."""
    notes, spent = [], policy.cost or 0.0
    if spent < _MIN_SPENT * budget and policy.guarantee is None:
        reason = "later exits are not better on the validation samples"
        advice = "" if options.strategy == "geometric" else "; --strategy geometric spends all of it"
        notes.append(f"{options.strategy} spends {spent / budget:.0%} of the budget, because {reason}{advice}.")
    if result.cost > _MAX_OVERRUN * budget:
        over, limit = result.cost / budget - 1, format_cost(budget, policy.unit)
        advice = "--certify 0.05 keeps within it with a probability of 95 %, predict --keep-budget while it runs"
        if policy.guarantee is not None:
            advice = "test images cost more than the held-out ones; predict --keep-budget keeps within it while it runs"
        notes.append(f"On the test split the mean cost is {over:.1%} above the budget of {limit}: {advice}.")
    return notes


def _evaluate_vanilla(run: Run, budget: float, unit: str) -> tuple[str, tuple[Policy, Evaluation]]:
    """Evaluate another run's vanilla net at a budget; a net with one exit has one cost."""
    trace = run.trace()
    if trace.test is None:
        raise InputError(f"the trace of {run.directory} has no test split to evaluate on")
    if trace.costs.unit != unit:
        raise InputError(f"the costs of {run.directory} are in {trace.costs.unit}, not in {unit}")
    vanilla = Tuner(trace).calibrate(VANILLA)
    if trace.num_exits == 1:
        policy = Policy((float("-inf"),), unit=unit, cost=trace.costs.values[0])
    else:
        policy = fit_policy(vanilla.predict(trace.val), trace.val.labels, trace.costs, budget=budget)
    result = evaluate(vanilla.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
    return trace.preset or run.directory.name, (policy, result)
