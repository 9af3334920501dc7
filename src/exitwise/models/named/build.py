"""Build a network by a name with the prefix of its library, and rebuild it from a spec."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError, shorten
from exitwise.models.named import timm_models, torchvision_models, transformers_models
from exitwise.models.named.module import MAX_IMAGE_SIZE, NamedModule, check_forward, move_to_default_device
from exitwise.models.named.weight_hash import hash_weights

LIBRARIES: Mapping[str, ModuleType] = {
    library.PREFIX: library for library in (timm_models, torchvision_models, transformers_models)
}
PRETRAINED = "pretrained"
_MAX_SMALL = 1_000_000  # weights that may be allocated for any file


def is_named(name: object) -> bool:
    """Return whether a name begins with the prefix of a library."""
    return isinstance(name, str) and name.partition(":")[0] in LIBRARIES and ":" in name


def build_named(
    name: str,
    num_classes: int | None = None,
    weights: str | Path | None = PRETRAINED,
    image_size: int | None = None,
) -> NamedModule:
    """Build a classifier of timm, torchvision or Hugging Face Transformers, with the preprocessing of its images.

    Args:
        name: "timm:NAME", "torchvision:NAME", or "hf:REPOSITORY", perhaps with @REVISION, or "hf:FOLDER".
        num_classes: Number of classes. If it differs from that of the pretrained weights, the last layer is new.
        weights: "pretrained" for the weights as the library loads them, from its cache or the internet; a file of
            weights, safetensors or `.pth`, with the library's keys; or None for random ones.
        image_size: Height and width of its images, if they differ from the network's own configuration.

    Returns:
        The network in evaluation mode, with its preprocessing and how to rebuild it.

    Raises:
        InputError: The library is not installed or has no such classifier, weights cannot be loaded or do not fit, or
            the network refuses the size.

    Example:
        >>> import exitwise as ew
        >>> named = ew.models.build_named("timm:resnet18", num_classes=10)  # doctest: +SKIP
        >>> named.preprocessing.size, named.num_classes  # doctest: +SKIP
        (224, 10)
        >>> ew.models.build_named("resnet18")
        Traceback (most recent call last):
        ...
        exitwise.core.errors.InputError: `name` must begin with timm:, torchvision: or hf:, but got 'resnet18'
    """
    library, own_name = _split(name)
    if num_classes is not None:
        check_integer("num_classes", num_classes, 2, 10**6)
    if image_size is not None:
        check_integer("image_size", image_size, 1, MAX_IMAGE_SIZE)
    named: NamedModule = library.build(own_name, num_classes, image_size, weights == PRETRAINED)
    if weights is not None and weights != PRETRAINED:
        from exitwise.models.weights import load_module_weights

        load_module_weights(named.module, weights)
    check_forward(name, named.module, named.example)
    return named if weights is None else replace(named, sha256=hash_weights(named.module))


def rebuild_named(spec: Mapping[str, Any]) -> NamedModule:
    """Build the untrained network of a spec: data that can only name networks of the libraries.

    Args:
        spec: The entry `spec` of a `NamedModule`, perhaps read from a file.
    """
    library, own_name = _split(spec.get("module"))
    allowed = {"module", "num_classes", "image_size"} if library is not transformers_models else None
    if allowed is None:
        allowed = {"module", "revision", "config", "preprocessing"}
    if not set(spec) <= allowed:
        raise InputError(f"a model spec of {spec['module']} must hold at most {sorted(allowed)}, but holds {set(spec)}")
    if library is transformers_models:
        named = transformers_models.rebuild(spec)
    else:
        size = spec.get("image_size")
        size = None if size is None else check_integer("image_size", size, 1, MAX_IMAGE_SIZE)
        classes = check_integer("num_classes", spec.get("num_classes"), 2, 10**6)
        named = library.build(own_name, classes, size, False)
    return replace(named, example=move_to_default_device(named.example))


def check_named_size(spec: Mapping[str, Any], num_values: int) -> None:
    """Raise `InputError` if the network of a spec has far more weights than the file that names it.

    The spec of a damaged or hostile file can ask for any size: nothing of that size is allocated here.

    Args:
        spec: The spec, perhaps with an entry `attach`.
        num_values: Number of values of all tensors of the file.

    Raises:
        InputError: The network has far more weights, or the spec has invalid entries.

    Example:
        >>> import exitwise as ew
        >>> spec = {"module": "timm:resnet18", "num_classes": 10, "attach": {"at": ["layer2"], "head": "mlp"}}
        >>> ew.models.check_named_size(spec, 12_000_000)  # doctest: +SKIP
    """
    base, more_rows = {name: value for name, value in spec.items() if name != "attach"}, 0
    try:
        with torch.device("meta"):
            named = rebuild_named(base)
    except InputError:
        if "num_classes" not in base:
            raise
        # Perhaps a network that computes numbers while it is built: its library bounds all but the number of classes.
        named = rebuild_named({**base, "num_classes": 2})
        more_rows = check_integer("num_classes", base["num_classes"], 2, 10**6) - 2
    tensors = named.module.state_dict().values()
    count = sum(tensor.numel() for tensor in tensors)
    count += more_rows * sum(tensor[0].numel() for tensor in tensors if tensor.shape[:1] == (2,))
    if count > 2 * num_values + _MAX_SMALL:
        raise InputError(f"its network {named.name} has {count:,} weights, but the file only {num_values:,}")


def list_named(pattern: str) -> list[dict[str, Any]]:
    """Return the networks of a library whose names match a pattern, each with its input shape and classes.

    Args:
        pattern: A prefix and a pattern with * and ?, such as "timm:*convnext*".

    Returns:
        For each network a dict with its `name`, `input_shape`, `classes` (0 without a classifier), and whether there
        are `pretrained` weights.

    Raises:
        InputError: The library is not installed, or no name matches.

    Example:
        >>> import exitwise as ew
        >>> ew.models.list_named("timm:resnet1[48]")  # doctest: +SKIP
        [{'name': 'timm:resnet14t', ...}, {'name': 'timm:resnet18', ...}]
    """
    library, own_pattern = _split(pattern)
    rows: list[dict[str, Any]] = library.list_models(own_pattern)
    if not rows:
        raise InputError(f"no network matches {pattern!r}: * stands for any characters, such as {pattern}*")
    return rows


def _split(name: object) -> tuple[ModuleType, str]:
    """Return the library of a name, and the name without its prefix."""
    if not is_named(name):
        raise InputError(f"`name` must begin with timm:, torchvision: or hf:, but got {shorten(name)}")
    prefix, _, own_name = str(name).partition(":")
    if not own_name:
        raise InputError(f"{name!r} lacks the name after the colon: `exitwise models '{prefix}:*'` lists the names")
    return LIBRARIES[prefix], own_name
