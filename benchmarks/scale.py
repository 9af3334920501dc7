"""How much memory and CPU time the commands take on traces of an ImageNet net's size and larger.

usage: scale.py [--small] [--out FILE] [--only NAME ...] [--samples N ...] [--traces DIR]

Traces of 25,000 and 50,000 validation and test samples, 1,000 classes and five exits, and one of 500,000 and 100
classes, are written to disk, and every command runs in a process of its own: the report with two
threads, the others with one. CPU seconds and peak memory (the kernel's maximum of resident memory, in which mapped
pages of files count) are those of this process. `--only` and `--samples` measure again what is named, such as
`calibrate-T_opt` or `report`, or these sizes, and keep the other results of the file. `--traces` keeps the traces in a
folder for the next time. `--small` checks the benchmark itself.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from record import machine, options, record

import exitwise as ew
from exitwise.calibration.laplace import CurvatureSum
from exitwise.calibration.trace import HeadWeights
from exitwise.calibration.trace_folder import TraceFolderWriter
from exitwise.core.files import write_json
from exitwise.runs.run import run_metadata

WIDTHS = (384, 384, 352, 304, 560)
BLOCK = 5000
METHODS = {
    "T_opt": "T_opt",
    "full": "MIE Laplace T_opt sigma_opt",
    "Pool": "Pool",
    "Pool-W_opt": "Pool W_opt",
    "auto": "auto",
}
COMMANDS = {
    **{f"calibrate-{name}": ("calibrate", "--method", method) for name, method in METHODS.items()},
    "evaluate": ("evaluate", "--method", "T_opt", "--budget", "50%"),
    "policies": ("policies", "--method", "T_opt", "--budget", "50%"),
    "report": ("report", "--method", "T_opt"),
}
LARGEST = ("calibrate-T_opt", "calibrate-full", "calibrate-Pool", "evaluate", "policies", "report")


def write_trace(folder: Path, samples: dict[str, int], classes: int, widths: Sequence[int]) -> None:
    """Write a random trace block by block; its accuracy rises from about 40 to 75 percent, and it is overconfident."""
    generator = torch.Generator().manual_seed(0)
    centres = [torch.randn(classes, p, generator=generator) for p in widths]

    def draw(n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        labels = torch.randint(classes, (n,), generator=generator)
        difficulty = torch.rand(n, 1, generator=generator)
        features = []
        for k, (centre, p) in enumerate(zip(centres, widths, strict=True)):
            signal = (0.08 + 0.03 * k + 0.3 * difficulty) * (384 / p) ** 0.5
            features.append((signal * centre[labels] + torch.randn(n, p, generator=generator)).relu_())
        return features, labels

    heads = [HeadWeights(centre * (60 / p), torch.zeros(classes)) for centre, p in zip(centres, widths, strict=True)]
    sums = [CurvatureSum(p, classes) for p in widths]
    features, _ = draw(10_000 if classes > 100 else 500)
    for head, curvature, x in zip(heads, sums, features, strict=True):
        curvature.update(x, head.logits(x))
    results = [curvature.result() for curvature in sums]
    costs = ew.Costs(tuple(float(k + 1) * 1e8 for k in range(len(widths))))
    with TraceFolderWriter(folder, widths, torch.float16) as writer:
        for split, n in samples.items():
            for start in range(0, n, BLOCK):
                features, labels = draw(min(BLOCK, n - start))
                writer.append(split, features, labels, torch.arange(start, start + len(labels)))
        tensors = {
            "costs": torch.tensor(costs.values, dtype=torch.float64),
            "curvature.n": torch.tensor([results[0].n]),
        }
        for k, (head, result) in enumerate(zip(heads, results, strict=True)):
            tensors |= {f"head.{k}.weight": head.weight, f"curvature.{k}.A": result.A, f"curvature.{k}.B": result.B}
            tensors |= {} if head.bias is None else {f"head.{k}.bias": head.bias}
        writer.finish(tensors, {})


def measure(command: Sequence[str], threads: int) -> dict[str, Any]:
    """Run a command in a process of its own."""
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    problem = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {problem.strip() or process.returncode}")
    return {
        "cpu": machine()["cpu"],
        "threads": threads,
        "CPU seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "seconds": round(time.perf_counter() - start, 1),
        "peak GB": round(usage.ru_maxrss / 2**20, 2),
    }


def measure_command(trace: Path, name: str) -> dict[str, Any]:
    """Run a command on a new run with this trace, which has no calibrations yet."""
    command, *rest = COMMANDS[name]
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary)
        (run / "trace").symlink_to(trace.absolute())
        write_json(
            run / "run.json", run_metadata({"net": "random"}, {"name": "cifar100", "root": None, "image_size": 32})
        )
        return measure([sys.executable, "-m", "exitwise", command, str(run), *rest], 2 if command == "report" else 1)


def measure_growth(small: Mapping[str, Any], large: Mapping[str, Any]) -> dict[str, float]:
    """Return CPU seconds of twice the samples beside those of the others on the same kind of CPU, by command."""
    both = [name for name in COMMANDS if name in small and name in large and small[name]["cpu"] == large[name]["cpu"]]
    return {name: round(large[name]["CPU seconds"] / small[name]["CPU seconds"], 2) for name in both}


def table_rows(found: Mapping[str, Any]) -> list[str]:
    """Return the rows of the table in docs/benchmarks.md: CPU seconds and gigabytes for every size, and the growth."""

    def cell(results: Mapping[str, Any], name: str) -> str:
        if name not in results:
            return "-"
        return f"{results[name]['CPU seconds']:.0f} s, {results[name]['peak GB']:.1f} GB"

    sizes = found["measured"].values()
    return [
        f"| `{' '.join(words)}` | {' | '.join(cell(results, name) for results in sizes)} "
        f"| {found['growth'].get(name, '-')} |"
        for name, words in COMMANDS.items()
        if any(name in results for results in sizes)
    ]


def main() -> None:
    parser = options(__doc__, "scale.json")
    parser.add_argument("--only", nargs="+", default=[], choices=COMMANDS, metavar="NAME")
    parser.add_argument("--samples", nargs="+", type=int, help="measure only these sizes")
    parser.add_argument("--traces", type=Path, help="folder that keeps the traces")
    arguments = parser.parse_args()
    sizes, widths = {25_000: 1000, 50_000: 1000, 500_000: 100}, WIDTHS  # samples and classes
    if arguments.small:
        sizes, widths = {300: 20, 600: 20, 2000: 10}, (8, 9)
    measured: dict[str, Any] = {f"{n} samples, {classes} classes": {} for n, classes in sizes.items()}
    if (arguments.only or arguments.samples) and arguments.out.is_file():
        measured |= json.loads(arguments.out.read_text(encoding="utf-8"))["measured"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.traces or Path(temporary)
        for (n, classes), results in zip(sizes.items(), measured.values(), strict=True):
            if arguments.samples and n not in arguments.samples:
                continue
            trace = folder / f"trace-{n}"
            if not trace.exists():
                write_trace(trace, {"val": n, "test": n}, classes, widths)
            for name in LARGEST if n == max(sizes) else COMMANDS:
                if name in (arguments.only or COMMANDS):
                    results[name] = measure_command(trace, name)
                    print(n, name, results[name], file=sys.stderr, flush=True)
    small, large, _ = measured.values()
    record(arguments.out, {"features": list(widths), "measured": measured, "growth": measure_growth(small, large)})


if __name__ == "__main__":
    main()
