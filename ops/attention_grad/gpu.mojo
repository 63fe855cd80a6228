"""The gradients of attention on a GPU: the choice of kernels."""

from max.gpu.host import DeviceContext
from std.math import ceildiv

from ..attention.mask import Mask, MaskTensors
from ..attention.plain import GROUPS
from ..attention.tiles import padded
from ..launch import launch
from ..target import HAS_MMA
from .mma import ROWS, THREADS, grad_kernel, grad_shared_bytes
from .plain import group_rows, plain_grad_kernel, plain_grad_shared_bytes
from .tensors import AttentionGrad


def attention_grad_gpu[
    dtype: DType, depth: Int, mask: Mask
](o: AttentionGrad[dtype], tensors: MaskTensors[dtype], ctx: DeviceContext) raises:
    """Enqueues the kernels: that of the queries, then that of the keys.

    Parameters:
        dtype: Of all tensors but logsumexp and delta.
        depth: Channels of a head.
        mask: What is done to the scores.

    Args:
        o: Tensors and sizes.
        tensors: What masks read.
        ctx: The GPU.

    Raises:
        If a launch fails.
    """
    comptime for keys in [False, True]:
        comptime side = StaticString("keys" if keys else "queries")
        var rows = Int(o.forward.s if keys else o.forward.t)
        comptime if HAS_MMA and dtype.is_half_float() and depth % 4 == 0 and depth <= 128:
            comptime SHARED = grad_shared_bytes(padded(depth))
            _enqueue[grad_kernel[dtype, depth, keys, side, mask], SHARED](
                o, tensors, ceildiv(rows, ROWS), ctx
            )
        else:
            comptime SHARED = plain_grad_shared_bytes(depth)
            _enqueue[plain_grad_kernel[dtype, depth, keys, side, mask], SHARED](
                o, tensors, ceildiv(rows, GROUPS * group_rows(depth)), ctx
            )


def _enqueue[
    dtype: DType,
    //,
    kernel: def(AttentionGrad[dtype], Int32, MaskTensors[dtype]) thin -> None,
    shared: Int,
](o: AttentionGrad[dtype], tensors: MaskTensors[dtype], blocks: Int, ctx: DeviceContext) raises:
    """Enqueues one of the kernels, with so many blocks for each head."""
    if blocks > 0:
        launch[kernel](
            ctx,
            o,
            Int32(blocks),
            tensors,
            grid_dim=blocks * Int(o.forward.n * o.forward.heads),
            block_dim=THREADS,
            shared=shared,
        )
