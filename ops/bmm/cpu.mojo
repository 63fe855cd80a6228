"""Batched product on a CPU: the register tiles of ops/gemm over panels of b.

Linear layers bring b packed (graphs/arrange.py). In attention b is computed, so each task packs
the panel that it multiplies with, which all M rows use: 1/M of the work.
"""

from std.math import ceildiv
from std.memory import Layout, alloc, dealloc

from ..epilogue import Epilogue
from ..gemm.tiles import BLOCK, SIDE, STEP, TILE, Plan, amx_granted
from ..gemm.tiles import gemm as gemm_bf16
from ..gemm.tiles import gemm_block as gemm_block_bf16
from ..gemm.cpu import PANEL, gemm, gemm_block
from ..geometry import Geometry
from ..dot import FILTER
from ..operands import BF16, WIDE, Batch, Data, Levels, Operands
from ..parallel import over_cores


def bmm_cpu[
    dtype: DType, //, epilogue: Epilogue, layout: StaticString
](g: Geometry, o: Operands[dtype, wide=WIDE[dtype]], batch: Batch):
    """Multiplies on all cores.

    Parameters:
        dtype: Of the tensors: float32, float64 or bfloat16.
        epilogue: What the accumulator goes through.
        layout: How b lies in memory; see bmm/op.mojo.

    Args:
        g: Sizes of a product.
        o: Tensors of the first product; x is a, w is b.
        batch: Where each product's tensors are; packed b is of one product.
    """
    comptime if layout == "packed":
        comptime if dtype != BF16:
            gemm[epilogue](g, rebind[Operands[dtype, dtype, FILTER[dtype], WIDE[dtype]]](o))
        else:
            gemm_bf16[epilogue](g, rebind[Operands[BF16]](o))
    else:
        comptime columns = PANEL if dtype != BF16 else BLOCK
        var m, k, n = g.pixels(), g.c, g.f
        var panels = ceildiv(n, columns)
        var depth = k if dtype != BF16 else ceildiv(k, STEP) * STEP
        var kind = Plan[BF16].kind_of(g)
        var amx = amx_granted()

        def task(index: Int) {var}:
            var i = index // panels
            var column = index % panels * columns
            var end = min(column + columns, n)
            var scratch = alloc(Layout[Scalar[dtype]](count=depth * columns))
            var product = batch.of(o, i)
            var panel = rebind[Data[dtype]](scratch.unsafe_ptr())
            _pack[layout](product.w, panel, k, n, column, end)
            product.w = panel
            comptime if dtype != BF16:
                var of = rebind[Operands[dtype, dtype, FILTER[dtype], WIDE[dtype]]](product)
                gemm_block[epilogue](g, of, Levels(of.bias), 0, m, 0, column, end - column)
            else:
                gemm_block_bf16[epilogue](
                    g,
                    rebind[Operands[BF16]](product),
                    Levels(product.bias),
                    kind,
                    0,
                    m,
                    0,
                    column,
                    end,
                    amx,
                )
            dealloc(scratch^)

        over_cores(task, Int(batch.products) * panels)


@always_inline
def _pack[
    dtype: DType, //, layout: StaticString
](b: Data[dtype], panel: Data[dtype], k: Int, n: Int, column: Int, end: Int):
    """Copies the columns from `column` to `end` of b[K, N] ("kn") or b[N, K] ("nk") into a panel.

    It is as ops/gemm wants it for the dtype, zero-padded.
    """
    comptime columns = PANEL if dtype != BF16 else BLOCK
    var depth = k if dtype != BF16 else ceildiv(k, STEP) * STEP
    for step in range(depth):
        for j in range(columns):
            var to = step * PANEL + j
            comptime if dtype == BF16:
                to = (step // STEP * 2 + j // SIDE) * TILE + step % STEP // 2 * STEP
                to += j % SIDE * 2 + step % 2
            if step >= k or column + j >= end:
                panel[unsafe_offset=to] = 0
            elif layout == "nk":
                panel[unsafe_offset=to] = b[unsafe_offset=(column + j) * k + step]
            else:
                panel[unsafe_offset=to] = b[unsafe_offset=step * n + column + j]
