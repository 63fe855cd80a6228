"""Indirect GEMM on a CPU: y[m, f] = act(alpha * sum_k x[row(m, k)] b[k, f] + bias[f] + residual).

M = N * P * Q output pixels, K = R * S * C taps and channels, N = F filters. The matrix of
input patches is never built: for each tap the kernel computes where each of its pixels reads
(The Indirect Convolution Algorithm, Dukhan 2019, arXiv:1907.02129), and pixels in the padding
read a row of zeros. Where a whole row of the window lies inside the image, its S taps are one
run of S * C numbers, so the 3-channel stem has runs of 21 and not of 3.

    x[N, H, W, C]      activations, float32
    b[panel, K, 64]    filters in panels of PANEL columns, zero-padded, K ordered R, S, C
                       (graphs/arrange.py packs them once, at load)
    y[N, P, Q, F]      result, float32

A register tile is ROWS pixels x 4 vectors: on AVX-512 24 accumulators, 4 vectors of b and one
broadcast of x. Bound by the FMA units; the tile alone reaches 205 of about 250 GFLOP/s on one
Zen 5 core (2026-11-21, K = 576, M = 3136).
"""

from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.sys import CompilationTarget, simd_width_of

from ..epilogue import Epilogue, activate
from ..geometry import Data, Geometry

comptime F32 = DType.float32
comptime WIDTH = simd_width_of[F32]()
comptime PANEL = 64
"""Columns of a packed panel; the same on every CPU, so that packed weights are portable."""
comptime ROWS = 6
comptime VECTORS = 4 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 2
"""Vectors a register tile is wide: 24 accumulators of 32 registers, or 12 of 16 (AVX2)."""
comptime TILE = VECTORS * WIDTH
comptime ZEROS = 1024
"""Channels read from the padding at a time."""


@always_inline
def _rows_starting[
    rows: Int
](g: Geometry, first: Int, mut h0: Array[Int, rows], mut w0: Array[Int, rows], mut at: Array[Int, rows]):
    """Finds where the windows of `rows` pixels begin: row h0, column w0 (both may lie in the
    padding) and the offset of the image.
    """
    comptime for i in range(rows):
        var image, pixel = divmod(first + i, g.p * g.q)
        var p, q = divmod(pixel, g.q)
        h0[i] = p * g.stride_h - g.pad_h
        w0[i] = q * g.stride_w - g.pad_w
        at[i] = image * g.h * g.w * g.c


@no_inline
def _tile[
    rows: Int, vectors: Int, epilogue: Epilogue
](
    g: Geometry,
    x: Data[F32],
    b: Data[F32],
    bias: Data[F32],
    residual: Data[F32],
    y: Data[F32],
    alpha: Float32,
    first: Int,
    channel: Int,
    column: Int,
    columns: Int,
):
    """Computes `rows` pixels from `first` on, and `columns` filters from `column` on.

    `b` points at the first of its columns, `x` is read from `channel` on (the group's).
    """
    var h0 = Array[Int, rows](uninitialized=True)
    var w0 = Array[Int, rows](uninitialized=True)
    var at = Array[Int, rows](uninitialized=True)
    _rows_starting(g, first, h0, w0, at)

    var c = g.group_c()
    var whole_rows = g.dilation_w == 1 and g.groups == 1
    comptime for i in range(rows):
        whole_rows = whole_rows and w0[i] >= 0 and w0[i] + g.s <= g.w
    var taps = 1 if whole_rows else g.s
    var run = g.s * c if whole_rows else c

    var zeros = Array[Float32, ZEROS](uninitialized=True)
    var padded = g.pad_h > 0 or g.pad_w > 0
    if padded:
        for i in range(min(run, ZEROS)):
            zeros[i] = 0

    var acc = Array[SIMD[F32, WIDTH], rows * vectors](fill=0)
    var panel = b
    for r in range(g.r):
        for s in range(taps):
            for start in range(0, run, ZEROS):
                var source = Array[Data[F32], rows](fill=x)
                comptime for i in range(rows):
                    var h = h0[i] + r * g.dilation_h
                    var w = w0[i] + s * g.dilation_w
                    var inside = h >= 0 and h < g.h and w >= 0 and w < g.w
                    if inside:
                        source[i] = x.unsafe_offset(at[i] + (h * g.w + w) * g.c + channel + start)
                    else:
                        source[i] = rebind[Data[F32]](zeros.unsafe_ptr())
                for k in range(min(run - start, ZEROS)):
                    var columns_of_b = Array[SIMD[F32, WIDTH], vectors](uninitialized=True)
                    comptime for v in range(vectors):
                        columns_of_b[v] = panel.unsafe_load[width=WIDTH](v * WIDTH)
                    comptime for i in range(rows):
                        var a = SIMD[F32, WIDTH](source[i][unsafe_offset=k])
                        comptime for v in range(vectors):
                            acc[i * vectors + v] = a.fma(columns_of_b[v], acc[i * vectors + v])
                    panel = panel.unsafe_offset(PANEL)

    comptime for v in range(vectors):
        var left = columns - v * WIDTH
        if left >= WIDTH:
            var shift = bias.unsafe_load[width=WIDTH](column + v * WIDTH)
            comptime for i in range(rows):
                var to = (first + i) * g.f + column + v * WIDTH
                var value = acc[i * vectors + v].fma(alpha, shift)
                comptime if epilogue.adds:
                    value += residual.unsafe_load[width=WIDTH](to)
                y.unsafe_store(to, activate[epilogue](value))
        elif left > 0:
            comptime for i in range(rows):
                for j in range(left):
                    var from_column = column + v * WIDTH + j
                    var to = (first + i) * g.f + from_column
                    var value = acc[i * vectors + v][j] * alpha + bias[unsafe_offset=from_column]
                    comptime if epilogue.adds:
                        value += residual[unsafe_offset=to]
                    y[unsafe_offset=to] = activate[epilogue](value)


def gemm_block[
    epilogue: Epilogue
](
    g: Geometry,
    x: Data[F32],
    b: Data[F32],
    bias: Data[F32],
    residual: Data[F32],
    y: Data[F32],
    alpha: Float32,
    first: Int,
    last: Int,
    channel: Int,
    column: Int,
    columns: Int,
):
    """Computes the pixels `first` to `last` of one panel: `columns` filters from `column` on."""
    for offset in range(0, columns, TILE):
        var width = min(columns - offset, TILE)
        var m = first
        while m < last:
            # Tiles as even as they come: 49 pixels are 4 x 6 + 5 x 5, never 8 x 6 + 1.
            var rows = ceildiv(last - m, ceildiv(last - m, ROWS))
            comptime for size in range(1, ROWS + 1):
                if rows == size:
                    comptime for half in range(2):
                        comptime vectors = VECTORS if half == 0 else VECTORS // 2
                        if (width > TILE // 2) == (half == 0):
                            _tile[size, vectors, epilogue](
                                g, x, b.unsafe_offset(offset), bias, residual, y, alpha,
                                m, channel, column + offset, width,
                            )
            m += rows


def gemm[
    epilogue: Epilogue
](
    g: Geometry,
    x: Data[F32],
    b: Data[F32],
    bias: Data[F32],
    residual: Data[F32],
    y: Data[F32],
    alpha: Float32,
):
    """Computes a whole convolution or product on all cores, `b` packed.

    A task is one panel times a block of pixels: the panel stays in the second-level cache
    while the pixels pass, and there are about four tasks a core to even out their times.
    """
    var panels = ceildiv(g.group_f(), PANEL)
    var depth = g.r * g.s * g.group_c()
    var pixels = g.pixels()
    var wanted = ceildiv(4 * parallelism_level(None), panels * g.groups)
    var block = max(ROWS * 4, ROWS * ceildiv(pixels, ROWS * wanted))
    var blocks = ceildiv(pixels, block)

    def task(index: Int) {var}:
        var slot = index // blocks
        var part = index % blocks
        var group = slot // panels
        var within = slot % panels
        gemm_block[epilogue](
            g, x, b.unsafe_offset(slot * depth * PANEL), bias, residual, y, alpha,
            part * block, min((part + 1) * block, pixels),
            group * g.group_c(),
            group * g.group_f() + within * PANEL,
            min(PANEL, g.group_f() - within * PANEL),
        )

    sync_parallelize(task, panels * g.groups * blocks)
