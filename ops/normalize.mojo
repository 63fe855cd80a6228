"""Pixels to activations: y[n, h, w, c] = (x[n, h, w, c] - mean[c]) * scale[c].

x holds levels 0 to 255 (uint8), or anything else that the caller has normalised otherwise.
Bound by memory; mean and scale are in levels.
"""

from extensibility import InputTensor, OutputTensor, foreach, register
from layout import Coord
from max.gpu.host import DeviceContext

from .operands import F32, data


@register("normalize")
struct Normalize:
    """Normalises images x[N, H, W, C] channel by channel, in float32."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[rank=4, ...],
        mean: InputTensor[dtype=F32, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result [N, H, W, C].
            x: Levels [N, H, W, C].
            mean: [C], in levels.
            scale: [C], one over the deviation in levels.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var means = data(mean)
        var scales = data(scale)

        def body[width: Int](at: Coord[...]) {var x, var means, var scales} -> SIMD[y.dtype, width]:
            var c = Int(at[3].value())
            var level = x.load[width](at).cast[F32]()
            var value = level - means.unsafe_load[width=width](c)
            return (value * scales.unsafe_load[width=width](c)).cast[y.dtype]()

        foreach[target=target](body, y, ctx)
