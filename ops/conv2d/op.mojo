"""Convolution, torch's on NHWC: registration, checks and the choice of a kernel.

    y[n, p, q, f] = act(bias[f] + residual[n, p, q, f]
                        + sum_rsc x[n, p * stride - pad + r * dilation, ..., c] w[r, s, c, f])
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..geometry import Data, Geometry
from .cpu import conv2d_cpu
from .gpu import conv2d_gpu


@always_inline
def _conv2d[
    target: StaticString, dtype: DType, name: StaticString
](
    g: Geometry,
    x: Data[dtype],
    filter: Data[dtype],
    bias: Data[DType.float32],
    residual: Data[dtype],
    y: Data[dtype],
    ctx: DeviceContext,
) raises:
    comptime assert Epilogue.known(name), "conv2d: epilogue expects none, relu, gelu, add or add_relu"
    comptime epilogue = Epilogue(name)
    if g.pixels() == 0:
        return
    comptime if target == "cpu":
        comptime assert dtype == DType.float32, "conv2d: a CPU expects float32"
        comptime F32 = Data[DType.float32]
        conv2d_cpu[epilogue](
            g, rebind[F32](x), rebind[F32](filter), bias, rebind[F32](residual), rebind[F32](y)
        )
    else:
        conv2d_gpu[dtype, epilogue](g, x, filter, bias, residual, y, ctx)


@register("conv2d")
struct Conv2d:
    """Convolves x[N, H, W, C] into y[N, P, Q, F]; epilogue none, relu or gelu."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        filter: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op. `filter` is arranged by graphs/arrange.py, `window` is geometry.mojo's."""
        comptime assert not Epilogue(epilogue).adds, "conv2d: conv2d_add takes the residual"
        _conv2d[target, y.dtype, epilogue](
            Geometry(x.shape(), y.shape(), window.unsafe_ptr()),
            x.unsafe_ptr(), filter.unsafe_ptr(), bias.unsafe_ptr(), x.unsafe_ptr(),
            y.unsafe_ptr(), ctx,
        )


@register("conv2d_add")
struct Conv2dAdd:
    """Convolves and adds residual[N, P, Q, F]; epilogue add or add_relu."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        filter: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op. `filter` is arranged by graphs/arrange.py, `window` is geometry.mojo's."""
        comptime assert Epilogue(epilogue).adds, "conv2d: conv2d_add expects add or add_relu"
        _conv2d[target, y.dtype, epilogue](
            Geometry(x.shape(), y.shape(), window.unsafe_ptr()),
            x.unsafe_ptr(), filter.unsafe_ptr(), bias.unsafe_ptr(), residual.unsafe_ptr(),
            y.unsafe_ptr(), ctx,
        )
