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
broadcast of x. Bound by the FMA units; docs/kernels.md has the figures.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.sys import CompilationTarget, simd_width_of

from ..epilogue import Epilogue, activate
from ..geometry import Geometry
from ..operands import F32, Data, Operands
from ..parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime PANEL = 64
"""Columns of a packed panel; the same on every CPU, so that packed weights are portable."""
comptime ROWS = 6
"""Pixels that a register tile is high."""
comptime VECTORS = 4 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 2
"""Vectors that a register tile is wide: 24 accumulators of 32 registers, or 12 of 16 (AVX2)."""
comptime TILE = VECTORS * WIDTH
"""Columns that a register tile is wide."""
comptime ZEROS = 1024
"""Channels read from the padding at a time."""


@no_inline
def _multiply[
    rows: Int, vectors: Int
](
    source: Array[Data[F32], rows],
    panel: Data[F32],
    steps: Int,
    mut acc: Array[SIMD[F32, WIDTH], rows * vectors],
):
    """Adds `steps` steps of K to the register tile `acc`.

    A function of its own: inlined into the loops over taps, its accumulators leave the registers,
    at half the speed (docs/kernels.md).
    """
    var tile = acc.copy()
    for k in range(steps):
        var b = Array[SIMD[F32, WIDTH], vectors](uninitialized=True)
        comptime for v in range(vectors):
            b[v] = panel.unsafe_load[width=WIDTH](k * PANEL + v * WIDTH)
        comptime for i in range(rows):
            var a = SIMD[F32, WIDTH](source[i][unsafe_offset=k])
            comptime for v in range(vectors):
                tile[i * vectors + v] = a.fma(b[v], tile[i * vectors + v])
    acc = tile^


@no_inline
def _tile[
    rows: Int, vectors: Int, epilogue: Epilogue
](g: Geometry, o: Operands[F32], first: Int, channel: Int, column: Int, columns: Int):
    """Computes `rows` pixels from `first` on, and `columns` filters from `column` on.

    `o.w` points at the first of these columns in its panel; x is read from `channel` on.
    """
    # Where the window of each pixel begins: row h0, column w0 (both may lie in the padding).
    var h0 = Array[Int, rows](uninitialized=True)
    var w0 = Array[Int, rows](uninitialized=True)
    var image = Array[Int, rows](uninitialized=True)
    var whole_rows = g.dilation_w == 1 and g.groups == 1
    var n, pixel = divmod(first, g.p * g.q)
    var p, q = divmod(pixel, g.q)
    comptime for i in range(rows):
        h0[i] = p * g.stride_h - g.pad_h
        w0[i] = q * g.stride_w - g.pad_w
        image[i] = n * g.h
        whole_rows = whole_rows and w0[i] >= 0 and w0[i] + g.s <= g.w
        q += 1
        if q == g.q:
            p, q = p + 1, 0
            if p == g.p:
                n, p = n + 1, 0
    var taps = 1 if whole_rows else g.s
    var run = g.s * g.c if whole_rows else g.group_c()

    var zeros = Array[Float32, ZEROS](uninitialized=True)
    if g.pad_h > 0 or g.pad_w > 0:
        for i in range(min(run, ZEROS)):
            zeros[i] = 0

    var acc = Array[SIMD[F32, WIDTH], rows * vectors](fill=0)
    var panel = o.w
    for r in range(g.r):
        for s in range(taps):
            for start in range(0, run, ZEROS):
                var source = Array[Data[F32], rows](fill=o.x)
                comptime for i in range(rows):
                    var h = h0[i] + r * g.dilation_h
                    var w = w0[i] + s * g.dilation_w
                    if h >= 0 and h < g.h and w >= 0 and w < g.w:
                        var at = ((image[i] + h) * g.w + w) * g.c + channel + start
                        source[i] = o.x.unsafe_offset(at)
                    else:
                        source[i] = rebind[Data[F32]](zeros.unsafe_ptr())
                var steps = min(run - start, ZEROS)
                _multiply[rows, vectors](source, panel, steps, acc)
                panel = panel.unsafe_offset(steps * PANEL)

    comptime for v in range(vectors):
        var f = column + v * WIDTH
        var left = columns - v * WIDTH
        if left >= WIDTH:
            var bias = o.bias.unsafe_load[width=WIDTH](f)
            comptime for i in range(rows):
                var to = (first + i) * g.f + f
                var value = acc[i * vectors + v].fma(o.alpha, bias)
                comptime if epilogue.adds:
                    value += o.residual.unsafe_load[width=WIDTH](to)
                o.y.unsafe_store(to, activate[epilogue](value))
        elif left > 0:
            comptime for i in range(rows):
                for j in range(left):
                    var to = (first + i) * g.f + f + j
                    var value = acc[i * vectors + v][j] * o.alpha + o.bias[unsafe_offset=f + j]
                    comptime if epilogue.adds:
                        value += o.residual[unsafe_offset=to]
                    o.y[unsafe_offset=to] = activate[epilogue](value)


def gemm_block[
    epilogue: Epilogue
](g: Geometry, o: Operands[F32], first: Int, last: Int, channel: Int, column: Int, columns: Int,):
    """Computes the pixels `first` to `last` for the filters of one panel.

    Parameters:
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors; `w` begins with the panel.
        first: The first pixel.
        last: One beyond the last pixel.
        channel: The first input channel of the group.
        column: The first filter of the panel.
        columns: Filters of the panel, at most PANEL.
    """
    for offset in range(0, columns, TILE):
        var width = min(columns - offset, TILE)
        var m = first
        while m < last:
            # Tiles as even as they come: 49 pixels are 4 x 6 + 5 x 5, never 8 x 6 + 1.
            var rows = ceildiv(last - m, ceildiv(last - m, ROWS))
            comptime for size in range(1, ROWS + 1):
                if rows == size:
                    if width > TILE // 2:
                        _tile[size, VECTORS, epilogue](
                            g, o.shifted(w=offset), m, channel, column + offset, width
                        )
                    else:
                        _tile[size, VECTORS // 2, epilogue](
                            g, o.shifted(w=offset), m, channel, column + offset, width
                        )
            m += rows


def gemm[epilogue: Epilogue](g: Geometry, o: Operands[F32]):
    """Computes a whole convolution or product on all cores, `o.w` packed in panels.

    Parameters:
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors.
    """
    gemm_group[epilogue, 1]([g], [o])


def gemm_group[
    epilogue: Epilogue, count: Int
](g: Array[Geometry, count], o: Array[Operands[F32], count]):
    """Computes convolutions or products that do not read each other, in one loop over all cores.

    Parameters:
        epilogue: What the accumulators go through.
        count: How many there are.

    Args:
        g: Sizes of each.
        o: Tensors of each; `w` is packed in panels.
    """
    var work = 0
    comptime for i in range(count):
        work += g[i].pixels() * g[i].f
    var ends = Array[Int, count](fill=0)
    var blocks = Array[Int, count](fill=0)
    var tasks = 0
    comptime for i in range(count):
        blocks[i] = _block(g[i], work)
        tasks += ceildiv(g[i].pixels(), blocks[i]) * ceildiv(g[i].group_f(), PANEL) * g[i].groups
        ends[i] = tasks

    def task(index: Int) {imm}:
        comptime for i in range(count):
            var start = ends[i - 1] if i > 0 else 0
            if start <= index < ends[i]:
                _task[epilogue](g[i], o[i], blocks[i], index - start)

    over_cores(task, tasks)


def gemm_shortcut(g: Geometry, o: Operands[F32], side: Geometry, beside: Operands[F32]):
    """Computes relu of the sum of two convolutions into one y, on all cores.

    Args:
        g: Sizes of the first.
        o: Its tensors.
        side: Sizes of the second, which gives as many pixels and filters; neither has groups.
        beside: Its tensors; y is the first's.
    """
    var block = _block(g, g.pixels() * g.f)
    var joined = o
    joined.residual = o.y

    def task(index: Int) {var}:
        _task[Epilogue("none")](side, beside, block, index)
        _task[Epilogue("add_relu")](g, joined, block, index)

    over_cores(task, ceildiv(g.pixels(), block) * ceildiv(g.f, PANEL))


def _block(g: Geometry, work: Int) -> Int:
    """Chooses how many pixels a task has, of as many tasks as share `work` results evenly.

    About eight tasks a core even out their times; the panel of one stays in the second-level
    cache while its pixels pass.
    """
    var results = ceildiv(work, 8 * parallelism_level(None))
    var columns = min(g.group_f(), PANEL)
    return max(4 * ROWS, ceildiv(results, columns * ROWS) * ROWS)


def _task[epilogue: Epilogue](g: Geometry, o: Operands[F32], block: Int, index: Int):
    """Computes one panel of filters at one block of pixels."""
    var panels = ceildiv(g.group_f(), PANEL)
    var slot, part = divmod(index, ceildiv(g.pixels(), block))
    var group, panel = divmod(slot, panels)
    gemm_block[epilogue](
        g,
        o.shifted(w=slot * g.depth() * PANEL),
        part * block,
        min((part + 1) * block, g.pixels()),
        group * g.group_c(),
        group * g.group_f() + panel * PANEL,
        min(PANEL, g.group_f() - panel * PANEL),
    )
