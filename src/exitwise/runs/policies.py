"""What the commands do to turn a budget into a policy, with or without a guarantee."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.methods import DEFAULT_DRAWS, Method
from exitwise.calibration.trace import Split, Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.predictions import NEEDS_DRAWS, Predictions
from exitwise.policies.certificate import Certificate, Guarantee
from exitwise.policies.fit import PolicyFitter, check_fit_arguments
from exitwise.policies.policy import Policy
from exitwise.runs.collect import load_or_calibrate
from exitwise.runs.run import Run


@dataclass(frozen=True)
class PolicyOptions:
    """How thresholds are to be made."""

    strategy: str = "auto"
    score: str = "confidence"
    objective: str = "accuracy"
    certificate: Certificate | None = None

    def check(self, method: Method, costs: Costs, budget: float) -> None:
        """Refuse what cannot be fulfilled, before anything is calibrated for it."""
        check_fit_arguments(costs, budget, self.strategy, self.score, self.objective)
        if self.score == "variance" and not method.has_variance:
            raise InputError(f"`score` 'variance' {NEEDS_DRAWS}")

    def for_baseline(self, method: Method) -> "PolicyOptions":
        """The same for a net to compare with, as far as it can follow: vanilla has no draws and certifies no loss."""
        certificate = self.certificate
        if certificate is not None and certificate.risk is not None:
            known = certificate.budget_delta
            certificate = None if known is None else Certificate(known, hold=certificate.hold, seed=certificate.seed)
        score = "confidence" if self.score == "variance" and not method.has_variance else self.score
        return replace(self, score=score, certificate=certificate)


@dataclass(frozen=True, eq=False)
class CalibratedSplits:
    """A calibration, the samples that it was tuned on and that thresholds may see, and those that nothing may see."""

    calibration: Calibration
    val: Split
    hold: Split | None

    def policy(self, costs: Costs, budget: float, request: PolicyOptions) -> Policy:
        """Thresholds for a budget, certified if that is asked for."""
        fitter = self._fitter(costs, request.score, request.objective)
        if request.certificate is None or self._held is None or self.hold is None:
            return fitter.fit(budget, request.strategy)
        certificate = request.certificate
        return fitter.certify(
            certificate, budget, request.strategy, self._held, self.hold.labels, seed=certificate.seed
        )

    @cached_property
    def _held(self) -> Predictions | None:
        return None if self.hold is None else self.calibration.predict(self.hold)

    @cached_property
    def preds(self) -> Predictions:
        """On the samples that thresholds may see."""
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
        """Which samples did what, by positions in the data set where they are known."""
        parts = {"calibrated_and_fitted_on": self.val, "certified_on": self.hold}
        return {
            name: {"split": "val", "samples": len(part), "index": None if part.index is None else part.index.tolist()}
            for name, part in parts.items()
            if part is not None
        }


def calibrate_run(run: Run, tuner: Tuner, method: Method, certificate: Certificate | None) -> CalibratedSplits:
    """Calibrate a run on its validation split or, for a certificate, on the part of it that is not held out."""
    if certificate is None:
        return CalibratedSplits(load_or_calibrate(run, tuner, method), tuner.trace.val, None)
    rest, hold = tuner.trace.hold_out(certificate.hold, certificate.seed)
    return CalibratedSplits(tuner_with_settings(run.calibration(method), rest).calibrate(method), rest.val, hold)


def tuner_with_settings(known: Calibration | None, trace: Trace) -> Tuner:
    """With the settings of a calibration that the run has, on other samples."""
    if known is None:
        return Tuner(trace)
    settings = known.settings
    draws = known.draws if settings.get("seed") is None else None
    return Tuner(
        trace,
        samples=settings.get("samples", DEFAULT_DRAWS),
        seed=settings.get("seed") or 0,
        mode=known.mode,
        draws=draws,
        search=settings.get("search", "grid"),
    )


def certificate_from(guarantee: Guarantee | None) -> Certificate | None:
    """What was asked for, to ask for it again."""
    if guarantee is None:
        return None
    share = guarantee.hold / (guarantee.hold + guarantee.tune)
    deltas = (guarantee.budget_delta, guarantee.risk_delta)
    return Certificate(deltas[0], guarantee.risk, guarantee.epsilon, deltas[1], share, guarantee.seed or 0)


def tested_on(trace: Trace) -> dict[str, Any]:
    return {"tested_on": {"split": "test", "samples": 0 if trace.test is None else len(trace.test)}}
