"""Level 3, torch.compile: Inductor writes a kernel for what stands between products.

Elementwise ops and reductions in a row become one kernel (C++ on a CPU, Triton on a GPU), in which
values stay in registers. Products, convolutions and attention stay those of torch's libraries. The
first call compiles, which takes seconds; see what was written with ``TORCH_LOGS=output_code``.
"""

import torch

from examples.levels import eager

layer_norm = torch.compile(eager.layer_norm, dynamic=False)
mlp = torch.compile(eager.mlp, dynamic=False)
attention = torch.compile(eager.attention, dynamic=False)
conv_norm_relu = torch.compile(eager.conv_norm_relu, dynamic=False)
transformer = torch.compile(eager.transformer, dynamic=False)
bottleneck = torch.compile(eager.bottleneck, dynamic=False)
