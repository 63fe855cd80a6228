"""Implicit GEMM on Hopper whose filters stay, and whose consumers have tiles of their own.

    y[m, f] = act(alpha * sum_k x[m, k] w[f, k] + bias),  without a residual

The product is that of hopper.mojo, for short K and many pixels, where the epilogue and the stores take
about as long as the products: x and w are the same tensors, and the parts are the same.

A block keeps to one tile of filters: all of their K lies in shared memory for the whole launch, and
the ring holds pixels alone, 64 x 128 bytes a stage. Its consumers, of a warpgroup each, take tiles of
64 pixels in turns (CUTLASS calls this a ping-pong kernel): `OrderedSequence` passes the tensor cores
on as soon as a tile's products are issued, and its epilogue runs under those of the next tiles. The
result overwrites the tile's last stages, which only its consumer reads, and leaves through the copy
engine box by box.

Stages come from the ring in the order of tiles. A consumer that waits for a stage knows that the
stage's last contents had come: its predecessor has waited for them before it passed the turn. A
residual would break this, as nobody waits for another consumer's.

Takes as many steps of K as leave room for `FEWEST` stages: 6 of 192 filters, 10 of 128. Bound by
device memory where K is short. With 384 channels a tile's products take 2,750 cycles beside other
tiles' ReLU, 3,800 beside their GELU (H100; at best 2,304): why is not known. H200, 2026-11-25: 192 ->
192 of 50,176 pixels 9.94 us (11.91 by hopper.mojo), 192 -> 768 with GELU 43.5 us (46.6).
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, grid_dim, thread_idx
from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.accumulator import Fragment, Sums
from ..hopper.conv import Problem, Step, load_pixels, pixels_map
from ..hopper.epilogue import EpilogueTensors, finish_rows
from ..hopper.mma import ROWS, Matrix, mma
from ..hopper.pipeline import OrderedSequence, Pipeline, StoringStage
from ..hopper.ptx import (
    fence_async,
    fence_barrier_init,
    registers_give,
    registers_take,
    stores_commit,
    sync_threads,
)
from ..hopper.shared import ROW, SWIZZLED, WARPGROUP, shared_memory
from ..hopper.tma import TensorMaps, TileLoader, TileStore, matrix_map
from ..launch import launch
from ..operands import Operands
from .hopper import filter_map

comptime SHARED = 227 * 1024
"""Bytes of shared memory of a block, its alignment among them."""
comptime BARRIERS = 1024
"""Bytes of all barriers."""
comptime ROOM = SHARED - SWIZZLED - BARRIERS
"""Bytes for the filters and the ring."""
comptime BOX = ROWS * ROW
"""Bytes of a stage: of 64 pixels, or of 64 rows of 128 bytes of the result."""
comptime FEWEST = 8
"""Stages of the ring at least."""
comptime MOST = 24
"""Stages of the ring at most."""
comptime PRODUCER_REGISTERS = 24
"""Registers of a thread of the producer's warpgroup."""


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
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, and the producer's.
        """
        return WARPGROUP * (self.groups + 1)

    @always_inline
    def registers(self) -> Int:
        """Counts the registers of a consumer's thread.

        Returns:
            What the producer's threads leave of those that a launch is given.
        """
        var each = 65536 // self.threads() // 8 * 8
        return min((each * (self.groups + 1) - PRODUCER_REGISTERS) // self.groups // 8 * 8, 240)

    @always_inline
    def results[dtype: DType](self) -> Int:
        """Counts the stages that a tile's result takes.

        Parameters:
            dtype: Of the result.

        Returns:
            One for each 128 bytes of a row.
        """
        return self.columns * size_of[dtype]() // ROW

    def stages(self, steps: Int) -> Int:
        """Counts the stages of the ring.

        Args:
            steps: Of K.

        Returns:
            As many as the filters leave room for.
        """
        return min(MOST, (ROOM - steps * self.columns * ROW) // BOX)

    def takes(self, steps: Int, epilogue: Epilogue) -> Bool:
        """Tells whether the kernel takes a product.

        Args:
            steps: Of K.
            epilogue: What the accumulator goes through.

        Returns:
            True if there is no residual, and room for the filters and `FEWEST` stages.
        """
        return not epilogue.joins and self.stages(steps) >= FEWEST


@__name(t"gemm_pingpong_{config.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(1),
)
def pingpong_kernel[
    dtype: DType, epilogue: Epilogue, config: PingPong
](maps: TensorMaps[3], tensors: EpilogueTensors[dtype], problem: Problem[1], stages: Int32):
    """Computes tiles of the same filters.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through; it does not add.
        config: Consumers and filters.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), w[F, R * S, C] and y[M, F].
        tensors: Bias and y.
        problem: Sizes.
        stages: Of the ring.
    """
    comptime assert not epilogue.joins, "pingpong_gemm: a residual has no stage"
    comptime W_BYTES = config.columns * ROW
    var data = shared_memory["gemm_pingpong"]()
    var steps = problem.steps()
    var ring = data + UInt32(steps * Int32(W_BYTES))
    var barriers = ring + UInt32(stages * Int32(BOX))
    var filters = Pipeline(data, barriers, stages=steps, bytes=UInt32(W_BYTES))
    barriers += UInt32(steps * Int32(Pipeline.BARRIERS))
    var pipeline = Pipeline(ring, barriers, stages=stages, bytes=UInt32(BOX))
    var t = Int32(thread_idx.x)
    if t == 0:
        filters.init(consumers=1)
        pipeline.init(consumers=1)
        fence_barrier_init()
    sync_threads(0, UInt32(config.threads()))
    launch_dependent_grids()
    if t // Int32(WARPGROUP) == Int32(config.groups):
        registers_give[PRODUCER_REGISTERS]()
        # One thread drives the copy engine.
        if t % Int32(WARPGROUP) == 0:
            _produce[dtype, config](maps.address(), problem, filters, pipeline)
    else:
        registers_take[config.registers()]()
        _consume[dtype, epilogue, config](
            maps.address(), tensors, problem, filters, pipeline, Fragment(t)
        )


@always_inline
def _stages[dtype: DType, config: PingPong](steps: Int32) -> Int32:
    """Counts the stages of a tile: those of K, and more if its result takes more."""
    return max(steps, Int32(config.results[dtype]()))


@always_inline
def _produce[
    dtype: DType, config: PingPong
](maps: UInt64, problem: Problem[1], filters: Pipeline, at_start: Pipeline):
    """Loads the filters, then fills the ring, tile after tile, as stages become free."""
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    var conv = problem.conv
    var schedule = problem.schedule
    var steps = problem.steps()
    var x = TileLoader(maps)
    var w = TileLoader(maps, 1)
    x.prefetch_descriptor()
    w.prefetch_descriptor()
    if problem.constant == 0:
        wait_on_dependent_grids()
    var f0 = schedule.tile(schedule.start().tile).column * Int32(config.columns)
    var k = Step()
    for i in range(steps):
        filters.expect(i, filters.bytes)
        w.load(filters.stage(i), filters.barrier(i), k.c * WIDTH, k.tap, f0)
        k.advance[1](conv)
    if problem.constant != 0:
        wait_on_dependent_grids()

    var pipeline = at_start
    for number in schedule.turns():
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
        for _ in range(_stages[dtype, config](steps) - steps):
            pipeline.acquire()
            pipeline.commit()
            pipeline.advance()


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, config: PingPong
](
    maps: UInt64,
    tensors: EpilogueTensors[dtype],
    problem: Problem[1],
    filters: Pipeline,
    at_start: Pipeline,
    at: Fragment,
):
    """Multiplies and finishes the consumer's tiles."""
    comptime WIDTH = ROW // size_of[dtype]()
    comptime COLUMNS = config.columns
    comptime GROUPS = Int32(config.groups)
    comptime RESULTS = config.results[dtype]()
    var schedule = problem.schedule
    var steps = problem.steps()
    var stages = _stages[dtype, config](steps)
    var free = stages - Int32(RESULTS)  # the stages before the result's
    var leads = at.leads()
    var own = UInt32(at.group() + GROUPS) + 1  # after the barriers of `order`
    var y = TileStore(maps, 2)

    var order = OrderedSequence(at.group(), GROUPS)
    var pipeline = at_start
    pipeline.advance(UInt32(at.group() * stages))
    var blocks = Int32(grid_dim.x)
    var first = schedule.start().tile + at.group() * blocks
    var sums = Sums[COLUMNS](fill=0)
    for number in range(first, schedule.tiles, GROUPS * blocks):
        var tile = schedule.tile(number)
        var m0 = tile.row * Int32(ROWS)
        var f0 = tile.column * Int32(COLUMNS)
        var results = pipeline
        results.advance(UInt32(free))
        # What this waits for is at most one round of the ring ahead of what is known to have come.
        order.wait()
        pipeline.wait()
        filters.wait(0)
        wgmma_fence_aligned()
        sums = mma[dtype, COLUMNS, clear=True](
            Matrix(pipeline.stage()), Matrix(filters.stage(0)), sums
        )
        wgmma_commit_group_sync()
        pipeline.advance()
        for k in range(Int32(1), steps):
            pipeline.wait()
            filters.wait(k)
            wgmma_fence_aligned()
            sums = mma[dtype, COLUMNS](Matrix(pipeline.stage()), Matrix(filters.stage(k)), sums)
            wgmma_commit_group_sync()
            wgmma_wait_group_sync[1]()
            if leads and k <= free:
                pipeline.release(pipeline.previous())
            pipeline.advance()
        order.arrive()
        wgmma_wait_group_sync[0]()
        if leads and steps <= free:
            pipeline.release(pipeline.previous())

        # All warps have read what the result overwrites.
        sync_threads(own, UInt32(WARPGROUP))
        var storing = StoringStage()
        comptime for part in range(RESULTS):
            comptime column = part * WIDTH
            results.wait()
            finish_rows[dtype, epilogue, WIDTH, first=column, pitch=BOX](
                results.stage(),
                at,
                sums,
                problem.alpha,
                tensors,
                f0 + Int32(column),
                problem.filters,
            )
            fence_async()
            sync_threads(own, UInt32(WARPGROUP))
            if leads:
                storing.release()
                y.store(results.stage(), f0 + Int32(column), m0)
                stores_commit()
                storing.begin(results)
            results.advance()
        if leads:
            storing.release()
        pipeline = results
        pipeline.advance(UInt32((GROUPS - 1) * stages))


# The host's side


def pingpong_gemm[
    dtype: DType, epilogue: Epilogue, config: PingPong
](g: Geometry, o: Operands[dtype], ctx: DeviceContext, *, constant: Bool = True) raises:
    """Enqueues a convolution, or a matrix product.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through; it does not add.
        config: Consumers and filters, which take the product.

    Args:
        g: Sizes; one group.
        o: The tensors.
        ctx: The GPU.
        constant: Whether w is a weight, which no kernel writes.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var maps = TensorMaps[3]()
    maps.maps[0] = pixels_map[dtype](ctx, o.x, g, ROWS)
    maps.maps[1] = filter_map[dtype](ctx, o.w, g, config.columns)
    maps.maps[2] = matrix_map[dtype](ctx, o.y, rows=g.pixels(), columns=g.f, box=ROWS)
    var problem = Problem[1](
        [g],
        rows=ROWS,
        columns=config.columns,
        width=ROW // size_of[dtype](),
        splits=1,
        alpha=o.alpha,
        constant=constant,
    )
    # A multiple of the tiles of filters, so that a block keeps to one.
    var columns = Int(problem.schedule.columns)
    var blocks = max(1, Device(ctx).multiprocessors // columns) * columns
    launch[pingpong_kernel[dtype, epilogue, config]](
        ctx,
        maps,
        EpilogueTensors[dtype]([o]),
        problem,
        Int32(config.stages(Int(problem.steps()))),
        grid_dim=problem.schedule.blocks(blocks),
        block_dim=config.threads(),
        shared=SHARED,
    )
