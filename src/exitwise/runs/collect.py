"""What commands do besides calling one function of the library."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from exitwise import data, models
from exitwise.calibration.calibration import Calibration
from exitwise.calibration.collect import collect
from exitwise.calibration.methods import VANILLA, Method
from exitwise.calibration.trace import Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.costs import Costs
from exitwise.core.distributed import rank
from exitwise.core.errors import InputError, first_line
from exitwise.core.files import atomic_directory, write_json
from exitwise.evaluation.evaluate import Evaluation, evaluate
from exitwise.models.input_batches import Progress
from exitwise.models.macs import macs
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint, save_checkpoint
from exitwise.policies.fit import fit_policy
from exitwise.policies.policy import Policy
from exitwise.runs.run import Run, run_metadata
from exitwise.training.machine import Machine

FILE_SIZE = 224  # of pictures from files, for nets that do not say


def parse_budget(text: str, costs: Costs) -> float:
    """A budget in the unit of the costs, from 2e7, 50% (of the last exit's cost) or 12ms."""
    number = text.strip().lower()
    unit = "ms" if number.endswith("ms") else "%" if number.endswith("%") else "MACs"
    number = number.removesuffix("macs").removesuffix("ms").removesuffix("%").strip()
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value <= 0:
        raise InputError(f"`--budget` must be like 2e7, 50% or 12ms, but got {text!r}")
    if unit == "%":
        return value / 100 * costs.values[-1]
    if unit != costs.unit:
        raise InputError(f"`--budget` {text} is in {unit}, but the costs of this run are in {costs.unit}")
    return value


def costs_in_budget_unit(budget: str, run: Run, trace: Trace) -> Costs:
    """What exits cost, in the unit of a budget: MACs from the trace, or milliseconds as `exitwise bench` measured."""
    in_ms = budget.strip().lower().endswith("ms")
    return run.measured_costs() if in_ms and trace.costs.unit != "ms" else trace.costs


def load_or_calibrate(run: Run, tuner: Tuner, method: Method) -> Calibration:
    """The run's saved calibration by a method, or a new one, saved."""
    known = load_calibration(run, tuner.trace, method)
    if known is None:
        known = tuner.calibrate(method)
        known.save(run.calibration_file(method))
        if method.name != VANILLA:  # which has nothing to tune
            print(f"exitwise: calibrated by {method.name}, as the run had not been", file=sys.stderr)
    return known


def load_calibration(run: Run, trace: Trace, method: Method) -> Calibration | None:
    """The run's saved calibration by a method, if there is one; refuses one of another net."""
    known = run.calibration(method)
    if known is not None and not known.belongs_to(trace):
        raise InputError(f"{run.calibration_file(method)} is of another net than the run's trace: calibrate again")
    return known


def evaluate_vanilla_at(run: Run, budget: float, unit: str) -> tuple[str, tuple[Policy, Evaluation]]:
    """Another run's plain net at a budget, to compare with; a net with one exit at its own cost."""
    trace = run.trace()
    if trace.test is None:
        raise InputError(f"the trace of {run.directory} has no test split to evaluate on")
    if trace.costs.unit != unit:
        raise InputError(f"the costs of {run.directory} are in {trace.costs.unit}, not in {unit}")
    plain = Tuner(trace).calibrate(VANILLA)
    if trace.num_exits == 1:
        policy = Policy((float("-inf"),), unit=unit, cost=trace.costs.values[0])
    else:
        policy = fit_policy(plain.predict(trace.val), trace.val.labels, trace.costs, budget=budget)
    result = evaluate(plain.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
    return trace.preset or run.directory.name, (policy, result)


@dataclass(frozen=True)
class DataOptions:
    """Where a run's pictures come from; what is None is the data set's own."""

    name: str
    root: Path | None = None
    split_seed: int = 0
    val_size: int | None = None
    test_size: int | None = None
    image_size: int | None = None
    skip_unreadable: bool = False
    download: bool = False

    def load(self, net_size: int) -> tuple[data.HoldOut, data.Splits[data.Pictures], dict[str, Any]]:
        """The split, the pictures, and what run.json says of them."""
        known = data.data_set(self.name)
        size = self.image_size or net_size
        train, test = data.load(self.name, self.root, size, self.skip_unreadable, self.download)
        if test is not None and self.test_size is not None:
            raise InputError(f"`--test-size` is for data without a test set, but {self.name} has one")
        val_size = _number(self.val_size, known.val_size, len(train))
        test_size = _number(self.test_size, known.test_size, len(train)) if test is None else 0
        held = data.HoldOut.random(train, val_size, self.split_seed, test_size)
        root = None if self.root is None else str(self.root.resolve())
        about = {"name": absolute(self.name), "root": root, "split_seed": self.split_seed, "image_size": size}
        if self.skip_unreadable:
            about["skip_unreadable"] = True
        return held, held.apply(train, test), about


def _number(asked: int | None, known: int | float, samples: int) -> int:
    """What was asked for, or the data set's own number or share."""
    if asked is not None:
        return asked
    return known if isinstance(known, int) else max(1, round(known * samples))


def absolute(name: str) -> str:
    """folder:PATH with the whole path, so that the run finds it from anywhere."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).resolve()}" if colon else name


def load_splits(run: Run, root: Path | None) -> data.Splits[data.Pictures]:
    """The pictures of an existing run, in its own split."""
    about = run.metadata["data"]
    size = about.get("image_size") or FILE_SIZE
    if not isinstance(size, int):
        raise InputError(f"{run.directory / 'run.json'} must give a whole number as image_size, but gives {size!r}")
    train, test = data.load(about["name"], root or about.get("root"), size, bool(about.get("skip_unreadable")))
    return data.HoldOut.load(run.split_file).apply(train, test)


def build_net(preset: str | None, function: str | None, shape: tuple[int, int, int], classes: int) -> MultiExitNet:
    """An untrained net for pictures of a shape, by its preset's name or by the user's own function."""
    if function is None:
        net = models.build(str(preset), num_classes=classes, in_channels=shape[0])
    else:
        net = import_net(function)
    if net.num_classes != classes:
        raise InputError(f"the net must have the data set's {classes} classes, but has {net.num_classes}")
    if function is None:
        macs(net, shape)  # refuses pictures that are too small for the net
    return net


def import_net(function: str) -> MultiExitNet:
    """What `package.module:function` returns; only ever from the command line, never from a file."""
    module, colon, name = function.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), name) if colon and module and name else None
    except (ImportError, AttributeError) as error:
        raise InputError(f"`--net` {function} could not be imported: {error}") from None
    finally:
        sys.path.pop(0)
    if not callable(make):
        raise InputError(f"`--net` must be like package.module:function, but got {function!r}")
    try:
        net = make()
    except InputError:
        raise
    except Exception as error:  # whatever the user's own code may raise
        kind = type(error).__name__
        raise InputError(f"`--net` {function} failed with {kind}: {first_line(error)}") from error
    if not isinstance(net, MultiExitNet):
        kind = type(net).__name__
        raise InputError(f"`--net` {function} must return a MultiExitNet, but returned a {kind}: use exitwise.attach")
    return net


def rebuild_net(run: Run, function: str | None) -> MultiExitNet:
    """The untrained net of a run."""
    spec = run.metadata.get("model")
    if isinstance(spec, dict) and "preset" in spec:
        if function is not None:
            raise InputError(f"{run.directory} has the net {spec['preset']!r}: --net is for other nets")
        return models.rebuild(spec)
    if function is None:
        made = spec.get("net") if isinstance(spec, dict) else None
        raise InputError(f"{run.directory} has a net of its own: give --net {made or 'package.module:function'} again")
    return import_net(function)


@dataclass(frozen=True)
class CollectOptions:
    """How a net is run over pictures."""

    machine: Machine
    batch_size: int
    workers: int
    half: bool  # whether features are kept as float16
    progress: Progress

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.float32


def collect_new_run(
    directory: Path, source: DataOptions, preset: str | None, function: str | None, weights: Path, by: CollectOptions
) -> Trace:
    """Make a run from a checkpoint and a data set, and collect its trace."""
    size = models.config(preset).input_shape[1] if preset else FILE_SIZE  # a mistyped name is said before data are read
    held, splits, about = source.load(size)
    net = build_net(preset, function, splits.train.shape, len(splits.train.classes))
    load_checkpoint(net, weights)
    _launch(by.machine, net)
    with atomic_directory(directory) if rank() == 0 else nullcontext() as new:
        trace = _collect(net, splits, by)
        if new:
            write_json(new / "run.json", run_metadata(net.spec or {"net": function}, about))
            save_checkpoint(net, new / "net.safetensors")
            held.save(new / "split.safetensors")
            trace.save(new / "trace.safetensors", dtype=by.dtype)
    return trace


def collect_existing_run(
    directory: Path, root: Path | None, function: str | None, force: bool, by: CollectOptions
) -> Trace:
    """Collect the trace of an existing run from its own net, data set and split."""
    run = Run(directory)
    if run.trace_file.exists() and not force:
        raise InputError(f"{run.trace_file} exists: --force to collect it again")
    if not run.net_file.exists():
        raise InputError(f"{directory} has no net yet: `exitwise train {directory} --resume` goes on with its training")
    net = load_checkpoint(rebuild_net(run, function), run.net_file)
    splits = load_splits(run, root)
    _launch(by.machine, net)
    trace = _collect(net, splits, by)
    if rank() == 0:
        trace.save(run.trace_file, dtype=by.dtype)
        run.remove_derived()
    return trace


def _launch(machine: Machine, net: MultiExitNet) -> None:
    """Start the processes and put the net on its device; one process on a CPU does without Fabric."""
    plain = machine == Machine(accelerator=machine.accelerator)
    if plain and (machine.accelerator == "cpu" or (machine.accelerator == "auto" and not torch.cuda.is_available())):
        return
    fabric = machine.fabric()
    fabric.launch()
    net.to(fabric.device)


def _collect(net: MultiExitNet, splits: data.Splits[data.Pictures], by: CollectOptions) -> Trace:
    parts = (splits.train, splits.val, splits.test)
    loaders = [data.Batches(part, by.batch_size, by.workers) for part in parts]
    return collect(net, *loaders, classes=splits.train.classes, progress=by.progress)
