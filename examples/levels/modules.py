"""Layers that hold the weights of blocks; a level's functions compute them.

The models are made of these. They name their weights alike at all levels, so one ``state_dict``
fits all.
"""

from types import ModuleType

import torch
from torch import Tensor, nn


class Transformer(nn.Module):
    """The weights of a transformer block, which a level's function computes.

    Args:
        level: Whose function.
        width: Channels of a token.
        heads: Of attention.
        causal: Whether a token sees none after it.
    """

    def __init__(self, level: ModuleType, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal, self.block = heads, causal, level.transformer

    def forward(self, x: Tensor) -> Tensor:
        """Computes tokens x[N, T, C]."""
        return self.block(
            x, self.norm1.weight, self.norm1.bias, self.qkv.weight, self.qkv.bias,
            self.out.weight, self.out.bias, self.norm2.weight, self.norm2.bias,
            self.hidden.weight, self.hidden.bias, self.back.weight, self.back.bias,
            self.heads, self.causal,
        )  # fmt: skip


class Norm(nn.LayerNorm):
    """A layer norm that a level's function computes."""

    def __init__(self, level: ModuleType, width: int) -> None:
        super().__init__(width)
        self.function = level.layer_norm

    def forward(self, x: Tensor) -> Tensor:
        """Norms the last axis of x."""
        return self.function(x, self.weight, self.bias)


class MLP(nn.Module):
    """Two linear layers with GELU between them, which a level's function computes."""

    def __init__(self, level: ModuleType, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.hidden, self.back = nn.Linear(width, hidden), nn.Linear(hidden, out)
        self.function = level.mlp

    def forward(self, x: Tensor) -> Tensor:
        """Computes x[..., C]."""
        return self.function(
            x, self.hidden.weight, self.hidden.bias, self.back.weight, self.back.bias
        )


def at_level(model: nn.Module, name: str) -> nn.Module:
    """Makes a model of a level's blocks run as the level does: as a script, or compiled.

    Args:
        model: Whose blocks are the level's; eager ones for what is compiled as a whole.
        name: Of the level.
    """
    if name == "script":
        return torch.jit.script(model)
    if name in ("compiled", "mojo"):
        backend = "inductor" if name == "compiled" else "maxvision"
        model.compile(backend=backend, dynamic=False)
    return model
