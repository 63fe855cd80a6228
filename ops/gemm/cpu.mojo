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
broadcast of x. Where K is one share, its sums go through the epilogue in registers, and in 8 bits
each row of 64 leaves as one vector of bytes. A task goes through K a share at a time, and takes all its pixels through that share
while its part of the panel is in the second-level cache (Goto and van de Geijn 2008); its first
tiles prefetch the next share. What a tile needs is inlined into the loop over the tiles (a call for
each cost 4 % of ResNet-50 in 8 bits), but nobody inlines that loop: MAX compiles whatever calls it
for each op and shape of a graph. Bound by the FMA units, or by the
way of the weights from memory where a layer has few pixels; docs/kernels.md has the figures.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, iota
from std.memory import Layout, alloc, dealloc
from std.sys import CompilationTarget, simd_width_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from ..choice import Cheapest
from ..dot import FILTER, FLOATS, SHIFT, STEP, SUM, dot, spread
from ..epilogue import Epilogue, Output
from ..geometry import Geometry
from ..operands import F32, F64, PACKS, WIDE, Data, Levels, Operands
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
comptime LEAST[dtype: DType] = ROWS if FLOATS[dtype] else ROWS - 1
"""Pixels of a tile whose sums may go through the epilogue in registers: few tiles have fewer.

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
    _add[vectors, turned](runs, panel, ahead, tile, pitch)
    comptime for i in range(rows):
        comptime for v in range(vectors):
            sums.unsafe_store(i * PANEL + v * WIDTH[dtype], tile[i * vectors + v])


@always_inline
def _add[
    dtype: DType, rows: Int, //, vectors: Int, turned: Bool = False
](
    runs: _Runs[dtype, rows],
    panel: Data[FILTER[dtype]],
    ahead: Int,
    mut tile: Array[SIMD[SUM[dtype], WIDTH[dtype]], rows * vectors],
    pitch: Int = 1,
):
    """Adds the products of all runs to a tile; see `_multiply`."""
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
    var begins: Bool
    """Whether it is the first."""
    var ends: Bool
    """Whether it is the last."""

    @always_inline
    def size(self) -> Int:
        """Counts its numbers of K."""
        return (self.r_end - self.r) * (self.end - self.start)


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


@always_inline
def _finish[
    dtype: DType, out: DType, rows: Int, //, epilogue: Epilogue, vectors: Int, packs: Bool
](
    runs: _Runs[dtype, rows],
    g: Geometry,
    o: Operands[dtype, out, FILTER[dtype], WIDE[dtype]],
    levels: Levels,
    starts: Data[SUM[dtype]],
    first: Int,
    ahead: Int,
    column: Int,
    columns: Int,
):
    """Computes `rows` pixels from `first` on, where the runs are all of K.

    Where K is short, the way of sums through memory takes as long as the products. `o.w` points at
    the first of the tile's columns, and `starts` too.
    """
    var tile = _begin[dtype, rows, vectors](starts)
    _add[vectors](runs, o.w, ahead, tile)
    var output = Output[epilogue](o, levels)
    comptime if packs:
        output.finish_packed(tile, column, first * g.f + column, g.f)
        return
    comptime for v in range(vectors):
        comptime at = v * WIDTH[dtype]
        var inside = iota[DType.int32, WIDTH[dtype]]().lt(Int32(columns - at))
        comptime for masked in [False, True]:
            if (columns - at < WIDTH[dtype]) == masked:
                var of = output.channels[WIDTH[dtype], masked](column + at, inside)
                comptime for i in range(rows):
                    var to = (first + i) * g.f + column + at
                    output.finish[masked](tile[i * vectors + v], of, to, inside)


@always_inline
def _find_row[
    dtype: DType, //, rows: Int
](g: Geometry, x: Data[dtype], first: Int, share: _Share, mut runs: _Runs[dtype, rows]):
    """Finds where `rows` pixels from `first` on read in a share of K, if a pixel is all of it."""
    comptime for i in range(rows):
        runs.sources.unsafe_ptr()[unsafe_offset=i] = x.unsafe_offset(
            (first + i) * g.c + share.start
        )
    runs.lengths.unsafe_ptr()[unsafe_offset=0] = (share.end - share.start) // STEP[dtype]
    runs.count = 1


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
    # Where the window of each pixel begins: row h0, column w0 (both may lie in the padding).
    var h0 = Array[Int, rows](uninitialized=True)
    var w0 = Array[Int, rows](uninitialized=True)
    var window = Array[Data[dtype], rows](uninitialized=True)
    var whole_rows = g.dilation_w == 1 and g.groups == 1
    var n, pixel = divmod(UInt(first), UInt(g.p * g.q))
    var at_p, at_q = divmod(pixel, UInt(g.q))
    var p, q, image = Int(at_p), Int(at_q), Int(n) * g.h
    comptime for i in range(rows):
        h0[i] = p * g.stride_h - g.pad_h
        w0[i] = q * g.stride_w - g.pad_w
        window[i] = x.unsafe_offset(((image + h0[i]) * g.w + w0[i]) * g.c + channel)
        whole_rows = whole_rows and w0[i] >= 0 and w0[i] + g.s <= g.w
        q += 1
        if q == g.q:
            p, q = p + 1, 0
            if p == g.p:
                image, p = image + g.h, 0

    var depth = g.group_c()
    var first_s, first_c = 0, share.start
    if not whole_rows and g.s > 1:
        first_s, first_c = divmod(share.start, depth)
    else:
        depth = share.end
    runs.count = 0
    for r in range(share.r, share.r_end):
        var inside = Array[Bool, rows](uninitialized=True)
        comptime for i in range(rows):
            inside[i] = UInt(h0[i] + r * g.dilation_h) < UInt(g.h)
        var at, s, c = share.start, first_s, first_c
        while at < share.end:
            var length = min(share.end - at, depth - c)
            var offset = (r * g.dilation_h * g.w + s * g.dilation_w) * g.c + c
            var sources = runs.sources.unsafe_ptr().unsafe_offset(runs.count * rows)
            comptime for i in range(rows):
                var reads = inside[i] & (UInt(w0[i] + s * g.dilation_w) < UInt(g.w))
                sources[unsafe_offset=i] = window[i].unsafe_offset(offset) if reads else zeros
            runs.lengths.unsafe_ptr()[unsafe_offset=runs.count] = length // STEP[dtype]
            runs.count += 1
            at, s, c = at + length, s + 1, 0


@no_inline
def _strip[
    dtype: DType, out: DType, //, epilogue: Epilogue, rows: Int, vectors: Int
](
    g: Geometry,
    o: Operands[dtype, out, FILTER[dtype], WIDE[dtype]],
    levels: Levels,
    starts: Data[SUM[dtype]],
    share: _Share,
    zeros: Data[dtype],
    sums: Data[SUM[dtype]],
    first: Int,
    tile: Int,
    tiles: Int,
    channel: Int,
    column: Int,
    columns: Int,
):
    """Takes tiles of `rows` pixels, from the pixel `first` on, through a share of K.

    They are the tiles from `tile` on, up to `tiles`. `o.w` points at the first of their columns in
    the share; x is read from `channel` on.
    """
    comptime CAN_PACK = PACKS[out] and vectors == 4
    var packs = CAN_PACK and columns == TILE[dtype]
    var pointwise = g.pointwise()
    var runs = _Runs[dtype, rows]()
    for i in range(tiles - tile):
        var m = first + i * rows
        # The next share lies behind this one, or begins the panel behind this one.
        var ahead = 0
        if tile + i < PANEL // LINE:
            ahead = share.size() * PANEL + (tile + i) * LINE * STEP[dtype]
        if pointwise:
            _find_row[rows](g, o.x, m, share, runs)
        else:
            _find[rows](g, o.x, m, channel, share, zeros, runs)
        comptime if rows >= LEAST[dtype]:
            if share.begins and share.ends:
                comptime for packed in [False, True]:
                    comptime if CAN_PACK or not packed:
                        if packs == packed:
                            _finish[epilogue, vectors, packed](
                                runs, g, o, levels, starts, m, ahead, column, columns
                            )
                continue
        var here = sums.unsafe_offset(i * rows * PANEL)
        _multiply[vectors](runs, o.w, ahead, here, share.begins, starts)
        if share.ends:
            _store[epilogue](g, o, levels, here, m, rows, column, columns)


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
    for begin in range(first, last, PIXELS):
        var end = min(begin + PIXELS, last)
        # As even as they come: 49 pixels are 4 x 6 + 5 x 5, never 8 x 6 + 1.
        var tiles = ceildiv(end - begin, HEIGHT[dtype])
        var low, high = divmod(end - begin, tiles)
        var at = 0
        for r in range(0, g.r, height):
            for start in range(0, run, length):
                var share = _Share(
                    r,
                    min(r + height, g.r),
                    start,
                    min(start + length, run),
                    begins=r == 0 and start == 0,
                    ends=r + height >= g.r and start + length >= run,
                )
                for offset in range(0, columns, TILE[dtype]):
                    var here = o
                    here.w = panel.unsafe_offset(at + offset * step)
                    var width = min(columns - offset, TILE[dtype])
                    # The first `high` tiles have a pixel more than the others.
                    comptime for less in range(HEIGHT[dtype]):
                        comptime rows = HEIGHT[dtype] - less
                        comptime for vectors in range(1, VECTORS + 1):
                            if low <= rows <= low + 1 and ceildiv(width, WIDTH[dtype]) == vectors:
                                var tile = high if rows == low else 0
                                var m = tile * (low + 1)
                                _strip[epilogue, rows, vectors](
                                    g,
                                    here,
                                    levels,
                                    starts.unsafe_offset(offset),
                                    share,
                                    zeros,
                                    sums.unsafe_offset(m * PANEL + offset),
                                    begin + m,
                                    tile,
                                    tiles if rows == low else high,
                                    channel,
                                    column + offset,
                                    width,
                                )
                at += share.size() * PANEL
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

    var given = levels.copy().or_else(Array[Levels, count](fill=Levels(o[0].bias)))

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


@no_inline
def _block(g: Geometry, work: Int) -> Int:
    """Chooses how many pixels a task has, of as many tasks as share `work` results evenly.

    All cores take one task each, then a second one, and so on: what counts is the rounds that this
    needs, times what a task takes. An eighth of a round more stands for cores that are late, so that of even
    choices it is the one of more tasks; that a task reads its panel takes as long as some pixels.
    """
    comptime READS = 8
    var cores = parallelism_level(None)
    var panels = ceildiv(g.group_f(), PANEL) * g.groups
    # What is computed together has the other cores.
    var own = max(1, cores * g.pixels() * g.f // work)
    var most = ceildiv(g.pixels(), 4 * ROWS)
    var choice = Cheapest(g.pixels())
    for rounds in range(1, 9):
        var block = ceildiv(g.pixels(), min(max(rounds * own // panels, 1), most))
        var needed = ceildiv(ceildiv(g.pixels(), block) * panels, own)
        choice.offer(block, Float64((8 * needed + 1) * (block + READS)))
    return choice.best


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
