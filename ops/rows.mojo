"""Softmax over the last axis of x[..., C], its logarithm and its gradient.

    softmax       y = exp(x - max) / sum(exp(x - max))
    log_softmax   y = x - max - log(sum(exp(x - max)))
    softmax_grad  dx = y * (dy - sum(dy * y))

A CPU gives each core some blocks of rows and runs vectors along them; a GPU gives each row a warp,
whose lanes read neighbours. Sums are float32, of float64 on a CPU float64; a row stays in the cache
between passes, so all are bound by memory. With C = 0 there is nothing to do.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import WARP_SIZE, block_idx, lane_id, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp
from max.runtime.asyncrt import parallelism_level
from std.bit import log2_floor
from std.math import ceildiv, exp, log
from std.sys import simd_width_of
from std.utils.numerics import isnan, neg_inf

from .functions64 import exponential64
from .operands import CHECKED, F32, F64, WIDE, Data, data, narrowed, widened
from .parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime ROWS_PER_BLOCK = 4
"""Warps, and so rows, of a GPU block."""


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

    over_cores(task, ceildiv(rows, block))


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


@always_inline
def exp_cpu[dtype: DType, width: SIMDLength, //](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Computes exp on a CPU, where std's gives 0 or 1 for NaN.

    Parameters:
        dtype: Float32 or float64.
        width: Lanes.

    Args:
        x: Any number in each lane.

    Returns:
        The exponentials; NaN for NaN.
    """
    comptime if dtype == F64:
        return rebind[SIMD[dtype, width]](exponential64(rebind[SIMD[F64, width]](x)))
    else:
        var narrow = rebind[SIMD[F32, width]](x)
        return isnan(x).select(x, rebind[SIMD[dtype, width]](exp(narrow)))


# Softmax


def softmax_cpu[
    dtype: DType, //, logarithm: Bool
](x: Data[dtype], y: Data[dtype], rows: Int, columns: Int):
    """Computes the softmax of each row on all cores.

    Parameters:
        dtype: Of the tensors: float32, bfloat16 or float64.
        logarithm: Whether to give its logarithm.

    Args:
        x: [rows, columns].
        y: Result, in the shape of x.
        rows: Rows.
        columns: Numbers of a row.
    """

    comptime assert WIDE[dtype].is_floating_point()

    def row(index: Int) {var}:
        var source = x.unsafe_offset(index * columns)
        var to = y.unsafe_offset(index * columns)
        var whole = columns // WIDTH * WIDTH

        var highest = SIMD[WIDE[dtype], WIDTH](neg_inf[WIDE[dtype]]())
        for c in range(0, whole, WIDTH):
            highest = max(highest, widened[WIDE[dtype]](source.unsafe_load[width=WIDTH](c)))
        var top = highest.reduce_max()
        for c in range(whole, columns):
            top = max(top, widened[WIDE[dtype]](source[unsafe_offset=c]))

        var sums = SIMD[WIDE[dtype], WIDTH](0)
        for c in range(0, whole, WIDTH):
            sums += exp_cpu(widened[WIDE[dtype]](source.unsafe_load[width=WIDTH](c)) - top)
        var sum = sums.reduce_add()
        for c in range(whole, columns):
            sum += exp_cpu(widened[WIDE[dtype]](source[unsafe_offset=c]) - top)

        var shift = sum if isnan(sum) else top + log(sum)
        for c in range(0, whole, WIDTH):
            var value = widened[WIDE[dtype]](source.unsafe_load[width=WIDTH](c))
            comptime if logarithm:
                to.unsafe_store(c, narrowed[dtype](value - shift))
            else:
                to.unsafe_store(c, narrowed[dtype](exp_cpu(value - top) / sum))
        for c in range(whole, columns):
            var value = widened[WIDE[dtype]](source[unsafe_offset=c])
            comptime if logarithm:
                to[unsafe_offset=c] = narrowed[dtype](value - shift)
            else:
                to[unsafe_offset=c] = narrowed[dtype](exp_cpu(value - top) / sum)

    over_rows(row, rows)


@__name(t"softmax_{dtype}")
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


def softmax_grad_cpu[
    dtype: DType, //
](dy: Data[dtype], y: Data[dtype], dx: Data[dtype], rows: Int, columns: Int):
    """Computes the gradient of each row's softmax on all cores.

    Parameters:
        dtype: Of the tensors: float32, bfloat16 or float64.

    Args:
        dy: The gradient of y [rows, columns].
        y: The softmax.
        dx: Result, in the shape of y.
        rows: Rows.
        columns: Numbers of a row.
    """
    comptime wide = WIDE[dtype]

    def row(index: Int) {var}:
        var gradient = dy.unsafe_offset(index * columns)
        var source = y.unsafe_offset(index * columns)
        var to = dx.unsafe_offset(index * columns)
        var whole = columns // WIDTH * WIDTH

        var sums = SIMD[wide, WIDTH](0)
        for c in range(0, whole, WIDTH):
            var value = widened[wide](source.unsafe_load[width=WIDTH](c))
            sums += widened[wide](gradient.unsafe_load[width=WIDTH](c)) * value
        var sum = sums.reduce_add()
        for c in range(whole, columns):
            var value = widened[wide](source[unsafe_offset=c])
            sum += widened[wide](gradient[unsafe_offset=c]) * value

        for c in range(0, whole, WIDTH):
            var value = widened[wide](source.unsafe_load[width=WIDTH](c))
            var rest = widened[wide](gradient.unsafe_load[width=WIDTH](c)) - sum
            to.unsafe_store(c, narrowed[dtype](value * rest))
        for c in range(whole, columns):
            var value = widened[wide](source[unsafe_offset=c])
            var rest = widened[wide](gradient[unsafe_offset=c]) - sum
            to[unsafe_offset=c] = narrowed[dtype](value * rest)

    over_rows(row, rows)


@__name(t"softmax_grad_{dtype}")
def softmax_grad_kernel[
    dtype: DType
](dy: Data[dtype], y: Data[dtype], dx: Data[dtype], rows: Int32, columns: Int32):
    """Computes the gradient of one row's softmax in each warp.

    Parameters:
        dtype: Of the tensors.

    Args:
        dy: The gradient of y [rows, columns].
        y: The softmax.
        dx: Result, in the shape of y.
        rows: Rows.
        columns: Numbers of a row.
    """
    var index = Int(block_idx.x) * ROWS_PER_BLOCK + Int(thread_idx.x) // WARP_SIZE
    if index >= Int(rows):
        return
    var gradient = dy.unsafe_offset(index * Int(columns))
    var source = y.unsafe_offset(index * Int(columns))
    var to = dx.unsafe_offset(index * Int(columns))
    var sum = Float32(0)
    for c in range(Int(lane_id()), Int(columns), WARP_SIZE):
        sum += gradient[unsafe_offset=c].cast[F32]() * source[unsafe_offset=c].cast[F32]()
    sum = warp.sum(sum)
    for c in range(Int(lane_id()), Int(columns), WARP_SIZE):
        var rest = gradient[unsafe_offset=c].cast[F32]() - sum
        to[unsafe_offset=c] = (source[unsafe_offset=c].cast[F32]() * rest).cast[dtype]()


@always_inline
def _softmax[
    target: StaticString, dtype: DType, logarithm: Bool
](x: Data[dtype], y: Data[dtype], size: Int, columns: Int, ctx: DeviceContext) raises:
    if size == 0:
        return
    var rows = size // columns
    comptime if target == "cpu":
        comptime assert CHECKED[dtype], "softmax: a CPU expects float32, bfloat16 or float64"
        softmax_cpu[logarithm](x, y, rows, columns)
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


@register("softmax_grad")
struct SoftmaxGrad:
    """Computes the gradient of softmax(x) by x from dy and from the softmax y[..., C]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        dx: OutputTensor,
        dy: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        y: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            dx: Result, in the shape of y.
            dy: The gradient of y.
            y: [..., C].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if y.size() == 0:
            return
        var columns = y.shape()[y.rank - 1]
        var rows = y.size() // columns
        comptime if target == "cpu":
            comptime assert CHECKED[
                dx.dtype
            ], "softmax_grad: a CPU expects float32, bfloat16 or float64"
            softmax_grad_cpu(data(dy), data(y), data(dx), rows, columns)
        else:
            ctx.enqueue_function[softmax_grad_kernel[dx.dtype]](
                data(dy),
                data(y),
                data(dx),
                Int32(rows),
                Int32(columns),
                grid_dim=ceildiv(rows, ROWS_PER_BLOCK),
                block_dim=ROWS_PER_BLOCK * WARP_SIZE,
            )
