"""Depthwise convolution of 8-bit numbers on a CPU with AVX-512 VNNI.

    y[n, p, q, c] = store(act(product[c] * sum_rs (x[n, p * stride + r, q * stride + s, c] - zero)
                              w[r, s, c] + bias[c] + residual[n, p, q, c]))

Windows are 3 x 3 and 5 x 5 with a stride of 1 or 2, and 7 x 7 with a stride of 1. x is uint8, w is
int8; the sums are int32, and exact. They begin with minus the zero point times the sum of the
filter, and the padding reads the zero point.

vpdpbusd adds the products of four bytes to each sum. Here the four are of one channel, in four rows
of a column of x: a quad. Interleaving four rows twice makes the quads of as many channels as a
vector has bytes, in four vectors. Filters are interleaved likewise, once for each task. Packing the
sums to 16 and to 8 bits takes the same order back to that of the channels.

A 3 x 3 window takes three rows of a quad. With a stride of 1 the four rows serve two rows of y, the
second with the filters one row further down. A 5 x 5 window takes four rows as quads, and the fifth
in quads of neighbouring columns: 7 products for 25 taps. A 7 x 7 window takes two quads.

A task takes 64 channels at a time (or 32, or 16) through its rows of y, from left to right. Each
column is loaded and interleaved once, and added to the sums of all pixels that see it; they stay in
registers. Bound by vector instructions: products, interleaving and the epilogue.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import bitcast
from std.utils import IndexList

from ..dot import HAS_VNNI, I8, I32, U8, dot
from ..epilogue import Epilogue, Output, activate
from ..geometry import Geometry
from ..operands import F32, Data, Levels, Operands, nearest_above, packed
from ..parallel import over_cores

comptime HAS_BYTES = HAS_VNNI[16]
"""Whether the CPU that is compiled for has AVX-512 VNNI."""
comptime TAPS = 4
"""Bytes of a quad."""
comptime PARTS = 4
"""Vectors of sums of a vector of bytes."""
comptime WIDE = 64
"""Channels of the widest step."""
comptime NEAR = 1 << 17
"""Bytes of x that a task reads at most, about: they stay in L2 while it takes other channels."""


def takes_bytes(g: Geometry) -> Bool:
    """Tells whether there is a kernel for a depthwise convolution, on a CPU that `HAS_BYTES`.

    Args:
        g: Sizes.

    Returns:
        True for the windows above, and as many channels as the narrowest step has.
    """
    var known = False
    comptime for kernel in [3, 5, 7]:
        comptime for stride in [1, 2]:
            comptime if _has[kernel, stride]():
                known |= g.r == kernel and g.stride_h == stride and g.f >= _least[kernel]()
    return known and g.square()


def _has[kernel: Int, stride: Int]() -> Bool:
    return kernel < 7 or stride == 1


def _least[kernel: Int]() -> Int:
    """Gives the channels of the narrowest step: what few networks need is not compiled."""
    return 16 if kernel == 3 else (32 if kernel == 5 else WIDE)


@no_inline
def convolve_bytes[
    out: DType, //, epilogue: Epilogue
](g: Geometry, o: Operands[U8, out, I8], levels: Levels):
    """Convolves on all cores.

    Parameters:
        out: Of the result.
        epilogue: What the sums go through.

    Args:
        g: Sizes that `takes_bytes` agrees to.
        o: Tensors; the filter is w[R, S, F].
        levels: What integers stand for.
    """
    comptime for kernel in [3, 5, 7]:
        comptime for stride in [1, 2]:
            comptime if _has[kernel, stride]():
                if g.r == kernel and g.stride_h == stride:
                    _convolve[epilogue, kernel, stride](g, o, levels)


def _convolve[
    out: DType, //, epilogue: Epilogue, kernel: Int, stride: Int
](g: Geometry, o: Operands[U8, out, I8], levels: Levels):
    # Eight tasks a core even out their times. To interleave filters takes as long as some dozens of
    # pixels, so tasks have at least 128 of them, and the channels are divided where these are few.
    var tasks = 8 * parallelism_level(None)
    var lines = g.n * ceildiv(g.p, _rows[kernel, stride]())
    var parts = min(tasks, ceildiv(g.pixels(), 128))
    parts = min(lines, max(parts, g.n * g.h * g.w * g.c // NEAR))
    var share = ceildiv(lines, parts)
    parts = ceildiv(lines, share)
    var width = max(1, parts * ceildiv(g.f, WIDE) // tasks) * WIDE
    var across = ceildiv(g.f, width)

    def task(index: Int) {var}:
        var part, number = divmod(index, across)
        var first, f = part * share, number * width
        var last = min(first + share, lines)
        _channels[epilogue, kernel, stride](g, o, levels, first, last, f, min(f + width, g.f))

    over_cores(task, parts * across)


def _channels[
    out: DType, //, epilogue: Epilogue, kernel: Int, stride: Int
](
    g: Geometry,
    o: Operands[U8, out, I8],
    levels: Levels,
    first: Int,
    last: Int,
    begin: Int,
    end: Int,
):
    """Computes some lines of y, of the channels `begin` to `end`."""
    var f = begin
    comptime for size in [WIDE, 32, 16]:
        comptime if size >= _least[kernel]():
            # A step is more than half full, or the narrowest one. The last ends with the last
            # channel: some results are computed twice.
            while end - f > (size // 2 if size > _least[kernel]() else 0) and g.f >= size:
                var from_ = min(f, g.f - size)
                _step[epilogue, kernel, stride, size // PARTS](g, o, levels, first, last, from_)
                f += size


def _rows[kernel: Int, stride: Int]() -> Int:
    """Gives the rows of y of a line: two where a quad has room for the windows of both."""
    return 2 if kernel == 3 and stride == 1 else 1


def _aside[kernel: Int](quad: Int) -> Bool:
    """Tells whether a quad is of columns: of the last row, where no other row is left."""
    return kernel == TAPS + 1 and quad == 1


def _tap[kernel: Int, stride: Int](s: Int, quad: Int, row: Int, i: Int) -> Int:
    """Numbers the tap of byte i of a quad that ends with column s of the window of a row of y.

    Returns:
        r * S + s; -1 if there is none.
    """
    if _aside[kernel](quad):  # columns s - 3 to s: all but the first are the last column's
        var column = s - (TAPS - 1) + i
        return (kernel - 1) * kernel + column if s % TAPS == 0 and column >= 0 else -1
    var r = quad * TAPS + i - row * stride
    return r * kernel + s if 0 <= r < kernel else -1


def _reads[kernel: Int, stride: Int](s: Int, quad: Int, row: Int) -> Bool:
    """Tells whether any byte of a quad has a tap."""
    var found = False
    for i in range(TAPS):
        found |= _tap[kernel, stride](s, quad, row, i) >= 0
    return found


struct _Step[kernel: Int, stride: Int, width: Int]:
    """What belongs to the channels of a step, in the order of the sums."""

    comptime ROWS = _rows[Self.kernel, Self.stride]()
    """Rows of y of a line."""
    comptime HEIGHT = (Self.ROWS - 1) * Self.stride + Self.kernel
    """Rows of x that it sees."""
    comptime QUADS = ceildiv(Self.HEIGHT, TAPS)
    """Quads of a column."""

    var taps: Array[SIMD[I8, Self.width * 4], Self.kernel * Self.QUADS * Self.ROWS * PARTS]
    """Of each column of the window, quad, row of y and part."""
    var starts: Array[SIMD[I32, Self.width], PARTS]
    """What sums begin with."""
    var scales: Array[SIMD[F32, Self.width], PARTS]
    """What they are multiplied by."""
    var biases: Array[SIMD[F32, Self.width], PARTS]
    """What is added to that."""

    @no_inline
    def __init__(
        out self, w: Data[I8], pitch: Int, bias: Data[F32], product: Data[F32], zero: SIMD[U8, 1]
    ):
        """Interleaves filters w[R, S, pitch], of which, as of the others, the first is named."""
        comptime Taps = SIMD[I8, Self.width * 4]
        self.taps = Array[Taps, Self.kernel * Self.QUADS * Self.ROWS * PARTS](fill=0)
        self.starts = Array[SIMD[I32, Self.width], PARTS](fill=0)
        comptime for s in range(Self.kernel):
            comptime for quad in range(Self.QUADS):
                comptime for row in range(Self.ROWS):
                    var rows = Array[Taps, TAPS](fill=0)
                    comptime for i in range(TAPS):
                        comptime tap = _tap[Self.kernel, Self.stride](s, quad, row, i)
                        comptime if tap >= 0:
                            rows[i] = w.unsafe_load[width=Self.width * 4](tap * pitch)
                    var quads = interleaved(rows)
                    comptime for part in range(PARTS):
                        comptime at = ((s * Self.QUADS + quad) * Self.ROWS + row) * PARTS + part
                        self.taps[at] = quads[part]
                        comptime if row == 0:
                            self.starts[part] = dot[U8, Self.width](
                                self.starts[part], SIMD[U8, Self.width * 4](zero), quads[part]
                            )
        self.scales = Array[SIMD[F32, Self.width], PARTS](uninitialized=True)
        self.biases = Array[SIMD[F32, Self.width], PARTS](uninitialized=True)
        comptime for part in range(PARTS):
            self.starts[part] = -self.starts[part]
            comptime for lane in range(Self.width):
                var channel = _channel(part, lane)
                self.scales[part][lane] = product[unsafe_offset=channel]
                self.biases[part][lane] = bias[unsafe_offset=channel]


def _channel(part: Int, lane: Int) -> Int:
    """Numbers the channel of a sum: of each 16, the parts have four each."""
    return lane // 4 * 16 + part * 4 + lane % 4


@always_inline
def interleaved[
    dtype: DType, bytes: Int, //
](rows: Array[SIMD[dtype, bytes], TAPS]) -> Array[SIMD[dtype, bytes], PARTS]:
    """Makes quads of the bytes of four rows.

    Parameters:
        dtype: Of bytes.
        bytes: How many of each row.

    Args:
        rows: The rows.

    Returns:
        The quads, in the order of the sums.
    """
    comptime PAIRS = bytes // 2
    var made = Array[SIMD[dtype, bytes], PARTS](uninitialized=True)
    comptime for half in range(2):
        comptime taken = _halves[bytes](16, half)
        var first = bitcast[DType.uint16, PAIRS](rows[0].shuffle[mask=taken](rows[1]))
        var second = bitcast[DType.uint16, PAIRS](rows[2].shuffle[mask=taken](rows[3]))
        comptime for quarter in range(2):
            comptime pairs = _halves[PAIRS](8, quarter)
            var quads = first.shuffle[mask=pairs](second)
            made[2 * half + quarter] = bitcast[dtype, bytes](quads)
    return made^


def _halves[size: Int](lanes: Int, half: Int) -> IndexList[size]:
    """Takes numbers of two vectors in turn, of the first or second half of each 128 bits."""
    var found = IndexList[size]()
    for i in range(size):
        var start = i // lanes * lanes + half * (lanes // 2)
        found[i] = start + i % lanes // 2 + i % 2 * size
    return found


@no_inline
def _step[
    out: DType, //, epilogue: Epilogue, kernel: Int, stride: Int, width: Int
](g: Geometry, o: Operands[U8, out, I8], levels: Levels, first: Int, last: Int, f: Int):
    """Computes some lines of y, of the channels of a step from f on."""
    var zero = levels.zero.cast[U8]()
    var bias, product = o.bias.unsafe_offset(f), levels.scales.product.unsafe_offset(f)
    var step = _Step[kernel, stride, width](o.w.unsafe_offset(f), g.f, bias, product, zero)
    var padding = Array[SIMD[U8, width * 4], 1](fill=SIMD[U8, width * 4](zero))
    var zeros = rebind[Data[U8]](
        padding.unsafe_ptr().unsafe_bitcast[UInt8]().unsafe_origin_cast[MutUntrackedOrigin]()
    )
    var lines = ceildiv(g.p, step.ROWS)
    for line in range(first, last):
        var n, p = divmod(line, lines)
        p *= step.ROWS
        var x = o.x.unsafe_offset(n * g.h * g.w * g.c + f)
        var y = o.shifted(y=(n * g.p + p) * g.q * g.f + f)
        _line(g, x, Output[epilogue](y, levels), step, zero, zeros, p)
    _ = padding^  # which the lines have read


@no_inline
def _line[
    out: DType, epilogue: Epilogue, kernel: Int, stride: Int, width: Int, //
](
    g: Geometry,
    x: Data[U8],
    output: Output[dtype=out, wide=F32, epilogue, out],
    step: _Step[kernel, stride, width],
    level: UInt8,
    zeros: Data[U8],
    p: Int,
):
    """Computes the rows of y from p on, where y begins; `zeros` is a pixel of the padding."""
    comptime ROWS = step.ROWS
    comptime QUADS = step.QUADS
    comptime SETS = ceildiv(kernel, stride)  # pixels of y that see a column
    comptime Bytes = SIMD[U8, width * 4]
    var sources = Array[Data[U8], step.HEIGHT](uninitialized=True)
    var pitches = Array[Int, step.HEIGHT](uninitialized=True)
    comptime for row in range(step.HEIGHT):
        var h = p * stride - g.pad_h + row
        var inside = 0 <= h < g.h
        sources[row] = x.unsafe_offset(h * g.w * g.c) if inside else zeros
        pitches[row] = g.c if inside else 0
    var zero = Bytes(level)
    var sums = Array[SIMD[I32, width], SETS * ROWS * PARTS](fill=0)
    var quads = Array[Bytes, QUADS * PARTS](fill=zero)
    var there = min(ROWS, g.p - p)
    var columns = (g.q - 1) * stride + kernel
    for begin in range(0, columns, SETS * stride):
        comptime for phase in range(SETS * stride):
            var column = begin + phase
            if column < columns:
                if UInt(column - g.pad_w) < UInt(g.w):
                    comptime for quad in range(QUADS):
                        var rows = Array[Bytes, TAPS](uninitialized=True)
                        comptime for i in range(TAPS):
                            comptime row = min(quad * TAPS + i, step.HEIGHT - 1)  # or any: no tap
                            rows[i] = sources[row].unsafe_load[width=width * 4](0)
                        _follow[kernel, quad](quads, interleaved(rows))
                    comptime for row in range(step.HEIGHT):
                        sources[row] = sources[row].unsafe_offset(pitches[row])
                else:
                    comptime for quad in range(QUADS):
                        _follow[kernel, quad](quads, Array[Bytes, PARTS](fill=zero))
                comptime if phase % stride == 0:  # a pixel's first column
                    comptime for row in range(ROWS):
                        comptime for part in range(PARTS):
                            sums[(phase // stride * ROWS + row) * PARTS + part] = step.starts[part]
                comptime for s in range(kernel):
                    comptime if (phase - s) % stride == 0:
                        comptime set = (phase - s) // stride % SETS * ROWS * PARTS
                        var q = (column - s) // stride
                        if UInt(q) < UInt(g.q):
                            _add[s, set](step, quads, sums)
                            comptime if s == kernel - 1:
                                comptime for row in range(ROWS):
                                    if row < there:
                                        comptime of = set + row * PARTS
                                        _finish[of](output, step, sums, (row * g.q + q) * g.f)


@always_inline
def _follow[
    bytes: Int, count: Int, //, kernel: Int, quad: Int
](mut quads: Array[SIMD[U8, bytes], count], column: Array[SIMD[U8, bytes], PARTS]):
    """Takes the quads of the next column; quads of columns, its byte behind their last three."""
    comptime for part in range(PARTS):
        comptime at = quad * PARTS + part
        comptime if _aside[kernel](quad):
            var kept = bitcast[DType.uint32, bytes // TAPS](quads[at]) >> 8
            var next = bitcast[DType.uint32, bytes // TAPS](column[part]) << 24
            quads[at] = bitcast[U8, bytes](kept | next)
        else:
            quads[at] = column[part]


@always_inline
def _add[
    kernel: Int, stride: Int, width: Int, size: Int, count: Int, //, s: Int, set: Int
](
    step: _Step[kernel, stride, width],
    quads: Array[SIMD[U8, width * 4], count],
    mut sums: Array[SIMD[I32, width], size],
):
    """Adds what a pixel sees of a column, which is column s of its window, to its sums."""
    comptime for row in range(step.ROWS):
        comptime for quad in range(step.QUADS):
            comptime if _reads[kernel, stride](s, quad, row):
                comptime at = set + row * PARTS
                comptime tap = ((s * step.QUADS + quad) * step.ROWS + row) * PARTS
                comptime for part in range(PARTS):
                    sums[at + part] = dot[U8, width](
                        sums[at + part], quads[quad * PARTS + part], step.taps[tap + part]
                    )


@always_inline
def _finish[
    out: DType,
    epilogue: Epilogue,
    kernel: Int,
    stride: Int,
    width: Int,
    size: Int,
    //,
    set: Int,
](
    output: Output[dtype=out, wide=F32, epilogue, out],
    step: _Step[kernel, stride, width],
    sums: Array[SIMD[I32, width], size],
    to: Int,
):
    """Takes the sums of a pixel through the epilogue to where its channels lie in y."""
    var values = Array[SIMD[F32, width], PARTS](uninitialized=True)
    comptime for part in range(PARTS):
        values[part] = sums[set + part].cast[F32]().fma(step.scales[part], step.biases[part])
    comptime if out == U8 and not epilogue.joins:
        var integers = Array[SIMD[I32, width], PARTS](uninitialized=True)
        comptime for part in range(PARTS):
            var value = activate[epilogue, U8](values[part], SIMD[F32, width](0))
            integers[part] = nearest_above[U8](value, 1 / output.y_is.scale, output.y_is.zero)
        rebind[Data[U8]](output.y).unsafe_store(to, packed(integers))
    else:
        var ordered = in_order(values)
        comptime for part in range(PARTS):
            output.store(ordered[part], to + part * width)


@always_inline
def in_order[
    width: Int, //
](parts: Array[SIMD[F32, width], PARTS]) -> Array[SIMD[F32, width], PARTS]:
    """Puts numbers in the order of the sums into that of the channels.

    Parameters:
        width: Lanes.

    Args:
        parts: The numbers.

    Returns:
        Those of the first channels, of the next, and so on.
    """
    comptime lanes = _lanes[PARTS * width](width)
    var all = rebind[SIMD[F32, PARTS * width]](
        parts[0].join(parts[1]).join(parts[2].join(parts[3]))
    ).shuffle[mask=lanes]()
    var made = Array[SIMD[F32, width], PARTS](uninitialized=True)
    comptime for part in range(PARTS):
        made[part] = all.slice[width, offset=part * width]()
    return made^


def _lanes[size: Int](width: Int) -> IndexList[size]:
    """Finds the sum of each channel."""
    var found = IndexList[size]()
    for i in range(size):
        found[_channel(i // width, i % width)] = i
    return found
