"""Which block a sparse product of tiles gets on Hopper: measured rows, the nearest for all others.

A row holds M, F, the steps of K (64 channels of a tap), the epilogue as far as it costs time, the
block, the blocks that share a tile, and in the comment the microseconds of a launch in a CUDA
graph at 90 % zeros; from 50 to 95 % the fastest block stays the same or within 3 % at batch 1.
"""

from ..gemm.tuning import Row
from ..hopper.tile import TileConfig

comptime CONFIGS: List[TileConfig] = [
    TileConfig(groups=1, columns=64, split=True),
    TileConfig(groups=1, columns=32, split=True),
    TileConfig(groups=1, columns=64),
    TileConfig(groups=1, columns=32),
    TileConfig(groups=2, columns=64),
]
"""The blocks that are compiled."""
comptime ROWS: List[Row] = [
    # ResNet-50 at batch 1, 4 and 32, 2026-11-22, NVIDIA H200
    Row(49, 512, 32, "none", 1, 4),  # 3.13
    Row(49, 512, 72, "none", 0, 8),  # 4.09
    Row(49, 2048, 8, "add", 1, 2),  # 2.96
    Row(196, 256, 16, "none", 0, 4),  # 3.19
    Row(196, 256, 36, "none", 0, 4),  # 4.04
    Row(196, 512, 32, "none", 0, 4),  # 5.22
    Row(196, 512, 72, "none", 0, 4),  # 8.40
    Row(196, 1024, 4, "add", 3, 1),  # 2.79
    Row(196, 2048, 8, "add", 4, 1),  # 4.57
    Row(784, 128, 8, "none", 3, 1),  # 2.89
    Row(784, 128, 18, "none", 0, 4),  # 3.77
    Row(784, 256, 16, "none", 0, 2),  # 4.83
    Row(784, 256, 36, "none", 0, 2),  # 7.90
    Row(784, 512, 2, "add", 3, 1),  # 3.31
    Row(784, 1024, 4, "add", 4, 1),  # 5.09
    Row(1568, 512, 32, "none", 4, 1),  # 12.53
    Row(1568, 512, 72, "none", 2, 1),  # 28.64
    Row(1568, 2048, 8, "add", 4, 1),  # 24.45
    Row(3136, 128, 8, "none", 2, 1),  # 4.02
    Row(3136, 128, 18, "none", 4, 1),  # 6.51
    Row(3136, 512, 2, "add", 4, 1),  # 8.23
    Row(6272, 256, 16, "none", 4, 1),  # 14.93
    Row(6272, 256, 36, "none", 4, 1),  # 29.57
    Row(6272, 1024, 4, "add", 4, 1),  # 31.91
    Row(25088, 128, 18, "none", 2, 1),  # 35.75
]
"""The table."""
