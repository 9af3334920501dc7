"""What commands do besides calling one function of the library."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch

from exitwise import checkpoint, data, models
from exitwise.collector import Progress, collect
from exitwise.costs import Costs
from exitwise.errors import InputError
from exitwise.files import write_json
from exitwise.net import MultiExitNet
from exitwise.run import Run, creating, describe
from exitwise.trace import Trace


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


@dataclass(frozen=True)
class Source:
    """What a new run is made from."""

    preset: str
    checkpoint: Path
    data: str
    root: Path
    split_seed: int
    val_size: int


def collect_new(directory: Path, source: Source, batch_size: int, half: bool, progress: Progress) -> Trace:
    """Make a run from a checkpoint and a data set, and collect its trace."""
    models.config(source.preset)  # a mistyped name is said before the data are read
    train, test = data.load(source.data, source.root)
    net = models.rebuild({"preset": source.preset, "num_classes": len(train.classes)})
    checkpoint.load_checkpoint(net, source.checkpoint)
    split = data.ValSplit.random(train, source.val_size, source.split_seed)
    with creating(directory) as new:
        about = {"name": source.data, "root": str(source.root.resolve()), "split_seed": source.split_seed}
        write_json(new / "run.json", describe(net.spec or {}, about))
        checkpoint.save_checkpoint(net, new / "net.safetensors")
        split.save(new / "split.safetensors")
        trace = _collect(net, split, train, test, batch_size, progress)
        trace.save(new / "trace.safetensors", dtype=torch.float16 if half else torch.float32)
    return trace


def collect_again(
    directory: Path, root: Path | None, batch_size: int, half: bool, force: bool, progress: Progress
) -> Trace:
    """Collect the trace of an existing run from its own net, data set and split."""
    run = Run(directory)
    if run.trace_file.exists() and not force:
        raise InputError(f"{run.trace_file} exists: --force to collect it again")
    about = run.about["data"]
    place = root or about.get("root")
    if place is None:
        raise InputError(f"{directory} does not say where its data set {about.get('name')!r} lies: give --root")
    train, test = data.load(str(about.get("name")), place)
    net = checkpoint.load_net(run.net_file)
    trace = _collect(net, data.ValSplit.load(run.split_file), train, test, batch_size, progress)
    trace.save(run.trace_file, dtype=torch.float16 if half else torch.float32)
    run.forget()
    return trace


def _collect(
    net: MultiExitNet,
    split: data.ValSplit,
    train: data.ImageSet,
    test: data.ImageSet,
    batch_size: int,
    progress: Progress,
) -> Trace:
    stays, val = split.apply(train)
    loaders = [data.Batches(part, batch_size) for part in (stays, val, test)]
    return collect(net, *loaders, classes=train.classes, progress=progress)
