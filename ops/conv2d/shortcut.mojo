"""The end of a residual block that changes its shape: a convolution and its shortcut, one sum.

    y[n, p, q, f] = relu(bias[f] + sum_rsc x[n, p * stride - pad + r * dilation, ..., c] w[r, s, c, f]
                         + shortcut_bias[f] + sum_c source[n, p * step, q * step, c] v[c, f])

He et al. 2015, section 3.3, option B. The shortcut's result is never stored.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..gemm.gpu import gemm_shortcut
from ..geometry import Geometry
from ..operands import F32, Operands, data


@register("conv2d_shortcut")
struct Conv2dShortcut:
    """Convolves x[N, H, W, C], adds a 1 x 1 convolution of source[N, H', W', C'] and rectifies."""

    @staticmethod
    def execute[
        target: StaticString, tf32: Bool
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
            target: "gpu".
            tf32: Whether it may round float32 to TF32 for the products.

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
        comptime assert target != "cpu", "conv2d_shortcut: a CPU runs two convolutions"
        if y.size() == 0:
            return
        gemm_shortcut[y.dtype, tf32](
            Geometry(x.shape(), y.shape(), data(window)),
            Operands[y.dtype](data(x), data(filter), data(bias), data(x), data(y)),
            Geometry(source.shape(), y.shape(), data(shortcut_window)),
            Operands[y.dtype](
                data(source), data(shortcut), data(shortcut_bias), data(source), data(y)
            ),
            ctx,
        )
