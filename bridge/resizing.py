"""Resizing as ONNX means it: the matrix that makes a line of pixels longer or shorter.

https://onnx.ai/onnx/operators/onnx__Resize.html
"""

from __future__ import annotations

import math

import numpy as np

from maxvision.bridge.importer import Unsupported


def matrix(
    mode: str,
    size: int,
    out: int,
    scale: float,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
    extrapolation_value: float = 0.0,
) -> np.ndarray:
    """Makes the matrix [out, size] that resizes a line of ``size`` pixels.

    Args:
        mode: ``nearest``, ``linear`` or ``cubic``.
        size: Of the line, px.
        out: What it becomes, px.
        scale: By how much it grows; ``out`` is that, rounded.
        coordinate_transformation_mode: Where in the old line a new pixel lies.
        nearest_mode: Which pixel is the nearest.
        cubic_coeff_a: Of the cubic function.
        exclude_outside: Whether pixels beyond the ends weigh nothing; else they are the last ones.
        antialias: Whether a line that becomes shorter is averaged.
        extrapolation_value: Unused; of crops, which are unsupported.

    Raises:
        Unsupported: If coordinate_transformation_mode is ``tf_crop_and_resize`` or unknown.
    """
    if out == size and scale == 1:
        return np.eye(size)
    shrinks = min(scale, 1.0) if antialias and mode != "nearest" else 1.0
    made = np.zeros((out, size))
    for row in range(out):
        x = _coordinate(coordinate_transformation_mode, row, size, out, scale)
        if mode == "nearest":
            made[row, min(max(_nearest(nearest_mode, x), 0), size - 1)] = 1
            continue
        support = {"linear": 1, "cubic": 2}[mode] / shrinks
        taps = np.arange(math.floor(x - support) + 1, math.ceil(x + support))
        weights = _weights(mode, (taps - x) * shrinks, cubic_coeff_a)
        if exclude_outside:
            weights = np.where((taps >= 0) & (taps < size), weights, 0)
        if exclude_outside or antialias:
            weights = weights / weights.sum()
        np.add.at(made[row], taps.clip(0, size - 1), weights)
    return made


def _coordinate(mode: str, x: int, size: int, out: int, scale: float) -> float:
    """Finds the place in the old line of pixel ``x`` of the new one."""
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and out > 1):
        return (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return 0.0
    if mode == "half_pixel_symmetric":
        centre = size / 2 * (1 - out / (scale * size))
        return centre + (x + 0.5) / scale - 0.5
    if mode == "align_corners":
        return x * (size - 1) / (out - 1) if out > 1 else 0.0
    if mode == "asymmetric":
        return x / scale
    raise Unsupported(f"coordinate_transformation_mode {mode}")


def _nearest(mode: str, x: float) -> int:
    if mode == "floor":
        return math.floor(x)
    if mode == "ceil":
        return math.ceil(x)
    if mode == "round_prefer_ceil":
        return math.floor(x + 0.5)
    return math.ceil(x - 0.5)


def _weights(mode: str, distance: np.ndarray, a: float) -> np.ndarray:
    """Weighs pixels by their distance (Keys 1981, eq. 4, for cubics)."""
    x = np.abs(distance)
    if mode == "linear":
        return np.maximum(1 - x, 0)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
