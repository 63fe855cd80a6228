"""The MLP of a transformer, with GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Computes gelu(x weight1^T + bias1) weight2^T + bias2.

    Args:
        x: Tokens [..., C].
        weight1: To the hidden channels [H, C]; its bias is [H].
        bias1: See ``weight1``.
        weight2: Back to the tokens' channels [C, H]; its bias is [C].
        bias2: See ``weight2``.
    """
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


def mlp_in_steps(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Computes the same badly: GELU op by op, each of which reads all hidden channels."""
    hidden = x @ weight1.mT
    hidden = hidden + bias1
    share = torch.erf(hidden / math.sqrt(2.0))
    share = (share + 1.0) * 0.5
    hidden = hidden * share
    return hidden @ weight2.mT + bias2
