"""A budget becomes thresholds: the paper's family, or those that are best on validation data. NumPy alone."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from exitwise import metrics
from exitwise.costs import Costs
from exitwise.errors import InputError
from exitwise.policy import Fit, Policy, costs_of
from exitwise.predictions import Array, Predictions
from exitwise.ranking import Ranking
from exitwise.scores import check_score, scores

STRATEGIES = ("auto", "geometric", "optimized", "label_free")
OBJECTIVES = ("accuracy", "nlpd")
FOLDS = 5

# What is maximised: what is true of each sample, the same smoothed along the scores, or what the net itself expects.
_SOURCES = {"labels": "optimized", "smoothed": "optimized", "expected": "label_free"}


def fit_policy(
    preds: Any,
    labels: Any = None,
    costs: Costs | Sequence[float] | None = None,
    *,
    budget: float,
    strategy: str = "auto",
    score: str = "confidence",
    objective: str = "accuracy",
) -> Policy:
    """Thresholds whose mean cost on these predictions is at most the budget, in the unit of the costs, per sample.

    - `geometric`: the paper's shares q^k with a continuous q, bisected until the cost meets the budget. No labels.
    - `optimized`: the largest accuracy (or with `objective="nlpd"` the smallest NLPD) on the labels; spends less than
      the budget where going deeper does harm. Never below `geometric` on these samples; where it is below it on samples
      that it was not fitted on (cross-fitting), it is `geometric`.
    - `label_free`: the same, but with the net's own confidence in place of labels, for traffic that has none. As good
      as the confidence is calibrated.
    - `auto`: whichever of them does best on samples that it was not fitted on; without labels `geometric`, as an
      overconfident net is a bad judge of itself.

    `policy.fit` says what was chosen and how it did on samples not fitted on. Thresholds lie midway between scores;
    equal scores are parted by a hash of the sample's probabilities.
    """
    return fit_policies(preds, labels, costs, budgets=[budget], strategy=strategy, score=score, objective=objective)[0]


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
    """`fit_policy` for many budgets, with what they share computed once."""
    fitter = Fitter(preds, labels, costs, score=score, objective=objective)
    return [fitter.fit(budget, strategy) for budget in budgets]


def check_request(
    costs: Costs | Sequence[float], budget: Any, strategy: str, score: str, objective: str = "accuracy"
) -> None:
    """Refuse what `fit_policy` cannot fulfil, before anything is computed for it."""
    for name, value, known in (("strategy", strategy, STRATEGIES), ("objective", objective, OBJECTIVES)):
        if value not in known:
            raise InputError(f"`{name}` must be one of {', '.join(known)}, but got {value!r}")
    check_score(score)
    found = Costs.of(costs)
    low, high = found.values[0], found.values[-1]
    number = isinstance(budget, int | float | np.integer | np.floating) and not isinstance(budget, bool)
    if not number or not low <= budget <= high:
        raise InputError(
            f"`budget` must lie between the cost of the first exit and that of the last, "
            f"{low:.10g} to {high:.10g} {found.unit}, but got {budget}"
        )


class Fitter:
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
        self.costs = costs_of(costs, exits)
        check_request(self.costs, self.costs.values[0], "auto", score, objective)
        if samples < exits:
            raise InputError(f"`preds` must have at least as many samples as exits, {exits}, but has {samples}")
        self.score, self.objective = score, objective
        self._table = scores(preds, score)
        self._values = {"expected": _expected(preds, objective)}
        if labels is not None:
            found = metrics.check_labels(labels, samples, classes)
            self._values["labels"] = _true(preds, found, objective)
        self._whole = _Search(self._table, np.asarray(self.costs.values), self._values)
        self._held: dict[tuple[float, str, str], float] = {}

    def fit(self, budget: float, strategy: str = "auto") -> Policy:
        check_request(self.costs, budget, strategy, self.score, self.objective)
        labelled = "labels" in self._values
        if strategy == "optimized" and not labelled:
            raise InputError("`labels` are needed for the strategy 'optimized': 'label_free' does without")
        budget = float(budget)
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
        held = {name: self._held_out(name, budget, judge) for name in values}
        best = max(values, key=lambda name: held[name] if len(self._folds) else values[name])
        sign = 1 if self.objective == "accuracy" else -1
        by_strategy: dict[str, float] = {}
        for name, value in held.items():
            known = by_strategy.get(_SOURCES.get(name, name), -inf)
            by_strategy[_SOURCES.get(name, name)] = max(known, value)
        fit = Fit(
            chosen=_SOURCES.get(best, best),
            samples=self._table.shape[1],
            objective=self.objective,
            labelled=judge == "labels",
            value=sign * float(values[best]),
            held_out=sign * held[best] if self._folds else None,
            portfolio={name: sign * value for name, value in by_strategy.items()} if self._folds else {},
        )
        q = self._whole.q(budget) if best == "geometric" else None
        policy = Policy(
            self._whole.thresholds(cuts[best]), self.score, self.costs.unit, None, budget, strategy, q, fit=fit
        )
        return policy.with_cost(self._table, self.costs)

    @cached_property
    def _folds(self) -> list[tuple["_Search", Array]]:
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
            search = _Search(self._table[:, rest], np.asarray(self.costs.values), values)
            folds.append((search, np.flatnonzero(fold_of == fold)))
        return folds

    def _held_out(self, name: str, budget: float, judge: str) -> float:
        """The mean value, on samples not fitted on, of what `name` finds on the others."""
        key = (budget, name, judge)
        if key not in self._held:
            total = 0.0
            for search, held in self._folds:
                policy = Policy(search.thresholds(search.cuts(name, budget)), self.score)
                total += self._values[judge][policy.exits_by(self._table[:, held]), held].sum()
            self._held[key] = float(total / self._table.shape[1])
        return self._held[key]


class _Search:
    """Cuts for budgets on some samples: scores (K, n), costs (K,), and values (K, n) by name."""

    def __init__(self, table: Array, costs: Array, values: Mapping[str, Array]) -> None:
        self._ranking, self._costs, self._values = Ranking(table), costs, dict(values)
        if "labels" in values:
            self._values["smoothed"] = _smoothed(table, values["labels"])
        self._all = np.arange(table.shape[1])
        self._family: dict[float, tuple[Array, float]] = {}
        self._geometric: dict[float, tuple[Array, float]] = {}
        self._paths: dict[str, list[tuple[Array, float, float]]] = {}

    def thresholds(self, cuts: Array) -> tuple[float, ...]:
        return self._ranking.thresholds(cuts)

    def mean(self, name: str, cuts: Array) -> float:
        """The mean of a value at the exits that samples take."""
        return float(self._values[name][self._ranking.exits(cuts), self._all].mean())

    def cuts(self, name: str, budget: float) -> Array:
        """By the paper's family, or the best for a value."""
        return self._best(name, budget) if name in self._values else self._meeting(budget)[0]

    def q(self, budget: float) -> float:
        """Of the paper's family at a budget."""
        return float(np.exp(self._meeting(budget)[1]))

    def _meeting(self, budget: float) -> tuple[Array, float]:
        """Cuts of the paper's family with the largest cost up to the budget, and log q."""
        if budget in self._geometric:
            return self._geometric[budget]
        below, above = -50.0, 50.0  # everyone leaves at the first exit; at the last
        best = below
        one = (self._costs[-1] - self._costs[0]) / self._ranking.samples  # nothing smaller than a sample can move
        if self._member(above)[1] <= budget:
            best, above = above, below
        while abs(above - below) > 1e-13 and not 0 <= budget - self._member(best)[1] < one:
            middle = (below + above) / 2
            cost = self._member(middle)[1]
            if cost > budget:
                above = middle
                continue
            below = middle
            best = middle if cost >= self._member(best)[1] else best
        self._geometric[budget] = (self._member(best)[0], best)
        return self._geometric[budget]

    def _member(self, log_q: float) -> tuple[Array, float]:
        """Cuts of the paper's family and their mean cost, remembered: budgets share the first halvings."""
        if log_q not in self._family:
            shares = geometric_shares(float(np.exp(log_q)), len(self._costs))
            counts = np.floor(self._ranking.samples * shares + 1e-9)  # a share of 1/4 is a quarter, however it rounds
            cuts = self._ranking.by_counts(counts)
            self._family[log_q] = (cuts, float(self._costs[self._ranking.exits(cuts)].mean()))
        return self._family[log_q]

    def _best(self, name: str, budget: float) -> Array:
        """The best that is found within the budget, from the paper's family and from solutions at a price per cost."""
        within = [(value, cuts) for cuts, cost, value in self._path(name) if cost <= budget]
        starts = [cuts for _, cuts in sorted(within, key=lambda pair: -pair[0])[:2]]
        ends = [
            self._ranking.ascend_within(self._values[name], self._costs, budget, start)
            for start in (*starts, self._meeting(budget)[0])
        ]
        return max(ends, key=lambda cuts: self.mean(name, cuts))

    def _path(self, name: str) -> list[tuple[Array, float, float]]:
        """Cuts, cost and value of the best that is found at every price of a falling, then growing row of prices."""
        if name not in self._paths:
            values = self._values[name]
            most = np.abs(values[-1] - values[0]).mean() / max(self._costs[-1] - self._costs[0], self._costs[0] * 1e-9)
            prices = [*(most * np.geomspace(30, 1e-3, 32)), 0.0]
            found = []
            for row, start in ((prices, self._ranking.samples), (prices[::-1], 0)):
                cuts = np.full(len(values) - 1, start)
                for each in row:
                    cuts = self._ranking.ascend(values - each * self._costs[:, None], cuts)
                    found.append(cuts)
            distinct = {cuts.tobytes(): cuts for cuts in found}.values()
            exits = [self._ranking.exits(cuts) for cuts in distinct]
            self._paths[name] = [
                (cuts, float(self._costs[taken].mean()), float(values[taken, self._all].mean()))
                for cuts, taken in zip(distinct, exits, strict=True)
            ]
        return self._paths[name]


def geometric_shares(q: float, exits: int) -> Array:
    """(K,) the paper's shares of samples per exit, q^k / sum_j q^j for k = 1..K."""
    # Divided by the largest power, so that none overflows.
    powers = np.exp(np.log(q) * np.arange(exits) - max(0.0, np.log(q) * (exits - 1)))
    return np.asarray(powers / powers.sum())


def _true(preds: Predictions, labels: Array, objective: str) -> Array:
    """(K, n) whether each exit is right, or log p(true label)."""
    if objective == "accuracy":
        return np.asarray(preds.predicted == labels, dtype=np.float64)
    return np.stack([metrics.log_true(said.log_probs, labels) for said in preds.exits()]).astype(np.float64)


def _expected(preds: Predictions, objective: str) -> Array:
    """(K, n) the same as the exit expects it: its confidence, or sum p log p."""
    return scores(preds, "confidence" if objective == "accuracy" else "entropy")


def _smoothed(table: Array, values: Array) -> Array:
    """(K, n) values as a function of each exit's own score: means of neighbours, linear between them.

    What is true of one sample is mostly chance, and thresholds that follow it do not hold for others.
    """
    groups = max(2, round(table.shape[1] ** (1 / 3)))
    smooth = []
    for score, value in zip(table, values, strict=True):
        parts = np.array_split(np.argsort(score, kind="stable"), groups)
        smooth.append(np.interp(score, [score[part].mean() for part in parts], [value[part].mean() for part in parts]))
    return np.stack(smooth)
