"""Convolution by torch, then batch norm, residual and ReLU as one kernel each way.

A program has a channel. Forward it goes through its pixels three times: for the mean, the variance
and the results; backward twice. Later passes find most pixels in the L2 cache. Level 1 goes through
the images once for each op.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1024


@triton.jit
def pixels(first, channel, channels, size, count, BLOCK: tl.constexpr):
    """Says where pixels of a channel lie in images [N, C, H, W], and which are there."""
    at = first + tl.arange(0, BLOCK)
    return (at // size * channels + channel) * size + at % size, at < count


@triton.jit
def norm_relu_forward(
    x, residual, scale, shift, y, means, spreads, channels, size, count, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """Norms a channel, adds the residual if there is one, and takes max(y, 0)."""
    channel = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        place, inside = pixels(first, channel, channels, size, count, BLOCK)
        total += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total) / count
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        place, inside = pixels(first, channel, channels, size, count, BLOCK)
        centred = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean
        squares += tl.where(inside, centred * centred, 0.0)
    spread = 1 / tl.sqrt(tl.sum(squares) / count + eps)
    factor, offset = tl.load(scale + channel), tl.load(shift + channel)
    for first in range(0, count, BLOCK):
        place, inside = pixels(first, channel, channels, size, count, BLOCK)
        found = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * spread
        found = found * factor + offset
        if residual is not None:
            found += tl.load(residual + place, mask=inside, other=0.0)
        tl.store(y + place, tl.maximum(found, 0.0), mask=inside)
    tl.store(means + channel, mean)
    tl.store(spreads + channel, spread)


@triton.jit
def norm_relu_backward(
    x, y, scale, means, spreads, dy, dx, dresidual, dscale, dshift, channels, size, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gives all gradients of a channel."""
    channel = tl.program_id(0)
    mean, spread = tl.load(means + channel), tl.load(spreads + channel)
    slopes = tl.zeros([BLOCK], tl.float32)
    along = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        place, inside = pixels(first, channel, channels, size, count, BLOCK)
        slope = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        slope = tl.where(tl.load(y + place, mask=inside, other=0.0) > 0, slope, 0.0)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        slopes += slope
        along += slope * (values - mean) * spread
        if dresidual is not None:
            tl.store(dresidual + place, slope, mask=inside)
    slope_sum, along_sum = tl.sum(slopes), tl.sum(along)
    factor = tl.load(scale + channel) * spread
    for first in range(0, count, BLOCK):
        place, inside = pixels(first, channel, channels, size, count, BLOCK)
        slope = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        slope = tl.where(tl.load(y + place, mask=inside, other=0.0) > 0, slope, 0.0)
        normed = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * spread
        found = (slope - slope_sum / count - normed * along_sum / count) * factor
        tl.store(dx + place, found, mask=inside)
    tl.store(dscale + channel, along_sum)
    tl.store(dshift + channel, slope_sum)


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None
    ) -> Tensor:
        x, given = x.contiguous(), None if residual is None else residual.contiguous()
        y = torch.empty_like(x)
        means, spreads = x.new_empty(2, x.shape[1], dtype=torch.float32)
        norm_relu_forward[(x.shape[1],)](
            x, given, scale, shift, y, means, spreads, *_sizes(x), 1e-5, BLOCK=BLOCK
        )
        ctx.save_for_backward(x, y, scale, means, spreads)
        ctx.adds = residual is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, y, scale, means, spreads = ctx.saved_tensors
        dx, dscale, dshift = torch.empty_like(x), torch.empty_like(scale), torch.empty_like(scale)
        dresidual = torch.empty_like(x) if ctx.adds else None
        norm_relu_backward[(x.shape[1],)](
            x, y, scale, means, spreads, dy.contiguous(), dx, dresidual, dscale, dshift,
            *_sizes(x), BLOCK=BLOCK,
        )  # fmt: skip
        return dx, dscale, dshift, dresidual


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Gives the channels, the pixels of one, and its pixels in all images."""
    size = x.shape[2] * x.shape[3]
    return x.shape[1], size, len(x) * size


def conv_norm_relu(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Computes relu(norm(conv(x)) + residual), as level 1 does."""
    y = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
    found: Tensor = _NormReLU.apply(y, scale, shift, residual)
    return found
