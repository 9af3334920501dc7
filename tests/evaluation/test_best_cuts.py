"""Cuts by what they are worth: probes find where the classes appear, and no exchange of a cut is better."""

from itertools import combinations

import numpy as np
import pytest
import torch
from command import Command
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import exitwise as ew
from exitwise.evaluation.best_cuts import _split_costs, exchange, simulate
from exitwise.models.net import MultiExitNet

pytestmark = pytest.mark.numerical


class Reveal(nn.Module):
    """A layer of some cost, after which half of the samples can be told apart."""

    def __init__(self, part: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        nn.init.eye_(self.linear.weight)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if self.part is None:
            return out
        # The class is in x[:, :4] times noise of random sign that x[:, 4 + part] holds, for the samples of the part.
        sign = torch.where(x[:, 8 + self.part, None] > 0, x[:, 4 + self.part, None], 1.0)
        mask = torch.zeros(64)
        mask[:4] = 1
        return out * (mask * sign + (1 - mask))


def revealing_module() -> tuple[nn.Module, TensorDataset]:
    """A module of eight layers: half of the samples show their class after layer 1, the others after layer 6."""
    layers = [Reveal({1: 0, 6: 1}.get(i)) for i in range(8)]
    last = nn.Linear(64, 4)
    with torch.no_grad():
        last.weight.zero_()
        last.weight[:, :4] = 8 * torch.eye(4)
        last.bias.zero_()
    module = nn.Sequential(*layers, last).eval()
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (1200,), generator=generator)
    x = torch.randn(1200, 64, generator=generator)
    part = torch.randint(2, (1200,), generator=generator)
    sign = torch.randint(2, (1200, 1), generator=generator) * 2.0 - 1
    x[:, :4] = nn.functional.one_hot(y, 4) * sign
    x[:, 4:6] = sign
    x[:, 8:10] = torch.where(torch.stack([part == 0, part == 1], 1), 1.0, -1.0)
    return module, TensorDataset(x, y)


def test_cuts_are_where_classes_appear() -> None:
    module, samples = revealing_module()
    example, budgets = samples.tensors[0][:1], [19_000, 20_000, 21_000]
    cuts = ew.best_cuts(module, samples, samples, exits=3, budgets=budgets, epochs=5, example_inputs=example)
    assert cuts.equal_cost == ("2", "4")
    assert cuts.names[0] in ("1", "2")
    assert cuts.names[1] == "6"
    assert cuts.top1 > cuts.equal_cost_top1 + 0.02
    probes = {candidate.name: candidate.top1 for candidate in cuts.candidates}
    assert probes["6"] > 0.95
    assert probes["1"] > probes["0"] + 0.2
    assert [candidate.cost for candidate in cuts.candidates] == sorted(c.cost for c in cuts.candidates)
    assert "* chosen: top-1" in str(cuts)


def test_costs_are_those_of_the_net_with_these_heads_only() -> None:
    module, samples = revealing_module()
    example = samples.tensors[0][:1]
    net = ew.attach(module, [str(i) for i in range(7)], head="linear", example_inputs=example)
    body, heads = _split_costs(net, samples.tensors[0][:5])
    few = ew.attach(module, ["1", "4"], head="linear", example_inputs=example)
    costs = ew.macs(few, example_inputs=example)
    assert costs == [body[1] + heads[1], body[4] + heads[1] + heads[4], body[-1] + heads[1] + heads[4]]


def test_an_exchange_ends_where_no_single_one_is_better() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        table = {cuts: float(rng.random()) for cuts in combinations(range(7), 3)}
        chosen, value = exchange([0, 3, 6], 7, lambda cuts: table[tuple(cuts)])  # noqa: B023
        assert table[tuple(chosen)] == value >= table[0, 3, 6]
        neighbors = [cuts for cuts in table if len({*cuts} & {*chosen}) == 2]
        assert len(neighbors) == 12
        assert all(table[cuts] <= value for cuts in neighbors)


def test_a_simulation_is_the_policy_within_the_budget() -> None:
    rng = np.random.default_rng(1)
    confidence = rng.random((2, 400))
    correct = rng.random((2, 400)) < np.stack([confidence[0], np.full(400, 0.9)])
    costs = np.array([1.0, 3.0])
    found = simulate(confidence, correct, costs, [2.0])
    first = np.argsort(-confidence[0])[:200]  # half of the samples may exit early: the most certain
    expected = (correct[0][first].sum() + correct[1].sum() - correct[1][first].sum()) / 400
    assert found == pytest.approx(expected, abs=0.02)
    assert simulate(confidence, correct, costs, [0.5, 2.0]) == pytest.approx(found / 2)


def test_loaders_and_budgets_are_accepted() -> None:
    module, samples = revealing_module()
    loader = DataLoader(samples, batch_size=100)
    cuts = ew.best_cuts(
        module, loader, loader, exits=2, budgets=[20000], epochs=1, candidates=3, example_inputs=samples.tensors[0][:1]
    )
    assert (len(cuts.names), cuts.budgets, cuts.samples) == (1, (20000.0,), 1200)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"exits": 1}, "needs `exits`, a whole number of at least 2"),
        ({"exits": 30}, "can be cut at"),
        ({"budgets": []}, "`budgets` must hold at least one budget"),
        ({"budgets": [-1]}, "`budgets` must be a number of at least 0, but got -1"),
        ({"candidates": 0}, "`candidates` must be a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_refused(values: dict[str, object], message: str) -> None:
    module, samples = revealing_module()
    few = TensorDataset(*(part[:40] for part in samples.tensors))
    arguments = {"exits": 3, "epochs": 1, "example_inputs": samples.tensors[0][:1], **values}
    with pytest.raises(ew.InputError, match=message):
        ew.best_cuts(module, few, few, **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_attaches_exits_there(tmp_path: object, exitwise: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    module = ew.models.resnet("cifar100-resnet8", num_classes=10, in_channels=1)
    ew.save_checkpoint(module, "plain.safetensors")
    options = ["--data", "digits", "--model", "cifar100-resnet8", "--weights", "plain.safetensors", "--epochs", 1]
    done = exitwise("train-heads", *options, "--attach", "best", "--exits", 3, "--out", "run")
    assert done.status == 0, done.err
    assert "* chosen: top-1" in done.err
    net = ew.load_net("run/net.safetensors")
    assert isinstance(net, MultiExitNet)
    assert f"Exits are after {', '.join(net.cuts or ())}, and at the end." in done.out
    done = exitwise("train-heads", *options, "--attach", "best", "--out", "other")
    assert (done.status, done.err) == (2, "exitwise: --attach best needs the number of exits: give --exits\n")
