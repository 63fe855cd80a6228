"""Which format a sparse filter takes, and that each holds it whole."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType

from maxvision.graphs import formats
from maxvision.graphs.target import Target

RNG = np.random.default_rng(0)
FILTERS = RNG.standard_normal((3, 3, 128, 192), np.float32)
RANDOM = FILTERS * (RNG.random(FILTERS.shape) < 0.3)
FOURS = FILTERS * (np.arange(128) % 4 < 2)[:, None]
BLOCKS = FILTERS * (np.arange(192) < 128)
HALF = DType.bfloat16


@pytest.mark.parametrize(
    ("filters", "groups", "target", "dtype", "suited"),
    [
        (RANDOM, 1, "cpu", DType.float32, "stream"),
        (BLOCKS, 1, "cpu", DType.float32, "stream"),
        (RANDOM, 1, "sm_80", HALF, "steps"),
        (FOURS, 1, "gfx942", HALF, "steps"),
        (RANDOM, 1, "sm_90a", DType.float32, "steps"),
        (RANDOM, 2, "sm_90a", HALF, "steps"),
        (RANDOM[:, :, :100], 1, "sm_90a", HALF, "steps"),
        (RANDOM[..., :100], 1, "sm_90a", HALF, "steps"),
        (RANDOM, 1, "sm_90a", HALF, "tiles"),
        (RANDOM, 1, "sm_90a", DType.float16, "tiles"),
        (FOURS, 1, "sm_90a", HALF, "two_four tiles"),
        (BLOCKS, 1, "sm_90a", HALF, "blocks tiles"),
        (FOURS * (np.arange(192) < 128), 1, "sm_90a", HALF, "blocks two_four tiles"),
        (np.zeros_like(FILTERS), 1, "sm_90a", HALF, "blocks two_four tiles"),
    ],
)
def test_the_zeros_decide_which_formats_suit(
    filters: np.ndarray, groups: int, target: str, dtype: DType, suited: str
) -> None:
    assert formats.suited(filters, groups, Target.parse(target), dtype) == tuple(suited.split())


@pytest.mark.parametrize("format", ["stream", "steps", *formats.PACKED])
@pytest.mark.parametrize("empty", [False, True])
def test_every_format_keeps_every_number(format: str, empty: bool) -> None:
    filters = np.zeros_like(FOURS) if empty else FOURS
    dtype = DType.float32 if format in ("stream", "steps") else DType.float16
    arrays = formats.arranged(format, filters, 1, dtype)
    assert all(array.size for _, array, _ in arrays)  # MAX binds no empty buffer
    values = arrays[0][1]
    if format == "tiles":
        values = (values & 0xFFFF).astype(np.uint16).view(np.float16)
        found, wanted = np.unique(values), np.unique(filters.astype(np.float16))
    else:
        found, wanted = np.unique(values), np.unique(filters)
    np.testing.assert_array_equal(found[found != 0], wanted[wanted != 0])
