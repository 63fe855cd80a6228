"""Tells how a layer was pruned, by where its zeros are."""

from __future__ import annotations

import numpy as np

from maxvision.graphs.sparsity import PRUNED
from maxvision.weights.layout import Array
from maxvision.weights.prune import Mask, as_rows, block_starts, spread

BY_CHANCE = 5
"""Fours that zeros at random would leave with three or more; none is left by chance in 0.7 %."""


def pattern(tensor: Array) -> str:
    """Names the pattern of a filter [F, C, R, S] or linear weights [out, in].

    That is the coarsest of: ``channels`` (whole filters or input channels), ``64x64``, ``8x1`` and
    ``1x8`` (weights/prune.py), ``unstructured``. Zeros that it does not explain must be fewer than
    ``PRUNED`` of what is left. ``2:4`` is added, or takes the place of ``unstructured``, where no
    four weights that follow one another in K hold more than two nonzeros, and that is no chance:
    zeros at random, as many, would leave three or more in at least ``BY_CHANCE`` of the fours.

    Returns:
        The pattern; nothing if fewer than ``PRUNED`` of the weights are zeros.
    """
    nonzero = tensor != 0
    if _full(nonzero):
        return ""
    rows = as_rows(nonzero)
    found, alike = "unstructured", 1  # rows of K that share their zeros
    if _full(_without_channels(nonzero)):
        found, alike = "channels", len(rows) * nonzero[0, 0].size
    else:
        for name in ("64x64", "8x1", "1x8"):
            blocks = _filled(nonzero, name)
            if _full(rows[blocks]):
                found, alike = name, 8 if name == "8x1" else 1
                break
    if _two_of_four(rows, alike):
        return "2:4" if found == "unstructured" else f"{found}, 2:4"
    return found


def _full(nonzero: Array) -> bool:
    return nonzero.size == 0 or float(nonzero.mean()) > 1 - PRUNED


def _without_channels(nonzero: Array) -> Array:
    """Leaves filters and input channels away that hold nothing."""
    filters = nonzero.reshape(len(nonzero), -1).any(1)
    channels = nonzero.any(0) if nonzero.ndim == 2 else nonzero.any((0, 2, 3))
    left: Array = nonzero[filters][:, channels]
    return left


def _filled(nonzero: Array, name: str) -> Mask:
    """Tells of each place of rows [F, K] whether its block holds a nonzero."""
    rows, starts = as_rows(nonzero), block_starts(nonzero.shape, name)
    any_row = np.logical_or.reduceat(rows, starts[0], axis=0)
    blocks = np.logical_or.reduceat(any_row, starts[1], axis=1)
    return spread(blocks, starts, rows.shape)


def _two_of_four(rows: Array, alike: int) -> bool:
    counts = np.add.reduceat(rows.astype(np.uint8), np.arange(0, rows.shape[1], 4), axis=1)
    if counts.max() > 2:
        return False
    share = float(rows.mean())
    three_or_four = 4 * share**3 * (1 - share) + share**4
    return counts.size / alike * three_or_four >= BY_CHANCE
