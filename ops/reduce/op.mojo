"""Sums, largest and smallest numbers over an axis: y[outer, inner] of x[outer, reduced, inner].

    sum   y = sum(x)        amax  y = max(x), NaN if there is one
    mean  y = sum(x) / n    amin  y = min(x), the same

Pixels of NHWC images are [N, H * W, C], tokens [N, T, C], rows [rows, C, 1]. Bound by memory, and by
latency where there is little of it. Everything is float32 and rounded once.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..operands import ON_CPU, data
from .cpu import reduce_cpu
from .gpu import reduce_gpu


@register("reduce")
struct Reduce:
    """Reduces the middle axis of x[outer, reduced, inner]."""

    @staticmethod
    def execute[
        target: StaticString, kind: StaticString
    ](y: OutputTensor[rank=2, ...], x: InputTensor[rank=3, ...], ctx: DeviceContext,) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            kind: What is left of the axis: sum, mean, amax or amin.

        Args:
            y: Result [outer, inner], of the dtype of x or float32.
            x: [outer, reduced, inner].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if y.size() == 0:
            return
        comptime join: StaticString = "sum" if kind == "mean" else kind
        comptime assert join in ["sum", "amax", "amin"], "reduce: no such kind"
        var outer, reduced, inner = x.shape()[0], x.shape()[1], x.shape()[2]
        var divisor = Float32(reduced) if kind == "mean" else Float32(1)
        comptime if target == "cpu":
            comptime assert (
                ON_CPU[x.dtype] and ON_CPU[y.dtype]
            ), "reduce: a CPU expects float32 or bfloat16"
            reduce_cpu[join](data(x), data(y), outer, reduced, inner, divisor)
        else:
            reduce_gpu[join](data(x), data(y), outer, reduced, inner, divisor, ctx)
