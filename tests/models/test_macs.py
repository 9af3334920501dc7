"""Costs: the counting rule checked by hand and with PyTorch's counter, the paper's tables, every method's overhead."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn.utils import rnn
from torch.utils.flop_counter import FlopCounterMode

import exitwise as ew
from exitwise import models, zoo
from exitwise.calibration import overhead
from exitwise.core.nested import describe
from exitwise.models import macs

DATA = {"CIFAR-100": ("cifar100", 100), "ImageNet": ("imagenet", 1000), "Caltech-256": ("caltech256", 257)}
SIZES = ("small", "medium", "large")
# Head widths of the specification; CIFAR's are 128 at every exit.
WIDTHS = {
    "small": [384, 384, 352, 304, 560],
    "medium": [512, 544, 496, 880, 792],
    "large": [576, 640, 608, 528, 976],
}
EXITS = {"small": 4, "medium": 6, "large": 8}


def widths(dataset: str, size: str) -> list[int]:
    return [128] * EXITS[size] if dataset == "CIFAR-100" else WIDTHS[size]


@cache
def counts(dataset: str, size: str) -> tuple[list[int], list[int]]:
    """Return MACs and parameters of one of the paper's nets, counted once for all tests."""
    preset = f"{DATA[dataset][0]}-{size}"
    with torch.device("meta"):
        net = models.msdnet(preset)
    return ew.macs(net, models.config(preset).input_shape), macs.cumulative_parameters(net)


def published(table: str, **where: str) -> list[dict[str, str]]:
    rows = [row for row in zoo.published(table) if where.items() <= row.items()]
    assert rows, where
    return rows


def one_exit(stage: nn.Module, features: int) -> ew.MultiExitNet:
    """Return a net of one stage; its head counts 2 * features + 2."""
    return ew.MultiExitNet([stage], [ew.Head(nn.Flatten(), nn.Linear(features, 2))])


# The paper's tables


@pytest.mark.parametrize("row", zoo.published("msdnet_architectures"), ids=lambda row: "-".join(list(row.values())[:3]))
@pytest.mark.slow_after_first
def test_published_architectures_to_the_printed_digits(row: dict[str, str]) -> None:
    macs, parameters = (values[int(row["block"]) - 1] for values in counts(row["dataset"], row["size"]))
    printed = float(row["mflops_cumulative"])
    if (row["dataset"], row["size"], row["block"]) == ("ImageNet", "large", "1"):
        assert printed == 615.6  # printed with one digit less
        printed = 615.69
    assert round(macs / 1e6, 2) == printed
    assert round(parameters / 1e6, 2) == float(row["mparams_cumulative"])


def test_all_published_architectures_are_there() -> None:
    assert len(zoo.published("msdnet_architectures")) == 48
    assert len(zoo.published("laplace_cost")) == 144


@pytest.mark.parametrize("kind", ["vanilla", "efficient", "naive"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dataset", DATA)
def test_cost_figure_exactly_as_published(dataset: str, size: str, kind: str) -> None:
    start = "ImageNet" if dataset == "Caltech-256" else dataset  # Caltech-256's bars stand on ImageNet's costs
    vanilla = [
        float(row["mflops_cumulative"]) * 1e6 for row in published("msdnet_architectures", dataset=start, size=size)
    ]
    bars = overhead.paper_figure_costs(vanilla, widths(dataset, size), DATA[dataset][1])
    printed = published("laplace_cost", dataset=dataset, size=size, kind=kind)
    assert [row["exit"] for row in printed] == [str(k + 1) for k in range(len(vanilla))]
    assert [float(f"{bar:.15g}") for bar in bars[kind]] == [float(row["flops_cumulative"]) for row in printed]


@pytest.mark.parametrize(("dataset", "low", "high"), [("CIFAR-100", 3, 9), ("ImageNet", 4, 10), ("Caltech-256", 1, 3)])
@pytest.mark.slow_after_first
def test_mc_dropout_adds_the_percentages_of_the_paper(dataset: str, low: int, high: int) -> None:
    percent = [
        100 * k * overhead.mc_dropout_macs(p, DATA[dataset][1]) / vanilla
        for size in SIZES
        for k, (vanilla, p) in enumerate(zip(counts(dataset, size)[0], widths(dataset, size), strict=True), start=1)
    ]
    assert (round(min(percent)), round(max(percent))) == (low, high)


@pytest.mark.parametrize("samples", [50, 7])
@pytest.mark.parametrize("preset", ["tiny-16", "cifar100-small", "imagenet-small"])
@pytest.mark.slow_after_first
def test_cost_table_pays_at_every_exit_on_the_way(preset: str, samples: int) -> None:
    with torch.device("meta"):
        net = models.msdnet(preset)
    shape, c, L = models.config(preset).input_shape, net.num_classes, samples
    ps = [head.last.in_features for head in net.exits]
    rows = overhead.cost_table(net, shape, samples)
    vanilla = ew.macs(net, shape)
    assert [row.exit for row in rows] == list(range(len(ps)))
    assert [row.vanilla for row in rows] == vanilla
    assert [row.parameters for row in rows] == macs.cumulative_parameters(net)
    for k, row in enumerate(rows):
        passed = ps[: k + 1]
        laplace = sum(2 * c * L + (p + 1) * (p + 2) for p in passed)
        naive = sum(c**3 / 3 + c * c * (L + 1) + c * c + c * L + p * (p + 1) for p in passed)
        assert row.laplace == vanilla[k] + laplace
        assert row.naive_laplace == pytest.approx(vanilla[k] + naive, rel=1e-12)
        assert row.ensemble == vanilla[k] + 3 * c * k
        assert row.ours == vanilla[k] + laplace + 3 * c * k
        assert row.mc_dropout == vanilla[k] + sum(L * (p + 1) * c for p in passed)


def test_figure_and_table_differ_only_where_widths_do() -> None:
    """The figure multiplies the last exit's overhead, the table sums the overhead of each exit."""
    for preset, same in (("cifar100-small", True), ("imagenet-small", False)):
        with torch.device("meta"):
            net = models.msdnet(preset)
        rows = overhead.cost_table(net, models.config(preset).input_shape)
        ps = [head.last.in_features for head in net.exits]
        bars = overhead.paper_figure_costs([row.vanilla for row in rows], ps, net.num_classes)
        assert ([row.laplace for row in rows] == bars["efficient"]) is same


# The counting rule


class Steps(nn.Module):
    """Output of a recurrent layer at every step."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        steps: Tensor = self.layer(x)[0]
        return steps


class Keywords(Steps):
    """Keyword arguments in another order than forward's parameters."""

    def forward(self, x: Tensor) -> Tensor:
        steps: Tensor = self.layer(hx=x.new_zeros(1, len(x), 5), input=x)[0]
        return steps


class Packed(Steps):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.layer(rnn.pack_sequence(list(x)))[0]
        return packed.data[None]


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(1, 2)


@pytest.mark.parametrize(
    ("module", "shape", "outputs", "expected"),
    [
        pytest.param(nn.Conv2d(3, 8, 3, padding=1), (3, 6, 5), 240, 8 * 6 * 5 * 27, id="conv, its bias free"),
        pytest.param(nn.Conv2d(3, 8, 3, padding=1, bias=False), (3, 6, 5), 240, 8 * 6 * 5 * 27, id="conv, no bias"),
        pytest.param(nn.Conv2d(3, 8, 3, stride=2), (3, 7, 9), 96, 8 * 3 * 4 * 27, id="strided conv"),
        pytest.param(nn.Conv2d(4, 8, 3, padding=1, groups=2), (4, 5, 5), 200, 8 * 25 * 2 * 9, id="grouped conv"),
        pytest.param(nn.Conv2d(4, 4, 3, groups=4), (4, 5, 5), 36, 4 * 9 * 9, id="depthwise conv"),
        pytest.param(nn.Conv1d(2, 4, 5), (2, 10), 24, 4 * 6 * 2 * 5, id="conv 1d"),
        pytest.param(nn.Conv3d(1, 2, 2), (1, 3, 3, 3), 16, 2 * 8 * 8, id="conv 3d"),
        pytest.param(nn.ConvTranspose2d(3, 8, 2, stride=2), (3, 5, 5), 800, 3 * 25 * 8 * 4, id="transposed conv"),
        pytest.param(nn.ConvTranspose2d(4, 8, 3, groups=2), (4, 5, 5), 392, 4 * 25 * 4 * 9, id="transposed, grouped"),
        pytest.param(nn.ConvTranspose1d(2, 3, 5), (2, 6), 30, 2 * 6 * 3 * 5, id="transposed conv 1d"),
        pytest.param(Steps(nn.LSTM(7, 5, batch_first=True)), (3, 7), 15, 3 * 4 * 5 * (7 + 5 + 2), id="LSTM"),
        pytest.param(Steps(nn.GRU(7, 5, batch_first=True, bias=False)), (3, 7), 15, 3 * 3 * 5 * (7 + 5), id="GRU"),
        pytest.param(
            Steps(nn.LSTM(7, 5, 2, batch_first=True, bidirectional=True)),
            (3, 7),
            30,
            3 * 2 * 20 * ((7 + 5 + 2) + (10 + 5 + 2)),
            id="two layers there and back",
        ),
        pytest.param(Keywords(nn.GRU(7, 5, batch_first=True)), (3, 7), 15, 3 * 15 * (7 + 5 + 2), id="by keyword"),
        pytest.param(Packed(nn.GRU(7, 5, batch_first=True)), (3, 7), 15, 3 * 15 * (7 + 5 + 2), id="packed"),
        pytest.param(nn.GRUCell(7, 5), (7,), 5, 15 * (7 + 5 + 2), id="cell"),
        pytest.param(nn.Linear(7, 5), (7,), 5, 5 * 7 + 5, id="linear"),
        pytest.param(nn.Linear(7, 5, bias=False), (7,), 5, 5 * 7, id="linear, no bias"),
        pytest.param(nn.Linear(7, 5), (3, 7), 15, 3 * (5 * 7 + 5), id="linear on a sequence"),
        *(
            pytest.param(act(), (3, 4, 4), 48, 48, id=act.__name__)
            for act in (
                nn.ReLU,
                nn.ReLU6,
                nn.LeakyReLU,
                nn.ELU,
                nn.GELU,
                nn.SiLU,
                nn.Hardswish,
                nn.Sigmoid,
                nn.Tanh,
                nn.Mish,
            )
        ),
        pytest.param(nn.AvgPool2d(2), (3, 4, 4), 12, 12 * 4, id="average pool"),
        pytest.param(nn.AvgPool2d((2, 3)), (1, 4, 6), 4, 4 * 6, id="average pool, oblong"),
        pytest.param(nn.MaxPool2d(3, stride=2, padding=1), (2, 8, 8), 32, 32 * 9, id="max pool that overlaps"),
        pytest.param(nn.AvgPool2d(9, ceil_mode=True), (3, 4, 4), 3, 3 * 4 * 4, id="average pool larger than the map"),
        pytest.param(nn.MaxPool1d(2), (3, 8), 12, 12 * 2, id="max pool 1d"),
        pytest.param(nn.AvgPool1d(2), (3, 8), 12, 12 * 2, id="average pool 1d"),
        pytest.param(nn.AvgPool3d(2), (1, 4, 4, 4), 8, 8 * 8, id="average pool 3d"),
        pytest.param(nn.AdaptiveAvgPool2d(1), (3, 4, 5), 3, 3 * 4 * 5, id="adaptive pool to 1"),
        pytest.param(nn.AdaptiveAvgPool2d(2), (3, 4, 4), 12, 3 * 4 * 4, id="adaptive pool to 2"),
        pytest.param(nn.AdaptiveAvgPool1d(1), (3, 7), 3, 3 * 7, id="adaptive pool 1d"),
        pytest.param(nn.AdaptiveMaxPool2d(1), (3, 4, 5), 3, 3 * 4 * 5, id="adaptive max pool"),
        pytest.param(nn.BatchNorm2d(3), (3, 4, 4), 48, 0, id="batch norm"),
        pytest.param(nn.GroupNorm(1, 3), (3, 4, 4), 48, 0, id="group norm"),
        pytest.param(nn.Dropout(0.5), (9,), 9, 0, id="dropout"),
        pytest.param(nn.Flatten(), (3, 4), 12, 0, id="flatten"),
        pytest.param(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU()), (1, 3, 3), 18, 18 + 18, id="conv and relu"),
        pytest.param(fx.symbolic_trace(Product()), (3, 4), 9, 3 * 3 * 4, id="a graph of operations"),
        pytest.param(nn.Sequential(*[nn.ReLU()] * 3), (5,), 5, 15, id="one module used three times"),
        pytest.param(
            nn.Sequential(nn.Linear(4, 4), nn.Sequential()),
            (4,),
            4,
            20,
            id="empty Sequential, a shortcut in many ResNets",
        ),
    ],
)
def test_counting_rule_by_hand(module: nn.Module, shape: tuple[int, ...], outputs: int, expected: int) -> None:
    assert ew.macs(one_exit(module, outputs), shape) == [expected + 2 * outputs + 2]


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
)
def test_convolutions_count_as_pytorch_counts_them(
    groups: int, channels: tuple[int, int], size: tuple[int, int], bias: bool, **settings: Any
) -> None:
    inputs, outputs = (groups * c for c in channels)
    conv = nn.Conv2d(inputs, outputs, settings.pop("kernel"), groups=groups, bias=bias, **settings)
    x = torch.zeros(1, inputs, *size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        features = conv(x).numel()
    assert ew.macs(one_exit(conv, features), x.shape[1:]) == [counter.get_total_flops() // 2 + 2 * features + 2]


def test_all_multiplications_of_a_whole_net_are_counted() -> None:
    """PyTorch's counter counts only convolutions and linear layers, two FLOPs per MAC."""
    net = models.msdnet("tiny-16").eval()
    counted = ew.macs(net, (1, 16, 16))[-1]
    others = [m for m in net.modules() if isinstance(m, nn.ReLU | nn.AdaptiveAvgPool2d)]
    elements: list[int] = []
    for module in others:
        module.register_forward_hook(lambda module, args, output: elements.append(args[0].numel()))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.zeros(1, 1, 16, 16))
    biases = sum(head.last.out_features for head in net.exits)
    assert len(elements) == len(others)
    assert counted == counter.get_total_flops() // 2 + sum(elements) + biases


def test_an_exit_pays_for_all_earlier_heads() -> None:
    stages = [nn.Linear(4, 6), nn.Linear(6, 8, bias=False)]  # 30, 48
    heads = [
        ew.Head(nn.Sequential(nn.Linear(6, 3), nn.ReLU()), nn.Linear(3, 5)),  # 21 + 3 + 20
        ew.Head(nn.Identity(), nn.Linear(8, 5, bias=False)),  # 40
    ]
    net = ew.MultiExitNet(stages, heads)
    assert ew.macs(net, (4,)) == [30 + 44, 30 + 44 + 48 + 40]
    assert macs.cumulative_parameters(net) == [30 + 21 + 20, 30 + 21 + 20 + 48 + 40]


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Custom(nn.Module):
    """A layer without submodules that multiplies, activates and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(torch.relu(torch.nn.functional.conv2d(x, self.weight, padding=1)), 2)


class LambdaLayer(nn.Module):
    """The option A shortcut of public ResNets for CIFAR."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: torch.nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


def test_a_module_without_a_rule_is_counted_by_its_operators(caplog: pytest.LogCaptureFixture) -> None:
    macs._report_traced.cache_clear()
    expected = 5 * 64 * 27 + 5 * 64 + 5 * 16 * 4  # convolution, activation, pooling: as their modules count
    layers = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.ReLU(), nn.AvgPool2d(2))
    head = 2 * 80 + 2
    assert ew.macs(one_exit(Custom(), 80), (3, 8, 8)) == [expected + head] == ew.macs(one_exit(layers, 80), (3, 8, 8))
    assert ew.macs(one_exit(LambdaLayer(), 80), (3, 8, 8)) == [head]
    assert ew.macs(one_exit(LambdaLayer(), 80), (3, 8, 8)) == [head]
    assert [record.getMessage() for record in caplog.records] == [
        f"the MACs of {name} have no counting rule: counted by tracing the operators that they call"
        for name in ("Custom", "LambdaLayer")
    ]


@pytest.mark.parametrize("module", [Doubled(), nn.Unfold(1), nn.LPPool1d(2, 2)])
def test_no_module_is_refused_for_want_of_a_rule(module: nn.Module) -> None:
    features = 8 if isinstance(module, nn.LPPool1d) else 64 if isinstance(module, nn.Unfold) else 16
    counted = ew.macs(one_exit(module, features), (4, 4, 4) if isinstance(module, nn.Unfold) else (4, 4))
    assert counted[0] >= 2 * features + 2


def test_a_layer_with_a_tensor_of_its_own_is_counted_on_the_cpu() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.rand(4, 4)  # not a buffer: it stays on the CPU

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.factor

    assert ew.macs(one_exit(Scaled(), 4), (4,)) == [16 + 10]


def test_a_module_that_stages_share_is_counted_once_per_call() -> None:
    shared = nn.Linear(4, 4)
    heads = [ew.Head(nn.Identity(), nn.Linear(4, 2)) for _ in range(2)]
    assert ew.macs(ew.MultiExitNet([shared, shared], heads), (4,)) == [20 + 10, 2 * (20 + 10)]


# Inputs of `macs`; the net stays unchanged


def mixed_net() -> ew.MultiExitNet:
    """Return a net with parts in training and parts in evaluation mode, a frozen weight, and a user's hook."""
    net = models.msdnet("tiny-8").train()
    net.stages[1].eval()
    net.heads[0].last.weight.requires_grad_(False)
    net.heads[2].register_forward_hook(lambda module, args, output: None)
    return net


@pytest.mark.parametrize("fails", [False, True])
def test_macs_leaves_the_net_as_it_was(fails: bool) -> None:
    net = mixed_net()
    if fails:
        net.heads[2].neck.append(nn.Linear(1, 1))
    modes = [module.training for module in net.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()]
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    values = {key: (tensor.detach().clone(), tensor.requires_grad) for key, tensor in tensors.items()}
    if fails:
        with pytest.raises(ew.InputError):
            ew.macs(net, (1, 8, 8))
    else:
        assert len(ew.macs(net, (1, 8, 8))) == 3
    assert [module.training for module in net.modules()] == modes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()] == hooks
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert after.keys() == tensors.keys()
    for key, (value, gradient) in values.items():
        assert after[key] is tensors[key]
        assert after[key].device.type == "cpu"
        assert torch.equal(after[key], value)
        assert after[key].requires_grad == gradient
        assert after[key].grad is None


def test_mode_device_and_precision_do_not_change_the_count() -> None:
    net = models.msdnet("tiny-8")
    expected = ew.macs(net, (1, 8, 8))
    for variant in (
        net.eval(),
        copy.deepcopy(net).double(),
        copy.deepcopy(net).bfloat16(),
        copy.deepcopy(net).to("meta"),
    ):
        assert ew.macs(variant, (1, 8, 8)) == expected


@pytest.mark.parametrize("given", [{}, {"input_shape": (1, 8, 8), "example_inputs": torch.zeros(1, 1, 8, 8)}])
def test_either_shape_or_example_is_needed(given: dict[str, Any]) -> None:
    with pytest.raises(ew.InputError, match="`input_shape` or `example_inputs`"):
        ew.macs(models.msdnet("tiny-8"), **given)


class TwoInputs(nn.Module):
    """Two linear layers on two inputs in any container: 4 * 3 + 3 and 5 * 3 + 3 MACs."""

    def __init__(self, *path: Any) -> None:
        super().__init__()
        self.keys = path
        self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: Any) -> Tensor:
        a, b = (x[key] for key in self.keys)
        a, b = (v[0] if isinstance(v, list) else v for v in (a, b))
        return torch.cat([self.a(a), self.b(b)], dim=1)


@pytest.mark.parametrize(
    ("keys", "example"),
    [
        pytest.param(("a", "b"), {"a": torch.zeros(1, 4), "b": torch.zeros(1, 5), "scale": 2}, id="dict"),
        pytest.param((0, 1), (torch.zeros(1, 4), torch.zeros(1, 5)), id="tuple"),
        pytest.param((0, 1), [torch.zeros(1, 4), torch.zeros(1, 5)], id="list"),
        pytest.param(("a", "b"), {"a": [torch.zeros(1, 4)], "b": [torch.zeros(1, 5)]}, id="nested"),
    ],
)
def test_example_inputs_in_containers(keys: tuple[Any, Any], example: Any) -> None:
    assert ew.macs(one_exit(TwoInputs(*keys), 6), example_inputs=example) == [15 + 18 + 14]
    first = example[keys[0]]
    assert (first[0] if isinstance(first, list) else first).device.type == "cpu"


def test_example_inputs_keep_their_type() -> None:
    net = one_exit(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)), 6)
    assert ew.macs(net, example_inputs=torch.tensor([[1, 2]])) == [2 * 15 + 14]


@pytest.mark.parametrize(
    ("net", "inputs"),
    [
        pytest.param(one_exit(nn.Linear(4, 3), 3), {"input_shape": (5,)}, id="too many features"),
        pytest.param(models.msdnet("cifar100-small"), {"input_shape": (1, 32, 32)}, id="gray for color"),
        pytest.param(models.msdnet("cifar100-small"), {"input_shape": (3, 16, 16)}, id="too small for the pools"),
        pytest.param(models.msdnet("tiny-8"), {"input_shape": (8,)}, id="not an image"),
        pytest.param(models.msdnet("tiny-8"), {"example_inputs": torch.zeros(1, 3, 8, 8)}, id="example of 3 channels"),
        pytest.param(models.msdnet("tiny-8"), {"input_shape": (1, -8, 8)}, id="negative"),
        pytest.param(models.msdnet("tiny-8"), {"input_shape": 8}, id="a number"),
        pytest.param(
            one_exit(nn.BatchNorm2d(4), 4),
            {"input_shape": (4,)},
            id="batch norm's own check",
        ),
        pytest.param(
            models.msdnet("tiny-8"),
            {"example_inputs": {"image": torch.zeros(1, 1, 8, 8)}},
            id="dict for an image",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(net: ew.MultiExitNet, inputs: dict[str, Any]) -> None:
    with pytest.raises(ew.InputError) as caught:
        ew.macs(net, **inputs)
    shown = inputs.get("input_shape") or describe(inputs["example_inputs"])
    assert str(shown) in str(caught.value)
    assert "\n" not in str(caught.value)


# Costs with their unit


def test_costs_are_floats_with_a_unit() -> None:
    assert ew.Costs((1, 2)).values == (1.0, 2.0)
    assert ew.Costs((1, 2)).unit == "MACs"
    assert len(ew.Costs((3.5,), unit="ms")) == 1
    assert ew.Costs((1, 2)) != ew.Costs((1, 2), unit="ms")


def test_costs_of_a_sequence_and_of_costs() -> None:
    costs = ew.Costs((1, 2), unit="ms")
    assert ew.Costs.of(costs) is costs
    assert ew.Costs.of([1, 2]) == ew.Costs((1.0, 2.0), unit="MACs")
    assert ew.Costs.of(torch.tensor([1.0, 2.0])) == ew.Costs((1.0, 2.0))


@pytest.mark.parametrize(
    ("values", "unit", "argument"),
    [
        ((), "MACs", "costs"),
        ((0.0, 1.0), "MACs", "costs"),
        ((-1.0, 1.0), "MACs", "costs"),
        ((1.0, float("nan")), "MACs", "costs"),
        ((1.0, float("inf")), "MACs", "costs"),
        ((2.0, 1.0), "MACs", "costs"),
        ((1.0, 1.0), "MACs", "costs"),
        ((1.0, 3.0, 2.0), "ms", "costs"),
        ((1.0, 2.0), "FLOPs", "unit"),
        ((1.0, 2.0), "", "unit"),
        (("cheap", "expensive"), "MACs", "costs"),
        (3, "MACs", "costs"),
    ],
)
def test_impossible_costs_are_refused_by_name(values: Any, unit: str, argument: str) -> None:
    with pytest.raises(ew.InputError, match=f"`{argument}`.*but got"):
        ew.Costs(values, unit=unit)
