"""What the commands that deploy a net do besides calling one function of the library."""

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

from exitwise import data
from exitwise.calibration.methods import OURS, get_method
from exitwise.calibration.tuning import Tuner
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import write_json
from exitwise.core.preprocessing import Preprocessing
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint
from exitwise.policies.certificate import Certificate
from exitwise.policies.fit import fit_policy
from exitwise.runs.collect import FILE_SIZE, costs_in_budget_unit, load_or_calibrate, parse_budget, rebuild_net
from exitwise.runs.policies import PolicyOptions, calibrate_run, certificate_from
from exitwise.runs.run import Run
from exitwise.runtime import bench as benching
from exitwise.runtime.bundle import MANIFEST
from exitwise.runtime.classifier import Classifier
from exitwise.runtime.onnx import Session


@dataclass(frozen=True)
class ClassifierOptions:
    """Which of a run's classifiers is meant; what is None is that of the last evaluation, the method the whole one."""

    budget: str | None
    method: str | None
    score: str | None = None
    net: str | None = None
    strategy: str | None = None
    certificate: Certificate | None = None


def load_run_net(run: Run, function: str | None) -> MultiExitNet:
    """The run's net with its weights, in evaluation mode."""
    if not run.net_file.is_file():
        raise InputError(f"{run.directory} has no net.safetensors")
    return load_checkpoint(rebuild_net(run, function), run.net_file).eval()


def preprocessing_of(run: Run) -> Preprocessing:
    """How a picture becomes one like those that the run's net was trained on."""
    about = run.metadata["data"]
    size = about.get("image_size") or FILE_SIZE
    return data.data_set(about["name"]).preprocessing(size)


def build_classifier(run: Run, choice: ClassifierOptions) -> Classifier:
    """The run's net, calibrated, with thresholds for a budget, fitted on the validation split."""
    method = get_method(choice.method or OURS)
    last = run.policy()
    trace = run.trace()
    budget, score, strategy, certificate = choice.budget, choice.score, choice.strategy, choice.certificate
    objective = "accuracy"
    if budget is None and last is not None and last.budget is not None:
        budget = f"{last.budget!r}{'ms' if last.unit == 'ms' else ''}"
        score, certificate = score or last.score, certificate or certificate_from(last.guarantee)
        strategy = strategy or last.strategy
        objective = last.fit.objective if last.fit is not None else objective
    elif budget is None:
        budget = "50%"
        print("exitwise: no --budget and none evaluated yet: half of the full cost", file=sys.stderr)
    request = PolicyOptions(strategy or "auto", score or "confidence", objective, certificate)
    costs = costs_in_budget_unit(budget, run, trace)
    asked = parse_budget(budget, costs)
    request.check(method, costs, asked)
    made = calibrate_run(run, Tuner(trace), method, certificate)
    calibration, policy = made.calibration, made.policy(costs, asked, request)
    net = load_run_net(run, choice.net)
    return Classifier(net, calibration, policy, classes=trace.classes, preprocessing=preprocessing_of(run))


def open_run_or_bundle(place: Path, choice: ClassifierOptions, threads: int | None) -> Classifier | Session:
    """A run as a quick classifier, or a bundle as a session."""
    if not (place / MANIFEST).is_file():
        return build_classifier(Run(place), choice).optimize()
    if choice != ClassifierOptions(None, None):
        raise InputError(f"{place} is a bundle with a method, a net and thresholds of its own: export another one")
    return Session(place, threads=threads)


def about_pictures(classifier: Classifier | Session) -> tuple[Preprocessing, tuple[str, ...] | None]:
    """How pictures become the classifier's images, and the names of its classes."""
    known = classifier.preprocessing
    if known is None:
        raise InputError("the bundle does not say how pictures become its images: run it from Python, on arrays")
    return known, classifier.classes


def full_cost(classifier: Classifier | Session) -> tuple[float, str]:
    """Of the last exit, with its unit."""
    costs = classifier.costs
    assert costs is not None  # a policy that was fitted knows them
    return costs.values[-1], costs.unit


@dataclass(frozen=True)
class BenchOptions:
    """What is to be measured; what is empty is the usual."""

    budgets: tuple[str, ...]
    method: str
    backends: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    repeats: int
    costs_of: str
    net: str | None


@dataclass(frozen=True)
class BenchReport:
    """What was measured, and what bench.json says of it."""

    bench: benching.Bench
    costs: Costs  # in milliseconds
    macs: Costs
    notes: tuple[str, ...]
    about: dict[str, Any]


_IMAGES = 512  # of noise


def bench(run: Run, trial: BenchOptions, progress: Callable[[int, int], None]) -> BenchReport:
    """Measure a run's net on this machine and keep the times in the run."""
    backend, _, size = trial.costs_of.partition(":")
    if not size.isdecimal() or not int(size):
        raise InputError(f"`--costs-of` must be like optimized:64, but got {trial.costs_of!r}")
    notes = []
    backends = trial.backends or benching.BACKENDS
    if "onnx" in backends and not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        if trial.backends:
            raise InputError("the backend onnx needs more packages: pip install 'exitwise[onnx]'")
        backends = tuple(name for name in backends if name != "onnx")
        notes.append("ONNX is left out, its packages are not installed: pip install 'exitwise[onnx]'")
    backends = tuple(dict.fromkeys((*backends, backend)))
    batch_sizes = tuple(sorted({*(trial.batch_sizes or benching.BATCH_SIZES), int(size)}))
    trace = run.trace()
    calibration = load_or_calibrate(run, Tuner(trace), get_method(trial.method))
    net = load_run_net(run, trial.net)
    shape = preprocessing_of(run).shape
    images = torch.randn(max(_IMAGES, *batch_sizes), *shape, generator=torch.Generator().manual_seed(0))
    preds = benching.predictions(net, calibration, images)
    val = calibration.predict(trace.val)
    policies = {}
    for text in trial.budgets or [f"{share:.0%}" for share in benching.BUDGETS]:
        known = costs_in_budget_unit(text, run, trace)
        budget = parse_budget(text, known)
        if not trial.budgets and budget < known.values[0]:
            notes.append(f"A budget of {text} is left out: the first exit alone costs more.")
            continue
        policy = fit_policy(val, costs=known, budget=budget, strategy="geometric")  # which spends it all
        policies[text] = benching.match_exit_shares(policy, preds, benching.exit_shares(policy, val))
    made = benching.bench_targets(net, calibration, shape, backends, torch.get_num_threads())
    found = benching.measure(made, policies, images, trace.costs.values, batch_sizes, trial.repeats, progress)
    costs = found.costs(backend, int(size))
    about = {
        "format": "exitwise.bench",
        "version": 1,
        "machine": _machine(),
        "date": date.today().isoformat(),
        "method": calibration.method.name,
        "costs": {"unit": "ms", "of": trial.costs_of, "values": list(costs.values)},
        "macs": list(trace.costs.values),
        **found.to_dict(),
    }
    write_json(run.bench_file, about)
    return BenchReport(found, costs, trace.costs, tuple(notes), about)


def _machine() -> str:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"
