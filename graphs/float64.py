"""Norms and attention in float64, which have no kernels: written out in what has.

A CPU computes in float64 to check gradients by: products, convolutions, poolings, reductions,
expressions and softmax do. What is here is made of these, so nothing of it is fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from max.dtype import DType
from max.graph import Dim, TensorValue, ops

from maxvision.graphs import nodes
from maxvision.graphs.elementwise import activation


def layernorm(
    x: TensorValue, weight: TensorValue, bias: TensorValue, eps: float = 1e-5
) -> TensorValue:
    """Computes ``nodes.layernorm``; weight and bias are float64."""
    normed, _ = _normed(x, [x.rank - 1], eps)
    return nodes.pointwise("x0 x1 mul x2 add", [normed, weight, bias])


def layer_norm_grad(
    dy: TensorValue,
    x: TensorValue,
    weight: TensorValue | None = None,
    eps: float = 1e-5,
) -> list[TensorValue]:
    """Computes ``nodes.layer_norm_grad``, as the head of ops/layer_norm_grad/op.mojo has it."""
    last, rows = x.rank - 1, list(range(x.rank - 1))
    normed, spread = _normed(x, [last], eps)
    g = dy if weight is None else nodes.pointwise("x0 x1 mul", [dy, weight])
    means = nodes.reduce_terms("mean", "x0 ; x0 x1 mul", [g, normed], [last], keepdim=True)
    words = f"x0 x1 sub x2 x3 mul sub x4 {eps!r} add rsqrt mul"
    dx = nodes.pointwise(words, [g, means[0], normed, means[1], spread])
    if not rows:
        return [dx, nodes.pointwise("x0 x1 mul", [dy, normed]), dy]
    return [dx, *nodes.reduce_terms("sum", "x0 x1 mul ; x0", [dy, normed], rows)]


def rms_norm(x: TensorValue, weight: TensorValue, eps: float = 1e-5) -> TensorValue:
    """Computes ``nodes.rms_norm``; the weight is float64."""
    (square,) = nodes.reduce_terms("mean", "x0 x0 mul", [x], [x.rank - 1], keepdim=True)
    return nodes.pointwise(f"x0 x1 {eps!r} add rsqrt mul x2 mul", [x, square, weight])


def group_norm(
    x: TensorValue,
    weight: TensorValue,
    bias: TensorValue,
    groups: int,
    eps: float = 1e-5,
    *,
    epilogue: str = "none",
) -> TensorValue:
    """Computes ``nodes.group_norm``; weight and bias are float64."""
    n, *between, c = x.shape
    pixels, members = math.prod(between, start=Dim(1)), int(c) // groups
    apart = nodes.permute(x.reshape((n, pixels, groups, members)), [0, 2, 1, 3])
    normed, _ = _normed(apart.reshape((n, groups, pixels * members)), [2], eps)
    y = nodes.permute(normed.reshape(apart.shape), [0, 2, 1, 3]).reshape(x.shape)
    words = " ".join(["x0 x1 mul x2 add", activation(epilogue)]).strip()
    return nodes.pointwise(words, [y, weight, bias])


def _normed(x: TensorValue, axes: Sequence[int], eps: float) -> tuple[TensorValue, TensorValue]:
    """Norms by the mean and variance along axes: the result, and the variance."""
    mean = nodes.reduce("mean", x, axes, keepdim=True)
    terms = "x0 x1 sub x0 x1 sub mul"
    (spread,) = nodes.reduce_terms("mean", terms, [x, mean], axes, keepdim=True)
    return nodes.pointwise(f"x0 x1 sub x2 {eps!r} add rsqrt mul", [x, mean, spread]), spread


def attention(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    heads: int,
    *,
    scale: float | None = None,
    bias: TensorValue | None = None,
    causal: bool = False,
) -> TensorValue:
    """Computes ``nodes.attention``; the scores go to memory."""
    scale = (int(q.shape[-1]) / heads) ** -0.5 if scale is None else scale
    scores = _scores(q, k, heads, scale, bias, causal)
    return _tokens(nodes.bmm(nodes.softmax(scores), _heads(v, heads)))


def attention_logsumexp(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    heads: int,
    *,
    scale: float,
    bias: TensorValue | None = None,
    causal: bool = False,
) -> list[TensorValue]:
    """Computes ``nodes.attention_logsumexp``; both results are float64."""
    scores = _scores(q, k, heads, scale, bias, causal)
    top = nodes.reduce("amax", scores, [3], keepdim=True)
    top = nodes.pointwise("x0 -inf gt x0 0.0 where", [top])  # a query may see no key
    (total,) = nodes.reduce_terms("sum", "x0 x1 sub exp", [scores, top], [3], keepdim=True)
    kept = nodes.pointwise("x0 log x1 add", [total, top]).reshape(scores.shape[:3])
    return [_tokens(nodes.bmm(nodes.softmax(scores), _heads(v, heads))), kept]


def attention_grad(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    y: TensorValue,
    dy: TensorValue,
    logsumexp: TensorValue,
    heads: int,
    *,
    scale: float,
    bias: TensorValue | None = None,
    causal: bool = False,
) -> list[TensorValue]:
    """Computes ``nodes.attention_grad``, as the head of ops/attention_grad/op.mojo has it."""
    scores = _scores(q, k, heads, scale, bias, causal)
    bound = logsumexp.reshape((*logsumexp.shape, 1))
    p = nodes.pointwise("x1 -inf gt x0 x1 sub exp 0.0 where", [scores, bound])
    q, k, v, y, dy = (_heads(each, heads) for each in (q, k, v, y, dy))
    dp = nodes.bmm(dy, v, transpose_b=True)
    (delta,) = nodes.reduce_terms("sum", "x0 x1 mul", [dy, y], [3], keepdim=True)
    seen = "x1 -inf gt x0 x2 x3 sub mul 0.0 where"
    ds = nodes.pointwise(seen, [p, bound, dp, delta])
    turned = [nodes.permute(each, [0, 1, 3, 2]) for each in (ds, p)]
    dq, dk = nodes.bmm(ds, k, alpha=scale), nodes.bmm(turned[0], q, alpha=scale)
    return [_tokens(each) for each in (dq, dk, nodes.bmm(turned[1], dy))]


def _scores(
    q: TensorValue,
    k: TensorValue,
    heads: int,
    scale: float,
    bias: TensorValue | None,
    causal: bool,
) -> TensorValue:
    """Computes the scores [N, heads, T, S], with what is added to them and what is not seen."""
    scores = nodes.bmm(_heads(q, heads), _heads(k, heads), alpha=scale, transpose_b=True)
    n, _, t, s = shape = scores.shape
    if bias is not None:  # [P, heads * T, S], [P, T, S] or [P, 1, S], in rows of an even length
        period, rows = int(bias.shape[0]), int(bias.shape[1])
        of_all = rows in (1, int(t))
        sides = (period, 1 if of_all else heads, rows if of_all else int(t), int(s))
        added = bias[:, :, : int(s)].reshape(sides)
        if period not in (1, n):  # images take turns
            scores = scores.reshape((-1, period, *shape[1:]))
        scores = nodes.pointwise("x0 x1 add", [scores, added])
        scores = scores.rebind(shape) if scores.rank == 4 else scores.reshape(shape)
    if causal:
        seen = np.tri(int(t), int(s), dtype=np.bool_)
        values = [scores, ops.constant(seen, DType.bool, scores.device)]
        scores = nodes.pointwise("x1 x0 -inf where", values)
    return scores


def _heads(x: TensorValue, heads: int) -> TensorValue:
    """Gives tokens [N, T, heads * D] the axes of heads [N, heads, T, D]."""
    n, t, c = x.shape
    return nodes.permute(x.reshape((n, t, heads, int(c) // heads)), [0, 2, 1, 3])


def _tokens(x: TensorValue) -> TensorValue:
    n, heads, t, d = x.shape
    return nodes.permute(x, [0, 2, 1, 3]).reshape((n, t, int(heads) * int(d)))
