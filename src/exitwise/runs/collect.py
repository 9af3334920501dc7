"""Collect the trace of a run: a new one from a checkpoint and a dataset, or an existing one."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exitwise import data
from exitwise.calibration.collect import collect
from exitwise.calibration.ray_collect import collect_on_ray
from exitwise.calibration.trace import Trace
from exitwise.calibration.trace_folder import remove_trace_folder
from exitwise.core.distributed import rank, world_size
from exitwise.core.errors import InputError, UnreadableImageError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.ray_driver import RayDriver
from exitwise.models.cascade import Cascade
from exitwise.models.input_batches import Progress
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint, save_checkpoint
from exitwise.runs.data import load_new_data, load_splits
from exitwise.runs.leaks import trace_accuracies, warn_of_accuracies, warn_of_members
from exitwise.runs.nets import build_net, net_builder, net_input_size
from exitwise.runs.options import DataOptions, MachineOptions, NetOptions
from exitwise.runs.run import TRACE_FILE, TRACE_FOLDER, Run, run_metadata
from exitwise.training.machine import Machine


@dataclass(frozen=True)
class CollectOptions:
    """Devices, batch size, precision of stored features, and a progress callback."""

    machine: MachineOptions
    batch_size: int
    half: bool  # store features as float16
    progress: Progress
    on_disk: bool | None = None  # write features to a folder while the net runs; None: if they are large
    ray: str | None = None  # address of a Ray cluster

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.float32


MAX_FEATURE_BYTES = 1 << 30  # features of val and test, in float32, that are held in memory by default


def collect_new_run(
    directory: Path, source: DataOptions, net_options: NetOptions, weights: Path, options: CollectOptions
) -> Trace:
    """Create a run from a checkpoint and a dataset, and collect its trace."""
    size = net_input_size(net_options.model)  # a mistyped preset is an error before any data are read
    held_out, splits, metadata = load_new_data(source, size)
    shape, classes = splits.train.shape, len(splits.train.classes)
    build = partial(build_net, net_options.model, net_options.function, shape, classes)
    net = load_checkpoint(build(), weights)
    _launch(options, net)
    # Beside the run, so that an interrupted collection is found again.
    out = directory.with_name(f".{directory.name}.{TRACE_FOLDER}") if _is_on_disk(net, splits, options) else None
    with atomic_directory(directory) if rank() == 0 else nullcontext() as new:
        trace = _collect(net, build, splits, options, out=out)
        if rank() == 0:
            warn_of_accuracies(trace_accuracies(trace), trace.num_classes)
        if new:
            write_json(new / "run.json", run_metadata(net.spec or {"net": net_options.function}, metadata))
            save_checkpoint(net, new / "net.safetensors")
            held_out.save(new / "split.safetensors")
            if out is None:
                trace.save(new / TRACE_FILE, dtype=options.dtype)
            else:
                out.rename(new / TRACE_FOLDER)
    return trace if out is None else Trace.load(directory / TRACE_FOLDER)


def collect_existing_run(
    directory: Path, root: Path | None, function: str | None, force: bool, options: CollectOptions
) -> Trace:
    """Collect the trace of an existing run from its own net, dataset and split, and remove results of an older one."""
    run = Run(directory)
    if run.has_trace and not force:
        raise InputError(f"{run.trace_file} exists: --force to collect it again")
    if not run.net_file.exists():
        raise InputError(f"{directory} has no net yet: `{run.command('train', '--resume')}` continues its training")
    if rank() == 0 and (note := unfinished_training_note(run)):
        print(f"exitwise: {note}", file=sys.stderr)
    build = net_builder(run, function)
    net = load_checkpoint(build(), run.net_file)
    splits = load_splits(run, root)
    _launch(options, net)
    try:
        with_train = not run.metadata["data"].get("without_train")
        out = directory / TRACE_FOLDER if _is_on_disk(net, splits, options) else None
        trace = _collect(net, build, splits, options, with_train, out)
    except UnreadableImageError as error:  # the run's images are fixed, so that --skip-unreadable comes too late
        problem = str(error).removesuffix("; --skip-unreadable skips such files")
        raise InputError(f"{problem}; replace the file, or make the run again with --skip-unreadable") from None
    if rank() == 0:
        training = run.metadata.get("training")
        if training is None or training.get("freeze_backbone"):  # exitwise train holds out its validation images
            warn_of_accuracies(trace_accuracies(trace), trace.num_classes)
        if isinstance(net, Cascade):
            warn_of_members(net, trace)
        if out is None:
            remove_trace_folder(
                directory / TRACE_FOLDER
            )  # first: if killed in between, a run has no trace, not a former one
            trace.save(directory / TRACE_FILE, dtype=options.dtype)
        else:
            (directory / TRACE_FILE).unlink(missing_ok=True)
        run.remove_derived()
    return trace


def unfinished_training_note(run: Run) -> str | None:
    """Return a warning if the training of a run stopped before its last epoch."""
    epochs = run.epochs_done()
    if epochs is None or epochs[0] >= epochs[1]:
        return None
    return (
        f"the training of {run.directory} stopped after {epochs[0]} of {epochs[1]} epochs, so this is a trace of the "
        f"best weights so far; `{run.command('train', '--resume')}` finishes it, then collect with --force"
    )


def _launch(options: CollectOptions, net: MultiExitNet) -> None:
    """Start the processes and move the net to its device; a single process on a CPU does not need Fabric, nor Ray."""
    if options.ray is not None:
        return
    machine = Machine(options.machine.accelerator, options.machine.devices, options.machine.num_nodes)
    is_single = machine == Machine(accelerator=machine.accelerator)
    on_cpu = machine.accelerator == "cpu" or (machine.accelerator == "auto" and not torch.cuda.is_available())
    if is_single and on_cpu:
        return
    fabric = machine.fabric()
    fabric.launch()
    net.to(fabric.device)


def _is_on_disk(net: MultiExitNet, splits: data.Splits[Any], options: CollectOptions) -> bool:
    """Return whether features go to a folder: as requested, or if they are large and there is a single process."""
    if options.on_disk and world_size() > 1:
        raise InputError(f"`on_disk` needs a single process, but there are {world_size()}: collect with one device")
    if options.on_disk is not None:
        return options.on_disk
    samples = len(splits.val) + len(splits.test)
    return world_size() == 1 and 4 * samples * sum(x.last.in_features for x in net.exits) > MAX_FEATURE_BYTES


def _collect(
    net: MultiExitNet,
    build: Callable[[], MultiExitNet],
    splits: data.Splits[Any],
    options: CollectOptions,
    with_train: bool = True,
    out: Path | None = None,
) -> Trace:
    if options.ray is not None:
        return _collect_on_ray(net, build, splits, options, with_train, out)
    train, val, test = (
        data.Batches(images, options.batch_size, options.machine.workers)
        for images in (splits.train, splits.val, splits.test)
    )
    return collect(
        net,
        train if with_train else None,
        val,
        test,
        classes=splits.train.classes,
        progress=options.progress,
        out=out,
        dtype=torch.float32 if out is None else options.dtype,
        force=out is not None,
    )


def _collect_on_ray(
    net: MultiExitNet,
    build: Callable[[], MultiExitNet],
    splits: data.Splits[Any],
    options: CollectOptions,
    with_train: bool,
    out: Path | None,
) -> Trace:
    images = {"val": splits.val, "test": splits.test, "train": splits.train if with_train else None}
    workers, accelerator = options.machine.workers or None, options.machine.accelerator
    with RayDriver(str(options.ray), workers) as driver:
        on_gpu = accelerator == "cuda" or (accelerator == "auto" and driver.resources.get("GPU", 0) > 0)
        return collect_on_ray(
            driver,
            net,
            build,
            images,
            options.batch_size,
            classes=splits.train.classes,
            actors=workers,
            on_gpu=on_gpu,
            progress=options.progress,
            out=out,
            dtype=torch.float32 if out is None else options.dtype,
            force=out is not None,
        )
