"""Presets are data: a name leads to a configuration, and a spec says in a file which preset a net was built from."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar

from exitwise.core.errors import InputError
from exitwise.models.net import MultiExitNet


class Config(Protocol):
    """What every preset's configuration has."""

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
    """The configuration of that name, or an error with the nearest one."""
    if not isinstance(preset, str) or preset not in presets:
        near = get_close_matches(str(preset), presets, n=1, cutoff=0.4)
        known = f"known are {', '.join(presets)}" if len(presets) <= 20 else "`exitwise models` lists the names"
        hint = f"did you mean {near[0]!r}?" if near else known
        raise InputError(f"`preset` must be the name of a model, but got {preset!r}; {hint}")
    return presets[preset]


def build_preset(
    preset: str,
    presets: Mapping[str, C],
    build: Callable[[C], MultiExitNet],
    num_classes: int | None,
    in_channels: int | None,
) -> MultiExitNet:
    """The net of a preset, with what is given instead of the preset's own, and the spec that says so."""
    config = get_config(preset, presets)
    changes = _overrides(config, num_classes=num_classes, in_channels=in_channels)
    config = replace(config, **changes)  # type: ignore[type-var]  # every configuration is a dataclass
    net = build(config)
    net.input_shape = config.input_shape
    net.spec = {"preset": preset, **changes}
    return net


def _overrides(config: Config, **values: int | None) -> dict[str, Any]:
    """Those of `num_classes` and `in_channels` that are given and differ from the preset's, checked."""
    for name, value in values.items():
        least, most = {"num_classes": (2, 10**6), "in_channels": (1, 10**4)}[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
            raise InputError(f"`{name}` must be a whole number from {least} to {most}, but got {value!r}")
    return {name: value for name, value in values.items() if value not in (None, getattr(config, name))}
