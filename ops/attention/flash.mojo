"""Attention on NVIDIA's tensor cores: y = softmax(scale * q k^T + bias) v in one kernel.

    q[N, T, C], k[N, S, C], v[N, S, C], y[N, T, C], each head `head` neighbouring channels of C

FlashAttention-2 (Dao 2023, arXiv:2307.08691): a warp has 16 or 32 queries in registers and walks
over the keys, 64 (or 32) at a time, with mma.sync. Scores, probabilities and the running maximum
and sum of a row (Milakov and Gimelshein 2018, arXiv:1805.02867) stay in registers, in float32;
probabilities are rounded to the dtype of v as the left side of the second product. Keys and values
come through three stages of shared memory, by cp.async, for all warps of a block.

Where there are few queries, `splits` warps take one part each of every stage's keys, and add up
their results at the end. Sizes are run-time numbers: T and S need not fit the tiles. A head of a
multiple of 4 channels is taken as one of `depth`, the next multiple of 32: the channels that it lacks
are zeros in shared memory, and are not stored.

A scheduler holds 2 to 4 warps, whose exponentials run beside the products of others. Bound by
the tensor cores where S is large, by memory where it is small; docs/kernels.md has the figures.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv, exp2
from std.utils import StaticTuple

from ..async_copy import commit_copies, wait_copies
from ..device import Device
from ..hopper.accumulator import Fragment, Sums
from ..launch import launch
from ..operands import F32, U32, Shared, dtypes
from ..rows import over_lanes
from ..swizzle import chunk_place
from .config import LOG2_E, Attention, affine
from .mask import Mask, MaskTensors
from .softmax import Softmax, mask_keys, reciprocal, rescale
from .tile_mask import BiasPairs, TileMask
from .tiles import (
    add_scores,
    add_values,
    copy_chunk,
    four,
    left_side,
    padded,
    store_rows,
)

comptime STAGES = 3
"""Tiles of keys and values in shared memory."""
comptime SPLITS = 4
"""Warps that share the keys of their queries, in the kernel for few queries."""


def threads(splits: Int) -> Int:
    """Says how many threads a block has: 4 groups of warps, or 2 groups that split their keys.

    Args:
        splits: Warps that share the keys of their queries.

    Returns:
        Threads.
    """
    return 128 if splits == 1 else 64 * splits


def warp_keys(depth: Int) -> Int:
    """Says how many keys a warp multiplies at a time.

    Args:
        depth: Channels of a head.

    Returns:
        64, or 32 if a head is so deep that stages of 64 fill the shared memory.
    """
    return 64 if depth <= 64 else 32


def most_threads(head: Int, rows: Int, splits: Int, mask: Mask) -> Int:
    """Says how many threads share a multiprocessor: a bound of 128 registers, or of all 255.

    Args:
        head: Channels of a head.
        rows: Queries of a warp, in units of 16.
        splits: Warps that share the keys of their queries.
        mask: What is done to the scores.

    Returns:
        Threads.
    """
    return 512 if rows == 1 and splits == 1 and head <= 64 and not mask.some() else 256


def queries(rows: Int, splits: Int) -> Int:
    """Counts the queries of a block.

    Args:
        rows: Queries of a warp, in units of 16.
        splits: Warps that share the keys of their queries.

    Returns:
        Queries.
    """
    return 16 * rows * threads(splits) // (32 * splits)


def shared_bytes(depth: Int, rows: Int, splits: Int) -> Int:
    """Counts the shared memory of a block.

    Args:
        depth: Channels of a head.
        rows: Queries of a warp, in units of 16.
        splits: Warps that share the keys of their queries.

    Returns:
        Bytes.
    """
    return STAGES * (2 * warp_keys(depth) * splits + queries(rows, splits)) * depth * 2


struct _Place(TrivialRegisterPassable):
    """A block of queries: its image, its head and its number there."""

    var n: Int32
    """Image."""
    var head: Int32
    """Head."""
    var block: Int32
    """Block of queries."""

    def __init__(out self, item: Int32, heads: Int32, blocks: Int32):
        var head = item // blocks
        self.n = head // heads
        self.head = head - self.n * heads
        self.block = item - head * blocks

    def steps(self) -> SIMD[DType.int32, 4]:
        """Gives the numbers to a kernel, where another division would cost time."""
        return SIMD[DType.int32, 4](self.n, self.head, self.block, 0)

    @always_inline
    def move(mut self, step: SIMD[DType.int32, 4], heads: Int32, blocks: Int32):
        """Moves on by `step`."""
        self.n += step[0]
        self.head += step[1]
        self.block += step[2]
        if self.block >= blocks:
            self.block -= blocks
            self.head += 1
        if self.head >= heads:
            self.head -= heads
            self.n += 1


struct _Ahead[dtype: DType, depth: Int, head: Int, rows: Int, splits: Int](TrivialRegisterPassable):
    """What a block copies next: a tile of keys and values, and the queries with the first."""

    comptime CHUNKS = Self.depth // 8
    comptime TILE = warp_keys(Self.depth) * Self.splits
    comptime THREADS = threads(Self.splits)
    comptime QUERIES = queries(Self.rows, Self.splits)

    var place: _Place
    """Block of queries."""
    var key: Int32
    """First key of the tile."""
    var at: Int
    """Where the keys begin, and the values."""
    var stage: Int32
    """Where the tile goes."""
    var slot: Int32
    """Where the queries go."""

    def __init__(out self, place: _Place):
        self.place, self.key, self.at, self.stage, self.slot = place, 0, 0, 0, 0

    @always_inline
    def copy(
        mut self,
        o: Attention[Self.dtype, _],
        blocks: Int32,
        step: SIMD[DType.int32, 4],
        stages: Shared[Self.dtype],
    ):
        """Starts copying, if anything is left, and moves on."""
        comptime STAGE = 2 * Self.TILE * Self.depth
        var t = Int32(thread_idx.x)
        if self.place.n < o.n:
            if self.key == 0:
                var channel = Int(self.place.head * Int32(Self.head))
                self.at = Int(self.place.n * o.s) * Int(o.c) + channel
                var first = self.place.block * Int32(Self.QUERIES)
                var q = o.q.unsafe_offset(Int(self.place.n * o.t + first) * Int(o.c) + channel)
                var to = stages.unsafe_offset(
                    STAGES * STAGE + Int(self.slot) * (Self.QUERIES * Self.depth)
                )
                comptime for i in range(ceildiv(Self.QUERIES * Self.CHUNKS, Self.THREADS)):
                    var row = (t + Int32(i * Self.THREADS)) // Int32(Self.CHUNKS)
                    var chunk = (t + Int32(i * Self.THREADS)) % Int32(Self.CHUNKS)
                    var inside = first + row < o.t
                    copy_chunk[Self.head](
                        to.unsafe_offset(chunk_place[Self.depth](row, chunk)),
                        q.unsafe_offset(Int(row if inside else 0) * Int(o.c) + Int(chunk * 8)),
                        chunk,
                        inside,
                    )
                self.slot = 0 if self.slot == STAGES - 1 else self.slot + 1

            var keys = stages.unsafe_offset(Int(self.stage) * STAGE)
            var values = keys.unsafe_offset(Self.TILE * Self.depth)
            comptime for i in range(Self.TILE * Self.CHUNKS // Self.THREADS):
                var row = (t + Int32(i * Self.THREADS)) // Int32(Self.CHUNKS)
                var chunk = (t + Int32(i * Self.THREADS)) % Int32(Self.CHUNKS)
                var inside = self.key + row < o.s
                var from_ = self.at + Int(row if inside else 0) * Int(o.c) + Int(chunk * 8)
                copy_chunk[Self.head](
                    keys.unsafe_offset(chunk_place[Self.depth](row, chunk)),
                    o.k.unsafe_offset(from_),
                    chunk,
                    inside,
                )
                copy_chunk[Self.head](
                    values.unsafe_offset(chunk_place[Self.depth](row, chunk)),
                    o.v.unsafe_offset(from_),
                    chunk,
                    inside,
                )
            self.stage = 0 if self.stage == STAGES - 1 else self.stage + 1
            self.key += Int32(Self.TILE)
            self.at += Self.TILE * Int(o.c)
            if self.key >= o.s:
                self.key = 0
                self.place.move(step, o.heads, blocks)
        commit_copies()


@always_inline
def _attend[
    dtype: DType, mask: Mask, tile_keys: Int, //, depth: Int, rows: Int, keys: Int, masked: Bool
](
    k: Shared[dtype],
    v: Shared[dtype],
    first_key: Int32,
    left: Int32,
    scale: Float32,
    masks: Array[TileMask[dtype, mask, tile_keys], rows],
    q: Array[SIMD[U32, 4], rows * depth // 16],
    mut acc: Array[Sums[depth], rows],
    mut softmax: Array[Softmax, rows],
):
    """Attends to `keys` keys, of which `left` are there; the accumulators stand for the softmax."""
    var bias = Array[BiasPairs[tile_keys], rows](uninitialized=True)
    comptime if mask.bias:
        comptime for r in range(rows):
            bias[r] = masks[r].load_bias(first_key)

    var scores = Array[Sums[keys], rows](fill=Sums[keys](fill=0))
    comptime for half in range(depth // 32):
        add_scores[depth, half, 2 * rows * half](q, k, scores)
    comptime for r in range(rows):
        comptime if mask.some():
            masks[r].apply(scores[r], bias[r], first_key, scale)
        comptime if masked:
            mask_keys(scores[r], Fragment(lane=Int32(thread_idx.x) & 31).column(), left)
    comptime for r in range(rows):
        rescale(acc[r], softmax[r].update(scores[r]))
    add_values[depth](scores, v, acc)


@always_inline
def _first_queries[
    dtype: DType, depth: Int, rows: Int
](shared: Shared[dtype], first: Int32) -> Array[SIMD[U32, 4], rows * depth // 16]:
    """Reads the queries of a warp from shared memory: 32 channels of all, then the next 32."""
    var q = Array[SIMD[U32, 4], rows * depth // 16](uninitialized=True)
    comptime for r in range(rows):
        comptime for step in range(depth // 16):
            comptime i = 2 * (step // 2 * rows + r) + step % 2
            q[i] = left_side[depth, step, 16 * r](shared, first)
    return q^


@always_inline
def _combine[
    depth: Int, rows: Int, splits: Int
](
    shared: Shared[F32],
    split: Int32,
    mut acc: Array[Sums[depth], rows],
    mut softmax: Array[Softmax, rows],
):
    """Adds up in the first of the splits what each got from its part of the keys."""
    comptime OUT = depth // 8
    comptime EACH = (rows + rows * OUT) * 128
    var group = Int32(thread_idx.x) // Int32(32 * splits)
    var lane = Int32(thread_idx.x) & 31
    var left = shared.unsafe_offset(Int(group) * ((splits - 1) * EACH) + Int(lane) * 4)
    barrier()
    if split > 0:
        var mine = left.unsafe_offset(Int(split - 1) * EACH)
        comptime for r in range(rows):
            mine.unsafe_store[alignment=16](r * 128, softmax[r].highest.join(softmax[r].sum))
        comptime for i in range(rows * OUT):
            mine.unsafe_store[alignment=16]((rows + i) * 128, four[i % OUT](acc[i // OUT]))
    barrier()
    if split > 0:
        return
    comptime for other in range(splits - 1):
        var theirs = left.unsafe_offset(other * EACH)
        comptime for r in range(rows):
            var state = theirs.unsafe_load[width=4, alignment=16](r * 128)
            var factors = SIMD[F32, 4](0)
            ref mine = softmax[r]
            comptime for h in range(2):
                var highest = max(mine.highest[h], state[h])
                factors[h] = exp2((mine.highest[h] - highest) * mine.scale)
                factors[2 + h] = exp2((state[h] - highest) * mine.scale)
                mine.highest[h] = highest
                mine.sum[h] = mine.sum[h] * factors[h] + state[2 + h] * factors[2 + h]
            comptime for column in range(OUT):
                var part = theirs.unsafe_load[width=4, alignment=16](
                    (rows + r * OUT + column) * 128
                )
                comptime for i in range(4):
                    comptime j = 4 * column + i
                    acc[r][j] = acc[r][j] * factors[i // 2] + part[i] * factors[2 + i // 2]


@__name(t"attention_flash_{mask.label()}{head}_{rows}x{splits}_{dtypes[dtype, out]()}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(most_threads(head, rows, splits, mask))
    )
)
def flash_kernel[
    dtype: DType, out: DType, head: Int, rows: Int, splits: Int, mask: Mask
](
    o: Attention[dtype, out],
    blocks: Int32,
    step: SIMD[DType.int32, 4],
    tensors: MaskTensors[dtype],
):
    """Computes every grid-th block of queries of a head.

    Parameters:
        dtype: Either bfloat16 or float16.
        out: Of the result: the same, or of 8 bits.
        head: Channels of a head, a multiple of 4.
        rows: Queries of a warp, in units of 16.
        splits: Warps that share the keys of their queries.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        blocks: Blocks of queries of a head.
        step: Images, heads and blocks from one of this block's to the next.
        tensors: What masks read.
    """
    comptime depth = padded(head)
    comptime assert head % 4 == 0, "attention: 8 bytes are copied at a time"
    comptime KEYS = warp_keys(depth)
    comptime TILE = KEYS * splits
    comptime STAGE = 2 * TILE * depth
    comptime SHORT = Int32(0) if mask.some() else Int32(16)
    var stages = external_memory[Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16]()
    comptime QUERIES = queries(rows, splits)
    var warp_index = Int32(thread_idx.x) >> 5
    var group = warp_index // Int32(splits)
    var split = warp_index - group * Int32(splits)
    var at = Fragment(lane=Int32(thread_idx.x) & 31)
    var tiles = ceildiv(o.s, Int32(TILE))
    var scale = o.scale * LOG2_E

    var place = _Place(Int32(block_idx.x), o.heads, blocks)
    var stage = Int32(0)
    var slot = Int32(0)
    wait_on_dependent_grids()
    launch_dependent_grids()
    # Two tiles ahead.
    var ahead = _Ahead[dtype, depth, head, rows, splits](place)
    ahead.copy(o, blocks, step, stages)
    ahead.copy(o, blocks, step, stages)
    while place.n < o.n:
        var first = place.block * Int32(QUERIES) + group * Int32(16 * rows)
        var mine = stages.unsafe_offset(STAGES * STAGE + Int(slot) * (QUERIES * depth))
        var q = Array[SIMD[U32, 4], rows * depth // 16](fill=0)
        var acc = Array[Sums[depth], rows](fill=Sums[depth](fill=0))
        var softmax = Array[Softmax, rows](fill=Softmax(1 if mask.bias else scale))
        var masks = Array[TileMask[dtype, mask, KEYS], rows](uninitialized=True)
        comptime if mask.some():
            comptime for r in range(rows):
                masks[r] = TileMask[dtype, mask, KEYS](
                    tensors,
                    at,
                    n=place.n,
                    head=place.head,
                    query=first + Int32(16 * r) + at.row(),
                    t=o.t,
                    s=o.s,
                )
        for tile in range(tiles):
            wait_copies[1]()
            barrier()
            ahead.copy(o, blocks, step, stages)
            if tile == 0:
                q = _first_queries[dtype, depth, rows](mine, group * Int32(16 * rows))
            var keys = stages.unsafe_offset(Int(stage) * STAGE + Int(split) * (KEYS * depth))
            var values = keys.unsafe_offset(TILE * depth)
            stage = 0 if stage == STAGES - 1 else stage + 1
            var left = o.s - tile * Int32(TILE) - split * Int32(KEYS)
            var key = o.s - left
            if first >= o.t:
                continue
            comptime if mask.causal:
                if key > first + Int32(16 * rows - 1) + tensors.sizes.diagonal:
                    continue
            if left >= Int32(KEYS):
                _attend[depth, rows, KEYS, False](
                    keys, values, key, left, scale, masks, q, acc, softmax
                )
            elif left > SHORT:
                _attend[depth, rows, KEYS, True](
                    keys, values, key, left, scale, masks, q, acc, softmax
                )
            elif left > 0:
                comptime if not mask.some():
                    _attend[depth, rows, 16, True](
                        keys, values, key, left, scale, masks, q, acc, softmax
                    )
        slot = 0 if slot == STAGES - 1 else slot + 1

        comptime for r in range(rows):
            comptime for h in range(2):
                softmax[r].sum[h] = over_lanes[4](softmax[r].sum[h])
        comptime if splits > 1:
            # Such a block has one item, so the stages are free.
            _combine[depth, rows, splits](stages.unsafe_bitcast[Float32](), split, acc, softmax)
        comptime if mask.logsumexp:
            if split == 0 and first < o.t and at.column() == 0:
                var row = first + at.row()
                var to = Int(place.n * o.heads + place.head) * Int(o.t) + Int(row)
                comptime for i in range(2 * rows):
                    if row + Int32(8 * i) < o.t:
                        ref of = softmax[i // 2]
                        tensors.keep(to + 8 * i, of.highest[i % 2] * of.scale, of.sum[i % 2])
        if split == 0 and first < o.t:
            var channel = Int(place.head * Int32(head))
            var result = affine(o.result)
            var factor = Array[Float32, 2 * rows](uninitialized=True)
            comptime for i in range(2 * rows):
                factor[i] = reciprocal(softmax[i // 2].sum[i % 2] * result.scale)
            store_rows[dtype, depth, head, rows](
                o.y.unsafe_offset(Int(place.n * o.t + first) * Int(o.c) + channel),
                o.t - first,
                o.c,
                mine,
                group * Int32(16 * rows),
                acc,
                factor,
                result.zero,
            )
        place.move(step, o.heads, blocks)


def enqueue_flash[
    out: DType, //, dtype: DType, head: Int, rows: Int, splits: Int, mask: Mask
](o: Attention[dtype, out], tensors: MaskTensors[dtype], ctx: DeviceContext) raises:
    """Enqueues the kernel.

    Parameters:
        out: Of the result: that of q, or of 8 bits.
        dtype: Either bfloat16 or float16.
        head: Channels of a head, a multiple of 4.
        rows: Queries of a warp, in units of 16.
        splits: Warps that share the keys of their queries.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        tensors: What masks read.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime THREADS = threads(splits)
    comptime SHARED = shared_bytes(padded(head), rows, splits)
    var blocks = ceildiv(Int(o.t), queries(rows, splits))
    var grid = blocks * Int(o.n * o.heads)
    comptime if splits == 1:
        # As many blocks as find room; each goes on to another block of queries.
        comptime most = most_threads(head, rows, splits, mask) // THREADS
        var device = Device(ctx)
        grid = min(grid, max(min(most, device.holds(SHARED)), 1) * device.multiprocessors)
    var step = _Place(Int32(grid), o.heads, Int32(blocks)).steps()
    launch[flash_kernel[dtype, out, head, rows, splits, mask]](
        ctx,
        o,
        Int32(blocks),
        step,
        tensors,
        grid_dim=grid,
        block_dim=THREADS,
        shared=SHARED,
    )
