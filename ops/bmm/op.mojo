"""Batched matrix product: registration, checks and the choice of a kernel.

    y[i, m, n] = act(alpha * sum_k a[i, m, k] b[i, k, n] + bias[n] + residual[i, m, n])

`layout` says how b lies in memory: "kn" is b[B, K, N], "nk" is b[B, N, K] (transposed: the keys
of attention, torch's linear weights), "packed" are the panels of graphs/arrange.py (a CPU's
linear layers). A batch of one b serves every a.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.gpu import gemm as gemm_gpu
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..operands import CHECKED, WIDE, Batch, Operands, data
from .cpu import bmm_cpu


@register("bmm")
struct Bmm:
    """Multiplies a[..., M, K] by b into y[..., M, N]."""

    @staticmethod
    def execute[
        target: StaticString,
        epilogue: StaticString,
        layout: StaticString,
        tf32: Bool,
        constant: Bool,
        aligned: Bool,
        few: Bool,
    ](
        y: OutputTensor,
        a: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        b: InputTensor[dtype=y.dtype, ...],
        bias: InputTensor[dtype=WIDE[y.dtype], rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        alpha: InputTensor[dtype=WIDE[y.dtype], rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            epilogue: What the sums go through (ops/epilogue.mojo).
            layout: "kn", "nk" or "packed".
            tf32: Whether a GPU may round float32 to TF32 for the products.
            constant: Whether b is a weight, which no other op writes.
            aligned: Whether b is one for all, [N, K], and graphs/arrange.py calls K and N aligned:
                a GPU then compiles the kernels for such sizes alone.
            few: See `Layer` of ops/gemm/layer.mojo, of one b for all.

        Args:
            y: Result [..., M, N].
            a: Left side [..., M, K].
            b: Right side, one for each a or one for all.
            bias: [N].
            residual: [..., M, N]; a if the epilogue does not add.
            alpha: Scale of the product: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert Epilogue.known[
            epilogue
        ](), "bmm: there is no such epilogue; ops/epilogue.mojo says what there is"
        comptime assert (
            layout == "kn" or layout == "nk" or layout == "packed"
        ), "bmm: layout expects kn, nk or packed"
        if y.size() == 0:
            return
        var m, k, n = a.shape()[a.rank - 2], a.shape()[a.rank - 1], y.shape()[y.rank - 1]
        var o = Operands[y.dtype, wide=WIDE[y.dtype]](
            data(a),
            data(b),
            data(bias),
            data(residual),
            data(y),
            data(alpha)[unsafe_offset=0],
        )
        var b_step = k * n if layout != "packed" and b.size() > k * n else 0
        var g = Geometry(rows=m, depth=k, columns=n)
        var batch = Batch(y.size() // (m * n), x=m * k, w=b_step, y=m * n)
        comptime if target != "cpu" or layout == "packed":
            if b_step == 0:  # one b for all: the batch is more rows of one product
                g, batch = Geometry(rows=y.size() // n, depth=k, columns=n), Batch()
        comptime if target == "cpu":
            comptime assert CHECKED[y.dtype], "bmm: a CPU expects float32, bfloat16 or float64"
            bmm_cpu[Epilogue(epilogue), layout](g, o, batch)
        else:
            comptime assert layout != "packed", "bmm: panels are a CPU's; a GPU expects kn or nk"
            comptime layer = Layer(
                y.static_spec, a.static_spec, b.static_spec, aligned=aligned, few=few
            )
            gemm_gpu[y.dtype, Epilogue(epilogue), layout == "nk", tf32, layer](
                g,
                rebind[Operands[y.dtype]](o),
                batch,
                ctx,
                constant=constant,
            )
