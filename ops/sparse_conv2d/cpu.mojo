"""Sparse convolution on a CPU: y[m, f] = act(sum_j values[j] x[row(m, columns[j])] + bias[f]).

A task takes BLOCK output pixels, lays the K numbers under each of their windows out as
patch[K, BLOCK] (zeros in the padding), and then runs down the rows of the filter: one broadcast
weight times one vector of pixels for every nonzero (Park et al. 2017, arXiv:1608.01409, with
the patch in place of their virtual dense matrix). Bound by the loads of the patch.
"""

from std.math import ceildiv
from std.memory import Layout, alloc, dealloc
from std.sys import simd_width_of

from ..epilogue import Epilogue, activate
from ..geometry import Geometry
from ..operands import F32, Data, Operands
from ..parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime VECTORS = 2
"""Vectors of pixels of a task."""
comptime BLOCK = VECTORS * WIDTH
"""Output pixels of a task."""


def sparse_conv2d_cpu[
    epilogue: Epilogue
](g: Geometry, o: Operands[F32], columns: Data[DType.int32], row_starts: Data[DType.int32],):
    """Convolves on all cores.

    Parameters:
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes.
        o: Tensors; w holds the nonzeros, filter by filter.
        columns: (r * S + s) * C + c of each nonzero.
        row_starts: Where the nonzeros of each filter begin; F + 1 numbers.
    """

    def task(index: Int) {var}:
        var first = index * BLOCK
        var count = min(BLOCK, g.pixels() - first)
        var scratch = alloc(Layout[Float32](count=g.r * g.s * g.c * BLOCK))
        var patch = rebind[Data[F32]](scratch.unsafe_ptr())
        _gather(g, o.x, patch, first, count)
        for f in range(g.f):
            var acc = Array[SIMD[F32, WIDTH], VECTORS](fill=0)
            for j in range(Int(row_starts[unsafe_offset=f]), Int(row_starts[unsafe_offset=f + 1])):
                var weight = SIMD[F32, WIDTH](o.w[unsafe_offset=j])
                var at = Int(columns[unsafe_offset=j]) * BLOCK
                comptime for v in range(VECTORS):
                    acc[v] = patch.unsafe_load[width=WIDTH](at + v * WIDTH).fma(weight, acc[v])
            comptime for v in range(VECTORS):
                for i in range(min(WIDTH, count - v * WIDTH)):
                    var to = (first + v * WIDTH + i) * g.f + f
                    var value = acc[v][i] + o.bias[unsafe_offset=f]
                    comptime if epilogue.adds:
                        value += o.residual[unsafe_offset=to]
                    o.y[unsafe_offset=to] = activate[epilogue](value)
        dealloc(scratch^)

    over_cores(task, ceildiv(g.pixels(), BLOCK))


def _gather(g: Geometry, x: Data[F32], patch: Data[F32], first: Int, count: Int):
    """Lays the windows of `count` pixels from `first` on out as patch[K, BLOCK]."""
    for i in range(BLOCK):
        var m = first + min(i, count - 1)
        var image = m // (g.p * g.q)
        var p = m // g.q % g.p
        var q = m % g.q
        for r in range(g.r):
            var h = p * g.stride_h - g.pad_h + r * g.dilation_h
            for s in range(g.s):
                var w = q * g.stride_w - g.pad_w + s * g.dilation_w
                var to = patch.unsafe_offset((r * g.s + s) * g.c * BLOCK + i)
                if h >= 0 and h < g.h and w >= 0 and w < g.w:
                    var source = x.unsafe_offset(((image * g.h + h) * g.w + w) * g.c)
                    for c in range(g.c):
                        to[unsafe_offset=c * BLOCK] = source[unsafe_offset=c]
                else:
                    for c in range(g.c):
                        to[unsafe_offset=c * BLOCK] = 0
