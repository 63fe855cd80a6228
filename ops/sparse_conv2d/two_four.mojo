"""2:4 sparse convolution on Hopper: y[m, f] = act(alpha * sum_k w[f, k] x[m, k] + bias + residual).

M = N * P * Q output pixels, K = R * S * C, F filters; of four neighbouring channels of a tap at
most two of w are not zero.

    x[N, H, W, C]                  activations, read as [M, K] by the copy engine's im2col mode
    values[K / 64, F / 64, 4, 64, 8]   two of each four of w, K by eights, then filters
    indices[K / 64, F / 64, 128]   which two they are: the word of each thread (PTX ISA 8.2,
                                   section 9.7.14.6)
    y[N, P, Q, F]                  result, and the residual

wgmma's left side is the sparse one, so D = w x^T is turned over: a consumer, a warpgroup, has 64
filters and all pixels of the tile, and its rows of sums are filters. They leave registers through
stmatrix, which turns 8 x 8 of them back, for a tile in shared memory that the copy engine stores.
One warp, the producer, fills a ring of stages of 64 of K: 128 bytes for each pixel, and for each
64 filters 4 KiB of values and 512 bytes of indices. The rest is as in ops/gemm/hopper.mojo: the
stage after a tile's last one brings the residual, blocks go from tile to tile, and start while the
kernel before them still runs.

Bound by shared memory: 64 x 32 by 32 x 256 takes the tensor cores 128 clocks, and reading both
sides 144, beside the copies' writes.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim, thread_idx
from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext, FuncAttribute
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
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue, activate
from ..gemm.hopper import (
    GROUP,
    MAP,
    MATRIX,
    PROCESSORS,
    ROW,
    ROWS,
    Maps,
    Ring,
    Walk,
    im2col_map,
    is_plain,
    tensor_map,
)
from ..gemm.ptx import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    fence_async,
    fence_barrier_init,
    hold,
    load_2d,
    load_bytes,
    load_im2col,
    multiply_sparse,
    prefetch_map,
    shared_load,
    shared_load_matrices,
    shared_store_matrices,
    store_2d,
    stores_commit,
    stores_read,
    sync_threads,
)
from ..geometry import Geometry
from ..operands import F32, Data, Operands

comptime STEP = 64
"""Channels of a stage."""
comptime VALUES = 4096
"""Bytes of values of a stage, for 64 filters."""
comptime INDICES = 512
"""Bytes of indices of a stage, for 64 filters."""
comptime LEFT = (Int64(8) << 32) | (Int64(64) << 16)
"""A matrix descriptor: no swizzle, 128 bytes to the next eight rows, 1024 to the next eight of K."""


struct Sparse(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 filters each."""
    var pixels: Int
    """Pixels of a tile: 64, 128 or 256."""
    var stages: Int
    """Stages of the ring, the ones for the epilogue among them."""
    var blocks: Int
    """Blocks that a multiprocessor holds at a time; bounds the registers."""

    var overlap: Bool
    """Whether a consumer issues a stage's products before those of the last one are done."""

    def __init__(
        out self, groups: Int, pixels: Int, stages: Int, blocks: Int, *, overlap: Bool = False
    ):
        """Names the parts.

        Args:
            groups: Consumers.
            pixels: Pixels of a tile.
            stages: Stages of the ring.
            blocks: Blocks of a multiprocessor.
            overlap: Whether products of two stages overlap.
        """
        self.groups, self.pixels, self.stages = groups, pixels, stages
        self.blocks, self.overlap = blocks, overlap

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Filters, pixels and stages.
        """
        var size = t"{ROWS * self.groups}x{self.pixels}x{self.stages}"
        return String(size) + ("overlap" if self.overlap else "")

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, and the producer's warp.
        """
        return GROUP * self.groups + 32

    @always_inline
    def indices_at(self) -> Int:
        """Finds the indices in a stage.

        Returns:
            Bytes of the pixels and of the values.
        """
        return self.pixels * ROW + self.groups * VALUES

    @always_inline
    def stage(self) -> Int:
        """Counts the bytes of a stage.

        Returns:
            Those of pixels, values and indices, a multiple of 1024.
        """
        return ceildiv(self.indices_at() + self.groups * INDICES, 1024) * 1024

    @always_inline
    def part(self) -> Int:
        """Counts the pixels of a tile whose results fit into a stage.

        Returns:
            All of them, a half or a quarter.
        """
        var pixels = self.pixels
        while pixels * self.groups * ROW > self.stage():
            pixels //= 2
        return pixels

    @always_inline
    def parts(self) -> Int:
        """Counts the stages that a tile's results take.

        Returns:
            A power of two.
        """
        return self.pixels // self.part()

    @always_inline
    def shared(self) -> Int:
        """Counts the bytes of shared memory.

        Returns:
            The ring, its barriers, and what aligning it may take.
        """
        return self.stages * self.stage() + 16 * self.stages + 1024


struct Filters[dtype: DType](DevicePassable, TrivialRegisterPassable):
    """What the kernel reads without tensor maps: nothing but pointers.

    Parameters:
        dtype: Of the values.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var values: Data[Self.dtype]
    """[K / 64, F / 64, 4, 64, 8]."""
    var indices: Data[DType.uint32]
    """[K / 64, F / 64, 128]."""
    var bias: Data[F32]
    """[F]."""

    def __init__(out self, values: Data[Self.dtype], indices: Data[DType.uint32], bias: Data[F32]):
        """Names the arrays.

        Args:
            values: Two of each four.
            indices: Which two.
            bias: [F].
        """
        self.values, self.indices, self.bias = values, indices, bias

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type for the errors of a launch.

        Returns:
            The name.
        """
        return "Filters"


@__name(t"two_four_{config.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def two_four_kernel[
    dtype: DType, epilogue: Epilogue, config: Sparse
](maps: Maps[3], filters: Filters[dtype], walk: Walk[1]):
    """Computes tiles.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), y[M, F] and the residual.
        filters: Values, indices and bias.
        walk: How tiles and steps run over them.
    """
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024, name="two_four"
    ]()
    var ring = (UInt32(Int(memory)) + 1023) & ~UInt32(1023)
    var full = ring + UInt32(config.stages * config.stage())
    var empty = full + 8 * UInt32(config.stages)
    var t = Int32(thread_idx.x)
    if t == 0:
        comptime for i in range(config.stages):
            barrier_init(full + 8 * UInt32(i), 1)
            barrier_init(empty + 8 * UInt32(i), UInt32(config.groups))
        fence_barrier_init()
    sync_threads(0, UInt32(config.threads()))
    launch_dependent_grids()

    var at = UInt64(Int(Pointer(to=maps)))
    if t // 32 == Int32(config.groups * 4):
        # One thread drives the copy engine.
        if t % 32 == 0:
            _produce[dtype, epilogue, config](at, filters, walk, Ring(ring, full, empty))
    else:
        _consume[dtype, epilogue, config](at, filters, walk, Ring(ring, full, empty), t)


@always_inline
def _load_filters[
    dtype: DType, config: Sparse
](filters: Filters[dtype], walk: Walk[1], column: Int32, step: Int32, to: UInt32, full: UInt32):
    """Starts copying a step's values and indices; tells the barrier of all that the stage gets."""
    var all = (walk.filters + Int32(ROWS - 1)) // Int32(ROWS)
    var first = column * Int32(config.groups)
    var count = UInt32(min(all - first, Int32(config.groups)))
    barrier_expect(full, UInt32(config.pixels * ROW) + count * UInt32(VALUES + INDICES))
    var at = Int(step * all + first)
    load_bytes(
        to + UInt32(config.pixels * ROW),
        filters.values.unsafe_offset(at * (VALUES // 2)),
        count * UInt32(VALUES),
        full,
    )
    load_bytes(
        to + UInt32(config.indices_at()),
        filters.indices.unsafe_offset(at * (INDICES // 4)),
        count * UInt32(INDICES),
        full,
    )


@always_inline
def _produce[
    dtype: DType, epilogue: Epilogue, config: Sparse
](maps: UInt64, filters: Filters[dtype], walk: Walk[1], at_start: Ring):
    """Fills the ring, tile after tile, as stages become free."""
    comptime STAGE = UInt32(config.stage())
    comptime PART = config.part()
    prefetch_map(maps)
    var first_tile = Int32(block_idx.x)
    var steps = walk.steps()

    # The filters of the first stages do not depend on the kernel before.
    var early = min(steps, Int32(config.stages))
    var place = walk.place(first_tile)
    for i in range(early):
        _load_filters[dtype, config](
            filters,
            walk,
            place.column,
            i,
            at_start.stages + UInt32(i) * STAGE,
            at_start.full + 8 * UInt32(i),
        )
    wait_on_dependent_grids()

    var ring = at_start
    for tile in range(first_tile, walk.blocks, Int32(grid_dim.x)):
        place = walk.place(tile)
        var m0 = place.row * Int32(config.pixels)
        var image = m0 // walk.pq
        var pixel = m0 - image * walk.pq
        var p = pixel // walk.q
        var h0 = p * walk.stride_h - walk.pad_h
        var w0 = (pixel - p * walk.q) * walk.stride_w - walk.pad_w
        var r = Int32(0)
        var s = Int32(0)
        var c = Int32(0)
        for step in range(steps):
            var to = ring.stages + ring.slot * STAGE
            var full = ring.full + 8 * ring.slot
            if early > 0:
                early -= 1
            else:
                barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
                _load_filters[dtype, config](filters, walk, place.column, step, to, full)
            if walk.plain == 1:
                load_2d(to, maps, full, c * Int32(STEP), m0)
            else:
                load_im2col(
                    to,
                    maps,
                    full,
                    c * Int32(STEP),
                    w0,
                    h0,
                    image,
                    UInt16(s * walk.dilation_w),
                    UInt16(r * walk.dilation_h),
                )
            ring.advance[config.stages]()
            c += 1
            if c == walk.chunks:
                c = 0
                s += 1
                if s == walk.s:
                    s = 0
                    r += 1
        comptime for part in range(config.parts()):
            var to = ring.stages + ring.slot * STAGE
            var full = ring.full + 8 * ring.slot
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
            comptime if epilogue.adds:
                barrier_expect(full, UInt32(config.groups * PART * ROW))
                comptime for i in range(config.groups):
                    load_2d(
                        to + UInt32(i * PART * ROW),
                        maps + 2 * MAP,
                        full,
                        (place.column * Int32(config.groups) + Int32(i)) * Int32(ROWS),
                        m0 + Int32(part * PART),
                    )
            else:
                barrier_arrive(full)
            ring.advance[config.stages]()


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, config: Sparse
](maps: UInt64, filters: Filters[dtype], walk: Walk[1], at_start: Ring, t: Int32):
    """Multiplies the stages of the tiles, and finishes each."""
    comptime STAGE = UInt32(config.stage())
    comptime PART = config.part()

    var group = t // Int32(GROUP)
    var lane = t % 32
    var warp = t % Int32(GROUP) // 32
    var leads = t % Int32(GROUP) == 0
    # Thread 4 a + b of warp d holds the pixels 8 j + 2 b, and one more, of filters 16 d + a and 8 on.
    var row = warp * 16 + lane // 4
    # It names the row of a matrix that stmatrix takes: pixel (i / 2) * 8 + lane % 8 of 16, and 8
    # filters, 16 bytes, that change places by the pixel.
    var chunk = UInt32(warp * 2 + lane // 8 % 2)
    var name = UInt32(lane // 16 * 8 + lane % 8)
    var place_of_row = name * UInt32(ROW) + (chunk ^ (name % 8)) * 16
    var steps = walk.steps()

    var ring = at_start
    var storing = UInt32(0)  # The `empty` of the stages that are being stored, and how many.
    for tile in range(Int32(block_idx.x), walk.blocks, Int32(grid_dim.x)):
        var place = walk.place(tile)
        var m0 = place.row * Int32(config.pixels)
        var f0 = (place.column * Int32(config.groups) + group) * Int32(ROWS)
        var sums = StaticTuple[Float32, config.pixels // 2](fill=0)
        var before = ring.slot
        var indices = StaticTuple[UInt32, 2](fill=0)
        comptime UNROLL = 2 if config.overlap else 1
        for i in range(Int32(0), steps, Int32(UNROLL)):
            comptime for odd in range(UNROLL):
                if i + Int32(odd) < steps:
                    barrier_wait(ring.full + 8 * ring.slot, ring.parity)
                    var at = ring.stages + ring.slot * STAGE
                    var values = at + UInt32(config.pixels * ROW) + UInt32(group) * UInt32(VALUES)
                    var w = LEFT | Int64(values >> 4)
                    var x = MATRIX | Int64(at >> 4)
                    indices[odd] = shared_load(at + UInt32(config.indices_at()) + UInt32(t) * 4)
                    wgmma_fence_aligned()
                    comptime for k in range(2):
                        sums = multiply_sparse[dtype, config.pixels, k == 1](
                            w + Int64(128 * k), x + Int64(4 * k), indices[odd], sums
                        )
                    wgmma_commit_group_sync()
                    if odd == 0 and i == 0 and storing != 0 and leads:
                        # The tile before has left shared memory by now, or soon will have.
                        stores_read()
                        comptime for part in range(config.parts()):
                            barrier_arrive(
                                ring.empty
                                + 8 * ((storing - 1 + UInt32(part)) % UInt32(config.stages))
                            )
                        storing = 0
                    comptime if config.overlap:
                        wgmma_wait_group_sync[1]()
                        hold(indices[1 - odd], ring.stages, UInt32(walk.more))
                        if (odd == 1 or i > 0) and leads:
                            barrier_arrive(ring.empty + 8 * before)
                    else:
                        wgmma_wait_group_sync[0]()
                        hold(indices[odd], ring.stages, UInt32(walk.more))
                        if leads:
                            barrier_arrive(ring.empty + 8 * ring.slot)
                    before = ring.slot
                    ring.advance[config.stages]()
        comptime if config.overlap:
            wgmma_wait_group_sync[0]()
            comptime for odd in range(UNROLL):
                hold(indices[odd], ring.stages, UInt32(walk.more))
            if leads:
                barrier_arrive(ring.empty + 8 * before)

        var bias = SIMD[F32, 2](0)
        comptime for half in range(2):
            var f = f0 + row + Int32(8 * half)
            if f < walk.filters:
                bias[half] = filters.bias[unsafe_offset=Int(f)]
        storing = ring.slot + 1
        comptime for part in range(config.parts()):
            barrier_wait(ring.full + 8 * ring.slot, ring.parity)
            var to = ring.stages + ring.slot * STAGE + UInt32(group) * UInt32(PART * ROW)
            comptime for pair in range(PART // 16):
                var at = to + UInt32(pair * 16 * ROW) + place_of_row
                var bits = SIMD[DType.uint32, 4](0)
                comptime if epilogue.adds:
                    bits = shared_load_matrices[turned=True](at)
                comptime for i in range(4):
                    comptime half = i % 2
                    comptime j = part * PART // 8 + 2 * pair + i // 2
                    var value = SIMD[F32, 2](sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])
                    value = value.fma(SIMD[F32, 2](walk.alpha), SIMD[F32, 2](bias[half]))
                    comptime if epilogue.adds:
                        value += bitcast[dtype, 2](bits[i]).cast[F32]()
                    value = activate[epilogue](value)
                    bits[i] = bitcast[DType.uint32, 1](value.cast[dtype]())
                shared_store_matrices[turned=True](at, bits)
            fence_async()
            sync_threads(UInt32(group) + 1, UInt32(GROUP))
            if leads:
                store_2d(maps + MAP, to, f0, m0 + Int32(part * PART))
                stores_commit()
            ring.advance[config.stages]()
    stores_read()


# The host's side


def two_four_tile[
    dtype: DType, epilogue: Epilogue, config: Sparse
](g: Geometry, o: Operands[dtype], indices: Data[DType.uint32], ctx: DeviceContext) raises:
    """Enqueues a convolution with a tile.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        g: Sizes; ops/gemm/hopper.mojo takes them.
        o: The tensors; w holds the values as `two_four` of graphs/arrange.py orders them.
        indices: Which two of each four the values are, from there, too.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime PART = config.part()
    comptime assert config.parts() < config.stages, "two_four: a tile's results fill the ring"
    var maps = Maps[3]()
    var c, f, m = Int64(g.c), Int64(g.f), Int64(g.pixels())
    if is_plain(g):
        maps.maps[0] = tensor_map[dtype, 2](ctx, o.x, [c, m], [Int32(STEP), Int32(config.pixels)])
    else:
        maps.maps[0] = im2col_map[dtype](ctx, o.x, g, config.pixels)
    maps.maps[1] = tensor_map[dtype, 2](ctx, o.y, [f, m], [Int32(STEP), Int32(PART)])
    comptime if epilogue.adds:
        maps.maps[2] = tensor_map[dtype, 2](ctx, o.residual, [f, m], [Int32(STEP), Int32(PART)])
    var walk = Walk[1](
        [g],
        rows=config.pixels,
        chunks=ceildiv(g.c, STEP),
        tiles=ceildiv(g.f, ROWS * config.groups),
        splits=1,
        alpha=o.alpha,
    )
    ctx.enqueue_function[two_four_kernel[dtype, epilogue, config]](
        maps,
        Filters[dtype](o.w, indices, o.bias),
        walk,
        grid_dim=min(Int(walk.blocks), PROCESSORS * config.blocks),
        block_dim=config.threads(),
        shared_mem_bytes=config.shared(),
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(config.shared())),
    )
