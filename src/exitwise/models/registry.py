"""Networks by name. A file stores only the preset's name and its overrides to have its net rebuilt."""

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exitwise.core.checks import is_integer
from exitwise.core.errors import InputError
from exitwise.models.attach.attach import attach as _attach
from exitwise.models.attach.attach import attach_named
from exitwise.models.cascade import rebuild_cascade
from exitwise.models.densenet import PRESETS as DENSENETS
from exitwise.models.densenet import densenet
from exitwise.models.msdnet import PRESETS as MSDNETS
from exitwise.models.msdnet import msdnet
from exitwise.models.named.build import rebuild_named
from exitwise.models.named.module import MAX_IMAGE_SIZE
from exitwise.models.net import MultiExitNet
from exitwise.models.presets import Config, get_config
from exitwise.models.resnet import PRESETS as RESNETS
from exitwise.models.resnet import resnet


@dataclass(frozen=True)
class Family:
    """The presets of one architecture."""

    name: str
    presets: Mapping[str, Config]
    build: Callable[[str, int | None, int | None], MultiExitNet]  # preset, num_classes, in_channels
    stem: str  # key of the weight (channels, in_channels, height, width) that reads the image


FAMILIES = (
    Family("MSDNet", MSDNETS, msdnet, "stages.0.0.scales.0.0.weight"),
    Family("ResNet", RESNETS, resnet, "stages.0.conv1.weight"),
    Family("DenseNet", DENSENETS, densenet, "stages.0.conv0.weight"),
)

PRESETS: Mapping[str, Config] = {name: config for family in FAMILIES for name, config in family.presets.items()}

# The budget intervals, in MACs, over which the paper's tables average.
BUDGET_RANGES: dict[str, tuple[float, float]] = {
    "cifar100-small": (7.0e6, 2.6e7),
    "cifar100-medium": (2.5e7, 6e7),
    "cifar100-large": (5e7, 1.4e8),
    **{
        f"{data}-{size}": interval
        for data in ("imagenet", "caltech256")
        for size, interval in (("small", (3.5e8, 1.1e9)), ("medium", (7.5e8, 2.2e9)), ("large", (1.5e9, 2.6e9)))
    },
}


def list_presets() -> builtins.list[str]:
    """Return the names of all presets.

    Returns:
        Names of the MSDNets, then of the ResNets and the DenseNets.

    Example:
        >>> import exitwise as ew
        >>> ew.models.list_presets()[:2]
        ['cifar100-small', 'cifar100-medium']
    """
    return builtins.list(PRESETS)


list = list_presets


def config(preset: str) -> Config:
    """Return the configuration of a preset.

    Args:
        preset: Name of a preset, such as "cifar100-small".

    Returns:
        A frozen dataclass with `exits`, `num_classes`, `in_channels`, `input_shape` and the fields of its family.

    Raises:
        InputError: There is no such preset; the message suggests the nearest one.

    Example:
        >>> import exitwise as ew
        >>> config = ew.models.config("tiny-8")
        >>> config.exits, config.num_classes, config.input_shape
        (3, 10, (1, 8, 8))
    """
    return get_config(preset, PRESETS)


def family(preset: str) -> Family:
    """Return the family that a preset belongs to.

    Args:
        preset: Name of a preset, such as "imagenet-densenet121".

    Returns:
        The architecture: its name, its presets and the function that builds them.

    Raises:
        InputError: There is no such preset; the message suggests the nearest one.

    Example:
        >>> import exitwise as ew
        >>> ew.models.family("imagenet-densenet121").name
        'DenseNet'
    """
    get_config(preset, PRESETS)
    return next(family for family in FAMILIES if preset in family.presets)


def build(preset: str, num_classes: int | None = None, in_channels: int | None = None) -> MultiExitNet:
    """Build an untrained net of any family from the name of its preset.

    Args:
        preset: Name of a preset; `list_presets` returns all of them.
        num_classes: Number of classes, if it differs from the preset's.
        in_channels: Number of image channels, if it differs from the preset's.

    Returns:
        A net for images (n, in_channels, size, size), in training mode.

    Raises:
        InputError: There is no such preset, or an override is out of range.

    Example:
        >>> import exitwise as ew
        >>> net = ew.models.build("tiny-8", num_classes=5)
        >>> len(net.exits), net.num_classes, net.spec
        (3, 5, {'preset': 'tiny-8', 'num_classes': 5})
    """
    return family(preset).build(preset, num_classes, in_channels)


def rebuild(spec: Mapping[str, Any]) -> MultiExitNet:
    """Build the untrained net of a spec. A spec is data: it can only name presets, so no code of a file is run.

    Args:
        spec: {"preset": name}, with the overrides `num_classes` and `in_channels` where the net has them. With
            `attach`, such as {"at": ["stages.0.layer1"], "head": "mlp"}, exits are attached to the preset's net. Or
            {"module": "timm:resnet50", "num_classes": 10, "attach": ...}, as in the spec of a net that `attach` made of
            a name. Or {"cascade": ...}, as in the spec of a cascade of such nets.

    Returns:
        A net in training mode, with the same spec.

    Raises:
        InputError: The spec has missing, unknown or invalid entries.

    Example:
        >>> import exitwise as ew
        >>> ew.models.rebuild({"preset": "tiny-8", "num_classes": 5}).num_classes
        5
    """
    if isinstance(spec, Mapping) and set(spec) == {"cascade"}:
        return rebuild_cascade(spec["cascade"], rebuild)
    if isinstance(spec, Mapping) and "module" in spec:
        at, head, _ = _read_attach(spec.get("attach"))
        named = rebuild_named({name: value for name, value in spec.items() if name != "attach"})
        return attach_named(named, at, head).train()
    optional = ("num_classes", "in_channels", "attach")
    if not isinstance(spec, Mapping) or "preset" not in spec or not set(spec) <= {"preset", *optional}:
        names = ", ".join(f"`{name}`" for name in optional)
        raise InputError(f"a model spec must hold `preset` and at most {names}, but got {spec}")
    exits = spec.get("attach")
    net = build(**{name: value for name, value in spec.items() if name != "attach"})
    if exits is None:
        return net
    at, head, shape = _read_attach(exits)
    example = None if shape is None else torch.zeros(1, *shape)
    return _attach(net.eval(), at, head=head, example_inputs=example).train()


def _read_attach(exits: Any) -> tuple[Any, str, builtins.list[int] | None]:
    """Return the cuts, the kind of head and the shape of an image from a spec's entry `attach`."""
    if not isinstance(exits, Mapping) or not isinstance(exits.get("head"), str) or not _is_attach_spec(exits):
        raise InputError(f"a model spec's `attach` must hold `at`, `head` and at most `input_shape`, but is {exits!r}")
    return exits["at"], exits["head"], exits.get("input_shape")


def _is_attach_spec(exits: Mapping[str, Any]) -> bool:
    shape = exits.get("input_shape", [1])
    return (
        {"at", "head"} <= set(exits) <= {"at", "head", "input_shape"}
        and isinstance(shape, builtins.list)
        and 0 < len(shape) <= 3
        and all(is_integer(size) and 0 < size <= MAX_IMAGE_SIZE for size in shape)
    )


def budget_range(spec: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """Return the budget interval over which the paper's tables average for a net.

    Args:
        spec: Spec of the net, such as {"preset": "cifar100-small"}, or None.

    Returns:
        Lowest and highest budget in MACs, or None if the paper has no interval for the net.

    Example:
        >>> import exitwise as ew
        >>> ew.models.budget_range({"preset": "cifar100-small"})
        (7000000.0, 26000000.0)
        >>> ew.models.budget_range({"preset": "tiny-8"}) is None
        True
    """
    return BUDGET_RANGES.get(str(spec.get("preset"))) if spec else None
