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
Blocks go from tile to tile, so that the next tile comes in while the last one goes out.

Where tiles are fewer than multiprocessors, a cluster of `splits` blocks shares one tile: each
sums a part of K, and then a part of the rows over the cluster's shared memories (split-K).

One launch computes one product or several of the same K and F, such as a block's query, key and
value: their tiles follow one another, and each finds its tensors by its number. Or a product has
two sources, a convolution and the 1 x 1 of the shortcut beside it: the steps of the second follow
those of the first, and their sum never leaves the registers.

Blocks start while the kernel before them still runs (programmatic dependent launch): barriers,
tensor maps and the first filters, where these are weights, are loaded before they wait for the
activations.

float32 is multiplied as TF32: the copy engine rounds x and w to 10 bits of mantissa on their way,
to nearest even (CUDA's driver API; triton-lang/triton#11751).
C has to be a multiple of 16 bytes, and F one of 8.
After Osama et al. 2023 (arXiv:2301.03598) and the PTX ISA 8.0, sections 5.5 and 9.7.14.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim, thread_idx
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
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue, activate
from ..geometry import Geometry
from ..kernel_argument import KernelArgument
from ..operands import F32, Data, Operands
from ..hopper.ptx import (
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
    shared_load2,
    shared_store,
    shared_store2,
    store_2d,
    stores_commit,
    stores_read,
    sync_threads,
)

comptime ROW = 128
"""Bytes of K in a stage, for each pixel and each filter: one row of the 128-byte swizzle."""
comptime GROUP = 128
"""Threads of a consumer, a warpgroup."""
comptime ROWS = 64
"""Pixels of a consumer: the M of wgmma."""
comptime PROCESSORS = 132
"""Multiprocessors of an H100 or H200."""
comptime MATRIX = (Int64(1) << 62) | (Int64(64) << 32) | (Int64(1) << 16)
"""A matrix descriptor: 128-byte swizzle, 1024 bytes from eight rows to the next eight."""


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
    var overlap: Bool
    """Whether a consumer issues a stage's products before those of the last one are done."""

    def __init__(
        out self,
        groups: Int,
        columns: Int,
        stages: Int,
        blocks: Int,
        *,
        split: Bool = False,
        overlap: Bool = False,
    ):
        """Names the parts.

        Args:
            groups: Consumers.
            columns: Filters of a tile.
            stages: Stages of the ring.
            blocks: Blocks of a multiprocessor.
            split: Whether a cluster shares a tile.
            overlap: Whether products of two stages overlap.
        """
        self.groups, self.columns, self.stages = groups, columns, stages
        self.blocks, self.split, self.overlap = blocks, split, overlap

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Pixels, filters and stages, and how it works.
        """
        var size = t"{self.rows()}x{self.columns}x{self.stages}"
        return String(size) + ("split" if self.split else "overlap" if self.overlap else "")

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
    def part[dtype: DType](self) -> Int:
        """Counts the filters of a tile whose results fit into a stage.

        Parameters:
            dtype: Of the results.

        Returns:
            All of them, a half or a quarter.
        """
        var columns = self.columns
        while columns * self.rows() * size_of[dtype]() > self.stage():
            columns //= 2
        return columns

    @always_inline
    def parts[dtype: DType](self) -> Int:
        """Counts the stages that a tile's results take.

        Parameters:
            dtype: Of the results.

        Returns:
            A power of two.
        """
        return self.columns // self.part[dtype]()

    @always_inline
    def shared(self) -> Int:
        """Counts the bytes of shared memory.

        Returns:
            The ring, its barriers, and what aligning it may take.
        """
        return self.stages * self.stage() + 16 * self.stages + 1024


comptime MAP = UInt64(128)
"""Bytes of a tensor map."""


struct Maps[count: Int](Copyable, KernelArgument):
    """The tensor maps of x, w, y and the residual of each product; x and w of a second source.

    Parameters:
        count: How many there are.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var maps: Array[TMADescriptor, Self.count]
    """In this order."""

    def __init__(out self):
        """Makes room for them."""
        self.maps = Array[TMADescriptor, Self.count](fill=TMADescriptor())


struct Ends[dtype: DType, products: Int](KernelArgument, TrivialRegisterPassable):
    """What a tile's end reads and writes without the copy engine, product by product.

    Nothing but pointers: LLVM then knows that a kernel's are global memory.

    Parameters:
        dtype: Of the residual and y.
        products: Products of the launch.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var bias: StaticTuple[Data[F32], Self.products]
    """[F]."""
    var more: StaticTuple[Data[F32], Self.products]
    """[F], the bias of a second source; any pointer if there is none."""
    var residual: StaticTuple[Data[Self.dtype], Self.products]
    """[M, F]."""
    var y: StaticTuple[Data[Self.dtype], Self.products]
    """[M, F]."""

    def __init__(out self, o: Array[Operands[Self.dtype], Self.products]):
        """Takes them from the operands.

        Args:
            o: The tensors.
        """
        self.bias = StaticTuple[Data[F32], Self.products](fill=o[0].bias)
        self.more = self.bias
        self.residual = StaticTuple[Data[Self.dtype], Self.products](fill=o[0].residual)
        self.y = StaticTuple[Data[Self.dtype], Self.products](fill=o[0].y)
        comptime for i in range(1, Self.products):
            self.bias[i], self.residual[i], self.y[i] = o[i].bias, o[i].residual, o[i].y

    @always_inline
    def of(self, product: Int32) -> Ends[Self.dtype, 1]:
        """Chooses a product's.

        Args:
            product: Its number.

        Returns:
            Its tensors.
        """
        var one = Ends[Self.dtype, 1](self.bias[0], self.more[0], self.residual[0], self.y[0])
        comptime for i in range(1, Self.products):
            if product == Int32(i):
                one = Ends[Self.dtype, 1](self.bias[i], self.more[i], self.residual[i], self.y[i])
        return one

    @always_inline
    def __init__(
        out self,
        bias: Data[F32],
        more: Data[F32],
        residual: Data[Self.dtype],
        y: Data[Self.dtype],
    ):
        """Names the tensors of one product.

        Args:
            bias: [F].
            more: [F], of a second source.
            residual: [M, F].
            y: [M, F].
        """
        self.bias = StaticTuple[Data[F32], Self.products](fill=bias)
        self.more = StaticTuple[Data[F32], Self.products](fill=more)
        self.residual = StaticTuple[Data[Self.dtype], Self.products](fill=residual)
        self.y = StaticTuple[Data[Self.dtype], Self.products](fill=y)


struct Walk[products: Int](KernelArgument, TrivialRegisterPassable):
    """How the tiles and the steps of K run over the tensors.

    Parameters:
        products: Products of the launch.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var pixels: StaticTuple[Int32, Self.products]
    """M of each product."""
    var first: StaticTuple[Int32, Self.products]
    """The first tile of each product."""
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
    var blocks: Int32
    """Tiles of pixels and filters of all products."""
    var plain: Int32
    """1 if x is a matrix [M, C], read without im2col."""
    var alpha: Float32
    """Scale of the product."""
    var more: Int32
    """Steps of the second source; 0 if there is none."""
    var more_stride_h: Int32
    """Rows of the second source between pixels."""
    var more_stride_w: Int32
    """Columns of the second source between pixels."""
    var early: Int32
    """1 if the filters may be loaded before the kernel ahead is done, as it does not write them."""

    def __init__(
        out self,
        sizes: Array[Geometry, Self.products],
        *,
        rows: Int,
        chunks: Int,
        tiles: Int,
        splits: Int,
        alpha: Float32,
        constant: Bool = True,
    ):
        """Takes the sizes of a convolution, or of several products.

        Args:
            sizes: Of each product; they differ in M alone.
            rows: Pixels of a tile.
            chunks: Steps over the channels.
            tiles: Tiles of filters.
            splits: Blocks that share a tile.
            alpha: Scale of the product.
            constant: Whether the filters are weights, which no kernel writes.
        """
        var g = sizes[0]
        self.pixels = StaticTuple[Int32, Self.products](fill=0)
        self.first = StaticTuple[Int32, Self.products](fill=0)
        var blocks = 0
        comptime for i in range(Self.products):
            self.pixels[i], self.first[i] = Int32(sizes[i].pixels()), Int32(blocks)
            blocks += ceildiv(sizes[i].pixels(), rows) * tiles
        self.filters, self.alpha = Int32(g.f), alpha
        self.more, self.more_stride_h, self.more_stride_w = 0, 1, 1
        self.q, self.pq = Int32(g.q), Int32(g.p * g.q)
        self.s, self.taps, self.chunks = Int32(g.s), Int32(g.r * g.s), Int32(chunks)
        self.stride_h, self.stride_w = Int32(g.stride_h), Int32(g.stride_w)
        self.pad_h, self.pad_w = Int32(g.pad_h), Int32(g.pad_w)
        self.dilation_h, self.dilation_w = Int32(g.dilation_h), Int32(g.dilation_w)
        self.tiles, self.splits, self.blocks = Int32(tiles), Int32(splits), Int32(blocks)
        self.plain = Int32(1 if is_plain(g) else 0)
        self.early = Int32(1 if constant else 0)

    @always_inline
    def place(self, tile: Int32) -> Place:
        """Finds what a tile is of.

        Args:
            tile: Its number.

        Returns:
            Product, tile of pixels and tile of filters.
        """
        var product = Int32(0)
        var first = Int32(0)
        comptime for i in range(1, Self.products):
            if tile >= self.first[i]:
                product, first = Int32(i), self.first[i]
        var row = (tile - first) // self.tiles
        return Place(product, row, tile - first - row * self.tiles)

    @always_inline
    def steps(self) -> Int32:
        """Counts the steps of K.

        Returns:
            Those of all taps, and of the second source.
        """
        return self.taps * self.chunks + self.more

    @always_inline
    def rows_of(self, product: Int32) -> Int32:
        """Counts the pixels of a product.

        Args:
            product: Its number.

        Returns:
            M.
        """
        var pixels = self.pixels[0]
        comptime for i in range(1, Self.products):
            if product == Int32(i):
                pixels = self.pixels[i]
        return pixels


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """What a tile is of."""

    var product: Int32
    """Number of the product."""
    var row: Int32
    """Tile of pixels."""
    var column: Int32
    """Tile of filters."""


def is_plain(g: Geometry) -> Bool:
    """Tells whether a convolution is a matrix product.

    Args:
        g: Sizes.

    Returns:
        True for 1 x 1 windows without stride or padding.
    """
    return g.r * g.s * g.stride_h * g.stride_w == 1 and g.pad_h + g.pad_w == 0


def takes[dtype: DType](g: Geometry) -> Bool:
    """Tells whether the copy engine can walk over a convolution's tensors.

    Parameters:
        dtype: Of x, w and y.

    Args:
        g: Sizes.

    Returns:
        True if there is one group, C is a multiple of 16 bytes, F one of 8, and the windows'
        strides, corners and taps are in the range of a tensor map (PTX ISA 8.0, section 5.5.4;
        CUDA's driver API).
    """
    comptime wide = 16 // size_of[dtype]()
    if g.groups != 1 or g.c % wide != 0 or g.f % 8 != 0:
        return False
    if is_plain(g):
        return True
    var right = (g.q - 1) * g.stride_w - g.pad_w - (g.w - 1)
    var bottom = (g.p - 1) * g.stride_h - g.pad_h - (g.h - 1)
    return (
        max(g.stride_h, g.stride_w) <= 8
        and max(g.pad_h, g.pad_w) <= 128
        and min(right, bottom) >= -128
        and max(right, bottom) <= 127
        and max((g.s - 1) * g.dilation_w, (g.r - 1) * g.dilation_h) <= 255
    )


@__name(t"gemm_hopper_{config.label()}_{epilogue.label()}_{products}x{sources}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def hopper_kernel[
    dtype: DType,
    epilogue: Epilogue,
    config: Config,
    products: Int,
    sources: Int,
](maps: Maps[4 * products + 2 * (sources - 1)], ends: Ends[dtype, products], walk: Walk[products]):
    """Computes tiles, or a cluster's share of one.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.
        products: Products of the launch.
        sources: 2 if a second convolution is added, of windows of 1 x 1; else 1.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), w[F, R * S, C], y[M, F] and the residual.
        ends: Bias, residual and y.
        walk: How tiles and steps run over them.
    """
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024, name="hopper_gemm"
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

    var rank = Int32(0)
    var tile = Int32(block_idx.x)
    comptime if config.split:
        rank = tile % walk.splits
        tile = tile // walk.splits
    if t // 32 == Int32(config.groups * 4):
        # One thread drives the copy engine.
        if t % 32 == 0:
            _produce[dtype, epilogue, config, sources](
                UInt64(Int(Pointer(to=maps))), walk, Ring(ring, full, empty), tile, rank
            )
    else:
        _consume[dtype, epilogue, config, sources](
            UInt64(Int(Pointer(to=maps))), ends, walk, Ring(ring, full, empty), t, tile, rank
        )
    comptime if config.split:
        _share[dtype, epilogue, config, sources](ends, walk, ring, t, tile, rank)


struct Ring(TrivialRegisterPassable):
    """Where a warp is in the ring of stages: addresses in shared memory, and the phase."""

    var stages: UInt32
    """The first stage."""
    var full: UInt32
    """The barriers that tell that stages are filled."""
    var empty: UInt32
    """The barriers that tell that stages are read."""
    var slot: UInt32
    """The stage that is next."""
    var parity: UInt32
    """The phase of its `full`; its `empty` is a phase behind."""

    def __init__(out self, stages: UInt32, full: UInt32, empty: UInt32):
        """Begins at the first stage.

        Args:
            stages: The first stage.
            full: The first barrier of filled stages.
            empty: The first barrier of read stages.
        """
        self.stages, self.full, self.empty = stages, full, empty
        self.slot = self.parity = 0

    @always_inline
    def advance[count: Int](mut self):
        """Goes on to the next stage.

        Parameters:
            count: Stages of the ring.
        """
        self.slot += 1
        if self.slot == UInt32(count):
            self.slot = 0
            self.parity ^= 1


@always_inline
def _share_of(steps: Int32, rank: Int32, splits: Int32) -> Int32:
    """Computes where the share of a block of a cluster begins."""
    return steps * rank // splits


@always_inline
def _produce[
    dtype: DType, epilogue: Epilogue, config: Config, sources: Int
](maps: UInt64, walk: Walk[_], at_start: Ring, first_tile: Int32, rank: Int32,):
    """Fills the ring, tile after tile, as stages become free."""
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    comptime STAGE = UInt32(config.stage())
    comptime W_AT = UInt32(config.rows() * ROW)
    comptime BOXES = config.part[dtype]() // Int(WIDTH)
    var place = walk.place(first_tile)
    var x_map = maps + UInt64(place.product) * 4 * MAP
    prefetch_map(x_map)
    prefetch_map(x_map + MAP)
    comptime if sources == 2:
        prefetch_map(x_map + 4 * MAP)
        prefetch_map(x_map + 5 * MAP)
    var steps = walk.steps()
    var first = Int32(0)
    var last = steps
    comptime if config.split:
        first = _share_of(steps, rank, walk.splits)
        last = _share_of(steps, rank + 1, walk.splits)
    # The second source counts as the tap after the last one.
    var first_tap = min(first // walk.chunks, walk.taps)
    var first_c = first - first_tap * walk.chunks

    # Filters that are weights do not depend on the kernel before.
    var early = min(last - first, Int32(config.stages) * walk.early)
    var tap = first_tap
    var c = first_c
    for i in range(early):
        var full = at_start.full + 8 * UInt32(i)
        var to = at_start.stages + UInt32(i) * STAGE + W_AT
        barrier_expect(full, STAGE)
        var f0 = place.column * Int32(config.columns)
        if sources == 2 and tap == walk.taps:
            load_3d(to, x_map + 5 * MAP, full, c * WIDTH, 0, f0)
        else:
            load_3d(to, x_map + MAP, full, c * WIDTH, tap, f0)
        c += 1
        if c == walk.chunks and tap < walk.taps:
            c = 0
            tap += 1
    wait_on_dependent_grids()

    var ring = at_start
    for tile in range(first_tile, walk.blocks, Int32(grid_dim.x)):
        place = walk.place(tile)
        x_map = maps + UInt64(place.product) * 4 * MAP
        var m0 = place.row * Int32(config.rows())
        var f0 = place.column * Int32(config.columns)
        var image = m0 // walk.pq
        var pixel = m0 - image * walk.pq
        var p = pixel // walk.q
        var h0 = p * walk.stride_h - walk.pad_h
        var column = pixel - p * walk.q
        var w0 = column * walk.stride_w - walk.pad_w
        var r = first_tap // walk.s
        var s = first_tap - r * walk.s
        tap = first_tap
        c = first_c
        for _ in range(last - first):
            var to = ring.stages + ring.slot * STAGE
            var full = ring.full + 8 * ring.slot
            var second = sources == 2 and tap == walk.taps
            if early > 0:
                early -= 1
            else:
                barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
                barrier_expect(full, STAGE)
                if second:
                    load_3d(to + W_AT, x_map + 5 * MAP, full, c * WIDTH, 0, f0)
                else:
                    load_3d(to + W_AT, x_map + MAP, full, c * WIDTH, tap, f0)
            if second:
                load_im2col(
                    to,
                    x_map + 4 * MAP,
                    full,
                    c * WIDTH,
                    column * walk.more_stride_w,
                    p * walk.more_stride_h,
                    image,
                    0,
                    0,
                )
            elif walk.plain == 1:
                load_2d(to, x_map, full, c * WIDTH, m0)
            else:
                load_im2col(
                    to,
                    x_map,
                    full,
                    c * WIDTH,
                    w0,
                    h0,
                    image,
                    UInt16(s * walk.dilation_w),
                    UInt16(r * walk.dilation_h),
                )
            ring.advance[config.stages]()
            c += 1
            if c == walk.chunks and not second:
                c = 0
                tap += 1
                s += 1
                if s == walk.s:
                    s = 0
                    r += 1
        comptime if config.split:
            return
        comptime for part in range(config.parts[dtype]()):
            var to = ring.stages + ring.slot * STAGE
            var full = ring.full + 8 * ring.slot
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
            comptime if epilogue.adds:
                barrier_expect(full, UInt32(config.rows() * BOXES * ROW))
                comptime for i in range(config.groups):
                    comptime for j in range(BOXES):
                        load_2d(
                            to + UInt32((i * BOXES + j) * ROWS * ROW),
                            x_map + 3 * MAP,
                            full,
                            f0 + Int32(part * BOXES + j) * WIDTH,
                            m0 + Int32(i * ROWS),
                        )
            else:
                barrier_arrive(full)
            ring.advance[config.stages]()


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, config: Config, sources: Int
](
    maps: UInt64,
    ends: Ends[dtype, _],
    walk: Walk[_],
    at_start: Ring,
    t: Int32,
    first_tile: Int32,
    rank: Int32,
):
    """Multiplies the stages of the tiles; finishes a tile, or leaves its sums in shared memory."""
    comptime WIDTH = ROW // size_of[dtype]()
    comptime DEPTH = 32 // size_of[dtype]()
    comptime COLUMNS = config.columns
    comptime STAGE = UInt32(config.stage())
    comptime W_AT = UInt32(config.rows() * ROW)
    comptime SUMS = COLUMNS // 2
    comptime BOXES = config.part[dtype]() // WIDTH

    var group = t // Int32(GROUP)
    var leads = t % Int32(GROUP) == 0
    # Thread 4 a + b of warp d holds the columns 8 j + 2 b, and one more, of rows 16 d + a and 8 on.
    var row = t % Int32(GROUP) // 32 * 16 + t % 32 // 4
    var pair = t % 4
    var steps = walk.steps()
    comptime if config.split:
        var end = _share_of(steps, rank + 1, walk.splits)
        steps = end - _share_of(steps, rank, walk.splits)

    var ring = at_start
    var storing = UInt32(0)  # The `empty` of the stages that are being stored, and how many.
    for tile in range(first_tile, walk.blocks, Int32(grid_dim.x)):
        var place = walk.place(tile)
        var end = ends.of(place.product)
        var m0 = place.row * Int32(config.rows())
        var f0 = place.column * Int32(COLUMNS)
        var sums = StaticTuple[Float32, SUMS](fill=0)
        var before = ring.slot
        for i in range(steps):
            barrier_wait(ring.full + 8 * ring.slot, ring.parity)
            var at = ring.stages + ring.slot * STAGE
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
            if i == 0 and storing != 0 and leads:
                # The tile before has left shared memory by now, or soon will have.
                stores_read()
                comptime for part in range(config.parts[dtype]()):
                    barrier_arrive(
                        ring.empty + 8 * ((storing - 1 + UInt32(part)) % UInt32(config.stages))
                    )
                storing = 0
            comptime if config.overlap:
                if i > 0:
                    wgmma_wait_group_sync[1]()
                    if leads:
                        barrier_arrive(ring.empty + 8 * before)
                before = ring.slot
            else:
                wgmma_wait_group_sync[0]()
                if leads:
                    barrier_arrive(ring.empty + 8 * ring.slot)
            ring.advance[config.stages]()
        comptime if config.overlap:
            wgmma_wait_group_sync[0]()
            if leads:
                barrier_arrive(ring.empty + 8 * before)

        comptime if config.split:
            comptime PITCH = (COLUMNS + 8) * 4
            var to = ring.stages + UInt32(row) * UInt32(PITCH) + UInt32(pair) * 8
            comptime for j in range(COLUMNS // 8):
                comptime for half in range(2):
                    var at = to + UInt32(half * 8 * PITCH + j * 32)
                    shared_store2(at, sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])
            return

        storing = ring.slot + 1
        comptime for part in range(config.parts[dtype]()):
            barrier_wait(ring.full + 8 * ring.slot, ring.parity)
            var to = ring.stages + ring.slot * STAGE + UInt32(group) * UInt32(BOXES * ROWS * ROW)
            comptime for jj in range(BOXES * WIDTH // 8):
                comptime j = part * BOXES * WIDTH // 8 + jj
                var f = f0 + Int32(8 * j) + pair * 2
                var bias = SIMD[F32, 2](0)
                if f < walk.filters:
                    bias = end.bias[0].unsafe_load[width=2, alignment=8](Int(f))
                    comptime if sources == 2:
                        bias += end.more[0].unsafe_load[width=2, alignment=8](Int(f))
                comptime for half in range(2):
                    var value = SIMD[F32, 2](sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])
                    value = value.fma(SIMD[F32, 2](walk.alpha), bias)
                    var at = (
                        to
                        + UInt32(8 * jj // WIDTH * ROWS * ROW)
                        + (UInt32(row) + UInt32(8 * half)) * UInt32(ROW)
                        + _swizzled[dtype](UInt32(8 * jj % WIDTH) + 2 * UInt32(pair), UInt32(row))
                    )
                    comptime if size_of[dtype]() == 2:
                        comptime if epilogue.adds:
                            value += bitcast[dtype, 2](shared_load(at)).cast[F32]()
                        value = activate[epilogue, dtype](value)
                        shared_store(at, bitcast[DType.uint32, 1](value.cast[dtype]()))
                    else:
                        comptime if epilogue.adds:
                            value += shared_load2(at)
                        value = activate[epilogue, dtype](value)
                        shared_store2(at, value[0], value[1])
            fence_async()
            sync_threads(UInt32(group) + 1, UInt32(GROUP))
            if leads:
                comptime for j in range(BOXES):
                    store_2d(
                        maps + (UInt64(place.product) * 4 + 2) * MAP,
                        to + UInt32(j * ROWS * ROW),
                        f0 + Int32((part * BOXES + j) * WIDTH),
                        m0 + group * Int32(ROWS),
                    )
                stores_commit()
            ring.advance[config.stages]()
    stores_read()


@always_inline
def _swizzled[dtype: DType](column: UInt32, row: UInt32) -> UInt32:
    """Computes the byte of a column in a row of 128 bytes, whose sixteenths change places."""
    var byte = column * UInt32(size_of[dtype]())
    return byte ^ (row % 8 * 16)


@always_inline
def _share[
    dtype: DType, epilogue: Epilogue, config: Config, sources: Int
](ends: Ends[dtype, _], walk: Walk[_], ring: UInt32, t: Int32, tile: Int32, rank: Int32):
    """Adds up a cluster's sums: each block some rows of the tile, 8 columns a thread at a time."""
    comptime PITCH = (config.columns + 8) * 4
    comptime EIGHTS = config.columns // 8
    cluster_sync()
    var place = walk.place(tile)
    var end = ends.of(place.product)
    var pixels = walk.rows_of(place.product)
    var m0 = place.row * Int32(ROWS)
    var f0 = place.column * Int32(config.columns)
    var rows = Int32(ROWS) // walk.splits
    for unit in range(t, rows * Int32(EIGHTS), Int32(config.threads())):
        var row = rank * rows + unit // Int32(EIGHTS)
        var column = unit % Int32(EIGHTS) * 8
        var m = m0 + row
        var f = f0 + column
        if m < pixels and f < walk.filters:
            var at = ring + UInt32(row) * UInt32(PITCH) + UInt32(column) * 4
            var low = SIMD[F32, 4](0)
            var high = SIMD[F32, 4](0)
            for peer in range(walk.splits):
                low += cluster_load4(at, UInt32(peer))
                high += cluster_load4(at + 16, UInt32(peer))
            var value = low.join(high)
            var bias = end.bias[0].unsafe_load[width=8, alignment=16](Int(f))
            comptime if sources == 2:
                bias += end.more[0].unsafe_load[width=8, alignment=16](Int(f))
            value = value.fma(SIMD[F32, 8](walk.alpha), bias)
            var to = Int(m) * Int(walk.filters) + Int(f)
            comptime if epilogue.adds:
                value += end.residual[0].unsafe_load[width=8, alignment=16](to).cast[F32]()
            end.y[0].unsafe_store[alignment=16](to, activate[epilogue, dtype](value).cast[dtype]())
    cluster_sync()


# The host's side


def tensor_map[
    dtype: DType, rank: Int, multiplied: Bool = False
](
    ctx: DeviceContext,
    at: Data[dtype],
    var sizes: Array[Int64, rank],
    var box: Array[Int32, rank],
) raises -> TMADescriptor:
    """Makes the tensor map of a dense tensor, its last axis first in `sizes` and `box`.

    Parameters:
        dtype: Of the tensor.
        rank: Axes.
        multiplied: Whether float32 is rounded to TF32 on its way.

    Args:
        ctx: The GPU.
        at: The tensor.
        sizes: Of the tensor.
        box: Of a copy; 128 bytes along the last axis, which are swizzled.

    Returns:
        The map.

    Raises:
        If the driver refuses it.
    """
    var map = TMADescriptor()
    var strides = Array[Int64, rank](fill=0)
    var ones = Array[Int32, rank](fill=1)
    var bytes = Int64(size_of[dtype]())
    comptime for i in range(rank):
        bytes *= sizes[i]
        strides[i] = bytes
    DeviceBuffer[dtype](ctx, at, 1, owning=False)._tensor_map_encode_tiled(
        Pointer(to=map).unsafe_bitcast[NoneType](),
        _map_dtype[dtype, multiplied](),
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


def im2col_map[
    dtype: DType
](ctx: DeviceContext, at: Data[dtype], g: Geometry, rows: Int) raises -> TMADescriptor:
    """Makes the tensor map that reads x[N, H, W, C] window by window.

    Parameters:
        dtype: Of x.

    Args:
        ctx: The GPU.
        at: The tensor.
        g: Sizes.
        rows: Pixels of a copy.

    Returns:
        The map.

    Raises:
        If the driver refuses it.
    """
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
        _map_dtype[dtype, True](),
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


def _map_dtype[dtype: DType, multiplied: Bool]() -> Int32:
    """Numbers a dtype as CUtensorMapDataType does; float32 to be multiplied is rounded to TF32."""
    comptime if dtype == F32:
        return 11 if multiplied else 7
    elif dtype == DType.float16:
        return 6
    else:
        return 9


def hopper_gemm[
    dtype: DType, epilogue: Epilogue, config: Config
](
    g: Geometry,
    o: Operands[dtype],
    splits: Int,
    ctx: DeviceContext,
    *,
    constant: Bool = True,
) raises:
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
        constant: Whether w is a weight, which no kernel writes.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    hopper_gemms[dtype, epilogue, config, 1]([g], [o], splits, ctx, constant=constant)


def hopper_gemms[
    dtype: DType, epilogue: Epilogue, config: Config, products: Int
](
    sizes: Array[Geometry, products],
    operands: Array[Operands[dtype], products],
    splits: Int,
    ctx: DeviceContext,
    *,
    constant: Bool = True,
) raises:
    """Enqueues matrix products of the same K and F in one launch.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.
        products: How many there are.

    Args:
        sizes: Of each product; one group.
        operands: The tensors of each; all have the alpha of the first.
        splits: Blocks that share a tile; 1 unless the config splits.
        ctx: The GPU.
        constant: Whether w of each is a weight, which no kernel writes.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var maps = Maps[4 * products]()
    comptime for i in range(products):
        _add_maps[dtype, epilogue, config, 4 * i](ctx, maps, sizes[i], operands[i])
    _enqueue[dtype, epilogue, config, products, 1](
        maps,
        Ends[dtype, products](operands),
        _walk[dtype, config](sizes, splits, operands[0].alpha, constant),
        ctx,
    )


def hopper_shortcut[
    dtype: DType, epilogue: Epilogue, config: Config
](
    g: Geometry,
    o: Operands[dtype],
    beside: Geometry,
    more: Operands[dtype],
    splits: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues the sum of a convolution and one of windows of 1 x 1.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the sum goes through; it does not add.
        config: Sizes of the tile.

    Args:
        g: Sizes; one group.
        o: The tensors.
        beside: Sizes of the second convolution: the same N, P, Q and F.
        more: Its x, w and bias.
        splits: Blocks that share a tile; 1 unless the config splits.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime WIDTH = ROW // size_of[dtype]()
    comptime assert not epilogue.adds, "hopper_gemm: a second source is what is added"
    var maps = Maps[6]()
    _add_maps[dtype, epilogue, config, 0](ctx, maps, g, o)
    maps.maps[4] = im2col_map[dtype](ctx, more.x, beside, config.rows())
    maps.maps[5] = _filter_map[dtype, config](ctx, more.w, beside)
    var ends = Ends[dtype, 1](o.bias, more.bias, o.residual, o.y)
    var walk = _walk[dtype, config, 1]([g], splits, o.alpha)
    walk.more = Int32(ceildiv(beside.c, WIDTH))
    walk.more_stride_h, walk.more_stride_w = Int32(beside.stride_h), Int32(beside.stride_w)
    _enqueue[dtype, epilogue, config, 1, 2](maps, ends, walk, ctx)


def _filter_map[
    dtype: DType, config: Config
](ctx: DeviceContext, w: Data[dtype], g: Geometry) raises -> TMADescriptor:
    """Makes the tensor map of w[F, R * S, C]."""
    comptime WIDTH = ROW // size_of[dtype]()
    return tensor_map[dtype, 3, True](
        ctx,
        w,
        [Int64(g.c), Int64(g.r * g.s), Int64(g.f)],
        [Int32(WIDTH), 1, Int32(config.columns)],
    )


def _add_maps[
    dtype: DType, epilogue: Epilogue, config: Config, at: Int
](ctx: DeviceContext, mut maps: Maps[_], g: Geometry, o: Operands[dtype]) raises:
    """Makes the tensor maps of a product: of x, w, y and the residual."""
    comptime WIDTH = ROW // size_of[dtype]()
    var c, f, m = Int64(g.c), Int64(g.f), Int64(g.pixels())
    if is_plain(g):
        maps.maps[at] = tensor_map[dtype, 2, True](
            ctx, o.x, [c, m], [Int32(WIDTH), Int32(config.rows())]
        )
    else:
        maps.maps[at] = im2col_map[dtype](ctx, o.x, g, config.rows())
    maps.maps[at + 1] = _filter_map[dtype, config](ctx, o.w, g)
    maps.maps[at + 2] = tensor_map[dtype, 2](ctx, o.y, [f, m], [Int32(WIDTH), Int32(ROWS)])
    comptime if epilogue.adds:
        maps.maps[at + 3] = tensor_map[dtype, 2](
            ctx, o.residual, [f, m], [Int32(WIDTH), Int32(ROWS)]
        )


def _walk[
    dtype: DType, config: Config, products: Int
](sizes: Array[Geometry, products], splits: Int, alpha: Float32, constant: Bool = True) -> Walk[
    products
]:
    """Divides products into tiles and steps."""
    return Walk[products](
        sizes,
        rows=config.rows(),
        chunks=ceildiv(sizes[0].c, ROW // size_of[dtype]()),
        tiles=ceildiv(sizes[0].f, config.columns),
        splits=splits,
        alpha=alpha,
        constant=constant,
    )


def _enqueue[
    dtype: DType, epilogue: Epilogue, config: Config, products: Int, sources: Int
](
    maps: Maps[4 * products + 2 * (sources - 1)],
    ends: Ends[dtype, products],
    walk: Walk[products],
    ctx: DeviceContext,
) raises:
    # A block of a cluster has one tile; others go from tile to tile.
    var blocks, splits = Int(walk.blocks), Int(walk.splits)
    var grid = blocks * splits if config.split else min(blocks, PROCESSORS * config.blocks)
    ctx.enqueue_function[hopper_kernel[dtype, epilogue, config, products, sources]](
        maps,
        ends,
        walk,
        grid_dim=grid,
        block_dim=config.threads(),
        cluster_dim=Dim(splits),
        shared_mem_bytes=config.shared(),
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(config.shared())),
    )
