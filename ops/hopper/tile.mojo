"""A block that computes one tile, or a cluster's share of one, from the filters to the result.

Persistent blocks overlap the beginning and the end of a tile with other tiles. With one tile a block,
beginning and end are most of the time. So what does not depend on the kernel ahead is done
before it ends (programmatic dependent launch), and nothing waits for shared memory or a cluster on
the way out:

    TileConfig     the tile, a compile-time value
    TilePlan       how shared memory is divided: rings of x and of the filters (window.mojo)
    TileBlock      the block's tile, and the parts: rings, bias, what a cluster's blocks send (cluster.mojo)
    consume_tile   what the consumers do; the results leave the registers (direct_store.mojo)
"""

from max.gpu.compute.mma import wgmma_wait_group_sync
from max.gpu.primitives.grid_controls import wait_on_dependent_grids
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..kernel_argument import KernelArgument
from .accumulator import Fragment
from .barrier import Barrier
from .cluster import Inbox
from .conv import Problem
from .direct_store import Outputs, finish_pairs, pool_pairs
from .epilogue import EpilogueTensors
from .mainloop import multiply_steps
from .mma import ROWS
from .moments import RowMoments, RowNorm
from .pipeline import Pipeline
from .pixel_box import PixelBox
from .ptx import cluster_wait, fence_barrier_init, shared_store_float
from .scheduler import Share, Tile
from .shared import ROW, WARP, SharedAllocator
from .window import Steps, ring_stages


struct TileConfig(TrivialRegisterPassable):
    """A block's tile: a compile-time value."""

    var groups: Int
    """Consumers, of 64 pixels each: 1 or 2."""
    var columns: Int
    """Filters: 32 or 64."""
    var split: Bool
    """Whether a cluster shares a tile."""

    def __init__(out self, groups: Int, columns: Int, *, split: Bool = False):
        """Names the parts.

        Args:
            groups: Consumers.
            columns: Filters.
            split: Whether a cluster shares a tile.
        """
        self.groups, self.columns, self.split = groups, columns, split

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Pixels and filters, and whether it is shared.
        """
        return String(t"{self.rows()}x{self.columns}") + ("split" if self.split else "")

    @always_inline
    def rows(self) -> Int:
        """Counts the pixels: rows of the product.

        Returns:
            64 for each consumer.
        """
        return ROWS * self.groups


struct TilePlan[config: TileConfig](KernelArgument, TrivialRegisterPassable):
    """How a block's shared memory is divided.

    Parameters:
        config: The tile.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    comptime W_BYTES = Self.config.columns * ROW
    """Of a stage of filters."""
    comptime INBOX = Inbox[
        Self.config.columns, Self.config.groups
    ].BYTES if Self.config.split else 0
    """Bytes that a cluster's blocks send to one of them."""

    var box: PixelBox[Self.config.rows()]
    """What a stage of activations holds."""
    var w_stages: Int32
    """Stages of filters."""
    var x_stages: Int32
    """Stages of activations."""

    def __init__(out self, g: Geometry, *, chunks: Int, splits: Int, least: Int, room: Int):
        """Plans a convolution.

        Args:
            g: Sizes.
            chunks: Steps of 128 bytes over the channels.
            splits: Blocks that share a tile.
            least: Stages of filters before there is room for a second box.
            room: Bytes to be divided.
        """
        self.box = PixelBox[Self.config.rows()](g)
        self.x_stages = self.w_stages = 0
        var stages = ring_stages(
            self.box,
            taps=g.r * g.s,
            chunks=chunks,
            splits=splits,
            filters=Self.W_BYTES,
            least=least,
            room=room - self.bytes(),
        )
        self.x_stages, self.w_stages = Int32(stages[0]), Int32(stages[1])

    def bytes(self) -> Int:
        """Counts the bytes of shared memory.

        Returns:
            Those of `TileBlock`, without what aligning it takes.
        """
        return Int(TileBlock(0, self).end)


struct TileBlock[config: TileConfig](TrivialRegisterPassable):
    """What a block computes, and what it has in its shared memory.

    Parameters:
        config: The tile.
    """

    var tile: Tile
    """Which one."""
    var share: Share
    """The block's steps of K."""
    var w: Pipeline
    """Filters, a stage a step."""
    var x: Pipeline
    """Activations."""
    var inbox: Inbox[Self.config.columns, Self.config.groups]
    """What the cluster's blocks send."""
    var bias: UInt32
    """Address of the bias of the tile's filters."""
    var end: UInt32
    """First address behind all of these."""

    @always_inline
    def __init__(out self, data: UInt32, plan: TilePlan[Self.config]):
        """Divides shared memory.

        Args:
            data: Its address.
            plan: How many stages there are.
        """
        comptime Received = Inbox[Self.config.columns, Self.config.groups]
        comptime Planned = TilePlan[Self.config]
        comptime W_BYTES = UInt32(Planned.W_BYTES)
        var x_bytes = UInt32(plan.box.bytes)
        var memory = SharedAllocator(data)
        var w = memory.take(UInt32(plan.w_stages) * W_BYTES)
        var x = memory.take(UInt32(plan.x_stages) * x_bytes)
        var inbox = memory.take(Planned.INBOX)
        self.w = Pipeline(w, memory, stages=plan.w_stages, bytes=W_BYTES)
        self.x = Pipeline(x, memory, stages=plan.x_stages, bytes=x_bytes)
        self.inbox = Received(inbox, Barrier(memory.take(Barrier.BYTES)), splits=1, rank=0)
        self.bias = memory.take(4 * Self.config.columns)
        self.end = memory.end
        self.tile, self.share = Tile(0, 0, 0), Share(0, 0)

    @always_inline
    def __init__(out self, data: UInt32, problem: Problem[_], plan: TilePlan[Self.config]):
        """Divides shared memory, and finds the block's tile.

        Args:
            data: Its address.
            problem: Sizes.
            plan: How many stages there are.
        """
        var schedule = problem.schedule
        var start = schedule.start[Self.config.split]()
        var tile = schedule.tile(start.tile)
        var share = schedule.share[Self.config.split](start, problem.steps())
        self = Self(data, plan)
        self.tile, self.share = tile, share
        self.inbox.splits, self.inbox.rank = schedule.splits, start.rank

    @always_inline
    def init(self, problem: Problem[_], box: PixelBox[Self.config.rows()], *, producers: Int = 1):
        """Prepares the barriers, by one thread.

        Args:
            problem: Sizes.
            box: Where the tile's pixels lie.
            producers: How many arrivals fill a stage of filters.
        """
        self.w.init(consumers=Self.config.groups, producers=producers)
        self.x.init(consumers=Self.config.groups)
        comptime if Self.config.split:
            self.inbox.barrier.init()
        fence_barrier_init()
        comptime if Self.config.split:
            self.inbox.expect(box.warps(problem.rows_of(self.tile.product), self.tile.row))

    @always_inline
    def load_bias(self, i: Int32, tensors: EpilogueTensors[...], filters: Int32):
        """Copies the bias of one of the tile's filters.

        Args:
            i: Which of them, one a thread.
            tensors: Have the bias, of the tile's product.
            filters: F.
        """
        var f = min(self.tile.column * Int32(Self.config.columns) + i, filters - 1)
        shared_store_float(self.bias + 4 * UInt32(i), tensors.bias_of[1](f))


@always_inline
def consume_tile[
    dtype: DType,
    config: TileConfig,
    epilogue: Epilogue,
    //,
    *,
    ahead: Bool = True,
](
    block: TileBlock[config],
    steps: Some[Steps],
    tensors: EpilogueTensors[dtype, epilogue, 1],
    problem: Problem[_],
    box: PixelBox[config.rows()],
    at: Fragment,
):
    """Multiplies the stages, and finishes the tile or what a cluster's block has of it.

    Parameters:
        dtype: Of x, w and y.
        config: The tile.
        epilogue: What the sums go through.
        ahead: Whether the residual is read before the products, if there are registers for it.

    Args:
        block: Its tile and its shared memory.
        steps: Of K.
        tensors: Bias, residual and y of the tile's product.
        problem: Sizes.
        box: Where the tile's pixels lie.
        at: The thread's place.
    """
    comptime COLUMNS = config.columns
    comptime assert COLUMNS == 32 or COLUMNS == 64, "TileConfig: 32 or 64 filters"
    comptime PAIRS = COLUMNS // 8 if config.split else COLUMNS // 4
    comptime assert not epilogue.pools or (
        config.groups == 1 and not config.split and not epilogue.normed()
    ), "consume_tile: one warpgroup has all rows whose mean is stored"
    var tile = block.tile
    var m = problem.rows_of(tile.product)
    var row = at.group() * Int32(ROWS) + at.row()
    var pairs = Share(0, Int32(PAIRS))
    comptime if config.split:
        pairs = block.inbox.pairs()
    var outputs = Outputs[PAIRS](
        at,
        low=box.pixel(problem.conv, m, tile.row, row),
        high=box.pixel(problem.conv, m, tile.row, row + 8),
        f0=tile.column * Int32(COLUMNS),
        filters=problem.filters,
        pairs=pairs,
    )
    comptime if config.split:
        cluster_wait()
    # No stage is filled twice, and all filters have come before x does.
    var count = steps.count()
    var resident = count <= Int32(block.w.stages)
    if resident:
        block.w.wait_first(count)
    wait_on_dependent_grids()

    var residual = StaticTuple[SIMD[dtype, 2], PAIRS](fill=SIMD[dtype, 2](0))
    comptime if ahead:
        residual = outputs.load_residual(tensors)
    var moments = RowMoments()
    comptime if epilogue.normalizes:
        moments = RowMoments(tensors.norm[0], at, max(outputs.low, 0), max(outputs.high, 0))
    var sums = multiply_steps[dtype, COLUMNS](
        block.x, block.w, steps, count, box, at, resident=resident
    )
    comptime if not ahead and not config.split:
        residual = outputs.load_residual(tensors)
    var norm = RowNorm(0, 0)
    comptime if epilogue.normalizes:
        norm = moments.norm(tensors.norm[0], at)
    wgmma_wait_group_sync[0]()
    comptime if config.split:
        if at.t // Int32(WARP) < box.warps(m, tile.row):
            block.inbox.send(at, sums)
        comptime if not ahead:
            residual = outputs.load_residual(tensors)
        finish_pairs(
            outputs,
            at,
            tensors,
            block.inbox.receive(at),
            problem.alpha,
            block.bias,
            residual,
            norm,
        )
    elif epilogue.pools:
        pool_pairs(outputs, at, tensors, sums, problem.alpha, block.bias, residual, block.end, m)
    else:
        finish_pairs(outputs, at, tensors, sums, problem.alpha, block.bias, residual, norm)
