"""What /metrics shows, for Prometheus.

Of several processes each counts in files of its own, in the folder PROMETHEUS_MULTIPROC_DIR, and
whichever is asked adds them up (prometheus_client.multiprocess); the figures of one that has ended
stay in the sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

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


States: TypeAlias = "dict[str, tuple[Callable[[], float], str]]"
"""What can be read of a model at any time: a function and a sentence for each name."""


class Metrics:
    """The figures of a server, in a registry of their own; ``of`` has those of a model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        many = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if many:
            MultiProcessCollector(self.registry)
        self._states = _States()
        self.registry.register(self._states)
        self._all: dict[str, Any] = {
            "registry": None if many else self.registry,
            "namespace": "maxvision",
        }
        self._images = self._counter("images", "Images that were answered.")
        self._decode = self._seconds("decode", "Decoding and preprocessing of an image.")
        self._queue = self._seconds("queue", "An image's wait for its batch.")
        self._inference = self._seconds("inference", "A batch on the device, by image.")
        self._total = self._seconds("total", "A request from its body's end to its answer.")
        self._failed = Summary(
            "failed_seconds",
            "A request whose images were refused or failed.",
            ["model"],
            **self._all,
        )
        self._batches = self._counter("batches", "Batches that ran; an image is its share.")
        self._last = Gauge(
            "last_inference_timestamp_seconds",
            "When images were answered last, in seconds since 1970.",
            ["model"],
            multiprocess_mode="max",
            **self._all,
        )
        self._batch = Histogram(
            "batch_size",
            "Images that ran together with an image, itself included.",
            ["model"],
            buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256),
            **self._all,
        )
        self.rejected = Counter(
            "rejected", "Requests that were refused, by reason.", ["reason"], **self._all
        )
        self.requests = Counter(
            "requests", "Requests that were answered, by status.", ["status"], **self._all
        )

    def of(self, model: str, states: States) -> ModelMetrics:
        """Gives the figures of a model, by what clients call it."""
        self._states.add(model, states)
        return ModelMetrics(
            images=self._images.labels(model),
            decode=self._decode.labels(model),
            queue=self._queue.labels(model),
            inference=self._inference.labels(model),
            total=self._total.labels(model),
            failed=self._failed.labels(model),
            batches=self._batches.labels(model),
            last=self._last.labels(model),
            batch=self._batch.labels(model),
        )

    def render(self) -> tuple[bytes, str]:
        """Makes the text of all figures, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def totals(self, model: str) -> dict[str, float]:
        """Reads a model's counters, sums and states by name, such as ``queue_seconds_sum``."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.labels.get("model") == model and "le" not in sample.labels:  # no bucket
                    name = sample.name.removeprefix("maxvision_")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model"], **self._all)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"{name}_seconds", text, ["model"], buckets=_SECONDS, **self._all)


@dataclass(frozen=True)
class ModelMetrics:
    """The figures of a model, each of which ``Metrics`` describes."""

    images: Counter
    decode: Histogram
    queue: Histogram
    inference: Histogram
    total: Histogram
    failed: Summary
    batches: Counter
    last: Gauge
    batch: Histogram


class _States(Collector):
    """Reads what is, when it is asked for."""

    def __init__(self) -> None:
        self._all: dict[str, dict[str, tuple[Callable[[], float], str]]] = {}

    def add(self, model: str, states: States) -> None:
        """Adds those of a model."""
        for name, state in states.items():
            self._all.setdefault(name, {})[model] = state

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Gives a gauge for each state."""
        for name, models in self._all.items():
            (_, text), *_ = models.values()
            family = GaugeMetricFamily(f"maxvision_{name}", text, labels=["model"])
            for model, (read, _) in models.items():
                family.add_metric([model], read())
            yield family
