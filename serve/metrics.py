"""What /metrics shows, for Prometheus.

Of several processes each counts in files of its own, in the folder PROMETHEUS_MULTIPROC_DIR, and
whichever is asked adds them up (prometheus_client.multiprocess); the figures of one that has ended
stay in the sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Summary,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15,
    0.25, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip


class Metrics:
    """The figures of one server, in a registry of their own.

    Args:
        model: What clients call the model.
        states: What can be read at any time: a function and a sentence for each name.
    """

    def __init__(self, model: str, states: dict[str, tuple[Callable[[], float], str]]) -> None:
        self.registry = CollectorRegistry()
        many = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if many:
            MultiProcessCollector(self.registry)
        self.registry.register(_States(states))
        self._all: dict[str, Any] = {
            "registry": None if many else self.registry,
            "namespace": "maxvision",
        }
        self.images = self._counter("images", "Images that were answered.", model)
        self.decode = self._seconds("decode", "Decoding and preprocessing of an image.", model)
        self.queue = self._seconds("queue", "An image's wait for its batch.", model)
        self.inference = self._seconds("inference", "A batch on the device, by image.", model)
        self.total = self._seconds("total", "A request from its body's end to its answer.", model)
        self.failed = Summary(
            "failed_seconds",
            "A request whose images were refused or failed.",
            ["model"],
            **self._all,
        ).labels(model)
        self.batches = self._counter("batches", "Batches that ran; an image is its share.", model)
        self.last = Gauge(
            "last_inference_timestamp_seconds",
            "When images were answered last, in seconds since 1970.",
            ["model"],
            multiprocess_mode="max",
            **self._all,
        ).labels(model)
        self.batch = Histogram(
            "batch_size",
            "Images that ran together with an image, itself included.",
            ["model"],
            buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256),
            **self._all,
        ).labels(model)
        self.rejected = Counter(
            "rejected", "Requests that were refused, by reason.", ["reason"], **self._all
        )
        self.requests = Counter(
            "requests", "Requests that were answered, by status.", ["status"], **self._all
        )

    def render(self) -> tuple[bytes, str]:
        """Makes the text of all figures, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def totals(self) -> dict[str, float]:
        """Reads counters, sums and states by name, such as ``queue_seconds_sum``."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if "le" not in sample.labels:  # a histogram's bucket
                    name = sample.name.removeprefix("maxvision_")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def _counter(self, name: str, text: str, model: str) -> Counter:
        return Counter(name, text, ["model"], **self._all).labels(model)

    def _seconds(self, name: str, text: str, model: str) -> Histogram:
        family = Histogram(f"{name}_seconds", text, ["model"], buckets=_SECONDS, **self._all)
        return family.labels(model)


class _States(Collector):
    """Reads what is, when it is asked for."""

    def __init__(self, states: dict[str, tuple[Callable[[], float], str]]) -> None:
        self._states = states

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Gives a gauge for each state."""
        for name, (read, text) in self._states.items():
            yield GaugeMetricFamily(f"maxvision_{name}", text, read())
