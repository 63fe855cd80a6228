"""The gradients of attention on a CPU: some tiles of keys of one head a task.

A task widens the head's queries and slopes (dy) to float32 and takes KEYS keys at a time against
BLOCK queries at a time: scores and their slopes of such a block lie in the first-level cache, and
from them the sums of the keys, of the values and of the queries grow. These are the five products of
the paper, all in register tiles of 6 rows x 4 vectors (2 on AVX2), as in ops/attention/cpu.mojo. A
task has sums of dq of its own; where heads are fewer than cores, several tasks share a head, and
their sums are added in the order of the keys. Bound by the FMA units.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import Layout, alloc, dealloc
from std.utils.numerics import inf, neg_inf

from ..attention.cpu import KEYS, ROWS, VECTORS, WIDTH, Masks
from ..attention.cpu import narrow_row, turn_over, widen_rows
from ..attention.mask import Mask, MaskTensors
from ..operands import F32, Data, widened
from ..parallel import over_cores
from ..rows import exp_cpu
from .tensors import AttentionGrad

comptime BLOCK = 8 * ROWS
"""Queries of a block."""


@no_inline
def _multiply[
    rows: Int, vectors: Int, clear: Bool
](
    a: Data[F32],
    a_row: Int,
    a_step: Int,
    b: Data[F32],
    b_pitch: Int,
    steps: Int,
    c: Data[F32],
    c_pitch: Int,
):
    """Computes c = a b, or c += a b, for a tile; the numbers of a lie in rows or in columns."""
    var tile = Array[SIMD[F32, WIDTH], rows * vectors](fill=0)
    comptime if not clear:
        comptime for i in range(rows):
            comptime for v in range(vectors):
                tile[i * vectors + v] = c.unsafe_load[width=WIDTH](i * c_pitch + v * WIDTH)
    for k in range(steps):
        var columns = Array[SIMD[F32, WIDTH], vectors](uninitialized=True)
        comptime for v in range(vectors):
            columns[v] = b.unsafe_load[width=WIDTH](k * b_pitch + v * WIDTH)
        comptime for i in range(rows):
            var row = SIMD[F32, WIDTH](a[unsafe_offset=i * a_row + k * a_step])
            comptime for v in range(vectors):
                tile[i * vectors + v] = row.fma(columns[v], tile[i * vectors + v])
    comptime for i in range(rows):
        comptime for v in range(vectors):
            c.unsafe_store(i * c_pitch + v * WIDTH, tile[i * vectors + v])


def _score[depth: Int](rows: Data[F32], columns: Data[F32], count: Int, scores: Data[F32]):
    """Computes scores[count, KEYS] of rows [count, PITCH] and columns [D, KEYS]."""
    comptime PITCH = _Scratch[depth].PITCH
    for i in range(0, count, ROWS):
        comptime for column in range(0, KEYS, VECTORS * WIDTH):
            _multiply[ROWS, VECTORS, True](
                rows.unsafe_offset(i * PITCH),
                PITCH,
                1,
                columns.unsafe_offset(column),
                KEYS,
                depth,
                scores.unsafe_offset(i * KEYS + column),
                KEYS,
            )


def _add[
    depth: Int, rows: Int
](a: Data[F32], a_row: Int, a_step: Int, b: Data[F32], steps: Int, c: Data[F32]):
    """Adds a[rows, steps] b[steps, PITCH] to c[rows, PITCH]."""
    comptime PITCH = _Scratch[depth].PITCH
    comptime for v in range(0, PITCH // WIDTH, VECTORS):
        _multiply[rows, min(VECTORS, PITCH // WIDTH - v), False](
            a,
            a_row,
            a_step,
            b.unsafe_offset(v * WIDTH),
            PITCH,
            steps,
            c.unsafe_offset(v * WIDTH),
            PITCH,
        )


def _add_to_keys[depth: Int](shares: Data[F32], rows: Data[F32], count: Int, sums: Data[F32]):
    """Adds shares[count, KEYS]^T rows[count, PITCH] to sums[KEYS, PITCH]."""
    comptime PITCH = _Scratch[depth].PITCH
    comptime WHOLE = KEYS // ROWS * ROWS
    for key in range(0, WHOLE, ROWS):
        _add[depth, ROWS](
            shares.unsafe_offset(key), 1, KEYS, rows, count, sums.unsafe_offset(key * PITCH)
        )
    _add[depth, KEYS - WHOLE](
        shares.unsafe_offset(WHOLE), 1, KEYS, rows, count, sums.unsafe_offset(WHOLE * PITCH)
    )


struct _Scratch[depth: Int](TrivialRegisterPassable):
    """What a task keeps in memory of its own."""

    comptime PITCH = ceildiv(Self.depth, WIDTH) * WIDTH
    comptime FIXED = KEYS * (2 * Self.depth + 3 * Self.PITCH) + 2 * BLOCK * KEYS
    """Numbers that do not depend on the sizes."""
    comptime EACH = 2 * Self.PITCH + 2
    """Numbers for each query."""

    var keys: Data[F32]
    """Keys [D, KEYS], turned over."""
    var values: Data[F32]
    """Values [D, KEYS], turned over."""
    var rows: Data[F32]
    """Keys [KEYS, PITCH]."""
    var dk: Data[F32]
    """Sums for the keys [KEYS, PITCH]."""
    var dv: Data[F32]
    """Sums for the values [KEYS, PITCH]."""
    var shares: Data[F32]
    """Scores, then probabilities [BLOCK, KEYS]."""
    var slopes: Data[F32]
    """Their gradients [BLOCK, KEYS]."""
    var queries: Data[F32]
    """Queries [T, PITCH], zeros after the last."""
    var dy: Data[F32]
    """Gradients of the result, likewise."""
    var logsumexp: Data[F32]
    """Of each query; infinity for one that sees no key or is not there."""
    var delta: Data[F32]
    """Sum of dy * y of each query."""

    def __init__(out self, memory: Data[F32], t: Int):
        self.keys = memory
        self.values = self.keys.unsafe_offset(Self.depth * KEYS)
        self.rows = self.values.unsafe_offset(Self.depth * KEYS)
        self.dk = self.rows.unsafe_offset(KEYS * Self.PITCH)
        self.dv = self.dk.unsafe_offset(KEYS * Self.PITCH)
        self.shares = self.dv.unsafe_offset(KEYS * Self.PITCH)
        self.slopes = self.shares.unsafe_offset(BLOCK * KEYS)
        self.queries = self.slopes.unsafe_offset(BLOCK * KEYS)
        self.dy = self.queries.unsafe_offset(t * Self.PITCH)
        self.logsumexp = self.dy.unsafe_offset(t * Self.PITCH)
        self.delta = self.logsumexp.unsafe_offset(t)


def _take_queries[
    dtype: DType, depth: Int, //
](o: AttentionGrad[dtype], head: Int, start: Int, padded: Int, s: _Scratch[depth]):
    """Widens the queries of a head and their slopes, and adds up dy * y."""
    var t, c = Int(o.forward.t), Int(o.forward.c)
    widen_rows[depth](o.forward.q.unsafe_offset(start), c, t, s.queries)
    widen_rows[depth](o.dy.unsafe_offset(start), c, t, s.dy)
    for i in range(padded):
        var sum = Float32(0)
        var bound = inf[F32]()
        if i < t:
            var y = o.forward.y.unsafe_offset(start + i * c)
            var dy = s.dy.unsafe_offset(i * s.PITCH)
            comptime WHOLE = depth // WIDTH * WIDTH
            var sums = SIMD[F32, WIDTH](0)
            comptime for d in range(0, WHOLE, WIDTH):
                var numbers = widened(y.unsafe_load[width=WIDTH](d))
                sums = numbers.fma(dy.unsafe_load[width=WIDTH](d), sums)
            sum = sums.reduce_add()
            comptime for d in range(WHOLE, depth):
                sum = widened(y[unsafe_offset=d]).fma(dy[unsafe_offset=d], sum)
            var kept = o.logsumexp[unsafe_offset=head * t + i]
            if kept != neg_inf[F32]():
                bound = kept
            else:
                sum = 0  # y may be NaN
        s.logsumexp[unsafe_offset=i] = bound
        s.delta[unsafe_offset=i] = sum


def _weigh[
    dtype: DType, depth: Int, mask: Mask, //
](
    s: _Scratch[depth],
    masks: Masks[dtype, mask],
    first: Int,
    rows: Int,
    there: Int,
    count: Int,
    scale_all: Float32,
):
    """Turns scores into probabilities, and their slopes into the gradients of the scores.

    Of `rows` queries of a block, from number `first` on, `there` are there, and `count` keys are.
    """
    var scale = Float32(1) if mask.bias else scale_all
    for row in range(rows):
        var scores = s.shares.unsafe_offset(row * KEYS)
        var slopes = s.slopes.unsafe_offset(row * KEYS)
        if row >= there:  # zeros times infinite keys are NaN
            comptime for i in range(0, KEYS, WIDTH):
                scores.unsafe_store(i, SIMD[F32, WIDTH](0))
                slopes.unsafe_store(i, SIMD[F32, WIDTH](0))
            continue
        masks.apply(row, scores, count, scale_all)
        for key in range(count, KEYS):
            scores[unsafe_offset=key] = neg_inf[F32]()
        var bound = s.logsumexp[unsafe_offset=first + row]
        var delta = s.delta[unsafe_offset=first + row]
        comptime for i in range(0, KEYS, WIDTH):
            var p = exp_cpu(scores.unsafe_load[width=WIDTH](i).fma(scale, -bound))
            scores.unsafe_store(i, p)
            slopes.unsafe_store(i, p * (slopes.unsafe_load[width=WIDTH](i) - delta))


def attention_grad_cpu[
    dtype: DType, //, depth: Int, mask: Mask
](o: AttentionGrad[dtype], tensors: MaskTensors[dtype]):
    """Computes the gradients on all cores.

    Parameters:
        dtype: Of the tensors, float32 or bfloat16.
        depth: Channels of a head.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        tensors: What masks read.
    """
    comptime assert not mask.keys, "attention_grad: on a CPU a mask of keys is a bias"
    comptime PITCH = _Scratch[depth].PITCH
    var t, keys = Int(o.forward.t), Int(o.forward.s)
    var heads = Int(o.forward.n * o.forward.heads)
    var tiles = ceildiv(keys, KEYS)
    var parts = min(tiles, ceildiv(parallelism_level(None), heads))
    var padded = ceildiv(t, ROWS) * ROWS
    var sums = alloc(Layout[Float32](count=max(1, heads * parts * padded * PITCH)))
    var dq = rebind[Data[F32]](sums.unsafe_ptr())

    def task(index: Int) {var}:
        var c = Int(o.forward.c)
        var head, part = divmod(index, parts)
        var n, place = divmod(head, Int(o.forward.heads))
        var start = n * t * c + place * depth
        comptime S = _Scratch[depth]
        var memory = alloc(Layout[Float32](count=S.FIXED + S.EACH * padded))
        var s = S(rebind[Data[F32]](memory.unsafe_ptr()), padded)
        for i in range(S.FIXED + S.EACH * padded):
            s.keys[unsafe_offset=i] = 0
        _take_queries(o, head, start, padded, s)
        var mine = dq.unsafe_offset(index * padded * PITCH)
        for i in range(padded * PITCH):
            mine[unsafe_offset=i] = 0
        for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
            var first = tile * KEYS
            var count = min(KEYS, keys - first)
            var at = (n * keys + first) * c + place * depth
            turn_over[depth](o.forward.k.unsafe_offset(at), c, count, s.keys)
            turn_over[depth](o.forward.v.unsafe_offset(at), c, count, s.values)
            widen_rows[depth](o.forward.k.unsafe_offset(at), c, count, s.rows)
            for i in range(2 * KEYS * PITCH):
                s.dk[unsafe_offset=i] = 0
            for begin in range(0, padded, BLOCK):
                var rows = min(BLOCK, padded - begin)
                var seen = begin + Int(tensors.sizes.diagonal) + 1 - first
                comptime if mask.causal:
                    if seen + rows <= 1:
                        continue
                var queries = s.queries.unsafe_offset(begin * PITCH)
                var dy = s.dy.unsafe_offset(begin * PITCH)
                _score[depth](queries, s.keys, rows, s.shares)
                _score[depth](dy, s.values, rows, s.slopes)
                var bias = tensors.bias
                comptime if mask.bias:
                    bias = bias.unsafe_offset(tensors.sizes.place(n, place, begin) + first)
                var masks = Masks[dtype, mask](bias, Int(tensors.sizes.row), seen)
                _weigh(s, masks, begin, rows, t - begin, count, o.forward.scale)
                _add_to_keys[depth](s.shares, dy, rows, s.dv)
                _add_to_keys[depth](s.slopes, queries, rows, s.dk)
                for i in range(0, rows, ROWS):
                    _add[depth, ROWS](
                        s.slopes.unsafe_offset(i * KEYS),
                        KEYS,
                        1,
                        s.rows,
                        count,
                        mine.unsafe_offset((begin + i) * PITCH),
                    )
            for key in range(count):
                var row = key * PITCH
                narrow_row[depth](
                    s.dk.unsafe_offset(row), o.forward.scale, o.dk.unsafe_offset(at + key * c)
                )
                narrow_row[depth](s.dv.unsafe_offset(row), 1, o.dv.unsafe_offset(at + key * c))
        dealloc(memory^)

    over_cores(task, heads * parts)

    def finish(head: Int) {var}:
        var c = Int(o.forward.c)
        var n, place = divmod(head, Int(o.forward.heads))
        var whole = dq.unsafe_offset(head * parts * padded * PITCH)
        for part in range(1, parts):
            var other = whole.unsafe_offset(part * padded * PITCH)
            for i in range(0, t * PITCH, WIDTH):
                var sum = whole.unsafe_load[width=WIDTH](i) + other.unsafe_load[width=WIDTH](i)
                whole.unsafe_store(i, sum)
        for i in range(t):
            var to = o.dq.unsafe_offset((n * t + i) * c + place * depth)
            narrow_row[depth](whole.unsafe_offset(i * PITCH), o.forward.scale, to)

    over_cores(finish, heads)
    dealloc(sums^)
