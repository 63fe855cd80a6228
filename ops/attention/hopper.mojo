"""Attention on Hopper's tensor cores: y = softmax(scale * q k^T) v in one kernel, heads of 64.

    q[N, T, C], k[N, S, C], v[N, S, C], y[N, T, C], each head 64 neighbouring channels of C

FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): one warp, the producer, has the copy engine
(TMA) bring keys and values into a ring of stages in shared memory; `groups` warpgroups of 128
threads, the consumers, take 64 queries each and walk over the stages by wgmma. Scores are float32
sums in registers; probabilities, rounded to the dtype of v, go from registers into the second
product, which reads the values as they lie, turned over by its matrix descriptor. The second
product of a tile of keys runs under the exponentials of the next one, and all products of a
consumer under the exponentials of the others: they take turns at issuing them.

An item is a head, or a part of its queries: `period` blocks of 64 queries that share one filling of
the ring. Where the ring holds the keys of two items or more, the multiprocessors' shares decide how
long it is; elsewhere it is one block for each consumer. A block goes from item to item, its
consumers from block of queries to block of queries, whichever item that is of. T and S need not fit
the tiles: the copy engine fills what is missing with zeros, and scores of missing keys are minus
infinity.

Exponentials and products take as long as each other in heads of 64 channels; docs/kernels.md has
the figures.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.math import ceildiv, exp2
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple

from ..gemm.old import GROUP, MAP, ROW, ROWS, Maps, Ring, tensor_map
from ..hopper.mma import mma_registers, settled
from ..hopper.ptx import (
    arrive_threads,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    fence_barrier_init,
    load_3d,
    prefetch_map,
    registers_give,
    registers_take,
    sync_threads,
)
from ..kernel_argument import KernelArgument
from ..operands import F32, Data
from ..rows import over_lanes
from .config import LOG2_E, LOWEST, Attention
from .flash import U32, packed, reciprocal

comptime DEPTH = 64
"""Channels of a head: a row of the 128-byte swizzle."""
comptime QUERIES = ROWS * ROW
"""Bytes of a consumer's queries."""
comptime SUMS = DEPTH // 2
"""Sums of values that a thread holds."""


struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 queries each."""
    var keys: Int
    """Keys of a tile, a multiple of 16."""
    var stages: Int
    """Tiles of keys and values in shared memory."""

    def __init__(out self, groups: Int, keys: Int, stages: Int):
        """Names the parts.

        Args:
            groups: Consumers.
            keys: Keys of a tile.
            stages: Tiles in shared memory.
        """
        self.groups, self.keys, self.stages = groups, keys, stages

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Consumers, keys and stages.
        """
        return String(t"{self.groups}x{self.keys}x{self.stages}")

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, and the producer's.
        """
        return GROUP * (self.groups + 1)

    @always_inline
    def registers(self) -> Int:
        """Counts the registers of a consumer's thread.

        Returns:
            What a producer's 24 leave of those that the block is launched with.
        """
        var launched = 65536 // self.threads() // 8 * 8
        return (launched * (self.groups + 1) - 24) // self.groups // 8 * 8

    @always_inline
    def tile(self) -> Int:
        """Counts the bytes of a tile of keys, or of values.

        Returns:
            128 for each.
        """
        return self.keys * ROW

    @always_inline
    def shared(self) -> Int:
        """Counts the bytes of shared memory.

        Returns:
            The ring, the queries, the barriers, and what aligning them may take.
        """
        return (
            2 * self.stages * self.tile()
            + self.groups * QUERIES
            + 8 * (3 * self.stages + self.groups)
            + 1024
        )


comptime SHORT = Config(3, 64, 12)
"""For up to 64 keys: one tile."""
comptime LONG = Config(3, 80, 9)
"""For more."""


@fieldwise_init
struct Walk(KernelArgument, TrivialRegisterPassable):
    """How items and tiles run over the tensors."""

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
    var tiles: Int32
    """Tiles of keys."""
    var period: Int32
    """Blocks of queries of an item."""
    var parts: Int32
    """Items of a head."""
    var items: Int32
    """Items of all heads and images."""
    var scale: Float32
    """Scales the scores, for powers of two."""


struct _Pass(TrivialRegisterPassable):
    """A block of queries of a consumer's."""

    var turn: Int32
    """How many items this block had before."""
    var block: Int32
    """Which of the item's."""
    var n: Int32
    """Image."""
    var channel: Int32
    """First channel of the head."""
    var first: Int32
    """First query; T or more if there is none."""

    @always_inline
    def __init__(out self, group: Int32, walk: Walk):
        self.turn, self.block = 0, group
        self.n = self.channel = self.first = 0
        self.find(walk)

    @always_inline
    def item(self) -> Int32:
        """Numbers the item."""
        return Int32(block_idx.x) + self.turn * Int32(grid_dim.x)

    @always_inline
    def find(mut self, walk: Walk):
        """Finds the queries."""
        var head = self.item() // walk.parts
        self.n = head // walk.heads
        self.channel = (head - self.n * walk.heads) * Int32(DEPTH)
        self.first = ((self.item() - head * walk.parts) * walk.period + self.block) * Int32(ROWS)

    @always_inline
    def advance(mut self, step: Int32, walk: Walk):
        """Goes on to the consumer's next block; an item has one for each consumer at least."""
        self.block += step
        self.first += step * Int32(ROWS)
        if self.block >= walk.period:
            self.block -= walk.period
            self.turn += 1
            self.find(walk)

    @always_inline
    def fetch(self, walk: Walk, map: UInt64, to: UInt32, barrier: UInt32):
        """Starts copying the queries, if there is such a block."""
        if self.item() < walk.items:
            barrier_expect(barrier, UInt32(QUERIES))
            load_3d(to, map, barrier, self.channel, self.first, self.n)


@__name(t"attention_hopper_{config.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(1),
)
def hopper_attention_kernel[
    dtype: DType, config: Config
](maps: Maps[3], y: Data[dtype], walk: Walk):
    """Computes every grid-th item.

    Parameters:
        dtype: Either bfloat16 or float16.
        config: Sizes of the tiles.

    Args:
        maps: Tensor maps of q, k and v.
        y: Result y[N, T, C].
        walk: How items and tiles run over the tensors.
    """
    comptime assert config.keys % 16 == 0, "attention: a step of wgmma takes 16 keys"
    comptime RING = 2 * config.stages * config.tile()
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024, name="hopper_attention"
    ]()
    var ring = (UInt32(Int(memory)) + 1023) & ~UInt32(1023)
    var full = ring + UInt32(RING + config.groups * QUERIES)
    var empty = full + 16 * UInt32(config.stages)
    var asked = empty + 8 * UInt32(config.stages)
    var t = Int32(thread_idx.x)
    if t == 0:
        comptime for i in range(config.stages):
            barrier_init(full + 16 * UInt32(i), 1)
            barrier_init(full + 16 * UInt32(i) + 8, 1)
            barrier_init(empty + 8 * UInt32(i), UInt32(walk.period))
        comptime for i in range(config.groups):
            barrier_init(asked + 8 * UInt32(i), 1)
        fence_barrier_init()
    sync_threads(0, UInt32(config.threads()))
    launch_dependent_grids()

    if t // Int32(GROUP) == Int32(config.groups):
        registers_give[24]()
        # One thread drives the copy engine.
        if t % Int32(GROUP) == 0:
            _produce[config](UInt64(Int(Pointer(to=maps))), walk, Ring(ring, full, empty))
    else:
        registers_take[config.registers()]()
        _consume[dtype, config](
            UInt64(Int(Pointer(to=maps))), y, walk, Ring(ring, full, empty), asked, t
        )


@always_inline
def _produce[config: Config](maps: UInt64, walk: Walk, at_start: Ring):
    """Fills the ring with keys and values, item after item, as stages become free."""
    comptime TILE = UInt32(config.tile())
    comptime VALUES = UInt32(8 * config.stages)
    prefetch_map(maps + MAP)
    prefetch_map(maps + 2 * MAP)
    wait_on_dependent_grids()
    var ring = at_start
    for item in range(Int32(block_idx.x), walk.items, Int32(grid_dim.x)):
        var head = item // walk.parts
        var n = head // walk.heads
        var channel = (head - n * walk.heads) * Int32(DEPTH)
        for tile in range(walk.tiles):
            var to = ring.stages + ring.slot * (2 * TILE)
            var full = ring.full + 8 * ring.slot
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1)
            barrier_expect(full, TILE)
            load_3d(to, maps + MAP, full, channel, tile * Int32(config.keys), n)
            full += VALUES
            barrier_expect(full, TILE)
            load_3d(to + TILE, maps + 2 * MAP, full, channel, tile * Int32(config.keys), n)
            ring.advance[config.stages]()


@always_inline
def _consume[
    dtype: DType, config: Config
](maps: UInt64, y: Data[dtype], walk: Walk, at_start: Ring, asked: UInt32, t: Int32):
    """Attends from every block of queries that is this consumer's."""
    comptime TILE = UInt32(config.tile())
    comptime KEYS = config.keys
    comptime STAGES = Int32(config.stages)
    comptime VALUES = UInt32(8 * config.stages)
    comptime STEP = Int32(config.groups)
    comptime STEPS = UInt32(config.groups)
    comptime BOTH = UInt32(2 * GROUP)
    var group = t // Int32(GROUP)
    var leads = t % Int32(GROUP) == 0
    var pair = t % 4
    var queries = (
        at_start.stages + UInt32(2 * config.stages) * TILE + UInt32(group) * UInt32(QUERIES)
    )
    var came = asked + 8 * UInt32(group)
    var parity = UInt32(0)

    var now = _Pass(group, walk)
    var next = now
    next.advance(STEP, walk)
    if leads:
        prefetch_map(maps)
        wait_on_dependent_grids()
        now.fetch(walk, maps, queries, came)

    # Consumers take turns at issuing products, so that one's run under the others' exponentials.
    var turn = UInt32(group) + 1
    var after = UInt32(group) + 2
    if group == STEP - 1:
        after = 1
        arrive_threads(1, BOTH)
    var rounds = ceildiv(
        ceildiv(walk.items - Int32(block_idx.x), Int32(grid_dim.x)) * walk.period, STEP
    )
    var scores = StaticTuple[Float32, KEYS // 2](fill=0)
    for _ in range(rounds):
        var ring = at_start
        var filled = now.turn * walk.tiles
        ring.slot = UInt32(filled % STAGES)
        ring.parity = UInt32(filled // STAGES) & 1
        var there = now.item() < walk.items
        if not there or now.first >= walk.t:
            # Nothing to do but to let go of the stages, and to pass the turn on. Warps that no
            # product keeps together must not be a phase behind.
            for tile in range(walk.tiles):
                if there:
                    barrier_wait(ring.full + 8 * ring.slot, ring.parity)
                    barrier_wait(ring.full + VALUES + 8 * ring.slot, ring.parity)
                    sync_threads(turn + STEPS, UInt32(GROUP))
                    if leads:
                        barrier_arrive(ring.empty + 8 * ring.slot)
                    ring.advance[config.stages]()
                if tile > 0:
                    sync_threads(turn, BOTH)
                    arrive_threads(after, BOTH)
            if there:
                barrier_wait(came, parity)
                parity ^= 1
                sync_threads(turn + STEPS, UInt32(GROUP))
            if leads:
                next.fetch(walk, maps, queries, came)
            now = next
            next.advance(STEP, walk)
            continue

        var acc = StaticTuple[Float32, SUMS](fill=0)
        var top = SIMD[F32, 2](LOWEST)
        var sum = SIMD[F32, 2](0)
        barrier_wait(came, parity)
        parity ^= 1
        barrier_wait(ring.full + 8 * ring.slot, ring.parity)
        wgmma_fence_aligned()
        scores = _score[dtype, KEYS](queries, ring.stages + ring.slot * (2 * TILE), scores)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        var before = ring.slot
        for tile in range(walk.tiles - 1):
            scores = _settled(scores)
            var factor = _weigh[KEYS](scores, walk.scale, top, sum)
            scores = _settled(scores)
            barrier_wait(ring.full + VALUES + 8 * ring.slot, ring.parity)
            var values = ring.stages + ring.slot * (2 * TILE) + TILE
            var last = before
            before = ring.slot
            ring.advance[config.stages]()
            barrier_wait(ring.full + 8 * ring.slot, ring.parity)
            # The sums of the tile before.
            wgmma_wait_group_sync[0]()
            acc = _settled(acc)
            if leads and tile > 0:
                barrier_arrive(ring.empty + 8 * last)
            _shrink(acc, factor)
            var p = _rounded[dtype, KEYS](scores)
            sync_threads(turn, BOTH)
            wgmma_fence_aligned()
            scores = _score[dtype, KEYS](queries, ring.stages + ring.slot * (2 * TILE), scores)
            wgmma_commit_group_sync()
            acc = _mix[dtype, KEYS](p, values, acc)
            wgmma_commit_group_sync()
            arrive_threads(after, BOTH)
            wgmma_wait_group_sync[1]()

        # All scores are there: the next queries may come in the place of these.
        scores = _settled(scores)
        if leads:
            next.fetch(walk, maps, queries, came)
        var left = walk.s - (walk.tiles - 1) * Int32(KEYS)
        if left < Int32(KEYS):
            comptime for i in range(KEYS // 2):
                if Int32(i // 4 * 8 + i % 2) + 2 * pair >= left:
                    scores[i] = neg_inf[F32]()
        var factor = _weigh[KEYS](scores, walk.scale, top, sum)
        scores = _settled(scores)
        barrier_wait(ring.full + VALUES + 8 * ring.slot, ring.parity)
        wgmma_wait_group_sync[0]()
        acc = _settled(acc)
        if leads and walk.tiles > 1:
            barrier_arrive(ring.empty + 8 * before)
        _shrink(acc, factor)
        var p = _rounded[dtype, KEYS](scores)
        wgmma_fence_aligned()
        acc = _mix[dtype, KEYS](p, ring.stages + ring.slot * (2 * TILE) + TILE, acc)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        acc = _settled(acc)
        if leads:
            barrier_arrive(ring.empty + 8 * ring.slot)
        _store[dtype](y, walk, now, t, acc, sum)
        now = next
        next.advance(STEP, walk)


@always_inline
def _matrix(at: UInt32, bytes: Int = 0) -> Int64:
    """Describes a matrix `bytes` after an address: 128-byte swizzle, 1024 bytes for eight rows."""
    return Int64(0x40000040 << 32) | Int64((at >> 4 | 1 << 16) + UInt32(bytes >> 4))


@always_inline
def _score[
    dtype: DType, keys: Int
](q: UInt32, k: UInt32, old: StaticTuple[Float32, keys // 2]) -> StaticTuple[Float32, keys // 2]:
    """Starts the products of 64 queries and a tile of keys; `old` lends its registers."""
    var scores = old
    comptime for step in range(DEPTH // 16):
        scores = wgmma_async[
            64, keys, 16, a_type=dtype, b_type=dtype, scale_d=1 if step > 0 else 0
        ](
            WGMMADescriptor[dtype](_matrix(q, 32 * step)),
            WGMMADescriptor[dtype](_matrix(k, 32 * step)),
            scores,
        )
    return scores


@always_inline
def _mix[
    dtype: DType, keys: Int
](p: StaticTuple[UInt32, keys // 4], v: UInt32, acc: StaticTuple[Float32, SUMS]) -> StaticTuple[
    Float32, SUMS
]:
    """Starts adding the products of probabilities and a tile of values."""
    var sums = acc
    comptime for step in range(keys // 16):
        sums = mma_registers[dtype, turned=True](
            SIMD[U32, 4](p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]),
            _matrix(v, 16 * ROW * step),
            sums,
        )
    return sums


@always_inline
def _settled[count: Int, //](x: StaticTuple[Float32, count]) -> StaticTuple[Float32, count]:
    """Keeps what follows from being moved before the wait for these registers."""
    var y = x
    comptime for i in range(count):
        y[i] = settled(x[i])
    return y


@always_inline
def _weigh[
    keys: Int
](
    mut scores: StaticTuple[Float32, keys // 2],
    scale: Float32,
    mut top: SIMD[F32, 2],
    mut sum: SIMD[F32, 2],
) -> SIMD[F32, 2]:
    """Turns scores into powers of two below the rows' tops; gives what older sums shrink by."""
    var factor = SIMD[F32, 2](0)
    comptime for h in range(2):
        var highest = top[h]
        comptime for i in range(keys // 8):
            highest = max(highest, max(scores[4 * i + 2 * h], scores[4 * i + 2 * h + 1]))
        highest = max(highest, warp.shuffle_xor(highest, 1))
        highest = max(highest, warp.shuffle_xor(highest, 2))
        var shift = highest * scale
        factor[h] = exp2(top[h].fma(scale, -shift))
        top[h] = highest
        var total = sum[h] * factor[h]
        comptime for i in range(keys // 8):
            comptime for j in range(2):
                var e = exp2(scores[4 * i + 2 * h + j].fma(scale, -shift))
                scores[4 * i + 2 * h + j] = e
                total += e
        sum[h] = total
    return factor


@always_inline
def _shrink(mut acc: StaticTuple[Float32, SUMS], factor: SIMD[F32, 2]):
    """Multiplies the rows' sums."""
    comptime for i in range(SUMS):
        acc[i] *= factor[i // 2 % 2]


@always_inline
def _rounded[
    dtype: DType, keys: Int
](scores: StaticTuple[Float32, keys // 2]) -> StaticTuple[UInt32, keys // 4]:
    """Rounds probabilities, pair by pair, as the second product wants them."""
    var p = StaticTuple[UInt32, keys // 4](fill=0)
    comptime for i in range(keys // 4):
        p[i] = packed[dtype](scores[2 * i], scores[2 * i + 1])
    return p


@always_inline
def _store[
    dtype: DType
](
    y: Data[dtype],
    walk: Walk,
    place: _Pass,
    t: Int32,
    acc: StaticTuple[Float32, SUMS],
    sums: SIMD[F32, 2],
):
    """Divides by the sums and stores the rows that are there.

    Thread 4 a + b of warp d holds the channels 8 j + 2 b, and one more, of rows 16 d + a and 8 on;
    the four threads of a row exchange them, so that each stores 8 neighbours.
    """
    var b = t % 4
    var odd = b & 1 != 0
    var upper = b & 2 != 0
    var row = place.first + t % Int32(GROUP) // 32 * 16 + t % 32 // 4
    comptime for h in range(2):
        var inverse = reciprocal(over_lanes[4](sums[h]))
        comptime for half in range(2):
            var r = SIMD[U32, 4](0)
            comptime for j in range(4):
                comptime at = 16 * half + 4 * j + 2 * h
                r[j] = packed[dtype](acc[at] * inverse, acc[at + 1] * inverse)
            # Turns over a 4 x 4 square: columns j of threads b.
            comptime for j in range(0, 4, 2):
                var got = warp.shuffle_xor(r[j] if odd else r[j + 1], 1)
                if odd:
                    r[j] = got
                else:
                    r[j + 1] = got
            comptime for j in range(2):
                var got = warp.shuffle_xor(r[j] if upper else r[j + 2], 2)
                if upper:
                    r[j] = got
                else:
                    r[j + 2] = got
            if row + Int32(8 * h) < walk.t:
                var at = (
                    Int(place.n * walk.t + row + Int32(8 * h)) * Int(walk.c)
                    + Int(place.channel)
                    + Int(32 * half)
                    + Int(8 * b)
                )
                y.unsafe_offset(at).unsafe_bitcast[UInt32]().unsafe_store[alignment=16](0, r)


def period(blocks: Int, heads: Int, tiles: Int, config: Config, processors: Int) -> Int:
    """Chooses how many blocks of queries share one filling of the ring.

    Args:
        blocks: Blocks of 64 queries of a head.
        heads: Heads of all images.
        tiles: Tiles of keys.
        config: Sizes of the tiles.
        processors: Multiprocessors.

    Returns:
        Blocks: one for each consumer, or, where the ring holds the keys of two items, as many as
        leave the multiprocessors the least to do.
    """
    var best = config.groups
    if 2 * tiles > config.stages:
        # Consumers that take turns must not wait for different items.
        return best
    var least = 0
    for parts in range(1, blocks + 1):
        var each = max(ceildiv(blocks, parts), config.groups)
        # A filling costs about as much as a block of each consumer.
        var most = ceildiv(heads * ceildiv(blocks, each), processors) * (each + config.groups)
        if least == 0 or most < least:
            best, least = each, most
    return best


def enqueue_hopper[dtype: DType, config: Config](o: Attention[dtype], ctx: DeviceContext) raises:
    """Enqueues the kernel.

    Parameters:
        dtype: Either bfloat16 or float16.
        config: Sizes of the tiles.

    Args:
        o: Tensors and sizes; heads of 64 channels.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var processors = Int(ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT))
    var heads = Int(o.n * o.heads)
    var blocks = ceildiv(Int(o.t), ROWS)
    var tiles = ceildiv(Int(o.s), config.keys)
    var each = period(blocks, heads, tiles, config, processors)
    var parts = ceildiv(blocks, each)
    var items = heads * parts
    var maps = Maps[3]()
    var n, t, s, c = Int64(o.n), Int64(o.t), Int64(o.s), Int64(o.c)
    maps.maps[0] = tensor_map[dtype, 3](ctx, o.q, [c, t, n], [Int32(DEPTH), Int32(ROWS), 1])
    maps.maps[1] = tensor_map[dtype, 3](ctx, o.k, [c, s, n], [Int32(DEPTH), Int32(config.keys), 1])
    maps.maps[2] = tensor_map[dtype, 3](ctx, o.v, [c, s, n], [Int32(DEPTH), Int32(config.keys), 1])
    ctx.enqueue_function[hopper_attention_kernel[dtype, config]](
        maps,
        o.y,
        Walk(
            o.t,
            o.s,
            o.c,
            o.heads,
            Int32(tiles),
            Int32(each),
            Int32(parts),
            Int32(items),
            o.scale * LOG2_E,
        ),
        grid_dim=min(items, processors),
        block_dim=config.threads(),
        shared_mem_bytes=config.shared(),
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(config.shared())),
    )
