"""Squeeze and excitation on a CPU: a core takes an image, which it finds in its cache again.

Where there are fewer images than cores, all cores add parts of them up, and later scale these; one
core computes an image's gates in between.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.sys import simd_width_of

from ..epilogue import Epilogue, Output, activate
from ..operands import F32, Data, widened
from ..parallel import over_cores
from .config import WIDTH, SqueezeTensors

comptime LANES = max(WIDTH, simd_width_of[F32]())
"""Channels of a vector; C is a multiple of `WIDTH`, of which the last vectors are."""
comptime PIECE = 32768
"""Numbers of an image that are worth a task of their own."""


@always_inline
def _sum_rows[
    dtype: DType, //, lanes: Int, vectors: Int
](x: Data[dtype], rows: Int, pitch: Int, sums: Data[F32]):
    """Adds up rows of some vectors side by side, eight vectors at a time."""
    comptime unroll = 8 // vectors
    var found = Array[SIMD[F32, lanes], vectors * unroll](fill=0)
    var row = 0
    while row + unroll <= rows:
        comptime for u in range(unroll):
            comptime for v in range(vectors):
                found[u * vectors + v] += widened(
                    x.unsafe_load[width=lanes]((row + u) * pitch + v * lanes)
                )
        row += unroll
    while row < rows:
        comptime for v in range(vectors):
            found[v] += widened(x.unsafe_load[width=lanes](row * pitch + v * lanes))
        row += 1
    comptime for v in range(vectors):
        comptime for u in range(1, unroll):
            found[v] += found[u * vectors + v]
        sums.unsafe_store(v * lanes, found[v])


@always_inline
def _sum_pixels[dtype: DType, //](x: Data[dtype], pixels: Int, channels: Int, sums: Data[F32]):
    """Adds up pixels, some channels after others."""
    var c = 0
    comptime for vectors in [8, 2, 1]:
        while c + vectors * LANES <= channels:
            _sum_rows[LANES, vectors](x.unsafe_offset(c), pixels, channels, sums.unsafe_offset(c))
            c += vectors * LANES
    while c < channels:
        _sum_rows[WIDTH, 1](x.unsafe_offset(c), pixels, channels, sums.unsafe_offset(c))
        c += WIDTH


@always_inline
def _dot[dtype: DType, //](w: Data[dtype], m: Data[F32], channels: Int) -> Float32:
    """Multiplies two vectors."""
    var sum = SIMD[F32, LANES](0)
    var c = 0
    while c + LANES <= channels:
        sum = widened(w.unsafe_load[width=LANES](c)).fma(m.unsafe_load[width=LANES](c), sum)
        c += LANES
    var total = sum.reduce_add()
    while c < channels:
        var last = widened(w.unsafe_load[width=WIDTH](c)) * m.unsafe_load[width=WIDTH](c)
        total += last.reduce_add()
        c += WIDTH
    return total


@always_inline
def _gate[
    dtype: DType, //, gate: Epilogue, lanes: Int, vectors: Int
](w: Data[dtype], bias: Data[F32], h: Data[F32], hidden: Int, channels: Int, gates: Data[F32]):
    """Computes the gates of some vectors of channels."""
    var sums = Array[SIMD[F32, lanes], vectors](fill=0)
    for k in range(hidden):
        var one = SIMD[F32, lanes](h[unsafe_offset=k])
        comptime for v in range(vectors):
            var some = w.unsafe_load[width=lanes](k * channels + v * lanes)
            sums[v] = widened(some).fma(one, sums[v])
    comptime for v in range(vectors):
        var value = sums[v] + bias.unsafe_load[width=lanes](v * lanes)
        gates.unsafe_store(v * lanes, activate[gate, dtype](value))


@always_inline
def _scale[
    dtype: DType, //, epilogue: Epilogue, lanes: Int
](o: SqueezeTensors[dtype], at: Int, gates: Data[F32]):
    """Multiplies a vector of channels by its gates."""
    var value = widened(o.x.unsafe_load[width=lanes](at)) * gates.unsafe_load[width=lanes](0)
    Output[epilogue](o.excite_bias, o.residual, o.y).store(value, at)


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
    """Gates images on all cores.

    Parameters:
        dtype: Of the images, float32 or bfloat16.
        activation: Between the products.
        gate: Behind the second product.
        epilogue: What the gated images go through.

    Args:
        o: Tensors.
        images: N.
        pixels: Of an image.
        channels: C, a multiple of 8.
        hidden: K.
        room: Of each image K hidden numbers and the sums of parts, the first of which become the
            gates: [N, pitch].
        pitch: K, and some times C.
    """
    var cores = parallelism_level(None)
    var parts = 1
    if images < cores:
        var most = min((pitch - hidden) // channels, ceildiv(2 * cores, images))
        parts = max(1, min(most, pixels * channels // PIECE))
    var length = ceildiv(pixels, parts)

    def add_up(unit: Int) {var}:
        var image, part = unit // parts, unit % parts
        var first = min(part * length, pixels)
        _sum_pixels(
            o.x.unsafe_offset((image * pixels + first) * channels),
            min(length, pixels - first),
            channels,
            room.unsafe_offset(image * pitch + hidden + part * channels),
        )

    def excite(image: Int) {var}:
        var h = room.unsafe_offset(image * pitch)
        var gates = h.unsafe_offset(hidden)  # and sums, means until then
        for c in range(0, channels, WIDTH):
            var sum = gates.unsafe_load[width=WIDTH](c)
            for part in range(1, parts):
                sum += gates.unsafe_load[width=WIDTH](part * channels + c)
            gates.unsafe_store(c, sum / Float32(pixels))
        for k in range(hidden):
            var sum = _dot(o.squeeze.unsafe_offset(k * channels), gates, channels)
            var value = SIMD[F32, 1](sum + o.squeeze_bias[unsafe_offset=k])
            h[unsafe_offset=k] = activate[activation, dtype](value)[0]
        var c = 0
        comptime for vectors in [4, 1]:
            while c + vectors * LANES <= channels:
                _gate[gate, LANES, vectors](
                    o.excite.unsafe_offset(c),
                    o.excite_bias.unsafe_offset(c),
                    h,
                    hidden,
                    channels,
                    gates.unsafe_offset(c),
                )
                c += vectors * LANES
        while c < channels:
            _gate[gate, WIDTH, 1](
                o.excite.unsafe_offset(c),
                o.excite_bias.unsafe_offset(c),
                h,
                hidden,
                channels,
                gates.unsafe_offset(c),
            )
            c += WIDTH

    def scale(unit: Int) {var}:
        var image, part = unit // parts, unit % parts
        var gates = room.unsafe_offset(image * pitch + hidden)
        var first = min(part * length, pixels)
        for pixel in range(first, min(first + length, pixels)):
            var at = (image * pixels + pixel) * channels
            var c = 0
            while c + LANES <= channels:
                _scale[epilogue, LANES](o, at + c, gates.unsafe_offset(c))
                c += LANES
            while c < channels:
                _scale[epilogue, WIDTH](o, at + c, gates.unsafe_offset(c))
                c += WIDTH

    def whole(image: Int) {var}:
        add_up(image)
        excite(image)
        scale(image)

    if parts == 1:
        over_cores(whole, images)
    else:
        over_cores(add_up, images * parts)
        over_cores(excite, images)
        over_cores(scale, images * parts)
