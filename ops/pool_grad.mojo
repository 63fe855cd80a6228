"""The gradients of max and average pooling, torch's: dx[N, H, W, C] from dy[N, P, Q, C].

    max      dx[n, h, w, c] = sum of dy[n, p, q, c] over the windows whose maximum is x[n, h, w, c]
    average  dx[n, h, w, c] = sum of dy[n, p, q, c] / count[p, q] over the windows that have (h, w)

Where the maxima are is found first, from x, by the kernels of pool.mojo: places[N, P, Q, C], a byte
each unless a window covers more than 256 pixels. Then each pixel gathers from the windows that it is
in, so the sums have a fixed order and need no atomics. Vectors run over channels, as in pool.mojo: a
CPU computes rows of dx on all cores, a GPU 16 bytes of `COLUMNS` pixels in each thread, which divides
once for all of them. Sums are float32, or float64, rounded once. Bound by memory: x and dy are read,
places written and read, dx written.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.sys import simd_width_of, size_of

from .geometry import Geometry
from .launch import launch
from .operands import ALIGN, F32, WIDE, Data, data, narrowed, widened
from .parallel import over_cores
from .pool import THREADS, inside, pool_cpu, pool_gpu

comptime COLUMNS = 4
"""Pixels, one beside the other, that a GPU's thread computes."""


struct Windows(TrivialRegisterPassable):
    """The windows along an axis that may have a pixel; all but those that a dilation skips."""

    var first: UInt32
    """The first."""
    var end: UInt32
    """The one behind the last."""
    var place: UInt32
    """Where the pixel is in the first, px."""

    @always_inline
    def __init__(out self, at: UInt32, taps: Int, stride: Int, dilation: Int, count: Int):
        """Finds the windows.

        Args:
            at: The pixel, counted from the padding's first.
            taps: Of a window.
            stride: From one window to the next, px.
            dilation: From one tap to the next, px.
            count: How many windows there are.
        """
        var step = UInt32(stride)
        var before = min(at, (UInt32(taps) - 1) * UInt32(dilation))
        self.first = (at - before + step - 1) // step
        self.end = min(UInt32(count), at // step + 1)
        self.place = at - self.first * step


@always_inline
def gathered[
    dtype: DType, integer: DType, //, kind: StaticString, width: Int
](g: Geometry, dy: Data[dtype], places: Data[integer], rows: Windows, columns: Windows) -> SIMD[
    dtype, width
]:
    """Computes the gradients of a pixel.

    Parameters:
        dtype: Of the tensors.
        integer: Of the places.
        kind: `max`; `mean`, where zeros of the padding counted; or `mean_inside`.
        width: Channels.

    Args:
        g: Sizes of the pooling.
        dy: The gradient of the result, of an image, from the first channel on [P, Q, C].
        places: Where the maxima are, likewise; an average does not read it.
        rows: Of the pixel's windows.
        columns: Of the pixel's windows.

    Returns:
        The gradients.
    """
    var sum = SIMD[WIDE[dtype], width](0)
    for p in range(rows.first, rows.end):
        var at = Int(p * UInt32(g.q) + columns.first) * Int(UInt32(g.c))
        var row = rows.place - (p - rows.first) * UInt32(g.stride_h)
        var own = UInt32(g.place(Int(row), Int(columns.place)))
        for q in range(columns.first, columns.end):
            var value = widened[WIDE[dtype]](
                dy.unsafe_load[width=width, alignment=ALIGN[dtype, width]](at)
            )
            comptime if kind == "max":
                var place = places.unsafe_load[width=width, alignment=ALIGN[integer, width]](at)
                sum = place.eq(own.cast[integer]()).select(sum + value, sum)
                own -= UInt32(g.stride_w)
            else:
                var count = inside[counts_padding=kind == "mean"](g, Int(p), Int(q))
                sum += value / Scalar[WIDE[dtype]](count)
            at += g.c
    return narrowed[dtype](sum)


def pool_grad_cpu[
    dtype: DType, integer: DType, //, kind: StaticString
](dx: Data[dtype], dy: Data[dtype], places: Data[integer], g: Geometry):
    """Computes rows of dx on all cores.

    Parameters:
        dtype: Of the tensors.
        integer: Of the places.
        kind: See `gathered`.

    Args:
        dx: Result [N, H, W, C].
        dy: The gradient of the pooling's result [N, P, Q, C].
        places: See `gathered`.
        g: Sizes of the pooling.
    """

    def task(row: Int) {imm}:
        _row[kind](dx, dy, places, g, row)

    over_cores(task, g.n * g.h)


@no_inline
def _row[
    dtype: DType, integer: DType, //, kind: StaticString
](dx: Data[dtype], dy: Data[dtype], places: Data[integer], g: Geometry, row: Int):
    comptime WIDTH = simd_width_of[F32]()
    var n, h = divmod(row, g.h)
    var image = n * g.p * g.q * g.c
    var rows = Windows(UInt32(h + g.pad_h), g.r, g.stride_h, g.dilation_h, g.p)
    for w in range(g.w):
        var columns = Windows(UInt32(w + g.pad_w), g.s, g.stride_w, g.dilation_w, g.q)
        var to = dx.unsafe_offset((row * g.w + w) * g.c)
        var c = 0
        comptime for width in [WIDTH, 1]:
            while c + width <= g.c:
                var of = dy.unsafe_offset(image + c)
                var at = places.unsafe_offset(image + c)
                to.unsafe_store(c, gathered[kind, width](g, of, at, rows, columns))
                c += width


comptime NAME[kind: StaticString] = "max_pool2d_grad" if kind == "max" else "avg_pool2d_grad"
"""What programs call the gradient of a kind of pooling.

Parameters:
    kind: See `gathered`.
"""


@__name(t"{NAME[kind]}_{kind}_{width}_{dtype}")
def pool_grad_kernel[
    dtype: DType, integer: DType, kind: StaticString, width: Int
](dx: Data[dtype], dy: Data[dtype], places: Data[integer], g: Geometry):
    """Computes `width` channels of `COLUMNS` pixels in each thread.

    Parameters:
        dtype: Of the tensors.
        integer: Of the places.
        kind: See `gathered`.
        width: 16 bytes of channels, or 1.

    Args:
        dx: Result [N, H, W, C].
        dy: The gradient of the pooling's result [N, P, Q, C].
        places: See `gathered`.
        g: Sizes of the pooling; C is a multiple of the width.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()
    var index = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    var group, vector = divmod(index, UInt32(g.c // width))
    var row, part = divmod(group, ceildiv(UInt32(g.w), COLUMNS))
    var n, h = divmod(row, UInt32(g.h))
    if Int(n) >= g.n:
        return
    var c = Int(vector) * width
    var image = Int(n) * g.p * g.q * g.c + c
    var of = dy.unsafe_offset(image)
    var at = places.unsafe_offset(image)
    var to = dx.unsafe_offset(Int(row) * g.w * g.c + c)
    var rows = Windows(h + UInt32(g.pad_h), g.r, g.stride_h, g.dilation_h, g.p)
    for w in range(part * COLUMNS, min(part * COLUMNS + COLUMNS, UInt32(g.w))):
        var columns = Windows(w + UInt32(g.pad_w), g.s, g.stride_w, g.dilation_w, g.q)
        var value = gathered[kind, width](g, of, at, rows, columns)
        to.unsafe_store[alignment=ALIGN[dtype, width]](Int(w) * Int(UInt32(g.c)), value)


def pool_grad_gpu[
    dtype: DType, integer: DType, //, kind: StaticString
](dx: Data[dtype], dy: Data[dtype], places: Data[integer], g: Geometry, ctx: DeviceContext) raises:
    """Enqueues the gradient of a pooling.

    Parameters:
        dtype: Of the tensors.
        integer: Of the places.
        kind: See `gathered`.

    Args:
        dx: Result [N, H, W, C].
        dy: The gradient of the pooling's result [N, P, Q, C].
        places: See `gathered`.
        g: Sizes of the pooling.
        ctx: The GPU.

    Raises:
        If there are 2^31 threads, or the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    comptime for width in [wide, 1]:
        if (g.c % wide == 0) == (width == wide):
            var pieces = g.n * g.h * ceildiv(g.w, COLUMNS) * (g.c // width)
            if pieces > Int(Int32.MAX):
                raise Error(NAME[kind], ": expects fewer than 2^31 pieces but has ", pieces)
            launch[pool_grad_kernel[dtype, integer, kind, width]](
                ctx,
                dx,
                dy,
                places,
                g,
                grid_dim=ceildiv(pieces, THREADS),
                block_dim=THREADS,
            )


@always_inline
def _pool_grad[
    dtype: DType, integer: DType, //, target: StaticString, kind: StaticString
](dx: Data[dtype], dy: Data[dtype], places: Data[integer], g: Geometry, ctx: DeviceContext) raises:
    comptime if target == "cpu":
        pool_grad_cpu[kind](dx, dy, places, g)
    else:
        pool_grad_gpu[kind](dx, dy, places, g, ctx)


@register("max_pool2d_grad")
struct MaxPoolGrad:
    """Gives each pixel the gradients of the windows whose maximum it is."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        dx: OutputTensor[rank=4, ...],
        places: OutputTensor[rank=4, ...],
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
            places: Scratch [N, P, Q, C]: uint8, or int32 if a window covers more than 256 pixels.
            x: What was pooled [N, H, W, C].
            dy: The gradient of the pooling's result [N, P, Q, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails, the result is too large, or the places are too narrow.
        """
        var g = Geometry(x.shape(), dy.shape(), data(window))
        var last = g.place((g.r - 1) * g.dilation_h, (g.s - 1) * g.dilation_w)
        if last > min(Int(Scalar[places.dtype].MAX), 1 << 24):  # float32 is exact up to there
            raise Error("max_pool2d_grad: a window is too large for places of ", places.dtype)
        if g.n * g.h * g.w * g.c == 0:
            return
        comptime if target == "cpu":
            pool_cpu["place"](data(places), data(x), g)
        else:
            pool_gpu["place"](data(places), data(x), g, ctx)
        _pool_grad[target, "max"](data(dx), data(dy), data(places), g, ctx)


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
        if g.n * g.h * g.w * g.c > 0:
            _pool_grad[target, kind](data(dx), data(dy), data(dx), g, ctx)
