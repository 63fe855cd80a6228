"""Convolution on a GPU: the implicit GEMM of ops/gemm, and a kernel of its own for depthwise."""

from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.gpu import gemm
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..operands import Batch, Operands
from .depthwise import enqueue_depthwise


def conv2d_gpu[
    dtype: DType,
    epilogue: Epilogue,
    tf32: Bool,
    layer: Layer = Layer(),
    depthwise: Bool = False,
    constant: Bool = True,
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, the filter and y.
        epilogue: What the accumulator goes through.
        tf32: Whether the products may round float32 to TF32.
        layer: What the graph knows of the product.
        depthwise: Whether each channel is convolved by itself, with one filter.
        constant: Whether the filter is a weight, which no kernel writes. A depthwise one that is none
            lies as training has it.

    Args:
        g: Sizes.
        o: Tensors; the filter is w[F, R, S, C], or w[R, S, C] if it is depthwise and constant.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime if depthwise:
        enqueue_depthwise[dtype, epilogue, lies=not constant](g, o, ctx)
    else:
        gemm[dtype, epilogue, True, tf32, layer](
            g,
            o,
            Batch(
                g.groups,
                x=g.group_c(),
                w=g.group_f() * g.depth(),
                bias=g.group_f(),
                y=g.group_f(),
            ),
            ctx,
            constant=constant,
        )
