"""Which tile a product gets on Hopper: measured rows, and the nearest one for all others.

`python -m maxvision.ops.gemm.tune` writes the rows. A row holds M, F, the steps of K (128 bytes of channels,
tap by tap), the epilogue as far as it costs time, the tile, the blocks that share it, and in the comment
the microseconds of a launch in a CUDA graph. A product that is not in the table takes the tile of
the row nearest in log2 M, log2 F (twice), log2 steps, log2 of its tiles of 128 x 128, and log2 of
what these pad F by (twice): of 891 products, each left out of the table once, 96 % ran within 20 %
of their best tile, 93 % without the last two and with log2 F once (H200, 2026-11-24).
"""

from std.bit import bit_width
from std.math import ceildiv
from std.utils.static_tuple import StaticTuple

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
    # rows: ops/gemm/tune.py, 2026-11-24, NVIDIA H200
    Row(1, 1000, 6, "none", 9, 1),  # 2.24
    Row(1, 1000, 8, "none", 6, 4),  # 2.19
    Row(1, 1000, 12, "none", 7, 2),  # 2.48
    Row(1, 1000, 32, "none", 6, 8),  # 3.34
    Row(3, 1000, 6, "none", 9, 1),  # 2.07
    Row(4, 1000, 6, "none", 9, 1),  # 2.07
    Row(4, 1000, 8, "none", 6, 4),  # 2.19
    Row(4, 1000, 32, "none", 6, 8),  # 3.32
    Row(8, 1000, 6, "none", 9, 1),  # 2.03
    Row(12, 1000, 6, "none", 9, 1),  # 2.14
    Row(12, 1000, 8, "none", 6, 4),  # 2.22
    Row(24, 1000, 6, "none", 9, 1),  # 2.11
    Row(32, 1000, 6, "none", 9, 1),  # 2.11
    Row(32, 1000, 8, "none", 7, 4),  # 2.31
    Row(32, 1000, 12, "none", 7, 2),  # 2.59
    Row(32, 1000, 32, "none", 6, 8),  # 3.27
    Row(49, 128, 16, "none", 7, 8),  # 1.98
    Row(49, 320, 18, "none", 7, 8),  # 2.36
    Row(49, 512, 32, "none", 7, 4),  # 3.01
    Row(49, 512, 36, "none", 6, 8),  # 3.32
    Row(49, 512, 72, "add", 7, 8),  # 3.80
    Row(49, 768, 12, "add", 7, 4),  # 2.69
    Row(49, 768, 24, "none", 7, 4),  # 3.17
    Row(49, 1088, 17, "add", 6, 4),  # 3.42
    Row(49, 2048, 16, "none", 7, 2),  # 3.67
    Row(49, 3072, 12, "gelu", 9, 1),  # 4.14
    Row(64, 1000, 8, "none", 9, 1),  # 2.41
    Row(64, 1000, 32, "none", 6, 8),  # 3.62
    Row(98, 512, 72, "none", 6, 8),  # 4.56
    Row(98, 2048, 8, "add", 9, 1),  # 3.14
    Row(98, 2048, 16, "none", 6, 2),  # 5.02
    Row(128, 768, 12, "add", 7, 2),  # 3.22
    Row(128, 768, 48, "add", 6, 8),  # 5.63
    Row(128, 1000, 6, "none", 8, 1),  # 2.44
    Row(128, 1000, 8, "none", 9, 1),  # 2.72
    Row(128, 1000, 12, "none", 7, 2),  # 3.03
    Row(128, 1000, 32, "none", 6, 4),  # 4.95
    Row(147, 512, 4, "none", 9, 1),  # 1.92
    Row(147, 512, 32, "none", 6, 8),  # 4.32
    Row(147, 512, 72, "none", 6, 8),  # 6.06
    Row(147, 2048, 16, "none", 3, 1),  # 5.78
    Row(196, 128, 16, "none", 7, 4),  # 2.56
    Row(196, 256, 18, "none", 6, 4),  # 3.18
    Row(196, 384, 12, "none", 7, 2),  # 3.16
    Row(196, 384, 27, "none", 6, 8),  # 4.14
    Row(196, 480, 2, "none", 9, 1),  # 1.88
    Row(196, 512, 8, "none", 9, 1),  # 2.70
    Row(196, 512, 16, "none", 7, 2),  # 3.56
    Row(196, 512, 32, "none", 6, 4),  # 4.99
    Row(196, 512, 72, "none", 6, 4),  # 7.00
    Row(196, 672, 2, "none", 8, 1),  # 1.97
    Row(196, 1024, 4, "add", 9, 1),  # 3.27
    Row(197, 768, 12, "add", 9, 1),  # 4.19
    Row(197, 768, 48, "add", 6, 4),  # 7.97
    Row(197, 1536, 6, "gelu", 9, 1),  # 3.21
    Row(197, 3072, 12, "gelu", 3, 1),  # 6.33
    Row(200, 384, 6, "none", 9, 1),  # 2.31
    Row(256, 1000, 6, "none", 8, 1),  # 2.71
    Row(256, 1000, 8, "none", 9, 1),  # 2.91
    Row(256, 1000, 32, "none", 6, 2),  # 6.40
    Row(294, 512, 72, "add", 6, 4),  # 8.17
    Row(392, 128, 8, "none", 9, 1),  # 2.43
    Row(392, 128, 16, "none", 7, 4),  # 3.06
    Row(392, 192, 3, "none", 9, 1),  # 1.86
    Row(392, 192, 11, "none", 7, 2),  # 2.91
    Row(392, 192, 18, "add", 6, 4),  # 3.48
    Row(392, 256, 36, "none", 6, 4),  # 4.55
    Row(392, 512, 32, "none", 6, 4),  # 6.29
    Row(392, 512, 72, "add", 6, 2),  # 11.50
    Row(392, 512, 72, "none", 6, 4),  # 10.04
    Row(392, 768, 48, "add", 6, 2),  # 10.09
    Row(392, 2048, 8, "add", 3, 1),  # 4.99
    Row(392, 2048, 16, "none", 3, 1),  # 7.39
    Row(392, 2304, 12, "none", 1, 1),  # 6.12
    Row(392, 3072, 12, "gelu", 1, 1),  # 7.60
    Row(394, 384, 24, "add", 6, 4),  # 4.96
    Row(394, 1536, 6, "gelu", 3, 1),  # 3.78
    Row(400, 384, 6, "none", 9, 1),  # 2.53
    Row(588, 256, 2, "none", 9, 1),  # 1.99
    Row(588, 256, 16, "none", 6, 4),  # 3.96
    Row(588, 256, 36, "add", 6, 4),  # 6.16
    Row(588, 512, 4, "none", 8, 1),  # 2.47
    Row(588, 512, 36, "none", 6, 2),  # 7.88
    Row(588, 512, 72, "none", 6, 2),  # 11.49
    Row(588, 1024, 8, "none", 3, 1),  # 4.01
    Row(588, 2048, 8, "add", 2, 1),  # 5.81
    Row(588, 2048, 16, "none", 1, 1),  # 7.63
    Row(591, 384, 6, "add", 9, 1),  # 3.21
    Row(591, 384, 6, "none", 8, 1),  # 2.79
    Row(591, 1536, 6, "gelu", 3, 1),  # 4.41
    Row(768, 200, 6, "add", 9, 1),  # 2.80
    Row(768, 384, 4, "gelu", 3, 1),  # 3.20
    Row(784, 40, 4, "add", 9, 1),  # 1.90
    Row(784, 128, 4, "none", 9, 1),  # 1.99
    Row(784, 128, 9, "none", 9, 1),  # 2.72
    Row(784, 128, 18, "none", 6, 4),  # 3.57
    Row(784, 192, 9, "none", 9, 1),  # 3.04
    Row(784, 192, 12, "add", 7, 2),  # 3.74
    Row(784, 256, 8, "none", 9, 1),  # 2.93
    Row(784, 256, 36, "add", 4, 4),  # 7.09
    Row(784, 256, 36, "none", 6, 4),  # 6.56
    Row(784, 512, 4, "none", 3, 1),  # 2.97
    Row(784, 512, 72, "add", 6, 2),  # 13.15
    Row(784, 576, 3, "none", 3, 1),  # 2.68
    Row(784, 1024, 4, "add", 3, 1),  # 3.61
    Row(784, 2048, 8, "add", 1, 1),  # 6.51
    Row(788, 384, 6, "add", 9, 1),  # 3.34
    Row(788, 384, 24, "add", 6, 2),  # 6.70
    Row(788, 1536, 6, "gelu", 2, 1),  # 5.26
    Row(1024, 768, 12, "none", 3, 1),  # 4.88
    Row(1024, 768, 48, "add", 3, 1),  # 13.60
    Row(1024, 3072, 12, "gelu", 0, 1),  # 11.90
    Row(1176, 192, 3, "none", 9, 1),  # 2.36
    Row(1176, 256, 36, "add", 6, 2),  # 8.03
    Row(1176, 384, 27, "none", 6, 2),  # 7.73
    Row(1176, 512, 32, "none", 3, 1),  # 9.33
    Row(1176, 512, 72, "add", 8, 1),  # 18.47
    Row(1176, 1024, 8, "none", 1, 1),  # 5.31
    Row(1176, 2048, 16, "none", 0, 1),  # 13.26
    Row(1568, 80, 8, "add", 9, 1),  # 2.86
    Row(1568, 128, 8, "none", 9, 1),  # 2.88
    Row(1568, 128, 16, "none", 6, 4),  # 4.27
    Row(1568, 128, 18, "none", 7, 2),  # 4.37
    Row(1568, 192, 3, "add", 8, 1),  # 3.27
    Row(1568, 192, 9, "none", 9, 1),  # 3.68
    Row(1568, 192, 11, "none", 3, 1),  # 4.13
    Row(1568, 192, 12, "add", 9, 1),  # 4.53
    Row(1568, 256, 2, "none", 3, 1),  # 2.55
    Row(1568, 256, 16, "none", 3, 1),  # 5.32
    Row(1568, 256, 36, "none", 6, 2),  # 8.11
    Row(1568, 384, 12, "none", 3, 1),  # 4.75
    Row(1568, 384, 27, "none", 3, 1),  # 8.55
    Row(1568, 512, 4, "none", 3, 1),  # 3.21
    Row(1568, 512, 8, "add", 3, 1),  # 4.35
    Row(1568, 768, 12, "add", 1, 1),  # 7.26
    Row(1568, 768, 48, "add", 1, 1),  # 17.70
    Row(1568, 1024, 4, "add", 2, 1),  # 4.45
    Row(1568, 2048, 8, "add", 0, 1),  # 9.61
    Row(1576, 1536, 6, "gelu", 2, 1),  # 7.87
    Row(2352, 128, 8, "none", 9, 1),  # 3.59
    Row(2352, 128, 18, "none", 6, 2),  # 4.92
    Row(2352, 192, 3, "add", 3, 1),  # 2.98
    Row(2352, 192, 9, "none", 3, 1),  # 4.02
    Row(2352, 256, 36, "add", 8, 1),  # 10.95
    Row(2352, 512, 4, "none", 2, 1),  # 3.95
    Row(2352, 512, 72, "add", 1, 1),  # 24.95
    Row(2364, 384, 6, "none", 3, 1),  # 3.87
    Row(2364, 384, 24, "add", 3, 1),  # 8.67
    Row(2364, 1536, 6, "gelu", 0, 1),  # 8.90
    Row(3136, 24, 3, "add", 9, 1),  # 1.77
    Row(3136, 64, 1, "add", 9, 1),  # 1.94
    Row(3136, 64, 9, "add", 8, 1),  # 3.09
    Row(3136, 96, 2, "add", 8, 1),  # 2.75
    Row(3136, 96, 6, "add", 9, 1),  # 3.32
    Row(3136, 128, 4, "none", 3, 1),  # 2.89
    Row(3136, 128, 9, "none", 3, 1),  # 3.95
    Row(3136, 192, 3, "none", 3, 1),  # 2.83
    Row(3136, 256, 1, "gelu", 3, 1),  # 2.72
    Row(3136, 256, 18, "none", 3, 1),  # 6.91
    Row(3136, 256, 36, "none", 8, 1),  # 11.00
    Row(3136, 384, 27, "none", 1, 1),  # 11.09
    Row(3136, 512, 16, "none", 1, 1),  # 7.87
    Row(3136, 1024, 8, "none", 0, 1),  # 8.70
    Row(3136, 2048, 8, "add", 0, 1),  # 18.03
    Row(3136, 2048, 16, "none", 1, 1),  # 26.26
    Row(3152, 384, 6, "add", 2, 1),  # 5.06
    Row(4096, 768, 48, "add", 0, 1),  # 33.92
    Row(4704, 64, 1, "none", 8, 1),  # 2.24
    Row(4704, 128, 18, "none", 8, 1),  # 6.64
    Row(4704, 192, 12, "add", 3, 1),  # 5.88
    Row(4704, 256, 2, "none", 3, 1),  # 3.28
    Row(4704, 256, 18, "none", 1, 1),  # 8.37
    Row(4704, 512, 2, "add", 2, 1),  # 5.42
    Row(4704, 512, 4, "none", 2, 1),  # 5.81
    Row(4704, 512, 16, "none", 0, 1),  # 13.10
    Row(4704, 1024, 4, "add", 0, 1),  # 10.48
    Row(4728, 384, 6, "none", 1, 1),  # 4.96
    Row(4728, 1536, 6, "gelu", 0, 1),  # 15.55
    Row(6272, 40, 2, "add", 8, 1),  # 2.50
    Row(6272, 64, 1, "add", 9, 1),  # 2.36
    Row(6272, 64, 1, "none", 3, 1),  # 2.30
    Row(6272, 64, 4, "add", 3, 1),  # 3.23
    Row(6272, 64, 9, "add", 8, 1),  # 4.02
    Row(6272, 128, 9, "none", 3, 1),  # 4.63
    Row(6272, 192, 11, "none", 1, 1),  # 6.92
    Row(6272, 240, 1, "none", 2, 1),  # 3.50
    Row(6272, 256, 1, "gelu", 2, 1),  # 3.55
    Row(6272, 256, 1, "none", 3, 1),  # 2.99
    Row(6272, 256, 36, "none", 1, 1),  # 13.78
    Row(6272, 320, 18, "none", 2, 1),  # 11.20
    Row(6272, 384, 6, "add", 0, 1),  # 7.78
    Row(6272, 384, 12, "none", 0, 1),  # 10.68
    Row(6272, 512, 4, "none", 1, 1),  # 6.09
    Row(6272, 512, 8, "add", 0, 1),  # 9.60
    Row(6272, 768, 3, "gelu", 2, 1),  # 8.38
    Row(6272, 768, 24, "none", 1, 1),  # 27.34
    Row(6272, 960, 3, "none", 1, 1),  # 8.25
    Row(6272, 1024, 4, "add", 2, 1),  # 11.74
    Row(6272, 1024, 8, "none", 1, 1),  # 13.79
    Row(6272, 1152, 3, "none", 2, 1),  # 9.73
    Row(6272, 2048, 8, "add", 0, 1),  # 30.37
    Row(6272, 3072, 12, "gelu", 1, 1),  # 53.85
    Row(6304, 768, 12, "add", 0, 1),  # 18.27
    Row(6304, 768, 48, "add", 1, 1),  # 52.91
    Row(6304, 1152, 6, "none", 0, 1),  # 14.59
    Row(6304, 1536, 6, "gelu", 1, 1),  # 20.04
    Row(6304, 2304, 12, "none", 1, 1),  # 38.45
    Row(6304, 3072, 12, "gelu", 0, 1),  # 56.96
    Row(9408, 64, 1, "none", 3, 1),  # 2.36
    Row(9408, 128, 1, "none", 3, 1),  # 2.83
    Row(9408, 128, 4, "none", 2, 1),  # 4.12
    Row(9408, 128, 9, "none", 1, 1),  # 5.76
    Row(9408, 192, 3, "add", 2, 1),  # 4.54
    Row(9408, 192, 9, "none", 2, 1),  # 6.90
    Row(9408, 192, 12, "add", 2, 1),  # 8.74
    Row(9408, 256, 1, "gelu", 2, 1),  # 4.71
    Row(9408, 256, 18, "none", 0, 1),  # 14.37
    Row(9408, 384, 27, "none", 1, 1),  # 20.32
    Row(9408, 768, 3, "gelu", 0, 1),  # 11.66
    Row(9408, 1024, 4, "add", 1, 1),  # 17.62
    Row(9456, 384, 24, "add", 0, 1),  # 20.78
    Row(12544, 64, 1, "add", 3, 1),  # 2.85
    Row(12544, 64, 4, "add", 3, 1),  # 3.63
    Row(12544, 96, 1, "none", 2, 1),  # 3.09
    Row(12544, 128, 4, "none", 1, 1),  # 4.40
    Row(12544, 128, 18, "none", 1, 1),  # 8.73
    Row(12544, 192, 9, "none", 1, 1),  # 10.01
    Row(12544, 256, 1, "gelu", 3, 1),  # 5.15
    Row(12544, 256, 8, "none", 1, 1),  # 8.61
    Row(12544, 512, 16, "none", 1, 1),  # 22.02
    Row(12608, 384, 6, "add", 0, 1),  # 12.53
    Row(12608, 384, 6, "none", 1, 1),  # 10.57
    Row(12608, 384, 24, "add", 1, 1),  # 32.03
    Row(16384, 768, 12, "none", 1, 1),  # 33.33
    Row(18816, 64, 1, "add", 2, 1),  # 3.58
    Row(18816, 64, 1, "none", 3, 1),  # 2.87
    Row(18816, 128, 1, "none", 3, 1),  # 3.84
    Row(18816, 128, 8, "none", 0, 1),  # 8.45
    Row(18816, 192, 3, "add", 2, 1),  # 7.49
    Row(18816, 192, 12, "add", 2, 1),  # 17.45
    Row(18816, 256, 1, "gelu", 2, 1),  # 6.28
    Row(18816, 512, 2, "add", 2, 1),  # 13.21
    Row(18816, 512, 4, "none", 1, 1),  # 12.74
    Row(18816, 768, 3, "gelu", 1, 1),  # 20.67
    Row(24576, 200, 6, "add", 1, 1),  # 15.11
    Row(24576, 384, 4, "gelu", 1, 1),  # 17.89
    Row(25088, 24, 1, "none", 9, 1),  # 2.15
    Row(25088, 40, 2, "add", 2, 1),  # 5.17
    Row(25088, 64, 1, "none", 3, 1),  # 3.03
    Row(25088, 64, 4, "add", 2, 1),  # 5.33
    Row(25088, 64, 9, "add", 3, 1),  # 8.17
    Row(25088, 72, 1, "none", 1, 1),  # 5.39
    Row(25088, 80, 8, "add", 1, 1),  # 11.47
    Row(25088, 96, 2, "add", 0, 1),  # 5.81
    Row(25088, 120, 1, "none", 1, 1),  # 6.04
    Row(25088, 128, 1, "none", 2, 1),  # 4.02
    Row(25088, 128, 2, "none", 3, 1),  # 4.94
    Row(25088, 128, 4, "none", 1, 1),  # 6.11
    Row(25088, 128, 9, "none", 1, 1),  # 9.18
    Row(25088, 240, 1, "none", 1, 1),  # 8.61
    Row(25088, 256, 1, "add", 2, 1),  # 7.69
    Row(25088, 256, 1, "none", 2, 1),  # 5.63
    Row(25088, 256, 18, "none", 1, 1),  # 23.33
    Row(25088, 288, 2, "none", 2, 1),  # 9.11
    Row(25088, 384, 2, "gelu", 0, 1),  # 12.37
    Row(25088, 480, 2, "none", 0, 1),  # 11.86
    Row(25088, 576, 3, "none", 2, 1),  # 17.17
    Row(25088, 672, 2, "none", 1, 1),  # 17.07
    Row(25088, 1024, 8, "none", 1, 1),  # 47.44
    Row(25216, 1536, 6, "gelu", 0, 1),  # 65.48
    Row(25216, 2304, 12, "none", 1, 1),  # 139.61
    Row(37632, 64, 1, "add", 2, 1),  # 4.66
    Row(37632, 64, 4, "add", 2, 1),  # 7.44
    Row(37632, 64, 9, "add", 3, 1),  # 11.73
    Row(37632, 128, 1, "none", 2, 1),  # 5.37
    Row(37632, 128, 4, "none", 1, 1),  # 8.73
    Row(37632, 192, 3, "none", 3, 1),  # 10.35
    Row(37632, 192, 9, "none", 2, 1),  # 22.48
    Row(37632, 256, 1, "gelu", 0, 1),  # 10.62
    Row(37632, 256, 1, "none", 2, 1),  # 7.74
    Row(37632, 256, 8, "none", 1, 1),  # 22.08
    Row(37632, 512, 2, "add", 2, 1),  # 26.67
    Row(37632, 512, 4, "none", 1, 1),  # 23.49
    Row(37632, 768, 3, "gelu", 0, 1),  # 38.67
    Row(50176, 64, 4, "add", 3, 1),  # 8.42
    Row(50176, 128, 18, "none", 1, 1),  # 23.43
    Row(50176, 256, 2, "none", 0, 1),  # 11.40
    Row(75264, 64, 4, "add", 3, 1),  # 17.26
    Row(75264, 128, 4, "none", 1, 1),  # 17.97
    Row(75264, 256, 1, "add", 2, 1),  # 26.17
    Row(98304, 200, 6, "add", 0, 1),  # 57.20
    Row(100352, 24, 1, "none", 2, 1),  # 5.38
    Row(100352, 40, 4, "add", 2, 1),  # 21.07
    Row(100352, 64, 1, "add", 2, 1),  # 7.85
    Row(100352, 64, 9, "none", 2, 1),  # 20.09
    Row(100352, 72, 1, "none", 0, 1),  # 16.88
    Row(100352, 96, 6, "add", 0, 1),  # 33.42
    Row(100352, 120, 1, "none", 0, 1),  # 19.48
    Row(100352, 128, 1, "none", 2, 1),  # 9.60
    Row(100352, 128, 2, "none", 0, 1),  # 15.23
    Row(100352, 128, 9, "none", 1, 1),  # 26.69
    Row(100352, 144, 1, "none", 0, 1),  # 29.99
    Row(100352, 192, 3, "add", 1, 1),  # 35.93
    Row(100352, 192, 9, "none", 2, 1),  # 53.74
    Row(100352, 240, 1, "none", 0, 1),  # 32.30
    Row(100352, 256, 1, "none", 2, 1),  # 20.88
    Row(100352, 256, 8, "none", 1, 1),  # 52.05
    Row(100352, 256, 36, "none", 1, 1),  # 165.21
    Row(100352, 288, 2, "none", 1, 1),  # 31.77
    Row(100352, 384, 2, "gelu", 0, 1),  # 41.37
    Row(100352, 512, 72, "none", 1, 1),  # 660.92
    Row(100352, 576, 3, "none", 1, 1),  # 58.05
    Row(150528, 64, 1, "add", 3, 1),  # 16.67
    Row(200704, 64, 1, "none", 2, 1),  # 13.88
    Row(200704, 128, 1, "none", 2, 1),  # 23.83
    Row(200704, 128, 4, "none", 1, 1),  # 40.90
    Row(200704, 128, 18, "add", 0, 1),  # 99.90
    Row(200704, 192, 12, "add", 2, 1),  # 157.66
    Row(200704, 256, 1, "gelu", 0, 1),  # 46.44
    Row(200704, 256, 1, "none", 2, 1),  # 39.03
    Row(401408, 64, 1, "add", 2, 1),  # 40.90
    Row(401408, 64, 4, "add", 3, 1),  # 74.96
    Row(401408, 64, 9, "none", 2, 1),  # 71.00
    Row(401408, 72, 1, "none", 0, 1),  # 68.46
    Row(401408, 96, 6, "add", 1, 1),  # 118.35
    Row(401408, 288, 2, "none", 1, 1),  # 122.64
    Row(401408, 384, 2, "gelu", 0, 1),  # 149.29
    Row(802816, 64, 9, "none", 2, 1),  # 140.52
    Row(802816, 256, 1, "gelu", 0, 1),  # 167.68
    Row(1605632, 64, 1, "none", 2, 1),  # 139.59
    Row(1605632, 96, 1, "none", 0, 1),  # 185.02
    Row(1605632, 128, 18, "none", 0, 1),  # 695.33
    Row(6422528, 64, 9, "none", 2, 1),  # 1065.74
    # end of rows
]
"""The table."""


def _log2(number: Int) -> Int:
    """Approximates 256 times the logarithm, by a line between powers of two."""
    var whole = bit_width(number) - 1
    return (whole << 8) + ((number - (1 << whole)) << 8 >> whole)


comptime FEATURES = 5
"""What of a product its tile depends on."""
comptime WIDEST = 128
"""Rows and columns of the largest tile."""


def _features(pixels: Int, filters: Int, steps: Int) -> StaticTuple[Int, FEATURES]:
    """Gives the logarithms of M, F, the steps of K, the largest tiles and their padding of F."""
    var columns = ceildiv(filters, WIDEST)
    var f = _log2(filters)
    var padding = _log2(columns * WIDEST) - f
    var tiles = _log2(ceildiv(pixels, WIDEST) * columns)
    return StaticTuple[Int, FEATURES](_log2(pixels), 2 * f, _log2(steps), tiles, 2 * padding)


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
    var wanted = _features(g.pixels(), g.f, steps)
    var best = Row(0, 0, 0, "none", 0, 1)
    var nearest = Int.MAX
    for row in rows:
        var found = _features(row.pixels, row.filters, row.steps)
        var distance = 0
        comptime for i in range(FEATURES):
            distance += abs(found[i] - wanted[i])
        if row.adds != epilogue.adds or row.gelu != epilogue.gelu:
            distance += 128
        var closer = distance < nearest or (distance == nearest and row.pixels > best.pixels)
        if closer and row.splits <= steps:
            best, nearest = row, distance
    return best
