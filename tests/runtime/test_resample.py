"""The resize by vectors gives Pillow's pixels, every one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("numba")

from maxvision.runtime import resample
from maxvision.runtime.classifier import Classifier
from maxvision.runtime.preprocess import Preprocess

SIZES = [
    (500, 375), (375, 500), (256, 256), (224, 224), (640, 480), (1024, 768), (451, 300), (300, 601),
    (256, 300), (1, 1), (3, 900), (900, 3), (255, 257), (2000, 130), (130, 400),
]  # fmt: skip


@pytest.mark.parametrize("resize", [224, 256, 232, 384])
def test_pixels_are_pillows(resize: int) -> None:
    rng = np.random.default_rng(resize)
    preprocess = Preprocess(224, 224, resize)
    for width, height in SIZES + [tuple(rng.integers(1, 900, 2)) for _ in range(40)]:
        levels = rng.integers(0, 256, (height, width, 3), np.uint8)
        levels[:, ::5] = 255  # so that sums overshoot on both sides
        levels[::7] = 0
        picture = Image.fromarray(levels)
        np.testing.assert_array_equal(
            resample.prepare(preprocess, picture), preprocess(picture), f"{width} x {height}"
        )


def test_what_is_not_resized_so_is_left_to_pillow() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 80, 3), np.uint8))
    for preprocess in (
        Preprocess(32, 32, None),
        Preprocess(32, 32, (40, 50)),
        Preprocess(64, 64, 72, Image.Resampling.BILINEAR),
        Preprocess(128, 128, 64),
    ):
        np.testing.assert_array_equal(resample.prepare(preprocess, picture), preprocess(picture))


def test_a_model_reads_the_same_pixels_either_way() -> None:
    model: Any = SimpleNamespace(decoder=None, preprocess=Preprocess(32, 32, 40))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 80, 3), np.uint8))
    Classifier.resize_by_vectors(model)
    assert model._prepare is resample.prepare
    found = Classifier.read(model, picture)
    np.testing.assert_array_equal(found, model.preprocess(picture))  # type: ignore[arg-type]
