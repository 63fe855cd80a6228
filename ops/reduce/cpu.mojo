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

from ..operands import F32, Data
from ..parallel import over_cores
from ..pointwise import Sources
from .join import joined, nothing, over_vector
from .results import Finish, Results
from .values import Terms, Values

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
    terms: Terms,
    folded: Bool,
    //,
    kind: StaticString,
    vectors: Int,
    unroll: Int,
    masked: Bool = False,
](place: Values[terms, folded], rows: Int, columns: Int = 0) -> Array[
    SIMD[terms.widest(), WIDTH], vectors * len(terms.words)
]:
    """Joins rows of some vectors each; of a masked vector only `columns` are there."""
    comptime results = len(terms.words)
    var total = Array[SIMD[terms.widest(), WIDTH], vectors * results](
        fill=nothing[kind, terms.widest()]()
    )
    var inside = iota[DType.int32, WIDTH]().lt(Int32(columns))

    for start in range(0, rows, BLOCK):
        var stop = min(start + BLOCK, rows)
        var sums = Array[SIMD[terms.widest(), WIDTH], vectors * results * unroll](
            fill=nothing[kind, terms.widest()]()
        )
        var row = start
        comptime for many in [unroll, 1]:  # several rows, and the last ones one by one
            while row + many <= stop:
                comptime for u in range(many):
                    comptime for v in range(vectors):
                        var values = Array[SIMD[terms.widest(), WIDTH], len(terms.dtypes)](fill=0)
                        var at = place.at(0, row + u, v * WIDTH)
                        at.load[WIDTH, still=True, masked=masked](values, inside)
                        at.load[WIDTH, still=False, masked=masked](values, inside)
                        comptime for k in range(results):
                            comptime i = (u * vectors + v) * results + k
                            sums[i] = joined[kind](sums[i], place.term[k](values))
                row += many
        comptime for u in range(unroll):
            comptime for i in range(vectors * results):
                total[i] = joined[kind](total[i], sums[u * vectors * results + i])
    return total^


@always_inline
def _row[
    terms: Terms, //, kind: StaticString
](place: Values[terms, True], length: Int) -> Array[Scalar[terms.widest()], len(terms.words)]:
    """Joins the numbers of a row."""
    comptime results = len(terms.words)
    comptime FOLD = 4 * WIDTH
    var folds = length // FOLD
    var four = _rows[kind, 4, 2](place.of_columns(FOLD), folds)
    var left = length - folds * FOLD
    var rest = place.at(0, folds * FOLD, 0)
    var one = _rows[kind, 1, 1](rest.of_columns(WIDTH), left // WIDTH)
    var found = Array[Scalar[terms.widest()], results](fill=0)
    comptime for k in range(results):
        var first = joined[kind](four[k], four[results + k])
        var second = joined[kind](four[2 * results + k], four[3 * results + k])
        found[k] = over_vector[kind](joined[kind](joined[kind](first, second), one[k]))
    for i in range(left // WIDTH * WIDTH, left):
        var values = Array[Scalar[terms.widest()], len(terms.dtypes)](fill=0)
        var at = rest.at(0, i, 0)
        at.load[1, still=True](values)
        at.load[1, still=False](values)
        comptime for k in range(results):
            found[k] = joined[kind](found[k], place.term[k](values))
    return found^


@always_inline
def _divided[
    wide: DType, width: SIMDLength, count: Int, //
](found: Array[SIMD[wide, width], count], by: Scalar[wide]) -> Array[SIMD[wide, width], count]:
    """Divides the sums of means."""
    var left = found.copy()
    comptime for k in range(count):
        left[k] /= by
    return left^


@no_inline
def reduce_cpu[
    finish: Finish, //, kind: StaticString, terms: Terms
](
    sources: Sources[len(terms.dtypes)],
    results: Results[finish],
    outer: Int,
    reduced: Int,
    inner: Int,
    divisor: Int,
):
    """Reduces on all cores.

    Parameters:
        finish: What is written.
        kind: How numbers are joined: sum, amax or amin.
        terms: What is reduced.

    Args:
        sources: The tensors of [outer, reduced, inner].
        results: What is written, each [outer, inner].
        outer: See `sources`.
        reduced: See `sources`.
        inner: See `sources`.
        divisor: Divides the results: 1, or `reduced` of a mean.
    """
    comptime wide = terms.widest()
    comptime count = len(terms.words)
    comptime most = SLAB // count
    var by = Scalar[wide](divisor)
    var flat = inner == 1
    var vectors = inner // WIDTH
    var per = ceildiv(vectors, max(1, ceildiv(vectors, most)))  # vectors of a slab
    var whole = ceildiv(vectors, max(1, per))
    var slabs = 1 if flat else whole + (1 if inner > vectors * WIDTH else 0)
    var wanted = max(1, min(outer * reduced * inner // PIECE, 4 * parallelism_level(None)))
    # Parts of the rows, where there are too few slabs for all cores.
    var parts = min(ceildiv(wanted, outer * slabs), ceildiv(reduced, BLOCK))
    parts = max(1, min(parts, ROOM // (count * outer * inner)))
    var length = ceildiv(reduced, parts)
    var scratch = unsafe_stack_allocation[ROOM, Scalar[wide], alignment=64]()
    var left = rebind[Data[wide]](scratch)
    var units = outer * slabs * parts
    var tasks = min(wanted, units)

    def task(index: Int) {var}:
        for unit in range(index * units // tasks, (index + 1) * units // tasks):
            var part = unit % parts
            var slab = unit // parts % slabs
            var o = unit // (parts * slabs)
            var rows = max(0, min(length, reduced - part * length))
            var to = o * inner
            var put = left.unsafe_offset(part * count * outer * inner)
            if flat:
                var place = Values[terms, True](sources, reduced, 1)
                var found = _row[kind](place.at(o, part * length, 0), rows)
                if parts == 1:
                    results.write(to, _divided(found, by))
                else:
                    comptime for k in range(count):
                        put[unsafe_offset=k * outer * inner + to] = found[k]
                continue
            var place = Values[terms, False](sources, reduced, inner)
            var first = slab * per
            var c = first * WIDTH
            if slab == whole:
                c = vectors * WIDTH
                var columns = inner - c
                var inside = iota[DType.int32, WIDTH]().lt(Int32(columns))
                var found = _rows[kind, 1, max(1, 4 // count), True](
                    place.at(o, part * length, c), rows, columns
                )
                if parts == 1:
                    results.write[masked=True](to + c, _divided(found, by), inside)
                else:
                    comptime for k in range(count):
                        var at = k * outer * inner + to + c
                        masked_store(found[k], put.unsafe_offset(at), inside)
            else:
                var several = min(per, vectors - first)
                comptime for n in range(1, most + 1):
                    if several == n:
                        var found = _rows[kind, n, max(1, SLAB // (n * count))](
                            place.at(o, part * length, c), rows
                        )
                        comptime for v in range(n):
                            var at = to + c + v * WIDTH
                            var vector = Array[SIMD[wide, WIDTH], count](fill=0)
                            comptime for k in range(count):
                                vector[k] = found[v * count + k]
                            if parts == 1:
                                results.write(at, _divided(vector, by))
                            else:
                                comptime for k in range(count):
                                    put.unsafe_store(k * outer * inner + at, vector[k])

    over_cores(task, tasks)
    if parts > 1:
        for i in range(outer * inner):
            var found = Array[Scalar[wide], count](fill=0)
            comptime for k in range(count):
                var from_ = left.unsafe_offset(k * outer * inner + i)
                found[k] = from_[unsafe_offset=0]
                for part in range(1, parts):
                    var other = from_[unsafe_offset=part * count * outer * inner]
                    found[k] = joined[kind](found[k], other)
            results.write(i, _divided(found, by))
