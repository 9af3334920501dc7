"""Commands that calibrate: calibrate and ablate; and the cost of each method."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exitwise.calibration.methods import AUTO, DEFAULT_DRAWS, VANILLA, Method, parse_method
from exitwise.cli.options import JsonOption, MethodOption, RunArgument, print_json

if TYPE_CHECKING:
    from exitwise.calibration.trace import Trace
    from exitwise.calibration.tuning import Tuner
    from exitwise.runs.run import Run

ModeOption = Annotated[Literal["paper", "exact", "naive"], typer.Option(help="Form of the Laplace posterior.")]
DrawsOption = Annotated[int, typer.Option("--samples", help="Monte Carlo draws.", min=1)]
SeedOption = Annotated[int, typer.Option(help="Seed of the draws.")]
SearchOption = Annotated[
    Literal["grid", "continuous"], typer.Option(help="Grid search, or grid search refined with gradients.")
]


def calibrate(
    run: RunArgument,
    method: MethodOption = AUTO,
    mode: ModeOption = "paper",
    samples: DrawsOption = DEFAULT_DRAWS,
    seed: SeedOption = 0,
    search: SearchOption = "grid",
    as_json: JsonOption = False,
) -> None:
    """Calibrate every exit on the validation split, and save the calibration.

    By default, the method is chosen by cross-validation: temperature, MIE, PoE or Pool, each without or with Laplace.
    """
    from exitwise.calibration.search_bounds import describe_values_at_bounds
    from exitwise.cli import tables
    from exitwise.cli.progress import spinner

    choice = parse_method(method)
    opened, _, tuner = _open_run(run, mode, samples, seed, search)
    message = f"Calibrating with {choice.name}" if isinstance(choice, Method) else "Comparing methods"
    with spinner(message):
        calibration = tuner.calibrate(choice)
        vanilla = tuner.calibrate(VANILLA)
    calibration.save(opened.calibration_file(calibration.method))
    if calibration.selection is not None:
        opened.save_selection(calibration.selection)
        print(f"exitwise: {calibration.selection}", file=sys.stderr)
    notes = describe_values_at_bounds(calibration, opened.search_command(calibration.method))
    if as_json:
        return print_json(**calibration.to_dict(), notes=notes)
    out = tables.console()
    out.print(tables.calibration(calibration, vanilla))
    tables.print_notes(out, notes)
    return None


def ablate(
    run: RunArgument,
    budget_range: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Average over budgets from LOW to HIGH.", show_default="the run's range"),
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="Method for one more row, such as Pool or auto; may be repeated.")
    ] = None,
    mode: ModeOption = "paper",
    samples: DrawsOption = DEFAULT_DRAWS,
    seed: SeedOption = 0,
    search: SearchOption = "grid",
    as_json: JsonOption = False,
) -> None:
    """Compute the paper's twelve-row ablation and its decision experiment."""
    from exitwise import zoo
    from exitwise.cli import tables
    from exitwise.cli.progress import spinner
    from exitwise.evaluation.paper_tables import make_paper_tables, usable_methods
    from exitwise.runs.labels import model_labels
    from exitwise.runs.policies import resolve_method

    choices = [parse_method(name) for name in also or []]
    opened, trace, tuner = _open_run(run, mode, samples, seed, search)
    others = [resolve_method(opened, tuner, choice).name for choice in choices]
    methods = list(dict.fromkeys([*usable_methods(trace), *others]))
    if not trace.curvature:
        print("exitwise: without Laplace: the trace was collected without training images", file=sys.stderr)
    with spinner(f"Calibrating with {len(methods)} methods"):
        paper_tables = make_paper_tables(trace, tuner, budget_range, methods)
    results = {"ablation": paper_tables.ablation.to_dict(), "decisions": paper_tables.decisions.to_dict()}
    opened.add_results(**results)
    if as_json:
        return print_json(**results)
    preset = trace.preset or ""
    out, labels = tables.console(), model_labels(trace.preset)
    published = zoo.published_changes("ablation", preset)
    out.print(tables.ablation(paper_tables.ablation, "Ablation", published, out.width, labels))
    published = zoo.published_changes("decision_experiment", preset)
    title = "\nDecision experiment: the model that decides when to exit"
    out.print(tables.ablation(paper_tables.decisions, title, published, out.width, labels))
    return None


def cost(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="Model preset.", show_default=False)],
    samples: DrawsOption = DEFAULT_DRAWS,
    num_classes: Annotated[int | None, typer.Option(help="Number of classes.", show_default="the preset's")] = None,
    in_channels: Annotated[int | None, typer.Option(help="Channels of an image.", show_default="the preset's")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the MACs up to each exit: vanilla, with Laplace, with ensembling, with a pool, with MC dropout."""
    from dataclasses import asdict

    import torch

    from exitwise import models
    from exitwise.calibration.overhead import cost_table
    from exitwise.cli import tables

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


def _open_run(run: Path, mode: str, samples: int, seed: int, search: str) -> "tuple[Run, Trace, Tuner]":
    from exitwise.calibration.tuning import Tuner
    from exitwise.runs.run import Run

    opened = Run(run)
    trace = opened.trace()
    return opened, trace, Tuner(trace, num_draws=samples, seed=seed, mode=mode, search=search)  # type: ignore[arg-type]
