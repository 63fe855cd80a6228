"""The gradients of attention on NVIDIA's tensor cores: a kernel for dq, then one for dk and dv.

    q, dq, y, dy[N, T, C], k, dk, v, dv[N, S, C], each head `head` neighbouring channels of C

Both kernels are one: a block holds 64 rows of two tensors and walks over tiles of 64 columns (32 of
heads above 64) of two others, with mma.sync. Where the rows are queries, the scores of a tile are
q k^T and their slopes dy v^T; where they are keys, k q^T and v dy^T. Probabilities and the gradients
of the scores are rounded to the tensors' dtype as the left sides of the products that the sums grow
by: dq += ds k, or dk += ds^T q and dv += p^T dy. Sums stay in registers, in float32.

A score is computed twice, so seven products take the place of five; in return no block writes what
another adds to. The paper adds to dq in memory by atomics, which leaves the order of its sums open.
The kernel for dq comes first: it has y and dy at hand, and leaves delta = sum dy * y for the other.

Columns come through two stages of shared memory, by cp.async. Sizes are run-time numbers: T and S
need not fit the tiles. Compiled for sm_90a and tested in the PTX interpreter; no GPU has run it yet.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv, exp2
from std.memory import bitcast
from std.utils import StaticTuple
from std.utils.numerics import inf, neg_inf

from ..async_copy import commit_copies, wait_copies
from ..attention.config import LOG2_E
from ..attention.mask import Mask, MaskTensors
from ..attention.tiles import add_scores, add_values, copy_chunk, left_side, padded, store_rows
from ..hopper.accumulator import Fragment, Sums
from ..operands import F32, U32, Shared, widened
from ..rows import over_lanes
from ..swizzle import chunk_place
from .tensors import AttentionGrad

comptime ROWS = 64
"""Rows of a block, 16 of each warp."""
comptime THREADS = 128
"""Threads of a block."""
comptime STAGES = 2
"""Tiles of columns in shared memory."""


def tile_columns(depth: Int) -> Int:
    """Says how many columns a tile has.

    Args:
        depth: Channels of a row in shared memory.

    Returns:
        64, or 32 of rows so deep that sums leave no registers for more scores.
    """
    return 64 if depth <= 64 else 32


def grad_shared_bytes(depth: Int) -> Int:
    """Counts the shared memory of a block: rows, tiles of columns, and two numbers of each column.

    Args:
        depth: Channels of a row in shared memory.

    Returns:
        Bytes.
    """
    return 4 * ROWS * depth + STAGES * tile_columns(depth) * (4 * depth + 8)


@fieldwise_init
struct _Sides[dtype: DType, head: Int, keys: Bool](TrivialRegisterPassable):
    """The rows and columns of a head, in memory.

    Parameters:
        dtype: Of the tensors.
        head: Channels of a head.
        keys: Whether the rows are keys, and the columns queries.
    """

    comptime depth = padded(Self.head)
    comptime CHUNKS = Self.depth // 8
    comptime COLUMNS = tile_columns(Self.depth)

    var o: AttentionGrad[Self.dtype]
    """All tensors."""
    var query: Int
    """Channels before the head's first query."""
    var key: Int
    """Channels before the head's first key."""
    var place: Int
    """Queries before the head's first, in logsumexp and delta."""

    @always_inline
    def __init__(out self, o: AttentionGrad[Self.dtype], n: Int32, place: Int32):
        var f = o.forward
        var channel = Int(place * Int32(Self.head))
        self.o = o
        self.query = Int(n * f.t) * Int(f.c) + channel
        self.key = Int(n * f.s) * Int(f.c) + channel
        self.place = Int(n * f.heads + place) * Int(f.t)

    @always_inline
    def rows(self) -> Int32:
        """Counts the rows."""
        return self.o.forward.s if Self.keys else self.o.forward.t

    @always_inline
    def columns(self) -> Int32:
        """Counts the columns."""
        return self.o.forward.t if Self.keys else self.o.forward.s

    @always_inline
    def copy[
        queries: Bool, count: Int
    ](self, first: Int32, end: Int32, left: Shared[Self.dtype], right: Shared[Self.dtype]):
        """Starts copying some queries and their slopes, or keys and values; zeros from `end` on."""
        var f = self.o.forward
        var t = Int32(thread_idx.x)
        var a = f.q.unsafe_offset(self.query) if queries else f.k.unsafe_offset(self.key)
        var b = self.o.dy.unsafe_offset(self.query) if queries else f.v.unsafe_offset(self.key)
        comptime for i in range(count * Self.CHUNKS // THREADS):
            var row = (t + Int32(i * THREADS)) // Int32(Self.CHUNKS)
            var chunk = (t + Int32(i * THREADS)) % Int32(Self.CHUNKS)
            var inside = first + row < end
            var at = Int(first + row if inside else 0) * Int(f.c) + Int(chunk * 8)
            var to = chunk_place[Self.depth](row, chunk)
            copy_chunk[Self.head](left.unsafe_offset(to), a.unsafe_offset(at), chunk, inside)
            copy_chunk[Self.head](right.unsafe_offset(to), b.unsafe_offset(at), chunk, inside)

    @always_inline
    def copy_tile(self, tile: Int32, stages: Shared[Self.dtype]):
        """Starts copying a tile of columns."""
        comptime TILE = Self.COLUMNS * Self.depth
        var to = stages.unsafe_offset(Int(tile & 1) * (2 * TILE))
        self.copy[Self.keys, Self.COLUMNS](
            tile * Int32(Self.COLUMNS), self.columns(), to, to.unsafe_offset(TILE)
        )

    @always_inline
    def numbers(self, tile: Int32) -> SIMD[F32, 2]:
        """Reads the numbers of the thread's query of a tile: what is subtracted of each product."""
        comptime if Self.keys:
            var query = tile * Int32(Self.COLUMNS) + Int32(thread_idx.x) % Int32(Self.COLUMNS)
            return SIMD[F32, 2](self.bound(query), self.sums(query))
        return 0

    @always_inline
    def keep(self, tile: Int32, numbers: SIMD[F32, 2], kept: Shared[F32]):
        """Puts the numbers of each query beside a tile of them."""
        comptime if Self.keys:
            var t = Int32(thread_idx.x)
            if t < Int32(Self.COLUMNS):
                var to = kept.unsafe_offset(Int((tile & 1) * Int32(2 * Self.COLUMNS) + t))
                to[unsafe_offset=0] = numbers[0]
                to[unsafe_offset=Self.COLUMNS] = numbers[1]

    @always_inline
    def bound(self, query: Int32) -> Float32:
        """Reads a query's logsumexp, for powers of two; infinity where it sees no key, or is none."""
        if query >= self.o.forward.t:
            return inf[F32]()
        var kept = self.o.logsumexp[unsafe_offset=self.place + Int(query)]
        return inf[F32]() if kept == neg_inf[F32]() else kept * LOG2_E

    @always_inline
    def sums(self, query: Int32) -> Float32:
        """Reads a query's sum of dy * y, which the kernel ahead has left."""
        if query >= self.o.forward.t:
            return 0
        return self.o.delta[unsafe_offset=self.place + Int(query)]


@always_inline
def _products[
    dtype: DType, depth: Int, columns: Int
](
    rows: Shared[dtype],
    held: Array[SIMD[U32, 4], depth // 16],
    tile: Shared[dtype],
) -> Array[
    Sums[columns], 1
]:
    """Multiplies a warp's rows, held or in shared memory, by a tile's columns."""
    var scores = Array[Sums[columns], 1](fill=Sums[columns](fill=0))
    comptime for half in range(depth // 32):
        comptime if depth <= 64:
            add_scores[depth, half, 2 * half](held, tile, scores)
        else:
            var a = Array[SIMD[U32, 4], 2](uninitialized=True)
            comptime for i in range(2):
                a[i] = left_side[depth, 2 * half + i](rows, _warp_row())
            add_scores[depth, half, 0](a, tile, scores)
    return scores^


@always_inline
def _warp_row() -> Int32:
    """Gives the first of a warp's rows in the block."""
    return Int32(thread_idx.x) >> 5 << 4


@always_inline
def _sum_slopes[
    dtype: DType, head: Int
](sides: _Sides[dtype, head, False], rows: Shared[dtype], row: Int32, at: Fragment) -> SIMD[F32, 2]:
    """Adds up dy * y of the thread's two rows, and leaves the sums for the other kernel."""
    var f = sides.o.forward
    var sums = SIMD[F32, 2](0)
    comptime for step in range(sides.depth // 16):
        var slopes = left_side[sides.depth, step](rows, _warp_row())
        comptime for i in range(4):
            var query = row + Int32(8 * (i % 2))
            var channel = Int32(16 * step + 8 * (i // 2)) + at.column()
            if query < f.t and channel < Int32(head):
                var from_ = sides.query + Int(query) * Int(f.c) + Int(channel)
                var y = widened(f.y.unsafe_load[width=2, alignment=4](from_))
                var product = y * widened(bitcast[dtype, 2](slopes[i]))
                sums[i % 2] += product[0] + product[1]
    comptime for h in range(2):
        sums[h] = over_lanes[4](sums[h])
        var query = row + Int32(8 * h)
        if query < f.t:
            var place = sides.place + Int(query)
            if sides.o.logsumexp[unsafe_offset=place] == neg_inf[F32]():
                sums[h] = 0  # y may be NaN
            if at.column() == 0:
                sides.o.delta[unsafe_offset=place] = sums[h]
    return sums


@__name(t"attention_grad_{side}_{mask.label()}{head}_{dtype}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * THREADS)))
def grad_kernel[
    dtype: DType, head: Int, keys: Bool, side: StaticString, mask: Mask
](o: AttentionGrad[dtype], blocks: Int32, tensors: MaskTensors[dtype]):
    """Computes dq of 64 queries of a head, or dk and dv of 64 keys.

    Parameters:
        dtype: Either bfloat16 or float16.
        head: Channels of a head, a multiple of 4.
        keys: Whether the rows are keys.
        side: What the rows are, for the kernel's symbol.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        blocks: Blocks of rows of a head.
        tensors: What masks read.
    """
    comptime assert not mask.keys, "attention_grad: here a mask of keys is a bias"
    comptime depth = padded(head)
    comptime COLUMNS = tile_columns(depth)
    comptime TILE = COLUMNS * depth
    wait_on_dependent_grids()
    launch_dependent_grids()

    var rows = external_memory[Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16]()
    var others = rows.unsafe_offset(ROWS * depth)
    var stages = others.unsafe_offset(ROWS * depth)
    var kept = stages.unsafe_offset(STAGES * 2 * TILE).unsafe_bitcast[Float32]()
    var at = Fragment(lane=Int32(thread_idx.x) & 31)
    var item = Int32(block_idx.x) // blocks
    var n = item // o.forward.heads
    var place = item - n * o.forward.heads
    var sides = _Sides[dtype, head, keys](o, n, place)
    var first = (Int32(block_idx.x) - item * blocks) * Int32(ROWS)
    var mine = first + _warp_row()
    var row = mine + at.row()
    var begin = Int32(0)
    var end = ceildiv(sides.columns(), Int32(COLUMNS))
    comptime if mask.causal:
        comptime if keys:  # the first query that sees the first of these keys
            begin = max(first - tensors.sizes.diagonal, 0) // Int32(COLUMNS)
        else:
            end = tensors.sizes.tiles[mask, COLUMNS](min(first + Int32(ROWS), o.forward.t) - 1, end)

    sides.copy[not keys, ROWS](first, sides.rows(), rows, others)
    if begin < end:
        sides.copy_tile(begin, stages)
        sides.keep(begin, sides.numbers(begin), kept)
    commit_copies()
    wait_copies[0]()
    barrier()
    var bound = SIMD[F32, 2](0)
    var sum = SIMD[F32, 2](0)
    comptime if not keys:
        sum = _sum_slopes[dtype, head](rebind[_Sides[dtype, head, False]](sides), others, row, at)
        comptime for h in range(2):
            bound[h] = sides.bound(row + Int32(8 * h))
    var a = Array[SIMD[U32, 4], depth // 16](uninitialized=True)
    var b = Array[SIMD[U32, 4], depth // 16](uninitialized=True)
    comptime if depth <= 64:
        comptime for step in range(depth // 16):
            a[step] = left_side[depth, step](rows, _warp_row())
            b[step] = left_side[depth, step](others, _warp_row())

    var scale = o.forward.scale * LOG2_E
    var grown = Array[Sums[depth], 1](fill=Sums[depth](fill=0))
    var values = Array[Sums[depth], 1](fill=Sums[depth](fill=0))
    for tile in range(begin, end):
        if tile > begin:
            wait_copies[0]()
            barrier()
        if tile + 1 < end:
            sides.copy_tile(tile + 1, stages)
        commit_copies()
        var ahead = sides.numbers(tile + 1)
        var left = stages.unsafe_offset(Int(tile & 1) * (2 * TILE))
        var right = left.unsafe_offset(TILE)
        var scores = _products[dtype, depth, COLUMNS](rows, a, left)
        var slopes = _products[dtype, depth, COLUMNS](others, b, right)
        comptime for j in range(COLUMNS // 8):
            comptime for e in range(2):
                var column = tile * Int32(COLUMNS) + at.column() + Int32(8 * j + e)
                comptime if keys:
                    var number = kept.unsafe_offset(
                        Int((tile & 1) * Int32(2 * COLUMNS) + column - tile * Int32(COLUMNS))
                    )
                    bound = SIMD[F32, 2](number[unsafe_offset=0])
                    sum = SIMD[F32, 2](number[unsafe_offset=COLUMNS])
                comptime for h in range(2):
                    comptime i = 4 * j + 2 * h + e
                    var own = row + Int32(8 * h)
                    var query = column if keys else own
                    var key = own if keys else column
                    var shift = -bound[h]
                    comptime if mask.bias:
                        if query < o.forward.t and key < o.forward.s:
                            var added = tensors.bias[
                                unsafe_offset=tensors.sizes.place(Int(n), Int(place), Int(query))
                                + Int(key)
                            ]
                            shift = widened(added).fma(LOG2_E, shift)
                    var p = exp2(scores[0][i].fma(scale, shift))
                    comptime if mask.causal:
                        if key > query + tensors.sizes.diagonal:
                            p = 0
                    if column >= sides.columns():
                        p = 0
                    scores[0][i] = p
                    slopes[0][i] = p * (slopes[0][i] - sum[h])
        add_values[depth](slopes, left, grown)
        comptime if keys:
            add_values[depth](scores, right, values)
            if tile + 1 < end:
                sides.keep(tile + 1, ahead, kept)

    if mine < sides.rows():
        var channel = (sides.key if keys else sides.query) + Int(mine) * Int(o.forward.c)
        var to = o.dk if keys else o.dq
        store_rows[dtype, depth, head, 1](
            to.unsafe_offset(channel),
            sides.rows() - mine,
            o.forward.c,
            rows,
            mine - first,
            grown,
            Array[Float32, 2](fill=o.forward.scale),
        )
        comptime if keys:
            store_rows[dtype, depth, head, 1](
                o.dv.unsafe_offset(channel),
                sides.rows() - mine,
                o.forward.c,
                others,
                mine - first,
                values,
                Array[Float32, 2](fill=1),
            )
