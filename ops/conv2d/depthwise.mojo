"""Depthwise convolution on a GPU: y[n, p, q, c] = act(bias[c] + sum_rs x[n, h, w, c] w[r, s, c]).

With h = p * stride - pad + r and w = q * stride - pad + s; x[N, H, W, C], w[R, S, C], y[N, P, Q, C].
A thread computes 16 bytes of channels of RUN neighbouring pixels of a row. It walks along each row
of the window once, so a number of x that several of its pixels share is read once, and a row's
weights, widened to float32, serve all of them. Neighbouring threads have neighbouring channels: a
warp reads and writes whole lines of memory. For windows of 3 x 3 and 5 x 5 with stride 1 or 2, and
of 7 x 7 with stride 1, which are unrolled; a simpler kernel takes all others, and channels that no
16 bytes divide. Bound by device memory at large batches, by latency at batch 1.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.math import ceildiv
from std.sys import size_of

from ..epilogue import Epilogue, activate
from ..geometry import Geometry
from ..operands import F32, Operands, widened

comptime THREADS = 256
"""Threads of a block of the simple kernel."""
comptime BLOCK = 128
"""Threads of a block of the other: few, so that small images have blocks for all multiprocessors."""


def enqueue_depthwise[
    dtype: DType, epilogue: Epilogue
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    """Enqueues a depthwise convolution.

    Parameters:
        dtype: Of x, the filter and y.
        epilogue: What the sums go through.

    Args:
        g: Sizes.
        o: Tensors; the filter is w[R, S, C].
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    var square = g.r == g.s and g.stride_h == g.stride_w and g.dilation_h * g.dilation_w == 1
    # The kernel counts in 32 bits.
    var counts = max(g.n * g.h * g.w, g.pixels()) * g.c < Int(Int32.MAX)
    if square and counts and g.c % wide == 0:
        comptime for kernel in [3, 5, 7]:
            comptime for stride in [1, 2]:
                comptime if kernel < 7 or stride == 1:
                    if g.r == kernel and g.stride_h == stride:
                        comptime run = 4 // stride
                        var threads = g.n * g.p * ceildiv(g.q, run) * (g.c // wide)
                        ctx.enqueue_function[depthwise_run_kernel[dtype, epilogue, kernel, stride]](
                            o,
                            g,
                            grid_dim=ceildiv(threads, BLOCK),
                            block_dim=BLOCK,
                            attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
                        )
                        return
    if g.c % 4 == 0:
        _enqueue_simple[dtype, epilogue, 4](g, o, ctx)
    else:
        _enqueue_simple[dtype, epilogue, 1](g, o, ctx)


@__name(t"depthwise_{kernel}x{kernel}_{stride}_{epilogue.label()}_{dtype}")
def depthwise_run_kernel[
    dtype: DType, epilogue: Epilogue, kernel: Int, stride: Int
](o: Operands[dtype], g: Geometry):
    """Computes y[n, p, q : q + RUN, c : c + WIDE] in each thread.

    Parameters:
        dtype: Of x, the filter and y.
        epilogue: What the sums go through.
        kernel: R and S.
        stride: Down and across.

    Args:
        o: Tensors; the filter is w[R, S, C].
        g: Sizes; C is a multiple of 16 bytes.
    """
    comptime WIDE = 16 // size_of[dtype]()
    comptime RUN = 4 // stride
    comptime COLUMNS = (RUN - 1) * stride + kernel
    var vectors = UInt32(g.c // WIDE)
    var runs = UInt32(ceildiv(g.q, RUN))
    var index = UInt32(block_idx.x) * UInt32(BLOCK) + UInt32(thread_idx.x)
    var strip = index // vectors
    var c = Int(index - strip * vectors) * WIDE
    var row = strip // runs
    var q = Int(strip - row * runs) * RUN
    var n = row // UInt32(g.p)
    var p = Int(row - n * UInt32(g.p))
    if Int(n) >= g.n:
        return
    var sums = Array[SIMD[F32, WIDE], RUN](fill=o.bias.unsafe_load[width=WIDE, alignment=16](c))
    var h0 = p * stride - g.pad_h
    var w0 = q * stride - g.pad_w
    wait_on_dependent_grids()
    launch_dependent_grids()
    # What lies outside is read elsewhere and then dropped: no load waits for a branch. Rows are not
    # unrolled, or the loads of all of them would be held in registers at a time.
    for r in range(kernel):
        var h = h0 + r
        var row_inside = h >= 0 and h < g.h
        var weights = Array[SIMD[F32, WIDE], kernel](uninitialized=True)
        comptime for s in range(kernel):
            weights[s] = widened(
                o.w.unsafe_load[width=WIDE, alignment=16]((r * kernel + s) * g.c + c)
            )
        var line = o.x.unsafe_offset((Int(n) * g.h + (h if row_inside else 0)) * g.w * g.c + c)
        comptime for column in range(COLUMNS):
            var w = w0 + column
            var inside = row_inside and w >= 0 and w < g.w
            var loaded = line.unsafe_load[width=WIDE, alignment=16]((w if inside else 0) * g.c)
            var value = widened(loaded if inside else SIMD[dtype, WIDE](0))
            comptime for i in range(RUN):
                comptime s = column - i * stride
                comptime if 0 <= s and s < kernel:
                    sums[i] = value.fma(weights[s], sums[i])
    comptime for i in range(RUN):
        if q + i < g.q:
            var to = (Int(row) * g.q + q + i) * g.c + c
            var sum = sums[i]
            comptime if epilogue.adds:
                sum += widened(o.residual.unsafe_load[width=WIDE, alignment=16](to))
            o.y.unsafe_store[alignment=16](to, activate[epilogue, dtype](sum).cast[dtype]())


def _enqueue_simple[
    dtype: DType, epilogue: Epilogue, width: Int
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    ctx.enqueue_function[depthwise_kernel[dtype, epilogue, width]](
        o,
        g,
        grid_dim=ceildiv(g.pixels() * g.c // width, THREADS),
        block_dim=THREADS,
    )


@__name(t"depthwise_{width}_{epilogue.label()}_{dtype}")
def depthwise_kernel[dtype: DType, epilogue: Epilogue, width: Int](o: Operands[dtype], g: Geometry):
    """Computes y[n, p, q, c : c + width] in each thread.

    Parameters:
        dtype: Of x, the filter and y.
        epilogue: What the accumulator goes through.
        width: Channels of a thread; divides C.

    Args:
        o: Tensors; the filter is w[R, S, C].
        g: Sizes.
    """
    comptime align = width * size_of[dtype]()
    var index = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var pixel = index // (g.c // width)
    var c = (index - pixel * (g.c // width)) * width
    if pixel >= g.pixels():
        return
    var row = pixel // g.q
    var q = pixel - row * g.q
    var n = row // g.p
    var p = row - n * g.p
    var acc = o.bias.unsafe_load[width=width](c)
    for r in range(g.r):
        var h = p * g.stride_h - g.pad_h + r * g.dilation_h
        if h < 0 or h >= g.h:
            continue
        for s in range(g.s):
            var w = q * g.stride_w - g.pad_w + s * g.dilation_w
            if w < 0 or w >= g.w:
                continue
            var at = ((n * g.h + h) * g.w + w) * g.c + c
            var value = o.x.unsafe_load[width=width, alignment=align](at).cast[F32]()
            var tap = o.w.unsafe_load[width=width, alignment=align]((r * g.s + s) * g.c + c)
            acc = value.fma(tap.cast[F32](), acc)
    var to = pixel * g.c + c
    comptime if epilogue.adds:
        acc += o.residual.unsafe_load[width=width, alignment=align](to).cast[F32]()
    o.y.unsafe_store[alignment=align](to, activate[epilogue, dtype](acc).cast[dtype]())
