"""The recorded measures of prediction sets and abstention: as the page shows them, and the promises were kept."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import scipy.stats
from paths import ROOT


@pytest.fixture
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "experiments"))
    yield import_module("answers")
    sys.path.remove(str(ROOT / "experiments"))


def test_the_page_has_the_recorded_tables(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(page) == page, "run `python experiments/answers.py --fill`"


def test_promises_were_kept_over_all_splits(script: ModuleType) -> None:
    found = json.loads(script.RESULTS.read_text(encoding="utf-8"))["splits"]
    # 95 % of the splits are in the band on average; they share one pool, so that the share varies more than a binomial.
    assert min(found["in_band"].values()) > 0.93
    assert abs(found["mean_coverage"] - 0.9) < 0.005
    assert scipy.stats.binom.sf(found["broken"] - 1, found["splits"], found["delta"]) > 1e-3
    assert found["certified"] > 500


@pytest.mark.parametrize("name", ["cascades", "default_method"])
def test_pages_have_the_recorded_tables(name: str) -> None:
    sys.path.insert(0, str(ROOT / "experiments"))
    module = import_module(name)
    sys.path.remove(str(ROOT / "experiments"))
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.filled(page) == page, f"run `python experiments/{name}.py --help`"


def test_the_default_method_does_no_harm() -> None:
    sys.path.insert(0, str(ROOT / "experiments"))
    module = import_module("default_method")
    sys.path.remove(str(ROOT / "experiments"))
    found = json.loads(module.RESULTS.read_text(encoding="utf-8"))["traces"]
    assert len(found) >= 5
    for name, each in found.items():
        for method, row in each["rows"].items():
            if method != "learned score":  # the same method with another exit score
                assert not module.is_harmed(row), f"{method} is better than auto on {name}"
