"""The command that scores large sources: `exitwise score`."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from exitwise.cli.options import ForceOption, JsonOption, RayOption, print_json

if TYPE_CHECKING:
    from exitwise.scoring.score import ScoreProgress, ScoreSummary

_MANY = 100  # images per worker, for which another worker is worth its start
_LINE_SECONDS = 60.0  # between two lines of progress in a log


def score(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, a glob in quotes, a text file with a name per line, tar files or Parquet files: a path, or "
            "a URI such as s3://bucket/folder.",
            show_default=False,
        ),
    ],
    bundle: Annotated[
        str, typer.Option(metavar="BUNDLE", help="ONNX bundle that `exitwise export` wrote.", show_default=False)
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder of the job, a path or a URI.", show_default=False)],
    workers: Annotated[
        int | None,
        typer.Option(help="Processes on this machine, or actors.", show_default="1; with --ray, one per CPU", min=1),
    ] = None,
    ray: RayOption = None,
    threads: Annotated[int, typer.Option(help="Threads of onnxruntime in each process.", min=1)] = 1,
    keep_budget: Annotated[
        bool,
        typer.Option("--keep-budget", help="Adapt thresholds to the images, so that the mean cost is the budget."),
    ] = False,
    column: Annotated[
        str | None,
        typer.Option(help="Parquet column with bytes or paths of images.", show_default="a usual name, such as image"),
    ] = None,
    id_column: Annotated[str | None, typer.Option(help="Parquet column with ids.", show_default="file and row")] = None,
    decoder: Annotated[
        Literal["pillow", "draft"],
        typer.Option(help="draft decodes large JPEG files at a part of their size: faster, slightly other pixels."),
    ] = "pillow",
    batch_size: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 64,
    shard_size: Annotated[int, typer.Option(help="Largest number of images in a shard.", min=1)] = 2048,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Score many images with a bundle, in one or several processes; the same command resumes after any interruption.

    DIR/parts gets one Parquet file per shard of images, with a row per image: id, path, label, class, confidence, exit
    (from 0), cost, error and the fingerprint of the bundle. An image that cannot be read, or that ends the process
    which decodes it, gets a row with its error. The exit status is 1 if every image failed.
    """
    from exitwise.scoring.score import score

    with show_progress() as show:
        summary = score(
            source,
            bundle=bundle,
            out=out,
            workers=workers,
            threads=threads,
            ray=ray,
            batch_size=batch_size,
            shard_size=shard_size,
            keep_budget=keep_budget,
            column=column,
            id_column=id_column,
            decoder=decoder,
            force=force,
            on_progress=show,
        )
    if as_json:
        print_json(**summary.to_dict())
    else:
        print(f"exitwise: {_describe_summary(summary)}", file=sys.stderr)
        if workers is not None and summary.shards < workers and summary.images - summary.resumed >= _MANY * workers:
            print(f"exitwise: note: {_describe_idle(summary, workers)}", file=sys.stderr)
    if summary.all_failed:
        raise typer.Exit(1)


@contextmanager
def show_progress() -> Iterator["Callable[[ScoreProgress], None]"]:
    """Show a bar on stderr with a line of details below it; if stderr is no terminal, print a line per minute."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _ProgressLines()
        return
    details = Text("", overflow="ellipsis", no_wrap=True)

    class BarWithDetails(Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield from super().get_renderables()
            yield details

    columns = (TextColumn("score"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with BarWithDetails(*columns, console=console, transient=True) as bar:
        task = bar.add_task("score", total=None, speed="listing the source")

        def show(progress: "ScoreProgress") -> None:
            done = progress.counts.images + progress.read
            details.plain = _describe_counts(progress)
            bar.update(task, completed=done, total=progress.images, speed=_describe_speed(progress))

        yield show


class _ProgressLines:
    """Prints progress for a log, at most once per minute."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def __call__(self, progress: "ScoreProgress") -> None:
        """Print a line, if the last one is old enough and images were scored."""
        now = time.monotonic()
        if progress.per_second is None or now - self._printed < _LINE_SECONDS:
            return
        self._printed = now
        done = progress.counts.images + progress.read
        notes = [f"{done} of {progress.images} images", _describe_speed(progress), _describe_counts(progress)]
        print(f"exitwise: {'; '.join(filter(None, notes))}", file=sys.stderr, flush=True)


def _describe_speed(progress: "ScoreProgress") -> str:
    if progress.per_second is None or progress.seconds_left is None:
        return "starting workers"
    return f"{progress.per_second:.0f} rows/s, {timedelta(seconds=round(progress.seconds_left))} left"


def _describe_counts(progress: "ScoreProgress") -> str:
    from exitwise.core.costs import format_cost

    counts = progress.counts
    if not counts.images:
        return "exits and costs: after the first shard"
    notes = []
    if counts.mean_cost is not None:
        shares = ", ".join(f"{count / counts.answered:.0%} at exit {exit}" for exit, count in counts.exits.items())
        notes.append(f"mean cost {format_cost(counts.mean_cost, progress.unit)}; {shares}")
    if counts.errors:
        notes.append(f"{counts.errors} errors")
    return "; ".join(notes)


def _describe_idle(summary: "ScoreSummary", workers: int) -> str:
    size = -(-summary.images // (4 * workers))  # a few shards for each, so that they end together
    shards = "one shard" if summary.shards == 1 else f"{summary.shards} shards"
    return f"these images are {shards}, so that other workers had nothing to do: try --shard-size {size}"


def _describe_summary(summary: "ScoreSummary") -> str:
    from exitwise.core.costs import format_cost

    scored = summary.images - summary.resumed
    parts = [f"{summary.images} rows in {summary.out}/parts"]
    if summary.resumed:
        parts[0] += f", {summary.resumed} of them from before"
    if summary.per_second is not None:
        parts.append(f"{scored} images in {summary.seconds:.1f} s, {summary.per_second:.0f} rows/s")
    if summary.mean_cost is not None:
        share = summary.mean_cost / summary.full_cost
        parts.append(f"mean cost {format_cost(summary.mean_cost, summary.unit)}, {share:.1%} of the full net's")
        answered = summary.images - summary.errors
        shares = ", ".join(f"{count / answered:.1%} at exit {exit}" for exit, count in sorted(summary.exits.items()))
        parts.append(f"exited (counted from 0, as in the rows): {shares}")
    if summary.read_share is not None:
        parts.append(f"reading and decoding took {summary.read_share:.0%} of the workers' time")
    if summary.abstained is not None:
        parts.append(f"{summary.abstained} unanswered (abstained)")
    if summary.errors:
        parts.append(f"{summary.errors} with an error, see their rows")
    return "; ".join(parts)
