"""Memory of onnxruntime while batch sizes change, with several of its settings; each in a process of its own.

usage: serving_memory.py BUNDLE [--batches N] [--out FILE]    one thread; prints a table, and writes JSON

Batches of 1 to 64 random images run through all stages of a bundle, as in a service whose load varies. Resident memory
is read after every fiftieth batch: growth is the mean of its last quarter relative to that of its first.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS: dict[str, dict[str, Any]] = {
    "as Session sets them": {},
    "no memory pattern": {"mem_pattern": False},
    "no arena": {"arena": False},
    "no arena, no memory pattern": {"arena": False, "mem_pattern": False},
    "padded to 1, 2, 4, ... 64": {"padded": True},
}
_MAX_BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--batches", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.setting is not None:
        print(json.dumps(measure(arguments.bundle, arguments.batches, **SETTINGS[arguments.setting])))
        return
    results = {}
    for name in SETTINGS:
        words = [sys.executable, __file__, str(arguments.bundle), "--batches", str(arguments.batches)]
        done = subprocess.run([*words, "--setting", name], check=True, capture_output=True, text=True)
        results[name] = json.loads(done.stdout)
        print(describe(name, results[name]), flush=True)
    if arguments.out is not None:
        from record import machine  # which imports torch: not in the processes that are measured

        found = {"machine": machine(), "batches": arguments.batches, "settings": results}
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


def describe(name: str, result: dict[str, float]) -> str:
    """Return a row of the table."""
    return (
        f"| {name} | {result['start']:.0f} | {result['end']:.0f} | {result['growth']:.3f} "
        f"| {result['cpu ms per image']:.2f} |"
    )


def measure(bundle: Path, batches: int, **settings: Any) -> dict[str, float]:
    """Run the batches; return megabytes at the start and the end, growth, and CPU milliseconds per image."""
    import onnxruntime

    make = onnxruntime.SessionOptions

    def options() -> Any:
        made = make()
        made.enable_cpu_mem_arena = settings.get("arena", True)
        made.enable_mem_pattern = settings.get("mem_pattern", True)
        return made

    onnxruntime.SessionOptions = options
    from exitwise.runtime.onnx import OnnxBackend, Session

    backend = OnnxBackend(Session(bundle, threads=1))
    generator = np.random.default_rng(0)
    shape = backend._manifest.inputs[0].shape
    pool = generator.standard_normal((_MAX_BATCH, *shape)).astype(np.float32)
    resident, images = [], 0
    start = time.process_time()
    for number in range(batches):
        size = int(generator.integers(1, _MAX_BATCH + 1))
        images += size
        padded = 1 << (size - 1).bit_length() if settings.get("padded") else size
        state = backend.start(pool[:padded])
        for exit in range(backend.num_exits):
            state, _ = backend.run(exit, state)
        if number % 50 == 49:
            resident.append(read_resident())
    seconds = time.process_time() - start
    quarter = max(1, len(resident) // 4)
    return {
        "start": resident[0],
        "end": resident[-1],
        "growth": float(np.mean(resident[-quarter:]) / np.mean(resident[:quarter])),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cpu ms per image": 1e3 * seconds / images,
    }


def read_resident() -> float:
    """Return the resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
