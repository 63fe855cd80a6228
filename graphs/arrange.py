"""Filters as the kernels read them: canonical [R, S, C, F] in, one flat array out.

Done once, at load; never per call. C is the channels of one group, and F the filters of all.
"""

from __future__ import annotations

import numpy as np

PANEL = 64
"""Columns of a packed panel, the same number as in ops/gemm/cpu.mojo."""


def is_depthwise(shape: tuple[int, ...], groups: int) -> bool:
    """Tells whether a filter [R, S, C, F] in ``groups`` has the depthwise kernel."""
    return groups > 1 and shape[2] == 1 and shape[3] == groups


def panels(filters: np.ndarray, groups: int = 1) -> np.ndarray:
    """Packs [R, S, C, F] for a CPU: [group, panel, R*S*C, 64], zero-padded in each group."""
    r, s, c, f = filters.shape
    columns = filters.reshape(r * s * c, groups, f // groups)
    count = -(-columns.shape[2] // PANEL)
    packed = np.zeros((groups, count, r * s * c, PANEL), filters.dtype)
    for panel in range(count):
        part = columns[:, :, panel * PANEL : (panel + 1) * PANEL]
        packed[:, panel, :, : part.shape[2]] = part.transpose(1, 0, 2)
    return packed.reshape(-1)


def filter_major(filters: np.ndarray) -> np.ndarray:
    """Arranges [R, S, C, F] for a GPU: [F, R, S, C], so that K = R*S*C is contiguous."""
    return np.ascontiguousarray(filters.transpose(3, 0, 1, 2)).reshape(-1)


def compressed_rows(
    filters: np.ndarray, groups: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compresses [R, S, C, F] to its nonzeros, filter by filter (CSR).

    Returns:
        values [nonzeros]; columns [nonzeros] int32, ``(r * S + s) * C_all + c``, ascending in
        each row, with C_all the channels of all groups; row starts [F + 1] int32.
    """
    r, s, c, f = filters.shape
    rows = filters.transpose(3, 0, 1, 2).reshape(f, r * s, c)
    row, tap, channel = np.nonzero(rows)
    column = tap * (c * groups) + row // (f // groups) * c + channel
    starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=f))])
    return rows[row, tap, channel], column.astype(np.int32), starts.astype(np.int32)
