"""Examples in docstrings run, and every public function has one, with its arguments and result described."""

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import exitwise as ew

PACKAGE = Path(str(ew.__file__)).parent
MODULES = [
    ".".join(("exitwise", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__main__.py"
]
WITH_EXAMPLES = [name for name in MODULES if ">>> " in inspect.getsource(import_module(name))]
FUNCTIONS: dict[str, Any] = {name: getattr(ew, name) for name in ew.__all__ if inspect.isfunction(getattr(ew, name))}
for _module in (ew.metrics, ew.models, ew.data):
    for _name, _function in vars(_module).items():
        if inspect.isfunction(_function) and not _name.startswith("_") and _function.__module__.startswith("exitwise"):
            FUNCTIONS[f"{_module.__name__.rpartition('.')[2]}.{_name}"] = _function


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example may save a file
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(import_module(name), optionflags=options)
    assert tried
    assert not failed, f"{failed} examples of {name} failed: see the output above"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_describe_arguments_and_result_with_an_example(name: str) -> None:
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    arguments = list(inspect.signature(function).parameters)
    if arguments:
        described = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, flags=re.MULTILINE)
        assert described, f"{name} has no section Args:"
        missing = [
            each for each in arguments if not re.search(rf"^    \*?\*?{each}: ", described[1], flags=re.MULTILINE)
        ]
        assert not missing, f"{name} does not describe {missing}"
    if inspect.signature(function).return_annotation is not None:
        assert re.search(r"^Returns:$", text, flags=re.MULTILINE), f"{name} has no section Returns:"
    assert ">>> " in text, f"{name} has no example"
