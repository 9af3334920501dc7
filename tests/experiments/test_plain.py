"""A trained plain network, taken through the whole path: it stops early, is right as often, and costs less."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT

import exitwise as ew
from exitwise import data
from exitwise.calibration.methods import OURS
from exitwise.data.fashion_mnist import DEBIAN

pytestmark = pytest.mark.slow

EXPERIMENTS = ROOT / "experiments"
EXITS = 4


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import plain

    return plain


def with_exits(module: ew.MultiExitNet, splits: Any) -> tuple[ew.MultiExitNet, ew.Trace]:
    """Cut, heads trained, and a trace collected."""
    net = ew.attach(module.eval(), at="auto", exits=EXITS, example_inputs=torch.zeros(1, *splits.train.shape))
    ew.train_heads(net, splits.train, splits.val, epochs=10)
    loaders = (data.Batches(part, 250) for part in (splits.train, splits.val, splits.test))
    return net, ew.collect(net, *loaders)


def check(plain: ModuleType, module: ew.MultiExitNet, splits: Any, loss: float) -> dict[str, Any]:
    """The runtime has the exits and the costs that the experiment measures."""
    net, trace = with_exits(module, splits)
    found: dict[str, Any] = plain.measure(module, net, trace, splits.train.shape, loss)
    costs, cal = plain.costs_of(net, splits.train.shape)[OURS], ew.calibrate(trace, OURS)
    policy = plain.matched(cal, trace, costs, found["goal"])
    clf = ew.Classifier(net, cal, policy, costs=costs)
    answers = list(clf.stream(image for images, *_ in data.Batches(splits.test, 500) for image in images))
    shares = np.bincount([answer.exit for answer in answers], minlength=EXITS) / len(answers)
    assert np.abs(shares - found[OURS]["exit_shares"]).max() < 0.005  # a score on a threshold may fall on either side
    cost = np.mean([answer.cost for answer in answers]) / found["macs"]
    assert cost == pytest.approx(1 - found[OURS]["saved"], abs=0.005)
    right = np.mean([answer.predicted for answer in answers] == splits.test.labels.numpy())
    assert right == pytest.approx(found[OURS]["top1"], abs=0.005)
    return found


def test_digits(plain: ModuleType, tmp_path: Path) -> None:
    """From nothing: the plain net is trained here."""
    pictures, _ = data.load("digits")
    splits = data.HoldOut.random(pictures, 200, 0, test_size=400).apply(pictures, None)
    module = ew.models.resnet("cifar100-resnet14", num_classes=10, in_channels=1)
    ew.train(module, splits.train, splits.val, recipe=ew.RECIPES["digits"].scaled(20), out=tmp_path / "plain")
    found = check(plain, module, splits, loss=0.005)
    assert found["plain"]["top1"] > 0.95
    assert found[OURS]["saved"] > 0.4
    assert found[OURS]["top1_change"] > -0.02


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Fashion-MNIST: apt-get install dataset-fashion-mnist")
def test_fashion_mnist(plain: ModuleType) -> None:
    """Start from the net that the experiment trained, on some of its training images and some others."""
    module = ew.load_net(plain.WEIGHTS)
    train, test = data.load("fashion-mnist")
    assert test is not None
    whole = data.HoldOut.random(train, 5000, 0).apply(train, test)  # as the experiment's
    parts = (whole.train, 8000), (whole.val, 3000), (whole.test, 4000)
    splits = data.Splits(*(part[torch.arange(number)] for part, number in parts))
    found = check(plain, module, splits, loss=0.005)
    assert found["plain"]["top1"] > 0.9
    assert found[OURS]["saved"] > 0.4
    assert found[OURS]["top1_change"] > -0.015
