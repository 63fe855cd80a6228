"""Convolution of 8-bit numbers (uint8 by int8, or floats), torch's on NHWC, as ONNX's QLinearConv has it.

    y[n, p, q, f] = store(act(product[f] * sum_rsc (x[...] - zero) w[r, s, c, f] + bias[f]
                              + residual_scale * (residual[n, p, q, f] - residual_zero)))

Sums are exact, int32 or, of a depthwise convolution, whole numbers in float32; what follows is float32.
y is a float, or uint8: then `store` divides by its scale, rounds to nearest even, adds its zero point
and saturates. A residual that is a float has no zero point. Jacob et al. 2018 (arXiv:1712.05877),
section 2.

A CPU computes in float32 beside the integers. There what the residual is added to may be rounded to
uint8 first, with a scale and a zero point of its own, as in a QDQ file of ONNX. On Hopper x and the
filters may be float8_e4m3fn instead, and y, to which `store` rounds and saturates too: these have no
zero points, and sums are float32 (Micikevicius et al. 2022, arXiv:2209.05433). Hopper's kernel
(gemm/hopper.mojo) knows no zero point of x or of the residual, and the result's scale and zero point only
behind an activation (`rescales` of ops/epilogue.mojo): graphs/parameters.py puts the others into the
scales of the filters and of the residual, and the bias.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..dot import I8, U8
from ..epilogue import Epilogue
from ..gemm.gpu import gemm_bytes
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..operands import F32, Affine, Data, Levels, Operands, Scales, data
from .cpu import conv2d_cpu


@register("quantized_conv2d")
struct QuantizedConv2d:
    """Convolves x[N, H, W, C] into y[N, P, Q, F], both of 8 bits, or y of floats."""

    @staticmethod
    def execute[
        target: StaticString,
        epilogue: StaticString,
        members: Int,
        narrow: Bool,
        windows: Bool,
        rounds: Bool,
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[rank=4, ...],
        filter: InputTensor[rank=1, ...],
        product: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        scales: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu", or "gpu" for Hopper.
            epilogue: What the sums go through (ops/epilogue.mojo).
            members: 1 if it is depthwise, else 0.
            narrow: See `gemm_bytes` of ops/gemm/gpu.mojo.
            windows: As of conv2d.
            rounds: Whether what the residual is added to is rounded first.

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C]; C of a group is a multiple of 4, or 1; on a GPU of
                16, in one group, and so is F where y has 8 bits.
            filter: Flat, as graphs/arrange.py lays it out.
            product: What a sum of each filter is multiplied by [F].
            bias: [F].
            residual: [N, P, Q, F], of y's dtype; x if the epilogue does not add.
            window: The nine numbers of geometry.mojo, in host memory.
            scales: What x's 0 is stored as; scale and zero point of the residual, of the result, and
                of what the residual is added to if that is rounded: in host memory.
            ctx: The device.

        Raises:
            If memory is short, or the launch fails.
        """
        comptime floats = x.dtype == DType.float8_e4m3fn
        comptime assert filter.dtype == (x.dtype if floats else I8) and (
            floats or x.dtype == U8
        ), "quantized_conv2d: multiplies uint8 by int8, or float8_e4m3fn by itself"
        var g = Geometry(x.shape(), y.shape(), data(window))
        if g.pixels() == 0:
            return
        var given = data(scales)
        var beside = data(residual).unsafe_bitcast[Scalar[y.dtype]]()  # x if nothing is added
        comptime scaled = Epilogue(epilogue, scales=True, rounds=rounds)
        var added = Affine(given[unsafe_offset=1], given[unsafe_offset=2])
        var result = Affine(given[unsafe_offset=3], given[unsafe_offset=4])
        comptime if target == "cpu":
            comptime assert not floats, "quantized_conv2d: a CPU multiplies no floats of 8 bits"
            comptime assert (
                y.dtype == F32 or y.dtype == U8
            ), "quantized_conv2d: the result is float32 or uint8 on a CPU"
            var bytes = rebind[Data[U8]](data(x))
            var integers = rebind[Data[I8]](data(filter))
            var o = Operands[U8, y.dtype, I8](bytes, integers, data(bias), beside, data(y))
            var between = Affine(1, 0)
            comptime if rounds:
                between = Affine(given[unsafe_offset=5], given[unsafe_offset=6])
            var levels = Levels(
                data(product),
                residual=added,
                rounded=between,
                result=result,
                zero=Int32(given[unsafe_offset=0]),
            )
            conv2d_cpu[scaled, members](g, o, levels)
        else:
            comptime assert members == 0, "quantized_conv2d: a GPU has no depthwise kernel"
            comptime assert not rounds, "quantized_conv2d: a GPU rounds no sums before the residual"
            var o = Operands[x.dtype, y.dtype, filter.dtype](
                data(x), data(filter), data(bias), beside, data(y)
            )
            var numbers = Scales(data(product), added, result=result)
            comptime layer = Layer(
                y.static_spec, x.static_spec, filter.static_spec, windows=windows
            )
            gemm_bytes[x.dtype, filter.dtype, y.dtype, scaled, narrow, layer](g, o, numbers, ctx)
