"""A small version of the benchmark, so that the real one is known to work."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "method.py"


def test_the_benchmark_runs_and_measures_everything(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARK, "--small", "--out", tmp_path / "results" / "small.json"]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads((tmp_path / "results" / "small.json").read_text())
    ratios = found["cifar"][0]["median ratios"]
    assert set(ratios) == {
        "search / forward pass over val",
        "plain search / forward pass over val",
        "predict / forward pass over test",
        "sweep and evaluation / forward pass over test",
    }
    # A factor of nine was measured between them: that the fast one is faster at all is safe to say on any machine.
    assert ratios["search / forward pass over val"] < ratios["plain search / forward pass over val"]
    assert found["imagenet"]["growth"] > 0
