"""2:4 sparse convolution on Hopper: y[m, f] = act(alpha * sum_k w[f, k] x[m, k] + bias + residual).

M = N * P * Q output pixels, K = R * S * C, F filters; of four neighbouring channels of a tap at
most two of w are not zero.

    x[N, H, W, C]                         activations
    values[K / 64, F / 128, 2, 4, 64, 8]  two of each four of w: K by eights, filters, K
    indices[K / 64, F / 128, 2, 128]      which two they are: a word for each thread of a consumer
                                          (PTX ISA 8.2, section 9.7.14.6)
    y[N, P, Q, F]                         result, and the residual

The left side of a sparse wgmma is the sparse one, so D = w x^T is turned over: a consumer, a
warpgroup, has 64 filters, the rows of its sums, and all pixels of a tile. Its results leave the
registers by stmatrix, which turns 8 x 8 of them back. Two warps, the producers, fill a ring of
windows of pixels, 64 channels wide, and one of filters, 64 of K at a time. As in
ops/gemm/hopper.mojo the window after a tile's last one brings the residual and takes the result,
blocks go from tile to tile, and start while the kernel before them still runs.

A window holds the pixels of one tap (im2col), or, for strides of 1, those of all taps: the padding
before a row is also what follows the row before it, and that before an image what follows the last
one, so pixels are walked over with the padding before them, (H + pad) (W + pad) an image. Then a
tap is the same window some rows of shared memory further on, where wgmma's descriptor may begin:
the swizzle is of addresses. Sums of padding are not stored.

Bound by shared memory, of which the tensor cores read a 64 x 32 and a 32 x 256 side in 144 clocks
and multiply them in 128, beside what the copies write; and by power: 0.9 to 1.0 PFLOP/s with the
zeros counted (H200, 2026-11-21). C has to be a multiple of 8, and F one of 8.
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
from std.math import ceildiv
from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue, activate
from ..gemm.old import (
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
from ..hopper.mma import hold, mma_sparse
from ..hopper.ptx import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    fence_async,
    fence_barrier_init,
    load_2d,
    load_bytes,
    load_im2col,
    prefetch_map,
    shared_load,
    shared_load4,
    shared_load_matrices,
    shared_store_matrices,
    store_2d,
    stores_commit,
    stores_read,
    sync_threads,
)
from ..geometry import Geometry
from ..kernel_argument import KernelArgument
from ..operands import F32, Data, Operands

comptime STEP = 64
"""Channels of a stage."""
comptime VALUES = 4096
"""Bytes of values of a stage, for 64 filters."""
comptime INDICES = 512
"""Bytes of indices of a stage, for 64 filters."""
comptime LEFT = (Int64(8) << 32) | (Int64(64) << 16)
"""A matrix descriptor: no swizzle, 128 bytes to eight rows on, 1024 to eight numbers of K on."""


struct Sparse(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 filters each."""
    var pixels: Int
    """Pixels of a tile: what mma_sparse takes; a group's share is a multiple of 16."""
    var windows: Int
    """Windows of pixels in shared memory, the ones for the epilogue among them."""
    var steps: Int
    """Steps of filters in shared memory."""
    var blocks: Int
    """Blocks that a multiprocessor holds at a time; bounds the registers."""
    var shares: Bool
    """Whether all taps read one window of 64 channels."""
    var tile_us: Float64
    """What a tile costs beside its steps, us, while all multiprocessors work."""
    var step_us: Float64
    """What a step costs, us; with two blocks, a step of both."""

    def __init__(
        out self,
        groups: Int,
        pixels: Int,
        windows: Int,
        steps: Int,
        blocks: Int,
        *,
        tile_us: Float64,
        step_us: Float64,
        shares: Bool = False,
    ):
        """Names the parts.

        Args:
            groups: Consumers.
            pixels: Pixels of a tile.
            windows: Windows of pixels.
            steps: Steps of filters.
            blocks: Blocks of a multiprocessor.
            tile_us: What a tile costs.
            step_us: What a step costs.
            shares: Whether all taps read one window.
        """
        self.groups, self.pixels, self.windows = groups, pixels, windows
        self.steps, self.blocks, self.shares = steps, blocks, shares
        self.tile_us, self.step_us = tile_us, step_us

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Filters, pixels, windows and steps.
        """
        var size = t"{ROWS * self.groups}x{self.pixels}x{self.windows}x{self.steps}"
        return String(size) + ("shares" if self.shares else "")

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, and two warps that produce.
        """
        return GROUP * self.groups + 64

    @always_inline
    def step(self) -> Int:
        """Counts the bytes of a step's filters.

        Returns:
            Those of values and indices.
        """
        return self.groups * (VALUES + INDICES)

    @always_inline
    def part(self) -> Int:
        """Counts the pixels of a tile whose results fit into a window.

        Returns:
            A part of them for each group.
        """
        return self.pixels // self.groups

    @always_inline
    def shared(self, window: Int) -> Int:
        """Counts the bytes of shared memory.

        Args:
            window: Bytes of a window.

        Returns:
            The rings, their barriers, and what aligning them may take.
        """
        return 2048 + self.windows * window + self.steps * self.step()


comptime TILES: List[Sparse] = [
    # H200, 2026-11-21, fitted to the 3x3 and 1x1 layers of ResNet-50 at batch 32 to 128
    Sparse(2, 192, 6, 6, 1, tile_us=2.86, step_us=0.351),
    Sparse(2, 96, 9, 9, 1, tile_us=1.20, step_us=0.234),
    Sparse(1, 208, 2, 5, 2, tile_us=2.27, step_us=0.331, shares=True),
    Sparse(1, 224, 2, 4, 2, tile_us=2.26, step_us=0.356, shares=True),
]
"""The tiles that are compiled."""
comptime MEMORY = 228 * 1024
"""Bytes of shared memory of a multiprocessor, of which a block takes 1024 more than it asks for."""


struct Reach(KernelArgument, TrivialRegisterPassable):
    """How windows lie in shared memory, and which of their sums are stored."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var window: Int32
    """Bytes from a window to the next."""
    var pixels: Int32
    """Pixels of a window."""
    var row: Int32
    """Bytes from a row of taps to the next."""
    var tap: Int32
    """Bytes from a tap to the next in a row."""
    var never: Int32
    """0, unknown to the compiler."""
    var n: Int32
    """Images."""
    var p: Int32
    """Output rows that are stored."""
    var q: Int32
    """Output columns that are stored."""

    def __init__(out self, g: Geometry, config: Sparse):
        """Takes the sizes.

        Args:
            g: Of the convolution.
            config: Of the tile.
        """
        self.n, self.p, self.q = Int32(g.n), Int32(g.p), Int32(g.q)
        var row = g.dilation_h * (g.w + g.pad_w)
        self.row, self.tap = Int32(row * ROW), Int32(g.dilation_w * ROW)
        var pixels = config.pixels
        if config.shares:
            pixels += (g.r - 1) * row + (g.s - 1) * g.dilation_w
        self.pixels, self.window = Int32(pixels), Int32(ceildiv(pixels, 8) * 8 * ROW)
        self.never = 0


struct Filters[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """What the kernel reads without tensor maps: nothing but pointers.

    Parameters:
        dtype: Of the values.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var values: Data[Self.dtype]
    """[K / 64, F / 128, 2, 4, 64, 8]."""
    var indices: Data[DType.uint32]
    """[K / 64, F / 128, 2, 128]."""
    var bias: Data[F32]
    """[F]."""
    var y: Data[Self.dtype]
    """[N, P, Q, F]."""

    def __init__(out self, o: Operands[Self.dtype], indices: Data[DType.uint32]):
        """Names the arrays.

        Args:
            o: The tensors; w holds the values.
            indices: Which two.
        """
        self.values, self.indices, self.bias, self.y = o.w, indices, o.bias, o.y


@__name(t"sparse_conv2d_two_four_{config.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def two_four_kernel[
    dtype: DType, epilogue: Epilogue, config: Sparse
](maps: Maps[3], filters: Filters[dtype], walk: Walk[1], reach: Reach):
    """Computes tiles.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), y[M, F] and the residual.
        filters: Values, indices and bias.
        walk: How tiles and steps run over them.
        reach: How far taps lie apart.
    """
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024, name="two_four"
    ]()
    var barriers = (UInt32(Int(memory)) + 1023) & ~UInt32(1023)
    var steps_full = barriers + 16 * UInt32(config.windows)
    var stages = barriers + 1024
    var windows = Ring(stages, barriers, barriers + 8 * UInt32(config.windows))
    var steps = Ring(
        stages + UInt32(config.windows) * UInt32(reach.window),
        steps_full,
        steps_full + 8 * UInt32(config.steps),
    )
    var t = Int32(thread_idx.x)
    if t == 0:
        comptime for i in range(config.windows):
            barrier_init(windows.full + 8 * UInt32(i), 1)
            barrier_init(windows.empty + 8 * UInt32(i), UInt32(config.groups))
        comptime for i in range(config.steps):
            barrier_init(steps.full + 8 * UInt32(i), 1)
            barrier_init(steps.empty + 8 * UInt32(i), UInt32(config.groups))
        fence_barrier_init()
    sync_threads(0, UInt32(config.threads()))
    launch_dependent_grids()

    var at = UInt64(Int(Pointer(to=maps)))
    var warp = t // 32 - Int32(config.groups * 4)
    if warp < 0:
        _consume[dtype, epilogue, config](at, filters, walk, reach, windows, steps, t)
    elif t % 32 == 0:
        # Two threads drive the copy engine.
        if warp == 0:
            _bring_pixels[dtype, epilogue, config](at, walk, reach, windows)
        else:
            _bring_filters[dtype, config](filters, walk, steps)


@always_inline
def _bring_filters[
    dtype: DType, config: Sparse
](filters: Filters[dtype], walk: Walk[1], at_start: Ring):
    """Fills the ring of filters, tile after tile; they do not depend on the kernel before."""
    var all = (walk.filters + Int32(2 * ROWS - 1)) // Int32(2 * ROWS) * 2
    var ring = at_start
    for tile in range(Int32(block_idx.x), walk.blocks, Int32(grid_dim.x)):
        var first = walk.place(tile).column * Int32(config.groups)
        var tap = Int32(0)
        var c = Int32(0)
        for _ in range(walk.taps * walk.chunks):
            var to = ring.stages + ring.slot * UInt32(config.step())
            var full = ring.full + 8 * ring.slot
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
            barrier_expect(full, UInt32(config.step()))
            var at = Int((tap * walk.chunks + c) * all + first)
            load_bytes(
                to,
                filters.values.unsafe_offset(at * (VALUES // 2)),
                UInt32(config.groups * VALUES),
                full,
            )
            load_bytes(
                to + UInt32(config.groups * VALUES),
                filters.indices.unsafe_offset(at * (INDICES // 4)),
                UInt32(config.groups * INDICES),
                full,
            )
            ring.advance[config.steps]()
            comptime if config.shares:
                tap += 1
                if tap == walk.taps:
                    tap = 0
                    c += 1
            else:
                c += 1
                if c == walk.chunks:
                    c = 0
                    tap += 1


@fieldwise_init
struct Pixel(TrivialRegisterPassable):
    """Where an output pixel is."""

    var n: Int32
    """Image."""
    var p: Int32
    """Row."""
    var q: Int32
    """Column."""


@always_inline
def _pixel(walk: Walk[1], m: Int32) -> Pixel:
    """Finds where an output pixel is."""
    var n = m // walk.pq
    var rest = m - n * walk.pq
    var p = rest // walk.q
    return Pixel(n, p, rest - p * walk.q)


@always_inline
def _bring_pixels[
    dtype: DType, epilogue: Epilogue, config: Sparse
](maps: UInt64, walk: Walk[1], reach: Reach, at_start: Ring):
    """Fills the ring of windows, tile after tile, and brings the residual."""
    comptime PART = config.part()
    prefetch_map(maps)
    wait_on_dependent_grids()
    var loads = walk.chunks if config.shares else walk.chunks * walk.taps
    var ring = at_start
    for tile in range(Int32(block_idx.x), walk.blocks, Int32(grid_dim.x)):
        var place = walk.place(tile)
        var m0 = place.row * Int32(config.pixels)
        var at = _pixel(walk, m0)
        var h0 = at.p * walk.stride_h - walk.pad_h
        var w0 = at.q * walk.stride_w - walk.pad_w
        var r = Int32(0)
        var s = Int32(0)
        var c = Int32(0)
        for _ in range(loads):
            var to = ring.stages + ring.slot * UInt32(reach.window)
            var full = ring.full + 8 * ring.slot
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
            barrier_expect(full, UInt32(reach.pixels) * UInt32(ROW))
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
                    at.n,
                    UInt16(s * walk.dilation_w),
                    UInt16(r * walk.dilation_h),
                )
            ring.advance[config.windows]()
            c += 1
            comptime if not config.shares:
                if c == walk.chunks:
                    c = 0
                    s += 1
                    if s == walk.s:
                        s = 0
                        r += 1
        comptime for part in range(config.groups):
            var to = ring.stages + ring.slot * UInt32(reach.window)
            var full = ring.full + 8 * ring.slot
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
            var m = m0 + Int32(part * PART)
            if epilogue.adds and m < walk.pixels[0]:
                barrier_expect(full, UInt32(config.groups * PART * ROW))
                var end = _pixel(walk, m)
                comptime for i in range(config.groups):
                    var f = (place.column * Int32(config.groups) + Int32(i)) * Int32(ROWS)
                    comptime if config.shares:
                        load_im2col(
                            to + UInt32(i * PART * ROW),
                            maps + 2 * MAP,
                            full,
                            f,
                            end.q,
                            end.p,
                            end.n,
                            0,
                            0,
                        )
                    else:
                        load_2d(to + UInt32(i * PART * ROW), maps + 2 * MAP, full, f, m)
            else:
                barrier_arrive(full)
            ring.advance[config.windows]()


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, config: Sparse
](
    maps: UInt64,
    filters: Filters[dtype],
    walk: Walk[1],
    reach: Reach,
    first_window: Ring,
    first_step: Ring,
    t: Int32,
):
    """Multiplies the stages of the tiles, and finishes each."""
    comptime PART = config.part()

    var group = t // Int32(GROUP)
    var lane = t % 32
    var warp = t % Int32(GROUP) // 32
    var leads = t % Int32(GROUP) == 0
    # Thread 4 a + b of warp d holds pixels 8 j + 2 b, and one more, of filters 16 d + a and 8 on.
    var row = warp * 16 + lane // 4
    # It names the row of a matrix that stmatrix takes: pixel (i / 2) * 8 + lane % 8 of 16, and 8
    # filters, 16 bytes, that change places by the pixel.
    var chunk = UInt32(warp * 2 + lane // 8 % 2)
    var name = UInt32(lane // 16 * 8 + lane % 8)
    var place_of_row = name * UInt32(ROW) + (chunk ^ (name % 8)) * 16
    var count = walk.taps * walk.chunks

    var windows = first_window
    var ring = first_step
    var storing = UInt32(0)  # The first of the windows that are being stored, plus one.
    for tile in range(Int32(block_idx.x), walk.blocks, Int32(grid_dim.x)):
        var place = walk.place(tile)
        var m0 = place.row * Int32(config.pixels)
        var f0 = (place.column * Int32(config.groups) + group) * Int32(ROWS)
        var sums = StaticTuple[Float32, config.pixels // 2](fill=0)
        var before = ring.slot
        var window_before = windows.slot
        var indices = StaticTuple[UInt32, 2](fill=0)
        var r = Int32(0)
        var s = Int32(0)
        for i in range(Int32(0), count, Int32(2)):
            comptime for odd in range(2):
                if i + Int32(odd) < count:
                    var begins = not config.shares or r + s == 0
                    if begins:
                        barrier_wait(windows.full + 8 * windows.slot, windows.parity)
                    barrier_wait(ring.full + 8 * ring.slot, ring.parity)
                    var pixels = windows.stages + windows.slot * UInt32(reach.window)
                    comptime if config.shares:
                        pixels += UInt32(r * reach.row + s * reach.tap)
                    var at = ring.stages + ring.slot * UInt32(config.step())
                    var w = LEFT | Int64((at + UInt32(group) * UInt32(VALUES)) >> 4)
                    var x = MATRIX | Int64(pixels >> 4)
                    indices[odd] = shared_load(at + UInt32(config.groups * VALUES) + UInt32(t) * 4)
                    wgmma_fence_aligned()
                    comptime for k in range(2):
                        sums = mma_sparse[dtype, config.pixels, k == 1](
                            w + Int64(128 * k), x + Int64(4 * k), indices[odd], sums
                        )
                    wgmma_commit_group_sync()
                    if odd == 0 and i == 0 and storing != 0 and leads:
                        # The tile before has left shared memory by now, or soon will have.
                        stores_read()
                        comptime for part in range(config.groups):
                            barrier_arrive(
                                windows.empty
                                + 8 * ((storing - 1 + UInt32(part)) % UInt32(config.windows))
                            )
                        storing = 0
                    wgmma_wait_group_sync[1]()
                    hold(indices[1 - odd], first_window.full, UInt32(reach.never))
                    # The copy engine may overwrite what is released, and ordinary loads read the
                    # indices of that step: racecheck wants a proxy fence. But they had come when
                    # the wgmma began that is done now.
                    if (odd == 1 or i > 0) and leads:
                        barrier_arrive(ring.empty + 8 * before)
                        if begins:
                            barrier_arrive(windows.empty + 8 * window_before)
                    before = ring.slot
                    window_before = windows.slot
                    ring.advance[config.steps]()
                    comptime if config.shares:
                        s += 1
                        if s == walk.s:
                            s = 0
                            r += 1
                            if r * walk.s == walk.taps:
                                r = 0
                                windows.advance[config.windows]()
                    else:
                        windows.advance[config.windows]()
        wgmma_wait_group_sync[0]()
        comptime for odd in range(2):
            hold(indices[odd], first_window.full, UInt32(reach.never))
        if leads:
            barrier_arrive(ring.empty + 8 * before)
            barrier_arrive(windows.empty + 8 * window_before)

        var bias = SIMD[F32, 2](0)
        comptime for half in range(2):
            var f = f0 + row + Int32(8 * half)
            if f < walk.filters:
                bias[half] = filters.bias[unsafe_offset=Int(f)]
        storing = UInt32(0) if config.shares else windows.slot + 1
        comptime for part in range(config.groups):
            barrier_wait(windows.full + 8 * windows.slot, windows.parity)
            var to = windows.stages + windows.slot * UInt32(reach.window)
            to += UInt32(group) * UInt32(PART * ROW)
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
                    value = activate[epilogue, dtype](value)
                    bits[i] = bitcast[DType.uint32, 1](value.cast[dtype]())
                shared_store_matrices[turned=True](at, bits)
            var m = m0 + Int32(part * PART)
            comptime if config.shares:
                sync_threads(UInt32(group) + 1, UInt32(GROUP))
                _store[dtype, PART](filters, walk, reach, to, m, f0, t % Int32(GROUP))
                fence_async()
                sync_threads(UInt32(group) + 1, UInt32(GROUP))
                if leads:
                    barrier_arrive(windows.empty + 8 * windows.slot)
            else:
                fence_async()
                sync_threads(UInt32(group) + 1, UInt32(GROUP))
                if leads and m < walk.pixels[0]:
                    store_2d(maps + MAP, to, f0, m)
                    stores_commit()
            windows.advance[config.windows]()
    stores_read()


@always_inline
def _store[
    dtype: DType, count: Int
](
    filters: Filters[dtype],
    walk: Walk[1],
    reach: Reach,
    source: UInt32,
    m: Int32,
    f0: Int32,
    t: Int32,
):
    """Stores pixels that are not padding, 16 bytes a thread at a time: 8 threads a pixel."""
    var at = _pixel(walk, m + t // 8)
    var f = f0 + t % 8 * 8
    var source_row = source + UInt32(t // 8 * Int32(ROW) + (t % 8 ^ t // 8 % 8) * 16)
    comptime for i in range(count // 16):
        if at.q < reach.q and at.p < reach.p and at.n < reach.n and f < walk.filters:
            var pixel = (at.n * reach.p + at.p) * reach.q + at.q
            var bits = shared_load4(source_row + UInt32(i * 16 * ROW))
            filters.y.unsafe_store[alignment=16](
                Int(pixel) * Int(walk.filters) + Int(f), bitcast[dtype, 8](bits)
            )
        at.q += 16
        while at.q >= walk.q:
            at.q -= walk.q
            at.p += 1
            if at.p * walk.q == walk.pq:
                at.p = 0
                at.n += 1


# The host's side


def _padded(g: Geometry) -> Geometry:
    """Counts the padding before rows and images as pixels: then all taps are at one distance."""
    var walked = g
    walked.p, walked.q = g.h + g.pad_h, g.w + g.pad_w
    return walked


def _stored(g: Geometry) -> Geometry:
    """Describes the residual [N, P, Q, F] as im2col walks over it, padding and all."""
    var y = _padded(g)
    y.h, y.w, y.c = g.p, g.q, g.f
    y.pad_h = y.pad_w = 0
    return y


def fits(g: Geometry, config: Sparse) -> Bool:
    """Tells whether a tile can compute a convolution.

    Args:
        g: Sizes; ops/gemm/hopper.mojo takes them.
        config: Of the tile.

    Returns:
        True for tiles whose taps have windows of their own; for others if strides are 1, there is
        no more padding after rows and images than before them, and the windows fit into memory.
    """
    if not config.shares:
        return True
    var right = g.q - 1 + (g.s - 1) * g.dilation_w - g.pad_w - (g.w - 1)
    var bottom = g.p - 1 + (g.r - 1) * g.dilation_h - g.pad_h - (g.h - 1)
    var shared = config.shared(Int(Reach(g, config).window))
    return (
        g.r * g.s > 1
        and g.stride_h * g.stride_w == 1
        and right <= g.pad_w
        and bottom <= g.pad_h
        and g.q <= g.w + g.pad_w
        and g.p <= g.h + g.pad_h
        and config.blocks * (shared + 1024) <= MEMORY
    )


def choose_two_four(g: Geometry) -> Int:
    """Chooses the tile of a convolution, by what its waves of tiles cost.

    Args:
        g: Sizes.

    Returns:
        An index in TILES.
    """
    var steps = Float64(g.r * g.s * ceildiv(g.c, STEP))
    var best = 0
    var least = Float64.MAX
    comptime for i in range(len(TILES)):
        comptime config = TILES[i]
        if fits(g, config):
            var pixels = _padded(g).pixels() if config.shares else g.pixels()
            var tiles = ceildiv(pixels, config.pixels) * ceildiv(g.f, ROWS * config.groups)
            var waves = Float64(ceildiv(tiles, PROCESSORS * config.blocks))
            var cost = waves * (config.tile_us + config.step_us * steps)
            if cost < least:
                best, least = i, cost
    return best


def two_four_conv2d[
    dtype: DType, epilogue: Epilogue
](g: Geometry, o: Operands[dtype], indices: Data[DType.uint32], ctx: DeviceContext) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes; `takes` of ops/gemm/hopper.mojo is true of them.
        o: The tensors; w holds the values as `two_four` of graphs/arrange.py orders them.
        indices: Which two of each four the values are, from there, too.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var tile = choose_two_four(g)
    comptime for i in range(len(TILES)):
        if tile == i:
            two_four_tile[dtype, epilogue, TILES[i]](g, o, indices, ctx)


def two_four_tile[
    dtype: DType, epilogue: Epilogue, config: Sparse
](g: Geometry, o: Operands[dtype], indices: Data[DType.uint32], ctx: DeviceContext) raises:
    """Enqueues a convolution with a tile.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.
        config: Of the tile; it `fits`.

    Args:
        g: Sizes; `takes` of ops/gemm/hopper.mojo is true of them.
        o: The tensors; w holds the values as `two_four` of graphs/arrange.py orders them.
        indices: Which two of each four the values are, from there, too.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime PART = config.part()
    comptime assert PART % 16 == 0, "two_four: stmatrix stores 16 pixels at a time"
    comptime assert config.groups < config.windows, "two_four: a tile's results fill the ring"
    comptime assert config.groups <= 2, "two_four: filters are arranged by pairs of 64"
    var maps = Maps[3]()
    var c, f, m = Int64(g.c), Int64(g.f), Int64(g.pixels())
    var reach = Reach(g, config)
    var walked = g
    comptime if config.shares:
        walked = _padded(g)
        comptime if epilogue.adds:
            maps.maps[2] = im2col_map[dtype](ctx, o.residual, _stored(g), PART)
    else:
        maps.maps[1] = tensor_map[dtype, 2](ctx, o.y, [f, m], [Int32(STEP), Int32(PART)])
        comptime if epilogue.adds:
            maps.maps[2] = tensor_map[dtype, 2](ctx, o.residual, [f, m], [Int32(STEP), Int32(PART)])
    if is_plain(g):
        maps.maps[0] = tensor_map[dtype, 2](ctx, o.x, [c, m], [Int32(STEP), Int32(config.pixels)])
    else:
        maps.maps[0] = im2col_map[dtype](ctx, o.x, walked, Int(reach.pixels))
    var walk = Walk[1](
        [walked],
        rows=config.pixels,
        chunks=ceildiv(g.c, STEP),
        tiles=ceildiv(g.f, ROWS * config.groups),
        splits=1,
        alpha=o.alpha,
    )
    var shared = config.shared(Int(reach.window))
    ctx.enqueue_function[two_four_kernel[dtype, epilogue, config]](
        maps,
        Filters[dtype](o, indices),
        walk,
        reach,
        grid_dim=min(Int(walk.blocks), PROCESSORS * config.blocks),
        block_dim=config.threads(),
        shared_mem_bytes=shared,
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(shared)),
    )
