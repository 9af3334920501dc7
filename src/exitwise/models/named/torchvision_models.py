"""Networks of torchvision by name, such as "torchvision:resnet18"."""

from dataclasses import replace
from fnmatch import translate
from re import IGNORECASE, compile
from types import ModuleType
from typing import Any

from torch import nn

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

PREFIX = "torchvision"
_IMAGENET_CLASSES = 1000


def build(name: str, num_classes: int | None, image_size: int | None, pretrained: bool) -> NamedModule:
    """Build a network of torchvision, with its pretrained weights or random ones; see `timm_models.build`."""
    models, full_name = require("torchvision.models", f"{PREFIX}:", PREFIX), f"{PREFIX}:{name}"
    _check_name(models, name)
    classes = check_num_classes(full_name, num_classes, _IMAGENET_CLASSES)
    weights = models.get_model_weights(name).DEFAULT
    preprocessing = _preprocessing(full_name, weights)
    if image_size is not None:
        preprocessing = replace(preprocessing, size=image_size)
    with build_errors(full_name):
        module: nn.Module = models.get_model(name, weights=None, num_classes=classes)
    if pretrained:
        with weight_errors(full_name):  # without `weights_only`, torchvision would unpickle the file
            state = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
            expected = module.state_dict()
            own_classes = classes == _IMAGENET_CLASSES
            fitting = {k: v for k, v in state.items() if own_classes or v.shape == expected[k].shape}
            module.load_state_dict(fitting, strict=own_classes)
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
