"""Kernels that run one part of ops/hopper each, for test_parts.py; page_gemm.mojo runs most of them."""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext
from ops.epilogue import Epilogue
from ops.hopper.accumulator import Fragment, Sums
from ops.hopper.cluster import PAD, leave_columns, leave_rows, reduce_cluster
from ops.hopper.epilogue import EpilogueTensors, finish_columns
from ops.hopper.mma import Matrix, mma
from ops.hopper.pipeline import Pipeline
from ops.hopper.ptx import fence_barrier_init, stores_read, sync_threads
from ops.hopper.scheduler import TileScheduler
from ops.hopper.shared import ROW, WARP, WARPGROUP, shared_memory
from ops.hopper.store import store_boxes, sync_writes
from ops.hopper.tma import TensorMaps, TileLoader, TileStore
from ops.operands import F32, Data
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

comptime BOX = 64 * ROW
"""Bytes of 64 rows."""


@__name(t"parts_scheduler_{products}_{split}")
def scheduler_kernel[
    products: Int, split: Bool
](seen: Data[DType.int32], schedule: TileScheduler[products], steps: Int32):
    """Writes, for each tile that a block takes, block, product, row, column and its part of K."""
    if thread_idx.x == 0:
        var start = schedule.start[split]()
        for number in schedule.turns(start):
            var tile = schedule.tile(number)
            var share = schedule.share[split](start, steps)
            var at = Int(number * schedule.splits + start.rank) * 6
            seen[unsafe_offset=at] = Int32(block_idx.x)
            seen[unsafe_offset=at + 1] = tile.product
            seen[unsafe_offset=at + 2] = tile.row
            seen[unsafe_offset=at + 3] = tile.column
            seen[unsafe_offset=at + 4] = share.begin
            seen[unsafe_offset=at + 5] = share.end
            comptime if split:
                return


@__name(t"parts_columns_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP)))
def columns_kernel[dtype: DType](maps: TensorMaps[4], tensors: EpilogueTensors[dtype]):
    """Computes y[m, f] = relu(2 sum_k w[f, k] x[m, k] + bias[f] + residual) of 64 x 64, w first."""
    comptime BOXES = 64 * size_of[dtype]() // ROW
    var data = shared_memory["parts"]()
    var stage = Pipeline(data, data + 4 * BOX, stages=1, bytes=4 * BOX)
    var at = Fragment(Int32(thread_idx.x))
    if at.leads():
        stage.init(consumers=1)
        fence_barrier_init()
    sync_threads(0, WARPGROUP)
    if at.t == Int32(WARP):
        stage.expect(UInt32((2 + BOXES) * BOX))
        TileLoader(maps.address(), 0).load(stage.stage(), stage.barrier(), 0, 0)
        TileLoader(maps.address(), 1).load(stage.stage() + BOX, stage.barrier(), 0, 0)
        comptime for i in range(BOXES):
            TileLoader(maps.address(), 2).load(
                stage.stage() + UInt32((2 + i) * BOX),
                stage.barrier(),
                Int32(i * ROW // size_of[dtype]()),
                0,
            )
    stage.wait()
    var sums = Sums[64](fill=0)
    wgmma_fence_aligned()
    sums = mma[dtype, 64](Matrix(stage.stage()), Matrix(stage.stage() + BOX), sums)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    var bias = SIMD[F32, 2](
        tensors.bias[0][unsafe_offset=Int(at.row())],
        tensors.bias[0][unsafe_offset=Int(at.row()) + 8],
    )
    var to = stage.stage() + 2 * BOX
    finish_columns[dtype, Epilogue("add_relu"), 64, 0](to, at, sums, 2, bias)
    sync_writes(1)
    if at.leads():
        store_boxes[dtype, 64](TileStore(maps.address(), 3), to, 0, 0)
        stores_read()


@__name(t"parts_cluster_{turned}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP)))
def cluster_kernel[
    turned: Bool
](tensors: EpilogueTensors[F32], schedule: TileScheduler[], m: Int32, f: Int32):
    """Adds up rank + 1 times 100 row + column over a cluster, rows and columns of a product."""
    var data = shared_memory["parts"]()
    var at = Fragment(Int32(thread_idx.x))
    var start = schedule.start[True]()
    var sums = Sums[64](fill=0)
    comptime for j in range(8):
        comptime for half in range(2):
            comptime for e in range(2):
                var row = at.row() + Int32(8 * half)
                var column = Int32(8 * j) + at.column() + Int32(e)
                var value = Float32(100 * row + column)
                sums[4 * j + 2 * half + e] = value * Float32(start.rank + 1)
    comptime if turned:
        leave_columns[64, 64](data, at, sums)
    else:
        leave_rows[64](data, at, sums)
    var tile = schedule.tile(start.tile)
    reduce_cluster[
        F32, Epilogue("add"), rows=64, columns=64, pad=PAD // 2 if turned else PAD, threads=WARPGROUP
    ](tensors, data, start, schedule.splits, m0=tile.row * 64, m=m, f0=tile.column * 64, f=f, alpha=0.5)


def enqueue_parts(n: Int, ctx: DeviceContext) raises:
    """Makes the compiler emit the kernels."""
    var integers = rebind[Data[DType.int32]](
        ctx.enqueue_create_buffer[DType.int32](1).unsafe_ptr()
    )
    var one = TileScheduler[]([n], columns=n, splits=n)
    ctx.enqueue_function[scheduler_kernel[1, True]](
        integers, one, Int32(n), grid_dim=n, block_dim=32
    )
    ctx.enqueue_function[scheduler_kernel[3, False]](
        integers, TileScheduler[3]([n, n, n], columns=n), Int32(n), grid_dim=n, block_dim=32
    )
    comptime for dtype in [DType.bfloat16, F32]:
        var a = rebind[Data[dtype]](ctx.enqueue_create_buffer[dtype](1).unsafe_ptr())
        var floats = rebind[Data[F32]](ctx.enqueue_create_buffer[F32](1).unsafe_ptr())
        ctx.enqueue_function[columns_kernel[dtype]](
            TensorMaps[4](),
            EpilogueTensors[dtype](floats, floats, a, a),
            grid_dim=n,
            block_dim=WARPGROUP,
        )
    var floats = rebind[Data[F32]](ctx.enqueue_create_buffer[F32](1).unsafe_ptr())
    comptime for turned in [False, True]:
        ctx.enqueue_function[cluster_kernel[turned]](
            EpilogueTensors[F32](floats, floats, floats, floats),
            one,
            Int32(n),
            Int32(n),
            grid_dim=n,
            block_dim=WARPGROUP,
        )
