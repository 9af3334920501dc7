"""Checks that optional packages are installed, each with the extra to install."""

from collections.abc import Sequence
from importlib import import_module

from exitwise.core.errors import InputError


def require_pyarrow(extra: str = "parquet") -> None:
    """Raise an `InputError` that names the extra to install, unless pyarrow can be imported."""
    _require(("pyarrow.parquet",), "Parquet files need pyarrow", extra)


def require_scoring() -> None:
    """Raise an `InputError` that names the extra to install, unless all that `exitwise score` needs can be imported."""
    _require(("pyarrow.parquet", "PIL", "onnxruntime"), "scoring needs onnxruntime, Pillow and pyarrow", "score")


def _require(modules: Sequence[str], need: str, extra: str) -> None:
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            raise InputError(f"{need}: pip install 'exitwise[{extra}]'") from None
