"""The pipeline: order, errors, what overlaps, how much is in memory, and what a stop leaves."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maxvision.common.errors import ImageError
from maxvision.runtime import pipeline
from maxvision.runtime.pipeline import Item, Pipeline, Times
from maxvision.runtime.reading import Reader


@dataclass
class Fake:
    """Stands in for a model: the source of an image is its number, and so is its only logit."""

    batch_size: int = 4
    device: str = "cpu"
    dtype: str = "float32"
    name: str = "fake"
    reading: Callable[[int], None] = lambda _: None
    running: Callable[[np.ndarray], None] = lambda _: None
    batches: list[int] = field(default_factory=list)

    by_vectors: bool = False
    decoder: Any = None
    preprocess: Any = None

    def resize_by_vectors(self) -> None:
        self.by_vectors = True

    def read(self, source: int) -> np.ndarray:
        self.reading(source)
        if source % 7 == 3:
            raise ImageError(f"{source}: damaged")
        return np.full((2, 2, 3), source, np.uint8)

    def run(self, pictures: list[np.ndarray], sources: list[int]) -> list[Any]:
        assert [int(each[0, 0, 0]) for each in pictures] == [each % 256 for each in sources]
        self.batches.append(len(pictures))
        pixels = np.stack(pictures)
        self.running(pixels)
        return list(pixels[:, 0, 0, :1].astype(np.float32))

    def predictions(self, logits: np.ndarray, top_k: int) -> list[list[Any]]:
        return [[SimpleNamespace(score=float(row[0]))] * top_k for row in logits]


def items(count: int, first: int = 0) -> list[Item]:
    return [Item(str(i), i) for i in range(first, first + count)]  # type: ignore[arg-type]


def answers(using: Pipeline, some: Iterable[Item]) -> list[Any]:
    return [each for batch in using.answers(some, 1, Times()) for each in batch]


def answered(model: Any, count: int, workers: int | None = None) -> list[Any]:
    with Pipeline(model, count, workers) as using:
        return answers(using, items(count))


def names(first: int, count: int) -> list[str]:
    return [str(i) for i in range(first, first + count)]


@pytest.mark.parametrize("workers", [None, 1, 3, 50])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 103])
def test_answers_are_in_order_and_errors_in_their_place(count: int, workers: int | None) -> None:
    done = answered(Fake(), count, workers)
    assert [each.name for each in done] == names(0, count)
    for i, each in enumerate(done):
        if i % 7 == 3:
            assert each.error == f"{i}: damaged" and each.logits is None
        else:
            assert each.error is None and each.predictions[0].score == each.logits[0] == i


def test_many_images_are_resized_by_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MANY", 7)
    for count in (6, 7):
        model = Fake()
        answered(model, count)
        assert model.by_vectors == (count == 7)


def test_batches_that_hold_nothing_readable_do_not_run() -> None:
    model: Any = Fake(batch_size=1)
    assert len(answered(model, 14)) == 14
    assert model.batches == [1] * 12


def test_times_are_added_up() -> None:
    times, model = Times(), Fake()
    fake: Any = model
    with Pipeline(fake, 10) as using:
        list(using.answers(items(10), 1, times))
    assert times.images == 9 and [n for n, _ in times.runs] == model.batches == [3, 4, 2]
    assert times.preprocessing > 0 and times.last is not None and len(times.last[0]) == 2


def test_decoding_goes_on_while_the_model_runs() -> None:
    later = threading.Event()

    def reading(source: int) -> None:
        if source == 8:
            later.set()

    def running(pixels: np.ndarray) -> None:
        assert later.wait(10), "the third batch was not begun while the first one ran"

    assert len(answered(Fake(reading=reading, running=running), 40, workers=1)) == 40


def test_the_model_runs_while_answers_are_written() -> None:
    begun = threading.Semaphore(0)
    model: Any = Fake(running=lambda _: begun.release())
    with Pipeline(model, 12) as using, closing(using.answers(items(12), 1, Times())) as batches:
        next(batches)
        for _ in range(3):
            assert begun.acquire(timeout=10), "the batches after the first one wait for it"


@pytest.mark.parametrize("slow", ["decoding", "model", "writing"])
def test_few_images_are_in_memory(slow: str) -> None:
    begun, most, gate = 0, 0, threading.Lock()

    def reading(_: int) -> None:
        nonlocal begun
        with gate:
            begun += 1

    def spin(*_: Any) -> None:
        for _ in range(20_000):
            pass

    model: Any = Fake(reading=reading, running=spin if slow == "model" else lambda _: None)
    done = taken = 0

    def given() -> Iterator[Item]:
        nonlocal taken
        for item in items(200):
            taken += 1
            yield item

    with Pipeline(model, 200, workers=4) as using:
        for batch in using.answers(given(), 1, Times()):
            if slow == "writing":
                spin()
            most = max(most, begun - done, taken - done)
            done += len(batch)
    assert done == begun == 200
    assert most <= 2 * 4 + 4 + 3 * 4, "two batches and the threads ahead, three in the model"


def test_a_stop_leaves_nothing_running() -> None:
    read: list[int] = []
    model: Any = Fake(reading=read.append)
    with Pipeline(model, 10_000, workers=2) as using:
        next(using.answers(items(10_000), 1, Times()))
    for thread in threading.enumerate():
        if thread.name.startswith(("decode", "model")):
            thread.join(10)
    assert len(read) <= 30


def test_calls_share_threads() -> None:
    seen: set[str] = set()

    def reading(_: int) -> None:
        seen.add(threading.current_thread().name)

    model: Any = Fake(reading=reading)
    with Pipeline(model, 80, workers=2) as using:
        for first in (0, 40):
            assert [each.name for each in answers(using, items(40, first))] == names(first, 40)
    assert len(seen) <= 2


def test_calls_of_several_threads_are_told_apart() -> None:
    model: Any = Fake()
    with Pipeline(model, 240) as using, ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(answers, using, items(30, at)) for at in range(0, 240, 30)]
        for i, call in enumerate(calls):
            assert [each.name for each in call.result()] == names(30 * i, 30)


def test_the_next_call_reads_while_the_last_batches_run() -> None:
    later = threading.Event()

    def reading(source: int) -> None:
        if source == 100:
            later.set()

    def running(pixels: np.ndarray) -> None:
        if pixels[0, 0, 0, 0] == 8:
            assert later.wait(10), "the next call waits for the end of the one before"

    model: Any = Fake(reading=reading, running=running)
    with Pipeline(model, 120) as using, ThreadPoolExecutor(2) as callers:
        begun = callers.submit(answers, using, items(10))
        assert len(answers(using, items(20, 100))) == 20 and len(begun.result()) == 10


def test_the_next_call_waits_until_the_model_has_all() -> None:
    early = threading.Event()

    def reading(source: int) -> None:
        if source == 100:
            early.set()

    model: Any = Fake(reading=reading)
    with Pipeline(model, 120) as using, ThreadPoolExecutor(1) as callers:
        with closing(using.answers(items(40), 1, Times())) as batches:
            next(batches)
            call = callers.submit(answers, using, items(20, 100))
            assert not early.wait(0.2)
        assert len(call.result()) == 20 and early.is_set()


def test_what_a_call_reads_stays_in_memory_for_the_next_one_alone() -> None:
    """A batch that takes long: readers use memory again after as many batches as two calls need."""
    begun, end, late = threading.Event(), threading.Event(), threading.Event()

    def reading(source: int) -> None:
        if source >= 100 + 8 * 4:  # 5 batches read ahead, one in hand, two in the model
            late.set()

    def running(pixels: np.ndarray) -> None:
        if pixels[0, 0, 0, 0] == 0:
            begun.set()
            assert end.wait(10)

    model: Any = Fake(reading=reading, running=running, decoder=True)
    with Pipeline(model, 200) as using, ThreadPoolExecutor(2) as callers:
        first = callers.submit(answers, using, items(4))
        assert begun.wait(10)
        second = callers.submit(answers, using, items(100, 100))
        assert not late.wait(0.5), "the second call goes on without the first one"
        end.set()
        assert len(first.result()) == 4 and len(second.result()) == 100


def test_a_call_after_one_that_was_stopped() -> None:
    for decoder in (None, True):
        model: Any = Fake(decoder=decoder)
        with Pipeline(model, 200) as using:
            with closing(using.answers(items(100), 1, Times())) as batches:
                next(batches)
            assert [each.name for each in answers(using, items(30, 100))] == names(100, 30)


def test_an_internal_error_is_raised() -> None:
    def running(_: np.ndarray) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        answered(Fake(running=running), 10)


def test_a_call_after_one_that_failed() -> None:
    def running(pixels: np.ndarray) -> None:
        if pixels[0, 0, 0, 0] == 8:
            raise RuntimeError("out of memory")

    model: Any = Fake(running=running)
    with Pipeline(model, 60) as using:
        with pytest.raises(RuntimeError, match="out of memory"):
            answers(using, items(40))
        assert [each.name for each in answers(using, items(20, 40))] == names(40, 20)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
@pytest.mark.parametrize(("device", "behind"), [("cpu", 10), ("gpu:0", 0)])
def test_decoding_steps_back_behind_a_model_on_the_same_cores(device: str, behind: int) -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    ours, seen = nice(), set()
    model = Fake(
        device=device,
        reading=lambda _: seen.add(("decode", nice())),
        running=lambda _: seen.add(("model", nice())),
    )
    answered(model, 10)
    assert seen == {("decode", min(max(ours, behind), 19)), ("model", ours)} and nice() == ours


def test_readers_that_nobody_needs_end() -> None:
    model: Any = Fake()
    reader = Reader()
    with Pipeline(model, pipeline.MANY, readers=[reader]):
        assert reader._process.poll() is not None
