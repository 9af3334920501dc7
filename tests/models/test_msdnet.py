"""MSDNet presets: shapes as specified, and nets rebuilt from their names."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import exitwise as ew
from exitwise import models
from exitwise.models.msdnet import MultiScaleLayer, Transition

pytestmark = pytest.mark.numerical

# From the specification: layers in each block, the layers after which a scale is dropped, and the head widths.
SHAPES: dict[str, tuple[list[int], list[int], list[int]]] = {
    "cifar100-small": ([1, 2, 3, 4], [5, 9], [128] * 4),
    "cifar100-medium": ([1, 2, 3, 4, 5, 6], [8, 15], [128] * 6),
    "cifar100-large": ([1, 2, 3, 4, 5, 6, 7, 8], [13, 25], [128] * 8),
    **{
        f"{data}-{size}": shape
        for data in ("imagenet", "caltech256")
        for size, shape in {
            "small": ([4] * 5, [6, 11, 16], [384, 384, 352, 304, 560]),
            "medium": ([6] * 5, [9, 17, 25], [512, 544, 496, 880, 792]),
            "large": ([7] * 5, [10, 19, 28], [576, 640, 608, 528, 976]),
        }.items()
    },
}
TINY = ["tiny-8", "tiny-16", "tiny-32"]
CLASSES = {"cifar100": 100, "imagenet": 1000, "caltech256": 257}
FACTORS = {"cifar100": [1, 2, 4], "imagenet": [1, 2, 4, 4]}


def on_meta(preset: str, **changes: int) -> ew.MultiExitNet:
    """Build a net without allocating its weights."""
    with torch.device("meta"):
        return models.msdnet(preset, **changes)


def shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in net.state_dict().items()}


@pytest.mark.parametrize("preset", SHAPES)
def test_blocks_heads_and_classes_are_the_papers(preset: str) -> None:
    net = on_meta(preset)
    blocks, transitions, widths = SHAPES[preset]
    assert [sum(isinstance(m, MultiScaleLayer) for m in stage.modules()) for stage in net.stages] == blocks
    assert sum(isinstance(m, Transition) for m in net.modules()) == len(transitions)
    assert [head.last.in_features for head in net.exits] == widths
    assert net.num_classes == CLASSES[preset.split("-")[0]]
    assert net.spec == {"preset": preset}


@pytest.mark.parametrize("preset", [preset for preset in SHAPES if not preset.startswith("caltech256")])
@pytest.mark.slow_after_first
def test_scales_drop_and_widths_halve_where_the_specification_says(preset: str) -> None:
    net = on_meta(preset)
    _, transitions, _ = SHAPES[preset]
    factors = FACTORS[preset.split("-")[0]]
    growth = {3: 6, 4: 16}[len(factors)]
    sizes = {3: [32, 16, 8], 4: [56, 28, 14, 7]}[len(factors)]
    seen: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []
    for module in net.modules():
        if isinstance(module, MultiScaleLayer | Transition):
            module.register_forward_hook(lambda module, args, output: seen.append((module, args[0], output)))
    net(torch.empty(1, *models.config(preset).input_shape, device="meta"))

    depth = 0
    for module, before, after in seen:
        live = len(after)
        widths = [[x.shape[1] for x in maps] for maps in (before[-live:], after)]
        depth += isinstance(module, MultiScaleLayer)
        assert live == len(factors) - sum(t <= depth for t in transitions)
        assert [x.shape[-1] for x in after] == sizes[-live:]
        if isinstance(module, MultiScaleLayer):
            assert widths[1] == [w + growth * f for w, f in zip(widths[0], factors[-live:], strict=True)]
        else:
            assert depth in transitions
            base = widths[0][0] // factors[-live] // 2
            assert widths[1] == [base * f for f in factors[-live:]]


@pytest.mark.parametrize(("preset", "kernel", "biased"), [("cifar100-small", 3, False), ("imagenet-small", 7, True)])
def test_only_the_imagenet_stem_has_a_bias(preset: str, kernel: int, biased: bool) -> None:
    stem, *others = [m for m in on_meta(preset).modules() if isinstance(m, nn.Conv2d)]
    assert stem.kernel_size == (kernel, kernel)
    assert (stem.bias is not None) == biased
    assert all(conv.bias is None for conv in others)


def test_layers_put_new_channels_behind_the_old() -> None:
    net = models.msdnet("tiny-16").eval()
    layers = [m for m in net.modules() if isinstance(m, MultiScaleLayer)]
    state = [torch.randn(2, width, size, size) for width, size in ((8, 16), (16, 8), (32, 4))]
    with torch.no_grad():
        after = layers[0](state)
    assert [x.shape[1] for x in after] == [12, 24, 48]
    assert all(torch.equal(new[:, : old.shape[1]], old) for old, new in zip(state, after, strict=True))


def test_weights_start_as_pytorch_starts_them() -> None:
    """Uniform on +-1/sqrt(fan in) for convolutions and linear layers, 1 and 0 for normalizations."""
    torch.manual_seed(0)
    for module in models.msdnet("cifar100-small").modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / sqrt(module.weight[0].numel())
            assert module.weight.detach().abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / sqrt(3), rel=0.3)
        if isinstance(module, nn.BatchNorm2d):
            assert torch.all(module.weight == 1)
            assert torch.all(module.bias == 0)


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.slow
def test_tiny_nets_take_every_size_from_8_to_32(preset: str) -> None:
    torch.manual_seed(0)
    net = models.msdnet(preset).eval()
    for height in range(8, 33):
        width = 40 - height
        x = torch.randn(2, models.config(preset).in_channels, height, width)
        with torch.no_grad():
            features, logits, second_logits = net.features(x), net(x), net(x[1:])
        assert [f.shape for f in features] == [(2, 32)] * 3
        assert [z.shape for z in logits] == [(2, 10)] * 3
        assert all(torch.allclose(z[1:], a, atol=1e-5) for z, a in zip(logits, second_logits, strict=True))
        assert all(not torch.allclose(z[0], z[1]) for z in logits)  # every exit depends on the image


@pytest.mark.parametrize("preset", TINY)
def test_tiny_nets_are_small_and_their_exits_cost_more_and_more(preset: str) -> None:
    costs = ew.macs(models.msdnet(preset), models.config(preset).input_shape)
    assert len(ew.Costs(tuple(costs))) == 3  # Costs must grow
    assert costs[-1] < 1e7


def test_every_preset_is_listed_with_its_input_shape() -> None:
    shapes = {"cifar100": (3, 32, 32), "imagenet": (3, 224, 224), "caltech256": (3, 224, 224)}
    expected = {preset: shapes[preset.split("-")[0]] for preset in SHAPES}
    expected |= {"tiny-8": (1, 8, 8), "tiny-16": (1, 16, 16), "tiny-32": (3, 32, 32)}
    assert expected.keys() <= set(models.list_presets())
    assert {preset: models.config(preset).input_shape for preset in expected} == expected


@pytest.mark.parametrize(
    ("changes", "spec"),
    [
        ({"num_classes": 10}, {"num_classes": 10}),
        ({"in_channels": 1}, {"in_channels": 1}),
        ({"num_classes": 2, "in_channels": 7}, {"num_classes": 2, "in_channels": 7}),
        ({"num_classes": 100, "in_channels": 3}, {}),  # equal to the preset's: not in the spec
    ],
)
def test_overrides_change_first_and_last_layers_only(changes: dict[str, int], spec: dict[str, int]) -> None:
    net, preset_net = on_meta("cifar100-small", **changes), on_meta("cifar100-small")
    classes, channels = changes.get("num_classes", 100), changes.get("in_channels", 3)
    assert net.spec == {"preset": "cifar100-small", **spec}
    assert net.num_classes == classes
    expected = shapes(preset_net) | {"stages.0.0.scales.0.0.weight": (16, channels, 3, 3)}
    for k in range(4):
        expected |= {f"heads.{k}.last.weight": (classes, 128), f"heads.{k}.last.bias": (classes,)}
    assert shapes(net) == expected


@pytest.mark.parametrize("value", [0, -3, 2.0, "10", True, [10]])
@pytest.mark.parametrize("argument", ["num_classes", "in_channels"])
def test_odd_overrides_are_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(ew.InputError, match=f"`{argument}` .*but got"):
        models.msdnet("tiny-8", **{argument: value})


def test_one_class_is_refused() -> None:
    with pytest.raises(ew.InputError, match="`num_classes` must be a whole number from 2 to 1000000, but got 1"):
        models.msdnet("tiny-8", num_classes=1)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cifar100-smal", "cifar100-small"),
        ("cifar-100-medium", "cifar100-medium"),
        ("CIFAR100-large", "cifar100-large"),
        ("imagnet-large", "imagenet-large"),
        ("caltech-small", "caltech256-small"),
        ("tiny32", "tiny-32"),
    ],
)
def test_a_mistyped_preset_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(ew.InputError, match=f"`preset` .*{typed}.*did you mean '{meant}'"):
        models.msdnet(typed)


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(ew.InputError) as caught:
        models.msdnet("zzzzzz")
    assert all(name in str(caught.value) for name in (*SHAPES, *TINY))


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        *((preset, {}) for preset in (*SHAPES, *TINY)),
        ("cifar100-small", {"num_classes": 5}),
        ("caltech256-small", {"in_channels": 1}),
        ("tiny-16", {"num_classes": 5, "in_channels": 2}),
    ],
)
@pytest.mark.slow_after_first
def test_a_spec_rebuilds_its_net(preset: str, changes: dict[str, int]) -> None:
    net = on_meta(preset, **changes)
    assert net.spec is not None
    with torch.device("meta"):
        again = models.rebuild(net.spec)
    assert list(shapes(again).items()) == list(shapes(net).items())
    assert again.spec == net.spec


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"num_classes": 10},
        {"preset": "tiny-8", "growth": 4},
        {"preset": "tiny-8", "num_classes": "ten"},
        {"preset": "os.system"},
        {"preset": None},
        {"preset": 8},
        pytest.param({"preset": ["tiny-8"]}),
        pytest.param({"preset": {}}),
    ],
    ids=str,
)
def test_odd_specs_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ew.InputError):
        models.rebuild(spec)


@pytest.mark.parametrize(
    ("size", "cifar", "imagenet"),
    [
        ("small", (7.0e6, 2.6e7), (3.5e8, 1.1e9)),
        ("medium", (2.5e7, 6e7), (7.5e8, 2.2e9)),
        ("large", (5e7, 1.4e8), (1.5e9, 2.6e9)),
    ],
)
def test_budget_ranges_are_the_tables(size: str, cifar: tuple[float, float], imagenet: tuple[float, float]) -> None:
    assert models.budget_range({"preset": f"cifar100-{size}", "num_classes": 10}) == cifar
    for data in ("imagenet", "caltech256"):
        assert models.budget_range({"preset": f"{data}-{size}"}) == imagenet


@pytest.mark.parametrize("spec", [None, {}, {"preset": "tiny-8"}])
def test_other_nets_have_no_budget_range(spec: dict[str, Any] | None) -> None:
    assert models.budget_range(spec) is None
