"""The command that writes the report."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from exitwise.calibration.methods import VANILLA, parse_method
from exitwise.cli.options import JsonOption, RunArgument, print_json
from exitwise.core.errors import InputError


def command_line() -> str:
    """Return the command as the user typed it."""
    return shlex.join(["exitwise", *sys.argv[1:]])


def report(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="report.html in RUN")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Budget that the page opens with: 2e7 (MACs), 50% or 12ms.",
            show_default="the evaluated one, or 50%",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Calibration method by name.", show_default="the evaluated one, or auto"),
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another run to compare with, such as a baseline; may be repeated.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the dataset's images.", show_default="the run's")] = None,
    static: Annotated[
        Path | None, typer.Option(help="Also write figures as PNG and PDF and tables as LaTeX into this folder.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Rewrite the page after every epoch while RUN trains.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a page that shows budgets, uncertainty, calibration, examples, tables and costs.

    The page is one file and needs no network: open it with a double click.
    """
    from exitwise.cli.progress import spinner
    from exitwise.report.build import ReportOptions, build_report, training_report
    from exitwise.report.figures.write import check_folder, write_figures
    from exitwise.report.live import rewrite_while_training
    from exitwise.report.page import write_page
    from exitwise.runs.budgets import costs_in_budget_unit, parse_budget
    from exitwise.runs.run import Run

    if method is not None:
        parse_method(method)
    opened = Run(run)
    page = out or run / "report.html"
    if page.is_dir():
        raise InputError(f"`--out` must name a file, but {page} is a folder")
    if static is not None:
        check_folder(static)
    command = command_line()
    if live:
        opened.training()  # fails for a run that is not trained
        print(f"exitwise: {page} is rewritten after every epoch; keep it open in a browser", file=sys.stderr)
        with spinner("Waiting for the training"):
            rewrite_while_training(opened, page, command)
    if not opened.has_trace and (opened.directory / "history.csv").is_file():
        content = training_report(opened, live=False, command=command)
        write_page(content, page)
        if static is not None:
            write_figures(content, static)
        return _print_location(page, static, as_json, opened.command("collect"))
    amount, unit = None, "MACs"
    if budget is not None:
        costs = costs_in_budget_unit(budget, opened, opened.trace())
        amount, unit = parse_budget(budget, costs), costs.unit
        costs.check_budget(amount)
    chosen = opened.chosen()
    options = ReportOptions(method, amount, unit, root, tuple(against or ()), command)
    with spinner("Reading the run") as update:
        content = build_report(opened, options, progress=update)
        write_page(content, page)
        if static is not None:
            update("drawing figures")
            write_figures(content, static)
    if chosen is not None and method is None and chosen.calibration.method.name != VANILLA:
        print(f"exitwise: {chosen.describe()} (as evaluated)", file=sys.stderr)
    return _print_location(page, static, as_json)


def _print_location(page: Path, figures: Path | None, as_json: bool, next_command: str | None = None) -> None:
    """Print where the report is, and the command that completes it."""
    from rich.markup import escape

    from exitwise.cli import tables

    if as_json:
        return print_json(report=str(page), static=None if figures is None else str(figures))
    sentence = f"The report is in [bold]{escape(str(page))}[/bold]"
    if figures is not None:
        sentence += f", its figures are in [bold]{escape(str(figures))}[/bold]"
    if next_command is not None:
        sentence += f". It shows only the training: run `{escape(next_command)}` for the rest"
    tables.console().print(f"{sentence}.", soft_wrap=True)
    return None
