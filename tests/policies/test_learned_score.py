"""The learned exit score: its fit against scikit-learn, honest scores, files, and the same answers exit by exit."""

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_probs
from sklearn.linear_model import LogisticRegression

import exitwise as ew
from exitwise.core.predictions import ExitPrediction, Predictions
from exitwise.core.stopping import stopping_target
from exitwise.policies import learned_score
from exitwise.policies.learned_score import LearnedScore, cross_fit, split_folds
from exitwise.policies.score_choice import describe_choice, fit_score
from exitwise.policies.scores import exit_scores

COSTS = (1.0, 2.0, 3.0, 4.0)


def hopeless_case(seed: int = 0, samples: int = 3000, classes: int = 6) -> tuple[Predictions, np.ndarray]:
    """Return predictions of four exits and labels, where confidence is a poor score.

    A third of the samples is hopeless: every exit spreads its probability over three wrong classes, so that the
    confidence is low. Of the others, which later exits get right, early exits are more confident.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    hopeless = rng.random(samples) < 0.35
    rows = np.arange(samples)
    probs = []
    for exit in range(4):
        logits = rng.normal(size=(samples, classes)) * 0.7
        logits[rows, labels] += np.where(hopeless, -3, 1.5 + exit)
        for shift in (1, 2, 3):
            logits[rows, (labels + shift) % classes] += np.where(hopeless, 2.5, 2.0 if shift == 1 else 0)
        exps = np.exp(logits)
        probs.append(exps / exps.sum(axis=1, keepdims=True))
    return Predictions.of(np.stack(probs).astype(np.float32)), labels


class TestFit:
    @pytest.mark.numerical
    @pytest.mark.parametrize("seed", range(5))
    def test_is_that_of_scikit_learn(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        features = rng.normal(size=(300, 6)) * rng.uniform(0.1, 5, 6) + rng.normal(size=6)
        right = rng.random(300) < 1 / (1 + np.exp(-features[:, 0] + 0.3 * features[:, 2]))
        penalty = np.array([learned_score._MARGIN_PENALTY, *[learned_score._PENALTY] * 5])
        scale = features.std(axis=0) * np.sqrt(penalty)  # scikit-learn has one penalty, ours differ by feature
        oracle = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000)
        oracle.fit((features - features.mean(axis=0)) / scale, right)
        weights = oracle.coef_[0] / scale
        intercept = oracle.intercept_[0] - weights @ features.mean(axis=0)
        # scikit-learn stops at a gradient of about 1e-10 per sample
        assert learned_score._fit_logistic(features, right) == pytest.approx([intercept, *weights], rel=1e-4, abs=1e-5)

    def test_is_the_same_each_time(self) -> None:
        preds, labels = hopeless_case(samples=400)
        again, _ = hopeless_case(samples=400)
        assert cross_fit(preds, labels)[0] == cross_fit(again, labels)[0]

    def test_samples_do_not_score_themselves(self) -> None:
        preds, labels = hopeless_case(samples=500)
        folds = split_folds(500, 4)
        assert folds is not None
        _, scores = cross_fit(preds, labels)
        inside = folds == 2
        changed = np.where(inside, (labels + 1) % 6, labels)
        _, other = cross_fit(preds, changed)
        assert (scores[:, inside] == other[:, inside]).all()
        assert (scores[:-1, ~inside] != other[:-1, ~inside]).any()

    def test_weights_are_the_mean_of_the_folds(self) -> None:
        preds, labels = hopeless_case(samples=500)
        model, scores = cross_fit(preds, labels)
        own = np.stack([np.abs(learned_score.learned_scores(model, preds) - scores)[k].max() for k in range(3)])
        assert (own > 0).all()
        assert (own < 0.15).all()  # models that share most samples are alike
        assert model.exits[-1] is None
        assert (learned_score.learned_scores(model, preds)[-1] == scores[-1]).all()

    def test_detects_hopeless_samples_on_fresh_data(self) -> None:
        preds, labels = hopeless_case(0)
        fresh, fresh_labels = hopeless_case(1)
        model, _ = cross_fit(preds, labels)
        correct = np.asarray(fresh.predicted == fresh_labels)
        learned = ew.metrics.eefp(learned_score.learned_scores(model, fresh), correct)
        confidence = ew.metrics.eefp(exit_scores(fresh), correct)
        assert learned is not None
        assert confidence is not None
        assert learned > confidence + 0.05

    @pytest.mark.parametrize("seed", range(3))
    def test_the_target_is_that_of_a_loop(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        correct, log_true = rng.random((4, 50)) < 0.3, -rng.exponential(size=(4, 50))
        target = stopping_target(correct, log_true)
        for k, i in np.ndindex(4, 50):
            if correct[k, i]:
                expected = 1.0
            elif correct[k + 1 :, i].any():
                expected = 0.0
            else:
                expected = min(1.0, (np.exp(log_true[k, i]) / np.exp(log_true[3, i])) ** 0.5)
            assert target[k, i] == pytest.approx(expected)
        assert (target[-1] == 1).all()


class TestBadInput:
    @given(
        st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 60), st.integers(1, 6), st.sampled_from([1, 40, 400])
    )
    @settings(max_examples=80, deadline=None)
    def test_never_a_nan(self, seed: int, exits: int, samples: int, classes: int, sharpness: int) -> None:
        """Few samples, saturated probabilities, exits that are always right or never: finite scores in 0..1."""
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=(exits, samples, classes)) * sharpness
        with np.errstate(under="ignore"):
            probs = np.exp(logits - logits.max(axis=2, keepdims=True))
            probs = (probs / probs.sum(axis=2, keepdims=True)).astype(np.float32)
        labels = probs[-1].argmax(axis=1) if seed % 3 == 0 else rng.integers(0, classes, samples)
        model, scores = cross_fit(Predictions.of(probs), labels)
        again = learned_score.learned_scores(model, Predictions.of(probs))
        for values in (scores, again):
            assert np.isfinite(values).all()
            assert values.min() >= 0
            assert values.max() <= 1 + 1e-6

    @pytest.mark.parametrize("kind", ["always right", "always wrong", "one exit", "few samples", "equal predictions"])
    def test_falls_back_to_confidence(self, kind: str) -> None:
        preds, labels = hopeless_case(samples=9 if kind == "few samples" else 300)
        costs = COSTS
        if kind == "always right":
            probs = np.full((4, 300, 6), 0.02, dtype=np.float32)
            probs[:, np.arange(300), labels] = 0.9
            preds = Predictions.of(probs)
        elif kind == "always wrong":
            probs = np.full((4, 300, 6), 0.02, dtype=np.float32)
            probs[:, np.arange(300), (labels + 1) % 6] = 0.9
            preds = Predictions.of(probs)
        elif kind == "one exit":
            preds, costs = Predictions.of(preds.probs.numpy()[:1]), (1.0,)
        elif kind == "equal predictions":
            preds = Predictions.of(np.tile(preds.probs.numpy()[:1], (4, 1, 1)))
        model, scores = cross_fit(preds, labels)
        assert model.is_confidence
        assert np.array_equal(scores.astype(np.float32), exit_scores(preds).astype(np.float32))
        assert fit_score(preds, labels, ew.Costs(costs, "MACs"), "auto").name == "confidence"
        policy = ew.fit_policy(preds, labels, costs, budget=costs[-1], score="learned")
        assert policy.exits(preds).shape == (preds.shape[1],)

    def test_labels_are_needed(self) -> None:
        with pytest.raises(ew.InputError, match="`labels` are needed to learn the exit score"):
            ew.fit_policy(random_probs(0, 4, 30, 5), costs=COSTS, budget=2, score="learned")
        with pytest.raises(ew.InputError, match="`labels` are needed to learn the exit score"):
            ew.sweep(random_probs(0, 4, 30, 5), costs=COSTS, score="learned")
        with pytest.raises(ew.InputError, match="`score` 'learned' needs its model"):
            exit_scores(random_probs(0, 4, 30, 5), "learned")

    def test_two_classes_and_one(self) -> None:
        for classes in (1, 2, 3):
            summary = learned_score.summarize(ExitPrediction(random_probs(0, 1, 5, classes)[0]))
            assert (summary[:, classes:3] == 0).all()
            assert summary[:, :classes].sum(axis=1) == pytest.approx(1)


class TestPolicy:
    @given(st.integers(0, 10**6), st.integers(1, 40))
    @settings(max_examples=30, deadline=None)
    @pytest.mark.slow
    def test_exit_by_exit_in_any_batches_is_all_at_once(self, seed: int, size: int) -> None:
        preds, labels = hopeless_case(samples=200)
        rng = np.random.default_rng(seed)
        policy = ew.fit_policy(preds, labels, COSTS, budget=float(rng.uniform(1.1, 3.9)), score="learned")
        expected = policy.exits(preds)
        exits = np.full(200, -1)
        for start in range(0, 200, size):
            active, state = np.arange(start, min(start + size, 200)), None
            for exit, pred in enumerate(preds.exits()):
                part = ExitPrediction(pred.probs[active], pred.log_probs[active])
                mask, state = policy.exit_mask(exit, part, state)
                exits[active[mask]] = exit
                active = active[~mask]
                state = None if state is None else state[~mask]
        assert exits.tolist() == expected.tolist()

    @pytest.mark.parametrize("classes", [1, 2, 3, 9])
    def test_a_single_sample_has_the_score_that_it_has_in_a_batch(self, classes: int) -> None:
        """As float32, which thresholds are compared with: both add the same products in the same order.

        Before rounding they may differ in the last bit, by the exponential function of Python and that of NumPy.
        """
        rng = np.random.default_rng(0)
        exits = [tuple(rng.normal(size=4 + 2 * k).tolist()) for k in range(9)]
        model = learned_score.LearnedScore((*exits[:4], None, *exits[5:], None))
        probs = random_probs(1, 10, 20, classes)
        state = None
        single: list[Any] = [None] * 20
        for k in range(10):
            scores, state = model.compute(k, ExitPrediction(probs[k]), state)
            for i in range(20):
                score, single[i] = model.compute(k, ExitPrediction(probs[k, i : i + 1]), single[i])
                assert score.astype(np.float32)[0] == scores.astype(np.float32)[i]
                assert (state is None) == (single[i] is None)
                if state is not None:
                    assert single[i][0].tolist() == state[i].tolist()

    def test_a_file_holds_the_score(self, tmp_path: Path) -> None:
        preds, labels = hopeless_case(samples=1500)
        policy = ew.fit_policy(preds, labels, COSTS, budget=2.5, score="auto")
        assert policy.score == "learned"
        policy.save(tmp_path / "policy.json")
        again = ew.Policy.load(tmp_path / "policy.json")
        assert again == policy
        assert again.exits(preds).tolist() == policy.exits(preds).tolist()

    def test_files_of_other_scores_have_no_new_fields(self) -> None:
        preds, labels = hopeless_case(samples=300)
        data = ew.fit_policy(preds, labels, COSTS, budget=2.5).to_dict()
        assert "score_model" not in data
        assert "score_choice" not in data["fit"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda model: model["exits"].pop(), "weights of exit 2 must be None"),
            (lambda model: model.update(exits=[None, None]), "must have 4 exits as the thresholds, but has 2"),
            (lambda model: model["exits"][0].append(1.0), "weights of exit 0 must be 4 numbers or None"),
            (lambda model: model["exits"][1].__setitem__(0, nan), "must be finite"),
            (lambda model: model["exits"][1].__setitem__(0, 1e300), "must be finite"),
            (lambda model: model["exits"][1].__setitem__(0, "1"), "must be finite"),
            (lambda model: model["exits"][1].__setitem__(0, True), "must be finite"),
            (lambda model: model.update(exits="abc"), "exit 0 must be 4 numbers or None"),
            (lambda model: model.update(exits=[]), "must have weights for each exit"),
            (lambda model: model.update(exits=7), "must have weights for each exit"),
            (lambda model: model.update(more=1), "must have features, earlier_features and exits"),
            (lambda model: model.update(features=["other"]), "must be those of this exitwise"),
        ],
    )
    def test_a_damaged_score_is_refused(self, change: Any, message: str) -> None:
        preds, labels = hopeless_case(samples=300)
        data = json.loads(json.dumps(ew.fit_policy(preds, labels, COSTS, budget=2.5, score="learned").to_dict()))
        change(data["score_model"])
        with pytest.raises(ew.InputError, match=message):
            ew.Policy.from_dict(data)

    def test_score_and_model_belong_together(self) -> None:
        model = LearnedScore((None, None))
        with pytest.raises(ew.InputError, match="`score_model` must be a LearnedScore for the score 'learned'"):
            ew.Policy((0.5, -inf), "learned")
        with pytest.raises(ew.InputError, match="and None for others, but got LearnedScore for 'margin'"):
            ew.Policy((0.5, -inf), "margin", score_model=model)
        with pytest.raises(ew.InputError, match="must be one of"):
            ew.Policy((0.5, -inf), "auto")
        assert ew.Policy((0.5, -inf), "learned", score_model=model).score_model == model

    def test_shifts_are_nested_and_the_controller_works(self) -> None:
        preds, labels = hopeless_case(samples=600)
        policy = ew.fit_policy(preds, labels, COSTS, budget=2.2, score="learned", strategy="geometric")
        previous = None
        for shift in (-3.0, -1.0, -0.2, 0.0, 0.2, 1.0, 3.0):
            exits = policy.shifted(shift).exits(preds)
            assert previous is None or (exits >= previous).all()
            previous = exits
        controller = ew.BudgetController(policy, 1.7)
        spent = []
        for _ in range(60):
            exits = controller.policy.exits(preds)
            spent.append(np.asarray(COSTS)[exits].mean())
            batch = np.random.default_rng(controller.state.samples).integers(0, 600, 64)
            controller.update(exits[batch])
        assert np.mean(spent[20:]) == pytest.approx(1.7, abs=0.1)  # it corrects the noise of batches of 64
        assert ew.BudgetController.from_dict(json.loads(json.dumps(controller.to_dict()))).policy == controller.policy

    @pytest.mark.parametrize("strategy", ["geometric", "optimized", "label_free", "auto"])
    @pytest.mark.slow
    def test_thresholds_meet_the_budget_on_out_of_fold_scores(self, strategy: str) -> None:
        preds, labels = hopeless_case()
        fresh, fresh_labels = hopeless_case(7)
        for budget in (1.3, 2.0, 3.0):
            policy = ew.fit_policy(preds, labels, COSTS, budget=budget, strategy=strategy, score="learned")
            assert policy.cost is not None
            assert policy.cost <= budget
            result = ew.evaluate(fresh, labels=fresh_labels, policy=policy, costs=COSTS)
            assert result.cost == pytest.approx(policy.cost, rel=0.05)  # two samples of 3,000 differ by some percent

    def test_a_certificate_does_not_fit_on_its_held_out_samples(self) -> None:
        preds, labels = hopeless_case()
        certificate = ew.Certificate(0.05, hold=0.5, seed=3)
        policy = ew.fit_policy(preds, labels, COSTS, budget=2.5, score="learned", certify=certificate)
        assert policy.guarantee is not None
        assert policy.guarantee.num_held_out == 1500
        tune, held_out = ew_split(3000, certificate)
        changed = labels.copy()
        changed[held_out] = (changed[held_out] + 1) % 6
        other = ew.fit_policy(preds, changed, COSTS, budget=2.5, score="learned", certify=certificate)
        assert other.score_model == policy.score_model
        assert other.thresholds == policy.thresholds
        assert policy.score_model == cross_fit(preds.take(tune), labels[tune])[0]

    @pytest.mark.slow
    def test_certified_policies_keep_the_budget(self) -> None:
        kept = 0
        population, population_labels = hopeless_case(99, 10_000)
        for seed in range(20):
            preds, labels = hopeless_case(seed, 600)
            policy = ew.fit_policy(preds, labels, COSTS, budget=2.2, score="auto", certify=ew.Certificate(0.1))
            cost = ew.evaluate(population, labels=population_labels, policy=policy, costs=COSTS).cost
            kept += cost <= 2.2
        assert kept >= 16  # fewer have a probability of 4 % if each keeps it with a probability of 0.9

    @pytest.mark.slow
    def test_max_loss(self) -> None:
        preds, labels = hopeless_case()
        learned = ew.fit_policy(preds, labels, COSTS, budget=None, max_loss=0.02, score="learned")
        plain = ew.fit_policy(preds, labels, COSTS, budget=None, max_loss=0.02)
        assert learned.cost is not None
        assert plain.cost is not None
        assert learned.cost < plain.cost


def ew_split(samples: int, certificate: ew.Certificate) -> tuple[np.ndarray, np.ndarray]:
    from exitwise.policies.fit import split_held_out

    return split_held_out(samples, certificate.hold, certificate.seed)


class TestAuto:
    def test_takes_a_score_that_wins_clearly(self) -> None:
        preds, labels = hopeless_case()
        policy = ew.fit_policy(preds, labels, COSTS, budget=2.0, score="auto")
        assert policy.score in ("margin", "learned")
        assert policy.fit is not None
        choice = policy.fit.score_choice
        assert choice is not None
        assert list(choice) == ["confidence", "margin", "entropy", "learned"]
        chosen = choice[policy.score]
        assert chosen["gain"] > 2 * chosen["standard_error"]
        assert choice["confidence"]["gain"] == 0
        text = describe_choice(policy.score, choice)
        assert text.startswith(f"Exit score: {policy.score}, clearly better than confidence on held-out folds")
        assert "\n" not in text

    def test_stays_with_confidence_where_nothing_wins(self) -> None:
        for seed in range(5):
            rng = np.random.default_rng(seed)
            probs = random_probs(seed, 4, 600, 5).astype(np.float32)
            labels = rng.integers(0, 5, 600)  # the exits know nothing
            fitted = fit_score(Predictions.of(probs), labels, ew.Costs(COSTS, "MACs"), "auto")
            assert fitted.name == "confidence"
            assert "no other score is clearly better" in describe_choice(fitted.name, fitted.choice_to_dict())

    def test_is_confidence_without_labels(self) -> None:
        policy = ew.fit_policy(random_probs(0, 4, 60, 5), costs=COSTS, budget=2, score="auto")
        assert policy.score == "confidence"
        assert policy.fit is not None
        assert policy.fit.score_choice is None
        assert {p.score for p in ew.sweep(random_probs(0, 4, 60, 5), costs=COSTS, score="auto")} == {"confidence"}

    def test_compares_nlpd_if_that_is_the_objective(self) -> None:
        preds, labels = hopeless_case()
        fitted = fit_score(preds, labels, ew.Costs(COSTS, "MACs"), "auto", "nlpd")
        assert fitted.candidates is not None
        assert fitted.candidates["confidence"].value < 0
        assert "gain in NLPD" in describe_choice(fitted.name, fitted.choice_to_dict(), "nlpd")

    def test_the_error_of_a_difference_in_eefp_is_that_of_a_bootstrap(self) -> None:
        from exitwise.policies.score_choice import _eefp_influence

        preds, labels = hopeless_case(samples=800)
        correct = np.asarray(preds.predicted == labels)
        one, other = exit_scores(preds), exit_scores(preds, "entropy")
        error = np.sqrt(((_eefp_influence(one, correct) - _eefp_influence(other, correct)) ** 2).sum())
        rng, differences = np.random.default_rng(0), []
        for _ in range(300):
            rows = rng.integers(0, 800, 800)
            areas = [ew.metrics.eefp(scores[:, rows], correct[:, rows]) for scores in (one, other)]
            differences.append((areas[0] or 0) - (areas[1] or 0))
        assert error == pytest.approx(np.std(differences), rel=0.15)  # 300 resamples know it within 4 %

    def test_the_shipped_trace(self) -> None:
        """The learned score is better than confidence on test samples, at the paper's budgets, at little NLPD."""
        trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        assert trace.test is not None
        calibration = ew.calibrate(trace, "Pool W_opt")
        val, test = calibration.predict(trace.val), calibration.predict(trace.test)
        means = {}
        for score in ("confidence", "auto"):
            policies = ew.sweep(val, costs=trace.costs, score=score, labels=trace.val.labels)
            curve = ew.budget_curve(test, labels=trace.test.labels, policies=policies, costs=trace.costs)
            means[score] = curve.mean(7e6, 2.6e7)
        assert policies[0].score == "learned"
        assert means["auto"]["top1"] > 0.636
        assert means["auto"]["eefp"] > 0.80
        assert means["auto"]["nlpd"] < 1.356
        assert means["auto"]["ece"] < 0.0105
        assert means["auto"]["top1"] > means["confidence"]["top1"] + 0.002

    def test_a_trace_of_former_files_still_opens(self) -> None:
        policy = ew.Policy((0.5, -inf))
        assert ew.Policy.from_dict(policy.to_dict()) == policy
        assert replace(policy, score="margin").score_model is None
