"""Block-sparse convolution on Hopper's tensor cores: a filter's blocks of zeros are left out.

    y[m, f] = act(alpha * sum_k x[m, k] w[f, k] + bias + residual)

    x[N, H, W, C]              activations, read as [M, K] by the copy engine's im2col mode
    w[entries, columns, 128 B] blocks: `columns` filters x 128 bytes of channels of one tap
    y[N, P, Q, F]              result, and the residual

M = N * P * Q output pixels, K = R * S * C. A tile is `pixels` pixels x `columns` filters. Each
`columns` filters have a list of their blocks that hold a nonzero (graphs/arrange.py, block_steps).
As in ops/gemm/hopper.mojo one warp, the producer, fills a ring of stages, here with the blocks of
the list and what they meet of x, and warpgroups multiply the stages by wgmma, 64 filters each. But

- filters are the left side of a product and pixels the right one: 64 filters then have as many
  pixels beside them as the registers hold; 64 pixels x 64 filters would bring half as many bytes
  again for a product. Sums are turned over on their way to shared memory (stmatrix);
- blocks of threads that run at the same time take different filters of the same pixels, and others
  in their next turn: the second-level cache sends x at once to all that ask for it, and a block
  does not stay with a long list.

Where tiles are fewer than multiprocessors, a cluster of `splits` blocks shares one tile: each
sums a part of its list (split-K). Bound by the way from the second-level cache to shared memory.

C has to be a multiple of 16 bytes, and F one of 8. Accumulates in float32; float32 is multiplied as
TF32. After Gray et al. 2017 (GPU kernels for block-sparse weights) and the PTX ISA 8.0.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext, Dim, FuncAttribute
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
from ..gemm.old import (
    GROUP,
    MAP,
    MATRIX,
    PROCESSORS,
    ROW,
    ROWS,
    Ends,
    Maps,
    Ring,
    Walk,
    im2col_map,
    is_plain,
    tensor_map,
)
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
    load_im2col,
    prefetch_map,
    shared_load_float,
    shared_load_matrices,
    shared_store_float,
    shared_store_matrices,
    store_2d,
    stores_commit,
    stores_read,
    sync_threads,
)
from ..geometry import Geometry
from ..operands import F32, Data, Operands, widened

comptime I32 = DType.int32
"""Of a list."""
comptime HEAD = 2
"""Numbers of a list before its steps: the first block in w, and how many."""


struct Tile(TrivialRegisterPassable):
    """How a block of threads works: a compile-time value."""

    var columns: Int
    """Filters: 64 or 128."""
    var pixels: Int
    """Pixels, at most 256: the N of wgmma."""
    var stages: Int
    """Stages of the ring, those for the results among them."""
    var blocks: Int
    """Blocks that a multiprocessor holds at a time; bounds the registers."""
    var split: Bool
    """Whether a cluster shares a tile."""
    var overlap: Bool
    """Whether a consumer issues a stage's products before those of the last one are done."""

    def __init__(
        out self,
        columns: Int,
        pixels: Int,
        stages: Int,
        blocks: Int,
        *,
        split: Bool = False,
        overlap: Bool = False,
    ):
        """Names the parts.

        Args:
            columns: Filters of a tile.
            pixels: Pixels of a tile.
            stages: Stages of the ring.
            blocks: Blocks of a multiprocessor.
            split: Whether a cluster shares a tile.
            overlap: Whether products of two stages overlap.
        """
        self.columns, self.pixels, self.stages = columns, pixels, stages
        self.blocks, self.split, self.overlap = blocks, split, overlap

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Pixels, filters and stages, and how it works.
        """
        var size = t"{self.pixels}x{self.columns}x{self.stages}"
        return String(size) + ("split" if self.split else "overlap" if self.overlap else "")

    @always_inline
    def groups(self) -> Int:
        """Counts the consumers.

        Returns:
            One for 64 filters.
        """
        return self.columns // ROWS

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, and the producer's warp.
        """
        return GROUP * self.groups() + 32

    @always_inline
    def stage(self) -> Int:
        """Counts the bytes of a stage.

        Returns:
            128 for each pixel and filter.
        """
        return (self.pixels + self.columns) * ROW

    @always_inline
    def parts[dtype: DType](self) -> Int:
        """Counts the stages that a tile's results take.

        Parameters:
            dtype: Of the results.

        Returns:
            A power of two.
        """
        var parts = 1
        while self.pixels // parts * self.columns * size_of[dtype]() > self.stage():
            parts *= 2
        return parts

    @always_inline
    def shared(self) -> Int:
        """Counts the bytes of shared memory.

        Returns:
            The ring, its barriers, and what aligning it may take.
        """
        return self.stages * self.stage() + 16 * self.stages + 1024


comptime NARROW: List[Tile] = [
    Tile(64, 128, 8, 1, overlap=True),
    Tile(64, 192, 3, 2),
    Tile(64, 64, 6, 2, split=True),
]
"""The tiles of 64 filters."""
comptime WIDE: List[Tile] = [
    Tile(128, 128, 6, 1, overlap=True),
    Tile(128, 192, 5, 1, overlap=True),
    Tile(128, 64, 4, 2, split=True),
]
"""The tiles of 128 filters."""


@__name(t"sparse_conv2d_blocks_{tile.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(tile.threads())),
    `nvvm.minctasm`=SIMDLength(tile.blocks),
)
def blocks_kernel[
    dtype: DType, epilogue: Epilogue, tile: Tile
](maps: Maps[4], ends: Ends[dtype, 1], lists: Data[I32], walk: Walk[1], pitch: Int32):
    """Computes tiles, or a cluster's share of one.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        tile: Sizes of the tile.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), w, y[M, F] and the residual.
        ends: Bias, residual and y.
        lists: What graphs/arrange.py makes, a row for each tile of filters.
        walk: How tiles run over the tensors.
        pitch: Numbers of a row of `lists`.
    """
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024, name="conv2d_blocks"
    ]()
    var ring = (UInt32(Int(memory)) + 1023) & ~UInt32(1023)
    var full = ring + UInt32(tile.stages * tile.stage())
    var empty = full + 8 * UInt32(tile.stages)
    var t = Int32(thread_idx.x)
    if t == 0:
        comptime for i in range(tile.stages):
            barrier_init(full + 8 * UInt32(i), 1)
            barrier_init(empty + 8 * UInt32(i), UInt32(tile.groups()))
        fence_barrier_init()
    sync_threads(0, UInt32(tile.threads()))
    launch_dependent_grids()

    var rank = Int32(0)
    var number = Int32(block_idx.x)
    comptime if tile.split:
        rank = number % walk.splits
        number = number // walk.splits
    var turn = max(Int32(grid_dim.x) // walk.tiles, Int32(1))
    var lines = Lists(lists, pitch, walk.tiles, turn)
    if t // 32 == Int32(tile.groups() * 4):
        # One thread drives the copy engine.
        if t % 32 == 0:
            _produce[dtype, epilogue, tile](
                UInt64(Int(Pointer(to=maps))), lines, walk, Ring(ring, full, empty), number, rank
            )
    else:
        _consume[dtype, epilogue, tile](
            UInt64(Int(Pointer(to=maps))),
            ends,
            lines,
            walk,
            Ring(ring, full, empty),
            t,
            number,
            rank,
        )
    comptime if tile.split:
        _share[dtype, epilogue, tile](ends, lines, walk, ring, t, number, rank)


struct Lists(TrivialRegisterPassable):
    """The blocks of filters that hold a nonzero, and the order of tiles."""

    var rows: Data[I32]
    """[wide, pitch]: HEAD numbers and the steps."""
    var pitch: Int32
    """Numbers of a row."""
    var wide: Int32
    """Tiles of filters; they run before the tiles of pixels."""
    var turn: Int32
    """Tiles of pixels after which a block gets the next filters."""

    @always_inline
    def __init__(out self, rows: Data[I32], pitch: Int32, wide: Int32, turn: Int32):
        """Names the parts.

        Args:
            rows: The lists.
            pitch: Numbers of a row.
            wide: Tiles of filters.
            turn: Tiles of pixels of a turn.
        """
        self.rows, self.pitch, self.wide, self.turn = rows, pitch, wide, turn

    @always_inline
    def part(self, number: Int32) -> Part:
        """Looks a tile up.

        Args:
            number: Of the tile.

        Returns:
            Its pixels, filters and list.
        """
        var row = number // self.wide
        var column = (number + row // self.turn) % self.wide
        var list = self.rows.unsafe_offset(Int(column * self.pitch))
        var head = list.unsafe_load[width=2, alignment=8](0)
        return Part(row, column, head[0], head[1], list.unsafe_offset(HEAD))


@fieldwise_init
struct Part(TrivialRegisterPassable):
    """A tile and the list of its filters."""

    var row: Int32
    """Tile of pixels."""
    var column: Int32
    """Tile of filters."""
    var first: Int32
    """The first of its blocks in w."""
    var count: Int32
    """Its blocks."""
    var steps: Data[I32]
    """What each is of: r << 24 | s << 16 | chunk of channels. One number more may be read."""


@always_inline
def _produce[
    dtype: DType, epilogue: Epilogue, tile: Tile
](maps: UInt64, lists: Lists, walk: Walk[1], at_start: Ring, first_tile: Int32, rank: Int32):
    """Fills the ring, tile after tile, as stages become free."""
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    comptime STAGE = UInt32(tile.stage())
    comptime W_AT = UInt32(tile.pixels * ROW)
    comptime BOXES = tile.columns // Int(WIDTH)
    comptime PART = tile.pixels // tile.parts[dtype]()
    prefetch_map(maps)
    prefetch_map(maps + MAP)
    var part = lists.part(first_tile)
    var first = Int32(0)
    var last = part.count
    comptime if tile.split:
        first = part.count * rank // walk.splits
        last = part.count * (rank + 1) // walk.splits
    var next = part.steps[unsafe_offset=Int(first)]

    # The filters of the first stages do not depend on the kernel before.
    var early = min(last - first, Int32(tile.stages))
    for i in range(early):
        var full = at_start.full + 8 * UInt32(i)
        barrier_expect(full, STAGE)
        load_2d(
            at_start.stages + UInt32(i) * STAGE + W_AT,
            maps + MAP,
            full,
            0,
            (part.first + first + i) * Int32(tile.columns),
        )
    wait_on_dependent_grids()

    var ring = at_start
    for number in range(first_tile, walk.blocks, Int32(grid_dim.x)):
        var f0 = part.column * Int32(tile.columns)
        var m0 = part.row * Int32(tile.pixels)
        var w0 = part.first * Int32(tile.columns)
        var steps = part.steps
        comptime if not tile.split:
            last = part.count
            if number + Int32(grid_dim.x) < walk.blocks:
                part = lists.part(number + Int32(grid_dim.x))
        var image = m0 // walk.pq
        var pixel = m0 - image * walk.pq
        var p = pixel // walk.q
        var top = p * walk.stride_h - walk.pad_h
        var left = (pixel - p * walk.q) * walk.stride_w - walk.pad_w
        for i in range(first, last):
            var step = next
            next = steps[unsafe_offset=Int(i + 1)]
            var to = ring.stages + ring.slot * STAGE
            var full = ring.full + 8 * ring.slot
            if early > 0:
                early -= 1
            else:
                barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
                barrier_expect(full, STAGE)
                load_2d(to + W_AT, maps + MAP, full, 0, w0 + i * Int32(tile.columns))
            var c = (step & 0xFFFF) * WIDTH
            if walk.plain == 1:
                load_2d(to, maps, full, c, m0)
            else:
                load_im2col(
                    to,
                    maps,
                    full,
                    c,
                    left,
                    top,
                    image,
                    UInt16((step >> 16 & 0xFF) * walk.dilation_w),
                    UInt16((step >> 24) * walk.dilation_h),
                )
            ring.advance[tile.stages]()
        comptime if tile.split:
            return
        next = part.steps[unsafe_offset=0]
        comptime for i in range(tile.parts[dtype]()):
            var to = ring.stages + ring.slot * STAGE
            var full = ring.full + 8 * ring.slot
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
            comptime if epilogue.adds:
                barrier_expect(full, UInt32(BOXES * PART * ROW))
                comptime for j in range(BOXES):
                    load_2d(
                        to + UInt32(j * PART * ROW),
                        maps + 3 * MAP,
                        full,
                        f0 + Int32(j) * WIDTH,
                        m0 + Int32(i * PART),
                    )
            else:
                barrier_arrive(full)
            ring.advance[tile.stages]()


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, tile: Tile
](
    maps: UInt64,
    ends: Ends[dtype, 1],
    lists: Lists,
    walk: Walk[1],
    at_start: Ring,
    t: Int32,
    first_tile: Int32,
    rank: Int32,
):
    """Multiplies the stages of its tiles; finishes a tile, or leaves its sums in shared memory."""
    comptime DEPTH = 32 // size_of[dtype]()
    comptime STAGE = UInt32(tile.stage())
    comptime W_AT = UInt32(tile.pixels * ROW)
    comptime SUMS = tile.pixels // 2
    comptime PARTS = tile.parts[dtype]()
    comptime PART = tile.pixels // PARTS
    comptime BOX = UInt32(PART * ROW)
    comptime BOXES = ROWS * size_of[dtype]() // ROW

    var group = t // Int32(GROUP)
    var leads = t % Int32(GROUP) == 0
    # Thread 4 a + b of warp d holds pixels 8 j + 2 b, and one more, of filters 16 d + a and 8 on.
    var warp = t % Int32(GROUP) // 32
    var row = group * Int32(ROWS) + warp * 16 + t % 32 // 4

    var ring = at_start
    var storing = UInt32(0)  # The `empty` of the stages that are being stored, and how many.
    var next = lists.part(first_tile)
    for number in range(first_tile, walk.blocks, Int32(grid_dim.x)):
        var part = next
        if number + Int32(grid_dim.x) < walk.blocks:
            next = lists.part(number + Int32(grid_dim.x))
        var f0 = part.column * Int32(tile.columns)
        var steps = part.count
        comptime if tile.split:
            steps = part.count * (rank + 1) // walk.splits - part.count * rank // walk.splits
        var bias = SIMD[F32, 2](0)
        comptime if not tile.split:
            comptime for half in range(2):
                if f0 + row + Int32(8 * half) < walk.filters:
                    bias[half] = ends.bias[0][unsafe_offset=Int(f0 + row) + 8 * half]
        var sums = StaticTuple[Float32, SUMS](fill=0)
        var before = ring.slot
        for i in range(steps):
            barrier_wait(ring.full + 8 * ring.slot, ring.parity)
            var at = ring.stages + ring.slot * STAGE
            var x = MATRIX | Int64(at >> 4)
            var w = MATRIX | Int64((at + W_AT + UInt32(group) * UInt32(ROWS * ROW)) >> 4)
            wgmma_fence_aligned()
            comptime for k in range(4):
                sums = wgmma_async[ROWS, tile.pixels, DEPTH, a_type=dtype, b_type=dtype](
                    WGMMADescriptor[dtype](w + Int64(2 * k)),
                    WGMMADescriptor[dtype](x + Int64(2 * k)),
                    sums,
                )
            wgmma_commit_group_sync()
            if i == 0 and storing != 0 and leads:
                _release[tile, PARTS](ring, storing)
                storing = 0
            comptime if tile.overlap:
                if i > 0:
                    wgmma_wait_group_sync[1]()
                    if leads:
                        barrier_arrive(ring.empty + 8 * before)
                before = ring.slot
            else:
                wgmma_wait_group_sync[0]()
                if leads:
                    barrier_arrive(ring.empty + 8 * ring.slot)
            ring.advance[tile.stages]()
        comptime if tile.overlap:
            wgmma_wait_group_sync[0]()
            if leads and steps > 0:
                barrier_arrive(ring.empty + 8 * before)
        if steps == 0 and storing != 0 and leads:
            _release[tile, PARTS](ring, storing)

        comptime if tile.split:
            comptime PITCH = (tile.columns + 4) * 4
            comptime if tile.groups() > 1:
                sync_threads(1, UInt32(GROUP * tile.groups()))
            var to = ring.stages + UInt32(t % 4 * 2 * Int32(PITCH) + row * 4)
            comptime for j in range(tile.pixels // 8):
                comptime for e in range(4):
                    var at = to + UInt32((8 * j + e % 2) * PITCH + e // 2 * 32)
                    shared_store_float(at, sums[4 * j + e])
            return

        storing = ring.slot + 1
        comptime for half in range(PARTS):
            barrier_wait(ring.full + 8 * ring.slot, ring.parity)
            var to = ring.stages + ring.slot * STAGE + UInt32(group) * UInt32(BOXES) * BOX
            comptime if size_of[dtype]() == 2:
                _turn16[dtype, epilogue, PART, half * PART // 8](to, t, sums, walk.alpha, bias)
            else:
                _turn32[epilogue, PART, half * PART // 8](
                    to + UInt32(warp // 2) * BOX, t, sums, walk.alpha, bias
                )
            fence_async()
            sync_threads(UInt32(group) + 1, UInt32(GROUP))
            if leads:
                comptime for j in range(BOXES):
                    store_2d(
                        maps + 2 * MAP,
                        to + UInt32(j) * BOX,
                        f0 + group * Int32(ROWS) + Int32(j * ROW // size_of[dtype]()),
                        part.row * Int32(tile.pixels) + Int32(half * PART),
                    )
                stores_commit()
            ring.advance[tile.stages]()
    stores_read()


@always_inline
def _release[tile: Tile, parts: Int](ring: Ring, storing: UInt32):
    """Gives back the stages of the tile before, which have left shared memory or soon will have."""
    stores_read()
    comptime for part in range(parts):
        barrier_arrive(ring.empty + 8 * ((storing - 1 + UInt32(part)) % UInt32(tile.stages)))


@always_inline
def _turn16[
    dtype: DType, epilogue: Epilogue, pixels: Int, first: Int
](to: UInt32, t: Int32, sums: StaticTuple[Float32, _], alpha: Float32, bias: SIMD[F32, 2],):
    """Finishes 64 filters of pixels, in 16 bits, from the eight numbered `first` on."""
    # Eight lanes name the rows of a matrix: 8 pixels of 8 filters.
    var lane = UInt32(t % 32)
    var byte = UInt32(t % Int32(GROUP) // 32 * 32) + lane // 8 % 2 * 16
    var mine = to + (lane // 16 * 8 + lane % 8) * UInt32(ROW) + (byte ^ (lane % 8 * 16))
    comptime for j in range(pixels // 16):
        var at = mine + UInt32(j * 16 * ROW)
        var bits = SIMD[DType.uint32, 4](0)
        comptime if epilogue.adds:
            bits = shared_load_matrices[True](at)
        comptime for i in range(4):
            comptime at_sum = 4 * (first + 2 * j + i // 2) + 2 * (i % 2)
            var value = SIMD[F32, 2](sums[at_sum], sums[at_sum + 1])
            value = value.fma(SIMD[F32, 2](alpha), SIMD[F32, 2](bias[i % 2]))
            comptime if epilogue.adds:
                value += widened(bitcast[dtype, 2](bits[i]))
            bits[i] = bitcast[DType.uint32, 1](activate[epilogue, dtype](value).cast[dtype]())
        shared_store_matrices[True](at, bits)


@always_inline
def _turn32[
    epilogue: Epilogue, pixels: Int, first: Int
](to: UInt32, t: Int32, sums: StaticTuple[Float32, _], alpha: Float32, bias: SIMD[F32, 2],):
    """Finishes 32 filters of pixels, in float32, from the eight numbered `first` on."""
    var byte = UInt32(t % 64 // 32 * 64 + t % 32 // 4 * 4)
    comptime for j in range(pixels // 8):
        comptime for e in range(4):
            var pixel = UInt32(t % 4 * 2) + UInt32(e % 2)
            var at = (
                to
                + (pixel + UInt32(8 * j)) * UInt32(ROW)
                + ((byte + UInt32(e // 2 * 32)) ^ (pixel * 16))
            )
            var value = sums[4 * (first + j) + e].fma(alpha, bias[e // 2])
            comptime if epilogue.adds:
                value += shared_load_float(at)
            shared_store_float(at, activate[epilogue, F32](value))


@always_inline
def _share[
    dtype: DType, epilogue: Epilogue, tile: Tile
](
    ends: Ends[dtype, 1],
    lists: Lists,
    walk: Walk[1],
    ring: UInt32,
    t: Int32,
    number: Int32,
    rank: Int32,
):
    """Adds up a cluster's sums: each block some pixels of a tile, 8 filters a thread at a time."""
    comptime PITCH = (tile.columns + 4) * 4
    comptime EIGHTS = tile.columns // 8
    cluster_sync()
    var part = lists.part(number)
    var m0 = part.row * Int32(tile.pixels)
    var f0 = part.column * Int32(tile.columns)
    var rows = Int32(tile.pixels) // walk.splits
    for unit in range(t, rows * Int32(EIGHTS), Int32(tile.threads())):
        var row = rank * rows + unit // Int32(EIGHTS)
        var m = m0 + row
        var f = f0 + unit % Int32(EIGHTS) * 8
        if m < walk.pixels[0] and f < walk.filters:
            var at = ring + UInt32(row) * UInt32(PITCH) + UInt32(f - f0) * 4
            var low = SIMD[F32, 4](0)
            var high = SIMD[F32, 4](0)
            for peer in range(walk.splits):
                low += cluster_load4(at, UInt32(peer))
                high += cluster_load4(at + 16, UInt32(peer))
            var bias = ends.bias[0].unsafe_load[width=8, alignment=16](Int(f))
            var value = low.join(high).fma(SIMD[F32, 8](walk.alpha), bias)
            var to = Int(m) * Int(walk.filters) + Int(f)
            comptime if epilogue.adds:
                value += ends.residual[0].unsafe_load[width=8, alignment=16](to).cast[F32]()
            ends.y[0].unsafe_store[alignment=16](to, activate[epilogue, dtype](value).cast[dtype]())
    cluster_sync()


def enqueue_blocks[
    dtype: DType, epilogue: Epilogue, tile: Tile
](
    g: Geometry,
    o: Operands[dtype],
    lists: Data[I32],
    pitch: Int,
    entries: Int,
    splits: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues a convolution with a tile.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        tile: Sizes of the tile.

    Args:
        g: Sizes; one group.
        o: The tensors; w holds the blocks.
        lists: [F / columns, pitch], see graphs/arrange.py.
        pitch: Numbers of a list.
        entries: Blocks of w.
        splits: Blocks of threads that share a tile; 1 unless the tile splits.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime WIDTH = ROW // size_of[dtype]()
    comptime PART = tile.pixels // tile.parts[dtype]()
    comptime assert tile.pixels % 64 == 0, "conv2d_blocks: a tile has 64, 128, 192 or 256 pixels"
    comptime assert tile.columns % ROWS == 0, "conv2d_blocks: a tile has 64 or 128 filters"
    comptime assert (
        tile.parts[dtype]() < tile.stages
    ), "conv2d_blocks: the results expect fewer stages than there are"
    var f, m = Int64(g.f), Int64(g.pixels())
    var maps = Maps[4]()
    if is_plain(g):
        maps.maps[0] = tensor_map[dtype, 2, True](
            ctx, o.x, [Int64(g.c), m], [Int32(WIDTH), Int32(tile.pixels)]
        )
    else:
        maps.maps[0] = im2col_map[dtype](ctx, o.x, g, tile.pixels)
    maps.maps[1] = tensor_map[dtype, 2, True](
        ctx,
        o.w,
        [Int64(WIDTH), Int64(entries * tile.columns)],
        [Int32(WIDTH), Int32(tile.columns)],
    )
    maps.maps[2] = tensor_map[dtype, 2](ctx, o.y, [f, m], [Int32(WIDTH), Int32(PART)])
    comptime if epilogue.adds:
        maps.maps[3] = tensor_map[dtype, 2](ctx, o.residual, [f, m], [Int32(WIDTH), Int32(PART)])
    var walk = Walk[1](
        [g],
        rows=tile.pixels,
        chunks=ceildiv(g.c, WIDTH),
        tiles=ceildiv(g.f, tile.columns),
        splits=splits,
        alpha=o.alpha,
    )
    var blocks = Int(walk.blocks)
    # A block of a cluster has one tile; others go from tile to tile.
    var grid = blocks * splits if tile.split else min(blocks, PROCESSORS * tile.blocks)
    ctx.enqueue_function[blocks_kernel[dtype, epilogue, tile]](
        maps,
        Ends[dtype, 1]([o]),
        lists,
        walk,
        Int32(pitch),
        grid_dim=grid,
        block_dim=tile.threads(),
        cluster_dim=Dim(splits),
        shared_mem_bytes=tile.shared(),
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(tile.shared())),
    )


def blocks_conv2d[
    dtype: DType, epilogue: Epilogue, columns: Int
](
    g: Geometry,
    o: Operands[dtype],
    lists: Data[I32],
    pitch: Int,
    entries: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        columns: Filters of a block, 64 or 128.

    Args:
        g: Sizes; one group.
        o: The tensors; w[entries, columns, 128 bytes] holds the blocks.
        lists: [F / columns, pitch], see graphs/arrange.py.
        pitch: Numbers of a list.
        entries: Blocks of w.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime assert columns == 64 or columns == 128, "blocks_conv2d: expects 64 or 128 columns"
    comptime tiles = NARROW if columns == 64 else WIDE
    var wide = ceildiv(g.f, columns)
    var steps = entries // wide
    comptime least = tiles[2].pixels
    var few = ceildiv(g.pixels(), least) * wide
    # As measured: a cluster costs as much as 12 steps of a tile, and more where there are many.
    if 5 * steps >= 60 + few:
        var splits = 4 if few * columns <= 1024 else 2
        enqueue_blocks[dtype, epilogue, tiles[2]](g, o, lists, pitch, entries, splits, ctx)
        return
    # A step takes as long as it has pixels, a tenth less in the deep ring; the end as 200 pixels.
    var costs = Array[Int, 2](fill=0)
    comptime for i in range(2):
        comptime pixels = tiles[i].pixels
        var turns = ceildiv(ceildiv(g.pixels(), pixels) * wide, PROCESSORS)
        costs[i] = turns * (pixels * steps * (9 + i) + 2000)
    if costs[0] <= costs[1]:
        enqueue_blocks[dtype, epilogue, tiles[0]](g, o, lists, pitch, entries, 1, ctx)
    else:
        enqueue_blocks[dtype, epilogue, tiles[1]](g, o, lists, pitch, entries, 1, ctx)
