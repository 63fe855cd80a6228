"""What the copy engine reads and writes: tensor maps in tile and im2col mode (PTX ISA 8.0, 5.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def _check(tensor: Array, box: Sequence[int]) -> None:
    """Refuses what the driver refuses (cuTensorMapEncodeTiled).

    Raises:
        ValueError: If strides are no multiples of 16 bytes, or the box has more than 256 numbers
            along an axis.
    """
    if tensor.strides[-1] != tensor.itemsize or any(step % 16 for step in tensor.strides[:-1]):
        raise ValueError(f"a tensor map's strides are multiples of 16 bytes, not {tensor.strides}")
    if max(box) > 256:
        raise ValueError(f"a copy has at most 256 numbers along an axis, not {max(box)}")


class Tiled:
    """A box of a dense tensor; outside it is zero. `box` has the tensor's axes' order."""

    def __init__(self, tensor: Array, box: Sequence[int]):
        _check(tensor, box)
        self.tensor, self.box = tensor, tuple(box)
        self.bytes = int(np.prod(self.box)) * tensor.itemsize
        self.row = self.box[-1] * tensor.itemsize

    def _parts(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        ours, theirs = [], []
        # Coordinates come with the last axis first.
        for start, length, size in zip(at[::-1], self.box, self.tensor.shape, strict=True):
            low, high = max(start, 0), max(min(start + length, size), max(start, 0))
            ours.append(slice(low - start, high - start))
            theirs.append(slice(low, high))
        return tuple(ours), tuple(theirs)

    def read(self, at: Sequence[int], _: Sequence[int] = ()) -> Array:
        """Reads the box at these coordinates: [rows, bytes]."""
        out = np.zeros(self.box, self.tensor.dtype)
        ours, theirs = self._parts(at)
        out[ours] = self.tensor[theirs]
        return out.reshape(-1, self.box[-1]).view(np.uint8)

    def write(self, at: Sequence[int], rows: Array) -> None:
        """Writes the part of the box that is in the tensor.

        Raises:
            ValueError: If the box begins before the tensor: an H200 stops the kernel there.
        """
        if min(at) < 0:
            raise ValueError(f"a store of the copy engine at a negative coordinate: {tuple(at)}")
        ours, theirs = self._parts(at)
        self.tensor[theirs] = rows.view(self.tensor.dtype).reshape(self.box)[ours]


class Im2col:
    """Pixels of x[N, H, W, C], window by window (PTX ISA 8.0, 5.5.4 and 5.5.5)."""

    def __init__(
        self,
        tensor: Array,
        lower: tuple[int, int],
        upper: tuple[int, int],
        stride: tuple[int, int],
        pixels: int,
        channels: int,
    ):
        _check(tensor, (channels,))
        self.tensor, self.lower, self.upper, self.stride = tensor, lower, upper, stride
        self.pixels, self.channels = pixels, channels
        self.row = channels * tensor.itemsize
        self.bytes = pixels * self.row

    def read(self, at: Sequence[int], offsets: Sequence[int]) -> Array:
        """Reads the pixels from a window's corner on, at the tap `offsets` (column, row).

        Raises:
            ValueError: If the corner is outside of the windows' corners.
        """
        n_images, height, width, depth = self.tensor.shape
        c, w, h, n = at
        last_w, last_h = width - 1 + self.upper[0], height - 1 + self.upper[1]
        inside = self.lower[0] <= w <= last_w and self.lower[1] <= h <= last_h
        if n < n_images and not inside:
            raise ValueError(f"im2col: the corner ({h}, {w}) is outside of the box of pixels")
        out = np.zeros((self.pixels, self.channels), self.tensor.dtype)
        for row in out:
            x, y = w + offsets[0], h + offsets[1]
            if n < n_images and 0 <= x < width and 0 <= y < height:
                part = self.tensor[n, y, x, c : min(c + self.channels, depth)]
                row[: len(part)] = part
            w += self.stride[0]
            if w > last_w:
                w = self.lower[0]
                h += self.stride[1]
                if h > last_h:
                    h = self.lower[1]
                    n += 1
        return out.view(np.uint8)

    def write(self, at: Sequence[int], rows: Array) -> None:
        raise NotImplementedError("a store through an im2col map")
