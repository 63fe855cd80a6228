"""Convolution on a CPU: the indirect GEMM of ops/gemm, and a kernel of its own for depthwise.

Depthwise: y[n, p, q, c] = sum_rs x[n, p * stride + r, q * stride + s, c] w[r, s, c]. Vectors
run over channels; one task is a row of output. Bound by loads: two for each FMA.
"""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.sys import simd_width_of

from ..epilogue import Epilogue, activate
from ..gemm.cpu import gemm
from ..geometry import Data, Geometry

comptime F32 = DType.float32
comptime WIDTH = simd_width_of[F32]()


def conv2d_cpu[
    epilogue: Epilogue
](
    g: Geometry,
    x: Data[F32],
    filter: Data[F32],
    bias: Data[F32],
    residual: Data[F32],
    y: Data[F32],
):
    """Convolves on all cores: `filter` is w[R, S, C] if depthwise, packed panels otherwise."""
    if g.depthwise():
        _depthwise[epilogue](g, x, filter, bias, residual, y)
    else:
        gemm[epilogue](g, x, filter, bias, residual, y, 1)


@always_inline
def _depthwise_pixel[
    epilogue: Epilogue, width: Int
](
    g: Geometry,
    x: Data[F32],
    filter: Data[F32],
    bias: Data[F32],
    residual: Data[F32],
    y: Data[F32],
    image: Int,
    p: Int,
    q: Int,
    channel: Int,
):
    var acc = bias.unsafe_load[width=width](channel)
    for r in range(g.r):
        var h = p * g.stride_h - g.pad_h + r * g.dilation_h
        if h < 0 or h >= g.h:
            continue
        for s in range(g.s):
            var w = q * g.stride_w - g.pad_w + s * g.dilation_w
            if w < 0 or w >= g.w:
                continue
            var value = x.unsafe_load[width=width](((image * g.h + h) * g.w + w) * g.c + channel)
            acc = value.fma(filter.unsafe_load[width=width]((r * g.s + s) * g.c + channel), acc)
    var to = ((image * g.p + p) * g.q + q) * g.f + channel
    comptime if epilogue.adds:
        acc += residual.unsafe_load[width=width](to)
    y.unsafe_store(to, activate[epilogue](acc))


def _depthwise[
    epilogue: Epilogue
](
    g: Geometry,
    x: Data[F32],
    filter: Data[F32],
    bias: Data[F32],
    residual: Data[F32],
    y: Data[F32],
):
    def row(index: Int) {var}:
        var image = index // g.p
        var p = index % g.p
        for q in range(g.q):
            var channel = 0
            while channel + WIDTH <= g.c:
                _depthwise_pixel[epilogue, WIDTH](
                    g, x, filter, bias, residual, y, image, p, q, channel
                )
                channel += WIDTH
            while channel < g.c:
                _depthwise_pixel[epilogue, 1](
                    g, x, filter, bias, residual, y, image, p, q, channel
                )
                channel += 1

    sync_parallelize(row, g.n * g.p)
