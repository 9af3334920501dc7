"""Traces on disk that actors collect, without a cluster: a stand-in runs the shards in this process."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch

import exitwise as ew
from exitwise.calibration import ray_collect, trace_folder
from exitwise.data import load
from exitwise.data.batches import Batches


class InProcess:
    """Stand-in for `DriverPool`: one actor, in this process."""

    shards_before_failure: int | None = None

    def __init__(self, ray: object, make_work: Callable[[], Callable[..., Any]], options: object) -> None:
        self._work = make_work()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, tasks: Iterable[Any], on_death: object, on_progress: object, ahead: int) -> Iterator[Any]:
        for number, task in enumerate(tasks):
            if number == self.shards_before_failure:
                raise KeyboardInterrupt
            yield task, self._work(task, lambda images: None)


@pytest.mark.parametrize("batch_size", [32, 48])
@pytest.mark.parametrize("failure", [None, 1, 3, 6])
def test_a_trace_on_disk_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int, failure: int | None
) -> None:
    """Also if it is interrupted, and stored samples end inside of a batch; curvature but for the order of sums."""
    monkeypatch.setattr(ray_collect, "DriverPool", InProcess)
    monkeypatch.setattr(ray_collect, "_SHARD_SAMPLES", {"val": 64, "test": 64, "train": 100})
    monkeypatch.setattr(trace_folder, "SHARD_ROWS", 70)
    images = next(part for part in load("digits", None) if part is not None)
    splits = {
        "val": images[torch.arange(150)],
        "test": images[torch.arange(150, 360)],
        "train": images[torch.arange(360, 610)],
    }
    torch.manual_seed(0)
    net = ew.models.msdnet("tiny-8")
    loaders = {name: Batches(images, batch_size) for name, images in splits.items()}
    expected = ew.collect(net, **loaders, out=tmp_path / "one")

    totals: dict[str, int] = {}

    def collect() -> ew.Trace:
        return ray_collect.collect_on_ray(
            None,
            net,
            lambda: ew.models.msdnet("tiny-8"),
            splits,
            batch_size,
            progress=lambda name, done, total: totals.update({name: done}),
            out=tmp_path / "many",
        )

    if failure is not None:
        monkeypatch.setattr(InProcess, "shards_before_failure", failure)
        with pytest.raises(KeyboardInterrupt):
            collect()
        monkeypatch.setattr(InProcess, "shards_before_failure", None)
        assert not (tmp_path / "many").exists()
    trace = collect()
    assert totals["train"] == 250
    for name in ("val", "test"):
        a, b = getattr(expected, name), getattr(trace, name)
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.index, b.index)
        for x, y in zip(a.features, b.features, strict=True):
            assert torch.equal(x[:], y[:])
    for a, b in zip(expected.curvature, trace.curvature, strict=True):
        torch.testing.assert_close(a.A, b.A, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(a.B, b.B, rtol=1e-10, atol=1e-10)


def test_other_samples_than_before_the_interruption_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_collect, "DriverPool", InProcess)
    monkeypatch.setattr(ray_collect, "_SHARD_SAMPLES", {"val": 64, "test": 64, "train": 100})
    monkeypatch.setattr(trace_folder, "SHARD_ROWS", 64)
    train = next(part for part in load("digits", None) if part is not None)
    torch.manual_seed(0)
    net = ew.models.msdnet("tiny-8")

    def collect(first: int) -> ew.Trace:
        splits = {"val": train[torch.arange(first, first + 300)]}
        build = lambda: ew.models.msdnet("tiny-8")  # noqa: E731
        return ray_collect.collect_on_ray(None, net, build, splits, 32, out=tmp_path / "trace")

    monkeypatch.setattr(InProcess, "shards_before_failure", 2)
    with pytest.raises(KeyboardInterrupt):
        collect(0)
    monkeypatch.setattr(InProcess, "shards_before_failure", None)
    with pytest.raises(ew.InputError, match="other samples"):
        collect(5)
