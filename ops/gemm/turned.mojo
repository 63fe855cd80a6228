"""Implicit GEMM on Hopper's tensor cores with filters as rows, and windows that come once.

    y[m, f] = act(alpha * sum_k w[f, k] x[m, k] + bias[f] + residual[m, f])

    x[N, H, W, C]   activations
    w[F, R, S, C]   filters
    y[N, P, Q, F]   result, and the residual

Rows of the product are F filters, columns N * P * Q output pixels, K = C * R * S: windows of several
taps, stride 1. wgmma has 64 rows and up to 256 columns, and reads a column of shared memory once for
all 64 rows; so the many pixels are its columns. A tile is a band of an image, as in
hopper/pixel_box.mojo: a box of whole rows of it, 128 bytes of channels, serves all taps of the window,
or those of a column of it. The sums leave turned over, by stmatrix, for the copy engine, which drops
the padding's pixels.

Blocks go from tile to tile. Three warps, the producers, have the copy engine bring boxes, filters and
residuals; two warpgroups, the consumers, have 64 filters each:

    of one tile, 128 filters, which stream through a ring of their own
    or (ping-pong) of two tiles in turns, 64 filters, which stay in shared memory for the whole
    launch: one consumer's products run while the other stores its results

Bound by the tensor cores, which take half a clock a column; shared memory is read and written in
four fifths of that, where tiles of pixels as rows need 1.2 to 1.7 times what the tensor cores do. On
an H100 at batch 256, 3 x 3, 64 -> 64 at 56 x 56 runs at 707 TFLOP/s, 128 -> 128 at 28 x 28 at 724 and
256 -> 256 at 14 x 14 at 778 (2026-11-25).

Numbers have 16 bits, or 8: then filters are in quads (`quad` of accumulator.mojo), sums have scales,
and up to 64 channels come in rows of 64 bytes. C has to be a multiple of 16 bytes, and F one of 8, of
16 in 8 bits.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
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
from ..epilogue import Channels, Epilogue
from ..geometry import Geometry
from ..hopper.accumulator import Fragment, Sums
from ..hopper.conv import Problem
from ..hopper.epilogue import EpilogueTensors, finish_byte_columns, finish_columns
from ..hopper.mma import ROWS, SUM, Matrix, mma
from ..hopper.pipeline import OrderedSequence, Pipeline
from ..hopper.pixel_box import PixelBox, Taps, box_map
from ..hopper.ptx import (
    fence_barrier_init,
    stores_commit,
    stores_read,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.shared import (
    ROW,
    WARPGROUP,
    SharedAllocator,
    block_memory,
    bytes_until,
    shared_memory,
)
from ..hopper.store import StoringStage, sync_writes
from ..hopper.tma import Maps, TensorMap, TensorMaps, TileLoader, TileStore, tensor_map
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import F32, Data, Operands, Scales, dtypes
from .hopper import filter_map

comptime CONSUMERS = 2
"""Warpgroups that multiply."""
comptime BOXES = 2
"""Boxes of pixels in shared memory."""
comptime MEMORY = block_memory()
"""Bytes of shared memory that a block may have."""


comptime Warps[epilogue: Epilogue] = Roles[CONSUMERS, 3 if epilogue.joins else 2]
"""Which warps of a block do what: the producers bring boxes, filters and residuals.

Parameters:
    epilogue: What the sums go through.
"""


struct TurnedConfig(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var filters: Int
    """Of a tile: 128; or 64, which stay while consumers compute tiles in turns."""
    var pixels: Int
    """Columns of the product, a multiple of 8: pixels of a tile, and the padding between rows."""
    var row: Int
    """Bytes of channels of a stage: 128, or 64 where there are no more."""
    var pitch: Int
    """Bytes of 64 filters of a pixel's result: 128, or 64 in 8 bits."""

    def __init__(out self, filters: Int, pixels: Int, *, row: Int = ROW, pitch: Int = ROW):
        """Names the parts.

        Args:
            filters: Of a tile.
            pixels: Columns of the product.
            row: Bytes of channels of a stage.
            pitch: Bytes of 64 filters of a pixel's result.
        """
        self.filters, self.pixels, self.row, self.pitch = filters, pixels, row, pitch

    def of_bytes(self, *, narrow: Bool) -> Self:
        """Gives the same tile for numbers of 8 bits.

        Args:
            narrow: Whether there are at most 64 channels.

        Returns:
            It has results, and perhaps stages, of half as many bytes; of columns a multiple of 16,
            as wgmma wants them of integers.
        """
        var pixels = ceildiv(self.pixels, 16) * 16
        return Self(self.filters, pixels, row=ROW // 2 if narrow else ROW, pitch=ROW // 2)

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Filters and pixels.
        """
        var row = String("row", self.row) if self.row != ROW else String()
        return String(t"{self.filters}x{self.pixels}{row}")

    @always_inline
    def ping_pong(self) -> Bool:
        """Tells whether the consumers compute tiles in turns.

        Returns:
            False if they share each tile.
        """
        return self.filters == ROWS

    @always_inline
    def sharing(self) -> Int:
        """Counts the consumers that share a tile.

        Returns:
            One for each 64 filters.
        """
        return self.filters // ROWS

    @always_inline
    def stored(self) -> Int:
        """Counts the columns that leave the registers.

        Returns:
            A multiple of 16; of 32 in 8 bits.
        """
        var step = 16 if self.pitch == ROW else 32
        return ceildiv(self.pixels, step) * step

    @always_inline
    def stored_rows(self) -> Int:
        """Counts the rows of a consumer's result, which columns become: 64 filters of each.

        Returns:
            Those of all columns, and of padding that may end the last row of a tile.
        """
        return max(self.pixels + 8, self.stored())

    @always_inline
    def result(self) -> Int:
        """Counts the bytes of a consumer's result.

        Returns:
            128 of each row, or 64.
        """
        return self.stored_rows() * self.pitch


struct TurnedPlan[config: TurnedConfig](KernelArgument, TrivialRegisterPassable):
    """How K is walked through, and shared memory divided.

    Parameters:
        config: The tile.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var box: PixelBox[Self.config.pixels]
    """What a stage of pixels holds."""
    var stages: Int32
    """Stages of filters."""
    var parts: Int32
    """Boxes of the same channels: 1, or one for each column of the window."""
    var taps: Int32
    """Taps that read a box."""
    var columns: Int32
    """Of these, those of a row of the window."""

    def __init__(out self, g: Geometry, *, chunks: Int):
        """Plans a convolution.

        Args:
            g: Sizes.
            chunks: Steps of 128 bytes over the channels.
        """
        comptime Box = PixelBox[Self.config.pixels]
        self.box = Box(g, row=Self.config.row)
        self.columns = Int32(g.s)
        var narrow = Box(g, columns=1, row=Self.config.row)
        var fewer = not self.box.all_taps() or narrow.tiles(g) < self.box.tiles(g)
        if narrow.all_taps() and fewer:
            self.box, self.columns = narrow, 1
        self.parts = Int32(g.s) // self.columns
        self.taps = Int32(g.r) * self.columns
        self.stages = 0
        var room = MEMORY - self.bytes()
        var most = room // (Self.config.filters * Self.config.row + Pipeline.BARRIERS)
        self.stages = Int32(min(g.r * g.s * chunks, most))

    def bytes(self) -> Int:
        """Counts the bytes of shared memory that a launch asks for.

        Returns:
            Those of `TurnedStorage`, and what aligning it takes.
        """
        return bytes_until(TurnedStorage(0, self).end)


struct TurnedStorage[config: TurnedConfig](TrivialRegisterPassable):
    """What a block has in its shared memory.

    Parameters:
        config: The tile.
    """

    var w: Pipeline
    """Filters, a stage a step."""
    var x: Pipeline
    """Boxes of pixels."""
    var y: Pipeline
    """A stage for the residual and the result of each consumer."""
    var end: UInt32
    """First address behind all of these."""

    @always_inline
    def __init__(out self, data: UInt32, plan: TurnedPlan[Self.config]):
        """Divides shared memory.

        Args:
            data: Its address.
            plan: How.
        """
        comptime W = UInt32(Self.config.filters * Self.config.row)
        comptime Y = UInt32(Self.config.result())
        var memory = SharedAllocator(data)
        var w = memory.take(UInt32(plan.stages) * W)
        var x = memory.take(UInt32(BOXES) * UInt32(plan.box.bytes))
        var y = memory.take(CONSUMERS * Y)
        self.x = Pipeline(x, memory, stages=Int32(BOXES), bytes=UInt32(plan.box.bytes))
        self.y = Pipeline(y, memory, stages=CONSUMERS, bytes=Y)
        self.w = Pipeline(w, memory, stages=plan.stages, bytes=W)
        self.end = memory.end

    @always_inline
    def init(self):
        """Prepares the barriers, by one thread."""
        self.x.init[BOXES](consumers=Self.config.sharing())
        self.y.init[CONSUMERS](consumers=1)
        self.w.init(consumers=CONSUMERS)
        fence_barrier_init()


@__name(t"gemm_turned_{config.label()}_{epilogue.label()}_{dtypes[dtype, dtype, right]()}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[epilogue].THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def turned_kernel[
    dtype: DType, epilogue: Epilogue, config: TurnedConfig, right: DType = dtype
](
    maps: TensorMaps[Maps.COUNT],
    tensors: EpilogueTensors[dtype, epilogue],
    problem: Problem[1],
    plan: TurnedPlan[config],
):
    """Computes tiles.

    Parameters:
        dtype: Of x and y, and of w unless that is named.
        epilogue: What the accumulator goes through.
        config: The tile.
        right: Of w.

    Args:
        maps: Tensor maps of x (boxes of an image), w[F, R * S, C], y[N, P, Q, F] and the residual.
        tensors: Bias, residual and y, and the scales.
        problem: Sizes.
        plan: How K is walked through, and shared memory divided.
    """
    var storage = TurnedStorage(shared_memory["gemm_turned"](), plan)
    var t = Int32(thread_idx.x)
    if t == 0:
        storage.init()
    sync_threads(0, UInt32(Warps[epilogue].THREADS))
    launch_dependent_grids()

    var producer = Warps[epilogue].producer(t)
    if producer < 0:
        _consume[epilogue, right](maps.address(), tensors, problem, plan, storage, Fragment(t))
    elif Warps[epilogue].drives(t):
        if producer == 0:
            _produce_boxes[dtype](TileLoader(maps.address(), Maps.X), problem, plan, storage.x)
        elif producer == 1:
            if problem.constant == 0:
                wait_on_dependent_grids()
            _produce_filters[dtype](TileLoader(maps.address(), Maps.W), problem, plan, storage.w)
        else:
            _produce_residuals(TileLoader(maps.address(), Maps.RESIDUAL), problem, plan, storage.y)


@always_inline
def _produce_boxes[
    dtype: DType
](x: TileLoader, problem: Problem[1], plan: TurnedPlan[_], at_start: Pipeline):
    """Fills the ring of boxes, by one thread, once the kernel ahead is done."""
    comptime WIDTH = Int32(plan.config.row // size_of[dtype]())
    x.prefetch_descriptor()
    wait_on_dependent_grids()
    var pipeline = at_start
    for number in problem.schedule.turns():
        var first = plan.box.first(problem.conv, problem.schedule.tile(number).row)
        var corner = problem.conv.corner(first)
        for chunk in range(problem.conv.chunks):
            for part in range(plan.parts):
                pipeline.acquire()
                pipeline.expect(UInt32(plan.box.loads))
                x.load(
                    pipeline.stage(),
                    pipeline.barrier(),
                    chunk * WIDTH,
                    corner.w + part,
                    corner.h,
                    first.n,
                )
                pipeline.advance()


@always_inline
def _produce_filters[
    dtype: DType
](w: TileLoader, problem: Problem[1], plan: TurnedPlan[_], at_start: Pipeline):
    """Fills the ring of filters, by one thread; once, if they stay."""
    comptime config = plan.config
    comptime WIDTH = Int32(config.row // size_of[dtype]())
    w.prefetch_descriptor()
    var pipeline = at_start
    for number in problem.schedule.turns():
        var f0 = problem.schedule.tile(number).column * Int32(config.filters)
        for chunk in range(problem.conv.chunks):
            for part in range(plan.parts):
                for tap in range(plan.taps):
                    pipeline.acquire()
                    pipeline.expect(UInt32(config.filters * config.row))
                    w.load(
                        pipeline.stage(),
                        pipeline.barrier(),
                        chunk * WIDTH,
                        tap * plan.parts + part,
                        f0,
                    )
                    pipeline.advance()
        comptime if config.ping_pong():
            return


@always_inline
def _produce_residuals(
    residual: TileLoader, problem: Problem[1], plan: TurnedPlan[_], at_start: Pipeline
):
    """Brings the residual of each consumer's tiles, by one thread, once the kernel ahead is done."""
    comptime config = plan.config
    residual.prefetch_descriptor()
    wait_on_dependent_grids()
    var pipeline = at_start
    for number in problem.schedule.turns():
        var tile = problem.schedule.tile(number)
        var first = plan.box.first(problem.conv, tile.row)
        comptime for i in range(config.sharing()):
            pipeline.acquire()
            pipeline.expect(UInt32(plan.box.height * plan.box.width * Int32(config.pitch)))
            var f = tile.column * Int32(config.filters) + Int32(i * ROWS)
            residual.load(pipeline.stage(), pipeline.barrier(), f, 0, first.p, first.n)
            pipeline.advance()


@always_inline
def _consume[
    dtype: DType, config: TurnedConfig, //, epilogue: Epilogue, right: DType
](
    maps: UInt64,
    tensors: EpilogueTensors[dtype, epilogue],
    problem: Problem[1],
    plan: TurnedPlan[config],
    storage: TurnedStorage[config],
    at: Fragment,
):
    """Multiplies the boxes of the tiles, and stores the results."""
    comptime COLUMNS = config.pixels
    comptime WORKERS = Int32(CONSUMERS if config.ping_pong() else 1)
    var group = at.group()
    var leads = at.leads()
    var own = OrderedSequence.own_barrier(group, CONSUMERS)
    var y = TileStore(maps, Maps.Y)
    var schedule = problem.schedule
    var worker = group if config.ping_pong() else 0
    var boxes = problem.conv.chunks * plan.parts
    var w_first = UInt32(group) * UInt32(ROWS * config.row)
    var x = storage.x
    var w = storage.w
    var result = storage.y
    result.index = UInt32(group)
    var storing = StoringStage()
    comptime if config.ping_pong():
        w_first = 0
        x.advance(UInt32(group * boxes))
        w.wait_first(Int32(w.stages))
    var order = OrderedSequence(worker, CONSUMERS)

    for number in schedule.turns(worker, WORKERS):
        var tile = schedule.tile(number)
        var f0 = tile.column * Int32(config.filters)
        comptime if not config.ping_pong():
            f0 += group * Int32(ROWS)
        var bias = SIMD[F32, 2](0)
        var of = Channels[2](0, 0)
        comptime if epilogue.scales:
            of = tensors.row_channels(at, f0, problem.filters)
        else:
            bias = tensors.row_biases(at, f0, problem.filters)
        var sums = Sums[COLUMNS, SUM[dtype]](fill=0)
        comptime if config.ping_pong():
            order.wait()
        var taps = Taps(
            count=plan.taps,
            columns=plan.columns,
            tap_step=UInt32(config.row),
            row_step=UInt32((plan.box.width - plan.columns) * Int32(config.row)),
        )
        for k in range(problem.conv.steps()):
            if taps.begins():
                x.wait()
            comptime if not config.ping_pong():
                w.wait()
            wgmma_fence_aligned()
            sums = mma[right, COLUMNS, right=dtype](
                Matrix[config.row](w.stage() + w_first),
                Matrix[config.row](x.stage() + taps.shift),
                sums,
            )
            wgmma_commit_group_sync()
            if k == 0 and leads:
                storing.release()
            wgmma_wait_group_sync[1]()
            if k > 0 and leads:
                if taps.begins():
                    x.release(x.previous())
                comptime if not config.ping_pong():
                    w.release(w.previous())
            w.advance()
            taps.advance()
            if taps.begins():
                x.advance()
        comptime if config.ping_pong():
            if number + schedule.turns().step < schedule.tiles:
                order.arrive()
        wgmma_wait_group_sync[0]()
        if leads:
            x.release(x.previous())
            comptime if not config.ping_pong():
                w.release(w.previous())
        comptime if config.ping_pong():
            x.advance(UInt32(boxes))  # those of the other consumer's tile

        comptime if epilogue.joins:
            result.wait()
        else:
            sync_threads(own, UInt32(WARPGROUP))
        # Results are stored by sixteens, or more; what fills up the last of them is dropped.
        var filled = Sums[config.stored(), SUM[dtype]](fill=0)
        comptime for i in range(COLUMNS // 2):
            filled[i] = sums[i]
        comptime if epilogue.scales:
            finish_byte_columns[config.stored()](result.stage(), at, filled, of, tensors)
        else:
            finish_columns[dtype, epilogue, config.stored(), 0](
                result.stage(), at, filled, problem.alpha, bias
            )
        sync_writes(own)
        if leads:
            var first = plan.box.first(problem.conv, tile.row)
            y.store(result.stage(), f0, 0, first.p, first.n)
            stores_commit()
        storing.begin(result)
        result.advance(CONSUMERS)
    stores_read()


# The host's side


def turned_tiles[config: TurnedConfig](g: Geometry, *, chunks: Int) -> Int:
    """Counts the tiles of a convolution.

    Parameters:
        config: The tile.

    Args:
        g: Sizes; one group, of what the copy engine takes.
        chunks: Steps of 128 bytes over the channels.

    Returns:
        0 if the tile does not take it: no box serves several taps, or shared memory has no room.
    """
    var plan = TurnedPlan[config](g, chunks=chunks)
    var fits = plan.box.all_taps() and Int(plan.box.height * plan.box.width) <= config.stored_rows()
    var staying = g.f <= ROWS and Int(plan.stages) == g.r * g.s * chunks
    if not fits or plan.stages < 3 or (config.ping_pong() and not staying):
        return 0
    return plan.box.tiles(g) * ceildiv(g.f, config.filters)


def turned_gemm[
    dtype: DType, right: DType, //, epilogue: Epilogue, config: TurnedConfig
](
    g: Geometry,
    o: Operands[dtype, dtype, right],
    ctx: DeviceContext,
    *,
    constant: Bool = True,
    scales: Optional[Array[Scales, 1]] = None,
) raises:
    """Enqueues a convolution of which the config has tiles.

    Parameters:
        dtype: Of x and y, of 16 or 8 bits.
        right: Of w.
        epilogue: What the accumulator goes through; in 8 bits it scales.
        config: The tile.

    Args:
        g: Sizes; one group.
        o: The tensors.
        ctx: The GPU.
        constant: Whether w is a weight, which no kernel writes.
        scales: Of the sums and the residual, if the epilogue scales.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime assert (size_of[dtype]() == 1) == epilogue.scales, "turned: 8 bits have scales"
    comptime WIDTH = config.row // size_of[dtype]()
    var chunks = ceildiv(g.c, WIDTH)
    var plan = TurnedPlan[config](g, chunks=chunks)
    var maps = TensorMaps[Maps.COUNT]()
    maps.maps[Maps.X] = box_map[dtype](ctx, o.x, g, plan.box, config.row)
    maps.maps[Maps.W] = filter_map[right](ctx, o.w, g, config.filters, config.row)
    maps.maps[Maps.Y] = _result_map(ctx, o.y, g, plan.box)
    comptime if epilogue.joins:
        maps.maps[Maps.RESIDUAL] = _result_map(ctx, o.residual, g, plan.box)
    var problem = Problem[1](
        [g],
        rows=config.pixels,
        columns=config.filters,
        width=WIDTH,
        alpha=o.alpha,
        constant=constant,
        tiles={[plan.box.tiles(g)]},
    )
    launch[turned_kernel[dtype, epilogue, config, right]](
        ctx,
        maps,
        EpilogueTensors[dtype, epilogue]([o], scales=scales),
        problem,
        plan,
        grid_dim=problem.schedule.blocks(Device(ctx).multiprocessors),
        block_dim=Warps[epilogue].THREADS,
        shared=plan.bytes(),
        most_shared=MEMORY,
    )


def _result_map[
    dtype: DType
](ctx: DeviceContext, y: Data[dtype], g: Geometry, box: PixelBox[_]) raises -> TensorMap:
    """Makes the tensor map of a band of the result, or of the residual, 64 filters of it."""
    return tensor_map[dtype, 4](
        ctx,
        y,
        [Int64(g.f), Int64(g.q), Int64(g.p), Int64(g.n)],
        [Int32(ROWS), box.width, box.height, 1],
    )
