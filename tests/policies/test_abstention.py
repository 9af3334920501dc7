"""Abstention: the share is met, and a certified error rate breaks its promise no more often than it may."""

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
from oracles import random_probs

import exitwise as ew
from exitwise.evaluation.answers import risk_curve

pytestmark = pytest.mark.numerical


@given(st.integers(0, 1000), st.integers(10, 80), st.floats(0.02, 0.95), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_share_of_these_samples_is_met(seed: int, samples: int, share: float, ties: bool) -> None:
    probs = random_probs(seed, 3, samples, 4, "float32")
    if ties:  # one confidence for all; hashes of the probabilities break the ties
        rng = np.random.default_rng(seed)
        rest = rng.dirichlet(np.ones(5), size=(3, samples)) * 0.3
        probs = np.concatenate([np.full((3, samples, 1), 0.7), rest], axis=2).astype(np.float32)
    abstention = ew.fit_abstention(probs, policy=POLICY, share=share)
    abstained = abstention.simulate(probs, POLICY)
    assert abstained.sum() == int(share * samples + 1e-9)
    assert abstention.answered == pytest.approx(1 - abstained.mean())
    confidence = probs[POLICY.exits(probs), np.arange(samples)].max(axis=1)
    if abstained.any():
        assert confidence[abstained].max() <= confidence[~abstained].min()


def test_only_the_last_exit_abstains_if_asked() -> None:
    probs, _ = probs_and_labels(1, 400)
    exits = POLICY.exits(probs)
    last = float((exits == 2).mean())
    abstention = ew.fit_abstention(probs, policy=POLICY, share=last / 2, at="last")
    abstained = abstention.simulate(probs, POLICY)
    assert abstained.sum() == int(last / 2 * 400 + 1e-9)
    assert (exits[abstained] == 2).all()
    everything = ew.fit_abstention(probs, policy=POLICY, share=last, at="last")
    assert np.array_equal(everything.simulate(probs, POLICY), exits == 2)
    with pytest.raises(ew.InputError, match="cannot abstain at the last exit, which only"):
        ew.fit_abstention(probs, policy=POLICY, share=last + 0.1, at="last")


@pytest.mark.parametrize("at", ["exit", "last"])
def test_a_certified_risk_holds_on_these_samples(at: str) -> None:
    probs, labels = probs_and_labels(2, 3000)
    exits = POLICY.exits(probs)
    wrong = probs[exits, np.arange(3000)].argmax(axis=1) != labels
    error = float(wrong.mean())
    # At the last exit, no abstention makes fewer errors than those who exit before.
    risk = error * 0.9 if at == "exit" else (2 * wrong[exits < 2].mean() + error) / 3 + 0.02
    abstention = ew.fit_abstention(probs, labels, policy=POLICY, risk=risk, delta=0.05, at=at)
    result = ew.evaluate_abstention(abstention, probs, labels, policy=POLICY)
    assert result.error is not None
    assert result.error < risk
    assert abstention.risk_limit is not None
    assert abstention.risk_limit <= risk
    assert 0.05 < result.answered < 1
    easy = ew.fit_abstention(probs, labels, policy=POLICY, risk=min(0.99, error * 1.3), at=at)
    assert easy.threshold == -inf
    assert not easy.simulate(probs, POLICY).any()


def test_a_risk_that_no_threshold_certifies_is_refused_with_the_reason() -> None:
    probs, labels = probs_and_labels(3, 200)
    with pytest.raises(ew.NotCertifiedError, match=r"at most 0.1 % cannot be certified on 160 held-out samples: among"):
        ew.fit_abstention(probs, labels, policy=POLICY, risk=0.001)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one of `share` and `risk`"),
        ({"share": 0.1, "risk": 0.1}, "one of `share` and `risk`"),
        ({"share": 1.5}, "`share` must be a number between 0 and 1"),
        ({"risk": 0.1}, "`labels` are needed"),
        ({"share": 0.1, "at": "first"}, "`at` must be one of exit, last"),
        ({"risk": 0.1, "labels": [0] * 50, "delta": 0}, "`delta` must be"),
        ({"risk": 0.1, "labels": [0] * 50, "tune": np.ones((3, 2, 1))}, "given together"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ew.InputError, match=message):
        ew.fit_abstention(probs_and_labels(4, 50)[0], policy=POLICY, **arguments)


def test_it_survives_json() -> None:
    probs, labels = probs_and_labels(5, 2000)
    for options in ({"share": 0.1}, {"risk": 0.5}, {"risk": 0.95}):
        abstention = ew.fit_abstention(probs, labels, policy=POLICY, **options)
        assert ew.Abstention.from_dict(json.loads(json.dumps(abstention.to_dict()))) == abstention
    for change in ({"threshold": "x"}, {"at": "x"}, {"answered": 2}, {"x": 1}):
        with pytest.raises(ew.InputError, match="not a usable abstention"):
            ew.Abstention.from_dict({**abstention.to_dict(), **change})


def test_the_curve_is_the_mean_of_running_error_rates() -> None:
    rng = np.random.default_rng(0)
    confidence, wrong = rng.random(50), rng.random(50) < 0.3
    order = np.argsort(-confidence)
    errors = [wrong[order][: m + 1].mean() for m in range(50)]
    curve = risk_curve(confidence, wrong)
    assert curve.aurc == pytest.approx(np.mean(errors))
    assert curve.error == pytest.approx(errors)
    tied = risk_curve(np.zeros(50), wrong)
    assert tied.error == pytest.approx([wrong.mean()] * 50)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["exit", "last"])
@pytest.mark.parametrize("separate", [True, False])
def test_the_promise_is_broken_in_at_most_delta_of_the_draws(at: str, separate: bool) -> None:
    """The pool is the population, and samples are drawn with replacement, so that the true error rate is known."""
    pool, labels = probs_and_labels(6, 4000)
    exits = POLICY.exits(pool)
    probs = pool[exits, np.arange(4000)]
    wrong = probs.argmax(axis=1) != labels
    rng = np.random.default_rng(1)
    broken, risk, delta = 0, float(wrong.mean()) * 0.8, 0.1
    samples = 800
    if at == "last":  # of the early exits, all samples are answered: little is left to choose from
        samples, risk = 2000, 0.2 * float(wrong[exits < 2].mean()) + 0.8 * float(wrong.mean())
    answered = []
    for _ in range(1000):
        rows, other = rng.integers(0, 4000, samples), rng.integers(0, 4000, 400)
        tune = {"tune": pool[:, other], "tune_labels": labels[other]} if separate else {}
        try:
            abstention = ew.fit_abstention(
                pool[:, rows], labels[rows], policy=POLICY, risk=risk, delta=delta, at=at, **tune
            )
        except ew.NotCertifiedError:
            continue
        mask = ~abstention.mask(probs, exits)
        broken += bool(wrong[mask].mean() > risk)
        answered.append(mask.mean())
    assert scipy.stats.binom.sf(broken - 1, 1000, delta) > 1e-3
    assert len(answered) > 500  # the promise is not kept by refusing
