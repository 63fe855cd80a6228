"""Attention on a GPU: the choice of a kernel."""

from max.gpu.host import DeviceContext
from std.math import ceildiv

from ..device import Device
from ..target import HAS_MMA, IS_HOPPER
from .config import Attention
from .flash import SPLITS, enqueue_flash, queries, shared_bytes
from .hopper import enqueue_hopper, least_keys, long, short
from .plain import enqueue_plain


def attention_gpu[dtype: DType, depth: Int](o: Attention[dtype], ctx: DeviceContext) raises:
    """Enqueues an attention.

    Parameters:
        dtype: Of all tensors.
        depth: Channels of a head.

    Args:
        o: Tensors and sizes.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime if HAS_MMA and dtype.is_half_float() and depth % 32 == 0 and depth <= 128:
        # 32 queries of a warp share the loads of keys and values, but leave no registers for heads
        # of more than 64 channels.
        comptime rows = 2 if depth <= 64 else 1
        var device = Device(ctx)
        var heads = Int(o.n * o.heads)
        if (
            ceildiv(Int(o.t), queries(rows, 1)) * heads < device.multiprocessors
            and shared_bytes(depth, 1, SPLITS) <= device.shared
        ):
            enqueue_flash[dtype, depth, 1, SPLITS](o, ctx)
            return
        comptime if IS_HOPPER:
            comptime SHORT = short(depth)
            if Int(o.s) >= least_keys(depth):
                if Int(o.s) <= SHORT.keys:
                    enqueue_hopper[dtype, SHORT](o, ctx)
                else:
                    enqueue_hopper[dtype, long(depth)](o, ctx)
                return
        enqueue_flash[dtype, depth, rows, 1](o, ctx)
    else:
        enqueue_plain[dtype, depth](o, ctx)
