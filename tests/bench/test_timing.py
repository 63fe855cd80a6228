"""Samples and what they come to, by a device that only counts."""

from __future__ import annotations

import pytest

from maxvision.bench.timing import CHUNK, HostClock, percentiles, rounded, sample, summary


class Queue:
    """A device: work is done when it is waited for, each piece takes the next of ``times``."""

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.now = 0.0
        self.done = True

    def mark(self) -> float:
        return self.now

    def between(self, start: float, end: float) -> float:
        assert self.done, "a mark may be read only after it was waited for"
        return end - start

    def wait(self) -> None:
        self.done = True

    def work(self) -> None:
        self.done = False
        self.now += self.times.pop(0) if self.times else 1.0


def test_percentiles() -> None:
    assert percentiles(range(101)) == {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}


def test_one_run_of_a_chunk_is_not_counted_and_nor_is_what_comes_before_each() -> None:
    queue = Queue([100, 1, 1, 1])
    moved = []

    def feed() -> None:
        queue.now += 1000
        moved.append(queue.now)

    assert set(sample(queue, queue.work, 0, feed)) == {1}
    assert len(moved) == 4


def test_a_step_longer_than_its_time_is_sampled_three_times() -> None:
    steps = []
    assert len(sample(HostClock(), lambda: steps.append(1), 0)) == 3 == len(steps) - 1


@pytest.mark.parametrize("runs", [1, 3, CHUNK, 2 * CHUNK + 5])
def test_runs_may_be_counted_instead(runs: int) -> None:
    assert len(sample(HostClock(), lambda: None, 0, runs=runs)) == runs


def test_a_summary_is_of_individual_runs() -> None:
    assert summary([float(x) for x in range(101)]) == {
        "runs": 101, "min_ms": 0, "mean_ms": 50, "p50_ms": 50, "p90_ms": 90, "p95_ms": 95,
        "p99_ms": 99, "max_ms": 100,
    }  # fmt: skip


@pytest.mark.parametrize(("value", "said"), [(123456.0, 123500.0), (0.00012345, 0.0001234)])
def test_rounded_keeps_digits_that_mean_something(value: float, said: float) -> None:
    assert rounded(value) == said
