"""Implicit GEMM on Hopper's tensor cores for few tiles: filters come before the kernel ahead is done.

    y[m, f] = act(alpha * sum_k x[m, k] w[f, k] + bias[f] + residual[m, f])

    x[N, H, W, C]   activations
    w[F, R, S, C]   filters
    y[N, P, Q, F]   result, and the residual

M = N * P * Q output pixels, N = F filters, K = C * R * S: the taps of 128 bytes of channels, then
those of the next ones. A block computes one tile of `64 * groups` pixels x `columns` filters, where
the kernel of hopper.mojo, made for many, goes from tile to tile:

    two threads have the copy engine bring x and w, each through a ring of its own
    (hopper/window.mojo): w as soon as the block begins (programmatic dependent launch), and all of
    the block's share of it where shared memory has room; x, once the kernel ahead is done, as one
    box of pixels for all taps of a window where strides are 1, else the pixels of each tap
    consumers multiply the stages, 64 pixels a warpgroup, and store y from their registers

The next kernel may start once the first stage of filters has come. If it could earlier, it and those
behind it would occupy multiprocessors, and compete with blocks that still wait for their own filters.

One launch computes one product or several of the same K and F, as hopper.mojo does. Where one tile has all
rows, as of an image of 7 x 7, the mean of the rows can take the place of y (`pools` of an epilogue).

A cluster of `splits` blocks shares a tile: each sums a part of K and sends each peer the columns
that the peer adds up and finishes (hopper/cluster.mojo). All threads arrive at the cluster's
barrier, and consumers wait there. A producer waits, too, before it first waits for a consumer: it
costs nothing by then, and racecheck of compute-sanitizer 2026.4 has those who wait meet once more,
all but threads that have returned. Without it the two wait for each other under that tool.

float32 is multiplied as TF32, rounded by the copy engine as in hopper.mojo. C has to be a multiple
of 16 bytes, and F one of 8.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.accumulator import Fragment
from ..hopper.conv import Problem
from ..hopper.epilogue import EpilogueTensors
from ..hopper.moments import Norm
from ..hopper.pipeline import Pipeline
from ..hopper.pixel_box import PixelBox, box_map
from ..hopper.ptx import cluster_arrive, cluster_wait, sync_threads
from ..hopper.roles import Roles
from ..hopper.shared import ROW, SWIZZLED, block_memory, shared_memory
from ..hopper.tile import TileBlock, TileConfig, TilePlan, consume_tile
from ..hopper.tma import Maps, TensorMaps, TileLoader
from ..hopper.window import StepCounter, produce_pixels
from ..launch import launch
from ..operands import Operands
from .hopper import filter_map, several


comptime BLOCKS = 2
"""Blocks that a multiprocessor holds at least; it bounds the registers."""
comptime MAPS = 2
"""Tensor maps of a product: results leave the registers."""
comptime ROOM = block_memory(BLOCKS)
"""Bytes of shared memory that a block may take."""
comptime LEAST = 57 * 1024
"""Bytes that a block takes at least, so that three share a multiprocessor at most.

Four blocks of a short product would fit. While the kernel ahead still runs, they crowd onto few
multiprocessors: CvT-13 at batch 1 takes 0.265 ms without this minimum, 0.262 with it (H100, 2026-11-28).
"""


comptime Warps[config: TileConfig] = Roles[config.groups, 2]
"""Which warps of a block do what: the producers bring w, and x.

Parameters:
    config: Of the kernel.
"""


@__name(t"gemm_resident_{config.label()}_{epilogue.label()}{several(products)}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(BLOCKS),
)
def resident_kernel[
    dtype: DType, epilogue: Epilogue, config: TileConfig, products: Int = 1
](
    maps: TensorMaps[MAPS * products],
    tensors: EpilogueTensors[dtype, epilogue, products],
    problem: Problem[products],
    plan: TilePlan[config],
):
    """Computes a tile, or a cluster's share of one.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: The tile.
        products: Products of the launch.

    Args:
        maps: Tensor maps of x (boxes of an image, im2col, or a matrix) and w[F, R * S, C] of each product.
        tensors: Bias, residual and y.
        problem: Sizes.
        plan: How shared memory is divided.
    """
    var t = Int32(thread_idx.x)
    var block = TileBlock(shared_memory["gemm_resident"](), problem, plan)
    var tile = block.tile
    if t == 0:
        block.init(problem, plan.box)
    sync_threads(0, UInt32(Warps[config].THREADS))
    comptime if config.split:
        cluster_arrive()

    var steps = StepCounter(block.share, problem.conv, plan.box)
    var producer = Warps[config].producer(t)
    if producer < 0:
        var of = tensors.of(tile.product)
        if problem.constant == 0:
            wait_on_dependent_grids()
        if t < Int32(config.columns):
            block.load_bias(t, of, problem.filters)
        sync_threads(1, UInt32(Warps[config].CONSUMER_THREADS))
        consume_tile(block, steps, of, problem, plan.box, Fragment(t))
    elif Warps[config].drives(t):
        if producer == 0:
            if problem.constant == 0:
                wait_on_dependent_grids()
            _produce_filters[dtype, split=config.split](
                TileLoader(maps.address(), MAPS * tile.product + Maps.W),
                block.w,
                steps,
                tile.column * Int32(config.columns),
            )
        else:
            produce_pixels[dtype, split=config.split](
                TileLoader(maps.address(), MAPS * tile.product + Maps.X),
                block.x,
                steps,
                problem.conv,
                plan.box,
                tile.row,
            )


@always_inline
def _produce_filters[
    dtype: DType, *, split: Bool
](w: TileLoader, at_start: Pipeline, steps_at_start: StepCounter, f0: Int32):
    """Fills the ring of w, by one thread, and lets the next kernel begin when the first stage is full."""
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    var pipeline = at_start
    var steps = steps_at_start
    w.prefetch_descriptor()
    for k in range(steps.count()):
        if k >= Int32(pipeline.stages):
            if k == Int32(pipeline.stages):
                at_start.wait()
                launch_dependent_grids()
                comptime if split:
                    cluster_wait()
            pipeline.acquire()
        pipeline.expect(pipeline.bytes)
        w.load(pipeline.stage(), pipeline.barrier(), steps.chunk * WIDTH, steps.taps.tap, f0)
        pipeline.advance()
        steps.advance()
    if steps.count() <= Int32(pipeline.stages):
        at_start.wait()
        launch_dependent_grids()


# The host's side


def resident_gemm[
    dtype: DType, products: Int, //, epilogue: Epilogue, config: TileConfig
](
    sizes: Array[Geometry, products],
    operands: Array[Operands[dtype], products],
    splits: Int,
    ctx: DeviceContext,
    *,
    constant: Bool = True,
    norm: Optional[Norm] = None,
) raises:
    """Enqueues a convolution, or matrix products of the same K and F, in one launch.

    Parameters:
        dtype: Of x, w and y.
        products: How many there are; more than one have no windows.
        epilogue: What the accumulator goes through.
        config: The tile.

    Args:
        sizes: Of each product; one group.
        operands: The tensors of each; all have the alpha of the first.
        splits: Blocks that share a tile: 1, or if the config splits 2, 4 or 8.
        ctx: The GPU.
        constant: Whether w of each is a weight, which no kernel writes.
        norm: Moments of the rows of x, or of y, if the epilogue normalises or measures; of one product.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime WIDTH = ROW // size_of[dtype]()
    comptime POOLED = 16 * config.columns if epilogue.pools else 0
    """Bytes for what four warps have of the columns' means."""
    comptime if epilogue.pools:
        comptime assert products == 1, "resident_gemm: a mean is that of one product"
        if sizes[0].pixels() > config.rows() or not sizes[0].pointwise():
            raise Error("resident_gemm: a mean is that of one tile of rows")
    var chunks = ceildiv(sizes[0].c, WIDTH)
    var plan = TilePlan[config](
        sizes[0], chunks=chunks, splits=splits, least=4, room=ROOM - SWIZZLED - POOLED
    )
    var tiles = Array[Int, products](fill=0)
    comptime for i in range(products):
        tiles[i] = plan.box.tiles(sizes[i])
    var problem = Problem[products](
        sizes,
        rows=config.rows(),
        columns=config.columns,
        width=WIDTH,
        splits=splits,
        alpha=operands[0].alpha,
        constant=constant,
        tiles=tiles^,
    )
    launch[resident_kernel[dtype, epilogue, config, products]](
        ctx,
        _maps[config](ctx, sizes, operands, plan.box),
        EpilogueTensors[dtype, epilogue, products](operands, norm=norm),
        problem,
        plan,
        grid_dim=Int(problem.schedule.tiles) * splits,
        block_dim=Warps[config].THREADS,
        cluster_dim=Dim(splits),
        shared=max(plan.bytes() + SWIZZLED + POOLED, LEAST),
        most_shared=ROOM,
    )


def _maps[
    dtype: DType, products: Int, //, config: TileConfig
](
    ctx: DeviceContext,
    sizes: Array[Geometry, products],
    operands: Array[Operands[dtype], products],
    box: PixelBox[config.rows()],
) raises -> TensorMaps[MAPS * products]:
    """Makes the tensor maps of x and w of each product."""
    var maps = TensorMaps[MAPS * products]()
    comptime for i in range(products):
        maps.maps[MAPS * i + Maps.X] = box_map[dtype](ctx, operands[i].x, sizes[i], box)
        maps.maps[MAPS * i + Maps.W] = filter_map[dtype](
            ctx, operands[i].w, sizes[i], config.columns
        )
    return maps^
