"""The command: parse, call the library, print. Torch is imported by the commands that need it, not by `--help`."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from exitwise.calibration.methods import DEFAULT_DRAWS, METHODS, OURS, VANILLA, get_method
from exitwise.cli.deploy import bench, export, predict
from exitwise.cli.policies import MethodOption, evaluate, policies
from exitwise.cli.report import command_line, report
from exitwise.cli.train import ForceOption, JsonOption, RunArgument, collect, print_json, train
from exitwise.core.errors import AllRanksError, InputError
from exitwise.core.rank import is_rank_zero
from exitwise.core.version import __version__

if TYPE_CHECKING:
    from exitwise.calibration.trace import Trace
    from exitwise.calibration.tuning import Tuner
    from exitwise.runs.run import Run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    help="Early-exit networks that can be trusted under a compute budget. Start with: exitwise demo",
)

Mode = Annotated[str, typer.Option(help="The Laplace posterior: paper, exact or naive.")]
Samples = Annotated[int, typer.Option(help="Monte Carlo draws.")]
Seed = Annotated[int, typer.Option(help="Seed of the draws.")]
Search = Annotated[str, typer.Option(help="grid, or continuous to go on from the best grid points by gradient.")]


def main() -> None:
    """Run the command. What a user can cause ends in one line on stderr and exit status 2."""
    signal.signal(signal.SIGTERM, _terminated)
    # Survivors come in batches of every size, and oneDNN prepares each convolution for each size: room for all of them.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± gets a question mark, not a crash
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        _fail(f"{error.format_message()} Try `exitwise --help`.")
    except AllRanksError as error:
        _fail(str(error), said=not is_rank_zero())
    except InputError as error:
        _fail(str(error))
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads on: no message, and none from the interpreter's last flush either
        sys.exit(141)
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error))
    except RuntimeError as error:
        if not any(word in str(error) for word in ("onnection closed", "onnection reset", "gloo", "NCCL")):
            raise
        _fail("another process ended: see its message", said=not is_rank_zero())
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", status=130, said=not is_rank_zero())
    if code == 130:  # what typer makes of Ctrl-C, without a word
        _fail("interrupted", status=130, said=not is_rank_zero())
    sys.exit(code or 0)


def _terminated(*_: object) -> None:
    """SIGTERM ends as Ctrl-C does, through every clean-up on the way."""
    raise SystemExit(143)


def _fail(message: str, status: int = 2, said: bool = False) -> None:
    """End with one line, unless another process has said it."""
    if not said:
        print(f"exitwise: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"exitwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


for command in (train, collect, evaluate, policies, predict, bench, export, report):
    app.command()(command)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to put the run.")] = Path("exitwise-demo"),
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the shipped CIFAR-100 net to a run, calibrate it by all twelve methods, and write a report to look at."""
    import shutil

    from exitwise import zoo
    from exitwise.calibration.trace import Trace
    from exitwise.calibration.tuning import Tuner
    from exitwise.cli import tables
    from exitwise.cli.progress import spinner
    from exitwise.core.costs import format_cost
    from exitwise.core.files import atomic_directory
    from exitwise.evaluation.paper_tables import make_paper_tables
    from exitwise.report.build import ReportOptions, build
    from exitwise.report.page import write as write_report
    from exitwise.runs.run import Run

    with atomic_directory(out, force) as new, spinner("Calibrating by twelve methods"):
        for name in ("run.json", "net.safetensors", "trace.safetensors", "split.safetensors", "CARD.md"):
            shutil.copyfile(zoo.path(name), new / name)
        trace = Trace.load(new / "trace.safetensors")
        found = make_paper_tables(trace, Tuner(trace))
        run = Run(new)
        for calibration in found.calibrations.values():
            calibration.save(run.calibration_file(calibration.method))
        run.add_results(ablation=found.ablation.to_dict(), decisions=found.decisions.to_dict())
    page = out / "report.html"
    with spinner("Writing the report"):
        write_report(build(Run(out), ReportOptions(command=command_line()), found), page)
    if as_json:
        return print_json(
            run=str(out), report=str(page), ablation=found.ablation.to_dict(), decisions=found.decisions.to_dict()
        )
    out_console = tables.console()
    published = zoo.published_changes("ablation", "cifar100-small")
    costs = trace.costs.values
    out_console.print(
        f"\n[bold]An MSDNet with {trace.num_exits} exits, trained on CIFAR-100 ({trace.num_classes} classes).[/bold] "
        f"Stopping at the first exit costs {format_cost(costs[0])} per image, "
        f"at the last {format_cost(costs[-1])}. "
        f"Its confidence decides when to stop, and it is overconfident: that is what calibration mends.\n"
    )
    out_console.print(tables.ablation(found.ablation, "Ablation", published, out_console.width))
    out_console.print("\n" + tables.summary(found.ablation))
    place = escape(str(out))  # brackets in a path are no markup
    out_console.print(
        f"\n[bold]Look at it: open {escape(str(page))} in a browser.[/bold]\n"
        f"\nThe run is in [bold]{place}[/bold]. What to try next:\n"
        f"  exitwise evaluate {place} --budget 50%    [dim]what half of the cost buys[/dim]\n"
        f"  exitwise policies {place}    [dim]every way to choose thresholds, with intervals[/dim]\n"
        f"  exitwise predict {place} PICTURES --budget 50%    [dim]your own, with a net that stops early[/dim]\n"
        f"  exitwise bench {place}    [dim]what that saves on this machine[/dim]\n"
        f"  exitwise ablate {place}    [dim]with the decision experiment[/dim]\n"
        f"  exitwise calibrate {place} --search continuous\n"
        f"  exitwise cost cifar100-small    [dim]what each exit costs[/dim]\n"
        f"  exitwise report {place} --root CIFAR100_DIR    [dim]the report with its pictures[/dim]\n",
        soft_wrap=True,
    )
    return None


@app.command()
def calibrate(
    run: RunArgument,
    method: MethodOption = OURS,
    mode: Mode = "paper",
    samples: Samples = DEFAULT_DRAWS,
    seed: Seed = 0,
    search: Search = "grid",
    as_json: JsonOption = False,
) -> None:
    """Tune temperature and prior variance of every exit on the validation split and save the calibration."""
    from exitwise.cli import tables
    from exitwise.cli.progress import spinner

    chosen = get_method(method)
    opened, _, tuner = _open(run, mode, samples, seed, search)
    with spinner(f"Calibrating by {chosen.name}"):
        made = tuner.calibrate(chosen)
        vanilla = tuner.calibrate(VANILLA)
    made.save(opened.calibration_file(chosen))
    if as_json:
        return print_json(**made.to_dict())
    tables.console().print(tables.calibration(made, vanilla))
    return None


@app.command()
def ablate(
    run: RunArgument,
    budget_range: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Average over budgets from LOW to HIGH; the run's own range if not given."),
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="A method for one more row, such as 'MC dropout T_opt'; may be repeated.")
    ] = None,
    mode: Mode = "paper",
    samples: Samples = DEFAULT_DRAWS,
    seed: Seed = 0,
    search: Search = "grid",
    as_json: JsonOption = False,
) -> None:
    """Make the paper's twelve-row ablation and its decision experiment."""
    from exitwise import zoo
    from exitwise.cli import tables
    from exitwise.cli.progress import spinner
    from exitwise.evaluation.paper_tables import make_paper_tables

    methods = list(dict.fromkeys([*METHODS, *(get_method(name).name for name in also or [])]))
    opened, trace, tuner = _open(run, mode, samples, seed, search)
    with spinner(f"Calibrating by {len(methods)} methods"):
        found = make_paper_tables(trace, tuner, budget_range, methods)
    opened.add_results(ablation=found.ablation.to_dict(), decisions=found.decisions.to_dict())
    if as_json:
        return print_json(ablation=found.ablation.to_dict(), decisions=found.decisions.to_dict())
    preset = trace.preset or ""
    out = tables.console()
    out.print(tables.ablation(found.ablation, "Ablation", zoo.published_changes("ablation", preset), out.width))
    published = zoo.published_changes("decision_experiment", preset)
    title = "\nDecision experiment: who decides when to stop"
    out.print(tables.ablation(found.decisions, title, published, out.width))
    return None


@app.command()
def cost(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A model's name.", show_default=False)],
    samples: Samples = DEFAULT_DRAWS,
    num_classes: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    in_channels: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what stopping at each exit costs: plain, with Laplace, with ensembling, with MC dropout."""
    from dataclasses import asdict

    import torch

    from exitwise import models
    from exitwise.calibration.overhead import cost_table
    from exitwise.cli import tables

    if samples < 1:
        raise InputError(f"`--samples` must be at least 1, but got {samples}")
    config = models.config(preset)
    with torch.device("meta"):
        net = models.build(preset, num_classes=num_classes, in_channels=in_channels)
    shape = (in_channels or config.in_channels, *config.input_shape[1:])
    rows = cost_table(net, shape, samples)
    if as_json:
        exits = [asdict(row) for row in rows]
        return print_json(preset=preset, unit="MACs", samples=samples, input_shape=list(shape), exits=exits)
    tables.console().print(tables.cost(preset, rows, samples))
    return None


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List the models that can be built by name."""
    from exitwise import models as known

    found = {name: known.config(name) for name in known.list()}
    if as_json:
        described = {
            name: {
                "family": known.family(name).name,
                "exits": config.exits,
                "input_shape": list(config.input_shape),
                "classes": config.num_classes,
            }
            for name, config in found.items()
        }
        return print_json(models=described)
    for name, config in found.items():
        size = "x".join(map(str, config.input_shape))
        exits = f"{config.exits} exit{'s' * (config.exits > 1)}"
        print(f"{name:22}  {known.family(name).name:8}  {exits:7}  pictures {size:9}  {config.num_classes:4} classes")
    return None


def _open(
    run: Path, mode: str = "paper", samples: int = DEFAULT_DRAWS, seed: int = 0, search: str = "grid"
) -> "tuple[Run, Trace, Tuner]":
    from exitwise.calibration.tuning import Tuner
    from exitwise.runs.run import Run

    opened = Run(run)
    trace = opened.trace()
    return opened, trace, Tuner(trace, samples, seed, mode, search=search)  # type: ignore[arg-type]
