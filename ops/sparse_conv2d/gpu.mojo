"""Sparse convolution on a GPU's ordinary cores: the nonzeros alone are multiplied, in float32.

A block computes PIXELS output pixels of ROWS filters, a step of K at a time: one tap and 128 bytes
of its channels. x of a step is turned over on its way to shared memory, to [channel, pixel], and
the nonzeros of the step lie beside it. A warp walks over those of its filters: each is one
broadcast load, one load of neighbouring pixels, and a multiplication for each of them. Register
tiling over pixels, and the order of the nonzeros, after Gale et al. 2020 (arXiv:2006.10901, section
5) and Chen 2018 (Escoin, arXiv:1802.10280). Bound by shared memory.

    x[N, H, W, C]     activations
    w[nonzeros]       values, in the order of graphs/arrange.py's `steps`
    columns           channel of each in its step, uint8
    starts            where each filter's begin: [F / TILE, steps, TILE] and their number
    y[N, P, Q, F]     result, and the residual

Where blocks are few, on Hopper, a cluster shares the steps of one (split-K).
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import bitcast, unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..epilogue import Epilogue, Output
from ..geometry import Geometry
from ..hopper.ptx import cluster_load4, cluster_sync
from ..operands import F32, U32, Data, Operands, Shared, widened
from ..target import IS_HOPPER

comptime TILE = 128
"""Filters whose nonzeros of a step lie side by side; the same number as in graphs/arrange.py."""
comptime ROW = 128
"""Bytes of channels in a step; the same number as in graphs/arrange.py."""
comptime LANES = 32
"""Threads that share a filter."""
comptime PIECE = 16
"""Bytes of a load."""


struct Tiling(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var width: Int
    """Pixels of a thread."""
    var filters: Int
    """Filters of a warp."""
    var warps: Int
    """Warps of a block."""
    var blocks: Int
    """Blocks that a multiprocessor holds at a time; bounds the registers."""
    var split: Bool
    """Whether a cluster shares the steps of a block."""

    def __init__(
        out self, width: Int, filters: Int, warps: Int, blocks: Int, *, split: Bool = False
    ):
        """Names the parts.

        Args:
            width: Pixels of a thread.
            filters: Filters of a warp.
            warps: Warps of a block.
            blocks: Blocks of a multiprocessor.
            split: Whether a cluster shares the steps.
        """
        self.width, self.filters, self.warps, self.blocks = width, filters, warps, blocks
        self.split = split

    @always_inline
    def pixels(self) -> Int:
        """Counts the pixels of a block.

        Returns:
            `width` for each lane.
        """
        return self.width * LANES

    @always_inline
    def rows(self) -> Int:
        """Counts the filters of a block.

        Returns:
            `filters` for each warp.
        """
        return self.filters * self.warps

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            32 for each warp.
        """
        return self.warps * LANES


def sparse_conv2d_gpu[
    dtype: DType, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype],
    columns: Data[DType.uint8],
    starts: Data[DType.int32],
    ctx: DeviceContext,
) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, the nonzeros and y.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes.
        o: Tensors; w holds the nonzeros.
        columns: Channel of each nonzero in its step.
        starts: Where the nonzeros of each filter begin, step by step.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime if IS_HOPPER:
        comptime small = Tiling(width=2, filters=2, warps=16, blocks=2, split=True)
        var tiles = ceildiv(g.pixels(), small.pixels()) * ceildiv(g.f, small.rows())
        var steps = g.r * g.s * ceildiv(g.c, ROW // size_of[dtype]())
        var splits = 4 if steps >= 4 else 1
        if tiles * splits <= 2 * Device(ctx).multiprocessors:
            _enqueue[dtype, epilogue, small](g, o, columns, starts, splits, ctx)
            return
    _enqueue[dtype, epilogue, Tiling(width=4, filters=4, warps=16, blocks=2)](
        g, o, columns, starts, 1, ctx
    )


def _enqueue[
    dtype: DType, epilogue: Epilogue, tiling: Tiling
](
    g: Geometry,
    o: Operands[dtype],
    columns: Data[DType.uint8],
    starts: Data[DType.int32],
    splits: Int,
    ctx: DeviceContext,
) raises:
    comptime assert TILE % tiling.rows() == 0, "sparse_conv2d: a tile holds whole blocks"
    var tiles = ceildiv(g.pixels(), tiling.pixels())
    var cluster = Optional[Dim](None)
    comptime if tiling.split:
        cluster = Dim(splits)
    ctx.enqueue_function[sparse_conv2d_kernel[dtype, epilogue, tiling]](
        o.x,
        o.w,
        columns,
        starts,
        o.bias,
        o.residual,
        o.y,
        g,
        Int32(splits),
        grid_dim=(tiles * splits, ceildiv(g.f, tiling.rows())),
        block_dim=tiling.threads(),
        cluster_dim=cluster,
    )


@__name(t"sparse_conv2d_{epilogue.label()}_{dtype}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(tiling.threads())),
    `nvvm.minctasm`=SIMDLength(tiling.blocks),
)
def sparse_conv2d_kernel[
    dtype: DType, epilogue: Epilogue, tiling: Tiling
](
    x: Data[dtype],
    values: Data[dtype],
    columns: Data[DType.uint8],
    starts: Data[DType.int32],
    bias: Data[F32],
    residual: Data[dtype],
    y: Data[dtype],
    g: Geometry,
    splits: Int32,
):
    """Computes a tile of pixels and filters in each block, or its cluster's share of one.

    Takes the pointers one by one: `Operands` holds alpha too, and LLVM would not know that they are of
    global memory.

    Parameters:
        dtype: Of x, the nonzeros and y.
        epilogue: What the accumulator goes through.
        tiling: How a block works.

    Args:
        x: Activations.
        values: Nonzeros.
        columns: Channel of each nonzero in its step.
        starts: Where the nonzeros of each filter begin, step by step.
        bias: One number for each filter.
        residual: Residual.
        y: Result.
        g: Sizes.
        splits: Blocks that share the steps.
    """
    comptime SIZE = size_of[dtype]()
    comptime VECTOR = PIECE // SIZE
    comptime CHANNELS = ROW // SIZE
    comptime PIXELS = tiling.pixels()
    comptime ROWS = tiling.rows()
    comptime FILTERS = tiling.filters
    comptime WIDTH = tiling.width
    comptime THREADS = tiling.threads()
    comptime PITCH = PIXELS * SIZE  # bytes of a channel
    comptime PAIR = 4 // SIZE  # pixels of a word
    comptime UNITS = ceildiv(PIXELS // PAIR * 8, THREADS)
    comptime ENTRY = 2 // PAIR  # words of a nonzero: its place, and its value if wide
    comptime X_WORDS = CHANNELS * PITCH // 4
    comptime ENTRIES = ROWS * CHANNELS * ENTRY
    comptime WORDS = max(X_WORDS + ENTRIES, ROWS * PIXELS)

    var memory = unsafe_stack_allocation[
        WORDS, UInt32, address_space=AddressSpace.SHARED, alignment=128
    ]()
    var bounds = unsafe_stack_allocation[
        tiling.warps * (FILTERS + 1), Int32, address_space=AddressSpace.SHARED
    ]()
    var x_tile = rebind[Shared[U32]](memory)
    var t = Int32(thread_idx.x)
    var warp = t // Int32(LANES)
    var lane = t % Int32(LANES)
    var entries = x_tile.unsafe_offset(X_WORDS + Int(warp) * FILTERS * CHANNELS * ENTRY)
    var limits = rebind[Shared[DType.int32]](bounds).unsafe_offset(Int(warp) * (FILTERS + 1))

    var rank = Int32(0)
    var block = Int32(block_idx.x)
    comptime if tiling.split:
        rank = block % splits
        block = block // splits
    var m0 = block * Int32(PIXELS)
    var f0 = Int32(block_idx.y) * Int32(ROWS)
    var pixels = Int32(g.pixels())
    var q, pq = Int32(g.q), Int32(g.p * g.q)
    var height, width, channels = Int32(g.h), Int32(g.w), Int32(g.c)
    var taps_w = Int32(g.s)
    var chunks = (channels + Int32(CHANNELS - 1)) // Int32(CHANNELS)
    var steps = Int32(g.r) * taps_w * chunks
    var whole = channels % Int32(VECTOR) == 0

    # The pixels that this thread reads: of each, its image, and its window's corner.
    var piece = t % 8
    var corner_h = Array[Int32, UNITS * PAIR](fill=0)
    var corner_w = Array[Int32, UNITS * PAIR](fill=0)
    var image = Array[Int32, UNITS * PAIR](fill=0)
    comptime for unit in range(UNITS):
        comptime for i in range(PAIR):
            comptime at = unit * PAIR + i
            var m = m0 + (t // 8 + Int32(unit * (THREADS // 8))) * Int32(PAIR) + Int32(i)
            var n = m // pq
            var rest = m - n * pq
            var p = rest // q
            corner_h[at] = p * Int32(g.stride_h) - Int32(g.pad_h)
            corner_w[at] = (rest - p * q) * Int32(g.stride_w) - Int32(g.pad_w)
            image[at] = n * height
            if m >= pixels:
                corner_h[at] = -(1 << 24)

    var sums = Array[SIMD[F32, WIDTH], FILTERS](fill=0)
    var first = steps * rank // splits
    var last = steps * (rank + 1) // splits
    var tap = first // chunks
    var c0 = (first - tap * chunks) * Int32(CHANNELS)
    var r = tap // taps_w
    var s = tap - r * taps_w
    var row_starts = starts.unsafe_offset(
        Int(
            (f0 // Int32(TILE) * steps + first) * Int32(TILE)
            + f0 % Int32(TILE)
            + warp * Int32(FILTERS)
        )
    )
    var lane_at = UInt32(lane) * UInt32(WIDTH * SIZE)
    var x_bytes = x_tile.unsafe_bitcast[UInt8]()

    for _ in range(first, last):
        barrier()
        var c = c0 + piece * Int32(VECTOR)
        var read = Array[SIMD[dtype, VECTOR], UNITS * PAIR](fill=0)
        comptime for i in range(UNITS * PAIR):
            var h = corner_h[i] + r * Int32(g.dilation_h)
            var w = corner_w[i] + s * Int32(g.dilation_w)
            if h >= 0 and h < height and w >= 0 and w < width:
                var from_ = Int((image[i] + h) * width + w) * Int(channels) + Int(c)
                if whole:
                    if c < channels:
                        read[i] = x.unsafe_load[width=VECTOR, alignment=PIECE](from_)
                else:
                    comptime for j in range(VECTOR):
                        if c + Int32(j) < channels:
                            read[i][j] = x[unsafe_offset=from_ + j]
        var begin = row_starts[unsafe_offset=0]
        var end = row_starts[unsafe_offset=FILTERS]
        if lane <= Int32(FILTERS):
            limits[unsafe_offset=Int(lane)] = row_starts[unsafe_offset=Int(lane)] - begin
        for e in range(begin + lane, end, Int32(LANES)):
            var channel = columns[unsafe_offset=Int(e)].cast[U32]()
            var value = values[unsafe_offset=Int(e)]
            var row = channel * UInt32(PITCH) + channel // UInt32(VECTOR) % 8 * UInt32(PIECE)
            var to = Int(e - begin) * ENTRY
            comptime if SIZE == 4:
                entries[unsafe_offset=to] = row
                entries[unsafe_offset=to + 1] = bitcast[U32](value)
            else:
                entries[unsafe_offset=to] = row | bitcast[DType.uint16](value).cast[U32]() << 16
        comptime for unit in range(UNITS):
            var word = t // 8 + Int32(unit * (THREADS // 8))
            var mine = word < Int32(PIXELS // PAIR)
            word = ((word // 4) ^ piece) * 4 + word % 4
            comptime for j in range(VECTOR):
                var pair = SIMD[dtype, PAIR](0)
                comptime for i in range(PAIR):
                    pair[i] = read[unit * PAIR + i][j]
                var to = Int((piece * Int32(VECTOR) + Int32(j)) * Int32(PITCH // 4) + word)
                if mine:
                    x_tile[unsafe_offset=to] = bitcast[U32, 1](pair)
        barrier()
        comptime for i in range(FILTERS):
            for e in range(limits[unsafe_offset=i], limits[unsafe_offset=i + 1]):
                var row: UInt32
                var value: Float32
                comptime if SIZE == 4:
                    var both = entries.unsafe_load[width=2, alignment=8](2 * Int(e))
                    row, value = both[0], bitcast[F32](both[1])
                else:
                    var both = entries[unsafe_offset=Int(e)]
                    row = both & 0xFFFF
                    comptime if dtype == DType.bfloat16:
                        value = bitcast[F32](both & 0xFFFF0000)
                    else:
                        value = bitcast[dtype]((both >> 16).cast[DType.uint16]()).cast[F32]()
                var seen = (
                    x_bytes.unsafe_offset(Int(lane_at ^ row))
                    .unsafe_bitcast[Scalar[dtype]]()
                    .unsafe_load[width=WIDTH, alignment=WIDTH * SIZE]()
                )
                sums[i] = widened(seen).fma(SIMD[F32, WIDTH](value), sums[i])
        row_starts = row_starts.unsafe_offset(TILE)
        c0 += Int32(CHANNELS)
        if c0 >= channels:
            c0 = 0
            s += 1
            if s == taps_w:
                s = 0
                r += 1

    # The sums, filter by filter in shared memory, so that lines of y are written whole.
    barrier()
    var tile = x_tile.unsafe_bitcast[Float32]()
    comptime GRANULES = PIXELS // 4
    comptime for i in range(FILTERS):
        var f = warp * Int32(FILTERS) + Int32(i)
        comptime for j in range(ceildiv(WIDTH, 4)):
            comptime count = min(WIDTH, 4)
            var granule = (lane * Int32(WIDTH) // 4 + Int32(j)) ^ (f // 8 % 8)
            tile.unsafe_store[alignment=count * 4](
                Int(f * Int32(PIXELS) + granule * 4 + lane * Int32(WIDTH) % 4),
                sums[i].slice[count, offset=j * count](),
            )
    barrier()
    var row_first = Int32(0)
    var row_count = Int32(ROWS)
    comptime if tiling.split:
        row_count = Int32(ROWS) // splits
        row_first = rank * row_count
        cluster_sync()
        var at = UInt32(Int(tile))
        for unit in range(t, row_count * Int32(GRANULES), Int32(THREADS)):
            var to = (row_first * Int32(GRANULES) + unit) * 4
            var sum = SIMD[F32, 4](0)
            for peer in range(splits):
                sum += cluster_load4(at + UInt32(to) * 4, UInt32(peer))
            tile.unsafe_store[alignment=16](Int(to), sum)
        cluster_sync()
    var output = Output[epilogue](bias, residual, y)
    var eights = row_count // 8
    for unit in range(t, Int32(PIXELS) * eights, Int32(THREADS)):
        var pixel = unit // eights
        var row = row_first + unit % eights * 8
        var m, f = m0 + pixel, f0 + row
        if m >= pixels or f >= Int32(g.f):
            continue
        var value = SIMD[F32, 8](0)
        var granule = (pixel // 4) ^ (row // 8 % 8)
        comptime for j in range(8):
            value[j] = tile[
                unsafe_offset=Int((row + Int32(j)) * Int32(PIXELS) + granule * 4 + pixel % 4)
            ]
        var to = Int(m) * g.f + Int(f)
        if g.f % 8 == 0:
            output.finish(value, output.channels[8](Int(f)), to)
        else:
            comptime for j in range(8):
                if f + Int32(j) < Int32(g.f):
                    output.finish(SIMD[F32, 1](value[j]), output.channels[1](Int(f) + j), to + j)
