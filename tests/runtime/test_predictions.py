"""The likeliest classes are those of a full sort."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace

import numpy as np
import pytest

from maxvision.runtime.predictions import Prediction, likeliest, softmax


@pytest.mark.parametrize("count", [1, 2, 5, 9, 100])
@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_likeliest_are_those_of_a_full_sort(count: int, levels: int) -> None:
    """With few levels many classes are equally likely: the first of them count."""
    rng = np.random.default_rng(levels)
    for classes in (1, 2, 5, 10, 300, 1000):
        scores = rng.integers(0, levels, (20, classes)).astype(float)
        scores[::7, 0], scores[3] = np.nan, np.nan
        scores[5], scores[6], scores[6, classes // 2] = -np.inf, -np.inf, 1  # serve takes any
        scores[8], scores[8, -1] = np.nan, 1
        scores[9, classes // 2] = np.inf
        given = scores.copy()
        full = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(likeliest(scores, count), full)
        np.testing.assert_array_equal(scores, given)
    assert likeliest(np.empty((0, 1000)), count).shape == (0, count)


def test_logits_that_differ_by_less_than_softmax_shows_are_equally_likely() -> None:
    """Less their maximum, in float32, both are -20: the first counts, not the larger."""
    logits = np.full((1, 100), -30, np.float32)
    logits[0, :3] = 1e-9, 2e-9, 20
    assert likeliest(softmax(logits), 3).tolist() == [[2, 0, 1]]


def test_predictions_are_frozen_dataclasses() -> None:
    one = Prediction("cat", 3, 0.5)
    assert one == Prediction(label="cat", class_id=3, score=0.5) != replace(one, score=0.25)
    assert vars(one) == asdict(one) == {"label": "cat", "class_id": 3, "score": 0.5}
    assert repr(one) == "Prediction(label='cat', class_id=3, score=0.5)"
    assert {one, copy.copy(one), pickle.loads(pickle.dumps(one))} == {one}
    with pytest.raises(FrozenInstanceError):
        one.score = 1.0  # type: ignore[misc]
