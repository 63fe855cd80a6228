"""Attention on a CPU: y = softmax(scale * q k^T + bias) v, a block of queries of one head a task.

A task walks over the keys, KEYS at a time: it turns them over and packs them beside their values
once for all its queries, then takes 6 queries at a time through both products in register tiles of 6
rows x 4 vectors (2 on AVX2), as ops/gemm/cpu.mojo does. Running maximum and sum of each query
(Milakov and Gimelshein 2018, arXiv:1805.02867), so that no more than 6 x KEYS scores exist. Tiles that
a bias of minus infinity hides from all queries of a task are passed over, as block-sparse attention has it.
Bound by the FMA units and, a quarter of the time, by the exponentials.
"""

from std.math import ceildiv
from std.memory import Layout, alloc, dealloc
from std.sys import CompilationTarget, simd_width_of
from std.utils.numerics import nan, neg_inf

from ..operands import F32, Data, narrowed, widened
from ..parallel import over_cores
from ..permute import transposed
from ..rows import exp_cpu
from .config import LOG2_E, LOWEST, Attention
from .mask import Mask, MaskTensors

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime VECTORS = 4 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 2
"""Vectors that a register tile is wide."""
comptime ROWS = 6
"""Queries that a register tile is high."""
comptime KEYS = 64
"""Keys of a tile."""
comptime BLOCK = 16 * ROWS
"""Queries of a task."""


@no_inline
def _multiply[
    dtype: DType, //, rows: Int, vectors: Int
](
    a: Data[dtype],
    a_pitch: Int,
    b: Data[F32],
    b_pitch: Int,
    steps: Int,
    factors: Data[F32],
    c: Data[F32],
    c_pitch: Int,
):
    """Computes c = factor * c + a b for a tile, with a factor for each row; 0 forgets c."""
    var tile = Array[SIMD[F32, WIDTH], rows * vectors](fill=0)
    comptime for i in range(rows):
        var factor = factors[unsafe_offset=i]
        if factor != 0:
            comptime for v in range(vectors):
                tile[i * vectors + v] = factor * c.unsafe_load[width=WIDTH](i * c_pitch + v * WIDTH)
    for k in range(steps):
        var columns = Array[SIMD[F32, WIDTH], vectors](uninitialized=True)
        comptime for v in range(vectors):
            columns[v] = b.unsafe_load[width=WIDTH](k * b_pitch + v * WIDTH)
        comptime for i in range(rows):
            var row = SIMD[F32, WIDTH](widened(a[unsafe_offset=i * a_pitch + k]))
            comptime for v in range(vectors):
                tile[i * vectors + v] = row.fma(columns[v], tile[i * vectors + v])
    comptime for i in range(rows):
        comptime for v in range(vectors):
            c.unsafe_store(i * c_pitch + v * WIDTH, tile[i * vectors + v])


struct _Scratch[depth: Int](TrivialRegisterPassable):
    """What a task keeps in memory of its own."""

    comptime PITCH = ceildiv(Self.depth, WIDTH) * WIDTH
    comptime COUNT = KEYS * (Self.depth + Self.PITCH + ROWS) + BLOCK * (Self.PITCH + 2) + 2 * ROWS

    var keys: Data[F32]
    """Keys [D, KEYS], turned over."""
    var values: Data[F32]
    """Values [KEYS, PITCH]."""
    var scores: Data[F32]
    """Scores, then probabilities [ROWS, KEYS]."""
    var sums: Data[F32]
    """Sums of values [BLOCK, PITCH]."""
    var top: Data[F32]
    """Highest score of each query."""
    var total: Data[F32]
    """Sum of its exponentials."""
    var factors: Data[F32]
    """What its sums shrink by, where the highest score rises."""
    var zeros: Data[F32]
    """Zero factors."""

    def __init__(out self, memory: Data[F32]):
        self.keys = memory
        self.values = self.keys.unsafe_offset(Self.depth * KEYS)
        self.scores = self.values.unsafe_offset(KEYS * Self.PITCH)
        self.sums = self.scores.unsafe_offset(ROWS * KEYS)
        self.top = self.sums.unsafe_offset(BLOCK * Self.PITCH)
        self.total = self.top.unsafe_offset(BLOCK)
        self.factors = self.total.unsafe_offset(BLOCK)
        self.zeros = self.factors.unsafe_offset(ROWS)


def turn_over[dtype: DType, //, depth: Int](source: Data[dtype], c: Int, count: Int, to: Data[F32]):
    """Lays rows out as columns, for products with them: to[D, KEYS]; zeros after the last row.

    Parameters:
        dtype: Of the rows.
        depth: Channels of a head.

    Args:
        source: The first row of a head.
        c: Channels of all heads.
        count: Rows, at most KEYS.
        to: Where they go.
    """
    comptime WHOLE = depth // WIDTH * WIDTH
    for row in range(0, KEYS, WIDTH):
        var rows = source.unsafe_offset(row * c)
        for d in range(0, WHOLE, WIDTH):
            var held = Array[SIMD[F32, WIDTH], WIDTH](fill=0)
            comptime for i in range(WIDTH):
                if row + i < count:
                    held[i] = widened(rows.unsafe_load[width=WIDTH](i * c + d))
            var turned = transposed(held)
            comptime for i in range(WIDTH):
                to.unsafe_store((d + i) * KEYS + row, turned[i])
        for i in range(WIDTH):
            comptime for d in range(WHOLE, depth):
                var number = widened(rows[unsafe_offset=i * c + d]) if row + i < count else 0
                to[unsafe_offset=d * KEYS + row + i] = number


def widen_rows[
    dtype: DType, //, depth: Int
](source: Data[dtype], c: Int, count: Int, to: Data[F32]):
    """Lays rows out one behind the other: to[count, D], D rounded up to whole vectors.

    Parameters:
        dtype: Of the rows.
        depth: Channels of a head.

    Args:
        source: The first row of a head.
        c: Channels of all heads.
        count: Rows.
        to: Where they go; what is behind D stays as it is.
    """
    comptime WHOLE = depth // WIDTH * WIDTH
    comptime PITCH = ceildiv(depth, WIDTH) * WIDTH
    for i in range(count):
        var numbers = source.unsafe_offset(i * c)
        var row = to.unsafe_offset(i * PITCH)
        comptime for d in range(0, WHOLE, WIDTH):
            row.unsafe_store(d, widened(numbers.unsafe_load[width=WIDTH](d)))
        comptime for d in range(WHOLE, depth):
            row[unsafe_offset=d] = widened(numbers[unsafe_offset=d])


def narrow_row[dtype: DType, //, depth: Int](source: Data[F32], factor: Float32, to: Data[dtype]):
    """Multiplies a row and rounds it.

    Parameters:
        dtype: Of the result.
        depth: Channels of a head.

    Args:
        source: The row.
        factor: What it is multiplied by.
        to: Where it goes.
    """
    comptime WHOLE = depth // WIDTH * WIDTH
    comptime for d in range(0, WHOLE, WIDTH):
        to.unsafe_store(d, narrowed[dtype](source.unsafe_load[width=WIDTH](d) * factor))
    comptime for d in range(WHOLE, depth):
        to[unsafe_offset=d] = narrowed[dtype](source[unsafe_offset=d] * factor)


@fieldwise_init
struct Masks[dtype: DType, mask: Mask](TrivialRegisterPassable):
    """The masks of some queries, and of the packed keys.

    Parameters:
        dtype: Of the bias.
        mask: What is done to the scores.
    """

    var bias: Data[Self.dtype]
    """Of the first query and key."""
    var row: Int
    """Numbers of bias from a query to the next."""
    var seen: Int
    """Keys that the first query sees, where attention is causal."""

    def from_query(self, query: Int) -> Self:
        """Moves on to another query.

        Args:
            query: How many further on it is.

        Returns:
            The masks from there.
        """
        return Self(self.bias.unsafe_offset(query * self.row), self.row, self.seen + query)

    def hides(self, queries: Int, count: Int) -> Bool:
        """Tells whether the bias hides all keys of a tile from all queries of a block.

        Args:
            queries: How many queries there are, from this one on.
            count: How many keys.

        Returns:
            False where there is no bias.
        """
        comptime if Self.mask.bias:
            for query in range(queries):
                for key in range(count):
                    if self.bias[unsafe_offset=query * self.row + key] != neg_inf[Self.dtype]():
                        return False
            return True
        return False

    def apply(self, query: Int, scores: Data[F32], count: Int, scale: Float32):
        """Scales a query's scores and adds the bias, if there is one, and hides keys.

        Args:
            query: The query.
            scores: Of the packed keys.
            count: How many keys there are.
            scale: Scales the scores, if there is a bias.
        """
        comptime if Self.mask.bias:
            var bias = self.bias.unsafe_offset(query * self.row)
            var whole = count // WIDTH * WIDTH
            for key in range(0, whole, WIDTH):
                var added = widened(bias.unsafe_load[width=WIDTH](key))
                var score = scores.unsafe_load[width=WIDTH](key)
                scores.unsafe_store(key, score.fma(SIMD[F32, WIDTH](scale), added))
            for key in range(whole, count):
                var score = scores[unsafe_offset=key]
                scores[unsafe_offset=key] = score.fma(scale, widened(bias[unsafe_offset=key]))
        comptime if Self.mask.causal:
            for key in range(max(0, self.seen + query), count):
                scores[unsafe_offset=key] = neg_inf[F32]()


def _attend[
    dtype: DType, mask: Mask, //, depth: Int, rows: Int
](
    q: Data[dtype],
    c: Int,
    first: Int,
    count: Int,
    scale_all: Float32,
    masks: Masks[dtype, mask],
    s: _Scratch[depth],
):
    """Attends from `rows` queries, from number `first` of the block on, to the packed keys."""
    var scale = Float32(1) if mask.bias else scale_all
    comptime COLUMNS = VECTORS * WIDTH
    for column in range(0, KEYS, COLUMNS):
        _multiply[rows, VECTORS](
            q,
            c,
            s.keys.unsafe_offset(column),
            KEYS,
            depth,
            s.zeros,
            s.scores.unsafe_offset(column),
            KEYS,
        )
    comptime for row in range(rows):
        var scores = s.scores.unsafe_offset(row * KEYS)
        for key in range(count, KEYS):
            scores[unsafe_offset=key] = neg_inf[F32]()
        masks.apply(row, scores, count, scale_all)
        var highest = SIMD[F32, WIDTH](s.top[unsafe_offset=first + row])
        comptime for i in range(KEYS // WIDTH):
            highest = max(highest, scores.unsafe_load[width=WIDTH](i * WIDTH))
        var top = highest.reduce_max()
        var total = SIMD[F32, WIDTH](0)
        comptime for i in range(KEYS // WIDTH):
            var p = exp_cpu((scores.unsafe_load[width=WIDTH](i * WIDTH) - top) * scale)
            scores.unsafe_store(i * WIDTH, p)
            total += p
        var factor = exp_cpu((s.top[unsafe_offset=first + row] - top) * scale)
        s.top[unsafe_offset=first + row] = top
        s.total[unsafe_offset=first + row] = (
            s.total[unsafe_offset=first + row] * factor + total.reduce_add()
        )
        s.factors[unsafe_offset=row] = factor
    comptime for v in range(0, s.PITCH // WIDTH, VECTORS):
        comptime vectors = min(VECTORS, s.PITCH // WIDTH - v)
        _multiply[rows, vectors](
            s.scores,
            KEYS,
            s.values.unsafe_offset(v * WIDTH),
            s.PITCH,
            count,
            s.factors,
            s.sums.unsafe_offset(first * s.PITCH + v * WIDTH),
            s.PITCH,
        )


def attention_cpu[
    dtype: DType, //, depth: Int, mask: Mask
](o: Attention[dtype], tensors: MaskTensors[dtype]):
    """Attends on all cores.

    Parameters:
        dtype: Of the tensors, float32 or bfloat16.
        depth: Channels of a head.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        tensors: What masks read.
    """
    comptime assert not mask.keys, "attention: on a CPU a mask of keys is a bias"
    var blocks = ceildiv(Int(o.t), BLOCK)

    def task(index: Int) {var}:
        var c = Int(o.c)
        var head = index // blocks
        var n = head // Int(o.heads)
        var channel = (head - n * Int(o.heads)) * depth
        var begin = (index - head * blocks) * BLOCK
        var queries = min(BLOCK, Int(o.t) - begin)
        var start = (n * Int(o.t) + begin) * c + channel
        var q = o.q.unsafe_offset(start)
        var memory = alloc(Layout[Float32](count=_Scratch[depth].COUNT))
        var s = _Scratch[depth](rebind[Data[F32]](memory.unsafe_ptr()))
        for i in range(_Scratch[depth].COUNT):
            s.keys[unsafe_offset=i] = 0
        for i in range(queries):
            s.top[unsafe_offset=i] = LOWEST

        var bias = tensors.bias
        comptime if mask.bias:
            bias = bias.unsafe_offset(tensors.sizes.place(n, head - n * Int(o.heads), begin))
        for first_key in range(0, Int(o.s), KEYS):
            var seen = begin + Int(tensors.sizes.diagonal) + 1 - first_key
            comptime if mask.causal:
                if seen + queries <= 1:
                    break
            var count = min(KEYS, Int(o.s) - first_key)
            var masks = Masks[dtype, mask](
                bias.unsafe_offset(first_key), Int(tensors.sizes.row), seen
            )
            if masks.hides(queries, count):
                continue
            var at = (n * Int(o.s) + first_key) * c + channel
            turn_over[depth](o.k.unsafe_offset(at), c, count, s.keys)
            widen_rows[depth](o.v.unsafe_offset(at), c, count, s.values)
            var whole = queries // ROWS * ROWS
            for i in range(0, whole, ROWS):
                _attend[depth, ROWS](
                    q.unsafe_offset(i * c), c, i, count, o.scale, masks.from_query(i), s
                )
            for i in range(whole, queries):
                _attend[depth, 1](
                    q.unsafe_offset(i * c), c, i, count, o.scale, masks.from_query(i), s
                )

        for i in range(queries):
            var some = s.top[unsafe_offset=i] > LOWEST
            var inverse = 1 / s.total[unsafe_offset=i] if some else nan[F32]()
            comptime if mask.logsumexp:
                var scale = LOG2_E if mask.bias else o.scale * LOG2_E
                var query = head * Int(o.t) + begin + i
                tensors.keep(query, s.top[unsafe_offset=i] * scale, s.total[unsafe_offset=i])
            narrow_row[depth](
                s.sums.unsafe_offset(i * s.PITCH), inverse, o.y.unsafe_offset(start + i * c)
            )
        dealloc(memory^)

    over_cores(task, blocks * Int(o.n * o.heads))
