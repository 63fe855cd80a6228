"""What /metrics shows, for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15,
    0.25, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip


class Metrics:
    """The figures of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._all: dict[str, Any] = {"registry": self.registry, "namespace": "maxvision"}
        self.images = self._counter("images", "Images that were answered.").labels(model)
        self.decode = self._seconds("decode", "Decoding and preprocessing of an image.", model)
        self.queue = self._seconds("queue", "An image's wait for its batch.", model)
        self.inference = self._seconds("inference", "A batch on the device, by image.", model)
        self.total = self._seconds("total", "A request from its body's end to its answer.", model)
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
        self.in_flight = self._gauge("images_in_flight", "Images under way.")
        self.ready = self._gauge("ready", "1 if a picture would be classified.")
        self.batch_limit = self._gauge("batch_limit", "Images that run together at most.")
        self.starts = self._gauge("worker_starts", "Starts of the model's process.")

    def render(self) -> tuple[bytes, str]:
        """Makes the text of all figures, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model"], **self._all)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, **self._all)

    def _seconds(self, name: str, text: str, model: str) -> Histogram:
        family = Histogram(f"{name}_seconds", text, ["model"], buckets=_SECONDS, **self._all)
        return family.labels(model)
