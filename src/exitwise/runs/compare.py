"""Comparison of all strategies with the paper's sweep, on test data that nothing was fitted on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exitwise.calibration.methods import VANILLA, MethodChoice
from exitwise.calibration.trace import Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.checks import check_integer
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.predictions import NEEDS_DRAWS, Array, Predictions
from exitwise.core.results import Result, RowTable
from exitwise.evaluation.bootstrap import Bootstrap, metric_columns, percentile_interval
from exitwise.evaluation.evaluate import PerSampleMetrics
from exitwise.policies.certificate import Certificate, NotCertifiedError
from exitwise.policies.fit import check_fit_arguments
from exitwise.policies.policy import Policy, sweep, thresholds_to_json
from exitwise.runs import policies
from exitwise.runs.run import Run

PUBLIC, CERTIFIED = "public", "certified"
STRATEGIES = ("geometric", "optimized", "label_free", "auto")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PolicyRow(Result):
    """One policy: its budget, its mean costs on validation and test data, and its metrics on test data.

    `intervals` are bootstrap intervals (95 %) of test cost, top1, nlpd, ece and gain. `gain` is the difference in
    accuracy to the paper's sweep at the same test cost, interpolated between its two nearest policies; None for the
    sweep itself and for costs that it does not reach. `eefp` is that of the score on all test samples, `eefp_visited`
    that on the samples that reach each exit; None if undefined. `requested_score` is "auto" if that chose the score.
    """

    method: str
    score: str
    strategy: str
    chosen: str | None
    budget: float
    val_cost: float
    test_cost: float
    top1: float
    nlpd: float
    ece: float
    gain: float | None
    gap: float | None
    intervals: dict[str, tuple[float, float]]
    exit_shares: tuple[float, ...]
    thresholds: tuple[float, ...]
    eefp: float | None = None
    eefp_visited: float | None = None
    requested_score: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "thresholds": thresholds_to_json(self.thresholds)}


@dataclass(frozen=True)
class PolicyTable(RowTable[PolicyRow]):
    """Rows by method, score and budget."""

    rows: tuple[PolicyRow, ...]
    unit: str
    full_cost: float
    objective: str
    certify: float | None
    repeats: int
    samples: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Settings of a comparison: budgets, methods, scores, objective, certificate and bootstrap."""

    budgets: tuple[float, ...]
    methods: tuple[MethodChoice, ...]
    scores: tuple[str, ...] = ("confidence",)
    objective: str = "accuracy"
    certify: float | None = 0.05
    repeats: int = 1000

    def run(self, run: Run, trace: Trace, costs: Costs, progress: Progress = lambda done, total: None) -> PolicyTable:
        """Calibrate and fit on the validation split (certified rows: on half of it), measure on the test split."""
        if trace.test is None:
            raise InputError(f"the trace of {run.directory} has no test split to compare on")
        check_integer("repeats", self.repeats, minimum=1)
        for budget in self.budgets:
            for score in self.scores:
                check_fit_arguments(costs, budget, "auto", score, self.objective)
        certificate = None if self.certify is None else Certificate(self.certify)
        tuner, bootstrap = Tuner(trace), Bootstrap(len(trace.test), self.repeats)
        needs_variance = set(self.scores) == {"variance"}
        methods = {
            policies.resolve_method(run, tuner, choice, variance=needs_variance): choice for choice in self.methods
        }
        pairs = [(method, score) for method in methods for score in dict.fromkeys(self.scores)]
        possible = [(method, score) for method, score in pairs if score != "variance" or method.has_variance]
        if len(possible) < len(pairs) and len(set(self.scores)) == 1:
            raise InputError(f"`score` 'variance' {NEEDS_DRAWS}")
        rows: list[PolicyRow] = []
        notes: list[str] = []
        samples: dict[str, Any] = {}
        certifying: policies.CalibratedSplits | None = None
        for i, (method, score) in enumerate(possible):
            progress(i, len(possible))
            if i == 0 or possible[i - 1][0] != method:
                calibrated = policies.calibrate_run(run, tuner, method, None)
                test = calibrated.calibration.predict(trace.test)
                if certificate is not None:
                    certified_method = policies.resolve_method(run, tuner, methods[method], certificate, needs_variance)
                    if certified_method != method:
                        chosen = f"auto chose {certified_method.name} for the certified rows"
                        notes.append(f"{method.name}: {chosen}, on the samples that are not held out.")
                    certifying = policies.calibrate_run(run, tuner, certified_method, certificate)
                    certified_test = certifying.calibration.predict(trace.test)
                    certified_metrics = PerSampleMetrics.of(certified_test, trace.test.labels.numpy())
            options = {name: policies.PolicyOptions(name, score, self.objective) for name in STRATEGIES}
            if method.name == VANILLA:
                options = {name: strategy_options.for_baseline(method) for name, strategy_options in options.items()}
            chosen_score, sentence = calibrated.resolve_score(costs, options["auto"])
            if sentence is not None:
                notes.append(f"{method.name}: {sentence}")
            paper_sweep = sweep(calibrated.preds, costs=costs, score=chosen_score, labels=trace.val.labels)
            evaluator = _TestEvaluator(test, trace.test.labels.numpy(), paper_sweep, costs, bootstrap, score)
            certified_options = replace(options["auto"], certificate=certificate)
            for budget in dict.fromkeys(self.budgets):
                paper_policy = evaluator.sweep_policy_within(budget)
                if paper_policy is None:
                    limit = f"{budget:.6g} {costs.unit} or less"
                    notes.append(f"{method.name}, {chosen_score}: the paper's sweep has no policy for {limit}.")
                else:
                    rows.append(evaluator.row(method.name, PUBLIC, paper_policy, budget))
                for name, strategy_options in options.items():
                    rows.append(
                        evaluator.row(method.name, name, calibrated.fit_policy(costs, budget, strategy_options), budget)
                    )
                if certifying is not None:
                    try:
                        certified = certifying.fit_policy(costs, budget, certified_options)
                    except NotCertifiedError as error:
                        notes.append(f"{method.name}, {chosen_score}: {error}.")
                        continue
                    rows.append(
                        evaluator.row(method.name, CERTIFIED, certified, budget, (certified_test, certified_metrics))
                    )
                    samples = certifying.samples
        progress(len(possible), len(possible))
        samples = {
            "all but certified": {"split": "val", "samples": len(trace.val)},
            **({"certified": samples} if samples else {}),
            "tested_on": {"split": "test", "samples": 0 if trace.test is None else len(trace.test)},
        }
        return PolicyTable(
            rows=tuple(rows),
            unit=costs.unit,
            full_cost=costs.values[-1],
            objective=self.objective,
            certify=self.certify,
            repeats=self.repeats,
            samples=samples,
            notes=tuple(dict.fromkeys(notes)),
        )


class _TestEvaluator:
    """Evaluates policies of one method on the test samples, and compares them with the paper's sweep."""

    def __init__(
        self,
        preds: Predictions,
        labels: Array,
        public: Sequence[Policy],
        costs: Costs,
        bootstrap: Bootstrap,
        requested_score: str,
    ) -> None:
        self._preds, self._public, self._requested_score = preds, public, requested_score
        self._costs, self._bootstrap = np.asarray(costs.values), bootstrap
        self._per_sample = PerSampleMetrics.of(preds, labels)
        self._all = np.arange(len(labels))
        table = public[0].scores(preds)
        exits = [policy.exits_from_scores(table) for policy in public]
        order = np.argsort([self._costs[taken].mean() for taken in exits], kind="stable")
        self._sweep_costs = np.array([self._costs[exits[i]].mean() for i in order])
        self._sweep_correct = np.stack([self._per_sample.rank[exits[i], self._all] == 0 for i in order])

    def sweep_policy_within(self, budget: float) -> Policy | None:
        """Return the most expensive policy of the paper's sweep within the budget on validation data, or None."""
        within = [policy for policy in self._public if policy.cost is not None and policy.cost <= budget]
        return max(within, key=lambda policy: policy.cost or 0.0) if within else None

    def row(
        self,
        method: str,
        strategy: str,
        policy: Policy,
        budget: float,
        other: tuple[Predictions, PerSampleMetrics] | None = None,
    ) -> PolicyRow:
        """Return the row of a policy; `other` has the predictions of another calibration, if it was fitted on that."""
        preds, per_sample = other or (self._preds, self._per_sample)
        scores = policy.scores(preds)
        exits = policy.exits_from_scores(scores)
        ranks = per_sample.stopping_ranks(scores)
        table = metric_columns(per_sample, exits, self._costs)
        cost, correct = table[:, 0], table[:, 1]
        public = self._sweep_accuracy_at(float(cost.mean())) if strategy != PUBLIC else None
        gain = np.zeros_like(correct) if public is None else correct - public
        metrics = per_sample.metrics(exits)
        drawn = self._bootstrap.resampled_metrics(table)
        intervals = {name: percentile_interval(values) for name, values in drawn.items() if name != "top5"}
        if public is not None:
            intervals["gain"] = percentile_interval(self._bootstrap.resampled_means(gain[:, None])[:, 0])
        return PolicyRow(
            method=method,
            score=policy.score,
            strategy=strategy,
            chosen=policy.fit.chosen if policy.fit else None,
            budget=budget,
            val_cost=float(policy.cost or 0.0),
            test_cost=float(cost.mean()),
            **{name: metrics[name] for name in ("top1", "nlpd", "ece")},
            gain=None if public is None else float(gain.mean()),
            gap=policy.fit.gap if policy.fit else None,
            intervals=intervals,
            exit_shares=tuple((np.bincount(exits, minlength=len(self._costs)) / len(exits)).tolist()),
            thresholds=policy.thresholds,
            eefp=ranks.mean(),
            eefp_visited=ranks.mean(exits),
            requested_score=self._requested_score,
        )

    def _sweep_accuracy_at(self, cost: float) -> Array | None:
        """Accuracy (n,) of the paper's sweep on each sample at a cost, interpolated between its nearest policies."""
        costs = self._sweep_costs
        if not costs[0] * (1 - 1e-9) <= cost <= costs[-1] * (1 + 1e-9):
            return None
        above = int(np.searchsorted(costs, cost).clip(1, len(costs) - 1))
        low, high = costs[above - 1], costs[above]
        share = float(np.clip((cost - low) / (high - low), 0, 1)) if high > low else 1.0
        return np.asarray((1 - share) * self._sweep_correct[above - 1] + share * self._sweep_correct[above])
