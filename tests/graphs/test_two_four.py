"""Filters as kernels read them, against the filters themselves."""

import numpy as np
import pytest

from maxvision.graphs.arrange import is_two_four, two_four

SHAPES = [(1, 1, 64, 64), (3, 3, 64, 128), (3, 3, 128, 40), (2, 1, 6, 72), (1, 3, 200, 8)]


def two_of_four(shape, dtype=np.float32):
    """Filters [R, S, C, F] of which at most two of four channels are not zero, some fewer."""
    rng = np.random.default_rng(0)
    r, s, c, f = shape
    fours = np.zeros((r, s, -(-c // 4), 4, f))
    kept = rng.permuted(np.broadcast_to(np.arange(4)[:, None], fours.shape), axis=3) < 2
    fours[kept] = rng.standard_normal(np.count_nonzero(kept))
    fours[rng.random(fours.shape) < 0.2] = 0
    return fours.reshape(r, s, -1, f)[:, :, :c].astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_four_holds_the_filter(shape):
    filters = two_of_four(shape)
    assert is_two_four(filters)
    values, indices = two_four(filters)
    r, s, c, f = shape
    chunks, tiles = -(-c // 64), 2 * -(-f // 128)
    values = values.reshape(r * s * chunks, tiles, 4, 64, 8)
    indices = indices.reshape(r * s * chunks, tiles, 4, 32)
    assert indices.dtype == np.uint32

    rebuilt = np.zeros((r * s * chunks, 64, tiles * 64), np.float32)
    for filter_ in range(tiles * 64):
        tile, row = divmod(filter_, 64)
        for four in range(16):
            # PTX ISA 8.2, figure 109: who holds the indices of a row and a column.
            lane, half = row % 8 * 4 + four // 4, row % 16 // 8
            word = indices[:, tile, row // 16, lane] >> np.uint32(16 * half + four % 4 * 4)
            first, second = word & 3, word >> np.uint32(2) & 3
            assert (first < second).all()
            for i, index in enumerate((first, second)):
                at = 2 * four + i
                steps = np.arange(len(values))
                rebuilt[steps, 4 * four + index, filter_] += values[:, tile, at // 8, row, at % 8]
    rebuilt = rebuilt.reshape(r, s, chunks * 64, tiles * 64)
    assert np.array_equal(rebuilt[:, :, :c, :f], filters)
    assert not rebuilt[:, :, c:].any() and not rebuilt[..., f:].any()


def test_two_four_refuses_three_of_four():
    filters = two_of_four((3, 3, 8, 8))
    filters[1, 2, 4:7, 3] = 1
    assert not is_two_four(filters)
    with pytest.raises(ValueError, match="two of four neighbouring channels"):
        two_four(filters)


def test_two_four_starts_anew_at_each_tap():
    filters = np.zeros((1, 2, 6, 8), np.float32)
    filters[0, 0, 4:] = filters[0, 1, :2] = 1  # four in a row of K, of two groups
    assert is_two_four(filters)
