"""Which tile a product gets on Hopper: measured rows, and the nearest one for all others.

`python -m bench tune` writes the rows. A row holds M, F, the steps of K (128 bytes of channels,
tap by tap), whether a residual is added, the tile, the blocks that share it, and in the comment
the microseconds of a launch in a CUDA graph. A product that is not in the table takes the tile of
the row nearest in log2 M + log2 F + log2 steps: of products left out of the table, 98 % ran within
20 % of their best tile (H200, 2026-11-21).
"""

from std.bit import bit_width
from std.math import ceildiv

from ..geometry import Geometry
from .hopper import Config

comptime CONFIGS: List[Config] = [
    Config(groups=2, columns=128, stages=3, blocks=2),
    Config(groups=2, columns=128, stages=6, blocks=1, overlap=True),
    Config(groups=2, columns=64, stages=4, blocks=2),
    Config(groups=1, columns=64, stages=6, blocks=2),
    Config(groups=1, columns=64, stages=6, blocks=2, split=True),
    Config(groups=1, columns=32, stages=8, blocks=2, split=True),
]
"""The tiles that are compiled."""


struct Row(TrivialRegisterPassable):
    """A measured product and its fastest tile."""

    var pixels: Int
    """M."""
    var filters: Int
    """F."""
    var steps: Int
    """Steps of K."""
    var adds: Bool
    """Whether a residual is added."""
    var config: Int
    """Index in CONFIGS."""
    var splits: Int
    """Blocks that share a tile."""

    def __init__(
        out self, pixels: Int, filters: Int, steps: Int, adds: Bool, config: Int, splits: Int
    ):
        """Names the parts.

        Args:
            pixels: M.
            filters: F.
            steps: Steps of K.
            adds: Whether a residual is added.
            config: Index in CONFIGS.
            splits: Blocks that share a tile.
        """
        self.pixels, self.filters, self.steps = pixels, filters, steps
        self.adds, self.config, self.splits = adds, config, splits


comptime ROWS: List[Row] = [
    # rows: python -m bench tune, 2026-11-21, NVIDIA H200
    Row(1, 1000, 8, False, 4, 4),  # 2.82
    Row(8, 1000, 6, False, 5, 2),  # 2.90
    Row(8, 1000, 32, False, 4, 4),  # 3.99
    Row(32, 1000, 32, False, 4, 4),  # 4.48
    Row(49, 512, 36, False, 5, 4),  # 3.96
    Row(49, 512, 72, False, 4, 8),  # 5.30
    Row(49, 2048, 8, True, 5, 2),  # 3.58
    Row(49, 2048, 16, False, 5, 2),  # 4.14
    Row(64, 1000, 8, False, 5, 2),  # 3.13
    Row(64, 1000, 32, False, 5, 4),  # 4.52
    Row(98, 512, 32, False, 4, 4),  # 4.47
    Row(98, 512, 72, False, 4, 4),  # 6.48
    Row(98, 2048, 8, True, 5, 1),  # 4.29
    Row(98, 2048, 16, False, 4, 2),  # 5.28
    Row(100, 384, 6, False, 5, 2),  # 2.90
    Row(196, 256, 16, False, 5, 2),  # 3.57
    Row(196, 256, 36, False, 5, 4),  # 4.81
    Row(196, 256, 36, True, 4, 4),  # 5.41
    Row(196, 384, 27, False, 5, 4),  # 5.00
    Row(196, 512, 4, False, 5, 2),  # 3.11
    Row(196, 512, 16, False, 5, 2),  # 4.21
    Row(196, 512, 32, False, 5, 2),  # 5.51
    Row(196, 512, 72, False, 5, 2),  # 9.10
    Row(196, 1024, 8, False, 5, 1),  # 4.20
    Row(196, 2048, 8, True, 3, 1),  # 5.00
    Row(256, 1000, 6, False, 5, 1),  # 3.76
    Row(256, 1000, 32, False, 4, 2),  # 7.09
    Row(392, 256, 16, False, 5, 2),  # 4.03
    Row(392, 256, 36, False, 5, 4),  # 5.58
    Row(392, 384, 27, False, 4, 2),  # 6.03
    Row(392, 512, 16, False, 4, 2),  # 4.97
    Row(392, 512, 72, True, 4, 4),  # 11.45
    Row(392, 1024, 8, False, 3, 1),  # 4.76
    Row(392, 2048, 8, True, 3, 1),  # 5.98
    Row(392, 2048, 16, False, 3, 1),  # 8.46
    Row(394, 384, 6, True, 5, 2),  # 3.64
    Row(394, 1536, 6, False, 3, 1),  # 4.58
    Row(784, 128, 1, False, 5, 1),  # 2.78
    Row(784, 128, 9, False, 5, 2),  # 3.47
    Row(784, 192, 12, True, 5, 2),  # 4.28
    Row(784, 256, 8, False, 5, 2),  # 3.93
    Row(784, 256, 36, True, 4, 4),  # 7.09
    Row(784, 384, 27, False, 4, 2),  # 7.08
    Row(784, 512, 2, True, 5, 1),  # 3.67
    Row(784, 512, 16, False, 4, 2),  # 6.00
    Row(784, 512, 72, False, 4, 2),  # 15.11
    Row(784, 768, 3, False, 3, 1),  # 3.79
    Row(784, 1024, 4, True, 3, 1),  # 4.41
    Row(784, 1024, 8, False, 3, 1),  # 5.25
    Row(784, 2048, 8, True, 2, 1),  # 7.81
    Row(784, 2048, 16, False, 1, 1),  # 10.56
    Row(788, 1536, 6, False, 2, 1),  # 5.76
    Row(800, 384, 6, False, 5, 1),  # 4.02
    Row(1568, 128, 8, False, 5, 2),  # 3.95
    Row(1568, 128, 18, True, 5, 2),  # 5.08
    Row(1568, 192, 3, True, 5, 1),  # 3.67
    Row(1568, 192, 12, True, 5, 1),  # 5.29
    Row(1568, 256, 8, False, 3, 1),  # 4.60
    Row(1568, 256, 16, False, 4, 2),  # 5.93
    Row(1568, 256, 36, False, 4, 2),  # 8.74
    Row(1568, 512, 2, True, 3, 1),  # 3.90
    Row(1568, 512, 4, False, 3, 1),  # 4.20
    Row(1568, 512, 16, False, 3, 1),  # 7.18
    Row(1568, 512, 36, False, 3, 1),  # 12.21
    Row(1568, 768, 3, False, 2, 1),  # 4.58
    Row(1568, 1024, 4, True, 2, 1),  # 5.44
    Row(1568, 1024, 8, False, 2, 1),  # 6.78
    Row(1568, 2048, 8, True, 0, 1),  # 11.23
    Row(1568, 2048, 16, False, 0, 1),  # 15.57
    Row(1576, 384, 6, True, 3, 1),  # 4.68
    Row(1576, 384, 24, True, 3, 1),  # 9.08
    Row(3136, 64, 1, True, 5, 1),  # 3.18
    Row(3136, 64, 4, False, 5, 1),  # 3.42
    Row(3136, 64, 9, True, 5, 2),  # 4.29
    Row(3136, 128, 18, True, 4, 2),  # 6.37
    Row(3136, 192, 3, True, 3, 1),  # 4.10
    Row(3136, 192, 9, False, 3, 1),  # 5.58
    Row(3136, 256, 1, True, 3, 1),  # 3.65
    Row(3136, 256, 2, False, 3, 1),  # 3.69
    Row(3136, 256, 16, False, 3, 1),  # 7.27
    Row(3136, 256, 36, True, 3, 1),  # 13.39
    Row(3136, 512, 2, True, 2, 1),  # 4.76
    Row(3136, 512, 4, False, 2, 1),  # 5.16
    Row(3136, 512, 16, False, 2, 1),  # 9.84
    Row(3136, 512, 36, False, 1, 1),  # 16.17
    Row(3136, 1024, 4, True, 0, 1),  # 8.77
    Row(3136, 1024, 8, False, 0, 1),  # 10.44
    Row(3152, 384, 6, True, 2, 1),  # 6.11
    Row(3152, 384, 24, True, 1, 1),  # 12.77
    Row(3152, 1536, 6, False, 2, 1),  # 12.58
    Row(6272, 64, 4, False, 3, 1),  # 3.88
    Row(6272, 64, 9, False, 4, 2),  # 5.12
    Row(6272, 128, 1, False, 3, 1),  # 3.38
    Row(6272, 128, 8, False, 3, 1),  # 5.36
    Row(6272, 128, 18, True, 3, 1),  # 9.11
    Row(6272, 192, 3, True, 2, 1),  # 5.32
    Row(6272, 192, 12, True, 1, 1),  # 9.55
    Row(6272, 256, 1, True, 2, 1),  # 4.53
    Row(6272, 256, 8, False, 2, 1),  # 7.02
    Row(6272, 256, 18, False, 1, 1),  # 10.74
    Row(6272, 256, 36, True, 1, 1),  # 16.69
    Row(6272, 512, 16, False, 0, 1),  # 15.17
    Row(6272, 1024, 4, True, 2, 1),  # 13.62
    Row(6304, 384, 6, False, 2, 1),  # 8.53
    Row(6304, 384, 24, True, 0, 1),  # 20.93
    Row(12544, 64, 1, False, 3, 1),  # 3.38
    Row(12544, 64, 4, True, 3, 1),  # 4.66
    Row(12544, 64, 9, True, 3, 1),  # 6.36
    Row(12544, 128, 1, False, 2, 1),  # 4.15
    Row(12544, 128, 8, False, 2, 1),  # 7.66
    Row(12544, 128, 18, False, 1, 1),  # 10.95
    Row(12544, 192, 9, False, 3, 1),  # 11.57
    Row(12544, 192, 12, True, 3, 1),  # 14.98
    Row(12544, 256, 2, False, 2, 1),  # 6.22
    Row(12544, 256, 8, False, 0, 1),  # 10.65
    Row(12544, 256, 16, False, 0, 1),  # 15.71
    Row(12544, 512, 4, False, 2, 1),  # 11.41
    Row(12544, 512, 16, False, 1, 1),  # 24.23
    Row(12544, 512, 72, False, 1, 1),  # 82.40
    Row(12544, 1024, 4, True, 0, 1),  # 24.89
    Row(12544, 2048, 8, True, 0, 1),  # 63.73
    Row(12608, 384, 24, True, 1, 1),  # 34.55
    Row(25088, 64, 1, True, 2, 1),  # 4.76
    Row(25088, 64, 4, True, 2, 1),  # 6.23
    Row(25088, 128, 18, True, 0, 1),  # 18.30
    Row(25088, 192, 3, False, 2, 1),  # 9.50
    Row(25088, 256, 1, False, 2, 1),  # 6.94
    Row(25088, 256, 8, False, 1, 1),  # 16.45
    Row(25088, 512, 2, True, 2, 1),  # 19.53
    Row(50176, 64, 4, False, 3, 1),  # 8.26
    Row(50176, 128, 4, False, 2, 1),  # 12.03
    Row(50176, 128, 18, False, 1, 1),  # 27.39
    Row(50176, 192, 3, False, 2, 1),  # 14.90
    Row(50176, 192, 3, True, 3, 1),  # 20.57
    Row(50176, 192, 12, True, 2, 1),  # 43.99
    Row(50176, 256, 1, True, 2, 1),  # 19.26
    Row(50176, 256, 2, False, 0, 1),  # 14.81
    Row(50176, 256, 36, True, 1, 1),  # 93.65
    Row(50176, 384, 27, False, 1, 1),  # 101.83
    Row(50176, 512, 4, False, 1, 1),  # 34.80
    Row(50176, 512, 16, False, 0, 1),  # 89.39
    Row(50176, 1024, 4, True, 0, 1),  # 81.31
    Row(100352, 64, 1, False, 2, 1),  # 6.90
    Row(200704, 64, 9, False, 2, 1),  # 39.22
    Row(200704, 128, 9, False, 1, 1),  # 61.37
    Row(200704, 128, 18, False, 0, 1),  # 95.49
    Row(200704, 192, 9, False, 2, 1),  # 112.21
    Row(200704, 256, 1, False, 2, 1),  # 40.18
    Row(200704, 256, 1, True, 3, 1),  # 63.70
    Row(200704, 256, 8, False, 1, 1),  # 108.14
    Row(200704, 512, 2, True, 2, 1),  # 127.98
    Row(200704, 512, 4, False, 1, 1),  # 138.03
    Row(802816, 64, 1, False, 3, 1),  # 56.57
    Row(802816, 64, 4, False, 3, 1),  # 124.95
    Row(802816, 64, 9, False, 2, 1),  # 141.67
    Row(802816, 128, 4, False, 1, 1),  # 158.27
    Row(802816, 256, 1, False, 1, 1),  # 144.50
    Row(802816, 256, 1, True, 3, 1),  # 235.83
    # end of rows
]
"""The table."""


def _log2(number: Int) -> Int:
    """Approximates 256 times the logarithm, by a line between powers of two."""
    var whole = bit_width(number) - 1
    return (whole << 8) + ((number - (1 << whole)) << 8 >> whole)


def choose(g: Geometry, width: Int, adds: Bool, more: Int = 0) -> Row:
    """Chooses the tile of a product.

    Args:
        g: Sizes.
        width: Channels of a step of K.
        adds: Whether a residual is added.
        more: Steps of a second source.

    Returns:
        The nearest row whose splits the product has steps for.
    """
    var steps = g.r * g.s * ceildiv(g.c, width) + more
    var m, f, k = _log2(g.pixels()), _log2(g.f), _log2(steps)
    var best = Row(0, 0, 0, False, 0, 1)
    var nearest = Int.MAX
    for row in materialize[ROWS]():
        var distance = abs(_log2(row.pixels) - m) + abs(_log2(row.filters) - f)
        distance += abs(_log2(row.steps) - k) + (128 if row.adds != adds else 0)
        var closer = distance < nearest or (distance == nearest and row.pixels > best.pixels)
        if closer and row.splits <= steps:
            best, nearest = row, distance
    return best
