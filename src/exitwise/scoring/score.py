"""Scoring of a source with a bundle: begin or resume a job, run its shards, and summarize it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from exitwise.core.checks import check_bool
from exitwise.core.errors import InputError
from exitwise.core.extras import require_scoring
from exitwise.core.image_files import PILLOW
from exitwise.core.results import Result
from exitwise.policies.controller import BudgetController
from exitwise.runtime.bundle import Manifest
from exitwise.scoring import parts
from exitwise.scoring.executors import Event, Executor, ShardProgress
from exitwise.scoring.job import (
    Job,
    ScoreOptions,
    bundle_fingerprint,
    job_versions,
    locked,
    open_job,
    remove_job,
)
from exitwise.scoring.local_executor import LocalExecutor
from exitwise.scoring.parts import ShardCounts
from exitwise.scoring.ray_executor import RayExecutor
from exitwise.scoring.shard_scorer import ShardReport
from exitwise.scoring.storage import Storage, describe_job_error, is_uri, open_location

_REMOTE_READS = 16  # parts that are read at a time


@dataclass(frozen=True)
class ScoreProgress:
    """Progress of a job.

    Args:
        images: Number of images of the job.
        counts: Counts of the committed rows, those of former commands among them.
        read: Number of images read in shards that are not committed.
        per_second: Images per second of this command, None before the first image.
        seconds_left: Estimated time until the end, None before the first image.
        unit: Unit of the costs.
    """

    images: int
    counts: ShardCounts
    read: int
    per_second: float | None
    seconds_left: float | None
    unit: str


@dataclass(frozen=True)
class ScoreSummary(Result):
    """Summary of a complete job.

    Args:
        out: The folder of the job.
        images: Number of rows.
        shards: Number of shards, and so of parts.
        errors: Number of rows with an error.
        exits: Number of rows without an error at each exit, counted from 0.
        mean_cost: Mean cost of the rows without an error, None if there are none.
        full_cost: Cost of the last exit.
        unit: Unit of the costs.
        budget: The budget of the bundle's policy, None if it has none.
        abstained: Number of rows from which the classifier abstains, None if the bundle has no abstention.
        resumed: Number of rows that former commands committed.
        seconds: Time of this command on the shards.
        per_second: Images per second of this command, None if it scored none.
        read_share: Share of the workers' time for reading, decoding, scaling and cropping images, None without any.
        bundle: Fingerprint of the bundle.
    """

    out: str
    images: int
    shards: int
    errors: int
    exits: Mapping[int, int]
    mean_cost: float | None
    full_cost: float
    unit: str
    budget: float | None
    abstained: int | None
    resumed: int
    seconds: float
    per_second: float | None
    read_share: float | None
    bundle: str

    @property
    def all_failed(self) -> bool:
        """True if every row has an error."""
        return self.errors == self.images


def score(
    source: str | Path,
    *,
    bundle: str | Path,
    out: str | Path,
    workers: int | None = None,
    threads: int = 1,
    ray: str | None = None,
    batch_size: int = 64,
    shard_size: int = 2048,
    keep_budget: bool = False,
    column: str | None = None,
    id_column: str | None = None,
    decoder: str = PILLOW,
    force: bool = False,
    executor: Executor | None = None,
    on_progress: Callable[[ScoreProgress], None] | None = None,
) -> ScoreSummary:
    """Score all images of a source with an ONNX bundle; a job that was interrupted resumes.

    Rows are written to Parquet files in `out/parts`, one per shard. A part appears only when its shard is complete,
    so every image has exactly one row in the end, whatever was killed in between.

    Args:
        source: A folder, a glob pattern, a text file with a name per line, or tar or Parquet files: paths, or URIs that
            `pyarrow.fs` opens.
        bundle: Folder of a bundle that `Classifier.export` wrote, with a preprocessing of images.
        out: Folder of the job, a path or URI.
        workers: Number of processes on this machine [default: 1], or of actors on a cluster [default: one per CPU].
        threads: Threads of onnxruntime in each process.
        ray: HOST:PORT of the head of a Ray cluster to score on, or "local" for one on this machine.
        batch_size: Images per batch of the first stage.
        shard_size: Largest number of images in a shard.
        keep_budget: Keep the mean cost of every shard at the budget of the bundle, with a controller.
        column: Column of Parquet files with the bytes or the paths of the images; a usual name by default.
        id_column: Column of Parquet files with ids; file and row by default.
        decoder: "pillow", or "draft", which decodes large JPEG files at a part of their size: faster, with slightly
            other pixels.
        force: Start anew if `out` holds a job.
        executor: Runs the shards, in place of `workers` processes or actors with `threads` threads.
        on_progress: Called with the progress of the job.

    Returns:
        A summary of the complete job.

    Raises:
        InputError: If an argument is invalid, the source is empty or cannot be read, an id occurs twice, `out` holds a
            job of another bundle or source or cannot be written, or workers cannot work.

    Example:
        >>> import exitwise as ew
        >>> summary = ew.score("photos", bundle="bundle", out="scores", workers=2)  # doctest: +SKIP
        >>> summary.images, summary.errors  # doctest: +SKIP
        (20000, 3)
    """
    require_scoring()
    options = ScoreOptions(batch_size, shard_size, check_bool("keep_budget", keep_budget), column, id_column, decoder)
    manifest = _load_manifest(Path(bundle), keep_budget)
    fingerprint = bundle_fingerprint(Path(bundle), manifest)
    columns = tuple(parts.columns_of(manifest.sets is not None, manifest.abstention is not None))
    storage, folder = open_location(str(out), "out")
    location = str(out) if is_uri(str(out)) else folder
    if executor is None and ray is not None:
        executor = RayExecutor(bundle, ray, workers, threads)
    elif executor is None:
        executor = LocalExecutor(bundle, 1 if workers is None else workers, threads)
    with locked(storage, folder), _short_errors(storage.name(folder)):
        if force:
            remove_job(storage, folder)
        with executor:
            job = open_job(storage, folder, location, str(source), fingerprint, options, columns, job_versions())
            return _run(job, executor, manifest, on_progress)


@contextmanager
def _short_errors(folder: str) -> Iterator[None]:
    """Raise an InputError that names the file or the folder of the job in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise InputError(describe_job_error(error, folder)) from None


def _load_manifest(bundle: Path, keep_budget: bool) -> Manifest:
    manifest = Manifest.load(bundle)
    if manifest.preprocessing is None:
        raise InputError("the bundle has no preprocessing for image files: run it from Python, on arrays")
    if keep_budget:
        BudgetController(manifest.policy)
    return manifest


def _run(
    job: Job, executor: Executor, manifest: Manifest, on_progress: Callable[[ScoreProgress], None] | None
) -> ScoreSummary:
    """Score the shards without a part, and summarize all."""
    done = [shard for shard in parts.list_parts(job.storage, job.parts_folder) if shard < job.plan.shards]
    job.storage.remove_partial(job.parts_folder)
    former = _read_counts(job, done)
    progress = _Progress(job, former, manifest.costs.unit, on_progress)
    todo = sorted(set(range(job.plan.shards)) - set(done))
    if todo:
        executor.run(job, todo, progress.add)
        job.storage.remove_partial(job.parts_folder)  # of workers that were killed
    _remove_attempts(job.storage, job.attempts_folder)
    counts = progress.counts
    seconds = time.perf_counter() - progress.start
    scored = counts.images - former.images
    return ScoreSummary(
        out=job.storage.name(job.folder),
        images=counts.images,
        shards=job.plan.shards,
        errors=counts.errors,
        exits=counts.exits,
        mean_cost=counts.mean_cost,
        full_cost=manifest.costs.values[-1],
        unit=manifest.costs.unit,
        budget=manifest.policy.budget,
        abstained=None if manifest.abstention is None else counts.abstained,
        resumed=former.images,
        seconds=seconds,
        per_second=scored / seconds if scored else None,
        read_share=progress.read_seconds / progress.worker_seconds if progress.worker_seconds else None,
        bundle=job.bundle,
    )


def _read_counts(job: Job, shards: Sequence[int]) -> ShardCounts:
    """Return the counts of the parts of shards; remote ones are read many at a time, as each waits for the network."""

    def read(shard: int) -> ShardCounts:
        return parts.read_counts(job.storage, job.part_path(shard), job.fingerprint)

    if job.storage.is_local:
        return sum(map(read, shards), ShardCounts())
    total = ShardCounts()
    with ThreadPoolExecutor(_REMOTE_READS) as pool:
        for start in range(0, len(shards), _REMOTE_READS * 16):  # an error ends it soon
            total = sum(pool.map(read, shards[start : start + _REMOTE_READS * 16]), total)
    return total


def _remove_attempts(storage: Storage, folder: str) -> None:
    """Delete the records of workers that were killed between a part and its record: all parts are there."""
    if storage.stat(folder) is not None:
        for entry in storage.list_folder(folder):
            storage.remove(f"{folder}/{entry.name}")


class _Progress:
    """Adds up the events of an executor."""

    def __init__(
        self, job: Job, former: ShardCounts, unit: str, on_progress: Callable[[ScoreProgress], None] | None
    ) -> None:
        self._images, self._former, self._unit, self._on_progress = job.plan.images, former, unit, on_progress
        self._reading: dict[int, int] = {}
        self.counts = former
        self.start = time.perf_counter()
        self.read_seconds = self.worker_seconds = 0.0
        self._report()

    def add(self, event: Event) -> None:
        """Add an event, and call `on_progress`."""
        if isinstance(event, ShardProgress):
            self._reading[event.shard] = event.images
        else:
            self._add_report(event)
        self._report()

    def _add_report(self, report: ShardReport) -> None:
        self._reading.pop(report.shard, None)
        self.counts = self.counts + report.counts
        self.read_seconds += report.read_seconds
        self.worker_seconds += report.seconds

    def _report(self) -> None:
        if self._on_progress is None:
            return
        read = sum(self._reading.values())
        new = self.counts.images - self._former.images + read
        seconds = time.perf_counter() - self.start
        per_second = new / seconds if new else None
        left = self._images - self.counts.images - read
        seconds_left = left / per_second if per_second else None
        self._on_progress(ScoreProgress(self._images, self.counts, read, per_second, seconds_left, self._unit))
