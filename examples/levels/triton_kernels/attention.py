"""Flash attention (Dao et al. 2022, arXiv:2205.14135), both ways: no score reaches memory.

A program has 64 queries of a head, and goes through the keys 32 at a time. It keeps the largest
score so far and the sum of the exponentials, and rescales its result when a larger score turns up.
The way back computes the scores again, of the sums that were kept: once for each block of keys, for
the gradients of k and v, and once for each block of queries, for that of q.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tile(x, rows, length, channels, BLOCK_D: tl.constexpr):
    """Loads rows of a head [T, D]; what is outside is zero."""
    at = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows[:, None] < length) & (at < channels)
    return tl.load(x + rows[:, None] * channels + at, mask=inside, other=0.0)


@triton.jit
def put(x, rows, length, channels, found, BLOCK_D: tl.constexpr):
    """Stores rows of a head."""
    at = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows[:, None] < length) & (at < channels)
    tl.store(x + rows[:, None] * channels + at, found, mask=inside)


@triton.jit
def visible(queries, keys, length, CAUSAL: tl.constexpr):
    """Says which key each query sees."""
    seen = (queries[:, None] < length) & (keys[None, :] < length)
    if CAUSAL:
        seen = seen & (keys[None, :] <= queries[:, None])
    return seen


@triton.jit
def attention_forward(
    q, k, v, y, logs, length, channels, scale, CAUSAL: tl.constexpr, TF32: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes a block of queries of a head."""
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    first = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64) * length * channels
    queries = first + tl.arange(0, BLOCK_Q)
    asked = tile(q + head, queries, length, channels, BLOCK_D)
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    end = tl.minimum(first + BLOCK_Q, length) if CAUSAL else length
    for start in range(0, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        key = tile(k + head, keys, length, channels, BLOCK_D)
        score = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(visible(queries, keys, length, CAUSAL), score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        held = tl.where(larger == float("-inf"), 0.0, larger)  # of rows outside
        share = tl.exp(score - held[:, None])
        shrink = tl.exp(largest - held)
        value = tile(v + head, keys, length, channels, BLOCK_D)
        sums = tl.dot(share.to(value.dtype), value, sums * shrink[:, None],
                      input_precision=PRECISION)  # fmt: skip
        total = total * shrink + tl.sum(share, 1)
        largest = larger
    total = tl.where(queries < length, total, 1.0)
    put(y + head, queries, length, channels, sums / total[:, None], BLOCK_D)
    place = logs + tl.program_id(1) * length + queries
    tl.store(place, largest + tl.log(total), mask=queries < length)


@triton.jit
def shares_and_slopes(
    asked, key, value, dy, log, delta, seen, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Computes softmax's shares again, and the slopes of the scores."""
    score = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * scale
    share = tl.where(seen, tl.exp(score - log[:, None]), 0.0)
    slope = tl.dot(dy, tl.trans(value), input_precision=PRECISION) - delta[:, None]
    return share, share * slope * scale


@triton.jit
def attention_backward_keys(
    q, k, v, logs, deltas, dy, dk, dv, length, channels, scale, CAUSAL: tl.constexpr,
    TF32: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a block of keys, and of its values."""
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    first = tl.program_id(0) * BLOCK_K
    head = tl.program_id(1).to(tl.int64) * length * channels
    row = tl.program_id(1) * length
    keys = first + tl.arange(0, BLOCK_K)
    key = tile(k + head, keys, length, channels, BLOCK_D)
    value = tile(v + head, keys, length, channels, BLOCK_D)
    key_sums = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    value_sums = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    begin = first // BLOCK_Q * BLOCK_Q if CAUSAL else 0
    for start in range(begin, length, BLOCK_Q):
        queries = start + tl.arange(0, BLOCK_Q)
        asked = tile(q + head, queries, length, channels, BLOCK_D)
        slopes = tile(dy + head, queries, length, channels, BLOCK_D)
        log = tl.load(logs + row + queries, mask=queries < length, other=0.0)
        delta = tl.load(deltas + row + queries, mask=queries < length, other=0.0)
        seen = visible(queries, keys, length, CAUSAL)
        share, slope = shares_and_slopes(
            asked, key, value, slopes, log, delta, seen, scale, PRECISION
        )
        value_sums = tl.dot(tl.trans(share).to(slopes.dtype), slopes, value_sums,
                            input_precision=PRECISION)  # fmt: skip
        key_sums = tl.dot(tl.trans(slope).to(asked.dtype), asked, key_sums,
                          input_precision=PRECISION)  # fmt: skip
    put(dk + head, keys, length, channels, key_sums, BLOCK_D)
    put(dv + head, keys, length, channels, value_sums, BLOCK_D)


@triton.jit
def attention_backward_queries(
    q, k, v, logs, deltas, dy, dq, length, channels, scale, CAUSAL: tl.constexpr,
    TF32: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a block of queries."""
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    first = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64) * length * channels
    queries = first + tl.arange(0, BLOCK_Q)
    asked = tile(q + head, queries, length, channels, BLOCK_D)
    slopes = tile(dy + head, queries, length, channels, BLOCK_D)
    row = tl.program_id(1) * length + queries
    log = tl.load(logs + row, mask=queries < length, other=0.0)
    delta = tl.load(deltas + row, mask=queries < length, other=0.0)
    sums = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    end = tl.minimum(first + BLOCK_Q, length) if CAUSAL else length
    for start in range(0, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        key = tile(k + head, keys, length, channels, BLOCK_D)
        value = tile(v + head, keys, length, channels, BLOCK_D)
        seen = visible(queries, keys, length, CAUSAL)
        _, slope = shares_and_slopes(asked, key, value, slopes, log, delta, seen, scale, PRECISION)
        sums = tl.dot(slope.to(key.dtype), key, sums, input_precision=PRECISION)
    put(dq + head, queries, length, channels, sums, BLOCK_D)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        n, h, t, d = q.shape
        y, logs = torch.empty_like(q), q.new_empty(n, h, t, dtype=torch.float32)
        blocks = _blocks(d, causal)
        grid = triton.cdiv(t, blocks["BLOCK_Q"]), n * h
        attention_forward[grid](q, k, v, y, logs, t, d, d**-0.5, **blocks)
        ctx.save_for_backward(q, k, v, y, logs)
        ctx.causal = causal
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, y, logs = ctx.saved_tensors
        dy = dy.contiguous()
        n, h, t, d = q.shape
        deltas = (y.float() * dy).sum(-1)
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        blocks, given = _blocks(d, ctx.causal), (q, k, v, logs, deltas, dy)
        grid = triton.cdiv(t, blocks["BLOCK_K"]), n * h
        attention_backward_keys[grid](*given, dk, dv, t, d, d**-0.5, **blocks)
        grid = triton.cdiv(t, blocks["BLOCK_Q"]), n * h
        attention_backward_queries[grid](*given, dq, t, d, d**-0.5, **blocks)
        return dq, dk, dv, None


def _blocks(channels: int, causal: bool) -> dict[str, Any]:
    wide = max(16, triton.next_power_of_2(channels))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return {"CAUSAL": causal, "TF32": tf32, "BLOCK_Q": 64, "BLOCK_K": 32, "BLOCK_D": wide}


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attends with heads q, k, v[N, H, T, D], as level 1 does."""
    found: Tensor = _Attention.apply(q, k, v, causal)
    return found
