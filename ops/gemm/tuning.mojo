"""Which tile a product gets on Hopper."""

from std.math import ceildiv

from ..geometry import Geometry
from .hopper import PROCESSORS, Config

comptime CONFIGS: List[Config] = [
    Config(groups=2, columns=128, stages=3, blocks=2),
    Config(groups=2, columns=64, stages=4, blocks=2),
    Config(groups=1, columns=64, stages=6, blocks=2, split=True),
]
"""The tiles that are compiled."""


struct Choice(TrivialRegisterPassable):
    """A tile, and how many blocks share it."""

    var config: Int
    """Index in CONFIGS."""
    var splits: Int
    """Blocks of a cluster."""

    def __init__(out self, config: Int, splits: Int = 1):
        """Names the parts.

        Args:
            config: Index in CONFIGS.
            splits: Blocks of a cluster.
        """
        self.config, self.splits = config, splits


def choose(g: Geometry, width: Int) -> Choice:
    """Chooses the tile of a product.

    Args:
        g: Sizes.
        width: Channels of a step of K.

    Returns:
        The tile.
    """
    var rows = ceildiv(g.pixels(), 128)
    if g.f > 64 and rows * ceildiv(g.f, 128) >= 3 * PROCESSORS // 2:
        return Choice(0)
    if rows * ceildiv(g.f, 64) >= PROCESSORS:
        return Choice(1)
    var tiles = ceildiv(g.pixels(), 64) * ceildiv(g.f, 64)
    var steps = g.r * g.s * ceildiv(g.c, width)
    var splits = 1
    while splits < 8 and tiles * splits * 2 <= 2 * PROCESSORS and steps >= 4 * splits:
        splits *= 2
    return Choice(2, splits)
