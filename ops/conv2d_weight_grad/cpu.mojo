"""The gradient of a convolution's filters on a CPU: a GEMM whose K are the pixels.

    dw[f, j] = sum_m dy[m, f] x[row(m, j)]      j = (r, s, c), as the columns of im2col

Both operands lie as rows of one number of K, so that neither is transposed: a task copies a block of
pixels of dy and of 64 columns j side by side, with zeros for the padding, and multiplies them by the
GEMM's register tiles (ops/gemm/cpu.mojo). bfloat16 is widened as it is copied. A task is a block of
filters x 64 columns; where these are few, the pixels are divided into parts too, whose sums are added
up in their order. Bound by the FMA units.

Depthwise, vectors run over channels: each row of pixels is multiplied by what each tap sees of it.
Bound by loads from the first-level cache.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, iota
from std.memory import Layout, alloc, dealloc
from std.sys import simd_width_of
from std.sys.intrinsics import masked_load, masked_store

from ..gemm.cpu import PANEL, ROWS, multiply_rows
from ..geometry import Geometry
from ..operands import F32, WIDE, Data, narrowed, widened
from ..parallel import over_cores
from .tensors import WeightGrad

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime FILTERS = 16 * ROWS
"""Filters of a task at most."""
comptime DEPTH = 128
"""Pixels that are copied at a time."""
comptime LEAST = 4 * DEPTH
"""Pixels of a part at least."""
comptime CHUNK = 4096
"""Numbers of the result that a task adds up."""
comptime CHANNELS = 4 * WIDTH
"""Channels of a task of a depthwise convolution."""


def conv2d_weight_grad_cpu[dtype: DType, //](g: Geometry, o: WeightGrad[dtype]):
    """Computes the gradient on all cores.

    Parameters:
        dtype: Of the tensors: float32, bfloat16 or float64.

    Args:
        g: Sizes of the convolution.
        o: Tensors.
    """
    var depthwise = g.depthwise()
    var size = g.f * g.depth()
    var block = CHANNELS
    var panels = 1
    if not depthwise:
        # As even as they come, in whole register tiles.
        block = ceildiv(ceildiv(g.group_f(), ceildiv(g.group_f(), FILTERS)), ROWS) * ROWS
        panels = ceildiv(g.depth(), PANEL)
    var blocks = ceildiv(g.f if depthwise else g.group_f(), block)
    var tasks = blocks * panels * (1 if depthwise else g.groups)
    # Eight tasks a core even out their times.
    var wanted = ceildiv(8 * parallelism_level(None), tasks)
    var parts = max(1, min(wanted, ceildiv(g.pixels(), LEAST)))
    var memory = alloc(Layout[Scalar[WIDE[dtype]]](count=size * parts))
    var sums = rebind[Data[WIDE[dtype]]](memory.unsafe_ptr())

    def task(index: Int) {var}:
        # All tasks of a part follow one another: a core keeps to its pixels (ops/parallel.mojo).
        var part, slot = divmod(index, tasks)
        var to = sums.unsafe_offset(part * size)
        if depthwise:
            # Whole rows of an image.
            var rows = g.n * g.p
            _depthwise(g, o, rows * part // parts, rows * (part + 1) // parts, slot * block, to)
        else:
            var first, last = g.pixels() * part // parts, g.pixels() * (part + 1) // parts
            # The panels of a block of filters follow one another.
            var group, within = divmod(slot, blocks * panels)
            var row, panel = divmod(within, panels)
            _block(g, o, first, last, group, row * block, block, panel * PANEL, to)

    over_cores(task, tasks * parts)

    def add(index: Int) {var}:
        _add_parts[dtype](sums, size, parts, index * CHUNK, min((index + 1) * CHUNK, size), o.dw)

    over_cores(add, ceildiv(size, CHUNK))
    dealloc(memory^)


@no_inline
def _add_parts[
    dtype: DType
](sums: Data[WIDE[dtype]], size: Int, parts: Int, first: Int, last: Int, dw: Data[dtype]):
    """Adds up the parts of the numbers `first` to `last`, and rounds them."""
    var whole = first + (last - first) // WIDTH * WIDTH
    for i in range(first, whole, WIDTH):
        var total = sums.unsafe_load[width=WIDTH](i)
        for part in range(1, parts):
            total += sums.unsafe_load[width=WIDTH](part * size + i)
        dw.unsafe_store(i, narrowed[dtype](total))
    for i in range(whole, last):
        var total = sums[unsafe_offset=i]
        for part in range(1, parts):
            total += sums[unsafe_offset=part * size + i]
        dw[unsafe_offset=i] = narrowed[dtype](total)


@no_inline
def _block[
    dtype: DType, //
](
    g: Geometry,
    o: WeightGrad[dtype],
    first: Int,
    last: Int,
    group: Int,
    filter: Int,
    most: Int,
    column: Int,
    to: Data[WIDE[dtype]],
):
    """Sums the pixels `first` to `last` for some filters of a group, and a panel of columns."""
    var rows = min(most, g.group_f() - filter)
    var columns = min(PANEL, g.depth() - column)
    var memory = alloc(
        Layout[Scalar[WIDE[dtype]]](count=(FILTERS + DEPTH) * PANEL + DEPTH * FILTERS)
    )
    var sums = rebind[Data[WIDE[dtype]]](memory.unsafe_ptr())
    var panel = sums.unsafe_offset(FILTERS * PANEL)
    var left = panel.unsafe_offset(DEPTH * PANEL)
    for i in range(FILTERS * PANEL + DEPTH * PANEL):  # no pixels; columns that do not count
        sums[unsafe_offset=i] = 0
    var f = group * g.group_f() + filter
    for begin in range(first, last, DEPTH):
        var count = min(DEPTH, last - begin)
        for m in range(count):
            _copy(o.dy.unsafe_offset((begin + m) * g.f + f), left.unsafe_offset(m * rows), rows)
        _copy_columns(g, o.x, begin, count, group * g.group_c(), column, columns, panel)
        multiply_rows[turned=True](left, rows, rows, panel, columns, count, sums, begin == first)
    for i in range(rows):
        _copy(
            sums.unsafe_offset(i * PANEL),
            to.unsafe_offset((f + i) * g.depth() + column),
            columns,
        )
    dealloc(memory^)


@no_inline
def _copy_columns[
    dtype: DType
](
    g: Geometry,
    x: Data[dtype],
    first: Int,
    count: Int,
    channel: Int,
    column: Int,
    columns: Int,
    panel: Data[WIDE[dtype]],
):
    """Copies what some columns see of `count` pixels from `first` on: panel[count, PANEL].

    The taps of a row of the window mostly lie side by side, and are copied as one.
    """
    var near = g.dilation_w == 1 and g.groups == 1
    var at = 0
    while at < columns:
        var tap, c = divmod(column + at, g.group_c())
        var r, s = divmod(tap, g.s)
        var length = min((g.s - s if near else 1) * g.group_c() - c, columns - at)
        var final = s + (c + length - 1) // g.group_c()
        var source = x.unsafe_offset(channel + c)
        var row, q = divmod(first, g.q)
        var to = panel.unsafe_offset(at)
        var left = count
        while left > 0:
            var n, p = divmod(row, g.p)
            var h = p * g.stride_h - g.pad_h + r * g.dilation_h
            var pixels = min(left, g.q - q)
            var height = 0 <= h < g.h
            var inside = _Inside(g, s, final) if height else _Inside()
            var line = source.unsafe_offset((n * g.h + h) * g.w * g.c)
            for i in range(q, q + pixels):
                var w = i * g.stride_w - g.pad_w + s * g.dilation_w
                if inside.first <= i < inside.end:
                    _copy(line.unsafe_offset(w * g.c), to, length)
                else:
                    for j in range(length):
                        var value = Scalar[WIDE[dtype]](0)
                        if height and 0 <= w + (c + j) // g.group_c() < g.w:
                            value = widened[WIDE[dtype]](line[unsafe_offset=w * g.c + j])
                        to[unsafe_offset=j] = value
                to = to.unsafe_offset(PANEL)
            left -= pixels
            row, q = row + 1, 0
        at += length


struct _Inside(TrivialRegisterPassable):
    """The pixels of a row of which some taps of a window's row all see something, not padding."""

    var first: Int
    """The first of them."""
    var end: Int
    """One beyond the last."""

    @always_inline
    def __init__(out self):
        """There are none."""
        self.first = self.end = 0

    @always_inline
    def __init__(out self, g: Geometry, s: Int, final: Int):
        """Finds them for the columns `s` to `final` of the window."""
        var before = g.pad_w - s * g.dilation_w
        var behind = g.w + g.pad_w - final * g.dilation_w
        self.first = min(g.q, max(0, ceildiv(before, g.stride_w)))
        self.end = max(self.first, min(g.q, ceildiv(behind, g.stride_w)))


@always_inline
def _copy[dtype: DType, wide: DType, //](source: Data[dtype], to: Data[wide], count: Int):
    """Copies numbers side by side, widened."""
    if count == PANEL:
        comptime for i in range(0, PANEL, WIDTH):
            to.unsafe_store(i, widened[wide](source.unsafe_load[width=WIDTH](i)))
        return
    var whole = count // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        to.unsafe_store(i, widened[wide](source.unsafe_load[width=WIDTH](i)))
    comptime if dtype == wide:
        if whole < count:
            var inside = iota[DType.int32, WIDTH]().lt(Int32(count - whole))
            var rest = masked_load[WIDTH](source.unsafe_offset(whole), inside, 0)
            masked_store(widened[wide](rest), to.unsafe_offset(whole), inside)
    else:
        for i in range(whole, count):
            to[unsafe_offset=i] = widened[wide](source[unsafe_offset=i])


def _depthwise[
    dtype: DType, //
](g: Geometry, o: WeightGrad[dtype], first: Int, last: Int, channel: Int, to: Data[WIDE[dtype]]):
    """Sums the rows of pixels `first` to `last` for CHANNELS channels."""
    var end = min(channel + CHANNELS, g.c)
    if end - channel == CHANNELS:
        _depthwise_vectors[4, WIDTH](g, o, first, last, channel, to)
    elif g.c >= WIDTH:
        # The last vector ends with the last channel: some results are computed twice.
        for c in range(channel, end, WIDTH):
            _depthwise_vectors[1, WIDTH](g, o, first, last, min(c, g.c - WIDTH), to)
    else:
        for c in range(channel, end):
            _depthwise_vectors[1, 1](g, o, first, last, c, to)


@no_inline
def _depthwise_vectors[
    dtype: DType, //, vectors: Int, width: Int
](g: Geometry, o: WeightGrad[dtype], first: Int, last: Int, channel: Int, to: Data[WIDE[dtype]]):
    """Sums the rows of pixels `first` to `last` for `vectors` vectors of channels."""
    comptime COUNT = vectors * width
    var taps = g.r * g.s
    var memory = alloc(Layout[Scalar[WIDE[dtype]]](count=taps * COUNT))
    var sums = rebind[Data[WIDE[dtype]]](memory.unsafe_ptr())
    for i in range(taps * COUNT):
        sums[unsafe_offset=i] = 0
    for row in range(first, last):
        var n, p = divmod(row, g.p)
        var gradient = o.dy.unsafe_offset(row * g.q * g.c + channel)
        for tap in range(taps):
            var r, s = divmod(tap, g.s)
            var h = p * g.stride_h - g.pad_h + r * g.dilation_h
            var inside = _Inside(g, s, s) if 0 <= h < g.h else _Inside()
            var before = g.pad_w - s * g.dilation_w
            var line = o.x.unsafe_offset(((n * g.h + h) * g.w - before) * g.c + channel)
            var here = sums.unsafe_offset(tap * COUNT)
            var total = Array[SIMD[WIDE[dtype], width], vectors](uninitialized=True)
            comptime for v in range(vectors):
                total[v] = here.unsafe_load[width=width](v * width)
            for q in range(inside.first, inside.end):
                comptime for v in range(vectors):
                    var a = widened[WIDE[dtype]](
                        gradient.unsafe_load[width=width](q * g.c + v * width)
                    )
                    var b = widened[WIDE[dtype]](
                        line.unsafe_load[width=width](q * g.stride_w * g.c + v * width)
                    )
                    total[v] = a.fma(b, total[v])
            # The padding is zeros: it gives NaN where dy is no finite number, as it does in im2col.
            for i in range(g.q - (inside.end - inside.first)):
                var q = i if i < inside.first else i + inside.end - inside.first
                comptime for v in range(vectors):
                    var a = widened[WIDE[dtype]](
                        gradient.unsafe_load[width=width](q * g.c + v * width)
                    )
                    total[v] = a.fma(0, total[v])
            comptime for v in range(vectors):
                here.unsafe_store(v * width, total[v])
    for tap in range(taps):
        for i in range(COUNT):
            to[unsafe_offset=(channel + i) * taps + tap] = sums[unsafe_offset=tap * COUNT + i]
    dealloc(memory^)
