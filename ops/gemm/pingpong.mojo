"""Implicit GEMM on Hopper whose filters stay, and whose consumers have tiles of their own.

    y[m, f] = act(alpha * sum_k x[m, k] w[f, k] + bias),  without a residual

The product is that of hopper.mojo, for short K and many pixels, where the epilogue and the stores take
about as long as the products: x and w are the same tensors, and the parts are the same.

A block keeps to one tile of filters, of one product if there are several: all of their K lies in
shared memory for the whole launch, and the ring holds pixels alone, 64 x 128 bytes a stage. Its
consumers, of a warpgroup each, take tiles of 64 pixels in turns (CUTLASS calls this a ping-pong
kernel): `OrderedSequence` passes the tensor cores on as soon as a tile's products are issued, and
its epilogue runs under those of the next tiles. The result leaves through the copy engine box by
box, from boxes of each consumer's own: stages of the ring that wait for an epilogue would be missing
for the pixels of the next tiles.

Stages come from the ring in the order of tiles. A wait for a stage tells phases apart by parity, so
a consumer may be one phase behind at most. It is: the consumer before it has waited for what the stage
held last, before it passed the turn.

Takes as many steps of K as leave room for `FEWEST` stages: 6 of 192 filters, 10 of 128. Bound by
device memory where K is short. With 384 channels the products of 128 filters take 1,900 cycles, as
shared memory is busy, and 2,450 beside other tiles' GELU (H100, clocks read in the kernel; at best
1,536). Each instruction of GELU costs the products beside it about a cycle (docs/kernels.md).
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.accumulator import Fragment, Sums
from ..hopper.conv import Problem, Step, load_pixels, pixels_map
from ..hopper.epilogue import EpilogueTensors, finish_rows
from ..hopper.mma import BOX, ROWS, SUM, Matrix, mma
from ..hopper.moments import Norm, RowMoments, RowNorm
from ..hopper.pipeline import OrderedSequence, Pipeline
from ..hopper.ptx import (
    fence_barrier_init,
    stores_read,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.shared import ROW, SWIZZLED, SharedAllocator, block_memory, shared_memory
from ..hopper.store import BoxRing, store_boxes
from ..hopper.tma import Maps, TensorMaps, TileLoader, TileStore, matrix_map
from ..launch import launch
from ..operands import Operands, Scales, dtypes
from .hopper import filter_map, several

comptime SHARED = block_memory()
"""Bytes of shared memory of a block, its alignment among them."""
comptime BARRIERS = 1024
"""Bytes of all barriers."""
comptime ROOM = SHARED - SWIZZLED - BARRIERS
"""Bytes for the filters and the ring."""
comptime MAPS = 3
"""Tensor maps of a product: it has no residual."""
comptime FEWEST = 5
"""Stages of the ring at least."""
comptime MOST = 24
"""Stages of the ring at most."""


struct PingPong(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers."""
    var columns: Int
    """Filters of a tile, a multiple of 64."""

    def __init__(out self, *, groups: Int, columns: Int):
        """Names the parts.

        Args:
            groups: Consumers.
            columns: Filters of a tile.
        """
        self.groups, self.columns = groups, columns

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Consumers, and pixels and filters of each one's tile.
        """
        return String(t"{self.groups}x{ROWS}x{self.columns}")

    @always_inline
    def row[dtype: DType](self) -> Int:
        """Counts the bytes of a row of the boxes in which results leave.

        Parameters:
            dtype: Of the results.

        Returns:
            128, or 64 where the filters are no multiple of it.
        """
        return ROW if self.columns * size_of[dtype]() % ROW == 0 else ROW // 2

    @always_inline
    def results[dtype: DType](self) -> Int:
        """Counts the boxes that a tile's result takes.

        Parameters:
            dtype: Of the result.

        Returns:
            One for each `row` bytes of a row.
        """
        return self.columns * size_of[dtype]() // self.row[dtype]()

    def room(self, steps: Int) -> Int:
        """Counts the boxes that the filters leave room for.

        Args:
            steps: Of K.

        Returns:
            Stages of the ring, and boxes of results.
        """
        return (ROOM - steps * self.columns * ROW) // BOX

    def boxes[dtype: DType](self, steps: Int) -> Int:
        """Counts the boxes that a consumer has for its results.

        Parameters:
            dtype: Of the result.

        Args:
            steps: Of K.

        Returns:
            `results` if the ring keeps `FEWEST` stages, else fewer.
        """
        var most = (self.room(steps) - FEWEST) // self.groups
        return min(self.results[dtype](), max(1, most))

    def stages[dtype: DType](self, steps: Int) -> Int:
        """Counts the stages of the ring.

        Parameters:
            dtype: Of the result.

        Args:
            steps: Of K.

        Returns:
            As many as filters and results leave room for.
        """
        return min(MOST, self.room(steps) - self.groups * self.boxes[dtype](steps))

    def takes(self, steps: Int, epilogue: Epilogue) -> Bool:
        """Tells whether the kernel takes a product.

        Args:
            steps: Of K.
            epilogue: What the accumulator goes through.

        Returns:
            True if there is no residual, and room for the filters and `FEWEST` stages.
        """
        return not epilogue.joins and self.room(steps) >= FEWEST + self.groups


comptime Warps[config: PingPong] = Roles[config.groups, moves_registers=True]
"""Which warps of a block do what.

Parameters:
    config: Of the kernel.
"""


@__name(
    t"gemm_pingpong_{config.label()}_{epilogue.label()}{several(products)}_{dtypes[dtype, out, right]()}"
)
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def pingpong_kernel[
    dtype: DType,
    epilogue: Epilogue,
    config: PingPong,
    products: Int = 1,
    out: DType = dtype,
    right: DType = dtype,
](
    maps: TensorMaps[MAPS * products],
    tensors: EpilogueTensors[out, epilogue, products],
    problem: Problem[products],
    stages: Int32,
    boxes: Int32,
):
    """Computes tiles of the same filters.

    Parameters:
        dtype: Of x, and of w and y unless they are named.
        epilogue: What the accumulator goes through; it does not add.
        config: Consumers and filters.
        products: Products of the launch.
        out: Of y.
        right: Of w.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), w[F, R * S, C] and y[M, F] of each product.
        tensors: Bias and y, and the scales.
        problem: Sizes.
        stages: Of the ring.
        boxes: Of results of each consumer.
    """
    comptime assert not epilogue.joins, "pingpong_gemm: a residual has no box"
    comptime W_BYTES = config.columns * ROW
    var memory = SharedAllocator(shared_memory["gemm_pingpong"]())
    var steps = problem.steps()
    var of_filters = memory.take(UInt32(steps * Int32(W_BYTES)))
    var ring = memory.take(UInt32(stages * Int32(BOX)))
    var results = memory.take(UInt32(boxes * Int32(config.groups * BOX)))
    var filters = Pipeline(of_filters, memory, stages=steps, bytes=UInt32(W_BYTES))
    var pipeline = Pipeline(ring, memory, stages=stages, bytes=UInt32(BOX))
    var t = Int32(thread_idx.x)
    if t == 0:
        filters.init(consumers=1)
        pipeline.init(consumers=1)
        fence_barrier_init()
    sync_threads(0, UInt32(Warps[config].THREADS))
    launch_dependent_grids()
    if Warps[config].produces(t):
        Warps[config].give_registers()
        if Warps[config].drives(t):
            _produce[dtype, config](maps.address(), problem, filters, pipeline)
    else:
        Warps[config].take_registers()
        _consume[dtype, out, right, epilogue, config](
            maps.address(), tensors, problem, filters, pipeline, results, boxes, Fragment(t)
        )


@always_inline
def _produce[
    dtype: DType, config: PingPong
](maps: UInt64, problem: Problem[_], filters: Pipeline, at_start: Pipeline):
    """Loads the filters, then fills the ring, tile after tile, as stages become free."""
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    var conv = problem.conv
    var schedule = problem.schedule
    var steps = problem.steps()
    var tiles = schedule.stationary()
    var tile = schedule.tile(tiles.first)
    var x = TileLoader(maps, MAPS * tile.product + Maps.X)
    var w = TileLoader(maps, MAPS * tile.product + Maps.W)
    x.prefetch_descriptor()
    w.prefetch_descriptor()
    if problem.constant == 0:
        wait_on_dependent_grids()
    var f0 = tile.column * Int32(config.columns)
    var k = Step()
    for i in range(steps):
        filters.expect(i, filters.bytes)
        w.load(filters.stage(i), filters.barrier(i), k.c * WIDTH, k.tap, f0)
        k.advance[1](conv)
    if problem.constant != 0:
        wait_on_dependent_grids()

    var pipeline = at_start
    for number in tiles.turns():
        var pixel = conv.pixel(schedule.tile(number).row * Int32(ROWS))
        var corner = conv.corner(pixel)
        k = Step()
        for _ in range(steps):
            pipeline.acquire()
            pipeline.expect(UInt32(BOX))
            load_pixels(
                x,
                pipeline.stage(),
                pipeline.barrier(),
                conv,
                pixel,
                corner,
                channel=k.c * WIDTH,
                r=k.r,
                s=k.s,
            )
            pipeline.advance()
            k.advance[1](conv)


@always_inline
def _consume[
    dtype: DType, out: DType, right: DType, epilogue: Epilogue, config: PingPong
](
    maps: UInt64,
    tensors: EpilogueTensors[out, epilogue, _],
    problem: Problem[_],
    filters: Pipeline,
    at_start: Pipeline,
    results: UInt32,
    boxes: Int32,
    at: Fragment,
):
    """Multiplies and finishes the consumer's tiles."""
    comptime WIDTH = config.row[out]() // size_of[out]()
    comptime COLUMNS = config.columns
    comptime GROUPS = Int32(config.groups)
    comptime RESULTS = config.results[out]()
    comptime multiply = mma[dtype, COLUMNS, right=right]
    var schedule = problem.schedule
    var steps = problem.steps()
    var leads = at.leads()
    var own = OrderedSequence.own_barrier(at.group(), GROUPS)
    var tiles = schedule.stationary()
    var product = schedule.tile(tiles.first).product
    var end = tensors.of(product)
    var y = TileStore(maps, MAPS * product + Maps.Y)

    comptime if epilogue.normalizes:
        wait_on_dependent_grids()  # for the moments, which no copy brings
    var order = OrderedSequence(at.group(), GROUPS)
    var pipeline = at_start
    pipeline.advance(UInt32(at.group() * steps))
    var own_boxes = BoxRing[RESULTS](
        results + UInt32(at.group() * boxes * Int32(BOX)), boxes=boxes, bytes=UInt32(BOX)
    )
    var sums = Sums[COLUMNS, SUM[dtype]](fill=0)
    for number in tiles.turns(at.group(), GROUPS):
        var tile = schedule.tile(number)
        var m0 = tile.row * Int32(ROWS)
        var f0 = tile.column * Int32(COLUMNS)
        var moments = RowMoments()
        comptime if epilogue.normalizes:
            moments = RowMoments(
                tensors.norm[0], at, row=m0 + at.row(), rows=problem.rows_of(product)
            )
        # What this waits for is at most one round of the ring ahead of what is known to have come.
        order.wait()
        pipeline.wait()
        filters.wait(0)
        wgmma_fence_aligned()
        sums = mma[dtype, COLUMNS, clear=True, right=right](
            Matrix(pipeline.stage()), Matrix(filters.stage(0)), sums
        )
        wgmma_commit_group_sync()
        pipeline.advance()
        for k in range(Int32(1), steps):
            pipeline.wait()
            filters.wait(k)
            wgmma_fence_aligned()
            sums = multiply(Matrix(pipeline.stage()), Matrix(filters.stage(k)), sums)
            wgmma_commit_group_sync()
            wgmma_wait_group_sync[1]()
            if leads:
                pipeline.release(pipeline.previous())
            pipeline.advance()
        order.arrive()
        var norm = RowNorm(0, 0)
        comptime if epilogue.normalizes:
            norm = moments.norm(tensors.norm[0], at)
        wgmma_wait_group_sync[0]()
        if leads:
            pipeline.release(pipeline.previous())

        comptime for part in range(RESULTS):
            comptime column = part * WIDTH
            var to = own_boxes.acquire(own, leads)
            finish_rows[WIDTH, first=column, pitch=BOX, bytes=config.row[out]()](
                to,
                at,
                sums,
                problem.alpha,
                end,
                f0 + Int32(column),
                problem.filters,
                norm=norm,
            )
            store_boxes[out, WIDTH, bytes=config.row[out]()](
                y, to, f0 + Int32(column), m0, barrier=own, leads=leads
            )
        pipeline.advance(UInt32((GROUPS - 1) * steps))
    stores_read()


# The host's side


def pingpong_gemm[
    dtype: DType, out: DType, right: DType, products: Int, //, epilogue: Epilogue, config: PingPong
](
    sizes: Array[Geometry, products],
    operands: Array[Operands[dtype, out, right], products],
    ctx: DeviceContext,
    *,
    constant: Bool = True,
    scales: Optional[Array[Scales, products]] = None,
    norm: Optional[Norm] = None,
) raises:
    """Enqueues a convolution, or matrix products of the same K and F, in one launch.

    Parameters:
        dtype: Of x.
        out: Of y.
        right: Of w.
        products: How many there are.
        epilogue: What the accumulator goes through; it does not add.
        config: Consumers and filters, which take the products.

    Args:
        sizes: Of each product; one group.
        operands: The tensors of each; all have the alpha of the first.
        ctx: The GPU.
        constant: Whether w of each is a weight, which no kernel writes.
        scales: Of the sums of each, if the epilogue scales.
        norm: Moments of the rows of x, if the epilogue normalises; of one product.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var maps = TensorMaps[MAPS * products]()
    comptime for i in range(products):
        var g, o = sizes[i], operands[i]
        maps.maps[MAPS * i + Maps.X] = pixels_map[dtype](ctx, o.x, g, ROWS)
        maps.maps[MAPS * i + Maps.W] = filter_map[right](ctx, o.w, g, config.columns)
        maps.maps[MAPS * i + Maps.Y] = matrix_map[out](
            ctx, o.y, rows=g.pixels(), columns=g.f, box=ROWS, bytes=config.row[out]()
        )
    var problem = Problem[products](
        sizes,
        rows=ROWS,
        columns=config.columns,
        width=ROW // size_of[dtype](),
        alpha=operands[0].alpha,
        constant=constant,
    )
    # A multiple of the tiles of filters, so that a block keeps to one; no more than there are tiles.
    var columns = Int(problem.schedule.columns)
    var blocks = max(products, Device(ctx).multiprocessors // columns) * columns
    var steps = Int(problem.steps())
    launch[pingpong_kernel[dtype, epilogue, config, products, out, right]](
        ctx,
        maps,
        EpilogueTensors[out, epilogue, products](operands, scales=scales, norm=norm),
        problem,
        Int32(config.stages[out](steps)),
        Int32(config.boxes[out](steps)),
        grid_dim=problem.schedule.blocks(blocks),
        block_dim=Warps[config].THREADS,
        shared=SHARED,
    )
