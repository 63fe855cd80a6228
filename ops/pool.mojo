"""Max and average pooling over x[N, H, W, C] into y[N, P, Q, C], torch's.

Vectors run over channels, so a window is R * S wide loads; bound by memory. A CPU computes rows of
the result on all cores, a GPU 16 bytes in each thread, or one number where C is no multiple of
that. Padding never wins the maximum and NaN does. Maxima may be of uint8, which keep their levels.
For gradients (pool_grad.mojo) the same kernels find where the maxima are.
With ceil_mode (P and Q are the graph's) the last window may hang over the padding: what hangs over
counts for neither op. The average of a whole image is `reduce`.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv, isnan
from std.sys import simd_width_of, size_of
from std.utils.numerics import neg_inf

from .dot import U8
from .geometry import Geometry
from .launch import launch
from .operands import ALIGN, F32, WIDE, Data, data, narrowed, widened
from .parallel import over_cores

comptime THREADS = 256
"""Threads of a GPU's block."""


@always_inline
def pooled[
    dtype: DType, out: DType, kind: StaticString, width: Int, align: Int = size_of[dtype]()
](g: Geometry, x: Data[dtype], n: Int, p: Int, q: Int, c: Int) -> SIMD[out, width]:
    """Computes y[n, p, q, c : c + width].

    Parameters:
        dtype: Of x.
        out: Of y: that of x, or an integer for places.
        kind: "max"; "place", that of the maximum; "mean", where zeros of the padding count; or
            "mean_inside", where none does.
        width: Channels.
        align: Bytes that they are known to be aligned to.

    Args:
        g: Sizes.
        x: Activations [N, H, W, C].
        n: Number of the image.
        p: Row of the result.
        q: Column of the result.
        c: First channel.

    Returns:
        The maxima, or the averages, which are taken in float32, or float64. Or where torch finds the
        maxima, the first of equal numbers and the last NaN: `Geometry.place` of the pixel.
    """
    var h0 = p * g.stride_h - g.pad_h
    var w0 = q * g.stride_w - g.pad_w
    var image = x.unsafe_offset(n * g.h * g.w * g.c + c)
    comptime if kind == "max" and dtype == U8:
        var best = SIMD[dtype, width](0)
        for r in range(g.r):
            var h = h0 + r * g.dilation_h
            if h < 0 or h >= g.h:
                continue
            for s in range(g.s):
                var w = w0 + s * g.dilation_w
                if w >= 0 and w < g.w:
                    best = max(best, image.unsafe_load[width=width]((h * g.w + w) * g.c))
        return rebind[SIMD[out, width]](best)
    elif kind == "max" or kind == "place":
        var best = SIMD[WIDE[dtype], width](neg_inf[WIDE[dtype]]())
        var h = _first(h0, g.dilation_h)
        var left = _first(w0, g.dilation_w)
        var bottom = min(h0 + (g.r - 1) * g.dilation_h + 1, g.h)
        var right = min(w0 + (g.s - 1) * g.dilation_w + 1, g.w)
        var place = SIMD[WIDE[dtype], width](Scalar[WIDE[dtype]](g.place(h - h0, left - w0)))
        while h < bottom:
            var at = (h * g.w + left) * g.c
            var here = Scalar[WIDE[dtype]](g.place(h - h0, left - w0))
            var w = left
            while w < right:
                var value = widened[WIDE[dtype]](
                    image.unsafe_load[width=width, alignment=align](at)
                )
                var better = value.gt(best) | isnan(value)
                best = better.select(value, best)
                place = better.select(SIMD[WIDE[dtype], width](here), place)
                at += g.dilation_w * g.c
                here += Scalar[WIDE[dtype]](g.dilation_w)
                w += g.dilation_w
            h += g.dilation_h
        comptime if kind == "place":
            return place.cast[out]()
        return narrowed[out](best)
    else:
        var top = max(h0, 0)
        var left = max(w0, 0)
        var bottom = min(h0 + g.r, g.h)
        var right = min(w0 + g.s, g.w)
        var sum = SIMD[WIDE[dtype], width](0)
        for h in range(top, bottom):
            for w in range(left, right):
                sum += widened[WIDE[dtype]](
                    image.unsafe_load[width=width, alignment=align]((h * g.w + w) * g.c)
                )
        return narrowed[out](
            sum / Scalar[WIDE[dtype]](inside[counts_padding=kind == "mean"](g, p, q))
        )


@always_inline
def _first(at: Int, step: Int) -> Int:
    """Finds the first row or column of a window that is in the image."""
    var found = at
    while found < 0:
        found += step
    return found


@always_inline
def inside[*, counts_padding: Bool](g: Geometry, p: Int, q: Int) -> Int:
    """Counts the numbers that a window averages.

    Parameters:
        counts_padding: Whether those of the padding are among them.

    Args:
        g: Sizes.
        p: Row of the window.
        q: Column of the window.

    Returns:
        How many there are; what hangs over the padding does not count.
    """
    var h0 = p * g.stride_h - g.pad_h
    var w0 = q * g.stride_w - g.pad_w
    comptime if counts_padding:
        return (min(h0 + g.r, g.h + g.pad_h) - h0) * (min(w0 + g.s, g.w + g.pad_w) - w0)
    return (min(h0 + g.r, g.h) - max(h0, 0)) * (min(w0 + g.s, g.w) - max(w0, 0))


def pool_cpu[
    dtype: DType, out: DType, //, kind: StaticString
](y: Data[out], x: Data[dtype], g: Geometry):
    """Computes rows of the result on all cores.

    Parameters:
        dtype: Of x.
        out: Of y.
        kind: See `pooled`.

    Args:
        y: Result [N, P, Q, C].
        x: Activations [N, H, W, C].
        g: Sizes.
    """

    def task(row: Int) {imm}:
        _pool_row[kind](y, x, g, row)

    over_cores(task, g.n * g.p)


@no_inline
def _pool_row[
    dtype: DType, out: DType, //, kind: StaticString
](y: Data[out], x: Data[dtype], g: Geometry, row: Int):
    comptime WIDTH = simd_width_of[F32]()
    var n, p = divmod(row, g.p)
    for q in range(g.q):
        var to = y.unsafe_offset((row * g.q + q) * g.c)
        var c = 0
        comptime for width in [4 * WIDTH, WIDTH, 1]:
            comptime if width <= WIDTH or dtype == U8:
                while c + width <= g.c:
                    to.unsafe_store(c, pooled[dtype, out, kind, width](g, x, n, p, q, c))
                    c += width


@__name(t"pool_{kind}_{width}_{dtype}")
def pool_kernel[
    dtype: DType, out: DType, kind: StaticString, width: Int
](y: Data[out], x: Data[dtype], g: Geometry):
    """Computes `width` channels of a pixel in each thread.

    Parameters:
        dtype: Of x.
        out: Of y.
        kind: See `pooled`.
        width: 16 bytes of channels of x, or 1.

    Args:
        y: Result [N, P, Q, C].
        x: Activations [N, H, W, C].
        g: Sizes; C is a multiple of the width.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()
    var index = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    var vectors = UInt32(g.c // width)
    var pixel = index // vectors
    var c = Int(index - pixel * vectors) * width
    var row = pixel // UInt32(g.q)
    var q = Int(pixel - row * UInt32(g.q))
    var n = row // UInt32(g.p)
    if Int(n) >= g.n:
        return
    comptime bytes = width * size_of[dtype]()
    var p = Int(row - n * UInt32(g.p))
    var value = pooled[dtype, out, kind, width, bytes](g, x, Int(n), p, q, c)
    y.unsafe_store[alignment=ALIGN[out, width]](Int(index) * width, value)


def pool_gpu[
    dtype: DType, out: DType, //, kind: StaticString
](y: Data[out], x: Data[dtype], g: Geometry, ctx: DeviceContext) raises:
    """Enqueues a pooling.

    Parameters:
        dtype: Of x.
        out: Of y.
        kind: See `pooled`.

    Args:
        y: Result [N, P, Q, C].
        x: Activations [N, H, W, C].
        g: Sizes.
        ctx: The GPU.

    Raises:
        If the result has 2^31 pieces of 16 bytes, or the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    comptime for width in [wide, 1]:
        if (g.c % wide == 0) == (width == wide):
            var vectors = g.pixels() * (g.c // width)
            if vectors > Int(Int32.MAX):
                raise Error("pooling: expects fewer than 2^31 pieces but has ", vectors)
            launch[pool_kernel[dtype, out, kind, width]](
                ctx,
                y,
                x,
                g,
                grid_dim=ceildiv(vectors, THREADS),
                block_dim=THREADS,
            )


@always_inline
def _pool[
    dtype: DType, //, target: StaticString, kind: StaticString
](y: Data[dtype], x: Data[dtype], g: Geometry, ctx: DeviceContext) raises:
    if g.pixels() * g.c == 0:
        return
    comptime if target == "cpu":
        pool_cpu[kind](y, x, g)
    else:
        pool_gpu[kind](y, x, g, ctx)


@register("maxpool")
struct MaxPool:
    """Takes the maximum of each window."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result [N, P, Q, C].
            x: Activations [N, H, W, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails, or the result is too large.
        """
        _pool[target, "max"](data(y), data(x), Geometry(x.shape(), y.shape(), data(window)), ctx)


@register("avgpool")
struct AvgPool:
    """Averages each window in float32; padding counts as in torch's count_include_pad."""

    @staticmethod
    def execute[
        target: StaticString, padding_counts: Bool
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            padding_counts: Whether zeros of the padding count in the average.

        Args:
            y: Result [N, P, Q, C].
            x: Activations [N, H, W, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails, or the result is too large.
        """
        comptime kind = "mean" if padding_counts else "mean_inside"
        _pool[target, kind](data(y), data(x), Geometry(x.shape(), y.shape(), data(window)), ctx)
