"""Level 1, eager torch: each line is an op, and each op reads and writes memory once.

The other levels compute the same, and are compared with these files.
"""

from examples.levels.eager.attention import attention
from examples.levels.eager.bottleneck import bottleneck
from examples.levels.eager.conv_norm_relu import conv_norm_relu
from examples.levels.eager.layer_norm import layer_norm
from examples.levels.eager.mlp import mlp
from examples.levels.eager.transformer import transformer

__all__ = ["attention", "bottleneck", "conv_norm_relu", "layer_norm", "mlp", "transformer"]
