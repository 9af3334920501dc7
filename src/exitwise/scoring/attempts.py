"""Record of the attempts at a shard, which finds images whose decoder ends the process.

A worker writes to the folder of the job that it begins a shard, and deletes the record when the part is there. If it
died twice, the next attempt is careful: it records each image before it decodes it. An image on which careful attempts
died twice gets a row with an error, and is not decoded again; once could be chance, because anyone may end a process.
The record is in the folder of the job, so that it serves workers on other machines and later commands, too.
"""

import json
import os
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from exitwise.scoring.storage import Storage

_NORMAL_ATTEMPTS, _DEATHS_OF_AN_IMAGE = 2, 2


@dataclass
class _Record:
    begun: int = 0
    suspects: dict[int, int] = field(default_factory=dict)  # deaths by position in the shard

    @property
    def poisonous(self) -> frozenset[int]:
        return frozenset(position for position, deaths in self.suspects.items() if deaths >= _DEATHS_OF_AN_IMAGE)


class Attempt:
    """One attempt at a shard, from its begin to its part.

    Attributes:
        is_careful: Whether `decoding` and `decoded` must be called for each image.
        poisonous: Positions of images that must not be decoded.
    """

    def __init__(self, storage: Storage, folder: str, shard: int) -> None:
        self._storage = storage
        self._record_path, self._marker_path = (f"{folder}/{shard:08}.{suffix}" for suffix in ("json", "image"))
        self._marker: int | None = None
        record = _read_record(storage, self._record_path)
        position = self._read_marker()
        if position is not None:
            record.suspects[position] = record.suspects.get(position, 0) + 1
        record.begun += 1
        data = {"begun": record.begun, "suspects": {str(key): deaths for key, deaths in record.suspects.items()}}
        storage.write(self._record_path, json.dumps(data).encode())
        self._storage.remove(self._marker_path)
        self.is_careful, self.poisonous = record.begun > _NORMAL_ATTEMPTS, record.poisonous

    def _read_marker(self) -> int | None:
        """Return the position of the image that the last attempt was decoding when it died, if it was careful."""
        if self._storage.stat(self._marker_path) is None:
            return None
        text = self._storage.read(self._marker_path).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None

    def decoding(self, position: int) -> None:
        """Record that the image at this position is decoded next."""
        self._mark(f"{position:<20}")

    def decoded(self) -> None:
        """Record that no image is being decoded."""
        self._mark(f"{'-':<20}")

    def _mark(self, text: str) -> None:
        if not self._storage.is_local:
            self._storage.write(self._marker_path, text.encode())
            return
        if self._marker is None:
            self._marker = os.open(self._marker_path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(self._marker, text.encode(), 0)  # the kernel keeps it when the process dies

    def finish(self) -> None:
        """Delete the record: the part is there."""
        self._close()
        self._storage.remove(self._marker_path)
        self._storage.remove(self._record_path)

    def _close(self) -> None:
        if self._marker is not None:
            os.close(self._marker)
            self._marker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _read_record(storage: Storage, path: str) -> _Record:
    if storage.stat(path) is None:
        return _Record()
    try:
        data = json.loads(storage.read(path))
        return _Record(int(data["begun"]), {int(key): int(deaths) for key, deaths in data["suspects"].items()})
    except (AttributeError, KeyError, TypeError, ValueError):  # damaged: begin to count again
        return _Record()


class DeathCounter:
    """Deaths of the workers of each shard that no image explains.

    Args:
        storage: The storage of the job.
        folder: The folder of the attempts.
        limit: Deaths of workers on one shard after which a job must stop.
    """

    def __init__(self, storage: Storage, folder: str, limit: int = 6) -> None:
        self._storage, self._folder, self._limit = storage, folder, limit
        self._deaths: dict[int, int] = {}
        self._explained: dict[int, int] = {}

    def add(self, shard: int) -> bool:
        """Count a death; return False if the shard must not be tried again."""
        poisonous = len(_read_record(self._storage, f"{self._folder}/{shard:08}.json").poisonous)
        if poisonous > self._explained.get(shard, 0):
            self._explained[shard], self._deaths[shard] = poisonous, 0
        self._deaths[shard] = self._deaths.get(shard, 0) + 1
        return self._deaths[shard] < self._limit
