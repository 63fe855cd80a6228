"""Attention on a GPU: the choice of a kernel."""

from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ..device import Device
from ..target import HAS_MMA, IS_HOPPER
from .config import Attention
from .flash import SPLITS, enqueue_flash, queries, shared_bytes, warp_keys
from .hopper import enqueue_hopper, least_keys, long, short
from .mask import Mask, MaskTensors
from .plain import enqueue_plain
from .tiles import padded

comptime MANY = 1 << 30
"""More keys than there are."""


def splits_keys(o: Attention[_, _], rows: Int, device: Device) -> Bool:
    """Tells whether there are so few queries that warps share them, each with some of the keys.

    Args:
        o: Sizes.
        rows: Sixteens of queries of a warp that has all keys.
        device: The GPU.

    Returns:
        Whether blocks with queries of their own would leave multiprocessors idle.
    """
    return ceildiv(Int(o.t), queries(rows, 1)) * Int(o.n * o.heads) < device.multiprocessors


def attention_gpu[
    out: DType, //, dtype: DType, depth: Int, mask: Mask, keys: Int = 0
](o: Attention[dtype, out], tensors: MaskTensors[dtype], ctx: DeviceContext) raises:
    """Enqueues an attention.

    Parameters:
        out: Of the result.
        dtype: Of the other tensors.
        depth: Channels of a head.
        mask: What is done to the scores.
        keys: S if it is known at compile time, else not positive: only kernels that can serve S are
            compiled.

    Args:
        o: Tensors and sizes.
        tensors: What masks read.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime MULTIPLIES = HAS_MMA and dtype.is_half_float() and depth % 4 == 0 and depth <= 128
    comptime NARROWS = IS_HOPPER and MULTIPLIES and size_of[out]() == 1
    comptime assert out == dtype or NARROWS, (
        "attention: results of 8 bits are Hopper's, of 16 bits and heads of a multiple of 4 channels"
        " up to 128"
    )
    comptime if MULTIPLIES:
        # 32 queries of a warp share the loads of keys and values, but leave no registers for heads
        # of more than 64 channels.
        comptime rows = 2 if depth <= 64 else 1
        var device = Device(ctx)
        var s = Int(o.s)
        if splits_keys(o, rows, device) and shared_bytes(padded(depth), 1, SPLITS) <= device.shared:
            comptime AT_ONCE = warp_keys(padded(depth))
            comptime if _may_be(keys, AT_ONCE + 1):
                if s > AT_ONCE:
                    enqueue_flash[dtype, depth, 1, SPLITS, mask](o, tensors, ctx)
            comptime if _may_be(keys, 0, AT_ONCE):
                if s <= AT_ONCE:  # a warp attends to all keys at once
                    enqueue_flash[dtype, depth, 1, 1, mask](o, tensors, ctx)
            return
        # Hopper's copy engine brings whole boxes of 32 or 64 channels of a head.
        comptime LEAST = least_keys(depth) if IS_HOPPER and depth % 32 == 0 else MANY
        comptime SHORT = short(depth)
        comptime if _may_be(keys, LEAST, SHORT.keys):
            if LEAST <= s <= SHORT.keys:
                enqueue_hopper[dtype, SHORT, mask](o, tensors, ctx)
        comptime if _may_be(keys, max(LEAST, SHORT.keys + 1)):
            if s >= LEAST and s > SHORT.keys:
                enqueue_hopper[dtype, long(depth), mask](o, tensors, ctx)
        comptime if _may_be(keys, 0, LEAST - 1):
            if s < LEAST:
                enqueue_flash[dtype, depth, rows, 1, mask](o, tensors, ctx)
    else:
        enqueue_plain[dtype, depth, mask](rebind[Attention[dtype]](o), tensors, ctx)


def _may_be(size: Int, least: Int, most: Int = MANY - 1) -> Bool:
    """Tells whether a size may be in a range; one that is not positive is not known, and may be."""
    return least <= most and (size <= 0 or least <= size <= most)
