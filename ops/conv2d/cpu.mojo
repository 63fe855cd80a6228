"""Convolution on a CPU: the indirect GEMM of ops/gemm, and a kernel of its own for depthwise.

Depthwise: y[n, p, q, c] = sum_rs x[n, p * stride + r, q * stride + s, c] w[r, s, c]. Vectors
run over channels; one task is a row of output. Bound by loads: two for each FMA.
"""

from std.sys import simd_width_of

from ..epilogue import Epilogue, activate
from ..gemm.bf16 import gemm as gemm_bf16
from ..gemm.cpu import gemm
from ..geometry import Geometry
from ..operands import BF16, F32, Operands, narrowed, widened
from ..parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""


def conv2d_cpu[dtype: DType, //, epilogue: Epilogue](g: Geometry, o: Operands[dtype]):
    """Convolves on all cores.

    Parameters:
        dtype: Of the tensors, float32 or bfloat16.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes.
        o: Tensors; the filter is w[R, S, C] if depthwise, packed panels otherwise.
    """
    if g.depthwise():
        _depthwise[epilogue](g, o)
    else:
        comptime if dtype == F32:
            gemm[epilogue](g, rebind[Operands[F32]](o))
        else:
            gemm_bf16[epilogue](g, rebind[Operands[BF16]](o))


def _depthwise[dtype: DType, //, epilogue: Epilogue](g: Geometry, o: Operands[dtype]):
    def row(index: Int) {var}:
        for q in range(g.q):
            var whole = g.c // WIDTH * WIDTH
            for c in range(0, whole, WIDTH):
                _depthwise_pixel[epilogue, WIDTH](g, o, index // g.p, index % g.p, q, c)
            for c in range(whole, g.c):
                _depthwise_pixel[epilogue, 1](g, o, index // g.p, index % g.p, q, c)

    over_cores(row, g.n * g.p)


@always_inline
def _depthwise_pixel[
    dtype: DType, //, epilogue: Epilogue, width: Int
](g: Geometry, o: Operands[dtype], n: Int, p: Int, q: Int, c: Int):
    """Computes y[n, p, q, c : c + width]."""
    var acc = o.bias.unsafe_load[width=width](c)
    for r in range(g.r):
        var h = p * g.stride_h - g.pad_h + r * g.dilation_h
        if h < 0 or h >= g.h:
            continue
        for s in range(g.s):
            var w = q * g.stride_w - g.pad_w + s * g.dilation_w
            if w < 0 or w >= g.w:
                continue
            var value = o.x.unsafe_load[width=width](((n * g.h + h) * g.w + w) * g.c + c)
            var tap = o.w.unsafe_load[width=width]((r * g.s + s) * g.c + c)
            acc = widened(value).fma(widened(tap), acc)
    var to = ((n * g.p + p) * g.q + q) * g.f + c
    comptime if epilogue.adds:
        acc += widened(o.residual.unsafe_load[width=width](to))
    o.y.unsafe_store(to, narrowed[dtype](activate[epilogue, dtype](acc)))
