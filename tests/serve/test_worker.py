"""What a model's process does before it takes requests."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.runtime.jpeg import Jpeg
from maxvision.serve import quarantine
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

    def features(self, pixels: np.ndarray) -> Any:
        self.asked.append(f"features {len(pixels)}")
        return SimpleNamespace(logits=self(pixels), features=pixels)


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
    assert model.asked[0] == "features 1"


def test_a_model_that_cannot_be_prepared_is_told() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        Runner(Model(RuntimeError("broken")), embeds=False).warm(2)


class Decoding(Model):
    """Decodes files, and runs a batch only once the next one is being decoded, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.waits = 0

    def decoder(self, images: list[Any]) -> Any:
        self.asked.append(f"decode {len(images)}")
        self.begun.release()
        refused = [i for i, image in enumerate(images) if image.height == 1]
        return Decoded(np.zeros((len(images) - len(refused), 2, 3, 3), np.uint8), refused)

    def __call__(self, pixels: Any) -> np.ndarray:
        for _ in range(self.waits):
            assert self.begun.acquire(timeout=10), "the next batch is not decoded meanwhile"
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

    def wait(self, seconds: float) -> None:
        assert seconds >= 0

    def take(self) -> Job:
        if not self.jobs:
            raise queue.Empty
        return self.jobs.pop(0)

    def report(self, report: Report, front: bytes) -> None:
        self.reports.append(report)


def batcher(model: Model, inbox: Any, limit: int = 2) -> Batcher:
    guard = Quarantine(quarantine.memory())
    return Batcher(Runner(model, embeds=False), inbox, limit, 0.0, 0.01, guard)


def test_a_batch_is_decoded_while_the_one_before_runs() -> None:
    inbox = Waiting([Job(str(i), Jpeg(bytes(99), 9, 9), 0.0) for i in range(4)])
    model = Decoding()
    model.waits = 2  # the first batch's own, and the second's
    made = batcher(model, inbox)
    made.step()
    assert not any(report.ids for report in inbox.reports)
    made.step()
    assert [report.ids for report in inbox.reports if report.ids] == [["0", "1"]]
    model.waits = 0
    made.step()
    assert [report.ids for report in inbox.reports if report.ids] == [["0", "1"], ["2", "3"]]
    assert model.asked == ["decode 2", "decode 2", 2, 2]


def test_what_is_not_decoded_is_told() -> None:
    files = [Jpeg(bytes(99), height, 9) for height in (9, 1, 9, 1)]
    inbox = Waiting([Job(str(i), file, 0.0) for i, file in enumerate(files)])
    made = batcher(Decoding(), inbox, limit=4)
    for _ in range(2):
        made.step()
    assert sorted(id for report in inbox.reports for id in report.undecoded) == ["1", "3"]
    assert [report.ids for report in inbox.reports if report.ids] == [["0", "2"]]
    without = Waiting([Job("0", files[0], 0.0), Job("1", np.zeros((2, 3, 3), np.uint8), 0.0)])
    batcher(Model(), without).step()
    assert [report.undecoded for report in without.reports if report.undecoded] == [["0"]]
    assert [report.ids for report in without.reports if report.ids] == [["1"]]
