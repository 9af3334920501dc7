"""A job: its manifest `job.json` with the fingerprint of bundle, source and options, and the folders beside it."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from exitwise.core.checks import check_choice, check_integer
from exitwise.core.errors import InputError
from exitwise.core.files import parse_json
from exitwise.core.image_files import DECODERS, PILLOW
from exitwise.core.locks import exclusive_lock
from exitwise.core.version import __version__
from exitwise.runtime.bundle import MANIFEST, Manifest
from exitwise.scoring import parts, plan
from exitwise.scoring.files_source import has_pattern
from exitwise.scoring.items import list_source
from exitwise.scoring.storage import Storage, is_uri, open_location

FORMAT, VERSION = "exitwise.score", 1
JOB_FILE, LOCK_FILE = "job.json", "lock"
_FOLDERS = ("plan", "parts", "attempts")


@dataclass(frozen=True)
class ScoreOptions:
    """Options of a job that its rows depend on.

    Args:
        batch_size: Images per batch of the first stage.
        shard_size: Largest number of images in a shard.
        keep_budget: Whether a controller keeps the mean cost of each shard at the budget.
        column: Column of Parquet files with the bytes or the paths of the images.
        id_column: Column of Parquet files with the ids.
        decoder: "pillow", or "draft" for JPEG decoded at a part of its size.
    """

    batch_size: int = 64
    shard_size: int = 2048
    keep_budget: bool = False
    column: str | None = None
    id_column: str | None = None
    decoder: str = PILLOW

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, 1, 1 << 20)
        check_integer("shard_size", self.shard_size, 1, 1 << 20)
        check_choice("decoder", self.decoder, DECODERS)


def bundle_fingerprint(bundle: Path, manifest: Manifest) -> str:
    """Return a short SHA-256 of the manifest and the graphs of a bundle; raise InputError if a graph was changed."""
    digest = hashlib.sha256((bundle / MANIFEST).read_bytes())
    for exit in range(len(manifest.graphs)):
        digest.update(manifest.read_graph(bundle, exit))
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """A job whose plan is written.

    Attributes:
        storage: The storage of its folder.
        folder: Path of its folder in this storage.
        location: Path or URI of its folder as it was given, from which `Job.load` opens it again.
        bundle: Fingerprint of the bundle.
        source: The source, as an absolute path or URI.
        kind: How images are read: "images", "tar" or "parquet".
        plan: Number of images and shards, and a digest of the listing.
        options: Options that the rows depend on.
        columns: Columns of the parts.
        image_column: Column of Parquet files that holds the bytes of the images.
        versions: Versions of the packages with which the job began.
    """

    storage: Storage
    folder: str
    location: str
    bundle: str
    source: str
    kind: str
    plan: plan.PlanSummary
    options: ScoreOptions
    columns: tuple[str, ...]
    image_column: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A short SHA-256 of everything that the rows depend on."""
        text = json.dumps([self.bundle, self.source, self.kind, asdict(self.plan), asdict(self.options), self.columns])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def plan_folder(self) -> str:
        return f"{self.folder}/plan"

    @property
    def parts_folder(self) -> str:
        return f"{self.folder}/parts"

    @property
    def attempts_folder(self) -> str:
        return f"{self.folder}/attempts"

    def part_path(self, shard: int) -> str:
        """Return the path of the part of a shard."""
        return parts.part_path(self.parts_folder, shard)

    def save(self) -> None:
        """Write the manifest, which makes the folder a job."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "bundle": self.bundle,
            "source": self.source,
            "kind": self.kind,
            "image_column": self.image_column,
            "plan": asdict(self.plan),
            "options": asdict(self.options),
            "columns": list(self.columns),
            "versions": dict(self.versions),
        }
        self.storage.write(f"{self.folder}/{JOB_FILE}", json.dumps(data, indent=2).encode() + b"\n")

    @classmethod
    def load(cls, location: str) -> "Job":
        """Read the manifest of a job; raise InputError if it is missing or damaged."""
        storage, folder = open_location(location, "out")
        return cls.read(storage, folder, location)

    @classmethod
    def read(cls, storage: Storage, folder: str, location: str) -> "Job":
        """Read the manifest of a job from a storage; raise InputError if it is missing or damaged."""
        path = f"{folder}/{JOB_FILE}"
        name = storage.name(path)
        if storage.stat(path) is None:
            raise InputError(f"{name} does not exist")
        try:
            data = parse_json(storage.read(path), allow_nan=False)
            if data["format"] != FORMAT:
                raise InputError(f"{name} must be of format {FORMAT!r}, but is of {data['format']!r}")
            if data["version"] != VERSION:
                raise InputError(f"{name} has version {data['version']!r}, but this exitwise reads version {VERSION}")
            job = cls(
                storage,
                folder,
                location,
                str(data["bundle"]),
                str(data["source"]),
                str(data["kind"]),
                plan.PlanSummary(**data["plan"]),
                ScoreOptions(**data["options"]),
                tuple(data["columns"]),
                data["image_column"],
                dict(data["versions"]),
            )
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(f"{name} is damaged: start the job anew with --force") from None
        if job.fingerprint != data.get("fingerprint"):
            raise InputError(f"{name} has changed since it was written: start the job anew with --force")
        return job


def open_job(
    storage: Storage,
    folder: str,
    location: str,
    source: str,
    bundle: str,
    options: ScoreOptions,
    columns: tuple[str, ...],
    versions: Mapping[str, str],
) -> Job:
    """Resume the job in a folder, or list the source and begin one.

    Raises:
        InputError: If the folder holds something else, or a job of another bundle, source or other options.
    """
    name = storage.name(folder)
    source = source if is_uri(source) or source == "-" else open_location(source, "source")[1]
    _check_apart(storage, folder, source)
    former = Job.read(storage, folder, location) if storage.stat(f"{folder}/{JOB_FILE}") is not None else None
    if former is not None:
        _check_same(name, former, bundle, source, options, columns)
    listing = list_source(source, options.shard_size, options.column, options.id_column)
    if former is not None:
        now = plan.summarize(listing.shards)
        if now != former.plan:
            raise InputError(
                f"{source} has changed since the job in {name} began ({former.plan.images} images then, {now.images} "
                f"now, or other sizes or times): choose another --out, or --force to start anew"
            )
        return former
    _check_free(storage, folder)
    for place in (folder, f"{folder}/plan"):
        storage.remove_partial(place)
    summary = plan.write_plan(storage, f"{folder}/plan", source, listing.shards)
    job = Job(
        storage,
        folder,
        location,
        bundle,
        source,
        listing.kind,
        summary,
        options,
        columns,
        listing.image_column,
        dict(versions),
    )
    job.save()
    return job


def job_versions() -> dict[str, str]:
    """Return the versions of the packages that rows come from."""
    from importlib.metadata import version

    return {"exitwise": __version__, **{name: version(name) for name in ("numpy", "onnxruntime", "pillow")}}


def _check_apart(storage: Storage, folder: str, source: str) -> None:
    """Raise InputError if the folder of the job lies in the source, where its files would be listed."""
    root = source.partition("**")[0] if has_pattern(source) and "**" in source else source
    if f"{storage.name(folder)}/".startswith(f"{root.rstrip('/')}/"):
        raise InputError(f"`out` must not lie in the source, but {storage.name(folder)} lies in {source}")


def _check_same(
    name: str, former: Job, bundle: str, source: str, options: ScoreOptions, columns: tuple[str, ...]
) -> None:
    """Raise InputError that names the first difference between a job and a command."""
    pairs = [("source", former.source, source), ("bundle", former.bundle, bundle)]
    pairs += [(key, value, getattr(options, key)) for key, value in asdict(former.options).items()]
    pairs += [("columns", ", ".join(former.columns), ", ".join(columns))]
    for key, then, now in pairs:
        if then != now:
            raise InputError(
                f"{name} is a job with another {key.replace('_', ' ')} ({then}, not {now}): "
                f"choose another --out, or --force to start anew"
            )


def _check_free(storage: Storage, folder: str) -> None:
    """Raise InputError if the folder holds something that is not of a job."""
    entry = storage.stat(folder)
    if entry is None:
        return
    if not entry.is_folder:
        raise InputError(f"{storage.name(folder)} exists and is not a folder")
    known = {JOB_FILE, LOCK_FILE, *_FOLDERS}
    names = [found.name for found in storage.list_folder(folder)]
    other = [name for name in names if name not in known and not name.startswith(f".{JOB_FILE}.")]
    if other:
        raise InputError(f"{storage.name(folder)} exists and is not a job: it holds {other[0]!r}; choose another --out")


def remove_job(storage: Storage, folder: str) -> None:
    """Delete the files of a job, the manifest after the parts; other files in its folder are refused."""
    _check_free(storage, folder)
    for name in ("parts", "attempts", "", "plan"):
        path = f"{folder}/{name}".rstrip("/")
        if not name:
            storage.remove(f"{folder}/{JOB_FILE}")
        elif storage.stat(path) is not None:
            for entry in storage.list_folder(path):
                storage.remove(f"{path}/{entry.name}")


@contextmanager
def locked(storage: Storage, folder: str) -> Iterator[None]:
    """Hold the lock of a job in a local folder; raise InputError if another command holds it."""
    if not storage.is_local:
        yield
        return
    with ExitStack() as stack:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            busy = f"another command works on the job in {folder}: wait for it, or end it"
            stack.enter_context(exclusive_lock(Path(folder) / LOCK_FILE, busy))
        except OSError as error:
            raise InputError(f"{folder} cannot be written ({error.strerror}): choose another --out") from None
        yield
