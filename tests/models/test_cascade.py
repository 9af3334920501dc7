"""Cascades: whole networks as stages, their inputs, classes and costs, in torch and in ONNX."""

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, pad, relu

import exitwise as ew
from exitwise.models.cascade_stages import MemberInput, resize_weights
from exitwise.models.weights import load_module_weights
from exitwise.runtime.onnx import Session

pytestmark = pytest.mark.numerical

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGES = torch.randn(9, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(9) % 4


class LambdaLayer(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """A small ResNet as strangers write them: functional activations, a lambda as shortcut, pooling by size."""

    def __init__(self, width: int, classes: int = 4, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(2 * width)
            self.shortcut = LambdaLayer(lambda x: pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, width)))
            self.linear = nn.Linear(2 * width, classes)
            for norm in (self.bn1, self.bn2):
                nn.init.uniform_(norm.running_mean, -0.2, 0.2)
                nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(x)))
        x = relu(self.bn2(self.conv2(x)) + self.shortcut(x))
        x = avg_pool2d(x, x.size()[3])
        return self.linear(x.view(x.size(0), -1))  # type: ignore[no-any-return]


def small(**options: Any) -> nn.Module:
    return Classifier(4, **options).eval()


def large(**options: Any) -> nn.Module:
    return Classifier(8, seed=1, **options).eval()


def preprocessing(size: int = 16, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> ew.Preprocessing:
    return ew.Preprocessing(size, mean, std)


def trace_of(net: ew.MultiExitNet, images: Tensor = IMAGES) -> ew.Trace:
    batches = [(images, LABELS)]
    return ew.collect(net, val=batches, test=batches)


def classifier_of(net: ew.MultiExitNet, budget: float = 0.7) -> ew.Classifier:
    """Return a classifier with a pool whose thresholds let about half of the samples pass every exit."""
    trace = trace_of(net)
    calibration = ew.calibrate(trace, "Pool")
    probs = calibration.predict(trace.val).probs
    thresholds = [float(np.median(np.asarray(exit).max(axis=1))) for exit in probs[:-1]]
    policy = ew.Policy((*thresholds, float("-inf")), costs=trace.costs.values)
    return ew.Classifier(net, calibration, policy)


# Exits are the members


def test_every_exit_is_a_member_bit_for_bit() -> None:
    members = [small(), large()]
    net = ew.cascade(members)
    assert isinstance(net, ew.MultiExitNet)
    assert net.member_of_exit == (0, 1)
    assert net.num_members == 2
    for logits, member in zip(net(IMAGES), members, strict=True):
        assert torch.equal(logits, member(IMAGES))
    assert net.heads[1].last is members[1].linear  # layers are shared


def test_costs_add_up() -> None:
    cost = {module: ew.macs(ew.cascade([module]), (3, 16, 16))[0] for module in (small(), large())}
    (first, a), (second, b) = cost.items()
    assert ew.macs(ew.cascade([first, second]), (3, 16, 16)) == [a, a + b]
    assert a == 3 * 9 * 4 * 256 + 4 * 9 * 8 * 64 + 9 * 4  # two convolutions and the linear layer


def test_a_multi_exit_member_joins_all_its_exits() -> None:
    branched = ew.attach(large(), ["conv1"], example_inputs=IMAGES)
    net = ew.cascade([small(), branched, large(classes=4)], example_inputs=IMAGES)
    assert net.member_of_exit == (0, 1, 1, 2)
    outputs = net(IMAGES)
    for logits, expected in zip(outputs[1:3], branched(IMAGES), strict=True):
        assert torch.equal(logits, expected)
    last = ew.cascade([small(), branched], example_inputs=IMAGES)
    for logits, expected in zip(last(IMAGES)[1:], branched(IMAGES), strict=True):
        assert torch.equal(logits, expected)


def test_a_cascade_can_be_a_member() -> None:
    inner = ew.cascade([(small(), preprocessing(8)), (large(), preprocessing(16))])
    net = ew.cascade([inner, (large(), preprocessing(16))])
    assert net.member_of_exit == (0, 0, 1)
    for logits, expected in zip(net(IMAGES)[:2], inner(IMAGES), strict=True):
        assert torch.equal(logits, expected)


def test_inputs_may_be_dicts() -> None:
    class Text(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(20, width), nn.Linear(width, 3)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            hidden = self.embedding(tokens) * mask[..., None]
            return self.last(hidden.sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]

    inputs = {"tokens": torch.randint(20, (5, 7)), "mask": torch.ones(5, 7)}
    members = [Text(4).eval(), Text(8).eval()]
    for logits, member in zip(ew.cascade(members, example_inputs=inputs)(inputs), members, strict=True):
        assert torch.equal(logits, member(**inputs))


def test_modes_of_the_members_stay() -> None:
    member = ew.models.msdnet("tiny-8")
    assert member.training
    assert ew.cascade([member, member]).training
    assert member.training
    assert not ew.cascade([member.eval()]).training


# Preprocessing


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers(2, 40))
def test_resizing_is_bilinear_as_in_torch(given_size: int, wanted: int) -> None:
    image = torch.randn(1, 2, given_size, given_size, generator=torch.Generator().manual_seed(given_size))
    weights = torch.from_numpy(resize_weights(given_size, wanted))
    expected = interpolate(image, (wanted, wanted), mode="bilinear", antialias=given_size > wanted)
    assert torch.allclose(weights @ image @ weights.T, expected, atol=1e-4)  # float32 sums in another order


def test_a_member_gets_its_own_size_and_normalization() -> None:
    own = preprocessing(8, (0.5, 0.4, 0.3), (0.25, 0.5, 1.0))
    module = small()
    net = ew.cascade([(module, own), (large(), preprocessing(16))])
    assert net.preprocessing == preprocessing(16)
    assert net.input_shape == (3, 16, 16)
    pixels = IMAGES * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]  # in 0..1
    resized = interpolate(pixels, (8, 8), mode="bilinear", antialias=True)
    expected = module((resized - torch.tensor(own.mean)[:, None, None]) / torch.tensor(own.std)[:, None, None])
    first, second = net(IMAGES)
    assert torch.allclose(first, expected, atol=1e-4)  # the same sums in another order
    assert torch.equal(second, net.stages[1].stage.body.conv1.weight.new_tensor(large()(IMAGES).tolist()))


def test_the_largest_images_are_those_of_the_cascade() -> None:
    sizes = [preprocessing(8), preprocessing(16, mean=(0.5,) * 3), preprocessing(16), preprocessing(12)]
    assert ew.cascade([(small(), own) for own in sizes]).preprocessing == sizes[2]
    given = preprocessing(20)
    assert ew.cascade([(small(), sizes[0])], preprocessing=given).preprocessing == given


def test_one_network_at_two_resolutions_shares_its_weights() -> None:
    module = large()
    net = ew.cascade([(module, preprocessing(8)), (module, preprocessing(16))])
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in module.parameters())
    assert torch.equal(net(IMAGES)[1], module(IMAGES))
    weights = module.conv1.weight
    with torch.no_grad():
        weights.mul_(2)
    assert torch.equal(net(IMAGES)[1], module(IMAGES))
    low, high = ew.macs(net, (3, 16, 16))
    assert 0.24 < low / (high - low) < 0.4  # a quarter of the pixels, and the resizing


def test_resizing_counts() -> None:
    module = MemberInput(preprocessing(16), preprocessing(8, mean=(0.5,) * 3))
    output = module(IMAGES)
    assert module.macs((IMAGES,), output) == 3 * 8 * 16 * (16 + 8) + 3 * 8 * 8
    assert output.shape == (9, 3, 8, 8)


# Classes


def test_members_with_another_order_are_mapped() -> None:
    names = ["ant", "bee", "cat", "dog"]
    shuffled = ["dog", "ant", "cat", "bee"]
    members = [small(), large()]
    net = ew.cascade(members, classes=[names, shuffled])
    assert net.classes == tuple(names)
    expected = members[1](IMAGES)[:, [shuffled.index(name) for name in names]]
    assert torch.allclose(net(IMAGES)[1], expected, atol=1e-6)  # rows of a product may round differently
    other = ew.cascade(members, classes=[names, shuffled], class_order=shuffled)
    assert other.classes == tuple(shuffled)
    assert torch.equal(other(IMAGES)[1], members[1](IMAGES))
    assert trace_of(net).classes == tuple(names)
    assert ew.cascade(members, classes=names).classes == tuple(names)


def test_all_exits_of_a_multi_exit_member_are_mapped() -> None:
    branched = ew.attach(large(), ["conv1"], example_inputs=IMAGES)
    order = [2, 0, 3, 1]
    net = ew.cascade([branched], classes=["abcd"[i] for i in range(4)], example_inputs=IMAGES)
    assert torch.equal(net(IMAGES)[0], branched(IMAGES)[0])
    mapped = ew.cascade([branched], classes=[list("abcd")], class_order=["abcd"[i] for i in order])
    for logits, expected in zip(mapped(IMAGES), branched(IMAGES), strict=True):
        assert torch.allclose(logits, expected[:, order], atol=1e-6)


# Refused, each in one line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ew.cascade([]), "`members` must be a list of networks, but got an empty list"),
        (lambda: ew.cascade(small()), "`members` must be a list of networks, but got a Classifier"),
        (lambda: ew.cascade([small(), "large"]), "`members[1]` must be an nn.Module, or a pair"),
        (lambda: ew.cascade([(small(), 32)]), "but got Classifier and int"),
        (lambda: ew.cascade([small(), large().train()]), "`members[1]` is in training mode"),
        (lambda: ew.cascade([small(), large(classes=5)]), "all members must have the same classes, but they have 4, 5"),
        (
            lambda: ew.cascade([small(), large()], classes=[list("abcd"), list("abce")]),
            "all members must have the same classes, but `classes[1]` lacks 'd'",
        ),
        (
            lambda: ew.cascade([small(), large()], classes=[list("abcd"), list("abc")]),
            "`classes[1]` must name the member's 4 classes, but names 3",
        ),
        (
            lambda: ew.cascade([small(), large()], classes=[list("abcd"), list("abca")]),
            "`classes[1]` must name every class once, but names 'a' twice",
        ),
        (
            lambda: ew.cascade([small(), large()], classes=[list("abcd")]),
            "`classes` must have a list of names for each of 2 members, but has 1",
        ),
        (lambda: ew.cascade([small()], class_order=list("abcd")), "`class_order` needs `classes`"),
        (
            lambda: ew.cascade([(small(), preprocessing()), (large(), ew.Preprocessing(16, (0.5,), (0.5,)))]),
            "`members[0]` takes images of 3 channels, but the cascade's have 1",
        ),
        (
            lambda: ew.cascade([nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).eval(), large()]),
            "no input was found that all members take: pass `example_inputs`, or pairs",
        ),
        (
            lambda: ew.cascade([ew.models.msdnet("tiny-8"), ew.models.resnet("cifar100-resnet8")]),
            "members take inputs of (1, 8, 8) and (3, 32, 32)",
        ),
        (
            lambda: ew.cascade([small(), nn.Sequential(large(), nn.Softmax(1)).eval()]),
            "`members[1]`: the module must end in the nn.Linear that gives its logits",
        ),
        (lambda: ew.cascade([small(), large().double()]), "all members must have one dtype"),
        (lambda: ew.cascade([small(), large()], classes=[0, 1]), "`classes` must be names of classes"),
        (lambda: ew.cascade([small(), large()], classes=[[0, 1, 2, 3]] * 2), "`classes` must be names of classes"),
        (
            lambda: ew.cascade([(small(), preprocessing(12)), (large(), preprocessing())], example_inputs=(IMAGES,)),
            "`example_inputs` must be a tensor of images if a member has a Preprocessing",
        ),
        (
            lambda: ew.cascade(
                [(small(), preprocessing(12)), (large(), preprocessing())], example_inputs=torch.rand(2, 3, 20, 20)
            ),
            "`example_inputs` must be images of the cascade's shape (3, 16, 16)",
        ),
        (
            lambda: ew.cascade(
                [ew.cascade([small()], classes=list("abcd")), ew.cascade([large()], classes=list("bacd"))]
            ),
            "name their classes in different orders",
        ),
    ],
)
def test_bad_members_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ew.InputError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_members_in_float64_take_preprocessed_images() -> None:
    net = ew.cascade([(small().double(), preprocessing(12)), (large().double(), preprocessing())])
    assert [logits.dtype for logits in net(IMAGES[:2, :, :16, :16].double())] == [torch.float64] * 2


def test_names_of_classes_are_those_of_members_and_survive_a_file(tmp_path: Path) -> None:
    names = tuple("abcdefghij")
    first, second = (ew.models.msdnet("tiny-8").eval() for _ in range(2))
    net = ew.cascade([ew.cascade([first], classes=names), second])
    assert net.classes == names
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    loaded = ew.load_net(tmp_path / "net.safetensors")
    assert isinstance(loaded, ew.Cascade)
    assert loaded.classes == names
    calibration = ew.calibrate(ew.collect(net, val=[(torch.randn(10, 1, 8, 8), torch.arange(10))]), "T_opt")
    policy = ew.Policy((*(float("inf"),) * (len(net.exits) - 1), float("-inf")))
    assert ew.Classifier(net, calibration, policy).classes == names


def test_weights_of_a_module_are_checked_before_anything_changes(tmp_path: Path) -> None:
    module = small()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    quantized = {key: (10 * value).to(torch.int8) for key, value in before.items()}
    torch.save(quantized, tmp_path / "int8.pth")
    with pytest.raises(ew.InputError, match="must be a dense float32 tensor"):
        load_module_weights(module, tmp_path / "int8.pth")
    torch.save({**before, "linear.bias": torch.full((4,), torch.nan)}, tmp_path / "nan.pth")
    with pytest.raises(ew.InputError, match="not finite"):
        load_module_weights(module, tmp_path / "nan.pth")
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_a_prefix_is_dropped_only_if_the_module_has_none(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = small()

    wrapper = Wrapper()
    torch.save(wrapper.state_dict(), tmp_path / "wrapped.pth")
    load_module_weights(Wrapper(), tmp_path / "wrapped.pth")
    plain = large()
    torch.save({f"module.{key}": value for key, value in plain.state_dict().items()}, tmp_path / "parallel.pth")
    load_module_weights(large(), tmp_path / "parallel.pth")


def test_a_first_member_that_costs_more_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ew.cascade([small(), large()], example_inputs=IMAGES)
        assert not caplog.records
        net = ew.cascade([large(), small()], example_inputs=IMAGES)
    assert len(net.stages) == 2
    assert "member 1 of the cascade costs" in caplog.text
    assert "times as many MACs as the next one" in caplog.text


# Without training images


def test_laplace_needs_training_images() -> None:
    trace = trace_of(ew.cascade([small(), large()]))
    assert trace.curvature == ()
    assert trace.num_train == 0
    with pytest.raises(ew.InputError, match="methods with Laplace need the curvature of training images"):
        ew.calibrate(trace, "MIE Laplace T_opt sigma_opt")
    with pytest.raises(ew.InputError, match="no method with a variance can be chosen"):
        ew.calibration.tuning.Tuner(trace).select(variance=True)  # type: ignore[attr-defined]
    for name in ("T_opt", "MIE T_opt", "PoE T_opt", "Pool", "MIE MC dropout T_opt"):
        assert ew.calibrate(trace, name).predict(trace.val).probs.shape == (2, 9, 4)


def test_auto_chooses_without_laplace() -> None:
    images = torch.randn(60, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    batches = [(images, torch.arange(60) % 4)]
    calibration = ew.calibrate(ew.collect(ew.cascade([small(), large()]), val=batches))
    assert calibration.selection is not None
    assert not calibration.method.laplace
    assert set(calibration.selection.nlpd) == {"T_opt", "MIE T_opt", "PoE T_opt", "Pool", "Pool W_opt"}


def test_a_trace_without_curvature_is_saved_and_loaded(tmp_path: Path) -> None:
    trace = trace_of(ew.cascade([small(), large()]))
    trace.save(tmp_path / "trace.safetensors")
    loaded = ew.Trace.load(tmp_path / "trace.safetensors")
    assert loaded.curvature == ()
    assert loaded.costs == trace.costs
    assert torch.equal(loaded.val.features[1], trace.val.features[1])
    with pytest.raises(ew.InputError, match="`val` must give batches"):
        ew.collect(ew.cascade([small()]))


def test_training_images_still_give_a_curvature() -> None:
    batches = [(IMAGES, LABELS)]
    trace = ew.collect(ew.cascade([small(), large()]), train=batches, val=batches)
    assert trace.num_train == 9
    assert ew.calibrate(trace, "MIE Laplace T_opt sigma_opt").method.laplace


# The runtime


CASCADES = {
    "plain": lambda: ew.cascade([(small(), preprocessing()), (large(), preprocessing())]),
    "preprocessing": lambda: ew.cascade(
        [(small(), preprocessing(8, (0.5,) * 3, (0.25,) * 3)), (large(), preprocessing(16))]
    ),
    "upsampled": lambda: ew.cascade(
        [(small(), preprocessing(16)), (large(), preprocessing(24))], preprocessing=preprocessing(16)
    ),
    "joined": lambda: ew.cascade(
        [
            (small(), preprocessing(16)),
            (ew.attach(large(), ["conv1"], example_inputs=IMAGES), preprocessing(12)),
            (large(), preprocessing(16)),
        ]
    ),
}


def two_resolutions() -> ew.MultiExitNet:
    module = large()
    return ew.cascade([(module, preprocessing(8)), (module, preprocessing(16))])


CASCADES["two resolutions"] = two_resolutions


@pytest.mark.parametrize("name", CASCADES)
@pytest.mark.slow
def test_torch_and_onnx_answer_as_the_simulation(name: str, tmp_path: Path) -> None:
    net = CASCADES[name]()
    classifier = classifier_of(net)
    trace = trace_of(net)
    preds = classifier.calibration.predict(trace.test)
    exits = np.asarray(classifier.policy.exits(preds))
    assert len(set(exits.tolist())) > 1
    expected = np.asarray(preds.probs)[exits, np.arange(len(exits))]
    assert classifier.preprocessing == net.preprocessing
    classifier.export(tmp_path / "bundle")
    answers = [classifier(IMAGES), Session(tmp_path / "bundle")(IMAGES.numpy())]
    answers.append(copy.deepcopy(classifier).optimize()(IMAGES))
    for prediction in answers:
        assert np.array_equal(np.asarray(prediction.exits), exits)
        # Sums of the same numbers in another order: of a batch, with folded normalization, in another library.
        assert np.allclose(np.asarray(prediction.probs), expected, atol=1e-5)


@pytest.mark.slow
def test_bytes_of_any_size_are_preprocessed(tmp_path: Path) -> None:
    classifier = classifier_of(CASCADES["preprocessing"]())
    classifier.export(tmp_path / "bundle")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 30, 3), dtype=np.uint8)
    ours, onnx = classifier(torch.from_numpy(pixels)), Session(tmp_path / "bundle")(pixels)
    assert np.array_equal(np.asarray(ours.exits), onnx.exits)
    assert np.allclose(np.asarray(ours.probs), onnx.probs, atol=1e-5)  # two libraries, see above


def test_shared_stages_are_folded_separately() -> None:
    net = two_resolutions()
    classifier = classifier_of(net).optimize()
    norms = [module for module in classifier.net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert not norms
    assert any(isinstance(module, nn.BatchNorm2d) for module in net.modules())


@pytest.mark.slow
def test_a_cascade_of_presets_is_rebuilt_from_its_file(tmp_path: Path) -> None:
    net = ew.models.msdnet("tiny-8").eval()
    own = ew.Preprocessing(8, (0.5,), (0.25,))
    chain = ew.cascade([(net, ew.Preprocessing(6, (0.5,), (0.25,))), (net, own)])
    ew.save_checkpoint(chain, tmp_path / "net.safetensors")
    loaded = ew.load_net(tmp_path / "net.safetensors")
    assert loaded.spec == chain.spec
    assert isinstance(loaded, ew.Cascade)
    assert loaded.preprocessing == own
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in net.parameters())
    images = torch.randn(3, 1, 8, 8)
    for ours, theirs in zip(loaded(images), chain(images), strict=True):
        assert torch.equal(ours, theirs)
    classifier = ew.Classifier(
        chain,
        ew.calibrate(ew.collect(chain, val=[(images, torch.arange(3))]), "T_opt"),
        ew.Policy((0.3,) * 5 + (float("-inf"),)),
    )
    classifier.save(tmp_path / "classifier.safetensors")
    restored = ew.Classifier.load(tmp_path / "classifier.safetensors")
    assert torch.equal(restored(images).probs, classifier(images).probs)


@pytest.mark.parametrize("spec", [{"cascade": {}}, {"cascade": 3}, {"cascade": {"members": [], "chain": [{}]}}])
def test_a_damaged_spec_is_refused(spec: Any) -> None:
    with pytest.raises(ew.InputError, match="a model spec's `cascade` must hold"):
        ew.models.rebuild(spec)


def test_a_spec_with_another_member_or_too_many_levels_is_refused() -> None:
    spec = ew.cascade([ew.models.msdnet("tiny-8").eval()]).spec
    assert spec is not None
    spec["cascade"]["chain"][0]["member"] = -1
    with pytest.raises(ew.InputError, match="`member` must be a whole number"):
        ew.models.rebuild(spec)
    nested: Any = {"preset": "tiny-8"}
    for _ in range(5000):
        nested = {"cascade": {"members": [nested], "chain": [{"member": 0, "preprocessing": None}], "input": None}}
    with pytest.raises(ew.InputError):
        ew.models.rebuild(nested)
