"""Block-sparse convolution on Hopper's tensor cores: a filter's blocks of zeros are left out.

    y[m, f] = act(alpha * sum_k x[m, k] w[f, k] + bias + residual)

    x[N, H, W, C]          activations, read as [M, K] by the copy engine's im2col mode
    w[entries, 64, 128 B]  blocks: 64 filters x 128 bytes of channels of one tap
    y[N, P, Q, F]          result, and the residual

M = N * P * Q output pixels, K = R * S * C. A tile is `pixels` pixels x 64 filters. Each 64 filters
have a list of their blocks that hold a nonzero (graphs/arrange.py, block_steps). As in
ops/gemm/hopper.mojo one warp, the producer, fills a ring of stages, here with the blocks of the list
and what they meet of x, and a warpgroup multiplies the stages by wgmma. But

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

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, grid_dim, thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..choice import NEVER, cheapest
from ..device import Device
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.accumulator import Fragment, Sums
from ..hopper.cluster import PAD, leave_columns, reduce_cluster
from ..hopper.conv import Problem, load_pixels, pixels_map
from ..hopper.epilogue import EpilogueTensors, finish_columns
from ..hopper.mainloop import multiply_stages
from ..hopper.mma import ROWS
from ..hopper.pipeline import Pipeline
from ..hopper.ptx import stores_read
from ..hopper.roles import Roles
from ..hopper.scheduler import Start, TileScheduler
from ..hopper.shared import ROW, shared_memory
from ..hopper.store import Storing, load_residual, store_boxes
from ..hopper.tma import Maps, TensorMaps, TileLoader, TileStore, matrix_map
from ..hopper.window import Reads
from ..launch import launch
from ..operands import F32, Data, Operands

comptime I32 = DType.int32
"""Of a list."""
comptime FILTERS = ROWS
"""Filters of a block, as in graphs/formats.py."""
comptime HEAD = 2
"""Numbers of a list before its steps: the first block in w, and how many."""


struct Config(TrivialRegisterPassable):
    """How a block of threads works: a compile-time value."""

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
        pixels: Int,
        stages: Int,
        blocks: Int,
        *,
        split: Bool = False,
        overlap: Bool = False,
    ):
        """Names the parts.

        Args:
            pixels: Pixels of a tile.
            stages: Stages of the ring.
            blocks: Blocks of a multiprocessor.
            split: Whether a cluster shares a tile.
            overlap: Whether products of two stages overlap.
        """
        self.pixels, self.stages = pixels, stages
        self.blocks, self.split, self.overlap = blocks, split, overlap

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Pixels, filters and stages, and how it works.
        """
        var size = t"{self.pixels}x{FILTERS}x{self.stages}"
        return String(size) + ("split" if self.split else "overlap" if self.overlap else "")

    @always_inline
    def stage(self) -> Int:
        """Counts the bytes of a stage.

        Returns:
            128 for each pixel and filter.
        """
        return (self.pixels + FILTERS) * ROW

    @always_inline
    def parts[dtype: DType](self) -> Int:
        """Counts the stages that a tile's results take.

        Parameters:
            dtype: Of the results.

        Returns:
            A power of two.
        """
        var parts = 1
        while self.pixels // parts * FILTERS * size_of[dtype]() > self.stage():
            parts *= 2
        return parts

    @always_inline
    def part[dtype: DType](self) -> Int:
        """Counts the pixels of a tile whose results fit into a stage.

        Parameters:
            dtype: Of the results.

        Returns:
            All of them, a half or a quarter.
        """
        return self.pixels // self.parts[dtype]()


comptime Warps = Roles[1]
"""Which warps of a block do what."""
comptime TILES: List[Config] = [
    Config(128, 8, 1, overlap=True),
    Config(192, 3, 2),
    Config(64, 6, 2, split=True),
]
"""The tiles that are compiled; the last one splits."""


@__name(t"sparse_conv2d_blocks_{config.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps.THREADS)),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def blocks_kernel[
    dtype: DType, epilogue: Epilogue, config: Config
](
    maps: TensorMaps[Maps.COUNT],
    tensors: EpilogueTensors[dtype, epilogue],
    lists: Data[I32],
    problem: Problem[1],
    pitch: Int32,
):
    """Computes tiles, or a cluster's share of one.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), w, y[M, F] and the residual.
        tensors: Bias, residual and y.
        lists: What graphs/arrange.py makes, a row for each tile of filters.
        problem: Sizes.
        pitch: Numbers of a row of `lists`.
    """
    var data = shared_memory["conv2d_blocks"]()
    var pipeline = Pipeline.of_block[config.stages](
        data, bytes=config.stage(), consumers=1, threads=Warps.THREADS
    )
    launch_dependent_grids()
    var t = Int32(thread_idx.x)

    var tiles = Lists(lists, pitch, problem.schedule)
    var start = problem.schedule.start[config.split]()
    var first_tile = tiles.tile(start.tile)
    if Warps.produces(t):
        if Warps.drives(t):
            _produce[dtype, epilogue, config](
                maps.address(), tiles, start, first_tile, problem, pipeline
            )
    else:
        _consume[dtype, epilogue, config](
            maps.address(), tensors, tiles, start, first_tile, problem, pipeline, Fragment(t)
        )
    comptime if config.split:
        reduce_cluster[
            rows=config.pixels,
            columns=FILTERS,
            pad=PAD // 2,
            threads=Warps.THREADS,
        ](
            tensors,
            data,
            start,
            problem.schedule.splits,
            m0=first_tile.row * Int32(config.pixels),
            m=problem.rows_of(0),
            f0=first_tile.column * Int32(FILTERS),
            f=problem.filters,
            alpha=problem.alpha,
        )


@fieldwise_init
struct ListedTile(TrivialRegisterPassable):
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
    """What each reads: `Reads.tap`. One number more may be read."""


struct Lists(TrivialRegisterPassable):
    """The blocks of filters that hold a nonzero, and the order of tiles."""

    var rows: Data[I32]
    """A row for each tile of filters: HEAD numbers and the steps."""
    var pitch: Int32
    """Numbers of a row."""
    var schedule: TileScheduler[1]
    """Which block computes which tile."""
    var turn: Int32
    """Tiles of pixels after which a block gets the next filters."""

    @always_inline
    def __init__(out self, rows: Data[I32], pitch: Int32, schedule: TileScheduler[1]):
        """Takes the lists.

        Args:
            rows: The lists.
            pitch: Numbers of a row.
            schedule: Which block computes which tile.
        """
        self.rows, self.pitch, self.schedule = rows, pitch, schedule
        self.turn = max(Int32(UInt32(grid_dim.x) // UInt32(schedule.columns)), 1)

    @always_inline
    def tile(self, number: Int32) -> ListedTile:
        """Looks a tile up.

        Args:
            number: Of the tile.

        Returns:
            Its pixels, filters and list.
        """
        var columns = UInt32(self.schedule.columns)
        var row = Int32(UInt32(number) // columns)
        var turns = UInt32(row) // UInt32(self.turn)
        var column = Int32((UInt32(number) + turns) % columns)
        var list = self.rows.unsafe_offset(Int(column * self.pitch))
        var head = list.unsafe_load[width=HEAD, alignment=8](0)
        return ListedTile(row, column, head[0], head[1], list.unsafe_offset(HEAD))

    @always_inline
    def after(self, number: Int32, tile: ListedTile) -> ListedTile:
        """Looks the block's next tile up, well before it is needed.

        Args:
            number: Of the tile that is computed.
            tile: That tile.

        Returns:
            The next one; the same one after the last.
        """
        var next = number + self.schedule.turns().step
        return self.tile(next) if next < self.schedule.tiles else tile


@always_inline
def _produce[
    dtype: DType, epilogue: Epilogue, config: Config
](
    maps: UInt64,
    lists: Lists,
    start: Start,
    first_tile: ListedTile,
    problem: Problem[1],
    at_start: Pipeline,
):
    """Fills the ring, tile after tile, as stages become free."""
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    comptime STAGE = UInt32(config.stage())
    comptime W_AT = UInt32(config.pixels * ROW)
    comptime PART = config.part[dtype]()
    var x = TileLoader(maps, Maps.X)
    var w = TileLoader(maps, Maps.W)
    var residual = TileLoader(maps, Maps.RESIDUAL)
    x.prefetch_descriptor()
    w.prefetch_descriptor()
    var schedule = problem.schedule
    var tile = first_tile
    var steps = schedule.share[config.split](start, tile.count)
    var next = tile.steps[unsafe_offset=Int(steps.begin)]

    # Filters are weights: they do not depend on the kernel before.
    var pipeline = at_start
    for i in range(pipeline.prefetch(steps.count())):
        pipeline.expect(i, STAGE)
        w.load(
            pipeline.stage(i) + W_AT,
            pipeline.barrier(i),
            0,
            (tile.first + steps.begin + i) * Int32(FILTERS),
        )
    wait_on_dependent_grids()

    for number in schedule.turns(start):
        var following = lists.after(number, tile)
        var m0 = tile.row * Int32(config.pixels)
        var f0 = tile.column * Int32(FILTERS)
        var pixel = problem.conv.pixel(m0)
        var corner = problem.conv.corner(pixel)
        for i in range(steps.begin, steps.end):
            var reads = Reads(UInt32(next))
            next = tile.steps[unsafe_offset=Int(i + 1)]
            var to = pipeline.stage()
            var full = pipeline.barrier()
            if pipeline.acquire_or_prefetched():
                pipeline.expect(STAGE)
                w.load(to + W_AT, full, 0, (tile.first + i) * Int32(FILTERS))
            load_pixels(
                x,
                to,
                full,
                problem.conv,
                pixel,
                corner,
                channel=reads.chunk() * WIDTH,
                r=reads.r(),
                s=reads.s(),
            )
            pipeline.advance()
        comptime if config.split:
            return
        tile = following
        steps = schedule.share[config.split](start, tile.count)
        next = tile.steps[unsafe_offset=Int(steps.begin)]
        comptime for part in range(config.parts[dtype]()):
            load_residual[dtype, FILTERS, joins=epilogue.joins, rows=PART](
                pipeline, residual, f0, m0 + Int32(part * PART)
            )


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, config: Config
](
    maps: UInt64,
    tensors: EpilogueTensors[dtype, epilogue],
    lists: Lists,
    start: Start,
    first_tile: ListedTile,
    problem: Problem[1],
    at_start: Pipeline,
    at: Fragment,
):
    """Multiplies the stages of the tiles; finishes a tile, or leaves its sums in shared memory."""
    comptime W_AT = UInt32(config.pixels * ROW)
    comptime PARTS = config.parts[dtype]()
    comptime PART = config.part[dtype]()
    var leads = at.leads()
    var y = TileStore(maps, Maps.Y)
    var schedule = problem.schedule

    var pipeline = at_start
    var storing = Storing[PARTS]()
    var following = first_tile
    for number in schedule.turns(start):
        var tile = following
        following = lists.after(number, tile)
        var f0 = tile.column * Int32(FILTERS)
        var bias = SIMD[F32, 2](0)
        comptime if not config.split:
            bias = tensors.row_biases(at, f0, problem.filters)
        var steps = schedule.share[config.split](start, tile.count).count()
        var sums = multiply_stages[dtype, config.pixels, overlap=config.overlap](
            pipeline,
            storing,
            steps,
            a=W_AT,
            b=0,
            leads=leads,
            start=Sums[config.pixels](fill=0),
        )

        comptime if config.split:
            leave_columns[FILTERS, config.pixels](at_start.data, at, sums)
            return

        storing.begin(pipeline)
        comptime for part in range(PARTS):
            pipeline.wait()
            var to = pipeline.stage()
            finish_columns[dtype, epilogue, PART, part * PART](to, at, sums, problem.alpha, bias)
            var m = tile.row * Int32(config.pixels) + Int32(part * PART)
            store_boxes[dtype, ROWS, rows=PART](y, to, f0, m, barrier=1, leads=leads)
            pipeline.advance()
    stores_read()


# The host's side


def enqueue_blocks[
    dtype: DType, epilogue: Epilogue, config: Config
](
    g: Geometry,
    o: Operands[dtype],
    lists: Data[I32],
    pitch: Int,
    entries: Int,
    splits: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues a convolution with a tile of the caller's.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        g: Sizes; one group.
        o: The tensors; w holds the blocks.
        lists: [F / 64, pitch], see graphs/arrange.py.
        pitch: Numbers of a list.
        entries: Blocks of w.
        splits: Blocks of threads that share a tile; 1 unless the config splits.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime WIDTH = ROW // size_of[dtype]()
    comptime PART = config.part[dtype]()
    comptime assert config.pixels % 64 == 0, "conv2d_blocks: a tile has 64, 128, 192 or 256 pixels"
    comptime assert (
        config.parts[dtype]() < config.stages
    ), "conv2d_blocks: the results expect fewer stages than there are"
    var m = g.pixels()
    var maps = TensorMaps[Maps.COUNT]()
    maps.maps[Maps.X] = pixels_map[dtype](ctx, o.x, g, config.pixels)
    maps.maps[Maps.W] = matrix_map[dtype, True](
        ctx, o.w, rows=entries * FILTERS, columns=WIDTH, box=FILTERS
    )
    maps.maps[Maps.Y] = matrix_map[dtype](ctx, o.y, rows=m, columns=g.f, box=PART)
    comptime if epilogue.joins:
        maps.maps[Maps.RESIDUAL] = matrix_map[dtype](ctx, o.residual, rows=m, columns=g.f, box=PART)
    var problem = Problem[1](
        [g],
        rows=config.pixels,
        columns=FILTERS,
        width=WIDTH,
        splits=splits,
        alpha=o.alpha,
    )
    var resident = Device(ctx).multiprocessors * config.blocks
    launch[blocks_kernel[dtype, epilogue, config]](
        ctx,
        maps,
        EpilogueTensors[dtype, epilogue]([o]),
        lists,
        problem,
        Int32(pitch),
        grid_dim=problem.schedule.blocks[config.split](resident),
        block_dim=Warps.THREADS,
        cluster_dim=Dim(splits),
        shared=Pipeline.block_bytes(stages=config.stages, bytes=config.stage()),
    )


def choose_blocks(g: Geometry, entries: Int, device: Device) -> Int:
    """Chooses the tile of a convolution, by costs as measured.

    Args:
        g: Sizes.
        entries: Blocks of w.
        device: The GPU.

    Returns:
        An index in `TILES`.
    """

    def cost(config: Config) {imm} -> Float64:
        var count = g.tiles(config.pixels, FILTERS)
        var steps = entries // ceildiv(g.f, FILTERS)
        if config.split:
            # A cluster costs as much as 12 steps of a tile, and more where there are many.
            return 0 if 5 * steps >= 60 + count else NEVER
        # A step takes as long as it has pixels, a tenth less in the deep ring; the end as 200 pixels.
        var pace = 9 if config.stages > 5 else 10
        return Float64(device.waves(count) * (config.pixels * steps * pace + 2000))

    return cheapest[TILES](cost)


def blocks_conv2d[
    dtype: DType, epilogue: Epilogue
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

    Args:
        g: Sizes; one group.
        o: The tensors; w[entries, 64, 128 bytes] holds the blocks.
        lists: [F / 64, pitch], see graphs/arrange.py.
        pitch: Numbers of a list.
        entries: Blocks of w.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var best = choose_blocks(g, entries, Device(ctx))
    comptime for i in range(len(TILES)):
        comptime config = TILES[i]
        if i == best:
            var splits = 1
            comptime if config.split:
                splits = 4 if g.tiles(config.pixels, FILTERS) <= 16 else 2
            enqueue_blocks[dtype, epilogue, config](g, o, lists, pitch, entries, splits, ctx)
