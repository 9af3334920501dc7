"""Networks of timm by name, such as "timm:convnext_tiny" or "timm:convnext_tiny.fb_in22k_ft_in1k"."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import translate
from math import floor
from re import IGNORECASE, compile
from types import ModuleType
from typing import Any

from exitwise.core.checks import suggest
from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.models.named.hub_access import offline_without_network
from exitwise.models.named.module import (
    NamedModule,
    build_errors,
    check_num_classes,
    example_images,
    require,
    weight_errors,
)

PREFIX = "timm"


def build(name: str, num_classes: int | None, image_size: int | None, pretrained: bool) -> NamedModule:
    """Build a network of timm, with its pretrained weights or random ones.

    Args:
        name: Name in timm, with or without the tag of its weights.
        num_classes: Number of classes; another one than that of the weights makes a new last layer.
        image_size: Height and width of its images, if they differ from its configuration.
        pretrained: Whether to load the weights that timm knows for the name, from its cache or the internet.
    """
    timm, full_name = require("timm", f"{PREFIX}:", PREFIX), f"{PREFIX}:{name}"
    config = _find_config(timm, name)
    if pretrained and not config["has_weights"]:
        raise InputError(f"timm has no pretrained weights for {full_name}: give a file of weights")
    classes = check_num_classes(full_name, num_classes, int(config.get("num_classes") or 0))
    preprocessing = _preprocessing(full_name, config, image_size)
    arguments: dict[str, Any] = {"num_classes": classes}
    if image_size is not None and image_size != config["input_size"][-1] and config.get("fixed_input_size"):
        arguments["img_size"] = image_size
    if pretrained:
        with weight_errors(full_name), offline_without_network():
            module = timm.create_model(name, pretrained=True, **arguments)
    else:
        with build_errors(full_name):
            module = timm.create_model(name, pretrained=False, **arguments)
    spec: dict[str, Any] = {"module": full_name, "num_classes": classes}
    if image_size is not None:
        spec["image_size"] = image_size
    revision = config.get("hf_hub_id")
    return NamedModule(
        full_name, module.eval(), classes, spec, preprocessing, example_images(preprocessing), revision=revision
    )


def stage_ends(name: str, module: Any, exits: int | None) -> list[str]:
    """Return the submodules that end a stage, without the last one, by timm's `feature_info`.

    Args:
        name: The network, for messages.
        module: The network.
        exits: Number of exits K, for the last K - 1 of them; None for all.

    Raises:
        InputError: The network has no stages, or fewer.
    """
    stages: dict[Any, str] = {}  # by their reduction: the last entry of each is its end
    for info in getattr(module, "feature_info", None) or ():
        if isinstance(info, Mapping) and info.get("module"):
            stages[info.get("reduction")] = str(info["module"])
    ends = list(stages.values())[:-1]
    if not ends:
        raise InputError(f"{name} has no ends of stages in timm's `feature_info`: choose cuts of equal cost, auto")
    if exits is not None and not 2 <= exits <= len(ends) + 1:
        raise InputError(f"`exits` must be from 2 to {len(ends) + 1} at the ends of the stages of {name}, not {exits}")
    return ends if exits is None else ends[len(ends) + 1 - exits :]


def list_models(pattern: str) -> list[dict[str, Any]]:
    """Return name, shape of the images and number of classes of the networks whose names match a pattern."""
    timm = require("timm", f"{PREFIX}:", PREFIX)
    matches = compile(translate(pattern), IGNORECASE).match
    rows = []
    for name in timm.list_models():
        if matches(name):
            config = _config(timm, name)
            shape = list(config.get("input_size") or (3, 224, 224))
            row = {"name": f"{PREFIX}:{name}", "input_shape": shape, "classes": int(config.get("num_classes") or 0)}
            rows.append({**row, "pretrained": config["has_weights"]})
    return rows


def _find_config(timm: ModuleType, name: str) -> dict[str, Any]:
    """Return the configuration of a network; raise `InputError` with the nearest name unless timm has it."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture) or ":" in name:
        hint = suggest(architecture, timm.list_models(), f"`exitwise models '{PREFIX}:*'` lists the names")
        raise InputError(f"timm has no network {name!r}; {hint}")
    if tag:
        tags = [known.partition(".")[2] for known in timm.list_pretrained() if known.startswith(f"{architecture}.")]
        if tag not in tags:
            hint = suggest(tag, tags) if tags else "it has none"
            raise InputError(f"timm has no weights {tag!r} of {architecture}; {hint}")
    return _config(timm, name)


def _config(timm: ModuleType, name: str) -> dict[str, Any]:
    config = timm.get_pretrained_cfg(name)
    if config is None:  # a network without any
        return {"has_weights": False, "input_size": (3, 224, 224)}
    return {**config.to_dict(), "has_weights": bool(config.has_weights)}


def _preprocessing(name: str, config: Mapping[str, Any], image_size: int | None) -> Preprocessing:
    """Return the preprocessing of a configuration as timm evaluates with it."""
    channels, height, width = config["input_size"]
    if channels != 3 or height != width:
        raise InputError(f"{name} takes images of {channels} x {height} x {width}, not square RGB images")
    mode, interpolation = config.get("crop_mode") or "center", config.get("interpolation") or "bicubic"
    if mode not in ("center", "squash"):
        raise InputError(f"{name} crops images in a way that exitwise does not have: crop_mode={mode!r}")
    mean, std = config.get("mean") or (0.485, 0.456, 0.406), config.get("std") or (0.229, 0.224, 0.225)
    scaled = floor(height / (config.get("crop_pct") or 0.875))  # rounded down, as timm does
    if scaled < height:
        raise InputError(f"{name} scales images to {scaled} pixels and crops {height}, which exitwise does not do")
    preprocessing = Preprocessing(height, tuple(mean), tuple(std), scaled / height, interpolation, mode == "squash")
    return preprocessing if image_size is None else replace(preprocessing, size=image_size)
