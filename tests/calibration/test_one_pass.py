"""Predictions in one pass over blocks of samples, against all samples at once, method by method."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace

import exitwise as ew
from exitwise.calibration import one_pass
from exitwise.calibration.calibration import Calibration, predict_together
from exitwise.calibration.laplace import Posterior
from exitwise.calibration.methods import DROPOUT_METHODS, METHODS
from exitwise.calibration.trace import HeadWeights, Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core import predictions
from exitwise.core.predictions import ExitPrediction, Predictions
from exitwise.core.summaries import OF_CONFIDENCE, OF_TRUE_LABEL, SUMMARIES, summarize, top_three
from exitwise.evaluation.evaluate import PerSampleMetrics
from exitwise.policies.scores import SCORES, exit_scores

pytestmark = pytest.mark.numerical

ALL = SUMMARIES | OF_TRUE_LABEL
OTHERS = ("PoE Laplace T_opt", "Pool", "Pool W_opt", "MIE MC dropout T_opt")
# Interpolated exponentials depend on the samples of a block, within 1e-6 of a probability.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 3e-6}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return random_trace(n=60)


@pytest.fixture(scope="module")
def calibrations(trace: Trace) -> dict[str, Calibration]:
    tuner = Tuner(trace, num_draws=6, temperatures=(0.7, 1.0, 1.5), prior_vars=(1.0, 2.0))
    return {name: tuner.calibrate(name) for name in (*METHODS, *OTHERS)}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No predictions are small enough to be cached."""
    monkeypatch.setattr(predictions, "_MAX_CACHED_VALUES", 0)


def one_by_one(calibration: Calibration, trace: Trace) -> list[ExitPrediction]:
    """Return the predictions of all validation samples at once, by the code of a single exit."""
    exits, state = [], None
    for k, (exit, x) in enumerate(zip(calibration.exits, trace.val.features, strict=True)):
        log_probs = exit.log_probs(x)
        if calibration.exit_weights is not None and calibration.method.ensemble is not None:
            from exitwise.calibration.ensembles import ENSEMBLES

            ensemble = ENSEMBLES[calibration.method.ensemble]
            log_probs, state = ensemble.advance_log_probs(state, log_probs, calibration.exit_weights[k].at(x))
        exits.append(ExitPrediction.from_log_probs(log_probs.numpy()))
    return exits


@pytest.mark.parametrize("block", [60, 7, 1])
def test_summaries_equal_those_of_all_samples_at_once(
    block: int, trace: Trace, calibrations: dict[str, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 samples in one block, in blocks that do not divide them, and one by one."""
    monkeypatch.setattr(one_pass, "_BLOCK", block * trace.num_classes)
    together = predict_together(calibrations, trace.val, dict.fromkeys(calibrations, ALL))
    labels = trace.val.labels.numpy()
    for name, calibration in calibrations.items():
        exits = one_by_one(calibration, trace)
        log_true, rank, brier = together[name].reduce_with_labels(labels)
        expected = [summarize(pred, labels, ALL) for pred in exits]
        assert rank.tolist() == [row["rank"].tolist() for row in expected], name
        assert together[name].predicted.tolist() == [row["predicted"].tolist() for row in expected]
        for values, key in ((log_true, "log_true"), (brier, "brier"), (together[name].largest, "largest")):
            np.testing.assert_allclose(values, np.stack([row[key] for row in expected]), **TOLERANCE, err_msg=name)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("score", sorted(SCORES))
def test_scores_from_summaries_equal_those_of_probabilities(
    score: str, trace: Trace, calibrations: dict[str, Calibration]
) -> None:
    calibration = calibrations["MIE Laplace T_opt sigma_opt"]
    streamed = calibration.predict(trace.val)
    # A single block computes the same numbers as all samples at once, so the scores are equal bit for bit.
    probs = Predictions(
        streamed.shape, lambda: iter(one_by_one(calibration, trace)), calibration.predict(trace.val)._compute_variance
    )
    assert exit_scores(streamed, score).tolist() == exit_scores(probs, score).tolist()


@pytest.mark.usefixtures("large")
def test_everything_that_uses_predictions_agrees_with_plain_probabilities(
    trace: Trace, calibrations: dict[str, Calibration]
) -> None:
    calibration = calibrations["T_opt"]
    streamed, labels = calibration.predict(trace.val), trace.val.labels.numpy()
    plain = Predictions(streamed.shape, lambda: iter(one_by_one(calibration, trace)))
    for score in ("confidence", "learned", "auto"):
        policies = [
            ew.fit_policy(preds, labels, trace.costs, budget=trace.costs.values[1], score=score)
            for preds in (streamed, plain)
        ]
        assert policies[0].to_dict() == policies[1].to_dict()
        results = [
            ew.evaluate(preds, labels=labels, policy=policies[0], costs=trace.costs) for preds in (streamed, plain)
        ]
        assert results[0].to_dict() == results[1].to_dict()
    rows = np.array([5, 3, 41])
    assert exit_scores(streamed.take(rows), "entropy").tolist() == exit_scores(plain, "entropy")[:, rows].tolist()


def test_one_sample_and_one_exit(calibrations: dict[str, Calibration], trace: Trace) -> None:
    single = trace.val.take(torch.tensor([4]))
    together = predict_together(calibrations, single, dict.fromkeys(calibrations, ALL))
    for name, preds in together.items():
        np.testing.assert_allclose(
            preds.largest[:, 0], [p.probs[4].max() for p in one_by_one(calibrations[name], trace)], **TOLERANCE
        )
    first = replace(
        trace,
        val=replace(trace.val, features=trace.val.features[:1]),
        test=None,
        heads=trace.heads[:1],
        curvature=trace.curvature[:1],
        costs=ew.Costs(trace.costs.values[:1]),
    )
    calibration = ew.calibrate(first, "MIE Laplace", num_draws=4)
    metrics = PerSampleMetrics.of(
        predict_together({"one": calibration}, first.val, {"one": ALL})["one"], first.val.labels.numpy()
    )
    expected = one_by_one(calibration, first)[0]
    np.testing.assert_allclose(metrics.confidence[0], expected.probs.max(axis=1), **TOLERANCE)


class Counter:
    """Counts calls of methods that pass over features."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = {"logits": 0, "squares": 0, "predictions": 0}
        self._count(monkeypatch, HeadWeights, "logits", "logits")
        self._count(monkeypatch, Posterior, "squared_projections", "squares")
        from exitwise.calibration.calibration import CalibratedExit

        self._count(monkeypatch, CalibratedExit, "log_probs_from", "predictions")

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, key: str) -> None:
        original = getattr(owner, method)

        def counted(*args: Any) -> Any:
            self.calls[key] += 1
            return original(*args)

        monkeypatch.setattr(owner, method, counted)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def test_methods_share_one_pass_over_the_features(
    trace: Trace, calibrations: dict[str, Calibration], counter: Counter
) -> None:
    paper = {name: calibrations[name] for name in METHODS}
    together = predict_together(paper, trace.val, dict.fromkeys(paper, ALL))
    for preds in together.values():
        for score in ("confidence", "margin", "entropy"):
            exit_scores(preds, score)
        preds.reduce_with_labels(trace.val.labels.numpy())
    distinct = sum(
        len({(cal.exits[k].temperature, cal.exits[k].prior_var, cal.method.laplace) for cal in paper.values()})
        for k in range(trace.num_exits)
    )
    assert counter.calls == {"logits": trace.num_exits, "squares": trace.num_exits, "predictions": distinct}
    assert distinct < len(paper) * trace.num_exits


@pytest.mark.usefixtures("large")
def test_large_predictions_are_computed_once(
    trace: Trace, calibrations: dict[str, Calibration], counter: Counter
) -> None:
    preds, labels = calibrations["MIE Laplace"].predict(trace.val), trace.val.labels.numpy()
    for score in ("auto", "learned", "margin"):
        policy = ew.fit_policy(preds, labels, trace.costs, budget=trace.costs.values[1], score=score)
        ew.evaluate(preds, labels=labels, policy=policy, costs=trace.costs)
    ew.fit_policy(preds.take(np.arange(30)), labels[:30], trace.costs, budget=trace.costs.values[1])
    assert counter.calls["predictions"] == trace.num_exits


def test_exits_are_shared_only_if_they_are_equal(calibrations: dict[str, Calibration], trace: Trace) -> None:
    other = ew.calibrate(trace, "MIE Laplace", num_draws=6, seed=1)
    exits = [calibrations["Laplace"].exits[0], calibrations["MIE Laplace"].exits[0], other.exits[0]]
    assert exits[0].equals(exits[1])
    assert not exits[0].equals(exits[2])  # other draws
    assert not exits[0].equals(calibrations["MSDNet (vanilla)"].exits[0])
    rescaled = HeadWeights(exits[0].head.weight * 2, exits[0].head.bias)
    assert not exits[0].equals(replace(exits[0], head=rescaled))
    together = predict_together({"a": calibrations["MIE Laplace"], "b": other}, trace.val, {"a": ALL, "b": ALL})
    for name, calibration in (("a", calibrations["MIE Laplace"]), ("b", other)):
        expected = np.stack([pred.probs.max(axis=1) for pred in one_by_one(calibration, trace)])
        np.testing.assert_allclose(together[name].largest, expected, **TOLERANCE)


def test_what_was_not_summarized_is_computed_when_it_is_asked_for(
    calibrations: dict[str, Calibration], trace: Trace
) -> None:
    calibration = calibrations["T_opt"]
    few = predict_together({"few": calibration}, trace.val, {"few": OF_CONFIDENCE})["few"]
    exit_scores(few, "confidence")
    expected = calibration.predict(trace.val)
    assert exit_scores(few, "entropy").tolist() == exit_scores(expected, "entropy").tolist()
    assert few.reduce_with_labels(trace.val.labels.numpy())[1].shape == (trace.num_exits, 60)


def test_dropout_masks_are_not_mixed_up(trace: Trace) -> None:
    names = list(DROPOUT_METHODS)[:2]
    tuner = Tuner(trace, num_draws=4, temperatures=(1.0,), prior_vars=(2.0,))
    calibrations = {name: tuner.calibrate(name) for name in names}
    together = predict_together(calibrations, trace.val, dict.fromkeys(names, OF_CONFIDENCE))
    for name in names:
        expected = np.stack([pred.probs.max(axis=1) for pred in one_by_one(calibrations[name], trace)])
        np.testing.assert_allclose(together[name].largest, expected, **TOLERANCE)


def test_the_top_three_are_those_of_a_sort() -> None:
    rng = np.random.default_rng(0)
    for classes in (1, 2, 3, 4, 9):
        probs = rng.integers(1, 4, (200, classes)).astype(np.float32)  # many ties
        probs /= probs.sum(axis=1, keepdims=True)
        top = top_three(probs)
        expected = np.zeros((200, 3))
        expected[:, : min(classes, 3)] = -np.sort(-probs, axis=1)[:, :3]
        assert top[:, :3].tolist() == expected.tolist()
        assert top[:, 3].tolist() == probs.argmax(axis=1).tolist()


def test_features_that_are_too_extreme_are_refused_by_their_position(
    trace: Trace, calibrations: dict[str, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_BLOCK", 7 * trace.num_classes)
    features = [x.float().clone() for x in trace.val.features]
    features[1][33] = 3e38
    split = replace(trace.val, features=tuple(features))
    preds = predict_together({"T_opt": calibrations["T_opt"]}, split, {"T_opt": ALL})["T_opt"]
    with pytest.raises(ew.InputError, match="exit 1: the features of sample 33 are too extreme for float32"):
        preds.predicted  # noqa: B018


@pytest.mark.slow
def test_memory_does_not_grow_with_samples_times_classes() -> None:
    """Twelve methods on 40,000 samples x 500 classes x 2 exits, whose probabilities alone are 160 MB per method."""
    script = """
import resource, sys, torch
import exitwise as ew
from exitwise.calibration.calibration import predict_together
from exitwise.calibration.methods import METHODS
from exitwise.calibration.trace import Split, Trace
from exitwise.core.summaries import OF_TRUE_LABEL, SUMMARIES
sys.path.insert(0, "tests")
from cases import random_trace
torch.set_num_threads(1)
trace = random_trace(n=50, classes=500)
generator = torch.Generator().manual_seed(0)
features = tuple(torch.randn(40_000, x.shape[1], generator=generator) for x in trace.val.features)
split = Split(features, torch.randint(500, (40_000,), generator=generator))
names = ["MSDNet (vanilla)", "T_opt", "MIE T_opt", "Laplace", "MIE Laplace"]
calibrations = {name: ew.calibrate(trace, name, num_draws=4) for name in names}
def measure(samples):
    part, keys = split.take(torch.arange(samples)), dict.fromkeys(names, SUMMARIES | OF_TRUE_LABEL)
    preds = predict_together(calibrations, part, keys)
    for name in names:
        preds[name].reduce_with_labels(split.labels[:samples].numpy())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(measure(10_000), measure(40_000))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    small, large = map(float, done.stdout.split())
    assert large - small < 100  # MB: features and summaries; the probabilities of one method are 160 MB more
