"""Calibrate a run and fit policies on it, with or without a certificate."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.methods import DEFAULT_DRAWS, VANILLA, Method, get_method
from exitwise.calibration.trace import Split, Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.predictions import NEEDS_DRAWS, Predictions
from exitwise.evaluation.evaluate import Evaluation, evaluate
from exitwise.policies.certificate import Certificate, Guarantee
from exitwise.policies.fit import PolicyFitter, check_fit_arguments, fit_policy, split_held_out
from exitwise.policies.policy import Policy
from exitwise.runs.chosen import ChosenClassifier
from exitwise.runs.run import Run


@dataclass(frozen=True)
class PolicyOptions:
    """Strategy, score, objective and certificate of a policy."""

    strategy: str = "auto"
    score: str = "confidence"
    objective: str = "accuracy"
    certificate: Certificate | None = None

    @classmethod
    def of(cls, policy: Policy) -> "PolicyOptions":
        """Return the options that a policy was fitted with."""
        objective = "accuracy" if policy.fit is None else policy.fit.objective
        return cls(policy.strategy, policy.score, objective, certificate_from(policy.guarantee))

    def check(self, method: Method, costs: Costs, budget: float) -> None:
        """Raise InputError if no policy can meet the options, before anything is calibrated."""
        check_fit_arguments(costs, budget, self.strategy, self.score, self.objective)
        if self.score == "variance" and not method.has_variance:
            raise InputError(f"`score` 'variance' {NEEDS_DRAWS}")

    def for_baseline(self, method: Method) -> "PolicyOptions":
        """Return options that a baseline can meet: `confidence` for `variance` without draws, and no certified loss."""
        certificate = self.certificate
        if certificate is not None and certificate.risk is not None:
            delta = certificate.budget_delta
            certificate = None if delta is None else Certificate(delta, hold=certificate.hold, seed=certificate.seed)
        score = "confidence" if self.score == "variance" and not method.has_variance else self.score
        return replace(self, score=score, certificate=certificate)


@dataclass(frozen=True, eq=False)
class CalibratedSplits:
    """A calibration, its tuning samples, and the held-out samples of a certificate."""

    calibration: Calibration
    val: Split
    held_out: Split | None

    def fit_policy(self, costs: Costs, budget: float, options: PolicyOptions) -> Policy:
        """Fit a policy for a budget on the tuning samples, and certify it on the held-out samples if there are any."""
        fitter = self._fitter(costs, options.score, options.objective)
        if options.certificate is None or self._held_out_preds is None or self.held_out is None:
            return fitter.fit(budget, options.strategy)
        certificate = options.certificate
        return fitter.certify(
            certificate, budget, options.strategy, self._held_out_preds, self.held_out.labels, seed=certificate.seed
        )

    @cached_property
    def _held_out_preds(self) -> Predictions | None:
        return None if self.held_out is None else self.calibration.predict(self.held_out)

    @cached_property
    def preds(self) -> Predictions:
        """Predictions on the tuning samples."""
        return self.calibration.predict(self.val)

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
        parts = {"calibrated_and_fitted_on": self.val, "certified_on": self.held_out}
        return {
            name: {"split": "val", "samples": len(part), "index": None if part.index is None else part.index.tolist()}
            for name, part in parts.items()
            if part is not None
        }


def load_or_calibrate(run: Run, tuner: Tuner, method: Method) -> Calibration:
    """Load the run's calibration by a method, or calibrate now and save it."""
    calibration = run.calibration(method, tuner.trace)
    if calibration is None:
        calibration = tuner.calibrate(method)
        calibration.save(run.calibration_file(method))
        if method.name != VANILLA:  # which has nothing to tune
            print(f"exitwise: calibrated with {method.name}, as the run had not been", file=sys.stderr)
    return calibration


def calibrate_run(run: Run, tuner: Tuner, method: Method, certificate: Certificate | None) -> CalibratedSplits:
    """Calibrate a run on its validation split or, for a certificate, on the part of it that is not held out."""
    if certificate is None:
        return CalibratedSplits(load_or_calibrate(run, tuner, method), tuner.trace.val, None)
    tuning_trace, held_out = split_trace(tuner.trace, certificate)
    settings_tuner = tuner_with_settings(run.calibration(method, tuner.trace), tuning_trace)
    return CalibratedSplits(settings_tuner.calibrate(method), tuning_trace.val, held_out)


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


@dataclass(frozen=True, eq=False)
class RunEvaluation:
    """Policies and test metrics of several models at one budget, by model name, and the samples that were used."""

    method: str
    budget: float
    unit: str
    models: dict[str, tuple[Policy, Evaluation]]
    samples: dict[str, Any]

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
        }


def evaluate_run(
    run: Run,
    trace: Trace,
    method: Method,
    costs: Costs,
    budget: float,
    options: PolicyOptions,
    against: Sequence[Path] = (),
) -> RunEvaluation:
    """Fit policies for the vanilla and the calibrated net, and measure them on the test split.

    The calibrated net and its policy become the run's chosen classifier. `against` are other runs, whose vanilla nets
    are measured at the same budget.
    """
    if trace.test is None:
        raise InputError(f"the trace of {run.directory} has no test split to evaluate on")
    options.check(method, costs, budget)
    tuner, models, samples = Tuner(trace), {}, {}
    for model in dict.fromkeys((get_method(VANILLA), method)):
        model_options = options if model == method else options.for_baseline(model)
        calibrated = calibrate_run(run, tuner, model, model_options.certificate)
        policy = calibrated.fit_policy(costs, budget, model_options)
        preds = calibrated.calibration.predict(trace.test)
        models[model.name] = (policy, evaluate(preds, labels=trace.test.labels, policy=policy, costs=costs))
        samples = calibrated.samples
    chosen = ChosenClassifier(calibrated.calibration, policy, trace.classes)
    for other in against:
        name, pair = _evaluate_vanilla(Run(other), budget, costs.unit)
        models[name] = pair
    samples["tested_on"] = {"split": "test", "samples": len(trace.test)}
    evaluation = RunEvaluation(method.name, budget, costs.unit, models, samples)
    run.choose(chosen)
    run.add_results(evaluation=evaluation.to_dict())
    return evaluation


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
