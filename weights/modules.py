"""The rules of one torch module each: what its tensors are called and how they are laid out.

``module`` is the module's path in the checkpoint as a pattern, ``target`` the path in the model.
"""

from __future__ import annotations

from maxvision.weights.layout import oihw_to_rscf, out_in_to_in_out
from maxvision.weights.rules import Ignore, Rule

COUNTERS = Ignore(r".*\.num_batches_tracked", why="batch norm counts its training steps")


def conv(module: str, target: str) -> list[Rule]:
    """Maps a ``Conv2d`` without a bias."""
    return [Rule(rf"{module}\.weight", f"{target}.filter", oihw_to_rscf)]


def batchnorm(module: str, target: str) -> list[Rule]:
    """Maps a ``BatchNorm2d`` that will be folded into the convolution ``target``."""
    names = {"weight": "weight", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    return [Rule(rf"{module}\.{key}", f"{target}.batchnorm.{part}") for key, part in names.items()]


def layernorm(module: str, target: str) -> list[Rule]:
    """Maps a ``LayerNorm``."""
    return [Rule(rf"{module}\.{part}", f"{target}.{part}") for part in ("weight", "bias")]


def linear(module: str, target: str) -> list[Rule]:
    """Maps a ``Linear``."""
    return [
        Rule(rf"{module}\.weight", f"{target}.weight", out_in_to_in_out),
        Rule(rf"{module}\.bias", f"{target}.bias"),
    ]
