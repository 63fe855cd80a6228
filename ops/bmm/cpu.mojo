"""Batched product on a CPU: the register tiles of ops/gemm over panels of b.

Linear layers bring b packed (graphs/arrange.py). In attention b is computed, so each task packs
the panel that it multiplies with, K x 64 numbers used for all M rows: 1/M of the work.
"""

from std.math import ceildiv
from std.memory import Layout, alloc, dealloc

from ..epilogue import Epilogue
from ..gemm.cpu import PANEL, gemm, gemm_block
from ..geometry import Geometry
from ..operands import F32, Data, Operands
from ..parallel import over_cores


def bmm_cpu[
    epilogue: Epilogue, layout: StaticString
](batch: Int, m: Int, k: Int, n: Int, b_step: Int, o: Operands[F32]):
    """Multiplies on all cores.

    Parameters:
        epilogue: What the accumulator goes through.
        layout: How b lies in memory; see bmm/op.mojo.

    Args:
        batch: Products.
        m: Rows of a and y.
        k: Columns of a.
        n: Columns of y.
        b_step: Elements from one b to the next; 0 if one b serves every a.
        o: Tensors of all products; x is a, w is b.
    """
    comptime if layout == "packed":
        gemm[epilogue](Geometry(rows=batch * m, depth=k, columns=n), o)
    else:
        var g = Geometry(rows=m, depth=k, columns=n)
        var panels = ceildiv(n, PANEL)

        def task(index: Int) {var}:
            var i = index // panels
            var column = index % panels * PANEL
            var columns = min(PANEL, n - column)
            var scratch = alloc(Layout[Float32](count=k * PANEL))
            var product = o.shifted(x=i * m * k, w=i * b_step, y=i * m * n)
            var panel = rebind[Data[F32]](scratch.unsafe_ptr())
            _pack[layout](product.w, panel, k, n, column, columns)
            product.w = panel
            gemm_block[epilogue](g, product, 0, m, 0, column, columns)
            dealloc(scratch^)

        over_cores(task, batch * panels)


@always_inline
def _pack[
    layout: StaticString
](b: Data[F32], panel: Data[F32], k: Int, n: Int, column: Int, columns: Int):
    """Copies `columns` columns of b[K, N] ("kn") or b[N, K] ("nk") into a zero-padded panel."""
    for step in range(k):
        var row = panel.unsafe_offset(step * PANEL)
        for j in range(columns):
            comptime if layout == "nk":
                row[unsafe_offset=j] = b[unsafe_offset=(column + j) * k + step]
            else:
                row[unsafe_offset=j] = b[unsafe_offset=step * n + column + j]
        for j in range(columns, PANEL):
            row[unsafe_offset=j] = 0
