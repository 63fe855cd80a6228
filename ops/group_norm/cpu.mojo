"""Group norm on a CPU, in two passes over an image, both by all cores.

The first finds the moments of each channel, vectors along channels: of 32 rows at a time, which the
nearest cache holds, their mean and then their squared distances to it. Channels are joined to groups,
and parts of an image later to the image. The second pass normalises.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, iota, sqrt
from std.memory import unsafe_stack_allocation
from std.sys import simd_width_of

from ..epilogue import Epilogue, Output
from ..operands import F32, Data, widened_load
from ..parallel import over_cores
from .config import PARTIAL, GroupNormSizes, GroupNormTensors, Moments

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime SLAB = 8
"""Vectors of channels that a core takes side by side."""
comptime ROWS = 32
"""Rows whose moments are found at a time."""
comptime PIECE = 65536
"""Numbers that are worth a task of their own."""


@always_inline
def _moments[
    dtype: DType, //, vectors: Int, masked: Bool = False
](x: Data[dtype], rows: Int, stride: Int, columns: Int, mean: Data[F32], squares: Data[F32]):
    """Finds the moments of some vectors of channels; of a masked one only `columns` are there."""
    comptime unroll = max(1, 4 // vectors)
    var inside = iota[DType.int32, WIDTH]().lt(Int32(columns))

    var found = Array[Moments[WIDTH], vectors](fill=Moments[WIDTH]())
    for start in range(0, rows, ROWS):
        var stop = min(start + ROWS, rows)
        var count = Float32(stop - start)
        var sums = Array[SIMD[F32, WIDTH], vectors * unroll](fill=0)
        var row = start
        while row + unroll <= stop:
            comptime for u in range(unroll):
                comptime for v in range(vectors):
                    sums[u * vectors + v] += widened_load[masked](
                        x.unsafe_offset((row + u) * stride + v * WIDTH), inside
                    )
            row += unroll
        while row < stop:
            comptime for v in range(vectors):
                sums[v] += widened_load[masked](x.unsafe_offset(row * stride + v * WIDTH), inside)
            row += 1
        var means = Array[SIMD[F32, WIDTH], vectors](fill=0)
        comptime for v in range(vectors):
            comptime for u in range(1, unroll):
                sums[v] += sums[u * vectors + v]
            means[v] = sums[v] / count
        sums = Array[SIMD[F32, WIDTH], vectors * unroll](fill=0)
        row = start
        while row + unroll <= stop:
            comptime for u in range(unroll):
                comptime for v in range(vectors):
                    var d = (
                        widened_load[masked](
                            x.unsafe_offset((row + u) * stride + v * WIDTH), inside
                        )
                        - means[v]
                    )
                    sums[u * vectors + v] = d.fma(d, sums[u * vectors + v])
            row += unroll
        while row < stop:
            comptime for v in range(vectors):
                var d = (
                    widened_load[masked](x.unsafe_offset(row * stride + v * WIDTH), inside)
                    - means[v]
                )
                sums[v] = d.fma(d, sums[v])
            row += 1
        comptime for v in range(vectors):
            comptime for u in range(1, unroll):
                sums[v] += sums[u * vectors + v]
            found[v].join(Moments[WIDTH](count, means[v], sums[v]))
    comptime for v in range(vectors):
        mean.unsafe_store(v * WIDTH, found[v].mean)
        squares.unsafe_store(v * WIDTH, found[v].squares)


@always_inline
def _sum(x: Data[F32], count: Int) -> Float32:
    """Adds numbers up."""
    var sums = SIMD[F32, WIDTH](0)
    var whole = count // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        sums += x.unsafe_load[width=WIDTH](i)
    var sum = sums.reduce_add()
    for i in range(whole, count):
        sum += x[unsafe_offset=i]
    return sum


@always_inline
def _distances(x: Data[F32], mean: Float32, count: Int) -> Float32:
    """Adds the squares of x - mean up."""
    var sums = SIMD[F32, WIDTH](0)
    var whole = count // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        var d = x.unsafe_load[width=WIDTH](i) - mean
        sums = d.fma(d, sums)
    var sum = sums.reduce_add()
    for i in range(whole, count):
        var d = x[unsafe_offset=i] - mean
        sum += d * d
    return sum


@always_inline
def _find[
    dtype: DType, //
](
    o: GroupNormTensors[dtype],
    g: GroupNormSizes,
    image: Int,
    part: Int,
    first: Int,
    rows: Int,
    mean: Data[F32],
    squares: Data[F32],
):
    """Finds the moments of each group in rows of an image."""
    var channels, members = Int(g.channels), Int(g.members)
    var source = o.x.unsafe_offset((image * Int(g.pixels) + first) * channels)
    var entries = Int(g.groups()) * Int(g.entries) * image + part

    def entry(group: Int) {var} -> Data[F32]:
        return o.partials.unsafe_offset((entries + group * Int(g.entries)) * PARTIAL)

    for group in range(Int(g.groups())):
        entry(group).unsafe_store(SIMD[F32, 2](0))
        entry(group)[unsafe_offset=2] = 0
    var c = 0
    while c < channels:
        var left = channels - c
        var at = source.unsafe_offset(c)
        var count = WIDTH
        if left >= SLAB * WIDTH:
            count = SLAB * WIDTH
            _moments[SLAB](at, rows, channels, 0, mean, squares)
        elif left >= 4 * WIDTH:
            count = 4 * WIDTH
            _moments[4](at, rows, channels, 0, mean, squares)
        elif left >= 2 * WIDTH:
            count = 2 * WIDTH
            _moments[2](at, rows, channels, 0, mean, squares)
        elif left >= WIDTH:
            _moments[1](at, rows, channels, 0, mean, squares)
        else:
            count = left
            _moments[1, True](at, rows, channels, left, mean, squares)
        var stop = c + count
        var at_channel = 0
        while c < stop:
            var group = c // members
            var several = min(stop, (group + 1) * members) - c
            var means = mean.unsafe_offset(at_channel)
            var middle = _sum(means, several) / Float32(several)
            var spread = _distances(means, middle, several) * Float32(rows)
            spread += _sum(squares.unsafe_offset(at_channel), several)
            var to = entry(group)
            var all = Moments[1](to[unsafe_offset=0], to[unsafe_offset=1], to[unsafe_offset=2])
            all.join(Moments[1](Float32(rows * several), middle, spread))
            to[unsafe_offset=0] = all.count
            to[unsafe_offset=1] = all.mean
            to[unsafe_offset=2] = all.squares
            c += several
            at_channel += several


@always_inline
def _normalise[
    dtype: DType, //, epilogue: Epilogue
](
    o: GroupNormTensors[dtype],
    g: GroupNormSizes,
    image: Int,
    parts: Int,
    first: Int,
    rows: Int,
    mean: Data[F32],
    scale: Data[F32],
):
    """Normalises rows of an image, a slab of channels after another."""
    var channels, members = Int(g.channels), Int(g.members)
    var start = (image * Int(g.pixels) + first) * channels
    var output = Output[epilogue](o.bias, o.y, o.y)
    for c0 in range(0, channels, SLAB * WIDTH):
        var count = min(SLAB * WIDTH, channels - c0)
        var c = c0
        while c < c0 + count:
            var group = c // members
            var stop = min(c0 + count, (group + 1) * members)
            var at = (image * Int(g.groups()) + group) * Int(g.entries) * PARTIAL
            var all = Moments[1]()
            for part in range(parts):
                var from_ = o.partials.unsafe_offset(at + part * PARTIAL)
                all.join(
                    Moments[1](
                        from_[unsafe_offset=0], from_[unsafe_offset=1], from_[unsafe_offset=2]
                    )
                )
            var factor = 1 / sqrt(all.squares[0] / all.count + g.eps)
            while c < stop:
                mean[unsafe_offset=c - c0] = all.mean[0]
                scale[unsafe_offset=c - c0] = factor * o.weight[unsafe_offset=c]
                c += 1
        var bias = o.bias.unsafe_offset(c0)
        var whole = count // WIDTH * WIDTH
        var inside = iota[DType.int32, WIDTH]().lt(Int32(count - whole))
        for row in range(rows):
            var at = start + row * channels + c0
            comptime for masked in [False, True]:
                for i in range(whole if masked else 0, count if masked else whole, WIDTH):
                    var x = widened_load[masked](o.x.unsafe_offset(at + i), inside)
                    var value = (x - mean.unsafe_load[width=WIDTH](i)).fma(
                        scale.unsafe_load[width=WIDTH](i),
                        widened_load[masked](bias.unsafe_offset(i), inside),
                    )
                    output.store[masked](value, at + i, inside)


@no_inline
def group_norm_cpu[
    dtype: DType, //, epilogue: Epilogue
](o: GroupNormTensors[dtype], g: GroupNormSizes):
    """Normalises on all cores.

    Parameters:
        dtype: Of the tensors, float32 or bfloat16.
        epilogue: What follows the norm: an activation, or none.

    Args:
        o: Tensors.
        g: Sizes.
    """
    var images, pixels = Int(g.images), Int(g.pixels)
    var numbers = images * pixels * Int(g.channels)
    var wanted = max(1, min(numbers // PIECE, 4 * parallelism_level(None)))
    var parts = max(1, min(ceildiv(wanted, images), ceildiv(pixels, ROWS)))
    parts = min(parts, Int(g.entries))
    var length = ceildiv(pixels, parts)
    parts = ceildiv(pixels, length)
    var units = images * parts
    var tasks = min(wanted, units)

    def task[second: Bool](index: Int) {var}:
        var scratch = unsafe_stack_allocation[2 * SLAB * WIDTH, Float32, alignment=64]()
        var one = rebind[Data[F32]](scratch)
        var two = one.unsafe_offset(SLAB * WIDTH)
        for unit in range(index * units // tasks, (index + 1) * units // tasks):
            var image, part = unit // parts, unit % parts
            var first = part * length
            var rows = min(length, pixels - first)
            comptime if second:
                _normalise[epilogue](o, g, image, parts, first, rows, one, two)
            else:
                _find(o, g, image, part, first, rows, one, two)

    def find(index: Int) {var}:
        task[False](index)

    def normalise(index: Int) {var}:
        task[True](index)

    over_cores(find, tasks)
    over_cores(normalise, tasks)
