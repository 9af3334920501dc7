"""The command that chains networks."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from exitwise.cli.options import ForceOption, JsonOption, expand_options, print_json
from exitwise.cli.train import OutOption, configure_logging, new_run_path
from exitwise.core.errors import InputError
from exitwise.runs.options import CascadeOptions, DataOptions


@expand_options
def cascade(
    data: DataOptions,
    options: CascadeOptions,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="With --candidates: mean cost per image, 2e7 (MACs) or 50% of the most expensive network; may be "
            "repeated. The run is the best chain at the first.",
            show_default="25%, 50%, 75% and 100%; the run is for 50%",
        ),
    ] = None,
    out: OutOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Chain networks that are trained already: a small one first, larger ones for images that it is not sure of.

    Nothing is trained, and no training images are needed: the images of --data, which the networks should not have been
    trained on, are for calibration and for testing. A function of --net returns a network that ends in a linear layer,
    or that network and its `exitwise.Preprocessing`.
    """
    configure_logging()
    path = new_run_path(out, data)
    if options.net and options.candidates:
        raise InputError("give either --net for the networks of a cascade, or --candidates to choose among them")
    if not options.net and not options.candidates:
        raise InputError("a cascade needs at least two networks: give --net for each, small ones first")
    if budget and not options.candidates:
        raise InputError("--budget is for --candidates: `exitwise evaluate RUN --budget` sets that of a run")
    if options.candidates:
        return _choose_run(path, data, options, budget or [], force, as_json)
    return _make_run(path, data, options, force, as_json)


def _choose_run(
    path: Path, data: DataOptions, options: CascadeOptions, budgets: list[str], force: bool, as_json: bool
) -> None:
    from dataclasses import asdict

    from exitwise.cli import tables
    from exitwise.cli.progress import progress_bars
    from exitwise.runs.candidates import choose_cascade_run

    with progress_bars() as progress:
        chosen = choose_cascade_run(path, data, options, budgets, force, progress)
    if as_json:
        compared = chosen.table.to_dict()
        compared["networks_alone"] = compared.pop("networks")
        networks = [asdict(cost) for cost in chosen.networks]
        return print_json(run=str(path), networks=networks, chosen=asdict(chosen.row), **compared)
    out = tables.console()
    for table in tables.best_cascades(chosen.table):
        out.print(table)
    out.print(tables.networks(chosen.networks))
    evaluate = f"exitwise evaluate {shlex.quote(str(path))} --budget {chosen.row.budget:.6g}"
    print(f"The run is in {path}: {chosen.row.name}. Next: {evaluate}")
    return None


def _make_run(path: Path, data: DataOptions, options: CascadeOptions, force: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from exitwise.cli import tables
    from exitwise.runs.cascade import make_cascade_run
    from exitwise.runs.run import Run

    costs = make_cascade_run(path, data, options, force)
    if as_json:
        return print_json(run=str(path), networks=[asdict(cost) for cost in costs])
    tables.console().print(tables.networks(costs))
    print(f"The run is in {path}. Next: {Run(path).command('collect')}")
    return None
