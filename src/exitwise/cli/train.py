"""The commands that run a net over pictures: train and collect."""

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from exitwise.core.errors import InputError
from exitwise.core.rank import is_rank_zero

RunToResume = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="The run to go on with, for --resume.", show_default=False)
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is already there.")]
Accelerator = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Devices = Annotated[int | None, typer.Option(help="Processes on this machine, one per device; torchrun's, or 1.")]
NumNodes = Annotated[int | None, typer.Option(help="Machines that run this same command; torchrun's, or 1.")]
Workers = Annotated[int, typer.Option(help="Processes that decode picture files.")]
NetOption = Annotated[
    str | None, typer.Option(help="Your own net: package.module:function, which returns a MultiExitNet.")
]


def train(
    run: RunToResume = None,
    data: Annotated[
        str | None,
        typer.Option(help="cifar100, cifar10, fashion-mnist, imagenet, caltech256, digits, or folder:PATH."),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where the data set lies.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The net's preset (see `exitwise models`); the data set's own.")
    ] = None,
    net: NetOption = None,
    out: Annotated[Path | None, typer.Option(help="Where to put the run; exitwise-DATA if not given.")] = None,
    recipe: Annotated[str | None, typer.Option(help="How to train: a recipe's name; the data set's own.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the recipe's; its milestones move along.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Instead of the recipe's; all processes together.")] = None,
    lr: Annotated[float | None, typer.Option(help="First learning rate, instead of the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, data order and augmentation; 0.")] = None,
    split_seed: Annotated[int | None, typer.Option(help="Chooses the pictures held out; 0.")] = None,
    val_size: Annotated[int | None, typer.Option(help="Number of validation pictures; the data set's own.")] = None,
    test_size: Annotated[int | None, typer.Option(help="The same for data without a test set.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Of pictures from files; the net's own.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Get the data set first, into --root.")] = False,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out picture files that cannot be decoded, naming each.")
    ] = False,
    workers: Workers = 0,
    accelerator: Accelerator = "auto",
    devices: Devices = None,
    num_nodes: NumNodes = None,
    precision: Annotated[str | None, typer.Option(help="32-true (if not given), 16-mixed or bf16-mixed.")] = None,
    strategy: Annotated[str, typer.Option(help="auto or ddp.")] = "auto",
    accumulate: Annotated[
        int | None, typer.Option(help="Parts of a batch that a process takes one after the other.")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option(help="By torch.compile; where the training is long enough to pay.")
    ] = None,
    checkpoint_minutes: Annotated[float, typer.Option(help="A checkpoint this often, besides every epoch's.")] = 10.0,
    freeze_backbone: Annotated[
        bool, typer.Option("--freeze-backbone", help="Train the heads alone, all but the last: seconds to minutes.")
    ] = False,
    weights: Annotated[
        Path | None, typer.Option(help="With --freeze-backbone: a checkpoint to load into the net first.")
    ] = None,
    distill: Annotated[
        float | None, typer.Option(help="With --freeze-backbone: how much heads learn from the last exit, 0 to 1; 0.")
    ] = None,
    attach: Annotated[
        str | None,
        typer.Option(help="With --freeze-backbone: put exits behind these submodules (a,b,c), or auto with --exits."),
    ] = None,
    exits: Annotated[int | None, typer.Option(help="With --attach auto: how many exits, of about equal cost.")] = None,
    last: Annotated[bool, typer.Option("--last", help="With --freeze-backbone: train the last head, too.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with RUN from its newest checkpoint.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a net on a data set, by the paper's recipe or your own, on one device or many.

    `exitwise train --data digits` makes a new run. Interrupted by anything, `exitwise train RUN --resume` goes on bit
    for bit. The net that is kept is that of the epoch with the best validation accuracy at the last exit.

    With --freeze-backbone only the heads learn, each kept from its own best epoch; such a run cannot be resumed.
    """
    from exitwise.cli.progress import TrainingProgress
    from exitwise.runs import collect, train, train_heads
    from exitwise.training.loop import TrainingInterruptedError
    from exitwise.training.machine import Machine

    logging.basicConfig(level=logging.WARNING if is_rank_zero() else logging.ERROR, format="exitwise: %(message)s")
    order = train.TrainOptions(model, net, recipe, epochs, batch_size, lr, seed, compile, precision)
    machine = Machine(accelerator, devices, num_nodes, precision or "32-true", strategy)
    means = train.ExecutionOptions(machine, accumulate, workers, checkpoint_minutes)
    check_positive(val_size=val_size, test_size=test_size, image_size=image_size, accumulate=accumulate)
    if workers < 0 or checkpoint_minutes < 0:
        raise InputError("`--workers` and `--checkpoint-minutes` must be at least 0")
    whole = {"recipe": recipe, "compile": compile, "precision": precision, "accumulate": accumulate}
    alone = {"weights": weights, "distill": distill, "last": last or None, "attach": attach, "exits": exits}
    for name, value in (whole if freeze_backbone else alone).items():
        if value is not None:
            only = "does not go with" if freeze_backbone else "is for"
            raise InputError(f"--{name} {only} --freeze-backbone")
    if attach is not None and net is not None:
        raise InputError("--attach is for nets by name: let the function of --net return exitwise.attach(...)")
    if exits is not None and attach != "auto":
        raise InputError("--exits is for --attach auto")
    if resume and freeze_backbone:
        raise InputError("--freeze-backbone cannot go on by --resume: train the heads again with --force")
    if resume:
        fixed = {"split-seed": split_seed, "val-size": val_size, "test-size": test_size, "image-size": image_size}
        fixed |= {"download": download or None, "skip-unreadable": skip_unreadable or None, "force": force or None}
        for name, value in fixed.items():
            if value is not None:
                raise InputError(f"--{name} is for a new run: one that goes on has its data already")
        place = _resumed(run, out, data)
    elif run is not None:
        raise InputError(f"{run}: --resume goes on with a run; a new one is named by --out")
    elif data is None:
        raise InputError("say what to train on by --data, such as --data digits")
    else:
        place = out or Path(f"exitwise-{Path(data.replace(':', '/')).name}")
    try:
        with TrainingProgress() as live:
            if resume:
                history = train.resume_run(place, root, order, means, live)
            else:
                source = collect.DataOptions(
                    data or "", root, split_seed or 0, val_size, test_size, image_size, skip_unreadable, download
                )
                if freeze_backbone:
                    heads = train_heads.HeadTrainOptions(
                        model, net, weights, last, epochs, batch_size, lr, distill, seed, attach, exits
                    )
                    history = train_heads.train_new_heads(place, source, heads, machine, workers, force, live)
                else:
                    history = train.train_new_run(place, source, order, means, force, live)
    except TrainingInterruptedError as stopped:
        if is_rank_zero():
            many = f" --devices {devices}" if devices else ""
            again = f"exitwise train {shlex.quote(str(place))} --resume{many}"
            print(f"exitwise: stopped {stopped}; `{again}` goes on", file=sys.stderr)
        raise SystemExit(128 + stopped.signal_number) from None
    if is_rank_zero():
        _report(place, history, net, as_json)


def collect(
    run: RunArgument,
    root: Annotated[Path | None, typer.Option(help="Where the data set lies.")] = None,
    data: Annotated[str | None, typer.Option(help="The data set's name, for a new run.")] = None,
    model: Annotated[str | None, typer.Option(help="The net's preset, for a new run.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The net's weights, ours or a public MSDNet's or torchvision's, for a new run.")
    ] = None,
    net: NetOption = None,
    split_seed: Annotated[int, typer.Option(help="Chooses the validation images, for a new run.")] = 0,
    val_size: Annotated[int | None, typer.Option(help="Number of validation images, for a new run.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images at once.")] = 64,
    workers: Workers = 0,
    accelerator: Accelerator = "auto",
    devices: Devices = None,
    num_nodes: NumNodes = None,
    half: Annotated[bool, typer.Option("--half", help="Keep features as float16: half the size.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the net once over every split and keep the trace: features of val and test, curvature of train.

    An existing RUN knows its net, data set and split; what was made from its old trace goes with it.
    A new RUN is made from --model, --checkpoint, --data and --root.
    """
    from exitwise.cli.progress import progress_bars
    from exitwise.runs import collect
    from exitwise.training.machine import Machine

    if batch_size < 1:
        raise InputError(f"`--batch-size` must be at least 1, but got {batch_size}")
    with progress_bars() as progress:
        by = collect.CollectOptions(Machine(accelerator, devices, num_nodes), batch_size, workers, half, progress)
        if (run / "run.json").is_file():
            given = {"--data": data, "--model": model, "--checkpoint": checkpoint, "--val-size": val_size}
            for option, value in given.items():
                if value is not None:
                    raise InputError(f"{run} already has its net and data set: {option} is for a new run")
            trace = collect.collect_existing_run(run, root, net, force, by)
        else:
            if data is None or checkpoint is None or (model is None) == (net is None):
                raise InputError(f"{run} is not a run yet: a new one needs --model, --checkpoint, --data and --root")
            source = collect.DataOptions(data, root, split_seed, val_size)
            trace = collect.collect_new_run(run, source, model, net, checkpoint, by)
    if not is_rank_zero():
        return None
    if as_json:
        splits = {"val": len(trace.val), "test": len(trace.test) if trace.test else 0, "train": trace.curvature[0].n}
        return print_json(run=str(run), exits=trace.num_exits, samples=splits, costs=list(trace.costs.values))
    print(f"{trace!r} is in {run / 'trace.safetensors'}. Next: exitwise calibrate {run}")
    return None


def check_positive(**values: int | None) -> None:
    """Refuse options that are given and below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise InputError(f"`--{name.replace('_', '-')}` must be at least 1, but got {value}")


def _resumed(run: Path | None, out: Path | None, data: str | None) -> Path:
    from exitwise.runs.run import Run
    from exitwise.runs.train import check_same_data

    if run is not None and out is not None and run != out:
        raise InputError(f"--out is for a new run: {run} goes on where it is")
    place = run or out
    if place is None:
        raise InputError("--resume needs the run to go on with: exitwise train RUN --resume")
    if data is not None:
        check_same_data(Run(place), data)
    return place


def _report(place: Path, history: Any, net: str | None, as_json: bool) -> None:
    from exitwise.runs.run import Run

    best, again = history.best, f" --net {net}" if net else ""
    if as_json:
        return print_json(run=str(place), best=best.epoch, **history.to_dict())
    exits = ", ".join(f"{100 * top1:.2f}" for top1 in history.top1)
    kept = "each head as it was in its best" if history.kept else f"epoch {best.epoch}"
    if attached := Run(place).metadata["model"].get("attach"):
        print(f"Exits are behind {', '.join(attached['at'])}, and at the end.")
    print(
        f"Trained for {len(history.epochs)} epochs; kept is {kept}, "
        f"with validation top-1 {exits} % by exit.\n"
        f"The run is in {place}: net.safetensors, history.csv, history.png. Next: exitwise collect {place}{again}"
    )
    return None


def print_json(**data: Any) -> None:
    """One line for machines."""
    from exitwise.core.results import to_jsonable

    print(json.dumps(to_jsonable(data), allow_nan=False))
