"""Sparse convolution on a GPU: y[m, f] = act(sum_j values[j] x[row(m, columns[j])] + bias[f]).

A block computes PIXELS output pixels for ROWS filters. It walks over the taps in chunks of
CHANNELS channels: the chunk is read from x along the channels (whole lines of memory), turned
over in shared memory, and each thread (one pixel, ROWS / 8 filters) adds the nonzeros of its
rows that fall into it. Columns ascend within a row, so one cursor a row suffices (after Gale et
al. 2020, arXiv:2006.10901, section 5). The result is turned back for whole-line stores.
Accumulation in float32. Bound by shared memory: one load for each multiplication.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from ..epilogue import Epilogue, activate
from ..geometry import Geometry
from ..operands import F32, Data, Operands

comptime THREADS = 256
"""Threads of a block."""
comptime PIXELS = 32
"""Output pixels of a block, one for each thread of a team."""
comptime ROWS = 64
"""Filters of a block."""
comptime CHANNELS = 64
"""Channels of x in shared memory at a time."""
comptime PER_THREAD = ROWS // (THREADS // PIXELS)
"""Filters of a thread."""
comptime PITCH = PIXELS + 1
"""Floats from one channel (or filter) to the next in shared memory; 1 more, against conflicts."""


def sparse_conv2d_gpu[
    dtype: DType, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype],
    columns: Data[DType.int32],
    row_starts: Data[DType.int32],
    ctx: DeviceContext,
) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, the nonzeros and y.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes.
        o: Tensors; w holds the nonzeros, filter by filter.
        columns: (r * S + s) * C + c of each nonzero, ascending in a filter.
        row_starts: Where the nonzeros of each filter begin; F + 1 numbers.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    ctx.enqueue_function[sparse_conv2d_kernel[dtype, epilogue]](
        o,
        g,
        columns,
        row_starts,
        grid_dim=(ceildiv(g.pixels(), PIXELS), ceildiv(g.f, ROWS)),
        block_dim=THREADS,
    )


@__name(t"sparse_conv2d_{epilogue.label()}_{dtype}")
def sparse_conv2d_kernel[
    dtype: DType, epilogue: Epilogue
](o: Operands[dtype], g: Geometry, columns: Data[DType.int32], row_starts: Data[DType.int32],):
    """Computes PIXELS pixels of ROWS filters in each block.

    Parameters:
        dtype: Of x, the nonzeros and y.
        epilogue: What the accumulator goes through.

    Args:
        o: Tensors; w holds the nonzeros, filter by filter.
        g: Sizes.
        columns: (r * S + s) * C + c of each nonzero, ascending in a filter.
        row_starts: Where the nonzeros of each filter begin; F + 1 numbers.
    """
    var t = Int(thread_idx.x)
    var pixel = t % PIXELS
    var first = Int(block_idx.x) * PIXELS
    var f0 = Int(block_idx.y) * ROWS
    var team_f = f0 + t // PIXELS * PER_THREAD
    var tile = unsafe_stack_allocation[
        CHANNELS * PITCH, Float32, address_space=AddressSpace.SHARED
    ]()
    var acc = Array[Float32, PER_THREAD](fill=0)
    var cursor = Array[Int32, PER_THREAD](fill=0)
    var end = Array[Int32, PER_THREAD](fill=0)
    comptime for i in range(PER_THREAD):
        if team_f + i < g.f:
            cursor[i] = row_starts[unsafe_offset=team_f + i]
            end[i] = row_starts[unsafe_offset=team_f + i + 1]

    for r in range(g.r):
        for s in range(g.s):
            for c0 in range(0, g.c, CHANNELS):
                barrier()
                for item in range(t, PIXELS * CHANNELS, THREADS):
                    var c = item % CHANNELS
                    var m = first + item // CHANNELS
                    var image = m // (g.p * g.q)
                    var h = m // g.q % g.p * g.stride_h - g.pad_h + r * g.dilation_h
                    var w = m % g.q * g.stride_w - g.pad_w + s * g.dilation_w
                    var value = Float32(0)
                    var inside = h >= 0 and h < g.h and w >= 0 and w < g.w
                    if inside and m < g.pixels() and c0 + c < g.c:
                        var at = ((image * g.h + h) * g.w + w) * g.c + c0 + c
                        value = o.x[unsafe_offset=at].cast[F32]()
                    tile[unsafe_offset=c * PITCH + item // CHANNELS] = value
                barrier()
                var chunk = Int32((r * g.s + s) * g.c + c0)
                var chunk_end = chunk + Int32(min(CHANNELS, g.c - c0))
                comptime for i in range(PER_THREAD):
                    while cursor[i] < end[i]:
                        var column = columns[unsafe_offset=Int(cursor[i])]
                        if column >= chunk_end:
                            break
                        var weight = o.w[unsafe_offset=Int(cursor[i])].cast[F32]()
                        var at = Int(column - chunk) * PITCH + pixel
                        acc[i] = weight.fma(tile[unsafe_offset=at], acc[i])
                        cursor[i] += 1

    barrier()
    comptime for i in range(PER_THREAD):
        tile[unsafe_offset=(t // PIXELS * PER_THREAD + i) * PITCH + pixel] = acc[i]
    barrier()
    for item in range(t, PIXELS * ROWS, THREADS):
        var f = f0 + item % ROWS
        var m = first + item // ROWS
        if m < g.pixels() and f < g.f:
            var value = tile[unsafe_offset=item % ROWS * PITCH + item // ROWS]
            value += o.bias[unsafe_offset=f]
            comptime if epilogue.adds:
                value += o.residual[unsafe_offset=m * g.f + f].cast[F32]()
            o.y[unsafe_offset=m * g.f + f] = activate[epilogue](value).cast[dtype]()
