"""Networks of torchvision by name, such as "torchvision:resnet18"."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import translate
from re import IGNORECASE, compile
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from exitwise.core.checks import suggest
from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.models.named.module import (
    NamedModule,
    build_errors,
    check_num_classes,
    example_images,
    require,
    weight_errors,
)
from exitwise.models.weight_shapes import differs_only_in_classes

PREFIX = "torchvision"
_IMAGENET_CLASSES = 1000
_TRANSFORM_INPUT = ("googlenet", "inception_v3")  # their weights are for images that they normalize again
_OLD_KEY = compile(r"(denselayer\d+\.(?:norm|conv))\.(\d\.)")  # of DenseNets


def build(name: str, num_classes: int | None, image_size: int | None, pretrained: bool) -> NamedModule:
    """Build a network of torchvision, with its pretrained weights or random ones; see `timm_models.build`."""
    models, full_name = require("torchvision.models", f"{PREFIX}:", PREFIX), f"{PREFIX}:{name}"
    _check_name(models, name)
    classes = check_num_classes(full_name, num_classes, _IMAGENET_CLASSES)
    weights = models.get_model_weights(name).DEFAULT
    preprocessing = _preprocessing(full_name, weights)
    if image_size is not None:
        preprocessing = replace(preprocessing, size=image_size)
    options: dict[str, Any] = {"transform_input": True} if name in _TRANSFORM_INPUT else {}
    if name.startswith("vit_"):
        options["image_size"] = preprocessing.size
    with build_errors(full_name):
        module: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    if pretrained:
        with weight_errors(full_name):  # without `weights_only`, torchvision would unpickle the file
            state = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
            load_pretrained(models, module, state, classes)
    spec: dict[str, Any] = {"module": full_name, "num_classes": classes}
    if image_size is not None:
        spec["image_size"] = image_size
    names = tuple(weights.meta.get("categories", ())) if classes == _IMAGENET_CLASSES else ()
    return NamedModule(
        full_name,
        module.eval(),
        classes,
        spec,
        preprocessing,
        example_images(preprocessing),
        names or None,
        f"{type(weights).__name__}.{weights.name}",
    )


def load_pretrained(models: ModuleType, module: nn.Module, state: Mapping[str, Tensor], classes: int) -> None:
    """Load torchvision's weights into a network, which may have another number of classes or another image size.

    Args:
        models: torchvision.models.
        module: The network.
        state: Weights by key, as torchvision offers them.
        classes: Number of classes of the network; layers with another number of outputs keep their weights.
    """
    renamed = {_OLD_KEY.sub(r"\1\2", key): value for key, value in state.items()}
    if isinstance(module, models.VisionTransformer):
        resize = models.vision_transformer.interpolate_embeddings
        renamed = dict(resize(module.image_size, module.patch_size, OrderedDict(renamed)))
    kept = {
        key: value
        for key, value in module.state_dict().items()
        if key in renamed and differs_only_in_classes(renamed[key], value, classes)
    }
    module.load_state_dict({**renamed, **kept})


def list_models(pattern: str) -> list[dict[str, Any]]:
    """Return name, shape of the images and number of classes of the networks whose names match a pattern."""
    models = require("torchvision.models", f"{PREFIX}:", PREFIX)
    matches = compile(translate(pattern), IGNORECASE).match
    rows = []
    for name in models.list_models(module=models):
        if matches(name):
            preprocessing = _preprocessing(name, models.get_model_weights(name).DEFAULT)
            row = {"name": f"{PREFIX}:{name}", "input_shape": list(preprocessing.shape), "classes": _IMAGENET_CLASSES}
            rows.append({**row, "pretrained": True})
    return rows


def _check_name(models: ModuleType, name: str) -> None:
    known = models.list_models(module=models)
    if name not in known:
        if name in models.list_models():
            raise InputError(f"torchvision's {name} is not an image classifier: it detects, segments or reads videos")
        hint = suggest(name, known, f"`exitwise models '{PREFIX}:*'` lists the names")
        raise InputError(f"torchvision has no network {name!r}; {hint}")


def _preprocessing(name: str, weights: Any) -> Preprocessing:
    """Return the preprocessing of a network's weights."""
    transforms = weights.transforms()
    (size,), (scaled,) = transforms.crop_size, transforms.resize_size
    if scaled < size:
        raise InputError(f"{name} scales images to {scaled} pixels and crops {size}, which exitwise does not do")
    return Preprocessing(
        size, tuple(transforms.mean), tuple(transforms.std), scaled / size, transforms.interpolation.value
    )
