"""The gradient of a convolution's filters: registration and the choice of a kernel.

    dw[f, r, s, c] = sum_npq dy[n, p, q, f] x[n, p * stride - pad + r * dilation, ..., c]

CUTLASS calls it Wgrad. That of a linear layer's weights, dy^T x, is the same with a window of 1 x 1.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..geometry import Geometry
from ..operands import CHECKED, F32, data
from .cpu import conv2d_weight_grad_cpu
from .gpu import conv2d_weight_grad_gpu
from .tensors import WeightGrad


@register("conv2d_weight_grad")
struct Conv2dWeightGrad:
    """Computes the gradient of filters [F, R, S, C / groups]."""

    @staticmethod
    def execute[
        target: StaticString, tf32: Bool, depthwise: Bool
    ](
        dw: OutputTensor[rank=4, ...],
        room: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=dw.dtype, rank=4, ...],
        dy: InputTensor[dtype=dw.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            tf32: Whether a GPU may round float32 to TF32 for the products.
            depthwise: Whether each filter is of one channel, and each channel has one.

        Args:
            dw: Result [F, R, S, C / groups].
            room: On a GPU [parts, F R S C / groups] for the sums of as many parts of the pixels at
                most, which nobody else reads.
            x: Activations [N, H, W, C].
            dy: Gradient of the convolution's result [N, P, Q, F].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var g = Geometry(x.shape(), dy.shape(), data(window))
        var o = WeightGrad[dw.dtype](data(x), data(dy), data(dw), data(room))
        comptime if target == "cpu":
            comptime assert CHECKED[
                dw.dtype
            ], "conv2d_weight_grad: a CPU expects float32, bfloat16 or float64"
            conv2d_weight_grad_cpu(g, o)
        else:
            conv2d_weight_grad_gpu[tf32, depthwise](g, o, room.shape()[0], ctx)
