"""Launches the project's kernels in the interpreter: the layout of every argument is here.

The host's code chooses tiles and grids by the device it finds; here the test chooses them, so that
small tensors reach the edges of a tile. A struct that has changed in Mojo, but not here, fails:
the parameters' sizes are checked against the kernel's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxvision.graphs.arrange import block_steps

from .machine import Launch, Tensors, pack
from .ptx import Kernel
from .semantics import FLOAT8, from_bf16, to_bf16, to_float8
from .tensormaps import Im2col, Tiled

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
DTYPES |= {"int64": np.int64, "int8": np.int8, "uint8": np.uint8} | dict.fromkeys(FLOAT8, np.uint8)
EPS = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}
"""Half an ulp of 1: what a rounding adds, relative."""


def rounded(x: Array, dtype: str) -> Array:
    """Rounds to a dtype, as it lies in memory: bfloat16 and floats of 8 bits as their bits.

    Integers, and floats of 8 bits, are at most the largest.
    """
    if dtype in FLOAT8:
        return to_float8(x, dtype)
    if dtype in ("int8", "uint8"):
        limits = np.iinfo(dtype)
        return np.clip(np.rint(x), limits.min, limits.max).astype(dtype)
    return to_bf16(x) if dtype == "bfloat16" else np.asarray(x, DTYPES[dtype])


def wide(x: Array, dtype: str) -> Array:
    """Widens to float64 what lies in memory."""
    x = FLOAT8[dtype][x] if dtype in FLOAT8 else x
    return (from_bf16(x) if dtype == "bfloat16" else x).astype(np.float64)


def unwritten(shape: Sequence[int], dtype: str) -> Array:
    """Makes an output that is NaN until it is written, or the least integer."""
    if dtype in ("int64", "int8", "uint8"):
        return np.full(shape, np.iinfo(dtype).min, dtype)
    return rounded(np.full(shape, np.nan, np.float32), dtype)


def check(got: Array, want: Array, dtype: str, sums: float = 0) -> None:
    """Compares with a result in float64.

    Args:
        got: As it lies in memory.
        want: In float64; NaN and infinities have to be where it has them.
        dtype: Of got.
        sums: What the sum of the magnitudes that float32 has added up may differ by, relative to
            the largest of `want`: a bound on how accumulation and intermediate results round.
    """
    values = wide(got, dtype)
    odd = ~np.isfinite(want)
    np.testing.assert_array_equal(values[odd], want[odd])
    values, want = values[~odd], want[~odd]
    assert np.isfinite(values).all(), f"{(~np.isfinite(values)).sum()} of {values.size} are not"
    bound = 2 * EPS[dtype] * np.abs(want) + sums * np.abs(want).max()
    error = np.abs(values - want)
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), (
        f"{(error > bound).sum()} of {error.size} are off, worst at {worst}: "
        f"{values[worst]} instead of {want[worst]}, allowed {bound[worst]:.3g}"
    )


def layernorm(
    kernel: Kernel, lanes: int, x: Array, columns: int, weight: Array, bias: Array, dtype: str
) -> Array:
    """Runs ops/layernorm.mojo on rows that are x.shape[1] apart."""
    memory, y = Tensors(), unwritten((len(x), columns), dtype)
    at = [memory.add(a) for a in (x, weight, bias, y)]
    sizes = pack("iiqf", len(x), columns, x.shape[1], 1e-5)
    grid = -(-len(x) * lanes // 128)
    launch = Launch(kernel, [pack("4Q", *at), sizes], memory, grid=(grid,), threads=128, together=4)
    launch.run()
    return memory.array(at[3], y)


def layer_norm_grad(
    kernels: tuple[Kernel, Kernel],
    lanes: int,
    x: Array,
    dy: Array,
    weight: Array,
    dtype: str,
    blocks: int,
) -> list[Array]:
    """Runs both kernels of ops/layer_norm_grad in some blocks: dx of a dtype, dweight and dbias."""
    (rows, columns), memory = x.shape, Tensors()
    vector = unwritten((columns,), "float32")
    outputs = [unwritten(x.shape, dtype), vector, vector]
    room = unwritten((blocks, 2, columns), "float32")
    assert blocks <= -(-rows * lanes // 256) and min(blocks, rows) == blocks
    given = [memory.add(each, late=True) for each in (x, dy, weight)]
    made = [memory.add(each) for each in (*outputs, room)]
    parameters = [pack("7Q", *given, *made), pack("iiif", rows, columns, blocks, 1e-5)]
    Launch(kernels[0], parameters, memory, grid=(blocks,), threads=256, together=4).run()
    at = [pack("Q", each) for each in (made[3], *made[1:3])]
    parameters = [*at, pack("i", columns), pack("i", blocks)]
    grid = (-(-2 * columns // 32),)
    Launch(kernels[1], parameters, memory, grid=grid, threads=1024, together=8).run()
    return [memory.array(place, like) for place, like in zip(made, outputs, strict=False)]


def divisor(size: int) -> tuple[int, int, int]:
    """Gives a Divisor of ops/gather_rows.mojo."""
    shift = (size - 1).bit_length()
    return size, (((1 << shift) - size) << 32) // size + 1, shift


@dataclass(frozen=True)
class Order:
    """A RowMap of ops/gather_rows.mojo: an image of rows, rolled and permuted."""

    size: tuple[int, int]
    shifts: tuple[int, int]
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    rolls_first: bool = True

    def apply(self, x: Array) -> Array:
        """Gives rows of x[N, R, C] that order."""
        n, rows, c = x.shape
        for rolls in (self.rolls_first, not self.rolls_first):
            if rolls:
                x = np.roll(x.reshape(n, *self.size, c), self.shifts, (1, 2))
            else:
                axes = (0, *(a + 1 for a in self.axes), len(self.axes) + 1)
                x = x.reshape(n, *self.shape, c).transpose(axes)
            x = x.reshape(n, rows, c)
        return x

    def packed(self) -> bytes:
        """Packs the map."""
        (high, wide_), (down, right) = self.size, self.shifts
        lengths = [self.shape[a] for a in self.axes][::-1]
        steps = [math.prod(self.shape[a + 1 :]) for a in self.axes][::-1]
        rest = 4 - len(lengths)
        sizes = [n for length in (*lengths, *[1] * rest) for n in divisor(length)]
        whole = [*divisor(high * wide_), *divisor(wide_), high, down % high, right % wide_]
        return pack("26I", *whole, self.rolls_first, *sizes, *steps, *[0] * rest)


def gather_rows(
    kernel: Kernel,
    lanes: int,
    order: Order,
    x: Array,
    onto: Array | None,
    norm: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
    """Runs ops/gather_rows.mojo on rows of bfloat16; gives the sum and the result."""
    memory, y = Tensors(), unwritten(x.shape, "bfloat16")
    nothing = np.zeros(1, np.float32)
    given = (x, nothing if onto is None else onto, *(norm or (nothing, nothing)), y, y)
    at = [memory.add(a) for a in given]
    rows, columns = x.shape[0] * x.shape[1], x.shape[2]
    sizes = [order.packed(), *(pack("i", n) for n in (rows, columns)), pack("f", 1e-5)]
    grid = -(-rows * lanes // 128)
    launch = Launch(
        kernel, [pack("6Q", *at), *sizes], memory, grid=(grid,), threads=128, together=4
    )
    launch.run()
    return memory.array(at[4], y), memory.array(at[5], y)


def scatter_add(kernel: Kernel, x: Array, index: Array, values: Array, rows: int) -> Array:
    """Runs ops/scatter_add.mojo on bfloat16, blocks of so many rows; gives the sums."""
    memory, y = Tensors(), unwritten(x.shape, "float32")
    at = [memory.add(a) for a in (x, index, values, y)]
    n, r, c = x.shape
    sizes = pack("3qI4x", r, c, values.shape[1], index.ndim == 3)
    grid = -(-n * c // 128), -(-r // rows)
    parameters = [pack("4Q", *at), sizes, pack("q", n * c), pack("q", rows)]
    Launch(kernel, parameters, memory, grid=grid, threads=128).run()
    return memory.array(at[3], y)


@dataclass(frozen=True)
class Qkv:
    """Sizes of a depthwise_qkv, and the tile of a block."""

    h: int
    w: int
    c: int
    tile: tuple[int, int]
    first: int = 0
    images: int = 1
    kernel: int = 3
    stride: int = 2
    pad_kv: int = 1
    parts: int = 0  # blocks of a tile in hopper.mojo's kernel; none is gpu.mojo's
    threads: int = 384

    @property
    def pad_q(self) -> int:
        return (self.kernel - 1) // 2

    @property
    def keys(self) -> tuple[int, int]:
        p, q = (n + 2 * self.pad_kv - self.kernel for n in (self.h, self.w))
        return p // self.stride + 1, q // self.stride + 1

    @property
    def lanes(self) -> tuple[int, int]:
        """Lanes of a token and vectors of a lane, as depthwise_qkv_gpu chooses them."""
        for lanes, vectors in ((8, 1), (8, 3), (16, 3), (32, 3)):
            if self.c <= 8 * lanes * vectors:
                return lanes, vectors
        return 32, 4

    @property
    def hopper_bytes(self) -> int:
        """Bytes of shared memory of hopper.mojo's block: the most that the map has of a tile."""
        least, around = min(self.pad_q, self.pad_kv), self.kernel - 1
        margin = max(self.pad_q, self.pad_kv)
        high, broad = (
            max(
                min(begin + tile + around - least, size) - max(begin - margin, 0)
                for begin in range(0, size, tile)
            )
            for size, tile in zip((self.h, self.w), self.tile, strict=True)
        )
        tokens = high * broad + self.first
        return 256 + 67 * self.c + tokens * (2 * self.c + 16) + (high + 1) // 2 * 16


def depthwise_qkv(
    kernel: Kernel,
    g: Qkv,
    inputs: Sequence[Array],
    dtype: str = "bfloat16",
    steps: Sequence[float] = (),
) -> list[Array]:
    """Runs ops/depthwise_qkv: x, norm's weight and bias, three filters, three biases.

    Of results in 8 bits ``steps`` are the factor and the zero of each.
    """
    memory = Tensors()
    p, q = g.keys
    counts = (g.h * g.w + g.first, p * q + g.first, p * q + g.first)
    outputs = [unwritten((g.images, count, g.c), dtype) for count in counts]
    at = [memory.add(a) for a in (*inputs, *outputs)]
    rows, columns = g.tile
    around = g.kernel - 1 + abs(g.pad_q - g.pad_kv)
    pitch = ((rows + around) * (columns + around) + 1) | 1
    tiles = -(-g.w // columns), -(-g.h // rows)
    sizes = (g.images, g.first, g.h, g.w, g.c, g.kernel, g.pad_q, g.pad_kv, g.stride, p, q)
    launch = Launch(
        kernel,
        [
            pack(f"12Q{len(steps)}f", *at, *steps),
            pack("14if", *sizes, rows, columns, g.parts, 1e-5),
        ],
        memory,
        grid=(tiles[0] * g.parts, tiles[1], g.images)
        if g.parts
        else (tiles[0] * tiles[1], g.images),
        threads=g.threads,
        shared_bytes=g.hopper_bytes if g.parts else pitch * g.c * 2,
        together=12,
    )
    launch.run()
    return [memory.array(a, o) for a, o in zip(at[9:], outputs, strict=True)]


@dataclass(frozen=True)
class Tile:
    """A Config of ops/gemm/hopper.mojo: one of CONFIGS in ops/gemm/tuning.mojo."""

    groups: int
    columns: int
    stages: int
    kind: str = ""
    peers: int = 1
    row: int = 128

    @property
    def label(self) -> str:
        shared = f"cluster{self.peers}" if self.peers > 1 else ""
        row = "" if self.row == 128 else f"row{self.row}"
        return f"{64 * self.groups}x{self.columns}x{self.stages}{self.kind}{shared}{row}"

    @property
    def shared_bytes(self) -> int:
        rows, peers = 64 * self.groups, self.peers
        ring = self.stages * ((rows + self.columns) * self.row + 16)
        return ring + (peers - 1) * rows * self.columns // peers * 4 + 8 * (peers > 1) + 1024


TILES = (
    Tile(3, 192, 4, "overlap"),
    Tile(3, 128, 5, "overlap"),
    Tile(2, 128, 6, "overlap"),
    Tile(3, 64, 7, "overlap"),
    Tile(1, 64, 6),
    Tile(1, 32, 8, "split"),
    Tile(2, 128, 6, "overlap", 2),
    Tile(3, 128, 4, "overlap", 2),
)
TOKEN_TILES = (Tile(2, 128, 3), Tile(1, 64, 6))
"""LARGE and SMALL of ops/token_linear.mojo."""


@dataclass(frozen=True)
class Conv:
    """A convolution x[N, H, W, C] by w[F, R, S, C]; height before width.

    ``after`` is what the padding has below and to the right beyond what it has on the other sides.
    """

    n: int
    h: int
    w: int
    c: int
    f: int
    r: int = 1
    s: int = 1
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    after: tuple[int, int] = (0, 0)

    @property
    def out(self) -> tuple[int, int]:
        (ph, pw), (gap_h, gap_w), (below, right) = self.pad, self.dilation, self.after
        p = (self.h + 2 * ph + below - (self.r - 1) * gap_h - 1) // self.stride[0] + 1
        q = (self.w + 2 * pw + right - (self.s - 1) * gap_w - 1) // self.stride[1] + 1
        return p, q

    @property
    def pixels(self) -> int:
        return self.n * self.out[0] * self.out[1]

    @property
    def plain(self) -> bool:
        return self.r * self.s * self.stride[0] * self.stride[1] == 1 and not any(self.pad)

    def taps(self, x: Array) -> Iterator[tuple[int, int, Array]]:
        """Gives each tap of the window, r and s, and what of x it meets: [N, P, Q, C]."""
        (p, q), (ph, pw), (below, right) = self.out, self.pad, self.after
        padded = np.pad(x, ((0, 0), (ph, ph + below), (pw, pw + right), (0, 0)))
        for r in range(self.r):
            for s in range(self.s):
                h0, w0 = r * self.dilation[0], s * self.dilation[1]
                rows = slice(h0, h0 + self.stride[0] * (p - 1) + 1, self.stride[0])
                columns = slice(w0, w0 + self.stride[1] * (q - 1) + 1, self.stride[1])
                yield r, s, padded[:, rows, columns]

    def apply(self, x: Array, w: Array) -> Array:
        """Convolves in float64: [M, F]."""
        y = np.zeros((self.n, *self.out, self.f))
        for r, s, part in self.taps(x):
            y += part @ w[:, r, s].T
        return y.reshape(-1, self.f)

    def apply_depthwise(self, x: Array, w: Array) -> Array:
        """Convolves each channel by itself, with w[R, S, C], in float64: [M, C]."""
        y = np.zeros((self.n, *self.out, self.c))
        for r, s, part in self.taps(x):
            y += part * w[r, s]
        return y.reshape(-1, self.c)

    def input_grad_depthwise(self, dy: Array, w: Array) -> Array:
        """Computes the gradient of x from dy[N, P, Q, C] and w[C, R, S] in float64."""
        (p, q), (ph, pw) = self.out, self.pad
        dx = np.zeros((self.n, self.h, self.w, self.c))
        for r, s, i, j in itertools.product(*map(range, (self.r, self.s, p, q))):
            h = i * self.stride[0] - ph + r * self.dilation[0]
            at = j * self.stride[1] - pw + s * self.dilation[1]
            if 0 <= h < self.h and 0 <= at < self.w:
                dx[:, h, at] += dy[:, i, j] * w[:, r, s]
        return dx

    def packed(self, groups: int = 1) -> bytes:
        """Packs a Geometry of ops/geometry.mojo."""
        window = (self.r, self.s, *self.out, self.f, *self.stride, *self.pad, *self.dilation)
        return pack("16q", self.n, self.h, self.w, self.c, *window, groups)


@dataclass
class Product:
    """The tensors of one convolution of a launch."""

    g: Conv
    x: Array
    w: Array
    bias: Array
    residual: Array
    scale: Array | None = None
    residual_scale: float = 1
    first: Array | None = None
    result: tuple[float, float] = (1, 0)
    """Scale and zero point of the result, behind an activation."""

    def scales(self, memory: Tensors) -> bytes:
        """Packs a Scales of ops/operands.mojo, or nothing."""
        if self.scale is None:
            return b""
        at = memory.add(self.scale)
        first = at if self.first is None else memory.add(self.first)
        return pack("2Q4f", at, first, self.residual_scale, 0, *self.result)


def held(memory: Tensors, array: Array, late: bool = False) -> tuple[int, Array]:
    """Adds an array; gives its address and the kernel's view of it."""
    at = memory.add(array, late=late)
    return at, memory.array(at, array)


@dataclass
class Norm:
    """A Norm of ops/hopper/moments.mojo: what an epilogue normalises by, or measures.

    Attributes:
        moments: Of the rows of x [M, C / 32, 2], which the kernel ahead writes; or of y, an output.
        eps: Added to the variance; None if moments are written.
    """

    moments: Array
    eps: float | None = None

    def packed(self, memory: Tensors) -> bytes:
        """Gives the argument; ``moments`` becomes the kernel's view of them."""
        at, self.moments = held(memory, self.moments, late=self.eps is not None)
        return pack("Qif", at, self.moments.shape[1], self.eps or 0)


def windows(x: Array, g: Conv, rows: int, width: int, out: tuple[int, int] | None = None) -> Im2col:
    """Makes the map that reads x[N, H, W, C] window by window, for ``out`` pixels or g's own."""
    (high, broad), (ph, pw), (sh, sw) = out or g.out, g.pad, g.stride
    upper = ((broad - 1) * sw - pw - (g.w - 1), (high - 1) * sh - ph - (g.h - 1))
    return Im2col(x, (-pw, -ph), upper, (sw, sh), rows, width)


def pixels_of(x: Array, g: Conv, rows: int, width: int) -> Tiled | Im2col:
    """Makes the map that reads x as a matrix, or else window by window."""
    return Tiled(x.reshape(-1, g.c), (rows, width)) if g.plain else windows(x, g, rows, width)


def problem(
    g: Conv,
    pixels: Sequence[int],
    firsts: Sequence[int],
    *,
    width: int,
    columns: int,
    splits: int,
    tiles: int,
    out: tuple[int, int] | None = None,
    alpha: float = 1,
    steps2: int = 0,
    stride2: tuple[int, int] = (1, 1),
    constant: bool = True,
) -> bytes:
    """Packs a Problem of ops/hopper/conv.mojo; ``steps2``, ``stride2``: of a second source."""
    p_, q_ = out or g.out
    conv = [q_, p_ * q_, g.s, g.r * g.s, -(-g.c // width), *g.stride, *g.pad, *g.dilation]
    sizes = [*pixels, *firsts, columns, tiles, splits, *conv, int(g.plain), g.f]
    return pack(f"{len(sizes)}if4i", *sizes, alpha, steps2, *stride2, constant)


def quads(w: Array) -> Array:
    """Arranges filters w[F, ...] for results of 8 bits (`quad` of ops/hopper/accumulator.mojo)."""
    sixteen = np.arange(16).reshape(8, 2).T.reshape(-1)
    return w.reshape(-1, 16, *w.shape[1:])[:, sixteen].reshape(w.shape)


def hopper(
    kernel: Kernel,
    tile: Tile,
    products: Sequence[Product],
    beside: Product | None = None,
    *,
    dtype: str,
    out: str = "",
    alpha: float = 1,
    splits: int = 1,
    processors: int = 2,
    adds: bool = False,
    norm: Norm | None = None,
    constant: bool = True,
    late: bool = False,
    seed: int = 0,
) -> list[Array]:
    """Runs ops/gemm/hopper.mojo. The kernel ahead writes x and the residual.

    Args:
        kernel: What runs.
        tile: Its config.
        products: One convolution, or products of the same K and F.
        beside: The shortcut's convolution of 1 x 1 windows, if the kernel has two sources.
        dtype: Of x and w, and of the residual and y.
        out: Of the residual and y, where it is another.
        alpha: Scale of the products.
        splits: Blocks that share a tile.
        processors: Blocks of the grid, where a block goes from tile to tile; at most, with peers.
        adds: Whether the residual is read.
        norm: What the epilogue normalises by, or measures.
        constant: Whether the kernel is told that w are weights.
        late: Whether the kernel ahead writes w, too.
        seed: Of the order of warps and copies.

    Returns:
        y[M, F] of each product.
    """
    memory, g = Tensors(), products[0].g
    rows, width = 64 * tile.groups, tile.row // np.dtype(DTYPES[dtype]).itemsize
    out = out or dtype
    size = np.dtype(DTYPES[out]).itemsize
    box = 128 // size
    if size == 1 and (tile.columns // tile.peers % 128 or tile.row == 64):
        box = 64
    maps: list[Tiled | Im2col | None] = []
    ends: list[list[int]] = [[], [], [], []]
    scales = b""
    pixels, firsts, outputs = [], [], []
    blocks, tiles = 0, -(-g.f // tile.columns)

    def source(p: Product) -> Tiled | Im2col:
        of = windows if p is beside else pixels_of
        return of(held(memory, p.x, late=True)[1], p.g, rows, width)

    def filters(p: Product) -> Tiled:
        w = quads(p.w) if size == 1 else p.w
        w = held(memory, w.reshape(p.g.f, -1, p.g.c), late)[1]
        return Tiled(w, (tile.columns, 1, width))

    for p in products:
        y_at, y = held(memory, unwritten((p.g.pixels, g.f), out))
        residual_at, residual = held(memory, p.residual, late=True)
        maps += [source(p), filters(p), Tiled(y, (64, box))]
        maps.append(Tiled(residual, (64, box)) if adds else None)
        scales += p.scales(memory)
        more = memory.add(beside.bias) if beside else memory.add(np.zeros(1, np.float32))
        for end, at in zip(ends, (memory.add(p.bias), more, residual_at, y_at), strict=True):
            end.append(at)
        outputs.append(y)
        pixels.append(p.g.pixels)
        firsts.append(blocks)
        blocks += -(-p.g.pixels // rows) * tiles
    steps2, stride2 = 0, (1, 1)
    if beside:
        maps += [source(beside), filters(beside)]
        steps2, stride2 = -(-beside.g.c // width), beside.g.stride
    splits = max(splits, tile.peers)
    sizes = problem(
        g, pixels, firsts, width=width, columns=tiles, splits=splits, tiles=blocks, alpha=alpha,
        steps2=steps2, stride2=stride2, constant=constant,
    )  # fmt: skip
    grid = blocks * splits if tile.kind == "split" else min(blocks, processors)
    if tile.peers > 1:
        whole = -(-blocks // tile.peers) * tile.peers
        grid = blocks * tile.peers
        grid = grid if grid <= processors else min(whole, processors)
    launch = Launch(
        kernel,
        [
            bytes(128 * len(maps)),
            pack(f"{4 * len(products)}Q", *(at for end in ends for at in end))
            + scales
            + (norm.packed(memory) if norm else b""),
            sizes,
        ],
        memory,
        grid=(grid,),
        threads=128 * tile.groups + 32,
        shared_bytes=tile.shared_bytes,
        cluster=splits,
        maps=maps,
    )
    launch.run(seed)
    return outputs


def token_linear(
    kernel: Kernel,
    tile: Tile,
    x: Array,
    w: Array,
    bias: Array,
    residual: Array | None,
    *,
    dtype: str,
    processors: int = 2,
    seed: int = 0,
) -> Array:
    """Runs ops/token_linear.mojo. The kernel ahead writes x and the residual.

    Args:
        kernel: What runs.
        tile: Its config.
        x: Tokens [N, T, C].
        w: Weights [F, K].
        bias: [F].
        residual: [N, F, C]; None if the kernel reads none.
        dtype: Of x, w and y.
        processors: Blocks of the grid, which go from tile to tile.
        seed: Of the order of warps and copies.

    Returns:
        y[N, F, C].
    """
    memory, (n, t, c), f, rows = Tensors(), x.shape, len(w), 64 * tile.groups
    y_at, y = held(memory, unwritten((n, f, c), dtype))
    added_at, added = (y_at, None) if residual is None else held(memory, residual, late=True)
    maps: list[Tiled | Im2col | None] = [
        Tiled(held(memory, w)[1], (rows, 64)),
        Tiled(held(memory, x, late=True)[1], (1, 64, 64)),
        Tiled(y, (1, 64, 64)),
        None if added is None else Tiled(added, (1, 64, 64)),
    ]
    bias_at, wide_, high = memory.add(bias), -(-c // tile.columns), -(-f // rows)
    tiles = n * wide_ * high
    launch = Launch(
        kernel,
        [
            bytes(128 * len(maps)),
            pack("4Q", bias_at, bias_at, added_at, y_at),
            pack("7i", 0, high, tiles, 1, f, -(-t // 64), wide_),
        ],
        memory,
        grid=(min(tiles, processors),),
        threads=128 * tile.groups + 32,
        shared_bytes=tile.stages * (rows + tile.columns) * 128 + 16 * tile.stages + 1024,
        maps=maps,
    )
    launch.run(seed)
    return y


@dataclass(frozen=True)
class GradTile:
    """A Config of ops/conv2d_weight_grad/hopper.mojo: one of its CONFIGS."""

    filters: int
    boxes: int
    shares: int
    stages: int

    @property
    def label(self) -> str:
        return f"{64 * self.filters}x{64 * self.boxes}x{self.stages}"


GRAD_TILES = (GradTile(1, 4, 2, 5), GradTile(2, 4, 1, 4), GradTile(2, 3, 1, 5))


def weight_grad(
    kernels: tuple[Kernel, Kernel],
    tile: GradTile | None,
    g: Conv,
    x: Array,
    dy: Array,
    *,
    dtype: str,
    parts: int = 1,
    groups: int = 1,
    kind: str = "cores",
    seed: int = 0,
) -> Array:
    """Runs ops/conv2d_weight_grad. The kernel ahead of hopper.mojo's writes x and dy.

    Args:
        kernels: What sums the parts of the pixels, and what adds them up.
        tile: Of hopper.mojo's kernel; None for the others.
        g: Sizes.
        x: Activations [N, H, W, C].
        dy: Gradient of the result [N, P, Q, F].
        dtype: Of the tensors.
        parts: Of the pixels.
        groups: Of channels.
        kind: Which of the kernels without a tile: ``cores``, ``depthwise_3x3_1x4`` (the taps of a
            block, the stride, the channels of a thread) or ``mma_128``, ...
        seed: Of the order of warps and copies.

    Returns:
        dw[F, R, S, C / groups].
    """
    shape, depth = (g.f, g.r, g.s, g.c // groups), g.r * g.s * g.c // groups
    memory, (first, second) = Tensors(), kernels
    late = tile is not None or kind.startswith("depthwise")  # the others begin when it is done
    x_at, x = held(memory, x, late)
    dy_at, dy = held(memory, dy, late)
    dw_at, dw = held(memory, unwritten(shape, dtype))
    room_at = memory.add(unwritten((parts, g.f * depth), "float32"))
    tensors, (p, q) = pack("4Q", x_at, dy_at, dw_at, room_at), g.out
    if tile:
        chunks = -(-g.c // 64)
        conv = [q, p * q, g.s, g.r * g.s, chunks, *g.stride, *g.pad, *g.dilation, int(g.plain)]
        rows, columns = -(-g.f // (64 * tile.filters)), -(-chunks * g.r * g.s // tile.boxes)
        tiles = rows * columns * parts
        sizes = [*conv, g.c, g.f, -(-g.pixels // 64), parts, rows, 0, columns, tiles, 1]
        maps = [Tiled(dy.reshape(-1, g.f), (64, 64)), pixels_of(x, g, 64, 64)]
        stage = (tile.filters + tile.boxes) * 64 * 128
        launch = Launch(
            first,
            [bytes(256), tensors, pack("21i", *sizes)],
            memory,
            grid=(tiles,),
            threads=128 * tile.filters * tile.shares + 32,
            shared_bytes=tile.stages * (stage + 16) + 1024,
            maps=maps,
        )
    else:
        sizes = [g.n, g.h, g.w, g.c, g.r, g.s, p, q, g.f, *g.stride, *g.pad, *g.dilation, groups]
        columns = int(kind.split("_")[1]) if kind.startswith("mma") else 64
        grid: tuple[int, ...] = (-(-depth // columns), -(-(g.f // groups) // 64) * groups, parts)
        arguments = [tensors, pack("16q", *sizes)]
        if kind.startswith("depthwise"):
            rows, across, _, width = map(int, re.findall(r"\d+", kind))
            vectors = g.c // width
            columns = -(-vectors // 16)
            grid = (columns, -(-g.r // rows) * -(-g.s // across), parts)
            arguments.append(pack("i", -(-vectors // columns)))
        launch = Launch(first, arguments, memory, grid=grid, threads=256, together=8)
    launch.run(seed)
    if not tile or parts > 1:
        size = g.f * depth
        width = 4 if size % 4 == 0 else 1
        slices = 2 if parts > 2 else 1
        adding = [tensors, pack("q", size), pack("i", parts), pack("i", slices)]
        grid = (-(-size // width // (256 // slices)),)
        Launch(second, adding, memory, grid=grid, threads=256, together=8).run(seed)
    return dw


@dataclass(frozen=True)
class Sparse:
    """A Config of ops/sparse_conv2d/two_four.mojo: one of its TILES."""

    groups: int
    pixels: int
    windows: int
    steps: int
    shares: bool = False

    @property
    def label(self) -> str:
        size = f"{64 * self.groups}x{self.pixels}x{self.windows}x{self.steps}"
        return size + "shares" * self.shares


SPARSE = (
    Sparse(2, 192, 6, 6),
    Sparse(2, 96, 9, 9),
    Sparse(1, 208, 2, 5, True),
    Sparse(1, 224, 2, 4, True),
)


def two_four(
    kernel: Kernel,
    tile: Sparse,
    p: Product,
    arrays: tuple[Array, Array],
    *,
    dtype: str,
    adds: bool,
    processors: int = 2,
    seed: int = 0,
) -> Array:
    """Runs ops/sparse_conv2d/two_four.mojo.

    Args:
        kernel: What runs.
        tile: Its config.
        p: The convolution.
        arrays: Values and indices.
        dtype: Of x, w and y.
        adds: Whether the residual is read.
        processors: Blocks of the grid, which go from tile to tile.
        seed: Of the order of warps and copies.

    Returns:
        y[M, F].
    """
    memory, g = Tensors(), p.g
    (high, broad), (ph, pw) = g.out, g.pad
    x, (residual_at, residual) = held(memory, p.x)[1], held(memory, p.residual)
    y_at, y = held(memory, unwritten((g.pixels, g.f), dtype))
    part, box = tile.pixels // tile.groups, tile.pixels
    row = g.dilation[0] * (g.w + pw)
    if tile.shares:
        box += (g.r - 1) * row + (g.s - 1) * g.dilation[1]
    out = p_, q_ = (g.h + ph, g.w + pw) if tile.shares else g.out
    maps: list[Tiled | Im2col | None] = [None, None, None]
    maps[0] = windows(x, g, box, 64, out) if tile.shares else pixels_of(x, g, box, 64)
    if tile.shares:
        image = residual.reshape(g.n, high, broad, g.f)
        maps[2] = Im2col(image, (0, 0), (q_ - broad, p_ - high), (1, 1), part, 64) if adds else None
    else:
        maps[1] = Tiled(y, (part, 64))
        maps[2] = Tiled(residual, (part, 64)) if adds else None
    m, tiles = g.n * p_ * q_, -(-g.f // (64 * tile.groups))
    blocks = -(-m // tile.pixels) * tiles
    sizes = problem(g, [m], [0], width=64, columns=tiles, splits=1, tiles=blocks, out=out)
    window = -(-box // 8) * 1024
    filters, bias_at = [memory.add(a) for a in arrays], memory.add(p.bias)
    launch = Launch(
        kernel,
        [
            bytes(128 * len(maps)),
            pack("2Q", *filters),
            pack("4Q", bias_at, bias_at, residual_at, y_at),
            sizes,
            pack("8i", window, box, row * 128, g.dilation[1] * 128, 0, g.n, high, broad),
        ],
        memory,
        grid=(min(blocks, processors),),
        threads=128 * tile.groups + 64,
        shared_bytes=2048 + tile.windows * window + tile.steps * tile.groups * 4608,
        maps=maps,
    )
    launch.run(seed)
    return y


@dataclass(frozen=True)
class Blocks:
    """A Config of ops/sparse_conv2d/blocks.mojo, of tiles of 64 filters."""

    pixels: int
    stages: int
    kind: str = ""

    @property
    def label(self) -> str:
        return f"{self.pixels}x64x{self.stages}{self.kind}"

    def parts(self, size: int) -> int:
        parts = 1
        while self.pixels // parts * 64 * size > (self.pixels + 64) * 128:
            parts *= 2
        return parts


BLOCKS = (
    Blocks(128, 8, "overlap"),
    Blocks(192, 3),
    Blocks(64, 6, "split"),
)


def blocks(
    kernel: Kernel,
    tile: Blocks,
    p: Product,
    *,
    dtype: str,
    alpha: float = 1,
    splits: int = 1,
    processors: int = 2,
    adds: bool = False,
    seed: int = 0,
) -> Array:
    """Runs ops/sparse_conv2d/blocks.mojo on the blocks of p.w[F, R, S, C] that hold a nonzero.

    The other arguments are those of `hopper`; y[M, F] is what comes back.
    """
    memory, g = Tensors(), p.g
    size = np.dtype(DTYPES[dtype]).itemsize
    width, part = 128 // size, tile.pixels // tile.parts(size)
    packed, lists = block_steps(p.w.transpose(1, 2, 3, 0), 64, width)

    y_at, y = held(memory, unwritten((g.pixels, g.f), dtype))
    residual_at, residual = held(memory, p.residual)
    x, w = held(memory, p.x)[1], held(memory, packed.reshape(-1, width))[1]
    maps = [
        pixels_of(x, g, tile.pixels, width),
        Tiled(w, (64, width)),
        Tiled(y, (part, width)),
        Tiled(residual, (part, width)) if adds else None,
    ]
    bias_at = memory.add(p.bias)
    tall, wide_ = -(-g.pixels // tile.pixels), len(lists)
    sizes = problem(
        g, [g.pixels], [0], width=width, columns=wide_, splits=splits, tiles=tall * wide_,
        alpha=alpha,
    )  # fmt: skip
    launch = Launch(
        kernel,
        [
            bytes(128 * 4),
            pack("4Q", bias_at, bias_at, residual_at, y_at),
            pack("Q", memory.add(lists)),
            sizes,
            pack("i", lists.shape[1]),
        ],
        memory,
        grid=(tall * wide_ * splits if tile.kind == "split" else min(tall * wide_, processors),),
        threads=128 + 32,
        shared_bytes=tile.stages * (tile.pixels + 64) * 128 + 16 * tile.stages + 1024,
        cluster=splits,
        maps=maps,
    )
    launch.run(seed)
    return y


@dataclass(frozen=True)
class OneTile:
    """A TileConfig of ops/hopper/tile.mojo: of a block that computes one tile."""

    groups: int
    columns: int
    split: bool = False

    @property
    def label(self) -> str:
        return f"{64 * self.groups}x{self.columns}" + "split" * self.split

    def shared_bytes(self, box: Sequence[int], filters: int, pixels: int) -> int:
        """Counts what a TileBlock divides, of so many stages, and what aligning it may take."""
        rings = filters * (self.columns * 128 + 16) + pixels * (box[0] + 16)
        inbox = self.split * 64 * self.groups * self.columns * 4 + 8
        return rings + inbox + 4 * self.columns + 1024


def pixel_box(
    x: Array, g: Conv, rows: int, width: int, columns: int = 0, row: int = 128
) -> tuple[Tiled | Im2col, list[int], int]:
    """Packs a PixelBox of ops/hopper/pixel_box.mojo, for `rows` pixels: map, numbers and tiles.

    Taps of ``columns`` columns of the window share a box; 0 for all of them. The channels
    of a stage are ``row`` bytes.
    """
    high, broad = g.out
    extra = (columns or g.s) - 1
    pitch = broad + extra
    if g.r * g.s == 1 or (*g.stride, *g.dilation) != (1, 1, 1, 1) or pitch > rows:
        return pixels_of(x, g, rows, width), [rows * row] * 2 + [0] * 3, -(-g.pixels // rows)
    bands = -(-high // min(high, (rows + extra) // pitch, 257 - g.r))
    height = -(-high // bands)
    box = (height + g.r - 1) * pitch
    window = -(-max(box, (g.r - 1) * pitch + extra + rows) * row // 1024) * 1024
    map = Tiled(x, (1, height + g.r - 1, pitch, width))
    return map, [window, box * row, pitch, height, bands], g.n * bands


RESIDENT = (  # of ops/gemm/tuning.mojo
    OneTile(1, 64, split=True),
    OneTile(1, 32, split=True),
    OneTile(1, 64),
    OneTile(1, 32),
)
EXPANDED = (*RESIDENT, OneTile(2, 64))  # of ops/sparse_conv2d/tuning.mojo


def resident(
    kernel: Kernel,
    config: OneTile,
    products: Sequence[Product],
    *,
    dtype: str,
    alpha: float = 1,
    splits: int = 1,
    stages: int = 9,
    norm: Norm | None = None,
    pools: bool = False,
    constant: bool = True,
    late: bool = False,
    seed: int = 0,
) -> list[Array]:
    """Runs ops/gemm/resident.mojo. The kernel ahead writes x and the residual.

    Args:
        kernel: What runs.
        config: Sizes of the block.
        products: One convolution, or products of the same K and F.
        dtype: Of x, w and y.
        alpha: Scale of the product.
        splits: Blocks that share a tile.
        stages: Stages of filters, unless a block has fewer steps.
        norm: What the epilogue normalises by, or measures.
        pools: Whether it stores the mean of the rows.
        constant: Whether the kernel is told that w are weights.
        late: Whether the kernel ahead writes w, too.
        seed: Of the order of warps and copies.

    Returns:
        y[M, F] of each product, or their means [1, F].
    """
    memory, g = Tensors(), products[0].g
    rows, width = 64 * config.groups, 128 // np.dtype(DTYPES[dtype]).itemsize
    columns = -(-g.f // config.columns)
    maps: list[Tiled | Im2col] = []
    ends: list[list[int]] = [[], [], [], []]
    results, firsts, blocks = [], [], 0
    for p in products:
        x = held(memory, p.x, late=True)[1]
        y_at, y = held(memory, unwritten((1 if pools else p.g.pixels, g.f), dtype))
        w = held(memory, p.w.reshape(g.f, -1, g.c), late)[1]
        residual_at, bias = held(memory, p.residual, late=True)[0], memory.add(p.bias)
        map, box, tiles = pixel_box(x, p.g, rows, width)
        maps += [map, Tiled(w, (config.columns, 1, width))]
        results.append(y)
        for end, at in zip(ends, (bias, bias, residual_at, y_at), strict=True):
            end.append(at)
        firsts.append(blocks)
        blocks += tiles * columns
    filters = min(stages, -(-g.r * g.s * -(-g.c // width) // splits))
    pixels = 2 if box[2] else filters
    sizes = problem(
        g, [p.g.pixels for p in products], firsts, width=width, columns=columns, splits=splits,
        tiles=blocks, alpha=alpha, constant=constant,
    )  # fmt: skip
    launch = Launch(
        kernel,
        [
            bytes(128 * len(maps)),
            pack(f"{4 * len(products)}Q", *(at for end in ends for at in end))
            + (norm.packed(memory) if norm else b""),
            sizes,
            pack("7i", *box, filters, pixels),
        ],
        memory,
        grid=(blocks * splits,),
        threads=128 * config.groups + 64,
        shared_bytes=config.shared_bytes(box, filters, pixels) + pools * 16 * config.columns,
        maps=maps,
        cluster=splits,
    )
    launch.run(seed)
    return results


@dataclass(frozen=True)
class PingPong:
    """A PingPong of ops/gemm/pingpong.mojo."""

    groups: int
    columns: int

    @property
    def label(self) -> str:
        return f"{self.groups}x64x{self.columns}"


PINGPONG = (PingPong(3, 192), PingPong(3, 128))  # of ops/gemm/tuning.mojo


def pingpong(
    kernel: Kernel,
    config: PingPong,
    products: Sequence[Product],
    *,
    dtype: str,
    out: str = "",
    alpha: float = 1,
    stages: int = 5,
    boxes: int = 1,
    processors: int = 2,
    norm: Norm | None = None,
    constant: bool = True,
    late: bool = False,
    seed: int = 0,
) -> list[Array]:
    """Runs ops/gemm/pingpong.mojo. The kernel ahead writes x.

    Args:
        kernel: What runs.
        config: Sizes of the block.
        products: One convolution, or products of the same K and F.
        dtype: Of x and w, and of y unless that is named; w may be of another integer.
        out: Of y.
        alpha: Scale of the product.
        stages: Stages of the ring.
        boxes: Boxes of results of each consumer.
        processors: Blocks of the same filters, at most; one at least for each product.
        norm: What the epilogue normalises by.
        constant: Whether the kernel is told that w are weights.
        late: Whether the kernel ahead writes w, too.
        seed: Of the order of warps and copies.

    Returns:
        y[M, F] of each product.
    """
    memory, g, out = Tensors(), products[0].g, out or dtype
    width, box = (128 // np.dtype(DTYPES[each]).itemsize for each in (dtype, out))
    in_quads, scales = box == 128, b""
    box = box // 2 if config.columns % box else box
    steps, columns = g.r * g.s * -(-g.c // width), -(-g.f // config.columns)
    maps: list[Tiled | Im2col] = []
    ends: list[list[int]] = [[], [], [], []]
    results, firsts, tiles = [], [], 0
    for p in products:
        y_at, y = held(memory, unwritten((p.g.pixels, g.f), out))
        w = quads(p.w) if in_quads else p.w
        w = held(memory, w.reshape(g.f, -1, g.c), late)[1]
        maps.append(pixels_of(held(memory, p.x, late=True)[1], p.g, 64, width))
        maps += [Tiled(w, (config.columns, 1, width)), Tiled(y, (64, box))]
        bias = memory.add(p.bias)
        scales += p.scales(memory)
        for end, at in zip(ends, (bias, bias, bias, y_at), strict=True):
            end.append(at)
        results.append(y)
        firsts.append(tiles)
        tiles += -(-p.g.pixels // 64) * columns
    sizes = problem(
        g, [p.g.pixels for p in products], firsts, width=width, columns=columns, splits=1,
        tiles=tiles, alpha=alpha,
        constant=constant,
    )  # fmt: skip
    launch = Launch(
        kernel,
        [
            bytes(128 * len(maps)),
            pack(f"{4 * len(products)}Q", *(at for end in ends for at in end))
            + scales
            + (norm.packed(memory) if norm else b""),
            sizes,
            pack("i", stages),
            pack("i", boxes),
        ],
        memory,
        grid=(min(tiles, processors * columns),),
        threads=128 * config.groups + 128,
        shared_bytes=steps * (config.columns * 128 + 16)
        + stages * (8192 + 16)
        + boxes * config.groups * 8192
        + 1024,
        maps=maps,
    )
    launch.run(seed)
    return results


@dataclass(frozen=True)
class Turned:
    """A TurnedConfig of ops/gemm/turned.mojo."""

    filters: int
    pixels: int
    row: int = 128
    pitch: int = 128

    @property
    def label(self) -> str:
        return f"{self.filters}x{self.pixels}" + ("" if self.row == 128 else f"row{self.row}")

    @property
    def result(self) -> int:
        """Bytes of a consumer's result: 64 filters of columns that leave by 16, in 8 bits by 32."""
        step = 2048 // self.pitch
        return max(self.pixels + 8, -(-self.pixels // step) * step) * self.pitch


TURNED = (Turned(64, 232), Turned(128, 200))  # of ops/gemm/tuning.mojo
TURNED_BYTES = (Turned(64, 240, 64, 64), Turned(128, 208, 128, 64))
"""The same of 8 bits, the first of them for up to 64 channels."""


def turned(
    kernel: Kernel,
    config: Turned,
    p: Product,
    *,
    dtype: str,
    columns: int = 0,
    alpha: float = 1,
    stages: int = 3,
    processors: int = 2,
    adds: bool = False,
    seed: int = 0,
) -> Array:
    """Runs ops/gemm/turned.mojo. The kernel ahead writes x and the residual.

    Args:
        kernel: What runs.
        config: Sizes of the block.
        p: The convolution.
        dtype: Of x, w and y.
        columns: Columns of the window whose taps share a box; 0 for all of them.
        alpha: Scale of the product.
        stages: Stages of filters, unless they stay.
        processors: Blocks at most.
        adds: Whether there is a residual.
        seed: Of the order of warps and copies.

    Returns:
        y[M, F].
    """
    memory, g = Tensors(), p.g
    columns, size = columns or g.s, np.dtype(DTYPES[dtype]).itemsize
    x, width = held(memory, p.x, late=True)[1], config.row // size
    map, box, tiles = pixel_box(x, g, config.pixels, width, columns, config.row)
    w = quads(p.w) if size == 1 else p.w
    w = held(memory, w.reshape(g.f, -1, g.c))[1]
    y_at, y = held(memory, unwritten((g.n, *g.out, g.f), dtype))
    residual_at, residual = held(memory, p.residual.reshape(y.shape), late=True)
    bias, band = memory.add(p.bias), (1, box[3], box[2], 64)
    if config.filters == 64:
        stages = g.r * g.s * -(-g.c // width)
    wide_ = -(-g.f // config.filters)
    sizes = problem(
        g, [g.pixels], [0], width=width, columns=wide_, splits=1, tiles=tiles * wide_, alpha=alpha
    )
    ends = 2 * (config.result + 16) + 1024
    launch = Launch(
        kernel,
        [
            bytes(128 * 4),
            pack("4Q", bias, bias, residual_at, y_at) + p.scales(memory),
            sizes,
            pack("9i", *box, stages, g.s // columns, g.r * columns, columns),
        ],
        memory,
        grid=(min(tiles * wide_, processors),),
        threads=256 + (96 if adds else 64),
        shared_bytes=ends + 2 * (box[0] + 16) + stages * (config.filters * config.row + 16),
        maps=[
            map,
            Tiled(w, (config.filters, 1, width)),
            Tiled(y, band),
            Tiled(residual, band) if adds else None,
        ],
    )
    launch.run(seed)
    return y.reshape(-1, g.f)


def tiled(
    kernel: Kernel,
    config: OneTile,
    p: Product,
    arrays: tuple[Array, Array],
    *,
    dtype: str,
    splits: int = 1,
    seed: int = 0,
) -> Array:
    """Runs ops/sparse_conv2d/tiled.mojo.

    Args:
        kernel: What runs.
        config: Sizes of the block.
        p: The convolution.
        arrays: Words and starts.
        dtype: Of x and y.
        splits: Blocks that share a tile.
        seed: Of the order of warps and copies.

    Returns:
        y[M, F].
    """
    memory, g = Tensors(), p.g
    rows, steps = 64 * config.groups, g.r * g.s * -(-g.c // 64)
    x, (y_at, y) = held(memory, p.x)[1], held(memory, unwritten((g.pixels, g.f), dtype))
    residual_at = memory.add(p.residual)
    map, box, tiles = pixel_box(x, g, rows, 64)
    fewest = 8 * 32 // config.columns  # as few stages of filters as there may be
    stages = (fewest, 2 if box[2] else fewest)
    columns = -(-g.f // config.columns)
    blocks = tiles * columns
    sizes = problem(g, [g.pixels], [0], width=64, columns=columns, splits=splits, tiles=blocks)
    filters, bias = [memory.add(a) for a in arrays], memory.add(p.bias)
    share, parts = -(-steps // splits), config.columns // 32
    launch = Launch(
        kernel,
        [
            bytes(128),
            pack("4Q", bias, bias, residual_at, y_at),
            pack("2Q", *filters),
            sizes,
            pack("8i", *box, *stages, -(-g.f // 32) * steps),
        ],
        memory,
        grid=(blocks * splits,),
        threads=128 * config.groups + 8 * 32 + 32,
        shared_bytes=config.shared_bytes(box, *stages) + 4 * parts * (share + 1) + 4 + 8 * share,
        maps=[map],
        cluster=splits,
    )
    launch.run(seed)
    return y


@dataclass(frozen=True)
class Chain:
    """A ChainConfig of ops/gemm/chain.mojo: one of those in kernels.mojo."""

    groups: int
    c: int
    f: int
    w_stages: int
    x_stages: int
    h_stages: int = 0
    bytes: bool = False
    s: int = 0
    near: bool = True

    @property
    def chunk(self) -> int:
        """Columns of a chunk of h."""
        return 128 if self.bytes else 64

    @property
    def label(self) -> str:
        source = f"and{64 * self.s}" if self.s else ""
        return f"{64 * self.groups}x{64 * self.c}{source}x{64 * self.f}x{self.w_stages}"

    @property
    def buffers(self) -> int:
        c = self.c + self.s
        weights = self.w_stages // 2 * (c + self.f) + self.w_stages % 2 * c
        tiles = self.x_stages * max(c, self.f) * (4096 if self.bytes else 8192)
        return 8192 * weights + self.groups * (tiles + 8192 * self.h_stages)

    def vectors(self, chunks: int) -> int:
        """Bytes of biases, and of scales."""
        each = 0 if not self.near else 12 if self.s and self.bytes else 8
        return 256 * self.f * (2 if self.bytes else 1) + each * chunks * self.chunk


def chain(
    kernel: Kernel,
    tile: Chain,
    x: Array,
    weights: Sequence[Array],
    vectors: Sequence[Array],
    residual: Array | None = None,
    *,
    dtype: str,
    scales: Sequence[Array] = (),
    residual_scale: float = 1,
    source: Sequence[Array] | None = None,
    processors: int = 2,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Runs ops/gemm/chain.mojo.

    Args:
        kernel: What runs.
        tile: Its config.
        x: [M, C].
        weights: w1[K, C] and w2[F, K].
        vectors: Biases of h and z, moments of x, and a second source's bias.
        residual: [M, K], if h is stored.
        dtype: Of x, h and z.
        scales: Of the sums of h and z, in 8 bits.
        residual_scale: Of the residual, likewise.
        source: A second source [M, S], its weights v[K, S] and, in 8 bits, what x's sums are in
            its own.
        processors: Blocks of the grid at most.
        seed: Of the order of warps and copies.

    Returns:
        z[M, F] and h[M, K]; the latter is not written unless there is a residual.
    """
    memory, (m, (hidden, _)) = Tensors(), (len(x), weights[0].shape)

    def held(array: Array) -> Array:
        return memory.array(memory.add(array), array)

    z, h = held(unwritten((m, len(weights[1])), dtype)), held(unwritten((m, hidden), dtype))
    w1, w2 = (held(quads(w) if tile.bytes else w) for w in weights)
    c, f, chunk = (64 * tile.c, 64 * tile.f, 128) if tile.bytes else (64, 64, 64)
    maps: list[Tiled | Im2col | None] = [Tiled(held(x), (64, c)), Tiled(w1, (chunk, c))]
    maps += [Tiled(w2, (64 * tile.f, chunk)), Tiled(z, (64, f))]
    if source is not None:
        s = 64 * tile.s
        maps += [Tiled(held(source[0]), (64, s)), Tiled(h, (64, chunk))]
        maps.append(Tiled(held(quads(source[1]) if tile.bytes else source[1]), (chunk, s)))
    elif residual is not None:
        maps += [Tiled(held(residual), (64, chunk)), Tiled(h, (64, chunk))]
    else:
        maps += [None] * 2
    given = pack("4Q", *(memory.add(v, late=v.ndim == 3) for v in vectors))
    for scale in scales:
        first = scale if source is None else source[2]
        given += pack("2Q4f", memory.add(scale), memory.add(first), residual_scale, 0, 1, 0)
    tiles, chunks = -(-m // (64 * tile.groups)), -(-hidden // chunk)
    barriers = 16 * (tile.w_stages + tile.groups * (tile.x_stages + tile.h_stages))
    launch = Launch(
        kernel,
        [
            bytes(128 * len(maps)),
            given,
            pack("7if", 0, 1, tiles, 1, chunks, hidden, m, 1e-5),
        ],
        memory,
        grid=(min(tiles, processors),),
        threads=128 * (tile.groups + 1),
        shared_bytes=tile.buffers + barriers + tile.vectors(chunks) + 1024,
        maps=maps,
    )
    launch.run(seed)
    return z, h


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention: T queries and S keys of an image, heads of `depth` channels.

    `result` is scale and zero point of a result in 8 bits.
    """

    n: int
    t: int
    s: int
    heads: int
    depth: int
    result: tuple[float, ...] = ()


def attention(
    kernel: Kernel,
    g: Heads,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    *,
    rows: int = 0,
    splits: int = 1,
    grid: int = 0,
    seed: int = 0,
    masks: Masks | None = None,
    out: str = "bfloat16",
) -> Array:
    """Runs ops/attention/flash.mojo (or plain.mojo if rows is 0) on a grid of at most `grid`."""
    memory, y = Tensors(), unwritten(q.shape, out)
    at = [memory.add(a) for a in (q, k, v, y)]
    sizes = (g.n, g.t, g.s, g.heads * g.depth, g.heads)
    operands = pack(f"4Q5i{1 + len(g.result)}f", *at, *sizes, scale, *g.result)
    threads = 128 if splits == 1 else 64 * splits
    if rows:
        queries = 16 * rows * threads // (32 * splits)
        keys = (64 if g.depth <= 64 else 32) * splits
        shared = 3 * (2 * keys + queries) * -(-g.depth // 32) * 64
    else:
        queries, pitch = 32, -(-g.depth // 4) * 4 + 4
        shared = 4 * (pitch * 96 + 1024)
    blocks = -(-g.t // queries)
    total = blocks * g.n * g.heads
    total = min(total, grid) if grid else total
    parameters = [operands, pack("i", blocks)]
    if rows:
        head, block = divmod(total, blocks)
        parameters.append(pack("4i", head // g.heads, head % g.heads, block, 0))
    parameters.append(_masks(memory, masks or Masks()))
    launch = Launch(
        kernel,
        parameters,
        memory,
        grid=(total,),
        threads=threads,
        shared_bytes=shared,
        together=1 if rows else 4,
    )
    launch.run(seed)
    return memory.array(at[3], y)


@dataclass(frozen=True)
class Masks:
    """What ops/attention/mask.mojo reads; axes of the bias of length 1 are shared."""

    bias: Array | None = None  # [P, heads or 1, T or 1, S]; image n has n % P
    keys: Array | None = None  # [N, S], zero for keys that are not seen
    diagonal: int | None = None  # the last key that query 0 sees
    logsumexp: Array | None = None  # [N, heads, T], float32, which the kernel writes
    views: list[Array] = field(default_factory=list)  # the kernel's own of that

    @property
    def label(self) -> str:
        parts = {
            "bias": self.bias,
            "keys": self.keys,
            "causal": self.diagonal,
            "logsumexp": self.logsumexp,
        }
        return "".join(f"{name}_" for name, part in parts.items() if part is not None)


def hopper_attention(
    kernel: Kernel,
    g: Heads,
    tile: tuple[int, int, int],
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    *,
    period: int,
    processors: int = 2,
    dtype: str = "bfloat16",
    out: str = "",
    seed: int = 0,
    masks: Masks | None = None,
    linear: tuple[Array, Array, Array, Norm] | None = None,
) -> Array:
    """Runs ops/attention/hopper.mojo, `period` blocks of queries an item.

    `tile` is the kernel's Config: consumers, keys and stages. `linear` has weights [C, C], bias and
    residual [N, T, C] of a layer behind the only head, and gets the moments of its result.
    """
    groups, keys, stages = tile
    memory = Tensors()
    y_at, y = held(memory, unwritten(q.shape, out or dtype))
    rows, channels = (64, keys, keys), 32 if g.depth % 64 else 64
    maps = [
        Tiled(held(memory, a, late=True)[1], (1, r, channels))
        for r, a in zip(rows, (q, k, v), strict=True)
    ]
    shared = stages * (keys * 4 * g.depth + 24) + groups * (128 * g.depth + 16) + 1024
    result = pack("Q", y_at)
    if linear:
        w, bias, residual, norm = linear
        maps += [
            Tiled(held(memory, w)[1], (g.depth, 64)),
            *(Tiled(a, (1, 64, 64)) for a in (held(memory, residual, late=True)[1], y)),
        ]
        shared += 2 * g.depth**2 + groups * (128 * g.depth + 16) + 16
        result += pack("Q", memory.add(bias)) + norm.packed(memory)
    parts = -(-g.t // (64 * period))
    items = g.n * g.heads * parts
    sizes = (g.t, g.s, g.heads * g.depth, g.heads, -(-g.s // keys), period)
    schedule = pack(f"4i{len(g.result)}f", 0, parts, items, 1, *g.result)
    launch = Launch(
        kernel,
        [
            bytes(128 * len(maps)),
            result,
            pack("6if", *sizes, scale * np.log2(np.e)) + schedule,
            _masks(memory, masks or Masks()),
        ],
        memory,
        grid=(min(items, processors),),
        threads=128 * (groups + 1),
        shared_bytes=shared,
        maps=maps,
    )
    launch.run(seed)
    return y


def attention_linear(
    kernel: Kernel,
    g: Heads,
    given: Sequence[Array],
    linear: tuple[Array, Array, Array],
    scale: float,
    *,
    processors: int = 2,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> tuple[Array, Array]:
    """Runs ops/attention/linear_hopper.mojo.

    Args:
        kernel: What runs.
        g: Sizes.
        given: Queries [N, T, C], then keys and values [N, S, C].
        linear: Weights [C, C], bias and residual [N * T, C] of the layer behind.
        scale: Of the scores.
        processors: Blocks of the grid at most.
        dtype: Of all but the bias.
        seed: Of the order of warps and copies.

    Returns:
        The result [N * T, C], and the moments of its rows.
    """
    consumers, w_stages, (m, c) = 3, 6, linear[2].shape
    own = g.heads // consumers
    tiles, blocks = consumers * max(own, 2), -(-m // 64)
    memory = Tensors()
    (_, w), (_, y) = held(memory, linear[0]), held(memory, unwritten((m, c), dtype))
    q, k, v = given
    _, queries = held(memory, q.reshape(m, c), late=True)
    (_, keys), (_, values), (_, residual) = (held(memory, a, late=True) for a in (k, v, linear[2]))
    norm = Norm(np.full((m, c // 32, 2), np.nan, np.float32))
    launch = Launch(
        kernel,
        [
            bytes(128 * 6),
            pack("Q", memory.add(linear[1])),
            norm.packed(memory),
            pack("3if4i", g.t, g.s, m, scale * np.log2(np.e), 0, 1, blocks, 1),
        ],
        memory,
        grid=(min(blocks, processors),),
        threads=128 * consumers + 32,
        shared_bytes=8192 * (g.heads + w_stages * own + tiles)
        + 4 * c
        + 16 * (1 + w_stages + tiles + consumers)
        + 1024,
        maps=[
            Tiled(queries, (64, 64)),
            *(Tiled(a, (1, 64, 64)) for a in (keys, values)),
            Tiled(w, (c // consumers, 64)),
            *(Tiled(a, (64, 64)) for a in (residual, y)),
        ],
    )
    launch.run(seed)
    return y, norm.moments


def _masks(memory: Tensors, masks: Masks) -> bytes:
    """Packs MaskTensors; rows of bias are as long as is even."""
    bias, keys, image, images, head, row = 0, 0, 0, 1, 0, 0
    if masks.bias is not None:
        images, heads, t, s = masks.bias.shape
        row = s + s % 2
        dtype = "bfloat16" if masks.bias.dtype == np.uint16 else str(masks.bias.dtype)
        held = unwritten((images, heads, t, row), dtype)
        held[..., :s] = masks.bias
        bias = memory.add(held, late=True)
        image, head = heads * t * row, t * row * (heads > 1)
        row *= t > 1
    if masks.keys is not None:
        keys = memory.add(masks.keys, late=True)
    kept = 0
    if masks.logsumexp is not None:
        kept = memory.add(masks.logsumexp)
        masks.views.append(memory.array(kept, masks.logsumexp))
    sizes = pack("2iq2i", image, images, head, row, masks.diagonal or 0)
    return pack("3Q", bias, keys, kept) + sizes


def attention_grad(
    find: Callable[[str], Kernel],
    g: Heads,
    given: Sequence[Array],
    logsumexp: Array,
    scale: float,
    *,
    dtype: str = "bfloat16",
    masks: Masks | None = None,
    seed: int = 0,
) -> list[Array]:
    """Runs both kernels of ops/attention_grad on q, k, v, y, dy: dq, dk, dv.

    They are those of plain.mojo in float32, of mma.mojo otherwise.
    """
    plain = dtype == "float32"
    masks = masks or Masks()
    memory, results = Tensors(), [unwritten(a.shape, dtype) for a in given[:3]]
    delta = np.full(logsumexp.shape, np.nan, np.float32)
    at = [memory.add(a) for a in (*given, logsumexp, *results, delta)]
    forward = pack("4Q5if", *at[:4], g.n, g.t, g.s, g.heads * g.depth, g.heads, scale)
    forward += bytes(-len(forward) % 8)
    depth = -(-g.depth // 32) * 32
    columns, rows = 64 if depth <= 64 else 32, 64
    shared = 256 * depth + 2 * columns * (4 * depth + 8)
    if plain:
        rows = 32
        shared = 4 * (128 * (-(-g.depth // 4) * 4 + 4) + 2048)
    packed = _masks(memory, masks)
    for side, count in (("queries", g.t), ("keys", g.s)):
        blocks = -(-count // rows)
        launch = Launch(
            find(f"attention_grad_{'plain_' * plain}{side}_{masks.label}{g.depth}_{dtype}"),
            [forward + pack("6Q", *at[4:]), pack("i", blocks), packed],
            memory,
            grid=(blocks * g.n * g.heads,),
            threads=128,
            shared_bytes=shared,
            together=2,
        )
        launch.run(seed)
    return [memory.array(place, a) for place, a in zip(at[6:9], results, strict=True)]


def gemv(kernel: Kernel, p: Product, dtype: str, seed: int = 0) -> Array:
    """Runs ops/gemm/gemv.mojo. The kernel ahead writes x.

    Args:
        kernel: What runs.
        p: The tensors, of a matrix product.
        dtype: Of x, w and y.
        seed: Of the order of warps.
    """
    g, memory = p.g, Tensors()
    y_at, y = held(memory, unwritten((g.pixels, g.f), dtype))
    x_at = memory.add(p.x, late=True)
    launch = Launch(
        kernel,
        [
            pack("5Qf", x_at, memory.add(p.w), memory.add(p.bias), 0, y_at, 1),
            pack("i", g.c),
            pack("i", g.f),
        ],
        memory,
        grid=(-(-g.f // 8), g.pixels),
        threads=128,
    )
    launch.run(seed)
    return y


def gemm_cores(
    kernel: Kernel, p: Product, dtype: str, alpha: float, *, products: int = 1, groups: int = 1
) -> Array:
    """Runs the kernel of ops/gemm/gpu.mojo: groups of channels, or products of a batch.

    Args:
        kernel: What runs.
        p: The tensors of all products; the sizes of one, its C and F of all groups.
        dtype: Of x, w and y.
        alpha: Scale.
        products: Products of the batch, one after another in x, w and y.
        groups: Groups of a convolution.
    """
    g, memory = p.g, Tensors()
    y = unwritten((products * g.pixels, g.f), dtype)
    at = [memory.add(a) for a in (p.x, p.w, p.bias, p.residual, y)]
    tiles = -(-g.pixels // 64)
    c, f = g.c // groups, g.f // groups
    steps = (c, f * g.r * g.s * c, f, f)  # of x, w, the bias, y
    if products > 1:
        steps = (g.h * g.w * g.c, g.f * g.c, 0, g.pixels * g.f)
    launch = Launch(
        kernel,
        [
            pack("5Qf", *at, alpha),
            g.packed(groups),
            pack("i", tiles),
            pack("5q", max(products, groups), *steps),
        ],
        memory,
        grid=(tiles * max(products, groups), -(-f // 64)),
        threads=256,
        together=8,
    )
    launch.run()
    return memory.array(at[4], y)


def lane_blocks(channels: int, width: int, size: int, pieces: int) -> int:
    """Counts blocks of 128 threads as ops/depthwise_lanes.mojo does.

    Args:
        channels: C.
        width: Channels of a thread.
        size: Bytes of a channel.
        pieces: What there is to compute of each vector of channels.
    """
    vectors = channels // width
    columns = -(-vectors // (128 // (width * size)))
    lanes = -(-vectors // columns)
    return -(-pieces // (128 // lanes)) * columns


def depthwise(
    kernel: Kernel, p: Product, dtype: str, width: int, run: int = 0, lies: bool = False
) -> Array:
    """Runs the kernels of ops/conv2d/depthwise.mojo.

    Args:
        kernel: What runs.
        p: The tensors; w[R, S, C], or w[C, R, S] if it lies so.
        dtype: Of x, w and y.
        width: Channels of a thread.
        run: Neighbouring pixels of a thread; 0 for the simple kernel, which takes one.
        lies: Whether the filter lies as training has it.

    Returns:
        y[M, C].
    """
    g, memory = p.g, Tensors()
    y, late = unwritten((g.pixels, g.c), dtype), run > 0  # the simple one begins when all is there
    x, residual = memory.add(p.x, late=late), memory.add(p.residual, late=late)
    at = (x, memory.add(p.w, late=late and lies), memory.add(p.bias), residual, memory.add(y))
    operands, threads = pack("5Qf", *at, 1), 128 if run else 256
    pieces = g.n * g.out[0] * -(-g.out[1] // max(run, 1))
    grid = (-(-pieces * (g.c // width) // threads),)
    if run and lies:
        grid = (lane_blocks(g.c, width, p.x.itemsize, pieces),)
    parameters = [operands, g.packed(g.c)]
    Launch(kernel, parameters, memory, grid=grid, threads=threads, together=8).run()
    return memory.array(at[4], y)


def depthwise_input_grad(
    kernel: Kernel, g: Conv, dy: Array, filters: Array, dtype: str, width: int, patches: bool
) -> Array:
    """Runs the kernels of ops/depthwise_input_grad.mojo.

    Args:
        kernel: What runs.
        g: Sizes of the convolution.
        dy: The gradient of its result [N, P, Q, C].
        filters: [C, R, S].
        dtype: Of the tensors.
        width: Channels of a thread.
        patches: Whether threads take patches of pixels; one pixel in the simple kernel.

    Returns:
        dx[N, H, W, C].
    """
    memory, dx = Tensors(), unwritten((g.n, g.h, g.w, g.c), dtype)
    at = [memory.add(dx), memory.add(dy, late=True), memory.add(filters, late=True)]
    parameters = [*(pack("Q", a) for a in at), g.packed(g.c)]
    grid = -(-dx.size // width // 128)
    if patches:
        rows = -(-(g.pad[0] % g.stride[0] + g.h) // g.stride[0])
        runs = -(-(g.pad[1] % g.stride[1] + g.w) // 4)
        grid = lane_blocks(g.c, width, dy.itemsize, g.n * rows * runs)
    Launch(kernel, parameters, memory, grid=(grid,), threads=128, together=8).run()
    return memory.array(at[0], dx)


def reciprocal(size: int) -> tuple[int, int]:
    """Finds the factor and the shift of a division, as ops/division.mojo does."""
    shift = (size - 1).bit_length()
    return (((1 << shift) - size) << 32) // size + 1, shift


def pointwise(
    kernel: Kernel,
    inputs: Sequence[Array],
    shape: Sequence[int],
    width: int,
    dtype: str,
    pieces: int = 1,
) -> Array:
    """Runs the kernel of ops/pointwise.mojo.

    Args:
        kernel: What runs.
        inputs: As many axes as `shape`, of length 1 where they repeat.
        shape: Of the result; the last axis is a row.
        width: Numbers of a thread.
        dtype: Of the result; uint8 is a mask's.
        pieces: Vectors of a thread.

    Returns:
        The result.
    """
    memory = Tensors()
    y = np.full(shape, 2, np.uint8) if dtype == "uint8" else unwritten(shape, dtype)
    sources, to = [memory.add(a, late=True) for a in inputs], memory.add(y)
    *outer, inner = shape
    sizes = outer[::-1] + [1] * (6 - len(outer))
    steps, moves, strides = [], [], []
    size = outer[0] if outer else inner // width
    share = -(-size // pieces)
    for a in inputs:
        *rows, column = (s // a.itemsize for s in np.broadcast_to(a, shape).strides)
        steps += rows[::-1] + [0] * (6 - len(rows))
        moves.append(column > 0)
        strides.append(share * (rows[0] if outer else width * column))
    count, vectors, per_row = len(inputs), y.size // width, inner // width
    step = vectors // size * share
    inside = map(reciprocal, outer[:0:-1])  # of all axes but the outermost
    factors, shifts = zip(*inside, *[(0, 31)] * (6 - max(len(outer) - 1, 0)), strict=True)
    numbers = (inner, y.size // inner, len(outer), *sizes, *factors, *shifts, *steps, *moves)
    axes = pack(f"2qi18I{6 * count}q{count}?", *numbers)
    threads = pack(f"5I{count}q", vectors, step, per_row, *reciprocal(per_row), *strides)
    Launch(
        kernel,
        [pack("Q", to), pack(f"{count}Q", *sources), axes, threads],
        memory,
        grid=(-(-step // 256),),
        threads=256,
        together=8,
    ).run()
    return memory.array(to, y)


def foreach(
    kernel: Kernel, members: Sequence[Sequence[Array]], offsets: Sequence[int], dtype: str
) -> list[Array]:
    """Runs the kernel of ops/foreach.mojo on members, each the numbers of its inputs.

    The tensors of each begin ``offsets`` numbers behind an aligned address.
    """
    memory, count = Tensors(), len(members[0])
    narrowest = min(x.itemsize for x in (*members[0], np.empty(0, DTYPES[dtype])) if x.itemsize > 1)
    width = 16 // narrowest
    chunk = 256 * width * min(4, max(1, 64 // (width * count)))
    made = [unwritten(x[0].shape, dtype) for x in members]
    most = 4000 // (8 * (count + 2))
    empty = [0] * (most - len(members))
    chunks = [-(-x[0].size // chunk) for x in members]
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    y, x = [], []
    for given, result, offset in zip(members, made, offsets, strict=True):
        x += [memory.add(each, offset * each.itemsize, late=True) for each in given]
        y.append(memory.add(result, offset * result.itemsize))
    lengths = [each[0].size for each in members]
    numbers = [len(members), sum(chunks), *starts, *empty, *lengths, *empty]
    table = pack(f"{2 + 2 * most}i{most * (1 + count)}Q", *numbers, *y, *empty, *x, *empty * count)
    Launch(kernel, [table], memory, grid=(sum(chunks),), threads=256, together=8).run()
    return list(map(memory.array, y, made))


def concat(
    kernel: Kernel,
    parts: Sequence[Array],
    width: int,
    dtype: str,
    pieces: int = 1,
    vectors: Sequence[Array] = (),
) -> Array:
    """Runs the kernel of ops/concat.mojo.

    Args:
        kernel: What runs.
        parts: Up to eight x[rows, ...].
        width: Numbers of a vector.
        dtype: Of the result.
        pieces: Vectors of a thread.
        vectors: What an expression reads by channel.

    Returns:
        The result.
    """
    memory = Tensors()
    starts = np.cumsum([0, *(part.shape[1] for part in parts)]).tolist()
    starts += [starts[-1]] * (8 - len(parts))
    y = unwritten((len(parts[0]), starts[-1]), dtype)
    to, at = memory.add(y), [memory.add(part, late=True) for part in parts]
    at += at[:1] * (8 - len(at))
    beside = [memory.add(vector, late=True) for vector in vectors]
    beside += at[:1] * (3 - len(beside))
    tensors = pack("21q", to, *at, *beside, *(start // width for start in starts))
    per_row, rows = starts[-1] // width, -(-len(y) // pieces)
    threads = pack("6I", len(y) * per_row, rows * per_row, rows, per_row, *reciprocal(per_row))
    grid = (-(-rows * per_row // 256),)
    Launch(kernel, [tensors, threads], memory, grid=grid, threads=256, together=8).run()
    return memory.array(to, y)


def roll(
    kernel: Kernel, x: Array, shifts: tuple[int, int], axes: tuple[int, int], width: int, dtype: str
) -> Array:
    """Runs the kernel of ops/roll.mojo; shifts are those of the two axes, and not negative."""
    memory, y = Tensors(), unwritten(x.shape, dtype)
    to, at = memory.add(y), memory.add(x, late=True)
    first, second = axes
    row = math.prod(x.shape[second + 1 :])
    between = math.prod(x.shape[first + 1 : second])
    sizes = (x.shape[first], shifts[0], between, x.shape[second], shifts[1], row)
    vectors = x.size // width
    parameters = [pack("Q", to), pack("Q", at), pack("6I", *sizes)]
    parameters += [pack("I", vectors), pack("I", row // width)]
    Launch(kernel, parameters, memory, grid=(-(-vectors // 256),), threads=256, together=8).run()
    return memory.array(to, y)


def class_token(kernel: Kernel, x: Array, token: Array, width: int, dtype: str) -> Array:
    """Runs the kernel of ops/class_token.mojo on x[N, T, C]."""
    memory, (n, t, c) = Tensors(), x.shape
    y = unwritten((n, t + 1, c), dtype)
    at = [memory.add(x, late=True), memory.add(token), to := memory.add(y)]
    sizes = (pack("I", t + 1), pack("I", c // width), pack("q", y.size // width))
    parameters = [*(pack("Q", a) for a in at), *sizes]
    grid = (-(-y.size // width // 256),)
    Launch(kernel, parameters, memory, grid=grid, threads=256, together=8).run()
    return memory.array(to, y)


def class_token_layernorm(
    kernel: Kernel, lanes: int, x: Array, token: Array, weight: Array, bias: Array, dtype: str
) -> Array:
    """Runs the kernel of ops/class_token.mojo that norms x[N, T, C]."""
    memory, (n, t, c) = Tensors(), x.shape
    y = unwritten((n, t + 1, c), dtype)
    tensors = [memory.add(x, late=True), memory.add(weight), memory.add(bias), memory.add(y)]
    sizes = (pack("I", t + 1), pack("q", n * (t + 1)), pack("i", c), pack("f", 1e-5))
    parameters = [pack("4Q", *tensors), pack("Q", memory.add(token)), *sizes]
    grid = (-(-n * (t + 1) * lanes // 128),)
    Launch(kernel, parameters, memory, grid=grid, threads=128, together=4).run()
    return memory.array(tensors[3], y)


def row_moments(kernel: Kernel, x: Array) -> Array:
    """Runs the kernel of ops/row_moments.mojo on x[M, C]."""
    memory, moments = Tensors(), np.full((len(x), x.shape[1] // 32, 2), np.nan, np.float32)
    at, to = memory.add(x, late=True), memory.add(moments)
    parameters = [pack("Q", at), pack("Q", to), pack("q", x.size // 8)]
    grid = (-(-x.size // 8 // 256),)
    Launch(kernel, parameters, memory, grid=grid, threads=256, together=8).run()
    return memory.array(to, moments)


def pool(kernel: Kernel, g: Conv, x: Array, width: int, dtype: str) -> Array:
    """Runs the kernel of ops/pool.mojo on x[N, H, W, C]."""
    memory, y = Tensors(), unwritten((g.n, *g.out, g.c), dtype)
    to, at = memory.add(y), memory.add(x, late=True)
    parameters = [pack("Q", to), pack("Q", at), g.packed(g.c)]
    grid = (-(-y.size // width // 256),)
    Launch(kernel, parameters, memory, grid=grid, threads=256, together=8).run()
    return memory.array(to, y)


def pool_grad(
    kernel: Kernel, g: Conv, dy: Array, places: Array | None, width: int, dtype: str
) -> Array:
    """Runs the kernel of ops/pool_grad.mojo on dy[N, P, Q, C] and the maxima's places."""
    memory, dx = Tensors(), unwritten((g.n, g.h, g.w, g.c), dtype)
    at = [memory.add(dx), memory.add(dy, late=True)]
    at.append(at[0] if places is None else memory.add(places, late=True))
    parameters = [*(pack("Q", a) for a in at), g.packed(g.c)]
    grid = (-(-g.n * g.h * -(-g.w // 4) * (g.c // width) // 256),)
    Launch(kernel, parameters, memory, grid=grid, threads=256, together=8).run()
    return memory.array(at[0], dx)


def optimizer_step(
    kernel: Kernel, tensors: Sequence[Sequence[Array]], settings: Array, offsets: Sequence[int]
) -> list[list[Array]]:
    """Runs ops/optimizer.mojo on parameters, each with its gradient and up to three states.

    The tensors of each begin ``offsets`` numbers behind an aligned address.
    """
    memory, at, chunks = Tensors(), [], 0
    places = np.zeros((len(tensors), 7), np.int64)
    for row, each, offset in zip(places, tensors, offsets, strict=True):
        at.append([memory.add(x, offset * x.itemsize, late=True) for x in each])
        row[: len(each)], row[5:] = at[-1], (each[0].size, chunks)
        chunks += -(-each[0].size // 4096)
    given = [memory.add(places, late=True), memory.add(settings, late=True)]
    parameters = [*(pack("Q", a) for a in given), pack("i", len(tensors))]
    Launch(kernel, parameters, memory, grid=(3,), threads=256, together=8).run()
    pairs = zip(at, tensors, strict=True)
    return [list(map(memory.array, some, each)) for some, each in pairs]


def resample(
    kernel: Kernel, pictures: Sequence[Array], places: Sequence[Sequence[int]], size: Sequence[int]
) -> Array:
    """Runs ops/resample.mojo on pictures [H, W, 3], to pixels of one size.

    ``places`` are those of each without addresses, behind what is skipped of the picture.
    """
    memory, y = Tensors(), unwritten((len(pictures), *size, 3), "uint8")
    to = memory.add(y)
    rows = [
        (memory.add(x, late=True) + skipped, to + i * y[0].size, *row)
        for i, (x, (skipped, *row)) in enumerate(zip(pictures, places, strict=True))
    ]
    given = memory.add(np.array(rows, np.int64), late=True)
    edge = max(size)
    grid = (-(-edge // 16) * -(-edge // 64), len(pictures))
    Launch(
        kernel, [pack("Q", given), pack("i", edge)], memory, grid=grid, threads=256, together=4
    ).run()
    return memory.array(to, y)


def normalize(kernel: Kernel, x: Array, mean: Array, scale: Array, dtype: str) -> Array:
    """Runs the kernel of ops/normalize.mojo on x[N, H, W, C]."""
    memory, y = Tensors(), unwritten(x.shape, dtype)
    at = [memory.add(y), memory.add(x, late=True), memory.add(mean), memory.add(scale)]
    parameters = [*(pack("Q", a) for a in at), pack("q", x.size), pack("I", x.shape[3])]
    grid = (-(-x.size // (16 * 256)),)
    Launch(kernel, parameters, memory, grid=grid, threads=256, together=8).run()
    return memory.array(at[0], y)


def softmax(kernel: Kernel, dtype: str, *given: Array) -> Array:
    """Runs a kernel of ops/rows.mojo: on x[rows, columns]; or on dy and y for its gradient."""
    memory, x = Tensors(), given[0]
    to = [*map(memory.add, given), memory.add(unwritten(x.shape, dtype))]
    parameters = [*(pack("Q", at) for at in to), *(pack("i", n) for n in x.shape)]
    Launch(kernel, parameters, memory, grid=(-(-len(x) // 4),), threads=128, together=4).run()
    return memory.array(to[-1], x)


@dataclass(frozen=True)
class Reduction:
    """x[outer, rows, inner] of ops/reduce/gpu.mojo, and how blocks divide it.

    Attributes:
        shape: Of x; rows that are folded are [outer, rows, width].
        width: Numbers of a vector.
        folded: Whether one number is left of a vector.
        slice: Threads of a block along inner.
        threads: Of a block.
        splits: Blocks of a cluster.
    """

    shape: tuple[int, int, int]
    width: int
    folded: bool = False
    slice: int = 1
    threads: int = 64
    splits: int = 1

    def name(self, kind: str, dtype: str) -> str:
        """Names the kernel."""
        most = 8 if self.splits > 1 else 1
        return f"reduce_{kind}_{self.width}x{1 if self.folded else self.width}_{most}_{dtype}"


def reduce(
    kernel: Kernel,
    g: Reduction,
    inputs: Sequence[Array],
    divisor: float,
    dtypes: Sequence[str],
    vectors: Sequence[Array] = (),
) -> list[Array]:
    """Runs a kernel of ops/reduce/gpu.mojo, which gives results of some dtypes."""
    outer, rows, inner = g.shape
    slabs = -(-inner // (g.slice * g.width))
    memory = Tensors()
    at = [memory.add(x) for x in inputs]
    made = [unwritten((outer, 1 if g.folded else inner), dtype) for dtype in dtypes]
    to = [memory.add(y) for y in made]
    tensors = [*to, *(memory.add(v) for v in vectors)]
    sizes = pack("5if", rows, inner, slabs, g.slice, g.splits, divisor)
    Launch(
        kernel,
        [pack(f"{len(at)}Q", *at), pack(f"{len(tensors)}Q", *tensors), sizes],
        memory,
        grid=(outer * slabs * g.splits,),
        threads=g.threads,
        cluster=g.splits,
        together=2,
    ).run()
    return [memory.array(place, y) for place, y in zip(to, made, strict=True)]


@dataclass(frozen=True)
class Squeeze:
    """Sizes of a squeeze and excitation, and how ops/squeeze_excite divides it.

    Attributes:
        images: N.
        pixels: Of an image.
        channels: C.
        hidden: Numbers between the products.
        together: Images of a cluster.
        split: Whether its blocks share weights.
        kept: Pixels that a block keeps in shared memory; none is all.
        threads: Of a block.
    """

    images: int
    pixels: int
    channels: int
    hidden: int
    together: int = 1
    split: bool = False
    kept: int | None = None
    threads: int = 256

    @property
    def most(self) -> int:
        """Pixels that a block keeps."""
        share = -(-self.pixels * self.together // 8)
        return share if self.kept is None else min(share, self.kept)

    @property
    def shared_bytes(self) -> int:
        """Bytes of a block's shared memory, as ops/squeeze_excite/config.mojo counts them."""
        vectors, rows = self.channels // 8, self.hidden * self.together
        slice = -(-vectors // 8) if self.split else vectors
        floats = 8 * (self.threads + self.together * slice + vectors) + -(-rows // 4) * 4
        floats += 8 * rows + (64 * slice if self.split else 0)
        return 64 + 4 * floats + 2 * self.channels * self.most


def squeeze_excite(
    kernel: Kernel, g: Squeeze, inputs: Sequence[Array], residual: Array | None, dtype: str
) -> Array:
    """Runs the kernel of ops/squeeze_excite: x, then weights [K, C] and bias of both products."""
    memory, x = Tensors(), inputs[0]
    at = [memory.add(x, late=True), *map(memory.add, inputs[1:])]
    at.append(at[0] if residual is None else memory.add(residual, late=True))
    at.append(memory.add(unwritten(x.shape, dtype)))
    shift = g.together.bit_length() - 1
    slice = -(-g.channels // 64) if g.split else g.channels // 8
    numbers = (g.images, g.pixels, g.channels, g.hidden, shift, g.split, g.most, *reciprocal(slice))
    Launch(
        kernel,
        [pack("7Q", *at), pack("7i2I", *numbers)],
        memory,
        grid=(-(-g.images // g.together) * 8,),
        threads=g.threads,
        shared_bytes=g.shared_bytes,
        cluster=8,
        together=4,
    ).run()
    return memory.array(at[-1], x)


def permute_rows(kernel: Kernel, x: Array, order: Sequence[int], width: int, grid: int) -> Array:
    """Runs the kernel of ops/permute.mojo that copies pieces of rows; bits stay as they are."""
    y = np.full_like(x.transpose(order), np.iinfo(x.dtype).max)
    steps = [step // x.itemsize for step in x.transpose(order).strides]
    axes = [(size, step // width) for size, step in zip(y.shape, steps, strict=True)]
    if width > 1:  # the last axis stays the last
        axes[-1] = (y.shape[-1] // width, 1)
    memory, count = Tensors(), x.size // width
    at, to = memory.add(x), memory.add(y)
    sizes = _axes([(size, step, 0) for size, step in reversed(axes)])
    parameters = [pack("Q", at), pack("Q", to), sizes, pack("I", count)]
    Launch(kernel, parameters, memory, grid=(grid,), threads=256, together=8).run()
    return memory.array(to, y)


def permute_tiles(kernel: Kernel, x: Array, order: Sequence[int], wide: tuple[int, int]) -> Array:
    """Runs the kernel of ops/permute.mojo that turns tiles over, by vectors of ``wide`` numbers."""
    y = np.full_like(x.transpose(order), np.iinfo(x.dtype).max)
    steps = [step // x.itemsize for step in x.transpose(order).strides]
    steps_y = [int(np.prod(y.shape[axis + 1 :])) for axis in range(y.ndim)]
    axes = list(zip(y.shape, steps, steps_y, strict=True))
    (rows, *row), (columns, *column) = axes.pop(), axes.pop(order.index(x.ndim - 1))
    tiles = (-(-rows * x.itemsize // 128), *row), (-(-columns // 64), *column)
    axes = [*tiles, *reversed(axes)]
    memory = Tensors()
    parameters = [
        *(pack("Q", memory.add(array)) for array in (x, y)),
        _axes(axes),
        *(pack("I", n) for n in (rows, columns, *wide, wide[0].bit_length() - 1)),
    ]
    grid = int(np.prod([size for size, _, _ in axes]))
    Launch(kernel, parameters, memory, grid=(grid,), threads=256, together=8).run()
    return memory.array(int.from_bytes(parameters[1], "little"), y)


def _axes(axes: Sequence[tuple[int, int, int]]) -> bytes:
    """Packs sizes, steps in x and steps in y, the last axis first, as Axes of ops/permute.mojo."""
    rest = [(1, 0, 0)] * (6 - len(axes))
    sizes, x, y = zip(*axes, *rest, strict=True)
    factors, shifts = zip(*map(reciprocal, sizes), strict=True)
    return pack("12q18Ii", *x, *y, *sizes, *factors, *shifts, len(axes))


@dataclass(frozen=True)
class Groups:
    """x[images, pixels, channels] of ops/group_norm/gpu.mojo, and how blocks divide it.

    Attributes:
        shape: Of x.
        members: Channels of a group.
        width: Channels of a vector.
        slab: Channels of a block.
        slice: Threads along them.
        parts: Blocks along the pixels.
    """

    shape: tuple[int, int, int]
    members: int
    width: int
    slab: int
    slice: int
    parts: int


def group_norm(
    kernels: Sequence[Kernel], g: Groups, x: Array, weight: Array, bias: Array, dtype: str
) -> Array:
    """Runs both kernels of ops/group_norm/gpu.mojo, one after the other."""
    images, pixels, channels = g.shape
    groups, pieces = channels // g.members, -(-g.members // g.slab)
    slabs = groups * pieces if pieces > 1 else -(-channels // g.slab)
    entries = g.parts * pieces + 1
    memory, y = Tensors(), unwritten(g.shape, dtype)
    partials = unwritten((images, groups, entries, 3), "float32")
    at = [memory.add(a) for a in (x, weight, bias, y, partials)]
    parameters = [
        pack("5Q", *at),
        pack("5if", images, pixels, channels, g.members, entries, 1e-5),
        pack("6i", slabs, pieces, g.slab, g.slice, g.parts, -(-pixels // g.parts)),
    ]
    for kernel in kernels:
        grid = (images * slabs * g.parts,)
        Launch(kernel, parameters, memory, grid=grid, threads=256, together=8).run()
    return memory.array(at[3], y)


@dataclass(frozen=True)
class StemCase:
    """A stem's sizes (Stem and Tiling of ops/stem/config.mojo), and the tile of a block."""

    n: int
    h: int
    w: int
    f: int
    stride: int
    then: str
    pad: int
    steps: int
    groups: int
    c: int = 3
    r: int = 7
    s: int = 7

    @property
    def conv(self) -> Conv:
        stride, pad = (self.stride,) * 2, (self.pad,) * 2
        return Conv(self.n, self.h, self.w, self.c, self.f, self.r, self.s, stride, pad)

    @property
    def out(self) -> tuple[int, int]:
        p, q = self.conv.out
        return ((p + 1) // 2, (q + 1) // 2) if self.then == "maxpool" else (p, q)


def stem(
    kernel: Kernel, g: StemCase, inputs: Sequence[Array], offset: int = 0, dtype: str = "bfloat16"
) -> Array:
    """Runs ops/stem: x, mean, scale, filters as the kernel wants them, bias, gamma, beta.

    x lies `offset` bytes after an aligned address; `dtype` is the result's.
    """
    memory, (out_p, out_q) = Tensors(), g.out
    y = unwritten((g.n, out_p, out_q, g.f), dtype)
    at = [memory.add(a, 0 if i else offset) for i, a in enumerate((*inputs, y))]
    pools = g.then == "maxpool"
    scale = 2 if pools else 1
    rows, columns = g.steps * 4 // scale, g.groups * 8 // scale
    lead_p, lead_q = int(pools and out_p > rows), int(pools and out_q > columns)
    tiles = (-(-out_p // rows), -(-out_q // (columns - lead_q)))
    slices = -(-g.f // 32)
    warps = slices * min(max(1, 4 // slices), g.groups)
    input_rows = (g.steps * 4 + lead_p - 1) * g.stride + g.r
    of_a_warp = {"maxpool": g.steps * 128, "layernorm": 256, "conv2d": 0}[g.then]
    shared = input_rows * 232 * (g.c + g.stride * g.c % 2) * 2 + 2 * warps * of_a_warp
    sizes = (g.h, g.w, *g.conv.out, out_p, out_q, g.f, g.pad, g.steps, g.groups)
    launch = Launch(
        kernel,
        [pack("8Q", *at), pack("14i", *sizes, *tiles, lead_p, lead_q), pack("f", 1e-5)],
        memory,
        grid=(g.n * tiles[0] * tiles[1],),
        threads=warps * 32,
        shared_bytes=shared,
    )
    launch.run()
    return memory.array(at[7], y)


def stem_hopper(
    kernel: Kernel,
    g: StemCase,
    inputs: Sequence[Array],
    grid: int,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    following: Array | None = None,
) -> tuple[Array, Array]:
    """Runs ops/stem/hopper.mojo on `grid` blocks: x is read where the kernel ahead wrote it.

    Gives y, and z if there are weights of a following 1 x 1 [F, F], whose bias is gamma.
    """
    memory, (out_p, out_q) = Tensors(), g.out
    x, *constants = inputs
    y_at, y = held(memory, unwritten((g.n * out_p * out_q, g.f), dtype))
    z = held(memory, unwritten(y.shape, dtype))[1]
    maps = [Tiled(y, (out_q, 64))]
    row, stages, unit, units = out_q * 128, 8, 16, (g.w + 4) // 2
    shared = 3 * row + stages * (unit * (2 * units + g.conv.out[1]) + 16) + 1024
    if following is not None:
        maps += [Tiled(z, (out_q, 64)), Tiled(held(memory, following)[1], (64, 64))]
        shared += 3 * row + 64 * 128 + 8
    at = [held(memory, x, late=True)[0], *(memory.add(a) for a in constants), y_at]
    launch = Launch(
        kernel,
        [
            bytes(128 * len(maps)),
            pack("8Q", *at),
            pack("4i", g.h, g.conv.out[0], out_p, g.n * out_p),
        ],
        memory,
        grid=(grid,),
        threads=256,
        shared_bytes=shared,
        maps=maps,
    )
    launch.run(seed)
    shape = (g.n, out_p, out_q, g.f)
    return y.reshape(shape), z.reshape(shape)
