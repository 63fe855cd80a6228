"""Max and average pooling over x[N, H, W, C] into y[N, P, Q, C], torch's.

Vectors run over channels, so a window is R * S wide loads; bound by memory. Padding never wins
the maximum and NaN does. With ceil_mode (P and Q are the graph's) the last window may hang over
the padding: what hangs over counts for neither op. The average of a whole image is `reduce`.
"""

from extensibility import InputTensor, OutputTensor, foreach, register
from layout import Coord
from max.gpu.host import DeviceContext
from std.math import isnan
from std.utils.numerics import neg_inf

from .geometry import Geometry
from .operands import F32, data, narrowed, widened


@register("maxpool")
struct MaxPool:
    """Takes the maximum of each window."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result [N, P, Q, C].
            x: Activations [N, H, W, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var g = Geometry(x.shape(), y.shape(), data(window))
        var source = data(x)

        def body[width: Int](at: Coord[...]) {var g, var source} -> SIMD[y.dtype, width]:
            var image = Int(at[0].value()) * g.h
            var h0 = Int(at[1].value()) * g.stride_h - g.pad_h
            var w0 = Int(at[2].value()) * g.stride_w - g.pad_w
            var best = SIMD[F32, width](neg_inf[F32]())
            for r in range(g.r):
                var h = h0 + r * g.dilation_h
                if h < 0 or h >= g.h:
                    continue
                for s in range(g.s):
                    var w = w0 + s * g.dilation_w
                    if w < 0 or w >= g.w:
                        continue
                    var value = widened(
                        source.unsafe_load[width=width](
                            ((image + h) * g.w + w) * g.c + Int(at[3].value())
                        )
                    )
                    best = (value.gt(best) | isnan(value)).select(value, best)
            return narrowed[y.dtype](best)

        foreach[target=target](body, y, ctx)


@register("avgpool")
struct AvgPool:
    """Averages each window in float32; padding counts as in torch's count_include_pad."""

    @staticmethod
    def execute[
        target: StaticString, padding_counts: Bool
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            padding_counts: Whether zeros of the padding count in the average.

        Args:
            y: Result [N, P, Q, C].
            x: Activations [N, H, W, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var g = Geometry(x.shape(), y.shape(), data(window))
        var source = data(x)

        def body[width: Int](at: Coord[...]) {var g, var source} -> SIMD[y.dtype, width]:
            var image = Int(at[0].value()) * g.h
            var h0 = Int(at[1].value()) * g.stride_h - g.pad_h
            var w0 = Int(at[2].value()) * g.stride_w - g.pad_w
            var top = max(h0, 0)
            var left = max(w0, 0)
            var bottom = min(h0 + g.r, g.h)
            var right = min(w0 + g.s, g.w)
            var sum = SIMD[F32, width](0)
            for h in range(top, bottom):
                for w in range(left, right):
                    var value = source.unsafe_load[width=width](
                        ((image + h) * g.w + w) * g.c + Int(at[3].value())
                    )
                    sum += widened(value)
            comptime if padding_counts:
                bottom = min(h0 + g.r, g.h + g.pad_h)
                right = min(w0 + g.s, g.w + g.pad_w)
                top = h0
                left = w0
            return narrowed[y.dtype](sum / Float32((bottom - top) * (right - left)))

        foreach[target=target](body, y, ctx)
