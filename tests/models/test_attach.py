"""Exits attached to modules: predictions of the last exit, live values, heads, and refused modules."""

import copy
import runpy
import statistics
import time
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from other_libraries import require
from paths import ROOT
from small_benchmark import small
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, linear, scaled_dot_product_attention

import exitwise as ew
from exitwise.core.nested import iter_tensors, map_tensors, num_samples
from exitwise.models.attach.graph import ModuleInputs
from exitwise.models.attach.stages import SharedTensor
from exitwise.runtime.onnx import Session

pytestmark = pytest.mark.numerical

EXAMPLES = ROOT / "docs" / "examples"
ViT = runpy.run_path(str(EXAMPLES / "vit.py"))["ViT"]
Causal = runpy.run_path(str(EXAMPLES / "causal.py"))["Causal"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


torch.manual_seed(0)  # weights are drawn while this file is imported
N = 7
IMAGES, VECTORS, SERIES = (torch.randn(N, *shape, generator=seeded()) for shape in ((3, 32, 32), (6,), (9, 6)))
IDS = torch.randint(1, 20, (N, 9), generator=seeded())
MASK = torch.arange(9)[None] >= torch.randint(2, 10, (N, 1), generator=seeded())


class Net(nn.Module):
    """Net of named layers and a function that calls them."""

    def __init__(self, run: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self._run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._run(self, *inputs, **named)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {}


def case(inputs: Any, *at: str, name: str = "", **layers: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a net whose forward is the decorated function."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        CASES[name or run.__name__] = (lambda: Net(run, **layers), inputs, list(at))
        return run

    return register


def layers(classes: int = 4, **more: Any) -> dict[str, Any]:
    """Return three layers a, b and c for vectors of six numbers, and a classifier."""
    return {"a": nn.Linear(6, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8), "fc": nn.Linear(8, classes), **more}


def convs(**channels: tuple[int, int]) -> dict[str, nn.Module]:
    return {name: nn.Conv2d(i, o, 3, padding=1) for name, (i, o) in channels.items()}


def text(width: int = 16, **more: Any) -> dict[str, Any]:
    return {"embedding": nn.Embedding(20, width), "fc": nn.Linear(width, 3), **more}


def encoder_layers(**options: Any) -> nn.ModuleList:
    return nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **options) for _ in range(3))


# -- networks: function that builds the module, inputs, and cuts (or the number of exits)


@case(IMAGES, "down1", "middle", **convs(down1=(3, 8), down2=(8, 8), middle=(8, 8), up=(16, 8)), fc=nn.Linear(8, 5))
def u_shaped(m: Any, x: Tensor) -> Tensor:
    n = x.size(0)
    a = torch.relu(m.down1(x))[..., ::2, ::2]
    b = torch.relu(m.down2(a))[..., ::2, ::2]
    up = interpolate(torch.relu(m.middle(b)), size=a.shape[-2:])
    return m.fc(m.up(torch.cat([a, up], dim=1)).mean((2, 3)).view(n, -1))


def two_inputs(m: Any, image: Tensor, words: Tensor) -> Tensor:
    return m.fc(m.mix(torch.cat([m.see(image).relu().mean((2, 3)), m.read(words).mean(1)], dim=1)).relu())


@case(IMAGES, "a", "b", "c", **convs(a=(3, 8), b=(8, 8), c=(8, 8)), fc=nn.Linear(8, 4))
def sizes(m: Any, x: Tensor) -> Tensor:
    n, _, h, w = x.shape
    size = x.size()
    y = m.a(x)
    rows = y.shape[0] * y.shape[2]
    y = m.b(y).relu().view(n, 8, h * w).reshape(size[0], 8, size[2], w)
    return m.fc(m.c(y).permute(0, 2, 3, 1).reshape(rows, -1, 8).mean(1).view(x.shape[0], h, 8).mean(1))


@case(IDS, "layers.0", "layers.1", **text(layers=encoder_layers(), positions=nn.Parameter(torch.randn(12, 1, 16))))
def samples_second(m: Any, ids: Tensor) -> Tensor:
    tokens = m.embedding(ids).transpose(0, 1)
    tokens = tokens + m.positions[: tokens.size(0)]
    for layer in m.layers:
        tokens = layer(tokens)
    return m.fc(tokens.mean(0))


@case((IDS, MASK), "layers.0", "layers.1", **text(layers=encoder_layers(batch_first=True)))
@case(
    {"mask": MASK, "ids": IDS, "scale": 2}, "layers.1", name="by_name", **text(layers=encoder_layers(batch_first=True))
)
def padded(m: Any, ids: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    tokens = m.embedding(ids) * scale
    for layer in m.layers:
        tokens = layer(tokens, src_key_padding_mask=mask)
    seen = (~mask).float()[..., None]
    return m.fc((tokens * seen).sum(1) / seen.sum(1))


ATTENTION = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))


@case(IDS, "attention.0", "attention.1", **text(attention=ATTENTION))
def own_mask(m: Any, ids: Tensor) -> Tensor:
    mask = ids < 4
    mask[:, 0] = False
    tokens = m.embedding(ids)
    for attention in m.attention:
        tokens = tokens + attention(tokens, tokens, tokens, key_padding_mask=mask, need_weights=False)[0]
    return m.fc(tokens[:, 0])


@case(IDS, "attention.0", "attention.1", **text(attention=ATTENTION))
def mask_of_every_head(m: Any, ids: Tensor) -> Tensor:
    mask = (ids[:, None] < ids[:, :, None]).repeat_interleave(2, dim=0)  # (2 n, length, length)
    tokens = m.embedding(ids)
    for attention in m.attention:
        tokens = tokens + attention(tokens, tokens, tokens, attn_mask=mask)[0]
    return m.fc(tokens.mean(1))


@case(VECTORS, "a", "b", "c", **layers(relu=nn.ReLU(inplace=True)))
def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    z = m.b(m.relu(y))
    z += y
    z.mul_(2).add_(1)
    u = m.c(z)
    u[:, 0] = 0
    return m.fc(m.relu(u) + z)


@case(IMAGES, "l0", "l2", **convs(l0=(3, 4), l1=(7, 4), l2=(11, 4), l3=(15, 4)), fc=nn.Linear(19, 4))
def dense(m: Any, x: Tensor) -> Tensor:
    features = [x]
    for layer in (m.l0, m.l1, m.l2, m.l3):
        features.append(torch.relu(layer(torch.cat(features, dim=1))))
    return m.fc(torch.cat(features, dim=1).mean((2, 3)))


@case(VECTORS, "a", "mark", **layers(mark=nn.Identity(), weight=nn.Parameter(torch.randn(8, 8))))
def functions(m: Any, x: Tensor) -> Tensor:
    return linear(torch.tanh(m.mark(torch.relu(linear(m.a(x), m.weight)))) * 2, m.fc.weight, m.fc.bias)


@case(VECTORS, "a", "b", **layers())
def branches(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    if y.shape[1] > 4:  # only torch.export can follow
        y = y.relu()
    for i in range(y.shape[1] // 4):
        y = y + torch.arange(8, device=x.device) * i
    z = m.b(y)
    return m.fc(m.c(z).relu() + z)


def two_names() -> dict[str, Any]:
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return {"pool": tail[0], "flatten": tail[1], "tail": nn.ModuleList(tail), "fc": nn.Linear(8, 4)}


@case(IMAGES, "a", "b", **convs(a=(3, 8), b=(8, 8)), **two_names())
def second_name(m: Any, x: Tensor) -> Tensor:
    x = m.b(m.a(x).relu()).relu()
    for layer in m.tail if x.shape[1] > 4 else ():  # only torch.export can follow
        x = layer(x)
    return m.fc(x)


def timm_block(m: Any, x: Tensor) -> Tensor:
    n, length, width = x.shape
    q, k, v = m.qkv(m.norm1(x)).reshape(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
    attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width)
    x = x + m.drop_path(m.ls1(m.proj(attended)))
    return x + m.drop_path(m.ls2(m.mlp(m.norm2(x))))


def timm_layers() -> dict[str, Any]:
    scale = {f"ls{i}": Net(lambda m, x: x.mul_(m.gamma), gamma=nn.Parameter(torch.ones(16) / 9)) for i in (1, 2)}
    dropped = Net(lambda m, x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.9) if m.training else x)
    norms = {"norm1": nn.LayerNorm(16), "norm2": nn.LayerNorm(16)}
    return {
        "qkv": nn.Linear(16, 48),
        "proj": nn.Linear(16, 16),
        "mlp": nn.GELU(),
        "drop_path": dropped,
        **norms,
        **scale,
    }


class Timm(nn.Module):
    """Vision transformer in the style of timm."""

    def __init__(self, global_pool: str = "token") -> None:
        super().__init__()
        self.patch_embed, self.cls_token = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.Sequential(*(Net(timm_block, **timm_layers()) for _ in range(4)))
        self.fc_norm, self.head_drop, self.head = nn.Identity(), nn.Dropout(0.1), nn.Linear(16, 6)
        self.global_pool = global_pool

    def forward_features(self, x: Tensor) -> Tensor:
        assert x.shape[2] == 32, "no other images"  # only torch.export can follow
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return self.blocks(torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.fc_norm(x[:, 0] if self.global_pool == "token" else x[:, 1:].mean(1)))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def wide() -> nn.Sequential:
    hidden = [nn.Linear(6, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(2048, 1000, bias=False))


def one_relu(m: Any, x: Tensor) -> Tensor:
    for layer in (m.a, m.b, m.c):
        x = m.dropout(m.relu(layer(x)))
    return m.fc(x)


def encoding(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return m.fc(m.encoder(m.a(x), src_key_padding_mask=mask)[:, 0])


def chain(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.c(m.b(m.a(x)).relu()).relu())


TWO = {"see": nn.Conv2d(3, 8, 3), "read": nn.Embedding(20, 8), "mix": nn.Linear(16, 8), "fc": nn.Linear(8, 4)}
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False)
ENCODING = {"a": nn.Linear(6, 16), "encoder": ENCODER, "fc": nn.Linear(16, 3)}
GRUS = {"a": nn.GRU(6, 8, batch_first=True), "b": nn.GRU(8, 8, batch_first=True), "fc": nn.Linear(8, 3)}
ALONG = {"a": nn.Conv1d(9, 10, 3), "norm": nn.BatchNorm1d(10), "b": nn.Conv1d(10, 12, 3), "fc": nn.Linear(12, 4)}
LAST = {"a": nn.Conv2d(3, 10, 4, 4), "norm": nn.LayerNorm(10), "b": nn.Linear(10, 12), "fc": nn.Linear(12, 4)}

case((IMAGES, IDS), "see", "read", "mix", **TWO)(two_inputs)
case({"words": IDS, "image": IMAGES}, "see", "mix", name="two_inputs_by_name", **TWO)(two_inputs)
case(VECTORS, "b", "a", **layers(2, relu=nn.ReLU(), dropout=nn.Dropout(0.3)))(one_relu)
case(SERIES, "encoder.layers.0", "encoder.layers.1", name="encoder", **ENCODING)(encoding)
case((SERIES, MASK), "encoder.layers.0", name="encoder_with_mask", **ENCODING)(encoding)
case(VECTORS.double(), "a", name="double_precision", **nn.ModuleDict(layers()).double())(chain)
case(SERIES, "a", name="recurrent", **GRUS)(lambda m, x: m.fc(m.b(*m.a(x))[0][:, -1]))
case(SERIES, "norm", name="channels_first", **ALONG)(lambda m, x: m.fc(m.b(m.norm(m.a(x)).relu()).mean(-1)))
case(IMAGES, "norm", name="channels_last", **LAST)(
    lambda m, x: m.fc(m.b(m.norm(m.a(x).permute(0, 2, 3, 1)).relu()).mean((1, 2)))
)
CASES |= {
    "resnet": (lambda: ew.models.resnet("cifar100-resnet8"), IMAGES, ["stages.0.layer1", "stages.0.layer2"]),
    "resnet_inside": (lambda: ew.models.resnet("cifar100-resnet8"), IMAGES, ["stages.0.layer2.0.residual.bn1"]),
    "densenet": (lambda: ew.models.densenet("cifar100-densenet28"), IMAGES, 4),
    "vit": (ViT, IMAGES, ["blocks.0", "blocks.2"]),
    "vit_inside": (ViT, IMAGES, ["blocks.1.self_attn"]),
    "causal": (Causal, SERIES, ["blocks.0", "blocks.1"]),
    "causal_inside": (Causal, SERIES, ["blocks.0.attention", "blocks.1.norm2"]),
    "timm": (Timm, IMAGES, ["blocks.0", "blocks.2"]),
    "timm_inside": (lambda: Timm("avg"), IMAGES, ["blocks.1.qkv", "blocks.2.ls1"]),
    "sequence": (wide, VECTORS, ["2", "1"]),
}


def some(inputs: Any, rows: Any) -> Any:
    return map_tensors(lambda tensor: tensor[rows], inputs)


def call(module: nn.Module, inputs: Any) -> Any:
    """Return the logits; a MultiExitNet returns them in a list."""
    output = (
        module(**inputs)
        if isinstance(inputs, dict)
        else module(*inputs)
        if isinstance(inputs, tuple)
        else module(inputs)
    )
    return output[0] if isinstance(output, list) else output


@cache
def attached(name: str) -> tuple[nn.Module, ew.MultiExitNet, Any]:
    """Return a module, its net with exits, built from one sample, and inputs for both."""
    torch.manual_seed(0)
    make, inputs, at = CASES[name]
    module = make().eval()
    chosen = {"at": "auto", "exits": at} if isinstance(at, int) else {"at": at}
    return module, ew.attach(module, **chosen, example_inputs=some(inputs, slice(1))), inputs


# -- predictions of the exits


@pytest.mark.parametrize("name", [name for name in CASES if name != "vit_inside"])
@pytest.mark.slow_after_first
def test_the_last_exit_says_what_the_module_says(name: str) -> None:
    module, net, inputs = attached(name)
    with torch.no_grad():
        for n in (1, 2, 3, N):
            batch = some(inputs, slice(n))
            assert torch.equal(net(batch)[-1], call(module, batch)), n


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow_after_first
def test_samples_that_leave_change_nothing_for_the_others(name: str) -> None:
    _, net, inputs = attached(name)
    rng = seeded(1)
    with torch.no_grad():
        logits = net(inputs)
        remaining, state = torch.arange(N), inputs
        for k, (stage, head) in enumerate(zip(net.stages, net.exits, strict=True)):
            state = stage(state)
            assert num_samples(state) == len(remaining)
            torch.testing.assert_close(head(state), logits[k][remaining], rtol=1e-4, atol=1e-5)
            rows = torch.randperm(len(remaining), generator=rng)[: len(remaining) - 2]
            remaining, state = remaining[rows], some(state, rows)


def test_inside_of_pytorchs_own_layers_only_the_fast_path_of_attention_differs() -> None:
    module, net, inputs = attached("vit_inside")
    with torch.no_grad():
        torch.testing.assert_close(net(inputs)[-1], module(inputs), rtol=1e-5, atol=1e-6)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(net(inputs)[-1], module(inputs))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_what_all_samples_share_is_carried_once_even_where_sizes_are_alike() -> None:
    module, net, _ = attached("causal")
    square = torch.randn(12, 12, 6)  # equal numbers of samples and steps
    with torch.no_grad():
        state = net.stages[0](square)
        shared = [part for part in state.values() if isinstance(part, SharedTensor)]
        assert [tuple(part.value.shape) for part in shared] == [(12, 12)]
        assert {tensor.shape for tensor in iter_tensors(state)} == {(12, 12, 32)}
        assert torch.equal(net(square)[-1], module(square))
        assert torch.equal(net(square[:, :5])[-1], module(square[:, :5]))  # series of any length


@dataclass
class Answer:
    hidden: Tensor
    logits: Tensor


@pytest.mark.parametrize(
    "shape", [lambda h, y: [h, y], lambda h, y: {"h": h, "y": y}, Answer, lambda h, y: (y, (h, 3))]
)
def test_modules_may_give_more_than_logits(shape: Callable[..., Any]) -> None:
    module = Net(lambda m, x: (lambda h: shape(h, m.fc(h)))(m.b(m.a(x)).relu()), **layers()).eval()
    net = ew.attach(module, ["a"])
    with torch.no_grad():
        output = module(VECTORS)
        logits = (
            output.logits if isinstance(output, Answer) else next(t for t in iter_tensors(output) if t.shape[1] == 4)
        )
        assert torch.equal(net(VECTORS)[-1], logits)


# -- heads


WIDTHS = {"resnet": [16 * 16, 32 * 4, 64], "vit": [32, 32, 32], "samples_second": [16, 16, 16], "sequence": [2048] * 3}
WIDTHS |= {"channels_first": [10 * 4, 12], "channels_last": [10, 12], "recurrent": [8, 8], "one_relu": [8, 8, 8]}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.slow
def test_heads_have_the_width_of_the_channels_or_of_several_places_where_they_are_few(name: str) -> None:
    module, net, inputs = attached(name)
    linears = ew.attach(module, CASES[name][2], head="linear", example_inputs=inputs)
    assert [head.last.in_features for head in linears.exits] == WIDTHS[name]
    *early, last = WIDTHS[name]
    assert [head.last.in_features for head in net.exits] == [*(max(128, p) for p in early), last]


def test_a_head_reads_the_mean_over_places() -> None:
    module, _, _ = attached("samples_second")
    net = ew.attach(module, ["layers.0"], head="linear", example_inputs=IDS)
    tokens = module.embedding(IDS).transpose(0, 1) + module.positions[:9]
    torch.testing.assert_close(net.features(IDS)[0], module.layers[0](tokens).mean(0))


def test_own_heads_belong_to_the_names_in_their_order() -> None:
    module, _, _ = attached("resnet")

    def build_head(width: int, bias: bool = True) -> ew.Head:
        neck = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Dropout(0.5))
        return ew.Head(neck, nn.Linear(4 * width, 100, bias=bias))

    heads = [build_head(32, bias=False), build_head(16)]
    net = ew.attach(module, ["stages.0.layer2", "stages.0.layer1"], head=heads)
    assert [head.last.in_features for head in net.exits] == [64, 128, 64]
    assert net.exits[1].last.bias is None
    net = ew.attach(module, ["stages.0.layer1"], 100, lambda features, classes: build_head(features.shape[1]))
    assert net.exits[0].last.in_features == 64


def test_cuts_are_chosen_at_about_equal_cost() -> None:
    for name, max_error in (("resnet", 0.2), ("vit", 0.1), ("causal", 0.1), ("encoder", 0.1)):
        module, _, inputs = attached(name)
        net = ew.attach(module, "auto", exits=3, head="linear", example_inputs=inputs)
        costs = ew.macs(net, example_inputs=some(inputs, slice(1)))
        shares = np.array(costs) / costs[-1]
        assert np.abs(shares - [1 / 3, 2 / 3, 1]).max() < max_error, (name, shares)


@pytest.mark.parametrize("name", ["timm", "branches", "functions", "sizes", "causal"])
def test_costs_grow_by_what_stages_compute(name: str) -> None:
    _, net, inputs = attached(name)
    costs = ew.macs(net, example_inputs=some(inputs, slice(1)))
    stages = [sum(p.numel() for p in part.parameters() if p.dim() > 1) for part in net.stages]
    heads = [sum(p.numel() for p in part.parameters()) for part in net.heads]
    min_costs = np.cumsum(stages) + np.cumsum(heads)
    assert np.all(np.array(costs) >= min_costs), (costs, min_costs)


# -- the whole pipeline


CASES["one_by_name"] = (CASES["samples_second"][0], {"ids": IDS}, CASES["samples_second"][2])
EXPORTED = ("resnet_inside", "vit", "causal", "samples_second", "one_by_name", "two_inputs", "padded", "by_name")


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.slow_after_first
@pytest.mark.slow
def test_from_attached_to_exported(name: str, tmp_path: Path) -> None:
    """Cases include tokens, several inputs in order or by name, and masks."""
    _, net, few = attached(name)
    inputs = ModuleInputs.of(few).with_batch_size(40).as_given
    labels = torch.arange(40) % net.num_classes
    batches = [(some(inputs, part), labels[part]) for part in torch.arange(40).split(16)]
    trace = ew.collect(net, train=batches, val=batches, test=batches)
    cal = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt" if name == EXPORTED[0] else "T_opt")
    confidence = np.asarray(cal.predict(trace.val).probs).max(axis=2)
    policy = ew.Policy((*(float(np.median(row)) for row in confidence[:-1]), -np.inf))  # between two samples
    simulated = policy.exits(cal.predict(trace.test)).tolist()
    assert len(set(simulated)) > 1
    clf = ew.Classifier(net, cal, policy)
    prediction = clf(inputs)
    assert prediction.exits.tolist() == simulated
    single = [some(inputs, i) for i in range(40)]
    assert [answer.exit for answer in clf.stream(single, batch_size=9)] == simulated
    clf.export(tmp_path / "bundle", example=some(inputs, slice(2)))
    session = Session(tmp_path / "bundle", threads=1)
    exported = session(arrays(inputs))
    assert exported.exits.tolist() == simulated
    np.testing.assert_allclose(exported.probs, prediction.probs.numpy(), atol=1e-5)
    assert [answer.exit for answer in session.stream(map(arrays, single), batch_size=9)] == simulated
    torch.testing.assert_close(clf.optimize()(inputs).probs, prediction.probs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_inputs_may_have_any_name(tmp_path: Path) -> None:
    """Names include those that have a meaning in a bundle's graphs."""
    names = ("memory", "embedding", "mean", "probs", "next.0", "state.0", "image", "input.1")

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc = nn.Embedding(9, 8), nn.Linear(8, 3)

        def forward(self, given: dict[str, Tensor]) -> Tensor:
            weighted = (weight * given[name] for weight, name in enumerate(names, start=1))  # no two may be exchanged
            return self.embedding(given["ids"]).mean(1) + sum(weighted) / 10

    net = ew.MultiExitNet([Named(), nn.ReLU()], [ew.Head(nn.Identity(), nn.Linear(8, 3)) for _ in range(2)])
    inputs = {"ids": torch.randint(9, (30, 5)), **{name: torch.rand(30, 8) for name in names}}
    batches = [(inputs, torch.arange(30) % 3)]
    clf = ew.Classifier(
        net, ew.calibrate(ew.collect(net, batches, batches), "MIE Laplace T_opt sigma_opt"), ew.Policy((0.4, -np.inf))
    )
    clf.export(tmp_path / "bundle", example=inputs)
    session = Session(tmp_path / "bundle", threads=1)
    np.testing.assert_allclose(session(arrays(inputs)).probs, clf(inputs).probs.numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_token_that_does_not_exist_is_an_answer_and_harms_no_other(tmp_path: Path) -> None:
    _, net, few = attached("samples_second")
    ids = ModuleInputs.of(few).with_batch_size(40).as_given
    batches = [(ids, torch.arange(40) % net.num_classes)]
    clf = ew.Classifier(
        net,
        ew.calibrate(ew.collect(net, batches, batches), "MIE Laplace T_opt sigma_opt"),
        ew.Policy((0.3, 0.3, -np.inf)),
    )
    clf.export(tmp_path / "bundle", example=ids)
    session = Session(tmp_path / "bundle", threads=1)
    bad = ids.clone()
    bad[7, 2] = 10_000
    for runtime, given in ((clf, bad), (session, bad.numpy())):
        answers = list(runtime.stream(given, batch_size=16))
        good = list(runtime.stream(ids if runtime is clf else ids.numpy(), batch_size=16))
        assert [answer.index for answer in answers if answer.error] == [7]
        assert [a.exit for a in answers if not a.error] == [a.exit for a in good if a.index != 7]
        with pytest.raises(ew.InputError):
            runtime(given)


def test_mappings_as_tokenizers_give_them_and_arrays_in_them_will_do() -> None:
    _, net, inputs = attached("two_inputs_by_name")
    labels = torch.arange(N) % net.num_classes
    trace = ew.collect(net, [(UserDict(inputs), labels)], [(UserDict(inputs), labels)])
    clf = ew.Classifier(net, ew.calibrate(trace, "MIE Laplace T_opt sigma_opt"), ew.Policy((0.3, 0.3, -np.inf)))
    expected = clf(inputs)
    for variant in (UserDict(inputs), arrays(inputs)):
        assert torch.equal(clf(variant).probs, expected.probs)
    assert [a.exit for a in clf.stream(arrays(some(inputs, i)) for i in range(N))] == expected.exits.tolist()


def arrays(inputs: Any) -> Any:
    """Return inputs as a session takes them: arrays only, as its graphs contain the constants."""
    if isinstance(inputs, dict):
        return {name: value.numpy() for name, value in inputs.items() if isinstance(value, Tensor)}
    return tuple(value.numpy() for value in inputs) if isinstance(inputs, tuple) else inputs.numpy()


@pytest.mark.parametrize("preset", ["cifar100-resnet8", "cifar100-densenet10"])
def test_nets_on_presets_are_rebuilt_from_files(preset: str, tmp_path: Path) -> None:
    module = ew.models.build(preset, num_classes=7, in_channels=1).eval()
    net = ew.attach(module, "auto", exits=3, head="linear")
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    again = ew.load_net(tmp_path / "net.safetensors")
    x = torch.rand(3, 1, 32, 32)
    assert all(map(torch.equal, net(x), again(x)))
    assert again.spec == net.spec


@pytest.mark.parametrize("name", ["causal", "timm", "in_place", "by_name"])
def test_copies_and_weights_round_trip(name: str) -> None:
    module, net, inputs = attached(name)
    net_copy = copy.deepcopy(net)
    assert all(map(torch.equal, net_copy(inputs), net(inputs)))
    with torch.no_grad():
        for parameter in net_copy.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(net_copy(inputs)[-1], net(inputs)[-1])
    net_copy.load_state_dict(net.state_dict())
    assert all(map(torch.equal, net_copy(inputs), net(inputs)))
    module_parameters = {id(parameter) for parameter in module.parameters()}
    assert {id(p) for stage in net.stages for p in stage.parameters()} <= module_parameters
    assert not any("future" in key for key in net.state_dict())  # a non-persistent buffer


@pytest.mark.parametrize("name", ["in_place", "resnet", "padded", "timm"])
def test_heads_learn(name: str) -> None:
    _, net, inputs = attached(name)
    net = copy.deepcopy(net)
    net.train()
    labels = torch.arange(N) % net.num_classes
    sum(cross_entropy(logits, labels) for logits in net(inputs)).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for head in net.exits for p in (head.last.weight,))
    net.eval()
    states = list(net.states(inputs))  # no stage changes a state in place that a head has yet to read
    assert all(torch.equal(head(state), logits) for (head, state), logits in zip(states, net(inputs), strict=True))


def test_attaching_leaves_the_module_alone() -> None:
    def remembering(m: Any, x: Tensor) -> Tensor:
        m.seen.append(m.a(x))
        m.last = m.b(m.seen[-1])
        m.count += 1
        return m.fc(m.last + torch.ones(8))

    module = Net(remembering, **layers(seen=[], last=None)).eval()
    module.register_buffer("count", torch.zeros(()))
    before = set(vars(module))
    hook = module.a.register_forward_hook(lambda *_: None)
    net = ew.attach(module, ["a"])
    assert not any(isinstance(value, torch.fx.Proxy) for value in (*module.seen, module.last, module.count))
    assert set(vars(module)) == before
    hook.remove()
    assert not module.a._forward_hooks
    assert torch.equal(net(VECTORS)[-1], module(VECTORS))


# -- refused modules


REFUSED: list[Any] = []


def refused(message: str, module: Any, *at: str, **options: Any) -> None:
    REFUSED.append(pytest.param(module, {"at": list(at), **options}, message, id=message[:40]))


def plain(run: Callable[..., Any], **more: Any) -> nn.Module:
    return Net(run, **layers(**more)).eval()


def sequence(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), *more).eval()


def depends(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    if y.sum() > 0:
        y = y.relu()
    return m.fc(m.b(y))


def mean_across(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    mean = m.c(y).mean(0)
    return m.fc(m.b(y) - mean)


def view_across(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    seen = y.view(-1, 2, 4)
    z = m.b(y)
    y.add_(1)
    return m.fc(z + seen.flatten(1))


def boxes(m: Any, x: Tensor) -> dict[str, Tensor]:
    y = m.b(m.a(x))
    return {"boxes": m.c(y), "classes": m.fc(y)}


DICT, LONG, EXP = (Net(run) for run in (lambda m, y: {"y": y}, lambda m, y: y.long(), lambda m, y: y.exp()))
NESTED = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 8), nn.Linear(8, 2)).eval()
STATISTICS = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)).eval()
DROPS = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
LOOKS = Net(lambda m, x: m.fc(m.encoder(m.a(x), mask=torch.zeros(9, 9))[:, 0]), **ENCODING).eval()
DROPPING = Net(encoding, **{**ENCODING, "encoder": DROPS}).eval()
FIVE, NARROW = (ew.Head(nn.Identity(), nn.Linear(p, c)) for p, c in ((8, 5), (5, 4)))

refused("`module` must be an nn.Module, or the name of one, but got int", 3, "a")
refused("`module` is in training mode: call module.eval", sequence().train(), "0")
refused("there is no 'block.1'; did you mean 'blocks.1'", ViT().eval(), "block.1")
refused("there is no ''", sequence(), "")
refused("`at` must be a list of submodules' names, or \"auto\", but got '0'", sequence(), at="0")
refused("`at` must name each submodule once", sequence(), "0", "0")
refused("'0' and '0.1', which have the same output", NESTED, "0", "0.1")
refused("names '1', but only the last layer follows it", NESTED, "0", "1")
refused("needs `exits`, a whole number of at least 2, but got 1", sequence(), at="auto", exits=1)
refused("`exits` is 9, which needs 8 cuts, but the module can be cut at 1 places", NESTED, at="auto", exits=9)
refused("'b', which runs 2 times", plain(lambda m, x: m.fc(m.b(m.b(m.a(x))))), "b")
refused("'c', which the module's forward never calls", plain(lambda m, x: m.fc(m.b(m.a(x)))), "c")
refused("'d', whose output is a dict", plain(lambda m, x: m.fc(m.d(m.a(x))["y"]), d=DICT), "d")
refused("can read the output of 'd', int64", plain(lambda m, x: m.fc(m.a(x) + m.d(m.a(x))), d=LONG), "d")
refused("is the same for all samples", plain(lambda m, x: m.fc(m.a(x) + m.d(m.b.bias)), d=EXP), "d")
refused("cannot take inputs of uint8", ViT().eval(), "norm", example_inputs=IMAGES.byte())
refused("must be a tensor, a tuple or a dict of tensors", sequence(), "0", example_inputs=[[VECTORS]])
refused("the same number of samples first", Net(two_inputs, **TWO).eval(), "mix", example_inputs=(IMAGES, IDS[:2]))
refused("could not be guessed: pass `example_inputs`", Net(two_inputs, **TWO).eval(), "mix")
refused("must get one row of", plain(lambda m, x: m.fc(m.b(m.a(x)).mean(0))), "a", example_inputs=SERIES)
refused("but gets .2, 9, 8. for 2 samples", sequence(), "0", example_inputs=SERIES)
refused("must end in the nn.Linear .* a Softmax: multi-label", sequence(nn.Softmax(dim=1)), "0")
refused("a Sigmoid: multi-label nets, regressions, detectors", sequence(nn.Sigmoid()), "0")
refused("has one output, as in a regression", sequence(nn.Linear(3, 1)), "0")
headless = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Identity()).eval()
refused("an Identity: .*, nets without a classifier", headless, "0")
refused("but ends in a Conv2d", nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval(), "0")
refused("2 linear layers, .8, 4. classes: pass `num_classes`", plain(boxes), "a")
refused("`num_classes` is 5, but the module's last layer has 3", sequence(), "0", num_classes=5)
refused("must return only one of them", ew.models.msdnet("tiny-8").eval(), "stages.0")
refused("mixes the samples of a batch, or", plain(lambda m, x: m.fc(m.b(m.a(x) - x.mean()).relu())), "b")
refused("mixes the samples of a batch, or", STATISTICS, "0", example_inputs=VECTORS)
refused("'mean' crosses a cut and mixes the samples", plain(mean_across), "b")
refused("changes in place a value that crosses a cut", plain(view_across), "b")
refused("such as drawing random numbers", plain(lambda m, x: m.fc(m.b(m.a(x) + torch.rand(8)))), "a")
refused("at `if y.sum.. > 0:` .test_attach.py, line .*; build the stages by hand", plain(depends), "a")
refused("built with enable_nested_tensor=False", DROPPING, "encoder.layers.0", example_inputs=(SERIES, MASK))
refused("only if `is_causal` is passed with its mask", LOOKS, "encoder.layers.0", example_inputs=SERIES)
refused('`head` must be "mlp", "grid", "linear", "conv", a function or a list of heads', sequence(), "0", head="big")
refused("one head for each of 2 cuts, but has 0", plain(chain), "a", "b", head=[])
refused("must have the module's 4 classes, but has 5", plain(chain), "a", head=[FIVE])
refused("cannot read the output of 'b', float32 .2, 8. for 2 samples", plain(chain), "b", head=lambda *_: NARROW)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("module", "options", "message"), REFUSED)
def test_refused_in_one_clear_line(
    module: Any, options: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ew.InputError, match=message) as error:
        ew.attach(module, **options)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_inputs_of_another_kind_than_the_example_are_refused() -> None:
    _, net, inputs = attached("two_inputs_by_name")
    for given in (IMAGES, (IMAGES,), {"image": IMAGES}, {**inputs, "more": IDS}):
        with pytest.raises(ew.InputError, match="takes the inputs words, image, as in `example_inputs`, but got"):
            net(given)


# -- models of other libraries, and speed


def test_transformers() -> None:
    hf = require("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    bert = hf.BertForSequenceClassification(hf.BertConfig(**small, vocab_size=20, num_labels=3)).eval()
    vit = hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=32, patch_size=8, num_labels=4)).eval()
    texts, images = {"input_ids": IDS, "attention_mask": (~MASK).long()}, {"pixel_values": IMAGES}
    for module, inputs, layers in ((bert, texts, "bert.encoder.layer"), (vit, images, "vit.layers")):
        net = ew.attach(module, [f"{layers}.0", f"{layers}.1"], example_inputs=some(inputs, slice(1)))
        assert np.diff(ew.macs(net, example_inputs=some(inputs, slice(1)))).min() > 10_000
        with torch.no_grad():
            logits = net(inputs)
            for n in (1, 2, N):
                assert torch.equal(net(some(inputs, slice(n)))[-1], module(**some(inputs, slice(n))).logits)
            state = net.stages[1](some(net.stages[0](inputs), torch.tensor([5, 2])))
            torch.testing.assert_close(net.exits[1](state), logits[1][[5, 2]], rtol=1e-4, atol=1e-5)


def test_stages_are_about_as_quick_as_the_module() -> None:
    module, net, inputs = attached("resnet")

    def stages(x: Any) -> Tensor:
        for stage in net.stages:
            x = stage(x)
        return net.exits[-1](x)

    times: dict[Any, list[float]] = {module: [], stages: []}
    with torch.inference_mode():
        for _ in range(20):
            for run, durations in times.items():
                start = time.process_time()
                run(inputs)
                durations.append(time.process_time() - start)
    module_time, stages_time = map(statistics.median, times.values())
    assert stages_time < 1.3 * module_time


@pytest.mark.slow
def test_the_benchmark_measures_everything(tmp_path: Path) -> None:
    (measured,) = small("attach.py", tmp_path)["measured"]
    assert measured["attach, median seconds"] > 0
    (batch,) = measured["nobody leaves"].values()
    assert set(batch) == {
        "repeats",
        "plain module, ms",
        "stages / plain module",
        "stages and all heads / plain module",
    }
