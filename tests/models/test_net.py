"""MultiExitNet and Head: outputs, lazy evaluation, and refused arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import exitwise as ew

pytestmark = pytest.mark.numerical

WIDTHS = (5, 3, 4)  # features of the three exits
CLASSES = 7


def three_exits() -> ew.MultiExitNet:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in WIDTHS]
    heads = [ew.Head(nn.Sequential(nn.Linear(6, p), nn.ReLU()), nn.Linear(p, CLASSES)) for p in WIDTHS]
    return ew.MultiExitNet(stages, heads)


def head(classes: int = CLASSES) -> ew.Head:
    return ew.Head(nn.Identity(), nn.Linear(6, classes))


class Journal(nn.Module):
    """Identity that records its name when it runs."""

    def __init__(self, name: str, pages: list[str]) -> None:
        super().__init__()
        self.name = name
        self.pages = pages

    def forward(self, x: Tensor) -> Tensor:
        self.pages.append(self.name)
        return x


def test_every_exit_reads_the_stages_up_to_its_own() -> None:
    net, x = three_exits(), torch.randn(2, 6)
    features, logits = net.features(x), net(x)
    assert isinstance(features, list)
    assert isinstance(logits, list)
    assert [f.shape for f in features] == [(2, p) for p in WIDTHS]
    assert [z.shape for z in logits] == [(2, CLASSES)] * 3
    for k in range(3):
        state = nn.Sequential(*net.stages[: k + 1])(x)
        expected = net.heads[k].neck(state)
        assert torch.equal(features[k], expected)
        last = net.heads[k].last
        # A linear layer adds the bias while it sums, this afterwards: they round differently.
        torch.testing.assert_close(logits[k], expected @ last.weight.T + last.bias, rtol=1e-5, atol=1e-6)


def test_last_layer_on_the_features_gives_the_logits() -> None:
    net, x = three_exits(), torch.randn(4, 6)
    for exit, features, logits in zip(net.exits, net.features(x), net(x), strict=True):
        assert torch.equal(exit.last(features), logits)


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_no_stage_and_no_head_runs_before_it_is_asked_for(wanted: int) -> None:
    pages: list[str] = []
    net = ew.MultiExitNet(
        [Journal(f"stage {k}", pages) for k in range(3)],
        [ew.Head(Journal(f"neck {k}", pages), nn.Linear(6, 2)) for k in range(3)],
    )
    states = net.states(torch.randn(1, 6))
    assert pages == []
    for _ in range(wanted):
        next(states)
    assert pages == [f"stage {k}" for k in range(wanted)]


def test_states_pair_each_head_with_what_it_reads() -> None:
    net, x = three_exits(), torch.randn(2, 6)
    pairs = list(net.states(x))
    assert [head for head, _ in pairs] == list(net.heads) == net.exits
    assert all(torch.equal(head(state), logits) for (head, state), logits in zip(pairs, net(x), strict=True))


def test_a_state_may_be_any_nest_of_tensors() -> None:
    class Spread(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> dict[str, Any]:
            return {"both": (x["a"], [x["b"]])}

    class Gather(nn.Module):
        def forward(self, state: dict[str, Any]) -> Tensor:
            a, (b,) = state["both"]
            return torch.cat([a, b], dim=1)

    net = ew.MultiExitNet([Spread()], [ew.Head(Gather(), nn.Linear(6, 2))])
    x = {"a": torch.randn(3, 4), "b": torch.randn(3, 2)}
    assert torch.equal(net.features(x)[0], torch.cat([x["a"], x["b"]], dim=1))


def test_iterators_of_stages_and_heads_are_taken() -> None:
    net = ew.MultiExitNet((nn.Identity() for _ in range(2)), iter([head(), head()]))
    assert len(net.stages) == len(net.heads) == len(net.exits) == 2
    assert net.num_classes == CLASSES


def test_weights_of_stages_and_heads_are_the_nets_own() -> None:
    net = three_exits()
    assert {key.split(".")[0] for key in net.state_dict()} == {"stages", "heads"}
    assert len(list(net.parameters())) == 3 * 2 + 3 * 4


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        pytest.param(lambda: ew.Head(nn.Identity(), nn.Identity()), "last", id="last layer that is not linear"),
        pytest.param(lambda: ew.Head(nn.Identity(), None), "last", id="no last layer"),
        pytest.param(lambda: ew.Head(len, nn.Linear(6, 2)), "neck", id="neck that is not a module"),
        pytest.param(lambda: ew.MultiExitNet([], []), "stages", id="no exits"),
        pytest.param(lambda: ew.MultiExitNet([nn.Identity()] * 2, [head()]), "stages", id="a stage too many"),
        pytest.param(lambda: ew.MultiExitNet([nn.Identity()], [head()] * 2), "heads", id="a head too many"),
        pytest.param(lambda: ew.MultiExitNet([nn.Identity()], [nn.Linear(6, 2)]), r"heads\[0\]", id="head of torch"),
        pytest.param(lambda: ew.MultiExitNet([nn.Identity()], [None]), r"heads\[0\]", id="head that is None"),
        pytest.param(
            lambda: ew.MultiExitNet([nn.Identity()] * 2, [head(2), head(3)]), "heads", id="unequal numbers of classes"
        ),
        pytest.param(lambda: ew.MultiExitNet([len], [head()]), "stages", id="stage that is not a module"),
        pytest.param(lambda: ew.MultiExitNet(nn.Identity(), [head()]), "stages", id="a module for a list"),
    ],
)
def test_wrong_arguments_are_refused_by_name(build: Callable[[], nn.Module], argument: str) -> None:
    with pytest.raises(ew.InputError, match=f"`{argument}") as caught:
        build()
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
