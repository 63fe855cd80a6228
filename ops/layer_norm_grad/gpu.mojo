"""The gradients of a layer norm on a GPU.

As many blocks as run at the same time take rows in turns. The lanes of a row, 8 to 32 or some warps,
hold it in their registers, 4 or 8 neighbouring numbers in a vector, and the next row is on its way
meanwhile. A thread meets the same columns in every row, so it adds up dweight and dbias in registers,
too. At the end a block adds up those of its threads, as one part of the room; a second launch adds the
parts. Rows that no threads hold, of more than 4096 numbers or not whole vectors, take a block each,
three passes, and their sums in the room.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.bit import log2_floor
from std.math import ceildiv, rsqrt
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..launch import launch
from ..operands import ALIGN, F32, Data, Shared, widened
from ..rows import over_lanes
from .tensors import NormGrad, NormGradSizes

comptime THREADS = 256
"""Threads of a block."""
comptime GROUP = 32
"""Lanes that exchange numbers without shared memory, at most."""
comptime COLUMNS = 32
"""Columns whose parts a block adds up."""
comptime SLICES = 32
"""Threads that share the parts of a column."""
comptime WIDTH = 4
"""Numbers of a vector; 8 in short rows of 16 bits."""


@always_inline
def over_row[lanes: Int](pair: SIMD[F32, 2], room: Shared[F32]) -> SIMD[F32, 2]:
    """Sums two numbers over the threads of a row.

    Parameters:
        lanes: How many: 8, 16, 32 or some warps.

    Args:
        pair: Of this thread.
        room: Two numbers for each 32 threads of the block, which nobody has read since the last
            barrier but one.

    Returns:
        The sums, in each of the threads.
    """
    comptime near = min(lanes, GROUP)
    var sums = SIMD[F32, 2](over_lanes[near](pair[0]), over_lanes[near](pair[1]))
    comptime if lanes > GROUP:
        if Int(thread_idx.x) % GROUP == 0:
            room.unsafe_store[alignment=8](Int(thread_idx.x) // GROUP * 2, sums)
        barrier()
        var first = Int(thread_idx.x) // lanes * (lanes // GROUP)
        sums = 0
        comptime for i in range(lanes // GROUP):
            sums += room.unsafe_load[width=2, alignment=8]((first + i) * 2)
    return sums


@__name(t"layer_norm_grad_{lanes}x{vectors}_{x}_{dy}_{dx}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(blocks),
)
def vector_kernel[
    x: DType, dy: DType, dx: DType, lanes: Int, vectors: Int, width: Int, blocks: Int
](o: NormGrad[x, dy, dx], g: NormGradSizes):
    """Computes rows in turns, one in each group of lanes, and the block's part of the sums.

    Parameters:
        x: The dtype of x.
        dy: The dtype of dy.
        dx: The dtype of dx.
        lanes: Threads of a row: 8, 16, 32 or some warps.
        vectors: Vectors of a thread; they cover the columns.
        width: Numbers of a vector.
        blocks: How many blocks a multiprocessor shall hold.

    Args:
        o: Tensors.
        g: Sizes; the columns are whole vectors.
    """
    comptime STEP = lanes * width
    comptime ROWS = THREADS // lanes
    comptime WARPS = THREADS // GROUP
    var columns = Int(g.columns)
    var first = Int(thread_idx.x) % lanes * width
    var share = 1 / Float32(columns)
    var exchange = unsafe_stack_allocation[
        4 * WARPS, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var row = Int(block_idx.x) * ROWS + Int(thread_idx.x) // lanes
    var turns = Int(grid_dim.x) * ROWS
    var next_x = o.x.unsafe_offset(row * columns + first)
    var next_dy = o.dy.unsafe_offset(row * columns + first)
    var to = o.dx.unsafe_offset(row * columns + first)
    var held_x = Array[SIMD[x, width], vectors](fill=0)
    var held_dy = Array[SIMD[dy, width], vectors](fill=0)
    var weight = Array[SIMD[F32, width], vectors](fill=0)
    var dweight = Array[SIMD[F32, width], vectors](fill=0)
    var dbias = Array[SIMD[F32, width], vectors](fill=0)
    wait_on_dependent_grids()
    launch_dependent_grids()
    comptime for v in range(vectors):
        if first + v * STEP < columns:
            weight[v] = o.weight.unsafe_load[width=width, alignment=16](first + v * STEP)
            if row < Int(g.rows):
                held_x[v] = _load[width](next_x, v * STEP)
                held_dy[v] = _load[width](next_dy, v * STEP)

    # All lanes of a block take as many turns: they exchange sums. Behind the last row and the last
    # column x and dy are zeros, so that no sum needs a choice.
    var turn = Int(block_idx.x) * ROWS
    while turn < Int(g.rows):
        var here = Array[SIMD[F32, width], vectors](fill=0)
        var dyes = Array[SIMD[F32, width], vectors](fill=0)
        var sums = SIMD[F32, 2](0)
        comptime for v in range(vectors):
            here[v] = widened(held_x[v])
            dyes[v] = widened(held_dy[v])
            sums += SIMD[F32, 2](here[v].reduce_add(), (dyes[v] * weight[v]).reduce_add())
        var inside = row < Int(g.rows)
        row += turns
        turn += turns
        next_x = next_x.unsafe_offset(turns * columns)
        next_dy = next_dy.unsafe_offset(turns * columns)
        comptime for v in range(vectors):
            held_x[v] = 0
            held_dy[v] = 0
            if row < Int(g.rows) and first + v * STEP < columns:
                held_x[v] = _load[width](next_x, v * STEP)
                held_dy[v] = _load[width](next_dy, v * STEP)
        var means = over_row[lanes](sums, exchange) * share

        sums = 0
        comptime for v in range(vectors):
            if first + v * STEP < columns:
                here[v] -= means[0]
                var squares = (here[v] * here[v]).reduce_add()
                sums += SIMD[F32, 2](squares, (here[v] * dyes[v] * weight[v]).reduce_add())
        sums = over_row[lanes](sums, exchange.unsafe_offset(2 * WARPS)) * share
        var scale = rsqrt(sums[0] + g.eps) if inside else 0
        var along = sums[1] * scale

        comptime for v in range(vectors):
            var normed = here[v] * scale
            dweight[v] = dyes[v].fma(normed, dweight[v])
            dbias[v] += dyes[v]
            if inside and first + v * STEP < columns:
                var value = dyes[v] * weight[v] - means[1] - normed * along
                to.unsafe_store[alignment=ALIGN[dx, width]](v * STEP, (value * scale).cast[dx]())
        to = to.unsafe_offset(turns * columns)

    var part = o.room.unsafe_offset(Int(block_idx.x) * 2 * columns)
    comptime if ROWS == 1:
        comptime for v in range(vectors):
            if first + v * STEP < columns:
                part.unsafe_store[alignment=16](first + v * STEP, dweight[v])
                part.unsafe_store[alignment=16](columns + first + v * STEP, dbias[v])
        return
    # Lanes of a warp that have the same columns, then those of the block's other warps.
    comptime KEPT = min(WARPS, ROWS)
    var kept = unsafe_stack_allocation[
        KEPT * 2 * STEP, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var group = Int(thread_idx.x) // max(lanes, GROUP)
    comptime for v in range(vectors):
        var sum = _over_groups[lanes](dweight[v])
        var other = _over_groups[lanes](dbias[v])
        barrier()
        if Int(thread_idx.x) % max(lanes, GROUP) < lanes:
            kept.unsafe_store[alignment=16](2 * group * STEP + first, sum)
            kept.unsafe_store[alignment=16]((2 * group + 1) * STEP + first, other)
        barrier()
        var which = Int(thread_idx.x) // lanes
        if which < 2 and first + v * STEP < columns:
            sum = 0
            comptime for i in range(KEPT):
                sum += kept.unsafe_load[width=width, alignment=16]((2 * i + which) * STEP + first)
            part.unsafe_store[alignment=16](which * columns + first + v * STEP, sum)


@always_inline
def _load[dtype: DType, //, width: Int](source: Data[dtype], at: Int) -> SIMD[dtype, width]:
    return source.unsafe_load[width=width, alignment=ALIGN[dtype, width]](at)


@always_inline
def _over_groups[width: SIMDLength, //, lanes: Int](values: SIMD[F32, width]) -> SIMD[F32, width]:
    """Sums over the rows of 32 lanes: the lanes whose numbers modulo `lanes` are the same."""
    var sums = values
    comptime if lanes < GROUP:
        comptime for i in range(log2_floor(GROUP // lanes)):
            comptime for j in range(Int(width)):
                sums[j] += warp.shuffle_xor(sums[j], UInt32(lanes << i))
    return sums


@__name(t"layer_norm_grad_row_{x}_{dy}_{dx}")
def row_kernel[x: DType, dy: DType, dx: DType](o: NormGrad[x, dy, dx], g: NormGradSizes):
    """Computes rows of any length in turns, one at a time, and the block's part of the sums.

    Parameters:
        x: The dtype of x.
        dy: The dtype of dy.
        dx: The dtype of dx.

    Args:
        o: Tensors.
        g: Sizes.
    """
    comptime WARPS = THREADS // GROUP
    var columns = Int(g.columns)
    var share = 1 / Float32(columns)
    var exchange = unsafe_stack_allocation[
        4 * WARPS, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var to = o.room.unsafe_offset(Int(block_idx.x) * 2 * columns)
    for c in range(Int(thread_idx.x), 2 * columns, THREADS):
        to[unsafe_offset=c] = 0
    barrier()
    for row in range(Int(block_idx.x), Int(g.rows), Int(grid_dim.x)):
        var here = o.x.unsafe_offset(row * columns)
        var dyes = o.dy.unsafe_offset(row * columns)
        var sums = SIMD[F32, 2](0)
        for c in range(Int(thread_idx.x), columns, THREADS):
            var slope = dyes[unsafe_offset=c].cast[F32]() * o.weight[unsafe_offset=c]
            sums += SIMD[F32, 2](here[unsafe_offset=c].cast[F32](), slope)
        var means = over_row[THREADS](sums, exchange) * share
        sums = 0
        for c in range(Int(thread_idx.x), columns, THREADS):
            var d = here[unsafe_offset=c].cast[F32]() - means[0]
            var slope = dyes[unsafe_offset=c].cast[F32]() * o.weight[unsafe_offset=c]
            sums += SIMD[F32, 2](d * d, d * slope)
        sums = over_row[THREADS](sums, exchange.unsafe_offset(2 * WARPS)) * share
        var scale = rsqrt(sums[0] + g.eps)
        for c in range(Int(thread_idx.x), columns, THREADS):
            var normed = (here[unsafe_offset=c].cast[F32]() - means[0]) * scale
            var gradient = dyes[unsafe_offset=c].cast[F32]()
            var value = gradient * o.weight[unsafe_offset=c] - means[1] - normed * sums[1] * scale
            o.dx[unsafe_offset=row * columns + c] = (value * scale).cast[dx]()
            to[unsafe_offset=c] += gradient * normed
            to[unsafe_offset=columns + c] += gradient


@__name("layer_norm_grad_add")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMNS * SLICES)))
def add_kernel(room: Data[F32], dweight: Data[F32], dbias: Data[F32], columns: Int32, parts: Int32):
    """Adds up the parts of 32 columns of dweight and dbias, which lie one behind the other.

    Args:
        room: [parts, 2, columns].
        dweight: [columns].
        dbias: [columns].
        columns: How many each has.
        parts: How many parts there are.
    """
    comptime AHEAD = 8
    var sums = unsafe_stack_allocation[
        COLUMNS * SLICES, Float32, address_space=AddressSpace.SHARED
    ]()
    var slice = Int32(thread_idx.x) // COLUMNS
    var at = Int(block_idx.x) * COLUMNS + Int(thread_idx.x) % COLUMNS
    var size = 2 * Int(columns)
    wait_on_dependent_grids()
    launch_dependent_grids()
    var sum = Float32(0)
    if at < size:
        for part in range(slice, parts, AHEAD * SLICES):  # eight are on their way
            var some = SIMD[F32, AHEAD](0)
            comptime for i in range(AHEAD):
                if part + Int32(i * SLICES) < parts:
                    some[i] = room[unsafe_offset=(Int(part) + i * SLICES) * size + at]
            sum += some.reduce_add()
    sums[unsafe_offset=Int(thread_idx.x)] = sum
    barrier()
    if slice == 0 and at < size:
        for i in range(1, SLICES):
            sum += sums[unsafe_offset=i * COLUMNS + Int(thread_idx.x)]
        if at < Int(columns):
            dweight[unsafe_offset=at] = sum
        else:
            dbias[unsafe_offset=at - Int(columns)] = sum


def _enqueue_vectors[
    x: DType, dy: DType, dx: DType, //, lanes: Int, vectors: Int, width: Int, blocks: Int
](o: NormGrad[x, dy, dx], g: NormGradSizes, ctx: DeviceContext) raises -> Int:
    """Enqueues the kernel that holds a row in registers; gives the blocks, which are the parts."""
    var most = min(Int(g.parts), blocks * Device(ctx).multiprocessors)
    var count = min(most, ceildiv(Int(g.rows), THREADS // lanes))
    launch[vector_kernel[x, dy, dx, lanes, vectors, width, blocks]](
        ctx, o, g, grid_dim=count, block_dim=THREADS
    )
    return count


def _enqueue_rows[
    x: DType, dy: DType, dx: DType, //
](o: NormGrad[x, dy, dx], g: NormGradSizes, ctx: DeviceContext) raises -> Int:
    """Enqueues the kernel that fits the rows; gives the blocks, which are the parts."""
    # Short rows in vectors of 16 bytes of the narrowest tensor.
    comptime NARROW = min(size_of[x](), min(size_of[dy](), size_of[dx]()))
    comptime SHORT = 8 if NARROW == 2 else WIDTH
    var columns = Int(g.columns)
    if Int(g.rows) == 0:
        return 0
    if columns % SHORT == 0 and columns <= 64:
        return _enqueue_vectors[64 // SHORT, 1, SHORT, 3 if SHORT == 8 else 4](o, g, ctx)
    if columns % WIDTH == 0:
        if columns <= 192:
            return _enqueue_vectors[16, 3, WIDTH, 2](o, g, ctx)
        if columns <= 384:
            return _enqueue_vectors[32, 3, WIDTH, 2](o, g, ctx)
        if columns <= 1024:
            return _enqueue_vectors[128, 2, WIDTH, 3](o, g, ctx)
        if columns <= 4096:
            return _enqueue_vectors[THREADS, 4, WIDTH, 1](o, g, ctx)
    var count = min(Int(g.rows), min(Int(g.parts), 4 * Device(ctx).multiprocessors))
    launch[row_kernel[x, dy, dx]](ctx, o, g, grid_dim=count, block_dim=THREADS)
    return count


def layer_norm_grad_gpu[
    x_dtype: DType, dy_dtype: DType, dx_dtype: DType, //
](o: NormGrad[x_dtype, dy_dtype, dx_dtype], g: NormGradSizes, ctx: DeviceContext) raises:
    """Enqueues the kernel for the rows, and that which adds up their parts.

    Parameters:
        x_dtype: Of x.
        dy_dtype: Of dy.
        dx_dtype: Of dx.

    Args:
        o: Tensors.
        g: Sizes.
        ctx: The GPU.

    Raises:
        If a launch fails.
    """
    var parts = _enqueue_rows(o, g, ctx)
    launch[add_kernel](
        ctx,
        o.room,
        o.dweight,
        o.dbias,
        g.columns,
        Int32(parts),
        grid_dim=ceildiv(2 * Int(g.columns), COLUMNS),
        block_dim=COLUMNS * SLICES,
    )
