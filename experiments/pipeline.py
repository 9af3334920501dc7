"""Discrete-event simulation of a scoring job: a driver, storage, network links and workers.

Each worker asks the driver for a shard, reads it in chunks, decodes and classifies them, and commits a part. Storage,
links and the driver serve requests in the order in which they come; a worker reads the next chunk while it computes.
"""

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Work:
    """What is to be done: means per image, in bytes and in seconds of one core."""

    images: int
    shard_size: int
    bytes: float
    decode: float
    compute: float
    requests: float = 0.0  # read requests per image: 1 for single objects, nearly 0 for tar shards
    commit: float = 0.0  # seconds per shard to write and rename its part
    spread: float = 0.0  # standard deviation of the time of a shard, relative to its mean


@dataclass(frozen=True)
class Cluster:
    """What there is to do it with."""

    machines: int
    cores: int
    link: float = np.inf  # bytes per second and machine
    storage: float = np.inf  # bytes per second of the storage
    request_rate: float = np.inf  # requests per second of the storage
    latency: float = 0.0  # seconds per request
    parallel_reads: int = 1  # requests of one worker at a time
    dispatch: float = 0.0  # seconds of the driver per shard
    start_up: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Duration in seconds, and the share of it that each resource was busy, by name."""

    seconds: float
    busy: dict[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


class Queue:
    """A resource that serves one request at a time, in their order."""

    def __init__(self) -> None:
        self.free, self.busy = 0.0, 0.0

    def serve(self, start: float, seconds: float) -> float:
        """When a request is done that comes at `start` and takes `seconds`."""
        self.free = max(self.free, start) + seconds
        self.busy += seconds
        return self.free


def simulate(work: Work, cluster: Cluster, chunks: int = 8, seed: int = 0) -> Outcome:
    """Run the job; `chunks` is the number of parts in which a shard is read."""
    random = np.random.default_rng(seed)
    shards = int(np.ceil(work.images / work.shard_size))
    sizes = np.full(shards, work.shard_size, dtype=float)
    sizes[-1] = work.images - work.shard_size * (shards - 1)
    sigma = np.sqrt(np.log1p(work.spread**2))
    pace = np.exp(sigma * random.standard_normal(shards) - sigma**2 / 2) if work.spread else np.ones(shards)

    driver, storage = Queue(), Queue()
    links = [Queue() for _ in range(cluster.machines)]
    workers = cluster.machines * cluster.cores
    cores_busy, next_shard, end = 0.0, 0, 0.0
    # One event per worker: it is idle (chunk == chunks), or computes a chunk of `shard` from `time` on.
    events = [(cluster.start_up, worker, -1, chunks) for worker in range(workers)]
    heapq.heapify(events)

    def read(start: float, worker: int, shard: int) -> float:
        """When a chunk is there that is asked for at `start`."""
        images = sizes[shard] / chunks
        in_storage = max(images * work.bytes / cluster.storage, images * work.requests / cluster.request_rate)
        served = storage.serve(start, in_storage)
        carried = links[worker // cluster.cores].serve(start, images * work.bytes / cluster.link)
        return max(served, carried) + images * work.requests * cluster.latency / cluster.parallel_reads

    while events:
        time, worker, shard, chunk = heapq.heappop(events)
        if chunk == chunks:  # idle
            if next_shard == shards:
                end = max(end, time)
                continue
            shard, next_shard = next_shard, next_shard + 1
            granted = driver.serve(time, cluster.dispatch)
            heapq.heappush(events, (read(granted, worker, shard), worker, shard, 0))
            continue
        following = read(time, worker, shard) if chunk + 1 < chunks else 0.0
        seconds = sizes[shard] / chunks * (work.decode + work.compute) * pace[shard]
        seconds += work.commit if chunk + 1 == chunks else 0.0
        cores_busy += seconds
        heapq.heappush(events, (max(time + seconds, following), worker, shard, chunk + 1))
    elapsed = end - cluster.start_up
    return Outcome(
        end,
        {
            "cores": cores_busy / workers / elapsed,
            "links": max(link.busy for link in links) / elapsed,
            "storage": storage.busy / elapsed,
            "driver": driver.busy / elapsed,
        },
    )
