"""The rules of one torch module each: what its tensors are called; and what their shapes tell.

``module`` is the module's path in the checkpoint as a pattern, ``target`` the path in the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from maxvision.weights.layout import Shape
from maxvision.weights.rules import Ignore, Rule

COUNTERS = Ignore(r".*\.num_batches_tracked", why="batch norm counts its training steps")


def conv(module: str, target: str, *, bias: bool = False) -> list[Rule]:
    """Maps a ``Conv2d``."""
    parts = ("weight", "bias") if bias else ("weight",)
    return [Rule(rf"{module}\.{part}", f"{target}.{part}") for part in parts]


def batchnorm(module: str, target: str) -> list[Rule]:
    """Maps a ``BatchNorm2d``."""
    names = {"weight": "weight", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    return [Rule(rf"{module}\.{key}", f"{target}.{part}") for key, part in names.items()]


def layernorm(module: str, target: str) -> list[Rule]:
    """Maps a ``LayerNorm``."""
    return [Rule(rf"{module}\.{part}", f"{target}.{part}") for part in ("weight", "bias")]


def linear(module: str, target: str) -> list[Rule]:
    """Maps a ``Linear``."""
    return [
        Rule(rf"{module}\.weight", f"{target}.weight"),
        Rule(rf"{module}\.bias", f"{target}.bias"),
    ]


def depths(shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Counts the blocks of each stage."""
    blocks = {
        (int(match[1]), int(match[2]))
        for match in (re.match(r"stages\.(\d+)\.(\d+)\.", name) for name in shapes)
        if match
    }
    stages = len({stage for stage, _ in blocks})
    return tuple(len([block for stage, block in blocks if stage == i]) for i in range(stages))


def filters(shapes: Mapping[str, Shape], weight: str, default: Shape) -> Shape:
    """Returns the shape [F, C, R, S] of ``weight``, or the default where none of four is stored."""
    shape = shapes.get(weight, default)
    return shape if len(shape) == 4 else default


def first(shapes: Mapping[str, Shape], weight: str) -> int:
    """Returns the first dimension of what is stored for ``weight``, or 1 if it is missing."""
    return shapes.get(weight, (1,))[0]
