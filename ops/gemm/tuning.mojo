"""Which tile a product gets on Hopper: measured rows, and the nearest one for all others.

`python -m maxvision.ops.gemm.tune` writes the rows. A row holds M, F, the steps of K (128 bytes of channels,
tap by tap), the epilogue as far as it costs time, the tile, the blocks that share it, and in the comment
the microseconds of a launch in a CUDA graph. A product that is not in the table takes the tile of
the row nearest in log2 M, log2 F (twice), log2 steps, log2 of its tiles of 128 x 128, log2 of what
these pad F by (twice), and how full the GPU is in the last turn of tiles of 192 x 192 and 192 x 128
(a half each): of 891 products, each left out of the table once, 96 % ran within 20 % of their best
tile, 95 % without the last two (H200, 2026-11-24). Where a GPU has other than the H200's 132
multiprocessors, its tiles are counted by multiprocessor, and the turns are its own.
"""

from std.bit import bit_width
from std.math import ceildiv
from std.utils.static_tuple import StaticTuple

from ..choice import Cheapest
from ..device import Device
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.shared import ROW
from ..hopper.tile import TileConfig
from .hopper import Config
from .pingpong import PingPong
from .turned import TurnedConfig, turned_tiles

comptime CONFIGS: List[Config] = [
    Config(groups=3, columns=192, stages=4, blocks=1, overlap=True),
    Config(groups=3, columns=128, stages=5, blocks=1, overlap=True),
    Config(groups=2, columns=128, stages=6, blocks=1, overlap=True),
    Config(groups=3, columns=64, stages=7, blocks=1, overlap=True),
    Config(groups=1, columns=64, stages=6, blocks=2),
    Config(groups=1, columns=64, stages=6, blocks=2, split=True),
    Config(groups=1, columns=32, stages=8, blocks=2, split=True),
    Config(groups=2, columns=128, stages=6, blocks=1, overlap=True, peers=2),
    Config(groups=3, columns=128, stages=4, blocks=1, overlap=True, peers=2),
]
"""The tiles of hopper.mojo that are compiled."""
comptime RESIDENT: List[TileConfig] = [
    TileConfig(groups=1, columns=64, split=True),
    TileConfig(groups=1, columns=32, split=True),
    TileConfig(groups=1, columns=64),
    TileConfig(groups=1, columns=32),
]
"""The blocks of resident.mojo that are compiled; rows count them on from CONFIGS."""
comptime FIRST_RESIDENT = len(CONFIGS)
"""The first of RESIDENT, as a row's `config`."""
comptime PINGPONG: List[PingPong] = [
    PingPong(groups=3, columns=192),
    PingPong(groups=3, columns=128),
]
"""The blocks of pingpong.mojo that are compiled; rows count them on from RESIDENT."""
comptime FIRST_PINGPONG = FIRST_RESIDENT + len(RESIDENT)
"""The first of PINGPONG, as a row's `config`."""
comptime TURNED: List[TurnedConfig] = [TurnedConfig(64, 232), TurnedConfig(128, 200)]
"""The tiles of turned.mojo that are compiled, of 16 bits: not in rows, `turned` chooses them."""
comptime FIRST_TURNED = FIRST_PINGPONG + len(PINGPONG)
"""The first of TURNED, as `turned` counts them on from PINGPONG."""
comptime TILES = FIRST_TURNED + len(TURNED)
"""All tiles."""
comptime ALIKE: List[Int] = [5, 6, 4, 6]
"""The tile of CONFIGS that is most like each block of RESIDENT."""


struct Row(TrivialRegisterPassable):
    """A measured product and its fastest tile."""

    var pixels: Int
    """M."""
    var filters: Int
    """F."""
    var steps: Int
    """Steps of K."""
    var epilogue: StaticString
    """As far as it costs time: none, add or gelu."""
    var config: Int
    """Index in CONFIGS, RESIDENT and PINGPONG, one after the other."""
    var splits: Int
    """Blocks that share a tile."""
    var next: Int
    """The fastest tile of CONFIGS, if the row's is one of PINGPONG."""

    def __init__(
        out self,
        pixels: Int,
        filters: Int,
        steps: Int,
        epilogue: StaticString,
        config: Int,
        splits: Int,
        next: Int = 0,
    ):
        """Names the parts.

        Args:
            pixels: M.
            filters: F.
            steps: Steps of K.
            epilogue: As far as it costs time: none, add or gelu.
            config: Index in CONFIGS, RESIDENT and PINGPONG, one after the other.
            splits: Blocks that share a tile.
            next: The fastest tile of CONFIGS, if the row's is one of PINGPONG.
        """
        self.pixels, self.filters, self.steps = pixels, filters, steps
        self.epilogue, self.config, self.splits, self.next = epilogue, config, splits, next


comptime ROWS: List[Row] = [
    # rows: ops/gemm/tune.py, 2026-11-24; with tiles 13 and 14, 2026-11-25, NVIDIA H200
    Row(1, 1000, 6, "none", 12, 1),  # 2.30
    Row(1, 1000, 8, "none", 9, 4),  # 2.18
    Row(1, 1000, 12, "none", 10, 2),  # 2.48
    Row(2, 1000, 32, "none", 9, 8),  # 3.30
    Row(6, 1000, 6, "none", 12, 1),  # 2.08
    Row(6, 1000, 8, "none", 9, 4),  # 2.18
    Row(8, 1000, 12, "none", 9, 4),  # 2.48
    Row(16, 1000, 8, "none", 9, 4),  # 2.21
    Row(16, 1000, 32, "none", 9, 8),  # 3.22
    Row(24, 1000, 6, "none", 12, 1),  # 2.16
    Row(32, 1000, 6, "none", 12, 1),  # 2.16
    Row(32, 1000, 8, "none", 10, 4),  # 2.33
    Row(32, 1000, 12, "none", 10, 2),  # 2.62
    Row(48, 1000, 32, "none", 9, 8),  # 3.37
    Row(49, 128, 16, "none", 10, 8),  # 1.99
    Row(49, 320, 18, "none", 10, 8),  # 2.34
    Row(49, 512, 32, "none", 10, 4),  # 2.98
    Row(49, 512, 36, "none", 9, 8),  # 3.30
    Row(49, 512, 72, "add", 10, 8),  # 3.75
    Row(49, 768, 12, "add", 10, 4),  # 2.77
    Row(49, 768, 24, "none", 10, 4),  # 3.17
    Row(49, 1088, 17, "add", 10, 4),  # 3.44
    Row(49, 2048, 16, "none", 10, 2),  # 3.61
    Row(49, 3072, 12, "gelu", 12, 1),  # 4.17
    Row(64, 1000, 8, "none", 12, 1),  # 2.41
    Row(98, 512, 72, "none", 9, 8),  # 4.53
    Row(98, 2048, 8, "add", 12, 1),  # 3.00
    Row(98, 2048, 16, "none", 9, 2),  # 4.96
    Row(128, 768, 12, "add", 10, 2),  # 3.20
    Row(128, 768, 48, "add", 9, 8),  # 5.47
    Row(128, 1000, 6, "none", 11, 1),  # 2.47
    Row(128, 1000, 8, "none", 12, 1),  # 2.69
    Row(128, 1000, 12, "none", 10, 2),  # 3.06
    Row(128, 1000, 32, "none", 9, 4),  # 4.91
    Row(147, 512, 4, "none", 12, 1),  # 1.92
    Row(147, 512, 36, "none", 9, 8),  # 4.61
    Row(147, 2048, 16, "none", 4, 1),  # 5.68
    Row(196, 112, 11, "add", 10, 4),  # 2.34
    Row(196, 256, 2, "none", 12, 1),  # 1.74
    Row(196, 256, 18, "none", 9, 4),  # 3.26
    Row(196, 256, 36, "add", 10, 8),  # 3.78
    Row(196, 256, 36, "none", 9, 8),  # 3.66
    Row(196, 384, 12, "none", 10, 2),  # 3.15
    Row(196, 384, 27, "none", 9, 8),  # 4.15
    Row(196, 480, 2, "none", 12, 1),  # 1.88
    Row(196, 512, 8, "none", 12, 1),  # 2.73
    Row(196, 512, 16, "none", 10, 2),  # 3.59
    Row(196, 512, 32, "none", 9, 4),  # 4.99
    Row(196, 672, 2, "none", 11, 1),  # 2.00
    Row(196, 1024, 8, "none", 12, 1),  # 3.11
    Row(197, 768, 48, "add", 9, 4),  # 8.00
    Row(197, 3072, 12, "gelu", 4, 1),  # 6.53
    Row(200, 384, 6, "none", 12, 1),  # 2.33
    Row(256, 1000, 6, "none", 11, 1),  # 2.77
    Row(256, 1000, 8, "none", 12, 1),  # 2.82
    Row(256, 1000, 32, "none", 9, 2),  # 6.39
    Row(294, 512, 72, "none", 9, 4),  # 7.54
    Row(294, 2048, 16, "none", 4, 1),  # 6.09
    Row(392, 128, 8, "none", 12, 1),  # 2.44
    Row(392, 128, 16, "none", 10, 4),  # 3.05
    Row(392, 192, 11, "none", 10, 2),  # 2.98
    Row(392, 192, 18, "add", 9, 4),  # 3.48
    Row(392, 256, 16, "none", 10, 4),  # 3.50
    Row(392, 256, 36, "add", 9, 4),  # 4.89
    Row(392, 384, 27, "none", 9, 4),  # 5.17
    Row(392, 512, 16, "none", 9, 4),  # 4.47
    Row(392, 512, 72, "add", 9, 2),  # 11.36
    Row(392, 512, 72, "none", 9, 4),  # 9.90
    Row(392, 768, 12, "add", 4, 1),  # 4.73
    Row(392, 768, 48, "add", 9, 2),  # 9.93
    Row(392, 2048, 8, "add", 4, 1),  # 5.02
    Row(392, 2048, 16, "none", 4, 1),  # 7.29
    Row(392, 2304, 12, "none", 2, 1),  # 6.14
    Row(392, 3072, 12, "gelu", 2, 1),  # 7.62
    Row(394, 384, 6, "none", 12, 1),  # 2.56
    Row(588, 192, 3, "none", 12, 1),  # 1.88
    Row(588, 256, 18, "none", 9, 4),  # 4.19
    Row(588, 256, 36, "add", 9, 4),  # 6.15
    Row(588, 512, 4, "none", 11, 1),  # 2.44
    Row(588, 512, 16, "none", 4, 1),  # 5.22
    Row(588, 512, 32, "none", 9, 2),  # 7.30
    Row(588, 512, 72, "none", 9, 2),  # 11.47
    Row(588, 1024, 4, "add", 4, 1),  # 3.72
    Row(588, 2048, 16, "none", 2, 1),  # 7.62
    Row(591, 384, 6, "none", 11, 1),  # 2.72
    Row(591, 1536, 6, "gelu", 4, 1),  # 4.41
    Row(768, 200, 6, "add", 12, 1),  # 2.84
    Row(768, 384, 4, "gelu", 4, 1),  # 3.15
    Row(784, 40, 2, "add", 12, 1),  # 1.70
    Row(784, 128, 9, "none", 12, 1),  # 2.67
    Row(784, 128, 18, "none", 9, 4),  # 3.69
    Row(784, 192, 3, "add", 12, 1),  # 2.30
    Row(784, 192, 6, "none", 11, 1),  # 2.57
    Row(784, 192, 9, "none", 12, 1),  # 3.04
    Row(784, 192, 12, "add", 10, 2),  # 3.77
    Row(784, 256, 8, "none", 12, 1),  # 2.97
    Row(784, 256, 16, "none", 9, 4),  # 4.33
    Row(784, 256, 36, "add", 5, 4),  # 7.03
    Row(784, 256, 36, "none", 9, 4),  # 6.52
    Row(784, 384, 27, "none", 9, 2),  # 6.71
    Row(784, 512, 4, "none", 4, 1),  # 2.96
    Row(784, 512, 16, "none", 4, 1),  # 5.38
    Row(784, 512, 32, "none", 9, 2),  # 8.16
    Row(784, 512, 72, "add", 9, 2),  # 12.96
    Row(784, 576, 3, "none", 4, 1),  # 2.70
    Row(784, 1024, 8, "none", 4, 1),  # 4.26
    Row(784, 2048, 8, "add", 2, 1),  # 6.52
    Row(788, 384, 6, "add", 12, 1),  # 3.36
    Row(788, 1536, 6, "gelu", 3, 1),  # 5.03
    Row(1024, 768, 12, "add", 4, 1),  # 5.17
    Row(1024, 768, 48, "add", 4, 1),  # 13.51
    Row(1024, 3072, 12, "gelu", 2, 1),  # 13.08
    Row(1176, 192, 3, "none", 12, 1),  # 2.38
    Row(1176, 256, 16, "none", 9, 2),  # 5.19
    Row(1176, 256, 36, "add", 9, 2),  # 7.98
    Row(1176, 512, 32, "none", 4, 1),  # 9.30
    Row(1176, 512, 72, "add", 11, 1),  # 18.32
    Row(1176, 1024, 8, "none", 3, 1),  # 5.05
    Row(1176, 2048, 8, "add", 1, 1),  # 7.73
    Row(1182, 1536, 6, "gelu", 2, 1),  # 5.93
    Row(1568, 80, 8, "add", 12, 1),  # 2.88
    Row(1568, 128, 1, "none", 12, 1),  # 1.85
    Row(1568, 128, 8, "none", 12, 1),  # 2.91
    Row(1568, 128, 16, "none", 9, 4),  # 4.29
    Row(1568, 128, 18, "none", 10, 2),  # 4.37
    Row(1568, 192, 3, "add", 4, 1),  # 2.93
    Row(1568, 192, 3, "none", 11, 1),  # 2.47
    Row(1568, 192, 9, "none", 12, 1),  # 3.62
    Row(1568, 192, 11, "none", 4, 1),  # 4.14
    Row(1568, 256, 2, "none", 4, 1),  # 2.51
    Row(1568, 256, 16, "none", 4, 1),  # 5.31
    Row(1568, 256, 36, "none", 9, 2),  # 8.00
    Row(1568, 384, 12, "none", 4, 1),  # 4.73
    Row(1568, 480, 2, "none", 4, 1),  # 2.67
    Row(1568, 768, 3, "gelu", 3, 1),  # 3.91
    Row(1568, 768, 48, "add", 2, 1),  # 17.49
    Row(1568, 1024, 8, "none", 2, 1),  # 5.59
    Row(1568, 1088, 17, "add", 2, 1),  # 9.35
    Row(1568, 1280, 5, "none", 2, 1),  # 4.96
    Row(1568, 2048, 8, "add", 0, 1),  # 10.13
    Row(1568, 3072, 12, "gelu", 1, 1),  # 18.54
    Row(1576, 768, 12, "add", 3, 1),  # 6.40
    Row(1576, 1536, 6, "gelu", 1, 1),  # 7.06
    Row(2352, 128, 1, "none", 11, 1),  # 2.25
    Row(2352, 128, 8, "none", 4, 1),  # 3.63
    Row(2352, 128, 18, "none", 9, 2),  # 4.90
    Row(2352, 192, 12, "add", 4, 1),  # 4.84
    Row(2352, 256, 16, "none", 4, 1),  # 6.08
    Row(2352, 256, 36, "none", 11, 1),  # 10.21
    Row(2352, 512, 2, "add", 3, 1),  # 3.61
    Row(2352, 512, 4, "none", 3, 1),  # 3.75
    Row(2352, 768, 3, "gelu", 2, 1),  # 4.45
    Row(2352, 1024, 4, "add", 1, 1),  # 5.61
    Row(2352, 1024, 8, "none", 1, 1),  # 6.96
    Row(2352, 2048, 16, "none", 1, 1),  # 19.88
    Row(2364, 384, 6, "add", 4, 1),  # 4.15
    Row(2364, 384, 24, "add", 4, 1),  # 8.63
    Row(2364, 1536, 6, "gelu", 0, 1),  # 9.57
    Row(3136, 24, 3, "add", 12, 1),  # 1.79
    Row(3136, 64, 1, "add", 12, 1),  # 1.95
    Row(3136, 64, 9, "add", 11, 1),  # 3.07
    Row(3136, 96, 2, "add", 11, 1),  # 2.75
    Row(3136, 96, 6, "add", 12, 1),  # 3.31
    Row(3136, 128, 1, "none", 4, 1),  # 2.29
    Row(3136, 128, 4, "none", 4, 1),  # 2.88
    Row(3136, 192, 3, "none", 4, 1),  # 2.82
    Row(3136, 256, 1, "gelu", 4, 1),  # 2.73
    Row(3136, 256, 8, "none", 4, 1),  # 4.10
    Row(3136, 256, 36, "add", 11, 1),  # 11.57
    Row(3136, 512, 2, "add", 2, 1),  # 4.34
    Row(3136, 512, 4, "none", 2, 1),  # 4.23
    Row(3136, 768, 3, "gelu", 1, 1),  # 5.47
    Row(3136, 1024, 4, "add", 0, 1),  # 7.52
    Row(3136, 1024, 8, "none", 2, 1),  # 8.94
    Row(3136, 2048, 8, "add", 1, 1),  # 18.70
    Row(3136, 2048, 16, "none", 2, 1),  # 26.28
    Row(3152, 384, 6, "add", 3, 1),  # 4.66
    Row(3152, 384, 24, "add", 3, 1),  # 10.21
    Row(3152, 1536, 6, "gelu", 1, 1),  # 11.79
    Row(4096, 768, 12, "add", 1, 1),  # 10.12
    Row(4096, 768, 48, "add", 1, 1),  # 29.05
    Row(4096, 3072, 12, "gelu", 1, 1),  # 35.82
    Row(4704, 64, 1, "none", 4, 1),  # 2.25
    Row(4704, 128, 1, "none", 4, 1),  # 2.44
    Row(4704, 128, 9, "none", 4, 1),  # 4.57
    Row(4704, 128, 18, "none", 11, 1),  # 6.58
    Row(4704, 192, 3, "none", 4, 1),  # 3.08
    Row(4704, 192, 9, "none", 4, 1),  # 4.72
    Row(4704, 256, 8, "none", 3, 1),  # 4.97
    Row(4704, 256, 36, "add", 2, 1),  # 14.32
    Row(4704, 384, 27, "none", 2, 1),  # 11.19
    Row(4704, 512, 2, "add", 1, 1),  # 4.89
    Row(4704, 768, 3, "gelu", 13, 1, 2),  # 6.66
    Row(4704, 1024, 4, "add", 1, 1),  # 9.56
    Row(4728, 384, 6, "add", 2, 1),  # 5.59
    Row(4728, 1536, 6, "gelu", 13, 1, 3),  # 14.48
    Row(6272, 40, 2, "add", 11, 1),  # 2.44
    Row(6272, 64, 1, "add", 12, 1),  # 2.37
    Row(6272, 64, 4, "add", 4, 1),  # 3.22
    Row(6272, 64, 9, "none", 11, 1),  # 3.69
    Row(6272, 80, 8, "add", 3, 1),  # 5.21
    Row(6272, 112, 11, "add", 3, 1),  # 5.69
    Row(6272, 128, 8, "none", 4, 1),  # 4.15
    Row(6272, 128, 16, "none", 3, 1),  # 6.47
    Row(6272, 128, 18, "add", 11, 1),  # 7.37
    Row(6272, 128, 18, "none", 11, 1),  # 6.77
    Row(6272, 192, 3, "none", 3, 1),  # 3.53
    Row(6272, 192, 12, "add", 3, 1),  # 6.72
    Row(6272, 256, 1, "gelu", 3, 1),  # 3.43
    Row(6272, 256, 18, "none", 2, 1),  # 8.44
    Row(6272, 320, 18, "none", 1, 1),  # 11.68
    Row(6272, 480, 2, "none", 1, 1),  # 4.52
    Row(6272, 512, 36, "none", 1, 1),  # 20.60
    Row(6272, 576, 3, "none", 13, 1, 2),  # 5.56
    Row(6272, 672, 2, "none", 13, 1, 0),  # 5.50
    Row(6272, 768, 3, "gelu", 13, 1, 0),  # 7.40
    Row(6272, 960, 3, "none", 13, 1, 1),  # 7.53
    Row(6272, 1024, 8, "none", 1, 1),  # 13.42
    Row(6272, 1152, 3, "none", 13, 1, 3),  # 8.10
    Row(6272, 1152, 6, "none", 13, 1, 3),  # 11.60
    Row(6272, 2048, 8, "add", 1, 1),  # 28.33
    Row(6272, 2048, 16, "none", 1, 1),  # 40.63
    Row(6304, 384, 6, "add", 1, 1),  # 6.58
    Row(6304, 384, 6, "none", 13, 1, 1),  # 5.97
    Row(6304, 384, 24, "add", 1, 1),  # 14.42
    Row(6304, 768, 12, "add", 0, 1),  # 13.54
    Row(6304, 768, 48, "add", 0, 1),  # 40.93
    Row(6304, 1152, 6, "none", 13, 1, 3),  # 11.76
    Row(6304, 1536, 6, "gelu", 1, 1),  # 17.74
    Row(6304, 2304, 12, "none", 0, 1),  # 35.67
    Row(9408, 64, 1, "add", 4, 1),  # 2.67
    Row(9408, 64, 4, "none", 4, 1),  # 3.17
    Row(9408, 64, 9, "none", 11, 1),  # 4.51
    Row(9408, 128, 4, "none", 3, 1),  # 3.92
    Row(9408, 128, 18, "add", 2, 1),  # 9.46
    Row(9408, 192, 3, "none", 4, 1),  # 4.27
    Row(9408, 192, 12, "add", 1, 1),  # 9.42
    Row(9408, 256, 1, "add", 1, 1),  # 4.58
    Row(9408, 256, 1, "gelu", 14, 1, 3),  # 4.42
    Row(9408, 256, 1, "none", 3, 1),  # 3.59
    Row(9408, 256, 8, "none", 1, 1),  # 7.17
    Row(9408, 256, 36, "add", 1, 1),  # 19.64
    Row(9408, 384, 27, "none", 2, 1),  # 20.19
    Row(9408, 512, 4, "none", 3, 1),  # 8.02
    Row(9408, 768, 3, "gelu", 13, 1, 3),  # 10.44
    Row(9408, 1024, 8, "none", 1, 1),  # 18.54
    Row(9456, 384, 6, "add", 0, 1),  # 9.00
    Row(9456, 384, 6, "none", 13, 1, 2),  # 7.44
    Row(9456, 1536, 6, "gelu", 13, 1, 2),  # 26.57
    Row(12544, 64, 1, "none", 4, 1),  # 2.46
    Row(12544, 64, 9, "add", 4, 1),  # 5.18
    Row(12544, 96, 1, "none", 3, 1),  # 3.04
    Row(12544, 128, 1, "none", 3, 1),  # 2.93
    Row(12544, 128, 4, "none", 2, 1),  # 4.34
    Row(12544, 128, 18, "none", 2, 1),  # 8.63
    Row(12544, 192, 3, "add", 3, 1),  # not measured again
    Row(12544, 192, 3, "none", 13, 1, 3),  # 4.66
    Row(12544, 192, 9, "none", 1, 1),  # 8.44
    Row(12544, 256, 1, "add", 1, 1),  # 4.87
    Row(12544, 256, 18, "none", 1, 1),  # 12.70
    Row(12544, 512, 2, "add", 1, 1),  # 8.49
    Row(12544, 512, 4, "none", 2, 1),  # 8.96
    Row(12544, 512, 32, "none", 2, 1),  # 38.51
    Row(12544, 768, 3, "gelu", 13, 1, 1),  # 12.42
    Row(12544, 2048, 16, "none", 1, 1),  # 78.56
    Row(12608, 384, 6, "add", 0, 1),  # 9.55
    Row(12608, 384, 6, "none", 13, 1, 0),  # 8.55
    Row(12608, 384, 24, "add", 0, 1),  # 24.08
    Row(12608, 1536, 6, "gelu", 1, 1),  # 34.50
    Row(12800, 384, 6, "none", 13, 1, 1),  # 9.24
    Row(16384, 768, 12, "add", 1, 1),  # 35.62
    Row(16384, 768, 48, "add", 2, 1),  # 111.35
    Row(18816, 64, 9, "none", 3, 1),  # 6.30
    Row(18816, 128, 4, "none", 1, 1),  # 5.34
    Row(18816, 128, 18, "add", 1, 1),  # 12.10
    Row(18816, 192, 3, "none", 13, 1, 0),  # 5.49
    Row(18816, 192, 12, "add", 0, 1),  # 13.64
    Row(18816, 256, 1, "gelu", 3, 1),  # 6.76
    Row(18816, 256, 8, "none", 14, 1, 1),  # 11.50
    Row(18816, 768, 3, "gelu", 13, 1, 0),  # 17.71
    Row(24576, 200, 6, "add", 1, 1),  # 13.47
    Row(24576, 384, 4, "gelu", 13, 1, 1),  # 14.90
    Row(25088, 24, 3, "add", 12, 1),  # 3.91
    Row(25088, 40, 4, "add", 3, 1),  # 5.27
    Row(25088, 64, 1, "add", 3, 1),  # 3.47
    Row(25088, 72, 1, "none", 1, 1),  # 4.75
    Row(25088, 96, 2, "add", 1, 1),  # 5.28
    Row(25088, 112, 11, "add", 1, 1),  # 10.95
    Row(25088, 120, 1, "none", 1, 1),  # 5.40
    Row(25088, 128, 8, "none", 1, 1),  # 7.80
    Row(25088, 144, 1, "none", 13, 1, 0),  # 5.91
    Row(25088, 192, 3, "add", 0, 1),  # 7.49
    Row(25088, 192, 3, "none", 13, 1, 0),  # 6.18
    Row(25088, 192, 6, "none", 13, 1, 0),  # 8.55
    Row(25088, 192, 9, "none", 0, 1),  # 10.85
    Row(25088, 240, 1, "none", 14, 1, 1),  # 6.81
    Row(25088, 256, 1, "gelu", 1, 1),  # 7.45
    Row(25088, 256, 1, "none", 1, 1),  # 5.78
    Row(25088, 256, 2, "none", 1, 1),  # 6.93
    Row(25088, 256, 8, "none", 1, 1),  # 13.35
    Row(25088, 480, 2, "none", 1, 1),  # 11.64
    Row(25088, 512, 4, "none", 2, 1),  # 15.45
    Row(25088, 512, 8, "add", 1, 1),  # 28.72
    Row(25088, 576, 3, "none", 13, 1, 3),  # 13.52
    Row(25088, 672, 2, "none", 13, 1, 2),  # 15.10
    Row(25088, 1024, 4, "add", 2, 1),  # 39.18
    Row(25216, 384, 6, "none", 13, 1, 1),  # 14.74
    Row(25216, 1152, 6, "none", 13, 1, 1),  # 39.79
    Row(37632, 128, 1, "none", 3, 1),  # 5.03
    Row(37632, 128, 4, "none", 14, 1, 1),  # 7.87
    Row(37632, 128, 8, "none", 14, 1, 1),  # 12.67
    Row(37632, 128, 9, "none", 1, 1),  # not measured again
    Row(37632, 192, 3, "add", 3, 1),  # not measured again
    Row(37632, 192, 3, "none", 13, 1, 3),  # 8.09
    Row(37632, 256, 1, "add", 1, 1),  # 10.51
    Row(37632, 256, 8, "none", 14, 1, 2),  # 20.66
    Row(37632, 768, 3, "gelu", 13, 1, 1),  # 33.30
    Row(50176, 128, 1, "none", 1, 1),  # 5.85
    Row(50176, 128, 8, "none", 2, 1),  # 18.30
    Row(50176, 128, 18, "add", 1, 1),  # 23.74
    Row(50176, 192, 3, "add", 0, 1),  # not measured again
    Row(50176, 192, 3, "none", 13, 1, 0),  # 9.94
    Row(50176, 192, 9, "none", 0, 1),  # 20.13
    Row(50176, 256, 1, "add", 3, 1),  # 17.49
    Row(50176, 256, 1, "gelu", 1, 1),  # 13.13
    Row(50176, 256, 1, "none", 1, 1),  # 9.28
    Row(50176, 256, 2, "none", 1, 1),  # 11.97
    Row(50176, 256, 8, "none", 2, 1),  # 26.95
    Row(50176, 256, 36, "none", 1, 1),  # 80.53
    Row(50176, 1024, 4, "add", 2, 1),  # 71.77
    Row(50432, 384, 6, "add", 1, 1),  # 37.35
    Row(50432, 384, 6, "none", 13, 1, 2),  # 30.12
    Row(50432, 1536, 6, "gelu", 13, 1, 1),  # 128.03
    Row(75264, 64, 1, "add", 3, 1),  # 7.29
    Row(75264, 64, 9, "add", 3, 1),  # 17.06
    Row(75264, 128, 4, "none", 14, 1, 1),  # 16.15
    Row(75264, 256, 1, "gelu", 1, 1),  # 19.90
    Row(75264, 256, 1, "none", 14, 1, 2),  # 15.05
    Row(98304, 200, 6, "add", 1, 1),  # 51.06
    Row(98304, 384, 4, "gelu", 13, 1, 1),  # 49.06
    Row(100352, 24, 1, "none", 3, 1),  # 6.19
    Row(100352, 64, 1, "none", 4, 1),  # 6.25
    Row(100352, 72, 1, "none", 1, 1),  # 13.89
    Row(100352, 96, 1, "none", 14, 1, 1),  # 9.73
    Row(100352, 96, 6, "add", 1, 1),  # 32.64
    Row(100352, 120, 1, "none", 14, 1, 1),  # 12.06
    Row(100352, 128, 1, "none", 1, 1),  # 9.63
    Row(100352, 128, 2, "none", 14, 1, 2),  # 13.76
    Row(100352, 128, 9, "none", 2, 1),  # 25.75
    Row(100352, 128, 18, "add", 1, 1),  # 48.95
    Row(100352, 144, 1, "none", 13, 1, 0),  # 13.75
    Row(100352, 192, 3, "add", 3, 1),  # not measured again
    Row(100352, 192, 3, "none", 13, 1, 3),  # 22.03
    Row(100352, 192, 6, "none", 13, 1, 0),  # 32.80
    Row(100352, 192, 9, "none", 0, 1),  # 42.40
    Row(100352, 240, 1, "none", 14, 1, 1),  # 19.83
    Row(100352, 256, 1, "gelu", 1, 1),  # 25.88
    Row(100352, 256, 1, "none", 3, 1),  # 20.19
    Row(100352, 256, 8, "none", 14, 1, 2),  # 50.65
    Row(100352, 256, 18, "none", 1, 1),  # 84.47
    Row(100352, 288, 2, "none", 13, 1, 3),  # 27.44
    Row(100352, 512, 4, "none", 13, 1, 2),  # 56.95
    Row(100352, 512, 72, "none", 1, 1),  # 596.71
    Row(100352, 576, 3, "none", 13, 1, 1),  # 47.22
    Row(100352, 768, 3, "gelu", 13, 1, 1),  # 83.68
    Row(150528, 64, 1, "none", 3, 1),  # 7.99
    Row(150528, 256, 1, "gelu", 1, 1),  # 37.28
    Row(150528, 256, 1, "none", 3, 1),  # 28.80
    Row(200704, 128, 1, "none", 3, 1),  # 23.80
    Row(200704, 128, 9, "none", 2, 1),  # 54.01
    Row(200704, 128, 18, "add", 1, 1),  # 95.77
    Row(200704, 192, 3, "add", 0, 1),  # 63.79
    Row(200704, 192, 3, "none", 13, 1, 3),  # 44.68
    Row(200704, 192, 9, "none", 0, 1),  # 81.11
    Row(200704, 256, 1, "gelu", 1, 1),  # 48.29
    Row(200704, 256, 1, "none", 3, 1),  # 37.39
    Row(200704, 256, 8, "none", 2, 1),  # 100.24
    Row(401408, 64, 1, "none", 4, 1),  # 28.70
    Row(401408, 64, 9, "none", 3, 1),  # 66.32
    Row(401408, 72, 1, "none", 1, 1),  # 55.71
    Row(401408, 96, 1, "none", 14, 1, 1),  # 33.13
    Row(401408, 96, 6, "add", 1, 1),  # 115.64
    Row(401408, 128, 1, "none", 14, 1, 1),  # 39.88
    Row(401408, 128, 2, "none", 1, 1),  # 58.99
    Row(401408, 128, 9, "none", 1, 1),  # 97.02
    Row(401408, 144, 1, "none", 13, 1, 0),  # 43.93
    Row(401408, 256, 1, "gelu", 1, 1),  # 91.62
    Row(401408, 256, 1, "none", 3, 1),  # 74.04
    Row(401408, 256, 36, "none", 1, 1),  # 634.30
    Row(401408, 288, 2, "none", 13, 1, 3),  # 97.71
    Row(401408, 384, 2, "gelu", 13, 1, 1),  # 144.68
    Row(802816, 64, 1, "none", 4, 1),  # 55.21
    Row(802816, 256, 1, "gelu", 1, 1),  # 175.74
    Row(802816, 256, 1, "none", 2, 1),  # 152.06
    Row(1605632, 64, 1, "none", 3, 1),  # 109.80
    Row(1605632, 96, 1, "none", 14, 1, 1),  # 120.50
    Row(6422528, 64, 9, "none", 3, 1),  # 986.23
    # end of rows
]
"""The table."""


def _log2(number: Int) -> Int:
    """Approximates 256 times the logarithm, by a line between powers of two."""
    var whole = bit_width(number) - 1
    return (whole << 8) + ((number - (1 << whole)) << 8 >> whole)


comptime FEATURES = 7
"""What of a product its tile depends on."""
comptime WIDEST = 128
"""Rows and columns of the tiles that are counted."""
comptime MULTIPROCESSORS = 132
"""Of the GPU that the rows were measured on."""


def _features(
    pixels: Int, filters: Int, steps: Int, multiprocessors: Int
) -> StaticTuple[Int, FEATURES]:
    """Gives twice the logarithms of M, F (twice), the steps of K, the tiles of a multiprocessor, and
    what tiles pad F by (twice); and that of how many times as many tiles of 192 x 192, and of 192 x
    128, the multiprocessors could compute in as many turns.
    """
    var columns = ceildiv(filters, WIDEST)
    var f = _log2(filters)
    var padding = _log2(columns * WIDEST) - f
    var tiles = _log2(ceildiv(pixels, WIDEST) * columns)
    return StaticTuple[Int, FEATURES](
        2 * _log2(pixels),
        4 * f,
        2 * _log2(steps),
        2 * (tiles - _log2(multiprocessors)),
        4 * padding,
        _idle(ceildiv(pixels, 192) * ceildiv(filters, 192), multiprocessors),
        _idle(ceildiv(pixels, 192) * ceildiv(filters, 128), multiprocessors),
    )


def _idle(tiles: Int, multiprocessors: Int) -> Int:
    """Compares the tiles that fit into all turns with those that there are."""
    return _log2(ceildiv(tiles, multiprocessors) * multiprocessors) - _log2(tiles)


def choose(g: Geometry, width: Int, epilogue: Epilogue, device: Device, more: Int = 0) -> Row:
    """Chooses the tile of a product.

    Args:
        g: Sizes.
        width: Channels of a step of K.
        epilogue: What the accumulator goes through.
        device: The GPU.
        more: Steps of a second source.

    Returns:
        The nearest row whose splits the product has steps for.
    """
    var steps = g.r * g.s * ceildiv(g.c, width) + more
    return nearest[ROWS](g, steps, epilogue, device)


def chosen(config: Int, epilogue: Epilogue, windows: Bool) -> Bool:
    """Tells whether products get a tile; others are not compiled.

    Args:
        config: As a row's.
        epilogue: What the accumulator goes through.
        windows: Whether `turned` may choose the tile.

    Returns:
        Whether a row has it, and it has the epilogue; or it is one of TURNED.
    """
    if config >= FIRST_TURNED:
        return windows
    if config >= FIRST_PINGPONG and epilogue.adds:
        return False
    for row in materialize[ROWS]():
        if row.config == config:
            return True
    return False


def alike(row: Row) -> Row:
    """Finds a tile of CONFIGS, for what only hopper.mojo computes: several products, two sources.

    Args:
        row: Of the table.

    Returns:
        The row; with another tile if it has one of RESIDENT or PINGPONG.
    """
    comptime first = FIRST_RESIDENT
    var other = row
    if row.config >= FIRST_PINGPONG:
        other.config = row.next
    elif row.config >= first:
        other.config = materialize[ALIKE]()[row.config - first]
    return other


def turned(row: Row, g: Geometry, chunks: Int, device: Device) -> Row:
    """Finds a tile of TURNED that is faster than a row's tile.

    Compared are the clocks of a step of K: of a large tile of hopper.mojo those in which shared
    memory, of 128 bytes a clock, is read by wgmma and written by the copy engine; of one of
    turned.mojo those of the tensor cores, which take longer; times the tiles that the busiest
    multiprocessor has. Of 125 convolutions of 3 x 3 at batch 1 to 256 this chooses another tile for
    59: 20 % less time in the geometric mean, 1.6 % more in the worst case (H100, 2026-11-25).

    Args:
        row: Chosen for the product.
        g: Sizes.
        chunks: Steps of 128 bytes over the channels.
        device: The GPU.

    Returns:
        The row; with the faster tile if there is one.
    """
    var choice = Cheapest(row.config, 0)
    comptime for i in range(len(CONFIGS)):
        comptime config = CONFIGS[i]
        comptime if config.overlap:
            comptime clocks = 4 * config.groups * (16 + config.columns // 4) + config.stage() // ROW
            if row.config == i:
                var turns = device.waves(g.tiles(config.rows(), config.columns))
                choice.cost = Float64(turns * clocks)
    comptime for i in range(len(TURNED)):
        comptime config = TURNED[i]
        var turns = device.waves(turned_tiles[config](g, chunks=chunks))
        if turns > 0:
            comptime clocks = config.pixels * config.filters // 32
            choice.offer(FIRST_TURNED + i, Float64(turns * clocks))
    var other = row
    other.config = choice.best
    return other


def takes(config: Int, steps: Int, epilogue: Epilogue) -> Bool:
    """Tells whether a block computes a product.

    Args:
        config: As a row's.
        steps: Of K.
        epilogue: What the accumulator goes through.

    Returns:
        False for some products and blocks of PINGPONG.
    """
    comptime for i in range(len(PINGPONG)):
        comptime block = PINGPONG[i]
        if config == FIRST_PINGPONG + i:
            return block.takes(steps, epilogue)
    return True


def nearest[rows: List[Row]](g: Geometry, steps: Int, epilogue: Epilogue, device: Device) -> Row:
    """Finds the measured product that is most like another.

    Parameters:
        rows: What was measured.

    Args:
        g: Sizes.
        steps: Of K.
        epilogue: What the accumulator goes through.
        device: The GPU.

    Returns:
        The nearest row whose splits the product has steps for, and whose block takes it.
    """
    var costs: StaticString = "gelu" if epilogue.gelu else "none"
    if epilogue.adds:
        costs = "add_gelu" if epilogue.gelu else "add"
    var wanted = _features(g.pixels(), g.f, steps, device.multiprocessors)
    var choice = Cheapest(Row(0, 0, 0, "none", 0, 1))
    for row in materialize[rows]():
        if row.splits <= steps and takes(row.config, steps, epilogue):
            var found = _features(row.pixels, row.filters, row.steps, MULTIPROCESSORS)
            var distance = 256 * Int(row.epilogue != costs)
            comptime for i in range(FEATURES):
                distance += abs(found[i] - wanted[i])
            # Of rows as near the one of more pixels.
            choice.offer(row, Float64((distance << 32) - row.pixels))
    return choice.best
