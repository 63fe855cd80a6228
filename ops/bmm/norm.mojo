"""A layer norm between two linear layers, without a launch of its own: on Hopper, in 16 bits.

    linear_moments   y[m, f] = sum_c x[m, c] w[f, c] + bias[f] + residual[m, f], and y's moments by row
    normed_linear    y[m, f] = act(sum_c norm(x)[m, c] w[f, c] + bias[f]), from x and its moments

Weight and bias of the norm are part of w and bias of the second (graphs/passes/norms.py).
hopper/moments.mojo has the arithmetic.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.gpu import gemm
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..hopper.moments import Norm
from ..operands import F32, Batch, Operands, data


@register("linear_moments")
struct LinearMoments:
    """Multiplies x[..., C] by w, adds a residual, and measures the rows of the result."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor,
        moments: OutputTensor[dtype=F32, ...],
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        w: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".

        Args:
            y: Result [..., F].
            moments: Of its rows [..., F / 32, 2].
            x: [..., C].
            w: [F, C], flat, as graphs/arrange.py lays it out for a GPU.
            bias: [F].
            residual: [..., F].
            ctx: The device.

        Raises:
            If the launch fails.
        """
        comptime assert target != "cpu", "linear_moments: a CPU runs separate ops"
        if y.size() == 0:
            return
        var c, f = x.shape()[x.rank - 1], y.shape()[y.rank - 1]
        comptime epilogue = Epilogue("add", measures=True)
        comptime layer = Layer(y.static_spec, x.static_spec, w.static_spec, aligned=True)
        gemm[y.dtype, epilogue, True, False, layer](
            Geometry(rows=y.size() // f, depth=c, columns=f),
            Operands[y.dtype](data(x), data(w), data(bias), data(residual), data(y)),
            Batch(),
            ctx,
            norm=Norm(data(moments), f),
        )


@register("normed_linear")
struct NormedLinear:
    """Multiplies the normalised rows of x[..., C] by w."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        moments: InputTensor[dtype=F32, ...],
        w: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            epilogue: What the sums go through (ops/epilogue.mojo); it does not add.

        Args:
            y: Result [..., F].
            x: [..., C].
            moments: Of its rows [..., C / 32, 2], as `linear_moments` has them.
            w: [F, C], flat, as graphs/arrange.py lays it out for a GPU; each filter's weights add up to 0.
            bias: [F].
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If the launch fails.
        """
        comptime assert target != "cpu", "normed_linear: a CPU runs separate ops"
        comptime assert not Epilogue(
            epilogue
        ).joins, "normed_linear: nothing is added to the product"
        if y.size() == 0:
            return
        var c, f = x.shape()[x.rank - 1], y.shape()[y.rank - 1]
        comptime layer = Layer(y.static_spec, x.static_spec, w.static_spec, aligned=True)
        comptime normed = Epilogue(epilogue, normalizes=True)
        gemm[y.dtype, normed, True, False, layer](
            Geometry(rows=y.size() // f, depth=c, columns=f),
            Operands[y.dtype](data(x), data(w), data(bias), data(x), data(y)),
            Batch(),
            ctx,
            norm=Norm(data(moments), c, data(eps)[unsafe_offset=0]),
        )
