"""Commands to begin with: demo and models."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from exitwise.calibration.methods import OURS
from exitwise.cli.options import ForceOption, JsonOption, print_json


def demo(
    out: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("exitwise-demo"),
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the shipped CIFAR-100 net to a run, calibrate it with all twelve methods, and write a report."""
    from exitwise import zoo
    from exitwise.cli import tables
    from exitwise.cli.progress import spinner
    from exitwise.cli.report import command_line
    from exitwise.core.costs import format_cost
    from exitwise.report.build import ReportOptions, build_report
    from exitwise.report.page import write_page
    from exitwise.runs.demo import create_demo_run

    with spinner("Calibrating with twelve methods"):
        run, paper_tables = create_demo_run(out, force)
    page = out / "report.html"
    with spinner("Writing the report"):
        write_page(build_report(run, ReportOptions(OURS, command=command_line()), paper_tables), page)
    results = {"ablation": paper_tables.ablation.to_dict(), "decisions": paper_tables.decisions.to_dict()}
    if as_json:
        return print_json(run=str(out), report=str(page), **results)
    console = tables.console()
    published = zoo.published_changes("ablation", "cifar100-small")
    trace = run.trace()
    costs = trace.costs.values
    console.print(
        f"\n[bold]An MSDNet with {trace.num_exits} exits, trained on CIFAR-100 ({trace.num_classes} classes).[/bold] "
        f"Stopping at the first exit costs {format_cost(costs[0])} per image, "
        f"at the last {format_cost(costs[-1])}. "
        f"Its confidence decides when to stop, and it is overconfident. Calibration corrects that.\n"
    )
    console.print(tables.ablation(paper_tables.ablation, "Ablation", published, console.width))
    console.print("\n" + tables.summary(paper_tables.ablation))
    path = escape(shlex.quote(str(out)))  # brackets in a path are not markup
    console.print(
        f"\n[bold]Open {escape(str(page))} in a browser.[/bold]\n"
        f"\nThe run is in [bold]{escape(str(out))}[/bold]. Try next:\n"
        f"  exitwise evaluate {path} --budget 50%    [dim]accuracy and calibration at half of the cost[/dim]\n"
        f"  exitwise policies {path}    [dim]every way to choose thresholds, with intervals[/dim]\n"
        f"  exitwise predict {path} IMAGES --budget 50%    [dim]your own images, with early exits[/dim]\n"
        f"  exitwise bench {path}    [dim]the time that this saves on your machine[/dim]\n"
        f"  exitwise ablate {path}    [dim]with the decision experiment[/dim]\n"
        f"  exitwise calibrate {path} --search continuous\n"
        f"  exitwise cost cifar100-small    [dim]the cost of each exit[/dim]\n"
        f"  exitwise report {path} --root CIFAR100_DIR    [dim]the report with images[/dim]\n",
        soft_wrap=True,
    )
    return None


def models(
    names: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="List networks of another library: 'timm:*conv*' or 'torchvision:*'.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the model presets, or the networks of timm or torchvision whose names match a pattern."""
    from exitwise import models

    if names is not None:
        return _list_named(names, as_json)
    configs = {name: models.config(name) for name in models.list_presets()}
    if as_json:
        described = {
            name: {
                "family": models.family(name).name,
                "exits": config.exits,
                "input_shape": list(config.input_shape),
                "classes": config.num_classes,
            }
            for name, config in configs.items()
        }
        return print_json(models=described)
    for name, config in configs.items():
        size = "x".join(map(str, config.input_shape))
        exits = f"{config.exits} exit{'s' * (config.exits > 1)}"
        family = models.family(name).name
        print(f"{name:22}  {family:8}  {exits:7}  images {size:9}  {config.num_classes:4} classes")
    return None


def _list_named(pattern: str, as_json: bool) -> None:
    from exitwise import models

    rows = models.list_named(pattern)
    if as_json:
        return print_json(models=rows)
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        size = "x".join(map(str, row["input_shape"]))
        classes = f"{row['classes']:5} classes" if row["classes"] else "no classifier"
        print(f"{row['name']:{width}}  images {size:9}  {classes}{'' if row['pretrained'] else '  no weights'}")
    return None
