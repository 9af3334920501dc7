"""Networks by name. A preset's name, with overrides, is all that a file needs to say to have its net rebuilt."""

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exitwise.core.errors import InputError
from exitwise.models.attach.attach import attach as _attach
from exitwise.models.densenet import PRESETS as DENSENETS
from exitwise.models.densenet import densenet
from exitwise.models.msdnet import PRESETS as MSDNETS
from exitwise.models.msdnet import msdnet
from exitwise.models.net import MultiExitNet
from exitwise.models.presets import Config, get_config
from exitwise.models.resnet import PRESETS as RESNETS
from exitwise.models.resnet import resnet


@dataclass(frozen=True)
class Family:
    """Presets of one architecture."""

    name: str
    presets: Mapping[str, Config]
    build: Callable[[str, int | None, int | None], MultiExitNet]  # preset, num_classes, in_channels
    stem: str  # key of the weight (channels, in_channels, height, width) that reads the picture


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


def list() -> builtins.list[str]:
    """Names of all presets."""
    return builtins.list(PRESETS)


def config(preset: str) -> Config:
    """The configuration of a preset: `exits`, `num_classes`, `in_channels`, `input_shape` and its own fields."""
    return get_config(preset, PRESETS)


def family(preset: str) -> Family:
    """The family that a preset belongs to."""
    get_config(preset, PRESETS)
    return next(family for family in FAMILIES if preset in family.presets)


def build(preset: str, num_classes: int | None = None, in_channels: int | None = None) -> MultiExitNet:
    """An untrained net of any family by its preset's name; `num_classes` and `in_channels` override the preset's."""
    return family(preset).build(preset, num_classes, in_channels)


def rebuild(spec: Mapping[str, Any]) -> MultiExitNet:
    """The untrained net of a spec, such as {"preset": "cifar100-small"}; a spec is data, it can only name presets.

    With `attach`, such as {"at": ["stages.0.layer1"], "head": "mlp"}, exits are put on it again.
    """
    more = ("num_classes", "in_channels", "attach")
    if not isinstance(spec, Mapping) or "preset" not in spec or not set(spec) <= {"preset", *more}:
        names = ", ".join(f"`{name}`" for name in more)
        raise InputError(f"a model spec must hold `preset` and at most {names}, but got {spec}")
    added = spec.get("attach")
    net = build(**{name: value for name, value in spec.items() if name != "attach"})
    if added is None:
        return net
    if not isinstance(added, Mapping) or set(added) != {"at", "head"} or not isinstance(added["head"], str):
        raise InputError(f"a model spec's `attach` must hold `at` and `head`, but is {added!r}")
    return _attach(net.eval(), added["at"], head=added["head"]).train()


def budget_range(spec: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """The paper's budget interval for a net, where it has one."""
    return BUDGET_RANGES.get(str(spec.get("preset"))) if spec else None
