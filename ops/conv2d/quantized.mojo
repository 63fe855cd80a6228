"""Convolution of 8-bit numbers (uint8 by int8), torch's on NHWC, as ONNX's QLinearConv has it.

    y[n, p, q, f] = store(act(product[f] * sum_rsc (x[...] - zero) w[r, s, c, f] + bias[f]
                              + residual_scale * (residual[n, p, q, f] - residual_zero)))

Sums are exact, int32 or, of a depthwise convolution, whole numbers in float32; what follows is float32. y is float32, or uint8: then `store` divides by
its scale, rounds to nearest even, adds its zero point and saturates. A residual of float32 has no
zero point. Jacob et al. 2018 (arXiv:1712.05877), section 2.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..dot import I8, U8
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..operands import F32, Affine, Levels, Operands, data
from .cpu import conv2d_cpu


@register("quantized_conv2d")
struct QuantizedConv2d:
    """Convolves x[N, H, W, C] into y[N, P, Q, F], both of 8 bits, or y of float32."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString, members: Int
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=U8, rank=4, ...],
        filter: InputTensor[dtype=I8, rank=1, ...],
        product: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        scales: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu".
            epilogue: What the sums go through (ops/epilogue.mojo).
            members: 1 if it is depthwise, else 0.

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C]; C of a group is a multiple of 4, or 1.
            filter: Flat, as graphs/arrange.py lays it out.
            product: What a sum of each filter is multiplied by [F].
            bias: [F].
            residual: [N, P, Q, F], of y's dtype; x if the epilogue does not add.
            window: The nine numbers of geometry.mojo, in host memory.
            scales: What x's 0 is stored as; scale and zero point of the residual, and of the result:
                in host memory.
            ctx: The device.

        Raises:
            If memory is short.
        """
        comptime assert target == "cpu", "quantized_conv2d: runs on a CPU"
        comptime assert (
            y.dtype == F32 or y.dtype == U8
        ), "quantized_conv2d: the result is float32 or uint8"
        comptime Out = Operands[U8, y.dtype, I8]
        var g = Geometry(x.shape(), y.shape(), data(window))
        if g.pixels() == 0:
            return
        var given = data(scales)
        var beside = data(residual).unsafe_bitcast[Scalar[y.dtype]]()  # x if nothing is added
        var o = Out(data(x), data(filter), data(bias), beside, data(y))
        var levels = Levels(
            data(product),
            residual=Affine(given[unsafe_offset=1], given[unsafe_offset=2]),
            result=Affine(given[unsafe_offset=3], given[unsafe_offset=4]),
            zero=Int32(given[unsafe_offset=0]),
        )
        conv2d_cpu[Epilogue(epilogue, scales=True), members](g, o, levels)
