"""Pillow's resize and a crop, to the bit, several times as fast: by vectors, and of the crop alone.

Pillow filters 8-bit pictures with weights in integers (2^-22), first along the rows, rounds to 8
bits, then along the columns (libImaging/Resample.c). Both passes are sums of whole rows here once
the picture is transposed for the first, which numba turns into vector instructions; and only the
rows and columns of the crop are computed. Without numba, or for another filter, Pillow does it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from maxvision.runtime.preprocess import Preprocess, read_image

BITS = 22
"""Of the weights' fraction."""

numba: Any = import_module("numba") if find_spec("numba") else None


def prepare(preprocess: Preprocess, picture: Image.Image) -> np.ndarray:
    """Turns a picture into levels [height, width, RGB], the same as ``preprocess`` does.

    Raises:
        ImageError: If the picture cannot be read.
    """
    image = read_image(picture)
    short = preprocess.resize
    cubic = preprocess.resample == Image.Resampling.BICUBIC
    if numba is None or not cubic or not isinstance(short, int):
        return preprocess(image)
    edge, long = sorted(image.size)
    length = int(short * long / edge)
    width, height = (short, length) if image.width <= image.height else (length, short)
    left, top = (width - preprocess.width) // 2, (height - preprocess.height) // 2
    tall = image.height > 2 * image.width  # Pillow begins with the columns then
    if tall or min(left, top) < 0 or width * height > 2**24:
        return preprocess(image)
    columns = _weights(image.width, width, left, preprocess.width)
    rows = _weights(image.height, height, top, preprocess.height)
    return _resample(np.asarray(image.transpose(Image.Transpose.TRANSPOSE)), *columns, *rows)


@lru_cache(256)
def _weights(size: int, scaled: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes Pillow's bicubic weights of ``count`` of ``scaled`` places.

    Returns:
        The first place of the source that each reads, int32 [count], and the weights, int32
        [count, taps], with zeros behind the last.
    """
    scale = size / scaled
    wide = max(scale, 1.0)
    support = 2.0 * wide
    firsts = np.zeros(count, np.int32)
    weights = np.zeros((count, math.ceil(support) * 2 + 1), np.int32)
    for i in range(count):
        centre = (begin + i + 0.5) * scale
        first = max(0, int(centre - support + 0.5))
        end = min(size, int(centre + support + 0.5))
        each = [_cubic((place - centre + 0.5) * (1.0 / wide)) for place in range(first, end)]
        total = 0.0
        for weight in each:
            total += weight
        firsts[i] = first
        for k, weight in enumerate(each):
            value = weight / total * (1 << BITS)
            weights[i, k] = int(value - 0.5) if value < 0 else int(value + 0.5)
    return firsts, weights


def _cubic(x: float) -> float:
    """The kernel of Keys 1981 with a = -0.5, in Pillow's order of operations."""
    x = abs(x)
    if x < 1.0:
        return ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * -0.5
    return 0.0


if numba is not None:

    def _compiled(function: Any) -> Any:
        """Compiles a function at its first call, and keeps that where there is a place for it."""
        try:
            return numba.njit(nogil=True, cache=True)(function)
        except RuntimeError:  # neither this folder nor one of the user's can be written
            return numba.njit(nogil=True)(function)

    @_compiled
    def _pass(source: Any, firsts: Any, weights: Any) -> Any:
        """Sums weighted rows: source uint8 [rows, n] to uint8 [count, n]."""
        count, taps = weights.shape
        n = source.shape[1]
        target = np.empty((count, n), np.uint8)
        sums = np.empty(n, np.int32)
        for i in range(count):
            sums[:] = 1 << (BITS - 1)
            for k in range(taps):
                weight = weights[i, k]
                if weight != 0:
                    row = source[firsts[i] + k]
                    for j in range(n):
                        sums[j] += weight * np.int32(row[j])
            out = target[i]
            for j in range(n):
                out[j] = np.uint8(min(max(sums[j] >> BITS, 0), 255))
        return target

    @_compiled
    def _resample(source: Any, columns: Any, across: Any, rows: Any, down: Any) -> Any:
        """Resamples uint8 [W, H, 3] to uint8 [rows, columns, 3]."""
        low = rows[0]
        high = min(rows[-1] + down.shape[1], source.shape[1])
        part = np.ascontiguousarray(source[:, low:high])
        narrow = _pass(part.reshape(part.shape[0], -1), columns, across)
        count, height = len(columns), high - low
        turned = np.empty((height, count * 3), np.uint8)
        for i in range(count):
            for j in range(height):
                for c in range(3):
                    turned[j, 3 * i + c] = narrow[i, 3 * j + c]
        return _pass(turned, rows - low, down).reshape(len(rows), count, 3)
