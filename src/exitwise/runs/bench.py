"""Benchmark the net of a run on this machine, and store the times in the run."""

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from exitwise.calibration.methods import AUTO, parse_method
from exitwise.calibration.tuning import Tuner
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import write_json
from exitwise.policies.fit import fit_policy
from exitwise.runs.budgets import costs_in_budget_unit, parse_budget
from exitwise.runs.data import run_preprocessing
from exitwise.runs.machine_load import describe_load, measure_load
from exitwise.runs.nets import load_run_net
from exitwise.runs.policies import load_or_calibrate, resolve_method
from exitwise.runs.run import Run
from exitwise.runtime import bench

_NUM_NOISE_IMAGES = 512


@dataclass(frozen=True)
class BenchOptions:
    """Budgets, backends and batch sizes to measure; empty means the usual ones."""

    budgets: tuple[str, ...]
    method: str | None
    backends: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    repeats: int
    costs_of: str
    net: str | None


@dataclass(frozen=True)
class BenchReport:
    """Measured times, the costs in milliseconds that follow from them, and the contents of bench.json."""

    bench: bench.Bench
    costs: Costs  # in milliseconds
    macs: Costs
    notes: tuple[str, ...]
    metadata: dict[str, Any]


def bench_run(run: Run, options: BenchOptions, progress: Callable[[int, int], None]) -> BenchReport:
    """Measure the stages of a run's net and early exits at several budgets, and write bench.json."""
    backend, _, size = options.costs_of.partition(":")
    if not size.isdecimal() or not int(size):
        raise InputError(f"`--costs-of` must be like optimized:64, but got {options.costs_of!r}")
    notes = []
    backends = options.backends or tuple(bench.BACKENDS)
    if "onnx" in backends and not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        if options.backends:
            raise InputError("the backend onnx needs more packages: pip install 'exitwise[onnx]'")
        backends = tuple(name for name in backends if name != "onnx")
        notes.append("ONNX is left out, its packages are not installed: pip install 'exitwise[onnx]'")
    backends = tuple(dict.fromkeys((*backends, backend)))
    bench.check_backends(backends)
    batch_sizes = tuple(sorted({*(options.batch_sizes or bench.BATCH_SIZES), int(size)}))
    trace = run.trace()
    chosen = run.chosen()
    if options.method is None and chosen is not None:
        calibration = chosen.calibration
        notes.append(f"Calibrated as evaluated: {calibration.method.name}.")
    else:
        tuner = Tuner(trace)
        calibration = load_or_calibrate(run, tuner, resolve_method(run, tuner, parse_method(options.method or AUTO)))
    net = load_run_net(run, options.net)
    shape = run_preprocessing(run).shape
    images = torch.randn(max(_NUM_NOISE_IMAGES, *batch_sizes), *shape, generator=torch.Generator().manual_seed(0))
    noise_preds = bench.predictions(net, calibration, images)
    val_preds = calibration.predict(trace.val)
    policies = {}
    for text in options.budgets or [f"{share:.0%}" for share in bench.BUDGETS]:
        costs = costs_in_budget_unit(text, run, trace)
        budget = parse_budget(text, costs, check=bool(options.budgets))
        if not options.budgets and budget < costs.values[0]:
            notes.append(f"A budget of {text} is left out: the first exit costs more.")
            continue
        policy = fit_policy(val_preds, costs=costs, budget=budget, strategy="geometric")  # spends the whole budget
        policies[text] = bench.match_exit_shares(policy, noise_preds, bench.exit_shares(policy, val_preds))
    load = measure_load()
    if warning := describe_load(load):
        notes.append(f"{warning[0].upper()}{warning[1:]}.")
        print(f"exitwise: {warning}", file=sys.stderr)
    progress(0, len(batch_sizes) * (options.repeats + 1) * len(backends))
    targets = bench.bench_targets(net, calibration, shape, backends, torch.get_num_threads())
    result = bench.measure(targets, policies, images, trace.costs.values, batch_sizes, options.repeats, progress)
    measured = result.costs(backend, int(size))
    metadata = {
        "format": "exitwise.bench",
        "version": 1,
        "machine": _describe_machine(),
        "date": date.today().isoformat(),
        "method": calibration.method.name,
        "costs": {"unit": "ms", "of": options.costs_of, "values": list(measured.values)},
        "macs": list(trace.costs.values),
        "load": load,
        "notes": notes,
        **result.to_dict(),
    }
    write_json(run.bench_file, metadata)
    return BenchReport(result, measured, trace.costs, tuple(notes), metadata)


def _describe_machine() -> str:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"
