"""Convolution, batch norm (Ioffe and Szegedy 2015, arXiv:1502.03167) and ReLU, in training."""

from torch import Tensor
from torch.nn import functional as F


def conv_norm_relu(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Computes relu(norm(conv(x)) + residual); the norm is by the statistics of this batch.

    Args:
        x: Images [N, C, H, W].
        weight: Filters [F, C, R, R] of an odd size, padded so that H and W stay.
        scale: Of the norm [F]; so is the shift.
        shift: See ``scale``.
        residual: Images [N, F, H, W] to add, if any.
    """
    y = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
    y = F.batch_norm(y, None, None, scale, shift, training=True)
    return F.relu(y if residual is None else y + residual)
