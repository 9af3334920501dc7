"""Scoring of one shard: what a worker does, on this machine or on another."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwise.core.errors import InputError, first_line
from exitwise.core.image_files import read_or_error
from exitwise.core.predictions import Array
from exitwise.core.text import to_utf8
from exitwise.policies.controller import BudgetController
from exitwise.runtime.engine import Answer
from exitwise.runtime.onnx import Session
from exitwise.scoring import parts, plan
from exitwise.scoring.attempts import Attempt
from exitwise.scoring.item_reader import Reader, read_items
from exitwise.scoring.items import Item
from exitwise.scoring.job import Job, bundle_fingerprint
from exitwise.scoring.parts import ABSTAINED, SET, ShardCounts
from exitwise.scoring.storage import Locations, is_uri, open_location

# In errors of onnxruntime and of opening a file, but not in names of files.
_OUT_OF_MEMORY = re.compile(
    r"cannot run on its inputs: .*(allocate memory|bad.?alloc)|\(cannot allocate memory\)$", re.I
)


@dataclass(frozen=True)
class ShardReport:
    """A scored shard: counts of its rows, and where the time of the worker went.

    Args:
        shard: Number of the shard.
        counts: Counts of its rows.
        seconds: Time of the worker on this shard.
        read_seconds: Part of this time for reading, decoding, scaling and cropping images.
    """

    shard: int
    counts: ShardCounts
    seconds: float
    read_seconds: float


class LoadedBundle:
    """A bundle that a worker has loaded, with its fingerprint.

    Args:
        path: Folder of the bundle.
        threads: Threads of onnxruntime.
    """

    def __init__(self, path: str | Path, threads: int = 1) -> None:
        self.path = Path(path)
        self.session = Session(self.path, threads=threads)
        self.fingerprint = bundle_fingerprint(self.path, self.session.manifest)


class ShardScorer:
    """Scores shards of a job, one after the other.

    Args:
        job: The job, or the location of its folder.
        bundle: The bundle, which must be the job's.

    Raises:
        InputError: If the bundle differs from the job's, or the job is damaged.
    """

    def __init__(self, job: Job | str, bundle: LoadedBundle) -> None:
        self.job = Job.load(job) if isinstance(job, str) else job
        if bundle.fingerprint != self.job.bundle:
            raise InputError(
                f"the bundle {bundle.path} of a worker is not the one of the job ({bundle.fingerprint}, not "
                f"{self.job.bundle}): all workers need the same files"
            )
        self._session = bundle.session
        # The URI of the source may have options, such as a region, that names in the plan do not have.
        self._locations = Locations(open_location(self.job.source, "source")[0] if is_uri(self.job.source) else None)

    def score(self, shard: int, on_progress: Callable[[int], None] = lambda images: None) -> ShardReport:
        """Score a shard and commit its part; a part that exists is kept.

        Args:
            shard: Number of the shard.
            on_progress: Called with the number of images read so far.

        Raises:
            InputError: If the source has changed so that the shard cannot be scored.
            OSError: If a file of the job cannot be written, or a remote file cannot be read.
        """
        job, start = self.job, time.perf_counter()
        path = job.part_path(shard)
        if job.storage.stat(path) is not None:
            counts = parts.read_counts(job.storage, path, job.fingerprint)
            return ShardReport(shard, counts, time.perf_counter() - start, 0.0)
        items = plan.read_shard(job.storage, job.plan_folder, shard)
        with Attempt(job.storage, job.attempts_folder, shard) as attempt:
            images = _ImageStream(
                read_items(job, self._locations, items), attempt, self._session, job.options.decoder, on_progress
            )
            rows, counts = self._score_items(items, images)
            parts.write_part(job.storage, path, job.columns, rows, job.fingerprint, counts)
            attempt.finish()
        return ShardReport(shard, counts, time.perf_counter() - start, images.seconds)

    def _score_items(self, items: list[Item], images: "_ImageStream") -> tuple[dict[str, list[Any]], ShardCounts]:
        options, session = self.job.options, self._session
        # A controller of its own for every shard: rows must not depend on which worker scored what before.
        controller = BudgetController(session.policy) if options.keep_budget else None
        answers = session.stream(images, options.batch_size, controller=controller)
        rows: dict[str, list[Any]] = {name: [] for name in self.job.columns}
        exits: dict[int, int] = {}
        errors, cost, abstained = 0, 0.0, 0
        for item, answer in zip(items, answers, strict=True):
            for name, value in _row(item, answer, session.classes, self.job.bundle).items():
                if name in rows:
                    rows[name].append(value)
            if answer.error is not None:
                if _OUT_OF_MEMORY.search(answer.error):  # of this process now, not of the image: another may have more
                    raise MemoryError(answer.error)
                errors += 1
            elif answer.exit is not None and answer.cost is not None:
                cost += answer.cost
                exits[answer.exit] = exits.get(answer.exit, 0) + 1
                abstained += bool(answer.abstained)
        counts = ShardCounts(len(items), errors, cost, dict(sorted(exits.items())), abstained)
        return rows, counts


class _ImageStream:
    """Pixels of the images of a shard, or errors in their place, and the time that it took to get them."""

    def __init__(
        self, reader: Reader, attempt: Attempt, session: Session, decoder: str, on_progress: Callable[[int], None]
    ) -> None:
        self._reader, self._attempt, self._decoder, self._on_progress = reader, attempt, decoder, on_progress
        preprocessing = session.preprocessing
        assert preprocessing is not None  # the command has checked it
        self._preprocessing = preprocessing
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Array | InputError]:
        start = time.perf_counter()
        for position, (item, image) in enumerate(self._reader):
            pixels = self._decode(position, item, image)
            self.seconds += time.perf_counter() - start
            self._on_progress(position + 1)
            yield pixels
            start = time.perf_counter()
        self.seconds += time.perf_counter() - start

    def _decode(self, position: int, item: Item, image: bytes | Path | InputError) -> Array | InputError:
        if isinstance(image, InputError):
            return image
        name = to_utf8(str(image)) if isinstance(image, Path) else item.id
        if position in self._attempt.poisonous:
            return InputError(f"{name} ends the process that decodes it (a crash of the decoder, or too little memory)")
        if self._attempt.is_careful:
            self._attempt.decoding(position)
        try:
            pixels = read_or_error(image, self._preprocessing, name, self._decoder)
        except MemoryError:  # it ends the process, and the record must name this image
            raise
        except Exception as error:  # Pillow's plugins raise many types on damaged files
            pixels = InputError(f"{name} cannot be read as an image ({first_line(error)})")
        if self._attempt.is_careful:
            self._attempt.decoded()
        return pixels


def _row(item: Item, answer: Answer, classes: tuple[str, ...] | None, bundle: str) -> dict[str, Any]:
    predicted, confidence = answer.predicted, answer.confidence
    return {
        "id": item.id,
        "path": None if item.path is None else item.path.decode(errors="backslashreplace"),
        "label": None if predicted is None or classes is None else classes[predicted],
        "class": predicted,
        "confidence": None if confidence is None else round(confidence, 6),
        "exit": answer.exit,
        "cost": answer.cost,
        "error": None if answer.error is None else to_utf8(answer.error),
        "bundle": bundle,
        SET: None if answer.set is None else list(answer.set),
        ABSTAINED: answer.abstained,
    }
