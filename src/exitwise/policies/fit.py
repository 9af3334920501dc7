"""A budget becomes thresholds: the paper's family, or those that are best on validation data. NumPy alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, Predictions, check_labels, log_true
from exitwise.policies.certificate import Certificate
from exitwise.policies.certify import PolicyOutcomes, nested_cheaper_policies, select_certified
from exitwise.policies.cutoff_search import CutoffSearch
from exitwise.policies.policy import OBJECTIVES, Policy, PolicyFit, check_costs
from exitwise.policies.scores import check_score, exit_scores

STRATEGIES = ("auto", "geometric", "optimized", "label_free")
FOLDS = 5
_SAVES = 0.03  # of the cost: from there on cheaper is reason enough to be chosen, if it does no worse
_BUDGETS = 101  # that are tried for the cheapest policy that keeps to a risk

# What is maximised: what is true of each sample, the same smoothed along the scores, or what the net itself expects.
_SOURCES = {"labels": "optimized", "smoothed": "optimized", "expected": "label_free"}


def fit_policy(
    preds: Any,
    labels: Any = None,
    costs: Costs | Sequence[float] | None = None,
    *,
    budget: float | None,
    strategy: str = "auto",
    score: str = "confidence",
    objective: str = "accuracy",
    certify: Certificate | None = None,
    hold: Any = None,
    hold_labels: Any = None,
    against: Any = None,
) -> Policy:
    """Thresholds whose mean cost on these predictions is at most the budget, in the unit of the costs, per sample.

    `preds` (K, n, c), `labels` (n,), `costs` (K,).

    - `geometric`: the paper's shares q^k with a continuous q, bisected until the cost meets the budget. No labels.
    - `optimized`: the largest accuracy (or with `objective="nlpd"` the smallest NLPD) on the labels; spends less than
      the budget where going deeper does harm. Never below `geometric` on these samples; where it is not clearly better
      on samples that it was not fitted on (cross-fitting), nor cheaper, it is `geometric`.
    - `label_free`: the same, but with the net's own confidence in place of labels, for traffic that has none. As good
      as the confidence is calibrated.
    - `auto`: whichever of them does best on samples that it was not fitted on; without labels `geometric`, as an
      overconfident net is a bad judge of itself.

    `policy.fit` says what was chosen and how it did on samples not fitted on. Thresholds lie midway between scores;
    equal scores are parted by a hash of the sample's probabilities.

    With `certify`, the policy is guaranteed to keep to the budget on fresh samples, and says so in `policy.guarantee`.
    That takes samples that nothing was tuned or fitted on: predictions `hold` (K, m, c) with `hold_labels` (m,), or, if
    none are given, a part of these samples, which then must not have been used for calibration either. Losses are
    measured against the last exit, or against the last of other predictions, such as the plain net's: `against`, of any
    number of exits, on the samples of `hold`, or of `preds` if none are given. Where a `risk` is certified, `auto` is
    `geometric`; without a budget it is the cheapest policy that keeps to the risk.
    """
    if certify is None:
        if hold is not None or hold_labels is not None or against is not None:
            raise InputError("`hold`, `hold_labels` and `against` are for a certificate: give `certify`")
        return PolicyFitter(preds, labels, costs, score=score, objective=objective).fit(budget, strategy)
    if not isinstance(certify, Certificate):
        raise InputError(f"`certify` must be a Certificate, but got {certify!r}")
    seed, reference = None, None
    preds = Predictions.of(preds)
    if hold is None:
        if hold_labels is not None:
            raise InputError("`hold_labels` need their predictions: give `hold`")
        rest, held = split_held_out(preds.shape[1], certify.hold, certify.seed)
        seed = certify.seed
        if against is not None:
            whole = _of_samples(against, preds.shape[1])
            reference, against = whole.take(rest), whole.take(held)
        if labels is not None:
            known = check_labels(labels, preds.shape[1], preds.shape[2])
            labels, hold_labels = known[rest], known[held]
        hold, preds = preds.take(held), preds.take(rest)
    fitter = PolicyFitter(preds, labels, costs, score=score, objective=objective)
    return fitter.certify(certify, budget, strategy, Predictions.of(hold), hold_labels, against, reference, seed)


def _of_samples(against: Any, samples: int) -> Predictions:
    found = Predictions.of(against)
    if found.shape[1] != samples:
        raise InputError(f"`against` must have the {samples} samples of `preds`, but has {found.shape[1]}")
    return found


def fit_policies(
    preds: Any,
    labels: Any = None,
    costs: Costs | Sequence[float] | None = None,
    *,
    budgets: Sequence[float],
    strategy: str = "auto",
    score: str = "confidence",
    objective: str = "accuracy",
) -> list[Policy]:
    """`fit_policy` for many budgets, in their order, with what they share computed once.

    `preds` (K, n, c), `labels` (n,), `costs` (K,).
    """
    if not isinstance(budgets, Iterable):
        raise InputError(f"`budgets` must be several budgets, but got {budgets!r}")
    fitter = PolicyFitter(preds, labels, costs, score=score, objective=objective)
    return [fitter.fit(budget, strategy) for budget in budgets]


def split_held_out(samples: int, share: float, seed: int) -> tuple[Array, Array]:
    """Positions to tune on and, a share of all, to hold out; each in their order."""
    held = round(samples * share)
    if not 0 < held < samples:
        raise InputError(f"{samples} samples cannot be split into some to tune on and a share of {share} to hold out")
    order = np.random.default_rng(seed).permutation(samples)
    return np.sort(order[held:]), np.sort(order[:held])


def check_fit_arguments(
    costs: Costs | Sequence[float], budget: Any, strategy: str, score: str, objective: str = "accuracy"
) -> None:
    """Refuse what `fit_policy` cannot fulfil, before anything is computed for it."""
    for name, value, known in (("strategy", strategy, STRATEGIES), ("objective", objective, OBJECTIVES)):
        if value not in known:
            raise InputError(f"`{name}` must be one of {', '.join(known)}, but got {value!r}")
    check_score(score)
    Costs.of(costs).check_budget(budget)


class PolicyFitter:
    """Policies on one set of predictions, for any budget and by any strategy."""

    def __init__(
        self,
        preds: Any,
        labels: Any = None,
        costs: Costs | Sequence[float] | None = None,
        *,
        score: str = "confidence",
        objective: str = "accuracy",
    ) -> None:
        check_score(score)
        preds = Predictions.of(preds)
        exits, samples, classes = preds.shape
        self.costs = check_costs(costs, exits)
        check_fit_arguments(self.costs, self.costs.values[0], "auto", score, objective)
        if samples < exits:
            raise InputError(f"`preds` must have at least as many samples as exits, {exits}, but has {samples}")
        self.score, self.objective = score, objective
        self._preds, self._table = preds, exit_scores(preds, score)
        self._values = {"expected": _expected(preds, objective)}
        self._labels = None if labels is None else check_labels(labels, samples, classes)
        if self._labels is not None:
            self._values["labels"] = _true(preds, self._labels, objective)
        self._whole = CutoffSearch(self._table, np.asarray(self.costs.values), self._values)
        self._held: dict[tuple[float, str], Array] = {}
        self._all = np.arange(samples)

    def certify(
        self,
        certificate: Certificate,
        budget: float | None,
        strategy: str,
        hold: Predictions,
        hold_labels: Any = None,
        against: Any = None,
        tune_against: Predictions | None = None,
        seed: int | None = None,
    ) -> Policy:
        """The policy for a budget that predictions of other samples certify; see `fit_policy`.

        `tune_against` is `against` on the samples of the fitter, for bounds that suit it; `seed` is what split them.
        """
        if budget is None and certificate.risk is None:
            raise InputError(
                "`budget` is needed, unless the certificate is of a risk: then the cheapest policy is found"
            )
        if hold.shape[::2] != self._preds.shape[::2]:
            expected = self._preds.shape[::2]
            raise InputError(
                f"`hold` must have the exits and classes of `preds`, {expected}, but has {hold.shape[::2]}"
            )
        tune_full = (self._preds if tune_against is None else tune_against).predicted[-1]
        reference = hold if against is None else Predictions.of(against)
        if reference.shape[1:] != hold.shape[1:]:
            raise InputError(
                f"`against` must have the samples and classes held out, {hold.shape[1:]}, but has {reference.shape[1:]}"
            )
        if certificate.risk == "accuracy":
            if self._labels is None or hold_labels is None:
                raise InputError("`labels` are needed to certify a loss in accuracy: 'disagreement' does without")
            hold_labels = check_labels(hold_labels, hold.shape[1], hold.shape[2])
        if strategy == "auto" and certificate.risk is not None:
            strategy = "geometric"  # it differs least from the full net where there is much to spend
        if budget is None:  # then all of the error is the risk's
            delta = certificate.risk_delta or certificate.budget_delta
            certificate = replace(certificate, budget_delta=None, risk_delta=delta)
            low, high = self.costs.values[0], self.costs.values[-1]
            policies = [self.fit(float(each), strategy) for each in np.linspace(low, high, _BUDGETS)]
        else:
            policies = nested_cheaper_policies(self.fit(budget, strategy), self._table, self.costs)
        tune = PolicyOutcomes.from_predictions(policies, self._preds, certificate.risk, tune_full, self._labels)
        held = PolicyOutcomes.from_predictions(policies, hold, certificate.risk, reference.predicted[-1], hold_labels)
        made = select_certified(policies, tune, held, certificate, self.costs, budget, against is None, seed)
        return replace(made, fit=self._fit_of(made, policies[-1].fit))

    def _fit_of(self, policy: Policy, fit: PolicyFit | None) -> PolicyFit | None:
        """The fit of the policy that a cheaper one was made from, with what is true of the cheaper one."""
        if fit is None or policy.fit is fit:
            return fit
        judge = self._values["labels" if fit.labelled else "expected"]
        value = float(judge[policy.exits_by(self._table), self._all].mean())
        return replace(fit, value=value if self.objective == "accuracy" else -value, held_out=None)

    def fit(self, budget: float | None, strategy: str = "auto") -> Policy:
        check_fit_arguments(self.costs, budget, strategy, self.score, self.objective)
        labelled = "labels" in self._values
        if strategy == "optimized" and not labelled:
            raise InputError("`labels` are needed for the strategy 'optimized': 'label_free' does without")
        budget = float(budget or 0.0)
        contenders = {
            "geometric": ("geometric",),
            "optimized": ("geometric", "labels", "smoothed"),
            "label_free": ("expected",),
            "auto": ("geometric", *(_SOURCES if labelled else ())),
        }[strategy]
        judge = "labels" if labelled and strategy != "label_free" else "expected"
        cuts = {name: self._whole.cuts(name, budget) for name in contenders}
        values = {name: self._whole.mean(judge, found) for name, found in cuts.items()}
        if "geometric" in values:  # what is below it on its own data is not asked any further
            values = {name: value for name, value in values.items() if value >= values["geometric"] - 1e-12}
        held = {name: self._cross_fitted_exits(name, budget) for name in values} if self._folds else {}
        held_values = {name: self._values[judge][exits, self._all] for name, exits in held.items()}
        best = self._select_strategy(held, held_values) if held else max(values, key=lambda name: values[name])
        sign = 1 if self.objective == "accuracy" else -1
        portfolio: dict[str, float] = {}
        for name, each in held_values.items():
            known = portfolio.get(_SOURCES.get(name, name), -inf)
            portfolio[_SOURCES.get(name, name)] = max(known, float(each.mean()))
        fit = PolicyFit(
            chosen=_SOURCES.get(best, best),
            samples=self._table.shape[1],
            objective=self.objective,
            labelled=judge == "labels",
            value=sign * float(values[best]),
            held_out=sign * float(held_values[best].mean()) if held else None,
            portfolio={name: sign * value for name, value in portfolio.items()},
        )
        q = self._whole.q(budget) if best == "geometric" else None
        policy = Policy(
            self._whole.thresholds(cuts[best]), self.score, self.costs.unit, None, budget, strategy, q, fit=fit
        )
        policy = policy.with_cost(self._table, self.costs)
        return replace(policy, cost=min(policy.cost or 0.0, budget))  # which it exceeds by rounding at most

    @cached_property
    def _folds(self) -> list[tuple["CutoffSearch", Array]]:
        """Searches on all samples but those of one fold, and that fold's samples; none where they would be too few."""
        exits, samples = self._table.shape
        number = min(FOLDS, samples // max(exits, 2))
        if number < 2:
            return []
        fold_of = np.random.default_rng(0).permutation(samples) % number
        folds = []
        for fold in range(number):
            rest = np.flatnonzero(fold_of != fold)
            values = {name: value[:, rest] for name, value in self._values.items()}
            search = CutoffSearch(self._table[:, rest], np.asarray(self.costs.values), values)
            folds.append((search, np.flatnonzero(fold_of == fold)))
        return folds

    def _cross_fitted_exits(self, name: str, budget: float) -> Array:
        """(n,) the exit of each sample by what `name` finds on samples of other folds."""
        if (budget, name) not in self._held:
            exits = np.empty(len(self._all), dtype=np.int64)
            for search, held in self._folds:
                policy = Policy(search.thresholds(search.cuts(name, budget)), self.score)
                exits[held] = policy.exits_by(self._table[:, held])
            self._held[budget, name] = exits
        return self._held[budget, name]

    def _select_strategy(self, exits: Mapping[str, Array], values: Mapping[str, Array]) -> str:
        """Who does best on samples held out, from the exits and values (n,) there.

        To replace the paper's family it takes more than its standard error, unless it is cheaper: what seems a little
        better on these samples is as often a little worse on others.
        """
        costs = np.asarray(self.costs.values)
        first, *others = values
        best, most = first, 0.0
        for name in others:
            difference = values[name] - values[first]
            saves = costs[exits[name]].mean() < (1 - _SAVES) * costs[exits[first]].mean()
            doubt = 0.0 if saves else float(difference.std()) / len(difference) ** 0.5
            gain = float(difference.mean()) - doubt
            if gain > most or (saves and best == first and gain == most):
                best, most = name, gain
        return best


def _true(preds: Predictions, labels: Array, objective: str) -> Array:
    """(K, n) whether each exit is right, or log p(true label)."""
    if objective == "accuracy":
        return np.asarray(preds.predicted == labels, dtype=np.float64)
    return np.stack([log_true(said.log_probs, labels) for said in preds.exits()]).astype(np.float64)


def _expected(preds: Predictions, objective: str) -> Array:
    """(K, n) the same as the exit expects it: its confidence, or sum p log p."""
    return exit_scores(preds, "confidence" if objective == "accuracy" else "entropy")
