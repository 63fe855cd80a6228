"""Sparse convolution on Hopper's tensor cores: the filters lie compressed in memory only.

    y[m, f] = act(sum_k x[m, k] w[f, k] + bias[f] + residual[m, f])

    x[N, H, W, C]   activations
    words           the nonzeros of w: the number's bits below, its place in a tile above
    starts          where the words of each tile begin: 32 filters x 64 channels of one tap
    y[N, P, Q, F]   result, and the residual

M = N * P * Q output pixels, N = F filters, K = C * R * S: the taps of 64 channels, then those of the
next 64. A block computes a tile of `64 * groups` pixels x `columns` filters, by three kinds of warps:

    expanders   clear a stage of w and store the nonzeros of a tile in it, which makes the dense,
                swizzled matrix that wgmma reads (Xia et al. 2023, arXiv:2309.10285, section 4)
    producer    one thread has the copy engine bring x (hopper/window.mojo): one box of pixels for
                all taps of a window where strides are 1, else the pixels of each tap
    consumers   multiply the stages, 64 pixels a warpgroup, and store y from their registers

Steps of K whose filters are all zeros are skipped, and so are their pixels. Filters are weights:
as many as there are stages for are expanded before the kernel ahead is done (programmatic dependent
launch).

A cluster of `splits` blocks shares a tile: each sums a part of K and sends each peer the columns
that the peer adds up and finishes (hopper/cluster.mojo).

Accumulation in float32. C and F have to be multiples of 8. On ResNet-50's layers of 7 x 7 to 28 x
28 pixels at batch 1 it is 1.1 to 1.4 times as fast as the dense kernel (H200, 2026-11-22), with
50 as with 95 % zeros; with two steps of K it is slower. At batch 4 that depends on the layer; at
batch 32 the dense kernel is faster: here every tile of pixels expands the filters anew.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives.grid_controls import launch_dependent_grids
from max.gpu.sync import syncwarp
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..epilogue import Epilogue
from ..gemm.tuning import nearest
from ..geometry import Geometry
from ..hopper.accumulator import Fragment
from ..hopper.conv import Problem, takes
from ..hopper.epilogue import EpilogueTensors
from ..hopper.pixel_box import box_map
from ..hopper.ptx import (
    cluster_arrive,
    fence_async,
    shared_clear,
    shared_load,
    shared_store,
    shared_store_low,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.shared import ROW, SWIZZLED, WARP, block_memory, shared_memory
from ..hopper.tile import TileBlock, TileConfig, TilePlan, consume_tile
from ..hopper.tma import TensorMaps, TileLoader
from ..hopper.window import StepList, StepWriter, produce_pixels
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import U32, Data, Operands
from .tuning import CONFIGS, ROWS

comptime I32 = DType.int32
"""Where words begin."""
comptime WIDTH = 64
"""Channels of a tile: 128 bytes."""
comptime FILTERS = 32
"""Filters of a tile."""
comptime TILE = FILTERS * ROW
"""Bytes of an expanded tile."""
comptime EXPANDERS = 8
"""Warps that expand tiles."""
comptime AHEAD = 4
"""Words, by fours, that a lane loads before it stores the first."""


@always_inline
def parts(config: TileConfig) -> Int:
    """Counts the tiles of filters of a step.

    Args:
        config: The block's tile.

    Returns:
        One for 32 filters.
    """
    return config.columns // FILTERS


@always_inline
def turns(config: TileConfig) -> Int:
    """Counts the steps that are expanded at a time.

    Args:
        config: The block's tile.

    Returns:
        As many as the expanders have warps for the tiles of.
    """
    return EXPANDERS // parts(config)


@always_inline
def blocks(config: TileConfig) -> Int:
    """Counts the blocks that a multiprocessor holds at a time; it bounds the registers.

    Args:
        config: The block's tile.

    Returns:
        Two of one consumer, or one of two.
    """
    return 3 - config.groups


comptime Warps[config: TileConfig] = Roles[config.groups, EXPANDERS + 1]
"""Which warps of a block do what: the last producer brings x, the others expand tiles.

Parameters:
    config: Of the kernel.
"""


@fieldwise_init
struct Words(KernelArgument, TrivialRegisterPassable):
    """The compressed filters: nothing but pointers."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var words: Data[U32]
    """Nonzeros, tile by tile."""
    var starts: Data[I32]
    """Where each tile's begin: by filters, then channels, then taps; and the end."""


struct Plan[config: TileConfig](KernelArgument, TrivialRegisterPassable):
    """How a block's shared memory is divided.

    Parameters:
        config: The block's tile.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var tile: TilePlan[Self.config]
    """Of the tile."""
    var tiles: Int32
    """Tiles that there are words of."""

    def __init__(out self, g: Geometry, splits: Int):
        """Plans a convolution.

        Args:
            g: Sizes.
            splits: Blocks that share a tile.
        """
        var chunks = ceildiv(g.c, WIDTH)
        var steps = g.r * g.s * chunks
        var lists = Self.lists(ceildiv(steps, splits))
        self.tile = TilePlan[Self.config](
            g,
            chunks=chunks,
            splits=splits,
            least=turns(Self.config),
            room=block_memory(blocks(Self.config)) - lists - SWIZZLED,
        )
        self.tiles = Int32(ceildiv(g.f, FILTERS) * steps)

    @staticmethod
    def lists(share: Int) -> Int:
        """Counts the bytes of a block's lists.

        Args:
            share: Steps of K of a block at most.

        Returns:
            Of where words begin, and of steps.
        """
        return 4 * parts(Self.config) * (share + 1) + StepList.bytes(share)

    def shared(self, share: Int) -> Int:
        """Counts the bytes of shared memory.

        Args:
            share: Steps of K of a block at most.

        Returns:
            What `Storage` divides, and what aligning it may take.
        """
        return self.tile.bytes() + Self.lists(share) + SWIZZLED


struct Storage[config: TileConfig](TrivialRegisterPassable):
    """What a block has in its shared memory.

    Parameters:
        config: The block's tile.
    """

    var block: TileBlock[Self.config]
    """The block's tile, rings, bias, and what the cluster's blocks send."""
    var starts: UInt32
    """Address of where the words of the block's tiles begin, and the last one's end, part by part."""
    var steps: StepList
    """The steps of which filters are not all zeros."""

    @always_inline
    def __init__(out self, data: UInt32, problem: Problem[1], plan: Plan[Self.config]):
        """Divides shared memory.

        Args:
            data: Its address.
            problem: Sizes.
            plan: How many stages there are.
        """
        self.block = {data, problem, plan.tile}
        self.starts = self.block.end
        var entries = (self.block.share.count() + 1) * Int32(parts(Self.config))
        self.steps = StepList(self.starts + 4 * UInt32(entries), self.block.share)

    @always_inline
    def load_starts(self, t: Int32, words: Words, problem: Problem[1], plan: Plan[Self.config]):
        """Copies where the words of the block's tiles begin, by all threads.

        Args:
            t: The thread.
            words: The filters.
            problem: Sizes.
            plan: How many tiles there are words of.
        """
        comptime PARTS = Int32(parts(Self.config))
        var entries = self.steps.share.count() + 1
        for i in range(t, entries * PARTS, Int32(Warps[Self.config].THREADS)):
            var part = i // entries
            var list = (self.block.tile.column * PARTS + part) * problem.steps()
            var at = min(list + self.steps.share.begin + i - part * entries, plan.tiles)
            shared_store(self.starts + 4 * UInt32(i), UInt32(words.starts[unsafe_offset=Int(at)]))

    @always_inline
    def start(self, part: Int32, step: Int32) -> UInt32:
        """Looks up where the words of a tile begin.

        Args:
            part: Which of the step's tiles.
            step: Counted from the block's first.

        Returns:
            The first word.
        """
        var entries = self.steps.share.count() + 1
        return shared_load(self.starts + 4 * UInt32(part * entries + step))

    @always_inline
    def has_words(self, step: Int32) -> Bool:
        """Tells whether a step's filters are not all zeros.

        Args:
            step: Counted from the block's first.

        Returns:
            True if any of its tiles has a word.
        """
        var bits = UInt32(0)
        comptime for part in range(parts(Self.config)):
            bits |= self.start(Int32(part), step) ^ self.start(Int32(part), step + 1)
        return bits != 0


@__name(t"sparse_conv2d_tiles_{config.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(blocks(config)),
)
def tiled_kernel[
    dtype: DType, epilogue: Epilogue, config: TileConfig
](
    maps: TensorMaps[1],
    tensors: EpilogueTensors[dtype, epilogue],
    words: Words,
    problem: Problem[1],
    plan: Plan[config],
):
    """Computes a tile, or a cluster's share of one.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: The block's tile.

    Args:
        maps: Tensor map of x: boxes of an image, im2col, or a matrix.
        tensors: Bias, residual and y.
        words: The filters.
        problem: Sizes.
        plan: How shared memory is divided.
    """
    launch_dependent_grids()
    var t = Int32(thread_idx.x)
    var storage = Storage[config](shared_memory["sparse_conv2d"](), problem, plan)
    if t == 0:
        storage.block.init(problem, plan.tile.box, producers=parts(config))
    storage.load_starts(t, words, problem, plan)
    # By the last warps: of the first one, which lists the steps, ptxas would make a path with
    # barriers of its own, and synccheck takes those for others.
    var i = t - Int32(Warps[config].THREADS - config.columns)
    if i >= 0:
        storage.block.load_bias(i, tensors, problem.filters)
    sync_threads(0, UInt32(Warps[config].THREADS))
    comptime if config.split:
        cluster_arrive()
    if t < Int32(WARP):
        _list_steps(storage, problem, plan, t)
    sync_threads(0, UInt32(Warps[config].THREADS))

    var producer = Warps[config].producer(t)
    if producer < 0:
        consume_tile[ahead=False](
            storage.block, storage.steps, tensors, problem, plan.tile.box, Fragment(t)
        )
    elif producer < Int32(EXPANDERS):
        _expand(storage, words, t - Int32(Warps[config].CONSUMER_THREADS))
    elif Warps[config].drives(t):
        produce_pixels[dtype, split=config.split](
            TileLoader(maps.address()),
            storage.block.x,
            storage.steps,
            problem.conv,
            plan.tile.box,
            storage.block.tile.row,
        )


@always_inline
def _list_steps[
    config: TileConfig, //
](storage: Storage[config], problem: Problem[1], plan: Plan[config], lane: Int32):
    """Lists the steps whose filters are not all zeros, by one warp."""
    var writer = StepWriter(storage.steps, problem.conv)
    var count = storage.steps.share.count()
    for first in range(Int32(0), count, Int32(WARP)):
        var step = first + lane
        var listed = False
        if step < count:
            listed = storage.has_words(step)
        writer.append(lane, step, listed, problem.conv, plan.tile.box)
    writer.finish(lane)


@always_inline
def _expand[config: TileConfig, //](storage: Storage[config], words: Words, t: Int32):
    """Expands tiles, a part of a step by each warp; the next tile's words come in meanwhile.

    A warp sees one phase of a stage's barrier from the next: unless all steps have a stage of their
    own, there have to be as many stages as steps that are expanded at a time.
    """
    comptime TURNS = Int32(turns(config))
    comptime PARTS = Int32(parts(config))
    var lane = t % Int32(WARP)
    var part = t // Int32(WARP) % PARTS
    var first = t // Int32(WARP) // PARTS
    var steps = storage.steps.count()
    var pipeline = storage.block.w
    for _ in range(first):
        pipeline.advance()
    var held = Quads()
    var at = Int32(0)
    var end = Int32(0)
    for k in range(first - TURNS, steps, TURNS):
        var next = Quads()
        var next_at = Int32(0)
        var next_end = Int32(0)
        if k + TURNS < steps:
            var step = storage.steps.number(k + TURNS)
            next_at = Int32(storage.start(part, step)) + 4 * lane
            next_end = Int32(storage.start(part, step + 1))
            next.load(words, next_at, next_end)
        if k >= 0:
            var to = pipeline.stage() + UInt32(part) * UInt32(TILE)
            pipeline.acquire()
            comptime for j in range(TILE // 512):
                shared_clear(to + UInt32(512 * j) + UInt32(lane) * 16)
            syncwarp()
            held.place(to, at, end)
            while at - 4 * lane + Int32(128 * AHEAD) < end:
                at += Int32(128 * AHEAD)
                held.load(words, at, end)
                held.place(to, at, end)
            fence_async()
            syncwarp()
            if lane == 0:
                pipeline.commit()
            for _ in range(TURNS):
                pipeline.advance()
        held, at, end = next, next_at, next_end


struct Quads(TrivialRegisterPassable):
    """Words that a lane has loaded and not stored yet, four after one another."""

    var words: StaticTuple[SIMD[U32, 4], AHEAD]
    """The words."""

    @always_inline
    def __init__(out self):
        """Makes room for them."""
        self.words = StaticTuple[SIMD[U32, 4], AHEAD](fill=SIMD[U32, 4](0))

    @always_inline
    def load(mut self, words: Words, at: Int32, end: Int32):
        """Loads the lane's words of AHEAD times 128.

        Args:
            words: The filters.
            at: The lane's first word.
            end: Where the tile's end.
        """
        comptime for j in range(AHEAD):
            if at + Int32(128 * j) < end:
                self.words[j] = words.words.unsafe_load[width=4, alignment=16](Int(at) + 128 * j)

    @always_inline
    def place(self, to: UInt32, at: Int32, end: Int32):
        """Stores the nonzeros at their places in a tile.

        Args:
            to: The tile.
            at: The lane's first word.
            end: Where the tile's end.
        """
        comptime for j in range(AHEAD):
            if at + Int32(128 * j) < end:
                comptime for k in range(4):
                    shared_store_low(to + (self.words[j][k] >> 16), self.words[j][k])


# The host's side


def takes_tiled[dtype: DType](g: Geometry) -> Bool:
    """Tells whether the kernel takes a convolution.

    Parameters:
        dtype: Of x, w and y.

    Args:
        g: Sizes.

    Returns:
        True for 2 bytes a number, and what the copy engine walks over (hopper/conv.mojo).
    """
    return size_of[dtype]() == 2 and takes[dtype](g)


def sparse_conv2d_tiled[
    dtype: DType, epilogue: Epilogue
](g: Geometry, o: Operands[dtype], words: Data[U32], starts: Data[I32], ctx: DeviceContext,) raises:
    """Enqueues a convolution, in the block that tuning.mojo chooses.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes that `takes_tiled` takes.
        o: The tensors; w is not read.
        words: Nonzeros and their places, as graphs/arrange.py lists them.
        starts: Where those of each tile begin, and the end.
        ctx: The GPU.

    Raises:
        If the kernel does not take the sizes, a tensor map cannot be made or the launch fails.
    """
    if not takes_tiled[dtype](g):
        raise Error(
            "sparse_conv2d: tiles expect one group, C and F in multiples of 8, and windows that the"
            " copy engine walks over; choose another kernel"
        )
    var steps = g.r * g.s * ceildiv(g.c, WIDTH)
    var row = nearest(materialize[ROWS](), g, steps, epilogue, Device(ctx).multiprocessors)
    comptime for i in range(len(CONFIGS)):
        if row.config == i:
            enqueue_tiled[dtype, epilogue, CONFIGS[i]](g, o, words, starts, row.splits, ctx)


def enqueue_tiled[
    dtype: DType, epilogue: Epilogue, config: TileConfig
](
    g: Geometry,
    o: Operands[dtype],
    words: Data[U32],
    starts: Data[I32],
    splits: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.
        config: The block's tile.

    Args:
        g: Sizes; one group.
        o: The tensors; w is not read.
        words: Nonzeros and their places, as graphs/arrange.py lists them.
        starts: Where those of each tile begin, and the end.
        splits: Blocks that share a tile: 1 unless the config splits; else at most columns / 8.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime assert size_of[dtype]() == 2, "sparse_conv2d: tiled expects bfloat16 or float16"
    var plan = Plan[config](g, splits)
    var steps = g.r * g.s * ceildiv(g.c, WIDTH)
    var share = ceildiv(steps, splits)
    if Int(plan.tile.w_stages) < min(turns(config), share):
        raise Error(
            "sparse_conv2d: shared memory has too few stages for K = ", steps, " steps of 64"
        )
    var maps = TensorMaps[1]()
    maps.maps[0] = box_map[dtype](ctx, o.x, g, plan.tile.box)
    var problem = Problem[1](
        [g],
        rows=config.rows(),
        columns=config.columns,
        width=WIDTH,
        splits=splits,
        alpha=o.alpha,
        tiles={[plan.tile.box.tiles(g)]},
    )
    launch[tiled_kernel[dtype, epilogue, config]](
        ctx,
        maps,
        EpilogueTensors[dtype, epilogue]([o]),
        Words(words, starts),
        problem,
        plan,
        grid_dim=Int(problem.schedule.tiles) * splits,
        block_dim=Warps[config].THREADS,
        cluster_dim=Dim(splits),
        shared=plan.shared(share),
        most_shared=block_memory(blocks(config)),
    )
