"""3 x 3 convolution with a stride of 1 on a CPU, by a quarter of the multiplications, in float32.

Winograd's minimal filtering F(4 x 4, 3 x 3) (Lavin and Gray 2016, arXiv:1509.09308): 16 pixels of a
filter are 36 products a channel, one at each pair of points, in the place of 144.

    v[ij, t, c] = B^T x_t B     x_t[6, 6, C]: what the tile t of 4 x 4 pixels reads, 0 in the padding
    u[ij, c, f] = G w G^T       w[R, S, C, F], in the panels of ops/gemm
    y_t[4, 4, F] = A^T s A      s[ij, t, f] = sum_c v[ij, t, c] u[ij, c, f]

The points are 0, +-1 / sqrt(2), +-sqrt(2) and infinity. Against float64 the result is twice as far
off as that of the GEMM (docs/kernels.md). What is lost is relative to
the largest numbers that a tile reads.

A task is a panel of filters, or half of one, and some tiles. It transforms SLICE channels of the
filters, where they are needed: u in memory would be four times the weights, and the largest layers
wait for these already. Then, BLOCK tiles at a time, it transforms x and multiplies by the register tiles of the
GEMM. Where a result of a tile is not finite the GEMM computes the tile's pixels: NaN and infinity
reach those which they reach in a sum. Bound by products and transforms alike
where channels are few, by the way of the weights where tiles are: docs/kernels.md has the figures.
"""

from std.math import ceildiv
from std.memory import Layout, alloc, dealloc
from std.sys import CompilationTarget, simd_width_of, size_of

from max.runtime.asyncrt import parallelism_level

from ..choice import Cheapest
from ..epilogue import Epilogue, Output
from ..gemm.cpu import LINE, PANEL, ROWS, gemm_block, multiply_rows, panel_size
from ..geometry import Geometry
from ..operands import F32, Data, Levels, Operands
from ..parallel import over_cores

comptime SIZE = 4
"""Rows and columns of the pixels of a tile."""
comptime SIDE = SIZE + 2
"""Points, and rows and columns of what a tile reads."""
comptime POINTS = SIDE * SIDE
"""Pairs of points."""
comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime ROOT: Float32 = 1.4142135623730951
"""Of 2."""
comptime SLICE = 64
"""Channels at a time: u of a panel is 590 KB."""
comptime BLOCK = 25
"""Tiles at a time: v of a slice is 230 KB, as are their sums."""
comptime Vector = SIMD[F32, WIDTH]
"""Neighbouring channels, or filters."""


def takes(g: Geometry) -> Bool:
    """Tells whether a convolution of float32 has this kernel, whatever the batch.

    Args:
        g: Sizes.

    Returns:
        True if it multiplies less, counting what a tile's edges waste and the filters' transform.
    """
    comptime if not CompilationTarget.has_avx2():
        return False
    if g.r != 3 or g.s != 3 or g.stride_h * g.stride_w * g.dilation_h * g.dilation_w != 1:
        return False
    if g.groups != 1 or g.c % 16 != 0 or g.c < 32 or g.f < 32:
        return False
    # Of a channel and a vector of filters; their transform takes as long as 100 multiply-adds.
    var fewer = POINTS * ceildiv(g.p, SIZE) * ceildiv(g.q, SIZE) + 100
    return 2 * 9 * g.p * g.q >= 3 * fewer


def convolve_winograd[epilogue: Epilogue](g: Geometry, o: Operands[F32]):
    """Convolves on all cores.

    Parameters:
        epilogue: What the sums go through.

    Args:
        g: Sizes that `takes` agrees to.
        o: Tensors; the filter is packed in panels.
    """
    var plan = _Plan(g)

    def task(index: Int) {var}:
        # All pieces of a part follow one another: a core keeps to its pixels (ops/parallel.mojo).
        var part, piece = divmod(index, plan.pieces)
        var first, last = plan.tiles * part // plan.parts, plan.tiles * (part + 1) // plan.parts
        _task[epilogue](g, o, piece * plan.width, plan.width, first, last)

    over_cores(task, plan.parts * plan.pieces)


@fieldwise_init
struct _Plan(TrivialRegisterPassable):
    """How the work is divided: each part of the tiles by each piece of the filters is a task."""

    var tiles: Int
    """Of all images."""
    var parts: Int
    """Of the tiles."""
    var pieces: Int
    """Of the filters."""
    var width: Int
    """Filters of a piece: a panel, or half of one."""

    @no_inline
    def __init__(out self, g: Geometry):
        """Takes what is estimated to end first."""
        var tiles = _Tiles(g).count
        var cores = parallelism_level(None)
        # Sums of several slices wait for the last one.
        var few = ceildiv(tiles, 4 * BLOCK if g.c <= SLICE else 2 * BLOCK)
        var choice = Cheapest(Self(tiles, 0, 0, 0))
        for width in [PANEL, PANEL // 2]:
            var pieces = ceildiv(g.f, width)
            # Two tasks a core even out their times if these have enough tiles, but no core is idle.
            var many = min(ceildiv(2 * cores, pieces), tiles // (2 * BLOCK - 2))
            var one = min(ceildiv(cores, pieces), ceildiv(tiles, ROWS))
            var parts = max(few, many, one)
            var cost = _cost(ceildiv(tiles, parts), width) * ceildiv(parts * pieces, cores)
            choice.offer(Self(tiles, parts, pieces, width), Float64(cost))
        self = choice.best


def _cost(tiles: Int, filters: Int) -> Int:
    """Estimates a task, in multiply-adds of vectors a channel: products, and both transforms."""
    var vectors = filters // WIDTH
    return tiles * (POINTS * vectors + 200 // WIDTH) + 100 * vectors


struct _Tiles(TrivialRegisterPassable):
    """The tiles of all images."""

    var rows: Int
    """Of an image."""
    var columns: Int
    """Of an image."""
    var count: Int
    """Of all images."""

    def __init__(out self, g: Geometry):
        self.rows, self.columns = ceildiv(g.p, SIZE), ceildiv(g.q, SIZE)
        self.count = g.n * self.rows * self.columns

    @always_inline
    def at(self, tile: Int) -> Tuple[Int, Int, Int]:
        """Finds a tile's image, and the row and the column of its first pixel."""
        var line, column = divmod(tile, self.columns)
        var n, row = divmod(line, self.rows)
        return n, row * SIZE, column * SIZE


struct _Scratch(TrivialRegisterPassable):
    """A task's memory, each pair of points apart by an odd number of cache lines.

    Else the same place of all of them would lie in one set of the first-level cache, whose eight
    ways the transforms would overflow.
    """

    var u: Data[F32]
    """[POINTS, SLICE, PANEL]."""
    var v: Data[F32]
    """[POINTS, tiles of a block, SLICE]."""
    var sums: Data[F32]
    """[blocks, POINTS, tiles of a block, PANEL]."""
    var y: Data[F32]
    """[SIZE, SIZE, PANEL]."""
    var zeros: Data[F32]
    """[SLICE]."""
    var u_pitch: Int
    """Numbers from a pair of points to the next."""
    var v_pitch: Int
    """See `u_pitch`."""
    var sums_pitch: Int
    """See `u_pitch`."""
    var count: Int
    """Numbers of all, with what aligns the first."""

    def __init__(out self, tiles: Int, blocks: Int):
        """Counts what is needed, for so many tiles of a block at most; `at` says where it is."""
        self.u_pitch = _pitch(SLICE * PANEL)
        self.v_pitch = _pitch(tiles * SLICE)
        self.sums_pitch = _pitch(tiles * PANEL)
        self.count = POINTS * (self.u_pitch + self.v_pitch + blocks * self.sums_pitch)
        self.count += SIZE * SIZE * PANEL + SLICE + LINE
        self.u = self.v = self.sums = self.y = self.zeros = Data[F32](unsafe_from_address=64)

    def at(mut self, memory: Data[F32]):
        """Divides the memory."""
        self.u = memory.unsafe_offset(-Int(memory) // size_of[Float32]() % LINE)
        self.v = self.u.unsafe_offset(POINTS * self.u_pitch)
        self.sums = self.v.unsafe_offset(POINTS * self.v_pitch)
        self.zeros = memory.unsafe_offset(self.count - SLICE)
        self.y = self.zeros.unsafe_offset(-SIZE * SIZE * PANEL)
        for c in range(SLICE):
            self.zeros[unsafe_offset=c] = 0


def _pitch(numbers: Int) -> Int:
    var lines = ceildiv(numbers, LINE)
    return (lines + (5 - lines) % 8) * LINE


@no_inline
def _task[
    epilogue: Epilogue
](g: Geometry, o: Operands[F32], column: Int, width: Int, first: Int, last: Int):
    """Computes `width` filters of a panel, from `column` on, at the tiles `first` to `last`."""
    var count = last - first
    var blocks = ceildiv(count, BLOCK)
    var size = ceildiv(count, blocks)
    var kept = 1 if g.c <= SLICE else blocks
    var s = _Scratch(size, kept)
    var memory = alloc(Layout[Float32](count=s.count))
    s.at(rebind[Data[F32]](memory.unsafe_ptr()))
    var columns = min(width, g.f - column)
    var panel, at = divmod(column, PANEL)
    var here = o.shifted(w=panel * panel_size[F32](g) + at)
    for channel in range(0, g.c, SLICE):
        var depth = min(SLICE, g.c - channel)
        _transform_filters(g, here.w, channel, depth, columns, s)
        for block in range(blocks):
            var begin = first + block * size
            var tiles = min(size, last - begin)
            var sums = s.sums.unsafe_offset(block % kept * POINTS * s.sums_pitch)
            _transform_tiles(g, o.x, begin, tiles, channel, depth, s)
            _multiply(tiles, channel == 0, depth, columns, s, sums)
            if channel + depth == g.c:
                for i in range(tiles):
                    _store[epilogue](
                        g, here, begin + i, column, columns, s, sums.unsafe_offset(i * PANEL)
                    )
    dealloc(memory^)


@no_inline
def _multiply(tiles: Int, fresh: Bool, depth: Int, columns: Int, s: _Scratch, sums: Data[F32]):
    """Adds the products of a slice to the sums of a block's tiles, or begins them if `fresh`."""
    for point in range(POINTS):
        multiply_rows(
            s.v.unsafe_offset(point * s.v_pitch),
            depth,
            tiles,
            s.u.unsafe_offset(point * s.u_pitch),
            columns,
            depth,
            sums.unsafe_offset(point * s.sums_pitch),
            fresh,
        )


@no_inline
def _store[
    epilogue: Epilogue
](
    g: Geometry,
    o: Operands[F32],
    tile: Int,
    column: Int,
    columns: Int,
    s: _Scratch,
    sums: Data[F32],
):
    """Takes a tile's sums through A and the epilogue; `o.w` begins with the panel."""
    var finite = _transform_sums(sums, columns, s)
    var output = Output[epilogue](o)
    var n, p, q = _Tiles(g).at(tile)
    var width = min(SIZE, g.q - q)
    for row in range(min(SIZE, g.p - p)):
        var pixel = (n * g.p + p + row) * g.q + q
        if not finite:
            var last = pixel + width
            gemm_block[epilogue](g, o, Levels(o.bias), pixel, last, 0, column, columns)
            continue
        for i in range(width):
            var from_ = s.y.unsafe_offset((row * SIZE + i) * PANEL)
            output.finish_row(from_, column, (pixel + i) * g.f + column, columns)


@no_inline
def _transform_filters(
    g: Geometry, w: Data[F32], channel: Int, depth: Int, columns: Int, s: _Scratch
):
    """Writes u of `depth` channels of a panel w[3, 3, C, PANEL]."""
    for c in range(depth):
        for f in range(0, columns, WIDTH):
            var tap = w.unsafe_offset((channel + c) * PANEL + f)
            var half = Array[Vector, SIDE * 3](uninitialized=True)
            comptime for j in range(3):
                var given = Array[Vector, 3](uninitialized=True)
                comptime for i in range(3):
                    given[i] = tap.unsafe_load[width=WIDTH]((i * 3 + j) * g.c * PANEL)
                var made = _of_filters(given)
                comptime for i in range(SIDE):
                    half[i * 3 + j] = made[i]
            var to = s.u.unsafe_offset(c * PANEL + f)
            comptime for i in range(SIDE):
                var given = Array[Vector, 3](uninitialized=True)
                comptime for j in range(3):
                    given[j] = half[i * 3 + j]
                var made = _of_filters(given)
                comptime for j in range(SIDE):
                    to.unsafe_store((i * SIDE + j) * s.u_pitch, made[j])


@no_inline
def _transform_tiles(
    g: Geometry, x: Data[F32], first: Int, count: Int, channel: Int, depth: Int, s: _Scratch
):
    """Writes v of `depth` channels of `count` tiles."""
    var tiles = _Tiles(g)
    for tile in range(count):
        var n, p, q = tiles.at(first + tile)
        var sources = Array[Data[F32], POINTS](uninitialized=True)
        comptime for i in range(SIDE):
            comptime for j in range(SIDE):
                var h, w = p - g.pad_h + i, q - g.pad_w + j
                var inside = 0 <= h < g.h and 0 <= w < g.w
                var pixel = x.unsafe_offset(((n * g.h + h) * g.w + w) * g.c + channel)
                sources[i * SIDE + j] = pixel if inside else s.zeros
        for c in range(0, depth, WIDTH):
            var half = Array[Vector, POINTS](uninitialized=True)
            comptime for j in range(SIDE):
                var given = Array[Vector, SIDE](uninitialized=True)
                comptime for i in range(SIDE):
                    given[i] = sources[i * SIDE + j].unsafe_load[width=WIDTH](c)
                var made = _of_tiles(given)
                comptime for i in range(SIDE):
                    half[i * SIDE + j] = made[i]
            var to = s.v.unsafe_offset(tile * depth + c)
            comptime for i in range(SIDE):
                var given = Array[Vector, SIDE](uninitialized=True)
                comptime for j in range(SIDE):
                    given[j] = half[i * SIDE + j]
                var made = _of_tiles(given)
                comptime for j in range(SIDE):
                    to.unsafe_store((i * SIDE + j) * s.v_pitch, made[j])


@no_inline
def _transform_sums(sums: Data[F32], columns: Int, s: _Scratch) -> Bool:
    """Writes y of a tile's sums, and tells whether all of it is finite.

    Each point counts in one of y's corners at least: y is not all finite if one of the sums is not.
    """
    var check = Vector(0)
    for f in range(0, columns, WIDTH):
        var half = Array[Vector, SIZE * SIDE](uninitialized=True)
        comptime for j in range(SIDE):
            var given = Array[Vector, SIDE](uninitialized=True)
            comptime for i in range(SIDE):
                given[i] = sums.unsafe_load[width=WIDTH]((i * SIDE + j) * s.sums_pitch + f)
            var made = _of_sums(given)
            comptime for i in range(SIZE):
                half[i * SIDE + j] = made[i]
        comptime for i in range(SIZE):
            var given = Array[Vector, SIDE](uninitialized=True)
            comptime for j in range(SIDE):
                given[j] = half[i * SIDE + j]
            var made = _of_sums(given)
            comptime for j in range(SIZE):
                check = made[j].fma(0, check)  # NaN unless it is finite
                s.y.unsafe_store((i * SIZE + j) * PANEL + f, made[j])
    return check.reduce_add() == 0


@always_inline
def _of_filters(w: Array[Vector, 3]) -> Array[Vector, SIDE]:
    """Computes G w."""
    var u = Array[Vector, SIDE](uninitialized=True)
    u[0] = w[0]
    var even = w[2].fma(0.5, w[0]) * Float32(-2.0 / 3)
    u[1] = w[1].fma(-ROOT / 3, even)
    u[2] = w[1].fma(ROOT / 3, even)
    even = w[2].fma(2, w[0]) * Float32(1.0 / 6)
    u[3] = w[1].fma(ROOT / 6, even)
    u[4] = w[1].fma(-ROOT / 6, even)
    u[5] = w[2]
    return u^


@always_inline
def _of_tiles(x: Array[Vector, SIDE]) -> Array[Vector, SIDE]:
    """Computes B^T x."""
    var v = Array[Vector, SIDE](uninitialized=True)
    v[0] = x[2].fma(-2.5, x[4]) + x[0]
    var even, odd = x[2].fma(-2, x[4]), x[1].fma(-2, x[3])
    v[1] = odd.fma(ROOT / 2, even)
    v[2] = odd.fma(-ROOT / 2, even)
    even, odd = x[2].fma(-0.5, x[4]), x[1].fma(-0.5, x[3])
    v[3] = odd.fma(ROOT, even)
    v[4] = odd.fma(-ROOT, even)
    v[5] = x[3].fma(-2.5, x[5]) + x[1]
    return v^


@always_inline
def _of_sums(s: Array[Vector, SIDE]) -> Array[Vector, SIZE]:
    """Computes A^T s."""
    var y = Array[Vector, SIZE](uninitialized=True)
    var even, odd = s[1] + s[2], s[1] - s[2]
    var outer, outer_odd = s[3] + s[4], s[3] - s[4]
    y[0] = s[0] + even + outer
    y[1] = outer_odd.fma(2, odd) * (ROOT / 2)
    y[2] = outer.fma(4, even) * 0.5
    y[3] = outer_odd.fma(2 * ROOT, odd.fma(ROOT / 4, s[5]))
    return y^
