"""Layer norm and three depthwise convolutions of a CvT block's tokens, in one kernel.

    n = (x - mean_c x) / sqrt(var_c x + eps) * weight + norm_bias
    q[i, h, w, c] = q_bias[c] + sum_rs n[i, h - pad_q + r, w - pad_q + s, c] wq[r, s, c]
    k[i, p, q, c] = k_bias[c] + sum_rs n[i, p * stride - pad_kv + r, ..., c] wk[r, s, c], v alike

    x[N, T, C]            tokens, T = H * W, or 1 + H * W with the class token first
    w[R, S, C]            each of the three filters, R = S
    q[N, T, C], k and v[N, T', C]; the normalised class token is the first row of each

Outside the map n is zero: the padding comes after the norm. A block owns a square of tokens. It
reads the square and its margin once, 16 bytes a thread, computes the statistics of each token in
the registers of 8 to 32 lanes (of x - mean, in float32), and keeps n in shared memory, rounded once
to the tokens' type. Then a thread makes 16 bytes of channels of one token after another, the taps of
its channels in registers: the query of every token, key and value of those that the stride meets.

Bound by device memory at large batches, by latency at batch 1; docs/kernels.md has the figures.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.math import ceildiv, sqrt
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..operands import F32, Data
from ..rows import over_lanes
from .config import QkvOperands, QkvSizes

comptime THREADS = 256
"""Threads of a block."""
comptime STRIP = Int32(4)
"""Neighbouring queries that a thread computes together."""
comptime SHARED = 72 * 1024
"""Bytes of shared memory that a block takes at most: three blocks a multiprocessor."""
comptime BLOCKS = 264
"""Blocks that fill the GPU; tiles get smaller until there are as many."""
comptime SMALLEST = 4
"""Side of the smallest tile."""


@always_inline
def _taps[
    dtype: DType, wide: Int, count: Int
](w: Data[dtype], c: Int32) -> Array[SIMD[dtype, wide], count]:
    """Loads all taps of some channels."""
    var taps = Array[SIMD[dtype, wide], count](fill=0)
    comptime for i in range(count):
        taps[i] = w.unsafe_load[width=wide, alignment=16](i * Int(c))
    return taps^


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(2),
)
def qkv_kernel[
    dtype: DType, kernel: Int, lanes: Int, vectors: Int
](o: QkvOperands[dtype], g: QkvSizes):
    """Computes a tile; block_idx.x counts tiles of an image, block_idx.y images.

    Parameters:
        dtype: Of tokens and filters.
        kernel: Taps of a side of the window.
        lanes: Threads that normalise a token: 8, 16 or 32.
        vectors: Vectors of 16 bytes of each; they cover the channels.

    Args:
        o: Tensors.
        g: Sizes.
    """
    comptime wide = 16 // size_of[dtype]()
    comptime rows = Int32(THREADS // lanes)
    comptime batch = 4 // vectors
    var t = Int32(thread_idx.x)
    var c = g.c
    var across = (g.w + g.side - 1) // g.side
    var h0 = Int32(block_idx.x) // across * g.side
    var w0 = Int32(block_idx.x) % across * g.side
    var margin = max(g.pad_q, g.pad_kv)
    var pitch = g.side + Int32(kernel) - 1 + margin - min(g.pad_q, g.pad_kv)
    var tokens = g.h * g.w
    var image = Int(block_idx.y)
    var x = o.x.unsafe_offset(image * Int((tokens + g.first) * c))
    var tile = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16, name="depthwise_qkv"
    ]()

    # What does not depend on the kernel before.
    var lane = t % Int32(lanes)
    var groups = c // Int32(wide)
    var part = t // groups
    var parts = Int32(THREADS) // groups
    var channel = Int((t - part * groups) * Int32(wide))
    var taps = _taps[dtype, wide, kernel * kernel](o.q_filter.unsafe_offset(channel), c)
    var bias = o.q_bias.unsafe_load[width=wide, alignment=16](channel)
    wait_on_dependent_grids()
    launch_dependent_grids()

    # Normalise the tile and its margin; the class token too, in the first tile of an image. The
    # lanes of a warp stay together: they exchange sums.
    var count = pitch * pitch
    var extra = g.first if block_idx.x == 0 else 0
    for start in range(Int32(0), count + extra, rows * Int32(batch)):
        var values = Array[SIMD[dtype, wide], batch * vectors](fill=0)
        var inside = Array[Bool, batch](fill=False)
        comptime for b in range(batch):
            var i = start + t // Int32(lanes) + Int32(b) * rows
            var h = i // pitch
            var w = i - h * pitch + w0 - margin
            h += h0 - margin
            inside[b] = i < count and h >= 0 and h < g.h and w >= 0 and w < g.w
            var row = g.first + h * g.w + w if inside[b] else 0
            if i == count and extra == 1:
                inside[b] = True
            if inside[b]:
                comptime for v in range(vectors):
                    var at = Int32(v * lanes * wide) + lane * Int32(wide)
                    if at < c:
                        values[b * vectors + v] = x.unsafe_load[width=wide, alignment=16](
                            Int(row * c + at)
                        )
        comptime for b in range(batch):
            var i = start + t // Int32(lanes) + Int32(b) * rows
            var sum = Float32(0)
            comptime for v in range(vectors):
                sum += values[b * vectors + v].cast[F32]().reduce_add()
            var mean = over_lanes[lanes](sum) / Float32(c)
            var squares = Float32(0)
            comptime for v in range(vectors):
                if Int32(v * lanes * wide) + lane * Int32(wide) < c:
                    var d = values[b * vectors + v].cast[F32]() - mean
                    squares += (d * d).reduce_add()
            var scale = 1 / sqrt(over_lanes[lanes](squares) / Float32(c) + g.eps)
            comptime for v in range(vectors):
                var at = Int32(v * lanes * wide) + lane * Int32(wide)
                if at < c and i < count + extra:
                    var value = (values[b * vectors + v].cast[F32]() - mean) * scale
                    value = value.fma(
                        o.weight.unsafe_load[width=wide, alignment=16](Int(at)),
                        o.norm_bias.unsafe_load[width=wide, alignment=16](Int(at)),
                    )
                    var rounded = value.cast[dtype]() if inside[b] else SIMD[dtype, wide](0)
                    if i < count:
                        tile.unsafe_store[alignment=16](Int(i * c + at), rounded)
                    else:
                        var keys = Int(g.p * g.q + 1) * Int(c)
                        o.q.unsafe_store[alignment=16](
                            image * Int((tokens + 1) * c) + Int(at), rounded
                        )
                        o.k.unsafe_store[alignment=16](image * keys + Int(at), rounded)
                        o.v.unsafe_store[alignment=16](image * keys + Int(at), rounded)
    barrier()
    if part >= parts:
        return

    # Queries: a strip of neighbours at a time, which share what they see.
    var source = tile.unsafe_offset(channel)
    var q = o.q.unsafe_offset(image * Int((tokens + g.first) * c) + Int(g.first * c) + channel)
    var corner = margin - g.pad_q
    var strips = (g.side + STRIP - 1) // STRIP
    for i in range(part, g.side * strips, parts):
        var h = i // strips
        var w = (i - h * strips) * STRIP
        if h0 + h >= g.h or w0 + w >= g.w:
            continue
        var sums = Array[SIMD[F32, wide], Int(STRIP)](fill=bias)
        comptime for r in range(kernel):
            var at = (h + corner + Int32(r)) * pitch + w + corner
            comptime for s in range(Int(STRIP) + kernel - 1):
                var value = source.unsafe_load[width=wide, alignment=16](
                    Int((at + Int32(s)) * c)
                ).cast[F32]()
                comptime for j in range(Int(STRIP)):
                    comptime if 0 <= s - j < kernel:
                        sums[j] = value.fma(taps[r * kernel + s - j].cast[F32](), sums[j])
        var to = ((h0 + h) * g.w + w0 + w) * c
        comptime for j in range(Int(STRIP)):
            if w + Int32(j) < g.side and w0 + w + Int32(j) < g.w:
                q.unsafe_store[alignment=16](Int(to + Int32(j) * c), sums[j].cast[dtype]())

    # Keys and values whose windows begin in the tile, padding aside.
    var p0 = (h0 + g.stride - 1) // g.stride
    var q0 = (w0 + g.stride - 1) // g.stride
    var high = min((h0 + g.side + g.stride - 1) // g.stride, g.p) - p0
    var broad = min((w0 + g.side + g.stride - 1) // g.stride, g.q) - q0
    var first = image * Int((g.p * g.q + g.first) * c) + Int(g.first * c) + channel
    var k_taps = _taps[dtype, wide, kernel * kernel](o.k_filter.unsafe_offset(channel), c)
    var v_taps = _taps[dtype, wide, kernel * kernel](o.v_filter.unsafe_offset(channel), c)
    corner = margin - g.pad_kv
    for i in range(part, high * broad, parts):
        var p = i // broad
        var q_at = q0 + i - p * broad
        p += p0
        var at = (p * g.stride - h0 + corner) * pitch + q_at * g.stride - w0 + corner
        var k = o.k_bias.unsafe_load[width=wide, alignment=16](channel)
        var v = o.v_bias.unsafe_load[width=wide, alignment=16](channel)
        comptime for r in range(kernel):
            comptime for s in range(kernel):
                var value = source.unsafe_load[width=wide, alignment=16](
                    Int((at + Int32(r) * pitch + Int32(s)) * c)
                ).cast[F32]()
                k = value.fma(k_taps[r * kernel + s].cast[F32](), k)
                v = value.fma(v_taps[r * kernel + s].cast[F32](), v)
        var to = first + Int((p * g.q + q_at) * c)
        o.k.unsafe_store[alignment=16](to, k.cast[dtype]())
        o.v.unsafe_store[alignment=16](to, v.cast[dtype]())


def _pitch(g: QkvSizes, side: Int) -> Int:
    """Counts the tokens of a row of a tile and its margin."""
    var spread = max(g.pad_q, g.pad_kv) - min(g.pad_q, g.pad_kv)
    return side + Int(g.kernel) - 1 + Int(spread)


def _bytes[dtype: DType](g: QkvSizes, side: Int) -> Int:
    """Counts the bytes of a tile and its margin."""
    # The last strip may look past the tile.
    return (_pitch(g, side) ** 2 + Int(STRIP)) * Int(g.c) * size_of[dtype]()


def _tile[dtype: DType](g: QkvSizes) -> Int:
    """Chooses the side of a tile: as large as fits, as small as it takes to fill the GPU."""
    var longest = max(Int(g.h), Int(g.w))
    var side = longest
    while side > 1 and _bytes[dtype](g, side) > SHARED:
        side -= 1
    while side > SMALLEST and _blocks(g, side) < BLOCKS:
        side -= 1
    return ceildiv(longest, ceildiv(longest, side))


def _blocks(g: QkvSizes, side: Int) -> Int:
    """Counts the blocks of all images."""
    return Int(g.images) * ceildiv(Int(g.h), side) * ceildiv(Int(g.w), side)


def _enqueue[
    dtype: DType, kernel: Int, lanes: Int, vectors: Int
](o: QkvOperands[dtype], sizes: QkvSizes, ctx: DeviceContext) raises:
    var g = sizes
    g.side = Int32(_tile[dtype](g))
    var tiles = ceildiv(Int(g.h), Int(g.side)) * ceildiv(Int(g.w), Int(g.side))
    var bytes = _bytes[dtype](g, Int(g.side))
    ctx.enqueue_function[qkv_kernel[dtype, kernel, lanes, vectors]](
        o,
        g,
        grid_dim=(tiles, Int(g.images)),
        block_dim=THREADS,
        shared_mem_bytes=bytes,
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(SHARED)),
    )


def depthwise_qkv_gpu[
    dtype: DType, kernel: Int
](o: QkvOperands[dtype], g: QkvSizes, ctx: DeviceContext) raises:
    """Enqueues the projections of all images.

    Parameters:
        dtype: Of tokens and filters.
        kernel: Taps of a side of the window.

    Args:
        o: Tensors.
        g: Sizes; graphs/nodes.py sends only those that fit.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    var groups = Int(g.c) // wide
    if groups <= 8:
        _enqueue[dtype, kernel, 8, 1](o, g, ctx)
    elif groups <= 16:
        _enqueue[dtype, kernel, 16, 1](o, g, ctx)
    elif groups <= 32:
        _enqueue[dtype, kernel, 32, 1](o, g, ctx)
    elif groups <= 64:
        _enqueue[dtype, kernel, 32, 2](o, g, ctx)
    else:
        _enqueue[dtype, kernel, 32, 4](o, g, ctx)
