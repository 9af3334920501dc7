"""Bounds and certificates: against exact probabilities, and with held-out samples drawn many times."""

from itertools import pairwise
from math import inf, log
from typing import Any

import numpy as np
import pytest
import scipy.stats
from cases import COSTS
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_probs

import exitwise as ew
from exitwise.core.predictions import Predictions
from exitwise.policies.bounds import MeanUpperBound, choose_tightest_bound, estimate_samples_needed
from exitwise.policies.certify import FixedSequenceTest, PolicyOutcomes, nested_cheaper_policies
from exitwise.policies.fit import PolicyFitter
from exitwise.policies.scores import exit_scores

pytestmark = pytest.mark.numerical

VALUES = np.array([0.0, 0.2, 0.7, 1.0])


def too_many(failures: int, trials: int, delta: float) -> bool:
    """Return whether chance does not explain the failures, if each trial fails with probability delta."""
    return float(scipy.stats.binom.sf(failures - 1, trials, delta)) < 1e-3


class TestBounds:
    @pytest.mark.parametrize(
        "bound",
        [MeanUpperBound(), MeanUpperBound(0.1), MeanUpperBound(0.5), MeanUpperBound(3.0), MeanUpperBound(100.0)],
    )
    @pytest.mark.parametrize("shares", [(0.25, 0.25, 0.25, 0.25), (0.9, 0.0, 0.0, 0.1), (0.0, 0.5, 0.5, 0.0)])
    @pytest.mark.parametrize("samples", [5, 60, 1000])
    def test_the_limit_is_below_the_mean_no_more_often_than_it_may_be(
        self, bound: MeanUpperBound, shares: tuple[float, ...], samples: int
    ) -> None:
        rng = np.random.default_rng(samples)
        mean, delta, trials = float(VALUES @ shares), 0.1, 1500
        counts = rng.multinomial(samples, shares, size=trials)
        wrong = sum(bound.p_value(VALUES, drawn, mean) <= delta for drawn in counts)
        assert not too_many(wrong, trials, delta)

    @pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.97])
    @pytest.mark.parametrize("samples", [1, 20, 500])
    def test_hoeffding_bentkus_is_the_smaller_of_both(self, samples: int, share: float) -> None:
        """The formulas are those of Bates et al. (2021), with scipy's binomial distribution."""
        for correct in sorted({0, 1, samples // 3, samples - 1, samples}):
            mean = correct / samples
            counts = np.array([samples - correct, 0, 0, correct])
            if mean >= share:
                expected = 1.0
            else:
                entropy = (mean * log(mean / share) if mean else 0) + (1 - mean) * log((1 - mean) / (1 - share))
                bentkus = np.e * scipy.stats.binom.cdf(correct, samples, share)
                expected = min(1.0, np.exp(-samples * entropy), bentkus)
            assert MeanUpperBound().p_value(VALUES, counts, share) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("share", [0.01, 0.3, 0.97])
    @pytest.mark.parametrize("samples", [1, 20, 500])
    def test_of_binary_values_it_is_the_binomial_distribution(self, samples: int, share: float) -> None:
        """As SciPy has it; its limit is that of Clopper and Pearson."""
        values, bound = np.array([0.0, 1.0]), MeanUpperBound(binary=True)
        for wrong in sorted({0, 1, samples // 3, samples - 1}):
            counts = np.array([samples - wrong, wrong])
            expected = scipy.stats.binom.cdf(wrong, samples, share)
            assert bound.p_value(values, counts, share) == pytest.approx(expected, rel=1e-9)
            limit = scipy.stats.binomtest(wrong, samples).proportion_ci(0.9, "exact").high
            assert bound.upper_limit(values, counts, 0.05) == pytest.approx(limit, abs=1e-9)

    def test_betting_is_a_product_over_samples(self) -> None:
        rng = np.random.default_rng(0)
        drawn = rng.choice(VALUES, size=200, p=(0.4, 0.3, 0.2, 0.1))
        counts = np.array([(drawn == value).sum() for value in VALUES])
        wealth = np.prod(1 + 0.3 * (0.4 - drawn))
        assert MeanUpperBound(0.3).p_value(VALUES, counts, 0.4) == pytest.approx(min(1, 1 / wealth))

    @given(st.lists(st.integers(0, 300), min_size=4, max_size=4).filter(any), st.sampled_from([None, 0.2, 2.0]))
    @settings(max_examples=60, deadline=None)
    def test_the_upper_limit_is_where_the_test_turns(self, counts: list[int], stake: float | None) -> None:
        bound, observed = MeanUpperBound(stake), np.array(counts)
        limit = bound.upper_limit(VALUES, observed, 0.05)
        assert bound.p_value(VALUES, observed, limit) <= 0.05
        assert float(VALUES @ observed) / observed.sum() <= limit <= 1
        if limit < 1:
            assert bound.p_value(VALUES, observed, limit - 1e-9) > 0.05 - 1e-6

    def test_the_tightest_is_betting_where_there_is_little_variance(self) -> None:
        """Hoeffding's and Bentkus's bounds use only the range."""
        little, much = np.array([0, 500, 500, 0]), np.array([500, 0, 0, 500])
        assert choose_tightest_bound(VALUES, little, 1000, 0.05).name == "betting"
        assert choose_tightest_bound(VALUES, much, 1000, 0.05).name == "hoeffding-bentkus"

    def test_the_estimated_number_of_samples_suffices(self) -> None:
        shares = np.array([0.4, 0.3, 0.2, 0.1])
        mean = float(VALUES @ shares)
        for limit in (mean + 0.02, mean + 0.05, mean + 0.2):
            needed = estimate_samples_needed(VALUES, shares * 100, limit, 0.05)
            assert needed is not None
            assert (
                0.5
                < choose_tightest_bound(VALUES, shares, needed, 0.05).upper_limit(VALUES, shares * needed, 0.05) / limit
                < 1.02
            )
            fewer = shares * needed / 2
            assert choose_tightest_bound(VALUES, shares, needed // 2, 0.05).upper_limit(VALUES, fewer, 0.05) > limit
        assert estimate_samples_needed(VALUES, shares, mean, 0.05) is None


class TestCertificate:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"budget_delta": 0.0}, "`budget_delta` must be a number between 0 and 1, but got 0.0"),
            ({"budget_delta": 1}, "`budget_delta`"),
            ({"budget_delta": "5%"}, "`budget_delta`"),
            ({"hold": 1.0}, "`hold`"),
            ({"hold": None}, "`hold` must be a number between 0 and 1, but got None"),
            ({"risk": "speed", "epsilon": 0.1}, "`risk` must be one of accuracy, disagreement or None"),
            ({"risk": "accuracy"}, "must be given together"),
            ({"epsilon": 0.1}, "must be given together"),
            ({"risk": "accuracy", "epsilon": 0}, "`epsilon` must be a number between 0 and 1"),
            ({"budget_delta": None}, "needs `budget_delta`, or a `risk`"),
            ({"risk_delta": 0.1}, "`risk_delta` needs a `risk`"),
            ({"seed": -1}, "`seed`"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ew.InputError, match=message):
            ew.Certificate(**options)

    def test_the_error_is_split_between_both(self) -> None:
        assert ew.Certificate(0.1).deltas == (0.1, None)
        assert ew.Certificate(0.1, "accuracy", 0.01).deltas == (0.05, 0.05)
        assert ew.Certificate(0.1, "accuracy", 0.01, 0.02).deltas == (0.1, 0.02)
        assert ew.Certificate(None, "accuracy", 0.01).deltas == (None, 0.05)


def population(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (K, n, c) of three exits, each better than the one before, and labels (n,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, samples)
    logits = rng.normal(size=(3, samples, 4))
    logits[:, np.arange(samples), labels] += np.array([0.8, 1.4, 2.2])[:, None]
    probs = np.exp(1.5 * logits)
    return probs / probs.sum(axis=2, keepdims=True), labels


class TestCertified:
    @pytest.mark.slow
    def test_the_mean_cost_of_fresh_samples_is_within_the_budget(self) -> None:
        """Held-out samples are drawn 400 times; the true mean cost of a policy is that of 200,000 samples."""
        costs, budget, delta = ew.Costs((1.0, 3.0, 9.0)), 4.0, 0.1
        tune, tune_labels = population(0, 800)
        fitter = PolicyFitter(tune, tune_labels, costs)
        table = exit_scores(tune)
        policies = nested_cheaper_policies(fitter.fit(budget, "geometric"), table, costs)
        everything, population_labels = population(1, 200_000)
        preds = Predictions.of(everything)
        truth = PolicyOutcomes.from_predictions(policies, preds, None, preds.predicted[-1], population_labels)
        true_costs = np.asarray(costs.values)[truth.exits].mean(axis=1)
        on_tune = PolicyOutcomes.from_predictions(policies, Predictions.of(tune), None, tune_labels, tune_labels)
        test = FixedSequenceTest(policies, on_tune, 500, ew.Certificate(delta), costs, reference_is_last_exit=True)
        rng = np.random.default_rng(2)
        chosen = [test.select(truth.take(rng.integers(0, 200_000, 500)), budget) for _ in range(400)]
        assert not too_many(int((true_costs[chosen] > budget).sum()), 400, delta)
        assert 0.9 * budget < true_costs[chosen].mean() < budget  # most of the budget is used

    @pytest.mark.parametrize("risk", ["accuracy", "disagreement"])
    @pytest.mark.slow
    def test_no_more_is_lost_than_allowed(self, risk: str) -> None:
        costs, epsilon, delta = ew.Costs((1.0, 3.0, 9.0)), 0.05, 0.1
        tune, tune_labels = population(0, 800)
        fitter = PolicyFitter(tune, tune_labels, costs)
        policies = [fitter.fit(float(budget), "geometric") for budget in np.linspace(1, 9, 60)]
        everything, labels = population(1, 100_000)
        preds = Predictions.of(everything)
        truth = PolicyOutcomes.from_predictions(policies, preds, risk, preds.predicted[-1], labels)
        assert truth.losses is not None
        true_losses = truth.losses.mean(axis=1)
        tuned = Predictions.of(tune)
        on_tune = PolicyOutcomes.from_predictions(policies, tuned, risk, tuned.predicted[-1], tune_labels)
        test = FixedSequenceTest(
            policies,
            on_tune,
            1000,
            ew.Certificate(None, risk, epsilon, delta),
            costs,
            reference_is_last_exit=True,
        )
        rng = np.random.default_rng(2)
        chosen = [test.select(truth.take(rng.integers(0, 100_000, 1000)), None) for _ in range(400)]
        assert not too_many(int((true_losses[chosen] > epsilon).sum()), 400, delta)
        assert np.mean(chosen) < 55  # it saves some cost

    def test_it_is_the_last_that_holds_and_not_the_first_that_fails(self) -> None:
        """Every policy up to the selected one passes on these samples, the next does not."""
        costs = ew.Costs((1.0, 3.0, 9.0))
        tune, labels = population(0, 500)
        hold, hold_labels = population(1, 700)
        fitter = PolicyFitter(tune, labels, costs)
        policies = nested_cheaper_policies(fitter.fit(4.0, "geometric"), exit_scores(tune), costs)
        on_tune = PolicyOutcomes.from_predictions(policies, Predictions.of(tune), None, labels, labels)
        outcomes = PolicyOutcomes.from_predictions(policies, Predictions.of(hold), None, hold_labels, hold_labels)
        test = FixedSequenceTest(policies, on_tune, 700, ew.Certificate(0.05), costs, reference_is_last_exit=True)
        chosen = test.select(outcomes, 4.0)
        passes = [test.passes("cost", index, outcomes, 4.0) for index in range(len(policies))]
        assert all(passes[: chosen + 1])
        assert not passes[chosen + 1]
        assert 0 < chosen < len(policies) - 1

    def test_cheaper_ones_are_nested(self) -> None:
        tune, labels = population(0, 300)
        costs = ew.Costs((1.0, 3.0, 9.0))
        for score in ("confidence", "margin", "entropy", "patience"):
            table = exit_scores(tune, score)
            fitted = PolicyFitter(tune, labels, costs, score=score).fit(6.0, "geometric")
            exits = [policy.exits_from_scores(table) for policy in nested_cheaper_policies(fitted, table, costs)]
            assert set(exits[0]) == {0}
            assert exits[-1].tolist() == fitted.exits_from_scores(table).tolist()
            for less, more in pairwise(exits):
                assert (less <= more).all()

    def test_the_guarantee_records_limits_and_numbers_of_samples(self) -> None:
        probs, labels = population(0, 1001)
        policy = ew.fit_policy(probs, labels, [1, 3, 9], budget=4, certify=ew.Certificate(0.05, hold=0.4, seed=7))
        guarantee = policy.guarantee
        assert guarantee is not None
        assert (guarantee.tune, guarantee.hold, guarantee.seed) == (601, 400, 7)
        assert (guarantee.budget, guarantee.budget_delta) == (4.0, 0.05)
        assert policy.budget == 4.0
        assert policy.cost < guarantee.cost_limit <= 4  # type: ignore[operator]
        assert (guarantee.risk, guarantee.epsilon, guarantee.risk_limit) == (None, None, None)
        again = ew.Policy.from_dict(policy.to_dict())
        assert again == policy

    def test_thresholds_see_the_tune_part_only(self) -> None:
        """The thresholds are a shift of those fitted on the tuning samples, for any labels of the held-out samples."""
        probs, labels = population(0, 1000)
        order = np.random.default_rng(0).permutation(1000)
        rest = np.sort(order[500:])
        tuned = ew.fit_policy(probs[:, rest], labels[rest], [1, 3, 9], budget=4, strategy="optimized")
        policy = ew.fit_policy(probs, labels, [1, 3, 9], budget=4, strategy="optimized", certify=ew.Certificate())
        ratios = {
            round((1 - shifted) / (1 - original), 5)
            for shifted, original in zip(policy.thresholds, tuned.thresholds, strict=True)
            if abs(original) != inf
        }
        assert len(ratios) == 1

    def test_both_at_once(self) -> None:
        probs, labels = population(0, 6000)
        certificate = ew.Certificate(0.1, "accuracy", 0.15)
        policy = ew.fit_policy(probs, labels, [1, 3, 9], budget=6, certify=certificate)
        guarantee = policy.guarantee
        assert guarantee is not None
        assert (guarantee.budget_delta, guarantee.risk_delta) == (0.05, 0.05)
        assert guarantee.cost_limit <= 6  # type: ignore[operator]
        assert guarantee.risk_limit <= 0.15  # type: ignore[operator]
        fresh, fresh_labels = population(9, 50_000)
        result = ew.evaluate(fresh, labels=fresh_labels, policy=policy, costs=[1, 3, 9])
        assert result.cost < 6
        assert result.per_exit[-1].top1 - result.top1 < 0.15

    @pytest.mark.slow
    def test_without_a_budget_it_is_the_cheapest_that_keeps_to_the_risk(self) -> None:
        probs, labels = population(0, 6000)
        costs = []
        for epsilon in (0.02, 0.05, 0.15):
            policy = ew.fit_policy(
                probs, labels, [1, 3, 9], budget=None, certify=ew.Certificate(None, "accuracy", epsilon)
            )
            assert policy.guarantee is not None
            assert policy.guarantee.risk_limit <= epsilon  # type: ignore[operator]
            assert policy.guarantee.budget is None
            costs.append(policy.cost)
        assert costs[0] > costs[1] > costs[2]

    def test_against_another_net(self) -> None:
        """With a reference that is always correct, the loss is the error rate."""
        probs, labels = population(0, 4000)
        perfect = np.full_like(probs[-1:], 1e-6)
        perfect[0, np.arange(4000), labels] = 1 - 3e-6
        certificate = ew.Certificate(None, "accuracy", 0.5)
        policy = ew.fit_policy(probs, labels, [1, 3, 9], budget=9, certify=certificate, reference=perfect)
        assert policy.guarantee is not None
        held_out = np.sort(np.random.default_rng(0).permutation(4000)[:2000])
        error = 1 - ew.evaluate(probs[:, held_out], labels=labels[held_out], policy=policy, costs=[1, 3, 9]).top1
        assert error < policy.guarantee.risk_limit < error + 0.05  # type: ignore[operator]
        certificate = ew.Certificate(None, "accuracy", 0.1)
        with pytest.raises(ew.NotCertifiedError, match="it is 1"):
            ew.fit_policy(probs, labels, [1, 3, 9], budget=9, certify=certificate, reference=perfect)

    def test_a_budget_that_only_the_first_exit_keeps_to(self) -> None:
        probs, labels = population(0, 200)
        policy = ew.fit_policy(probs, labels, [1, 3, 9], budget=1, certify=ew.Certificate(0.01))
        assert set(policy.exits(probs)) == {0}
        assert policy.guarantee is not None
        assert policy.guarantee.cost_limit == 1

    @pytest.mark.parametrize("score", ["patience", "confidence"])
    def test_ties_can_be_certified_in_part(self, score: str) -> None:
        """Ties of whole numbers, or of confidences of 1: cheaper policies break them by their hash as well."""
        probs, labels = population(0, 4000)
        if score == "confidence":
            probs = np.where(probs == probs.max(axis=2, keepdims=True), 1.0, probs * 1e-9).astype(np.float32)
        policy = ew.fit_policy(
            probs, labels, [1, 3, 9], budget=4, score=score, strategy="geometric", certify=ew.Certificate()
        )
        assert policy.cost > 0.85 * 4  # type: ignore[operator]

    def test_too_few_samples_are_reported_with_a_number_that_suffices(self) -> None:
        probs, labels = population(0, 500)
        hold, hold_labels = population(1, 4)
        with pytest.raises(ew.NotCertifiedError, match=r"on 4 held-out samples; about \d+ suffice for a policy"):
            ew.fit_policy(
                probs, labels, [1, 3, 9], budget=4, certify=ew.Certificate(), held_out=hold, held_out_labels=hold_labels
            )

    def test_its_fit_is_its_own(self) -> None:
        probs, labels = population(0, 1000)
        rest = np.sort(np.random.default_rng(0).permutation(1000)[500:])
        policy = ew.fit_policy(probs, labels, [1, 3, 9], budget=4, certify=ew.Certificate())
        result = ew.evaluate(probs[:, rest], labels=labels[rest], policy=policy, costs=[1, 3, 9])
        assert policy.fit is not None
        assert policy.fit.value == pytest.approx(result.top1)
        assert policy.fit.gap is None
        assert policy.cost == pytest.approx(result.cost)
        assert policy.q is None

    def test_without_a_budget_all_of_the_error_is_the_risks(self) -> None:
        probs, labels = population(0, 6000)
        policy = ew.fit_policy(probs, labels, [1, 3, 9], budget=None, certify=ew.Certificate(0.06, "accuracy", 0.1))
        assert policy.guarantee is not None
        assert (policy.guarantee.budget_delta, policy.guarantee.risk_delta) == (None, 0.06)

    def test_costs_that_are_not_whole_numbers(self) -> None:
        """The mean of equal costs rounds to more than the cost: the last exit is still within its own cost."""
        probs, labels = population(0, 5000)
        costs = ew.Costs((0.3, 0.5, 0.7), "ms")
        assert ew.fit_policy(probs, costs=costs, budget=0.7).thresholds == (inf, inf, -inf)
        certificate = ew.Certificate(None, "disagreement", 3e-4)
        assert ew.fit_policy(probs, labels, costs, budget=None, certify=certificate).thresholds == (inf, inf, -inf)

    def test_one_exit(self) -> None:
        policy = ew.fit_policy(random_probs(0, 1, 10, 4), costs=[3], budget=3, certify=ew.Certificate())
        assert policy.thresholds == (-inf,)

    def test_if_nothing_can_be_certified_the_error_names_what_suffices(self) -> None:
        probs, labels = population(0, 200)
        certificate = ew.Certificate(0.05, "accuracy", 0.02)
        with pytest.raises(
            ew.NotCertifiedError, match=r"on 100 held-out samples it is .* %; about [\d,]+ such samples suffice"
        ):
            ew.fit_policy(probs, labels, [1, 3, 9], budget=8.9, certify=certificate)
        with pytest.raises(ew.NotCertifiedError, match="no number of samples suffices"):
            ew.fit_policy(probs, labels, [1, 3, 9], budget=1.5, certify=certificate)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"certify": 0.05}, "`certify` must be a Certificate, but got 0.05"),
            ({"certify": None, "held_out": random_probs(0, 3, 9, 4)}, "are for a certificate: give `certify`"),
            ({"held_out_labels": [0]}, "`held_out_labels` need their predictions"),
            ({"held_out": random_probs(0, 2, 9, 4)}, r"`held_out` must have .*, \(3, 4\), but has \(2, 4\)"),
            ({"reference": random_probs(0, 1, 7, 4)}, "`reference` must have the 20 samples"),
            ({"labels": None, "certify": ew.Certificate(0.1, "accuracy", 0.1)}, "`labels` are needed to certify"),
            ({"budget": None}, "`budget` is needed"),
            ({"budget": 100}, "`budget` must lie between"),
            ({"preds": random_probs(0, 3, 4, 4), "labels": None}, "at least as many samples as exits"),
            ({"certify": ew.Certificate(hold=0.001)}, "20 samples cannot be split"),
        ],
    )
    def test_bad_input(self, changed: dict[str, Any], message: str) -> None:
        probs = random_probs(0, 3, 20, 4)
        usual = {"preds": probs, "labels": [0] * 20, "costs": COSTS[:3], "budget": 2, "certify": ew.Certificate()}
        with pytest.raises(ew.InputError, match=message) as caught:
            ew.fit_policy(**{**usual, **changed})
        assert "\n" not in str(caught.value)


class TestAliases:
    def test_former_names_of_fit_policy_give_the_same_policy(self) -> None:
        probs, labels = population(0, 600)
        held_out, held_out_labels = population(1, 900)
        certificate = ew.Certificate(0.1, "accuracy", 0.3)
        shared: dict[str, Any] = {"budget": 6, "certify": certificate}
        given = {"held_out": held_out, "held_out_labels": held_out_labels, "reference": held_out[-1:]}
        former = {"hold": held_out, "hold_labels": held_out_labels, "against": held_out[-1:]}
        policy = ew.fit_policy(probs, labels, [1, 3, 9], **shared, **given)
        assert policy == ew.fit_policy(probs, labels, [1, 3, 9], **shared, **former)
        for name, old in zip(given, former, strict=True):
            with pytest.raises(ew.InputError, match=f"`{name}` and its former name `{old}` must not both be given"):
                ew.fit_policy(probs, labels, [1, 3, 9], **shared, **given, **{old: former[old]})

    def test_counts_and_fractions_have_clear_names_that_files_do_not_contain(self) -> None:
        probs, labels = population(0, 1000)
        certificate = ew.Certificate(0.1, hold=0.3)
        assert certificate.held_out_fraction == 0.3
        policy = ew.fit_policy(probs, labels, [1, 3, 9], budget=5, certify=certificate)
        guarantee, fit = policy.guarantee, policy.fit
        assert guarantee is not None
        assert fit is not None
        assert (guarantee.num_tune, guarantee.num_held_out) == (guarantee.tune, guarantee.hold) == (700, 300)
        assert fit.used_labels is fit.labelled is True
        data = policy.to_dict()
        assert {"tune", "hold"} <= set(data["guarantee"])
        assert not {"num_tune", "num_held_out"} & set(data["guarantee"])
        assert "used_labels" not in data["fit"]


@pytest.mark.parametrize("seed", [0, 5])
def test_a_trace_and_fit_policy_hold_out_the_same_samples(seed: int) -> None:
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    calibration = ew.calibrate(trace, "MSDNet (vanilla)")
    tune, held_out = trace.hold_out(0.4, seed)
    certificate = ew.Certificate(0.05, hold=0.4, seed=seed)
    shared: dict[str, Any] = {"budget": 2e7, "strategy": "geometric", "certify": certificate}
    split_here = ew.fit_policy(calibration.predict(trace.val), costs=trace.costs, **shared)
    preds = calibration.predict(tune.val)
    split_before = ew.fit_policy(preds, costs=trace.costs, **shared, held_out=calibration.predict(held_out))
    assert split_here.guarantee is not None
    assert split_before.guarantee is not None
    assert split_here.thresholds == pytest.approx(split_before.thresholds, rel=1e-6)
    assert split_here.guarantee.seed == seed
    assert split_here.guarantee.cost_limit == pytest.approx(split_before.guarantee.cost_limit, rel=1e-6)
