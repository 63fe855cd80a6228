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
from ..geometry import Geometry
from ..operands import F32, Batch, Operands

comptime THREADS = 256
"""Threads of a block."""


def conv2d_gpu[
    dtype: DType, epilogue: Epilogue, tf32: Bool
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, the filter and y.
        epilogue: What the accumulator goes through.
        tf32: Whether the products may round float32 to TF32.

    Args:
        g: Sizes.
        o: Tensors; the filter is w[R, S, C] if depthwise, w[F, R, S, C] otherwise.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    if not g.depthwise():
        gemm[dtype, epilogue, True, tf32](
            g,
            o,
            Batch(
                g.groups,
                x=g.group_c(),
                w=g.group_f() * g.depth(),
                bias=g.group_f(),
                y=g.group_f(),
            ),
            ctx,
        )
    elif g.c % 4 == 0:
        _enqueue_depthwise[dtype, epilogue, 4](g, o, ctx)
    else:
        _enqueue_depthwise[dtype, epilogue, 1](g, o, ctx)


def _enqueue_depthwise[
    dtype: DType, epilogue: Epilogue, width: Int
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    ctx.enqueue_function[depthwise_kernel[dtype, epilogue, width]](
        o,
        g,
        grid_dim=ceildiv(g.pixels() * g.c // width, THREADS),
        block_dim=THREADS,
    )


@__name(t"depthwise_{epilogue.label()}_{dtype}")
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
