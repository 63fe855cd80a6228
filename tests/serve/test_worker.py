"""What a model's process does before it takes requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.serve.worker import Runner


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
