"""Collect a trace on a Ray cluster: actors run the net over shards of the splits.

Shards are cut at multiples of the batch size, so that batches are those of one process, and features are the same bit
for bit on machines of one kind with one thread. Curvature sums of shards are added in the order of the shards.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exitwise import models
from exitwise.calibration.collect import collect_curvature, collect_split, copy_last_layer, inference_mode
from exitwise.calibration.collect_on_disk import other_samples
from exitwise.calibration.laplace import Curvature, CurvatureSum
from exitwise.calibration.trace import Split, Trace, pack_layers, pack_metadata
from exitwise.calibration.trace_folder import TraceFolderWriter, digest_tensors
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.nested import first_sample
from exitwise.core.ray_actors import ActorOptions, Work
from exitwise.core.ray_driver import DriverPool, RayDriver
from exitwise.data.batches import Batches
from exitwise.data.images import ImageDataset
from exitwise.models.input_batches import Progress
from exitwise.models.macs import macs
from exitwise.models.net import MultiExitNet

# Samples of a shard. Those of train are larger, because each shard of it returns K matrices A and B.
_SHARD_SAMPLES: Mapping[str, int] = {"val": 1024, "test": 1024, "train": 4096}
_MAX_DEATHS = 4  # of actors on one shard
_SHARDS_AHEAD = 8  # that may be finished before the first that is not, and wait in memory; at least two per actor


@dataclass(frozen=True, eq=False)
class _Shard:
    """Consecutive samples of a split; images in memory are sent along, image files by their names."""

    split: str
    start: int
    images: ImageDataset


@dataclass(frozen=True, eq=False)
class _MakeCollector:
    """Builds the net in an actor and returns the function that runs it over a shard."""

    build: Callable[[], MultiExitNet]
    weights: Mapping[str, Tensor]
    batch_size: int
    on_gpu: bool

    def __call__(self) -> Work:
        torch.set_num_threads(1)
        net = self.build()
        net.load_state_dict({name: tensor.clone() for name, tensor in self.weights.items()})
        if self.on_gpu:
            net.cuda()

        def collect_shard(shard: _Shard, report: Callable[[int], None]) -> Split | tuple[Curvature, ...]:
            def progress(name: str, done: int, total: int | None) -> None:
                report(done)

            batches = Batches(shard.images, self.batch_size)
            with inference_mode(net):
                if shard.split == "train":
                    return collect_curvature(net, batches, CurvatureSum, progress, shard.start)
                return collect_split(net, batches, shard.split, progress, start=shard.start)

        return collect_shard


def collect_on_ray(
    driver: RayDriver,
    net: MultiExitNet,
    build: Callable[[], MultiExitNet],
    splits: Mapping[str, ImageDataset | None],
    batch_size: int,
    *,
    classes: Sequence[str] | None = None,
    actors: int | None = None,
    on_gpu: bool = False,
    progress: Progress | None = None,
    out: Path | None = None,
    dtype: torch.dtype = torch.float32,
    force: bool = False,
) -> Trace:
    """Run the net over every split on the actors of a cluster and collect what calibration needs.

    Args:
        driver: A process that is connected to the cluster.
        net: The net with its weights.
        build: Returns the net without its weights, in an actor; what it imports is installed on every node.
        splits: The images of "val", and of "test" and "train" if there are any; image files are seen by every node.
        batch_size: Images per batch.
        classes: Names (c,) of the classes.
        actors: Number of actors [default: one for every CPU, or GPU, of the cluster].
        on_gpu: Whether every actor has a GPU.
        progress: Called after every shard with the name of the split, the number of samples done, and their number.
        out: Folder for the trace, to which shards are written in their order; None holds it in memory. After an
            interruption, features that are there are kept; the sums of train begin anew.
        dtype: Type of the features in `out`.
        force: Replace a trace that is in `out`.

    Returns:
        The trace, as `collect` returns it.

    Raises:
        InputError: An actor raised it, actors died again and again, or the cluster ended.
    """
    given = {name: images for name, images in splits.items() if images is not None}
    for name, images in given.items():
        if not len(images):
            raise InputError(f"`{name}` gave no samples")
    costs = _count_costs(net, given["val"])  # fails early on unsupported modules
    weights = net.cpu().state_dict()
    make_collector = _MakeCollector(build, weights, batch_size, on_gpu)
    counter = _ShardCounter({name: len(images) for name, images in given.items()}, progress)
    heads = tuple(copy_last_layer(head.last) for head in net.exits)
    names = tuple(classes) if classes is not None else None
    budget_range = models.budget_range(net.spec)

    def run_shards(starts: Mapping[str, int]) -> Iterator[tuple[_Shard, Any]]:
        with DriverPool(driver, make_collector, ActorOptions(actors, num_gpus=int(on_gpu))) as pool:
            shards = _cut(given, batch_size, starts)
            for shard, result in pool.run(shards, counter.count_death, counter.count_images, _SHARDS_AHEAD):
                yield shard, result
                counter.count_images(shard, len(shard.images))

    curvature: tuple[Curvature, ...] = ()
    if out is not None:
        source = digest_tensors(weights, "sum", None, names)  # as in `collect`, which may continue what this began
        widths = [head.weight.shape[1] for head in heads]
        with TraceFolderWriter(out, widths, dtype, source, force) as writer:
            stored = {name: _check_stored(writer, name, given[name]) for name in given if name != "train"}
            counter.skip(stored)
            for shard, result in run_shards(stored):
                if shard.split == "train":
                    curvature = _add(curvature, result)
                else:
                    _append(writer, shard, result)
            for name in stored:
                writer.close_split(name)
            writer.finish(pack_layers(heads, curvature, costs), pack_metadata(names, net.spec, budget_range, costs))
        return Trace.load(out)
    parts: dict[str, list[Split]] = {name: [] for name in given if name != "train"}
    for shard, result in run_shards({}):
        if shard.split == "train":
            curvature = _add(curvature, result)
        else:
            parts[shard.split].append(result)
    joined = {name: _join(parts.pop(name)) for name in list(parts)}
    return Trace(
        val=joined["val"],
        test=joined.get("test"),
        heads=heads,
        curvature=curvature,
        costs=costs,
        classes=names,
        model=net.spec,
        budget_range=budget_range,
    )


def _check_stored(writer: TraceFolderWriter, name: str, images: ImageDataset) -> int:
    """Return the number of samples of a split that are in complete shards, which must be those of `images`."""
    labels, index = writer.read_labels(name)
    stored = len(labels)
    is_same = torch.equal(labels, images.labels[:stored])
    if not is_same or (index is not None and not torch.equal(index, images.index[:stored])):
        raise other_samples(writer, name)
    return stored


def _append(writer: TraceFolderWriter, shard: _Shard, split: Split) -> None:
    """Append the samples of a shard that are not stored yet: shards begin with a batch, stored samples end anywhere."""
    known = max(0, writer.num_rows(shard.split) - shard.start)
    index = None if split.index is None else split.index[known:]
    writer.append(shard.split, [x[known:] for x in split.features], split.labels[known:], index)


def _cut(splits: Mapping[str, ImageDataset], batch_size: int, stored: Mapping[str, int]) -> Iterator[_Shard]:
    """Yield the shards of val, test and train, in order, from the batch with the first sample that is not stored."""
    for name, samples in _SHARD_SAMPLES.items():
        if name not in splits:
            continue
        size = max(1, samples // batch_size) * batch_size
        images = splits[name]
        first = stored.get(name, 0)
        if first == len(images):
            continue
        for start in range(first // batch_size * batch_size, len(images), size):
            yield _Shard(name, start, images[torch.arange(start, min(start + size, len(images)))])


class _ShardCounter:
    """Counts images that are done, for the progress, and actors that died on a shard."""

    def __init__(self, totals: Mapping[str, int], progress: Progress | None) -> None:
        self._totals, self._progress = totals, progress
        self._done: dict[str, dict[int, int]] = {name: {} for name in totals}
        self._deaths: Counter[tuple[str, int]] = Counter()

    def skip(self, stored: Mapping[str, int]) -> None:
        """Count samples of the splits that need not be collected."""
        for name, samples in stored.items():
            self._done[name][-1] = samples

    def count_images(self, shard: _Shard, images: int) -> None:
        done = self._done[shard.split]
        done[shard.start] = max(images, done.get(shard.start, 0))
        if self._progress:
            self._progress(shard.split, min(sum(done.values()), self._totals[shard.split]), self._totals[shard.split])

    def count_death(self, shard: _Shard, reason: str) -> None:
        """Raise InputError if an actor died too often on one shard."""
        self._deaths[shard.split, shard.start] += 1
        deaths, last = self._deaths[shard.split, shard.start], shard.start + len(shard.images) - 1
        if deaths >= _MAX_DEATHS:
            raise InputError(
                f"a Ray actor died {deaths} times on samples {shard.start} to {last} of `{shard.split}` ({reason})"
            )


def _count_costs(net: MultiExitNet, images: ImageDataset) -> Costs:
    inputs, *_ = next(iter(Batches(images, 1)))
    with inference_mode(net):
        return Costs.of(macs(net, example_inputs=first_sample(inputs)))


def _add(sums: tuple[Curvature, ...], shard: tuple[Curvature, ...]) -> tuple[Curvature, ...]:
    if not sums:
        return shard
    return tuple(Curvature(a.A + b.A, a.B + b.B, a.n + b.n) for a, b in zip(sums, shard, strict=True))


def _join(parts: list[Split]) -> Split:
    index = [part.index for part in parts if part.index is not None]
    return Split(
        features=tuple(torch.cat(batches) for batches in zip(*(part.features for part in parts), strict=True)),
        labels=torch.cat([part.labels for part in parts]),
        index=torch.cat(index) if index else None,
    )
