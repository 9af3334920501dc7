"""The classifier of a run: the chosen one or another, or that of an exported bundle."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from exitwise.calibration.methods import AUTO, VANILLA, Method, parse_method
from exitwise.calibration.trace import Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.costs import Costs, format_cost
from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.policies.certificate import Certificate, NotCertifiedError
from exitwise.policies.family import FamilyMember, PolicyFamily, family_budgets, select_family, with_accuracy
from exitwise.policies.policy import Policy
from exitwise.policies.scores import AUTO as AUTO_SCORE
from exitwise.runs.answers import AnswerOptions
from exitwise.runs.budgets import costs_in_budget_unit, parse_budget
from exitwise.runs.chosen import ChosenClassifier
from exitwise.runs.data import run_preprocessing
from exitwise.runs.nets import load_run_net
from exitwise.runs.options import ClassifierOptions
from exitwise.runs.policies import (
    CalibratedSplits,
    PolicyOptions,
    calibrate_run,
    held_out_certificate,
    resolve_method,
    split_held_out_twice,
)
from exitwise.runs.run import Run
from exitwise.runtime.bundle import MANIFEST
from exitwise.runtime.classifier import Classifier
from exitwise.runtime.onnx import Session


def build_classifier(run: Run, options: ClassifierOptions, function: str | None = None) -> tuple[Classifier, str]:
    """Build the classifier of a run, and describe which one it is.

    Without options it is exactly the chosen one: the calibration and the policy of the last `exitwise evaluate`.
    Options replace parts of it, and the policy is fitted again. `function` builds a net of the user's own.
    """
    net = load_run_net(run, function)
    chosen = run.chosen()
    if chosen is not None and options == ClassifierOptions():
        origin = "as evaluated"
    else:
        chosen = _fit_classifier(run, options, chosen)
        origin = "fitted now"
    classifier = Classifier(
        net,
        chosen.calibration,
        chosen.policy,
        classes=chosen.classes,
        preprocessing=run_preprocessing(run),
        sets=chosen.sets,
        abstention=chosen.abstention,
    )
    return classifier, f"{chosen.describe()} ({origin})"


def fit_family(run: Run, classifier: Classifier) -> PolicyFamily:
    """Fit policies for budgets from the cost of the first exit to that of the last, as the classifier's was fitted.

    Policies that are not more accurate on their tuning samples than a cheaper one are left out, except the
    classifier's own.
    """
    policies, calibrated = fit_policies(run, classifier, "the family")
    policy = classifier.policy
    members = [_measure_accuracy(FamilyMember.of(each), calibrated) for each in policies]
    if policy.cost is None:
        return select_family(members)
    return select_family(members, _measure_accuracy(FamilyMember.of(policy), calibrated))


def fit_policies(run: Run, classifier: Classifier, missing_in: str) -> tuple[list[Policy], CalibratedSplits]:
    """Fit policies for budgets from the cost of the first exit to that of the last; return their tuning samples, too.

    They use the classifier's calibration, score, strategy, objective and tuning samples, and are certified if its
    budget is. A note on each budget that cannot be certified names `missing_in`.
    """
    trace, policy = run.trace(), classifier.policy
    chosen = ChosenClassifier(
        classifier.calibration, policy, trace.classes, sets=classifier.sets, abstention=classifier.abstention
    )
    options = _with_answers(PolicyOptions.of(policy), chosen)
    method = chosen.calibration.method
    calibrated = _calibrate(run, trace, method, ClassifierOptions(), options, chosen)
    certificate, guarantee = options.certificate, policy.guarantee
    if guarantee is None or guarantee.budget_delta is None or certificate is None:
        certificate = None
    else:
        certificate = Certificate(guarantee.budget_delta, hold=certificate.hold, seed=certificate.seed)
    options = replace(options, certificate=certificate, max_loss=None)
    costs = costs_of_policy(run, policy)
    policies = []
    for budget in family_budgets(costs) if len(costs) > 1 else []:
        try:
            policies.append(calibrated.fit_policy(costs, budget, options))
        except NotCertifiedError:
            print(
                f"exitwise: no policy for {format_cost(budget, costs.unit)} is certified: {missing_in} has none there",
                file=sys.stderr,
            )
    return policies, calibrated


def costs_of_policy(run: Run, policy: Policy) -> Costs:
    """Return the costs of a run's exits in the unit of a policy's budget."""
    costs = run.trace().costs
    return run.measured_costs() if policy.unit == "ms" != costs.unit else costs


def _measure_accuracy(member: FamilyMember, calibrated: CalibratedSplits) -> FamilyMember:
    """Return a member with an accuracy: that of its fit or, for other objectives, that on the tuning samples."""
    if member.accuracy is not None:
        return member
    exits, labels = member.policy.exits(calibrated.preds), calibrated.val.labels.numpy()
    predicted = calibrated.preds.predicted[exits, np.arange(len(labels))]
    return with_accuracy(member, float((predicted == labels).mean()))


def _fit_classifier(run: Run, options: ClassifierOptions, chosen: ChosenClassifier | None) -> ChosenClassifier:
    """Fit a policy with the given options; the other ones are those of the chosen classifier, or defaults."""
    trace = run.trace()
    former = run.policy() if chosen is None else chosen.policy
    costs, budget = cast("tuple[Costs, float | None]", _choose_budget(run, trace, options, former))
    policy_options = PolicyOptions(score=AUTO_SCORE) if former is None else PolicyOptions.of(former)
    if chosen is not None:
        policy_options = _with_answers(policy_options, chosen)
    if options.score is not None:
        policy_options = replace(policy_options, score=options.score)
    if options.strategy is not None:
        policy_options = replace(policy_options, strategy=options.strategy)
    if options.budget is not None and policy_options.max_loss is not None:
        policy_options = replace(policy_options, max_loss=None, certificate=None)
    if options.certify is not None:
        policy_options = replace(policy_options, certificate=_make_certificate(options.certify, policy_options))
    if policy_options.max_loss is not None:
        budget = None
    if options.method is not None:
        choice = parse_method(options.method)
    else:
        choice = AUTO if chosen is None else chosen.calibration.method
    policy_options.check(choice, costs, budget)
    hold_out, variance = policy_options.hold_out, policy_options.score == "variance"
    method = resolve_method(run, Tuner(trace), choice, hold_out, variance)
    calibrated = _calibrate(run, trace, method, options, policy_options, chosen)
    plain = None if budget is not None else Tuner(trace).calibrate(VANILLA)
    policy = calibrated.fit_policy(costs, budget, policy_options, plain)
    fitted = calibrated.fit_answers(policy, policy_options.answers)
    return ChosenClassifier(calibrated.calibration, policy, trace.classes, fitted.sets, fitted.abstention)


def _with_answers(options: PolicyOptions, chosen: ChosenClassifier) -> PolicyOptions:
    """Return options with which sets and abstention are fitted again for a new policy, on the same held-out samples."""
    answers = AnswerOptions.of(chosen.sets, chosen.abstention)
    return replace(options, answers=answers, certificate=held_out_certificate(chosen))


def _make_certificate(delta: float, options: PolicyOptions) -> Certificate:
    """Return a certificate of the budget or, without one, of the maximum loss."""
    if options.max_loss is None:
        return Certificate(delta)
    return Certificate(None, options.risk, options.max_loss, delta)


def _choose_budget(run: Run, trace: Trace, options: ClassifierOptions, former: Policy | None) -> tuple[Costs, float]:
    """Return the budget and costs in its unit: as given, as of the former policy, or half of the full cost."""
    if options.budget is None and former is not None and former.budget is not None:
        return (run.measured_costs() if former.unit == "ms" != trace.costs.unit else trace.costs), former.budget
    text = options.budget
    if text is None:
        text = "50%"
        print("exitwise: no --budget and none evaluated yet: half of the full cost", file=sys.stderr)
    costs = costs_in_budget_unit(text, run, trace)
    return costs, parse_budget(text, costs)


def _calibrate(
    run: Run,
    trace: Trace,
    method: Method,
    options: ClassifierOptions,
    policy_options: PolicyOptions,
    chosen: ChosenClassifier | None,
) -> CalibratedSplits:
    """Return the chosen calibration with its samples where method and certificate are the chosen ones, or a new one."""
    if chosen is None or options.method is not None or options.certify is not None:
        return calibrate_run(run, Tuner(trace), method, policy_options.certificate, policy_options.answers.requested)
    if not chosen.calibration.belongs_to(trace):
        raise InputError(f"{run.chosen_file} is of another net than the run's trace: evaluate again")
    if policy_options.hold_out is None:
        return CalibratedSplits(chosen.calibration, trace.val, None)
    tuning_trace, held_out, for_answers = split_held_out_twice(
        trace, policy_options.certificate, policy_options.answers.requested
    )
    return CalibratedSplits(chosen.calibration, tuning_trace.val, held_out, for_answers)


def open_run_or_bundle(
    path: Path, options: ClassifierOptions, function: str | None, threads: int | None
) -> tuple[Classifier | Session, str | None]:
    """Open a run as a classifier that is optimized for CPUs, with its description, or a bundle as a session."""
    if not (path / MANIFEST).is_file():
        classifier, description = build_classifier(Run(path), options, function)
        return classifier.optimize(), description
    if options != ClassifierOptions() or function is not None:
        raise InputError(f"{path} is a bundle with a method, a net and thresholds of its own: export another one")
    return Session(path, threads=threads), None


def image_format(classifier: Classifier | Session) -> tuple[Preprocessing, tuple[str, ...] | None]:
    """Return the preprocessing of a classifier's images and the names of its classes."""
    if classifier.preprocessing is None:
        raise InputError("the bundle has no preprocessing for image files: run it from Python, on arrays")
    return classifier.preprocessing, classifier.classes


def full_cost(classifier: Classifier | Session) -> tuple[float, str]:
    """Return the cost of the last exit and its unit."""
    costs = classifier.costs
    assert costs is not None  # a fitted policy has them
    return costs.values[-1], costs.unit
