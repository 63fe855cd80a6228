"""The gradients of max and average pooling, torch's: dx[N, H, W, C] from dy[N, P, Q, C].

    max      dx[n, h, w, c] = sum of dy[n, p, q, c] over the windows whose maximum is x[n, h, w, c]
    average  dx[n, h, w, c] = sum of dy[n, p, q, c] / count[p, q] over the windows that have (h, w)

Each pixel gathers from the windows that it is in, so the sums have a fixed order and need no atomics.
Where the maximum was is found again from x: the first of equal numbers, the last NaN. That reads a
window for each pixel in it, from the cache: ResNet's, 3 x 3 at stride 2, are 2.25 windows a pixel.
Vectors run over channels, as in pool.mojo: a CPU computes rows of dx on all cores, a GPU 16 bytes in
each thread. Sums are float32, rounded once. Bound by memory.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.math import ceildiv, isnan
from std.sys import simd_width_of, size_of

from .geometry import Geometry
from .operands import F32, WIDE, Data, data, narrowed, widened
from .parallel import over_cores
from .pool import THREADS, inside


@always_inline
def windows(at: Int, taps: Int, stride: Int, dilation: Int, count: Int) -> Tuple[Int, Int]:
    """Finds the windows along an axis that may have a pixel; all but those that a dilation skips.

    Args:
        at: The pixel, counted from the padding's first.
        taps: Of a window.
        stride: From one window to the next, px.
        dilation: From one tap to the next, px.
        count: How many windows there are.

    Returns:
        The first, and the one behind the last.
    """
    var first = UInt32(max(0, at - (taps - 1) * dilation) + stride - 1) // UInt32(stride)
    return Int(first), min(count, Int(UInt32(at) // UInt32(stride)) + 1)


@always_inline
def gathered[
    dtype: DType, kind: StaticString, width: Int, align: Int = size_of[dtype]()
](g: Geometry, x: Data[dtype], dy: Data[dtype], n: Int, h: Int, w: Int, c: Int) -> SIMD[
    dtype, width
]:
    """Computes dx[n, h, w, c : c + width].

    Parameters:
        dtype: Of the tensors.
        kind: `max`; `mean`, where zeros of the padding counted; or `mean_inside`.
        width: Channels.
        align: Bytes that they are known to be aligned to.

    Args:
        g: Sizes of the pooling.
        x: What was pooled [N, H, W, C]; an average does not read it.
        dy: The gradient of the result [N, P, Q, C].
        n: Number of the image.
        h: Row of the pixel.
        w: Column of the pixel.
        c: First channel.

    Returns:
        The gradients.
    """
    var image = x.unsafe_offset(n * g.h * g.w * g.c + c)
    var gradients = dy.unsafe_offset(n * g.p * g.q * g.c + c)
    var rows = windows(h + g.pad_h, g.r, g.stride_h, g.dilation_h, g.p)
    var columns = windows(w + g.pad_w, g.s, g.stride_w, g.dilation_w, g.q)
    var own = SIMD[WIDE[dtype], width](0)
    comptime if kind == "max":
        own = widened[WIDE[dtype]](
            image.unsafe_load[width=width, alignment=align]((h * g.w + w) * g.c)
        )
    var sum = SIMD[WIDE[dtype], width](0)
    for p in range(rows[0], rows[1]):
        for q in range(columns[0], columns[1]):
            var value = widened[WIDE[dtype]](
                gradients.unsafe_load[width=width, alignment=align]((p * g.q + q) * g.c)
            )
            comptime if kind == "max":
                var r = UInt32(h + g.pad_h - p * g.stride_h)
                var s = UInt32(w + g.pad_w - q * g.stride_w)
                if r % UInt32(g.dilation_h) or s % UInt32(g.dilation_w):
                    continue
                sum += _is_maximum[dtype, width, align](g, image, own, h, w, p, q).select(
                    value, SIMD[WIDE[dtype], width](0)
                )
            else:
                sum += value / Scalar[WIDE[dtype]](inside[counts_padding=kind == "mean"](g, p, q))
    return narrowed[dtype](sum)


@always_inline
def _is_maximum[
    dtype: DType, width: Int, align: Int
](
    g: Geometry, image: Data[dtype], own: SIMD[WIDE[dtype], width], h: Int, w: Int, p: Int, q: Int
) -> SIMD[DType.bool, width]:
    """Tells in which channels a pixel of a window is where torch finds the maximum."""
    var beaten = SIMD[DType.bool, width](fill=False)
    for r in range(g.r):
        var row = p * g.stride_h - g.pad_h + r * g.dilation_h
        if row < 0 or row >= g.h:
            continue
        for s in range(g.s):
            var column = q * g.stride_w - g.pad_w + s * g.dilation_w
            if column < 0 or column >= g.w:
                continue
            var other = widened[WIDE[dtype]](
                image.unsafe_load[width=width, alignment=align]((row * g.w + column) * g.c)
            )
            if row < h or (row == h and column < w):
                beaten |= other.ge(own) | (isnan(other) & ~isnan(own))
            elif row > h or column > w:
                beaten |= other.gt(own) | isnan(other)
    return ~beaten


def pool_grad_cpu[
    dtype: DType, kind: StaticString
](dx: Data[dtype], x: Data[dtype], dy: Data[dtype], g: Geometry):
    """Computes rows of dx on all cores.

    Parameters:
        dtype: Of the tensors.
        kind: See `gathered`.

    Args:
        dx: Result [N, H, W, C].
        x: What was pooled.
        dy: The gradient of the pooling's result [N, P, Q, C].
        g: Sizes of the pooling.
    """

    def task(row: Int) {imm}:
        _row[kind](dx, x, dy, g, row)

    over_cores(task, g.n * g.h)


@no_inline
def _row[
    dtype: DType, //, kind: StaticString
](dx: Data[dtype], x: Data[dtype], dy: Data[dtype], g: Geometry, row: Int):
    comptime WIDTH = simd_width_of[F32]()
    var n, h = divmod(row, g.h)
    for w in range(g.w):
        var to = dx.unsafe_offset((row * g.w + w) * g.c)
        var whole = g.c // WIDTH * WIDTH
        for c in range(0, whole, WIDTH):
            to.unsafe_store(c, gathered[dtype, kind, WIDTH](g, x, dy, n, h, w, c))
        for c in range(whole, g.c):
            to.unsafe_store(c, gathered[dtype, kind, 1](g, x, dy, n, h, w, c))


comptime NAME[kind: StaticString] = "max_pool2d_grad" if kind == "max" else "avg_pool2d_grad"
"""What programs call the gradient of a kind of pooling.

Parameters:
    kind: See `gathered`.
"""


@__name(t"{NAME[kind]}_{kind}_{width}_{dtype}")
def pool_grad_kernel[
    dtype: DType, kind: StaticString, width: Int
](dx: Data[dtype], x: Data[dtype], dy: Data[dtype], g: Geometry):
    """Computes `width` channels of a pixel in each thread.

    Parameters:
        dtype: Of the tensors.
        kind: See `gathered`.
        width: 16 bytes of channels, or 1.

    Args:
        dx: Result [N, H, W, C].
        x: What was pooled.
        dy: The gradient of the pooling's result [N, P, Q, C].
        g: Sizes of the pooling; C is a multiple of the width.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()
    var index = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    var vectors = UInt32(g.c // width)
    var pixel, vector = divmod(index, vectors)
    var row, w = divmod(pixel, UInt32(g.w))
    var n, h = divmod(row, UInt32(g.h))
    if Int(n) >= g.n:
        return
    comptime bytes = width * size_of[dtype]()
    var value = gathered[dtype, kind, width, bytes](
        g, x, dy, Int(n), Int(h), Int(w), Int(vector) * width
    )
    dx.unsafe_store[alignment=bytes](Int(index) * width, value)


def pool_grad_gpu[
    dtype: DType, kind: StaticString
](dx: Data[dtype], x: Data[dtype], dy: Data[dtype], g: Geometry, ctx: DeviceContext) raises:
    """Enqueues the gradient of a pooling.

    Parameters:
        dtype: Of the tensors.
        kind: See `gathered`.

    Args:
        dx: Result [N, H, W, C].
        x: What was pooled.
        dy: The gradient of the pooling's result [N, P, Q, C].
        g: Sizes of the pooling.
        ctx: The GPU.

    Raises:
        If dx has 2^31 pieces of 16 bytes, or the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    comptime for width in [wide, 1]:
        if (g.c % wide == 0) == (width == wide):
            var vectors = g.n * g.h * g.w * (g.c // width)
            if vectors > Int(Int32.MAX):
                raise Error(NAME[kind], ": expects fewer than 2^31 pieces but has ", vectors)
            ctx.enqueue_function[pool_grad_kernel[dtype, kind, width]](
                dx,
                x,
                dy,
                g,
                grid_dim=ceildiv(vectors, THREADS),
                block_dim=THREADS,
                attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
            )


@always_inline
def _pool_grad[
    dtype: DType, //, target: StaticString, kind: StaticString
](dx: Data[dtype], x: Data[dtype], dy: Data[dtype], g: Geometry, ctx: DeviceContext) raises:
    if g.n * g.h * g.w * g.c == 0:
        return
    comptime if target == "cpu":
        pool_grad_cpu[dtype, kind](dx, x, dy, g)
    else:
        pool_grad_gpu[dtype, kind](dx, x, dy, g, ctx)


@register("max_pool2d_grad")
struct MaxPoolGrad:
    """Gives each pixel the gradients of the windows whose maximum it is."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        dx: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=dx.dtype, rank=4, ...],
        dy: InputTensor[dtype=dx.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            dx: Result [N, H, W, C].
            x: What was pooled [N, H, W, C].
            dy: The gradient of the pooling's result [N, P, Q, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails, or the result is too large.
        """
        var g = Geometry(x.shape(), dy.shape(), data(window))
        _pool_grad[target, "max"](data(dx), data(x), data(dy), g, ctx)


@register("avg_pool2d_grad")
struct AvgPoolGrad:
    """Gives each pixel its part of the gradients of the windows that average it."""

    @staticmethod
    def execute[
        target: StaticString, padding_counts: Bool
    ](
        dx: OutputTensor[rank=4, ...],
        dy: InputTensor[dtype=dx.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            padding_counts: Whether zeros of the padding counted in the average.

        Args:
            dx: Result [N, H, W, C].
            dy: The gradient of the pooling's result [N, P, Q, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails, or the result is too large.
        """
        comptime kind = "mean" if padding_counts else "mean_inside"
        var g = Geometry(dx.shape(), dy.shape(), data(window))
        _pool_grad[target, kind](data(dx), data(dx), data(dy), g, ctx)
