"""Filters as kernels read them hold what the dense ones hold."""

from __future__ import annotations

import numpy as np
import pytest

from maxvision.graphs.arrange import block_steps, ungrouped

SHAPES = [(3, 3, 128, 128), (1, 1, 512, 64), (3, 2, 72, 136), (1, 5, 8, 8), (1, 1, 64, 200)]


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0, 0.02, 0.3, 1])
def test_blocks_and_their_lists_rebuild_the_filter(
    columns: int, width: int, shape: tuple[int, int, int, int], density: float
) -> None:
    rng = np.random.default_rng(0)
    r, s, c, f = shape
    grid = rng.random((r, s, -(-c // width), -(-f // columns))) < density
    if not grid.any():
        grid.flat[grid.size // 2] = True  # one block in all
    mask = grid.repeat(width, 2).repeat(columns, 3)[:, :, :c, :f]
    filters = (rng.standard_normal(shape) * mask).astype(np.float16)
    blocks, lists = block_steps(filters, columns, width)
    assert blocks.shape == (grid.sum(), columns, width) and blocks.dtype == filters.dtype
    assert lists.dtype == np.int32 and lists.shape[1] % 4 == 0

    rebuilt = np.zeros((r, s, grid.shape[2] * width, grid.shape[3] * columns), filters.dtype)
    taken = 0
    for tile, (first, count, *steps) in enumerate(lists.tolist()):
        assert first == taken and sorted(steps[:count]) == steps[:count] and not any(steps[count:])
        assert len(steps) > count  # one more is read
        taken += count
        for i, step in enumerate(steps[:count]):
            at = step >> 24, step >> 16 & 255, slice((step & 65535) * width, None)
            part = rebuilt[at][:width, tile * columns : (tile + 1) * columns]
            assert not part.any()
            part[:] = blocks[first + i].T
    assert taken == len(blocks)
    np.testing.assert_array_equal(rebuilt[:, :, :c, :f], filters)
    assert not rebuilt[:, :, c:].any() and not rebuilt[..., f:].any()


def test_a_filter_of_zeros_keeps_one_block_that_no_list_names() -> None:
    blocks, lists = block_steps(np.zeros((3, 3, 64, 100), np.float32), 64, 32)
    assert blocks.shape == (1, 64, 32) and not blocks.any()
    assert lists.shape == (2, 4) and not lists.any()


@pytest.mark.parametrize(("groups", "c", "f"), [(1, 4, 6), (3, 2, 12), (5, 1, 5)])
def test_a_filter_in_groups_is_one_of_all_channels(groups: int, c: int, f: int) -> None:
    rng = np.random.default_rng(0)
    filters = rng.standard_normal((3, 2, c, f)).astype(np.float32)
    x = rng.standard_normal((3, 2, groups, c)).astype(np.float32)
    apart = np.einsum("rsgc,rscgf->gf", x, filters.reshape(3, 2, c, groups, -1)).ravel()
    whole = np.einsum("rsc,rscf->f", x.reshape(3, 2, -1), ungrouped(filters, groups))
    np.testing.assert_allclose(whole, apart, rtol=1e-5)
