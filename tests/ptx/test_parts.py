"""The parts of ops/hopper by themselves: kernels of parts.mojo, and the GEMM of page_gemm.mojo."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from .conftest import Find
from .launches import (
    Conv,
    Norm,
    check,
    held,
    pixel_box,
    pixels_of,
    problem,
    quads,
    rounded,
    unwritten,
    wide,
)
from .machine import Deadlock, Launch, Tensors, pack
from .ptx import Kernel, without
from .semantics import FLOAT8, float8_products, to_tf32
from .tensormaps import Tiled

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = "bfloat16"
E4M3 = "float8_e4m3fn"
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
    if dtype == "float32":  # as the copy engine rounds it
        x = to_tf32(x).view(np.float32)
    return x, wide(x, dtype)


FACTORS = (BF16, "float16", "float32", *FLOAT8, "int8", "uint8")
"""What wgmma multiplies."""
BYTES = {BF16: 2, "float16": 2, "float32": 4}


def right_of(dtype: str) -> str:
    """Names what a kernel multiplies a dtype by: levels of pixels meet weights that have signs."""
    return "int8" if dtype == "uint8" else dtype


def sum_of(dtype: str) -> str:
    return "int32" if dtype in ("int8", "uint8") else "float32"


def multiplied(x: Array, w: Array, dtype: str, sums: float = 0, depth: int = 32) -> Array:
    """Multiplies x[M, K] by w[N, K]: 8-bit floats as wgmma does, whose sums keep 13 bits."""
    if dtype in FLOAT8:
        rough = float8_products(x, w, sums, depth)
        exact = sums + x @ w.T
        assert np.abs(rough - exact).max() < 2**-8 * np.abs(exact).max()
        return rough
    return np.asarray(sums + x @ w.T)


def check_sums(y: Array, want: Array, dtype: str) -> None:
    """Demands integers and products of 8-bit floats exactly, others as rounding lets them be."""
    if dtype in (*FLOAT8, "int8", "uint8"):
        np.testing.assert_array_equal(y, want)
    else:
        check(y, want, "float32", SUMS)


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
    check(y, np.maximum(multiplied(x64, w64, dtype) + bias, 0), out, SUMS)


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


RINGS = {  # dtypes of x and w; columns of a tile; bytes of K, and of a stage; stages of a result
    "overlap": (BF16, BF16, 128, 128, 24576, 2),
    "turned": (BF16, BF16, 128, 128, 24576, 1),
    "narrow": ("uint8", "int8", 64, 64, 8192, 1),
}


@pytest.mark.parametrize(("steps", "stages"), [(1, 4), (5, 3), (3, 7)])
@pytest.mark.parametrize("ring", RINGS)
def test_multiplies_the_stages_of_a_ring(
    find: Find, rng: np.random.Generator, ring: str, steps: int, stages: int
) -> None:
    dtype, right, columns, row, stage, _ = RINGS[ring]
    width = row // (1 if dtype == "uint8" else 2)
    k, rows, f = steps * width - 16, 3 * 64, columns + 72
    across = -(-f // columns)
    (x, x64), (w, w64) = drawn(rng, (rows, k), dtype), drawn(rng, (f, k), right)
    bias = rng.standard_normal(f).astype(np.float32)
    memory = Tensors()
    y = held(memory, unwritten((rows, f), BF16))[1]
    maps = [Tiled(x, (64, width)), Tiled(w, (columns, width)), Tiled(y, (64, 64))]
    if ring == "turned":
        x = np.ascontiguousarray(x.reshape(3, 64, k).transpose(0, 2, 1))
        maps = [Tiled(x, (1, 64, 64)), Tiled(w.T.copy(), (64, 64))]
        maps.append(Tiled(y.reshape(3, 64, f), (1, 64, 64)))
    maps[0].tensor = held(memory, maps[0].tensor, late=True)[1]
    at = memory.add(bias)
    for blocks in (1, 2):
        y[:] = unwritten(y.shape, BF16)
        Launch(
            find(f"parts_ring_{ring}"),
            [
                bytes(3 * 128),
                pack("4Q", at, at, at, at),
                pack("4i", 0, across, 3 * across, 1),
                *(pack("i", n) for n in (steps, stages, f)),
            ],
            memory,
            grid=(blocks,),
            threads=160,
            shared_bytes=stages * (stage + 16) + 1024,
            maps=maps,
        ).run(blocks)
        check(y, 1 + x64 @ w64.T + bias, BF16, SUMS)


def test_multiplies_what_lies_apart(find: Find, rng: np.random.Generator) -> None:
    steps, stages, rows, f = 4, 3, 59, 136
    (x, x64), (w, w64) = (drawn(rng, (n, 64 * steps), BF16) for n in (64, 128))
    memory = Tensors()
    at, y = held(memory, unwritten((64, f), BF16))
    Launch(
        find("parts_apart"),
        [bytes(2 * 128), pack("Q", at), *(pack("i", n) for n in (steps, stages, rows, f))],
        memory,
        grid=(1,),
        threads=288,
        shared_bytes=(steps + stages) * (8192 + 16) + 1024,
        maps=[Tiled(x, (64, 64)), Tiled(w, (64, 64))],
    ).run()
    scale = np.where(np.arange(rows) % 16 < 8, 3, 2)[:, None]
    check(y[:rows, :128], (x64 @ w64.T)[:rows] * scale, BF16, SUMS)
    assert np.isnan(wide(y[rows:], BF16)).all() and np.isnan(wide(y[:, 128:], BF16)).all()


@pytest.mark.parametrize(
    ("dtype", "turned"),
    [*((dtype, False) for dtype in FACTORS), (BF16, True), ("float16", True)],
    ids=str,
)
def test_multiplies_registers(
    find: Find, rng: np.random.Generator, dtype: str, turned: bool
) -> None:
    steps, width = 5, 128 // BYTES.get(dtype, 1)
    (x, x64), (w, w64) = (drawn(rng, (64, steps * width), d) for d in (dtype, right_of(dtype)))
    memory = Tensors()
    at, y = held(memory, np.full((64, 64), 77, sum_of(dtype)))
    Launch(
        find(f"parts_registers_{dtype}_{turned}"),
        [bytes(2 * 128), pack("Q", at), pack("i", steps)],
        memory,
        grid=(1,),
        threads=160,
        shared_bytes=2 * (2 * 8192 + 24) + 1024,
        maps=[Tiled(x, (64, width)), Tiled(w.T.copy() if turned else w, (64, width))],
    ).run()
    check_sums(y, multiplied(x64, w64, dtype), dtype)


def test_multiplies_boxes(find: Find, rng: np.random.Generator) -> None:
    (x, x64), (w, w64) = drawn(rng, (64, 128), BF16), drawn(rng, (32, 128), BF16)
    memory = Tensors()
    at, y = held(memory, unwritten((64, 32), "float32"))
    Launch(
        find("parts_boxes"),
        [bytes(2 * 128), pack("Q", at)],
        memory,
        grid=(1,),
        threads=128,
        shared_bytes=2 * (8192 + 4096) + 16 + 1024,
        maps=[Tiled(x, (64, 64)), Tiled(w, (32, 64))],
    ).run()
    check(y, x64 @ w64.T, "float32", SUMS)


def indices_of(codes: Array, size: int) -> Array:
    """Lays out four bits of each row and four as `mma_sparse` has the words of a warpgroup."""
    codes = codes.astype(np.uint32)
    bits = np.arange(0, 32, 4, dtype=np.uint32)
    if size == 1:  # of word, warp, row, half of the word's fours, upper or lower rows, four
        codes = codes.reshape(4, 2, 8, 2, 2, 8).transpose(3, 0, 2, 4, 1, 5)
    else:  # of warp, row, lane, upper or lower rows, four
        codes = codes.reshape(4, 2, 8, 4, 4).transpose(0, 2, 3, 1, 4).reshape(4, 8, 4, 8)
    return (codes << bits).sum(-1, dtype=np.uint32)


@pytest.mark.parametrize("dtype", FACTORS)
def test_multiplies_two_of_four(find: Find, rng: np.random.Generator, dtype: str) -> None:
    """Of float32 one of each two is there: a four then is two numbers."""
    size = BYTES.get(dtype, 1)
    kept = 1 if size == 4 else 2
    fours = 64 // size // kept
    (a, a64), (w, w64) = (
        drawn(rng, (rows, depth // size), d)
        for rows, depth, d in ((64, 64, dtype), (32, 128, right_of(dtype)))
    )
    places = np.array(list(itertools.combinations(range(2 * kept), kept)))
    chosen = places[rng.integers(0, len(places), (64, fours))]
    dense = np.zeros((64, fours, 2 * kept))
    np.put_along_axis(dense, chosen, a64.reshape(64, fours, kept), 2)
    first, last = chosen[:, :, 0], chosen[:, :, -1]
    codes = np.where(first, 0b1110, 0b0100) if size == 4 else first | last << 2
    memory = Tensors()
    cores = a.reshape(64, 4, 16 // size).transpose(1, 0, 2)
    at = [memory.add(each) for each in (cores, indices_of(codes, size))]
    at_y, y = held(memory, np.full((64, 32), 77, sum_of(dtype)))
    Launch(
        find(f"parts_sparse_{dtype}"),
        [bytes(128), *(pack("Q", each) for each in (*at, at_y)), pack("i", 0)],
        memory,
        grid=(1,),
        threads=128,
        shared_bytes=4096 + 4096 + 16 + 1024,
        maps=[Tiled(w, (32, 128 // size))],
    ).run()
    check_sums(y, multiplied(dense.reshape(64, -1), w64, dtype, 1, 64), dtype)


@pytest.mark.parametrize(
    "g",
    [
        Conv(2, 9, 8, 72, 8, 3, 2, (2, 1), (1, 0), (1, 2), (1, 0)),
        Conv(1, 12, 11, 136, 8, 2, 3, (3, 2), (1, 2)),
        Conv(2, 7, 9, 72, 8),
    ],
    ids=str,
)
def test_copies_pixels_and_boxes(find: Find, rng: np.random.Generator, g: Conv) -> None:
    x, (p, q), chunks, m0 = drawn(rng, (g.n, g.h, g.w, g.c), BF16)[0], g.out, -(-g.c // 64), 5
    steps = g.r * g.s * chunks
    begin, end = min(1, steps - 1), steps + 2
    box = drawn(rng, (4, 3, 6, 136), BF16)[0]
    memory = Tensors()
    y = held(memory, np.zeros(((end - begin) * 64, 64), np.uint16))[1]
    to = held(memory, np.zeros((3, 4, 7, 64), np.uint16))[1]
    at, seen = held(memory, np.full((end - begin, 4), -1, np.int32))
    sizes = [q, p * q, g.s, g.r * g.s, chunks, *g.stride, *g.pad, *g.dilation, int(g.plain)]
    Launch(
        find("parts_copies"),
        [bytes(4 * 128), pack("Q", at), pack("12i", *sizes)]
        + [pack("i", n) for n in (m0, begin, end)],
        memory,
        grid=(1,),
        threads=32,
        shared_bytes=2 * (8192 + 16) + 1024,
        maps=[
            pixels_of(x, g, 64, 64),
            Tiled(y, (64, 64)),
            Tiled(box, (1, 2, 4, 64)),
            Tiled(to, (1, 2, 4, 64)),
        ],
    ).run()
    numbers = list(itertools.product(range(g.r), range(g.s), range(chunks)))
    want = [[r * g.s + s, r, s, c] for r, s, c in numbers]
    want += [[g.r * g.s, g.r, 0, i] for i in range(2)]
    np.testing.assert_array_equal(seen, want[begin:])
    taps = [part for _, _, part in g.taps(np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 64))))]
    for i, (r, s, c) in enumerate(numbers[begin:]):
        pixels = taps[r * g.s + s].reshape(g.pixels, -1)[m0 : m0 + 64, 64 * c : 64 * c + 64]
        np.testing.assert_array_equal(y[64 * i :][: len(pixels)], pixels)
    # Coordinates come with the last axis first: 64, -1, 1, 2, and 0, 1, 3, 1.
    moved = np.zeros((2, 4, 64), np.uint16)
    moved[:, 1:] = box[2, 1:3, :3, 64:128]
    whole = np.zeros_like(to)
    whole[1, 3, 1:5] = moved[0]
    np.testing.assert_array_equal(to, whole)


WINDOWS = [
    Conv(2, 6, 6, 136, 40, 3, 3, pad=(1, 1)),  # one band
    Conv(1, 10, 12, 64, 32, 3, 3, pad=(1, 1)),  # three bands
    Conv(2, 8, 9, 72, 32, 3, 3, (2, 2), (1, 1)),  # tap by tap
    Conv(2, 6, 9, 136, 40),  # a matrix
]


@pytest.mark.parametrize("stages", [(1, 3), (2, 4), (3, 30)], ids=str)
@pytest.mark.parametrize("g", WINDOWS, ids=str)
@pytest.mark.parametrize("listed", [False, True])
def test_multiplies_windows(
    find: Find, rng: np.random.Generator, listed: bool, g: Conv, stages: tuple[int, int]
) -> None:
    (x, x64), taps, chunks = drawn(rng, (g.n, g.h, g.w, g.c), BF16), g.r * g.s, -(-g.c // 64)
    w, w64 = drawn(rng, (g.f, taps, g.c), BF16)
    bias = rng.standard_normal(64).astype(np.float32)
    begin, left_out, used = min(2, chunks - 1), 1, np.zeros_like(w64)
    for number in range(begin, taps * chunks):
        if not listed or number % 4 != left_out:
            chunk, tap = divmod(number, taps)
            channels = slice(64 * chunk, 64 * chunk + 64)
            used[:, tap, channels] = w64[:, tap, channels]
    memory = Tensors()
    map_, box, tiles = pixel_box(held(memory, x, late=True)[1], g, 64, 64)
    x_stages, w_stages = stages if box[2] else (min(stages[1], 18),) * 2
    across, (at, y), at_bias = (
        -(-g.f // 32),
        held(memory, unwritten((g.pixels, g.f), BF16)),
        memory.add(bias),
    )
    sizes = problem(
        g, [g.pixels], [0], width=64, columns=across, splits=1, tiles=tiles * across, alpha=0.5
    )
    Launch(
        find(f"parts_window_{listed}"),
        [bytes(2 * 128), pack("4Q", at_bias, at_bias, at, at), sizes, pack("5i", *box)]
        + [pack("i", n) for n in (x_stages, w_stages, begin, left_out)],
        memory,
        grid=(tiles * across,),
        threads=192,
        shared_bytes=x_stages * (box[0] + 16) + w_stages * (4096 + 16) + 512 + 1024,
        maps=[map_, Tiled(w, (32, 1, 64))],
    ).run()
    want = g.apply(x64, used.reshape(g.f, g.r, g.s, g.c)) / 2 + bias[: g.f]
    check(y, want, BF16, SUMS)


@pytest.mark.parametrize(("dtype", "peers"), [("float32", 2), ("int32", 4)])
def test_exchanges_sums(find: Find, rng: np.random.Generator, dtype: str, peers: int) -> None:
    tiles = 4 // peers
    sums = rng.integers(-(2**20), 2**20, (tiles, peers, 128, 64)).astype(dtype)
    memory = Tensors()
    at, (at_y, y) = memory.add(sums), held(memory, np.full((tiles, 128, 64), -1, dtype))
    Launch(
        find(f"parts_exchange_{peers}_{dtype}"),
        [pack("Q", at), pack("Q", at_y), pack("4i", 0, 1, tiles, peers)],
        memory,
        grid=(4,),
        threads=256,
        shared_bytes=(peers - 1) * 128 * 64 // peers * 4 + 8 + 1024,
        cluster=peers,
    ).run()
    np.testing.assert_array_equal(y, sums.sum(1, dtype=dtype))


@pytest.mark.parametrize("m", [64, 37])
@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("columns", [32, 64])
def test_inbox_of_a_cluster(
    find: Find, rng: np.random.Generator, columns: int, splits: int, m: int
) -> None:
    f = columns - 8
    sums = rng.standard_normal((splits, 64, columns)).astype(np.float32)
    bias = rng.standard_normal(columns).astype(np.float32)
    residual = rounded(rng.standard_normal((m, f)), BF16)
    memory = Tensors()
    at = [memory.add(a) for a in (bias, bias, residual, unwritten((m, f), BF16))]
    Launch(
        find(f"parts_inbox_{columns}"),
        [
            pack("Q", memory.add(sums)),
            pack("4Q", *at),
            pack("4i", 0, 1, 1, splits),
            pack("i", m),
            pack("i", f),
        ],
        memory,
        grid=(splits,),
        threads=128,
        shared_bytes=64 * columns * 4 + 8 + 4 * columns + 1024,
        cluster=splits,
    ).run()
    want = sums.astype(np.float64).sum(0)[:m, :f] / 2 + bias[:f] + wide(residual, BF16)
    check(memory.array(at[3], residual), np.maximum(want, 0), BF16, SUMS)


@pytest.mark.parametrize("tiles", [1, 3, 4, 8, 9, 11, 22])
@pytest.mark.parametrize(("peers", "blocks"), [(1, 8), (2, 8), (4, 8), (2, 6)])
def test_units_of_work(find: Find, peers: int, blocks: int, tiles: int) -> None:
    steps, room = 7, 16
    memory = Tensors()
    at, seen = held(memory, np.full((blocks, room, 4), -1, np.int32))
    Launch(
        find(f"parts_work_{peers}"),
        [pack("Q", at), pack("4i", 0, 1, tiles, peers), pack("i", steps), pack("i", room)],
        memory,
        grid=(blocks,),
        threads=32,
        cluster=peers,
    ).run()
    whole, rest = tiles // blocks, tiles % blocks
    shares = peers > 1 and 0 < rest * peers <= blocks
    for block in range(blocks):
        units = [[turn * blocks + block, 0, steps, 0] for turn in range(whole)]
        tile, rank = divmod(block, peers)
        if shares and tile < rest:
            part = [steps * rank // peers, steps * (rank + 1) // peers]
            units.append([whole * blocks + tile, *part, 1])
        elif not shares and block < rest:
            units.append([whole * blocks + block, 0, steps, 0])
        np.testing.assert_array_equal(seen[block, 1 : 1 + len(units)], np.reshape(units, (-1, 4)))
        start, at_rank, count, there = seen[block, 0]
        assert (at_rank, there) == (rank, len(units))
        if units:
            assert (start, count) == (units[0][0], units[0][2] - units[0][1])
        elif peers > 1:
            assert count == 0


@pytest.mark.parametrize(("blocks", "rows"), [(9, (4, 1, 2)), (12, (30, 1, 1)), (15, (3, 9, 5))])
def test_stationary_tiles(find: Find, blocks: int, rows: tuple[int, int, int]) -> None:
    columns, room = 3, 40
    firsts = (np.cumsum([0, *rows[:-1]]) * columns).tolist()
    memory = Tensors()
    at, seen = held(memory, np.full((blocks, 2, room, 3), -1, np.int32))
    schedule = pack("6i", *firsts, columns, sum(rows) * columns, 1)
    Launch(
        find("parts_stationary"),
        [pack("Q", at), schedule, pack("i", room)],
        memory,
        grid=(blocks,),
        threads=32,
    ).run()
    tiles = []
    for block in seen:
        own = [[tuple(map(int, tile)) for tile in worker if tile[0] >= 0] for worker in block]
        first, second = own
        assert 0 <= len(first) - len(second) <= 1
        assert len({(product, column) for product, _, column in first + second}) <= 1
        tiles += first + second
    want = [(i, row, f) for i, n in enumerate(rows) for row in range(n) for f in range(columns)]
    assert sorted(tiles) == want


def test_consumers_take_turns(find: Find) -> None:
    for seed in range(4):
        memory = Tensors()
        at, seen = held(memory, np.full((12,), -1, np.int32))
        Launch(
            find("parts_turns"),
            [pack("Q", at), pack("i", 4)],
            memory,
            grid=(1,),
            threads=384,
            shared_bytes=4 + 1024,
        ).run(seed)
        np.testing.assert_array_equal(seen, np.arange(12) % 3)


@pytest.mark.parametrize("boxes", [1, 2, 3])
def test_boxes_are_written_again(find: Find, boxes: int) -> None:
    tiles = 11

    def stored(kernel: Kernel) -> Array:
        y = unwritten((tiles * 64, 32), "float32")
        Launch(
            kernel,
            [bytes(128), pack("i", boxes), pack("i", tiles)],
            Tensors(),
            grid=(1,),
            threads=256,
            shared_bytes=2 * boxes * 8192 + 1024,
            maps=[Tiled(y, (64, 32))],
        ).run()
        return y

    kernel, want = find("parts_box_ring"), np.arange(tiles * 64)[:, None] + np.zeros(32)
    np.testing.assert_array_equal(stored(kernel), want)
    assert not np.array_equal(stored(without(kernel, r"cp\.async\.bulk\.wait_group")), want)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_registers_change_hands(find: Find, groups: int) -> None:
    """Consumers would wait for ever if they asked for more than there is."""
    threads = 128 * (groups + 1)

    def seen(kernel: Kernel) -> Array:
        memory = Tensors()
        at, seen = held(memory, np.full(threads, -2, np.int32))
        Launch(kernel, [pack("Q", at)], memory, grid=(1,), threads=threads).run()
        return seen

    kernel = find(f"parts_moved_registers_{groups}")
    want = np.arange(threads) // 128
    want[128 * groups] = -1
    np.testing.assert_array_equal(seen(kernel), want)
    if groups > 1:  # else both have all that a thread can have
        with pytest.raises(Deadlock, match="setmaxnreg"):
            seen(without(kernel, r"setmaxnreg\.dec"))


def moments_of(x: Array) -> Array:
    """Sums 32 columns and their squares: [M, C / 32, 2] in float32."""
    groups = x.reshape(len(x), -1, 32)
    return np.stack([groups.sum(2), (groups**2).sum(2)], 2).astype(np.float32)


@pytest.mark.parametrize(("m", "f"), [(64, 128), (43, 96)])
def test_sums_leave_the_registers(find: Find, rng: np.random.Generator, m: int, f: int) -> None:
    sums = rng.standard_normal((64, 128)).astype(np.float32)
    bias = rng.standard_normal(128).astype(np.float32)
    beside, residual = (rounded(rng.standard_normal(n), BF16) for n in ((64, 128), (m, f)))
    x, eps = rng.standard_normal((m, 14 * 32)) * 3 + 1, 1e-3
    memory = Tensors()
    before, after, measured = (
        Norm(moments_of(x), eps),
        *(Norm(np.full((m, f // 32, 2), np.nan, np.float32)) for _ in range(2)),
    )
    y, boxes = (held(memory, unwritten(n, BF16)) for n in ((m, f), (64, 128)))
    mean = held(memory, unwritten((f,), BF16))
    at_bias, at_residual = memory.add(bias), memory.add(residual)
    Launch(
        find("parts_exits"),
        [
            bytes(2 * 128),
            pack("Q", memory.add(sums)),
            pack("4Q", at_bias, at_bias, at_residual, y[0]) + measured.packed(memory),
            pack("4Q", at_bias, at_bias, at_residual, mean[0]),
            before.packed(memory),
            after.packed(memory),
            pack("i", m),
            pack("i", f),
        ],
        memory,
        grid=(1,),
        threads=128,
        shared_bytes=3 * (8192 + 16) + 5 * 512 + 1024,
        maps=[Tiled(beside, (64, 64)), Tiled(boxes[1], (64, 64))],
    ).run()
    exact, added = sums.astype(np.float64), wide(residual, BF16)
    check(boxes[1], exact + wide(beside, BF16), BF16, SUMS)
    np.testing.assert_allclose(
        after.moments, moments_of(wide(boxes[1], BF16)[:m, :f]), rtol=1e-5, atol=1e-4
    )
    scale = 1 / np.sqrt(x.var(1, keepdims=True) + eps)
    check(y[1], np.maximum(exact[:m, :f] * scale + bias[:f] + added, 0), BF16, 2**-16)
    np.testing.assert_allclose(measured.moments, moments_of(wide(y[1], BF16)), rtol=1e-5, atol=1e-4)
    half = np.maximum(exact[:m, :f] / 2 + bias[:f] + added, 0).astype(np.float32)
    check(mean[1], wide(rounded(half, BF16), BF16).mean(0), BF16, 2**-12)


@pytest.mark.parametrize("dtype", ["int8", "uint8", E4M3])
def test_sums_leave_as_bytes(find: Find, rng: np.random.Generator, dtype: str) -> None:
    f, m, zero, steps, beside = 48, 41, 3, (0.25, 2.0), 0.5
    if dtype == E4M3:
        sums, steps = rng.standard_normal((64, 64)).astype(np.float32) * 100, (1.0, 0.0)
    else:
        sums = rng.integers(-300, 400, (64, 64)).astype(np.int32)
    factors, bias = rng.random(64, np.float32), rng.standard_normal(64).astype(np.float32)
    residual, residual64 = drawn(rng, (64, 64), dtype)
    memory = Tensors()
    y = held(memory, unwritten((64, 64), dtype))[1]
    (at_rows, rows), (at_scaled, scaled) = (
        held(memory, a) for a in (unwritten((64, 96), dtype), np.zeros_like(sums))
    )
    at_bias, at_factors = memory.add(bias), memory.add(factors)
    scales = pack("2Q4f", at_factors, at_factors, beside, 0, *steps)
    Launch(
        find(f"parts_bytes_{dtype}"),
        [
            bytes(2 * 128),
            pack("Q", memory.add(sums)),
            pack("4Q", at_bias, at_bias, at_rows, at_rows) + scales,
            pack("Q", at_rows),
            pack("Q", at_scaled),
            pack("i", m),
            pack("i", f),
            pack("f", zero),
        ],
        memory,
        grid=(1,),
        threads=128,
        shared_bytes=4096 + 16 + 1024,
        maps=[Tiled(residual, (64, 64)), Tiled(y, (64, 64))],
    ).run()

    def close(got: Array, want: Array) -> None:
        low, high = (rounded(want * (1 + s) + s, dtype) for s in (-1e-4, 1e-4))
        ends = np.sort([wide(low, dtype), wide(high, dtype)], 0)
        values = wide(got, dtype)
        assert ((ends[0] <= values) & (values <= ends[1])).all()
        assert len(np.unique(values)) > 20

    exact, order = sums.astype(np.float64), quads(np.arange(64))  # filters as they lie
    half = np.where(np.arange(64) % 16 < 8, 0.5, 0.25)[:, None]
    shown = exact * half
    close(rows[1:, 16:80][:m], (shown if dtype == E4M3 else np.rint(shown) + zero)[:m])
    outside = np.ones(rows.shape, bool)
    outside[1 : 1 + m, 16:80] = False
    np.testing.assert_array_equal(rows[outside], unwritten(rows.shape, dtype)[outside])

    want = exact * factors[order]
    there = order < f
    if dtype == E4M3:
        check(scaled[:, there], want[:, there], "float32", SUMS)
    else:
        assert (scaled[:, there] % 16 == 0).all()
        assert (np.abs(scaled - want)[:, there] <= 8 + 1e-3).all()

    product = np.zeros_like(exact)
    product[order] = exact * factors[order, None] + bias[order, None]
    product[f:] = 0
    want = np.maximum(product + beside * residual64.T, 0)
    if dtype != E4M3:
        want = np.rint(want / steps[0]) + steps[1]
    close(y.T, want)
