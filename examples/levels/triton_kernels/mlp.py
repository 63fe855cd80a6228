"""An MLP as one GEMM kernel, with what follows the product in its epilogue.

A program computes a tile of 64 x 64 results. It goes along K in steps of 32; Triton copies both
tiles of a step to shared memory while tensor cores multiply those before. Bias and GELU are applied
to the sums in registers, where level 1 stores the product and reads it again. What a step of
training needs of GELU is computed by the same kernel: its epilogue multiplies by GELU's slope.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NONE, GELU, SLOPE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # epilogues


@triton.jit
def gemm(
    a, b, bias, before, y, m, n, k, a_row, a_column, b_row, b_column,
    EPILOGUE: tl.constexpr, TF32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes y[m, n] = epilogue(a[m, k] b[k, n] + bias[n]); a and b have any strides.

    GELU also stores the sums in ``before``; SLOPE multiplies by GELU's slope there.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, k, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        left = a + rows * a_row + at[None, :] * a_column
        right = b + at[:, None] * b_row + columns * b_column
        left = tl.load(left, mask=(rows < m) & (at[None, :] < k), other=0.0)
        right = tl.load(right, mask=(at[:, None] < k) & (columns < n), other=0.0)
        sums = tl.dot(left, right, sums, input_precision="tf32" if TF32 else "ieee")
    inside = (rows < m) & (columns < n)
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < n, other=0.0)
    place = rows * n + columns
    if EPILOGUE == GELU:
        tl.store(before + place, sums, mask=inside)
        sums = sums * normal(sums)
    if EPILOGUE == SLOPE:
        x = tl.load(before + place, mask=inside, other=0.0).to(tl.float32)
        sums = sums * (normal(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x))
    tl.store(y + place, sums, mask=inside)


@triton.jit
def normal(x):
    """Gives the share of the normal distribution below x, by which GELU multiplies."""
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476))


def multiply(
    a: Tensor, b: Tensor, bias: Tensor | None = None, epilogue: tl.constexpr = NONE,
    before: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes epilogue(a b + bias) of matrices a[M, K] and b[K, N]; see ``gemm``."""
    (m, k), n = a.shape, b.shape[1]
    y = a.new_empty(m, n)
    tile = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    grid = triton.cdiv(m, tile["BLOCK_M"]), triton.cdiv(n, tile["BLOCK_N"])
    tf32 = torch.backends.cuda.matmul.allow_tf32
    gemm[grid](
        a, b, bias, before, y, m, n, k, *a.stride(), *b.stride(), EPILOGUE=epilogue.value,
        TF32=tf32, **tile,
    )  # fmt: skip
    return y


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
    ) -> Tensor:
        before = x.new_empty(len(x), len(weight1))
        hidden = multiply(x, weight1.mT, bias1, GELU, before)
        ctx.save_for_backward(x, weight1, weight2, before, hidden)
        return multiply(hidden, weight2.mT, bias2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight1, weight2, before, hidden = ctx.saved_tensors
        dbefore = multiply(dy, weight2, None, SLOPE, before)
        return (
            multiply(dbefore, weight1), multiply(dbefore.mT, x), dbefore.sum(0),
            multiply(dy.mT, hidden), dy.sum(0),
        )  # fmt: skip


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Computes gelu(x weight1^T + bias1) weight2^T + bias2, as level 1 does."""
    found: Tensor = _MLP.apply(x.flatten(0, -2), weight1, bias1, weight2, bias2)
    return found.view(*x.shape[:-1], -1)
