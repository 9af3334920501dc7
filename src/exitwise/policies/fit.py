"""Fit thresholds to a budget: the paper's geometric family, or the best on validation data. NumPy only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from exitwise.core.checks import check_choice, check_number
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.held_out import split_held_out as split_held_out
from exitwise.core.predictions import Array, Predictions, check_labels
from exitwise.policies.certificate import RISKS, Certificate
from exitwise.policies.certify import PolicyOutcomes, nested_cheaper_policies, select_certified
from exitwise.policies.cutoff_search import CutoffSearch
from exitwise.policies.cutoffs import first_true
from exitwise.policies.learned_score import split_folds
from exitwise.policies.policy import OBJECTIVES, Policy, PolicyFit, check_costs
from exitwise.policies.score_choice import compute_true_values, fit_score
from exitwise.policies.scores import check_score, exit_scores

STRATEGIES = ("auto", "geometric", "optimized", "label_free")
_MIN_SAVING = 0.03  # of the cost: a candidate that saves more is preferred if it is not worse
_NUM_RISK_BUDGETS = 101  # budgets to try for the cheapest policy that meets a certified risk
_NUM_COARSE_BUDGETS = 21  # budgets to try for the cheapest policy that meets a loss without a certificate,
_NUM_FINE_BUDGETS = 9  # and budgets between the best of them and the one below

# Strategy of each value to maximize: with labels, with labels smoothed along the scores, with the net's own confidence.
_STRATEGY_OF_VALUE = {"labels": "optimized", "smoothed": "optimized", "expected": "label_free"}


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
    held_out: Any = None,
    held_out_labels: Any = None,
    reference: Any = None,
    hold: Any = None,
    hold_labels: Any = None,
    against: Any = None,
    max_loss: float | None = None,
    risk: str = "accuracy",
) -> Policy:
    """Fit thresholds whose mean cost per sample on these predictions is at most the budget.

    With `budget=None` and `max_loss`, fit the cheapest policy that loses at most `max_loss` on these samples.

    Strategies:

    - `geometric`: the paper's shares q^k with a continuous q, bisected until the cost meets the budget. No labels.
    - `optimized`: the largest accuracy (or with `objective="nlpd"` the smallest NLPD) on the labels; spends less than
      the budget where later exits are worse. Never below `geometric` on these samples. It falls back to `geometric` if
      it is neither clearly better on out-of-fold samples (cross-fitting) nor cheaper.
    - `label_free`: like `optimized`, but with the net's own confidence instead of labels, for unlabeled inputs. As good
      as the confidence is calibrated.
    - `auto`: the strategy that is best on out-of-fold samples; without labels `geometric`, because an overconfident net
      overestimates its own accuracy. `geometric` if a `risk` is certified.

    Thresholds lie midway between scores; ties are broken by a hash of the sample's probabilities.

    With `certify`, the policy is guaranteed to meet the budget on fresh samples. The certificate needs held-out
    samples: samples that were used neither for calibration nor for thresholds.

    Args:
        preds: Predictions, or probabilities (K, n, c).
        labels: True classes (n,). Needed by `optimized`, and to certify a loss in accuracy.
        costs: Cumulative costs (K,) of the exits, such as `trace.costs`.
        budget: Largest mean cost per sample, in the unit of `costs`. With None and `max_loss` or a certified risk, the
            cheapest policy that meets it is returned.
        strategy: "auto", "geometric", "optimized" or "label_free".
        score: Score that the thresholds apply to: "confidence", "margin", "entropy", "variance" or "patience";
            "learned" for a model of where stopping is right, fitted on these labels by cross-fitting; "auto" for a
            score that is clearly better than confidence out of fold, or else confidence.
        objective: "accuracy" or "nlpd".
        certify: Guarantee to certify.
        held_out: Predictions (K, m, c) on held-out samples. By default a part of the samples of `preds` is held out,
            which then must not have been used for calibration either.
        held_out_labels: True classes (m,) of the held-out samples.
        reference: Predictions (any exits, m, c) on the samples of `held_out`, or (any exits, n, c) on those of `preds`
            if none are given. Losses are measured against their last exit, for example the vanilla net's; by default
            against the last exit of `held_out`, or of `preds` with `max_loss`.
        hold: Former name of `held_out`.
        hold_labels: Former name of `held_out_labels`.
        against: Former name of `reference`.
        max_loss: Largest loss on these samples, without a certificate; 0.01 is one percentage point. It must hold out
            of fold (cross-fitting) as well. A certificate has its own, `epsilon`.
        risk: Loss of `max_loss`: "accuracy" or "disagreement", as in `Certificate`.

    Returns:
        The policy. `policy.fit` holds the chosen strategy and its out-of-fold performance, `policy.guarantee` what was
        certified.

    Raises:
        NotCertifiedError: If the held-out samples certify no policy. The message names the sample size that suffices.
        InputError: If an argument is invalid or out of reach, or is given under both names.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> preds = ew.calibrate(trace, "MSDNet (vanilla)").predict(trace.val)
        >>> policy = ew.fit_policy(preds, costs=trace.costs, budget=2e7)
        >>> policy.fit.chosen, len(policy.thresholds), policy.cost <= 2e7
        ('geometric', 4, True)
        >>> certified = ew.fit_policy(preds, costs=trace.costs, budget=2e7, certify=ew.Certificate(0.05))
        >>> certified.guarantee.num_held_out, certified.cost < policy.cost
        (2500, True)
    """
    held_out = _merge_alias("held_out", held_out, "hold", hold)
    held_out_labels = _merge_alias("held_out_labels", held_out_labels, "hold_labels", hold_labels)
    reference = _merge_alias("reference", reference, "against", against)
    check_choice("risk", risk, RISKS)
    if max_loss is not None:
        if certify is not None or held_out is not None or held_out_labels is not None:
            raise InputError("`max_loss` is without a certificate: give `risk` and `epsilon` to the Certificate")
        if budget is not None:
            raise InputError(f"`budget` must be None with `max_loss`, but got {budget!r}")
        fitter = PolicyFitter(preds, labels, costs, score=score, objective=objective)
        return fitter.fit_cheapest(max_loss, strategy, risk, reference)
    if certify is None:
        if held_out is not None or held_out_labels is not None or reference is not None:
            raise InputError(
                "`held_out`, `held_out_labels` and `reference` are for a certificate: give `certify`, or `max_loss`"
            )
        return PolicyFitter(preds, labels, costs, score=score, objective=objective).fit(budget, strategy)
    if not isinstance(certify, Certificate):
        raise InputError(f"`certify` must be a Certificate, but got {certify!r}")
    seed, tune_reference = None, None
    preds = Predictions.of(preds)
    if held_out is None:
        if held_out_labels is not None:
            raise InputError("`held_out_labels` need their predictions: give `held_out`")
        tune_positions, held_out_positions = split_held_out(preds.shape[1], certify.hold, certify.seed)
        seed = certify.seed
        if reference is not None:
            full_reference = _check_reference(reference, preds.shape[1])
            tune_reference, reference = full_reference.take(tune_positions), full_reference.take(held_out_positions)
        if labels is not None:
            all_labels = check_labels(labels, preds.shape[1], preds.shape[2])
            labels, held_out_labels = all_labels[tune_positions], all_labels[held_out_positions]
        held_out, preds = preds.take(held_out_positions), preds.take(tune_positions)
    fitter = PolicyFitter(preds, labels, costs, score=score, objective=objective)
    return fitter.certify(
        certify, budget, strategy, Predictions.of(held_out), held_out_labels, reference, tune_reference, seed
    )


def _merge_alias(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    """Return an argument that was given under its name or its former name."""
    if value is not None and old_value is not None:
        raise InputError(f"`{name}` and its former name `{old_name}` must not both be given, but got both")
    return old_value if value is None else value


def _check_reference(reference: Any, samples: int) -> Predictions:
    preds = Predictions.of(reference)
    if preds.shape[1] != samples:
        raise InputError(f"`reference` must have the {samples} samples of `preds`, but has {preds.shape[1]}")
    return preds


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
    """Fit a policy for each of several budgets, as `fit_policy` does, but faster: shared results are computed once.

    Args:
        preds: Predictions, or probabilities (K, n, c).
        labels: True classes (n,). Needed by `optimized`.
        costs: Cumulative costs (K,) of the exits, such as `trace.costs`.
        budgets: Largest mean costs per sample, in the unit of `costs`.
        strategy: "auto", "geometric", "optimized" or "label_free"; see `fit_policy`.
        score: Score that the thresholds apply to, as in `fit_policy`.
        objective: "accuracy" or "nlpd".

    Returns:
        One policy per budget, in their order.

    Raises:
        InputError: If an argument is invalid, or a budget is out of reach.

    Example:
        >>> import exitwise as ew
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> preds = ew.calibrate(trace, "MSDNet (vanilla)").predict(trace.val)
        >>> policies = ew.fit_policies(preds, costs=trace.costs, budgets=[1e7, 2e7, 3e7])
        >>> [policy.cost <= policy.budget for policy in policies]
        [True, True, True]
    """
    if not isinstance(budgets, Iterable):
        raise InputError(f"`budgets` must be several budgets, but got {budgets!r}")
    fitter = PolicyFitter(preds, labels, costs, score=score, objective=objective)
    return [fitter.fit(budget, strategy) for budget in budgets]


def check_fit_arguments(
    costs: Costs | Sequence[float], budget: Any, strategy: str, score: str, objective: str = "accuracy"
) -> None:
    """Raise `InputError` for arguments that `fit_policy` refuses, before any expensive computation."""
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("objective", objective, OBJECTIVES)
    check_score(score, to_fit=True)
    Costs.of(costs).check_budget(budget)


class PolicyFitter:
    """Fits policies on one set of predictions, for any budget and strategy."""

    def __init__(
        self,
        preds: Any,
        labels: Any = None,
        costs: Costs | Sequence[float] | None = None,
        *,
        score: str = "confidence",
        objective: str = "accuracy",
    ) -> None:
        """Check the arguments, which are those of `fit_policy`, and compute scores and values."""
        check_score(score, to_fit=True)
        preds = Predictions.of(preds)
        exits, samples, classes = preds.shape
        self.costs = check_costs(costs, exits)
        check_fit_arguments(self.costs, self.costs.values[0], "auto", score, objective)
        if samples < exits:
            raise InputError(f"`preds` must have at least as many samples as exits, {exits}, but has {samples}")
        self._labels = None if labels is None else check_labels(labels, samples, classes)
        self._fitted_score = fit_score(preds, self._labels, self.costs, score, objective)
        self.score, self.objective = self._fitted_score.name, objective
        self._preds, self._scores = preds, self._fitted_score.scores
        self._values = {"expected": _compute_expected_values(preds, objective)}
        if self._labels is not None:
            self._values["labels"] = compute_true_values(preds, self._labels, objective)
        self._search = CutoffSearch(self._scores, np.asarray(self.costs.values), self._values)
        self._cross_fitted: dict[tuple[float, str], Array] = {}
        self._samples = np.arange(samples)

    @property
    def score_choice(self) -> dict[str, Any] | None:
        """Scores that `score="auto"` compared, as in `PolicyFit.score_choice`; None if the score was given."""
        return self._fitted_score.choice_to_dict()

    def certify(
        self,
        certificate: Certificate,
        budget: float | None,
        strategy: str,
        held_out: Predictions,
        held_out_labels: Any = None,
        reference: Any = None,
        tune_reference: Predictions | None = None,
        seed: int | None = None,
    ) -> Policy:
        """Fit the policy for a budget and make it cheaper until the held-out samples certify it; see `fit_policy`.

        Args:
            certificate: Guarantee to certify.
            budget: Largest mean cost per sample, or None for the cheapest policy that meets the risk.
            strategy: Strategy of `fit_policy`.
            held_out: Predictions (K, m, c) on the held-out samples.
            held_out_labels: Their true classes (m,).
            reference: Predictions (any exits, m, c) on the held-out samples that losses are measured against.
            tune_reference: The same net's predictions on the samples of the fitter, to choose tighter bounds.
            seed: Seed of the split, to be recorded.

        Returns:
            The certified policy.

        Raises:
            NotCertifiedError: If the held-out samples certify no policy.
            InputError: If an argument is invalid.
        """
        if budget is None and certificate.risk is None:
            raise InputError(
                "`budget` is needed, unless the certificate has a `risk`: then the cheapest policy is fitted"
            )
        if held_out.shape[::2] != self._preds.shape[::2]:
            expected = self._preds.shape[::2]
            raise InputError(
                f"`held_out` must have the exits and classes of `preds`, {expected}, but has {held_out.shape[::2]}"
            )
        tune_classes = (self._preds if tune_reference is None else tune_reference).predicted[-1]
        reference_preds = held_out if reference is None else Predictions.of(reference)
        if reference_preds.shape[1:] != held_out.shape[1:]:
            raise InputError(
                f"`reference` must have the samples and classes of `held_out`, {held_out.shape[1:]}, "
                f"but has {reference_preds.shape[1:]}"
            )
        if certificate.risk == "accuracy":
            if self._labels is None or held_out_labels is None:
                raise InputError("`labels` are needed to certify a loss in accuracy: 'disagreement' needs none")
            held_out_labels = check_labels(held_out_labels, held_out.shape[1], held_out.shape[2])
        if strategy == "auto" and certificate.risk is not None:
            strategy = "geometric"  # of all strategies it is closest to the last exit at large budgets
        if budget is None:  # without a budget to certify, the risk may use the whole failure probability
            delta = certificate.risk_delta or certificate.budget_delta
            certificate = replace(certificate, budget_delta=None, risk_delta=delta)
            low, high = self.costs.values[0], self.costs.values[-1]
            policies = [self.fit(float(tried), strategy) for tried in np.linspace(low, high, _NUM_RISK_BUDGETS)]
        else:
            policies = nested_cheaper_policies(self.fit(budget, strategy), self._scores, self.costs)
        risk, held_out_classes = certificate.risk, reference_preds.predicted[-1]
        tune_outcomes = PolicyOutcomes.from_predictions(
            policies, self._preds, risk, tune_classes, self._labels, self._scores
        )
        outcomes = PolicyOutcomes.from_predictions(policies, held_out, risk, held_out_classes, held_out_labels)
        is_last_exit = reference is None
        policy = select_certified(
            policies, tune_outcomes, outcomes, certificate, self.costs, budget, is_last_exit, seed
        )
        return replace(policy, fit=self._recompute_fit(policy, policies[-1].fit))

    def _recompute_fit(self, policy: Policy, fit: PolicyFit | None) -> PolicyFit | None:
        """Return the original policy's fit, with `value` recomputed for the cheaper policy."""
        if fit is None or policy.fit is fit:
            return fit
        values = self._values["labels" if fit.labelled else "expected"]
        value = float(values[policy.exits_from_scores(self._scores), self._samples].mean())
        return replace(fit, value=value if self.objective == "accuracy" else -value, held_out=None)

    def fit_cheapest(
        self, max_loss: float, strategy: str = "auto", risk: str = "accuracy", reference: Any = None
    ) -> Policy:
        """Fit the cheapest policy that loses at most `max_loss`, in sample and out of fold.

        Args:
            max_loss: Largest loss, from 0 to 1.
            strategy: Strategy of `fit_policy`.
            risk: "accuracy" for the drop in accuracy against the last exit of `reference`, "disagreement" for the share
                of samples with another prediction than that exit's.
            reference: Predictions (any exits, n, c) on the samples of the fitter; by default its own.

        Returns:
            The policy; its `budget` is the one that it was fitted for.

        Raises:
            InputError: If no policy loses so little, or an argument is invalid.
        """
        max_loss = check_number("max_loss", max_loss, 0, 1)
        if strategy == "auto" and risk == "disagreement":
            strategy = "geometric"  # of all strategies it is closest to the last exit at large budgets
        if risk == "accuracy" and self._labels is None:
            raise InputError("`labels` are needed for a loss in accuracy: the risk 'disagreement' needs none")
        preds = self._preds if reference is None else _check_reference(reference, len(self._samples))
        reference_classes = preds.predicted[-1]
        tried: dict[float, tuple[Policy, float]] = {}

        def try_budgets(budgets: Iterable[float]) -> float | None:
            """Fit policies; return the budget of the cheapest policy so far that meets the loss."""
            for budget in budgets:
                policy, name = self._fit(budget, strategy)
                exits = [policy.exits_from_scores(self._scores)]
                exits += [self._cross_fitted_exits(name, budget)] if self._folds else []
                tried[budget] = policy, max(self._loss(taken, reference_classes, risk) for taken in exits)
            passing = [budget for budget, (_, loss) in tried.items() if loss <= max_loss + 1e-12]
            return min(passing, key=lambda budget: tried[budget][0].cost or 0.0, default=None)

        coarse = np.linspace(self.costs.values[0], self.costs.values[-1], _NUM_COARSE_BUDGETS).tolist()
        best = try_budgets(dict.fromkeys(coarse))
        if best is None and strategy == "auto":  # it may decline to spend a budget that would reach the last exit
            return self.fit_cheapest(max_loss, "geometric", risk, reference)
        if best is None:
            smallest = min(loss for _, loss in tried.values())
            raise InputError(
                f"no policy loses at most {100 * max_loss:.4g} points of {risk} (`max_loss`) on these samples; "
                f"the smallest loss is {100 * smallest:.2f} points: allow more, or use another method, such as T_opt"
            )
        below = max((budget for budget in coarse if budget < best), default=best)
        fine = np.linspace(below, best, _NUM_FINE_BUDGETS + 2)[1:-1].tolist() if below < best else []
        best = try_budgets(fine)
        assert best is not None  # the coarse one still passes
        policy, loss = tried[best]
        assert policy.fit is not None
        return replace(policy, fit=replace(policy.fit, max_loss=max_loss, loss=loss, risk=risk))

    def _loss(self, exits: Array, reference: Array, risk: str) -> float:
        """Return the loss of samples at these exits (n,) against the classes `reference` (n,)."""
        predicted = self._preds.predicted[exits, self._samples]
        if risk == "disagreement":
            return float((predicted != reference).mean())
        return float((reference == self._labels).mean() - (predicted == self._labels).mean())

    def fit(self, budget: float | None, strategy: str = "auto") -> Policy:
        """Fit the policy for a budget; see `fit_policy`."""
        return self._fit(budget, strategy)[0]

    def _fit(self, budget: float | None, strategy: str) -> tuple[Policy, str]:
        """Fit the policy for a budget; return it with the name of the candidate that was selected."""
        check_fit_arguments(self.costs, budget, strategy, self.score, self.objective)
        has_labels = "labels" in self._values
        if strategy == "optimized" and not has_labels:
            raise InputError("`labels` are needed for the strategy 'optimized': 'label_free' needs none")
        budget = float(budget or 0.0)
        candidates = {
            "geometric": ("geometric",),
            "optimized": ("geometric", "labels", "smoothed"),
            "label_free": ("expected",),
            "auto": ("geometric", *(_STRATEGY_OF_VALUE if has_labels else ())),
        }[strategy]
        criterion = "labels" if has_labels and strategy != "label_free" else "expected"
        cutoffs = {name: self._search.find_cutoffs(name, budget) for name in candidates}
        values = {name: self._search.mean_value(criterion, cutoffs[name]) for name in candidates}
        if "geometric" in values:  # drop candidates that are worse even on the samples that they were fitted on
            values = {name: value for name, value in values.items() if value >= values["geometric"] - 1e-12}
        exits = {name: self._cross_fitted_exits(name, budget) for name in values} if self._folds else {}
        held_out_values = {name: self._values[criterion][taken, self._samples] for name, taken in exits.items()}
        best = self._select_strategy(exits, held_out_values) if exits else max(values, key=lambda name: values[name])
        sign = 1 if self.objective == "accuracy" else -1
        portfolio: dict[str, float] = {}
        for name, sample_values in held_out_values.items():
            candidate_strategy = _STRATEGY_OF_VALUE.get(name, name)
            best_value = portfolio.get(candidate_strategy, -inf)
            portfolio[candidate_strategy] = max(best_value, float(sample_values.mean()))
        fit = PolicyFit(
            chosen=_STRATEGY_OF_VALUE.get(best, best),
            samples=self._scores.shape[1],
            objective=self.objective,
            labelled=criterion == "labels",
            value=sign * float(values[best]),
            held_out=sign * float(held_out_values[best].mean()) if exits else None,
            portfolio={name: sign * value for name, value in portfolio.items()},
            score_choice=self.score_choice,
        )
        q = self._search.q(budget) if best == "geometric" else None
        thresholds = self._search.thresholds(cutoffs[best])
        model = self._fitted_score.model
        policy = Policy(thresholds, self.score, self.costs.unit, None, budget, strategy, q, fit=fit, score_model=model)
        policy = policy.with_cost(self._scores, self.costs)
        return replace(policy, cost=min(policy.cost or 0.0, budget)), best  # rounding may exceed the budget

    @cached_property
    def _folds(self) -> list[tuple["CutoffSearch", Array]]:
        """Searches on the samples outside each fold, with the positions of the fold; empty if samples are too few."""
        exits, samples = self._scores.shape
        fold_of_sample = split_folds(samples, exits)
        if fold_of_sample is None:
            return []
        folds = []
        for fold in range(fold_of_sample.max() + 1):
            outside = np.flatnonzero(fold_of_sample != fold)
            values = {name: value[:, outside] for name, value in self._values.items()}
            search = CutoffSearch(self._scores[:, outside], np.asarray(self.costs.values), values)
            folds.append((search, np.flatnonzero(fold_of_sample == fold)))
        return folds

    def _cross_fitted_exits(self, name: str, budget: float) -> Array:
        """Return the exit (n,) of each sample under the thresholds that `name` finds on the other folds."""
        if (budget, name) not in self._cross_fitted:
            exits = np.empty(len(self._samples), dtype=np.int64)
            for search, inside in self._folds:
                thresholds = np.asarray(search.thresholds(search.find_cutoffs(name, budget)))
                exits[inside] = first_true(self._scores[:, inside] >= thresholds[:, None])
            self._cross_fitted[budget, name] = exits
        return self._cross_fitted[budget, name]

    def _select_strategy(self, exits: Mapping[str, Array], values: Mapping[str, Array]) -> str:
        """Return the name of the best candidate from its out-of-fold exits and values (n,).

        A candidate replaces `geometric` only if it gains more than one standard error, or saves more than 3 % of the
        cost at no loss.
        """
        costs = np.asarray(self.costs.values)
        first, *others = values
        best, max_gain = first, 0.0
        for name in others:
            difference = values[name] - values[first]
            saves = costs[exits[name]].mean() < (1 - _MIN_SAVING) * costs[exits[first]].mean()
            standard_error = 0.0 if saves else float(difference.std()) / len(difference) ** 0.5
            gain = float(difference.mean()) - standard_error
            if gain > max_gain or (saves and best == first and gain == max_gain):
                best, max_gain = name, gain
        return best


def _compute_expected_values(preds: Predictions, objective: str) -> Array:
    """Return (K, n) the value that each exit expects: its confidence, or sum p log p."""
    return exit_scores(preds, "confidence" if objective == "accuracy" else "entropy")
