"""A small run of tools/fuzz.py: damaged files of every kind are refused, or give what the undamaged ones give."""

import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

for module in ("onnxruntime", "PIL"):
    pytest.importorskip(module)


@pytest.fixture(scope="module")
def fuzz() -> Any:
    spec = spec_from_file_location("fuzz", ROOT / "tools" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["fuzz"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fuzzer(fuzz: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fuzz.Fuzzer(tmp_path_factory.mktemp("fuzz"))


def test_damaged_files_are_refused_or_change_nothing(fuzz: Any, fuzzer: Any) -> None:
    seed, count = random.randrange(1 << 30), 8 * len(fuzzer.kinds)
    failures, outcomes = [], set()
    for number in range(count):
        kind, damage, outcome, detail = fuzzer.run(seed, number)
        outcomes.add(outcome)
        if fuzz.is_failure(kind, outcome):
            failures.append(f"--seed {seed} --only {number}: {kind.name}, {damage}: {outcome} {detail}")
    assert not failures, "\n".join(failures)
    assert {"refused", "identical", "different"} <= outcomes  # the mutations reach files with and without a digest


def test_a_mutation_can_be_repeated(fuzzer: Any) -> None:
    assert fuzzer.run(3, 7)[1:] == fuzzer.run(3, 7)[1:]


def test_failures_are_noticed(fuzz: Any, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text("{}")

    def crash(path: Path) -> None:
        raise KeyError("no")

    def several_lines(path: Path) -> None:
        raise fuzz.ew.InputError("one\ntwo")

    for use, expected in ((crash, "escaped"), (several_lines, "escaped"), (lambda path: 5, "different")):
        kind = fuzz.Kind("file", file, use, digest=True, text=True)
        outcome, _ = fuzz.attempt(kind, file, fuzz.fingerprint(4))
        assert outcome == expected
        assert fuzz.is_failure(kind, outcome)
    assert fuzz.attempt(fuzz.Kind("file", file, lambda path: 4, True), file, fuzz.fingerprint(4))[0] == "identical"
