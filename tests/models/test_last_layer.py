"""Last layers: what is linear after the features becomes one layer; anything else is refused by name."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import exitwise as ew

pytestmark = pytest.mark.numerical

N, C = 6, 5
IMAGES = torch.randn(N, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two convolutions, some heads, and a function from the net and its map (n, 8, 8, 8) to the logits."""

    def __init__(self, end: Callable[[Any, Tensor], Any], **layers: Any) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, C)
        self.other, self.conv = nn.Linear(16, C), nn.Conv2d(8, C, 1)
        self.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if isinstance(layer, nn.Module)})
        for name in layers.keys() - self.layers.keys():
            setattr(self, name, layers[name])
        self._end = end

    def forward(self, x: Tensor) -> Any:
        return self._end(self, self.b(self.a(x).relu()).relu())


def mean(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def two(x: Tensor) -> Tensor:
    return torch.cat([mean(x), x.amax((2, 3))], dim=1)


def norm() -> nn.BatchNorm1d:
    layer = nn.BatchNorm1d(C)
    for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
        tensor.data.uniform_(0.5, 2)
    return layer


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def only_exported(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] > 4:  # a branch that symbols cannot follow
        x = x + 1
    return (m.fc(mean(x)) + m.other(two(x))) / 2


@dataclass
class Answer:
    logits: Tensor
    squared: Tensor


def with_gate(m: Any, x: Tensor) -> Answer:
    scores = m.fc(mean(x))
    logits = scores + torch.softmax(scores, dim=1)  # a feature depends on the head
    return Answer(logits, logits**2)


POOL = nn.AdaptiveAvgPool2d(1)
FOLDED: dict[str, tuple[nn.Module, int, bool]] = {  # the net, the features of its last layer, and whether it is its own
    "identity": (Net(lambda m, x: m.layers["id"](m.fc(mean(x))), id=nn.Identity()), 8, True),
    "dropout": (Net(lambda m, x: m.layers["drop"](m.fc(mean(x))).flatten(1), drop=nn.Dropout()), 8, True),
    "view": (Net(lambda m, x: m.fc(mean(x)).view(x.size(0), -1)), 8, True),
    "convolution": (Net(lambda m, x: m.conv(m.layers["pool"](x)).flatten(1), pool=POOL), 8, False),
    "convolution, then pool": (Net(lambda m, x: m.layers["pool"](m.conv(x)).flatten(1), pool=POOL), 8, False),
    "class maps": (Net(lambda m, x: m.layers["pool"](m.conv(x).relu()).flatten(1), pool=POOL), C, False),
    "mean": (Net(lambda m, x: torch.stack([m.fc(mean(x)), m.other(two(x))]).mean(0)), 24, False),
    "half of the sum": (Net(lambda m, x: (m.fc(mean(x)) + m.other(two(x))) / 2), 24, False),
    "weighted": (Net(lambda m, x: m.fc(mean(x)) * m.w - 3 * m.other(two(x)), w=nn.Parameter(torch.rand(C))), 24, False),
    "normalized": (Net(lambda m, x: m.layers["norm"](m.fc(mean(x))), norm=norm()), 8, False),
    "maximum over tokens": (Net(lambda m, x: m.fc(mean(x)) + 0.5 * m.fc(tokens(x)).max(1)[0]), 8 + C, False),
    "mean over tokens": (Net(lambda m, x: m.fc(tokens(x)).mean(1)), 8, True),
    "a token": (Net(lambda m, x: m.fc(tokens(x))[:, 3]), 8, True),
    "only exported": (Net(only_exported), 24, False),
    "head and its softmax": (Net(with_gate), 8 + C, False),
}


@pytest.mark.parametrize("name", FOLDED)
def test_what_is_linear_after_the_features_is_one_layer(name: str) -> None:
    module, width, own = FOLDED[name]
    net = ew.attach(module.eval(), ["a"], example_inputs=IMAGES[:1])
    last = net.exits[-1].last
    assert last.in_features == width
    assert (last is module.fc) == own
    with torch.no_grad():
        output = module(IMAGES)
        logits = output.logits if isinstance(output, Answer) else output
        torch.testing.assert_close(net(IMAGES)[-1], logits, rtol=1e-4, atol=1e-5)
        net.exits[-1].last.weight.mul_(2)  # no other layer gives the logits
        net.exits[-1].last.bias = None
        zero = copy.deepcopy(net)
        zero.exits[-1].last.weight.zero_()
        assert not zero(IMAGES)[-1].any()
        last.weight.div_(2)


NOT_LINEAR = {
    "mul": Net(lambda m, x: m.fc(mean(x)) * m.other(two(x))),
    "maximum": Net(lambda m, x: torch.maximum(m.fc(mean(x)), m.other(two(x)))),
    "softmax": Net(lambda m, x: torch.softmax(m.fc(mean(x)) + m.other(two(x)), dim=1)),
    "flatten": Net(lambda m, x: m.layers["pool"](x).flatten(1), pool=POOL),  # features, no classifier
    "max": Net(lambda m, x: m.fc(tokens(x)).amax(1).max(1, keepdim=True)[0].expand(-1, C) + 0 * mean(x)[:, :C]),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_anything_else_is_refused_by_name(name: str) -> None:
    with pytest.raises(ew.InputError, match=r"must end in the nn.Linear that gives its logits, but ends in"):
        ew.attach(NOT_LINEAR[name].eval(), ["a"], example_inputs=IMAGES[:1])


class Loop(nn.Module):
    """One layer that runs several times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.fc = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, C)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for _ in range(6):
            x = x + self.layer(x).relu()
        return {"hidden": self.first.weight.sum() + self.layer(x), "logits": self.fc(x)}


@pytest.mark.parametrize("at", [["layer@2", "layer@5"], "auto"])
def test_stages_share_the_layer_of_a_loop(at: Any, tmp_path: Path) -> None:
    module, x = Loop().eval(), torch.randn(N, 6)
    net = ew.attach(module, at, exits=3, example_inputs=x[:1])
    with torch.no_grad():
        assert torch.equal(net(x)[-1], module(x)["logits"])
        assert len(list(net.parameters())) == len(list(module.parameters())) + sum(
            len(list(head.parameters())) for head in net.exits[:-1]
        )
        ew.save_checkpoint(net, tmp_path / "net.safetensors")
        expected = [logits.clone() for logits in net(x)]
        for parameter in net.parameters():
            parameter.mul_(0.5)
        assert not torch.equal(net(x)[-1], expected[-1])
        ew.load_checkpoint(net, tmp_path / "net.safetensors")
        assert all(map(torch.equal, net(x), expected))
    assert len(load_file(tmp_path / "net.safetensors")) > len(list(net.parameters()))
    with pytest.raises(ew.InputError, match="'layer', which runs 7 times: 'layer@1' to 'layer@7' name its calls"):
        ew.attach(module, ["layer"], example_inputs=x[:1])
    with pytest.raises(ew.InputError, match="'layer@9', but 'layer' runs 7 times"):
        ew.attach(module, ["layer@9"], example_inputs=x[:1])
