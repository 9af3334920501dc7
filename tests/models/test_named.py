"""Networks of timm, torchvision and Transformers by name: small, with random weights, and without a network."""

import io
import json
import os
import re
import socket
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from other_libraries import define_operators
from PIL import Image
from safetensors.torch import load_file, save_file

import exitwise as ew
from exitwise.core.image_files import decode_image
from exitwise.models.named.build import rebuild_named
from exitwise.models.named.hub_access import offline_without_network
from exitwise.models.named.image_processor import preprocessing_of
from exitwise.models.named.timm_models import stage_ends

define_operators()
pytest.importorskip("timm")


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test of this file reaches a server, whatever the machine could."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("https_proxy", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def photo(width: int = 130, height: int = 90) -> Image.Image:
    """A photo-like image: smooth, with noise."""
    rng = np.random.default_rng(0)
    x, y = np.linspace(0, 6, width), np.linspace(0, 4, height)[:, None]
    smooth = np.stack([np.sin(x + y), np.cos(x * y), np.sin(2 * x) + 0 * y], -1)
    return Image.fromarray(np.clip(120 + 80 * smooth + rng.normal(0, 9, smooth.shape), 0, 255).astype(np.uint8))


def prepared(preprocessing: ew.Preprocessing, image: Image.Image) -> torch.Tensor:
    """The input of a net, as image files become it."""
    pixels = np.asarray(preprocessing.crop(image)).transpose(2, 0, 1)
    return torch.from_numpy(preprocessing.normalize(np.ascontiguousarray(pixels)))


# -- preprocessing: the library's own transform is the oracle


@pytest.mark.slow_after_first
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_050", "test_vit"])
def test_timm_images_are_those_of_its_own_transform(name: str) -> None:
    from timm.data import create_transform, resolve_model_data_config

    named = ew.models.build_named(f"timm:{name}", 3, weights=None)
    assert named.preprocessing is not None
    transform = create_transform(**resolve_model_data_config(named.module), is_training=False)
    expected = transform(photo(700, 500))
    torch.testing.assert_close(prepared(named.preprocessing, photo(700, 500)), expected, rtol=0, atol=1e-5)  # rounding


@pytest.mark.slow
def test_images_of_every_timm_configuration_are_those_of_its_own_transform() -> None:
    """One network of each preprocessing that timm knows, at most 256 pixels large: about a hundred."""
    import timm
    from timm.data import create_transform, resolve_data_config

    from exitwise.models.named import timm_models

    image, seen = photo(420, 300), set()
    for name in timm.list_models():
        config = timm_models._config(timm, name)
        try:
            preprocessing = timm_models._preprocessing(name, config, None)
        except ew.InputError:  # not square, or a crop that exitwise does not have
            continue
        if preprocessing.size > 256 or preprocessing in seen:
            continue
        seen.add(preprocessing)
        transform = create_transform(**resolve_data_config({}, pretrained_cfg=config), is_training=False)
        torch.testing.assert_close(  # rounding
            prepared(preprocessing, image), transform(image), rtol=0, atol=1e-5, msg=lambda text, name=name: name + text
        )
    assert len(seen) > 50


def test_torchvision_images_are_those_of_its_own_transform() -> None:
    from torchvision.models import ResNet18_Weights

    named = ew.models.build_named("torchvision:resnet18", 3, weights=None)
    assert named.preprocessing is not None
    expected = ResNet18_Weights.DEFAULT.transforms()(photo(700, 500))
    torch.testing.assert_close(prepared(named.preprocessing, photo(700, 500)), expected, rtol=0, atol=1e-5)  # rounding


def tiny_resnet(folder: Path, **config: Any) -> None:
    """A ResNet of Transformers, as `save_pretrained` writes it."""
    import transformers

    options = {"num_labels": 3, "id2label": {0: "dog", 1: "cat", 2: "owl"}, "label2id": {"dog": 0, "cat": 1, "owl": 2}}
    shape = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**shape, **{**options, **config}))
    model.save_pretrained(folder)


PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "scaled and cropped": ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 64}, "crop_pct": 0.875}),
    "squashed": ("ViTImageProcessorPil", {"size": {"height": 64, "width": 64}}),
    "squashed and cropped": (
        "ViTImageProcessorPil",
        {"size": {"height": 72, "width": 72}, "do_center_crop": True, "crop_size": {"height": 64, "width": 64}},
    ),
    "not normalized": (
        "ViTImageProcessorPil",
        {"size": {"height": 64, "width": 64}, "do_normalize": False, "rescale_factor": 1 / 127.5, "resample": 3},
    ),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_transformers_images_are_those_of_its_own_processor(kind: str) -> None:
    import transformers

    name, settings = PROCESSORS[kind]
    processor = getattr(transformers, name)(**settings)
    expected = processor(photo(), return_tensors="pt")["pixel_values"][0]
    given = prepared(preprocessing_of("hf:some", processor), photo())
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)  # rounding


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("ViTImageProcessorPil", {"size": {"height": 64, "width": 48}}, "does not make square images"),
        ("ViTImageProcessorPil", {"size": {"height": 64, "width": 64}, "do_resize": False}, "does not make square"),
    ],
)
def test_processors_that_cannot_be_repeated_are_refused(name: str, settings: dict[str, Any], reason: str) -> None:
    import transformers

    with pytest.raises(ew.InputError, match=reason):
        preprocessing_of("hf:some", getattr(transformers, name)(**settings))


def test_a_processor_that_does_more_than_its_settings_say_is_refused() -> None:
    import transformers

    class Inverted(transformers.ViTImageProcessorPil):  # type: ignore[misc, name-defined]
        def __call__(self, images: Any, **options: Any) -> Any:
            return {"pixel_values": -super().__call__(images, **options)["pixel_values"]}

    with pytest.raises(ew.InputError, match="does more than scale, crop and normalize"):
        preprocessing_of("hf:some", Inverted(size={"height": 64, "width": 64}))


def test_preprocessing_survives_json_and_stays_readable_by_former_versions() -> None:
    plain = ew.Preprocessing(32, (0.5,), (0.25,), 1.1)
    assert set(plain.to_dict()) == {"size", "mean", "std", "margin"}
    for look in (plain, ew.Preprocessing(32, (0.5,) * 3, (0.25,) * 3, 1.2, "bicubic", True)):
        assert ew.Preprocessing.from_dict(json.loads(json.dumps(look.to_dict()))) == look
    with pytest.raises(ew.InputError, match="`interpolation` must be one of"):
        ew.Preprocessing(32, (0.5,), (0.25,), interpolation="cubic")


# -- exits


def check_attached(net: ew.MultiExitNet, module: torch.nn.Module, x: Any, file: Path) -> None:
    """The last exit is the module's own, and the net comes back from a file that names it."""
    with torch.no_grad():
        output = module(**x) if isinstance(x, dict) else module(x)
        own = output if isinstance(output, torch.Tensor) else output.logits
        logits = net(x)
    torch.testing.assert_close(logits[-1], own, rtol=1e-4, atol=1e-5)  # attention may take another path
    ew.save_checkpoint(net, file)
    again = ew.load_net(file)
    assert again.spec == json.loads(json.dumps(net.spec))
    assert again.preprocessing == net.preprocessing
    for expected, loaded in zip(logits, again(x), strict=True):
        assert torch.equal(loaded, expected)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("name", ["timm:resnet10t", "timm:test_vit", "torchvision:mobilenet_v3_small"])
def test_exits_are_attached_by_name_and_rebuilt_from_a_file(name: str, tmp_path: Path) -> None:
    named = ew.models.build_named(name, 5, weights=None)
    file = tmp_path / "weights.safetensors"
    save_file(named.module.state_dict(), file)
    loaded = ew.attach(name, exits=3, num_classes=5, weights=file)
    assert named.preprocessing is not None
    assert loaded.preprocessing == named.preprocessing
    assert loaded.input_shape == named.preprocessing.shape
    check_attached(loaded, named.module, named.example, tmp_path / "net.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "text"])
def test_exits_are_attached_to_networks_of_transformers(kind: str, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    if kind == "images":
        tiny_resnet(folder)
        transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(folder)
    else:
        shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
        config = transformers.BertConfig(vocab_size=99, max_position_embeddings=64, num_labels=4, **shape)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    named = ew.models.build_named(f"hf:{folder}")
    assert named.classes == (("dog", "cat", "owl") if kind == "images" else None)
    assert (named.preprocessing is None) == (kind == "text")
    net = ew.attach(f"hf:{folder}", exits=3)
    check_attached(net, named.module, named.example, tmp_path / "net.safetensors")


@pytest.mark.slow
def test_exits_are_attached_at_the_ends_of_stages() -> None:
    named = ew.models.build_named("timm:test_resnet", 3, weights=None, image_size=32)
    net = ew.attach(named, "stages", exits=3)
    assert net.cuts == ("layer2", "layer3")
    assert net.spec is not None
    assert net.spec["attach"]["at"] == ["layer2", "layer3"]
    with pytest.raises(ew.InputError, match=r"`exits` must be from 2 to 5 at the ends of the stages of timm:test_resn"):
        ew.attach(named, "stages", exits=6)


def test_stages_end_where_the_resolution_changes() -> None:
    info = [{"module": f"blocks.{i}", "reduction": reduction} for i, reduction in enumerate((4, 4, 8, 16, 16, 32))]
    network = SimpleNamespace(feature_info=info)
    assert stage_ends("timm:some", network, None) == ["blocks.1", "blocks.2", "blocks.4"]
    assert stage_ends("timm:some", network, 3) == ["blocks.2", "blocks.4"]
    for without in (SimpleNamespace(), SimpleNamespace(feature_info=[{"module": "blocks.0", "reduction": 16}] * 3)):
        with pytest.raises(ew.InputError, match="timm:some has no ends of stages"):
            stage_ends("timm:some", without, None)


def test_a_new_number_of_classes_keeps_the_pretrained_features(tmp_path: Path) -> None:
    import transformers

    tiny_resnet(tmp_path)
    transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path)
    own, other = (ew.models.build_named(f"hf:{tmp_path}", classes) for classes in (None, 7))
    assert (own.num_classes, other.num_classes, other.classes) == (3, 7, None)
    first, second = own.module.state_dict(), other.module.state_dict()
    differing = [key for key in first if not torch.equal(first[key], second[key])]
    assert differing == ["classifier.1.weight", "classifier.1.bias"]


def test_a_checkpoint_of_timms_training_script_is_read_without_unpickling_objects(tmp_path: Path) -> None:
    named = ew.models.build_named("timm:resnet10t", 3, weights=None)
    file = tmp_path / "model_best.pth.tar"
    torch.save({"state_dict": named.module.state_dict(), "args": Namespace(lr=0.1), "epoch": 3}, file)
    again = ew.models.build_named("timm:resnet10t", 3, file)
    assert torch.equal(again.module(named.example), named.module(named.example))


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_objects_in_a_checkpoint_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"a": torch.zeros(1)}, "args": Namespace(lr=_Evil())}, "evil.pth")
    with pytest.raises(ew.InputError, match=r"evil.pth must be a complete file that holds only tensors"):
        ew.models.build_named("timm:resnet10t", 3, "evil.pth")
    assert not Path("executed").exists()


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weights that torchvision offers, in the place of a download."""
    from torchvision.models import WeightsEnum

    state: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: dict(state))
    return state


@pytest.mark.slow
def test_weights_of_densenets_have_keys_of_former_versions(offered: dict[str, torch.Tensor]) -> None:
    module = ew.models.build_named("torchvision:densenet121", weights=None).module
    for key, value in module.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            offered[re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", key)] = value
    assert "features.denseblock1.denselayer1.norm.1.weight" in offered
    own = ew.models.build_named("torchvision:densenet121")
    assert torch.equal(own.module(own.example), module(own.example))
    other = ew.models.build_named("torchvision:densenet121", 7)
    assert torch.equal(other.module.features(own.example), module.features(own.example))
    del offered["features.conv0.weight"]
    with pytest.raises(ew.InputError, match="could not be loaded"):
        ew.models.build_named("torchvision:densenet121", 7)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_inception_networks_normalize_their_images_again(name: str) -> None:
    """torchvision's own builder with weights does so."""
    import torchvision

    named = ew.models.build_named(f"torchvision:{name}", 3, weights=None, image_size=128)
    own = torchvision.models.get_model(name, weights=None, num_classes=3, transform_input=True).eval()
    own.load_state_dict(named.module.state_dict())
    assert torch.equal(named.module(named.example), own(named.example))
    assert rebuild_named(named.spec).module.transform_input


def test_vision_transformers_are_built_for_the_size_of_their_images(
    offered: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models import VisionTransformer, ViT_B_16_Weights
    from torchvision.models.vision_transformer import interpolate_embeddings

    def small(*_: Any, num_classes: int, image_size: int, **__: Any) -> VisionTransformer:
        return VisionTransformer(image_size, 16, 2, 2, 16, 16, num_classes=num_classes)

    monkeypatch.setattr("torchvision.models.get_model", small)
    torch.manual_seed(0)
    offered.update(small(num_classes=1000, image_size=224).state_dict())
    for size in (None, 64):
        named = ew.models.build_named("torchvision:vit_b_16", 5, image_size=size)
        given, expected = named.module.state_dict(), interpolate_embeddings(size or 224, 16, dict(offered))
        assert [key for key in given if not torch.equal(given[key], expected[key])] == [
            "heads.head.weight",
            "heads.head.bias",
        ]
    linear = ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1
    monkeypatch.setattr("torchvision.models.get_model_weights", lambda _: Namespace(DEFAULT=linear))
    assert ew.models.build_named("torchvision:vit_b_16", weights=None).module.image_size == 384


# -- bad input: one line, before any time is spent


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("timm:resnt18", {}, "timm has no network 'resnt18'; did you mean 'resnet18'"),
        ("timm:resnet18.a9", {}, "timm has no weights 'a9' of resnet18; known are a1"),
        ("timm:hf-hub:me/mine", {}, "timm has no network"),
        ("timm:", {}, "lacks the name after the colon"),
        ("tim:resnet18", {}, "`name` must begin with timm:, torchvision: or hf:, but got 'tim:resnet18'"),
        ("timm:vit_small_patch14_dinov2", {}, r"has no classifier \(num_classes=0\): give `num_classes`"),
        (
            "timm:resnet18",
            {},
            "the pretrained weights of timm:resnet18 could not be loaded .*: connect to the internet",
        ),
        ("timm:resnet18", {"num_classes": 1}, "`num_classes` must be a whole number from 2"),
        ("timm:test_vit", {"weights": None, "image_size": 50}, "timm:test_vit (refuses|could not be built)"),
        ("timm:volo_d4_448", {}, "timm:volo_d4_448 scales images to 389 pixels and crops 448, which exitwise does not"),
        ("timm:resnet18", {"weights": "none.pth"}, "none.pth does not exist"),
        ("torchvision:resnet19", {}, "torchvision has no network 'resnet19'; did you mean 'resnet1"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "is not an image classifier: it detects"),
        ("torchvision:resnet18", {}, "the pretrained weights of torchvision:resnet18 could not be loaded"),
        ("hf:microsoft/resnet-18", {}, "the configuration of hf:microsoft/resnet-18 could not be loaded"),
    ],
)
def test_bad_names_are_one_line(
    name: str, arguments: dict[str, Any], message: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # an empty cache
    with pytest.raises(ew.InputError, match=message) as error:
        ew.models.build_named(name, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["DetrForObjectDetection"]}, "is a DetrForObjectDetection, which detects or segments"),
        ({"problem_type": "regression"}, "is made for regression"),
        ({"id2label": {0: "value"}, "label2id": {"value": 0}, "num_labels": 1}, "one output, as a regression has"),
        ({"architectures": ["ResNetModel"]}, "has no classifier"),
        ({"model_type": "vitdet"}, "is of type 'vitdet', which has no classifier"),
        ({"model_type": "timm_wrapper", "architecture": "hf-hub:me/mine", "num_classes": 3}, "wraps a network of timm"),
    ],
)
def test_other_networks_of_transformers_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    own = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "num_labels": 3}
    (tmp_path / "config.json").write_text(json.dumps({**own, **config}))
    with pytest.raises(ew.InputError, match=message):
        ew.models.build_named(f"hf:{tmp_path}", weights=None)


def test_weights_that_do_not_fit_name_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"conv1.weight": torch.zeros(3)}, file)
    with pytest.raises(ew.InputError, match=r"does not fit the network: first missing key 'conv1.0.weight'"):
        ew.attach("timm:resnet10t", exits=3, num_classes=3, weights=file)


def test_pickled_weights_of_a_repository_are_refused(tmp_path: Path) -> None:
    import transformers

    tiny_resnet(tmp_path)
    transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path)
    state = ew.models.build_named(f"hf:{tmp_path}").module.state_dict()
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ew.InputError, match=r"the pretrained weights of hf:.* could not be loaded"):
        ew.models.build_named(f"hf:{tmp_path}")


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    import transformers

    tiny_resnet(tmp_path)
    transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file({key: value for key, value in state.items() if not key.startswith("classifier")}, file, {"format": "pt"})
    with pytest.raises(ew.InputError, match=r"lack 'classifier\.1\.bias', which would be random"):
        ew.models.build_named(f"hf:{tmp_path}")
    assert ew.models.build_named(f"hf:{tmp_path}", 5).num_classes == 5
    key = next(key for key in state if key.startswith("resnet.embedder"))
    save_file({name: value for name, value in state.items() if name != key}, file, {"format": "pt"})
    with pytest.raises(ew.InputError, match=r"lack 'resnet\.embedder"):
        ew.models.build_named(f"hf:{tmp_path}", 5)


def test_only_the_last_layer_may_have_another_shape(tmp_path: Path) -> None:
    import transformers

    tiny_resnet(tmp_path)
    transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    key = next(key for key in state if key.startswith("resnet.embedder") and state[key].dim() == 4)
    save_file({**state, key: state[key][:3].clone()}, file, {"format": "pt"})
    with pytest.raises(ew.InputError, match=r"do not fit its configuration: 'resnet\.embedder.* has shape \(3, "):
        ew.models.build_named(f"hf:{tmp_path}", 5)


def test_an_existing_folder_may_have_an_at_in_its_name(tmp_path: Path) -> None:
    import transformers

    tiny_resnet(tmp_path / "net@mine")
    transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path / "net@mine")
    assert ew.models.build_named(f"hf:{tmp_path}/net@mine").num_classes == 3


@pytest.mark.parametrize(
    "damage",
    [
        {"architectures": 3},
        {"architectures": [3]},
        {"problem_type": {}},
        {"hidden_sizes": None},
        {"depths": "abc"},
        {"id2label": 3},
        {"num_labels": 10**12},
        {"model_type": ["resnet"]},
        {"model_type": None},
    ],
)
def test_damaged_configurations_in_specs_are_one_line(damage: dict[str, Any]) -> None:
    import transformers

    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16] * 4, depths=[1] * 4).to_dict()
    spec = {"module": "hf:me/mine", "config": {**config, **damage}}
    with pytest.raises(ew.InputError) as error:
        rebuild_named(spec)
    assert "\n" not in str(error.value)


def test_sizes_of_specs_are_bounded_and_described_without_memory() -> None:
    spec = {"module": "timm:test_resnet", "num_classes": 3, "image_size": 4096}
    with torch.device("meta"):
        assert rebuild_named(spec).example.is_meta
    look = ew.Preprocessing(30_000, (0.5,), (0.5,)).to_dict()
    own = {"model_type": "resnet", "hidden_sizes": [16] * 4, "depths": [1] * 4, "embedding_size": 16}
    for wrong in (
        {**spec, "image_size": 4097},
        {"module": "hf:me/mine", "config": own, "preprocessing": look},
    ):
        with pytest.raises(ew.InputError, match="`image_size` must be a whole number from 1 to 4096"):
            ew.models.check_named_size(wrong, 10**8)


def test_a_network_that_computes_numbers_while_it_is_built_has_its_size_checked() -> None:
    spec = {"module": "torchvision:regnet_y_400mf", "num_classes": 10}
    with pytest.raises(ew.InputError, match=r"has 3,[0-9]{3},[0-9]{3} weights, but the file only 1,000"):
        ew.models.check_named_size({**spec, "num_classes": 3}, 1000)
    weights = sum(
        x.numel()
        for x in ew.models.build_named("torchvision:regnet_y_400mf", 10, weights=None).module.state_dict().values()
    )
    ew.models.check_named_size(spec, weights)
    with pytest.raises(ew.InputError, match="weights, but the file only"):
        ew.models.check_named_size({**spec, "num_classes": 10**6}, weights)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for library, prefix in (("timm", "timm"), ("transformers", "hf"), ("torchvision.models", "torchvision")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ew.InputError, match=rf"pip install 'exitwise\[{prefix}\]'"):
            ew.models.build_named(f"{prefix}:any")


def test_specs_of_files_cannot_load_code_or_allocate_at_will(tmp_path: Path) -> None:
    import transformers

    tiny_resnet(tmp_path)
    transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path)
    spec = dict(ew.models.build_named(f"hf:{tmp_path}").spec)
    code = {"auto_map": {"AutoModelForImageClassification": "me/evil--evil.Net"}, "attn_implementation": "me/kernel"}
    config = {**spec["config"], **code}
    named = rebuild_named({**spec, "config": config})
    assert named.module.config._attn_implementation in ("eager", "sdpa")
    timm = {"model_type": "timm_wrapper", "architecture": "resnet18", "num_labels": 3}
    timm["model_args"] = {"checkpoint_path": "weights.pth"}
    for wraps_timm in (timm, {**spec["config"], "vision_config": timm}):
        for read in (rebuild_named, lambda wrapped: ew.models.check_named_size(wrapped, 1000)):
            with pytest.raises(ew.InputError, match="wraps a network of timm"):
                read({**spec, "config": wraps_timm})
    huge = {**spec, "config": {**spec["config"], "hidden_sizes": [10**5] * 4}}
    with pytest.raises(ew.InputError, match="weights, but the file only 1,000"):
        ew.models.check_named_size(huge, 1000)
    for wrong in ({"module": "timm:resnet18", "num_classes": 3, "pretrained_cfg": {}}, {"module": "os:system"}):
        with pytest.raises(ew.InputError):
            ew.models.rebuild({**wrong, "attach": {"at": ["layer1"], "head": "mlp"}})


def test_the_cache_is_used_only_while_there_is_no_network() -> None:
    from huggingface_hub import constants

    was = constants.HF_HUB_OFFLINE
    with offline_without_network():
        assert constants.HF_HUB_OFFLINE
    assert was == constants.HF_HUB_OFFLINE


# -- the command


def test_the_command_lists_networks_of_libraries(exitwise: Any) -> None:
    done = exitwise("models", "timm:resnet1?", "--json")
    assert {"name": "timm:resnet18", "input_shape": [3, 224, 224], "classes": 1000, "pretrained": True} in done.json[
        "models"
    ]
    assert "torchvision:vgg11 " in exitwise("models", "torchvision:vgg*").out
    assert "no network matches 'timm:nothing'" in exitwise("models", "timm:nothing").err


def test_importing_exitwise_imports_no_other_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys, exitwise as ew; ew.attach, ew.Classifier, ew.models.rebuild; "
        "print(sorted({'timm', 'transformers', 'torchvision', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_image_of_the_size_of_the_net_is_taken_as_it_is() -> None:
    buffer = io.BytesIO()
    photo(32, 32).save(buffer, "PNG")
    look = ew.Preprocessing(32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 1.2, "bicubic")
    pixels = decode_image(buffer.getvalue(), look, 10**6)
    assert np.array_equal(pixels.transpose(1, 2, 0), np.asarray(photo(32, 32)))


def test_arguments_of_attach_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    module = ew.models.resnet("cifar100-resnet8").eval()
    named = ew.models.NamedModule("timm:mine", module, 100, {}, None, torch.zeros(2, 3, 32, 32))
    x = torch.zeros(1, 3, 32, 32)
    given: list[tuple[Any, dict[str, Any], str]] = [
        (module, {"weights": tmp_path / "none.pth"}, "`weights` is for a network by its name"),
        (module, {"weights": None}, "`weights` is for a network by its name"),
        (named, {"weights": None}, "of a NamedModule are set by build_named"),
        (named, {"num_classes": 3}, "of a NamedModule are set by build_named"),
        (named, {"example_inputs": x}, "of a NamedModule are set by build_named"),
        ("timm:resnet18", {"example_inputs": x}, "`example_inputs` is for modules"),
    ]
    for what, arguments, message in given:
        with pytest.raises(ew.InputError, match=message):
            ew.attach(what, exits=2, **arguments)
