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
from ..operands import F32
from ..pointwise import Sources
from ..target import IS_HOPPER
from .join import joined, nothing, over_vector
from .results import Finish, Results
from .values import Terms, Values

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


@__name(t"reduce_{kind}_{width}x{kept}_{splits}_{terms.label()}{finish.label()}")
def reduce_kernel[
    finish: Finish,
    terms: Terms,
    kind: StaticString,
    width: Int,
    kept: Int,
    splits: Int,
](sources: Sources[len(terms.dtypes)], tensors: Results[finish].Tensors, sizes: ReduceSizes,):
    """Reduces a slab of rows in each block, or each cluster.

    Parameters:
        finish: What is written.
        terms: What is reduced.
        kind: How numbers are joined: sum, amax or amin.
        width: Numbers of a vector: 16 bytes, or 1.
        kept: Numbers that are left of a vector: as many, or 1 where rows are folded.
        splits: Blocks of a cluster at most: 1, or `SPLITS`.

    Args:
        sources: The tensors of [outer, rows, inner].
        tensors: What is written, each [outer, inner] or [outer], and vectors of that size.
        sizes: Sizes.
    """
    comptime Place = Values[terms, kept < width]
    comptime unroll = rows_of(terms, width)
    var results = Results[finish](tensors)
    var sums = unsafe_stack_allocation[
        Place.RESULTS * SUMS * kept, Float32, address_space=AddressSpace.SHARED, alignment=16
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
    var place = Place(sources, Int(sizes.rows), Int(sizes.inner))
    wait_on_dependent_grids()
    launch_dependent_grids()
    var vectors = Array[SIMD[F32, width], Place.RESULTS](fill=nothing[kind]())
    if column < sizes.inner:
        var row = part
        place = place.at(Int(o), Int(part), Int(column))
        var still = Array[SIMD[F32, width], Place.COUNT](fill=0)
        place.load[width, still=True](still)
        while row + Int32(unroll - 1) * parts < sizes.rows:
            var found = Array[SIMD[F32, width], unroll * Place.RESULTS](fill=0)
            comptime for i in range(unroll):
                var values = still.copy()
                place.at(0, i * Int(parts), 0).load[width, still=False](values)
                comptime for k in range(Place.RESULTS):
                    found[k * unroll + i] = Place.term[k](values)
            comptime for k in range(Place.RESULTS):
                comptime for step in [1, 2]:
                    comptime for i in range(0, unroll - step, 2 * step):
                        comptime at = k * unroll + i
                        found[at] = joined[kind](found[at], found[at + step])
                vectors[k] = joined[kind](vectors[k], found[k * unroll])
            row += Int32(unroll) * parts
            place = place.at(0, unroll * Int(parts), 0)
        while row < sizes.rows:
            var values = still.copy()
            place.load[width, still=False](values)
            comptime for k in range(Place.RESULTS):
                vectors[k] = joined[kind](vectors[k], Place.term[k](values))
            row += parts
            place = place.at(0, Int(parts), 0)

    var across = min(slice, Int32(WARP_SIZE))
    var spot = t // Int32(WARP_SIZE) * across + lane
    comptime for k in range(Place.RESULTS):
        var left = SIMD[F32, kept](0)
        comptime if kept == width:
            left = rebind[SIMD[F32, kept]](vectors[k])
        else:
            left[0] = over_vector[kind](vectors[k])
        var distance = slice
        while distance < Int32(WARP_SIZE):
            comptime for i in range(kept):
                var other = warp.shuffle_xor(left[i], UInt32(distance))
                left[i] = joined[kind](left[i], other)
            distance *= 2
        if Int32(lane_id()) < across:
            comptime aligned = min(16, 4 * kept)
            sums.unsafe_store[alignment=aligned](k * SUMS * kept + Int(spot * Int32(kept)), left)
    barrier()
    var count = across * Int32(kept)
    var first = slab * count
    var limit = Int32(1) if kept < width else sizes.inner - first
    var offset = Int(o) * (1 if kept < width else Int(sizes.inner)) + Int(first)
    var values = Array[Float32, Place.RESULTS](fill=nothing[kind]())
    comptime for k in range(Place.RESULTS):
        var from_ = sums.unsafe_offset(k * SUMS * kept)
        if t < count:
            for w in range(Int32(block_dim.x) // Int32(WARP_SIZE)):
                values[k] = joined[kind](values[k], from_[unsafe_offset=Int(w * count + t)])
        comptime if splits == 1 and not finish.evaluates:
            if t < min(count, limit):
                results.put[k](offset, Int(t), values[k] / sizes.divisor)
    comptime if splits == 1 and finish.evaluates:
        if t < min(count, limit):
            comptime for k in range(Place.RESULTS):
                values[k] /= sizes.divisor
            results.write(offset + Int(t), values)
    comptime if splits > 1:
        barrier()
        comptime for k in range(Place.RESULTS):
            if t < count:
                sums[unsafe_offset=k * SUMS * kept + Int(t)] = values[k]
        cluster_sync()
        if rank == 0 and 4 * t < min(count, limit):
            var totals = Array[SIMD[F32, 4], Place.RESULTS](fill=nothing[kind]())
            comptime for k in range(Place.RESULTS):
                var total = SIMD[F32, 4](nothing[kind]())
                var at = UInt32(Int(sums)) + UInt32(4 * k * SUMS * kept) + UInt32(16 * t)
                for peer in range(sizes.splits):
                    total = joined[kind](total, cluster_load4(at, UInt32(peer)))
                comptime if not finish.evaluates:
                    comptime for i in range(4):
                        if 4 * t + Int32(i) < min(count, limit):
                            results.put[k](offset + Int(4 * t), i, total[i] / sizes.divisor)
                totals[k] = total / sizes.divisor
            comptime if finish.evaluates and kept % 4 == 0:
                results.write(offset + Int(4 * t), totals)
            elif finish.evaluates:
                comptime for i in range(4):
                    if 4 * t + Int32(i) < min(count, limit):
                        comptime for k in range(Place.RESULTS):
                            values[k] = totals[k][i]
                        results.write(offset + Int(4 * t) + i, values)
        cluster_sync()


def rows_of(terms: Terms, width: Int) -> Int:
    """Chooses how many rows a thread loads at a time: as many as its registers hold.

    Args:
        terms: What is reduced.
        width: Numbers of a vector.

    Returns:
        4, 2 or 1.
    """
    var bytes = 0
    for i in range(len(terms.dtypes)):
        bytes += width * (4 if terms.dtypes[i] == F32 else 2) if terms.moves(i, "r") else 0
    return 4 if bytes <= 32 else 2 if bytes <= 64 else 1


def reduce_gpu[
    finish: Finish, //, kind: StaticString, terms: Terms
](
    sources: Sources[len(terms.dtypes)],
    results: Results[finish],
    outer: Int,
    reduced: Int,
    inner: Int,
    divisor: Float32,
    ctx: DeviceContext,
) raises:
    """Enqueues a reduction.

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
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime wide = 16 // size_of[terms.narrowest()]()
    comptime if not finish.evaluates:  # expressions stand behind sums of columns: fewer kernels
        if inner == 1 and reduced % wide == 0:
            var rows = reduced // wide
            _enqueue[kind, terms, wide, 1](sources, results, outer, rows, wide, divisor, ctx)
            return
    if inner % wide == 0:
        _enqueue[kind, terms, wide, wide](sources, results, outer, reduced, inner, divisor, ctx)
    else:
        _enqueue[kind, terms, 1, 1](sources, results, outer, reduced, inner, divisor, ctx)


def _enqueue[
    finish: Finish, //, kind: StaticString, terms: Terms, width: Int, kept: Int
](
    sources: Sources[len(terms.dtypes)],
    results: Results[finish],
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
    comptime room = 1024 if terms.is_plain() else 512  # an expression takes registers
    var most = min(room if blocks < 4 * multiprocessors else 256, SUMS // slice * WARP_SIZE)
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
            launch[reduce_kernel[finish, terms, kind, width, kept, most_splits]](
                ctx,
                sources,
                results.tensors,
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
