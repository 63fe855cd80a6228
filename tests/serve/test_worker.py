"""What a model's process does before it takes requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.runtime.jpeg import Jpeg
from maxvision.serve import quarantine, worker
from maxvision.serve.quarantine import Quarantine
from maxvision.serve.wire import Job, Report
from maxvision.serve.worker import Batcher, Runner


class Model:
    """Notes what it is asked for."""

    preprocess = SimpleNamespace(height=2, width=3)

    def __init__(self, problem: Exception | None = None) -> None:
        self.asked: list[Any] = []
        self._problem = problem

    def prepare(self, batch: int) -> None:
        self.asked.append(f"prepare {batch}")
        if self._problem:
            raise self._problem

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        assert pixels.shape[1:] == (2, 3, 3) and pixels.dtype == np.uint8
        self.asked.append(len(pixels))
        return np.zeros((len(pixels), 10), np.float32)

    def features(self, pixels: Any) -> Any:
        logits = self(pixels)
        self.asked.append(f"features {len(logits)}")
        return SimpleNamespace(logits=logits, features=np.zeros((len(logits), 4), np.float32))


@pytest.mark.parametrize("problem", [None, MemoryError(), RuntimeError("CUDA: out of memory")])
def test_a_model_is_made_ready_for_every_batch(problem: Exception | None) -> None:
    model = Model(problem)
    assert 0 < Runner(model, embeds=False).warm(6) < 1
    assert model.asked == [1, "prepare 6", 6, 6, 1]


@pytest.mark.parametrize("answer", [1.0, 2.0, np.nan, RuntimeError("illegal address")])
def test_a_model_is_sound_while_it_answers_as_before(answer: Any) -> None:
    class Changing(Model):
        answer: Any = 1.0

        def __call__(self, pixels: np.ndarray) -> np.ndarray:
            if isinstance(self.answer, Exception):
                raise self.answer
            return super().__call__(pixels) + self.answer

    model = Changing()
    runner = Runner(model, embeds=False)
    runner.warm(2)
    model.answer = answer
    assert runner.sound() == (answer == 1.0)


def test_a_picture_that_never_had_an_answer_tells_nothing() -> None:
    class Overflowing(Model):
        def __call__(self, pixels: np.ndarray) -> np.ndarray:
            return super().__call__(pixels) + (np.inf if pixels.any() else 0)

    runner = Runner(Overflowing(), embeds=False)
    runner.warm(2)
    assert runner.sound()


def test_features_are_asked_for_if_they_will_be() -> None:
    model = Model()
    Runner(model, embeds=True).warm(2)
    assert model.asked[:2] == [1, "features 1"]


def test_a_model_that_cannot_be_prepared_is_told() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        Runner(Model(RuntimeError("broken")), embeds=False).warm(2)


class Decoding(Model):
    """Decodes batches of files as long as ``go`` lets it; those of height 1 cannot be decoded."""

    def __init__(self, go: int = 99) -> None:
        super().__init__()
        self.go = threading.Semaphore(go)
        self.threads: set[str] = set()
        self.fails = False

    def decoder(self, images: list[Any]) -> Any:
        assert self.go.acquire(timeout=10)
        self.asked.append(f"decode {len(images)}")
        self.threads.add(threading.current_thread().name)
        refused = [i for i, image in enumerate(images) if image.height == 1]
        return Decoded(np.zeros((len(images) - len(refused), 2, 3, 3), np.uint8), refused)

    def __call__(self, pixels: Any) -> np.ndarray:
        failed, self.fails = self.fails, False
        if failed:
            raise RuntimeError("once")
        return super().__call__(pixels.pixels if isinstance(pixels, Decoded) else pixels)


@dataclass
class Decoded:
    pixels: np.ndarray
    refused: list[int]

    def replace(self, index: int, pixels: None) -> None:
        assert index in self.refused

    def __enter__(self) -> Decoded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Waiting:
    """Jobs that are all there, and the reports of them."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.reports: list[Report] = []
        self.woken = threading.Semaphore(0)

    @property
    def ids(self) -> list[list[str]]:
        """Those of the batches that ran, in their order."""
        return [report.ids for report in self.reports if report.ids]

    def wait(self, seconds: float) -> None:
        assert seconds >= 0
        if seconds:
            self.woken.acquire(timeout=seconds)

    def wake(self) -> None:
        self.woken.release()

    def take(self) -> Job:
        if not self.jobs:
            raise queue.Empty
        return self.jobs.pop(0)

    def report(self, report: Report, front: bytes) -> None:
        self.reports.append(report)


def batcher(model: Model, inbox: Any, limit: int = 2) -> Batcher:
    guard = Quarantine(quarantine.memory())
    return Batcher(Runner(model, embeds=False), inbox, limit, 0.0, 0.01, guard)


def until(made: Batcher, done: Callable[[], bool]) -> None:
    """Lets it work until something is so."""
    for _ in range(99):
        if done():
            return
        made.step()
    raise AssertionError("it never came to that")


def files(*numbers: int, height: int = 9) -> list[Job]:
    return [Job(str(i), Jpeg(bytes(99), height, 9), 0.0) for i in numbers]


def pixels(*numbers: int) -> list[Job]:
    return [Job(str(i), np.zeros((2, 3, 3), np.uint8), 0.0) for i in numbers]


def test_a_batch_runs_while_later_ones_are_decoded() -> None:
    model, inbox = Decoding(go=1), Waiting(files(*range(8)))
    made = batcher(model, inbox)
    until(made, lambda: bool(inbox.ids))
    assert inbox.ids == [["0", "1"]]
    assert model.asked == ["decode 2", 2]
    model.go.release(3)
    until(made, lambda: len(inbox.ids) == 4)
    assert inbox.ids == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert model.threads == {"decode_0"}


def test_a_batch_gathers_images_while_the_decoder_is_busy() -> None:
    model, inbox = Decoding(go=0), Waiting(files(*range(8)))
    made = batcher(model, inbox, limit=8)
    for later in (8, 9):
        made.step()
        inbox.jobs = files(later)
    made.step()
    model.go.release(2)
    until(made, lambda: len(inbox.ids) == 2)
    assert inbox.ids == [list("01234567"), ["8", "9"]]


def test_one_with_features_is_not_left_behind() -> None:
    model, inbox = Decoding(go=0), Waiting(files(*range(4)))
    made = batcher(model, inbox)
    made.step()
    (rich,) = files(9)
    rich.features, rich.sent = True, -1.0
    inbox.jobs = [*files(4, 5, 6, 7), rich]
    made.step()
    model.go.release(1)
    until(made, lambda: bool(inbox.ids))
    model.go.release(9)
    until(made, lambda: len(inbox.ids) == 5)
    assert inbox.ids[:3] == [["0", "1"], ["2", "3"], ["9"]]


def test_a_few_files_are_decoded_at_once() -> None:
    model, inbox = Decoding(), Waiting(files(0, 1))
    batcher(model, inbox, limit=8).step()
    assert inbox.ids == [["0", "1"]]
    assert model.threads == {threading.current_thread().name}


def test_pixels_do_not_wait_for_files() -> None:
    model, inbox = Decoding(go=0), Waiting([*files(0, 1), *pixels(2, 3)])
    made = batcher(model, inbox)
    made.step()
    assert inbox.ids == [["2", "3"]]
    model.go.release()
    until(made, lambda: len(inbox.ids) == 2)


def test_one_that_fails_runs_again_after_those_that_are_decoded() -> None:
    model, inbox = Decoding(), Waiting(files(*range(6)))
    model.decoder = with_memory(model.decoder)  # type: ignore[method-assign]
    made = batcher(model, inbox)
    made._runner.warm(2)
    model.fails = True
    until(made, lambda: len(inbox.ids) == 4)
    assert inbox.ids == [["2", "3"], ["4", "5"], ["0"], ["1"]]


def test_a_decoder_that_hangs_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BEAT", 0.02)
    model, inbox = Decoding(go=0), Waiting(files(*range(8)))
    made = batcher(model, inbox, limit=8)
    for _ in range(6):
        made.step()
    beats = len(inbox.reports)
    for _ in range(6):
        made.step()
    assert len(inbox.reports) == beats
    model.go.release()
    until(made, lambda: bool(inbox.ids))
    for _ in range(6):
        made.step()
    assert len(inbox.reports) > beats + 2


def with_memory(decoder: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Lets a decoder have the memory of two batches, as the GPU's has."""
    free = threading.Semaphore(2)

    class Held(Decoded):
        def __exit__(self, *_: object) -> None:
            free.release()

    def decode(images: list[Any]) -> Any:
        assert free.acquire(timeout=10), "no memory is free"
        made = decoder(images)
        return Held(made.pixels, made.refused)

    return decode


def test_what_is_not_decoded_is_told() -> None:
    inbox = Waiting([*files(0, 2), *files(1, 3, height=1)])
    until(batcher(Decoding(), inbox, limit=4), lambda: bool(inbox.ids))
    assert sorted(id for report in inbox.reports for id in report.undecoded) == ["1", "3"]
    assert inbox.ids == [["0", "2"]]
    without = Waiting([*files(0), *pixels(1)])
    batcher(Model(), without).step()
    assert [report.undecoded for report in without.reports if report.undecoded] == [["0"]]
    assert without.ids == [["1"]]
