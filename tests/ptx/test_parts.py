"""The parts of ops/hopper by themselves: kernels of parts.mojo, and the GEMM of page_gemm.mojo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .conftest import Find
from .launches import check, rounded, unwritten, wide
from .machine import Launch, Tensors, pack
from .semantics import FLOAT8, to_tf32
from .tensormaps import Tiled

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = "bfloat16"
SUMS = 2**-18


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[Array, Array]:
    """Draws numbers: as they lie in memory, and in float64."""
    if dtype in FLOAT8:
        table = FLOAT8[dtype]
        bits = rng.choice(np.flatnonzero(np.abs(table) <= 2).astype(np.uint8), shape)
        return bits, table[bits]
    if dtype in ("int8", "uint8"):
        limits = np.iinfo(dtype)
        x = rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
        return x, x.astype(np.float64)
    x = rounded(rng.standard_normal(shape), dtype)
    # The copy engine rounds float32 to TF32.
    return (
        (x, wide(to_tf32(x).view(np.float32), dtype)) if dtype == "float32" else (x, wide(x, dtype))
    )


@pytest.mark.parametrize("shape", [(1, 64, 8), (150, 200, 136), (64, 640, 64)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, "float16", "float32", *FLOAT8, "int8"])
def test_gemm_of_a_page(
    find: Find, rng: np.random.Generator, dtype: str, shape: tuple[int, int, int]
) -> None:
    m, k, f = shape
    k += k % 16 if dtype in (*FLOAT8, "int8") else 0
    (x, x64), (w, w64) = drawn(rng, (m, k), dtype), drawn(rng, (f, k), dtype)
    bias = rng.standard_normal(f).astype(np.float32)
    out = "float32" if dtype == "float32" else BF16
    memory = Tensors()
    y = unwritten((m, f), out)
    at = memory.add(y)
    y = memory.array(at, y)
    if dtype == "float32":
        x, w = (to_tf32(a).view(np.float32) for a in (x, w))
    width, box = 128 // x.itemsize, 128 // y.itemsize
    late = memory.add(x, late=True)
    maps = [Tiled(memory.array(late, x), (64, width)), Tiled(w, (64, width)), Tiled(y, (64, box))]
    columns, tiles = -(-f // 64), -(-m // 64) * -(-f // 64)
    at_bias = memory.add(bias)
    launch = Launch(
        find(f"page_gemm_relu_{dtype}"),
        [
            bytes(3 * 128),
            pack("4Q", at_bias, at_bias, at, at),
            pack("4i", 0, columns, tiles, 1),
            pack("i", -(-k // width)),
            pack("i", f),
        ],
        memory,
        grid=(min(2, tiles),),
        threads=160,
        shared_bytes=4 * (16384 + 16) + 1024,
        maps=maps,
    )
    launch.run()
    check(y, np.maximum(x64 @ w64.T + bias, 0), out, SUMS)


@pytest.mark.parametrize("splits", [1, 3])
def test_scheduler(find: Find, splits: int) -> None:
    rows, columns, steps = [4, 1, 2] if splits == 1 else [5], 3, 10
    tiles = sum(rows) * columns
    memory = Tensors()
    seen = np.full((tiles * splits, 6), -1, np.int32)
    at = memory.add(seen)
    firsts = (np.cumsum([0, *rows[:-1]]) * columns).tolist()
    schedule = pack(f"{len(firsts) + 3}i", *firsts, columns, tiles, splits)
    blocks = 4 if splits == 1 else tiles * splits
    Launch(
        find(f"parts_scheduler_{len(rows)}_{splits > 1}"),
        [pack("Q", at), schedule, pack("i", steps)],
        memory,
        grid=(blocks,),
        threads=32,
        cluster=splits,
    ).run()
    want = [
        [
            (number * splits + rank) % blocks,
            product,
            row,
            column,
            steps * rank // splits,
            steps * (rank + 1) // splits,
        ]
        for number, (product, row, column) in enumerate(
            (product, row, column)
            for product, count in enumerate(rows)
            for row in range(count)
            for column in range(columns)
        )
        for rank in range(splits)
    ]
    np.testing.assert_array_equal(memory.array(at, seen), want)


@pytest.mark.parametrize("dtype", [BF16, "float32"])
def test_finishes_columns(find: Find, rng: np.random.Generator, dtype: str) -> None:
    width = 128 // (2 if dtype == BF16 else 4)
    (w, w64), (x, x64) = drawn(rng, (64, width), dtype), drawn(rng, (64, width), dtype)
    if dtype == "float32":
        x, w = (to_tf32(a).view(np.float32) for a in (x, w))
    residual = rounded(rng.standard_normal((64, 64)), dtype)
    bias = rng.standard_normal(64).astype(np.float32)
    memory = Tensors()
    at = memory.add(unwritten((64, 64), dtype))
    y = memory.array(at, residual)
    at_bias = memory.add(bias)
    Launch(
        find(f"parts_columns_{dtype}"),
        [bytes(4 * 128), pack("4Q", at_bias, at_bias, at, at)],
        memory,
        grid=(1,),
        threads=128,
        shared_bytes=4 * 8192 + 16 + 1024,
        maps=[Tiled(a, (64, width)) for a in (w, x, residual, y)],
    ).run()
    want = 2 * x64 @ w64.T + bias + wide(residual, dtype)
    check(y, np.maximum(want, 0), dtype, SUMS)


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_cluster_adds_up(find: Find, rng: np.random.Generator, turned: bool, splits: int) -> None:
    m, f = 70, 72
    bias = rng.standard_normal(f).astype(np.float32)
    residual = rng.standard_normal((m, f)).astype(np.float32)
    memory = Tensors()
    at = [memory.add(a) for a in (bias, bias, residual, unwritten((m, f), "float32"))]
    Launch(
        find(f"parts_cluster_{turned}"),
        [pack("4Q", *at), pack("4i", 0, 2, 4, splits), pack("i", m), pack("i", f)],
        memory,
        grid=(4 * splits,),
        threads=128,
        shared_bytes=64 * (64 + 8) * 4 + 1024,
        cluster=splits,
    ).run()
    row, column = np.meshgrid(np.arange(m) % 64, np.arange(f) % 64, indexing="ij")
    tile = 100 * column + row if turned else 100 * row + column
    want = tile * sum(range(1, splits + 1)) / 2 + bias + residual
    check(memory.array(at[3], residual), want.astype(np.float64), "float32", SUMS)
