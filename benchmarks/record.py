"""What the benchmarks share: their options, the clock, the machine's name, and how results are written down."""

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from exitwise import Trace
from exitwise.zoo import path


def options(about: str | None, results: str) -> argparse.ArgumentParser:
    """Every benchmark has a small version, which checks the benchmark itself, and a file of `results`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / results)
    return parser


def zoo_trace(small: bool) -> Trace:
    """The shipped trace, or the first samples of its splits."""
    trace = Trace.load(path("trace.safetensors"))
    if not small:
        return trace
    first = torch.arange(500)
    return replace(trace, val=trace.val.take(first), test=None if trace.test is None else trace.test.take(first))


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def command_cost(command: Sequence[str], threads: int | None = None) -> dict[str, float]:
    """Run a command in a child process; return its seconds, CPU seconds and largest resident memory.

    CPU seconds hardly depend on other work on the machine, and mapped pages of files count as memory.
    """
    environment = os.environ if threads is None else os.environ | {"OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "CPU seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak gigabytes": round(usage.ru_maxrss * 1024 / 1e9, 2),
    }


def machine() -> dict[str, Any]:
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": str(date.today()),
    }


def by_threads(measured: list[dict[str, Any]], key: str) -> dict[Any, list[dict[str, Any]]]:
    """Results of the same thing, by its name under `key`, in the order of their threads: the columns of a table."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for each in sorted(measured, key=lambda each: int(each["threads"])):
        found.setdefault(each[key], []).append(each)
    return found


def record(file: Path, measured: dict[str, Any]) -> None:
    """Into a file, with the machine and the command, and to the terminal."""
    text = json.dumps({"command": "make benchmark", "machine": machine(), **measured}, indent=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n", encoding="utf-8")
    print(text)
