"""The recorded comparison with rivals and of splits: complete, as the page shows it, and made by the scripts."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
from paths import ROOT

import exitwise as ew
from exitwise.rival_methods.contenders import ENTRIES

PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    sys.path.insert(0, str(ROOT / "experiments"))
    yield import_module("rivals"), import_module("splits")
    sys.path.remove(str(ROOT / "experiments"))


def test_the_page_has_the_recorded_tables(scripts: tuple[ModuleType, ModuleType]) -> None:
    assert scripts[0].filled(PAGE) == PAGE, "run `python experiments/rivals.py --fill`"


def test_every_rival_was_run(scripts: tuple[ModuleType, ModuleType]) -> None:
    results = json.loads(scripts[0].RESULTS.read_text(encoding="utf-8"))
    assert {row["name"] for row in results["rows"]} == set(ENTRIES)
    assert results["not_run"] == {}


def test_every_split_size_method_and_score_was_run(scripts: tuple[ModuleType, ModuleType]) -> None:
    splits = scripts[1]
    counts = Counter((row["method"], row["score"], int(row["size"])) for row in splits.read())
    assert set(counts) == {(m, s, n) for m in splits.METHODS for s in splits.SCORES for n in splits.SIZES}
    assert min(counts.values()) >= 5
    assert len({(row["seed"], row["size"], row["method"], row["score"]) for row in splits.read()}) == counts.total()


def test_the_advice_is_what_the_splits_show(scripts: tuple[ModuleType, ModuleType]) -> None:
    """The default beats temperature and the paper's method at every size; the learned score gains accuracy."""
    splits = scripts[1]
    means = splits.means(splits.read())
    for size in splits.SIZES:
        value = {(m, s): {k: v for k, (v, _) in means[m, s, size].items()} for m, s, n in means if n == size}
        auto, learned = value["auto", "confidence"], value["auto", "learned"]
        for other in (value["T_opt", "confidence"], value[splits.OURS, "confidence"]):
            assert auto["top1"] > other["top1"]
            assert auto["nlpd"] < other["nlpd"]
            assert auto["ece"] < other["ece"]
            assert learned["top1"] > other["top1"]
        assert learned["top1"] > auto["top1"]


def test_a_split_has_the_samples_of_the_trace_once(scripts: tuple[ModuleType, ModuleType]) -> None:
    splits = scripts[1]
    shipped = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    small, large = splits.resplit(shipped, 1, 250), splits.resplit(shipped, 1, 5000)
    assert (len(small.val), len(large.val), len(small.test)) == (250, 5000, 10_000)
    assert (small.val.labels == large.val.labels[:250]).all()
    assert (small.test.features[0] == large.test.features[0]).all()
    both = Counter(large.val.labels.tolist()) + Counter(large.test.labels.tolist())
    assert both == Counter(shipped.val.labels.tolist()) + Counter(shipped.test.labels.tolist())
