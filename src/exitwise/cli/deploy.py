"""Commands that deploy a net: bench, export and predict."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from exitwise.cli.options import (
    ForceOption,
    JsonOption,
    NetOption,
    RunArgument,
    ThreadsOption,
    expand_options,
    print_json,
)
from exitwise.core.errors import InputError
from exitwise.core.text import escape_controls
from exitwise.runs.options import ClassifierOptions, join_nets

if TYPE_CHECKING:
    from exitwise.runs.predict import Summary


@expand_options
def predict(
    options: ClassifierOptions,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or an ONNX bundle.", show_default=False)],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGES", help="Files, folders, or - for a list on stdin.", show_default=False),
    ],
    keep_budget: Annotated[
        bool,
        typer.Option("--keep-budget", help="Adapt thresholds to the images, so that their mean cost is the budget."),
    ] = False,
    net: NetOption = None,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="stdout")] = None,
    format: Annotated[
        Literal["csv", "jsonl", "parquet"] | None,
        typer.Option(help="Output format.", show_default="by the suffix of --out, else csv"),
    ] = None,
    csv_safe: Annotated[
        bool,
        typer.Option("--csv-safe", help="Put ' before text that a spreadsheet would compute: = + - @ at its start."),
    ] = False,
    probs: Annotated[
        bool, typer.Option("--probs", help="Add all probabilities to every row (jsonl, parquet).")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 64,
    threads: ThreadsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue --out after its last complete row.")] = False,
    force: ForceOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format jsonl.")] = False,
) -> None:
    """Classify images with early exits; one row per image, in input order.

    A row holds the file name, the predicted class and its label, the confidence, the exit (from 0) and its cost. An
    image that cannot be read or classified gets a row with its error. After `evaluate --sets` a row also holds the
    classes of its prediction set, and after `evaluate --abstain` or `--risk` whether it is left unanswered. Without
    options, RUN uses its chosen classifier: that of the last `exitwise evaluate`. The exit status is 1 if every image
    failed, 2 if an input does not exist.
    """
    from exitwise.cli.progress import progress_bars
    from exitwise.policies.controller import BudgetController
    from exitwise.runs import deploy, parquet_file, predict, row_file

    kind = _output_format(format, out, as_json)
    if probs and kind == "csv":
        raise InputError("--probs needs --format jsonl or parquet")
    if kind == "parquet":
        parquet_file.require_pyarrow()
        if out is None or resume:
            why = "a Parquet file cannot be continued" if resume else "Parquet is not for a terminal or a pipe"
            raise InputError(f"{why}: give --out without --resume, or use --format csv or jsonl")
    if csv_safe and kind != "csv":
        raise InputError("--csv-safe needs --format csv")
    if out is None and (resume or force):
        raise InputError("--resume and --force are about a file: name it with --out")
    if out is not None and out.exists() and not out.is_file():
        raise InputError(f"{out} is not a regular file")
    if out is not None and out.exists() and not resume and not force:
        raise InputError(f"{out} exists: --resume to continue it, --force to replace it")
    image_list = predict.list_images(images)
    _set_threads(threads)
    classifier, description = deploy.open_run_or_bundle(run, options, join_nets(net), threads)
    preprocessing, classes = deploy.image_format(classifier)
    controller = BudgetController(classifier.policy) if keep_budget else None
    if keep_budget and (classifier.sets is not None or classifier.abstention is not None):
        print(
            "exitwise: --keep-budget moves thresholds: coverage of sets and risk of answers are not guaranteed",
            file=sys.stderr,
        )
    fields = predict.row_fields(classifier.sets, classifier.abstention, probs)
    row_format = row_file.Csv(safe=True) if csv_safe else row_file.FORMATS.get(kind, row_file.FORMATS["jsonl"])
    summary, start = predict.Summary(), time.perf_counter()

    def rows(names: Any) -> Any:
        return predict.predict(
            classifier, names, preprocessing, classes, batch_size, summary, probs, controller, fields
        )

    with progress_bars() as progress:
        if out is None:
            _print_bytes(row_format.header(fields))
            for row in rows(image_list.names):
                _print_bytes(row_format.row(row))
                progress("predict", summary.images, image_list.total)
        elif kind == "parquet":
            with parquet_file.open_parquet(out, fields) as parquet_rows:
                for row in rows(image_list.names):
                    parquet_rows.add(row)
                    progress("predict", summary.images, image_list.total)
        else:
            with row_file.RowFile(out, row_format, fields, resume, replace=force) as file:
                names = predict.skip_done(image_list.names, file.existing_rows(), out, summary, row_format.cell)
                for row in rows(names):
                    file.add([row])
                    progress("predict", summary.former + summary.images, image_list.total)
    if description is not None:
        print(f"exitwise: {description}", file=sys.stderr)
    full_cost, unit = deploy.full_cost(classifier)
    print(f"exitwise: {_describe_summary(summary, full_cost, unit, time.perf_counter() - start)}", file=sys.stderr)
    if summary.all_failed:
        raise typer.Exit(1)


def bench(
    run: RunArgument,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="Mean cost per image: 50%, 2e7 (MACs), or 2ms with the times of an earlier bench; may be repeated."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Calibration method by name.", show_default="the evaluated one, or auto"),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="torch, optimized or onnx; may be repeated.", show_default="all that can run"),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="May be repeated.", show_default="1, 16, 64 and 256", min=1),
    ] = None,
    threads: ThreadsOption = None,
    repeats: Annotated[int, typer.Option(help="Rounds of all measurements; the result is their median.", min=1)] = 5,
    costs_of: Annotated[
        str, typer.Option(help="Backend and batch size that budgets in milliseconds refer to.")
    ] = "optimized:64",
    net: NetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the time of each stage and of early exits on this machine; budgets may then be in ms.

    Run it on an idle machine. The times are stored in the run's bench.json, stage costs in ms beside MACs:
    `exitwise evaluate RUN --budget 2ms` and `exitwise predict RUN ... --budget 2ms` use them.
    """
    from exitwise.cli import tables
    from exitwise.cli.progress import progress_bars
    from exitwise.runs.bench import BenchOptions, bench_run
    from exitwise.runs.run import Run

    _set_threads(threads)
    options = BenchOptions(
        budgets=tuple(budget or ()),
        method=method,
        backends=tuple(backend or ()),
        batch_sizes=tuple(batch_size or ()),
        repeats=repeats,
        costs_of=costs_of,
        net=join_nets(net),
    )
    with progress_bars("measurements") as progress:
        report = bench_run(Run(run), options, lambda done, total: progress("bench", done, total))
    if as_json:
        return print_json(**report.metadata)
    out = tables.console()
    for table in tables.bench(report.bench, report.costs, report.macs, costs_of):
        out.print(table)
    for note in report.notes:
        out.print(f"\n{note}", highlight=False)
    return None


@expand_options
def export(
    options: ClassifierOptions,
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the bundle.", show_default=False)],
    net: NetOption = None,
    family: Annotated[
        bool | None,
        typer.Option(
            "--family/--no-family",
            help="Add policies for other budgets, from the first exit's cost to the last's, for `exitwise serve`.",
            show_default="on if the run has its trace",
        ),
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's classifier as an ONNX bundle, which needs only numpy and onnxruntime to run.

    Without options it is the run's chosen classifier: that of the last `exitwise evaluate`.
    """
    from exitwise.core.costs import format_cost
    from exitwise.runs.deploy import build_classifier, fit_family
    from exitwise.runs.run import Run
    from exitwise.runtime.export import require_onnx

    require_onnx()
    classifier, description = build_classifier(Run(run), options, join_nets(net))
    if family is None and not Run(run).trace_file.is_file():
        print("exitwise: the run has no trace: the bundle has no policies for other budgets", file=sys.stderr)
        family = False
    policies = None if family is False else fit_family(Run(run), classifier)
    classifier.export(out, force=force, family=policies)
    print(f"exitwise: {description}", file=sys.stderr)
    if policies is not None:
        print(f"exitwise: for `exitwise serve`: {policies.describe()}", file=sys.stderr)
    policy, files = classifier.policy, sorted(path.name for path in out.iterdir())
    if as_json:
        return print_json(bundle=str(out), files=files, policy=policy.to_dict())
    budget = format_cost(policy.budget or 0.0, policy.unit)
    print(
        f"The bundle is in {out}: {', '.join(files)}. Its thresholds are for {budget} per image.\n"
        f"Try it: exitwise predict {shlex.quote(str(out))} IMAGES, "
        f"or from Python: exitwise.runtime.onnx.Session({str(out)!r})"
    )
    return None


def _output_format(format: str | None, out: Path | None, as_json: bool) -> str:
    if as_json and format not in (None, "jsonl"):
        raise InputError(f"--json means --format jsonl, but --format is {format}")
    if as_json or format is not None:
        return format or "jsonl"
    suffix = "" if out is None else out.suffix.lower()
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(suffix, "csv")


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _print_bytes(data: bytes) -> None:
    """Print to stdout and flush, so that a reader of the pipe gets every row at once; escape controls in a terminal."""
    text = data.decode(errors="surrogateescape")
    sys.stdout.write(escape_controls(text[:-1]) + text[-1:] if _is_terminal() else text)
    sys.stdout.flush()


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _describe_summary(summary: "Summary", full_cost: float, unit: str, seconds: float) -> str:
    from exitwise.core.costs import format_cost

    per_image = f", {1e3 * seconds / summary.images:.3g} ms each with reading and writing" if summary.images else ""
    parts = [f"{summary.images} images in {seconds:.1f} s{per_image}"]
    if summary.mean_cost is not None:
        answered = summary.images - summary.errors
        parts.append(
            f"mean cost {format_cost(summary.mean_cost, unit)}, {summary.mean_cost / full_cost:.1%} of the full net's"
        )
        shares = ", ".join(f"{count / answered:.1%} at exit {k}" for k, count in sorted(summary.exits.items()))
        parts.append(f"exited (counted from 0, as in the rows): {shares}")
    if summary.abstained is not None:
        parts.append(f"{summary.abstained} unanswered (abstained)")
    if summary.errors:
        parts.append(f"{summary.errors} with an error, see their rows")
    return "; ".join(parts)
