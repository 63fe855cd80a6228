"""Reductions on a GPU.

A GPU's block takes 16 bytes of inner in each of up to 32 threads; its other threads take other rows.
Where blocks are few, a cluster of up to 8 shares one on Hopper. Rows where inner is 1 go 16 bytes a
thread, by a block for each.
"""

from max.gpu import WARP_SIZE, barrier, block_dim, block_idx, lane_id, thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.bit import next_power_of_two
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of

from ..device import Device
from ..hopper.ptx import cluster_load4, cluster_sync
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import F32, Data, narrowed, widened
from ..target import IS_HOPPER
from .join import joined, nothing, over_vector

comptime SLICE = 32
"""Threads of a GPU's block along inner, at most."""
comptime SUMS = 256
"""Vectors that the warps of a block leave in shared memory, at most."""
comptime SPLITS = 8
"""Blocks of a cluster, at most."""


struct ReduceSizes(KernelArgument, TrivialRegisterPassable):
    """The sizes of a reduction, and how a GPU divides it."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var rows: Int32
    """Rows of vectors to reduce."""
    var inner: Int32
    """Numbers of a row."""
    var slabs: Int32
    """Blocks, or clusters, along a row."""
    var slice: Int32
    """Threads of a block along a row; a power of two."""
    var splits: Int32
    """Blocks of a cluster."""
    var divisor: Float32
    """Divides the result."""

    def __init__(
        out self,
        *,
        rows: Int,
        inner: Int,
        slabs: Int,
        slice: Int,
        splits: Int,
        divisor: Float32,
    ):
        """Names the sizes.

        Args:
            rows: Rows of vectors to reduce.
            inner: Numbers of a row.
            slabs: Blocks, or clusters, along a row.
            slice: Threads of a block along a row; a power of two.
            splits: Blocks of a cluster.
            divisor: Divides the result.
        """
        self.rows, self.inner, self.slabs = Int32(rows), Int32(inner), Int32(slabs)
        self.slice, self.splits, self.divisor = Int32(slice), Int32(splits), divisor


@__name(t"reduce_{kind}_{width}x{kept}_{splits}_{dtype}")
def reduce_kernel[
    dtype: DType,
    into: DType,
    kind: StaticString,
    width: Int,
    kept: Int,
    splits: Int,
](x: Data[dtype], y: Data[into], sizes: ReduceSizes):
    """Reduces a slab of rows in each block, or each cluster.

    Parameters:
        dtype: Of x.
        into: Of y.
        kind: How numbers are joined: sum, amax or amin.
        width: Numbers of a vector: 16 bytes, or 1.
        kept: Numbers that are left of a vector: as many, or 1 where rows are folded.
        splits: Blocks of a cluster at most: 1, or `SPLITS`.

    Args:
        x: [outer, rows, inner].
        y: The result[outer, inner], or [outer].
        sizes: Sizes.
    """
    comptime bytes = min(16, width * size_of[dtype]())
    var sums = unsafe_stack_allocation[
        SUMS * kept, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var t = Int32(thread_idx.x)
    var slice = sizes.slice
    var lane = t & (slice - 1)
    var part = t // slice
    var parts = Int32(block_dim.x) // slice
    var number = Int32(block_idx.x)
    var rank = Int32(0)
    comptime if splits > 1:
        rank = number % sizes.splits
        number //= sizes.splits
        part = part * sizes.splits + rank
        parts *= sizes.splits
    var o = number // sizes.slabs
    var slab = number - o * sizes.slabs
    var column = (slab * slice + lane) * Int32(width)
    var source = x.unsafe_offset(Int(o) * Int(sizes.rows) * Int(sizes.inner) + Int(column))
    var step = Int(parts) * Int(sizes.inner)
    wait_on_dependent_grids()
    launch_dependent_grids()
    var vector = SIMD[F32, width](nothing[kind]())
    if column < sizes.inner:
        var row = part
        var at = source.unsafe_offset(Int(part) * Int(sizes.inner))
        while row + 3 * parts < sizes.rows:
            var four = Array[SIMD[dtype, width], 4](fill=0)
            comptime for i in range(4):
                four[i] = at.unsafe_load[width=width, alignment=bytes](i * step)
            var first = joined[kind](widened(four[0]), widened(four[1]))
            var second = joined[kind](widened(four[2]), widened(four[3]))
            vector = joined[kind](vector, joined[kind](first, second))
            row += 4 * parts
            at = at.unsafe_offset(4 * step)
        while row < sizes.rows:
            vector = joined[kind](vector, widened(at.unsafe_load[width=width, alignment=bytes](0)))
            row += parts
            at = at.unsafe_offset(step)

    var left = SIMD[F32, kept](0)
    comptime if kept == width:
        left = rebind[SIMD[F32, kept]](vector)
    else:
        left[0] = over_vector[kind](vector)
    var distance = slice
    while distance < Int32(WARP_SIZE):
        comptime for i in range(kept):
            var other = warp.shuffle_xor(left[i], UInt32(distance))
            left[i] = joined[kind](left[i], other)
        distance *= 2
    var across = min(slice, Int32(WARP_SIZE))
    if Int32(lane_id()) < across:
        var place = (t // Int32(WARP_SIZE) * across + lane) * Int32(kept)
        comptime aligned = min(16, 4 * kept)
        sums.unsafe_store[alignment=aligned](Int(place), left)
    barrier()
    var count = across * Int32(kept)
    var value = nothing[kind]()
    if t < count:
        for w in range(Int32(block_dim.x) // Int32(WARP_SIZE)):
            value = joined[kind](value, sums[unsafe_offset=Int(w * count + t)])
    var first = slab * count
    var result = y.unsafe_offset(Int(o) * (1 if kept < width else Int(sizes.inner)) + Int(first))
    var limit = Int32(1) if kept < width else sizes.inner - first
    comptime if splits == 1:
        if t < min(count, limit):
            result[unsafe_offset=Int(t)] = narrowed[into](value / sizes.divisor)
    else:
        barrier()
        if t < count:
            sums[unsafe_offset=Int(t)] = value
        cluster_sync()
        if rank == 0 and 4 * t < min(count, limit):
            var total = SIMD[F32, 4](nothing[kind]())
            var at = UInt32(Int(sums)) + UInt32(16 * t)
            for peer in range(sizes.splits):
                total = joined[kind](total, cluster_load4(at, UInt32(peer)))
            comptime for i in range(4):
                if 4 * t + Int32(i) < min(count, limit):
                    result[unsafe_offset=Int(4 * t) + i] = narrowed[into](total[i] / sizes.divisor)
        cluster_sync()


def reduce_gpu[
    dtype: DType, into: DType, //, kind: StaticString
](
    x: Data[dtype],
    y: Data[into],
    outer: Int,
    reduced: Int,
    inner: Int,
    divisor: Float32,
    ctx: DeviceContext,
) raises:
    """Enqueues a reduction.

    Parameters:
        dtype: Of x.
        into: Of y.
        kind: How numbers are joined: sum, amax or amin.

    Args:
        x: [outer, reduced, inner].
        y: The result[outer, inner].
        outer: See `x`.
        reduced: See `x`.
        inner: See `x`.
        divisor: Divides the result: 1, or `reduced` of a mean.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    if inner == 1 and reduced % wide == 0:
        _enqueue[kind, wide, 1](x, y, outer, reduced // wide, wide, divisor, ctx)
    elif inner == 1:
        _enqueue[kind, 1, 1](x, y, outer, reduced, 1, divisor, ctx)
    elif inner % wide == 0:
        _enqueue[kind, wide, wide](x, y, outer, reduced, inner, divisor, ctx)
    else:
        _enqueue[kind, 1, 1](x, y, outer, reduced, inner, divisor, ctx)


def _enqueue[
    dtype: DType, into: DType, //, kind: StaticString, width: Int, kept: Int
](
    x: Data[dtype],
    y: Data[into],
    outer: Int,
    rows: Int,
    inner: Int,
    divisor: Float32,
    ctx: DeviceContext,
) raises:
    """Divides a reduction over blocks: as wide as they may be, and enough for all of the GPU."""
    var multiprocessors = Device(ctx).multiprocessors
    var vectors = inner // width
    var slice = min(SLICE, next_power_of_two(vectors))
    while slice > 8 and outer * ceildiv(vectors, slice) < multiprocessors:
        slice //= 2
    var slabs = ceildiv(vectors, slice)
    var blocks = outer * slabs
    # Four rows a thread; many blocks hide latency themselves.
    var most = min(1024 if blocks < 4 * multiprocessors else 256, SUMS // slice * WARP_SIZE)
    var threads = max(64, min(most, slice * next_power_of_two(ceildiv(rows, 4))))
    threads = max(threads, slice * kept)  # each writes one result at most
    var splits = 1
    comptime if IS_HOPPER:
        while (
            splits < SPLITS
            and 2 * splits * blocks <= multiprocessors
            and rows >= 16 * splits * (threads // slice)
        ):
            splits *= 2
    comptime for i in range(2 if IS_HOPPER else 1):
        comptime most_splits = SPLITS if i == 1 else 1
        if (splits > 1) == (i == 1):
            var cluster = Optional[Dim](None)
            if i == 1:
                cluster = Dim(splits)
            launch[reduce_kernel[dtype, into, kind, width, kept, most_splits]](
                ctx,
                x,
                y,
                ReduceSizes(
                    rows=rows,
                    inner=inner,
                    slabs=slabs,
                    slice=slice,
                    splits=splits,
                    divisor=divisor,
                ),
                grid_dim=blocks * splits,
                block_dim=threads,
                cluster_dim=cluster,
            )
