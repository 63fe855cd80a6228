"""Squeeze and excitation on a CPU: an image by one core, which finds it in its cache again.

Where there are fewer images than cores, parts of them are added up by all cores, and scaled by all.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.sys import simd_width_of

from ..epilogue import Epilogue, activate
from ..operands import F32, Data, narrowed, widened
from ..parallel import over_cores
from .config import SqueezeTensors

comptime WIDTH = 8
"""Channels of the last vectors; C is a multiple of it."""
comptime LANES = max(WIDTH, simd_width_of[F32]())
"""Lanes of a vector."""
comptime PARTS = 8
"""Parts of an image at most."""
comptime PIECE = 32768
"""Numbers that are worth a task of their own."""


@always_inline
def _sums[
    dtype: DType, //, lanes: Int, vectors: Int
](x: Data[dtype], rows: Int, pitch: Int, to: Data[F32]):
    """Adds up rows of some vectors side by side; four rows at a time."""
    comptime unroll = max(1, 8 // vectors)
    var sums = Array[SIMD[F32, lanes], vectors * unroll](fill=0)
    var row = 0
    while row + unroll <= rows:
        comptime for u in range(unroll):
            comptime for v in range(vectors):
                sums[u * vectors + v] += widened(
                    x.unsafe_load[width=lanes]((row + u) * pitch + v * lanes)
                )
        row += unroll
    while row < rows:
        comptime for v in range(vectors):
            sums[v] += widened(x.unsafe_load[width=lanes](row * pitch + v * lanes))
        row += 1
    comptime for v in range(vectors):
        comptime for u in range(1, unroll):
            sums[v] += sums[u * vectors + v]
        to.unsafe_store(v * lanes, sums[v])


@always_inline
def _add_up[dtype: DType, //](x: Data[dtype], rows: Int, channels: Int, to: Data[F32]):
    var c = 0
    while c + 8 * LANES <= channels:
        _sums[LANES, 8](x.unsafe_offset(c), rows, channels, to.unsafe_offset(c))
        c += 8 * LANES
    while c + 2 * LANES <= channels:
        _sums[LANES, 2](x.unsafe_offset(c), rows, channels, to.unsafe_offset(c))
        c += 2 * LANES
    while c + LANES <= channels:
        _sums[LANES, 1](x.unsafe_offset(c), rows, channels, to.unsafe_offset(c))
        c += LANES
    while c < channels:
        _sums[WIDTH, 1](x.unsafe_offset(c), rows, channels, to.unsafe_offset(c))
        c += WIDTH


@always_inline
def _dot[dtype: DType, //](w: Data[dtype], m: Data[F32], channels: Int) -> Float32:
    var sum = SIMD[F32, LANES](0)
    var c = 0
    while c + LANES <= channels:
        sum = widened(w.unsafe_load[width=LANES](c)).fma(m.unsafe_load[width=LANES](c), sum)
        c += LANES
    var total = sum.reduce_add()
    while c < channels:
        total += (
            widened(w.unsafe_load[width=WIDTH](c)) * m.unsafe_load[width=WIDTH](c)
        ).reduce_add()
        c += WIDTH
    return total


@always_inline
def _excite[
    dtype: DType, //, gate: Epilogue, lanes: Int, vectors: Int
](
    w: Data[dtype], bias: Data[F32], h: Data[F32], hidden: Int, channels: Int, to: Data[F32]
):
    var sums = Array[SIMD[F32, lanes], vectors](fill=0)
    for k in range(hidden):
        var one = SIMD[F32, lanes](h[unsafe_offset=k])
        comptime for v in range(vectors):
            sums[v] = widened(w.unsafe_load[width=lanes](k * channels + v * lanes)).fma(
                one, sums[v]
            )
    comptime for v in range(vectors):
        var value = sums[v] + bias.unsafe_load[width=lanes](v * lanes)
        to.unsafe_store(v * lanes, activate[gate, dtype](value))


@no_inline
def squeeze_excite_cpu[
    dtype: DType, //, activation: Epilogue, gate: Epilogue, epilogue: Epilogue
](
    o: SqueezeTensors[dtype],
    images: Int,
    pixels: Int,
    channels: Int,
    hidden: Int,
    room: Data[F32],
    pitch: Int,
):
    """Gates images on all cores."""
    var cores = parallelism_level(None)
    var parts = 1
    if images < cores:
        parts = max(
            1, min(PARTS, min(ceildiv(2 * cores, images), pixels * channels // PIECE))
        )
    var length = ceildiv(pixels, parts)

    @always_inline
    def add_up(unit: Int) {var}:
        var image, part = unit // parts, unit % parts
        var first = min(part * length, pixels)
        var rows = min(length, pixels - first)
        _add_up(
            o.x.unsafe_offset((image * pixels + first) * channels),
            rows,
            channels,
            room.unsafe_offset(image * pitch + part * channels),
        )

    @always_inline
    def gates(image: Int) {var}:
        var sums = room.unsafe_offset(image * pitch)
        var h = sums.unsafe_offset(PARTS * channels)
        for c in range(0, channels, WIDTH):
            var sum = sums.unsafe_load[width=WIDTH](c)
            for part in range(1, parts):
                sum += sums.unsafe_load[width=WIDTH](part * channels + c)
            sums.unsafe_store(c, sum / Float32(pixels))
        for k in range(hidden):
            var sum = _dot(o.squeeze.unsafe_offset(k * channels), sums, channels)
            h[unsafe_offset=k] = activate[activation, dtype](
                SIMD[F32, 1](sum + o.squeeze_bias[unsafe_offset=k])
            )[0]
        var c = 0
        while c + 4 * LANES <= channels:
            _excite[gate, LANES, 4](
                o.excite.unsafe_offset(c),
                o.excite_bias.unsafe_offset(c),
                h,
                hidden,
                channels,
                sums.unsafe_offset(c),
            )
            c += 4 * LANES
        while c < channels:
            _excite[gate, WIDTH, 1](
                o.excite.unsafe_offset(c),
                o.excite_bias.unsafe_offset(c),
                h,
                hidden,
                channels,
                sums.unsafe_offset(c),
            )
            c += WIDTH

    @always_inline
    def scale(unit: Int) {var}:
        var image, part = unit // parts, unit % parts
        var first = min(part * length, pixels)
        var rows = min(length, pixels - first)
        var g = room.unsafe_offset(image * pitch)
        var at = (image * pixels + first) * channels
        for _ in range(rows):
            var c = 0
            while c + LANES <= channels:
                var value = widened(o.x.unsafe_load[width=LANES](at + c)) * g.unsafe_load[
                    width=LANES
                ](c)
                comptime if epilogue.adds:
                    value += widened(o.residual.unsafe_load[width=LANES](at + c))
                o.y.unsafe_store(at + c, narrowed[dtype](activate[epilogue, dtype](value)))
                c += LANES
            while c < channels:
                var value = widened(o.x.unsafe_load[width=WIDTH](at + c)) * g.unsafe_load[
                    width=WIDTH
                ](c)
                comptime if epilogue.adds:
                    value += widened(o.residual.unsafe_load[width=WIDTH](at + c))
                o.y.unsafe_store(at + c, narrowed[dtype](activate[epilogue, dtype](value)))
                c += WIDTH
            at += channels

    if parts == 1:

        def all(image: Int) {var}:
            add_up(image)
            gates(image)
            scale(image)

        over_cores(all, images)
    else:
        over_cores(add_up, images * parts)
        for image in range(images):
            gates(image)
        over_cores(scale, images * parts)
