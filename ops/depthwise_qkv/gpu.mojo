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

from max.gpu import barrier, block_idx, thread_idx
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

from ..operands import F32, Data
from ..rows import over_lanes
from .config import QkvOperands, QkvSizes

comptime THREADS = 256
"""Threads of a block."""
comptime SHARED = 72 * 1024
"""Bytes of shared memory that a block takes at most: three blocks a multiprocessor."""
comptime BLOCKS = 264
"""Blocks that fill the GPU; tiles get smaller until there are as many."""
comptime SMALLEST = 4
"""Side of the smallest tile."""


@always_inline
def _window[
    dtype: DType, wide: Int, kernel: Int
](
    tile: Pointer[Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED],
    at: Int,
    pitch: Int,
    c: Int,
    taps: Array[SIMD[dtype, wide], kernel * kernel],
    bias: SIMD[F32, wide],
) -> SIMD[F32, wide]:
    """Convolves at the token `at` of the tile, the window's corner."""
    var sum = bias
    comptime for r in range(kernel):
        comptime for s in range(kernel):
            var value = tile.unsafe_load[width=wide, alignment=16]((at + r * pitch + s) * c)
            sum = value.cast[F32]().fma(taps[r * kernel + s].cast[F32](), sum)
    return sum


@always_inline
def _taps[
    dtype: DType, wide: Int, count: Int
](w: Data[dtype], c: Int) -> Array[SIMD[dtype, wide], count]:
    """Loads all taps of some channels."""
    var taps = Array[SIMD[dtype, wide], count](fill=0)
    comptime for i in range(count):
        taps[i] = w.unsafe_load[width=wide, alignment=16](i * c)
    return taps^


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
    comptime rows = THREADS // lanes
    comptime batch = 4 // vectors
    var t = Int(thread_idx.x)
    var c = Int(g.c)
    var side = Int(g.side)
    var across = ceildiv(Int(g.w), side)
    var h0 = Int(block_idx.x) // across * side
    var w0 = Int(block_idx.x) % across * side
    var margin = max(Int(g.pad_q), Int(g.pad_kv))
    var pitch = side + kernel - 1 + margin - min(Int(g.pad_q), Int(g.pad_kv))
    var tokens = Int(g.h * g.w)
    var image = Int(block_idx.y)
    var x = o.x.unsafe_offset(image * (tokens + Int(g.first)) * c)
    var tile = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16, name="depthwise_qkv"
    ]()

    # What does not depend on the kernel before.
    var lane = t % lanes
    var gain = Array[SIMD[F32, wide], vectors](fill=0)
    var shift = Array[SIMD[F32, wide], vectors](fill=0)
    comptime for v in range(vectors):
        var at = (v * lanes + lane) * wide
        if at < c:
            gain[v] = o.weight.unsafe_load[width=wide, alignment=16](at)
            shift[v] = o.norm_bias.unsafe_load[width=wide, alignment=16](at)
    var group = t % (c // wide)
    var part = t // (c // wide)
    var parts = THREADS // (c // wide)
    var channel = group * wide
    var taps = _taps[dtype, wide, kernel * kernel](o.q_filter.unsafe_offset(channel), c)
    var bias = o.q_bias.unsafe_load[width=wide, alignment=16](channel)
    wait_on_dependent_grids()
    launch_dependent_grids()

    # Normalise the tile and its margin; the class token too, in the first tile of an image.
    var count = pitch * pitch
    var extra = Int(g.first) if block_idx.x == 0 else 0
    # The lanes of a warp stay together: they exchange sums.
    for start in range(0, count + extra, rows * batch):
        var base = start + t // lanes
        var values = Array[SIMD[F32, wide], batch * vectors](fill=0)
        comptime for b in range(batch):
            var i = base + b * rows
            var h = h0 - margin + i // pitch
            var w = w0 - margin + i % pitch
            var inside = i < count and h >= 0 and h < Int(g.h) and w >= 0 and w < Int(g.w)
            var row = Int(g.first) + h * Int(g.w) + w if inside else 0
            if inside or i == count and extra == 1:
                comptime for v in range(vectors):
                    var at = (v * lanes + lane) * wide
                    if at < c:
                        values[b * vectors + v] = x.unsafe_load[width=wide, alignment=16](
                            row * c + at
                        ).cast[F32]()
        comptime for b in range(batch):
            var i = base + b * rows
            var h = h0 - margin + i // pitch
            var w = w0 - margin + i % pitch
            var inside = i < count and h >= 0 and h < Int(g.h) and w >= 0 and w < Int(g.w)
            var sum = Float32(0)
            comptime for v in range(vectors):
                sum += values[b * vectors + v].reduce_add()
            var mean = over_lanes[lanes](sum) / Float32(c)
            var squares = Float32(0)
            comptime for v in range(vectors):
                if (v * lanes + lane) * wide < c:
                    values[b * vectors + v] -= mean
                    squares += (values[b * vectors + v] * values[b * vectors + v]).reduce_add()
            var scale = 1 / sqrt(over_lanes[lanes](squares) / Float32(c) + g.eps)
            comptime for v in range(vectors):
                var at = (v * lanes + lane) * wide
                if at < c:
                    var value = (values[b * vectors + v] * scale).fma(gain[v], shift[v])
                    var rounded = value.cast[dtype]() if inside or i >= count else SIMD[
                        dtype, wide
                    ](0)
                    if i < count:
                        tile.unsafe_store[alignment=16](i * c + at, rounded)
                    elif i == count and extra == 1:
                        var keys = Int(g.p * g.q) + 1
                        o.q.unsafe_store[alignment=16](image * (tokens + 1) * c + at, rounded)
                        o.k.unsafe_store[alignment=16](image * keys * c + at, rounded)
                        o.v.unsafe_store[alignment=16](image * keys * c + at, rounded)
    barrier()
    if part >= parts:
        return

    var q = o.q.unsafe_offset((image * (tokens + Int(g.first)) + Int(g.first)) * c + channel)
    var corner = margin - Int(g.pad_q)
    for i in range(part, side * side, parts):
        var h = i // side
        var w = i % side
        if h0 + h < Int(g.h) and w0 + w < Int(g.w):
            var sum = _window[dtype, wide, kernel](
                tile.unsafe_offset(channel), (h + corner) * pitch + w + corner, pitch, c, taps, bias
            )
            var to = ((h0 + h) * Int(g.w) + w0 + w) * c
            q.unsafe_store[alignment=16](to, sum.cast[dtype]())

    # Keys and values whose windows begin in the tile, padding aside.
    var stride = Int(g.stride)
    var p0 = ceildiv(h0, stride)
    var q0 = ceildiv(w0, stride)
    var high = min(ceildiv(h0 + side, stride), Int(g.p)) - p0
    var broad = min(ceildiv(w0 + side, stride), Int(g.q)) - q0
    var first = (image * (Int(g.p * g.q) + Int(g.first)) + Int(g.first)) * c + channel
    var k_taps = _taps[dtype, wide, kernel * kernel](o.k_filter.unsafe_offset(channel), c)
    var v_taps = _taps[dtype, wide, kernel * kernel](o.v_filter.unsafe_offset(channel), c)
    var k_bias = o.k_bias.unsafe_load[width=wide, alignment=16](channel)
    var v_bias = o.v_bias.unsafe_load[width=wide, alignment=16](channel)
    corner = margin - Int(g.pad_kv)
    for i in range(part, high * broad, parts):
        var p = p0 + i // broad
        var q_at = q0 + i % broad
        var at = (p * stride - h0 + corner) * pitch + q_at * stride - w0 + corner
        var to = first + (p * Int(g.q) + q_at) * c
        var source = tile.unsafe_offset(channel)
        var k = _window[dtype, wide, kernel](source, at, pitch, c, k_taps, k_bias)
        o.k.unsafe_store[alignment=16](to, k.cast[dtype]())
        var v = _window[dtype, wide, kernel](source, at, pitch, c, v_taps, v_bias)
        o.v.unsafe_store[alignment=16](to, v.cast[dtype]())


def _pitch(g: QkvSizes, side: Int) -> Int:
    """Counts the tokens of a row of a tile and its margin."""
    var spread = max(g.pad_q, g.pad_kv) - min(g.pad_q, g.pad_kv)
    return side + Int(g.kernel) - 1 + Int(spread)


def _bytes[dtype: DType](g: QkvSizes, side: Int) -> Int:
    """Counts the bytes of a tile and its margin."""
    return _pitch(g, side) ** 2 * Int(g.c) * size_of[dtype]()


def _tile[dtype: DType](g: QkvSizes) -> Int:
    """Chooses the side of a tile: as large as fits, as small as it takes to fill the GPU."""
    var longest = max(Int(g.h), Int(g.w))
    var side = longest
    while side > 1 and _bytes[dtype](g, side) > SHARED:
        side -= 1
    side = ceildiv(longest, ceildiv(longest, side))
    while side > SMALLEST:
        var blocks = Int(g.images) * ceildiv(Int(g.h), side) * ceildiv(Int(g.w), side)
        if blocks >= BLOCKS:
            break
        side = ceildiv(longest, ceildiv(longest, side) + 1)
    return side


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
