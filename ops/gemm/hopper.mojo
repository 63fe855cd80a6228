"""Implicit GEMM on Hopper's tensor cores: y[m, f] = act(alpha * sum_k x[m, k] w[f, k] + bias + residual).

M = N * P * Q output pixels, K = R * S * C, N = F filters.

    x[N, H, W, C]   activations, read as [M, K] by the copy engine's im2col mode
    w[F, R, S, C]   filters
    y[N, P, Q, F]   result, and the residual

A block computes a tile of `64 * groups` pixels x `columns` filters. One warp, the producer, has
the copy engine (TMA) fill a ring of stages in shared memory, 128 bytes of K at a time for each
pixel and filter: im2col walks the pixels of the tile across rows and images, steps with the
stride and fills the padding with zeros. `groups` warpgroups of 128 threads, the consumers,
multiply the stages by wgmma, 64 pixels each, and keep float32 sums in registers. The stage after
the last one brings the residual; the result overwrites it and leaves through the copy engine.

Where tiles are fewer than multiprocessors, a cluster of `splits` blocks shares one tile: each
sums a part of K, and then a part of the rows over the cluster's shared memories (split-K).

Blocks start while the kernel before them still runs (programmatic dependent launch): barriers,
tensor maps and the first filters are loaded before they wait for the activations.

float32 is multiplied as TF32 (10 bits of mantissa). C and F have to be multiples of 16 bytes.
After Osama et al. 2023 (arXiv:2301.03598) and the PTX ISA 8.0, sections 5.5 and 9.7.14.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceBuffer, DeviceContext, Dim, FuncAttribute
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue, activate
from ..geometry import Geometry
from ..operands import F32, Data, Operands
from .ptx import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    cluster_load4,
    cluster_sync,
    fence_async,
    fence_barrier_init,
    load_2d,
    load_3d,
    load_im2col,
    prefetch_map,
    shared_load,
    shared_store,
    store_2d,
    stores_wait,
    sync_threads,
)

comptime ROW = 128
"""Bytes of K in a stage, for each pixel and each filter: one row of the 128-byte swizzle."""
comptime GROUP = 128
"""Threads of a consumer, a warpgroup."""
comptime ROWS = 64
"""Pixels of a consumer: the M of wgmma."""


struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 pixels each: 1 or 2."""
    var columns: Int
    """Filters of a tile: 32, 64, 128 or 256."""
    var stages: Int
    """Stages of the ring, the one for the epilogue among them."""
    var blocks: Int
    """Blocks that a multiprocessor holds at a time; bounds the registers."""
    var split: Bool
    """Whether a cluster shares a tile."""

    def __init__(out self, groups: Int, columns: Int, stages: Int, blocks: Int, split: Bool):
        """Names the parts.

        Args:
            groups: Consumers.
            columns: Filters of a tile.
            stages: Stages of the ring.
            blocks: Blocks of a multiprocessor.
            split: Whether a cluster shares a tile.
        """
        self.groups, self.columns, self.stages = groups, columns, stages
        self.blocks, self.split = blocks, split

    @always_inline
    def rows(self) -> Int:
        """Counts the pixels of a tile.

        Returns:
            64 for each consumer.
        """
        return ROWS * self.groups

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, and the producer's warp.
        """
        return GROUP * self.groups + 32

    @always_inline
    def stage(self) -> Int:
        """Counts the bytes of a stage.

        Returns:
            128 for each pixel and filter.
        """
        return (self.rows() + self.columns) * ROW

    @always_inline
    def shared(self) -> Int:
        """Counts the bytes of shared memory.

        Returns:
            The ring, its barriers, and what aligning it may take.
        """
        return self.stages * self.stage() + 16 * self.stages + 1024


struct Walk(DevicePassable, TrivialRegisterPassable):
    """How the tiles and the steps of K run over the tensors."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var pixels: Int32
    """M."""
    var filters: Int32
    """F."""
    var q: Int32
    """Output columns of an image."""
    var pq: Int32
    """Output pixels of an image."""
    var s: Int32
    """Taps of a window's row."""
    var taps: Int32
    """Taps of a window."""
    var chunks: Int32
    """Steps of 128 bytes over the channels."""
    var stride_h: Int32
    """Input rows between windows."""
    var stride_w: Int32
    """Input columns between windows."""
    var pad_h: Int32
    """Rows of padding."""
    var pad_w: Int32
    """Columns of padding."""
    var dilation_h: Int32
    """Input rows between taps."""
    var dilation_w: Int32
    """Input columns between taps."""
    var tiles: Int32
    """Tiles of filters; they run before the tiles of pixels."""
    var splits: Int32
    """Blocks that share a tile."""
    var plain: Int32
    """1 if x is a matrix [M, C], read without im2col."""

    def __init__(out self, g: Geometry, chunks: Int, tiles: Int, splits: Int):
        """Takes the sizes of a convolution.

        Args:
            g: Sizes.
            chunks: Steps over the channels.
            tiles: Tiles of filters.
            splits: Blocks that share a tile.
        """
        self.pixels, self.filters = Int32(g.pixels()), Int32(g.f)
        self.q, self.pq = Int32(g.q), Int32(g.p * g.q)
        self.s, self.taps, self.chunks = Int32(g.s), Int32(g.r * g.s), Int32(chunks)
        self.stride_h, self.stride_w = Int32(g.stride_h), Int32(g.stride_w)
        self.pad_h, self.pad_w = Int32(g.pad_h), Int32(g.pad_w)
        self.dilation_h, self.dilation_w = Int32(g.dilation_h), Int32(g.dilation_w)
        self.tiles, self.splits = Int32(tiles), Int32(splits)
        self.plain = Int32(1 if is_plain(g) else 0)

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type for the errors of a launch.

        Returns:
            The name.
        """
        return "Walk"


def is_plain(g: Geometry) -> Bool:
    """Tells whether a convolution is a matrix product.

    Args:
        g: Sizes.

    Returns:
        True for 1 x 1 windows without stride or padding.
    """
    return g.r * g.s * g.stride_h * g.stride_w == 1 and g.pad_h + g.pad_w == 0


@always_inline
def _pack[dtype: DType](a: Float32, b: Float32) -> UInt32:
    """Rounds two numbers to 16 bits each, the first one lower."""
    return bitcast[DType.uint32, 1](SIMD[F32, 2](a, b).cast[dtype]())


@always_inline
def _unpack[dtype: DType](bits: UInt32) -> SIMD[F32, 2]:
    return bitcast[dtype, 2](bits).cast[F32]()


@__llvm_arg_metadata(x_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(w_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(y_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(residual_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def hopper_kernel[
    dtype: DType, epilogue: Epilogue, config: Config
](
    x_map: TMADescriptor,
    w_map: TMADescriptor,
    y_map: TMADescriptor,
    residual_map: TMADescriptor,
    o: Operands[dtype],
    walk: Walk,
):
    """Computes one tile, or a cluster's share of one.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        x_map: Tensor map of x: im2col, or a matrix.
        w_map: Tensor map of w[F, R * S, C].
        y_map: Tensor map of y[M, F].
        residual_map: Tensor map of the residual[M, F].
        o: The tensors.
        walk: How tiles and steps run over them.
    """
    comptime WIDTH = ROW // size_of[dtype]()
    comptime COLUMNS = config.columns
    comptime STAGES = config.stages
    comptime STAGE = UInt32(config.stage())
    comptime W_AT = UInt32(config.rows() * ROW)

    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024, name="hopper_gemm"
    ]()
    var ring = (UInt32(Int(memory)) + 1023) & ~UInt32(1023)
    var full = ring + UInt32(STAGES) * STAGE
    var empty = full + 8 * UInt32(STAGES)
    var t = Int32(thread_idx.x)
    var warp = t // 32

    var index = Int32(block_idx.x)
    var rank = Int32(0)
    comptime if config.split:
        rank = index % walk.splits
        index = index // walk.splits
    var row_tile = index // walk.tiles
    var m0 = row_tile * Int32(config.rows())
    var f0 = (index - row_tile * walk.tiles) * Int32(COLUMNS)
    var steps = walk.taps * walk.chunks
    var first = Int32(0)
    var last = steps
    comptime if config.split:
        first = steps * rank // walk.splits
        last = steps * (rank + 1) // walk.splits

    if t == 0:
        comptime for i in range(STAGES):
            barrier_init(full + 8 * UInt32(i), 1)
            barrier_init(empty + 8 * UInt32(i), UInt32(config.groups))
        fence_barrier_init()
    sync_threads(0, UInt32(config.threads()))
    launch_dependent_grids()

    if warp == Int32(config.groups * 4):
        # The producer: one thread drives the copy engine.
        if t % 32 == 0:
            var x_at = UInt64(Int(Pointer(to=x_map)))
            var w_at = UInt64(Int(Pointer(to=w_map)))
            prefetch_map(x_at)
            prefetch_map(w_at)
            var image = m0 // walk.pq
            var pixel = m0 - image * walk.pq
            var p = pixel // walk.q
            var h0 = p * walk.stride_h - walk.pad_h
            var w0 = (pixel - p * walk.q) * walk.stride_w - walk.pad_w
            # The filters of the first stages do not depend on the kernel before.
            var early = min(last - first, Int32(STAGES))
            var tap = first // walk.chunks
            var c = first - tap * walk.chunks
            for i in range(early):
                barrier_expect(full + 8 * UInt32(i), STAGE)
                load_3d(
                    ring + UInt32(i) * STAGE + W_AT,
                    w_at,
                    full + 8 * UInt32(i),
                    c * Int32(WIDTH),
                    tap,
                    f0,
                )
                c += 1
                if c == walk.chunks:
                    c = 0
                    tap += 1
            wait_on_dependent_grids()
            tap = first // walk.chunks
            c = first - tap * walk.chunks
            var r = tap // walk.s
            var s = tap - r * walk.s
            var slot = UInt32(0)
            var parity = UInt32(1)
            for i in range(last - first):
                var at = ring + slot * STAGE
                var done = full + 8 * slot
                if i >= early:
                    barrier_wait(empty + 8 * slot, parity)
                    barrier_expect(done, STAGE)
                    load_3d(at + W_AT, w_at, done, c * Int32(WIDTH), r * walk.s + s, f0)
                if walk.plain == 1:
                    load_2d(at, x_at, done, c * Int32(WIDTH), m0)
                else:
                    load_im2col(
                        at,
                        x_at,
                        done,
                        c * Int32(WIDTH),
                        w0,
                        h0,
                        image,
                        UInt16(s * walk.dilation_w),
                        UInt16(r * walk.dilation_h),
                    )
                c += 1
                if c == walk.chunks:
                    c = 0
                    s += 1
                    if s == walk.s:
                        s = 0
                        r += 1
                slot += 1
                if slot == UInt32(STAGES):
                    slot = 0
                    parity ^= 1
            comptime if not config.split:
                # The stage of the epilogue.
                if last - first >= Int32(STAGES):
                    barrier_wait(empty + 8 * slot, parity)
                comptime if epilogue.adds:
                    var map = UInt64(Int(Pointer(to=residual_map)))
                    barrier_expect(
                        full + 8 * slot, UInt32(config.rows() * COLUMNS * size_of[dtype]())
                    )
                    comptime for j in range(COLUMNS // WIDTH):
                        comptime for i in range(config.groups):
                            load_2d(
                                ring
                                + slot * STAGE
                                + UInt32((i * (COLUMNS // WIDTH) + j) * ROWS * ROW),
                                map,
                                full + 8 * slot,
                                f0 + Int32(j * WIDTH),
                                m0 + Int32(i * ROWS),
                            )
                else:
                    barrier_arrive(full + 8 * slot)
    else:
        _consume[dtype, epilogue, config](
            y_map, o, walk, ring, full, empty, Int32(t), last - first, m0, f0
        )
    comptime if config.split:
        _share[dtype, epilogue, config](o, walk, ring, t, rank, m0, f0)


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, config: Config
](
    y_map: TMADescriptor,
    o: Operands[dtype],
    walk: Walk,
    ring: UInt32,
    full: UInt32,
    empty: UInt32,
    t: Int32,
    steps: Int32,
    m0: Int32,
    f0: Int32,
):
    """Multiplies the stages of a block; finishes the tile, or leaves its sums in shared memory."""
    comptime WIDTH = ROW // size_of[dtype]()
    comptime DEPTH = 32 // size_of[dtype]()
    comptime COLUMNS = config.columns
    comptime STAGES = config.stages
    comptime STAGE = UInt32(config.stage())
    comptime W_AT = UInt32(config.rows() * ROW)
    comptime SUMS = COLUMNS // 2
    # A matrix descriptor: 128-byte swizzle, 1024 bytes from eight rows to the next eight.
    comptime MATRIX = (Int64(1) << 62) | (Int64(64) << 32) | (Int64(1) << 16)

    var group = t // Int32(GROUP)
    var sums = StaticTuple[Float32, SUMS](fill=0)
    var slot = UInt32(0)
    var parity = UInt32(0)
    for i in range(steps):
        barrier_wait(full + 8 * slot, parity)
        var at = ring + slot * STAGE
        var x = MATRIX | Int64((at + UInt32(group) * UInt32(ROWS * ROW)) >> 4)
        var w = MATRIX | Int64((at + W_AT) >> 4)
        wgmma_fence_aligned()
        comptime for k in range(4):
            sums = wgmma_async[64, COLUMNS, DEPTH, a_type=dtype, b_type=dtype](
                WGMMADescriptor[dtype](x + Int64(2 * k)),
                WGMMADescriptor[dtype](w + Int64(2 * k)),
                sums,
            )
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        if t % Int32(GROUP) == 0:
            barrier_arrive(empty + 8 * slot)
        slot += 1
        if slot == UInt32(STAGES):
            slot = 0
            parity ^= 1

    # Thread 4 a + b of warp d holds the columns 8 j + 2 b, and one more, of rows 16 d + a and 8 on.
    var lane = t % 32
    var row = t % Int32(GROUP) // 32 * 16 + lane // 4
    var pair = lane % 4
    comptime if config.split:
        comptime PITCH = (COLUMNS + 8) * 4
        var to = ring + UInt32(row) * UInt32(PITCH) + UInt32(pair) * 8
        comptime for j in range(COLUMNS // 8):
            comptime for half in range(2):
                var at = to + UInt32(half * 8 * PITCH + j * 32)
                shared_store(at, bitcast[DType.uint32, 1](sums[4 * j + 2 * half]))
                shared_store(at + 4, bitcast[DType.uint32, 1](sums[4 * j + 2 * half + 1]))
    else:
        barrier_wait(full + 8 * slot, parity)
        var tile = ring + slot * STAGE + UInt32(group) * UInt32(COLUMNS // WIDTH * ROWS * ROW)
        var swizzle = UInt32(row % 8)
        comptime PAIR = 2 * size_of[dtype]()
        comptime for j in range(COLUMNS // 8):
            var f = f0 + Int32(8 * j) + pair * 2
            var bias = SIMD[F32, 2](0)
            if f < walk.filters:
                bias = o.bias.unsafe_load[width=2, alignment=8](Int(f))
            comptime for half in range(2):
                var value = SIMD[F32, 2](sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])
                value = value.fma(SIMD[F32, 2](o.alpha), bias)
                comptime if size_of[dtype]() == 2:
                    comptime BOX = 8 * j // WIDTH
                    comptime CHUNK = 8 * j % WIDTH // 8
                    var at = (
                        tile
                        + UInt32(BOX * ROWS * ROW)
                        + UInt32(row + Int32(8 * half)) * UInt32(ROW)
                        + ((UInt32(CHUNK) ^ swizzle) * 16 + UInt32(pair) * UInt32(PAIR))
                    )
                    comptime if epilogue.adds:
                        value += _unpack[dtype](shared_load(at))
                    value = activate[epilogue](value)
                    shared_store(at, _pack[dtype](value[0], value[1]))
                else:
                    comptime BOX = 8 * j // WIDTH
                    comptime CHUNK = 8 * j % WIDTH // 4
                    var at = (
                        tile
                        + UInt32(BOX * ROWS * ROW)
                        + UInt32(row + Int32(8 * half)) * UInt32(ROW)
                        + (
                            ((UInt32(CHUNK) + UInt32(pair) // 2) ^ swizzle) * 16
                            + UInt32(pair) % 2 * 8
                        )
                    )
                    comptime if epilogue.adds:
                        value[0] += bitcast[F32, 1](shared_load(at))
                        value[1] += bitcast[F32, 1](shared_load(at + 4))
                    value = activate[epilogue](value)
                    shared_store(at, bitcast[DType.uint32, 1](value[0]))
                    shared_store(at + 4, bitcast[DType.uint32, 1](value[1]))
        fence_async()
        sync_threads(UInt32(group) + 1, UInt32(GROUP))
        if t % Int32(GROUP) == 0:
            var map = UInt64(Int(Pointer(to=y_map)))
            comptime for j in range(COLUMNS // WIDTH):
                store_2d(
                    map,
                    tile + UInt32(j * ROWS * ROW),
                    f0 + Int32(j * WIDTH),
                    m0 + group * Int32(ROWS),
                )
            stores_wait()


@always_inline
def _share[
    dtype: DType, epilogue: Epilogue, config: Config
](o: Operands[dtype], walk: Walk, ring: UInt32, t: Int32, rank: Int32, m0: Int32, f0: Int32):
    """Adds up a cluster's sums: each block some rows of the tile, 8 columns a thread at a time."""
    comptime PITCH = (config.columns + 8) * 4
    comptime EIGHTS = config.columns // 8
    cluster_sync()
    var rows = Int32(ROWS) // walk.splits
    for unit in range(t, rows * Int32(EIGHTS), Int32(config.threads())):
        var row = rank * rows + unit // Int32(EIGHTS)
        var column = unit % Int32(EIGHTS) * 8
        var m = m0 + row
        var f = f0 + column
        if m < walk.pixels and f < walk.filters:
            var at = ring + UInt32(row) * UInt32(PITCH) + UInt32(column) * 4
            var low = SIMD[F32, 4](0)
            var high = SIMD[F32, 4](0)
            for peer in range(walk.splits):
                low += cluster_load4(at, UInt32(peer))
                high += cluster_load4(at + 16, UInt32(peer))
            var value = low.join(high)
            value = value.fma(
                SIMD[F32, 8](o.alpha), o.bias.unsafe_load[width=8, alignment=16](Int(f))
            )
            var to = Int(m) * Int(walk.filters) + Int(f)
            comptime if epilogue.adds:
                value += o.residual.unsafe_load[width=8, alignment=16](to).cast[F32]()
            o.y.unsafe_store[alignment=16](to, activate[epilogue](value).cast[dtype]())
    cluster_sync()


# The host's side


def _matrix_map[
    dtype: DType, rank: Int
](
    ctx: DeviceContext,
    at: Data[dtype],
    var sizes: Array[Int64, rank],
    var box: Array[Int32, rank],
) raises -> TMADescriptor:
    """Makes the tensor map of a dense tensor, its last axis first in `sizes` and `box`."""
    var map = TMADescriptor()
    var strides = Array[Int64, rank](fill=0)
    var ones = Array[Int32, rank](fill=1)
    var bytes = Int64(size_of[dtype]())
    comptime for i in range(rank):
        bytes *= sizes[i]
        strides[i] = bytes
    DeviceBuffer[dtype](ctx, at, 1, owning=False)._tensor_map_encode_tiled(
        Pointer(to=map).unsafe_bitcast[NoneType](),
        _map_dtype[dtype](),
        Int32(rank),
        sizes.unsafe_ptr(),
        strides.unsafe_ptr(),
        box.unsafe_ptr(),
        ones.unsafe_ptr(),
        0,
        3,
        2,
        0,
    )
    return map


def _im2col_map[
    dtype: DType
](ctx: DeviceContext, at: Data[dtype], g: Geometry, rows: Int) raises -> TMADescriptor:
    """Makes the tensor map that reads x[N, H, W, C] window by window."""
    var map = TMADescriptor()
    var bytes = Int64(size_of[dtype]())
    var dims = Array[Int64, 4](fill=0)
    dims[0], dims[1], dims[2], dims[3] = Int64(g.c), Int64(g.w), Int64(g.h), Int64(g.n)
    var strides = Array[Int64, 4](fill=0)
    comptime for i in range(4):
        bytes *= dims[i]
        strides[i] = bytes
    var lower = Array[Int32, 2](fill=0)
    lower[0], lower[1] = Int32(-g.pad_w), Int32(-g.pad_h)
    var upper = Array[Int32, 2](fill=0)
    # The corner of the last window, as far from the image's end.
    upper[0] = Int32((g.q - 1) * g.stride_w - g.pad_w - (g.w - 1))
    upper[1] = Int32((g.p - 1) * g.stride_h - g.pad_h - (g.h - 1))
    var steps = Array[Int32, 4](fill=1)
    steps[1], steps[2] = Int32(g.stride_w), Int32(g.stride_h)
    DeviceBuffer[dtype](ctx, at, 1, owning=False)._tensor_map_encode_im2col(
        Pointer(to=map).unsafe_bitcast[NoneType](),
        _map_dtype[dtype](),
        4,
        dims.unsafe_ptr(),
        strides.unsafe_ptr(),
        lower.unsafe_ptr(),
        upper.unsafe_ptr(),
        Int32(ROW // size_of[dtype]()),
        Int32(rows),
        steps.unsafe_ptr(),
        0,
        3,
        2,
        0,
    )
    return map


def _map_dtype[dtype: DType]() -> Int32:
    """Numbers a dtype as CUtensorMapDataType does."""
    comptime if dtype == F32:
        return 7
    elif dtype == DType.float16:
        return 6
    else:
        return 9


def hopper_gemm[
    dtype: DType, epilogue: Epilogue, config: Config
](g: Geometry, o: Operands[dtype], splits: Int, ctx: DeviceContext) raises:
    """Enqueues a convolution, or a matrix product.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        g: Sizes; one group.
        o: The tensors.
        splits: Blocks that share a tile; 1 unless the config splits.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime WIDTH = ROW // size_of[dtype]()
    comptime assert (
        config.columns * config.rows() * size_of[dtype]() <= config.stage() or config.split
    ), "hopper_gemm: a stage has to hold the tile's result"
    var tiles = ceildiv(g.f, config.columns)
    var blocks = ceildiv(g.pixels(), config.rows()) * tiles * splits
    var c, f, m = Int64(g.c), Int64(g.f), Int64(g.pixels())
    var x_map: TMADescriptor
    if is_plain(g):
        x_map = _matrix_map[dtype, 2](ctx, o.x, [c, m], [Int32(WIDTH), Int32(config.rows())])
    else:
        x_map = _im2col_map[dtype](ctx, o.x, g, config.rows())
    var w_map = _matrix_map[dtype, 3](
        ctx, o.w, [c, Int64(g.r * g.s), f], [Int32(WIDTH), 1, Int32(config.columns)]
    )
    var y_map = _matrix_map[dtype, 2](ctx, o.y, [f, m], [Int32(WIDTH), Int32(ROWS)])
    var residual_map = y_map
    comptime if epilogue.adds:
        residual_map = _matrix_map[dtype, 2](ctx, o.residual, [f, m], [Int32(WIDTH), Int32(ROWS)])
    ctx.enqueue_function[hopper_kernel[dtype, epilogue, config]](
        x_map,
        w_map,
        y_map,
        residual_map,
        o,
        Walk(g, ceildiv(g.c, WIDTH), tiles, splits),
        grid_dim=blocks,
        block_dim=config.threads(),
        cluster_dim=Dim(splits),
        shared_mem_bytes=config.shared(),
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(config.shared())),
    )
