"""The end of a residual block that changes its shape: a convolution and its shortcut, one sum.

    y[n, p, q, f] = relu(bias[f] + sum_rsc x[n, p * stride - pad + r * dilation, ..., c] w[r, s, c, f]
                         + shortcut_bias[f] + sum_c source[n, p * step, q * step, c] v[c, f])

He et al. 2015, section 3.3, option B. Hopper's kernel never stores the shortcut's result.

In 8 bits (quantized.mojo says how numbers are stored) the shortcut's sums are exact too; those of the
other convolution are rounded to multiples of what one of the shortcut's stands for.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.cpu import gemm
from ..gemm.cpu import gemm_shortcut as gemm_shortcut_cpu
from ..gemm.gpu import gemm_bytes_shortcut
from ..gemm.gpu import gemm_shortcut as gemm_shortcut_gpu
from ..gemm.layer import Layer
from ..gemm.tiles import gemm_shortcut as gemm_shortcut_bf16
from ..geometry import Geometry
from ..operands import BF16, F32, ON_CPU, Operands, Scales, data
from .winograd import convolve_winograd, takes


@register("conv2d_shortcut")
struct Conv2dShortcut:
    """Convolves x[N, H, W, C], adds a 1 x 1 convolution of source[N, H', W', C'] and rectifies."""

    @staticmethod
    def execute[
        target: StaticString, tf32: Bool, aligned: Bool
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        filter: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        source: InputTensor[dtype=y.dtype, rank=4, ...],
        shortcut: InputTensor[dtype=y.dtype, rank=1, ...],
        shortcut_bias: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        shortcut_window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            tf32: Whether a GPU may round float32 to TF32 for the products.
            aligned: As of conv2d, for both convolutions.

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C].
            filter: Flat, as graphs/arrange.py lays it out for the device.
            bias: [F].
            source: What came into the block [N, H', W', C'].
            shortcut: The 1 x 1 filter, flat, laid out alike.
            shortcut_bias: [F].
            window: The nine numbers of geometry.mojo, in host memory.
            shortcut_window: The same for the shortcut.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if y.size() == 0:
            return
        var g = Geometry(x.shape(), y.shape(), data(window))
        var side = Geometry(source.shape(), y.shape(), data(shortcut_window))
        var o = Operands[y.dtype](data(x), data(filter), data(bias), data(x), data(y))
        var beside = Operands[y.dtype](
            data(source), data(shortcut), data(shortcut_bias), data(source), data(y)
        )
        comptime if target == "cpu":
            comptime assert ON_CPU[y.dtype], "conv2d_shortcut: a CPU expects float32 or bfloat16"
            comptime if y.dtype == F32:
                _on_cpu(g, rebind[Operands[F32]](o), side, rebind[Operands[F32]](beside))
            else:
                gemm_shortcut_bf16(
                    g, rebind[Operands[BF16]](o), side, rebind[Operands[BF16]](beside)
                )
        else:
            comptime layer = Layer(
                y.static_spec, x.static_spec, filter.static_spec, aligned=aligned
            ).with_source(source.static_spec)
            gemm_shortcut_gpu[y.dtype, tf32, layer](g, o, side, beside, ctx)


def _on_cpu(g: Geometry, o: Operands[F32], side: Geometry, beside: Operands[F32]):
    """Computes both, by turns for each block of pixels, or one after the other."""
    if takes(g):
        gemm[Epilogue("none")](side, beside)
        var joined = o
        joined.residual = o.y
        convolve_winograd[Epilogue("add_relu")](g, joined)
    else:
        gemm_shortcut_cpu(g, o, side, beside)


@register("quantized_conv2d_shortcut")
struct QuantizedConv2dShortcut:
    """Convolves x[N, H, W, C] and a source[N, H', W', C'] of 8 bits, and stores their sum so, too."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString, narrow: Bool
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        filter: InputTensor[rank=1, ...],
        source: InputTensor[dtype=y.dtype, rank=4, ...],
        shortcut: InputTensor[dtype=filter.dtype, rank=1, ...],
        product: InputTensor[dtype=F32, rank=1, ...],
        first: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        shortcut_bias: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        shortcut_window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu": Hopper.
            epilogue: What the sum goes through; it does not add.
            narrow: See `gemm_bytes_shortcut` of ops/gemm/gpu.mojo.

        Args:
            y: Result [N, P, Q, F], of uint8 or float8_e4m3fn.
            x: Activations [N, H, W, C].
            filter: Flat, as graphs/arrange.py lays it out for results of 8 bits; int8 or float8_e4m3fn.
            source: What came into the block [N, H', W', C'].
            shortcut: The 1 x 1 filter, flat, laid out alike.
            product: What a sum of each of its filters stands for, in steps of y [F].
            first: What one of the other convolution stands for, in sums of the shortcut [F].
            bias: [F], in steps of y, with y's zero point.
            shortcut_bias: [F], in steps of y.
            window: The nine numbers of geometry.mojo, in host memory.
            shortcut_window: The same for the shortcut.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu", "quantized_conv2d_shortcut: a CPU runs two convolutions"
        if y.size() == 0:
            return
        comptime Bytes = Operands[y.dtype, y.dtype, filter.dtype]
        comptime layer = Layer(y.static_spec, x.static_spec, filter.static_spec).with_source(
            source.static_spec
        )
        comptime scaled = Epilogue(epilogue, scales=True)
        gemm_bytes_shortcut[y.dtype, filter.dtype, scaled, narrow, layer](
            Geometry(x.shape(), y.shape(), data(window)),
            Bytes(data(x), data(filter), data(bias), data(x), data(y)),
            Geometry(source.shape(), y.shape(), data(shortcut_window)),
            Bytes(data(source), data(shortcut), data(shortcut_bias), data(x), data(y)),
            Scales(data(product), first=data(first)),
            ctx,
        )
