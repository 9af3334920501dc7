"""The commands that deploy a net: predict, bench and export."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exitwise.calibration.methods import OURS
from exitwise.cli.policies import Certify
from exitwise.cli.train import ForceOption, JsonOption, NetOption, RunArgument, check_positive, print_json
from exitwise.core.errors import InputError

if TYPE_CHECKING:
    from exitwise.runs.deploy import ClassifierOptions
    from exitwise.runs.predict import Summary

Budget = Annotated[
    str | None,
    typer.Option(help="Mean cost per image: 2e7 (MACs), 50% of the full net's, or 12ms; the last evaluated one."),
]
MethodOption = Annotated[
    str | None, typer.Option(help=f"One of the paper's methods, with PoE for MIE, or MC dropout for Laplace; {OURS}.")
]
Score = Annotated[str | None, typer.Option(help="What decides: confidence, margin, entropy, variance or patience.")]
Strategy = Annotated[
    str | None, typer.Option(help="How thresholds are made: auto, geometric, optimized or label_free.")
]
Threads = Annotated[int | None, typer.Option(help="Threads to compute with; as many as there are cores.")]


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or an ONNX bundle.", show_default=False)],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGES", help="Files, folders, or - for a list on stdin.", show_default=False),
    ],
    budget: Budget = None,
    method: MethodOption = None,
    score: Score = None,
    strategy: Strategy = None,
    certify: Certify = None,
    keep_budget: Annotated[
        bool,
        typer.Option("--keep-budget", help="Move thresholds as pictures come, so that their mean cost is the budget."),
    ] = False,
    net: NetOption = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; stdout if not given.")] = None,
    format: Annotated[str | None, typer.Option(help="csv or jsonl; by the name of --out, else csv.")] = None,
    probs: Annotated[bool, typer.Option("--probs", help="All probabilities in every row (jsonl).")] = False,
    batch_size: Annotated[int, typer.Option(help="Images at once.")] = 64,
    threads: Threads = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out behind its last whole row.")] = False,
    force: ForceOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format jsonl.")] = False,
) -> None:
    """Classify pictures, each with as little computing as its confidence allows; one row each, in their order.

    A row holds the picture's name, the predicted class and its label, the confidence, the exit (from 0) and its cost.
    A picture that cannot be read or classified gets a row with its error.
    """
    from exitwise.cli.progress import progress_bars
    from exitwise.policies.controller import BudgetController
    from exitwise.runs import deploy, predict, row_file

    check_positive(batch_size=batch_size, threads=threads)
    kind = _format(format, out, as_json)
    if probs and kind != "jsonl":
        raise InputError("--probs needs --format jsonl")
    if out is None and (resume or force):
        raise InputError("--resume and --force are about a file: say which by --out")
    if out is not None and out.exists() and not out.is_file():
        raise InputError(f"{out} is no regular file")
    if out is not None and out.exists() and not resume and not force:
        raise InputError(f"{out} exists: --resume to go on with it, --force to replace it")
    found = predict.list_images(images)
    _set_threads(threads)
    choice = _choice(budget, method, score, net, strategy, certify)
    classifier = deploy.open_run_or_bundle(run, choice, threads)
    preprocessing, classes = deploy.about_pictures(classifier)
    controller = BudgetController(classifier.policy) if keep_budget else None
    fields = [*predict.FIELDS, *(["probs"] if probs else [])]
    summary, start = predict.Summary(), time.perf_counter()

    def answers(names: Any) -> Any:
        return predict.predict(classifier, names, preprocessing, classes, batch_size, summary, probs, controller)

    with progress_bars() as progress:
        if out is None:
            made = row_file.FORMATS[kind]
            _print(made.header(fields))
            for row in answers(found.names):
                _print(made.row(row))
                progress("predict", summary.images, found.total)
        else:
            with row_file.RowFile(out, row_file.FORMATS[kind], fields, resume) as file:
                names, done = predict.skip_done(found.names, file.existing_rows(), out)
                for row in answers(names):
                    file.add([row])
                    progress("predict", done + summary.images, found.total)
    costs = deploy.full_cost(classifier)
    print(f"exitwise: {_words(summary, costs, time.perf_counter() - start)}", file=sys.stderr)


def bench(
    run: RunArgument,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="Mean cost per image: 50%, 2e7 (MACs), or 2ms by the times of an earlier bench; may be repeated."
        ),
    ] = None,
    method: MethodOption = None,
    backend: Annotated[list[str] | None, typer.Option(help="torch, optimized or onnx; all that can run.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="May be repeated; 1, 16, 64 and 256.")] = None,
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(help="Rounds of everything; medians count.")] = 5,
    costs_of: Annotated[
        str, typer.Option(help="The backend and batch size that budgets in milliseconds are about.")
    ] = "optimized:64",
    net: NetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure on this machine what each stage takes and what stopping early saves; budgets may then be in ms.

    Nothing else should run beside it. The times are kept in the run's bench.json, stage costs in ms beside MACs:
    `exitwise evaluate RUN --budget 2ms` and `exitwise predict RUN ... --budget 2ms` use them.
    """
    from exitwise.cli import tables
    from exitwise.cli.progress import progress_bars
    from exitwise.runs import deploy
    from exitwise.runs.run import Run

    check_positive(
        threads=threads, repeats=repeats, **{f"batch_size {i}": size for i, size in enumerate(batch_size or [])}
    )
    _set_threads(threads)
    opened = Run(run)
    with progress_bars() as progress:
        found = deploy.bench(
            opened,
            deploy.BenchOptions(
                budgets=tuple(budget or ()),
                method=method or OURS,
                backends=tuple(backend or ()),
                batch_sizes=tuple(batch_size or ()),
                repeats=repeats,
                costs_of=costs_of,
                net=net,
            ),
            lambda done, total: progress("bench", done, total),
        )
    if as_json:
        return print_json(**found.about)
    out = tables.console()
    for table in tables.bench(found.bench, found.costs, found.macs, costs_of):
        out.print(table)
    for note in found.notes:
        out.print(f"\n{note}", highlight=False)
    return None


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put the bundle.", show_default=False)],
    budget: Budget = None,
    method: MethodOption = None,
    score: Score = None,
    strategy: Strategy = None,
    certify: Certify = None,
    net: NetOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's calibrated net as an ONNX bundle, which needs only numpy and onnxruntime to run."""
    from exitwise.core.costs import format_cost
    from exitwise.runs import deploy
    from exitwise.runs.run import Run

    classifier = deploy.build_classifier(Run(run), _choice(budget, method, score, net, strategy, certify))
    classifier.export(out, force=force)
    policy, files = classifier.policy, sorted(path.name for path in out.iterdir())
    if as_json:
        return print_json(bundle=str(out), files=files, policy=policy.to_dict())
    budgeted = format_cost(policy.budget or 0.0, policy.unit)
    print(
        f"The bundle is in {out}: {', '.join(files)}. Its thresholds are for {budgeted} per image.\n"
        f"Try it: exitwise predict {out} IMAGES, or from Python: exitwise.runtime.onnx.Session({str(out)!r})"
    )
    return None


def _choice(
    budget: str | None,
    method: str | None,
    score: str | None,
    net: str | None,
    strategy: str | None,
    certify: float | None,
) -> "ClassifierOptions":
    from exitwise.policies.certificate import Certificate
    from exitwise.runs.deploy import ClassifierOptions

    return ClassifierOptions(budget, method, score, net, strategy, None if certify is None else Certificate(certify))


def _format(format: str | None, out: Path | None, as_json: bool) -> str:
    from exitwise.runs.row_file import FORMATS

    if as_json and format not in (None, "jsonl"):
        raise InputError(f"--json means --format jsonl, but --format is {format}")
    by_name = "jsonl" if out is not None and out.suffix.lower() in (".jsonl", ".ndjson", ".json") else "csv"
    chosen = "jsonl" if as_json else format or by_name
    if chosen not in FORMATS:
        raise InputError(f"`--format` must be one of {', '.join(FORMATS)}, but got {chosen!r}")
    return chosen


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _print(data: bytes) -> None:
    """A row to stdout at once, so that whoever reads it need not wait."""
    sys.stdout.write(data.decode(errors="surrogateescape"))
    sys.stdout.flush()


def _words(summary: "Summary", full: tuple[float, str], seconds: float) -> str:
    from exitwise.core.costs import format_cost

    each = f", {1e3 * seconds / summary.images:.3g} ms each with reading and writing" if summary.images else ""
    said = [f"{summary.images} images in {seconds:.1f} s{each}"]
    if summary.mean_cost is not None:
        answered = summary.images - summary.errors
        said.append(
            f"mean cost {format_cost(summary.mean_cost, full[1])}, {summary.mean_cost / full[0]:.1%} of the full net's"
        )
        shares = ", ".join(f"{count / answered:.1%} at exit {k + 1}" for k, count in sorted(summary.exits.items()))
        said.append(f"left: {shares}")
    if summary.errors:
        said.append(f"{summary.errors} with an error, see their rows")
    return "; ".join(said)
