"""The gradients of a layer norm on a CPU.

A task takes a part of the rows, and goes over each row in vectors: for the means, the deviations, and
the results. dy and x stay in the first-level cache between these passes, and so do the part's sums of
dweight and dbias. Bound by memory.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, sqrt

from ..operands import F32, Data, narrowed, widened
from ..parallel import over_cores
from ..rows import WIDTH
from .tensors import NormGrad, NormGradSizes

comptime LEAST = 8
"""Rows of a part at least."""
comptime CHUNK = 256
"""Columns whose parts a task adds up."""


def layer_norm_grad_cpu[
    x_dtype: DType, dy_dtype: DType, dx_dtype: DType, //
](o: NormGrad[x_dtype, dy_dtype, dx_dtype], g: NormGradSizes):
    """Computes the gradients on all cores.

    Parameters:
        x_dtype: Of x: float32 or bfloat16, as the other two.
        dy_dtype: Of dy.
        dx_dtype: Of dx.

    Args:
        o: Tensors.
        g: Sizes.
    """
    var rows = Int(g.rows)
    var columns = Int(g.columns)
    # Four tasks a core even out their times.
    var parts = min(Int(g.parts), 4 * parallelism_level(None), ceildiv(rows, LEAST))

    def task(part: Int) {var}:
        var sums = o.room.unsafe_offset(part * 2 * columns)
        for c in range(2 * columns):
            sums[unsafe_offset=c] = 0
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            _row(
                o.x.unsafe_offset(row * columns),
                o.dy.unsafe_offset(row * columns),
                o.weight,
                o.dx.unsafe_offset(row * columns),
                sums,
                columns,
                g.eps,
            )

    over_cores(task, parts)

    def add(index: Int) {var}:
        for c in range(index * CHUNK, min((index + 1) * CHUNK, columns)):
            var along, total = Float32(0), Float32(0)
            for part in range(parts):
                along += o.room[unsafe_offset=2 * part * columns + c]
                total += o.room[unsafe_offset=(2 * part + 1) * columns + c]
            o.dweight[unsafe_offset=c] = along
            o.dbias[unsafe_offset=c] = total

    over_cores(add, ceildiv(columns, CHUNK))


@always_inline
def _row[
    x_dtype: DType, dy_dtype: DType, dx_dtype: DType, //
](
    x: Data[x_dtype],
    dy: Data[dy_dtype],
    weight: Data[F32],
    dx: Data[dx_dtype],
    sums: Data[F32],
    columns: Int,
    eps: Float32,
):
    """Computes dx of a row, and adds what it gives to dweight and dbias: sums[2, columns]."""
    var whole = columns // WIDTH * WIDTH
    var share = 1 / Float32(columns)

    var mean, total = Float32(0), Float32(0)
    comptime for width in [WIDTH, 1]:
        var some, more = SIMD[F32, width](0), SIMD[F32, width](0)
        for c in range(0 if width > 1 else whole, whole if width > 1 else columns, width):
            some += widened(x.unsafe_load[width=width](c))
            var g = widened(dy.unsafe_load[width=width](c))
            more = g.fma(weight.unsafe_load[width=width](c), more)
        mean += some.reduce_add()
        total += more.reduce_add()
    mean *= share
    total *= share

    var squares, along = Float32(0), Float32(0)
    comptime for width in [WIDTH, 1]:
        var some, more = SIMD[F32, width](0), SIMD[F32, width](0)
        for c in range(0 if width > 1 else whole, whole if width > 1 else columns, width):
            var d = widened(x.unsafe_load[width=width](c)) - mean
            var g = widened(dy.unsafe_load[width=width](c)) * weight.unsafe_load[width=width](c)
            some = d.fma(d, some)
            more = d.fma(g, more)
        squares += some.reduce_add()
        along += more.reduce_add()
    var scale = 1 / sqrt(squares * share + eps)
    along *= scale * share

    comptime for width in [WIDTH, 1]:
        for c in range(0 if width > 1 else whole, whole if width > 1 else columns, width):
            var normed = (widened(x.unsafe_load[width=width](c)) - mean) * scale
            var g = widened(dy.unsafe_load[width=width](c))
            var value = g * weight.unsafe_load[width=width](c) - total - normed * along
            dx.unsafe_store(c, narrowed[dx_dtype](value * scale))
            sums.unsafe_store(c, g.fma(normed, sums.unsafe_load[width=width](c)))
            sums.unsafe_store(columns + c, sums.unsafe_load[width=width](columns + c) + g)
