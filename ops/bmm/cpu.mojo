"""Batched product on a CPU: the register tiles of ops/gemm over panels of b.

Linear layers bring b packed (graphs/arrange.py). In attention b is computed, so each task packs
the panel that it multiplies with, K x 64 numbers used for all M rows: 1/M of the work.
"""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.memory import Layout, alloc, dealloc

from ..epilogue import Epilogue
from ..gemm.cpu import PANEL, gemm, gemm_block
from ..geometry import Data, Geometry

comptime F32 = DType.float32


def bmm_cpu[
    epilogue: Epilogue, layout: StaticString
](
    batch: Int,
    m: Int,
    k: Int,
    n: Int,
    a: Data[F32],
    b: Data[F32],
    b_step: Int,
    bias: Data[F32],
    residual: Data[F32],
    y: Data[F32],
    alpha: Float32,
):
    """Multiplies on all cores; `b_step` numbers lie between one b and the next (0: one for all)."""
    comptime if layout == "packed":
        var g = Geometry(rows=batch * m, depth=k, columns=n)
        gemm[epilogue](g, a, b, bias, residual, y, alpha)
    else:
        var g = Geometry(rows=m, depth=k, columns=n)
        var panels = ceildiv(n, PANEL)

        def task(index: Int) {var}:
            var i = index // panels
            var column = index % panels * PANEL
            var columns = min(PANEL, n - column)
            var scratch = alloc(Layout[Float32](count=k * PANEL))
            var panel = rebind[Data[F32]](scratch.unsafe_ptr())
            _pack[layout](b.unsafe_offset(i * b_step), panel, k, n, column, columns)
            var at = i * m * n
            gemm_block[epilogue](
                g, a.unsafe_offset(i * m * k), panel, bias, residual.unsafe_offset(at),
                y.unsafe_offset(at), alpha, 0, m, 0, column, columns,
            )
            dealloc(scratch^)

        sync_parallelize(task, batch * panels)


@always_inline
def _pack[
    layout: StaticString
](b: Data[F32], panel: Data[F32], k: Int, n: Int, column: Int, columns: Int):
    """Copies `columns` columns of b[K, N] ("kn") or b[N, K] ("nk") into a zero-padded panel."""
    for step in range(k):
        var row = panel.unsafe_offset(step * PANEL)
        for j in range(columns):
            comptime if layout == "nk":
                row[unsafe_offset=j] = b[unsafe_offset = (column + j) * k + step]
            else:
                row[unsafe_offset=j] = b[unsafe_offset = step * n + column + j]
        for j in range(columns, PANEL):
            row[unsafe_offset=j] = 0
