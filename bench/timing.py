"""Clocks on both sides of asynchronous work, and what samples come to.

A mark is put into the device's queue; the time between two marks is what the device took for the
work between them. On a CPU a mark is the moment itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from max.driver import Device, DeviceEvent

CHUNK = 32
"""Runs in a queue before they are waited for."""
REST = 0.3
"""Seconds between the turns of two engines on a CPU: MAX's threads spin for a while after a run."""


class Clock(Protocol):
    """Marks points in a device's queue."""

    def mark(self) -> Any:
        """Puts a mark behind what was enqueued."""

    def between(self, start: Any, end: Any) -> float:
        """The time from one mark to another, ms; both have been waited for."""

    def wait(self) -> None:
        """Waits for everything enqueued."""


class HostClock:
    """The clock of work that is done when its call returns."""

    def mark(self) -> float:
        """See ``Clock``."""
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        """See ``Clock``."""
        return (end - start) * 1e3

    def wait(self) -> None:
        """See ``Clock``; there is nothing to wait for."""


class MaxClock:
    """Events in the queue that MAX runs its graphs in."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def mark(self) -> DeviceEvent:
        """See ``Clock``."""
        event = DeviceEvent(self._device, enable_timing=True)
        self._device.default_queue.record_event(event)
        return event

    def between(self, start: DeviceEvent, end: DeviceEvent) -> float:
        """See ``Clock``."""
        return start.elapsed_time(end)

    def wait(self) -> None:
        """See ``Clock``."""
        self._device.synchronize()


class TorchClock:
    """Events in torch's current stream."""

    def mark(self) -> Any:
        """See ``Clock``."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """See ``Clock``."""
        return float(start.elapsed_time(end))

    def wait(self) -> None:
        """See ``Clock``."""
        import torch

        torch.cuda.synchronize()


def sample(
    clock: Clock,
    step: Callable[[], Any],
    seconds: float,
    before: Callable[[], Any] = lambda: None,
    runs: int | None = None,
) -> list[float]:
    """Times ``step`` for about ``seconds``, at least three times, or so many ``runs`` if given.

    ``before`` goes before each and is not in the time.

    Runs are enqueued back to back, at most ``CHUNK`` at a time, so that the device and not the
    host is what is timed. Each chunk begins with one run that is not counted: it hides the time
    in which the host gets ahead.
    """
    samples: list[float] = []
    end = time.perf_counter() + seconds
    chunk = 3 if runs is None else min(3, runs)

    def enough() -> bool:
        done = len(samples)
        return done >= 3 and time.perf_counter() >= end if runs is None else done >= runs

    while not enough():
        marks = []
        started = time.perf_counter()
        for _ in range(chunk + 1):
            before()
            first = clock.mark()
            step()
            marks.append((first, clock.mark()))
        clock.wait()
        samples += [clock.between(*pair) for pair in marks[1:]]
        each = (time.perf_counter() - started) / (chunk + 1)
        left = int((end - time.perf_counter()) / max(each, 1e-6))
        chunk = max(1, min(CHUNK, left if runs is None else runs - len(samples)))
    return samples


def rest() -> None:
    """Lets the threads of the engine before stop spinning, on a CPU."""
    time.sleep(REST)


def percentiles(samples: Iterable[float], points: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Gives percentiles of samples in ms, named as the records name them."""
    values = np.percentile(list(samples), points)
    return {f"p{p}_ms": round(float(v), 5) for p, v in zip(points, values, strict=True)}


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Gives the extremes, the mean and percentiles of samples in ms, and their number."""
    return {
        "runs": len(samples),
        "min_ms": round(min(samples), 5),
        "mean_ms": round(float(np.mean(samples)), 5),
        **percentiles(samples, (50, 90, 95, 99)),
        "max_ms": round(max(samples), 5),
    }


def rounded(value: float, digits: int = 4) -> float:
    """Rounds to significant digits."""
    return float(f"{value:.{digits}g}")
