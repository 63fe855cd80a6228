"""Stems: registration and checks; graphs/nodes.py chooses between them and separate ops."""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext
from std.utils import IndexList

from ..conv2d.gpu import conv2d_gpu
from ..epilogue import Epilogue
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..operands import F32, Operands, data
from ..target import IS_HOPPER
from .config import Stem, StemOperands
from .gpu import stem_gpu
from .hopper import FILTERS, fits, stem_maxpool_conv2d_hopper, takes


@always_inline
def _stem[
    dtype: DType, pixel: DType, out: DType, //, target: StaticString, stem: Stem
](
    o: StemOperands[dtype, pixel, out],
    x: IndexList[4],
    y: IndexList[4],
    pad: Int,
    eps: Float32,
    ctx: DeviceContext,
) raises:
    comptime assert target != "cpu", "stem: a CPU runs separate ops"
    comptime assert dtype.is_half_float(), "stem: expects bfloat16 or float16"
    comptime assert out == dtype or out == DType.uint8, "stem: expects the filter's dtype or uint8"
    comptime assert stem.c <= 4, "stem: expects at most 4 channels"
    if y[0] * y[1] * y[2] > 0:
        stem_gpu[dtype, pixel, stem, out](o, x, y, pad, eps, ctx)


@register("stem_maxpool")
struct StemMaxPool:
    """Normalises pixels, convolves them, rectifies and pools: a ResNet's stem."""

    @staticmethod
    def execute[
        target: StaticString, c: Int, r: Int, s: Int, stride: Int
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[rank=4, ...],
        mean: InputTensor[dtype=F32, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            c: Input channels.
            r: Window height.
            s: Window width.
            stride: Of the convolution.

        Args:
            y: Result [N, P', Q', F], in the filter's dtype or uint8.
            x: Pixels [N, H, W, C], uint8 levels or normalised floats.
            mean: [C], in levels.
            scale: [C], one over the deviation in levels.
            filter: Flat, as `stem_fragments` of graphs/arrange.py lays it out.
            bias: [F].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        _stem[target, Stem(c, r, s, stride, Stem.MAXPOOL)](
            StemOperands[filter.dtype, x.dtype, y.dtype](
                data(x),
                data(mean),
                data(scale),
                data(filter),
                data(bias),
                data(bias),
                data(bias),
                data(y),
            ),
            x.shape(),
            y.shape(),
            Int(data(window)[unsafe_offset=4]),
            0,
            ctx,
        )


@register("stem_maxpool_conv2d")
struct StemMaxPoolConv2d:
    """Computes a ResNet's stem, and the first convolution behind it: 1 x 1, rectified."""

    @staticmethod
    def execute[
        target: StaticString, c: Int, r: Int, s: Int, stride: Int, aligned: Bool
    ](
        y: OutputTensor[rank=4, ...],
        z: OutputTensor[dtype=y.dtype, rank=4, ...],
        x: InputTensor[rank=4, ...],
        mean: InputTensor[dtype=F32, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        filter: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        next: InputTensor[dtype=y.dtype, rank=1, ...],
        next_bias: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            c: Input channels.
            r: Window height.
            s: Window width.
            stride: Of the first convolution.
            aligned: As of conv2d, for the second.

        Args:
            y: What the pool gives [N, P', Q', F].
            z: The second convolution of it [N, P', Q', G].
            x: Pixels [N, H, W, C], uint8 levels or normalised floats.
            mean: [C], in levels.
            scale: [C], one over the deviation in levels.
            filter: Flat, as `stem_fragments` of graphs/arrange.py lays it out.
            bias: [F].
            next: The 1 x 1 filter, flat, as graphs/arrange.py lays it out for the device.
            next_bias: [G].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime stem = Stem(c, r, s, stride, Stem.MAXPOOL)
        var f = y.shape()[3]
        var g = z.shape()[3]
        var o = StemOperands[y.dtype, x.dtype, y.dtype](
            data(x),
            data(mean),
            data(scale),
            data(filter),
            data(bias),
            data(next_bias),
            data(next_bias),
            data(y),
        )
        var pad = Int(data(window)[unsafe_offset=4])
        comptime if IS_HOPPER and takes(stem) and x.dtype == DType.uint8:
            var levels = rebind[StemOperands[y.dtype, DType.uint8]](o)
            if y.size() > 0 and g == FILTERS and fits(levels, x.shape(), y.shape(), pad):
                stem_maxpool_conv2d_hopper(levels, data(next), data(z), x.shape(), y.shape(), ctx)
                return
        _stem[target, stem](o, x.shape(), y.shape(), pad, 0, ctx)
        if z.size() > 0:
            comptime layer = Layer(z.static_spec, y.static_spec, next.static_spec, aligned=aligned)
            conv2d_gpu[y.dtype, Epilogue("relu"), False, layer](
                Geometry(rows=z.size() // g, depth=f, columns=g),
                Operands[y.dtype](data(y), data(next), data(next_bias), data(y), data(z)),
                ctx,
            )


@register("stem_layernorm")
struct StemLayerNorm:
    """Normalises pixels, convolves them and normalises each pixel's F: a CvT's embedding."""

    @staticmethod
    def execute[
        target: StaticString, c: Int, r: Int, s: Int, stride: Int
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[rank=4, ...],
        mean: InputTensor[dtype=F32, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        filter: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        gamma: InputTensor[dtype=F32, rank=1, ...],
        beta: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            c: Input channels.
            r: Window height.
            s: Window width.
            stride: Of the convolution.

        Args:
            y: Result [N, P, Q, F].
            x: Pixels [N, H, W, C], uint8 levels or normalised floats.
            mean: [C], in levels.
            scale: [C], one over the deviation in levels.
            filter: Flat, as `stem_fragments` of graphs/arrange.py lays it out.
            bias: [F].
            gamma: [F], layer norm's weight.
            beta: [F], layer norm's bias.
            eps: Added to the variance: one number in host memory.
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        _stem[target, Stem(c, r, s, stride, Stem.LAYERNORM)](
            StemOperands[y.dtype, x.dtype](
                data(x),
                data(mean),
                data(scale),
                data(filter),
                data(bias),
                data(gamma),
                data(beta),
                data(y),
            ),
            x.shape(),
            y.shape(),
            Int(data(window)[unsafe_offset=4]),
            data(eps)[unsafe_offset=0],
            ctx,
        )


@register("stem_conv2d")
struct StemConv2D:
    """Normalises pixels, convolves them and applies an activation: an EfficientNet's stem."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString, c: Int, r: Int, s: Int, stride: Int
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[rank=4, ...],
        mean: InputTensor[dtype=F32, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        filter: InputTensor[rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            epilogue: Of epilogue.mojo, without a residual.
            c: Input channels.
            r: Window height.
            s: Window width.
            stride: Of the convolution.

        Args:
            y: Result [N, P, Q, F], in the filter's dtype or uint8.
            x: Pixels [N, H, W, C], uint8 levels or normalised floats.
            mean: [C], in levels.
            scale: [C], one over the deviation in levels.
            filter: Flat, as `stem_fragments` of graphs/arrange.py lays it out.
            bias: [F].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert (
            Epilogue.known[epilogue]() and not Epilogue(epilogue).joins
        ), "stem_conv2d: expects an activation as its epilogue"
        _stem[target, Stem(c, r, s, stride, Stem.CONV2D, epilogue)](
            StemOperands[filter.dtype, x.dtype, y.dtype](
                data(x),
                data(mean),
                data(scale),
                data(filter),
                data(bias),
                data(bias),
                data(bias),
                data(y),
            ),
            x.shape(),
            y.shape(),
            Int(data(window)[unsafe_offset=4]),
            0,
            ctx,
        )
