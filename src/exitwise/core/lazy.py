"""Public names of a package, listed once in its stub file and imported on first use.

A stub (`__init__.pyi`) shows type checkers and editors where each name is defined. Reading the same file at run time
keeps the import of a package cheap: `exitwise.policies` works without torch, and `exitwise --help` does not load it.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str, init_file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package whose stub lies beside its `__init__.py`."""
    stub = ast.parse(Path(init_file).with_suffix(".pyi").read_text(encoding="utf-8"))
    definitions = {
        alias.asname or alias.name: (node.module or package, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get_attribute(name: str) -> Any:
        if name not in definitions:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module_name, original = definitions[name]
        if module_name != package:
            module = import_module(module_name)
            if hasattr(module, original):
                return getattr(module, original)
        return import_module(f"{module_name}.{original}")

    def list_names() -> list[str]:
        return sorted(definitions)

    return get_attribute, list_names, sorted(definitions)
