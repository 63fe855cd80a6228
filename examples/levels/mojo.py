"""Level 5, our Mojo kernels, inside torch.

Where a block is an op of ours it is called by its name, ``torch.ops.maxvision.…``: one launch, or
a few that pass tiles on in registers and shared memory. Other blocks, and whole models, go through
``torch.compile(backend="maxvision")``, which fuses what stands between the products and runs all
of it, products too, in kernels of ops/. Gradients are programs of the same kernels.
"""

from functools import partial

import torch
from torch import Tensor

from examples.levels import eager
from maxvision import torch_ops

compile = partial(torch.compile, backend="maxvision", dynamic=False)

layer_norm = torch_ops.layer_norm
mlp = torch_ops.ffn_block
transformer = torch_ops.transformer_layer
conv_norm_relu = compile(eager.conv_norm_relu)
bottleneck = compile(eager.bottleneck)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attends with heads q, k, v[N, H, T, D], as level 1 does."""
    found: Tensor = torch_ops.attention(q, k, v, causal=causal)
    return found
