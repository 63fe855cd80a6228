"""Layer norm and three depthwise convolutions of a CvT block's tokens on a CPU.

The formula and the tensors are those of gpu.mojo; all arithmetic is float32. A task owns rows of one
image's map: it goes down them with as many normalised rows in a ring as the window is high, zeros
around them, so that each token is normalised once for all three. Vectors run over channels, and a
vector's taps stay in registers along a row. Bound by loads.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import Layout, alloc, dealloc, unsafe_memcpy

from ..layernorm import normalise_row
from ..operands import F32, Data, narrowed, widened
from ..parallel import over_cores
from ..rows import WIDTH
from .config import QkvOperands, QkvSizes


@always_inline
def _convolve[
    dtype: DType, //, kernel: Int, width: Int, outputs: Int
](
    rows: Array[Data[F32], kernel],
    filters: Array[Data[dtype], outputs],
    biases: Array[Data[F32], outputs],
    to: Array[Data[dtype], outputs],
    c: Int,
    channels: Int,
    step: Int,
    count: Int,
):
    """Computes `count` neighbours of a row, at channels c to c + width, for filters of one window.

    `rows` are where the first window begins in each row of it, `step` the tokens between windows.
    """
    var taps = Array[SIMD[F32, width], outputs * kernel * kernel](uninitialized=True)
    var start = Array[SIMD[F32, width], outputs](uninitialized=True)
    comptime for o in range(outputs):
        start[o] = biases[o].unsafe_load[width=width](c)
        comptime for tap in range(kernel * kernel):
            taps[o * kernel * kernel + tap] = widened(
                filters[o].unsafe_load[width=width](tap * channels + c)
            )
    for i in range(count):
        var acc = start.copy()
        comptime for r in range(kernel):
            comptime for s in range(kernel):
                var value = rows[r].unsafe_load[width=width]((i * step + s) * channels + c)
                comptime for o in range(outputs):
                    acc[o] = value.fma(taps[(o * kernel + r) * kernel + s], acc[o])
        comptime for o in range(outputs):
            to[o].unsafe_store(i * channels + c, narrowed[dtype](acc[o]))


def _row[
    dtype: DType, //, kernel: Int, outputs: Int
](
    rows: Array[Data[F32], kernel],
    filters: Array[Data[dtype], outputs],
    biases: Array[Data[F32], outputs],
    to: Array[Data[dtype], outputs],
    channels: Int,
    step: Int,
    count: Int,
):
    """Computes a row of the map: see `_convolve`."""
    var whole = channels // WIDTH * WIDTH
    for c in range(0, whole, WIDTH):
        _convolve[kernel, WIDTH, outputs](rows, filters, biases, to, c, channels, step, count)
    for c in range(whole, channels):
        _convolve[kernel, 1, outputs](rows, filters, biases, to, c, channels, step, count)


def depthwise_qkv_cpu[dtype: DType, //, kernel: Int](o: QkvOperands[dtype], g: QkvSizes):
    """Normalises and convolves on all cores.

    Parameters:
        dtype: Of the tensors, float32 or bfloat16.
        kernel: Taps of a side of the window; the query's padding is half of it, the keys' no more.

    Args:
        o: Tensors.
        g: Sizes.
    """
    comptime MARGIN = kernel // 2
    var images, h, w, c = Int(g.images), Int(g.h), Int(g.w), Int(g.c)
    # A block begins with rows that its neighbour normalises too.
    var block = min(h, max(kernel + 1, ceildiv(images * h, 4 * parallelism_level(None))))
    var blocks = ceildiv(h, block)

    def task(index: Int) {var}:
        var image = index // blocks
        var top = index % blocks * block
        var first = Int(g.first)
        var tokens, keys = first + h * w, first + Int(g.p) * Int(g.q)
        var x = o.x.unsafe_offset(image * tokens * c)
        var q = o.q.unsafe_offset(image * tokens * c)
        var k = o.k.unsafe_offset(image * keys * c)
        var v = o.v.unsafe_offset(image * keys * c)
        if first == 1 and top == 0:
            normalise_row(x, q, o.weight, o.norm_bias, c, g.eps)
            unsafe_memcpy(dest=k, src=q, count=c)
            unsafe_memcpy(dest=v, src=q, count=c)
        x = x.unsafe_offset(first * c)
        q = q.unsafe_offset(first * c)
        k = k.unsafe_offset(first * c)
        v = v.unsafe_offset(first * c)

        var pitch = (w + 2 * MARGIN) * c
        var memory = alloc(Layout[Float32](count=kernel * pitch))
        var ring = rebind[Data[F32]](memory.unsafe_ptr())
        for i in range(kernel * pitch):
            ring[unsafe_offset=i] = 0
        var shift = MARGIN - Int(g.pad_kv)
        for p in range(top - 2 * MARGIN, min(top + block, h)):
            # The last row of p's window comes in, over the first of the window before.
            var below = p + MARGIN
            var slot = ring.unsafe_offset((below + kernel) % kernel * pitch + MARGIN * c)
            if below >= h:
                for i in range(w * c):
                    slot[unsafe_offset=i] = 0
            elif below >= 0:
                for column in range(w):
                    normalise_row(
                        x.unsafe_offset((below * w + column) * c),
                        slot.unsafe_offset(column * c),
                        o.weight,
                        o.norm_bias,
                        c,
                        g.eps,
                    )
            if p < top:
                continue
            var rows = Array[Data[F32], kernel](fill=ring)
            comptime for r in range(kernel):
                rows[r] = ring.unsafe_offset((p - MARGIN + r + kernel) % kernel * pitch)
            _row[kernel, 1](rows, [o.q_filter], [o.q_bias], [q.unsafe_offset(p * w * c)], c, 1, w)
            var row = (p - shift) // Int(g.stride)
            if row * Int(g.stride) == p - shift and 0 <= row < Int(g.p):
                comptime for r in range(kernel):
                    rows[r] = rows[r].unsafe_offset(shift * c)
                var at = row * Int(g.q) * c
                _row[kernel, 2](
                    rows,
                    [o.k_filter, o.v_filter],
                    [o.k_bias, o.v_bias],
                    [k.unsafe_offset(at), v.unsafe_offset(at)],
                    c,
                    Int(g.stride),
                    Int(g.q),
                )
        dealloc(memory^)

    over_cores(task, images * blocks)
