"""Convolution, torch's on NHWC: registration, checks and the choice of a kernel.

    y[n, p, q, f] = act(bias[f] + residual[n, p, q, f]
                        + sum_rsc x[n, p * stride - pad + r * dilation, ..., c] w[r, s, c, f])
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..operands import CHECKED, WIDE, Operands, data
from .cpu import conv2d_cpu
from .gpu import conv2d_gpu


@register("conv2d")
struct Conv2d:
    """Convolves x[N, H, W, C] into y[N, P, Q, F]."""

    @staticmethod
    def execute[
        target: StaticString,
        epilogue: StaticString,
        tf32: Bool,
        members: Int,
        aligned: Bool,
        windows: Bool,
        constant: Bool,
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        filter: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=WIDE[y.dtype], rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            epilogue: What the sums go through (ops/epilogue.mojo).
            tf32: Whether a GPU may round float32 to TF32 for the products.
            members: Channels, and filters, of a small group, as graphs/arrange.py counts them: 1
                is depthwise, 0 any other convolution.
            aligned: Whether graphs/arrange.py calls the sizes aligned: a GPU then compiles the
                kernels for such sizes alone.
            windows: See `Layer` of ops/gemm/layer.mojo.
            constant: Whether the filter is a weight, which no other op writes. On a GPU others are
                [F, R, S, C / groups], depthwise ones too.

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C].
            filter: Flat, as graphs/arrange.py or `arrange_filter` lays it out for the device.
            bias: [F].
            residual: [N, P, Q, F]; x if the epilogue does not add.
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert Epilogue.known[
            epilogue
        ](), "conv2d: there is no such epilogue; ops/epilogue.mojo says what there is"
        var g = Geometry(x.shape(), y.shape(), data(window))
        var o = Operands[y.dtype, wide=WIDE[y.dtype]](
            data(x), data(filter), data(bias), data(residual), data(y)
        )
        if g.pixels() == 0:
            return
        comptime if target == "cpu":
            comptime assert CHECKED[y.dtype], "conv2d: a CPU expects float32, bfloat16 or float64"
            conv2d_cpu[Epilogue(epilogue), members](g, o)
        else:
            comptime assert (
                members <= 1
            ), "conv2d: a GPU has no kernel for small groups but depthwise"
            comptime layer = Layer(
                y.static_spec, x.static_spec, filter.static_spec, aligned=aligned, windows=windows
            )
            conv2d_gpu[
                y.dtype,
                Epilogue(epilogue),
                tf32,
                layer,
                depthwise=members == 1,
                constant=constant,
            ](g, rebind[Operands[y.dtype]](o), ctx)
