"""Attention on a CPU in bfloat16: y = softmax(scale * q k^T + bias) v, a block of queries of one head a task.

Both products are those of ops/gemm/tiles.mojo: 32 queries at a time against panels of 32 keys, then
their probabilities, rounded to bfloat16, against panels of 32 channels of the values. A task packs
the head's keys (pairs of channels side by side, turned over) and values (pairs of keys side by
side) once, and takes them up to 256 keys at a time, running maximum and sum of each query along
(Milakov and Gimelshein 2018, arXiv:1805.02867). Bound by the exponentials.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import Layout, alloc, bitcast, dealloc
from std.utils.numerics import nan, neg_inf

from ..gemm.tiles import BLOCK, SIDE, STEP, TILE, WIDTH
from ..gemm.tiles import Left, amx_granted, begin_tiles, end_tiles, multiply
from ..operands import BF16, F32, Data, narrowed, widened
from ..parallel import over_cores
from ..permute import transposed
from .config import LOG2_E, LOWEST, Attention
from .mask import Mask, MaskTensors

comptime KEYS = 256
"""Keys of a tile at most."""
comptime ROUNDER: Float32 = 12582912
"""1.5 x 2^23: added to a number of less than 2^22, it leaves the nearest integer in the lowest bits.
"""
comptime POWER: List[Float32] = [0.055171682, 0.24261116, 0.69326099, 0.99992807]
"""2^x on [-1/2, 1/2], a polynomial of degree 3 in x, to 1e-4 of it: an eighth of bfloat16's ulp."""


@always_inline
def _exp2[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes 2^x for x of at most 0, as good as 0 below -126; NaN for NaN."""
    var inside = x.lt(-126).select(SIMD[F32, width](-126), x)  # max would drop NaN
    var shifted = inside + ROUNDER
    var part = inside - (shifted - ROUNDER)
    comptime coefficients = POWER
    comptime first = coefficients[0]
    var power = SIMD[F32, width](first)
    comptime for i in range(1, len(coefficients)):
        comptime coefficient = coefficients[i]
        power = power.fma(part, coefficient)
    var exponent = bitcast[DType.int32, width](shifted) << 23
    return bitcast[F32, width](bitcast[DType.int32, width](power) + exponent)


def _pack_keys[depth: Int](k: Data[BF16], c: Int, count: Int, to: Data[BF16]):
    """Packs keys k[count, C] as columns: [count / 32, depth / 32, 2, 16, 16, 2], zero-padded."""
    for key in range(0, ceildiv(count, BLOCK) * BLOCK, SIDE):
        comptime for step in range(depth // STEP):
            var rows = Array[SIMD[DType.uint32, SIDE], SIDE](fill=0)
            comptime for i in range(SIDE):
                if key + i < count:
                    rows[i] = bitcast[DType.uint32, SIDE](
                        k.unsafe_load[width=STEP]((key + i) * c + step * STEP)
                    )
            var columns = transposed(rows)
            var tile = (key // BLOCK * (depth // STEP) + step) * 2 + key % BLOCK // SIDE
            comptime for i in range(SIDE):
                to.unsafe_store(tile * TILE + i * STEP, bitcast[BF16, STEP](columns[i]))


def _pack_values[depth: Int](v: Data[BF16], c: Int, count: Int, to: Data[BF16]):
    """Packs values v[count, C] as rows: [depth / 32, count / 32, 2, 16, 16, 2], zero-padded."""
    var steps = ceildiv(count, STEP)
    for key in range(0, steps * STEP, 2):
        comptime for column in range(0, depth, SIDE):
            var pair = Array[SIMD[BF16, SIDE], 2](fill=0)
            comptime for i in range(2):
                if key + i < count:
                    pair[i] = v.unsafe_load[width=SIDE]((key + i) * c + column)
            var tile = (column // BLOCK * steps + key // STEP) * 2 + column % BLOCK // SIDE
            to.unsafe_store(tile * TILE + key % STEP // 2 * STEP, pair[0].interleave(pair[1]))


struct _Scratch[depth: Int](TrivialRegisterPassable):
    """What a task keeps in memory of its own."""

    comptime FIXED = 4 * (BLOCK * (KEYS + Self.depth) + 2 * BLOCK) + 2 * BLOCK * (
        KEYS + Self.depth
    ) + 128 + 64
    """Bytes of all but keys and values, and of the alignment to cache lines."""

    var config: Data[DType.uint8]
    """Of AMX's tiles."""
    var zero: Data[DType.int64]
    """The offset of the only tap."""
    var scores: Data[F32]
    """Scores of a tile [KEYS / 32, 32, 32]."""
    var sums: Data[F32]
    """Sums of values [depth / 32, 32, 32]."""
    var top: Data[F32]
    """Highest score of each query."""
    var total: Data[F32]
    """Sum of its exponentials."""
    var shares: Data[BF16]
    """Probabilities [32, KEYS]."""
    var queries: Data[BF16]
    """Queries [32, depth], where there are fewer than 32."""
    var keys: Data[BF16]
    """Packed keys."""
    var values: Data[BF16]
    """Packed values, a tile of keys after the other."""

    def __init__(out self, memory: Data[DType.uint8], keys: Int):
        self.config = memory.unsafe_offset(-Int(memory) % 64)
        self.zero = rebind[Data[DType.int64]](self.config.unsafe_offset(64).unsafe_bitcast[Int64]())
        self.scores = rebind[Data[F32]](self.config.unsafe_offset(128).unsafe_bitcast[Float32]())
        self.sums = self.scores.unsafe_offset(BLOCK * KEYS)
        self.top = self.sums.unsafe_offset(BLOCK * Self.depth)
        self.total = self.top.unsafe_offset(BLOCK)
        self.shares = rebind[Data[BF16]](self.total.unsafe_offset(BLOCK).unsafe_bitcast[BFloat16]())
        self.queries = self.shares.unsafe_offset(BLOCK * KEYS)
        self.keys = self.queries.unsafe_offset(BLOCK * Self.depth)
        self.values = self.keys.unsafe_offset(keys * Self.depth)


@fieldwise_init
struct _Masks[mask: Mask](TrivialRegisterPassable):
    """The masks of a tile's queries and keys."""

    var bias: Data[BF16]
    """Of the first query and key."""
    var row: Int
    """Numbers of bias from a query to the next."""
    var queries: Int
    """Queries that are there."""
    var seen: Int
    """Keys of the tile that the first query sees, where attention is causal."""

    def apply(self, query: Int, scores: Data[F32], count: Int, scale: Float32):
        """Scales a query's scores and adds the bias, if there is one, and hides keys.

        32 keys of a query lie side by side, those of 32 queries one after the other.
        """
        if query >= self.queries:
            return
        comptime if Self.mask.bias:
            var bias = self.bias.unsafe_offset(query * self.row)
            for key in range(0, count, WIDTH):
                var to = scores.unsafe_offset(key // BLOCK * BLOCK * BLOCK + key % BLOCK)
                if key + WIDTH <= count:
                    var added = widened(bias.unsafe_load[width=WIDTH](key)) * LOG2_E
                    var score = to.unsafe_load[width=WIDTH]()
                    to.unsafe_store(0, score.fma(SIMD[F32, WIDTH](scale), added))
                else:
                    for i in range(count - key):
                        var added = widened(bias[unsafe_offset=key + i]) * LOG2_E
                        to[unsafe_offset=i] = to[unsafe_offset=i].fma(scale, added)
        comptime if Self.mask.causal:
            for key in range(max(0, self.seen + query), count):
                scores[unsafe_offset=key // BLOCK * BLOCK * BLOCK + key % BLOCK] = neg_inf[F32]()


@no_inline
def _weigh[
    depth: Int, mask: Mask
](
    s: _Scratch[depth],
    masks: _Masks[mask],
    rows: Int,
    count: Int,
    wide: Int,
    scale_all: Float32,
    fresh: Bool,
):
    """Turns the scores of `rows` queries for `count` keys into probabilities, `wide` of them.

    Where the highest score rises, sums and total of the tiles before shrink.
    """
    var scale = Float32(1) if mask.bias else scale_all
    for row in range(rows):
        var scores = s.scores.unsafe_offset(row * BLOCK)
        for key in range(count, wide):
            scores[unsafe_offset=key // BLOCK * BLOCK * BLOCK + key % BLOCK] = neg_inf[F32]()
        masks.apply(row, scores, count, scale_all)
        var highest = Array[SIMD[F32, WIDTH], BLOCK // WIDTH](fill=LOWEST)
        for at in range(0, wide * BLOCK, BLOCK * BLOCK):
            comptime for v in range(BLOCK // WIDTH):
                var score = scores.unsafe_load[width=WIDTH](at + v * WIDTH)
                highest[v] = score.gt(highest[v]).select(score, highest[v])
        comptime for v in range(1, BLOCK // WIDTH):
            highest[0] = max(highest[0], highest[v])
        var top = highest[0].reduce_max() * scale
        var total = Float32(0)
        if not fresh:
            var before = s.top[unsafe_offset=row]
            top = max(top, before)
            var factor = _exp2(before - top)
            total = s.total[unsafe_offset=row] * factor
            if factor < 1:
                comptime for panel in range(depth // BLOCK):
                    var sums = s.sums.unsafe_offset(panel * BLOCK * BLOCK + row * BLOCK)
                    comptime for v in range(0, BLOCK, WIDTH):
                        sums.unsafe_store(v, sums.unsafe_load[width=WIDTH](v) * factor)
        var all = Array[SIMD[F32, WIDTH], BLOCK // WIDTH](fill=0)
        var shares = s.shares.unsafe_offset(row * KEYS)
        for at in range(0, wide * BLOCK, BLOCK * BLOCK):
            comptime for v in range(BLOCK // WIDTH):
                var p = _exp2(scores.unsafe_load[width=WIDTH](at + v * WIDTH).fma(scale, -top))
                shares.unsafe_store(at // BLOCK + v * WIDTH, narrowed[BF16](p))
                all[v] += p
        comptime for v in range(BLOCK // WIDTH):
            total += all[v].reduce_add()
        s.top[unsafe_offset=row] = top
        s.total[unsafe_offset=row] = total


def attention_bf16[depth: Int, mask: Mask](o: Attention[BF16], tensors: MaskTensors[BF16]):
    """Attends on all cores.

    Parameters:
        depth: Channels of a head, a multiple of 32.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        tensors: What masks read.
    """
    comptime assert not mask.keys, "attention: on a CPU a mask of keys is a bias"
    var t, keys, c = Int(o.t), Int(o.s), Int(o.c)
    var heads = Int(o.n * o.heads)
    var tiles = ceildiv(keys, KEYS)
    var tile = ceildiv(ceildiv(keys, tiles), STEP) * STEP
    # Each block packs its head's keys and values again.
    var groups = ceildiv(t, BLOCK)
    var blocks = max(1, min(ceildiv(4 * parallelism_level(None), heads), ceildiv(groups, 4)))
    var amx = amx_granted()
    var scale = o.scale * LOG2_E

    def task(index: Int) {var}:
        var head, block = divmod(index, blocks)
        var n, channel = divmod(head, Int(o.heads))
        var k = o.k.unsafe_offset(n * keys * c + channel * depth)
        var v = o.v.unsafe_offset(n * keys * c + channel * depth)
        var start = n * t * c + channel * depth
        var room = tiles * tile * depth
        var memory = alloc(Layout[UInt8](count=_Scratch[depth].FIXED + 4 * room))
        var s = _Scratch[depth](rebind[Data[DType.uint8]](memory.unsafe_ptr()), tiles * tile)
        s.zero[unsafe_offset=0] = 0
        _pack_keys[depth](k, c, keys, s.keys)
        for first in range(0, keys, tile):
            _pack_values[depth](
                v.unsafe_offset(first * c),
                c,
                min(tile, keys - first),
                s.values.unsafe_offset(first * depth),
            )
        begin_tiles(s.config, amx)
        var left = Left(o.q.unsafe_offset(start), c, s.zero, 1, depth)
        if t < BLOCK:
            for i in range(t):
                comptime for d in range(0, depth, STEP):
                    s.queries.unsafe_store(
                        i * depth + d, o.q.unsafe_load[width=STEP](start + i * c + d)
                    )
            left = Left(s.queries, depth, s.zero, 1, depth)
        for group in range(groups * block // blocks, groups * (block + 1) // blocks):
            var begin = group * BLOCK
            var rows = BLOCK if t - begin > SIDE else SIDE
            var row = max(0, min(begin, t - rows))
            var bias = tensors.bias
            comptime if mask.bias:
                bias = bias.unsafe_offset(tensors.sizes.place(n, channel, row))
            for first in range(0, keys, tile):
                var count = min(tile, keys - first)
                var wide = ceildiv(count, STEP) * STEP
                for key in range(0, wide, BLOCK):
                    multiply(
                        left,
                        row,
                        row + SIDE,
                        rows // SIDE,
                        s.keys.unsafe_offset((first + key) * depth),
                        s.scores.unsafe_offset(key * BLOCK),
                        True,
                        amx,
                    )
                var seen = row + Int(tensors.sizes.diagonal) + 1 - first
                var masks = _Masks[mask](
                    bias.unsafe_offset(first), Int(tensors.sizes.row), t - row, seen
                )
                _weigh(s, masks, rows, count, wide, scale, first == 0)
                comptime for panel in range(depth // BLOCK):
                    multiply(
                        Left(s.shares, KEYS, s.zero, 1, wide),
                        0,
                        SIDE,
                        rows // SIDE,
                        s.values.unsafe_offset(first * depth + panel * wide * BLOCK),
                        s.sums.unsafe_offset(panel * BLOCK * BLOCK),
                        first == 0,
                        amx,
                    )
            for i in range(begin - row, min(rows, t - row)):
                var some = s.top[unsafe_offset=i] > LOWEST * (Float32(1) if mask.bias else scale)
                var inverse = 1 / s.total[unsafe_offset=i] if some else nan[F32]()
                comptime if mask.logsumexp:
                    var query = head * t + row + i
                    tensors.keep(query, s.top[unsafe_offset=i], s.total[unsafe_offset=i])
                var y = o.y.unsafe_offset(start + (row + i) * c)
                comptime for d in range(0, depth, WIDTH):
                    var sum = s.sums.unsafe_load[width=WIDTH](
                        d // BLOCK * BLOCK * BLOCK + i * BLOCK + d % BLOCK
                    )
                    y.unsafe_store(d, narrowed[BF16](sum * inverse))
        end_tiles(amx)
        dealloc(memory^)

    over_cores(task, heads * blocks)
