"""GPU kernels run without a GPU: their PTX, on shapes that end within a tile, against float64.

References are numpy's in float64; a bound is twice the rounding of the result's dtype, and what
each case says that float32 sums, or results that are rounded on the way, may add.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxvision.graphs import arrange
from maxvision.graphs.arrange import stem_fragments
from maxvision.graphs.constants import e4m3, norm_filter
from maxvision.runtime.nvjpeg import places
from maxvision.runtime.preprocess import UPRIGHT, Preprocess

from .conftest import Find
from .launches import (
    BLOCKS,
    DTYPES,
    EXPANDED,
    GRAD_TILES,
    PINGPONG,
    RESIDENT,
    SPARSE,
    TILES,
    TOKEN_TILES,
    TURNED,
    TURNED_BYTES,
    Blocks,
    Chain,
    Conv,
    GradTile,
    Groups,
    Heads,
    Masks,
    Norm,
    OneTile,
    Order,
    PingPong,
    Product,
    Qkv,
    Reduction,
    Sparse,
    Squeeze,
    StemCase,
    Tile,
    Turned,
    attention,
    attention_grad,
    attention_linear,
    blocks,
    chain,
    check,
    class_token,
    class_token_layernorm,
    concat,
    depthwise,
    depthwise_input_grad,
    depthwise_qkv,
    foreach,
    gather_rows,
    gemm_cores,
    gemv,
    group_norm,
    hopper,
    hopper_attention,
    layer_norm_grad,
    layernorm,
    normalize,
    optimizer_step,
    permute_rows,
    permute_tiles,
    pingpong,
    pointwise,
    pool,
    pool_grad,
    reduce,
    resample,
    resident,
    roll,
    rounded,
    row_moments,
    scatter_add,
    softmax,
    squeeze_excite,
    stem,
    stem_hopper,
    tiled,
    token_linear,
    turned,
    two_four,
    weight_grad,
    wide,
)
from .semantics import float8_products, to_tf32

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = "bfloat16"
E4M3 = "float8_e4m3fn"
SUMS = 2**-18
"""What float32 sums of some hundred products may be off by."""
GELU = 2**-14
"""What ops/epilogue.mojo says that it is off by, where the result has 8 bits."""
EPSILON = 1e-5

erf = np.vectorize(math.erf)


def of_all(days: int, *axes: Sequence[Any]) -> list[Any]:
    """Combines axes: every combination runs each night, and one of ``days`` every day.

    These are chosen along diagonals, so that each value of each axis is among them.
    """
    return [
        pytest.param(*(x for _, x in each), marks=[pytest.mark.nightly] if turn % days else [])
        for each in itertools.product(*(enumerate(axis) for axis in axes))
        for turn in [sum(i for i, _ in each)]
    ]


def normalised(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * weight + bias


@pytest.mark.parametrize(
    ("kernel", "lanes", "columns", "rows", "stride"),
    [
        ("8x1", 8, 64, 37, 64),
        ("8x1", 8, 56, 5, 56),
        ("8x3", 8, 192, 50, 192),
        ("8x3", 8, 72, 3, 720),
        ("16x3", 16, 384, 20, 1920),
        ("16x3", 16, 200, 9, 200),
        ("32x3", 32, 768, 7, 768),
        ("32x4", 32, 1024, 5, 1024),
        ("32x4", 32, 1000, 1, 1000),
        ("", 32, 57, 7, 57),
        ("", 32, 1, 5, 3),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, "float32"])
def test_layernorm(
    find: Find,
    rng: np.random.Generator,
    kernel: str,
    lanes: int,
    columns: int,
    rows: int,
    stride: int,
    dtype: str,
) -> None:
    if dtype == "float32" and kernel:  # vectors of 16 bytes are half as many numbers
        columns //= 2
        columns -= columns % 4
    x = rounded(rng.standard_normal((rows, stride)) * 0.5 + 3, dtype)
    weight, bias = rng.standard_normal((2, columns)).astype(np.float32)
    name = f"layernorm_{kernel}_{dtype}_{dtype}".replace("__", "_")
    y = layernorm(find(name), lanes, x, columns, weight, bias, dtype)
    check(y, normalised(wide(x, dtype)[:, :columns], weight, bias), dtype, 2**-20)


@pytest.mark.parametrize(("kernel", "lanes", "columns"), [("16x3_", 16, 180), ("", 32, 57)])
def test_layernorm_into_another_dtype(
    find: Find, rng: np.random.Generator, kernel: str, lanes: int, columns: int
) -> None:
    x = rng.standard_normal((9, columns)).astype(np.float32)
    weight, bias = rng.standard_normal((2, columns)).astype(np.float32)
    y = layernorm(find(f"layernorm_{kernel}float32_{BF16}"), lanes, x, columns, weight, bias, BF16)
    check(y, normalised(x.astype(np.float64), weight, bias), BF16, 2**-20)


@pytest.mark.parametrize("out", ["uint8", E4M3])
@pytest.mark.parametrize(("kernel", "lanes", "columns"), [("16x3_", 16, 384), ("", 32, 57)])
def test_layernorm_stores_8_bits(
    find: Find, rng: np.random.Generator, kernel: str, lanes: int, columns: int, out: str
) -> None:
    """The scale and the zero point are part of weight and bias."""
    x = rounded(rng.standard_normal((9, columns)) * 0.5 + 3, BF16)
    steps, zero = (60, 128) if out == "uint8" else (200, 0)
    weight, bias = (rng.standard_normal((2, columns)) * steps).astype(np.float32)
    bias = bias + np.float32(zero)
    y = wide(
        layernorm(find(f"layernorm_{kernel}{BF16}_{out}"), lanes, x, columns, weight, bias, out),
        out,
    )
    want = normalised(wide(x, BF16), weight, bias)
    low, high = (wide(rounded(want + off, out), out) for off in (-1e-3, 1e-3))
    assert ((low <= y) & (y <= high)).all()
    assert (y == {E4M3: 448, "uint8": 255}[out]).any() and (low == high).mean() > 0.9


NORM_GRADS = [  # kernel, lanes, columns, rows, blocks
    ("8x1", 8, 64, 150, 2),
    ("8x1", 8, 56, 37, 2),
    ("16x3", 16, 192, 40, 2),
    ("16x3", 16, 100, 16, 1),
    ("32x3", 32, 384, 21, 2),
    ("32x3", 32, 196, 3, 1),
    ("128x2", 128, 768, 9, 2),
    ("128x2", 128, 516, 3, 2),
    ("256x4", 256, 2052, 5, 2),
    ("256x4", 256, 4096, 2, 1),
    ("row", 256, 57, 9, 4),
    ("row", 256, 261, 5, 2),
]


@pytest.mark.parametrize(("kernel", "lanes", "columns", "rows", "blocks"), NORM_GRADS)
@pytest.mark.parametrize(
    "dtypes", [(BF16,) * 3, ("float32",) * 3, ("float32", BF16, "float32")],
    ids=["bfloat16", "float32", "mixed"],
)  # fmt: skip
def test_layer_norm_grad(
    find: Find,
    rng: np.random.Generator,
    kernel: str,
    lanes: int,
    columns: int,
    rows: int,
    blocks: int,
    dtypes: tuple[str, str, str],
) -> None:
    if kernel == "8x1" and BF16 not in dtypes:  # vectors of 16 bytes are half as many numbers
        kernel, lanes = "16x1", 16
    x = rounded(rng.standard_normal((rows, columns)) * 0.5 + 3, dtypes[0])
    dy = rounded(rng.standard_normal((rows, columns)), dtypes[1])
    weight = rng.standard_normal(columns).astype(np.float32)
    name = f"layer_norm_grad_{kernel}_{'_'.join(dtypes)}"
    kernels = find(name), find("layer_norm_grad_add")
    got = layer_norm_grad(kernels, lanes, x, dy, weight, dtypes[2], blocks)
    there, g = wide(x, dtypes[0]), wide(dy, dtypes[1])
    scale = 1 / np.sqrt(there.var(-1, keepdims=True) + EPSILON)
    normed = (there - there.mean(-1, keepdims=True)) * scale
    along = (g * weight * normed).mean(-1, keepdims=True)
    dx = scale * (g * weight - (g * weight).mean(-1, keepdims=True) - normed * along)
    for each, want, dtype in zip(
        got, (dx, (g * normed).sum(0), g.sum(0)), (dtypes[2], "float32", "float32"), strict=True
    ):
        check(each, want, dtype, 2**-19)


ORDERS = [
    ("4x3", 4, 96, Order((6, 8), (-2, -3), (3, 2, 2, 4), (0, 2, 1, 3))),
    ("4x3", 4, 8, Order((6, 8), (2, 3), (3, 2, 2, 4), (0, 2, 1, 3), rolls_first=False)),
    ("8x3", 8, 192, Order((6, 6), (0, -5), (3, 2, 2, 3), (0, 2, 1, 3))),
    ("16x3", 16, 384, Order((5, 6), (4, 0), (2, 3, 5), (2, 0, 1), rolls_first=False)),
    ("16x3", 16, 200, Order((1, 12), (0, 0), (3, 4), (1, 0))),
    ("32x4", 32, 1024, Order((1, 1), (0, 0), (1,), (0,))),
    ("32x4", 32, 392, Order((3, 3), (-1, 2), (9,), (0,))),
]


@pytest.mark.parametrize("kind", ["copy", "add", "layernorm", "add_layernorm"])
@pytest.mark.parametrize(("kernel", "lanes", "columns", "order"), ORDERS, ids=str)
def test_gather_rows(
    find: Find,
    rng: np.random.Generator,
    kernel: str,
    lanes: int,
    columns: int,
    order: Order,
    kind: str,
) -> None:
    shape = (3, math.prod(order.size), columns)
    x, onto = (rounded(rng.standard_normal(shape) + 3, BF16) for _ in range(2))
    weight, bias = rng.standard_normal((2, columns)).astype(np.float32)
    adds, norms = "add" in kind, "layernorm" in kind
    total, y = gather_rows(
        find(f"gather_rows_{kind}_{kernel}_{BF16}"),
        lanes, order, x, onto if adds else None, (weight, bias) if norms else None,
    )  # fmt: skip
    want = order.apply(wide(x, BF16))
    if adds:
        want = wide(rounded(want + wide(onto, BF16), BF16), BF16)
        np.testing.assert_array_equal(wide(total if norms else y, BF16), want)
    if norms:
        check(y, normalised(want, weight, bias), BF16, 2**-20)
    elif not adds:
        np.testing.assert_array_equal(wide(y, BF16), want)


@pytest.mark.parametrize("each", [False, True])
def test_scatter_add(find: Find, rng: np.random.Generator, each: bool) -> None:
    x, values = (rng.standard_normal((3, count, 72)) for count in (11, 17))
    x, values = rounded(x, BF16), rounded(values, BF16)
    index = rng.integers(-3, 11, (3, 17, 72) if each else (3, 17))
    index[0, 5] = 11  # there is no such row
    y = scatter_add(find(f"scatter_add_{BF16}_int64"), x, index, values, rows=4)
    want, given = wide(x, BF16).astype(np.float64), wide(values, BF16)
    for n, e, c in np.ndindex(given.shape):
        row = index[n, e, c] if each else index[n, e]
        if row < 11:
            want[n, row, c] += given[n, e, c]
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "g",
    [
        Qkv(4, 4, 64, (4, 4)),
        Qkv(7, 9, 192, (4, 5), first=1, images=2),
        Qkv(14, 14, 384, (7, 14), first=1),
        Qkv(14, 14, 384, (4, 4), first=1),
        Qkv(5, 3, 384, (1, 2), first=1),
        Qkv(1, 1, 64, (1, 1), first=1),
        Qkv(5, 1, 64, (3, 1)),
        Qkv(8, 7, 72, (1, 1), stride=3, pad_kv=0),
        Qkv(8, 7, 72, (3, 3), first=1, stride=3, pad_kv=0),
        Qkv(9, 13, 24, (4, 4), first=1, stride=1),
        Qkv(6, 6, 1024, (2, 3), first=1),
        Qkv(6, 6, 768, (3, 3), first=1),
        Qkv(5, 6, 64, (2, 4), first=1, kernel=1, pad_kv=0),
        Qkv(5, 6, 136, (2, 4), kernel=1, pad_kv=0, stride=1),
        Qkv(9, 8, 200, (4, 3), first=1, kernel=5, pad_kv=2),
        Qkv(9, 8, 64, (4, 3), kernel=5, pad_kv=0, stride=3),
        Qkv(4, 4, 64, (4, 4), parts=1),
        Qkv(1, 1, 64, (1, 1), first=1, parts=1),
        Qkv(5, 1, 64, (3, 1), parts=2, threads=128),
        Qkv(8, 7, 64, (1, 1), stride=3, pad_kv=0, parts=1, threads=128),
        Qkv(9, 13, 64, (4, 4), first=1, stride=1, parts=2),
        Qkv(28, 28, 64, (14, 28), parts=1, threads=256),
        Qkv(20, 37, 64, (20, 19), first=1, parts=1),
        Qkv(7, 9, 192, (4, 5), first=1, images=2, parts=1, threads=256),
        Qkv(8, 7, 192, (3, 3), first=1, images=3, stride=3, pad_kv=0, parts=2),
        Qkv(28, 28, 192, (14, 14), parts=1),
        Qkv(14, 14, 384, (7, 14), first=1, parts=1),
        Qkv(14, 14, 384, (7, 14), first=1, images=2, parts=2),
        Qkv(14, 14, 384, (4, 4), first=1, parts=4, threads=256),
        Qkv(5, 3, 384, (1, 2), first=1, parts=1, threads=128),
    ],
    ids=str,
)
def test_depthwise_qkv(find: Find, rng: np.random.Generator, g: Qkv) -> None:
    inputs, wanted = projections(rng, g)
    lanes, vectors = g.lanes
    names = [f"depthwise_qkv_{few}{g.kernel}_{lanes}x{vectors}_bfloat16" for few in ("", "few_")]
    if g.parts:
        names = [f"depthwise_qkv_hopper_{g.c}_bfloat16"]
    got, *others = (depthwise_qkv(find(name), g, inputs) for name in names)
    for few in others:
        for y, same in zip(got, few, strict=True):
            np.testing.assert_array_equal(y, same)
    for y, want in zip(got, wanted, strict=True):
        # A normalised token may be rounded the other way: half an ulp of one of the terms.
        check(y, want, BF16, 2**-9)


@pytest.mark.parametrize("dtype", ["uint8", E4M3])
@pytest.mark.parametrize(
    "g",
    [
        Qkv(5, 6, 64, (2, 4)),
        Qkv(4, 5, 64, (4, 5), first=1, images=2),
        Qkv(4, 3, 384, (2, 3), first=1),
        Qkv(9, 13, 64, (4, 4), stride=1, parts=2),
        Qkv(5, 6, 64, (3, 6), first=1, images=2, parts=1, threads=256),
        Qkv(3, 5, 384, (3, 4), parts=1),
        Qkv(5, 3, 384, (3, 3), first=1, parts=2, threads=128),
    ],
    ids=str,
)
def test_depthwise_qkv_in_8_bits(find: Find, rng: np.random.Generator, g: Qkv, dtype: str) -> None:
    """Numbers of either sign saturate; those of a token that is NaN are NaN, or 0 as integers."""
    inputs, wanted = projections(rng, g, poisoned=True)
    kernel = f"hopper_{g.c}" if g.parts else "few_3_{}x{}".format(*g.lanes)
    scales, zeros = (0.006, 0.005, 0.004), (0, 0, 0)
    if dtype == "uint8":
        scales, zeros = (0.04, 0.03, 0.05), (99, 131, 120)
    steps = [float(n) for pair in zip(scales, zeros, strict=True) for n in (1 / pair[0], pair[1])]
    name, seen = f"depthwise_qkv_{kernel}_{BF16}_to_{dtype}", set[float]()
    for y, want, scale, zero in zip(
        depthwise_qkv(find(name), g, inputs, dtype, steps), wanted, scales, zeros, strict=True
    ):
        values, odd = wide(y, dtype), np.isnan(want)
        assert odd.any() and not odd.all()
        np.testing.assert_array_equal(values[odd], 0.0 if dtype == "uint8" else np.nan)
        want, values = want[~odd], values[~odd]
        slack = 2**-9 * np.abs(want).max()  # as above
        least, nearest, most = (
            wide(rounded(np.rint(n / scale) + zero if zero else n / scale, dtype), dtype)
            for n in (want - slack, want, want + slack)
        )
        assert ((least <= values) & (values <= most)).all()
        assert (values == nearest).mean() > 0.95
        seen |= {*values}
    assert seen > ({0, 255} if dtype == "uint8" else {-448, 448})


def projections(
    rng: np.random.Generator, g: Qkv, poisoned: bool = False
) -> tuple[list[Array], list[Array]]:
    """Draws the inputs of a depthwise_qkv; gives them and its outputs in float64.

    A poisoned one has NaN in the last token of the first image.
    """
    taps = g.kernel**2
    x = rounded(rng.standard_normal((g.images, g.h * g.w + g.first, g.c)) * 0.7 + 1, BF16)
    if poisoned:
        x[0, -1, 3] = rounded(np.array(np.nan, np.float32), BF16)
    weight, norm_bias = rng.standard_normal((2, g.c)).astype(np.float32)
    filters = [rounded(rng.standard_normal((taps, g.c)) * 0.5, BF16) for _ in range(3)]
    biases = list(rng.standard_normal((3, g.c)).astype(np.float32))
    inputs, wanted = [x, weight, norm_bias, *filters, *biases], []
    tokens = wide(rounded(normalised(wide(x, BF16), weight, norm_bias), BF16), BF16)
    image = tokens[:, g.first :].reshape(g.images, g.h, g.w, g.c)
    pads, strides = (g.pad_q, g.pad_kv, g.pad_kv), (1, g.stride, g.stride)
    for f, bias, pad, stride in zip(filters, biases, pads, strides, strict=True):
        p, q = ((n + 2 * pad - g.kernel) // stride + 1 for n in (g.h, g.w))
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        want = np.zeros((g.images, p, q, g.c)) + bias
        for tap in range(taps):
            r, s = divmod(tap, g.kernel)
            rows = slice(r, r + stride * (p - 1) + 1, stride)
            columns = slice(s, s + stride * (q - 1) + 1, stride)
            want += padded[:, rows, columns] * wide(f, BF16)[tap]
        rows = want.reshape(g.images, -1, g.c)
        wanted.append(np.concatenate([tokens[:, : g.first], rows], 1))
    return inputs, wanted


def silu(y: Array) -> Array:
    return y / (1 + np.exp(-y))


def product(rng: np.random.Generator, g: Conv, dtype: str) -> Product:
    return Product(
        g,
        rounded(rng.standard_normal((g.n, g.h, g.w, g.c)), dtype),
        rounded(rng.standard_normal((g.f, g.r, g.s, g.c)) * (g.c * g.r * g.s) ** -0.5, dtype),
        rng.standard_normal(g.f).astype(np.float32),
        rounded(rng.standard_normal((g.pixels, g.f)), dtype),
    )


def finished(sums: Array, p: Product, epilogue: str, dtype: str) -> Array:
    y = sums + p.bias
    if epilogue == "mul_gelu_grad":
        v = wide(p.residual, dtype)
        return y * ((1 + erf(v / math.sqrt(2))) / 2 + v * np.exp(-v * v / 2) / math.sqrt(2 * np.pi))
    if "add" in epilogue:
        y = y + wide(p.residual, dtype)
    if "relu" in epilogue:
        y = np.maximum(y, 0)
    if epilogue == "silu":
        y = silu(y)
    return y / 2 * (1 + erf(y / math.sqrt(2))) if epilogue == "gelu" else y


def convolved(p: Product, dtype: str) -> Array:
    return p.g.apply(wide(p.x, dtype), wide(p.w, dtype))


SHORTCUTS = [
    (Conv(2, 7, 7, 64, 136), Conv(2, 14, 14, 136, 136, stride=(2, 2))),
    (Conv(2, 6, 6, 128, 64), Conv(2, 6, 6, 64, 64)),
    (Conv(1, 6, 6, 64, 64, 3, 3, pad=(1, 1)), Conv(1, 12, 12, 64, 64, stride=(2, 2))),
]
RESIDUAL = [
    (Conv(1, 10, 9, 72, 136, 3, 3, pad=(1, 1)), 1, 2),
    (Conv(2, 9, 9, 64, 64, 3, 3, (2, 2), (1, 1)), 0.5, 4),
    (Conv(1, 11, 9, 64, 64, 3, 2, (2, 3), (1, 2), (2, 1)), 1, 2),
    (Conv(1, 1, 1, 8, 8), 1, 1),
]


@pytest.mark.parametrize(("tile", "case"), of_all(3, TILES, RESIDUAL), ids=str)
def test_hopper_adds_a_residual(
    find: Find, rng: np.random.Generator, tile: Tile, case: tuple[Conv, float, int]
) -> None:
    g, alpha, splits = case
    run_hopper(find, rng, tile, "add_relu", [g], alpha=alpha, splits=splits)


@pytest.mark.parametrize(("tile", "convolutions"), of_all(3, TILES, SHORTCUTS), ids=str)
def test_hopper_adds_a_shortcut(
    find: Find, rng: np.random.Generator, tile: Tile, convolutions: tuple[Conv, Conv]
) -> None:
    g, beside = convolutions
    run_hopper(find, rng, tile, "relu", [g], beside, splits=2)


@pytest.mark.parametrize(("tile", "rows"), of_all(2, TILES, [(150,), (65, 1, 37)]), ids=str)
def test_hopper_multiplies(
    find: Find, rng: np.random.Generator, tile: Tile, rows: tuple[int, ...]
) -> None:
    run_hopper(find, rng, tile, "none", [Conv(1, m, 1, 200, 136) for m in rows], splits=2)


@pytest.mark.parametrize("tile", TILES[6:], ids=lambda tile: tile.label)
@pytest.mark.parametrize(
    ("tiles", "processors"),
    [
        pytest.param(1, 2, id="shared alone"),
        pytest.param(3, 6, id="each shared", marks=pytest.mark.nightly),
        pytest.param(3, 2, id="a turn, then shared"),
        pytest.param(3, 4, id="too many to be shared, and a block without a tile"),
        pytest.param(7, 4, id="a turn, then too many", marks=pytest.mark.nightly),
    ],
)
def test_hopper_shares_the_last_turn(
    find: Find, rng: np.random.Generator, tile: Tile, tiles: int, processors: int
) -> None:
    g = Conv(1, 64 * tile.groups * tiles - 20, 1, 136, 72)
    run_hopper(find, rng, tile, "add_relu", [g], processors=processors)


@pytest.mark.parametrize("tile", [TILES[4], TILES[5]], ids=lambda tile: tile.label)
def test_hopper_gelu(find: Find, rng: np.random.Generator, tile: Tile) -> None:
    run_hopper(find, rng, tile, "gelu", [Conv(1, 70, 1, 64, 72)])


@pytest.mark.parametrize(
    ("tile", "epilogue"),
    [
        (TILES[4], "add_relu"), (TILES[4], "gelu"), (TILES[4], "mul_gelu_grad"),
        (TILES[5], "add_relu"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value")
def test_hopper_keeps_nan_and_infinity(
    find: Find, rng: np.random.Generator, tile: Tile, epilogue: str
) -> None:
    p = product(rng, Conv(1, 70, 1, 72, 72), BF16)
    x = wide(p.x, BF16)
    x[0, [3, 30, 69], 0, [5, 71, 0]] = np.nan, np.inf, -np.inf
    run_hopper(find, rng, tile, epilogue, [replace(p, x=rounded(x, BF16))], splits=2)


@pytest.mark.interpreter
@pytest.mark.parametrize("tile", [TILES[2], TILES[4]], ids=lambda tile: tile.label)
def test_hopper_waits_for_a_right_side_that_is_computed(
    find: Find, rng: np.random.Generator, tile: Tile
) -> None:
    p = product(rng, Conv(1, 70, 1, 200, 72), BF16)
    kernel, want = find(f"gemm_hopper_{tile.label}_none_1x1_{BF16}"), convolved(p, BF16)

    def run(*, constant: bool) -> Array:
        return hopper(kernel, tile, [p], dtype=BF16, constant=constant, late=True)[0]

    check(run(constant=False), finished(want, p, "none", BF16), BF16, SUMS)
    assert np.isnan(wide(run(constant=True), BF16)).any()


def test_hopper_float16(find: Find, rng: np.random.Generator) -> None:
    run_hopper(find, rng, TILES[4], "add_relu", [Conv(1, 70, 1, 72, 72)], dtype="float16")


@pytest.mark.parametrize("tile", [TILES[4], TILES[7]], ids=lambda tile: tile.label)
def test_hopper_float32(find: Find, rng: np.random.Generator, tile: Tile) -> None:
    p = product(rng, Conv(1, 70, 1, 72, 72), "float32")
    x, w = (to_tf32(a).view(np.float32) for a in (p.x, p.w))  # as the copy engine does
    run_hopper(find, rng, tile, "add_relu", [replace(p, x=x, w=w)], dtype="float32")


TOKENS = [(2, 196, 136, 72), (1, 64, 64, 64), (3, 65, 8, 129), (1, 1, 200, 1), (1, 63, 72, 196)]
"""N, T, C and F."""


@pytest.mark.parametrize("tile", TOKEN_TILES, ids=lambda tile: tile.label)
@pytest.mark.parametrize("epilogue", ["none", "add_relu"])
@pytest.mark.parametrize("sizes", TOKENS, ids=str)
def test_token_linear(
    find: Find, rng: np.random.Generator, tile: Tile, epilogue: str, sizes: tuple[int, ...]
) -> None:
    run_tokens(find, rng, tile, epilogue, sizes)


def test_token_linear_float16(find: Find, rng: np.random.Generator) -> None:
    run_tokens(find, rng, TOKEN_TILES[1], "gelu", (2, 70, 72, 130), "float16")


@pytest.mark.filterwarnings("ignore:invalid value")
def test_token_linear_keeps_nan_and_infinity(find: Find, rng: np.random.Generator) -> None:
    run_tokens(find, rng, TOKEN_TILES[1], "add_relu", (3, 65, 72, 66), odd=True)


GRADIENTS = {  # filters, columns and pixels end within a tile; taps, channels and parts in a stage
    "3x3": (Conv(2, 9, 8, 72, 136, 3, 3, pad=(1, 1)), 2),
    "3x3/2 dilated": (Conv(1, 14, 15, 64, 72, 3, 3, (2, 2), (1, 2), (2, 1)), 1),
    "1x1": (Conv(3, 7, 9, 200, 64), 3),
}


@pytest.mark.parametrize(
    ("sizes", "tile"), of_all(3, list(GRADIENTS), GRAD_TILES), ids=lambda x: getattr(x, "label", x)
)
def test_weight_grad(find: Find, rng: np.random.Generator, sizes: str, tile: GradTile) -> None:
    g, parts = GRADIENTS[sizes]
    run_gradient(find, rng, g, tile, parts=parts)


def test_weight_grad_float16(find: Find, rng: np.random.Generator) -> None:
    g = Conv(2, 9, 12, 72, 40)
    run_gradient(find, rng, g, GRAD_TILES[0], dtype="float16", parts=4)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_weight_grad_keeps_nan_and_infinity(find: Find, rng: np.random.Generator) -> None:
    run_gradient(find, rng, GRADIENTS["3x3"][0], GRAD_TILES[2], odd=True)


@pytest.mark.parametrize(
    ("g", "groups"),
    [
        (Conv(2, 7, 6, 9, 70, 3, 2, (2, 1), (1, 1), (1, 2)), 1),
        (Conv(1, 5, 6, 12, 20, 3, 3, pad=(1, 1)), 4),
    ],
    ids=str,
)
def test_weight_grad_on_cores(find: Find, rng: np.random.Generator, g: Conv, groups: int) -> None:
    run_gradient(find, rng, g, groups=groups, parts=2)


@pytest.mark.parametrize("dtype", [BF16, "float32"])
@pytest.mark.parametrize(
    ("g", "groups", "kind"),
    [
        (Conv(2, 7, 6, 9, 70, 3, 2, (2, 1), (1, 1), (1, 2)), 1, "128_1x1"),
        (Conv(1, 11, 9, 48, 80, 3, 3, (2, 1), (1, 1)), 2, "128_{0}x{0}"),
        (Conv(1, 21, 9, 3, 72, 7, 7, (2, 2), (3, 3)), 1, "160_1x{0}"),
    ],
    ids=["odd", "groups", "stem"],
)
def test_weight_grad_by_mma(
    find: Find, rng: np.random.Generator, g: Conv, groups: int, kind: str, dtype: str
) -> None:
    name = f"mma_{kind.format(16 // np.dtype(DTYPES[dtype]).itemsize)}"
    run_gradient(find, rng, g, dtype=dtype, groups=groups, parts=2, kind=name)


@pytest.mark.parametrize(
    ("g", "name"),
    [
        (Conv(2, 18, 14, 72, 72, 3, 3, pad=(1, 1)), "3x3_1x4_bfloat16"),
        (Conv(2, 17, 16, 36, 36, 3, 3, (2, 2), (1, 1)), "3x3_2x4_bfloat16"),
        (Conv(1, 17, 21, 8, 8, 4, 3, (3, 2), (2, 1), (2, 1)), "3x3_2x4_float32"),
        (Conv(2, 8, 15, 12, 12, 5, 5, pad=(2, 2)), "1x5_1x4_bfloat16"),
        (Conv(1, 9, 16, 4, 4, 5, 5, (2, 2), (2, 2)), "1x5_2x4_float32"),
        (Conv(1, 9, 8, 12, 12, 7, 7, pad=(3, 3)), "1x7_1x4_bfloat16"),
        (Conv(1, 11, 12, 12, 12, 2, 5, (1, 2), (2, 4), (3, 2)), "1x4_0x4_float32"),
        (Conv(2, 6, 7, 37, 37, 3, 2, (2, 1), (1, 1), (1, 2)), "1x4_0x1_bfloat16"),
        (Conv(1, 1, 1, 5, 5, 3, 3, pad=(1, 1)), "1x4_0x1_bfloat16"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_depthwise_weight_grad(find: Find, rng: np.random.Generator, g: Conv, name: str) -> None:
    size, dtype = name.rsplit("_", 1)
    kind, odd = f"depthwise_{size}", g.c > 5
    run_gradient(find, rng, g, dtype=dtype, groups=g.c, parts=2, kind=kind, odd=odd)


def run_gradient(
    find: Find,
    rng: np.random.Generator,
    g: Conv,
    tile: GradTile | None = None,
    *,
    dtype: str = BF16,
    parts: int = 1,
    groups: int = 1,
    kind: str = "cores",
    odd: bool = False,
) -> None:
    x = rng.standard_normal((g.n, g.h, g.w, g.c))
    dy = rng.standard_normal((g.n, *g.out, g.f)) * g.pixels**-0.5
    if odd:
        x[0, 3, 4, 5], x[-1, -1, -1, -1], dy[0, 0, 0, 3] = np.nan, np.inf, -np.inf
    if dtype == "float32":  # as TF32
        x, dy = (to_tf32(y).view(np.float32) for y in (x, dy))
    x, dy = rounded(x, dtype), rounded(dy, dtype)
    size = g.f * g.r * g.s * g.c // groups
    names = (tile.label if tile else kind, f"add_{1 if size % 4 else 4}")
    first, second = (find(f"conv2d_weight_grad_{name}_{dtype}") for name in names)
    got = weight_grad(
        (first, second), tile, g, x, dy,
        dtype=dtype, parts=parts, groups=groups, kind=kind,
    )  # fmt: skip

    left = wide(dy, dtype).reshape(g.pixels, groups, -1)
    want = np.zeros((groups, g.f // groups, g.r, g.s, g.c // groups))
    for r, s, part in g.taps(wide(x, dtype)):
        right = part.reshape(g.pixels, groups, -1)
        want[:, :, r, s] = np.einsum("mgf,mgc->gfc", left, right)
    check(got, want.reshape(got.shape), dtype, SUMS)


def run_tokens(
    find: Find,
    rng: np.random.Generator,
    tile: Tile,
    epilogue: str,
    sizes: tuple[int, ...],
    dtype: str = BF16,
    odd: bool = False,
) -> None:
    n, t, c, f = sizes
    x, residual = rng.standard_normal((n, t, c)), rng.standard_normal((n, f, c))
    if odd:  # not in the last image, nor in other channels
        x[0, [0, 40, 64], [5, 71, 0]] = np.nan, np.inf, -np.inf
        residual[1, 65, 71] = np.nan
    w, bias = np.zeros((f, t + -t % 8)), rng.standard_normal(f).astype(np.float32)
    w[:, :t] = rng.standard_normal((f, t)) * t**-0.5
    x, w, residual = (rounded(a, dtype) for a in (x, w, residual))
    got = token_linear(
        find(f"token_linear_{tile.label}_{epilogue}_{dtype}"),
        tile, x, w, bias, residual if "add" in epilogue else None, dtype=dtype,
    )  # fmt: skip
    y = np.einsum("ft,ntc->nfc", wide(w, dtype)[:, :t], wide(x, dtype)) + bias[:, None]
    y = y + wide(residual, dtype) if "add" in epilogue else y
    y = np.maximum(y, 0) if "relu" in epilogue else y
    y = y / 2 * (1 + erf(y / math.sqrt(2))) if epilogue == "gelu" else y
    check(got, y, dtype, SUMS)


EIGHT_BITS = [
    (E4M3, E4M3, BF16),
    (E4M3, E4M3, E4M3),
    ("int8", "int8", "int8"),
]
"""Dtypes of x, of w, and of the residual and y."""
SCALED = [Conv(1, 10, 9, 80, 144, 3, 3, pad=(1, 1)), Conv(2, 9, 8, 144, 48, stride=(2, 2))]


def in_eighths(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Draws any integers, or floats that are multiples of 1/8: float32 has their sums exactly."""
    if dtype in ("int8", "uint8"):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    return rounded(rng.integers(-12, 13, shape) / 8, dtype)


def scaled(rng: np.random.Generator, g: Conv, dtypes: tuple[str, str, str]) -> Product:
    """Draws a convolution; powers of 2 scale it so that some results are beyond the largest."""
    dtype, right, out = dtypes
    low = -11 if right == "int8" else 1
    return Product(
        g,
        in_eighths(rng, (g.n, g.h, g.w, g.c), dtype),
        in_eighths(rng, (g.f, g.r, g.s, g.c), right),
        (rng.integers(-40, 41, g.f) / 2).astype(np.float32),
        in_eighths(rng, (g.pixels, g.f), out),
        (2.0 ** rng.integers(low, low + 5, g.f)).astype(np.float32),
        0.5,
    )


def run_scaled(
    find: Find,
    rng: np.random.Generator,
    tile: Tile,
    epilogue: str,
    sizes: Sequence[Conv],
    dtypes: tuple[str, str, str],
    splits: int = 2,
) -> None:
    dtype, right, out = dtypes
    kind = (dtype if dtype == right else f"{dtype}x{right}") + (
        f"_to_{out}" if out != dtype else ""
    )
    products = [scaled(rng, g, dtypes) for g in sizes]
    got = hopper(
        find(f"gemm_hopper_{tile.label}_scale_{epilogue}_{len(sizes)}x1_{kind}"),
        tile,
        products,
        dtype=dtype,
        out=out,
        splits=splits if tile.kind == "split" else 1,
        adds="add" in epilogue,
    )
    for y, p in zip(got, products, strict=True):
        want = p.g.apply(wide(p.x, dtype), wide(p.w, right)) * p.scale + p.bias
        if "add" in epilogue:
            want = want + p.residual_scale * wide(p.residual, out)
        if "relu" in epilogue:
            want = np.maximum(want, 0)
        # Nothing but the last step rounds.
        want = wide(rounded(want, out), out)
        np.testing.assert_array_equal(wide(y, out), want)
        if out != BF16:
            largest = {E4M3: 448, "int8": 127, "uint8": 255}[out]
            assert (want == largest).any() and (np.abs(want) < largest).any()


@pytest.mark.parametrize(
    ("tile", "dtypes", "g"), of_all(2, [TILES[4], TILES[5]], EIGHT_BITS, SCALED), ids=str
)
def test_hopper_scales(
    find: Find, rng: np.random.Generator, tile: Tile, dtypes: tuple[str, str, str], g: Conv
) -> None:
    run_scaled(find, rng, tile, "add_relu", [g], dtypes)


QUANTIZED = [
    tile if i % 2 else replace(tile, stages=2 * tile.stages, row=64) for i, tile in enumerate(TILES)
]
"""Every other tile has stages of half as many bytes."""


@pytest.mark.parametrize("tile", QUANTIZED, ids=lambda tile: tile.label)
def test_hopper_multiplies_what_is_quantised(
    find: Find, rng: np.random.Generator, tile: Tile
) -> None:
    g = Conv(1, 10, 13, 64 if tile.row == 64 else 144, 80, 3, 3, pad=(1, 1))
    run_scaled(find, rng, tile, "add", [g], ("uint8", "int8", "uint8"))


@pytest.mark.parametrize("tile", [TILES[0], TILES[2]], ids=lambda tile: tile.label)
def test_hopper_stores_bytes_in_wide_boxes(
    find: Find, rng: np.random.Generator, tile: Tile
) -> None:
    run_scaled(find, rng, tile, "add_relu", [Conv(1, 211, 1, 144, 208)], ("int8", "int8", "int8"))


@pytest.mark.parametrize("out", [BF16, E4M3])
def test_hopper_multiplies_half_rows(find: Find, rng: np.random.Generator, out: str) -> None:
    tile = Tile(2, 128, 8, "overlap", row=64)
    run_scaled(
        find, rng, tile, "add_relu", [Conv(1, 10, 13, 64, 144, 3, 3, pad=(1, 1))], (E4M3, E4M3, out)
    )


def test_hopper_scales_products(find: Find, rng: np.random.Generator) -> None:
    sizes = [Conv(1, m, 1, 272, 144) for m in (65, 1, 37)]
    run_scaled(find, rng, TILES[4], "none", sizes, ("int8", "int8", "int8"))


BYTES = ("uint8", "int8", "uint8")
"""Of x, of w, and of the residual and y."""
FLOATS = (E4M3, E4M3, E4M3)
WIDE_SOURCES = [
    (Conv(1, 10, 13, 144, 80, 3, 3, pad=(1, 1)), Conv(1, 10, 13, 80, 80)),
    (Conv(2, 7, 9, 64, 144), Conv(2, 14, 17, 272, 144, stride=(2, 2))),
]
NARROW_SOURCES = [
    (Conv(1, 10, 13, 64, 80, 3, 3, pad=(1, 1)), Conv(1, 10, 13, 64, 80)),
    (Conv(2, 7, 9, 48, 144), Conv(2, 14, 17, 208, 144, stride=(2, 2))),
]
BYTE_SHORTCUTS = [
    *itertools.product([TILES[i] for i in (1, 5, 6)], WIDE_SOURCES),
    *itertools.product(
        [replace(TILES[i], stages=2 * TILES[i].stages, row=64) for i in (2, 5, 6)], NARROW_SOURCES
    ),
]
"""Tiles in stages of 128 bytes and of 64, among them split ones and peers."""


@pytest.mark.parametrize(("tile", "convolutions"), BYTE_SHORTCUTS, ids=str)
def test_hopper_adds_a_shortcut_of_bytes(
    find: Find, rng: np.random.Generator, tile: Tile, convolutions: tuple[Conv, Conv]
) -> None:
    """A block rounds the sums that it has of the first source to multiples of 16."""
    p, more, got, exact = run_byte_shortcut(find, rng, tile, "none", convolutions, BYTES)
    assert p.scale is not None and p.first is not None
    parts = 2 if tile.kind == "split" or tile.peers > 1 else 1
    if parts == 1:
        first = 16 * np.rint(convolved_bytes(p, BYTES) * p.first / 16)
        sums = first + convolved_bytes(more, BYTES)
        want = rounded(sums * p.scale + p.bias + more.bias, "uint8")
        np.testing.assert_array_equal(got, want)
        assert (want != rounded(exact, "uint8")).any()
    assert (np.abs(got - np.clip(exact, 0, 255)) <= 0.5 + parts * 8 * p.scale).all()
    assert (got == 0).any() and (got == 255).any() and len(np.unique(got)) > 200


@pytest.mark.parametrize(
    ("tile", "convolutions"),
    [(TILES[4], WIDE_SOURCES[1]), (replace(TILES[6], stages=12, row=64), NARROW_SOURCES[0])],
    ids=str,
)
def test_hopper_adds_a_shortcut_of_e4m3(
    find: Find, rng: np.random.Generator, tile: Tile, convolutions: tuple[Conv, Conv]
) -> None:
    _, _, got, exact = run_byte_shortcut(find, rng, tile, "relu", convolutions, FLOATS)
    want = wide(rounded(np.maximum(exact, 0), E4M3), E4M3)
    np.testing.assert_array_equal(wide(got, E4M3), want)
    assert (want == 448).any() and ((want > 0) & (want < 448)).any()


def convolved_bytes(p: Product, dtypes: tuple[str, str, str]) -> Array:
    return p.g.apply(wide(p.x, dtypes[0]), wide(p.w, dtypes[1]))


def run_byte_shortcut(
    find: Find,
    rng: np.random.Generator,
    tile: Tile,
    epilogue: str,
    convolutions: tuple[Conv, Conv],
    dtypes: tuple[str, str, str],
) -> tuple[Product, Product, Array, Array]:
    """Runs a shortcut: both convolutions, the result, and what it rounds, without an activation."""
    p, more = (scaled(rng, g, dtypes) for g in convolutions)
    p.first = (2.0 ** rng.integers(-3, 2, p.g.f)).astype(np.float32)
    kind = dtypes[0] if dtypes[0] == dtypes[1] else f"{dtypes[0]}x{dtypes[1]}"
    (got,) = hopper(
        find(f"gemm_hopper_{tile.label}_scale_{epilogue}_1x2_{kind}"),
        tile,
        [p],
        more,
        dtype=dtypes[0],
        splits=2 if tile.kind == "split" else 1,
        processors=2 * tile.peers,
    )
    sums = convolved_bytes(p, dtypes) * p.first + convolved_bytes(more, dtypes)
    return p, more, got, sums * p.scale + p.bias + more.bias


def run_hopper(
    find: Find,
    rng: np.random.Generator,
    tile: Tile,
    epilogue: str,
    sizes: Sequence[Conv | Product],
    beside: Conv | None = None,
    *,
    dtype: str = BF16,
    alpha: float = 1,
    splits: int = 1,
    processors: int = 2,
) -> None:
    products = [g if isinstance(g, Product) else product(rng, g, dtype) for g in sizes]
    more = product(rng, beside, dtype) if beside else None
    sources = 2 if more else 1
    got = hopper(
        find(f"gemm_hopper_{tile.label}_{epilogue}_{len(sizes)}x{sources}_{dtype}"),
        tile,
        products,
        more,
        dtype=dtype,
        alpha=alpha,
        splits=splits if tile.kind == "split" else 1,
        processors=processors,
        adds="add" in epilogue or "mul" in epilogue,
    )
    for y, p in zip(got, products, strict=True):
        sums = alpha * convolved(p, dtype)
        if more:
            sums = sums + alpha * convolved(more, dtype) + more.bias
        check(y, finished(sums, p, epilogue, dtype), dtype, GELU if "gelu" in epilogue else SUMS)


WINDOWS = [
    (Conv(2, 10, 9, 72, 40, 3, 3, pad=(1, 1)), 1, 2, 9),
    (Conv(2, 7, 7, 520, 72, 3, 3, pad=(1, 1)), 1, 8, 9),
    (Conv(1, 7, 7, 136, 72, 3, 3, pad=(1, 1)), 0.5, 4, 3),
    (Conv(2, 5, 6, 200, 136, 5, 2, pad=(2, 1)), 1, 2, 4),
    (Conv(1, 17, 130, 64, 24, 3, 3, pad=(1, 1)), 1, 2, 9),
    (Conv(3, 9, 11, 64, 72, 3, 2, (1, 1), (2, 1), (2, 1)), 1, 4, 9),
    (Conv(2, 9, 9, 136, 64, 3, 3, (2, 2), (1, 1)), 1, 8, 2),
    (Conv(2, 9, 10, 264, 72, stride=(2, 2)), 1, 2, 9),
    (Conv(1, 150, 1, 520, 136), 1, 8, 9),
    (Conv(1, 75, 1, 520, 136), 0.5, 2, 2),
    (Conv(1, 1, 1, 136, 8), 1, 2, 9),
    (Conv(3, 7, 7, 136, 72, 7, 7), 1, 4, 9),
]
"""Convolutions, alpha, the blocks that share a tile, and stages of filters at most."""


@pytest.mark.parametrize(
    ("config", "epilogue", "window"), of_all(8, RESIDENT, ["none", "add_relu"], WINDOWS), ids=str
)
def test_resident(
    find: Find,
    rng: np.random.Generator,
    config: OneTile,
    epilogue: str,
    window: tuple[Conv, float, int, int],
) -> None:
    g, alpha, splits, stages = window
    run_resident(find, rng, config, epilogue, g, alpha=alpha, splits=splits, stages=stages)


@pytest.mark.parametrize(
    ("config", "epilogue", "dtype"),
    [
        (RESIDENT[0], "gelu", "float16"),
        (RESIDENT[1], "add", "float32"),
        (RESIDENT[2], "relu", "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("g", [Conv(2, 7, 9, 72, 40, 3, 3, pad=(1, 1)), Conv(1, 70, 1, 136, 72)])
def test_resident_of_other_dtypes(
    find: Find, rng: np.random.Generator, config: OneTile, epilogue: str, dtype: str, g: Conv
) -> None:
    run_resident(find, rng, config, epilogue, g, dtype=dtype, splits=2)


@pytest.mark.interpreter
@pytest.mark.parametrize("config", [RESIDENT[1], RESIDENT[2]], ids=lambda config: config.label)
@pytest.mark.parametrize("stages", [9, 2])
def test_resident_waits_for_a_right_side_that_is_computed(
    find: Find, rng: np.random.Generator, config: OneTile, stages: int
) -> None:
    p = product(rng, Conv(1, 70, 1, 264, 72), BF16)
    kernel, want = find(f"gemm_resident_{config.label}_none_{BF16}"), convolved(p, BF16)

    def run(seed: int, *, constant: bool) -> Array:
        return resident(
            kernel, config, [p], dtype=BF16, splits=2 if config.split else 1, stages=stages,
            constant=constant, late=True, seed=seed,
        )[0]  # fmt: skip

    check(run(0, constant=False), finished(want, p, "none", BF16), BF16, SUMS)
    # Copies may come late, and the thread that loads x wait first.
    early = (run(seed, constant=True) for seed in range(16))
    assert any(np.isnan(wide(y, BF16)).any() for y in early)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_resident_keeps_nan_and_infinity(find: Find, rng: np.random.Generator) -> None:
    p = product(rng, Conv(1, 70, 1, 72, 72), BF16)
    x = wide(p.x, BF16)
    x[0, [3, 30, 69], 0, [5, 71, 0]] = np.nan, np.inf, -np.inf
    run_resident(find, rng, RESIDENT[1], "add_relu", replace(p, x=rounded(x, BF16)), splits=2)


MEANS = [
    Conv(1, 49, 1, 136, 72),
    Conv(1, 64, 1, 520, 40),
    Conv(1, 17, 1, 72, 32),
    Conv(1, 1, 1, 8, 8),
]
"""Images as matrices of all of their pixels."""


@pytest.mark.parametrize("stages", [16, 2])
@pytest.mark.parametrize("g", MEANS, ids=str)
def test_resident_gives_the_mean_of_what_it_would_store(
    find: Find, rng: np.random.Generator, g: Conv, stages: int
) -> None:
    p = product(rng, g, BF16)
    y, mean = means(find, p, stages=stages)
    check(mean, wide(y, BF16).mean(0, keepdims=True), BF16, SUMS)
    check(y, finished(convolved(p, BF16), p, "add_relu", BF16), BF16, SUMS)


def test_resident_gives_the_mean_in_float16(find: Find, rng: np.random.Generator) -> None:
    p, kernel = product(rng, MEANS[0], "float16"), find("gemm_resident_64x32_none_mean_float16")
    (mean,) = resident(kernel, RESIDENT[3], [p], dtype="float16", alpha=0.5, pools=True)
    y = finished(0.5 * convolved(p, "float16"), p, "none", "float16")
    want = wide(rounded(y, "float16"), "float16").mean(0, keepdims=True)
    check(mean, want, "float16", GELU)  # some y are halfway between two numbers


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_mean_of_nan_and_infinity_is_that_of_the_stored(
    find: Find, rng: np.random.Generator
) -> None:
    p = product(rng, MEANS[0], BF16)
    added = wide(p.residual, BF16)
    added[[3, 20, 48, 5, 0], [5, 71, 0, 33, 8]] = np.nan, np.inf, -np.inf, np.inf, np.nan
    added[9, 71] = -np.inf  # rectified
    y, mean = means(find, replace(p, residual=rounded(added, BF16)))
    want = wide(y, BF16).mean(0, keepdims=True)
    assert np.isnan(want).sum() == 2 and np.isinf(want).sum() == 2
    check(mean, want, BF16, SUMS)


def means(find: Find, p: Product, stages: int = 9) -> tuple[Array, Array]:
    """Gives what a kernel stores, and what another one gives as the mean of its rows."""

    def run(pools: bool) -> Array:
        kernel = find(f"gemm_resident_64x32_add_relu{'_mean' * pools}_{BF16}")
        return resident(kernel, RESIDENT[3], [p], dtype=BF16, stages=stages, pools=pools)[0]

    return run(False), run(True)


@pytest.mark.parametrize(
    ("config", "stages"), [(RESIDENT[0], 9), (RESIDENT[3], 9), (RESIDENT[3], 2)], ids=str
)
def test_resident_multiplies_several(
    find: Find, rng: np.random.Generator, config: OneTile, stages: int
) -> None:
    sizes = [Conv(1, m, 1, 264, 72) for m in (130, 37, 1)]
    run_resident(find, rng, config, "none", *sizes, splits=2, stages=stages)


@pytest.mark.parametrize(
    ("epilogue", "dtype"), [("none", BF16), ("gelu", "float16")], ids=lambda value: value
)
@pytest.mark.parametrize(
    "g", [Conv(1, 2, 1, 2048, 24), Conv(1, 1, 1, 392, 40), Conv(1, 1, 1, 8, 8)]
)
def test_gemv(find: Find, rng: np.random.Generator, epilogue: str, dtype: str, g: Conv) -> None:
    p = product(rng, g, dtype)
    got = gemv(find(f"gemm_gemv_{epilogue}_{dtype}"), p, dtype)
    sums = GELU if epilogue == "gelu" else SUMS
    check(got, finished(convolved(p, dtype), p, epilogue, dtype), dtype, sums)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_gemv_keeps_nan_and_infinity(find: Find, rng: np.random.Generator, value: float) -> None:
    p = product(rng, Conv(1, 2, 1, 264, 24), BF16)
    x = wide(p.x, BF16)
    x[0, 1, 0, 263] = value
    p = replace(p, x=rounded(x, BF16))
    got = gemv(find(f"gemm_gemv_none_{BF16}"), p, BF16)
    check(got, finished(convolved(p, BF16), p, "none", BF16), BF16, SUMS)


def run_resident(
    find: Find,
    rng: np.random.Generator,
    config: OneTile,
    epilogue: str,
    *sizes: Conv | Product,
    dtype: str = BF16,
    alpha: float = 1,
    splits: int = 1,
    stages: int = 9,
) -> None:
    products = [g if isinstance(g, Product) else product(rng, g, dtype) for g in sizes]
    if dtype == "float32":  # rounded as by the copy engine
        for p in products:
            p.x, p.w = (to_tf32(a).view(np.float32) for a in (p.x, p.w))
    several = f"_{len(products)}x1" if len(products) > 1 else ""
    got = resident(
        find(f"gemm_resident_{config.label}_{epilogue}{several}_{dtype}"),
        config,
        products,
        dtype=dtype,
        alpha=alpha,
        splits=splits if config.split else 1,
        stages=stages,
    )
    sums = GELU if epilogue == "gelu" else SUMS
    for y, p in zip(got, products, strict=True):
        check(y, finished(alpha * convolved(p, dtype), p, epilogue, dtype), dtype, sums)


@pytest.mark.parametrize(
    ("config", "epilogue", "dtype", "g", "alpha", "stages", "boxes"),
    [
        (PINGPONG[0], "gelu", BF16, Conv(1, 500, 1, 136, 200), 1, 8, 2),
        (PINGPONG[0], "gelu", BF16, Conv(1, 450, 1, 384, 192), 0.5, 7, 1),
        (PINGPONG[0], "gelu", BF16, Conv(1, 70, 1, 64, 8), 1, 10, 3),
        (PINGPONG[1], "relu", BF16, Conv(2, 10, 9, 24, 136, 3, 3, pad=(1, 1)), 0.5, 5, 1),
        (PINGPONG[1], "relu", BF16, Conv(2, 25, 23, 72, 72, stride=(2, 2)), 1, 9, 2),
        (PINGPONG[1], "none", "float16", Conv(1, 330, 1, 72, 72), 1, 8, 1),
        (PINGPONG[0], "relu", "float32", Conv(1, 330, 1, 40, 104), 0.5, 5, 2),
    ],
    ids=str,
)
def test_pingpong(
    find: Find,
    rng: np.random.Generator,
    config: PingPong,
    epilogue: str,
    dtype: str,
    g: Conv,
    alpha: float,
    stages: int,
    boxes: int,
) -> None:
    p = product(rng, g, dtype)
    run_pingpong(find, config, epilogue, p, dtype=dtype, alpha=alpha, stages=stages, boxes=boxes)


@pytest.mark.parametrize("processors", [3, 4, 9])
@pytest.mark.parametrize("pixels", [(700, 130, 37), (1, 70, 300)])
def test_pingpong_multiplies_several(
    find: Find, rng: np.random.Generator, pixels: tuple[int, ...], processors: int
) -> None:
    products = [product(rng, Conv(1, m, 1, 136, 200), BF16) for m in pixels]
    kernel = find(f"gemm_pingpong_{PINGPONG[1].label}_none_3x1_{BF16}")
    got = pingpong(kernel, PINGPONG[1], products, dtype=BF16, processors=processors)
    for y, p in zip(got, products, strict=True):
        check(y, finished(convolved(p, BF16), p, "none", BF16), BF16, SUMS)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_pingpong_keeps_nan_and_infinity(find: Find, rng: np.random.Generator) -> None:
    p = product(rng, Conv(1, 270, 1, 72, 72), BF16)
    x = wide(p.x, BF16)
    x[0, [3, 30, 269], 0, [5, 71, 0]] = np.nan, np.inf, -np.inf
    run_pingpong(find, PINGPONG[1], "relu", replace(p, x=rounded(x, BF16)))


@pytest.mark.interpreter
def test_pingpong_waits_for_a_right_side_that_is_computed(
    find: Find, rng: np.random.Generator
) -> None:
    p = product(rng, Conv(1, 70, 1, 136, 72), BF16)
    kernel, want = find(f"gemm_pingpong_{PINGPONG[1].label}_relu_{BF16}"), convolved(p, BF16)

    def run(*, constant: bool) -> Array:
        return pingpong(kernel, PINGPONG[1], [p], dtype=BF16, constant=constant, late=True)[0]

    check(run(constant=False), finished(want, p, "relu", BF16), BF16, SUMS)
    assert np.isnan(wide(run(constant=True), BF16)).any()


def run_pingpong(
    find: Find,
    config: PingPong,
    epilogue: str,
    p: Product,
    *,
    dtype: str = BF16,
    alpha: float = 1,
    stages: int = 8,
    boxes: int = 1,
) -> None:
    if dtype == "float32":  # rounded as by the copy engine
        p.x, p.w = (to_tf32(a).view(np.float32) for a in (p.x, p.w))
    kernel = find(f"gemm_pingpong_{config.label}_{epilogue}_{dtype}")
    (got,) = pingpong(kernel, config, [p], dtype=dtype, alpha=alpha, stages=stages, boxes=boxes)
    sums = GELU if epilogue == "gelu" else SUMS
    check(got, finished(alpha * convolved(p, dtype), p, epilogue, dtype), dtype, sums)


MEASURED = [
    *((f"hopper_{TILES[i].label}", 1, BF16) for i in (1, 4, 7)),
    (f"hopper_{TILES[4].label}", 1, "float16"),
    (f"resident_{RESIDENT[0].label}", 2, BF16),
    *((f"resident_{RESIDENT[i].label}", 1, BF16) for i in (2, 3)),
]
"""Kernels that store moments, the blocks that share a tile, and the dtype."""


@pytest.mark.parametrize(("kernel", "splits", "dtype"), MEASURED, ids=str)
@pytest.mark.parametrize("g", [Conv(1, 150, 1, 136, 160), Conv(1, 7, 1, 72, 32)], ids=str)
def test_moments_of_a_result(
    find: Find, rng: np.random.Generator, kernel: str, splits: int, dtype: str, g: Conv
) -> None:
    p, norm = product(rng, g, dtype), Norm(np.full((g.pixels, g.f // 32, 2), np.nan, np.float32))
    y = run_normed(find, f"{kernel}_add_moments", p, norm, dtype, splits)
    check(y, finished(convolved(p, dtype), p, "add", dtype), dtype, SUMS)
    want = moments_of(wide(y, dtype))
    np.testing.assert_allclose(norm.moments, want, rtol=1e-5, atol=1e-4)


NORMALIZES = [
    *((f"hopper_{TILES[i].label}", 1, BF16) for i in (1, 6)),
    (f"resident_{RESIDENT[0].label}", 2, BF16),
    (f"resident_{RESIDENT[3].label}", 1, BF16),
    (f"resident_{RESIDENT[3].label}", 1, "float16"),
    (f"pingpong_{PINGPONG[0].label}", 1, BF16),
]
"""Kernels that normalise x, the blocks that share a tile, and the dtype."""


@pytest.mark.parametrize(("kernel", "splits", "dtype"), NORMALIZES, ids=str)
@pytest.mark.parametrize(
    "g", [Conv(1, 150, 1, 96, 200), Conv(1, 9, 1, 128, 40), Conv(1, 70, 1, 384, 72)], ids=str
)
def test_products_of_normalised_rows(
    find: Find, rng: np.random.Generator, kernel: str, splits: int, dtype: str, g: Conv
) -> None:
    check_normed(find, kernel, shifted(product(rng, g, dtype), rng, dtype), dtype, splits)


@pytest.mark.parametrize(
    ("kernel", "splits"),
    [(NORMALIZES[0][0], 1), (NORMALIZES[3][0], 1), (f"resident_{RESIDENT[1].label}", 8)],
)
def test_more_moments_than_are_loaded_ahead(
    find: Find, rng: np.random.Generator, kernel: str, splits: int
) -> None:
    # Of eight blocks each finishes one pair of a thread's sums, every second of its second row.
    g = Conv(1, 20, 1, 32 * 27, 40)
    check_normed(find, kernel, shifted(product(rng, g, BF16), rng, BF16), BF16, splits)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kernel", [NORMALIZES[0][0], NORMALIZES[3][0], NORMALIZES[5][0]])
def test_normalised_rows_keep_nan_and_infinity_and_may_be_constant(
    find: Find, rng: np.random.Generator, kernel: str
) -> None:
    p = product(rng, Conv(1, 70, 1, 96, 72), BF16)
    x = wide(p.x, BF16)
    x[0, [3, 30, 69], 0, [5, 71, 0]] = np.nan, np.inf, -np.inf
    x[0, 12], x[0, 13] = 30, 0
    y, want = normed(find, kernel, replace(p, x=rounded(x, BF16)), BF16)
    bad = [3, 30, 69]
    assert np.isnan(y[bad]).all()
    assert np.isfinite(np.delete(y, bad, 0)).all()
    # Of a constant row rounding leaves a little, times 1 / sqrt(eps).
    np.testing.assert_allclose(y[[12, 13]], want[[12, 13]], atol=0.02)


def shifted(p: Product, rng: np.random.Generator, dtype: str) -> Product:
    """Gives rows means and deviations of their own."""
    rows = p.x.shape[1]
    x = wide(p.x, dtype) * rng.uniform(0.1, 4, (1, rows, 1, 1)) + rng.normal(0, 2, (1, rows, 1, 1))
    return replace(p, x=rounded(x, dtype))


def check_normed(find: Find, kernel: str, p: Product, dtype: str, splits: int = 1) -> None:
    y, want = normed(find, kernel, p, dtype, splits)
    check(rounded(y, dtype), want, dtype, GELU)


def normed(find: Find, kernel: str, p: Product, dtype: str, splits: int = 1) -> tuple[Array, Array]:
    """Gives what a kernel makes of x, from its moments, and what it should."""
    x, eps = wide(p.x, dtype).reshape(p.g.pixels, -1), 1e-5
    w = wide(p.w, dtype).reshape(p.g.f, -1).astype(np.float32)
    w = norm_filter(w, np.ones(w.shape[1]), to=dtype)  # whose rows add up to 0
    p = replace(p, w=rounded(w.reshape(p.w.shape), dtype))
    y = run_normed(find, f"{kernel}_norm_gelu", p, Norm(moments_of(x), eps), dtype, splits)
    with np.errstate(invalid="ignore"):
        normal = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
        want = finished(normal @ w.T.astype(np.float64), p, "gelu", dtype)
    return wide(y, dtype), want


def moments_of(x: Array) -> Array:
    """Gives the sums of each 32 columns of a row, and of their squares."""
    groups = x.reshape(len(x), -1, 32)
    return np.stack([groups.sum(2), (groups**2).sum(2)], 2).astype(np.float32)


def run_normed(find: Find, name: str, p: Product, norm: Norm, dtype: str, splits: int) -> Array:
    kind, tile, *_ = name.split("_")
    one = "_1x1" if kind == "hopper" else ""
    kernel = find(f"gemm_{name}{one}_{dtype}")
    if kind == "hopper":
        config = next(each for each in TILES if each.label == tile)
        return hopper(kernel, config, [p], dtype=dtype, adds="add" in name, norm=norm)[0]
    if kind == "resident":
        block = next(each for each in RESIDENT if each.label == tile)
        return resident(kernel, block, [p], dtype=dtype, splits=splits, norm=norm)[0]
    return pingpong(kernel, PINGPONG[0], [p], dtype=dtype, norm=norm)[0]


TURNED_WINDOWS = [
    (TURNED[0], Conv(1, 17, 56, 64, 64, 3, 3, pad=(1, 1)), 0, "add_relu", 1),
    (TURNED[0], Conv(2, 17, 40, 40, 24, 3, 2, pad=(1, 1), after=(0, -1)), 1, "relu", 0.5),
    (TURNED[1], Conv(1, 14, 28, 72, 136, 3, 3, pad=(1, 1)), 0, "relu", 1),
    (TURNED[1], Conv(2, 9, 13, 64, 72, 5, 2, pad=(2, 1)), 0, "add_relu", 0.5),
    (TURNED[1], Conv(3, 14, 14, 72, 136, 3, 3, pad=(1, 1)), 1, "add_relu", 1),
    (TURNED[1], Conv(1, 261, 1, 64, 64, 30, 1), 0, "relu", 1),  # a copy has at most 256 rows
]
"""Tiles of ops/gemm/turned.mojo, convolutions, columns that share a box, epilogues and alpha."""


@pytest.mark.parametrize(("config", "g", "columns", "epilogue", "alpha"), TURNED_WINDOWS, ids=str)
def test_turned(
    find: Find,
    rng: np.random.Generator,
    config: Turned,
    g: Conv,
    columns: int,
    epilogue: str,
    alpha: float,
) -> None:
    p = product(rng, g, BF16)
    got = turned(
        find(f"gemm_turned_{config.label}_{epilogue}_{BF16}"),
        config, p, dtype=BF16, columns=columns, alpha=alpha, adds="add" in epilogue,
    )  # fmt: skip
    check(got, finished(alpha * convolved(p, BF16), p, epilogue, BF16), BF16, SUMS)


TURNED_OF_BYTES = [
    (TURNED_BYTES[0], Conv(1, 17, 56, 64, 64, 3, 3, pad=(1, 1)), 0, "add", BYTES),
    (TURNED_BYTES[0], Conv(2, 17, 40, 48, 32, 3, 2, pad=(1, 1), after=(0, -1)), 1, "none", BYTES),
    (TURNED_BYTES[0], Conv(1, 13, 27, 64, 64, 3, 3, pad=(1, 1)), 0, "relu", FLOATS),
    (TURNED_BYTES[1], Conv(1, 14, 28, 144, 112, 3, 3, pad=(1, 1)), 0, "none", BYTES),
    (TURNED_BYTES[1], Conv(2, 9, 13, 128, 80, 5, 2, pad=(2, 1)), 0, "add", BYTES),
    (TURNED_BYTES[1], Conv(3, 14, 14, 80, 144, 3, 3, pad=(1, 1)), 1, "add", BYTES),
    (TURNED_BYTES[1], Conv(1, 14, 14, 144, 144, 3, 3, pad=(1, 1)), 0, "relu", FLOATS),
]
"""Tiles, convolutions, columns that share a box, epilogues and dtypes."""


@pytest.mark.parametrize(("config", "g", "columns", "epilogue", "dtypes"), TURNED_OF_BYTES, ids=str)
def test_turned_of_bytes(
    find: Find,
    rng: np.random.Generator,
    config: Turned,
    g: Conv,
    columns: int,
    epilogue: str,
    dtypes: tuple[str, str, str],
) -> None:
    """Nothing but the last step rounds."""
    p, out = scaled(rng, g, dtypes), dtypes[2]
    kind = E4M3 if dtypes == FLOATS else "uint8xint8"
    got = turned(
        find(f"gemm_turned_{config.label}_scale_{epilogue}_{kind}"),
        config, p, dtype=dtypes[0], columns=columns, adds=epilogue == "add",
    )  # fmt: skip
    want = convolved_bytes(p, dtypes) * p.scale + p.bias
    if epilogue == "add":
        want = want + p.residual_scale * wide(p.residual, out)
    if epilogue == "relu":
        want = np.maximum(want, 0)
    np.testing.assert_array_equal(wide(got, out), wide(rounded(want, out), out))
    largest = 448 if out == E4M3 else 255
    assert (want > largest).any() and ((want > 0) & (want < largest)).any()


RESULTS = {"uint8": (1 / 8, 3.0), E4M3: (1 / 16, 0.0)}
"""Scale and zero point behind a GELU, by the dtype of the result."""


def check_rescaled(got: Array, p: Product, sums: Array, out: str) -> None:
    """Compares with the GELU in steps of the result, which is good to 5.5e-5 before it rounds."""
    scale, zero = p.result
    y = sums * p.scale + p.bias
    want = y / 2 * (1 + erf(y / math.sqrt(2))) / scale
    low, high = (wide(rounded(want + zero + off / scale, out), out) for off in (-1e-4, 1e-4))
    got = wide(got, out)
    assert ((low <= got) & (got <= high)).all()
    # Floats of 8 bits lie closer together around 0 than the GELU is good.
    assert (low == high)[np.abs(want) > 1].mean() > 0.95
    assert (got == {E4M3: 448, "uint8": 255}[out]).any()
    assert ((want < 0) & (got <= zero)).any()


@pytest.mark.parametrize("dtypes", [BYTES, FLOATS], ids=str)
@pytest.mark.parametrize("tile", [TILES[4], TILES[5]], ids=lambda tile: tile.label)
def test_hopper_scales_behind_an_activation(
    find: Find, rng: np.random.Generator, tile: Tile, dtypes: tuple[str, str, str]
) -> None:
    g, out = Conv(1, 211, 1, 144, 80), dtypes[2]
    p = gentle(scaled(rng, g, dtypes), out)
    kind = E4M3 if dtypes == FLOATS else "uint8xint8"
    kernel = find(f"gemm_hopper_{tile.label}_scale_gelu_1x1_{kind}")
    splits = 2 if tile.kind == "split" else 1
    (got,) = hopper(kernel, tile, [p], dtype=dtypes[0], out=out, splits=splits, adds=False)
    check_rescaled(got, p, convolved_bytes(p, dtypes), out)


@pytest.mark.parametrize("dtypes", [BYTES, FLOATS], ids=str)
@pytest.mark.parametrize("config", PINGPONG, ids=lambda config: config.label)
def test_pingpong_scales_behind_an_activation(
    find: Find, rng: np.random.Generator, config: PingPong, dtypes: tuple[str, str, str]
) -> None:
    p = gentle(scaled(rng, Conv(1, 450, 1, 272, 208), dtypes), dtypes[2])
    kind = E4M3 if dtypes == FLOATS else "uint8xint8"
    kernel = find(f"gemm_pingpong_{config.label}_scale_gelu_{kind}")
    (got,) = pingpong(kernel, config, [p], dtype=dtypes[0], boxes=2)
    check_rescaled(got, p, convolved_bytes(p, dtypes), dtypes[2])


@pytest.mark.parametrize("dtypes", [("uint8", "int8", BF16), (E4M3, E4M3, BF16)], ids=str)
def test_pingpong_scales_products(
    find: Find, rng: np.random.Generator, dtypes: tuple[str, str, str]
) -> None:
    products = [scaled(rng, Conv(1, m, 1, 144, 200), dtypes) for m in (700, 130, 37)]
    kind = f"{E4M3 if dtypes[0] == E4M3 else 'uint8xint8'}_to_{BF16}"
    kernel = find(f"gemm_pingpong_{PINGPONG[1].label}_scale_none_3x1_{kind}")
    got = pingpong(kernel, PINGPONG[1], products, dtype=dtypes[0], out=BF16, processors=4)
    for y, p in zip(got, products, strict=True):
        want = convolved_bytes(p, dtypes) * p.scale + p.bias
        np.testing.assert_array_equal(wide(y, BF16), wide(rounded(want, BF16), BF16))


def gentle(p: Product, out: str) -> Product:
    """Gives a product scales that spread its sums over the result's range and below 0."""
    p.scale = np.full(p.g.f, 2.0 ** (-13 if out == "uint8" else -1), np.float32)
    p.result = RESULTS[out]
    return p


def test_turned_scales_behind_an_activation(find: Find, rng: np.random.Generator) -> None:
    g, config = Conv(1, 14, 14, 80, 144, 3, 3, pad=(1, 1)), TURNED_BYTES[1]
    for dtypes, kind in ((BYTES, "uint8xint8"), (FLOATS, E4M3)):
        p = gentle(scaled(rng, g, dtypes), dtypes[2])
        got = turned(
            find(f"gemm_turned_{config.label}_scale_gelu_{kind}"),
            config, p, dtype=dtypes[0], columns=0, adds=False,
        )  # fmt: skip
        check_rescaled(got, p, convolved_bytes(p, dtypes), dtypes[2])


TWO_FOUR = [
    (Conv(2, 10, 9, 72, 136, 3, 3, pad=(1, 1)), "add_relu"),
    (Conv(1, 17, 16, 128, 64, 3, 3, pad=(1, 1)), "relu"),
    (Conv(3, 9, 11, 64, 72, 3, 2, (1, 1), (2, 1), (2, 1)), "add_relu"),
    (Conv(2, 9, 9, 64, 64, 3, 3, (2, 2), (1, 1)), "relu"),
    (Conv(1, 150, 1, 200, 136), "add_relu"),
    (Conv(1, 1, 1, 8, 8), "relu"),
]


def shares(g: Conv) -> bool:
    """Tells whether taps can read one window."""
    return g.r * g.s > 1 and g.stride == (1, 1)


@pytest.mark.parametrize(
    ("tile", "g", "epilogue"),
    [(t, g, e) for t in SPARSE for g, e in TWO_FOUR if shares(g) or not t.shares],
    ids=str,
)
def test_two_four(
    find: Find, rng: np.random.Generator, tile: Sparse, g: Conv, epilogue: str
) -> None:
    run_two_four(find, rng, tile, g, epilogue, BF16)


def test_two_four_float16(find: Find, rng: np.random.Generator) -> None:
    run_two_four(find, rng, SPARSE[2], Conv(1, 7, 7, 64, 64, 3, 3, pad=(1, 1)), "gelu", "float16")


def run_two_four(
    find: Find, rng: np.random.Generator, tile: Sparse, g: Conv, epilogue: str, dtype: str
) -> None:
    p = product(rng, g, dtype)
    fours = p.w.reshape(g.f, g.r, g.s, -1, 4)
    kept = rng.permuted(np.broadcast_to(np.arange(4), fours.shape), axis=-1) < 2
    p.w = np.where(kept, fours, 0).astype(p.w.dtype).reshape(p.w.shape)
    got = two_four(
        find(f"sparse_conv2d_two_four_{tile.label}_{epilogue}_{dtype}"),
        tile,
        p,
        arrange.two_four(p.w.transpose(1, 2, 3, 0)),
        dtype=dtype,
        adds="add" in epilogue,
    )
    check(got, finished(convolved(p, dtype), p, epilogue, dtype), dtype, SUMS)


ZEROS = [
    (Conv(3, 9, 9, 72, 136, 3, 3, pad=(1, 1)), 0.3, 1),
    (Conv(2, 9, 14, 136, 328, 3, 3, stride=(2, 2), pad=(1, 1)), 0.05, 0.5),
    (Conv(1, 300, 1, 328, 72), 0.5, 1),
    (Conv(1, 70, 1, 64, 8), 1, 1),
    (Conv(2, 13, 13, 64, 200, 3, 3, pad=(2, 1), dilation=(2, 1)), 0.1, 1),
]


ENDS = [("none", BF16), ("add_relu", BF16), ("gelu", "float16"), ("add", "float32")]
"""Epilogues and dtypes."""


@pytest.mark.parametrize(("tile", "end", "zeros"), of_all(3, BLOCKS, ENDS, ZEROS), ids=str)
def test_blocks_of_zeros_are_left_out(
    find: Find,
    rng: np.random.Generator,
    tile: Blocks,
    end: tuple[str, str],
    zeros: tuple[Conv, float, float],
) -> None:
    """Lists differ in length, and some are empty."""
    (epilogue, dtype), (g, density, alpha) = end, zeros
    p = product(rng, g, dtype)
    width = 32 if dtype == "float32" else 64
    grid = rng.random((-(-g.f // 64), g.r, g.s, -(-g.c // width))) < density
    grid[-1] &= density == 1
    keeps = grid.repeat(64, 0).repeat(width, 3)[: g.f, ..., : g.c]
    p.w = np.where(keeps, p.w, np.zeros(1, p.w.dtype))
    y = blocks(
        find(f"sparse_conv2d_blocks_{tile.label}_{epilogue}_{dtype}"),
        tile,
        p,
        dtype=dtype,
        alpha=alpha,
        splits=2 if tile.kind == "split" else 1,
        adds="add" in epilogue,
    )
    rounding = 2**-10 if dtype == "float32" else SUMS  # TF32
    check(y, finished(alpha * convolved(p, dtype), p, epilogue, dtype), dtype, rounding)


DENSITIES = [
    (Conv(2, 10, 9, 72, 40, 3, 3, pad=(1, 1)), 0.2),
    (Conv(2, 7, 7, 136, 72, 3, 3, pad=(1, 1)), 0.01),
    (Conv(3, 9, 11, 64, 72, 3, 2, (1, 1), (2, 1), (2, 1)), 0.5),
    (Conv(1, 75, 1, 520, 136), 1),
    (Conv(1, 70, 1, 200, 136), 0.001),
    (Conv(1, 1, 1, 136, 8), 0),
]
"""Convolutions, and the shares of their filters that are not 0."""


@pytest.mark.parametrize(("config", "layer"), of_all(4, EXPANDED, DENSITIES), ids=str)
def test_tiled(
    find: Find, rng: np.random.Generator, config: OneTile, layer: tuple[Conv, float]
) -> None:
    g, density = layer
    dtype = "float16" if density == 0.5 else BF16
    p = product(rng, g, dtype)
    p.w = np.where(rng.random(p.w.shape) < density, p.w, 0).astype(p.w.dtype)
    got = tiled(
        find(f"sparse_conv2d_tiles_{config.label}_add_relu_{dtype}"),
        config,
        p,
        arrange.coordinate_tiles(p.w.transpose(1, 2, 3, 0)),
        dtype=dtype,
        splits=2 if config.split else 1,
    )
    check(got, finished(convolved(p, dtype), p, "add_relu", dtype), dtype, SUMS)


CHAINS = [
    ("layernorm_mlp", Chain(4, 1, 1, 8, 3), 256),
    ("layernorm_mlp", Chain(4, 1, 1, 8, 3), 72),
    ("layernorm_mlp", Chain(2, 3, 3, 5, 2), 328),
    ("conv2d_chain", Chain(3, 1, 1, 8, 2, 4), 256),
    ("conv2d_chain", Chain(2, 1, 2, 8, 2, 3), 200),
    ("conv2d_chain", Chain(2, 2, 2, 5, 2, 4), 328),
    ("conv2d_chain", Chain(3, 2, 2, 6, 1, 3), 328),
    ("layernorm_mlp", Chain(1, 1, 1, 8, 2), 256),
    ("conv2d_chain", Chain(1, 1, 1, 8, 2, 4), 256),
    ("conv2d_chain", Chain(1, 1, 2, 8, 2, 4), 200),
    ("conv2d_chain", Chain(2, 1, 1, 8, 2, 3, s=1), 200),
    ("conv2d_chain", Chain(1, 1, 1, 8, 2, 4, s=1), 256),
    ("conv2d_chain", Chain(2, 4, 4, 4, 1, 2, near=False), 320),
]


def chained(
    find: Find, rng: np.random.Generator, tile: Chain, m: int, hidden: int, op: str, dtype: str
) -> tuple[list[Array], list[Array]]:
    """Runs a chain on m rows: what z and h are, and should be; h is checked where it is stored."""
    c, f = 64 * tile.c, 64 * tile.f
    x = rounded(rng.standard_normal((m, c)) + 0.5, dtype)
    w1 = rounded(rng.standard_normal((hidden, c)) * c**-0.5, dtype)
    w2 = rounded(rng.standard_normal((f, hidden)) * hidden**-0.5, dtype)
    vectors = [rng.standard_normal(n).astype(np.float32) for n in (hidden, f, c, hidden)]
    vectors[2] = moments_of(wide(x, dtype))
    keeps = op == "conv2d_chain"
    kernel = find(f"{op}_hopper_{tile.label}_{dtype}")
    added, residual, source = np.zeros(hidden), None, None
    if tile.s:
        shortcut, v = (rounded(rng.standard_normal((n, 64 * tile.s)), dtype) for n in (m, hidden))
        added = wide(shortcut, dtype) @ wide(v, dtype).T + vectors[3]
        source = shortcut, v
    elif keeps:
        residual = rounded(rng.standard_normal((m, hidden)), dtype)
        added = wide(residual, dtype)
    several = 1 if tile.x_stages == 1 else 2  # one block computes all tiles
    z, h = chain(
        kernel, tile, x, [w1, w2], vectors, residual,
        dtype=dtype, source=source, processors=several,
    )  # fmt: skip
    tokens = wide(x, dtype)
    if not keeps:
        tokens = wide(rounded(normalised(tokens, np.ones(c), np.zeros(c)), dtype), dtype)
    inner = tokens @ wide(w1, dtype).T + vectors[0] + added
    inner = np.maximum(inner, 0) if keeps else inner / 2 * (1 + erf(inner / math.sqrt(2)))
    want = wide(rounded(inner, dtype), dtype) @ wide(w2, dtype).T + vectors[1]
    want = np.maximum(want, 0) if keeps else want + wide(x, dtype)
    return ([z, h], [want, inner]) if keeps else ([z], [want])


@pytest.mark.parametrize("m", [1, 150, pytest.param(600, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("op", "tile", "hidden"), CHAINS, ids=str)
def test_chain(
    find: Find, rng: np.random.Generator, op: str, tile: Chain, hidden: int, m: int
) -> None:
    # h may be rounded the other way, and so may normalised tokens before it.
    for got, want in zip(*chained(find, rng, tile, m, hidden, op, BF16), strict=True):
        check(got, want, BF16, 2**-10)


@pytest.mark.parametrize(("op", "tile", "hidden"), [CHAINS[0], CHAINS[4]], ids=str)
def test_chain_float16(
    find: Find, rng: np.random.Generator, op: str, tile: Chain, hidden: int
) -> None:
    for got, want in zip(*chained(find, rng, tile, 150, hidden, op, "float16"), strict=True):
        check(got, want, "float16", 2**-13)


BYTE_CHAINS = [
    (Chain(3, 1, 1, 4, 2, 2, bytes=True), 256, 1),
    (Chain(3, 1, 1, 4, 2, 2, bytes=True), 80, 150),
    (Chain(2, 1, 2, 4, 2, 4, bytes=True), 208, 300),
    (Chain(2, 2, 2, 8, 2, 3, bytes=True), 400, 150),
    (Chain(2, 1, 1, 4, 3, 3, bytes=True, s=1), 208, 300),
]


@pytest.mark.parametrize(
    ("tile", "hidden", "m", "dtypes"),
    [
        *((*each, BYTES) for each in BYTE_CHAINS),
        (BYTE_CHAINS[2][0], 176, 150, FLOATS),
        (BYTE_CHAINS[4][0], 176, 150, FLOATS),
    ],
    ids=str,
)
def test_chain_of_bytes(
    find: Find,
    rng: np.random.Generator,
    tile: Chain,
    hidden: int,
    m: int,
    dtypes: tuple[str, str, str],
) -> None:
    """Nothing but the last step of each product rounds."""
    (dtype, right, _), (c, f) = dtypes, (64 * tile.c, 64 * tile.f)
    floats = dtype == E4M3
    x, residual = (in_eighths(rng, (m, columns), dtype) for columns in (c, hidden))
    weights = [in_eighths(rng, shape, right) for shape in ((hidden, c), (f, hidden))]
    biases = [(rng.integers(-40, 41, n) / 2).astype(np.float32) for n in (hidden, f)]
    lows = (1, -6) if floats else (-10, -11)
    scales = [
        (2.0 ** rng.integers(low, low + 5, n)).astype(np.float32)
        for low, n in zip(lows, (hidden, f), strict=True)
    ]
    kernel = find(f"conv2d_chain_hopper_{tile.label}_{E4M3 if floats else 'uint8xint8'}")
    h = wide(x, dtype) @ wide(weights[0], right).T
    if tile.s:
        source, v = (in_eighths(rng, (n, 64 * tile.s), t) for n, t in ((m, dtype), (hidden, right)))
        first = (2.0 ** rng.integers(-2, 3, hidden)).astype(np.float32)
        got = chain(
            kernel, tile, x, weights, [*biases, biases[0], biases[0]], dtype=dtype, scales=scales,
            source=(source, v, first),
        )  # fmt: skip
        h = (h * first + wide(source, dtype) @ wide(v, right).T) * scales[0] + 2 * biases[0]
    else:
        got = chain(
            kernel, tile, x, weights, [*biases, *biases], residual,
            dtype=dtype, scales=scales, residual_scale=0.25,
        )  # fmt: skip
        h = h * scales[0] + biases[0] + 0.25 * wide(residual, dtype)
    h = wide(rounded(np.maximum(h, 0), dtype), dtype)
    w = wide(weights[1], right)
    z = (float8_products(h, w) if floats else h @ w.T) * scales[1] + biases[1]
    z = wide(rounded(np.maximum(z, 0), dtype), dtype)
    largest = 448 if floats else 255
    for y, want in zip(got, (z, h), strict=True):
        np.testing.assert_array_equal(wide(y, dtype), want)
        assert m == 1 or ((want == largest).any() and ((want > 0) & (want < largest)).any())


FLASH = [
    (Heads(1, 33, 65, 2, 64), 2, 1, 0),
    (Heads(2, 17, 130, 3, 64), 2, 1, 2),
    (Heads(1, 5, 1, 1, 64), 2, 1, 0),
    (Heads(1, 130, 16, 2, 64), 2, 1, 1),
    (Heads(2, 200, 33, 1, 32), 2, 1, 3),
    (Heads(1, 70, 40, 2, 96), 1, 1, 1),
    (Heads(2, 33, 70, 2, 36), 2, 1, 1),
    (Heads(2, 33, 40, 3, 80), 1, 1, 1),
    (Heads(1, 33, 300, 2, 64), 1, 4, 0),
    (Heads(2, 1, 50, 1, 64), 1, 4, 0),
    (Heads(1, 40, 70, 2, 24), 0, 1, 0),
    (Heads(1, 1, 1, 1, 24), 0, 1, 0),
]


@pytest.mark.parametrize(("g", "rows", "splits", "grid"), FLASH, ids=str)
def test_attention(
    find: Find, rng: np.random.Generator, g: Heads, rows: int, splits: int, grid: int
) -> None:
    q, k, v = attention_inputs(rng, g, BF16)
    scale = g.depth**-0.5
    kind = f"flash_{g.depth}_{rows}x{splits}" if rows else f"plain_{g.depth}"
    kernel = find(f"attention_{kind}_bfloat16")
    y = attention(kernel, g, q, k, v, scale, rows=rows, splits=splits, grid=grid)
    check_attention(y, g, q, k, v, scale, BF16)


MASKED = [  # the shape of the bias but for S, and the last key that query 0 sees
    (Heads(3, 33, 65, 2, 32), 2, 1, (1, 2, 33), None),
    (Heads(4, 150, 49, 2, 32), 2, 1, (2, 1, 150), None),
    (Heads(2, 20, 130, 1, 32), 2, 1, (2, 1, 1), None),
    (Heads(2, 33, 99, 2, 24), 2, 1, (1, 2, 33), 0),
    (Heads(1, 70, 300, 2, 64), 1, 4, (1, 2, 70), 0),
    (Heads(2, 20, 300, 1, 64), 1, 4, (2, 1, 20), 280),
    (Heads(4, 40, 70, 2, 24), 0, 1, (2, 2, 40), 0),
    (Heads(2, 40, 33, 1, 24), 0, 1, (2, 1, 1), 5),
]


@pytest.mark.parametrize(("g", "rows", "splits", "shape", "diagonal"), MASKED, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_attention_with_masks(
    find: Find,
    rng: np.random.Generator,
    g: Heads,
    rows: int,
    splits: int,
    shape: tuple[int, int, int],
    diagonal: int | None,
) -> None:
    """Of images that take turns, of all heads or queries, and with hidden keys and rows."""
    q, k, v = attention_inputs(rng, g, BF16)
    bias = rng.standard_normal((*shape, g.s))
    bias[bias > 2] = -np.inf
    bias[0, 0, shape[2] // 2] = -np.inf
    masks = Masks(bias=rounded(bias, BF16), diagonal=diagonal)
    kind = f"{masks.label}{g.depth}" + (f"_{rows}x{splits}" if rows else "")
    kernel = find(f"attention_{'flash' if rows else 'plain'}_{kind}_bfloat16")
    y = attention(kernel, g, q, k, v, 0.2, rows=rows, splits=splits, masks=masks)
    check_attention(y, g, q, k, v, 0.2, BF16, added(masks, g))


# Consumers, keys and stages, by the channels of a head: for up to 64 keys, and for more.
HEADS = {
    "short": {32: (3, 64, 12), 64: (3, 64, 12), 96: (3, 64, 7), 128: (2, 64, 6)},
    "long": {32: (3, 80, 9), 64: (3, 80, 9), 96: (2, 112, 4), 128: (2, 112, 3)},
}


@pytest.mark.parametrize(
    ("keys", "g", "period", "dtype"),
    [
        ("short", Heads(2, 197, 50, 3, 64), 4, BF16),
        ("short", Heads(3, 65, 1, 1, 64), 3, BF16),
        ("short", Heads(1, 400, 64, 2, 64), 5, BF16),
        ("long", Heads(1, 784, 196, 1, 64), 13, BF16),
        ("long", Heads(2, 300, 81, 2, 64), 3, BF16),
        ("long", Heads(3, 200, 784, 1, 64), 3, BF16),
        ("long", Heads(2, 64, 160, 2, 64), 3, BF16),
        ("long", Heads(1, 257, 330, 2, 64), 3, "float16"),
        ("short", Heads(2, 197, 50, 3, 32), 4, BF16),
        ("short", Heads(3, 65, 1, 2, 32), 3, BF16),
        ("long", Heads(1, 500, 196, 2, 32), 8, BF16),
        ("long", Heads(3, 200, 784, 1, 32), 3, BF16),
        ("long", Heads(1, 257, 330, 3, 32), 3, "float16"),
        ("short", Heads(2, 197, 50, 3, 96), 4, BF16),
        ("short", Heads(3, 65, 1, 2, 96), 3, BF16),
        ("long", Heads(1, 300, 197, 2, 96), 5, BF16),
        ("long", Heads(3, 200, 500, 1, 96), 2, BF16),
        ("long", Heads(1, 130, 330, 3, 96), 3, "float16"),
        ("short", Heads(2, 197, 50, 3, 128), 4, BF16),
        ("short", Heads(3, 65, 1, 2, 128), 2, BF16),
        ("long", Heads(1, 300, 112, 2, 128), 5, BF16),
        ("long", Heads(3, 200, 500, 1, 128), 2, BF16),
        ("long", Heads(1, 130, 330, 3, 128), 2, "float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_hopper_attention(
    find: Find,
    rng: np.random.Generator,
    keys: str,
    g: Heads,
    period: int,
    dtype: str,
    seed: int,
) -> None:
    """Items end within a round of the consumers, and parts of a head within an item."""
    q, k, v = attention_inputs(rng, g, dtype)
    tile = HEADS[keys][g.depth]
    kernel = find(f"attention_hopper_{g.depth}_{'x'.join(map(str, tile))}_{dtype}")
    y = hopper_attention(
        kernel, g, tile, q, k, v, 0.125, period=period, processors=1, dtype=dtype, seed=seed
    )
    check_attention(y, g, q, k, v, 0.125, dtype)


PROJECTED = [
    (Heads(4, 20, 7, 6, 64), BF16),
    (Heads(2, 150, 50, 6, 64), BF16),
    (Heads(1, 64, 56, 6, 64), BF16),
    (Heads(3, 75, 50, 3, 64), "float16"),
    (Heads(2, 400, 17, 3, 64), "float16"),
    (Heads(70, 1, 1, 3, 64), "float16"),
]


def projected(
    rng: np.random.Generator, g: Heads, dtype: str
) -> tuple[list[Array], tuple[Array, Array, Array]]:
    """Draws q, k and v, then weights, bias and residual of the linear layer behind."""
    c = g.heads * g.depth
    bias = rng.standard_normal(c).astype(np.float32)
    weights, residual = rng.standard_normal((c, c)) / c**0.5, rng.standard_normal((g.n * g.t, c))
    linear = rounded(weights, dtype), bias, rounded(residual, dtype)
    return attention_inputs(rng, g, dtype), linear


@pytest.mark.parametrize(("g", "dtype"), PROJECTED, ids=str)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_attention_linear(
    find: Find, rng: np.random.Generator, g: Heads, dtype: str, seed: int
) -> None:
    """Images end within a tile, or tiles within an image; a block goes through several tiles."""
    given, linear = projected(rng, g, dtype)
    kernel = find(f"attention_linear_hopper_64x{64 * g.heads}x3x6_{dtype}")
    y, moments = attention_linear(kernel, g, given, linear, 0.125, dtype=dtype, seed=seed)
    w, residual = wide(linear[0], dtype), wide(linear[2], dtype)
    q, k, v = given
    rows = attended(g, q, k, v, 0.125, dtype).reshape(residual.shape)
    # Probabilities and the attention's result are rounded.
    check(y, rows @ w.T + linear[1] + residual, dtype, 2**-9)
    np.testing.assert_allclose(moments, moments_of(wide(y, dtype)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("g", "dtype"),
    [
        (Heads(1, 784, 81, 1, 64), BF16),
        (Heads(2, 130, 330, 1, 64), BF16),
        (Heads(3, 65, 1, 1, 64), BF16),
        (Heads(2, 200, 784, 1, 64), "float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_hopper_attention_with_a_linear_layer(
    find: Find, rng: np.random.Generator, g: Heads, dtype: str, seed: int
) -> None:
    """A consumer has several tiles, and the last one of an image is not full."""
    (q, k, v), (w, bias, residual) = projected(rng, g, dtype)
    residual = residual.reshape(q.shape)
    norm = Norm(np.full((g.n * g.t, 2, 2), np.nan, np.float32))
    kernel = find(f"attention_linear_hopper_64_3x80x8_{dtype}")
    y = hopper_attention(
        kernel, g, (3, 80, 8), q, k, v, 0.125, period=3, processors=1, dtype=dtype, seed=seed,
        linear=(w, bias, residual, norm),
    )  # fmt: skip
    rows = attended(g, q, k, v, 0.125, dtype)
    # Probabilities and the attention's result are rounded.
    check(y, rows @ wide(w, dtype).T + bias + wide(residual, dtype), dtype, 2**-9)
    want = moments_of(wide(y, dtype).reshape(-1, 64))
    np.testing.assert_allclose(norm.moments, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_attention_linear_keeps_images_apart(
    find: Find, rng: np.random.Generator, bad: float
) -> None:
    """Of the images that share a tile only one is not finite."""
    g = Heads(5, 30, 50, 6, 64)
    given, linear = projected(rng, g, BF16)
    kernel = find(f"attention_linear_hopper_64x384x3x6_{BF16}")
    want, moments = attention_linear(kernel, g, given, linear, 0.125)
    poisoned = [a.copy() for a in given]
    for a in poisoned:
        a[2, :, ::7] = rounded(np.array([bad]), BF16)
    y, spoilt = attention_linear(kernel, g, poisoned, linear, 0.125)
    others = np.arange(g.n * g.t) // g.t != 2
    np.testing.assert_array_equal(y[others], want[others])
    np.testing.assert_array_equal(spoilt[others], moments[others])
    assert np.isnan(wide(y, BF16)[~others]).all()


@pytest.mark.parametrize(
    ("keys", "g", "period", "masked", "diagonal"),
    [
        ("long", Heads(2, 200, 197, 2, 64), 3, "bias", None),
        ("short", Heads(2, 130, 49, 3, 64), 4, "bias", None),
        ("long", Heads(2, 70, 330, 1, 64), 3, "keys", None),
        ("short", Heads(3, 65, 33, 1, 64), 3, "keys", None),
        ("long", Heads(1, 400, 400, 2, 64), 3, "", 0),
        ("long", Heads(1, 500, 240, 1, 64), 8, "", 0),
        ("long", Heads(1, 130, 500, 1, 64), 3, "", 370),
        ("short", Heads(2, 200, 64, 1, 64), 4, "", 0),
        ("long", Heads(2, 300, 197, 1, 32), 5, "bias keys", 0),
        ("long", Heads(1, 197, 197, 3, 64), 4, "bias keys", 3),
        ("long", Heads(2, 130, 301, 1, 96), 3, "bias keys", 171),
        ("long", Heads(1, 260, 260, 2, 128), 2, "bias keys", 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_hopper_attention_with_masks(
    find: Find,
    rng: np.random.Generator,
    keys: str,
    g: Heads,
    period: int,
    masked: str,
    diagonal: int | None,
    seed: int,
) -> None:
    """Masks end within tiles and between them, and hide whole tiles."""
    q, k, v = attention_inputs(rng, g, BF16)
    masks = Masks(
        bias=rounded(rng.standard_normal((g.n, g.heads, g.t, g.s)), BF16)
        if "bias" in masked
        else None,
        keys=rng.integers(0, 2, (g.n, g.s), np.uint8) if "keys" in masked else None,
        diagonal=diagonal,
    )
    if masks.keys is not None:
        masks.keys[:, 0] = 1
        masks.keys[0, 1 : max(g.s - 20, 1)] = 0
    tile = HEADS[keys][g.depth]
    kernel = find(f"attention_hopper_{masks.label}{g.depth}_{'x'.join(map(str, tile))}_{BF16}")
    y = hopper_attention(
        kernel, g, tile, q, k, v, 0.125, period=period, processors=1, seed=seed, masks=masks
    )
    check_attention(y, g, q, k, v, 0.125, BF16, added(masks, g))


@pytest.mark.parametrize(
    "shape", [(4, 1, 70), (2, 1, 70), (1, 3, 70), (1, 1, 70), (4, 1, 1)], ids=str
)
def test_hopper_attention_shares_a_bias(
    find: Find, rng: np.random.Generator, shape: tuple[int, int, int]
) -> None:
    """Of heads, images that take turns, or queries, with rows of minus infinity, and in float16."""
    g, dtype, tile = Heads(4, 70, 99, 3, 64), "float16", HEADS["long"][64]
    q, k, v = attention_inputs(rng, g, dtype)
    bias = rng.standard_normal((*shape, g.s))
    bias[..., min(3, shape[2] - 1), ::2] = -np.inf
    bias[..., min(5, shape[2] - 1), :90] = -np.inf
    masks = Masks(bias=rounded(bias, dtype))
    kernel = find(f"attention_hopper_bias_64_{'x'.join(map(str, tile))}_{dtype}")
    y = hopper_attention(
        kernel, g, tile, q, k, v, 0.125, period=3, processors=1, dtype=dtype, masks=masks
    )
    check_attention(y, g, q, k, v, 0.125, dtype, added(masks, g, dtype))


def added(masks: Masks, g: Heads, dtype: str = BF16) -> Array:
    """What masks add to the scores, [N, heads, T, S]."""
    total = np.zeros((g.n, g.heads, g.t, g.s))
    if masks.bias is not None:
        total += np.tile(wide(masks.bias, dtype), (g.n // len(masks.bias), 1, 1, 1))
    if masks.keys is not None:
        total[np.broadcast_to(masks.keys[:, None, None] == 0, total.shape)] = -np.inf
    if masks.diagonal is not None:
        total[..., ~np.tri(g.t, g.s, masks.diagonal, bool)] = -np.inf
    return total


def attention_inputs(rng: np.random.Generator, g: Heads, dtype: str) -> list[Array]:
    channels = g.heads * g.depth
    lengths = (g.t, g.s, g.s)
    return [rounded(rng.standard_normal((g.n, length, channels)), dtype) for length in lengths]


def check_attention(
    y: Array,
    g: Heads,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    dtype: str,
    added: Array | float = 0.0,
) -> None:
    # Probabilities are rounded before the second product.
    check(y, attended(g, q, k, v, scale, dtype, added), dtype, 2**-9)


def attended(
    g: Heads, q: Array, k: Array, v: Array, scale: float, dtype: str, added: Array | float = 0.0
) -> Array:
    heads = [wide(a, dtype).reshape(g.n, -1, g.heads, g.depth).swapaxes(1, 2) for a in (q, k, v)]
    scores = heads[0] @ heads[1].swapaxes(2, 3) * scale + added
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray((e / e.sum(-1, keepdims=True) @ heads[2]).swapaxes(1, 2).reshape(q.shape))


TO_BYTES = [
    ("flash_64_2x1", Heads(2, 33, 70, 3, 64)),
    ("flash_64_2x1", Heads(1, 9, 1, 1, 64)),
    ("flash_36_2x1", Heads(2, 130, 40, 3, 36)),
    ("flash_80_1x1", Heads(1, 70, 33, 2, 80)),
    ("flash_bias_causal_64_1x4", Heads(2, 40, 300, 1, 64)),
    ("hopper_32_long", Heads(2, 100, 196, 2, 32)),
    ("hopper_64_long", Heads(2, 130, 170, 3, 64)),
    ("hopper_64_long", Heads(1, 9, 1, 1, 64)),
    ("hopper_96_long", Heads(1, 65, 250, 2, 96)),
    ("hopper_bias_64_short", Heads(2, 70, 49, 2, 64)),
]


@pytest.mark.parametrize("out", ["uint8", E4M3])
@pytest.mark.parametrize(("name", "g"), TO_BYTES, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_attention_stores_bytes(
    find: Find, rng: np.random.Generator, name: str, g: Heads, out: str
) -> None:
    """Saturated, NaN as 0 where there is none; halves go to even steps, whatever the zero point."""
    q, k, v = (wide(a, BF16) for a in attention_inputs(rng, g, BF16))
    v = np.rint(v * 256) / 256
    v[0, 0, :3] = np.inf, -np.inf, np.nan
    if g.s == 1:
        q[:] = 0  # scores are 0, probabilities 1, and y is v
    q, k, v = (rounded(a, BF16) for a in (q, k, v))
    masks = Masks()
    if "bias" in name:
        bias = rng.standard_normal((1, g.heads, g.t, g.s))
        bias[..., 5, :] = -np.inf
        masks = Masks(bias=rounded(bias, BF16), diagonal=260 if "causal" in name else None)
    want = attended(g, q, k, v, 0.2, BF16, added(masks, g))
    scale, zero = (2.0**-8, 0) if out == E4M3 else (2.0**-7, 131)
    g = replace(g, result=(scale, float(zero)))
    kind, _, size = name.rpartition("_")
    if name.startswith("hopper"):
        tile = HEADS[size][g.depth]
        kernel = find(f"attention_{kind}_{'x'.join(map(str, tile))}_{BF16}_to_{out}")
        y = hopper_attention(
            kernel, g, tile, q, k, v, 0.2, period=3, processors=1, out=out, masks=masks
        )
    else:
        kernel = find(f"attention_{name}_{BF16}_to_{out}")
        rows, splits = map(int, size.split("x"))
        y = attention(kernel, g, q, k, v, 0.2, rows=rows, splits=splits, masks=masks, out=out)

    def stored(steps: Array) -> Array:
        steps = np.where(np.isnan(steps) & (out == "uint8"), -np.inf, steps)
        return wide(rounded(np.rint(steps) + zero if zero else steps, out), out)

    # Probabilities are rounded before the second product, but not that of a single key.
    off = 2**-9 * np.abs(want[np.isfinite(want)]).max() / scale if g.s > 1 else 0
    got, steps = wide(y, out), want / scale
    odd = np.isnan(stored(steps))
    np.testing.assert_array_equal(np.isnan(got), odd)
    assert odd.any() == (out == E4M3)
    bounds = stored(steps - off), stored(steps + off)
    assert ((bounds[0] <= got) & (got <= bounds[1]))[~odd].all()
    limits = (-448, 448) if out == E4M3 else (0, 255)
    assert all((got == limit).any() for limit in limits) and (np.abs(got - zero) < 20).any()


KEPT = [
    ("flash_64_2x1", Heads(2, 33, 70, 2, 64)),
    ("flash_64_1x4", Heads(1, 5, 300, 2, 64)),
    ("plain_24", Heads(1, 40, 70, 2, 24)),
    ("hopper", Heads(2, 70, 250, 2, 64)),
]


@pytest.mark.parametrize(("name", "g"), KEPT, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_attention_keeps_logarithms_of_sums(
    find: Find, rng: np.random.Generator, name: str, g: Heads
) -> None:
    """With a bias, that hides all keys from one query."""
    q, k, v = attention_inputs(rng, g, BF16)
    bias = rng.standard_normal((1, 1, g.t, g.s))
    bias[..., 1, :] = -np.inf
    masks = Masks(rounded(bias, BF16), logsumexp=np.zeros((g.n, g.heads, g.t), np.float32))
    if name == "hopper":
        tile = HEADS["long"][g.depth]
        kernel = find(f"attention_hopper_{masks.label}{g.depth}_{'x'.join(map(str, tile))}_{BF16}")
        y = hopper_attention(kernel, g, tile, q, k, v, 0.2, period=3, masks=masks)
    else:
        rows, splits = {"2x1": (2, 1), "1x4": (1, 4)}.get(name[-3:], (0, 1))
        kind, rest = name.split("_", 1)
        kernel = find(f"attention_{kind}_{masks.label}{rest}_{BF16}")
        y = attention(kernel, g, q, k, v, 0.2, rows=rows, splits=splits, masks=masks)
    check_attention(y, g, q, k, v, 0.2, BF16, added(masks, g))
    heads = [wide(a, BF16).reshape(g.n, -1, g.heads, g.depth).swapaxes(1, 2) for a in (q, k)]
    with np.errstate(divide="ignore"):
        scores = heads[0] @ heads[1].swapaxes(2, 3) * 0.2 + added(masks, g)
        want = np.log(np.exp(scores).sum(-1))
    assert np.isneginf(want).any()
    np.testing.assert_allclose(masks.views[0], want, 1e-5, 1e-5)


ROUNDING = {BF16: 2**-7, "float16": 2**-10, "float32": 2**-20}
TRAINED = [  # the shape of the bias but for S, and the last key that query 0 sees
    (Heads(1, 70, 130, 2, 64), BF16, None, None),
    (Heads(1, 1, 65, 1, 64), BF16, None, None),
    (Heads(2, 130, 37, 1, 64), BF16, None, None),
    (Heads(1, 37, 2, 2, 96), "float16", None, None),
    (Heads(1, 65, 100, 2, 96), "float16", None, None),
    (Heads(2, 70, 99, 1, 36), BF16, (1, 1, 70), 3),
    (Heads(2, 130, 67, 1, 36), BF16, (2, 1, 1), -70),
    (Heads(1, 37, 65, 2, 20), "float32", (1, 2, 1), 30),
    (Heads(2, 40, 33, 1, 20), "float32", (1, 1, 40), 3),
]


@pytest.mark.parametrize(("g", "dtype", "shape", "diagonal"), TRAINED, ids=str)
def test_attention_grad(
    find: Find,
    rng: np.random.Generator,
    g: Heads,
    dtype: str,
    shape: tuple[int, int, int] | None,
    diagonal: int | None,
) -> None:
    """Queries that see no key have no gradients, whatever y is."""
    q, k, v = (wide(a, dtype) for a in attention_inputs(rng, g, dtype))
    dy = wide(rounded(np.asarray(rng.standard_normal(q.shape)), dtype), dtype)
    masks = Masks()
    if shape is not None:
        bias = rng.standard_normal((*shape, g.s))
        bias[bias > 2] = -np.inf
        bias[:, :, shape[2] // 2] = -np.inf if shape[2] > 1 else 0
        masks = Masks(bias=rounded(bias, dtype), diagonal=diagonal)
    split = [a.reshape(g.n, -1, g.heads, g.depth).swapaxes(1, 2) for a in (q, k, v, dy)]
    scores = split[0] @ split[1].swapaxes(2, 3) * 0.2 + added(masks, g, dtype)
    seen = np.asarray(np.isfinite(scores).any(-1, keepdims=True))
    assert seen.all() == (shape is None or (diagonal or 0) > 3)
    with np.errstate(divide="ignore"):
        kept = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - np.where(seen[..., 0], kept, 0)[..., None])
    y = rounded(np.where(seen, p @ split[2], np.nan).swapaxes(1, 2).reshape(q.shape), dtype)
    delta = np.where(seen, split[3] * (p @ split[2]), 0).sum(-1, keepdims=True)
    ds = p * (split[3] @ split[2].swapaxes(2, 3) - delta)
    wants = (0.2 * ds @ split[1], 0.2 * ds.swapaxes(2, 3) @ split[0], p.swapaxes(2, 3) @ split[3])
    given = [*(rounded(a, dtype) for a in (q, k, v)), y, rounded(dy, dtype)]
    found = attention_grad(find, g, given, kept.astype(np.float32), 0.2, dtype=dtype, masks=masks)
    for got, want in zip(found, wants, strict=True):
        # y, probabilities and the gradients of scores are rounded before the last products.
        check(got, want.swapaxes(1, 2).reshape(got.shape), dtype, ROUNDING[dtype])


NOT_FINITE = [
    ("flash_64_2x1", Heads(3, 33, 70, 1, 64)),
    ("flash_64_1x4", Heads(3, 33, 300, 1, 64)),
    ("plain_24", Heads(3, 40, 70, 1, 24)),
    *(("hopper", Heads(3, 65, 250, 1, depth)) for depth in (32, 96, 128)),
    ("hopper", Heads(3, 65, 170, 1, 64)),
]


@pytest.mark.parametrize(("name", "g"), NOT_FINITE, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_attention_where_scores_are_not_finite(
    find: Find, rng: np.random.Generator, name: str, g: Heads
) -> None:
    q, k, v = (wide(a, BF16) for a in attention_inputs(rng, g, BF16))
    q[:, :, 0] = 1
    k[0, : g.s // 2, 0] = -np.inf  # scores of whole tiles, and of a part of one
    k[0, -1, 0] = -np.inf
    q[0, 1, 0], q[0, 2, 0] = -1, np.nan
    k[2, :, 0], v[2, 0, 3] = -np.inf, np.nan  # every score; image 1 ends in a tile before it
    q, k, v = (rounded(a, BF16) for a in (q, k, v))
    if name.startswith("hopper"):
        tile = HEADS["long"][g.depth]
        kernel = find(f"attention_hopper_{g.depth}_{'x'.join(map(str, tile))}_bfloat16")
        y = hopper_attention(kernel, g, tile, q, k, v, 0.125, period=3, processors=1)
    else:
        rows, splits = {"2x1": (2, 1), "1x4": (1, 4)}.get(name[-3:], (0, 1))
        kernel = find(f"attention_{name}_bfloat16")
        y = attention(kernel, g, q, k, v, 0.125, rows=rows, splits=splits)
    check_attention(y, g, q, k, v, 0.125, BF16)


@pytest.mark.parametrize("dtype", [BF16, "float32"])
@pytest.mark.parametrize(
    ("g", "groups"),
    [
        (Conv(1, 9, 8, 5, 7, 3, 3, (2, 1), (1, 1)), 1),
        (Conv(2, 6, 6, 12, 68, 1, 1), 1),
        (Conv(1, 7, 5, 12, 6, 3, 2, (1, 1), (2, 1), (2, 1)), 3),
        (Conv(1, 65, 1, 40, 66), 1),
    ],
    ids=str,
)
def test_gemm_on_cores(
    find: Find, rng: np.random.Generator, g: Conv, groups: int, dtype: str
) -> None:
    p = product(rng, g, dtype)
    c, f = g.c // groups, g.f // groups
    p.w = np.ascontiguousarray(p.w[..., :c])
    got = gemm_cores(find(f"gemm_cores_add_relu_{dtype}"), p, dtype, 0.5, groups=groups)
    one = replace(g, c=c, f=f)
    x, w = wide(p.x, dtype), wide(p.w, dtype)
    parts = [one.apply(x[..., i * c : (i + 1) * c], w[i * f : (i + 1) * f]) for i in range(groups)]
    want = finished(0.5 * np.concatenate(parts, 1), p, "add_relu", dtype)
    check(got, want, dtype, 2**-20)


def test_gemm_of_a_batch(find: Find, rng: np.random.Generator) -> None:
    """The right side is [K, F], as bmm's is where it is not transposed."""
    x, w = rng.standard_normal((3, 70, 36)), rng.standard_normal((3, 36, 67))
    x, w = x.astype(np.float32), w.astype(np.float32)
    nothing = np.zeros(67, np.float32)
    p = Product(Conv(1, 70, 1, 36, 67), x, w, nothing, nothing)
    got = gemm_cores(find("gemm_cores_none_float32"), p, "float32", 1, products=3)
    want = x.astype(np.float64) @ w.astype(np.float64)
    check(got.reshape(want.shape), want, "float32", 2**-20)


def windows(kernel: int, stride: int) -> list[Conv]:
    """Lists convolutions whose rows end within a run of pixels; padding may be on one side only."""
    around, across, reach = kernel // 2, (stride, stride), kernel - 1
    return [
        Conv(2, 9, 16, 40, 40, kernel, kernel, across, (around, around)),
        Conv(1, 8, 7, 24, 24, kernel, kernel, across, (0, 1), after=(reach, reach - 2)),
        Conv(1, 9, 7, 16, 16, kernel, kernel, across, (reach, reach), after=(-reach, 1)),
        Conv(3, 1, 2, 12, 12, kernel, kernel, across, (around, around)),
    ]


@pytest.mark.parametrize(
    ("g", "name", "run"),
    [
        *((g, "3x3_1x4_silu_bfloat16", 7) for g in windows(3, 1)),
        *((g, "3x3_2x4_silu_bfloat16", 4) for g in windows(3, 2)),
        *((g, "3x3_2x4_add_relu_float32", 4) for g in windows(3, 2)),
        *((g, "5x5_1x4_silu_bfloat16", 7) for g in windows(5, 1)),
        *((g, "5x5_2x4_silu_bfloat16", 4) for g in windows(5, 2)),
        *((g, "7x7_1x4_silu_bfloat16", 7) for g in windows(7, 1)),
        *((g, "7x7_1x2_silu_bfloat16", 7) for g in windows(7, 1)),
        *((g, "4_silu_bfloat16", 0) for g in windows(7, 2)),
        (Conv(2, 9, 11, 12, 12, 3, 2, (2, 1), (1, 2), (2, 3), (1, 1)), "4_add_relu_float32", 0),
        (Conv(2, 9, 11, 7, 7, 3, 2, (2, 1), (1, 2), (2, 3), (1, 1)), "1_silu_bfloat16", 0),
        (Conv(1, 1, 1, 5, 5, 3, 3, pad=(1, 1)), "1_silu_bfloat16", 0),
        *(
            (g, f"lying_{kernel}x{kernel}_{stride}x4_silu_bfloat16", 7 if stride == 1 else 4)
            for kernel, stride in ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1))
            for g in windows(kernel, stride)
        ),
        *((g, "lying_3x3_2x4_add_relu_float32", 4) for g in windows(3, 2)),
        (Conv(1, 9, 8, 132, 132, 3, 3, pad=(1, 1)), "lying_3x3_1x4_silu_bfloat16", 7),
        (
            Conv(2, 9, 11, 12, 12, 3, 2, (2, 1), (1, 2), (2, 3), (1, 1)),
            "lying_4_add_relu_float32",
            0,
        ),
        (Conv(2, 9, 11, 7, 7, 3, 2, (2, 1), (1, 2), (2, 3), (1, 1)), "lying_1_silu_bfloat16", 0),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_depthwise(find: Find, rng: np.random.Generator, g: Conv, name: str, run: int) -> None:
    kind, lies, dtype = name.removeprefix("lying_"), "lying" in name, name.split("_")[-1]
    p = product(rng, g, dtype)
    p.w = rounded(rng.standard_normal((g.r, g.s, g.c)) / g.r, dtype)
    x = wide(p.x, dtype)
    # A tap outside the image reads its first pixel, or the row's, and drops it.
    x[0, 0, 0, :2], x[-1, -1, -1, 2], x[-1, 0, -1, 1] = (np.nan, np.inf), -np.inf, np.nan
    p.x = rounded(x, dtype)
    width = int(kind.split("_")[1][-1] if run else kind[0])
    epilogue = "add_relu" if "add_relu" in name else "silu"
    want = finished(g.apply_depthwise(x, wide(p.w, dtype)), p, epilogue, dtype)
    if lies:
        p.w = np.ascontiguousarray(np.moveaxis(p.w, 2, 0))
    got = depthwise(find(f"depthwise_{name}"), p, dtype, width, run, lies)
    check(got, want, dtype, SUMS)


@pytest.mark.parametrize(
    ("g", "name"),
    [
        *(
            (g, f"{kernel}x{kernel}_{stride}_{dtype}")
            for kernel, stride in itertools.product((3, 5, 7), (1, 2))
            for dtype, whole in ((BF16, 8), ("float32", 4))
            for g in windows(kernel, stride)
            if g.c % whole == 0
        ),
        (Conv(3, 1, 2, 72, 72, 3, 3, (2, 2), (1, 1)), "3x3_2_bfloat16"),
        (Conv(1, 9, 8, 144, 144, 3, 3, pad=(1, 1)), "3x3_1_bfloat16"),
        (Conv(2, 9, 11, 12, 12, 3, 5, (2, 3), (1, 2), (2, 3), (1, 1)), "4_bfloat16"),
        (Conv(2, 9, 11, 7, 7, 3, 2, (3, 1), (1, 2), (2, 3), (1, 1)), "1_bfloat16"),
        (Conv(1, 7, 10, 5, 5, 1, 1, (3, 3)), "1_float32"),
        (Conv(1, 1, 1, 8, 8, 3, 3, (1, 1), (2, 2), (2, 2)), "4_float32"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_depthwise_input_grad(find: Find, rng: np.random.Generator, g: Conv, name: str) -> None:
    size, dtype = name.rsplit("_", 1)
    filters = rounded(rng.standard_normal((g.c, g.r, g.s)) / g.r, dtype)
    dy = rng.standard_normal((g.n, *g.out, g.c))
    # A tap outside of dy reads its first pixel, or the row's, and drops it.
    dy[0, 0, 0, :2], dy[-1, -1, -1, 2], dy[-1, 0, -1, 1] = (np.nan, np.inf), -np.inf, np.nan
    dy = rounded(dy, dtype)
    patches = "x" in size
    width = 16 // dy.itemsize if patches else int(size)
    got = depthwise_input_grad(
        find(f"depthwise_input_grad_{name}"), g, dy, filters, dtype, width, patches
    )
    check(got, g.input_grad_depthwise(wide(dy, dtype), wide(filters, dtype)), dtype, SUMS)


BROADCASTS: list[list[tuple[int, ...]]] = [
    [(5000,), (5000,), (5000,)],
    [(33, 72), (1, 72), (1, 72)],
    [(2, 35, 24), (2, 1, 24), (1, 1, 24)],
    [(40, 56), (40, 1), (1, 1)],
    [(2, 3, 5, 16), (1, 3, 1, 16), (2, 3, 5, 1)],
    [(2, 1, 2, 3, 2, 8), (1, 3, 1, 3, 1, 1), (2, 3, 2, 1, 2, 8)],
    [(33, 35), (1, 35), (33, 1)],
    [(2, 5, 7), (2, 1, 7), (1, 1, 1)],
    [(9, 4, 3, 8), (9, 1, 3, 8), (1, 4, 1, 8)],
    [(1,), (1,), (1,)],
]
"""Shapes of three inputs; rows that are no multiple of 16 bytes go number by number."""


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("shapes", [s for s in BROADCASTS if len(s[0]) <= 4], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_pointwise(
    find: Find, rng: np.random.Generator, shapes: Sequence[tuple[int, ...]], pieces: int
) -> None:
    """A thread loads one vector of x2, float32 beside 16 bits: it may not lie along the images."""
    numbers = odd_numbers(rng, shapes)
    dtypes = (BF16, BF16, "float32")
    inputs = [rounded(x, dtype) for x, dtype in zip(numbers, dtypes, strict=True)]
    x0, x1, x2 = (wide(x, dtype) for x, dtype in zip(inputs, dtypes, strict=True))
    want = silu(x0 * x1 + x2)
    width = 1 if want.shape[-1] % 8 else 8
    pieces = 1 if shapes[2][0] > 1 else pieces
    got = pointwise(find(f"pointwise_{width}_{BF16}"), inputs, want.shape, width, BF16, pieces)
    check(got, want, BF16, SUMS)


def test_a_long_expression_stays_in_registers(find: Find, rng: np.random.Generator) -> None:
    """That of a batch norm's gradient behind a ReLU, 18 words; memory takes ten times as long."""
    kernel = find("pointwise_8_float16")
    assert kernel.local_bytes == 0
    x, dy = (rng.standard_normal((5, 16)).astype(np.float16) for _ in range(2))
    scale, shift, *rest = (rng.standard_normal((1, 16)).astype(np.float32) for _ in range(5))
    masked = np.where(x * scale + shift <= 0, 0, dy.astype(np.float64))
    want = masked * rest[0] + (x * rest[1] + rest[2])
    got = pointwise(kernel, [x, scale, shift, dy, *rest], want.shape, 8, "float16")
    check(got, want, "float16", SUMS)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_pointwise_masks(
    find: Find, rng: np.random.Generator, shapes: Sequence[tuple[int, ...]], pieces: int
) -> None:
    """A mask chooses between x0 and x2, and the result is one."""
    x0, x1, x2 = (x.astype(np.float32) for x in odd_numbers(rng, shapes))
    want = np.where(x1 > 0, x0, x2) < 0.5
    inputs: list[Array] = [x0, (x1 > 0).astype(np.uint8), x2]
    width = 1 if want.shape[-1] % 4 else 4
    got = pointwise(find(f"pointwise_{width}_uint8"), inputs, want.shape, width, "uint8", pieces)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("columns", [33, 40])
def test_pointwise_stores_floats_of_8_bits(
    find: Find, rng: np.random.Generator, columns: int
) -> None:
    """What lies between two of them, or beyond the largest, and NaN, as graphs/constants.py."""
    width = 1 if columns % 8 else 8
    x = rounded(rng.standard_normal((9, columns)) * 2.0 ** rng.integers(-12, 9, (9, columns)), BF16)
    x[0, :3] = rounded(np.array([np.nan, np.inf, -np.inf]), BF16)
    scale = np.full((1, 1), 1.25, np.float32)
    kernel = find(f"pointwise_{width}_{E4M3}")
    got = pointwise(kernel, [x, scale], x.shape, width, E4M3)
    want = e4m3(wide(x, BF16).astype(np.float32) * scale)
    np.testing.assert_array_equal(wide(got, E4M3), want)
    assert (want == 448).any() and ((want != 0) & (np.abs(want) < 2**-6)).any()


@pytest.mark.parametrize("columns", [33, 40])
def test_pointwise_loads_floats_of_8_bits(
    find: Find, rng: np.random.Generator, columns: int
) -> None:
    """And rounds to such floats in float32."""
    width = 1 if columns % 8 else 8
    x, scale = rng.integers(0, 256, (9, columns), np.uint8), np.full((1, 1), 1.375, np.float32)
    x[0, :2] = 0x7F, 0xFF
    got = pointwise(find(f"pointwise_{width}_float32"), [x, scale], x.shape, width, "float32")
    np.testing.assert_array_equal(got, e4m3(wide(x, E4M3).astype(np.float32) * scale))


def odd_numbers(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Draws numbers; among those of the first shape are NaN and infinities."""
    drawn = [rng.standard_normal(shape) for shape in shapes]
    if drawn[0].size > 9:
        drawn[0].flat[[0, -9, -2]] = np.nan, np.inf, -np.inf
    return drawn


MEMBERS = [
    ([1], [0]),
    ([7, 0, 1, 33, 8], [0, 0, 0, 0, 0]),
    ([0, 8192, 2, 20003, 0, 5], [0, 0, 1, 0, 3, 2]),
    ([129, 4100], [1, 3]),
    ([3] * 100, [0, 1] * 50),
]
"""Sizes of members, and how many numbers behind an aligned address they begin."""


@pytest.mark.parametrize(("sizes", "offsets"), MEMBERS, ids=lambda some: f"{some[0]} {len(some)}")
def test_foreach_casts(
    find: Find, rng: np.random.Generator, sizes: Sequence[int], offsets: Sequence[int]
) -> None:
    numbers = [x.astype(np.float32) for x in odd_numbers(rng, [(n,) for n in sizes])]
    kernel = find(f"foreach_{BF16}")
    assert kernel.local_bytes == 0  # as the table would be, were it copied to memory
    got = foreach(kernel, [[x] for x in numbers], offsets, BF16)
    for each, x in zip(got, numbers, strict=True):
        np.testing.assert_array_equal(wide(each, BF16), wide(rounded(x, BF16), BF16))


@pytest.mark.parametrize(("sizes", "offsets"), MEMBERS, ids=lambda some: f"{some[0]} {len(some)}")
def test_foreach(
    find: Find, rng: np.random.Generator, sizes: Sequence[int], offsets: Sequence[int]
) -> None:
    """Running statistics, of inputs of two dtypes; masks; and counters."""
    dtypes = ("float32", BF16, "float32")
    members = [
        [rounded(x, dtype) for x, dtype in zip(odd_numbers(rng, [(n,)] * 3), dtypes, strict=True)]
        for n in sizes
    ]
    got = foreach(find("foreach_float32"), members, offsets, "float32")
    for each, x in zip(got, members, strict=True):
        x0, x1, x2 = (wide(*pair) for pair in zip(x, dtypes, strict=True))
        if x0.size:
            check(each, x0 * 0.9 + (x1 + x2) * 0.1, "float32", 2**-21)
    pairs = [[x[0], x[2]] for x in members]
    masks = foreach(find("foreach_uint8"), pairs, offsets, "uint8")
    for each, (a, b) in zip(masks, pairs, strict=True):
        np.testing.assert_array_equal(each, a < b)
    counters = [rng.integers(-(1 << 60), 1 << 60, n) for n in sizes]
    more = foreach(find("foreach_int64"), [[x] for x in counters], offsets, "int64")
    for each, counted in zip(more, counters, strict=True):
        np.testing.assert_array_equal(each, counted + 1)


CONCATS = [
    (8, 37, (96, 32)),
    (8, 1, (8, 2048, 16, 8)),
    (8, 130, (64, 8, 8, 8, 8, 8, 8, 8)),
    (1, 50, (3, 5, 1)),
    (1, 3, (7, 8)),
    (1, 7, (2, 1, 3, 1, 4, 1, 5)),
]
"""Numbers of a vector, rows, and the lengths of several tensors' rows."""


@pytest.mark.parametrize("pieces", [1, 3, 4])
@pytest.mark.parametrize(("width", "rows", "lengths"), CONCATS)
def test_concat(
    find: Find, rng: np.random.Generator, width: int, rows: int, lengths: Sequence[int], pieces: int
) -> None:
    parts = [rounded(rng.standard_normal((rows, length)), BF16) for length in lengths]
    got = concat(find(f"concat_{width}_{BF16}"), parts, width, BF16, pieces)
    np.testing.assert_array_equal(got, np.concatenate(parts, 1))


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize(("width", "rows", "lengths"), CONCATS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_concat_pointwise(
    find: Find, rng: np.random.Generator, width: int, rows: int, lengths: Sequence[int], pieces: int
) -> None:
    parts = [rounded(x, BF16) for x in odd_numbers(rng, [(rows, n) for n in lengths])]
    scale, shift = (rng.standard_normal(sum(lengths), np.float32) for _ in range(2))
    kernel = find(f"concat_pointwise_{width}_{BF16}")
    got = concat(kernel, parts, width, BF16, pieces, [scale, shift])
    x = np.concatenate([wide(part, BF16) for part in parts], 1)
    check(got, np.maximum(x * scale + shift, 0), BF16, SUMS)


@pytest.mark.parametrize("kind", ["max", "mean", "mean_inside"])
@pytest.mark.parametrize(
    ("g", "width"),
    [
        (Conv(2, 9, 8, 24, 24, 3, 3, (2, 2), (1, 1)), 8),
        (Conv(1, 6, 5, 16, 16, 2, 3, (2, 1), (0, 1), after=(1, -1)), 8),
        (Conv(3, 4, 7, 5, 5, 2, 2, (2, 2)), 1),
    ],
    ids=str,
)
def test_pool(find: Find, rng: np.random.Generator, kind: str, g: Conv, width: int) -> None:
    x = rounded(rng.standard_normal((g.n, g.h, g.w, g.c)), BF16)
    got = pool(find(f"pool_{kind}_{width}_{BF16}"), g, x, width, BF16)
    image = wide(x, BF16)
    for p, q in np.ndindex(*g.out):
        first = [p * g.stride[0] - g.pad[0], q * g.stride[1] - g.pad[1]]
        last = [first[0] + g.r, first[1] + g.s]
        inside = image[:, max(first[0], 0) : last[0], max(first[1], 0) : last[1]]
        if kind == "max":
            np.testing.assert_array_equal(wide(got[:, p, q], BF16), inside.max((1, 2)))
            continue
        count = inside.shape[1] * inside.shape[2]
        if kind == "mean":
            ends = [min(last[0], g.h + g.pad[0]), min(last[1], g.w + g.pad[1])]
            count = (ends[0] - first[0]) * (ends[1] - first[1])
        want = inside.sum((1, 2)) / count
        check(got[:, p, q], want, BF16, SUMS)


@pytest.mark.parametrize("dtype", [BF16, "float32"])
def test_optimizer_step(find: Find, rng: np.random.Generator, dtype: str) -> None:
    """There is a parameter with each number of states; one lies unaligned, one is empty."""
    sizes = {(4096 + 1029, 3): 0, (37, 2): 1, (0, 0): 0, (1500, 0): 0, (8, 1): 0, (2053, 2): 0}
    tensors = [
        [rounded(np.abs(rng.standard_normal(n)) + 0.5, dtype) for _ in range(2 + states)]
        for n, states in sizes
    ]
    sgd, adam = (0.1, -1, 0.2, 0.9, 0.7, 0.8), (0.1, 1, 0, 0.01, 0.9, 0.1, 0.99, 0.01, 1.5, 1e-3)
    rows = [adam if states > 1 else sgd for _, states in sizes]
    settings = np.array([(*row, *[0] * (10 - len(row))) for row in rows], np.float32)
    name = f"optimizer_step_{dtype}"
    found = optimizer_step(find(name), tensors, settings, list(sizes.values()))
    for each, got, row in zip(tensors, found, settings.astype(float), strict=True):
        w, g, *held = (wide(x, dtype) for x in each)
        g, states = g * row[1] + row[2] * w, len(held)
        if states > 1:
            w = w - row[3] * w
            held[0] = row[4] * held[0] + row[5] * g
            held[1] = row[6] * held[1] + row[7] * g * g
            held[2:] = [np.maximum(x, held[1]) for x in held[2:]]
            w = w - row[0] * held[0] / (row[8] * np.sqrt(held[-1]) + row[9])
        elif states:
            held[0] = row[3] * held[0] + row[4] * g
            w = w - row[0] * (g + row[5] * held[0])
        else:
            w = w - row[0] * g
        for one, want in zip(got, (w, wide(each[1], dtype), *held), strict=True):
            if want.size:
                check(one, want, dtype, 2**-21)


def test_resample(find: Find, rng: np.random.Generator) -> None:
    """Pixels are Pillow's: of pictures that shrink, grow, lie on their side, and are cropped."""
    preprocess = Preprocess(20, 72, 24)
    sizes = [(48, 83, 1), (31, 92, 6), (20, 60, 3), (150, 26, 8), (24, 90, 2), (9, 5, 5)]
    pictures = [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w, _ in sizes]
    for some in (
        preprocess,
        replace(preprocess, resize=(19, 70), resample=Image.Resampling.BILINEAR),
    ):
        rows = [places(h, w, turn, some) for h, w, turn in sizes]
        got = resample(find("resample"), pictures, rows, (20, 72))
        for pixels, picture, (_, _, turn) in zip(got, pictures, sizes, strict=True):
            upright = Image.fromarray(picture)
            if turn > 1:
                upright = upright.transpose(UPRIGHT[turn])
            np.testing.assert_array_equal(pixels, some(upright))


@pytest.mark.parametrize(
    ("kind", "g", "width"),
    [
        ("max", Conv(2, 6, 5, 16, 16, 3, 3, (2, 2), (1, 1)), 8),
        ("max", Conv(1, 6, 7, 8, 8, 2, 3, (1, 2), (0, 1), (2, 1), after=(0, 1)), 8),
        ("max", Conv(2, 3, 5, 3, 3, 1, 2, (2, 3)), 1),
        ("mean", Conv(2, 6, 5, 16, 16, 3, 3, (2, 2), (1, 1)), 8),
    ],
    ids=str,
)
def test_pool_grad(find: Find, rng: np.random.Generator, kind: str, g: Conv, width: int) -> None:
    """Of x many numbers are equal: the first of a window wins."""
    x = rounded(np.round(rng.standard_normal((g.n, g.h, g.w, g.c))), BF16)
    dy = rounded(rng.standard_normal((g.n, *g.out, g.c)), BF16)
    name = f"{kind.replace('mean', 'avg')}_pool2d_grad_{kind}_{width}_{BF16}"
    places = None
    if kind == "max":
        places = pool(find(f"pool_place_{width}_{BF16}"), g, x, width, "uint8")
    got = pool_grad(find(name), g, dy, places, width, BF16)
    image, gradient = wide(x, BF16), wide(dy, BF16)
    want = np.zeros((g.n, g.h, g.w, g.c))
    for p, q, r, s in np.ndindex(*g.out, g.r, g.s):
        rows = [p * g.stride[0] - g.pad[0] + i * g.dilation[0] for i in range(g.r)]
        columns = [q * g.stride[1] - g.pad[1] + j * g.dilation[1] for j in range(g.s)]
        h, w = rows[r], columns[s]
        if not (0 <= h < g.h and 0 <= w < g.w):
            continue
        share = np.full((g.n, g.c), 1 / (g.r * g.s))  # whose windows are not cut at the end
        if kind == "max":
            seen = [(i, j) for i in rows for j in columns if 0 <= i < g.h and 0 <= j < g.w]
            first = np.argmax([image[:, i, j] for i, j in seen], 0)
            share = (first == seen.index((h, w))).astype(float)
        want[:, h, w] += share * gradient[:, p, q]
    check(got, want, BF16, SUMS)


@pytest.mark.parametrize(
    ("shape", "shifts", "axes", "width"),
    [
        ((2, 14, 14, 24), (11, 11), (1, 2), 8),
        ((3, 1, 7, 16), (0, 3), (1, 2), 8),
        ((2, 5, 3, 4, 9), (1, 3), (1, 3), 1),
        ((4, 6, 11), (2, 10), (1, 2), 1),
    ],
)
def test_roll(
    find: Find,
    rng: np.random.Generator,
    shape: tuple[int, ...],
    shifts: tuple[int, int],
    axes: tuple[int, int],
    width: int,
) -> None:
    x = rounded(rng.standard_normal(shape), BF16)
    got = roll(find(f"roll_{width}_{BF16}"), x, shifts, axes, width, BF16)
    np.testing.assert_array_equal(got, np.roll(x, shifts, axes))


@pytest.mark.parametrize(("shape", "width"), [((2, 196, 24), 8), ((3, 5, 7), 1), ((1, 1, 8), 8)])
def test_class_token(
    find: Find, rng: np.random.Generator, shape: tuple[int, ...], width: int
) -> None:
    x, token = (rounded(rng.standard_normal(size), BF16) for size in (shape, shape[2:]))
    got = class_token(find(f"class_token_{width}_{BF16}"), x, token, width, BF16)
    first = np.broadcast_to(token, (shape[0], 1, shape[2]))
    np.testing.assert_array_equal(got, np.concatenate([first, x], 1))


@pytest.mark.parametrize(
    ("kernel", "lanes", "shape"),
    [
        ("8x3", 8, (2, 37, 192)),
        ("8x3", 8, (3, 1, 8)),
        ("16x3", 16, (2, 196, 384)),
        ("16x3", 16, (1, 7, 200)),
        ("32x4", 32, (3, 5, 1024)),
        ("32x4", 32, (5, 1, 392)),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, "float32"])
def test_class_token_before_a_norm(
    find: Find,
    rng: np.random.Generator,
    kernel: str,
    lanes: int,
    shape: tuple[int, int, int],
    dtype: str,
) -> None:
    n, t, c = shape
    if dtype == "float32":  # vectors of 16 bytes are half as many numbers
        c = c // 2 - c // 2 % 4
    x = rounded(rng.standard_normal((n, t, c)) * 0.5 + 3, dtype)
    token = rounded(rng.standard_normal(c), dtype)
    weight, bias = rng.standard_normal((2, c)).astype(np.float32)
    name = f"class_token_layernorm_{kernel}_{dtype}"
    got = class_token_layernorm(find(name), lanes, x, token, weight, bias, dtype)
    np.testing.assert_array_equal(got[:, 0], np.broadcast_to(token, (n, c)))
    check(got[:, 1:], normalised(wide(x, dtype), weight, bias), dtype, 2**-20)


@pytest.mark.parametrize("shape", [(130, 96), (1, 32)])
def test_row_moments(find: Find, rng: np.random.Generator, shape: tuple[int, int]) -> None:
    x = rounded(rng.standard_normal(shape) + 0.5, BF16)
    got = row_moments(find(f"row_moments_{BF16}"), x)
    np.testing.assert_allclose(got, moments_of(wide(x, BF16)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("source", ["uint8", "float32"])
@pytest.mark.parametrize("shape", [(1, 37, 41, 3), (2, 3, 5, 1), (1, 1, 1, 3), (2, 16, 128, 3)])
def test_normalize(
    find: Find, rng: np.random.Generator, source: str, shape: tuple[int, ...]
) -> None:
    """Three sizes end within the 16 numbers of a thread."""
    x = rng.integers(0, 256, shape).astype(source)
    if source == "float32":
        x.reshape(-1)[[0, -1]] = np.nan, -np.inf
    mean = (rng.random(shape[3]) * 50 + 100).astype(np.float32)
    scale = (1 / (rng.random(shape[3]) * 50 + 50)).astype(np.float32)
    got = normalize(find(f"normalize_{source}_{BF16}"), x, mean, scale, BF16)
    check(got, (x.astype(np.float64) - mean) * scale, BF16, 2**-20)


@pytest.mark.parametrize("columns", [1, 31, 33, 1000])
@pytest.mark.parametrize("dtype", [BF16, "float32"])
def test_softmax(find: Find, rng: np.random.Generator, columns: int, dtype: str) -> None:
    """The float32 kernel is the logarithm's."""
    x = rounded(rng.standard_normal((5, columns)) * 4, dtype)
    values = wide(x, dtype)
    shifted = values - values.max(1, keepdims=True)
    want = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    want = np.exp(want) if dtype == BF16 else want
    check(softmax(find(f"softmax_{dtype}"), dtype, x), want, dtype, 2**-20)


@pytest.mark.parametrize("columns", [1, 31, 33, 1000])
def test_softmax_grad(find: Find, rng: np.random.Generator, columns: int) -> None:
    given = [rounded(rng.standard_normal((5, columns)), BF16) for _ in range(2)]
    dy, y = (wide(each, BF16) for each in given)
    want = y * (dy - (dy * y).sum(1, keepdims=True))
    check(softmax(find(f"softmax_grad_{BF16}"), BF16, *given), want, BF16, 2**-16)


@pytest.mark.parametrize(
    "g",
    [
        Reduction((2, 49, 264), 8, slice=32, threads=256),
        Reduction((2, 19, 40), 8, slice=8, threads=128),
        Reduction((1, 150, 24), 8, slice=4, threads=128, splits=4),
        Reduction((2, 9, 35), 1, slice=32, threads=64),
        Reduction((3, 50, 8), 8, folded=True),
        Reduction((3, 67, 1), 1),
    ],
)
@pytest.mark.parametrize(("kind", "dtype"), [("sum", BF16), ("amax", "float32")])
def test_reduce(find: Find, rng: np.random.Generator, g: Reduction, kind: str, dtype: str) -> None:
    if dtype == "float32" and g.width > 1:  # vectors of 16 bytes are half as many numbers
        outer, rows, inner = g.shape
        g = replace(g, shape=(outer, rows, inner // 2), width=4)
    x = rounded(rng.standard_normal(g.shape) + 0.5, dtype)
    if kind == "amax":
        x[0, 5, 0] = np.nan
    values = wide(x, dtype).reshape(g.shape[0], -1, 1) if g.folded else wide(x, dtype)
    divisor = float(values.shape[1]) if kind == "sum" else 1.0
    want = values.sum(1) / divisor if kind == "sum" else values.max(1)
    (y,) = reduce(find(g.name(kind, dtype)), g, [x], divisor, [dtype])
    check(y, want, dtype, 2**-20)


@pytest.mark.parametrize(
    "g",
    [
        Reduction((2, 19, 40), 8, slice=8, threads=128),
        Reduction((1, 70, 24), 8, slice=4, threads=64, splits=2),
        Reduction((2, 9, 35), 1, slice=32, threads=64),
        Reduction((3, 50, 8), 8, folded=True),
    ],
)
def test_reduce_terms(find: Find, rng: np.random.Generator, g: Reduction) -> None:
    """Reduces a gradient behind a mask, and its products with what is left of a mean."""
    dy, x = (rounded(rng.standard_normal(g.shape), BF16) for _ in range(2))
    mask = rng.integers(0, 2, g.shape).astype(np.uint8)
    mean = rng.standard_normal(1 if g.folded else g.shape[2]).astype(np.float32)
    inputs = [dy, mask, x, mean]
    found = reduce(find(g.name("sum", f"4to2_{BF16}")), g, inputs, 2.0, ["float32"] * 2)
    first = wide(dy, BF16) * mask
    terms: list[Array] = [first, first * (wide(x, BF16) - mean)]
    for y, term in zip(found, terms, strict=True):
        rows = term.reshape(g.shape[0], -1, 1) if g.folded else term
        check(y, rows.sum(1) / 2, "float32", 2**-20)


@pytest.mark.parametrize(
    "g",
    [
        Reduction((2, 19, 40), 8, slice=8, threads=128),
        Reduction((1, 90, 64), 8, slice=8, threads=64),
        Reduction((1, 150, 24), 8, slice=4, threads=128, splits=4),
        Reduction((1, 33, 1), 1, threads=64),
        Reduction((2, 9, 35), 1, slice=32, threads=64),
        Reduction((1, 70, 7), 1, slice=8, threads=64, splits=2),
        Reduction((1, 20, 384), 8, slice=32, threads=256),
    ],
)
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_reduce_results(find: Find, rng: np.random.Generator, g: Reduction, parts: bool) -> None:
    """Computes a batch norm's scale, shift and mean of x, or of the means of its parts.

    The first row of x is read, by the sums and by what stands behind them.
    """
    if parts:
        outer, rows, inner = g.shape
        g = replace(g, shape=(outer, rows, inner // 2 if g.width > 1 else inner))
        g = replace(g, width=4 if g.width > 1 else 1)
    outer, rows, inner = g.shape
    weight, bias = (rng.standard_normal((outer, inner)).astype(np.float32) for _ in range(2))
    if parts:
        first = rounded(rng.standard_normal((outer, inner)), BF16)
        near, spread = (rng.random(g.shape).astype(np.float32) for _ in range(2))
        spread += 2
        inputs = [near, spread]
        left = [each.astype(np.float64).mean(1) for each in inputs]
    else:
        x = rounded(rng.standard_normal(g.shape) + 4, BF16)
        inputs, first = [x, x], x
        far = wide(x, BF16) - wide(x, BF16)[:1, :1]
        left = [far.mean(1), (far * far).mean(1)]
    dtype = "float32" if parts else BF16
    kernel = find(g.name("sum", f"2to2_{dtype}_gives3"))
    dtypes = ["float32", "float32", BF16]
    got = reduce(kernel, g, inputs, float(rows), dtypes, [weight, bias, first])
    mean = left[0] + wide(first, BF16).reshape(-1, inner)[:outer]
    scale = weight / np.sqrt(left[1] - left[0] ** 2 + 1e-5)
    for y, want, kind in zip(got, [scale, bias - mean * scale, mean], dtypes, strict=True):
        check(y, want, kind, 2**-18)


@pytest.mark.parametrize(
    "g",
    [
        Squeeze(2, 49, 40, 10),
        Squeeze(1, 7, 8, 1),
        Squeeze(1, 30, 96, 5, kept=2, threads=512),
        Squeeze(2, 49, 40, 10, split=True),
        Squeeze(1, 20, 200, 12, split=True, kept=1),
        Squeeze(3, 13, 72, 20, together=2, split=True),
        Squeeze(9, 6, 136, 34, together=8, split=True, kept=4),
        Squeeze(1, 11, 2056, 3, split=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, pytest.param("float16", marks=pytest.mark.nightly)])
def test_squeeze_excite(find: Find, rng: np.random.Generator, g: Squeeze, dtype: str) -> None:
    """The float16 kernel adds a residual, and has other activations."""
    c, k, adds = g.channels, g.hidden, dtype == "float16"
    shape = (g.images, g.pixels, c)
    x = rounded(rng.standard_normal(shape) + 0.5, dtype)
    if g.images > 1:
        x[1, -1, 3] = rounded(np.full(1, np.inf), dtype)[0]
    squeeze = rounded(rng.standard_normal((k, c)) / math.sqrt(c), dtype)
    excite = rounded(rng.standard_normal((k, c)) / math.sqrt(k), dtype)
    biases = [rng.standard_normal(size).astype(np.float32) for size in (k, c)]
    residual = rounded(rng.standard_normal(shape), dtype) if adds else None
    name = "relu_hardsigmoid_add_relu" if adds else "silu_sigmoid_none"
    inputs = [x, squeeze, biases[0], excite, biases[1]]
    got = squeeze_excite(find(f"squeeze_excite_{name}_{dtype}"), g, inputs, residual, dtype)

    with np.errstate(all="ignore"):
        h = wide(x, dtype).mean(1) @ wide(squeeze, dtype).T + biases[0]
        h = np.maximum(h, 0) if adds else h / (1 + np.exp(-h))
        gates = h @ wide(excite, dtype) + biases[1]
        gates = np.clip(gates / 6 + 0.5, 0, 1) if adds else 1 / (1 + np.exp(-gates))
        want = wide(x, dtype) * gates[:, None]
        if residual is not None:
            want = np.maximum(want + wide(residual, dtype), 0)
    check(got, want, dtype, 2**-16)


@pytest.mark.parametrize(
    ("shape", "order", "width"),
    [
        ((3, 50, 4, 24), (2, 0, 1, 3), 8),
        ((2, 3, 5, 2, 7, 12), (0, 4, 1, 3, 2, 5), 4),
        ((5, 1, 7, 6), (2, 1, 0, 3), 2),
        ((4, 5, 3), (1, 0, 2), 1),
        ((3, 333, 5), (2, 0, 1), 1),
        ((16, 32), (0, 1), 8),
    ],
)
@pytest.mark.parametrize("bits", ["uint16", "uint32"])
@pytest.mark.parametrize("whole", [True, False])
def test_permute_of_rows(
    find: Find,
    rng: np.random.Generator,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    width: int,
    bits: str,
    whole: bool,
) -> None:
    """In a quarter of the blocks a thread copies four pieces."""
    x = rng.integers(0, np.iinfo(bits).max, shape, bits)
    width = min(width, 16 // x.itemsize)
    kernel = f"permute_rows_{bits}x1" if width == 1 else f"permute_rows_uint32x{width // 2}"
    if bits == "uint32":
        kernel = f"permute_rows_uint32x{width}"
    grid = -(-(x.size // width) // (256 if whole else 1024))
    y = permute_rows(find(kernel), x, order, width, grid)
    np.testing.assert_array_equal(y, x.transpose(order))


@pytest.mark.parametrize(
    ("shape", "order", "wide"),
    [
        ((128, 64), (1, 0), (8, 8)),
        ((2, 72, 136), (0, 2, 1), (8, 8)),
        ((100, 2, 3, 72), (3, 1, 2, 0), (8, 4)),
        ((4, 5, 66, 3, 20), (4, 1, 3, 0, 2), (4, 2)),
        ((2, 2, 3, 2, 49, 70), (5, 2, 0, 1, 3, 4), (2, 1)),
        ((1, 196, 81), (2, 0, 1), (1, 4)),
        ((9, 8), (1, 0), (8, 1)),
    ],
)
@pytest.mark.parametrize("bits", ["uint16", "uint32"])
def test_permute_of_tiles(
    find: Find,
    rng: np.random.Generator,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    wide: tuple[int, int],
    bits: str,
) -> None:
    x = rng.integers(0, np.iinfo(bits).max, shape, bits)
    most = 16 // x.itemsize
    wide = min(wide[0], most), min(wide[1], most)
    y = permute_tiles(find(f"permute_tiles_{bits}"), x, order, wide)
    np.testing.assert_array_equal(y, x.transpose(order))


@pytest.mark.parametrize(
    "g",
    [
        Groups((2, 30, 72), members=12, width=8, slab=72, slice=16, parts=2),
        Groups((1, 70, 264), members=264, width=8, slab=256, slice=32, parts=3),
        Groups((2, 9, 35), members=5, width=1, slab=30, slice=32, parts=1),
    ],
)
def test_group_norm(find: Find, rng: np.random.Generator, g: Groups) -> None:
    x = rounded(rng.standard_normal(g.shape) + 3, BF16)
    weight, bias = rng.standard_normal((2, g.shape[2])).astype(np.float32)
    kernels = [find(f"group_norm_{part}_{g.width}_{BF16}") for part in ("moments", "relu")]
    values = wide(x, BF16).reshape(*g.shape[:2], -1, g.members)
    centred = values - values.mean((1, 3), keepdims=True)
    want = centred / np.sqrt((centred**2).mean((1, 3), keepdims=True) + EPSILON)
    want = np.maximum(want.reshape(g.shape) * weight + bias, 0)
    check(group_norm(kernels, g, x, weight, bias, BF16), want, BF16, 2**-19)


@pytest.mark.parametrize(("kernel", "lanes", "columns"), [("8x3", 8, 192), ("", 32, 57)])
def test_rms_norm(
    find: Find, rng: np.random.Generator, kernel: str, lanes: int, columns: int
) -> None:
    x = rounded(rng.standard_normal((5, columns)) + 1, BF16)
    weight = rng.standard_normal(columns).astype(np.float32)
    name = f"rms_norm_{kernel}_{BF16}_{BF16}".replace("__", "_")
    y = layernorm(find(name), lanes, x, columns, weight, weight, BF16)
    values = wide(x, BF16)
    want = values / np.sqrt((values**2).mean(1, keepdims=True) + EPSILON) * weight
    check(y, want, BF16, 2**-20)


POOLING = [
    StemCase(2, 32, 32, 64, 2, "maxpool", 3, 2, 2),
    StemCase(1, 37, 45, 64, 2, "maxpool", 3, 1, 2),
    StemCase(1, 20, 64, 32, 2, "maxpool", 3, 3, 4),
    StemCase(1, 9, 7, 64, 2, "maxpool", 3, 2, 2),
]


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("g", POOLING, ids=str)
def test_stem_maxpool(find: Find, rng: np.random.Generator, g: StemCase, offset: int) -> None:
    x = rng.integers(0, 256, (g.n, g.h, g.w, g.c), np.uint8)
    inputs, z = stem_inputs(rng, g, x)
    got = stem(find("stem_maxpool_bfloat16"), g, inputs, offset)
    check(got, pooled_stem(g, z), BF16, SUMS)


@pytest.mark.parametrize("g", POOLING, ids=str)
def test_stem_maxpool_to_bytes(find: Find, rng: np.random.Generator, g: StemCase) -> None:
    """Nothing but the last step rounds: ties are among the results, and what saturates."""
    x = rng.integers(0, 256, (g.n, g.h, g.w, g.c), np.uint8)
    inputs, z = stem_inputs(rng, g, x, exact=True)
    assert (z % 1 == 0.5).any() and (z < -0.5).any() and (z > 256).any()
    got = stem(find("stem_maxpool_bfloat16_to_uint8"), g, inputs, 1, "uint8")
    np.testing.assert_array_equal(got, rounded(pooled_stem(g, z), "uint8"))


@pytest.mark.parametrize("dtype", [BF16, "float16"])
@pytest.mark.parametrize(
    ("n", "h", "grid"),
    [(1, 1, 1), (1, 16, 1), (2, 9, 3), (3, 23, 2), (1, 12, 3)],
)
def test_stem_maxpool_hopper(
    find: Find, rng: np.random.Generator, n: int, h: int, grid: int, dtype: str
) -> None:
    """Blocks that begin and end within an image, and that go on in the next."""
    g = StemCase(n, h, 224, 64, 2, "maxpool", 3, 0, 0)
    x = rng.integers(0, 256, (g.n, g.h, g.w, g.c), np.uint8)
    inputs, z = stem_inputs(rng, g, x, dtype=dtype)
    got, _ = stem_hopper(find(f"stem_maxpool_hopper_{dtype}"), g, inputs, grid, dtype=dtype, seed=h)
    check(got, pooled_stem(g, z), dtype, SUMS)


@pytest.mark.parametrize("dtype", [BF16, "float16"])
@pytest.mark.parametrize(("n", "h", "grid"), [(1, 1, 1), (2, 9, 3), (3, 23, 2)])
def test_stem_maxpool_conv2d_hopper(
    find: Find, rng: np.random.Generator, n: int, h: int, grid: int, dtype: str
) -> None:
    """The rows of z are stored one later than those of y, also where another image begins."""
    g = StemCase(n, h, 224, 64, 2, "maxpool", 3, 0, 0)
    x = rng.integers(0, 256, (g.n, g.h, g.w, g.c), np.uint8)
    inputs, z = stem_inputs(rng, g, x, dtype=dtype)
    v = rounded(rng.standard_normal((64, 64)) * 0.1, dtype)
    kernel = find(f"stem_maxpool_conv2d_hopper_{dtype}")
    y, following = stem_hopper(kernel, g, inputs, grid, dtype=dtype, seed=h, following=v)
    check(y, pooled_stem(g, z), dtype, SUMS)
    want = np.maximum(wide(y, dtype) @ wide(v, dtype).T + inputs[5], 0)
    check(following, want, dtype, SUMS)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_stem_maxpool_hopper_keeps_nan(find: Find, rng: np.random.Generator) -> None:
    g = StemCase(1, 8, 224, 64, 2, "maxpool", 3, 0, 0)
    x = rng.integers(0, 256, (g.n, g.h, g.w, g.c), np.uint8)
    inputs, z = stem_inputs(rng, g, x)
    inputs[4][[3, 40]], inputs[4][9] = np.nan, np.inf
    z += inputs[4] * 0
    z[..., 9] = np.inf
    check(
        stem_hopper(find("stem_maxpool_hopper_bfloat16"), g, inputs, 2)[0],
        pooled_stem(g, z),
        BF16,
        SUMS,
    )


def pooled_stem(g: StemCase, z: Array) -> Array:
    p, q = g.out
    padded = np.pad(np.maximum(z, 0), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [
        padded[:, r : r + 2 * p - 1 : 2, s : s + 2 * q - 1 : 2][:, :p, :q]
        for r in range(3)
        for s in range(3)
    ]
    return np.max(windows, 0)


@pytest.mark.parametrize(
    "g",
    [
        StemCase(2, 32, 32, 64, 4, "layernorm", 2, 2, 2),
        StemCase(1, 37, 61, 64, 4, "layernorm", 2, 1, 2),
        StemCase(1, 30, 30, 192, 4, "layernorm", 2, 2, 2),
        StemCase(1, 11, 9, 32, 4, "layernorm", 2, 1, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("odd", [None, np.nan, -np.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_stem_layernorm(
    find: Find, rng: np.random.Generator, g: StemCase, odd: float | None
) -> None:
    x = rounded(rng.standard_normal((g.n, g.h, g.w, g.c)), BF16)
    if odd is not None:
        x[0, [0, g.h // 2], [g.w - 1, g.w // 2], [0, 1]] = rounded(np.array(odd), BF16)
    inputs, z = stem_inputs(rng, g, x)
    z = wide(rounded(z, BF16), BF16)
    want = normalised(z, inputs[5], inputs[6])
    # z may be rounded the other way.
    check(stem(find("stem_layernorm_bfloat16"), g, inputs), want, BF16, 2**-8)


@pytest.mark.parametrize(
    ("kernel", "g"),
    [
        ("silu", StemCase(2, 21, 30, 32, 2, "conv2d", 1, 2, 1, r=3, s=3)),
        ("silu", StemCase(1, 37, 45, 16, 2, "conv2d", 1, 1, 2, r=3, s=3)),
        ("silu", StemCase(1, 9, 40, 72, 2, "conv2d", 0, 1, 3, r=3, s=3)),
        ("relu", StemCase(2, 12, 19, 64, 1, "conv2d", 1, 2, 2, r=3, s=3)),
        ("relu", StemCase(1, 5, 33, 24, 1, "conv2d", 0, 1, 4, r=3, s=3)),
    ],
    ids=str,
)
def test_stem_conv2d(find: Find, rng: np.random.Generator, kernel: str, g: StemCase) -> None:
    x = rng.integers(0, 256, (g.n, g.h, g.w, g.c), np.uint8)
    inputs, z = stem_inputs(rng, g, x)
    want = z / (1 + np.exp(-z)) if kernel == "silu" else np.maximum(z, 0)
    check(stem(find(f"stem_conv2d_{kernel}_bfloat16"), g, inputs, 1), want, BF16, SUMS)


@pytest.mark.parametrize(
    "g",
    [
        StemCase(2, 12, 19, 64, 1, "conv2d", 1, 2, 2, r=3, s=3),
        StemCase(1, 6, 7, 8, 1, "conv2d", 1, 2, 1, r=3, s=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("odd", [None, np.nan, -np.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_stem_conv2d_of_floats(
    find: Find, rng: np.random.Generator, g: StemCase, odd: float | None
) -> None:
    x = rounded(rng.standard_normal((g.n, g.h, g.w, g.c)), BF16)
    if odd is not None:
        x[0, [0, g.h // 2], [g.w - 1, g.w // 2], [0, 1]] = rounded(np.array(odd), BF16)
    inputs, want = stem_inputs(rng, g, x)
    check(stem(find("stem_conv2d_none_bfloat16"), g, inputs), want, BF16, SUMS)


@pytest.mark.parametrize("f", [64, 40, 8])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_stem_conv2d_to_bytes(find: Find, rng: np.random.Generator, f: int) -> None:
    """Nothing but the last step rounds. What is below 0 becomes 0, as does NaN."""
    g = StemCase(2, 11, 19, f, 1, "conv2d", 1, 2, 2, r=3, s=3)
    x = rng.integers(-100, 101, (g.n, g.h, g.w, g.c)) / 4
    x[0, 0, 0, 0], x[0, 5, 9, 1], x[1, 10, 18, 2] = np.nan, np.inf, -np.inf
    inputs, z = stem_inputs(rng, g, rounded(x, BF16), exact=True)
    assert (z % 1 == 0.5).any() and (z < -0.5).any() and (z > 256).any() and np.isnan(z).any()
    got = stem(find("stem_conv2d_none_bfloat16_to_uint8"), g, inputs, 0, "uint8")
    np.testing.assert_array_equal(got, rounded(np.nan_to_num(z, nan=0), "uint8"))


def stem_inputs(
    rng: np.random.Generator, g: StemCase, x: Array, exact: bool = False, dtype: str = BF16
) -> tuple[list[Array], Array]:
    """Makes a stem's tensors from x on, and z[N, P, Q, F] in float64.

    Where it is to be ``exact``, of uint8 or multiples of 1/4, z is that of float32, too.
    """
    means, scales = (rng.random(g.c) * 50 + 100).astype(np.float32), np.float32(1 / 60)
    if exact:
        means, scales = np.full(g.c, 128, np.float32), np.float32(1 / 8)
    scale = np.full(g.c, scales)
    w = rounded(rng.standard_normal((g.r, g.s, g.c, g.f)) * 0.1, dtype)
    bias, gamma, beta = rng.standard_normal((3, g.f)).astype(np.float32)
    if exact:
        w = rounded(rng.integers(-12, 13, (g.r, g.s, g.c, g.f)) / 8, dtype)
        bias = (rng.integers(-40, 41, g.f) / 2).astype(np.float32)
    values = wide(x, dtype)
    if x.dtype == np.uint8:
        values = wide(rounded((x - means).astype(np.float32) * scale, dtype), dtype)
    z = g.conv.apply(values, wide(w, dtype).transpose(3, 0, 1, 2)) + bias
    inputs = [x, means, scale, stem_fragments(w, g.stride), bias, gamma, beta]
    return inputs, z.reshape(g.n, *g.conv.out, g.f)
