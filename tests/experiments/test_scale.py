"""The pages on large jobs show the committed results, which meet their limits."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
GUIDE = (ROOT / "docs" / "guides" / "scoring.md").read_text(encoding="utf-8")


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def import_script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script; scripts of the same name are in two folders."""
    monkeypatch.syspath_prepend(path.parent)
    sys.modules.pop(path.stem, None)
    return importlib.import_module(path.stem)


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return import_script(ROOT / "experiments" / "scale.py", monkeypatch)


def test_the_tables_of_the_guide_are_made_from_the_results(scale: ModuleType) -> None:
    page = scale.PAGE.read_text(encoding="utf-8")
    assert scale.filled(page) == page
    assert page.count("\n| ") > 15


def test_the_simulation_reproduces_the_small_jobs(scale: ModuleType) -> None:
    jobs = json.loads(scale.RESULTS.read_text(encoding="utf-8"))["jobs"]
    assert len(jobs) == 6
    assert max(abs(job[f"error, {inputs}"]) for job in jobs for inputs in ("same budget", "by cost")) <= 0.15


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_no_kill_changed_a_row(executor: str) -> None:
    found = json.loads((ROOT / "experiments" / "kills" / f"{executor}.json").read_text(encoding="utf-8"))
    targets = [kill["target"] for kill in found["kills"]]
    assert targets.count("command") == targets.count("worker") + targets.count("worker between data and commit") == 5
    assert targets.count("worker between data and commit") == 2
    assert found["images"] == found["rows"] == found["different_ids"] == found["equal_rows"]
    assert found["shards"] == found["equal_parts"]
    assert f"{found['images']:,} rows" in GUIDE


def test_two_workers_and_ray_are_as_fast_as_the_guide_says() -> None:
    found = load("scoring.json")
    assert found["images"] == 20_000
    assert found["two_workers_beside_one"] >= 1.7
    assert found["beside_local"]["ray"] >= 0.85
    assert f"{found['two_workers_beside_one']:.2f} times as many images per second as one" in " ".join(GUIDE.split())
    assert f"{found['beside_local']['ray']:.2f} times as many as two local ones" in " ".join(GUIDE.split())


def test_the_table_of_decoding_is_that_of_the_committed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = import_script(ROOT / "benchmarks" / "decoding.py", monkeypatch)
    rows = decoding.table_rows(load("decoding.json")["measured"])
    assert len(rows) == 4
    assert set(rows) <= set(GUIDE.splitlines())


def test_large_traces_were_within_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = import_script(ROOT / "benchmarks" / "scale.py", monkeypatch)
    found = load("scale.json")
    half, whole, largest = found["measured"].values()
    assert {"evaluate", "policies", "report"} < set(whole)
    assert max(result["peak GB"] for result in (half | whole).values()) < 4
    assert max(result["peak GB"] for result in largest.values()) < 8
    assert (whole["report"]["threads"], whole["report"]["seconds"] <= 180) == (2, True)
    assert max(found["growth"].values()) <= 2.2
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    assert set(benchmark.table_rows(found)) <= set(page)
