"""The gradient of a convolution's filters on Hopper's tensor cores, in 16 bits.

    dw[f, j] = sum_m dy[m, f] x[row(m, j)]      j = (r, s, c)

A GEMM of F filters by R S C columns whose K are the pixels m. Both operands lie in memory as rows of
one number of K, and stay so: wgmma reads 16-bit numbers of either side in either order. A stage is 64
pixels: boxes of 64 filters of dy, and boxes of what one tap sees of 64 channels of x, which the copy
engine's im2col mode brings as it does for the convolution itself. The columns of a tile may be boxes
of several taps, which all meet the same dy.

A block computes a tile of one part of the pixels. A producer fills a ring of stages, and consumers of
64 filters each, by all columns or a half or a third of them, multiply the stages. The sums leave the
registers for the room of the part, or straight for dw if there is one part; the tiles of a part follow
one another, so that blocks that run at the same time read the same pixels.

16-bit floats only. C and F have to be multiples of 8, in one group.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..choice import cheapest
from ..device import Device
from ..geometry import Geometry
from ..hopper.accumulator import Fragment, Sums, pair
from ..hopper.conv import Conv, Step, load_pixels, pixels_map
from ..hopper.mainloop import multiply_stages
from ..hopper.mma import BOX
from ..hopper.pipeline import Pipeline
from ..hopper.roles import Roles
from ..hopper.scheduler import Share, TileScheduler
from ..hopper.shared import shared_memory
from ..hopper.store import Storing
from ..hopper.tma import TensorMaps, TileLoader, matrix_map
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import narrowed
from .parts import add_parts
from .tensors import WeightGrad

comptime WIDTH = 64
"""Numbers of 128 bytes: pixels of a stage, and filters or channels of a box."""
comptime LEAST = 4
"""Stages of a part at least."""


struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var filters: Int
    """Boxes of filters of a tile."""
    var boxes: Int
    """Boxes of columns of a tile."""
    var shares: Int
    """Consumers that share the columns of the same filters."""
    var stages: Int
    """Stages of the ring."""

    def __init__(out self, filters: Int, boxes: Int, shares: Int, stages: Int):
        """Names the parts.

        Args:
            filters: Boxes of filters.
            boxes: Boxes of columns.
            shares: Consumers of the same filters.
            stages: Stages of the ring.
        """
        self.filters, self.boxes, self.shares, self.stages = filters, boxes, shares, stages

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Filters, columns and stages.
        """
        return String(t"{self.filters * WIDTH}x{self.boxes * WIDTH}x{self.stages}")

    @always_inline
    def columns(self) -> Int:
        """Counts the columns of a consumer.

        Returns:
            At most 256.
        """
        return self.boxes // self.shares * WIDTH

    @always_inline
    def groups(self) -> Int:
        """Counts the consumers.

        Returns:
            Warpgroups.
        """
        return self.filters * self.shares

    @always_inline
    def stage(self) -> Int:
        """Counts the bytes of a stage.

        Returns:
            Those of all its boxes.
        """
        return (self.filters + self.boxes) * BOX


comptime Warps[config: Config] = Roles[config.groups()]
"""Which warps of a block do what.

Parameters:
    config: Of the kernel.
"""
comptime CONFIGS: List[Config] = [Config(1, 4, 2, 5), Config(2, 4, 1, 4), Config(2, 3, 1, 5)]
"""Tiles: 64 x 256 filters x columns, 128 x 256 and 128 x 192; of equal costs the first wins."""


struct GradProblem(KernelArgument, TrivialRegisterPassable):
    """The sizes of a gradient."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var conv: Conv
    """Pixels, taps and channels of x."""
    var channels: Int32
    """C."""
    var filters: Int32
    """F."""
    var steps: Int32
    """Stages over all pixels."""
    var parts: Int32
    """Of the pixels."""
    var rows: Int32
    """Tiles of filters."""
    var schedule: TileScheduler[]
    """The tiles of all parts, one a block: rows are filters, those of the next part behind them."""

    def __init__(out self, g: Geometry, config: Config, parts: Int):
        """Divides the work.

        Args:
            g: Sizes of the convolution.
            config: The tile.
            parts: Of the pixels.
        """
        self.conv = Conv(g, chunks=ceildiv(g.c, WIDTH))
        self.channels, self.filters = Int32(g.c), Int32(g.f)
        self.steps, self.parts = Int32(ceildiv(g.pixels(), WIDTH)), Int32(parts)
        var rows = ceildiv(g.f, config.filters * WIDTH)
        self.rows = Int32(rows)
        self.schedule = TileScheduler[](
            [rows * parts], columns=ceildiv(Int(self.conv.steps()), config.boxes)
        )

    def cost(self, config: Config, g: Geometry, multiprocessors: Int) -> Float64:
        """Estimates how long a gradient takes, by what blocks load, multiply and leave in the room.

        Fitted to the times of ResNet-50's convolutions (tune.mojo, H100, 2026-11-25): all its choices
        together take 1.2 % longer than the best tiles.

        Args:
            config: The tile.
            g: Sizes of the convolution.
            multiprocessors: Of the GPU.

        Returns:
            A number without a unit.
        """
        var rows = min(config.filters, ceildiv(g.f, WIDTH))
        var boxes = rows + min(config.boxes, Int(self.conv.steps()))
        var waves = ceildiv(Int(self.schedule.tiles), multiprocessors)
        var stages = waves * ceildiv(Int(self.steps), Int(self.parts))
        var sums = g.f * g.depth() * Int(self.parts) if self.parts > 1 else 0
        var stage = Float64(boxes - 3) + 0.2 * Float64(config.filters * config.boxes)
        return Float64(stages) * max(stage, 1) + 5.75e-5 * Float64(sums)


struct _Work(TrivialRegisterPassable):
    """What a block computes."""

    var part: Int32
    """Number of the part."""
    var steps: Share
    """Its stages."""
    var f0: Int32
    """First filter."""
    var box: Int32
    """First box of columns: its tap, and chunk of channels."""

    @always_inline
    def __init__(out self, problem: GradProblem, config: Config):
        """Finds it by the block's number."""
        var tile = problem.schedule.tile(Int32(block_idx.x))
        self.part = Int32(UInt32(tile.row) // UInt32(problem.rows))
        self.f0 = (tile.row - self.part * problem.rows) * Int32(config.filters * WIDTH)
        self.box = tile.column * Int32(config.boxes)
        self.steps = Share(of=problem.steps, part=self.part, parts=problem.parts)


@__name(t"conv2d_weight_grad_{config.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
)
def hopper_kernel[
    dtype: DType, config: Config
](maps: TensorMaps[2], o: WeightGrad[dtype], problem: GradProblem):
    """Sums a part of the pixels for a tile of dw.

    Parameters:
        dtype: Of the tensors.
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of dy[M, F] and x[N, H, W, C].
        o: The tensors; dw or its room is written.
        problem: Sizes.
    """
    var pipeline = Pipeline.of_block[config.stages](
        shared_memory["conv2d_weight_grad"](),
        bytes=config.stage(),
        consumers=config.groups(),
        threads=Warps[config].THREADS,
    )
    launch_dependent_grids()
    var t = Int32(thread_idx.x)
    var work = _Work(problem, config)
    if Warps[config].produces(t):
        if Warps[config].drives(t):
            _produce[config](maps.address(), problem, work, pipeline)
    else:
        _consume[dtype, config](o, problem, work, pipeline, Fragment(t))


@always_inline
def _produce[config: Config](maps: UInt64, problem: GradProblem, work: _Work, at_start: Pipeline):
    """Fills the stages."""
    var conv = problem.conv
    var dy = TileLoader(maps, 0)
    var x = TileLoader(maps, 1)
    dy.prefetch_descriptor()
    x.prefetch_descriptor()
    # What each box of columns sees; boxes beyond the last one are not loaded.
    var boxes = min(Int32(config.boxes), conv.steps() - work.box)
    var sees = StaticTuple[Step, config.boxes](fill=Step())
    comptime for i in range(config.boxes):
        sees[i] = Step(conv, work.box + Int32(i), sources=1)
    var filters = min(Int32(config.filters), Int32(ceildiv(Int(problem.filters - work.f0), WIDTH)))
    var pipeline = at_start
    wait_on_dependent_grids()
    for step in range(work.steps.begin, work.steps.end):
        var to = pipeline.stage()
        var full = pipeline.barrier()
        var at = conv.pixel(step * Int32(WIDTH))
        var corner = conv.corner(at)
        pipeline.acquire()
        pipeline.expect(UInt32((filters + boxes) * Int32(BOX)))
        comptime for i in range(config.filters):
            if Int32(i) < filters:
                dy.load(to + UInt32(i * BOX), full, work.f0 + Int32(i * WIDTH), at.m)
        comptime for i in range(config.boxes):
            if Int32(i) < boxes:
                load_pixels(
                    x,
                    to + UInt32((config.filters + i) * BOX),
                    full,
                    conv,
                    at,
                    corner,
                    channel=sees[i].c * Int32(WIDTH),
                    r=sees[i].r,
                    s=sees[i].s,
                )
        pipeline.advance()


@always_inline
def _consume[
    dtype: DType, config: Config
](o: WeightGrad[dtype], problem: GradProblem, work: _Work, at_start: Pipeline, at: Fragment):
    """Multiplies the stages, and stores the sums."""
    comptime COLUMNS = config.columns()
    var filter = at.group() // Int32(config.shares)
    var first = (at.group() - filter * Int32(config.shares)) * Int32(COLUMNS // WIDTH)
    var pipeline = at_start
    var storing = Storing[1]()
    var sums = multiply_stages[dtype, COLUMNS, overlap=True, turned=True, turned_a=True](
        pipeline,
        storing,
        work.steps.count(),
        a=UInt32(filter * Int32(BOX)),
        b=UInt32((Int32(config.filters) + first) * Int32(BOX)),
        leads=at.leads(),
        start=Sums[COLUMNS](fill=0),
    )
    var conv = problem.conv
    var row = work.f0 + filter * Int32(WIDTH) + at.row()
    var depth = Int(conv.taps) * Int(problem.channels)
    var room = o.room.unsafe_offset(Int(work.part) * Int(problem.filters) * depth)
    comptime for box in range(COLUMNS // WIDTH):
        var step = Step(conv, work.box + first + Int32(box), sources=1)
        var c = step.c * Int32(WIDTH) + at.column()
        if step.tap < conv.taps:
            comptime for half in range(2):
                if row + Int32(8 * half) < problem.filters:
                    var to = Int(row + Int32(8 * half)) * depth
                    to += Int(step.tap) * Int(problem.channels) + Int(c)
                    comptime for j in range(WIDTH // 8):
                        if c + Int32(8 * j) < problem.channels:
                            var two = pair[j=box * WIDTH // 8 + j, half=half](sums)
                            if problem.parts == 1:
                                o.dw.unsafe_store[alignment=2 * size_of[dtype]()](
                                    to + 8 * j, narrowed[dtype](two)
                                )
                            else:
                                room.unsafe_store[alignment=8](to + 8 * j, two)


def weight_grad_tile[
    dtype: DType, //, config: Config
](g: Geometry, o: WeightGrad[dtype], parts: Int, ctx: DeviceContext) raises:
    """Enqueues the kernel with one of the tiles.

    Parameters:
        dtype: Of the tensors.
        config: Sizes of the tile.

    Args:
        g: Sizes of the convolution.
        o: Tensors.
        parts: Of the pixels; if there are several, their sums are left in the room.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var maps = TensorMaps[2]()
    maps.maps[0] = matrix_map[dtype](ctx, o.dy, rows=g.pixels(), columns=g.f, box=WIDTH)
    maps.maps[1] = pixels_map[dtype](ctx, o.x, g, WIDTH)
    var problem = GradProblem(g, config, parts)
    launch[hopper_kernel[dtype, config]](
        ctx,
        maps,
        o,
        problem,
        grid_dim=Int(problem.schedule.tiles),
        block_dim=Warps[config].THREADS,
        shared=Pipeline.block_bytes(stages=config.stages, bytes=config.stage()),
    )


def weight_grad_hopper[
    dtype: DType, //
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    """Chooses a tile, and enqueues the gradient.

    Parameters:
        dtype: Of the tensors.

    Args:
        g: Sizes of the convolution.
        o: Tensors.
        most: Parts of the pixels for which there is room.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or a launch fails.
    """
    var multiprocessors = Device(ctx).multiprocessors

    def cost(config: Config) {imm} -> Float64:
        var parts = parts_of(g, config, most, multiprocessors)
        return GradProblem(g, config, parts).cost(config, g, multiprocessors)

    var best = cheapest[CONFIGS](cost)
    comptime for i in range(len(CONFIGS)):
        comptime config = CONFIGS[i]
        if i == best:
            var parts = parts_of(g, config, most, multiprocessors)
            weight_grad_tile[config](g, o, parts, ctx)
            if parts > 1:
                add_parts(o, g.f * g.depth(), parts, ctx)


def parts_of(g: Geometry, config: Config, most: Int, multiprocessors: Int) -> Int:
    """Divides the pixels into as many parts as all multiprocessors take at a time.

    Args:
        g: Sizes of the convolution.
        config: The tile.
        most: Parts for which there is room.
        multiprocessors: Of the GPU; each holds a block.

    Returns:
        Parts, at least one.
    """
    var stages = ceildiv(g.pixels(), WIDTH * LEAST)
    var parts = multiprocessors // Int(GradProblem(g, config, 1).schedule.tiles)
    return max(1, min(min(parts, stages), most))
