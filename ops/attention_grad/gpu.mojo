"""The gradients of attention on a GPU: the choice of kernels."""

from max.gpu.host import DeviceContext

from ..attention.mask import Mask, MaskSizes, MaskTensors
from ..target import HAS_MMA
from .mma import enqueue_grad
from .plain import enqueue_plain_grad
from .tensors import AttentionGrad


def attention_grad_gpu[
    dtype: DType, depth: Int, mask: Mask
](
    o: AttentionGrad[dtype], tensors: MaskTensors[dtype], sizes: MaskSizes, ctx: DeviceContext
) raises:
    """Enqueues the kernels.

    Parameters:
        dtype: Of all tensors but logsumexp and delta.
        depth: Channels of a head.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        tensors: What masks read.
        sizes: Where that lies.
        ctx: The GPU.

    Raises:
        If a launch fails.
    """
    comptime if HAS_MMA and dtype.is_half_float() and depth % 4 == 0 and depth <= 128:
        enqueue_grad[dtype, depth, mask](o, tensors, sizes, ctx)
    else:
        enqueue_plain_grad[dtype, depth, mask](o, tensors, sizes, ctx)
