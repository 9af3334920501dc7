"""ResNet and DenseNet baselines: the paper's counts, torchvision's arithmetic, and the pipeline with one exit."""

import json
import re
from functools import cache
from itertools import count
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, batch_norm, conv2d, linear, max_pool2d
from weights_cases import fill, refused, same_bits, snapshot

import exitwise as ew
from exitwise import models, zoo
from exitwise.calibration.methods import METHODS
from exitwise.cli import app
from exitwise.models.macs import cumulative_parameters

pytestmark = pytest.mark.numerical

NAMES = {"CIFAR-100": "cifar100", "ImageNet": "imagenet", "Caltech-256": "caltech256"}
ROWS = {f"{NAMES[row['dataset']]}-{row['model'].lower()}": row for row in zoo.published("baselines")}
BASELINES = {**models.RESNETS, **models.DENSENETS}


def on_meta(preset: str, **changes: int) -> ew.MultiExitNet:
    """Build a net without allocating its weights."""
    with torch.device("meta"):
        return models.build(preset, **changes)


@cache
def macs(preset: str) -> int:
    (total,) = ew.macs(on_meta(preset), models.config(preset).input_shape)
    return total


# The paper's table and figure


def test_the_presets_are_the_tables_rows() -> None:
    assert len(ROWS) == 38
    assert BASELINES.keys() == ROWS.keys()
    assert models.list_presets() == [*models.MSDNETS, *models.RESNETS, *models.DENSENETS]
    assert models.list is models.list_presets


@pytest.mark.parametrize("preset", ROWS)
@pytest.mark.slow_after_first
def test_counts_are_the_tables(preset: str) -> None:
    """The table rounds all 76 numbers to three digits; none is truncated."""
    row, net = ROWS[preset], on_meta(preset)
    assert "-".join(map(str, BASELINES[preset].blocks)) == row["layers_per_block"]
    assert float(f"{cumulative_parameters(net)[0]:.2e}") == float(row["params"])
    assert float(f"{macs(preset):.2e}") == float(row["flops"])


@pytest.mark.parametrize("family", ["resnet", "densenet"])
@pytest.mark.parametrize("dataset", NAMES)
@pytest.mark.slow_after_first
def test_macs_are_the_figures_to_the_last_digit(dataset: str, family: str) -> None:
    rows = [row for row in zoo.published("budget_curves") if (row["dataset"], row["model"]) == (dataset, family)]
    printed = {float(row["flops"]) for row in rows}
    assert len(printed) == (9 if dataset == "CIFAR-100" else 5)
    assert {macs(preset) for preset in ROWS if preset.startswith(f"{NAMES[dataset]}-{family}")} == printed


@pytest.mark.parametrize("preset", models.DENSENETS)
@pytest.mark.slow_after_first
def test_what_densenets_count_leaves_out_is_little(preset: str) -> None:
    """The count omits the last ReLU and pooling; as modules, they would be counted."""
    net, shape = on_meta(preset), models.config(preset).input_shape
    head = net.exits[0]
    counted_neck = nn.Sequential(head.neck.norm5, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    (full_count,) = ew.macs(ew.MultiExitNet(net.stages, [ew.Head(counted_neck, head.last)]), shape)
    omitted = 2 * head.last.in_features * (shape[1] // (4 if shape[1] == 32 else 32)) ** 2
    assert full_count - macs(preset) == omitted
    assert 0 < omitted / full_count < 0.0004


# Reference implementation of torchvision's nets on state dicts with torchvision's names

State = dict[str, Tensor]


def norm(x: Tensor, state: State, key: str) -> Tensor:
    return batch_norm(x, *(state[f"{key}.{name}"] for name in ("running_mean", "running_var", "weight", "bias")))


def reference_resnet(state: State, x: Tensor) -> Tensor:
    if state["conv1.weight"].shape[-1] == 7:
        x = norm(conv2d(x, state["conv1.weight"], stride=2, padding=3), state, "bn1").relu()
        x = max_pool2d(x, 3, 2, 1)
    else:
        x = norm(conv2d(x, state["conv1.weight"], padding=1), state, "bn1").relu()
    for group in (1, 2, 3, 4):
        for i in count():
            block = f"layer{group}.{i}"
            if f"{block}.conv1.weight" not in state:
                break
            stride = 2 if group > 1 and i == 0 else 1
            deep = f"{block}.conv3.weight" in state  # a bottleneck, whose 3x3 convolution is the strided one
            strides = (1, stride, 1) if deep else (stride, 1)
            y = x
            for step, s in enumerate(strides, start=1):
                weight = state[f"{block}.conv{step}.weight"]
                y = norm(conv2d(y, weight, stride=s, padding=weight.shape[-1] // 2), state, f"{block}.bn{step}")
                y = y.relu() if step < len(strides) else y
            if f"{block}.downsample.0.weight" in state:
                x = norm(
                    conv2d(x, state[f"{block}.downsample.0.weight"], stride=stride), state, f"{block}.downsample.1"
                )
            x = (x + y).relu()
    return linear(x.mean(dim=(2, 3)), state["fc.weight"], state["fc.bias"])


def reference_densenet(state: State, x: Tensor) -> Tensor:
    f = "features"
    if f"{f}.norm0.weight" in state:
        x = norm(conv2d(x, state[f"{f}.conv0.weight"], stride=2, padding=3), state, f"{f}.norm0").relu()
        x = max_pool2d(x, 3, 2, 1)
    else:
        x = conv2d(x, state[f"{f}.conv0.weight"], padding=1)
    for block in (1, 2, 3, 4):
        outputs = [x]
        for i in count(1):
            layer = f"{f}.denseblock{block}.denselayer{i}"
            if f"{layer}.conv1.weight" not in state:
                break
            y = conv2d(norm(torch.cat(outputs, 1), state, f"{layer}.norm1").relu(), state[f"{layer}.conv1.weight"])
            y = norm(y, state, f"{layer}.norm2").relu()
            outputs.append(conv2d(y, state[f"{layer}.conv2.weight"], padding=1))
        x = torch.cat(outputs, 1)
        transition = f"{f}.transition{block}"
        if f"{transition}.conv.weight" in state:
            x = conv2d(norm(x, state, f"{transition}.norm").relu(), state[f"{transition}.conv.weight"])
            x = avg_pool2d(x, 2)
    x = adaptive_avg_pool2d(norm(x, state, f"{f}.norm5").relu(), 1)
    return linear(x[:, :, 0, 0], state["classifier.weight"], state["classifier.bias"])


def torchvision_name(key: str) -> str:
    """Return torchvision's key for a key of exitwise."""
    match key.split("."):
        case ["heads", "0", "neck", *rest]:
            return ".".join(["features", *rest])
        case ["heads", "0", "last", rest]:
            return f"last.{rest}"
        case ["stages", "0", layer, block, "residual", *rest]:
            return ".".join([layer, block, *rest])
        case ["stages", "0", *rest]:
            return ".".join(rest)
        case _:
            raise AssertionError(key)


def torchvision_state(net: ew.MultiExitNet, family: str) -> State:
    named = {torchvision_name(key): value for key, value in net.state_dict().items()}
    if family == "ResNet":
        return {key.replace("last.", "fc."): value for key, value in named.items()}
    state = {key if key.startswith("features.") else f"features.{key}": value for key, value in named.items()}
    return {key.replace("features.last.", "classifier."): value for key, value in state.items()}


def randomize(net: ew.MultiExitNet) -> ew.MultiExitNet:
    """Set normalizations to random values, as after training, and return the net."""
    generator = torch.Generator().manual_seed(3)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight.detach(), module.bias.detach(), module.running_mean, module.running_var):
                assert value is not None
                value.copy_(torch.rand(value.shape, generator=generator) + 0.3)
    return net


REFERENCE_CASES = [
    ("cifar100-resnet14", {}, 16),
    ("imagenet-resnet18", {"num_classes": 7}, 64),
    ("imagenet-resnet50", {"num_classes": 7, "in_channels": 1}, 64),
    ("cifar100-densenet16", {}, 16),
    ("imagenet-densenet57", {"num_classes": 7}, 64),
]


@pytest.mark.parametrize(("preset", "changes", "size"), REFERENCE_CASES)
@pytest.mark.slow_after_first
def test_torchvisions_weights_load_and_compute_what_they_do_there(
    preset: str, changes: dict[str, int], size: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source = randomize(models.build(preset, **changes))
    family = models.family(preset).name
    state = torchvision_state(source, family)
    assert len(state) == len(source.state_dict())
    torch.save(state, tmp_path / "torchvision.pth")
    net = ew.load_checkpoint(models.build(preset, **changes), tmp_path / "torchvision.pth").double().eval()
    assert same_bits(snapshot(net.float()), snapshot(source))
    x = torch.randn(2, changes.get("in_channels", 3), size, size, dtype=torch.float64)
    reference = reference_resnet if family == "ResNet" else reference_densenet
    expected = reference({key: value.double() for key, value in state.items()}, x)
    with torch.no_grad():
        (logits,) = net.double()(x)
    assert logits.shape == (2, net.num_classes)
    torch.testing.assert_close(logits, expected)
    assert not torch.allclose(expected[0], expected[1])


def test_densenet_weights_as_torchvision_offers_them_load(tmp_path: Path) -> None:
    """These files have keys norm.1 for norm1, and no batch counters."""
    source = fill(models.densenet("cifar100-densenet16"))
    state = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", key): value
        for key, value in torchvision_state(source, "DenseNet").items()
        if not key.endswith("num_batches_tracked")
    }
    assert "features.denseblock1.denselayer2.norm.1.running_mean" in state
    torch.save(state, tmp_path / "old.pth")
    net = ew.load_checkpoint(models.densenet("cifar100-densenet16"), tmp_path / "old.pth")
    for key, value in source.state_dict().items():
        assert key.endswith("num_batches_tracked") or torch.equal(net.state_dict()[key], value)


# Running and training

SMALL = [
    ("cifar100-resnet8", 8, 64),
    ("imagenet-resnet10", 32, 512),
    ("caltech256-resnet50", 32, 2048),
    ("cifar100-densenet10", 8, 27),
    ("caltech256-densenet57", 32, 480),
]


@pytest.mark.parametrize(("preset", "size", "width"), SMALL)
def test_shapes_and_gradients(preset: str, size: int, width: int) -> None:
    torch.manual_seed(0)
    net = models.build(preset, num_classes=5)
    x = torch.randn(4, 3, size, size)
    x_before = x.clone()
    (state,) = [state for _, state in net.eval().states(x)]
    state_before = state.clone()
    assert [f.shape for f in net.features(x)] == [(4, width)]
    net.exits[0].features(state)
    assert torch.equal(state, state_before)  # no operation in place reaches a state or an input
    assert torch.equal(x, x_before)

    (logits,) = net.train()(x)
    assert logits.shape == (4, 5)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    dead = [key for key, value in net.named_parameters() if value.grad is None or not value.grad.abs().max() > 0]
    assert dead == []


def test_resnets_start_as_torchvision_starts_them() -> None:
    torch.manual_seed(0)
    for key, module in models.resnet("imagenet-resnet10").named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.weight[:, 0].numel()
            assert module.weight.std().item() == pytest.approx(sqrt(2 / fan_out), rel=0.05), key
        if isinstance(module, nn.BatchNorm2d):
            assert torch.all(module.weight == 1)
            assert torch.all(module.bias == 0)


def test_densenets_start_as_torchvision_starts_them() -> None:
    torch.manual_seed(0)
    net = models.densenet("caltech256-densenet57")
    for key, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            assert module.weight.std().item() == pytest.approx(sqrt(2 / fan_in), rel=0.05), key
    assert torch.all(net.exits[0].last.bias == 0)


# Names, specs, files


@pytest.mark.parametrize(
    ("preset", "changes", "spec", "stem", "last"),
    [
        ("cifar100-resnet14", {"num_classes": 5}, {"num_classes": 5}, (16, 3, 3, 3), (5, 64)),
        ("imagenet-resnet50", {"in_channels": 1}, {"in_channels": 1}, (64, 1, 7, 7), (1000, 2048)),
        ("cifar100-densenet10", {"num_classes": 100, "in_channels": 3}, {}, (24, 3, 3, 3), (100, 27)),
        ("imagenet-densenet121", {"num_classes": 2, "in_channels": 4}, None, (64, 4, 7, 7), (2, 1024)),
    ],
)
def test_overrides(
    preset: str, changes: dict[str, int], spec: dict[str, int] | None, stem: tuple[int, ...], last: tuple[int, ...]
) -> None:
    net, preset_net = on_meta(preset, **changes), on_meta(preset)
    assert net.spec == {"preset": preset, **(changes if spec is None else spec)}
    changed = {models.family(preset).stem: stem, "heads.0.last.weight": last, "heads.0.last.bias": last[:1]}
    expected = {key: tuple(value.shape) for key, value in preset_net.state_dict().items()} | changed
    assert {key: tuple(value.shape) for key, value in net.state_dict().items()} == expected
    with torch.device("meta"):
        assert models.rebuild(net.spec or {}).spec == net.spec


@pytest.mark.parametrize("preset", models.list_presets())
@pytest.mark.slow_after_first
def test_every_preset_is_built_by_its_name_and_has_the_exits_it_says(preset: str) -> None:
    net = on_meta(preset)
    assert net.spec == {"preset": preset}
    assert len(net.exits) == models.config(preset).exits
    assert net.num_classes == models.config(preset).num_classes
    assert models.family(preset).stem in net.state_dict()


@pytest.mark.parametrize(
    ("make", "typed", "hint"),
    [
        (models.resnet, "cifar100-resent14", "did you mean 'cifar100-resnet14'?"),
        (models.resnet, "CIFAR100-ResNet110", "did you mean 'cifar100-resnet110'?"),
        (models.resnet, "imagenet-densenet121", "did you mean 'imagenet-resnet"),
        (models.densenet, "imagenet-densenet", "did you mean 'imagenet-densenet"),
        (models.densenet, "zzzz", "known are cifar100-densenet10, "),
        (models.build, "imagenet_resnet50", "did you mean 'imagenet-resnet50'?"),
        (models.build, "zzzz", "`exitwise models` lists the names"),
        (models.config, ["cifar100-resnet8"], "did you mean 'cifar100-resnet8'?"),
        (models.family, None, "`exitwise models` lists the names"),
    ],
)
def test_a_wrong_name_is_answered_in_one_line(make: Any, typed: Any, hint: str) -> None:
    with pytest.raises(ew.InputError, match=re.escape(hint)) as caught:
        make(typed)
    assert "\n" not in str(caught.value)
    assert repr(typed) in str(caught.value)


@pytest.mark.parametrize("make", [models.resnet, models.densenet])
@pytest.mark.parametrize(("argument", "value"), [("num_classes", 1), ("num_classes", "5"), ("in_channels", 0)])
def test_odd_overrides_are_refused_by_name(make: Any, argument: str, value: Any) -> None:
    preset = "cifar100-resnet8" if make is models.resnet else "cifar100-densenet10"
    with pytest.raises(ew.InputError, match=f"`{argument}` .*but got {value!r}"):
        make(preset, **{argument: value})


@pytest.mark.parametrize(
    ("preset", "changes"), [("cifar100-resnet20", {"num_classes": 5}), ("cifar100-densenet22", {"in_channels": 1})]
)
def test_a_saved_net_comes_back_bit_for_bit(preset: str, changes: dict[str, int], tmp_path: Path) -> None:
    net = fill(models.build(preset, **changes))
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    again = ew.load_net(tmp_path / "net.safetensors")
    assert same_bits(snapshot(again), snapshot(net))
    assert again.spec == net.spec == {"preset": preset, **changes}


@pytest.mark.parametrize(
    ("source", "changes", "target", "expected"),
    [
        ("cifar100-resnet20", {"num_classes": 10}, "cifar100-resnet14", "it fits 'cifar100-resnet20', num_classes=10"),
        ("cifar100-resnet8", {"in_channels": 1}, "cifar100-small", "it fits 'cifar100-resnet8', in_channels=1"),
        ("cifar100-densenet16", {}, "cifar100-resnet14", "it fits 'cifar100-densenet16'"),
        ("caltech256-resnet10", {}, "cifar100-densenet10", "it fits 'caltech256-resnet10'"),
        ("tiny-8", {}, "cifar100-densenet10", "it fits 'tiny-8'"),
    ],
)
@pytest.mark.slow_after_first
def test_a_misfit_names_the_preset_that_fits(
    source: str, changes: dict[str, int], target: str, expected: str, tmp_path: Path
) -> None:
    torch.save(models.build(source, **changes).state_dict(), tmp_path / "other.pth")
    assert refused(models.build(target), tmp_path / "other.pth").endswith(expected)


def test_weights_of_a_resnet_that_is_not_a_preset(tmp_path: Path) -> None:
    state = models.resnet("cifar100-resnet8").state_dict()
    torch.save({**state, "stages.0.layer4.0.conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    assert refused(models.resnet("cifar100-resnet8"), tmp_path / "other.pth").endswith("no preset fits it")


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app.app(list(arguments), standalone_mode=False)
    return capsys.readouterr().out


def test_the_command_counts_a_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    costs = json.loads(run(capsys, "cost", "imagenet-densenet57", "--num-classes", "257", "--json"))
    (exit_costs,) = costs["exits"]
    assert exit_costs["vanilla"] == 923732065  # as caltech256-densenet57 in the figure
    assert exit_costs["ensemble"] == exit_costs["vanilla"]
    assert "26.80" in run(capsys, "cost", "cifar100-resnet14")


def test_the_command_lists_families_and_exits_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "models").splitlines()
    assert [line.split()[0] for line in lines] == models.list_presets()
    by_name = {line.split()[0]: line for line in lines}
    assert by_name["cifar100-large"].split()[1:3] == ["MSDNet", "8"]
    assert by_name["caltech256-densenet121"].split()[1:3] == ["DenseNet", "1"]
    assert len({line.index("images") for line in lines}) == len({len(line) for line in lines}) == 1
    described = json.loads(run(capsys, "models", "--json"))["models"]["imagenet-resnet50"]
    assert described == {"family": "ResNet", "exits": 1, "input_shape": [3, 224, 224], "classes": 1000}


# The pipeline with one exit


@pytest.fixture(scope="module", params=["cifar100-resnet8", "cifar100-densenet10"])
def trace(request: pytest.FixtureRequest) -> ew.Trace:
    torch.manual_seed(0)
    net = models.build(request.param, num_classes=5).eval()
    batches = [(torch.randn(60, 3, 8, 8), torch.randint(5, (60,))) for _ in range(3)]
    collected = ew.collect(net, train=batches[:1], val=batches[1:2], test=batches[2:])
    images, labels = batches[2]
    assert collected.test is not None
    with torch.no_grad():
        torch.testing.assert_close(collected.test.features[0], net.features(images)[0])
    assert collected.test.labels.tolist() == labels.tolist()
    assert collected.costs.values == tuple(ew.macs(net, (3, 8, 8)))
    assert collected.model == {"preset": request.param, "num_classes": 5}
    return collected


def test_calibration_of_one_exit(trace: ew.Trace) -> None:
    """Calibration never worsens the validation NLPD, and an ensemble of one exit equals that exit."""
    calibrations = {name: ew.calibrate(trace, name, samples=20) for name in METHODS}
    vanilla = calibrations["MSDNet (vanilla)"].val_nlpd[0]
    assert calibrations["T_opt"].val_nlpd[0] < vanilla  # untrained, so that any temperature above 1 helps
    for name, calibration in calibrations.items():
        if name.startswith("MIE"):
            single = calibrations[name.removeprefix("MIE").strip() or "MSDNet (vanilla)"]
            assert calibration.temperatures == single.temperatures
            assert np.array_equal(calibration.predict(trace.test).probs, single.predict(trace.test).probs)


def test_policies_with_one_exit_take_it(trace: ew.Trace) -> None:
    assert trace.test is not None
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", samples=20)
    val, test = calibration.predict(trace.val), calibration.predict(trace.test)
    (cost,) = trace.costs.values
    fitted = ew.fit_policy(val, costs=trace.costs, budget=cost)
    right = np.mean(np.asarray(test.probs[0]).argmax(axis=1) == trace.test.labels.numpy())
    policies = [fitted, *ew.sweep(val, costs=trace.costs)]
    assert len(policies) == 40
    for policy in policies:
        result = ew.evaluate(test, labels=trace.test.labels, policy=policy, costs=trace.costs)
        assert policy.thresholds == (-np.inf,)
        assert policy.cost == result.cost == cost
        assert result.exit_shares == (1.0,)
        assert result.top1 == result.per_exit[0].top1 == right
    for budget in (cost - 1, cost + 1):
        with pytest.raises(ew.InputError, match=r"`budget` must lie between .* but got"):
            ew.fit_policy(val, costs=trace.costs, budget=budget)


def test_the_ablation_of_one_exit_is_flat_in_the_budget(trace: ew.Trace) -> None:
    assert trace.test is not None
    (cost,) = trace.costs.values
    table = ew.ablation(trace, (cost / 2, cost * 2), samples=20)
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", samples=20)
    policy = ew.fit_policy(calibration.predict(trace.val), costs=trace.costs, budget=cost)
    result = ew.evaluate(calibration.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
    for name in ("top1", "nlpd", "ece"):
        assert getattr(table["MIE Laplace T_opt sigma_opt"], name) == pytest.approx(getattr(result, name))
