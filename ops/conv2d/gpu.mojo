"""Convolution on a GPU: the implicit GEMM of ops/gemm, and a kernel of its own for depthwise.

Depthwise: a thread computes `width` neighbouring channels of one output pixel, so a warp reads
and writes whole lines of memory. Bound by device memory.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ..epilogue import Epilogue, activate
from ..gemm.gpu import gemm
from ..geometry import Data, Geometry

comptime F32 = DType.float32
comptime THREADS = 256


def conv2d_gpu[
    dtype: DType, epilogue: Epilogue
](
    g: Geometry,
    x: Data[dtype],
    filter: Data[dtype],
    bias: Data[F32],
    residual: Data[dtype],
    y: Data[dtype],
    ctx: DeviceContext,
) raises:
    """Enqueues a convolution: `filter` is w[R, S, C] if depthwise, w[F, R, S, C] otherwise."""
    if not g.depthwise():
        var f = g.group_f()
        var c = g.group_c()
        var steps: Array[Int, 4] = [c, f * g.r * g.s * c, f, f]
        gemm[dtype, epilogue, True](
            g, g.groups, x, filter, bias, residual, y, 1, steps, ctx
        )
    elif g.c % 4 == 0:
        _enqueue_depthwise[dtype, epilogue, 4](g, x, filter, bias, residual, y, ctx)
    else:
        _enqueue_depthwise[dtype, epilogue, 1](g, x, filter, bias, residual, y, ctx)


def _enqueue_depthwise[
    dtype: DType, epilogue: Epilogue, width: Int
](
    g: Geometry,
    x: Data[dtype],
    filter: Data[dtype],
    bias: Data[F32],
    residual: Data[dtype],
    y: Data[dtype],
    ctx: DeviceContext,
) raises:
    ctx.enqueue_function[depthwise_kernel[dtype, epilogue, width]](
        x, filter, bias, residual, y, g,
        grid_dim=ceildiv(g.pixels() * g.c // width, THREADS),
        block_dim=THREADS,
    )


def depthwise_kernel[
    dtype: DType, epilogue: Epilogue, width: Int
](
    x: Data[dtype],
    filter: Data[dtype],
    bias: Data[F32],
    residual: Data[dtype],
    y: Data[dtype],
    g: Geometry,
):
    """Computes y[n, p, q, c : c + width] in each thread."""
    comptime align = width * size_of[dtype]()
    var index = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var pixel = index // (g.c // width)
    var c = (index - pixel * (g.c // width)) * width
    if pixel >= g.pixels():
        return
    var row = pixel // g.q
    var q = pixel - row * g.q
    var image = row // g.p
    var p = row - image * g.p
    var acc = bias.unsafe_load[width=width](c)
    for r in range(g.r):
        var h = p * g.stride_h - g.pad_h + r * g.dilation_h
        if h < 0 or h >= g.h:
            continue
        for s in range(g.s):
            var w = q * g.stride_w - g.pad_w + s * g.dilation_w
            if w < 0 or w >= g.w:
                continue
            var at = ((image * g.h + h) * g.w + w) * g.c + c
            var value = x.unsafe_load[width=width, alignment=align](at).cast[F32]()
            var tap = filter.unsafe_load[width=width, alignment=align]((r * g.s + s) * g.c + c)
            acc = value.fma(tap.cast[F32](), acc)
    var to = pixel * g.c + c
    comptime if epilogue.adds:
        acc += residual.unsafe_load[width=width, alignment=align](to).cast[F32]()
    y.unsafe_store[alignment=align](to, activate[epilogue](acc).cast[dtype]())
