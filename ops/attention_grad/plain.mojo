"""The gradients of attention on any GPU, without tensor cores: float32 arithmetic, heads of any depth.

Two kernels, for dq and for dk and dv, as mma.mojo has them. A block takes 32 rows of a head (16 of
heads above 96), 8 (4) for each of its 4 groups of 32 lanes, and walks over the columns, 32 at a time,
through shared memory. A lane scores one column for the rows of its group, then adds up its channels.
Bound by the loads of shared memory.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv, exp
from std.utils.numerics import inf, neg_inf

from ..attention.mask import Mask, MaskTensors
from ..attention.plain import GROUPS, LANES, pitch
from ..operands import F32, Data, Shared
from .tensors import AttentionGrad

comptime THREADS = GROUPS * LANES
"""Threads of a block."""


def group_rows(depth: Int) -> Int:
    """Says how many rows a group has.

    Args:
        depth: Channels of a head.

    Returns:
        8, or 4 of heads so deep that more leave no room for columns.
    """
    return 8 if depth <= 96 else 4


def plain_grad_shared_bytes(depth: Int) -> Int:
    """Counts the shared memory of a block: rows, columns, probabilities and their gradients.

    Args:
        depth: Channels of a head.

    Returns:
        Bytes.
    """
    var rows = GROUPS * group_rows(depth)
    return 4 * (2 * pitch(depth) * (rows + LANES) + 2 * rows * LANES)


@always_inline
def _load[
    dtype: DType, depth: Int, count: Int
](source: Data[dtype], c: Int, left: Int, to: Shared[F32]):
    """Loads rows of a head, `left` of which are there; zeros for the others."""
    comptime PITCH = pitch(depth)
    for i in range(Int(thread_idx.x), count * PITCH, THREADS):
        var row = i // PITCH
        var d = i - row * PITCH
        var value = Float32(0)
        if d < depth and row < left:
            value = source[unsafe_offset=row * c + d].cast[F32]()
        to[unsafe_offset=i] = value


@__name(t"attention_grad_plain_{side}_{mask.label()}{depth}_{dtype}")
def plain_grad_kernel[
    dtype: DType, depth: Int, keys: Bool, side: StaticString, mask: Mask
](o: AttentionGrad[dtype], blocks: Int32, tensors: MaskTensors[dtype]):
    """Computes dq of a block of queries of a head, or dk and dv of keys.

    Parameters:
        dtype: Of all tensors but logsumexp and delta.
        depth: Channels of a head.
        keys: Whether the rows are keys, and the columns queries.
        side: What the rows are, for the kernel's symbol.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        blocks: Blocks of rows of a head.
        tensors: What masks read.
    """
    comptime assert not mask.keys, "attention_grad: here a mask of keys is a bias"
    comptime PITCH = pitch(depth)
    comptime EACH = group_rows(depth)
    comptime ROWS = GROUPS * EACH
    comptime OUT = ceildiv(depth, LANES)
    var rows = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var others = rows.unsafe_offset(ROWS * PITCH)
    var left = others.unsafe_offset(ROWS * PITCH)
    var right = left.unsafe_offset(LANES * PITCH)
    var group = Int(thread_idx.x) // LANES
    var lane = Int(thread_idx.x) % LANES
    var ds = right.unsafe_offset(LANES * PITCH + group * (2 * EACH * LANES))
    var shares = ds.unsafe_offset(EACH * LANES)
    var mine = rows.unsafe_offset(group * (EACH * PITCH))
    var mine2 = others.unsafe_offset(group * (EACH * PITCH))
    wait_on_dependent_grids()
    launch_dependent_grids()

    var f = o.forward
    var t, s, c = Int(f.t), Int(f.s), Int(f.c)
    var item = Int(block_idx.x) // Int(blocks)
    var n, place = divmod(item, Int(f.heads))
    var query0 = n * t * c + place * depth
    var key0 = n * s * c + place * depth
    var head = item * t
    var first = (Int(block_idx.x) - item * Int(blocks)) * ROWS
    var row0 = first + group * EACH
    var count = s if keys else t
    var columns = t if keys else s
    var at = (key0 if keys else query0) + first * c
    _load[dtype, depth, ROWS]((f.k if keys else f.q).unsafe_offset(at), c, count - first, rows)
    _load[dtype, depth, ROWS]((f.v if keys else o.dy).unsafe_offset(at), c, count - first, others)

    var bound = SIMD[F32, EACH](inf[F32]())
    var delta = SIMD[F32, EACH](0)
    comptime if not keys:
        barrier()
        comptime for row in range(EACH):
            if row0 + row < t:
                var sum = Float32(0)
                for d in range(lane, depth, LANES):
                    var y = f.y[unsafe_offset=query0 + (row0 + row) * c + d].cast[F32]()
                    sum = y.fma(mine2[unsafe_offset=row * PITCH + d], sum)
                comptime for bit in range(5):
                    sum += warp.shuffle_xor(sum, UInt32(1 << bit))
                var kept = o.logsumexp[unsafe_offset=head + row0 + row]
                if kept != neg_inf[F32]():
                    bound[row] = kept
                else:
                    sum = 0  # y may be NaN
                delta[row] = sum
                if lane == 0:
                    o.delta[unsafe_offset=head + row0 + row] = sum

    var grown = Array[SIMD[F32, EACH], OUT](fill=0)
    var values = Array[SIMD[F32, EACH], OUT](fill=0)
    for column0 in range(0, columns, LANES):
        comptime if mask.causal:
            comptime if keys:
                if column0 + LANES - 1 + Int(tensors.sizes.diagonal) < first:
                    continue
            else:
                if column0 > first + ROWS - 1 + Int(tensors.sizes.diagonal):
                    break
        barrier()
        var from_ = (query0 if keys else key0) + column0 * c
        _load[dtype, depth, LANES](
            (f.q if keys else f.k).unsafe_offset(from_), c, columns - column0, left
        )
        _load[dtype, depth, LANES](
            (o.dy if keys else f.v).unsafe_offset(from_), c, columns - column0, right
        )
        barrier()

        var score = SIMD[F32, EACH](0)
        var slope = SIMD[F32, EACH](0)
        for d in range(0, depth, 4):
            var a = left.unsafe_load[width=4, alignment=16](lane * PITCH + d)
            var b = right.unsafe_load[width=4, alignment=16](lane * PITCH + d)
            comptime for row in range(EACH):
                var x = mine.unsafe_load[width=4, alignment=16](row * PITCH + d)
                var z = mine2.unsafe_load[width=4, alignment=16](row * PITCH + d)
                comptime for i in range(4):
                    score[row] = x[i].fma(a[i], score[row])
                    slope[row] = z[i].fma(b[i], slope[row])
        var column = column0 + lane
        comptime if keys:
            bound = inf[F32]()
            if column < t:
                var kept = o.logsumexp[unsafe_offset=head + column]
                if kept != neg_inf[F32]():
                    bound = kept
                delta = o.delta[unsafe_offset=head + column]
        score *= f.scale
        comptime for row in range(EACH):
            var query = column if keys else row0 + row
            var key = row0 + row if keys else column
            comptime if mask.bias:
                if query < t and key < s:
                    var added = tensors.sizes.place(n, place, query) + key
                    score[row] += tensors.bias[unsafe_offset=added].cast[F32]()
            var p = exp(score[row] - bound[row])
            comptime if mask.causal:
                if key > query + Int(tensors.sizes.diagonal):
                    p = 0
            if column >= columns:
                p = 0
            ds[unsafe_offset=row * LANES + lane] = p * (slope[row] - delta[row])
            comptime if keys:
                shares[unsafe_offset=row * LANES + lane] = p
        barrier()
        for j in range(min(LANES, columns - column0)):
            var weights = SIMD[F32, EACH](0)
            var parts = SIMD[F32, EACH](0)
            comptime for row in range(EACH):
                weights[row] = ds[unsafe_offset=row * LANES + j]
                comptime if keys:
                    parts[row] = shares[unsafe_offset=row * LANES + j]
            comptime for i in range(OUT):
                # The last lanes read past the head, into the row's padding.
                var d = min(i * LANES + lane, PITCH - 1)
                grown[i] = weights.fma(SIMD[F32, EACH](left[unsafe_offset=j * PITCH + d]), grown[i])
                comptime if keys:
                    var b = right[unsafe_offset=j * PITCH + d]
                    values[i] = parts.fma(SIMD[F32, EACH](b), values[i])

    comptime for row in range(EACH):
        if row0 + row < count:
            comptime for i in range(OUT):
                var d = i * LANES + lane
                if d < depth:
                    var to = (key0 if keys else query0) + (row0 + row) * c + d
                    comptime if keys:
                        o.dk[unsafe_offset=to] = (grown[i][row] * f.scale).cast[dtype]()
                        o.dv[unsafe_offset=to] = values[i][row].cast[dtype]()
                    else:
                        o.dq[unsafe_offset=to] = (grown[i][row] * f.scale).cast[dtype]()
