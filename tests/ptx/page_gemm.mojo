"""A GEMM from the parts of ops/hopper: y[m, f] = act(sum_k x[m, k] w[f, k] + bias[f]).

A block computes tiles of 64 x 64. One thread, the producer, loads 64 rows of x and of w, 128 bytes
of K each, into a ring of stages. A warpgroup, the consumer, multiplies the stages; the result leaves
through the stage after a tile's last one.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from ops.device import Device
from ops.epilogue import Epilogue
from ops.hopper.accumulator import Fragment, Sums
from ops.hopper.epilogue import EpilogueTensors, finish_rows
from ops.hopper.mainloop import multiply_stages
from ops.hopper.mma import SUM
from ops.hopper.pipeline import Pipeline
from ops.hopper.ptx import stores_read
from ops.hopper.roles import Roles
from ops.hopper.scheduler import TileScheduler
from ops.hopper.shared import ROW, shared_memory
from ops.hopper.store import Storing, load_residual, store_boxes
from ops.hopper.tma import Maps, TensorMaps, TileLoader, TileStore, matrix_map
from ops.launch import launch
from ops.operands import F32, Data
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

comptime TILE = 64
"""Rows and columns of a tile."""
comptime HALF = TILE * ROW
"""Bytes of x, or of w, in a stage."""
comptime STAGES = 4
"""Stages of the ring."""
comptime Warps = Roles[1]
"""A consumer, and the producer's warp behind it."""


@__name(t"page_gemm_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps.THREADS)))
def gemm_kernel[
    dtype: DType, out: DType, epilogue: Epilogue
](
    maps: TensorMaps[3],
    tensors: EpilogueTensors[out, epilogue],
    schedule: TileScheduler[],
    steps: Int32,
    columns: Int32,
):
    """Computes tiles; the maps are of x[M, K], w[F, K] and y[M, F]."""
    var t = Int32(thread_idx.x)
    var pipeline = Pipeline.of_block[STAGES](
        shared_memory["page_gemm"](), bytes=2 * HALF, consumers=1, threads=Warps.THREADS
    )
    launch_dependent_grids()
    if Warps.produces(t):
        if Warps.drives(t):
            produce[dtype](maps.address(), schedule, steps, pipeline)
    else:
        consume[dtype, out, epilogue](
            maps.address(), tensors, schedule, steps, columns, pipeline, Fragment(t)
        )


@always_inline
def produce[
    dtype: DType
](maps: UInt64, schedule: TileScheduler[], steps: Int32, at_start: Pipeline):
    """Fills the stages, once the kernel ahead has written x."""
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    var x = TileLoader(maps, Maps.X)
    var w = TileLoader(maps, Maps.W)
    var pipeline = at_start
    wait_on_dependent_grids()
    for number in schedule.turns():
        var tile = schedule.tile(number)
        for k in range(steps):
            pipeline.acquire()
            pipeline.expect(2 * HALF)
            x.load(pipeline.stage(), pipeline.barrier(), k * WIDTH, tile.row * TILE)
            w.load(pipeline.stage() + HALF, pipeline.barrier(), k * WIDTH, tile.column * TILE)
            pipeline.advance()
        load_residual[dtype, TILE, joins=False](pipeline, x, 0, 0)  # a stage for the result


@always_inline
def consume[
    dtype: DType, out: DType, epilogue: Epilogue
](
    maps: UInt64,
    tensors: EpilogueTensors[out, epilogue],
    schedule: TileScheduler[],
    steps: Int32,
    columns: Int32,
    at_start: Pipeline,
    at: Fragment,
):
    """Multiplies the stages, and stores the tiles."""
    var y = TileStore(maps, Maps.Y)
    var pipeline = at_start
    var storing = Storing[1]()
    for number in schedule.turns():
        var tile = schedule.tile(number)
        var sums = multiply_stages[dtype, TILE, overlap=False](
            pipeline,
            storing,
            steps,
            a=0,
            b=HALF,
            leads=at.leads(),
            start=Sums[TILE, SUM[dtype]](fill=0),
        )
        pipeline.wait()
        finish_rows[TILE, pitch=HALF](
            pipeline.stage(), at, sums, 1, tensors, tile.column * TILE, columns
        )
        storing.begin(pipeline)
        store_boxes[out, TILE](
            y, pipeline.stage(), tile.column * TILE, tile.row * TILE, barrier=1, leads=at.leads()
        )
        pipeline.advance()
    stores_read()


def enqueue_gemm[
    dtype: DType, out: DType, epilogue: Epilogue
](
    m: Int,
    k: Int,
    f: Int,
    x: Data[dtype],
    w: Data[dtype],
    bias: Data[F32],
    y: Data[out],
    ctx: DeviceContext,
) raises:
    """Enqueues y[m, f] = act(x[m, k] w[f, k] + bias[f]); F is a multiple of 8, K one of 16 bytes."""
    var maps = TensorMaps[3]()
    maps.maps[Maps.X] = matrix_map[dtype, True](ctx, x, rows=m, columns=k, box=TILE)
    maps.maps[Maps.W] = matrix_map[dtype, True](ctx, w, rows=f, columns=k, box=TILE)
    maps.maps[Maps.Y] = matrix_map[out](ctx, y, rows=m, columns=f, box=TILE)
    var schedule = TileScheduler[]([ceildiv(m, TILE)], columns=ceildiv(f, TILE))
    launch[gemm_kernel[dtype, out, epilogue]](
        ctx,
        maps,
        EpilogueTensors[out, epilogue](bias, bias, y, y),  # a second bias and a residual are not read
        schedule,
        Int32(ceildiv(k * size_of[dtype](), ROW)),
        Int32(f),
        grid_dim=schedule.blocks(3 * Device(ctx).multiprocessors),  # each holds three
        block_dim=Warps.THREADS,
        shared=Pipeline.block_bytes(stages=STAGES, bytes=2 * HALF),
    )
