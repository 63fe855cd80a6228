"""What the ops know of the kernels for GPUs: those they call, and the ops that only a GPU runs.

Where ops are compiled for a CPU, no_gpu.mojo is in the place of this module, and none is there that
only this one leads to: most of the lines, and of the time that it takes to read them.
"""
from .attention.gpu import attention_gpu
from .conv2d.chain import *
from .conv2d.gpu import conv2d_gpu
from .depthwise_qkv.gpu import depthwise_qkv_gpu
from .gemm.gpu import gemm as gemm_gpu
from .gemm.gpu import gemm_group as gemm_group_gpu
from .gemm.gpu import gemm_shortcut as gemm_shortcut_gpu
from .group_norm.gpu import group_norm_gpu
from .mlp import *
from .permute import *
from .reduce.gpu import reduce_gpu
from .sparse_conv2d.gpu import sparse_conv2d_gpu
from .sparse_conv2d.packed import *
from .squeeze_excite.hopper import squeeze_excite_gpu
from .stem import *
from .token_linear import *
