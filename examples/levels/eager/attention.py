"""Attention (Vaswani et al. 2017, arXiv:1706.03762): softmax(q k^T / sqrt(D)) v."""

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attends with heads q, k, v[N, H, T, D]; a causal query t sees the keys up to t."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attention_in_steps(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Computes the same in products that torch runs well, and stores all scores [N, H, T, T]."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def attention_by_queries(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Computes the same written badly: a loop over queries, each op on one row of scores.

    On a GPU each pass launches six small kernels that leave most of the device idle, and Python is
    slower than any of them.
    """
    rows = []
    for t in range(q.shape[2]):
        seen = t + 1 if causal else k.shape[2]
        scores = (q[:, :, t, None] * k[:, :, :seen]).sum(-1) * q.shape[-1] ** -0.5
        shares = scores.softmax(-1)
        rows.append((shares[..., None] * v[:, :, :seen]).sum(2))
    return torch.stack(rows, 2)
