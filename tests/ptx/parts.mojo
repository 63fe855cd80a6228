"""Kernels for test_parts.py that run a part of ops/hopper each, or a few that meet in every kernel.

page_gemm.mojo has the shortest GEMM. What a part adds to that is here: rings and the loop over K,
clusters, windows, schedules, products of registers, and the ways out of the registers.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import wait_on_dependent_grids
from ops.epilogue import Epilogue
from ops.geometry import Geometry
from ops.hopper.accumulator import Fragment, Sums, rescaled, row_16x16
from ops.hopper.barrier import Barrier
from ops.hopper.cluster import (
    PAD,
    Exchange,
    Inbox,
    leave_columns,
    leave_rows,
    reduce_cluster,
)
from ops.hopper.conv import Conv, Problem, Step, load_pixels
from ops.hopper.direct_store import Outputs, finish_pairs, pool_pairs, store_rows
from ops.hopper.epilogue import (
    EpilogueTensors,
    finish_boxes,
    finish_byte_columns,
    finish_columns,
    finish_rows,
)
from ops.hopper.mainloop import multiply_stages, multiply_steps
from ops.hopper.mma import SUM, Matrix, hold, mma, mma_registers, mma_sparse
from ops.hopper.moments import Norm, RowMoments, RowNorm, leave_moments
from ops.hopper.pipeline import OrderedSequence, Pipeline
from ops.hopper.pixel_box import PixelBox
from ops.hopper.ptx import (
    cluster_arrive,
    cluster_wait,
    fence_async,
    fence_barrier_init,
    load_bytes,
    shared_load,
    shared_load_matrices,
    shared_store,
    shared_store_float,
    stores_commit,
    stores_read,
    sync_threads,
)
from ops.hopper.roles import Roles
from ops.hopper.scheduler import Share, TileScheduler, Work
from ops.hopper.shared import ROW, WARP, WARPGROUP, SharedAllocator, shared_memory
from ops.hopper.store import BoxRing, Storing, StoringStage, store_boxes
from ops.hopper.tma import TensorMaps, TileLoader, TileStore
from ops.hopper.window import StepCounter, StepList, Steps, StepWriter, produce_pixels
from ops.operands import BF16, F32, Data
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

comptime I32 = DType.int32
comptime U32 = DType.uint32

comptime BOX = 64 * ROW
"""Bytes of 64 rows."""
comptime NORMED = Epilogue("add_relu", normalizes=True, measures=True)
"""An epilogue with moments of rows."""
comptime ADDED = Epilogue("add")
"""An epilogue that adds."""
comptime ADDED_RELU = Epilogue("add_relu")
"""One with an activation, too."""
comptime MEAN = Epilogue("add_relu", pools=True)
"""One of which only the mean is stored."""
comptime SCALED = Epilogue("add_relu", scales=True)
"""An epilogue with scales."""


@always_inline
def given[dtype: DType, //, columns: Int](sums: Data[dtype], at: Fragment) -> Sums[columns, dtype]:
    """Loads a thread's sums of a matrix [64 of each warpgroup, columns]."""
    var mine = Sums[columns, dtype](fill=0)
    var first = Int(at.group() * 64 + at.row()) * columns + Int(at.column())
    comptime for i in range(columns // 2):
        mine[i] = sums[unsafe_offset=first + i // 2 % 2 * 8 * columns + i // 4 * 8 + i % 2]
    return mine


@always_inline
def leave[
    dtype: DType, //, columns: Int
](to: Data[dtype], at: Fragment, sums: StaticTuple[Scalar[dtype], _], pitch: Int):
    """Stores a thread's sums of 64 rows of each warpgroup as they are, rows `pitch` numbers apart."""
    var first = Int(at.group() * 64 + at.row()) * pitch + Int(at.column())
    comptime for i in range(columns // 2):
        to[unsafe_offset=first + i // 2 % 2 * 8 * pitch + i // 4 * 8 + i % 2] = sums[i]


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
    store_boxes[dtype, 64](
        TileStore(maps.address(), 3), to, 0, 0, barrier=1, leads=at.leads()
    )
    stores_read()


@__name(t"parts_cluster_{turned}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP)))
def cluster_kernel[
    turned: Bool
](tensors: EpilogueTensors[F32, ADDED], schedule: TileScheduler[], m: Int32, f: Int32):
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
        rows=64, columns=64, pad=PAD // 2 if turned else PAD, threads=WARPGROUP
    ](tensors, data, start, schedule.splits, m0=tile.row * 64, m=m, f0=tile.column * 64, f=f, alpha=0.5)


@__name(t"parts_ring_{ring}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP + WARP)))
def ring_kernel[
    dtype: DType, right: DType, ring: StaticString
](
    maps: TensorMaps[3],
    tensors: EpilogueTensors[BF16],
    schedule: TileScheduler[],
    steps: Int32,
    stages: Int32,
    columns: Int32,
):
    """Computes y = 1 + x w + bias by `multiply_stages`, in tiles of 64 rows, block by block.

    The kernel ahead writes x, so w is loaded into the first stages before. Results leave through the
    ring's stages, and are stored under the next tile's products (`Storing`).

    The form `overlap` issues products under those of the stage before, and has results of two
    stages. In `turned` both sides are rows of K, and a tile of x or y is one of a third axis. In
    `narrow` a stage has 64 bytes of K, and no overlap.
    """
    comptime TURNED = ring == "turned"
    comptime K_BYTES = ROW // 2 if ring == "narrow" else ROW
    comptime COLUMNS = 64 if ring == "narrow" else 128
    comptime RESULTS = 2 if ring == "overlap" else 1
    comptime PART = COLUMNS // RESULTS
    comptime A = 64 * K_BYTES
    comptime BYTES = UInt32(A + COLUMNS * K_BYTES)
    comptime WIDTH = Int32(K_BYTES // size_of[dtype]())
    var data = shared_memory["parts"]()
    var pipeline = Pipeline(data, data + UInt32(stages) * BYTES, stages=stages, bytes=BYTES)
    var t = Int32(thread_idx.x)
    if t == 0:
        pipeline.init(consumers=1)
        fence_barrier_init()
    sync_threads(0, WARPGROUP + WARP)
    var work = Work[False, 1](schedule, schedule.start(), steps)
    if t == Int32(WARPGROUP):
        var x = TileLoader(maps.address(), 0)
        var w = TileLoader(maps.address(), 1)

        @always_inline
        def load_filters(to: UInt32, barrier: Barrier, k: Int32, column: Int32) {imm}:
            comptime if TURNED:
                comptime for box in range(COLUMNS // 64):
                    var f = column * Int32(COLUMNS) + Int32(64 * box)
                    w.load(to + UInt32(A + box * BOX), barrier, f, k * WIDTH)
            else:
                w.load(to + UInt32(A), barrier, k * WIDTH, column * Int32(COLUMNS))

        var first = work.first()
        var column = schedule.tile(first.tile).column
        for i in range(pipeline.prefetch(first.steps.count())):
            pipeline.expect(i, BYTES)
            load_filters(pipeline.stage(i), pipeline.barrier(i), i, column)
        wait_on_dependent_grids()
        for number in work.turns():
            var unit = work.unit(number)
            var tile = schedule.tile(unit.tile)
            for k in range(unit.steps.begin, unit.steps.end):
                if pipeline.acquire_or_prefetched():
                    pipeline.expect(BYTES)
                    load_filters(pipeline.stage(), pipeline.barrier(), k, tile.column)
                comptime if TURNED:
                    x.load(pipeline.stage(), pipeline.barrier(), 0, k * WIDTH, tile.row)
                else:
                    x.load(pipeline.stage(), pipeline.barrier(), k * WIDTH, tile.row * 64)
                pipeline.advance()
            comptime for _ in range(RESULTS):
                pipeline.acquire()
                pipeline.commit()
                pipeline.advance()
    elif t < Int32(WARPGROUP):
        var y = TileStore(maps.address(), 2)
        var at = Fragment(t)
        var leads = at.leads()
        var storing = Storing[RESULTS]()
        for number in work.turns():
            var unit = work.unit(number)
            var tile = schedule.tile(unit.tile)
            var sums = multiply_stages[
                dtype,
                COLUMNS,
                overlap=ring != "narrow",
                turned=TURNED,
                turned_a=TURNED,
                right=right,
                row=K_BYTES,
            ](
                pipeline,
                storing,
                unit.steps.count(),
                a=0,
                b=UInt32(A),
                leads=leads,
                start=Sums[COLUMNS, SUM[dtype]](fill=1),
            )
            storing.begin(pipeline)
            comptime for part in range(RESULTS):
                var f0 = tile.column * Int32(COLUMNS) + Int32(part * PART)
                pipeline.wait()
                finish_rows[PART, first=part * PART, pitch=BOX](
                    pipeline.stage(), at, sums, 1, tensors, f0, columns
                )
                fence_async()
                sync_threads(1, WARPGROUP)
                if leads:
                    comptime for box in range(PART // 64):
                        var at_box = pipeline.stage() + UInt32(box * BOX)
                        comptime if TURNED:
                            y.store(at_box, f0 + Int32(64 * box), 0, tile.row)
                        else:
                            y.store(at_box, f0 + Int32(64 * box), tile.row * 64)
                    stores_commit()
                pipeline.advance()
        stores_read()


@__name("parts_apart")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * WARPGROUP + WARP)))
def apart_kernel(
    maps: TensorMaps[2], y: Data[BF16], steps: Int32, stages: Int32, rows: Int32, columns: Int32
):
    """Multiplies 64 rows of x, which stay, by the stages of a ring, each consumer every second one.

    The results of `rows` rows leave by `store_rows`, tripled and, from the eighth row of sixteen on,
    doubled.
    """
    comptime WIDTH = Int32(ROW // size_of[BF16]())
    var memory = SharedAllocator(shared_memory["parts"]())
    var of_x = memory.take(UInt32(steps) * BOX)
    var ring = memory.take(UInt32(stages) * BOX)
    var left = Pipeline(of_x, memory, stages=steps, bytes=BOX)
    var pipeline = Pipeline(ring, memory, stages=stages, bytes=BOX)
    var t = Int32(thread_idx.x)
    if t == 0:
        left.init(consumers=2)
        pipeline.init(consumers=1)
        fence_barrier_init()
    sync_threads(0, 2 * WARPGROUP + WARP)
    if t == Int32(2 * WARPGROUP):
        var expected = left.expect_first(BOX, steps)
        for k in range(expected):
            TileLoader(maps.address(), 0).load(left.stage(k), left.barrier(k), k * WIDTH, 0)
        for k in range(steps):
            for group in range(Int32(2)):
                pipeline.acquire()
                pipeline.expect(BOX)
                TileLoader(maps.address(), 1).load(
                    pipeline.stage(), pipeline.barrier(), k * WIDTH, group * 64
                )
                pipeline.advance()
    elif t < Int32(2 * WARPGROUP):
        var at = Fragment(t)
        left.wait_first(steps)
        pipeline.advance(UInt32(at.group()))
        var storing = Storing[0]()  # nothing leaves through the ring
        var sums = multiply_stages[BF16, 64, overlap=True, apart=True, each=2](
            pipeline,
            storing,
            steps,
            a=left.stage(Int32(0)),
            b=0,
            leads=at.leads(),
            start=Sums[64](fill=0),
        )
        store_rows[BF16, 64](
            y,
            at,
            sums,
            SIMD[F32, 2](3, 2),
            row=0,
            rows=rows,
            column=at.group() * 64,
            pitch=columns,
        )


@__name(t"parts_registers_{dtype}_{turned}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP + WARP)))
def registers_kernel[
    dtype: DType, right: DType, turned: Bool
](maps: TensorMaps[2], y: Data[SUM[dtype]], steps: Int32):
    """Multiplies x, which goes through registers, by w: parts of a stage, each waited for alone."""
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    comptime STAGES = 2
    var data = shared_memory["parts"]()
    var ring = Pipeline(data, data + STAGES * 2 * BOX, stages=STAGES, bytes=2 * BOX, parts=2)
    var t = Int32(thread_idx.x)
    if t == 0:
        ring.init[STAGES](consumers=1)
        fence_barrier_init()
    sync_threads(0, WARPGROUP + WARP)
    if t == Int32(WARPGROUP):
        for k in range(steps):
            var side = ring.part(1, BOX)
            ring.acquire()
            ring.expect(BOX)
            side.expect(BOX)
            TileLoader(maps.address(), 0).load(ring.stage(), ring.barrier(), k * WIDTH, 0)
            TileLoader(maps.address(), 1).load(
                side.stage(),
                side.barrier(),
                Int32(0) if turned else k * WIDTH,
                k * WIDTH if turned else Int32(0),
            )
            ring.advance()
    elif t < Int32(WARPGROUP):
        var at = Fragment(t)
        var sums = Sums[64, SUM[dtype]](fill=0)
        for _ in range(steps):
            ring.wait()
            var x = StaticTuple[SIMD[U32, 4], 4](fill=SIMD[U32, 4](0))
            comptime for k in range(4):
                x[k] = shared_load_matrices(row_16x16[k](ring.stage(), at))
            var side = ring.part(1, BOX)
            side.wait()
            var w = Matrix(side.stage())
            wgmma_fence_aligned()
            comptime for k in range(4):
                comptime step = 16 * ROW if turned else 32
                sums = mma_registers[dtype, turned=turned, right=right](
                    x[k], w.after(step * k), sums
                )
            wgmma_commit_group_sync()
            wgmma_wait_group_sync[0]()
            sync_threads(1, WARPGROUP)  # all have loaded x
            if at.leads():
                ring.release()
            ring.advance()
        leave[64](y, at, sums, 64)


@__name("parts_boxes")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP)))
def boxes_kernel(maps: TensorMaps[2], y: Data[F32]):
    """Multiplies 64 x 128 by 128 x 32, each in two boxes, and adds to nothing."""
    comptime BOX_B = 32 * ROW
    var data = shared_memory["parts"]()
    var b = data + 2 * BOX
    var stage = Pipeline(data, b + 2 * BOX_B, stages=1, bytes=2 * (BOX + BOX_B))
    var at = Fragment(Int32(thread_idx.x))
    if at.leads():
        stage.init(consumers=1)
        fence_barrier_init()
        stage.expect(stage.bytes)
        for box in range(Int32(2)):
            var to = UInt32(box)
            TileLoader(maps.address(), 0).load(data + to * BOX, stage.barrier(), 64 * box, 0)
            TileLoader(maps.address(), 1).load(b + to * BOX_B, stage.barrier(), 64 * box, 0)
    sync_threads(0, WARPGROUP)
    stage.wait()
    wgmma_fence_aligned()
    var sums = mma[BF16, 32, boxes=2, pitch=BOX, clear=True, pitch_b=BOX_B](
        Matrix[wide=True](data), Matrix(b), Sums[32](fill=1000)
    )
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    leave[32](y, at, sums, 32)


@__name(t"parts_sparse_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP)))
def sparse_kernel[
    dtype: DType, right: DType
](
    maps: TensorMaps[1],
    values: Data[dtype],
    indices: Data[U32],
    y: Data[SUM[dtype]],
    never: Int32,
):
    """Multiplies 64 x 128 bytes, of which half are there, by 128 bytes x 32."""
    comptime WORDS = 2 if size_of[dtype]() == 1 else 1
    comptime VALUES = 64 * ROW // 2
    var data = shared_memory["parts"]()
    var stage = Pipeline(data, data + VALUES + 32 * ROW, stages=1, bytes=VALUES)
    var at = Fragment(Int32(thread_idx.x))
    if at.leads():
        stage.init(consumers=1)
        fence_barrier_init()
        stage.expect(VALUES + 32 * ROW)
        load_bytes(data, values, VALUES, stage.barrier().address)
        TileLoader(maps.address()).load(data + VALUES, stage.barrier(), 0, 0)
    sync_threads(0, WARPGROUP)
    var mine = SIMD[U32, WORDS](0)
    comptime for i in range(WORDS):
        mine[i] = indices[unsafe_offset=Int(at.t) + i * WARPGROUP]
    stage.wait()
    wgmma_fence_aligned()
    var sums = mma_sparse[dtype, 32, right](
        data, Matrix(data + VALUES), mine, Sums[32, SUM[dtype]](fill=1)
    )
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    comptime for i in range(WORDS):
        hold(mine[i], stage.full, UInt32(never))
    leave[32](y, at, sums, 32)


@__name("parts_copies")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARP)))
def copies_kernel(
    maps: TensorMaps[4], seen: Data[I32], conv: Conv, m0: Int32, begin: Int32, end: Int32
):
    """Copies what each step of K reads of 64 pixels, then a box of rank 4, by one thread."""
    var data = shared_memory["parts"]()
    var ring = Pipeline(data, data + 2 * BOX, stages=2, bytes=BOX)
    if thread_idx.x > 0:
        return
    ring.init(consumers=1)
    fence_barrier_init()
    var x = TileLoader(maps.address(), 0)
    var y = TileStore(maps.address(), 1)
    var pixel = conv.pixel(m0)
    var corner = conv.corner(pixel)
    var step = Step(conv, begin)
    var storing = StoringStage()
    for i in range(end - begin):
        seen[unsafe_offset=Int(4 * i)] = step.tap
        seen[unsafe_offset=Int(4 * i + 1)] = step.r
        seen[unsafe_offset=Int(4 * i + 2)] = step.s
        seen[unsafe_offset=Int(4 * i + 3)] = step.c
        ring.acquire()
        if step.tap < conv.taps:
            ring.expect(BOX)
            load_pixels(
                x,
                ring.stage(),
                ring.barrier(),
                conv,
                pixel,
                corner,
                channel=step.c * 64,
                r=step.r,
                s=step.s,
            )
            ring.wait()
        else:  # a second source's
            ring.commit()
        storing.release()
        y.store(ring.stage(), 0, i * 64)
        stores_commit()
        storing.begin(ring)
        ring.advance()
        step.advance(conv)
    storing.release()
    ring.acquire()
    ring.expect(8 * ROW)
    TileLoader(maps.address(), 2).load(ring.stage(), ring.barrier(), 64, -1, 1, 2)
    ring.wait()
    TileStore(maps.address(), 3).store(ring.stage(), 0, 1, 3, 1)
    stores_commit()
    stores_read()


@__name(t"parts_window_{listed}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP + 2 * WARP)))
def window_kernel[
    listed: Bool
](
    maps: TensorMaps[2],
    tensors: EpilogueTensors[BF16],
    problem: Problem[],
    box: PixelBox[64],
    x_stages: Int32,
    w_stages: Int32,
    begin: Int32,
    left_out: Int32,
):
    """Computes a tile of a convolution of 32 filters from step `begin` on: x by a ring of its own.

    Of a list every step is left out whose number, divided by 4, leaves `left_out`.
    """
    comptime COLUMNS = 32
    comptime W_BYTES = COLUMNS * ROW
    comptime THREADS = WARPGROUP + 2 * WARP
    comptime PAIRS = COLUMNS // 4
    var conv = problem.conv
    var share = Share(begin, conv.steps())
    var memory = SharedAllocator(shared_memory["parts"]())
    var of_w = memory.take(UInt32(w_stages) * W_BYTES)
    var of_x = memory.take(UInt32(x_stages) * UInt32(box.bytes))
    var w = Pipeline(of_w, memory, stages=w_stages, bytes=W_BYTES)
    var x = Pipeline(of_x, memory, stages=x_stages, bytes=UInt32(box.bytes))
    var bias = memory.take(4 * COLUMNS)
    var list = StepList(memory.end, share)
    var tile = problem.schedule.tile(problem.schedule.start().tile)
    var t = Int32(thread_idx.x)
    if t == 0:
        w.init(consumers=1)
        x.init(consumers=1)
        fence_barrier_init()
    if t < COLUMNS:
        shared_store_float(
            bias + 4 * UInt32(t), tensors.bias[0][unsafe_offset=Int(tile.column * COLUMNS + t)]
        )
    comptime if listed:
        if t >= Int32(WARPGROUP + WARP):
            var lane = t % Int32(WARP)
            var writer = StepWriter(list, conv)
            for first in range(Int32(0), share.count(), Int32(WARP)):
                var number = first + lane
                var there = number < share.count() and (begin + number) % 4 != left_out
                writer.append(lane, number, there, conv, box)
            writer.finish(lane)
    sync_threads(0, THREADS)

    @always_inline
    def run(steps: Some[Steps]) {imm}:
        if t == Int32(WARPGROUP):
            var ring = w
            for k in range(steps.count()):
                var number = begin + k
                comptime if listed:
                    number = begin + list.number(k)
                ring.acquire()
                ring.expect(W_BYTES)
                TileLoader(maps.address(), 1).load(
                    ring.stage(),
                    ring.barrier(),
                    number // conv.taps * 64,
                    number % conv.taps,
                    tile.column * COLUMNS,
                )
                ring.advance()
        elif t == Int32(WARPGROUP + WARP):
            produce_pixels[BF16, split=False](
                TileLoader(maps.address(), 0), x, steps, conv, box, tile.row
            )
        elif t < Int32(WARPGROUP):
            var at = Fragment(t)
            var m = problem.rows_of(0)
            var outputs = Outputs[PAIRS](
                at,
                low=box.pixel(conv, m, tile.row, at.row()),
                high=box.pixel(conv, m, tile.row, at.row() + 8),
                f0=tile.column * COLUMNS,
                filters=problem.filters,
                pairs=Share(0, PAIRS),
            )
            var count = steps.count()
            var resident = count <= w_stages
            if resident:
                w.wait_first(count)
            var sums = multiply_steps[BF16, COLUMNS](x, w, steps, count, box, at, resident=resident)
            wgmma_wait_group_sync[0]()
            finish_pairs(
                outputs,
                at,
                tensors,
                sums,
                problem.alpha,
                bias,
                outputs.load_residual(tensors),
                RowNorm(0, 0),
            )

    comptime if listed:
        run(list)
    else:
        run(StepCounter(share, conv, box))


@__name(t"parts_exchange_{peers}_{dtype}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * WARPGROUP)))
def exchange_kernel[
    dtype: DType, peers: Int
](sums: Data[dtype], y: Data[dtype], schedule: TileScheduler[]):
    """Adds up a cluster's sums of 128 x 64, each block those of its own columns."""
    comptime Sent = Exchange[64, 2, peers]
    var data = shared_memory["parts"]()
    var exchange = Sent(data, Barrier(data + UInt32(Sent.BYTES)))
    var at = Fragment(Int32(thread_idx.x))
    var start = schedule.start[True]()
    if at.t == 0:
        exchange.barrier.init()
        fence_barrier_init()
        exchange.expect()
    cluster_arrive()
    var mine = given[64](sums.unsafe_offset(Int(block_idx.x) * 128 * 64), at)
    cluster_wait()
    exchange.add(at, start.rank, mine)
    var to = y.unsafe_offset(Int(start.tile) * 128 * 64 + Int(start.rank) * Sent.OWN)
    leave[Sent.OWN](to, at, mine, 64)


@__name(t"parts_inbox_{columns}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP)))
def inbox_kernel[
    columns: Int
](
    sums: Data[F32],
    tensors: EpilogueTensors[BF16, ADDED_RELU],
    schedule: TileScheduler[],
    m: Int32,
    f: Int32,
):
    """Adds up a cluster's sums, of the warps that have a row of m, and finishes them in pairs."""
    comptime Received = Inbox[columns, 1]
    comptime PAIRS = columns // 8
    var data = shared_memory["parts"]()
    var start = schedule.start[True]()
    var barrier = Barrier(data + UInt32(Received.BYTES))
    var bias = barrier.address + UInt32(Barrier.BYTES)
    var inbox = Received(data, barrier, schedule.splits, start.rank)
    var at = Fragment(Int32(thread_idx.x))
    var warps = (m + 15) // 16
    if at.t == 0:
        inbox.barrier.init()
        fence_barrier_init()
        inbox.expect(warps)
    if at.t < Int32(columns):
        shared_store_float(bias + 4 * UInt32(at.t), tensors.bias[0][unsafe_offset=Int(at.t)])
    cluster_arrive()
    var mine = given[columns](sums.unsafe_offset(Int(start.rank) * 64 * columns), at)
    var outputs = Outputs[PAIRS](
        at,
        low=at.row() if at.row() < m else Int32(-1),
        high=at.row() + 8 if at.row() + 8 < m else Int32(-1),
        f0=0,
        filters=f,
        pairs=inbox.pairs(),
    )
    sync_threads(0, WARPGROUP)
    cluster_wait()
    if at.t // Int32(WARP) < warps:
        inbox.send(at, mine)
    finish_pairs(
        outputs,
        at,
        tensors,
        inbox.receive(at),
        0.5,
        bias,
        outputs.load_residual(tensors),
        RowNorm(0, 0),
    )


@__name(t"parts_work_{peers}")
def work_kernel[peers: Int](seen: Data[I32], schedule: TileScheduler[], steps: Int32, room: Int32):
    """Writes where each block starts, its first unit, how many units it has, and each of them."""
    if thread_idx.x > 0:
        return
    var start = schedule.start[peers=peers]()
    var work = Work[False, peers](schedule, start, steps)
    var to = seen.unsafe_offset(Int(block_idx.x) * Int(room) * 4)
    var count = Int32(0)
    for number in work.turns():
        var unit = work.unit(number)
        count += 1
        to[unsafe_offset=Int(4 * count)] = unit.tile
        to[unsafe_offset=Int(4 * count + 1)] = unit.steps.begin
        to[unsafe_offset=Int(4 * count + 2)] = unit.steps.end
        to[unsafe_offset=Int(4 * count + 3)] = Int32(1 if unit.shared else 0)
    to[unsafe_offset=0] = start.tile
    to[unsafe_offset=1] = start.rank
    to[unsafe_offset=2] = work.first().steps.count()
    to[unsafe_offset=3] = count


@__name("parts_stationary")
def stationary_kernel(seen: Data[I32], schedule: TileScheduler[3], room: Int32):
    """Writes the tiles of a block, product, row and column, as two workers take them in turns."""
    if thread_idx.x > 0:
        return
    var tiles = schedule.stationary()
    for worker in range(Int32(2)):
        var to = seen.unsafe_offset(Int((Int32(block_idx.x) * 2 + worker) * room) * 3)
        for number in tiles.turns(worker, 2):
            var tile = schedule.tile(number)
            to[unsafe_offset=0] = tile.product
            to[unsafe_offset=1] = tile.row
            to[unsafe_offset=2] = tile.column
            to = to.unsafe_offset(3)


@__name("parts_turns")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(3 * WARPGROUP)))
def turns_kernel(seen: Data[I32], rounds: Int32):
    """Has three consumers write their number in turns."""
    var count = shared_memory["parts"]()
    var at = Fragment(Int32(thread_idx.x))
    if at.t == 0:
        shared_store(count, 0)
    sync_threads(0, 3 * WARPGROUP)
    var order = OrderedSequence(at.group(), 3)
    for _ in range(rounds):
        order.wait()
        if at.leads():
            var n = shared_load(count)
            seen[unsafe_offset=Int(n)] = at.group()
            shared_store(count, n + 1)
        order.arrive()


@__name("parts_box_ring")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * WARPGROUP)))
def box_ring_kernel(maps: TensorMaps[1], boxes: Int32, tiles: Int32):
    """Stores tiles[64, 32] of float32, whose numbers are the rows of y, by two warpgroups in turns."""
    var at = Fragment(Int32(thread_idx.x))
    var group = UInt32(at.group())
    var data = shared_memory["parts"]() + group * UInt32(boxes) * BOX
    var ring = BoxRing[3](data, boxes=boxes, bytes=BOX)
    for tile in range(at.group(), tiles, Int32(2)):
        var box = ring.acquire(group + 1, at.leads())
        var row = at.t % WARPGROUP // 2
        var first = at.t % 2 * Int32(ROW // 2)
        comptime for i in range(ROW // 8):
            shared_store_float(
                box + UInt32(row * ROW + first + Int32(4 * i)), Float32(tile * 64 + row)
            )
        store_boxes[F32, 32](
            TileStore(maps.address(), 0), box, 0, tile * 64, barrier=group + 1, leads=at.leads()
        )
    stores_read()


comptime Moving[groups: Int] = Roles[groups, moves_registers=True]
"""Consumers to which a producer gives registers."""


@__name(t"parts_moved_registers_{groups}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Moving[groups].THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def moved_registers_kernel[groups: Int](seen: Data[I32]):
    """Has a producer give registers, and consumers take them.

    Each thread says its group then, and that of the producer which drives the copy engine -1.
    """
    comptime Warps = Moving[groups]
    var at = Fragment(Int32(thread_idx.x))
    if Warps.produces(at.t):
        Warps.give_registers()
    else:
        Warps.take_registers()
    var drives = Warps.produces(at.t) and Warps.drives(at.t)
    seen[unsafe_offset=Int(at.t)] = -1 if drives else at.group()


@__name("parts_exits")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP)))
def exits_kernel(
    maps: TensorMaps[2],
    sums: Data[F32],
    tensors: EpilogueTensors[BF16, NORMED],
    pooled: EpilogueTensors[BF16, MEAN],
    before: Norm,
    after: Norm,
    m: Int32,
    f: Int32,
):
    """Has 64 x 128 sums leave in boxes, in pairs, and as a mean, with the moments of their rows.

    The boxes are y[64, 128] = sums + residual, and `after` their moments. The pairs are normalised by
    the moments `before`; of m rows and f columns, as the mean is.
    """
    comptime COLUMNS = 128
    comptime PAIRS = COLUMNS // 4
    var data = shared_memory["parts"]()
    var bias = data + 3 * BOX + 3 * Pipeline.BARRIERS
    var ring = Pipeline(data, data + 3 * BOX, stages=3, bytes=BOX)
    var at = Fragment(Int32(thread_idx.x))
    if at.leads():
        ring.init(consumers=1)
        fence_barrier_init()
        for box in range(Int32(2)):
            ring.expect(2 * box, BOX)
            TileLoader(maps.address(), 0).load(
                ring.stage(2 * box), ring.barrier(2 * box), 64 * box, 0
            )
    shared_store_float(bias + 4 * UInt32(at.t), tensors.bias[0][unsafe_offset=Int(at.t)])
    sync_threads(0, WARPGROUP)
    var mine = given[COLUMNS](sums, at)
    var low = at.row() if at.row() < m else Int32(-1)
    var high = at.row() + 8 if at.row() + 8 < m else Int32(-1)
    var outputs = Outputs[PAIRS](
        at, low=low, high=high, f0=0, filters=f, pairs=Share(0, Int32(PAIRS))
    )
    wait_on_dependent_grids()
    var norm = RowMoments(before, at, row=at.row(), rows=m).norm(before, at)
    var residual = outputs.load_residual(tensors)
    finish_pairs(outputs, at, tensors, mine, 1, bias, residual, norm)
    residual = outputs.load_residual(pooled)
    pool_pairs(outputs, at, pooled, mine, 0.5, bias, residual, bias + 4 * COLUMNS, m)

    var results = finish_boxes[BF16, 2](ring, 2, at, mine, barrier=2)
    if at.leads():
        for box in range(Int32(2)):
            TileStore(maps.address(), 1).store(ring.stage(2 * box), 64 * box, 0)
        stores_commit()
        stores_read()
    leave_moments(results, after, at, low=low, high=high)


@__name(t"parts_bytes_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPGROUP)))
def bytes_kernel[
    dtype: DType
](
    maps: TensorMaps[2],
    sums: Data[SUM[dtype]],
    tensors: EpilogueTensors[dtype, SCALED],
    rows: Data[dtype],
    scaled: Data[SUM[dtype]],
    m: Int32,
    f: Int32,
    zero: Float32,
):
    """Has 64 x 64 sums leave in 8 bits: turned over, filters in quads; and as rows; and rescaled."""
    var data = shared_memory["parts"]()
    var stage = Pipeline(data, data + BOX // 2, stages=1, bytes=BOX // 2)
    var at = Fragment(Int32(thread_idx.x))
    if at.leads():
        stage.init(consumers=1)
        fence_barrier_init()
        stage.expect(BOX // 2)
        TileLoader(maps.address(), 0).load(stage.stage(), stage.barrier(), 0, 0)
    sync_threads(0, WARPGROUP)
    var mine = given[64](sums, at)
    var floats = Sums[64](fill=0)
    comptime for i in range(32):
        floats[i] = mine[i].cast[F32]()
    store_rows[dtype, 64](
        rows, at, floats, SIMD[F32, 2](0.5, 0.25), row=1, rows=m, column=16, pitch=96, zero=zero
    )
    leave[64](scaled, at, rescaled(mine, at, tensors.scales[0].product, 0, f), 64)
    stage.wait()
    finish_byte_columns[64](
        stage.stage(), at, mine, tensors.row_channels(at, 0, f), tensors
    )
    fence_async()
    sync_threads(0, WARPGROUP)
    if at.leads():
        TileStore(maps.address(), 1).store(stage.stage(), 0, 0)
        stores_commit()
        stores_read()


def anywhere[dtype: DType](ctx: DeviceContext) raises -> Data[dtype]:
    """Gives a tensor that no kernel will run with."""
    return rebind[Data[dtype]](ctx.enqueue_create_buffer[dtype](1).unsafe_ptr())


def enqueue_parts(n: Int, ctx: DeviceContext) raises:
    """Makes the compiler emit the kernels."""
    var integers = anywhere[I32](ctx)
    var floats = anywhere[F32](ctx)
    var halves = anywhere[BF16](ctx)
    var number = Int32(n)
    var one = TileScheduler[]([n], columns=n, splits=n)
    var three = TileScheduler[3]([n, n, n], columns=n)
    ctx.enqueue_function[scheduler_kernel[1, True]](integers, one, number, grid_dim=n, block_dim=32)
    ctx.enqueue_function[scheduler_kernel[3, False]](
        integers, three, number, grid_dim=n, block_dim=32
    )
    comptime for dtype in [BF16, F32]:
        var a = anywhere[dtype](ctx)
        ctx.enqueue_function[columns_kernel[dtype]](
            TensorMaps[4](),
            EpilogueTensors[dtype](floats, floats, a, a),
            grid_dim=n,
            block_dim=WARPGROUP,
        )
    comptime for turned in [False, True]:
        ctx.enqueue_function[cluster_kernel[turned]](
            EpilogueTensors[F32, ADDED](floats, floats, floats, floats),
            one,
            number,
            number,
            grid_dim=n,
            block_dim=WARPGROUP,
        )
    enqueue_rings(n, ctx)
    comptime for peers in [2, 4]:
        comptime dtype = F32 if peers == 2 else I32
        var a = anywhere[dtype](ctx)
        ctx.enqueue_function[exchange_kernel[dtype, peers]](
            a, a, one, grid_dim=n, block_dim=2 * WARPGROUP
        )
    comptime for columns in [32, 64]:
        ctx.enqueue_function[inbox_kernel[columns]](
            floats,
            EpilogueTensors[BF16, ADDED_RELU](floats, floats, halves, halves),
            one,
            number,
            number,
            grid_dim=n,
            block_dim=WARPGROUP,
        )
    comptime for peers in [1, 2, 4]:
        ctx.enqueue_function[work_kernel[peers]](
            integers, one, number, number, grid_dim=n, block_dim=32
        )
    ctx.enqueue_function[stationary_kernel](integers, three, number, grid_dim=n, block_dim=32)
    ctx.enqueue_function[turns_kernel](integers, number, grid_dim=n, block_dim=3 * WARPGROUP)
    ctx.enqueue_function[box_ring_kernel](
        TensorMaps[1](), number, number, grid_dim=n, block_dim=2 * WARPGROUP
    )
    comptime for groups in range(1, 4):
        ctx.enqueue_function[moved_registers_kernel[groups]](
            integers, grid_dim=n, block_dim=Moving[groups].THREADS
        )
    var norm = Norm(floats, n)
    ctx.enqueue_function[exits_kernel](
        TensorMaps[2](),
        floats,
        EpilogueTensors[BF16, NORMED](floats, floats, halves, halves),
        EpilogueTensors[BF16, MEAN](floats, floats, halves, halves),
        norm,
        norm,
        number,
        number,
        grid_dim=n,
        block_dim=WARPGROUP,
    )
    comptime for dtype in [DType.int8, DType.uint8, DType.float8_e4m3fn]:
        var a = anywhere[dtype](ctx)
        var sums = anywhere[SUM[dtype]](ctx)
        ctx.enqueue_function[bytes_kernel[dtype]](
            TensorMaps[2](),
            sums,
            EpilogueTensors[dtype, SCALED](floats, floats, a, a),
            a,
            sums,
            number,
            number,
            Float32(n),
            grid_dim=n,
            block_dim=WARPGROUP,
        )


def enqueue_rings(n: Int, ctx: DeviceContext) raises:
    """Makes the compiler emit the kernels whose copies and products go through stages."""
    comptime U8 = DType.uint8
    comptime S8 = DType.int8
    comptime E4M3 = DType.float8_e4m3fn
    var floats = anywhere[F32](ctx)
    var halves = anywhere[BF16](ctx)
    var ends = EpilogueTensors[BF16](floats, floats, halves, halves)
    var number = Int32(n)
    var one = TileScheduler[]([n], columns=n)
    comptime for ring in ["overlap", "turned", "narrow"]:
        comptime dtype = U8 if ring == "narrow" else BF16
        comptime right = S8 if ring == "narrow" else BF16
        ctx.enqueue_function[ring_kernel[dtype, right, ring]](
            TensorMaps[3](),
            ends,
            one,
            number,
            number,
            number,
            grid_dim=n,
            block_dim=WARPGROUP + WARP,
        )
    ctx.enqueue_function[apart_kernel](
        TensorMaps[2](),
        halves,
        number,
        number,
        number,
        number,
        grid_dim=n,
        block_dim=2 * WARPGROUP + WARP,
    )
    comptime DTYPES = [BF16, DType.float16, F32, E4M3, DType.float8_e5m2, S8, U8]
    comptime for dtype in DTYPES:
        comptime right = S8 if dtype == U8 else dtype
        var sums = anywhere[SUM[dtype]](ctx)
        comptime for turned in range(2 if size_of[dtype]() == 2 else 1):
            ctx.enqueue_function[registers_kernel[dtype, right, turned == 1]](
                TensorMaps[2](), sums, number, grid_dim=n, block_dim=WARPGROUP + WARP
            )
        ctx.enqueue_function[sparse_kernel[dtype, right]](
            TensorMaps[1](),
            anywhere[dtype](ctx),
            anywhere[U32](ctx),
            sums,
            number,
            grid_dim=n,
            block_dim=WARPGROUP,
        )
    ctx.enqueue_function[boxes_kernel](TensorMaps[2](), floats, grid_dim=n, block_dim=WARPGROUP)
    var g = Geometry(rows=n, depth=n, columns=n)
    ctx.enqueue_function[copies_kernel](
        TensorMaps[4](),
        anywhere[I32](ctx),
        Conv(g, chunks=n),
        number,
        number,
        number,
        grid_dim=n,
        block_dim=WARP,
    )
    var problem = Problem[]([g], rows=n, columns=n, width=n, splits=1, alpha=1)
    comptime for listed in [False, True]:
        ctx.enqueue_function[window_kernel[listed]](
            TensorMaps[2](),
            ends,
            problem,
            PixelBox[64](g),
            number,
            number,
            number,
            number,
            grid_dim=n,
            block_dim=WARPGROUP + 2 * WARP,
        )
