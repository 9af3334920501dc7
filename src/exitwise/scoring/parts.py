"""Parts of the result: one Parquet file per shard, which exists only when the shard is complete."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from exitwise.core.errors import InputError
from exitwise.scoring.storage import Storage, is_damage

COLUMNS = ("id", "path", "label", "class", "confidence", "exit", "cost", "error", "bundle")
SET, ABSTAINED = "set", "abstained"  # columns of bundles with prediction sets and with an abstention
_METADATA = b"exitwise.score"


@dataclass(frozen=True)
class ShardCounts:
    """Counts of the rows of one shard or of several.

    Args:
        images: Number of rows.
        errors: Number of rows with an error.
        cost: Summed cost of the rows without an error.
        exits: Number of rows without an error at each exit.
        abstained: Number of rows from which the classifier abstains.
    """

    images: int = 0
    errors: int = 0
    cost: float = 0.0
    exits: Mapping[int, int] = field(default_factory=dict)
    abstained: int = 0

    def __add__(self, other: "ShardCounts") -> "ShardCounts":
        exits = Counter(self.exits) + Counter(other.exits)
        return ShardCounts(
            self.images + other.images,
            self.errors + other.errors,
            self.cost + other.cost,
            dict(sorted(exits.items())),
            self.abstained + other.abstained,
        )

    @property
    def answered(self) -> int:
        """Number of rows without an error."""
        return self.images - self.errors

    @property
    def mean_cost(self) -> float | None:
        """Mean cost of the rows without an error, None if there are none."""
        return self.cost / self.answered if self.answered else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        exits = {str(exit): count for exit, count in self.exits.items()}
        return {
            "images": self.images,
            "errors": self.errors,
            "cost": self.cost,
            "exits": exits,
            "abstained": self.abstained,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ShardCounts":
        """Make counts from the result of `to_dict`."""
        exits = {int(exit): int(count) for exit, count in data["exits"].items()}
        return cls(int(data["images"]), int(data["errors"]), float(data["cost"]), exits, int(data["abstained"]))


def columns_of(has_sets: bool, has_abstention: bool) -> list[str]:
    """Return the columns of the parts of a bundle."""
    return [*COLUMNS, *([SET] if has_sets else []), *([ABSTAINED] if has_abstention else [])]


def make_schema(columns: Sequence[str]) -> Any:
    """Return the Arrow schema of the parts."""
    import pyarrow as pa

    types = {
        "id": pa.string(),
        "path": pa.string(),
        "label": pa.string(),
        "class": pa.int32(),
        "confidence": pa.float64(),
        "exit": pa.int32(),
        "cost": pa.float64(),
        "error": pa.string(),
        "bundle": pa.dictionary(pa.int32(), pa.string()),
        SET: pa.list_(pa.int32()),
        ABSTAINED: pa.bool_(),
    }
    return pa.schema([pa.field(name, types[name], nullable=name not in ("id", "bundle")) for name in columns])


def part_path(folder: str, shard: int) -> str:
    """Return the path of the part of a shard."""
    return f"{folder}/part-{shard:08}.parquet"


def write_part(
    storage: Storage,
    path: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[Any]],
    job: str,
    counts: ShardCounts,
) -> None:
    """Write a part: with the same rows it has the same bytes.

    Args:
        storage: Where to write.
        path: The file.
        columns: Names of the columns.
        rows: Values of each column.
        job: Fingerprint of the job.
        counts: Counts of the rows, which are stored beside them.
    """
    import pyarrow as pa
    from pyarrow import parquet

    schema = make_schema(columns)
    arrays = [pa.array(rows[name], schema.field(name).type) for name in columns]
    metadata = {_METADATA: json.dumps({"job": job, "counts": counts.to_dict()})}
    table = pa.Table.from_arrays(arrays, schema=schema.with_metadata(metadata))
    data = BytesIO()
    parquet.write_table(table, data, compression="zstd")
    storage.write(path, data.getvalue())


def list_parts(storage: Storage, folder: str) -> list[int]:
    """Return the shards that are complete, in order."""
    if storage.stat(folder) is None:
        return []
    names = [entry.name for entry in storage.list_folder(folder) if not entry.is_folder]
    numbers = [name.removeprefix("part-").removesuffix(".parquet") for name in names if name.endswith(".parquet")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_counts(storage: Storage, path: str, job: str) -> ShardCounts:
    """Return the counts of a part; raise InputError if it is damaged or of another job."""
    import pyarrow as pa
    from pyarrow import parquet

    name = storage.name(path)
    try:
        with storage.open(path) as file:
            metadata = parquet.read_metadata(file)
        data = json.loads(metadata.metadata[_METADATA])
        counts = ShardCounts.from_dict(data["counts"])
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        if not is_damage(storage, error):
            raise
        raise InputError(f"{name} is damaged: delete it, and the same command scores its images again") from None
    if data.get("job") != job or counts.images != metadata.num_rows:
        raise InputError(f"{name} is of another job: delete it, and the same command scores its images again")
    return counts
