"""The bottleneck of a ResNet (He et al. 2015, arXiv:1512.03385, figure 5)."""

from torch import Tensor

from examples.levels.eager.conv_norm_relu import conv_norm_relu


def bottleneck(
    x: Tensor, weight1: Tensor, scale1: Tensor, shift1: Tensor, weight2: Tensor, scale2: Tensor,
    shift2: Tensor, weight3: Tensor, scale3: Tensor, shift3: Tensor,
) -> Tensor:  # fmt: skip
    """Narrows images x[N, C, H, W] by a 1x1, convolves them by a 3x3, widens them and adds x."""
    y = conv_norm_relu(x, weight1, scale1, shift1)
    y = conv_norm_relu(y, weight2, scale2, shift2)
    return conv_norm_relu(y, weight3, scale3, shift3, x)
