"""Libraries of networks, which tests need but exitwise does not."""

import sys
from types import ModuleType
from typing import Any

import pytest
from paths import ROOT


def experiment(name: str) -> ModuleType:
    """Import a script of the experiments."""
    folder = str(ROOT / "experiments")
    sys.path.insert(0, folder)
    try:
        return __import__(name)
    finally:
        sys.path.remove(folder)


def define_operators() -> None:
    """Let torchvision be imported beside any torch."""
    experiment("torchvision_operators").define_operators()


def require(package: str) -> Any:
    """Import timm, torchvision or transformers, or skip the test."""
    define_operators()
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install -c constraints.txt {package}")
