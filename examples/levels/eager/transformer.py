"""A transformer block that norms first (Xiong et al. 2020, arXiv:2002.04745)."""

from torch import Tensor
from torch.nn import functional as F

from examples.levels.eager.attention import attention
from examples.levels.eager.layer_norm import layer_norm
from examples.levels.eager.mlp import mlp


def transformer(
    x: Tensor, norm1_weight: Tensor, norm1_bias: Tensor, in_weight: Tensor, in_bias: Tensor,
    out_weight: Tensor, out_bias: Tensor, norm2_weight: Tensor, norm2_bias: Tensor,
    weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, heads: int, causal: bool,
) -> Tensor:  # fmt: skip
    """Adds attention to tokens x[N, T, C], then an MLP, each behind a layer norm."""
    n, t, c = x.shape
    qkv = F.linear(layer_norm(x, norm1_weight, norm1_bias), in_weight, in_bias)
    q, k, v = qkv.view(n, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4).unbind(0)
    seen = attention(q, k, v, causal).transpose(1, 2).reshape(n, t, c)
    x = x + F.linear(seen, out_weight, out_bias)
    return x + mlp(layer_norm(x, norm2_weight, norm2_bias), weight1, bias1, weight2, bias2)
