"""Metrics of a service for Prometheus, in a registry of their own."""

from collections.abc import Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from exitwise.policies.family import FamilyMember
from exitwise.serving.recent import RecentLoad
from exitwise.serving.scheduler import BatchRecord

_LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CLASSIFYING = ("classify", "infer")  # endpoints whose requests the recent load counts
_REJECTED = (503, 504)
REASONS = ("overload", "shutdown", "deadline", "disconnected", "unauthorized", "forbidden", "too_large", "invalid")


class Metrics:
    """Counters, gauges and histograms; event loop and compute threads may call it.

    `recent` has those of the last minutes for the page: requests that classify, but not those that explain.

    Example:
        >>> from exitwise.serving.metrics import Metrics
        >>> metrics = Metrics()
        >>> metrics.reject("overload")
        >>> "exitwise_rejected_total" in metrics.render().decode()
        True
    """

    def __init__(self) -> None:
        self.recent = RecentLoad()
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("exitwise_requests", "Requests.", ["endpoint", "status"], registry=registry)
        self._seconds = Histogram(
            "exitwise_request_seconds", "Latency of requests.", ["endpoint"], buckets=_LATENCIES, registry=registry
        )
        self._images = Counter("exitwise_images", "Images that were answered.", registry=registry)
        self._image_errors = Counter("exitwise_image_errors", "Images that failed in the net.", registry=registry)
        self._stage_seconds = Histogram(
            "exitwise_stage_seconds", "Time of a batch in a stage.", ["stage"], buckets=_LATENCIES, registry=registry
        )
        self._batch_size = Histogram(
            "exitwise_batch_size", "Samples of a batch.", ["stage"], buckets=_SIZES, registry=registry
        )
        self._exits = Counter("exitwise_exits", "Images that exited, by exit.", ["exit"], registry=registry)
        self._confidence = Counter(
            "exitwise_confidence_sum", "Sum of confidences: divide by exitwise_images_total.", registry=registry
        )
        self._rejected = Counter("exitwise_rejected", "Requests without an answer.", ["reason"], registry=registry)
        self._reloads = Counter("exitwise_reloads", "Reloads of the bundle.", ["result"], registry=registry)
        self._policy = Gauge("exitwise_policy_index", "Policy of the family in use, from 0.", registry=registry)
        self._budget = Gauge("exitwise_budget", "Budget in use, in the unit of the bundle.", registry=registry)
        self._queues = _QueueLengths()
        registry.register(self._queues)
        for reason in REASONS:
            self._rejected.labels(reason)
        # To find the series of labels takes longer than to count.
        self._by_endpoint = cache(
            lambda endpoint, status: (self._requests.labels(endpoint, str(status)), self._seconds.labels(endpoint))
        )
        self._by_stage = cache(
            lambda stage: (
                self._stage_seconds.labels(str(stage)),
                self._batch_size.labels(str(stage)),
                self._exits.labels(str(stage)),
            )
        )

    def count_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        requests, latencies = self._by_endpoint(endpoint, status)
        requests.inc()
        latencies.observe(seconds)
        if endpoint in _CLASSIFYING and status == 200:
            self.recent.add_answer(seconds)
        elif endpoint in _CLASSIFYING and status in _REJECTED:
            self.recent.add_rejected()

    def reject(self, reason: str) -> None:
        """Count a request without an answer."""
        self._rejected.labels(reason).inc()

    def count_reload(self, succeeded: bool) -> None:
        """Count a reload of the bundle."""
        self._reloads.labels("ok" if succeeded else "refused").inc()

    def add_batch(self, batch: BatchRecord) -> None:
        """Count a batch and the images that exited after it."""
        seconds, sizes, exits = self._by_stage(batch.stage)
        seconds.observe(batch.seconds)
        sizes.observe(batch.size)
        if batch.errors:
            self._image_errors.inc(batch.errors)
        if len(batch.exited):
            self._images.inc(len(batch.exited))
            exits.inc(len(batch.exited))
            self.recent.add_exits(batch.stage, len(batch.exited))
            self._confidence.inc(float(batch.exited.max(axis=1).sum()))

    def set_state(self, queue_lengths: list[int], index: int, member: FamilyMember) -> None:
        """Record queue lengths and the policy in use."""
        self._queues.lengths = queue_lengths
        self.recent.set_policy(index)
        self._policy.set(index)
        self._budget.set(member.budget)

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield name, labels and value of all values of ours, without those of the process."""
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.startswith("exitwise_") and not sample.name.endswith("_created"):
                    yield sample.name, sample.labels, sample.value

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


class _QueueLengths(Collector):
    """Queue lengths, as they are when the metrics are read."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def collect(self) -> list[GaugeMetricFamily]:
        family = GaugeMetricFamily("exitwise_queue_length", "Samples that wait for a stage.", labels=["stage"])
        for stage, length in enumerate(self.lengths):
            family.add_metric([str(stage)], length)
        return [family]
