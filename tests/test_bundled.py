"""The bundled models' accuracy through our own graph, on a tenth of the test pictures."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import weights
from bench.accuracy import correct
from graphs import load
from tests.graphs.reference import DATA

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.jpg"))

TEST = DATA / "cifar10" / "test.npz"
# 1,000 pictures: the card's accuracy on all 10,000, less three standard deviations.
LEAST = {"resnet-cifar10": 0.88, "cvt-cifar10": 0.87}


@pytest.mark.skipif(not TEST.exists(), reason=f"NO CIFAR-10 at {TEST}: accuracy is not tested")
@pytest.mark.parametrize("name", weights.bundled())
def test_accuracy(name: str) -> None:
    right = list(itertools.chain.from_iterable(correct(load(name), TEST, 1000)))
    assert len(right) == 1000
    assert np.mean(right) >= LEAST[name]


@pytest.mark.parametrize("name", weights.bundled())
def test_bfloat16_gives_the_labels_of_float32(name: str) -> None:
    assert len(EXAMPLES) == 4
    exact, rounded = (
        load(name, device="cpu", dtype=dtype).classify(list(EXAMPLES), top_k=10)
        for dtype in ("float32", "bfloat16")
    )
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours[0].label == theirs[0].label
        scores = {prediction.label: prediction.score for prediction in theirs}
        assert all(abs(p.score - scores[p.label]) < 0.02 for p in ours)
