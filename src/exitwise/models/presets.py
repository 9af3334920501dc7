"""Presets as data: a name maps to a configuration, and a spec records which preset a net was built from."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from exitwise.core.checks import check_integer, get_named
from exitwise.models.net import MultiExitNet

_OVERRIDE_RANGES = {"num_classes": (2, 10**6), "in_channels": (1, 10**4)}


class Config(Protocol):
    """Properties that the configuration of every preset has."""

    @property
    def exits(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def in_channels(self) -> int: ...
    @property
    def input_shape(self) -> tuple[int, int, int]: ...


C = TypeVar("C", bound=Config)


def get_config(preset: str, presets: Mapping[str, C]) -> C:
    """Return the configuration of that name; for any other name the error suggests the nearest one."""
    hint = None if len(presets) <= 20 else "`exitwise models` lists the names"
    return get_named("preset", preset, presets, "a model", hint)


def build_preset(
    preset: str,
    presets: Mapping[str, C],
    build: Callable[[C], MultiExitNet],
    num_classes: int | None,
    in_channels: int | None,
) -> MultiExitNet:
    """Build the net of a preset, with `num_classes` and `in_channels` overridden where given, and set its spec."""
    config = get_config(preset, presets)
    changes = _check_overrides(config, num_classes=num_classes, in_channels=in_channels)
    config = replace(config, **changes)  # type: ignore[type-var]  # every configuration is a dataclass
    net = build(config)
    net.input_shape = config.input_shape
    net.spec = {"preset": preset, **changes}
    return net


def _check_overrides(config: Config, **values: int | None) -> dict[str, Any]:
    """Check `num_classes` and `in_channels`; return those that differ from the preset's."""
    checked = {
        name: check_integer(name, value, *_OVERRIDE_RANGES[name]) for name, value in values.items() if value is not None
    }
    return {name: value for name, value in checked.items() if value != getattr(config, name)}
