"""Implicit GEMM on Hopper's tensor cores: y[m, f] = act(alpha * sum_k x[m, k] w[f, k] + bias + residual).

M = N * P * Q output pixels, K = R * S * C, N = F filters.

    x[N, H, W, C]   activations, read as [M, K] by the copy engine's im2col mode
    w[F, R, S, C]   filters
    y[N, P, Q, F]   result, and the residual

A block computes a tile of `64 * groups` pixels x `columns` filters. One warp, the producer, has
the copy engine (TMA) fill a ring of stages in shared memory, 128 bytes of K at a time for each
pixel and filter: im2col walks the pixels of the tile across rows and images, steps with the
stride and fills the padding with zeros. `groups` warpgroups of 128 threads, the consumers,
multiply the stages by wgmma, 64 pixels each, and keep float32 sums in registers. The stage after
the last one brings the residual; the result overwrites it and leaves through the copy engine.
Blocks go from tile to tile, so that the next tile comes in while the last one goes out.

Where tiles are fewer than multiprocessors, a cluster of `splits` blocks shares one tile: each
sums a part of K, and then a part of the rows over the cluster's shared memories (split-K).

Or blocks are launched in clusters of `peers`, which go from tile to tile, neighbours at a time, and
share the tiles of a last turn that would leave half of the multiprocessors idle: each block
multiplies a part of K, keeps its part of the columns, and sends its peers theirs.

One launch computes one product or several of the same K and F, such as a block's query, key and
value: their tiles follow one another, and each finds its tensors by its number. Or a product has
two sources, a convolution and the 1 x 1 of the shortcut beside it: the steps of the second follow
those of the first, and their sum never leaves the registers.

Blocks start while the kernel before them still runs (programmatic dependent launch): barriers,
tensor maps and the first filters, where these are weights, are loaded before they wait for the
activations.

float32 is multiplied as TF32: the copy engine rounds x and w to 10 bits of mantissa on their way,
to nearest even (CUDA's driver API; triton-lang/triton#11751).
x and w may be of 8 bits: floats, or integers, whose sums are int32. Then each filter's sum has a scale
in the place of alpha, the residual one of its own, and y is of 8 bits too or wider:
y = act(scale[f] * sum + bias + residual scale * residual). Integers are rounded to nearest even.
Of two sources, the sums of the first are multiplied by a factor of each filter, and rounded, before
those of the second are added: what an integer of them stands for is then the same.
Where y has 8 bits, each sixteen filters of w are in quads (`quad` of accumulator.mojo), so that a
thread's sums are neighbours.
C has to be a multiple of 16 bytes, and F one of 8, of 16 where y has 8 bits.
After Osama et al. 2023 (arXiv:2301.03598) and the PTX ISA 8.0, sections 5.5 and 9.7.14.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.accumulator import Fragment, Sums, rescaled
from ..hopper.barrier import Barrier
from ..hopper.cluster import PAD, Exchange, leave_rows, reduce_cluster
from ..hopper.conv import Conv, Problem, Step, load_pixels, pixels_map
from ..hopper.epilogue import EpilogueTensors, finish_rows
from ..hopper.mainloop import multiply_stages
from ..hopper.mma import ROWS, SUM
from ..hopper.moments import GROUP, Norm, RowMoments, RowNorm, RowSums
from ..hopper.pipeline import Pipeline
from ..hopper.ptx import (
    cluster_arrive,
    cluster_wait,
    fence_barrier_init,
    stores_read,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.scheduler import Start, Work
from ..hopper.shared import ROW, SharedAllocator, bytes_until, shared_memory
from ..hopper.store import Storing, load_residual, store_boxes
from ..hopper.tma import (
    Maps,
    TensorMap,
    TensorMaps,
    TileLoader,
    TileStore,
    im2col_map,
    matrix_map,
    tensor_map,
)
from ..launch import launch
from ..operands import Data, Operands, Scales, dtypes


struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 pixels each: 1 to 3."""
    var columns: Int
    """Filters of a tile: 32, or a multiple of 64."""
    var stages: Int
    """Stages of the ring, the one for the epilogue among them."""
    var blocks: Int
    """Blocks that a multiprocessor holds at a time; bounds the registers."""
    var split: Bool
    """Whether a cluster shares a tile."""
    var overlap: Bool
    """Whether a consumer issues a stage's products before those of the last one are done."""
    var peers: Int
    """Blocks of a cluster, which may share its last tile: each then finishes some columns; or 1."""
    var row: Int
    """Bytes of channels of a stage: 128, or 64 where there are no more."""

    def __init__(
        out self,
        groups: Int,
        columns: Int,
        stages: Int,
        blocks: Int,
        *,
        split: Bool = False,
        overlap: Bool = False,
        peers: Int = 1,
        row: Int = ROW,
    ):
        """Names the parts.

        Args:
            groups: Consumers.
            columns: Filters of a tile.
            stages: Stages of the ring.
            blocks: Blocks of a multiprocessor.
            split: Whether a cluster shares a tile.
            overlap: Whether products of two stages overlap.
            peers: Blocks of a cluster, which may share its last tile.
            row: Bytes of channels of a stage.
        """
        self.groups, self.columns, self.stages = groups, columns, stages
        self.blocks, self.split, self.overlap = blocks, split, overlap
        self.peers, self.row = peers, row

    def halved(self) -> Self:
        """Gives the same tile with stages of half as many bytes, twice as many of them.

        Returns:
            It has rows of 64 bytes: for products of no more channels.
        """
        var other = self
        other.row, other.stages = ROW // 2, 2 * self.stages
        return other

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Pixels, filters and stages, and how it works.
        """
        var size = t"{self.rows()}x{self.columns}x{self.stages}"
        var how = "split" if self.split else "overlap" if self.overlap else ""
        var shared = String("cluster", self.peers) if self.peers > 1 else String()
        var row = String("row", self.row) if self.row != ROW else String()
        return String(size, how, shared, row)

    @always_inline
    def own(self) -> Int:
        """Counts the filters that a block finishes of a tile that it shares with its peers.

        Returns:
            All of them without peers.
        """
        return self.columns // self.peers

    @always_inline
    def rows(self) -> Int:
        """Counts the pixels of a tile.

        Returns:
            64 for each consumer.
        """
        return ROWS * self.groups

    @always_inline
    def stage(self) -> Int:
        """Counts the bytes of a stage.

        Returns:
            128 for each pixel and filter, or 64.
        """
        return (self.rows() + self.columns) * self.row

    @always_inline
    def box[dtype: DType](self) -> Int:
        """Counts the bytes of a row of the boxes in which results leave.

        Parameters:
            dtype: Of the results.

        Returns:
            128; in 8 bits 64 where the columns that a block finishes are no multiple of it, or stages
            half as large.
        """
        comptime bytes = size_of[dtype]()
        var narrow = self.own() % ROW != 0 or self.row != ROW
        return ROW // 2 if bytes == 1 and narrow else ROW

    @always_inline
    def part[dtype: DType](self) -> Int:
        """Counts the filters of a tile whose results fit into a stage.

        Parameters:
            dtype: Of the results.

        Returns:
            All of them, a half, a third or a quarter, in whole boxes of the copy engine; a part is
            never of two peers.
        """
        var box = min(self.columns, self.box[dtype]() // size_of[dtype]())
        for parts in range(self.peers, 5):
            var part = self.columns // parts
            if (
                parts % self.peers == 0
                and self.columns % (parts * box) == 0
                and (part * self.rows() * size_of[dtype]() <= self.stage())
            ):
                return part
        return 0

    @always_inline
    def parts[dtype: DType](self) -> Int:
        """Counts the stages that a tile's results take.

        Parameters:
            dtype: Of the results.

        Returns:
            At most four.
        """
        return self.columns // self.part[dtype]()


struct Storage[config: Config](TrivialRegisterPassable):
    """What a block has in its shared memory.

    Parameters:
        config: The tile.
    """

    comptime Received = Exchange[Self.config.columns, Self.config.groups, Self.config.peers]
    """What the peers of a block send to it."""
    comptime BYTES = bytes_until(Self(0).end)
    """Bytes that a launch asks for."""

    var pipeline: Pipeline
    """The ring."""
    var exchange: Self.Received
    """Takes no room without peers."""
    var end: UInt32
    """First address behind all of these."""

    @always_inline
    def __init__(out self, data: UInt32):
        """Divides shared memory.

        Args:
            data: Its address.
        """
        var memory = SharedAllocator(data)
        comptime STAGE = Self.config.stage()
        var stages = memory.take(Self.config.stages * STAGE)
        self.pipeline = Pipeline(
            stages, memory, stages=Int32(Self.config.stages), bytes=UInt32(STAGE)
        )
        var inbox = memory.take(Self.Received.BYTES)
        var barrier = memory.take(Barrier.BYTES if Self.config.peers > 1 else 0)
        self.exchange = Self.Received(inbox, Barrier(barrier))
        self.end = memory.end

    @always_inline
    def init(self):
        """Prepares the barriers, by one thread."""
        self.pipeline.init[Self.config.stages](consumers=Self.config.groups)
        comptime if Self.config.peers > 1:
            self.exchange.barrier.init()
        fence_barrier_init()
        comptime if Self.config.peers > 1:
            self.exchange.expect()


comptime Warps[config: Config] = Roles[config.groups]
"""Which warps of a block do what.

Parameters:
    config: Of the kernel.
"""


def several(products: Int) -> String:
    """Names the products of a launch for a profiler, if there are several.

    Args:
        products: How many.

    Returns:
        `_3x1` of three.
    """
    return String("_", products, "x1") if products > 1 else String()


@__name(
    t"gemm_hopper_{config.label()}_{epilogue.label()}_{products}x{sources}_{dtypes[dtype, out, right]()}"
)
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def hopper_kernel[
    dtype: DType,
    epilogue: Epilogue,
    config: Config,
    products: Int,
    sources: Int,
    out: DType = dtype,
    right: DType = dtype,
](
    maps: TensorMaps[Maps.COUNT * products + 2 * (sources - 1)],
    tensors: EpilogueTensors[out, epilogue, products],
    problem: Problem[products],
):
    """Computes tiles, or a cluster's share of one.

    Parameters:
        dtype: Of x, and of w and y unless they are named.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.
        products: Products of the launch.
        sources: 2 if a second convolution is added, of windows of 1 x 1; else 1.
        out: Of the residual and y.
        right: Of w.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), w[F, R * S, C], y[M, F] and the residual of each
            product; x and w of a second source.
        tensors: Bias, residual and y, and the scales.
        problem: Sizes.
    """
    comptime assert config.part[out]() > 0, "hopper_gemm: columns are 32, or a multiple of 64"
    comptime assert not (
        config.split and (epilogue.normed() or config.groups > 1)
    ), "hopper_gemm: reduce_cluster has the rows of one consumer, and not all columns"
    var storage = Storage[config](shared_memory["hopper_gemm"]())
    var t = Int32(thread_idx.x)
    if t == 0:
        storage.init()
    sync_threads(0, UInt32(Warps[config].THREADS))
    comptime if config.peers > 1:
        cluster_arrive()  # a peer waits for this before it sends

    var start = problem.schedule.start[config.split, config.peers]()
    if Warps[config].produces(t):
        if Warps[config].drives(t):
            _produce[dtype, out, epilogue, config, sources](
                maps.address(), problem, start, storage.pipeline
            )
    else:
        _consume[dtype, out, right, epilogue, config, sources](
            maps.address(), tensors, problem, start, storage, Fragment(t)
        )
    comptime if config.split:
        var tile = problem.schedule.tile(start.tile)
        reduce_cluster[
            rows=ROWS,
            columns=config.columns,
            pad=PAD,
            threads=Warps[config].THREADS,
            sources=sources,
        ](
            tensors.of(tile.product),
            storage.pipeline.data,
            start,
            problem.schedule.splits,
            m0=tile.row * Int32(ROWS),
            m=problem.rows_of(tile.product),
            f0=tile.column * Int32(config.columns),
            f=problem.filters,
            alpha=problem.alpha,
        )


@always_inline
def _produce[
    dtype: DType, out: DType, epilogue: Epilogue, config: Config, sources: Int
](maps: UInt64, problem: Problem[_], start: Start, at_start: Pipeline):
    """Fills the ring, tile after tile, as stages become free."""
    comptime WIDTH = Int32(config.row // size_of[dtype]())
    comptime STAGE = UInt32(config.stage())
    comptime W_AT = UInt32(config.rows() * config.row)
    comptime BOX = config.box[out]()
    comptime PART = config.part[out]()
    comptime OWN = config.parts[out]() // config.peers
    var conv = problem.conv
    var schedule = problem.schedule
    var tile = schedule.tile(start.tile)
    var x = TileLoader(maps, Maps.COUNT * tile.product + Maps.X)
    var w = TileLoader(maps, Maps.COUNT * tile.product + Maps.W)
    var x2 = TileLoader(maps, Maps.X2)
    var w2 = TileLoader(maps, Maps.W2)
    x.prefetch_descriptor()
    w.prefetch_descriptor()
    comptime if sources == 2:
        x2.prefetch_descriptor()
        w2.prefetch_descriptor()
    var work = Work[config.split, config.peers](schedule, start, problem.steps())
    var first = Step(conv, work.first().steps.begin)

    # Filters that are weights do not depend on the kernel before.
    var pipeline = at_start
    var k = first
    var f0 = tile.column * Int32(config.columns)
    for i in range(pipeline.prefetch(work.first().steps.count() * problem.constant)):
        pipeline.expect(i, STAGE)
        _load_filters[sources](
            w, w2, conv, pipeline.stage(i) + W_AT, pipeline.barrier(i), k, WIDTH, f0
        )
        k.advance(conv)
    wait_on_dependent_grids()
    launch_dependent_grids()

    for number in work.turns():
        var unit = work.unit(number)
        tile = schedule.tile(unit.tile)
        x = TileLoader(maps, Maps.COUNT * tile.product + Maps.X)
        w = TileLoader(maps, Maps.COUNT * tile.product + Maps.W)
        var m0 = tile.row * Int32(config.rows())
        f0 = tile.column * Int32(config.columns)
        var pixel = conv.pixel(m0)
        var corner = conv.corner(pixel)
        comptime if config.peers > 1:
            first = Step(conv, unit.steps.begin)
        k = first
        for _ in range(unit.steps.count()):
            var to = pipeline.stage()
            var full = pipeline.barrier()
            if pipeline.acquire_or_prefetched():
                pipeline.expect(STAGE)
                _load_filters[sources](w, w2, conv, to + W_AT, full, k, WIDTH, f0)
            if sources == 2 and k.tap == conv.taps:
                x2.load_im2col(
                    to,
                    full,
                    k.c * WIDTH,
                    pixel.q * problem.stride2_w,
                    pixel.p * problem.stride2_h,
                    pixel.n,
                    0,
                    0,
                )
            else:
                load_pixels(x, to, full, conv, pixel, corner, channel=k.c * WIDTH, r=k.r, s=k.s)
            pipeline.advance()
            k.advance(conv)
        comptime if config.split:
            return
        if unit.shared:
            f0 += start.rank * Int32(config.own())
        comptime for part in range(config.parts[out]()):
            comptime if part >= OWN:
                if unit.shared:
                    return
            var residual = TileLoader(maps, Maps.COUNT * tile.product + Maps.RESIDUAL)
            load_residual[out, PART, joins=epilogue.joins, groups=config.groups, bytes=BOX](
                pipeline, residual, f0 + Int32(part * PART), m0
            )


@always_inline
def _load_filters[
    sources: Int
](
    w: TileLoader,
    w2: TileLoader,
    conv: Conv,
    to: UInt32,
    barrier: Barrier,
    k: Step,
    width: Int32,
    f0: Int32,
):
    """Starts copying the filters of a step; a second source counts as a tap more."""
    if sources == 2 and k.tap == conv.taps:
        w2.load(to, barrier, k.c * width, 0, f0)
    else:
        w.load(to, barrier, k.c * width, k.tap, f0)


@always_inline
def _consume[
    dtype: DType, out: DType, right: DType, epilogue: Epilogue, config: Config, sources: Int
](
    maps: UInt64,
    tensors: EpilogueTensors[out, epilogue, _],
    problem: Problem[_],
    start: Start,
    storage: Storage[config],
    at: Fragment,
):
    """Multiplies the stages of the tiles; finishes a tile, or leaves its sums in shared memory."""
    comptime BOX = config.box[out]()
    comptime COLUMNS = config.columns
    comptime PART = config.part[out]()
    comptime PARTS = config.parts[out]()
    comptime OWN = PARTS // config.peers
    var group = UInt32(at.group())
    var leads = at.leads()
    var work = Work[config.split, config.peers](problem.schedule, start, problem.steps())

    comptime if epilogue.normalizes:
        wait_on_dependent_grids()  # for the moments, which no copy brings
    var pipeline = storage.pipeline
    var storing = Storing[PARTS]()
    for number in work.turns():
        var unit = work.unit(number)
        var tile = problem.schedule.tile(unit.tile)
        var m0 = tile.row * Int32(config.rows())
        var f0 = tile.column * Int32(COLUMNS)
        comptime multiply = multiply_stages[
            dtype, COLUMNS, overlap=config.overlap, right=right, row=config.row
        ]
        var a = group * UInt32(ROWS * config.row)
        comptime B = UInt32(config.rows() * config.row)
        var steps = unit.steps.count()
        var sums = Sums[COLUMNS, SUM[dtype]](fill=0)
        comptime if sources == 2 and epilogue.scales:
            # Those of the first source become multiples of what one of the second stands for.
            var own = max(min(problem.conv.steps() - unit.steps.begin, steps), 0)
            sums = multiply(pipeline, storing, own, a=a, b=B, leads=leads, start=sums)
            sums = rescaled(sums, at, tensors.scales[0].first, f0, problem.filters)
            steps -= own
        var row0 = m0 + Int32(group) * Int32(ROWS)
        var m = problem.rows_of(tile.product)
        var moments = RowMoments()
        comptime if epilogue.normalizes:
            moments = RowMoments(tensors.norm[0], at, row=row0 + at.row(), rows=m)
        sums = multiply(pipeline, storing, steps, a=a, b=B, leads=leads, start=sums)
        var norm = RowNorm(0, 0)
        comptime if epilogue.normalizes:
            norm = moments.norm(tensors.norm[0], at)
        comptime if config.split:
            leave_rows[COLUMNS, quads=size_of[out]() == 1](storage.pipeline.data, at, sums)
            return
        if unit.shared:
            cluster_wait()
            storage.exchange.add(at, start.rank, sums)
            f0 += start.rank * Int32(config.own())

        var end = tensors.of(tile.product)
        var y = TileStore(maps, Maps.COUNT * tile.product + Maps.Y)
        storing.begin(pipeline)
        var row_sums = RowSums()
        comptime for part in range(PARTS):
            comptime if part >= OWN:
                if unit.shared:
                    break
            pipeline.wait()
            var to = pipeline.stage() + group * UInt32(PART * ROWS * size_of[out]())
            finish_rows[
                PART,
                first=part * PART,
                pitch=ROWS * BOX,
                sources=sources,
                bytes=BOX,
            ](
                to,
                at,
                sums,
                problem.alpha,
                end,
                f0 + Int32(part * PART),
                problem.filters,
                norm=norm,
            )
            comptime if epilogue.measures:
                comptime last = (part + 1) * PART // GROUP - 1
                row_sums.take[out, PART // GROUP, last=last](to, at)
                if last % 4 == 3 or part == PARTS - 1 or (unit.shared and part == OWN - 1):
                    var low = row0 + at.row()
                    var high = low + 8 if low + 8 < m else -1
                    row_sums.store[last](
                        end.norm[0], at, low=low if low < m else -1, high=high, f0=f0
                    )
            store_boxes[out, PART, bytes=BOX](
                y, to, f0 + Int32(part * PART), row0, barrier=group + 1, leads=leads
            )
            pipeline.advance()
    stores_read()


# The host's side


def hopper_gemm[
    dtype: DType, out: DType, right: DType, products: Int, //, epilogue: Epilogue, config: Config
](
    sizes: Array[Geometry, products],
    operands: Array[Operands[dtype, out, right], products],
    splits: Int,
    ctx: DeviceContext,
    *,
    constant: Bool = True,
    scales: Optional[Array[Scales, products]] = None,
    norm: Optional[Norm] = None,
) raises:
    """Enqueues a convolution, or matrix products of the same K and F, in one launch.

    Parameters:
        dtype: Of x.
        out: Of the residual and y.
        right: Of w.
        products: How many there are.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        sizes: Of each product; one group.
        operands: The tensors of each; all have the alpha of the first.
        splits: Blocks that share a tile; 1 unless the config splits.
        ctx: The GPU.
        constant: Whether w of each is a weight, which no kernel writes.
        scales: Of the sums and the residual of each, if the epilogue scales.
        norm: Moments of the rows of x, or of y, if the epilogue normalises or measures; of one product.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var maps = TensorMaps[Maps.COUNT * products]()
    comptime for i in range(products):
        _add_maps[dtype, epilogue, config, Maps.COUNT * i](ctx, maps, sizes[i], operands[i])
    _enqueue[dtype, epilogue, config, products, 1, out, right](
        maps,
        EpilogueTensors[out, epilogue, products](operands, scales=scales, norm=norm),
        _problem[dtype, config](sizes, splits, operands[0].alpha, constant),
        ctx,
    )


def hopper_shortcut[
    dtype: DType, out: DType, right: DType, //, epilogue: Epilogue, config: Config
](
    g: Geometry,
    o: Operands[dtype, out, right],
    beside: Geometry,
    more: Operands[dtype, out, right],
    splits: Int,
    ctx: DeviceContext,
    *,
    scales: Optional[Array[Scales, 1]] = None,
) raises:
    """Enqueues the sum of a convolution and one of windows of 1 x 1.

    Parameters:
        dtype: Of x.
        out: Of y.
        right: Of w.
        epilogue: What the sum goes through; it does not add.
        config: Sizes of the tile.

    Args:
        g: Sizes; one group.
        o: The tensors.
        beside: Sizes of the second convolution: the same N, P, Q and F.
        more: Its x, w and bias.
        splits: Blocks that share a tile; 1 unless the config splits.
        ctx: The GPU.
        scales: Of the sums, if the epilogue scales.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime WIDTH = config.row // size_of[dtype]()
    comptime assert not epilogue.joins, "hopper_gemm: a second source is what is added"
    var maps = TensorMaps[6]()
    _add_maps[dtype, epilogue, config, 0](ctx, maps, g, o)
    maps.maps[Maps.X2] = im2col_map[dtype](ctx, more.x, beside, config.rows(), config.row)
    maps.maps[Maps.W2] = filter_map[right](ctx, more.w, beside, config.columns, config.row)
    var problem = _problem[dtype, config, 1]([g], splits, o.alpha)
    problem.steps2 = Int32(ceildiv(beside.c, WIDTH))
    problem.stride2_h, problem.stride2_w = Int32(beside.stride_h), Int32(beside.stride_w)
    var tensors = EpilogueTensors[out, epilogue]([o], scales=scales)
    tensors.bias2[0] = more.bias
    _enqueue[dtype, epilogue, config, 1, 2, out, right](maps, tensors, problem, ctx)


def filter_map[
    dtype: DType
](
    ctx: DeviceContext, w: Data[dtype], g: Geometry, columns: Int, bytes: Int = ROW
) raises -> TensorMap:
    """Makes the tensor map of w[F, R * S, C].

    Parameters:
        dtype: Of w.

    Args:
        ctx: The GPU.
        w: The filters.
        g: Sizes.
        columns: Filters of a copy, which brings channels of one tap.
        bytes: Of the channels: 128 or 64.

    Returns:
        The map.

    Raises:
        If the driver refuses it.
    """
    return tensor_map[dtype, 3, True](
        ctx,
        w,
        [Int64(g.c), Int64(g.r * g.s), Int64(g.f)],
        [Int32(bytes // size_of[dtype]()), 1, Int32(columns)],
    )


def _add_maps[
    dtype: DType, epilogue: Epilogue, config: Config, at: Int
](ctx: DeviceContext, mut maps: TensorMaps[_], g: Geometry, o: Operands[dtype, _, _]) raises:
    """Makes the tensor maps of a product: of x, w, y and the residual."""
    var m = g.pixels()
    maps.maps[at + Maps.X] = pixels_map[dtype](ctx, o.x, g, config.rows(), config.row)
    maps.maps[at + Maps.W] = filter_map[o.right](ctx, o.w, g, config.columns, config.row)
    comptime BOX = config.box[o.out]()
    maps.maps[at + Maps.Y] = matrix_map[o.out](ctx, o.y, rows=m, columns=g.f, box=ROWS, bytes=BOX)
    comptime if epilogue.joins:
        maps.maps[at + Maps.RESIDUAL] = matrix_map[o.out](
            ctx, o.residual, rows=m, columns=g.f, box=ROWS, bytes=BOX
        )


def _problem[
    dtype: DType, config: Config, products: Int
](sizes: Array[Geometry, products], splits: Int, alpha: Float32, constant: Bool = True) -> Problem[
    products
]:
    """Divides products into tiles and steps."""
    return Problem[products](
        sizes,
        rows=config.rows(),
        columns=config.columns,
        width=config.row // size_of[dtype](),
        splits=config.peers if config.peers > 1 else splits,
        alpha=alpha,
        constant=constant,
    )


def _enqueue[
    dtype: DType,
    epilogue: Epilogue,
    config: Config,
    products: Int,
    sources: Int,
    out: DType = dtype,
    right: DType = dtype,
](
    maps: TensorMaps[Maps.COUNT * products + 2 * (sources - 1)],
    tensors: EpilogueTensors[out, epilogue, products],
    problem: Problem[products],
    ctx: DeviceContext,
) raises:
    var resident = Device(ctx).multiprocessors * config.blocks
    launch[hopper_kernel[dtype, epilogue, config, products, sources, out, right]](
        ctx,
        maps,
        tensors,
        problem,
        grid_dim=problem.schedule.blocks[config.split, config.peers](resident),
        block_dim=Warps[config].THREADS,
        cluster_dim=Dim(Int(problem.schedule.splits)),
        shared=Storage[config].BYTES,
    )
