"""Docstrings: every public name has one, arrays have shapes, and the wording follows the style of the project."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

import exitwise as ew
from exitwise.runtime.onnx import Session

NAMED = {name: getattr(ew, name) for name in ew.__all__} | {"runtime.onnx.Session": Session}
MEMBERS = (property, cached_property, classmethod, staticmethod)
SHAPE = re.compile(r"\((?:K|S|c|m|n|p|p_k),[^)]*\)")

SOURCES = sorted((ROOT / "src" / "exitwise").rglob("*.py"))
NOUN_CLAUSE = re.compile(r"(?:What|How|Where|Who|Whether|When|Which|Of|By|At|The same)\b")
AVOIDED = re.compile(r"\b(?:nobody|whoever|everyone|pictures?|data\s+sets?|dear(?:er|est)?)\b", flags=re.IGNORECASE)
CODE = re.compile(r"`[^`]*`")  # identifiers keep their names


def functions_of(module: Any) -> dict[str, Any]:
    return {name: each for name, each in vars(module).items() if inspect.isfunction(each) and name[0] != "_"}


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties, those of our own parents among them; fields of dataclasses are none."""
    for owner in kind.__mro__:
        if owner.__module__.split(".")[0] == kind.__module__.split(".")[0]:
            for name, each in vars(owner).items():
                if name[0] != "_" and (isinstance(each, MEMBERS) or inspect.isfunction(each)):
                    yield f"{owner.__name__}.{name}", each


def has_docstring(each: Any) -> bool:
    """Its own, not a parent's, and not the signature that a dataclass without one is given."""
    if inspect.isclass(each) and (each.__doc__ or "").startswith(f"{each.__name__}("):
        return False
    return bool(each.__doc__)


def public() -> dict[str, Any]:
    found = {f"metrics.{name}": each for name, each in functions_of(ew.metrics).items()}
    for name, each in NAMED.items():
        if inspect.isclass(each) or inspect.isroutine(each) or inspect.ismodule(each):
            found[name] = each
        if inspect.isclass(each):
            found |= dict(members_of(each))
    return found


PUBLIC = public()

WITH_ARRAYS = [
    "Answer",
    "BudgetController.update",
    "Calibration",
    "Calibration.draws",
    "Calibration.predict",
    "Calibration.prior_vars",
    "Calibration.temperatures",
    "Classifier",
    "Classifier.costs_of",
    "Classifier.export",
    "Classifier.forward",
    "Classifier.stream",
    "Costs",
    "Costs.of",
    "Evaluation",
    "Head",
    "Head.features",
    "Head.forward",
    "MultiExitNet",
    "MultiExitNet.features",
    "MultiExitNet.forward",
    "Policy",
    "Policy.exits",
    "Policy.exit_mask",
    "Policy.exits_by",
    "Policy.exits_from_scores",
    "Policy.stops",
    "Policy.with_cost",
    "Policy.with_thresholds",
    "Prediction",
    "Prediction.cost",
    "Prediction.labels",
    "Predictions",
    "Predictions.exits",
    "Predictions.log_probs",
    "Predictions.of",
    "Predictions.predicted",
    "Predictions.probs",
    "Predictions.reduce",
    "Predictions.take",
    "Predictions.variance",
    "Preprocessing",
    "Split",
    "Split.take",
    "Trace",
    "ablation",
    "budget_curve",
    "calibrate",
    "collect",
    "decision_experiment",
    "evaluate",
    "fit_policies",
    "fit_policy",
    "runtime.onnx.Session",
    "sweep",
    "train",
    "train_heads",
    *(f"metrics.{name}" for name in functions_of(ew.metrics)),
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_and_member_has_a_docstring(name: str) -> None:
    assert has_docstring(PUBLIC[name]), f"{name} has no docstring"


@pytest.mark.parametrize("name", WITH_ARRAYS)
def test_what_takes_or_gives_arrays_says_their_shapes(name: str) -> None:
    assert SHAPE.search(PUBLIC[name].__doc__), f"the docstring of {name} gives no shape such as (n, c)"


def test_a_docstring_that_is_missing_is_seen() -> None:
    class Parent:
        def documented(self) -> None:
            """It is."""

        def inherited(self) -> None:
            """Its override has none."""

    @dataclass
    class Child(Parent):
        field: int = 0

        def inherited(self) -> None: ...

        @property
        def undocumented(self) -> int:
            return 0

        @classmethod
        def build(cls) -> None: ...

    seen = {name: has_docstring(each) for name, each in members_of(Child)}
    assert seen == {
        "Child.inherited": False,
        "Child.undocumented": False,
        "Child.build": False,
        "Parent.documented": True,
        "Parent.inherited": True,
    }
    assert not has_docstring(Child)


# Wording


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def wording_faults(source: str) -> list[str]:
    """Docstrings that begin with a question word or a fragment, and words to avoid, each with its line."""
    faults = []
    for line, text in docstrings(source):
        if match := NOUN_CLAUSE.match(text):
            faults.append(f"{line}: begins with {match[0]!r}: begin with a verb or with the thing returned")
        faults += [f"{line}: {match[0]!r}" for match in AVOIDED.finditer(CODE.sub("", text))]
    return faults


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_docstrings_follow_the_style(path: Path) -> None:
    assert not wording_faults(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("What an exit returns.", 1),
        ("The same for a stream.", 1),
        ("Return the logits.", 0),
        ("Whatever the net takes.", 0),
        ("Read a data\n    set of pictures.", 2),
        ("Return `Pictures`, the former name.", 0),
        ("By name, the dearest policy.", 2),
    ],
)
def test_faults_of_wording_are_found(text: str, faults: int) -> None:
    assert len(wording_faults(f'def function():\n    """{text}"""\n')) == faults
