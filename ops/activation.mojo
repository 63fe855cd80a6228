"""Elementwise activations of any rank: y = max(x, 0), and the exact GELU.

In the graphs they are epilogues of conv2d and bmm; by themselves they are bound by memory.
Computed in float32, rounded once to the tensor's dtype.
"""

from extensibility import InputTensor, OutputTensor, foreach, register
from layout import Coord
from max.gpu.host import DeviceContext

from .epilogue import gelu, relu
from .operands import narrowed, widened


@register("relu")
struct Relu:
    """Rectifies x of any shape."""

    @staticmethod
    def execute[
        target: StaticString
    ](y: OutputTensor, x: InputTensor[dtype=y.dtype, rank=y.rank, ...], ctx: DeviceContext,) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result, in the shape of x.
            x: Any shape.
            ctx: The device.

        Raises:
            If a launch fails.
        """

        def body[width: Int](at: Coord[...]) {var x} -> SIMD[y.dtype, width]:
            return narrowed[y.dtype](relu(widened(x.load[width](at))))

        foreach[target=target](body, y, ctx)


@register("gelu")
struct Gelu:
    """Applies x / 2 * (1 + erf(x / sqrt(2))) to x of any shape."""

    @staticmethod
    def execute[
        target: StaticString
    ](y: OutputTensor, x: InputTensor[dtype=y.dtype, rank=y.rank, ...], ctx: DeviceContext,) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result, in the shape of x.
            x: Any shape.
            ctx: The device.

        Raises:
            If a launch fails.
        """

        def body[width: Int](at: Coord[...]) {var x} -> SIMD[y.dtype, width]:
            return narrowed[y.dtype](gelu(widened(x.load[width](at))))

        foreach[target=target](body, y, ctx)
