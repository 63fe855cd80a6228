"""Indirect GEMM on a CPU: y[m, f] = act(alpha * sum_k x[row(m, k)] b[k, f] + bias[f] + residual).

M = N * P * Q output pixels, K = R * S * C taps and channels, N = F filters. The matrix of
input patches is never built: for each tap the kernel computes where each of its pixels reads
(The Indirect Convolution Algorithm, Dukhan 2019, arXiv:1907.02129), and pixels in the padding
read a row of zeros. Where a whole row of the window lies inside the image, its S taps are one
run of S * C numbers, so the 3-channel stem has runs of 21 and not of 3.

    x[N, H, W, C]      activations, float32 (or float64, and so all others)
    b[panel, K, 64]    filters in panels of PANEL columns, zero-padded, K ordered R, S, C
                       (graphs/arrange.py packs them once, at load)
    y[N, P, Q, F]      result, float32

In 8 bits x is uint8, b int8 and the sums are int32 (`Levels` of operands.mojo says what they stand
for). Four numbers of K lie beside each other in a column, b[panel, 1 + K / 4, 64, 4], as vpdpbusd
multiplies them; the first row of a panel has the sum of each column as int32. Minus x's zero point
times that is what its sums begin with. C is a multiple of 4; the padding reads the zero point.

A register tile is ROWS pixels x 4 vectors: on AVX-512 24 accumulators, 4 vectors of b and one
broadcast of x. A task goes through K a share at a time, and takes all its pixels through that share
while its part of the panel is in the second-level cache (Goto and van de Geijn 2008); its first
tiles prefetch the next share. The tiles know nothing of the epilogue, and nobody inlines what does:
MAX compiles whatever calls it for each op and shape of a graph. Bound by the FMA units, or by the
way of the weights from memory where a layer has few pixels; docs/kernels.md has the figures.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, iota
from std.memory import Layout, alloc, dealloc
from std.sys import CompilationTarget, simd_width_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from ..dot import FILTER, FLOATS, SHIFT, STEP, SUM, dot, spread
from ..epilogue import Epilogue, Output
from ..geometry import Geometry
from ..operands import F32, F64, WIDE, Data, Levels, Operands
from ..parallel import over_cores

comptime WIDTH[dtype: DType] = simd_width_of[SUM[dtype]]()
"""Lanes of a vector.

Parameters:
    dtype: Of the activations.
"""
comptime PANEL = 64
"""Columns of a packed panel; the same on every CPU, so that packed weights are portable."""
comptime ROWS = 6
"""Pixels that a register tile is high."""
comptime HEIGHT[dtype: DType] = 2 if dtype == F64 else ROWS
"""Pixels that it is high in a dtype: of float64, which has to be right only, fewer are compiled.

Parameters:
    dtype: Of the activations.
"""
comptime VECTORS = 4 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 2
"""Vectors that a register tile is wide: 24 accumulators of 32 registers, or 12 of 16 (AVX2)."""
comptime TILE[dtype: DType] = VECTORS * WIDTH[dtype]
"""Columns that a register tile is wide.

Parameters:
    dtype: Of the activations.
"""
comptime FULL = 64
"""In 8 bits K is filled up to a multiple of this, with zeros that only AMX multiplies."""
comptime DEPTH = 1024
"""Steps of K at a time: a panel's share, 256 KB, stays in the second-level cache for all tiles."""
comptime LINE = 16
"""Numbers of a cache line."""
comptime RUNS = 128
"""Runs of a share of K at most."""
comptime PIXELS = 16 * ROWS
"""Pixels whose sums are kept from one share of K to the next."""


struct _Runs[dtype: DType, rows: Int]:
    """Where the pixels of a register tile read in a share of K: runs of numbers side by side."""

    var sources: Array[Data[Self.dtype], Self.rows * RUNS]
    """Where each run begins, for each pixel."""
    var lengths: Array[Int, RUNS]
    """Steps of each run; at least one."""
    var count: Int
    """How many runs there are."""

    def __init__(out self):
        self.sources = Array[Data[Self.dtype], Self.rows * RUNS](uninitialized=True)
        self.lengths = Array[Int, RUNS](uninitialized=True)
        self.count = 0


@no_inline
def _multiply[
    dtype: DType, rows: Int, //, vectors: Int, turned: Bool = False
](
    runs: _Runs[dtype, rows],
    panel: Data[FILTER[dtype]],
    ahead: Int,
    sums: Data[SUM[dtype]],
    fresh: Bool,
    starts: Data[SUM[dtype]],
    pitch: Int = 1,
):
    """Adds a share of K to the sums[rows, PANEL] of a register tile, or begins them if `fresh`.

    A line of each row `ahead` of the panel's is prefetched. If `turned`, the numbers of a run are
    `pitch` apart. In 8 bits sums begin with `starts`.
    """
    var tile = _begin[dtype, rows, vectors](starts)
    if not fresh:
        comptime for i in range(rows):
            comptime for v in range(vectors):
                tile[i * vectors + v] = sums.unsafe_load[width=WIDTH[dtype]](
                    i * PANEL + v * WIDTH[dtype]
                )
    var row = panel
    for run in range(runs.count):
        var source = Array[Data[dtype], rows](uninitialized=True)
        comptime for i in range(rows):
            source[i] = runs.sources.unsafe_ptr()[unsafe_offset=run * rows + i]
        for k in range(runs.lengths.unsafe_ptr()[unsafe_offset=run]):
            _step[vectors](source, k * pitch if turned else k * STEP[dtype], row, tile)
            prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
                row.unsafe_offset(ahead)
            )
            row = row.unsafe_offset(PANEL * STEP[dtype])
    comptime for i in range(rows):
        comptime for v in range(vectors):
            sums.unsafe_store(i * PANEL + v * WIDTH[dtype], tile[i * vectors + v])


@always_inline
def _begin[
    dtype: DType, rows: Int, vectors: Int
](starts: Data[SUM[dtype]]) -> Array[SIMD[SUM[dtype], WIDTH[dtype]], rows * vectors]:
    """Begins the sums of a register tile: with 0, in 8 bits with those of each filter."""
    var tile = Array[SIMD[SUM[dtype], WIDTH[dtype]], rows * vectors](fill=0)
    comptime if not FLOATS[dtype]:
        comptime for v in range(vectors):
            var start = starts.unsafe_load[width=WIDTH[dtype]](v * WIDTH[dtype])
            comptime for i in range(rows):
                tile[i * vectors + v] = start
    return tile^


@always_inline
def _step[
    dtype: DType, rows: Int, size: Int, //, vectors: Int
](
    source: Array[Data[dtype], rows],
    at: Int,
    row: Data[FILTER[dtype]],
    mut tile: Array[SIMD[SUM[dtype], WIDTH[dtype]], size],
):
    """Adds the products of a step of K, `at` of the pixels and a row of the panel, to a tile."""
    comptime lanes = WIDTH[dtype] * STEP[dtype]
    var w = Array[SIMD[FILTER[dtype], lanes], vectors](uninitialized=True)
    comptime for v in range(vectors):
        w[v] = row.unsafe_load[width=lanes](v * lanes)
    comptime for i in range(rows):
        var x = spread[WIDTH[dtype]](source[i].unsafe_offset(at))
        comptime for v in range(vectors):
            tile[i * vectors + v] = dot[dtype, WIDTH[dtype]](tile[i * vectors + v], x, w[v])


def multiply_rows[
    dtype: DType, //, turned: Bool = False
](
    a: Data[dtype],
    pitch: Int,
    rows: Int,
    panel: Data[dtype],
    columns: Int,
    depth: Int,
    sums: Data[dtype],
    fresh: Bool,
):
    """Computes sums[rows, PANEL] (+)= a panel of plain matrices.

    Parameters:
        dtype: Float32 or float64.
        turned: Whether a lies as rows of one number of K.

    Args:
        a: [rows, depth], or [depth, rows] if it is turned.
        pitch: Numbers from one row of a to the next.
        rows: Rows of the sums.
        panel: [depth, PANEL].
        columns: Columns of the panel that count; those up to a whole vector are multiplied too.
        depth: K.
        sums: [rows, PANEL].
        fresh: Whether the sums begin with 0.
    """
    var tiles = ceildiv(rows, HEIGHT[dtype])
    for offset in range(0, columns, TILE[dtype]):
        var width = ceildiv(min(columns - offset, TILE[dtype]), WIDTH[dtype])
        for tile in range(tiles):
            var first = rows * tile // tiles
            var count = rows * (tile + 1) // tiles - first
            comptime for size in range(1, HEIGHT[dtype] + 1):
                comptime for vectors in range(1, VECTORS + 1):
                    if count == size and width == vectors:
                        var runs = _Runs[dtype, size]()
                        var step = 1 if turned else pitch
                        comptime for i in range(size):
                            runs.sources.unsafe_ptr()[unsafe_offset=i] = a.unsafe_offset(
                                (first + i) * step
                            )
                        runs.lengths.unsafe_ptr()[unsafe_offset=0] = depth
                        runs.count = 1
                        var to = sums.unsafe_offset(first * PANEL + offset)
                        var of = rebind[Data[SUM[dtype]]](to)
                        var columns_of = rebind[Data[FILTER[dtype]]](panel.unsafe_offset(offset))
                        _multiply[vectors, turned=turned](runs, columns_of, 0, of, fresh, of, pitch)


@fieldwise_init
struct _Share(TrivialRegisterPassable):
    """A part of K: whole rows of the window if they are short, or a part of one."""

    var r: Int
    """The first row of the window."""
    var r_end: Int
    """One beyond the last."""
    var start: Int
    """The first number of each row, of S * C."""
    var end: Int
    """One beyond the last."""


@no_inline
def _store[
    dtype: DType, out: DType, //, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype, out, FILTER[dtype], WIDE[dtype]],
    levels: Levels,
    sums: Data[SUM[dtype]],
    first: Int,
    rows: Int,
    column: Int,
    columns: Int,
):
    """Takes the sums of `rows` pixels through the epilogue, into `columns` numbers of each of y."""
    var output = Output[epilogue](o, levels)
    for i in range(rows):
        output.finish_row(
            sums.unsafe_offset(i * PANEL), column, (first + i) * g.f + column, columns
        )


@no_inline
def _whole_tile[
    dtype: DType, out: DType, //, epilogue: Epilogue, vectors: Int
](
    g: Geometry,
    o: Operands[dtype, out, FILTER[dtype], WIDE[dtype]],
    levels: Levels,
    starts: Data[SUM[dtype]],
    first: Int,
    ahead: Int,
    column: Int,
    columns: Int,
):
    """Computes ROWS pixels from `first` on, where a pixel's row of x is all of K.

    The sums go through the epilogue in registers: where K is short, their way through memory takes
    as long as the products. `o.w` points at the first of the tile's columns, and `starts` too.
    """
    var tile = _begin[dtype, ROWS, vectors](starts)
    var source = Array[Data[dtype], ROWS](uninitialized=True)
    comptime for i in range(ROWS):
        source[i] = o.x.unsafe_offset((first + i) * g.c)
    var row = o.w
    for k in range(0, g.c, STEP[dtype]):
        _step[vectors](source, k, row, tile)
        prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
            row.unsafe_offset(ahead)
        )
        row = row.unsafe_offset(PANEL * STEP[dtype])
    var output = Output[epilogue](o, levels)
    comptime for v in range(vectors):
        comptime at = v * WIDTH[dtype]
        var inside = iota[DType.int32, WIDTH[dtype]]().lt(Int32(columns - at))
        comptime for masked in [False, True]:
            if (columns - at < WIDTH[dtype]) == masked:
                var of = output.channels[WIDTH[dtype], masked](column + at, inside)
                comptime for i in range(ROWS):
                    var to = (first + i) * g.f + column + at
                    output.finish[masked](tile[i * vectors + v], of, to, inside)


@always_inline
def _tile[
    dtype: DType, out: DType, //, rows: Int, vectors: Int
](
    g: Geometry,
    o: Operands[dtype, out, FILTER[dtype], WIDE[dtype]],
    starts: Data[SUM[dtype]],
    first: Int,
    channel: Int,
    share: _Share,
    ahead: Int,
    sums: Data[SUM[dtype]],
    zeros: Data[dtype],
):
    """Adds a share of K to the sums of `rows` pixels from `first` on.

    `o.w` points at the first of the tile's columns in the share; x is read from `channel` on.
    """
    var runs = _Runs[dtype, rows]()
    _find[rows](g, o.x, first, channel, share, zeros, runs)
    _multiply[vectors](runs, o.w, ahead, sums, share.r == 0 and share.start == 0, starts)


@no_inline
def _find[
    dtype: DType, //, rows: Int
](
    g: Geometry,
    x: Data[dtype],
    first: Int,
    channel: Int,
    share: _Share,
    zeros: Data[dtype],
    mut runs: _Runs[dtype, rows],
):
    """Finds where `rows` pixels from `first` on read in a share of K."""
    if g.pointwise():
        comptime for i in range(rows):
            runs.sources.unsafe_ptr()[unsafe_offset=i] = x.unsafe_offset(
                (first + i) * g.c + share.start
            )
        runs.lengths.unsafe_ptr()[unsafe_offset=0] = (share.end - share.start) // STEP[dtype]
        runs.count = 1
        return
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

    for r in range(share.r, share.r_end):
        var at = share.start
        while at < share.end:
            var s = 0
            var c = at
            var length = share.end - at
            if not whole_rows and g.s > 1:
                s, c = divmod(at, g.group_c())
                length = min(length, g.group_c() - c)
            comptime for i in range(rows):
                var h = h0[i] + r * g.dilation_h
                var w = w0[i] + s * g.dilation_w
                var source = zeros
                if h >= 0 and h < g.h and w >= 0 and w < g.w:
                    source = x.unsafe_offset(((image[i] + h) * g.w + w) * g.c + channel + c)
                runs.sources.unsafe_ptr()[unsafe_offset=runs.count * rows + i] = source
            runs.lengths.unsafe_ptr()[unsafe_offset=runs.count] = length // STEP[dtype]
            runs.count += 1
            at += length


@no_inline
def gemm_block[
    dtype: DType, out: DType, //, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype, out, FILTER[dtype], WIDE[dtype]],
    levels: Levels,
    first: Int,
    last: Int,
    channel: Int,
    column: Int,
    columns: Int,
):
    """Computes the pixels `first` to `last` for the filters of one panel.

    Parameters:
        dtype: Of the activations: float32, float64 or uint8.
        out: Of the result.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors; `w` begins with the panel.
        levels: What they stand for in 8 bits.
        first: The first pixel.
        last: One beyond the last pixel.
        channel: The first input channel of the group.
        column: The first filter of the panel.
        columns: Filters of the panel, at most PANEL.
    """
    comptime step = STEP[dtype]
    comptime depth = DEPTH * step
    # As many bytes each: a sum, or a step of K.
    var memory = alloc(Layout[Scalar[SUM[dtype]]](count=(PIXELS + 1) * PANEL + DEPTH))
    var starts = rebind[Data[SUM[dtype]]](memory.unsafe_ptr())
    var sums = starts.unsafe_offset(PANEL)
    var zeros = sums.unsafe_offset(PIXELS * PANEL).unsafe_bitcast[Scalar[dtype]]()
    for i in range(depth):
        zeros[unsafe_offset=i] = levels.zero.cast[dtype]()
    var run = g.s * g.group_c()
    # As many rows of the window as `depth` holds, or else as even parts of one.
    var height = max(1, min(depth // run, RUNS // g.s))
    var length = ceildiv(run, ceildiv(run, min(depth, RUNS // 2 * g.group_c())))
    length = ceildiv(length, step) * step
    var panel = o.w
    comptime if not FLOATS[dtype]:
        var factor = Scalar[SUM[dtype]](SHIFT) - levels.zero.cast[SUM[dtype]]()
        for f in range(PANEL):
            starts[unsafe_offset=f] = (
                factor * panel.unsafe_bitcast[Scalar[SUM[dtype]]]()[unsafe_offset=f]
            )
        panel = panel.unsafe_offset(PANEL * step)
    var whole = g.pointwise() and g.c <= length
    for begin in range(first, last, PIXELS):
        var end = min(begin + PIXELS, last)
        var tiles = ceildiv(end - begin, HEIGHT[dtype])
        var at = 0
        for r in range(0, g.r, height):
            for start in range(0, run, length):
                var share = _Share(r, min(r + height, g.r), start, min(start + length, run))
                # The next share lies behind this one, or begins the panel behind this one.
                var next = (share.r_end - share.r) * (share.end - share.start) * PANEL
                var ends = share.r_end == g.r and share.end == run
                for offset in range(0, columns, TILE[dtype]):
                    var here = o
                    here.w = panel.unsafe_offset(at + offset * step)
                    var start = starts.unsafe_offset(offset)
                    var width = min(columns - offset, TILE[dtype])
                    for tile in range(tiles):
                        # As even as they come: 49 pixels are 4 x 6 + 5 x 5, never 8 x 6 + 1.
                        var m = (end - begin) * tile // tiles
                        var rows = (end - begin) * (tile + 1) // tiles - m
                        var line = LINE * step
                        var ahead = next + tile * line if tile < PANEL // LINE else 0
                        comptime if dtype != F64:
                            if whole and rows == ROWS:
                                comptime for vectors in range(1, VECTORS + 1):
                                    if ceildiv(width, WIDTH[dtype]) == vectors:
                                        _whole_tile[epilogue, vectors](
                                            g,
                                            here,
                                            levels,
                                            start,
                                            begin + m,
                                            ahead,
                                            column + offset,
                                            width,
                                        )
                                continue
                        var here_sums = sums.unsafe_offset(m * PANEL + offset)
                        comptime for size in range(1, HEIGHT[dtype] + 1):
                            comptime for vectors in range(1, VECTORS + 1):
                                if rows == size and ceildiv(width, WIDTH[dtype]) == vectors:
                                    _tile[size, vectors](
                                        g,
                                        here,
                                        start,
                                        begin + m,
                                        channel,
                                        share,
                                        ahead,
                                        here_sums,
                                        zeros,
                                    )
                        if ends:
                            _store[epilogue](
                                g, o, levels, here_sums, begin + m, rows, column + offset, width
                            )
                at += (share.r_end - share.r) * (share.end - share.start) * PANEL
    dealloc(memory^)


@no_inline
def gemm[
    dtype: DType, out: DType, //, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype, out, FILTER[dtype], WIDE[dtype]],
    levels: Optional[Levels] = None,
):
    """Computes a whole convolution or product on all cores, `o.w` packed in panels.

    Parameters:
        dtype: Of the activations: float32, float64 or uint8.
        out: Of the result.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors.
        levels: What they stand for in 8 bits.
    """
    var of_one = levels.or_else(Levels(o.bias))
    gemm_group[epilogue, 1](
        Array[Geometry, 1](fill=g),
        Array[Operands[dtype, out, FILTER[dtype], WIDE[dtype]], 1](fill=o),
        Array[Levels, 1](fill=of_one),
    )


@no_inline
def gemm_group[
    dtype: DType, out: DType, //, epilogue: Epilogue, count: Int
](
    g: Array[Geometry, count],
    o: Array[Operands[dtype, out, FILTER[dtype], WIDE[dtype]], count],
    levels: Optional[Array[Levels, count]] = None,
):
    """Computes convolutions or products that do not read each other, in one loop over all cores.

    Parameters:
        dtype: Of the activations: float32, float64 or uint8.
        out: Of the results.
        epilogue: What the accumulators go through.
        count: How many there are.

    Args:
        g: Sizes of each.
        o: Tensors of each; `w` is packed in panels.
        levels: What they stand for in 8 bits.
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

    var given = Array[Levels, count](fill=Levels(o[0].bias))
    if levels:
        given = levels.value().copy()

    def task(index: Int) {imm}:
        comptime for i in range(count):
            var start = ends[i - 1] if i > 0 else 0
            if start <= index < ends[i]:
                _task[epilogue](g[i], o[i], given[i], blocks[i], index - start)

    over_cores(task, tasks)


@no_inline
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
        _task[Epilogue("none")](side, beside, Levels(beside.bias), block, index)
        _task[Epilogue("add_relu")](g, joined, Levels(o.bias), block, index)

    over_cores(task, ceildiv(g.pixels(), block) * ceildiv(g.f, PANEL))


def _block(g: Geometry, work: Int) -> Int:
    """Chooses how many pixels a task has, of as many tasks as share `work` results evenly.

    Eight tasks a core even out their times. But pixels are divided into blocks only where the
    panels are not enough, since each block reads the panels once more, and below PIXELS only for
    two tasks a core.
    """
    var cores = parallelism_level(None)
    var size = g.pixels() * min(g.group_f(), PANEL)
    var many = min(size // ceildiv(work, 8 * cores), ceildiv(g.pixels(), PIXELS))
    var few = min(size // ceildiv(work, 2 * cores), ceildiv(g.pixels(), 4 * ROWS))
    return ceildiv(ceildiv(g.pixels(), max(many, few, 1)), ROWS) * ROWS


def _task[
    dtype: DType, out: DType, //, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype, out, FILTER[dtype], WIDE[dtype]],
    levels: Levels,
    block: Int,
    index: Int,
):
    """Computes one panel of filters at one block of pixels."""
    var panels = ceildiv(g.group_f(), PANEL)
    # All panels of a block of pixels follow one another: a core keeps to its pixels (ops/parallel.mojo).
    var part, slot = divmod(index, panels * g.groups)
    var group, panel = divmod(slot, panels)
    gemm_block[epilogue](
        g,
        o.shifted(w=slot * panel_size[dtype](g)),
        levels,
        part * block,
        min((part + 1) * block, g.pixels()),
        group * g.group_c(),
        group * g.group_f() + panel * PANEL,
        min(PANEL, g.group_f() - panel * PANEL),
    )


def panel_size[dtype: DType](g: Geometry) -> Int:
    """Counts the numbers of a packed panel; in 8 bits its first row is four for each filter.

    Parameters:
        dtype: Of the activations.

    Args:
        g: Sizes of the convolution.

    Returns:
        As graphs/arrange.py lays them out.
    """
    comptime if FLOATS[dtype]:
        return g.depth() * PANEL
    return (ceildiv(g.depth(), FULL) * FULL + STEP[dtype]) * PANEL
