"""Group norm of x[N, pixels, C] (Wu and He 2018, arXiv:1803.08494).

    y = act((x - mean) / sqrt(var + eps) * weight + bias)

Mean and variance are of each image and group of channels, over all pixels; one group is a layer norm
of the image, C groups an instance norm. Statistics in float32; moments of parts are joined, never
E[x^2] - mean^2. Bound by memory: x is read twice, the second time from a cache if it fits there.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..operands import F32, ON_CPU, data
from .config import GroupNormSizes, GroupNormTensors
from .cpu import group_norm_cpu
from .gpu import group_norm_gpu


@register("group_norm")
struct GroupNorm:
    """Normalises each group of channels of each image of x[N, pixels, C]."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=3, ...],
        partials: OutputTensor[dtype=F32, rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=3, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            epilogue: What follows the norm: an activation, or none.

        Args:
            y: Result, in the shape of x.
            partials: Room for statistics of parts [N, groups, parts, 3]; nobody else reads them.
            x: [N, pixels, C].
            weight: [C].
            bias: [C].
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime then = Epilogue(epilogue)
        comptime assert (
            Epilogue.known[epilogue]() and not then.joins
        ), "group_norm: no such epilogue"
        if x.size() == 0:
            return
        var o = GroupNormTensors[y.dtype](
            x=data(x), weight=data(weight), bias=data(bias), y=data(y), partials=data(partials)
        )
        var g = GroupNormSizes(
            images=x.shape()[0],
            pixels=x.shape()[1],
            channels=x.shape()[2],
            groups=partials.shape()[1],
            entries=partials.shape()[2],
            eps=data(eps)[unsafe_offset=0],
        )
        comptime if target == "cpu":
            comptime assert ON_CPU[y.dtype], "group_norm: a CPU expects float32 or bfloat16"
            group_norm_cpu[then](o, g)
        else:
            group_norm_gpu[y.dtype, then](o, g, ctx)
