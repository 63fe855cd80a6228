"""Five levels: the same blocks and models from eager torch to our own kernels; docs/levels.md.

A level is a module with the same six functions: layer_norm, mlp, attention, conv_norm_relu,
transformer, bottleneck. The models (language.py, vision.py, graph.py) take one.
"""

import importlib
import os
from types import ModuleType

import torch

if not torch.cuda.is_available():  # before triton is imported, by torch too
    os.environ.setdefault("TRITON_INTERPRET", "1")

LEVELS = ("eager", "script", "compiled", "triton_kernels", "mojo")
"""From 1 to 5."""
BLOCKS = ("layer_norm", "mlp", "attention", "conv_norm_relu", "transformer", "bottleneck")


def level(name: str) -> ModuleType:
    """Imports a level.

    Raises:
        ModuleNotFoundError: If its package is missing: triton for ``triton_kernels``.
    """
    return importlib.import_module(f"examples.levels.{name}")
