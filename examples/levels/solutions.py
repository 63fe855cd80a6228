"""Solutions to the exercises of docs/levels.md, one a chapter."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# --- 1, coalescing: a transposed copy ------------------------------------------------------------


@triton.jit
def transpose_kernel(x, y, rows, columns, SIDE: tl.constexpr):
    """Turns a tile over: it is loaded along the rows of x, and stored along the rows of y."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside)
    place = y + column[:, None] * rows + row[None, :]
    tl.store(place, tl.trans(tile), mask=tl.trans(inside))


def transpose(x: Tensor) -> Tensor:
    """Copies x[R, C] into [C, R]; neighbouring threads load and store neighbouring numbers.

    ``tl.trans`` hands numbers from thread to thread, through shared memory. A side of 8 float32 is
    the 32 bytes that memory gives at least.
    """
    rows, columns = x.shape
    x, y = x.contiguous(), x.new_empty(columns, rows)
    grid = triton.cdiv(rows, 32), triton.cdiv(columns, 32)
    transpose_kernel[grid](x, y, rows, columns, SIDE=32)
    return y


# --- 2, fusion: a gated unit, both ways ----------------------------------------------------------


@triton.jit
def swish_multiply_kernel(x, gate, y, count, BLOCK: tl.constexpr):
    """Computes x sigmoid(x) gate in one pass."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count).to(tl.float32)
    factor = tl.load(gate + at, mask=at < count).to(tl.float32)
    tl.store(y + at, value * tl.sigmoid(value) * factor, mask=at < count)


@triton.jit
def swish_multiply_slopes(x, gate, dy, dx, dgate, count, BLOCK: tl.constexpr):
    """Computes both gradients in one pass; sigmoid(x) is computed again instead of stored."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count).to(tl.float32)
    factor = tl.load(gate + at, mask=at < count).to(tl.float32)
    slope = tl.load(dy + at, mask=at < count).to(tl.float32)
    share = tl.sigmoid(value)
    tl.store(dx + at, slope * factor * share * (1 + value * (1 - share)), mask=at < count)
    tl.store(dgate + at, slope * value * share, mask=at < count)


class _SwishMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        y = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 1024),)
        swish_multiply_kernel[grid](x, gate, y, x.numel(), BLOCK=1024)
        ctx.save_for_backward(x, gate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate = ctx.saved_tensors
        dx, dgate = torch.empty_like(x), torch.empty_like(gate)
        grid = (triton.cdiv(x.numel(), 1024),)
        swish_multiply_slopes[grid](x, gate, dy.contiguous(), dx, dgate, x.numel(), BLOCK=1024)
        return dx, dgate


def swish_multiply(x: Tensor, gate: Tensor) -> Tensor:
    """Computes silu(x) gate of tensors of one shape; ``torch_ops.swish_multiply`` is ours."""
    found: Tensor = _SwishMultiply.apply(x, gate)
    return found


# --- 3, reductions: softmax of rows that are read once -------------------------------------------


@triton.jit
def softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    """Computes a row a program: two sums over lanes, and the row stays in registers."""
    at = tl.arange(0, BLOCK)
    place = tl.program_id(0) * columns + at
    values = tl.load(x + place, mask=at < columns, other=float("-inf")).to(tl.float32)
    shares = tl.exp(values - tl.max(values))
    tl.store(y + place, shares / tl.sum(shares), mask=at < columns)


def softmax(x: Tensor) -> Tensor:
    """Computes softmax along the last axis.

    Without the maximum exp overflows. Minus infinity less itself is NaN, so a row of nothing else
    gives NaN, as in torch.
    """
    x = x.contiguous()
    y, columns = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(columns)
    softmax_kernel[(x.numel() // columns,)](x, y, columns, BLOCK=block)
    return y


# --- 4, tensor cores: a product with a residual in its epilogue ----------------------------------


@triton.jit
def product_kernel(
    a, b, residual, y, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes a tile of relu(a[m, k] b[k, n] + residual[m, n])."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < m) & (columns < n)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, k, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        left = tl.load(a + rows * k + at[None, :], mask=(rows < m) & (at[None, :] < k), other=0.0)
        right = tl.load(
            b + at[:, None] * n + columns, mask=(at[:, None] < k) & (columns < n), other=0.0
        )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    sums += tl.load(residual + rows * n + columns, mask=inside, other=0.0)
    tl.store(y + rows * n + columns, tl.maximum(sums, 0.0), mask=inside)


def product_add_relu(a: Tensor, b: Tensor, residual: Tensor) -> Tensor:
    """Computes relu(a b + residual) of a[M, K], b[K, N] and a residual [M, N].

    The product is neither written nor read again: 2 x 2 x 4096^2 bytes, 67 MB.
    """
    a, b, residual = a.contiguous(), b.contiguous(), residual.contiguous()
    (m, k), n = a.shape, b.shape[1]
    y = a.new_empty(m, n)
    grid = triton.cdiv(m, 64), triton.cdiv(n, 64)
    product_kernel[grid](a, b, residual, y, m, n, k, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32)
    return y


# --- 5, asynchronous copies: how many stages hide the memory's latency ----------------------------


def stages(
    tile_m: int, tile_n: int, tile_k: int, number_bytes: int, *, bytes_per_s: float,
    processors: int, latency_s: float, shared_bytes: int,
) -> int:  # fmt: skip
    """Gives the stages of a GEMM's ring.

    By Little's law so many bytes have to be on their way to a processor as arrive in the time that
    one takes: its part of the bandwidth times the latency. One stage more is being multiplied.

    Args:
        tile_m: Rows of a tile.
        tile_n: Columns of a tile.
        tile_k: Steps along K in a stage.
        number_bytes: Of each number.
        bytes_per_s: Of the memory, for all processors.
        processors: Multiprocessors that load at the same time.
        latency_s: From a copy's start to its end.
        shared_bytes: Of a multiprocessor's shared memory.

    Raises:
        ValueError: If two stages do not fit.
    """
    stage = (tile_m + tile_n) * tile_k * number_bytes
    fitting = shared_bytes // stage
    if fitting < 2:
        raise ValueError(f"two stages of {stage} bytes do not fit into {shared_bytes}")
    under_way = bytes_per_s / processors * latency_s
    return min(fitting, math.ceil(under_way / stage) + 1)
