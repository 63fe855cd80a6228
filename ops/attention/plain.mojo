"""Attention on any GPU, without tensor cores: float32 arithmetic throughout, heads of any depth.

    y = softmax(scale * q k^T + bias) v,  q[N, T, C], k[N, S, C], v[N, S, C], y[N, T, C]

A block takes 32 queries of a head, 8 for each of its 4 groups of 32 lanes, and walks over the keys, 32
at a time, through shared memory. A lane scores one key for the 8 queries of its group, then sums up
its channels of the values; maxima and sums run along as in flash.mojo. Bound by the loads of
shared memory: one for each three multiplications.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv, exp
from std.utils.numerics import neg_inf

from ..launch import launch
from ..operands import F32
from .config import LOG2_E, LOWEST, Attention
from .mask import Mask, MaskTensors

comptime GROUPS = 4
"""Groups of lanes in a block."""
comptime LANES = 32
"""Lanes of a group, and keys of a tile; a warp of 64 lanes has two groups."""
comptime ROWS = 8
"""Queries of a group."""


def pitch(depth: Int) -> Int:
    """Says how many floats lie from one row to the next in shared memory.

    Args:
        depth: Channels of a head.

    Returns:
        Whole vectors of 4, and one more, against bank conflicts.
    """
    return ceildiv(depth, 4) * 4 + 4


def plain_shared_bytes(depth: Int) -> Int:
    """Counts the shared memory of a block: queries, keys, values and probabilities.

    Args:
        depth: Channels of a head.

    Returns:
        Bytes.
    """
    return 4 * (pitch(depth) * (GROUPS * ROWS + 2 * LANES) + GROUPS * ROWS * LANES)


@__name(t"attention_plain_{mask.label()}{depth}_{dtype}")
def plain_kernel[
    dtype: DType, depth: Int, mask: Mask
](o: Attention[dtype], blocks: Int32, tensors: MaskTensors[dtype]):
    """Computes 32 queries of one head.

    Parameters:
        dtype: Of all tensors.
        depth: Channels of a head.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        blocks: Blocks of queries of a head.
        tensors: What masks read.
    """
    comptime assert not mask.keys, "attention: here a mask of keys is a bias"
    comptime PITCH = pitch(depth)
    comptime QUERIES = GROUPS * ROWS
    comptime OUT = ceildiv(depth, LANES)
    comptime THREADS = GROUPS * LANES
    var q = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var k = q.unsafe_offset(QUERIES * PITCH)
    var v = k.unsafe_offset(LANES * PITCH)
    var group = Int(thread_idx.x) // LANES
    var lane = Int(thread_idx.x) % LANES
    var p = v.unsafe_offset(LANES * PITCH + group * (ROWS * LANES))
    var mine = q.unsafe_offset(group * (ROWS * PITCH))
    wait_on_dependent_grids()
    launch_dependent_grids()

    var head = Int(block_idx.x) // Int(blocks)
    var n = head // Int(o.heads)
    var channel = (head - n * Int(o.heads)) * depth
    var first = (Int(block_idx.x) - head * Int(blocks)) * QUERIES
    var start = (n * Int(o.t) + first) * Int(o.c) + channel
    for i in range(Int(thread_idx.x), QUERIES * PITCH, THREADS):
        var row = i // PITCH
        var d = i - row * PITCH
        var value = Float32(0)
        if d < depth and first + row < Int(o.t):
            value = o.q[unsafe_offset=start + row * Int(o.c) + d].cast[F32]()
        q[unsafe_offset=i] = value

    var acc = Array[SIMD[F32, ROWS], OUT](fill=0)
    var top = SIMD[F32, ROWS](LOWEST)
    var sum = SIMD[F32, ROWS](0)
    for key0 in range(0, Int(o.s), LANES):
        comptime if mask.causal:
            if key0 > first + QUERIES - 1 + Int(tensors.sizes.diagonal):
                break
        barrier()
        for i in range(Int(thread_idx.x), LANES * PITCH, THREADS):
            var row = i // PITCH
            var d = i - row * PITCH
            var key = Float32(0)
            var value = Float32(0)
            if d < depth and key0 + row < Int(o.s):
                var at = (n * Int(o.s) + key0 + row) * Int(o.c) + channel + d
                key = o.k[unsafe_offset=at].cast[F32]()
                value = o.v[unsafe_offset=at].cast[F32]()
            k[unsafe_offset=i] = key
            v[unsafe_offset=i] = value
        barrier()

        var score = SIMD[F32, ROWS](0)
        for d in range(0, depth, 4):
            var key = k.unsafe_load[width=4, alignment=16](lane * PITCH + d)
            comptime for row in range(ROWS):
                var query = mine.unsafe_load[width=4, alignment=16](row * PITCH + d)
                comptime for i in range(4):
                    score[row] = query[i].fma(key[i], score[row])
        score *= o.scale
        comptime if mask.bias:
            var query = first + group * ROWS
            var bias = tensors.bias.unsafe_offset(
                tensors.sizes.place(n, head - n * Int(o.heads), query) + key0 + lane
            )
            comptime for row in range(ROWS):
                if query + row < Int(o.t) and key0 + lane < Int(o.s):
                    score[row] += bias[unsafe_offset=row * Int(tensors.sizes.row)].cast[F32]()
        comptime if mask.causal:
            var last = first + group * ROWS + Int(tensors.sizes.diagonal)
            comptime for row in range(ROWS):
                if key0 + lane > last + row:
                    score[row] = neg_inf[F32]()
        if key0 + lane >= Int(o.s):
            score = neg_inf[F32]()

        var highest = max(top, score)
        comptime for bit in range(5):
            comptime for row in range(ROWS):
                highest[row] = max(highest[row], warp.shuffle_xor(highest[row], UInt32(1 << bit)))
        var factor = exp(top - highest)
        top = highest
        score = exp(score - highest)
        sum = sum.fma(factor, score)
        comptime for row in range(ROWS):
            p[unsafe_offset=row * LANES + lane] = score[row]
        comptime for column in range(OUT):
            acc[column] *= factor
        barrier()
        for key in range(0, LANES, 4):
            var weights = Array[SIMD[F32, 4], ROWS](uninitialized=True)
            comptime for row in range(ROWS):
                weights[row] = p.unsafe_load[width=4, alignment=16](row * LANES + key)
            comptime for i in range(4):
                comptime for column in range(OUT):
                    # The last lanes read past the head, into the row's padding or the next row.
                    var d = min(column * LANES + lane, PITCH - 1)
                    var value = v[unsafe_offset=(key + i) * PITCH + d]
                    comptime for row in range(ROWS):
                        acc[column][row] = weights[row][i].fma(value, acc[column][row])

    comptime for bit in range(5):
        comptime for row in range(ROWS):
            sum[row] += warp.shuffle_xor(sum[row], UInt32(1 << bit))
    comptime for row in range(ROWS):
        if first + group * ROWS + row < Int(o.t):
            comptime if mask.logsumexp:
                if lane == 0:
                    var query = head * Int(o.t) + first + group * ROWS + row
                    tensors.keep(query, top[row] * LOG2_E, sum[row])
            comptime for column in range(OUT):
                var d = column * LANES + lane
                if d < depth:
                    var at = start + (group * ROWS + row) * Int(o.c) + d
                    o.y[unsafe_offset=at] = (acc[column][row] / sum[row]).cast[dtype]()


def enqueue_plain[
    dtype: DType, depth: Int, mask: Mask
](o: Attention[dtype], tensors: MaskTensors[dtype], ctx: DeviceContext) raises:
    """Enqueues the kernel.

    Parameters:
        dtype: Of all tensors.
        depth: Channels of a head.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        tensors: What masks read.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var blocks = ceildiv(Int(o.t), GROUPS * ROWS)
    comptime SHARED = plain_shared_bytes(depth)
    launch[plain_kernel[dtype, depth, mask]](
        ctx,
        o,
        Int32(blocks),
        tensors,
        grid_dim=blocks * Int(o.n * o.heads),
        block_dim=GROUPS * LANES,
        shared=SHARED,
    )
