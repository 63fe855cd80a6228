"""Which tile a product gets on Hopper: measured rows, and the nearest one for all others.

`python -m maxvision.ops.gemm.tune` writes the rows. A row holds M, F, the steps of K (128 bytes of channels,
tap by tap), the epilogue as far as it costs time, the tile, the blocks that share it, and in the comment
the microseconds of a launch in a CUDA graph. A product that is not in the table takes the tile of
the row nearest in log2 M + log2 F + log2 steps: of products left out of the table, 97 % ran within
20 % of their best tile (H200, 2026-11-21).
"""

from std.bit import bit_width
from std.math import ceildiv

from ..epilogue import Epilogue
from ..geometry import Geometry
from .hopper import Config
from .resident import Config as Resident

comptime CONFIGS: List[Config] = [
    Config(groups=2, columns=128, stages=3, blocks=2),
    Config(groups=2, columns=128, stages=6, blocks=1, overlap=True),
    Config(groups=2, columns=64, stages=4, blocks=2),
    Config(groups=1, columns=64, stages=6, blocks=2),
    Config(groups=1, columns=64, stages=6, blocks=2, split=True),
    Config(groups=1, columns=32, stages=8, blocks=2, split=True),
]
"""The tiles of hopper.mojo that are compiled."""
comptime RESIDENT: List[Resident] = [
    Resident(groups=1, columns=64, split=True),
    Resident(groups=1, columns=32, split=True),
    Resident(groups=1, columns=64),
    Resident(groups=1, columns=32),
    Resident(groups=2, columns=64),
]
"""The blocks of resident.mojo that are compiled; rows count them on from CONFIGS."""
comptime ALIKE: List[Int] = [4, 5, 3, 5, 2]
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
    # rows: ops/gemm/tune.py, 2026-11-21, NVIDIA H200
    Row(1, 1000, 6, "none", 3, 1),  # 2.71
    Row(1, 1000, 8, "none", 4, 4),  # 2.77
    Row(2, 1000, 8, "none", 4, 4),  # 2.81
    Row(3, 1000, 6, "none", 3, 1),  # 2.73
    Row(3, 1000, 8, "none", 4, 4),  # 2.90
    Row(6, 1000, 6, "none", 3, 1),  # 2.74
    Row(6, 1000, 8, "none", 4, 4),  # 2.85
    Row(6, 1000, 32, "none", 4, 4),  # 3.96
    Row(16, 1000, 6, "none", 3, 1),  # 2.74
    Row(24, 1000, 32, "none", 4, 4),  # 4.13
    Row(48, 1000, 6, "none", 3, 1),  # 2.87
    Row(49, 512, 4, "none", 3, 1),  # 2.45
    Row(49, 512, 32, "none", 5, 4),  # 3.78
    Row(49, 512, 72, "none", 4, 8),  # 5.17
    Row(49, 2048, 16, "none", 5, 2),  # 4.08
    Row(64, 1000, 6, "none", 3, 1),  # 2.90
    Row(64, 1000, 8, "none", 5, 2),  # 3.14
    Row(64, 1000, 32, "none", 5, 4),  # 4.48
    Row(98, 512, 36, "none", 4, 4),  # 4.95
    Row(98, 512, 72, "add", 4, 4),  # 7.52
    Row(147, 512, 36, "none", 5, 4),  # 5.72
    Row(147, 512, 72, "add", 4, 8),  # 8.33
    Row(147, 2048, 8, "add", 3, 1),  # 4.13
    Row(196, 256, 18, "none", 5, 2),  # 3.74
    Row(196, 256, 36, "add", 4, 4),  # 5.42
    Row(196, 256, 36, "none", 5, 4),  # 4.79
    Row(196, 512, 16, "none", 5, 2),  # 4.19
    Row(196, 512, 32, "none", 5, 2),  # 5.54
    Row(196, 512, 72, "add", 5, 2),  # 9.51
    Row(196, 1024, 8, "none", 3, 1),  # 3.56
    Row(196, 2048, 16, "none", 3, 1),  # 5.95
    Row(197, 384, 6, "add", 3, 1),  # 3.23
    Row(197, 384, 24, "add", 5, 4),  # 4.94
    Row(256, 1000, 32, "none", 5, 2),  # 7.31
    Row(294, 512, 4, "none", 3, 1),  # 2.75
    Row(294, 512, 36, "none", 5, 2),  # 6.52
    Row(294, 512, 72, "add", 4, 4),  # 9.67
    Row(294, 2048, 8, "add", 3, 1),  # 4.49
    Row(392, 256, 16, "none", 5, 2),  # 4.05
    Row(392, 256, 36, "none", 5, 4),  # 5.60
    Row(392, 384, 27, "none", 4, 2),  # 5.97
    Row(392, 512, 32, "none", 4, 2),  # 6.94
    Row(392, 512, 36, "none", 4, 4),  # 7.44
    Row(392, 2048, 16, "none", 3, 1),  # 7.35
    Row(394, 384, 24, "add", 5, 2),  # 5.74
    Row(588, 256, 36, "add", 5, 2),  # 6.56
    Row(588, 512, 32, "none", 4, 2),  # 7.55
    Row(588, 1024, 8, "none", 3, 1),  # 4.06
    Row(588, 2048, 8, "add", 2, 1),  # 5.96
    Row(588, 2048, 16, "none", 1, 1),  # 7.75
    Row(591, 1536, 6, "gelu", 3, 1),  # 4.48
    Row(784, 512, 72, "add", 4, 2),  # 15.94
    Row(784, 768, 3, "gelu", 3, 1),  # 3.24
    Row(784, 1024, 4, "add", 3, 1),  # 3.56
    Row(784, 2048, 8, "add", 1, 1),  # 6.48
    Row(788, 384, 6, "add", 3, 1),  # 3.70
    Row(788, 384, 24, "add", 4, 2),  # 6.86
    Row(788, 1536, 6, "gelu", 2, 1),  # 5.40
    Row(1176, 384, 27, "none", 4, 2),  # 7.91
    Row(1176, 512, 4, "none", 3, 1),  # 3.10
    Row(1176, 512, 16, "none", 3, 1),  # 5.88
    Row(1176, 1024, 4, "add", 2, 1),  # 4.46
    Row(1176, 2048, 8, "add", 0, 1),  # 9.18
    Row(1568, 128, 18, "add", 5, 2),  # 5.05
    Row(1568, 192, 12, "add", 3, 1),  # 4.77
    Row(1568, 256, 8, "none", 3, 1),  # 3.73
    Row(1568, 256, 36, "add", 4, 2),  # 8.83
    Row(1568, 384, 27, "none", 3, 1),  # 8.69
    Row(1568, 512, 2, "add", 3, 1),  # 3.10
    Row(1568, 512, 36, "none", 3, 1),  # 11.11
    Row(1568, 512, 72, "add", 3, 1),  # 21.25
    Row(1568, 1024, 8, "none", 1, 1),  # 5.64
    Row(1568, 2048, 16, "none", 0, 1),  # 13.79
    Row(1576, 384, 24, "add", 3, 1),  # 8.31
    Row(1576, 1536, 6, "gelu", 2, 1),  # 8.03
    Row(2352, 128, 18, "add", 4, 2),  # 5.94
    Row(2352, 256, 36, "add", 3, 1),  # 12.53
    Row(2352, 512, 4, "none", 2, 1),  # 4.03
    Row(2352, 512, 36, "none", 1, 1),  # 13.57
    Row(2352, 512, 72, "add", 1, 1),  # 24.84
    Row(2352, 768, 3, "gelu", 2, 1),  # 4.47
    Row(2352, 1024, 8, "none", 0, 1),  # 8.55
    Row(2364, 384, 6, "none", 3, 1),  # 3.89
    Row(2364, 384, 24, "add", 3, 1),  # 8.83
    Row(2364, 1536, 6, "gelu", 0, 1),  # 8.98
    Row(3136, 64, 4, "add", 3, 1),  # 3.09
    Row(3136, 128, 18, "none", 3, 1),  # 5.88
    Row(3136, 192, 3, "none", 3, 1),  # 2.91
    Row(3136, 256, 1, "gelu", 3, 1),  # 2.81
    Row(3136, 256, 8, "none", 3, 1),  # 4.12
    Row(3136, 256, 16, "none", 3, 1),  # 6.17
    Row(3136, 512, 2, "add", 2, 1),  # 3.99
    Row(3136, 512, 16, "none", 1, 1),  # 7.86
    Row(3136, 512, 72, "none", 1, 1),  # 24.36
    Row(3152, 384, 24, "add", 1, 1),  # 10.82
    Row(3200, 384, 6, "none", 2, 1),  # 4.69
    Row(4704, 128, 18, "add", 3, 1),  # 8.09
    Row(4704, 192, 9, "none", 3, 1),  # 4.75
    Row(4704, 192, 12, "add", 3, 1),  # 5.93
    Row(4704, 256, 2, "none", 3, 1),  # 3.34
    Row(4704, 256, 18, "none", 1, 1),  # 8.43
    Row(4704, 1024, 4, "add", 2, 1),  # 10.22
    Row(4728, 384, 6, "add", 2, 1),  # 5.58
    Row(4728, 1536, 6, "gelu", 0, 1),  # 15.78
    Row(6272, 128, 4, "none", 3, 1),  # 3.30
    Row(6272, 128, 8, "none", 3, 1),  # 4.23
    Row(6272, 192, 9, "none", 1, 1),  # 6.13
    Row(6272, 192, 12, "add", 1, 1),  # 7.96
    Row(6272, 256, 1, "gelu", 2, 1),  # 3.67
    Row(6272, 256, 8, "none", 1, 1),  # 5.61
    Row(6272, 256, 36, "add", 1, 1),  # 14.55
    Row(6272, 512, 2, "add", 0, 1),  # 5.90
    Row(6272, 768, 3, "gelu", 2, 1),  # 8.65
    Row(6272, 1024, 8, "none", 1, 1),  # 13.55
    Row(6272, 2048, 8, "add", 0, 1),  # 32.03
    Row(6304, 384, 6, "add", 0, 1),  # 7.92
    Row(6304, 1536, 6, "gelu", 1, 1),  # 20.37
    Row(9408, 128, 9, "none", 1, 1),  # 5.84
    Row(9408, 192, 3, "none", 2, 1),  # 4.21
    Row(9408, 192, 9, "none", 2, 1),  # 7.01
    Row(9408, 192, 12, "add", 2, 1),  # 8.89
    Row(9408, 256, 1, "add", 2, 1),  # 4.94
    Row(9408, 256, 1, "gelu", 2, 1),  # 4.70
    Row(9408, 256, 2, "none", 2, 1),  # 4.66
    Row(9408, 256, 8, "none", 0, 1),  # 8.43
    Row(9408, 256, 18, "none", 0, 1),  # 14.20
    Row(9408, 256, 36, "add", 0, 1),  # 25.91
    Row(9408, 768, 3, "gelu", 0, 1),  # 11.87
    Row(9408, 1024, 4, "add", 1, 1),  # 18.34
    Row(9456, 384, 6, "add", 0, 1),  # 8.96
    Row(9456, 384, 24, "add", 0, 1),  # 20.81
    Row(12544, 64, 1, "add", 3, 1),  # 2.92
    Row(12544, 64, 4, "none", 3, 1),  # 3.33
    Row(12544, 128, 1, "none", 3, 1),  # 3.12
    Row(12544, 128, 4, "none", 1, 1),  # 4.49
    Row(12544, 128, 18, "add", 1, 1),  # 9.65
    Row(12544, 192, 9, "none", 1, 1),  # 10.19
    Row(12544, 256, 1, "add", 0, 1),  # 5.53
    Row(12544, 256, 1, "gelu", 3, 1),  # 5.28
    Row(12544, 256, 2, "none", 0, 1),  # 5.15
    Row(12544, 512, 2, "add", 2, 1),  # 8.88
    Row(12544, 512, 4, "none", 1, 1),  # 9.05
    Row(12544, 512, 32, "none", 1, 1),  # 39.81
    Row(12544, 1024, 4, "add", 0, 1),  # 23.16
    Row(12608, 384, 6, "none", 1, 1),  # 11.05
    Row(12608, 384, 24, "add", 1, 1),  # 31.85
    Row(18816, 64, 1, "add", 3, 1),  # 3.83
    Row(18816, 64, 9, "none", 3, 1),  # 7.06
    Row(18816, 128, 9, "none", 0, 1),  # 9.08
    Row(18816, 192, 3, "add", 2, 1),  # 7.76
    Row(18816, 192, 3, "none", 2, 1),  # 6.45
    Row(18816, 192, 9, "none", 2, 1),  # 12.34
    Row(18816, 192, 12, "add", 2, 1),  # 17.54
    Row(18816, 768, 3, "gelu", 1, 1),  # 21.35
    Row(25088, 64, 1, "add", 2, 1),  # 3.94
    Row(25088, 64, 1, "none", 3, 1),  # 3.10
    Row(25088, 128, 4, "none", 0, 1),  # 6.15
    Row(25088, 192, 3, "none", 1, 1),  # 7.90
    Row(25088, 256, 1, "gelu", 2, 1),  # 7.99
    Row(25088, 256, 8, "none", 1, 1),  # 13.61
    Row(25088, 512, 16, "none", 1, 1),  # 43.55
    Row(25216, 384, 24, "add", 1, 1),  # 53.83
    Row(37632, 64, 1, "add", 2, 1),  # 4.74
    Row(37632, 64, 4, "add", 2, 1),  # 7.55
    Row(37632, 64, 4, "none", 3, 1),  # 6.23
    Row(37632, 192, 3, "none", 3, 1),  # 10.79
    Row(37632, 256, 1, "gelu", 0, 1),  # 10.71
    Row(37632, 512, 2, "add", 2, 1),  # 26.74
    Row(37632, 512, 4, "none", 1, 1),  # 23.94
    Row(37632, 768, 3, "gelu", 0, 1),  # 39.32
    Row(50176, 64, 4, "add", 3, 1),  # 8.63
    Row(50176, 64, 9, "add", 3, 1),  # 13.39
    Row(50176, 128, 1, "none", 2, 1),  # 6.07
    Row(50176, 128, 4, "none", 1, 1),  # 9.23
    Row(50176, 128, 9, "none", 1, 1),  # 14.38
    Row(50176, 192, 3, "add", 3, 1),  # 19.87
    Row(50176, 192, 9, "none", 2, 1),  # 29.33
    Row(50176, 256, 1, "none", 0, 1),  # 9.66
    Row(50176, 256, 8, "none", 1, 1),  # 27.65
    Row(50176, 256, 36, "none", 1, 1),  # 84.01
    Row(50176, 1024, 4, "add", 0, 1),  # 75.76
    Row(50176, 1024, 8, "none", 1, 1),  # 95.11
    Row(50432, 1536, 6, "gelu", 0, 1),  # 133.73
    Row(75264, 256, 1, "add", 2, 1),  # 26.17
    Row(75264, 256, 1, "none", 1, 1),  # 15.40
    Row(100352, 64, 1, "none", 2, 1),  # 5.82
    Row(100352, 64, 9, "none", 2, 1),  # 20.43
    Row(100352, 128, 1, "none", 0, 1),  # 10.54
    Row(100352, 128, 9, "none", 1, 1),  # 29.56
    Row(100352, 192, 3, "none", 1, 1),  # 26.53
    Row(100352, 192, 9, "none", 2, 1),  # 54.15
    Row(100352, 256, 1, "gelu", 0, 1),  # 25.69
    Row(100352, 256, 8, "none", 1, 1),  # 52.87
    Row(100352, 768, 3, "gelu", 0, 1),  # 96.67
    Row(150528, 64, 1, "add", 3, 1),  # 17.08
    Row(150528, 64, 1, "none", 2, 1),  # 8.52
    Row(150528, 64, 4, "add", 3, 1),  # 30.55
    Row(150528, 128, 4, "none", 1, 1),  # 31.29
    Row(200704, 64, 9, "add", 2, 1),  # 42.22
    Row(200704, 128, 9, "none", 1, 1),  # 55.99
    Row(200704, 128, 18, "add", 0, 1),  # 100.20
    Row(200704, 192, 3, "add", 1, 1),  # 66.87
    Row(200704, 192, 9, "none", 2, 1),  # 106.85
    Row(200704, 256, 1, "add", 3, 1),  # 62.80
    Row(200704, 256, 1, "gelu", 0, 1),  # 48.12
    Row(200704, 256, 1, "none", 1, 1),  # 39.09
    Row(200704, 256, 8, "none", 1, 1),  # 102.87
    Row(802816, 64, 1, "add", 3, 1),  # 78.46
    Row(802816, 64, 4, "none", 3, 1),  # 122.17
    Row(802816, 64, 9, "none", 2, 1),  # 140.31
    Row(802816, 128, 4, "none", 1, 1),  # 155.10
    Row(802816, 256, 1, "add", 3, 1),  # 234.92
    Row(802816, 256, 1, "gelu", 0, 1),  # 183.08
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
