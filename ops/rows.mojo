"""Row-wise ops over x[..., C] along the last axis: softmax, log_softmax and layernorm.

    softmax      y = exp(x - max) / sum(exp(x - max))
    log_softmax  y = x - max - log(sum(exp(x - max)))
    layernorm    y = (x - mean) / sqrt(var + eps) * weight + bias   (Ba et al. 2016, section 3)

A CPU gives each core a block of rows and runs vectors along them; a GPU gives each row a warp,
whose lanes read neighbours. Statistics in float32 with two passes (the variance is that of
x - mean, never E[x^2] - mean^2); the row stays in the cache between passes, so both are bound by
memory. Layer norm on a GPU reads a row once, 16 bytes a thread at a time, and keeps it in the
registers of 8 to 32 lanes (C up to 1024 in 16 bits). Rows of C = 0 are no rows.
"""

from extensibility import InputTensor, OutputTensor, register
from max.algorithm import sync_parallelize
from max.gpu import WARP_SIZE, block_idx, lane_id, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from max.runtime.asyncrt import parallelism_level
from std.bit import log2_floor
from std.math import ceildiv, exp, log, sqrt
from std.sys import simd_width_of, size_of
from std.utils.numerics import neg_inf

from .operands import F32, Data, data

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime ROWS_PER_BLOCK = 4
"""Warps, and so rows, of a GPU block."""
comptime VECTOR_THREADS = 128
"""Threads of a block whose threads hold their row in registers."""


def over_rows[Body: def(Int) -> None](body: Body, rows: Int):
    """Calls `body` with each row on all cores, a few blocks of rows a core.

    Parameters:
        Body: A closure that takes the index of a row.

    Args:
        body: What a row goes through.
        rows: How many there are.
    """
    var block = ceildiv(rows, 4 * parallelism_level(None))

    def task(index: Int) {imm body, var block, var rows}:
        for row in range(index * block, min((index + 1) * block, rows)):
            body(row)

    sync_parallelize(task, ceildiv(rows, block))


# Softmax


def softmax_cpu[logarithm: Bool](x: Data[F32], y: Data[F32], rows: Int, columns: Int):
    """Computes the softmax of each row on all cores.

    Parameters:
        logarithm: Whether to give its logarithm.

    Args:
        x: [rows, columns].
        y: Result, in the shape of x.
        rows: Rows.
        columns: Numbers of a row.
    """

    def row(index: Int) {var}:
        var source = x.unsafe_offset(index * columns)
        var to = y.unsafe_offset(index * columns)
        var whole = columns // WIDTH * WIDTH

        var highest = SIMD[F32, WIDTH](neg_inf[F32]())
        for c in range(0, whole, WIDTH):
            highest = max(highest, source.unsafe_load[width=WIDTH](c))
        var top = highest.reduce_max()
        for c in range(whole, columns):
            top = max(top, source[unsafe_offset=c])

        var sums = SIMD[F32, WIDTH](0)
        for c in range(0, whole, WIDTH):
            var e = exp(source.unsafe_load[width=WIDTH](c) - top)
            to.unsafe_store(c, e)
            sums += e
        var sum = sums.reduce_add()
        for c in range(whole, columns):
            var e = exp(source[unsafe_offset=c] - top)
            to[unsafe_offset=c] = e
            sum += e

        comptime if logarithm:
            var shift = top + log(sum)
            for c in range(0, whole, WIDTH):
                to.unsafe_store(c, source.unsafe_load[width=WIDTH](c) - shift)
            for c in range(whole, columns):
                to[unsafe_offset=c] = source[unsafe_offset=c] - shift
        else:
            for c in range(0, whole, WIDTH):
                to.unsafe_store(c, to.unsafe_load[width=WIDTH](c) / sum)
            for c in range(whole, columns):
                to[unsafe_offset=c] = to[unsafe_offset=c] / sum

    over_rows(row, rows)


def softmax_kernel[
    dtype: DType, logarithm: Bool
](x: Data[dtype], y: Data[dtype], rows: Int32, columns: Int32):
    """Computes the softmax of one row in each warp.

    Parameters:
        dtype: Of x and y.
        logarithm: Whether to give its logarithm.

    Args:
        x: [rows, columns].
        y: Result, in the shape of x.
        rows: Rows.
        columns: Numbers of a row.
    """
    var index = Int(block_idx.x) * ROWS_PER_BLOCK + Int(thread_idx.x) // WARP_SIZE
    if index >= Int(rows):
        return
    var source = x.unsafe_offset(index * Int(columns))
    var to = y.unsafe_offset(index * Int(columns))
    var top = neg_inf[F32]()
    for c in range(Int(lane_id()), Int(columns), WARP_SIZE):
        top = max(top, source[unsafe_offset=c].cast[F32]())
    top = warp.max(top)
    var sum = Float32(0)
    for c in range(Int(lane_id()), Int(columns), WARP_SIZE):
        sum += exp(source[unsafe_offset=c].cast[F32]() - top)
    sum = warp.sum(sum)
    for c in range(Int(lane_id()), Int(columns), WARP_SIZE):
        var value = source[unsafe_offset=c].cast[F32]() - top
        comptime if logarithm:
            to[unsafe_offset=c] = (value - log(sum)).cast[dtype]()
        else:
            to[unsafe_offset=c] = (exp(value) / sum).cast[dtype]()


@always_inline
def _softmax[
    target: StaticString, dtype: DType, logarithm: Bool
](x: Data[dtype], y: Data[dtype], size: Int, columns: Int, ctx: DeviceContext) raises:
    if size == 0:
        return
    var rows = size // columns
    comptime if target == "cpu":
        comptime assert dtype == F32, "softmax: a CPU expects float32"
        softmax_cpu[logarithm](rebind[Data[F32]](x), rebind[Data[F32]](y), rows, columns)
    else:
        ctx.enqueue_function[softmax_kernel[dtype, logarithm]](
            x,
            y,
            Int32(rows),
            Int32(columns),
            grid_dim=ceildiv(rows, ROWS_PER_BLOCK),
            block_dim=ROWS_PER_BLOCK * WARP_SIZE,
        )


@register("softmax")
struct Softmax:
    """Computes the softmax of each row of x[..., C]; a row of -inf alone gives NaN, as in torch."""

    @staticmethod
    def execute[
        target: StaticString
    ](y: OutputTensor, x: InputTensor[dtype=y.dtype, rank=y.rank, ...], ctx: DeviceContext,) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result, in the shape of x.
            x: [..., C].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var columns = x.shape()[x.rank - 1]
        _softmax[target, y.dtype, False](data(x), data(y), x.size(), columns, ctx)


@register("log_softmax")
struct LogSoftmax:
    """Computes the logarithm of the softmax of each row of x[..., C]."""

    @staticmethod
    def execute[
        target: StaticString
    ](y: OutputTensor, x: InputTensor[dtype=y.dtype, rank=y.rank, ...], ctx: DeviceContext,) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result, in the shape of x.
            x: [..., C].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var columns = x.shape()[x.rank - 1]
        _softmax[target, y.dtype, True](data(x), data(y), x.size(), columns, ctx)


# Layer normalisation


def layernorm_cpu(
    x: Data[F32],
    weight: Data[F32],
    bias: Data[F32],
    y: Data[F32],
    rows: Int,
    columns: Int,
    eps: Float32,
):
    """Normalises each row on all cores.

    Args:
        x: [rows, columns].
        weight: [columns].
        bias: [columns].
        y: Result, in the shape of x.
        rows: Rows.
        columns: Numbers of a row.
        eps: Added to the variance.
    """

    def row(index: Int) {var}:
        var source = x.unsafe_offset(index * columns)
        var to = y.unsafe_offset(index * columns)
        var whole = columns // WIDTH * WIDTH

        var sums = SIMD[F32, WIDTH](0)
        for c in range(0, whole, WIDTH):
            sums += source.unsafe_load[width=WIDTH](c)
        var sum = sums.reduce_add()
        for c in range(whole, columns):
            sum += source[unsafe_offset=c]
        var mean = sum / Float32(columns)

        sums = 0
        for c in range(0, whole, WIDTH):
            var d = source.unsafe_load[width=WIDTH](c) - mean
            sums = d.fma(d, sums)
        var squares = sums.reduce_add()
        for c in range(whole, columns):
            var d = source[unsafe_offset=c] - mean
            squares += d * d
        var scale = 1 / sqrt(squares / Float32(columns) + eps)

        for c in range(0, whole, WIDTH):
            var value = (source.unsafe_load[width=WIDTH](c) - mean) * scale
            to.unsafe_store(
                c, value.fma(weight.unsafe_load[width=WIDTH](c), bias.unsafe_load[width=WIDTH](c))
            )
        for c in range(whole, columns):
            var value = (source[unsafe_offset=c] - mean) * scale
            to[unsafe_offset=c] = value * weight[unsafe_offset=c] + bias[unsafe_offset=c]

    over_rows(row, rows)


def layernorm_kernel[
    dtype: DType
](
    x: Data[dtype],
    weight: Data[F32],
    bias: Data[F32],
    y: Data[dtype],
    rows: Int32,
    columns: Int32,
    eps: Float32,
):
    """Normalises one row in each warp.

    Parameters:
        dtype: Of x and y.

    Args:
        x: [rows, columns].
        weight: [columns].
        bias: [columns].
        y: Result, in the shape of x.
        rows: Rows.
        columns: Numbers of a row.
        eps: Added to the variance.
    """
    var index = Int(block_idx.x) * ROWS_PER_BLOCK + Int(thread_idx.x) // WARP_SIZE
    if index >= Int(rows):
        return
    var source = x.unsafe_offset(index * Int(columns))
    var to = y.unsafe_offset(index * Int(columns))
    var sum = Float32(0)
    for c in range(Int(lane_id()), Int(columns), WARP_SIZE):
        sum += source[unsafe_offset=c].cast[F32]()
    var mean = warp.sum(sum) / Float32(columns)
    var squares = Float32(0)
    for c in range(Int(lane_id()), Int(columns), WARP_SIZE):
        var d = source[unsafe_offset=c].cast[F32]() - mean
        squares += d * d
    var scale = 1 / sqrt(warp.sum(squares) / Float32(columns) + eps)
    for c in range(Int(lane_id()), Int(columns), WARP_SIZE):
        var value = (source[unsafe_offset=c].cast[F32]() - mean) * scale
        value = value * weight[unsafe_offset=c] + bias[unsafe_offset=c]
        to[unsafe_offset=c] = value.cast[dtype]()


def layernorm_vector_kernel[
    dtype: DType, lanes: Int, vectors: Int
](
    x: Data[dtype],
    weight: Data[F32],
    bias: Data[F32],
    y: Data[dtype],
    rows: Int32,
    columns: Int32,
    eps: Float32,
):
    """Normalises one row in each group of lanes, in one pass: the row stays in registers.

    Parameters:
        dtype: Of x and y.
        lanes: Threads of a row: 8, 16 or 32.
        vectors: Vectors of 16 bytes of a thread; they cover the columns.

    Args:
        x: [rows, columns].
        weight: [columns].
        bias: [columns].
        y: Result, in the shape of x.
        rows: Rows.
        columns: Numbers of a row, a multiple of 16 bytes of them.
        eps: Added to the variance.
    """
    comptime wide = 16 // size_of[dtype]()
    comptime per_block = VECTOR_THREADS // lanes
    var lane = Int(thread_idx.x) % lanes
    var index = Int(block_idx.x) * per_block + Int(thread_idx.x) // lanes
    wait_on_dependent_grids()
    launch_dependent_grids()
    var inside = index < Int(rows)
    var source = x.unsafe_offset(index * Int(columns))
    var to = y.unsafe_offset(index * Int(columns))
    var values = Array[SIMD[F32, wide], vectors](fill=0)
    var sum = Float32(0)
    comptime for v in range(vectors):
        var c = (v * lanes + lane) * wide
        if inside and c < Int(columns):
            values[v] = source.unsafe_load[width=wide, alignment=16](c).cast[F32]()
            sum += values[v].reduce_add()
    var mean = over_lanes[lanes](sum) / Float32(columns)
    var squares = Float32(0)
    comptime for v in range(vectors):
        if (v * lanes + lane) * wide < Int(columns):
            values[v] -= mean
            squares += (values[v] * values[v]).reduce_add()
    var scale = 1 / sqrt(over_lanes[lanes](squares) / Float32(columns) + eps)
    comptime for v in range(vectors):
        var c = (v * lanes + lane) * wide
        if inside and c < Int(columns):
            var value = values[v] * scale
            value = value.fma(
                weight.unsafe_load[width=wide, alignment=16](c),
                bias.unsafe_load[width=wide, alignment=16](c),
            )
            to.unsafe_store[alignment=16](c, value.cast[dtype]())


@always_inline
def over_lanes[lanes: Int](value: Float32) -> Float32:
    """Sums over neighbouring lanes of a warp.

    Parameters:
        lanes: How many; a power of two.

    Args:
        value: Of this lane.

    Returns:
        The sum, in each of the lanes.
    """
    var sum = value
    comptime for i in range(log2_floor(lanes)):
        sum += warp.shuffle_xor(sum, UInt32(1 << i))
    return sum


def _enqueue_vectors[
    dtype: DType, lanes: Int, count: Int
](
    x: Data[dtype],
    weight: Data[F32],
    bias: Data[F32],
    y: Data[dtype],
    rows: Int,
    columns: Int,
    eps: Float32,
    ctx: DeviceContext,
) raises:
    ctx.enqueue_function[layernorm_vector_kernel[dtype, lanes, count]](
        x,
        weight,
        bias,
        y,
        Int32(rows),
        Int32(columns),
        eps,
        grid_dim=ceildiv(rows, VECTOR_THREADS // lanes),
        block_dim=VECTOR_THREADS,
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
    )


def _layernorm_gpu[
    dtype: DType
](
    x: Data[dtype],
    weight: Data[F32],
    bias: Data[F32],
    y: Data[dtype],
    rows: Int,
    columns: Int,
    eps: Float32,
    ctx: DeviceContext,
) raises:
    """Enqueues the kernel that holds a row in registers, or the one that takes any row."""
    comptime wide = 16 // size_of[dtype]()
    if columns % wide != 0 or columns > 32 * 4 * wide:
        ctx.enqueue_function[layernorm_kernel[dtype]](
            x,
            weight,
            bias,
            y,
            Int32(rows),
            Int32(columns),
            eps,
            grid_dim=ceildiv(rows, ROWS_PER_BLOCK),
            block_dim=ROWS_PER_BLOCK * WARP_SIZE,
        )
    elif columns <= 8 * wide:
        _enqueue_vectors[dtype, 8, 1](x, weight, bias, y, rows, columns, eps, ctx)
    elif columns <= 16 * wide:
        _enqueue_vectors[dtype, 16, 1](x, weight, bias, y, rows, columns, eps, ctx)
    elif columns <= 32 * wide:
        _enqueue_vectors[dtype, 32, 1](x, weight, bias, y, rows, columns, eps, ctx)
    elif columns <= 64 * wide:
        _enqueue_vectors[dtype, 32, 2](x, weight, bias, y, rows, columns, eps, ctx)
    else:
        _enqueue_vectors[dtype, 32, 4](x, weight, bias, y, rows, columns, eps, ctx)


@register("layernorm")
struct LayerNorm:
    """Normalises each row of x[..., C]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result, in the shape of x.
            x: [..., C].
            weight: [C].
            bias: [C].
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if x.size() == 0:
            return
        var columns = x.shape()[x.rank - 1]
        var rows = x.size() // columns
        comptime if target == "cpu":
            comptime assert y.dtype == F32, "layernorm: a CPU expects float32"
            layernorm_cpu(
                rebind[Data[F32]](data(x)),
                data(weight),
                data(bias),
                rebind[Data[F32]](data(y)),
                rows,
                columns,
                data(eps)[unsafe_offset=0],
            )
        else:
            _layernorm_gpu[y.dtype](
                data(x),
                data(weight),
                data(bias),
                data(y),
                rows,
                columns,
                data(eps)[unsafe_offset=0],
                ctx,
            )
