"""The likeliest classes are those of a full sort."""

from __future__ import annotations

import numpy as np
import pytest

from maxvision.runtime.predictions import likeliest


@pytest.mark.parametrize("count", [1, 2, 5, 9, 100])
@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_likeliest_are_those_of_a_full_sort(count: int, levels: int) -> None:
    """With few levels many classes are equally likely: the first of them count."""
    rng = np.random.default_rng(levels)
    for classes in (1, 2, 5, 10, 300):
        scores = rng.integers(0, levels, (20, classes)).astype(float)
        scores[::7, 0], scores[3] = np.nan, np.nan
        full = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(likeliest(scores, count), full)
