"""Benchmarks on small inputs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def small(name: str, tmp_path: Path, *options: str) -> Any:
    command = [sys.executable, BENCHMARKS / name, "--small", "--out", tmp_path / "results" / "small.json", *options]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads((tmp_path / "results" / "small.json").read_text())
