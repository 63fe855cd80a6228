"""Level 2, TorchScript: the functions of level 1 as a graph that runs without Python.

The ops and the memory that they move stay those of level 1. What goes away is the interpreter's
time between them, which shows where ops are small. TorchScript reads a function's source, so that
loops and conditions stay in the graph: ``torch.jit.script(attention_by_queries)`` loops in C++.
torch has deprecated it in favour of torch.compile; much that was deployed is written in it.
"""

import warnings

import torch

from examples.levels import eager

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.compile is what torch goes on with
    layer_norm = torch.jit.script(eager.layer_norm)
    mlp = torch.jit.script(eager.mlp)
    attention = torch.jit.script(eager.attention)
    conv_norm_relu = torch.jit.script(eager.conv_norm_relu)
    transformer = torch.jit.script(eager.transformer)
    bottleneck = torch.jit.script(eager.bottleneck)
