"""Convolution of small groups on a CPU by strips of a row: the usual windows, with x reused.

    y[n, p, q, f] = sum_rsc x[n, p * stride + r, q * stride + s, f // M * M + c] w[r, s, c, f]

M is the channels, and filters, of a group; 1 is depthwise. Windows are 3 x 3 and 5 x 5 with a stride
of 1 or 2, and 7 x 7 with a stride of 1; of groups of 8 and 16, 3 x 3 with a stride of 1.

A strip is RUN neighbouring pixels of a row of y x VECTORS vectors of filters, whose sums stay in
registers. For each row of the window the weights of its taps do, too, while the columns that the
strip reads pass by: each is loaded, and shuffled within its groups, once for all the taps that read
it. Where columns lie is found once for all channels; those in the padding read zeros, and rows in
the padding are left out. Bound by the FMA units while x comes from the second-level cache.
"""

from std.math import ceildiv
from std.memory import Layout, alloc, dealloc
from std.sys import CompilationTarget, simd_width_of
from std.utils import IndexList

from max.runtime.asyncrt import parallelism_level

from ..epilogue import Epilogue, Output
from ..geometry import Geometry
from ..operands import F32, Data, Levels, Operands, widened
from ..parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime VECTORS = 2 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 1
"""Vectors of filters of a strip: 14 sums and up to 14 weights of 32 registers, or half of 16."""
comptime RUN = 7
"""Pixels of a strip; it divides the rows of images of 224 pixels at every stage."""


def takes[members: Int](g: Geometry) -> Bool:
    """Tells whether there is a kernel for a window, and rows are long enough for it.

    Parameters:
        members: Channels, and filters, of a group.

    Args:
        g: Sizes.

    Returns:
        True if at least three quarters of the pixels of the strips are there.
    """
    var known = False
    comptime for kernel in [3, 5, 7]:
        comptime for stride in [1, 2]:
            comptime if _has[members, kernel, stride]():
                known |= g.r == kernel and g.stride_h == stride
    return known and g.square() and g.f >= WIDTH and 4 * g.q >= 3 * ceildiv(g.q, RUN) * RUN


def _has[members: Int, kernel: Int, stride: Int]() -> Bool:
    """Tells whether there is a kernel: for what nets use, and this one is faster at."""
    comptime if members == 1:
        return kernel < 7 or stride == 1
    return kernel == 3 and stride == 1 and members >= 8


def convolve_strips[
    dtype: DType, out: DType, right: DType, //, epilogue: Epilogue, members: Int
](g: Geometry, o: Operands[dtype, out, right], levels: Levels):
    """Convolves on all cores.

    Parameters:
        dtype: Of the activations: float32, bfloat16 or uint8.
        out: Of the result.
        right: Of the filter.
        epilogue: What the sums go through.
        members: Channels, and filters, of a group.

    Args:
        g: Sizes that `takes` agrees to.
        o: Tensors; the filter is w[R, S, members, F].
        levels: What integers stand for.
    """
    comptime for kernel in [3, 5, 7]:
        comptime for stride in [1, 2]:
            comptime if _has[members, kernel, stride]():
                if g.r == kernel and g.stride_h == stride:
                    _convolve[epilogue, members, kernel, stride](g, o, levels)


def _convolve[
    dtype: DType,
    out: DType,
    right: DType,
    //,
    epilogue: Epilogue,
    members: Int,
    kernel: Int,
    stride: Int,
](g: Geometry, o: Operands[dtype, out, right], levels: Levels):
    # Eight tasks a core even out their times; a task is some strips, or parts of strips.
    var tasks = 8 * parallelism_level(None)
    var strips = g.n * g.p * ceildiv(g.q, RUN)
    var blocks = ceildiv(g.f, VECTORS * WIDTH)
    var parts = min(blocks, ceildiv(4 * tasks, strips))
    var part = ceildiv(blocks, parts) * VECTORS * WIDTH
    parts = ceildiv(g.f, part)
    var share = ceildiv(strips * parts, tasks)

    def task(index: Int) {var}:
        _strips[epilogue, members, kernel, stride](
            g, o, levels, part, index * share, min((index + 1) * share, strips * parts)
        )

    over_cores(task, ceildiv(strips * parts, share))


struct _Columns[dtype: DType, kernel: Int, stride: Int]:
    """Where a strip reads."""

    comptime COUNT = (RUN - 1) * Self.stride + Self.kernel
    """Columns."""

    var sources: Array[Data[Self.dtype], Self.kernel * Self.COUNT]
    """The pixels of each row of the window that lies in the image."""
    var r: Int
    """The first of these rows."""
    var rows: Int
    """How many there are."""

    def __init__(
        out self, g: Geometry, x: Data[Self.dtype], zeros: Data[Self.dtype], n: Int, p: Int, q: Int
    ):
        """Finds the columns of the strip that begins with pixel q of row p; the others are zeros."""
        self.sources = Array[Data[Self.dtype], Self.kernel * Self.COUNT](uninitialized=True)
        var h0 = p * Self.stride - g.pad_h
        var w0 = q * Self.stride - g.pad_w
        self.r = max(0, -h0)
        self.rows = max(0, min(Self.kernel, g.h - h0) - self.r)
        for row in range(self.rows):
            var line = x.unsafe_offset((n * g.h + h0 + self.r + row) * g.w * g.c)
            var to = self.sources.unsafe_ptr().unsafe_offset(row * Self.COUNT)
            comptime for column in range(Self.COUNT):
                var w = w0 + column
                var inside = 0 <= w < g.w
                to[unsafe_offset=column] = line.unsafe_offset(w * g.c) if inside else zeros


@no_inline
def _strips[
    dtype: DType,
    out: DType,
    right: DType,
    //,
    epilogue: Epilogue,
    members: Int,
    kernel: Int,
    stride: Int,
](g: Geometry, o: Operands[dtype, out, right], levels: Levels, part: Int, first: Int, last: Int,):
    """Computes some parts of strips, of `part` filters each."""
    var parts = ceildiv(g.f, part)
    var runs = ceildiv(g.q, RUN)
    var memory = alloc(Layout[Scalar[dtype]](count=g.c))
    var zeros = rebind[Data[dtype]](memory.unsafe_ptr())
    for c in range(g.c):
        zeros[unsafe_offset=c] = levels.zero.cast[dtype]()
    for index in range(first, last):
        var strip, number = divmod(index, parts)
        var row, run = divmod(strip, runs)
        var n, p = divmod(row, g.p)
        var q = run * RUN
        var columns = _Columns[dtype, kernel, stride](g, o.x, zeros, n, p, q)
        var here = o.shifted(y=(row * g.q + q) * g.f)
        var pixels = min(RUN, g.q - q)
        var f = number * part
        var end = min(f + part, g.f)
        # The last vectors end with the last filter: some results are computed twice.
        while f < end:
            if end - f > (VECTORS - 1) * WIDTH and g.f >= VECTORS * WIDTH:
                var from_ = min(f, g.f - VECTORS * WIDTH)
                _strip[epilogue, members, VECTORS](g, here, levels, columns, from_, pixels)
                f += VECTORS * WIDTH
            else:
                _strip[epilogue, members, 1](g, here, levels, columns, min(f, g.f - WIDTH), pixels)
                f += WIDTH
    dealloc(memory^)


@no_inline
def _strip[
    dtype: DType,
    out: DType,
    right: DType,
    kernel: Int,
    stride: Int,
    //,
    epilogue: Epilogue,
    members: Int,
    vectors: Int,
](
    g: Geometry,
    o: Operands[dtype, out, right],
    levels: Levels,
    columns: _Columns[dtype, kernel, stride],
    f: Int,
    pixels: Int,
):
    """Computes `vectors` vectors of filters from `f` on of `pixels` pixels, where `o.y` begins."""
    var output = Output[epilogue](o, levels)
    var sums = Array[SIMD[F32, WIDTH], RUN * vectors](fill=0)
    comptime if not epilogue.scales:
        comptime for v in range(vectors):
            var bias = o.bias.unsafe_load[width=WIDTH](f + v * WIDTH)
            comptime for i in range(RUN):
                sums[i * vectors + v] = bias
    comptime COUNT = columns.COUNT
    var taps = o.w.unsafe_offset(columns.r * kernel * members * g.f + f)
    var sources = columns.sources.unsafe_ptr()
    for _ in range(columns.rows):
        # A loop over the members would shuffle by a number that is known at run time only.
        comptime for c in range(members):
            var weights = Array[SIMD[F32, WIDTH], kernel * vectors](uninitialized=True)
            comptime for s in range(kernel):
                var tap = taps.unsafe_offset((s * members + c) * g.f)
                comptime for v in range(vectors):
                    weights[s * vectors + v] = widened(tap.unsafe_load[width=WIDTH](v * WIDTH))
            comptime for column in range(COUNT):
                var source = sources[unsafe_offset=column]
                comptime for v in range(vectors):
                    var value: SIMD[F32, WIDTH]
                    comptime if members >= WIDTH:  # they are all of one group
                        var first = (f + v * WIDTH) // members * members
                        var x = levels.widened(source[unsafe_offset=first + c])
                        value = SIMD[F32, WIDTH](rebind[Float32](x))
                    else:
                        var x = levels.widened(source.unsafe_load[width=WIDTH](f + v * WIDTH))
                        value = shuffled[members, c](rebind[SIMD[F32, WIDTH]](x))
                    comptime for i in range(RUN):
                        comptime s = column - i * stride
                        comptime if 0 <= s and s < kernel:
                            sums[i * vectors + v] = value.fma(
                                weights[s * vectors + v], sums[i * vectors + v]
                            )
        taps = taps.unsafe_offset(kernel * members * g.f)
        sources = sources.unsafe_offset(COUNT)
    comptime for i in range(RUN):
        if i < pixels:
            comptime for v in range(vectors):
                output.end(sums[i * vectors + v], f + v * WIDTH, i * g.f + f + v * WIDTH)


@always_inline
def shuffled[
    members: Int, c: Int, width: Int, dtype: DType
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Gives each lane channel `c` of its group of `members`.

    Parameters:
        members: Channels of a group.
        c: The channel.
        width: Lanes; a multiple of `members`.
        dtype: Of the channels.

    Args:
        x: The channels of some groups.

    Returns:
        The channel of each group in all of its lanes.
    """
    comptime if members == 1:
        return x
    comptime lanes = _lanes[width](members, c)
    return x.shuffle[mask=lanes]()


def _lanes[width: Int](members: Int, c: Int) -> IndexList[width]:
    var found = IndexList[width]()
    for lane in range(width):
        found[lane] = lane // members * members + c
    return found
