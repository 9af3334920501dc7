"""The simulated pipeline against cases that can be computed by hand."""

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from paths import ROOT


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import pipeline

    return pipeline


def test_one_worker_takes_the_sum_of_its_work(pipeline: ModuleType) -> None:
    work = pipeline.Work(images=1030, shard_size=100, bytes=10, decode=0.001, compute=0.004, commit=0.02)
    outcome = pipeline.simulate(work, pipeline.Cluster(machines=1, cores=1, dispatch=0.01, start_up=7))
    # Eleven shards, each dispatched and committed; the last has 30 images.
    assert outcome.seconds == pytest.approx(7 + 1030 * 0.005 + 11 * (0.01 + 0.02))
    assert outcome.bottleneck == "cores"


def test_workers_without_a_shared_resource_do_not_wait(pipeline: ModuleType) -> None:
    work = pipeline.Work(images=6400, shard_size=100, bytes=10, decode=0.001, compute=0.004)
    alone = pipeline.simulate(work, pipeline.Cluster(machines=1, cores=1)).seconds
    many = pipeline.simulate(work, pipeline.Cluster(machines=4, cores=8)).seconds
    assert alone / many == pytest.approx(32)


@pytest.mark.parametrize(
    ("limits", "bottleneck", "seconds"),
    [
        ({"link": 2e5}, "links", 10_000 * 1e3 / (4 * 2e5)),
        ({"storage": 5e5}, "storage", 10_000 * 1e3 / 5e5),
        ({"request_rate": 400}, "storage", 10_000 / 400),
        ({"dispatch": 0.3}, "driver", 100 * 0.3),
    ],
)
def test_the_scarcest_resource_decides(
    pipeline: ModuleType, limits: dict[str, float], bottleneck: str, seconds: float
) -> None:
    """Its busy time is a lower bound; what it takes to start and to end adds a few percent."""
    work = pipeline.Work(images=10_000, shard_size=100, bytes=1e3, decode=0.001, compute=0.004, requests=1)
    outcome = pipeline.simulate(work, pipeline.Cluster(machines=4, cores=8, **limits))
    assert outcome.bottleneck == bottleneck
    assert seconds <= outcome.seconds * (1 + 1e-9)
    assert outcome.seconds == pytest.approx(seconds, rel=0.1)
    assert outcome.busy[bottleneck] > 0.9


def test_reading_overlaps_with_computing(pipeline: ModuleType) -> None:
    """Only the first chunk of every shard is waited for, unless reading takes longer than computing."""
    work = pipeline.Work(images=1000, shard_size=100, bytes=100, decode=0, compute=0.01)
    fast = pipeline.simulate(work, pipeline.Cluster(machines=1, cores=1, link=2e4), chunks=10)
    assert fast.seconds == pytest.approx(10 + 10 * 10 * 100 / 2e4)
    slow = pipeline.simulate(work, pipeline.Cluster(machines=1, cores=1, link=5e3), chunks=10)
    assert slow.seconds == pytest.approx(1000 * 100 / 5e3 + 10 * 10 * 0.01)


def test_more_of_anything_is_never_slower(pipeline: ModuleType) -> None:
    work = pipeline.Work(5000, 50, bytes=1e3, decode=0.001, compute=0.004, requests=0.5, commit=0.01)
    cluster = pipeline.Cluster(2, 4, link=1e6, storage=2e6, request_rate=2000, latency=0.01, dispatch=0.002)
    before = pipeline.simulate(work, cluster).seconds
    for change in ({"machines": 4}, {"link": 2e6}, {"storage": 4e6}, {"request_rate": 4000}, {"parallel_reads": 8}):
        assert pipeline.simulate(work, replace(cluster, **change)).seconds <= before * (1 + 1e-9)


def test_uneven_shards_have_the_mean_that_was_asked_for(pipeline: ModuleType) -> None:
    work = pipeline.Work(images=200_000, shard_size=100, bytes=0, decode=0, compute=0.001, spread=0.5)
    seconds = pipeline.simulate(work, pipeline.Cluster(machines=1, cores=1)).seconds
    # 2,000 shards of standard deviation 0.5: the mean is within 0.5 / sqrt(2000) = 1.1 %, four times over.
    assert seconds == pytest.approx(200, rel=0.045)
    assert np.isfinite(seconds)
