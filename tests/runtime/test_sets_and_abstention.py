"""Prediction sets and abstention: the simulation, torch, its saved file, ONNX and streams say the same."""

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classifier_cases import NEAR, calibrated, classifier, clear, middle_policy, refused, simulated, some_images, tiny

import exitwise as ew

VANILLA = "MSDNet (vanilla)"


def fitted(per: str = "exit", score: str = "thr") -> tuple[ew.Classifier, ew.PredictionSets, ew.Abstention]:
    """A classifier of the tiny net with sets and an abstention that are fitted on its validation split."""
    calibration = calibrated(VANILLA)
    policy, val = middle_policy(calibration), tiny()[1].val
    preds = calibration.predict(val)
    sets = ew.fit_sets(preds, val.labels, policy=policy, coverage=0.8, per=per, score=score)
    abstention = ew.fit_abstention(preds, policy=policy, share=0.2)
    return classifier(VANILLA, sets=sets, abstention=abstention, preprocessing=None), sets, abstention


def far_from_limits(clf: ew.Classifier, images: Any) -> tuple[Any, np.ndarray]:
    """Simulated predictions, and the samples that rounding can move across no threshold and no limit."""
    preds = simulated(clf.net, clf.calibration, images)
    exits, sure = clear(clf.policy, preds)
    probs = preds.probs.numpy()[exits, np.arange(len(exits))]
    assert clf.sets is not None
    assert clf.abstention is not None
    limits = np.array([inf if limit is None else limit for limit in clf.sets.limits])
    limits = limits[exits][:, None] if clf.sets.per == "exit" else limits
    sure &= (np.abs(clf.sets.scores(probs) - limits) > NEAR).all(axis=1)
    return preds, sure & (np.abs(probs.max(axis=1) - clf.abstention.threshold) > NEAR)


@pytest.mark.parametrize(("per", "score"), [("exit", "thr"), ("all", "aps"), ("class", "thr"), ("all", "raps")])
def test_torch_answers_as_the_simulation(per: str, score: str) -> None:
    if per == "class":
        calibration = calibrated(VANILLA)
        counts = np.bincount(tiny()[1].val.labels.numpy(), minlength=10)
        assert counts.min() >= 4, "80 % need four samples of each class"
        assert len(calibration.exits) == 3
    clf, sets, abstention = fitted(per, score)
    images = some_images(257)
    preds, sure = far_from_limits(clf, images)
    assert sure.mean() > 0.9
    pred = clf(images)
    assert pred.sets.dtype == pred.abstained.dtype == torch.bool
    assert (pred.sets.numpy() == sets.simulate(preds, clf.policy))[sure].all()
    assert (pred.abstained.numpy() == abstention.simulate(preds, clf.policy))[sure].all()
    assert 0 < pred.abstained.float().mean() < 1


def test_a_saved_classifier_and_a_stream_say_the_same(tmp_path: Path) -> None:
    clf, _, _ = fitted()
    images = some_images(100)
    pred = clf(images)
    clf.save(tmp_path / "clf.safetensors")
    loaded = ew.Classifier.load(tmp_path / "clf.safetensors")
    assert (loaded.sets, loaded.abstention) == (clf.sets, clf.abstention)
    assert torch.equal(loaded(images).sets, pred.sets)
    assert torch.equal(loaded(images).abstained, pred.abstained)
    data = pred.to_dict()
    json.dumps(data)
    answers = list(clf.stream(images, batch_size=100))
    _, sure = far_from_limits(clf, images)  # other sizes of batches round differently
    for i in np.flatnonzero(sure):
        assert list(answers[i].set or ()) == data["sets"][i]
        assert answers[i].abstained == data["abstained"][i]
        assert data["sets"][i][0] == pred.predicted[i]  # the most probable class comes first
    assert list(pred.to_pandas().columns[-2:]) == ["sets", "abstained"]


def test_without_them_nothing_changes() -> None:
    pred = classifier(VANILLA)(some_images(3))
    assert pred.sets is None
    assert pred.abstained is None
    assert set(pred.to_dict()) == {"probs", "predicted", "exits", "costs", "unit"}


def test_an_empty_batch_has_empty_sets() -> None:
    pred = fitted()[0](some_images(1)[:0])
    assert tuple(pred.sets.shape) == (0, 10)
    assert tuple(pred.abstained.shape) == (0,)


def test_sets_of_another_policy_are_refused() -> None:
    _, sets, abstention = fitted()
    policy = ew.Policy((0.1, 0.2, -inf), costs=(1.0, 2.0, 3.0))
    for extra in ({"sets": sets}, {"abstention": abstention}):
        refused(lambda extra=extra: ew.Classifier(tiny()[0], calibrated(VANILLA), policy, **extra), "of this policy")
    refused(lambda: classifier(VANILLA, sets=3), "`sets` must be PredictionSets or None")


@pytest.mark.parametrize("per", ["exit", "all"])
@pytest.mark.slow
def test_a_bundle_says_the_same(per: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from exitwise.runtime.onnx import Session

    clf, _, _ = fitted(per)
    clf.export(tmp_path / "bundle")
    session = Session(tmp_path / "bundle", threads=1)
    assert (session.sets, session.abstention) == (clf.sets, clf.abstention)
    images = some_images(150)
    _, sure = far_from_limits(clf, images)
    expected, pred = clf(images), session(images.numpy())
    assert (pred.sets == expected.sets.numpy())[sure].all()
    assert (pred.abstained == expected.abstained.numpy())[sure].all()
    answers = list(session.stream(images.numpy(), batch_size=32))
    assert all(answers[i].set == tuple(expected.to_dict()["sets"][i]) for i in np.flatnonzero(sure))
    other = Session(tmp_path / "bundle", policy=ew.Policy((0.1, 0.2, -inf)))
    assert other(images.numpy()).sets is None  # they hold for the thresholds of the bundle
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    manifest["sets"]["num_classes"] = 9
    (tmp_path / "bundle" / "manifest.json").write_text(json.dumps(manifest))
    refused(lambda: Session(tmp_path / "bundle"), "manifest.json")
