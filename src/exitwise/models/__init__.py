"""Networks by name. A preset's name, with overrides, is all that a file needs to say to have its net rebuilt."""

import builtins
from collections.abc import Mapping
from typing import Any

from exitwise.errors import InputError
from exitwise.models.msdnet import PRESETS as MSDNETS
from exitwise.models.msdnet import msdnet
from exitwise.models.presets import Config, look_up
from exitwise.net import MultiExitNet

__all__ = ["BUDGET_RANGES", "MSDNETS", "budget_range", "config", "list", "msdnet", "rebuild"]

PRESETS: Mapping[str, Config] = MSDNETS

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
    """The configuration of a preset: `num_classes`, `in_channels`, `input_shape` and its own fields."""
    return look_up(preset, PRESETS)


def rebuild(spec: Mapping[str, Any]) -> MultiExitNet:
    """The untrained net of a spec, such as {"preset": "cifar100-small"}; a spec is data, it can only name presets."""
    if (
        not isinstance(spec, Mapping)
        or "preset" not in spec
        or not set(spec) <= {"preset", "num_classes", "in_channels"}
    ):
        raise InputError(f"a model spec must hold `preset` and at most `num_classes`, `in_channels`, but got {spec}")
    return msdnet(**spec)


def budget_range(spec: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """The paper's budget interval for a net, where it has one."""
    return BUDGET_RANGES.get(str(spec.get("preset"))) if spec else None
