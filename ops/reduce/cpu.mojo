"""Reductions on a CPU.

A CPU runs vectors along inner, up to 8 of them side by side; sums of 128 rows are added to others,
so that rounding does not grow with the rows. Where inner is 1, a row is folded into vectors. Few
large slabs are cut into parts for all cores.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, iota
from std.memory import unsafe_stack_allocation
from std.sys import simd_width_of
from std.sys.intrinsics import masked_store

from ..operands import F32, Data, narrowed, widened, widened_load
from ..parallel import over_cores
from .join import joined, nothing, over_vector

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a CPU's vector."""
comptime SLAB = 8
"""Vectors of inner that a CPU's core takes side by side."""
comptime BLOCK = 128
"""Rows whose sum is added to the sum of others."""
comptime PIECE = 131072
"""Numbers that are worth a task of their own."""
comptime ROOM = 4096
"""Numbers that the parts of slabs leave in all."""


@always_inline
def _rows[
    dtype: DType, //, kind: StaticString, vectors: Int, unroll: Int, masked: Bool = False
](x: Data[dtype], rows: Int, stride: Int, columns: Int = 0) -> Array[SIMD[F32, WIDTH], vectors]:
    """Joins rows of some vectors each; of a masked vector only `columns` are there."""
    var total = Array[SIMD[F32, WIDTH], vectors](fill=nothing[kind]())
    var inside = iota[DType.int32, WIDTH]().lt(Int32(columns))

    for start in range(0, rows, BLOCK):
        var stop = min(start + BLOCK, rows)
        var sums = Array[SIMD[F32, WIDTH], vectors * unroll](fill=nothing[kind]())
        var row = start
        while row + unroll <= stop:
            comptime for u in range(unroll):
                comptime for v in range(vectors):
                    comptime i = u * vectors + v
                    sums[i] = joined[kind](
                        sums[i],
                        widened_load[masked](
                            x.unsafe_offset((row + u) * stride + v * WIDTH), inside
                        ),
                    )
            row += unroll
        while row < stop:
            comptime for v in range(vectors):
                sums[v] = joined[kind](
                    sums[v], widened_load[masked](x.unsafe_offset(row * stride + v * WIDTH), inside)
                )
            row += 1
        comptime for u in range(unroll):
            comptime for v in range(vectors):
                total[v] = joined[kind](total[v], sums[u * vectors + v])
    return total^


@always_inline
def _row[dtype: DType, //, kind: StaticString](x: Data[dtype], length: Int) -> Float32:
    """Joins the numbers of a row."""
    comptime FOLD = 4 * WIDTH
    var folds = length // FOLD
    var four = _rows[kind, 4, 2](x, folds, FOLD)
    var rest = x.unsafe_offset(folds * FOLD)
    var left = length - folds * FOLD
    var one = _rows[kind, 1, 1](rest, left // WIDTH, WIDTH)
    var found = joined[kind](
        joined[kind](joined[kind](four[0], four[1]), joined[kind](four[2], four[3])), one[0]
    )
    var result = over_vector[kind](found)
    for i in range(left // WIDTH * WIDTH, left):
        result = joined[kind](result, widened(rest[unsafe_offset=i]))
    return result


@no_inline
def reduce_cpu[
    dtype: DType, into: DType, //, kind: StaticString
](x: Data[dtype], y: Data[into], outer: Int, reduced: Int, inner: Int, divisor: Float32):
    """Reduces on all cores.

    Parameters:
        dtype: Of x, float32 or bfloat16.
        into: Of y, likewise.
        kind: How numbers are joined: sum, amax or amin.

    Args:
        x: [outer, reduced, inner].
        y: The result[outer, inner].
        outer: See `x`.
        reduced: See `x`.
        inner: See `x`.
        divisor: Divides the result: 1, or `reduced` of a mean.
    """
    var flat = inner == 1
    var vectors = inner // WIDTH
    var per = ceildiv(vectors, max(1, ceildiv(vectors, SLAB)))  # vectors of a slab
    var whole = ceildiv(vectors, max(1, per))
    var slabs = 1 if flat else whole + (1 if inner > vectors * WIDTH else 0)
    var wanted = max(1, min(outer * reduced * inner // PIECE, 4 * parallelism_level(None)))
    # Parts of the rows, where there are too few slabs for all cores.
    var parts = min(ceildiv(wanted, outer * slabs), ceildiv(reduced, BLOCK))
    parts = max(1, min(parts, ROOM // (outer * inner)))
    var length = ceildiv(reduced, parts)
    var scratch = unsafe_stack_allocation[ROOM, Float32, alignment=64]()
    var left = rebind[Data[F32]](scratch)
    var units = outer * slabs * parts
    var tasks = min(wanted, units)

    def task(index: Int) {var}:
        for unit in range(index * units // tasks, (index + 1) * units // tasks):
            var part = unit % parts
            var slab = unit // parts % slabs
            var o = unit // (parts * slabs)
            var rows = max(0, min(length, reduced - part * length))
            var source = x.unsafe_offset((o * reduced + part * length) * inner)
            var to = o * inner
            var put = left.unsafe_offset(part * outer * inner)
            if flat:
                var value = _row[kind](source, rows)
                if parts == 1:
                    y[unsafe_offset=to] = narrowed[into](value / divisor)
                else:
                    put[unsafe_offset=to] = value
            elif slab == whole:
                var c = vectors * WIDTH
                var columns = inner - c
                var inside = iota[DType.int32, WIDTH]().lt(Int32(columns))
                var found = _rows[kind, 1, 4, True](source.unsafe_offset(c), rows, inner, columns)
                if parts == 1:
                    var value = narrowed[into](found[0] / divisor)
                    masked_store(value, y.unsafe_offset(to + c), inside)
                else:
                    masked_store(found[0], put.unsafe_offset(to + c), inside)
            else:
                var first = slab * per
                var count = min(per, vectors - first)
                comptime for n in range(1, SLAB + 1):
                    if count == n:
                        var c = first * WIDTH
                        var found = _rows[kind, n, max(1, SLAB // n)](
                            source.unsafe_offset(c), rows, inner
                        )
                        comptime for v in range(n):
                            var at = to + c + v * WIDTH
                            if parts == 1:
                                y.unsafe_store(at, narrowed[into](found[v] / divisor))
                            else:
                                put.unsafe_store(at, found[v])

    over_cores(task, tasks)
    if parts > 1:
        for i in range(outer * inner):
            var value = left[unsafe_offset=i]
            for part in range(1, parts):
                value = joined[kind](value, left[unsafe_offset=part * outer * inner + i])
            y[unsafe_offset=i] = narrowed[into](value / divisor)
