"""Pillow's resize and a crop, to the bit, several times as fast: by vectors, and of the crop alone.

Pillow filters 8-bit pictures with weights in integers (2^-22), first along the rows, rounds to 8
bits, then along the columns (libImaging/Resample.c). Here the first pass multiplies the pixels of
``ROWS`` rows at once, a pixel's four bytes as Pillow stores them; the second one sums whole rows,
which numba turns into vector instructions by itself. Only the rows and columns of the crop are
computed. Without numba, or for another filter, Pillow does it. Servers and long runs over files
import this module; for a few pictures numba takes longer to import than it saves.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from maxvision.runtime.preprocess import LARGE, Pixels, Preprocess, Source, read_image

BITS = 22
"""Of the weights' fraction."""

ROWS = 4
"""That the first pass computes together: 16 numbers, a vector of AVX-512."""

numba: Any = import_module("numba") if find_spec("numba") else None


def prepare(preprocess: Preprocess, picture: Source) -> Pixels:
    """Turns a picture into levels [height, width, RGB], the same as ``preprocess`` does.

    Raises:
        ImageError: If the picture cannot be read.
    """
    image = read_image(picture, shortest=preprocess.shortest)
    cubic = preprocess.resample == Image.Resampling.BICUBIC
    if numba is None or not cubic or not isinstance(preprocess.resize, int):
        return preprocess(image)
    height, width = preprocess.scaled(image.height, image.width)
    left, top = (width - preprocess.width) // 2, (height - preprocess.height) // 2
    tall = image.height > 2 * image.width  # Pillow begins with the columns then
    if tall or min(left, top) < 0 or width * height > LARGE or image.height < ROWS:
        return preprocess(image)
    columns = _weights(image.width, width, left, preprocess.width)
    rows = _weights(image.height, height, top, preprocess.height)
    pixels = np.frombuffer(image.tobytes("raw", "RGBX"), np.uint32)
    levels: Pixels = _resample(pixels.reshape(image.height, image.width), *columns, *rows)
    return levels


@lru_cache(256)
def _weights(size: int, scaled: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes Pillow's bicubic weights of ``count`` of ``scaled`` places.

    Returns:
        The first place of the source that each reads, int32 [count], and the weights of all that it
        reads, int32 [count, taps]; zeros are added where there are fewer, within the source.
    """
    scale = size / scaled
    wide = max(scale, 1.0)
    support = 2.0 * wide
    centres = [(begin + i + 0.5) * scale for i in range(count)]
    ranges = [
        range(max(0, int(at - support + 0.5)), min(size, int(at + support + 0.5))) for at in centres
    ]
    taps = max(map(len, ranges))
    firsts = np.zeros(count, np.int32)
    weights = np.zeros((count, taps), np.int32)
    for i, (centre, places) in enumerate(zip(centres, ranges, strict=True)):
        each = [_cubic((place - centre + 0.5) * (1.0 / wide)) for place in places]
        total = 0.0
        for weight in each:
            total += weight
        firsts[i] = first = min(places.start, size - taps)
        for k, weight in enumerate(each, places.start - first):
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

    @numba.extending.intrinsic
    def _dot(
        typing: Any, source: Any, weights: Any, target: Any, first: Any, at: Any, taps: Any, to: Any
    ) -> Any:
        """Sums weighted pixels along ``ROWS`` rows, from ``first`` on in each: a pixel of each row.

        LLVM finds no vectors in a loop over a pixel's four bytes, so they are written down.
        ``source`` and ``target`` are uint32 [H, W], ``weights`` int32, read from ``at`` on.
        """
        from llvmlite import ir
        from numba.core import cgutils, types

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def array(i: int) -> Any:
                return context.make_array(signature.args[i])(context, builder, values[i])

            def row(i: int, start: Any) -> list[Any]:
                width = builder.extract_value(array(i).shape, 1)
                begins = [builder.gep(array(i).data, [start])]
                while len(begins) < ROWS:
                    begins.append(builder.gep(begins[-1], [width]))
                return begins

            first, at, taps, to = values[3:]
            bit32, lanes = ir.IntType(32), 4 * ROWS
            wide, narrow = ir.VectorType(bit32, lanes), ir.VectorType(ir.IntType(8), lanes)
            pixels = ir.VectorType(bit32, ROWS)
            none, least, most = (ir.Constant(wide, [n] * lanes) for n in (0, 0, 255))
            sources, targets = row(0, first), row(2, to)
            weight = builder.gep(array(1).data, [at])
            sums = cgutils.alloca_once_value(builder, ir.Constant(wide, [1 << (BITS - 1)] * lanes))
            with cgutils.for_range(builder, taps) as loop:
                some = ir.Constant(pixels, ir.Undefined)
                for i, begin in enumerate(sources):
                    pixel = builder.load(builder.gep(begin, [loop.index]))
                    some = builder.insert_element(some, pixel, bit32(i))
                factor = builder.insert_element(
                    none, builder.load(builder.gep(weight, [loop.index])), bit32(0)
                )
                product = builder.mul(
                    builder.zext(builder.bitcast(some, narrow), wide),
                    builder.shuffle_vector(factor, none, none),
                )
                builder.store(builder.add(builder.load(sums), product), sums)
            levels = builder.ashr(builder.load(sums), ir.Constant(wide, [BITS] * lanes))
            levels = builder.select(builder.icmp_signed("<", levels, least), least, levels)
            levels = builder.select(builder.icmp_signed(">", levels, most), most, levels)
            some = builder.bitcast(builder.trunc(levels, narrow), pixels)
            for i, place in enumerate(targets):
                builder.store(builder.extract_element(some, bit32(i)), place)
            return context.get_dummy_value()

        places = [types.intp] * 4
        return types.void(source, weights, target, *places), codegen

    @_compiled
    def _resample(source: Any, columns: Any, across: Any, rows: Any, down: Any) -> Any:
        """Resamples pixels of four bytes, uint32 [H, W], to uint8 [rows, columns, 3]."""
        low = rows[0]
        high = rows[-1] + down.shape[1]
        low = max(0, min(low, high - ROWS))
        count, width = len(columns), source.shape[1]
        narrow = np.empty((high - low, count), np.uint32)
        for begin in range(low, high, ROWS):
            y = min(begin, high - ROWS)  # the last ones overlap
            for x in range(count):
                at = x * across.shape[1]
                to = (y - low) * count + x
                _dot(source, across, narrow, y * width + columns[x], at, across.shape[1], to)
        part = _pass(narrow.view(np.uint8), rows - low, down)
        levels = np.empty((len(rows), count, 3), np.uint8)
        for y in range(len(rows)):
            for x in range(count):
                for channel in range(3):
                    levels[y, x, channel] = part[y, 4 * x + channel]
        return levels
