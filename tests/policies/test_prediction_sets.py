"""Prediction sets: against a literal oracle, the finite-sample rule, and the exact distribution of their coverage."""

import json
from math import inf
from typing import Any

import numpy as np
import pytest
import scipy.stats
from cases import THREE_EXITS as POLICY
from cases import probs_and_labels
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore
from oracles import random_probs
from sklearn.base import BaseEstimator, ClassifierMixin

import exitwise as ew
from exitwise.policies.prediction_sets import limit_rank, reachable_exits, samples_needed

pytestmark = pytest.mark.numerical

Array = Any


def oracle_score(probs: Array, label: int, score: str, penalty: float, rank: int) -> float:
    """The scores as the papers write them, for one class of one sample."""
    if score == "thr":
        return 1 - float(probs[label])
    order = sorted(range(len(probs)), key=lambda c: (-float(probs[c]), c))
    place = order.index(label) + 1
    total = sum(float(probs[c]) for c in order[:place])
    return total + (penalty * max(place - rank, 0) if score == "raps" else 0)


@pytest.mark.parametrize("score", ["thr", "aps", "raps"])
@pytest.mark.parametrize("per", ["all", "exit", "class"])
@pytest.mark.parametrize("allow_empty", [True, False])
def test_sets_are_those_of_the_oracle(score: str, per: str, allow_empty: bool) -> None:
    probs, labels = probs_and_labels(1, 400)
    options = {"penalty": 0.05, "penalty_rank": 2}
    sets = ew.fit_sets(
        probs, labels, policy=POLICY, coverage=0.8, per=per, score=score, allow_empty=allow_empty, **options
    )
    exits = POLICY.exits(probs)
    at_exit = probs[exits, np.arange(400)]
    own = [oracle_score(row, y, score, 0.05, 2) for row, y in zip(at_exit, labels, strict=True)]
    limits: dict[int, float] = {}
    groups = {"all": np.zeros(400, int), "exit": exits, "class": labels}[per]
    for group in set(groups.tolist()):
        values = sorted(value for value, g in zip(own, groups, strict=True) if g == group)
        limits[group] = values[int(np.ceil(round((len(values) + 1) * 0.8, 9))) - 1]
    test, _ = probs_and_labels(2, 200)
    test_exits = POLICY.exits(test)
    masks = sets.simulate(test, POLICY)
    for row, exit, mask in zip(test[test_exits, np.arange(200)], test_exits.tolist(), masks, strict=True):
        for c in range(6):
            group = {"all": 0, "exit": exit, "class": c}[per]
            value = oracle_score(row, c, score, 0.05, 2)
            if abs(value - limits[group]) < 1e-9:  # sums in another order differ in the last bits
                continue
            forced = not allow_empty and c == int(row.argmax())
            assert mask[c] == (forced or value <= limits[group])


class _Probabilities(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A fitted classifier whose inputs are its probabilities."""

    def fit(self, x: Array, y: Array) -> "_Probabilities":
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, x: Array) -> Array:
        return x

    def predict(self, x: Array) -> Array:
        return self.classes_[x.argmax(axis=1)]


@pytest.mark.parametrize("coverage", [0.6, 0.9, 0.97])
def test_sets_are_those_of_mapie(coverage: float) -> None:
    """With one exit, a library made for it gives the same sets."""
    probs, labels = probs_and_labels(3, 500, exits=1)
    test, _ = probs_and_labels(4, 200, exits=1)
    policy = ew.Policy((-inf,))
    sets = ew.fit_sets(probs, labels, policy=policy, coverage=coverage, allow_empty=True)
    known, new = (values[0] / values[0].sum(axis=1, keepdims=True, dtype=np.float64) for values in (probs, test))
    theirs = SplitConformalClassifier(
        _Probabilities().fit(known, labels), confidence_level=coverage, conformity_score="lac", prefit=True
    ).conformalize(known, labels)
    _, masks = theirs.predict_set(new)
    (limit,) = sets.limits
    assert limit is not None
    clear = np.abs(sets.scores(test[0]) - limit) > 1e-6  # in float64 the sums of probabilities are closer to 1
    assert clear.mean() > 0.99
    assert np.array_equal(sets.simulate(test, policy)[clear], masks[:, :, 0][clear])


def test_adaptive_scores_are_those_of_mapie() -> None:
    """MAPIE always randomizes these sets, and tunes the penalty: only the sums up to a class can be compared."""
    probs, labels = probs_and_labels(3, 500, exits=1)
    sets = ew.fit_sets(probs, labels, policy=ew.Policy((-inf,)), score="aps")
    expected, _ = APSConformityScore.get_true_label_cumsum_proba(labels, probs[0].astype(np.float64), np.arange(6))
    assert sets.scores(probs[0])[np.arange(500), labels] == pytest.approx(expected[:, 0], abs=1e-12)


@given(st.integers(1, 5000), st.decimals("0.01", "0.99", places=2))
def test_the_number_of_samples_needed_is_the_smallest(samples: int, coverage: Any) -> None:
    level = float(coverage)
    assert (limit_rank(samples, level) <= samples) == (samples >= samples_needed(level))


def test_ranks_are_exact_where_floats_are_not() -> None:
    assert samples_needed(0.9) == 9
    assert samples_needed(0.99) == 99
    assert limit_rank(9, 0.9) == 9  # 10 * 0.9 must not become more than 9
    assert limit_rank(99, 0.07) == 7  # 100 * 0.07 is 7.000000000000001


@pytest.mark.parametrize(
    ("per", "samples", "message"),
    [
        ("all", 8, "a coverage of 0.9 needs at least 9 held-out samples, but there are 8"),
        ("exit", 30, "held-out samples at every exit that the policy takes, but exit"),
        ("class", 30, "held-out samples of every class, but class"),
    ],
)
def test_a_coverage_that_so_few_samples_cannot_give_is_refused(per: str, samples: int, message: str) -> None:
    probs, labels = probs_and_labels(5, samples)
    with pytest.raises(ew.InputError, match=message):
        ew.fit_sets(probs, labels, policy=POLICY, per=per)


def test_a_class_without_samples_is_named() -> None:
    probs, labels = probs_and_labels(6, 600)
    labels[labels == 2] = 3
    with pytest.raises(ew.InputError, match=r"class 2 has 0$"):
        ew.fit_sets(probs, labels, policy=POLICY, per="class")


def test_an_exit_that_no_sample_can_take_needs_none() -> None:
    policy = ew.Policy((0.5, inf, -inf))
    assert reachable_exits(policy).tolist() == [True, False, True]
    assert reachable_exits(ew.Policy((-inf, 0.5, -inf))).tolist() == [True, False, False]
    probs, labels = probs_and_labels(7, 300)
    sets = ew.fit_sets(probs, labels, policy=policy, per="exit")
    assert sets.limits[1] is None
    assert sets.samples[1] == 0


@given(st.integers(0, 1000), st.sampled_from(["thr", "aps", "raps"]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_more_coverage_never_takes_a_class_away(seed: int, score: str, randomized: bool) -> None:
    probs = random_probs(seed, 3, 60, 4, "float32")
    labels = np.random.default_rng(seed).integers(0, 4, 60)
    small, large = (
        ew.fit_sets(probs, labels, policy=POLICY, coverage=coverage, score=score, randomized=randomized)
        for coverage in (0.5, 0.9)
    )
    masks = small.simulate(probs, POLICY)
    assert not (masks & ~large.simulate(probs, POLICY)).any()
    assert masks.any(axis=1).all()  # no set is empty
    assert masks[np.arange(60), probs[POLICY.exits(probs), np.arange(60)].argmax(axis=1)].all()


def test_sets_survive_json() -> None:
    probs, labels = probs_and_labels(8, 300)
    for per in ("all", "exit", "class"):
        sets = ew.fit_sets(probs, labels, policy=POLICY, per=per, score="raps")
        assert ew.PredictionSets.from_dict(json.loads(json.dumps(sets.to_dict()))) == sets


@pytest.mark.parametrize(
    "change", [{"limits": [1, 2]}, {"score": "other"}, {"coverage": 1}, {"samples": "x"}, {"x": 1}]
)
def test_damaged_sets_are_refused(change: dict[str, Any]) -> None:
    probs, labels = probs_and_labels(8, 300)
    with pytest.raises(ew.InputError, match="not usable prediction sets"):
        ew.PredictionSets.from_dict({**ew.fit_sets(probs, labels, policy=POLICY).to_dict(), **change})


def test_sets_of_another_policy_are_refused() -> None:
    probs, labels = probs_and_labels(9, 300)
    sets = ew.fit_sets(probs, labels, policy=POLICY)
    with pytest.raises(ew.InputError, match="fitted for the thresholds and score of this policy"):
        sets.simulate(probs, ew.Policy((0.7, 0.5, -inf)))


def test_samples_of_the_policy_lose_the_guarantee_with_a_warning() -> None:
    probs, labels = probs_and_labels(10, 300)
    policy = ew.fit_policy(probs, labels, (1.0, 2.0, 3.0), budget=2.0)
    with pytest.warns(UserWarning, match="not guaranteed"):
        sets = ew.fit_sets(probs, labels, policy=policy)
    assert not sets.guaranteed
    other, other_labels = probs_and_labels(11, 300)
    assert ew.fit_sets(other, other_labels, policy=policy).guaranteed


def test_the_evaluation_counts_by_exit_and_by_class() -> None:
    probs, labels = probs_and_labels(12, 500)
    sets = ew.fit_sets(probs, labels, policy=POLICY, per="exit")
    result = ew.evaluate_sets(sets, probs, labels, policy=POLICY)
    masks, exits = sets.simulate(probs, POLICY), POLICY.exits(probs)
    covered = masks[np.arange(500), labels]
    assert result.coverage == covered.mean()
    assert result.mean_size == masks.sum() / 500
    for k, group in enumerate(result.by_exit):
        assert (group.samples, group.coverage) == ((exits == k).sum(), covered[exits == k].mean())
    assert sum(group.samples for group in result.by_class) == 500
    assert len(result.to_pandas()) == 3 + 6


@pytest.mark.slow
@pytest.mark.parametrize("score", ["thr", "aps", "raps"])
def test_coverage_on_random_splits_has_its_exact_distribution(score: str) -> None:
    """Of a random split, the covered test samples are beta-binomial: overall, and in each exit given its counts.

    Splits of one pool are independent permutations, so that the 1,000 results are independent draws.
    """
    pool, labels = probs_and_labels(13, 1000)
    exits = POLICY.exits(pool)
    rng = np.random.default_rng(0)
    outside = {"all": 0, "exit": 0}
    uniform: dict[str, list[float]] = {"all": [], "exit": []}
    trials = dict(outside)
    for _ in range(1000):
        order = rng.permutation(1000)
        fitted, test = order[:400], order[400:]
        for per in ("all", "exit"):
            sets = ew.fit_sets(
                pool[:, fitted], labels[fitted], policy=POLICY, per=per, score=score, allow_empty=True, coverage=0.9
            )
            masks = sets.simulate(pool[:, test], POLICY)
            covered = masks[np.arange(600), labels[test]]
            groups = exits[test] if per == "exit" else np.zeros(600, int)
            for group, samples in enumerate(sets.samples):
                mine = covered[groups == group]
                rank = limit_rank(samples, 0.9)
                law = scipy.stats.betabinom(len(mine), rank, samples + 1 - rank)
                low, high = law.cdf(mine.sum() - 1), law.cdf(mine.sum())
                outside[per] += bool(high < 0.005 or low > 0.995)
                uniform[per].append(low + rng.random() * (high - low))
                trials[per] += 1
    for per in outside:
        assert scipy.stats.binom.sf(outside[per] - 1, trials[per], 0.01) > 1e-3
        # Exits of one split are nearly independent; their probability transforms are uniform.
        assert scipy.stats.kstest(uniform[per], "uniform").pvalue > 1e-3


def test_sets_belong_to_thresholds_and_score() -> None:
    probs, labels = probs_and_labels(5, 400)
    sets = ew.fit_sets(probs, labels, policy=POLICY)
    other = ew.Policy(POLICY.thresholds, score="margin")
    with pytest.raises(ew.InputError, match="must be fitted for the thresholds and score of this policy"):
        sets.simulate(probs, other)


@pytest.mark.parametrize("options", [{"penalty": "x"}, {"penalty": -1}, {"penalty_rank": 1.5}])
def test_a_bad_penalty_is_refused(options: dict[str, Any]) -> None:
    probs, labels = probs_and_labels(5, 400)
    with pytest.raises(ew.InputError, match="penalty"):
        ew.fit_sets(probs, labels, policy=POLICY, score="raps", **options)


@pytest.mark.parametrize("exit", [-1, 3])
def test_exits_that_are_not_there_are_refused(exit: int) -> None:
    probs, labels = probs_and_labels(5, 400)
    sets = ew.fit_sets(probs, labels, policy=POLICY, per="exit", coverage=0.5)
    with pytest.raises(ew.InputError, match="`exits` must be from 0 to 2"):
        sets.masks(probs[0, :1], [exit])
