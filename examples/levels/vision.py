"""A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) of the blocks of any level."""

from types import ModuleType

import torch
from torch import Tensor, nn

from examples.levels.modules import Norm, Transformer


class VisionTransformer(nn.Module):
    """A classifier of pictures, as Dosovitskiy et al. 2020 (arXiv:2010.11929), by the mean token.

    Args:
        level: The blocks.
        classes: Of pictures.
        size: Edge of a picture, px.
        patch: Edge of a patch, px.
        width: Channels of a token.
        heads: Of attention.
        layers: Transformer blocks.
    """

    def __init__(
        self, level: ModuleType, classes: int, size: int, patch: int, width: int = 64,
        heads: int = 4, layers: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(torch.randn((size // patch) ** 2, width) * 0.02)
        self.layers = nn.ModuleList(
            [Transformer(level, width, heads, causal=False) for _ in range(layers)]
        )
        self.norm, self.head = Norm(level, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Gives logits [N, classes] of pictures [N, 3, H, W]."""
        x = self.patches(x).flatten(2).mT + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))
