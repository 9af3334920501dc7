"""Metrics of a replica on the metrics port of its node, where Prometheus finds those of everything on Ray."""

import threading
import time
from typing import Any

from exitwise.serving.service import Service

_PERIOD = 5.0  # seconds


class MetricsExporter:
    """Copies the metrics of a service to Ray, which adds the name of the replica and the prefix `ray_`.

    Counters and histograms are exported as gauges with the same names and values as at /metrics: Ray's own types would
    add another suffix to the names, and Prometheus computes rates of either.

    Args:
        service: The service of this replica.
        gauge: Class of the gauges: `ray.serve.metrics.Gauge`.
    """

    def __init__(self, service: Service, gauge: Any) -> None:
        self._service, self._gauge = service, gauge
        self._gauges: dict[str, Any] = {}

    def start(self) -> None:
        """Export every few seconds until the process ends."""
        threading.Thread(target=self._run, name="exitwise-metrics", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.export()
            time.sleep(_PERIOD)

    def export(self) -> None:
        """Set the gauges to the current values."""
        self._service.update_metrics()
        for name, labels, value in self._service.metrics.samples():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, description=name, tag_keys=tuple(labels))
            self._gauges[name].set(value, tags=labels)
