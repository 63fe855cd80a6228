"""Which tile a product gets on Hopper: measured rows, and the nearest one for all others.

`python -m maxvision.ops.gemm.tune` writes the rows. A row holds M, F, the steps of K (128 bytes of channels,
tap by tap), the epilogue as far as it costs time, the tile, the blocks that share it, and in the comment
the microseconds of a launch in a CUDA graph. A product that is not in the table takes the tile of
the row nearest in log2 M + log2 F + log2 steps: of products left out of the table, 95 % ran within
20 % of their best tile (H200, 2026-11-23).
"""

from std.bit import bit_width
from std.math import ceildiv

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.tile import TileConfig
from .hopper import Config

comptime CONFIGS: List[Config] = [
    Config(groups=2, columns=128, stages=3, blocks=2),
    Config(groups=2, columns=128, stages=6, blocks=1, overlap=True),
    Config(groups=2, columns=64, stages=4, blocks=2),
    Config(groups=1, columns=64, stages=6, blocks=2),
    Config(groups=1, columns=64, stages=6, blocks=2, split=True),
    Config(groups=1, columns=32, stages=8, blocks=2, split=True),
]
"""The tiles of hopper.mojo that are compiled."""
comptime RESIDENT: List[TileConfig] = [
    TileConfig(groups=1, columns=64, split=True),
    TileConfig(groups=1, columns=32, split=True),
    TileConfig(groups=1, columns=64),
    TileConfig(groups=1, columns=32),
]
"""The blocks of resident.mojo that are compiled; rows count them on from CONFIGS."""
comptime ALIKE: List[Int] = [4, 5, 3, 5]
"""The tile of CONFIGS that is most like each block of RESIDENT."""


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
    var gelu: Bool
    """Whether the result goes through a GELU."""
    var config: Int
    """Index in CONFIGS, or the length of it more than one in RESIDENT."""
    var splits: Int
    """Blocks that share a tile."""

    def __init__(
        out self,
        pixels: Int,
        filters: Int,
        steps: Int,
        epilogue: StaticString,
        config: Int,
        splits: Int,
    ):
        """Names the parts.

        Args:
            pixels: M.
            filters: F.
            steps: Steps of K.
            epilogue: As far as it costs time: none, add or gelu.
            config: Index in CONFIGS, or the length of it more than one in RESIDENT.
            splits: Blocks that share a tile.
        """
        self.pixels, self.filters, self.steps = pixels, filters, steps
        self.adds, self.gelu = epilogue == "add", epilogue == "gelu"
        self.config, self.splits = config, splits


comptime ROWS: List[Row] = [
    # rows: ops/gemm/tune.py, 2026-11-23, NVIDIA H200
    Row(8, 1000, 6, "none", 9, 1),  # 2.00
    Row(12, 1000, 8, "none", 6, 4),  # 2.21
    Row(16, 1000, 6, "none", 9, 1),  # 2.09
    Row(16, 1000, 8, "none", 6, 4),  # 2.21
    Row(48, 1000, 8, "none", 9, 1),  # 2.38
    Row(48, 1000, 32, "none", 6, 8),  # 3.36
    Row(49, 512, 32, "none", 7, 4),  # 2.97
    Row(49, 512, 36, "none", 6, 8),  # 3.24
    Row(49, 512, 72, "add", 7, 8),  # 3.67
    Row(49, 2048, 16, "none", 7, 2),  # 3.46
    Row(98, 512, 32, "none", 6, 8),  # 3.60
    Row(98, 512, 72, "add", 6, 8),  # 5.11
    Row(98, 2048, 8, "add", 9, 1),  # 2.97
    Row(98, 2048, 16, "none", 6, 2),  # 4.79
    Row(128, 1000, 32, "none", 6, 4),  # 5.15
    Row(147, 512, 4, "none", 9, 1),  # 1.87
    Row(147, 512, 72, "add", 6, 8),  # 6.55
    Row(147, 512, 72, "none", 6, 8),  # 6.04
    Row(147, 2048, 16, "none", 3, 1),  # 5.59
    Row(196, 256, 18, "none", 6, 4),  # 3.20
    Row(196, 512, 16, "none", 7, 2),  # 3.45
    Row(196, 512, 72, "add", 6, 4),  # 7.11
    Row(196, 512, 72, "none", 6, 4),  # 6.87
    Row(196, 2048, 8, "add", 3, 1),  # 4.15
    Row(197, 384, 24, "add", 6, 8),  # 4.36
    Row(197, 1536, 6, "gelu", 9, 1),  # 3.20
    Row(256, 1000, 6, "none", 8, 1),  # 2.91
    Row(256, 1000, 8, "none", 9, 1),  # 2.92
    Row(256, 1000, 32, "none", 6, 2),  # 6.72
    Row(294, 512, 32, "none", 6, 4),  # 5.30
    Row(294, 512, 72, "add", 6, 4),  # 8.07
    Row(294, 512, 72, "none", 6, 4),  # 7.53
    Row(294, 2048, 16, "none", 3, 1),  # 6.05
    Row(392, 256, 16, "none", 7, 4),  # 3.47
    Row(392, 256, 36, "add", 6, 4),  # 4.86
    Row(392, 512, 16, "none", 6, 4),  # 4.45
    Row(392, 512, 72, "add", 6, 2),  # 11.44
    Row(392, 1024, 8, "none", 3, 1),  # 3.76
    Row(392, 2048, 8, "add", 3, 1),  # 4.98
    Row(394, 384, 6, "add", 9, 1),  # 2.61
    Row(394, 384, 24, "add", 6, 4),  # 4.94
    Row(394, 1536, 6, "gelu", 3, 1),  # 3.77
    Row(588, 192, 3, "none", 9, 1),  # 1.85
    Row(588, 256, 2, "none", 9, 1),  # 1.85
    Row(588, 256, 16, "none", 6, 4),  # 3.94
    Row(588, 256, 36, "add", 6, 4),  # 6.10
    Row(588, 512, 4, "none", 8, 1),  # 2.42
    Row(588, 512, 16, "none", 3, 1),  # 5.19
    Row(588, 512, 32, "none", 6, 2),  # 7.34
    Row(588, 512, 72, "none", 6, 2),  # 11.33
    Row(588, 1024, 8, "none", 3, 1),  # 3.92
    Row(588, 2048, 8, "add", 2, 1),  # 5.76
    Row(588, 2048, 16, "none", 1, 1),  # 7.57
    Row(591, 384, 24, "add", 6, 2),  # 6.15
    Row(591, 1536, 6, "gelu", 3, 1),  # 4.40
    Row(784, 128, 18, "none", 6, 4),  # 3.50
    Row(784, 192, 12, "add", 7, 2),  # 3.75
    Row(784, 256, 8, "none", 9, 1),  # 2.92
    Row(784, 256, 36, "add", 6, 2),  # 7.38
    Row(784, 256, 36, "none", 6, 4),  # 6.49
    Row(784, 384, 27, "none", 6, 2),  # 6.69
    Row(784, 512, 4, "none", 3, 1),  # 2.91
    Row(784, 512, 72, "add", 6, 2),  # 13.02
    Row(784, 768, 3, "gelu", 3, 1),  # 3.10
    Row(784, 1024, 4, "add", 3, 1),  # 3.44
    Row(784, 2048, 8, "add", 1, 1),  # 6.38
    Row(788, 1536, 6, "gelu", 2, 1),  # 5.25
    Row(1176, 192, 3, "none", 9, 1),  # 2.34
    Row(1176, 256, 2, "none", 3, 1),  # 2.40
    Row(1176, 256, 36, "none", 6, 2),  # 7.34
    Row(1176, 512, 4, "none", 3, 1),  # 2.96
    Row(1176, 512, 32, "none", 3, 1),  # 9.34
    Row(1176, 512, 72, "add", 8, 1),  # 18.42
    Row(1568, 128, 1, "none", 9, 1),  # 1.75
    Row(1568, 128, 9, "none", 9, 1),  # 3.09
    Row(1568, 128, 18, "none", 7, 2),  # 4.33
    Row(1568, 192, 3, "add", 3, 1),  # 2.90
    Row(1568, 192, 3, "none", 8, 1),  # 2.47
    Row(1568, 192, 12, "add", 9, 1),  # 4.51
    Row(1568, 256, 18, "none", 3, 1),  # 5.75
    Row(1568, 256, 36, "add", 6, 2),  # 8.64
    Row(1568, 512, 2, "add", 3, 1),  # 2.96
    Row(1568, 512, 16, "none", 3, 1),  # 5.97
    Row(1568, 768, 3, "gelu", 2, 1),  # 4.12
    Row(1568, 1024, 4, "add", 2, 1),  # 4.37
    Row(1568, 1024, 8, "none", 1, 1),  # 5.54
    Row(1568, 2048, 8, "add", 0, 1),  # 9.57
    Row(1568, 2048, 16, "none", 0, 1),  # 13.68
    Row(1576, 384, 24, "add", 3, 1),  # 8.04
    Row(2352, 128, 1, "none", 8, 1),  # 2.23
    Row(2352, 192, 3, "none", 3, 1),  # 2.66
    Row(2352, 192, 12, "add", 3, 1),  # 4.78
    Row(2352, 256, 8, "none", 3, 1),  # 3.87
    Row(2352, 256, 36, "add", 8, 1),  # 10.77
    Row(2352, 512, 72, "add", 1, 1),  # 24.49
    Row(2364, 384, 6, "add", 3, 1),  # 4.09
    Row(2364, 384, 24, "add", 3, 1),  # 8.66
    Row(3136, 64, 1, "add", 9, 1),  # 1.91
    Row(3136, 64, 4, "add", 8, 1),  # 2.62
    Row(3136, 64, 9, "none", 8, 1),  # 2.99
    Row(3136, 128, 1, "none", 3, 1),  # 2.30
    Row(3136, 128, 9, "none", 3, 1),  # 3.89
    Row(3136, 128, 18, "none", 6, 2),  # 5.71
    Row(3136, 256, 1, "gelu", 3, 1),  # 2.68
    Row(3136, 256, 2, "none", 3, 1),  # 2.69
    Row(3136, 256, 16, "none", 3, 1),  # 6.08
    Row(3136, 512, 2, "add", 2, 1),  # 3.82
    Row(3136, 512, 16, "none", 1, 1),  # 7.75
    Row(3136, 512, 36, "none", 1, 1),  # 14.04
    Row(3136, 1024, 8, "none", 0, 1),  # 8.51
    Row(3136, 2048, 16, "none", 1, 1),  # 26.61
    Row(3152, 384, 6, "add", 2, 1),  # 5.04
    Row(3152, 384, 24, "add", 1, 1),  # 10.74
    Row(4704, 128, 1, "none", 3, 1),  # 2.37
    Row(4704, 128, 18, "none", 8, 1),  # 6.53
    Row(4704, 192, 3, "add", 3, 1),  # 3.37
    Row(4704, 192, 9, "none", 3, 1),  # 4.69
    Row(4704, 192, 12, "add", 3, 1),  # 5.82
    Row(4704, 256, 18, "none", 1, 1),  # 8.30
    Row(4704, 512, 4, "none", 2, 1),  # 5.70
    Row(4704, 768, 3, "gelu", 2, 1),  # 6.60
    Row(4728, 384, 6, "add", 2, 1),  # 5.42
    Row(4728, 384, 6, "none", 1, 1),  # 4.93
    Row(4728, 384, 24, "add", 1, 1),  # 10.93
    Row(4728, 1536, 6, "gelu", 0, 1),  # 15.55
    Row(6272, 64, 9, "add", 8, 1),  # 4.01
    Row(6272, 128, 8, "none", 3, 1),  # 4.13
    Row(6272, 128, 18, "add", 8, 1),  # 7.28
    Row(6272, 192, 3, "add", 2, 1),  # 4.22
    Row(6272, 192, 9, "none", 1, 1),  # 6.03
    Row(6272, 192, 12, "add", 1, 1),  # 7.75
    Row(6272, 256, 1, "gelu", 2, 1),  # 3.50
    Row(6272, 256, 8, "none", 1, 1),  # 5.46
    Row(6272, 256, 36, "none", 1, 1),  # 13.73
    Row(6272, 512, 4, "none", 1, 1),  # 6.05
    Row(6272, 512, 72, "add", 0, 1),  # 49.95
    Row(6272, 1024, 4, "add", 2, 1),  # 11.62
    Row(6272, 1024, 8, "none", 1, 1),  # 13.59
    Row(6272, 2048, 16, "none", 0, 1),  # 44.24
    Row(6304, 384, 6, "add", 0, 1),  # 7.87
    Row(6304, 384, 24, "add", 0, 1),  # 18.65
    Row(6304, 1536, 6, "gelu", 1, 1),  # 20.34
    Row(6400, 384, 6, "none", 2, 1),  # 7.72
    Row(9408, 64, 1, "none", 3, 1),  # 2.30
    Row(9408, 64, 4, "add", 3, 1),  # 3.51
    Row(9408, 64, 9, "add", 9, 1),  # 5.01
    Row(9408, 64, 9, "none", 8, 1),  # 4.53
    Row(9408, 192, 3, "add", 2, 1),  # 4.52
    Row(9408, 192, 9, "none", 2, 1),  # 6.89
    Row(9408, 192, 12, "add", 2, 1),  # 8.70
    Row(9408, 256, 1, "add", 2, 1),  # 4.71
    Row(9408, 256, 1, "gelu", 2, 1),  # 4.59
    Row(9408, 256, 8, "none", 0, 1),  # 8.30
    Row(9408, 512, 4, "none", 1, 1),  # 8.42
    Row(9408, 768, 3, "gelu", 0, 1),  # 11.65
    Row(9408, 1024, 4, "add", 1, 1),  # 17.35
    Row(9456, 384, 6, "add", 0, 1),  # 8.73
    Row(12544, 64, 9, "add", 3, 1),  # 5.17
    Row(12544, 64, 9, "none", 3, 1),  # 4.88
    Row(12544, 128, 9, "none", 1, 1),  # 5.84
    Row(12544, 128, 18, "add", 1, 1),  # 9.46
    Row(12544, 192, 9, "none", 1, 1),  # 9.93
    Row(12544, 256, 1, "gelu", 3, 1),  # 5.05
    Row(12544, 384, 27, "none", 1, 1),  # 30.66
    Row(12544, 512, 2, "add", 2, 1),  # 8.60
    Row(12544, 512, 72, "none", 1, 1),  # 78.43
    Row(12544, 1024, 4, "add", 0, 1),  # 22.75
    Row(12544, 2048, 8, "add", 0, 1),  # 60.06
    Row(12800, 384, 6, "none", 1, 1),  # 11.80
    Row(18816, 192, 3, "add", 2, 1),  # 7.45
    Row(18816, 192, 3, "none", 2, 1),  # 6.23
    Row(18816, 192, 9, "none", 2, 1),  # 12.12
    Row(18816, 256, 1, "add", 0, 1),  # 6.83
    Row(18816, 256, 1, "gelu", 2, 1),  # 6.22
    Row(18816, 768, 3, "gelu", 1, 1),  # 20.70
    Row(25088, 64, 4, "add", 2, 1),  # 5.24
    Row(25088, 64, 4, "none", 3, 1),  # 4.53
    Row(25088, 64, 9, "none", 3, 1),  # 7.40
    Row(25088, 128, 9, "none", 1, 1),  # 9.06
    Row(25088, 192, 3, "none", 1, 1),  # 7.62
    Row(25088, 256, 1, "add", 2, 1),  # 7.59
    Row(25088, 256, 2, "none", 2, 1),  # 7.43
    Row(25088, 256, 8, "none", 1, 1),  # 13.29
    Row(25088, 1024, 8, "none", 1, 1),  # 50.93
    Row(25216, 384, 6, "add", 1, 1),  # 24.60
    Row(25216, 384, 24, "add", 1, 1),  # 53.40
    Row(25216, 1536, 6, "gelu", 0, 1),  # 66.28
    Row(37632, 64, 4, "add", 2, 1),  # 7.30
    Row(37632, 128, 18, "add", 0, 1),  # 24.12
    Row(37632, 192, 3, "add", 3, 1),  # 13.56
    Row(37632, 192, 12, "add", 2, 1),  # 33.99
    Row(37632, 256, 1, "add", 0, 1),  # 11.94
    Row(37632, 512, 2, "add", 2, 1),  # 26.43
    Row(37632, 512, 4, "none", 1, 1),  # 23.47
    Row(37632, 768, 3, "gelu", 0, 1),  # 37.92
    Row(50176, 64, 4, "add", 3, 1),  # 8.34
    Row(50176, 64, 9, "add", 3, 1),  # 13.12
    Row(50176, 128, 1, "none", 2, 1),  # 5.72
    Row(50176, 128, 4, "none", 1, 1),  # 9.07
    Row(50176, 128, 18, "add", 1, 1),  # 25.86
    Row(50176, 128, 18, "none", 1, 1),  # 23.47
    Row(50176, 256, 1, "gelu", 0, 1),  # 13.21
    Row(50176, 256, 2, "none", 0, 1),  # 12.85
    Row(50176, 512, 16, "none", 1, 1),  # 86.53
    Row(50176, 1024, 4, "add", 0, 1),  # 79.82
    Row(75264, 256, 1, "gelu", 2, 1),  # 19.51
    Row(75264, 256, 1, "none", 1, 1),  # 15.13
    Row(100352, 64, 1, "add", 2, 1),  # 7.86
    Row(100352, 64, 4, "none", 3, 1),  # 17.62
    Row(100352, 64, 9, "add", 2, 1),  # 22.00
    Row(100352, 128, 4, "none", 1, 1),  # 21.74
    Row(100352, 192, 3, "none", 2, 1),  # 25.83
    Row(100352, 256, 1, "add", 2, 1),  # 33.56
    Row(150528, 64, 1, "add", 3, 1),  # 16.55
    Row(200704, 64, 9, "none", 2, 1),  # 37.90
    Row(200704, 128, 1, "none", 2, 1),  # 24.09
    Row(200704, 128, 9, "none", 1, 1),  # 55.40
    Row(200704, 128, 18, "add", 0, 1),  # 100.67
    Row(200704, 192, 9, "none", 2, 1),  # 107.89
    Row(200704, 192, 12, "add", 2, 1),  # 158.88
    Row(200704, 256, 8, "none", 1, 1),  # 102.20
    Row(401408, 64, 1, "none", 2, 1),  # 28.47
    Row(401408, 256, 1, "add", 3, 1),  # 124.17
    Row(401408, 256, 1, "gelu", 0, 1),  # 88.73
    Row(802816, 64, 4, "none", 3, 1),  # 123.23
    Row(802816, 64, 9, "none", 2, 1),  # 140.08
    Row(802816, 128, 4, "none", 1, 1),  # 158.25
    # end of rows
]
"""The table."""


def _log2(number: Int) -> Int:
    """Approximates 256 times the logarithm, by a line between powers of two."""
    var whole = bit_width(number) - 1
    return (whole << 8) + ((number - (1 << whole)) << 8 >> whole)


def choose(g: Geometry, width: Int, epilogue: Epilogue, more: Int = 0) -> Row:
    """Chooses the tile of a product.

    Args:
        g: Sizes.
        width: Channels of a step of K.
        epilogue: What the accumulator goes through.
        more: Steps of a second source.

    Returns:
        The nearest row whose splits the product has steps for.
    """
    var steps = g.r * g.s * ceildiv(g.c, width) + more
    return nearest(materialize[ROWS](), g, steps, epilogue)


def chosen(config: Int) -> Bool:
    """Tells whether the table has a tile; others are not compiled.

    Args:
        config: As a row's.

    Returns:
        Whether a row has it.
    """
    for row in materialize[ROWS]():
        if row.config == config:
            return True
    return False


def alike(row: Row) -> Row:
    """Finds a tile of CONFIGS, for what only hopper.mojo computes: several products, two sources.

    Args:
        row: Of the table.

    Returns:
        The row; with the tile most like its block if that is one of RESIDENT.
    """
    var other = row
    comptime for i in range(len(RESIDENT)):
        comptime number = len(CONFIGS) + i
        comptime tile = ALIKE[i]
        if row.config == number:
            other.config = tile
    return other


def nearest(rows: List[Row], g: Geometry, steps: Int, epilogue: Epilogue) -> Row:
    """Finds the measured product that is most like another.

    Args:
        rows: What was measured.
        g: Sizes.
        steps: Of K.
        epilogue: What the accumulator goes through.

    Returns:
        The nearest row whose splits the product has steps for.
    """
    var m, f, k = _log2(g.pixels()), _log2(g.f), _log2(steps)
    var best = Row(0, 0, 0, "none", 0, 1)
    var nearest = Int.MAX
    for row in rows:
        var distance = abs(_log2(row.pixels) - m) + abs(_log2(row.filters) - f)
        distance += abs(_log2(row.steps) - k)
        if row.adds != epilogue.adds or row.gelu != epilogue.gelu:
            distance += 128
        var closer = distance < nearest or (distance == nearest and row.pixels > best.pixels)
        if closer and row.splits <= steps:
            best, nearest = row, distance
    return best
