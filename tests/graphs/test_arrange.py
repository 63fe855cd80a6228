"""Filters as kernels read them hold what the dense ones hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from max.dtype import DType

from maxvision.common.errors import ArgumentError
from maxvision.graphs import shapes
from maxvision.graphs.arrange import block_steps, is_aligned, ungrouped

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


@pytest.mark.parametrize(
    ("shape", "dtype", "window", "aligned"),
    [
        ((1, 1, 64, 64), DType.bfloat16, {}, True),
        ((1, 1, 12, 64), DType.bfloat16, {}, False),  # 24 bytes of channels
        ((1, 1, 12, 64), DType.float32, {}, True),
        ((1, 1, 64, 12), DType.bfloat16, {}, False),
        ((3, 3, 64, 64), DType.bfloat16, {"padding": 1, "stride": 2}, True),
        ((3, 3, 64, 128), DType.bfloat16, {"padding": 1, "groups": 2}, False),
        ((16, 16, 8, 64), DType.bfloat16, {"stride": 16}, False),
        ((3, 3, 64, 64), DType.bfloat16, {"dilation": 65}, False),
    ],
)
def test_aligned_sizes_are_known(
    shape: tuple[int, ...], dtype: DType, window: dict[str, Any], aligned: bool
) -> None:
    assert is_aligned(shape, dtype, **window) == aligned


@settings(max_examples=2000, deadline=None)
@given(data=st.data())
def test_a_tensor_map_holds_what_is_called_aligned(data: st.DataObject) -> None:
    """The limits of an im2col tensor map: cuTensorMapEncodeIm2col of CUDA's driver API."""

    def pair(largest: int, least: int = 0) -> tuple[int, int]:
        return data.draw(st.tuples(*[st.integers(least, largest)] * 2))

    taps, stride, dilation = pair(12, 1), pair(10, 1), pair(40, 1)
    padding, size = (*pair(140), *pair(140)), pair(300, 1)
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    if not is_aligned((*taps, 64, 64), DType.bfloat16, **window):
        return
    try:
        windows = shapes.windows("conv2d", size, taps, **window)
    except ArgumentError:  # the window is larger than the image
        return
    for axis in range(2):
        upper = (windows[axis] - 1) * stride[axis] - padding[axis] - (size[axis] - 1)
        assert -128 <= -padding[axis] <= 127 and -128 <= upper <= 127
        assert stride[axis] <= 8 and (taps[axis] - 1) * dilation[axis] <= 255
