"""Attention and the linear layer behind it on Hopper's tensor cores, in one kernel.

    y[m, f] = sum_c a[m, c] w[f, c] + bias[f] + residual[m, f],   a = attention(q, k, v)

for heads of 64 channels and few keys an image, as where keys and values have strides (Wang et al.
2021, arXiv:2102.12122; Wu et al. 2021, arXiv:2103.15808). There an attention moves more than it
multiplies, and its result is read once, by this product; here it stays in shared memory. The moments
of the rows of y are left for a layer norm (hopper/moments.mojo).

A block computes tiles of 64 rows of y, all columns. Rows are queries, of whichever image they are. The
consumers, warpgroups of 128 threads,

    attend    from these rows to the keys of their image, or of an image after the other, each
              consumer for its heads; a head's result takes the place of its queries
    multiply  the results of all heads by w, each consumer for its columns
    finish    and store the sums in the place of the residual

One thread, the producer, has the copy engine (TMA) fill two rings: one of parts of w, and one of tiles
of keys and values, behind which the residual comes. Each consumer has the same share of both: stages
of its number, and every so many further on. Its first thread loads its queries, since it knows when
there is room for them.
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
from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..hopper.accumulator import Fragment, Sums, bias_of_columns, row_16x16, sums_16x16
from ..hopper.barrier import Barrier
from ..hopper.epilogue import finish_boxes
from ..hopper.mainloop import multiply_stages
from ..hopper.mma import BOX, ROWS, Matrix, mma, mma_registers, settled
from ..hopper.moments import Norm, leave_moments
from ..hopper.pipeline import Pipeline
from ..hopper.ptx import (
    fence_barrier_init,
    shared_store_float,
    shared_store_matrices,
    stores_commit,
    stores_read,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.scheduler import TileScheduler, Turns
from ..hopper.shared import SharedAllocator, bytes_until, shared_memory
from ..hopper.store import Storing, sync_writes
from ..hopper.tma import TensorMaps, TileLoader, TileStore, matrix_map, tensor_map
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import F32, Data, Operands
from .config import LOG2_E, Attention
from .softmax import Softmax, mask_keys, rounded

comptime DEPTH = 64
"""Channels of a head: a row of 128 bytes."""
comptime KEYS = 56
"""Keys of an image at most."""


@fieldwise_init
struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var heads: Int
    """Heads: boxes of 64 channels."""
    var consumers: Int
    """Consumers, which share the heads, and the columns."""
    var w_stages: Int
    """Stages of the ring of w, of a consumer's columns and a head each."""

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Rows, channels, consumers and stages.
        """
        return String(t"{ROWS}x{self.heads * DEPTH}x{self.consumers}x{self.w_stages}")

    @always_inline
    def own(self) -> Int:
        """Counts a consumer's heads, and its boxes of columns.

        Returns:
            The same share for each.
        """
        return self.heads // self.consumers

    @always_inline
    def columns(self) -> Int:
        """Counts the columns that a consumer computes.

        Returns:
            Those of its boxes.
        """
        return self.own() * DEPTH


comptime Warps[config: Config] = Roles[config.consumers]
"""Which warps of a block do what.

Parameters:
    config: Of the kernel.
"""


struct Storage[config: Config](TrivialRegisterPassable):
    """What a block has in its shared memory.

    Parameters:
        config: Sizes of the tile.
    """

    comptime PART = Self.config.own() * BOX
    """Bytes of a consumer's queries, and of a stage of w."""
    comptime STAGES = Self.config.consumers * max(Self.config.own(), 2)
    """Stages of tiles."""
    comptime BYTES = bytes_until(Self(0).end)
    """Bytes that a launch asks for."""

    var w: Pipeline
    """Parts of w."""
    var tiles: Pipeline
    """Tiles of keys, values and residuals."""
    var queries: Pipeline
    """Those of the first consumer's heads, a ring of one stage."""
    var bias: UInt32
    """Address of the bias."""
    var junk: UInt32
    """Address of 16 bytes for results of rows that are of another image."""
    var end: UInt32
    """First address behind all of these."""

    @always_inline
    def __init__(out self, data: UInt32):
        """Divides shared memory.

        Args:
            data: Its address.
        """
        comptime C = Self.config
        var memory = SharedAllocator(data)
        var queries = memory.take(C.consumers * Self.PART)
        var w = memory.take(C.w_stages * Self.PART)
        var tiles = memory.take(Self.STAGES * BOX)
        self.bias = memory.take(C.heads * DEPTH * 4)
        self.junk = memory.take(16)
        self.w = Pipeline(w, memory, stages=Int32(C.w_stages), bytes=UInt32(Self.PART))
        self.tiles = Pipeline(tiles, memory, stages=Int32(Self.STAGES), bytes=UInt32(BOX))
        self.queries = Pipeline(
            queries, memory, stages=1, bytes=UInt32(Self.PART), rings=C.consumers
        )
        self.end = memory.end

    @always_inline
    def init(self):
        """Prepares the barriers, by one thread."""
        self.w.init[Self.config.w_stages](consumers=1)
        self.tiles.init[Self.STAGES](consumers=1)
        comptime for i in range(Self.config.consumers):
            self.queries.of_consumer(UInt32(i)).init[1](consumers=1)
        fence_barrier_init()


struct Problem(KernelArgument, TrivialRegisterPassable):
    """The sizes, and the tiles."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var t: Int32
    """Queries of an image."""
    var s: Int32
    """Keys of an image."""
    var m: Int32
    """Rows: queries of all images."""
    var scale: Float32
    """Scales the scores, for powers of two."""
    var schedule: TileScheduler[]
    """The tiles."""

    def __init__(out self, o: Attention[_, _]):
        """Divides the rows into tiles.

        Args:
            o: Sizes.
        """
        self.t, self.s, self.m = o.t, o.s, o.n * o.t
        self.scale = o.scale * LOG2_E
        self.schedule = TileScheduler[]([ceildiv(Int(self.m), ROWS)], columns=1)

    @always_inline
    def images(self, row: Int32) -> Turns:
        """Finds the images of a tile's rows.

        Args:
            row: The first.

        Returns:
            Their numbers.
        """
        var last = min(row + Int32(ROWS), self.m) - 1
        return range(row // self.t, last // self.t + 1, Int32(1))


@__name(t"attention_linear_hopper_{config.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def attention_linear_kernel[
    dtype: DType, config: Config
](maps: TensorMaps[6], bias: Data[F32], moments: Norm, problem: Problem):
    """Computes every grid-th tile.

    Parameters:
        dtype: Either bfloat16 or float16.
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of q, k, v, w, the residual and y.
        bias: [C].
        moments: Of the rows of y.
        problem: Sizes.
    """
    comptime assert (
        config.heads % config.consumers == 0
        and config.w_stages % config.consumers == 0
        and config.w_stages >= 2 * config.consumers
    ), "attention_linear: consumers have the same share of all, and two stages of w at least"
    var storage = Storage[config](shared_memory["attention_linear"]())
    var t = Int32(thread_idx.x)
    if t == 0:
        storage.init()
    for i in range(t, Int32(config.heads * DEPTH), Int32(Warps[config].THREADS)):
        shared_store_float(storage.bias + UInt32(4 * i), bias[unsafe_offset=Int(i)])
    sync_threads(0, UInt32(Warps[config].THREADS))
    launch_dependent_grids()
    if Warps[config].produces(t):
        if Warps[config].drives(t):
            _produce(maps.address(), problem, storage)
    else:
        _consume[dtype](maps.address(), moments, problem, storage, Fragment(t))


@always_inline
def _produce[config: Config, //](maps: UInt64, problem: Problem, storage: Storage[config]):
    """Fills the rings, tile after tile, as stages become free."""
    comptime OWN = config.own()
    comptime PARTS = Int32(config.heads * config.consumers)
    var of_w = TileLoader(maps, 3)
    var residual = TileLoader(maps, 4)
    comptime for i in range(1, 5):
        TileLoader(maps, Int32(i)).prefetch_descriptor()
    # Weights do not depend on the kernel before.
    var w = storage.w
    for i in range(w.prefetch(PARTS)):
        w.expect(i, w.bytes)
        _load_part[config](of_w, w.stage(i), w.barrier(i), i)
    wait_on_dependent_grids()

    var tiles = storage.tiles
    for tile in problem.schedule.turns():
        var row = tile * Int32(ROWS)
        # Keys of the consumers' first heads, their values, then those of the next heads.
        for n in problem.images(row):
            comptime for i in range(2 * OWN):
                comptime for consumer in range(config.consumers):
                    comptime head = consumer * OWN + i // 2
                    tiles.acquire()
                    tiles.expect(UInt32(BOX))
                    TileLoader(maps, Int32(1 + i % 2)).load(
                        tiles.stage(), tiles.barrier(), Int32(head * DEPTH), 0, n
                    )
                    tiles.advance()
        for i in range(PARTS):
            if w.acquire_or_prefetched():
                w.expect(w.bytes)
                _load_part[config](of_w, w.stage(), w.barrier(), i)
            w.advance()
            # The tiles' ring is empty while w is multiplied.
            if i == 2 * Int32(config.consumers) - 1:
                comptime for j in range(OWN):
                    comptime for consumer in range(config.consumers):
                        comptime box = consumer * OWN + j
                        tiles.acquire()
                        tiles.expect(UInt32(BOX))
                        residual.load(tiles.stage(), tiles.barrier(), Int32(box * DEPTH), row)
                        tiles.advance()


@always_inline
def _load_part[config: Config](w: TileLoader, to: UInt32, barrier: Barrier, i: Int32):
    """Starts copying what a consumer multiplies a head by: head after head, of each all parts."""
    comptime EACH = Int32(config.consumers)
    w.load(to, barrier, i // EACH * Int32(DEPTH), i % EACH * Int32(config.columns()))


@always_inline
def _consume[
    config: Config, //, dtype: DType
](maps: UInt64, moments: Norm, problem: Problem, storage: Storage[config], at: Fragment):
    """Computes the consumer's part of every tile."""
    comptime COLUMNS = config.columns()
    comptime ALL = UInt32(config.consumers + 1)
    var leads = at.leads()
    var first = at.group() * Int32(COLUMNS)
    var y = TileStore(maps, 5)
    var queries = storage.queries.of_consumer(UInt32(at.group()))
    var tiles = storage.tiles
    var w = storage.w
    tiles.advance(UInt32(at.group()))
    w.advance(UInt32(at.group()))
    var turns = problem.schedule.turns()
    if leads:
        TileLoader(maps).prefetch_descriptor()
        wait_on_dependent_grids()
        _load_queries[config](maps, queries, first, turns.start * Int32(ROWS))
    for tile in turns:
        var row = tile * Int32(ROWS)

        # Attend.
        queries.wait()
        for n in problem.images(row):
            var begin = n * problem.t - row
            _attend[dtype, config](
                queries.stage(),
                tiles,
                problem,
                at,
                junk=storage.junk,
                begin=begin,
                end=begin + problem.t,
            )
        queries.advance()
        var sums = bias_of_columns[COLUMNS](storage.bias + UInt32(first + at.column()) * 4)
        sync_writes(ALL, Warps[config].CONSUMER_THREADS)

        # Multiply.
        var storing = Storing[0]()  # the ring of w holds no results
        sums = multiply_stages[dtype, COLUMNS, overlap=True, apart=True, each=config.consumers](
            w,
            storing,
            Int32(config.heads),
            a=storage.queries.data,
            b=0,
            leads=leads,
            start=sums,
        )
        # The others have read this consumer's heads, too: the next queries may come.
        sync_threads(ALL, UInt32(Warps[config].CONSUMER_THREADS))
        if leads and tile + turns.step < turns.end:
            _load_queries[config](maps, queries, first, row + turns.step * Int32(ROWS))

        _finish[dtype, config](tiles, sums, y, moments, problem, at, first, row)


@always_inline
def _load_queries[config: Config](maps: UInt64, queries: Pipeline, first: Int32, row: Int32):
    """Starts copying a consumer's heads of 64 queries."""
    queries.expect(queries.bytes)
    comptime for i in range(config.own()):
        TileLoader(maps).load(
            queries.stage() + UInt32(i * BOX), queries.barrier(), first + Int32(i * DEPTH), row
        )


@always_inline
def _attend[
    dtype: DType, config: Config
](
    queries: UInt32,
    mut tiles: Pipeline,
    problem: Problem,
    at: Fragment,
    *,
    junk: UInt32,
    begin: Int32,
    end: Int32,
):
    """Attends from the tile's rows `begin` to `end`, those of an image, for the consumer's heads.

    A head's result takes the place of its queries. Values are multiplied a head behind the keys, under
    the softmax of the next scores.
    """
    comptime OWN = config.own()
    comptime STEP = UInt32(config.consumers)
    var leads = at.leads()
    var row = at.warp() * 16 + at.lane() % 16
    var elsewhere = UInt32(0) if row >= begin and row < end else junk
    var scores = Sums[KEYS](fill=0)
    tiles.wait()
    wgmma_fence_aligned()
    scores = mma[dtype, KEYS, clear=True](Matrix(queries), Matrix(tiles.stage()), scores)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    if leads:
        tiles.release()
    tiles.advance(STEP)
    var inverse = _exponentials(scores, problem, at)
    comptime for head in range(OWN):
        var p = _padded(rounded[dtype](scores))
        tiles.wait()
        var values = tiles
        tiles.advance(STEP)
        comptime if head + 1 < OWN:
            tiles.wait()
            wgmma_fence_aligned()
            var next = queries + UInt32((head + 1) * BOX)
            scores = mma[dtype, KEYS, clear=True](Matrix(next), Matrix(tiles.stage()), scores)
            wgmma_commit_group_sync()
        else:
            wgmma_fence_aligned()
        var sums = mma_registers[dtype, turned=True](p, Matrix(values.stage()), Sums[DEPTH](fill=0))
        wgmma_commit_group_sync()
        var next_inverse = inverse
        comptime if head + 1 < OWN:
            wgmma_wait_group_sync[1]()
            if leads:
                tiles.release()
            tiles.advance(STEP)
            next_inverse = _exponentials(scores, problem, at)
        wgmma_wait_group_sync[0]()
        if leads:
            values.release()
        _store[dtype](queries + UInt32(head * BOX), at, settled(sums), inverse, elsewhere)
        inverse = next_inverse


@always_inline
def _exponentials(mut scores: Sums[KEYS], problem: Problem, at: Fragment) -> SIMD[F32, 2]:
    """Turns scores into powers of two, and gives the inverse sums of the thread's two rows."""
    scores = settled(scores)
    mask_keys(scores, at.column(), problem.s)
    var softmax = Softmax(problem.scale)
    _ = softmax.update(scores)
    scores = settled(scores)
    return softmax.inverse_sums(1)


@always_inline
def _padded[count: Int, //](p: StaticTuple[UInt32, count]) -> StaticTuple[UInt32, ROWS // 4]:
    """Adds zeros, the probabilities of the keys that a tile of values has room for."""
    var all = StaticTuple[UInt32, ROWS // 4](fill=0)
    comptime for i in range(count):
        all[i] = p[i]
    return all


@always_inline
def _store[
    dtype: DType
](rows: UInt32, at: Fragment, sums: Sums[DEPTH], scale: SIMD[F32, 2], junk: UInt32):
    """Stores a head's results in the place of its queries; all threads of a warp call this.

    `junk` is where the results go of the row that the lane names, if that is of another image; else 0.
    """
    comptime for k in range(DEPTH // 16):
        var v = sums_16x16[k](sums)
        comptime for i in range(8):
            v[i] *= scale[i // 2 % 2]
        var to = row_16x16[k](rows, at)
        shared_store_matrices(junk if junk != 0 else to, bitcast[DType.uint32, 4](v.cast[dtype]()))


@always_inline
def _finish[
    dtype: DType, config: Config
](
    mut tiles: Pipeline,
    sums: Sums[config.columns()],
    y: TileStore,
    moments: Norm,
    problem: Problem,
    at: Fragment,
    first: Int32,
    row: Int32,
):
    """Adds the residual, stores the results from its place, and leaves their moments."""
    comptime OWN = config.own()
    comptime STEP = UInt32(config.consumers)
    var boxes = tiles
    var results = finish_boxes[dtype, OWN](tiles, STEP, at, sums, barrier=UInt32(at.group()) + 1)
    comptime for _ in range(OWN):
        tiles.advance(STEP)
    if at.leads():
        var stored = boxes
        comptime for box in range(OWN):
            y.store(stored.stage(), first + Int32(box * DEPTH), row)
            stored.advance(STEP)
        stores_commit()
    var low = row + at.row()
    leave_moments(
        results,
        moments,
        at,
        low=low if low < problem.m else -1,
        high=low + 8 if low + 8 < problem.m else -1,
        f0=first,
    )
    if at.leads():
        stores_read()
        comptime for _ in range(OWN):
            boxes.release()
            boxes.advance(STEP)


# The host's side


comptime CONSUMERS = 3
"""Of a block: with 2, 50,432 rows of 384 channels take as long, and 6,304 take 1.08 times as long."""
comptime W_STAGES = 6
"""Stages of w: as many as there is room for with 6 heads."""


def fills(rows: Int, device: Device) -> Bool:
    """Tells whether the kernel is faster than an attention and a product.

    It is where multiprocessors have tiles for three quarters of the time (H100, 6 heads, 2026-11-28).

    Args:
        rows: Queries of all images.
        device: The GPU.

    Returns:
        Whether there are such tiles.
    """
    var tiles = ceildiv(rows, ROWS)
    return 4 * tiles >= 3 * device.multiprocessors * device.waves(tiles)


def enqueue_attention_linear[
    dtype: DType, //, heads: Int
](o: Attention[dtype], linear: Operands[dtype], moments: Norm, ctx: DeviceContext) raises:
    """Enqueues the kernel.

    Parameters:
        dtype: Either bfloat16 or float16.
        heads: Of 64 channels each, a multiple of 3.

    Args:
        o: The attention, of up to 56 keys; its result is not stored.
        linear: Weights [C, C], bias, residual and result [N, T, C] of the linear layer.
        moments: Of the rows of the result.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime C = heads * DEPTH
    comptime config = Config(heads, CONSUMERS, W_STAGES)
    var problem = Problem(o)
    var maps = TensorMaps[6]()
    var m = Int(problem.m)
    var n, s, c = Int64(o.n), Int64(o.s), Int64(C)
    maps.maps[0] = matrix_map[dtype](ctx, o.q, rows=m, columns=C, box=ROWS)
    maps.maps[1] = tensor_map[dtype, 3](ctx, o.k, [c, s, n], [Int32(DEPTH), Int32(ROWS), 1])
    maps.maps[2] = tensor_map[dtype, 3](ctx, o.v, [c, s, n], [Int32(DEPTH), Int32(ROWS), 1])
    maps.maps[3] = matrix_map[dtype](ctx, linear.w, rows=C, columns=C, box=config.columns())
    maps.maps[4] = matrix_map[dtype](ctx, linear.residual, rows=m, columns=C, box=ROWS)
    maps.maps[5] = matrix_map[dtype](ctx, linear.y, rows=m, columns=C, box=ROWS)
    launch[attention_linear_kernel[dtype, config]](
        ctx,
        maps,
        linear.bias,
        moments,
        problem,
        grid_dim=problem.schedule.blocks(Device(ctx).multiprocessors),
        block_dim=Warps[config].THREADS,
        shared=Storage[config].BYTES,
    )
