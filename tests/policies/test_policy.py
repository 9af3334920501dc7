import json
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from cases import COSTS, MILLISECONDS, exact, of_confidence, runtime_exits, with_draws, without_ties
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import agreements, first_exit_reached, public_counts, public_rule, random_probs

import exitwise as ew
from exitwise.core.predictions import ExitPrediction, Predictions
from exitwise.core.ties import break_ties
from exitwise.policies.cutoff_search import geometric_shares
from exitwise.policies.scores import SCORES, exit_scores

pytestmark = pytest.mark.numerical

kinds = st.sampled_from(["float32", "float64", "ties"])
seeds = st.integers(0, 10**6)
EIGHT = float(np.float32(0.8))  # scores are float32


class TestScores:
    @pytest.mark.parametrize("score", sorted(SCORES.keys() - {"patience"}))
    def test_larger_is_more_certain(self, score: str) -> None:
        """Confidence grows from 0.5 to 1, and the variance over draws falls."""
        probs = of_confidence([[0.5, 0.6, 0.9, 0.99, 1.0]])
        variance = np.array([[0.2, 0.1, 0.05, 0.01, 0.0]])
        preds = Predictions(probs.shape, lambda: iter([ExitPrediction(probs[0])]), lambda _: variance)
        scores = exit_scores(preds, score)[0]
        assert (np.diff(scores) > 0).all()
        assert scores[-1] == pytest.approx(SCORES[score].full_certainty)

    def test_each_matches_its_definition(self) -> None:
        preds = with_draws(0, 3, 20, "ties")
        probs = preds.probs.numpy()
        assert exact(preds).tolist() == probs.max(axis=2).tolist()
        assert exit_scores(preds, "entropy") == pytest.approx(-scipy.stats.entropy(probs, axis=2), rel=1e-6)
        assert preds.variance is not None
        assert exit_scores(preds, "variance") == pytest.approx(-preds.variance, rel=1e-6)
        ordered = np.sort(probs, axis=2)
        assert exact(preds, "margin").tolist() == (ordered[..., -1] - ordered[..., -2]).tolist()

    @given(seeds, st.integers(1, 6), st.integers(1, 20), kinds)
    @settings(max_examples=40, deadline=None)
    def test_patience_counts_the_exits_before_that_agree(self, seed: int, exits: int, samples: int, kind: str) -> None:
        probs = random_probs(seed, exits, samples, 3, kind)
        assert exact(probs, "patience").tolist() == agreements(probs)

    def test_one_class_has_the_full_margin(self) -> None:
        assert exact(np.ones((2, 3, 1)), "margin").tolist() == [[1.0] * 3] * 2

    @pytest.mark.parametrize("use", [exit_scores, lambda p, score: ew.sweep(p, costs=COSTS[:3], score=score)])
    def test_variance_needs_draws(self, use: Any) -> None:
        with pytest.raises(ew.InputError, match="'variance' needs draws"):
            use(random_probs(0, 3, 5, 4), "variance")

    @pytest.mark.parametrize(
        "use",
        [
            lambda preds: exit_scores(preds, "charm"),
            lambda preds: ew.sweep(preds, costs=COSTS[:3], score="charm"),
            lambda preds: ew.fit_policy(preds, costs=COSTS[:3], budget=2, score="charm"),
            lambda preds: ew.Policy((0.5, 0.5, -inf), score="charm"),
        ],
    )
    def test_an_unknown_one_is_refused(self, use: Any) -> None:
        known = "confidence, margin, entropy, variance, patience, learned(, auto)?"
        with pytest.raises(ew.InputError, match=f"`score` must be one of {known}, but got 'charm'"):
            use(random_probs(0, 3, 5, 4))


class TestTies:
    @given(seeds, st.integers(1, 30), kinds, st.sampled_from(list(SCORES)))
    @settings(max_examples=60, deadline=None)
    def test_the_hash_lies_below_the_score(self, seed: int, samples: int, kind: str, score: str) -> None:
        """Rounding to float32 restores the score, and the order of different scores does not change."""
        preds = with_draws(seed, 2, samples, kind)
        state = None
        for table, pred in zip(exit_scores(preds, score), preds.exits(variance=True), strict=True):
            values, state = SCORES[score].compute(pred, state)
            values = values.astype(np.float32)
            assert table.astype(np.float32).tolist() == values.tolist()
            assert (table >= values).all()
            order = np.argsort(values, kind="stable")
            grew = np.diff(values[order]) > 0
            assert (np.diff(table[order])[grew] > 0).all()

    @given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
    @settings(max_examples=300, deadline=None)
    def test_any_score_is_given_back_by_rounding(self, value: float) -> None:
        for sign in (1, -1):
            probs = random_probs(0, 1, 200, 5)[0]
            broken = break_ties(np.full(200, sign * value, dtype=np.float32), probs)
            assert (broken.astype(np.float32) == np.float32(sign * value)).all()

    @pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.5, -0.25, 1e-30, -3.0, 1.4e-45, 2.0, 7.9e-31, 2.2e-38])
    def test_equal_scores_are_broken_evenly(self, value: float) -> None:
        probs = random_probs(0, 1, 4000, 5)[0]
        broken = break_ties(np.full(4000, value, dtype=np.float32), probs)
        assert len(set(broken.tolist())) > 3990
        assert (broken.astype(np.float32) == np.float32(value)).all()
        step = broken.max() - broken.min()
        shares = np.histogram((broken - broken.min()) / step, bins=8, range=(0, 1))[0] / 4000
        assert shares == pytest.approx(1 / 8, abs=0.02)

    def test_it_hangs_on_the_probabilities_and_on_nothing_else(self) -> None:
        probs = random_probs(3, 1, 50, 7, "float32")[0]
        score = np.full(50, 0.5, dtype=np.float32)
        broken = break_ties(score, probs)
        order = np.random.default_rng(0).permutation(50)
        assert break_ties(score, probs[order]).tolist() == broken[order].tolist()
        assert break_ties(score, probs.astype(np.float64)).tolist() == broken.tolist()
        assert break_ties(score, np.asfortranarray(probs)).tolist() == broken.tolist()
        assert (break_ties(score, probs[:, ::-1]) != broken).all()

    def test_another_arithmetic_gives_the_same_hash_nearly_always(self) -> None:
        probs = random_probs(0, 1, 5000, 100)[0]
        noise = 1 + 1e-6 * np.random.default_rng(0).uniform(-1, 1, probs.shape)
        score = np.full(5000, 0.5, dtype=np.float32)
        assert (break_ties(score, probs) == break_ties(score, probs * noise)).mean() > 0.995

    def test_it_never_changes(self) -> None:
        """Thresholds in files depend on it."""
        probs = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [1.0, 0.0, 0.0]], dtype=np.float32)
        bits = (break_ties(np.ones(3, dtype=np.float32), probs) - 1) * 2.0**51
        assert bits.tolist() == [63022468.0, 13845312.0, 17373668.0]


class TestExits:
    @given(seeds, st.integers(1, 6), st.integers(1, 30), kinds, st.data())
    @settings(max_examples=80, deadline=None)
    def test_a_sample_takes_the_first_exit_that_reaches_its_threshold(
        self, seed: int, exits: int, samples: int, kind: str, data: st.DataObject
    ) -> None:
        score = data.draw(st.sampled_from(list(SCORES)))
        preds = with_draws(seed, exits, samples, kind)
        table = exact(preds, score)
        # Some of the thresholds are met exactly.
        values = st.sampled_from([inf, -inf, *table.ravel().tolist()]) | st.floats(-2, 1)
        thresholds = (*data.draw(st.lists(values, min_size=exits - 1, max_size=exits - 1)), -inf)
        thresholds = tuple(float(table.dtype.type(value)) for value in thresholds)
        policy = ew.Policy(thresholds, score)
        assert policy.exits(preds).tolist() == first_exit_reached(table.tolist(), thresholds)
        assert policy.exits_from_scores(exit_scores(preds, score)).tolist() == policy.exits(preds).tolist()
        assert runtime_exits(policy, preds) == policy.exits(preds).tolist()

    def test_tensors_and_arrays_take_the_same_exits(self) -> None:
        probs = random_probs(0, 3, 50, 4, "float32")
        policy = ew.Policy((0.9, 0.7, -inf))
        assert policy.exits(torch.from_numpy(probs)).tolist() == policy.exits(probs).tolist()
        assert set(policy.exits(probs)) == {0, 1, 2}

    def test_former_names_give_the_same(self) -> None:
        preds = with_draws(0, 2, 30)
        policy = ew.Policy((0.5, -inf))
        scores = exit_scores(preds)
        assert policy.exits_by(scores).tolist() == policy.exits_from_scores(scores).tolist()
        pred = next(preds.exits())
        mask, _ = policy.exit_mask(exit=0, pred=pred, state=None)
        former, _ = policy.stops(exit=0, said=pred, memory=None)
        assert former.tolist() == mask.tolist()
        assert 0 < mask.sum() < 30

    def test_another_number_of_exits_is_refused(self) -> None:
        with pytest.raises(ew.InputError, match="`preds` must have 2 exits as the policy has, but has 3"):
            ew.Policy((0.5, -inf)).exits(random_probs(0, 3, 5, 4))


class TestSweep:
    @given(seeds, st.integers(1, 6), st.integers(1, 40), kinds, st.sampled_from(list(SCORES)))
    @settings(max_examples=60, deadline=None)
    def test_is_the_rule_of_the_released_code_sample_by_sample(
        self, seed: int, exits: int, samples: int, kind: str, score: str
    ) -> None:
        preds = with_draws(seed, exits, samples, kind)
        table = exact(preds, score).tolist()
        policies = ew.sweep(preds, costs=COSTS[:exits], score=score)
        assert [policy.q for policy in policies] == [p / 20 for p in range(1, 40)]
        for p, policy in enumerate(policies, start=1):
            thresholds, taken = public_rule(table, p)
            assert list(policy.thresholds) == thresholds
            assert policy.exits(preds).tolist() == taken
            assert policy.cost == pytest.approx(fmean(COSTS[k] for k in taken))

    @pytest.mark.parametrize(
        ("exits", "samples", "p"), [(2, 39, 6), (2, 37, 17), (3, 111, 2), (3, 39, 8), (4, 5000, 20)]
    )
    def test_shares_that_are_whole_numbers_of_samples_are_not_rounded_down(
        self, exits: int, samples: int, p: int
    ) -> None:
        """An example: 39 samples in the ratio 1 to 6/20 are exactly 30 and 9."""
        probs = without_ties(0, exits, samples)
        taken = ew.sweep(probs, costs=COSTS[:exits])[p - 1].exits(probs)
        assert np.bincount(taken, minlength=exits).tolist() == public_counts(p, exits, samples)

    def test_shares_sum_to_one_however_extreme(self) -> None:
        for q in (1e-20, 0.05, 1.0, 1.95, 1e20):
            shares = geometric_shares(q, 40)
            assert shares.sum() == pytest.approx(1)
            if 0.01 < q < 100:
                assert shares[1:] / shares[:-1] == pytest.approx(q)

    def test_a_hand_worked_case(self) -> None:
        """q = 1 with three exits and six samples: two exit at each."""
        first = [0.9, 0.8, 0.7, 0.6, 0.55, 0.5]
        second = [0.5, 0.5, 0.6, 0.9, 0.8, 0.7]
        policy = ew.sweep(of_confidence([first, second, first]), costs=[1, 2, 6])[19]
        assert policy == ew.Policy((EIGHT, EIGHT, -inf), cost=3.0, strategy="public", q=1.0, costs=(1, 2, 6))
        # All samples tied at the threshold exit, and then fewer samples than its share reach the second exit.
        first = [0.9, 0.8, 0.8, 0.8, 0.8, 0.5]
        policy = ew.sweep(of_confidence([first, second, first]), costs=[1, 2, 6])[19]
        # A mean of six costs: another order of the sum may round 11/6 differently.
        assert policy.cost == pytest.approx(11 / 6, rel=1e-15)
        expected = ew.Policy((EIGHT, inf, -inf), cost=policy.cost, strategy="public", q=1.0, costs=(1, 2, 6))
        assert policy == expected

    def test_no_sample_exits_early_if_shares_are_below_one_sample(self) -> None:
        policies = ew.sweep(random_probs(0, 3, 1, 4), costs=[1, 2, 6])
        assert {policy.thresholds for policy in policies} == {(inf, inf, -inf)}
        assert {policy.cost for policy in policies} == {6.0}

    def test_all_samples_take_a_single_exit(self) -> None:
        policies = ew.sweep(random_probs(0, 1, 5, 4), costs=[3])
        assert {(policy.thresholds, policy.cost) for policy in policies} == {((-inf,), 3.0)}

    def test_the_unit_is_that_of_the_costs(self) -> None:
        assert {policy.unit for policy in ew.sweep(random_probs(0, 3, 5, 4), costs=MILLISECONDS)} == {"ms"}


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1, 2], "`costs` must have one value for each of 3 exits, but has 2"),
        ([1, 2, 3, 4], "one value for each of 3 exits, but has 4"),
        ([], "one per exit"),
        ([1, 3, 2], r"must grow from exit to exit, but got \[1.0, 3.0, 2.0\]"),
        ([1, 2, 2], "must grow"),
        ([-1, 2, 3], "must be positive"),
        ([0, 2, 3], "must be positive"),
        ([1, 2, nan], "finite"),
        ([1, 2, inf], "finite"),
        (["one", "two", "three"], "must be positive"),
        ([1, 2, 10**400], "finite"),
        (7, "`costs`"),
        (None, "`costs`"),
    ],
)
@pytest.mark.parametrize("use", [ew.sweep, lambda p, costs: ew.fit_policy(p, costs=costs, budget=2)])
def test_wrong_costs_are_refused(use: Any, costs: Sequence[float], message: str) -> None:
    with pytest.raises(ew.InputError, match=message) as caught:
        use(random_probs(0, 3, 5, 4), costs=costs)
    assert "`costs`" in str(caught.value)


class TestPolicy:
    @given(
        st.lists(st.floats(allow_nan=False), max_size=5),
        st.sampled_from(list(SCORES)),
        st.none() | st.floats(0, 1e12),
    )
    @settings(max_examples=60, deadline=None)
    def test_json_and_back(self, thresholds: list[float], score: str, cost: float | None) -> None:
        policy = ew.Policy((*thresholds, -inf), score, "ms", cost=cost, q=cost)
        text = json.dumps(policy.to_dict(), allow_nan=False)
        assert ew.Policy.from_dict(json.loads(text)) == policy

    def test_a_file_and_back(self, tmp_path: Path) -> None:
        policy = ew.fit_policy(without_ties(0, 3, 9), costs=MILLISECONDS, budget=11.99)
        assert inf in policy.thresholds
        policy.save(tmp_path / "new" / "policy.json")
        ew.Policy((-inf,)).save(tmp_path / "new" / "policy.json")
        policy.save(str(tmp_path / "new" / "policy.json"))
        assert ew.Policy.load(tmp_path / "new" / "policy.json") == policy
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["policy.json"]
        data = json.loads((tmp_path / "new" / "policy.json").read_text())
        assert (data["format"], data["version"]) == ("exitwise.policy", 1)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "not valid JSON"),
            ('{"format": "exitwise.policy", "version": 1, "thresh', "not valid JSON"),
            (b"\xff\xfe\x00", "not valid JSON"),
            ("1" * 5000, "not valid JSON"),
            ("[1, 2]", "must hold a JSON object, but holds a list"),
            ("{}", "must hold a policy of version 1"),
            ({"version": 2}, "must hold a policy of version 1"),
            ({"version": "1"}, "must hold a policy of version 1"),
            ({"version": None}, "must hold a policy of version 1"),
            ({"format": "exitwise.trace"}, "must hold a policy of version 1"),
            ({"thresholds": [0.5, "nan", "-inf"]}, "`thresholds` must be numbers"),
            ({"thresholds": [0.5, nan, "-inf"]}, "it holds NaN"),
            (
                '{"format": "exitwise.policy", "version": 1, "thresholds": ["-inf"], "cost": 1e999}',
                "`cost` must be fin",
            ),
            ({"budget": 10**400}, "`budget` must be finite, but got 1000"),
            ({"q": inf}, "it holds Infinity"),
            ({"costs": [1.0, 10**400]}, "`costs` must be finite"),
            (
                '{"format": "exitwise.policy", "version": 1, "thresholds": ["-inf"], "guarantee": '
                '{"tune": 5, "hold": 5, "epsilon": 1e999}}',
                "`guarantee.epsilon` must be finite, but got inf",
            ),
            ({"thresholds": [0.5, 0.4]}, "the last -inf"),
            ({"thresholds": []}, "one per exit"),
            ({"thresholds": None}, "not a usable policy"),
            ({"thresholds": ["high", "-inf"]}, "not a usable policy"),
            ({"thresholds": [[0.5], "-inf"]}, "not a usable policy"),
            ({"thresholds": [10**400, "-inf"]}, "not a usable policy"),
            ({"score": "charm"}, "`score` must be one of"),
            ({"score": ["confidence"]}, "`score` must be one of"),
            ({"fit": {"chosen": "auto"}}, "not a usable policy"),
            ({"guarantee": {"tune": 0, "hold": 0}}, "`tune` must be a whole number of at least 1, but got 0"),
            ({"guarantee": {"tune": "x", "hold": 5}}, "`tune` must be a whole number of at least 1, but got 'x'"),
            ({"guarantee": {"tune": 5, "hold": 5, "budget_delta": "x"}}, "`budget_delta` must be a number or None"),
            ({"fit": "good"}, "not a usable policy"),
            ({"colour": "blue"}, "not a usable policy"),
        ],
    )
    def test_a_broken_file_is_named_and_refused(self, tmp_path: Path, content: Any, message: str) -> None:
        path = tmp_path / "policy.json"
        if isinstance(content, dict):
            valid = {"format": "exitwise.policy", "version": 1, "thresholds": [0.5, "-inf"]}
            content = json.dumps({**valid, **content})
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ew.InputError, match=message) as caught:
            ew.Policy.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_thresholds_must_be_in_the_file(self) -> None:
        with pytest.raises(ew.InputError, match="thresholds"):
            ew.Policy.from_dict({"score": "confidence"})

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ew.InputError, match=r"none\.json does not exist"):
            ew.Policy.load(tmp_path / "none.json")

    @pytest.mark.parametrize("thresholds", [(), (0.5,), (0.5, nan, -inf), (nan,), (inf,), ("high", -inf)])
    def test_thresholds_are_numbers_and_the_last_is_minus_infinity(self, thresholds: Any) -> None:
        with pytest.raises(ew.InputError, match="`thresholds` must be numbers, one per exit, the last -inf"):
            ew.Policy(thresholds)
