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


def test_the_page_has_the_recorded_cascades() -> None:
    sys.path.insert(0, str(ROOT / "experiments"))
    cascades = import_module("cascades")
    sys.path.remove(str(ROOT / "experiments"))
    page = cascades.PAGE.read_text(encoding="utf-8")
    assert cascades.filled(page) == page, "run `python experiments/cascades.py`"
