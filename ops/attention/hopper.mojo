"""Attention on Hopper's tensor cores: y = softmax(scale * q k^T) v in one kernel.

    q[N, T, C], k[N, S, C], v[N, S, C], y[N, T, C], each head `depth` neighbouring channels of C

FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): one thread, the producer, has the copy engine
(TMA) bring keys and values into a ring of stages in shared memory; `groups` warpgroups of 128
threads, the consumers, take 64 queries each and walk over the stages by wgmma. Scores are float32
sums in registers; probabilities, rounded to the dtype of v, go from registers into the second
product, which reads the values as they lie, turned over by its matrix descriptor. The second
product of a tile of keys runs under the exponentials of the next one, and all products of a
consumer under the exponentials of the others: they take turns at issuing them.

An item is a head, or a part of its queries: `period` tiles of 64 queries that share one filling of
the ring. Where the ring holds the keys of two items or more, the multiprocessors' shares decide how
long it is; elsewhere it is one tile for each consumer. A block goes from item to item, its consumers
from tile of queries to tile of queries, whichever item that is of. T and S need not fit the tiles:
the copy engine fills what is missing with zeros, and scores of missing keys are minus infinity.

Where there is one head, a linear layer can follow in the same kernel (`Config.projected`): a tile's
result, rounded, goes from registers into the product with the layer's weights. The residual comes
when the queries have been read; sums, the residual added, take its place, and leave from there.

A head is one or more boxes of rows of 64 channels, or 32, side by side in shared memory: a tile of a
matrix is a box after a box. The first product goes through the boxes as through K, the second finds
its columns in them.

Exponentials and products take as long as each other in heads of 64 channels; docs/kernels.md has
the figures.
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
from std.utils.static_tuple import StaticTuple

from ..choice import Cheapest
from ..device import Device
from ..hopper.accumulator import Fragment, Sums, bias_of_columns
from ..hopper.direct_store import store_rows
from ..hopper.epilogue import finish_boxes
from ..hopper.mma import ROWS, Matrix, mma, mma_registers, settled
from ..hopper.moments import Norm, leave_moments
from ..hopper.pipeline import OrderedSequence, Pipeline
from ..hopper.ptx import (
    fence_barrier_init,
    stores_commit,
    stores_read,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.scheduler import TileScheduler
from ..hopper.shared import ROW, WARPGROUP, SharedAllocator, bytes_until, shared_memory
from ..hopper.tma import TensorMaps, TileLoader, TileStore, matrix_map, tensor_map
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import F32, Data, Operands, dtypes
from ..rows import over_lanes
from .config import LOG2_E, Attention, Standing, affine
from .mask import Mask, MaskSizes, MaskTensors
from .softmax import Softmax, mask_keys, rescale, rounded
from .tile_mask import TileMask


@fieldwise_init
struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var depth: Int
    """Channels of a head: 32, 64, 96 or 128."""
    var groups: Int
    """Consumers, of 64 queries each."""
    var keys: Int
    """Keys of a tile, a multiple of 16."""
    var stages: Int
    """Stages of the ring, of a tile of keys and one of values."""
    var projected: Bool
    """Whether a linear layer multiplies the results before they are stored: those of the only head."""

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Channels, consumers, keys and stages.
        """
        return String(t"{self.depth}_{self.groups}x{self.keys}x{self.stages}")

    def op(self) -> String:
        """Names what is computed, for a profiler.

        Returns:
            The op.
        """
        return "attention_linear" if self.projected else "attention"

    @always_inline
    def row(self) -> Int:
        """Counts the bytes of a box's row.

        Returns:
            128, or 64 where a head is no multiple of that.
        """
        return ROW if self.depth % 64 == 0 else ROW // 2

    @always_inline
    def boxes(self) -> Int:
        """Counts the boxes of a tile of queries, keys or values.

        Returns:
            As many as rows make up a head.
        """
        return 2 * self.depth // self.row()

    @always_inline
    def tile(self) -> Int:
        """Counts the bytes of a tile of keys, or of values.

        Returns:
            Two for each channel.
        """
        return self.keys * 2 * self.depth

    @always_inline
    def queries(self) -> Int:
        """Counts the bytes of a tile of queries.

        Returns:
            Two for each channel.
        """
        return ROWS * 2 * self.depth

    @always_inline
    def maps(self) -> Int:
        """Counts the tensor maps.

        Returns:
            Those of q, k and v, and of the layer's weights, residual and result.
        """
        return 6 if self.projected else 3


def short(depth: Int) -> Config:
    """Chooses the tiles for up to 64 keys: one tile of them.

    Args:
        depth: Channels of a head.

    Returns:
        The sizes.
    """
    if depth == 96:
        return Config(depth, 3, 64, 7, False)
    if depth == 128:
        return Config(depth, 2, 64, 6, False)
    return Config(depth, 3, 64, 12, False)


def long(depth: Int) -> Config:
    """Chooses the tiles for more keys.

    Args:
        depth: Channels of a head.

    Returns:
        The sizes.
    """
    if depth == 96:
        return Config(depth, 2, 112, 4, False)
    if depth == 128:
        return Config(depth, 2, 112, 3, False)
    return Config(depth, 3, 80, 9, False)


comptime PROJECTED = Config(64, 3, 80, 8, True)
"""The tiles for the only head of 64 channels, and a linear layer behind."""


def least_keys(depth: Int) -> Int:
    """Tells from how many keys on the kernel is faster than flash.mojo's (H200, 2026-11-23).

    Args:
        depth: Channels of a head.

    Returns:
        Keys of an image.
    """
    return 129 if depth == 32 else 65 if depth == 96 else 1


comptime Warps[config: Config] = Roles[config.groups, moves_registers=True]
"""Which warps of a block do what.

Parameters:
    config: Of the kernel.
"""


struct Storage[config: Config](TrivialRegisterPassable):
    """What a block has in its shared memory.

    Parameters:
        config: Sizes of the tiles.
    """

    comptime BYTES = bytes_until(Self(0).end)
    """Bytes that a launch asks for."""

    var tiles: Pipeline
    """A tile of keys and one of values, two parts of a stage: keys have come, values have, both have been read."""
    var queries: Pipeline
    """Those of the first consumer, a ring of one stage. Its first thread is the producer too: it knows when
    they have been read."""
    var residual: Pipeline
    """Of the first consumer's rows, likewise; the result replaces it."""
    var weights: Pipeline
    """Of the linear layer, a ring of one stage; these two take no room without such a layer."""
    var end: UInt32
    """First address behind all of these."""

    @always_inline
    def __init__(out self, data: UInt32):
        """Divides shared memory.

        Args:
            data: Its address.
        """
        comptime C = Self.config
        comptime STAGES = Int32(C.stages)
        comptime TILES = UInt32(2 * C.tile())
        comptime QUERIES = UInt32(C.queries())
        comptime RESIDUALS = C.groups if C.projected else 0
        comptime WEIGHTS = 1 if C.projected else 0
        comptime WEIGHTS_BYTES = UInt32(2 * C.depth * C.depth)
        var memory = SharedAllocator(data)
        var tiles = memory.take(UInt32(STAGES) * TILES)
        var queries = memory.take(UInt32(C.groups) * QUERIES)
        var residuals = memory.take(UInt32(RESIDUALS) * QUERIES)
        var weights = memory.take(UInt32(WEIGHTS) * WEIGHTS_BYTES)
        self.tiles = Pipeline(tiles, memory, stages=STAGES, bytes=TILES, parts=2)
        self.queries = Pipeline(queries, memory, stages=1, bytes=QUERIES, rings=C.groups)
        self.residual = Pipeline(residuals, memory, stages=1, bytes=QUERIES, rings=RESIDUALS)
        self.weights = Pipeline(weights, memory, stages=1, bytes=WEIGHTS_BYTES, rings=WEIGHTS)
        self.end = memory.end

    @always_inline
    def init(self, period: Int32):
        """Prepares the barriers, by one thread.

        Args:
            period: How many tiles of queries read the keys and values of an item.
        """
        self.tiles.init[Self.config.stages](consumers=Int(period))
        comptime for i in range(Self.config.groups):
            self.queries.of_consumer(UInt32(i)).init[1](consumers=1)
        comptime if Self.config.projected:
            self.weights.init[1](consumers=1)
            comptime for i in range(Self.config.groups):
                self.residual.of_consumer(UInt32(i)).init[1](consumers=1)
        fence_barrier_init()


struct Problem[dtype: DType, out: DType](KernelArgument, TrivialRegisterPassable):
    """The sizes of an attention, and its items.

    Parameters:
        dtype: Of q, k and v.
        out: Of y.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var t: Int32
    """Queries of an image."""
    var s: Int32
    """Keys of an image."""
    var c: Int32
    """Channels of all heads."""
    var heads: Int32
    """Heads."""
    var key_tiles: Int32
    """Tiles of keys."""
    var period: Int32
    """Tiles of queries of an item."""
    var scale: Float32
    """Scales the scores, for powers of two."""
    var schedule: TileScheduler[]
    """The items: rows are the heads of all images, columns the items of a head."""
    var result: Standing[Self.dtype, Self.out]
    """What 8 bits of the result stand for."""

    def __init__(out self, o: Attention[Self.dtype, Self.out], config: Config, device: Device):
        """Divides an attention into tiles and items.

        Args:
            o: Sizes.
            config: Sizes of the tiles.
            device: The GPU.
        """
        var heads = Int(o.n * o.heads)
        var query_tiles = ceildiv(Int(o.t), ROWS)
        var key_tiles = ceildiv(Int(o.s), config.keys)
        var period = _period(query_tiles, key_tiles, heads, config, device)
        self.t, self.s, self.c, self.heads = o.t, o.s, o.c, o.heads
        self.key_tiles, self.period = Int32(key_tiles), Int32(period)
        self.scale = o.scale * LOG2_E
        self.result = o.result
        self.schedule = TileScheduler[]([heads], columns=ceildiv(query_tiles, period))

    @always_inline
    def item[depth: Int](self, number: Int32) -> Item:
        """Finds what an item is of.

        Parameters:
            depth: Channels of a head.

        Args:
            number: Of the item.

        Returns:
            Image, channel and tile of queries.
        """
        var item = self.schedule.tile(number)
        var n = item.row // self.heads
        return Item(n, (item.row - n * self.heads) * Int32(depth), item.column * self.period)

    @always_inline
    def rounds(self, consumers: Int32) -> Int32:
        """Counts the tiles of queries that the block's items leave to each consumer.

        Args:
            consumers: Of a block.

        Returns:
            How many; some consumers have one less.
        """
        var turns = self.schedule.turns()
        var items = ceildiv(turns.end - turns.start, turns.step)
        return ceildiv(items * self.period, consumers)


struct Result[dtype: DType, out: DType, projected: Bool](KernelArgument, TrivialRegisterPassable):
    """Where results go: to y, or through a linear layer.

    Parameters:
        dtype: Of q, k and v, and of that layer's tensors.
        out: Of y.
        projected: Whether there is such a layer.
    """

    comptime LAYERS = 1 if Self.projected else 0
    """How many layers there are: kernels without one receive nothing of it."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var y: Data[Self.out]
    """Result y[N, T, C]; not written if there is a layer."""
    var bias: StaticTuple[Data[F32], Self.LAYERS]
    """Of the layer [C]."""
    var moments: StaticTuple[Norm, Self.LAYERS]
    """Of the rows of its result."""

    def __init__(
        out self, y: Data[Self.out], linear: Optional[Operands[Self.dtype]], moments: Optional[Norm]
    ):
        """Names the tensors.

        Args:
            y: Result of the attention.
            linear: The layer's, if there is one.
            moments: Of the rows of its result.
        """
        self.y = y
        self.bias = StaticTuple[Data[F32], Self.LAYERS]()
        self.moments = StaticTuple[Norm, Self.LAYERS]()
        comptime if Self.projected:
            self.bias[0], self.moments[0] = linear.value().bias, moments.value()


@fieldwise_init
struct Item(TrivialRegisterPassable):
    """What an item is of."""

    var n: Int32
    """Image."""
    var channel: Int32
    """First channel of the head."""
    var tile: Int32
    """First tile of queries of the head."""


struct QueryTile[depth: Int](TrivialRegisterPassable):
    """A tile of a consumer's queries: consumers take turns at those of the block's items.

    Parameters:
        depth: Channels of a head.
    """

    var turn: Int32
    """How many items the block had before this tile's."""
    var index: Int32
    """Which of the item's tiles it is."""
    var n: Int32
    """Image."""
    var channel: Int32
    """First channel of the head."""
    var first: Int32
    """First query; T or more if there is none."""

    @always_inline
    def __init__(out self, problem: Problem[...], consumer: Int32):
        """Begins with a consumer's first tile.

        Args:
            problem: Sizes.
            consumer: Number of the consumer.
        """
        self.turn, self.index = 0, consumer
        self.n = self.channel = self.first = 0
        self._find(problem)

    @always_inline
    def _number(self, problem: Problem[...]) -> Int32:
        """Numbers the item."""
        var turns = problem.schedule.turns()
        return turns.start + self.turn * turns.step

    @always_inline
    def _find(mut self, problem: Problem[...]):
        """Finds the queries."""
        var item = problem.item[Self.depth](self._number(problem))
        self.n, self.channel = item.n, item.channel
        self.first = (item.tile + self.index) * Int32(ROWS)

    @always_inline
    def advance(mut self, problem: Problem[...], consumers: Int32):
        """Goes on to the consumer's next tile; an item has one for each consumer at least.

        Args:
            problem: Sizes.
            consumers: How many there are.
        """
        self.index += consumers
        self.first += consumers * Int32(ROWS)
        if self.index >= problem.period:
            self.index -= problem.period
            self.turn += 1
            self._find(problem)

    @always_inline
    def has_item(self, problem: Problem[...]) -> Bool:
        """Tells whether there is such an item, whose keys and values come.

        Args:
            problem: Sizes.

        Returns:
            False after the block's last.
        """
        return self._number(problem) < problem.schedule.tiles


struct _Maps:
    """Which tensor map is which; the last three are those of a linear layer."""

    comptime Q = 0
    comptime K = 1
    comptime V = 2
    comptime W = 3
    comptime RESIDUAL = 4
    comptime Y = 5


@__name(t"{config.op()}_hopper_{mask.label()}{config.label()}_{dtypes[dtype, out]()}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def hopper_attention_kernel[
    dtype: DType, out: DType, config: Config, mask: Mask
](
    maps: TensorMaps[config.maps()],
    result: Result[dtype, out, config.projected],
    problem: Problem[dtype, out],
    tensors: MaskTensors[dtype],
):
    """Computes every grid-th item.

    Parameters:
        dtype: Either bfloat16 or float16.
        out: Of the result: the same, or of 8 bits.
        config: Sizes of the tiles.
        mask: What is done to the scores.

    Args:
        maps: Tensor maps of q, k and v, and of a linear layer's weights, residual and result.
        result: Result y[N, T, C], or the other tensors of that layer.
        problem: Sizes.
        tensors: What masks read.
    """
    comptime assert config.keys % 16 == 0, "attention: a step of wgmma takes 16 keys"
    comptime assert config.depth % 32 == 0, "attention: a box has 32 channels, or 64"
    comptime assert not config.projected or (
        config.depth == 64 and out == dtype and not mask.some() and not mask.logsumexp
    ), "attention: a linear layer takes 64 channels, without masks or 8 bits"
    var storage = Storage[config](shared_memory["hopper_attention"]())
    var t = Int32(thread_idx.x)
    if t == 0:
        storage.init(problem.period)
    sync_threads(0, UInt32(Warps[config].THREADS))
    launch_dependent_grids()

    if Warps[config].produces(t):
        Warps[config].give_registers()
        if Warps[config].drives(t):
            _produce[mask](maps.address(), problem, tensors.sizes, storage)
    else:
        Warps[config].take_registers()
        _consume[dtype, mask](maps.address(), result, problem, tensors, storage, Fragment(t))


@always_inline
def _values[config: Config](pipeline: Pipeline) -> Pipeline:
    """Views the values of the stages, the second part; the pipeline itself shows the keys."""
    return pipeline.part(1, UInt32(config.tile()))


@always_inline
def _columns[config: Config](values: UInt32) -> Matrix[config.row()]:
    """Describes a tile of values, read turned over: its columns go on in further boxes."""
    return {values, pitch = config.keys * config.row() if config.boxes() > 1 else 16}


@always_inline
def _load[
    config: Config, rows: Int
](tensor: TileLoader, to: Pipeline, channel: Int32, row: Int32, n: Int32):
    """Starts copying a head's channels of some rows to the next stage, box after box."""
    comptime PITCH = rows * config.row()
    comptime for box in range(config.boxes()):
        var first = channel + Int32(box * config.row() // 2)
        tensor.load(to.stage() + UInt32(box * PITCH), to.barrier(), first, row, n)


@always_inline
def _produce[
    config: Config, //, mask: Mask
](maps: UInt64, problem: Problem[...], sizes: MaskSizes, storage: Storage[config]):
    """Fills the ring with keys and values, item after item, as stages become free.

    Stages of keys that no query of the item sees come as they are.
    """
    comptime TILE = UInt32(config.tile())
    var k = TileLoader(maps, _Maps.K)
    var v = TileLoader(maps, _Maps.V)
    k.prefetch_descriptor()
    v.prefetch_descriptor()
    comptime if config.projected:
        # Weights do not depend on the kernel before.
        var weights = storage.weights
        weights.expect(weights.bytes)
        TileLoader(maps, _Maps.W).load(weights.stage(), weights.barrier(), 0, 0)
    wait_on_dependent_grids()
    var pipeline = storage.tiles
    for number in problem.schedule.turns():
        var item = problem.item[config.depth](number)
        var seen = problem.key_tiles
        comptime if mask.causal:
            var last = min((item.tile + problem.period) * Int32(ROWS), problem.t) - 1
            seen = sizes.tiles[mask, config.keys](last, problem.key_tiles)
        for tile in range(problem.key_tiles):
            var first = tile * Int32(config.keys)
            var values = _values[config](pipeline)
            pipeline.acquire()
            comptime if mask.causal:
                if tile >= seen:
                    pipeline.commit()
                    values.commit()
                    pipeline.advance()
                    continue
            pipeline.expect(TILE)
            _load[config, config.keys](k, pipeline, item.channel, first, item.n)
            values.expect(TILE)
            _load[config, config.keys](v, values, item.channel, first, item.n)
            pipeline.advance()


@always_inline
def _consume[
    out: DType, config: Config, //, dtype: DType, mask: Mask
](
    maps: UInt64,
    result: Result[dtype, out, config.projected],
    problem: Problem[...],
    tensors: MaskTensors[dtype],
    storage: Storage[config],
    at: Fragment,
):
    """Attends from every tile of queries that is this consumer's.

    Values are multiplied a tile behind the keys, under the softmax of the next scores.
    """
    comptime KEYS = config.keys
    comptime GROUPS = Int32(config.groups)
    var leads = at.leads()
    var column = at.column()
    var q = TileLoader(maps, _Maps.Q)
    var queries = storage.queries.of_consumer(UInt32(at.group()))
    var next = QueryTile[config.depth](problem, at.group())
    if leads:
        q.prefetch_descriptor()
        wait_on_dependent_grids()
        _load_queries[config](q, queries, next, problem)
    comptime if mask.reads():
        wait_on_dependent_grids()
    var residual = storage.residual.of_consumer(UInt32(at.group()))

    # One consumer's products run under the others' exponentials.
    var order = OrderedSequence(at.group(), GROUPS)
    var scores = StaticTuple[Float32, KEYS // 2](fill=0)
    for _ in range(problem.rounds(GROUPS)):
        var tile = next
        next.advance(problem, GROUPS)
        var pipeline = storage.tiles
        pipeline.advance(UInt32(tile.turn * problem.key_tiles))
        if not tile.has_item(problem) or tile.first >= problem.t:
            _skip[config](pipeline, queries, order, problem, tile, at)
            if leads:
                _load_queries[config](q, queries, next, problem)
            continue

        var masks = TileMask[dtype, mask, KEYS](
            tensors,
            at,
            n=tile.n,
            head=tile.channel // Int32(config.depth),
            query=tile.first + at.row(),
            t=problem.t,
            s=problem.s,
        )
        var last = min(tile.first + Int32(ROWS), problem.t) - 1
        var key_tiles = tensors.sizes.tiles[mask, KEYS](last, problem.key_tiles)
        var softmax = Softmax(1 if mask.bias else problem.scale)
        var sums = StaticTuple[Float32, config.depth // 2](fill=0)
        queries.wait()
        pipeline.wait()
        wgmma_fence_aligned()
        scores = _multiply[dtype, config](queries.stage(), pipeline.stage(), scores)
        wgmma_commit_group_sync()
        var bias = masks.load_bias(0)
        wgmma_wait_group_sync[0]()
        var before = pipeline.index
        for i in range(key_tiles - 1):
            scores = settled(scores)
            masks.apply(scores, bias, i * Int32(KEYS), problem.scale)
            var factor = softmax.update(scores)
            scores = settled(scores)
            var values = _values[config](pipeline)
            values.wait()
            var v = values.stage()
            pipeline.advance()
            pipeline.wait()
            # The values of the tile before have been added.
            wgmma_wait_group_sync[0]()
            sums = settled(sums)
            if leads and i > 0:
                pipeline.release(before)
            before = values.index
            rescale(sums, factor)
            var p = rounded[dtype](scores)
            order.wait()
            wgmma_fence_aligned()
            scores = _multiply[dtype, config](queries.stage(), pipeline.stage(), scores)
            wgmma_commit_group_sync()
            sums = mma_registers[dtype, turned=True](p, _columns[config](v), sums)
            wgmma_commit_group_sync()
            order.arrive()
            bias = masks.load_bias((i + 1) * Int32(KEYS))
            wgmma_wait_group_sync[1]()

        # These queries have been read: the next ones may come in their place.
        scores = settled(scores)
        queries.advance()
        if leads:
            comptime if config.projected:
                stores_read()
                residual.expect(residual.bytes)
                TileLoader(maps, _Maps.RESIDUAL).load(
                    residual.stage(), residual.barrier(), 0, tile.first, tile.n
                )
            _load_queries[config](q, queries, next, problem)
        var first = (key_tiles - 1) * Int32(KEYS)
        masks.apply(scores, bias, first, problem.scale)
        mask_keys(scores, column, problem.s - first)
        var factor = softmax.update(scores)
        scores = settled(scores)
        var values = _values[config](pipeline)
        values.wait()
        wgmma_wait_group_sync[0]()
        sums = settled(sums)
        if leads and key_tiles > 1:
            pipeline.release(before)
        rescale(sums, factor)
        var p = rounded[dtype](scores)
        wgmma_fence_aligned()
        sums = mma_registers[dtype, turned=True](p, _columns[config](values.stage()), sums)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        sums = settled(sums)
        if leads:
            pipeline.release()
        comptime if mask.logsumexp:
            var row = tile.first + at.row()
            var head = tile.n * problem.heads + tile.channel // Int32(config.depth)
            comptime for half in range(2):
                var sum = over_lanes[4](softmax.sum[half])
                if column == 0 and row + Int32(8 * half) < problem.t:
                    tensors.keep(
                        Int(head) * Int(problem.t) + Int(row) + 8 * half,
                        softmax.highest[half] * softmax.scale,
                        sum,
                    )
        comptime if config.projected:
            sums = _multiply_result[dtype, config](
                storage.weights, sums, softmax.inverse_sums(1), result.bias[0], at
            )
            var stored = finish_boxes[dtype, 1](residual, 1, at, sums, barrier=_own[config](at))
            if leads:
                TileStore(maps, _Maps.Y).store(residual.stage(), 0, tile.first, tile.n)
                stores_commit()
            residual.advance()
            var row = tile.first + at.row()
            var place = tile.n * problem.t + row
            leave_moments(
                stored,
                result.moments[0],
                at,
                low=place if row < problem.t else -1,
                high=place + 8 if row + 8 < problem.t else -1,
            )
        else:
            var stands = affine(problem.result)
            store_rows[out, config.depth](
                result.y,
                at,
                sums,
                softmax.inverse_sums(stands.scale),
                row=tile.n * problem.t + tile.first,
                rows=problem.t - tile.first,
                column=tile.channel,
                pitch=problem.c,
                zero=stands.zero,
            )
        comptime if mask.causal:
            pipeline.advance()
            _skip_keys[config](pipeline, order, at, key_tiles, problem.key_tiles, filled=True)
    comptime if config.projected:
        if leads:
            stores_read()


@always_inline
def _multiply_result[
    dtype: DType, config: Config
](
    weights: Pipeline, sums: Sums[config.depth], scale: SIMD[F32, 2], bias: Data[F32], at: Fragment
) -> Sums[config.depth]:
    """Multiplies a head's result by the layer's weights, and adds the bias.

    The result, scaled and rounded, is the left side as it lies in the registers.
    """
    var result = sums
    rescale(result, scale)
    var left = rounded[dtype](result)
    var total = bias_of_columns[config.depth](bias.unsafe_offset(Int(at.column())))
    weights.wait()
    wgmma_fence_aligned()
    total = mma_registers[dtype](left, Matrix(weights.stage()), total)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    return settled(total)


@always_inline
def _load_queries[
    config: Config
](q: TileLoader, queries: Pipeline, tile: QueryTile[_], problem: Problem[...]):
    """Starts copying the queries of a tile, if there is such an item."""
    if tile.has_item(problem):
        queries.expect(UInt32(config.queries()))
        _load[config, ROWS](q, queries, tile.channel, tile.first, tile.n)


@always_inline
def _skip[
    config: Config
](
    at_start: Pipeline,
    mut queries: Pipeline,
    order: OrderedSequence,
    problem: Problem[...],
    tile: QueryTile[_],
    at: Fragment,
):
    """Lets go of the stages and passes the turn on, for a tile without queries.

    Warps that no product keeps together must not be a phase behind.
    """
    var has_item = tile.has_item(problem)
    _skip_keys[config](at_start, order, at, 0, problem.key_tiles, filled=has_item)
    if has_item:
        queries.wait()
        queries.advance()
        sync_threads(_own[config](at), UInt32(WARPGROUP))


@always_inline
def _own[config: Config](at: Fragment) -> UInt32:
    """Numbers the barrier of a consumer's own threads."""
    return OrderedSequence.own_barrier(at.group(), Int32(config.groups))


@always_inline
def _skip_keys[
    config: Config
](
    at_start: Pipeline,
    order: OrderedSequence,
    at: Fragment,
    begin: Int32,
    end: Int32,
    *,
    filled: Bool,
):
    """Lets go of the stages of some tiles of keys, if they are filled, and passes the turns on."""
    var pipeline = at_start
    for i in range(begin, end):
        if filled:
            pipeline.wait()
            _values[config](pipeline).wait()
            sync_threads(_own[config](at), UInt32(WARPGROUP))
            if at.leads():
                pipeline.release()
            pipeline.advance()
        if i > 0:
            order.wait()
            order.arrive()


@always_inline
def _multiply[
    dtype: DType, config: Config
](q: UInt32, k: UInt32, scores: StaticTuple[Float32, config.keys // 2]) -> StaticTuple[
    Float32, config.keys // 2
]:
    """Starts the products of queries and a tile of keys; `scores` lends its registers."""
    comptime ROW = config.row()
    return mma[
        dtype,
        config.keys,
        boxes=config.boxes(),
        pitch=ROWS * ROW,
        pitch_b=config.keys * ROW,
        clear=True,
    ](Matrix[ROW](q), Matrix[ROW](k), scores)


# The host's side


def _period(query_tiles: Int, key_tiles: Int, heads: Int, config: Config, device: Device) -> Int:
    """Chooses how many tiles of queries share one filling of the ring.

    There is one for each consumer, or, where the ring holds the keys of two items, as many as leave
    the multiprocessors the least to do.
    """
    var choice = Cheapest(config.groups)
    if 2 * key_tiles > config.stages:
        # Consumers that take turns must not wait for different items.
        return choice.best
    for parts in range(1, query_tiles + 1):
        var each = max(ceildiv(query_tiles, parts), config.groups)
        var items = heads * ceildiv(query_tiles, each)
        # A filling costs about as much as a tile of each consumer.
        choice.offer(each, Float64(device.waves(items) * (each + config.groups)))
    return choice.best


def enqueue_hopper[
    out: DType, //, dtype: DType, config: Config, mask: Mask
](
    o: Attention[dtype, out],
    tensors: MaskTensors[dtype],
    ctx: DeviceContext,
    *,
    linear: Optional[Operands[dtype]] = None,
    moments: Optional[Norm] = None,
) raises:
    """Enqueues the kernel.

    Parameters:
        out: Of the result: that of q, or of 8 bits.
        dtype: Either bfloat16 or float16.
        config: Sizes of the tiles.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes; heads of `config.depth` channels.
        tensors: What masks read.
        ctx: The GPU.
        linear: Weights, bias, residual and result of the linear layer, if the config has one; y of
            `o` is not stored then.
        moments: Of the rows of that layer's result.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var device = Device(ctx)
    var problem = Problem(o, config, device)
    var maps = TensorMaps[config.maps()]()
    var n, t, s, c = Int64(o.n), Int64(o.t), Int64(o.s), Int64(o.c)
    var channels = Int32(config.row() // 2)
    var keys = Int32(config.keys)
    maps.maps[_Maps.Q] = tensor_map[dtype, 3](ctx, o.q, [c, t, n], [channels, Int32(ROWS), 1])
    maps.maps[_Maps.K] = tensor_map[dtype, 3](ctx, o.k, [c, s, n], [channels, keys, 1])
    maps.maps[_Maps.V] = tensor_map[dtype, 3](ctx, o.v, [c, s, n], [channels, keys, 1])
    comptime if config.projected:
        var l = linear.value()
        maps.maps[_Maps.W] = matrix_map[dtype](
            ctx, l.w, rows=config.depth, columns=config.depth, box=config.depth
        )
        maps.maps[_Maps.RESIDUAL] = tensor_map[dtype, 3](
            ctx, l.residual, [c, t, n], [channels, Int32(ROWS), 1]
        )
        maps.maps[_Maps.Y] = tensor_map[dtype, 3](ctx, l.y, [c, t, n], [channels, Int32(ROWS), 1])
    launch[hopper_attention_kernel[dtype, out, config, mask]](
        ctx,
        maps,
        Result[dtype, out, config.projected](o.y, linear, moments),
        problem,
        tensors,
        grid_dim=problem.schedule.blocks(device.multiprocessors),
        block_dim=Warps[config].THREADS,
        shared=Storage[config].BYTES,
    )
