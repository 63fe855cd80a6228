"""How the nonzeros of a sparse filter lie in memory: a format is an op, and what it reads.

| format   | runs on         | filters                                  | op                   |
| -------- | --------------- | ---------------------------------------- | -------------------- |
| stream   | a CPU, float32  | any                                      | sparse_conv2d        |
| steps    | any GPU         | any                                      | sparse_conv2d        |
| tiles    | Hopper, 16 bits | any                                      | sparse_conv2d_packed |
| two_four | Hopper, 16 bits | two of four neighbouring channels are 0  | sparse_conv2d_packed |
| blocks   | Hopper, 16 bits | blocks of 64 filters x 64 channels are 0 | sparse_conv2d_packed |

The last three want C and F to be multiples of eight (the copy engine's). They take groups as one
filter of all channels that is zero outside of the groups.
"""

from __future__ import annotations

import numpy as np
from max.dtype import DType

from maxvision.graphs import arrange
from maxvision.graphs.target import Target, base

PACKED = ("tiles", "two_four", "blocks")
"""The formats of sparse_conv2d_packed."""
BLOCK = 64
"""Filters, and channels of one tap, of a block."""
EMPTY = 0.3
"""Share of blocks without a nonzero from which on a filter counts as pruned in blocks."""


def general(api: str) -> str:
    """Names the format that takes any filter on a device."""
    return "stream" if api == "cpu" else "steps"


def suited(filters: np.ndarray, groups: int, target: Target, dtype: DType) -> tuple[str, ...]:
    """Lists the formats of a filter [R, S, C, F] by where its zeros are, the most special first."""
    c, f = filters.shape[2:]
    hopper = base(target.name) == "sm_90" and dtype != DType.float32
    if not hopper or groups > 1 or not packable(c, f):
        return (general(target.api),)
    found = ["blocks"] if empty_blocks(filters) >= EMPTY else []
    found += ["two_four"] if arrange.is_two_four(filters) else []
    return (*found, "tiles")


def packable(c: int, f: int) -> bool:
    """Tells whether the copy engine reads activations of C channels, and writes those of F."""
    return c % 8 == 0 and f % 8 == 0


def empty_blocks(filters: np.ndarray) -> float:
    """Computes the share of blocks of [R, S, C, F] without a nonzero."""
    c, f = filters.shape[2:]
    rows = np.logical_or.reduceat(filters != 0, np.arange(0, c, BLOCK), axis=2)
    blocks = np.logical_or.reduceat(rows, np.arange(0, f, BLOCK), axis=3)
    return 1 - float(blocks.mean()) if blocks.size else 0.0


def arranged(
    format: str, filters: np.ndarray, groups: int, dtype: DType
) -> list[tuple[str, np.ndarray, DType]]:
    """Arranges [R, S, C, F] in a format.

    Returns:
        The arrays that its op reads: name, values, and the dtype they are rounded to.
    """
    channels = arrange.ROW // dtype.size_in_bytes
    if format in PACKED:
        filters = arrange.ungrouped(filters, groups)
    if format == "tiles":
        words, starts = arrange.coordinate_tiles(arrange.rounded(filters, dtype))
        arrays = [("packed", words, DType.uint32), ("places", starts, DType.int32)]
    elif format == "two_four":
        values, indices = arrange.two_four(filters)
        arrays = [("packed", values, dtype), ("places", indices, DType.uint32)]
    elif format == "blocks":
        blocks, lists = arrange.block_steps(filters, BLOCK, channels)
        arrays = [("packed", blocks.reshape(-1), dtype), ("places", lists.reshape(-1), DType.int32)]
    else:
        if format == "stream":
            values, columns, starts = arrange.stream(filters, groups)
        else:
            values, columns, starts = arrange.steps(filters, channels, groups)
        kind = DType.from_numpy(columns.dtype)
        arrays = [("values", values, dtype), ("columns", columns, kind)]
        arrays.append(("starts", starts, DType.int32))
    # MAX binds no empty buffer; nothing reads these.
    return [(name, a if a.size else np.zeros(1, a.dtype), kind) for name, a, kind in arrays]
