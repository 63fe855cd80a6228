"""A class token before the others: y[n, 0] = token, y[n, 1 + t] = x[n, t]. Bound by memory."""

from extensibility import InputTensor, OutputTensor, foreach, register
from layout import Coord
from max.gpu.host import DeviceContext

from .operands import data


@register("class_token")
struct ClassToken:
    """Puts token[C] before the tokens x[N, T, C] of each image, into y[N, T + 1, C]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=3, ...],
        x: InputTensor[dtype=y.dtype, rank=3, ...],
        token: InputTensor[dtype=y.dtype, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result [N, T + 1, C].
            x: Tokens [N, T, C].
            token: [C].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var tokens = data(x)
        var first = data(token)
        var count = Int64(x.shape()[1])
        var channels = Int64(x.shape()[2])

        def body[
            width: Int
        ](at: Coord[...]) {var tokens, var first, var count, var channels} -> SIMD[y.dtype, width]:
            var c = Int(at[2].value())
            var t = Int(at[1].value()) - 1
            if t < 0:
                return first.unsafe_load[width=width](c)
            var row = Int(at[0].value()) * Int(count) + t
            return tokens.unsafe_load[width=width](row * Int(channels) + c)

        foreach[target=target](body, y, ctx)
