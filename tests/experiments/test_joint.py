"""What the experiment on joint training reports, against the simulation of one policy."""

from types import ModuleType

import numpy as np
import pytest
import torch
from paths import ROOT
from torch.utils.data import DataLoader, TensorDataset

import exitwise as ew
from exitwise.calibration.overhead import cost_table

SHAPE = (1, 8, 8)


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import joint

    return joint


@pytest.fixture
def digits() -> tuple[ew.MultiExitNet, ew.Trace, ew.Trace, float]:
    """A net with three exits and its trace, the trace of its last exit alone, and the cost of that."""
    torch.manual_seed(0)
    images, _ = ew.data.load("digits")
    loaders = []
    for part in (images[torch.arange(0, 500)], images[torch.arange(500, 900)]):
        batches = list(ew.data.Batches(part, 100))
        samples = TensorDataset(*(torch.cat(column) for column in list(zip(*batches, strict=True))[:2]))
        loaders.append(DataLoader(samples, batch_size=100))
    module = ew.models.resnet("cifar100-resnet8", num_classes=10, in_channels=1).eval()
    net = ew.attach(module, "auto", exits=3, example_inputs=torch.rand(1, *SHAPE))
    ew.train_heads(net, *loaders, epochs=3, train_last=True)
    alone = ew.MultiExitNet([torch.nn.Sequential(*net.stages)], [net.exits[-1]])
    traces = [ew.collect(each.eval(), val=loaders[0], test=loaders[1]) for each in (net, alone)]
    return net, *traces, float(ew.macs(alone, SHAPE)[-1])


def test_the_smallest_budget_that_reaches_the_network_alone_is_measured(
    joint: ModuleType, digits: tuple[ew.MultiExitNet, ew.Trace, ew.Trace, float]
) -> None:
    import plain

    net, trace, alone, whole = digits
    assert trace.test is not None
    found = joint.measure(net, trace, {"original": alone}, whole, SHAPE)
    assert found["top1_of_references"]["original"] == pytest.approx(found["top1_of_exits"][-1], abs=0.01)
    cal = ew.calibrate(trace, "T_opt")
    costs = ew.Costs(tuple(float(row.vanilla) for row in cost_table(net, SHAPE)))
    policy = plain.matched(cal, trace, costs, found["goals"]["original"])
    expected = ew.evaluate(cal.predict(trace.test), labels=trace.test.labels, policy=policy, costs=costs)
    row = found["T_opt"]["original"]
    assert row["top1"] == pytest.approx(expected.top1, abs=1e-9)
    assert row["saved"] == pytest.approx(1 - expected.cost / whole, abs=1e-6)
    assert row["exit_shares"] == pytest.approx(list(expected.exit_shares), abs=1e-9)
    assert row["saved_interval"][0] <= row["saved"] <= row["saved_interval"][1]


def test_the_first_policy_that_reaches_the_goal_is_chosen_else_the_last(joint: ModuleType) -> None:
    top1 = np.array([[0.1, 0.4, 0.3, 0.5], [0.1, 0.2, 0.3, 0.2]])
    assert joint.reaches(top1, np.array([[0.3], [0.9]])).tolist() == [1, 3]
