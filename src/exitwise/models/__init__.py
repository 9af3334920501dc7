"""Multi-exit networks: presets by name, weights, costs, and exits attached to any other module."""

from exitwise.models.densenet import PRESETS as DENSENETS
from exitwise.models.densenet import densenet
from exitwise.models.msdnet import PRESETS as MSDNETS
from exitwise.models.msdnet import msdnet
from exitwise.models.named.build import build_named, check_named_size, list_named
from exitwise.models.named.module import NamedModule
from exitwise.models.registry import (
    BUDGET_RANGES,
    FAMILIES,
    PRESETS,
    Family,
    budget_range,
    build,
    config,
    family,
    list_presets,
    rebuild,
)
from exitwise.models.registry import list as list
from exitwise.models.resnet import PRESETS as RESNETS
from exitwise.models.resnet import resnet

__all__ = [
    "BUDGET_RANGES",
    "DENSENETS",
    "FAMILIES",
    "MSDNETS",
    "PRESETS",
    "RESNETS",
    "Family",
    "NamedModule",
    "budget_range",
    "build",
    "build_named",
    "check_named_size",
    "config",
    "densenet",
    "family",
    "list",
    "list_named",
    "list_presets",
    "msdnet",
    "rebuild",
    "resnet",
]
