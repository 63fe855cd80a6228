"""GPU kernels run without a GPU: their PTX, on shapes that end within a tile, against float64.

References are numpy's in float64; a bound is twice the rounding of the result's dtype, and what
each case says that float32 sums, or results that are rounded on the way, may add.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from .conftest import Find
from .launches import (
    TILES,
    Conv,
    Product,
    Qkv,
    Tile,
    check,
    depthwise_qkv,
    hopper,
    layernorm,
    rounded,
    wide,
)

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = "bfloat16"
SUMS = 2**-18
"""What float32 sums of some hundred products may be off by."""
EPSILON = 1e-5

erf = np.vectorize(math.erf)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


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
    name = f"layernorm_{kernel}_{dtype}".replace("__", "_")
    y = layernorm(find(name), lanes, x, columns, weight, bias, dtype)
    check(y, normalised(wide(x, dtype)[:, :columns], weight, bias), dtype, 2**-20)


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
    ],
    ids=str,
)
def test_depthwise_qkv(find: Find, rng: np.random.Generator, g: Qkv) -> None:
    taps = g.kernel**2
    x = rounded(rng.standard_normal((g.images, g.h * g.w + g.first, g.c)) * 0.7 + 1, BF16)
    weight, norm_bias = rng.standard_normal((2, g.c)).astype(np.float32)
    filters = [rounded(rng.standard_normal((taps, g.c)) * 0.5, BF16) for _ in range(3)]
    biases = list(rng.standard_normal((3, g.c)).astype(np.float32))
    lanes, vectors = g.lanes
    kernel = find(f"depthwise_qkv_{g.kernel}_{lanes}x{vectors}_bfloat16")
    got = depthwise_qkv(kernel, g, [x, weight, norm_bias, *filters, *biases])

    tokens = wide(rounded(normalised(wide(x, BF16), weight, norm_bias), BF16), BF16)
    image = tokens[:, g.first :].reshape(g.images, g.h, g.w, g.c)
    pads, strides = (g.pad_q, g.pad_kv, g.pad_kv), (1, g.stride, g.stride)
    for y, f, bias, pad, stride in zip(got, filters, biases, pads, strides, strict=True):
        p, q = ((n + 2 * pad - g.kernel) // stride + 1 for n in (g.h, g.w))
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        want = np.zeros((g.images, p, q, g.c)) + bias
        for tap in range(taps):
            r, s = divmod(tap, g.kernel)
            rows = slice(r, r + stride * (p - 1) + 1, stride)
            columns = slice(s, s + stride * (q - 1) + 1, stride)
            want += padded[:, rows, columns] * wide(f, BF16)[tap]
        want = np.concatenate([tokens[:, : g.first], want.reshape(g.images, -1, g.c)], 1)
        # A normalised token may be rounded the other way: half an ulp of one of the terms.
        check(y, want, BF16, 2**-9)


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
    if "add" in epilogue:
        y = y + wide(p.residual, dtype)
    if "relu" in epilogue:
        y = np.maximum(y, 0)
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


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.label)
@pytest.mark.parametrize(("g", "alpha", "splits"), RESIDUAL, ids=str)
def test_hopper_adds_a_residual(
    find: Find, rng: np.random.Generator, tile: Tile, g: Conv, alpha: float, splits: int
) -> None:
    run_hopper(find, rng, tile, "add_relu", [g], alpha=alpha, splits=splits)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.label)
@pytest.mark.parametrize(("g", "beside"), SHORTCUTS, ids=str)
def test_hopper_adds_a_shortcut(
    find: Find, rng: np.random.Generator, tile: Tile, g: Conv, beside: Conv
) -> None:
    run_hopper(find, rng, tile, "relu", [g], beside, splits=2)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.label)
@pytest.mark.parametrize("rows", [(150,), (65, 1, 37)], ids=str)
def test_hopper_multiplies(
    find: Find, rng: np.random.Generator, tile: Tile, rows: tuple[int, ...]
) -> None:
    run_hopper(find, rng, tile, "none", [Conv(1, m, 1, 200, 136) for m in rows], splits=2)


@pytest.mark.parametrize("tile", [TILES[2], TILES[5]], ids=lambda tile: tile.label)
def test_hopper_gelu(find: Find, rng: np.random.Generator, tile: Tile) -> None:
    run_hopper(find, rng, tile, "gelu", [Conv(1, 70, 1, 64, 72)])


def test_hopper_float16(find: Find, rng: np.random.Generator) -> None:
    run_hopper(find, rng, TILES[2], "add_relu", [Conv(1, 70, 1, 72, 72)], dtype="float16")


def run_hopper(
    find: Find,
    rng: np.random.Generator,
    tile: Tile,
    epilogue: str,
    sizes: list[Conv],
    beside: Conv | None = None,
    *,
    dtype: str = BF16,
    alpha: float = 1,
    splits: int = 1,
) -> None:
    products = [product(rng, g, dtype) for g in sizes]
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
        adds="add" in epilogue,
    )
    for y, p in zip(got, products, strict=True):
        sums = alpha * convolved(p, dtype)
        if more:
            sums = sums + alpha * convolved(more, dtype) + more.bias
        check(y, finished(sums, p, epilogue, dtype), dtype, SUMS)
