"""The command that compares our methods with those of others on the trace of a run."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from exitwise.cli.options import JsonOption, RunArgument, print_json
from exitwise.core.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from exitwise.rival_methods.table import RivalRow, RivalTable

_NAMES = (
    "temperature, vector, matrix, Dirichlet, ETS, isotonic, histogram, 'structured matrix', 'geometric ensemble', "
    "patience, entropy, 'stopping heads', laplace-torch, earlyon, 'learned score', or one of our methods"
)


def rivals(
    run: RunArgument,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Method to compare; may be repeated. {_NAMES}.", show_default="all that can run"),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Method that differences refer to.", show_default="the paper's method")
    ] = None,
    budget_range: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Average over budgets from LOW to HIGH.", show_default="the run's range"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Bootstrap resamples for the intervals.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of tables.")] = False,
) -> None:
    """Compare our methods with published rivals on the same trace, at equal cost, with paired intervals.

    All are fitted on the validation split and measured on the test split. Rivals that are programs of others run if
    `pip install 'exitwise[rivals]'` has installed them.
    """
    from exitwise.cli import tables
    from exitwise.cli.progress import progress_bars
    from exitwise.rival_methods.table import rivals as compare
    from exitwise.runs.labels import model_labels
    from exitwise.runs.run import Run

    if as_json and as_csv:
        raise InputError("--json and --csv exclude each other: give one of them")
    opened = Run(run)
    trace = opened.trace()
    with progress_bars("methods") as progress:
        table = compare(
            trace,
            only=only or None,
            reference=reference,
            budget_range=budget_range,
            repeats=repeats,
            seed=seed,
            progress=lambda done, total: progress("compare", done, total),
        )
    opened.add_results(rivals=table.to_dict())
    if as_json:
        return print_json(**table.to_dict())
    if as_csv:
        print(table.to_csv(), end="")
        return None
    out = tables.console()
    for part in make_tables(table, model_labels(trace.preset)):
        out.print(part, soft_wrap=isinstance(part, str), markup=False)
    return None


def make_tables(table: "RivalTable", labels: Mapping[str, str]) -> "Iterator[RichTable | str]":
    """Yield the metrics, the differences to the reference, the controlled losses, and notes."""
    yield _metrics_table(table, labels)
    if any(row.difference for row in table):
        yield _difference_table(table, labels)
    if table.risk_control:
        yield _risk_table(table)
    if table.not_run:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in table.not_run.items())
        yield f"\nNot run: {reasons}."
    yield f"\nLeft out, because they need another training: {', '.join(table.needs_training)}."
    if table.advice:
        yield f"\n{table.advice}"


def _label(row: "RivalRow", labels: Mapping[str, str]) -> str:
    return labels.get(row.name, row.label)


def _metrics_table(table: "RivalTable", labels: Mapping[str, str]) -> "RichTable":
    from exitwise.cli import tables
    from exitwise.core.costs import format_cost

    low, high = (format_cost(value, table.unit) for value in table.budget_range)
    caption = (
        f"\nMeans over budgets from {low} to {high}; fitted on {table.samples['val']:,} validation samples, measured "
        f"on {table.samples['test']:,} test samples.\nAdded: MACs of the method in percent of the net's. EEFP: how "
        "well the exit score detects where stopping is right, mean over the exits; visited: of the samples that reach "
        "each exit."
    )
    rich_table = tables.make_table("Rivals", caption)
    rich_table.add_column("", no_wrap=True)
    for name in ("top-1", "NLPD", "ECE", "ad.\nECE", "AUROC", "AURC", "EEFP", "EEFP\nvisited", "fit s", "added\n%"):
        rich_table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in table:
        if previous not in (None, row.kind):
            rich_table.add_section()
        previous = row.kind
        rich_table.add_row(
            _label(row, labels),
            f"{100 * row.top1:.2f}",
            f"{row.nlpd:.3f}",
            *(_format(value) for value in (row.ece, row.adaptive_ece, row.auroc, row.aurc, row.eefp, row.eefp_visited)),
            f"{row.seconds:.1f}",
            "" if row.added_cost is None else f"{100 * row.added_cost:.3f}",
        )
    return rich_table


def _format(value: float | None) -> str:
    from exitwise.cli import tables

    return "" if value is None else tables._drop_leading_zero(f"{value:.3f}")


def _difference_table(table: "RivalTable", labels: Mapping[str, str]) -> "RichTable":
    from rich.text import Text

    from exitwise.cli import tables

    columns = {
        "top1": ("top-1", 100, 2, True),
        "nlpd": ("NLPD", 1, 3, False),
        "ece": ("ECE", 1, 3, False),
        "auroc": ("AUROC", 1, 3, True),
        "eefp": ("EEFP", 1, 3, True),
    }
    caption = (
        f"\n±: half of the 95 % interval of {table.repeats:,} paired bootstrap resamples; * marks intervals without "
        "zero."
    )
    title = f"\nDifference to {labels.get(table.reference, table.reference)}"
    rich_table = tables.make_table(title, caption)
    rich_table.add_column("", no_wrap=True)
    for name, *_ in columns.values():
        rich_table.add_column(name, justify="right", no_wrap=True)
    for row in table:
        if row.name == table.reference:
            continue
        cells = []
        for key, (_, factor, digits, more_is_better) in columns.items():
            if key not in row.difference:
                cells.append(Text(""))
                continue
            low, high = row.intervals[key]
            is_clear = low > 0 or high < 0
            style = "dim" if not is_clear else "green" if (low > 0) == more_is_better else "red"
            difference = tables._drop_leading_zero(f"{factor * row.difference[key]:+.{digits}f}")
            half = tables._drop_leading_zero(f"{factor * (high - low) / 2:.{digits}f}")
            cells.append(Text(f"{difference} ±{half}{'*' if is_clear else ' '}", style=style))
        rich_table.add_row(_label(row, labels), *cells)
    return rich_table


def _risk_table(table: "RivalTable") -> "RichTable":
    from exitwise.cli import tables

    caption = (
        "\nCost in percent of the last exit's; lost: points of top-1 lost against it on the test split.\n"
        "Calibrated with temperatures on half of the validation samples, controlled on the other half."
    )
    epsilons = list(dict.fromkeys(row.epsilon for row in table.risk_control))
    points = " and ".join([", ".join(f"{100 * e:g}" for e in epsilons[:-1]), f"{100 * epsilons[-1]:g}"])
    rich_table = tables.make_table(f"\nControlled loss of at most {points} points", caption)
    rich_table.add_column("", no_wrap=True)
    for epsilon in epsilons:
        for name in ("cost", "lost"):
            rich_table.add_column(f"{100 * epsilon:g}: {name}", justify="right", no_wrap=True)
    for name in dict.fromkeys(row.name for row in table.risk_control):
        cells = []
        for row in table.risk_control:
            if row.name == name:
                is_certified = row.cost is not None and row.loss is not None
                cells += [f"{100 * (row.cost or 0):.1f}" if is_certified else "none"]
                cells += [f"{100 * (row.loss or 0):+.2f}" if is_certified else ""]
        rich_table.add_row(name, *cells)
    return rich_table
