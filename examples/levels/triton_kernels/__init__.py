"""Level 4, Triton: kernels written in Python, each with its way back.

A kernel is what one program does with a tile: it loads the tile, computes in registers and stores
the result. Triton chooses threads, shared memory and the order of loads (Tillet et al. 2019,
doi:10.1145/3315508.3329973). Without a GPU the kernels run in Triton's interpreter: right, and
thousands of times slower.
"""

from examples.levels.triton_kernels.attention import attention
from examples.levels.triton_kernels.bottleneck import bottleneck
from examples.levels.triton_kernels.conv_norm_relu import conv_norm_relu
from examples.levels.triton_kernels.layer_norm import layer_norm
from examples.levels.triton_kernels.mlp import mlp
from examples.levels.triton_kernels.transformer import transformer

__all__ = ["attention", "bottleneck", "conv_norm_relu", "layer_norm", "mlp", "transformer"]
