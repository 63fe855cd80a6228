"""The gradients of a layer norm: registration and the choice of a device.

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))   g = dy * weight, xhat = (x - mean) * rstd
    dweight[c] = sum over rows of dy * xhat
    dbias[c] = sum over rows of dy

Each row's mean and rstd = 1 / sqrt(var + eps) are computed again from x, so that nobody has to keep
them. x, dy and dx [..., C] may each have a dtype of its own; all is computed in float32, and dweight
and dbias [C] are float32. The rows are divided into parts, whose sums are added up in their order: no
atomics, and the same result every time. Bound by memory: x and dy are read once, dx written.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..operands import F32, ON_CPU, data
from .cpu import layer_norm_grad_cpu
from .gpu import layer_norm_grad_gpu
from .tensors import NormGrad, NormGradSizes


@register("layer_norm_grad")
struct LayerNormGrad:
    """Computes the gradients of x[..., C], of the weight and of the bias."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        dx: OutputTensor,
        dweight: OutputTensor[dtype=F32, rank=1, ...],
        dbias: OutputTensor[dtype=F32, rank=1, ...],
        room: OutputTensor[dtype=F32, rank=3, ...],
        dy: InputTensor[rank=dx.rank, ...],
        x: InputTensor[rank=dx.rank, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            dx: Gradient of x, in its shape.
            dweight: Gradient of the weight [C].
            dbias: Gradient of the bias [C].
            room: [parts, 2, C] for the sums of as many parts of the rows at most, which nobody else
                reads.
            dy: Gradient of the layer norm's result, in the shape of x.
            x: What was normalised [..., C].
            weight: [C].
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var columns = dweight.shape()[0]
        if columns == 0:
            return
        var o = NormGrad[x.dtype, dy.dtype, dx.dtype](
            x=data(x),
            dy=data(dy),
            weight=data(weight),
            dx=data(dx),
            dweight=data(dweight),
            dbias=data(dbias),
            room=data(room),
        )
        var g = NormGradSizes(
            rows=x.size() // columns,
            columns=columns,
            parts=room.shape()[0],
            eps=data(eps)[unsafe_offset=0],
        )
        comptime if target == "cpu":
            comptime assert (
                ON_CPU[x.dtype] and ON_CPU[dy.dtype] and ON_CPU[dx.dtype]
            ), "layer_norm_grad: a CPU expects float32 or bfloat16"
            layer_norm_grad_cpu(o, g)
        else:
            layer_norm_grad_gpu(o, g, ctx)
