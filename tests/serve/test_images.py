"""What a client sends becomes pixels: as run_graph.py reads them, and within bounds."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.common.pictures import FORMATS, MAX_PIXELS
from maxvision.runtime.preprocess import Preprocess
from maxvision.serve import images
from maxvision.serve.errors import Refusal
from maxvision.serve.images import SMALL, Decoder
from maxvision.serve.options import parse
from maxvision.serve.routes.common import RAW
from tests.runtime.test_tiff import tiled

PREPROCESS = Preprocess(32, 32, 36)


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    made = Decoder(PREPROCESS, 2 * SMALL, 2)
    yield made
    made.close()


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_formats_are_those_of_run_graph(decoder: Decoder, name: str) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (50, 60, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, name.upper())
    np.testing.assert_array_equal(decoder(file.getvalue()), PREPROCESS(file.getvalue()))


def test_formats_and_limit_have_one_definition() -> None:
    assert {each.media_type for each in FORMATS} == set(RAW)
    assert parse(["--model", "x"], {}).max_pixels == MAX_PIXELS


def test_a_tile_counts_as_a_picture(decoder: Decoder) -> None:
    with pytest.raises(Refusal, match="tiles of 4,000,000 pixels") as refusal:
        decoder(tiled(2000))
    assert refusal.value.status == 413


def test_large_pictures_are_decoded_one_after_another(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    Image.new("1", (2 * SMALL // 1024, 1024)).save(file, "PNG")
    small = io.BytesIO()
    Image.new("RGB", (8, 8)).save(small, "PNG")
    begun, free, most, held = threading.Event(), threading.Event(), 0, 0

    def prepare(preprocess: Preprocess, picture: Image.Image) -> np.ndarray:
        nonlocal most, held
        if picture.width > 8:
            held += 1
            most = max(most, held)
            begun.set()
            assert free.wait(10)
            held -= 1
        return np.zeros(0)

    monkeypatch.setattr(images, "prepare", prepare)
    threads = [threading.Thread(target=decoder, args=(file.getvalue(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    assert decoder(small.getvalue()).size == 0  # it does not wait behind them
    time.sleep(0.05)  # the other could begin, if it did not wait
    free.set()
    for thread in threads:
        thread.join(10)
    assert (most, held) == (1, 0)
