"""Commands that run a net over a dataset: train, train-heads and collect."""

import logging
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from exitwise.cli.option_names import shorten_message
from exitwise.cli.options import ForceOption, JsonOption, RayOption, RunArgument, expand_options, print_json
from exitwise.core.errors import InputError
from exitwise.core.rank import is_rank_zero
from exitwise.core.text import escape_controls
from exitwise.runs.options import (
    AttachOptions,
    DataOptions,
    ExecutionOptions,
    HeadTrainOptions,
    MachineOptions,
    NetOptions,
    TrainOptions,
)

OutOption = Annotated[Path | None, typer.Option(help="Directory of the new run.", show_default="exitwise-DATA")]


@expand_options
def train(
    data: DataOptions,
    net: NetOptions,
    attached: AttachOptions,
    options: TrainOptions,
    machine: MachineOptions,
    execution: ExecutionOptions,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run to resume, with --resume.", show_default=False)
    ] = None,
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume RUN from its newest checkpoint.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    freeze_backbone: Annotated[bool, typer.Option("--freeze-backbone", hidden=True)] = False,
) -> None:
    """Train a net on a dataset, with the paper's recipe or your own, on one device or many.

    `exitwise train --data digits` creates a run. After any interruption, `exitwise train RUN --resume` continues bit
    for bit. The run keeps the weights of the epoch with the best validation accuracy at the last exit.

    With --attach and --weights, or with a network of another library such as --model timm:resnet50, exits are added to
    a trained network and trained together with all its layers (recipe `joint`). Epochs in which the last exit loses
    more than --max-drop are not kept; of the others, the one with the best mean accuracy over the exits is.
    `exitwise train-heads` leaves the network as it is, and is faster.
    """
    from exitwise.cli.progress import TrainingProgress
    from exitwise.runs.train import resume_run, train_new_run
    from exitwise.training.interruptions import TrainingInterruptedError

    if freeze_backbone:
        if resume:
            raise InputError("a training of heads cannot be resumed: repeat it with --force")
        for name in ("recipe", "compile", "precision", "max_drop"):
            if getattr(options, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} is not an option of train-heads")
        only_heads = HeadTrainOptions(options.epochs, options.batch_size, options.lr, options.distill, options.seed)
        _train_heads(data, net, attached, only_heads, machine, out, force, as_json)
        print("exitwise: `train --freeze-backbone` is now `exitwise train-heads`", file=sys.stderr)
        return
    configure_logging()
    if resume:
        path = _run_to_resume(run, out, data, force)
    elif run is not None:
        raise InputError(f"{run}: --resume resumes a run; a new one is named with --out")
    else:
        path = new_run_path(out, data)
    try:
        with TrainingProgress() as callback:
            if resume:
                _check_not_attached_again(path, attached)
                history = resume_run(path, data.root, net, options, machine, execution, callback)
            else:
                history = train_new_run(path, data, net, attached, options, machine, execution, force, callback)
    except TrainingInterruptedError as stopped:
        if is_rank_zero():
            devices = f" --devices {machine.devices}" if machine.devices else ""
            net_option = f" --net {shlex.quote(net.function)}" if net.function else ""
            command = f"exitwise train {shlex.quote(str(path))} --resume{net_option}{devices}"
            print(f"exitwise: stopped {stopped}; `{command}` resumes it", file=sys.stderr)
        raise SystemExit(128 + stopped.signal_number) from None
    if is_rank_zero():
        _print_result(path, history, net.function, as_json)
    return


@expand_options
def train_heads(
    data: DataOptions,
    net: NetOptions,
    attached: AttachOptions,
    options: HeadTrainOptions,
    machine: MachineOptions,
    out: OutOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train all heads of a net but the last on its frozen backbone (seconds to minutes).

    The backbone runs once and its features are cached. Each head keeps the weights of the epoch with its lowest
    validation NLPD. Use --attach to add exits to a trained network.
    """
    _train_heads(data, net, attached, options, machine, out, force, as_json)


def _train_heads(
    data: DataOptions,
    net: NetOptions,
    attached: AttachOptions,
    options: HeadTrainOptions,
    machine: MachineOptions,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    from exitwise.cli.progress import TrainingProgress
    from exitwise.runs.train_heads import train_heads_of_new_run

    configure_logging()
    path = new_run_path(out, data)
    with TrainingProgress() as callback:
        history = train_heads_of_new_run(path, data, net, attached, options, machine, force, callback)
    _print_result(path, history, net.function, as_json)


@expand_options
def collect(
    run: RunArgument,
    data: DataOptions,
    net: NetOptions,
    machine: MachineOptions,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights of the net: ours, the released MSDNet code's or torchvision's.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 64,
    half: Annotated[bool, typer.Option("--half", help="Store features as float16: half the size.")] = False,
    ray: RayOption = None,
    on_disk: Annotated[
        bool | None,
        typer.Option(
            "--on-disk/--in-memory",
            help="Write features to the folder RUN/trace while the net runs, or hold them in memory.",
            show_default="on disk above 1 GiB",
        ),
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the net once over every split and store the trace: features of val and test, curvature of train.

    An existing RUN has its net, dataset and split; results of its former trace are removed. A new RUN needs --data
    (and --root, unless it is a folder), --checkpoint, and --model or --net. A collection on disk that was interrupted
    resumes with the same command.
    """
    from exitwise.cli.progress import progress_bars
    from exitwise.runs.collect import CollectOptions, collect_existing_run, collect_new_run
    from exitwise.runs.run import Run

    configure_logging()
    with progress_bars() as progress:
        _check_machine_of_ray(ray, machine)
        options = CollectOptions(machine, batch_size, half, progress, on_disk, ray)
        if (run / "run.json").is_file():
            given = {"model": net.model, "checkpoint": checkpoint, **_options_of_new_data(data), "data": data.data}
            for name, value in given.items():
                if value is not None:
                    raise InputError(f"{run} already has its net and dataset: --{name} is for a new run")
            trace = collect_existing_run(run, data.root, net.function, force, options)
        else:
            if data.data is None or checkpoint is None or (net.model is None) == (net.function is None):
                raise InputError(_describe_missing_options(run, data, net, checkpoint))
            trace = collect_new_run(run, data, net, checkpoint, options)
    if not is_rank_zero():
        return None
    if as_json:
        splits = {"val": len(trace.val), "test": len(trace.test) if trace.test else 0, "train": trace.num_train}
        return print_json(run=str(run), exits=trace.num_exits, samples=splits, costs=list(trace.costs.values))
    print(f"{trace!r} is in {Run(run).trace_file}. Next: exitwise calibrate {shlex.quote(str(run))}")
    return None


def _check_machine_of_ray(ray: str | None, machine: MachineOptions) -> None:
    """Raise InputError if options of Lightning Fabric are given together with --ray."""
    if ray is None:
        return
    if machine.accelerator == "mps":
        raise InputError("--accelerator must be auto, cpu or cuda with --ray, but is mps")
    for name in ("devices", "num_nodes"):
        if getattr(machine, name) is not None:
            option = name.replace("_", "-")
            raise InputError(f"--{option} and --ray exclude each other: --workers is the number of Ray's actors")


def _describe_missing_options(run: Path, data: DataOptions, net: NetOptions, checkpoint: Path | None) -> str:
    if net.model is not None and net.net is not None:
        return "--model and --net exclude each other: name the net by one of them"
    given = {
        "--data": data.data is not None,
        "--model or --net": net.model is not None or net.net is not None,
        "--checkpoint": checkpoint is not None,
    }
    missing = " and ".join(option for option, is_given in given.items() if not is_given)
    message = f"{run} is not a run yet: a new one needs {missing}, too"
    if net.function is None or data.data is None:
        return message
    words = ["exitwise", "train-heads", "--data", data.data, "--net", net.function, "--out", str(run)]
    return f"{message}; if the heads are still to be trained: `{shlex.join(words)}`"


class _OneLineFormatter(logging.Formatter):
    """Messages that begin like those of the command, with control characters of file names escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return f"exitwise: {shorten_message(escape_controls(record.getMessage()))}"


def configure_logging() -> None:
    """Print warnings of the library in one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLineFormatter())
    logging.basicConfig(level=logging.WARNING if is_rank_zero() else logging.ERROR, handlers=[handler])


def new_run_path(out: Path | None, data: DataOptions) -> Path:
    """Return the directory of a new run: the given one, or one named after the dataset."""
    if data.data is None:
        raise InputError("name the dataset to train on with --data, such as --data digits")
    return out or Path(f"exitwise-{Path(data.data.replace(':', '/')).name}")


def _options_of_new_data(data: DataOptions) -> dict[str, Any]:
    """Map the names of dataset options that only a new run takes to their values; None if not given."""
    return {
        field.name.replace("_", "-"): getattr(data, field.name) or None
        for field in fields(data)
        if field.name not in ("data", "root")
    }


def _check_not_attached_again(run: Path, attached: AttachOptions) -> None:
    """Raise InputError if options that build the net of a new run are given for an existing one."""
    for field in fields(attached):
        if getattr(attached, field.name) not in (None, False):
            raise InputError(f"--{field.name} is for a new run: {run} has its exits and weights already")


def _run_to_resume(run: Path | None, out: Path | None, data: DataOptions, force: bool) -> Path:
    from exitwise.runs.run import Run
    from exitwise.runs.train import check_same_data

    for name, value in {**_options_of_new_data(data), "force": force or None}.items():
        if value is not None:
            raise InputError(f"--{name} is for a new run: a resumed one has its data already")
    if run is not None and out is not None and run != out:
        raise InputError(f"--out is for a new run: {run} stays in its folder")
    path = run or out
    if path is None:
        raise InputError("--resume needs the run to resume: exitwise train RUN --resume")
    if data.data is not None:
        check_same_data(Run(path), data.data)
    return path


def _print_result(path: Path, history: Any, net: str | None, as_json: bool) -> None:
    from exitwise.runs.run import Run

    best = history.best
    if as_json:
        return print_json(run=str(path), best=best.epoch, **history.to_dict())
    accuracies = ", ".join(f"{100 * top1:.2f}" for top1 in history.top1)
    weights = (
        "each head from the epoch of its lowest validation NLPD"
        if history.kept and best.val_nlpd
        else f"the weights of epoch {best.epoch}"
    )
    run = Run(path)
    if attached := run.metadata["model"].get("attach"):
        print(f"Exits are after {', '.join(attached['at'])}, and at the end.")
    print(
        f"Trained for {len(history.epochs)} epochs; the run keeps {weights}, "
        f"with validation top-1 {accuracies} % by exit.\n"
        f"The run is in {path}: net.safetensors, history.csv, history.png. Next: {run.command('collect')}"
    )
    return None
