"""Which tile a product gets on Hopper: measured rows, and the nearest one for all others.

`python -m maxvision.ops.gemm.tune` writes the rows. A row holds M, F, the steps of K (128 bytes of channels,
tap by tap), the epilogue as far as it costs time, the tile, the blocks that share it, and in the comment
the microseconds of a launch in a CUDA graph. A product that is not in the table takes the tile of
the row nearest in log2 M, log2 F (twice), log2 steps, log2 of its tiles of 128 x 128, log2 of what
these pad F by (twice), and how full the GPU is in the last turn of tiles of 192 x 192 and 192 x 128
(a half each): of 891 products, each left out of the table once, 96 % ran within 20 % of their best
tile, 95 % without the last two (H200, 2026-11-24). Where a GPU has other than the H200's 132
multiprocessors, its tiles are counted by multiprocessor, and the turns are its own.

`choose` finds the tile while the op runs. The compiler asks `reached` and `chosen` which tiles those may
be, and compiles no others. What a `Family` of products makes of a row, `Family.tile` tells both.
"""

from std.bit import bit_width
from std.math import ceildiv

from ..choice import Cheapest
from ..device import Device
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.moments import GROUP
from ..hopper.shared import ROW
from ..hopper.tile import TileConfig
from .hopper import Config
from .layer import Layer
from .pingpong import PingPong
from .turned import TurnedConfig, turned_tiles

comptime CONFIGS: List[Config] = [
    Config(groups=3, columns=192, stages=4, blocks=1, overlap=True),
    Config(groups=3, columns=128, stages=5, blocks=1, overlap=True),
    Config(groups=2, columns=128, stages=6, blocks=1, overlap=True),
    Config(groups=3, columns=64, stages=7, blocks=1, overlap=True),
    Config(groups=1, columns=64, stages=6, blocks=2),
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
comptime TURNED_FILTERS = 256
"""Of as many filters a product gets none of TURNED (`turned` has the times)."""
comptime FIRST_TURNED = FIRST_PINGPONG + len(PINGPONG)
"""The first of TURNED, as `turned` counts them on from PINGPONG."""
comptime TILES = FIRST_TURNED + len(TURNED)
"""All tiles."""
comptime LARGEST = 0
"""The tile of CONFIGS of the most pixels and filters."""
comptime WIDE = 1
"""The tile of CONFIGS of the most pixels, and of 128 filters."""
comptime LOW = 4
"""The tile of CONFIGS of 64 rows and columns that no cluster shares."""
comptime BESIDE_MOMENTS = FIRST_RESIDENT + 2
"""The block of RESIDENT of 64 rows and columns that no cluster shares."""


def _log2(number: Int) -> Int:
    """Approximates 256 times the logarithm, by a line between powers of two."""
    var whole = bit_width(number) - 1
    return (whole << 8) + ((number - (1 << whole)) << 8 >> whole)


comptime WIDEST = 128
"""Rows and columns of the tiles that are counted."""
comptime MULTIPROCESSORS = 132
"""Of the GPU that the rows were measured on."""
comptime IMAGES: List[Int] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
"""The batch sizes that `reached` looks at."""


struct Features(TrivialRegisterPassable):
    """What of a product its tile depends on: logarithms, as `_log2` gives them.

    They are fields, not a vector: the compiler, which runs `reached`, is ten times as fast.
    """

    var pixels: Int
    """Of M, twice."""
    var tiles: Int
    """Of the tiles of a multiprocessor, twice."""
    var filters: Int
    """Of F, four times."""
    var padding: Int
    """Of what tiles pad F by, four times."""
    var steps: Int
    """Of the steps of K, twice."""
    var idle: Int
    """Of how many times as many tiles of 192 x 192 the multiprocessors could compute in as many turns."""
    var idle_128: Int
    """Likewise, of 192 x 128."""

    def __init__(out self, pixels: Int, filters: Int, steps: Int, multiprocessors: Int):
        """Computes them.

        Args:
            pixels: M.
            filters: F.
            steps: Of K.
            multiprocessors: Of the GPU.
        """
        var columns = ceildiv(filters, WIDEST)
        var f = _log2(filters)
        var tiles = _log2(ceildiv(pixels, WIDEST) * columns)
        self.pixels = 2 * _log2(pixels)
        self.tiles = 2 * (tiles - _log2(multiprocessors))
        self.filters = 4 * f
        self.padding = 4 * (_log2(columns * WIDEST) - f)
        self.steps = 2 * _log2(steps)
        var tall = ceildiv(pixels, 192)
        self.idle = _idle(tall * ceildiv(filters, 192), multiprocessors)
        self.idle_128 = _idle(tall * ceildiv(filters, 128), multiprocessors)


def _idle(tiles: Int, multiprocessors: Int) -> Int:
    """Compares the tiles that fit into all turns with those that there are."""
    return _log2(ceildiv(tiles, multiprocessors) * multiprocessors) - _log2(tiles)


struct Row(TrivialRegisterPassable):
    """A measured product and its fastest tile."""

    var pixels: Int
    """M."""
    var filters: Int
    """F."""
    var steps: Int
    """Steps of K."""
    var costs: Int
    """Of the epilogue, as `_costs` counts them."""
    var config: Int
    """Index in CONFIGS, RESIDENT and PINGPONG, one after the other."""
    var splits: Int
    """Blocks that share a tile."""
    var next: Int
    """In 8 bits the fastest tile of CONFIGS that no cluster shares, if the row's is one of PINGPONG."""
    var features: Features
    """Of the product."""

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
            next: As the member.
        """
        self.pixels, self.filters, self.steps = pixels, filters, steps
        self.costs = Int(epilogue == "add") + 2 * Int(epilogue == "gelu")
        self.config, self.splits, self.next = config, splits, next
        self.features = Features(pixels, filters, steps, MULTIPROCESSORS)

    def is_of(self, other: Self) -> Bool:
        """Tells whether two rows are of one product.

        Args:
            other: The other row.

        Returns:
            Whether they are.
        """
        var sizes = self.pixels == other.pixels and self.filters == other.filters
        return sizes and self.steps == other.steps and self.costs == other.costs


comptime ROWS: List[Row] = [
    # rows: ops/gemm/tune.py, 2026-11-25, NVIDIA H200; not in its list 11-24; pingpong 11-27, H100; 64 filters of one step 11-29
    Row(1, 1000, 6, "none", 11, 1),  # 2.02
    Row(1, 1000, 8, "none", 8, 4),  # 2.17
    Row(1, 1000, 12, "none", 9, 2),  # 2.45
    Row(2, 1000, 32, "none", 8, 8),  # 3.30
    Row(6, 1000, 6, "none", 11, 1),  # 2.08
    Row(6, 1000, 8, "none", 8, 4),  # 2.18
    Row(16, 1000, 12, "none", 8, 4),  # 2.48
    Row(24, 1000, 6, "none", 11, 1),  # 2.16
    Row(48, 1000, 32, "none", 8, 8),  # 3.37
    Row(49, 192, 11, "none", 9, 8),  # 2.01
    Row(49, 320, 18, "none", 9, 8),  # 2.32
    Row(49, 512, 32, "none", 9, 4),  # 2.96
    Row(49, 512, 36, "none", 8, 8),  # 3.28
    Row(49, 512, 72, "add", 9, 8),  # 3.66
    Row(49, 768, 12, "add", 9, 4),  # 2.72
    Row(49, 1088, 17, "add", 8, 4),  # 3.40
    Row(49, 2048, 16, "none", 9, 2),  # 3.48
    Row(49, 3072, 12, "gelu", 11, 1),  # 4.13
    Row(64, 1000, 8, "none", 11, 1),  # 2.43
    Row(64, 1000, 12, "none", 9, 2),  # 2.86
    Row(98, 512, 72, "none", 8, 8),  # 4.53
    Row(98, 2048, 8, "add", 11, 1),  # 3.00
    Row(98, 2048, 16, "none", 8, 2),  # 4.96
    Row(128, 768, 12, "add", 9, 2),  # 3.15
    Row(128, 768, 48, "add", 8, 8),  # 5.44
    Row(128, 1000, 6, "none", 10, 1),  # 2.59
    Row(128, 1000, 8, "none", 11, 1),  # 2.86
    Row(128, 1000, 12, "none", 9, 2),  # 3.24
    Row(128, 1000, 32, "none", 8, 4),  # 4.94
    Row(147, 512, 4, "none", 11, 1),  # 1.92
    Row(147, 512, 36, "none", 8, 8),  # 4.61
    Row(147, 2048, 16, "none", 4, 1),  # 5.68
    Row(196, 112, 11, "add", 9, 4),  # 2.33
    Row(196, 256, 18, "none", 8, 4),  # 3.25
    Row(196, 256, 36, "add", 9, 4),  # 3.76
    Row(196, 256, 36, "none", 8, 8),  # 3.59
    Row(196, 384, 12, "none", 9, 2),  # 3.16
    Row(196, 384, 27, "none", 8, 8),  # 4.04
    Row(196, 512, 8, "none", 11, 1),  # 2.71
    Row(196, 512, 16, "none", 9, 2),  # 3.46
    Row(196, 512, 32, "none", 8, 4),  # 4.99
    Row(196, 1024, 4, "add", 11, 1),
    Row(197, 768, 48, "add", 8, 4),  # 7.93
    Row(197, 1536, 6, "gelu", 11, 1),  # 3.20
    Row(197, 3072, 12, "gelu", 4, 1),  # 6.37
    Row(200, 384, 6, "none", 11, 1),  # 2.33
    Row(256, 1000, 6, "none", 10, 1),  # 3.08
    Row(256, 1000, 8, "none", 11, 1),  # 2.92
    Row(256, 1000, 32, "none", 8, 2),  # 6.51
    Row(294, 512, 72, "none", 8, 4),  # 7.54
    Row(392, 128, 8, "none", 11, 1),  # 2.44
    Row(392, 128, 16, "none", 9, 4),  # 3.02
    Row(392, 256, 16, "none", 9, 4),  # 3.50
    Row(392, 384, 27, "none", 8, 4),  # 5.17
    Row(392, 512, 36, "none", 8, 4),  # 6.72
    Row(392, 512, 72, "add", 8, 2),  # 11.43
    Row(392, 512, 72, "none", 8, 4),  # 9.95
    Row(392, 768, 12, "add", 4, 1),  # 4.74
    Row(392, 768, 48, "add", 8, 2),  # 9.92
    Row(392, 2048, 8, "add", 4, 1),  # 5.00
    Row(392, 2048, 16, "none", 4, 1),  # 7.26
    Row(392, 2304, 12, "none", 2, 1),  # 6.20
    Row(392, 3072, 12, "gelu", 2, 1),  # 7.60
    Row(394, 384, 6, "none", 11, 1),  # 2.56
    Row(588, 256, 36, "add", 8, 4),  # 6.15
    Row(588, 512, 4, "none", 10, 1),  # 2.44
    Row(588, 512, 16, "none", 4, 1),  # 5.22
    Row(588, 512, 32, "none", 8, 2),  # 7.30
    Row(588, 2048, 16, "none", 2, 1),  # 7.62
    Row(591, 384, 6, "none", 10, 1),  # 2.72
    Row(591, 1536, 6, "gelu", 4, 1),  # 4.41
    Row(768, 384, 4, "gelu", 4, 1),  # 3.11
    Row(784, 128, 8, "none", 11, 1),  # 2.49
    Row(784, 128, 16, "none", 9, 2),  # 3.52
    Row(784, 128, 18, "none", 8, 4),  # 3.55
    Row(784, 192, 3, "add", 11, 1),  # 2.29
    Row(784, 192, 6, "none", 10, 1),  # 2.56
    Row(784, 192, 9, "none", 11, 1),  # 3.04
    Row(784, 192, 11, "none", 9, 2),  # 3.46
    Row(784, 256, 8, "none", 11, 1),  # 2.93
    Row(784, 256, 16, "none", 8, 4),  # 4.33
    Row(784, 256, 36, "add", 8, 2),  # 7.37
    Row(784, 256, 36, "none", 8, 4),  # 6.52
    Row(784, 384, 27, "none", 8, 2),  # 6.71
    Row(784, 512, 4, "none", 4, 1),  # 2.94
    Row(784, 512, 16, "none", 4, 1),  # 5.38
    Row(784, 512, 32, "none", 8, 2),  # 8.25
    Row(784, 512, 72, "none", 8, 2),  # 11.84
    Row(784, 576, 3, "none", 4, 1),  # 2.69
    Row(784, 1024, 8, "none", 4, 1),  # 4.26
    Row(784, 2048, 8, "add", 2, 1),  # 6.45
    Row(784, 2304, 12, "none", 2, 1),  # 7.43
    Row(784, 3072, 12, "gelu", 1, 1),  # 10.17
    Row(788, 384, 6, "add", 11, 1),  # 3.36
    Row(788, 1536, 6, "gelu", 3, 1),  # 5.03
    Row(1024, 768, 12, "add", 4, 1),  # 5.20
    Row(1024, 768, 48, "add", 6, 1),  # 11.78
    Row(1024, 3072, 12, "gelu", 6, 1),  # 12.83
    Row(1176, 192, 3, "none", 11, 1),  # 2.38
    Row(1176, 256, 16, "none", 8, 2),  # 5.19
    Row(1176, 256, 36, "add", 8, 2),  # 7.98
    Row(1176, 512, 72, "add", 10, 1),  # 18.32
    Row(1176, 512, 72, "none", 6, 1),  # 15.61
    Row(1176, 1024, 8, "none", 3, 1),  # 5.05
    Row(1176, 2048, 8, "add", 1, 1),  # 7.73
    Row(1182, 1536, 6, "gelu", 2, 1),  # 5.93
    Row(1568, 112, 8, "none", 11, 1),  # 2.91
    Row(1568, 128, 1, "none", 11, 1),  # 1.85
    Row(1568, 128, 16, "none", 8, 4),  # 4.27
    Row(1568, 128, 18, "none", 9, 2),  # 4.37
    Row(1568, 192, 3, "add", 4, 1),  # 2.93
    Row(1568, 192, 3, "none", 10, 1),  # 2.43
    Row(1568, 192, 9, "none", 11, 1),  # 3.62
    Row(1568, 192, 11, "none", 4, 1),  # 4.14
    Row(1568, 256, 2, "none", 4, 1),  # 2.51
    Row(1568, 256, 16, "none", 4, 1),  # 5.30
    Row(1568, 256, 36, "none", 8, 2),  # 8.11
    Row(1568, 320, 18, "none", 4, 1),  # 5.86
    Row(1568, 384, 12, "none", 4, 1),  # 4.78
    Row(1568, 384, 27, "none", 6, 1),  # 7.79
    Row(1568, 480, 2, "none", 4, 1),  # 2.67
    Row(1568, 512, 16, "none", 4, 1),  # 6.00
    Row(1568, 512, 32, "none", 6, 1),  # 9.28
    Row(1568, 512, 72, "none", 6, 1),  # 15.81
    Row(1568, 768, 3, "gelu", 3, 1),  # 3.91
    Row(1568, 1024, 8, "none", 2, 1),  # 5.57
    Row(1568, 1088, 17, "add", 2, 1),  # 9.40
    Row(1568, 1280, 5, "none", 2, 1),  # 4.95
    Row(1568, 2048, 8, "add", 0, 1),  # 10.28
    Row(1576, 1536, 6, "gelu", 1, 1),  # 7.04
    Row(2048, 768, 12, "add", 3, 1),  # 6.99
    Row(2048, 768, 48, "add", 7, 1),  # 17.13
    Row(2048, 3072, 12, "gelu", 1, 1),  # 19.02
    Row(2352, 128, 1, "none", 10, 1),  # 2.25
    Row(2352, 128, 8, "none", 4, 1),  # 3.63
    Row(2352, 128, 18, "none", 8, 2),  # 4.90
    Row(2352, 256, 8, "none", 13, 1),  # 4.14
    Row(2352, 256, 16, "none", 4, 1),  # 5.86
    Row(2352, 256, 36, "add", 6, 1),  # 9.50
    Row(2352, 512, 2, "add", 3, 1),  # 3.61
    Row(2352, 512, 4, "none", 3, 1),  # 3.75
    Row(2352, 512, 16, "none", 3, 1),  # 7.48
    Row(2352, 512, 36, "none", 7, 1),  # 13.19
    Row(2352, 512, 72, "add", 7, 1),  # 21.80
    Row(2352, 768, 3, "gelu", 13, 1),  # 4.53
    Row(2352, 1024, 4, "add", 1, 1),  # 5.61
    Row(2352, 1024, 8, "none", 13, 1),  # 6.93
    Row(2352, 2048, 16, "none", 6, 1),  # 19.56
    Row(2364, 384, 6, "add", 4, 1),  # 4.15
    Row(2364, 384, 24, "add", 6, 1),  # 8.35
    Row(2364, 768, 48, "add", 6, 1),  # 18.40
    Row(2364, 1536, 6, "gelu", 13, 1),  # 8.53
    Row(3136, 24, 3, "add", 11, 1),  # 1.76
    Row(3136, 64, 1, "add", 11, 1),  # 1.94
    Row(3136, 64, 9, "add", 10, 1),  # 3.08
    Row(3136, 80, 8, "add", 11, 1),  # 3.85
    Row(3136, 96, 2, "add", 10, 1),  # 2.73
    Row(3136, 112, 11, "add", 4, 1),  # 4.71
    Row(3136, 128, 1, "none", 4, 1),  # 2.29
    Row(3136, 128, 16, "none", 4, 1),  # 5.30
    Row(3136, 256, 1, "gelu", 4, 1),  # 2.71
    Row(3136, 256, 8, "none", 4, 1),  # 4.18
    Row(3136, 384, 12, "none", 3, 1),  # 6.03
    Row(3136, 512, 2, "add", 2, 1),  # 4.34
    Row(3136, 512, 4, "none", 13, 1),  # 4.13
    Row(3136, 512, 16, "none", 2, 1),  # 7.83
    Row(3136, 512, 72, "add", 6, 1),  # 24.68
    Row(3136, 768, 3, "gelu", 13, 1),  # 4.82
    Row(3136, 960, 3, "none", 3, 1),  # 5.08
    Row(3136, 1024, 4, "add", 0, 1),  # 7.51
    Row(3136, 1024, 8, "none", 13, 1),  # 7.79
    Row(3136, 1152, 3, "none", 12, 1),  # 5.56
    Row(3136, 2048, 8, "add", 7, 1),  # 17.99
    Row(3136, 2304, 12, "none", 2, 1),  # 22.30
    Row(3152, 384, 6, "add", 3, 1),  # 4.67
    Row(3152, 384, 24, "add", 3, 1),  # 10.22
    Row(3152, 768, 12, "add", 1, 1),  # 9.11
    Row(3152, 1536, 6, "gelu", 13, 1),  # 9.96
    Row(3152, 3072, 12, "gelu", 6, 1),  # 30.12
    Row(4096, 768, 12, "add", 7, 1),  # 9.91
    Row(4096, 768, 48, "add", 1, 1),  # 29.59
    Row(4704, 64, 1, "none", 11, 1),  # 1.85
    Row(4704, 128, 9, "none", 13, 1),  # 4.41
    Row(4704, 128, 18, "none", 6, 1),  # 6.59
    Row(4704, 192, 3, "none", 4, 1),  # 3.08
    Row(4704, 192, 9, "none", 4, 1),  # 4.72
    Row(4704, 256, 2, "none", 4, 1),  # 3.20
    Row(4704, 256, 8, "none", 13, 1),  # 5.15
    Row(4704, 256, 16, "none", 3, 1),  # 7.43
    Row(4704, 256, 36, "add", 7, 1),  # 13.19
    Row(4704, 384, 27, "none", 6, 1),  # 11.63
    Row(4704, 512, 2, "add", 1, 1),  # 4.89
    Row(4704, 512, 4, "none", 13, 1),  # 4.61
    Row(4704, 512, 16, "none", 1, 1),  # 10.47
    Row(4704, 768, 3, "gelu", 12, 1),  # 6.27
    Row(4704, 1024, 4, "add", 1, 1),  # 9.45
    Row(4704, 1024, 8, "none", 13, 1),  # 10.09
    Row(4728, 384, 6, "add", 2, 1),  # 5.61
    Row(4728, 384, 6, "none", 13, 1),  # 4.91
    Row(4728, 1536, 6, "gelu", 13, 1),  # 13.04
    Row(6144, 384, 4, "gelu", 13, 1),  # 6.32
    Row(6272, 40, 4, "add", 10, 1),  # 2.81
    Row(6272, 64, 1, "add", 11, 1),  # 2.37
    Row(6272, 64, 4, "add", 4, 1),  # 3.22
    Row(6272, 64, 9, "none", 10, 1),  # 3.69
    Row(6272, 80, 8, "add", 3, 1),  # 5.20
    Row(6272, 128, 4, "none", 4, 1),  # 3.23
    Row(6272, 192, 3, "add", 3, 1),  # 3.92
    Row(6272, 192, 9, "none", 3, 1),  # 5.54
    Row(6272, 192, 18, "add", 3, 1),  # 8.95
    Row(6272, 256, 1, "gelu", 3, 1),  # 3.43
    Row(6272, 256, 8, "none", 13, 1),  # 5.34
    Row(6272, 256, 18, "none", 2, 1),  # 9.18
    Row(6272, 256, 36, "none", 7, 1),  # 14.55
    Row(6272, 320, 18, "none", 1, 1),  # 13.11
    Row(6272, 384, 6, "add", 7, 1),  # 6.74
    Row(6272, 480, 2, "none", 13, 1),  # 4.41
    Row(6272, 512, 8, "add", 7, 1),  # 8.37
    Row(6272, 512, 8, "none", 13, 1),  # 7.30
    Row(6272, 576, 3, "none", 12, 1),  # 5.19
    Row(6272, 768, 3, "gelu", 12, 1),  # 7.38
    Row(6272, 768, 12, "add", 0, 1),  # 14.12
    Row(6272, 768, 48, "add", 0, 1),  # 41.42
    Row(6272, 1088, 17, "add", 7, 1),  # 32.52
    Row(6272, 1152, 3, "none", 12, 1),  # 8.11
    Row(6272, 1280, 5, "none", 13, 1),  # 10.36
    Row(6272, 2048, 8, "add", 1, 1),  # 29.56
    Row(6272, 2048, 16, "none", 1, 1),  # 41.52
    Row(6272, 2304, 12, "none", 0, 1),  # 38.67
    Row(6304, 384, 24, "add", 1, 1),  # 14.56
    Row(6304, 1152, 6, "none", 12, 1),  # 11.53
    Row(6304, 1536, 6, "gelu", 13, 1),  # 16.60
    Row(6304, 3072, 12, "gelu", 1, 1),  # 52.50
    Row(6400, 384, 6, "none", 13, 1),  # 5.44
    Row(8192, 768, 12, "none", 7, 1),  # 16.69
    Row(8192, 768, 48, "add", 1, 1),  # 55.18
    Row(9408, 64, 1, "add", 4, 1),  # 2.67
    Row(9408, 64, 4, "none", 4, 1),  # 3.17
    Row(9408, 64, 9, "none", 10, 1),  # 4.51
    Row(9408, 128, 1, "none", 4, 1),  # 2.76
    Row(9408, 128, 4, "none", 13, 1),  # 3.91
    Row(9408, 128, 8, "none", 13, 1),  # 4.89
    Row(9408, 128, 18, "add", 7, 1),  # 9.11
    Row(9408, 128, 18, "none", 6, 1),  # 8.47
    Row(9408, 192, 3, "none", 12, 1),  # 4.34
    Row(9408, 256, 1, "add", 1, 1),  # 4.58
    Row(9408, 256, 1, "gelu", 13, 1),  # 4.30
    Row(9408, 256, 1, "none", 3, 1),  # 3.59
    Row(9408, 256, 2, "none", 13, 1),  # 3.94
    Row(9408, 256, 8, "none", 13, 1),  # 6.45
    Row(9408, 256, 36, "none", 7, 1),  # 19.30
    Row(9408, 384, 27, "none", 2, 1),  # 20.31
    Row(9408, 512, 4, "none", 13, 1),  # 6.50
    Row(9408, 512, 16, "none", 6, 1),  # 18.31
    Row(9408, 768, 3, "gelu", 12, 1),  # 9.89
    Row(9408, 1024, 8, "none", 1, 1),  # 18.47
    Row(9456, 384, 6, "none", 13, 1),  # 6.66
    Row(12288, 384, 4, "gelu", 12, 1),  # 9.27
    Row(12544, 40, 4, "add", 10, 1),  # 3.84
    Row(12544, 64, 9, "add", 4, 1),  # 5.18
    Row(12544, 80, 8, "add", 3, 1),  # 6.91
    Row(12544, 96, 1, "none", 3, 1),  # 3.00
    Row(12544, 112, 8, "none", 2, 1),  # 5.89
    Row(12544, 128, 4, "none", 13, 1),  # 4.14
    Row(12544, 128, 8, "none", 13, 1),  # 5.21
    Row(12544, 128, 16, "none", 2, 1),  # 7.88
    Row(12544, 192, 3, "add", 7, 1),  # 5.79
    Row(12544, 192, 3, "none", 12, 1),  # 4.65
    Row(12544, 192, 6, "none", 12, 1),  # 5.87
    Row(12544, 192, 9, "none", 7, 1),  # 8.56
    Row(12544, 192, 18, "add", 7, 1),  # 13.40
    Row(12544, 256, 1, "add", 1, 1),  # 4.87
    Row(12544, 256, 1, "gelu", 13, 1),  # 4.75
    Row(12544, 256, 8, "none", 13, 1),  # 7.32
    Row(12544, 256, 18, "none", 7, 1),  # 12.53
    Row(12544, 320, 18, "none", 0, 1),  # 17.22
    Row(12544, 384, 6, "add", 0, 1),  # 9.40
    Row(12544, 384, 27, "none", 0, 1),  # 23.73
    Row(12544, 480, 2, "none", 1, 1),  # 6.81
    Row(12544, 512, 2, "add", 7, 1),  # 8.48
    Row(12544, 512, 4, "none", 13, 1),  # 7.71
    Row(12544, 512, 8, "add", 7, 1),  # 14.23
    Row(12544, 512, 36, "none", 7, 1),  # 41.86
    Row(12544, 512, 72, "add", 1, 1),  # 76.47
    Row(12544, 576, 3, "none", 12, 1),  # 8.07
    Row(12544, 768, 3, "gelu", 12, 1),  # 12.37
    Row(12544, 768, 12, "add", 1, 1),  # 28.74
    Row(12544, 1024, 8, "none", 2, 1),  # 24.58
    Row(12544, 1088, 17, "add", 0, 1),  # 50.55
    Row(12544, 1152, 6, "none", 12, 1),  # 20.38
    Row(12544, 2048, 16, "none", 1, 1),  # 78.64
    Row(12608, 384, 6, "none", 12, 1),  # 9.07
    Row(12608, 1536, 6, "gelu", 13, 1),  # 31.55
    Row(12800, 384, 6, "none", 13, 1),  # 7.96
    Row(18816, 64, 1, "none", 4, 1),  # 2.82
    Row(18816, 64, 9, "none", 3, 1),  # 6.30
    Row(18816, 128, 4, "none", 13, 1),  # 4.49
    Row(18816, 128, 18, "add", 1, 1),  # 12.10
    Row(18816, 192, 3, "none", 12, 1),  # 5.19
    Row(18816, 256, 1, "add", 3, 1),  # 7.11
    Row(18816, 256, 1, "gelu", 13, 1),  # 6.40
    Row(18816, 256, 8, "none", 13, 1),  # 11.45
    Row(24576, 200, 6, "add", 7, 1),  # 13.25
    Row(24576, 384, 4, "gelu", 12, 1),  # 15.53
    Row(25088, 24, 1, "none", 11, 1),  # 2.17
    Row(25088, 40, 4, "add", 3, 1),  # 5.21
    Row(25088, 112, 8, "none", 1, 1),  # 8.05
    Row(25088, 128, 9, "none", 13, 1),  # 8.08
    Row(25088, 192, 3, "add", 0, 1),  # 7.52
    Row(25088, 192, 3, "none", 12, 1),  # 6.19
    Row(25088, 192, 6, "none", 12, 1),  # 8.62
    Row(25088, 192, 9, "none", 0, 1),  # 10.85
    Row(25088, 240, 1, "none", 13, 1),  # 6.81
    Row(25088, 256, 1, "add", 7, 1),  # 7.48
    Row(25088, 256, 1, "gelu", 13, 1),  # 7.19
    Row(25088, 256, 2, "none", 13, 1),  # 6.30
    Row(25088, 256, 8, "none", 6, 1),  # 14.88
    Row(25088, 256, 36, "add", 7, 1),  # 43.20
    Row(25088, 256, 36, "none", 1, 1),  # 39.09
    Row(25088, 480, 2, "none", 13, 1),  # 10.29
    Row(25088, 512, 2, "add", 3, 1),  # 18.77
    Row(25088, 512, 4, "none", 13, 1),  # 15.11
    Row(25088, 512, 8, "add", 1, 1),  # 28.89
    Row(25088, 512, 36, "none", 1, 1),  # 78.98
    Row(25088, 576, 3, "none", 12, 1),  # 13.84
    Row(25088, 768, 3, "gelu", 12, 1),  # 23.11
    Row(25216, 384, 24, "add", 0, 1),  # 47.10
    Row(25216, 1536, 6, "gelu", 12, 1),  # 57.88
    Row(28224, 64, 1, "none", 4, 1),  # 3.08
    Row(37632, 128, 1, "none", 3, 1),  # 5.03
    Row(37632, 128, 4, "none", 13, 1),  # 6.72
    Row(37632, 192, 3, "none", 12, 1),  # 7.92
    Row(37632, 256, 1, "add", 1, 1),  # 10.51
    Row(37632, 256, 1, "gelu", 13, 1),  # 9.76
    Row(37632, 256, 1, "none", 13, 1),  # 7.44
    Row(37632, 768, 3, "gelu", 12, 1),  # 32.36
    Row(49152, 384, 4, "gelu", 12, 1),  # 29.52
    Row(50176, 64, 9, "none", 3, 1),  # 10.93
    Row(50176, 80, 8, "add", 1, 1),  # 20.12
    Row(50176, 96, 2, "add", 1, 1),  # 8.59
    Row(50176, 120, 1, "none", 13, 1),  # 7.77
    Row(50176, 128, 1, "none", 13, 1),  # 5.75
    Row(50176, 128, 16, "none", 2, 1),  # 30.71
    Row(50176, 128, 18, "add", 1, 1),  # 23.83
    Row(50176, 128, 18, "none", 1, 1),  # 22.24
    Row(50176, 144, 1, "none", 12, 1),  # 8.56
    Row(50176, 192, 3, "none", 12, 1),  # 9.97
    Row(50176, 240, 1, "none", 13, 1),  # 10.61
    Row(50176, 256, 1, "add", 3, 1),  # 17.14
    Row(50176, 256, 1, "gelu", 13, 1),  # 12.60
    Row(50176, 256, 1, "none", 13, 1),  # 9.44
    Row(50176, 256, 2, "none", 13, 1),  # 12.45
    Row(50176, 256, 8, "none", 2, 1),  # 26.88
    Row(50176, 288, 2, "none", 12, 1),  # 14.95
    Row(50176, 384, 6, "add", 1, 1),  # 38.27
    Row(50176, 480, 2, "none", 12, 1),  # 21.60
    Row(50176, 512, 2, "add", 3, 1),  # 35.11
    Row(50176, 512, 4, "none", 13, 1),  # 30.86
    Row(50176, 512, 8, "add", 1, 1),  # 54.40
    Row(50176, 672, 2, "none", 12, 1),  # 27.93
    Row(50176, 768, 3, "gelu", 12, 1),  # 43.76
    Row(50432, 384, 6, "none", 12, 1),  # 33.05
    Row(75264, 64, 1, "add", 3, 1),  # 7.29
    Row(75264, 128, 4, "none", 13, 1),  # 20.79
    Row(75264, 256, 1, "gelu", 13, 1),  # 19.01
    Row(75264, 256, 1, "none", 13, 1),  # 18.32
    Row(98304, 384, 4, "gelu", 12, 1),  # 55.06
    Row(100352, 64, 1, "none", 3, 1),  # 6.33
    Row(100352, 72, 1, "none", 13, 1),  # 10.45
    Row(100352, 96, 6, "add", 7, 1),  # 32.21
    Row(100352, 120, 1, "none", 13, 1),  # 12.03
    Row(100352, 128, 1, "none", 13, 1),  # 9.68
    Row(100352, 128, 2, "none", 13, 1),  # 14.07
    Row(100352, 128, 8, "none", 2, 1),  # 33.59
    Row(100352, 128, 9, "none", 13, 1),  # 26.10
    Row(100352, 128, 18, "add", 1, 1),  # 49.50
    Row(100352, 240, 1, "none", 13, 1),  # 19.73
    Row(100352, 288, 2, "none", 12, 1),  # 27.93
    Row(100352, 512, 4, "none", 13, 1),  # 59.17
    Row(100352, 512, 72, "none", 1, 1),  # 610.51
    Row(150528, 256, 1, "gelu", 13, 1),  # 37.12
    Row(150528, 256, 1, "none", 3, 1),  # 28.80
    Row(196608, 200, 6, "add", 1, 1),  # 98.69
    Row(200704, 24, 1, "none", 3, 1),  # 9.87
    Row(200704, 64, 1, "none", 3, 1),  # 14.09
    Row(200704, 72, 1, "none", 13, 1),  # 18.10
    Row(200704, 96, 2, "add", 1, 1),  # 35.47
    Row(200704, 128, 1, "none", 13, 1),  # 20.65
    Row(200704, 128, 2, "none", 12, 1),  # 29.38
    Row(200704, 128, 4, "none", 1, 1),  # 39.62
    Row(200704, 128, 9, "none", 2, 1),  # 50.48
    Row(200704, 128, 18, "add", 1, 1),  # 96.42
    Row(200704, 144, 1, "none", 12, 1),  # 24.15
    Row(200704, 192, 3, "add", 0, 1),  # 63.33
    Row(200704, 192, 3, "none", 12, 1),  # 46.02
    Row(200704, 192, 6, "none", 12, 1),  # 61.69
    Row(200704, 192, 9, "none", 0, 1),  # 81.86
    Row(200704, 240, 1, "none", 13, 1),  # 37.34
    Row(200704, 256, 1, "add", 1, 1),  # 90.07
    Row(200704, 256, 1, "gelu", 13, 1),  # 49.88
    Row(200704, 256, 1, "none", 4, 1),  # 50.38
    Row(200704, 256, 18, "none", 2, 1),  # 175.65
    Row(200704, 256, 36, "none", 1, 1),  # 319.76
    Row(200704, 384, 2, "gelu", 12, 1),  # 75.32
    Row(200704, 512, 2, "add", 3, 1),  # 126.64
    Row(200704, 512, 4, "none", 13, 1),  # 116.38
    Row(200704, 512, 72, "none", 6, 1),  # 1263.44
    Row(200704, 576, 3, "none", 12, 1),  # 91.65
    Row(401408, 64, 1, "none", 13, 1),  # 29.07
    Row(401408, 96, 1, "none", 13, 1),  # 35.45
    Row(401408, 128, 1, "none", 13, 1),  # 38.53
    Row(401408, 128, 2, "none", 1, 1),  # 58.73
    Row(401408, 128, 9, "none", 13, 1),  # 96.76
    Row(401408, 256, 1, "add", 4, 1),  # 121.64
    Row(401408, 256, 1, "gelu", 1, 1),  # 91.60
    Row(401408, 256, 1, "none", 3, 1),  # 75.82
    Row(401408, 288, 2, "none", 3, 1),  # 131.52
    Row(401408, 384, 2, "gelu", 13, 1),  # 142.81
    Row(802816, 64, 1, "add", 4, 1),  # 78.52
    Row(802816, 64, 1, "none", 4, 1),  # 56.15
    Row(802816, 64, 9, "none", 3, 1),  # 129.00
    Row(802816, 72, 1, "none", 13, 1),  # 62.64
    Row(802816, 96, 6, "add", 7, 1),  # 222.01
    Row(802816, 128, 9, "none", 1, 1),  # 191.09
    Row(802816, 144, 1, "none", 12, 1),  # 81.40
    Row(802816, 256, 1, "add", 7, 1),  # 240.67
    Row(802816, 256, 1, "gelu", 1, 1),  # 175.76
    Row(802816, 256, 1, "none", 13, 1),  # 150.94
    Row(802816, 256, 18, "none", 1, 1),  # 661.04
    Row(802816, 256, 36, "none", 6, 1),  # 1251.28
    Row(1204224, 64, 1, "none", 4, 1),  # 82.70
    Row(1605632, 64, 1, "none", 13, 1),  # 99.01
    Row(3211264, 64, 1, "none", 3, 1),  # 218.45
    Row(3211264, 64, 9, "none", 3, 1),  # 496.22
    Row(3211264, 96, 1, "none", 13, 1),  # 238.34
    Row(3211264, 128, 18, "none", 1, 1),  # 1376.36
    # end of rows
]
"""The table."""
comptime BYTE_ROWS: List[Row] = [
    # rows of bytes: ops/gemm/tune.py, 2026-11-27, NVIDIA H100 80GB HBM3
    Row(49, 128, 4, "none", 4, 1),  # 2.23
    Row(49, 320, 9, "none", 4, 1),  # 3.02
    Row(49, 512, 2, "none", 4, 1),  # 1.96
    Row(49, 512, 16, "none", 5, 4),  # 3.69
    Row(49, 512, 36, "none", 5, 4),  # 4.30
    Row(49, 768, 24, "add", 5, 4),  # 4.19
    Row(49, 1088, 9, "add", 4, 1),  # 3.93
    Row(98, 512, 16, "none", 5, 2),  # 4.03
    Row(128, 768, 6, "none", 4, 1),  # 2.73
    Row(128, 768, 24, "add", 5, 2),  # 5.08
    Row(128, 3072, 6, "gelu", 4, 1),  # 3.42
    Row(196, 256, 8, "none", 4, 1),  # 2.88
    Row(196, 256, 18, "add", 5, 2),  # 4.42
    Row(196, 384, 6, "none", 4, 1),  # 2.61
    Row(196, 384, 18, "none", 5, 2),  # 4.58
    Row(196, 512, 4, "none", 4, 1),  # 2.30
    Row(196, 512, 36, "add", 5, 2),  # 6.07
    Row(197, 384, 12, "add", 4, 1),  # 3.91
    Row(197, 768, 24, "add", 4, 1),  # 5.77
    Row(197, 2304, 6, "none", 4, 1),  # 3.37
    Row(392, 320, 9, "none", 4, 1),  # 3.11
    Row(392, 384, 18, "none", 5, 2),  # 5.50
    Row(392, 512, 16, "none", 4, 1),  # 4.30
    Row(392, 2048, 4, "add", 4, 1),  # 3.57
    Row(392, 2304, 6, "none", 2, 1),  # 4.21
    Row(394, 384, 12, "add", 4, 1),  # 3.97
    Row(394, 1536, 3, "gelu", 4, 1),  # 3.26
    Row(784, 256, 1, "none", 4, 1),  # 1.85
    Row(784, 256, 9, "none", 4, 1),  # 3.16
    Row(784, 384, 18, "none", 6, 1),  # 5.53
    Row(784, 512, 8, "none", 4, 1),  # 3.15
    Row(784, 512, 36, "add", 6, 1),  # 8.47
    Row(784, 1024, 2, "add", 4, 1),  # 2.73
    Row(788, 384, 3, "none", 4, 1),  # 2.33
    Row(788, 384, 12, "add", 4, 1),  # 4.11
    Row(788, 1536, 3, "gelu", 3, 1),  # 4.23
    Row(1568, 256, 18, "none", 4, 1),  # 4.97
    Row(1568, 320, 9, "none", 4, 1),  # 3.52
    Row(1568, 384, 18, "none", 6, 1),  # 6.13
    Row(1568, 512, 1, "add", 4, 1),  # 2.46
    Row(1568, 512, 16, "none", 4, 1),  # 6.19
    Row(1568, 512, 36, "none", 6, 1),  # 10.04
    Row(1568, 672, 1, "none", 4, 1),  # 2.80
    Row(1568, 768, 2, "gelu", 3, 1),  # 3.59
    Row(1568, 768, 24, "add", 6, 1),  # 10.04
    Row(1568, 1152, 2, "none", 2, 1),  # 2.97
    Row(1568, 2048, 4, "add", 2, 1),  # 7.38
    Row(1576, 384, 3, "none", 4, 1),  # 2.79
    Row(1576, 384, 12, "add", 4, 1),  # 5.14
    Row(1576, 1536, 3, "gelu", 13, 1, 1),  # 5.61
    Row(1576, 2304, 6, "none", 13, 1, 2),  # 7.61
    Row(1576, 3072, 6, "gelu", 13, 1, 1),  # 11.41
    Row(3136, 128, 9, "add", 4, 1),  # 3.68
    Row(3136, 192, 2, "none", 4, 1),  # 2.48
    Row(3136, 256, 1, "gelu", 4, 1),  # 2.69
    Row(3136, 256, 8, "none", 4, 1),  # 3.97
    Row(3136, 256, 9, "none", 13, 1, 4),  # 4.30
    Row(3136, 256, 18, "add", 6, 1),  # 6.95
    Row(3136, 288, 1, "none", 4, 1),  # 2.46
    Row(3136, 384, 1, "gelu", 13, 1, 3),  # 3.74
    Row(3136, 384, 18, "none", 2, 1),  # 7.88
    Row(3136, 512, 2, "none", 13, 1, 4),  # 3.35
    Row(3136, 512, 8, "none", 2, 1),  # 5.23
    Row(3136, 512, 36, "none", 6, 1),  # 13.26
    Row(3136, 768, 2, "gelu", 1, 1),  # 4.97
    Row(3136, 1024, 2, "add", 2, 1),  # 5.72
    Row(3136, 1024, 4, "none", 13, 1, 2),  # 5.50
    Row(3136, 2048, 4, "add", 1, 1),  # 12.17
    Row(3136, 2048, 8, "none", 13, 1, 2),  # 13.17
    Row(3152, 384, 3, "add", 3, 1),  # 3.66
    Row(3152, 384, 12, "add", 3, 1),  # 6.53
    Row(4096, 768, 6, "add", 7, 1),  # 6.98
    Row(6272, 64, 9, "add", 4, 1),  # 3.27
    Row(6272, 112, 4, "none", 4, 1),  # 3.42
    Row(6272, 112, 6, "add", 2, 1),  # 4.76
    Row(6272, 128, 8, "none", 13, 1, 4),  # 3.96
    Row(6272, 128, 9, "add", 4, 1),  # 5.13
    Row(6272, 128, 9, "none", 2, 1),  # 3.70
    Row(6272, 192, 6, "none", 3, 1),  # 4.88
    Row(6272, 256, 1, "gelu", 3, 1),  # 3.44
    Row(6272, 256, 4, "none", 13, 1, 2),  # 3.85
    Row(6272, 256, 18, "none", 6, 1),  # 8.06
    Row(6272, 384, 3, "add", 7, 1),  # 4.94
    Row(6272, 384, 18, "none", 7, 1),  # 9.92
    Row(6272, 512, 2, "none", 13, 1, 1),  # 4.13
    Row(6272, 512, 36, "none", 7, 1),  # 19.03
    Row(6272, 576, 2, "none", 2, 1),  # 4.70
    Row(6272, 672, 1, "none", 13, 1, 1),  # 4.45
    Row(6272, 768, 2, "gelu", 0, 1),  # 7.01
    Row(6272, 768, 6, "add", 0, 1),  # 9.40
    Row(6272, 960, 2, "none", 1, 1),  # 6.16
    Row(6272, 1024, 4, "none", 13, 1, 1),  # 8.32
    Row(6272, 1088, 9, "add", 0, 1),  # 18.88
    Row(6272, 1152, 2, "none", 3, 1),  # 7.72
    Row(6272, 1152, 3, "none", 13, 1, 3),  # 7.78
    Row(6272, 1280, 3, "none", 1, 1),  # 9.25
    Row(6272, 2048, 4, "add", 1, 1),  # 18.41
    Row(6272, 2048, 8, "none", 13, 1, 1),  # 22.14
    Row(6272, 2304, 6, "none", 12, 1, 0),  # 18.66
    Row(6304, 384, 3, "none", 13, 1, 3),  # 4.15
    Row(12544, 64, 2, "add", 4, 1),  # 2.74
    Row(12544, 128, 1, "none", 3, 1),  # 2.68
    Row(12544, 128, 4, "none", 13, 1, 2),  # 3.96
    Row(12544, 128, 9, "none", 2, 1),  # 4.37
    Row(12544, 192, 2, "none", 1, 1),  # 3.78
    Row(12544, 192, 6, "add", 7, 1),  # 7.57
    Row(12544, 192, 9, "none", 3, 1),  # 6.30
    Row(12544, 256, 1, "none", 1, 1),  # 3.06
    Row(12544, 256, 4, "none", 13, 1, 2),  # 5.23
    Row(12544, 256, 9, "none", 7, 1),  # 7.56
    Row(12544, 256, 18, "add", 7, 1),  # 11.82
    Row(12544, 384, 18, "none", 0, 1),  # 16.56
    Row(12544, 512, 1, "add", 7, 1),  # 6.70
    Row(12544, 512, 2, "none", 13, 1, 1),  # 6.08
    Row(12544, 512, 8, "none", 13, 1, 2),  # 12.00
    Row(12544, 512, 18, "none", 7, 1),  # 21.25
    Row(12544, 1024, 2, "add", 1, 1),  # 13.41
    Row(12544, 1024, 4, "none", 13, 1, 2),  # 13.88
    Row(12544, 2048, 4, "add", 2, 1),  # 35.85
    Row(12544, 2048, 8, "none", 13, 1, 1),  # 40.34
    Row(12608, 384, 3, "add", 0, 1),  # 7.66
    Row(12608, 384, 3, "none", 12, 1, 0),  # 5.55
    Row(12608, 1536, 3, "gelu", 13, 1, 1),  # 25.41
    Row(12800, 384, 3, "none", 13, 1, 1),  # 5.79
    Row(16384, 768, 6, "none", 12, 1, 1),  # 16.66
    Row(25088, 64, 2, "none", 3, 1),  # 3.41
    Row(25088, 64, 9, "add", 3, 1),  # 5.35
    Row(25088, 80, 4, "add", 1, 1),  # 6.91
    Row(25088, 112, 6, "add", 1, 1),  # 8.31
    Row(25088, 128, 4, "none", 13, 1, 1),  # 5.03
    Row(25088, 128, 8, "none", 13, 1, 1),  # 7.25
    Row(25088, 128, 9, "none", 1, 1),  # 6.29
    Row(25088, 192, 2, "none", 0, 1),  # 5.30
    Row(25088, 192, 3, "none", 12, 1, 0),  # 5.53
    Row(25088, 192, 6, "add", 0, 1),  # 9.85
    Row(25088, 256, 1, "gelu", 1, 1),  # 8.00
    Row(25088, 256, 9, "none", 13, 1, 2),  # 12.68
    Row(25088, 288, 1, "none", 13, 1, 0),  # 6.69
    Row(25088, 384, 1, "gelu", 12, 1, 0),  # 11.54
    Row(25088, 384, 3, "add", 1, 1),  # 12.01
    Row(25088, 384, 6, "none", 12, 1, 1),  # 12.91
    Row(25088, 480, 1, "none", 13, 1, 1),  # 8.98
    Row(25088, 512, 2, "none", 13, 1, 1),  # 10.10
    Row(25088, 512, 4, "add", 2, 1),  # 18.72
    Row(25088, 512, 4, "none", 13, 1, 2),  # 13.43
    Row(25088, 512, 36, "none", 7, 1),  # 71.90
    Row(25088, 576, 2, "none", 0, 1),  # 11.55
    Row(25216, 384, 3, "none", 12, 1, 1),  # 9.10
    Row(25216, 1152, 3, "none", 12, 1, 1),  # 24.26
    Row(25216, 1536, 3, "gelu", 13, 1, 1),  # 48.25
    Row(25216, 2304, 6, "none", 12, 1, 1),  # 63.36
    Row(50176, 128, 1, "none", 1, 1),  # 5.07
    Row(50176, 128, 2, "none", 13, 1, 1),  # 6.05
    Row(50176, 128, 9, "none", 1, 1),  # 10.46
    Row(50176, 192, 2, "none", 0, 1),  # 8.75
    Row(50176, 192, 6, "add", 1, 1),  # 26.35
    Row(50176, 192, 9, "none", 0, 1),  # 14.30
    Row(50176, 256, 1, "add", 7, 1),  # 11.18
    Row(50176, 256, 4, "none", 13, 1, 2),  # 15.24
    Row(50176, 256, 18, "add", 7, 1),  # 43.08
    Row(50176, 384, 18, "none", 0, 1),  # 53.34
    Row(50176, 512, 1, "add", 1, 1),  # 24.86
    Row(50176, 512, 2, "none", 13, 1, 1),  # 18.39
    Row(50176, 768, 2, "gelu", 0, 1),  # 44.84
    Row(50176, 1024, 2, "add", 1, 1),  # 47.79
    Row(50176, 1024, 4, "none", 13, 1, 1),  # 49.32
    Row(100352, 64, 1, "add", 3, 1),  # 6.72
    Row(100352, 96, 1, "add", 1, 1),  # 12.58
    Row(100352, 96, 1, "none", 7, 1),  # 15.93
    Row(100352, 128, 1, "none", 13, 1, 1),  # 8.00
    Row(100352, 192, 2, "add", 7, 1),  # 25.98
    Row(100352, 192, 2, "none", 0, 1),  # 17.14
    Row(100352, 192, 3, "none", 12, 1, 0),  # 23.39
    Row(100352, 192, 9, "none", 0, 1),  # 26.55
    Row(100352, 256, 1, "none", 7, 1),  # 14.70
    Row(100352, 256, 9, "none", 13, 1, 1),  # 44.76
    Row(100352, 256, 18, "none", 6, 1),  # 80.75
    Row(100352, 288, 1, "none", 13, 1, 1),  # 21.34
    Row(100352, 384, 1, "gelu", 12, 1, 1),  # 39.81
    Row(100352, 512, 2, "none", 13, 1, 1),  # 34.53
    Row(100352, 512, 36, "none", 7, 1),  # 289.51
    Row(100352, 576, 2, "none", 0, 1),  # 41.20
    Row(200704, 64, 9, "none", 3, 1),  # 27.48
    Row(200704, 128, 1, "none", 1, 1),  # 20.99
    Row(200704, 128, 2, "none", 13, 1, 2),  # 28.16
    Row(200704, 128, 9, "add", 1, 1),  # 55.33
    Row(200704, 192, 2, "none", 0, 1),  # 34.83
    Row(200704, 256, 1, "none", 1, 1),  # 27.94
    Row(200704, 256, 4, "none", 13, 1, 1),  # 56.37
    Row(200704, 512, 1, "add", 2, 1),  # 87.78
    Row(200704, 512, 2, "none", 13, 1, 1),  # 65.65
    Row(200704, 768, 2, "gelu", 1, 1),  # 164.72
    Row(401408, 64, 1, "none", 3, 1),  # 24.53
    Row(401408, 96, 1, "add", 1, 1),  # 51.93
    Row(401408, 96, 1, "none", 7, 1),  # 62.75
    Row(401408, 256, 1, "add", 2, 1),  # 91.90
    Row(401408, 256, 1, "gelu", 1, 1),  # 98.57
    Row(401408, 256, 1, "none", 1, 1),  # 51.80
    Row(401408, 256, 9, "none", 13, 1, 1),  # 167.86
    Row(401408, 256, 18, "none", 7, 1),  # 309.85
    Row(401408, 288, 1, "none", 13, 1, 1),  # 75.53
    Row(802816, 128, 2, "none", 0, 1),  # 110.87
    Row(802816, 256, 1, "add", 6, 1),  # 174.22
    Row(802816, 256, 1, "gelu", 1, 1),  # 191.61
    Row(802816, 256, 1, "none", 1, 1),  # 98.90
    Row(1605632, 64, 9, "none", 3, 1),  # 211.24
    Row(1605632, 128, 1, "none", 1, 1),  # 144.94
    Row(1605632, 128, 9, "none", 1, 1),  # 276.87
    Row(6422528, 64, 9, "none", 3, 1),  # 825.57
    # end of bytes
]
"""The table of products of 8-bit numbers: steps are of 128 channels, tiles not those of RESIDENT."""

comptime SHORTCUT_ROWS: List[Row] = [
    # rows of shortcuts: ops/gemm/tune.py, 2026-11-29, NVIDIA H200; 1568 x 2048 x 24 by bench ops
    Row(49, 512, 76, "none", 5, 4),  # 5.51
    Row(49, 2048, 32, "none", 5, 2),  # 5.43
    Row(98, 512, 76, "none", 5, 2),  # 8.43
    Row(98, 2048, 24, "none", 4, 1),  # 6.28
    Row(147, 2048, 24, "none", 4, 1),  # 6.26
    Row(196, 512, 76, "none", 5, 2),  # 8.89
    Row(196, 2048, 32, "none", 6, 1),  # 8.11
    Row(294, 2048, 24, "none", 4, 1),  # 8.03
    Row(392, 256, 38, "none", 5, 2),  # 5.53
    Row(392, 2048, 32, "none", 2, 1),  # 12.45
    Row(588, 512, 76, "none", 6, 1),  # 14.30
    Row(588, 1024, 12, "none", 4, 1),  # 4.98
    Row(784, 128, 19, "none", 5, 2),  # 4.07
    Row(784, 256, 38, "none", 5, 2),  # 7.18
    Row(784, 512, 6, "none", 4, 1),  # 3.00
    Row(784, 2048, 32, "none", 6, 1),  # 14.11
    Row(1176, 256, 38, "none", 6, 1),  # 8.98
    Row(1176, 1024, 12, "none", 3, 1),  # 6.17
    Row(1176, 2048, 32, "none", 1, 1),  # 18.10
    Row(1568, 128, 19, "none", 5, 2),  # 5.13
    Row(1568, 512, 8, "none", 4, 1),  # 4.19
    Row(1568, 512, 76, "none", 6, 1),  # 16.57
    Row(1568, 1024, 12, "none", 2, 1),  # 7.16
    Row(1568, 2048, 24, "none", 6, 1),  # 20.51
    Row(1568, 2048, 32, "none", 0, 1),  # 25.32
    Row(2352, 128, 19, "none", 4, 1),  # 5.41
    Row(2352, 512, 6, "none", 3, 1),  # 4.41
    Row(2352, 512, 76, "none", 7, 1),  # 22.21
    Row(2352, 1024, 12, "none", 1, 1),  # 8.86
    Row(2352, 2048, 32, "none", 6, 1),  # 33.87
    Row(3136, 256, 2, "none", 4, 1),  # 2.63
    Row(3136, 256, 38, "none", 6, 1),  # 9.87
    Row(3136, 512, 8, "none", 6, 1),  # 5.93
    Row(3136, 512, 76, "none", 6, 1),  # 25.34
    Row(3136, 1024, 16, "none", 6, 1),  # 14.32
    Row(4704, 128, 19, "none", 6, 1),  # 6.84
    Row(4704, 256, 38, "none", 7, 1),  # 13.41
    Row(6272, 256, 2, "none", 3, 1),  # 3.40
    Row(6272, 256, 3, "none", 4, 1),  # 4.22
    Row(6272, 512, 6, "none", 7, 1),  # 6.90
    Row(6272, 512, 76, "none", 7, 1),  # 39.34
    Row(6272, 1024, 12, "none", 7, 1),  # 17.14
    Row(9408, 256, 3, "none", 3, 1),  # 4.94
    Row(9408, 512, 6, "none", 1, 1),  # 10.32
    Row(9408, 1024, 12, "none", 1, 1),  # 24.85
    Row(12544, 128, 19, "none", 6, 1),  # 9.43
    Row(12544, 256, 3, "none", 7, 1),  # 5.43
    Row(12544, 256, 38, "none", 7, 1),  # 21.18
    Row(12544, 2048, 32, "none", 7, 1),  # 147.13
    Row(18816, 128, 19, "none", 1, 1),  # 12.30
    Row(18816, 256, 2, "none", 3, 1),  # 6.47
    Row(25088, 256, 3, "none", 7, 1),  # 8.37
    Row(25088, 256, 38, "none", 1, 1),  # 41.98
    Row(37632, 128, 19, "none", 7, 1),  # 21.01
    Row(50176, 128, 19, "none", 1, 1),  # 24.02
    Row(50176, 256, 2, "none", 7, 1),  # 12.53
    Row(50176, 256, 3, "none", 1, 1),  # 15.05
    Row(75264, 256, 2, "none", 3, 1),  # 20.18
    Row(150528, 256, 2, "none", 2, 1),  # 37.26
    Row(802816, 256, 2, "none", 2, 1),  # 173.69
    # end of shortcuts
]
"""The table of sums of two products of 16 or 32 bits: tiles are those of CONFIGS, steps those of both."""


struct Family(TrivialRegisterPassable):
    """The products of a layer at all batch sizes: what, besides sizes, their tiles depend on."""

    var layer: Layer
    """What is known of the sizes."""
    var bytes: Int
    """Of a number of x: 1, which has a table of its own, 2 or 4."""
    var epilogue: Epilogue
    """What the accumulator goes through."""
    var narrow: Bool
    """Whether stages have half of 128 bytes."""
    var sources: Int
    """2 if the product of a second source is added, else 1."""
    var turns: Bool
    """Whether tiles of TURNED may be faster."""

    def __init__(
        out self,
        layer: Layer,
        bytes: Int,
        epilogue: Epilogue,
        *,
        narrow: Bool = False,
        sources: Int = 1,
        turns: Bool = False,
    ):
        """Names the parts.

        Args:
            layer: What is known of the sizes.
            bytes: Of a number of x.
            epilogue: What the accumulator goes through.
            narrow: Whether stages have half of 128 bytes.
            sources: Of the sum.
            turns: Whether turned.mojo takes the dtypes.
        """
        self.layer, self.bytes, self.epilogue = layer, bytes, epilogue
        self.narrow, self.sources = narrow, sources
        self.turns = turns and layer.windows and layer.filters < TURNED_FILTERS

    def width(self) -> Int:
        """Counts the channels of a step of K.

        Returns:
            Those of 128 bytes.
        """
        return ROW // self.bytes

    def tile(self, row: Row, *, few: Bool) -> Row:
        """Finds the tile of a product: its row's, or one that computes it, or computes it faster.

        Args:
            row: The nearest row.
            few: Whether there are at most two tiles of 64 x 64 for each multiprocessor.

        Returns:
            The row, with the tile and the splits.
        """
        var found = row
        if found.config >= FIRST_PINGPONG and (self.narrow or self.sources == 2):
            found.config = row.next
        # 192 filters leave the registers where sums of two sources are rescaled. With moments
        # 192 x 192 takes 58 us for 50,432 x 384->384, 192 x 128 50 (H100).
        var rescaled = self.sources == 2 and self.epilogue.scales
        if found.config == LARGEST and (rescaled or self.epilogue.measures):
            found.config = WIDE
        # Moments are loaded beside x there: CvT-13 at batch 1 takes 0.2720 ms, else 0.2735 (H200, 2026-11-27).
        if self.epilogue.normalizes and few and found.config == LOW:
            found.config = BESIDE_MOMENTS
        return _measuring(found) if self.epilogue.measures else found

    def has_turned(self, number: Int) -> Bool:
        """Tells whether a tile of TURNED is compiled.

        Args:
            number: Of the tile.

        Returns:
            False if it may not be faster; in 8 bits that of few filters, which stay, is for few channels.
        """
        return self.turns and (self.bytes > 1 or self.narrow == (number == 0))


def choose[
    turns: Bool = False, bytes: Bool = False
](rows: List[Row], g: Geometry, family: Family, device: Device, beside: Int = 0) -> Row:
    """Chooses the tile of a product.

    Parameters:
        turns: As the family has it.
        bytes: Whether numbers have 8 bits; counts if it turns.

    Args:
        rows: Of `reached`.
        g: Sizes.
        family: What the product is one of.
        device: The GPU.
        beside: Channels of a second source.

    Returns:
        A row with the tile and the splits: the nearest whose splits the product has steps for, but for
        what `Family.tile` and `turned` say.
    """
    var chunks = ceildiv(g.c, family.width())
    var steps = g.r * g.s * chunks + ceildiv(beside, family.width())
    var row = nearest(rows, g, steps, family.epilogue, device.multiprocessors)
    comptime if turns:
        var other = turned[bytes](row, g, chunks, device)
        if other.config >= FIRST_TURNED and family.has_turned(other.config - FIRST_TURNED):
            return other
    return family.tile(row, few=device.waves(g.tiles(64, 64)) <= 2)


def chosen(rows: List[Row], family: Family) -> Int:
    """Finds the tiles that `choose` may give: others are not compiled.

    Args:
        rows: Of `reached`.
        family: What the products are.

    Returns:
        A bit for each tile, as a row's `config` counts them.
    """
    var tiles = 0
    for row in rows:
        if row.config < FIRST_PINGPONG or not family.epilogue.joins:
            tiles |= 1 << family.tile(row, few=False).config
            tiles |= 1 << family.tile(row, few=True).config
    comptime for i in range(len(TURNED)):
        if family.has_turned(i):
            tiles |= 1 << (FIRST_TURNED + i)
    return tiles


def reached(family: Family) -> List[Row]:
    """Finds the rows whose tiles a family's products get, at compile time: others are not compiled.

    A kernel takes the compiler a second, and a layer gets five of the 13 tiles on average. At batch sizes
    that are not among IMAGES `choose` takes the nearest of the rows that are found.

    Args:
        family: What the products are.

    Returns:
        The rows: of a layer of `few` rows those that are `is_low`; all if no sizes are known.
    """
    var layer = family.layer
    var rows = List[Row]()
    for row in _table(family):
        if not layer.few or is_low(row.config):
            rows.append(row)
    if not layer.is_known():
        return rows^
    var steps = layer.steps(family.width())
    var found = List[Row]()
    for images in materialize[IMAGES]():
        var g = Geometry(rows=images * layer.pixels, depth=0, columns=layer.filters)
        var row = nearest(rows, g, steps, family.epilogue, MULTIPROCESSORS)
        if len(found) == 0 or not row.is_of(found[len(found) - 1]):
            found.append(row)
    return found^


def _table(family: Family) -> List[Row]:
    """Gives the rows that were measured of products like a family's."""
    if family.bytes == 1:
        return materialize[BYTE_ROWS]()
    return materialize[SHORTCUT_ROWS]() if family.sources == 2 else materialize[ROWS]()


def _measuring(row: Row) -> Row:
    """Finds a tile of which each block finishes 32 columns or more: so many have their moments together."""
    var other = row
    comptime for i in range(len(RESIDENT)):
        comptime config = RESIDENT[i]
        if row.config == FIRST_RESIDENT + i and config.columns // row.splits < GROUP:
            comptime for j in range(len(RESIDENT)):
                comptime if not RESIDENT[j].split and RESIDENT[j].columns == config.columns:
                    other.config, other.splits = FIRST_RESIDENT + j, 1
    return other


def is_low(config: Int) -> Bool:
    """Tells whether a tile of 16 bits has 64 rows, and is one for few rows.

    Args:
        config: As a row's.

    Returns:
        True for 64 x 64 of CONFIGS, and the blocks of RESIDENT.
    """
    return config == LOW or FIRST_RESIDENT <= config < FIRST_PINGPONG


def turned[bytes: Bool = False](row: Row, g: Geometry, chunks: Int, device: Device) -> Row:
    """Finds a tile of TURNED that is faster than a row's tile.

    Compared are the clocks of a step of K: of a large tile of hopper.mojo those in which shared
    memory, of 128 bytes a clock, is read by wgmma and written by the copy engine; of one of
    turned.mojo those of the tensor cores, which take longer; times the tiles that the busiest
    multiprocessor has. Less than a twentieth does not count. Tiles of clusters of two stay: they
    wait for shared memory less than this says.

    With TURNED_FILTERS filters or more a row's tile stays: of 71 such convolutions of 3 x 3 on an H200 none
    took 3 % less time, and those of 512 filters up to 16 % more. From 8 images on, 64 filters at 56
    x 56 take 0.60 to 0.95 of the time of the best other tile; from 32 on, 128 at 28 x 28 0.93 to
    1.04 (2026-11-25).

    Parameters:
        bytes: Whether numbers have 8 bits.

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
        comptime if config.overlap and config.peers == 1:
            comptime clocks = 4 * config.groups * (16 + config.columns // 4) + config.stage() // ROW
            if row.config == i:
                var turns = device.waves(g.tiles(config.rows(), config.columns))
                choice.cost = Float64(turns * clocks)
    comptime for i in range(len(TURNED)):
        comptime config = TURNED[i].of_bytes(narrow=False) if bytes else TURNED[i]
        var turns = device.waves(turned_tiles[config](g, chunks=chunks))
        if turns > 0 and g.f < TURNED_FILTERS:
            comptime clocks = config.pixels * config.filters // 32
            choice.offer(FIRST_TURNED + i, 1.05 * Float64(turns * clocks))
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
    if config >= FIRST_PINGPONG:
        comptime for i in range(len(PINGPONG)):
            comptime block = PINGPONG[i]
            if config == FIRST_PINGPONG + i:
                return block.takes(steps, epilogue)
    return True


def nearest(
    rows: List[Row], g: Geometry, steps: Int, epilogue: Epilogue, multiprocessors: Int
) -> Row:
    """Finds the measured product that is most like another.

    Args:
        rows: What was measured.
        g: Sizes.
        steps: Of K.
        epilogue: What the accumulator goes through.
        multiprocessors: Of the GPU.

    Returns:
        The nearest row whose splits the product has steps for, and whose block takes it.
    """
    var costs = _costs(epilogue)
    var wanted = Features(g.pixels(), g.f, steps, multiprocessors)
    var best = Row(1, 1, 1, "none", 0, 1)
    var least = 1 << 30
    for row in rows:
        # What differs most comes first: most rows are passed over there.
        var distance = abs(row.features.pixels - wanted.pixels) + abs(
            row.features.tiles - wanted.tiles
        )
        if distance > least:
            continue
        distance += abs(row.features.filters - wanted.filters) + abs(
            row.features.padding - wanted.padding
        )
        distance += abs(row.features.steps - wanted.steps)
        if row.costs != costs:
            distance += 256
        if distance > least:
            continue
        distance += abs(row.features.idle - wanted.idle) + abs(
            row.features.idle_128 - wanted.idle_128
        )
        # Of rows as near the one of more pixels.
        if distance < least or distance == least and row.pixels > best.pixels:
            if row.splits <= steps and takes(row.config, steps, epilogue):
                best, least = row, distance
    return best


def _costs(epilogue: Epilogue) -> Int:
    """Counts what an epilogue does as far as it costs time: 1 for a residual, 2 for GELU."""
    return Int(epilogue.joins) + 2 * Int(epilogue.gelu)
