"""The command about looking: report."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from exitwise.calibration.methods import OURS, get_method
from exitwise.cli.policies import MethodOption
from exitwise.cli.train import JsonOption, RunArgument, print_json
from exitwise.core.errors import InputError


def command_line() -> str:
    """What the user typed."""
    return shlex.join(["exitwise", *sys.argv[1:]])


def report(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; report.html in the run.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Where the page opens: 2e7 (MACs), 50% or 12ms; the run's last one, or 50%."),
    ] = None,
    method: MethodOption = OURS,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another run, such as a baseline's, to show beside; may be repeated.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where the data set's pictures lie, instead of the run's.")] = None,
    static: Annotated[
        Path | None, typer.Option(help="Also write the figures as PNG and PDF files into this folder.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Write it again and again while the run trains.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a page that shows what the net knows: budgets, uncertainty, calibration, examples, tables, costs.

    One file, which needs no network: open it by a double click.
    """
    from exitwise.cli.progress import spinner
    from exitwise.report import build, page
    from exitwise.report.figures.write import check, write
    from exitwise.runs import collect
    from exitwise.runs.run import Run

    get_method(method)
    opened = Run(run)
    place = out or run / "report.html"
    if place.is_dir():
        raise InputError(f"`--out` must name a file, but {place} is a folder")
    if static is not None:
        check(static)
    command = command_line()
    if live:
        from exitwise.report.live import rewrite_while_training

        opened.training()  # refuses what is not trained
        print(f"exitwise: {place} is written after every epoch; open it and leave it open", file=sys.stderr)
        with spinner("Waiting for the training"):
            rewrite_while_training(opened, place, command)
    if not opened.trace_file.is_file() and (opened.directory / "history.csv").is_file():
        made = build.training_report(opened, live=False, command=command)
        page.write(made, place)
        if static is not None:
            write(made, static)
        return _print_location(place, static, as_json, f"exitwise collect {shlex.quote(str(run))}")
    trace = opened.trace()
    amount, unit = None, "MACs"
    if budget is not None:
        costs = collect.costs_in_budget_unit(budget, opened, trace)
        amount, unit = collect.parse_budget(budget, costs), costs.unit
        costs.check_budget(amount)
    order = build.ReportOptions(method, amount, unit, root, tuple(against or ()), command)
    with spinner("Reading the run") as step:
        made = build.build(opened, order, progress=step)
        page.write(made, place)
        if static is not None:
            step("drawing figures for papers")
            write(made, static)
    return _print_location(place, static, as_json)


def _print_location(page: Path, figures: Path | None, as_json: bool, next_command: str | None = None) -> None:
    """Where it is."""
    from rich.markup import escape

    from exitwise.cli import tables

    if as_json:
        return print_json(report=str(page), static=None if figures is None else str(figures))
    said = f"The report is in [bold]{escape(str(page))}[/bold]"
    if figures is not None:
        said += f", its figures are in [bold]{escape(str(figures))}[/bold]"
    if next_command is not None:
        said += f". It shows the training alone: run `{escape(next_command)}` for the rest"
    tables.console().print(f"{said}.", soft_wrap=True)
    return None
